"""Votes of query heads over some of the stored keys."""

from __future__ import annotations

from torch import Tensor

from ..launch import run
from .naive import votes_definition
from .triton import votes_kernel


def votes(query: Tensor, keys: Tensor, slots: Tensor, interleaved: bool = False) -> Tensor:
    """Every query head's softmax over the products with its keys, unscaled, summed over heads (TokenSelect, arXiv 2411.02886).

    Parameters
    ----------
    query : ``[B, Hq, D]``, floating point; ``Hq`` is a multiple of ``Hkv``.
    keys : ``[B, Hkv, K, D]``, floating point.
    slots : ``[B, 1 or Hkv, P]`` int32, which of them are voted on; -1 for none.
    interleaved : pair query head ``h`` with key head ``h % Hkv`` instead of ``h // (Hq // Hkv)``.

    Returns
    -------
    ``[B, 1 or Hkv, P]`` float32 as ``slots``: the sum over all query heads, or over those of each key head; 0 where there is
    no key.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    fits = query.dim() == 3 and keys.dim() == 4 and slots.dim() == 3 and len(query) == len(keys) == len(slots)
    fits = fits and query.shape[2] == keys.shape[3] and slots.shape[1] in (1, keys.shape[1])
    if not fits or query.shape[1] % max(1, keys.shape[1]):
        raise ValueError(
            "votes takes query [B, Hq, D], keys [B, Hkv, K, D] and slots [B, 1 or Hkv, P] with Hq a multiple of Hkv, not "
            f"{tuple(query.shape)}, {tuple(keys.shape)} and {tuple(slots.shape)}."
        )
    if not slots.numel() or not keys.numel():
        return query.new_zeros(slots.shape, dtype=query.float().dtype)
    return run(votes_kernel, votes_definition, query, keys, slots, interleaved)


def votes_cost(batch: int, heads: int, kv: int, keys: int, width: int, bytes_each: int) -> tuple[int, int]:
    """Bytes that have to be moved at least where all key heads have the same slots, and floating-point operations."""
    moved = batch * (bytes_each * width * (heads + kv * keys) + 8 * keys)
    return moved, 2 * batch * heads * keys * width


__all__ = ["votes", "votes_cost", "votes_definition", "votes_kernel"]
