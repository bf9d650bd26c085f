"""Law: tokens that skip experts are what a plain program computes with weights of zero, and the experts are not computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
import zoo
from torch import Tensor

from mmaccel import MmaccelError, accelerated
from mmaccel.families import family_of

pytestmark = pytest.mark.usefixtures("no_gradients")

STEPS = 5
OPTIONS = {"beta": 0.8, "lowest": 0.2, "highest": 0.1, "first": 1}
FAMILIES = [family for family in zoo.FAMILIES if oracle.fits("mcmoe", family)]


@contextmanager
def plain(model: Any, official: bool) -> Iterator[None]:
    """A bare model of one row, with eager attention, whose experts are given other weights, by the rules of the paper."""
    known, maps = family_of(model), {}

    def attended(number: int, output: Any) -> None:
        maps[number] = output[1][0].float().mean(0)

    def before(number: int, args: Any, kwargs: Any) -> Any:
        hidden, index, weights = [*args, *(kwargs[name] for name in list(kwargs)[: 3 - len(args)])]
        kept = weights.float() >= OPTIONS["beta"] * weights.float().max(1, keepdim=True).values
        paid, size = maps.pop(number, None), len(hidden)
        if paid is not None and size > 1:
            # what an indexer does not choose is not seen
            behind = torch.arange(size, 0, -1)
            seeing = (paid > 0).sum(0).clamp(min=1) if number in known.indexed else behind
            score = hidden.float().abs().sum(1) * (1 / behind if official else paid.sum(0) / seeing)
            kept[score.topk(int(OPTIONS["highest"] * size)).indices] = True
            kept[(-score).topk(int(OPTIONS["lowest"] * size)).indices] = False
        total, left = weights.sum(1, keepdim=True), (weights * kept).sum(1, keepdim=True)
        return (hidden, index, torch.where(kept, weights * total / left, 0.0)), {}

    handles = []
    for number, layer in enumerate(known.text.layers):
        experts = known.experts_in(number)
        if number < OPTIONS["first"] or experts is None:
            continue
        if number in known.attending:
            handles.append(
                layer.self_attn.register_forward_hook(lambda _, args, output, number=number: attended(number, output))
            )
        handles.append(
            experts.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: before(number, args, kwargs), with_kwargs=True
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many experts tokens are given, and how many of them are computed."""
    counts, known = [0, 0], family_of(model)

    def count(module: Any, args: Any, kwargs: Any) -> None:
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts[0] += index.numel()
        counts[1] += int((index < module.num_experts).sum())

    each = (known.experts_in(number) for number in range(known.depth))
    handles = [one.register_forward_pre_hook(count, with_kwargs=True) for one in each if one is not None]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("variant", ["exact", "official"])
def test_skipped_experts_have_no_weight(family: str, variant: str) -> None:
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1, STEPS)
    other = zoo.model(family)
    other.set_attn_implementation({"text_config": "eager"})
    with plain(other, variant == "official"):
        wanted, _ = oracle.decode(other, feed, forced)
    model = oracle.subject(family)
    with accelerated(model, "mcmoe", variant=variant, **OPTIONS), counted(model) as counts:
        got, _ = oracle.decode(model, feed, forced)
    oracle.close(got, wanted, 4 * oracle.TOLERANCE)
    assert counts[1] < 0.9 * counts[0], "experts are computed that nobody uses"
    oracle.apart(got, oracle.decode(model, feed, forced)[0])


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("kind", ["uneven", "textrow"])
def test_a_row_of_a_batch_skips_what_it_skips_alone(family: str, kind: str) -> None:
    """A row without pictures skips nothing."""
    feed, model = zoo.inputs(family, kind), oracle.subject(family)
    forced = oracle.force(family, len(feed["input_ids"]), STEPS)
    with accelerated(model, ["divprune", "mcmoe"], retain=0.5, **OPTIONS):
        got, _ = oracle.decode(model, feed, forced)
        for row in range(len(forced)):
            own = zoo.single(family, feed, row)
            alone, _ = oracle.decode(model, own, forced[row : row + 1])
            oracle.close(got[row : row + 1], alone, 4 * oracle.TOLERANCE)
            if not oracle.visual(family, own).any():
                oracle.close(alone, oracle.decode(oracle.bare(family), own, forced[row : row + 1])[0])


@pytest.mark.square("family", FAMILIES)
def test_tokens_that_skip_nothing_are_those_of_the_bare_model(family: str) -> None:
    feed, model, forced = zoo.inputs(family, "uneven"), oracle.subject(family), oracle.force(family, 2, STEPS)
    wanted, _ = oracle.decode(model, feed, forced)
    with accelerated(model, "mcmoe", beta=0.0, lowest=0.0, highest=0.0), counted(model) as counts:
        got, _ = oracle.decode(model, feed, forced)
    oracle.close(got, wanted)
    assert counts[0] == counts[1]


def test_the_attention_that_a_token_receives_counts_the_queries_that_see_it() -> None:
    """By hand: of three queries the first pays all to itself, the others half to the first key and the rest to themselves."""
    from mmaccel import methods
    from mmaccel.method import LayerAttention

    rows = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]]).log().clamp(min=-1e9)
    attention = LayerAttention(torch.eye(3)[None, None], rows.T[None, None], None, 1.0, torch.ones(1, 3).bool())
    received = methods()["mcmoe"]().observe(attention)
    oracle.close(received, torch.tensor([[2 / 3, 1 / 4, 1 / 2]]), what="attention")
    hidden, real = torch.tensor([[[1.0], [9.0], [2.0]]]), torch.ones(1, 3, dtype=torch.bool)
    weights: Tensor = torch.tensor([[[0.8, 0.2], [0.6, 0.4], [0.9, 0.1]]])
    method = methods()["mcmoe"](beta=0.5, lowest=0.34, highest=0.34)
    # scores are 2/3, 9/4 and 1
    assert method.uses(weights, hidden, received, real).tolist() == [[[False, False], [True, True], [True, False]]]
    # 1/3, 9/2 and 2 in the authors' program; and behind the prompt weights alone
    assert method.by("official").uses(weights, hidden, received, real).tolist() == [
        [[False, False], [True, True], [True, False]]
    ]
    assert method.uses(weights, hidden, None, real).tolist() == [[[True, False], [True, True], [True, False]]]


@pytest.mark.skipif(not FAMILIES, reason="the experts of this transformers do not skip tokens")
@pytest.mark.parametrize(
    ("recipe", "options", "said"),
    [
        (["mcmoe", "mcmoe"], {}, "leave out experts of the same layers"),
        ("mcmoe", {"chunk": 8}, "ranks the tokens of a whole prompt"),
        ("mcmoe", {"beta": 1.5}, "`beta` of mcmoe must be"),
        ("mcmoe", {}, "llava model that it works in have none"),
    ],
)
def test_what_is_refused(recipe: Any, options: dict[str, Any], said: str) -> None:
    family = "llava" if "llava" in said else FAMILIES[0]
    with pytest.raises(MmaccelError, match=said), accelerated(oracle.subject(family), recipe, **options):
        pass
