"""State that the layers of one cache share. Layers hold it, and it holds none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from ..errors import MmaccelError, UnsupportedError
from .forward_info import ForwardInfo
from .host import HostStore
from .index import KeyIndex
from .merged_keys import MergedKeys
from .places import Places
from .positions import NextPositions
from .static_view import StaticView


class Memory(Protocol):
    """State that a mechanism keeps with a cache from one forward to the next."""

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; ``on_host`` are the same on the CPU."""

    def copy(self) -> Self:
        """A copy to change independently. Tensors need no copy if they are never changed in place."""

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on; every layer that is cropped calls it."""

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Call place ``p`` from now on ``new[p]``; forget those that are not ``held [seen]`` bool, which no layer stores."""

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor held."""


M = TypeVar("M", bound=Memory)


@dataclass
class Shared:
    """State that the layers of one cache share.

    indices : index of the stored keys of every layer, None before it has stored any; layers that store the same keys share one.
    positions : next positions of the rows.
    places : facts about the first places.
    memories : the memory of every mechanism that has one, by its class; see :meth:`memory`.
    incoming : the tokens of the forward that is being run, while one is.
    static_view : the tensors that layers write and read while captured steps run.
    host : copies keys and values to and from host memory, if they are kept there.
    stream : all pictures are stretches of one clip, whose frames are counted on.
    broken : a forward was broken off; layers may hold different tokens.
    windowed : some layers of the model have sliding windows.
    """

    indices: list[KeyIndex | None]
    positions: NextPositions = field(default_factory=NextPositions)
    places: Places = field(default_factory=Places)
    memories: dict[type[Memory], Memory] = field(default_factory=dict)
    incoming: ForwardInfo | None = None
    static_view: StaticView | None = None
    host: HostStore | None = None
    stream: bool = False
    broken: bool = False
    windowed: bool = False

    def memory(self, kind: type[M]) -> M | None:
        """The memory of this class, or None."""
        found = self.memories.get(kind)
        return found if isinstance(found, kind) else None

    def keep(self, memory: M) -> M:
        """Keep a memory, in place of one of its class; returns it."""
        self.memories[type(memory)] = memory
        return memory

    def each(self) -> list[KeyIndex]:
        """Every index once, in the order of the layers."""
        return list({id(index): index for index in self.indices if index is not None}.values())

    def check_whole(self) -> None:
        """Check that no forward with this cache was broken off.

        Raises
        ------
        MmaccelError
            If one was.
        """
        if self.broken:
            raise MmaccelError(
                "A forward with this cache was broken off, so that its layers may hold different tokens; begin again with a "
                "new cache, or call reset() on this one."
            )

    def check_bare(self, seen: int) -> None:
        """Check that a model which mmaccel does not shape can continue this cache, which has seen ``seen`` tokens.

        Raises
        ------
        UnsupportedError
            If its masks, which know lengths alone, would be wrong: tokens were dropped, and rows, heads or layers differ in
            what is left of them, keys have weights, or sliding windows count places.
        """
        indices = self.each()
        differ = len({len(index) for index in indices}) > 1 or any(index.padded for index in indices)
        odd = differ or self.windowed or self.places.weights is not None or MergedKeys in self.memories
        if odd and any(len(index) != seen for index in indices):
            raise UnsupportedError(
                "This cache holds what mmaccel left of its prompt, which this model would misread now; accelerate the model "
                "again to go on, or begin with a new cache."
            )

    def unpin(self) -> None:
        """Let the layers have what captured steps added, before anybody else looks at them."""
        view, self.static_view = self.static_view, None
        if view is not None:
            view.release()

    def finalize(self, whole: bool) -> None:
        """The forward is over, as a ``whole`` or broken off: let go of it, and of the masks that were made for it."""
        self.incoming = None
        self.broken |= not whole
        if self.host is not None:
            self.host.end_forward()
        for index in self.each():
            index.forget()

    def split(self, at: int) -> None:
        """Let layers from ``at`` on have indices of their own: they are about to store other tokens than those before."""
        self.indices[at:] = _clones(self.indices[at:])

    def select(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        on_host = rows.cpu()
        for index in self.each():
            index.select(rows, on_host)
        self.positions.select(rows)
        for part in (self.places, *self.memories.values()):
            part.select(rows, on_host)

    def copy(self) -> Shared:
        """A copy with indices of its own. Tensors are not copied, since what they show is never changed in place."""
        memories = {kind: memory.copy() for kind, memory in self.memories.items()}
        return replace(
            self,
            indices=_clones(self.indices),
            positions=replace(self.positions),
            places=self.places.copy(),
            memories=memories,
        )

    def crop(self, seen: int) -> None:
        """Forget what is known of the places from ``seen`` on; every layer that is cropped calls it."""
        for part in (self.places, *self.memories.values()):
            part.crop(seen)

    def rebase(self, seen: int) -> int:
        """Forget those of the ``seen`` places that no layer stores any more and count the others anew; returns how many these
        are."""
        indices, held = self.each(), None
        for index in indices:
            held = torch.zeros(seen + 1, dtype=torch.bool, device=index.index.device) if held is None else held
            held[torch.where(index.index < 0, seen, index.index).flatten().long().to(held.device)] = True
        if held is None or bool(held[:seen].all()):
            return seen
        held = held[:seen]
        left, new = int(held.sum()), held.cumsum(0) - 1
        for index in indices:
            index.rename(new.to(index.index), left)
        self.positions.rebase(seen - left)
        for part in (self.places, *self.memories.values()):
            part.rename(new, held)
        return left

    def reset(self) -> None:
        """Forget the prompt; every layer drops its own index."""
        self.positions, self.places, self.memories = NextPositions(), Places(), {}
        self.incoming, self.broken = None, False

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is held between two forwards."""
        for index in self.each():
            yield from index.tensors()
        yield from self.positions.tensors()
        for part in (self.places, *self.memories.values()):
            yield from part.tensors()


def _clones(indices: list[KeyIndex | None]) -> list[KeyIndex | None]:
    """A clone of every index; where several layers have one, they have one clone."""
    made: dict[int, KeyIndex] = {}
    return [None if index is None else made.setdefault(id(index), index.clone()) for index in indices]
