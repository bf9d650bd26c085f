"""State that the layers of one cache share. Layers hold it, and it holds none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UnsupportedError
from .forward_info import ForwardInfo
from .index import KeyIndex, to_device
from .reactivation import ReactivationMemory
from .sparse import SparseMemory
from .static_view import StaticView

#: what is known of the first places, ``[B, n, ...]``; and of rows
_BY_PLACE = ("grid_table", "visual", "weights", "ordinals")
_BY_ROW = ("offset", "ahead", "axes_ahead", *_BY_PLACE)
#: the first picture of a row that has none
_NO_PICTURE = sys.maxsize


@dataclass
class Shared:
    """State that the layers of one cache share.

    indices : of every layer where its keys came from, None before it has stored any; layers that store the same keys have one
        and the same.
    offset : ``[B]`` long: logical length minus next position. The next token of row b stands at
        ``get_seq_length() - offset[b]``; M-RoPE, left padding and renumbering are all in this one number.
    ahead : ``[B]`` long: with M-RoPE the last frames of a slow clip may stand at later positions than the question behind them.
        transformers goes on behind the question while it generates, and behind the frames, so much further, in the next
        turn and in a forward without positions. None once that has happened.
    axes_ahead : ``[B, axes]`` long: behind a prompt that ends in a picture every axis goes on from its own end while
        transformers generates, so much further than the first one; in the next turn all go on from the furthest. None where all
        axes are equal.
    incoming : the tokens of the forward that is being run, while one is.
    grid_table : ``[B, n, 4]`` int32, for the first ``n`` places (picture, t, row, column), -1 for text and for what has no
        cell; only where a recipe goes on evicting while it decodes, or reads some keys at every step.
    visual : ``[B, n]`` bool, which of the first ``n`` places are visual; only where text has a codec of its own.
    weights : ``[B, n]``, what is added to the attention logits of the keys at the first ``n`` places, in all layers;
        only with proportional attention.
    ordinals : ``[B, n]`` long, the number of each of the first ``n`` places among the tokens of its row; None where no forward
        had padding. Only where a policy counts tokens.
    sparse : what a recipe carries that reads other keys at every step.
    reactivation : what a recipe carries whose dropped tokens may come back.
    stream : all pictures are stretches of one clip, whose frames are counted on.
    first_pictures : of every row the place of its first visual token; empty where nobody said, and all rows count as such that
        have pictures.
    pack_at : how many tokens will have been seen when codecs are to look at each row again; empty where that is not known.
    pinned : where the layers write and read while captured steps run.
    broken : a forward was broken off; layers may hold different tokens.
    windowed : some layers of the model have sliding windows.
    """

    indices: list[KeyIndex | None]
    offset: Tensor | None = None
    ahead: Tensor | None = None
    axes_ahead: Tensor | None = None
    incoming: ForwardInfo | None = None
    grid_table: Tensor | None = None
    visual: Tensor | None = None
    weights: Tensor | None = None
    ordinals: Tensor | None = None
    sparse: SparseMemory | None = None
    reactivation: ReactivationMemory | None = None
    first_pictures: Sequence[int] = ()
    pack_at: Sequence[int] = ()
    pinned: StaticView | None = None
    stream: bool = False
    broken: bool = False
    windowed: bool = False

    def each(self) -> list[KeyIndex]:
        """Every index once, in the order of the layers."""
        return list({id(index): index for index in self.indices if index is not None}.values())

    def check_bare(self, seen: int) -> None:
        """Called when a model goes on with this cache that mmaccel does not shape, ``seen`` tokens long.

        Raises
        ------
        UnsupportedError
            If its masks, which know lengths alone, would be wrong: tokens were dropped, and rows, heads or layers differ in
            what is left of them, it has weights, or windows count places.
        """
        indices = self.each()
        differ = len({len(index) for index in indices}) > 1 or any(index.padded for index in indices)
        if (differ or self.windowed or self.weights is not None) and any(len(index) != seen for index in indices):
            raise UnsupportedError(
                "This cache holds what mmaccel left of its prompt, which this model would misread now; accelerate the model "
                "again to go on, or begin with a new cache."
            )

    def unpin(self) -> None:
        """Let the layers have what captured steps added, before anybody else looks at them."""
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.release()

    def finalize(self, whole: bool) -> None:
        """The forward is over, as a ``whole`` or broken off: let go of it, and of the masks that were made for it."""
        self.incoming = None
        self.broken |= not whole
        for index in self.each():
            index.forget()

    def note_visual(self, visual: Tensor, since: int) -> None:
        """Remember which places from ``since`` on are visual, ``[B, S]`` bool."""
        before = visual[:, :0] if self.visual is None else self.visual[:, :since]
        self.visual = torch.cat([pad(before, (0, since - before.shape[1])), visual], dim=1)

    def note_tokens(self, valid: Tensor, since: int) -> None:
        """Remember which places from ``since`` on are tokens and which are padding, ``[B, S]`` bool."""
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
        """Remember where the first picture of every row is, of which those from ``since`` on are ``visual [B, S]`` bool on the
        CPU; returns which rows had none before, ``[B]`` bool on the CPU."""
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

    def behind_pictures(self) -> tuple[Tensor | None, Tensor | None]:
        """``offset`` and ``ahead`` for what follows in another turn: in rows that end in a picture all axes go on from the
        furthest."""
        if self.axes_ahead is None or self.offset is None or self.ahead is None:
            return self.offset, self.ahead
        ends = (self.axes_ahead != 0).any(1)
        return torch.where(ends, self.offset - self.ahead, self.offset), self.ahead.masked_fill(ends, 0)

    def split(self, at: int) -> None:
        """Let layers from ``at`` on have indices of their own: they are about to store other tokens than those before."""
        self.indices[at:] = _clones(self.indices[at:])

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        on_host = rows.cpu()
        for index in self.each():
            index.select(rows, on_host)
        for name in ("first_pictures", "pack_at"):
            if known := getattr(self, name):
                setattr(self, name, [known[row] for row in on_host.tolist()])
        for name in _BY_ROW:
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[to_device(rows, tensor.device)])
        if self.sparse is not None:
            self.sparse.select(rows)
        if self.reactivation is not None:
            self.reactivation.select(rows)

    def copy(self) -> Shared:
        """The same with indices of its own. Tensors are not copied, since what they show is never changed in place."""
        sparse = None if self.sparse is None else self.sparse.copy()
        reactivation = None if self.reactivation is None else self.reactivation.copy()
        return replace(self, indices=_clones(self.indices), sparse=sparse, reactivation=reactivation)

    def crop(self, seen: int) -> None:
        """A layer was cropped to ``seen`` tokens: what comes next takes the places of those that are gone, and is text."""
        self.pack_at = ()
        self.first_pictures = [first if first < seen else _NO_PICTURE for first in self.first_pictures]
        cut = self.grid_table is not None and self.grid_table.shape[1] > seen
        for name in _BY_PLACE:
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known[:, :seen])
        if self.sparse is not None:
            self.sparse = self.sparse.moved() if cut else replace(self.sparse, layers={})
        if self.reactivation is not None:
            self.reactivation.crop(seen)

    def rebase(self, seen: int) -> int:
        """Forget those of the ``seen`` places that no layer stores any more and count the others anew; returns how many these
        are."""
        indices, held = self.each(), None
        for index in indices:
            held = torch.zeros(seen + 1, dtype=torch.bool, device=index.index.device) if held is None else held
            held[torch.where(index.index < 0, seen, index.index).flatten().long().to(held.device)] = True
        if held is None or bool(held[:seen].all()):
            return seen
        left, self.pack_at = int(held[:seen].sum()), ()
        # a row that had a picture goes on as such
        self.first_pictures = [min(first, 0) if first < _NO_PICTURE else first for first in self.first_pictures]
        new = held[:seen].cumsum(0) - 1
        for index in indices:
            index.rename(new.to(index.index), left)
        if self.offset is not None:
            self.offset = self.offset - (seen - left)
        for name in _BY_PLACE:
            if (known := getattr(self, name)) is not None:
                setattr(self, name, known[:, held[: known.shape[1]].to(known.device)])
        if self.sparse is not None:
            self.sparse = self.sparse.moved()
        if self.reactivation is not None:
            self.reactivation.rename(new, held)
        return left

    def reset(self) -> None:
        """Forget the prompt; indices are let go of by the layers."""
        self.offset = self.ahead = self.axes_ahead = self.grid_table = self.visual = self.weights = self.ordinals = None
        self.sparse = self.reactivation = None
        self.incoming, self.broken, self.first_pictures, self.pack_at = None, False, (), ()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is held between two forwards."""
        for index in self.each():
            yield from index.tensors()
        yield from (x for name in _BY_ROW if (x := getattr(self, name)) is not None)
        if self.sparse is not None:
            yield from self.sparse.tensors()
        if self.reactivation is not None:
            yield from self.reactivation.tensors()


def _clones(indices: list[KeyIndex | None]) -> list[KeyIndex | None]:
    """A clone of every index; where several layers have one, they have one clone."""
    made: dict[int, KeyIndex] = {}
    return [None if index is None else made.setdefault(id(index), index.clone()) for index in indices]
