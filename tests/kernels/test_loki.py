"""Logits in a low dimension: the definition against the full one, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.loki import (
    low_rank_logits,
    low_rank_logits_cost,
    low_rank_logits_definition,
    low_rank_logits_kernel,
)

#: rows, query heads, key heads, keys, channels, components
SHAPES = [(1, 1, 1, 1, 8, 2), (2, 6, 2, 300, 64, 16), (1, 7, 1, 200, 80, 20), (2, 4, 4, 33, 128, 128)]


def drawn(rows, heads, kv, keys, width, rank, dtype=torch.float32, device="cpu"):
    """Queries, an orthogonal basis, and keys in it."""
    rng = torch.Generator().manual_seed(keys)
    query = torch.randn(rows, heads, width, generator=rng).to(dtype)
    basis = torch.linalg.qr(torch.randn(rows, kv, width, width, generator=rng)).Q[..., :rank]
    stored = torch.randn(rows, kv, keys, width, generator=rng)
    return stored, tuple(x.to(device) for x in (query, basis, (stored @ basis).to(dtype)))


@pytest.mark.parametrize("join", ("max", "mean"))
def test_all_components_are_the_whole_product(join):
    stored, given = drawn(2, 4, 2, 33, 16, 16)
    full = torch.einsum("bkgd,bkpd->bkgp", given[0].unflatten(1, (2, 2)), stored)
    wanted = full.amax(2) if join == "max" else full.mean(2)
    torch.testing.assert_close(low_rank_logits(*given, join), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("join", ("max", "mean"))
def test_the_kernel_of_low_rank_logits(shape, dtype, join, device):
    _, given = drawn(*shape, dtype=dtype, device=device)
    got = low_rank_logits_kernel(*given, join)
    torch.testing.assert_close(got, low_rank_logits_definition(*given, join), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit():
    _, (query, basis, keys) = drawn(2, 6, 2, 5, 8, 4)
    for bad in (
        (query[:1], basis, keys),
        (query[:, :5], basis, keys),
        (query, basis[..., :3], keys),
        (query[..., :7], basis, keys),
        (query, basis[:, :1], keys),
        (query[0], basis, keys),
    ):
        with pytest.raises(ValueError, match=r"low_rank_logits takes query \[B, Hq, D\]"):
            low_rank_logits(*bad)
    with pytest.raises(ValueError, match="'max' or 'mean', not 'sum'"):
        low_rank_logits(query, basis, keys, "sum")
    assert low_rank_logits(query, basis, keys[:, :, :0]).shape == (2, 2, 0)
    assert low_rank_logits_cost(1, 2, 1, 3, 8, 4, 2) == (2 * (16 + 12) + 4 * (32 + 3), 2 * 2 * 4 * 11)
