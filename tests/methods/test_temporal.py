"""Methods that merge over frames, one by one, against their definitions."""

from __future__ import annotations

from dataclasses import replace

import torch
import zoo
from batches import batch_of
from clips import clips
from torch import Tensor

from mmaccel import accelerated
from mmaccel.core.masks import even_in_groups, top_in_groups
from mmaccel.core.reduction import Reduction
from mmaccel.merging import film
from mmaccel.merging.dycoke import DyCokeTTM, references
from mmaccel.merging.evs import Evs
from mmaccel.merging.fastvid import FastVID
from mmaccel.merging.film import Film
from mmaccel.merging.holitom import HoliTomMerge
from mmaccel.merging.moviechat import MovieChat, consolidate
from mmaccel.merging.mustdrop import MustDropMerge, window_similarity, windows
from mmaccel.merging.prunevid import PruneVidMerge, scenes_of
from mmaccel.merging.segments import changing_segments, static_segments
from mmaccel.method import density_peaks
from mmaccel.method.blocks import frame_numbers


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


def test_official_rounding_frame_by_frame() -> None:
    # 8 frames of 10 cells: 2 stay whole, 6 keep int(0.3 * 10) = 3 each; 0.475 of 80 would be 38
    assert DyCokeTTM().official_count(0.475, 80, (8, 2, 5)) == 38
    assert DyCokeTTM().official_count(0.475, 88, (8, 1, 11)) == 2 * 11 + 6 * 3
    # the third frame of the last four stays whole, and an odd last frame goes
    assert DyCokeTTM().by("official").official_count(0.475, 88, (8, 1, 11)) == 3 * 11 + 5 * 3
    assert DyCokeTTM().by("official").official_count(0.475, 99, (9, 1, 11)) == 2 * 11 + 6 * 3
    assert (
        DyCokeTTM().official_count(0.1, 88, (8, 1, 11)) == 9 and DyCokeTTM().official_count(0.475, 11, (1, 1, 11)) == 5
    )
    assert Evs().official_count(0.05, 80, (8, 2, 5)) == 10 and Evs().official_count(0.29, 100, (8, 2, 5)) == 28
    assert Evs().official_count(0.29, 100) == 28
    # in a model: every compared frame keeps the same number
    tiny, feed = zoo.model("llava_onevision"), zoo.inputs("llava_onevision", "video")
    with accelerated(tiny, "dycoke-ttm", retain=0.475, variant="official"):
        tiny(**feed)
        stage, layout, kept = tiny.mmaccel.stats()["stages"][0], tiny.mmaccel.layout, tiny.mmaccel.reduction.kept
    units = layout.units("picture")
    frames, high, wide = units.grid[0].tolist()
    each = int((1 - 0.7) * high * wide)
    stays = kept[0, units.places[0]]
    per_frame = [int(stays[units.cells[0, :, 0] == f].sum()) for f in range(frames)]
    assert per_frame == [high * wide if r == f else each for f, r in enumerate(references(frames, tail=True))]
    assert stage["tokens_kept"] == sum(per_frame) != int(0.475 * len(stays) + 0.5)


def test_dycoke_compares_within_groups_of_four() -> None:
    assert references(10) == [0, 0, 0, 2, 4, 4, 4, 6, 8, 8]
    assert references(9, tail=True) == [0, 0, 0, 2, 4, 4, 4, 6, None]
    assert references(8, tail=True) == [0, 0, 0, 2, 4, 4, 6, 6]
    tokens = clips([((8, 2, 3), False)])
    kept = DyCokeTTM().reduce(tokens, torch.tensor([12 + 6 * 2])).kept.view(8, 6).sum(1)
    assert kept.tolist() == [6, 2, 2, 2, 6, 2, 2, 2]
    kept = DyCokeTTM().by("official").reduce(tokens, torch.tensor([18 + 5 * 2])).kept.view(8, 6).sum(1)
    assert kept.tolist() == [6, 2, 2, 2, 6, 2, 6, 2]
    # below the whole frames these are thinned
    assert DyCokeTTM().reduce(tokens, torch.tensor([5])).kept.view(8, 6).sum(1).tolist() == [3, 0, 0, 0, 2, 0, 0, 0]


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
