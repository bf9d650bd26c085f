"""Selectors between the encoder and the language model: what each promises beyond the laws of all methods."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest
import torch
import zoo
from safetensors.torch import save_file
from test_methods import dense
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerated
from mmaccel.core.budget import apportion, resolve
from mmaccel.core.layout import Layout
from mmaccel.families import family_of
from mmaccel.method import TokenBatch, TokenMethod
from mmaccel.pruning import prumerge
from mmaccel.pruning.cdpruner import CDPruner, conditional_diverse, mean_cosine, rescaled
from mmaccel.pruning.fopru import FoPru
from mmaccel.pruning.hired import HiRED
from mmaccel.pruning.prumerge import PruMerge, PruMergePlus, outliers
from mmaccel.pruning.visionzip import VisionZip, strided
from mmaccel.pruning.vispruner import VisPruner, drop_similar
from mmaccel.pruning.vtc_cls import VtcCls

METHODS = [
    CDPruner(),
    FoPru(),
    FoPru(strategy="row"),
    HiRED(),
    HiRED(layout="official_bands", alpha=0.3),
    PruMerge(),
    PruMerge(adaptive=False, query="all", neighbours=3),
    PruMergePlus(),
    PruMergePlus(adaptive=False),
    VisionZip(),
    VisionZip(contextual=3, query="all", weights="mean"),
    VisPruner(),
    VisPruner(important=0.0, step=3, query="all"),
]
named = pytest.mark.parametrize("method", METHODS, ids=repr)
NAMES = ("cdpruner", "fopru", "hired", "prumerge", "prumerge-plus", "visionzip", "vispruner")

#: segments (t, h, w, newlines) of every unit: images, a clip, a base image with stitched tiles, a unit of one token
UNITS = [
    [(1, 6, 6, False)],
    [(2, 3, 4, False)],
    [(1, 4, 4, False), (1, 8, 6, True)],
    [(1, 1, 1, False)],
    [(1, 3, 3, False), (1, 3, 3, False), (1, 3, 3, False)],
    [(1, 4, 5, True)],
]
COUNTS = torch.tensor([9, 5, 21, 1, 10, 7])


def batch_of(units=UNITS, seed: int = 0, width: int = 12) -> TokenBatch:
    random = torch.Generator().manual_seed(seed)
    cells, segments = [], []
    for unit in units:
        mine = [
            (i, (f, r, c) if c < w else (-1, -1, -1))
            for i, (t, h, w, newline) in enumerate(unit)
            for f in range(t)
            for r in range(h)
            for c in range(w + newline)
        ]
        segments.append(torch.tensor([i for i, _ in mine]))
        cells.append(torch.tensor([cell for _, cell in mine]))
    n = max(map(len, segments))
    cell = torch.stack([torch.cat([c, c.new_full((n - len(c), 3), -1)]) for c in cells])
    segment = torch.stack([torch.cat([s, s.new_full((n - len(s),), -1)]) for s in segments])
    blank = (cell < 0).any(-1)[:, None]

    def noise(*shape: int) -> Tensor:
        # row by row, so that a unit has the same numbers in any batch
        return torch.stack([torch.randn(*shape, generator=random) for _ in units])

    attention = (2 * noise(2, n)).softmax(-1).masked_fill(blank, torch.nan)
    vectors = {name: noise(1, n, 6).masked_fill(blank[..., None], torch.nan) for name in ("keys", "features")}
    return TokenBatch(
        features=noise(n, width),
        valid=segment >= 0,
        cells=cell,
        grid=torch.tensor([[max(s[i] for s in unit) for i in range(3)] for unit in units]),
        segment=segment,
        question=noise(5, width),
        question_valid=torch.arange(5) < torch.arange(len(units))[:, None],
        signals={"cls_attention": attention, "received_attention": attention.flip(1), **vectors},
    )


def row_of(tokens: TokenBatch, row: int) -> TokenBatch:
    n, one = int(tokens.valid[row].sum()), slice(row, row + 1)
    assert tokens.question is not None and tokens.question_valid is not None
    return TokenBatch(
        features=tokens.features[one, :n],
        valid=tokens.valid[one, :n],
        cells=tokens.cells[one, :n],
        grid=tokens.grid[one],
        segment=tokens.segment[one, :n],
        tile=tokens.tile[one, :n],
        tiles=tokens.tiles[one],
        question=tokens.question[one],
        question_valid=tokens.question_valid[one],
        signals={name: value[one, :, :n] for name, value in tokens.signals.items()},
    )


def slots(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


# --- all of them ------------------------------------------------------------------------------------------------------
@named
def test_budgets(method: TokenMethod) -> None:
    tokens = batch_of()
    sizes = tokens.valid.sum(1)
    for share in (0.0, 0.01, 0.2, 0.5, 0.83, 0.99, 1.0):
        count = (sizes * share).long().clamp(min=1)
        made = method.reduce(tokens, count)
        kept = made.kept.sum(1)
        assert not (made.kept & ~tokens.valid).any() and (kept >= 1).all() and (kept <= count).all()
        # the program's bands leave some unspent, and an adaptive choice may want less
        if getattr(method, "layout", "") != "official_bands" and not getattr(method, "adaptive", False):
            assert torch.equal(kept, count)
        out = made.apply(tokens.features)
        assert not out.isnan().any() and not dense(made).isnan().any()


@named
def test_whole_budget_keeps_everything(method: TokenMethod) -> None:
    tokens = batch_of()
    made = method.reduce(tokens, tokens.valid.sum(1))
    if not getattr(method, "adaptive", False):
        assert made.is_identity
        assert torch.equal(made.apply(tokens.features), tokens.features * tokens.valid[..., None])


@named
def test_row_of_a_batch_is_the_row_alone(method: TokenMethod) -> None:
    tokens = batch_of()
    together = method.reduce(tokens, COUNTS)
    for row in range(len(COUNTS)):
        alone = method.reduce(row_of(tokens, row), COUNTS[row : row + 1])
        n = alone.kept.shape[1]
        assert torch.equal(together.kept[row, :n], alone.kept[0]) and not together.kept[row, n:].any()
        assert torch.equal(dense(together)[row, :n, :n], dense(alone)[0])


@named
def test_repeats_itself_and_leaves_inputs_alone(method: TokenMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, untouched = batch_of(), batch_of()
    first = method.reduce(tokens, COUNTS)
    # blocks of a few rows give the same
    monkeypatch.setattr(prumerge, "BLOCK", 700)
    second = method.reduce(tokens, COUNTS)
    assert torch.equal(first.kept, second.kept) and torch.equal(dense(first), dense(second))
    assert torch.equal(tokens.features, untouched.features)
    assert all(torch.equal(v.nan_to_num(), untouched.signals[k].nan_to_num()) for k, v in tokens.signals.items())


@named
def test_half_precision_and_empty_budgets(method: TokenMethod) -> None:
    tokens = batch_of()
    tokens = replace(tokens, features=tokens.features.bfloat16())
    made = method.reduce(tokens, torch.tensor([6, 0, 9, 1, 0, 4]))
    assert torch.equal(made.kept.any(1), torch.tensor([True, False, True, True, False, True]))
    assert made.apply(tokens.features).dtype == torch.bfloat16


@named
def test_equal_tokens_and_no_sources(method: TokenMethod) -> None:
    """Flat scores favour the lower slots; units that the tower says nothing about still meet the budget."""
    tokens = batch_of([[(1, 4, 4, False)]])
    flat = {name: torch.ones_like(value) for name, value in tokens.signals.items()}
    same = replace(tokens, features=torch.ones_like(tokens.features), signals=flat)
    kept = method.reduce(same, torch.tensor([5])).kept[0]
    # VisPruner removes the first of equals, as its program does
    assert 1 <= int(kept.sum()) <= 5 and (kept[0] or getattr(method, "important", 1.0) == 0.0)
    lost = {name: torch.full_like(value, torch.nan) for name, value in tokens.signals.items()}
    made = method.reduce(replace(tokens, signals=lost), torch.tensor([5]))
    assert int(made.kept.sum()) == 5 or getattr(method, "layout", "") == "official_bands"
    assert not made.apply(tokens.features).isnan().any()


def test_they_are_registered_with_the_papers_defaults() -> None:
    for name in NAMES:
        cls = mmaccel.method(name)
        assert cls.name == name and cls.paper and mmaccel.recipe(name).build()
    assert mmaccel.recipe("hired").retain == 0.2 and mmaccel.recipe("prumerge").retain == 1.0
    assert HiRED().official_count(0.29, 100) == 28 and FoPru().official_count(0.29, 100) == 28
    assert PruMerge().official_count(0.125, 576) == 73
    # whole rows where the picture is one grid: half of 5 rows rounds to even
    rows = FoPru(strategy="row")
    assert rows.official_count(0.5, 20, (1, 5, 4)) == 8 and rows.official_count(0.01, 20, (1, 5, 4)) == 4
    assert rows.official_count(0.5, 25, (1, 5, 4)) == 12 == rows.official_count(0.5, 25)
    assert FoPru().official_count(0.5, 25, (1, 5, 5)) == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: HiRED(layout="bands"),  # type: ignore[arg-type]
        lambda: HiRED(alpha=1.5),
        lambda: FoPru(strategy="column"),  # type: ignore[arg-type]
        lambda: FoPru(query="text"),  # type: ignore[arg-type]
        lambda: VisionZip(contextual=1.5),
        lambda: VisionZip(contextual=-1),
        lambda: VisionZip(weights="sum"),  # type: ignore[arg-type]
        lambda: VisPruner(important=-0.1),
        lambda: VisPruner(step=0),
        lambda: PruMerge(neighbours=-1),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()


# --- HiRED ------------------------------------------------------------------------------------------------------------
def tiled(h: int, w: int, hot: list[tuple[int, int]], top: int = 0, side: int = 4) -> TokenBatch:
    """A base image whose ``hot`` cells have early attention, and a stitched grid of ``h`` x ``w`` cells, before which (and
    behind which) ``top`` rows of padding were cut off."""
    tokens = batch_of([[(1, side, side, False), (1, h, w, True)]])
    early = torch.zeros(tokens.valid.shape[1])
    early[[r * side + c for r, c in hot]] = 1.0
    late = tokens.signals["cls_attention"][:, 1]
    row, col = tokens.cells[..., 1], tokens.cells[..., 2]
    rows, cols = (h + 2 * top) // side, w // side
    tile = (1 + (row + top) // side * cols + col // side).masked_fill(tokens.segment == 0, 0)
    return replace(
        tokens,
        tile=tile.masked_fill(row < 0, 0),
        tiles=torch.tensor([1 + rows * cols]),
        signals={"cls_attention": torch.stack([early[None], late], 1)},
    )


def by_tile(kept: Tensor, tokens: TokenBatch) -> list[int]:
    """Kept tokens of the base image, and of every tile in reading order."""
    mine = kept[0] & (tokens.cells[0] >= 0).all(-1)
    return [int((mine & (tokens.tile[0] == i)).sum()) for i in range(int(tokens.tiles))]


def test_hired_gives_to_the_tile_that_covers_what_is_looked_at() -> None:
    right = [(r, c) for r in (0, 1) for c in (2, 3)]
    tokens = tiled(8, 8, right)
    # alpha 0.75 marks a quarter of the 16 base tokens: exactly the upper right quadrant
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([12]))
    assert by_tile(made.kept, tokens) == [9, 0, 3, 0, 0]
    # the bands of the program are rows of the base image
    bands = HiRED(alpha=0.75, layout="official_bands").reduce(tokens, torch.tensor([12]))
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
    bands = HiRED(alpha=0.75, layout="official_bands").reduce(tokens, torch.tensor([16]))
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
    for layout in ("grid2d", "official_bands"):
        assert torch.equal(HiRED(layout=layout).reduce(tokens, torch.tensor([7])).kept, plain.kept)
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
    """``official_unsplit`` sees the products of whole queries and keys of the tower's last layer."""
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
    with accelerated(tiny, "prumerge", heads="official_unsplit"):
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
            mmaccel.accelerate_vlm(model(family), "prumerge", heads="official_unsplit", query=query)


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


# --- CDPruner ---------------------------------------------------------------------------------------------------------
def test_cdpruner_picks_the_largest_determinant() -> None:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(24, 10, generator=random, dtype=torch.float64)
    quality = torch.rand(24, generator=random, dtype=torch.float64) + 0.1
    unit = x / x.norm(dim=1, keepdim=True)
    kernel = quality[:, None] * (unit @ unit.T) * quality
    picks: list[int] = []
    for _ in range(8):
        others = [i for i in range(24) if i not in picks]
        picks.append(max(others, key=lambda i: float(torch.det(kernel[[*picks, i]][:, [*picks, i]]))))
    all_ = torch.ones(1, 24, dtype=torch.bool)
    ours = conditional_diverse(x.float()[None], quality.float()[None], all_, torch.tensor([8]))
    assert slots(ours[0]) == sorted(picks)


def test_cdpruner_goes_on_beyond_the_rank() -> None:
    copies = torch.eye(4)[torch.arange(12) % 4][None]
    relevance = torch.linspace(0.1, 1.0, 12)[None]
    all_ = torch.ones(1, 12, dtype=torch.bool)
    kept = [slots(conditional_diverse(copies, relevance, all_, torch.tensor([k]))[0]) for k in range(13)]
    assert kept[4] == [8, 9, 10, 11] and kept[6] == [6, 7, 8, 9, 10, 11] and kept[12] == list(range(12))
    flat = conditional_diverse(torch.randn(1, 40, 8), torch.ones(1, 40), torch.ones(1, 40) > 0, torch.tensor([30]))
    assert int(flat.sum()) == 30
    zero = conditional_diverse(torch.zeros(1, 5, 3), torch.zeros(1, 5), torch.ones(1, 5) > 0, torch.tensor([2]))
    assert slots(zero[0]) == [0, 1]


def test_cdpruner_follows_the_question() -> None:
    tokens = batch_of([[(1, 6, 6, False)]])
    features = torch.randn(1, 36, 12, generator=torch.Generator().manual_seed(1))
    asked = replace(tokens, features=features, question=features[:, 7:8], question_valid=torch.ones(1, 1) > 0)
    assert CDPruner().reduce(asked, torch.tensor([1])).kept[0, 7]
    away = replace(asked, question=-features[:, 7:8])
    assert not CDPruner().reduce(away, torch.tensor([30])).kept[0, 7]
    # padding of the question says nothing, and no question at all is plain diversity
    padded = replace(asked, question=torch.cat([features[:, 7:8], features[:, :3]], 1))
    padded = replace(padded, question_valid=torch.tensor([[True, False, False, False]]))
    count = torch.tensor([9])
    assert torch.equal(CDPruner().reduce(padded, count).kept, CDPruner().reduce(asked, count).kept)
    bare = replace(asked, question=None, question_valid=None)
    silent = replace(asked, question_valid=torch.zeros(1, 1) > 0)
    assert torch.equal(CDPruner().reduce(bare, count).kept, CDPruner().reduce(silent, count).kept)
    assert mean_cosine(features, features[:, 7:8], torch.ones(1, 1) > 0).argmax() == 7
    q = rescaled(torch.tensor([[3.0, 1.0, 2.0, 99.0]]), torch.tensor([[True, True, True, False]]))
    torch.testing.assert_close(q[0, :3], torch.tensor([1.0, 0.0, 0.5]), atol=1e-5, rtol=0)


# --- on models --------------------------------------------------------------------------------------------------------
@functools.cache
def model(family: str):
    return zoo.model(family)


#: methods that ask the CLS token, and what they are given where there is none (HiRED has no other way)
ASKS_CLS = {"hired": None, **dict.fromkeys(("prumerge", "prumerge-plus", "visionzip", "vispruner"), "all")}


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize("name", NAMES)
def test_on_models(family: str, name: str) -> None:
    tiny = model(family)
    if family == "qwen2_5_vl" and name in ASKS_CLS:
        options = {} if ASKS_CLS[name] is None else {"query": "cls"}
        with pytest.raises(UnsupportedError, match="CLS token, which the vision tower of qwen2_5_vl lacks"):
            mmaccel.accelerate_vlm(tiny, name, **options)
        if ASKS_CLS[name] is None:
            return
    feed = zoo.inputs(family, "uneven", batch=2)
    with accelerated(tiny, name, retain=0.3), torch.no_grad():
        out = tiny(**feed)
        layout, kept = tiny.mmaccel.layout, tiny.mmaccel.reduction.kept
        stats = tiny.mmaccel.stats()
    assert not out.logits[:, -1].isnan().any()
    total = 0
    for picture in {s.picture for s in layout.segments}:
        mine = [s for s in layout.segments if s.picture == picture]
        size, stays = sum(len(s.places) for s in mine), sum(int(kept[s.row, s.places].sum()) for s in mine)
        budget = resolve(0.3, size)
        assert 1 <= stays <= budget and (name.startswith("prumerge") or stays == budget)
        total += stays
    assert stats["stages"][0]["tokens_kept"] == total


def test_merged_values_reach_the_language_model() -> None:
    tiny, feed, seen = model("llava"), zoo.inputs("llava"), []
    handle = tiny.model.language_model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with accelerated(tiny, "visionzip", retain=8), torch.no_grad():
            tiny(**feed)
            made = tiny.mmaccel.reduction
        with torch.no_grad():
            tiny(**feed)
    finally:
        handle.remove()
    torch.testing.assert_close(seen[0], made.apply(seen[1]))
    assert made.links is not None


def test_cls_is_not_asked_where_there_is_none() -> None:
    siglip = SimpleNamespace(name="llava_onevision", has_cls=False)
    for kind in (VisionZip, VisPruner, PruMerge, PruMergePlus, FoPru):
        method = kind(query="cls")
        with pytest.raises(UnsupportedError, match="query='all'"):
            method.check(siglip)  # type: ignore[arg-type]
        replace(method, query="all").check(siglip)  # type: ignore[arg-type]
        if kind is not FoPru:
            fitted = kind().fit(siglip)  # type: ignore[arg-type]
            assert fitted.query == "all" and kind().fit(SimpleNamespace(has_cls=True)).query == "cls"  # type: ignore
    with pytest.raises(UnsupportedError, match="fopru"):
        HiRED().check(siglip)  # type: ignore[arg-type]


# --- CDPruner with CLIP's own text tower ------------------------------------------------------------------------------
def clip_folder(kind: str, path: Path, width: int) -> Path:
    """A tiny CLIP model with random weights, as transformers or open_clip store it, and the tokenizer of the tiny models."""
    words = zoo.tokenizer("llava")
    words.save_pretrained(path)
    if kind == "transformers":
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = {**size, "vocab_size": len(words), "max_position_embeddings": 8, "eos_token_id": words.eos_token_id}
        vision = {**size, "hidden_size": width, "image_size": 28, "patch_size": 14}
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(path)
        return path
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 28, "patch_size": 14, "width": width, "layers": 1, "head_width": width // 2},
        "text_cfg": {
            "context_length": 8,
            "vocab_size": len(words),
            "width": 32,
            "heads": 2,
            "layers": 2,
            "hf_tokenizer_name": "here",
        },
    }
    about = {"model_cfg": config, "preprocess_cfg": {"size": [28, 28]}}
    (path / "open_clip_config.json").write_text(json.dumps(about), encoding="utf-8")
    torch.manual_seed(0)
    made = open_clip.CLIP(**{**config, "vision_cfg": config["vision_cfg"], "text_cfg": config["text_cfg"]})
    save_file(made.state_dict(), path / "open_clip_model.safetensors")
    return path


def relevance_by_hand(kind: str, folder: Path, hidden: Tensor, question: str) -> Tensor:
    """Negated mean cosine of the patches ``hidden [n, width]`` and the pieces of the question, from the whole models."""
    words = zoo.tokenizer("llava")
    if kind == "transformers":
        clip = CLIPModel.from_pretrained(folder)
        ids = words(question)["input_ids"]
        pieces = [ids[i : i + 8] for i in range(0, len(ids), 8)]
        rows = torch.tensor([piece + [0] * (8 - len(piece)) for piece in pieces])
        mask = torch.tensor([[1] * len(piece) + [0] * (8 - len(piece)) for piece in pieces])
        text = clip.text_projection(clip.text_model(input_ids=rows, attention_mask=mask).pooler_output)
        patches = clip.visual_projection(clip.vision_model.post_layernorm(hidden))
    else:
        clip = open_clip.create_model(f"local-dir:{folder}")
        text = clip.encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")([question]))
        patches = clip.visual.ln_post(hidden) @ clip.visual.proj
    return -torch.cosine_similarity(patches[:, None], text[None], dim=-1).mean(1)


@torch.no_grad()
@pytest.mark.parametrize("negate", [True, False])
@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_cdpruner_with_a_text_tower(kind: str, negate: bool, tmp_path: Path) -> None:
    tiny, feed = model("llava"), zoo.inputs("llava", "image")
    folder = clip_folder(kind, tmp_path, tiny.config.vision_config.hidden_size)
    options = {"processor": zoo.processor("llava"), "retain": 0.3, "clip": str(folder), "negate": negate}
    with accelerated(tiny, "cdpruner", **options):
        tiny(**feed)
        made, notes = tiny.mmaccel.reduction.kept, tiny.mmaccel.stats()["notes"]
        tiny(**feed)
        assert tiny.mmaccel.stats()["notes"] == notes and len(notes) == 1 and str(folder) in notes[0]
    with accelerated(tiny, "cdpruner", retain=0.3):
        tiny(**feed)
        assert "language model itself" in tiny.mmaccel.stats()["notes"][0]
        assert not torch.equal(tiny.mmaccel.reduction.kept, made)

    visual = zoo.visual_mask("llava", tiny, feed["input_ids"])[0]
    last = int(visual.nonzero().max()) + 1
    assert "\nASSISTANT:" in zoo.tokenizer("llava").decode(feed["input_ids"][0, last:])
    question = zoo.QUESTION
    seen = tiny.model.vision_tower(feed["pixel_values"], output_hidden_states=True).hidden_states
    hidden = seen[tiny.config.vision_feature_layer][0, 1:]
    cosine = relevance_by_hand(kind, folder, hidden, question) * (1 if negate else -1)
    features = tiny.model.get_image_features(feed["pixel_values"]).pooler_output[0][None]
    everything = torch.ones(1, len(cosine), dtype=torch.bool)
    count = torch.tensor([int(len(cosine) * 0.3 + 0.5)])
    kept = conditional_diverse(features, rescaled(cosine[None], everything), everything, count)
    assert torch.equal(made[0, visual], kept[0])


def test_text_towers_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, processor = model("llava"), zoo.processor("llava")
    width = tiny.config.vision_config.hidden_size
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name, says in (
        ("nowhere", "is no folder; give the folder"),
        ("ViT-B-32:nothing", "cannot be loaded"),
        ("ViT-X-1:openai", "cannot be loaded"),
        (str(tmp_path / "empty"), "cannot be loaded"),
        (str(clip_folder("open_clip", tmp_path / "other", 2 * width)), f"of width {2 * width}, but that of this llava"),
    ):
        with pytest.raises(MmaccelError, match=says):
            mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=name)
        assert not mmaccel.is_accelerated(tiny)
    with pytest.raises(UnsupportedError, match="give processor="):
        mmaccel.accelerate_vlm(tiny, "cdpruner", clip=str(tmp_path / "other"))
    tiny.config.vision_config.save_pretrained(tmp_path / "empty")
    with pytest.raises(MmaccelError, match="clip= takes CLIP models"):
        mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(MmaccelError, match="mmaccel\\[clip\\]"):
        mmaccel.accelerate_vlm(tiny, "cdpruner", processor=processor, clip=str(tmp_path / "other"))


def test_words_are_the_first_stretch_between_special_tokens() -> None:
    words = zoo.tokenizer("llava")
    family = family_of(model("llava"), zoo.processor("llava"))
    end, plain = words.eos_token_id, words("what is it?", add_special_tokens=False)["input_ids"]
    blank = words(" ", add_special_tokens=False)["input_ids"]
    assert family.words(torch.tensor([end, *blank, end, *plain, end, *plain, *plain])) == "what is it?"
    assert family.words(torch.tensor([end])) == "" == family.words(torch.tensor([], dtype=torch.long))
