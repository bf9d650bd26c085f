"""The state of one call of ``generate`` or one direct forward.

It lives in a context variable, so two threads, or two models in one thread, never see each other's. What must outlive the
call (original positions, logical lengths) moves to the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, overload

from mmaccel_kernels.launch import allowed
from torch import Tensor, nn

from ...core.figures import CallStats
from ...core.layout import Modality
from ...core.stats import Stats
from ...families.base import Continued
from ...kv.cache import bare_bytes, cache_bytes, state_of
from ...kv.static_view import StaticView
from .forward import PromptResult
from .plan import Plan
from .runs import Runs
from .vision_output import TapReader, VisionOutput

P = TypeVar("P", bound=Plan)
S = TypeVar("S")


@dataclass
class CallInputs:
    """Arguments that the model was called with.

    opened_by : the module whose direct forward this is; None for a call of ``generate``.
    given : all arguments, where a draft model reads them.
    input_ids : ``[B, S]`` of the forward that is being run. given_length : tokens of the ids that ``generate`` was given.
    mask : the attention mask ``[B, S]`` that the inner model was called with.
    extra : arguments of the model, beside those of the towers, that its family needs for the layout.
    clips : the pixels of clips, for families whose towers have one function for pictures and clips.
    labels : a copy of the caller's labels; those predicted from dropped tokens are set to -100.
    block : the most tokens of a step that may be captured: several where drafts of mmaccel's are verified, none where
        ``generate`` verifies candidates of an assistant or of prompt lookup.
    reads_all : whether the model verifies drafts for the bare model's answer over a cache that drafts read sparsely.
    tokenizer : of the caller, for stop strings.
    states : for a head that drafts, hidden states ``[B, n, D]`` of the last tokens of the forward before, and how many tokens
        the cache held behind it.
    """

    opened_by: nn.Module | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    input_ids: Tensor | None = None
    given_length: int | None = None
    mask: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    clips: Tensor | None = None
    labels: Tensor | None = None
    block: int = 1
    reads_all: bool = False
    tokenizer: Any = None
    states: tuple[Tensor, int] | None = None


@dataclass
class VisionState:
    """The vision towers in one call.

    taps : reads attention and features of the towers for methods.
    outputs : the pictures and clips that were encoded in this call. running : those that are being encoded.
    sounds : where a method is guided by sounds, the attention that each token of those encoded last receives, ``[n]`` float32.
    """

    taps: TapReader
    outputs: dict[Modality, VisionOutput] = field(default_factory=dict)
    running: VisionOutput | None = None
    sounds: Tensor | None = None


@dataclass
class TextState:
    """The text model in one call.

    runs : the stages of the recipe in the forward that is being run, if mmaccel shapes it.
    forwards : how many forwards there were before.
    timer : when the forward began, and the name under which its time is counted.
    dropped : ``[B, S]`` bool, which rows of the logits belong to dropped tokens; set when the forward is over.
    counted : the statistics of this call while it reads its prompt again, as it does at every step without a cache, which is
        not counted again.
    """

    runs: Runs | None = None
    forwards: int = 0
    timer: tuple[Any, str] | None = None
    dropped: Tensor | None = None
    counted: Stats | None = None


@dataclass
class ExpectedTokens:
    """Limit of new tokens of ``generate`` (None where it has none), and the tokens that the cache has seen at that limit."""

    new: int | None = None
    until: int | None = None

    def after(self, seen: int) -> int | None:
        """Number of tokens that may follow when the cache has ``seen`` those of this forward; None if unknown."""
        if self.new is None:
            return None
        if self.until is None:
            # this is the first forward of the call; the last token that is made is not seen
            self.until = seen + self.new - 1
        return max(0, self.until - seen)


class Observer(Protocol):
    """Sees the attention of every layer in a pass that stores nothing."""

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Called with ``query [B, Hq, q, D]``, ``key`` and ``value [B, Hkv, q, D]`` of layer ``number``, behind RoPE; returns
        the keys, the values and the mask ``[B, 1 or Hkv, q, K]`` bool to attend with, None for the model's own."""


@dataclass
class Call(Generic[P]):
    """One call of the model, or encoder, that ``plan`` was made for.

    observer : sees the attention of the pass that is being run, if it is a look ahead.
    result : the last prompt with pictures, and the tokens that are left of it.
    states : states of mechanisms during the call, by class; see :meth:`state`.
    """

    plan: P
    stats: Stats
    vision: VisionState
    inputs: CallInputs = field(default_factory=CallInputs)
    cache: Any = None
    text: TextState = field(default_factory=TextState)
    expected: ExpectedTokens = field(default_factory=ExpectedTokens)
    observer: Observer | None = None
    result: PromptResult | None = None
    states: dict[type, Any] = field(default_factory=dict)

    def state(self, kind: type[S]) -> S:
        """The state that a mechanism keeps in this call; made on first use."""
        state: S = self.states[kind] if kind in self.states else self.states.setdefault(kind, kind())
        return state

    def begin_forward(self, ids: Tensor | None, cache: Any) -> None:
        """Note that the model is given ``ids [B, q]``; a prompt that is read again is not counted again."""
        again = self.text.forwards and ids is not None and ids.shape[1] > 1
        if again and (cache is None or not cache.get_seq_length()):
            self.text.counted, self.stats = self.stats, Stats(self.stats.recipe, clock=self.stats.clock)

    def end_forward(self) -> None:
        """Note that a forward of the text model is over."""
        self.text.forwards += 1
        self._count_again()

    def _count_again(self) -> None:
        if self.text.counted is not None:
            self.stats, self.text.counted = self.text.counted, None

    @property
    def generating(self) -> bool:
        """Whether this is a call of ``generate`` (a direct forward opens its call from a module's hook)."""
        return self.inputs.opened_by is None

    def continued(self, cache: Any = None) -> Continued | None:
        """The kept cache that this call continues, or None; see :class:`mmaccel.families.base.Call`."""
        state = state_of(cache if cache is not None else self.cache)
        if state is None or state.seen == 0:
            return None
        follows = state.positions.next_turn()
        return None if follows.offset is None else Continued(state.seen, follows.offset, follows.ahead)

    @property
    def static_view(self) -> StaticView | None:
        """Static view of this call's cache, while its steps are captured."""
        state = state_of(self.cache)
        return None if state is None else state.shared.static_view

    def trim(self) -> None:
        """Give back the room that the cache made for further tokens: none come in this call."""
        if (state := state_of(self.cache)) is not None:
            state.unpin()
            state.trim()

    def figures(self, config: Any) -> CallStats:
        """The statistics so far of a call of a model whose text model has this ``config``."""
        self._count_bytes(config)
        return self.stats.as_dict()

    def _count_bytes(self, config: Any) -> None:
        if self.cache is not None:
            self.stats.kv_bytes = cache_bytes(self.cache)
            self.stats.kv_bytes_bare = bare_bytes(self.cache, config)

    def finish(self, config: Any) -> None:
        """End the call of a model whose text model has this ``config``: free tensors that were needed only while it ran."""
        if (state := state_of(self.cache)) is not None:
            state.unpin()
        self._count_again()
        self._count_bytes(config)
        self._note_offload()
        self.vision.outputs.clear()
        self.vision.running = self.vision.sounds = self.cache = None
        self.inputs, self.text = CallInputs(opened_by=self.inputs.opened_by), TextState()
        self.states.clear()

    def _note_offload(self) -> None:
        """Complete the figures of keys and values in host memory."""
        figures, state = self.stats.offload, state_of(self.cache)
        if not figures or state is None:
            return
        host, in_steps = state.host_nbytes(), figures.pop("in_steps", 0)
        figures |= {"device": self.stats.kv_bytes - host, "host": host}
        figures["a_step"] = in_steps // max(1, self.stats.decode_steps)


_calls: ContextVar[tuple[Call[Any], ...]] = ContextVar("mmaccel_calls", default=())


@overload
def current() -> Call[Any] | None: ...
@overload
def current(plan: P) -> Call[P] | None: ...
def current(plan: Plan | None = None) -> Call[Any] | None:
    """The innermost open call (of ``plan`` or a plan made from it for one call, if given), or None."""
    for call in reversed(_calls.get()):
        if plan is None or call.plan is plan or call.plan.origin is plan:
            return call
    return None


def encoding(plan: P) -> tuple[Call[P], VisionOutput] | None:
    """The innermost call of ``plan``, and the pictures or clips that it is encoding; None where it encodes none."""
    call = current(plan)
    return None if call is None or call.vision.running is None else (call, call.vision.running)


def push(call: Call[Any]) -> None:
    """Make ``call`` the innermost one."""
    _hold((*_calls.get(), call))


def pop(call: Call[Any]) -> None:
    """Close ``call``, whether or not it is the innermost; a forward that still runs was interrupted."""
    if call.text.runs is not None:
        call.text.runs.finalize(whole=False)
    _hold(tuple(one for one in _calls.get() if one is not call))


def _hold(calls: tuple[Call[Any], ...]) -> None:
    """Keep these calls open; the innermost decides whether kernels may run."""
    _calls.set(calls)
    allowed.set(not calls or calls[-1].plan.kernels == "auto")
