"""Dual chunk attention: short prompts are the bare model's, long ones are read at distances that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.method.registry import get_method

pytestmark = pytest.mark.usefixtures("no_gradients")


def of(size: int, window: int, *others: Stage) -> Recipe:
    options = {"chunk_size": size, "local_window": window}
    return Recipe("long", (*others, Stage("dca", options=options)))


def logits_of(model: Any, feed: Any, forced: Tensor) -> Tensor:
    return oracle.decode(model, feed, forced)[0]


@pytest.mark.parametrize(("family", "kind"), [("llava", "uneven"), ("internvl", "image")])
def test_a_prompt_of_one_chunk_is_the_bare_model(family: str, kind: str) -> None:
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]), 3)
    with accelerated(oracle.subject(family), of(4096, 512), processor=zoo.processor(family)) as model:
        got = logits_of(model, feed, forced)
    oracle.close(got, logits_of(oracle.bare(family), feed, forced))


def test_two_chunks_whose_neighbours_are_read_at_true_distances_are_the_bare_model() -> None:
    """A chunk as large as twice what keys take of it moves no query of the second chunk."""
    feed = zoo.inputs("llava", "uneven")
    length, forced = feed["input_ids"].shape[1], oracle.force("llava", len(feed["input_ids"]), 3)
    half = (length + 4) // 2 + 1
    with accelerated(oracle.subject("llava"), of(2 * half, half)) as model:
        got = logits_of(model, feed, forced)
    wanted = logits_of(oracle.bare("llava"), feed, forced)
    oracle.close(got, wanted)
    with accelerated(oracle.subject("llava"), of(9, 2)) as model:
        other = logits_of(model, feed, forced)
    assert not torch.allclose(other, wanted, atol=1e-3), "nothing is turned"


@pytest.mark.parametrize("family", ["llava", "internvl"])
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_prompt_about_as_long_as_a_chunk_is_the_bare_model(family: str, more: int) -> None:
    """Also where its last token, or one of the answer, is the first of the second chunk."""
    feed = zoo.inputs(family, "image")
    step, forced = feed["input_ids"].shape[1] + more, oracle.force(family, len(feed["input_ids"]), 3)
    with accelerated(oracle.subject(family), of(2 * step, step), processor=zoo.processor(family)) as model:
        got = logits_of(model, feed, forced)
    oracle.close(got, logits_of(oracle.bare(family), feed, forced))


def test_steps_are_what_a_prompt_is() -> None:
    """A row alone, and an answer that is read with the prompt, give the same logits."""
    feed = zoo.inputs("llava", "uneven")
    forced = oracle.force("llava", len(feed["input_ids"]), 3)
    with accelerated(oracle.subject("llava"), of(24, 8, Stage("divprune", 0.5))) as model:
        whole = logits_of(model, feed, forced)
        for row in range(len(forced)):
            single = zoo.single("llava", feed, row)
            alone = logits_of(model, single, forced[row : row + 1])
            oracle.close(whole[row], alone[0])
            longer = oracle.continued("llava", single, forced[row : row + 1])
            out = model(**longer, use_cache=True).logits[0, -len(alone[0]) :]
            oracle.close(alone[0], out)


def test_what_is_refused() -> None:
    with pytest.raises(MmaccelError, match="`local_window` of dca must be less than chunk_size=8, got 8"):
        get_method("dca")(chunk_size=8, local_window=8)
    with pytest.raises(MmaccelError, match="dca evicts nothing"):
        get_method("dca")(every=4)
    with pytest.raises(UnsupportedError, match="dca: positions of this .* have three axes"):
        accelerate_vlm(zoo.model("qwen2_5_vl"), of(24, 8))
    for family in ("paligemma", "molmo2"):
        with pytest.raises(
            UnsupportedError, match="dca reads the keys up to a query, and the language model of .* both ways"
        ):
            accelerate_vlm(zoo.model(family), of(24, 8))
