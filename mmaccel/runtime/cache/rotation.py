"""Keys that move to other positions: RoPE turns them by the difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kv.packed import QuantisedLayer
from ...kv.ragged import Ragged


def positions_of(config: Any) -> int | None:
    """Number of positions of a language model by its ``config``, with scaled RoPE; None if it does not say."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if limit is None or not factor:
        return limit
    # some configs state the scaled number, others the original one
    return max(limit, int(factor * (original or limit)))


def rotations(text: Any, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[B, n, D]`` float32 of the RoPE of a ``text`` model at positions ``[B, n]`` or ``[axes, B, n]``; the
    factor that some kinds of RoPE multiply them by is left out."""
    rope = text.config.rope_parameters or {}
    sections: list[int] | None = rope.get("mrope_section")
    if positions.dim() == 3:
        positions = positions[-3:]
    if sections is not None and positions.dim() == 2:
        positions = positions[None].expand(3, -1, -1)
    cos, sin = text.rotary_emb(torch.zeros(1, device=device), positions.to(device))
    if cos.dim() == 4 and sections is not None:
        # the older transformers leave it to the layers to choose an axis for every channel
        cos, sin = (
            torch.cat([part[i % 3] for i, part in enumerate(x.split(2 * sections, dim=-1))], dim=-1) for x in (cos, sin)
        )
    scale = float(getattr(text.rotary_emb, "attention_scaling", 1.0))
    # those of a model on several devices are where its hooks put them
    return cos.to(device).float() / scale, sin.to(device).float() / scale


def turned(text: Any, keys: Tensor, by: Tensor) -> Tensor:
    """``keys [B, Hkv, n, D]``, each moved ``by [B, 1 or Hkv, n]`` positions further; ``[axes, B, 1 or Hkv, n]`` for positions
    of several axes."""
    if by.dim() == 4 and len(by) == 1:
        by = by[0]
    cos, sin = (x.unflatten(0, by.shape[-3:-1]) for x in rotations(text, by.flatten(-3, -2), keys.device))
    x = keys.float()
    return (x * cos + half(x) * sin).to(keys.dtype)


def turn_layer(text: Any, layer: QuantisedLayer, by: Tensor) -> None:
    """Move all keys that a layer stores; for ``by`` see :func:`turned`, with ``n`` its slots."""
    stored, values = layer.stored()
    keys = turned(text, stored, by)
    if layer.prefix is not None:
        layer.prefix, layer.values, layer.keys = None, values, keys
        return
    width = keys.shape[2] - layer.keys.shape[2]
    layer.keys = keys[:, :, width:]
    if (ragged := layer.ragged) is not None:
        held = torch.arange(width, device=keys.device) < ragged.lengths[..., None]
        layer.ragged = Ragged(keys[:, :, :width][held], ragged.values, ragged.lengths, ragged.longest)


def half(x: Tensor) -> Tensor:
    """``x [..., D]`` turned by a quarter, channel ``i`` with channel ``i + D / 2``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)
