"""Later layers of a vision tower compute a part of the patches; the others are rebuilt from what changed in these.

Behind every layer whose output is read, and in front of modules that read between layers, the full grid is rebuilt, so that
projectors, poolers and newline packers still work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...core.precision import without_autocast
from ...method import RebuildingMethod
from ...method.results import check_slots, check_tensor
from ..call.call import Call, encoding
from ..call.compact_tokens import Subsequence
from ..call.plan import ModelPlan, PlannedStage, record
from ..call.vision_output import VisionOutput
from .patch_pruning import LayerPruning, Pruned


class Rebuilt(Pruned):
    """The patches that are computed, and how the others follow them.

    states : ``[S0, C]``, all tokens at the choice. left : ``[r]`` long, those that are not computed.
    sources : ``[r, k]`` long, the tokens whose change each of them follows; -1 where it follows fewer than ``k``.
    """

    def __init__(self, target: Tensor, cls: int, tiles: int, packed: bool, states: Tensor, sources: Tensor) -> None:
        super().__init__(target, cls, tiles, packed)
        self.states, follows = states, sources >= 0
        # counted among the tokens that are computed
        self.sources = self.owner[sources.clamp(min=0)]
        self.weights = (follows / follows.sum(1, keepdim=True))[..., None]
        self.left = (target != torch.arange(len(target), device=target.device)).nonzero()[:, 0]

    def computed(self, hidden: Tensor) -> Tensor:
        """``[S, C]``: the computed tokens of :meth:`take`, without padding."""
        flat = hidden.flatten(0, -2)
        return flat if self.packed else flat[self._at]

    def give(self, hidden: Tensor) -> Tensor:
        """Undo :meth:`take`: the full grid, with patches that were left out rebuilt."""
        now = self.computed(hidden)
        change = now.float() - self.states[self.place].float()
        whole = self.states.to(now.dtype, copy=True)
        whole[self.place] = now
        whole[self.left] = (self.states[self.left].float() + (change[self.sources] * self.weights).sum(1)).to(now.dtype)
        return whole.view(*hidden.shape[:-2], -1, hidden.shape[-1])

    def spread(self, added: Tensor) -> Tensor:
        """The output of the MLP for the computed tokens, on the full grid; zero for the others."""
        whole = added.new_zeros(len(self.owner), added.shape[-1])
        whole[self.place] = self.computed(added)
        return whole.view(*added.shape[:-2], -1, added.shape[-1])


class _LeftBounds(Subsequence):
    """Bounds as the authors' program counts them: the first token of a later frame belongs to the frame before."""

    def bounds(self, given: Tensor) -> Tensor:
        at = self.place
        return self._once(
            given,
            lambda: (
                (torch.searchsorted(at, given.to(at), right=True) * (given > 0)).to(given.dtype).unique_consecutive()
            ),
        )


class _Before:
    """Hidden states at the input of the layer before the choice."""

    states: Tensor | None = None


class Rebuilding(LayerPruning):
    """The hooks of a :class:`RebuildingMethod` on the towers of one model.

    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(self, plan: ModelPlan, stage: PlannedStage[RebuildingMethod], hook: Callable[..., None]) -> None:
        self.plan, self.family = plan, plan.family
        layers = self.family.feature_layer + 1
        self.first, full = stage.method.span(layers)
        self.alone = self.first + full
        for tower in self.family.towers():
            blocks = self.family.tower_layers(tower)
            for number in range(self.first - 1, layers):
                block = blocks[number]
                hook(block.register_forward_pre_hook(functools.partial(self._reach, number), with_kwargs=True))
                if self.first <= number < self.alone:
                    norm, mlp = self.family.second_half(block)
                    hook(norm.register_forward_pre_hook(self._between))
                    hook(mlp.register_forward_hook(self._spread))
                    hook(block.register_forward_hook(self._rebuild, prepend=True))
                elif number in self.family.read_at:
                    hook(block.register_forward_hook(self._leave, prepend=True))
            hook(*(reader.register_forward_pre_hook(self._full) for reader in self.family.readers(tower)))

    def _reach(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Choose patches at the first layer, and give those behind the chosen ones alone."""
        if (running := encoding(self.plan)) is None or (stage := running[0].plan.rebuilding) is None:
            return None
        call, encoded = running
        hidden = args[0] if args else kwargs["hidden_states"]
        before = call.state(_Before)
        if number == self.first - 1:
            before.states, encoded.merged = hidden, None
        elif number == self.first and before.states is not None:
            with call.stats.clock.measure("selection", hidden.device), torch.no_grad(), without_autocast(hidden.device):
                encoded.merged = self._begin_part(call, stage, encoded, before.states, hidden)
            before.states = None
        return self._enter(module, args, kwargs) if number >= self.alone else None

    def _begin_part(
        self,
        call: Call[ModelPlan],
        stage: PlannedStage[RebuildingMethod],
        encoded: VisionOutput,
        before: Tensor,
        now: Tensor,
    ) -> Rebuilt | None:
        """The state of a run of the tower whose ``now [tiles, T, C]`` or ``[..., S, C]`` are chosen from; None if all are."""
        method, cls = stage.method, int(self.family.has_cls)
        packed = self.family.frames(encoded)
        tiles = len(now) if packed is None else 1
        flat, earlier = now.flatten(0, -2).float(), before.flatten(0, -2).float()
        at = torch.arange(len(flat), device=flat.device)
        patches = at.view(tiles, -1)[:, cls:]
        sizes = (
            [sum(h * w for h, w in picture) for picture in packed] if packed is not None else [patches.shape[1]] * tiles
        )
        groups = [patches.flatten()] if method.official else list(patches.flatten().split(sizes))
        target, sources = at.clone(), []
        for group in groups:
            chosen = check_tensor(
                method, "choose()", method.choose(earlier[group], flat[group]), "integer", (None,), now
            )
            check_slots(method, "choose()", chosen, len(group), rising=True)
            stays = torch.zeros(len(group), dtype=torch.bool, device=flat.device)
            stays[chosen] = True
            kept, left = group[stays], group[~stays]
            nearest = method.sources(flat[left], flat[kept])
            nearest = check_tensor(method, "sources()", nearest, "integer", (len(left), None), now)
            check_slots(method, "sources()", nearest, len(kept))
            target[left] = kept[nearest[:, 0]]
            sources.append(kept[nearest])
        computed = int((target == at).sum())
        record(call.stats, stage, patches.numel(), None, computed - cls * tiles)
        if computed == len(at):
            return None
        most = max(one.shape[1] for one in sources)
        every = torch.cat([pad(one, (0, most - one.shape[1]), value=-1) for one in sources])
        rebuilt = Rebuilt(target, cls, tiles, packed is not None, now.flatten(0, -2), every)
        if method.official:
            rebuilt.sequence = _LeftBounds(rebuilt.place)
        return rebuilt

    def _rebuilt(self) -> Rebuilt | None:
        pruned = self._pruned()
        return pruned if isinstance(pruned, Rebuilt) else None

    def _between(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        rebuilt = self._rebuilt()
        return None if rebuilt is None else (rebuilt.take(args[0]), *args[1:])

    def _spread(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        rebuilt = self._rebuilt()
        return None if rebuilt is None else rebuilt.spread(output)

    def _rebuild(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind a layer whose MLP computed a part: rebuild the rest."""
        if (rebuilt := self._rebuilt()) is None:
            return None
        whole = rebuilt.give(rebuilt.take(output[0] if isinstance(output, tuple) else output))
        return (whole, *output[1:]) if isinstance(output, tuple) else whole
