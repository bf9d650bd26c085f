"""The base classes of methods, one file per site, and the registry of methods by name."""

from importlib import import_module
from typing import Any

from ..core.lazy import in_stub

# most of the files import torch, which the registry and the base of all can do without
_LAZY, __all__ = in_stub(__file__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
