"""Kept KV caches, found by the content of what they have read: a prompt with the same beginning continues one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.transformers_api import cache_argument
from ..families import Family
from ..kv.cache import cache_bytes, cache_with, state_of
from ..kv.positions import NextPositions
from ..media.files import Chat, encode
from .identity import digest


@dataclass(frozen=True)
class Media:
    """Digests of the pictures and of the clips of a prompt, in their order; pixels count, not files."""

    pictures: tuple[str, ...]
    clips: tuple[str, ...]

    @staticmethod
    def of(chat: Chat) -> Media:
        """The media of a chat."""
        return Media(tuple(map(digest, chat.pictures)), tuple(map(digest, chat.clips)))

    def begins(self, other: Media) -> bool:
        """Whether ``other`` has these first."""
        pictures, clips = other.pictures[: len(self.pictures)], other.clips[: len(self.clips)]
        return (pictures, clips) == (self.pictures, self.clips)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A cache, and what it has read.

    key : digest of the recipe and its budget. ids : ``[n]`` on the CPU. end : tokens up to the end of the last picture or clip.
    visual : visual tokens, and those of them that reached the last layer.
    """

    key: str
    ids: Tensor
    media: Media
    end: int
    visual: tuple[int, int]
    cache: Any

    def common(self, ids: Tensor) -> int:
        """Number of tokens that both begin with."""
        width = min(len(ids), len(self.ids))
        return int((ids[:width] == self.ids[:width]).long().cumprod(0).sum())


@dataclass(frozen=True)
class Beginning:
    """The beginning of a prompt in a cache of its own: so many ``tokens``, with these ``media`` and ``visual`` tokens."""

    cache: Any
    tokens: int
    media: Media
    visual: tuple[int, int]


class PrefixCaches:
    """Caches of the last prompts with their answers, in ``limit`` bytes together; the least recently used ones go first.

    crops : whether a prompt may continue a part of a cache; else it must begin with all that the cache has read.

    Threads may share it. A cache that is kept never changes; whoever continues it gets a copy, which shares its tensors until
    it grows.
    """

    def __init__(self, limit: int, crops: bool = True) -> None:
        self.limit, self.crops = limit, crops
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache_bytes(one.cache) for one in self._kept)

    def clear(self) -> None:
        """Drop all caches."""
        with self._lock:
            self._kept.clear()

    def continues(self, key: str, ids: Tensor, media: Media) -> bool:
        """Whether a cache with this ``key`` has read a picture or clip of a prompt ``ids [n]`` on the CPU, or at least half of
        its tokens."""
        with self._lock:
            best, tokens = self._longest(key, ids, media)
        return best is not None and (best.end > 0 or 2 * tokens >= len(ids))

    def find(self, key: str, ids: Tensor, media: Media) -> Beginning | None:
        """The longest beginning of a prompt ``ids [n]`` on the CPU that a cache with this ``key`` has read, with every picture
        of that cache, and without the last token of the prompt; None where no cache has."""
        with self._lock:
            best, tokens = self._longest(key, ids, media)
            if best is None:
                return None
            self._kept.remove(best)
            self._kept.append(best)
            state = state_of(best.cache)
            cache = copy.deepcopy(best.cache) if state is None else cache_with(state.copy())
        if tokens < len(best.ids):
            cache.crop(tokens - len(best.ids))
        return Beginning(cache, tokens, best.media, best.visual)

    def _longest(self, key: str, ids: Tensor, media: Media) -> tuple[_Kept | None, int]:
        """The cache that has read the longest beginning of a prompt, and how many tokens; see :meth:`find`."""
        best, tokens = None, 0
        for one in self._kept:
            common = min(one.common(ids), len(ids) - 1)
            if one.key != key or not one.media.begins(media) or common < max(one.end, tokens + 1):
                continue
            if common == len(one.ids) or (self.crops and one.cache.is_croppable):
                best, tokens = one, common
        return best, tokens

    def add(self, key: str, ids: Tensor, media: Media, end: int, visual: tuple[int, int], cache: Any) -> None:
        """Keep a cache that has read ``ids [n]`` on the CPU, in place of those that are the beginning of it."""
        new = _Kept(key, ids, media, end, visual, cache)
        with self._lock:
            crops = self.crops and cache.is_croppable
            self._kept = [
                one
                for one in self._kept
                if one.key != key or one.media != media or one.common(ids) < len(one.ids) or not crops
            ]
            self._kept.append(new)
            while self._kept and self.nbytes > self.limit:
                del self._kept[0]


def continued(
    family: Family, processor: Any, inputs: Mapping[str, Any], chat: Chat, begun: Beginning
) -> dict[str, Any] | None:
    """The inputs of ``generate`` for a prompt whose beginning is in a cache: all tokens, and pixels of what is new. None where
    the family lays out new pictures in another way than alone, or their positions are not known.

    inputs : of the whole prompt, one row.
    """
    ids, state = inputs["input_ids"], state_of(begun.cache)
    feed = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == ids.shape}
    pictures, clips = chat.pictures[len(begun.media.pictures) :], chat.clips[len(begun.media.clips) :]
    if pictures or clips:
        ahead = None if state is None else state.positions.ahead
        if family.numbers_pictures or state is None or (ahead is not None and bool(ahead.any())):
            return None
        shown = [{"type": "image"}] * len(pictures) + [{"type": "video"}] * len(clips)
        alone = encode(processor, [Chat(({"role": "user", "content": shown},), pictures, clips)])
        if not torch.equal(
            family.visual(alone["input_ids"]).sum(1), family.visual(ids[:, begun.tokens :].cpu()).sum(1)
        ):
            return None
        alone = alone.to(ids.device, family.model.dtype)
        tokens = alone["input_ids"].shape
        feed |= {name: x for name, x in alone.items() if not (isinstance(x, Tensor) and x.shape[:2] == tokens)}
    else:
        positions = family.model._prepare_position_ids_for_generation(ids, dict(inputs))
        positions = positions[-family.axes :] if positions.dim() == 3 else positions
        feed["position_ids"] = positions
        if state is not None and (offset := state.positions.offset) is not None:
            begin = positions.reshape(-1, *positions.shape[-2:])[0, :, begun.tokens]
            state.positions = NextPositions(state.seen - begin.to(offset))
    return {**feed, **cache_argument(begun.cache)}
