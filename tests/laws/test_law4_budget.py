"""Law 4: budgets are met in every picture, and what cannot be a budget is refused in words."""

from __future__ import annotations

import math
from fractions import Fraction

import oracle
import pytest
import synthetic
import torch
import zoo

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerate_vlm, accelerated, is_accelerated
from mmaccel.core.budget import resolve
from mmaccel.method import ChunkMethod, LayerMethod, ProjectorMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

RETAIN = (1e-6, 0.1, 0.29, 0.5, 1.0, 1, 5, 30, 500)
#: methods that reduce the tokens of a picture to what is asked, or to less
TOKENS = tuple(
    name
    for name in oracle.named(ProjectorMethod, LayerMethod, ChunkMethod)
    if mmaccel.get_method(name).budget in ("exact", "at_most")
)
KEYS = oracle.policies_that_drop()
#: policies that by default give every layer and every head the same
EVEN = [
    name
    for name, made in ((name, mmaccel.get_method(name)()) for name in KEYS)
    if made.choice("layer_budget")[0] == made.choice("head_budget")[0] == "uniform"
]
BUDGETED = tuple(name for name, kind in synthetic.offered().items() if kind.budget != "none" and kind.site != "frames")
KINDS = ("image", "images", "video", "mixed", "uneven", "textrow")


def wanted(retain, size: int) -> int:
    """The budget of a picture of `size` tokens, in whole numbers: half rounds up, and no picture has more than all."""
    return (
        min(retain, size)
        if isinstance(retain, int)
        else max(1, math.floor(Fraction(str(retain)) * size + Fraction(1, 2)))
    )


def pictures(model):
    """Row and places of every picture or clip of the last call."""
    out: dict[tuple[int, int], list[torch.Tensor]] = {}
    for segment in model.mmaccel.layout.segments:
        out.setdefault((segment.row, segment.picture), []).append(segment.places)
    return [(row, torch.cat(parts)) for (row, _), parts in out.items()]


def expected_pictures(family: str, kind: str) -> int:
    return {"image": 1, "images": 2, "video": 1, "mixed": 2, "uneven": 3, "textrow": 1}[kind]


def test_the_arithmetic_is_exact():
    """0.29 of 100 is 29, though 0.29 * 100 is 28.999999999999996."""
    assert wanted(0.29, 100) == 29 and wanted(0.5, 35) == 18 and wanted(1e-6, 1000) == 1
    for size in range(1, 200):
        for retain in (1e-6, 0.1, 0.29, 0.5, 0.7, 1.0):
            assert resolve(retain, size) == wanted(retain, size)


def check(family, kind, name, retain):
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    with accelerated(model, oracle.recipe(name, family, retain), processor=zoo.processor(family)):
        model(**feed)
        kept, found, stats = model.mmaccel.reduction.kept, pictures(model), model.mmaccel.stats()
        layout = model.mmaccel.layout
    visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
    assert torch.equal(layout.visual, visual) and torch.equal(layout.valid, valid)
    assert len(found) == expected_pictures(family, kind)
    assert sum(len(places) for _, places in found) == int(visual.sum())
    # text is never dropped before the language model, nor in it
    assert torch.equal(kept & ~visual, valid & ~visual)
    counts = [(int(kept[row, places].sum()), wanted(retain, len(places))) for row, places in found]
    if mmaccel.get_method(name).budget == "exact":
        assert all(k == w for k, w in counts), counts
    assert all(1 <= k <= w for k, w in counts), counts
    stage = stats["stages"][0]
    assert stage["tokens_in"] == int(visual.sum()) and stage["resolved"] == sum(w for _, w in counts)
    assert stage["tokens_kept"] == stats["visual_tokens_kept"] == int((kept & visual).sum())


@pytest.mark.square(("family", "name", "retain"), oracle.in_turn(oracle.square(TOKENS), lambda _: RETAIN), of="pairs")
def test_token_budgets(family, name, retain):
    for kind in KINDS:
        if kind in zoo.kinds(family):
            check(family, kind, name, retain)


@pytest.mark.square(("family", "name", "retain"), oracle.in_turn(oracle.square(EVEN), lambda _: RETAIN), of="pairs")
def test_key_budgets(family, name, retain):
    """Every head of every layer keeps the sum of its row's pictures, and all text."""
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    with accelerated(model, oracle.recipe(name, family, retain, joint=False), processor=zoo.processor(family)):
        cache = model(**feed, use_cache=True).past_key_values
        held, found = oracle.stored(model, feed, cache), pictures(model)
    visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
    budget = torch.tensor([sum(wanted(retain, len(p)) for row, p in found if row == r) for r in range(len(visual))])
    for heads in held:
        assert torch.equal((heads & visual[:, None]).sum(-1), budget[:, None].expand(heads.shape[:2]))
        assert torch.equal(heads & ~visual[:, None], (valid & ~visual)[:, None].expand_as(heads))


@pytest.mark.square("retain", (0.29, 0.5, 0.75, 1.0, 9, 20))
@pytest.mark.square("kind", ("image", "images", "uneven"))
@pytest.mark.square("family", ("llava", "video_llava"))
def test_merging_in_the_encoder_meets_its_budget(family, kind, retain):
    """Where one patch is one token, as many tokens stay as patches do."""
    side = 36 if family == "llava" else 16
    if retain == 20 and side < 20:
        retain = 6
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    with accelerated(model, oracle.recipe("tome", family, retain)):
        model(**feed)
        kept, found = model.mmaccel.reduction.kept, pictures(model)
    visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
    assert torch.equal(kept & ~visual, valid & ~visual)
    for row, places in found:
        assert len(places) == side and int(kept[row, places].sum()) == wanted(retain, side)


@pytest.mark.parametrize("family", oracle.MERGING)
def test_merging_in_the_encoder_counts_what_the_language_model_reads(family):
    for kind in KINDS:
        if kind not in zoo.kinds(family):
            continue
        feed, model = zoo.inputs(family, kind), oracle.subject(family)
        with accelerated(model, oracle.recipe("tome", family, 0.3), processor=zoo.processor(family)):
            model(**feed)
            kept, found, stage = model.mmaccel.reduction.kept, pictures(model), model.mmaccel.stats()["stages"][0]
        visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
        assert torch.equal(kept & ~visual, valid & ~visual)
        asked = [wanted(0.3, len(places)) for _, places in found]
        assert [int(kept[row, places].sum()) for row, places in found] == asked
        assert (stage["tokens_in"], stage["resolved"], stage["tokens_kept"]) == (
            int(visual.sum()),
            sum(asked),
            sum(asked),
        )


@pytest.mark.parametrize("family", ("internvl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"))
def test_late_frames_are_pooled_like_early_ones(family):
    """Where the prompt spreads a clip out, every frame is a unit with a grid of its own, whichever of the clip it is."""
    feed, model = zoo.encode(family, [([], [zoo.clip(8, 64, 64, 0)], zoo.QUESTION)]), oracle.subject(family)
    with accelerated(model, "pool", retain=0.5, processor=zoo.processor(family)):
        model(**feed)
        kept, segments = model.mmaccel.reduction.kept, model.mmaccel.layout.segments
    left = [int(kept[s.row, s.places].sum()) for s in segments]
    assert len(left) in (4, 8) and len({len(s.places) for s in segments}) == 1
    # eight of sixteen are 2 x 4 windows, four of nine 2 x 2
    assert left == [{9: 4, 16: 8}[len(segments[0].places)]] * len(left)


@pytest.mark.square(
    "family",
    (
        *("llava_next", "llava_onevision", "internvl", "smolvlm", "idefics3", "aya_vision", "got_ocr2"),
        *("granite4_vision", "lfm2_vl", "ovis2"),
    ),
)
@pytest.mark.square("retain", (0.25, 0.5, 10))
def test_moviechat_pools_every_tile_on_its_own_grid(family, retain):
    """Most of the budget is used: windows of a tile fall short of it by less than a half."""
    for kind in ("image", "images", "uneven"):
        feed, model = zoo.inputs(family, kind), oracle.subject(family)
        with accelerated(model, "moviechat", retain=retain, processor=zoo.processor(family)):
            model(**feed)
            kept, found = model.mmaccel.reduction.kept, pictures(model)
        for row, places in found:
            asked = wanted(retain, len(places))
            assert asked / 2 < int(kept[row, places].sum()) <= asked


def test_ratios_refer_to_the_original_count():
    """Half of the picture, then a quarter of the picture: not a quarter of the half."""
    feed, model = zoo.inputs("llava"), oracle.subject("llava")
    with accelerated(model, Recipe("two", (Stage("random", 0.5), Stage("divprune", 0.25), Stage("fastv", 0.125)))):
        model(**feed)
        stages = model.mmaccel.stats()["stages"]
    assert [s["tokens_kept"] for s in stages] == [18, 9, 5] and [s["tokens_in"] for s in stages] == [36, 18, 9]


# ------------------------------------------------------------------------------------------------------------- refusals

WRONG = (0, 0.0, -1, -0.5, 1.5, 64.0, math.nan, math.inf, True, False, "0.5")


@pytest.mark.parametrize("name", BUDGETED)
def test_what_is_no_budget_is_refused(name):
    model = oracle.subject("llava")
    for retain in WRONG:
        with pytest.raises(MmaccelError) as caught:
            accelerate_vlm(model, name, retain=retain)
        said(caught, "retain", retain)
        assert not is_accelerated(model)


@pytest.mark.parametrize("retain", WRONG, ids=repr)
def test_what_is_no_budget_is_refused_in_stages_and_for_text(retain):
    with pytest.raises(MmaccelError) as caught:
        Recipe("mine", (Stage("random", retain),))
    said(caught, "retain", retain)
    with pytest.raises(MmaccelError) as caught:
        accelerate_vlm(oracle.subject("llava"), "snapkv", text_retain=retain)
    said(caught, "text_retain", retain)


def said(caught, what, value):
    """One sentence with the name and the value."""
    message = str(caught.value)
    assert f"{what}={value!r}" in message and message.endswith(".") and "\n" not in message


def test_a_wrong_budget_leaves_the_recipe_that_was_there():
    model = oracle.subject("llava")
    with accelerated(model, "random", retain=0.5):
        with pytest.raises(MmaccelError):
            accelerate_vlm(model, "divprune", retain=0)
        assert model.mmaccel.recipe.name == "random"


@pytest.mark.square(("family", "name"), oracle.square((*TOKENS, *KEYS), ("llava", "qwen2_5_vl", "llava_next")))
def test_a_count_that_no_picture_has_keeps_everything(family, name):
    """To the bit what a share of 1.0 does, and the notes say so."""
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    forced, found = oracle.force(family, len(feed["input_ids"])), {}
    for retain in (500, 1.0):
        with accelerated(model, oracle.recipe(name, family, retain), processor=zoo.processor(family)):
            found[retain], _ = oracle.decode(model, feed, forced)
            notes = [note for note in model.mmaccel.stats()["notes"] if f"{name} was asked to keep 500 tokens" in note]
            assert len(notes) == (retain == 500)
    assert torch.equal(found[500], found[1.0])


@pytest.mark.parametrize("name", ("random", "fastv", "snapkv"))
def test_a_count_that_only_some_pictures_have_keeps_the_others_whole(name):
    """Every row as if it were alone, whatever stands beside it."""
    feed, model = zoo.inputs("qwen2_5_vl", "uneven"), oracle.subject("qwen2_5_vl")
    recipe = oracle.recipe(name, "qwen2_5_vl", 30)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        sizes = [(row, len(places)) for row, places in pictures(model)]
        (note,) = (note for note in model.mmaccel.stats()["notes"] if "asked to keep" in note)
        last = oracle.stored(model, feed, cache)[-1] & oracle.visual("qwen2_5_vl", feed)[:, None]
    small = [size for _, size in sizes if size < 30]
    assert 0 < len(small) < len(sizes)
    assert note == (
        f"{name} was asked to keep 30 tokens and keeps all of {len(small)} of {len(sizes)} pictures or clips, which have at "
        f"most {max(small)}"
    )
    for row, heads in enumerate(last.sum(-1)):
        assert heads.unique().tolist() == [sum(min(30, size) for r, size in sizes if r == row)]


@pytest.mark.parametrize("family", oracle.MERGING)
def test_a_count_that_no_picture_has_merges_nothing_in_the_tower(family):
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    bare = oracle.bare(family)(**feed).logits
    with accelerated(model, oracle.recipe("tome", family, 5000), processor=zoo.processor(family)):
        logits = model(**feed).logits
        stats = model.mmaccel.stats()
    assert stats["visual_tokens_kept"] == stats["visual_tokens"]
    assert any("tome was asked to keep 5000 tokens" in note for note in stats["notes"])
    there = feed["attention_mask"].bool()
    torch.testing.assert_close(logits[there], bare[there], rtol=1e-4, atol=1e-4)


def test_the_authors_rounding():
    """Half to even: 10.5 of 35 is 10 for DivPrune's authors, 11 by default."""
    feed, model = zoo.inputs("qwen2_5_vl"), oracle.subject("qwen2_5_vl")
    for variant, kept in (("exact", 11), ("official", 10)):
        with accelerated(model, "divprune", retain=0.3, variant=variant):
            model(**feed)
            assert model.mmaccel.stats()["visual_tokens_kept"] == kept


@pytest.mark.parametrize("name", [name for name in TOKENS if oracle.fits(name, "llava", "official")])
def test_a_count_is_a_count_with_the_authors_rounding(name):
    """One above what there is keeps everything, and says so."""
    feed, model = zoo.inputs("llava"), oracle.subject("llava")
    with accelerated(model, name, retain=37, variant="official"):
        model(**feed)
        stats = model.mmaccel.stats()
    assert any("37 tokens" in note for note in stats["notes"]), stats["notes"]
