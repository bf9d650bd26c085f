"""Law 4 for all that is registered: what a budget asks for is what is kept, in every picture and clip, on every family."""

from __future__ import annotations

import math
import zlib
from fractions import Fraction

import oracle
import pytest
import synthetic
import torch
import zoo
from PIL import Image

import mmaccel
from mmaccel import UnsupportedError, accelerated, prepare, recipes
from mmaccel.frames.clip import FrameEncoder
from mmaccel.method import EncoderMethod, FramesMethod, LayerMethod, Policy, ProjectorMethod, TokenMethod
from mmaccel.method.registry import methods

pytestmark = pytest.mark.usefixtures("no_gradients")

#: one token, odd ratios, everything, small counts
RETAIN = (1e-6, 0.1, 0.25, 0.29, 0.5, 0.85, 1.0, 1, 5, 7)
#: plain pictures, tiles that are cropped and have newlines, pictures and a clip of their own grids, tiles and frames apart;
#: rows of `uneven` have one and two pictures and are padded on the left
USUAL = (
    ("llava", "uneven"),
    ("llava_next", "uneven"),
    ("qwen2_5_vl", "mixed"),
    ("internvl", "uneven"),
    ("internvl", "mixed"),
)
TOKENS = ("encoder", "projector", "layers")


def sites(name):
    return {methods()[stage.method].site for stage in recipes()[name].stages}


#: where something has a budget in tokens or keys
KINDS = (EncoderMethod, TokenMethod, Policy)
NAMES = tuple(
    name
    for name in oracle.named_recipes()
    if any(issubclass(methods()[stage.method], KINDS) for stage in recipes()[name].stages)
)


def few(family, kind, name):
    """Two budgets that differ from case to case."""
    first = zlib.crc32(f"{family} {kind} {name}".encode())
    return {RETAIN[first % len(RETAIN)], RETAIN[(first // 16) % len(RETAIN)]}


def resolved(retain, size):
    """A budget in whole numbers: half rounds up, one token at least."""
    return retain if isinstance(retain, int) else max(1, math.floor(Fraction(str(retain)) * size + Fraction(1, 2)))


def pictures(layout):
    """Row and places of every picture or clip."""
    out = {}
    for segment in layout.segments:
        out.setdefault((segment.row, segment.picture), []).append(segment.places)
    return [(row, torch.cat(parts)) for (row, _), parts in out.items()]


def check(family, kind, name, retain):
    """Run a prompt, and hold every stage to its budget."""
    made, model, feed = recipes()[name], oracle.subject(family), zoo.inputs(family, kind)
    made = made if made.primary is None else made.override(retain=retain)
    try:
        with accelerated(model, made, processor=zoo.processor(family)):
            cache = model(**feed, use_cache=True).past_key_values
            handle, stats = model.mmaccel, model.mmaccel.stats()
            held = oracle.stored(model, feed, cache)
    except UnsupportedError as error:
        # a tower without a CLS token, one that is not shown clips, no sounds; the table in the README says where
        assert any(why in str(error) for why in ("CLS", "not shown clips", "hear none")), error
        return 0
    shown, layout = pictures(handle.layout), handle.layout
    assert torch.equal(layout.visual, oracle.visual(family, feed))
    there = [len(places) for _, places in shown]
    reaches = {0: there}
    for passage in handle.history:
        stage = handle.plan.stages[passage.stage]
        method = stage.method
        asked = budget(made, passage.stage, stage.retain, [len(places) for _, places in shown], there)
        kept = [int(passage.reduction.kept[row, places].sum()) for row, places in shown]
        if getattr(method, "spreads", False):
            hold_on_average(method, stats, passage.stage, there, kept, passage is handle.history[-1])
        else:
            hold(method, stats, passage.stage, there, asked, kept)
        there = reaches[passage.layer] = kept
        text = layout.valid & ~layout.visual
        assert torch.equal(passage.reduction.kept & ~layout.visual, text), "text was dropped"
    ran = {stage["method"] for stage in stats["stages"]}
    at_layers = handle.plan.stage_at_layer.values()
    at_layers = (*at_layers, handle.plan.chunks)
    assert ran == {s.method.name for s in handle.plan.stages if s.method.site != "layers" or s in at_layers}
    if handle.plan.policy is not None:
        keys(handle, stats, held, shown, reaches)
    return 1


def budget(made, number, retain, sizes, there):
    """What a stage is asked to keep of every picture: no less than the stage that `retain` sets, no more than there is."""
    asked = [
        resolved(min(retain, n) if made.anchor is not None and isinstance(retain, int) else retain, n) for n in sizes
    ]
    if made.primary > number:
        asked = [max(k, resolved(made.retain, n)) for k, n in zip(asked, sizes, strict=True)]
    return [min(k, n) for k, n in zip(asked, there, strict=True)]


def hold_on_average(method, stats, number, there, kept, last):
    """A stage that works at several layers: nobody loses everything, and its figures are those of the last layer."""
    assert min(kept) >= 1 and all(k <= n for k, n in zip(kept, there, strict=True))
    record = next(s for s in stats["stages"] if s["method"] == method.name)
    assert record["resolved"] is None
    if last:
        assert record["tokens_kept"] == sum(kept)
        assert any(f"{method.name} spreads its budget" in note for note in stats["notes"])


def hold(method, stats, number, there, asked, kept):
    """One stage: its class of budget in every picture, and its figures and notes."""
    # a method may work at several layers
    mine = [s for s in stats["stages"] if s["method"] == method.name]
    found = [s for s in mine if (s["tokens_in"], s["tokens_kept"]) == (sum(there), sum(kept))]
    assert found, f"{mine} has no stage that kept {sum(kept)} of {sum(there)}"
    record = found[0]
    assert min(kept) >= 1
    if method.budget == "exact":
        assert kept == asked, f"{method.name} kept {kept} where {asked} were asked"
    if method.budget == "at_most":
        assert all(k <= n for k, n in zip(kept, asked, strict=True)), f"{method.name} kept {kept} for {asked}"
    if method.budget == "adaptive":
        said = f"of {sum(there)} visual tokens {sum(asked)} were asked for, and {sum(kept)} stay"
        assert record["resolved"] is None and any(method.name in n and said in n for n in stats["notes"]), stats[
            "notes"
        ]
    else:
        assert record["resolved"] == sum(asked)
    if kept == there and len(stats["stages"]) > 1:
        assert any(f"stage {number} ({method.name}) left all" in note for note in stats["notes"]), stats["notes"]


def in_keys(handle, stage):
    """The budget of a cache stage as keys: as many bytes hold more keys where a codec packs visual ones."""
    packing = [group.codec for group in handle.plan.token_groups if group.of != "text" and group.codec is not None]
    if stage.method.budget_in == "keys" or not packing:
        return stage.retain
    width = handle.family.heads_in(handle.family.attending[0])[1]
    more = torch.finfo(handle.family.model.dtype).bits / packing[0].packed_bits(width)
    return int(stage.retain * more) if isinstance(stage.retain, int) else min(1.0, stage.retain * more)


def keys(handle, stats, held, shown, reaches):
    """The cache: visual keys (all keys where text competes) of every layer, mean over heads."""
    stage = handle.plan.policy
    policy = stage.method
    layout, depth = handle.layout, len(held)
    rows = range(len(layout.valid))
    record = next(s for s in stats["stages"] if s["site"] == "cache")
    arrived = [reaches[max(layer for layer in reaches if layer <= at)] for at in handle.family.attending]
    for heads in held:
        if not policy.joint:
            text = (layout.valid & ~layout.visual)[:, None].expand_as(heads)
            assert torch.equal(heads & ~layout.visual[:, None], text), "text was dropped"
    mask = layout.valid if policy.joint else layout.visual
    found = torch.stack([(heads & mask[:, None]).sum(-1).double().mean(1) for heads in held])
    assert record["tokens_kept"] == round(float(found.sum(1).mean()))
    if policy.recalls or policy.budget == "none":
        # nothing is lost for good, or only what a later layer dropped
        last = torch.tensor([sum(k for (r, _), k in zip(shown, arrived[-1], strict=True) if r == row) for row in rows])
        assert bool((found >= last).all())
        if policy.deferred and len(handle.plan.stages) == 1:
            assert any("left all keys that reached it; it drops" in note for note in stats["notes"])
        return
    retain = in_keys(handle, stage)
    asked = torch.zeros(depth, len(layout.valid), dtype=torch.double)
    for number in range(depth):
        for row in rows:
            mine = [(len(p), k) for (r, p), k in zip(shown, arrived[number], strict=True) if r == row]
            text = int((layout.valid & ~layout.visual)[row].sum())
            size, present = sum(n for n, _ in mine) + text, sum(k for _, k in mine) + text
            wanted = resolved(retain, size) if policy.joint else sum(min(n, resolved(retain, n)) for n, _ in mine)
            asked[number, row] = min(wanted, present if policy.joint else present - text)
    assert policy.budget == "exact" and record["resolved"] == round(float(asked.sum(1).mean()))
    if policy.choice("layer_budget")[0] == "uniform":
        assert torch.equal(found, asked), f"{policy.name} keeps {found.tolist()} where {asked.tolist()} were asked"
    torch.testing.assert_close(found.mean(0), asked.mean(0))


@pytest.mark.square("name", NAMES)
@pytest.mark.square(("family", "kind"), USUAL)
def test_what_is_asked_is_kept(family, kind, name):
    for retain in few(family, kind, name):
        check(family, kind, name, retain)


@pytest.mark.parametrize("name", [name for name in NAMES if "cache" in sites(name)])
def test_a_row_without_a_picture_beside_one_with(name):
    check("llava", "textrow", name, 0.29)


@pytest.mark.full
@pytest.mark.square(("family", "name"), oracle.square(NAMES))
def test_what_is_asked_is_kept_everywhere(family, name):
    for kind in zoo.kinds(family):
        for retain in few(family, kind, name) if kind != "text" else ():
            check(family, kind, name, retain)


@pytest.mark.full
def test_no_method_is_refused_everywhere():
    """The law above lets pass what a family cannot do; each method is held to its budget on some of them."""
    for name in NAMES:
        assert any(check(family, kind, name, 0.5) for family, kind in (("llava", "image"), ("qwen2_5_vl", "image"))), (
            name
        )


STAGED = [name for name in NAMES if len(recipes()[name].stages) > 1]


@pytest.mark.square("name", STAGED)
@pytest.mark.square("retain", (None, 0.25, 0.1))
def test_no_stage_is_without_effect(name, retain):
    """In a model as deep as the papers' every stage with a budget of its own drops something; where thresholds decide and
    find nothing, a note says so."""
    family = "qwen2_5_vl"
    feed = zoo.encode(family, [([], [zoo.clip(8, 128, 128, 0)], zoo.QUESTION)])
    model = oracle.subject(family, num_hidden_layers=28)
    made = recipes()[name] if retain is None else recipes()[name].override(retain=retain)
    with accelerated(model, made):
        model(**feed, use_cache=True)
        handle, stats = model.mmaccel, model.mmaccel.stats()
    assert len(stats["stages"]) == len(made.stages)
    for number, (record, stage) in enumerate(zip(stats["stages"], handle.plan.stages, strict=True)):
        method = stage.method
        # a sparse read keeps every key, and reads some of them when decoding
        if record["tokens_kept"] == record["tokens_in"] and not getattr(method, "recalls", False):
            assert method.budget != "exact", f"{method.name} (stage {number}) does nothing"
            assert any(f"stage {number} ({method.name}) left all" in note for note in stats["notes"])


# --- before the processor ---------------------------------------------------------------------------------------------
CHOOSERS = [name for name, kind in synthetic.offered(FramesMethod).items() if kind.only_chooses]


@pytest.mark.square("name", CHOOSERS)
@pytest.mark.square("retain", (1e-6, 0.1, 0.29, 0.5, 1.0))
def test_frames_that_are_asked_for_are_chosen(name, retain, monkeypatch):
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())
    (method,) = synthetic.built(methods()[name])
    for total in (1, 2, 7, 16):
        clip = zoo.clip(total, 40, 40, 1)
        chosen, wanted = method.choose(clip, retain), resolved(retain, total)
        assert list(chosen) == sorted(set(chosen)) and len(method.clip(clip, retain)) == len(chosen)
        assert len(chosen) == wanted if method.budget == "exact" else 1 <= len(chosen) <= wanted


@pytest.mark.parametrize("retain", (0.1, 0.29, 0.5, 1.0))
def test_a_resized_picture_has_the_area_that_is_asked_for(retain):
    method = methods()["resize"]()
    for size in ((640, 480), (333, 777)):
        width, height = method.picture(Image.new("RGB", size), retain).size
        assert width * height / (size[0] * size[1]) == pytest.approx(retain, rel=0.01)
        assert width / height == pytest.approx(size[0] / size[1], rel=0.01)


@pytest.mark.parametrize("family", ("llava_onevision", "internvl", "smolvlm"))
@pytest.mark.parametrize("with_tokens", (False, True))
def test_choosing_frames_of_a_picture_is_said_to_do_nothing(family, with_tokens):
    stages = [mmaccel.Stage("uniform-frames", 0.5), *([mmaccel.Stage("random", 0.5)] if with_tokens else [])]
    worker, model = prepare(zoo.processor(family), stages), oracle.subject(family)
    said = "uniform-frames chooses frames of clips, and left pictures as they are"
    with accelerated(model, stages, processor=worker):
        for pictures_, clips, expected in (([zoo.image(60, 48, 0)], [], True), ([], [zoo.clip(4, 60, 48, 0)], False)):
            feed = zoo.encode(family, [(pictures_, clips, zoo.QUESTION)], worker)
            for call in (lambda feed=feed: model(**feed), lambda feed=feed: model.generate(**feed, max_new_tokens=2)):
                call()
                assert (said in model.mmaccel.stats()["notes"]) == expected


def test_policies_are_held_to_their_budget():
    """The matrix really has the cache in it."""
    assert sum(issubclass(methods()[s.method], Policy) for n in NAMES for s in recipes()[n].stages) > 20
    assert set(oracle.named(EncoderMethod, ProjectorMethod, LayerMethod, Policy)) <= set(NAMES)
    assert sum(len(recipes()[name].stages) > 1 for name in NAMES) > 3
