"""Patches that do not enter the vision tower: a method predicts their pixels from those of others.

The tower's layers run over the patches that are left, with their positions in the picture, learned or rotary, and in their
windows. Behind every layer whose output is read the full grid is restored: a patch that was left out holds the output of the
one that predicts it, so that projectors, poolers and newline packers still work.
The language model is then shown the tokens of encoded patches. A token that blends several patches (pooled clips) stays if one
of them was encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Modality
from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...errors import UnsupportedError
from ...families.base import Family
from ...method import PatchMethod
from ...method.refused import refuse
from ...method.results import check_tensor
from ..call.call import encoding
from ..call.compact_tokens import CompactTokens, Subsequence
from ..call.forward import Prompt
from ..call.plan import ModelPlan, PlannedStage, record
from ..call.vision_output import VisionOutput
from .token_groups import targets


class Pruned(CompactTokens):
    """The patches that are encoded. Tiles keep as many as they have, and are padded to the one that keeps most.

    target : ``[S0]`` long, the token that each is predicted from; its own place for those that are encoded.
    packed : whether the tower has one sequence of frames of several sizes, and no tiles.
    """

    def __init__(self, target: Tensor, cls: int, tiles: int, packed: bool) -> None:
        super().__init__(cls, tiles, len(target), target.device)
        self.packed, self.open = packed, False
        stays = target == self.place
        self.place = self.place[stays]
        rank = stays.cumsum(0) - 1
        self.owner = rank[target]
        self.sequence = Subsequence(self.place)
        if packed:
            return
        count = stays.view(tiles, -1).sum(1)
        slot = torch.arange(int(count.max()), device=target.device)
        first = count.cumsum(0) - count
        self._real = slot < count[:, None]
        # padding repeats the first token of its tile
        self._slots = self.place[first[:, None] + torch.where(self._real, slot, 0)]
        self._at = self._real.flatten().nonzero()[:, 0]
        self.full = bool(self._real.all())

    @property
    def real(self) -> Tensor | None:
        """See :attr:`CompactTokens.real`."""
        return None if self.packed or self.full or not self.open else self._real

    def take(self, hidden: Tensor) -> Tensor:
        """``[tiles, T0, C] -> [tiles, T, C]``, or ``[..., S0, C] -> [..., S, C]``."""
        return hidden[..., self.place, :] if self.packed else hidden.flatten(0, 1)[self._slots]

    def give(self, hidden: Tensor) -> Tensor:
        """Undo :meth:`take`: back on the full grid."""
        if self.packed:
            return hidden[..., self.owner, :]
        return hidden.flatten(0, 1)[self._at[self.owner]].view(self.tiles, -1, hidden.shape[-1])

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Hide padding."""
        if not self.open or self.packed:
            return mask
        if mask is not None:
            raise UnsupportedError(
                "Patches cannot be left out of pictures that have padded patches; give pictures of one shape, or a call each."
            )
        if self.full:
            return None
        hidden = torch.zeros(self._real.shape, dtype=key.dtype, device=key.device)
        return hidden.masked_fill(~self._real, torch.finfo(key.dtype).min)[:, None, None]

    def _there(self, values: Tensor) -> Tensor:
        if self.packed or self.full:
            return super()._there(values)
        return values[self._real[:, self.cls :]]


class LayerPruning:
    """The hooks that let the layers of one model's towers run over the patches of :attr:`VisionOutput.merged` alone.

    hook : takes the handle of every hook as soon as it is registered, so that all can be removed whatever fails.
    """

    def __init__(self, plan: ModelPlan, hook: Callable[..., None]) -> None:
        self.plan, self.family = plan, plan.family
        for tower in self.family.towers():
            blocks = self.family.tower_layers(tower)
            for number in range(self.family.feature_layer + 1):
                hook(blocks[number].register_forward_pre_hook(self._enter, with_kwargs=True))
                if number in self.family.read_at:
                    hook(blocks[number].register_forward_hook(self._leave, prepend=True))
            hook(*(reader.register_forward_pre_hook(self._full) for reader in self.family.readers(tower)))

    def _pruned(self) -> Pruned | None:
        running = encoding(self.plan)
        return running[1].merged if running is not None and isinstance(running[1].merged, Pruned) else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pruned = self._pruned()
        if pruned is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        if not pruned.open:
            hidden, pruned.open = pruned.take(hidden), True
        if pruned.packed:
            kwargs = {**kwargs, **pruned.sequence.arguments(kwargs)}
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        pruned = self._pruned()
        if pruned is None:
            return None
        pruned.open = False
        whole = pruned.give(output[0] if isinstance(output, tuple) else output)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _full(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        pruned = self._pruned()
        return None if pruned is None or not pruned.open else (pruned.give(args[0]), *args[1:])


class PatchPruning(LayerPruning):
    """The hooks of a method in front of the towers of one model."""

    def __init__(self, plan: ModelPlan, hook: Callable[..., None]) -> None:
        for tower in plan.family.towers():
            hook(tower.register_forward_pre_hook(self._begin, with_kwargs=True))
        super().__init__(plan, hook)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (running := encoding(self.plan)) is None or (stage := running[0].plan.patches) is None:
            return
        call, encoded = running
        names = ("pixel_values", "hidden_states")
        pixels = args[0] if args else next(kwargs[name] for name in names if name in kwargs)
        with call.stats.clock.measure("selection", pixels.device), torch.no_grad(), without_autocast(pixels.device):
            target = predicted(self.family, stage.method, encoded, pixels)
            encoded.merged = pruned(self.family, encoded, target, len(pixels))


def predicted(family: Family, method: PatchMethod, encoded: VisionOutput, pixels: Tensor) -> Tensor:
    """``[patches]`` long: the patch that predicts each one of ``pixels``, as the tower is given them; their own place for those
    that are encoded."""
    groups = family.unit_pixels(encoded, pixels)
    target = torch.arange(sum(places.numel() for _, places in groups), device=pixels.device)
    for values, places in groups:
        shape = values.shape[0], values.shape[1] * values.shape[2]
        sources = check_tensor(method, "predict()", method.predict(values), "integer", shape, values)
        if not bool(((sources >= 0) & (sources < shape[1])).all()):
            least, most = int(sources.min()), int(sources.max())
            refuse(method, "predict()", f"slots from {least} to {most}", f"slots from 0 to {shape[1] - 1}")
        if not bool((sources.gather(1, sources.long()) == sources).all()):
            wanted = "slots of patches that are encoded, each of which has its own slot"
            refuse(method, "predict()", "slots of patches that are predicted themselves", wanted)
        target[places] = places.gather(1, sources[..., None].expand_as(places))
    return target


def pruned(family: Family, encoded: VisionOutput, target: Tensor, tiles: int) -> Pruned | None:
    """The patches that are encoded, if each is predicted from ``target [patches]``; None if all are.

    tiles : their number, where the tower has no packed sequence.
    """
    if torch.equal(target, torch.arange(len(target), device=target.device)):
        return None
    order, cls = family.tower_order(encoded), int(family.has_cls)
    if order is not None:
        order = order.to(target.device)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        target = rank[target[order]]
    if family.frames(encoded) is not None:
        return Pruned(target, 0, 1, packed=True)
    target = target.view(tiles, -1)
    width = target.shape[1]
    # a tile's patches follow its CLS token
    target = target + cls * (target // width + 1)
    own = torch.arange(tiles, device=target.device)[:, None] * (width + cls)
    return Pruned(torch.cat([own.expand(-1, cls), target], 1).flatten(), cls, tiles, packed=False)


def leave_out(prompt: Prompt, stage: PlannedStage[PatchMethod], outputs: Mapping[Modality, VisionOutput]) -> None:
    """Keep the tokens of encoded patches: where the one that predicts others was cropped, the first of these replaces it."""
    layout = prompt.layout
    target = targets(prompt.plan.towers, layout, outputs)
    stays = (target == torch.arange(target.shape[1])) & layout.visual
    record(prompt.stats, stage, int(layout.visual.sum()), None, int(stays.sum()))
    prompt.reduced(stage.number, 0, Reduction(stays | (layout.valid & ~layout.visual), layout.valid))
