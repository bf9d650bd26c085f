"""What a method is: one published idea at one site, a pure function of tensors.

Write a subclass as a frozen dataclass (its fields are the method's options), give it a ``name``, decorate it with
:func:`mmaccel.register`, and use it by name. The base owns guards, budgets, rounding, gathering and positions.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from .budget import resolve
from .errors import MmaccelError
from .reduction import Reduction

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PILImage

    from .families.base import Family

Site = Literal["frames", "encoder", "projector", "layers", "cache"]


@dataclass(frozen=True)
class Tap:
    """Something a method wants to see of the vision tower. A tap nobody asks for does not run.

    kind
        ``cls_attention``: attention the CLS token pays to each patch, mean over heads. ``received_attention``: attention
        each token receives, mean over heads and queries. ``keys``: keys, mean over heads. ``features``: hidden states
        before the projector.
    layers
        tower layers, counted as Python counts; ``None`` stands for the layer whose output the language model reads (for
        towers with windowed attention: the last full-attention layer up to it).
    """

    kind: Literal["cls_attention", "received_attention", "keys", "features"]
    layers: tuple[int | None, ...] = (None,)


@dataclass(frozen=True)
class TokenBatch:
    """The visual tokens a method sees: ``N`` ragged units (segments or whole pictures) padded to ``n`` slots.

    features : ``[N, n, D]``, what the language model would read at these slots (at site ``layers``: hidden states).
    valid : ``[N, n]`` bool. Padding is at the end of a row.
    cells : ``[N, n, 3]`` long, (t, row, column) of each token in its grid; -1 for tokens without a cell (newlines).
    grid : ``[N, 3]`` long, (t, h, w).
    segment : ``[N, n]`` long, which segment (tile, image, frame run) of the unit a token belongs to, counted from 0.
    question, question_valid : ``[N, q, D]`` and ``[N, q]`` bool, the text behind the row's last picture as the language
        model embeds it; only for methods with ``needs_question``.
    signals : what the method's taps saw, per kind: ``cls_attention`` and ``received_attention`` ``[N, layers, n]``,
        ``keys`` and ``features`` ``[N, layers, n, d]``; NaN for tokens without a source in the tower.
        At site ``layers``: what the method's ``look`` returned, ``[N, n]``.
    """

    features: Tensor
    valid: Tensor
    cells: Tensor
    grid: Tensor
    segment: Tensor
    question: Tensor | None = None
    question_valid: Tensor | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)


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

    def official_count(self, retain: float, size: int) -> int:
        """How many of ``size`` tokens the authors' program keeps at the ratio ``retain`` (``rounding="official"``); the base
        never lets it be none, and takes counts as they are. By default the exact rounding."""
        return resolve(retain, size)


class TokenMethod(Method):
    """A method at site ``projector`` or ``layers``: sees units of visual tokens, returns a reduction."""

    #: ``segment``: tiles and frames are reduced one by one; ``picture``: all tokens of an image or clip together
    unit: ClassVar[Literal["segment", "picture"]] = "segment"
    #: whether :attr:`TokenBatch.question` is to be filled
    needs_question: ClassVar[bool] = False

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


@dataclass(frozen=True)
class LayerAttention:
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

    def logits(self, start: int, stop: int) -> Tensor:
        """``[B, Hq, stop - start, K]`` float32 of query rows ``start`` to ``stop``; ``-inf`` where a row may not look."""
        rows, keys, heads = self.query[:, :, start:stop], self.key.shape[2], self.query.shape[1]
        grouped = rows.unflatten(1, (self.key.shape[1], -1)).float()
        logits = torch.einsum("bkgqd,bkld->bkgql", grouped, self.key.float()) * self.scaling
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
    nearest layer at which tokens can be dropped, so that a recipe fits any model.

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
        depth = len(family.text.layers)
        layer = min(max(int(self.layer * depth + 0.5), 1, family.deepstack), depth - 1)
        # methods are frozen dataclasses with a field `layer`
        return dataclasses.replace(self, layer=layer)  # type: ignore[type-var]

    def look(self, attention: LayerAttention) -> dict[str, Tensor]:
        """Figures per key, ``[B, K]`` float32 each. By default ``prompt_attention``: the attention the last prompt token
        pays, mean over heads."""
        last = attention.query.shape[2]
        return {"prompt_attention": attention.attention(last - 1, last).mean((1, 2))}


class EncoderMethod(Method):
    """Merging between the layers of the vision tower; see :mod:`mmaccel.encoders.merging`."""

    site = "encoder"

    @abstractmethod
    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """Tokens to remove before each of ``layers`` layers, so that ``kept`` of ``tokens`` remain."""

    @abstractmethod
    def match(self, metric: Tensor, remove: int, protected: int) -> Tensor:
        """Which token flows into which.

        Parameters
        ----------
        metric : ``[N, T, d]``, keys of the layer, mean over heads.
        remove : tokens to remove.
        protected : leading tokens (CLS) that take no part.

        Returns
        -------
        ``[N, T]`` long: the slot each token flows into; itself when it stays.
        """


@dataclass(frozen=True)
class KeyBatch:
    """What a cache policy sees of one layer at the end of prefill. All keys are post-RoPE.

    keys, values : ``[B, Hkv, K, D]``.
    queries : ``[B, Hq, W, D]``, the last ``W = min(window, new tokens)`` queries of the prompt.
    valid : ``[B, K]`` bool, False for padding (always evicted first).
    visual : ``[B, K]`` bool.
    index : ``[B, K]`` long, the place of each key in the unreduced, padded prompt; ascending.
    scaling : what attention multiplies ``q . k`` with.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    valid: Tensor
    visual: Tensor
    index: Tensor
    scaling: float


class Policy(Method):
    """A method at site ``cache``: scores keys; the base keeps the best visual ones (and text, if a text budget is given)."""

    site = "cache"
    #: how many of the prompt's last queries the policy looks at
    window: int = 0

    @abstractmethod
    def score(self, keys: KeyBatch) -> Tensor:
        """``[B, Hkv, K]`` float: higher stays longer; ``inf`` for keys that must stay."""


class FramesMethod(Method):
    """A method at site ``frames``: works on pixels, before the processor. Applied by :func:`mmaccel.prepare`."""

    site = "frames"
    budget = "adaptive"

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
