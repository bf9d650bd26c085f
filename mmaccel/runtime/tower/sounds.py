"""The attention that tokens of sounds receive in the last layer of the sound tower, for methods that are guided by it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ..call.call import current
from ..call.plan import ModelPlan
from .taps import received_attention


def hook_sounds(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Let calls note that attention, if a method of the plan asks for it."""
    if not plan.hears:
        return
    family, tower = plan.family, plan.family.sound_tower

    def attend(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if (call := current(plan)) is not None:
            given = dict(zip(("hidden_states", "cu_seqlens"), args, strict=False)) | kwargs
            call.vision.sounds = _received(module, given["hidden_states"], given["cu_seqlens"])

    def encoded(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if (call := current(plan)) is not None and call.vision.sounds is not None:
            given = dict(zip(("input_features", "feature_lens"), args, strict=False)) | kwargs
            call.vision.sounds = family.to_sounds(call.vision.sounds, given["feature_lens"])

    hook(tower.layers[-1].self_attn.register_forward_pre_hook(attend, with_kwargs=True))
    hook(tower.register_forward_hook(encoded, with_kwargs=True))


@torch.no_grad()
def _received(module: Any, hidden: Tensor, bounds: Tensor) -> Tensor:
    """``[L]`` float32: the attention that each of ``hidden [L, C]`` receives from all queries of its window, mean over heads;
    windows end at ``bounds``."""
    hidden = hidden.to(module.q_proj.weight.device)
    query, key = (
        proj(hidden).view(len(hidden), module.num_heads, -1).transpose(0, 1)[None]
        for proj in (module.q_proj, module.k_proj)
    )
    with without_autocast(hidden.device):
        return torch.cat(
            [
                received_attention(query[:, :, a:b], key[:, :, a:b], None, module.scaling)[0] * (b - a)
                for a, b in pairwise(bounds.tolist())
            ]
        )
