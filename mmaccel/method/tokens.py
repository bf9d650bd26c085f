"""Base of methods that reduce visual tokens, and their input."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from ..core.layout import Unit
from ..core.reduction import Reduction
from .base import Method

M = TypeVar("M", bound="TokenMethod")
#: what is known of the number of tokens that stay before the tokens themselves are
Foreseen = Literal["budget", "grid", "limit", "nothing"]


@dataclass(frozen=True)
class TokenBatch:
    """The visual tokens to reduce: ``N`` ragged units (segments, tiles or pictures) padded to ``n`` slots.

    features : ``[N, n, D]``, what the language model would read at these slots (at site ``layers``: hidden states).
    valid : ``[N, n]`` bool. Padding is at the end of a row.
    cells : ``[N, n, 3]`` long, (t, row, column) of each token in its grid; -1 for tokens without a cell (newlines, sounds).
    grid : ``[N, 3]`` long, (t, h, w).
    segment : ``[N, n]`` long, the segment (image, stitched tiles, run of frames) of the unit a token belongs to, from 0. In
        units that are rows the run of visual tokens, or of sounds, without anything between.
    tile : ``[N, n]`` long, the tile of the unit a token belongs to, counted from 0 in the order of the tower (a clip is one
        tile). Stitched tiles have numbers of their own; a newline belongs to the last tile of its row. By default the segment.
    tiles : ``[N]`` long, how many tiles the unit has; some may have no token left. By default the highest ``tile`` and one.
    question, question_valid : ``[N, q, D]`` and ``[N, q]`` bool, the text after the row's last picture as the language
        model embeds it, or as a text tower does (``[N, q, d]``); only for methods with ``needs_question``. At site ``layers``
        the hidden states of that text, and ``question_signals`` ``[N, q]`` what the method's ``look`` returned of it.
    until : ``[N, n]`` long, the last frame of all that was merged into a token, by default its own; only for methods with
        ``needs_spans``.
    entered : ``[N]`` long, how many tokens of the unit entered the language model; by default the valid ones.
    clips : of each unit, whether it is a clip, or several frames of one; by default those whose grid has more than one.
    left : ``[N, c]`` long on the CPU, how many tokens of the unit there were before the method's first layer and behind every
        layer at which it has worked; by default the valid ones.
    signals : by kind of tap, attention ``[N, layers, n]``, ``keys`` and ``features``
        ``[N, layers, n, d]``; NaN for tokens without a source in the tower.
        At site ``layers``: what the method's ``look`` returned, ``[N, n]``.
        Marks, ``[N, n]``: NaN where there is none.
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
    question_signals: Mapping[str, Tensor] = field(default_factory=dict)
    until: Tensor = None  # type: ignore[assignment]
    left: Tensor = None  # type: ignore[assignment]
    clips: Sequence[bool] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        defaults: dict[str, Callable[[], Any]] = {
            "tile": lambda: self.segment,
            "tiles": lambda: self.tile.masked_fill(~self.valid, -1).amax(1) + 1,
            "until": lambda: self.cells[..., 0],
            "entered": lambda: self.valid.sum(1),
            "left": lambda: self.valid.sum(1, keepdim=True).cpu(),
            "clips": lambda: (self.grid[:, 0] > 1).tolist(),
        }
        for name, make in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, make())

    @cached_property
    def celled(self) -> Tensor:
        """``[N, n]`` bool: the valid tokens that have a cell; newlines and class tokens have none."""
        return self.valid & (self.cells >= 0).all(-1)

    def select(self, rows: Sequence[int] | slice) -> TokenBatch:
        """Only these units; views of the tensors for a slice."""

        def of(held: Any) -> Any:
            if held is None:
                return None
            if isinstance(held, Mapping):
                return {name: of(x) for name, x in held.items()}
            return held[rows] if isinstance(held, Tensor) or isinstance(rows, slice) else [held[row] for row in rows]

        return TokenBatch(**{one.name: of(getattr(self, one.name)) for one in fields(self)})


def by_row(reduce: Callable[[M, TokenBatch, Tensor], Reduction]) -> Callable[[M, TokenBatch, Tensor], Reduction]:
    """A :meth:`TokenMethod.reduce` that a CPU runs for one unit after the other: the tensors of one unit stay in its cache, so
    that a unit costs in a batch what it costs alone. Elsewhere all units are reduced together."""

    @functools.wraps(reduce)
    def each(self: M, tokens: TokenBatch, count: Tensor) -> Reduction:
        if tokens.valid.device.type != "cpu" or len(count) < 2:
            return reduce(self, tokens, count)
        rows = (slice(row, row + 1) for row in range(len(count)))
        return Reduction.stacked([reduce(self, tokens.select(row), count[row]) for row in rows])

    return each


class TokenMethod(Method):
    """A method at site ``projector`` or ``layers``: it gets units of visual tokens and returns a reduction."""

    #: what is one unit. ``segment``: an image, its stitched tiles, a clip, or a frame that the prompt separates from its clip;
    #: ``tile``: each stitched tile by itself; ``picture``: all tokens of an image or clip; ``row``: all pictures, clips and
    #: sounds of a row
    unit: ClassVar[Unit] = "segment"
    #: whether :attr:`TokenBatch.question` is to be filled
    needs_question: ClassVar[bool] = False
    #: whether a text tower embeds every token of the question, not the whole
    by_word: ClassVar[bool] = False
    #: whether features and question are shown as the language model's last norm leaves them
    last_norm: ClassVar[bool] = False
    #: whether sounds are among the tokens of its units, which are rows, with a signal ``sound_attention [N, n]``: the attention
    #: that each receives in the last layer of the sound tower, NaN for visual tokens
    needs_sounds: ClassVar[bool] = False
    #: whether :attr:`TokenBatch.until` is to be filled
    needs_spans: ClassVar[bool] = False
    #: the CLIP model, as :meth:`TextTower.load` takes it, whose text tower embeds the question; with None the language model
    #: does. A method that names one also taps ``features``
    text_tower: ClassVar[str | None] = None
    #: whether it works at several layers, and its budget is what these have on average; the content then decides how many
    #: tokens are left in the end
    spreads: ClassVar[bool] = False
    #: marks of earlier stages that are to be among :attr:`TokenBatch.signals`, where a stage has made them
    reads: ClassVar[tuple[str, ...]] = ()

    @property
    def foreseen(self) -> Foreseen:
        """Source of the number of kept tokens in advance: the ``budget``; budget and ``grid`` without the
        features; a ``limit``; or ``nothing``."""
        known: dict[str, Foreseen] = {"exact": "budget", "at_most": "limit"}
        return known.get(self.budget, "nothing")

    def marks(self, tokens: TokenBatch) -> dict[str, Tensor]:
        """Named figures ``[N, n]`` of the tokens, float32, which :meth:`reduce` is shown among the signals, and so is every
        later stage that :attr:`reads` them. By default none."""
        return {}

    def remark(self, tokens: TokenBatch) -> str:
        """A note about this call for the statistics; mostly empty."""
        return ""

    @abstractmethod
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Choose the tokens that stay, and what flows into them.

        Parameters
        ----------
        tokens : the units, see :class:`TokenBatch`.
        count : ``[N]`` long, how many tokens of each unit are to stay, on the device of the tokens.
        """


class ProjectorMethod(TokenMethod):
    """A method between the vision tower's projector and the language model."""

    site = "projector"


class Ranking(TokenMethod):
    """A method that keeps the tokens with the highest values of one signal; tokens without a value are dropped first.

    The signal is ``[N, n]``, or a tap ``[N, layers, n]``, which is summed over layers.
    """

    #: name of the signal
    ranks_by: ClassVar[str]

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """The ``count [N]`` highest; equal values favour the lower slot."""
        score = tokens.signals[self.ranks_by].float()
        return Reduction.top(score.sum(1) if score.dim() == 3 else score, tokens.valid, count)
