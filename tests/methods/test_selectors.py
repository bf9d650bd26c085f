"""Selectors one by one, against their definitions: HiRED, FoPru, VisionZip, VisPruner, PruMerge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from batches import dense
from laws.helpers import model
from tiled import COUNTS, batch_of, by_tile, slots, tiled
from torch import Tensor

import mmaccel
from mmaccel import UnsupportedError, accelerated
from mmaccel.core.budget import apportion
from mmaccel.core.layout import Layout
from mmaccel.families import family_of
from mmaccel.method import TokenBatch
from mmaccel.pruning.fopru import FoPru
from mmaccel.pruning.hired import HiRED
from mmaccel.pruning.prumerge import PruMerge, PruMergePlus, outliers
from mmaccel.pruning.visionzip import VisionZip, strided
from mmaccel.pruning.vispruner import VisPruner, drop_similar
from mmaccel.pruning.vtc_cls import VtcCls


# --- HiRED ------------------------------------------------------------------------------------------------------------
def test_hired_gives_to_the_tile_that_covers_what_is_looked_at() -> None:
    right = [(r, c) for r in (0, 1) for c in (2, 3)]
    tokens = tiled(8, 8, right)
    # alpha 0.75 marks a quarter of the 16 base tokens: exactly the upper right quadrant
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([12]))
    assert by_tile(made.kept, tokens) == [9, 0, 3, 0, 0]
    # the bands of the program are rows of the base image
    bands = HiRED(alpha=0.75).by("official").reduce(tokens, torch.tensor([12]))
    assert by_tile(bands.kept, tokens) == [9, 1, 1, 0, 0]
    late = tokens.signals["cls_attention"][0, 1]
    base = tokens.segment[0] == 0
    assert slots(made.kept[0] & base) == sorted(late[base].argsort(descending=True)[:9].tolist())


def test_hired_knows_where_the_padding_was() -> None:
    # 6 of 8 rows are left after unpadding, one of padding on each side: the upper tiles hold rows 0 to 2
    tokens = tiled(6, 8, [(r, c) for r in (0, 1) for c in (0, 1)], top=1)
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([16]))
    assert by_tile(made.kept, tokens) == [12, 4, 0, 0, 0]
    # more than the tile holds goes to the other tiles
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([64]))
    kept = by_tile(made.kept, tokens)
    assert kept[:2] == [16, 12] and sum(kept) == 64
    # of three tiles in a column the second covers the middle of the second of four rows
    tokens = tiled(12, 4, [(1, c) for c in range(4)])
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([16]))
    assert by_tile(made.kept, tokens) == [12, 0, 4, 0]
    # two bands of a tile and more were padding only: of eight tiles the middle four have tokens
    tokens = tiled(8, 8, [(r, c) for r in (2, 3) for c in (0, 1)], top=4)
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([12]))
    assert by_tile(made.kept, tokens) == [9, 0, 0, 0, 0, 3, 0, 0, 0]
    # the program counts bands for all eight: the fifth and the seventh, which has no token, share what the tiles get
    bands = HiRED(alpha=0.75).by("official").reduce(tokens, torch.tensor([16]))
    assert by_tile(bands.kept, tokens) == [12, 0, 0, 0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_tiles_are_those_of_the_model(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile is filled with its own number, and stitched by the model's own code; with a ``few`` shapes to choose from,
    tiles may hold nothing but padding."""
    tiny = model(name)
    if few:
        size = 4 * tiny.config.vision_config.image_size
        monkeypatch.setattr(tiny.config, "image_grid_pinpoints", [[size, size]])
    family = family_of(tiny)
    # so many tiles that nothing is resized
    next_ = name == "llava_next"
    how = {"vision_feature_select_strategy": "default"} if next_ else {"vision_aspect_ratio": "anyres_max_1000"}
    random = torch.Generator().manual_seed(0)
    side, newline = family.side, torch.full((1,), -5.0)
    seen = 0
    for height, width in (torch.rand(60, 2, generator=random) * 3 + 3).exp().long().tolist():
        picture, used = family.anyres((height, width), 0, None if next_ else 1000)
        if 0 in picture[1].grid:
            # so narrow that the model itself keeps nothing of the tiles
            continue
        number = torch.arange(used // side**2).float()[:, None, None].expand(-1, side**2, 1)
        packed = tiny.model.pack_image_features(
            [number], torch.tensor([[height, width]]), image_newline=newline, **how
        )[0][0][:, 0]
        layout = Layout.walk(
            torch.zeros(1, len(packed)), torch.ones(1, len(packed), dtype=torch.bool), [("image", 0, [picture])], "x"
        )
        units = layout.units("picture")
        theirs, places = units.tile[0].float(), units.places[0]
        assert torch.equal(torch.where(packed[places] < 0, -5.0, theirs), packed[places])
        # a newline goes with the tile before it
        lines = (packed < 0).nonzero()[:, 0]
        assert torch.equal(units.tile[0][lines], units.tile[0][lines - 1])
        assert int(units.tiles) == len(number)
        seen += len(number) > len(theirs.unique())
        apart = layout.units("tile")
        assert sorted(apart.places[apart.valid].tolist()) == sorted(places.tolist())
        for p in apart.places:
            own = packed[p[p >= 0]]
            assert len(own[own >= 0].unique()) == 1
    assert bool(seen) == few


@torch.no_grad()
def test_tiles_share_the_budget_by_what_is_left_of_them() -> None:
    tiny, feed = model("llava_next"), zoo.inputs("llava_next", "uneven")
    with accelerated(tiny, "visionzip", retain=0.4):
        tiny(**feed)
        kept, layout = tiny.mmaccel.reduction.kept, tiny.mmaccel.layout
        stage = tiny.mmaccel.stats()["stages"][0]
    units, found = layout.units("tile"), 0
    assert len(units.picture) > len(layout.segments)
    for picture in set(units.picture):
        mine = [i for i, p in enumerate(units.picture) if p == picture]
        sizes = units.valid.sum(1)[mine].tolist()
        stays = [int((kept[units.row[i], units.places[i].clamp(min=0)] & units.valid[i]).sum()) for i in mine]
        assert stays == apportion(int(sum(sizes) * 0.4 + 0.5), sizes)
        found += sum(stays)
    assert found == stage["tokens_kept"] == stage["resolved"]


def test_hired_on_one_tile_is_plain_attention_and_frames_share_evenly() -> None:
    tokens = batch_of([[(1, 6, 6, False)]])
    late = replace(tokens, signals={"cls_attention": tokens.signals["cls_attention"][:, 1:]})
    plain = VtcCls().reduce(late, torch.tensor([7]))
    for hired in (HiRED(), HiRED().by("official")):
        assert torch.equal(hired.reduce(tokens, torch.tensor([7])).kept, plain.kept)
    clip = batch_of([[(3, 4, 4, False)]])
    kept = HiRED().reduce(clip, torch.tensor([10])).kept[0]
    assert kept.reshape(3, 16).sum(1).tolist() == [4, 3, 3]


# --- FoPru ------------------------------------------------------------------------------------------------------------
def test_fopru_by_cls_is_vtc_cls_of_one_layer() -> None:
    tokens = batch_of()
    one = replace(tokens, signals={k: v[:, :1] for k, v in tokens.signals.items()})
    assert torch.equal(FoPru(query="cls").reduce(one, COUNTS).kept, VtcCls().reduce(one, COUNTS).kept)
    assert FoPru().taps()[0].kind == "received_attention" and FoPru(query="cls").taps()[0].kind == "cls_attention"


def test_fopru_takes_whole_rows_and_the_best_of_the_last() -> None:
    tokens = batch_of([[(1, 5, 4, True)]])
    score = tokens.signals["received_attention"][0, 0].reshape(5, 5)
    order = score[:, :4].mean(1).argsort(descending=True)
    kept = FoPru(strategy="row").reduce(tokens, torch.tensor([10])).kept[0].reshape(5, 5)
    assert kept[order[0]].tolist() == kept[order[1]].tolist() == [True] * 4 + [False]
    assert slots(kept[order[2]]) == sorted(score[order[2], :4].argsort(descending=True)[:2].tolist())
    assert not kept[order[3:]].any()


# --- VisionZip --------------------------------------------------------------------------------------------------------
def test_visionzip_splits_the_budget_and_documents_its_weights() -> None:
    tokens = batch_of([[(1, 8, 8, False)]])
    for weights, total in (("program", 2.0), ("mean", 1.0)):
        made = VisionZip(weights=weights).reduce(tokens, torch.tensor([32]))
        sums, members = dense(made)[0].sum(1), (dense(made)[0] != 0).sum(1)
        # 10 of 64 are contextual: 5 of 32
        assert int((members > 1).sum()) == 5
        torch.testing.assert_close(sums[members > 1], torch.full((5,), total, dtype=torch.float64))
        assert (sums[members == 1] == 1).all()
        assert int(members.sum()) == 64, "every token goes somewhere"
        dominant = VtcCls().reduce(
            replace(tokens, signals={"cls_attention": tokens.signals["cls_attention"][:, :1]}), torch.tensor([27])
        )
        assert torch.equal(made.kept[0] & (members <= 1), dominant.kept[0])
    assert VisionZip(contextual=0).reduce(tokens, torch.tensor([32])).links is None
    # the mean of the pictures' tokens is a mean; the program's is longer
    mean = VisionZip(weights="mean", contextual=32).reduce(tokens, torch.tensor([32]))
    assert mean.mass().sum() == 64


def test_visionzip_members_go_to_the_most_similar_target() -> None:
    tokens = batch_of([[(1, 6, 6, False)]])
    made = VisionZip(contextual=4).reduce(tokens, torch.tensor([10]))
    link = dense(made)[0] != 0
    target = slots(link.sum(1) > 1)
    key = torch.nn.functional.normalize(tokens.signals["keys"][0, 0], dim=-1)
    for source in slots(~made.kept[0]):
        into = slots(link[:, source])
        assert into == [target[int((key[source] @ key[target].T).argmax())]]


def test_strided_targets() -> None:
    among = torch.tensor([[True] * 10, [True, False] * 5, [False] * 10])
    picked = strided(among, torch.tensor([3, 2, 0]))
    assert [slots(row) for row in picked] == [[0, 3, 6], [0, 4], []]


# --- VisPruner --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "left", "step"), [(20, 6, 4), (21, 6, 4), (33, 1, 8), (9, 2, 100), (8, 8, 3)])
def test_vispruner_matches_the_definition(size: int, left: int, step: int) -> None:
    random = torch.Generator().manual_seed(size)
    x, score = torch.randn(size, 5, generator=random), torch.rand(size, generator=random)
    unit = x / x.norm(dim=1, keepdim=True)
    rest = sorted(range(size), key=lambda i: -score[i])
    while len(rest) > left:
        even, odd = rest[0::2], rest[1::2]
        near = {i: max((float(unit[i] @ unit[j]) for j in odd), default=-9.0) for i in even}
        even.sort(key=lambda i: -near[i])
        rest = even[min(step, len(rest) - left, len(even)) :] + odd
    all_, many = torch.ones(1, size, dtype=torch.bool), torch.tensor([step])
    assert slots(drop_similar(x[None], score[None], all_, torch.tensor([left]), many)[0]) == sorted(rest)


def test_vispruner_splits_the_budget() -> None:
    tokens = batch_of([[(1, 6, 6, False)]])
    best = tokens.signals["cls_attention"][0, 0].argsort(descending=True)
    kept = VisPruner(important=0.75).reduce(tokens, torch.tensor([10])).kept[0]
    assert kept[best[:7]].all() and int(kept.sum()) == 10
    every = VisPruner(important=1.0).reduce(tokens, torch.tensor([10])).kept[0]
    assert slots(every) == sorted(best[:10].tolist())
    # of exact copies one stays, as long as there is something else
    tower = torch.eye(6)[torch.arange(36) % 6][None, None]
    copies = replace(tokens, signals={**tokens.signals, "features": tower})
    kept = VisPruner(important=0.0, step=1).reduce(copies, torch.tensor([12])).kept[0]
    assert len({i % 6 for i in slots(kept)}) >= 5


# --- PruMerge ---------------------------------------------------------------------------------------------------------
def test_prumerge_matches_the_definition() -> None:
    tokens = batch_of([[(1, 8, 8, False)]])
    score, key = tokens.signals["cls_attention"][0, 0], tokens.signals["keys"][0, 0]
    low, high = score.quantile(0.25), score.quantile(0.75)
    chosen = score > high + 1.5 * (high - low)
    assert 2 <= int(chosen.sum()) < 20
    made = PruMerge(neighbours=5).reduce(tokens, torch.tensor([64]))
    added = int(score.masked_fill(chosen, -1).argmax())
    assert slots(made.kept[0]) == sorted([*slots(chosen), added])
    similar = torch.cosine_similarity(key[:, None], key[None], dim=-1).fill_diagonal_(-9)
    x = tokens.features[0]
    expected = x.clone()
    for i in slots(chosen):
        near = similar[i].argsort(descending=True)[:5]
        expected[i] = x[i] + (score[near, None] * x[near]).sum(0)
    expected[added] = (score[~chosen, None] * x[~chosen]).sum(0)
    torch.testing.assert_close(made.apply(tokens.features)[0], expected[made.kept[0]])


@torch.no_grad()
def test_prumerge_without_splitting_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' variant sees the products of whole queries and keys of the tower's last layer."""
    tiny, feed, seen = model("llava"), zoo.inputs("llava", "images"), {}
    layer = tiny.model.vision_tower.encoder.layers[-1].self_attn

    def watch(method: PruMerge, tokens: TokenBatch, count: Tensor) -> object:
        seen["signals"] = tokens.signals
        return prumerge_reduce(method, tokens, count)

    prumerge_reduce = PruMerge.reduce
    monkeypatch.setattr(PruMerge, "reduce", watch)
    hooks = [
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: seen.update({name: out}))
        for name in ("q_proj", "k_proj")
    ]
    with accelerated(tiny, "prumerge", variant="official"):
        tiny(**feed)
        assert 0 < tiny.mmaccel.stats()["visual_tokens_kept"] < tiny.mmaccel.stats()["visual_tokens"]
    for hook in hooks:
        hook.remove()
    query, key = seen["q_proj"][:, 0], seen["k_proj"]
    attention = torch.einsum("nd,ntd->nt", query, key).div(query.shape[1] ** 0.5).softmax(1)[:, 1:]
    torch.testing.assert_close(seen["signals"]["cls_attention_unsplit"][:, 0], attention)
    torch.testing.assert_close(seen["signals"]["keys_unsplit"][:, 0], key[:, 1:])
    for family, query, says in (("llava", "all", "query='all' does not"), ("qwen2_5_vl", "auto", "qwen2_5_vl lacks")):
        with pytest.raises(UnsupportedError, match=says):
            mmaccel.accelerate_vlm(model(family), "prumerge", variant="official", query=query)


def test_prumerge_retain_is_a_ceiling() -> None:
    tokens = batch_of([[(1, 8, 8, False)]])
    free = int(PruMerge().reduce(tokens, torch.tensor([64])).kept.sum())
    for method in (PruMerge(), PruMergePlus()):
        whole = int(method.reduce(tokens, torch.tensor([64])).kept.sum())
        for ceiling in (2, free - 1, free, free + 1, 63):
            assert int(method.reduce(tokens, torch.tensor([ceiling])).kept.sum()) == min(ceiling, whole)
    assert whole > 2 * free
    flat = replace(tokens, signals={k: torch.ones_like(v) for k, v in tokens.signals.items()})
    assert int(outliers(flat.signals["cls_attention"][:, 0])) == 1
    assert slots(PruMerge().reduce(flat, torch.tensor([64])).kept[0]) == [0, 1]


def test_prumerge_plus_spreads_evenly() -> None:
    score, seen = torch.zeros(1, 41), torch.ones(1, 41, dtype=torch.bool)
    kept = slots(PruMergePlus(adaptive=False).fixed(score, seen, torch.tensor([9]))[0])
    # a quarter goes to attention, where the lowest slots win
    assert kept[:3] == [0, 1, 2] and len(kept) == 9
    gaps = torch.tensor(kept[3:]).diff()
    assert int(gaps.max() - gaps.min()) <= 1
