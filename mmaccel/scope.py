"""The call scope: everything that belongs to one call of ``generate`` or one direct forward, and to nothing else.

It lives in a context variable, so two threads, or two models in one thread, never see each other's. What must outlive the
call (original positions, logical lengths) moves to the KV cache.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .layout import Layout, Modality
from .reduction import Reduction
from .stats import Stats

if TYPE_CHECKING:
    from .accelerate import Accelerator
    from .door import Step
    from .encoders.merging import Merged


@dataclass
class Encoded:
    """What one call of ``get_image_features`` or ``get_video_features`` was given, and what the taps saw in it.

    arguments : the call's bound arguments.
    tokens : language model tokens that came out.
    taps : per (kind, tower layer) what each attention call of that layer delivered, in order.
    merged : the encoder-site merge, if the recipe has one.
    """

    arguments: dict[str, Any]
    tokens: int = 0
    taps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    merged: Merged | None = None


@dataclass
class Scope:
    """The state of one call. ``step`` is set while the language model runs a forward that mmaccel shapes."""

    owner: Accelerator
    stats: Stats
    opened_by: nn.Module | None = None
    cache: Any = None
    encoded: dict[Modality, Encoded] = field(default_factory=dict)
    encoding: Encoded | None = None
    input_ids: Tensor | None = None
    labels: Tensor | None = None
    step: Step | None = None
    timer: tuple[Any, str] | None = None
    layout: Layout | None = None
    reduction: Reduction | None = None

    @property
    def generating(self) -> bool:
        """Whether this is a call of ``generate`` (a direct forward opens its scope from a module's hook)."""
        return self.opened_by is None


_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("mmaccel_scopes", default=())


def current(owner: Accelerator | None = None) -> Scope | None:
    """The innermost open scope (of ``owner``, if given), or None."""
    for scope in reversed(_scopes.get()):
        if owner is None or scope.owner is owner:
            return scope
    return None


def push(scope: Scope) -> None:
    """Make ``scope`` the innermost one."""
    _scopes.set((*_scopes.get(), scope))


def pop(scope: Scope) -> None:
    """Close ``scope``, wherever it stands."""
    _scopes.set(tuple(s for s in _scopes.get() if s is not scope))
