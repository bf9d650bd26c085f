"""The call scope: everything that belongs to one call of ``generate`` or one direct forward, and to nothing else.

It lives in a context variable, so two threads, or two models in one thread, never see each other's. What must outlive the
call (original positions, logical lengths) moves to the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from mmaccel_kernels.launch import allowed
from torch import Tensor, nn

from ..core.layout import Layout, Modality, Units
from ..core.reduction import Reduction
from ..core.stats import Stats
from ..errors import MmaccelError

if TYPE_CHECKING:
    from ..accelerate import Accelerator
    from .encoder import Merged
    from .hooks import Step


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


@dataclass(frozen=True)
class Passage:
    """What is left of a prompt with pictures behind one stage of the recipe.

    stage : which stage of the recipe.
    layer : the decoder layer at whose input it works; 0 before the language model.
    reduction : ``[B, S]``, over this stage and all before it.
    units, signals : what the method reduced, and the figures per token that it was shown, ``[N, n]`` (sums over tower layers).
    """

    stage: int
    layer: int
    reduction: Reduction
    units: Units | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)

    def scores(self) -> dict[str, Tensor]:
        """The figures by name at the places of the prompt, ``[B, S]`` float32 on the CPU; NaN where there was none."""
        found = {}
        for name, figures in self.signals.items():
            assert self.units is not None
            flat = figures.float().cpu()
            unit, slot = self.units.valid.nonzero(as_tuple=True)
            found[name] = torch.full(self.reduction.kept.shape, torch.nan)
            found[name][self.units.row[unit], self.units.places[unit, slot]] = flat[unit, slot]
        return found


@dataclass
class Scope:
    """The state of one call.

    ``step`` is set while the language model runs a forward that mmaccel shapes; ``dropped [B, S]`` bool says afterwards which
    rows of the logits stand for tokens that were dropped.
    """

    owner: Accelerator
    stats: Stats
    opened_by: nn.Module | None = None
    cache: Any = None
    encoded: dict[Modality, Encoded] = field(default_factory=dict)
    encoding: Encoded | None = None
    input_ids: Tensor | None = None
    labels: Tensor | None = None
    dropped: Tensor | None = None
    step: Step | None = None
    timer: tuple[Any, str] | None = None
    layout: Layout | None = None
    reduction: Reduction | None = None
    trail: list[Passage] = field(default_factory=list)

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
    _hold((*_scopes.get(), scope))


def pop(scope: Scope) -> None:
    """Close ``scope``, wherever it stands; a forward that it is in the middle of has been broken off."""
    if scope.step is not None and scope.step.state is not None:
        scope.step.state.settle(whole=False)
    _hold(tuple(s for s in _scopes.get() if s is not scope))


def _hold(scopes: tuple[Scope, ...]) -> None:
    """These are open; whether kernels may run is for the innermost to say."""
    _scopes.set(scopes)
    allowed.set(not scopes or scopes[-1].owner.kernels == "auto")


def checked_kernels(kernels: str) -> str:
    """``kernels`` if it is ``"auto"`` or ``"off"``, else refused by name."""
    if kernels not in ("auto", "off"):
        raise MmaccelError(f"kernels={kernels!r} is unknown; give 'auto', or 'off' for plain torch on every device.")
    return kernels
