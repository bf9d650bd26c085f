"""Codes of numbers, bytes of codes and back, in plain torch: the definition."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .format import Format
from .rotation import rotate, rotate_back


def pack(codes: Tensor, format: Format, tile: int) -> Tensor:
    """``codes [N, page, D]``, whole numbers below ``levels`` (e4m3 bytes for fp8) -> bytes ``[N, rows, D]`` uint8."""
    digits, rows, (n, page, width) = format.digits, format.rows(codes.shape[1], tile), codes.shape
    if format.interleaved(width):
        codes = codes.unflatten(2, (-1, 8, format.group // 8)).transpose(2, 3).reshape(n, page, width)
    if format.three_bits:
        return torch.cat([_bytes_of(codes & 3, 4, 2, tile), _bytes_of(codes >> 2, 8, 1, tile)], dim=1)
    padded = codes.new_zeros(n, rows * digits, width, dtype=torch.int32)
    padded[:, :page] = codes
    padded = padded.view(n, rows // tile, digits, tile, width)
    weights = [3 ** (4 - i) if format.code == "ternary" else 1 << 8 // digits * i for i in range(digits)]
    if digits == 1:
        weights = [1]
    number = sum(padded[:, :, i] * weight for i, weight in enumerate(weights))
    assert isinstance(number, Tensor)
    if format.code == "ternary":
        number = (number * 256 + 242) // 243
    return number.to(torch.uint8).view(n, rows, width)


def _bytes_of(fields: Tensor, digits: int, bits: int, tile: int) -> Tensor:
    """``fields [N, page, D]`` of so many bits -> bytes ``[N, rows, D]``, so many of a channel in a byte."""
    n, page, width = fields.shape
    blocks = -(-page // (tile * digits))
    padded = fields.new_zeros(n, blocks * digits * tile, width, dtype=torch.int32)
    padded[:, :page] = fields
    padded = padded.view(n, blocks, digits, tile, width)
    number = sum(padded[:, :, i] << bits * i for i in range(digits))
    assert isinstance(number, Tensor)
    return number.to(torch.uint8).view(n, blocks * tile, width)


def unpack(packed: Tensor, format: Format, page: int, tile: int) -> Tensor:
    """The inverse of :func:`pack`: bytes ``[N, rows, D]`` -> codes ``[N, page, D]``, whole numbers."""
    n, rows, width = packed.shape
    if format.interleaved(width):
        # an eighth of a group is whole words
        words = packed.view(torch.int32).unflatten(2, (8, -1, format.group // 32))
        packed = words.transpose(2, 3).reshape(n, rows, width // 4).view(torch.uint8)
    if format.digits == 1:
        return packed[:, :page]
    if format.three_bits:
        two = format.rows_of_two(page, tile)
        low, high = (
            _fields_of(rows_, bits, page, tile) for rows_, bits in ((packed[:, :two], 2), (packed[:, two:], 1))
        )
        return low | high << 2
    if format.code != "ternary":
        return _fields_of(packed, 8 // format.digits, page, tile)
    # no size is left to be inferred: there may be no page
    blocks = packed.view(n, rows // tile, 1, tile, width)
    power = torch.tensor([3**i for i in range(5)], dtype=torch.int32, device=packed.device)
    codes = (blocks.int() * power[:, None, None] & 255) * 3 >> 8
    return codes.reshape(n, rows * format.digits, width)[:, :page]


def _fields_of(packed: Tensor, bits: int, page: int, tile: int) -> Tensor:
    """Bytes ``[N, rows, D]`` -> the fields of so many bits in them, ``[N, page, D]`` uint8."""
    n, rows, width = packed.shape
    shifts = _shifts if packed.device.type == "cpu" else _shifts.__wrapped__
    fields = packed.view(n, rows // tile, 1, tile, width) >> shifts(bits, packed.device) & ((1 << bits) - 1)
    return fields.reshape(n, rows * (8 // bits), width)[:, :page]


@lru_cache(maxsize=32)
def _shifts(each: int, device: torch.device) -> Tensor:
    """By how much every code of a byte is shifted that has ``each`` bits, ``[digits, 1, 1]`` uint8."""
    with torch.inference_mode(False):
        return torch.arange(0, 8, each, dtype=torch.uint8, device=device)[:, None, None]


def dequantise(codes: Tensor, format: Format, scale: Tensor, zero: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``codes [..., page, D]`` and scales ``[..., *format.meta]`` -> ``[..., page, D]`` float32; written to ``out`` of that
    shape if it is given."""
    value = from_e4m3(codes) if format.code == "fp8" else from_book(codes, format) if format.by_book else codes.float()
    if format.centre:
        value = value - format.centre
    written = value
    if out is not None and out.dtype == value.dtype and not format.turned and not out.requires_grad:
        written, out = out, None
    into = grouped(written, format)
    torch.mul(grouped(value, format), _spread(scale.float(), format), out=into)
    if zero is not None:
        into.add_(_spread(zero.float(), format))
    value = written
    value = turned_back(value, format)
    return value if out is None else out.copy_(value)


def from_book(codes: Tensor, format: Format) -> Tensor:
    """Levels of a book that codes say, float32 of the same shape."""
    half = format.levels // 2
    if codes.device.type == "cpu":
        levels = torch.tensor([*format.book, *(-x for x in format.book)])
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)
    # no table is copied to the device
    rank, value = codes & (half - 1), torch.full_like(codes, format.book[0], dtype=torch.float32)
    for place, level in enumerate(format.book[1:], 1):
        value = torch.where(rank >= place, level, value)
    return torch.where(codes >= half, -value, value)


def turned(x: Tensor, format: Format) -> Tensor:
    """The numbers that are coded for the channels ``x [..., D]``: the same, or their transform in float32."""
    if format.seed is not None:
        return rotate(x.float(), format.seed, format.sketch)
    return waves(x) if format.fourier else x


def turned_back(x: Tensor, format: Format) -> Tensor:
    """Inverse of :func:`turned`."""
    if format.seed is not None:
        return rotate_back(x, format.seed, format.sketch)
    return channels_of(x) if format.fourier else x


def grouped(x: Tensor, format: Format) -> Tensor:
    """``[..., page, D]`` as ``[..., groups, group, D]`` or ``[..., page, groups, group]``."""
    return x.unflatten(-2 if format.axis == "channel" else -1, (-1, format.group))


def _spread(meta: Tensor, format: Format) -> Tensor:
    return meta.unsqueeze(-2 if format.axis == "channel" else -1)


def waves(x: Tensor) -> Tensor:
    """The orthonormal Fourier transform of the last axis, in real numbers: ``[..., D]`` -> ``[..., D]`` float32.

    The transform of real numbers at frequency ``D - f`` is the conjugate of that at ``f``, so half of it says all: first the
    real parts at frequencies 0 to ``D // 2``, then the imaginary parts at 1 to ``(D - 1) // 2``.
    """
    if not x.numel():
        # not every FFT library takes an empty batch
        return x.float()
    width = x.shape[-1]
    spectrum = torch.view_as_real(torch.fft.rfft(x.float(), norm="ortho"))
    # a coefficient of two frequencies counts twice
    twice = 0.5**-0.5
    real = spectrum[..., 0] * torch.where(_paired(width, x.device), twice, 1.0)
    return torch.cat([real, spectrum[..., 1 : (width + 1) // 2, 1] * twice], dim=-1)


def channels_of(x: Tensor) -> Tensor:
    """The inverse of :func:`waves`."""
    if not x.numel():
        return x
    width, half = x.shape[-1], x.shape[-1] // 2 + 1
    real = x[..., :half] * torch.where(_paired(width, x.device), 0.5**0.5, 1.0)
    imaginary = torch.zeros_like(real)
    imaginary[..., 1 : (width + 1) // 2] = x[..., half:] * 0.5**0.5
    return torch.fft.irfft(torch.complex(real, imaginary), n=width, norm="ortho")


def _paired(width: int, device: torch.device) -> Tensor:
    """Which of the frequencies 0 to ``width // 2`` have another that is their conjugate, bool."""
    frequency = torch.arange(width // 2 + 1, device=device)
    return (frequency > 0) & (2 * frequency < width)


def from_e4m3(byte: Tensor) -> Tensor:
    """Bytes of e4m3 numbers -> float32, by whole-number operations: not every device knows the type."""
    byte = byte.to(torch.int32)
    half = (byte & 128) << 8 | (byte & 127) << 7
    # to the signed range of int16, whose bits are then read as float16
    return (half - (half >> 15 << 16)).to(torch.int16).view(torch.float16).float() * 256
