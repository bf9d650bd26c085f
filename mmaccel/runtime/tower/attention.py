"""The attention function of vision towers: it serves the taps and weighs merged tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ..call.attention_patch import BACKENDS, AttentionKind, base_function
from ..call.call import current


def vision_attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    # Qwen towers pass it by this name
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a vision tower: serves taps, and weighs merged tokens."""
    call = current()
    output = call.vision.running if call is not None else None
    if call is None or output is None:
        return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    taps = call.vision.taps
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attended(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        groups = query.shape[1] // key.shape[1]
        every = key if groups == 1 else key.repeat_interleave(groups, 1)
        with without_autocast(query.device):
            weighed = taps.see(output, module, query, every, mask, scale)
        # flash attention cannot add the weight of merged tokens to its logits
        name = "sdpa" if weighed is not mask and base not in BACKENDS else base
        return base_function(name, module)(module, query, key, value, weighed, scaling=scaling, **kwargs)

    towers = taps.towers
    if not towers.one_call:
        return attended(query, key, value, attention_mask, **kwargs)
    # a call a frame needs neither the mask nor the positions that keep frames apart
    kwargs = {name: kwargs[name] for name in ("dropout",) if name in kwargs}
    lengths = output.lengths(towers)
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [attended(q, k, v, None, **kwargs)[0] for q, k, v in parts if q.shape[2]]
    return torch.cat(outputs, 1), None


VISION = AttentionKind("vision", vision_attention)
