"""Models that read pages get one sentence beside budgets that keep less than half, and others none; recipes that lost most
answers of a real language model get one at such budgets."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import answers
import pages
import pytest
import zoo
from laws.helpers import FAMILIES, generate, inputs, model

from mmaccel import Recipe, SnapKV, Stage, accelerated, get_recipe, recipes
from mmaccel.families import families
from mmaccel.recipe import losses

pytestmark = pytest.mark.usefixtures("no_gradients")
READERS = [name for name in FAMILIES if families()[name].reads_pages]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CURVES, PAGES = RESULTS / "mini-llava-curves.json", RESULTS / "pages.json"
DOCUMENTS = RESULTS / "answers-documents.json"


def said(family: str, what: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with accelerated(model(family), what, processor=zoo.processor(family), **options):
            noted = list(model(family).mmaccel.plan.notes)
    told = [str(one.message) for one in heard if "reads pages" in str(one.message)]
    assert told == [f"{note}." for note in noted if "reads pages" in note]
    return told


def test_who_reads() -> None:
    # hunyuan_vl is HunyuanOCR
    assert {name for name in FAMILIES if "ocr" in name or "docling" in name} | {"hunyuan_vl"} == set(READERS)


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


# ------------------------------------------------------------------------------------------- a real language model
def test_losses_are_what_was_measured() -> None:
    shipped = Path(losses.__file__).with_suffix(".toml").read_text()
    assert shipped == pages.losses(json.loads(PAGES.read_text()))


def test_losses_about_documents_are_what_was_measured() -> None:
    shipped = Path(losses.__file__).with_name("losses-documents.toml").read_text()
    assert shipped == answers.losses(json.loads(DOCUMENTS.read_text()))


def test_document_warns_below_the_budget_at_which_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loss = '[[loss]]\nrecipe = "document"\nretain = 0.25\nsentence = "too few"\n'
    for name in ("losses", "losses-documents"):
        (tmp_path / f"{name}.toml").write_text(loss if name == "losses-documents" else "")
    monkeypatch.setattr(losses, "__file__", str(tmp_path / "losses.py"))
    losses.losses.cache_clear()
    try:
        found = [losses.caution(get_recipe("document", retain=budget)) for budget in (0.1, 0.25, 0.3, 0.5)]
        assert found == ["too few", "too few", None, None]
        assert losses.caution(get_recipe("keydiff", retain=0.1)) is None  # the half of the recipe that keeps all bits
    finally:
        losses.losses.cache_clear()


def right(title: str) -> tuple[int, int]:
    kinds = json.loads(PAGES.read_text())["rows"][title]["kinds"].values()
    return sum(kind["right"] for kind in kinds), sum(kind["asked"] for kind in kinds)


def test_a_sentence_says_what_was_lost() -> None:
    sentence = losses.caution(get_recipe("snapkv"))
    own, better, full = (f"{right(t)[0] / right(t)[1]:.0%}" for t in ("snapkv:0.25", "balanced-cache:0.25", "none"))
    assert sentence is not None and sentence.startswith(
        f"snapkv at 25% was right in {own} of {right('snapkv:0.25')[1]} answers of SmolLM2-135M about pages of text "
        f"(full model {full}), and in none for a"
    )
    assert sentence.endswith(
        f"; balanced-cache at 25% in {better}: use it or a larger budget, or measure with mmaccel eval"
    )
    assert losses.caution(get_recipe("snapkv", retain=0.1)) == sentence
    codec = losses.caution(get_recipe("calibquant"))
    assert codec is not None and "calibquant was right in 3% of" in codec and "%: use it, or measure" in codec
    assert (losses.caution(get_recipe("fastv")) or "").endswith("; take a larger budget, or measure with mmaccel eval")


def test_who_lost_most() -> None:
    """All recipes whose interval is below one half, at their budget and below; no other recipe, budget or option."""
    rows = [title for title in json.loads(PAGES.read_text())["rows"] if "kvpress" not in title and title.count(":") < 2]
    lost = sorted((title for title in rows if pages.interval(*right(title))[1] < 0.5), key=pages._budget)
    largest = {title.partition(":")[0]: pages._budget(title) for title in lost}
    assert {"snapkv", "h2o", "calibquant"} <= set(largest) < {title.partition(":")[0] for title in rows}

    shares = {name: made for name, made in recipes().items() if made.primary is None or len(made.stages) == 1}

    def cautioned(retain: float) -> set[str]:
        # a policy may be in the recipes of several papers: all of its options are the same in them
        made = {name: one if one.primary is None else one.override(retain=retain) for name, one in shares.items()}
        return {name for name, one in made.items() if losses.caution(one)}

    for budget in (0.1, 0.25, 0.3, 0.5, 1.0):
        assert cautioned(budget) == {name for name, most in largest.items() if budget <= most and name in shares}


@pytest.mark.parametrize(
    ("what", "options", "warned"),
    [
        ("snapkv", {"retain": 0.26}, False),
        ("snapkv", {"retain": 16}, False),
        ("snapkv", {"window": 8}, False),
        ("snapkv", {"window": 32}, True),
        ("snapkv", {"variant": "official"}, False),
        (SnapKV(), {}, True),
        (Recipe("mine", (Stage("snapkv", 0.2),)), {}, True),
        (["snapkv", "kivi"], {}, True),
        (["divprune", "snapkv"], {}, False),
        ("tova", {"retain": 0.25}, False),
        ("none", {}, False),
    ],
)
def test_of_which_recipes(what: Any, options: dict[str, Any], warned: bool) -> None:
    assert (losses.caution(get_recipe(what, **options)) is not None) == warned


def test_statistics_note_what_was_lost() -> None:
    tiny, feed = model("llava"), inputs("llava")

    def noted(**asked: Any) -> list[str]:
        generate(tiny, feed, **asked)
        return [note for note in tiny.mmaccel.stats()["notes"] if "SmolLM2" in note]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with accelerated(tiny, "snapkv"):
            assert len(noted()) == 1 and noted()[0].startswith("snapkv at 25% was right in")
            assert noted(mmaccel={"retain": 0.2}) == noted()
            assert noted(mmaccel={"retain": 0.5}) == noted(mmaccel=False) == []
            assert len(noted()) == 1
        with accelerated(tiny, "snapkv", retain=0.5):
            assert noted() == [] and len(noted(mmaccel={"retain": 0.25})) == 1 and noted() == []
