"""Law: `mmaccel=` says what one call keeps, and nothing of it is left for the next; False runs the bare model."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES, THREE_AXES, cache, follow, gap, generate, inputs, logits, model, recipe_of
from laws.test_threads import together
from transformers import LogitsProcessor, LogitsProcessorList

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerated
from mmaccel.runtime.call.call import current

#: every recipe whose budget is one of tokens or keys
BUDGETS = tuple(name for name in oracle.named_recipes() if mmaccel.get_recipe(name).retain is not None)
#: what the budgets of a conversation may meet: nothing in the cache, fewer keys, a schedule, sparse reads, packed keys
CONVERSATIONS = ("test-fixed", "snapkv", "h2o-decode", "quest", "test-fixed+kivi")
MORE, LESS = 0.6, 0.2
families = pytest.mark.square("family", FAMILIES, of="kinds")


def put_on(family: str, name: str, retain: float) -> Any:
    first, *others = name.split("+")
    made = recipe_of(first, family, MORE)
    made = mmaccel.get_recipe([*made.stages, *(Stage(other) for other in others)]) if others else made
    return accelerated(model(family), made.override(retain=retain), processor=zoo.processor(family))


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.sequences, other.sequences) and torch.equal(logits(one), logits(other))


@pytest.mark.square(("family", "recipe"), oracle.families_in_turn(BUDGETS))
def test_a_budget_for_one_call_is_that_of_a_model_made_for_it(family: str, recipe: str) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    # in as many bytes four times as many keys of 4 bits stay
    counted = {stage.options.get("budget_in") for stage in mmaccel.get_recipe(recipe).stages}
    less = LESS / 2 if "bytes" in counted else LESS
    with put_on(family, recipe, less):
        asked, wanted = generate(tiny, feed), tiny.mmaccel.stats()
    with put_on(family, recipe, MORE):
        before, usual = generate(tiny, feed), tiny.mmaccel.stats()
        for retain, out, figures in ((less, asked, wanted), (None, before, usual)):
            assert same(generate(tiny, feed, mmaccel={"retain": retain}), out)
            found = tiny.mmaccel.stats()
            assert found["stages"] == figures["stages"] and found["kv_bytes"] == figures["kv_bytes"]
            assert same(generate(tiny, feed), before)
    stages = [mmaccel.get_method(stage.method) for stage in mmaccel.get_recipe(recipe).stages]
    by_content = any(one.budget == "adaptive" for one in stages)
    assert by_content or wanted["stages"] != usual["stages"] or wanted["kv_bytes"] < usual["kv_bytes"]


@pytest.mark.square(("family", "recipe"), oracle.families_in_turn(oracle.named_recipes()), of="kinds")
def test_false_is_the_bare_model(family: str, recipe: str) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    bare = generate(tiny, feed)
    with (
        put_on(family, recipe, MORE)
        if recipe in BUDGETS
        else accelerated(tiny, recipe_of(recipe, family, None), processor=zoo.processor(family))
    ):
        before = generate(tiny, feed)
        assert same(generate(tiny, feed, mmaccel=False), bare)
        said = tiny.mmaccel.stats()
        assert same(generate(tiny, feed), before)
    assert said["recipe"] == "none" and not said["stages"] and said["visual_tokens_kept"] == said["visual_tokens"]
    assert said["notes"] == ["mmaccel=False: the bare model ran"]


@families
@torch.no_grad()
def test_a_direct_forward_takes_it_too(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    bare = tiny(**feed).logits
    with put_on(family, "test-fixed", LESS):
        less = tiny(**feed).logits
    with put_on(family, "test-fixed", MORE):
        more = tiny(**feed).logits
        assert torch.equal(tiny(**feed, mmaccel={"retain": LESS}).logits.nan_to_num(), less.nan_to_num())
        assert torch.equal(tiny(**feed, mmaccel=False).logits, bare)
        assert torch.equal(tiny(**feed, mmaccel=None).logits.nan_to_num(), more.nan_to_num())
    assert int(less.isnan().sum()) > int(more.isnan().sum()) > 0


@pytest.mark.square(
    ("recipe", "asked"),
    [
        ("test-fixed", {"positions": "paper"}),
        ("test-fixed", {"retain": 0.31, "variant": "official"}),
        ("snapkv", {"text_retain": 0.5}),
        ("snapkv", {"retain": 3}),
    ],
)
@families
def test_all_that_one_call_may_have_otherwise(family: str, recipe: str, asked: dict[str, Any]) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    made = recipe_of(recipe, family, MORE)
    with accelerated(tiny, made.override(**asked), processor=zoo.processor(family)):
        wanted = generate(tiny, feed)
    with accelerated(tiny, made, processor=zoo.processor(family)):
        assert same(generate(tiny, feed, mmaccel=asked), wanted)


@pytest.mark.square("recipe", CONVERSATIONS)
@pytest.mark.square("first", [LESS, None])
@families
def test_a_conversation_may_change_its_budget(family: str, recipe: str, first: float | None) -> None:
    """What was kept stays; what is new is kept by the budget of its turn, as if the model had been accelerated anew."""
    tiny, kind = model(family), "images" if family == "llava_onevision" else "image"
    feed, second = inputs(family, kind), inputs(family, kind, seed=3)

    def talk(*turns: Callable[..., Any]) -> Any:
        begun = turns[0](feed)
        return turns[1](follow(feed, begun, second)[0], past_key_values=begun.past_key_values)

    def anew(retain: float) -> Callable[..., Any]:
        def turn(feed: dict[str, Any], **options: Any) -> Any:
            with put_on(family, recipe, retain):
                return generate(tiny, feed, **options)

        return turn

    wanted = talk(anew(first or MORE), anew(MORE if first else LESS))
    with put_on(family, recipe, MORE):
        found = talk(
            lambda feed, **options: generate(tiny, feed, mmaccel={"retain": first}, **options),
            lambda feed, **options: generate(tiny, feed, mmaccel={"retain": MORE if first else LESS}, **options),
        )
    assert same(found, wanted)


@families
def test_a_conversation_that_began_bare_goes_on_accelerated(family: str) -> None:
    """The first pictures stay whole, whether the model was bare or ran a bare call."""
    tiny, kind = model(family), "images" if family == "llava_onevision" else "image"
    feed = inputs(family, kind)
    for second in (inputs(family, "text"), inputs(family, kind, seed=3)):
        pictures = set(second) - set(inputs(family, "text"))
        outs, bare = [], generate(tiny, feed)
        with put_on(family, "test-fixed", LESS):
            for begun in (bare, generate(tiny, feed, mmaccel=False)):
                kept, mine = follow(feed, begun, second)[0], begun.past_key_values
                kept = {name: x for name, x in kept.items() if name in {*second, *inputs(family, "text")}}
                if pictures and family in THREE_AXES:
                    with pytest.raises(UnsupportedError, match="holds pictures that the bare model read"):
                        generate(tiny, kept, past_key_values=mine)
                    continue
                outs.append(generate(tiny, kept, past_key_values=mine))
                figures = tiny.mmaccel.stats()
                assert (figures["visual_tokens_kept"] < figures["visual_tokens"]) == bool(pictures)
        assert not outs or same(*outs)


@families
def test_a_reduced_cache_is_no_bare_one(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    with put_on(family, "test-fixed", LESS):
        begun = generate(tiny, feed)
        kept = follow(feed, begun, inputs(family, "text"))[0]
        mine = begun.past_key_values
        for call in (tiny, lambda **feed: generate(tiny, feed, past_key_values=mine)):
            with pytest.raises(UnsupportedError, match="leave out mmaccel=False, or begin with a new cache"):
                call(**(kept if call is not tiny else {"input_ids": kept["input_ids"][:, -1:], "past_key_values": mine}),
                     mmaccel=False)  # fmt: skip
        generate(tiny, kept, past_key_values=mine)


@pytest.mark.parametrize(
    ("recipe", "asked", "match"),
    [
        ("fastv", {"layer": 3}, "'layer' cannot change for one call, which takes retain, positions, variant, text_retain"),
        ("random", {"retian": 0.1}, "'retian' cannot change for one call"),
        ("random", {"retain": 0}, "retain=0 keeps no token"),
        ("random", {"retain": 1.5}, "outside"),
        ("random", {"variant": "up"}, "use 'exact' or 'official'"),
        ("mustdrop-filter", {"positions": "paper"}, "positions='paper' cannot be used"),
        ("none", {"retain": 0.1}, "drops nothing"),
        ("random", 0.1, "mmaccel=0.1 says nothing about a call; give {'retain': 0.1} or the like, or False"),
        ("random", "divprune", "mmaccel='divprune' says nothing about a call"),
        ("resize", {"retain": 0.1}, "the processor has reduced before this call"),
    ],
)  # fmt: skip
def test_what_one_call_cannot_have(recipe: str, asked: Any, match: str) -> None:
    """Refused by name, and the next call is what it was."""
    tiny, feed = model("llava"), inputs("llava")
    processor = SimpleNamespace(mmaccel_recipe=True)
    with accelerated(tiny, recipe_of(recipe, retain=MORE if recipe != "resize" else None), processor=processor):
        before = generate(tiny, feed)
        for call in (lambda: generate(tiny, feed, mmaccel=asked), lambda: tiny(**feed, mmaccel=asked)):
            with pytest.raises(MmaccelError, match=re.escape(match) if "{" in match else match) as caught:
                call()
            assert "\n" not in str(caught.value) and current() is None
        assert same(generate(tiny, feed), before)


def test_two_budgets_at_the_same_time() -> None:
    tiny, feed = model("qwen2_5_vl"), inputs("qwen2_5_vl")
    asked: list[Any] = [{"retain": LESS}, False, None]

    def calls(one: Any, count: int = 6) -> list[torch.Tensor]:
        return [logits(generate(tiny, feed, mmaccel=one)) for _ in range(count)]

    with put_on("qwen2_5_vl", "divprune", MORE):
        alone = [calls(one, 1)[0] for one in asked]
        for many, single in zip(together(*(lambda one=one: calls(one) for one in asked)), alone, strict=True):
            assert all(torch.equal(other, single) for other in many)
    assert gap(alone[0], alone[1]) > 0 and gap(alone[0], alone[2]) > 0


def test_a_call_inside_a_call() -> None:
    """What is asked between two steps of a call has its own budget, and leaves the call alone; so does one that fails."""
    tiny, feed = model("llava"), inputs("llava")

    class Between(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inner.append(generate(tiny, feed, mmaccel=False))
            inner.append(SimpleNamespace(sequences=None, logits=[tiny(**feed, mmaccel={"retain": LESS}).logits]))
            with pytest.raises(MmaccelError):
                tiny(**{**feed, "attention_mask": prepared}, past_key_values=cache())
            return scores

    inner: list[Any] = []
    # one of four axes is refused in the middle of the call
    prepared = torch.ones(1, 1, *[feed["input_ids"].shape[1]] * 2, dtype=torch.bool)
    bare = generate(tiny, feed)
    with put_on("llava", "test-fixed", LESS), torch.no_grad():
        less = tiny(**feed).logits
    with put_on("llava", "test-fixed", MORE):
        before = generate(tiny, feed)
        assert same(generate(tiny, feed, logits_processor=LogitsProcessorList([Between()])), before)
        figures = tiny.mmaccel.stats()
        assert same(generate(tiny, feed), before) and current() is None
        assert figures["stages"] == tiny.mmaccel.stats()["stages"]
    assert len(inner) == 8 and all(same(out, bare) for out in inner[::2])
    assert all(torch.equal(out.logits[0].nan_to_num(), less.nan_to_num()) for out in inner[1::2])


def test_budgets_of_several_stages_keep_their_proportion() -> None:
    """As `retain` of a recipe with an anchor does."""
    tiny, feed = model("llava"), inputs("llava")
    made = mmaccel.get_recipe("aim").override(retain=MORE)
    with accelerated(tiny, made.override(retain=LESS)):
        wanted = generate(tiny, feed), tiny.mmaccel.stats()["stages"]
    with accelerated(tiny, made):
        assert same(generate(tiny, feed, mmaccel={"retain": LESS}), wanted[0])
        assert tiny.mmaccel.stats()["stages"] == wanted[1]
    assert isinstance(made, Recipe) and len(wanted[1]) > 2
