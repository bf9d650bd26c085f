"""Decode steps that read the cache as it is stored: no head is padded and no page is decoded to be looked at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from mmaccel_kernels.decode import MAX_QUERIES, Flat, decode_attention, decode_attention_definition, reads_heads
from mmaccel_kernels.launch import works
from torch import Tensor

from .forward_info import ForwardInfo
from .shared_prefix import SharedPrefix

if TYPE_CHECKING:
    from mmaccel_kernels.pages import Pages

    from .packed_keys import PackedKeys
    from .ragged import Ragged


class Stored(Protocol):
    """Protocol of a layer before it is read."""

    ragged: Ragged | None
    prefix: SharedPrefix | None
    packed: PackedKeys


class Readable(Protocol):
    """Protocol of a layer that is read, see :class:`.packed.QuantisedLayer`."""

    @property
    def ragged(self) -> Ragged | None:
        """Heads that store different counts."""

    @property
    def keys(self) -> Tensor:
        """``[B, Hkv, T, D]``, behind all others."""

    @property
    def values(self) -> Tensor:
        """Like the keys."""

    @property
    def packed(self) -> PackedKeys:
        """Packed keys, before them."""

    def bias_products(self, query: Tensor) -> Tensor | None:
        """Products of queries with the bias that packed keys lack, ``[B, Hq, q, width]`` float32; None without one."""


def on_gpu(x: Tensor) -> bool:
    """Whether the kernel runs on ``x``; the definition would gain nothing over padding."""
    return works(x.device)


def reads_as_stored(layer: Stored, incoming: ForwardInfo, new: Tensor) -> bool:
    """Whether a layer is read as stored in this forward: nothing but attention looks at its keys, and rows share some of them;
    or some are ragged or packed, and there are few new tokens on a GPU, or one on a CPU and nothing is packed.

    new : ``[B, heads, q, D]``, queries or keys of the new tokens.
    """
    if not incoming.as_stored or incoming.reads:
        return False
    if layer.prefix is not None:
        return True
    if layer.ragged is None and not layer.packed.any_pages:
        return False
    if on_gpu(new):
        return new.shape[2] <= MAX_QUERIES
    if (ragged := layer.ragged) is None or layer.packed.any_pages:
        return False
    return reads_heads(new, ragged.keys, ragged.values, ragged.lengths.numel())


def attend(
    layer: Readable,
    query: Tensor,
    visible: Tensor | None,
    scaling: float,
    tail: Tensor | None = None,
    pages: Pages | None = None,
) -> Tensor:
    """Attention of ``query [B, Hq, q, D]`` over everything in ``layer``, the keys of the queries included.

    visible : ``[B, 1 or Hkv, q, K]`` bool, over the slots of ``layer.stored()``; None if a query sees all up to its own key.
    tail : ``[1]`` long, how many of ``layer.keys`` there are; all by default.
    pages : what is to be read of those of a layer that has one token group; all by default.

    Returns ``[B, q, Hq, D]``, as attention functions of transformers return it.
    """
    flat = None
    if (ragged := layer.ragged) is not None:
        flat = Flat(ragged.keys, ragged.values, ragged.bounds, ragged.longest)
    # one token group is read in the same pass as the rest, each of the others in a pass of its own
    groups = [
        (held, width) for held, width in zip(layer.packed.pages, layer.packed.widths, strict=True) if held is not None
    ]
    parts, none = [], (layer.keys[:, :, :0], layer.values[:, :, :0])
    added = layer.bias_products(query) if groups else None
    for other, width in groups[:-1]:
        mine, more = None, None
        if added is not None:
            more, added = added[..., :width], added[..., width:]
        if visible is not None:
            mine, visible = visible[..., :width], visible[..., width:]
        if len(other.table):
            parts.append(decode_attention(query, *none, scaling=scaling, pages=other, visible=mine, added=more))
    last = pages if pages is not None else groups[-1][0] if groups else None
    if added is not None and pages is not None:
        slots = pages.slots_in(groups[-1][0], added.shape[3])[:, :, None]
        slots = slots.repeat_interleave(added.shape[1] // slots.shape[1], dim=1)
        added = added.gather(3, slots.expand(-1, -1, added.shape[2], -1))
    held = layer.keys, layer.values
    read = decode_attention(
        query, *held, scaling=scaling, flat=flat, pages=last, visible=visible, tail=tail, added=added
    )
    # without a mask a query sees its own key
    return combine_partials([*parts, read], visible is None).transpose(1, 2)


def attend_behind(
    prefix: SharedPrefix,
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    visible: Tensor | None,
    scaling: float,
    windowed: bool = False,
) -> Tensor:
    """Attention of ``query [B, Hq, q, D]`` over a shared prefix, and each row's own ``keys`` and ``values [B, Hkv, T, D]``
    behind it, those of the queries included.

    visible : ``[B, 1 or Hkv, q, P + T]`` bool; None if a query sees all up to its own key.
    windowed : whether some keys of the prefix may be out of reach of a sliding window.

    Returns ``[B, q, Hq, D]``.
    """
    shared = own = None
    if visible is not None:
        shared, own = visible[..., : prefix.width], visible[..., prefix.width :]
    read = decode_attention if query.shape[2] <= MAX_QUERIES else decode_attention_definition
    parts = [
        prefix.attend(query, None if prefix.full and not windowed else shared, scaling),
        read(query, keys, values, scaling=scaling, visible=own),
    ]
    return combine_partials(parts).transpose(1, 2)


def combine_partials(parts: list[tuple[Tensor, Tensor]], all_see: bool = False) -> Tensor:
    """Attention over several sets of keys as one: outputs ``[B, Hq, q, Dv]`` of each set by their logarithms of the sum of
    exponentials ``[B, Hq, q]`` float32, of which one at least is finite for every query that sees anything; ``all_see``: all
    do."""
    (first, _), *others = parts
    if not others:
        return first
    shares = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
    if not all_see:
        # a query that sees nothing has shares of nothing
        shares = shares.nan_to_num(0.0)
    read = first * shares[0]
    for (part, _), share in zip(others, shares[1:], strict=True):
        read = torch.addcmul(read, part, share)
    return read.to(first.dtype)
