"""What the page about serving says of families and recipes; vLLM is not needed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import zoo

from mmaccel.errors import MmaccelError
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.settings import settings_of

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")


def _serves(family: str, architecture: str, recipe: str) -> bool:
    settings = settings_of(SimpleNamespace(mmaccel={"recipe": recipe}))
    try:
        ServingPlan(settings, zoo.model(family).config, ARCHITECTURES[architecture])
    except MmaccelError:
        return False
    return True


def test_the_page_says_which_families_serve_which_recipes() -> None:
    rows = dict(re.findall(r"^\| ([\w.-]+) \| `(\w+ForConditionalGeneration)` ", PAGE, re.M))
    assert list(rows.values()) == list(ARCHITECTURES)
    said = re.findall(r"^\| (`.*`) \| (.+) \|$", PAGE, re.M)
    assert len(said) == 2
    for recipes, where in said:
        for name, architecture in rows.items():
            family = name.lower().replace("-", "_").replace(".", "_")
            here = where == "everywhere" or name in re.split(", ", where)
            for recipe in re.findall(r"`([\w-]+)`", recipes):
                assert _serves(family, architecture, recipe) == here, (name, recipe)
