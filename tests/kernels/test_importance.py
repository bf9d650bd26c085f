from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.importance import (
    importance,
    importance_cost,
    importance_definition,
    importance_kernel,
    naive,
    tiles,
)
from mmaccel_kernels.importance import triton as kernel
from traffic import counted

#: batch, query heads, key heads, queries, keys, channels
SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 4, 2, 5, 70, 20),
    (1, 7, 1, 70, 70, 32),
    (2, 2, 2, 130, 131, 64),
    (1, 6, 2, 33, 200, 80),
]
TYPES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*fp16": torch.float16}


def attention(batch, heads, kv, queries, keys, width, dtype=torch.float32, device="cpu"):
    """Queries, keys, and weight, valid and visible; the last row is left-padded."""
    rng = torch.Generator().manual_seed(keys)
    query, key = (
        torch.randn(batch, *s, width, generator=rng).to(device, dtype) for s in ((heads, queries), (kv, keys))
    )
    valid = torch.arange(keys) >= torch.tensor([0] * (batch - 1) + [keys // 2])[:, None]
    weight = torch.rand(batch, queries, generator=rng)
    visible = torch.rand(batch, kv, queries, keys, generator=rng) > 0.5
    visible[:, 0, 0] = False
    return query * 2, key, *(t.to(device) for t in (weight, valid, visible))


def options(weight, valid, visible):
    return [(None, None, None), (weight, valid, None), (weight, None, visible), (None, valid, visible[:, :1])]


def eager(query, key, scaling, weight, valid, visible):
    """The attention matrix, summed."""
    groups, (queries, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    logits = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double().repeat_interleave(groups, 1)) * scaling
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if visible is not None:
        seen = visible.repeat_interleave(query.shape[1] // visible.shape[1], 1)
    if valid is not None:
        seen = seen & valid[:, None, None]
    paid = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (paid if weight is None else paid * weight[:, None, :, None]).sum(2).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape, monkeypatch):
    query, key, *rest = attention(*shape)
    for block in (1, 5000, 1 << 22):
        monkeypatch.setattr(naive, "BLOCK", block)
        for given in options(*rest):
            got = importance_definition(query, key, 0.2, *given)
            torch.testing.assert_close(got, eager(query, key, 0.2, *given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_the_kernel(shape, dtype, device, monkeypatch):
    query, key, *rest = attention(*shape, dtype, device)
    for given in options(*rest):
        want = importance_definition(query, key, 0.2, *given)
        # with and without keys split over programs
        for programs in (1, 512):
            monkeypatch.setattr(kernel, "PROGRAMS", programs)
            got = importance_kernel(query, key, 0.2, *given)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_keys_held_in_float32_and_no_queries(device):
    query, key, *_ = attention(2, 4, 2, 5, 70, 20, torch.bfloat16, device)
    for run in (importance_definition, importance_kernel):
        assert torch.equal(run(query, key.float(), 0.2, None, None, None), run(query, key, 0.2, None, None, None))
    assert torch.equal(importance(query[:, :, :0], key), torch.zeros(2, 4, 70, device=device))


def test_joins_and_defaults():
    query, key, *_ = attention(2, 4, 2, 5, 70, 20)
    apart = importance(query, key)
    torch.testing.assert_close(apart, eager(query, key, 20**-0.5, None, None, None))
    # every query pays one
    torch.testing.assert_close(apart.sum(-1), torch.full((2, 4), 5.0))
    groups = apart.view(2, 2, 2, 70)
    for join, want in (("mean", groups.mean(2)), ("sum", groups.sum(2)), ("max", groups.amax(2))):
        assert torch.equal(importance(query, key, join=join), want)


@pytest.mark.parametrize("weighed", [False, True])
def test_what_the_launches_move(weighed, monkeypatch):
    batch, heads, kv, queries, keys, width = 2, 6, 2, 40, 96, 32
    query, key, *_ = attention(batch, heads, kv, queries, keys, width, torch.float16)
    monkeypatch.setattr(kernel, "PROGRAMS", 1)
    with counted() as traffic:
        importance_kernel(query, key, 0.2, torch.ones(batch, queries) if weighed else None, None, None)
    moved, operations = importance_cost(batch, heads, kv, queries, keys, width, 2)
    tile = tiles(queries, width, 2)
    side_q, side_k = tile["BLOCK_Q"], tile["BLOCK_K"]
    assert traffic.launches == 2 and (side_q, side_k) == (64, 32)
    # the first pass reads the keys again for every block of queries, the second the queries for every block of keys,
    # each query with its sum, and its weight if it has one
    again = 2 * batch * width * kv * keys * (-(-heads // kv * queries // side_q) - 1)
    blocks = keys // side_k
    again += batch * heads * queries * (blocks - 1) * (2 * width + 4)
    again += 4 * batch * queries * heads * blocks * weighed
    assert traffic.loaded + traffic.stored == moved + again
    # whole tiles, and what a block of queries may not see in the tiles on its edge
    whole = (
        2 * width * side_q * side_k * batch * kv * (blocks * -(-heads // kv * queries // side_q) + blocks * heads // kv)
    )
    assert operations <= traffic.dots == whole


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"query": torch.ones(4, 5, 8)}, r"query \[B, Hq, q, D\] and key .* not \(4, 5, 8\)"),
        ({"query": torch.ones(2, 3, 5, 8)}, r"\(2, 3, 5, 8\)"),
        ({"query": torch.ones(2, 4, 10, 8)}, r"q <= K, not \(2, 4, 10, 8\)"),
        ({"key": torch.ones(2, 2, 9, 8).long()}, "float32 and torch.int64"),
        ({"query": torch.ones(2, 4, 5, 300), "key": torch.ones(2, 2, 9, 300)}, "at most 256 channels, not 300"),
        ({"weight": torch.ones(2, 4)}, r"weight \[B, q\] = \(2, 5\) float32"),
        ({"valid": torch.ones(2, 9)}, r"valid \[B, K\] = \(2, 9\) bool, not \(2, 9\) torch.float32"),
        (
            {"visible": torch.ones(2, 4, 5, 9) > 0},
            r"visible .* \(2, 1, 5, 9\) or \(2, 2, 5, 9\) bool, not \(2, 4, 5, 9\)",
        ),
    ],
)
def test_wrong_shapes_are_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=f"importance takes .*{says}"):
        importance(**{"query": torch.ones(2, 4, 5, 8), "key": torch.ones(2, 2, 9, 8)} | wrong)


def test_an_unknown_join_is_refused():
    with pytest.raises(ValueError, match="'none', 'mean', 'sum' or 'max', not 'min'"):
        importance(torch.ones(2, 4, 5, 8), torch.ones(2, 2, 9, 8), join="min")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_and_tokens_may_lie_anywhere(dtype, device):
    """Queries as a projection makes them, keys with room behind those of each head; neither is copied."""
    query, key, weight, valid, _ = attention(2, 4, 2, 33, 70, 32, dtype, device)
    want = importance_kernel(query, key, 0.2, weight, valid, None)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    room = torch.full((2, 2, 90, 32), torch.nan, dtype=dtype, device=device)
    room[:, :, :70] = key
    assert torch.equal(importance_kernel(turned, room[:, :, :70], 0.2, weight, valid, None), want)
    with counted() as traffic:
        importance_kernel(turned, room[:, :, :70], 0.2, weight, valid, None)
    # keys are split, and one launch puts together what is found of their parts
    assert traffic.launches == 3


def test_more_queries_than_keys_where_it_is_said_what_they_see(device):
    query, key, weight, valid, visible = attention(2, 4, 2, 9, 9, 32, device=device)
    given = weight, valid[:, :5], visible[..., :5]
    got = importance_kernel(query, key[:, :, :5], 0.2, *given)
    torch.testing.assert_close(got, eager(query, key[:, :, :5], 0.2, *given), atol=2e-5, rtol=2e-5)
    assert importance(query, key[:, :, :5], visible=visible[..., :5]).shape == (2, 4, 5)
