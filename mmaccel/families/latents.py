"""Attention over latents (MLA): a layer stores a latent and a part with RoPE of every token, and makes keys and values of them.

With its projections absorbed by the queries, all heads read the same key, both parts of a token, and the latent is its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def absorbed(attention: Any, query: Tensor, latents: Tensor) -> Tensor:
    """Queries whose products with both parts of a token are those of ``query`` with its keys.

    Parameters
    ----------
    attention : the attention module. query : ``[B, Hq, q, D]``, the channels with RoPE last. latents : ``[B, 1, K, r]``.

    Returns ``[B, Hq, q, r + R]``, ``R`` channels with RoPE.
    """
    width = attention.qk_nope_head_dim
    made = matrix_of(attention.kv_b_proj, latents.shape[3], query).view(query.shape[1], -1, latents.shape[3])
    plain = torch.einsum("bhqd,hdr->bhqr", query[..., :width], made[:, :width])
    return torch.cat([plain, query[..., width:]], dim=-1)


def matrix_of(linear: Any, width: int, like: Tensor) -> Tensor:
    """The matrix ``[out, width]`` by which a linear layer multiplies its input ``[..., width]``, in the dtype and on the device
    of ``like``.

    Weights that are quantised, adapted, or elsewhere until the layer runs are read off its outputs for an identity matrix.
    """
    weight: Any = getattr(linear, "weight", None)
    # other kinds of layers, of tensors, or of forwards compute with more than this tensor, or with less
    plain = type(linear) is nn.Linear and type(weight) is nn.Parameter and "forward" not in vars(linear)
    if plain and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return weight.detach().to(like)
    with torch.no_grad():
        units = torch.eye(width, dtype=like.dtype, device=like.device)
        found: Tensor = linear(units) - linear(torch.zeros_like(units[:1]))
    return found.T.to(like)
