"""State of a recipe's schedule from step to step, beside the keys of one layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from .index import select_rows, to_device

_BY_ROW = ("capacity", "received", "threshold")


@dataclass
class ScheduleState:
    """State of a recipe's schedule from step to step, beside the keys of one layer.

    capacity : ``[B, Hkv]`` long on the CPU, keys each head may hold; settled at the end of a prompt.
    received : ``[B, Hkv, K]`` float32, figures per stored slot (see :meth:`mmaccel.method.Policy.observe`); slots that came
        later have none yet.
    queries, places : of every forward that is remembered, the oldest first, ``[B, Hq, q, D]`` and ``[B, q]``, -1 for padding.
    unseen : how many of the last queries the policy has not observed yet.
    scaling, window : of the layer's attention, its sliding window in original places; as of the last forward.
    threshold : ``[B, Hkv]``, the bar of merging that is averaged over calls; NaN in rows that begin anew. ``renewed``: there
        are such rows since the last merge.
    settled, evicted : of every row how many tokens were seen when its capacity was settled, and when it was last evicted from.
    """

    capacity: Tensor | None = None
    received: Tensor | None = None
    queries: tuple[Tensor, ...] = ()
    places: tuple[Tensor, ...] = ()
    unseen: int = 0
    scaling: float = 1.0
    window: int | None = None
    threshold: Tensor | None = None
    renewed: bool = False
    settled: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is carried."""
        yield from (x for name in _BY_ROW if (x := getattr(self, name)) is not None)
        yield from self.queries
        yield from self.places

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        select_rows(self, _BY_ROW, rows)
        self.queries, self.places = (
            tuple(x[rows.to(x.device)] for x in blocks) for blocks in (self.queries, self.places)
        )
        if self.capacity is not None:
            on_host = rows.tolist()
            self.settled, self.evicted = ([known[row] for row in on_host] for known in (self.settled, self.evicted))

    def remember(self, queries: Tensor, places: Tensor, observed: bool = False) -> None:
        """Append ``queries [B, Hq, q, D]`` of ``places [B, q]``; nothing is copied. ``observed``: the policy has yet to observe
        them."""
        self.unseen += queries.shape[2] if observed else 0
        self.queries, self.places = (*self.queries, queries), (*self.places, places)

    def keep(self, count: int) -> None:
        """Forget all but the last ``count`` queries, or a few more."""
        over = sum(x.shape[1] for x in self.places) - count
        while self.places and over >= self.places[0].shape[1]:
            over -= self.places[0].shape[1]
            self.queries, self.places = self.queries[1:], self.places[1:]
        if self.places and over > len(self.places):
            # a long text is not held for the sake of its end
            queries, places = self.queries[0][:, :, over:].clone(), self.places[0][:, over:].clone()
            self.queries, self.places = (queries, *self.queries[1:]), (places, *self.places[1:])

    def crop(self, count: int) -> None:
        """Forget the last ``count`` queries."""
        self.unseen = max(0, self.unseen - count)
        while self.places and count > 0:
            queries, places, left = self.queries[-1], self.places[-1], self.places[-1].shape[1] - count
            self.queries, self.places, count = self.queries[:-1], self.places[:-1], -left
            if left > 0:
                self.remember(queries[:, :, :left], places[:, :left])

    def rebase(self, fewer: int) -> None:
        """Count places anew, of which there are ``fewer`` before the last ones."""
        self.settled, self.evicted = ([seen - fewer for seen in known] for known in (self.settled, self.evicted))
        self.places = tuple(torch.where(x < 0, x, (x - fewer).clamp(min=0)) for x in self.places)

    def forget(self, rows: Tensor) -> None:
        """Forget what is carried of ``rows [B]`` bool on the CPU, which begin anew; nothing is changed in place."""
        if self.received is not None:
            self.received = self.received.masked_fill(to_device(rows, self.received.device)[:, None, None], 0.0)
        if self.threshold is not None:
            self.threshold = self.threshold.masked_fill(to_device(rows, self.threshold.device)[:, None], torch.nan)
            self.renewed = True
        self.places = tuple(x.masked_fill(to_device(rows, x.device)[:, None], -1) for x in self.places)

    def figures(self, slots: int) -> Tensor | None:
        """``received`` of as many slots, zero for those that came later."""
        return None if self.received is None else pad(self.received, (0, slots - self.received.shape[-1]))
