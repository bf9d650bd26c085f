"""Base of every method: one published idea at one site, as a pure function of tensors.

Write a subclass, give it a ``name``, decorate it with :func:`mmaccel.register`, and use it by name. Its annotated attributes
are its options. Checks, budgets, rounding, gathering and positions are done for it.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

from ..core.budget import resolve
from ..errors import MmaccelError, UnsupportedError
from .limits import Limit, check_options

#: (t, h, w)
Grid = tuple[int, int, int]
Site = Literal["frames", "patches", "encoder", "projector", "layers", "cache", "codec"]
#: ``exact``: what the paper says, and budgets that are met; ``official``: what the authors' program does
Variant = Literal["exact", "official"]
#: ``exact``: keeps what the budget resolves to; ``at_most``: never more; ``adaptive``: the content decides; ``none``: no budget
Budget = Literal["exact", "at_most", "adaptive", "none"]


@dataclass(frozen=True)
class Tap:
    """A quantity of the vision tower that a method needs. The runtime computes only those that some method needs.

    kind
        ``cls_attention``: attention paid by the CLS token to each patch, mean over heads. ``received_attention``: attention
        received by each token, mean over heads and queries. ``patch_attention``: that received from the other patches, mean
        over heads and these. ``keys``: keys, mean over heads. ``features``: hidden states before the projector.
        ``shift``: the length of what the MLP of a layer adds to each token, one number on an axis of its own.
        ``cls_attention_unsplit``, ``keys_unsplit``: as if the tower had a single head of its full width.
    layers
        tower layers, counted as Python counts; ``None`` is the layer whose output the language model reads (for
        towers with windowed attention, for the last layer with full attention up to it). A float is a share of the tower's
        depth, rounded half up (there the nearest layer with full attention, the deeper of two).
    """

    kind: Literal[
        "cls_attention",
        "received_attention",
        "patch_attention",
        "keys",
        "features",
        "shift",
        "cls_attention_unsplit",
        "keys_unsplit",
    ]
    layers: tuple[float | None, ...] = (None,)


class TowerFacts(Protocol):
    """Protocol of the facts of a vision tower that methods may use."""

    name: str
    #: why methods cannot look into its layers, as the end of "the vision tower of ... "; None where they can
    closed: str | None
    #: why tokens cannot merge between its layers; None where they can
    whole: str | None

    @property
    def has_cls(self) -> bool:
        """Whether the tower puts a CLS token in front of the patches."""


class ModelFacts(TowerFacts, Protocol):
    """Protocol of the facts of a model that methods may use; every family provides them."""

    #: the model itself, or what stands for it where only its configuration is at hand
    model: Any
    #: how many layers of the language model add visual features; tokens may be dropped only after them
    deepstack: int
    #: whether RoPE turns queries and keys as two halves, in every layer
    halves: bool
    #: whether some layers of the language model keep a recurrent state where others have attention
    stateful: bool
    #: whether its models are shown sounds
    hears: bool
    #: whether a cache holds a latent of every token in place of keys and values
    latent: bool
    #: why all layers must store the same tokens, as the end of "the language model of ..."; None where they need not
    chosen_above: str | None
    #: why a token cannot run through its layers later than it stands, as the end of "the language model of ..."; or None
    no_return: str | None
    #: why layers of the language model cannot read parts of a prompt apart; None where they can
    undivided: str | None
    #: the number of devices that the heads of a layer are spread over (tensor parallelism)
    ranks: int

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that the model has inputs for, ``image`` and ``video``."""

    @property
    def depth(self) -> int:
        """Number of layers of the language model."""

    def rope_kind(self, layer: int) -> str | None:
        """The kind of RoPE of a layer, where layers of the language model have several; else None."""

    @property
    def attending(self) -> Sequence[int]:
        """Layers of the language model that have attention, rising."""

    def attention_in(self, layer: int) -> Any:
        """The self-attention module of a layer of the language model, with its projections."""

    def outgoing_in(self, layer: int) -> Any:
        """The output projection of the attention of a layer, or None."""

    def experts_in(self, layer: int) -> Any:
        """The experts of a layer, which take the numbers and weights of those that a router chose; None without any."""


def closed_to_clips(family: ModelFacts) -> str | None:
    """The reason why no method can work between frames inside a tower, as the end of "the vision tower of ..."; or None."""
    return family.closed or ("is not shown clips as such" if "video" not in family.modalities else None)


def as_dataclass(cls: type[Method]) -> None:
    """Make a class of methods a frozen dataclass, so that its annotated attributes are its options, unless it is one, or has an
    ``__init__`` of its own or from a base."""
    owner = next(one for one in cls.__mro__ if "__init__" in vars(one))
    if owner is not cls and (owner is object or "__dataclass_params__" in vars(owner)):
        dataclass(frozen=True)(cls)


def check_class(cls: type[Method]) -> None:
    """Raise :class:`MmaccelError` if a class of methods has no name or no site."""
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise MmaccelError(f"{cls.__qualname__} has no `name`; give the class a unique name such as 'my-method'.")
    if not hasattr(cls, "site"):
        raise MmaccelError(
            f"{cls.__qualname__} works at no site; derive it from a base class in mmaccel.method, such as ProjectorMethod."
        )


def check_layers_alone(name: str, family: ModelFacts) -> None:
    """Raise :class:`UnsupportedError` where the layers of ``family`` must store the same tokens, for the method ``name``."""
    if family.chosen_above is not None:
        raise UnsupportedError(
            f"{name} leaves layers with different tokens, and the language model of {family.name} {family.chosen_above}; use "
            "'divprune' or another method before the language model."
        )


class Method(ABC):
    """Base of every method. Class attributes describe the method; instance fields are its options.

    Examples
    --------
    >>> FastV(layer=3).options()
    {'layer': 3}
    >>> FastV.site, FastV.paper
    ('layers', 'arXiv 2403.06764')
    """

    name: ClassVar[str]
    site: ClassVar[Site]
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    budget: ClassVar[Budget] = "exact"
    #: every kept token is a mean, its weights sum to one, and every token with a cell flows into exactly one
    conserves_mass: ClassVar[bool] = False
    #: the authors' program renumbers positions between layers of the language model, which is not offered here
    renumbers_inside: ClassVar[bool] = False
    #: whether prompts may be longer than the positions that the model has
    extends: ClassVar[bool] = False
    #: the factor by which prompts may be longer than the positions that the model has
    stretch: float = 1.0
    #: the default ``retain`` of the recipe that consists of this method alone
    default_retain: ClassVar[float | None] = 0.25
    #: how the authors' program rounds the number of tokens that it keeps, where it is a ratio
    official_rounding: ClassVar[Literal["half up", "down", "half even", "dropped half even"]] = "half up"
    #: sites that no other method of a recipe may work at, and why
    excludes: ClassVar[Mapping[str, str]] = {}
    #: whether a recipe with this method may weigh tokens by what was merged into them (``proportional``)
    weighable: ClassVar[bool] = True
    #: allowed values of options by name, see :data:`~mmaccel.method.limits.Limit`; an option of a ``Literal`` type needs none
    limits: ClassVar[Mapping[str, Limit]] = {}
    #: whether it does what the authors' program does where that differs from the paper; no option, see :meth:`by`
    official: bool = False

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """An instance; a class that nobody has registered becomes a dataclass first, to take its options."""
        as_dataclass(cls)
        return super().__new__(cls)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # a dataclass makes one of its own, which names all options, unless the class has one
        if "__repr__" not in vars(cls):
            cls.__repr__ = Method.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_options(self)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})" + (".by('official')" if self.official else "")

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        if not dataclasses.is_dataclass(self):
            return {}
        own = [f for f in dataclasses.fields(self) if f.init]
        return {f.name: value for f in own if (value := getattr(self, f.name)) != f.default}

    def by(self, variant: Variant) -> Self:
        """This method in the given variant of its recipe. A method with an authors' variant describes it in its
        docstring, in a paragraph that begins with ``variant="official"``."""
        if self.official == (variant == "official"):
            return self
        method = copy.copy(self)
        object.__setattr__(method, "official", variant == "official")
        return method

    def fit(self, family: ModelFacts) -> Method:
        """This method with the options that depend on the model filled in; called once, before :meth:`check`."""
        return self

    def taps(self) -> tuple[Tap, ...]:
        """The quantities of the vision tower that this method needs."""
        return ()

    @property
    def mixes_heads(self) -> bool:
        """Whether the result depends on several KV heads of a layer at once."""
        return False

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when the family lacks what the method needs."""

    def suits(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, when the method taps a closed vision tower, or when
        it compares heads that are on different devices."""
        if family.ranks > 1 and self.mixes_heads:
            raise UnsupportedError(
                f"{self.name} compares the heads of a layer, and these are spread over {family.ranks} devices (tp_plan), each "
                "of which would choose differently; use 'balanced' or another method before the language model, or load the "
                "model with device_map in place of tp_plan."
            )
        if family.closed is not None and self.taps():
            raise UnsupportedError(
                f"{self.name} looks into the vision tower, and that of {family.name} {family.closed}; use 'divprune' or "
                "another method that reads the visual tokens alone."
            )
        self.check(family)

    def conflict(self, other: Method) -> str | None:
        """Reason why a recipe cannot combine this method with ``other``, as part of a sentence; None if it can.

        Asked of every method about every other one, as the recipe has them and again as they are fitted to a model. By default
        the reason in :attr:`excludes`.
        """
        return self.excludes.get(other.site)

    def check_settings(self, positions: str, proportional: str) -> None:
        """Raise :class:`MmaccelError` if the method cannot work with these settings of its recipe."""
        if positions == "paper" and self.renumbers_inside:
            raise MmaccelError(
                f"positions='paper' cannot be used with {self.name!r}: its authors renumber between layers, so that a "
                "token has other positions in every layer's cache; use 'keep'."
            )
        if proportional != "none" and not self.weighable:
            raise MmaccelError(
                f"proportional={proportional!r} is for tokens that are dropped or merged in the tower or behind it, in prompts "
                f"of one piece, and {self.name!r} is not; leave one of them out."
            )

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason why the language model cannot read a prompt in chunks with this method, as the end of "NAME ..."; None
        where it can."""
        return None

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Number of the ``size`` tokens of a picture or clip that the authors' program keeps at the ratio ``retain``.

        Used with ``variant="official"``; the caller raises 0 to 1, and budgets that are counts are taken as they are. By
        default by :attr:`official_rounding`. ``grid`` is (t, h, w) of a picture or clip that is one unit, else None (tiles,
        frames).
        """
        if self.official_rounding == "half up":
            return resolve(retain, size)
        if self.official_rounding == "dropped half even":
            return size - round(size * (1 - retain))
        return int(retain * size) if self.official_rounding == "down" else round(retain * size)

    def require_cls(self, family: TowerFacts, remedy: str) -> None:
        """Raise :class:`UnsupportedError` with a ``remedy`` for vision towers without a CLS token."""
        if not family.has_cls:
            raise UnsupportedError(
                f"{self.name} needs a CLS token, which the vision tower of {family.name} lacks; {remedy}."
            )
