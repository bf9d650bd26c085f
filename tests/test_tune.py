"""The search for a recipe: what it measures against generation, what it chooses, how it goes on, and what it refuses."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
import zoo
from tail import few, in_turn

import mmaccel
from mmaccel import MmaccelError, Stage, accelerate_vlm, accelerated, is_accelerated
from mmaccel.cli import ask, main
from mmaccel.families import family_of
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs.distil.examples import Frozen
from mmaccel.programs.evaluate import Question, Row, ask_samples, ask_suite, batches, evaluate, fingerprint
from mmaccel.programs.tune import baselines, confidence, report, search, space
from mmaccel.programs.tune.evaluate import GOALS, Evaluator, Measurement
from mmaccel.programs.tune.search import Candidate, choose, front, split
from mmaccel.programs.tune.tuning import tune
from mmaccel.recipe import Recipe, TunedRecipe, get_recipe
from mmaccel.runtime.tower.feature_cache import Remembered
from mmaccel.suite import VIDEO_TASKS, Sample, export, make_item

#: one of each site, one that works at every step, one with positions of its own for clips, one that keeps two sites apart
SHOWN = ("resize", "tome", "divprune", "fastv", "snapkv", "h2o-decode", "kivi")  # by choice: one of each kind


def questions(count: int, *, video: bool = False) -> list[Question]:
    """Questions of different lengths, about a picture or a clip each."""

    def prompt(number: int) -> Prompt:
        text = "what is it ?" + " and why is it there ?" * (number % 3)
        if video:
            return Prompt(text, clip=Clip(zoo.clip(8, 96, 64, number), list(range(8)), 8, 2.0))
        return Prompt(text, (zoo.image(80, 60, number),))

    return [Question(f"q{i}", "all", None, lambda i=i: prompt(i)) for i in range(count)]


def judge_of(family: str, asked: list[Question], **options: bool) -> Evaluator:
    model, processor = zoo.model(family), zoo.processor(family)
    return Evaluator(model, processor, [asked], batch_size=4, max_new_tokens=5, timed=options.get("timed", False))


#: a space that takes a second to search
SMALL = ("uniform", "fastv", "snapkv")


# ---------------------------------------------------------------------------------------------------- what is measured
@pytest.mark.parametrize(
    ("family", "video", "name"),
    few(
        [(family, video, name) for family, video in (("llava", False), ("qwen2_5_vl", True)) for name in SHOWN],
        [("llava", False, "h2o-decode"), ("qwen2_5_vl", True, "resize"), ("llava", False, "fastv")],
    ),
)
def test_reading_the_answer_is_generating_it(family, video, name):
    """Kept answers, KL, tokens and bytes against those of evaluate, which writes token by token."""
    asked = questions(4, video=video)
    evaluator, row = judge_of(family, asked), Row(name, None if name == "kivi" else 0.5)
    measured = evaluator.ask(row.recipe, 0)
    ((_, answers),) = evaluate(evaluator.model, evaluator.processor, asked, [row], batch_size=4, max_new_tokens=5)
    assert measured.kept == tuple(answer.same for answer in answers)
    assert measured.kl == pytest.approx([answer.kl for answer in answers], rel=1e-3, abs=1e-5)
    full = sum(answer.visual_tokens_full for answer in answers)
    assert measured.share("tokens") == pytest.approx(sum(a.visual_tokens_per_layer for a in answers) / full)
    assert not is_accelerated(evaluator.model)


def test_what_looks_again_at_some_steps_is_read_step_by_step():
    """Some steps are uncertain and others not; an answer that is read in one forward would have one decision."""
    asked = questions(4)
    evaluator = judge_of("llava", asked)
    recipe = Recipe("again", (Stage("memvr", options={"threshold": 0.97, "ratio": 1.0}),))
    row = Row(recipe)
    ((_, answers),) = evaluate(evaluator.model, evaluator.processor, asked, [row], batch_size=4, max_new_tokens=5)
    kl = evaluator.ask(recipe, 0).kl
    assert min(kl) < 1e-5 < max(kl), "no step differs"
    assert kl == pytest.approx([answer.kl for answer in answers], rel=1e-3, abs=1e-5)


def test_the_bare_model_loses_and_saves_nothing():
    measured = judge_of("llava", questions(4)).ask(get_recipe("none"), 0)
    assert measured.agreement == 1 and measured.divergence == 0
    assert measured.drift == pytest.approx([0] * 4, abs=1e-6)
    assert {measured.share(goal) for goal in GOALS} == {1.0}


def test_drift_is_a_cosine_of_last_states():
    asked = questions(1)
    evaluator = judge_of("llava", asked)
    model, states = evaluator.model, []
    inputs = encode(evaluator.processor, [asked[0].load()])
    with torch.inference_mode():
        for name in ("none", "divprune"):
            with accelerated(model, name):
                states.append(model.model(**inputs).last_hidden_state[0, -1])
    cosine = torch.dot(*states) / states[0].norm() / states[1].norm()
    assert evaluator.ask(get_recipe("divprune"), 0).drift == pytest.approx([float(1 - cosine)], abs=1e-5)


def test_measured_seconds_take_the_place_of_operations():
    measured = judge_of("llava", questions(1), timed=True).ask(get_recipe("divprune"), 0)
    assert 0 < measured.spent["ttft"] < 60 and 0 < measured.bare["ttft"] < 60


# ------------------------------------------------------------------------------------------------ towers run only once
@pytest.mark.parametrize("family", few(["llava", "qwen2_5_vl", "llava_next", "internvl"], ["llava", "qwen2_5_vl"]))
def test_remembered_pictures_are_the_same(family):
    """Recipes with taps and without: the same logits, and the towers ran once for features and once for every new tap."""
    model, processor = zoo.model(family), zoo.processor(family)
    inputs, memory = encode(processor, [questions(1)[0].load()]), Remembered()
    before = set(vars(model.model))
    # by choice: without a tap, with one, with it again, and with more
    for name in ("uniform", "divprune", "attention-received", "attention-received", "prumerge", "uniform"):
        logits = []
        with torch.inference_mode():
            with accelerated(model, name, retain=0.5, processor=processor):
                logits.append(model(**inputs).logits)
            with memory.on(family_of(model)), accelerated(model, name, retain=0.5, processor=processor):
                logits.append(model(**inputs).logits)
        assert torch.equal(*(x.nan_to_num(7.0) for x in logits)), name
    assert memory.passes <= 3
    assert set(vars(model.model)) == before


@pytest.mark.parametrize("family", few(["llava", "qwen2_5_vl", "llava_next", "internvl"], ["llava", "qwen2_5_vl"]))
def test_other_pixels_are_not_answered_from_memory(family):
    """One changed value is enough; the same values in another tensor are the same."""
    model, processor = zoo.model(family), zoo.processor(family)
    inputs, memory = encode(processor, [questions(1)[0].load()]), Remembered()
    changed = {name: value.clone() for name, value in inputs.items()}
    changed["pixel_values"].view(-1)[7] += 0.5
    with torch.inference_mode():
        bare = [model(**feed).logits for feed in (inputs, changed)]
        with memory.on(family_of(model)):
            found = [model(**feed).logits for feed in (inputs, changed, {k: v.clone() for k, v in changed.items()})]
    assert torch.equal(found[0], bare[0]) and torch.equal(found[1], bare[1]) and torch.equal(found[2], bare[1])
    assert not torch.equal(*bare) and memory.passes == 2


def test_a_merge_in_the_tower_is_not_answered_from_memory():
    model, processor = zoo.model("llava"), zoo.processor("llava")
    inputs, memory = encode(processor, [questions(1)[0].load()]), Remembered()
    with torch.inference_mode(), memory.on(family_of(model)):
        model(**inputs)
        with accelerated(model, "tome", retain=0.5):
            model(**inputs)
            assert model.mmaccel.stats().visual_tokens_kept < model.mmaccel.stats().visual_tokens


# --------------------------------------------------------------------------------------------------------- how certain
def test_intervals_are_exact():
    # Clopper and Pearson's for 8 of 10, as tables have it
    assert confidence.interval(8, 10) == pytest.approx((0.4439, 0.9748), abs=1e-4)
    assert confidence.lower_bound(30, 30, 0.95) == pytest.approx(0.05 ** (1 / 30))
    assert confidence.interval(0, 7)[0] == 0 and confidence.interval(7, 7)[1] == 1


@pytest.mark.parametrize("asked", [1, 2, 10, 57, 1000])
def test_intervals_are_those_of_scipy(asked):
    from scipy.stats import binomtest

    for kept in {0, 1, asked // 3, asked - 1, asked}:
        low, high = confidence.interval(kept, asked)
        told = binomtest(kept, asked).proportion_ci(0.95)
        assert (low, high) == pytest.approx((told.low, told.high), abs=1e-9)
        bound = binomtest(kept, asked, alternative="greater").proportion_ci(0.9).low
        assert confidence.lower_bound(kept, asked, 0.9) == pytest.approx(bound, abs=1e-9)


@pytest.mark.parametrize(("keep", "level", "least"), [(0.99, 0.95, 299), (0.9, 0.9, 22), (0.5, 0.5, 1)])
def test_so_many_samples_are_needed_and_no_fewer(keep, level, least):
    assert confidence.samples_needed(keep, level) == least
    assert confidence.lower_bound(least, least, level) >= keep - 1e-9
    assert least == 1 or confidence.lower_bound(least - 1, least - 1, level) < keep


def test_the_parts_of_the_samples():
    asked = questions(100)
    rungs, held_out = split(asked, 0.99, None)
    names = [q.name for part in (*rungs, held_out) for q in part]
    assert sorted(names) == sorted(q.name for q in asked)
    assert len(held_out) == 30 and [len(rung) for rung in rungs] == [7, 14, 49]
    assert split(asked, 0.99, None)[1] == held_out


def test_too_few_samples_say_how_many_are_needed():
    with pytest.raises(MmaccelError, match="needs at least 10 samples; 9 can be used"):
        split(questions(9), 0.99, None)
    need = math.ceil(299 / search.HELD_OUT)
    with pytest.raises(
        MmaccelError, match=f"needs at least {need} samples to show with confidence 0.95 .*; 100 can be used"
    ):
        split(questions(100), 0.99, 0.95)
    assert len(split(questions(need), 0.99, 0.95)[1]) >= 299


# ----------------------------------------------------------------------------------------------------------- the space
@pytest.mark.full
def test_parts_of_all_recipes():
    evaluator = judge_of("llava", questions(1))
    # without those of methods that other tests have registered
    known = {
        name: one
        for name, one in mmaccel.recipes().items()
        if all(mmaccel.get_method(stage.method).__module__.startswith("mmaccel.") for stage in one.stages)
    }
    found = space.Space.measure(evaluator, "tokens", known)
    offered = set(known) - {"none"}
    # this is a method and its budget
    assert set(found.names) | set(found.left_out) == offered - {"tinychart"}
    assert not set(found.names) & set(found.left_out)
    assert "cache" not in found.parts and "saves nothing" in found.left_out["snapkv"]
    assert {"tokens", "layers"} <= set(found.parts)


def test_parts_are_what_works_and_saves_something():
    evaluator = judge_of("llava", questions(1))
    told: list[tuple[str, int, int]] = []
    found = space.Space.measure(
        evaluator, "tokens", {name: get_recipe(name) for name in SMALL}, lambda *done: told.append(done)
    )
    assert [done[1:] for done in told] == [(number, len(SMALL)) for number in range(1, len(SMALL) + 1)]
    assert found.names == ["uniform", "fastv"] and "saves nothing" in found.left_out["snapkv"]
    with pytest.raises(MmaccelError, match="No recipe saves anything of 'ttft'"):
        space.Space.measure(evaluator, "ttft", {"snapkv": get_recipe("snapkv")})


def test_a_part_has_its_budget_its_layers_and_its_choices():
    fastv = space.Part.of(get_recipe("fastv"), 1, 4)
    assert fastv.slot == "layers" and fastv.budget and fastv.layers == (1, 3)
    kivi = space.Part.of(get_recipe("kivi"), 1, 4)
    assert kivi.slot == "codec" and not kivi.budget and kivi.choices == {"bits": (2, 4, 8)}
    snapkv = space.Part.of(get_recipe("snapkv"), 1, 4)
    assert "pyramid" in snapkv.choices["layer_budget"]
    # its layer budget is what makes it another recipe
    assert "layer_budget" not in space.Part.of(get_recipe("pyramidkv"), 1, 4).choices


def test_what_is_dropped_inside_goes_on_from_what_was_left_before():
    useful = {name: get_recipe(name) for name in SMALL}
    made = space.Space.of(family_of(zoo.model("llava")), useful, {})
    asked = {"tokens": "uniform", "tokens budget": 0.5, "layers": "fastv", "layers budget": 0.4, "layers layer": 2}
    trial = optuna.trial.FixedTrial({**asked, "cache": "-", "proportional": "all"})
    suggested = made.suggest(trial)
    assert [(stage.method, stage.retain) for stage in suggested.stages] == [("uniform", 0.5), ("fastv", 0.2)]
    assert suggested.proportional == "all"
    # a compressed cache takes no weights
    options = {"gqa": "mean", "pooling": "avg", "layer_budget": "uniform"}
    cached = {"cache": "snapkv", "cache budget": 0.5} | {f"cache: snapkv, {name}": x for name, x in options.items()}
    assert made.suggest(optuna.trial.FixedTrial({**asked, **cached})).proportional == "none"
    lone = optuna.trial.FixedTrial({**asked, "tokens": "-", "cache": "-"})
    assert [stage.retain for stage in made.suggest(lone).stages] == [0.4]
    assert made.suggest(optuna.trial.FixedTrial(dict.fromkeys(made.parts, "-"))) == get_recipe("none")


def test_what_stands_beside_a_trial_differs_in_one_thing():
    made = space.Space.of(family_of(zoo.model("llava")), {name: get_recipe(name) for name in (*SMALL, "kivi")}, {})
    asked = {"tokens": "uniform", "tokens budget": 0.5, "layers": "fastv", "layers budget": 0.4, "layers layer": 2}
    asked |= {"cache": "-", "codec": "kivi", "codec: kivi, bits": 2}
    moves = [made.neighbour(asked, random.Random(seed)) for seed in range(200)]
    differ = [{key for key in asked if one.get(key) != asked[key]} for one in moves]
    assert all(len(keys) <= 1 for keys in differ)
    assert {*asked} - {"cache"} <= {key for keys in differ for key in keys} and all(
        {*one} <= {*asked, "proportional"} for one in moves
    )
    assert {one.get("proportional") for one in moves} == {None, "all"}
    weighed = [made.neighbour({**asked, "proportional": "all"}, random.Random(seed)) for seed in range(99)]
    assert {one.get("proportional") for one in weighed} == {"none", "all"}
    budgets = {one["tokens budget"] for one in moves}
    assert min(budgets) == pytest.approx(0.3) and max(budgets) == 1.0
    least = [made.neighbour({**asked, "tokens budget": space.LEAST}, random.Random(seed)) for seed in range(200)]
    assert min(one["tokens budget"] for one in least) == space.LEAST


def test_a_budget_is_made_smaller_until_too_little_is_kept():
    """What keeps enough spends its budget, and enough is kept from 0.17 on."""
    made = space.Space.of(family_of(zoo.model("llava")), {name: get_recipe(name) for name in SMALL}, {})
    best, tried = {"tokens": "uniform", "tokens budget": 0.5, "layers": "-", "cache": "-"}, []
    others = {**best, "tokens": "random", "tokens budget": 0.1}
    while params := made.smaller(best, best["tokens budget"], [(best, best["tokens budget"]), (others, 0.1), *tried]):
        budget = params["tokens budget"]
        assert {**params, "tokens budget": 0.5} == {**best, "tokens budget": 0.5} and budget < best["tokens budget"]
        tried.append((params, budget if budget >= 0.17 else math.inf))
        best = params if budget >= 0.17 else best
    assert 0.17 <= best["tokens budget"] < 0.2 and len(tried) < 8
    # what is not the best of its kind is left alone, and so is what has the smallest budget
    assert made.smaller({**best, "tokens budget": 0.5}, 0.5, tried) is None
    assert made.smaller({**best, "tokens budget": space.LEAST}, space.LEAST, []) is None
    # a part alone is tried once at what another one spends
    lone = {**others, "tokens budget": 0.5}
    assert made.alone(lone, 0.4, [lone, best]) == {**others, "tokens budget": pytest.approx(0.2)}
    assert made.alone(lone, 0.4, [lone, others]) is None and made.alone(lone, 0.01, [lone]) is None
    assert made.alone({**lone, "layers": "fastv", "layers budget": 0.5}, 0.4, []) is None
    # of two budgets the second is made smaller where the first cannot be
    two = {"tokens": "uniform", "tokens budget": space.LEAST, "layers": "fastv", "layers budget": 0.5, "cache": "-"}
    assert made.smaller(two, 0.1, []) == {**two, "layers budget": pytest.approx(0.3)}


# ---------------------------------------------------------------------------------------------------------- the choice
def measured(kept: int, asked: int, share: float, kl: float = 0.0) -> Measurement:
    bare = dict.fromkeys(("ttft", "tokens", "kv"), 1.0)
    spent = dict.fromkeys(bare, share)
    return Measurement((True,) * kept + (False,) * (asked - kept), (kl,) * asked, (kl,) * asked, spent, bare)


def test_of_many_questions_the_answers_count_and_of_few_the_risk_too():
    """What moved without being lost costs nothing once seventy were asked; seven that were kept say little."""
    value = functools.partial(search.Search.value, SimpleNamespace(keep=0.95, goal="tokens"))
    assert value(measured(70, 70, 0.2, kl=0.1)) == pytest.approx(0.2)
    assert value(measured(7, 7, 0.2, kl=0.1)) > 0.2 + 0.1
    assert value(measured(60, 70, 0.2, kl=0.1)) > value(measured(69, 70, 0.5, kl=0.1))
    assert value(measured(7, 7, 0.2, kl=0.5)) > value(measured(7, 7, 0.2, kl=0.1))


def test_the_front_has_what_nothing_beats():
    points = [(10, 0.9), (8, 0.5), (9, 0.6), (7, 0.55), (9, 0.7), (5, 0.1)]
    made = [Candidate(get_recipe("uniform"), measured(kept, 10, share), True) for kept, share in points]
    shown = front(made, "kv", lambda m: m.agreement)
    assert [(sum(c.measured.kept), c.measured.share("kv")) for c in shown] == [(5, 0.1), (8, 0.5), (9, 0.6), (10, 0.9)]
    whole = front(made[:1], "cost", lambda m: m.agreement)
    assert whole == made[:1] and Measurement.of(json.loads(json.dumps(made[0].measured.as_dict()))) == made[0].measured


def test_with_a_confidence_only_what_held_out_samples_show_is_taken():
    # by choice: names of made-up candidates
    kept_by = {"uniform": 40, "random": 46, "divprune": 50, "pool": 50}

    class Fake:
        def ask(self, chosen: Recipe, rung: int) -> Measurement:
            return measured(kept_by[chosen.name], 50, 0.5)

    ordered = [Candidate(get_recipe(name), measured(1, 1, 0.5), True) for name in kept_by]
    # 50 of 50 show 0.94 with 0.95, and 46 of 50 do not: what is behind it is not looked at
    best, seen = choose(Fake(), 0, ordered, 0.94, 0.95)
    assert best is ordered[2] and seen.agreement == 1
    assert choose(Fake(), 0, ordered, 0.94, None)[0] is ordered[0]
    assert choose(Fake(), 0, ordered[:1], 0.94, 0.95) == (None, None) == choose(Fake(), 0, [], 0.94, None)


def test_a_part_alone_at_the_same_cost_is_taken_where_it_keeps_more():
    """The parts work from layer 2 of 5 on; one of them cannot be had at the cost, one refuses it, and one a later question."""
    kept_by = {
        "uniform": 90,
        "random": 97,
        "divprune": 99,
        "pool": 100,
        "cdpruner": 100,
        "centerclip": 100,
    }  # by choice: names
    asked: list[tuple[str, int]] = []

    def ask(one: Recipe, rung: int) -> Measurement:
        asked.append((one.name, rung))
        if one.name == "cdpruner" or (one.name == "centerclip" and rung):
            raise MmaccelError("no such budget")
        share = 0.9 if one.name == "pool" else 0.4 + 0.6 * one.stages[0].retain
        return measured(kept_by[one.name], 100, share, 0.01)

    made = space.Space.of(family_of(zoo.model("llava")), {name: get_recipe(name) for name in kept_by}, {})
    told: list[tuple[str, int, int]] = []
    made_up = SimpleNamespace(
        ask=ask, goal="tokens", keep=0.95, rungs=2, space=made, tell=lambda *done: told.append(done)
    )
    mine = Candidate(get_recipe("random", retain=0.2), measured(97, 100, 0.5, 0.01), True)
    taken = baselines.best_of(made_up, mine)
    assert [done[1:] for done in told] == [(number, len(kept_by)) for number in range(1, len(kept_by) + 1)]
    assert all(asked.count((name, 1)) == 1 for name in kept_by.keys() - {"pool", "cdpruner"})
    assert taken.recipe.name == "divprune" and taken.asked_all and len(taken.measured.kept) == 200
    assert taken.measured.share("tokens") == pytest.approx(0.5, abs=0.01)
    mine = Candidate(get_recipe("divprune", retain=0.2), measured(100, 100, 0.5), True)
    assert baselines.best_of(made_up, mine) is mine


def test_rank_correlation():
    assert report.spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert report.spearman([1, 1, 2], [3, 3, 5]) == pytest.approx(1)
    assert report.spearman([1, 1, 1], [1, 2, 3]) is None
    from scipy.stats import spearmanr

    assert report.spearman([3, 1, 1, 2, 2], [0, 5, 4, 4, 4]) == pytest.approx(
        spearmanr([3, 1, 1, 2, 2], [0, 5, 4, 4, 4]).statistic
    )


# ---------------------------------------------------------------------------------------------------------- the search
def found(tmp_path: Path, count: int = 12, **options: object) -> search.Tuned:
    given = {"goal": "kv", "keep": 0.1, "trials": 6, "max_new_tokens": 3, "batch_size": 8, "recipes": SMALL, **options}
    return tune(zoo.model("llava"), zoo.processor("llava"), questions(count), out=tmp_path / "recipe.json", **given)


def test_what_is_found_is_used_and_told_apart(tmp_path):
    tuned = found(tmp_path)
    assert tuned.chosen is not None and tuned.share < 1 and tuned.chosen.measured.agreement >= 0.1
    whole = [c for c in tuned.candidates if c.asked_all and c.measured.agreement >= 0.1]
    assert tuned.share == pytest.approx(min(c.measured.share("kv") for c in whole), rel=0.02)
    assert tuned.generated == pytest.approx(tuned.held_out.agreement) and len(tuned.held_out.kept) == 4
    path = tmp_path / "recipe.json"
    loaded = get_recipe(path)
    assert isinstance(loaded, TunedRecipe) and loaded == TunedRecipe.from_json(tuned.recipe.to_json())
    assert loaded.stages == tuned.chosen.recipe.stages
    model = zoo.model("llava")
    assert loaded.tuned["model"] == fingerprint(model) and loaded.tuned["held out"]["asked"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate_vlm(model, str(path)).mmaccel.remove()
    with (
        pytest.warns(UserWarning, match="tuned for a model with other weights"),
        accelerated(zoo.model("qwen2_5_vl"), path),
    ):
        pass
    page = (tmp_path / "recipe.html").read_text()
    assert "<h2>Front</h2>" in page and "held-out answers" in page and "data:image/png;base64" in page
    assert (tmp_path / "recipe.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_goes_down_to_the_least_that_keeps_enough(tmp_path, monkeypatch):
    """`uniform` keeps all from 0.17 on, and `random` from 0.3; both begin at a half, and `random` before."""
    enough = {"none": 1.0, "random": 0.3, "uniform": 0.17}

    def ask(evaluator: Evaluator, one: Recipe, rung: int) -> Measurement:
        asked, spent = len(evaluator.rungs[rung]), one.stages[0].retain if one.stages else 1.0
        return measured(asked if spent >= enough[one.name] else 0, asked, spent)

    monkeypatch.setattr(Evaluator, "ask", ask)
    tuned = found(tmp_path, goal="tokens", keep=0.9, trials=24, recipes=["random", "uniform"])
    assert tuned.chosen.recipe.name == "uniform" and 0.17 <= tuned.share < 0.2


def test_of_few_tokens_a_cost_is_as_near_as_can_be():
    """Of 49 tokens 15.1 % cannot be had: 7 are 14.3 %, and 8 are 16.3."""

    def share(one: Recipe) -> float:
        return round(one.stages[0].retain * 49) / 49

    def near(cost: float, over: bool = False) -> float:
        one, seen = baselines.at_equal_cost(
            lambda one: measured(9, 9, share(one)), get_recipe("divprune"), "tokens", cost, over=over
        )
        assert seen.share("tokens") == share(one)
        return share(one)

    assert {over: near(0.151, over) for over in (False, True)} == {False: 7 / 49, True: 8 / 49}
    assert near(10 / 49) == 10 / 49
    assert baselines.at_equal_cost(lambda _: measured(9, 9, 0.9), get_recipe("divprune"), "tokens", 0.2) is None


def test_what_beats_the_search_is_written(tmp_path, monkeypatch):
    rival = Candidate(get_recipe("random", retain=0.3), measured(8, 8, 0.3), True)
    monkeypatch.setattr(baselines, "_baselines", lambda search, found: iter([rival]))
    tuned = found(tmp_path)
    assert tuned.chosen is rival and len(tuned.held_out.kept) == 4
    assert Recipe.from_json((tmp_path / "recipe.json").read_text(encoding="utf-8")).stages == rival.recipe.stages


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch):
    asked: list[tuple[str, int]] = []
    original = Evaluator.ask

    def counting(self: Evaluator, chosen: Recipe, rung: int) -> Measurement:
        if len(asked) == 7:
            raise KeyboardInterrupt
        asked.append((chosen.to_json(), rung))
        return original(self, chosen, rung)

    monkeypatch.setattr(Evaluator, "ask", counting)
    with pytest.raises(KeyboardInterrupt):
        found(tmp_path)
    before, asked[:] = list(asked), []
    monkeypatch.setattr(Evaluator, "ask", lambda self, c, r: asked.append((c.to_json(), r)) or original(self, c, r))
    tuned = found(tmp_path)
    assert tuned.recipe is not None
    # three were the trials of the parts; what a rung was asked is not asked again, and neither are the parts
    searched = [pair for pair in asked if pair[1] < 2]
    assert searched and not set(before[3:]) & set(searched)
    assert not (tmp_path / "recipe.json").read_text() == ""
    # nor is what the recipe had to beat, when all of it is done: only what was held out
    asked.clear()
    assert found(tmp_path).recipe == tuned.recipe and {rung for _, rung in asked} == {1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keep": 0.2}, r"different settings \(keep\)"),
        ({"count": 13}, r"\(questions: 13 q12\)"),
        ({"goal": "cost"}, r"\(goal\)"),
        ({"recipes": ["uniform"]}, r"\(recipes: fastv, snapkv\)"),
        ({"recipes": [get_recipe("uniform", retain=1), "fastv", "snapkv"]}, r"\(recipes: uniform\)"),
        ({"batch_size": 7}, r"\(batch size\)"),
        ({"max_new_tokens": 4}, r"\(longest answer\)"),
        ({"measure": True}, r"\(measured\)"),
    ],
)
def test_a_journal_of_another_search_is_refused(tmp_path, change, said):
    found(tmp_path, trials=1)
    with pytest.raises(MmaccelError, match=said):
        found(tmp_path, **{"count": 12, "trials": 1, **change})


def test_a_journal_of_another_model_is_refused(tmp_path):
    found(tmp_path, trials=1)
    with pytest.raises(MmaccelError, match=r"different settings \(model; batch size; longest answer\)"):
        tune(
            zoo.model("qwen2_5_vl"),
            zoo.processor("qwen2_5_vl"),
            questions(12),
            out=tmp_path / "recipe.json",
            goal="kv",
            keep=0.1,
            recipes=SMALL,
        )


def about(text: str, picture: Path) -> Question:
    """A question about a picture in a file."""
    (one,) = ask_samples([Sample(text, images=(picture,), name="a")])
    return one


def test_a_journal_of_changed_questions_is_refused(tmp_path):
    """The names stay, and a word, a byte of a picture, or the number of frames changes."""
    picture = tmp_path / "a.png"
    zoo.image(40, 40, 1).save(picture)
    model, processor = zoo.model("llava"), zoo.processor("llava")
    options = {"out": tmp_path / "r.json", "goal": "kv", "keep": 0.1, "trials": 1, "recipes": SMALL}

    def run(*last: Question) -> None:
        tune(model, processor, [*questions(11), *last], max_new_tokens=3, batch_size=8, **options)

    run(about("what is it ?", picture))
    run(about("what is it ?", picture))
    with pytest.raises(MmaccelError, match=r"different settings \(questions: 12 a\); give another file"):
        run(about("what is this ?", picture))
    with pytest.raises(MmaccelError, match="questions: 12 a"):
        run(replace(about("what is it ?", picture), expected="a dog"))
    with pytest.raises(MmaccelError, match="questions: 12 a"):
        run(replace(about("what is it ?", picture), frames=3))
    picture.write_bytes(picture.read_bytes() + b"!")
    with pytest.raises(MmaccelError, match="questions: 12 a"):
        run(about("what is it ?", picture))


def test_a_journal_of_other_weights_is_refused(tmp_path):
    """In the middle of a tensor, which no short look at a model sees."""
    found(tmp_path, trials=1)
    model = zoo.model("llava")
    with torch.no_grad():
        model.lm_head.weight.view(-1)[1000] += 1e-3
    with pytest.raises(MmaccelError, match=r"different settings \(model\)"):
        tune(
            model,
            zoo.processor("llava"),
            questions(12),
            out=tmp_path / "recipe.json",
            goal="kv",
            keep=0.1,
            trials=1,
            max_new_tokens=3,
            batch_size=8,
            recipes=SMALL,
        )


def damages(journal: Path, others: Path) -> dict[str, Callable[[], object]]:
    """What may have become of a journal."""
    held = journal.read_bytes()
    lines = held.splitlines(keepends=True)
    other = others.read_bytes()

    def write(content: bytes) -> Callable[[], object]:
        return lambda: journal.write_bytes(content)

    def folder() -> None:
        journal.unlink()
        journal.mkdir()

    def resealed(line: bytes, change: Callable[[dict], object]) -> bytes:
        digest, _, text = line.partition(b" ")
        log = json.loads(text)
        change(log)
        return digest + b" " + json.dumps(log).encode() + b"\n"

    return {
        "text": write(b"shopping list\nmilk\n"),
        "text without an end": write(b"milk"),
        "bytes": write(bytes(range(256)) * 9),
        "JSON": write(b'{"op_code": 0}\n'),
        "of optuna": write(b"".join(line.partition(b" ")[2] for line in lines[1:])),
        "a line less": write(b"".join(lines[:5] + lines[6:])),
        "a line twice": write(b"".join(lines[:5] + lines[4:])),
        "lines in another order": write(b"".join([*lines[:5], lines[6], lines[5], *lines[7:]])),
        "the end of another": write(b"".join(lines[:5]) + b"".join(other.splitlines(keepends=True)[5:])),
        "NaN": write(b"".join([*lines[:5], resealed(lines[5], lambda log: log.update(op_code=math.nan)), *lines[6:]])),
        "a word for a number": write(b"".join([*lines[:5], resealed(lines[5], lambda log: log.update(op_code="x"))])),
        "one bit": write(held[: len(held) // 2] + bytes([held[len(held) // 2] ^ 1]) + held[len(held) // 2 + 1 :]),
        "zeros behind": write(held + b"\0" * 99 + b"\n"),
        "a hole": write(held[:900] + b"\0" * 400 + held[1300:]),
        "a folder": folder,
    }


def test_a_damaged_journal_is_named_with_what_to_do(tmp_path):
    found(tmp_path, trials=3)
    others = tmp_path / "others"
    others.mkdir()
    found(others, trials=3, keep=0.2)
    journal, wrong = tmp_path / "recipe.journal", []
    held = journal.read_bytes()
    for what, damage in damages(journal, others / "recipe.journal").items():
        damage()
        before = None if journal.is_dir() else journal.read_bytes()
        try:
            found(tmp_path, trials=3)
            wrong.append(f"{what}: accepted")
        except MmaccelError as error:
            said = str(error)
            if "recipe.journal" not in said or "give another file" not in said or "\n" in said:
                wrong.append(f"{what}: {said}")
        except Exception as error:
            wrong.append(f"{what}: {error!r}")
        if journal.is_dir():
            journal.rmdir()
        elif journal.read_bytes() != before:
            wrong.append(f"{what}: the file was changed")
        journal.write_bytes(held)
    assert not wrong, wrong


#: where a journal may end: the lines that are whole, and the bytes of the next one; from behind if negative
CUTS = {
    "empty": (0, 0),
    "a byte": (0, 1),
    "first line without its end": (1, -1),
    "first line": (1, 0),
    "in the second line": (1, 7),
    "four lines": (4, 0),
    "in the ninth line": (9, -3),
    "all lines but one": (-2, 0),
    "last line without its end": (-1, -1),
    "whole": (-1, 0),
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("journal")
    found(folder, trials=3)
    return (folder / "recipe.journal").read_bytes()


@pytest.mark.parametrize("cut", few(CUTS, ("first line without its end", "in the ninth line")))
def test_a_journal_that_was_cut_short_goes_on(journal, tmp_path, cut):
    """In its first line, behind it, and in later ones; what is left of a torn line is dropped."""
    ends = list(itertools.accumulate(map(len, journal.splitlines(keepends=True)), initial=0))
    lines, more = CUTS[cut]
    (tmp_path / "recipe.journal").write_bytes(journal[: ends[lines] + more])
    assert len(found(tmp_path, trials=3).candidates) >= 3
    # and again, from what it has written now
    assert found(tmp_path, trials=3).report["tried by earlier runs"] >= 3


def test_two_searches_on_one_file_are_told_apart(tmp_path, monkeypatch):
    said, original = [], Evaluator.ask

    def ask(self: Evaluator, one: Recipe, rung: int) -> Measurement:
        if not said:
            said.append("")
            with pytest.raises(MmaccelError) as raised:
                found(tmp_path, trials=1)
            said.append(str(raised.value))
        return original(self, one, rung)

    monkeypatch.setattr(Evaluator, "ask", ask)
    assert found(tmp_path, trials=1).candidates
    assert said[1].startswith("Another run writes to ") and "recipe.journal" in said[1] and "wait for it" in said[1]
    # and the first one lets go of it
    assert found(tmp_path, trials=1).candidates


@pytest.mark.parametrize("name", ["recipe.json", "recipe.html", "recipe.png", "recipe.journal"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(MmaccelError, match=rf"{name}.* give another file"):
        found(tmp_path)


def test_two_recipes_of_one_name_are_refused(tmp_path):
    with pytest.raises(MmaccelError, match="Two different recipes are called 'uniform'"):
        found(tmp_path, recipes=["uniform", get_recipe("uniform", retain=0.125), "fastv"])


@pytest.mark.parametrize(
    "chosen",
    [
        get_recipe("divprune", retain=0.18, proportional="all"),
        get_recipe("fastv", retain=0.5, layer=2, variant="official"),
        get_recipe("divprune", retain=9, positions="paper"),
        get_recipe(["divprune", "snapkv"], retain=1.0, text_retain=0.5, window=16),
        get_recipe("pyramiddrop", retain=0.4),
        get_recipe("none"),
    ],
)
def test_what_is_printed_makes_the_recipe_again(chosen):
    names = {name: getattr(mmaccel, name) for name in ("Recipe", "Stage")}
    assert eval(report.python(chosen), names) == replace(chosen, summary="", paper="")
    for model in (None, "./my model"):
        words = shlex.split(report.command_line(chosen, model))
        assert words[:2] == ["mmaccel", "eval"] and words[words.index("--recipe") + 1 :] == words[-1:]
        assert get_recipe(words[-1]) == replace(chosen, summary="", paper="") and (model in words) == (
            model is not None
        )
    told = report.describe(chosen)
    for name in ("proportional", "variant", "positions", "text_retain", "anchor", "chunk", "frames_at_once"):
        value = getattr(chosen, name)
        assert (f"{name}={value!r}" in told) == (value != getattr(Recipe, name)), told
        assert (f"{name}={value!r}" in str(chosen)) == (value != getattr(Recipe, name))


def test_too_few_kept_of_what_was_held_out_is_said(tmp_path, monkeypatch):
    """The search keeps all answers; of the four that it never saw three are kept, where 80 % were asked."""
    original = Evaluator.ask

    def ask(self: Evaluator, one: Recipe, rung: int) -> Measurement:
        seen = original(self, one, rung)
        kept = (True,) * len(seen.kept)
        return replace(seen, kept=(*kept[1:], rung < len(self.rungs) - 1), kl=seen.kl)

    monkeypatch.setattr(Evaluator, "ask", ask)
    monkeypatch.setattr(search, "lost", lambda seen: 1 - seen.agreement)
    tuned = found(tmp_path, keep=0.8)
    assert tuned.chosen is not None and tuned.held_out.agreement == 0.75
    warning = "WARNING: 80.0 % of the answers were to be kept, and of the held-out ones"
    assert warning in report.verdict(tuned) and warning in (tmp_path / "recipe.html").read_text()
    assert tuned.recipe.tuned["held out keeps enough"] is False


def test_a_sample_that_the_model_cannot_be_asked_is_left_out(tmp_path):
    """One that the processor refuses, and one on which the model fails: both are named, and their neighbours are asked."""
    said: list[str] = []

    def refused() -> Prompt:
        return Prompt("what ?", (zoo.image(80, 60, 1),), clip=Clip(zoo.clip(8, 96, 64, 1), list(range(8)), 8, 2.0))

    asked = [*questions(12), Question("bad", "all", None, refused)]
    long = Question("long", "all", None, lambda: Prompt("why ? <image> " * 3, (zoo.image(80, 60, 2),)))
    asked.insert(3, long)
    options = {"out": tmp_path / "recipe.json", "goal": "kv", "keep": 0.1, "trials": 1, "recipes": SMALL}
    tuned = tune(zoo.model("llava"), zoo.processor("llava"), asked, complain=said.append, max_new_tokens=3, **options)
    assert tuned.candidates and tuned.report["samples left out"] == len(said) == 2
    assert {one.partition(":")[0] for one in said} == {"bad", "long"}
    assert not any("\n" in one for one in said)
    with pytest.raises(MmaccelError, match="long: "):
        tune(zoo.model("llava"), zoo.processor("llava"), asked, **{**options, "out": tmp_path / "other.json"})
    with pytest.raises(MmaccelError, match="needs at least 10 samples; 9 can be used"):
        few_left = [*questions(9), long]
        tune(zoo.model("llava"), zoo.processor("llava"), few_left, complain=said.append, **options)


def test_a_prompt_beyond_the_positions_is_left_out(monkeypatch):
    """The third question is the longest; its neighbours are asked."""
    said: list[str] = []
    evaluator = judge_of("llava", questions(3))
    evaluator.complain = said.append
    prompts = [len(encode(evaluator.processor, [one.load()])["input_ids"][0]) for one in evaluator.rungs[0]]
    monkeypatch.setattr(
        evaluator.model.config.text_config, "max_position_embeddings", max(prompts) + evaluator.longest - 1
    )
    assert len(evaluator.ask(get_recipe("uniform", retain=0.5), 0).kept) == 2
    assert len(said) == 1 and said[0].startswith("q2: The prompt has ") and "positions in all" in said[0]
    frozen, (batch,) = Frozen(evaluator.model, evaluator.processor, "answers"), batches(evaluator.rungs[0], 3)
    with pytest.raises(MmaccelError, match="positions in all"):
        frozen.example(batch, evaluator.longest)


def test_a_question_on_which_the_model_fails_is_left_out_of_its_batch(monkeypatch):
    """The batch is halved until the question is alone; the others are asked together."""
    said, generated = [], []
    evaluator = judge_of("llava", questions(4))
    evaluator.complain = said.append
    original = type(evaluator.model).generate

    def generate(self, *args, **options):
        if len(options["input_ids"]) == 4:
            raise ValueError("cannot read this\nor that")
        generated.append(len(options["input_ids"]))
        if len(generated) in (1, 3):
            raise ValueError("cannot read this\nor that")
        return original(self, *args, **options)

    monkeypatch.setattr(type(evaluator.model), "generate", generate)
    assert len(evaluator.ask(get_recipe("uniform", retain=0.5), 0).kept) == 3
    assert said == ["q1: The model cannot answer it (ValueError: cannot read this)."] and evaluator.left_out == 1
    # halves, of which the first fails, its questions, and what is left together
    assert generated == [2, 1, 1, 2, 3]


def test_what_nothing_reaches_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(Measurement, "agreement", property(lambda self: 0.5))
    tuned = found(tmp_path, keep=0.9, trials=3)
    assert tuned.recipe is None and tuned.front and not (tmp_path / "recipe.json").exists()
    assert "No recipe that was tried keeps 90.0 %" in (tmp_path / "recipe.html").read_text()


def test_samples_that_cannot_be_read_are_named(tmp_path):
    def broken() -> Prompt:
        raise MmaccelError("the picture is broken.")

    asked, said = [*questions(12), Question("bad", "all", None, broken)], []
    options = {"out": tmp_path / "recipe.json", "goal": "kv", "keep": 0.1, "trials": 1, "recipes": SMALL}
    model, processor = zoo.model("llava"), zoo.processor("llava")
    with pytest.raises(MmaccelError, match="picture is broken"):
        tune(model, processor, asked, **options)
    assert tune(model, processor, asked, complain=said.append, **options).candidates
    assert said == ["bad: the picture is broken."]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 0.0}, "keep must be a share of the answers such as 0.99, got 0.0"),
        ({"goal": "speed"}, "goal must be one of ttft, tokens, kv, cost, got 'speed'"),
        ({"confidence": 1.0}, "confidence must be greater than 0 and less than 1, such as 0.95, got 1.0"),
        ({"confidence": 0.9, "keep": 1.0}, "No number of samples can show"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"out": "nowhere/recipe.json"}, "lie in a folder that exists"),
        ({"out": "recipe.yaml"}, "must end in .json"),
        ({"questions": "nothing.jsonl"}, "Cannot read the samples 'nothing.jsonl'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    given = {"questions": questions(1), **options}
    with pytest.raises(MmaccelError, match=said):
        tune(zoo.model("llava"), zoo.processor("llava"), **given)


def test_an_accelerated_model_is_refused():
    with (
        accelerated(zoo.model("llava"), "uniform") as model,
        pytest.raises(MmaccelError, match="call model.mmaccel.remove"),
    ):
        tune(model, zoo.processor("llava"), questions(12))


def test_what_was_measured_must_be_an_object():
    with pytest.raises(MmaccelError, match="`tuned` of a recipe must be an object"):
        Recipe.from_json('{"name": "a", "stages": [], "tuned": 3}')
    made = TunedRecipe.of(get_recipe("uniform"), "mine", {"model": "abc"})
    assert Recipe.from_json(made.to_json()) == made and made.override(retain=0.1).tuned == made.tuned
    assert replace(made, tuned={}) != Recipe("mine", made.stages) and "tuned" not in repr(made)


# --------------------------------------------------------------------------------------------------------- the command
def missed(original: Any) -> Any:
    """``report.figures`` of a recipe that keeps too little of what was held out."""

    def figures(*given: Any) -> dict[str, Any]:
        data: dict[str, Any] = original(*given)
        data["recipe"]["held out keeps enough"] = False
        return data

    return figures


def test_the_command_writes_a_recipe_and_says_what_it_keeps(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = export((make_item("colour", "val", i) for i in range(12)), tmp_path)
    argv = ["tune", "--data", path, "--recipe", *SMALL, "--keep", 0.5, "--goal", "kv", "--trials", 3, "-o", "mine.json"]
    assert main([str(word) for word in argv]) == 0
    told = capsys.readouterr().out
    assert "held-out answers kept" in told and "written: mine.json" in told and "*" in told
    lines = dict(line.split(": ", 1) for line in told.splitlines() if line.startswith(("in Python", "on the command")))
    made: dict[str, Any] = {"model": zoo.model("llava")}
    exec(lines["in Python"], made)
    with_all = json.loads(Path("mine.json").read_text())["stages"]
    assert json.loads(made["model"].mmaccel.recipe.to_json())["stages"] == with_all
    made["model"].mmaccel.remove()
    words = shlex.split(lines["on the command line"])
    assert main([*words[1:], "--suite", "colour", "--limit", "1", "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    # the same recipe, of which held-out answers now keep less than they were asked to
    with monkeypatch.context() as patch:
        patch.setattr(report, "figures", missed(report.figures))
        assert main([str(word) for word in argv]) == 3
    told = capsys.readouterr().out
    assert "WARNING: 50.0 % of the answers were to be kept" in told and Path("mine.json").exists()
    # the search is over; nothing keeps enough now, and the front is shown all the same
    monkeypatch.setattr(Measurement, "agreement", property(lambda self: 0.1))
    Path("mine.json").unlink()
    assert main([str(word) for word in argv]) == 3
    assert "No recipe that was tried keeps 50.0 %" in capsys.readouterr().out and not Path("mine.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(("shipped", "tasks"), [("mini-llava", ("colour", "count")), ("mini-qwen-vl", VIDEO_TASKS)])
def test_a_shipped_model_is_tuned(shipped, tasks, tmp_path):
    """The whole space on a shipped model: enough is kept of what the search saw, and something saved."""
    model, processor = ask.load_model(ask.ModelOptions(str(ask.SHIPPED.with_name(shipped))))
    asked = ask_suite(tasks, -(-40 // len(tasks)), split="val")
    tuned = tune(model, processor, asked, keep=0.9, goal="cost", trials=80, out=tmp_path / "a.json")
    assert tuned.recipe is not None and tuned.share < 0.8 and tuned.chosen.measured.agreement >= 0.9
    assert abs(tuned.generated - tuned.held_out.agreement) < 0.05


@pytest.mark.parametrize(("family", "goal"), in_turn(["llava", "qwen2_5_vl"], ["tokens", "kv"]))
@pytest.mark.full
def test_every_part_can_be_suggested_and_asked(family, goal):
    evaluator = judge_of(family, questions(2, video=family == "qwen2_5_vl"))
    found = space.Space.measure(evaluator, goal, mmaccel.recipes())
    for params in found.starts(0.5):
        (part,) = (found.parts[slot][name] for slot, name in params.items() if slot in found.parts and name != "-")
        assert evaluator.ask(part.recipe, 0).share(goal) <= 1.1
