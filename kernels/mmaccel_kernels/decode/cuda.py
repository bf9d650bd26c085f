"""The loop over packed pages in CUDA C++ (``paged.cu``): for which pages it is made, and how it is launched.

The same algebra in Triton takes up to twice the instructions a byte (``tests/kernels/instructions.json``): its layouts have the
pieces of an operand brought together by moves, and every page costs it barriers. Here a thread gets 128 registers where nothing
spills then, else 168 or 255: which of them, the compiler at hand is asked (:func:`built`).

Not read here are five ternary digits a byte, whose bytes are whole together with those of 2-bit and sign channels only every
640 tokens (in tiles of 16), where a unit is 32 or 64; nor float32, and heads of other than 64 and 128 channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import nvrtc
from ..pages import Format, Pages, Plane

SOURCE = Path(__file__).with_name("paged.cu")

#: query rows a program takes at once, and its threads
COLUMNS, THREADS = 8, 128

#: bytes of shared memory of a block of which two share a multiprocessor; a warp has two or three units of pages on their way
_SHARED = 80 * 1024

#: blocks of a multiprocessor that registers are shared out for, 128 a thread or more: the first with which nothing spills
_BLOCKS = (4, 3, 2)


class Arguments(ctypes.Structure):
    """``Args`` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "mask", "part", "part_lse", "cu_pages", "key_codes", "key_scale", "key_zero", "other_codes",
            "other_scale", "value_codes", "value_scale", "value_zero", "channels", "other_channels", "count", "meta", "table",
            "columns",
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
    """Compile-time constants of ``paged.cu`` for these pages and such a query, by name; None if it cannot read them."""
    if not _fits(pages, query):
        return None
    key, value, digits = pages.keys[0], pages.values[0], _digits(pages.keys[0].format)
    made = {
        "BITS": 8 // digits,
        "FP8": key.format.code == "fp8",
        **_book(key.format),
        "UNIT": _unit(pages),
        "PAGE": pages.page,
        "TILE": pages.tile,
        "CHANNELS": query.shape[3],
        "KEY_WIDTH": key.codes.shape[2],
        "KEY_BY_CHANNEL": key.format.axis == "channel",
        "KEY_GROUP": key.format.group,
        "KEY_AFFINE": key.format.affine,
        "OTHER_WIDTH": pages.keys[1].codes.shape[2] if len(pages.keys) == 2 else 0,
        "WIDTH": value.codes.shape[2],
        "VALUE_BY_CHANNEL": value.format.axis == "channel",
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
    return made


def built(macros: dict[str, int], target: str) -> dict[str, int]:
    """The macros with as many blocks to a multiprocessor as leave registers enough, by what the compiler makes of them.

    Raises
    ------
    Unbuildable
        If it cannot be compiled.
    """
    for blocks in _BLOCKS:
        made = macros | {"BLOCKS": blocks}
        if not nvrtc.spills(nvrtc.compiled(SOURCE, tuple(made.items()), target)[1]):
            break
    return made


def _book(format: Format) -> dict[str, int]:
    """How many positive levels codes have a book of, and the bits of levels as float16: the lower bytes of four, those of the
    next four, and the higher bytes alike. Negative levels stand behind four or fewer positive ones."""
    made = {"BOOK": len(format.book), **{f"BOOK_{i}": 0 for i in range(4)}}
    book = format.book if len(format.book) > 4 else (*format.book, *(-x for x in format.book))
    bits = torch.tensor(book, dtype=torch.float16).view(torch.int16).tolist()
    for i in range(-(-len(bits) // 4)):
        four = bits[4 * i : 4 * i + 4]
        made[f"BOOK_{i}"], made[f"BOOK_{i + 2}"] = (
            sum((x >> shift & 255) << 8 * place for place, x in enumerate(four)) for shift in (0, 8)
        )
    return made


def _unit(pages: Pages) -> int:
    """Tokens of a unit: whole rows of bytes, and two tiles of 16 at least."""
    digits = _digits(pages.keys[0].format)
    return max(32, pages.tile * digits) if digits > 1 else 32


def _digits(format: Format) -> int:
    """Codes a byte; of codes of three bits the lower two."""
    return 4 if format.three_bits else format.digits


def _fits(pages: Pages, query: Tensor) -> bool:
    """Whether the source has these formats and sizes."""
    if len(pages.keys) > 2 or len(pages.values) > 1 or pages.values[0].channels is not None:
        return False
    key, value, unit = pages.keys[0], pages.values[0], _unit(pages)
    key_form, value_form, width = key.format, value.format, value.codes.shape[2]
    digits = _digits(key_form)
    by_channel, pooled = key_form.axis == "channel", value_form.axis == "channel"
    grouped = _grouped(pages, unit)
    return (
        query.dtype != torch.float32
        and (key_form.digits, key_form.code == "fp8") == (value_form.digits, value_form.code == "fp8")
        and key_form.book == value_form.book
        and len(key_form.book) in (0, 2, 4, 8)
        and not any(form.three_bits and not form.by_book for form in (key_form, value_form))
        and (key_form.affine or key_form.code == "fp8" or key_form.by_book)
        and (
            value_form.affine
            or value_form.code == "fp8"
            or value_form.by_book
            or (grouped and value_form.code == "three")
        )
        and (len(pages.keys) == 1 or (grouped and _signs(pages.keys[1], key)))
        and all(of.scale.dtype == torch.float16 for of in (*pages.keys, value))
        and pages.tile % (16 if key_form.by_book else 8) == 0
        and unit <= 64
        and unit % (pages.tile * digits if digits > 1 else 1) == 0
        # four warps read four units, which are whole pages
        and pages.page in (unit, 2 * unit, 4 * unit)
        and width in (64, 128)
        and key.codes.shape[2] % 16 == 0
        and key.codes.shape[2] <= 128
        and (by_channel or (not key_form.affine and key_form.group == key.codes.shape[2]))
        and (grouped or not by_channel or key_form.group % unit == 0)
        and (not pooled or grouped or (by_channel and key_form.group == value_form.group == pages.page))
        and (pooled or value_form.group == width or value_form.interleaved(width))
    )


def _grouped(pages: Pages, unit: int) -> bool:
    """Whether keys and values of two bits have scales by channel, of some tokens of a unit each."""
    forms = [of.format for of in (*pages.keys, *pages.values)]
    return (
        forms[0].digits == 4
        and all(form.axis == "channel" and form.group == forms[0].group for form in forms)
        and unit % forms[0].group == 0
        and forms[0].group % 16 == 0
        and forms[0].group < pages.page
    )


def _signs(other: Plane, key: Plane) -> bool:
    """Whether a second plane of keys can be read beside the first."""
    chosen = other.channels is not None and key.channels is not None
    return chosen and other.format.code == "sign" and other.codes.shape[2] % 16 == 0


def shared(macros: dict[str, int]) -> int:
    """Bytes of shared memory of a block, as the source divides them."""
    m = macros
    stage = m["UNIT"] * m["BITS"] // 8 * (m["KEY_WIDTH"] + m["OTHER_WIDTH"] + m["WIDTH"]) * (1 + (m["BOOK"] == 4)) + 16
    found = 4 * (8 * m["WIDTH"] + 16)
    query = 16 * (m["KEY_WIDTH"] + m["OTHER_WIDTH"]) + 16
    if m["VALUE_BY_CHANNEL"] and m["VALUE_GROUP"] == m["PAGE"]:
        return 4 * max(m["STAGES"] * stage, found) + found + query
    spans = max(1, m["UNIT"] // m["KEY_GROUP"]) if m["KEY_BY_CHANNEL"] else 1
    stage += max(256, 2 * (m["KEY_WIDTH"] * spans if m["KEY_BY_CHANNEL"] else m["UNIT"])) * (1 + m["KEY_AFFINE"])
    stage += max(256, 2 * m["OTHER_WIDTH"] * spans) * (m["OTHER_WIDTH"] > 0)
    of_values = m["WIDTH"] * spans if m["VALUE_BY_CHANNEL"] else m["UNIT"] * (m["WIDTH"] // m["VALUE_GROUP"])
    stage += max(256, 2 * of_values) * (1 + m["VALUE_AFFINE"])
    return 4 * max(m["STAGES"] * stage, found) + query


def loop(pages: Pages, query: Tensor, masked: bool) -> Loop | None:
    """The kernel for these pages on the device of ``query``, the current one, compiled where it was not; None if there is none.

    Raises
    ------
    Unbuildable
        If it cannot be compiled.
    """
    made = macros(pages, query, masked)
    there = query.device.type == "cuda" and torch.version.hip is None
    if made is None or not there or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    macros_ = tuple(built(made, nvrtc.target_of(query.device)).items())
    kernel = nvrtc.function(SOURCE, macros_, "attend", THREADS, shared(made), query.device)
    return Loop(made["PAGE"] // made["UNIT"], kernel.resident, kernel.launch)


def arguments(
    query: Tensor,
    pages: Pages,
    scale: float,
    mask: tuple[Tensor, tuple[int, int, int], Tensor] | None,
    part: Tensor,
    part_lse: Tensor,
    rows: int,
) -> tuple[Arguments, list[Tensor]]:
    """Arguments of the kernel, and the tensors that they point to; ``query`` is rotated and contiguous."""

    def tensors(of: Plane) -> list[Tensor]:
        return [x.contiguous() for x in (of.codes, of.scale, of.scale if of.zero is None else of.zero)]

    key, value = pages.keys[0], pages.values[0]
    bytes_, strides, columns = mask or (query, (0, 0, 0), pages.table)
    channels = [pages.table if of.channels is None else of.channels.contiguous() for of in (key, pages.keys[-1])]
    held = [
        query, bytes_, part, part_lse, pages.cu_pages, *tensors(key), *tensors(pages.keys[-1])[:2], *tensors(value),
        *channels, pages.count, pages.meta, pages.table, columns,
    ]  # fmt: skip
    sizes = (scale, query.shape[0] * pages.heads, pages.heads, rows, query.shape[2])
    return Arguments(*(x.data_ptr() for x in held), *strides, *sizes), held


__all__ = ["COLUMNS", "SOURCE", "Arguments", "Loop", "arguments", "loop", "macros", "shared"]
