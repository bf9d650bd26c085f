"""What the merging and temporal methods promise, alone and in tiny models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import synthetic
import torch
import zoo
from batches import batch_of, check_rows_alone, dense, row_of
from clips import UNITS, clips, spread_out
from tail import few

import mmaccel
from mmaccel import MmaccelError, accelerated
from mmaccel.encoders.pitome import PiToMe
from mmaccel.merging.aim import AimMerge
from mmaccel.merging.apet import ApETMerge
from mmaccel.merging.centerclip import CenterClip
from mmaccel.merging.dycoke import DyCokeTTM
from mmaccel.merging.earlytom import EarlyTomTokens
from mmaccel.merging.evad import Evad
from mmaccel.merging.everest import Everest
from mmaccel.merging.evs import Evs
from mmaccel.merging.fastvid import FastVID
from mmaccel.merging.flashvid import FlashVIDMerge
from mmaccel.merging.forestprune import ForestPrune
from mmaccel.merging.free_video_llm import FreeVideoLlm
from mmaccel.merging.holitom import HoliTomMerge
from mmaccel.merging.kitoke import KiToke
from mmaccel.merging.longvlm import LongVlm
from mmaccel.merging.metok import METokMerge
from mmaccel.merging.moviechat import MovieChat
from mmaccel.merging.moviechat_memory import MovieChatMemory
from mmaccel.merging.mustdrop import MustDropMerge
from mmaccel.merging.progressive_pool import ProgressivePool
from mmaccel.merging.prunevid import PruneVidMerge
from mmaccel.merging.qg_vtc import QGVTC
from mmaccel.merging.restore import RestoreMerge
from mmaccel.merging.spacetime import SpaceTime
from mmaccel.merging.stc import StcPruner
from mmaccel.merging.streamdvc import StreamDvc
from mmaccel.merging.streamingtom_ctr import StreamingTOMReduction
from mmaccel.merging.streamvln import StreamVln
from mmaccel.merging.tempme import TempMe
from mmaccel.merging.vcast import VCAST
from mmaccel.merging.vflowopt import VFlowOptMerge
from mmaccel.merging.vidcom2 import VidCom2
from mmaccel.merging.vtm import Vtm
from mmaccel.method import ProjectorMethod, TokenBatch, TokenMethod

# checked by test_they_are_known_by_name
METHODS: list[TokenMethod] = [
    VFlowOptMerge(cell=2.5),
    QGVTC(),
    AimMerge(),
    ApETMerge(),
    CenterClip(),
    CenterClip(frames=3, distance="cosine", aggregate="mean"),
    Evad(),
    Everest(),
    Evs(),
    DyCokeTTM(),
    DyCokeTTM().by("official"),
    FastVID(),
    FastVID(segments=3, tau=-1.0, merged=0.8, stride=2, query="all"),
    FlashVIDMerge(),
    ForestPrune(),
    FreeVideoLlm(),
    FreeVideoLlm(slow=1, middle=2, roi=0.3, fast=0.0, change=True),
    HoliTomMerge(),
    HoliTomMerge(tau=0.2, contextual=0.5, beta=None),
    HoliTomMerge().by("official"),
    KiToke(),
    KiToke(bandwidth=0.3),
    LongVlm(),
    LongVlm(frames=2, heads=1),
    METokMerge(),
    EarlyTomTokens(),
    MovieChat(),
    MovieChat().by("official"),
    MovieChatMemory(short=3, merge=1),
    MovieChatMemory(short=3),
    MustDropMerge(threshold=2.0, window=2),
    ProgressivePool(),
    ProgressivePool(group=3, detail=2),
    PruneVidMerge(small=0),
    PruneVidMerge(tau=0.1, scenes=0.5, neighbours=2, small=0),
    RestoreMerge(),
    SpaceTime(),
    SpaceTime(change=0.5),
    StcPruner(),
    StcPruner(frames=3).by("official"),
    StreamDvc(),
    StreamingTOMReduction(),
    StreamDvc(iterations=3),
    StreamDvc(neighbours=True),
    StreamVln(),
    StreamVln(recent=2, history=3),
    TempMe(),
    TempMe(joins=(3,)),
    VCAST(),
    VidCom2(),
    VidCom2(temperature=1.0),
    Vtm(),
    Vtm(targets="centre"),
    Vtm(targets="motion"),
]
named = pytest.mark.parametrize("method", METHODS, ids=repr)
NAMES = [*dict.fromkeys(method.name for method in METHODS)]


@pytest.mark.full
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


@pytest.mark.full
@named
def test_weights_sum_to_one_and_mass_stays(method: TokenMethod) -> None:
    tokens = clips([unit for unit in UNITS if not unit[1]])
    for share in (0.01, 0.2, 0.6):
        made = method.reduce(tokens, (tokens.valid.sum(1) * share).long().clamp(min=1))
        torch.testing.assert_close(dense(made).sum(2), made.kept.double(), rtol=0, atol=1e-6)
        if method.conserves_mass:
            assert torch.equal(made.mass().sum(1), tokens.valid.sum(1).float())


@pytest.mark.full
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
@pytest.mark.parametrize(
    "family", few(["llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl"], ["llava_onevision", "qwen3_vl"])
)
def test_every_method_in_a_model(family: str) -> None:
    tiny, feed = zoo.model(family), zoo.inputs(family, "video", batch=2)
    pictures = zoo.inputs(family, "uneven")
    for name in [*NAMES, "pitome"]:
        with accelerated(tiny, name, retain=0.5, processor=zoo.processor(family)):
            out = tiny.generate(**feed, max_new_tokens=2, do_sample=False)
            assert out.shape[1] == feed["input_ids"].shape[1] + 2
            stage = tiny.mmaccel.stats()["stages"][0]
            assert 0 < stage["tokens_kept"] < stage["tokens_in"]
            if stage["resolved"] is not None and mmaccel.get_method(name).budget == "exact":
                assert stage["tokens_kept"] == stage["resolved"]
            tiny(**pictures)
            assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: CenterClip(frames=0),
        lambda: CenterClip(distance="manhattan"),  # type: ignore[arg-type]
        lambda: HoliTomMerge(contextual=2.0),
        lambda: HoliTomMerge(layers=()),
        lambda: PiToMe(matching="image"),  # type: ignore[arg-type]
        lambda: PiToMe(matching="text", margin=1.0),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()


def test_they_are_known_by_name() -> None:
    """All that merge over the pictures and clips of a prompt; those that merge over its segments are in test_methods, and over
    rows with sounds in test_sounds."""
    own = {name for name, kind in synthetic.offered(ProjectorMethod).items() if "mmaccel.merging." in kind.__module__}
    assert set(NAMES) == {name for name in own if mmaccel.get_method(name).unit not in ("segment", "row")}
    assert "pitome" in mmaccel.methods()
