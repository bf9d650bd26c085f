"""A model that reads blocks of tokens behind a prompt, and forgets those that are rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.transformers_api import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    cache_argument,
    cache_in,
    cache_of,
)
from ...decoding.tree import ancestors, depths
from ...kv.cache import crop, snapshot, state_of

#: arguments that say what kind every token is of
_TYPES = "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"
#: why a cache can have no drafts
UNFORGETTING = "the cache has layers that cannot forget rejected tokens"


class _Window(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keys of a window and of what may be forgotten, of which attention is given those that its mask is made for. Old releases
    of transformers, such as 5.17, give it all that are stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, H, n, D]``; those of the window of every new token."""
        seen = self.sliding_window - 1 + key_states.shape[2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys[:, :, -seen:], values[:, :, -seen:]


class Reader:
    """The cache of a model and what its next forward needs, as ``generate`` has prepared them.

    Where all layers keep keys of every token, rows may keep different numbers of tokens: slots of rejected ones stay, and are
    masked. Windows are counted in slots: there the tokens of a row that keeps fewer move up to those of the others, and what is
    left in front is masked. Elsewhere (see :attr:`together`) all rows keep as many as the one that keeps the fewest. With
    recurrent states, whose tokens cannot be taken out one by one, either all rows keep everything that they have read or the
    cache goes back to where it was before.

    Parameters
    ----------
    model : a model with ``generate``.
    ids : ``[B, S]`` of the prompt.
    config : the generation config of the call.
    arguments : arguments of the model that ``generate`` has prepared; its cache must not be static.
    options : further arguments of every forward behind the prompt.
    kept : whether the caller goes on with the cache.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        config: Any,
        arguments: dict[str, Any],
        options: dict[str, Any] | None = None,
        kept: bool = False,
    ) -> None:
        self.model, self.ids, self.config, self.kept = model, ids, config, kept
        self.arguments, self.options = dict(arguments), options or {}
        self.output: Any = None
        self.unkept = 0
        #: whether all layers keep keys of every token, and whether rows may keep different numbers of them
        self.dense = self.ragged = False
        #: of every row, how many tokens of the last block it kept fewer than the row that kept most
        self.late = [0] * len(ids)
        #: whether all of them are read under a mask of ours
        self.takes_mask = False
        #: whether a block may be a tree; known behind the first block
        self.trees = False
        #: ``[B, L]`` bool, slots of the cache behind the prompt that hold rejected tokens of a row
        self.gaps: Tensor | None = None
        #: whether some layers have recurrent states; known behind the prompt
        self.recurrent = False
        #: the forward behind the prompt, and how many tokens a block of several is padded to; 0 for none
        self.forward: Callable[..., Any] = model
        self.block = 0
        self._restore: Callable[[], None] | None = None
        if (cache := cache_in(self.arguments)) is not None:
            cache.activate_past_recording()
            for layer in _recurrent(cache):
                # the state before a block is remembered instead
                layer.record_past = False
            for layer in cache.layers:
                if type(layer) is DynamicSlidingWindowLayer:
                    layer.__class__ = _Window

    @property
    def cache(self) -> Any:
        """The KV cache."""
        return cache_in(self.arguments)

    @property
    def can_forget(self) -> bool:
        """Whether rejected tokens can be forgotten; known behind the prompt."""
        layers = () if self.cache is None else self.cache.layers
        return bool(layers) and all(one.is_croppable or isinstance(one, LinearAttentionLayer) for one in layers)

    @property
    def together(self) -> str:
        """The reason why all rows of a batch keep as many tokens as the one that keeps the fewest; empty if they do not."""
        if self.ragged or self.recurrent or self.cache is None or len(self.ids) < 2:
            return ""
        if state_of(self.cache) is not None:
            return "the recipe has shaped a cache whose rows grow together"
        if any(type(layer) is _Window for layer in self.cache.layers) and self.kept:
            return "the caller keeps a cache with windows, whose rows must end at the same slot"
        return "the model or its cache counts the tokens of all rows as one number"

    def prefill(self) -> Tensor:
        """Read the prompt: logits ``[B, V]`` float32 of its last token."""
        self.output = self.model._prefill(self.ids, self.config, self.arguments)
        if (cache := cache_of(self.output)) is not None:
            self.arguments |= cache_argument(cache)
        self.recurrent = self.cache is not None and bool(_recurrent(self.cache))
        plain = self.cache is not None and state_of(self.cache) is None
        self.dense = plain and all(type(layer) is DynamicLayer for layer in self.cache.layers)
        windows = plain and not self.kept and all(type(one) in (DynamicLayer, _Window) for one in self.cache.layers)
        self.ragged = (self.dense or windows) and len(self.ids) > 1
        self.takes_mask = self.dense and _masked(self.model)
        logits: Tensor = self.output.logits[:, -1].float()
        return logits

    def read(self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Read the next tokens ``[B, n]``: logits ``[B, n, V]`` float32 behind each. Of a tree ``parents [B, n]`` are the
        places of the tokens before each, -1 for the newest that was kept."""
        length = tokens.shape[1]
        if self.recurrent and not self.unkept:
            self._restore = snapshot(self.cache)
        self.ids = torch.cat([self.ids, tokens], 1)
        self.arguments = self._longer(length)
        # counted before the forward, which may fail: then these are forgotten too
        self.unkept += length
        inputs = self.model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=length, is_first_iteration=False, **self.arguments
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = length
        # a model that counts slots would give rows with masked ones other positions
        self.ragged = self.ragged and inputs.get("position_ids") is not None
        self.trees = self.takes_mask and isinstance(inputs.get("position_ids"), Tensor)
        if parents is not None:
            inputs |= self._as_tree(parents, inputs["position_ids"])
        self.output = self.forward(**inputs, **self.options, return_dict=True)
        # the logits of a captured step are overwritten by the next one
        logits: Tensor = self.output.logits[:, -length:].to(torch.float32, copy=self.forward is not self.model)
        return logits

    def capture(self, block: int) -> None:
        """Capture steps behind the prompt where they can be, of one token or of ``block``."""
        if self.model._valid_auto_compile_criteria(self.arguments, self.config):
            self.forward, self.block = self.model.get_compiled_call(self.config.compile_config), block

    def keep(self, counts: Sequence[int | None]) -> list[int]:
        """Forget all but the first ``counts`` tokens of every row that were read since the last call, of a row whose count is
        None as many as of another; how many stay."""
        wanted = [count for count in counts if count is not None] or [0]
        most = max(wanted) if self.ragged else min(wanted)
        if self.recurrent and most < self.unkept:
            most = 0
        if dropped := self.unkept - most:
            self.ids = self.ids[:, :-dropped]
        kept = [most if count is None or not self.ragged else count for count in counts]
        self.late = [most - count for count in kept]
        if self.ragged and not self.dense and any(self.late):
            self._move_back(torch.tensor(self.late, device=self.ids.device))
        self._forget(dropped)
        if self.ragged and self.dense:
            self._mask(most, torch.tensor(kept, device=self.ids.device))
        self.unkept = 0
        return kept

    def close_gaps(self, length: int) -> None:
        """Leave the cache as plain decoding does, with ``length`` tokens: those of every row in their order. Called at the end.
        Where a row has fewer, they are fewer, and the next turn reads the others."""
        if self.gaps is None or not bool(self.gaps.any()):
            return
        order = self.gaps.long().argsort(dim=1, stable=True)
        before = self.cache.get_seq_length() - order.shape[1]
        length = min(length, before + int((~self.gaps).sum(1).min()))
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                x = getattr(layer, name)
                at = order[:, None, :, None].to(x.device).expand(-1, x.shape[1], -1, x.shape[3])
                setattr(layer, name, torch.cat([x[:, :, :before], x[:, :, before:].gather(2, at)], 2)[:, :, :length])

    def _as_tree(self, parents: Sequence[Sequence[int]], positions: Tensor) -> dict[str, Tensor]:
        """Mask ``[B, 1, n, S + n]`` and positions of a block that is a tree: a token sees what was kept and its own path, and
        stands as far behind as the path is long."""
        rows, length, device = len(parents), len(parents[0]), self.ids.device
        depth = torch.tensor([depths(one) for one in parents], device=device)
        positions = positions.expand(*positions.shape[:-2], rows, length)
        seen = torch.stack([ancestors(one) for one in parents]).to(device)
        before = self.cache.get_seq_length()
        kept = self.arguments.get("attention_mask")
        kept = torch.ones(rows, before, device=device) if kept is None else kept[:, :before]
        visible = torch.cat([kept.bool()[:, None].expand(-1, length, -1), seen], 2)[:, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=device)
        return {
            "position_ids": positions.gather(-1, depth.expand_as(positions)),
            "attention_mask": mask.masked_fill(~visible, torch.finfo(mask.dtype).min),
        }

    def move_up(self, places: Sequence[Sequence[int]]) -> None:
        """Move the tokens at ``places`` of the last block to its front, row by row."""
        length = self.unkept
        order = torch.tensor([[*one, *(set(range(length)) - set(one))] for one in places], device=self.ids.device)
        if bool((order == torch.arange(length, device=order.device)).all()):
            return
        self.ids[:, -length:] = self.ids[:, -length:].gather(1, order)
        for layer in self.cache.layers:
            for x in (layer.keys, layer.values):
                at = order[:, None, :, None].to(x.device).expand(-1, x.shape[1], -1, x.shape[3])
                x[:, :, -length:] = x[:, :, -length:].gather(2, at)

    def _move_back(self, late: Tensor) -> None:
        """Move all tokens of every row ``late [B]`` slots towards the end; what is in front of them is masked. Windows still
        hold what they were given before the block, so that none of a row's tokens is missing."""
        for layer in self.cache.layers:
            layer.keys, layer.values = _later(layer.keys, late, 2), _later(layer.values, late, 2)
        mask = self.arguments.get("attention_mask")
        if mask is None:
            mask = torch.ones(len(late), self.cache.get_seq_length(), dtype=torch.long, device=late.device)
        front = torch.arange(mask.shape[1], device=late.device) < late[:, None]
        self.arguments["attention_mask"] = _later(mask, late, 1).masked_fill(front, 0)
        for name in ("position_ids", *_TYPES):
            if isinstance(value := self.arguments.get(name), Tensor):
                self.arguments[name] = _later(value, late, value.dim() - 1)

    def _longer(self, count: int) -> dict[str, Any]:
        """The arguments for ``count`` further tokens."""
        arguments: dict[str, Any] = self.model._update_model_kwargs_for_generation(
            self.output, dict(self.arguments), num_new_tokens=count
        )
        return arguments

    def _forget(self, dropped: int) -> None:
        """Cut the last ``dropped`` tokens off the cache and the arguments. Layers with windows shrink even for 0."""
        if not self.recurrent:
            crop(self.cache, dropped)
        elif dropped and self._restore is not None:
            self._restore()
        else:
            for layer in self.cache.layers:
                if not isinstance(layer, LinearAttentionLayer):
                    layer.crop(0)
        self._cut(dropped)

    def drop(self, restore: Callable[[], None]) -> None:
        """Forget all that was read since tokens were kept last, which ``restore`` takes out of the cache."""
        restore()
        if self.unkept:
            self.ids = self.ids[:, : -self.unkept]
        self._cut(self.unkept)
        self.unkept = 0

    def _cut(self, dropped: int) -> None:
        """Cut the last ``dropped`` tokens off the arguments."""
        for name in ("attention_mask", "position_ids", *_TYPES):
            value = self.arguments.get(name)
            if dropped and isinstance(value, Tensor):
                self.arguments[name] = value[..., :-dropped]

    def _mask(self, most: int, kept: Tensor) -> None:
        """Mask the slots behind the first ``kept`` of the last ``most`` in every row; positions go on behind the kept ones."""
        gone = torch.arange(most, device=kept.device) >= kept[:, None]
        self.gaps = gone if self.gaps is None else torch.cat([self.gaps, gone], 1)
        if not bool(gone.any()):
            return
        mask = self.arguments.get("attention_mask")
        if mask is None:
            mask = torch.ones(len(kept), self.cache.get_seq_length(), dtype=torch.long, device=kept.device)
        self.arguments["attention_mask"] = torch.cat([mask[:, :-most], mask[:, -most:].masked_fill(gone, 0)], 1)
        if isinstance(positions := self.arguments.get("position_ids"), Tensor):
            # the last place of a row is read as that of its newest token
            new = positions[..., -most:]
            last = (kept - 1).clamp(min=0)[:, None].expand(new.shape[:-1] + (1,))
            before = positions[..., -most - 1 : -most]
            newest = torch.where(kept[:, None] > 0, new.gather(-1, last), before)
            self.arguments["position_ids"] = torch.cat([positions[..., :-most], torch.where(gone, newest, new)], -1)


def obstacle_to_trees(reader: Reader) -> str:
    """The reason why no block behind a prompt is a tree; empty if some may be."""
    if reader.takes_mask or reader.cache is None:
        return ""
    if reader.dense:
        return "the attention of the model takes no mask that tells paths apart"
    if state_of(reader.cache) is None:
        return "some layers keep a window of keys, or a recurrent state"
    return "keys stay in the order of the text behind recipes, prompts in chunks and captured steps"


def _masked(model: Any) -> bool:
    """Whether the attention of a model takes a mask of its caller's."""
    name = str(model.config.get_text_config()._attn_implementation)
    return name.endswith(("eager", "sdpa"))


def _recurrent(cache: Any) -> list[Any]:
    """The layers of a cache that have recurrent states."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]


def _later(x: Tensor, late: Tensor, slots: int) -> Tensor:
    """``x`` with every row moved ``late [B]`` slots towards the end of dimension ``slots``. Rows are dimension 0 of keys and
    values, and else the one before the slots."""
    rows = slots - 1 if slots == x.dim() - 1 else 0
    shape = [1] * x.dim()
    shape[rows], shape[slots] = len(late), x.shape[slots]
    late = late.to(x.device)
    at = (torch.arange(x.shape[slots], device=x.device) - late[:, None]).clamp(min=0).view(shape)
    whole = list(x.shape)
    whole[rows] = len(late)
    return x.expand(whole).gather(slots, at.expand(whole))
