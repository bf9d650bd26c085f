"""Recipes by name: the composed ones, one for every method alone, and those the user writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import MmaccelError
from ..method.registry import methods, suggest
from .recipe import Recipe, Stage


def recipes() -> dict[str, Recipe]:
    """All recipes by name: the composed ones, and one for every method alone."""
    # its recipes ask for their methods, which come from the packages of others too
    from .cookbook import COOKBOOK

    alone = {
        name: Recipe(name, (Stage(name, m.default_retain),), summary=m.summary, paper=m.paper)
        for name, m in methods().items()
    }
    return dict(sorted({**alone, **{one.name: one for one in COOKBOOK}}.items()))


def recipe(which: str | Path | Mapping[str, Any] | Recipe | Stage | Iterable[Stage]) -> Recipe:
    """A recipe from a name, a JSON file, a mapping, a stage or several, or a recipe itself.

    Raises
    ------
    MmaccelError
        If the name is unknown (the nearest are suggested) or the content is not valid.
    """
    if isinstance(which, Recipe):
        return which
    if isinstance(which, Stage):
        return Recipe(which.method, (which,))
    if isinstance(which, Mapping):
        try:
            text = json.dumps(which)
        except (TypeError, ValueError, RecursionError) as error:
            raise MmaccelError(f"The recipe holds what JSON has no word for ({error}); give plain values.") from error
        return Recipe.from_json(text)
    if isinstance(which, Path) or (isinstance(which, str) and which.endswith(".json")):
        try:
            return Recipe.from_json(Path(which).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise MmaccelError(f"Cannot read the recipe {str(which)!r}: {error}.") from error
    if isinstance(which, str):
        known = recipes()
        if which not in known:
            raise MmaccelError(f"There is no recipe {which!r}{suggest(which, known)}")
        return known[which]
    if isinstance(which, Iterable):
        stages = tuple(which)
        if all(isinstance(stage, Stage) for stage in stages):
            return Recipe("+".join(stage.method for stage in stages) or "none", stages)
    raise MmaccelError(f"{which!r} is no recipe; give a name, a path to JSON, a mapping or Stage values.")
