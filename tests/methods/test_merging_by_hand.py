"""Methods that merge any tokens, one by one, against their definitions: AIM, k-medoids, density peaks, PiToMe."""

from __future__ import annotations

import pytest
import torch
from batches import dense
from clips import clips

from mmaccel import MmaccelError
from mmaccel.core.reduction import Reduction
from mmaccel.encoders import pitome
from mmaccel.encoders.pitome import PiToMe, energy
from mmaccel.merging import centerclip, film
from mmaccel.merging.aim import AimMerge, halvings, merge_in_rounds
from mmaccel.merging.centerclip import k_medoids
from mmaccel.method import EncoderTokens, blocks, density_peaks


def test_aim_halves_and_names_its_weights() -> None:
    assert halvings(196, 49) == [98, 49] and halvings(81, 21) == [40, 20] and halvings(5, 1) == [2, 1, 1]
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0))
    target, weight = merge_in_rounds(x, [4, 2])
    made = Reduction.merge(target, torch.ones(2, 9, dtype=torch.bool), weight)
    assert made.kept.sum(1).tolist() == [3, 3]
    torch.testing.assert_close(torch.zeros(2, 9).scatter_add(1, target, weight), made.kept.float())
    # copies pair off with each other
    x = torch.eye(4)[[0, 0, 1, 1, 2, 2, 3, 3]][None]
    target, _ = merge_in_rounds(x, [4])
    assert target.tolist() == [[1, 1, 3, 3, 5, 5, 7, 7]]


def test_aim_pairs_in_the_order_of_the_program() -> None:
    x = torch.randn(1, 27, 6, generator=torch.Generator().manual_seed(3))
    # every token is a feature and the weights of what went into it
    tokens = [(row, {i: 1.0}) for i, row in enumerate(x[0])]
    for remove in (13, 6, 2):
        a, b = tokens[0::2], tokens[1::2]
        cosine = torch.stack([torch.stack([torch.cosine_similarity(p, q, dim=0) for q, _ in b]) for p, _ in a])
        best, partner = cosine.max(1)
        ranked = best.argsort(descending=True).tolist()
        into = [[q] for q in b]
        for i in ranked[:remove]:
            into[int(partner[i])].append(a[i])
        merged = []
        for parts in into:
            weights = {i: w / len(parts) for _, some in parts for i, w in some.items()}
            merged.append((torch.stack([row for row, _ in parts]).mean(0), weights))
        tokens = [a[i] for i in ranked[remove:]] + merged
    target, weight = merge_in_rounds(x, [13, 6, 2])
    ours = {}
    for i, (slot, much) in enumerate(zip(target[0].tolist(), weight[0].tolist(), strict=True)):
        ours.setdefault(slot, {})[i] = much
    theirs = [weights for _, weights in tokens]
    assert len(ours) == len(theirs) == 6
    for mine in ours.values():
        twin = next(weights for weights in theirs if weights.keys() == mine.keys())
        assert mine == pytest.approx(twin)


def test_aim_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, count = clips(), torch.tensor([40, 9, 20, 7, 1, 5, 11])
    whole = AimMerge().reduce(tokens, count)
    monkeypatch.setattr(film, "BLOCK", 20)
    assert torch.equal(dense(AimMerge().reduce(tokens, count)), dense(whole))


def test_k_medoids_is_a_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 40, 5, generator=torch.Generator().manual_seed(0))
    away = centerclip.distances(x, "euclidean")
    medoids, cluster = k_medoids(x, away, 6)
    assert (medoids.diff() > 0).all()
    for row in range(3):
        assert torch.equal(cluster[row], away[row][:, medoids[row]].argmin(1))
        for number, medoid in enumerate(medoids[row].tolist()):
            mine = (cluster[row] == number).nonzero()[:, 0]
            assert mine[away[row][mine][:, mine].sum(1).argmin()] == medoid
    # parts beyond the largest are cut in stretches of equal length
    monkeypatch.setattr(centerclip, "MOST", 5)
    part = centerclip.cut(torch.tensor([[0, 0, -1, 1, 1, 1, 1, 1, 1, 1, 2, -1]]))
    assert part.tolist() == [[0, 0, -1, 1, 1, 1, 1, 2, 2, 2, 3, -1]]


def test_cosines_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 5, generator=rng)
    slots = torch.randint(-1, 37, (2, 37), generator=rng)
    whole = blocks.cosine_to(x, slots)
    own = torch.where(slots < 0, torch.arange(37), slots)
    other = torch.stack([row[at] for row, at in zip(x, own, strict=True)])
    torch.testing.assert_close(whole, torch.nn.functional.cosine_similarity(x, other, dim=-1))
    # four tokens of both rows at a time
    monkeypatch.setattr(blocks, "CACHED", 40)
    assert torch.equal(blocks.cosine_to(x, slots), whole)


def test_density_peaks_match_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(30) < torch.tensor([[30], [17]])
    score = density_peaks.density_peaks(x, valid, 5)
    for row, size in enumerate((30, 17)):
        away = torch.cdist(x[row, :size].double(), x[row, :size].double()) / 8**0.5
        rho = (-away.sort(1).values[:, :5].square().mean(1)).exp()
        delta = away.masked_fill(rho[None] <= rho[:, None], torch.inf).amin(1).clamp(max=float(away.max()))
        torch.testing.assert_close(score[row, :size].double(), rho * delta, rtol=1e-4, atol=1e-5)
        assert (score[row, size:] == -torch.inf).all()
    monkeypatch.setattr(density_peaks, "BLOCK", 200)
    torch.testing.assert_close(density_peaks.density_peaks(x, valid, 5), score, rtol=1e-5, atol=1e-6)
    # of copies one is a centre, unless the formula is taken by the word
    copies, one = torch.eye(3)[[0, 0, 0, 1, 1, 1, 2]][None], torch.ones(1, 7, dtype=torch.bool)
    assert density_peaks.centres(density_peaks.density_peaks(copies, one, 2), 3).tolist() == [[0, 3, 6]]
    strict = density_peaks.density_peaks(copies, one, 2, strict=True)
    assert density_peaks.centres(strict, 3).tolist() == [[0, 1, 2]]


def test_pitome_protects_what_is_alone() -> None:
    metric = torch.randn(2, 41, 8, generator=torch.Generator().manual_seed(0))
    metric[:, 1:20] = metric[:, 1:2] + 0.1 * metric[:, 1:20]
    place = torch.arange(41)
    tokens, alone = (EncoderTokens(x, torch.ones(x.shape[:2]), 1) for x in (metric, metric[:1]))
    for method in (PiToMe(0.5), PiToMe(0.5, "bsm"), PiToMe(0.5, "text")):
        for remove in (0, 7, 99):
            target = method.match(tokens, remove)
            assert ((target != place).sum(1) == min(remove, 20)).all() and (target[:, 0] == 0).all()
            assert torch.equal(target.gather(1, target), target)
            assert torch.equal(method.match(alone, remove)[0], target[0])
    # nine merges take eighteen candidates, all of the crowd
    gone = PiToMe(0.5).match(tokens, 9) != place
    assert gone[:, 1:20].sum(1).tolist() == [9, 9]
    assert (energy(metric, 0.5)[:, 1:20].amin(1) > energy(metric, 0.5)[:, 20:].amax(1)).all()


def test_pitome_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = torch.randn(2, 41, 8, generator=torch.Generator().manual_seed(0))
    whole = PiToMe().match(EncoderTokens(metric, torch.ones(2, 41), 1), 9)
    monkeypatch.setattr(pitome, "BLOCK", 100)
    assert torch.equal(PiToMe().match(EncoderTokens(metric, torch.ones(2, 41), 1), 9), whole)


def test_pitome_schedule_is_exact_and_halves_at_most() -> None:
    for tokens in (1, 7, 64, 576, 577):
        for layers in (1, 2, 5, 23):
            for kept in {1, tokens // 16, tokens // 4, tokens // 2, tokens - 1, tokens} - {0}:
                if tokens > kept * 2**layers:
                    with pytest.raises(MmaccelError, match="larger budget"):
                        PiToMe().schedule(tokens, layers, kept)
                    continue
                removed, left = PiToMe().schedule(tokens, layers, kept), tokens
                assert len(removed) == layers and sum(removed) == tokens - kept
                for r in removed:
                    assert 0 <= r <= left // 2
                    left -= r
    # the same share everywhere: 17 or 18 of 576 at first, 8 or 9 of 297 at the end
    removed = PiToMe().schedule(576, 23, 288)
    assert removed[0] in (17, 18) and removed[-1] in (8, 9)
    assert all(after <= before + 1 for before, after in zip(removed, removed[1:], strict=False))
