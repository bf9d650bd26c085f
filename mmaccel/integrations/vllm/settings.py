"""What ``hf_overrides={"mmaccel": {...}}`` says, and what a request adds to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...core.budget import Retain, check_retain
from ...errors import MmaccelError, UnsupportedError
from ...recipe import Recipe
from ...recipe import recipe as find_recipe
from ...version import __version__

#: whose position text has behind a clip whose time goes further than its height and width: vLLM goes on behind the last frame,
#: transformers 5 behind the larger side of the grid
NUMBERINGS = ("vllm", "transformers")
#: a whole number that a 64-bit integer holds
_MOST = 2**62


@dataclass(frozen=True)
class Settings:
    """A recipe for a server.

    recipe : with the budgets that hold where a request says nothing.
    numbering : one of :data:`NUMBERINGS`.
    """

    recipe: Recipe
    numbering: str = "vllm"

    @property
    def keeps_positions(self) -> bool:
        """Whether tokens that stay, and text, keep the positions of the unreduced prompt."""
        return self.recipe.positions != "paper"

    def fingerprint(self) -> str:
        """What caches of encoded pictures depend on beside the picture and the request."""
        return f"mmaccel {__version__} {self.numbering} {json.dumps(self.recipe.to_json())}"


def settings_of(hf_config: Any) -> Settings | None:
    """The settings in a model's configuration; None where there are none, and then vLLM is to be left alone.

    Raises
    ------
    MmaccelError
        If the recipe, an option or a budget is of no use.
    """
    given = getattr(hf_config, "mmaccel", None)
    if given is None:
        return None
    if not isinstance(given, Mapping) or "recipe" not in given:
        raise MmaccelError(
            'hf_overrides={"mmaccel": ...} needs an object with a recipe, such as {"recipe": "divprune", "retain": 0.25}.'
        )
    options = {name: value for name, value in given.items() if name not in ("recipe", "numbering")}
    numbering = given.get("numbering", "vllm")
    if numbering not in NUMBERINGS:
        raise MmaccelError(f"numbering={numbering!r} is unknown; use {' or '.join(map(repr, NUMBERINGS))}.")
    chosen = find_recipe(given["recipe"], **options)
    chosen.build()
    if chosen.proportional != "none":
        raise UnsupportedError(
            f"proportional={chosen.proportional!r} gives keys weights, which attention in vLLM does not take; leave it out."
        )
    return Settings(chosen, numbering)


def as_integers(retain: Retain | None) -> tuple[int, int]:
    """A budget as two whole numbers, which travel between vLLM's processes unrounded: a share as numerator and denominator, a
    count with denominator 0, None as two zeros."""
    if retain is None:
        return 0, 0
    check_retain(retain)
    if isinstance(retain, int):
        return retain, 0
    share = Fraction(str(retain))
    if share.denominator >= _MOST:
        raise MmaccelError(f"retain={retain} keeps next to nothing; give a share such as 0.05, or a count such as 64.")
    return share.numerator, share.denominator


def from_integers(numerator: int, denominator: int) -> Retain | None:
    """The budget that :func:`as_integers` wrote."""
    if denominator:
        return numerator / denominator
    return numerator or None
