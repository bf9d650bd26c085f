"""mmaccel: pretrained vision and video LLMs, faster and smaller at inference, without retraining."""

from importlib import import_module
from typing import Any

from .core.lazy import in_stub

# torch and transformers are slow to import, and what only lists names can do without: the rest comes when it is asked for
_LAZY, __all__ = in_stub(__file__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
