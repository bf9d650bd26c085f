"""Law 3: a left-padded batch with unequal pictures and budgets = each row alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import oracle
import pytest
import torch
import zoo
from noise import noisy
from torch import Tensor

from mmaccel import Recipe, Reduction, Stage, accelerated, get_method, register
from mmaccel.method import ChunkMethod, EncoderMethod, LayerMethod, Policy, ProjectorMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

TOLERANCE = 2e-5
#: whatever chooses tokens or keys when the prompt is read
METHODS = oracle.named(EncoderMethod, ProjectorMethod, LayerMethod, ChunkMethod, Policy)


#: every method on every family that has what it asks for
#: those whose newlines are parameters; of HunyuanVL they are products, whose equal rows this noise moves apart
EVEN = [family for family in zoo.FAMILIES if family != "hunyuan_vl"]
SQUARE = [(family, name) for family in zoo.FAMILIES for name in METHODS if oracle.fits(name, family)]


def made(name, family):
    """A recipe of one method, with a budget that its tower can meet."""
    return oracle.recipe(name, family, 0.5 if get_method(name).site == "encoder" else 0.3)


def agrees(family, feed, what, **overrides):
    """Every row of a batch keeps the same places and gives the same logits as alone."""
    forced = oracle.force(family, len(feed["input_ids"]), 5)
    got = oracle.record(family, feed, what, forced, **overrides)
    length = feed["input_ids"].shape[1]
    for row in range(len(forced)):
        alone = zoo.single(family, feed, row)
        pads = length - alone["input_ids"].shape[1]
        other = oracle.record(family, alone, what, forced[row : row + 1], **overrides)
        if oracle.visual(family, alone).any():
            assert torch.equal(got.kept[row, pads:], other.kept[0]), "other places"
            assert not got.kept[row, :pads].any()
            owner = got.reduction.owner()[row, pads:]
            assert torch.equal(torch.where(owner < 0, -1, owner - pads), other.reduction.owner()[0])
        else:
            assert got.kept[row, pads:].all()
        for held, lone in zip(got.seen.later, other.seen.later, strict=True):
            # what comes back is seen in some steps only, and of a row without pictures every step sees all
            lone = lone if lone.dim() == held.dim() else lone[:, :, None].expand(-1, -1, held.shape[2], -1)
            assert torch.equal(held[row, ..., pads:], lone[0]), "other keys"
            assert not held[row, ..., :pads].any()
        # the products of a recurrent state follow one from another, and what was rounded grows on the way
        tolerance = 4 * TOLERANCE if oracle.adapter(family).stateful or oracle.adapter(family).indexed else TOLERANCE
        # the last position and four steps
        oracle.close(got.steps[row], other.steps[0], tolerance)
        where = got.kept[row, pads:]
        oracle.close(got.prompt[row, pads:][where], other.prompt[0][where], tolerance)
    return got


@pytest.mark.square(("family", "name", "kind"), oracle.in_turn(SQUARE, lambda _: ("uneven", "textrow")), of="pairs")
def test_a_row_in_a_batch_is_the_row_alone(family, name, kind):
    agrees(family, zoo.inputs(family, kind), made(name, family))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_four_rows_with_a_recipe_of_three_sites(family):
    layer = {"layer": oracle.first_layer(family)}
    stages = (Stage("divprune", 0.6), Stage("fastv", 0.4, layer), Stage("snapkv", 0.2, {"window": 8}))
    agrees(family, zoo.inputs(family, "uneven", batch=4), Recipe("three", stages))


@pytest.mark.square(
    ("family", "overrides", "name"),
    [
        (family, given, name)
        for family, given in oracle.WINDOWS
        for name in METHODS
        if oracle.fits(name, family, **given)
    ],
)
def test_with_sliding_windows(family, overrides, name):
    agrees(family, zoo.inputs(family, "uneven"), oracle.recipe(name, family), **overrides)


@pytest.mark.square(
    ("overrides", "name"),
    [(given, name) for _, given in oracle.RENEWED for name in METHODS if oracle.fits(name, "internvl")],
)
def test_with_other_language_models(overrides, name):
    agrees("internvl", zoo.inputs("internvl", "uneven"), oracle.recipe(name, "internvl"), **overrides)


@pytest.mark.square(("family", "name"), [case for case in SQUARE if get_method(case[1]).site == "projector"])
def test_with_paper_positions(family, name):
    agrees(family, zoo.inputs(family, "uneven"), oracle.recipe(name, family).override(positions="paper"))


@pytest.mark.square("family", zoo.FAMILIES)
@pytest.mark.square("count", (1, 7))
def test_a_count_for_every_picture(family, count):
    agrees(family, zoo.inputs(family, "uneven"), oracle.recipe("divprune", family, count))


@pytest.mark.square(
    ("family", "name"),
    [(family, name) for family in zoo.FAMILIES for name in oracle.named(ChunkMethod) if oracle.fits(name, family)],
)
@pytest.mark.square("kind", ("uneven", "textrow"))
def test_rows_of_as_many_chunks_as_they_need(family, name, kind):
    """A count a picture, of pictures of different size, so that chunks of a row join where those of another have joined."""
    layer = max(1, oracle.adapter(family).deepstack - 1)
    agrees(family, zoo.inputs(family, kind), Recipe("chunks", (Stage(name, 10, {"layer": layer}),)))


# ---------------------------------------------------------------------------------------------------------- rounding


@pytest.mark.full
@pytest.mark.square(("family", "seed"), [(family, turn % 3) for turn, family in enumerate(EVEN)])
def test_whatever_products_round(family, seed):
    """Products that round otherwise in a batch than alone change nothing: copies tie, and all else has a margin."""
    with noisy(seed):
        agrees(family, zoo.inputs(family, "uneven"), oracle.recipe("divprune", family))
        test_four_rows_with_a_recipe_of_three_sites(family)
        for count in (1, 7):
            test_a_count_for_every_picture(family, count)


@pytest.mark.full
@pytest.mark.square(("family", "name"), oracle.families_in_turn(METHODS))
def test_a_row_in_a_batch_whatever_products_round(family, name):
    with noisy(1):
        test_a_row_in_a_batch_is_the_row_alone(family, name, "uneven")


@pytest.mark.square(("family", "name"), oracle.families_in_turn(METHODS, 3))
def test_the_choices_compared_have_a_margin(family, name):
    """Louder noise changes none of them, so that a batch and a row alone must agree on any machine."""
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    kept = []
    with accelerated(model, made(name, family), processor=zoo.processor(family)):
        for seed in range(3):
            with noisy(seed, units=4):
                model(**feed)
            kept.append(model.mmaccel.reduction.owner())
    assert all(torch.equal(one, kept[0]) for one in kept)


def padded_on_the_right(feed):
    """The same rows with their padding behind them."""
    mask, out = feed["attention_mask"].bool(), dict(feed)
    for key in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if key in feed:
            out[key] = torch.zeros_like(feed[key])
            for row, real in enumerate(mask):
                out[key][row, : int(real.sum())] = feed[key][row, real]
    return out


@pytest.mark.square(
    ("family", "name"), [case for case in SQUARE if get_method(case[1]).site in ("projector", "layers")]
)
def test_a_forward_padded_on_the_right(family, name):
    feed, model = zoo.inputs(family, "uneven"), oracle.subject(family)
    with accelerated(model, oracle.recipe(name, family), processor=zoo.processor(family)):
        logits, kept = model(**padded_on_the_right(feed)).logits, model.mmaccel.reduction.kept
        for row in range(2):
            alone = zoo.single(family, feed, row)
            wanted, where = model(**alone).logits[0], model.mmaccel.reduction.kept[0]
            length = len(where)
            assert torch.equal(kept[row, :length], where) and not kept[row, length:].any()
            oracle.close(logits[row, :length][where], wanted[where], TOLERANCE)


# ------------------------------------------------------------------------------------------------------ half precision


@register
@dataclass(frozen=True)
class Recorded(ProjectorMethod):
    """Keeps what it is told to: one mask for every picture, in order."""

    name = "laws-recorded"
    budget = "adaptive"
    unit = "picture"
    masks: ClassVar[list[Tensor]] = []

    def reduce(self, tokens, count):
        kept = torch.zeros_like(tokens.valid)
        for row, mask in zip(kept, self.masks, strict=True):
            row[: len(mask)] = mask
        return Reduction(kept, tokens.valid)


def recorded_selection(family, feed):
    """What divprune keeps in float32: a mask for every picture, and the row it stands in."""
    with accelerated(oracle.subject(family), "divprune", retain=0.3) as model:
        model(**feed)
        kept, segments = model.mmaccel.reduction.kept, model.mmaccel.layout.segments
    parts: dict[tuple[int, int], list[Tensor]] = {}
    for segment in segments:
        parts.setdefault((segment.picture, segment.row), []).append(kept[segment.row, segment.places])
    return [(row, torch.cat(masks)) for (_, row), masks in sorted(parts.items())]


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_bfloat16_is_as_close_as_the_bare_model(family):
    """One selection, made in float32, is replayed; the batch may differ from the row alone by twice what it does bare.

    The differences are a bit or two of the largest logits, so the worst of four batches is compared.
    """
    half, forced = zoo.model(family).to(torch.bfloat16), oracle.force(family, 2)

    def as_half(values):
        return {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in dict(values).items()}

    def gap(feed, chosen):
        Recorded.masks[:] = [mask for _, mask in chosen]
        batch, _ = oracle.decode(half, as_half(feed), forced)
        gaps = []
        for row in range(2):
            Recorded.masks[:] = [mask for at, mask in chosen if at == row]
            alone, _ = oracle.decode(half, as_half(zoo.single(family, feed, row)), forced[row : row + 1])
            gaps.append((batch[row].float() - alone[0].float()).abs().max().item())
        return max(gaps)

    cases = [
        (feed, recorded_selection(family, feed)) for feed in (zoo.inputs(family, "uneven", seed=s) for s in range(4))
    ]
    bare = max(gap(*case) for case in cases)
    with accelerated(half, Recipe("recorded", (Stage("laws-recorded", 0.3),))):
        reduced = max(gap(*case) for case in cases)
        assert 0 < half.mmaccel.reduction.kept.sum() < half.mmaccel.reduction.valid.sum()
    assert 0 < bare < 0.25 and reduced <= 2 * bare, f"{reduced:.3g} accelerated, {bare:.3g} bare"
