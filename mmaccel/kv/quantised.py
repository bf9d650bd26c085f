"""A cache layer that stores what a codec packs in pages, and the rest in full precision behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .cache import CompressedLayer, KeyIndex, Ragged
from .codecs import Codec

if TYPE_CHECKING:
    from mmaccel_kernels.pages import Pages

    from .cache import CacheState


class QuantisedLayer(CompressedLayer):
    """The slots of :meth:`stored` are the packed tokens of every head, then those in full precision.

    pages : packed keys and values, None before the first are packed; ``width``: slots they take, those of the longest head.

    A token is packed once and stays packed: heads cannot evict from their pages, but the newest tokens may be cropped.
    """

    def __init__(self, state: CacheState, number: int) -> None:
        super().__init__(state, number)
        self.pages: Pages | None = None
        self.width = 0

    def stored(self) -> tuple[Tensor, Tensor]:
        """All keys and values as ``[B, Hkv, K, D]``, packed ones decoded; short heads are padded (see ``index``)."""
        keys, values = super().stored()
        if self.pages is None:
            return keys, values
        old_keys, old_values = self.pages.decoded(keys.dtype)
        shape = (*keys.shape[:2], self.width, -1)
        if len(old_keys) == keys.shape[0] * keys.shape[1] * self.width:
            # all heads are as long
            old_keys, old_values = old_keys.view(shape), old_values.view(shape)
        else:
            old_keys, old_values = Ragged(old_keys, old_values, self.pages.lengths(), self.width).padded()
        return torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2)

    def pack(self, codec: Codec, visual: Tensor | None, since: int, made: dict[int, tuple[KeyIndex, KeyIndex]]) -> None:
        """Quantise what is due.

        Parameters
        ----------
        visual : ``[B, S]`` bool, which of the places from ``since`` on are visual; None if none is.
        made : old and new indices, so that layers which shared one go on sharing one.
        """
        if self.index is None or (codec.visual_only and visual is None):
            return
        front, rest = self._halves()
        if not codec.visual_only and rest.shape[-1] < codec.residual + codec.page:
            return
        valid = rest >= 0
        if visual is not None and codec.visual_only:
            place = (rest.long() - since).flatten(1)
            seen = visual.to(place.device).gather(1, place.clamp(0, visual.shape[1] - 1)).view_as(rest)
            due = valid & (rest >= since) & seen
        else:
            due = valid & (valid.cumsum(-1) <= codec.packable(valid.sum(-1))[..., None])
        if not bool(due.any()):
            return
        keys, values = super().stored()
        chosen = due.expand(-1, keys.shape[1], -1)
        new = codec.pack(keys[chosen], values[chosen], chosen.sum(-1), self.pages)
        pages = new if self.pages is None else self.pages.appended(new)
        front = _leftmost(torch.cat([front, rest.masked_fill(~due, -1)], dim=-1))
        known = made.get(id(self.index))
        old = self.index
        self._full_precision(rest)
        super().evict(valid & ~due)
        self._join(pages, front)
        if known is not None:
            self.index = known[1]
        elif old.index.dim() == 2:
            made[id(old)] = (old, self.index)

    def evict(self, kept: Tensor, merged: tuple[Tensor, Tensor] | None = None) -> None:
        """Free all tokens in full precision but ``kept``; packed ones must be among those kept."""
        if self.pages is None:
            super().evict(kept, merged)
            return
        (front, rest), pages, width = self._halves(), self.pages, self.width
        if not bool((kept[..., :width] | (front < 0)).all()):
            raise UnsupportedError(
                "Keys that a codec has packed cannot be evicted one by one; use a policy without a schedule beside a codec."
            )
        self._full_precision(rest)
        if merged is not None:
            merged = merged[0][:, :, width:], merged[1][:, :, width:]
        super().evict(kept[..., width:], merged)
        self._join(pages, front)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens seen; packed ones are cut off their pages."""
        if self.pages is None or int(tokens_to_remove) >= 0:
            super().crop(tokens_to_remove)
            return
        self.seen += int(tokens_to_remove)
        (front, rest), pages = self._halves(), self.pages
        stays = (front >= 0) & (front < self.seen)
        pages = pages.cropped(stays.sum(-1).expand(-1, self.keys.shape[1]))
        self._full_precision(rest)
        super().evict((rest >= 0) & (rest < self.seen))
        self._join(pages, _leftmost(front.masked_fill(~stays, -1)))

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer holds."""
        yield from super().tensors()
        if self.pages is not None:
            yield from self.pages.tensors()

    def reset(self) -> None:
        """Back to empty, ready for another prompt."""
        super().reset()
        self.pages, self.width = None, 0

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        if self.pages is not None:
            self.pages = self.pages.selected(rows.to(self.pages.table.device))

    # --- the two parts ----------------------------------------------------------------------------------------
    def _halves(self) -> tuple[Tensor, Tensor]:
        """The index of packed slots and of those in full precision, ``[B, 1 or Hkv, K]`` each."""
        assert self.index is not None
        index = self.index.by_head
        return index[..., : self.width], index[..., self.width :]

    def _full_precision(self, rest: Tensor) -> None:
        """Be a layer without pages for a while, whose slots are ``rest [B, 1 or Hkv, K]``."""
        self.pages, self.width = None, 0
        self.index = KeyIndex(rest if rest.shape[1] > 1 else rest[:, 0], True, self.seen)

    def _join(self, pages: Pages, front: Tensor) -> None:
        """Put ``pages`` with slots ``front [B, 1 or Hkv, width]`` before what is stored."""
        assert self.index is not None
        rest = self.index.by_head
        heads = max(front.shape[1], rest.shape[1])
        index = torch.cat([part.expand(-1, heads, -1) for part in (front, rest)], dim=-1)
        padded = self.index.padded or bool((front < 0).any())
        self.index = KeyIndex(index if heads > 1 else index[:, 0], padded, self.seen)
        self.pages, self.width = pages, front.shape[-1]


def _leftmost(index: Tensor) -> Tensor:
    """Slots ``[..., K]`` that hold a key to the left, in order, and as few columns as that takes."""
    there = index >= 0
    order = (~there).long().argsort(dim=-1, stable=True)
    return index.gather(-1, order)[..., : int(there.sum(-1).max())]
