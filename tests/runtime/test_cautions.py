"""Models that read pages get one sentence beside budgets that keep less than half, and others none."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import zoo
from laws.helpers import FAMILIES, generate, inputs, model

from mmaccel import Stage, accelerated
from mmaccel.families import families

pytestmark = pytest.mark.usefixtures("no_gradients")
READERS = [name for name in FAMILIES if families()[name].reads_pages]
CURVES = Path(__file__).parents[2] / "benchmarks" / "results" / "mini-llava-curves.json"


def said(family: str, what: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with accelerated(model(family), what, processor=zoo.processor(family), **options):
            noted = list(model(family).mmaccel.plan.notes)
    told = [str(one.message) for one in heard if "reads pages" in str(one.message)]
    assert told == [f"{note}." for note in noted if "reads pages" in note]
    return told


def test_who_reads() -> None:
    assert {name for name in FAMILIES if "ocr" in name} == set(READERS)


@pytest.mark.parametrize("family", READERS)
def test_less_than_half_is_said_once(family: str) -> None:
    for what, options in (("divprune", {"retain": 0.25}), ([Stage("divprune", 0.6), Stage("snapkv", 0.25)], {})):
        (sentence,) = said(family, what, **options)
        assert sentence.startswith(f"{family} reads pages, and a budget of 25%") and sentence.count(". ") == 0
    for what, options in (("divprune", {"retain": 0.5}), ("none", {}), ("kivi", {})):
        assert said(family, what, **options) == []


def test_other_models_are_not_warned() -> None:
    assert said("llava", "divprune", retain=0.1) == []


def test_statistics_say_it_of_every_call() -> None:
    tiny, feed = model("got_ocr2"), inputs("got_ocr2")
    with accelerated(tiny, "divprune", retain=0.6, processor=zoo.processor("got_ocr2")):

        def noted(**asked: Any) -> list[str]:
            generate(tiny, feed, **asked)
            return [note for note in tiny.mmaccel.stats()["notes"] if "reads pages" in note]

        assert noted() == []
        (note,) = noted(mmaccel={"retain": 0.2})
        assert "a budget of 20%" in note
        assert noted() == []
    with pytest.warns(UserWarning, match="reads pages"), accelerated(tiny, "divprune", retain=0.3):
        assert len(noted()) == 1 and "20%" in noted(mmaccel={"retain": 0.2})[0]
        assert noted(mmaccel={"retain": 0.7}) == noted(mmaccel=False) == []


def test_the_figures_are_measured() -> None:
    rows = {row["title"]: row["tasks"] for row in json.loads(CURVES.read_text())["rows"]}
    (sentence,) = said("got_ocr2", "divprune", retain=0.25)

    def percent(task: str) -> list[int]:
        return [round(100 * rows[f"uniform {retain}"][task]["figures"]["accuracy"]) for retain in (0.5, 0.25, 0.1)]

    found = [int(number) for number in re.findall(r"\d+", sentence.split("mini-llava")[1])]
    full = round(100 * rows["none"]["reading"]["figures"]["accuracy"])
    assert found == [*percent("reading"), full, *percent("colour")]
