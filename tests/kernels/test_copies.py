"""Copies are found exactly, and what picks or pairs vectors treats them as one, kernel and definition alike."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels import copies
from mmaccel_kernels.copies import first_copies, pairs_of_first
from mmaccel_kernels.dpp import greedy_dpp_definition, greedy_dpp_kernel
from mmaccel_kernels.matching import best_match, most_alike
from mmaccel_kernels.maxmin import max_min_definition, max_min_kernel
from mmaccel_kernels.maxmin import triton as kernel
from noise import noisy
from torch.nn.functional import normalize


def few(n, slots, width, kinds, seed=0):
    """Unit vectors of few kinds."""
    rng = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, kinds, width, generator=rng), dim=-1)
    return x[torch.arange(n)[:, None], torch.randint(kinds, (n, slots), generator=rng)]


def slowly(x, among):
    same = (x[:, :, None] == x[:, None]).all(-1) & among[:, None] & among[..., None]
    own = torch.arange(x.shape[1]).expand(x.shape[:2])
    return torch.where(same.any(2), same.byte().argmax(2), own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 100, 1 << 18])
def test_the_first_copy_of_each(block, dtype, monkeypatch):
    monkeypatch.setattr(copies, "CACHED", block)
    x = few(3, 40, 5, 7).to(dtype)
    x[0, :, 2], x[0, ::2, 2], x[1, 4:9] = 0.0, -0.0, torch.nan
    x[2, :, 1:] = torch.where(torch.rand(40, 4, generator=torch.Generator().manual_seed(1)) < 0.5, 1.0, -1.0).to(dtype)
    among = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    assert torch.equal(first_copies(x), slowly(x, torch.ones_like(among)))
    assert torch.equal(first_copies(x, among), slowly(x, among))


def test_none_without_a_copy():
    x = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0))
    assert first_copies(x) is None and first_copies(x[:, :0]) is None
    assert first_copies(torch.cat([x, x], 1), torch.arange(60).expand(2, -1) < 30) is None


def test_a_hash_that_collides_joins_no_others(monkeypatch):
    x = few(2, 30, 4, 6)
    want = slowly(x, torch.ones(2, 30, dtype=torch.bool))
    assert len(want.unique()) < 12
    # all vectors have one code: the first of all is no copy of most, and none is joined wrongly
    monkeypatch.setattr(copies, "_STEP", 0)
    found = first_copies(x)
    assert torch.equal(found, torch.where(want == 0, 0, torch.arange(30).expand(2, -1)))


def test_pairs_of_copies():
    x = few(2, 20, 8, 5)
    with noisy(0):
        pairs = pairs_of_first(torch.bmm(x, x.mT), first_copies(x), 1.0)
    same = first_copies(x)[:, :, None] == first_copies(x)[:, None]
    assert (pairs[same] == 1.0).all() and (pairs[~same] < 1.0).all()
    assert all(len(pairs[row].unique(dim=0)) == 5 for row in range(2))


@pytest.mark.parametrize("one_program", [0, 4096])
@pytest.mark.parametrize("width", [8, 40])
def test_picks_are_the_first_of_each_kind(width, one_program, device, monkeypatch):
    """As many as there are kinds, then the lowest slots; whether a kernel or the definition picks, and however it rounds."""
    monkeypatch.setattr(kernel, "ONE_PROGRAM", one_program)
    kinds = 6
    x = few(2, 30, width, kinds).to(device)
    valid, quality = torch.ones(2, 30, dtype=torch.bool, device=device), torch.ones(2, 30, device=device)
    found = first_copies(x)
    heads = [sorted(set(row.tolist())) for row in found]
    for more in (0, 4):
        count = torch.tensor([kinds + more] * 2, device=device)
        limit = torch.full((2, 30), torch.inf, device=device)
        want = [set(head + [slot for slot in range(30) if slot not in head][:more]) for head in heads]
        for seed in range(3):
            with noisy(seed):
                picked = [
                    max_min_definition(x, valid, count, 0.0, None, limit) >= 0,
                    greedy_dpp_definition(x, quality, valid, count, 1e-5, None),
                ]
                if seed == 0:
                    picked.append(max_min_kernel(x, valid, count, 0.0, None, limit) >= 0)
                    picked.append(greedy_dpp_kernel(x, quality, valid, count, 1e-5, None))
            for made in picked:
                assert [set(row.nonzero()[:, 0].tolist()) for row in made] == want


def test_copies_are_matched_with_the_first(device):
    x = few(2, 40, 16, 9).to(device)
    first = first_copies(x)
    a, b = torch.arange(40, device=device).expand(2, -1).split(20, 1)
    there = torch.rand(2, 20, generator=torch.Generator().manual_seed(3)).to(device) < 0.6
    clean = most_alike(x, a, b, there, first=first)
    twin = (x[:, :20, None] == x[:, None, 20:]).all(-1) & there[:, None]
    assert torch.equal(clean[0] == 1.0, twin.any(2))
    assert torch.equal(clean[1][twin.any(2)], twin.byte().argmax(2)[twin.any(2)])
    for seed in range(4):
        with noisy(seed):
            cosine, place = most_alike(x, a, b, there, first=first)
            score, at = best_match(x[:, :20], x[:, 20:], there)
        assert torch.equal(place, clean[1]) and torch.equal(at, clean[1]) and (cosine <= 1.0).all()
        assert torch.equal(cosine == 1.0, twin.any(2))
        # copies have one score
        for row in range(2):
            kinds = first[row, :20].tolist()
            assert len(set(zip(kinds, score[row].tolist(), strict=True))) == len(set(kinds))
