"""Warnings about recipes that lost most answers of a real language model, and about ``document`` where it loses some; read from
``losses.toml`` and ``losses-documents.toml``."""

import tomllib
from functools import cache
from pathlib import Path

from ..method.base import Method
from .lookup import get_recipe
from .recipe import Recipe


@cache
def losses() -> tuple[tuple[Recipe, list[Method], str], ...]:
    """Recipes at the largest budget at which they lost answers, their methods, and a sentence with the figures."""
    files = (Path(__file__).with_name(f"{name}.toml") for name in ("losses", "losses-documents"))
    rows = [row for file in files for row in tomllib.loads(file.read_text(encoding="utf-8")).get("loss", ())]
    found = [(get_recipe(row["recipe"], retain=row.get("retain")), row["sentence"]) for row in rows]
    return tuple((recipe, [method for _, method in recipe.build()], sentence) for recipe, sentence in found)


def caution(recipe: Recipe) -> str | None:
    """A sentence about a recipe that lost answers at its budget or a larger one, also with further stages behind it. None
    for other options or another variant, and for budgets that are numbers of tokens."""
    built = [method for _, method in recipe.build()]
    for measured, methods, sentence in losses():
        same = recipe.variant == measured.variant and built[: len(methods)] == methods
        if same and all(
            at_most.retain is None or (isinstance(stage.retain, float) and stage.retain <= at_most.retain)
            for stage, at_most in zip(recipe.stages, measured.stages, strict=False)
        ):
            return sentence
    return None
