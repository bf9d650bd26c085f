"""Origins of tokens: pictures and cells of the places of a prompt, and of any stored keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.budget import resolve, shares_by_age
from ...core.layout import Layout
from ...core.masks import after_last
from ...kv.index import to_device
from ...kv.shared import Shared

#: the room of rows and pictures of which nothing is evicted
UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt that some layers see, for those of them on one device.

    places : ``[B, q]`` long, -1 for padding. visual, text : ``[B, q]`` bool.
    grid : ``[B, q, 4]`` int32, picture and cell. count : see :class:`~mmaccel.method.KeyBatch`. question : see
        :func:`~mmaccel.kv.select.rank`.
    rivals, texts : how many tokens of each row compete for its budget, and how many are text; both known to the host.
    at : of every row the slots of those that compete, where the split over layers asks for their scores.
    memo : see :class:`~mmaccel.method.Layerwise`.
    """

    places: Tensor
    visual: Tensor
    text: Tensor
    grid: Tensor
    count: Tensor
    question: Tensor | None
    rivals: list[int]
    texts: list[int]
    at: list[Tensor]
    memo: dict[Any, Any] = field(default_factory=dict)
    _repeated: dict[int, Tokens] = field(default_factory=dict)

    def of_layers(self, count: int) -> Tokens:
        """The tokens of so many layers, whose rows are rows of one batch; the same object for the same count."""
        if count == 1:
            return self
        if count not in self._repeated:
            rows = {name: getattr(self, name) for name in ("places", "visual", "text", "grid", "count", "question")}
            tensors = {name: x.repeat(count, *[1] * (x.dim() - 1)) for name, x in rows.items() if x is not None}
            rivals, texts = self.rivals * count, self.texts * count
            # no circle, so that all of it is freed with the forward
            self._repeated[count] = replace(self, **tensors, rivals=rivals, texts=texts, _repeated={})
        return self._repeated[count]


def prompt_grid(shared: Shared, layout: Layout, seen: int) -> Tensor:
    """``[B, n, 4]`` int32 (picture, t, row, column) of all places up to the end of a prompt that follows ``seen`` tokens;
    -1 for text and for tokens without a cell; on the CPU."""
    batch, length = layout.valid.shape
    table = torch.full((batch, seen + length, 4), -1, dtype=torch.int32)
    if shared.places.grid_table is not None:
        table[:, : shared.places.grid_table.shape[1]] = shared.places.grid_table.cpu()
    picture, frame = int(table[..., 0].max()) + 1, 0
    if shared.stream:
        picture, frame = 0, int(table[..., 1].max()) + 1
    for segment in layout.segments:
        cells = segment.tile.cells.to(torch.int32)
        at = segment.places + seen
        table[segment.row, at, 0] = picture if shared.stream else picture + segment.picture
        table[segment.row, at, 1:] = torch.where(cells < 0, cells, cells + cells.new_tensor([frame, 0, 0]))
    return table


def room_by_age(table: Tensor, age: Sequence[float], step: int) -> Tensor:
    """``[B, P]`` long on the CPU: how many keys of every picture, by its number in the ``table [B, n, 4]``, its age allows, see
    :func:`mmaccel.core.budget.shares_by_age`; :data:`UNBOUNDED` for whole pictures, and for those of other rows. Of a share
    above 0 at least one stays."""
    pictures = table[..., 0]
    room = torch.full((len(table), int(pictures.max()) + 1), UNBOUNDED)
    for row, places in zip(room, pictures.tolist(), strict=True):
        # in the order in which they are read
        sizes = Counter(one for one in places if one >= 0)
        for (number, size), share in zip(sizes.items(), shares_by_age(len(sizes), age, step), strict=True):
            if share < 1:
                row[number] = resolve(float(share), size) if share else 0
    return room


def cells_at(table: Tensor, places: Tensor, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Picture ``[rows, K]`` and cell ``[rows, K, 3]`` long of any ``places [rows, K]``, ``heads`` rows for every row of the
    batch, which may come several times; -1 for places behind the ``table [B, n, 4]``."""
    table = to_device(table, places.device)
    known = (places >= 0) & (places < table.shape[1])
    rows = (torch.arange(len(places), device=places.device) // heads % len(table))[:, None]
    cells = table[rows, places.clamp(0, table.shape[1] - 1)].long().masked_fill(~known[..., None], -1)
    return cells[..., 0], cells[..., 1:]


def question_span(table: Tensor, protect: Sequence[str], device: torch.device) -> Tensor | None:
    """``[B, 2]`` long, if the question is protected: the text behind the last picture of the ``table [B, n, 4]`` begins, and
    ends, at these places."""
    if "question" not in protect:
        return None
    pictures = table[..., 0] >= 0
    end = pictures.shape[1]
    first = (~after_last(pictures)).sum(1)
    return to_device(torch.stack([first, torch.full_like(first, end)], dim=1), device)
