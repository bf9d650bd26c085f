"""The laws of test_every_method.py: each holds for a method that is right, and finds those that are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import test_every_method as every
import torch
from test_every_method import LAWS, Law, laws_of
from torch import Tensor

from mmaccel import MmaccelError
from mmaccel.core.reduction import Links, Reduction
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.method import (
    EncoderMethod,
    ExpertMethod,
    FrameChoice,
    FrameMergingMethod,
    KeyBatch,
    Method,
    PatchMethod,
    Policy,
    ProjectorMethod,
    RebuildingMethod,
    RetracingMethod,
    ReuseMethod,
    TokenBatch,
)


@dataclass(frozen=True)
class Low(ProjectorMethod):
    """Right: the tokens with the largest first channel."""

    name = "laws-low"
    unit = "picture"

    def score(self, tokens: TokenBatch) -> Tensor:
        return tokens.features[..., 0].float()

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        return Reduction.top(self.score(tokens), tokens.valid, count)


class Dice(Low):
    """From the generator of the process."""

    def score(self, tokens: TokenBatch) -> Tensor:
        return torch.rand(tokens.valid.shape)


class Remembers(Low):
    """What it was shown before."""

    seen: ClassVar[list[float]] = []

    def score(self, tokens: TokenBatch) -> Tensor:
        self.seen.append(float(tokens.features.sum()))
        return tokens.features[..., len(self.seen) % 3].float()


class Scribbles(Low):
    """Into what it is given."""

    def score(self, tokens: TokenBatch) -> Tensor:
        return tokens.features[..., 0].add_(1.0).float()


class Others(Low):
    """By the mean of the batch."""

    def score(self, tokens: TokenBatch) -> Tensor:
        return (tokens.features[..., 0] - tokens.features[tokens.valid].mean()).abs().float()


class More(Low):
    """One token more than is asked for."""

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        return super().reduce(tokens, (count + 1).clamp(max=2))


class AtMostMore(More):
    budget = "at_most"


class AdaptiveNone(Low):
    budget = "adaptive"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        return super().reduce(tokens, 0 * count)


class NeverNone(Low):
    """Cannot keep nothing."""

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        return super().reduce(tokens, count.clamp(min=1))


class Blends(Low):
    """What stays holds the first token of its unit, even where all of it stays."""

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        made = super().reduce(tokens, count)
        row, slot = made.kept.nonzero(as_tuple=True)
        links = Links(row, slot, tokens.valid.long().argmax(1)[row], torch.ones(len(row)))
        return Reduction(made.kept, made.valid, links)


class Padding(Low):
    """By the distance to the mean of all slots."""

    def score(self, tokens: TokenBatch) -> Tensor:
        x = tokens.features.float()
        return (x - x.mean(1, keepdim=True)).norm(dim=-1)


class Coarse(Low):
    """In the precision of the features."""

    def score(self, tokens: TokenBatch) -> Tensor:
        return (tokens.features * 0.3 + 100).sum(-1).float()


class High(Low):
    """Of equal tokens the last."""

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        made = Reduction.top(self.score(tokens).flip(1), tokens.valid.flip(1), count)
        return Reduction(made.kept.flip(1), tokens.valid)


class Loses(Low):
    """And says that it does not."""

    conserves_mass = True


@dataclass(frozen=True)
class Halves(EncoderMethod):
    """Right: every other token flows into the one before it."""

    name = "laws-halves"

    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        out = [0] * layers
        for layer in range(layers):
            out[layer] = min(tokens // 2, tokens - kept)
            tokens -= out[layer]
        return out

    def match(self, tokens: Any, remove: int) -> Tensor:
        target = torch.arange(tokens.keys.shape[1]).repeat(len(tokens.keys), 1)
        first = tokens.protected
        at = first + 1 + 2 * torch.arange(remove)
        target[:, at] = at - 1
        return target


class HalvesMore(Halves):
    def match(self, tokens: Any, remove: int) -> Tensor:
        return super().match(tokens, remove + 1)


class IntoCls(Halves):
    def match(self, tokens: Any, remove: int) -> Tensor:
        target = super().match(tokens, remove)
        return torch.where(target == torch.arange(target.shape[1]), target, 0)


class ByCls(Halves):
    """By how like CLS tokens are."""

    def match(self, tokens: Any, remove: int) -> Tensor:
        like = (tokens.keys[:, 1:] * tokens.keys[:, :1]).sum(-1)
        order = 1 + like.argsort(dim=1, stable=True)
        target = torch.arange(tokens.keys.shape[1]).repeat(len(like), 1)
        return target.scatter(1, order[:, :remove], order[:, -1:].expand(-1, remove))


class OfAll(Halves):
    """By the mean of all tiles."""

    def match(self, tokens: Any, remove: int) -> Tensor:
        like = (tokens.keys[:, 1:] - tokens.keys.mean((0, 1))).norm(dim=-1)
        order = 1 + like.argsort(dim=1, stable=True)
        target = torch.arange(tokens.keys.shape[1]).repeat(len(like), 1)
        return target.scatter(1, order[:, :remove], order[:, -1:].expand(-1, remove))


class NoMeans(Halves):
    """Sums, and says that it conserves mass."""

    conserves_mass = True

    def weigh(self, tokens: Any, target: Tensor) -> Tensor:
        return torch.ones_like(tokens.size)


class LosesCount(Halves):
    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        return [0] * layers


class DiceTower(Halves):
    def match(self, tokens: Any, remove: int) -> Tensor:
        at = 1 + torch.randperm(tokens.keys.shape[1] - 1)
        target = torch.arange(tokens.keys.shape[1]).repeat(len(tokens.keys), 1)
        target[:, at[:remove]] = at[-1]
        return target


class NotHalves(Halves):
    """Of one precision only."""

    def match(self, tokens: Any, remove: int) -> Tensor:
        return super().match(tokens, remove - int(bool((tokens.keys == tokens.keys.bfloat16()).all())))


class Copies(PatchMethod):
    """Right: what is as the first patch of a tile."""

    name = "laws-copies"

    def predict(self, pixels: Tensor) -> Tensor:
        flat = pixels.flatten(1, 2)
        return torch.arange(flat.shape[1]).masked_fill((flat == flat[:, :1]).all(-1), 0)


class CopiesDice(Copies):
    def predict(self, pixels: Tensor) -> Tensor:
        source = super().predict(pixels)
        return torch.where(torch.rand(source.shape) < 0.5, source, torch.arange(source.shape[1]))


class CopiesOfAll(Copies):
    """By the first tile."""

    def predict(self, pixels: Tensor) -> Tensor:
        return super().predict(torch.where(pixels == pixels[:1], pixels[:1, :1, :1], pixels))


class CopiesInChains(Copies):
    """By the one before, encoded or not."""

    def predict(self, pixels: Tensor) -> Tensor:
        return (super().predict(pixels) * 0 + torch.arange(pixels[0, ..., 0].numel()) - 1).clamp(min=0)


class NeverCopies(Copies):
    def predict(self, pixels: Tensor) -> Tensor:
        return torch.arange(pixels[0, ..., 0].numel()).expand(len(pixels), -1)


class Moved(ReuseMethod):
    """Right: the two tokens that moved most since the first frame."""

    name = "laws-moved"

    def references(self, frames: int) -> list[int]:
        return [0] * frames

    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        moved = (keys - stored).norm(dim=-1)
        return moved.argsort(dim=1, descending=True, stable=True)[:, :2].sort().values


class MovedDice(Moved):
    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return super().recompute(torch.rand_like(keys), stored)


class MovedOfAll(Moved):
    """By the mean of all frames."""

    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return super().recompute(keys - keys.mean((0, 1)), 0 * stored)


class MovedTwice(Moved):
    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return super().recompute(keys, stored)[:, :1].expand(-1, 2)


class MovedLast(Moved):
    """Of equal tokens the last."""

    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return (keys.shape[1] - 1 - super().recompute(keys.flip(1), stored.flip(1))).flip(1)


class MovedAll(Moved):
    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        return torch.arange(keys.shape[1]).expand(len(keys), -1)


class FromBefore(Moved):
    """Of the frame before, which has a reference of its own."""

    def references(self, frames: int) -> list[int]:
        return [max(0, frame - 1) for frame in range(frames)]


class FromTheEnd(Moved):
    """Of the middle of the clip, which nobody knows before its end."""

    def references(self, frames: int) -> list[int]:
        return [frames // 2 if frame > frames // 2 else frame for frame in range(frames)]


class Twos(FrameMergingMethod):
    """Right: every two frames become their mean."""

    name = "laws-twos"

    def depths(self) -> tuple[float, ...]:
        return (0.5,)

    def merge(self, frames: Tensor) -> Tensor:
        number = torch.arange(len(frames))
        member = (number[::2, None] == number // 2 * 2).float()
        return member / member.sum(1, keepdim=True)


class TwosDice(Twos):
    def merge(self, frames: Tensor) -> Tensor:
        weights = torch.rand(super().merge(frames).shape) * (super().merge(frames) > 0)
        return weights / weights.sum(1, keepdim=True)


class TwosWithoutTheFirst(Twos):
    def merge(self, frames: Tensor) -> Tensor:
        return super().merge(frames)[1:] if len(frames) > 1 else super().merge(frames)


class TwosSummed(Twos):
    def merge(self, frames: Tensor) -> Tensor:
        return (super().merge(frames) > 0).float()


class Never(Twos):
    def merge(self, frames: Tensor) -> Tensor:
        return torch.eye(len(frames))


class Changed(RebuildingMethod):
    """Right: the half that changed most, and the nearest of it."""

    name = "laws-changed"

    def span(self, layers: int) -> tuple[int, int]:
        return 1, 0

    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        change = (now - before).norm(dim=-1)
        return change.argsort(descending=True, stable=True)[: max(1, len(now) // 2)].sort().values

    def sources(self, left: Tensor, chosen: Tensor) -> Tensor:
        return torch.cdist(left, chosen).argsort(dim=1, stable=True)[:, :1]


class ChangedDice(Changed):
    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        return super().choose(before, torch.rand_like(now))


class ChangedAll(Changed):
    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        return torch.arange(len(now))


class ChangedLast(Changed):
    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        return (len(now) - 1 - super().choose(before.flip(0), now.flip(0))).sort().values


class FromAnywhere(Changed):
    def sources(self, left: Tensor, chosen: Tensor) -> Tensor:
        return torch.arange(len(left))[:, None] + len(chosen)


class BeforeTheTower(Changed):
    def span(self, layers: int) -> tuple[int, int]:
        return 0, layers


class Upper(ExpertMethod):
    """Right: experts with more than the mean weight."""

    name = "laws-upper"

    def layers(self, depth: int) -> range:
        return range(depth)

    def uses(self, weights: Tensor, hidden: Tensor, received: Tensor | None, real: Tensor) -> Tensor:
        return weights >= weights.mean(-1, keepdim=True)


class UpperDice(Upper):
    def uses(self, weights: Tensor, hidden: Tensor, received: Tensor | None, real: Tensor) -> Tensor:
        return torch.rand(weights.shape) < 0.5


class UpperOfAll(Upper):
    def uses(self, weights: Tensor, hidden: Tensor, received: Tensor | None, real: Tensor) -> Tensor:
        return super().uses(weights, hidden, received, real) & (hidden.sum(-1) > hidden.mean())[..., None]


class Nudge(RetracingMethod):
    """Right: half of the output becomes the mean visual token, when no token is far above the others."""

    name = "laws-nudge"

    def readouts(self, depth: int) -> range:
        return range(depth - 1)

    def is_uncertain(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1).amax(-1) < 0.5

    def retrace(self, hidden: Tensor, output: Tensor, visual: Tensor, shown: Tensor, real: Tensor | None) -> Tensor:
        seen = visual.float() * shown[..., None]
        return output.float() / 2 + (seen.sum(1) / shown.sum(1, keepdim=True).clamp(min=1))[:, None] / 2


class NudgeDice(Nudge):
    def is_uncertain(self, logits: Tensor) -> Tensor:
        return torch.rand(len(logits)) < 0.5


class NudgeOfAll(Nudge):
    def retrace(self, hidden: Tensor, output: Tensor, visual: Tensor, shown: Tensor, real: Tensor | None) -> Tensor:
        return output.float() / 2 + visual.float().mean(1, keepdim=True) / 2


class NudgeNever(Nudge):
    def is_uncertain(self, logits: Tensor) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.bool)


class NudgeAbove(Nudge):
    def readouts(self, depth: int) -> range:
        return range(depth)


class NudgeCoarse(Nudge):
    def retrace(self, hidden: Tensor, output: Tensor, visual: Tensor, shown: Tensor, real: Tensor | None) -> Tensor:
        return super().retrace(hidden, output, (visual + 300) - 300, shown, real)


@dataclass(frozen=True)
class Norm(Policy):
    """Right: the keys with the largest first channel."""

    name = "laws-norm"

    def score(self, keys: KeyBatch) -> Tensor:
        return keys.keys[..., 0].float()


class NormDice(Norm):
    def score(self, keys: KeyBatch) -> Tensor:
        return torch.rand(keys.keys.shape[:3])


class NormOfAll(Norm):
    def score(self, keys: KeyBatch) -> Tensor:
        return (keys.keys[..., 0] - keys.keys[..., 0].mean()).abs().float()


class NormPadding(Norm):
    def score(self, keys: KeyBatch) -> Tensor:
        return (keys.keys - keys.keys.mean(2, keepdim=True)).norm(dim=-1).float()


class NormCoarse(Norm):
    def score(self, keys: KeyBatch) -> Tensor:
        return (keys.keys * 0.3 + 100).sum(-1).float()


class NormHigh(Norm):
    """Of equal keys the last."""

    def score(self, keys: KeyBatch) -> Tensor:
        return keys.keys[..., 0].float() + 1e-6 * torch.arange(keys.keys.shape[2])


class NormUndefined(Norm):
    def score(self, keys: KeyBatch) -> Tensor:
        return super().score(keys).log()


class NotShared(Norm):
    """And says that its heads choose alike."""

    shared = True


class Recalls(Norm):
    """Reads one key too many."""

    def recall(
        self, paid: Tensor, before: Tensor | None, visual: Tensor, count: Tensor, chosen: Tensor | None
    ) -> Tensor:
        return visual & (visual.cumsum(1) <= count[:, None] + 1)


class ObservesPadding(Norm):
    def observe(self, attention: Any, before: Tensor) -> Tensor:
        return attention.key.sum((2, 3), keepdim=True)[..., 0].expand_as(before)


class CodecDice(FP8):
    """Noise against bias, from the generator of the process."""

    def key_planes(self, keys: Tensor, cut: Any, before: Any) -> Any:
        return super().key_planes(keys + torch.randn_like(keys), cut, before)


class CodecOfAll(FP8):
    """In the range of all rows."""

    def key_planes(self, keys: Tensor, cut: Any, before: Any) -> Any:
        return super().key_planes(keys - keys.mean(0), cut, before)


class CodecOfNothing(FP8):
    def value_planes(self, values: Tensor, cut: Any, before: Any) -> Any:
        return super().value_planes(torch.ones_like(values), cut, before)


class CodecOfPlaces(FP8):
    """Equal tokens are stored as others."""

    def key_planes(self, keys: Tensor, cut: Any, before: Any) -> Any:
        return super().key_planes(keys + torch.arange(len(keys))[:, None], cut, before)


class CodecCoarse(FP8):
    def key_planes(self, keys: Tensor, cut: Any, before: Any) -> Any:
        return super().key_planes(keys if keys.dtype == torch.float32 else 0.5 * keys, cut, before)


class CodecHoards(FP8):
    """Packs nothing."""

    def packable(self, lengths: Tensor) -> Tensor:
        return torch.where(lengths > 3 * self.page, 0, super().packable(lengths))


class First(FrameChoice):
    """Right: the first frames."""

    name = "laws-first"

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        return np.arange(count)


class FramesDice(First):
    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        return np.sort(torch.randperm(len(frames))[:count].numpy())


class FramesMore(First):
    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        return np.arange(count + 1)


class FramesTwice(First):
    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        return np.zeros(count, int)


class FramesOther(First):
    """Says other frames than it shows."""

    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        return frames[self.choose(frames, retain)[::-1]]


class FramesBeyond(First):
    """Looks at what is behind the clip in memory."""

    def pick(self, frames: np.ndarray, count: int) -> np.ndarray:
        return np.arange(count) + int(frames.base is not None)


WRONG: list[tuple[Law, type[Method]]] = [
    (every.tokens_repeat, Dice),
    (every.tokens_repeat, Remembers),
    (every.tokens_repeat, Scribbles),
    (every.a_unit_in_a_batch_is_the_unit_alone, Others),
    (every.tokens_meet_their_budget, More),
    (every.tokens_meet_their_budget, AtMostMore),
    (every.tokens_meet_their_budget, AdaptiveNone),
    (every.empty_and_full_token_budgets, NeverNone),
    (every.empty_and_full_token_budgets, Blends),
    (every.padded_slots_are_not_looked_at, Padding),
    (every.tokens_in_half_precision, Coarse),
    (every.equal_tokens_keep_the_first, High),
    (every.mass_is_conserved, Loses),
    (every.predictions_repeat, CopiesDice),
    (every.patches_of_a_tile_are_those_of_the_tile_alone, CopiesOfAll),
    (every.what_predicts_is_encoded, CopiesInChains),
    (every.what_predicts_is_encoded, NeverCopies),
    (every.reuse_repeats, MovedDice),
    (every.a_frame_in_a_batch_is_the_frame_alone, MovedOfAll),
    (every.a_frame_in_a_batch_is_the_frame_alone, MovedTwice),
    (every.references_come_before, FromBefore),
    (every.references_come_before, FromTheEnd),
    (every.a_part_is_computed, MovedAll),
    (every.a_part_is_computed, MovedLast),
    (every.frame_merges_repeat, TwosDice),
    (every.frames_left_keep_their_order, TwosWithoutTheFirst),
    (every.frames_left_keep_their_order, TwosSummed),
    (every.frames_left_keep_their_order, Never),
    (every.uses_repeat, UpperDice),
    (every.a_row_uses_what_it_uses_alone, UpperOfAll),
    (every.looks_repeat, NudgeDice),
    (every.a_row_looks_as_it_does_alone, NudgeOfAll),
    (every.some_forwards_are_uncertain, NudgeNever),
    (every.layers_are_read_out_below_the_last, NudgeAbove),
    (every.looks_in_half_precision, NudgeCoarse),
    (every.parts_repeat, ChangedDice),
    (every.as_many_patches_are_computed, ChangedAll),
    (every.as_many_patches_are_computed, ChangedLast),
    (every.as_many_patches_are_computed, FromAnywhere),
    (every.the_choice_is_inside_the_tower, BeforeTheTower),
    (every.merges_repeat, DiceTower),
    (every.a_tile_in_a_batch_is_the_tile_alone, OfAll),
    (every.as_many_merge_as_are_to_go, HalvesMore),
    (every.as_many_merge_as_are_to_go, IntoCls),
    (every.as_many_merge_as_are_to_go, NoMeans),
    (every.schedules_meet_their_budget, LosesCount),
    (every.what_is_protected_takes_no_part, ByCls),
    (every.merges_of_keys_in_half_precision, NotHalves),
    (every.keys_repeat, NormDice),
    (every.a_row_in_a_batch_is_the_row_alone, NormOfAll),
    (every.a_row_in_a_batch_is_the_row_alone, ObservesPadding),
    (every.keys_meet_their_budget, NormUndefined),
    (every.keys_meet_their_budget, NotShared),
    (every.keys_meet_their_budget, Recalls),
    (every.padded_keys_are_not_looked_at, NormPadding),
    (every.padded_keys_are_not_looked_at, ObservesPadding),
    (every.keys_in_half_precision, NormCoarse),
    (every.equal_keys_keep_the_first, NormHigh),
    (every.packs_repeat, CodecDice),
    (every.heads_in_a_batch_are_the_heads_alone, CodecOfAll),
    (every.everything_is_stored_in_fewer_bytes, CodecOfNothing),
    (every.everything_is_stored_in_fewer_bytes, CodecHoards),
    (every.equal_tokens_are_stored_as_equal, CodecOfPlaces),
    (every.packs_of_half_precision, CodecCoarse),
    (every.frames_repeat, FramesDice),
    (every.frames_are_chosen_within_the_budget, FramesMore),
    (every.frames_are_chosen_within_the_budget, FramesTwice),
    (every.frames_are_chosen_within_the_budget, FramesOther),
    (every.frames_of_other_clips_do_not_matter, FramesBeyond),
]
RIGHT: tuple[type[Method], ...] = (Low, Copies, Moved, Twos, Upper, Nudge, Changed, Halves, Norm, FP8, First)


@pytest.mark.parametrize(("law", "kind"), [(law, kind) for kind in RIGHT for law in laws_of(kind)])
def test_laws_hold_for_what_is_right(law: Law, kind: type[Method]) -> None:
    law(kind())


@pytest.mark.parametrize(("law", "kind"), WRONG)
def test_laws_find_what_is_wrong(law: Law, kind: type[Method]) -> None:
    with pytest.raises((AssertionError, MmaccelError)):
        law(kind())


def test_every_law_can_fail() -> None:
    assert {law for law, _ in WRONG} == {law for laws in LAWS.values() for law in laws}
