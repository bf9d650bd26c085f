"""Every policy by itself: what it scores, for rows with and without padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic
import torch
import zoo
from evicting import stage
from laws import oracle
from samples import attention_of, keys_of
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, accelerated
from mmaccel.kv import budgets
from mmaccel.kv.policies.a2sf import A2SF
from mmaccel.kv.policies.capkv import CapKV
from mmaccel.kv.policies.compactor import Compactor
from mmaccel.kv.policies.criticalkv import CriticalKV
from mmaccel.kv.policies.cur import CUR
from mmaccel.kv.policies.dycoke_cache import DyCokeCache
from mmaccel.kv.policies.elastic_cache import ElasticCache
from mmaccel.kv.policies.em_llm import EMLLM
from mmaccel.kv.policies.expected_attention import ExpectedAttention
from mmaccel.kv.policies.frame_bounds import FrameBounds
from mmaccel.kv.policies.h2o import H2O
from mmaccel.kv.policies.hermes import HERMES
from mmaccel.kv.policies.infinipot_v import Frames, InfiniPotV
from mmaccel.kv.policies.infllm import InfLLM
from mmaccel.kv.policies.keydiff import KeyDiff
from mmaccel.kv.policies.keyformer import Keyformer
from mmaccel.kv.policies.knorm import KNorm
from mmaccel.kv.policies.kvzip import KVzip
from mmaccel.kv.policies.lagkv import LagKV
from mmaccel.kv.policies.laq import LAQ
from mmaccel.kv.policies.leverage import Leverage
from mmaccel.kv.policies.magicdec import MagicDec
from mmaccel.kv.policies.morphkv import MorphKV
from mmaccel.kv.policies.noncausal_attention import NonCausalAttention
from mmaccel.kv.policies.observed_attention import ObservedAttention
from mmaccel.kv.policies.qfilter import QFilter
from mmaccel.kv.policies.quickprefill import QuickPrefill
from mmaccel.kv.policies.raas import RaaS
from mmaccel.kv.policies.rekv import ReKV
from mmaccel.kv.policies.rpc import RPC
from mmaccel.kv.policies.sepllm import SepLLM
from mmaccel.kv.policies.sirllm import SirLLM
from mmaccel.kv.policies.snapkv import SnapKV
from mmaccel.kv.policies.speckv import SpecKV
from mmaccel.kv.policies.streaming_llm import StreamingLLM
from mmaccel.kv.policies.streamingtom import StreamingTOM
from mmaccel.kv.policies.streammem import StreamMem
from mmaccel.kv.policies.tova import Tova
from mmaccel.kv.policies.vatp import VATP
from mmaccel.kv.policies.visionpulse import VisionPulse
from mmaccel.kv.policies.vl_cache import VLCache
from mmaccel.kv.policies.windowkv import WindowKV
from mmaccel.kv.policies.zeromerge import ZeroMerge
from mmaccel.kv.policies.zipcache_tokens import ZipCacheTokens
from mmaccel.kv.select import choose, protected, rank
from mmaccel.method import KeyBatch, Policy, ReadingPolicy

pytestmark = pytest.mark.usefixtures("no_gradients")


# checked by test_every_policy_is_tested_here
POLICIES = [
    SnapKV(window=4),
    SpecKV(window=4),
    SpecKV(window=4, reduce="mean"),
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
    ElasticCache().by("official"),
    DyCokeCache(),
    A2SF(),
    VATP(),
    CriticalKV(window=4),
    ExpectedAttention(),
    ExpectedAttention(covariance=False, weigh_values=False),
    WindowKV(window=4),
    WindowKV(window=4, width=3, strategy="average"),
    CapKV(),
    Compactor(),
    CUR(),
    EMLLM(),
    HERMES(),
    StreamMem(),
    FrameBounds(),
    InfLLM(),
    Keyformer(),
    KVzip(),
    LAQ(),
    Leverage(),
    MagicDec(),
    MorphKV(),
    NonCausalAttention(),
    QFilter(),
    QuickPrefill(),
    RaaS(),
    ReKV(),
    RPC(),
    SirLLM(),
    SepLLM(),
    ZeroMerge(),
    StreamingTOM(),
    VisionPulse(),
    ZipCacheTokens(),
]


def alone(keys: KeyBatch, row: int) -> KeyBatch:
    real, one = keys.valid[row], slice(row, row + 1)
    assert keys.received is not None and keys.count is not None and keys.picture is not None and keys.cells is not None
    assert keys.outgoing is not None and keys.expected is not None and keys.unrotated is not None
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
        unrotated=keys.unrotated[one, :, real],
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


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_keys_and_values_of_zeros_have_scores(policy: Policy) -> None:
    """A projection without a bias makes them of a token without an embedding: also where a policy keeps all that it likes."""
    keys = keys_of((0, 4))
    nothing = torch.tensor([0, 7, 11, 28, 29])
    assert keys.outgoing is not None
    keys.keys[:, :, nothing], keys.values[:, :, nothing], keys.outgoing[:, :, nothing] = 0.0, 0.0, 0.0
    if policy.window:
        keys = replace(keys, queries=keys.queries[:, :, -policy.window :], places=keys.places[:, -policy.window :])
    assert not rank(policy, keys).isnan().any()


def test_every_policy_is_tested_here() -> None:
    """All that score keys: without a budget there is nothing to score for, nor where all keys stay."""
    own = {kind for kind in synthetic.offered(Policy).values() if kind.__module__.startswith("mmaccel.kv")}
    assert {type(policy) for policy in POLICIES} == {
        kind for kind in own if kind.budget != "none" and not issubclass(kind, ReadingPolicy)
    }


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


def test_infinipot_looks_for_patches_that_changed() -> None:
    random = torch.Generator().manual_seed(0)
    still = torch.randn(2, 1, 4, 8, generator=random).expand(2, 5, 4, 8).clone()
    still[:, 1, 2] = -still[:, 1, 2]
    frame, patch = torch.arange(20) // 4, torch.stack([torch.arange(20) % 4 // 2, torch.arange(20) % 2], dim=1)
    same = Frames.of(frame, patch, 4).redundancy(still.flatten(1, 2))
    expected = torch.ones(2, 5, 4)
    expected[:, 1, 2] = -1
    torch.testing.assert_close(same.view(2, 5, 4), expected)
    # a patch that the newest frame lacks is not redundant
    lacking = Frames.of(frame[:-1], patch[:-1], 4).redundancy(still.flatten(1, 2)[:, :-1]).view(2, 19)
    assert (lacking[:, 3::4] == -1).all()


def test_elastic_cache_drops_at_a_distance() -> None:
    keys = replace(keys_of((0, 3)), decoding=True)
    for distance, slots in ((-5, (24, 24)), (2, (2, 5))):
        score = ElasticCache(distance=distance).score(keys)
        assert score[:, 0].masked_fill(~keys.valid, torch.inf).argmin(1).tolist() == list(slots)


def test_policies_without_a_budget_drop_what_they_score_lowest() -> None:
    keys = keys_of((0, 3))
    policy = mmaccel.get_method("mustdrop-cache")(layer=0)
    assert isinstance(policy, Policy)
    survivors = keys.valid & (torch.arange(30) % 2 == 0)
    score = rank(policy, replace(keys, survivors=survivors))
    kept = choose(policy, score, keys.visual, torch.tensor([3, 3]))
    assert torch.equal(kept, (survivors & keys.visual)[:, None].expand_as(kept))


def test_vl_cache_asks_the_text_behind_the_last_picture() -> None:
    text = torch.tensor([[1, 1, 0, 0, 1, 0, 0, 1, 1]]).bool()
    attention = replace(attention_of((0,), rows=9, total=9, visible=False), text=text)
    expected = attention.attention(7, 9).sum(2).unflatten(1, (2, 3)).sum(2)
    torch.testing.assert_close(VLCache().observe(attention, torch.zeros(1, 2, 9)), expected)
    keys = replace(bare := keys_of((0,)), received=torch.rand(1, 2, 30))
    assert bare.received is not None and keys.received is not None
    shared = VLCache(per_head=False).score(keys)
    torch.testing.assert_close(shared, keys.received.sum(1, keepdim=True).expand(1, 2, 30))


@pytest.mark.full
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
    for options, said in (
        ({"future": 0}, "`future` of expected-attention must be at least 1, got 0"),
        ({"every": 2}, "leave out every, cap and age"),
    ):
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
    with pytest.raises(MmaccelError, match="`first` of criticalkv must be at least 0 and at most 1"):
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
        with pytest.raises(MmaccelError, match="must be at least 1, got 0"):
            WindowKV(**options)
    with pytest.raises(MmaccelError, match="must be 'max' or 'average', got 'min'"):
        WindowKV(strategy="min")  # type: ignore[arg-type]


def test_elastic_cache_hears_all_heads() -> None:
    attention = attention_of((0,), rows=9, total=9, visible=False)
    expected = attention.attention(0, 9).sum(2).mean(1)
    seen = ElasticCache().observe(attention, torch.zeros(1, 2, 9))
    torch.testing.assert_close(seen, expected[:, None].expand(1, 2, 9))
