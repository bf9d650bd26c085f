"""What every method promises, and the algebra of reductions and budgets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import UNITS, batch_of, check_rows_alone, dense
from PIL import Image
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, UnsupportedError
from mmaccel.core import budget
from mmaccel.core.masks import leftmost
from mmaccel.core.reduction import Links, Reduction, top_mask
from mmaccel.encoders.tome import ToMe, bipartite_soft_matching
from mmaccel.frames.resize import Resize
from mmaccel.kv.codecs import Codec
from mmaccel.kv.policies.snapkv import SnapKV
from mmaccel.kv.policies.streaming_llm import StreamingLLM
from mmaccel.layers.fastv import FastV
from mmaccel.media.draw import overlay
from mmaccel.merging.pool import Pool, window_grid
from mmaccel.method import (
    EncoderMethod,
    EncoderTokens,
    ExpertMethod,
    FrameMergingMethod,
    FramesMethod,
    KeyBatch,
    PatchMethod,
    Policy,
    RebuildingMethod,
    RetracingMethod,
    ReuseMethod,
    TokenMethod,
)
from mmaccel.pruning.attention_received import AttentionReceived
from mmaccel.pruning.divprune import DivPrune, max_min_diverse
from mmaccel.pruning.random import Random
from mmaccel.pruning.uniform import Uniform
from mmaccel.pruning.vtc_cls import VtcCls

# by choice: short ones of every kind; those of the other rooms have files of their own, and all meet test_every_method.py
TOKEN_METHODS = [Random(), Random(seed=3), Uniform(), DivPrune(), VtcCls(), AttentionReceived(), FastV(), Pool()]
named = pytest.mark.parametrize("method", TOKEN_METHODS, ids=repr)


def random_merge(valid: Tensor, random: torch.Generator, drop: bool = False, weight: bool = False) -> Reduction:
    """Every token flows into one of a few kept ones, or nowhere."""
    n = valid.shape[1]
    heads = torch.rand(valid.shape, generator=random).masked_fill(~valid, -1).argsort(1, descending=True)[:, :3]
    heads = torch.where(valid.gather(1, heads), heads, heads[:, :1])
    target = heads.gather(1, torch.randint(3, valid.shape, generator=random))
    target = target.scatter(1, heads, heads)
    if drop:
        lost = torch.rand(valid.shape, generator=random) < 0.3
        target = torch.where(lost & (target != torch.arange(n)), -1, target)
    return Reduction.merge(target, valid, torch.rand(valid.shape, generator=random) + 0.1 if weight else None)


# --- every token method -----------------------------------------------------------------------------------------------
@named
def test_meets_its_budget(method: TokenMethod) -> None:
    tokens = batch_of()
    sizes = tokens.valid.sum(1)
    for share in (0.01, 0.3, 0.5, 0.99, 1.0):
        count = (sizes * share).long().clamp(min=1)
        reduction = method.reduce(tokens, count)
        before, after = reduction.counts()
        assert torch.equal(before, sizes)
        assert not (reduction.kept & ~tokens.valid).any()
        assert (after >= 1).all()
        assert torch.equal(after, count) if method.budget == "exact" else (after <= count).all()


@named
def test_whole_budget_keeps_everything(method: TokenMethod) -> None:
    tokens = batch_of()
    reduction = method.reduce(tokens, tokens.valid.sum(1))
    assert torch.equal(reduction.kept, tokens.valid)
    assert torch.equal(reduction.apply(tokens.features), tokens.features * tokens.valid[..., None])


@named
def test_row_of_a_batch_is_the_row_alone(method: TokenMethod) -> None:
    tokens = batch_of()
    count = torch.tensor([9, 5, 7, 1, 30])
    check_rows_alone(method, tokens, count)


@named
def test_same_inputs_same_reduction_and_inputs_left_alone(method: TokenMethod) -> None:
    tokens, untouched = batch_of(), batch_of()
    count = torch.tensor([9, 5, 7, 1, 11])
    first, second = method.reduce(tokens, count), method.reduce(tokens, count)
    assert torch.equal(first.kept, second.kept) and torch.equal(dense(first), dense(second))
    assert torch.equal(tokens.features, untouched.features) and torch.equal(tokens.valid, untouched.valid)


@named
def test_half_precision_and_empty_budgets(method: TokenMethod) -> None:
    tokens = batch_of()
    tokens = replace(tokens, features=tokens.features.bfloat16())
    reduction = method.reduce(tokens, torch.tensor([3, 0, 2, 1, 4]))
    assert reduction.kept[0].any() and not reduction.kept[1].any()
    assert reduction.apply(tokens.features).dtype == torch.bfloat16


@pytest.mark.parametrize("method", [m for m in TOKEN_METHODS if m.conserves_mass], ids=repr)
def test_merging_conserves_mass(method: TokenMethod) -> None:
    tokens = batch_of([unit for unit in UNITS if not unit[1]])
    reduction = method.reduce(tokens, torch.tensor([7, 3, 1, 5]))
    assert torch.equal(reduction.mass().sum(1), tokens.valid.sum(1).float())
    torch.testing.assert_close(dense(reduction).sum(2), reduction.kept.double())


def test_every_built_in_method_describes_itself() -> None:
    # other tests register methods of their own
    known = {name: cls for name, cls in mmaccel.methods().items() if cls.__module__.startswith("mmaccel.")}
    # by choice: one of every other site
    assert {m.name for m in TOKEN_METHODS} | {"tome", "snapkv", "streaming-llm", "resize"} <= set(known)
    for name, cls in known.items():
        method = cls()
        assert name == method.name and method.summary and cls.__doc__
        with pytest.raises(AttributeError):
            method.name = "another"  # type: ignore[misc]
        assert isinstance(
            method,
            TokenMethod
            | PatchMethod
            | EncoderMethod
            | ReuseMethod
            | FrameMergingMethod
            | RebuildingMethod
            | RetracingMethod
            | ExpertMethod
            | Policy
            | Codec
            | FramesMethod,
        )
    with pytest.raises(MmaccelError, match="divprune"):
        mmaccel.get_method("div-prune")


# --- single token methods ---------------------------------------------------------------------------------------------
def test_random_is_nested_and_seeded() -> None:
    tokens = batch_of([((1, 9, 9), False)])
    kept = [Random().reduce(tokens, torch.tensor([k])).kept for k in (5, 40)]
    assert not (kept[0] & ~kept[1]).any()
    assert not torch.equal(Random(seed=1).reduce(tokens, torch.tensor([40])).kept, kept[1])
    before = torch.random.get_rng_state()
    Random().reduce(tokens, torch.tensor([5]))
    assert torch.equal(before, torch.random.get_rng_state())


def test_uniform_takes_the_middle_of_every_stretch() -> None:
    tokens = batch_of([((1, 1, 12), False)])
    assert Uniform().reduce(tokens, torch.tensor([4])).kept[0].nonzero()[:, 0].tolist() == [1, 4, 7, 10]


def test_divprune_never_picks_a_copy_twice() -> None:
    apart = torch.eye(4)[[0, 0, 1, 1, 2, 2, 3, 3]]
    valid = torch.ones(1, 8, dtype=torch.bool)
    for count in range(1, 9):
        kept = max_min_diverse(apart[None], valid, torch.tensor([count]))[0]
        assert int(kept.sum()) == count
        assert apart[kept].unique(dim=0).shape[0] == min(count, 4)
    # all distances tie: the lower slots win
    same = max_min_diverse(torch.ones(1, 8, 5), valid, torch.tensor([3]))[0]
    assert same.nonzero()[:, 0].tolist() == [0, 1, 2]


def test_divprune_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, count = batch_of(), torch.tensor([9, 5, 7, 1, 11])
    whole = DivPrune().reduce(tokens, count).kept
    monkeypatch.setattr("mmaccel_kernels.maxmin.naive.CACHED", 400)
    assert torch.equal(DivPrune().reduce(tokens, count).kept, whole)


def test_divprune_matches_the_definition() -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unit = x / x.norm(dim=1, keepdim=True)
    distance = 1 - unit @ unit.T
    picks = [int((distance + torch.eye(40) * 9).amin(1).argmax())]
    while len(picks) < 12:
        picks.append(int(distance[picks].amin(0).index_fill(0, torch.tensor(picks), -1).argmax()))
    kept = max_min_diverse(x[None], torch.ones(1, 40, dtype=torch.bool), torch.tensor([12]))
    assert kept[0].nonzero()[:, 0].tolist() == sorted(picks)


def test_attention_sums_layers_and_leaves_newlines_last() -> None:
    tokens = batch_of([((1, 2, 3), True)])
    kept = VtcCls(layers=(-3, -2)).reduce(tokens, torch.tensor([6])).kept
    assert torch.equal(kept, (tokens.cells >= 0).all(-1))
    best = tokens.signals["cls_attention"].sum(1).nan_to_num(-1).argmax(1)
    for method in (VtcCls(), AttentionReceived()):
        assert method.reduce(tokens, torch.tensor([1])).kept[0, best[0]]
    assert VtcCls(layers=(-3, -2)).taps()[0].layers == (-3, -2)
    assert VtcCls().taps()[0].kind == "cls_attention" and AttentionReceived().taps()[0].kind == "received_attention"
    VtcCls().check(SimpleNamespace(name="llava", has_cls=True))
    with pytest.raises(UnsupportedError, match=r"qwen2_vl.*divprune"):
        VtcCls().check(SimpleNamespace(name="qwen2_vl", has_cls=False))


def test_ties_go_to_the_lower_slot_and_nan_goes_first() -> None:
    valid = torch.tensor([[True] * 5 + [False]])
    scores = torch.tensor([[1.0, 1.0, torch.nan, -torch.inf, 1.0, 9.0]])
    kept = [top_mask(scores, valid, torch.tensor([k]))[0].nonzero()[:, 0].tolist() for k in range(1, 6)]
    assert kept == [[0], [0, 1], [0, 1, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("grid", "count", "windows"),
    [
        ((1, 24, 24), 144, [1, 12, 12]),
        ((1, 24, 24), 575, [1, 23, 24]),
        ((1, 4, 8), 8, [1, 2, 4]),
        ((8, 6, 6), 72, [8, 3, 3]),
        ((8, 6, 6), 5, [5, 1, 1]),
        ((1, 3, 3), 1, [1, 1, 1]),
    ],
)
def test_pool_chooses_square_windows(grid, count, windows) -> None:
    assert window_grid(torch.tensor([grid]), torch.tensor([count])).tolist() == [windows]


def test_pool_averages_windows_and_drops_newlines() -> None:
    tokens = batch_of([((1, 4, 4), True)])
    reduction = Pool().reduce(tokens, torch.tensor([4]))
    picture = tokens.features[0].reshape(4, 5, 16)[:, :4]
    mean = picture.reshape(2, 2, 2, 2, 16).mean((1, 3)).reshape(4, 16)
    torch.testing.assert_close(reduction.apply(tokens.features)[0], mean)
    assert reduction.kept[0].nonzero()[:, 0].tolist() == [0, 2, 10, 12]
    assert (reduction.owner()[0].reshape(4, 5)[:, 4] == -1).all()
    # a unit without cells keeps its first tokens as they are
    bare = replace(tokens, cells=torch.full_like(tokens.cells, -1))
    assert torch.equal(Pool().reduce(bare, torch.tensor([3])).apply(tokens.features), tokens.features[:, :3])


# --- merging inside the encoder ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("pace", ["constant", "decreasing"])
def test_tome_schedule_is_exact_and_halves_at_most(pace: str) -> None:
    method = ToMe(pace=pace)
    for tokens in (1, 7, 64, 576, 577):
        for layers in (1, 2, 5, 23):
            for kept in {1, tokens // 16, tokens // 4, tokens // 2, tokens - 1, tokens} - {0}:
                if -(-tokens // 2 ** (layers if pace == "constant" or layers == 1 else layers - 1)) > kept:
                    with pytest.raises(MmaccelError):
                        method.schedule(tokens, layers, kept)
                    continue
                removed, left = method.schedule(tokens, layers, kept), tokens
                assert len(removed) == layers and sum(removed) == tokens - kept
                for r in removed:
                    assert 0 <= r <= left // 2
                    left -= r
    spread = method.schedule(576, 23, 288)
    assert max(spread) - min(spread) <= 1 if pace == "constant" else spread[0] > spread[-1] == 0
    with pytest.raises(MmaccelError, match="larger budget"):
        method.schedule(576, 4, 10)


@pytest.mark.parametrize("protected", [0, 1, 2, 3])
def test_bipartite_matching_merges_the_most_similar(protected: int) -> None:
    metric = torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(2))
    place = torch.arange(21)
    for remove in (0, 4, 100):
        target = ToMe().match(EncoderTokens(metric, torch.ones(3, 21), protected), remove)
        gone = target != place
        assert (gone.sum(1) == min(remove, (21 - protected) // 2)).all()
        assert not gone[:, :protected].any() and (target[:, protected:] >= protected).all()
        assert not gone[:, 1::2].any() and (target[gone] % 2 == 1).all()
        assert torch.equal(target.gather(1, target), target)
        for row in range(3):
            assert torch.equal(bipartite_soft_matching(metric[row : row + 1], remove, protected)[0], target[row])
    best = torch.cosine_similarity(metric[:, :, None], metric[:, None], dim=-1)[:, 0::2, 1::2]
    best = best[:, (protected + 1) // 2 :, protected // 2 :].amax(2)
    merged = (ToMe().match(EncoderTokens(metric, torch.ones(3, 21), protected), 4) != place)[:, 0::2][
        :, (protected + 1) // 2 :
    ]
    assert (best.masked_fill(~merged, 9).amin(1) >= best.masked_fill(merged, -9).amax(1)).all()


def test_matching_breaks_ties_low_and_conserves_mass() -> None:
    target = bipartite_soft_matching(torch.ones(1, 8, 3), 2)
    assert target.tolist() == [[1, 1, 1, 3, 4, 5, 6, 7]]
    assert Reduction.merge(target, torch.ones(1, 8, dtype=torch.bool)).mass().tolist() == [[0, 3, 0, 1, 1, 1, 1, 1]]


# --- cache policies ---------------------------------------------------------------------------------------------------
def keys_of(pads: list[int], heads: int = 2, group: int = 3, total: int = 30, window: int = 4) -> KeyBatch:
    """Left-padded rows; the numbers of a row do not depend on its padding."""
    random = torch.Generator().manual_seed(0)
    shape = (len(pads), heads, total, 8)
    return KeyBatch(
        keys=torch.randn(shape, generator=random),
        values=torch.randn(shape, generator=random),
        queries=torch.randn(len(pads), heads * group, window, 8, generator=random),
        valid=torch.arange(total) >= torch.tensor(pads)[:, None],
        visual=torch.ones(len(pads), total, dtype=torch.bool),
        index=torch.arange(total).expand(len(pads), -1),
        scaling=8**-0.5,
    )


def keys_alone(keys: KeyBatch, row: int) -> KeyBatch:
    real, one = keys.valid[row], slice(row, row + 1)
    queries = keys.queries[one, :, -min(keys.queries.shape[2], int(real.sum())) :]
    return KeyBatch(
        keys.keys[one, :, real],
        keys.values[one, :, real],
        queries,
        keys.valid[one, real],
        keys.visual[one, real],
        keys.index[one, real],
        keys.scaling,
    )


POLICIES = [SnapKV(window=4), SnapKV(window=4, pooling="max", gqa="max"), SnapKV(window=4, gqa="sum"), StreamingLLM()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policy_scores_a_padded_row_as_the_row_alone(policy: Policy) -> None:
    keys = keys_of([0, 7, 28])
    score = policy.score(keys)
    assert score.shape == keys.keys.shape[:3] and not score.isnan().any()
    for row in range(3):
        torch.testing.assert_close(score[row][:, keys.valid[row]], policy.score(keys_alone(keys, row))[0])
        assert (score[row][:, ~keys.valid[row]] == -torch.inf).all()


def test_snapkv_matches_the_definition() -> None:
    keys = keys_of([0])
    repeated = keys.keys.repeat_interleave(3, dim=1)
    logits = keys.queries @ repeated.transpose(2, 3) * keys.scaling
    future = torch.ones(4, 30, dtype=torch.bool).triu(27)
    attention = logits.masked_fill(future, -torch.inf).softmax(-1).mean(2).reshape(1, 2, 3, 30).mean(2)
    expected = attention[..., :26].nan_to_num()
    expected = torch.nn.functional.avg_pool1d(expected, 5, 1, 2)
    score = SnapKV(window=4).score(keys)
    torch.testing.assert_close(score[..., :26], expected)
    assert (score[..., 26:] == torch.inf).all()


def test_streaming_llm_keeps_sinks_and_the_newest() -> None:
    score = StreamingLLM(sinks=2).score(keys_of([0, 5]))
    kept = [top_mask(score[:, 0], torch.ones(2, 30, dtype=torch.bool), torch.tensor([5, 5]))[row] for row in (0, 1)]
    assert [k.nonzero()[:, 0].tolist() for k in kept] == [[0, 1, 27, 28, 29], [5, 6, 27, 28, 29]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapKV(kernel=4),
        lambda: SnapKV(window=0),
        lambda: SnapKV(pooling="min"),  # type: ignore[arg-type]
        lambda: StreamingLLM(sinks=-1),
        lambda: FastV(layer=0),
        lambda: VtcCls(layers=()),
        lambda: AttentionReceived(layers=()),
        lambda: ToMe(pace="fast"),  # type: ignore[arg-type]
        lambda: Resize(frames=0.0),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()


# --- pixels -----------------------------------------------------------------------------------------------------------
def test_resize_hits_the_area_and_keeps_the_aspect() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8))
    assert Resize().picture(image, 1.0) is image
    small = Resize().picture(image, 0.25)
    assert small.size == (200, 150)
    # antialiased: noise is averaged away, not sampled
    assert np.asarray(small).std() < 0.8 * np.asarray(image).std()
    assert Resize().picture(image, 1e-6).size == (16, 16)
    assert Resize().picture(Image.new("P", (8, 64)), 0.25).size == (8, 32)


def test_resize_treats_frames_alike() -> None:
    clip = np.random.default_rng(0).integers(0, 255, (8, 64, 96, 3), dtype=np.uint8)
    assert np.array_equal(Resize().clip(clip, 1.0), clip)
    assert Resize().clip(clip, 0.25).shape == (8, 32, 48, 3)
    assert Resize(frames=0.5).clip(clip, 0.25).shape == (4, 45, 68, 3)
    assert np.array_equal(Resize(frames=0.25).clip(clip, 0.25), clip[[2, 6]])


# --- reductions -------------------------------------------------------------------------------------------------------
def composed(first: Reduction, second: Reduction) -> Reduction:
    """Both, where the slots of the second are those of what the first leaves."""
    places = leftmost(first.kept)[0]
    return first.then(second.relabel(places, torch.arange(len(places)), first.kept.shape))


def test_identity() -> None:
    valid = batch_of().valid
    x = torch.randn(*valid.shape, 3)
    identity = Reduction.identity(valid)
    assert identity.is_identity
    assert torch.equal(identity.apply(x), x * valid[..., None])
    assert torch.equal(identity.mass(), valid.float())
    some = random_merge(valid, torch.Generator().manual_seed(0))
    assert torch.equal(dense(composed(identity, some)), dense(some))
    n = int(some.kept.sum(1).max())
    after = Reduction.identity(torch.arange(n) < some.kept.sum(1, keepdim=True))
    assert torch.equal(dense(composed(some, after)), dense(some))


def chain(seed: int) -> list[Reduction]:
    """Three reductions in a row, each on the compact output of the one before: merge, prune, merge and the like."""
    random, out = torch.Generator().manual_seed(seed), []
    valid = torch.arange(20) < torch.tensor([[20], [13], [4], [1]])
    for kind in range(3):
        if (seed + kind) % 2:
            size = valid.sum(1)
            step = Reduction.top(torch.rand(valid.shape, generator=random), valid, size - size // 3)
        else:
            target = torch.arange(valid.shape[1]).expand_as(valid).clone()
            target[:, 1::3] -= 1
            if valid.shape[1] > 6:
                target[:, 6] = -1
            weight = torch.rand(valid.shape, generator=random) + 0.1
            step = Reduction.merge(target, valid, weight)
        out.append(step)
        kept = step.kept.sum(1)
        valid = torch.arange(int(kept.max())) < kept[:, None]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_composition_is_the_product_and_associates(seed: int) -> None:
    a, b, c = chain(seed)
    x = torch.randn(*a.valid.shape, 5, generator=torch.Generator().manual_seed(seed))
    left, right = composed(composed(a, b), c), composed(a, composed(b, c))
    torch.testing.assert_close(dense(left), dense(right))
    assert torch.equal(left.kept, right.kept)
    stepwise = c.apply(b.apply(a.apply(x)))
    torch.testing.assert_close(left.apply(x), stepwise)
    torch.testing.assert_close(right.apply(x), stepwise)


@pytest.mark.parametrize("seed", range(4))
def test_apply_is_the_matrix(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    valid = batch_of().valid
    reduction = random_merge(valid, random, drop=seed % 2 == 1, weight=seed > 1)
    x = torch.randn(*valid.shape, 2, 3, generator=random)
    expected = torch.einsum("nij,njab->niab", dense(reduction), x.double())
    out = reduction.apply(x)
    for row in range(len(valid)):
        kept = reduction.kept[row]
        torch.testing.assert_close(out[row, : int(kept.sum())].double(), expected[row][kept], rtol=1e-5, atol=1e-6)
        assert not out[row, int(kept.sum()) :].any()
    torch.testing.assert_close(dense(reduction).sum(2), reduction.kept.double())


def test_merging_loses_no_mass_and_pruning_says_what_it_lost() -> None:
    valid = batch_of().valid
    random = torch.Generator().manual_seed(0)
    whole = random_merge(valid, random)
    assert torch.equal(whole.mass().sum(1), valid.sum(1).float())
    size = torch.randint(1, 9, valid.shape, generator=random).float()
    assert torch.equal(whole.mass(size).sum(1), (size * valid).sum(1))
    pruned = Reduction.top(torch.rand(valid.shape), valid, torch.full((len(valid),), 1))
    assert torch.equal(pruned.mass(), pruned.kept.float())
    first, second, _ = chain(0)
    through = torch.zeros_like(second.valid, dtype=torch.float32)
    mass = first.mass()
    for row in range(len(mass)):
        through[row, : int(first.kept[row].sum())] = mass[row][first.kept[row]]
    assert (second.mass(through).sum(1) <= mass.sum(1)).all()


def test_owner_follows_the_larger_weight_and_the_lower_slot() -> None:
    kept = torch.tensor([[True, False, True, False, False]])
    links = Links(
        torch.zeros(6, dtype=torch.long),
        torch.tensor([2, 0, 0, 2, 0, 2]),
        torch.tensor([1, 1, 0, 2, 3, 3]),
        torch.tensor([0.6, 0.4, 1.0, 1.0, 0.5, 0.5]),
    )
    reduction = Reduction(kept, torch.ones_like(kept), links)
    assert reduction.owner().tolist() == [[0, 2, 2, 0, -1]]
    assert reduction.mass().tolist() == [[2, 0, 2, 0, 0]]


def test_draw_darkens_dropped_tints_merged_and_leaves_kept() -> None:
    image = Image.new("RGB", (40, 30), (200, 200, 200))
    valid = torch.ones(1, 12, dtype=torch.bool)
    target = torch.tensor([[0, 0, 2, -1, 4, 5, 5, 7, -1, 9, 10, 11]])
    drawn = np.asarray(overlay(image, (3, 4), Reduction.merge(target, valid).owner()[0]))
    assert drawn.shape == (30, 40, 3)
    cell = drawn.reshape(3, 10, 4, 10, 3).transpose(0, 2, 1, 3, 4).reshape(12, 10, 10, 3)
    assert (cell[[2, 4, 7, 9, 10, 11]] == 200).all()
    assert (cell[[3, 8]] == 50).all()
    assert (cell[0] != 200).any() and (cell[0, 5, 5] == cell[1, 5, 5]).all() and (cell[0, 5, 5] != cell[6, 5, 5]).any()
    # outlined outside, not between the cells of one group
    assert (cell[0, 5, 0] != cell[0, 5, 5]).any() and (cell[0, 5, 9] == cell[0, 5, 5]).all()


# --- budgets ----------------------------------------------------------------------------------------------------------
def test_ratios_are_rounded_exactly() -> None:
    assert budget.resolve(0.29, 100) == 29 and int(0.29 * 100) == 28
    assert budget.resolve(0.145, 100) == 15  # half up
    assert budget.resolve(0.001, 10) == 1
    assert budget.resolve(1.0, 577) == 577 and budget.resolve(64, 576) == 64
    for percent in range(1, 101):
        assert budget.resolve(percent / 100, 100) == percent


@pytest.mark.parametrize("retain", [0, -3, 0.0, -0.5, 1.5, 64.0, float("nan"), True, "half", None])
def test_impossible_budgets_are_refused(retain) -> None:
    with pytest.raises(MmaccelError):
        budget.check_retain(retain)


def test_a_count_beyond_the_picture_is_the_whole_picture() -> None:
    assert budget.resolve(25, 24) == budget.resolve(24, 24) == 24
    assert not budget.kept_whole("m", 24, [24, 25]) and not budget.kept_whole("m", 1.0, [24])
    assert budget.kept_whole("m", 25, [24, 30, 7]) == [
        "m was asked to keep 25 tokens and keeps all of 2 of 3 pictures or clips, which have at most 24"
    ]


def test_shares_sum_and_respects_sizes() -> None:
    for total in range(0, 40, 3):
        for sizes, shares in (([10, 20, 3], None), ([10, 20, 3], [0.0, 1.0, 5.0]), ([1, 1, 30], [1.0, 1.0, 0.0])):
            parts = budget.apportion(total, sizes, shares)
            assert sum(parts) == min(total, sum(sizes))
            assert all(0 <= part <= size for part, size in zip(parts, sizes, strict=True))
    assert budget.apportion(7, [10, 10, 10]) == [3, 2, 2]


def test_counts_split_a_picture_over_its_units() -> None:
    counts = budget.counts(0.25, [100, 60, 40, 8], [100, 30, 40, 8], [0, 1, 1, 2])
    assert counts.tolist() == [25, 11, 14, 2]
    assert budget.counts(12, [60, 40], [60, 40], [0, 0]).tolist() == [7, 5]
