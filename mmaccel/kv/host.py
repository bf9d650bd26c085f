"""Keys and values in host memory.

A parked tensor belongs to its device, but its memory is a pinned buffer of the host: any operation can read and write it where
it is, over the bus. So nothing that happens to a cache between two forwards knows where it is stored. A layer that is read as a
whole is copied to the device first, on a stream beside the work there, and only what is new is written back. On a CPU the same
copies are made, without streams and pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import MmaccelError, UnsupportedError
from .growable import ROOM, claimed, room_of, shown, spare_room

#: of a parked tensor its buffer, a tensor of the CPU; of a copy on the device the parked tensor
_BUFFER, _PARKED = "mmaccel_buffer", "mmaccel_parked"


class Movable(Protocol):
    """Protocol of a layer, see :class:`.layer.CompressedLayer`."""

    number: int
    is_initialized: bool
    keys: Tensor

    def move(self, moved: Callable[[Tensor, int], Tensor]) -> None:
        """Replace every tensor of keys and values by what ``moved(x, dim)`` returns."""


def buffer_of(x: Tensor) -> Tensor | None:
    """The buffer in host memory that a parked tensor shows; None for any other."""
    buffer: Tensor | None = vars(x).get(_BUFFER, vars(room_of(x)).get(_BUFFER))
    if buffer is None or buffer.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        # a deep copy of a parked tensor has memory of its own
        return None
    return buffer


class _Buffer:
    """Bytes of pinned memory, as CUDA is shown them."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        address = {"data": (buffer.data_ptr(), False), "shape": (buffer.nbytes,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = address


def on_device(buffer: Tensor, device: torch.device) -> Tensor:
    """A tensor of a ``device`` that shows a pinned ``buffer``."""
    if device.type == "cpu":
        return buffer.view(buffer.shape)
    made = torch.as_tensor(_Buffer(buffer), device=device)
    if made.data_ptr() != buffer.data_ptr():
        raise UnsupportedError(f"{device} cannot read pinned memory of the host; leave out offload='host'.")
    return made.view(buffer.dtype).view(buffer.shape)


def allocate(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parked tensor.

    Raises
    ------
    UnsupportedError
        If the device is neither a CPU nor a CUDA device. MmaccelError if the host has too little memory.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"offload='host' works with CUDA devices and on the CPU, not on {device}; leave it out.")
    try:
        buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    except RuntimeError as error:
        size = torch.Size(shape).numel() * dtype.itemsize / (1 << 20)
        raise MmaccelError(
            f"The host has no {size:,.0f} MiB of memory left for keys and values of one layer; take fewer rows or frames, a "
            "smaller retain, or leave out offload='host'."
        ) from error
    made = on_device(buffer, device)
    vars(made)[_BUFFER] = buffer
    return made


@dataclass
class Moved:
    """Bytes that went over the bus in one forward.

    fetched : to the device, as whole layers. ahead : those of them that were asked for while another layer computed.
    written : to the host. read : keys and values that steps read where they are, at most.
    """

    fetched: int = 0
    ahead: int = 0
    written: int = 0
    read: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.fetched + self.written + self.read


@dataclass
class _Arriving:
    """Copies of a layer's parked tensors, by the id of each, and the event behind which they are complete."""

    copies: dict[int, tuple[Tensor, Tensor]]
    event: Any = None


class HostStore:
    """The copies of one cache between its device and the host.

    moved : bytes of the forward that is being run, or of the last one. busy : layers are attending; what is stored anew is
        parked when they have.
    """

    def __init__(self) -> None:
        self.moved, self.busy = Moved(), False
        self._arriving: dict[int, _Arriving] = {}
        #: tensors that are being copied to the host, and the events behind which they are free
        self._leaving: list[tuple[Tensor, Any]] = []
        self._streams: dict[torch.device, Any] = {}

    # --- to the device --------------------------------------------------------------------------------------------
    @torch.no_grad()
    def begin(self, layer: Movable) -> int:
        """Start to copy a layer to its device, beside the work there; returns how many bytes."""
        if layer.number in self._arriving or not layer.is_initialized:
            return 0
        stream, made, before = self.beside(layer.keys.device), _Arriving({}), self.moved.fetched

        def copy(x: Tensor, dim: int) -> Tensor:
            if (buffer := buffer_of(x)) is not None:
                made.copies[id(x)] = x, self._copy(x, buffer, dim, stream)
            return x

        layer.move(copy)
        made.event = stream and stream.record_event()
        self._arriving[layer.number] = made
        return self.moved.fetched - before

    @torch.no_grad()
    def fetch(self, layer: Movable) -> None:
        """Let a layer have its tensors on its device; those that are on their way are waited for there."""
        made = self._arriving.pop(layer.number, None)
        if made is not None:
            wait_for(made.event, layer.keys.device)

        def take(x: Tensor, dim: int) -> Tensor:
            if made is not None and id(x) in made.copies:
                return made.copies[id(x)][1]
            buffer = buffer_of(x)
            return x if buffer is None else self._copy(x, buffer, dim, None)

        layer.move(take)

    def _copy(self, x: Tensor, buffer: Tensor, dim: int, stream: Any) -> Tensor:
        # memory of the stream that reads it, whichever writes it
        room = torch.empty(buffer.shape, dtype=x.dtype, device=x.device)
        parts, length = [(room, buffer)], x.shape[dim]
        if buffer.shape[dim] > length + spare_room(length, None):
            # much of the room is empty yet; each part is contiguous, as a copy that nobody waits for has to be
            axis = dim % x.dim()
            parts = [
                (to[:length], of[:length])
                for to, of in zip(*(each.reshape(-1, *each.shape[axis:]) for each in (room, buffer)), strict=True)
            ]
        with on_stream(stream):
            for to, of in parts:
                to.copy_(of, non_blocking=True)
                self.moved.fetched += of.nbytes
        vars(room)[_PARKED] = x
        return shown(room, dim, length)

    # --- to the host ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def park(self, layer: Movable, expected_new_tokens: int | None = None, following: int = 0) -> None:
        """Let a layer have its tensors in host memory, with room for some ``expected_new_tokens`` and those ``following``, see
        :func:`.growable.append`. Of what was copied to the device only what is new is written."""
        if not layer.is_initialized:
            return
        leaving, self._leaving = self._leaving, []
        stream = self.beside(layer.keys.device)

        def put(x: Tensor, dim: int) -> Tensor:
            if not x.numel() or buffer_of(x) is not None:
                return x
            before: Tensor | None = vars(room_of(x)).get(_PARKED)
            if before is not None and before.shape == x.shape:
                return before
            if before is not None and (room := claimed(before, dim, x.shape[dim])) is not None:
                length = before.shape[dim]
                new = x.narrow(dim, length, x.shape[dim] - length)
                room.narrow(dim, length, new.shape[dim]).copy_(new)
                self.moved.written += new.nbytes
                return _marked(room, dim, x.shape[dim])
            # what is packed, and heads that store different counts, grow behind what is here
            spare = spare_room(x.shape[dim], expected_new_tokens, following) if dim < 0 else 0
            return self._write(x, dim, spare, stream)

        layer.move(put)
        # work that follows may overwrite what the copies before these have read
        self._let_go(leaving)
        if not self.busy:
            # and, when layers are not attending, read what has been parked
            self.attended()

    def make_room(self, layer: Movable, new: int, expected_new_tokens: int | None, following: int) -> None:
        """Give a parked layer, to which ``new`` tokens are written where it is, room for them; see :meth:`park`."""

        def grown(x: Tensor, dim: int) -> Tensor:
            room = vars(x).get(ROOM)
            if room is not None and room.shape[dim] >= x.shape[dim] + new:
                return x
            return self._write(x, dim, new + spare_room(x.shape[dim] + new, expected_new_tokens, following), None)

        layer.move(grown)

    def _write(self, x: Tensor, dim: int, spare: int, stream: Any) -> Tensor:
        length, shape = x.shape[dim], list(x.shape)
        shape[dim] += spare
        room = allocate(shape, x.dtype, x.device)
        with on_stream(stream):
            room.narrow(dim, 0, length).copy_(x, non_blocking=True)
        self._leaving.append((x, stream and stream.record_event()))
        self.moved.written += x.nbytes
        return _marked(room, dim, length)

    # --- a forward ------------------------------------------------------------------------------------------------
    def begin_forward(self) -> None:
        """A forward begins."""
        self.moved, self.busy = Moved(), True

    def attended(self) -> None:
        """All layers have attended: what has been parked may be read where it is."""
        leaving, self._leaving, self.busy = self._leaving, [], False
        self._let_go(leaving)

    def end_forward(self) -> None:
        """A forward is over, or was broken off: nothing is on its way any more."""
        self.attended()
        for made in self._arriving.values():
            for x, _ in made.copies.values():
                wait_for(made.event, x.device)
        # streams can be neither copied nor saved, and cost nothing
        self._arriving, self._streams = {}, {}

    @staticmethod
    def _let_go(leaving: list[tuple[Tensor, Any]]) -> None:
        for x, event in leaving:
            wait_for(event, x.device)

    def beside(self, device: torch.device) -> Any:
        """The stream of the copies of a device, which waits for the work there up to now; None on a CPU."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Work of a stream, see :meth:`HostStore.beside`."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def wait_for(event: Any, device: torch.device) -> None:
    """Let the device wait for an event; the host does not."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _marked(room: Tensor, dim: int, length: int) -> Tensor:
    """The first ``length`` along ``dim`` of a parked room. They go on knowing their buffer when others are given the room."""
    made = shown(room, dim, length)
    vars(made)[_BUFFER] = vars(room)[_BUFFER]
    return made


def parked(tensors: Iterator[Tensor]) -> list[Tensor]:
    """The tensors that are in host memory."""
    return [x for x in tensors if buffer_of(x) is not None]
