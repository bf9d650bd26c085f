"""The calibration of a fallback: what is chosen by hand-made outcomes, and end to end on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmaccel import Fallback, MmaccelError, accelerate_vlm, accelerated, load
from mmaccel.programs.evaluate import ask_suite, batches, inputs_of
from mmaccel.programs.tune import fallback as calibration
from mmaccel.programs.tune.fallback import RULES, Outcomes, cheapest, find_fallback


def outcomes(kept: list[list[bool]], certainty: list[list[float]]) -> Outcomes:
    """Outcomes at budgets that cost .1 and .4, equally certain by every rule."""
    return Outcomes(
        np.array(kept), np.tile([0.1, 0.4], (len(kept), 1)), np.repeat(np.array(certainty)[..., None], len(RULES), 2)
    )


def test_the_cheapest_choice_by_hand() -> None:
    """Three answers are right at the first budget and sure, the fourth is wrong and less sure; at the second it is right and
    sure. The best ladder reads it twice: (3 * .1 + .1 + .4) / 4."""
    seen = outcomes([[True, True]] * 3 + [[False, True]], [[0.9, 0.9]] * 3 + [[0.5, 0.95]])
    cost, ladder, _, threshold = cheapest(seen, 0.99, None)  # type: ignore[misc]
    assert (cost, ladder) == (pytest.approx(0.2), (0, 1))
    assert threshold == pytest.approx(0.7)
    kept, spent, reading = seen.replay(ladder, 0, threshold)
    assert kept.all()
    assert spent.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.5])
    assert reading.tolist() == [0, 0, 0, 1]
    assert seen.least() == pytest.approx(0.2)
    # one answer in four may be lost: then the first budget alone is enough
    assert cheapest(seen, 0.75, None)[:2] == (pytest.approx(0.1), (0,))  # type: ignore[index]


def test_certainty_that_says_nothing_saves_nothing() -> None:
    """Wrong answers are as sure as right ones: every answer has to be read again, which costs more than the bare model."""
    assert cheapest(outcomes([[True, True], [False, False]], [[0.9, 0.9]] * 2), 0.99, None) is None


def test_confidence_asks_for_more() -> None:
    """Of 20 answers all are kept, which shows 86 % with a confidence of .95, and not 99 %."""
    seen = outcomes([[True, True]] * 20, [[0.9, 0.9]] * 20)
    assert cheapest(seen, 0.86, 0.95) is not None
    assert cheapest(seen, 0.99, 0.95) is None


@pytest.fixture(scope="module")
def mini_llava() -> Any:
    return load("mini-llava", device="cpu", dtype="float32")


@pytest.fixture
def some() -> list[Any]:
    return ask_suite(["colour", "reading"], 10)


def test_a_recipe_with_its_fallback(
    mini_llava: Any, some: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds the fallback, answers with it are those that were promised, and a second call asks nothing again."""
    model, processor = mini_llava
    out = tmp_path / "recipe.json"
    options = {"keep": 0.9, "budgets": (0.1, 0.3), "out": out, "max_new_tokens": 6}
    found = find_fallback(model, processor, some, "divprune", **options)
    assert found.recipe is not None
    assert found.fallback is not None
    stored = json.loads(out.read_text())["tuned"]["fallback"]
    assert Fallback.of(stored, found.recipe) == found.fallback
    with accelerated(model, out, fallback=True):
        assert model.mmaccel.fallback == found.fallback
        assert model.mmaccel.recipe.retain == found.recipe.retain
    monkeypatch.setattr(calibration, "_answered", lambda *_: pytest.fail("asked again"))
    assert find_fallback(model, processor, some, "divprune", **options).report == found.report
    with pytest.raises(MmaccelError, match="different settings"):
        find_fallback(model, processor, some[1:], "divprune", **options)


def test_what_is_promised_is_what_happens(mini_llava: Any, some: list[Any], tmp_path: Path) -> None:
    """Replayed outcomes are those of ``generate`` with the fallback: the same share of answers, the same readings."""
    model, processor = mini_llava
    steps = [calibration.get_recipe("divprune").override(retain=share) for share in (0.05, 0.3)]
    for batch in batches(some, 10):
        seen = Outcomes.of(calibration._answered(model, processor, batch, steps, 6, None))
        inputs = inputs_of(model, processor, batch)
        for rule in (0, 4, 8):  # every statistic and every quantile once
            statistic, quantile = RULES[rule]
            values = np.unique(seen.certainty[:, :, rule])
            threshold = float(values[len(values) // 2 - 1 : len(values) // 2 + 1].mean())
            net = Fallback(threshold, statistic, quantile, (0.3,))
            with accelerated(model, "divprune", retain=0.05, fallback=net):
                model.generate(**inputs, max_new_tokens=6, do_sample=False)
                reading = model.mmaccel.stats().fallback["reading"]
            assert reading == seen.replay((0, 1), rule, threshold)[2].tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "snapkv"}, "drops tokens before or inside"),
        ({"keep": 1.0}, "keep must be a share"),
        ({"budgets": (0.3, 0.1)}, "rising shares"),
        ({"confidence": 0.95}, "needs at least"),
        ({"out": "recipe.txt"}, "must end in .json"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_values_are_refused(mini_llava: Any, some: list[Any], tmp_path: Path, options: Any, words: str) -> None:
    options = {"out": tmp_path / "recipe.json", "recipe": "divprune", **options}
    with pytest.raises(MmaccelError, match=words):
        find_fallback(*mini_llava, some, **options)


def test_an_accelerated_model_is_refused(mini_llava: Any, some: list[Any], tmp_path: Path) -> None:
    model, processor = mini_llava
    accelerate_vlm(model, "divprune")
    with pytest.raises(MmaccelError, match="compares with the bare model"):
        find_fallback(model, processor, some, "divprune", out=tmp_path / "recipe.json")
    model.mmaccel.remove()
