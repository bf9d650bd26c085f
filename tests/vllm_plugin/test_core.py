"""What the plug-in for vLLM does without vLLM: settings, counts, positions. The rest is beside it, and needs vLLM."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import zoo

from mmaccel import MmaccelError, UnsupportedError, __version__, accelerate_vlm
from mmaccel.cli import doctor, main
from mmaccel.families import described, families, family_of
from mmaccel.integrations import vllm
from mmaccel.integrations.vllm import ARCHITECTURES, checks, counters, digits, models, processor, tower
from mmaccel.integrations.vllm.architectures import REFUSED, joined
from mmaccel.integrations.vllm.counters import Counters
from mmaccel.integrations.vllm.model import Item, ReducedModel, in_parts
from mmaccel.integrations.vllm.plan import Kept, ServingPlan
from mmaccel.integrations.vllm.positions import Place, expanded, filled_in, provisional
from mmaccel.integrations.vllm.processor import FIELD, ReducedProcessor
from mmaccel.integrations.vllm.settings import (
    Settings,
    as_integers,
    from_integers,
    override_of,
    request_of,
    settings_of,
)
from mmaccel.method import ProjectorMethod
from mmaccel.method.registry import methods
from mmaccel.recipe import get_recipe, recipes
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower import token_groups
from mmaccel.runtime.tower.taps import Taps

QWEN, LLAVA = (ARCHITECTURES[f"{name}ForConditionalGeneration"] for name in ("Qwen2_5_VL", "Llava"))


@functools.cache
def config(family: str):
    return zoo.model(family).config


def plan(family: str, which, **overrides) -> ServingPlan:
    return ServingPlan(
        Settings(get_recipe(which, **overrides)), config(family), QWEN if family.startswith("qwen") else LLAVA
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
    assert set(limits) <= {"fastvid", "flashvid-merge", "progressive-pool", "streamvln"}


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
        "image", pictures, rows, kept, None, VisionOutput(dict(arguments), 0, taps), Taps(ours.family, ours.wanted)
    )
    for segment, (row, stays) in zip(layout.segments, made, strict=True):
        assert torch.equal(stays, reduction.kept[segment.row, segment.places])
        assert row.shape == (int(stays.sum()), rows[0].shape[1])
    assert len(made) == len(layout.segments)


def test_two_budgets_of_one_picture():
    ours = plan("qwen2_5_vl", "divprune", retain=0.25)
    (picture,) = ours.pictures("image", {"image_grid_thw": torch.tensor([[1, 16, 16]])}, 64)
    assert [ours.count("image", picture, retain).total for retain in (None, 0.1, 20, 1.0)] == [16, 6, 20, 64]


def test_a_count_above_what_a_picture_has_keeps_it_whole_and_says_so_once(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(processor._log, "warning", lambda text, *values: lines.append(text % values))
    served = object.__new__(ServedProcessor)
    for sides, budget, total in (((16, 16), 64, 64), ((8, 8), 64, 16), ((16, 8), 10**30, 32), ((16, 16), None, 16)):
        grid = SimpleNamespace(data=torch.tensor([1, *sides]))
        before = sides[0] * sides[1] // 4
        assert served._kept("image", {"image_grid_thw": grid}, before, budget).total == total
    assert len(lines) == 1 and "asked to keep 64 tokens and keeps all of" in lines[0]


def test_all_tokens_of_a_request_that_wants_the_bare_model():
    for which in ("divprune", "pool", "visionzip"):
        ours = plan("qwen2_5_vl", which, retain=0.25)
        grid = {"image_grid_thw": torch.tensor([[1, 16, 16]])}
        (picture,) = ours.pictures("image", grid, 64)
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        taps = Taps(ours.family, ours.wanted)
        ((row, stays),) = ours.reduce("image", [picture], [rows], [64], False, VisionOutput(grid, 64), taps)
        assert ours.count("image", picture, False).total == 64 and bool(stays.all()) and torch.equal(row, rows)


class Stock:
    """A model of vLLM: one picture of 8 x 8 tokens after the other."""

    def embed_multimodal(self, image_grid_thw):
        return [torch.randn(64, 8, generator=torch.Generator().manual_seed(i)) for i in range(len(image_grid_thw))]


class Served(ReducedModel, Stock):
    """With a recipe."""

    def __init__(self, which, **overrides):
        self.plan = plan("qwen2_5_vl", which, **overrides)
        self.taps, self.one_call = Taps(self.plan.family, self.plan.wanted), 1000


def test_budgets_of_one_call_that_are_equal_numbers_stay_apart():
    """One token of a picture, and all of it: 1 == 1.0."""
    served = Served("divprune", retain=0.25, positions="paper")
    for budgets in ((1, 1.0), (1.0, 1)):
        counts = [1 if isinstance(budget, int) else 64 for budget in budgets]
        items = [
            Item({"image_grid_thw": torch.tensor([[1, 16, 16]])}, budget, 64, count)
            for budget, count in zip(budgets, counts, strict=True)
        ]
        rows = served._embed("image", items)
        assert [len(row) for row in rows] == counts
        alone = [served._embed("image", [item])[0] for item in items]
        assert torch.equal(rows[0], alone[0]) and len(alone[1]) == counts[1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_patches_that_are_left_out_are_those_of_transformers(family):
    """The processor predicts them, item by item; the tower is told of all items of a call."""
    kind, given, arguments = inputs(family)
    pixels = next(name for name in arguments if name.startswith("pixel"))
    # patches of a packed sequence, or columns
    part = given[pixels][: len(given[pixels]) // 2] if kind == "video" else given[pixels][..., : 2 * 14]
    part.fill_(0.5)
    assert arguments[pixels] is given[pixels]
    model = accelerate_vlm(zoo.model(family), "pixelprune")
    seen, settle = {}, token_groups.settle

    def noted(plan, stats, layout, encoded, embeds):
        seen.update(encoded)
        return settle(plan, stats, layout, encoded, embeds)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(token_groups, "settle", noted)
        model(**given)
        merged = seen[kind].merged
    ours = plan(family, "pixelprune")
    before = int(ours.family.visual(given["input_ids"]).sum())
    total, sources = 0, []
    items = (QWEN if family.startswith("qwen") else LLAVA).items(arguments)
    for item in items:
        encoded = VisionOutput(item, before // len(items))
        sources.append(ours.predicted(encoded, item[pixels]))
        ours.leave_out(encoded, sources[-1:])
        (picture,) = ours.pictures(kind, item, encoded.tokens)
        total += ours.count(kind, picture, None, encoded).total
        assert ours.count(kind, picture, False, encoded).total == encoded.tokens
    assert total == model.mmaccel.stats().visual_tokens_kept < before
    together = VisionOutput(arguments, before)
    ours.leave_out(together, sources)
    assert together.merged is not None
    assert torch.equal(together.merged.place, merged.place) and torch.equal(together.merged.owner, merged.owner)


class Layer(torch.nn.Module):
    """One of vLLM's Qwen2.5-VL, which vLLM calls past hooks."""

    def __init__(self):
        super().__init__()
        self.norm2, self.mlp = Norm(), torch.nn.Linear(4, 4)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def forward(self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin):
        normed, whole = self.norm2(x, residual=x * rotary_pos_emb_cos[:, None])
        return whole + self.mlp(normed)


class Norm(torch.nn.Module):
    """A norm that adds, too."""

    def forward(self, x, residual=None):
        whole = x if residual is None else x + residual
        return whole / 2 if residual is None else (whole / 2, whole)


def test_hooks_on_layers_of_vllm_see_what_those_on_transformers_see():
    torch.manual_seed(0)
    layer, seen = Layer(), []
    x, cos, sin = torch.randn(6, 1, 4), torch.randn(6, 4), torch.randn(6, 4)
    arguments = {"cu_seqlens": torch.tensor([0, 6]), "rotary_pos_emb_cos": cos, "rotary_pos_emb_sin": sin}
    bare = layer(x, **arguments)
    outside, norm = tower.PackedModule(layer), tower.AddingNorm(layer.norm2)

    def enter(module, args, kwargs):
        assert set(kwargs) == {"cu_seqlens", "position_embeddings"} and args[0].shape == (6, 4)
        halves = tuple(part[::2] for part in kwargs["position_embeddings"])
        return (args[0][::2],), {**kwargs, "position_embeddings": halves}

    def between(module, args):
        seen.append(args[0])
        return (args[0][:2],)

    outside.register_forward_pre_hook(enter, with_kwargs=True)
    outside.register_forward_hook(lambda module, args, output: output.repeat_interleave(2, 0))
    norm.register_forward_pre_hook(between)
    tower.PackedModule(layer.mlp).register_forward_hook(lambda module, args, output: output[[0, 1, 1]])
    made = layer(x, **arguments)
    assert torch.equal(seen[0], (x + x * cos[:, None])[::2, 0])
    assert made.shape == (6, 1, 4) and torch.equal(made[0], made[1]) and torch.allclose(made[0], bare[0])
    assert torch.allclose(made[2], bare[2]) and not torch.allclose(made[4], bare[4])
    assert torch.allclose(made[4] - seen[0][2:], made[2] - seen[0][1:2])


def test_items_with_budgets_of_their_own_are_merged_in_calls_of_their_own():
    items = [Item({}, budget, 10, 5) for budget in (None, 0.5, 0.5, None, 1, 1.0)]
    assert [len(part) for part in in_parts(items, 1000, by_budget=True)] == [1, 2, 1, 1, 1]
    assert [len(part) for part in in_parts(items, 1000, by_budget=False)] == [6]
    assert [len(part) for part in in_parts(items, 30, by_budget=False)] == [3, 3]


@pytest.mark.parametrize(
    "which, options, said",
    [
        ("stc-cacher", {}, "frames of a clip inside the vision tower, which is not tested"),
        ("earlytom", {}, "frames of a clip inside the vision tower, which is not tested"),
        ("ipcv", {"variant": "official"}, "those of several requests; leave it out"),
        (["pixelprune", "pool"], {}, "follows the grid of a picture, of which pixelprune leaves a part"),
    ],
)
def test_what_cannot_work_inside_the_tower_is_one_sentence(which, options, said):
    with pytest.raises(UnsupportedError, match=said) as error:
        plan("qwen2_5_vl", which, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["Glm4v", "Mistral3", "PaddleOCRVL", "Lfm2Vl"])  # by choice: towers of several makers
@pytest.mark.parametrize("which", ["pixelprune", "tome", "ipcv"])
def test_towers_that_are_not_tested_are_closed_to_methods_inside(which, name):
    architecture = ARCHITECTURES[f"{name}ForConditionalGeneration"]
    with pytest.raises(UnsupportedError, match="works inside the vision tower, which is not tested"):
        ServingPlan(Settings(get_recipe(which)), config("qwen2_5_vl"), architecture)


def test_a_llava_with_the_tower_of_pixtral_is_closed_to_them():
    with pytest.raises(UnsupportedError, match="not tested with this one in vLLM"):
        ServingPlan(Settings(get_recipe("tome")), config("pixtral"), LLAVA)


def test_a_budget_that_is_left_over_is_filled_up():
    ours = plan("qwen2_5_vl", "fastvid", retain=0.3)
    grid = {"video_grid_thw": torch.tensor([[4, 16, 16]])}
    (picture,) = ours.pictures("video", grid, 256)
    kept = ours.count("video", picture, None).total
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    # the attention of one layer, which the tower delivers frame by frame
    taps = {("received_attention", ours.family.tap_layer(None)): [torch.rand(1, 256) for _ in range(4)]}
    ((row, stays),) = ours.reduce(
        "video", [picture], [rows], [kept], None, VisionOutput(grid, 256, taps), Taps(ours.family, ours.wanted)
    )
    assert len(row) == int(stays.sum()) == kept == 77


# ----------------------------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("retain", [0.1, 0.25, 1.0, 1 / 3, 0.29, 1e-9, 64, 1, None, False])
def test_budgets_travel_exactly(retain):
    found = from_integers(*torch.tensor(as_integers(retain)).tolist())
    assert found == retain and type(found) is type(retain)


@pytest.mark.parametrize("retain", [0, -0.5, 1.5, "much", True, float("nan"), 1e-30])
def test_a_request_s_bad_budget_is_refused(retain):
    with pytest.raises(MmaccelError, match="retain="):
        as_integers(retain)


def test_settings_of_an_override():
    assert settings_of({"recipe": "divprune", "retain": 0.1, "numbering": "transformers"}) == Settings(
        get_recipe("divprune", retain=0.1), "transformers"
    )
    one, two = (settings_of({"recipe": "divprune", "retain": r}).fingerprint() for r in (0.1, 0.2))
    assert one != two


@pytest.mark.parametrize(
    "given, said",
    [
        ({"recipe": "divprun"}, "did you mean 'divprune'"),
        ({"retain": 0.1}, "needs an object with a recipe"),
        ({"recipe": "divprune", "retain": 2.5}, "outside"),
        ({"recipe": "divprune", "retain": {"clip": 0.1}}, "one for 'video', got 'clip'"),
        ({"recipe": "divprune", "retain": {"video": 0}}, "retain of video=0 keeps no token"),
        ({"recipe": "none", "retain": {"video": 0.1}}, "retain=0.1 has no meaning"),
        ({"recipe": "divprune", "numbering": "mine"}, "numbering='mine'"),
        ({"recipe": "divprune", "layer": 3}, "is not an option"),
        ({"recipe": "divprune", 3: 4}, "is not an option"),
        ({"recipe": "divprune", "proportional": "all"}, "proportional='all' gives keys weights"),
        ({"recipe": "divprune", "chunk": 64}, "chunk=64 is for transformers, and vLLM cuts prompts itself"),
        ("divprune", "needs an object with a recipe"),
        (False, "needs an object with a recipe"),
    ],
)
def test_bad_settings_are_one_sentence(given, said):
    with pytest.raises(MmaccelError, match=said):
        settings_of(given)


class ModelConfig:
    """vLLM's, with overrides written into the checkpoint's configuration as vLLM does."""

    config_updated = False

    def __init__(self, hf_overrides, **checkpoint):
        self.hf_overrides, self.hf_config = hf_overrides, SimpleNamespace(**checkpoint)
        if callable(hf_overrides):
            self.hf_config = hf_overrides(self.hf_config)
        else:
            vars(self.hf_config).update(hf_overrides)


def _asks(config):
    config.mmaccel = {"recipe": "divprune"}
    return config


def _runs_once(config):
    config.mmaccel = {"recipe": config.__dict__.pop("once")}
    return config


ASKED = {"recipe": "divprune"}


@pytest.mark.parametrize(
    "overrides, checkpoint, found",
    [
        ({}, {}, None),
        ({"mmaccel": ASKED}, {}, ASKED),
        ({"mmaccel": ASKED}, {"mmaccel": {"recipe": "snapkv"}}, ASKED),
        ({"mmaccel": None}, {"mmaccel": {"recipe": "snapkv"}}, None),
        ({}, {"mmaccel": {"recipe": "snapkv"}}, None),
        (_asks, {}, ASKED),
        (_asks, {"mmaccel": {"recipe": "snapkv"}}, ASKED),
        (lambda config: config, {}, None),
        (lambda config: config, {"mmaccel": {"recipe": "snapkv"}}, None),
        (_runs_once, {"once": "divprune"}, ASKED),
    ],
)
def test_only_the_caller_asks_for_a_recipe(overrides, checkpoint, found):
    """Overrides are found in the process that makes the configuration, and in those that it is sent to."""
    config = ModelConfig(overrides, **checkpoint)
    assert override_of(config) == found
    if not callable(overrides):
        assert override_of(pickle.loads(pickle.dumps(config))) == found
    assert override_of(object()) is None and override_of(SimpleNamespace(hf_config=None)) is None


class FromCheckpoint:
    """A configuration with code of its own."""

    def __getattr__(self, name):
        raise KeyError(name)


def test_a_configuration_that_fails_is_none_of_ours(stub):
    lines, configuration, _ = stub()
    config = SimpleNamespace(hf_config=FromCheckpoint(), hf_overrides={})
    assert override_of(config) is None and configuration(config).updated and not lines


@pytest.mark.parametrize(
    "processing, budget",
    [
        ({}, None),
        ({"retain": None}, None),
        ({"mmaccel": None}, None),
        ({"mmaccel": True}, None),
        ({"mmaccel": {}}, None),
        ({"retain": 0.1}, 0.1),
        ({"mmaccel": {"retain": 0.1}}, 0.1),
        ({"mmaccel": {"retain": 64}, "max_pixels": 100}, 64),
        ({"mmaccel": False}, False),
    ],
    ids=str,
)
def test_a_request_s_budget(processing, budget):
    found = request_of(processing)
    assert found == dict.fromkeys(("image", "video"), budget) and type(found["image"]) is type(budget)


@pytest.mark.parametrize("spelled", [lambda retain: {"retain": retain}, lambda retain: {"mmaccel": {"retain": retain}}])
def test_a_request_s_budgets_of_pictures_and_clips(spelled):
    assert request_of(spelled({"image": 64, "video": 0.1})) == {"image": 64, "video": 0.1}
    assert request_of(spelled({"video": 0.1, "image": None})) == {"image": None, "video": 0.1}
    assert request_of(spelled({})) == {"image": None, "video": None}
    assert given(**spelled({"video": 0.1})) == {FIELD: {"image": (0, 0), "video": (1, 10)}}


def test_a_server_s_budgets_of_pictures_and_clips():
    served = settings_of({"recipe": "divprune", "retain": {"image": 1.0, "video": 0.125}})
    assert served.fingerprint() != settings_of({"recipe": "divprune", "retain": {"image": 1.0}}).fingerprint()
    ours = ServingPlan(served, config("qwen2_5_vl"), QWEN)
    grids = {m: {f"{m}_grid_thw": torch.tensor([[1 if m == "image" else 4, 16, 16]])} for m in ("image", "video")}
    for budget, kept in ((None, [64, 32]), (0.5, [32, 128]), (False, [64, 256])):
        pictures = [ours.pictures(m, grids[m], n)[0] for m, n in (("image", 64), ("video", 256))]
        found = [ours.count(m, picture, budget) for m, picture in zip(grids, pictures, strict=True)]
        assert [one.total for one in found] == kept
    rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    encoded, taps = VisionOutput(grids["video"], 256), Taps(ours.family, ours.wanted)
    assert len(ours.reduce("video", [pictures[1]], [rows], [32], None, encoded, taps)[0][0]) == 32
    with pytest.raises(UnsupportedError, match="retain of video has no effect"):
        ServingPlan(served, config("llava"), LLAVA)


@pytest.mark.parametrize(
    "processing, said",
    [
        ({"mmaccel": {"recipe": "uniform"}}, "can change 'retain' alone, got 'recipe'"),
        ({"mmaccel": {"retain": 0.1, "positions": "paper"}}, "got 'positions'"),
        ({"mmaccel": {"retian": 0.1}}, "got 'retian'"),
        ({"mmaccel": {1: 0.1}}, "got 1 in mmaccel"),
        ({"mmaccel": "divprune"}, "got 'divprune'"),
        ({"mmaccel": "false"}, "got 'false'"),
        ({"mmaccel": [0.1]}, r"got \[0.1\]"),
        ({"mmaccel": 0.1}, "got 0.1"),
        ({"mmaccel": 0}, "got 0"),
        ({"mmaccel": 1}, "got 1"),
        ({"mmaccel": {"retain": float("nan")}}, "retain=nan"),
        ({"mmaccel": {"retain": "0.1"}}, "retain='0.1'"),
        ({"mmaccel": {"retain": [0.1]}}, "retain="),
        ({"mmaccel": {"retain": False}}, "retain=False"),
        ({"retain": False}, "retain=False"),
        ({"retain": float("inf")}, "retain=inf"),
        ({"retain": 0.1, "mmaccel": {"retain": 0.1}}, "one budget"),
        ({"retain": 0.1, "mmaccel": False}, "one budget"),
        ({"retain": {"audio": 0.1}}, "one budget for 'image' and one for 'video', got 'audio'"),
        ({"retain": {"image": 0.1, 3: 0.1}}, "got 3; leave it out"),
        ({"retain": {"image": 1.5}}, "retain of image=1.5 is outside"),
        ({"mmaccel": {"retain": {"video": False}}}, "retain of video=False is not a budget"),
    ],
    ids=str,
)
def test_what_a_request_cannot_have_is_one_sentence(processing, said):
    with pytest.raises(MmaccelError, match=said) as error:
        request_of(processing)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_every_recipe_is_served_or_refused_in_one_sentence():
    refused = {}
    for name in recipes():
        try:
            plan("llava", name)
        except MmaccelError as error:
            refused[name] = str(error)
    # by choice: one of each reason
    assert {"fastv", "snapkv", "kivi", "stc-cacher", "cdpruner", "prumerge"} <= set(refused)
    # by choice: of each kind that is served
    served = {"divprune", "visionzip", "vtc-cls", "uniform", "none", "hired", "pixelprune", "tome", "evit", "ipcv"}
    assert not served & set(refused)
    for name, said in refused.items():
        assert said.endswith(".") and "\n" not in said and len(said) < 330, (name, said)
    assert (
        "language model" in refused["fastv"] and "KV cache" in refused["snapkv"] and "question" in refused["cdpruner"]
    )


def test_layers_that_vllm_does_not_build_are_refused():
    with pytest.raises(UnsupportedError, match="vLLM builds it only up to"):
        plan("llava", "vtc-cls", layers=(-1,))


# ------------------------------------------------------------------------------------------------------ requests, vLLM
@dataclass(frozen=True)
class Inputs:
    """What vLLM gives a processor, as far as it matters here."""

    hf_processor_mm_kwargs: dict


class StockProcessor:
    """A processor of vLLM: it tells what it was given."""

    def __init__(self):
        half = SimpleNamespace(max_pixels=None)
        self.info = SimpleNamespace(
            get_hf_processor=lambda: SimpleNamespace(image_processor=half, patch_size=14),
            supported_mm_processor_kwargs={"images_kwargs": {"do_resize"}, "text_kwargs": {"padding"}},
        )

    def apply(self, inputs, timing_ctx):
        return inputs.hf_processor_mm_kwargs


class ServedProcessor(ReducedProcessor, StockProcessor):
    """With a recipe."""

    plan = plan("qwen2_5_vl", "divprune", retain=0.25)


def given(**processing):
    return ServedProcessor().apply(Inputs(processing), None)


def test_both_spellings_of_a_budget_are_one_and_share_what_is_cached():
    nested, flat = given(mmaccel={"retain": 0.1}), given(retain=0.1)
    assert nested == flat == {FIELD: {"image": (1, 10), "video": (1, 10)}}
    assert given() == given(mmaccel=True) == given(retain=None) == {FIELD: {"image": (0, 0), "video": (0, 0)}}
    assert given(mmaccel=False)[FIELD]["image"] == (0, 1) and given(retain=10**40)[FIELD]["video"][0] < 2**63


@pytest.mark.parametrize(
    "processing",
    [
        {"do_resize": False},
        {"images_kwargs": {"do_resize": False}},
        {"max_pixels": 10},
        {"images_kwargs": {"max_pixels": 10}, "text_kwargs": {}},
        {"patch_size": 7},
        {"videos_kwargs": None},
    ],
    ids=str,
)
def test_options_of_the_model_s_processor_pass(processing):
    assert given(retain=0.5, **processing) == {**processing, FIELD: {"image": (1, 2), "video": (1, 2)}}


@pytest.mark.parametrize(
    "processing",
    [
        {"retian": 0.1},
        {"recipe": "uniform"},
        {"keep": 0.1},
        {"images_kwargs": {"retain": 0.1}},
        {"images_kwargs": {"mmaccel": {"retain": 0.1}}},
        {"images_kwargs": {"retian": 0.1}},
        {"images_kwargs": {1: 0.1}},
        {"MMACCEL": {"retain": 0.1}},
    ],
    ids=str,
)
def test_options_that_nobody_reads_are_refused(processing):
    with pytest.raises(MmaccelError, match="Nothing reads .* in mm_processor_kwargs"):
        given(**processing)


def test_options_of_processors_that_vllm_wrote_itself_are_their_attributes():
    """They do not say their options otherwise, and vLLM's own question fails."""

    class Info:
        get_hf_processor = staticmethod(lambda: SimpleNamespace(image_processor=SimpleNamespace(max_dynamic_patch=4)))

        @property
        def supported_mm_processor_kwargs(self):
            raise AttributeError("'InternVLImageProcessor' object has no attribute 'valid_kwargs'")

    served = ServedProcessor()
    served.info = Info()
    served._check_known({"max_dynamic_patch": 2, "images_kwargs": {"max_dynamic_patch": 2}})
    for wrong in ({"retian": 0.1}, {"images_kwargs": {"retian": 0.1}}):
        with pytest.raises(MmaccelError, match="Nothing reads 'retian'"):
            served._check_known(wrong)


def test_a_request_s_wrong_budget_is_refused_before_its_pictures_are_processed(monkeypatch):
    monkeypatch.delattr(StockProcessor, "apply")
    for wrong in ({"mmaccel": {"recipe": "uniform"}}, {"retain": 1.5}, {"retain": 1e-30}, {"mmaccel": "no"}):
        with pytest.raises(MmaccelError):
            given(**wrong)


class Configuration:
    """vLLM's."""

    def __init__(self, model_config):
        self.model_config = model_config
        self.try_verify_and_update_config()

    def try_verify_and_update_config(self):
        self.updated = True


class Registry:
    """vLLM's."""

    def resolve_model_cls(self, architectures, model_config):
        return Stock, architectures


#: what of vLLM is leant on, as (module, name)
LEANT_ON = [("vllm.config", "VllmConfig"), ("vllm.model_executor.models.registry", "_ModelRegistry")]


@pytest.fixture
def stub(monkeypatch):
    """Makes modules of vLLM that have as much as is said, and runs the plug-in's function; the lines that it logs."""

    def make(found="0.33.0", without=(), methods=True):
        monkeypatch.setattr(checks, "version", lambda: found)
        monkeypatch.setattr(vllm, "_registered", False)
        classes = {
            LEANT_ON[0]: type("VllmConfig", (Configuration,), {}),
            LEANT_ON[1]: type("_ModelRegistry", (Registry,), {}),
        }
        if not methods:
            classes = {place: type(place[1], (), {}) for place in classes}
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models", *(name for name, _ in LEANT_ON)):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        loader = ModuleType("vllm.model_executor.model_loader")
        loader.utils = SimpleNamespace(_MODEL_ARCH_BY_HASH={})
        monkeypatch.setitem(sys.modules, loader.__name__, loader)
        for place, kind in classes.items():
            if place not in without:
                setattr(sys.modules[place[0]], place[1], kind)
        lines = []
        monkeypatch.setattr(checks._log, "warning", lambda text, *values: lines.append(text % values))
        vllm.register()
        vllm.register()
        return lines, classes[LEANT_ON[0]], classes[LEANT_ON[1]]

    return make


@pytest.mark.parametrize("name", [*REFUSED, "BagelForConditionalGeneration"])
def test_an_architecture_that_is_not_served_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(models, "forget_classes", lambda: None)
    why = REFUSED.get(name, "it serves Qwen2VLForConditionalGeneration, ")
    with pytest.raises(UnsupportedError, match=rf"mmaccel does not serve {name} in vLLM[:;] {re.escape(why)}"):
        checks.check(SimpleNamespace(model_config=SimpleNamespace(architecture=name)))


def test_a_tested_vllm_says_nothing_and_gives_ours_to_those_that_asked(stub, monkeypatch):
    lines, configuration, registry = stub()
    monkeypatch.setattr(models, "_class", lambda stock, name: (stock, "ours"))
    monkeypatch.setattr(checks, "check", lambda vllm_config: checked.append(vllm_config))
    checked: list = []
    plain, asked = ModelConfig({}), ModelConfig({"mmaccel": ASKED})
    name = "LlavaForConditionalGeneration"
    for config, found in ((plain, Stock), (asked, (Stock, "ours")), (plain, Stock)):
        assert configuration(config).updated
        assert (
            registry().resolve_model_cls(name, config)
            == registry().resolve_model_cls(name, model_config=config)
            == (found, name)
        )
        assert registry().resolve_model_cls("GemmaForCausalLM", config) == (Stock, "GemmaForCausalLM")
    assert not lines and len(checked) == 1
    # a part of a model that was checked
    asked.config_updated = True
    configuration(asked)
    assert len(checked) == 1


@pytest.mark.parametrize("found", ["0.31.1", "0.34.0", "0.34.0rc1", "1.0", "dev", None])
def test_an_untested_vllm_is_stock_and_says_so_once(found, stub):
    lines, configuration, registry = stub(found)
    assert registry.resolve_model_cls is Registry.resolve_model_cls
    for config in (None, ModelConfig({}), ModelConfig(lambda config: config)):
        assert configuration(config).updated
    assert len(lines) == 1 and f"tested with vllm>=0.32,<0.34, and this is vLLM {found}" in lines[0]
    assert lines[0].endswith("runs as without mmaccel.")
    with pytest.raises(UnsupportedError, match="install a tested vLLM, or leave mmaccel out"):
        configuration(ModelConfig({"mmaccel": ASKED}))


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.40.0"])
@pytest.mark.parametrize("without", [*([place] for place in LEANT_ON), LEANT_ON], ids=str)
def test_whatever_vllm_lacks_it_goes_on_and_says_so_once(found, without, stub):
    lines, configuration, _ = stub(found, without)
    assert len(lines) == 1 and lines[0].endswith("recipes are not served, and vLLM runs as without mmaccel.")
    assert configuration(ModelConfig({})).updated
    if LEANT_ON[0] not in without:
        with pytest.raises(UnsupportedError, match="leave mmaccel out"):
            configuration(ModelConfig({"mmaccel": ASKED}))


def test_a_vllm_whose_methods_have_other_names_goes_on(stub):
    lines, *_ = stub("0.33.0", methods=False)
    assert len(lines) == 1 and "AttributeError" in lines[0]


def test_a_vllm_that_fails_in_any_way_goes_on(stub, monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(checks, "tested", broken)
    lines, configuration, _ = stub()
    assert len(lines) == 1 and "RuntimeError: no such thing" in lines[0] and configuration(ModelConfig({})).updated


def test_processes_that_vllm_starts_do_not_repeat_it(stub, monkeypatch):
    monkeypatch.setattr(checks.multiprocessing, "parent_process", lambda: "another")
    assert stub("0.40.0")[0] == []


def test_the_key_of_a_checkpoint_is_ignored_with_a_line(stub):
    lines, configuration, _ = stub()
    config = ModelConfig({}, mmaccel={"recipe": "snapkv"})
    assert configuration(config).updated and len(lines) == 1 and "config.json has no effect" in lines[0]


def test_a_recipe_in_a_nested_configuration_is_refused(stub):
    _, configuration, _ = stub()
    with pytest.raises(UnsupportedError, match="hf_overrides has mmaccel inside 'text_config'"):
        configuration(ModelConfig({"text_config": {"mmaccel": ASKED}}))


@pytest.mark.parametrize("part", [dict, lambda: SimpleNamespace(hidden_size=8)], ids=["dict", "configuration"])
def test_a_function_that_sets_a_recipe_in_a_nested_configuration_is_refused(part, stub):
    def nested(config):
        held = config.text_config
        (held if isinstance(held, dict) else vars(held))["mmaccel"] = ASKED
        return config

    lines, configuration, _ = stub()
    with pytest.raises(UnsupportedError, match="hf_overrides has mmaccel inside 'text_config'"):
        configuration(ModelConfig(nested, text_config=part()))
    assert not lines


@pytest.mark.parametrize("overrides", [{}, lambda config: config], ids=["none", "function"])
def test_the_key_in_a_nested_configuration_of_a_checkpoint_is_ignored_with_a_line(overrides, stub):
    lines, configuration, _ = stub()
    config = ModelConfig(overrides, text_config=SimpleNamespace(mmaccel={"recipe": "snapkv"}))
    assert configuration(config).updated and len(lines) == 1 and "config.json has no effect" in lines[0]


def test_vllm_does_not_remember_classes_of_our_architectures(stub):
    """Once a recipe was asked for in a process; before that its cache is its own."""
    stub()
    utils = sys.modules["vllm.model_executor.model_loader"].utils
    utils._MODEL_ARCH_BY_HASH[1] = (Stock, "LlavaForConditionalGeneration")
    models.forget_classes()
    models.forget_classes()
    kept = utils._MODEL_ARCH_BY_HASH
    assert not kept
    kept[1] = (Stock, "LlavaForConditionalGeneration")
    kept[2] = (Stock, "GemmaForCausalLM")
    models.forget_classes()
    assert utils._MODEL_ARCH_BY_HASH == {2: (Stock, "GemmaForCausalLM")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("recipe", ["divprune", "none"])
def test_the_start_says_what_is_served_and_warns_where_it_is_not_tested(recipe, second, device, stub, monkeypatch):
    warned, _, _ = stub()
    lines: list[str] = []
    monkeypatch.setattr(checks._log, "info", lambda text, *values: lines.append(text % values))
    given = {"retain": 0.25} if recipe == "divprune" else {}
    ours = ServingPlan(settings_of({"recipe": recipe, **given}), config("llava"), LLAVA)
    made = SimpleNamespace(use_v2_model_runner=second, device_config=SimpleNamespace(device_type=device))
    checks._announce(made, ours, "LlavaForConditionalGeneration")
    name = "divprune 25 %" if given else "none (nothing is dropped)"
    assert lines == [
        f"mmaccel {__version__} serves LlavaForConditionalGeneration with {name}, positions kept, on model runner "
        f"V{1 + second}."
    ]
    assert len(warned) == (device == "cuda" and recipe == "divprune")
    assert not warned or "tested on CPUs alone, with both of its model runners" in warned[0]


@pytest.mark.parametrize("main", ["vllm.entrypoints.cli.main", "mine"])
def test_vllm_s_command_line_ends_with_the_sentence_of_an_error(main, monkeypatch, capsys):
    """As pydantic wraps it, or alone; other errors, and those of other programs, keep their traceback."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    sys.modules["__main__"].__spec__ = SimpleNamespace(name=main)
    checks._shorten_errors()
    checks._shorten_errors()
    ours, other = UnsupportedError("Too many tokens; give fewer."), ValueError("other")
    wrapped = ValueError("2 errors")
    wrapped.errors = lambda: [{"msg": "other"}, {"ctx": {"error": ours}}]
    for error in (ours, wrapped, other):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    if main == "mine":
        assert seen == [ours, wrapped, other] and not said
    else:
        assert seen == [other] and said == f"error: {ours}\n" * 2


def test_counters_of_all_processes_are_on_one_page(tmp_path, monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    monkeypatch.setattr(prometheus, "REGISTRY", registry)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    counters._folder.cache_clear()
    first, second = SimpleNamespace(), SimpleNamespace()
    counters.provide(first)
    counters.provide(second)
    assert first.mmaccel_counters == second.mmaccel_counters
    for one in (
        Counters(first.mmaccel_counters),
        Counters(first.mmaccel_counters),
        Counters(None),
        Counters("/nowhere"),
    ):
        one.add("visual_tokens", "image", 64)
        one.add("visual_tokens", "video", 256)
        one.add("selection_seconds", "image", 0.25)
    page = prometheus.generate_latest(registry).decode()
    for line in ('tokens_total{modality="image"} 128.0', 'tokens_total{modality="video"} 512.0', '"image"} 0.5'):
        assert line in page
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    counters.provide(second)
    assert second.mmaccel_counters == str(tmp_path)
    counters._folder.cache_clear()


def served_as(family: str, **text):
    """vLLM's configuration of a tiny model, whose language model is otherwise in ``text``."""
    hf_config = copy.deepcopy(config(family))
    vars(hf_config.text_config).update(text)
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        speculative_config=None,
        parallel_config=SimpleNamespace(**one),
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ({"layer_types": None, "sliding_window": 16}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "a RoPE for each type of layer"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "scales its RoPE"),
    ],
)
def test_language_models_that_kept_positions_do_not_reach_are_refused(text, said):
    remedy = plan("llava", "divprune").remedy
    with pytest.raises(UnsupportedError, match=said) as error:
        checks._check_positions(served := served_as("llava", **text), remedy)
        checks._three_equal_axes(served.model_config.hf_config, remedy)
    assert '"positions": "paper"' in str(error.value)


def test_the_remedy_works_with_the_recipe():
    """Without another method pixelprune always keeps positions, as on transformers, and ipcv keeps all tokens."""
    for which, kept in (("pixelprune", True), (["pixelprune", "divprune"], False), ("tome", False), ("ipcv", False)):
        paper = plan("llava", which, positions="paper")
        assert paper.keeps_positions is kept and plan("llava", which).keeps_positions is (which != "ipcv")
        assert paper.remedy.startswith("use a recipe" if which in ("pixelprune", "ipcv") else 'give "positions"')


def test_plain_positions_become_three_equal_axes():
    served = served_as("llava")
    checks._check_positions(served, "")
    checks._three_equal_axes(served.model_config.hf_config, "")
    text = served.model_config.hf_config.text_config
    assert text.rope_parameters["mrope_section"] == [text.head_dim // 2, 0, 0]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "internvl", "pixtral"])
def test_who_has_positions_on_three_axes(name):
    turning = "mrope_section" in (config(name).get_text_config().rope_parameters or {})
    assert (
        ServingPlan(Settings(get_recipe("divprune")), config(name), LLAVA).turns == turning == name.startswith("qwen")
    )


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
    # as one version of vLLM has them, and as another
    apart = {**given, "pixel_values": list(pixels.split([4, 16, 8]))}
    assert [len(item["pixel_values"][0]) for item in QWEN.items(apart)] == [4, 16, 8]


def test_pictures_of_any_size_with_text_behind_their_rows():
    """A LLaVA with the tower of Pixtral: marks behind the rows stay where they stood, whatever goes."""
    ours = ServingPlan(Settings(get_recipe("divprune", retain=0.25)), config("pixtral"), LLAVA)
    pixels = [torch.zeros(3, 16, 40), torch.zeros(3, 32, 24)]
    pictures = ours.pictures("image", {"pixel_values": pixels}, 22)
    assert [picture[0].grid for picture in pictures] == [(1, 2, 5), (1, 4, 3)]
    assert [ours.count("image", picture, None).total for picture in pictures] == [3, 3]
    served = object.__new__(ServedProcessor)
    served.plan = ours
    rows = torch.tensor([True, True, False, True, True, False])
    for shown, modality, apart in (
        (rows, "image", True),
        (rows[:2], "image", False),
        (rows[1:3], "image", False),
        (rows[1:3], "video", True),
        (rows[:2], "video", False),
    ):
        assert served._apart(modality, shown) == apart
    with pytest.raises(UnsupportedError, match="not tested with this one in vLLM"):
        ServingPlan(Settings(get_recipe("visionzip")), config("pixtral"), LLAVA)


def test_runs_of_placeholders_are_shortened_one_by_one():
    served = object.__new__(ServedProcessor)
    visual = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 0, 1]).bool()
    stays = served._run_by_run("video", visual, Kept(6, 3, [2, 0, 1]))
    assert stays.tolist() == [True, True, True, False, True, False, False, True, True, True]
    for unknown in (None, [1, 2]):
        with pytest.raises(UnsupportedError, match=r"This video has text between .* recipe 'divprune' decides"):
            served._run_by_run("video", visual, Kept(6, 3, unknown))


@pytest.mark.parametrize(
    "which, each",
    [
        ("uniform", [4, 4]),
        ("pool", [4, 4]),
        ("divprune", None),
        (
            {"name": "two", "stages": [{"method": "divprune", "retain": 0.5}, {"method": "uniform", "retain": 0.25}]},
            None,
        ),
        (
            {"name": "two", "stages": [{"method": "uniform", "retain": 0.5}, {"method": "uniform", "retain": 0.25}]},
            [4, 4],
        ),
    ],
    ids=str,
)
def test_counts_of_each_frame_are_given_where_they_are_known(which, each):
    recipe = get_recipe(which, **({"retain": 0.25} if isinstance(which, str) else {}))
    ours = ServingPlan(Settings(recipe), config("gemma4"), ARCHITECTURES["Gemma4ForConditionalGeneration"])
    patches = torch.cartesian_prod(torch.arange(8), torch.arange(8)).expand(1, 2, -1, -1)
    given = {"pixel_position_ids_videos": patches, "video_frame_counts": torch.tensor([2])}
    (clip,) = ours.pictures("video", given, 32)
    assert [tile.grid for tile in clip] == [(1, 4, 4)] * 2
    kept = ours.count("video", clip, None)
    assert (kept.total, kept.segments) == (8, each)
    assert ours.count("video", clip, False).segments == ours.count("video", clip, 1.0).segments == [16, 16]


def test_sounds_stay_as_they_are(monkeypatch):
    sound = SimpleNamespace(modality="audio", content=SimpleNamespace(full=[7, 7]))
    served = ServedProcessor()
    monkeypatch.setattr(StockProcessor, "_get_prompt_updates", lambda *_: [sound], raising=False)
    monkeypatch.setattr(StockProcessor, "_apply_prompt_updates", lambda self, ids, found: found, raising=False)
    assert served._get_prompt_updates(None, {FIELD: {"image": (1, 4), "video": (1, 4)}}, None) == [sound]
    assert served._apply_prompt_updates([1], {"audio": [[sound]]}) == {"audio": [[sound]]}


def test_names_of_newer_checkpoints():
    rename = LLAVA.rename
    assert rename("vision_tower.encoder.layers.0.x") == "vision_tower.vision_model.encoder.layers.0.x"
    assert rename("model.vision_tower.embeddings.y") == "model.vision_tower.vision_model.embeddings.y"
    for name in ("vision_tower.vision_model.encoder.x", "language_model.encoder.x", "lm_head.weight"):
        assert rename(name) == name


@pytest.mark.parametrize("name", [name for name in families() if name in zoo.FAMILIES])
def test_a_description_knows_what_the_model_knows(name):
    if needed := families()[name].package:
        pytest.importorskip(needed)
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
        ("0.33.1", True, "0.33.1 loads the plug-in mmaccel"),
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


def test_the_entry_point_names_a_function_and_the_extra_what_is_tested():
    text = (Path(vllm.__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    point = project["entry-points"]["vllm.general_plugins"]["mmaccel"]
    assert EntryPoint("mmaccel", point, "vllm.general_plugins").load() is vllm.register
    assert project["optional-dependencies"]["vllm"] == [checks.versions()]
