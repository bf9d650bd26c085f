"""Logits in a low dimension: products of a query with keys that are kept in a few components of their own."""

from __future__ import annotations

from torch import Tensor

from ..launch import run
from ..quest import Join
from .naive import low_rank_logits_definition
from .triton import low_rank_logits_kernel


def low_rank_logits(query: Tensor, basis: Tensor, keys: Tensor, join: Join = "max") -> Tensor:
    """``(q B) . k`` of every key (Loki, arXiv 2406.02542), unscaled; all keys of all heads at once.

    Parameters
    ----------
    query : ``[B, Hq, D]``, floating point; ``Hq`` is a multiple of ``Hkv``.
    basis : ``[B, Hkv, D, r]``, floating point, the components of every key head.
    keys : ``[B, Hkv, P, r]``, floating point, keys in these components.
    join : how the logits of the query heads of one key head are joined.

    Returns
    -------
    ``[B, Hkv, P]`` float32.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    fits = query.dim() == 3 and basis.dim() == keys.dim() == 4 and basis.shape[:2] == keys.shape[:2]
    fits = fits and basis.shape[2:] == (query.shape[2], keys.shape[3]) and len(query) == len(keys)
    if not fits or query.shape[1] % max(1, keys.shape[1]):
        raise ValueError(
            "low_rank_logits takes query [B, Hq, D], basis [B, Hkv, D, r] and keys [B, Hkv, P, r] with Hq a multiple of Hkv, "
            f"not {tuple(query.shape)}, {tuple(basis.shape)} and {tuple(keys.shape)}."
        )
    if join not in ("max", "mean"):
        raise ValueError(f"low_rank_logits joins heads by 'max' or 'mean', not {join!r}.")
    if not keys.numel():
        return low_rank_logits_definition(query, basis, keys, join)
    return run(low_rank_logits_kernel, low_rank_logits_definition, query, basis, keys, join)


def low_rank_logits_cost(
    batch: int, heads: int, kv: int, keys: int, width: int, rank: int, bytes_each: int
) -> tuple[int, int]:
    """Bytes that have to be moved at least, of a basis in float32, and floating-point operations."""
    moved = batch * (bytes_each * (heads * width + kv * keys * rank) + 4 * kv * (width * rank + keys))
    return moved, 2 * batch * heads * rank * (width + keys)


__all__ = ["low_rank_logits", "low_rank_logits_cost", "low_rank_logits_definition", "low_rank_logits_kernel"]
