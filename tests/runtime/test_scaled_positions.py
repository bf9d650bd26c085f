"""Scaled positions: short prompts are the bare model's, long ones those of a model with other frequencies of RoPE."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.accelerate.positions import check_positions, recipe_limit
from mmaccel.method.registry import get_method

pytestmark = pytest.mark.usefixtures("no_gradients")

#: positions of one axis, and of three
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl")  # by choice: positions of one axis, and of three in both orders


def scaled(*others: Stage, **options: Any) -> Recipe:
    return Recipe("scaled", (*others, Stage("visual-context-window", options=options)))


@contextmanager
def other_frequencies(family: str, factor: float, window: int, slow: float = 1.0, fast: float = 32.0) -> Iterator[Any]:
    """The bare model with RoPE as the paper has it."""
    model, rope = oracle.bare(family), oracle.adapter(family).text.rotary_emb
    rope = next(module for name, module in model.named_modules() if type(module) is type(rope))
    before, scale = rope.inv_freq, rope.attention_scaling
    made = []
    for frequency in before.tolist():
        turns = window * frequency / (2 * math.pi)
        stay = min(1.0, max(0.0, (turns - slow) / (fast - slow)))
        made.append(frequency * (stay + (1 - stay) / factor))
    rope.inv_freq, rope.attention_scaling = torch.tensor(made), scale * (0.1 * math.log(factor) + 1)
    try:
        yield model
    finally:
        rope.inv_freq, rope.attention_scaling = before, scale


def logits_of(model: Any, feed: Any, forced: Tensor) -> Tensor:
    return oracle.decode(model, feed, forced)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_within_the_window_is_the_bare_model(family: str) -> None:
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1, 3)
    count = int(oracle.visual(family, feed).sum())
    wanted = logits_of(oracle.bare(family), feed, forced)
    for options in ({}, {"window": count}, {"window": 4, "factor": 1.0}):
        with accelerated(oracle.subject(family), scaled(**options)) as model:
            oracle.close(logits_of(model, feed, forced), wanted)


@pytest.mark.parametrize("options", [{"window": 30}, {"window": 8, "factor": 2.5, "slow": 0.01, "fast": 0.5}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_beyond_it_has_other_frequencies(family: str, options: dict[str, Any]) -> None:
    """Also in the steps behind it."""
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1, 3)
    with accelerated(oracle.subject(family), scaled(**options)) as model:
        got = logits_of(model, feed, forced)
    with other_frequencies(family, **{"factor": 4.0, **options}) as bare:
        oracle.close(got, logits_of(bare, feed, forced))
    assert not torch.allclose(got, logits_of(oracle.bare(family), feed, forced), atol=1e-4), "nothing is scaled"


def test_every_row_for_itself() -> None:
    """Rows above and below the window, in a batch and alone; what other stages drop is not counted."""
    feed = zoo.inputs("llava", "textrow")
    forced = oracle.force("llava", len(feed["input_ids"]), 3)
    counts = oracle.visual("llava", feed).sum(1)
    assert len(set(counts.tolist())) > 1
    with accelerated(oracle.subject("llava"), scaled(window=int(counts.max()) - 1)) as model:
        whole = logits_of(model, feed, forced)
        for row in range(len(forced)):
            single = zoo.single("llava", feed, row)
            oracle.close(whole[row], logits_of(model, single, forced[row : row + 1])[0])
    bare = logits_of(oracle.bare("llava"), feed, forced)
    for row, count in enumerate(counts.tolist()):
        same = torch.allclose(whole[row].nan_to_num(), bare[row].nan_to_num(), atol=1e-4)
        assert same == (count < int(counts.max()))
    half = Stage("divprune", 0.5)
    with accelerated(oracle.subject("llava"), scaled(half, window=int(counts.max()) - 1)) as model:
        got = logits_of(model, feed, forced)
    with accelerated(oracle.subject("llava"), Recipe("half", (half,))) as model:
        oracle.close(got, logits_of(model, feed, forced))


def test_another_turn_goes_on_as_it_began() -> None:
    feed, options = zoo.inputs("llava", "image"), {"window": 8}
    more = torch.tensor([[7, 9, 11]])
    with accelerated(oracle.subject("llava"), scaled(**options)) as model:
        cache = model(**feed, use_cache=True).past_key_values
        got = model(input_ids=more, past_key_values=cache, use_cache=True).logits
    with other_frequencies("llava", 4.0, 8) as bare:
        cache = bare(**feed, use_cache=True).past_key_values
        oracle.close(got, bare(input_ids=more, past_key_values=cache, use_cache=True).logits)


def test_a_cache_that_was_read_otherwise_is_refused() -> None:
    feed = zoo.inputs("llava", "image")
    mask = torch.cat([feed["attention_mask"]] * 2, dim=1)
    again = {**feed, "attention_mask": mask}
    with accelerated(oracle.subject("llava"), scaled(window=8)) as model:
        cache = model(**feed, use_cache=True).past_key_values
    with (
        accelerated(oracle.subject("llava"), scaled(window=8, factor=2.0)) as model,
        pytest.raises(UnsupportedError, match="cannot continue a cache"),
    ):
        model(**again, past_key_values=cache, use_cache=True)
    with accelerated(oracle.subject("llava"), "divprune") as model:
        cache = model(**feed, use_cache=True).past_key_values
    with (
        accelerated(oracle.subject("llava"), scaled(window=8)) as model,
        pytest.raises(UnsupportedError, match="cannot scale positions behind"),
    ):
        model(**again, past_key_values=cache, use_cache=True)


def test_prompts_may_be_longer_by_the_factor() -> None:
    model, ids = oracle.subject("llava"), torch.zeros(1, 10, dtype=torch.long)
    limit = recipe_limit(model, Recipe("none"))
    assert limit is not None and recipe_limit(model, scaled(factor=2.5)) == int(2.5 * limit)
    inputs = {"input_ids": ids.expand(1, -1).repeat(1, limit // 10 + 1)}
    with pytest.raises(MmaccelError, match=f"this model has {limit} positions"):
        check_positions(model, Recipe("none"), inputs, 1)
    check_positions(model, scaled(factor=2.5), inputs, 1)
    inputs = {"input_ids": ids.repeat(1, limit // 4 + 1)}
    with pytest.raises(MmaccelError, match=f"this model has {int(2.5 * limit)} positions"):
        check_positions(model, scaled(factor=2.5), inputs, 1)


def test_what_is_refused() -> None:
    kind = get_method("visual-context-window")
    with pytest.raises(MmaccelError, match="`fast` of visual-context-window must be greater than slow=40, got 32"):
        kind(slow=40.0)
    with pytest.raises(MmaccelError, match="evicts nothing"):
        kind(every=4)
    with pytest.raises(MmaccelError, match="`factor` of visual-context-window must be at least 1"):
        kind(factor=0.5)
    with pytest.raises(MmaccelError, match="codecs do not know"):
        accelerate_vlm(zoo.model("llava"), Recipe("two", (*scaled().stages, Stage("kivi"))))
    with pytest.raises(UnsupportedError, match="no single fixed set"):
        accelerate_vlm(zoo.model("gemma3"), scaled())
