"""The call scope: everything that belongs to one call of ``generate`` or one direct forward, and to nothing else.

It lives in a context variable, so two threads, or two models in one thread, never see each other's. What must outlive the
call (original positions, logical lengths) moves to the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from mmaccel_kernels.launch import allowed
from torch import Tensor, nn

from ...core.layout import Layout, Modality
from ...core.reduction import Reduction
from ...core.stats import Stats
from ...families.base import Continued
from ...kv.cache import bare_bytes, cache_bytes, state_of
from ...kv.pinned import Pinned
from ..graphs.replay import ReplayedStep
from ..prompt.preview import Behind, Preview
from ..tower.taps import Taps
from .forward import StageResult
from .plan import Plan
from .runs import Stages
from .vision_output import Encoded

P = TypeVar("P", bound=Plan)


@dataclass
class Scope(Generic[P]):
    """The state of one call of the model, or encoder, that ``plan`` was made for.

    opened_by : the module whose direct forward this is; None for a call of ``generate``.
    encoded, encoding : the pictures and clips that were encoded in this call, and those that are being encoded.
    given : the arguments of the call, where a draft is to read them.
    mask : the attention mask ``[B, S]`` that the inner model was called with.
    beside : arguments of the model, beside those of the towers, that its family needs for the layout.
    clips : the pixels of clips that the model was given, for families whose towers have one function for both.
    stages : the work of the recipe in the forward of the language model that is being run, if mmaccel shapes it.
    dropped : ``[B, S]`` bool, which rows of the logits stand for tokens that were dropped; set when the forward is over.
    drafted : whether ``generate`` verifies candidates of an assistant or of a look-up.
    new_tokens : how many ``generate`` makes at most, where it was told. until : the tokens that the cache has seen then.
    step : what replays decode steps on the cache as it is pinned. idle : what the cache was pinned to until an ordinary step.
    preview : what a look ahead is to see, while one is being taken.
    layout, reduction, history : what became of the last prompt with pictures, in all and stage by stage.
    forwards : how many forwards of the text model there were before. given_length : of the ids that ``generate`` was given.
    figures : the statistics of this call while it reads its prompt again, as it does at every step without a cache; what that
        counts is not the call's, whose prompt is counted once.
    """

    plan: P
    taps: Taps
    stats: Stats
    opened_by: nn.Module | None = None
    cache: Any = None
    encoded: dict[Modality, Encoded] = field(default_factory=dict)
    encoding: Encoded | None = None
    input_ids: Tensor | None = None
    mask: Tensor | None = None
    clips: Tensor | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    labels: Tensor | None = None
    dropped: Tensor | None = None
    stages: Stages | None = None
    timer: tuple[Any, str] | None = None
    drafted: bool = False
    new_tokens: int | None = None
    until: int | None = None
    step: ReplayedStep | None = None
    idle: Pinned | None = None
    preview: Preview | Behind | None = None
    layout: Layout | None = None
    reduction: Reduction | None = None
    history: list[StageResult] = field(default_factory=list)
    forwards: int = 0
    given_length: int | None = None
    figures: Stats | None = None

    def begin_forward(self, ids: Tensor | None, cache: Any) -> None:
        """The model is given ``ids [B, q]``: is it the prompt of this call again?"""
        if self.forwards and ids is not None and ids.shape[1] > 1 and (cache is None or not cache.get_seq_length()):
            self.figures, self.stats = self.stats, Stats(self.stats.recipe, clock=self.stats.clock)

    def end_forward(self) -> None:
        """A forward of the text model is over."""
        self.forwards += 1
        if self.figures is not None:
            self.stats, self.figures = self.figures, None

    @property
    def generating(self) -> bool:
        """Whether this is a call of ``generate`` (a direct forward opens its scope from a module's hook)."""
        return self.opened_by is None

    def continued(self, cache: Any = None) -> Continued | None:
        """The kept cache that this call goes on with, or None; see :class:`mmaccel.families.base.Call`."""
        state = state_of(cache if cache is not None else self.cache)
        if state is None or state.seen == 0 or state.offset is None:
            return None
        offset, ahead = state.shared.behind_pictures()
        assert offset is not None
        return Continued(state.seen, offset, ahead)

    @property
    def pinned(self) -> Pinned | None:
        """What the cache of this call is pinned to, while its steps are captured."""
        state = state_of(self.cache)
        return None if state is None else state.shared.pinned

    def coming(self, seen: int) -> int | None:
        """How many tokens may still come when the cache has ``seen`` those of this forward; None where nobody said."""
        if self.new_tokens is None:
            return None
        if self.until is None:
            # this is the first forward of the call; the last token that is made is not seen
            self.until = seen + self.new_tokens - 1
        return max(0, self.until - seen)

    def trim(self) -> None:
        """No more tokens come in this call: the cache gives back the room that was made for them."""
        if (state := state_of(self.cache)) is not None:
            state.unpin()
            state.trim()

    def finish(self, config: Any) -> None:
        """The call of a model whose text model has this ``config`` is over: what was needed only while it ran must not keep
        tensors alive."""
        if (state := state_of(self.cache)) is not None:
            state.unpin()
        if self.figures is not None:
            self.stats, self.figures = self.figures, None
        if self.cache is not None:
            self.stats.kv_bytes = cache_bytes(self.cache)
            self.stats.kv_bytes_bare = bare_bytes(self.cache, config)
        self.encoded.clear()
        self.cache = self.labels = self.stages = self.input_ids = self.mask = self.clips = self.encoding = (
            self.dropped
        ) = None
        self.step = self.idle = None
        self.given = self.beside = {}


_scopes: ContextVar[tuple[Scope[Any], ...]] = ContextVar("mmaccel_scopes", default=())


@overload
def current() -> Scope[Any] | None: ...
@overload
def current(plan: P) -> Scope[P] | None: ...
def current(plan: Plan | None = None) -> Scope[Any] | None:
    """The innermost open scope (of ``plan`` or a plan made of it for one call, if given), or None."""
    for scope in reversed(_scopes.get()):
        if plan is None or scope.plan is plan or scope.plan.origin is plan:
            return scope
    return None


def push(scope: Scope[Any]) -> None:
    """Make ``scope`` the innermost one."""
    _hold((*_scopes.get(), scope))


def pop(scope: Scope[Any]) -> None:
    """Close ``scope``, wherever it stands; a forward that it is in the middle of has been broken off."""
    if scope.stages is not None and scope.stages.forward.state is not None:
        scope.stages.forward.state.settle(whole=False)
    _hold(tuple(s for s in _scopes.get() if s is not scope))


def _hold(scopes: tuple[Scope[Any], ...]) -> None:
    """These are open; whether kernels may run is for the innermost to say."""
    _scopes.set(scopes)
    allowed.set(not scopes or scopes[-1].plan.kernels == "auto")
