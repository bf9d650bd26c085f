"""What policies are shown, made by hand: attention and keys of a padded batch."""

from __future__ import annotations

import torch

from mmaccel.method import KeyBatch, LayerAttention


def attention_of(
    pads: tuple[int, ...] = (0, 3), rows: int = 11, total: int = 14, visible: bool = True
) -> LayerAttention:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(len(pads), 6, rows, 8, generator=random)
    key = torch.randn(len(pads), 2, total, 8, generator=random)
    at, keys = torch.arange(rows) + total - rows, torch.arange(total)
    real = keys >= torch.tensor(pads)[:, None]
    mask = (keys <= at[:, None])[None] & real[:, None] & real[:, total - rows :, None]
    text = real[:, total - rows :] & (torch.arange(rows) % 3 > 0)
    return LayerAttention(query, key, mask[:, None] if visible else None, 8**-0.5, text)


def keys_of(pads: tuple[int, ...], heads: int = 2, group: int = 3, total: int = 30, window: int = 4) -> KeyBatch:
    """Left-padded rows with a clip of 5 frames of 4 patches before 4 tokens of text; a row does not depend on its padding."""
    random = torch.Generator().manual_seed(0)
    shape = (len(pads), heads, total, 8)
    at = torch.arange(total - 4 - 20, total - 4)
    visual = torch.zeros(len(pads), total, dtype=torch.bool)
    visual[:, at] = True
    valid = torch.arange(total) >= torch.tensor(pads)[:, None]
    cells = torch.full((len(pads), total, 3), -1)
    i = torch.arange(20)
    cells[:, at] = torch.stack([i // 4, i % 4 // 2, i % 2], dim=1)
    visual &= valid
    spread = torch.randn(len(pads), heads * group, 8, 8, generator=random)
    return KeyBatch(
        expected=(torch.randn(spread.shape[:3], generator=random), spread @ spread.mT),
        keys=torch.randn(shape, generator=random),
        values=torch.randn(shape, generator=random),
        queries=torch.randn(len(pads), heads * group, window, 8, generator=random),
        valid=valid,
        visual=visual,
        index=torch.arange(total).expand(len(pads), -1),
        scaling=8**-0.5,
        received=torch.rand(shape[:3], generator=random),
        count=torch.full((len(pads),), 12),
        picture=torch.where(visual, 0, -1),
        cells=torch.where(visual[..., None], cells, -1),
        outgoing=torch.rand(shape[:3], generator=random),
        unrotated=torch.randn(shape, generator=random),
    )
