"""Recipes that read only some keys at every step; all of them stay stored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from mmaccel_kernels.chosen import ChosenKeys
from mmaccel_kernels.pages import Pages
from torch import Tensor
from torch.nn.functional import pad

from ..core import masks
from ..method.sparse_read import Picked
from .index import KeyIndex, leftmost, select_rows
from .listing import Listing, PageSlots

#: see :meth:`mmaccel.method.ReadingPolicy.wanted`
Wanted = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidates:
    """Keys of an index in the order of their places, and which of them compete to be read.

    order : ``[B, 1 or Hkv, K]`` long, the slots by place: packed pictures are stored before older text.
    valid : ``[B, 1 or Hkv, K]`` bool, as the others: which of these slots hold keys. visual : those of visual tokens.
    always : visual keys that every step reads. competing : the other visual keys.
    count : ``[B]`` long, how many visual keys are read of each row.
    group : ``[B, 1 or Hkv, K]`` long, by slot the number of the picture, frame or row of a competing key; None if they are not
        told apart.
    """

    order: Tensor
    valid: Tensor
    visual: Tensor
    always: Tensor
    competing: Tensor
    count: Tensor
    group: Tensor | None = None

    @staticmethod
    def make(
        index: KeyIndex,
        visual: Tensor,
        count: Tensor,
        sinks: int = 0,
        recent: float = 0,
        cells: Tensor | None = None,
    ) -> Candidates:
        """Candidates of an index whose first ``n`` places are visual where ``visual [B, n]`` bool says so; for ``sinks`` and
        ``recent``, which are always read, see :class:`mmaccel.method.CacheOptions`. Places with the same ``cells [B, n, k]``
        are a group."""
        known = index.by_head.long()
        order = known.argsort(dim=-1, stable=True)
        known = known.gather(2, order)
        valid, within = known >= 0, known.clamp(0, visual.shape[1] - 1)
        # tokens that are generated do not move the ends
        prompt = valid & (known < visual.shape[1])
        seen = visual[:, None].expand(-1, known.shape[1], -1).gather(2, within) & prompt
        newest = recent if isinstance(recent, int) else (prompt.sum(-1, keepdim=True) * recent + 0.5).long()
        always = seen & ((prompt.cumsum(-1) <= sinks) | (masks.suffix_sums(prompt) <= newest))
        competing = seen & ~always
        group = None
        if cells is not None:
            # numbers rise with places, so that other keys, and those without a cell (-1), are filled in from before
            named = torch.zeros_like(known)
            for axis in cells.long().unbind(-1):
                named = named * (axis.amax() + 2) + axis[:, None].expand(-1, known.shape[1], -1).gather(2, within)
            named = named.masked_fill(~competing, -1).cummax(-1).values
            number = (named.diff(dim=-1, prepend=torch.full_like(named[..., :1], -1)) > 0).cumsum(-1) - 1
            group = torch.zeros_like(order).scatter_(2, order, number.clamp(min=0))
        return Candidates(order, valid, seen, always, competing, count, group)

    def slots(self, mask: Tensor, width: int) -> Tensor:
        """The slots where ``mask [B, 1 or Hkv, K]`` is true, ``[B, 1 or Hkv, width]`` int32, -1 for none."""
        at, held = masks.leftmost(mask, width)
        return self.order.gather(2, at).masked_fill(~held, -1).int()


@dataclass(frozen=True, eq=False)
class Choices:
    """Keys that a step may choose in the layers that share an index, by their slots when this was made.

    index : index of the layers, by a weak reference. stored : how many slots it had; later keys are always read.
    rated : ``[B, 1 or Hkv, P each, unit]`` int32, the slots of visual keys in their order, some consecutive ones in every unit,
        of which ``each`` consecutive ones are read together.
    always : ``[B, 1 or Hkv, A]`` int32, the slots of all other keys. -1 is none, in both.
    gone : ``[B, 1 or Hkv, P each]`` bool, units that are empty.
    count : ``[B, 1 or Hkv]`` int32, how many are read. most : the largest of them.
    all_there : whether no key is missing in any unit.
    even : whether that is so, and all rows and heads read as many units and as many other keys.
    everything : whether all are read.
    pages : ``[B, 1 or Hkv, P]`` long, the packed pages that are read as a whole, by their numbers within heads, -1 for none;
        None where keys are not chosen by packed pages. fewer : whether a step may read fewer of them than ``count``.
    group, groups : see :class:`mmaccel.method.KeyUnits`.
    """

    index: weakref.ref[KeyIndex]
    stored: int
    rated: Tensor
    always: Tensor
    gone: Tensor
    count: Tensor
    most: int
    all_there: bool
    even: bool
    everything: bool
    each: int = 1
    pages: Tensor | None = None
    fewer: bool = False
    group: Tensor | None = None
    groups: int = 0
    _read: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def make(index: KeyIndex, candidates: Candidates, unit: int, wanted: Wanted, partial: bool = False) -> Choices:
        """Choices among single keys; the host waits once.

        Parameters
        ----------
        unit : keys that are read together. wanted : how many units a number of keys makes, see
            :meth:`mmaccel.method.ReadingPolicy.wanted`. partial : whether a step may leave out some though all are wanted.
        """
        competing, others, size = (
            candidates.competing,
            candidates.valid & ~candidates.competing,
            candidates.competing.sum(-1),
        )
        left = (candidates.count[:, None] - candidates.always.sum(-1)).clamp(min=0)
        units = wanted(left, size)
        chooses = left < size if partial else units < (size + unit - 1) // unit
        figures = [size, others.sum(-1), units, chooses.long(), _groups(candidates)]
        counts = torch.stack(figures).flatten(1).cpu()
        (most_competing, most_others, most, any_chooses, groups), least = (
            counts.amax(1).tolist(),
            counts.amin(1).tolist(),
        )
        all_there = least[0] == most_competing and most_competing % unit == 0
        # to whole units
        rated = pad(candidates.slots(competing, most_competing), (0, -most_competing % unit), value=-1).unflatten(
            2, (-1, unit)
        )
        return Choices(
            weakref.ref(index),
            len(index),
            rated,
            candidates.slots(others, most_others),
            rated[..., 0] < 0,
            units.int(),
            most,
            all_there,
            all_there and least[1:3] == [most_others, most],
            not any_chooses,
            group=_group_of(candidates, rated),
            groups=groups,
        )

    @staticmethod
    def of_pages(
        index: KeyIndex, candidates: Candidates, unit: int, pages: Pages, width: int, most_keys: Wanted | None = None
    ) -> Choices:
        """Choices among the packed ``pages`` in the first ``width`` slots, each of which is read as a whole or not at all: as
        many as fit, at least one. Pages that hold text, and keys in full precision, are always read. ``most_keys``: how many
        keys a step may choose at most, where it may choose fewer pages than fit."""
        known, page = index.by_head, pages.page
        there = known >= 0
        competing = torch.zeros_like(there).scatter_(2, candidates.order, candidates.competing)
        packed = PageSlots.make(pages, width, known.shape[1])
        whole = packed.whole(competing[..., :width], there[..., :width])
        chosen = pad(whole.gather(2, packed.of.clamp(min=0)), (0, known.shape[2] - width), value=False) & there
        others = (there & ~chosen).gather(2, candidates.order)
        left = candidates.count[:, None] - (candidates.visual & others).sum(-1)
        size, every = whole.sum(-1), chosen.sum(-1)
        fit = left if most_keys is None else most_keys(left.clamp(min=0), every)
        units = torch.where(left >= every, size, torch.minimum((fit // page).clamp(min=1), size))
        chooses = units < size if most_keys is None else left.clamp(min=0) < every
        figures = [size, others.sum(-1), units, chooses.long(), _groups(candidates)]
        most_pages, most_others, most, any_chooses, groups = torch.stack(figures).flatten(1).amax(1).tolist()
        number, held = masks.leftmost(whole, most_pages)
        number = number.masked_fill(~held, -1)
        # the slots of a page end where the next one begins
        slots = packed.first.gather(2, number.clamp(min=0))[..., None] + torch.arange(page, device=known.device)
        inside = held[..., None] & (slots < width)
        slots = slots.clamp(max=max(0, width - 1))
        flat = slots.flatten(2)
        inside &= (packed.of.gather(2, flat).view_as(slots) == number[..., None]) & there.gather(2, flat).view_as(slots)
        rated = pad(slots.masked_fill(~inside, -1).int(), (0, -page % unit), value=-1).unflatten(3, (-1, unit))
        each = rated.shape[3]
        rated = rated.flatten(2, 3)
        always = candidates.slots(others, most_others)
        gone = (rated < 0).all(-1)
        return Choices(
            weakref.ref(index),
            len(index),
            rated,
            always,
            gone,
            units.int(),
            most,
            False,
            False,
            not any_chooses,
            each,
            number,
            most_keys is not None,
            _group_of(candidates, rated),
            groups,
        )

    def chosen(self, picked: Picked, total: int | None = None) -> ChosenKeys:
        """Sparse read of a step; of all ``total`` slots where those are known. ``picked`` is what
        :func:`mmaccel.method.sparse_read.best` found."""
        units = self.rated if self.each == 1 else self.rated.unflatten(2, (-1, self.each)).flatten(3)
        if total is None:
            return ChosenKeys(self.always, units, *picked, self.stored)
        if total not in self._read:
            # the same in all layers
            later = torch.arange(self.stored, total, dtype=torch.int32, device=self.always.device)
            self._read.clear()
            self._read[total] = torch.cat([self.always, later.expand(*self.always.shape[:2], -1)], dim=2)
        return ChosenKeys(self._read[total], units, *picked, total, self.even)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept from step to step."""
        held = (self.rated, self.always, self.gone, self.count, self.pages, self.group, *self._read.values())
        return [x for x in held if x is not None]

    def select(self, rows: Tensor) -> Choices:
        """Keep, repeat or reorder rows of the batch."""
        rows = rows.to(self.rated.device)
        held = {name: getattr(self, name)[rows] for name in ("rated", "always", "gone", "count")}
        pages, group = (None if x is None else x[rows] for x in (self.pages, self.group))
        return replace(self, **held, pages=pages, group=group, _read={})


def _groups(candidates: Candidates) -> Tensor:
    """``[B, 1 or Hkv]`` long, how many groups candidates have."""
    group = candidates.group
    return torch.zeros_like(candidates.competing.sum(-1)) if group is None else group.amax(-1) + 1


def _group_of(candidates: Candidates, rated: Tensor) -> Tensor | None:
    """``[B, 1 or Hkv, P]`` int32: the groups of the units ``rated [B, 1 or Hkv, P, unit]``, by their first keys."""
    group = candidates.group
    return None if group is None else group.gather(2, rated[..., 0].long().clamp(min=0)).int()


@dataclass(frozen=True, eq=False)
class LayerRead:
    """State of one layer from step to step: its ``choices``, the ``summary`` that they are rated by, the tensors that the
    policy ``carried`` from the last step, ``[B, ...]`` each, and the listing of its packed pages once a step has needed it."""

    choices: Choices
    summary: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]
    listed: Listing | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is carried."""
        yield from (*self.choices.tensors(), *self.summary.values(), *self.carried.values())
        if self.listed is not None:
            yield from self.listed.tensors()


@dataclass
class SparseMemory:
    """State of a recipe that reads only some keys at every step; all keys stay stored.

    count : ``[B]`` long, visual keys to be read of each row.
    paid : ``[B, n]`` float32, attention that the places up to the end of the last prompt received at the last step.
    chosen : ``[B, n]`` bool, the visual places that were read.
    left_out : of each row, how many stored visual places a step does not read, where the host knows.
    level : ``[B]`` or ``[B, thresholds]``, what the last prompt has set, see :meth:`mmaccel.method.ReadingPolicy.level`.
    noted : by layer what :meth:`mmaccel.method.ReadingPolicy.note_queries` returned for the last prompt, ``[B, ...]`` each.
    layers : what each layer carries by its number, where every layer chooses for itself. What is missing, or belongs to
        another index than the layer has now, is made anew in the next step.
    """

    count: Tensor
    paid: Tensor | None = None
    chosen: Tensor | None = None
    left_out: list[int] | None = None
    level: Tensor | None = None
    noted: dict[int, Tensor] = field(default_factory=dict)
    layers: dict[int, LayerRead] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is carried."""
        held = [x for x in (self.count, self.paid, self.chosen, self.level) if x is not None]
        return held + [*self.noted.values(), *(x for layer in self.layers.values() for x in layer.tensors())]

    def move(self, device: torch.device) -> None:
        """Move what the layer below chooses by to another device."""
        self.count = self.count.to(device)
        self.paid, self.chosen = (None if x is None else x.to(device) for x in (self.paid, self.chosen))

    def copy(self) -> SparseMemory:
        """A copy to change independently. Tensors are not copied, since they are never changed in place."""
        return replace(self, noted=dict(self.noted), layers=dict(self.layers))

    def crop(self, seen: int) -> None:
        """Forget what every layer chose from, and what a step chose if any of the places from ``seen`` on are in it."""
        self.layers = {}
        if self.paid is not None and self.paid.shape[1] > seen:
            self._forget_choice()

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Forget all choices: they are made anew for the places that are left."""
        self.layers = {}
        self._forget_choice()

    def _forget_choice(self) -> None:
        self.paid = self.chosen = self.left_out = None

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; see :class:`.shared.Memory`."""
        self.left_out = None
        select_rows(self, ("count", "paid", "chosen", "level"), rows)
        self.noted = {number: x[rows.to(x.device)] for number, x in self.noted.items()}
        shared = {id(layer.choices): layer.choices for layer in self.layers.values()}
        made = {key: choices.select(rows) for key, choices in shared.items()}
        for number, layer in self.layers.items():
            summary, carried = (
                {name: x[rows.to(x.device)] for name, x in held.items()} for held in (layer.summary, layer.carried)
            )
            self.layers[number] = LayerRead(made[id(layer.choices)], summary, carried)

    def choices(self, index: KeyIndex) -> Choices | None:
        """The choices that were made for the layers with this index."""
        return next((one.choices for one in self.layers.values() if one.choices.index() is index), None)


class SparseRead:
    """Sparse read of some layers in one forward: keys of the ``places [B, n]`` bool, and of all later places.

    Parameters
    ----------
    counted, left_out : an index, and how many of its keys are not read in each row, where the host knows.
    """

    def __init__(self, places: Tensor, counted: KeyIndex | None = None, left_out: list[int] | None = None) -> None:
        self.places = places
        self._counted, self._left_out = counted, left_out
        self._made: dict[int, tuple[KeyIndex, KeyIndex, Tensor]] = {}

    def _of(self, index: KeyIndex) -> tuple[KeyIndex, KeyIndex, Tensor]:
        """The index itself, so that its id stays unique, the index of the keys that are read, and their slots ``[B, 1 or Hkv,
        R]``."""
        if id(index) not in self._made:
            known = index.by_head
            at = known.long().clamp(0, self.places.shape[1] - 1)
            read = self.places.to(known.device)[:, None].expand(-1, known.shape[1], -1).gather(2, at)
            read = (read | (known >= self.places.shape[1])) & (known >= 0)
            lengths = None
            if self._left_out is not None and index is self._counted and index.known:
                lengths = index.lengths - torch.tensor(self._left_out)[:, None]
            order, there, lengths = leftmost(read, lengths)
            made = known.gather(2, order).masked_fill(~there, -1)
            made = made if index.index.dim() == 3 else made[:, 0]
            padded = bool((lengths < order.shape[-1]).any())
            self._made[id(index)] = index, KeyIndex(made, padded, index.upto, lengths), order
        return self._made[id(index)]

    def index(self, index: KeyIndex) -> KeyIndex:
        """Index of the keys that are read."""
        return self._of(index)[1]

    def read(self, index: KeyIndex, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, K, D]`` each -> ``[B, Hkv, R, D]``."""
        at = self._of(index)[2].expand(-1, keys.shape[1], -1)[..., None]
        return keys.gather(2, at.expand(-1, -1, -1, keys.shape[-1])), values.gather(
            2, at.expand(-1, -1, -1, values.shape[-1])
        )
