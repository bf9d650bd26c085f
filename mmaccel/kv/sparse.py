"""Recipes that read only some keys at every step; all of them stay stored."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from mmaccel_kernels.chosen import ChosenKeys
from torch import Tensor
from torch.nn.functional import pad

from ..core import masks
from ..method.reading import Picked
from .index import KeyIndex, leftmost


@dataclass(frozen=True, eq=False)
class Choices:
    """What a step chooses from in the layers that share an index, by the slots of what was stored when this was made.

    index : that of the layers, which is not held. stored : how many slots it had; whatever came later is always read.
    units : ``[B, 1 or Hkv, P, unit]`` int32, the slots of visual keys in their order, some consecutive ones in every unit.
    always : ``[B, 1 or Hkv, A]`` int32, the slots of all other keys. -1 is none, in both.
    gone : ``[B, 1 or Hkv, P]`` bool, units that are empty.
    count : ``[B, 1 or Hkv]`` int32, how many units are read. most : the largest of them.
    all_there : whether no key is missing in any unit.
    everything : whether all are read.
    """

    index: weakref.ref[KeyIndex]
    stored: int
    units: Tensor
    always: Tensor
    gone: Tensor
    count: Tensor
    most: int
    all_there: bool
    everything: bool

    @staticmethod
    def make(
        index: KeyIndex,
        visual: Tensor,
        count: Tensor,
        unit: int,
        wanted: Callable[[Tensor, Tensor], Tensor],
        partial: bool = False,
        sinks: int = 0,
        recent: float = 0,
    ) -> Choices:
        """What there is to choose from; the host waits once.

        Parameters
        ----------
        visual : ``[B, n]`` bool, which of the first ``n`` places are visual.
        count : ``[B]`` long, how many visual keys are read of each row. wanted : how many units that makes, see
            :meth:`mmaccel.method.ReadingPolicy.wanted`. partial : whether a step may leave out some though all are wanted.
        sinks, recent : see :class:`mmaccel.method.CacheOptions`; the visual keys that they mean are always read.
        """
        known = index.by_head.long()
        # by place: packed pictures stand before text that is older
        order = known.argsort(dim=-1, stable=True)
        known = known.gather(2, order)
        there, within = known >= 0, known.clamp(0, visual.shape[1] - 1)
        # what the ends are does not move with what is generated
        prompt = there & (known < visual.shape[1])
        seen = visual[:, None].expand(-1, known.shape[1], -1).gather(2, within) & prompt
        newest = recent if isinstance(recent, int) else (prompt.sum(-1, keepdim=True) * recent + 0.5).long()
        fixed = seen & ((prompt.cumsum(-1) <= sinks) | (masks.suffix_sums(prompt) <= newest))
        rivals = seen & ~fixed
        others, size = there & ~rivals, rivals.sum(-1)
        left = (count[:, None] - fixed.sum(-1)).clamp(min=0)
        units = wanted(left, size)
        pages = (size + unit - 1) // unit
        chooses = left < size if partial else units < pages
        told = torch.stack([size, others.sum(-1), units, chooses.long()]).flatten(1).cpu()
        (most_rivals, most_others, most, any_chooses), least = told.amax(1).tolist(), told.amin(1).tolist()

        def slots(mask: Tensor, width: int) -> Tensor:
            at, held = masks.leftmost(mask, width)
            return order.gather(2, at).masked_fill(~held, -1).int()

        # to whole units
        made = pad(slots(rivals, most_rivals), (0, -most_rivals % unit), value=-1).unflatten(2, (-1, unit))
        return Choices(
            weakref.ref(index),
            len(index),
            made,
            slots(others, most_others),
            made[..., 0] < 0,
            units.int(),
            most,
            least[0] == most_rivals and most_rivals % unit == 0,
            not any_chooses,
        )

    def chosen(self, picked: Picked) -> ChosenKeys:
        """What a step reads of what is stored."""
        return ChosenKeys(self.always, self.units, *picked, self.stored)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is kept from step to step."""
        return [self.units, self.always, self.gone, self.count]

    def select(self, rows: Tensor) -> Choices:
        """Keep, repeat or reorder rows of the batch."""
        rows = rows.to(self.units.device)
        return replace(self, **{name: getattr(self, name)[rows] for name in ("units", "always", "gone", "count")})


@dataclass(frozen=True, eq=False)
class LayerRead:
    """What one layer carries from step to step: its ``choices``, the ``summary`` that they are rated by, and what the policy
    ``carried`` from the last step, ``[B, ...]`` each."""

    choices: Choices
    summary: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]


@dataclass
class SparseMemory:
    """What a recipe that reads only some keys at every step carries with the cache; all keys stay stored.

    count : ``[B]`` long, visual keys to be read of each row.
    paid : ``[B, n]`` float32, attention that the places up to the end of the last prompt received at the last step.
    chosen : ``[B, n]`` bool, the visual places that were read.
    level : ``[B]``, the threshold that the last prompt has set, see :meth:`mmaccel.method.ReadingPolicy.level`.
    layers : what each layer carries by its number, where every layer chooses for itself. What is missing, or belongs to
        another index than the layer has now, is made anew in the next step.
    """

    count: Tensor
    paid: Tensor | None = None
    chosen: Tensor | None = None
    level: Tensor | None = None
    layers: dict[int, LayerRead] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Every tensor that is carried."""
        held = [x for x in (self.count, self.paid, self.chosen, self.level) if x is not None]
        for layer in self.layers.values():
            held += [*layer.choices.tensors(), *layer.summary.values(), *layer.carried.values()]
        return held

    def to(self, device: torch.device) -> SparseMemory:
        """The same on another device."""
        paid, chosen = (None if x is None else x.to(device) for x in (self.paid, self.chosen))
        return replace(self, count=self.count.to(device), paid=paid, chosen=chosen)

    def moved(self) -> SparseMemory:
        """What stays of it where places, or the slots of keys, are no longer what they were."""
        return SparseMemory(self.count, level=self.level)

    def copy(self) -> SparseMemory:
        """The same, to be changed by itself. Tensors are not copied, since they are never changed in place."""
        return replace(self, layers=dict(self.layers))

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for name in ("count", "paid", "chosen", "level"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[rows.to(tensor.device)])
        shared = {id(layer.choices): layer.choices for layer in self.layers.values()}
        made = {key: choices.select(rows) for key, choices in shared.items()}
        for number, layer in self.layers.items():
            summary, carried = (
                {name: x[rows.to(x.device)] for name, x in held.items()} for held in (layer.summary, layer.carried)
            )
            self.layers[number] = LayerRead(made[id(layer.choices)], summary, carried)

    def choices(self, index: KeyIndex) -> Choices | None:
        """Those that were made for the layers with this index."""
        return next((one.choices for one in self.layers.values() if one.choices.index() is index), None)


class SparseRead:
    """The keys that layers from ``first`` on read in one step: those of ``places [B, n]`` bool, and of all later places."""

    def __init__(self, first: int, places: Tensor) -> None:
        self.first, self.places = first, places
        self._made: dict[int, tuple[KeyIndex, KeyIndex, Tensor]] = {}

    def _of(self, index: KeyIndex) -> tuple[KeyIndex, KeyIndex, Tensor]:
        """The index itself (so that it lives), that of what is read of it, and the slots of that, ``[B, 1 or Hkv, R]``."""
        if id(index) not in self._made:
            known = index.by_head
            at = known.long().clamp(0, self.places.shape[1] - 1)
            read = self.places.to(known.device)[:, None].expand(-1, known.shape[1], -1).gather(2, at)
            read = (read | (known >= self.places.shape[1])) & (known >= 0)
            order, there, lengths = leftmost(read)
            made = known.gather(2, order).masked_fill(~there, -1)
            made = made if index.index.dim() == 3 else made[:, 0]
            padded = bool((lengths < order.shape[-1]).any())
            self._made[id(index)] = index, KeyIndex(made, padded, index.upto, lengths), order
        return self._made[id(index)]

    def index(self, index: KeyIndex) -> KeyIndex:
        """Where the keys that are read came from."""
        return self._of(index)[1]

    def read(self, index: KeyIndex, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, Hkv, K, D]`` each -> ``[B, Hkv, R, D]``."""
        at = self._of(index)[2].expand(-1, keys.shape[1], -1)[..., None]
        return keys.gather(2, at.expand(-1, -1, -1, keys.shape[-1])), values.gather(
            2, at.expand(-1, -1, -1, values.shape[-1])
        )
