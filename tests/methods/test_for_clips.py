"""Methods for clips that no golden vector shows, on cases small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import batch_of, dense
from torch import Tensor

from mmaccel import MmaccelError
from mmaccel.layers.sttm import Sttm
from mmaccel.merging.evad import Evad
from mmaccel.merging.kitoke import KiToke, intervals, joined
from mmaccel.merging.longvlm import LongVlm
from mmaccel.merging.progressive_pool import ProgressivePool
from mmaccel.merging.stc import StcPruner
from mmaccel.merging.streamdvc import StreamDvc, beginning, merge_neighbours, take_up
from mmaccel.merging.streamvln import StreamVln
from mmaccel.merging.tempme import TempMe
from mmaccel.merging.vidcom2 import VidCom2
from mmaccel.merging.vtm import Vtm
from mmaccel.method import TokenBatch


def film(*grid: int, features: Tensor | None = None) -> TokenBatch:
    tokens = batch_of([(grid, False)])
    return tokens if features is None else replace(tokens, features=features.view(1, -1, features.shape[-1]))


def frames_of(made, grid) -> list[int]:
    return made.kept.view(grid[0], -1).sum(1).tolist()


def test_vtm_averages_into_the_most_alike_target() -> None:
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    x = torch.stack([one, 3 * two, 2 * one, one + 0.1 * two, two, 5 * two])
    tokens = film(1, 1, 6, features=x)
    # the first of three stretches of two
    made = Vtm().reduce(tokens, torch.tensor([3]))
    assert made.owner()[0].tolist() == [0, 4, 2, 0, 4, 4]
    out = made.apply(tokens.features)[0]
    torch.testing.assert_close(out, torch.stack([(x[0] + x[3]) / 2, x[2], (x[1] + x[4] + x[5]) / 3]))


def test_vtm_keeps_the_middle_or_what_moves() -> None:
    made = Vtm(targets="centre").reduce(film(2, 3, 3), torch.tensor([2]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [4, 13]
    still = torch.randn(4, generator=torch.Generator().manual_seed(0)).repeat(12, 1)
    still[7] += 1
    made = Vtm(targets="motion").reduce(film(3, 2, 2, features=still), torch.tensor([2]))
    # what changed, and changed back
    assert made.kept[0].nonzero()[:, 0].tolist() == [7, 11]


def test_progressive_pool_shows_the_first_frame_of_a_group_in_detail() -> None:
    tokens = film(8, 4, 4)
    # 2 x 4 + 6 shares of 2 tokens: 8 for the first frames of two groups, 2 for the others
    made = ProgressivePool().reduce(tokens, torch.tensor([28]))
    assert frames_of(made, (8, 4, 4)) == [8, 2, 2, 2, 8, 2, 2, 2]
    weight = dense(made)[0]
    # a window of 2 x 1 cells, and one of 2 x 4
    assert weight[0].nonzero()[:, 0].tolist() in ([0, 4], [0, 1]) and float(weight[0].max()) == 0.5
    assert int((weight[16] > 0).sum()) == 8
    assert frames_of(ProgressivePool(detail=1).reduce(tokens, torch.tensor([32])), (8, 4, 4)) == [4] * 8


def test_streamvln_keeps_now_whole_and_pools_the_past() -> None:
    tokens = film(10, 2, 2)
    made = StreamVln(recent=2, history=4).reduce(tokens, torch.tensor([8 + 4]))
    assert frames_of(made, (10, 2, 2)) == [1, 0, 1, 0, 1, 0, 1, 0, 4, 4]
    weight = dense(made)[0]
    assert torch.equal(weight[0, :4], torch.full((4,), 0.25).double()) and float(weight[39, 39]) == 1.0
    # a budget below the present keeps nothing else
    assert frames_of(StreamVln().reduce(tokens, torch.tensor([2])), (10, 2, 2)) == [0] * 9 + [2]


def test_streamdvc_takes_up_frames_by_k_means() -> None:
    assert beginning(torch.tensor([0, 0, 0, 1, 1, 1, 2]), 4).tolist() == [True, True, True, False, True, False, False]
    memory, weight = torch.tensor([[0.0], [10.0]]), torch.tensor([3, 1])
    centres, weight, centre, source, share = take_up(memory, weight, torch.tensor([[4.0], [12.0]]), 1)
    # (3 x 0 + 4) / 4 and (10 + 12) / 2
    assert centres[:, 0].tolist() == [1.0, 11.0] and weight.tolist() == [4, 2]
    assert (
        centre.tolist() == [0, 0, 1, 1] and source.tolist() == [0, 2, 1, 3] and share.tolist() == [0.75, 0.25, 0.5, 0.5]
    )
    made = StreamDvc(iterations=1).reduce(
        film(2, 1, 2, features=torch.tensor([0.0, 10, 4, 12])[:, None]), torch.tensor([2])
    )
    assert made.apply(torch.tensor([0.0, 10, 4, 12])[None, :, None])[0, :, 0].tolist() == [2.0, 11.0]


def test_a_centre_that_nothing_joins_stays() -> None:
    memory, weight = torch.tensor([[0.0], [100.0]]), torch.tensor([1, 0])
    centres, weight, centre, source, share = take_up(memory, weight, torch.tensor([[1.0]]), 2)
    assert centres[:, 0].tolist() == [0.5, 100.0] and weight.tolist() == [2, 0]
    assert centre.tolist() == [0, 0, 1] and source.tolist() == [0, 2, 1] and share.tolist() == [0.5, 0.5, 1.0]


def test_streamdvc_merges_neighbours_one_by_one() -> None:
    # angles in degrees; 100 takes the place of 10, 130 that of 90 when 100 and 90 have merged; 170 joins 180
    at = torch.tensor([0.0, 10, 90, 180, 100, 130, 170]).deg2rad()
    x = torch.stack([at.cos(), at.sin()], 1)
    owner, share = merge_neighbours(x[:4], x[4:])
    assert owner.tolist() == [0, 0, 1, 3, 1, 2, 3]
    assert share.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 0.5]
    tokens = film(7, 1, 1, features=x)
    # 90 comes when 95 and 130 merge, into 107 by their weights, nearer to 90 than 155 is to 175; the plain mean would not be
    more = torch.tensor([0.0, 10, 90, 180, 100, 130, 170, 90, 155]).deg2rad()
    more = torch.stack([more.cos(), more.sin()], 1)
    assert merge_neighbours(more[:4], more[4:])[0].tolist() == [0, 0, 1, 3, 1, 1, 3, 1, 2]
    made = StreamDvc(neighbours=True).reduce(tokens, torch.tensor([4]))
    out = torch.stack([(x[0] + x[1]) / 2, (x[2] + x[4]) / 2, x[5], (x[3] + x[6]) / 2])
    torch.testing.assert_close(made.apply(tokens.features)[0], out)


def test_kitoke_picks_what_is_rare_and_not_its_like() -> None:
    one, two, three = torch.eye(3)
    # seven tokens of which five are alike, and the two others too
    x = torch.stack([one, one, 3 * one, one, one, two, two + 0.3 * three])
    near = 1 / 1.09**0.5
    unit = torch.nn.functional.normalize(x, dim=-1)
    spread = 2 * (1 - unit.mean(0).square().sum())
    kernel = ((unit @ unit.T - 1) / spread).exp()
    torch.testing.assert_close(kernel[5, 6], ((near - 1) / spread).exp())
    picked, diversity = KiToke().pick(x, 2)
    torch.testing.assert_close(diversity, 1 / kernel.mean(1))
    # the first of two that are as rare; then the other is worth less than what there is five times
    assert picked.nonzero()[:, 0].tolist() == [0, 5]
    made = KiToke().reduce(film(7, 1, 1, features=x), torch.tensor([2]))
    out = made.apply(x[None])[0]
    assert made.owner()[0].tolist() == [0, 0, 0, 0, 0, 5, 5]
    torch.testing.assert_close(out[0], 7 / 5 * one)
    torch.testing.assert_close(out[1], (x[5:] * diversity[5:, None]).sum(0) / diversity[5:].sum())


def test_kitoke_merges_within_intervals() -> None:
    one, two = torch.eye(2)
    x = torch.stack([one, one, one + 0.1 * two, one, two, two])
    # cosines of neighbouring frames are 1, 0.995, 0.995, 0 and 1
    assert intervals(x, torch.arange(6)).tolist() == [0, 0, 0, 0, 1, 1]
    assert intervals(x[:1], torch.zeros(1, dtype=torch.long)).tolist() == [0]
    picked, part = torch.tensor([True, False, False, True]), torch.tensor([0, 0, 1, 1])
    some = torch.stack([one, two, one, two])
    # the second is a copy of the last, and the third of the first, but in other intervals
    assert joined(some, part, picked).tolist() == [0, 0, 3, 3]
    # an interval without a pick
    assert joined(some, torch.tensor([0, 2, 2, 1]), picked).tolist() == [0, 3, 0, 3]


def test_tempme_merges_within_frames_and_then_across_them() -> None:
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    x = torch.stack([one, two, one + 0.1 * two, one])
    tokens = film(2, 1, 2, features=x)
    # the square root of a half leaves frames whole; of four tokens the first and third are matched with the others
    made = TempMe().reduce(tokens, torch.tensor([2]))
    assert made.owner()[0].tolist() == [3, 1, 3, 3]
    torch.testing.assert_close(made.apply(tokens.features)[0], torch.stack([two, (x[0] + x[2] + x[3]) / 3]))
    # that of a quarter halves them: of one frame the second token is matched with the first
    assert TempMe().reduce(tokens, torch.tensor([1])).owner()[0].tolist() == [2, 2, 2, 2]
    # frames that no step joins have budgets of their own
    three = film(3, 1, 2, features=torch.cat([x, x[:2]]))
    assert TempMe(joins=(2,)).reduce(three, torch.tensor([3])).owner()[0].tolist() == [3, 1, 3, 3, 4, 4]


def test_sttm_merges_what_is_uniform_and_what_stays() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 4, 8, generator=random)
    # one quarter of a frame is uniform, in both frames alike; everything else is noise
    x[:, :2, :2] = torch.ones(8)
    tokens = film(2, 4, 4, features=x.flatten(0, 2))
    made = Sttm(layer=2, spatial=0.9, temporal=0.9, root=0).reduce(tokens, torch.tensor([32]))
    assert made.owner()[0].view(2, 4, 4)[:, :2, :2].unique().tolist() == [0]
    assert int(made.kept.sum()) == 32 - 8 + 1 and float(made.mass()[0, 0]) == 8
    # nothing along time; and a ceiling drops what stands for least, the later first
    made = Sttm(layer=2, spatial=0.9, temporal=2.0, root=0).reduce(tokens, torch.tensor([4]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [0, 2, 3, 16]


def test_sttm_may_link_a_cell_once() -> None:
    """A cell of four in the second frame stands over four cells of the first, which differ."""
    one, two = torch.eye(2)
    first = torch.stack([one, one + 0.2 * two, one + 0.4 * two, one - 0.5 * two])
    whole = one + 0.3 * two
    x = torch.stack([first.view(2, 2, 2), whole.expand(2, 2, 2)])
    # noise about them, so that cells of four are the coarsest
    x = torch.cat([x, torch.stack([two, -two]).view(1, 1, 2, 2).expand(2, 2, 2, 2)], 2)
    x = torch.cat([x, -x], 1).reshape(2, 4, 4, 2)
    tokens = film(2, 4, 4, features=x.flatten(0, 2))
    count = torch.tensor([32])

    def over(method: Sttm) -> list[int]:
        return method.reduce(tokens, count).owner()[0].view(2, 4, 4)[:, :2, :2].flatten().tolist()

    method = Sttm(layer=2, spatial=0.99, temporal=0.7, root=0)
    assert over(method) == [0] * 8
    # cosines of 0.958, 0.9956, 0.9960 and 0.728
    single = Sttm(layer=2, spatial=0.99, temporal=0.7, root=0, single=True)
    assert over(single) == [0, 1, 4, 5, 4, 4, 4, 4]
    # another cell's link lies between the two of the first; the program looks no further than the next
    links = torch.tensor([0, 1, 2]), torch.tensor([9, 10, 9]), torch.tensor([0.9, 0.8, 0.7])
    for variant, others in (("exact", [9, 10]), ("official", [9, 10, 9])):
        assert single.by(variant)._single(*links, torch.Size((2, 3, 3)))[1].tolist() == others


def test_sttm_borders_of_odd_sides() -> None:
    """A border cell has fewer children; the program compares it with a cell that is none of them."""
    x = torch.zeros(1, 3, 3, 2)
    x[..., 0] = 1.0
    x[0, 0, 0] = torch.tensor([0.0, 1.0])
    tokens = film(1, 3, 3, features=x.flatten(0, 2))
    ours, theirs = (
        Sttm(layer=2, root=0).by(variant).reduce(tokens, torch.tensor([9])) for variant in ("exact", "official")
    )
    # the corner by itself, the rest of the first row and column, and the four others
    assert ours.owner()[0].tolist() == [0, 1, 1, 3, 4, 4, 3, 4, 4]
    assert theirs.owner()[0].tolist() == [0, 1, 2, 3, 4, 4, 6, 4, 4]


def test_vidcom2_gives_to_the_frame_that_differs() -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(1, 6, 8, generator=random).repeat(4, 1, 1) + 0.01 * torch.randn(4, 6, 8, generator=random)
    x[2] = torch.randn(6, 8, generator=random)
    counts = frames_of(VidCom2().reduce(film(4, 2, 3, features=x.flatten(0, 1)), torch.tensor([8])), (4, 2, 3))
    assert sum(counts) == 8 and counts[2] == max(counts) > min(counts)


def test_stc_looks_at_no_later_frame() -> None:
    tokens = film(5, 3, 3)
    later = tokens.features.clone()
    later[:, 27:] = later[:, 27:].flip(1) * 3
    one, two = (
        StcPruner().reduce(replace(tokens, features=x), torch.tensor([20])).kept for x in (tokens.features, later)
    )
    assert torch.equal(one[:, :27], two[:, :27]) and not torch.equal(one, two)
    assert frames_of(StcPruner().reduce(tokens, torch.tensor([20])), (5, 3, 3)) == [4] * 5


def test_evad_keeps_the_middle_frame() -> None:
    tokens = film(5, 2, 2)
    kept = Evad().reduce(tokens, torch.tensor([7])).kept.view(5, 4)
    assert kept[2].all() and int(kept.sum()) == 7
    assert Evad().reduce(tokens, torch.tensor([3])).kept.view(5, 4)[2].sum() == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Vtm(targets="random"),  # type: ignore[arg-type]
        lambda: VidCom2(temperature=0.0),
        lambda: StreamDvc(iterations=0),
        lambda: ProgressivePool(group=0),
        lambda: StreamVln(recent=0),
        lambda: LongVlm(frames=0),
        lambda: Sttm(root=-1),
        lambda: KiToke(bandwidth=0.0),
        lambda: TempMe(joins=()),
        lambda: TempMe(joins=(2, 1)),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()
