"""Older pictures keep fewer keys, over turns and in padded batches; what is evicted is hidden from then on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import zoo
from laws import helpers, oracle
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, accelerated
from mmaccel.core.budget import resolve, shares_by_age

pytestmark = pytest.mark.usefixtures("no_gradients")

AGE = (1.0, 0.5, 0.1, 0)


def aging(method: str, retain: float | None = 1.0, age: Any = AGE, **options: Any) -> Recipe:
    options = {"window": 4, **options} if method == "snapkv" else options
    return Recipe(method, (Stage(method, retain, {"age": age, **options}),))


# by choice: policies that look at keys, at queries, at attention, at cells; budgets that differ, and that fall in groups
RECIPES = {
    "keydiff": aging("keydiff"),
    "snapkv": aging("snapkv"),
    "h2o": aging("h2o"),
    "infinipot-v": aging("infinipot-v"),
    "streaming-llm": aging("streaming-llm"),
    "few": aging("knorm", 0.4),
    "groups": aging("keydiff", age_step=2),
    "adaptive": aging("h2o", 0.5, head_budget="adaptive"),
    "layers": aging("h2o", 0.5, layer_budget="pyramid:2"),
    "fixed": aging("keydiff", age=(0.5, 0.2)),
}


class Talk:
    """A chat on one cache, every turn of which shows new pictures: rows have one and two, and each turn pads a row; or one
    ``row`` of it alone."""

    def __init__(
        self,
        family: str,
        recipe: Recipe,
        count: int,
        chunk: int | None = None,
        kind: str = "uneven",
        row: int | None = None,
    ) -> None:
        prompts = [zoo.inputs(family, kind, seed=seed) for seed in range(count)]
        prompts = prompts if row is None else [zoo.single(family, prompt, row) for prompt in prompts]
        model, out = oracle.subject(family), None
        self.ends: list[int] = []
        self.held: list[list[Tensor]] = []
        self.bytes: list[int] = []
        self.whole = prompts[0]
        with accelerated(model, recipe, processor=zoo.processor(family), chunk=chunk):
            for number, prompt in enumerate(prompts):
                feed, cache = prompt, {}
                if number:
                    feed, self.whole = helpers.follow(self.whole, out, prompt)
                    cache = {"past_key_values": out.past_key_values}
                out = helpers.generate(model, feed, **cache)
                self.ends.append(feed["input_ids"].shape[1])
                self.held.append(helpers.stored(out.past_key_values, out.sequences.shape[1]))
                self.bytes.append(model.mmaccel.stats().kv_bytes)
        self.out = out
        visual = oracle.visual(family, {**self.whole, "input_ids": out.sequences})
        begins = visual & ~torch.nn.functional.pad(visual, (1, 0))[:, :-1]
        #: ``[B, S]``: the number of the picture of every place, -1 for text
        self.pictures = torch.where(visual, begins.cumsum(1) - 1, -1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_older_pictures_keep_fewer_keys(family: str, name: str) -> None:
    recipe = RECIPES[name]
    options, talk = recipe.stages[0].options, Talk(family, recipe, 3)
    for end, held in zip(talk.ends, talk.held, strict=True):
        for row, pictures in enumerate(talk.pictures[:, :end]):
            sizes = Counter(one for one in pictures.tolist() if one >= 0)
            shares = shares_by_age(len(sizes), options["age"], options.get("age_step", 1))
            most = [
                resolve(float(share), size) if share else 0 for share, size in zip(shares, sizes.values(), strict=True)
            ]
            for layer in held:
                for stored in layer[row, :, :end]:
                    have = [int((stored & (pictures == number)).sum()) for number in sizes]
                    if recipe.stages[0].retain == 1.0:
                        assert have == most
                    assert all(a <= b for a, b in zip(have, most, strict=True))
                    text = (pictures < 0) & talk.whole["attention_mask"][row, :end].bool()
                    assert stored[text].all()


@pytest.mark.parametrize(
    ("family", "name"), [*(("llava", name) for name in RECIPES), ("qwen2_5_vl", "h2o"), ("internvl", "snapkv")]
)
def test_what_is_evicted_is_hidden_from_then_on(family: str, name: str) -> None:
    """The answer of the third turn is that of the bare model, from which the turns hide what they evicted when they end."""
    talk = Talk(family, RECIPES[name], 3, kind="image")
    sequences = talk.out.sequences
    length, rows = sequences.shape[1] - 1, len(sequences)

    def visible(layer: int) -> Tensor:
        there = torch.ones(rows, max(held[layer].shape[1] for held in talk.held), length, length, dtype=torch.bool)
        for end, held in zip(talk.ends, talk.held, strict=True):
            there[:, :, end:, :end] = held[layer][:, :, None, :end]
        return there

    feed = {**talk.whole, "input_ids": sequences[:, :-1]}
    grown = length - talk.ends[-1]
    for key, fill in (("attention_mask", 1), *zoo.typed(family)):
        if key in feed:
            feed[key] = torch.nn.functional.pad(feed[key], (0, grown), value=fill)
    if family not in helpers.THREE_AXES:
        first = oracle.adapter(family).first_position
        feed["position_ids"] = (feed["attention_mask"].cumsum(1) - 1).clamp(min=0) + first
    expected = helpers.hide(helpers.model(family), feed, visible)[:, -(grown + 1) :]
    helpers.close(helpers.logits(talk.out), expected)
    hidden = helpers.hide(helpers.model(family), feed, lambda layer: torch.ones(1, 1, length, length, dtype=torch.bool))
    assert helpers.gap(hidden[:, -(grown + 1) :], expected) > helpers.TOLERANCE, "nothing was hidden"


@pytest.mark.parametrize("name", ["snapkv", "h2o", "adaptive", "groups"])
def test_a_batch_ages_as_its_rows(name: str) -> None:
    """Whatever the others have, and how much padding is between the turns."""
    family, batch = "llava", Talk("llava", RECIPES[name], 3)
    for row in range(2):
        alone = Talk(family, RECIPES[name], 3, row=row)
        tokens = batch.whole["attention_mask"][row].bool()
        for held, lone, end in zip(batch.held, alone.held, batch.ends, strict=True):
            for ours, theirs in zip(held, lone, strict=True):
                assert torch.equal(ours[row][:, :end][:, tokens[:end]], theirs[0][:, : int(tokens[:end].sum())])
        helpers.close(helpers.logits(batch.out)[row], helpers.logits(alone.out)[0])


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_a_prompt_in_chunks_ages_when_it_ends(name: str) -> None:
    whole, parts = (Talk("llava", RECIPES[name], 2, chunk) for chunk in (None, 11))
    for held, other in zip(whole.held, parts.held, strict=True):
        assert [layer.sum().item() for layer in held] == [layer.sum().item() for layer in other]


def test_one_prompt_with_several_pictures_ages_as_turns_do() -> None:
    """A server that has lost the cache of a chat keeps as many keys as one that has it."""
    recipe, family = RECIPES["keydiff"], "llava"
    talk = Talk(family, recipe, 3, kind="image")
    with accelerated(oracle.subject(family), recipe) as model:
        out = helpers.generate(model, talk.whole)
    once, end = helpers.stored(out.past_key_values, out.sequences.shape[1]), talk.ends[-1]
    for number in range(3):
        shown = talk.pictures[:, None, :end] == number
        kept = [[int((one[..., :end] & shown).sum()) for one in held] for held in (talk.held[-1], once)]
        assert kept[0] == kept[1] and kept[0][0] > 0


def test_a_text_turn_evicts_nothing() -> None:
    family, recipe = "llava", RECIPES["keydiff"]
    with accelerated(oracle.subject(family), recipe) as model:
        feed = zoo.inputs(family, "uneven")
        first = helpers.generate(model, feed)
        before = [layer.sum() for layer in helpers.stored(first.past_key_values, feed["input_ids"].shape[1])]
        kept, _ = helpers.follow(feed, first, zoo.inputs(family, "text", batch=2))
        helpers.generate(model, kept, past_key_values=first.past_key_values)
        after = [layer.sum() for layer in helpers.stored(first.past_key_values, feed["input_ids"].shape[1])]
    assert before == after


def test_packed_keys_age() -> None:
    packed = Recipe("packed", (Stage("keydiff", 1.0, {"age": (1.0, 0)}), Stage("kivi", None, {})))
    talk = Talk("llava", packed, 3)
    for end, held in zip(talk.ends, talk.held, strict=True):
        newest = talk.pictures[:, :end].amax(1, keepdim=True)
        for layer in held:
            assert not (
                layer[..., :end] & ((talk.pictures[:, :end] >= 0) & (talk.pictures[:, :end] < newest))[:, None]
            ).any()


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("keydiff", {"age": (0.5,)}, "`age` of `keydiff` must be two or more shares from 0 to 1 that never rise"),
        ("keydiff", {"age": (0.5, 1.0)}, "never rise"),
        ("keydiff", {"age": (1.0, -0.5)}, "must be two or more shares"),
        ("keydiff", {"age": (1.0, 0), "age_step": 0}, "`age_step` of keydiff must be at least 1"),
        ("quest", {"age": (1.0, 0)}, "age"),
        ("expected-attention", {"age": (1.0, 0)}, "leave out every, cap and age"),
        ("dycoke-cache", {"age": (1.0, 0)}, "age"),
        ("visionpulse", {"age": (1.0, 0)}, "age"),
    ],
)
def test_what_cannot_be_right_is_refused(method: str, options: Any, words: str) -> None:
    with pytest.raises(MmaccelError, match=words):
        Recipe("x", (Stage(method, None if method == "quest" else 0.5, options),)).build()


def test_a_recipe_of_json_has_ages() -> None:
    recipe = RECIPES["groups"]
    assert Recipe.from_json(recipe.to_json()).build()[0][1].age == AGE
