"""Options that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...errors import MmaccelError, no_json, short_int
from .needs import require_clip

if TYPE_CHECKING:
    from ...recipe import Recipe


def budget(text: str) -> float:
    """A budget from the command line: an integer is a count, any other number a ratio."""
    try:
        return short_int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"a budget must be a ratio such as 0.25 or a count such as 64, got {text[:40]!r}"
        ) from None


#: what ``--json`` alone stands for: standard output
STDOUT = "-"

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE]", help="Print JSON instead of text, or write it to FILE beside the text."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: cuda if there is one]")]
Longest = Annotated[int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Longest answer.")]
Frames = Annotated[int, typer.Option(min=1, metavar="N", help="Frames to show of a video, evenly spaced.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A host name that requests may use, such as that of a proxy; *.example.com and * are patterns. Can be repeated.  "
        "[default: localhost, addresses, and --host]",
    ),
]
Several = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Questions that are answered at once, each by a copy of the model that shares its weights. They slow each other "
        "down, which makes times less exact.",
    ),
]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipe", metavar="RECIPE...", help="Recipes, methods or JSON files.  [default: balanced]"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="Another option of the recipe, such as layer=3 (of several recipes, those that have it take it); mmaccel methods "
        "NAME lists options. Can be repeated.",
    ),
]
Budgets = Annotated[
    list[float] | None,
    typer.Option(
        "--retain",
        parser=budget,
        metavar="BUDGET...",
        help="Budgets of each recipe: 0.25 is a share of the visual tokens, 64 their number.  [default: its own]",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """The model and how it is loaded."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder, hub id, or short name of one that comes with mmaccel (mini-llava, mini-qwen-vl) or mmaccel-models "
            "(mini-llava-deep, mini-smol).  [default: mini-llava, for videos mini-qwen-vl]",
        ),
    ] = None
    device: Device = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto is as stored, on the CPU float32."),
    ] = "auto"
    attn: Annotated[
        Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4"] | None,
        typer.Option(help="Attention implementation.  [default: that of transformers]"),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False


@dataclass(frozen=True)
class RecipeOptions:
    """One recipe, with its budget and its options."""

    recipe: Annotated[str, typer.Option(metavar="RECIPE", help="Recipe, method, JSON file, or JSON.")] = "balanced"
    retain: Annotated[
        float | None,
        typer.Option(
            parser=budget,
            metavar="BUDGET",
            help="0.25: share of the visual tokens to keep; 64: their number a picture or video.  [default: the recipe's]",
        ),
    ] = None
    set: Settings = None

    def changes(self) -> dict[str, Any]:
        """Changes of a recipe by ``--retain`` and ``--set``. Raises MmaccelError if a text is no option, or its
        value cannot be read."""
        changes: dict[str, Any] = {} if self.retain is None else {"retain": self.retain}
        return changes | settings(self.set)

    def chosen(self) -> Recipe:
        """The recipe, checked. Raises MmaccelError if there is none of that name, or it has no such option."""
        from ...recipe import get_recipe

        recipe = get_recipe(self.recipe).override(**self.changes())
        recipe.build()
        for stage in recipe.stages:
            require_clip(stage.options)
        return recipe


@dataclass(frozen=True)
class DraftOptions:
    """Drafts that the model verifies."""

    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless", help="Answer as the full model does, token for token; the recipe shapes only what drafts."
        ),
    ] = False
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Draft with a smaller model of the same family, or a head: folder or hub id; self: with the model itself.",
        ),
    ] = None
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Draft by copying from the prompt's text and from earlier answers.")
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``accelerate_vlm``; those that were given."""
        return {name: value for name, value in vars(self).items() if value not in (False, None)}


@dataclass(frozen=True)
class AnswerOptions(DraftOptions):
    """Drafts, and further readings of a prompt."""

    fallback: Annotated[
        str | None,
        typer.Option(
            metavar="THRESHOLD",
            help="Read the prompt again with all tokens if a token of the answer is less likely than this, such as 0.9; auto: "
            "as mmaccel tune --fallback has written into the recipe.",
        ),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``accelerate_vlm``; those that were given. Raises MmaccelError if ``--fallback`` is neither a number
        nor ``auto``."""
        if self.fallback is None:
            return super().arguments()
        try:
            threshold = self.fallback == "auto" or float(self.fallback)
        except ValueError:
            raise MmaccelError(
                f"--fallback takes a threshold such as 0.9, or auto, got {self.fallback[:40]!r}."
            ) from None
        return super().arguments() | {"fallback": threshold}


@dataclass(frozen=True)
class DecodeOptions(AnswerOptions):
    """Drafts, further readings, and the memory that holds keys and values."""

    offload: Annotated[
        Literal["host"] | None,
        typer.Option(help="Keep keys and values in host memory, and fetch each layer while the one before computes."),
    ] = None


def settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Options by name, from texts such as ``layer=3``. Raises MmaccelError if a text is no option, its value cannot be read, or
    an option comes twice."""
    changes: dict[str, Any] = {}
    for text in texts or ():
        key, value = _setting(text)
        if key in changes:
            raise MmaccelError(f"--set gives {key} twice, {changes[key]!r} and {value!r}; give one of them.")
        changes[key] = value
    return changes


def _setting(text: str) -> tuple[str, Any]:
    key, sign, written = text.partition("=")
    if not sign or not key:
        raise MmaccelError(f"--set takes OPTION=VALUE, such as --set layer=3, got {text!r}.")
    if key == "retain":
        raise MmaccelError(f"--set {text:.40}: a budget has an option of its own; give --retain {written:.40}.")
    try:
        value = json.loads(written, parse_int=short_int)
    except json.JSONDecodeError:
        return key, written
    except (ValueError, RecursionError) as error:
        raise MmaccelError(f"--set {key}: the value cannot be read ({no_json(error)}); give a shorter one.") from error
    return key, tuple(value) if isinstance(value, list) else value


def rows_of(
    recipes: Sequence[str], budgets: Sequence[float] | None, changes: Mapping[str, Any] | None = None
) -> list[tuple[str, Recipe]]:
    """Every recipe at every budget, once, with a title that no other has; one without a budget just once."""
    from ...core.budget import budget_text

    rows = {}
    for name, base in named(recipes, changes):
        if not budgets or base.primary is None:
            rows[name] = base
            continue
        for share in budgets:
            rows[f"{name} {budget_text(share)}"] = base.override(retain=share)
    return list(rows.items())


def named(recipes: Sequence[str], changes: Mapping[str, Any] | None = None) -> list[tuple[str, Recipe]]:
    """Recipes as they were given, each content once, by names that differ: of files whose recipes have one name, the name of
    the file stands behind it.

    changes : options by name (:func:`settings`). Those that a recipe takes change it, and stand behind its name. Raises
        MmaccelError if no recipe takes one, or its value is not allowed.
    """
    from ...programs.identity import recipe_identity
    from ...recipe import get_recipe
    from ...recipe.recipe import overrides

    given: dict[str, tuple[str, Recipe]] = {}
    for text, one in _changed([(text, get_recipe(text)) for text in recipes], changes or {}):
        for stage in one.stages:
            require_clip(stage.options)
        given.setdefault(recipe_identity(one), (text, one))
    by_name: dict[str, Recipe] = {}
    for text, one in given.values():
        others = [other for other, its in given.values() if its.name == one.name and other != text]
        name, file = one.name, Path(text).name
        if others and text != name:
            name += f" ({text if file in [Path(other).name for other in others] else file})"
        name += "".join(f" {key}={value}" for key, value in (changes or {}).items() if key in overrides(one))
        while name in by_name:
            name += "'"
        by_name[name] = one
    return list(by_name.items())


def _changed(recipes: list[tuple[str, Recipe]], changes: Mapping[str, Any]) -> list[tuple[str, Recipe]]:
    """Recipes with the options that they take."""
    from ...recipe.recipe import overrides

    known = [overrides(one) for _, one in recipes]
    for key, value in changes.items():
        if not any(key in names for names in known):
            raise MmaccelError(
                f"--set {key}={value}: no recipe of this run takes {key!r}; allowed are "
                f"{', '.join(dict.fromkeys(name for names in known for name in names if name != 'retain')) or 'none'}."
            )
    return [
        (text, one.override(**{key: value for key, value in changes.items() if key in names}))
        for (text, one), names in zip(recipes, known, strict=True)
    ]
