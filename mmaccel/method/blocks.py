"""The attention of a layer in blocks of query rows, so that the whole map is never in memory."""

from __future__ import annotations

from dataclasses import replace

from . import LayerAttention

#: entries of a block of pairs held at once (attention over batch and heads, similarities over the batch)
BLOCK = 1 << 24


def row_blocks(attention: LayerAttention) -> list[tuple[int, int]]:
    """``(start, stop)`` of consecutive query rows, in order; the last block may be shorter."""
    batch, heads, rows, _ = attention.query.shape
    height = max(1, BLOCK // max(1, batch * heads * attention.key.shape[2]))
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def upto(attention: LayerAttention, stop: int) -> LayerAttention:
    """The same attention without the query rows from ``stop`` on, and without the keys that only those may attend to."""
    keys = attention.key.shape[2] - attention.query.shape[2] + stop
    return replace(
        attention,
        query=attention.query[:, :, :stop],
        key=attention.full_key[:, :, :keys],
        visible=None if attention.visible is None else attention.visible[:, :, :stop, :keys],
        text=attention.text[:, :stop],
        memo={},
    )
