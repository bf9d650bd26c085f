"""Facts about the first places of a cache: pictures, cells, weights, padding."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .index import select_rows, to_device

_BY_PLACE = ("grid_table", "visual", "weights", "first_weights", "ordinals", "separators")
#: the first picture of a row that has none
_NO_PICTURE = sys.maxsize


@dataclass
class Places:
    """Facts about the first ``n`` places of every row, each None where no recipe needs it; ``n`` may differ among them.

    grid_table : ``[B, n, 4]`` int32 (picture, t, row, column), -1 for text and for what has no cell; only where a recipe goes
        on evicting while it decodes, or reads some keys at every step.
    visual : ``[B, n]`` bool, which places are visual; only where text has a codec of its own.
    weights : ``[B, n]``, added to the attention logits of the keys in all layers; only with proportional attention.
    first_weights : ``[B, n]``, the same in layer 0, where it has others.
    ordinals : ``[B, n]`` long, the number of each place among the tokens of its row; None where no forward had padding. Only
        where a policy counts tokens.
    separators : ``[B, n]`` bool, which places are separators of text; only where a policy asks for them.
    first_pictures : of every row the place of its first visual token; empty where nobody said, and all rows count as such that
        have pictures.
    """

    grid_table: Tensor | None = None
    visual: Tensor | None = None
    weights: Tensor | None = None
    first_weights: Tensor | None = None
    ordinals: Tensor | None = None
    separators: Tensor | None = None
    first_pictures: Sequence[int] = ()

    def note_visual(self, visual: Tensor, since: int) -> None:
        """Note which places from ``since`` on are visual, ``[B, S]`` bool."""
        before = visual[:, :0] if self.visual is None else self.visual[:, :since]
        self.visual = torch.cat([pad(before, (0, since - before.shape[1])), visual], dim=1)

    def note_separators(self, separators: Tensor, since: int, anew: Tensor | None) -> None:
        """Note which places from ``since`` on are ``separators [B, S]`` bool. Rows that begin ``anew [B]`` bool on the CPU
        forget theirs: alone they would not have been noted."""
        before = separators[:, :0] if self.separators is None else self.separators[:, :since].to(separators.device)
        before = before if anew is None else before & ~to_device(anew, before.device)[:, None]
        self.separators = torch.cat([pad(before, (0, since - before.shape[1])), separators], dim=1)

    def separator(self, places: Tensor, heads: int = 1) -> Tensor | None:
        """``[rows, K]`` bool: which of the tokens at ``places [rows, K]`` are separators, for rows as in :meth:`ordinal`; None
        where nobody noted any."""
        if self.separators is None:
            return None
        known = self.separators.to(places.device)
        rows = (torch.arange(len(places), device=places.device) // heads % len(known))[:, None]
        there = (places >= 0) & (places < known.shape[1])
        return known[rows, places.clamp(0, known.shape[1] - 1)] & there

    def note_tokens(self, valid: Tensor, since: int) -> None:
        """Note which places from ``since`` on are tokens and which are padding, ``[B, S]`` bool."""
        places = torch.arange(since, device=valid.device).expand(len(valid), -1)
        before = self.ordinal(places)
        last = before[:, -1:] if since else before.new_full((len(valid), 1), -1)
        self.ordinals = torch.cat([before, last + valid.cumsum(1)], dim=1)

    def ordinal(self, places: Tensor, heads: int = 1) -> Tensor:
        """``[rows, K]`` long: the number of the tokens at ``places [rows, K]`` among those of their row of the batch. Every
        row has ``heads`` rows of places, and all rows may be repeated. Behind the places that are known all are tokens."""
        if self.ordinals is None:
            return places
        known = self.ordinals.to(places.device)
        size = known.shape[1]
        rows = (torch.arange(len(places), device=places.device) // heads % len(known))[:, None]
        return known[rows, places.clamp(0, size - 1)] + (places - size + 1).clamp(min=0)

    def note_pictures(self, visual: Tensor, since: int) -> Tensor:
        """Note the first picture of every row, where those from ``since`` on are ``visual [B, S]`` bool on the CPU; returns
        which rows had none before, ``[B]`` bool on the CPU."""
        before = self.first_pictures or (_NO_PICTURE,) * len(visual)
        found, first = visual.any(1).tolist(), visual.byte().argmax(1).tolist()
        self.first_pictures = [
            old if old < _NO_PICTURE else since + place if there else _NO_PICTURE
            for old, there, place in zip(before, found, first, strict=True)
        ]
        return torch.tensor([old == _NO_PICTURE for old in before])

    @property
    def text_rows(self) -> Tensor | None:
        """``[B]`` bool on the CPU, the rows without a picture, of which nothing is dropped or packed; None where all have
        one."""
        if _NO_PICTURE not in self.first_pictures:
            # nearly every batch
            return None
        return torch.tensor([first == _NO_PICTURE for first in self.first_pictures])

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; ``on_host`` are the same on the CPU."""
        select_rows(self, _BY_PLACE, rows)
        if self.first_pictures:
            self.first_pictures = [self.first_pictures[row] for row in on_host.tolist()]

    def copy(self) -> Places:
        """A copy to change independently. Tensors are not copied, since they are never changed in place."""
        return replace(self)

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on; what comes there next is text."""
        self.first_pictures = [first if first < seen else _NO_PICTURE for first in self.first_pictures]
        for name in _BY_PLACE:
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known[:, :seen])

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Keep the places that are ``held [seen]`` bool, which are called ``new [seen]`` from now on."""
        # a row that had a picture goes on as such
        self.first_pictures = [min(first, 0) if first < _NO_PICTURE else first for first in self.first_pictures]
        for name in _BY_PLACE:
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known[:, held[: known.shape[1]].to(known.device)])

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (x for name in _BY_PLACE if (x := getattr(self, name)) is not None)
