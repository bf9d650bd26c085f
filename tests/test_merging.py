"""What the merging and temporal methods promise, alone and in tiny models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from test_methods import batch_of, check_rows_alone, dense, row_of
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, accelerated
from mmaccel.core.masks import even_in_groups, top_in_groups
from mmaccel.core.reduction import Reduction
from mmaccel.encoders import pitome
from mmaccel.encoders.pitome import PiToMe, energy, energy_bipartite_matching, energy_matching, text_matching
from mmaccel.merging import centerclip, density_peaks, film
from mmaccel.merging.aim import AimMerge, halvings, merge_in_rounds
from mmaccel.merging.centerclip import CenterClip, k_medoids
from mmaccel.merging.dycoke import DyCoke, references
from mmaccel.merging.evs import Evs
from mmaccel.merging.fastvid import FastVID
from mmaccel.merging.film import Film, frame_numbers
from mmaccel.merging.holitom import HoliTomMerge
from mmaccel.merging.moviechat import MovieChat, consolidate
from mmaccel.merging.mustdrop import MustDropMerge, window_similarity, windows
from mmaccel.merging.prunevid import PruneVidMerge, scenes_of
from mmaccel.merging.segments import changing_segments, static_segments
from mmaccel.method import EncoderTokens, TokenBatch, TokenMethod

torch.set_num_threads(1)

METHODS: list[TokenMethod] = [
    AimMerge(),
    CenterClip(),
    CenterClip(frames=3, distance="cosine", aggregate="mean"),
    Evs(),
    DyCoke(),
    DyCoke(official_tail=True),
    FastVID(),
    FastVID(segments=3, tau=-1.0, merged=0.8, stride=2, query="all"),
    HoliTomMerge(),
    HoliTomMerge(tau=0.2, contextual=0.5, beta=None),
    HoliTomMerge(strict=True),
    MovieChat(),
    MovieChat(similarity="official_dot"),
    MustDropMerge(threshold=2.0, window=2),
    PruneVidMerge(small=0),
    PruneVidMerge(tau=0.1, scenes=0.5, neighbours=2, small=0),
]
named = pytest.mark.parametrize("method", METHODS, ids=repr)
NAMES = [*dict.fromkeys(method.name for method in METHODS)]

#: (t, h, w) and whether newline tokens stand behind every row
UNITS = [
    ((9, 3, 4), False),
    ((1, 6, 6), False),
    ((4, 3, 3), True),
    ((1, 4, 5), True),
    ((1, 1, 1), False),
    ((2, 2, 5), False),
    ((17, 1, 2), False),
]


def clips(units=UNITS, seed: int = 0) -> TokenBatch:
    """Units whose frames resemble each other at some places, so that every branch is taken."""
    tokens = batch_of(units, seed)
    features = tokens.features.clone()
    for row, ((t, h, w), _) in enumerate(units):
        still = (tokens.cells[row, :, 2] % 2 == 0) & (tokens.cells[row, :, 0] >= t // 3)
        cell = tokens.cells[row, :, 1] * w + tokens.cells[row, :, 2]
        ground = features[row, : h * w].clone()
        features[row, still] = ground[cell[still] % len(ground)] + 0.1 * features[row, still]
    return replace(tokens, features=features, signals={**tokens.signals, "features": features[:, None]})


def spread_out(tokens: TokenBatch) -> TokenBatch:
    """The same clips with every frame in a segment of its own."""
    frame = tokens.cells[..., 0].clamp(min=0)
    return replace(tokens, segment=frame, tile=frame)


# --- every method -----------------------------------------------------------------------------------------------------
@named
def test_meets_its_budget_class(method: TokenMethod) -> None:
    tokens = clips()
    sizes = tokens.valid.sum(1)
    for share in (0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0):
        count = (sizes * share).long().clamp(min=1)
        made = method.reduce(tokens, count)
        before, after = made.counts()
        assert torch.equal(before, sizes) and not (made.kept & ~tokens.valid).any()
        assert (after >= 1).all()
        if method.budget == "exact":
            assert torch.equal(after, count)
        elif method.budget == "at_most":
            assert (after <= count).all()
        else:
            # up to rounding: a token for every frame, and half a one for every segment
            most = count + 2 * tokens.grid[:, 0]
            if isinstance(method, MustDropMerge):
                # as far as windows go
                most = torch.maximum(count, method.reduce(tokens, torch.ones_like(count)).kept.sum(1))
            assert (after <= most).all()


@named
def test_weights_sum_to_one_and_mass_stays(method: TokenMethod) -> None:
    tokens = clips([unit for unit in UNITS if not unit[1]])
    for share in (0.01, 0.2, 0.6):
        made = method.reduce(tokens, (tokens.valid.sum(1) * share).long().clamp(min=1))
        torch.testing.assert_close(dense(made).sum(2), made.kept.double(), rtol=0, atol=1e-6)
        if method.conserves_mass:
            assert torch.equal(made.mass().sum(1), tokens.valid.sum(1).float())


@named
def test_row_of_a_batch_is_the_row_alone(method: TokenMethod) -> None:
    tokens = clips()
    for count in (torch.tensor([40, 9, 20, 7, 1, 5, 11]), torch.tensor([5, 2, 3, 21, 1, 18, 30])):
        check_rows_alone(method, tokens, count)


@named
def test_whole_budget_keeps_everything(method: TokenMethod) -> None:
    tokens = clips()
    for features in (tokens.features, tokens.features.bfloat16()):
        made = method.reduce(replace(tokens, features=features), tokens.valid.sum(1))
        assert torch.equal(made.kept, tokens.valid)
        assert torch.equal(made.apply(features), features * tokens.valid[..., None])


@named
def test_segments_do_not_matter_to_a_clip(method: TokenMethod) -> None:
    tokens = clips([((6, 3, 3), False), ((5, 2, 4), False)])
    count = torch.tensor([20, 11])
    one, many = method.reduce(tokens, count), method.reduce(spread_out(tokens), count)
    assert torch.equal(one.kept, many.kept) and torch.equal(dense(one), dense(many))


@named
def test_same_inputs_same_reduction_and_inputs_left_alone(method: TokenMethod) -> None:
    tokens, untouched = clips(), clips()
    count = torch.tensor([40, 9, 20, 7, 1, 5, 0])
    first, second = method.reduce(tokens, count), method.reduce(tokens, count)
    assert torch.equal(first.kept, second.kept) and torch.equal(dense(first), dense(second))
    assert torch.equal(tokens.features, untouched.features) and torch.equal(tokens.cells, untouched.cells)
    assert not first.kept[-1].any()


@named
def test_tiles_cells_missing_and_no_cells(method: TokenMethod) -> None:
    # a picture of three tiles whose cells collide
    tiles = batch_of([((3, 3, 4), False)])
    tiles = replace(
        tiles,
        segment=tiles.cells[..., 0].clone(),
        tile=tiles.cells[..., 0].clone(),
        cells=tiles.cells * torch.tensor([0, 1, 1]),
        grid=torch.tensor([[1, 3, 4]]),
    )
    # a clip that an earlier stage has thinned, with one frame gone
    thinned = row_of(clips([((6, 3, 3), False)]), 0)
    stays = (torch.arange(54) % 4 != 1) & (thinned.cells[0, :, 0] != 2)
    thinned = TokenBatch(
        features=thinned.features[:, stays],
        valid=thinned.valid[:, stays],
        cells=thinned.cells[:, stays],
        grid=thinned.grid,
        segment=thinned.segment[:, stays],
        tile=thinned.tile[:, stays],
        signals={
            name: value[:, :, stays] if name == "features" else value[..., stays]
            for name, value in thinned.signals.items()
        },
    )
    tiles = replace(tiles, signals={**tiles.signals, "features": tiles.features[:, None]})
    bare = replace(tiles, cells=torch.full_like(tiles.cells, -1))
    for tokens in (tiles, thinned, bare):
        for count in (1, 2, 7, 20, int(tokens.valid.sum())):
            after = int(method.reduce(tokens, torch.tensor([count])).kept.sum())
            slack = 12 if not isinstance(method, MustDropMerge) else tokens.valid.shape[1]
            assert 1 <= after and (after == count if method.budget == "exact" else after <= count + slack)


@named
def test_copies_of_one_token(method: TokenMethod) -> None:
    tokens = clips([((4, 3, 3), False), ((1, 4, 4), False)])
    tokens = replace(tokens, features=torch.ones_like(tokens.features))
    made = method.reduce(tokens, torch.tensor([12, 5]))
    close = made.apply(tokens.features)[0, : int(made.kept[0].sum())]
    torch.testing.assert_close(close, torch.ones_like(close))
    assert method.budget != "exact" or made.kept.sum(1).tolist() == [12, 5]


# --- in models --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_every_method_in_a_model(family: str) -> None:
    tiny, feed = zoo.model(family), zoo.inputs(family, "video", batch=2)
    pictures = zoo.inputs(family, "uneven")
    for name in [*NAMES, "pitome"]:
        with accelerated(tiny, name, retain=0.5, processor=zoo.processor(family)):
            out = tiny.generate(**feed, max_new_tokens=2, do_sample=False)
            assert out.shape[1] == feed["input_ids"].shape[1] + 2
            stage = tiny.mmaccel.stats()["stages"][0]
            assert 0 < stage["tokens_kept"] < stage["tokens_in"]
            if stage["resolved"] is not None and mmaccel.method(name).budget == "exact":
                assert stage["tokens_kept"] == stage["resolved"]
            tiny(**pictures)
            assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] > 0


# --- films and groups -------------------------------------------------------------------------------------------------
def test_film_finds_the_same_cell() -> None:
    tokens = clips([((3, 2, 2), True), ((1, 2, 3), False)])
    made = Film.of(tokens)
    assert made.slots.shape == (2, 3, 6)
    assert made.slots[0, 1].tolist() == [6, 7, 9, 10, -1, -1] and made.slots[1, 1].tolist() == [-1] * 6
    earlier = made.earlier()
    assert earlier[0].tolist() == [-1] * 6 + [0, 1, -1, 3, 4, -1] + [6, 7, -1, 9, 10, -1]
    assert (earlier[1] == -1).all()
    # without its cell in the frame before, the one before that counts
    cells = tokens.cells.clone()
    cells[0, 6] = -1
    assert Film.of(replace(tokens, cells=cells)).earlier()[0, 12] == 0
    assert frame_numbers(tokens)[0].unique().tolist() == [-1, 0, 1, 2]
    # tiles that stand side by side in the prompt are told apart; one of which nothing is left has no number
    side = replace(tokens, tile=torch.where(tokens.cells[..., 2] > 1, 4, 0))
    assert frame_numbers(side)[1, :6].tolist() == [0, 0, 1, 0, 0, 1]


def test_choices_in_groups() -> None:
    group = torch.tensor([[1, 0, 0, -1, 1, 0, 1, 1]])
    scores = torch.tensor([[1.0, 2.0, 2.0, 9.0, 3.0, torch.nan, 3.0, 0.0]])
    kept = top_in_groups(scores, group, torch.tensor([[2, 1]]))
    assert kept[0].nonzero()[:, 0].tolist() == [1, 2, 4]
    for size in range(1, 12):
        for count in range(size + 3):
            even = even_in_groups(torch.zeros(1, size, dtype=torch.long), torch.tensor([[count]]))
            assert int(even.sum()) == min(count, size)
    assert (
        even_in_groups(torch.zeros(1, 12).long(), torch.tensor([[4]]))[0].nonzero()[:, 0].diff().unique().numel() == 1
    )


def test_small_parts_keep_one() -> None:
    part, kept = film.share(torch.tensor([[0] * 8 + [1]]), torch.tensor([2]))
    assert kept.tolist() == [[1, 1]] and part.max() == 1
    part, kept = film.share(torch.tensor([[0, 0, 1, 1, 2, 2]]), torch.tensor([2]))
    assert kept.tolist() == [[1, 1]] and part.tolist() == [[0, 0, 0, 0, 1, 1]]


# --- single methods ---------------------------------------------------------------------------------------------------
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


def test_evs_keeps_the_first_frame_and_what_changes() -> None:
    tokens = batch_of([((4, 3, 3), False)])
    x = tokens.features.clone().view(1, 4, 9, 16)
    x[:, 1:] = x[:, :1]
    x[0, 2, 4] = -x[0, 2, 4]
    tokens = replace(tokens, features=x.view(1, 36, 16))
    kept = Evs().reduce(tokens, torch.tensor([11])).kept[0].nonzero()[:, 0].tolist()
    # it changes in frame 2 and back in frame 3
    assert kept == [*range(9), 22, 31]
    assert Evs().reduce(tokens, torch.tensor([4])).kept[0].nonzero()[:, 0].tolist() == [4, 13, 22, 31]


def test_evs_falls_back_row_by_row() -> None:
    """Of two clips in a batch one has a budget below its first frame."""
    tokens = batch_of([((4, 3, 3), False), ((4, 3, 3), False)])
    kept = Evs().reduce(tokens, torch.tensor([11, 4])).kept
    assert kept[0, :9].all() and kept[0].sum() == 11
    assert kept[1].nonzero()[:, 0].tolist() == [4, 13, 22, 31]


def test_cosines_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 5, generator=rng)
    slots = torch.randint(-1, 37, (2, 37), generator=rng)
    whole = film.cosine_to(x, slots)
    own = torch.where(slots < 0, torch.arange(37), slots)
    other = torch.stack([row[at] for row, at in zip(x, own, strict=True)])
    torch.testing.assert_close(whole, torch.nn.functional.cosine_similarity(x, other, dim=-1))
    # four tokens of both rows at a time
    monkeypatch.setattr(film, "CACHED", 40)
    assert torch.equal(film.cosine_to(x, slots), whole)


def test_official_rounding_frame_by_frame() -> None:
    # 8 frames of 10 cells: 2 stay whole, 6 keep int(0.3 * 10) = 3 each; 0.475 of 80 would be 38
    assert DyCoke().official_count(0.475, 80, (8, 2, 5)) == 38
    assert DyCoke().official_count(0.475, 88, (8, 1, 11)) == 2 * 11 + 6 * 3
    # the third frame of the last four stays whole, and an odd last frame goes
    assert DyCoke(official_tail=True).official_count(0.475, 88, (8, 1, 11)) == 3 * 11 + 5 * 3
    assert DyCoke(official_tail=True).official_count(0.475, 99, (9, 1, 11)) == 2 * 11 + 6 * 3
    assert DyCoke().official_count(0.1, 88, (8, 1, 11)) == 9 and DyCoke().official_count(0.475, 11, (1, 1, 11)) == 5
    assert Evs().official_count(0.05, 80, (8, 2, 5)) == 10 and Evs().official_count(0.29, 100, (8, 2, 5)) == 28
    assert Evs().official_count(0.29, 100) == 28
    # in a model: every compared frame keeps the same number
    tiny, feed = zoo.model("llava_onevision"), zoo.inputs("llava_onevision", "video")
    with accelerated(tiny, "dycoke", retain=0.475, rounding="official"):
        tiny(**feed)
        stage, layout, kept = tiny.mmaccel.stats()["stages"][0], tiny.mmaccel.layout, tiny.mmaccel.reduction.kept
    units = layout.units("picture")
    frames, high, wide = units.grid[0].tolist()
    each = int((1 - 0.7) * high * wide)
    stays = kept[0, units.places[0]]
    per_frame = [int(stays[units.cells[0, :, 0] == f].sum()) for f in range(frames)]
    assert per_frame == [high * wide if f % 4 == 0 else each for f in range(frames)]
    assert stage["tokens_kept"] == sum(per_frame) != int(0.475 * len(stays) + 0.5)


def test_dycoke_compares_within_groups_of_four() -> None:
    assert references(10) == [0, 0, 0, 2, 4, 4, 4, 6, 8, 8]
    assert references(9, official_tail=True) == [0, 0, 0, 2, 4, 4, 4, 6, None]
    assert references(8, official_tail=True) == [0, 0, 0, 2, 4, 4, 6, 6]
    tokens = clips([((8, 2, 3), False)])
    kept = DyCoke().reduce(tokens, torch.tensor([12 + 6 * 2])).kept.view(8, 6).sum(1)
    assert kept.tolist() == [6, 2, 2, 2, 6, 2, 2, 2]
    kept = DyCoke(official_tail=True).reduce(tokens, torch.tensor([18 + 5 * 2])).kept.view(8, 6).sum(1)
    assert kept.tolist() == [6, 2, 2, 2, 6, 2, 6, 2]
    # below the whole frames these are thinned
    assert DyCoke().reduce(tokens, torch.tensor([5])).kept.view(8, 6).sum(1).tolist() == [3, 0, 0, 0, 2, 0, 0, 0]


def test_segments_save_as_much_as_possible() -> None:
    def saving(similar: Tensor, cuts: list[tuple[int, int]]) -> int:
        return sum(int(similar[s:e].all(0).sum()) * (e - s) for s, e in cuts if e > s)

    def ways(first: int, frames: int, longest: int):
        if first == frames:
            yield []
        for last in range(first, min(frames, first + longest)):
            yield from ([(first, last), *rest] for rest in ways(last + 1, frames, longest))

    random = torch.Generator().manual_seed(0)
    for frames, longest in ((1, 9), (2, 9), (6, 9), (7, 3), (7, 1)):
        similar = torch.rand(frames - 1, 11, generator=random) < 0.7
        cuts, saved = static_segments(similar, longest)
        assert [f for s, e in cuts for f in range(s, e + 1)] == list(range(frames))
        assert saved == saving(similar, cuts) == max(saving(similar, way) for way in ways(0, frames, longest))
    # nothing to gain: frames stay alone
    assert static_segments(torch.zeros(4, 3, dtype=torch.bool))[0] == [(f, f) for f in range(5)]


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


def test_holitom_keeps_still_places_once() -> None:
    tokens = batch_of([((6, 4, 4), False)])
    x = tokens.features.clone().view(6, 16, 16)
    x[:, :8] = x[:1, :8] + 0.05 * x[:, :8]
    tokens = replace(tokens, features=x.view(1, 96, 16))
    made = HoliTomMerge(tau=0.9).reduce(tokens, torch.tensor([56]))
    # eight places six times over are eight tokens, and all of what is left fits the budget
    assert made.kept.view(6, 16).sum(1).tolist() == [16, 8, 8, 8, 8, 8]
    merged = made.substitute(tokens.features)[0].view(6, 16, 16)
    torch.testing.assert_close(merged[0, :8], x[:, :8].mean(0))
    torch.testing.assert_close(merged[0, 8:], x[0, 8:])
    # of an image it keeps what is attended to
    image = batch_of([((1, 5, 5), False)])
    best = image.signals["received_attention"].sum(1)[0].topk(6).indices.sort().values
    assert HoliTomMerge().reduce(image, torch.tensor([6])).kept[0].nonzero()[:, 0].tolist() == best.tolist()


def test_fastvid_by_hand() -> None:
    """Segments, salient tokens and anchors of a clip in loops, one token at a time."""
    random = torch.Generator().manual_seed(3)
    ground = torch.randn(3, 1, 10, 8, generator=random)
    x = torch.cat([ground[i].expand(n, -1, -1) for i, n in enumerate((5, 1, 2))])
    x = x + 0.3 * torch.randn(x.shape, generator=random)
    attention, there = torch.rand(8, 10, generator=random), torch.ones(8, 10, dtype=torch.bool)
    assert changing_segments(x.mean(1), 2, -1.0) == [(0, 4), (5, 5), (6, 7)] == changing_segments(x.mean(1), 0, 0.7)
    assert changing_segments(x.mean(1), 0, -1.0) == [(0, 7)]
    method = FastVID(segments=3, tau=-1.0, merged=0.5, stride=2, beta=0.3, neighbours=3)
    slot, source, weight = method.clip(x, attention, there, 8 * 4 + 7)
    out = torch.zeros(80, 8).index_add_(0, slot, weight[:, None] * x.flatten(0, 1)[source])
    wanted: dict[int, Tensor] = {}
    salient = {t: attention[t].topk(2).indices.tolist() for t in range(8)}
    for t, mine in salient.items():
        wanted |= {10 * t + p: x[t, p] for p in mine}
    # four of ten stay in a frame, two of them centres: 5 x 2 for three anchors, 2 for one, 2 x 2 for one
    for frames, anchors, share in ((range(5), (0, 2, 4), 3), (range(5, 6), (5,), 2), (range(6, 8), (7,), 4)):
        rest = [(t, p) for t in frames for p in range(10) if p not in salient[t]]
        for anchor in anchors:
            own = torch.tensor([p for t, p in rest if t == anchor])
            score = density_peaks.density_peaks(x[anchor, own][None], torch.ones(1, 8, dtype=torch.bool), 3)
            chosen = own[density_peaks.centres(score, share)[0]]
            nearest = [int(torch.cosine_similarity(x[t, p], x[anchor, chosen], dim=-1).argmax()) for t, p in rest]
            for number, p in enumerate(chosen.tolist()):
                members = torch.stack([x[where] for where, at in zip(rest, nearest, strict=True) if at == number])
                most = max(1 / (len(members) + 1), 0.3)
                wanted[10 * anchor + p] = most * x[anchor, p] + (1 - most) * members.mean(0)
    assert slot.unique().tolist() == sorted(wanted)
    for place, value in wanted.items():
        torch.testing.assert_close(out[place], value)
    # less than one token a frame: the best of the clip
    few = method.clip(x, attention, there, 3)
    assert sorted(few[0].tolist()) == sorted(attention.flatten().topk(3).indices.tolist()) and (few[2] == 1).all()


def test_scenes_are_the_longest_runs_of_clusters() -> None:
    assert scenes_of([0, 0, 1, 1, 1]) == [(0, 1), (2, 4)]
    # the second run of 0 joins the longer of 1 and 2; on a tie the left one
    assert scenes_of([0, 0, 1, 1, 1, 0, 2, 2]) == [(0, 1), (2, 5), (6, 7)]
    assert scenes_of([0, 0, 1, 1, 0, 2, 2, 2]) == [(0, 1), (2, 3), (4, 7)]
    assert scenes_of([0, 0, 1, 1, 0, 2, 2]) == [(0, 1), (2, 4), (5, 6)]
    # the first of equally long runs is the scene; what comes first may join to the right
    assert scenes_of([0, 1, 1, 0, 0, 1, 1]) == [(0, 2), (3, 6)]
    assert scenes_of([3]) == [(0, 0)] and scenes_of([1, 0, 1, 0]) == [(0, 0), (1, 3)]


def test_prunevid_by_hand() -> None:
    random = torch.Generator().manual_seed(5)
    ground = torch.randn(2, 20, 8, generator=random)
    x = torch.cat([ground[:1].expand(3, -1, -1), ground[1:].expand(2, -1, -1)])
    x = x + 0.02 * torch.randn(x.shape, generator=random)
    # places 0 to 14 of the first scene stand still, the others move
    x[:3, 15:] = torch.randn(3, 5, 8, generator=random)
    there = torch.ones(5, 20, dtype=torch.bool)
    method = PruneVidMerge(scenes=0.4)
    into = method.clip(x, there, 0.2).view(5, 20)
    # 15 static tokens are more than 14: int(0.2 * 15) clusters at the first frame, each with all its frames
    static = into[:3, :15]
    assert (static == static[0]).all() and len(static.unique()) == 3 and (static < 15).all()
    mean = x[:3, :15].mean(0)
    peaks = static.unique()
    assert torch.equal(static[0], peaks[torch.cdist(mean, mean[peaks]).argmin(1)])
    # the five that move are few: they stay, frame by frame
    assert torch.equal(into[:3, 15:], torch.arange(60).view(3, 20)[:, 15:])
    # in the second scene all 20 stand still; a place that is missing in one frame does not
    assert len(into[3:].unique()) == 4 and (into[3:] < 80).all()
    there[4, 7] = False
    gone = method.clip(x, there, 0.2).view(5, 20)
    assert gone[3, 7] == 67 and (gone[3] == 67).sum() == 1
    made = Reduction.merge(into.view(1, -1), torch.ones(1, 100, dtype=torch.bool))
    out = made.substitute(x.flatten(0, 1)[None])[0]
    for peak in peaks:
        torch.testing.assert_close(out[peak], x[:3, :15][:, static[0] == peak].flatten(0, 1).mean(0))
    # a scene of one frame has nothing still
    one = PruneVidMerge(scenes=1.0).clip(x[:1], there[:1], 0.2)
    assert len(one.unique()) == 4 and torch.equal(one[0, one.unique()], one.unique())


def test_moviechat_averages_the_most_similar_neighbours() -> None:
    x = torch.eye(8)[[0, 1, 1, 2, 2, 2]][:, None].repeat(1, 3, 1)
    x[5] += 0.1
    run, weight = consolidate(x, 4)
    assert run.tolist() == [0, 1, 1, 2, 2, 3] and weight.tolist() == [1, 0.5, 0.5, 0.5, 0.5, 1]
    run, weight = consolidate(x, 3)
    assert run.tolist() == [0, 1, 1, 2, 2, 2] and weight.tolist() == [1, 0.5, 0.5, 0.25, 0.25, 0.5]
    # the tiles of a picture are pooled each for itself
    tiles = clips([((2, 4, 4), False)])
    tiles = replace(
        tiles,
        segment=tiles.cells[..., 0].clone(),
        tile=tiles.cells[..., 0].clone(),
        cells=tiles.cells * torch.tensor([0, 1, 1]),
        grid=torch.tensor([[1, 4, 4]]),
    )
    made = MovieChat().reduce(tiles, torch.tensor([8]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [0, 2, 8, 10, 16, 18, 24, 26]
    assert (made.owner()[0, 16:] >= 16).all()
    tokens = clips([((6, 2, 3), False)])
    kept = MovieChat().reduce(tokens, torch.tensor([20])).kept.view(6, 6).sum(1)
    assert kept[0] == 6 and sorted(kept.tolist()) == [0, 0, 0, 6, 6, 6]


def test_mustdrop_merges_windows_that_are_alike() -> None:
    tokens = clips([((1, 7, 6), True), ((3, 4, 4), False)])
    slots, there = windows(tokens, 3)
    # of 7 x 6 cells and a newline behind every row, four windows are complete; the clip has one a frame
    assert there.sum(1).tolist() == [4, 3]
    assert slots[0, 3].tolist() == [24, 25, 26, 31, 32, 33, 38, 39, 40]
    assert slots[1, :3, 0].tolist() == [0, 16, 32]
    similar = window_similarity(tokens.features, slots)
    for row, number in ((0, 0), (0, 3), (1, 2)):
        x = tokens.features[row, slots[row, number]]
        pairs = torch.cosine_similarity(x[:, None], x[None], dim=-1)[~torch.eye(9, dtype=torch.bool)]
        torch.testing.assert_close(similar[row, number], pairs.mean())
    order = similar[0].argsort(descending=True)
    # the threshold decides, unless the ceiling asks for more: a window makes eight tokens go
    bar = float(similar[0, order[1]])
    for ceiling, merged in ((49, 2), (34, 2), (33, 2), (32, 3), (25, 3), (24, 4), (1, 4)):
        made = MustDropMerge(threshold=bar).reduce(tokens, torch.tensor([ceiling, 48]))
        assert int(made.kept[0].sum()) == 49 - 8 * merged
        owner = made.owner()[0]
        for number in range(4):
            first = slots[0, number, 0] if number in order[:merged] else slots[0, number]
            assert (owner[slots[0, number]] == first).all()
        alike = slots[0, order[0]]
        torch.testing.assert_close(made.substitute(tokens.features)[0, alike[0]], tokens.features[0, alike].mean(0))
    # a window that has lost a token is none
    lost = replace(tokens, valid=tokens.valid & (torch.arange(49) != 8), cells=tokens.cells.clone())
    assert windows(lost, 3)[1].sum(1).tolist() == [3, 2]
    # neither are cells of two tiles
    half = replace(tokens, tile=(tokens.cells[..., 2] > 1).long())
    assert windows(half, 3)[1].sum(1).tolist() == [2, 0]


def test_pitome_protects_what_is_alone() -> None:
    metric = torch.randn(2, 41, 8, generator=torch.Generator().manual_seed(0))
    metric[:, 1:20] = metric[:, 1:2] + 0.1 * metric[:, 1:20]
    place = torch.arange(41)
    for matching in (energy_matching, energy_bipartite_matching, text_matching):
        for remove in (0, 7, 99):
            target = matching(metric, remove, 0.5, 1)
            assert ((target != place).sum(1) == min(remove, 20)).all() and (target[:, 0] == 0).all()
            assert torch.equal(target.gather(1, target), target)
            assert torch.equal(matching(metric[:1], remove, 0.5, 1)[0], target[0])
    # nine merges take eighteen candidates, all of the crowd
    gone = energy_matching(metric, 9, 0.5, 1) != place
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: CenterClip(frames=0),
        lambda: CenterClip(distance="manhattan"),  # type: ignore[arg-type]
        lambda: HoliTomMerge(contextual=2.0),
        lambda: HoliTomMerge(layers=()),
        lambda: MovieChat(similarity="dot"),  # type: ignore[arg-type]
        lambda: PiToMe(variant="image"),  # type: ignore[arg-type]
        lambda: PiToMe(variant="text", margin=1.0),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()


def test_they_are_known_by_name() -> None:
    assert {*NAMES, "pitome"} <= set(mmaccel.methods())
