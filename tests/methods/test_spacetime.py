"""Picks in space and time: against one greedy loop over the whole clip, and what they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import UNITS, batch_of, check_rows_alone
from torch.nn.functional import cosine_similarity, normalize

from mmaccel import MmaccelError, SpaceTime, get_method
from mmaccel.merging.spacetime import lifted
from mmaccel.method import TokenBatch


def film(frames):
    """A clip ``[T, h, w, D]`` as one unit."""
    time, height, width, channels = frames.shape
    cells = torch.cartesian_prod(*(torch.arange(size) for size in (time, height, width)))[None]
    return TokenBatch(
        frames.reshape(1, -1, channels),
        torch.ones(1, time * height * width, dtype=torch.bool),
        cells,
        torch.tensor([[time, height, width]]),
        torch.zeros(1, time * height * width, dtype=torch.long),
    )


def one_by_one(frames, count, change):
    """The same picks from all tokens at once."""
    x, places = frames.flatten(0, 2).double(), frames.shape[1] * frames.shape[2]
    size, radius = len(x), 2 * x.norm(dim=1).max()
    x = torch.cat([x, (radius**2 - (x * x).sum(1, keepdim=True)).sqrt()], 1)

    def apart(i, j):
        return max(0.0, 1.0 - float(cosine_similarity(x[i], x[j], dim=0)))

    def nearest(i):
        return min((apart(i, j) for j in range(size) if j != i and j // places == i // places), default=9.0)

    picked = []
    for _ in range(count):
        worth = []
        for i in range(size):
            beside = [apart(i, j) for j in (i - places, i + places) if 0 <= j < size]
            limit = float("inf") if i < places else change * max(beside)
            found = min([limit, *(apart(i, j) for j in picked if j // places == i // places)])
            tie = nearest(i) if found == float("inf") else 0.0
            worth.append((-1.0, 0.0) if i in picked else (found, tie))
        picked.append(max(range(size), key=lambda i: (*worth[i], -i)))
    return sorted(picked)


@pytest.mark.parametrize("count", [1, 5, 17, 48])
@pytest.mark.parametrize("change", [0.5, 4.0])
def test_picks_are_those_of_one_greedy_loop(count, change):
    rng = torch.Generator().manual_seed(count)
    frames = torch.randn(1, 3, 4, 6, generator=rng).repeat(4, 1, 1, 1)
    frames[2:, 1, 1:3] = torch.randn(2, 6, generator=rng)
    frames += 0.05 * torch.randn(frames.shape, generator=rng)
    kept = SpaceTime(change=change).reduce(film(frames), torch.tensor([count])).kept[0]
    assert kept.nonzero()[:, 0].tolist() == one_by_one(frames, count, change)


def test_both_sides_of_a_change_stay_and_what_stands_still_is_kept_once():
    rng = torch.Generator().manual_seed(0)
    frames = torch.randn(1, 4, 4, 8, generator=rng).repeat(5, 1, 1, 1)
    frames[3, 2, 1] = torch.randn(8, generator=rng)
    kept = SpaceTime().reduce(film(frames), torch.tensor([19])).kept.view(5, 4, 4)
    assert kept[0].all() and kept[2:, 2, 1].all() and kept.sum() == 19


def test_distances_are_nearly_the_squared_euclidean_ones():
    x = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(1))
    far = 1.0 - lifted(x, torch.ones(1, 30, dtype=torch.bool)) @ lifted(x, torch.ones(1, 30, dtype=torch.bool)).mT
    ratio = (8 * far * x.norm(dim=-1).max() ** 2 / torch.cdist(x, x) ** 2)[0][~torch.eye(30, dtype=torch.bool)]
    assert 0.999 < ratio.min() and ratio.max() < 1.1


def test_pictures_of_tokens_of_one_length_are_reduced_as_by_divprune_and_clips_of_a_batch_are_not():
    tokens = batch_of()
    tokens = replace(tokens, features=normalize(tokens.features, dim=-1))
    count = (tokens.valid.sum(1) + 2) // 3
    kept, diverse = (get_method(name)().reduce(tokens, count).kept for name in ("spacetime", "divprune"))
    assert 0 < sum(tokens.clips) < len(UNITS) and torch.equal(kept.sum(1), count)
    for row, clip in enumerate(tokens.clips):
        assert torch.equal(kept[row], diverse[row]) != clip


def test_a_picture_does_not_change_with_what_is_beside_it():
    tokens = batch_of()
    check_rows_alone(SpaceTime(), tokens, (tokens.valid.sum(1) + 2) // 3)


@pytest.mark.parametrize("change", [0.0, -1.0, float("nan")])
def test_a_change_that_counts_nothing_is_refused(change):
    with pytest.raises(MmaccelError, match="`change` of spacetime must be greater than 0"):
        SpaceTime(change=change)
