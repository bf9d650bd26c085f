"""GEAR: what codes lack, stored beside them, goes wherever the codes go."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coded import HEADS, WIDTH, centred, error, flat, keys_like
from mmaccel_kernels.decode import decode_attention, decode_attention_kernel
from mmaccel_kernels.decode import decode_attention_definition as definition
from mmaccel_kernels.decode.operator import traced
from mmaccel_kernels.decode.triton import readable
from mmaccel_kernels.pages import Pages
from mmaccel_kernels.pages.triton import MAX_RANK

from mmaccel.kv.codecs.gear import GEAR, extremes, first_directions, low_rank

WHOLE = GEAR(page=32, bits=2)


def packed(codec: GEAR, tokens: int, seed: int = 0, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, Pages]:
    keys = keys_like(rows, HEADS, tokens, WIDTH, seed=seed)
    values = centred(keys)
    return keys, values, codec.pack(flat(keys), flat(values), torch.full((rows, HEADS), tokens))


def test_both_parts_bring_what_is_stored_nearer() -> None:
    errors = []
    for options in ({}, {"rank": 0}, {"sparsity": 0}, {"rank": 0, "sparsity": 0}):
        keys, values, pages = packed(GEAR(page=64, bits=2, **options), 128)
        errors.append([error(ours, flat(x)) for ours, x in zip(pages.decoded(), (keys, values), strict=True)])
    both, sparse, low, neither = errors
    for side in range(2):
        assert both[side] < min(sparse[side], low[side]) and max(sparse[side], low[side]) < neither[side]


def test_outliers_come_back_as_they_were() -> None:
    """Of every channel of keys in a page, and of every token of values, the smallest and the largest."""
    keys, values, pages = packed(GEAR(page=32, bits=2, rank=0, sparsity=0.25), 64)
    ours_k, ours_v = (x.view(keys.shape) for x in pages.decoded())
    by_page, theirs = keys.unflatten(2, (2, 32)), ours_k.unflatten(2, (2, 32))
    for dim, x, ours, off in ((3, by_page, theirs, ours_k - keys), (3, values, ours_v, ours_v - values)):
        order = x.argsort(dim=dim)
        for ends in (order.narrow(dim, 0, 4), order.narrow(dim, 28, 4)):
            torch.testing.assert_close(ours.gather(dim, ends), x.gather(dim, ends), rtol=1e-5, atol=1e-5)
        assert (off.abs() > 1e-3).float().mean() > 0.5


def test_outliers_of_all_heads_in_the_authors_variant() -> None:
    """Heads compete: one whose values are all small has none."""
    values = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(0))
    values[:, 0] *= 0.01
    codec = GEAR(page=16, bits=2, rank=0, sparsity=0.1)
    for made, small in ((codec.by("official"), False), (codec, True)):
        pages = made.pack(flat(values), flat(values), torch.full((1, 2), 16))
        rest = pages.values[0].rest
        assert rest is not None and rest.value is not None
        assert bool(rest.value[0].any()) is small and bool(rest.value[1].any())
    # int(64 * 0.1 / 2) of each end
    official = codec.by("official").pack(flat(values), flat(values), torch.full((1, 2), 16)).values[0].rest
    assert official is not None and official.value is not None
    assert (official.value[1].view(16, -1) != 0).sum(-1).tolist() == [6] * 16


def test_extremes_leave_out_what_is_not_there() -> None:
    lines = torch.tensor([[3.0, 9.0, 1.0, 1.0, 5.0]])
    apart, mean = extremes(lines, torch.tensor([[True, False, True, True, True]]), 1)
    # of two equal numbers the lower place
    assert apart.tolist() == [[False, False, True, False, True]] and mean.item() == 2.5


def test_a_power_iteration_finds_the_best_product() -> None:
    rng = torch.Generator().manual_seed(0)
    strong = torch.randn(5, 48, 3, generator=rng) @ torch.randn(5, 3, 32, generator=rng)
    x = strong + 0.01 * torch.randn(5, 48, 32, generator=rng)
    left, right = low_rank(x, first_directions(32, 3), 3)
    u, s, v = torch.linalg.svd(x)
    best = (u[:, :, :3] * s[:, None, :3]) @ v[:, :3]
    torch.testing.assert_close(left @ right, best, rtol=1e-3, atol=1e-3)
    # no more columns than there are numbers, and nothing of nothing
    left, right = low_rank(torch.zeros(1, 16, 2), first_directions(2, 2), 3)
    assert not (left @ right).any()


def test_pages_are_joined_chosen_and_cut_with_their_remainder() -> None:
    _, _, first = packed(WHOLE, 64)
    _, _, more = packed(WHOLE, 32, seed=5)
    both = first.appended(more)
    swapped, cut = both.selected(torch.tensor([1, 0, 1])), both.cropped(torch.full((2, HEADS), 40))
    for side in range(2):
        a, b, whole, picked, begun = (
            pages.decoded()[side].view(-1, HEADS, tokens, WIDTH)
            for pages, tokens in ((first, 64), (more, 32), (both, 96), (swapped, 96), (cut, 40))
        )
        assert torch.equal(whole, torch.cat([a, b], dim=2))
        assert torch.equal(picked, whole[[1, 0, 1]]) and torch.equal(begun, whole[:, :, :40])


def test_a_page_is_freed_as_a_whole() -> None:
    """Its tokens share a product."""
    _, _, pages = packed(WHOLE, 96)
    assert pages.unit == 32 and not pages.pooled
    live = torch.ones(2 * HEADS, 96, dtype=torch.bool)
    live[:, :40] = False
    made = pages.compacted(live)
    assert made is not None
    fewer, was = made
    assert fewer.lengths().tolist() == [[64] * HEADS] * 2 and torch.equal(was[0], torch.arange(32, 96))
    for ours, theirs in zip(fewer.decoded(), pages.decoded(), strict=True):
        assert torch.equal(ours.view(2, HEADS, 64, WIDTH), theirs.view(2, HEADS, 96, WIDTH)[:, :, 32:])


def test_the_definition_reads_it() -> None:
    keys, values, pages = packed(WHOLE, 64)
    query = torch.randn(2, 2 * HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    none = query.new_empty(2, HEADS, 0, WIDTH)
    out, _ = decode_attention(query, none, none, pages=pages)
    k, v = (x.view(keys.shape).repeat_interleave(2, dim=1) for x in pages.decoded())
    want = torch.nn.functional.scaled_dot_product_attention(query, k, v)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_pages_travel_through_an_operator() -> None:
    """As their tensors, and a line of text."""
    _, _, pages = packed(WHOLE, 64)
    query = torch.randn(2, 2 * HEADS, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    none = query.new_empty(2, HEADS, 0, WIDTH)
    ours = traced(query, none, none, 0.2, None, pages, None, None)
    assert torch.equal(ours[0], decode_attention(query, none, none, scaling=0.2, pages=pages)[0])
    bare = replace(pages, keys=(replace(pages.keys[0], rest=None),))
    assert not torch.equal(ours[0], decode_attention(query, none, none, scaling=0.2, pages=bare)[0])


@pytest.mark.kernel
@pytest.mark.parametrize("codec", [WHOLE, WHOLE.by("official")], ids=["ours", "official"])
def test_the_kernel_reads_it(codec: GEAR) -> None:
    _, _, pages = packed(codec, 64)
    rng = torch.Generator().manual_seed(1)
    query, tail = torch.randn(2, 2 * HEADS, 1, WIDTH, generator=rng), torch.randn(2, HEADS, 3, WIDTH, generator=rng)
    ours, theirs = (read(query, tail, tail, 0.2, None, pages) for read in (decode_attention_kernel, definition))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    # as they are stored they are read: a copy would be a launch at every step
    assert all(x.is_contiguous() for x in pages.tensors())


def test_a_kernel_takes_few_numbers_beside_codes() -> None:
    """Each is written out in it; more of them, as `rank=32`, are read by the definition."""
    query = torch.zeros(1, HEADS, 1, WIDTH)
    assert [
        readable(packed(GEAR(page=64, **options), 64)[2], query, WIDTH)
        for options in ({}, {"rank": MAX_RANK + 1}, {"sparsity": 0.9})
    ] == [True, False, False]
