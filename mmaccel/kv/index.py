"""Index of stored keys: the place that each came from, and the masks that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import masks
from .growable import append, trimmed


def leftmost(there: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The slots that are ``there [B, heads, K]`` bool, moved to the left in their order: ``[B, heads, W]`` long, where ``W`` is
    the most there are of one row; which of these are slots at all, the same shape, bool; and ``lengths [B, heads]`` long on
    the CPU, how many there are. Where the caller knows these nothing waits for the device, else the host waits once."""
    lengths = there.sum(-1).cpu() if lengths is None else lengths.expand(there.shape[:-1])
    width = int(lengths.max()) if lengths.numel() else 0
    return *masks.leftmost(there, width), lengths


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor from the host or another device without waiting for the work of ``device``."""
    return x.to(device, non_blocking=device.type != "cpu")


def select_rows(holder: Any, names: Iterable[str], rows: Tensor) -> None:
    """Keep, repeat or reorder rows of the batch in the tensors that ``holder`` has by these ``names``; None stays None."""
    for name in names:
        if (tensor := getattr(holder, name)) is not None:
            setattr(holder, name, tensor[to_device(rows, tensor.device)])


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The ``tensors`` on the CPU. The host waits once for all of them, whatever their devices are."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    # the widest numbers first, so that all begin at a multiple of their size
    order = sorted(range(len(tensors)), key=lambda n: -tensors[n].element_size())
    parts = [tensors[n].to(tensors[0].device).contiguous().flatten().view(torch.uint8) for n in order]
    found = torch.cat(parts).cpu().split([len(part) for part in parts])
    made = {n: part.view(tensors[n].dtype).view(tensors[n].shape) for n, part in zip(order, found, strict=True)}
    return [made[n] for n in range(len(tensors))]


#: an index appends the places of so many forwards at once, or earlier if its tensor is read
BATCHED = 64


class KeyIndex:
    """The place in the unreduced, padded sequence of every stored key; shared by layers that store the same keys.

    While every slot holds a key, attention needs their number and not their places. So :meth:`extend` only lists new places,
    and they are appended to the tensor when it is read.

    Parameters
    ----------
    index : ``[B, K]``, or ``[B, Hkv, K]`` where heads differ; -1 marks a slot without a key.
    padded : whether any slot is -1 (known without asking the device).
    upto : logical length: tokens seen when the index was last extended.
    lengths : ``[B, 1 or Hkv]`` long on the CPU, see :attr:`lengths`, where they are known.
    """

    def __init__(self, index: Tensor, padded: bool, upto: int, lengths: Tensor | None = None) -> None:
        self._index = index.to(torch.int32)
        self._pending: list[Tensor] = []
        self._pending_count = 0
        self.padded = padded
        self.upto = upto
        self._know(lengths)
        self._mask: tuple[Tensor, int | None, Tensor | None, Tensor] | None = None
        self._slots: Tensor | None = None
        self._weighed: tuple[Tensor, Tensor | None, int, Tensor] | None = None

    def _know(self, lengths: Tensor | None) -> None:
        """Set the lengths, None if only the device knows; they are kept, and new keys are counted, as Python integers."""
        self._lengths: list[list[int]] | None = None if lengths is None else lengths.tolist()
        self._more = 0
        if lengths is not None:
            self._sum, self._many, self._own = int(lengths.sum()), lengths.numel(), lengths.shape[1]

    def clone(self) -> KeyIndex:
        """A copy to change independently."""
        return KeyIndex(self.index, self.padded, self.upto, None if self._lengths is None else self.lengths)

    def __len__(self) -> int:
        return self._index.shape[-1] + self._pending_count

    @property
    def index(self) -> Tensor:
        """``[B, K]``, or ``[B, Hkv, K]`` where heads differ, int32; -1 marks a slot without a key."""
        if self._pending:
            self._join(None)
        return self._index

    @index.setter
    def index(self, index: Tensor) -> None:
        self._index, self._pending, self._pending_count = index, [], 0

    @property
    def of_heads(self) -> bool:
        """Whether heads store keys of different places."""
        return self._index.dim() == 3

    def _join(self, expected_new_tokens: int | None) -> None:
        """Append pending places to the tensor."""
        new = torch.cat(self._pending, dim=1) if len(self._pending) > 1 else self._pending[0]
        if self.of_heads:
            new = new[:, None].expand(-1, self._index.shape[1], -1)
        self.index = append(self._index, new, -1, expected_new_tokens)

    @property
    def by_head(self) -> Tensor:
        """The index with an axis for heads: ``[B, 1, K]`` where all store the same keys, else ``[B, Hkv, K]``."""
        return self.index if self.of_heads else self.index[:, None]

    @property
    def known(self) -> bool:
        """Whether the host knows :attr:`lengths` without asking the device."""
        return not self.padded or self._lengths is not None

    @property
    def lengths(self) -> Tensor:
        """Number of keys that every row stores, and every head where heads differ: ``[B, 1 or Hkv]`` long on the CPU."""
        if not self.padded:
            return torch.full((len(self._index), self._index.shape[1] if self.of_heads else 1), len(self))
        if self._lengths is None:
            self._know((self.by_head >= 0).sum(-1).cpu())
        return torch.tensor(self._lengths) + self._more

    def held(self, heads: int) -> int:
        """Number of keys that a number of heads of all rows store together, where it is :attr:`known`."""
        if not self.padded:
            return len(self._index) * heads * len(self)
        return (self._sum + self._more * self._many) * (heads // self._own)

    def extend(
        self,
        new: Tensor,
        padded: bool,
        upto: int,
        lengths: Tensor | None = None,
        expected_new_tokens: int | None = None,
    ) -> None:
        """Append ``new [B, q]``, of which ``lengths [B]`` are keys. All layers that share this index call it; only the first
        call has an effect. For ``expected_new_tokens`` see :func:`.growable.append`."""
        if self.upto >= upto:
            return
        if not self.known or (padded and lengths is None):
            self._know(None)
        elif padded and lengths is not None:
            self._know(self.lengths + lengths[:, None])
        else:
            # all of them are keys
            self._more += new.shape[1]
        same = new.dtype == self._index.dtype and new.device == self._index.device
        self._pending.append(new if same else new.to(self._index))
        self._pending_count += new.shape[1]
        if len(self._pending) == BATCHED:
            self._join(expected_new_tokens)
        self.padded |= padded
        self.upto, self._slots = upto, None

    def windowed(self, window: int | None, coming: int = 0) -> bool:
        """Whether any key may be out of reach of a sliding window, which counts original places; now, or when so many more
        are ``coming``."""
        return window is not None and self.upto + coming > window

    def mask(self, queries: Tensor, window: int | None, groups: Tensor | None = None) -> Tensor | None:
        """Attention mask ``[B, 1 or Hkv, q, K]`` bool, or None where it is plain causal attention.

        Parameters
        ----------
        queries : ``[B, q]``, the places of the queries, -1 for padding. window : see :meth:`windowed`.
        groups : ``[B, seen]`` long, see ``bidirectional_groups`` of :class:`.forward_info.Phase`.
        """
        q = queries.shape[1]
        windowed = self.windowed(window)
        if groups is None and not self.padded and not windowed and (q == 1 or q == len(self)):
            return None
        known = self._mask
        if known is None or known[0] is not queries or known[1] != window or known[2] is not groups:
            keys, at = self.by_head[:, :, None], queries.to(self.index)[:, None, :, None]
            mask = keys <= at
            if groups is not None:
                mask |= self._same_group(queries, groups)
            mask &= keys >= 0
            if window is not None and windowed:
                mask &= at - keys < window
            self._mask = known = (queries, window, groups, mask)
        return known[3]

    def _same_group(self, queries: Tensor, groups: Tensor) -> Tensor:
        """Which keys are in the group of a query at places ``[B, q]``, ``[B, 1 or Hkv, q, K]`` bool."""
        numbers, keys = groups.to(self.index.device), self.by_head.long().clamp(min=0)
        asking = queries.to(self.index.device).long()
        of_queries = numbers.gather(1, asking.clamp(min=0)).masked_fill(asking < 0, -1)[:, None, :, None]
        of_keys = numbers[:, None].expand(-1, keys.shape[1], -1).gather(2, keys)[:, :, None]
        return (of_queries == of_keys) & (of_queries >= 0)

    def weighed(self, weights: Tensor, visible: Tensor | None, queries: int) -> Tensor:
        """Additive mask of a number of ``queries``, ``[B, 1 or Hkv, 1 or q, K]``: for keys at the first ``n`` places
        ``weights [B, n]``, and for those that are not ``visible [B, 1 or Hkv, q, K]`` the least number that there is.

        Layers that share this index pass the same tensors, and get the same result.
        """
        known = self._weighed
        if known is None or known[0] is not weights or known[1] is not visible or known[2] != self.upto:
            keys, n = self.by_head.long(), weights.shape[1]
            of_heads = to_device(weights, keys.device)[:, None].expand(-1, keys.shape[1], -1)
            added = of_heads.gather(2, keys.clamp(min=0, max=n - 1)).masked_fill((keys < 0) | (keys >= n), 0.0)
            added, seen = added[:, :, None], visible
            if seen is None and queries > 1:
                # as attention without a mask is causal, all keys are those of the queries
                seen = torch.ones(queries, len(self), dtype=torch.bool, device=keys.device).tril()[None, None]
            if seen is not None:
                added = torch.where(seen, added, torch.finfo(added.dtype).min)
            self._weighed = known = (weights, visible, self.upto, added)
        return known[3]

    def move(self, moved: Callable[[Tensor, int], Tensor]) -> None:
        """Replace the tensor by what ``moved(x, dim)`` returns, which shows the same; places that wait for it go on waiting."""
        self._index = moved(self._index, -1)

    def trim(self) -> None:
        """Free the spare room."""
        if self._pending:
            self._join(0)
        self.index = trimmed(self.index)

    def forget(self) -> None:
        """Free the mask of the last forward, which may be many times as large as the index."""
        self._mask = self._weighed = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor the index holds between two forwards, which keeps :attr:`lengths` as numbers."""
        yield self.index
        if self._slots is not None:
            yield self._slots

    def rename(self, new: Tensor, upto: int) -> None:
        """Call place ``p`` from now on ``new[p]``, of ``upto`` places seen."""
        there = self.index >= 0
        self.index = torch.where(there, new[self.index.long().clamp(min=0)], self.index)
        self.upto, self._mask, self._slots = upto, None, None

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; ``on_host`` are the same on the CPU."""
        self._know(None if self._lengths is None else self.lengths[on_host])
        self.index = self.index.index_select(0, to_device(rows, self.index.device))
        self._mask = self._slots = None

    def crop(self, upto: int) -> Tensor:
        """Forget the places from ``upto`` on; returns the slots that stay for any row or head, ``[K]`` bool.

        All layers that share this index call it, and get the same result.
        """
        if self.upto > upto or self._slots is None:
            stays = self.index < upto
            self._slots = stays.flatten(0, -2).any(0)
            self.index = self.index.masked_fill(~stays, -1)[..., self._slots]
            lengths = (self.by_head >= 0).sum(-1).cpu()
            self._know(lengths)
            self.padded |= bool((lengths < len(self)).any())
            self.upto, self._mask = upto, None
        return self._slots
