"""Streaming video: frames are pushed as they come, questions asked at any time, and the KV cache stays under a cap."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..accelerate import Accelerator, accelerated
from ..accelerate.positions import position_limit
from ..core.transformers_api import DynamicCache, cache_argument
from ..errors import MmaccelError, UnsupportedError, first_line
from ..families import Family, family_of
from ..families.base import slides
from ..kv.cache import CacheState, adopt
from ..kv.parked import ParkedFrames, ParkFile
from ..media.files import Clip, Prompt, encode
from ..method import Method, Policy, RecallPolicy
from ..method.keys import moves_keys
from ..method.registry import methods
from ..recipe import Recipe, Stage, get_recipe
from ..video.clip import as_frames, as_rate
from .model_lock import model_lock
from .session_file import load_session, save_session

#: inputs that have an entry for every token of the prompt
_PER_TOKEN = ("input_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class _Stream:
    """The state of a session, and how it reads frames and questions."""

    model: Any
    processor: Any
    cap_tokens: int
    fps: float
    _family: Family
    _recipe: Recipe
    _recall: Stage | None
    _file: ParkFile | None
    _recalled: list[int]
    _dialogue: str
    _cache: Any
    _waiting: list[np.ndarray]
    _last: Clip | None
    _frames: int
    _prefix: int
    _tail: int
    _visual: int

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Restore the session if the block fails."""
        before = {**vars(self), "_waiting": list(self._waiting)}
        restore = self._state.snapshot() if self._frames else None
        try:
            yield
        except BaseException:
            if restore is not None:
                restore()
            vars(self).update(before)
            raise

    @contextmanager
    def _asked(self, question: str, longest: int) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """The accelerated model and the tokens of a question; behind the block the session is as if it was not asked."""
        with model_lock(self.model), self._whole():
            if not self._frames and not self._waiting:
                raise MmaccelError("There is nothing to ask about; push frames first.")
            if self._waiting:
                self._read()
            with self._question(question, longest) as asked:
                yield asked

    @contextmanager
    def _question(self, question: str, longest: int) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        # the tokens after the frames of a prompt with this question
        words = encode(self.processor, [Prompt(question, clip=self._last)])
        probe = encode(self.processor, [Prompt("?", clip=self._last)])
        feed = _tokens(words, slice(probe["input_ids"].shape[1] - self._tail, None), self.model)
        _check_positions(self.model, self._state, feed["input_ids"].shape[1] + longest)
        restore = self._state.snapshot()
        try:
            if (memory := self._memory) is not None:
                memory.asking, memory.recalled = longest, {}
            with self._accelerated() as model:
                memory = _agreed(model, self._cache, feed, memory)
                yield model, feed
        finally:
            restore()
        self._recalled = [] if memory is None else memory.shown_again()

    @property
    def _state(self) -> CacheState:
        return cast(CacheState, self._cache.mmaccel)

    @property
    def _memory(self) -> ParkedFrames | None:
        return self._state.shared.memory(ParkedFrames) if self._frames else None

    def _read(self) -> None:
        """Read the waiting frames, after the beginning of the prompt if they are the first."""
        stretch, self._waiting = np.stack(self._waiting), []
        first = self._frames
        self._frames += len(stretch)
        places = list(range(first, self._frames))
        if len(stretch) == 1:
            # some processors refuse a clip of one frame
            stretch, places = np.concatenate([stretch, stretch]), [first, first]
        # processors take the rate of the frames from how many of all there are
        clip = Clip(stretch, places, len(stretch), self.fps)
        shown = encode(self.processor, [Prompt("?", clip=clip)])
        length = shown["input_ids"].shape[1]
        if not first:
            other, plain = encode(self.processor, [Prompt("!", clip=clip)]), encode(self.processor, [Prompt("?")])
            self._tail = length - _common_prefix(shown, other)
            self._prefix = _common_prefix(shown, plain)
            self._cache = DynamicCache()
            shared = adopt(self._cache, self._family.depth, None, self._family.recurrent, self._family.latent).shared
            shared.stream = True
            if self._recall is not None:
                limit = position_limit(self.model)
                shared.keep(ParkedFrames(self.cap_tokens, limit, self._file, prefix=self._prefix))
        self._last = Clip(stretch[:2], places[:2], 2, self.fps)
        inputs = _tokens(shown, slice(self._prefix if first else 0, length - self._tail), self.model)
        self._visual += int(self._family.visual(inputs["input_ids"]).sum())
        pixels = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in shown.items()
            if name not in (*_PER_TOKEN, "attention_mask")
        }
        if not first:
            # Qwen2.5-Omni needs a mask for the positions of frames
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if (memory := self._memory) is not None:
            memory.pushed = range(first, self._frames)
        with self._accelerated() as model:
            model(**inputs, **pixels, **cache_argument(self._cache), use_cache=True)
        _check_positions(self.model, self._state, 0)
        self._state.rebase()

    def _accelerated(self) -> AbstractContextManager[Any]:
        held = Accelerator.on(self.model)
        how: dict[str, Any] = {} if held is None else {"kernels": held.kernels, "offload": held.plan.offload}
        recipe = _streaming(self._recipe, self._recall, self.cap_tokens, self._prefix, self._dialogue)
        return accelerated(self.model, recipe, processor=self.processor, **how)


class VideoSession(_Stream):
    """A video stream for one model.

    Frames are read in chunks; whenever a layer holds more than ``cap_tokens`` keys a head, the policy of the recipe evicts
    keys. Besides, a few bytes are kept for every place of which any head still holds a key. Nothing else grows with the length
    of the video. What a codec has packed takes no more than the same keys in full precision. A question sees the current cache
    and leaves no trace in it; with ``hermes``, which rates keys by the last question and answer too, it changes what is evicted
    later.

    With ``recall=`` nothing is evicted: the oldest frames beyond the cap move to host memory, or to files in a folder, and
    every question brings back those that it asks about, layer by layer. On the device are then at most ``cap_tokens`` keys a
    head between two calls, those of the chunk that is being read, and those that a question brings back until it is answered.
    :meth:`push` and :meth:`ask` do all or nothing: after any exception, out of memory and keyboard interrupts included, the
    session is as it was before, and may be given the same again. Until then at most ``cap_tokens`` old keys a head are kept
    as well.

    Parameters
    ----------
    model : a model of a supported family, bare or accelerated; it is restored after every call.
    recipe : the name of a cache policy, or a recipe with one. By default ``infinipot-v``, which needs no question. With
        ``recall=`` a recipe that leaves the cache alone; by default none.
    processor : the model's processor.
    cap_tokens : keys a head of a layer, the beginning of the prompt included.
    fps : frames a second, for models that read time stamps.
    chunk : frames that are read at once.
    recall : how parked frames are found: the name of a :class:`~mmaccel.method.RecallPolicy` such as ``rekv``, or a
        :class:`~mmaccel.Stage` with one and its options. By default nothing is parked.
    park : where frames are parked: ``host`` for memory, else a folder. They stand there in a file without a name, whose space
        the system frees when the session or the process ends, however it ends.

    Frames keep their positions, each chunk after the largest so far. A session ends at the last position of the model, where
    :meth:`push` and :meth:`ask` raise an error. With ``recall=`` all that is read stands at positions behind each other, so
    that a session does not end.

    Sessions of one model in threads wait for each other. Do not call the model yourself during a call.

    Raises
    ------
    MmaccelError
        If a number is not allowed, there is no processor, the recipe has no policy that evicts, or one beside ``recall=``.
    UnsupportedError
        If the model is not supported, takes no video, or has sliding windows; with ``recall=`` also if keys cannot be moved to
        other positions.

    Examples
    --------
    >>> session = VideoSession(video_model, processor=video_processor, cap_tokens=256)
    >>> session.push(frames)
    >>> answer = session.ask("what is there?", max_new_tokens=2)
    """

    def __init__(
        self,
        model: Any,
        recipe: str | Path | Recipe | None = None,
        *,
        processor: Any,
        cap_tokens: int = 4096,
        fps: float = 1.0,
        chunk: int = 8,
        recall: str | Stage | None = None,
        park: str | Path = "host",
    ) -> None:
        self.cap_tokens, self.chunk = _count(cap_tokens, 1, "cap_tokens"), _count(chunk, 2, "chunk")
        self.fps = as_rate(fps)
        if getattr(processor, "video_processor", None) is None:
            raise UnsupportedError(
                f"A session needs a processor= that takes videos, which {type(processor).__name__} does not."
            )
        self._family = family_of(model, processor)
        if slides(model.config):
            raise UnsupportedError("A model with sliding windows cannot follow a stream; use one with full attention.")
        self.model, self.processor = model, processor
        if recipe is None:
            recipe = "infinipot-v" if recall is None else "none"
        self._recipe = get_recipe(recipe)
        self._recall = None if recall is None else _recall_stage(recall, self._family)
        self._file = _park_file(park, recall is not None)
        self._recalled, self._dialogue, self._cache = list[int](), "", DynamicCache()
        self._waiting: list[np.ndarray] = []
        self._size: tuple[int, ...] = ()
        self._last: Clip | None = None
        self._frames = self._prefix = self._tail = self._visual = 0
        _streaming(self._recipe, self._recall, self.cap_tokens, 1)

    @torch.no_grad()
    def push(self, frames: np.ndarray | Sequence[np.ndarray]) -> None:
        """Add frames ``[T, H, W, 3]`` uint8, which are copied; they are read as soon as there are ``chunk`` of them.

        Raises
        ------
        MmaccelError
            If they are not frames, or of another size than earlier ones, or the model has no positions left for them.
        """
        new = as_frames(frames)
        size = new.shape[1:3]
        with model_lock(self.model), self._whole():
            if self._size and self._size != size:
                height, width = self._size
                raise MmaccelError(
                    f"Frames must be {width} x {height} pixels like earlier ones, got {size[1]} x {size[0]}; resize them, or "
                    "begin another session."
                )
            for frame in new:
                self._size = size
                self._waiting.append(frame.copy())
                if len(self._waiting) == self.chunk:
                    self._read()

    @torch.no_grad()
    def ask(self, question: str, max_new_tokens: int = 64, on_token: Callable[[int], None] | None = None) -> str:
        """The greedy answer to a question about all frames so far; ``on_token`` gets its tokens one by one.

        Raises
        ------
        MmaccelError
            If nothing was pushed, the question is not text, ``max_new_tokens`` is not a whole number of at least 1, or the
            model has no positions left for question and answer.
        """
        longest = _count(max_new_tokens, 1, "max_new_tokens")
        with self._asked(question, longest) as (model, feed):
            answer = _greedy(model, self._cache, feed, longest, on_token)
            return self._noted(question, answer)

    @torch.no_grad()
    def generate(self, question: str, max_new_tokens: int = 64, **options: Any) -> Tensor:
        """The new tokens ``[1, n]`` of ``model.generate`` for a question about all frames so far, with ``options`` of
        ``generate`` such as ``do_sample=True`` or a ``streamer``. Raises as :meth:`ask` does, and for options that need
        several rows."""
        longest = _count(max_new_tokens, 1, "max_new_tokens")
        if several := [name for name in ("num_beams", "num_return_sequences") if options.get(name, 1) != 1]:
            raise MmaccelError(f"`{several[0]}` must be 1 in a session, got {options[several[0]]!r}; leave it out.")
        with self._asked(question, longest) as (model, feed):
            seen = self._state.seen
            # of tokens that the cache has seen only the number counts
            whole = {name: functional.pad(x, (seen, 0)) for name, x in feed.items()}
            mask = torch.ones_like(whole["input_ids"])
            given = {**whole, "attention_mask": mask, **cache_argument(self._cache), **options}
            out = model.generate(**given, max_new_tokens=longest)
            tokens: Tensor = (out if isinstance(out, Tensor) else out.sequences)[:, mask.shape[1] :]
            self._noted(question, tokens[0])
        return tokens

    def _noted(self, question: str, answer: Any) -> str:
        """The text of an answer, which is kept with its question."""
        text: str = self.processor.tokenizer.decode(answer, skip_special_tokens=True).strip()
        self._dialogue = f"{question} {text}"
        return text

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write all that the session has read to a file, from which :meth:`load` goes on in this process or another one. The
        file is written atomically.

        Raises
        ------
        MmaccelError
            If nothing was read yet, or the file cannot be written.
        UnsupportedError
            If the session has ``recall=``.
        """
        with model_lock(self.model):
            save_session(self, Path(file))

    def load(self, file: str | os.PathLike[str]) -> None:
        """Go on where the session in a file of :meth:`save` was, in place of what this one has read.

        Raises
        ------
        MmaccelError
            If the file is missing, incomplete or changed, or belongs to another model, recipe or version, or to a session with
            another ``cap_tokens``, ``fps`` or ``chunk``. The session is then as it was.
        UnsupportedError
            If the session has ``recall=``.
        """
        with model_lock(self.model), self._whole():
            load_session(self, Path(file))

    @property
    def frames(self) -> int:
        """Frames that were read, without those that wait for a full chunk."""
        return self._frames

    def tokens(self) -> int:
        """The most keys of any head of any layer."""
        if not self._frames:
            return 0
        return max(int(layer.head_lengths.max()) for layer in self._state.layers if not layer.empty)

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the frames that were read, before any is dropped."""
        return self._visual

    def nbytes(self) -> int:
        """Bytes of the cache on the device."""
        return self._state.nbytes() if self._frames else 0

    def parked_bytes(self) -> int:
        """Bytes of the frames that are parked, in host memory or on disk."""
        return 0 if self._memory is None else self._memory.nbytes()

    @property
    def parked(self) -> int:
        """Number of pushed frames that are parked."""
        return 0 if self._memory is None else self._memory.left

    @property
    def recalled(self) -> list[int]:
        """The pushed frames, counted from 0, that any layer brought back for the last question."""
        return list(self._recalled)


def _greedy(
    model: Any, cache: Any, feed: dict[str, Tensor], longest: int, on_token: Callable[[int], None] | None
) -> list[int]:
    """The greedy tokens behind a cache and the tokens ``feed``."""
    ends = model.generation_config.eos_token_id
    stops = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    answer: list[int] = []
    while len(answer) < longest:
        out = model(**feed, **cache_argument(cache), use_cache=True)
        answer.append(int(out.logits[0, -1].argmax()))
        if answer[-1] in stops:
            break
        if on_token is not None:
            on_token(answer[-1])
        feed = {"input_ids": torch.tensor([answer[-1:]], device=model.device)}
    return answer


def _tokens(encoded: Any, part: slice, model: Any) -> dict[str, Tensor]:
    """The tokens of a part of an encoded prompt, for the model."""
    return {name: encoded[name][:, part].to(model.device) for name in _PER_TOKEN if name in encoded}


def _common_prefix(one: Any, other: Any) -> int:
    width = min(one["input_ids"].shape[1], other["input_ids"].shape[1])
    same = one["input_ids"][0, :width] == other["input_ids"][0, :width]
    return int(same.long().cumprod(0).sum())


def _count(value: Any, least: int, what: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise MmaccelError(f"{what} must be a whole number of at least {least}, got {value!r}.")
    return int(value)


def _check_positions(model: Any, state: CacheState, new: int) -> None:
    """Raise :class:`MmaccelError` if the model has no positions for so many ``new`` tokens behind those of a stream."""
    begin, positions, memory = 0, state.positions, state.shared.memory(ParkedFrames)
    if positions.offset is not None:
        ahead = 0 if positions.ahead is None else int(positions.ahead.max())
        begin = state.seen - int(positions.offset.min()) + ahead
    begin -= 0 if memory is None else memory.shift
    limit = position_limit(model)
    if limit is not None and begin + new > limit:
        raise MmaccelError(
            f"The session has used {begin} of the model's {limit} positions, and {new} more are needed; begin "
            f"another session{'' if memory is None else ' with a smaller cap_tokens'}."
        )


def _agreed(model: Any, cache: Any, feed: Mapping[str, Tensor], memory: ParkedFrames | None) -> ParkedFrames | None:
    """The memory of a stream, which knows the parked frames that all layers read for a question, if they read the same."""
    policy = model.mmaccel.plan.policy
    if memory is None or not memory.parked or not policy.method.together:
        return memory
    restore = cache.mmaccel.snapshot()
    model(**feed, **cache_argument(cache), use_cache=True)
    common = policy.method.common([memory.rated[layer] for layer in sorted(memory.rated)])
    restore()
    memory = cache.mmaccel.shared.memory(ParkedFrames)
    assert memory is not None
    memory.common = common.tolist()
    return memory


def _streaming(recipe: Recipe, recall: Stage | None, cap: int, prefix: int, dialogue: str = "") -> Recipe:
    """The recipe with a policy that evicts nothing below the cap, and nothing of the prefix, and knows the last question and
    answer if it asks for them; or one that recalls."""
    stages = list(recipe.stages)
    if recall is not None:
        if at_work := [stage.method for stage in stages if stage.kind.site in ("cache", "codec")]:
            raise MmaccelError(
                f"Recipe {recipe.name!r} changes the cache ({', '.join(at_work)}), where recall= keeps all keys; "
                "leave out recipe=, or give one that works before or inside the language model."
            )
        return dataclasses.replace(recipe, stages=(*stages, recall))
    built = [stage.build() for stage in stages]
    at = evicting(built)
    if at is None:
        raise MmaccelError(f"Recipe {recipe.name!r} never evicts from the cache; use one such as 'infinipot-v'.")
    policy = built[at]
    assert isinstance(policy, Policy)
    if policy.age:
        raise MmaccelError(
            "age= has no effect in a session, which has a single video; leave it out, cap_tokens bounds the cache."
        )
    if cap <= prefix:
        raise MmaccelError(f"cap_tokens must be greater than the {prefix} tokens of the prompt, got {cap}.")
    options: dict[str, Any] = {"cap": cap, "joint": True, "sinks": max(policy.sinks, prefix)}
    if dialogue and hasattr(policy, "dialogue"):
        options["dialogue"] = dialogue
    stages[at] = dataclasses.replace(stages[at], retain=1.0, options={**stages[at].options, **options})
    # refuses a cap below the keys that always stay
    stages[at].build()
    return dataclasses.replace(recipe, stages=tuple(stages))


def evicting(built: Sequence[Method]) -> int | None:
    """The number of the method that evicts from the cache; None without one."""
    policies = (
        i for i, one in enumerate(built) if isinstance(one, Policy) and one.budget != "none" and not one.recalls
    )
    return next(policies, None)


def _recall_stage(recall: str | Stage, family: Family) -> Stage:
    """The stage that recalls frames, by its name or as it is given."""
    if not isinstance(recall, (str, Stage)):
        raise MmaccelError(f"recall= takes the name of a method such as 'rekv', or a Stage with one, got {recall!r}.")
    stage = dataclasses.replace(Stage(recall) if isinstance(recall, str) else recall, retain=1.0)
    stage.build()
    if not issubclass(stage.kind, RecallPolicy):
        names = ", ".join(repr(name) for name, kind in methods().items() if issubclass(kind, RecallPolicy))
        raise MmaccelError(f"{stage.method!r} recalls no frames; use one of {names}.")
    if not moves_keys(family):
        raise UnsupportedError(
            f"Keys of this {family.name} model cannot be moved to other positions; leave out recall=, and use a "
            "policy that evicts."
        )
    return stage


def _park_file(park: Any, recalls: bool) -> ParkFile | None:
    """The file that frames are parked in, None for host memory."""
    if park == "host":
        return None
    if not isinstance(park, (str, Path)) or not recalls:
        raise MmaccelError(f"park= is 'host' or a folder, and goes with recall=, got {park!r}.")
    try:
        return ParkFile(str(park))
    except OSError as error:
        raise MmaccelError(
            f"park={str(park)!r} is not a folder that can be written to ({first_line(error)}); create it, or leave out park=."
        ) from error
