"""Votes of query heads: the definition by hand, the kernels against the definitions."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.alike import keep_alike, keep_alike_cost, keep_alike_definition, keep_alike_kernel
from mmaccel_kernels.votes import votes, votes_cost, votes_definition, votes_kernel

#: rows, query heads, key heads, stored keys, slots, channels, whether heads have slots of their own
SHAPES = [
    (1, 1, 1, 1, 1, 8, False),
    (2, 6, 2, 300, 250, 64, False),
    (2, 6, 2, 300, 250, 64, True),
    (1, 7, 1, 90, 60, 80, False),
    (2, 4, 4, 70, 33, 256, True),
]


def drawn(rows, heads, kv, stored, number, width, own, dtype=torch.float32, device="cpu"):
    """Queries, keys with room behind them, and slots in any order, some of which are none; one row may have none at all."""
    rng = torch.Generator().manual_seed(stored)
    query = torch.randn(rows, heads, width, generator=rng).to(dtype)
    keys = torch.randn(rows, kv, stored + 5, width, generator=rng).to(dtype)[:, :, :stored]
    slots = torch.rand(rows, kv if own else 1, stored, generator=rng).argsort(-1)[..., :number].int()
    slots[..., number - number // 4 :] = -1
    if rows > 1:
        slots[-1, 0] = -1
    return tuple(x.to(device) for x in (query, keys, slots))


def test_votes_by_hand():
    # two query heads to one key head; products 0 and ln 3 for the first, ln 3 and 0 for the second
    one = float(torch.log(torch.tensor(3.0)))
    query, keys = torch.eye(2)[None], torch.tensor([[[[0.0, one], [9.0, 9.0], [one, 0.0]]]])
    made = votes(query, keys, torch.tensor([[[0, 2, -1]]], dtype=torch.int32))
    torch.testing.assert_close(made, torch.tensor([[[1.0, 1.0, 0.0]]]))
    alone = votes(query[:, :1], keys, torch.tensor([[[0, 2]]], dtype=torch.int32))
    torch.testing.assert_close(alone, torch.tensor([[[0.25, 0.75]]]))


def test_pairs_of_heads():
    query, keys, slots = drawn(1, 4, 2, 9, 9, 8, True)
    slots = slots.abs() % 9
    beside, apart = (votes(query, keys, slots, interleaved) for interleaved in (False, True))
    torch.testing.assert_close(apart, votes(query[:, [0, 2, 1, 3]], keys, slots))
    assert (beside - apart).abs().max() > 1e-3


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_votes(shape, dtype, interleaved, device):
    given = drawn(*shape, dtype=dtype, device=device)
    got, wanted = votes_kernel(*given, interleaved), votes_definition(*given, interleaved)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)
    # every head distributes one vote where there is something to vote on
    heads = shape[1] // (shape[2] if shape[6] else 1)
    full = (given[2] >= 0).any(-1)
    torch.testing.assert_close(got.sum(-1), heads * full.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows, heads, width, units", [(1, 1, 8, 1), (3, 28, 128, 40), (2, 6, 80, 3000)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_kernel_of_keep_alike(rows, heads, width, units, dtype, device):
    rng = torch.Generator().manual_seed(units)
    query = torch.randn(rows, heads, width, generator=rng).to(dtype).to(device)
    before = torch.nn.functional.normalize(
        query.flatten(1).float() * torch.tensor([1.0, -1, 1][:rows])[:, None].to(device)
    )
    now, then = torch.randint(99, (2, rows, 2, units), generator=rng, dtype=torch.int32).to(device)
    got = keep_alike_kernel(query, now, before, then, 0.9)
    wanted = keep_alike_definition(query, now, before, then, 0.9)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[1][0], then[0]) and (rows == 1 or torch.equal(got[1][1], now[1]))


def test_what_does_not_fit():
    query, keys, slots = drawn(2, 6, 2, 5, 4, 8, False)
    for bad in (
        (query[:1], keys, slots),
        (query[:, :5], keys, slots),
        (query, keys[..., :7], slots),
        (query, keys, slots[0]),
    ):
        with pytest.raises(ValueError, match=r"votes takes query \[B, Hq, D\]"):
            votes(*bad)
    assert votes(query, keys, slots[..., :0]).shape == (2, 1, 0)
    with pytest.raises(ValueError, match=r"keep_alike takes query \[B, Hq, D\]"):
        keep_alike(query, slots, query.flatten(1)[:, 1:], slots, 0.9)
    assert votes_cost(1, 2, 1, 3, 8, 2) == (2 * 8 * 5 + 24, 2 * 2 * 3 * 8)
    assert keep_alike_cost(1, 2, 8, 3, 2) == (16 * 10 + 36, 5 * 16)
