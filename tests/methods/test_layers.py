"""Methods inside the language model: what they see of a layer, what they choose, and what becomes of it in a model."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import synthetic
import torch
import zoo
from batches import UNITS, batch_of, check_rows_alone, dense
from laws import oracle
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated
from mmaccel.core.reduction import Reduction
from mmaccel.families import family_of
from mmaccel.kv.policies.zipcache_tokens import ZipCacheTokens
from mmaccel.layers.aim import AimPageRank
from mmaccel.layers.fastkv import FastKVTokens
from mmaccel.layers.framefusion import FrameFusion, merge_runs, sparsity_needed
from mmaccel.layers.holitom import HoliTomInner
from mmaccel.layers.mustdrop import MustDropFilter
from mmaccel.layers.promptdistill import PromptDistill
from mmaccel.layers.prunevid import PruneVidSelect
from mmaccel.layers.sparsevlm import SparseVLM
from mmaccel.layers.zipvl import ZipVL
from mmaccel.method import LayerAttention, LayerMethod, Tap, TokenBatch, blocks
from mmaccel.method.blocks import nearest_kept, upto
from mmaccel.pruning.flexselect import FlexSelect
from mmaccel.pruning.gemfilter import GemFilter
from mmaccel.pruning.reform import REFORM

#: every one as it comes, and some with other options
METHODS = [
    *(kind() for kind in synthetic.offered(LayerMethod).values()),
    FrameFusion(similarity=2.0),
    SparseVLM(recycle=0.0, heads=2),
    ZipVL(adaptive=True, tau=0.8),
    SparseVLM(adaptive=True, scale=4.0),
    MustDropFilter(adaptive=True, global_threshold=0.02, individual_threshold=0.3),
    FastKVTokens(window=3, kernel=1),
]
named = pytest.mark.parametrize("method", METHODS, ids=repr)


def decides(method: LayerMethod) -> bool:
    """Whether the content decides how many stay, up to the budget."""
    return getattr(method, "adaptive", method.budget == "adaptive")


#: the first layer behind DeepStack
FAMILIES = {"llava": 2, "qwen2_5_vl": 2, "qwen3_vl": 3}


def tokens_of(units=UNITS, seed: int = 0) -> TokenBatch:
    """A ragged batch with every figure that ``look`` may give, and frames that resemble each other."""
    tokens = batch_of(units, seed)
    random = torch.Generator().manual_seed(seed + 1)
    shape = tokens.valid.shape
    # row by row, as in batch_of
    figures = {
        name: torch.stack([torch.rand(shape[1], generator=random) for _ in range(shape[0])])
        for name in (
            "importance",
            "text_sum",
            "text_max",
            "prompt_logits",
            "window_attention",
            "key_norm",
            "received_mean",
            "text_peak",
            "rater_attention",
            "rater_rank",
            "probe_attention",
            "probe_mean",
            "text_mean",
            "question",
            "prior",
            "question_logits",
            "value_score",
            "seed",
            "rotary_cos",
            "rotary_sin",
        )
    }
    # few tokens are seeds
    figures["seed"] = (figures["seed"] > 0.9).float()
    figures["before"] = torch.stack([torch.rand(1, shape[1], 16, generator=random) for _ in range(shape[0])])
    features = tokens.features.clone()
    for unit, (t, h, w) in enumerate(tokens.grid.tolist()):
        if t > 1:
            still = features[unit, : h * w].repeat(t, 1)
            features[unit, : t * h * w] = still + 0.4 * features[unit, : t * h * w]
    return replace(
        tokens,
        features=features,
        signals={**tokens.signals, **figures},
        question=features[:, :5],
        question_valid=torch.arange(5) < torch.arange(1, len(features) + 1)[:, None],
        question_signals={"key_norm": figures["key_norm"][:, :5]},
    )


# --- what they choose -------------------------------------------------------------------------------------------------
@named
def test_meets_its_budget(method: LayerMethod) -> None:
    tokens = tokens_of()
    sizes = tokens.valid.sum(1)
    for share in (0.01, 0.3, 0.5, 0.99, 1.0):
        count = (sizes * share).long().clamp(min=1)
        made = method.reduce(tokens, count)
        before, after = made.counts()
        assert torch.equal(before, sizes) and not (made.kept & ~tokens.valid).any()
        exact = method.budget == "exact" or not decides(method)
        assert torch.equal(after, count) if exact else ((after <= count) & (after >= 1)).all()


@pytest.mark.parametrize("method", [m for m in METHODS if not decides(m)], ids=repr)
def test_whole_budget_keeps_everything(method: LayerMethod) -> None:
    tokens = tokens_of()
    made = method.reduce(tokens, tokens.valid.sum(1))
    assert torch.equal(made.kept, tokens.valid)
    assert torch.equal(made.apply(tokens.features), tokens.features * tokens.valid[..., None])


@named
def test_row_of_a_batch_is_the_row_alone_and_again(method: LayerMethod) -> None:
    tokens, untouched = tokens_of(), tokens_of()
    count = torch.tensor([9, 5, 7, 1, 11])
    together = method.reduce(tokens, count)
    assert torch.equal(dense(together), dense(method.reduce(tokens, count)))
    assert torch.equal(tokens.features, untouched.features) and torch.equal(tokens.valid, untouched.valid)
    check_rows_alone(method, tokens, count)


@named
def test_half_precision_and_empty_budgets(method: LayerMethod) -> None:
    tokens = replace(tokens_of(), features=tokens_of().features.bfloat16())
    made = method.reduce(tokens, torch.tensor([3, 0, 2, 1, 4]))
    assert made.kept[0].any() and not made.kept[1].any()
    assert made.apply(tokens.features).dtype == torch.bfloat16


@named
def test_describes_itself(method: LayerMethod) -> None:
    assert mmaccel.get_method(method.name) is type(method)
    assert method.summary and method.paper and method.layer >= method.lowest
    with pytest.raises(MmaccelError, match=f"a layer of {method.lowest} or more"):
        replace(method, layer=method.lowest - 1)


def test_holitom_halves_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, count = tokens_of(), torch.tensor([3, 5, 2, 1, 6])
    made = HoliTomInner().reduce(tokens, count)
    assert torch.equal(made.mass().sum(1), tokens.valid.sum(1).float())
    torch.testing.assert_close(dense(made).sum(2), made.kept.double())
    for row, kept in enumerate(made.kept):
        x, valid = tokens.features[row].clone(), tokens.valid[row]
        cosine = torch.cosine_similarity(x[:, None], x[None], dim=-1).masked_fill(~kept, -9)
        for slot in (valid & ~kept).nonzero()[:, 0].tolist():
            into = int(cosine[slot].argmax())
            x[into] = (x[into] + tokens.features[row, slot]) / 2
        torch.testing.assert_close(made.substitute(tokens.features)[row, kept], x[kept])
    whole = nearest_kept(tokens.features, made.kept)
    monkeypatch.setattr("mmaccel_kernels.matching.naive.BLOCK", 400)
    assert torch.equal(nearest_kept(tokens.features, made.kept), whole)


def test_holitom_with_more_members_than_float32_can_halve() -> None:
    tokens = tokens_of([((1, 20, 20), False)])
    made = HoliTomInner().reduce(tokens, torch.tensor([1]))
    torch.testing.assert_close(dense(made).sum(), torch.tensor(1.0, dtype=torch.float64))
    assert made.mass().sum() == 400 and made.apply(tokens.features).isfinite().all()


@pytest.mark.parametrize("most", [0, 1, 7, 99])
def test_framefusion_merges_runs_of_frames(most: int) -> None:
    tokens = tokens_of([((5, 3, 4), False), ((3, 2, 2), False), ((4, 2, 3), True)])
    # tokens that are gone leave gaps, and the next in time becomes the neighbour
    valid = tokens.valid & (torch.rand(tokens.valid.shape, generator=torch.Generator().manual_seed(3)) < 0.8)
    made = merge_runs(tokens.features, valid, tokens.cells, 0.75, torch.full((3,), most))
    lost = (valid & ~made.kept).sum(1)
    assert (lost <= most).all() and (lost[0] == most if most < 10 else 10 < lost[0] < most)
    for row in range(3):
        similar = {}
        for slot in valid[row].nonzero()[:, 0].tolist():
            t, r, c = tokens.cells[row, slot].tolist()
            past = [
                (int(tokens.cells[row, s, 0]), s)
                for s in valid[row].nonzero()[:, 0].tolist()
                if tokens.cells[row, s, 1:].tolist() == [r, c] and 0 <= tokens.cells[row, s, 0] < t
            ]
            if t >= 0 and past:
                one = max(past)[1]
                near = torch.cosine_similarity(tokens.features[row, slot], tokens.features[row, one], dim=0)
                if near >= 0.75:
                    similar[slot] = (float(near), one)
        gone = sorted(similar, key=lambda slot: -similar[slot][0])[:most]
        assert sorted(gone) == (valid[row] & ~made.kept[row]).nonzero()[:, 0].tolist()
        runs: dict[int, list[int]] = {slot: [slot] for slot in made.kept[row].nonzero()[:, 0].tolist()}
        for slot in sorted(gone):
            start = slot
            while start in gone:
                start = similar[start][1]
            runs[start].append(slot)
        for start, run in runs.items():
            mean = tokens.features[row, run].mean(0)
            torch.testing.assert_close(made.substitute(tokens.features)[row, start], mean)


def test_framefusion_takes_still_frames_for_one() -> None:
    tokens = tokens_of([((4, 3, 3), False)])
    still = replace(tokens, features=tokens.features[:, :9].repeat(1, 4, 1))
    made = FrameFusion().reduce(still, torch.tensor([9]))
    assert made.kept[0].nonzero()[:, 0].tolist() == list(range(9))
    assert (made.mass()[0, :9] == 4).all()
    torch.testing.assert_close(made.apply(still.features), still.features[:, :9])
    # the same cells in two tiles of a picture are no neighbours in time
    tiles = replace(still, cells=still.cells * torch.tensor([0, 1, 1]))
    best = still.signals["prompt_attention"][0].topk(9).indices.sort().values
    assert torch.equal(FrameFusion().reduce(tiles, torch.tensor([9])).kept[0].nonzero()[:, 0], best)


def test_framefusion_turns_a_cost_into_a_share() -> None:
    assert sparsity_needed(0.3, 28, [0.0]) == pytest.approx(1 - FrameFusion.default_retain, abs=1e-3)
    assert sparsity_needed(1.0, 28) == 0.0 and sparsity_needed(0.9, 4, [0.9]) == 0.0
    with pytest.raises(MmaccelError, match="higher cost"):
        sparsity_needed(0.05, 28, [0.0, 0.0])


#: tokens before each layer and behind the last so far -> (may merge, are then to be left) at an average of 30 of 100 tokens
STEPS = [
    # 28 layers may have 840; nothing has been dropped yet
    ([100], (70, 100)),
    # a half went, 50 were read: 790 for 27 layers, 29.26 each
    ([100, 50], (21, 50)),
    # and exactly as many as were to go: over
    ([100, 50, 29], (0, 29)),
    # 4 of 50 are less than a tenth: 840 - 50 - 46 for 26 layers, 28.6 each, by attention
    ([100, 50, 46], (0, 28)),
    ([100, 50, 46, 28], (0, 28)),
]


@pytest.mark.parametrize(("left", "wanted"), STEPS, ids=str)
def test_framefusion_layer_after_layer(left: list[int], wanted: tuple[int, int]) -> None:
    method = FrameFusion(layer=0, through=27)
    ((most, kept, there),) = method.steps(torch.tensor([left]), torch.tensor([30]))
    assert (most, kept, there) == (*wanted, left[-1])
    assert method.is_done(torch.tensor([left]), torch.tensor([30])) == (wanted == (0, left[-1]))
    # 558 of 28 * 21 = 588 are spent; 31 more would leave no token for each of the 17 layers behind: 30 of 18, 1.67 each
    late = torch.tensor([[100, 89, 80, 71, 63, 56, 50, 44, 39, 35, 31]])
    assert method.steps(late, torch.tensor([21])) == [(30, 1, 31)]
    assert method.steps(late, torch.tensor([22]))[0][1:] == (31, 31)


def test_framefusion_meets_its_average_whatever_merges() -> None:
    """However much merges at a layer, the layers have no more than the budget on average, and a token each at least."""
    random = torch.Generator().manual_seed(0)
    for depth, share in ((28, 0.3), (28, 0.1), (12, 0.5), (4, 0.4)):
        method, start = FrameFusion(layer=0, through=depth - 1), 200
        for _ in range(50):
            left = [start]
            for layer in range(depth):
                ((most, kept, there),) = method.steps(torch.tensor([left]), torch.tensor([share * start]))
                merged = min(most, int(there * float(torch.rand(1, generator=random)) * 0.3))
                # what enters the first layer cannot be pruned
                left.append(there - merged if layer == 0 else min(there - merged, kept))
            assert min(left) >= 1 and sum(left[1:]) <= depth * share * start
            assert sum(left[1:]) > 0.9 * depth * share * start, "the budget was not used"


def test_framefusion_knows_where_it_works() -> None:
    with pytest.raises(MmaccelError, match="through=1.0"):
        FrameFusion(layer=0)
    with pytest.raises(
        MmaccelError, match="`through` of framefusion-step must be an int, at least 0, or a share .* got 2.5"
    ):
        FrameFusion(through=2.5)
    with pytest.raises(UnsupportedError, match="DeepStack"), accelerated(tiny("qwen3_vl"), "framefusion", layer=0):
        pass
    with accelerated(tiny("qwen3_vl"), "framefusion"):
        assert sorted(tiny("qwen3_vl").mmaccel.plan.stage_at_layer) == [3]
    with accelerated(tiny("llava"), "framefusion"):
        assert sorted(tiny("llava").mmaccel.plan.stage_at_layer) == [0, 1, 2, 3]
    with pytest.raises(MmaccelError, match="higher cost"):
        FrameFusion(layer=0, through=3).by("official").steps(torch.tensor([[100, 89, 79]]), torch.tensor([30]))


def test_prunevid_keeps_the_same_share_of_every_still_and_every_frame() -> None:
    tokens = tokens_of([((4, 2, 5), False)])
    t, peak = tokens.cells[0, :, 0], tokens.signals["text_peak"]
    # of the first frame five tokens stand for all frames of their scene
    until = torch.where((t == 0) & (tokens.cells[0, :, 2] < 5) & (tokens.cells[0, :, 1] == 0), 3, t)[None]
    tokens = replace(tokens, until=until)
    groups = [(0, 3), (0, 0), (1, 1), (2, 2), (3, 3)]
    for method, count, shares in (
        (PruneVidSelect(), 16, [2, 2, 4, 4, 4]),
        (PruneVidSelect().by("official"), 15, [1, 1, 3, 3, 3]),
    ):
        kept = method.reduce(tokens, torch.tensor([count])).kept[0]
        for (first, last), share in zip(groups, shares, strict=True):
            mine = (t == first) & (until[0] == last)
            assert int((kept & mine).sum()) == share
            assert peak[0, kept & mine].min() >= peak[0, mine & ~kept].max()


def test_prunevid_sees_what_was_merged_over_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, reduce = [], PruneVidSelect.reduce

    def watch(method: PruneVidSelect, tokens: TokenBatch, count: torch.Tensor) -> Reduction:
        seen.append(tokens)
        return reduce(method, tokens, count)

    monkeypatch.setattr(PruneVidSelect, "reduce", watch)
    feed = zoo.inputs("llava_onevision", "video")
    with accelerated(zoo.model("llava_onevision"), "prunevid", tau=-1.0, small=0) as tiny:
        tiny(**feed)
        stats = tiny.mmaccel.stats()
    (tokens,) = seen
    t, until = tokens.cells[..., 0][tokens.celled], tokens.until[tokens.celled]
    assert (until >= t).all() and (until > t).any()
    assert 0 < stats.visual_tokens_kept <= int(tokens.valid.sum())


def test_mustdrop_thresholds_and_budget_are_one_filter() -> None:
    tokens = tokens_of()
    g, m = tokens.signals["text_sum"] * tokens.valid, tokens.signals["text_max"]
    for low, high in ((0.02, 0.3), (0.05, 0.9), (5.0, 5.0)):
        options = {"global_threshold": low, "individual_threshold": high}
        free = MustDropFilter(adaptive=True, **options).reduce(tokens, tokens.valid.sum(1))
        passed = tokens.valid & ((g >= low * g.sum(1, keepdim=True)) | (m >= high))
        some = passed.any(1)
        assert torch.equal(free.kept[some], passed[some]) and (free.kept.sum(1) >= 1).all()
        exact = MustDropFilter(**options).reduce(tokens, free.kept.sum(1))
        assert torch.equal(exact.kept, free.kept)
        capped = MustDropFilter(adaptive=True, **options).reduce(tokens, torch.tensor([2, 2, 2, 1, 2]))
        assert not (capped.kept & ~free.kept).any() and (capped.kept.sum(1) <= 2).all()


def test_mustdrop_keys_are_dropped_last() -> None:
    tokens = tokens_of()
    seen = tokens.signals["cls_attention"][:, :1]
    tokens = replace(tokens, signals={**tokens.signals, "cls_attention": seen, "received_attention": -seen})
    # an earlier stage has dropped some of what entered: 0.08 of 60 is 4.8
    tokens = replace(tokens, entered=torch.tensor([36, 60, 20, 1, 30]))
    wanted = torch.tensor([3, 5, 2, 1, 3])
    for query, sign in (("cls", 1), ("all", -1)):
        method = MustDropFilter(adaptive=True, protect=0.08, query=query, global_threshold=9, individual_threshold=9)
        best = (sign * seen[:, 0]).nan_to_num(nan=-9).masked_fill(~tokens.valid, -9).argsort(dim=1, descending=True)
        made = method.reduce(tokens, tokens.valid.sum(1))
        for row, k in enumerate(wanted.tolist()):
            assert sorted(best[row, :k].tolist()) == made.kept[row].nonzero()[:, 0].tolist()
        # a budget below them keeps the best of them
        one = method.reduce(tokens, torch.ones(5, dtype=torch.long))
        assert one.kept.long().argmax(1).tolist() == best[:, 0].tolist() and (one.kept.sum(1) == 1).all()
        # one above keeps others too
        fixed = replace(method, adaptive=False).reduce(tokens, tokens.valid.sum(1) // 2)
        assert not (made.kept & ~fixed.kept)[tokens.valid.sum(1) // 2 >= wanted].any()
        assert method.taps() == (Tap("cls_attention" if query == "cls" else "received_attention", (-1,)),)
    assert MustDropFilter(query="cls").taps() == ()
    with (
        pytest.raises(UnsupportedError, match="query='all'"),
        accelerated(tiny("qwen2_5_vl"), "mustdrop-filter", protect=0.1, query="cls", layer=2),
    ):
        pass


def test_mustdrop_keys_stay_the_same_from_stage_to_stage() -> None:
    """Thresholds that nothing passes: what is left in the end are the keys of what entered the language model."""
    options = {"adaptive": True, "protect": 0.25, "global_threshold": 9.0, "individual_threshold": 9.0}
    model, feed = tiny("llava"), dict(zoo.inputs("llava", "images"))
    stages = [Stage("uniform", 0.6), *(Stage("mustdrop-filter", 0.4, {**options, "layer": i}) for i in (1, 2, 3))]
    with accelerated(model, Recipe("keys", tuple(stages))):
        last_logits(model, feed)
        kept = [stage["tokens_kept"] for stage in model.mmaccel.stats()["stages"]]
    entered = int(36 * 0.6 + 0.5)
    assert kept == [2 * entered, *[2 * math.ceil(entered * 0.25)] * 3]


# --- what they see ----------------------------------------------------------------------------------------------------
def layer_of(lengths: list[int], old: int = 0, heads: int = 4, groups: int = 2, seed: int = 0) -> LayerAttention:
    """Rows of these lengths, left padded, behind ``old`` keys of an earlier turn; every third token is visual."""
    random = torch.Generator().manual_seed(seed)
    most = max(lengths)

    def noise(count: int) -> list[Tensor]:
        return [torch.randn(count, old + length, 8, generator=random) for length in lengths]

    def pad(parts: list[Tensor]) -> Tensor:
        return torch.stack([torch.cat([x.new_zeros(len(x), old + most - x.shape[1], 8), x], 1) for x in parts])

    query, key = pad(noise(heads))[:, :, old:], pad(noise(heads // groups))
    keys = old + most
    real = torch.arange(keys) >= torch.tensor([[most - length] for length in lengths])
    visible = (real[:, None] & torch.ones(keys, keys, dtype=torch.bool).tril())[:, old:] & real[:, old:, None]
    text = real[:, old:] & (torch.arange(most).flip(0) % 3 != 1)
    padded = len(set(lengths)) > 1 or old > 0
    return LayerAttention(query, key, visible[:, None] if padded else None, 0.6, text)


def full_map(layer: LayerAttention, tau: float = 1.0) -> Tensor:
    """The whole ``[B, H, q, K]`` that no method may make, written out."""
    batch, heads, rows, _ = layer.query.shape
    keys = layer.key.repeat_interleave(heads // layer.key.shape[1], 1).double()
    logits = layer.query.double() @ keys.transpose(2, 3) * layer.scaling / tau
    visible = layer.visible
    if visible is None:
        visible = torch.ones(rows, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - rows)
    return logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("block", [1, 500, 1 << 24])
@pytest.mark.parametrize(("lengths", "old"), [([13], 0), ([13, 7, 1], 0), ([9, 9], 0), ([11, 6], 4)])
def test_streamed_figures_are_those_of_the_whole_map(block, lengths, old, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", block)
    layer = layer_of(lengths, old)
    sums = MustDropFilter().observe(layer)
    paid = full_map(layer).mean(1).masked_fill(~layer.text[:, :, None], 0.0)
    torch.testing.assert_close(sums["text_sum"].double(), paid.sum(1), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums["text_max"].double(), paid.amax(1), rtol=1e-5, atol=1e-7)

    for iterations, teleport in ((1, 0.0), (5, 0.0), (4, 0.15)):
        ours = AimPageRank(tau=0.3, iterations=iterations, teleport=teleport).observe(layer)["importance"]
        flow = full_map(layer, 0.3)
        rows = flow.sum(-1)[:, 0] > 0
        walk = torch.zeros_like(flow[:, :, 0])
        walk[:, :, old:] = (rows / rows.sum(1, keepdim=True))[:, None]
        start = walk
        for _ in range(iterations):
            walk = (1 - teleport) * torch.einsum("bhq,bhqk->bhk", walk[:, :, old:], flow) + teleport * start
        torch.testing.assert_close(ours.double(), walk.square().mean(1).sqrt(), rtol=1e-5, atol=1e-7)


def prepared(method: LayerMethod, layer: LayerAttention, lengths: list[int]) -> LayerAttention:
    """With what the method makes of the tokens of these ``lengths`` as they enter the language model."""
    width = layer.text.shape[1]
    real = torch.arange(width) >= torch.tensor([[width - length] for length in lengths])
    return replace(
        layer, prepared=method.prepare(layer.query.transpose(1, 2).flatten(2), layer.text, real & ~layer.text)
    )


@named
def test_what_a_layer_shows_of_a_row_does_not_depend_on_the_batch(method: LayerMethod) -> None:
    lengths = [13, 7, 10]
    layer = prepared(method, layer_of(lengths), lengths)
    together = method.observe(layer)
    for row, length in enumerate(lengths):
        alone = LayerAttention(
            layer.query[row : row + 1, :, -length:],
            layer.key[row : row + 1, :, -length:],
            None,
            layer.scaling,
            layer.text[row : row + 1, -length:],
            prepared={name: figures[row : row + 1, -length:] for name, figures in layer.prepared.items()},
        )
        for name, figures in method.observe(alone).items():
            assert figures.dtype == torch.float32
            torch.testing.assert_close(together[name][row, -length:], figures[0])


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
def test_probes_of_a_row_do_not_depend_on_the_batch(share: float) -> None:
    """A row that has one probe less than the longest has them all."""
    lengths = [100, *range(19, 2, -1)]
    layer, policy = layer_of(lengths), ZipCacheTokens(share=share)
    together = policy.observe(layer, torch.zeros(0))
    for row, length in enumerate(lengths):
        query, key = (part[row : row + 1, :, -length:] for part in (layer.query, layer.key))
        alone = LayerAttention(query, key, None, layer.scaling, layer.text[row : row + 1, -length:])
        torch.testing.assert_close(together[row, :, -length:], policy.observe(alone, torch.zeros(0))[0])


def test_keys_are_converted_once_and_only_if_looked_at() -> None:
    layer = layer_of([7, 5])
    half = replace(layer, query=layer.query.bfloat16(), key=layer.key.bfloat16())
    # a policy that scores keys by themselves costs no copy of them
    assert half.key.dtype == torch.bfloat16 and "full_key" not in vars(half)
    part = upto(half, 4)
    assert half.full_key.dtype == torch.float32 == part.full_key.dtype
    assert part.full_key.untyped_storage().data_ptr() == half.full_key.untyped_storage().data_ptr()
    exact = replace(layer, query=layer.query.bfloat16().float(), key=layer.key.bfloat16().float())
    assert torch.equal(half.attention(2, 6).nan_to_num(), exact.attention(2, 6).nan_to_num())


def test_promptdistill_smooths_along_the_prompt() -> None:
    layer = layer_of([12])
    raw = PromptDistill(pooling=False).observe(layer)["prompt_logits"][0]
    keys = layer.key.repeat_interleave(2, 1)
    torch.testing.assert_close(raw, (layer.query[0, :, -1:] * keys[0]).sum(-1).mean(0) * layer.scaling)
    smooth = PromptDistill(kernel=3).observe(layer)["prompt_logits"][0]
    bare = torch.cat([raw[:-1], torch.zeros(2)])
    for j in range(11):
        torch.testing.assert_close(smooth[j], bare[max(0, j - 1) : j + 2].sum() / 3)


def test_fastkv_hears_the_end_of_the_prompt() -> None:
    layer = layer_of([12])
    paid = layer.attention(9, 12)[0].sum((0, 1))
    paid[9:] = 0.0
    raw = FastKVTokens(window=3, kernel=1).observe(layer)["window_attention"][0]
    torch.testing.assert_close(raw, paid)
    smooth = FastKVTokens(window=3, kernel=3).observe(layer)["window_attention"][0]
    for j in range(12):
        torch.testing.assert_close(smooth[j], paid[max(0, j - 1) : j + 2].sum() / 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AimPageRank(tau=0.0),
        lambda: AimPageRank(iterations=0),
        lambda: AimPageRank(teleport=1.0),
        lambda: MustDropFilter(global_threshold=0.0),
        lambda: PromptDistill(kernel=4),
        lambda: FastKVTokens(kernel=4),
        lambda: FastKVTokens(window=0),
    ],
)
def test_useless_options_are_refused(wrong) -> None:
    with pytest.raises(MmaccelError):
        wrong()


# --- in a model -------------------------------------------------------------------------------------------------------
@functools.cache
def tiny(family: str, **text: int):
    return zoo.model(family, **text)


@torch.no_grad()
def last_logits(model, feed) -> Tensor:
    return model(**feed).logits[:, -1]


ALONE = list(synthetic.offered(LayerMethod))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ALONE)
def test_in_a_left_padded_batch(family: str, name: str) -> None:
    model, feed = tiny(family), dict(zoo.inputs(family, "uneven"))
    real = feed["attention_mask"].bool()
    assert not real.all()
    visual = zoo.visual_mask(family, model, feed["input_ids"])
    with accelerated(model, name, retain=0.3, layer=FAMILIES[family]):
        together = last_logits(model, feed)
        kept = model.mmaccel.reduction.kept
        stats = model.mmaccel.stats()
        assert (kept & ~visual).equal(real & ~visual), "text was dropped"
        assert 0 < int((kept & visual).sum()) < int(visual.sum())
        resolved = stats["stages"][0]["resolved"]
        assert stats["stages"][0]["tokens_kept"] == int((kept & visual).sum())
        assert resolved is None if decides(mmaccel.get_method(name)()) else resolved == int((kept & visual).sum())
        for row in range(len(real)):
            alone = last_logits(model, zoo.single(family, feed, row))
            assert torch.equal(model.mmaccel.reduction.kept[0], kept[row, real[row]])
            torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=2e-5)
        assert model.generate(**feed, max_new_tokens=3, do_sample=False).shape[1] <= real.shape[1] + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_is_the_bare_model(family: str) -> None:
    model, feed = tiny(family), dict(zoo.inputs(family, "uneven"))
    bare = last_logits(model, feed)
    for name in ALONE:
        # thresholds that nothing meets, where they decide
        never = {"spatial": 2.0, "temporal": 2.0} if decides(mmaccel.get_method(name)()) else {}
        with accelerated(model, name, retain=1.0, layer=FAMILIES[family], **never):
            torch.testing.assert_close(last_logits(model, feed), bare, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_framefusion_merges_a_still_clip(family: str) -> None:
    model = tiny(family)
    feed = dict(zoo.encode(family, [([], [zoo.clip(1, 64, 48, 1).repeat(8, axis=0)], zoo.QUESTION)]))
    with accelerated(model, "framefusion-step", retain=0.5, layer=FAMILIES[family], similarity=0.5):
        last_logits(model, feed)
        reduction, visual = model.mmaccel.reduction, zoo.visual_mask(family, model, feed["input_ids"])
    assert int((reduction.kept & visual).sum()) == (int(visual.sum()) + 1) // 2
    # tokens of later frames flow into those of earlier ones
    assert reduction.links is not None and float(reduction.mass()[visual].max()) > 1


def test_several_stages_in_one_model() -> None:
    model, feed = tiny("llava"), dict(zoo.inputs("llava", "uneven"))
    stages = (
        Stage("aim-pagerank", 0.5, {"layer": 1}),
        Stage("holitom-inner", 0.3, {"layer": 2}),
        Stage("mustdrop-filter", 0.2, {"layer": 3, "adaptive": True}),
    )
    with accelerated(model, Recipe("three", stages)):
        assert last_logits(model, feed).isfinite().all()
        kept = [stage["tokens_kept"] for stage in model.mmaccel.stats()["stages"]]
        assert kept == sorted(kept, reverse=True) and kept[-1] >= 3


def test_shares_of_the_depth_that_fall_together() -> None:
    """In a shallow model the last stage of a layer counts, and the statistics say so; different methods are refused."""
    model, feed = tiny("llava"), dict(zoo.inputs("llava", "image"))
    with accelerated(model, "aim"):
        last_logits(model, feed)
        stats = model.mmaccel.stats()
        layers, cuts = layers_at("aim", 4), model.mmaccel.plan.stage_at_layer
    assert sorted(cuts) == sorted(set(layers)) and len(stats["notes"]) == len(layers) - len(cuts) > 0
    # stage 0 merges before the language model
    assert all(stage.number == len(layers) - layers[::-1].index(layer) for layer, stage in cuts.items())
    assert len(stats["stages"]) == 1 + len(cuts)
    assert f"stages 1 and 2 (aim-pagerank) both fall on layer {layers[0]} of 4: only stage 2 works" in stats["notes"]
    for second, says in (
        (Stage("holitom-inner", 0.2, {"layer": 0.55}), "'fastv' and 'holitom-inner' both fall on layer 2"),
        (Stage("holitom-inner", 0.2, {"layer": 0.2}), "'holitom-inner' comes to work at layer 1, below"),
    ):
        with pytest.raises(MmaccelError, match=says):
            mmaccel.accelerate_vlm(model, Recipe("two", (Stage("fastv", 0.5, {"layer": 2}), second)))
    with accelerated(model, "fastv"):
        last_logits(model, feed)
        assert not any("fall on layer" in note for note in model.mmaccel.stats()["notes"])


# --- the papers -------------------------------------------------------------------------------------------------------
def layers_at(name: str, depth: int, deepstack: int = 0) -> list[int]:
    """The layers a recipe works at in a language model of ``depth`` layers."""
    family = SimpleNamespace(
        depth=depth, attending=range(depth), deepstack=deepstack, has_cls=True, rope_kind=lambda layer: "default"
    )
    built = [m for _, m in mmaccel.get_recipe(name).build() if isinstance(m, LayerMethod)]
    return [m.fit(family).layer for m in built]  # type: ignore[arg-type, attr-defined]


#: recipes of several stages of which at least one works inside the language model
PAPERS = [
    name
    for name in oracle.named_recipes()
    if len(mmaccel.get_recipe(name).stages) > 1 and oracle.has_site(name, "layers")
]


@pytest.mark.parametrize("name", PAPERS)
def test_papers_as_recipes(name: str) -> None:
    for depth in (2, 4, 24, 28, 32, 40, 80):
        found = layers_at(name, depth)
        assert found and found == sorted(found) and all(1 <= layer < depth for layer in found)
    assert all(3 <= layer < 4 for layer in layers_at(name, 4, deepstack=3))
    family = "qwen2_5_vl"
    model, feed = tiny(family), dict(zoo.inputs(family, "video"))
    visual = zoo.visual_mask(family, model, feed["input_ids"])
    with accelerated(model, name):
        assert last_logits(model, feed).isfinite().all()
        assert 1 <= int((model.mmaccel.reduction.kept & visual).sum()) <= int(visual.sum())
    with accelerated(model, name, retain=0.25):
        last_logits(model, feed)
        assert int((model.mmaccel.reduction.kept & visual).sum()) <= -(-int(visual.sum()) // 4)


@pytest.mark.parametrize("retain", [0.75, 0.25, 0.1, 20])
def test_a_budget_reaches_both_halves_of_aim(retain: float) -> None:
    """Merging leaves what was asked, and page rank goes on from there, an eighth less at every stage."""
    model, feed = tiny("qwen2_5_vl", num_hidden_layers=8), dict(zoo.inputs("qwen2_5_vl", "video"))
    visual = int(zoo.visual_mask("qwen2_5_vl", model, feed["input_ids"]).sum())
    with accelerated(model, "aim", retain=retain):
        last_logits(model, feed)
        stages, layers = model.mmaccel.stats()["stages"], sorted(model.mmaccel.plan.stage_at_layer)
    assert layers == [4, 5, 6] and [stage["method"] for stage in stages] == ["aim-merge", *["aim-pagerank"] * 3]
    kept = [stage["tokens_kept"] for stage in stages]
    assert kept[0] == (20 if retain == 20 else int(visual * retain + 0.5)) and kept[-1] == 1
    assert kept == sorted(kept, reverse=True) and len(set(kept)) > 2


def test_a_budget_reaches_both_halves_of_holitom() -> None:
    """`retain` is what is left in the end, and twice as much is merged to, as in the paper, where that is not everything."""
    for retain, stages in ((0.25, [0.5, 0.25]), (0.1, [0.2, 0.1]), (0.8, [0.861774, 0.8]), (30, [60, 30])):
        assert [stage.retain for stage in mmaccel.get_recipe("holitom").override(retain=retain).stages] == stages
    model, feed = tiny("qwen2_5_vl"), dict(zoo.inputs("qwen2_5_vl", "video"))
    with accelerated(model, "holitom", retain=30):
        last_logits(model, feed)
        first, last = model.mmaccel.stats()["stages"]
    # twice 30 is more than the clip has
    assert first["tokens_in"] < 60 and last["resolved"] == last["tokens_kept"] == 30


def test_earlier_stages_leave_room_for_the_last() -> None:
    """Without an anchor `retain` sets the last stage, and those before it leave at least as much."""
    model, feed = tiny("qwen2_5_vl"), dict(zoo.inputs("qwen2_5_vl", "video"))
    visual = int(zoo.visual_mask("qwen2_5_vl", model, feed["input_ids"]).sum())
    what = Recipe("two", (Stage("random", 0.5), Stage("fastv", 0.25, {"layer": 2})))
    for retain, left in ((0.75, int(visual * 0.75 + 0.5)), (20, 20)):
        with accelerated(model, what, retain=retain):
            last_logits(model, feed)
            stats = model.mmaccel.stats()
        assert [stage["tokens_kept"] for stage in stats["stages"]] == [max(left, (visual + 1) // 2), left]
        assert ("stage 1 (fastv) left all" in " ".join(stats["notes"])) == (left > visual / 2)


def test_an_anchor_is_a_stage_with_a_budget() -> None:
    stages = (Stage("random", 0.5), Stage("snapkv", 0.25))
    for anchor in (1, 2, -1, True, "0"):
        with pytest.raises(MmaccelError, match="anchor=.* is not a stage with a budget"):
            Recipe("two", stages, anchor=anchor)  # type: ignore[arg-type]
    made = Recipe("two", stages, anchor=0)
    assert Recipe.from_json(made.to_json()) == made and made.primary == 0


#: methods whose layer by default is a number, not a share of the depth, and not the one that a model of four layers with three
#: of DeepStack has for them
ELSEWHERE = [name for name, kind in synthetic.offered(LayerMethod).items() if kind().layer not in (None, 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_default_layer_fits_any_model_and_a_given_one_is_refused(name: str) -> None:
    model, feed = tiny("qwen3_vl"), dict(zoo.inputs("qwen3_vl", "image"))
    with accelerated(model, name):
        last_logits(model, feed)
        assert {layer: stage.number for layer, stage in model.mmaccel.plan.stage_at_layer.items()} == {3: 0}
        default = mmaccel.get_method(name)().layer
        notes = model.mmaccel.stats()["notes"]
        # what else is said is said at any layer
        said = ("lets the content decide", "SmolLM2", "none were measured for this model")
        assert [note for note in notes if not any(words in note for words in said)] == [
            f"{name} works at layer 3: layer {default}, its default, is out of reach in this model"
        ]
    with pytest.raises(UnsupportedError, match=f"layer={default} is out of reach"):
        mmaccel.accelerate_vlm(model, name, layer=default)


def test_papers_keep_their_numbers() -> None:
    stages = mmaccel.get_recipe("aim").stages[1:]
    assert layers_at("aim", 28) == list(range(15, 23))
    assert [stage.retain for stage in stages[:-1]] == [0.25 * share / 8 for share in range(7, 0, -1)]
    assert stages[-1].retain == 1
    assert layers_at("mustdrop", 32) == [3, 7, 11, 15]
    assert layers_at("holitom", 28) == [18]
    assert layers_at("lazyllm-prefill", 32) == [9, 19, 28]
    assert [stage.retain for stage in mmaccel.get_recipe("lazyllm-prefill").stages] == pytest.approx([0.7, 0.49, 0.343])


@pytest.mark.parametrize(("retain", "shares"), [(None, (0.7, 0.49, 0.343)), (0.5, (0.793701, 0.629961, 0.5))])
def test_lazyllm_drops_the_same_share_at_every_stage(retain: float | None, shares: tuple[float, ...]) -> None:
    """Of what reached a stage stays what the last token attends to most in the layer before."""
    model, feed = tiny("llava", num_hidden_layers=8), dict(zoo.inputs("llava", "image"))
    visual = zoo.visual_mask("llava", model, feed["input_ids"])
    with accelerated(model, "lazyllm-prefill", retain=retain):
        last_logits(model, feed)
        history, stats = model.mmaccel.history, model.mmaccel.stats()
    assert [result.layer for result in history] == [2, 5, 7]
    before = visual
    for result, share, stage in zip(history, shares, stats["stages"], strict=True):
        paid, after = result.scores()["prompt_attention"], result.reduction.kept & visual
        for there, left, figures in zip(before, after, paid, strict=True):
            assert figures[left].min() >= figures[there & ~left].max()
        assert not (after & ~before).any() and stage["tokens_kept"] == int(after.sum())
        assert int(after[0].sum()) == int(int(visual[0].sum()) * share + 0.5)
        before = after


# --- sparsevlm --------------------------------------------------------------------------------------------------------
def test_sparsevlm_raters_are_the_words_that_visual_tokens_point_at() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 14, 8, generator=random)
    visual = torch.arange(14).expand(2, -1) % 7 < 4
    # text between and behind pictures; the second row has padding in front
    text = ~visual & (torch.arange(14) >= torch.tensor([[0], [5]]))
    visual = visual & (torch.arange(14) >= torch.tensor([[0], [5]]))
    rater = SparseVLM.prepare(hidden, text, visual)["rater"]
    for row in range(2):
        seen = visual[row].nonzero()[:, 0]
        words = [w for w in text[row].nonzero()[:, 0].tolist() if w > int(seen.max())]
        share = (hidden[row, seen] @ hidden[row, words].T).softmax(-1).mean(0)
        assert rater[row].nonzero()[:, 0].tolist() == [w for w, m in zip(words, share, strict=True) if m > share.mean()]
    # one word rates, and without a picture all words do
    assert SparseVLM.prepare(hidden[:, :5], text[:, :5], visual[:, :5])["rater"][0].tolist() == [0, 0, 0, 0, 1]
    assert SparseVLM.prepare(hidden, text, ~text & False)["rater"].bool().equal(text)


def test_sparsevlm_counts_raters_heads_and_ranks() -> None:
    layer = layer_of([9, 12], heads=4, groups=2)
    rater = layer.text & (torch.arange(12) % 2 == 0)
    layer = replace(layer, prepared={"rater": rater.float()})
    paid = full_map(layer).float().nan_to_num(0.0)
    seen = ~layer.text
    figures = SparseVLM(heads=2, adaptive=True).observe(layer)
    for row in range(2):
        mine = paid[row][:, rater[row]]
        heads = (mine * seen[row]).sum((1, 2)).topk(2).indices
        torch.testing.assert_close(figures["rater_attention"][row], mine[heads].mean((0, 1)))
        wanted = torch.linalg.matrix_rank(mine.mean(0) * seen[row])
        assert (figures["rater_rank"][row] == wanted).all() and wanted > 1
    tokens = tokens_of([((1, 10, 10), False)])
    ranked = replace(tokens, signals={**tokens.signals, "rater_rank": torch.full((1, 100), 3.0)})
    made = SparseVLM(adaptive=True, scale=13.5, recycle=0.0).reduce(ranked, torch.tensor([60]))
    assert int(made.kept.sum()) == 40


@pytest.mark.parametrize("count", [1, 2, 3, 12, 40, 99, 100])
def test_sparsevlm_recycles_within_its_budget(count: int) -> None:
    tokens = tokens_of([((1, 10, 10), False)])
    kept, pool, clusters = SparseVLM().shared(count, 100)
    assert kept + clusters == count and kept >= 1
    made = SparseVLM().reduce(tokens, torch.tensor([count]))
    best = tokens.signals["rater_attention"][0].argsort(descending=True)
    assert made.kept[0][best[:kept]].all() and int(made.kept.sum()) == count
    if clusters:
        assert pool == int(0.3 * (100 - kept)) + 1 and clusters == int(pool / 10) + 1
        assert float(made.mass()[0].sum()) == kept + pool


# --- what is looked at before it happens ------------------------------------------------------------------------------
def bare_attention(family: str, feed: dict, layer: int) -> Tensor:
    """``[B, H, S, S]`` of the bare model."""
    model = tiny(family)
    model.set_attn_implementation("eager")
    try:
        return model(**feed, output_attentions=True).attentions[layer]
    finally:
        model.set_attn_implementation("sdpa")


LOOKING = [(family, kind) for family in ("llava", "qwen2_5_vl", "qwen3_vl", "internvl") for kind in ("image", "uneven")]


@pytest.mark.parametrize(("family", "kind"), LOOKING)
@pytest.mark.parametrize("name", ["pyramiddrop-step", "flexselect", "gemfilter"])
def test_the_attention_that_a_layer_is_about_to_pay(family: str, kind: str, name: str) -> None:
    """What a method is shown in a look ahead is what the bare model does at that layer."""
    feed, layer = dict(zoo.inputs(family, kind)), 3 if family == "qwen3_vl" else 2
    paid, model = bare_attention(family, feed, layer), tiny(family)
    with accelerated(model, name, retain=0.3, layer=layer, processor=zoo.processor(family)):
        last_logits(model, feed)
        shown = model.mmaccel.history[0].scores()
        stats = model.mmaccel.stats()
    visual = zoo.visual_mask(family, model, feed["input_ids"])
    assert stats["visual_tokens_kept"] < int(visual.sum()) and stats["prompt_tokens"] == feed["input_ids"].numel()
    for row in range(len(visual)):
        seen = visual[row]
        after = torch.arange(len(seen)) > int(seen.nonzero()[-1])
        if name == "gemfilter":
            # logits up to a constant that the softmax has lost, and not pooled
            continue
        wanted = paid[row, :, -1].mean(0) if name == "pyramiddrop-step" else paid[row][:, after].amax((0, 1))
        figures = shown["prompt_attention" if name == "pyramiddrop-step" else "text_peak"]
        torch.testing.assert_close(figures[row, seen], wanted[seen], rtol=1e-3, atol=1e-5)


def test_gemfilter_smooths_logits() -> None:
    layer = layer_of([9, 12])
    match = GemFilter(kernel=3).observe(layer)["prompt_match"]
    for row, pad in ((0, 3), (1, 0)):
        keys = layer.key[row].repeat_interleave(2, 0)
        logits = (layer.query[row, :, -1:] @ keys.mT)[:, 0].mean(0) * layer.scaling
        logits[:pad] = 0
        wide = torch.nn.functional.pad(logits, (1, 1))
        wanted = (wide[:-2] + wide[1:-1] + wide[2:]) / 3
        torch.testing.assert_close(match[row, pad:], wanted[pad:])
        assert match[row, :pad].isneginf().all()
    with pytest.raises(MmaccelError, match="must be an odd number, got 2"):
        GemFilter(kernel=2)
    for kind in (GemFilter, FlexSelect):
        with pytest.raises(MmaccelError, match=f"`layer` of {kind.name} must be an int, at least 0"):
            kind(layer=-1)
        with pytest.raises(MmaccelError, match="has 4 layers"), accelerated(tiny("llava"), kind.name, layer=4):
            pass


@pytest.mark.parametrize(("family", "kind"), LOOKING)
@pytest.mark.parametrize("kernel", [1, 3])
def test_reform_compares_values_of_several_layers(family: str, kind: str, kernel: int) -> None:
    """Of visual tokens and of the question, as the bare model has them, side by side; padding takes no part."""
    feed, model, low = dict(zoo.inputs(family, kind)), tiny(family), 3 if family == "qwen3_vl" else 1
    layers, values = family_of(model).text.layers, dict[int, torch.Tensor]()
    hooks = [
        layers[at].self_attn.v_proj.register_forward_hook(lambda module, args, out, at=at: values.update({at: out}))
        for at in (low, low + 1)
        if at < len(layers)
    ]
    try:
        last_logits(model, feed)
    finally:
        for hook in hooks:
            hook.remove()
    options = {"layer": max(values), "below": tuple(at for at in values if at < max(values)), "kernel": kernel}
    with accelerated(model, Recipe("reform", (Stage("reform", 0.3, options),))):
        last_logits(model, feed)
        shown = model.mmaccel.history[0].scores()["question_match"]
    visual = zoo.visual_mask(family, model, feed["input_ids"])
    for row, seen in enumerate(visual):
        real = feed["attention_mask"][row].bool()
        after = torch.arange(len(seen)) > int(seen.nonzero()[-1])
        unit = torch.nn.functional.normalize(torch.cat([values[at][row] for at in sorted(values)], -1), dim=-1)
        match = (unit @ unit[after & real].mT).amax(-1).masked_fill(~real, -torch.inf)
        beside = torch.nn.functional.pad(match, (kernel // 2, kernel // 2), value=-torch.inf).unfold(0, kernel, 1)
        torch.testing.assert_close(shown[row, seen], beside.amax(-1)[seen], rtol=1e-3, atol=1e-5)


def test_reform_takes_layers_of_any_model() -> None:
    """Shares of the depth, of which some may be one layer; numbers above the last are refused."""
    assert REFORM().fit(family_of(tiny("llava"))).options() == {"layer": 2, "below": (1,)}
    assert REFORM(layer=1, below=(0.3, 0.4, 0.0)).fit(family_of(tiny("llava"))).options() == {"layer": 1, "below": (0,)}
    with pytest.raises(MmaccelError, match="has 4 layers"), accelerated(tiny("llava"), "reform", layer=4):
        pass
    with pytest.raises(MmaccelError, match="must be an odd number, got 4"):
        REFORM(kernel=4)
    for below in ((-1,), (1.5,), ("deep",), 0.5):
        with pytest.raises(MmaccelError, match="`below` of reform must be"):
            REFORM(below=below)  # type: ignore[arg-type]


def test_a_first_pass_behind_another_stage_and_another_turn() -> None:
    """It sees what is left, and nothing of it is stored."""
    model, feed = tiny("llava"), dict(zoo.inputs("llava", "uneven"))
    stages = [
        Stage("uniform", 0.5),
        Stage("gemfilter", 0.25, {"layer": 2}),
        Stage("pyramiddrop-step", 0.1, {"layer": 3}),
    ]
    with accelerated(model, Recipe("three", tuple(stages))):
        cache = model(**feed, use_cache=True).past_key_values
        kept = [stage["tokens_kept"] for stage in model.mmaccel.stats()["stages"]]
        first = cache.get_seq_length()
        assert first == feed["input_ids"].shape[1] and kept == sorted(kept, reverse=True)
        mask = torch.cat([feed["attention_mask"], feed["attention_mask"]], 1)
        again = model(**{**feed, "attention_mask": mask}, past_key_values=cache, use_cache=True)
        assert again.past_key_values.get_seq_length() == 2 * first
        assert [stage["tokens_kept"] for stage in model.mmaccel.stats()["stages"]] == kept


# --- zipvl ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("probes", [2, 3, 6, 20])
def test_zipvl_probes_the_end_and_evenly_over_the_prompt(probes: int) -> None:
    layer, lengths = layer_of([9, 12]), [9, 12]
    paid, figures = full_map(layer).float().nan_to_num(0.0), ZipVL(probes=probes).observe(layer)
    for row, length in enumerate(lengths):
        back = {*range(probes), *(probes + i * (length - probes) // probes for i in range(probes))}
        rows = [11 - i for i in sorted(back) if i < length]
        assert len(rows) == (length if probes > 5 else 2 * probes)
        total = paid[row].mean(0)[rows].sum(0)
        torch.testing.assert_close(figures["probe_attention"][row], total)
        sees = torch.tensor([sum(at >= key >= 12 - length for at in rows) for key in range(12)])
        torch.testing.assert_close(figures["probe_mean"][row], total / sees.clamp(min=1))


def test_zipvl_keeps_what_holds_the_mass() -> None:
    tokens = tokens_of([((1, 2, 4), False)])
    paid = torch.tensor([[0.0, 0.4, 0.05, 0.2, 0.05, 0.1, 0.15, 0.05]])
    # by the mean another order
    mean = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]])
    tokens = replace(tokens, signals={**tokens.signals, "probe_attention": paid, "probe_mean": mean})
    for tau, number in ((0.39, 1), (0.59, 2), (0.8, 4), (1.0, 7)):
        made = ZipVL(adaptive=True, tau=tau).reduce(tokens, torch.tensor([8]))
        assert made.kept[0].tolist() == [True] * number + [False] * (8 - number)
    assert int(ZipVL(adaptive=True, tau=0.8).reduce(tokens, torch.tensor([3])).kept.sum()) == 3
    assert int(ZipVL().reduce(tokens, torch.tensor([5])).kept.sum()) == 5
    with pytest.raises(MmaccelError, match="`tau` of zipvl-tokens must be greater than 0 and at most 1, got 0.0"):
        ZipVL(tau=0.0)
