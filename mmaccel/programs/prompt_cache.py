"""Prompt Cache: keys and values of single pictures, reused wherever a picture stands in a prompt.

>>> from mmaccel import PromptCache
>>> model = accelerate_vlm(model, "divprune", retain=0.25)
>>> prompts = PromptCache(model, processor)
>>> shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is there?"}]}
>>> answer = model.generate(**prompts.inputs([shown], [image]), max_new_tokens=4)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..accelerate import Accelerator
from ..core.transformers_api import DynamicCache, cache_argument
from ..errors import MmaccelError, UnsupportedError
from ..families import Family
from ..kv.cache import CacheState, adopt
from ..kv.index import KeyIndex
from ..kv.positions import NextPositions
from ..media.files import Chat, encode
from ..media.picture import load_picture
from ..method.keys import moves_keys
from ..runtime.cache.rotation import turned
from .prefix_caches import Media
from .video_qa.generator import needs_own_prefill


@dataclass(frozen=True, eq=False)
class _Module:
    """A picture that was read alone.

    ids : ``[n]`` on the CPU, its tokens. positions : ``[axes, n]`` of them as they were read. visual : visual tokens, and those
    that reached the last layer.
    """

    state: CacheState
    ids: Tensor
    positions: Tensor
    visual: tuple[int, int]


@dataclass(frozen=True)
class Apart:
    """The ``inputs`` of ``generate`` for a prompt whose pictures were read apart; its ``visual`` tokens, and those of them that
    reached the last layer; and how many tokens were ``reused``."""

    inputs: dict[str, Any]
    visual: tuple[int, int]
    reused: int


class PromptCache:
    """Keys and values of pictures and clips, kept apart from the prompts that show them (Prompt Cache, arXiv 2311.04934).

    Every picture of a prompt is a module: it is read alone, at the positions that it has in the prompt, and sees nothing in
    front of it; all text sees everything in front of it. A picture that was read before is neither encoded nor read again,
    wherever it stands in a prompt: its keys are turned by the difference of the positions. What this gives is what reading all
    modules anew gives, up to the rounding of the rotation. It is not what ``generate`` gives without modules, where a picture
    sees the text and the pictures before it; answers may differ.

    The paper encodes modules at positions that a schema reserves, and reads text of modules alone, too.

    Parameters
    ----------
    model : a model that is accelerated with a recipe that does not look at the question, such as ``none`` or ``divprune``.
    processor : the model's processor.
    limit : bytes of all kept keys and values; the least recently used ones go first.

    Attributes
    ----------
    hits, misses : pictures that were kept, and those that were read. nbytes : bytes of what is kept.

    Raises
    ------
    MmaccelError
        If the model is not accelerated, or its recipe works while the question is read.
    UnsupportedError
        If keys of the model cannot be moved to other positions, or its layers cannot read a picture apart.

    Examples
    --------
    >>> model = accelerate_vlm(model, "divprune", retain=0.25)
    >>> prompts = PromptCache(model, processor)
    >>> ask = lambda words: [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]
    >>> first = model.generate(**prompts.inputs(ask("what is there?"), [image]), max_new_tokens=2)
    >>> second = model.generate(**prompts.inputs(ask("where is it?"), [image]), max_new_tokens=2)
    >>> prompts.hits, prompts.misses
    (1, 1)
    """

    def __init__(self, model: Any, processor: Any, limit: int = 1 << 30) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise MmaccelError(f"`limit` must be a whole number of at least 1 byte, got {limit!r:.40}.")
        handle = Accelerator.on(model)
        if handle is None:
            raise MmaccelError("A PromptCache needs an accelerated model; call accelerate_vlm(model, 'none') first.")
        family = handle.family
        why = needs_own_prefill(handle.recipe)
        if handle.drafts.lossless or handle.plan.offload:
            why = "drafts and offload= begin with the whole prompt"
        if why is not None:
            raise MmaccelError(
                f"Pictures cannot be read apart from the prompt: {why}; use a recipe such as 'none' or 'divprune', or leave "
                "out the prompt cache."
            )
        if not moves_keys(family):
            raise UnsupportedError(
                f"Keys of this {family.name} model cannot be moved to other positions; leave out the prompt cache."
            )
        if family.marks_need_pixels:
            raise UnsupportedError(
                f"Marks around pictures of {family.name} models cannot be read without pixels; leave out the prompt cache."
            )
        if family.undivided is not None:
            raise UnsupportedError(
                f"Pictures cannot be read apart from the prompt: the language model of {family.name} {family.undivided}; leave "
                "out the prompt cache."
            )
        self.model, self.processor, self.limit, self._recipe = model, processor, limit, handle.recipe
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        self._kept: dict[str, _Module] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(one.state.nbytes() for one in self._kept.values())

    def inputs(
        self, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any] = (), clips: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """The inputs of ``model.generate`` for a chat: all tokens, and a cache that has read everything up to the end of the
        last picture.

        Parameters
        ----------
        messages : ``{"role": ..., "content": [part, ...]}``, with parts ``{"type": "image"}``, ``{"type": "video"}`` and
            ``{"type": "text", "text": ...}``.
        pictures, clips : PIL images and :class:`mmaccel.video.Clip`, in the order of their parts.

        Raises
        ------
        MmaccelError
            If the processor does not take the chat.
        UnsupportedError
            If a picture has other tokens in the chat than alone.
        """
        chat = Chat(tuple(dict(message) for message in messages), tuple(map(load_picture, pictures)), tuple(clips))
        inputs = encode(self.processor, [chat]).to(self.model.device, self.model.dtype)
        if not chat.pictures and not chat.clips:
            return dict(inputs)
        return self.read(self.model, self.processor, inputs, chat).inputs

    @torch.no_grad()
    def read(self, model: Any, processor: Any, inputs: Mapping[str, Any], chat: Chat) -> Apart:
        """The same for ``inputs`` of one row that are encoded already; ``model`` is this one or a twin of it."""
        handle = Accelerator.on(model)
        if handle is None or handle.recipe != self._recipe:
            raise MmaccelError(
                f"This PromptCache holds keys of recipe {self._recipe.name!r}, with which the model is not accelerated any "
                "more; make another one."
            )
        family: Family = handle.family
        ids = inputs["input_ids"]
        feed = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == ids.shape}
        positions = model._prepare_position_ids_for_generation(ids, dict(inputs))
        positions = positions[-family.axes :] if positions.dim() == 3 else positions
        axes = positions.reshape(-1, *positions.shape[-2:])
        cache = DynamicCache()
        state, at, visual, reused = adopt(cache, family.depth, None), 0, (0, 0), 0
        visible = family.visual(ids)[0].cpu()
        for name, show in _shown(chat):
            module, alone = self._find(name), None
            if module is not None:
                mine = module.ids
            else:
                alone = encode(processor, [show])
                mine = _visual_span(family, alone["input_ids"][0])
            begin = at + int(visible[at:].byte().argmax())
            end = begin + len(mine)
            if not torch.equal(ids[0, begin:end].cpu(), mine):
                raise UnsupportedError(
                    "A picture or clip has other tokens in this prompt than alone, so that it cannot be read apart; leave out "
                    "the prompt cache."
                )
            if at < begin:
                _read(family, feed, positions, slice(at, begin), cache)
            if module is not None:
                reused += len(mine)
            else:
                module = _alone(model, alone, feed, positions, slice(begin, end))
                self._keep(name, module)
            _append(family, state, module, axes[:, 0, begin:end])
            visual = visual[0] + module.visual[0], visual[1] + module.visual[1]
            at = end
            if at == ids.shape[1]:
                raise UnsupportedError(
                    "The prompt ends in a picture; put a question behind it, or leave out the prompt cache."
                )
            if model.mmaccel.plan.active:
                # text goes on where it does in this prompt
                state.positions = NextPositions(state.seen - axes[0, :, at])
        return Apart({**feed, "position_ids": positions, **cache_argument(cache)}, visual, reused)

    def clear(self) -> None:
        """Drop everything that is kept."""
        with self._lock:
            self._kept.clear()

    def _find(self, key: str) -> _Module | None:
        with self._lock:
            module = self._kept.pop(key, None)
            self.hits, self.misses = self.hits + (module is not None), self.misses + (module is None)
            if module is not None:
                self._kept[key] = module
            return module

    def _keep(self, key: str, module: _Module) -> None:
        with self._lock:
            self._kept[key] = module
            while self._kept and self.nbytes > self.limit:
                del self._kept[next(iter(self._kept))]


def _shown(chat: Chat) -> Iterator[tuple[str, Chat]]:
    """The digest of every picture and clip of a chat, and a chat that shows it alone."""
    media = Media.of(chat)
    pictures, clips = zip(media.pictures, chat.pictures, strict=True), zip(media.clips, chat.clips, strict=True)
    for part in (part for message in chat.messages for part in message["content"] if part["type"] != "text"):
        alone = ({"role": "user", "content": [{"type": part["type"]}]},)
        if part["type"] == "image":
            name, picture = next(pictures)
            yield name, Chat(alone, (picture,))
        else:
            name, clip = next(clips)
            yield name, Chat(alone, (), (clip,))


def _visual_span(family: Family, ids: Tensor) -> Tensor:
    """The ids from the first to the last visual token."""
    visual = family.visual(ids[None])[0].nonzero()[:, 0]
    return ids[int(visual[0]) : int(visual[-1]) + 1]


def _alone(model: Any, alone: Any, feed: Mapping[str, Tensor], positions: Tensor, part: slice) -> _Module:
    """Read one picture, at the positions that it has in a prompt. ``alone`` are the inputs of a prompt that shows it alone."""
    family: Family = model.mmaccel.family
    tokens = alone["input_ids"].shape
    alone = alone.to(model.device, model.dtype)
    pixels = {name: x for name, x in alone.items() if not (isinstance(x, Tensor) and x.shape[:2] == tokens)}
    cache = DynamicCache()
    state = adopt(cache, family.depth, None)
    _read(family, feed, positions, part, cache, pixels)
    stats = model.mmaccel.stats()
    axes = positions.reshape(-1, *positions.shape[-2:])[:, 0, part]
    visual = stats["visual_tokens"], int(stats["visual_tokens_kept"])
    return _Module(state, feed["input_ids"][0, part].cpu(), axes, visual)


def _read(
    family: Family,
    feed: Mapping[str, Tensor],
    positions: Tensor,
    part: slice,
    cache: Any,
    pixels: Mapping[str, Any] | None = None,
) -> None:
    """Read a part of a prompt behind what a cache has read."""
    tokens = {name: x[:, part] for name, x in feed.items() if name != "attention_mask"}
    family.inner(**tokens, **(pixels or {}), position_ids=positions[..., part], use_cache=True, **cache_argument(cache))


def _append(family: Family, state: CacheState, module: _Module, positions: Tensor) -> None:
    """Put the keys of a picture behind those of a cache, turned to the ``positions [axes, n]`` of its tokens."""
    seen, more = state.seen, module.state.seen
    by = (positions - module.positions)[:, None, None]
    made: dict[int, KeyIndex] = {}
    for layer, mine in zip(state.layers, module.state.layers, strict=True):
        index = mine.index
        keys = mine.keys
        if bool(by.any()):
            slots = index.index.long()[None, :, None].expand(len(by), -1, -1, -1)
            keys = turned(family.text, keys, by.to(keys.device).expand(-1, len(keys), -1, -1).gather(3, slots))
        if id(index) not in made:
            places = index.index + seen
            if not layer.empty:
                places = torch.cat([layer.index.index, places], dim=1)
            made[id(index)] = KeyIndex(places, False, seen + more)
        if layer.empty:
            layer.dtype, layer.device, layer.bare_bytes = mine.dtype, mine.device, mine.bare_bytes
            layer.keys, layer.values, layer.is_initialized = keys, mine.values, True
        else:
            layer.keys = torch.cat([layer.keys, keys], dim=2)
            layer.values = torch.cat([layer.values, mine.values], dim=2)
        layer.seen, layer.index = seen + more, made[id(index)]
    old, new = state.shared.places, module.state.shared.places
    for name in ("weights", "first_weights"):
        before, behind = getattr(old, name), getattr(new, name)
        if before is not None or behind is not None:
            like = behind if before is None else before
            before, behind = (like.new_zeros(1, 0) if x is None else x for x in (before, behind))
            parts = [pad(before, (0, seen - before.shape[1])), pad(behind, (0, more - behind.shape[1]))]
            setattr(old, name, torch.cat(parts, dim=1))
