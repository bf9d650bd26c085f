"""The loop over packed pages in CUDA C++ (``paged.cu``): for which pages it is made, and how it is launched.

The same algebra in Triton takes up to twice the instructions a byte (``tests/kernels/instructions.json``): its layouts have the
pieces of an operand brought together by moves, and every page costs it barriers. Here blocks get 168 to 255 registers, two or
three of them a multiprocessor; in 128 the loops still fit but for 8 to 24 bytes that spill, at 2 % to 5 % more instructions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import nvrtc
from ..pages import Pages, Plane

SOURCE = Path(__file__).with_name("paged.cu")

#: query rows a program takes at once, and its threads
COLUMNS, THREADS = 8, 128

#: bytes of shared memory of a block of which two share a multiprocessor; a warp has two or three units of pages on their way
_SHARED = 80 * 1024

#: blocks of a multiprocessor that registers are shared out for by bits: as many as leave enough of them
_BLOCKS = {2: 3}


class Arguments(ctypes.Structure):
    """``Args`` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "mask", "part", "part_lse", "cu_pages", "key_codes", "key_scale", "key_zero", "value_codes",
            "value_scale", "value_zero", "channels", "count", "meta", "table", "columns",
        )),
        *((name, ctypes.c_longlong) for name in ("mask_b", "mask_h", "mask_q")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "rows", "queries")),
    ]  # fmt: skip


class Loop(NamedTuple):
    """The kernel for pages of one kind.

    units : that a page is shared in. each : programs that a multiprocessor runs at once.
    start : called with a grid and :class:`Arguments`.
    """

    units: int
    each: int
    start: Callable[[tuple[int, int], Arguments], None]


def macros(pages: Pages, query: Tensor, masked: bool) -> dict[str, int] | None:
    """What ``paged.cu`` is compiled with to read these pages for such a query, by name; None if it cannot."""
    if len(pages.keys) != 1 or not _fits(pages, query):
        return None
    key, value = pages.keys[0], pages.values[0]
    digits, pooled = key.format.digits, value.format.axis == "channel"
    made = {
        "BITS": 8 // digits,
        "FP8": key.format.code == "fp8",
        "UNIT": _unit(pages),
        "PAGE": pages.page,
        "TILE": pages.tile,
        "CHANNELS": query.shape[3],
        "KEY_WIDTH": key.codes.shape[2],
        "KEY_BY_CHANNEL": key.format.axis == "channel",
        "KEY_GROUP": key.format.group,
        "KEY_AFFINE": key.format.affine,
        "WIDTH": value.codes.shape[2],
        "VALUE_BY_CHANNEL": pooled,
        "VALUE_GROUP": value.format.group,
        "VALUE_AFFINE": value.format.affine,
        "PART": key.channels is not None,
        "MASKED": masked,
        "SINGLE": query.shape[2] == 1,
        "BFLOAT16": query.dtype == torch.bfloat16,
        "STAGES": 3,
    }
    made = {name: int(number) for name, number in made.items()}
    if shared(made) > _SHARED:
        made["STAGES"] = 2
    return made | {"BLOCKS": _BLOCKS.get(made["BITS"], 2)}


def _unit(pages: Pages) -> int:
    """Tokens of a unit: whole rows of bytes, and two tiles of 16 at least."""
    digits = pages.keys[0].format.digits
    return max(32, pages.tile * digits) if digits > 1 else 32


def _fits(pages: Pages, query: Tensor) -> bool:
    """Whether the source has these formats and sizes."""
    key, value, unit = pages.keys[0], pages.values[0], _unit(pages)
    key_form, value_form, width = key.format, value.format, value.codes.shape[2]
    by_channel, pooled = key_form.axis == "channel", value_form.axis == "channel"
    kinds = [(form.digits, form.code == "fp8", form.affine or form.code == "fp8") for form in (key_form, value_form)]
    return (
        query.dtype != torch.float32
        and kinds[0] == kinds[1]
        and kinds[0][2]
        and key.scale.dtype == value.scale.dtype == torch.float16
        and pages.tile % 8 == 0
        and unit <= 64
        and unit % (pages.tile * key_form.digits if key_form.digits > 1 else 1) == 0
        # four warps read four units, which are whole pages
        and pages.page in (unit, 2 * unit, 4 * unit)
        and width in (64, 128)
        and key.codes.shape[2] % 16 == 0
        and key.codes.shape[2] <= 128
        and (key_form.group % unit == 0 if by_channel else not key_form.affine and key_form.group == key.codes.shape[2])
        and (not pooled or (by_channel and key_form.group == value_form.group == pages.page))
        and (pooled or value_form.group == width or value_form.interleaved(width))
    )


def shared(macros: dict[str, int]) -> int:
    """Bytes of shared memory of a block, as the source divides them."""
    m = macros
    stage = m["UNIT"] * m["BITS"] // 8 * (m["KEY_WIDTH"] + m["WIDTH"]) + 16
    found = 4 * (8 * m["WIDTH"] + 16)
    if m["VALUE_BY_CHANNEL"]:
        return 4 * max(m["STAGES"] * stage, found) + found
    stage += max(256, 2 * (m["KEY_WIDTH"] if m["KEY_BY_CHANNEL"] else m["UNIT"])) * (1 + m["KEY_AFFINE"])
    stage += max(256, 2 * m["UNIT"] * (m["WIDTH"] // m["VALUE_GROUP"])) * (1 + m["VALUE_AFFINE"])
    return 4 * max(m["STAGES"] * stage, found)


def loop(pages: Pages, query: Tensor, masked: bool) -> Loop | None:
    """The kernel for these pages on the device of ``query``, the current one, compiled where it was not; None if there is none.

    Raises
    ------
    Unbuildable
        If it cannot be compiled.
    """
    made = macros(pages, query, masked)
    if made is None or query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    launch = nvrtc.function(SOURCE, tuple(made.items()), "attend", shared(made), query.device)
    return Loop(made["PAGE"] // made["UNIT"], made["BLOCKS"], lambda grid, given: launch(grid, THREADS, given))


def arguments(
    query: Tensor,
    pages: Pages,
    scale: float,
    mask: tuple[Tensor, tuple[int, int, int], Tensor] | None,
    part: Tensor,
    part_lse: Tensor,
    rows: int,
) -> tuple[Arguments, list[Tensor]]:
    """What the kernel is given, and the tensors that it points to; ``query`` is turned and contiguous."""

    def tensors(of: Plane) -> list[Tensor]:
        return [x.contiguous() for x in (of.codes, of.scale, of.scale if of.zero is None else of.zero)]

    key, value = pages.keys[0], pages.values[0]
    bytes_, strides, columns = mask or (query, (0, 0, 0), pages.table)
    channels = pages.table if key.channels is None else key.channels.contiguous()
    held = [
        query, bytes_, part, part_lse, pages.cu_pages, *tensors(key), *tensors(value), channels, pages.count, pages.meta,
        pages.table, columns,
    ]  # fmt: skip
    sizes = (scale, query.shape[0] * pages.heads, pages.heads, rows, query.shape[2])
    return Arguments(*(x.data_ptr() for x in held), *strides, *sizes), held


__all__ = ["COLUMNS", "SOURCE", "Arguments", "Loop", "arguments", "loop", "macros", "shared"]
