"""Whole frames of a clip merge between layers of the vision tower.

Later layers run over the frames that are left. Behind every layer whose output is read, and in front of modules that read
between layers, the full grid is restored: a frame that merged holds the merged one, so that projectors, poolers and newline
packers still work. The language model is then shown the tokens of the frames that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Modality
from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...errors import UnsupportedError
from ...families.base import clip_frames
from ...method import FrameMergingMethod
from ...method.refused import refuse
from ...method.results import check_numbers, check_tensor
from ..call.call import encoding
from ..call.compact_tokens import CompactTokens, Subsequence
from ..call.forward import Prompt
from ..call.plan import ModelPlan, PlannedStage, record
from ..call.vision_output import VisionOutput
from .token_groups import held_groups

#: taps of one figure a token, which merge as the hidden states behind them do
_FIGURES = ("received_attention", "patch_attention", "cls_attention", "cls_attention_unsplit")


@dataclass
class ClipFrames:
    """One clip in the tower's sequence: ``frames`` of ``size`` tokens from ``start`` on, of which those ``left`` are held."""

    start: int
    frames: int
    size: int
    left: list[int]


class MergedFrames(CompactTokens):
    """The frames that are left of the clips of one run.

    packed : whether the tower has one sequence of frames, and no tiles.
    """

    def __init__(self, clips: Sequence[tuple[int, int]], cls: int, packed: bool, device: torch.device) -> None:
        """``clips``: how many frames each has, and of how many tokens, CLS included."""
        tokens = sum(frames * size for frames, size in clips)
        super().__init__(cls, 1 if packed else sum(frames for frames, _ in clips), tokens, device)
        self.packed, self.clips, start = packed, list[ClipFrames](), 0
        for frames, size in clips:
            self.clips.append(ClipFrames(start, frames, size, list(range(frames))))
            start += frames * size
        self.sequence = Subsequence(self.place)

    @property
    def held_tiles(self) -> int:
        """See :attr:`CompactTokens.held_tiles`."""
        return self.tiles if self.packed else sum(len(clip.left) for clip in self.clips)

    @property
    def whole(self) -> bool:
        """Whether nothing has merged yet."""
        return len(self.place) == len(self.owner)

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Frames attend to themselves alone, so nothing is hidden."""
        if mask is not None and self.open and not self.whole and not self.packed:
            raise UnsupportedError(
                "Frames cannot merge in the tower where patches are padded; give clips of one shape."
            )
        return mask

    def take(self, hidden: Tensor) -> Tensor:
        """The frames that are left of the full grid ``[tiles, T, C]`` or ``[..., S0, C]``."""
        if self.packed:
            return hidden[..., self.place, :]
        return hidden.flatten(0, 1)[self.place].view(-1, *hidden.shape[1:])

    def give(self, hidden: Tensor) -> Tensor:
        """The full grid of the frames that are left."""
        if self.packed:
            return hidden[..., self.owner, :]
        return hidden.flatten(0, 1)[self.owner].view(-1, *hidden.shape[1:])

    def merge(
        self, method: FrameMergingMethod, hidden: Tensor
    ) -> tuple[Tensor, list[tuple[ClipFrames, Tensor, list[int]]]]:
        """Merge the frames that are left; returns the hidden states ``[tiles, T, C]`` or ``[..., S, C]``, and for every clip of
        which some merged the weights ``[F', F]`` and the frames ``F`` that were left before."""
        flat, out, start, merged = hidden.flatten(0, -2), [], 0, []
        place, owner, held = list[Tensor](), list[Tensor](), 0
        cls = 0 if self.packed else self.cls
        for clip in self.clips:
            count = len(clip.left)
            x = flat[start : start + count * clip.size].view(count, clip.size, -1)
            start += count * clip.size
            before = list(clip.left)
            if count > 1:
                weights = self._weights(method, x[:, cls:].float())
                first = (weights > 0).long().argmax(1).tolist()
                clip.left = [before[at] for at in first]
                merged.append((clip, weights, before))
                if not torch.equal(weights, torch.eye(count, device=x.device)):
                    x = torch.einsum("fg,gtc->ftc", weights, x.float()).to(x.dtype)
            out.append(x.flatten(0, 1))
            # a frame is part of the last one that is left before it, or at its place
            into = torch.searchsorted(torch.tensor(clip.left), torch.arange(clip.frames), right=True) - 1
            tokens = torch.arange(clip.size)
            owner.append((held + into[:, None] * clip.size + tokens).flatten())
            held += len(clip.left) * clip.size
            place.append((clip.start + torch.tensor(clip.left)[:, None] * clip.size + tokens).flatten())
        self.place, self.owner = torch.cat(place).to(flat.device), torch.cat(owner).to(flat.device)
        self.sequence = Subsequence(self.place)
        made = torch.cat(out)
        if self.packed:
            return made.view(*hidden.shape[:-2], -1, hidden.shape[-1]), merged
        return made.view(-1, *hidden.shape[1:]), merged

    def _weights(self, method: FrameMergingMethod, frames: Tensor) -> Tensor:
        weights = check_tensor(method, "merge()", method.merge(frames), "float", (None, len(frames)), frames)
        weights = check_numbers(method, "merge()", weights).float()
        first = (weights > 0).long().argmax(1)
        if not len(weights) or int(first[0]) or bool((first.diff() <= 0).any()) or not bool((weights > 0).any(1).all()):
            refuse(
                method, "merge()", "frames out of order", "one row for every frame left, by its first source, from 0 on"
            )
        return weights


class FrameMerging:
    """The hooks of a :class:`FrameMergingMethod` on the towers of one model.

    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(self, plan: ModelPlan, stage: PlannedStage[FrameMergingMethod], hook: Callable[..., None]) -> None:
        self.plan, self.family = plan, plan.family
        last = self.family.feature_layer
        self.layers = {min(last, self.family.tap_layer(layer)) for layer in stage.method.depths()}
        for tower in self.family.towers():
            blocks = self.family.tower_layers(tower)
            for number in range(last + 1):
                hook(blocks[number].register_forward_pre_hook(functools.partial(self._enter, number), with_kwargs=True))
                if number in self.layers or number in self.family.read_at:
                    hook(blocks[number].register_forward_hook(functools.partial(self._leave, number), prepend=True))
            hook(*(reader.register_forward_pre_hook(self._full) for reader in self.family.readers(tower)))

    def _merged(self) -> MergedFrames | None:
        running = encoding(self.plan)
        return running[1].merged if running is not None and isinstance(running[1].merged, MergedFrames) else None

    def _enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (running := encoding(self.plan)) is None or running[0].plan.frame_merging is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if number == 0:
            running[1].merged = self._start(running[1], hidden)
        if (merged := self._merged()) is None:
            return None
        if not merged.open:
            hidden, merged.open = merged.take(hidden), True
        if merged.whole:
            return None
        if merged.packed:
            kwargs = {**kwargs, **merged.sequence.arguments(kwargs)}
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _start(self, encoded: VisionOutput, hidden: Tensor) -> MergedFrames | None:
        """The state of a new run of the tower; None where pictures are encoded."""
        if encoded.modality != "video":
            return None
        packed = self.family.frames(encoded)
        if packed is not None:
            clips = [(len(frames), frames[0][0] * frames[0][1]) for frames in packed]
        else:
            count, frames = clip_frames(encoded)
            clips = [(frames, hidden.shape[1])] * count
        if sum(frames * size for frames, size in clips) != hidden[..., 0].numel():
            return None
        return MergedFrames(clips, int(self.family.has_cls), packed is not None, hidden.device)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        if (merged := self._merged()) is None or (running := encoding(self.plan)) is None:
            return None
        (call, encoded), hidden = running, output[0] if isinstance(output, tuple) else output
        stage = call.plan.frame_merging
        assert stage is not None
        if number in self.layers:
            with call.stats.clock.measure("selection", hidden.device), torch.no_grad(), without_autocast(hidden.device):
                hidden, parts = merged.merge(stage.method, hidden)
                for kind in _FIGURES:
                    if held := encoded.taps.get((kind, number)):
                        encoded.taps[kind, number] = [self._mixed(merged, held, parts)]
        if number in self.family.read_at and not merged.whole:
            hidden, merged.open = merged.give(hidden), False
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _mixed(
        self, merged: MergedFrames, held: list[Tensor], parts: list[tuple[ClipFrames, Tensor, list[int]]]
    ) -> Tensor:
        """Figures ``[tiles, patches]`` of the layer behind which frames merged, those of merged frames mixed as they were."""
        flat = torch.cat([one.flatten() for one in held])
        cls = 0 if merged.packed else merged.cls
        for clip, weights, before in parts:
            # patches are counted without CLS tokens
            size = clip.size - cls
            start = clip.start // clip.size * size if not merged.packed else clip.start
            figures = flat[start : start + clip.frames * size].view(clip.frames, size)
            figures[clip.left] = weights.to(figures) @ figures[before]
        return flat.view(merged.tiles, -1)

    def _full(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        merged = self._merged()
        return None if merged is None or not merged.open or merged.whole else (merged.give(args[0]), *args[1:])


def leave_out(
    prompt: Prompt, stage: PlannedStage[FrameMergingMethod], outputs: Mapping[Modality, VisionOutput]
) -> None:
    """Keep the tokens of the frames that are left; newlines of a frame go with it."""
    layout, towers = prompt.layout, prompt.plan.towers
    stands = {m: held_groups(towers, m, seen, seen.merged)[1] for m, seen in outputs.items() if seen.merged}
    stays = layout.visual.clone()
    for segment in layout.segments:
        if segment.modality in stands:
            source = segment.tile.source
            left = stands[segment.modality][source.clamp(min=0)] & (source >= 0)
            stays[segment.row, segment.places] = left | ((source < 0) & left.any())
    record(prompt.stats, stage, int(layout.visual.sum()), None, int(stays.sum()))
    prompt.reduced(stage.number, 0, Reduction(stays | (layout.valid & ~layout.visual), layout.valid))
