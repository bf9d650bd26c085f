"""The cache stage: policies, budgets, compactors and schedules, any with any, and the cache they leave behind."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import mmaccel_kernels.importance.naive as kernel
import pytest
import torch
import zoo
from laws import helpers, oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerated
from mmaccel.kv import budgets, importance
from mmaccel.kv.cache import KeyIndex, Reading
from mmaccel.kv.chunks import by_chunks
from mmaccel.kv.compact import merge
from mmaccel.kv.eviction import choose, protected, rank
from mmaccel.kv.policies.a2sf import A2SF
from mmaccel.kv.policies.criticalkv import CriticalKV
from mmaccel.kv.policies.dycoke_cache import DyCokeCache
from mmaccel.kv.policies.elastic_cache import ElasticCache
from mmaccel.kv.policies.expected_attention import ExpectedAttention
from mmaccel.kv.policies.h2o import H2O
from mmaccel.kv.policies.infinipot_v import InfiniPotV, temporal_redundancy
from mmaccel.kv.policies.keydiff import KeyDiff
from mmaccel.kv.policies.knorm import KNorm
from mmaccel.kv.policies.lagkv import LagKV
from mmaccel.kv.policies.observed_attention import ObservedAttention
from mmaccel.kv.policies.snapkv import SnapKV
from mmaccel.kv.policies.streaming_llm import StreamingLLM
from mmaccel.kv.policies.tova import Tova
from mmaccel.kv.policies.vatp import VATP
from mmaccel.kv.policies.vl_cache import VLCache
from mmaccel.kv.policies.windowkv import WindowKV
from mmaccel.layers import streaming
from mmaccel.method import KeyBatch, LayerAttention, Policy

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ("llava", "qwen2_5_vl", "smolvlm")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def stage(method: str, retain: float | None = 0.3, **options: Any) -> Recipe:
    if method == "snapkv":
        options = {"window": 8, **options}
    text_retain = options.pop("text_retain", None)
    return Recipe(method, (Stage(method, retain, options),), text_retain=text_retain)


#: what is evicted at the end of the prompt, in all the ways there are
RECIPES = {
    "h2o": stage("h2o"),
    "vl-cache": stage("vl-cache"),
    "vl-cache-shared": stage("vl-cache", per_head=False, layer_budget="sparsity:0.8"),
    "observed": stage("observed-attention"),
    "tova": stage("tova"),
    "a2sf": stage("a2sf", recent=2),
    "vatp": stage("vatp", sinks=2),
    "knorm": stage("knorm"),
    "keydiff": stage("keydiff"),
    "lagkv": stage("lagkv", lag=4),
    "infinipot-v": stage("infinipot-v"),
    "elastic-evict": stage("elastic-cache", compact="evict"),
    "pyramid": stage("snapkv", layer_budget="pyramid"),
    "adaptive": stage("snapkv", head_budget="adaptive"),
    "concentrated": stage("h2o", head_budget="concentrated:0.1"),
    "safeguard": stage("h2o", head_budget="safeguard:0.5"),
    "prefix-adaptive": stage("h2o", layer_budget="prefix", head_budget="adaptive:0"),
    "variance": stage("h2o", layer_budget="variance"),
    "entropy": stage("h2o", layer_budget="entropy"),
    "criticalkv": stage("criticalkv", window=4),
    "expected-attention": stage("expected-attention"),
    "windowkv": stage("windowkv", window=4, width=3),
    "windowkv-average": stage("windowkv", window=4, width=3, strategy="average", layer_budget="uniform", joint=True),
    "chunks": stage("snapkv", chunk=3),
    "joint": stage("h2o", joint=True, sinks=2, recent=0.1),
    "text": stage("snapkv", text_retain=0.5, text_policy="knorm", protect=("question", "separators")),
}


# --- attention, in blocks ---------------------------------------------------------------------------------------------
def attention_of(
    pads: tuple[int, ...] = (0, 3), rows: int = 11, total: int = 14, visible: bool = True
) -> LayerAttention:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(len(pads), 6, rows, 8, generator=random)
    key = torch.randn(len(pads), 2, total, 8, generator=random)
    at, keys = torch.arange(rows) + total - rows, torch.arange(total)
    real = keys >= torch.tensor(pads)[:, None]
    mask = (keys <= at[:, None])[None] & real[:, None] & real[:, total - rows :, None]
    text = real[:, total - rows :] & (torch.arange(rows) % 3 > 0)
    return LayerAttention(query, key, mask[:, None] if visible else None, 8**-0.5, text)


@pytest.mark.parametrize("block", (1, 100, 1 << 24))
def test_column_sums_are_those_of_the_map(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", block)
    for attention in (attention_of(), attention_of((0, 0), visible=False)):
        rows = attention.query.shape[2]
        whole = attention.attention(0, rows).nan_to_num(0.0)
        torch.testing.assert_close(importance.column_sums(attention), whole.sum(2))
        weight = torch.rand(2, rows) * (torch.rand(2, rows) < 0.5)
        expected = (whole * weight[:, None, :, None]).sum(2)
        torch.testing.assert_close(importance.column_sums(attention, weight), expected)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # a view of something small may look large
        self.size = max(self.size, out.untyped_storage().nbytes() // 4 if isinstance(out, Tensor) else 0)
        return out


def test_the_map_of_a_long_prompt_never_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor at once is a block, whatever the length."""
    long, block = attention_of((0,), rows=256, total=256, visible=False), 6 * 256 * 16
    rows = torch.ones(1, 256, dtype=torch.bool)
    for module, run in (
        (kernel, lambda: importance.column_sums(long)),
        (streaming, lambda: importance.share_seen(long, rows, 0.01)),
    ):
        with Largest() as whole:
            run()
        assert whole.size >= 6 * 256 * 256
        monkeypatch.setattr(module, "BLOCK", block)
        with Largest() as seen:
            run()
        assert seen.size <= block


@pytest.mark.parametrize("block", (1, 1 << 24))
def test_the_share_of_entries_that_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BLOCK", block)
    attention = attention_of()
    rows = attention.text
    paid = attention.attention(0, 11)
    strong = (paid >= 0.2 * paid.amax(-1, keepdim=True)) & rows[:, None, :, None]
    assert attention.visible is not None
    entries = (attention.visible & rows[:, None, :, None]).sum((1, 2, 3)) * 6
    expected = strong.sum((1, 2, 3)) / entries
    assert (expected > 0.05).all() and (expected < 0.95).all()
    torch.testing.assert_close(importance.share_seen(attention, rows, 0.2), expected)


@pytest.mark.parametrize("block", [1, 1000])
def test_the_entropy_of_what_queries_pay(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all look at one key it is nought, where all look everywhere the logarithm of how many."""
    monkeypatch.setattr(streaming, "BLOCK", block)
    attention = attention_of()
    paid = attention.attention(0, 11).double()
    each = -(paid * paid.clamp(min=1e-300).log()).sum(-1)
    there = ~each.isnan()
    expected = each.nan_to_num().sum((1, 2)) / there.sum((1, 2))
    torch.testing.assert_close(importance.entropy(attention), expected.float())
    even = replace(attention, query=torch.zeros_like(attention.query))
    assert attention.visible is not None
    seen = attention.visible.sum(-1).double()
    want = seen.clamp(min=1).log().sum((1, 2)) / (seen > 0).sum((1, 2))
    torch.testing.assert_close(importance.entropy(even), want.float())


def test_text_behind_the_last_picture() -> None:
    text = torch.tensor([[1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]).bool()
    attention = replace(attention_of((0, 2, 0), rows=7, total=7), text=text)
    expected = [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert importance.behind_pictures(attention).long().tolist() == expected


# --- budgets ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
def test_layer_budgets_meet_their_mean(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    layers, size = int(torch.randint(1, 12, (1,), generator=random)), int(torch.randint(1, 400, (1,), generator=random))
    count = int(torch.randint(1, size + 1, (1,), generator=random))
    shares = torch.rand(layers, generator=random).tolist()
    scores = [torch.rand(size, generator=random) ** 4 for _ in range(layers)]
    made = (
        budgets.pyramid(count, [size] * layers, 20),
        budgets.by_shares(count, [size] * layers, shares, 0.5),
        budgets.by_shares(count, [size] * layers, [0.0] * layers),
        budgets.prefix(scores, count),
    )
    for row in made:
        assert sum(row) == count * layers and min(row) >= 0 and max(row) <= size
    assert made[0] == sorted(made[0], reverse=True)
    assert min(made[1]) >= min(count, max(1, size // 100)) and min(made[3]) >= 1


def test_a_pyramid_is_steep() -> None:
    assert budgets.pyramid(40, [1000] * 3, 20) == [78, 40, 2]
    assert budgets.pyramid(40, [50] * 3, 20) == [50, 40, 30]
    assert budgets.by_shares(10, [100, 100], [3.0, 1.0]) == [15, 5]
    assert budgets.by_shares(10, [100, 100], [3.0, 1.0], uniform=1.0) == [10, 10]
    # a layer that gets nothing keeps a hundredth
    assert budgets.by_shares(100, [1000, 1000], [1.0, 0.0]) == [190, 10]


@pytest.mark.parametrize("floor", (0.0, 0.2, 0.35, 1.0))
def test_heads_compete_for_what_the_layer_has(floor: float) -> None:
    random = torch.Generator().manual_seed(3)
    scores = torch.rand(3, 4, 30, generator=random) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    among = torch.rand(3, 30, generator=random) < 0.7
    count = torch.tensor([5, 1, 7])
    given = budgets.adaptive(scores, among, count, floor)
    assert torch.equal(given.sum(1), 4 * count)
    kept = budgets.safeguard(scores, among, count, floor)
    assert torch.equal(kept.sum((1, 2)), 4 * count) and not (kept & ~among[:, None]).any()
    least = (floor * count).floor().long()[:, None]
    assert (given >= least).all() and (kept.sum(-1) >= least).all()
    if floor == 1.0:
        assert (given == count[:, None]).all()
    else:
        assert (given[:, 3] > given[:, 0]).all()


def test_the_authors_cut_the_floor_of_a_head_to_a_whole_number() -> None:
    """Of 64 keys a head a fifth is sure: 12 in AdaKV's program, 12.8 here, where heads sum to the budget."""
    scores = torch.zeros(1, 2, 200)
    scores[0, 0, :5], scores[0, 1, :123] = 1.0, 2.0
    among, count = torch.ones(1, 200, dtype=torch.bool), torch.tensor([64])
    assert (budgets.adaptive(scores, among, count, 0.2, official=True) + 16).tolist() == [[32, 126]]
    assert budgets.adaptive(scores, among, count, 0.2).tolist() == [[17, 111]]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("layer_budget", f"pyramid:{beta}") for beta in ("0", "0.4", "-20", "nan", "inf", "1e400", "1e300")),
        *(("layer_budget", f"sparsity:{share}") for share in ("-0.1", "1.1", "nan")),
        *(("head_budget", f"{how}:{floor}") for how in ("adaptive", "safeguard") for floor in ("-1", "2", "nan")),
        ("compact", "ema:7"),
    ],
)
def test_numbers_behind_the_colon_that_mean_nothing_are_refused_by_the_wrapper(option: str, value: str) -> None:
    tiny = helpers.model("llava")
    with pytest.raises(MmaccelError, match=f"{option}='{value}': behind the colon stands a number from (0|0.5) to"):
        mmaccel.accelerate_vlm(tiny, "snapkv", **{option: value})
    assert not hasattr(tiny, "mmaccel")


def test_heads_that_concentrate_count_more() -> None:
    scores = torch.tensor([[[8.0, 1.0, 1.0, 0.0], [4.0, 2.0, 2.0, 2.0]]])
    among = torch.tensor([[True, True, True, False]])
    made = budgets.concentrated(scores, among, torch.tensor([1]))
    torch.testing.assert_close(made, scores * torch.tensor([0.8, 0.5])[:, None])


def test_layers_that_vary_less_get_more() -> None:
    even, uneven = torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([1.0, 5.0, 5.0, 5.0])
    shares = budgets.variance_ratios(torch.stack([even, uneven]))
    torch.testing.assert_close(shares, torch.tensor([-0.25, -0.75]).softmax(0))


# --- compactors -------------------------------------------------------------------------------------------------------
def by_hand(how: str, keys: Tensor, x: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
    """One head, ``[K, D]``: the definition, key by key."""
    out, flows = x.clone(), []
    anchors = kept.nonzero()[:, 0].tolist()
    for source in gone.nonzero()[:, 0].tolist():
        if how == "nearest":
            pivot, cosine = min(anchors, key=lambda a: (abs(a - source), a)), 1.0
        else:
            cosines = [float(torch.cosine_similarity(keys[source], keys[a], dim=0)) for a in anchors]
            pivot, cosine = anchors[cosines.index(max(cosines))], max(cosines)
        flows.append((source, pivot, cosine))
    bar = sum(c for *_, c in flows) / max(1, len(flows))
    for pivot in anchors:
        parts = [x[pivot]]
        for source, onto, cosine in flows:
            if onto != pivot:
                continue
            if how in ("pivot", "nearest"):
                parts.append((x[source] + x[pivot]) / 2 if how == "pivot" else x[source])
            elif cosine >= bar:
                parts.append(x[source] * (1.0 if how == "average" else cosine))
        out[pivot] = torch.stack(parts).mean(0)
    if how == "blend":
        for pivot in anchors:
            mine = [(s, (c + 1) / 2) for s, onto, c in flows if onto == pivot]
            total = 1 + sum(w for _, w in mine)
            out[pivot] = (x[pivot] + sum((w * x[s] for s, w in mine), torch.zeros_like(x[0]))) / total
    return out


@pytest.mark.parametrize("how", ("pivot", "average", "weighted", "ema", "nearest", "blend"))
def test_merging_is_its_definition(how: str) -> None:
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 3, 17, 4, generator=random), torch.randn(2, 3, 17, 4, generator=random)
    # padding in front, heads that keep different counts, one that keeps all
    there = (torch.arange(17) >= torch.tensor([0, 4])[:, None])[:, None].expand(2, 3, 17)
    kept = (torch.rand(2, 3, 17, generator=random) < torch.tensor([0.3, 0.6, 2.0])[:, None]) & there
    made = merge(how, keys, values, kept, there & ~kept)
    for b in range(2):
        for h in range(3):
            for x, ours in ((keys, made.keys), (values, made.values)):
                wanted = by_hand(how, keys[b, h], x[b, h], kept[b, h], (there & ~kept)[b, h])
                torch.testing.assert_close(ours[b, h, kept[b, h]], wanted[kept[b, h]])
    assert torch.equal(made.keys[:, 2], keys[:, 2]) and not torch.equal(made.keys[:, 0], keys[:, 0])


def test_the_bar_of_merging_moves_slowly() -> None:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 2, 17, 4, generator=random)
    kept = (torch.arange(17) < 5).expand(1, 2, 17)
    first = merge("ema", keys, keys, kept, ~kept, decay=0.75)
    again = merge("ema", keys, keys, kept, ~kept, decay=0.75, threshold=torch.zeros(1, 2))
    assert first.threshold is not None and again.threshold is not None
    torch.testing.assert_close(again.threshold, first.threshold / 4)
    # nothing merged: the bar stays
    idle = merge("ema", keys, keys, kept, torch.zeros_like(kept), threshold=torch.full((1, 2), 0.3))
    assert idle.threshold is not None and (idle.threshold == 0.3).all()


# --- policies ---------------------------------------------------------------------------------------------------------
POLICIES = [
    SnapKV(window=4),
    StreamingLLM(),
    H2O(),
    ObservedAttention(),
    VLCache(),
    VLCache(per_head=False),
    Tova(),
    KNorm(),
    KeyDiff(),
    LagKV(lag=3),
    InfiniPotV(),
    InfiniPotV(pooled=True),
    ElasticCache(),
    ElasticCache(faithful=True),
    DyCokeCache(),
    A2SF(),
    VATP(),
    CriticalKV(window=4),
    ExpectedAttention(),
    ExpectedAttention(covariance=False, weigh_values=False),
    WindowKV(window=4),
    WindowKV(window=4, width=3, strategy="average"),
]


def keys_of(pads: tuple[int, ...], heads: int = 2, group: int = 3, total: int = 30, window: int = 4) -> KeyBatch:
    """Left-padded rows with a clip of 5 frames of 4 patches before 4 tokens of text; a row does not depend on its padding."""
    random = torch.Generator().manual_seed(0)
    shape = (len(pads), heads, total, 8)
    at = torch.arange(total - 4 - 20, total - 4)
    visual = torch.zeros(len(pads), total, dtype=torch.bool)
    visual[:, at] = True
    valid = torch.arange(total) >= torch.tensor(pads)[:, None]
    cells = torch.full((len(pads), total, 3), -1)
    i = torch.arange(20)
    cells[:, at] = torch.stack([i // 4, i % 4 // 2, i % 2], dim=1)
    visual &= valid
    spread = torch.randn(len(pads), heads * group, 8, 8, generator=random)
    return KeyBatch(
        expected=(torch.randn(spread.shape[:3], generator=random), spread @ spread.mT),
        keys=torch.randn(shape, generator=random),
        values=torch.randn(shape, generator=random),
        queries=torch.randn(len(pads), heads * group, window, 8, generator=random),
        valid=valid,
        visual=visual,
        index=torch.arange(total).expand(len(pads), -1),
        scaling=8**-0.5,
        received=torch.rand(shape[:3], generator=random),
        count=torch.full((len(pads),), 12),
        picture=torch.where(visual, 0, -1),
        cells=torch.where(visual[..., None], cells, -1),
        outgoing=torch.rand(shape[:3], generator=random),
    )


def alone(keys: KeyBatch, row: int) -> KeyBatch:
    real, one = keys.valid[row], slice(row, row + 1)
    assert keys.received is not None and keys.count is not None and keys.picture is not None and keys.cells is not None
    assert keys.outgoing is not None and keys.expected is not None
    last = -min(keys.queries.shape[2], int(real.sum()))
    return replace(
        keys,
        keys=keys.keys[one, :, real],
        values=keys.values[one, :, real],
        queries=keys.queries[one, :, last:],
        places=keys.places[one, last:],
        valid=keys.valid[one, real],
        visual=keys.visual[one, real],
        index=keys.index[one, real],
        received=keys.received[one, :, real],
        count=keys.count[one],
        picture=keys.picture[one, real],
        cells=keys.cells[one, real],
        outgoing=keys.outgoing[one, :, real],
        expected=(keys.expected[0][one], keys.expected[1][one]),
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_a_padded_row_is_scored_as_alone(policy: Policy) -> None:
    # no multiple of LagKV's stretch
    keys = keys_of((0, 4))
    if policy.window:
        keys = replace(keys, queries=keys.queries[:, :, -policy.window :], places=keys.places[:, -policy.window :])
    score = rank(policy, keys)
    assert score.shape == keys.keys.shape[:3] and not score.isnan().any()
    assert (score[1][:, :4] == -torch.inf).all()
    for row in (0, 1):
        torch.testing.assert_close(score[row][:, keys.valid[row]], rank(policy, alone(keys, row))[0])


def test_every_policy_is_tested_here() -> None:
    own = {m for m in mmaccel.methods().values() if m.site == "cache" and m.__module__.startswith("mmaccel.kv")}
    assert own - {type(p) for p in POLICIES} == {mmaccel.method("mustdrop-cache")}


def test_what_a_query_paid_is_forgotten_step_by_step() -> None:
    """One prompt of n queries, or a shorter one and the others one by one: the same sums."""
    whole, policy = attention_of((0,), rows=14, visible=False), A2SF(forget=0.7)
    at_once = policy.observe(whole, torch.zeros(1, 2, 14))
    figures = torch.zeros(1, 2, 14)
    for start, stop in ((0, 9), (9, 10), (10, 14)):
        part = replace(whole, query=whole.query[:, :, start:stop], key=whole.key[:, :, :stop])
        figures[..., :stop] = policy.observe(part, figures[..., :stop])
    torch.testing.assert_close(figures, at_once)
    torch.testing.assert_close(A2SF(forget=1.0, gqa="mean").observe(whole, figures), H2O().observe(whole, figures))


def test_what_is_protected() -> None:
    keys = keys_of((0, 3))
    question = torch.tensor([[26, 28], [26, 30]])
    policy = StreamingLLM(sinks=0, recent=2, protect=("question",))
    must = protected(policy, keys, True, question)
    assert must[0].nonzero()[:, 0].tolist() == [26, 27, 28, 29] and must[1].nonzero()[:, 0].tolist() == [26, 27, 28, 29]
    assert protected(KNorm(sinks=2), keys)[1].nonzero()[:, 0].tolist() == [3, 4]
    assert not protected(KNorm(sinks=2), keys, start=False).any()
    assert protected(KNorm(recent=0.1), keys).sum(1).tolist() == [3, 3]
    assert keys.cells is not None
    newline = replace(keys, cells=keys.cells.masked_fill((keys.index == 9)[..., None], -1))
    assert protected(KNorm(protect=("separators",)), newline).nonzero()[:, 1].tolist() == [9, 9]


def test_chunks_stay_or_go_together() -> None:
    """Means over heads and three neighbours of one picture or of text, counted from where it begins; by hand."""
    picture = torch.tensor([[-1, -1, -1, -1, 0, 0, 1, 1, 1, 1, -1], [-1, -1, -1, 0, 0, 0, 0, 0, 0, 0, -1]])
    scores = torch.rand(2, 2, 11, generator=torch.Generator().manual_seed(0))
    scores[:, :, 10], scores[0, 0, 5] = torch.inf, -torch.inf
    keys = torch.zeros(2, 2, 11, 4)
    batch = KeyBatch(
        keys=keys,
        values=keys,
        queries=keys[:, :, :0],
        valid=torch.arange(11) >= torch.tensor([[0], [2]]),
        visual=picture >= 0,
        index=torch.arange(11).expand(2, -1),
        scaling=1.0,
        picture=picture,
    )
    got = by_chunks(scores, batch, 3)
    counted = scores.clone()
    counted[0, 0, 5] = scores[0][scores[0].isfinite()].min()
    together = ([[0, 1, 2], [3], [4, 5], [6, 7, 8], [9]], [[2], [3, 4, 5], [6, 7, 8], [9]])
    for row, chunks in enumerate(together):
        for chunk in chunks:
            mean = counted[row][:, chunk].mean().expand(2, len(chunk))
            finite = scores[row][:, chunk].isfinite()
            torch.testing.assert_close(got[row][:, chunk][finite], mean[finite])
    assert torch.equal(got.isfinite(), scores.isfinite()) and (got[:, :, 10] == torch.inf).all()


def test_infinipot_looks_for_patches_that_changed() -> None:
    random = torch.Generator().manual_seed(0)
    still = torch.randn(2, 1, 4, 8, generator=random).expand(2, 5, 4, 8).clone()
    still[:, 1, 2] = -still[:, 1, 2]
    frame, patch = torch.arange(20) // 4, torch.stack([torch.arange(20) % 4 // 2, torch.arange(20) % 2], dim=1)
    same = temporal_redundancy(still.flatten(1, 2), frame, patch, 4)
    expected = torch.ones(2, 5, 4)
    expected[:, 1, 2] = -1
    torch.testing.assert_close(same.view(2, 5, 4), expected)
    # a patch that the newest frame lacks is not redundant
    lacking = temporal_redundancy(still.flatten(1, 2)[:, :-1], frame[:-1], patch[:-1], 4).view(2, 19)
    assert (lacking[:, 3::4] == -1).all()


def test_elastic_cache_drops_at_a_distance() -> None:
    keys = replace(keys_of((0, 3)), decoding=True)
    for distance, slots in ((-5, (24, 24)), (2, (2, 5))):
        score = ElasticCache(distance=distance).score(keys)
        assert score[:, 0].masked_fill(~keys.valid, torch.inf).argmin(1).tolist() == list(slots)


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_budget": "pyramids"}, "layer_budget='pyramids' is unknown"),
        ({"layer_budget": "uniform:3"}, "is unknown"),
        ({"layer_budget": "pyramid:x"}, "a number"),
        ({"layer_budget": "pyramid:0"}, "a number from 0.5 to 1e[+]06"),
        ({"layer_budget": "pyramid:nan"}, "'pyramid:nan': behind the colon stands a number from"),
        ({"layer_budget": "pyramid:1e999"}, "a number from"),
        ({"layer_budget": "sparsity:1.5"}, "a number from 0 to 1"),
        ({"head_budget": "adaptive:-0.1"}, "a number from 0 to 1"),
        ({"compact": "ema:nan"}, "a number from 0 to 1"),
        ({"head_budget": "heads"}, "adaptive"),
        ({"compact": "melt"}, "pivot"),
        ({"protect": ("answers",)}, "separators or question"),
        ({"every": -1}, "every=-1"),
        ({"recent": 1.5}, "give an int"),
        ({"text_policy": "h2o"}, "needs keys only"),
        ({"text_policy": "divprune"}, "needs keys only"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said), accelerated(helpers.model("llava"), stage("h2o", **options)):
        pass


def test_shared_keys_have_no_budget_per_head() -> None:
    with (
        pytest.raises(MmaccelError, match="same keys for all heads"),
        accelerated(helpers.model("llava"), stage("tova", head_budget="adaptive")),
    ):
        pass


def test_recipes_of_all_options_are_data() -> None:
    for recipe in RECIPES.values():
        assert mmaccel.Recipe.from_json(recipe.to_json()) == recipe
    changed = mmaccel.recipe("h2o").override(layer_budget="pyramid:7", compact="pivot", every=2, recent=8)
    assert changed.stages[0].options == {"layer_budget": "pyramid:7", "compact": "pivot", "every": 2, "recent": 8}


# --- laws -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_evicting_is_hiding_and_a_row_is_the_row_alone(family: str, name: str) -> None:
    """Laws 2, 3 and 4 on rows with unequal pictures."""
    feed, recipe = zoo.inputs(family, "uneven"), RECIPES[name]
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, recipe, forced)
    prompt, steps = oracle.replay(family, feed, forced, got.seen)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    oracle.apart(got.steps, oracle.replay(family, feed, forced)[1])

    visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
    held = torch.stack(got.seen.later)
    among = valid if recipe.stages[0].options.get("joint") else visual
    segments: dict[tuple[int, int], int] = {}
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        model(**feed)
        for s in model.mmaccel.layout.segments:
            segments[s.row, s.picture] = segments.get((s.row, s.picture), 0) + len(s.places)
    for row in range(len(valid)):
        if recipe.stages[0].options.get("joint"):
            budget = mmaccel.budget.resolve(0.3, int(valid[row].sum()))
        else:
            budget = sum(mmaccel.budget.resolve(0.3, n) for (r, _), n in segments.items() if r == row)
        kept = (held[:, row] & among[row]).sum(-1)
        assert int(kept.sum()) == budget * kept.numel(), "the mean over layers and heads is the budget"
        options = recipe.stages[0].options
        split = mmaccel.method(recipe.stages[0].method)(**options)
        if split.layer_budget == "uniform" and split.head_budget == "uniform":
            assert (kept == budget).all()
        alone = zoo.single(family, feed, row)
        pads = valid.shape[1] - alone["input_ids"].shape[1]
        single = oracle.record(family, alone, recipe, forced[row : row + 1])
        for layer, lone in zip(held[:, row], single.seen.later, strict=True):
            assert torch.equal(layer[:, pads:], lone[0]), "alone it keeps other keys"
    if recipe.text_retain is None and not recipe.stages[0].options.get("joint"):
        assert (held | ~(valid & ~visual)[None, :, None]).all(), "text was dropped"
    elif recipe.text_retain is not None:
        text = valid & ~visual
        last = torch.where(visual, torch.arange(visual.shape[1]), -1).amax(1, keepdim=True)
        question = text & (torch.arange(visual.shape[1]) > last)
        kept_question = (held & question[None, :, None]).sum(-1)
        room = ((text.sum(1) + 1) // 2)[None, :, None]
        assert torch.equal(kept_question, torch.minimum(question.sum(1)[None, :, None], room).expand_as(kept_question))


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_budget_changes_nothing(name: str) -> None:
    """Law 1, with everything that merges, too."""
    family = "llava"
    feed, bare = zoo.inputs(family, "uneven"), oracle.bare(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    wanted, _ = oracle.decode(bare, feed, forced)
    options = {**RECIPES[name].stages[0].options, "compact": "pivot"}
    recipe = Recipe(name, (replace(RECIPES[name].stages[0], retain=1.0, options=options),))
    with accelerated(oracle.subject(family), recipe) as model:
        got, _ = oracle.decode(model, feed, forced)
    oracle.close(got, wanted)


@pytest.mark.parametrize("how", ("pivot", "weighted", "average", "nearest", "ema", "blend"))
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_merged_keys_are_stored(family: str, how: str) -> None:
    """Keys and values of the bare model, merged by hand onto the places that are kept."""
    feed = zoo.inputs(family, "image")
    recipe = stage("h2o", compact=how)
    full = oracle.bare(family)(**feed, use_cache=True).past_key_values
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        index, (keys, values) = layer.index.index.long(), layer.stored()
        for head in range(keys.shape[1]):
            kept = torch.zeros(whole.keys.shape[2], dtype=torch.bool)
            kept[index[0, head]] = True
            assert not kept.all()
            for ours, x in ((keys, whole.keys), (values, whole.values)):
                wanted = by_hand(how, whole.keys[0, head], x[0, head], kept, ~kept)[kept]
                torch.testing.assert_close(ours[0, head], wanted, rtol=1e-4, atol=1e-5)


# --- schedules --------------------------------------------------------------------------------------------------------
SCHEDULES = {
    "h2o": stage("h2o", every=1, joint=True, recent=4),
    "h2o-text": stage("h2o", every=1, text_retain=0.5, recent=2),
    "h2o-visual": stage("h2o", every=1),
    "every-3": stage("h2o", every=3, joint=True, recent=2),
    "streaming-llm": stage("streaming-llm", every=1, text_retain=1.0, sinks=2),
    "snapkv": stage("snapkv", every=2, joint=True, window=3),
    "adaptive": stage("h2o", every=1, joint=True, head_budget="adaptive:0", recent=1),
    "tova": stage("tova", every=1, joint=True),
    "a2sf": stage("a2sf", every=1, joint=True, recent=2, forget=0.5),
    "cap": stage("knorm", cap=20, joint=True),
    "elastic": stage("elastic-cache", every=1, joint=True, compact="evict", distance=-3, growth=0.5),
    "vl-cache": stage("vl-cache", every=2, text_retain=0.9),
    "criticalkv": stage("criticalkv", every=2, joint=True, head_budget="adaptive", window=4),
    "windowkv": stage("windowkv", every=2, joint=True, window=3, width=2),
}


def places(cache: Any, total: int) -> Tensor:
    """``[L, B, Hkv, total]`` bool: which places each head stores."""
    out = []
    for layer in cache.layers:
        index = layer.index.index.long()
        index = index if index.dim() == 3 else index[:, None].expand(-1, layer.keys.shape[1], -1)
        held = torch.zeros(*index.shape[:2], total + 1, dtype=torch.bool)
        out.append(held.scatter_(2, index.masked_fill(index < 0, total), True)[..., :total])
    return torch.stack(out)


def step_by_step(family: str, feed: Any, recipe: Recipe, forced: Tensor) -> tuple[Tensor, list[Tensor], Any]:
    """A loop of the caller's own: logits of every step, and what is stored after each."""
    total = feed["input_ids"].shape[1] + forced.shape[1]
    logits, held = [], []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(cache, total))
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            assert model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()
    logits.append(out.logits[:, -1])
    held.append(places(cache, total))
    return torch.stack(logits, dim=1), held, cache


def replay_steps(family: str, feed: Any, forced: Tensor, held: list[Tensor], **overrides: Any) -> Tensor:
    """The bare model in one forward, where the query of every step sees what was stored before it, and itself."""
    model = oracle.replayer(family, **overrides)
    padded = torch.cat([forced, forced[:, :1]], dim=1)
    whole, length = oracle.continued(feed, padded), feed["input_ids"].shape[1]
    config = model.config.get_text_config()
    groups = config.num_attention_heads // config.num_key_value_heads
    valid = whole["attention_mask"].bool()
    size = valid.shape[1]
    for number, layer in enumerate(oracle.text_model(model).layers):
        mask = torch.ones(size, size, dtype=torch.bool).tril() & valid[:, None]
        mask = mask[:, None].repeat(1, config.num_key_value_heads, 1, 1)
        for step in range(forced.shape[1]):
            mask[:, :, length + step] = held[step][number][..., :size]
        mask |= torch.eye(size, dtype=torch.bool)
        if (window := oracle.window_of(config, number)) is not None:
            mask &= torch.ones(size, size, dtype=torch.bool).triu(1 - window)
        layer.self_attn.visible = mask.repeat_interleave(groups, dim=1)
    return model(**whole, use_cache=False).logits[:, length - 1 :]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("qwen2_5_vl", "uneven"), ("internvl", "image")])
def test_evicting_while_decoding_is_hiding_from_then_on(family: str, kind: str, name: str) -> None:
    feed, recipe = zoo.inputs(family, kind), SCHEDULES[name]
    forced = oracle.force(family, len(feed["input_ids"]), 9)
    got, held, _ = step_by_step(family, feed, recipe, forced)
    oracle.close(got, replay_steps(family, feed, forced, held))
    options, counts = recipe.stages[0].options, torch.stack([h.sum(-1) for h in held])
    assert counts[-1].max() > 0 and not torch.equal(held[-1], held[0]), "nothing happened while decoding"
    for before, after in zip(held, held[1:], strict=False):
        assert not (after & ~before)[..., : feed["input_ids"].shape[1]].any(), "a key came back"
    if "cap" in options:
        assert (counts[1:] <= 20).all()
    elif "growth" in options:
        assert torch.equal(counts[-1], counts[0] + 4)
    elif options.get("joint") or recipe.text_retain is not None:
        every = options["every"]
        assert (counts[every::every] == counts[0]).all() and (counts <= counts[0] + every - 1).all()
    else:
        # text stays: pictures make room for what is written
        valid, visual = feed["attention_mask"].bool(), oracle.visual(family, feed)
        length = valid.shape[1]
        assert held[-1][..., length : length + 9].all()
        assert (held[-1][..., :length] | ~(valid & ~visual)[None, :, None]).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_batch_decodes_as_its_rows(name: str) -> None:
    family = "llava"
    feed, recipe = zoo.inputs(family, "uneven"), SCHEDULES[name]
    forced = oracle.force(family, len(feed["input_ids"]), 6)
    got, held, _ = step_by_step(family, feed, recipe, forced)
    for row in range(len(forced)):
        alone = zoo.single(family, feed, row)
        pads = feed["input_ids"].shape[1] - alone["input_ids"].shape[1]
        lone, kept, _ = step_by_step(family, alone, recipe, forced[row : row + 1])
        for ours, theirs in zip(held, kept, strict=True):
            assert torch.equal(ours[:, row, :, pads:], theirs[:, 0])
        oracle.close(got[row], lone[0])


@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv", "elastic"))
def test_beams_carry_their_own_figures(name: str) -> None:
    """What a beam has gathered goes where the beam goes: the best beam decodes as its tokens decode alone."""
    family, recipe = "llava", SCHEDULES[name]
    # some versions mix up the pictures of rows with several when they expand beams
    feed = zoo.inputs(family, "image", batch=2, question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=7, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        stats = model.mmaccel.stats()
    assert stats["kv_bytes"] == out.past_key_values.mmaccel.nbytes()
    tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
    assert (ways[:, :7] != ways[:, :1]).any(), "no beam was ever reordered"
    steps = torch.arange(tokens.shape[1])
    beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
    got, _, _ = step_by_step(family, feed, recipe, tokens[:, :-1])
    oracle.close(beams, got)


@pytest.mark.parametrize("name", ("h2o", "adaptive", "h2o-visual"))
@pytest.mark.parametrize("second", ("text", "image"))
def test_a_second_turn(name: str, second: str) -> None:
    """Many tokens, with or without a picture, on layers of unequal length: as long as the sum of what was stored."""
    family, recipe = "llava", SCHEDULES[name]
    feed, more = helpers.inputs(family), helpers.inputs(family, second, seed=1)
    with accelerated(oracle.subject(family), recipe) as model:
        out = helpers.generate(model, feed)
        kept, _ = helpers.follow(feed, out, more)
        before = places(out.past_key_values, kept["input_ids"].shape[1] + 3)
        again = helpers.generate(model, kept, past_key_values=out.past_key_values)
        stats = model.mmaccel.stats()
    cache = again.past_key_values
    assert cache is out.past_key_values and cache.get_seq_length() == kept["input_ids"].shape[1] + 3
    after = places(cache, cache.get_seq_length())
    assert stats["kv_bytes"] == cache.mmaccel.nbytes()
    assert not (after & ~before)[..., : feed["input_ids"].shape[1] + 3].any()
    if second == "image":
        # a joint budget is one of all new keys, the last token of the first answer included
        whole = name != "h2o-visual"
        new = more["input_ids"].shape[1] + 1 if whole else int(oracle.visual(family, more).sum())
        assert stats["stages"][0]["tokens_in"] == new
        # both pictures are known by their places, and told apart
        known = cache.mmaccel.kinds[0, :, 0]
        assert torch.equal(known >= 0, oracle.visual(family, kept)[0]) and known.unique().tolist() == [-1, 0, 1]


# --- the cache as a thing ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ("deepcopy", "saved"))
@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv"))
def test_a_copy_of_the_cache_goes_on_alike(name: str, how: str) -> None:
    family, recipe = "llava", SCHEDULES[name]
    feed = zoo.inputs(family, "uneven")
    forced = oracle.force(family, len(feed["input_ids"]), 6)
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        for token in forced[:, :2].T:
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
        if how == "deepcopy":
            other = copy.deepcopy(cache)
        else:
            file = io.BytesIO()
            torch.save(cache, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        size = other.mmaccel.nbytes()
        assert size == cache.mmaccel.nbytes()
        went = [
            torch.stack(
                [model(input_ids=t[:, None], past_key_values=c, use_cache=True).logits for t in forced[:, 2:].T]
            )
            for c in (cache, other)
        ]
    assert torch.equal(*went)
    mine, theirs = cache.mmaccel.layers[0], other.mmaccel.layers[0]
    assert (
        mine is cache.layers[0] and theirs is other.layers[0] and theirs.state is other.mmaccel and mine is not theirs
    )


def test_a_cache_that_goes_on_without_the_recipe() -> None:
    """What was carried may be stale or gone; the cache answers all the same, and takes the schedule up again."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    token, model = oracle.force(family, 2, 1), oracle.subject(family)
    with accelerated(model, SCHEDULES["h2o"]):
        cache = model(**feed, use_cache=True).past_key_values
        stored = len(cache.layers[0].index)
    with accelerated(model, stage("snapkv")):
        for _ in range(3):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        assert len(cache.layers[0].index) == stored + 3
    with accelerated(model, SCHEDULES["h2o"]):
        model(input_ids=token, past_key_values=cache, use_cache=True)
        assert len(cache.layers[0].index) == stored


@pytest.mark.parametrize("kind", ("image", "uneven"))
@pytest.mark.parametrize("name", ("h2o", "adaptive"))
def test_cropping_takes_the_figures_along(name: str, kind: str) -> None:
    family, feed = "llava", zoo.inputs("llava", kind)
    forced, model = oracle.force(family, len(feed["input_ids"]), 4), oracle.subject(family)
    recipe = SCHEDULES[name].override(every=100)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        model(input_ids=forced[:, :1], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        model(input_ids=forced[:, 1:], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.crop(-3)
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        assert ours.carried.received.shape == (*theirs.stored()[0].shape[:3],)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("name", ("tova", "elastic"))
def test_keys_that_heads_share_have_one_index(name: str) -> None:
    """Where all heads keep the same keys, their places are stored once, and rows of equal length as dense tensors."""
    family, feed = "llava", zoo.inputs("llava", "image")
    forced = oracle.force(family, 1, 3)
    _, _, cache = step_by_step(family, feed, SCHEDULES[name], forced)
    for layer in cache.layers:
        assert layer.index.index.dim() == 2 and layer.ragged is None and layer.keys.shape[1] > 1


def test_survivors_of_the_last_layer_are_all_that_is_stored() -> None:
    """MustDrop's cache: layers before a cut store what the last layer has, those before ``layer`` everything."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    stages = (Stage("fastv", 0.4, {"layer": 2}), Stage("mustdrop-cache", None, {"layer": 1}))
    forced = oracle.force(family, len(feed["input_ids"]))
    recipe = Recipe("both", stages)
    got = oracle.record(family, feed, recipe, forced)
    valid = feed["attention_mask"].bool()
    assert torch.equal(got.seen.later[0].any(1), valid)
    for held in got.seen.later[1:]:
        assert torch.equal(held, got.kept[:, None].expand_as(held)) and not torch.equal(held.any(1), valid)
    _, steps = oracle.replay(family, feed, forced, got.seen)
    oracle.close(got.steps, steps)
    with accelerated(oracle.subject(family), recipe) as model:
        model(**feed, use_cache=True)
        assert model.mmaccel.stats()["stages"][1]["resolved"] > 0


@pytest.mark.slow
def test_two_thousand_steps_do_not_drift() -> None:
    """Memory stays what it was, and every step is that of one long forward that sees the same keys."""
    family, steps, longer = "llava", 2000, {"max_position_embeddings": 4096}
    feed, model = zoo.inputs(family, "image"), oracle.subject(family, **longer)
    forced, length = oracle.force(family, 1, steps), feed["input_ids"].shape[1]
    logits, held, sizes = [], [], set()
    with accelerated(model, SCHEDULES["h2o"]):
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(cache, length + steps))
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            sizes.add(cache.mmaccel.nbytes())
    logits.append(out.logits[:, -1])
    assert len(sizes) == 1 and cache.get_seq_length() == length + steps
    oracle.close(torch.stack(logits, dim=1), replay_steps(family, feed, forced, held, **longer), 1e-4)


# --- choosing ---------------------------------------------------------------------------------------------------------
# --- schedules beside a codec -----------------------------------------------------------------------------------------
#: so small that tiny prompts fill pages
CODECS = {
    "kivi": Stage("kivi", None, {"bits": 2, "page": 16, "group": 16, "residual": 0}),
    "kivi-visual": Stage("kivi", None, {"bits": 4, "page": 16, "group": 16, "residual": 0, "visual_only": True}),
    "fp8": Stage("fp8", None, {"page": 16}),
    "vidkv": Stage("vidkv", None, {"page": 32}),
    "calibquant": Stage("calibquant", None, {"page": 16}),
}
#: every kind of schedule, and every codec
PACKED = {
    "h2o": "kivi",
    "h2o-text": "fp8",
    "h2o-visual": "kivi-visual",
    "every-3": "vidkv",
    "streaming-llm": "kivi",
    "snapkv": "fp8",
    "adaptive": "kivi",
    "tova": "calibquant",
    "cap": "kivi",
    "elastic": "vidkv",
}


def beside(recipe: Recipe, codec: str) -> Recipe:
    """With a budget that leaves whole pages."""
    return replace(recipe, stages=(replace(recipe.stages[0], retain=0.7), CODECS[codec]))


def held_by_place(cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What every head stores for every place seen: whether, and whether packed, ``[L, B, Hkv, seen]``; keys and values
    together, ``[L, B, Hkv, seen, 2 D]``, nought where nothing is stored."""
    there, packed, numbers = [], [], []
    for layer in cache.layers:
        both = torch.cat(layer.stored(), dim=-1)
        index = layer.index.by_head.long().expand(both.shape[:3])
        slot = index.masked_fill(index < 0, layer.seen)
        empty = torch.zeros(*index.shape[:2], layer.seen + 1, dtype=torch.bool)
        there.append(empty.scatter(2, slot, True)[..., :-1])
        packed.append(empty.scatter(2, slot, (torch.arange(index.shape[-1]) < layer.width).expand_as(slot))[..., :-1])
        wide = both.new_zeros(*index.shape[:2], layer.seen + 1, both.shape[-1])
        numbers.append(wide.scatter(2, slot[..., None].expand_as(both), both)[:, :, :-1])
    return torch.stack(there), torch.stack(packed), torch.stack(numbers)


def one_step(family: str, cache: Any, token: Tensor, **overrides: Any) -> Tensor:
    """The bare model over a plain cache of all places, where what is not stored is hidden from each head."""
    model, state, plain = oracle.replayer(family, **overrides), cache.mmaccel, DynamicCache()
    there, _, numbers = held_by_place(cache)
    heads = model.config.get_text_config().num_attention_heads
    for number, layer in enumerate(oracle.text_model(model).layers):
        plain.update(*numbers[number].chunk(2, dim=-1), number)
        visible = torch.nn.functional.pad(there[number], (0, 1), value=True)
        layer.self_attn.visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)[:, :, None]
    position = (state.seen - state.offset)[:, None]
    position = position.expand(3, -1, -1) if family in helpers.QWEN else position
    return model(input_ids=token[:, None], past_key_values=plain, position_ids=position).logits[:, -1]


class Once:
    """Watches a cache: what a head stores for a place may change once, when it is packed, and never again."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.dropped = cache, 0
        self.there, self.once, self.numbers = held_by_place(cache)

    def look(self) -> None:
        there, packed, numbers = held_by_place(self.cache)
        old = self.there.shape[3]
        both, fresh = self.there & there[..., :old], packed[..., :old] & ~self.once
        assert not (there[..., :old] & ~self.there).any(), "a key came back"
        assert torch.equal(numbers[..., :old, :][both & ~fresh], self.numbers[both & ~fresh]), "a key changed"
        self.dropped += int((self.once & ~there[..., :old]).sum())
        packed[..., :old] |= self.once & there[..., :old]
        self.there, self.once, self.numbers = there, packed, numbers


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_evicting_packed_keys_is_hiding_them(family: str, name: str) -> None:
    feed, recipe = zoo.inputs(family, "uneven"), beside(SCHEDULES[name], PACKED[name])
    forced = oracle.force(family, len(feed["input_ids"]), 40)
    counts = []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        cache = model(**feed, use_cache=True).past_key_values
        once = Once(cache)
        for token in forced.T:
            once.look()
            counts.append(once.there.sum(-1))
            wanted = one_step(family, cache, token)
            got = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            oracle.close(got, wanted)
            assert model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()
    assert once.dropped or name == "h2o-visual" and family == "qwen2_5_vl", "nothing packed was ever dropped"
    options, kept = SCHEDULES[name].stages[0].options, torch.stack(counts)
    if "cap" in options:
        assert (kept <= 20).all()
    elif "growth" in options:
        assert torch.equal(kept[-1], kept[0] + 19)
    elif options.get("joint"):
        every = options["every"]
        assert (kept[every::every] == kept[0]).all() and (kept <= kept[0] + every - 1).all()


def test_the_first_and_the_newest_stay_wherever_they_are_stored() -> None:
    """Packed pictures stand before the text that is older than they."""
    family, feed = "llava", zoo.inputs("llava", "image")
    recipe = beside(stage("streaming-llm", every=1, joint=True, sinks=2), "kivi-visual")
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        assert all(layer.width and layer.index.by_head[0, 0, 0] > 1 for layer in cache.mmaccel.layers)
        for token in oracle.force(family, 1, 6).T:
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
    there, seen = held_by_place(cache)[0], cache.mmaccel.seen
    count = int(there[0, 0, 0].sum())
    assert there[..., :2].all() and there[..., seen - count + 2 :].all() and not there[..., 2 : seen - count + 2].any()


@pytest.mark.parametrize("how", ("pivot", "average", "nearest"))
def test_merging_leaves_packed_keys_alone(how: str) -> None:
    """They do not take in others, which would quantise them again."""
    family, feed = "llava", zoo.inputs("llava", "image")
    recipe = beside(SCHEDULES["h2o"].override(compact=how), "kivi")
    changed = 0
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        for token in oracle.force(family, 1, 30).T:
            had, was_packed, were = held_by_place(cache)
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            there, packed, now = held_by_place(cache)
            same, fresh = there[..., :-1] & was_packed, (there & ~packed)[..., :-1]
            assert torch.equal(now[..., :-1, :][same], were[same])
            changed += int((now[..., :-1, :][fresh] != were[fresh]).any(-1).sum())
    assert changed, "nothing was merged"


@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv"))
def test_beams_and_later_turns_on_packed_keys(name: str) -> None:
    """The best beam decodes as its tokens decode alone; then another picture comes."""
    family, recipe = "llava", beside(SCHEDULES[name], "kivi")
    feed = zoo.inputs(family, "image", question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=24, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
        assert (ways[:, :24] != ways[:, :1]).any(), "no beam was ever reordered"
        steps = torch.arange(tokens.shape[1])
        beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
        cache, logits = DynamicCache(), []
        for token in (None, *tokens.T[:-1]):
            new = feed if token is None else {"input_ids": token[:, None]}
            logits.append(model(**new, past_key_values=cache, use_cache=True).logits[:, -1])
        oracle.close(beams, torch.stack(logits, dim=1))
        more = helpers.inputs(family, "image", seed=1)
        seen, once = cache.get_seq_length(), Once(cache)
        model(input_ids=more["input_ids"], pixel_values=more["pixel_values"], past_key_values=cache, use_cache=True)
        once.look()
        assert cache.get_seq_length() == seen + more["input_ids"].shape[1]
        assert once.there[..., seen:].any() and model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()


@pytest.mark.slow
def test_two_thousand_steps_of_packed_keys_do_not_drift() -> None:
    """Keys stay under the cap, bytes under those of full precision, and every step attends to exactly what is stored.

    The norms of keys leave a few tokens of every group, which is the most that packed pages can be asked for."""
    family, steps, longer, name = "llava", 2000, {"max_position_embeddings": 4096}, "cap"
    feed, model = zoo.inputs(family, "image"), oracle.subject(family, **longer)
    forced = oracle.force(family, 1, steps)
    sizes, keys = [], []
    with accelerated(model, SCHEDULES[name].override(cap=200)):
        full = model(**feed, use_cache=True).past_key_values
        for token in forced[:, :300].T:
            model(input_ids=token[:, None], past_key_values=full, use_cache=True)
    with accelerated(model, beside(SCHEDULES[name], "kivi").override(cap=200)):
        cache = model(**feed, use_cache=True).past_key_values
        once = Once(cache)
        for step, token in enumerate(forced.T):
            wanted = None
            if step % 50 == 49:
                once.look()
                wanted = one_step(family, cache, token, **longer)
            got = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            if wanted is not None:
                oracle.close(got, wanted, 1e-4)
            sizes.append(cache.mmaccel.nbytes())
            keys.append(max(int((layer.index.by_head >= 0).sum(-1).max()) for layer in cache.layers))
    assert max(keys) == 200 and cache.get_seq_length() == feed["input_ids"].shape[1] + steps
    assert once.dropped > 500 and max(sizes[1000:]) <= 1.1 * max(sizes[:1000])
    assert max(sizes) < full.mmaccel.nbytes()


def test_policies_without_a_budget_drop_what_they_score_lowest() -> None:
    keys = keys_of((0, 3))
    policy = mmaccel.method("mustdrop-cache")(layer=0)
    assert isinstance(policy, Policy)
    survivors = keys.valid & (torch.arange(30) % 2 == 0)
    score = rank(policy, replace(keys, survivors=survivors))
    kept = choose(policy, score, keys.visual, torch.tensor([3, 3]))
    assert torch.equal(kept, (survivors & keys.visual)[:, None].expand_as(kept))


# --- keys that come back ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("qwen2_5_vl", "uneven"), ("internvl", "image")])
@pytest.mark.parametrize("shipped", (False, True))
def test_every_step_reads_what_it_attends_to(family: str, kind: str, shipped: bool) -> None:
    """DyCoke: hidden from the query of the step, in the layers behind the choice; stored all the same."""
    feed = zoo.inputs(family, kind)
    recipe = stage("dycoke-cache", layer=2, alike=0.95, as_shipped=shipped)
    forced = oracle.force(family, len(feed["input_ids"]), 8)
    length = feed["input_ids"].shape[1]
    everything = torch.ones(4, len(forced), 1, length + 8, dtype=torch.bool)
    logits, held, chosen = [], [], []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            state, read = cache.mmaccel, everything.clone()
            visual = state.kinds[..., 0] >= 0
            assert torch.equal(visual, oracle.visual(family, feed))
            read[2:, :, 0, :length] = (state.recall.chosen | ~visual)[None]
            read[..., length + len(held) + 1 :] = False
            held.append(read)
            chosen.append(state.recall.chosen)
            assert model.mmaccel.stats()["kv_bytes"] == state.nbytes()
    logits.append(out.logits[:, -1])
    pads = ~feed["attention_mask"].bool()
    for read in held:
        read[..., :length] &= ~pads[None, :, None]
    heads = oracle.subject(family).config.get_text_config().num_key_value_heads
    wanted = replay_steps(family, feed, forced, [read.expand(-1, -1, heads, -1) for read in held])
    oracle.close(torch.stack(logits, dim=1), wanted)
    moves = torch.stack(chosen).long().diff(dim=0)
    assert (moves > 0).any() and (moves < 0).any(), "no key came back"
    counts, full = torch.stack(chosen).sum(-1), oracle.visual(family, feed).sum(-1)
    budget = torch.tensor([mmaccel.budget.resolve(0.3, int(n)) for n in full])
    fresh = (counts == budget) | (counts == full) if shipped else (counts - budget).abs() <= 1
    assert fresh.all() and counts.min() < full.min()


def test_beams_read_what_they_chose() -> None:
    # what a beam chose first it reads to the end
    family, recipe = "llava", stage("dycoke-cache", layer=2, alike=-1.0)
    # some versions mix up the pictures of rows with several when they expand beams
    feed = zoo.inputs(family, "image", batch=2, question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=7, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
    assert (ways[:, :7] != ways[:, :1]).any(), "no beam was ever reordered"
    steps = torch.arange(tokens.shape[1])
    beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
    got, _, _ = step_by_step(family, feed, recipe, tokens[:, :-1])
    oracle.close(beams, got)


# --- more of the laws -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("family", "overrides"), oracle.WINDOWED)
@pytest.mark.parametrize("name", ("h2o", "adaptive", "tova"))
def test_sliding_windows_count_original_places(family: str, overrides: dict[str, Any], name: str) -> None:
    """Keys that a window no longer reaches are evicted or not, and read by nobody."""
    feed, recipe = zoo.inputs(family, "image", question="a?"), SCHEDULES[name]
    forced = oracle.force(family, 1, 6)
    logits, held = [], []
    with accelerated(oracle.subject(family, **overrides), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(out.past_key_values, feed["input_ids"].shape[1] + 6))
            out = model(input_ids=token[:, None], past_key_values=out.past_key_values, use_cache=True)
    logits.append(out.logits[:, -1])
    wanted = replay_steps(family, feed, forced, held, **overrides)
    oracle.close(torch.stack(logits, dim=1), wanted)
    oracle.apart(wanted, replay_steps(family, feed, forced, held))


@pytest.mark.parametrize("name", ("h2o", "adaptive", "every-3"))
def test_on_top_of_eager_attention(name: str) -> None:
    family, recipe = "llava", SCHEDULES[name]
    feed, model = zoo.inputs(family, "uneven"), zoo.model(family)
    model.set_attn_implementation("eager")
    forced = oracle.force(family, 2, 6)
    with accelerated(model, recipe):
        got, cache = oracle.decode(model, feed, forced)
    wanted, held, _ = step_by_step(family, feed, recipe, forced[:, :-1])
    oracle.close(got, wanted)
    assert torch.equal(places(cache, held[-1].shape[-1]), held[-1])


@pytest.mark.parametrize("how", ("pivot", "ema", "nearest"))
def test_merging_while_decoding(how: str) -> None:
    """A step with a merge stores what the same step without one stores, merged by hand."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    token, model = oracle.force(family, 2, 1), oracle.subject(family)
    recipe = SCHEDULES["h2o"].override(compact=how)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        bar = [layer.carried.threshold for layer in twin.layers]
        model(input_ids=token, past_key_values=cache, use_cache=True)
    with accelerated(model, recipe.override(every=100)):
        model(input_ids=token, past_key_values=twin, use_cache=True)
    merged = 0
    for ours, whole, before in zip(cache.layers, twin.layers, bar, strict=True):
        keys, values = ours.stored()
        all_keys, all_values = whole.stored()
        for b in range(2):
            for h in range(keys.shape[1]):
                place, kept_place = whole.index.index[b, h], ours.index.index[b, h]
                kept, gone = torch.isin(place, kept_place) & (place >= 0), ~torch.isin(place, kept_place)
                assert int(gone.sum()) == 1
                if how == "ema":
                    assert before is not None
                    best = torch.cosine_similarity(all_keys[b, h][gone], all_keys[b, h][kept], dim=-1).max()
                    passes = best >= 0.5 * before[b, h] + 0.5 * best
                    mine = "weighted" if passes else None
                else:
                    mine = how
                for got, x in ((keys, all_keys), (values, all_values)):
                    wanted = by_hand(mine, all_keys[b, h], x[b, h], kept, gone)[kept] if mine else x[b, h][kept]
                    torch.testing.assert_close(got[b, h][kept_place >= 0], wanted, rtol=1e-4, atol=1e-5)
                    merged += int(not torch.equal(wanted, x[b, h][kept]))
    assert merged


def test_layers_of_a_deferred_budget_are_freed() -> None:
    """Whole keys of a layer live until the forward is over, and no longer."""
    family, feed = "llava", zoo.inputs("llava", "image")
    with accelerated(oracle.subject(family), RECIPES["vl-cache"]) as model:
        cache = model(**feed, use_cache=True).past_key_values
        stats = model.mmaccel.stats()
    unit = 2 * 4 * cache.layers[0].stored()[0].shape[-1]
    stored = sum(int((layer.index.index >= 0).sum()) for layer in cache.layers)
    lengths = {len(layer.index) for layer in cache.layers}
    assert len(lengths) > 1, "all layers have the same budget: this case proves nothing"
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    held += sum(
        t.untyped_storage().nbytes()
        for layer in cache.layers
        if layer.ragged
        for t in (layer.ragged.keys, layer.ragged.values)
    )
    assert held == unit * stored < stats["kv_bytes"] < unit * stored + 8 * stored + 4096


@pytest.mark.parametrize(
    "name",
    sorted(n for n, r in mmaccel.recipes().items() if r.stages and mmaccel.method(r.stages[-1].method).site == "cache"),
)
def test_every_recipe_of_the_book_runs(name: str) -> None:
    family, feed = "llava", helpers.inputs("llava", "uneven")
    with accelerated(oracle.subject(family), name) as model:
        out = helpers.generate(model, feed, new=4)
        stats = model.mmaccel.stats()
    assert out.sequences.shape[1] == feed["input_ids"].shape[1] + 4
    assert stats["kv_bytes"] == out.past_key_values.mmaccel.nbytes() and stats["stages"][-1]["site"] == "cache"


def test_a_second_turn_is_scored_by_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was observed reaches the score at the keys of this forward, and merges leave earlier turns alone."""
    family, feed, more = "llava", helpers.inputs("llava"), helpers.inputs("llava", seed=1)
    seen: list[tuple[Tensor, Tensor]] = []
    original = H2O.score

    def score(self: H2O, keys: KeyBatch) -> Tensor:
        attention, figures = observed[-1]
        assert torch.equal(keys.received, figures[..., -keys.index.shape[1] :])
        assert torch.equal(keys.keys, attention.key[:, :, -keys.index.shape[1] :])
        seen.append((keys.keys, keys.received))
        return original(self, keys)

    observed: list[tuple[LayerAttention, Tensor]] = []
    look = H2O.observe

    def observe(self: H2O, attention: LayerAttention, before: Tensor) -> Tensor:
        observed.append((attention, look(self, attention, before)))
        return observed[-1][1]

    monkeypatch.setattr(H2O, "score", score)
    monkeypatch.setattr(H2O, "observe", observe)
    with accelerated(oracle.subject(family), stage("h2o", compact="pivot")) as model:
        out = helpers.generate(model, feed)
        kept, _ = helpers.follow(feed, out, more)
        before = [[x.clone() for x in layer.stored()] for layer in out.past_key_values.layers]
        again = helpers.generate(model, kept, past_key_values=out.past_key_values)
    assert len(seen) == 2 * len(before)
    for layer, (keys, values) in zip(again.past_key_values.layers, before, strict=True):
        for ours, old in zip(layer.stored(), (keys, values), strict=True):
            assert torch.equal(ours[:, :, : old.shape[2]], old)


def test_vl_cache_asks_the_text_behind_the_last_picture() -> None:
    text = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 1, 1]]).bool()
    attention = replace(attention_of((0,), rows=9, total=9, visible=False), text=text)
    expected = attention.attention(7, 9).sum(2).unflatten(1, (2, 3)).sum(2)
    torch.testing.assert_close(VLCache().observe(attention, torch.zeros(1, 2, 9)), expected)
    keys = replace(bare := keys_of((0,)), received=torch.rand(1, 2, 30))
    assert bare.received is not None and keys.received is not None
    shared = VLCache(per_head=False).score(keys)
    torch.testing.assert_close(shared, keys.received.sum(1, keepdim=True).expand(1, 2, 30))


@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv"))
def test_a_row_of_the_cache_goes_on_alone(name: str) -> None:
    """What is carried for a row leaves with it."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    forced, model = oracle.force(family, 2, 5), oracle.subject(family)
    with accelerated(model, SCHEDULES[name]):
        cache = model(**feed, use_cache=True).past_key_values
        model(input_ids=forced[:, :1], past_key_values=cache, use_cache=True)
        row = copy.deepcopy(cache)
        row.batch_select_indices(torch.tensor([1]))
        assert len(row.mmaccel.kinds) == 1 and row.mmaccel.nbytes() < cache.mmaccel.nbytes()
        for token in forced[:, 1:].T:
            both = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits
            alone = model(input_ids=token[1:, None], past_key_values=row, use_cache=True).logits
            oracle.close(alone[0], both[1])
    total = feed["input_ids"].shape[1] + 5
    assert torch.equal(places(row, total)[:, 0], places(cache, total)[:, 1])


def test_reading_keeps_whatever_came_later() -> None:
    index = KeyIndex(torch.tensor([[0, 1, 2, 3, 4, 5], [-1, 1, 2, 3, 4, 5]]), True, 6)
    reading = Reading(1, torch.tensor([[True, False, True, False], [True, True, False, False]]))
    assert reading.index(index).index.tolist() == [[0, 2, 4, 5], [1, 4, 5, -1]]
    keys = torch.arange(12.0).view(2, 1, 6, 1)
    read, _ = reading.read(index, keys, keys)
    assert read[0, 0, :, 0].tolist() == [0, 2, 4, 5] and read[1, 0, :3, 0].tolist() == [7, 10, 11]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_values_are_weighed_behind_the_output_projection(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prompt, and where heads store different keys while decoding."""
    seen: list[KeyBatch] = []
    score = CriticalKV.score
    monkeypatch.setattr(CriticalKV, "score", lambda self, keys: seen.append(keys) or score(self, keys))
    model, feed = helpers.model(family), zoo.inputs(family, "uneven")
    recipe = stage("criticalkv", every=1, joint=True, head_budget="adaptive", window=4)
    with accelerated(model, recipe), torch.no_grad():
        helpers.generate(model, feed, new=3)
    text = model.model.language_model
    heads, batch = text.config.num_key_value_heads, len(feed["input_ids"])
    assert {len(keys.keys) for keys in seen} == {batch, batch * heads}
    for keys in seen:
        weight = text.layers[keys.layer].self_attn.o_proj.weight
        values = keys.values.reshape(batch, heads, *keys.values.shape[2:])
        values = values.repeat_interleave(text.config.num_attention_heads // heads, dim=1)
        sent = values[..., None, :] * weight.unflatten(1, (values.shape[1], -1)).transpose(0, 1)[None, :, None]
        want = sent.sum(-1).abs().sum(-1).unflatten(1, (heads, -1)).mean(2)
        torch.testing.assert_close(keys.outgoing, want.view_as(keys.outgoing))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_queries_to_come_are_those_of_the_prompt_turned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and covariance of turned draws of a bare model's queries before RoPE, from the position at which it goes on."""
    model, feed, future, sinks = zoo.model(family), zoo.inputs(family), 40, 4
    text, before, asked = model.model.language_model, {}, []

    def note(number: int) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            before.setdefault(number, out)

        return hook

    hooks = [
        text.rotary_emb.register_forward_pre_hook(
            lambda _, args, given: asked.append([*args, *given.values()][1]), with_kwargs=True
        )
    ]
    for number, layer in enumerate(text.layers):
        last = layer.self_attn.q_norm if family == "qwen3_vl" else layer.self_attn.q_proj
        hooks.append(last.register_forward_hook(note(number)))
    model.generate(**feed, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    for hook in hooks:
        hook.remove()
    seen: list[KeyBatch] = []
    score = ExpectedAttention.score
    monkeypatch.setattr(ExpectedAttention, "score", lambda self, keys: seen.append(keys) or score(self, keys))
    with accelerated(model, stage("expected-attention", future=future, sinks=sinks)):
        model(**feed)
    assert asked[1].numel() in (1, 3)
    position = asked[1] + torch.arange(future)
    cos, sin = text.rotary_emb(torch.zeros(1), position)
    assert len(seen) == len(text.layers)
    for keys in seen:
        queries = before[keys.layer].flatten(2).unflatten(2, (-1, cos.shape[-1]))[:, sinks:].transpose(1, 2)
        # the mean over positions of every query turned to all of them
        halves = queries.chunk(2, dim=-1)
        swapped = torch.cat([-halves[1], halves[0]], dim=-1)
        turned = (queries[:, :, :, None] * cos[:, None, None] + swapped[:, :, :, None] * sin[:, None, None]).mean(3)
        assert keys.expected is not None
        torch.testing.assert_close(keys.expected[0], turned.mean(2))
        off = turned - turned.mean(2, keepdim=True)
        torch.testing.assert_close(keys.expected[1], off.mT @ off / turned.shape[2])


def test_expected_attention_is_the_mean_of_draws() -> None:
    keys = keys_of((0,), group=1)
    assert keys.expected is not None
    mean, covariance = keys.expected[0], keys.expected[1] / 8
    policy = ExpectedAttention(sinks=2, weigh_values=False)
    ours = policy.score(replace(keys, expected=(mean, covariance)))
    factor = torch.linalg.cholesky(covariance)
    draws = torch.randn(400_000, 8, generator=torch.Generator().manual_seed(1))
    for head in range(2):
        logits = (mean[0, head] + draws @ factor[0, head].T) @ keys.keys[0, head, 2:].T * keys.scaling
        weight = logits.double().exp().mean(0)
        torch.testing.assert_close(ours[0, head, 2:].double(), weight / weight.sum(), rtol=0.03, atol=1e-4)
    assert (ours[..., :2] == torch.inf).all()
    weighed = ExpectedAttention(sinks=2).score(replace(keys, expected=(mean, covariance)))
    torch.testing.assert_close(weighed[..., 2:], (ours * keys.values.norm(dim=-1))[..., 2:])
    for options, said in (({"future": 0}, "positions ahead"), ({"every": 2}, "leave out every and cap")):
        with pytest.raises(MmaccelError, match=said):
            ExpectedAttention(**options)
    model = zoo.model("llava")
    del model.model.language_model.layers[1].self_attn.q_proj
    with pytest.raises(MmaccelError, match="has no q_proj"), accelerated(model, "expected-attention"):
        pass


class Coded(Tensor):
    """Quantised weights as torchao makes them: they say float32, and know what a linear layer needs."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        raise NotImplementedError(f"{func} of coded weights")


def test_critical_keys_are_half_of_the_budget() -> None:
    """Half by attention alone, half by attention and value; a quantised model has no projection to look at."""
    keys = keys_of((0,))
    plain = SnapKV(window=4).score(keys)[0]
    ours = CriticalKV(window=4).score(keys)[0]
    for head in range(2):
        best = plain[head].masked_fill(~keys.visual[0], -torch.inf).topk(6).indices
        assert (ours[head, best] == torch.inf).all()
        rest = keys.visual[0].clone()
        rest[best] = False
        assert keys.outgoing is not None
        torch.testing.assert_close(ours[head, rest], (plain[head, rest] + 1e-4) * keys.outgoing[0, head, rest])
    model = zoo.model("llava")
    model.model.language_model.layers[1].self_attn.o_proj.weight.requires_grad_(False).data = torch.zeros(4).byte()
    with pytest.raises(MmaccelError, match="use snapkv or vatp"), accelerated(model, "criticalkv"):
        pass
    # numbers, to look at it, that cannot be computed with
    coded = zoo.model("llava")
    projection = coded.model.language_model.layers[1].self_attn.o_proj
    projection.weight = torch.nn.Parameter(Coded(projection.weight), requires_grad=False)
    with pytest.raises(MmaccelError, match="use snapkv or vatp"), accelerated(coded, "criticalkv"):
        pass
    with pytest.raises(MmaccelError, match="first from 0 to 1"):
        CriticalKV(first=2.0)


def test_windows_of_keys_stay_or_go_together() -> None:
    """Each is counted from where a picture or text begins, and ends before the last queries; by hand."""
    keys, seen = keys_of((0, 4), window=3), torch.arange(30) <= torch.arange(27, 30)[:, None]
    pictures = [[*range(6, 14)], [*range(14, 22)], [*range(22, 26)]]
    for row, text in enumerate(([*range(6)], [4, 5])):
        queries = keys.queries[row].unflatten(0, (2, 3))
        logits = torch.einsum("hgqd,hkd->hgqk", queries, keys.keys[row]) * keys.scaling
        paid = logits.masked_fill(~(seen & keys.valid[row]), -torch.inf).softmax(-1).mean(2).flatten(0, 1)
        for strategy, most in (("max", 4), ("average", 8)):
            policy, means = WindowKV(window=3, strategy=strategy), []
            ours = policy.score(keys)[row]
            for window in [*pictures, text, [26]]:
                means.append(paid[:, window].topk(min(most, len(window))).values.mean())
                torch.testing.assert_close(ours[:, window], means[-1].expand(2, len(window)))
            assert (ours[:, 27:] == torch.inf).all() and (ours[:, : text[0]] == -torch.inf).all()
            # the budget is exact: of the last window that stays its first keys do
            order = sorted(range(3), key=lambda window: -means[window])
            want = sorted([at for window in order for at in pictures[window]][:13])
            kept = choose(policy, ours[None], keys.visual[row : row + 1], torch.tensor([13]))[0]
            assert [head.nonzero()[:, 0].tolist() for head in kept] == [want, want]
    # half of a window of one key is that key
    single = (WindowKV(window=3, width=1, strategy=strategy).score(keys) for strategy in ("max", "average"))
    torch.testing.assert_close(*single)


def test_windowkv_stores_the_same_keys_for_all_heads_and_fewer_in_higher_layers() -> None:
    feed = zoo.inputs("llava")
    with accelerated(oracle.subject("llava"), stage("windowkv")) as model:
        cache, visual = model(**feed, use_cache=True).past_key_values, int(model.mmaccel.layout.visual.sum())
    assert all(layer.index.index.dim() == 2 for layer in cache.layers)
    text, count = feed["input_ids"].shape[1] - visual, round(0.3 * visual)
    held = [len(layer.index) - text for layer in cache.layers]
    assert held == budgets.pyramid(count, [visual] * len(held), 1.75) and held[-1] == round(count / 1.75)
    for options in ({"window": 0}, {"width": 0}):
        with pytest.raises(MmaccelError, match="window and width of 1 or more"):
            WindowKV(**options)
    with pytest.raises(MmaccelError, match="'max' and 'average', not 'min'"):
        WindowKV(strategy="min")  # type: ignore[arg-type]


def test_layers_whose_attention_is_spread_keep_more() -> None:
    """Their budgets rise with the exponential of the entropy that the bare attention has."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    entropies: list[Tensor] = []
    tiny.set_attn_implementation("eager")
    with torch.no_grad():
        maps = tiny(**feed, output_attentions=True).attentions
    for paid in maps:
        entropies.append(-(paid * paid.clamp(min=1e-30).log()).sum(-1).mean((1, 2)))
    with accelerated(tiny, stage("h2o", 0.4, layer_budget="entropy")), torch.no_grad():
        cache = tiny(**feed, use_cache=True).past_key_values
        visual = int(tiny.mmaccel.layout.visual.sum())
    lengths = [int((layer.index.index[0] >= 0).sum(-1).max()) for layer in cache.layers]
    held = [length - (feed["input_ids"].shape[1] - visual) for length in lengths]
    shares = torch.stack(entropies)[:, 0].exp()
    assert held == budgets.by_shares(round(0.4 * visual), [visual] * len(held), shares.tolist())
    assert len(set(held)) > 1


def test_official_rounding_gives_the_layers_the_whole_steps_of_pyramidkv() -> None:
    feed = zoo.inputs("llava")
    recipe = replace(stage("snapkv", layer_budget="pyramid:7", joint=True, window=4), rounding="official")
    with accelerated(oracle.subject("llava"), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
    size = feed["input_ids"].shape[1]
    held = [len(layer.index) for layer in cache.layers]
    assert held == budgets.pyramid_official(round(0.3 * size), 4, size, len(held), 7)
    assert held != budgets.pyramid(round(0.3 * size), [size] * len(held), 7)


def test_elastic_cache_hears_all_heads() -> None:
    attention = attention_of((0,), rows=9, total=9, visible=False)
    expected = attention.attention(0, 9).sum(2).mean(1)
    seen = ElasticCache().observe(attention, torch.zeros(1, 2, 9))
    torch.testing.assert_close(seen, expected[:, None].expand(1, 2, 9))
