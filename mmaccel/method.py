"""What a method is: one published idea at one site, a pure function of tensors.

Write a subclass as a frozen dataclass (its fields are the method's options), give it a ``name``, decorate it with
:func:`mmaccel.register`, and use it by name. The base owns guards, budgets, rounding, gathering and positions.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from .budget import resolve
from .errors import MmaccelError
from .layout import Unit
from .reduction import Reduction

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PILImage

    from .encoders.tower import Towers
    from .families.base import Family

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


@dataclass(frozen=True)
class TokenBatch:
    """The visual tokens a method sees: ``N`` ragged units (segments or whole pictures) padded to ``n`` slots.

    features : ``[N, n, D]``, what the language model would read at these slots (at site ``layers``: hidden states).
    valid : ``[N, n]`` bool. Padding is at the end of a row.
    cells : ``[N, n, 3]`` long, (t, row, column) of each token in its grid; -1 for tokens without a cell (newlines).
    grid : ``[N, 3]`` long, (t, h, w).
    segment : ``[N, n]`` long, which segment (image, stitched tiles, frame run) of the unit a token belongs to, from 0.
    tile : ``[N, n]`` long, which tile of the unit a token belongs to, counted from 0 in the order of the tower (a clip is
        one); tiles that are stitched together are told apart, a newline belongs to the last one of its row. By default
        the segment.
    tiles : ``[N]`` long, how many tiles the unit has; some may have no token left. By default as many as are seen.
    question, question_valid : ``[N, q, D]`` and ``[N, q]`` bool, the text behind the row's last picture as the language
        model embeds it, or as a text tower does (``[N, q, d]``); only for methods with ``needs_question``.
    entered : ``[N]`` long, tokens of the unit that entered the language model; before it, those there are (the default).
    signals : what the method's taps saw, per kind: ``cls_attention`` and ``received_attention`` ``[N, layers, n]``,
        ``keys`` and ``features`` ``[N, layers, n, d]``; NaN for tokens without a source in the tower.
        At site ``layers``: what the method's ``look`` returned, ``[N, n]``.
        ``patches`` ``[N, n, d]``: with a text tower, the features of the (first) tapped layer in its space.
    """

    features: Tensor
    valid: Tensor
    cells: Tensor
    grid: Tensor
    segment: Tensor
    question: Tensor | None = None
    question_valid: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    tile: Tensor = None  # type: ignore[assignment]
    tiles: Tensor = None  # type: ignore[assignment]
    entered: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.tile is None:
            object.__setattr__(self, "tile", self.segment)
        if self.tiles is None:
            object.__setattr__(self, "tiles", self.tile.masked_fill(~self.valid, -1).amax(1) + 1)
        if self.entered is None:
            object.__setattr__(self, "entered", self.valid.sum(1))


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

    def fit(self, family: Family) -> Method:
        """This method with the options that depend on the model filled in; called once, before :meth:`check`."""
        return self

    def taps(self) -> tuple[Tap, ...]:
        """What this method asks of the vision tower."""
        return ()

    def check(self, family: Family) -> None:
        """Raise :class:`UnsupportedError` when the family lacks what the method needs."""

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """How many of the ``size`` tokens of a picture or clip the authors' program keeps at the ratio ``retain``
        (``rounding="official"``); the base never lets it be none, and takes counts as they are. By default the exact
        rounding.

        ``grid`` is (t, h, w) of a picture or clip that is reduced in one piece, None for one of several (tiles, frames).
        """
        return resolve(retain, size)


class TokenMethod(Method):
    """A method at site ``projector`` or ``layers``: sees units of visual tokens, returns a reduction."""

    #: ``segment``: images, stitched tiles, clips and the frames that a prompt spreads out are reduced one by one;
    #: ``tile``: stitched tiles too; ``picture``: all tokens of an image or clip together
    unit: ClassVar[Unit] = "segment"
    #: whether :attr:`TokenBatch.question` is to be filled
    needs_question: ClassVar[bool] = False

    @property
    def text_tower(self) -> str | None:
        """The CLIP model, as :meth:`TextTower.load` takes it, whose text tower embeds the question; None leaves that to the
        language model. A method that names one taps ``features``."""
        return None

    @abstractmethod
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Choose what stays.

        Parameters
        ----------
        tokens : the units, see :class:`TokenBatch`.
        count : ``[N]`` long, how many tokens of each unit stay, on the device of the tokens.
        """


class ProjectorMethod(TokenMethod):
    """Between the encoder and the language model."""

    site = "projector"


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layerwise:
    """What a method sees of one layer, beside what is true of all layers that see the same tokens.

    memo : what :meth:`once` has found, shared by these layers.
    """

    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def _tokens(self) -> Hashable:
        """What tells apart the tokens that are seen."""
        raise NotImplementedError

    def once(self, make: Callable[..., T], *args: Any) -> T:
        """``make(self, *args)``, for all layers that see the same tokens: it may ask where tokens are and of which kind, not
        what queries, keys and values are, and may wait for the device."""
        # one of other tokens may have been made of this one
        key = make, args, self._tokens
        if key not in self.memo:
            self.memo[key] = make(self, *args)
        found: T = self.memo[key]
        return found


@dataclass(frozen=True)
class LayerAttention(Layerwise):
    """The attention of one language model layer over a prompt, to be looked at in slices; the whole map never exists.

    query : ``[B, Hq, q, D]``, key : ``[B, Hkv, K, D]``, post-RoPE. The prompt's own keys are the last ``q`` of the ``K``.
    visible : ``[B, 1 or Hkv, q, K]`` bool, or None for plain causal attention.
    text : ``[B, q]`` bool, the prompt tokens that are neither visual nor padding.
    """

    query: Tensor
    key: Tensor
    visible: Tensor | None
    scaling: float
    text: Tensor

    @property
    def _tokens(self) -> Hashable:
        return self.query.shape[2], self.key.shape[2]

    @cached_property
    def full_key(self) -> Tensor:
        """``key`` in float32, converted once for all slices, and not at all if nothing looks at them."""
        return self.key.float()

    def logits(self, start: int, stop: int) -> Tensor:
        """``[B, Hq, stop - start, K]`` float32 of query rows ``start`` to ``stop``; ``-inf`` where a row may not look."""
        rows, keys, heads = self.query[:, :, start:stop], self.key.shape[2], self.query.shape[1]
        grouped = rows.unflatten(1, (self.key.shape[1], -1)).float()
        logits = torch.einsum("bkgqd,bkld->bkgql", grouped, self.full_key) * self.scaling
        if self.visible is not None:
            seen = self.visible[:, :, None, start:stop]
        else:
            at = torch.arange(start, stop, device=rows.device) + keys - self.query.shape[2]
            seen = torch.arange(keys, device=rows.device) <= at[:, None]
        return logits.masked_fill(~seen, -torch.inf).reshape(len(rows), heads, -1, keys)

    def attention(self, start: int, stop: int) -> Tensor:
        """``[B, Hq, stop - start, K]``: the softmax of :meth:`logits`; NaN in rows of padding."""
        return self.logits(start, stop).softmax(-1)


class LayerMethod(TokenMethod):
    """Between two layers of the language model: at the input of layer ``layer``.

    ``layer`` is counted from 0 and at least 1; a float is a share of the model's depth, rounded half up and moved to the
    nearest layer at which tokens can be dropped, so that a recipe fits any model. So is a method's default; a number that a
    recipe gives is taken as it is, or refused.

    What :meth:`look` makes of the attention of layer ``layer - 1`` reaches :meth:`reduce` as ``tokens.signals``, gathered
    at the tokens of each unit.
    """

    site = "layers"
    unit = "picture"
    layer: float

    def __post_init__(self) -> None:
        whole = isinstance(self.layer, int)
        if self.layer < 1 if whole else not 0 < self.layer < 1:
            raise MmaccelError(
                f"{self.name} cannot work at layer={self.layer}; give a layer of 1 or more, or a share of the depth "
                "between 0 and 1."
            )

    def fit(self, family: Family) -> Method:
        """A share of the depth becomes a layer."""
        if isinstance(self.layer, int):
            return self
        return self._at(int(self.layer * len(family.text.layers) + 0.5), family)

    def within(self, family: Family) -> LayerMethod:
        """This method at the layer nearest to ``layer`` at which tokens can be dropped."""
        return self._at(int(self.layer), family)

    def _at(self, layer: int, family: Family) -> LayerMethod:
        layer = min(max(layer, 1, family.deepstack), len(family.text.layers) - 1)
        # methods are frozen dataclasses with a field `layer`
        return self if layer == self.layer else dataclasses.replace(self, layer=layer)  # type: ignore[type-var]

    def look(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Figures per key, ``[B, K]`` float32 each. By default ``prompt_attention``: the attention the last prompt token
        pays, mean over heads."""
        last = attention.query.shape[2]
        return {"prompt_attention": attention.attention(last - 1, last).mean((1, 2))}


@dataclass(frozen=True)
class EncoderTokens:
    """What a method sees of one layer of a vision tower, behind its attention: ``N`` tiles or frames of ``T`` tokens.

    Where a projector joins blocks of patches, whole blocks merge, and each is one token here.

    keys : ``[N, T, d]`` float32, the layer's keys, mean over heads; of a block the keys of its patches side by side.
    size : ``[N, T]`` float32, how many patches (or blocks) each token stands for.
    protected : leading tokens (CLS) that take no part.
    depth : the share of the tower's layers that lie before this one.
    cls_attention : ``[N, T]`` float32, the attention that CLS pays in this layer, mean over heads; of a block the sum. Only
        for methods with ``needs_cls``.
    """

    keys: Tensor
    size: Tensor
    protected: int = 0
    depth: float = 0.0
    cls_attention: Tensor | None = None


class EncoderMethod(Method):
    """Merging inside the vision tower, between attention and MLP; see :mod:`mmaccel.encoders.merging`.

    In front of a language model a budget counts the tokens that it reads of a picture or clip, newlines included, and is met
    exactly; of an encoder that stands alone it counts the patches of a picture.
    """

    site = "encoder"
    #: merged tokens weigh as many patches in attention as they stand for (the logarithm is added to the logits)
    proportional: ClassVar[bool] = True
    #: whether :attr:`EncoderTokens.cls_attention` is to be filled
    needs_cls: ClassVar[bool] = False

    def check(self, family: Towers) -> None:
        """As :meth:`Method.check`; the towers may be those of an encoder that stands alone."""

    @abstractmethod
    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """Tokens to remove in each of ``layers`` layers, so that ``kept`` of ``tokens`` remain; CLS does not count."""

    def fewest(self, tokens: int, layers: int) -> int:
        """What :meth:`schedule` can leave of ``tokens`` at least; by default each layer halves them. A language model's budget
        below that is met behind the tower."""
        return max(1, -(-tokens // 2**layers))

    @abstractmethod
    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        """``[N, T]`` long: the slot each token flows into; itself for all but ``remove`` of them."""

    def weigh(self, tokens: EncoderTokens, target: Tensor) -> Tensor:
        """``[N, T]`` float32: with which weight each token enters the slot ``target [N, T]`` it flows into.

        By default means, weighted by the patches that tokens stand for.
        """
        total = torch.zeros_like(tokens.size).scatter_add_(1, target, tokens.size)
        return tokens.size / total.gather(1, target)


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

    def check(self, family: Family) -> None:
        """Raise where options cannot be combined."""
        if self.shared and self.choice("head_budget")[0] != "uniform":
            raise MmaccelError(f"{self.name} keeps the same keys for all heads; leave out head_budget.")
        if self.text_policy:
            from .kv.eviction import plain_policy

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


class FramesMethod(Method):
    """A method at site ``frames``: works on pixels, before the processor. Applied by :func:`mmaccel.prepare`."""

    site = "frames"
    budget: ClassVar[Literal["exact", "at_most", "adaptive", "none"]] = "adaptive"
    #: what :meth:`clip` makes is ``frames[choose(frames)]``, and need not be made twice
    only_chooses: ClassVar[bool] = False

    @abstractmethod
    def picture(self, image: PILImage, retain: float) -> PILImage:
        """One picture."""

    @abstractmethod
    def clip(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """The frames of one clip, ``[T, H, W, 3]`` uint8."""

    def choose(self, frames: np.ndarray, retain: float) -> np.ndarray:
        """Which of ``frames [T, H, W, 3]`` the result of :meth:`clip` shows, ``[T']`` ascending; by default all.

        A method that drops frames overrides it, so that time stamps stay right.
        """
        import numpy as np

        return np.arange(len(frames))
