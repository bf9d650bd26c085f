"""Law: rows of a batch that continue one cache of one row get what each gets alone, and the cache stays as it was."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import FAMILIES, close, follow, generate, inputs, logits, model, recipe_of
from torch import Tensor

from mmaccel import MmaccelError, accelerated

METHODS = sorted(name for name, kind in synthetic.offered().items() if kind.site not in ("frames", "decode"))
#: of different lengths
QUESTIONS = ("why?", "what is it, and what else is there to see?", "how many?")


def rows_of(prompt: dict[str, Tensor], first: Any, family: str) -> list[dict[str, Any]]:
    """The inputs of every question alone, behind the answer to the first."""
    second = [dict(zoo.encode(family, [([], [], question)])) for question in QUESTIONS]
    return [follow(prompt, first, one)[0] for one in second]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The rows as one batch, padded on the left as a processor pads them."""
    width = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: torch.cat([torch.nn.functional.pad(row[name], (width - row[name].shape[1], 0)) for row in rows])
        for name in rows[0]
    }


@pytest.mark.square(
    ("family", "method"),
    [(family, name) for family in FAMILIES for name in METHODS if oracle.fits(name, family)],
    of="pairs",
)
def test_rows_with_one_cache_equal_each_row_alone(family: str, method: str) -> None:
    tiny, prompt = model(family), inputs(family, "image")
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        first = generate(tiny, prompt, new=2)
        cache, rows = first.past_key_values, rows_of(prompt, first, family)
        alone = [generate(tiny, row, past_key_values=copy.deepcopy(cache)) for row in rows]
        before = copy.deepcopy(cache)
        feed = padded(rows)
        together = generate(tiny, feed, past_key_values=cache)
        for number, one in enumerate(alone):
            close(logits(together)[number], logits(one)[0])
        # the prompts come back as they were given
        assert torch.equal(together.sequences[:, : feed["input_ids"].shape[1]], feed["input_ids"])
        # nothing happened to the cache, and once more it gives the same
        assert cache.get_seq_length() == before.get_seq_length()
        for mine, theirs in zip(cache.mmaccel.layers, before.mmaccel.layers, strict=True):
            assert torch.equal(mine.index.index, theirs.index.index)
            assert all(map(torch.equal, mine.stored(), theirs.stored()))
        assert torch.equal(logits(generate(tiny, feed, past_key_values=cache)), logits(together))


def test_what_rows_share_is_stored_once() -> None:
    family = "llava"
    tiny, prompt = model(family), inputs(family, "image")
    for method in ("divprune", "snapkv", "adakv"):
        with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
            first = generate(tiny, prompt, new=2)
            rows = rows_of(prompt, first, family)
            together = generate(tiny, padded(rows * 4), new=2, past_key_values=first.past_key_values)
        mine, theirs = first.past_key_values.mmaccel.layers[0], together.past_key_values.mmaccel.layers[0]
        held = mine.keys if mine.ragged is None else mine.ragged.keys
        shared = theirs.prefix.keys if mine.ragged is None else theirs.prefix.ragged.keys
        assert shared.data_ptr() == held.data_ptr()
        assert len(theirs.keys) == 12 and theirs.keys.shape[2] == len(theirs.index) - theirs.prefix.width


def test_a_shared_batch_goes_on_for_another_turn() -> None:
    """The rows' own cache is continued, cropped and reordered like any other."""
    family = "qwen2_5_vl"
    tiny, prompt = model(family), inputs(family, "image")
    with accelerated(tiny, "divprune", retain=0.3, processor=zoo.processor(family)):
        first = generate(tiny, prompt, new=2)
        rows = rows_of(prompt, first, family)
        feed = padded(rows)
        together = generate(tiny, feed, past_key_values=first.past_key_values)
        plain = copy.deepcopy(together.past_key_values)
        for layer in plain.mmaccel.layers:
            (layer.keys, layer.values), layer.prefix = layer.stored(), None
        # in the middle of a batch that has shared, padding lies behind the prefix
        seen = first.past_key_values.get_seq_length()
        ids = torch.cat([together.sequences, together.sequences[:, -3:]], dim=1)
        went = []
        for cache in (together.past_key_values, plain):
            for layer in cache.layers:
                layer.crop(-1)
            cache.reorder_cache(torch.tensor([2, 0, 0]))
            step = tiny(input_ids=ids[[2, 0, 0], -2:], past_key_values=cache, use_cache=True)
            cut = cache.get_seq_length() - seen + 3
            for layer in cache.layers:
                layer.crop(-cut)
            went.append((step.logits, tiny(input_ids=ids[[2, 0, 0], -2:], past_key_values=cache).logits))
    for one, other in zip(*went, strict=True):
        close(one, other)
    assert together.past_key_values.mmaccel.layers[0].prefix is None


@pytest.mark.parametrize("family", ["gemma3", "lfm2_vl"])  # by choice: windows, recurrent states
def test_a_text_prefix_is_shared_by_rows_with_pictures(family: str) -> None:
    """A system prompt that a text-only call has read."""
    tiny, system = model(family), inputs(family, "text")
    with accelerated(tiny, recipe_of("test-fixed", family), processor=zoo.processor(family)):
        first = generate(tiny, system, new=2)
        answered = SimpleNamespace(sequences=first.sequences)
        shots = [inputs(family, "image", seed=seed) for seed in (1, 2)]
        rows = [follow(system, answered, shot)[0] for shot in shots]
        alone = [generate(tiny, row, past_key_values=copy.deepcopy(first.past_key_values)) for row in rows]
        both = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        together = generate(tiny, both, past_key_values=first.past_key_values)
    for number, one in enumerate(alone):
        close(logits(together)[number], logits(one)[0])


def test_rows_that_begin_otherwise_are_refused() -> None:
    family = "llava"
    tiny, prompt = model(family), inputs(family, "image")
    with accelerated(tiny, "divprune", processor=zoo.processor(family)):
        first = generate(tiny, prompt, new=2)
        feed = padded(rows_of(prompt, first, family))
        feed["input_ids"][0, -5 - first.past_key_values.get_seq_length()] += 1
        with pytest.raises(MmaccelError, match="must all begin with them"):
            generate(tiny, feed, past_key_values=first.past_key_values)
        short = {name: x[:, -4:] for name, x in feed.items()}
        with pytest.raises(MmaccelError, match="give the whole prompts"):
            generate(tiny, short, past_key_values=first.past_key_values)
