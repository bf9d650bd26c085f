"""Law 8: the same inputs give the same reduction and the same outputs, to the bit; ties go to the lower index."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES, generate, inputs, logits, model, recipe_of

from mmaccel import accelerated
from mmaccel.core.reduction import Reduction, top_mask
from mmaccel.method import ChunkMethod, LayerMethod, ProjectorMethod

families = pytest.mark.square("family", FAMILIES, of="kinds")


def run(tiny: Any, feed: dict[str, Any]) -> tuple[Any, ...]:
    """All that a call decides: the reduction, what the cache holds, tokens, logits."""
    out = generate(tiny, feed)
    made = tiny.mmaccel.reduction
    links = made.full_links()
    cache = out.past_key_values.mmaccel
    stored = [(layer.index.index, *layer.stored()) for layer in cache.layers] + [
        tuple(layer.tensors()) for layer in cache.recurrent
    ]
    return made.kept, links.source, links.slot, links.weight, out.sequences, logits(out), *sum(stored, ())


@pytest.mark.square(
    ("family", "method", "kind"),
    oracle.in_turn(oracle.square(oracle.named_recipes()), lambda _: ("image", "uneven")),
)
def test_twice_is_the_same(family: str, method: str, kind: str) -> None:
    """On one handle, and on one that was made anew."""
    tiny, feed = model(family), inputs(family, kind)
    chosen, processor = recipe_of(method, family), zoo.processor(family)
    with accelerated(tiny, chosen, processor=processor):
        first, second = run(tiny, feed), run(tiny, feed)
    with accelerated(tiny, chosen, processor=processor):
        third = run(tiny, feed)
    for other in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


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


@pytest.mark.square(("family", "name"), oracle.square(oracle.named(ProjectorMethod, LayerMethod, ChunkMethod)))
def test_a_grey_picture(family: str, name: str) -> None:
    """A picture of one colour makes ties in the model itself; the choice is still the same every time."""
    from PIL import Image

    tiny = model(family)
    grey = Image.new("RGB", zoo._TABLE[family].sizes[0], (128, 128, 128))
    feed = dict(zoo.encode(family, [([grey], [], zoo.QUESTION)]))
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
