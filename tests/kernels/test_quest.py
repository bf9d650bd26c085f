"""Bounds of pages: the definition against the keys themselves, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.quest import page_bounds, page_bounds_cost, page_bounds_definition, page_bounds_kernel

#: rows, query heads, key heads, pages, channels
SHAPES = [(1, 1, 1, 1, 8), (2, 6, 2, 70, 64), (1, 7, 1, 33, 80), (2, 4, 4, 5, 128)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(rows, heads, kv, pages, width, dtype=torch.float32, device="cpu"):
    """Queries, keys in pages of five, and the extremes of these."""
    rng = torch.Generator().manual_seed(pages)
    query = torch.randn(rows, heads, width, generator=rng).to(dtype)
    keys = torch.randn(rows, kv, pages, 5, width, generator=rng).to(dtype)
    return tuple(x.to(device) for x in (query, keys, torch.cat([keys.amax(3), keys.amin(3)], dim=-1)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("join", ("max", "mean"))
def test_no_key_of_a_page_has_a_larger_product(shape, join):
    query, keys, extremes = drawn(*shape)
    bounds = page_bounds(query, extremes, join)
    grouped = query.unflatten(1, (shape[2], -1))
    products = torch.einsum("bkgd,bkptd->bkgpt", grouped, keys).amax(-1)
    most = torch.maximum(
        grouped[:, :, :, None] * keys.amin(3)[:, :, None], grouped[:, :, :, None] * keys.amax(3)[:, :, None]
    )
    wanted = most.sum(-1)
    assert (products <= wanted + 1e-4).all()
    torch.testing.assert_close(bounds, wanted.amax(2) if join == "max" else wanted.mean(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("join", ("max", "mean"))
def test_the_kernel_of_page_bounds(shape, dtype, join, device):
    query, _, extremes = drawn(*shape, dtype=dtype, device=device)
    got = page_bounds_kernel(query, extremes, join)
    torch.testing.assert_close(got, page_bounds_definition(query, extremes, join), rtol=1e-4, atol=1e-4)
    # parts of larger tensors
    got = page_bounds_kernel(query[..., :4], extremes[..., :8], join)
    torch.testing.assert_close(
        got, page_bounds_definition(query[..., :4], extremes[..., :8], join), rtol=1e-4, atol=1e-4
    )


def test_what_does_not_fit():
    query, _, extremes = drawn(2, 6, 2, 5, 8)
    for bad in ((query[:1], extremes), (query[:, :5], extremes), (query, extremes[..., :7]), (query[0], extremes)):
        with pytest.raises(ValueError, match=r"page_bounds takes query \[B, Hq, D\]"):
            page_bounds(*bad)
    with pytest.raises(ValueError, match="'max' or 'mean', not 'sum'"):
        page_bounds(query, extremes, "sum")
    assert page_bounds(query, extremes[:, :, :0]).shape == (2, 2, 0)
    assert page_bounds_cost(1, 2, 1, 3, 4, 2) == (2 * (8 + 24) + 12, 96)
