"""A video that goes on: frames are pushed as they come, questions are asked at any time, memory stays under a cap."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ..accelerate import accelerated
from ..errors import MmaccelError, UnsupportedError
from ..kv.cache import CacheState, adopt
from ..media import Clip, Prompt, encode
from ..method import Policy
from ..recipe import Recipe
from ..recipe import recipe as find_recipe

#: inputs that have an entry for every token of the prompt
_PER_TOKEN = ("input_ids", "mm_token_type_ids")


class VideoSession:
    """One video and one model.

    Frames are read in stretches; whenever a layer holds more than ``cap_tokens`` keys a head, the policy of the recipe
    keeps the best of all that is there. Nothing else grows with the length of the video. A question sees what is stored when
    it is asked and leaves no trace: what it and its answer add is gone afterwards.

    Parameters
    ----------
    model : a model of a supported family; bare, or accelerated in any way: between the calls it is what it was.
    recipe : the name of a cache policy, or a recipe with one. By default ``infinipot-v``, which needs no question.
    processor : the model's processor.
    cap_tokens : keys each head of a layer may hold, the beginning of the prompt included.
    fps : frames a second that will be pushed; models that read time stamps are told so.
    chunk : frames that are read at once.

    Frames keep their positions, each stretch behind the largest so far; a model may not have been trained for those of a
    long time.

    Raises
    ------
    MmaccelError
        If a number is of no use, or the recipe has no policy that evicts.
    UnsupportedError
        If the model takes no video, or has sliding windows, which count places that a session forgets.
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
        if chunk < 2 or not fps > 0:
            raise MmaccelError(f"A session needs chunk >= 2 and fps > 0, not {chunk} and {fps}.")
        config = model.config.get_text_config()
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedError("A model with sliding windows cannot follow a stream; use one with full attention.")
        self.model, self.processor, self.cap_tokens, self.fps, self.chunk = model, processor, cap_tokens, fps, chunk
        self._recipe = find_recipe(recipe)
        self._cache = DynamicCache()
        self._waiting: list[np.ndarray] = []
        self._last: Clip | None = None
        self._frames = self._prefix = self._tail = 0
        self._streaming(1)

    # --- for the user -----------------------------------------------------------------------------------------
    def push(self, frames: np.ndarray | Sequence[np.ndarray]) -> None:
        """The next frames, ``[T, H, W, 3]`` uint8; they are read as soon as there are ``chunk`` of them.

        Raises
        ------
        MmaccelError
            If they are no frames, or of another size than those before.
        """
        new = np.asarray(frames)
        if new.ndim != 4 or new.shape[3] != 3 or new.dtype != np.uint8:
            raise MmaccelError(f"push takes frames [T, H, W, 3] uint8, not {new.dtype} {list(new.shape)}.")
        if self._waiting and self._waiting[0].shape != new.shape[1:]:
            raise MmaccelError(
                f"The frames so far are {self._waiting[0].shape[:2]} large, these {new.shape[1:3]}; a video has one size."
            )
        for frame in new:
            self._waiting.append(frame)
            if len(self._waiting) == self.chunk:
                self._read()

    @torch.no_grad()
    def ask(self, question: str, max_new_tokens: int = 64) -> str:
        """The answer (greedy) to a question about all that was pushed.

        Raises
        ------
        MmaccelError
            If nothing was pushed.
        """
        if self._waiting:
            self._read()
        if not self._frames:
            raise MmaccelError("There is nothing to ask about; push frames first.")
        # what stands behind the frames of a prompt with this question, whatever the frames are
        words = encode(self.processor, [Prompt(question, clip=self._last)])
        probe = encode(self.processor, [Prompt("?", clip=self._last)])
        feed = self._tokens(words, slice(probe["input_ids"].shape[1] - self._tail, None))
        restore = self._state.snapshot()
        ends = self.model.generation_config.eos_token_id
        stops = set(ends) if isinstance(ends, (list, tuple)) else {ends}
        answer: list[int] = []
        try:
            with accelerated(self.model, self._streaming(self._prefix), processor=self.processor) as model:
                while len(answer) < max_new_tokens:
                    out = model(**feed, past_key_values=self._cache, use_cache=True)
                    answer.append(int(out.logits[0, -1].argmax()))
                    if answer[-1] in stops:
                        break
                    feed = {"input_ids": torch.tensor([answer[-1:]], device=model.device)}
        finally:
            restore()
        text: str = self.processor.tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip()

    @property
    def frames(self) -> int:
        """Frames that were read; those that wait for a full stretch are not."""
        return self._frames

    def tokens(self) -> int:
        """The most keys that any head of any layer holds."""
        if not self._frames:
            return 0
        return max(len(layer.index) for layer in self._state.layers if layer.index is not None)

    def nbytes(self) -> int:
        """Bytes the cache holds."""
        return self._state.nbytes() if self._frames else 0

    # --- inside -----------------------------------------------------------------------------------------------
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

    @torch.no_grad()
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
            adopt(self._cache, len(self._layers()), None).stream = True
        self._last = Clip(stretch[:2], places[:2], self._frames, self.fps)
        inputs = self._tokens(shown, slice(self._prefix if first else 0, length - self._tail))
        pixels = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in shown.items()
            if name not in (*_PER_TOKEN, "attention_mask")
        }
        with accelerated(self.model, self._streaming(self._prefix), processor=self.processor) as model:
            model(**inputs, **pixels, past_key_values=self._cache, use_cache=True)
        self._state.rebase()

    def _layers(self) -> Any:
        from ..families import family_of

        return family_of(self.model, self.processor).text.layers

    def _tokens(self, encoded: Any, part: slice) -> dict[str, Tensor]:
        return {name: encoded[name][:, part].to(self.model.device) for name in _PER_TOKEN if name in encoded}


def _alike(one: Any, other: Any) -> int:
    """How many tokens two prompts begin with alike."""
    width = min(one["input_ids"].shape[1], other["input_ids"].shape[1])
    same = one["input_ids"][0, :width] == other["input_ids"][0, :width]
    return int(same.long().cumprod(0).sum())
