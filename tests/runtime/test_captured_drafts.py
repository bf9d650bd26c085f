"""Captured steps that verify drafts: blocks of one length, whose rejected tokens are forgotten without a move."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import simulated
import torch
import zoo
from laws.helpers import FAMILIES, SHORT, cache, close, generate, inputs, model, recipe_of
from laws.oracle import WINDOWED
from runtime.test_drafts import Liar
from tail import few
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

from mmaccel import accelerated
from mmaccel.decoding import drafters
from mmaccel.runtime.decoding import drafting, loop
from mmaccel.runtime.graphs import replay

NEW = 60


@pytest.fixture(autouse=True)
def liar(monkeypatch: pytest.MonkeyPatch) -> type[Liar]:
    """A drafter that is right for a while in every block, and then wrong."""
    monkeypatch.setitem(drafters.DRAFTERS, "liar", Liar)
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))
    monkeypatch.setattr(Liar, "plan", "mixed")
    torch._dynamo.reset()
    counters.clear()
    return Liar


class Watch(StoppingCriteria):
    """Notes where the tensors are that a captured step reads; never done."""

    def __init__(self, mine: Any) -> None:
        self.mine, self.seen = mine, []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if (held := self.mine.mmaccel.shared.static_view) is not None:
            self.seen.append([(x.data_ptr(), x.shape, x.stride()) for x in held.tensors()])
        return torch.zeros(len(ids), dtype=torch.bool)


def config(backend: str = "eager") -> CompileConfig:
    """A break in the graph is an error."""
    return CompileConfig(fullgraph=True, backend=backend, mode=None)


def both(
    liar: type[Liar], monkeypatch: pytest.MonkeyPatch, family: str, recipe: str, kind: str, **more: Any
) -> tuple[Any, Any, dict[str, Any], Watch]:
    """What plain and what captured steps with drafts make, the statistics of the latter, and what these read."""
    tiny, feed = model(family, **more.pop("text", {})), inputs(family, kind)
    options, made = {"new": NEW, "min_new_tokens": more.pop("least", NEW)}, recipe_of(recipe, family)
    with accelerated(tiny, made, processor=zoo.processor(family)):
        wanted = generate(tiny, feed, disable_compile=True, **options)
    start = feed["input_ids"].shape[1]
    monkeypatch.setattr(liar, "truth", wanted.sequences[:, start:].tolist())
    monkeypatch.setattr(liar, "made", 0)
    with accelerated(tiny, made, lookup="liar", processor=zoo.processor(family)):
        watch = Watch(cache())
        criteria = StoppingCriteriaList([watch])
        got = generate(tiny, feed, past_key_values=watch.mine, stopping_criteria=criteria, **options, **more)
        return wanted, got, tiny.mmaccel.stats(), watch


def agree(wanted: Any, got: Any) -> None:
    assert torch.equal(got.sequences, wanted.sequences)
    for mine, other in zip(got.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        assert mine.seen == other.seen and torch.equal(mine.index.index, other.index.index)
        for a, b in zip(mine.stored(), other.stored(), strict=True):
            close(a, b)


# by choice: pictures that lower layers keep, ragged heads, positions of three axes, clips, weights, windows
CASES = [
    ("llava", "divprune", "uneven", {}),
    ("llava", "adakv", "image", {}),
    ("llava", "fastv", "uneven", {}),
    ("qwen2_5_vl", "divprune", "mixed", {}),
    ("qwen3_vl", "snapkv", "video", {}),
    ("llava_next", "tome", "uneven", {}),
    ("internvl", "pyramidkv", "image", {}),
    *(pytest.param(family, "divprune", "uneven", text, id=f"{family}-window") for family, text in WINDOWED[:2]),
]


@pytest.mark.parametrize(("family", "recipe", "kind", "text"), CASES)
def test_blocks_are_replayed(
    graphs: None,
    liar: type[Liar],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    recipe: str,
    kind: str,
    text: dict[str, Any],
) -> None:
    """All but two of each length, which are recorded and compared. Nothing that they read moves, and the cache is that of plain
    decoding."""
    wanted, got, stats, watch = both(liar, monkeypatch, family, recipe, kind, text=text)
    agree(wanted, got)
    figures = stats["drafting"]
    assert stats["uncaptured"] == "" and 0 < figures["accepted"] < figures["drafted"]
    assert figures["verifications"] < NEW / 2 and stats["captured_steps"] >= figures["verifications"] - 4
    assert all(seen == watch.seen[0] for seen in watch.seen)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", ["divprune", pytest.param("adakv", marks=pytest.mark.full)])
def test_blocks_are_compiled(liar: type[Liar], monkeypatch: pytest.MonkeyPatch, recipe: str, backend: str) -> None:
    """One graph for all of them, and one for single tokens."""
    wanted, got, stats, _ = both(liar, monkeypatch, "llava", recipe, "image", compile_config=config(backend))
    agree(wanted, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] == stats["drafting"]["verifications"]
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@pytest.mark.parametrize("plan", ["noise", "right", "error"])
def test_single_tokens_and_blocks_share_what_is_pinned(
    graphs: None, liar: type[Liar], monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Where the drafter now and then proposes nothing, steps of one token are replayed beside blocks."""
    monkeypatch.setattr(liar, "plan", plan)
    draft, turns = Liar.draft, itertools.count()
    monkeypatch.setattr(Liar, "draft", lambda self, tokens, most: draft(self, tokens, most) if next(turns) % 3 else [])
    wanted, got, stats, watch = both(liar, monkeypatch, "llava", "divprune", "image")
    agree(wanted, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] >= stats["drafting"]["verifications"] - 4
    assert all(seen == watch.seen[0] for seen in watch.seen)


def bare_and_lossless(
    liar: type[Liar], monkeypatch: pytest.MonkeyPatch, family: str, kind: str, **more: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What the bare model answers, and what it answers with drafts."""
    tiny, feed, options = zoo.model(family), zoo.inputs(family, kind), {"max_new_tokens": NEW, "do_sample": False}
    bare = tiny.generate(**feed, **options)
    monkeypatch.setattr(liar, "truth", bare[:, feed["input_ids"].shape[1] :].tolist())
    monkeypatch.setattr(liar, "made", 0)
    with accelerated(tiny, "divprune", retain=0.3, lossless=True, lookup="liar", processor=zoo.processor(family)):
        return bare, tiny.generate(**feed, **options, **more), tiny.mmaccel.stats()


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_model_verifies_captured_blocks(
    graphs: None, liar: type[Liar], monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """Every family: the answers are those of the bare model, and those whose layers can be pinned replay their blocks."""
    if kind not in zoo.kinds(family):
        pytest.skip("takes no clips")
    bare, got, stats = bare_and_lossless(liar, monkeypatch, family, kind)
    assert torch.equal(bare, got)
    assert stats["drafting"]["accepted"] > 0
    if stats["uncaptured"]:
        assert stats["captured_steps"] == 0
        reasons = "are not pinned", "makes masks in front", "goes on from its", "cannot be recorded"
        assert any(why in stats["uncaptured"] for why in reasons)
    else:
        assert stats["captured_steps"] >= stats["drafting"]["verifications"] - 4


@pytest.mark.parametrize("family", few(SHORT, ("llava",)))
def test_the_bare_model_verifies_compiled_blocks(
    liar: type[Liar], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bare, got, stats = bare_and_lossless(liar, monkeypatch, family, "image", compile_config=config())
    assert torch.equal(bare, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] == stats["drafting"]["verifications"]


@pytest.mark.parametrize(
    ("why", "kind", "more"),
    [
        ("rows of the bare model keep different numbers", "uneven", {}),
        ("the caller keeps the cache", "image", {"return_dict_in_generate": True}),
        ("disable_compile was given", "image", {"disable_compile": True}),
        ("fewer than 16 tokens", "image", {"max_new_tokens": 9}),
        ("holds no prompt that was reduced", "text", {}),
    ],
)
def test_what_is_not_captured_says_why(
    graphs: None, liar: type[Liar], monkeypatch: pytest.MonkeyPatch, why: str, kind: str, more: dict[str, Any]
) -> None:
    tiny, feed, options = zoo.model("llava"), zoo.inputs("llava", kind), {"max_new_tokens": 40, "do_sample": False}
    bare = tiny.generate(**feed, **options | more)
    answer = bare.sequences if more.get("return_dict_in_generate") else bare
    monkeypatch.setattr(liar, "truth", answer[:, feed["input_ids"].shape[1] :].tolist())
    with accelerated(tiny, "divprune", lossless=True, lookup="liar"):
        out = tiny.generate(**feed, **options | more)
        stats = tiny.mmaccel.stats()
    assert torch.equal(getattr(out, "sequences", out), answer)
    assert stats["captured_steps"] == 0 and why in stats["uncaptured"]


def test_drafts_over_the_same_cache_are_not_captured(graphs: None) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    for recipe, draft in (("quest", "self"), ("none", [2])):
        with accelerated(tiny, recipe, lossless=True, draft=draft):
            tiny.generate(**feed, max_new_tokens=20, do_sample=False)
            stats = tiny.mmaccel.stats()
        assert stats["captured_steps"] == 0 and "drafts are made over the cache" in stats["uncaptured"]


def test_logits_of_replayed_blocks_are_the_callers_own(
    graphs: None, liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay overwrites the logits of the one before. No processor copies them here."""
    wanted, got, stats, _ = both(liar, monkeypatch, "llava", "divprune", "image", least=None)
    assert stats["captured_steps"] > 5
    for mine, other in zip(got.logits, wanted.logits, strict=True):
        close(mine, other)


def launches(liar: type[Liar], monkeypatch: pytest.MonkeyPatch, layers: int) -> dict[bool, int]:
    """Kernels that the host launches for the last verification of an answer on the simulated device, ordinary (False) and
    replayed (True): all of a block that commits, and a replay as one."""
    counts, tokens = {}, None
    for replayed in (False, True):
        tiny, feed = zoo.model("qwen2_5_vl", num_hidden_layers=layers), zoo.inputs("qwen2_5_vl", "image")
        with simulated.machine() as gpu, monkeypatch.context() as patched:
            patched.setattr(replay.ReplayedStep, "replays", True)
            patched.setattr(replay.ReplayedStep, "__call__", functools.partialmethod(as_one_launch, gpu))
            before: list[Any] = []
            patched.setattr(loop.Step, "read", noting(gpu, before))
            patched.setattr(liar, "plan", "noise")
            with accelerated(gpu.put(tiny), "divprune", lossless=True, lookup="liar"):
                options = {"max_new_tokens": 20, "do_sample": False, "disable_compile": not replayed}
                out = tiny.generate(**gpu.put(feed), **options).tolist()
                stats = tiny.mmaccel.stats()
            counts[replayed] = sum(before[-1].since(before[-2]).launches.values())
        assert (stats["captured_steps"] > 10) == replayed and tokens in (None, out), stats["uncaptured"]
        tokens = out
    return counts


def noting(gpu: Any, before: list[Any]) -> Any:
    """A block that is read, and notes first what was launched until then."""
    read = loop.Step.read
    return lambda *given: before.append(gpu.counts.copy()) or read(*given)


def as_one_launch(step: replay.ReplayedStep, gpu: Any, tokens: Tensor) -> Any:
    """A step that is run as it is, and counted as a replay."""
    step.tokens.copy_(tokens)
    with gpu.quiet():
        output = step._run()
    gpu.launch("graph")
    return output


def test_a_replayed_verification_launches_as_little_for_many_layers(
    liar: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_layers, many = (launches(liar, monkeypatch, count) for count in (2, 6))
    assert few_layers[True] == many[True] < few_layers[False] < many[False]
