"""Pieces of a prompt on a CPU: earlier keys are read without a mask and the piece's own causally, where that is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import close, follow, generate, inputs, logits

from mmaccel import accelerated
from mmaccel.runtime.call import readers

CHUNK = 7


@contextmanager
def watched(few: int = 1) -> Iterator[list[int]]:
    """The number of keys of each reading without a mask."""
    seen, original = list[int](), readers._read_behind

    def read(given: readers.Attention, scaling: float) -> readers.Output:
        seen.append(given.key.shape[2])
        return original(given, scaling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_read_behind", read)
        patch.setattr(readers, "FEW_QUERIES", few)
        yield seen


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shared", (6, 2, 1))
@pytest.mark.parametrize(("new", "total"), ((2, 3), (17, 90), (40, 600)))
def test_both_parts_are_one_attention(dtype: torch.dtype, shared: int, new: int, total: int) -> None:
    torch.manual_seed(0)
    query = 3 * torch.randn(2, new, 6, 16, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, shared, total + 5, 16, dtype=dtype)[:, :, :total] for _ in range(2))
    given: Any = SimpleNamespace(query=query, key=key, value=value)
    got, weights = readers._read_behind(given, 0.3)
    exact = [x.double().repeat_interleave(6 // shared, dim=1) for x in (key, value)]
    hidden = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
    shares = (0.3 * query.double() @ exact[0].mT).masked_fill(hidden, -torch.inf).softmax(-1)
    assert weights is None and got.dtype == dtype and got.shape == (2, new, 6, 16)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert float((got.double() - (shares @ exact[1]).transpose(1, 2)).abs().max()) < bound


@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
@torch.no_grad()
def test_every_layer_of_every_piece_behind_others_is_read_so(family: str) -> None:
    tiny, feed = oracle.subject(family), inputs(family)
    with accelerated(tiny, "none"):
        wanted = tiny(**feed).logits
        with watched() as seen:
            got = tiny(**feed, mmaccel={"chunk": CHUNK}).logits
        close(got, wanted)
        length = wanted.shape[1]
        ends = [min(end, length) for end in range(2 * CHUNK, length + CHUNK, CHUNK)]
        if length % CHUNK == 1:
            ends.pop()
        assert seen == [end for end in ends for _ in oracle.adapter(family).attending]
        for chunk, taken in ((10**6, False), (readers.FEW_QUERIES, False), (readers.FEW_QUERIES + 1, True)):
            with watched(readers.FEW_QUERIES) as seen:
                tiny(**feed, mmaccel={"chunk": chunk})
            assert bool(seen) == taken


@torch.no_grad()
def test_a_second_turn_is_read_so() -> None:
    tiny, feed, more = oracle.subject("llava"), inputs("llava"), inputs("llava", seed=3)
    turns = []
    with accelerated(tiny, "divprune", retain=0.5):
        for few in (10**6, 1):
            first = generate(tiny, feed)
            kept, _ = follow(feed, first, more)
            with watched(few) as seen:
                turns.append(logits(generate(tiny, kept, past_key_values=first.past_key_values)))
            assert len(seen) == (len(oracle.adapter("llava").attending) if few == 1 else 0)
    close(*turns)


@pytest.mark.parametrize("why", ("padding", "eager", "window", "weights", "gradients", "latents", "ahead"))
def test_what_is_read_with_a_mask(why: str) -> None:
    family = {"window": "llava_next", "latents": "kimi_k25", "ahead": "gemma3"}.get(why, "llava")
    window = {"sliding_window": 24} if why in ("window", "ahead") else {}
    tiny, feed = zoo.model(family, **window), inputs(family, "uneven" if why == "padding" else "image")
    if why == "eager":
        tiny.set_attn_implementation("eager")
    options = {"retain": 0.5, "proportional": "all"} if why == "weights" else {}
    with accelerated(tiny, "divprune" if options else "none", processor=zoo.processor(family), **options):
        with nullcontext() if why == "gradients" else torch.no_grad():
            wanted = tiny(**feed, use_cache=True).logits
            with watched() as seen:
                got = tiny(**feed, use_cache=True, mmaccel={"chunk": CHUNK}).logits
    there = feed["attention_mask"].bool()
    close(got[there].nan_to_num(), wanted[there].nan_to_num(), 5e-5)
    # before the first key is out of a window's reach all are seen
    assert all(length <= 24 for length in seen) if why == "window" else not seen


@torch.no_grad()
def test_attention_that_is_not_plain_is_read_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    original, asked = readers._sees_all_before, list[bool]()

    def sees(forward: Any, number: int, given: readers.Attention, seen: Any) -> bool:
        for more in ({"dropout": 0.5}, {"position_bias": torch.zeros(1)}, {"softcap": 30.0}):
            assert not original(forward, number, replace(given, options={**given.options, **more}), seen)
        assert not original(forward, number, replace(given, value=given.value[..., 1:]), seen)
        asked.append(original(forward, number, given, seen))
        return asked[-1]

    monkeypatch.setattr(readers, "_sees_all_before", sees)
    with watched():
        with accelerated(oracle.subject("llava"), "none", chunk=CHUNK) as tiny:
            tiny(**inputs("llava"))
    assert asked and all(asked)
