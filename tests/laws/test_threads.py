"""Law 10: threads and interleaved conversations do not mix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES, follow, generate, inputs, logits, model, recipe_of

import mmaccel
from mmaccel import accelerate_vlm, accelerated
from mmaccel.families import family_of
from mmaccel.method import LayerMethod, ProjectorMethod

ROUNDS = 8

#: recipes that keep something for a conversation, and methods before the cache that merge nothing and ask no tower
NAMES = (
    *(name for name in oracle.named_recipes() if oracle.has_site(name, "cache")),
    *(name for name in oracle.methods_that_drop(ProjectorMethod, LayerMethod) if not mmaccel.get_method(name)().taps()),
)

families = pytest.mark.square("family", FAMILIES, of="kinds")


def together(*jobs: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Run jobs at the same time, each in a thread of its own."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(run, job) for job in jobs]]


def rounds(tiny: Any, feed: dict[str, Any], count: int = ROUNDS) -> list[torch.Tensor]:
    return [logits(generate(tiny, feed, new=3)) for _ in range(count)]


def same(many: list[torch.Tensor], one: torch.Tensor) -> None:
    assert all(torch.equal(other, one) for other in many)


@families
def test_two_models_with_two_recipes(family: str) -> None:
    """Other recipes at other sites, at the same time."""
    one, other = zoo.model(family), zoo.model(family, seed=1)
    processor = zoo.processor(family)
    accelerate_vlm(one, recipe_of("random"), processor=processor)
    first = "attention-received" if family_of(other).closed is None else "divprune"
    accelerate_vlm(other, [*recipe_of(first).stages, *recipe_of("snapkv").stages], processor=processor)
    feeds = inputs(family, "image"), inputs(family, "uneven")
    alone = [rounds(one, feeds[0], 1)[0], rounds(other, feeds[1], 1)[0]]
    figures = [tiny.mmaccel.stats()["stages"] for tiny in (one, other)]
    results = together(lambda: rounds(one, feeds[0]), lambda: rounds(other, feeds[1]))
    for many, single in zip(results, alone, strict=True):
        same(many, single)
    assert [tiny.mmaccel.stats()["stages"] for tiny in (one, other)] == figures


@pytest.mark.square(("family", "method"), oracle.families_in_turn(NAMES))
def test_one_model_with_two_inputs(family: str, method: str) -> None:
    """Pictures of other sizes and batches of other widths on the same model."""
    tiny = model(family)
    feeds = inputs(family, "image"), inputs(family, "uneven"), inputs(family, "text")
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        alone = [rounds(tiny, feed, 1)[0] for feed in feeds]
        results = together(*(lambda feed=feed: rounds(tiny, feed) for feed in feeds))
    for many, single in zip(results, alone, strict=True):
        same(many, single)


@families
def test_conversations_in_threads(family: str) -> None:
    """Two turns each on a kept cache, with other batch sizes, at the same time on one model."""
    tiny = model(family)
    talks = [(inputs(family, kind), inputs(family, "text", batch=rows)) for kind, rows in (("image", 1), ("uneven", 2))]
    with accelerated(tiny, recipe_of("divprune"), processor=zoo.processor(family)):

        def talk(feed: dict[str, Any], words: dict[str, Any]) -> torch.Tensor:
            first = generate(tiny, feed, new=3)
            return logits(generate(tiny, follow(feed, first, words)[0], new=3, past_key_values=first.past_key_values))

        alone = [talk(*turns) for turns in talks]
        results = together(*(lambda turns=turns: [talk(*turns) for _ in range(ROUNDS // 2)] for turns in talks))
    for many, single in zip(results, alone, strict=True):
        same(many, single)


def test_a_bare_model_beside_an_accelerated_one() -> None:
    """The functions that mmaccel registers for the whole process leave other models alone."""
    bare, tiny = zoo.model("llava"), zoo.model("llava")
    accelerate_vlm(tiny, recipe_of("snapkv"))
    feed = inputs("llava", "uneven")
    alone = [rounds(bare, feed, 1)[0], rounds(tiny, feed, 1)[0]]
    for many, single in zip(together(lambda: rounds(bare, feed), lambda: rounds(tiny, feed)), alone, strict=True):
        same(many, single)


def test_direct_forwards_in_threads() -> None:
    """A scope that a forward opens belongs to its thread."""
    tiny = model("qwen2_5_vl")
    feeds = inputs("qwen2_5_vl", "image"), inputs("qwen2_5_vl", "images")
    with accelerated(tiny, recipe_of("fastv")):

        @torch.no_grad()
        def forwards(feed: dict[str, Any], count: int = ROUNDS) -> list[torch.Tensor]:
            return [tiny(**feed).logits.nan_to_num() for _ in range(count)]

        alone = [forwards(feed, 1)[0] for feed in feeds]
        results = together(*(lambda feed=feed: forwards(feed) for feed in feeds))
    for many, single in zip(results, alone, strict=True):
        same(many, single)
