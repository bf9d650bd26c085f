"""Selectors between the encoder and the language model: what each promises beyond the laws of all methods."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zoo
from test_methods import dense
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerated
from mmaccel.method import TokenBatch, TokenMethod
from mmaccel.pruning import _scores
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
    for module in (_scores, mmaccel.pruning.prumerge):
        monkeypatch.setattr(module, "BLOCK", 700)
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
def tiled(h: int, w: int, hot: list[tuple[int, int]], side: int = 4) -> TokenBatch:
    """A base image whose ``hot`` cells have early attention, and a stitched grid of ``h`` x ``w`` cells."""
    tokens = batch_of([[(1, side, side, False), (1, h, w, True)]])
    early = torch.zeros(tokens.valid.shape[1])
    early[[r * side + c for r, c in hot]] = 1.0
    late = tokens.signals["cls_attention"][:, 1]
    return replace(tokens, signals={"cls_attention": torch.stack([early[None], late], 1)})


def by_quadrant(kept: Tensor, tokens: TokenBatch, rows: int, cols: int, top: int = 0, left: int = 0) -> list[int]:
    """Kept tokens of the base image, and of every tile of side 4 in reading order."""
    cell, segment = tokens.cells[0], tokens.segment[0]
    tile = (cell[:, 1] + top) // 4 * cols + (cell[:, 2] + left) // 4
    mine = (segment == 1) & (cell >= 0).all(-1) & kept[0]
    return [int(kept[0][segment == 0].sum())] + [int((mine & (tile == i)).sum()) for i in range(rows * cols)]


def test_hired_gives_to_the_tile_that_covers_what_is_looked_at() -> None:
    right = [(r, c) for r in (0, 1) for c in (2, 3)]
    tokens = tiled(8, 8, right)
    # alpha 0.75 marks a quarter of the 16 base tokens: exactly the upper right quadrant
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([12]))
    assert by_quadrant(made.kept, tokens, 2, 2) == [9, 0, 3, 0, 0]
    # the bands of the program are rows of the base image
    bands = HiRED(alpha=0.75, layout="official_bands").reduce(tokens, torch.tensor([12]))
    assert by_quadrant(bands.kept, tokens, 2, 2) == [9, 1, 1, 0, 0]
    late = tokens.signals["cls_attention"][0, 1]
    base = tokens.segment[0] == 0
    assert slots(made.kept[0] & base) == sorted(late[base].argsort(descending=True)[:9].tolist())


def test_hired_knows_where_the_padding_was() -> None:
    # 6 of 8 rows are left after unpadding, one of padding on each side: the upper tiles hold rows 0 to 2
    tokens = tiled(6, 8, [(r, c) for r in (0, 1) for c in (0, 1)])
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([16]))
    assert by_quadrant(made.kept, tokens, 2, 2, top=1) == [12, 4, 0, 0, 0]
    # more than the tile holds goes to the other tiles
    made = HiRED(alpha=0.75).reduce(tokens, torch.tensor([64]))
    kept = by_quadrant(made.kept, tokens, 2, 2, top=1)
    assert kept[:2] == [16, 12] and sum(kept) == 64


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
        budget = mmaccel.budget.resolve(0.3, size)
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
