"""Extra models of methods: loaded by the caller, or loaded once by mmaccel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary


class Loaded:
    """A loaded model as the value of an option: it stays the caller's, is never copied with a recipe, and has no JSON.

    Examples
    --------
    >>> Loaded(model)
    <LlavaForConditionalGeneration>
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @staticmethod
    def of(value: Any) -> Any:
        """``value``, wrapped if it is a model."""
        # recipes are made without torch
        return Loaded(value) if hasattr(value, "named_parameters") else value

    def __repr__(self) -> str:
        return f"<{type(self.model).__name__}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loaded) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)

    def __deepcopy__(self, memo: Any) -> Loaded:
        return self


#: what was loaded and is still in use, by where it was loaded from
_parts: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_keepers: WeakSet[KeepLoaded] = WeakSet()
_lock = threading.RLock()


def load_once(kind: str, name: str, where: tuple[str, ...], load: Callable[[], Any]) -> Any:
    """Load a draft or text tower once and share it as long as anybody uses it.

    kind, name, where : what is loaded, from which folder or hub id, and on which device or in which dtype. A folder counts
        with names, sizes and times of its files: after a change it is loaded anew.
    """
    with _lock:
        key = kind, where, *content_of(name)
        part = _parts.get(key)
        if part is None:
            part = _parts[key] = load()
        for keeper in _keepers:
            keeper.parts[id(part)] = part
        return part


def keep(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return what an active :class:`KeepLoaded` holds under ``key``; else a new one, which all active ones then hold."""
    with _lock:
        part = next((keeper.parts[key] for keeper in _keepers if key in keeper.parts), None)
        part = make() if part is None else part
        for keeper in _keepers:
            keeper.parts[key] = part
        return part


class KeepLoaded:
    """Keep what :func:`load_once` and :func:`keep` return until this object is deleted, or to the end of its ``with`` block."""

    def __init__(self) -> None:
        self.parts: dict[Hashable, Any] = {}
        with _lock:
            _keepers.add(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        with _lock:
            _keepers.discard(self)
            self.parts.clear()


def content_of(name: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    """Identity of the source of a model: the resolved folder ``name`` with names, sizes and times of its files; or a hub id
    as it is, without files."""
    folder = Path(name)
    try:
        if not folder.is_dir():
            return name, ()
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        return str(folder.resolve()), tuple((name, about.st_size, about.st_mtime_ns) for name, about in files)
    except (OSError, ValueError):
        # who loads from it says what is wrong
        return name, ()
