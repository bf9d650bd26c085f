"""Attention over latents (MLA): a layer stores a latent and a part with RoPE of every token, and makes keys and values of them.

With its projections absorbed by the queries, all heads read the same key, both parts of a token, and the latent is its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def absorbed(attention: Any, query: Tensor, latents: Tensor) -> Tensor:
    """Queries whose products with both parts of a token are those of ``query`` with its keys.

    Parameters
    ----------
    attention : the attention module. query : ``[B, Hq, q, D]``, the channels with RoPE last. latents : ``[B, 1, K, r]``.

    Returns ``[B, Hq, q, r + R]``, ``R`` channels with RoPE.
    """
    width = attention.qk_nope_head_dim
    made = attention.kv_b_proj.weight.detach().view(query.shape[1], -1, latents.shape[3])
    plain = torch.einsum("bhqd,hdr->bhqr", query[..., :width], made[:, :width].to(query.dtype))
    return torch.cat([plain, query[..., width:]], dim=-1)
