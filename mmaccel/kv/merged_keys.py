"""Keys that others were merged into as plain means, and how many tokens each of them represents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.masks import leftmost
from .index import KeyIndex, to_device

#: slots for new keys that a mask has when it is made
ROOM = 64


@dataclass
class MergedKeys:
    """The merged keys of every layer; a :class:`.shared.Memory`.

    To the logits of a key that represents ``n`` tokens ``factor log n`` is added.

    places, counts : by layer, ``[B, Hkv, n]`` long, the places of its merged keys, -1 for none, and ``[B, Hkv, n]`` float32,
        the number of tokens that each represents.
    """

    factor: float
    places: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    #: by layer the index that a mask was made for, and ``[B, Hq, 1, K + room]``, what is added to the logits of its slots
    masks: dict[int, tuple[KeyIndex, Tensor]] = field(default_factory=dict)

    def mask(self, layer: int, index: KeyIndex, query: Tensor, visible: Tensor | None) -> Tensor:
        """Additive mask ``[B, Hq, 1 or q, K]`` of ``query [B, Hq, q, D]`` over the keys of a layer: what is added to the logits
        of those that are ``visible [B, 1 or Hkv, q, K]`` bool, None for all, and the least number that there is for others.

        Between two evictions nothing is computed anew: slots behind those that are known are zero.
        """
        slots = len(index)
        own = self.prepare(layer, index, query.shape[1], query)[..., :slots]
        if visible is None:
            return own
        seen = visible.repeat_interleave(query.shape[1] // visible.shape[1], dim=1) if visible.shape[1] > 1 else visible
        return torch.where(seen, own, torch.finfo(own.dtype).min)

    def prepare(self, layer: int, index: KeyIndex, heads: int, like: Tensor) -> Tensor:
        """Mask of a layer for ``heads`` query heads in the type and on the device of ``like``, ``[B, Hq, 1, K + room]``, as it
        is kept."""
        index_known, known = self.masks.get(layer, (None, like))
        if (
            index_known is not index
            or known.shape[1] != heads
            or known.shape[3] < len(index)
            or known.dtype != like.dtype
        ):
            added = self.added(self.of_slots(layer, index.by_head)).to(like)
            known = pad(added.repeat_interleave(heads // added.shape[1], dim=1), (0, ROOM))[:, :, None]
            self.masks[layer] = index, known
        return known

    def of_slots(self, layer: int, index: Tensor) -> Tensor:
        """Numbers of tokens that the keys of ``index [B, 1 or Hkv, K]`` of a layer represent, ``[B, 1 or Hkv, K]`` float32; 0
        for keys that nothing was merged into."""
        if layer not in self.places:
            return torch.zeros_like(index, dtype=torch.float32)
        places, counts = (to_device(x[layer], index.device) for x in (self.places, self.counts))
        # one after the other: there are few
        found = index.new_zeros(len(index), places.shape[1], index.shape[2], dtype=torch.float32)
        for place, count in zip(places.unbind(2), counts.unbind(2), strict=True):
            found = torch.where((index == place[..., None]) & (place >= 0)[..., None], count[..., None], found)
        return found

    def added(self, counts: Tensor) -> Tensor:
        """Numbers that are added to the logits of keys which represent so many tokens; float32 as ``counts``, of any shape."""
        return self.factor * counts.clamp(min=1).log()

    def widened(self, query: Tensor, key: Tensor, counts: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` in float32, with one more channel, whose product is what is added
        to the logits of keys that represent ``counts [B, 1 or Hkv, K]`` tokens."""
        own = self.added(counts).expand(-1, key.shape[1], -1) / scaling
        return pad(query.float(), (0, 1), value=1.0), torch.cat([key.float(), own[..., None].to(key.device)], dim=-1)

    def of_layers(self, layers: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Places and counts of some layers, the rows of one behind those of the other, ``[R, Hkv, n]`` each as of a batch
        ``like [R, Hkv]``; layers with fewer merged keys end in -1."""
        rows, most = (
            len(like) // len(layers),
            max((self.places[n].shape[2] for n in layers if n in self.places), default=0),
        )
        none = torch.full((rows, like.shape[1], 0), -1, device=like.device)
        places = [to_device(self.places.get(n, none), like.device) for n in layers]
        counts = [to_device(self.counts.get(n, none), like.device).float() for n in layers]
        joined = [torch.cat([pad(x, (0, most - x.shape[2]), value=-1) for x in each]) for each in (places, counts)]
        return joined[0], joined[1]

    def note(self, layer: int, places: Tensor, counts: Tensor, held: Tensor | None) -> None:
        """Note merged keys of a prompt, ``[B, Hkv, n]`` each, or other counts of those that are ``held [B, Hkv, n]`` bool."""
        self.masks.pop(layer, None)
        if held is not None:
            if layer in self.counts:
                width = self.counts[layer].shape[2]
                self.counts[layer] = torch.where(held, counts, to_device(self.counts[layer], counts.device))[
                    ..., :width
                ]
            return
        for known, new in ((self.places, places), (self.counts, counts)):
            known[layer] = torch.cat([to_device(known[layer], new.device), new], dim=2) if layer in known else new

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self.masks.clear()
        for held in (self.places, self.counts):
            held.update({layer: x[to_device(rows, x.device)] for layer, x in held.items()})

    def copy(self) -> MergedKeys:
        """A copy to change independently."""
        return MergedKeys(self.factor, dict(self.places), dict(self.counts))

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.masks.clear()
        self.places.update({layer: x.masked_fill(x >= seen, -1) for layer, x in self.places.items()})

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Call place ``p`` from now on ``new[p]``; those that no layer stores are forgotten."""
        self.masks.clear()
        for layer, x in self.places.items():
            at = x.clamp(min=0)
            named, there = (to_device(y, x.device)[at] for y in (new, held))
            self.places[layer] = torch.where((x >= 0) & there, named.long(), -1)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (*self.places.values(), *self.counts.values())
        yield from (mask for _, mask in self.masks.values())


def into_runs(gone: Tensor, spots: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge all keys of a prompt that are ``gone`` and those at the ``spots`` in as many runs as there are spots, the longer
    runs first.

    gone, spots : ``[B, H, K]`` bool, no key is both. most : how many spots a head has at most.

    Returns
    -------
    ``[B, H, n]`` long and bool, the slot that every run is stored in and whether there is one; ``[B, H, n, K]`` float32, the
    weight of every key in it.
    """
    slots, there = leftmost(spots, most)
    pool = gone | spots
    rank, runs, total = pool.cumsum(-1) - 1, there.sum(-1, keepdim=True).clamp(min=1), pool.sum(-1, keepdim=True)
    size, longer = total // runs, total % runs
    first = longer * (size + 1)
    run = torch.where(rank < first, rank // (size + 1), longer + (rank - first) // size.clamp(min=1))
    number = torch.arange(slots.shape[2], device=slots.device)[:, None]
    return slots, there, ((run[:, :, None] == number) & pool[:, :, None] & there[..., None]).float()


def into_likest(keys: Tensor, gone: Tensor, slots: Tensor, there: Tensor, counts: Tensor) -> Tensor:
    """``[B, H, n, K]`` float32, the weight of every key in the merged ones: their own ``counts [B, H, n]`` at the ``slots
    [B, H, n]`` that are ``there``, and 1 for each that is ``gone [B, H, K]`` in the one of largest product with it, the first
    on a tie."""
    merged = keys.gather(2, slots[..., None].expand(-1, -1, -1, keys.shape[3]))
    products = (merged.float() @ keys.float().mT).masked_fill(~there[..., None], -torch.inf)
    number = torch.arange(slots.shape[2], device=slots.device)[:, None]
    share = ((products.argmax(2, keepdim=True) == number) & gone[:, :, None] & there[..., None]).float()
    return share.scatter(3, slots[..., None], (counts * there)[..., None])


def means(x: Tensor, slots: Tensor, there: Tensor, share: Tensor) -> Tensor:
    """``x [B, H, K, D]`` with the mean of all by their ``share [B, H, n, K]`` at those of the ``slots [B, H, n]`` that are
    ``there``."""
    mean = (share @ x.float() / share.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)
    # what is not there is written behind the last slot
    at = slots.where(there, x.shape[2])[..., None].expand(-1, -1, -1, x.shape[3])
    return pad(x, (0, 0, 0, 1)).scatter(2, at, mean)[:, :, :-1]
