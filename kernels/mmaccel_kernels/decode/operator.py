"""Decode attention as one operator, ``torch.ops.mmaccel.decode_attention``, which compiled graphs hold as it is.

Operators take tensors, lists of tensors, numbers and strings, so pages travel as their tensors and a line of text.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..launch import run
from ..pages import Format, Pages, Plane, Remainder
from .heads import heads_attention, reads_heads
from .naive import Flat, decode_attention_definition
from .triton import decode_attention_kernel, readable


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None,
    pages: Pages | None,
    visible: Tensor | None,
    tail: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`.decode_attention` of what fits, by the kernel or the definition."""
    if flat is not None and pages is None and visible is None and tail is None:
        if reads_heads(query, flat.keys, flat.values, len(flat.cu_lengths) - 1):
            return heads_attention(query, keys, values, scaling, flat)
    if not readable(pages, query, values.shape[3]):
        return decode_attention_definition(query, keys, values, scaling, flat, pages, visible, tail, added)
    kernel, definition = decode_attention_kernel, decode_attention_definition
    return run(kernel, definition, query, keys, values, scaling, flat, pages, visible, tail, added)


def traced(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: Flat | None,
    pages: Pages | None,
    visible: Tensor | None,
    tail: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` while a graph is being made of it."""
    parts, width = ([], 0) if flat is None else (list(flat[:3]), flat.width)
    tensors: list[Tensor] = []
    layout = "" if pages is None else _spread(pages, tensors)
    out: tuple[Tensor, Tensor] = torch.ops.mmaccel.decode_attention(
        query, keys, values, scaling, parts, width, tensors, layout, visible, tail, added
    )
    return out


@torch.library.custom_op(
    "mmaccel::decode_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, float scaling, Tensor[] flat, SymInt width, Tensor[] pages, str layout, "
    "Tensor? visible, Tensor? tail, Tensor? added=None) -> (Tensor, Tensor)",
)
def _decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    flat: list[Tensor],
    width: int,
    pages: list[Tensor],
    layout: str,
    visible: Tensor | None,
    tail: Tensor | None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    heads = Flat(flat[0], flat[1], flat[2], width) if flat else None
    return attend(
        query, keys, values, scaling, heads, _gathered(layout, pages) if layout else None, visible, tail, added
    )


@_decode_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:3], values.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


def _spread(pages: Pages, tensors: list[Tensor]) -> str:
    """Put every tensor of ``pages`` to ``tensors``, and say all the rest as a literal of Python."""

    def plane(of: Plane) -> str:
        rest = Remainder() if of.rest is None else of.rest
        own, form = (of.codes, of.scale, of.zero, of.channels, of.factor, *rest.parts), of.format
        there = ", ".join(str(x is not None) for x in own)
        tensors.extend(x for x in own if x is not None)
        return f"({dataclasses.astuple(form)!r}, {there})"

    keys, values = ("".join(plane(of) + ", " for of in planes) for planes in (pages.keys, pages.values))
    tensors.extend((pages.count, pages.meta, pages.table, pages.cu_pages))
    return f"(({keys}), ({values}), {pages.page}, {pages.tile}, {pages.heads}, {pages.key_width})"


def _gathered(layout: str, tensors: list[Tensor]) -> Pages:
    """The pages that were spread."""
    keys, values, page, tile, heads, width = _parsed(layout)
    left = iter(tensors)

    def plane(form: Any, *there: bool) -> Plane:
        codes, scale, zero, channels, factor, *parts = (next(left) if one else None for one in there)
        assert codes is not None and scale is not None
        rest = Remainder(*parts) if any(part is not None for part in parts) else None
        return Plane(Format(*form), codes, scale, zero, channels, factor, rest)

    key_planes, value_planes = (tuple(plane(*of) for of in side) for side in (keys, values))
    count, meta, table, cu_pages = left
    return Pages(key_planes, value_planes, page, tile, count, meta, table, cu_pages, heads, width)


@cache
def _parsed(layout: str) -> Any:
    return ast.literal_eval(layout)


__all__ = ["attend", "traced"]
