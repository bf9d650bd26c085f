"""Find recipes by name, and build them from what a user gives."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ..core.recipe_names import RecipeName
from ..errors import MmaccelError
from ..method.base import Method, Variant, as_dataclass, check_class
from ..method.nearest import suggest
from ..method.registry import methods
from .recipe import OVERRIDES, OwnStage, Positions, Proportional, Recipe, Stage

#: what says what runs: a name (any text, but editors offer the known ones), a method or its class, a stage, a recipe, the
#: content or the path of a JSON file
Part: TypeAlias = RecipeName | str | Path | Method | type[Method] | Stage | Recipe | Mapping[str, Any]
#: the method that takes the folder of a selector, and the file by which such a folder is known
_LEARNED, _SELECTOR = "learned", "selector.json"
#: bytes of a recipe's file at most
_LARGEST = 4 << 20
#: or several of them, in the order of their sites
RecipeLike: TypeAlias = Part | Sequence[Part] | Iterator[Part]


def recipes() -> dict[str, Recipe]:
    """All recipes by name: composed ones, and one for every method alone.

    Raises
    ------
    MmaccelError
        If a method of yours has the name of a composed recipe.

    Examples
    --------
    >>> recipes()["balanced"]
    Recipe('balanced', (Stage('balanced', 0.25),))
    """
    # its recipes ask for their methods, which come from the packages of others too
    from .cookbook import COOKBOOK

    alone = {name: _alone(m, Stage(name, m.default_retain)) for name, m in methods().items()}
    for one in COOKBOOK:
        if one.name in alone:
            taken = methods()[one.name]
            raise MmaccelError(
                f"The method {taken.__module__}.{taken.__qualname__} has the name of the recipe {one.name!r}; choose another."
            )
    return dict(sorted({**alone, **{one.name: one for one in COOKBOOK}}.items()))


def get_recipe(
    which: RecipeLike,
    *,
    retain: float | None = None,
    positions: Positions | None = None,
    variant: Variant | None = None,
    text_retain: float | None = None,
    proportional: Proportional | None = None,
    chunk: int | None = None,
    frames_at_once: int | None = None,
    **options: Any,
) -> Recipe:
    """The recipe that a name, method, stage, mapping, file or list of these describes.

    Parameters
    ----------
    which : the name of a recipe or method; a method with its options, such as ``FastV(layer=3)``, or its class, also one of
        yours that is not registered; a :class:`Stage`; a :class:`Recipe`; its content as a mapping or as JSON, or a JSON file;
        the folder of a selector (see :class:`~mmaccel.Learned`); or several of these, in the order of their sites.
    retain, positions, variant, text_retain, proportional, chunk, frames_at_once, **options : see
        :func:`mmaccel.accelerate_vlm`; None is as the recipe says.

    Raises
    ------
    MmaccelError
        If the name is unknown (the nearest are suggested, in spelling and in what they do), or the content or an option is not
        valid.

    Examples
    --------
    >>> get_recipe("fastv", retain=0.3, layer=3)
    Recipe('fastv', (Stage('fastv', 0.3, {'layer': 3}),))
    >>> get_recipe([DivPrune(), SnapKV(window=16)], retain=0.1)
    Recipe('divprune+snapkv', (Stage('divprune', 0.1), Stage('snapkv', 0.25, {'window': 16})))
    """
    given = {
        "retain": retain,
        "positions": positions,
        "variant": variant,
        "text_retain": text_retain,
        "proportional": proportional,
        "chunk": chunk,
        "frames_at_once": frames_at_once,
    }
    return _recipe(which).override(**{name: value for name, value in given.items() if value is not None}, **options)


def _recipe(which: Any) -> Recipe:
    if isinstance(which, Recipe):
        return which
    if isinstance(which, Stage):
        return Recipe(which.method, (which,))
    if isinstance(which, Method) or (isinstance(which, type) and issubclass(which, Method)):
        return _of_method(which)
    if isinstance(which, Mapping):
        try:
            text = json.dumps(which)
        except (TypeError, ValueError, RecursionError) as error:
            raise MmaccelError(f"The recipe holds what JSON has no word for ({error}); give plain values.") from error
        return Recipe.from_json(text)
    if isinstance(which, (str, Path)) and _is_selector(which):
        return Recipe(
            Path(which).name, (Stage(_LEARNED, methods()[_LEARNED].default_retain, {"selector": str(which)}),)
        )
    if isinstance(which, Path) or (isinstance(which, str) and which.endswith(".json")):
        return Recipe.from_json(_text(Path(which)))
    if isinstance(which, str) and which.lstrip().startswith("{"):
        return Recipe.from_json(which)
    if isinstance(which, str):
        known = recipes()
        if which not in known:
            raise MmaccelError(f"There is no recipe {which!r}{suggest(which, _about(known))}")
        return known[which]
    kind = type(which).__name__
    if any(hasattr(which, name) for name in ("apply_chat_template", "image_processor", "tokenizer")):
        raise MmaccelError(f"A processor ({kind}) is not a recipe; give it as processor=.")
    if isinstance(which, (Sequence, Iterator)):
        return _joined([_recipe(part) for part in which])
    shown = repr(which)
    raise MmaccelError(
        f"{shown if len(shown) < 40 and shown.isprintable() else f'A {kind}'} is not a recipe; give a name, a method such as "
        "FastV(layer=3), several of them, a Recipe, a mapping, or a path to JSON."
    )


def _about(known: Mapping[str, Recipe]) -> dict[str, str]:
    """What each recipe does: its sites and its summary."""
    sites = {name: method.site for name, method in methods().items()}
    return {
        name: " ".join(
            [*dict.fromkeys(sites[stage.method] for stage in one.stages if stage.method in sites), one.summary]
        )
        for name, one in known.items()
    }


def _text(path: Path) -> str:
    """The content of a recipe file, which may be hostile."""
    try:
        about = path.stat()
        if not path.is_file():
            raise MmaccelError(f"Cannot read the recipe {str(path)!r}: it is not a regular file; give a JSON file.")
        if about.st_size > _LARGEST:
            raise MmaccelError(
                f"The recipe {str(path)!r} is larger than {_LARGEST >> 20} MiB; give a JSON file of one."
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, MmaccelError):
            raise
        raise MmaccelError(f"Cannot read the recipe {str(path)!r}: {error}.") from error


def _is_selector(which: str | Path) -> bool:
    """Whether a path is a selector's folder, as ``mmaccel distil`` writes it."""
    try:
        return (Path(which) / _SELECTOR).is_file()
    except (OSError, ValueError):
        return False


def _alone(method: type[Method], stage: Stage) -> Recipe:
    """The recipe of one method."""
    return Recipe(method.name, (stage,), summary=method.summary, paper=method.paper)


def _of_method(which: Method | type[Method]) -> Recipe:
    """The recipe of a method class, or of an instance with its options and its variant."""
    if isinstance(which, Method) and which.official:
        return replace(_of_method(which.by("exact")), variant="official")
    kind = which if isinstance(which, type) else type(which)
    check_class(kind)
    as_dataclass(kind)
    name, retain, options = kind.name, kind.default_retain, {} if isinstance(which, type) else which.options()
    if isinstance(which, Method) and "__dataclass_params__" not in vars(kind):
        return _alone(kind, OwnStage(name, retain, own=which))
    known = methods().get(name) is kind
    return _alone(kind, Stage(name, retain, options) if known else OwnStage(name, retain, options, own=kind))


def _joined(parts: list[Recipe]) -> Recipe:
    """One recipe of the stages of several."""
    if len(parts) == 1:
        return parts[0]
    anchor: int | None = None
    stages: list[Stage] = []
    for part in parts:
        for name in OVERRIDES[1:]:
            value = getattr(part, name)
            if value != getattr(Recipe, name):
                raise MmaccelError(
                    f"Recipe {part.name!r} says {name}={value!r}, which holds for a whole recipe; give it as a keyword beside "
                    "the list."
                )
        if part.anchor is not None:
            anchor = len(stages) + part.anchor
        stages += part.stages
    return Recipe("+".join(part.name for part in parts) or "none", tuple(stages), anchor=anchor)
