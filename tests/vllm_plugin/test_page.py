"""What the page about serving says of families and recipes; vLLM is not needed."""

from __future__ import annotations

import functools
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import zoo
from serving import answers

from mmaccel.errors import MmaccelError
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.settings import settings_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")


@functools.cache
def _config(family: str) -> Any:
    return zoo.model(family).config


def _serves(family: str, architecture: str, recipe: str) -> bool:
    settings = settings_of({"recipe": recipe})
    try:
        ServingPlan(settings, _config(family), ARCHITECTURES[architecture])
    except MmaccelError:
        return False
    return True


def test_the_page_says_which_families_serve_which_recipes() -> None:
    rows = dict(re.findall(r"^\| ([\w.-]+) \| `(\w+ForConditionalGeneration|InternVLChatModel)` ", PAGE, re.M))
    assert list(rows.values()) == list(ARCHITECTURES)
    said = re.findall(r"^\| (`.*`) \| (.+) \|$", PAGE.partition("<!-- architectures -->")[0], re.M)
    assert len(said) == 4
    for recipes, where in said:
        for name, architecture in rows.items():
            family = name.lower().replace("-", "_").replace(".", "_").removesuffix("_chat")
            if family not in zoo.FAMILIES:
                # newer than this transformers
                continue
            _, but, others = where.partition("all but ")
            here = where == "all" or (name not in others.split(", ") if but else name in where.split(", "))
            for recipe in re.findall(r"`([\w-]+)`", recipes):
                assert _serves(family, architecture, recipe) == here, (name, recipe)


def test_the_page_says_how_many_answers_are_equal() -> None:
    """Of a hundred questions or more about every kind of medium, and as many are equal as must be."""
    lines = answers.kept(ROOT / answers.RESULTS)
    assert {line.shown for line in lines} == set(answers.ASKED) and all(line.asked >= 100 for line in lines)
    assert len(lines) == len(answers.ASKED) * (2 + len(answers.RECIPES)) and all(map(answers.agrees, lines))
    for line in lines:
        row = [line.shown, line.recipe, line.against, str(line.asked), str(line.equal)]
        assert f"| {' | '.join(row)} |" in PAGE
        assert all(f"- {sentence}" in PAGE for sentence in line.differ)


def test_the_page_says_of_every_architecture_how_many_answers_are_equal() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "vllm-architectures.json").read_text("utf-8"))[
        "done"
    ].values()
    table = PAGE.partition("<!-- architectures -->")[2].partition("<!-- /architectures -->")[0]
    for name in ARCHITECTURES:
        mine = [one for one in found if one["architecture"] == name]
        assert {(one["vllm"][:4], one["runner"]) for one in mine} == set(product(("0.32", "0.33"), (1, 2)))
        for one in mine:
            assert one["pictures"] + one["clips"] >= 30
            assert (one["pictures"], one["clips"]) == (one["equal_pictures"], one["equal_clips"])
            row = next(line for line in table.splitlines() if f"`{name}`" in line)
            assert f"{one['pictures']} of {one['pictures']} prompts" in row or not one["pictures"]
