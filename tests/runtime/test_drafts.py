"""Decoding with drafts gives the tokens of plain decoding, whoever drafts; with sampling, their distribution."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import FAMILIES, SHORT
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.accelerate import drafting as accelerate_drafting
from mmaccel.core.transformers_api import DynamicLayer, LinearAttentionLayer
from mmaccel.decoding import drafters
from mmaccel.decoding.base import Drafter
from mmaccel.decoding.tree import Tree
from mmaccel.kv.policies.loki import Loki
from mmaccel.kv.policies.quest import Quest
from mmaccel.kv.policies.tokenselect import TokenSelect
from mmaccel.kv.recurrent import states_of
from mmaccel.method import model_options
from mmaccel.method.model_options import KeepLoaded
from mmaccel.runtime.decoding import drafting, layer_skip, reader
from mmaccel.runtime.decoding.length import Acceptance, Costs, best_length, expected
from mmaccel.runtime.decoding.model_draft import ModelDraft

pytestmark = pytest.mark.usefixtures("no_gradients")

NEW = 28
#: lengths of answers
LENGTHS = [NEW, pytest.param(200, marks=pytest.mark.full)]
# by choice: before the language model, inside it, an eviction, a schedule, a codec, sparse reads, a merger
DRAFTING = ("divprune", "fastv", "snapkv", "h2o", "kivi", "quest", "spacetime")
# by choice: one of every kind whose cache is cut back, and stays as the prompt has left it
VERIFYING = ("divprune", "fastv", "pyramiddrop", "snapkv", "adakv", "h2o", "streaming-llm")


class Liar(Drafter):
    """Proposes what :attr:`plan` says: noise, the right answer, the right answer for the first row alone, the right answer with
    a wrong token, or an error."""

    name = "liar"
    plan: ClassVar[str] = "noise"
    truth: ClassVar[list[list[int]]] = []
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        self.row = Liar.made % max(1, len(self.truth))
        Liar.made += 1
        self.random = torch.Generator().manual_seed(self.row)

    def draft(self, tokens: Any, most: int) -> list[int]:
        if self.plan == "error":
            raise RuntimeError("no draft today")
        noise = torch.randint(5, 60, (most,), generator=self.random).tolist()
        if self.plan == "noise" or (self.plan == "first" and self.row):
            return noise
        answer = self.truth[self.row]
        done = next(n for n in range(len(answer), -1, -1) if list(tokens[len(tokens) - n :]) == answer[:n])
        right = answer[done : done + most]
        if self.plan == "mixed" and len(right) > 2:
            place = int(torch.randint(0, len(right), (1,), generator=self.random))
            right[place] = noise[0]
        return right


class Branching(Liar):
    """Trees of three tokens behind every right one: the next right token stands at any place among noise, sometimes nowhere."""

    name = "branching"
    nodes = 12
    longest = 4
    truth: ClassVar[list[list[int]]] = []

    def tree(self, tokens: Any, most: int) -> Tree:
        assert most == self.nodes
        answer = self.truth[self.row]
        done = next(n for n in range(len(answer), -1, -1) if list(tokens[len(tokens) - n :]) == answer[:n])
        right, tree, node = answer[done : done + self.longest], Tree([], []), -1
        for depth in range(self.longest):
            level = list(dict.fromkeys(torch.randint(5, 60, (3,), generator=self.random).tolist()))
            place = int(torch.randint(0, 4, (1,), generator=self.random))
            if place < len(level) and depth < len(right) and right[depth] not in level:
                level[place] = right[depth]
            first = len(tree.tokens)
            tree.tokens.extend(level)
            tree.parents.extend([node] * len(level))
            node = first + (place if place < len(level) else 0)
        return tree


class LongAndShort(Branching):
    """A long right chain for one row, few wrong tokens for the other."""

    name = "long-and-short"
    nodes = 12
    longest = 12

    def tree(self, tokens: Any, most: int) -> Tree:
        answer = self.truth[self.row]
        done = next(n for n in range(len(answer), -1, -1) if list(tokens[len(tokens) - n :]) == answer[:n])
        right = answer[done : done + self.longest]
        if self.row == 0 and right:
            return Tree(right, [*range(-1, len(right) - 1)])
        wrong = [token for token in range(5, 9) if token not in right[:1]][:3]
        return Tree(wrong, [-1] * len(wrong))


@pytest.fixture
def branching(monkeypatch: pytest.MonkeyPatch) -> type[Branching]:
    """A drafter of trees, which are asked for in every block, and of no chains."""
    monkeypatch.setitem(drafters.DRAFTERS, "branching", Branching)
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (0, 1.0))
    monkeypatch.setattr(drafting, "gain_of_tree", lambda *_: 2.0)
    monkeypatch.setattr(Liar, "made", 0)
    return Branching


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> type[Liar]:
    """A drafter that is under the control of a test, and asked in every block."""
    monkeypatch.setitem(drafters.DRAFTERS, "liar", Liar)
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))
    monkeypatch.setattr(Liar, "made", 0)
    return Liar


def generate(model: Any, feed: Any, **options: Any) -> Any:
    return model.generate(**feed, **{"max_new_tokens": NEW, "do_sample": False, **options})


def told(feed: Any, out: Tensor) -> list[list[int]]:
    return [row[feed["input_ids"].shape[1] :].tolist() for row in out]


def differ_at_a_tie(tiny: Any, feed: Any, out: Tensor, bare: Tensor) -> bool:
    """Whether every row differs first where two tokens are as likely as float32 can tell."""
    new = bare.shape[1] - feed["input_ids"].shape[1]
    logits = generate(tiny, feed, max_new_tokens=new, return_dict_in_generate=True, output_logits=True).logits
    for row, (mine, its) in enumerate(zip(told(feed, out), told(feed, bare), strict=True)):
        place = next((n for n, pair in enumerate(zip(mine, its, strict=True)) if len(set(pair)) > 1), None)
        if place is not None:
            one, other = logits[place][row].topk(2).values.tolist()
            if one - other > 1e-5:
                return False
    return True


# ------------------------------------------------------------------------------------------------------------ equality
def test_a_row_that_ends_inside_a_long_path_leaves_the_others_their_trees(
    branching: type[Branching], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drafters.DRAFTERS, "long-and-short", LongAndShort)
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    free = told(feed, generate(tiny, feed))
    end = next(token for n, token in enumerate(free[0]) if n > 8 and token not in free[0][:n] + free[1])
    options = {"eos_token_id": end, "pad_token_id": 0}
    bare = generate(tiny, feed, **options)
    monkeypatch.setattr(LongAndShort, "truth", free)
    with accelerated(
        tiny, "divprune", retain=0.3, lossless=True, lookup="long-and-short", processor=zoo.processor("llava")
    ):
        out, figures = generate(tiny, feed, **options), tiny.mmaccel.stats().drafting
    assert torch.equal(out, bare) and figures["accepted"] > 5


@pytest.mark.parametrize("new", LENGTHS)
@pytest.mark.parametrize("kind", ["image", "uneven", "video"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_without_drafts(
    family: str, kind: str, new: int, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures, padded batches, clips; drafts that are partly right in every block, so that rows part and meet again."""
    if kind not in zoo.kinds(family):
        pytest.skip("takes no clips")
    tiny, feed = zoo.model(family), zoo.inputs(family, kind)
    bare = generate(tiny, feed, max_new_tokens=new)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", retain=0.3, lossless=True, lookup="liar", processor=zoo.processor(family)):
        out, stats = generate(tiny, feed, max_new_tokens=new), tiny.mmaccel.stats()
        states = tiny.mmaccel.family.stateful
    assert torch.equal(out, bare) or differ_at_a_tie(tiny, feed, out, bare)
    assert 0 < stats.drafting["accepted"] < stats.drafting["drafted"]
    # a recurrent state may lack the last tokens, which are read at the end
    assert 0 <= stats.decode_steps - stats.drafting["verifications"] <= states
    assert stats.drafting["verifications"] < new - 5
    assert stats.drafting["tokens"] == new * len(bare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [*SHORT, "gemma3", "qwen3_5"])  # by choice: each kind of cache
def test_in_half_precision_only_what_it_cannot_tell_apart_comes_otherwise(
    family: str, dtype: torch.dtype, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token that differs is one that the bare model does not prefer by more than its rounding: by how much its logits
    are off those in float32."""
    exact, feed = zoo.model(family), zoo.inputs(family, "uneven")
    tiny = copy.deepcopy(exact).to(dtype)
    half = {name: x.to(dtype) if x.is_floating_point() else x for name, x in feed.items()}
    many = {"max_new_tokens": 60, "return_dict_in_generate": True, "output_logits": True}
    bare = generate(tiny, half, **many)
    monkeypatch.setattr(liar, "truth", told(feed, bare.sequences))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out = generate(tiny, half, max_new_tokens=60)
        assert tiny.mmaccel.stats().drafting["accepted"] > 0
    start = feed["input_ids"].shape[1]
    same_text = [oracle.Force(bare.sequences[:, start:], start)]
    forced = generate(exact, feed, logits_processor=LogitsProcessorList(same_text), **many)
    for row, (mine, its) in enumerate(zip(told(feed, out), told(feed, bare.sequences), strict=True)):
        place = next((n for n, pair in enumerate(zip(mine, its, strict=True)) if len(set(pair)) > 1), None)
        if place is None:
            continue
        logits = bare.logits[place][row].float()
        noise = (forced.logits[place][row] - logits).abs().max()
        assert logits[its[place]] - logits[mine[place]] <= 2 * noise
        assert noise < 0.05 * logits.abs().max()


@pytest.mark.parametrize("draft", ["copies", "layers", "model"])
@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("family", ["llava", "gemma3", "gemma4"])  # by choice: some layers have windows, or all
def test_windows_that_are_shorter_than_the_prompt(
    family: str, kind: str, draft: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token reads its window and nothing before it, behind the prompt, behind rejected tokens, and in a draft of several
    steps."""
    tiny, feed = zoo.model(family, sliding_window=12), zoo.inputs(family, kind)
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "mixed")
    given = {
        "copies": {"lookup": "liar"},
        "layers": {"draft": [tiny.config.get_text_config().num_hidden_layers - 1]},
        "model": {"draft": zoo.loaded_draft(family)},
    }[draft]
    with accelerated(tiny, "none", lossless=True, processor=zoo.processor(family), **given):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
    assert torch.equal(out, bare)
    assert stats.drafting["drafted"] > 10 and not any("are off" in note for note in stats.notes)


@pytest.mark.parametrize("window", [12, 4096])
@pytest.mark.parametrize(
    "family", ["llava", "qwen2_5_vl", "gemma3", "gemma4"]
)  # by choice: windows in all layers, in some
def test_rows_part_where_layers_have_windows(
    family: str, window: int, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps what it accepts, and reads no token twice; where the caller keeps the cache both rows end at the same slot,
    and what one has accepted alone is read again."""
    tiny, feed = zoo.model(family, sliding_window=window), zoo.inputs(family, "uneven")
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "first")
    read, lengths = reader.Reader.read, list[int]()
    monkeypatch.setattr(reader.Reader, "read", lambda *args: lengths.append(args[1].shape[1]) or read(*args))
    with accelerated(tiny, "none", lossless=True, lookup="liar", processor=zoo.processor(family)):
        out, alone, longest = generate(tiny, feed), tiny.mmaccel.stats(), max(lengths)
        monkeypatch.setattr(liar, "made", 0)
        kept, together = generate(tiny, feed, return_dict_in_generate=True), tiny.mmaccel.stats()
    assert torch.equal(out, bare) and torch.equal(kept.sequences, bare)
    # one token that is certain, and five that are drafted
    assert longest == 6 and max(lengths) > 15
    assert NEW < alone.drafting["row_verifications"] < 1.5 * NEW
    assert not any("read again" in note for note in alone.notes)
    assert any("the caller keeps a cache with windows" in note for note in together.notes)


@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_change_no_answer(
    family: str, kind: str, branching: type[Branching], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family: those whose layers keep keys of all tokens verify trees, others read none."""
    tiny, feed = zoo.model(family), zoo.inputs(family, kind)
    bare = generate(tiny, feed, return_dict_in_generate=True)
    monkeypatch.setattr(branching, "truth", told(feed, bare.sequences))
    with accelerated(tiny, "divprune", retain=0.3, lossless=True, lookup="branching", processor=zoo.processor(family)):
        out, figures = generate(tiny, feed, return_dict_in_generate=True), tiny.mmaccel.stats().drafting
        notes = tiny.mmaccel.stats().notes
    assert torch.equal(out.sequences, bare.sequences)
    mine, its = out.past_key_values, bare.past_key_values
    assert mine.get_seq_length() == its.get_seq_length()
    # a model that is given no positions counts them itself, and cannot be shown a tree
    dense = all(type(layer) is DynamicLayer for layer in its.layers)
    assert dense != any("drafts are chains: some layers keep a window" in note for note in notes)
    if family == "hyperclovax_vision_v2" or not dense:
        assert figures["drafted"] == 0
        return
    assert 5 < figures["accepted"] < figures["drafted"] and figures["verifications"] < NEW - 5
    sums = figures["sources"]["branching-tree"]
    assert (sums["drafted"], sums["accepted"]) == (figures["drafted"], figures["accepted"])
    if kind == "image":
        for one, other in zip(mine.layers, its.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_read_in_chunks(family: str, kind: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that verifies reads its prompt in as many pieces as the recipe says, or the call."""
    tiny, feed = zoo.model(family), zoo.inputs(family, kind)
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "mixed")
    given: dict[str, Any] = {"lossless": True, "lookup": "liar", "processor": zoo.processor(family)}
    with accelerated(tiny, "divprune", retain=0.3, chunk=9, **given):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
        other, less = generate(tiny, feed, mmaccel={"chunk": 12}), tiny.mmaccel.stats()
    for answer, size, figures in ((out, 9, stats), (other, 12, less)):
        assert torch.equal(answer, bare) or differ_at_a_tie(tiny, feed, answer, bare)
        assert any(note.startswith(f"chunk={size}: the text model read") for note in figures.notes)
        assert 0 < figures.drafting["accepted"] < figures.drafting["drafted"]


@pytest.mark.parametrize("family", SHORT)
def test_blocks_may_be_longer_than_chunks(family: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model(family), zoo.inputs(family)
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "right")
    with accelerated(tiny, "none", chunk=2, lossless=True, lookup="liar", processor=zoo.processor(family)):
        out, figures = generate(tiny, feed), tiny.mmaccel.stats().drafting
    assert torch.equal(out, bare) and figures["verifications"] < NEW / 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_trees_with_processors(attention: str, branching: type[Branching], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    options = {"logits_processor": LogitsProcessorList([Banned()]), "repetition_penalty": 1.3}
    before = tiny.config.get_text_config()._attn_implementation
    tiny.set_attn_implementation(attention)
    bare = generate(tiny, feed, **options)
    monkeypatch.setattr(branching, "truth", told(feed, bare))
    with accelerated(tiny, "divprune", lossless=True, lookup="branching"):
        assert torch.equal(generate(tiny, feed, **options), bare)
        assert tiny.mmaccel.stats().drafting["accepted"] > 5
    tiny.set_attn_implementation(before)


def test_trees_are_not_read_where_attention_takes_no_mask(
    branching: type[Branching], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    bare = generate(tiny, feed)
    monkeypatch.setattr(branching, "truth", told(feed, bare))
    monkeypatch.setattr(reader, "_masked", lambda model: False)
    with accelerated(tiny, "divprune", lossless=True, lookup="branching"):
        assert torch.equal(generate(tiny, feed), bare)
        stats = tiny.mmaccel.stats()
    assert not stats.drafting["drafted"] and any("takes no mask" in note for note in stats.notes)


def test_trees_are_not_read_behind_a_prompt_in_chunks(branching: type[Branching]) -> None:
    """And a note says why."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    bare = generate(tiny, feed)
    with accelerated(tiny, "divprune", lossless=True, lookup="branching", chunk=9):
        assert torch.equal(generate(tiny, feed), bare)
        stats = tiny.mmaccel.stats()
    assert not stats.drafting["drafted"] and any("drafts are chains: keys stay in the" in note for note in stats.notes)


@pytest.mark.parametrize("family", SHORT)
def test_recycled_tokens_draft(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was likely behind a token is drafted when it comes again, by chains, and by trees where they pay."""
    monkeypatch.setattr(Costs, "seconds", lambda self, tokens: 1 + 0.001 * tokens)
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    bare = generate(tiny, feed, max_new_tokens=100)
    with accelerated(tiny, "none", lossless=True, lookup="tokenrecycling"):
        out = [generate(tiny, feed, max_new_tokens=100) for _ in range(2)]
        figures = tiny.mmaccel.stats().drafting
    assert torch.equal(out[0], bare) and torch.equal(out[1], bare)
    assert figures["sources"]["tokenrecycling-tree"]["accepted"] > 0
    assert figures["verifications"] < 70


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("family", [family for family in FAMILIES if oracle.adapter(family).stateful])
def test_recurrent_states_forget_rejected_tokens(
    family: str, lossless: bool, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 tokens, alone and in a padded batch, bare and with a recipe; and the cache goes on as that of plain decoding."""
    tiny = zoo.model(family)
    how = {"processor": zoo.processor(family)}
    monkeypatch.setattr(liar, "plan", "mixed")
    for kind in ("image", "uneven"):
        feed = zoo.inputs(family, kind)
        with accelerated(tiny, "none" if lossless else "divprune", **how):
            plain = generate(tiny, feed, max_new_tokens=200, return_dict_in_generate=True)
        monkeypatch.setattr(liar, "truth", told(feed, plain.sequences))
        monkeypatch.setattr(liar, "made", 0)
        with accelerated(tiny, "divprune", **how, lossless=lossless, lookup="liar"):
            out = generate(tiny, feed, max_new_tokens=200, return_dict_in_generate=True)
            figures = tiny.mmaccel.stats().drafting
        assert torch.equal(out.sequences, plain.sequences)
        assert 40 < figures["accepted"] < figures["drafted"] and figures["verifications"] < 150
        if kind == "image":
            assert out.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
            pairs = zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True)
            for mine, its in ((one, other) for one, other in pairs if isinstance(one, LinearAttentionLayer)):
                for one, other in zip(states_of(mine), states_of(its), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", [family for family in FAMILIES if oracle.adapter(family).stateful])
def test_models_with_recurrent_states_draft(family: str) -> None:
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    bare, figures = generate(tiny, feed, max_new_tokens=60), {}
    other = copy.deepcopy(tiny)
    noise = torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    other.lm_head.weight.data += 0.3 * other.lm_head.weight.std() * noise
    for draft in (other, "self"):
        for recipe in ("divprune", "none"):
            with accelerated(tiny, recipe, lossless=True, draft=draft, processor=zoo.processor(family)):
                out = generate(tiny, feed, max_new_tokens=60)
                figures[draft == "self", recipe] = tiny.mmaccel.stats().drafting
            assert torch.equal(out, bare)
    assert all(one["drafted"] > 0 for one in figures.values())
    whole = figures[True, "none"]
    assert whole["accepted"] == whole["drafted"]


@pytest.mark.parametrize("recipe", DRAFTING)
@pytest.mark.parametrize("family", SHORT)
def test_a_model_drafts_over_a_reduced_prompt(family: str, recipe: str) -> None:
    """A smaller model, and the model itself, in a padded batch; nothing of the full cache moves when drafts are rejected."""
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    bare = generate(tiny, feed)
    other = zoo.loaded_draft(family)
    for draft in (other, "self"):
        with accelerated(tiny, recipe, lossless=True, draft=draft, processor=zoo.processor(family)):
            out, stats = generate(tiny, feed), tiny.mmaccel.stats()
        assert torch.equal(out, bare)
        assert stats.drafting["drafted"] > 0, stats.notes
    assert not mmaccel.is_accelerated(other)


@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "qwen3_5"])  # by choice: each kind of cache
def test_a_model_drafts_without_some_layers(family: str, kind: str, liar: type[Liar]) -> None:
    """The one cache is as it was behind every draft, whatever layers have stored."""
    tiny, feed = zoo.model(family), zoo.inputs(family, kind)
    bare = generate(tiny, feed, max_new_tokens=60, return_dict_in_generate=True)
    (last,) = list(oracle.adapter(family).text.layers)[-1:]
    before = "forward" in vars(last)
    with accelerated(tiny, "none", lossless=True, draft=[tiny.config.get_text_config().num_hidden_layers - 1]):
        out = generate(tiny, feed, max_new_tokens=60, return_dict_in_generate=True)
        stats = tiny.mmaccel.stats()
    assert torch.equal(out.sequences, bare.sequences)
    assert out.past_key_values.get_seq_length() == bare.past_key_values.get_seq_length()
    assert stats.drafting["sources"]["layers"]["drafted"] > 20 and not any("are off" in note for note in stats.notes)
    assert {"layers", ""} >= set(stats.drafting["drafted_by"][0])
    assert before == ("forward" in vars(last))


def test_skipped_layers_work_again_whatever_a_draft_does(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is named twice, and a draft that runs out of memory: the model reads on with all layers and all tokens."""
    tiny, feed = zoo.model("llava", num_hidden_layers=5), zoo.inputs("llava", "uneven")
    bare = generate(tiny, feed, max_new_tokens=40)
    with accelerated(tiny, "none", lossless=True, draft=[2, 2, 3]):
        assert torch.equal(generate(tiny, feed, max_new_tokens=40), bare)
    calls, unchanged = [0], layer_skip._unchanged

    def short_of_memory(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 7:
            raise MemoryError("out of memory")
        return unchanged(hidden, *args, **kwargs)

    monkeypatch.setattr(layer_skip, "_unchanged", short_of_memory)
    with accelerated(tiny, "none", lossless=True, draft=[2, 3]):
        assert torch.equal(generate(tiny, feed, max_new_tokens=40), bare)
        assert calls[0] == 7 and any("are off" in note for note in tiny.mmaccel.stats().notes)
    assert not any("forward" in vars(layer) for layer in oracle.adapter("llava").text.layers)


def test_layers_that_cannot_be_skipped_are_named() -> None:
    tiny = zoo.model("llava")
    for wrong in ([0], [1, 99], ["1"], [1.0], [True]):
        with pytest.raises(MmaccelError, match=r"can skip \[1.*got \[.*; name some of these"):
            accelerate_vlm(tiny, "none", lossless=True, draft=wrong)
    with pytest.raises(MmaccelError, match="needs lossless=True"):
        accelerate_vlm(tiny, "none", draft=[1])
    with pytest.raises(MmaccelError, match=r"got \[\]; name some"):
        accelerate_vlm(tiny, "none", lossless=True, draft=[])
    assert not mmaccel.is_accelerated(tiny)


READING = (Quest(page=4, least=1, layer=0), Loki(layer=0), TokenSelect(alike=2.0))


@pytest.mark.parametrize("policy", READING, ids=lambda policy: policy.name)
@pytest.mark.parametrize("family", SHORT)
def test_a_model_drafts_over_its_own_cache(
    family: str, policy: Any, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that read a tenth of the cache draft, the same cache verifies and reads everything: no second prompt is read, and
    nothing that was drafted stays."""
    monkeypatch.setattr(ModelDraft, "_read_prompt", lambda *_: pytest.fail("the prompt is read twice"))
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    bare = generate(tiny, feed, return_dict_in_generate=True)
    figures = {}
    for retain in (0.1, 1.0):
        with accelerated(tiny, policy, retain=retain, lossless=True, draft="self", processor=zoo.processor(family)):
            out = generate(tiny, feed, return_dict_in_generate=True)
            figures[retain], notes = tiny.mmaccel.stats().drafting, tiny.mmaccel.stats().notes
        assert torch.equal(out.sequences, bare.sequences)
        assert out.past_key_values.get_seq_length() <= bare.past_key_values.get_seq_length()
        assert f"lossless: recipe {policy.name!r} shapes drafts only" in notes
    # what reads everything is always right, what reads little is not
    assert figures[1.0]["accepted"] == figures[1.0]["drafted"] > 0
    assert 0 < figures[0.1]["drafted"]


def test_reading_less_of_the_cache_drafts_otherwise(liar: type[Liar]) -> None:
    tiny, feed = zoo.model("qwen2_5_vl"), zoo.inputs("qwen2_5_vl", "images")
    with accelerated(tiny, Quest(page=4, least=1, layer=0), retain=0.05, lossless=True, draft="self"):
        out = generate(tiny, feed, max_new_tokens=60)
        figures = tiny.mmaccel.stats().drafting
    assert torch.equal(out, generate(tiny, feed, max_new_tokens=60))
    assert figures["accepted"] < figures["drafted"]


@pytest.mark.parametrize(
    "policy",
    # by choice: one that reads less, one of each way in which a cache changes while it decodes, and one that changes layers
    [
        Quest(page=4, least=1, layer=0),
        "h2o-decode",
        "streaming-llm-decode",
        "elastic-cache-decode",
        "lazyllm",
        "think",
        "memvr",
    ],
    ids=str,
)
def test_what_works_on_the_cache_while_it_decodes_takes_no_drafts_but_lossless_ones(
    policy: Any, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of tokens would read other keys than one token at a time."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    budget = {} if policy in ("think", "memvr") else {"retain": 0.3}
    with accelerated(tiny, policy, **budget):
        plain, name = generate(tiny, feed), tiny.mmaccel.recipe.name
    monkeypatch.setattr(liar, "truth", told(feed, plain))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, policy, **budget, lookup="liar"):
        assert torch.equal(generate(tiny, feed), plain)
        stats = tiny.mmaccel.stats()
    (note,) = (note for note in stats.notes if "while the model decodes" in note)
    assert not stats.drafting["drafted"] and note.removeprefix("drafts are off: ").split()[0] in name
    with accelerated(tiny, policy, **budget, lossless=True, lookup="liar"):
        assert torch.equal(generate(tiny, feed), generate(tiny, feed, mmaccel=False))


@pytest.mark.parametrize("family", SHORT)
def test_a_model_that_drafts_with_the_whole_prompt_is_always_right(family: str) -> None:
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    with accelerated(tiny, "none", lossless=True, draft="self"):
        generate(tiny, feed)
        drafting = tiny.mmaccel.stats().drafting
    assert drafting["accepted"] == drafting["drafted"] > 0


@pytest.mark.parametrize("recipe", VERIFYING)
@pytest.mark.parametrize("plan", ["noise", "mixed", "right"])
def test_without_lossless_the_answer_is_that_of_the_recipe(
    recipe: str, plan: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    with accelerated(tiny, recipe):
        plain = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, plain))
    monkeypatch.setattr(liar, "plan", plan)
    with accelerated(tiny, recipe, lookup="liar"):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
    assert torch.equal(out, plain)
    assert stats.stages and stats.drafting["drafted"] > 0
    if plan == "right":
        assert stats.drafting["accepted"] == stats.drafting["drafted"]


@pytest.mark.parametrize("plan", ["noise", "right", "mixed", "error"])
def test_a_bad_draft_changes_nothing(plan: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("qwen2_5_vl"), zoo.inputs("qwen2_5_vl", "images")
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", plan)
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
    assert torch.equal(out, bare)
    assert any("no draft today" in note for note in stats.notes) == (plan == "error")


@pytest.mark.parametrize(
    ("family", "new"),
    [*((one, NEW) for one in SHORT), *(pytest.param(one, 200, marks=pytest.mark.full) for one in FAMILIES)],
)
def test_second_turns(family: str, new: int, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that comes back goes on as that of plain decoding does."""
    tiny, feed = zoo.model(family), zoo.inputs(family)
    many = {"max_new_tokens": new, "return_dict_in_generate": True}
    first = generate(tiny, feed, **many)
    words = torch.randint(10, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    follow = torch.cat([first.sequences, words], 1)
    wanted = generate(tiny, {"input_ids": follow}, past_key_values=first.past_key_values)
    monkeypatch.setattr(liar, "truth", told(feed, first.sequences))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        once = generate(tiny, feed, **many)
        assert torch.equal(once.sequences, first.sequences)
        monkeypatch.setattr(liar, "truth", [wanted[0, follow.shape[1] :].tolist()])
        again = generate(tiny, {"input_ids": follow}, past_key_values=once.past_key_values)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("family", SHORT)
def test_second_turns_in_chunks(family: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a prompt that was read in chunks is whole, and goes on."""
    tiny, feed = zoo.model(family), zoo.inputs(family)
    first = generate(tiny, feed, return_dict_in_generate=True)
    words = torch.randint(10, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    follow = torch.cat([first.sequences, words], 1)
    wanted = generate(tiny, {"input_ids": follow}, past_key_values=first.past_key_values)
    monkeypatch.setattr(liar, "truth", told(feed, first.sequences))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", lossless=True, lookup="liar", chunk=8):
        once = generate(tiny, feed, return_dict_in_generate=True)
        again = generate(tiny, {"input_ids": follow}, past_key_values=once.past_key_values)
    assert torch.equal(once.sequences, first.sequences) and torch.equal(again, wanted)


@pytest.mark.parametrize(
    ("plan", "ends"), [("mixed", ()), ("first", ()), ("first", (0,)), ("mixed", (1,)), ("right", (0, 1))]
)
@pytest.mark.parametrize("family", SHORT)
def test_second_turns_of_a_batch(
    family: str, plan: str, ends: Any, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that accepted different numbers of tokens, and ended before others, leave no gaps in the cache that comes back, but
    what plain decoding leaves: at most some tokens less."""
    tiny, feed = zoo.model(family), zoo.inputs(family, "uneven")
    answers = told(feed, generate(tiny, feed))
    # some rows end at the token of theirs that comes last
    end = {"eos_token_id": [max(answers[row], key=answers[row].index) for row in ends]} if ends else {}
    first = generate(tiny, feed, return_dict_in_generate=True, **end)
    monkeypatch.setattr(liar, "truth", told(feed, first.sequences))
    monkeypatch.setattr(liar, "plan", plan)
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out = generate(tiny, feed, return_dict_in_generate=True, **end)
        assert tiny.mmaccel.stats().drafting["drafted"] >= tiny.mmaccel.stats().drafting["accepted"] > 0
    assert torch.equal(out.sequences, first.sequences)
    mine, its = out.past_key_values, first.past_key_values
    length = mine.get_seq_length()
    assert length == its.get_seq_length() or (ends and length < its.get_seq_length())
    real = torch.cat([feed["attention_mask"], torch.ones(len(out.sequences), NEW - 1, dtype=torch.long)], 1)
    real = real[:, :length].bool()
    for one, other in zip(mine.layers, its.layers, strict=True):
        keys = other.keys[:, :, : other.keys.shape[2] + length - its.get_seq_length()]
        kept = real[:, -keys.shape[2] :, None].expand(-1, -1, keys.shape[1]).transpose(1, 2)
        torch.testing.assert_close(one.keys[kept], keys[kept], rtol=1e-4, atol=1e-4)


def test_an_end_inside_a_draft_ends_the_cache(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a draft that goes on behind the end of the answer stays for the next turn."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    (answer,) = told(feed, generate(tiny, feed))
    monkeypatch.setattr(liar, "truth", [answer])
    monkeypatch.setattr(liar, "plan", "right")
    for place in range(3, 9):
        end = {"eos_token_id": answer[place], "return_dict_in_generate": True}
        plain = generate(tiny, feed, **end)
        with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
            out = generate(tiny, feed, **end)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


# ------------------------------------------------------------------------------------------------------------- options
class Banned(LogitsProcessor):
    """Forbids every token that stands among the last three."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -3:], -float("inf"))


@pytest.mark.parametrize("plan", ["noise", "mixed"])
def test_processors_see_the_drafts_before_them(plan: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    options = {"logits_processor": LogitsProcessorList([Banned()]), "repetition_penalty": 1.3}
    bare = generate(tiny, feed, **options)
    assert not torch.equal(bare, generate(tiny, feed))
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", plan)
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        assert torch.equal(generate(tiny, feed, **options), bare)


class Streamed:
    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streams_stop_strings_ends_and_logits(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends an answer inside an accepted draft cuts it there, and streamers see what is accepted only."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    bare = generate(tiny, feed)
    (answer,) = told(feed, bare)
    monkeypatch.setattr(liar, "truth", [answer])
    monkeypatch.setattr(liar, "plan", "right")
    seen: list[int] = []

    def after_seven(input_ids: Tensor, scores: Any) -> Tensor:
        seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] - feed["input_ids"].shape[1] >= 7])

    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        first, second = Streamed(), Streamed()
        tiny.generate(**feed, max_new_tokens=NEW, streamer=first)
        assert first.ended and first.got == bare[0].tolist()
        stopped = generate(tiny, feed, stopping_criteria=StoppingCriteriaList([after_seven]), streamer=second)
        assert told(feed, stopped) == [answer[:7]] and second.got == stopped[0].tolist()
        assert seen == [feed["input_ids"].shape[1] + n for n in range(1, 8)]
        ended = generate(tiny, feed, eos_token_id=answer[9])
        assert told(feed, ended) == [answer[: answer.index(answer[9]) + 1]]
        words = zoo.tokenizer("llava").decode(answer[4:6])
        stopped = generate(tiny, feed, stop_strings=words, tokenizer=zoo.tokenizer("llava"))
        out = generate(tiny, feed, return_dict_in_generate=True, output_logits=True, output_scores=True)
    assert told(feed, stopped) == told(feed, generate(tiny, feed, stop_strings=words, tokenizer=zoo.tokenizer("llava")))
    plain = generate(tiny, feed, return_dict_in_generate=True, output_logits=True, output_scores=True)
    assert len(out.logits) == len(plain.logits) == len(out.scores) == NEW
    for mine, its in zip(out.logits, plain.logits, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_logits_of_several_rows(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different places; behind the end of a row its logits and scores are 0."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    ends = told(feed, generate(tiny, feed))[0][3]
    wanted = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "eos_token_id": ends}
    plain = generate(tiny, feed, **wanted)
    lengths = [row.index(ends) + 1 if ends in row else len(row) for row in told(feed, plain.sequences)]
    assert len(set(lengths)) > 1
    monkeypatch.setattr(liar, "truth", told(feed, plain.sequences))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out = generate(tiny, feed, **wanted)
    assert torch.equal(out.sequences, plain.sequences) and len(out.logits) == len(out.scores) == max(lengths)
    for step, (mine, its) in enumerate(zip(out.logits, plain.logits, strict=True)):
        for row, length in enumerate(lengths):
            wanted_row = its[row] if step < length else torch.zeros_like(its[row])
            torch.testing.assert_close(mine[row], wanted_row, rtol=1e-4, atol=1e-4)


def test_figures_of_drafts_fit_together(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    bare = generate(tiny, feed)
    monkeypatch.setattr(liar, "truth", told(feed, bare))
    monkeypatch.setattr(liar, "plan", "mixed")
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        generate(tiny, feed)
        figures = tiny.mmaccel.stats().drafting
        line = repr(tiny.mmaccel.stats())
    rows = len(bare)
    assert figures["forwards_saved"] == NEW - 1 - figures["verifications"] > 0
    assert figures["verifications"] < figures["row_verifications"] <= rows * figures["verifications"]
    # of a row every verification commits what is accepted and one token more, but for a draft that ends at the limit
    assert 0 <= figures["accepted"] + figures["row_verifications"] - rows * (NEW - 1) <= rows
    share = figures["accepted"] / figures["row_verifications"]
    assert figures["tokens_a_verification"] == pytest.approx(1 + share)
    assert f"{figures['forwards_saved']} forwards saved" in line


def test_what_calls_have_learned_outlives_a_context_only_where_a_program_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # programs of other tests may not be collected yet
    monkeypatch.setattr(model_options, "_keepers", WeakSet())
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")

    def drafted() -> int:
        with accelerated(tiny, "none", lossless=True, lookup=True):
            generate(tiny, feed, max_new_tokens=12)
            return int(tiny.mmaccel.stats().drafting["accepted"])

    first = drafted()
    assert drafted() == first
    with KeepLoaded():
        assert drafted() == first and drafted() > first
    assert drafted() == first


#: options with which a drafter finds something to copy behind a single token
ONE_TOKEN = {"copyspec": {"gamma": 1}, "promptlookup": {"ngram": 1}, "samdecoding": {"least": 1}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "copyspec" else pytest.mark.full) for name in drafters.DRAFTERS]
)
def test_answers_drawn_from_copies_have_the_distribution_of_the_model(
    name: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every drafter: 20,000 answers, whose first token occurs in the prompt."""
    options = [(option, int, value) for option, value in ONE_TOKEN.get(name, {}).items()]
    kind = dataclasses.make_dataclass(name, options, bases=(drafters.DRAFTERS[name],), eq=False)
    monkeypatch.setitem(drafters.DRAFTERS, name, kind)
    tiny = zoo.model("llava")
    feed = copied_from(tiny, zoo.inputs("llava", "text", question="what?"))
    with accelerated(tiny, "divprune", lossless=True, lookup=name):
        figures = check_draws(tiny, feed, distribution(tiny, feed, 3, 1.5))
    assert figures["drafted"] > figures["accepted"] > 0


def copied_from(tiny: Any, feed: Any) -> dict[str, Tensor]:
    """The prompt behind a few words, two of which may follow it in their order."""
    for seed in range(100):
        front = torch.randint(5, 60, (1, 16), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([front, feed["input_ids"]], 1)
        pairs = set(itertools.pairwise(front[0].tolist()))
        if pairs & set(distribution(tiny, {"input_ids": ids}, 3, 1.5, 2)):
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    raise AssertionError("no words that the model repeats")


@pytest.mark.parametrize("plan", ["noise", "mixed"])
def test_drawn_answers_have_the_distribution_of_the_model(
    plan: str, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 answers of three tokens, by a chi-square bound over all answers."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "text", question="what?")
    monkeypatch.setattr(liar, "plan", plan)
    wanted = distribution(tiny, feed, 3, 1.5)
    likeliest = max(wanted, key=lambda one: wanted[one])
    monkeypatch.setattr(liar, "truth", [list(likeliest)])
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        check_draws(tiny, feed, wanted)


def test_answers_drawn_from_trees_have_the_distribution_of_the_model(
    branching: type[Branching], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "text", question="what?")
    wanted = distribution(tiny, feed, 4, 1.5, 4)
    # three of the four tokens that may come third
    tokens = [*dict.fromkeys(one[2] for one in sorted(wanted, key=lambda one: -wanted[one]))][:3]
    monkeypatch.setattr(branching, "nodes", 3)
    monkeypatch.setattr(branching, "tree", lambda self, text, most: Tree(tokens, [-1, -1, -1]))
    with accelerated(tiny, "divprune", lossless=True, lookup="branching"):
        figures = check_draws(tiny, feed, wanted, 4)
    assert figures["accepted"] > 1000


def test_a_model_draws_its_drafts(liar: type[Liar], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn drafts keep the distribution, and are accepted as often as the two distributions overlap; drawing and comparing
    would accept fewer."""
    monkeypatch.setattr(accelerate_drafting, "SHORT", 0)
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "text", question="what?")
    other = copy.deepcopy(tiny)
    noise = torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    other.lm_head.weight.data += 0.3 * other.lm_head.weight.std() * noise
    wanted = distribution(tiny, feed, 3, 1.5)
    with accelerated(tiny, "none", lossless=True, draft=other):
        figures = check_draws(tiny, feed, wanted)
    # one token is drafted of the three: the first is the prompt's, the last the model's own
    overlap = match = 0.0
    for first in {one[0] for one in wanted}:
        chance = sum(p for one, p in wanted.items() if one[0] == first)
        mine = second_tokens(wanted, first)
        theirs = distribution(other, grown(feed, first), 3, 1.5, 1)
        overlap += chance * sum(min(p, theirs.get((token,), 0.0)) for token, p in mine.items())
        match += chance * sum(p * theirs.get((token,), 0.0) for token, p in mine.items())
    assert figures["accepted"] / figures["drafted"] == pytest.approx(overlap, abs=0.015)
    assert overlap > match + 0.1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("longer", ["model", "draft"])
def test_tables_of_words_may_be_padded_otherwise(
    longer: str, sampled: bool, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of Qwen2.5-VL 3B and 7B are. What is only in the longer table is what its model often likes best."""
    monkeypatch.setattr(accelerate_drafting, "SHORT", 0)
    models = {name: copy.deepcopy(zoo.model("llava")) for name in ("model", "draft")}
    tiny, feed = models["model"], zoo.inputs("llava", "text", question="what?")
    models[longer].resize_token_embeddings((words := tiny.config.text_config.vocab_size) + 16, mean_resizing=False)
    weight = models[longer].lm_head.weight.data
    weight[words:] = 1.01 * weight[:16]
    with accelerated(tiny, "none", lossless=True, draft=models["draft"]):
        if sampled:
            check_draws(tiny, feed, distribution(tiny, feed, 3, 1.5))
            return
        bare = generate(tiny, feed, mmaccel=False, max_new_tokens=40)
        out, stats = generate(tiny, feed, max_new_tokens=40), tiny.mmaccel.stats()
        assert torch.equal(out, bare) and stats.drafting["accepted"] > 0
        assert not any("are off" in note for note in stats.notes)


def grown(feed: Any, token: int) -> dict[str, Tensor]:
    return {"input_ids": torch.cat([feed["input_ids"], torch.tensor([[token]])], 1)}


def second_tokens(wanted: dict[tuple[int, ...], float], first: int) -> Counter[int]:
    """The distribution of the token behind ``first``."""
    found: Counter[int] = Counter()
    for one, p in wanted.items():
        found[one[1]] += p if one[0] == first else 0  # type: ignore[assignment]
    total = sum(found.values())
    return Counter({token: p / total for token, p in found.items()})  # type: ignore[misc]


def check_draws(tiny: Any, feed: Any, wanted: dict[tuple[int, ...], float], length: int = 3) -> dict[str, int]:
    """Draw 20,000 answers of ``length`` tokens, each of the ``length`` likeliest, and compare them with the distribution
    ``wanted``; sums of figures."""
    options = {"do_sample": True, "top_k": length, "temperature": 1.5, "max_new_tokens": length}
    rows, rounds = 1000, 20
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    figures: Counter[str] = Counter()
    for _ in range(rounds):
        out = generate(tiny, feed, num_return_sequences=rows, **options)
        counts.update(tuple(row) for row in told(feed, out))
        figures.update({name: tiny.mmaccel.stats().drafting[name] for name in ("drafted", "accepted")})
    assert figures["drafted"] > 0
    total = rows * rounds
    assert set(counts) <= set(wanted)
    square = sum((counts[one] - total * p) ** 2 / (total * p) for one, p in wanted.items() if total * p > 5)
    freedom = sum(total * p > 5 for p in wanted.values()) - 1
    assert square < freedom + 5 * (2 * freedom) ** 0.5, (square, freedom)
    return figures


def distribution(tiny: Any, feed: Any, top: int, temperature: float, length: int = 3) -> dict[tuple[int, ...], float]:
    """The probability of every answer of ``length`` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        after: dict[tuple[int, ...], float] = {}
        for said, chance in found.items():
            ids = torch.cat([feed["input_ids"], torch.tensor([said], dtype=torch.long)], 1)
            logits = tiny(input_ids=ids).logits[0, -1].float() / temperature
            values, tokens = logits.topk(top)
            for p, token in zip(values.softmax(0).tolist(), tokens.tolist(), strict=True):
                after[(*said, token)] = chance * p
        found = after
    return found


# ------------------------------------------------------------------------------------------------------------ refusals
def test_calls_that_cannot_have_drafts_are_refused() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    with pytest.raises(MmaccelError, match="no drafter 'lukup'"):
        accelerate_vlm(tiny, "divprune", lookup="lukup")
    with pytest.raises(MmaccelError, match="draft='self' needs lossless=True"):
        accelerate_vlm(tiny, "divprune", draft="self")
    with pytest.raises(MmaccelError, match="`lossless` must be True or False, got 'yes'"):
        accelerate_vlm(tiny, "divprune", lossless="yes")  # type: ignore[arg-type]
    with pytest.raises(MmaccelError, match="`draft` must be .*, got 3.5"):
        accelerate_vlm(tiny, "divprune", lossless=True, draft=3.5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="is the model that it would draft for"):
        accelerate_vlm(tiny, "divprune", lossless=True, draft=tiny)
    with pytest.raises(UnsupportedError, match="of family qwen2_5_vl"):
        accelerate_vlm(tiny, "divprune", lossless=True, draft=zoo.loaded_draft("qwen2_5_vl"))
    assert not mmaccel.is_accelerated(tiny)
    with accelerated(tiny, "divprune", lossless=True, lookup=True):
        for options, words in (
            ({"num_beams": 2}, "num_beams=1"),
            ({"assistant_model": zoo.loaded_draft("llava")}, "assistant_model"),
            ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
            ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions=True is not offered"),
            ({"use_cache": False}, "use_cache=False"),
        ):
            with pytest.raises(UnsupportedError, match=words):
                generate(tiny, feed, **options)
        bare = generate(tiny, feed, mmaccel=False, num_beams=2)
        assert not tiny.mmaccel.stats().drafting
    assert torch.equal(bare, generate(tiny, feed, num_beams=2))


def test_the_handle_comes_and_goes_with_its_draft() -> None:
    tiny, other = zoo.model("llava"), zoo.loaded_draft("llava")
    accelerate_vlm(tiny, "divprune", lossless=True, draft=other)
    assert mmaccel.is_accelerated(other)
    with pytest.raises(UnsupportedError, match="accelerated"):
        accelerate_vlm(zoo.model("llava"), "divprune", draft=other)
    accelerate_vlm(tiny, "divprune", lossless=True, lookup=True)
    assert not mmaccel.is_accelerated(other)
    with accelerated(tiny, "fastv", lossless=True, draft=other):
        assert mmaccel.is_accelerated(other)
    assert not mmaccel.is_accelerated(other) and tiny.mmaccel.drafts.copying is not None
    tiny.mmaccel.remove()


# -------------------------------------------------------------------------------------------------------------- length
def test_lengths_follow_acceptance_and_costs() -> None:
    """Figures worked by hand from the formula of the card: E(n) / (n c + v)."""
    assert expected(0.7, 5) == pytest.approx(2.941, abs=1e-3)
    level, double = Costs(), Costs()
    for costs, more in ((level, 1.05), (double, 2.0)):
        for tokens in (1, 2, 3, 9, 1, 4, 17):
            costs.add(tokens, 1.0 if tokens == 1 else more)
    assert level.seconds(1) == pytest.approx(1.0) and double.seconds(2) == pytest.approx(2.0, rel=0.1)
    length, gain = best_length(0.8, 0.1, level, 16)
    assert 5 <= length <= 7 and gain == pytest.approx(2.4, abs=0.1)  # the card's example: 6, 2.40
    assert best_length(0.8, 0.3, level, 16)[0] == 3 and best_length(0.9, 0.9, level, 16) == (0, 1.0)
    # a forward over several tokens that costs two of one pays where most of a draft is right, and not where half is
    assert best_length(0.5, 0.0, double, 16) == (0, 1.0) and best_length(0.8, 0.0, double, 16)[1] > 1.5
    # many rows keep the device busy: forwards cost by their tokens, and nothing pays
    busy = Costs()
    for tokens in (1, 2, 3, 9, 1, 4, 17):
        busy.add(tokens, float(tokens))
    assert all(best_length(rate, 0.0, busy, 16) == (0, 1.0) for rate in (0.5, 0.9, 1.0))
    rate = Acceptance()
    for _ in range(200):
        rate.add(0, True)
    assert rate.rate < 0.02
    for _ in range(60):
        rate.add(4, False)
    assert rate.rate > 0.95


def test_a_draft_that_never_helps_is_asked_ever_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, where it is not even looked at behind every token, and in the calls behind it."""
    monkeypatch.setitem(drafters.DRAFTERS, "liar", Liar)
    monkeypatch.setattr(Liar, "plan", "noise")
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    # a forward takes a second, however busy the machine is and however many tokens are verified: nothing favours drafts more
    add = Costs.add
    monkeypatch.setattr(Costs, "add", lambda self, tokens, seconds: add(self, tokens, 1.0))
    draft, asked = Liar.draft, list[int]()
    monkeypatch.setattr(Liar, "draft", lambda self, tokens, most: asked.append(most) or draft(self, tokens, most))
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        generate(tiny, feed, max_new_tokens=120)
        first, looks = tiny.mmaccel.stats().drafting, len(asked)
        generate(tiny, feed, max_new_tokens=120)
        second = tiny.mmaccel.stats().drafting
    assert 0 < first["drafted"] < 20 and first["verifications"] > 100 and 10 < looks < 50
    assert second["drafted"] == 0 and second["verifications"] == 119


def test_a_model_that_never_helps_reads_ever_fewer_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has found out of a smaller model holds for the calls behind it: a trial reads a prompt again, which costs two
    forwards, and may take a hundredth of the time."""
    add, seconds = Costs.add, itertools.count(0, 2)
    monkeypatch.setattr(Costs, "add", lambda self, tokens, seconds: add(self, tokens, 1.0))
    monkeypatch.setattr(drafting, "clock_of", lambda device: lambda: float(next(seconds)))
    monkeypatch.setattr(ModelDraft, "_draft", lambda self, rows, most: [drafting.Draft([5] * count) for count in most])
    prepare, read = ModelDraft.prepare, list[int]()
    monkeypatch.setattr(ModelDraft, "prepare", lambda self, *given: read.append(1) or prepare(self, *given))
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    bare = generate(tiny, feed)
    with accelerated(tiny, "divprune", lossless=True, draft=zoo.loaded_draft("llava")):
        for call in range(12):
            assert torch.equal(generate(tiny, feed), bare)
            notes = tiny.mmaccel.stats().notes
            assert any("drafts of model rest" in note for note in notes), (call, notes)
        first = len(read)
        tiny.mmaccel.drafts.forget()
        generate(tiny, feed)
    assert first == 2 and len(read) == first + 1


def test_a_model_reads_no_prompt_for_answers_that_have_been_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are always right, of a model whose prompt costs as much as thirty tokens: an answer that goes on longer than
    those before is drafted once it has paid."""
    add = Costs.add
    monkeypatch.setattr(Costs, "add", lambda self, tokens, seconds: add(self, tokens, 1.0))
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    (answer,) = told(feed, generate(tiny, feed, max_new_tokens=120))
    short = {"eos_token_id": answer[3], "pad_token_id": 0, "max_new_tokens": 120}
    with accelerated(tiny, "none", lossless=True, draft="self"):
        generate(tiny, feed, **short)
        (price,) = (one["self"] for one in tiny.mmaccel.drafts.learned.prices.values())
        assert tiny.mmaccel.stats().drafting["accepted"] > 0 and price.prompt > 0
        price.prompt, price.seconds, price.rests = 30.0, 0.1, 0
        tiny.mmaccel.drafts.learned.acceptance["self"] = 0.95
        generate(tiny, feed, **short)
        stats = tiny.mmaccel.stats()
        assert stats.drafting["drafted"] == 0 and any(
            "waited: answers have been too short" in one for one in stats.notes
        )
        out = generate(tiny, feed, max_new_tokens=120)
        by = tiny.mmaccel.stats().drafting["drafted_by"][0]
    assert told(feed, out) == [answer]
    begin = by.index("self")
    assert 30 < begin < 60 and by[begin:].count("self") > 20


def test_what_is_copied_is_verified_as_soon_as_it_would_have_been_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is free is watched while it is wrong, at no cost, and used once it is right."""
    monkeypatch.setitem(drafters.DRAFTERS, "liar", Liar)
    monkeypatch.setattr(Liar, "made", 0)
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    (answer,) = told(feed, generate(tiny, feed, max_new_tokens=120))
    monkeypatch.setattr(Liar, "truth", [answer])
    monkeypatch.setattr(
        Liar,
        "plan",
        property(lambda self: "right"),  # type: ignore[arg-type]
    )
    noise = Liar.draft

    def late(self: Liar, tokens: Any, most: int) -> list[int]:
        return [1] * most if len(tokens) < len(feed["input_ids"][0]) - 36 + 60 else noise(self, tokens, most)

    monkeypatch.setattr(Liar, "draft", late)
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out = generate(tiny, feed, max_new_tokens=120)
        figures = tiny.mmaccel.stats().drafting
    assert told(feed, out) == [answer]
    assert figures["accepted"] > 0.7 * figures["drafted"] > 0.7 * 20 and figures["verifications"] < 100


def test_a_model_drafts_for_itself_only_where_reading_keys_costs_most() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    with accelerated(tiny, "divprune", lossless=True):
        out = generate(tiny, feed)
        stats = tiny.mmaccel.stats()
    assert torch.equal(out, generate(tiny, feed))
    assert stats.drafting["drafted"] == 0 and any("does not draft for itself" in note for note in stats.notes)
