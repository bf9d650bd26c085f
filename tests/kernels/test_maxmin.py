"""Max-min and determinantal selection: definitions against dense algebra, kernels against definitions."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.dpp import greedy_dpp, greedy_dpp_cost, greedy_dpp_definition, greedy_dpp_kernel
from mmaccel_kernels.maxmin import max_min, max_min_cost, max_min_definition, max_min_kernel, naive
from mmaccel_kernels.maxmin import triton as kernel
from torch.nn.functional import normalize
from traffic import counted

NOISE = 1e-5
#: rows, slots and channels: all distances are made where there are at least as many channels as slots
SHAPES = [(1, 1, 1), (2, 70, 33), (3, 33, 130), (2, 40, 64), (1, 129, 16)]


def units(n, slots, width, device="cpu"):
    """Unit vectors, their quality, valid slots, and how many to pick of each row. Vectors of 16 channels have many copies and
    ties, whose products are exact in any order; the others are all different."""
    rng = torch.Generator().manual_seed(slots)
    x = torch.randn(n, slots, width, generator=rng)
    if width == 16:
        x = x.sign()
        x[:, slots - slots // 2 :] = x[:, : slots // 2]
    valid = torch.arange(slots) < torch.tensor([slots, max(1, slots // 2), max(1, slots - 3)])[:n, None]
    count = torch.minimum(torch.tensor([slots // 3 + 1, slots // 2, 5])[:n], valid.sum(1))
    quality = torch.rand(n, slots, generator=rng)
    x = normalize(x.masked_fill(~valid[..., None], 0.0), dim=-1)
    return tuple(t.to(device) for t in (x, quality, valid, count))


def slots_of(mask):
    return mask.nonzero()[:, 0].tolist()


def dense_max_min(x, valid, count, limit):
    """One row, from the whole matrix of distances: what each slot was picked by, minus infinity for what was not."""
    there = valid.nonzero()[:, 0]
    away = 1.0 - x[there].double() @ x[there].double().T
    away[away < NOISE] = 0.0
    first, most = (away + torch.eye(len(there)) * 9).amin(1), limit[there].double()
    free = most.isinf()
    pick = int((first.masked_fill(~free, -1.0) if free.any() else most).argmax())
    made = torch.full(valid.shape, -torch.inf)
    for _ in range(count):
        made[there[pick]] = most[pick]
        most = torch.minimum(most, away[pick])
        most[pick] = -torch.inf
        pick = int(most.argmax())
    return made


def limits(n, slots, kind, device="cpu"):
    """No token has a limit, all have one, or some."""
    limit = 2 * torch.rand(n, slots, generator=torch.Generator().manual_seed(slots + 1))
    free = {"none": slots, "all": 0, "some": slots // 2}[kind]
    return limit.masked_fill(torch.arange(slots) < free, torch.inf).to(device)


def dense_dpp(x, quality, valid, count):
    """One row, by the determinants of all sets that one more token makes."""
    there = valid.nonzero()[:, 0]
    x, q = x[there].double(), quality[there].double()
    kernel, picks = q[:, None] * (x @ x.T) * q, []
    for _ in range(count):
        gains = []
        for j in range(len(there)):
            inner = kernel[picks][:, picks]
            gain = kernel[j, j] - kernel[j, picks] @ torch.linalg.pinv(inner, hermitian=True) @ kernel[picks, j]
            gain = float(gain) if gain > NOISE * kernel[j, j] else -1.0 / (1.0 + float(q[j]))
            gains.append(-torch.inf if j in picks else gain)
        picks.append(max(range(len(there)), key=gains.__getitem__))
    return sorted(there[picks].tolist())


@pytest.mark.parametrize("kind", ["none", "all", "some"])
@pytest.mark.parametrize("kept", [0, naive.KEPT])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_max_min_is_what_all_distances_say(shape, kept, kind, monkeypatch):
    x, _, valid, count = units(*shape)
    limit = limits(*valid.shape, kind)
    monkeypatch.setattr(naive, "CACHED", 500)
    monkeypatch.setattr(naive, "KEPT", kept)
    far = max_min(x, valid, count, NOISE, limit=limit)
    for row in range(len(x)):
        torch.testing.assert_close(far[row], dense_max_min(x[row], valid[row], int(count[row]), limit[row]))
    if kind == "none":
        assert torch.equal(far, max_min(x, valid, count, NOISE))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 30, 9), (3, 24, 40)], ids=str)
def test_greedy_dpp_is_what_the_determinants_say(shape):
    x, quality, valid, count = units(*shape)
    kept = greedy_dpp(x, quality, valid, count, NOISE)
    for row in range(len(x)):
        assert slots_of(kept[row]) == dense_dpp(x[row], quality[row], valid[row], int(count[row]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("one_program", [0, kernel.ONE_PROGRAM])
@pytest.mark.parametrize("kind", ["none", "some"])
def test_the_kernel_of_max_min(shape, kind, one_program, device, monkeypatch):
    monkeypatch.setattr(kernel, "ONE_PROGRAM", one_program)
    x, _, valid, count = units(*shape, device)
    limit = limits(*valid.shape, kind, device)
    want = max_min_definition(x, valid, count, NOISE, None, limit)
    # more turns than any row needs, all rows at once, and one after the other
    for most, held in ((None, kernel.HELD), (int(count.max()) + 2, 1)):
        monkeypatch.setattr(kernel, "HELD", held)
        torch.testing.assert_close(max_min_kernel(x, valid, count, NOISE, most, limit), want)
    assert torch.equal((want > -torch.inf).sum(1), count)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_greedy_dpp(shape, device):
    x, quality, valid, count = units(*shape, device)
    want = greedy_dpp_definition(x, quality, valid, count, NOISE, None)
    assert torch.equal(greedy_dpp_kernel(x, quality, valid, count, NOISE, None), want)
    assert torch.equal(greedy_dpp_kernel(x, quality, valid, count, NOISE, int(count.max()) + 2), want)
    assert torch.equal(want.sum(1), count)


def test_ties_go_to_the_lower_slot_and_nothing_is_picked_twice(device):
    x = normalize(torch.ones(1, 9, 16), dim=-1).to(device)
    valid, count = torch.ones(1, 9, dtype=torch.bool, device=device), torch.tensor([4], device=device)
    quality = torch.ones(1, 9, device=device)
    for run in (max_min_definition, max_min_kernel):
        far = run(x, valid, count, NOISE, None, torch.full_like(quality, torch.inf))
        assert far[0, :4].tolist() == [torch.inf, 0, 0, 0] and (far[0, 4:] == -torch.inf).all()
    for run in (greedy_dpp_definition, greedy_dpp_kernel):
        assert slots_of(run(x, quality, valid, count, NOISE, None)[0]) == [0, 1, 2, 3]


@pytest.mark.parametrize("one_program", [0, kernel.ONE_PROGRAM])
@pytest.mark.parametrize("width", [2, 4])
def test_distances_below_the_noise_are_ties(width, one_program, device, monkeypatch):
    monkeypatch.setattr(kernel, "ONE_PROGRAM", one_program)
    # the third is farther from the first than the second is, by less than counts
    angle = torch.tensor([0.0, 0.002, 0.004])
    x = torch.nn.functional.pad(torch.stack([angle.cos(), angle.sin()], -1), (0, width - 2))[None].to(device)
    valid, count = torch.ones(1, 3, dtype=torch.bool, device=device), torch.tensor([2], device=device)
    limit = torch.full((1, 3), torch.inf, device=device)
    for run in (max_min_definition, max_min_kernel):
        assert slots_of(run(x, valid, count, NOISE, None, limit)[0] >= 0) == [0, 1]
        assert slots_of(run(x, valid, count, 1e-6, None, limit)[0] >= 0) != [0, 1]


def test_empty_sets():
    for shape, counts in (((2, 0, 4), [0, 0]), ((0, 5, 4), []), ((1, 5, 4), [0])):
        x, valid = torch.zeros(shape), torch.ones(shape[:2], dtype=torch.bool)
        count = torch.tensor(counts, dtype=torch.long)
        assert not (max_min(x, valid, count) >= 0).any() and not greedy_dpp(x, x.sum(2), valid, count).any()


@pytest.mark.kernel
def test_what_a_pick_moves(monkeypatch):
    n, slots, width = 1, 70, 33
    x, quality, valid, count = units(n, slots, width)
    one_program = kernel.ONE_PROGRAM
    monkeypatch.setattr(kernel, "ONE_PROGRAM", 0)
    # each block reads the picked vector, the bests of all blocks before it and its own state
    blocks = -(-slots // kernel.TILE["BLOCK"])
    limit = limits(n, slots, "none")
    turns = int(count.max())

    with counted() as first:
        max_min_kernel(x, valid, count, NOISE, turns, limit)
    with counted() as second:
        max_min_kernel(x, valid, count - 1, NOISE, turns - 1, limit)
    moved, _ = max_min_cost(n, slots, width)
    beside = blocks * 4 * (width + 1 + blocks + 1) + blocks * (4 + 4)
    assert first.launches - second.launches == 1
    assert first.loaded + first.stored - second.loaded - second.stored == moved + beside + 4

    with counted() as first:
        greedy_dpp_kernel(x, quality, valid, count, NOISE, turns)
    with counted() as second:
        greedy_dpp_kernel(x, quality, valid, count - 1, NOISE, turns - 1)
    moved, _ = greedy_dpp_cost(n, slots, width, turns - 1)
    # and the quality and coefficients of the pick
    beside += blocks * 4 * (1 + turns - 1) + 1
    assert first.launches - second.launches == 1
    assert first.loaded + first.stored - second.loaded - second.stored == moved + beside

    # with all distances at hand, a row of distances is all that a pick reads
    monkeypatch.setattr(kernel, "ONE_PROGRAM", one_program)
    for shape in ((2, 40, 64), (2, 70, 33)):
        x, _, valid, count = units(*shape)
        with counted() as traffic:
            max_min_kernel(x, valid, count, NOISE, None, limits(*valid.shape, "none"))
        n, slots, _ = shape
        picks = int(count.sum())
        assert traffic.launches == 1
        assert traffic.loaded == 4 * (slots * picks + 2 * n * slots + n) and traffic.stored == 4 * picks


@pytest.mark.parametrize("name", ["max_min", "greedy_dpp"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x, v, c: (x[0], v, c), r"x \[N, n, D\] float32, not \(5, 4\)"),
        (lambda x, v, c: (x.half(), v, c), "float16"),
        (lambda x, v, c: (x, v[:, :4], c), r"valid \[N, n\] = \(2, 5\) bool, not \(2, 4\)"),
        (lambda x, v, c: (x, v, c[:1]), r"count \[N\] = \(2,\) whole numbers, not \(1,\)"),
        (lambda x, v, c: (x, v, c.float()), "float32"),
    ],
)
def test_wrong_shapes_are_refused_by_name(name, wrong, says):
    x, valid, count = wrong(torch.ones(2, 5, 4), torch.ones(2, 5) > 0, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=f"{name} takes .*{says}"):
        max_min(x, valid, count) if name == "max_min" else greedy_dpp(x, torch.ones(2, 5), valid, count)


def test_a_wrong_limit_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"max_min takes limit \[N, n\] = \(2, 5\) float32, not \(2, 4\) torch.float32"
    ):
        max_min(torch.ones(2, 5, 4), torch.ones(2, 5) > 0, torch.tensor([1, 1]), limit=torch.ones(2, 4))


def test_wrong_quality_is_refused_by_name():
    with pytest.raises(ValueError, match=r"greedy_dpp takes quality \[N, n\] = \(2, 5\) float32, not \(2, 4\)"):
        greedy_dpp(torch.ones(2, 5, 4), torch.ones(2, 4), torch.ones(2, 5) > 0, torch.tensor([1, 1]))
