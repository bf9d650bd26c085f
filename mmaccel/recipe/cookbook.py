"""Recipes of papers that span sites, read from ``cookbook.toml``."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from .recipe import Recipe, Stage

_FRACTION = re.compile(r"\d+/\d+")


def _number(value: Any) -> Any:
    """``value``, or the number that a fraction such as ``"3/28"`` names."""
    return float(Fraction(value)) if isinstance(value, str) and _FRACTION.fullmatch(value) else value


def _recipe(stages: Sequence[Mapping[str, Any]] = (), **fields: Any) -> Recipe:
    values = [{name: _number(value) for name, value in stage.items()} for stage in stages]
    return Recipe(**fields, stages=tuple(Stage(one.pop("method"), one.pop("retain", None), one) for one in values))


COOKBOOK = tuple(
    _recipe(**table)
    for table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["recipe"]
)
