"""What every method is: one published idea at one site, a pure function of tensors.

Write a subclass as a frozen dataclass (its fields are the method's options), give it a ``name``, decorate it with
:func:`mmaccel.register`, and use it by name. The base owns guards, budgets, rounding, gathering and positions.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ..core.budget import resolve

#: (t, h, w)
Grid = tuple[int, int, int]
Site = Literal["frames", "encoder", "projector", "layers", "cache", "codec"]


@dataclass(frozen=True)
class Tap:
    """Something a method wants to see of the vision tower. A tap nobody asks for does not run.

    kind
        ``cls_attention``: attention the CLS token pays to each patch, mean over heads. ``received_attention``: attention
        each token receives, mean over heads and queries. ``keys``: keys, mean over heads. ``features``: hidden states
        before the projector. ``cls_attention_unsplit``, ``keys_unsplit``: as if the tower had a single head of its full
        width.
    layers
        tower layers, counted as Python counts; ``None`` stands for the layer whose output the language model reads (for
        towers with windowed attention: the last full-attention layer up to it).
    """

    kind: Literal["cls_attention", "received_attention", "keys", "features", "cls_attention_unsplit", "keys_unsplit"]
    layers: tuple[int | None, ...] = (None,)


class TowerFacts(Protocol):
    """What a method may know of a vision tower."""

    name: str

    @property
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""


class ModelFacts(TowerFacts, Protocol):
    """What a method may know of a model; every family tells it."""

    #: layers of the language model that add visual features, after which tokens may be dropped
    deepstack: int

    @property
    def depth(self) -> int:
        """Layers of the language model."""

    def attention_in(self, layer: int) -> Any:
        """The self-attention module of a layer of the language model, which holds its projections."""


class Method(ABC):
    """Base of every method. Class attributes describe it; instance fields are its options."""

    name: ClassVar[str]
    site: ClassVar[Site]
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    #: ``exact``: kept = resolved; ``at_most``: never more; ``adaptive``: decided by the content
    budget: ClassVar[Literal["exact", "at_most", "adaptive", "none"]] = "exact"
    #: the weights of every kept token sum to the tokens it stands for
    conserves_mass: ClassVar[bool] = False
    #: the authors' program renumbers tokens between layers of the language model, which is not offered
    renumbers_inside: ClassVar[bool] = False
    #: what a recipe made of this method alone keeps by default
    default_retain: ClassVar[float | None] = 0.25

    def fit(self, family: ModelFacts) -> Method:
        """This method with the options that depend on the model filled in; called once, before :meth:`check`."""
        return self

    def taps(self) -> tuple[Tap, ...]:
        """What this method asks of the vision tower."""
        return ()

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when the family lacks what the method needs."""

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """How many of the ``size`` tokens of a picture or clip the authors' program keeps at the ratio ``retain``
        (``rounding="official"``); the base never lets it be none, and takes counts as they are. By default the exact
        rounding.

        ``grid`` is (t, h, w) of a picture or clip that is reduced in one piece, None for one of several (tiles, frames).
        """
        return resolve(retain, size)
