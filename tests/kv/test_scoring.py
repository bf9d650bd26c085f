"""What scores are made of: attention read in blocks, chunks of keys, values and queries weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mmaccel_kernels.importance.naive as kernel
import pytest
import torch
import zoo
from evicting import stage
from laws import helpers
from samples import attention_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmaccel import accelerated
from mmaccel.kv.policies.a2sf import A2SF
from mmaccel.kv.policies.criticalkv import CriticalKV
from mmaccel.kv.policies.expected_attention import ExpectedAttention
from mmaccel.kv.policies.h2o import H2O
from mmaccel.kv.scoring import importance
from mmaccel.kv.scoring.chunks import by_chunks
from mmaccel.method import KeyBatch
from mmaccel.method import blocks as streaming
from mmaccel.method.layers import SharedPass

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("block", (1, 100, 1 << 24))
def test_column_sums_are_those_of_the_map(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CACHED", block)
    monkeypatch.setattr(kernel, "ROWS", 1)
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
    for module, name, run in (
        (kernel, "CACHED", lambda: importance.column_sums(long)),
        (kernel, "CACHED", lambda: importance.entropy(long)),
        (streaming, "BLOCK", lambda: importance.share_seen(long, rows, 0.01)),
    ):
        monkeypatch.setattr(module, name, 1 << 24)
        with Largest() as whole:
            run()
        assert whole.size >= 6 * 256 * 256
        monkeypatch.setattr(module, name, block)
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
    monkeypatch.setattr(kernel, "CACHED", block)
    monkeypatch.setattr(kernel, "ROWS", 1)
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


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
def test_sums_come_with_the_output_of_the_attention(visible: bool, weighed: bool) -> None:
    """One pass gives sums, output and entropy; sums that leave queries out leave the pass empty."""
    attention = attention_of() if visible else attention_of((0, 0), visible=False)
    heads, rows = attention.key.shape[1], attention.query.shape[2]
    value = torch.randn(*attention.key.shape[:3], 5)
    shared = SharedPass(attention.query, value, True)
    passed = replace(attention, shared_pass=shared)
    weight = torch.rand(2, rows) + 0.1 if weighed else None
    torch.testing.assert_close(importance.column_sums(passed, weight), importance.column_sums(attention, weight))
    paid = attention.attention(0, rows).nan_to_num(0.0)
    wanted = paid @ value.repeat_interleave(paid.shape[1] // heads, 1)
    assert shared.found is not None and shared.found.read is not None
    torch.testing.assert_close(shared.found.read, wanted)
    torch.testing.assert_close(importance.entropy(passed), importance.entropy(attention))
    shared.found = None
    late = torch.arange(rows).expand(2, -1) >= 2
    importance.column_sums(passed, late.float())
    assert shared.found is None


def test_text_behind_the_last_picture() -> None:
    text = torch.tensor([[1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]).bool()
    attention = replace(attention_of((0, 2, 0), rows=7, total=7), text=text)
    expected = [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert importance.behind_pictures(attention).long().tolist() == expected


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
    # while decoding all layers are scored together
    depth, together = len(text.layers), [keys for keys in seen if keys.layer < 0]
    assert {len(keys.keys) for keys in together} == {depth * batch * heads}
    assert [keys.layer for keys in seen if keys.layer >= 0] == list(range(depth))
    parts = [(keys.layer, keys.values, keys.outgoing) for keys in seen if keys.layer >= 0]
    for keys in together:
        assert keys.outgoing is not None
        each = zip(keys.values.chunk(depth), keys.outgoing.chunk(depth), strict=True)
        parts += [(number, *part) for number, part in enumerate(each)]
    for number, values, outgoing in parts:
        weight = text.layers[number].self_attn.o_proj.weight
        values = values.reshape(batch, heads, *values.shape[2:])
        values = values.repeat_interleave(text.config.num_attention_heads // heads, dim=1)
        sent = values[..., None, :] * weight.unflatten(1, (values.shape[1], -1)).transpose(0, 1)[None, :, None]
        want = sent.sum(-1).abs().sum(-1).unflatten(1, (heads, -1)).mean(2)
        torch.testing.assert_close(outgoing, want.view_as(outgoing))


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
