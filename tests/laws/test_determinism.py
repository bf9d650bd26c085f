"""Law 8: the same inputs give the same reduction and the same outputs, to the bit; ties go to the lower index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import FAMILIES, generate, inputs, logits, model, recipe_of

import mmaccel
from mmaccel import accelerated
from mmaccel.core.reduction import Reduction, top_mask
from mmaccel.method import TokenBatch, TokenMethod

METHODS = ("random", "uniform", "divprune", "attention-received", "vtc-cls", "pool", "tome", "fastv", "snapkv")
METHODS += ("vl-cache", "d2o", "dycoke-cache", "infinipot-v")

families = pytest.mark.parametrize("family", FAMILIES)


def fits(method: str, family: str) -> bool:
    return method != "vtc-cls" or family in ("llava", "llava_next", "llava_next_video", "video_llava", "internvl")


def run(tiny: Any, feed: dict[str, Any]) -> tuple[Any, ...]:
    """All that a call decides: the reduction, what the cache holds, tokens, logits."""
    out = generate(tiny, feed)
    made = tiny.mmaccel.reduction
    links = made.full_links()
    stored = [(layer.index.index, *layer.stored()) for layer in out.past_key_values.layers]
    return made.kept, links.source, links.slot, links.weight, out.sequences, logits(out), *sum(stored, ())


@families
@pytest.mark.parametrize("kind", ["image", "uneven"])
def test_twice_is_the_same(family: str, kind: str) -> None:
    """On one handle, and on one that was made anew."""
    tiny, feed = model(family), inputs(family, kind)
    for method in (name for name in METHODS if fits(name, family)):
        chosen, processor = recipe_of(method, family), zoo.processor(family)
        with accelerated(tiny, chosen, processor=processor):
            first, second = run(tiny, feed), run(tiny, feed)
        with accelerated(tiny, chosen, processor=processor):
            third = run(tiny, feed)
        for other in (second, third):
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), method


@families
def test_a_call_in_between_changes_nothing(family: str) -> None:
    """Statistics, random numbers and taps of one call do not reach the next."""
    tiny, feed = model(family), inputs(family)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with accelerated(tiny, recipe_of("random"), processor=zoo.processor(family)):
        first = run(tiny, feed)
        figures = {key: value for key, value in tiny.mmaccel.stats().items() if key != "seconds"}
        assert torch.equal(torch.get_rng_state(), before)
        run(tiny, inputs(family, "images", seed=5))
        torch.rand(3)
        second = run(tiny, feed)
        again = {key: value for key, value in tiny.mmaccel.stats().items() if key != "seconds"}
    assert figures == again
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_ties_go_to_the_lower_slot() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 9.0], [torch.nan, 1.0, 1.0, torch.nan, 1.0]])
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    kept = top_mask(scores, valid, torch.tensor([2, 3, 4]))
    assert kept.tolist() == [
        [False, True, True, False, False],
        [True, True, True, False, False],
        [True, True, True, False, True],
    ]


def _flat(method: str) -> TokenBatch:
    """Tokens that no score can tell apart."""
    n = 12
    signals = {name: torch.full((1, 1, n), 0.5) for name in ("cls_attention", "received_attention")}
    return TokenBatch(
        features=torch.ones(1, n, 8),
        valid=torch.ones(1, n, dtype=torch.bool),
        cells=torch.cartesian_prod(torch.arange(1), torch.arange(3), torch.arange(4))[None],
        grid=torch.tensor([[1, 3, 4]]),
        segment=torch.zeros(1, n, dtype=torch.long),
        signals={**signals, "prompt_attention": torch.full((1, n), 0.5)},
    )


@pytest.mark.parametrize("name", ["divprune", "vtc-cls", "attention-received", "fastv"])
def test_equal_tokens_keep_the_first(name: str) -> None:
    method = mmaccel.method(name)()
    assert isinstance(method, TokenMethod)
    made = method.reduce(_flat(name), torch.tensor([5]))
    assert made.kept[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


@families
def test_a_grey_picture(family: str) -> None:
    """A picture of one colour makes ties in the model itself; the choice is still the same every time."""
    from PIL import Image

    tiny = model(family)
    grey = Image.new("RGB", zoo._TABLE[family].sizes[0], (128, 128, 128))
    feed = dict(zoo.encode(family, [([grey], [], zoo.QUESTION)]))
    for name in ("divprune", "attention-received", "fastv"):
        with accelerated(tiny, recipe_of(name, family), processor=zoo.processor(family)):
            first, second = run(tiny, feed), run(tiny, feed)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_merging_has_one_order_of_additions() -> None:
    """Many tokens into few: the sums are the same bits every time, and in any order of the links."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 500, 7, generator=random)
    target = torch.randint(0, 5, (2, 500), generator=random)
    target[:, :5] = torch.arange(5)
    made = Reduction.merge(target, torch.ones(2, 500, dtype=torch.bool), torch.rand(2, 500, generator=random))
    assert made.links is not None
    mixed = torch.randperm(len(made.links.batch), generator=random)
    links = type(made.links)(*(part[mixed] for part in vars(made.links).values()))
    shuffled = Reduction(made.kept, made.valid, links)
    assert torch.equal(made.apply(x), made.apply(x)) and torch.equal(made.apply(x), shuffled.apply(x))
