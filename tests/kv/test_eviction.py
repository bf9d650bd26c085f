"""Eviction at the end of the prompt: it is hiding, with any policy, budget and option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from evicting import FAMILIES, RECIPES, SCHEDULES, stage
from laws import helpers, oracle
from tail import few, in_turn

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerated
from mmaccel.core.budget import resolve
from mmaccel.runtime.cache.prompt_eviction import PromptEviction

pytestmark = pytest.mark.usefixtures("no_gradients")


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_budget": "pyramids"}, "layer_budget='pyramids' is unknown"),
        ({"layer_budget": "uniform:3"}, "is unknown"),
        ({"layer_budget": "pyramid:x"}, "a number"),
        ({"layer_budget": "pyramid:0"}, "a number from 0.5 to 1e[+]06"),
        ({"layer_budget": "pyramid:nan"}, "'pyramid:nan' must end in a number from"),
        ({"layer_budget": "pyramid:1e999"}, "a number from"),
        ({"layer_budget": "sparsity:1.5"}, "a number from 0 to 1"),
        ({"head_budget": "adaptive:-0.1"}, "a number from 0 to 1"),
        ({"compact": "ema:nan"}, "a number from 0 to 1"),
        ({"head_budget": "heads"}, "adaptive"),
        ({"compact": "melt"}, "pivot"),
        ({"protect": ("answers",)}, "separators or question"),
        ({"every": -1}, "`every` of h2o must be at least 0, got -1"),
        ({"recent": 1.5}, "`recent` of h2o must be an int, at least 0, or a share"),
        ({"text_policy": "h2o"}, "needs keys only"),
        ({"text_policy": "divprune"}, "needs keys only"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said), accelerated(helpers.model("llava"), stage("h2o", **options)):
        pass


def test_shared_keys_have_no_budget_per_head() -> None:
    with (
        pytest.raises(MmaccelError, match="same keys for all heads"),
        accelerated(helpers.model("llava"), stage("tova", head_budget="adaptive")),
    ):
        pass


def test_recipes_of_all_options_are_data() -> None:
    for recipe in RECIPES.values():
        assert mmaccel.Recipe.from_json(recipe.to_json()) == recipe
    changed = mmaccel.get_recipe("h2o").override(layer_budget="pyramid:7", compact="pivot", every=2, recent=8)
    assert changed.stages[0].options == {"layer_budget": "pyramid:7", "compact": "pivot", "every": 2, "recent": 8}


# --- laws -------------------------------------------------------------------------------------------------------------
#: budgets of layers and of heads, what is the same for all heads, with text and without
QUICK = ("vl-cache", "adaptive", "windowkv-narrow", "joint", "text")


@pytest.mark.parametrize(("family", "name"), in_turn(FAMILIES, RECIPES, of=QUICK))
def test_evicting_is_hiding_and_a_row_is_the_row_alone(family: str, name: str) -> None:
    """Laws 2, 3 and 4 on rows with unequal pictures."""
    feed, recipe = zoo.inputs(family, "uneven"), RECIPES[name]
    policy = mmaccel.get_method(recipe.stages[0].method)(**recipe.stages[0].options)
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, recipe, forced)
    prompt, steps = oracle.replay(family, feed, forced, got.seen)
    oracle.close(got.prompt[got.kept], prompt[got.kept], what="prompt logits")
    oracle.close(got.steps, steps, what="decoded logits")
    oracle.apart(got.steps, oracle.replay(family, feed, forced)[1])

    visual, valid = oracle.visual(family, feed), feed["attention_mask"].bool()
    held = torch.stack(got.seen.later)
    among = valid if policy.joint else visual
    segments: dict[tuple[int, int], int] = {}
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        model(**feed)
        for s in model.mmaccel.layout.segments:
            segments[s.row, s.picture] = segments.get((s.row, s.picture), 0) + len(s.places)
    for row in range(len(valid)):
        if policy.joint:
            budget = resolve(0.3, int(valid[row].sum()))
        else:
            budget = sum(resolve(0.3, n) for (r, _), n in segments.items() if r == row)
        kept = (held[:, row] & among[row]).sum(-1)
        assert int(kept.sum()) == budget * kept.numel(), "the mean over layers and heads is the budget"
        if policy.layer_budget == "uniform" and policy.head_budget == "uniform":
            assert (kept == budget).all()
        alone = zoo.single(family, feed, row)
        pads = valid.shape[1] - alone["input_ids"].shape[1]
        single = oracle.record(family, alone, recipe, forced[row : row + 1])
        for layer, lone in zip(held[:, row], single.seen.later, strict=True):
            assert torch.equal(layer[:, pads:], lone[0]), "alone it keeps other keys"
    if recipe.text_retain is None and not policy.joint:
        assert (held | ~(valid & ~visual)[None, :, None]).all(), "text was dropped"
    elif recipe.text_retain is not None:
        text = valid & ~visual
        last = torch.where(visual, torch.arange(visual.shape[1]), -1).amax(1, keepdim=True)
        question = text & (torch.arange(visual.shape[1]) > last)
        kept_question = (held & question[None, :, None]).sum(-1)
        room = ((text.sum(1) + 1) // 2)[None, :, None]
        assert torch.equal(kept_question, torch.minimum(question.sum(1)[None, :, None], room).expand_as(kept_question))


def stored_after(recipe: Recipe, family: str) -> list[Any]:
    """Where the keys of every layer came from, and the keys themselves, after a prompt and after another turn with one."""
    first, second = (dict(zoo.inputs(family, "uneven", seed=seed)) for seed in (0, 1))
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    found: list[Any] = []
    with accelerated(helpers.model(family), recipe, processor=zoo.processor(family)) as model:
        out = model.generate(**first, **options)
        for turn in range(2):
            for layer in out.past_key_values.layers:
                found.append((layer.index.by_head.clone(), *(x.clone() for x in layer.stored())))
            found.append(model.mmaccel.stats()["stages"])
            if turn == 0:
                feed, _ = helpers.follow(first, out, second)
                out = model.generate(**feed, past_key_values=out.past_key_values, **options)
    return found


SURVIVORS = Recipe("both", (Stage("fastv", 0.4, {"layer": 2}), Stage("mustdrop-cache", None, {"layer": 1})))
TOGETHER = {**RECIPES, **{f"{name} scheduled": made for name, made in SCHEDULES.items()}, "survivors": SURVIVORS}


@pytest.mark.parametrize("name", few(TOGETHER, ("pyramid", "infinipot-v", "adaptive scheduled", "survivors")))
def test_layers_together_keep_what_each_keeps_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU several layers are evicted from as one batch, here as many as there are, then two at a time."""
    recipe = TOGETHER[name]
    alone = stored_after(recipe, "llava")
    for room in (1 << 30, 1 << 17):
        monkeypatch.setattr(PromptEviction, "room", room)
        for wanted, got in zip(alone, stored_after(recipe, "llava"), strict=True):
            if isinstance(wanted, list):
                assert got == wanted
                continue
            assert torch.equal(got[0], wanted[0])
            for x, y in zip(got[1:], wanted[1:], strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", few(RECIPES, QUICK))
def test_a_whole_budget_changes_nothing(name: str) -> None:
    """Law 1, with everything that merges, too."""
    family = "llava"
    feed, bare = zoo.inputs(family, "uneven"), oracle.bare(family)
    forced = oracle.force(family, len(feed["input_ids"]))
    wanted, _ = oracle.decode(bare, feed, forced)
    options = {**RECIPES[name].stages[0].options, "compact": "pivot"}
    recipe = Recipe(name, (replace(RECIPES[name].stages[0], retain=1.0, options=options),))
    with accelerated(oracle.subject(family), recipe) as model:
        got, _ = oracle.decode(model, feed, forced)
    oracle.close(got, wanted)


def test_survivors_of_the_last_layer_are_all_that_is_stored() -> None:
    """MustDrop's cache: layers before a cut store what the last layer has, those before ``layer`` everything."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    recipe = SURVIVORS
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, recipe, forced)
    valid = feed["attention_mask"].bool()
    assert torch.equal(got.seen.later[0].any(1), valid)
    for held in got.seen.later[1:]:
        assert torch.equal(held, got.kept[:, None].expand_as(held)) and not torch.equal(held.any(1), valid)
    _, steps = oracle.replay(family, feed, forced, got.seen)
    oracle.close(got.steps, steps)
    with accelerated(oracle.subject(family), recipe) as model:
        model(**feed, use_cache=True)
        assert model.mmaccel.stats()["stages"][1]["resolved"] > 0


@pytest.mark.parametrize(
    "name",
    sorted(
        n for n, r in mmaccel.recipes().items() if r.stages and mmaccel.get_method(r.stages[-1].method).site == "cache"
    ),
)
def test_every_recipe_of_the_book_runs(name: str) -> None:
    family, feed = "llava", helpers.inputs("llava", "uneven")
    with accelerated(oracle.subject(family), name) as model:
        out = helpers.generate(model, feed, new=4)
        stats = model.mmaccel.stats()
    assert out.sequences.shape[1] == feed["input_ids"].shape[1] + 4
    assert stats["kv_bytes"] == out.past_key_values.mmaccel.nbytes() and stats["stages"][-1]["site"] == "cache"
