"""The best units: the definition against a sort by hand, the kernel against the definition."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.best import best_units, best_units_cost, best_units_definition, best_units_kernel

#: rows, heads, units, whether some are gone, whether there is a bar
SHAPES = [(1, 1, 1, False, False), (2, 3, 70, True, False), (2, 1, 5000, True, True), (1, 2, 2048, False, False)]


def drawn(rows, heads, units, gone, least, device="cpu"):
    """Ratings of which many are equal, of both signs and zeros, and counts that differ by row and head."""
    rng = torch.Generator().manual_seed(units)
    ratings = torch.randn(rows, heads, units, generator=rng)
    ratings[..., ::3] = ratings[..., :1].clone()
    ratings[..., 1::5], ratings[..., 2::7] = -0.0, 0.0
    hidden = torch.rand(rows, 1, units, generator=rng) < 0.3 if gone else None
    there = torch.full((rows, 1), units) if hidden is None else (~hidden).sum(-1)
    count = (torch.rand(rows, heads, generator=rng) * (there + 1)).int()
    bar = torch.tensor([0.5, -1.0])[:rows] if least else None
    return [
        x if x is None or isinstance(x, int) else x.to(device) for x in (ratings, count, int(count.max()), hidden, bar)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_best_are_listed_and_of_equal_ones_the_first(shape):
    ratings, count, most, gone, least = drawn(*shape)
    picked, counts = best_units(ratings, count, most, gone=gone, least=least)
    assert picked.dtype == counts.dtype == torch.int32 and picked.shape == (*shape[:2], most)
    for b in range(shape[0]):
        for h in range(shape[1]):
            of = ratings[b, h].tolist()
            there = [p for p in range(shape[2]) if gone is None or not gone[b, 0, p]]
            wanted = sorted(there, key=lambda p, of=of: -of[p])[: int(count[b, h])]
            wanted = sorted(p for p in wanted if least is None or of[p] >= float(least[b]))
            assert picked[b, h].tolist() == wanted + [shape[2]] * (most - len(wanted)) and counts[b, h] == len(wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_best_units(shape, device):
    ratings, count, most, *others = drawn(*shape, device=device)
    given = (ratings, count, most, 1, *others)
    for got, want in zip(best_units_kernel(*given), best_units_definition(*given), strict=True):
        assert torch.equal(got, want)


def test_one_count_and_one_mask_for_all_heads(device):
    ratings, count, _, gone, _ = drawn(2, 3, 70, True, False, device)
    given = (ratings, count[:, :1], int(count[:, 0].max()), 1, gone.expand(-1, 3, -1), None)
    for got, want in zip(best_units_kernel(*given), best_units_definition(*given), strict=True):
        assert torch.equal(got, want)
    # ratings far apart, and those that are not finite
    ratings[..., :4] = torch.tensor([torch.inf, -torch.inf, 1e-40, -3e38], device=ratings.device)
    for got, want in zip(best_units_kernel(*given), best_units_definition(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("each", (3, 8))
def test_a_unit_is_as_good_as_its_best_part(each, device):
    ratings, _, _, gone, _ = drawn(2, 3, 24 * each, True, False, device)
    gone[..., : 2 * each] = True
    ratings[gone.expand_as(ratings)] = torch.inf
    there = (~gone).unflatten(-1, (-1, each)).any(-1).sum(-1)
    count = torch.minimum(there, torch.tensor([[5], [24]], device=device)).int()
    picked, counts = best_units_kernel(ratings, count, 24, each, gone)
    whole = ratings.masked_fill(gone, -torch.inf).unflatten(-1, (-1, each)).amax(-1)
    for got in (picked, best_units_definition(ratings, count, 24, each, gone)[0]):
        assert torch.equal(got, best_units_definition(whole, count, 24, 1, whole == -torch.inf)[0])
    assert (counts == count).all() and int(picked.min()) >= 2


def test_what_does_not_fit():
    ratings, count, most, gone, least = drawn(2, 3, 70, True, True)
    for bad, said in (
        ((ratings[0], count), "best_units takes ratings"),
        ((ratings.int(), count), "floating point"),
        ((ratings, count.long()), "count must be"),
        ((ratings, count[:1]), "count must be"),
    ):
        with pytest.raises(ValueError, match=said):
            best_units(*bad, most)
    with pytest.raises(ValueError, match="gone must be bool"):
        best_units(ratings, count, most, gone=gone[..., :5])
    with pytest.raises(ValueError, match="least must be"):
        best_units(ratings, count, most, least=least[:1])
    with pytest.raises(ValueError, match="70 parts, which are not whole units of 4"):
        best_units(ratings, count, most, each=4)
    assert best_units(ratings[..., :0], count * 0, 0)[0].shape == (2, 3, 0)
    assert best_units_cost(1, 2, 100, 10, 4) == (2 * (400 + 40 + 8), 0)
