"""Peak memory: what is counted, what arithmetic gives, and that the two agree."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_selectors
import torch
import zoo
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import memory
from laws import oracle
from live import Allocations, Span, spans
from prefill import build, prompt
from tail import few

from mmaccel import accelerated
from mmaccel.kv.cache import cache_bytes
from mmaccel.runtime.cache.prompt_eviction import PromptEviction

pytestmark = pytest.mark.usefixtures("cheap_collections")

SIDE, TEXT, STEPS = 24, 32, 2


@pytest.fixture(scope="module")
def model() -> Any:
    made = build(4, 192, SIDE, "cpu", torch.float32)
    folder = random_selectors.beside(made)
    # it is its own draft
    made.save_pretrained(folder / "draft")
    zoo.processor("llava").save_pretrained(folder / "draft")
    made.config._name_or_path = str(folder)
    return made


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_spans_hold_the_peak_and_what_is_left() -> None:
    memory_ = "[memory]"
    events = [(0, memory_, 100), (1, "aten::mm", 0), (2, memory_, 50), (3, memory_, -50), (4, "mark a", 0)]
    events += [(5, memory_, -100), (6, memory_, 20), (7, "mark b", 0)]
    # the second begins with what the first left
    assert spans(events) == {"a": Span(150, 100), "b": Span(100, 20)}


def test_temporaries_count_and_what_was_there_does_not() -> None:
    before = torch.ones(1 << 16)
    with Allocations() as seen:
        made = (before + before) * before
        seen.mark("made")
        del before
        seen.mark("freed")
    assert seen.spans == {"made": Span(2 * made.nbytes, made.nbytes), "freed": Span(made.nbytes, made.nbytes)}


def test_arithmetic_by_hand() -> None:
    shape = memory.Shape(layers=3, width=8, hidden=16, kv_heads=2, head=4, size=2, visual=400, text=10)
    assert shape.key == 32
    assert shape.activations(410) == 410 * (2 * (24 + 48 + 8) + 8)
    none = memory.computed("none", shape, 0.25, 1, kernels=False)
    assert none.held == 3 * 410 * 32
    assert none.prefill_peak == none.held + shape.activations(410)
    assert none.decode_peak == 3 * 411 * 32 + 411 * 16
    snapkv = memory.computed("snapkv", shape, 0.25, 1, kernels=False)
    assert snapkv.held == 3 * 110 * 32
    assert snapkv.prefill_peak == snapkv.held + shape.activations(410)
    # a pyramid has the same mean and a larger largest layer
    pyramid = memory.computed("pyramidkv", shape, 0.25, 1, kernels=False)
    assert pyramid.held == snapkv.held and pyramid.decode_peak > snapkv.decode_peak
    # with two whole layers and one short one the peak is in the second
    fastv = memory.computed("fastv", shape, 0.25, 1, kernels=False)
    # and room for one token in 32, but for 8 at least
    assert fastv.held == fastv.decode_peak == (422 + 422 + 118) * 32
    assert fastv.prefill_peak == 2 * 422 * 32 + shape.activations(410)
    # 256 packed, 154 in full precision; 2 bits a number, and 4 bytes for every 32; a page is read through 6 bytes a number
    kivi = memory.computed("kivi", shape, 0.25, 1, kernels=False)
    assert kivi.held == 3 * (154 * 32 + 256 * 16 * (0.25 + 4 / 32))
    assert kivi.decode_peak - memory.computed("kivi", shape, 0.25, 1, kernels=True).decode_peak == (795 * 32 - 154 * 16)


EVERY = ["none", *(name for name in oracle.named_recipes() if oracle.fits(name, "llava"))]
#: nothing, budgets of all layers and heads alike and not, packed keys, fewer tokens
QUICK = ("none", "snapkv", "adakv", "kivi", "vl-cache", "fastv")


@pytest.mark.parametrize("recipe", few(EVERY, QUICK))
def test_bytes_reported_are_freed_with_the_cache(model: Any, no_collector: None, recipe: str) -> None:
    """To the byte, and at once: nothing waits for Python to look for cycles."""
    inputs = prompt(model, SIDE, TEXT)
    with accelerated(model, recipe), torch.inference_mode(), Allocations() as seen:
        cache = DynamicCache(config=model.config.text_config)
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        reported, layer = cache_bytes(cache), weakref.ref(cache.layers[0])
        seen.mark("filled")
        del cache
        seen.mark("freed")
    assert layer() is None
    assert seen.spans["filled"].held - seen.spans["freed"].held == reported


def both(model: Any, recipe: str) -> dict[str, Any]:
    shape = memory.shape_of(model, SIDE, TEXT)
    return memory.compare(model, prompt(model, SIDE, TEXT), shape, 0.25, STEPS, recipe)


@pytest.fixture(scope="module")
def bare(model: Any) -> dict[str, Any]:
    return both(model, "none")


def test_nothing_is_alive_that_arithmetic_does_not_know(bare: dict[str, Any]) -> None:
    assert bare["measured"]["prefill_peak"] == bare["computed"]["prefill_peak"]
    assert bare["measured"]["held"] == pytest.approx(bare["computed"]["held"], rel=1e-4)
    assert bare["measured"]["decode_peak"] == pytest.approx(bare["computed"]["decode_peak"], rel=0.01)


@pytest.mark.parametrize("recipe", memory.RECIPES[1:])
def test_peaks_fall_by_what_was_computed(model: Any, bare: dict[str, Any], recipe: str) -> None:
    row = both(model, recipe)
    # beside the keys: what knows where the tokens are, below 120 bytes a token
    spare = 120 * memory.shape_of(model, SIDE, TEXT).tokens
    for name, told in row["computed"].items():
        found = row["measured"][name]
        assert -0.001 * told <= found - told <= spare
        assert bare["measured"][name] - found >= 0.8 * (bare["computed"][name] - told) > 0


# by choice: scores of a window, of all queries, of keys alone, and what is merged
SCORED = ("snapkv", "h2o", "keydiff", "look-m", "expected-attention")


@pytest.mark.parametrize("recipe", few(SCORED, ("snapkv",)))
@pytest.mark.parametrize("layers", [2, 4])
def test_layers_that_wait_for_each_other_take_as_much_as_they_may(
    model: Any, recipe: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where layers are evicted from together. Twice as much: scores need copies of all keys that wait, which the
    MLP of so small a model does not hide."""
    inputs, shape = prompt(model, SIDE, TEXT), memory.shape_of(model, SIDE, TEXT)
    alone = memory.measured(model, inputs, recipe, 0.25, STEPS)
    room = layers * shape.tokens * shape.key
    monkeypatch.setattr(PromptEviction, "room", room)
    together = memory.measured(model, inputs, recipe, 0.25, STEPS)
    assert together["held"] == pytest.approx(alone["held"], rel=0.01)
    assert 0 < together["prefill_peak"] - alone["prefill_peak"] < 2 * room
