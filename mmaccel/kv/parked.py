"""Frames of a stream that left the device: where their keys and values are kept, and what is known of every frame."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import MmaccelError, first_line
from .serialise import content_of

#: of one layer: the tensors of a frame's keys, and of its values
Parts = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class Frame(Protocol):
    """A parked frame.

    nbytes : of its tensors, in host memory or on disk.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""

    def layer(self, number: int) -> Parts:
        """The keys and values of one layer, on the CPU."""


@dataclass(frozen=True)
class HostFrame:
    """A frame in host memory."""

    layers: tuple[Parts, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for parts in self.layers for packed in parts for x in packed)

    def layer(self, number: int) -> Parts:
        """The keys and values of one layer, on the CPU."""
        return self.layers[number]


class ParkFile:
    """A file without a name, in a folder. The system frees it with this object or the process, however that ends.

    Raises
    ------
    OSError
        If the folder takes no file.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder)

    def append(self, layers: Sequence[Parts], at: int) -> FileFrame:
        """Write a frame at byte ``at``, which is the end of the frames that are kept; nothing is kept behind them if the disk
        is full."""
        begins, end = [], at
        try:
            self._file.seek(at)
            for parts in layers:
                begins.append(end)
                for data in (content_of(x.contiguous()) for packed in parts for x in packed):
                    end += len(data)
                    while data:
                        # a disk that is nearly full takes a part
                        data = data[self._file.write(data) :]
        except BaseException:
            self._file.truncate(at)
            raise
        shapes = tuple(tuple(tuple((x.dtype, tuple(x.shape)) for x in packed) for packed in parts) for parts in layers)
        return FileFrame(self, (*begins, end), shapes)

    def read(self, at: int, shapes: Sequence[Sequence[tuple[torch.dtype, tuple[int, ...]]]]) -> Parts:
        """Tensors of these dtypes and shapes from byte ``at`` on."""
        self._file.seek(at)
        keys, values = (tuple(torch.empty(shape, dtype=dtype) for dtype, shape in packed) for packed in shapes)
        for data in map(content_of, (*keys, *values)):
            while data:
                if not (count := self._file.readinto(data)):
                    raise OSError("the file has become shorter")
                data = data[count:]
        return keys, values


@dataclass(frozen=True)
class FileFrame:
    """A frame in a file.

    begins : the byte where every layer begins, and the end of the last one.
    shapes : dtypes and shapes of the keys and of the values of every layer.
    """

    file: ParkFile
    begins: tuple[int, ...]
    shapes: tuple[tuple[tuple[tuple[torch.dtype, tuple[int, ...]], ...], ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.begins[-1] - self.begins[0]

    def layer(self, number: int) -> Parts:
        """The keys and values of one layer, read from the file."""
        try:
            return self.file.read(self.begins[number], self.shapes[number])
        except OSError as error:
            raise MmaccelError(
                f"A parked frame cannot be read from the folder {self.file.folder!r} ({first_line(error)}); check that disk, "
                "and ask again or begin another session."
            ) from error


def park(layers: Sequence[Parts], file: ParkFile | None, last: Frame | None) -> Frame:
    """Keep a frame in host memory, or in a file behind the ``last`` one that is there.

    Raises
    ------
    MmaccelError
        If there is no room for it.
    """
    try:
        if file is None:
            return HostFrame(tuple(layers))
        return file.append(layers, last.begins[-1] if isinstance(last, FileFrame) else 0)
    except Exception as error:
        raise full(file, error) from error


def full(file: ParkFile | None, error: BaseException) -> MmaccelError:
    """The error of a host or a disk that takes no more frames."""
    where = "Host memory" if file is None else f"The folder {file.folder!r}"
    return MmaccelError(
        f"{where} cannot take more frames ({first_line(error)}); the session is as it was before: free some space and "
        "push the same frames again, or begin another session."
    )


@dataclass(frozen=True)
class SeenFrame:
    """Facts about a frame, parked or not.

    stretch : the number of the stretch of frames that was read with it.
    pushed : the frames that were pushed as this one; some models read two as one.
    summaries : of every layer the summary of its keys, ``[Hkv, E]`` float32 on the CPU, see
        :meth:`mmaccel.method.RecallPolicy.summarise`.
    """

    stretch: int
    pushed: range
    summaries: tuple[Tensor, ...]


@dataclass(frozen=True)
class ParkedFrame:
    """A frame that left the device.

    frame : its keys and values. counts : how many keys each layer has. turned : where its stretch begins as far as its keys'
    RoPE is concerned.
    """

    frame: Frame
    counts: tuple[int, ...]
    turned: int


@dataclass
class ParkedFrames:
    """The memory of a stream that parks its oldest frames.

    Positions are those of the newest frames; where the session gives parked frames other ones, their keys are turned when they
    come back, and those of the prompt's beginning whenever frames leave.

    Parameters
    ----------
    cap : keys that a head of a layer may hold between two forwards.
    limit : positions of the model; None without a limit.
    file : where frames are parked; None for host memory.

    Attributes
    ----------
    prefix : tokens of the prompt's beginning. heads : their keys in every layer, ``[1, Hkv, prefix, D]``, as they were read.
    home : the position behind them as they were read. shift : how much further they stand now.
    places : ``[seen]`` long on the CPU, the frame of every place, -1 for the prompt's beginning.
    begins : the position where every stretch of frames begins, and where the next one will.
    seen, parked : all frames, of which the first ones are parked.
    pushed : the frames that the stretch shows that is being read.
    asking : the longest answer to the question that is being read; 0 while none is.
    recalled : the frames that each layer reads for the last question.
    rated : by layer, the ratings of all parked frames where layers read the same ones.
    common : the frames that all layers read for this question; None where each chooses its own, or while they are rated.
    """

    cap: int
    limit: int | None
    file: ParkFile | None
    prefix: int = 0
    home: int = 0
    shift: int = 0
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    heads: tuple[Tensor, ...] = ()
    begins: list[int] = field(default_factory=list)
    seen: list[SeenFrame] = field(default_factory=list)
    parked: list[ParkedFrame] = field(default_factory=list)
    pushed: range = range(0)
    asking: int = 0
    recalled: dict[int, list[int]] = field(default_factory=dict)
    rated: dict[int, Tensor] = field(default_factory=dict)
    common: list[int] | None = None

    def summaries(self, layer: int) -> Tensor:
        """``[parked, Hkv, E]`` float32 on the CPU: the summaries of all parked frames in a layer."""
        return torch.stack([one.summaries[layer] for one in self.seen[: len(self.parked)]])

    @property
    def resident(self) -> int:
        """The stretch of the first frame that is not parked."""
        return self.seen[len(self.parked)].stretch

    @property
    def left(self) -> int:
        """Number of pushed frames that are parked."""
        return sum(len(one.pushed) for one in self.seen[: len(self.parked)])

    def shown_again(self) -> list[int]:
        """The pushed frames that any layer reads for the last question, ascending."""
        frames = set[int]().union(*self.recalled.values())
        return sorted(pushed for frame in frames for pushed in self.seen[frame].pushed)

    def nbytes(self) -> int:
        """Bytes of all parked frames."""
        return sum(one.frame.nbytes for one in self.parked)

    # --- as the cache treats every memory -------------------------------------------------------------------------
    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """A stream has one row."""

    def copy(self) -> ParkedFrames:
        """A copy to change independently."""
        return replace(
            self,
            begins=list(self.begins),
            seen=list(self.seen),
            parked=list(self.parked),
            recalled=dict(self.recalled),
            rated=dict(self.rated),
        )

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.places = self.places[:seen]

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Keep the places that are ``held [seen]`` bool."""
        self.places = self.places[held[: len(self.places)].cpu()]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""
        yield from self.heads
