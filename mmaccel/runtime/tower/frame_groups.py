"""A vision tower over many pictures or frames in groups, so that its activations are those of one group.

Pictures, tiles and frames do not see each other in a tower, so that groups give what another batch size gives. Methods that
work inside the tower see all of them together: with those it runs over all at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.memory import SMALL, activation_limit
from ..call.call import current
from ..call.mlp_pieces import MlpPieces
from ..call.plan import ModelPlan

#: numbers that a tower holds at a time for each number of its pixels: 8 widths and 3 of the MLP for a patch are 38 in SigLIP
#: so400m, 35 in CLIP-L, 17 in the tower of Qwen2.5-VL
_WIDER = 40


def encode_in_groups(plan: ModelPlan, tower: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a tower: it runs over ``frames_at_once`` pictures, tiles or frames, or over as many as fit."""
    signature, towers = inspect.signature(original), plan.family
    mlps, weight = MlpPieces(towers.tower_layers(tower)), next(tower.parameters())

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        call = current(plan)
        pixels = max((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), key=Tensor.numel, default=None)
        if call is None or pixels is None:
            return original(*args, **kwargs)
        need = pixels.numel() * _WIDER * weight.dtype.itemsize
        at_once, room = call.plan.recipe.frames_at_once, need
        if need > SMALL:
            room = min(need, activation_limit(pixels.device))
        if at_once is None and need <= room:
            return original(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        sizes = towers.tower_sizes(given)
        most = sum(sizes) * room // need if at_once is None else None
        ends = _ends(sizes, None if at_once is None else max(1, at_once // towers.frames_a_size), most)
        if len(ends) == 1:
            with mlps.over(sum(sizes), weight.dtype, pixels.device):
                return original(**given)
        if (method := _inside(call.plan)) is not None:
            call.stats.notes.append(
                f"frames_at_once: {method} works inside the vision tower, which encoded all {len(sizes)} pictures or frames at "
                "once"
            )
            return original(**given)
        call.stats.notes.append(f"the vision tower encoded {len(sizes)} pictures or frames in {len(ends)} groups")
        outputs, running = [], call.vision.running
        for begin, end in zip([0, *ends], ends, strict=False):
            if running is not None:
                running.whole = sizes[begin:end]
            part = towers.tower_part(given, sizes, begin, end)
            with mlps.over(sum(sizes[begin:end]), weight.dtype, pixels.device):
                outputs.append(original(**part))
        if running is not None:
            running.whole = None
        return _joined(outputs, towers.joins_along)

    return forward


def _inside(plan: ModelPlan) -> str | None:
    """The name of the method of a plan that works inside the tower."""
    return next((stage.method.name for stage in plan.stages if stage.method.site in ("patches", "encoder")), None)


def _ends(sizes: Sequence[int], count: int | None, most: int | None) -> list[int]:
    """Where groups of items of these sizes end: ``count`` items each, or as many as have ``most`` together, at least one."""
    if count is not None:
        return [*range(count, len(sizes), count), len(sizes)]
    ends, held = list[int](), 0
    assert most is not None
    for at, size in enumerate(sizes):
        if held and held + size > most:
            ends.append(at)
            held = 0
        held += size
    return [*ends, len(sizes)]


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """The output for all items, of the outputs of their groups."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts), dim)
    if isinstance(first, dict):
        return type(first)(**{name: _joined([part[name] for part in parts], dim) for name in first})
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(each, dim) for each in zip(*parts, strict=True))
    return first
