"""A video that goes on: frames are pushed as they come, questions are asked at any time, memory stays under a cap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..accelerate import Accelerator, accelerated
from ..accelerate.positions import position_limit
from ..core.transformers_api import DynamicCache, cache_argument
from ..errors import MmaccelError, UnsupportedError
from ..families import family_of
from ..kv.cache import CacheState, adopt
from ..media.files import Clip, Prompt, encode
from ..method import Policy
from ..recipe import Recipe, get_recipe
from ..video.clip import as_frames, as_rate
from .model_lock import model_lock

#: inputs that have an entry for every token of the prompt
_PER_TOKEN = ("input_ids", "mm_token_type_ids")


class VideoSession:
    """One video and one model.

    Frames are read in stretches; whenever a layer holds more than ``cap_tokens`` keys a head, the policy of the recipe
    keeps the best of all that is there. Nothing else grows with the length of the video. A question sees what is stored when
    it is asked and leaves no trace: what it and its answer add is gone afterwards. :meth:`push` and :meth:`ask` do all or
    nothing: whatever is raised inside, out of memory or from the keyboard, the session is what it was before, and may be
    given the same again. What was stored before is held until then, which is at most ``cap_tokens`` a head.

    Parameters
    ----------
    model : a model of a supported family; bare, or accelerated in any way: between the calls it is what it was.
    recipe : the name of a cache policy, or a recipe with one. By default ``infinipot-v``, which needs no question.
    processor : the model's processor.
    cap_tokens : keys each head of a layer may hold, the beginning of the prompt included.
    fps : frames a second that will be pushed; models that read time stamps are told so.
    chunk : frames that are read at once.

    Frames keep their positions, each stretch behind the largest so far. Behind the last position of the model a session ends:
    :meth:`push` and :meth:`ask` say so, and another session begins anew.

    Sessions of one model in several threads wait for each other. Do not call the model yourself while one works.

    Raises
    ------
    MmaccelError
        If a number is of no use, there is no processor, or the recipe has no policy that evicts.
    UnsupportedError
        If the model is of no supported family, takes no video, or has sliding windows, which count places that a session
        forgets.

    Examples
    --------
    >>> session = VideoSession(video_model, processor=video_processor, cap_tokens=256)
    >>> session.push(frames)
    >>> answer = session.ask("what is there?", max_new_tokens=2)
    """

    def __init__(
        self,
        model: Any,
        recipe: str | Path | Recipe = "infinipot-v",
        *,
        processor: Any,
        cap_tokens: int = 4096,
        fps: float = 1.0,
        chunk: int = 8,
    ) -> None:
        self.cap_tokens = _count(cap_tokens, 1, "A session needs cap_tokens")
        self.chunk = _count(chunk, 2, "A session needs chunk")
        self.fps = as_rate(fps)
        if getattr(processor, "video_processor", None) is None:
            raise UnsupportedError(
                f"A session needs a processor= that takes videos, which {type(processor).__name__} does not."
            )
        self._family = family_of(model, processor)
        if "sliding_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
            raise UnsupportedError("A model with sliding windows cannot follow a stream; use one with full attention.")
        self.model, self.processor = model, processor
        self._recipe = get_recipe(recipe)
        self._cache = DynamicCache()
        self._waiting: list[np.ndarray] = []
        self._size: tuple[int, ...] = ()
        self._last: Clip | None = None
        self._frames = self._prefix = self._tail = 0
        self._streaming(1)

    # --- for the user -----------------------------------------------------------------------------------------
    @torch.no_grad()
    def push(self, frames: np.ndarray | Sequence[np.ndarray]) -> None:
        """The next frames, ``[T, H, W, 3]`` uint8, which are copied; they are read as soon as there are ``chunk`` of them.

        Raises
        ------
        MmaccelError
            If they are no frames, or of another size than those before, or the model has no positions left for them.
        """
        new = as_frames(frames)
        size = new.shape[1:3]
        with model_lock(self.model), self._whole():
            self._check_size(size)
            for frame in new:
                self._size = size
                self._waiting.append(frame.copy())
                if len(self._waiting) == self.chunk:
                    self._read()

    @torch.no_grad()
    def ask(self, question: str, max_new_tokens: int = 64) -> str:
        """The answer (greedy) to a question about all that was pushed.

        Raises
        ------
        MmaccelError
            If nothing was pushed, the question is none, ``max_new_tokens`` is no number of 1 or more, or the model has no
            positions left for question and answer.
        """
        longest = _count(max_new_tokens, 1, "An answer needs max_new_tokens")
        with model_lock(self.model), self._whole():
            if not self._frames and not self._waiting:
                raise MmaccelError("There is nothing to ask about; push frames first.")
            if self._waiting:
                self._read()
            return self._answer(question, longest)

    @property
    def frames(self) -> int:
        """Frames that were read; those that wait for a full stretch are not."""
        return self._frames

    def tokens(self) -> int:
        """The most keys that any head of any layer holds."""
        if not self._frames:
            return 0
        return max(len(layer.index) for layer in self._state.layers if not layer.empty)

    def nbytes(self) -> int:
        """Bytes the cache holds."""
        return self._state.nbytes() if self._frames else 0

    # --- inside -----------------------------------------------------------------------------------------------
    def _check_size(self, size: tuple[int, ...]) -> None:
        if self._size and self._size != size:
            height, width = self._size
            raise MmaccelError(
                f"The frames so far are {width} x {height} pixels large, these {size[1]} x {size[0]}; a video has one size, so "
                "resize them, or begin another session."
            )

    def _check_positions(self, tokens: int, new: int = 0) -> None:
        """Raise where so many ``tokens`` behind what was read, and ``new`` ones, need more positions than the model has."""
        begin = 0
        if (offset := self._state.offset) is not None:
            ahead = 0 if self._state.ahead is None else int(self._state.ahead.max())
            begin = self._state.seen - int(offset.min()) + ahead
        limit = position_limit(self.model)
        if limit is not None and begin + tokens + new > limit:
            raise MmaccelError(
                f"The session has used {begin} of the model's {limit} positions, and {tokens + new} more are needed; begin "
                "another session."
            )

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All of what is done inside, or nothing."""
        before = {**vars(self), "_waiting": list(self._waiting)}
        restore = self._state.snapshot() if self._frames else None
        try:
            yield
        except BaseException:
            if restore is not None:
                restore()
            vars(self).update(before)
            raise

    def _answer(self, question: str, longest: int) -> str:
        # what stands behind the frames of a prompt with this question, whatever the frames are
        words = encode(self.processor, [Prompt(question, clip=self._last)])
        probe = encode(self.processor, [Prompt("?", clip=self._last)])
        feed = self._tokens(words, slice(probe["input_ids"].shape[1] - self._tail, None))
        ends = self.model.generation_config.eos_token_id
        stops = set(ends) if isinstance(ends, (list, tuple)) else {ends}
        self._check_positions(feed["input_ids"].shape[1], longest)
        answer: list[int] = []
        restore = self._state.snapshot()
        try:
            with self._accelerated() as model:
                while len(answer) < longest:
                    out = model(**feed, **cache_argument(self._cache), use_cache=True)
                    answer.append(int(out.logits[0, -1].argmax()))
                    if answer[-1] in stops:
                        break
                    feed = {"input_ids": torch.tensor([answer[-1:]], device=model.device)}
        finally:
            restore()
        text: str = self.processor.tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip()

    @property
    def _state(self) -> CacheState:
        state: CacheState = self._cache.mmaccel
        return state

    def _streaming(self, prefix: int) -> Recipe:
        """The recipe with its policy under the cap; nothing leaves before that is reached. The prefix stays."""
        stages = list(self._recipe.stages)
        built = [stage.build() for stage in stages]
        at = next(
            (i for i, m in enumerate(built) if isinstance(m, Policy) and m.budget != "none" and not m.recalls), None
        )
        if at is None:
            raise MmaccelError(
                f"Recipe {self._recipe.name!r} never evicts from the cache; use one such as 'infinipot-v'."
            )
        policy = built[at]
        assert isinstance(policy, Policy)
        if self.cap_tokens <= prefix:
            raise MmaccelError(f"cap_tokens={self.cap_tokens} leaves no room beside the {prefix} tokens of the prompt.")
        options = {"cap": self.cap_tokens, "joint": True, "sinks": max(policy.sinks, prefix)}
        stages[at] = dataclasses.replace(stages[at], retain=1.0, options={**stages[at].options, **options})
        return dataclasses.replace(self._recipe, stages=tuple(stages))

    def _read(self) -> None:
        """Feed the frames that wait, behind the beginning of the prompt if they are the first."""
        stretch, self._waiting = np.stack(self._waiting), []
        first = self._frames
        self._frames += len(stretch)
        places = list(range(first, self._frames))
        if len(stretch) == 1:
            # some processors take no clip of one frame
            stretch, places = np.concatenate([stretch, stretch]), [first, first]
        clip = Clip(stretch, places, self._frames, self.fps)
        shown = encode(self.processor, [Prompt("?", clip=clip)])
        length = shown["input_ids"].shape[1]
        if not first:
            other, plain = encode(self.processor, [Prompt("!", clip=clip)]), encode(self.processor, [Prompt("?")])
            self._tail = length - _alike(shown, other)
            self._prefix = _alike(shown, plain)
            self._cache = DynamicCache()
            adopt(self._cache, self._family.depth, None, self._family.recurrent).shared.stream = True
        self._last = Clip(stretch[:2], places[:2], self._frames, self.fps)
        inputs = self._tokens(shown, slice(self._prefix if first else 0, length - self._tail))
        pixels = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in shown.items()
            if name not in (*_PER_TOKEN, "attention_mask")
        }
        if not first:
            # Qwen2.5-Omni places the frames of a prompt only where it comes with a mask
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with self._accelerated() as model:
            model(**inputs, **pixels, **cache_argument(self._cache), use_cache=True)
        self._check_positions(0)
        self._state.rebase()

    def _accelerated(self) -> AbstractContextManager[Any]:
        held = Accelerator.on(self.model)
        kernels = "auto" if held is None else held.kernels
        recipe = self._streaming(self._prefix)
        return accelerated(self.model, recipe, processor=self.processor, kernels=kernels)

    def _tokens(self, encoded: Any, part: slice) -> dict[str, Tensor]:
        return {name: encoded[name][:, part].to(self.model.device) for name in _PER_TOKEN if name in encoded}


def _alike(one: Any, other: Any) -> int:
    """How many tokens two prompts begin with alike."""
    width = min(one["input_ids"].shape[1], other["input_ids"].shape[1])
    same = one["input_ids"][0, :width] == other["input_ids"][0, :width]
    return int(same.long().cumprod(0).sum())


def _count(value: Any, least: int, what: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise MmaccelError(f"{what} >= {least}, a whole number, not {value!r}.")
    return int(value)
