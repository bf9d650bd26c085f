"""Methods by name: the built-in ones, those registered by the user, and those of installed packages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TypeVar

from ..errors import MmaccelError
from .base import Method

T = TypeVar("T", bound=type[Method])

#: the entry point group through which another package offers methods
ENTRY_POINTS = "mmaccel.methods"

#: where a method is a file
_ROOMS = ("frames", "encoders", "pruning", "merging", "layers", "kv.policies", "kv.codecs")
_methods: dict[str, type[Method]] = {}
_loaded = False


def register(method: T) -> T:
    """Class decorator: make a method usable by its ``name`` in recipes, ``accelerate_vlm`` and the command line.

    Raises
    ------
    MmaccelError
        If the class has no name, or another method has it already.
    """
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name:
        raise MmaccelError(f"{method.__qualname__} has no `name`; give the class a unique name such as 'my-method'.")
    known = _methods.get(name)
    if known is not None and known.__qualname__ != method.__qualname__:
        raise MmaccelError(f"The name {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another.")
    _methods[name] = method
    return method


def methods() -> dict[str, type[Method]]:
    """All known methods by name, sorted."""
    _load()
    return dict(sorted(_methods.items()))


def method(name: str) -> type[Method]:
    """The method class called ``name``; an unknown name gets the nearest known ones."""
    _load()
    if name not in _methods:
        raise MmaccelError(f"There is no method {name!r}{suggest(name, _methods)}")
    return _methods[name]


def suggest(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` for an unknown name, or the list of what there is: the end of a sentence."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known are {', '.join(known)}."


def _load() -> None:
    global _loaded
    if _loaded:
        return
    _loaded = True
    for room in _ROOMS:
        package = import_module(f"mmaccel.{room}")
        for found in iter_modules(package.__path__):
            if not found.name.startswith("_"):
                import_module(f"{package.__name__}.{found.name}")
    for point in entry_points(group=ENTRY_POINTS):
        # the object may be a method class, or a module that registers its methods when it is imported
        found = point.load()
        if isinstance(found, type) and issubclass(found, Method):
            register(found)
