"""Streams that remember: the oldest frames leave the device, and a question brings back those that it asks about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import MmaccelError
from ...kv.cache import CacheState
from ...kv.index import KeyIndex, to_device
from ...kv.layer import CompressedLayer
from ...kv.parked import ParkedFrame, ParkedFrames, Parts, SeenFrame, full, park
from ...method import LayerAttention, RecallPolicy
from ..call.forward import Continuation, Forward, Prompt, chosen_of
from ..call.runs import KeysToRead, LayerAttended, Run, TextInputs
from .rotation import half, rotations, turned

#: queries whose attention is computed at once
ROWS = 256


class RecallRun(Run):
    """Common work of a stretch of frames and of a question: parked frames are brought back layer by layer."""

    reads_keys = True

    def __init__(self, forward: Forward, policy: RecallPolicy, state: CacheState, memory: ParkedFrames) -> None:
        self.forward, self.policy, self.state, self.memory = forward, policy, state, memory
        self._text: Any = forward.plan.family.text
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._scale = float(getattr(self._text.rotary_emb, "attention_scaling", 1.0))

    def before_text(self, text: TextInputs) -> None:
        """Note the rotations of the new tokens."""
        if self.policy.unrotated:
            cos, sin = rotations(self._text, text.arguments["position_ids"], self.forward.device)
            self._rotation = cos[0], sin[0]

    # --- rotations ----------------------------------------------------------------------------------------------
    def _turned(self, keys: Tensor, by: Sequence[int]) -> Tensor:
        """``keys [1, Hkv, n, D]``, key ``i`` moved ``by[i]`` positions further."""
        if not any(by):
            return keys
        return turned(self._text, keys, torch.tensor([[by]], device=keys.device))

    def _unrotated(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """``x [H, n, D]`` of the new tokens without RoPE, float32; ``slots [n]``, which of those that entered the text model
        they are, all by default."""
        x = x.float()
        if self._rotation is None:
            return x
        cos, sin = (y.to(x.device) if slots is None else y.to(x.device)[slots] for y in self._rotation)
        return (x * cos - half(x) * sin) / self._scale

    # --- frames that come back ------------------------------------------------------------------------------------
    def bring_back(self, layer: LayerAttended) -> None:
        """Put the frames that the new tokens ask about between the prompt's beginning and the newest frames of a layer."""
        memory, held = self.memory, self.state.layers[layer.number]
        chosen = memory.common
        if chosen is None:
            chosen = self.policy.choose(*self._asked(layer)).tolist()
        memory.recalled[layer.number] = chosen
        begins, shift = self._positions(chosen)
        frames = [memory.parked[number] for number in chosen]
        parts = [frame.frame.layer(layer.number) for frame in frames]
        by = [
            begins[memory.seen[number].stretch] - frame.turned if self.policy.contiguous else 0
            for number, frame in zip(chosen, frames, strict=True)
            for _ in range(frame.counts[layer.number])
        ]
        counts = [frame.counts[layer.number] for frame in frames]
        keys, values = (self._joined(parts, counts, kind, held) for kind in (0, 1))
        _extend(held, self._head(layer.number, shift), self._turned(keys, by), values, memory.prefix)

    def _asked(self, layer: LayerAttended) -> tuple[Tensor, Tensor]:
        """The queries of the new tokens, and the summaries of the parked frames."""
        query = self._unrotated(layer.query[0], self._slots(layer.number))
        query = self._turned(query[None], [self.policy.distance] * query.shape[1])[0].cpu()
        return query, self.memory.summaries(layer.number)

    def _slots(self, number: int) -> Tensor | None:
        return None

    def _head(self, number: int, shift: int) -> Tensor:
        head = self.memory.heads[number]
        return self._turned(head, [shift] * head.shape[2])

    def _joined(self, parts: Sequence[Parts], counts: Sequence[int], kind: int, held: CompressedLayer) -> Tensor:
        """The keys (``kind`` 0) or values (1) of recalled frames, ``[1, Hkv, n, D]`` on the device of the layer."""
        like = held.values if kind else held.keys
        frames = [self.policy.unpack(part[kind], count) for part, count in zip(parts, counts, strict=True)]
        joined = torch.cat(frames, dim=1) if frames else like[0, :, :0].cpu()
        return to_device(joined, like.device)[None].to(like.dtype)

    @property
    def _ahead(self) -> int:
        ahead = self.state.positions.ahead
        return 0 if ahead is None else int(ahead.max())

    def _positions(self, chosen: Sequence[int]) -> tuple[dict[int, int], int]:
        """Where the stretches of the ``chosen`` frames begin now, and how far the prompt's beginning moves, so that all stand
        behind each other; raises :class:`MmaccelError` if the model has too few positions."""
        memory, first = self.memory, self.memory.resident
        if not self.policy.contiguous:
            return {}, 0
        at = memory.begins[first]
        begins = {first: at}
        for stretch in sorted({memory.seen[number].stretch for number in chosen} - {first}, reverse=True):
            at -= memory.begins[stretch + 1] - memory.begins[stretch]
            begins[stretch] = at
        used = memory.begins[-1] - at + memory.home
        needed = self.forward.length + memory.asking + self._ahead
        if memory.limit is not None and used + needed > memory.limit:
            raise MmaccelError(
                f"The newest frames and {len(chosen)} recalled ones take {used} of the model's {memory.limit} positions, and "
                f"{needed} more are needed; give a smaller cap_tokens, or fewer frames with "
                f"recall=Stage({self.policy.name!r}, options={{'frames': ...}})."
            )
        return begins, at - memory.home


class AskFrames(RecallRun):
    """A question: every layer reads the parked frames that it chooses, and so do the tokens of the answer."""

    forward: Continuation

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """Bring back frames, once for all layers that read the same keys."""
        if not self.memory.parked:
            return None
        if self.policy.together and self.memory.common is None:
            self.memory.rated[layer.number] = self.policy.rate(*self._asked(layer))
            return None
        if layer.number not in self.memory.recalled:
            self.bring_back(layer)
        return KeysToRead(grown=True)

    def finish(self) -> None:
        """End the question: the tokens of its answer read what was brought back."""
        self.memory.asking = 0


class ReadFrames(RecallRun):
    """A stretch of new frames: summarise each, and park the oldest ones beyond the cap."""

    forward: Prompt

    def __init__(self, forward: Prompt, policy: RecallPolicy, state: CacheState, memory: ParkedFrames) -> None:
        super().__init__(forward, policy, state, memory)
        self._prompt = forward
        self._summaries: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor, KeyIndex]] = {}

    def before_text(self, text: TextInputs) -> None:
        """Find the frame of every new place, and the positions of the stretch."""
        super().before_text(text)
        memory, prompt = self.memory, self._prompt
        memory.recalled = {}
        first = not memory.begins
        self._frame, self._count = frames_of(prompt, memory.prefix if first else 0)
        positions = text.arguments["position_ids"]
        positions = positions[-3:] if positions.dim() == 3 else positions[None]
        if first:
            begin = positions[..., memory.prefix - 1].max() + 1 if memory.prefix else positions.min()
            memory.home = int(begin)
            memory.begins = [memory.home]
        assert self.state.positions.offset is not None
        memory.begins.append(prompt.seen + prompt.length - int(self.state.positions.offset[0]))

    @property
    def last_queries(self) -> int | None:  # type: ignore[override]
        """All queries are looked at where attention counts."""
        return None if self.policy.weighs else 0

    def _slots(self, number: int) -> Tensor | None:
        entered, left = chosen_of(self._prompt.incoming.phases[0][1]), chosen_of(self._prompt.phase(number))
        return None if left is entered else torch.searchsorted(entered[0], left[0])

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """Bring back frames for this stretch, if the policy says so."""
        if not self.policy.while_reading or not self.memory.parked:
            return None
        held = self.state.layers[layer.number]
        if layer.number not in self._before:
            self._before[layer.number] = held.keys, held.values, held.index
            self.bring_back(layer)
        return KeysToRead(grown=True)

    def after_attention(self, layer: LayerAttended) -> None:
        """Summarise the keys of every new frame."""
        number = layer.number
        if number not in self._summaries:
            places = chosen_of(self._prompt.phase(number))[0]
            keys = self._unrotated(layer.key[0, :, -len(places) :], self._slots(number))
            frame = to_device(self._frame[places], keys.device)
            received = _received(layer)[:, -len(places) :] if self.policy.weighs else None
            self._summaries[number] = self.policy.summarise(keys, frame, self._count, received).cpu()

    def finish(self) -> None:
        """Park the oldest frames."""
        memory, depth = self.memory, len(self.state.layers)
        for number, (keys, values, index) in self._before.items():
            held = self.state.layers[number]
            held.keys, held.values, held.index = keys, values, index
        old, stretch = len(memory.seen), len(memory.begins) - 2
        memory.places = torch.cat([memory.places, torch.where(self._frame < 0, -1, self._frame + old)])
        if not memory.heads:
            memory.heads = tuple(layer.keys[:, :, : memory.prefix].clone() for layer in self.state.layers)
        shown = memory.pushed
        for frame in range(self._count):
            mine = shown[frame * len(shown) // self._count : (frame + 1) * len(shown) // self._count]
            summaries = tuple(self._summaries[number][frame] for number in range(depth))
            memory.seen.append(SeenFrame(stretch, mine, summaries))
        self._park()

    def _park(self) -> None:
        memory, layers = self.memory, self.state.layers
        counted = {id(layer.index): self._counts(layer.index) for layer in layers}
        total = torch.stack(list(counted.values())).flip(1).cumsum(1).flip(1) + memory.prefix
        fits = (total <= memory.cap).all(0).nonzero()[:, 0]
        before = len(memory.parked)
        first = int(fits[0]) if len(fits) else len(memory.seen)
        if first >= len(memory.seen):
            raise MmaccelError(
                f"cap_tokens must be at least {int(total[:, -1].max())}, the tokens of the prompt's beginning and of one "
                f"frame, got {memory.cap}."
            )
        if first <= before:
            return
        counts = [counted[id(layer.index)][before:first].tolist() for layer in layers]
        try:
            frames = [
                _parts(self.policy, layer, memory.prefix, mine) for layer, mine in zip(layers, counts, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            raise full(memory.file, error) from error
        for at in range(first - before):
            held, own = [mine[at] for mine in frames], tuple(mine[at] for mine in counts)
            turned = memory.begins[memory.seen[before + at].stretch]
            last = memory.parked[-1].frame if memory.parked else None
            memory.parked.append(ParkedFrame(park(held, memory.file, last), own, turned))
        back = self._move() if self.policy.contiguous else 0
        made: dict[int, KeyIndex] = {}
        for layer, mine in zip(layers, counts, strict=True):
            self._drop(layer, sum(mine), back, made)

    def _counts(self, index: KeyIndex) -> Tensor:
        """``[seen]`` long: how many keys an index has of every frame."""
        frame = self.memory.places[index.index[0].long().cpu()]
        return torch.bincount(frame[frame >= 0], minlength=len(self.memory.seen))

    def _move(self) -> int:
        """Move the prompt's beginning directly before the newest frames, by position; returns by how much all of these move
        back because the model has no later positions."""
        memory = self.memory
        memory.shift = memory.begins[memory.resident] - memory.home
        if memory.limit is None or memory.begins[-1] + self._ahead <= memory.limit:
            return 0
        back, memory.shift = memory.shift, 0
        memory.begins = [begin - back for begin in memory.begins]
        positions = self.state.positions
        assert positions.offset is not None
        positions.offset = positions.offset + back
        return back

    def _drop(self, layer: CompressedLayer, gone: int, back: int, made: dict[int, KeyIndex]) -> None:
        """Free ``gone`` keys of a layer behind the prompt's beginning."""
        prefix, index = self.memory.prefix, layer.index
        newest = layer.keys[:, :, prefix + gone :]
        newest = self._turned(newest, [-back] * newest.shape[2])
        layer.keys = torch.cat([self._head(layer.number, self.memory.shift), newest], dim=2)
        layer.values = torch.cat([layer.values[:, :, :prefix], layer.values[:, :, prefix + gone :]], dim=2)
        if id(index) not in made:
            places = torch.cat([index.index[:, :prefix], index.index[:, prefix + gone :]], dim=1)
            made[id(index)] = KeyIndex(places, False, index.upto)
        layer.index = made[id(index)]


def frames_of(prompt: Prompt, prefix: int) -> tuple[Tensor, int]:
    """The frame of every new place, ``[S]`` long on the CPU, -1 for the first ``prefix`` places; and how many frames there are.
    Text belongs to the frame behind it, behind the last frame to that one."""
    named = torch.full((prompt.length, 2), -1, dtype=torch.long)
    for number, segment in enumerate(prompt.layout.segments):
        time = segment.tile.cells[:, 0]
        # a newline belongs to the frame before it
        last = torch.where(time < 0, -1, torch.arange(len(time))).cummax(0).values.clamp(min=0)
        named[segment.places] = torch.stack([torch.full_like(time, number), time[last]], dim=1)
    visual = (named[:, 0] >= 0).nonzero()[:, 0]
    begins = torch.ones(len(visual), dtype=torch.bool)
    begins[1:] = (named[visual][1:] != named[visual][:-1]).any(1)
    numbers = begins.cumsum(0) - 1
    count = int(numbers[-1]) + 1
    # the first visual place at or behind every place
    behind = torch.searchsorted(visual, torch.arange(prompt.length)).clamp(max=len(visual) - 1)
    frame = numbers[behind]
    frame[:prefix] = -1
    return frame, count


def _received(layer: LayerAttended) -> Tensor:
    """``[Hq, K]`` float32: the attention that every query head has paid to the keys of a layer, summed over its queries."""
    text = torch.ones(1, layer.query.shape[2], dtype=torch.bool, device=layer.query.device)
    attention = LayerAttention(layer.query, layer.key, layer.visible, layer.scaling, text)
    count = layer.query.shape[2]
    parts = [attention.attention(first, min(first + ROWS, count))[0].sum(1) for first in range(0, count, ROWS)]
    return torch.stack(parts).sum(0)


def _parts(policy: RecallPolicy, layer: CompressedLayer, prefix: int, counts: Sequence[int]) -> list[Parts]:
    """The keys and values of the frames behind the prompt's beginning, packed on the CPU."""
    width = slice(prefix, prefix + sum(counts))
    keys, values = (
        [part.contiguous() for part in x[0, :, width].to("cpu", copy=True).split(list(counts), dim=1)]
        for x in (layer.keys, layer.values)
    )
    return [(policy.pack(key), policy.pack(value)) for key, value in zip(keys, values, strict=True)]


def _extend(held: CompressedLayer, head: Tensor, keys: Tensor, values: Tensor, prefix: int) -> None:
    """Put recalled keys and values behind the prompt's beginning, whose keys become ``head``."""
    index = held.index
    places = index.index
    # every later token sees the place before the first frame
    recalled = places.new_full((1, keys.shape[2]), max(0, prefix - 1))
    held.keys = torch.cat([head, keys, held.keys[:, :, prefix:]], dim=2)
    held.values = torch.cat([held.values[:, :, :prefix], values, held.values[:, :, prefix:]], dim=2)
    held.index = KeyIndex(torch.cat([places[:, :prefix], recalled, places[:, prefix:]], dim=1), False, index.upto)
