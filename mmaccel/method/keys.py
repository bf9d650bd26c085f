"""Methods on the KV cache: what a policy sees, what it can be combined with, and what it returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import MmaccelError
from .base import Method, ModelFacts
from .layers import LayerAttention, Layerwise
from .registry import method


@dataclass(frozen=True)
class KeyBatch(Layerwise):
    """What a cache policy sees of one layer, at the end of prefill or while decoding. All keys are post-RoPE.

    While decoding, where heads store different keys, every (row, KV head) comes as a row of its own.

    keys, values : ``[B, Hkv, K, D]``.
    queries : ``[B, Hq, W, D]``, the last ``W = min(window, new tokens)`` queries; while decoding the last seen.
    places : ``[B, W]`` long, the places of the queries, -1 for padding; by default those of the last keys.
    valid : ``[B, K]`` bool, False for padding (always evicted first), which is in front.
    visual : ``[B, K]`` bool.
    index : ``[B, K]`` long, the place of each key in the unreduced, padded sequence; ascending.
    scaling : what attention multiplies ``q . k`` with.
    received : ``[B, Hkv, K]`` float32, what the policy's :meth:`Policy.observe` made; None if it observes nothing.
    count : ``[B]`` long, how many of the keys that compete stay in each row (at a prompt the mean over layers and heads).
    picture, cells : ``[B, K]`` and ``[B, K, 3]`` long, which picture or clip a visual key is of and its (t, row, column);
        -1 for text, and for visual keys without a cell (newlines).
    survivors : ``[B, K]`` bool, keys whose tokens reach the last layer; None unless the policy is ``deferred``.
    expected : mean ``[B, Hq, D]`` and covariance ``[B, Hq, D, D]``, float32, of the queries to come, if they are like those of
        the prompt; None unless the policy looks into the ``future``.
    outgoing : ``[B, Hkv, K]`` float32, the L1 norm of each value behind the layer's output projection, mean over the query
        heads of its key head; None unless the policy ``needs_outgoing``.
    layer, depth : which layer this is, and how many there are.
    decoding : whether this is a decode step, not the end of a prompt.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    valid: Tensor
    visual: Tensor
    index: Tensor
    scaling: float
    places: Tensor = None  # type: ignore[assignment]
    received: Tensor | None = None
    count: Tensor | None = None
    picture: Tensor | None = None
    cells: Tensor | None = None
    survivors: Tensor | None = None
    expected: tuple[Tensor, Tensor] | None = None
    outgoing: Tensor | None = None
    layer: int = 0
    depth: int = 1
    decoding: bool = False

    @property
    def _tokens(self) -> Hashable:
        return self.index

    def __post_init__(self) -> None:
        if self.places is None:
            first = self.index.shape[1] - self.queries.shape[2]
            own = self.index[:, first:].masked_fill(~self.valid[:, first:], -1)
            object.__setattr__(self, "places", own)


#: what the options of a cache stage that choose by name know, with the default of the number behind the colon
CHOICES: Mapping[str, Mapping[str, float | None]] = {
    "layer_budget": {
        "uniform": None,
        "pyramid": 20.0,
        "sparsity": 0.0,
        "entropy": None,
        "prefix": None,
        "variance": None,
    },
    "head_budget": {"uniform": None, "adaptive": 0.2, "concentrated": 0.2, "safeguard": 0.2},
    "compact": {
        "evict": None,
        "pivot": None,
        "weighted": None,
        "average": None,
        "nearest": None,
        "ema": 0.5,
        "blend": None,
    },
    "protect": {"separators": None, "question": None},
}

#: the least and the most that number can be: a share, unless it says otherwise here
LIMITS: Mapping[str, tuple[float, float]] = {"pyramid": (0.5, 1e6)}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """What every cache policy can be combined with; the base carries it out.

    Parameters
    ----------
    layer_budget : how the budget is split over layers; the mean is what ``retain`` says. ``uniform``; ``pyramid:20``
        (PyramidKV: an arithmetic row whose last layer has a 20th of the mean); ``sparsity`` (VL-Cache: the more, the less
        sparse the attention of the text behind the pictures; ``sparsity:0.8`` gives 80 % uniformly and the rest so);
        ``entropy`` (MEDA: the more, the more evenly attention is spread); ``prefix`` (PrefixKV: one share of the summed
        scores for all layers); ``variance`` (D2O: the more, the less the scores vary). All but the first two are settled
        when the forward is over.
    head_budget : how a layer's budget is split over its KV heads. ``uniform``; ``adaptive:0.2`` (AdaKV: heads compete, 20 %
        is given uniformly); ``concentrated:0.2`` (the same, and heads whose attention is concentrated count more);
        ``safeguard:0.2`` (the same where the best 20 % of each head stay and the rest compete).
    compact : what becomes of keys that do not stay. ``evict``; merged into the kept key of the largest cosine: ``pivot``,
        ``weighted``, ``average`` (LOOK-M), ``ema:0.5`` (D2O); or into the ``nearest`` in the sequence (Elastic Cache).
    every : 0 compacts at the end of prefill only; n also every n decode steps, back to what prefill left.
    cap : keys each head of a layer may hold, of all turns together, instead of what prefill left; 0 for none.
    growth : keys by which that limit grows with every decoded token.
    chunk : neighbouring keys that stay or go together, as in ChunkKV, arXiv 2502.00299 (10 there): each counts as the mean
        over its chunk and over heads. A chunk never holds keys of two pictures, or text and visual keys. 0 for none.
    sinks : keys at the start of the sequence that always stay.
    recent : newest keys that always stay; an int is a count, a float a share of the keys.
    protect : visual keys without a cell (``separators``), text behind the last picture (``question``), that always stay.
    joint : text and visual keys share one budget, which is then ``retain`` of all keys.
    text_policy : the policy, by name, that ranks text keys where they have a budget (``text_retain``); by default this one.

    Keys that always stay come out of the budget first; the budget holds even so. While decoding, visual keys make room for
    new ones, and text does only where it has a budget (``text_retain`` or ``joint``): without one a long answer outgrows
    ``every`` and ``cap`` once no visual key is left.
    """

    layer_budget: str = "uniform"
    head_budget: str = "uniform"
    compact: str = "evict"
    every: int = 0
    cap: int = 0
    growth: float = 0.0
    chunk: int = 0
    sinks: int = 0
    recent: float = 0
    protect: tuple[str, ...] = ()
    joint: bool = False
    text_policy: str = ""

    def __post_init__(self) -> None:
        for option in ("layer_budget", "head_budget", "compact"):
            self.choice(option)
        for kind in self.protect:
            if kind not in CHOICES["protect"]:
                raise MmaccelError(f"protect={kind!r} is unknown; it can be {' or '.join(CHOICES['protect'])}.")
        for option in ("every", "cap", "growth", "chunk", "sinks", "recent"):
            if not getattr(self, option) >= 0:
                raise MmaccelError(f"{option}={getattr(self, option)} cannot be negative; give 0 or more.")
        if isinstance(self.recent, float) and self.recent > 1:
            raise MmaccelError(f"recent={self.recent} is a share above 1; for a count of keys give an int.")

    def choice(self, option: str) -> tuple[str, float | None]:
        """The name and the number behind the colon of an option such as ``pyramid:20``."""
        name, colon, number = getattr(self, option).partition(":")
        known = CHOICES[option]
        if name not in known or (colon and known[name] is None):
            raise MmaccelError(f"{option}={getattr(self, option)!r} is unknown; it can be {', '.join(known)}.")
        try:
            value = float(number) if colon else known[name]
        except ValueError as error:
            raise MmaccelError(f"{option}={getattr(self, option)!r}: behind the colon stands a number.") from error
        least, most = LIMITS.get(name, (0.0, 1.0))
        # not a number is in no range
        if value is not None and not least <= value <= most:
            raise MmaccelError(
                f"{option}={getattr(self, option)!r}: behind the colon stands a number from {least:g} to {most:g}."
            )
        return name, value

    @property
    def scheduled(self) -> bool:
        """Whether anything happens while decoding."""
        return self.every > 0 or self.cap > 0


class Policy(CacheOptions, Method):
    """A method at site ``cache``: scores keys; the base splits the budget, keeps the best and compacts the rest."""

    site = "cache"
    #: how many of the prompt's last queries the policy looks at
    window: int = 0
    #: all heads score alike, so that a layer stores the same keys for each
    shared: ClassVar[bool] = False
    #: scores when the forward is over, when it is known which tokens reach the last layer
    deferred: ClassVar[bool] = False
    #: over how many positions to come :attr:`KeyBatch.expected` is an average; 0 leaves it None
    future: int = 0
    #: whether :attr:`KeyBatch.outgoing` is to be filled
    needs_outgoing: ClassVar[bool] = False

    @abstractmethod
    def score(self, keys: KeyBatch) -> Tensor:
        """``[B, Hkv, K]`` float: higher stays longer; ``inf`` for keys that must stay."""

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        """Figures per key that the attention of a forward gives, ``[B, Hkv, K]`` float32.

        They reach :meth:`score` as ``keys.received``, and stay with the cache while a schedule is on: ``before`` holds
        those of the last forward, zero for new keys. By default a policy observes nothing.
        """
        raise NotImplementedError

    def check(self, family: ModelFacts) -> None:
        """Raise where options cannot be combined."""
        if self.shared and self.choice("head_budget")[0] != "uniform":
            raise MmaccelError(f"{self.name} keeps the same keys for all heads; leave out head_budget.")
        if self.text_policy:
            plain_policy(self.text_policy)

    def recall(
        self, paid: Tensor, before: Tensor | None, visual: Tensor, count: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """For policies that drop nothing for good: which visual keys a decode step reads in the layers from ``layer`` on.

        Parameters
        ----------
        paid, before : ``[B, n]`` float32, attention each place of the prompt receives in layer ``layer - 1`` from the token
            of this step and received at the last one; mean over heads.
        visual : ``[B, n]`` bool, the places that hold visual keys.
        count : ``[B]`` long, how many of them are to be read.
        chosen : ``[B, n]`` bool, what the last step read.
        """
        raise NotImplementedError

    @property
    def recalls(self) -> bool:
        """Whether :meth:`recall` is to be called at every decode step."""
        return type(self).recall is not Policy.recall

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` is to be called."""
        return type(self).observe is not Policy.observe


def plain_policy(name: str) -> Policy:
    """The policy that ranks text keys, with its default options.

    Raises
    ------
    MmaccelError
        If it needs more than keys and values.
    """
    made = method(name)()
    if not isinstance(made, Policy) or made.window or made.observes or made.deferred:
        raise MmaccelError(
            f"text_policy={name!r} cannot rank text keys: it must be a cache policy that needs keys only, such as "
            "'streaming-llm'."
        )
    return made
