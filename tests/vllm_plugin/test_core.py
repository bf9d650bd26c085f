"""What the plug-in for vLLM does without vLLM: settings, counts, positions. The rest is beside it, and needs vLLM."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import zoo

from mmaccel import MmaccelError, UnsupportedError, accelerate_vlm
from mmaccel.cli import doctor, main
from mmaccel.families import described, families, family_of
from mmaccel.integrations import vllm
from mmaccel.integrations.vllm import ARCHITECTURES, checks, digits
from mmaccel.integrations.vllm.architectures import joined
from mmaccel.integrations.vllm.model import ReducedModel
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.positions import Place, expanded, filled_in, provisional
from mmaccel.integrations.vllm.settings import Settings, as_integers, from_integers, settings_of
from mmaccel.method import ProjectorMethod
from mmaccel.method.registry import methods
from mmaccel.recipe import recipe, recipes
from mmaccel.runtime.encoded import Encoded
from mmaccel.runtime.taps import Taps

QWEN, LLAVA = (ARCHITECTURES[f"{name}ForConditionalGeneration"] for name in ("Qwen2_5_VL", "Llava"))


class Config:
    """A configuration with what hf_overrides put there."""

    def __init__(self, **given):
        self.mmaccel = given


@functools.cache
def config(family: str):
    return zoo.model(family).config


def plan(family: str, which, **overrides) -> ServingPlan:
    return ServingPlan(
        Settings(recipe(which, **overrides)), config(family), QWEN if family.startswith("qwen") else LLAVA
    )


# ------------------------------------------------------------------------------------------------------------- digits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_positions_travel_exactly(dtype):
    # every frame of an hour of video at 24 a second, and the ends of the range
    positions = torch.cat([torch.arange(24 * 3600), torch.tensor([digits.BASE**digits.DIGITS - 1])]).repeat(
        digits.NUMBERS, 1
    )
    positions[1] = positions[1].flip(0)
    written = digits.written(positions, dtype)
    assert written.dtype == dtype and written.shape == (positions.shape[1], digits.CHANNELS)
    assert torch.equal(digits.read(written), positions)
    assert not torch.equal(positions[0].to(torch.bfloat16).long(), positions[0]), "one channel would do"


def test_positions_out_of_range_are_refused():
    for wrong in (-1, digits.BASE**digits.DIGITS):
        with pytest.raises(ValueError, match="can be written"):
            digits.written(torch.full((digits.NUMBERS, 1), wrong), torch.float32)


# ---------------------------------------------------------------------------------------------------------- positions
def mrope(lengths: list[tuple[str, tuple[int, int, int]]], step: int = 1) -> tuple[torch.Tensor, list[slice]]:
    """Positions of text (t, n, ...) and pictures of a grid, as Qwen's; and where the pictures are."""
    parts, at, start, done = [], [], 0, 0
    for kind, (t, h, w) in lengths:
        if kind == "text":
            part = torch.arange(t).repeat(3, 1)
        else:
            part = torch.cartesian_prod(torch.arange(t) * step, torch.arange(h), torch.arange(w)).T
            at.append(slice(done, done + part.shape[1]))
        parts.append(part + start)
        start, done = int(parts[-1].max()) + 1, done + part.shape[1]
    return torch.cat(parts, 1), at


@pytest.mark.parametrize("tail", [5, 0])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_kept_tokens_and_text_stand_where_they_stood(chunk, tail):
    shape = [("text", (4, 1, 1)), ("picture", (1, 8, 2)), ("text", (3, 1, 1)), ("picture", (3600, 2, 2))]
    whole, at = mrope([*shape, *([("text", (tail, 1, 1))] if tail else [])], step=2)
    assert int(whole.max()) > 7000
    stays = torch.ones(whole.shape[1], dtype=torch.bool)
    for seed, part in enumerate(at):
        generator = torch.Generator().manual_seed(seed)
        stays[part] = torch.rand(part.stop - part.start, generator=generator) < 0.01
        # the last token of a prompt that ends in a picture goes
        stays[part.stop - 1] = tail > 0
        stays[part.start] = not tail
    visual = torch.zeros_like(stays)
    for part in at:
        visual[part] = True
    reduced = [9 if v else i for i, v in enumerate(visual.tolist()) if stays[i]]
    left = visual[stays]
    places = []
    for part in at:
        start = int(stays[: part.start].sum())
        run = left[start : start + int(stays[part].sum())]
        places.append(Place.of_one_run(start, reduced[start : start + len(run)], run, part.stop - part.start))
    tokens, starts = expanded(reduced, places)
    assert len(tokens) == whole.shape[1] and starts == [part.start for part in at]
    made = provisional(whole, places, starts, [0, 0])
    positions, behind = made[:, :-1], int(whole.max()) + 1
    assert made[:, -1].tolist() == [behind] * 3
    text = ~left
    assert torch.equal(positions[:, text], whole[:, stays][:, text])
    assert int(positions[:, left].max()) < 0

    rows = torch.cat([_rows(whole, part, stays) for part in at], 1)
    for again in range(2):  # the second time is a request that was preempted
        for start in range(0, positions.shape[1], chunk):
            first, window = int(left[:start].sum()), int(left[start : start + chunk].sum())
            if window:
                positions, said = filled_in(positions, left, start, rows[:, first : first + window])
        assert torch.equal(positions, whole[:, stays]), again
        assert said == (behind - tail)


def _rows(whole: torch.Tensor, part: slice, stays: torch.Tensor) -> torch.Tensor:
    """What comes with the tokens that stay of a picture."""
    from_its_start = whole[:, part] - whole[0, part.start]
    behind = from_its_start.new_full((1, from_its_start.shape[1]), int(from_its_start.max()) + 1)
    return torch.cat([from_its_start, behind])[:, stays[part]]


@pytest.mark.parametrize("tail", [3, 0])
def test_both_runners_of_vllm_are_told_the_same_positions(tail):
    """One asks at every step, with what it was given before; the other where there are embeddings, without the last column."""
    whole, (part,) = mrope([("text", (2, 1, 1)), ("picture", (1, 4, 6)), *([("text", (tail, 1, 1))] if tail else [])])
    stays = torch.ones(whole.shape[1], dtype=torch.bool)
    stays[part] = torch.arange(24) % 5 == 1
    served = object.__new__(ReducedModel)
    served.plan = plan("qwen2_5_vl", "divprune", retain=0.25)
    token, count = served.plan.placeholder("image"), int(stays[part].sum())
    ids = [1, 1] + [token] * count + [1] * tail
    place = Place.of_one_run(2, [token] * count, torch.ones(count, dtype=torch.bool), 24)
    made = provisional(whole, [place], [2], [0])
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([features, digits.written(_rows(whole, part, stays), torch.float32)], 1)
    next_less_n = int(whole.max()) + 1 - len(ids)

    parts, filled, delta = served.recompute_mrope_positions(ids, [rows[:2]], made, 0)
    parts, filled, delta = served.recompute_mrope_positions(ids, [rows[2:]], filled, 4)
    assert torch.equal(parts[0], features[2:]) and torch.equal(filled[:, :-1], whole[:, stays]) and delta == next_less_n
    assert served.recompute_mrope_positions(ids, [], filled, len(ids))[2] == next_less_n

    _, narrow, delta = served.recompute_mrope_positions(torch.tensor(ids), [rows], made[:, :-1].int().long(), 0)
    assert torch.equal(narrow, whole[:, stays]) and delta == next_less_n


def test_text_may_be_numbered_as_transformers_numbers_it():
    whole, (part,) = mrope([("text", (2, 1, 1)), ("picture", (6, 2, 2)), ("text", (3, 1, 1))], step=4)
    place = Place.of_one_run(2, [9, 9], torch.ones(2, dtype=torch.bool), 24)
    ahead = int(whole[0, part].max() - whole[1:, part].max())
    assert provisional(whole, [place], [2], [ahead])[0].tolist() == [0, 1, -3, -3, 4, 5, 6, 7]


# ------------------------------------------------------------------------------------------------------------- counts
#: methods between tower and language model, without those that other tests have registered
BEFORE = sorted(
    name
    for name, kind in methods().items()
    if issubclass(kind, ProjectorMethod) and kind.__module__.startswith("mmaccel.")
)


def inputs(family: str):
    kind = "video" if family.startswith("qwen") else "image"
    given = zoo.inputs(family, kind)
    ours = "pixel_values_videos" if kind == "video" else "pixel_values"
    grids = {name: given[name] for name in given if name.endswith("grid_thw") and name.startswith(kind)}
    return kind, given, {ours: given[ours], **grids}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_counts_are_those_of_transformers(family):
    kind, given, arguments = inputs(family)
    model, served, limits = zoo.model(family), [], []
    for name in BEFORE:
        try:
            ours = plan(family, name, retain=0.3)
        except UnsupportedError:
            continue
        before = int(ours.family.visual(given["input_ids"]).sum())
        pictures = ours.pictures(kind, arguments, before)
        kept = [ours.count(kind, picture, None) for picture in pictures]
        assert sum(one.before for one in kept) == before
        accelerate_vlm(model, name, retain=0.3)
        with torch.no_grad():
            model(**given)
        theirs = model.mmaccel.stats().visual_tokens_kept
        total = sum(one.total for one in kept)
        # rows of the batch may share their pictures
        if methods()[name]().fit(ours.family).foreseen == "limit":
            limits.append(name)
            assert theirs <= total, name
        else:
            assert theirs == total, name
        served.append(name)
    kinds = {"divprune", "pool", "dycoke-ttm", "moviechat"}  # by choice: one of each kind
    assert len(served) > 8 and kinds <= set(served)
    # by choice: those whose clips decide
    assert set(limits) <= {"fastvid", "progressive-pool", "streamvln"}


@pytest.mark.parametrize("which", ["divprune", "visionzip", "pool", "vtc-cls"])  # by choice: one of each kind
def test_what_stays_is_what_transformers_keeps(which, monkeypatch):
    """One ragged batch with budgets resolved from the configuration, against the prefill of transformers."""
    _, given, arguments = inputs("llava")
    taps, signals = {}, Taps.signals

    def noted(self, wanted, encoded, units):
        taps.update(encoded["image"].taps)
        return signals(self, wanted, encoded, units)

    monkeypatch.setattr(Taps, "signals", noted)
    model = accelerate_vlm(zoo.model("llava"), which, retain=0.3)
    with torch.no_grad():
        model(**given)
    layout, reduction = model.mmaccel.layout, model.mmaccel.reduction
    model.mmaccel.remove()
    with torch.no_grad():
        features = model.get_image_features(pixel_values=given["pixel_values"]).pooler_output
    ours = plan("llava", which, retain=0.3)
    rows = [row for one in features for row in (one if one.dim() == 3 else one[None])]
    pictures = ours.pictures("image", arguments, sum(map(len, rows)))
    kept = [ours.count("image", picture, None).total for picture in pictures]
    made = ours.reduce(
        "image", pictures, rows, kept, None, Encoded(dict(arguments), 0, taps), Taps(ours.family, ours.wanted)
    )
    for segment, (row, stays) in zip(layout.segments, made, strict=True):
        assert torch.equal(stays, reduction.kept[segment.row, segment.places])
        assert row.shape == (int(stays.sum()), rows[0].shape[1])
    assert len(made) == len(layout.segments)


def test_two_budgets_of_one_picture():
    ours = plan("qwen2_5_vl", "divprune", retain=0.25)
    (picture,) = ours.pictures("image", {"image_grid_thw": torch.tensor([[1, 16, 16]])}, 64)
    assert [ours.count("image", picture, retain).total for retain in (None, 0.1, 20, 1.0)] == [16, 6, 20, 64]
    with pytest.raises(MmaccelError, match="only 64"):
        ours.count("image", picture, 65)


def test_a_budget_that_is_left_over_is_filled_up():
    ours = plan("qwen2_5_vl", "fastvid", retain=0.3)
    grid = {"video_grid_thw": torch.tensor([[4, 16, 16]])}
    (picture,) = ours.pictures("video", grid, 256)
    kept = ours.count("video", picture, None).total
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    # the attention of one layer, which the tower delivers frame by frame
    taps = {("received_attention", ours.family.tap_layer(None)): [torch.rand(1, 256) for _ in range(4)]}
    ((row, stays),) = ours.reduce(
        "video", [picture], [rows], [kept], None, Encoded(grid, 256, taps), Taps(ours.family, ours.wanted)
    )
    assert len(row) == int(stays.sum()) == kept == 77


# ----------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("retain", [0.1, 0.25, 1.0, 1 / 3, 0.29, 1e-9, 64, None])
def test_budgets_travel_exactly(retain):
    found = from_integers(*torch.tensor(as_integers(retain)).tolist())
    assert found == retain and type(found) is type(retain)


@pytest.mark.parametrize("retain", [0, -0.5, 1.5, "much", True, float("nan"), 1e-30])
def test_a_request_s_bad_budget_is_refused(retain):
    with pytest.raises(MmaccelError, match="retain="):
        as_integers(retain)


def test_without_settings_there_is_nothing_to_do():
    assert settings_of(object()) is None
    assert settings_of(Config(recipe="divprune", retain=0.1, numbering="transformers")) == Settings(
        recipe("divprune", retain=0.1), "transformers"
    )
    one, two = (settings_of(Config(recipe="divprune", retain=r)).fingerprint() for r in (0.1, 0.2))
    assert one != two


@pytest.mark.parametrize(
    "given, said",
    [
        ({"recipe": "divprun"}, "did you mean 'divprune'"),
        ({"retain": 0.1}, "needs an object with a recipe"),
        ({"recipe": "divprune", "retain": 2.5}, "outside"),
        ({"recipe": "divprune", "numbering": "mine"}, "numbering='mine'"),
        ({"recipe": "divprune", "layer": 3}, "no option"),
        ({"recipe": "divprune", "proportional": "all"}, "proportional='all' gives keys weights"),
    ],
)
def test_bad_settings_are_one_sentence(given, said):
    with pytest.raises(MmaccelError, match=said):
        settings_of(Config(**given))


def test_every_recipe_is_served_or_refused_in_one_sentence():
    refused = {}
    for name in recipes():
        try:
            plan("llava", name)
        except MmaccelError as error:
            refused[name] = str(error)
    assert {"fastv", "snapkv", "kivi", "tome", "cdpruner", "prumerge"} <= set(refused)  # by choice: one of each reason
    served = {"divprune", "visionzip", "vtc-cls", "uniform", "none", "hired"}  # by choice: of each kind that is served
    assert not served & set(refused)
    for name, said in refused.items():
        assert said.endswith(".") and "\n" not in said and len(said) < 330, (name, said)
    assert (
        "language model" in refused["fastv"] and "KV cache" in refused["snapkv"] and "question" in refused["cdpruner"]
    )


def test_layers_that_vllm_does_not_build_are_refused():
    with pytest.raises(UnsupportedError, match="vLLM builds it only up to"):
        plan("llava", "vtc-cls", layers=(-1,))


# --------------------------------------------------------------------------------------------------------------- seams
def test_items_of_a_call_come_apart_and_together_again():
    pixels = torch.randn(4 + 16 + 8, 3)
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4], [1, 2, 4]])}
    items = QWEN.items(given)
    assert [len(item["pixel_values"]) for item in items] == [4, 16, 8] and len(items[1]["image_grid_thw"]) == 1
    again = joined(items)
    assert all(torch.equal(again[name], given[name]) for name in given)
    assert QWEN.modality(given) == "image" and QWEN.modality({"pixel_values_videos": pixels}) == "video"
    ragged = {"pixel_values": [torch.zeros(1, 3), torch.zeros(2, 3)]}
    assert [len(x) for x in joined(LLAVA.items(ragged))["pixel_values"]] == [1, 2]


def test_names_of_newer_checkpoints():
    rename = LLAVA.rename
    assert rename("vision_tower.encoder.layers.0.x") == "vision_tower.vision_model.encoder.layers.0.x"
    assert rename("model.vision_tower.embeddings.y") == "model.vision_tower.vision_model.embeddings.y"
    for name in ("vision_tower.vision_model.encoder.x", "language_model.encoder.x", "lm_head.weight"):
        assert rename(name) == name


@pytest.mark.parametrize("name", [name for name in families() if name in zoo.FAMILIES])
def test_a_description_knows_what_the_model_knows(name):
    model = zoo.model(name)
    whole, told = family_of(model), described(model.config)
    for fact in ("tower_depth", "feature_layer", "has_cls", "deepstack"):
        assert getattr(whole, fact) == getattr(told, fact), fact
    assert told.towers() == []


def test_nothing_of_it_is_imported_by_the_package():
    code = "import sys, mmaccel; print([name for name in sys.modules if 'vllm' in name])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "found, loads, said",
    [
        ("0.32.4", True, "0.32.4 loads the plug-in mmaccel"),
        ("0.32.4", False, "DOES NOT load the plug-in mmaccel"),
        ("0.40.0", True, "IS NOT a tested version"),
        (None, True, None),
    ],
)
def test_doctor_says_whether_recipes_can_be_served(found, loads, said, monkeypatch, capsys):
    monkeypatch.setattr(checks, "version", lambda: found)
    monkeypatch.setattr(vllm, "version", lambda: found)
    monkeypatch.setenv("VLLM_PLUGINS", "mmaccel" if loads else "another")
    point = EntryPoint("mmaccel", "mmaccel.integrations.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == point.group else [])
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    if said is None:
        assert report["vllm"] is None and "vLLM" not in doctor.render(report)
        return
    assert report["vllm"]["architectures"] == list(ARCHITECTURES) and said in doctor.render(report)
    assert any("vLLM" in problem for problem in report["problems"]) == (not loads or found == "0.40.0")


def test_the_entry_point_names_a_function():
    text = (Path(vllm.__file__).parents[3] / "pyproject.toml").read_text()
    point = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]["mmaccel"]
    assert EntryPoint("mmaccel", point, "vllm.general_plugins").load() is vllm.register
