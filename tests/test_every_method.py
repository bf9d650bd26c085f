"""What holds for every method of the registry, whoever wrote it: the laws of its kind on synthetic batches, without a model.

A method that is registered, by mmaccel or by a package that is installed, is here by itself (see :mod:`synthetic`). The laws of
whole models are in `tests/laws`, and methods that are wrong on purpose in test_every_law.py show that every law can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from torch import Tensor

from mmaccel.core.budget import resolve
from mmaccel.core.reduction import Reduction
from mmaccel.frames.clip import FrameEncoder
from mmaccel.kv.codecs.base import Codec
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.kv.select import choose, rank
from mmaccel.method import (
    EncoderMethod,
    ExpertMethod,
    FrameMergingMethod,
    FramesMethod,
    KeyBatch,
    Method,
    PatchMethod,
    Policy,
    RebuildingMethod,
    RetracingMethod,
    ReuseMethod,
    TokenBatch,
    TokenMethod,
)
from mmaccel.method.registry import methods

pytestmark = pytest.mark.usefixtures("_stand_in")

#: one token, shares that do not come out even, everything, counts
BUDGETS = (1e-6, 0.29, 0.5, 0.85, 1.0, 1, 5)
HALVES = (torch.bfloat16, torch.float16)

Law = Callable[[Any], None]


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded: in place of a CLIP model stands an encoder of a few pixels."""
    monkeypatch.setattr(FrameEncoder, "load", lambda name: synthetic.StandIn())


def same(one: Any, other: Any) -> bool:
    """To the bit, NaN included."""
    if isinstance(one, Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(7e6), other.nan_to_num(7e6)))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def repeats(run: Callable[[], Any], others: Callable[[], Any], given: Callable[[], Any]) -> None:
    """What ``run`` makes is the same every time, whatever ``others`` ran in between; what it is ``given`` stays as it was, and
    so do the random numbers of the process."""
    torch.manual_seed(7)
    state, before = torch.get_rng_state(), [x.clone() if isinstance(x, Tensor) else x for x in given()]
    first = run()
    assert torch.equal(torch.get_rng_state(), state), "it draws from the generator of the process"
    others()
    torch.rand(3)
    assert same(run(), first), "twice is not the same"
    assert same(before, list(given())), "it writes into what it is given"


def tensors_of(given: Any) -> list[Any]:
    """Everything that a batch holds."""
    # not what it works out of these when it is asked
    held = [x for field in fields(given) if isinstance(x := getattr(given, field.name), Tensor)]
    return held + list(getattr(given, "signals", {}).values())


# ---------------------------------------------------------------------------------------------- tokens and what they become


def counts(tokens: TokenBatch, retain: float) -> Tensor:
    """The budget of every unit; one that has no token left has none."""
    sizes = tokens.valid.sum(1).tolist()
    return torch.tensor([resolve(min(retain, n) if isinstance(retain, int) else retain, n) if n else 0 for n in sizes])


def reduced(method: TokenMethod, tokens: TokenBatch, count: Tensor) -> Reduction:
    """What the method makes of it: only tokens that are there stay, and only they flow into them."""
    made = method.reduce(tokens, count)
    assert torch.equal(made.valid, tokens.valid) and made.kept.dtype == torch.bool
    assert not (made.kept & ~tokens.valid).any(), "padding stays"
    links = made.full_links()
    assert made.kept[links.batch, links.slot].all() and tokens.valid[links.batch, links.source].all()
    assert links.weight.isfinite().all()
    return made


def parts(made: Reduction) -> tuple[Tensor, ...]:
    links = made.full_links()
    return made.kept, links.batch, links.slot, links.source, links.weight


def seen_by(method: TokenMethod) -> list[TokenBatch]:
    """What enters the language model, what an earlier stage left of it, and many copies."""
    return [
        synthetic.tokens_of(method),
        synthetic.tokens_of(method, thin=True),
        synthetic.tokens_of(method, "copies", seed=1),
    ]


def tokens_repeat(method: TokenMethod) -> None:
    for tokens in seen_by(method):
        count = counts(tokens, 0.3)
        repeats(
            lambda tokens=tokens, count=count: parts(method.reduce(tokens, count)),
            lambda: method.reduce(other := synthetic.tokens_of(method, seed=5), counts(other, 0.7)),
            lambda tokens=tokens, count=count: [*tensors_of(tokens), count],
        )


def a_unit_in_a_batch_is_the_unit_alone(method: TokenMethod) -> None:
    for tokens in seen_by(method):
        count = counts(tokens, 0.3)
        made = reduced(method, tokens, count)
        links = made.full_links()
        for row in count.nonzero()[:, 0].tolist():
            lone = reduced(method, synthetic.alone(tokens, row), count[row : row + 1])
            size, mine, its = int(tokens.valid[row].sum()), links.batch == row, lone.full_links()
            assert torch.equal(made.kept[row, :size], lone.kept[0]), f"unit {row} keeps other tokens alone"
            assert torch.equal(links.slot[mine], its.slot) and torch.equal(links.source[mine], its.source)
            torch.testing.assert_close(links.weight[mine].float(), its.weight.float(), rtol=1e-5, atol=1e-6)


def in_its_class(method: Method, kept: Tensor, asked: Tensor) -> None:
    """The class of the budget that the method declares."""
    assert method.budget in ("exact", "at_most", "adaptive")
    if method.budget == "exact":
        assert torch.equal(kept, asked), f"{kept.tolist()} stay where {asked.tolist()} are asked for"
    if method.budget == "at_most":
        assert (kept <= asked).all(), f"{kept.tolist()} stay where at most {asked.tolist()} may"
    assert (kept >= asked.clamp(max=1)).all(), f"nothing stays of {asked.tolist()}"


def tokens_meet_their_budget(method: TokenMethod) -> None:
    for tokens in seen_by(method):
        for retain in BUDGETS:
            count = counts(tokens, retain)
            in_its_class(method, reduced(method, tokens, count).kept.sum(1), count)


def empty_and_full_token_budgets(method: TokenMethod) -> None:
    """A budget of a picture that is split over its tiles may leave nothing to some, and everything to others."""
    for tokens in seen_by(method):
        size = tokens.valid.sum(1)
        nothing = reduced(method, tokens, torch.zeros_like(size))
        some = size * (torch.arange(len(size)) % 2)
        mixed = reduced(method, tokens, some)
        if method.budget == "adaptive":
            continue
        assert not nothing.kept.any(), "something stays of nothing"
        for made in (reduced(method, tokens, size), mixed):
            whole = (made.kept == tokens.valid).all(1)
            assert whole[(some > 0) | (size == 0)].all(), "with room for all of them not all tokens stay"
            x = made.substitute(tokens.features)
            torch.testing.assert_close(x[whole], tokens.features[whole], msg="what stays whole changes")


def padded_slots_are_not_looked_at(method: TokenMethod) -> None:
    for tokens in seen_by(method):
        count = counts(tokens, 0.3)
        wanted = parts(method.reduce(tokens, count))
        for poison in (torch.nan, 3e4, -3e4):
            assert same(parts(method.reduce(poisoned(tokens, poison), count)), wanted), f"{poison} in padding matters"


def poisoned(tokens: TokenBatch, poison: float) -> TokenBatch:
    """The same with other numbers in padding."""
    pad, question = ~tokens.valid, tokens.question
    if question is not None and tokens.question_valid is not None:
        question = question.masked_fill(~tokens.question_valid[..., None], poison)

    def fill(x: Tensor) -> Tensor:
        at = pad if x.shape[:2] == pad.shape else pad[:, None]
        return x.masked_fill(at.view(*at.shape, *[1] * (x.dim() - at.dim())), poison)

    signals = {name: fill(x) for name, x in tokens.signals.items()}
    return replace(tokens, features=fill(tokens.features), signals=signals, question=question)


def tokens_in_half_precision(method: TokenMethod) -> None:
    """Half precision is how features come; it is computed in float32, so that the choice is that of the same numbers."""
    for dtype in HALVES:
        for content in ("noise", "copies"):
            tokens = synthetic.tokens_of(method, content, dtype=dtype)
            count, asked = counts(tokens, 0.3), tokens.question
            whole = replace(tokens, features=tokens.features.float(), question=None if asked is None else asked.float())
            made = reduced(method, tokens, count)
            in_its_class(method, made.kept.sum(1), count)
            assert same(parts(made), parts(method.reduce(tokens, count))), "twice is not the same"
            assert same(parts(made)[:4], parts(method.reduce(whole, count))[:4]), "other tokens than in float32"
            out = made.apply(tokens.features)
            assert out.dtype == dtype and out.isfinite().all()


def equal_tokens_keep_the_first(method: TokenMethod) -> None:
    """Whoever ranks tokens by content alone takes the lower slots of those that are equal."""
    if not by_rank(method):
        return
    flat = synthetic.tokens_of(method, "flat", grids=True)
    kept = reduced(method, flat, counts(flat, 0.3)).kept
    low = torch.arange(kept.shape[1]) < kept.sum(1, keepdim=True)
    assert torch.equal(kept, low & flat.valid), "of equal tokens others stay than the first"


def by_rank(method: TokenMethod) -> bool:
    """Shown, not declared: the choice moves with the content, and what stays of a smaller budget stays of a larger one. Others
    spread their choice, compare frames, or match tokens by turns."""
    tokens = synthetic.tokens_of(method, grids=True)
    count, sizes = counts(tokens, 0.3), tokens.valid.sum(1).tolist()
    order = [torch.randperm(size, generator=torch.Generator().manual_seed(row)) for row, size in enumerate(sizes)]
    kept = method.reduce(tokens, count).kept
    after, more = (method.reduce(*seen).kept for seen in ((shuffled(tokens, order), count), (tokens, 2 * count)))
    moves = all(torch.equal(kept[row, at], after[row, : len(at)]) for row, at in enumerate(order))
    return moves and not (kept & ~more).any()


def shuffled(tokens: TokenBatch, order: list[Tensor]) -> TokenBatch:
    """What tokens are, and all figures about them, in other slots."""
    at = torch.arange(tokens.valid.shape[1]).repeat(len(order), 1)
    for row, mine in enumerate(order):
        at[row, : len(mine)] = mine

    def move(x: Tensor) -> Tensor:
        dim = 1 if x.shape[:2] == at.shape else 2
        where = at if dim == 1 else at[:, None]
        return x.gather(dim, where.view(*where.shape, *[1] * (x.dim() - where.dim())).expand_as(x))

    return replace(tokens, features=move(tokens.features), signals={k: move(x) for k, x in tokens.signals.items()})


def mass_is_conserved(method: TokenMethod) -> None:
    """Who says that it loses none: weights are those of a mean, and every token with a cell counts in one that stays."""
    if not method.conserves_mass:
        return
    for tokens in seen_by(method):
        made = reduced(method, tokens, counts(tokens, 0.3))
        links, total = made.full_links(), torch.zeros_like(tokens.valid, dtype=torch.float32)
        total.index_put_((links.batch, links.slot), links.weight.float(), accumulate=True)
        torch.testing.assert_close(total[made.kept], torch.ones(int(made.kept.sum())))
        celled = tokens.valid & (tokens.cells >= 0).all(-1)
        assert (made.owner()[celled] >= 0).all(), "a token is lost"
        assert float(made.mass().sum()) == float((made.owner() >= 0).sum())


# -------------------------------------------------------------------------------------------------- in front of the tower


def tiles() -> list[Tensor]:
    contents: tuple[synthetic.Content, ...] = ("noise", "copies", "flat")
    return [synthetic.patches_of(content) for content in contents]


def predicted(method: PatchMethod, pixels: Tensor) -> Tensor:
    """What predicts others is encoded, so that something is of every tile."""
    source = method.predict(pixels)
    assert source.shape == (len(pixels), pixels.shape[1] * pixels.shape[2]) and source.dtype == torch.long
    assert ((source >= 0) & (source < source.shape[1])).all()
    assert torch.equal(source.gather(1, source), source), "a patch is predicted from one that is not encoded"
    return source


def predictions_repeat(method: PatchMethod) -> None:
    for pixels in tiles():
        repeats(
            lambda pixels=pixels: method.predict(pixels),
            lambda: method.predict(synthetic.patches_of("copies", seed=5)),
            lambda pixels=pixels: [pixels],
        )


def patches_of_a_tile_are_those_of_the_tile_alone(method: PatchMethod) -> None:
    for pixels in tiles():
        source = predicted(method, pixels)
        for row in range(len(source)):
            assert torch.equal(predicted(method, pixels[row : row + 1])[0], source[row])


def what_predicts_is_encoded(method: PatchMethod) -> None:
    """In grids of any shape, and something is left out of a tile of one colour."""
    assert method.budget == "none"
    for shape in ((1, 1), (1, 7), (7, 1), (6, 9), (2, 2)):
        for pixels in tiles():
            predicted(method, pixels[:, : shape[0], : shape[1]].repeat(1, 2, 1, 1)[:, : shape[0]])
    source = predicted(method, synthetic.patches_of("flat"))
    assert (source != torch.arange(source.shape[1])).any(), "all of one colour is encoded"


# ---------------------------------------------------------------------------------------------- between frames in the tower


def pairs() -> list[tuple[Tensor, Tensor]]:
    contents: tuple[synthetic.Content, ...] = ("noise", "copies", "flat")
    return [synthetic.frames_of(content) for content in contents]


def recomputed(method: ReuseMethod, keys: Tensor, stored: Tensor) -> Tensor:
    """Tokens that there are, none twice."""
    made = method.recompute(keys, stored)
    assert made.dtype == torch.long and made.dim() == 2 and made.shape[0] == len(keys) and made.shape[1] >= 1
    assert (made[:, 0] >= 0).all() and (made[:, -1] < keys.shape[1]).all() and (made.diff(dim=1) > 0).all()
    return made


def reuse_repeats(method: ReuseMethod) -> None:
    for keys, stored in pairs():
        repeats(
            lambda given=(keys, stored): [method.recompute(*given), method.references(7)],
            lambda: method.recompute(*synthetic.frames_of(seed=5)),
            lambda given=(keys, stored): list(given),
        )


def a_frame_in_a_batch_is_the_frame_alone(method: ReuseMethod) -> None:
    for keys, stored in pairs():
        made = recomputed(method, keys, stored)
        for row in range(len(made)):
            one = slice(row, row + 1)
            assert torch.equal(recomputed(method, keys[one], stored[one])[0], made[row])


def references_come_before(method: ReuseMethod) -> None:
    """The first frame has none but itself, a later one does not change those before it, and some frame has another."""
    assert method.budget == "none"
    for frames in range(1, 9):
        made = method.references(frames)
        assert len(made) == frames and all(0 <= at <= frame and made[at] == at for frame, at in enumerate(made))
        assert method.references(frames + 1)[:frames] == made
    assert method.references(8) != list(range(8)), "nothing is reused"


def a_part_is_computed(method: ReuseMethod) -> None:
    """As much of every frame, whatever is in it; of equal tokens the first."""
    sizes = {recomputed(method, keys, stored).shape[1] for keys, stored in pairs()}
    assert len(sizes) == 1 and max(sizes) < pairs()[0][0].shape[1], "everything is computed"
    ones = torch.ones_like(pairs()[0][0])
    made = recomputed(method, ones, ones)
    assert torch.equal(made, torch.arange(made.shape[1]).expand_as(made)), "of equal tokens others are computed"


# ------------------------------------------------------------------------------------------- frames and patches in the tower


def clips() -> list[Tensor]:
    """Frames ``[T, P, C]`` of clips: noise, a slow pan, standing still, one frame."""
    random = torch.Generator().manual_seed(0)
    start, step = torch.randn(2, 1, 9, 12, generator=random)
    pan = start + 0.1 * step * torch.arange(12.0)[:, None, None] + 0.05 * torch.randn(12, 9, 12, generator=random)
    return [torch.randn(7, 9, 12, generator=random), pan, start.repeat(5, 1, 1), start]


def frame_merges_repeat(method: FrameMergingMethod) -> None:
    for frames in clips():
        repeats(
            lambda given=frames: [method.merge(given), list(method.depths())],
            lambda: method.merge(clips()[1].flip(0)),
            lambda given=frames: [given],
        )


def frames_left_keep_their_order(method: FrameMergingMethod) -> None:
    """The first one stays first, weights sum to one, a single frame stays as it is, and some clip gets shorter."""
    shorter = 0
    for frames in clips():
        weights = method.merge(frames)
        first = (weights > 0).long().argmax(1)
        assert weights.shape[1] == len(frames) and first[0] == 0 and (first.diff() > 0).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
        shorter += len(weights) < len(frames)
        if len(frames) == 1:
            assert torch.equal(weights, torch.ones(1, 1))
    assert shorter, "no frames merge"


def patches() -> list[tuple[Tensor, Tensor]]:
    """Hidden states ``[n, C]`` at the inputs of two layers."""
    return [(before[0], now[0]) for now, before in pairs()]


def parts_repeat(method: RebuildingMethod) -> None:
    for before, now in patches():
        repeats(
            lambda given=(before, now): [method.choose(*given), method.sources(given[1][9:], given[1][:9])],
            lambda: method.choose(*patches()[0]),
            lambda given=(before, now): list(given),
        )


def as_many_patches_are_computed(method: RebuildingMethod) -> None:
    """A part, as large whatever is in it; of equal patches the first; sources are among those that are computed."""
    sizes = set()
    for before, now in patches():
        chosen = method.choose(before, now)
        assert chosen.dtype == torch.long and (chosen.diff() > 0).all() and 0 <= chosen[0] and chosen[-1] < len(now)
        sizes.add(len(chosen))
        sources = method.sources(now[20:], now[:20])
        assert sources.dtype == torch.long and len(sources) == len(now[20:]) and sources.shape[1] >= 1
        assert 0 <= sources.min() and sources.max() < 20
    assert len(sizes) == 1 and max(sizes) < len(patches()[0][0]), "everything is computed"
    ones = torch.ones_like(patches()[0][0])
    made = method.choose(ones, ones)
    assert torch.equal(made, torch.arange(len(made))), "of equal patches others are computed"
    assert len(method.choose(ones[:1], ones[:1])) == 1


def the_choice_is_inside_the_tower(method: RebuildingMethod) -> None:
    for layers in range(2, 40):
        first, full = method.span(layers)
        assert 1 <= first < layers and 0 <= full <= layers - first


# ----------------------------------------------------------------------------------------- shown again inside the model


def looks(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Input and output of an MLP ``[B, q, D]``, visual tokens ``[B, n, D]``, which are shown and which tokens are real: rows of
    other lengths, the last of which is shown nothing."""
    random = torch.Generator().manual_seed(3)
    hidden, output, visual = (torch.randn(3, n, synthetic.WIDTH, generator=random).to(dtype) for n in (5, 5, 9))
    shown = torch.arange(9) < torch.tensor([9, 6, 0])[:, None]
    real = torch.arange(5) >= torch.tensor([0, 2, 1])[:, None]
    return hidden, output, visual, shown, real


def logits() -> Tensor:
    """``[B, V]``, from sure to clueless."""
    random = torch.Generator().manual_seed(4)
    return torch.randn(6, 40, generator=random) * torch.tensor([[30.0], [10.0], [3.0], [1.0], [0.3], [0.0]])


def looks_repeat(method: RetracingMethod) -> None:
    repeats(lambda: method.retrace(*looks()), lambda: method.retrace(*(x.flip(0) for x in looks())), looks)
    repeats(lambda: method.is_uncertain(logits()), lambda: method.is_uncertain(-logits()), lambda: [logits()])


def a_row_looks_as_it_does_alone(method: RetracingMethod) -> None:
    """Whatever is in its padding."""
    given, sure = looks(), method.is_uncertain(logits())
    got = method.retrace(*given)
    for row, (shown, real) in enumerate(zip(*given[3:], strict=True)):
        hidden, output, visual = (x[row : row + 1] for x in given[:3])
        lone = method.retrace(hidden[:, real], output[:, real], visual[:, shown], shown[None, shown], None)
        torch.testing.assert_close(got[row, real].float(), lone[0].float(), rtol=1e-4, atol=1e-5)
        assert got[row].isfinite().all()
    hidden, output, visual, shown, real = given
    other = visual.masked_fill(~shown[..., None], 1e4)
    assert same(method.retrace(hidden, output, other, shown, real)[real], got[real]), (
        "tokens that are not shown are seen"
    )
    for row in range(len(sure)):
        assert method.is_uncertain(logits()[row : row + 1]) == sure[row]


def some_forwards_are_uncertain(method: RetracingMethod) -> None:
    """Not where one token has all probability; and a look changes something."""
    sure = method.is_uncertain(logits())
    assert sure.dtype == torch.bool and sure.shape == (6,) and not sure.all() and sure.any()
    got, output = method.retrace(*looks()), looks()[1]
    assert got.shape == output.shape and got.is_floating_point() and not torch.allclose(got[0].float(), output[0])


def layers_are_read_out_below_the_last(method: RetracingMethod) -> None:
    for depth in range(2, 40):
        layers = list(method.readouts(depth))
        assert layers and layers == sorted(set(layers)) and 0 <= layers[0] and layers[-1] < depth - 1


def looks_in_half_precision(method: RetracingMethod) -> None:
    for dtype in HALVES:
        hidden, output, visual, shown, real = looks(dtype)
        got = method.retrace(hidden, output, visual, shown, real)
        exact = method.retrace(hidden.float(), output.float(), visual.float(), shown, real)
        torch.testing.assert_close(got.float(), exact.float(), rtol=2e-2, atol=2e-2)


def routed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of chosen experts ``[B, q, k]``, input of the experts ``[B, q, D]``, attention and real tokens ``[B, q]``."""
    random = torch.Generator().manual_seed(5)
    weights = torch.rand(2, 40, 4, generator=random).softmax(-1)
    hidden, received = torch.randn(2, 40, 16, generator=random), torch.rand(2, 40, generator=random)
    return weights, hidden, received, torch.arange(40) >= torch.tensor([0, 11])[:, None]


def uses_repeat(method: ExpertMethod) -> None:
    repeats(lambda: method.uses(*routed()), lambda: method.uses(*(x.flip(0) for x in routed())), routed)


def a_row_uses_what_it_uses_alone(method: ExpertMethod) -> None:
    """Whatever is in its padding; and some tokens skip some experts."""
    given = routed()
    weights, hidden, received, real = given
    got = method.uses(*given)
    assert got.shape == weights.shape and got.dtype == torch.bool and got.any() and not got[real].all()
    for row in range(2):
        lone = [x[row : row + 1, real[row]] for x in given]
        assert torch.equal(method.uses(*lone)[0], got[row, real[row]])
    other = method.uses(weights, hidden.masked_fill(~real[..., None], 1e4), received.masked_fill(~real, 9.0), real)
    assert torch.equal(other[real], got[real]), "padding matters"
    assert method.uses(weights, hidden, None, real).any(-1).all(), "a token behind the prompt has no expert left"


# ------------------------------------------------------------------------------------------------------- inside the tower


def towers(method: EncoderMethod) -> list[Any]:
    contents: tuple[synthetic.Content, ...] = ("noise", "copies", "flat")
    return [synthetic.tower_of(method, content) for content in contents]


def matched(method: EncoderMethod, tokens: Any, remove: int) -> Tensor:
    """Tokens flow into others that stay, CLS and nothing flows into it."""
    target = method.match(tokens, remove)
    own = torch.arange(target.shape[1]).expand_as(target)
    assert target.dtype == torch.long and ((target >= 0) & (target < target.shape[1])).all()
    assert torch.equal(target.gather(1, target), target), "a token flows into one that does not stay"
    protected = own < tokens.protected
    assert torch.equal(target[protected], own[protected]) and (target[~protected] >= tokens.protected).all()
    return target


def merges_repeat(method: EncoderMethod) -> None:
    for tokens in towers(method):
        repeats(
            lambda tokens=tokens: [made := method.match(tokens, 13), method.weigh(tokens, made)],
            lambda: method.match(synthetic.tower_of(method, seed=5), 7),
            lambda tokens=tokens: tensors_of(tokens),
        )


def a_tile_in_a_batch_is_the_tile_alone(method: EncoderMethod) -> None:
    for tokens in towers(method):
        target = matched(method, tokens, 13)
        weight = method.weigh(tokens, target)
        for row in range(len(target)):
            one = synthetic.tile_of(tokens, row)
            assert torch.equal(matched(method, one, 13)[0], target[row])
            torch.testing.assert_close(method.weigh(one, target[row : row + 1])[0], weight[row])


def as_many_merge_as_are_to_go(method: EncoderMethod) -> None:
    """From none to what a layer can remove at most; who conserves mass takes means."""
    assert method.budget == "exact"
    for tokens in towers(method):
        for remove in (0, 1, 13, min(20, max(method.schedule(40, 1, 20)))):
            target = matched(method, tokens, remove)
            gone = target != torch.arange(target.shape[1])
            assert (gone.sum(1) == remove).all()
            weight = method.weigh(tokens, target)
            assert weight.shape == target.shape and weight.isfinite().all() and (weight > 0).all()
            if method.conserves_mass:
                total = torch.zeros_like(weight).scatter_add_(1, target, weight)
                assert torch.allclose(total[~gone], torch.ones(int((~gone).sum())), atol=1e-5)


def schedules_meet_their_budget(method: EncoderMethod) -> None:
    for size in (16, 41, 576):
        for layers in (1, 3, 12):
            least = method.fewest(size, layers)
            assert 1 <= least <= size
            for kept in {least, (least + size) // 2, size}:
                row = method.schedule(size, layers, kept)
                assert len(row) == layers and min(row) >= 0 and sum(row) == size - kept


def what_is_protected_takes_no_part(method: EncoderMethod) -> None:
    for tokens in towers(method):
        wanted, keys = method.match(tokens, 13), tokens.keys.clone()
        for poison in (torch.nan, 1e6):
            keys[:, : tokens.protected] = poison
            assert torch.equal(method.match(replace(tokens, keys=keys), 13), wanted)


def merges_of_keys_in_half_precision(method: EncoderMethod) -> None:
    for dtype in HALVES:
        tokens = synthetic.tower_of(method, dtype=dtype)
        target = matched(method, tokens, 13)
        assert ((target != torch.arange(target.shape[1])).sum(1) == 13).all()
        assert torch.equal(target, method.match(tokens, 13))


# ---------------------------------------------------------------------------------------------------------------- policies


def ranked(policy: Policy, keys: KeyBatch) -> Tensor:
    """The scores, as many as there are keys, of which none that is there is undefined."""
    scores = rank(policy, keys)
    assert scores.shape == keys.keys.shape[:3]
    there = keys.valid[:, None].expand_as(scores)
    assert not scores[there].isnan().any(), "a key has no score"
    if policy.shared:
        assert torch.equal(scores, scores[:, :1].expand_as(scores)), "heads are said to choose alike"
    return scores


def rivals(policy: Policy, keys: KeyBatch) -> Tensor:
    return keys.valid if policy.joint else keys.valid & keys.visual


def stays(policy: Policy, keys: KeyBatch) -> Tensor:
    """``[B, Hkv, K]`` bool, what stays of the keys that compete."""
    assert keys.count is not None
    return choose(policy, ranked(policy, keys), rivals(policy, keys), keys.count)


def shown_to(policy: Policy) -> list[KeyBatch]:
    return [synthetic.keys_of(policy), synthetic.keys_of(policy, "copies", seed=1)]


def keys_repeat(policy: Policy) -> None:
    for keys in shown_to(policy):
        repeats(
            lambda keys=keys: [policy.score(replace(keys, memo={})), observed(policy)],
            lambda: policy.score(synthetic.keys_of(policy, seed=5)),
            lambda keys=keys: tensors_of(keys),
        )


def observed(policy: Policy, rows: slice = slice(None), first: int = 0, poison: float | None = None) -> Tensor:
    """``[B, Hkv, K]`` what the policy notes of a forward."""
    seen = synthetic.prompt_attention(policy)
    pad = (torch.arange(synthetic.KEYS) < torch.tensor(synthetic.PADS)[:, None])[:, None, :, None]
    key = seen.key if poison is None else seen.key.masked_fill(pad, poison)
    visible = None if seen.visible is None else seen.visible[rows, :, first:, first:]
    seen = replace(
        seen,
        query=seen.query[rows, :, first:],
        key=key[rows, :, first:],
        visible=visible,
        text=seen.text[rows, first:],
        places=None if seen.places is None else seen.places[rows, first:],
    )
    return policy.observe(seen, torch.zeros(seen.key.shape[:3])) if policy.observes else torch.zeros(1)


def a_row_in_a_batch_is_the_row_alone(policy: Policy) -> None:
    """The second row has padding in front."""
    for keys in shown_to(policy):
        kept = stays(policy, keys)
        for row in range(len(kept)):
            lone = synthetic.row_of(keys, row)
            assert torch.equal(kept[row][:, keys.valid[row]], stays(policy, lone)[0]), f"row {row} keeps others alone"
    if policy.observes:
        whole = observed(policy)
        for row, pad in enumerate(synthetic.PADS):
            lone = observed(policy, slice(row, row + 1), pad)
            torch.testing.assert_close(whole[row, :, pad:], lone[0], rtol=1e-4, atol=1e-6)


def keys_meet_their_budget(policy: Policy) -> None:
    """None, one, some, all, and other counts in every row; what recalls reads as many and forgets none."""
    for keys in shown_to(policy):
        among = rivals(policy, keys)
        size = among.sum(1)
        for asked in (size * 0, size.clamp(max=1), size // 3, torch.stack([size[0], size[1] // 2]), size):
            kept = stays(policy, replace(keys, count=asked, memo={}))
            assert not (kept & ~among[:, None]).any(), "what does not compete is counted"
            if policy.budget == "none":
                assert (kept <= among[:, None]).all()
            else:
                found = kept.sum(-1)
                in_its_class(policy, found, asked[:, None].expand_as(found))
            # those that choose in every layer are in tests/kv/test_reading_layers.py
            if type(policy).recall is not Policy.recall:
                paid = torch.rand(among.shape, generator=torch.Generator().manual_seed(0))
                read = policy.recall(paid, None, among, asked, None)
                assert torch.equal(read.sum(1), asked) and not (read & ~among).any()
                again = policy.recall(paid.flip(1), paid, among, asked, read)
                assert not (again & ~among).any() and (again.sum(1) <= asked).all()


def padded_keys_are_not_looked_at(policy: Policy) -> None:
    for keys in shown_to(policy):
        wanted, pad = stays(policy, keys), ~keys.valid[:, None]
        for poison in (torch.nan, 3e4, -3e4):
            filled = {
                name: x.masked_fill(pad if x.dim() == 3 else pad[..., None], poison)
                for name in ("keys", "values", "received", "outgoing")
                if (x := getattr(keys, name)) is not None
            }
            assert torch.equal(stays(policy, replace(keys, **filled, memo={})), wanted), f"{poison} in padding matters"
    if policy.observes:
        there = ~(torch.arange(synthetic.KEYS) < torch.tensor(synthetic.PADS)[:, None])[:, None].expand(-1, 2, -1)
        assert same(observed(policy)[there], observed(policy, poison=3e4)[there])


def keys_in_half_precision(policy: Policy) -> None:
    for dtype in HALVES:
        keys = synthetic.keys_of(policy, dtype=dtype)
        floats = {name: getattr(keys, name).float() for name in ("keys", "values", "queries")}
        kept = stays(policy, keys)
        if policy.budget == "exact":
            assert (kept.sum(-1) == 10).all()
        assert torch.equal(kept, stays(policy, keys)), "twice is not the same"
        assert torch.equal(kept, stays(policy, replace(keys, **floats, memo={}))), "other keys than in float32"


def equal_keys_keep_the_first(policy: Policy) -> None:
    """Of policies that choose by content alone, see :func:`equal_tokens_keep_the_first`."""
    if not by_content(policy):
        return
    keys = synthetic.keys_of(policy, "flat")
    low = keys.visual & (keys.visual.cumsum(1) <= 10)
    kept = stays(policy, keys)
    assert torch.equal(kept, low[:, None].expand_as(kept)), "of equal keys others stay than the first"


def by_content(policy: Policy) -> bool:
    """Whether the choice moves with keys, values and what is known of them."""
    keys = synthetic.keys_of(policy)
    visual, order = keys.visual[0].nonzero()[:, 0], torch.arange(synthetic.KEYS)
    order[visual] = visual[torch.randperm(len(visual), generator=torch.Generator().manual_seed(0))]
    names = [name for name in ("keys", "values", "received", "outgoing") if getattr(keys, name) is not None]
    moved = replace(keys, **{name: getattr(keys, name)[:, :, order] for name in names}, memo={})
    # where text competes too it may be text that stays
    return (
        policy.budget != "none"
        and not policy.joint
        and torch.equal(stays(policy, keys)[..., order], stays(policy, moved))
    )


# ------------------------------------------------------------------------------------------------------------------ codecs


def packed(codec: Codec, heads: synthetic.Heads) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every head as they come back."""
    pages = codec.pack(heads.keys, heads.values, heads.lengths, query_energy=heads.query_energy)
    assert torch.equal(pages.lengths(), heads.lengths)
    keys, values = pages.decoded()
    assert keys.shape == heads.keys.shape and values.shape == heads.values.shape
    assert keys.isfinite().all() and values.isfinite().all()
    ends = heads.lengths.flatten().tolist()
    return list(zip(keys.split(ends), values.split(ends), strict=True))


def packs_repeat(codec: Codec) -> None:
    for content in ("noise", "copies"):
        heads = synthetic.heads_of(codec, content)
        repeats(
            lambda heads=heads: [
                *codec.pack(heads.keys, heads.values, heads.lengths, query_energy=heads.query_energy).tensors()
            ],
            lambda: packed(codec, synthetic.heads_of(codec, seed=5)),
            lambda heads=heads: tensors_of(heads),
        )


def heads_in_a_batch_are_the_heads_alone(codec: Codec) -> None:
    """And whatever is in the other rows."""
    heads = synthetic.heads_of(codec)
    whole = packed(codec, heads)
    other = synthetic.Heads(heads.keys.clone(), heads.values.clone(), heads.lengths, heads.query_energy)
    mine, count = int(heads.lengths[0].sum()), heads.lengths.shape[1]
    other.keys[mine:], other.values[mine:] = 50.0, -50.0
    assert same(packed(codec, other)[:count], whole[:count])
    for row in range(len(heads.lengths)):
        assert same(packed(codec, heads.row(row)), whole[row * count : (row + 1) * count])


def everything_is_stored_in_fewer_bytes(codec: Codec) -> None:
    """A codec drops no token, and what comes back points where what went in did."""
    assert codec.budget == "none"
    for content in ("noise", "copies"):
        heads = synthetic.heads_of(codec, content)
        keys, values = (torch.cat(x) for x in zip(*packed(codec, heads), strict=True))
        for stored, true in ((keys, heads.keys), (values, heads.values)):
            assert torch.cosine_similarity(stored.flatten(), true.flatten(), dim=0) > 0.5
        pages = codec.pack(heads.keys, heads.values, heads.lengths, query_energy=heads.query_energy)
        assert pages.nbytes() < 0.75 * 2 * (heads.keys.numel() + heads.values.numel())
    lengths = torch.arange(4 * codec.page)
    ready = codec.packable(lengths)
    assert (ready >= 0).all() and (ready <= (lengths - codec.residual).clamp(min=0)).all()
    assert (lengths - codec.residual - ready < codec.page).all(), "whole pages wait"


def equal_tokens_are_stored_as_equal(codec: Codec) -> None:
    for keys, values in packed(codec, synthetic.heads_of(codec, "flat")):
        assert torch.equal(keys, keys[:1].expand_as(keys)) and torch.equal(values, values[:1].expand_as(values))


def packs_of_half_precision(codec: Codec) -> None:
    """As near as those of the same numbers in float32, but for the rounding of scales."""
    for dtype in HALVES:
        heads = synthetic.heads_of(codec, dtype=dtype)
        whole = synthetic.Heads(heads.keys.float(), heads.values.float(), heads.lengths, heads.query_energy)
        assert same(packed(codec, heads), packed(codec, heads)), "twice is not the same"
        made, wanted = (zip(*packed(codec, one), strict=True) for one in (heads, whole))
        for ours, floats, true in zip(made, wanted, (whole.keys, whole.values), strict=True):
            off, least = (torch.cat(x).sub(true).norm() for x in (ours, floats))
            assert off <= 1.01 * least + torch.finfo(dtype).eps * true.norm()


# ------------------------------------------------------------------------------------------------------------------ frames

LENGTHS = (1, 2, 7, 16)


def frames_repeat(method: FramesMethod) -> None:
    frames = synthetic.clip_of(9)
    repeats(
        lambda: [method.clip(frames, 0.4), method.choose(frames, 0.4)],
        lambda: method.choose(synthetic.clip_of(12, seed=5), 0.3),
        lambda: [frames.copy()],
    )


def frames_are_chosen_within_the_budget(method: FramesMethod) -> None:
    """``choose`` says which frames ``clip`` shows, in order, none twice."""
    contents: tuple[synthetic.Content, ...] = ("noise", "copies", "flat")
    for total in LENGTHS:
        for frames in (synthetic.clip_of(total, content) for content in contents):
            for retain in (1e-6, 0.1, 0.29, 0.5, 1.0):
                chosen, made = method.choose(frames, retain), method.clip(frames, retain)
                assert list(chosen) == sorted(set(chosen.tolist())) and set(chosen.tolist()) <= set(range(total))
                assert len(made) == len(chosen) >= 1
                if not method.only_chooses:
                    assert made.dtype == np.uint8 and made.shape[3] == 3
                    continue
                assert np.array_equal(made, frames[chosen])
                in_its_class(method, torch.tensor([len(chosen)]), torch.tensor([resolve(retain, total)]))
        if method.budget in ("exact", "at_most"):
            assert np.array_equal(method.choose(synthetic.clip_of(total), 1.0), np.arange(total))


def frames_of_other_clips_do_not_matter(method: FramesMethod) -> None:
    """A view into a longer film gives what a copy of it gives."""
    film = synthetic.clip_of(20)
    assert same(method.clip(film[5:14], 0.4), method.clip(film[5:14].copy(), 0.4))


# -------------------------------------------------------------------------------------------------------------- the square

#: the laws of each kind of method
LAWS: dict[type[Method], tuple[Law, ...]] = {
    TokenMethod: (
        tokens_repeat,
        a_unit_in_a_batch_is_the_unit_alone,
        tokens_meet_their_budget,
        empty_and_full_token_budgets,
        padded_slots_are_not_looked_at,
        tokens_in_half_precision,
        equal_tokens_keep_the_first,
        mass_is_conserved,
    ),
    PatchMethod: (
        predictions_repeat,
        patches_of_a_tile_are_those_of_the_tile_alone,
        what_predicts_is_encoded,
    ),
    ReuseMethod: (
        reuse_repeats,
        a_frame_in_a_batch_is_the_frame_alone,
        references_come_before,
        a_part_is_computed,
    ),
    FrameMergingMethod: (frame_merges_repeat, frames_left_keep_their_order),
    ExpertMethod: (uses_repeat, a_row_uses_what_it_uses_alone),
    RetracingMethod: (
        looks_repeat,
        a_row_looks_as_it_does_alone,
        some_forwards_are_uncertain,
        layers_are_read_out_below_the_last,
        looks_in_half_precision,
    ),
    RebuildingMethod: (parts_repeat, as_many_patches_are_computed, the_choice_is_inside_the_tower),
    EncoderMethod: (
        merges_repeat,
        a_tile_in_a_batch_is_the_tile_alone,
        as_many_merge_as_are_to_go,
        schedules_meet_their_budget,
        what_is_protected_takes_no_part,
        merges_of_keys_in_half_precision,
    ),
    Policy: (
        keys_repeat,
        a_row_in_a_batch_is_the_row_alone,
        keys_meet_their_budget,
        padded_keys_are_not_looked_at,
        keys_in_half_precision,
        equal_keys_keep_the_first,
    ),
    Codec: (
        packs_repeat,
        heads_in_a_batch_are_the_heads_alone,
        everything_is_stored_in_fewer_bytes,
        equal_tokens_are_stored_as_equal,
        packs_of_half_precision,
    ),
    FramesMethod: (frames_repeat, frames_are_chosen_within_the_budget, frames_of_other_clips_do_not_matter),
}


def laws_of(kind: type[Method]) -> tuple[Law, ...]:
    return next((laws for base, laws in LAWS.items() if issubclass(kind, base)), ())


METHODS = synthetic.offered()
CASES = [
    pytest.param(law, kind, id=f"{name}-{law.__name__}") for name, kind in METHODS.items() for law in laws_of(kind)
]


@pytest.mark.parametrize(("law", "kind"), CASES)
def test_every_method(law: Law, kind: type[Method]) -> None:
    for method in synthetic.built(kind):
        law(method)


def test_every_method_has_laws() -> None:
    missing = [name for name, kind in METHODS.items() if not laws_of(kind)]
    assert not missing, f"{', '.join(missing)}: methods of a kind that no law is written for"
    unused = [base.__name__ for base in LAWS if not any(issubclass(kind, base) for kind in METHODS.values())]
    assert not unused, f"{', '.join(unused)}: laws without a method"


def test_methods_that_tests_register_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Policy):
        name = "of-a-test"

    monkeypatch.setattr(synthetic, "methods", lambda: {**METHODS, "of-a-test": Mine})
    assert synthetic.offered() == METHODS
    assert sorted({**synthetic.offered(TokenMethod), **synthetic.offered(Policy)}) == sorted(
        name for name, kind in METHODS.items() if issubclass(kind, (TokenMethod, Policy))
    )


def test_the_batches_have_what_prompts_have() -> None:
    """Padding, newlines, tiles, clips, holes and a unit of which nothing is left."""
    tokens, thin = (synthetic.tokens_of(methods()["divprune"](), thin=thin) for thin in (False, True))
    assert (tokens.valid.sum(1) > 0).all() and not tokens.valid.all() and (tokens.cells[tokens.valid] < 0).any()
    assert (tokens.tiles > 1).any() and (tokens.grid[:, 0] > 1).any() and (tokens.segment > 0).any()
    assert (thin.valid.sum(1) == 0).any() and thin.valid.sum() < tokens.valid.sum()
    assert (synthetic.heads_of(FP8()).lengths == 0).any()


def test_laws_of_some_hold_for_some() -> None:
    """The laws that look first whether they are meant are meant for many."""
    low = [name for name, kind in synthetic.offered(TokenMethod).items() if by_rank(next(synthetic.built(kind)))]
    keys = [name for name, kind in synthetic.offered(Policy).items() if by_content(next(synthetic.built(kind)))]
    assert len(low) >= 8 and len(keys) >= 8, (low, keys)
    assert sum(kind.conserves_mass for kind in synthetic.offered(TokenMethod).values()) >= 3
