"""Merging inside a vision tower, between attention and MLP, where the papers merge.

The keys of a layer's attention choose the tokens that are merged behind it; in later attention merged tokens weigh as many
patches as they represent. Behind the layer whose output is read, the full grid is restored (each place holds its merged
token), so that projectors, poolers, newline packers and pixel shuffles that expect a grid still work; in front of a language
model one token of each group is kept then.

There the budget is one of tokens that the language model reads, per picture or clip; :mod:`.token_groups` meets it exactly.

A layer's forward is not replaced. The norm before the MLP gets the merged tokens, the output of the MLP for one goes to all
its members, and the layer's output is merged in the same way: merging is linear and all members of a group got the same,
so this is the merged sum behind the attention plus its MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.budget import Retain, apportion, resolve
from ...core.precision import without_autocast
from ...method import EncoderMethod
from ...method.refused import described, refuse
from ...method.results import check_count
from ..call.call import Call, encoding
from ..call.compact_tokens import Subsequence
from ..call.plan import Plan, PlannedStage, record
from ..call.vision_output import VisionOutput
from .merged import Merged, Run
from .taps import Taps


def hook_features(plan: Plan, taps: Taps, hook: Callable[..., None]) -> None:
    """Let taps see the hidden states and the outputs of MLPs that they ask for."""

    def see(number: int, module: nn.Module, args: Any, output: Any) -> None:
        if (running := encoding(plan)) is not None:
            taps.see_features(running[1], number, output[0] if isinstance(output, tuple) else output)

    def see_shift(number: int, module: nn.Module, args: Any, output: Any) -> None:
        if (running := encoding(plan)) is not None:
            taps.see_shift(running[1], number, output)

    for number, layer in taps.layers_of("features"):
        hook(layer.register_forward_hook(functools.partial(see, number)))
    for number, layer in taps.layers_of("shift"):
        hook(plan.towers.second_half(layer)[1].register_forward_hook(functools.partial(see_shift, number)))


def merged_of(encoded: VisionOutput | None) -> Merged | None:
    """The merge in the run of a tower, if there is one."""
    return encoded.merged if encoded is not None and isinstance(encoded.merged, Merged) else None


class EncoderMerging:
    """The hooks of an encoder-site method on the towers of one model.

    stage : its method, and its budget where a call has no other: in front of a language model of the tokens of each picture or
        clip, else of the patches of each tile.
    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    language : whether a language model reads the output.
    """

    def __init__(
        self, plan: Plan, stage: PlannedStage[EncoderMethod], hook: Callable[..., None], language: bool
    ) -> None:
        self.plan, self.method, self.language = plan, stage.method, language
        self.towers = towers = plan.towers
        self.layers = towers.merging_layers()
        self.last = towers.feature_layer
        for tower in towers.towers():
            blocks = towers.tower_layers(tower)
            for number in range(self.last + 1):
                block, depth = blocks[number], number / len(blocks)
                hook(block.register_forward_pre_hook(functools.partial(self._enter, number), with_kwargs=True))
                hook(block.register_forward_hook(functools.partial(self._leave, number), prepend=True))
                if number in self.layers:
                    norm, mlp = towers.second_half(block)
                    hook(norm.register_forward_pre_hook(functools.partial(self._between, depth)))
                    hook(mlp.register_forward_hook(self._spread))
            hook(*(reader.register_forward_pre_hook(self._full) for reader in towers.readers(tower)))

    # --- while the tower runs ---------------------------------------------------------------------------------
    def _enter(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (running := encoding(self.plan)) is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if number == 0:
            running[1].merged = self._start(*running, hidden)
        if (merged := self._merged()) is None:
            return None
        merged.enter(self.layers.index(number) if number in self.layers else None)
        packed = hidden.dim() == 2 or self.towers.one_call or "cu_seqlens" in kwargs
        if len(merged.place) == len(merged.owner) or not packed:
            return None
        # a packed sequence: its boundaries and rotary positions follow the tokens that are left
        return args, {**kwargs, **Subsequence(merged.place).arguments(kwargs)}

    def _start(self, call: Call[Plan], encoded: VisionOutput, hidden: Tensor) -> Merged | None:
        """The state of a new run of the tower; None if everything stays."""
        if (stage := call.plan.encoder) is None:
            return None
        cls = int(self.towers.has_cls)
        packed = self.towers.frames(encoded)
        tiles = len(hidden) if packed is None else 1
        # patches of every frame, and the width of those that are packed
        pictures: list[list[tuple[int, int | None]]] = [[(hidden.shape[1] - cls, None)]] * tiles
        if packed is not None:
            pictures = [[(h * w, w) for h, w in frames] for frames in packed]
        starts: dict[tuple[tuple[int, int | None], int], list[int]] = {}
        start = 0
        for frames in pictures:
            sizes = [len(self.towers.units(encoded, *frame)) for frame in frames]
            budget = self._budget(sizes, stage.budget)
            for frame, kept in zip(frames, budget, strict=True):
                starts.setdefault((frame, kept), []).append(start)
                start += cls + frame[0]
            if not self.language:
                record(call.stats, stage, sum(sizes), sum(budget), sum(budget))
        merged = Merged(self.method, cls, tiles, start, hidden.device)
        for (frame, kept), at in starts.items():
            units = self.towers.units(encoded, *frame)
            entries = torch.cat([torch.zeros(cls, units.shape[1], dtype=torch.long), units + cls])
            slots = (torch.tensor(at)[:, None, None] + entries).to(hidden.device)
            plan = self._schedule(len(units), kept)
            merged.runs.append(Run(slots, plan))
        return merged if any(sum(run.plan) for run in merged.runs) else None

    def _schedule(self, tokens: int, kept: int) -> list[int]:
        """Number of the ``tokens`` that each merging layer removes, so that ``kept`` are left."""
        plan: Any = self.method.schedule(tokens, len(self.layers), kept)
        numbers = isinstance(plan, Sequence) and all(type(n) is int and n >= 0 for n in plan)
        if not numbers or len(plan) != len(self.layers) or tokens - sum(plan) < 1:
            returned = str(plan) if isinstance(plan, list) else described(plan)
            refuse(
                self.method,
                "schedule()",
                returned,
                f"a list of {len(self.layers)} numbers, one a layer, that leave 1 token or more of {tokens}",
            )
        return list(plan)

    def _budget(self, sizes: list[int], retain: Retain) -> list[int]:
        """Number of patches (or blocks that merge as one) of each frame or tile that stay in the tower, of ``sizes``."""
        budget = apportion(resolve(retain, sum(sizes)), sizes)
        if not self.language:
            return budget
        # a count is one of the whole picture, of which this may be a part
        method, layers = self.method, len(self.layers)
        least = (check_count(method, "fewest()", method.fewest(size, layers), 1, max(1, size)) for size in sizes)
        return list(map(max, budget, least))

    def _merged(self) -> Merged | None:
        running = encoding(self.plan)
        return None if running is None else merged_of(running[1])

    def _between(self, depth: float, module: nn.Module, args: tuple[Any, ...]) -> Any:
        merged = self._merged()
        if merged is None or merged.layer is None:
            return None
        with without_autocast(args[0].device):
            return merged.merge(args[0], depth), *args[1:]

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        merged = self._merged()
        if merged is None or merged.flow is None:
            return None
        return merged.pack(merged.flow.spread(output.flatten(0, -2)), output)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> Any:
        merged = self._merged()
        if merged is None or (merged.flow is None and number < self.last):
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        flat, flow = hidden.flatten(0, -2), merged.flow
        merged.flow = None
        flat = flat if flow is None else flow.apply(flat)
        if number == self.last:
            flat = flat[merged.owner]
            merged.enter(None)
            merged.open = False
        hidden = merged.pack(flat, hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _full(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        merged = self._merged()
        if merged is None or not merged.open:
            return None
        return args[0][merged.owner], *args[1:]
