"""Indexers, which choose the keys that a layer reads: they see the keys that are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .call import current
from .plan import ModelPlan
from .readers import visible_keys


def hook_indexers(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Give the indexers of a model the mask of the stored keys in forwards that mmaccel shapes; :func:`.readers.read_stored`
    hides what they do not choose."""

    def show(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = current(plan)
        runs = None if call is None or call.observer is not None else call.text.runs
        if runs is None:
            return None
        mask = visible_keys(runs.forward, number, args[0].device)[:, 0]
        # of its arguments the mask alone is one
        return tuple(mask if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in args), kwargs

    for number in plan.family.indexed:
        if (indexer := plan.family.attention_in(number).indexer) is not None:
            hook(indexer.register_forward_pre_hook(functools.partial(show, number), with_kwargs=True))
