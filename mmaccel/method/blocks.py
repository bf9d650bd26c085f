"""Helpers of methods at several sites: attention and similarities in blocks of rows, without the whole map in memory;
the frames of a unit."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import leftmost, question
from .layers import LayerAttention
from .tokens import TokenBatch

#: entries of a block of pairs held at once (attention over batch and heads, similarities over the batch)
BLOCK = 1 << 24
#: entries of a block of features that stays in the cache of a core
CACHED = 1 << 18


def row_blocks(attention: LayerAttention) -> list[tuple[int, int]]:
    """``(start, stop)`` of consecutive query rows, in order; the last block may be shorter."""
    batch, heads, rows, _ = attention.query.shape
    height = max(1, BLOCK // max(1, batch * heads * attention.key.shape[2]))
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def upto(attention: LayerAttention, stop: int) -> LayerAttention:
    """The attention of the query rows before ``stop``, without keys that only later rows may attend to."""
    keys = attention.key.shape[2] - attention.query.shape[2] + stop
    return replace(
        attention,
        query=attention.query[:, :, :stop],
        key=attention.full_key[:, :, :keys],
        visible=None if attention.visible is None else attention.visible[:, :, :stop, :keys],
        text=attention.text[:, :stop],
        said=None if attention.said is None else attention.said[:, :stop],
        places=None if attention.places is None else attention.places[:, :stop],
        age=None if attention.age is None else attention.age[:, :stop],
        prepared={name: figures[:, :stop] for name, figures in attention.prepared.items()},
        memo={},
    )


def blocks_with(attention: LayerAttention, wanted: Tensor) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the blocks of rows that hold a ``wanted [q]`` row (bool, on the CPU), cut to the first and the last
    of these."""
    for start, stop in row_blocks(attention):
        rows = wanted[start:stop].nonzero()[:, 0].tolist()
        if rows:
            yield start + rows[0], start + rows[-1] + 1


def question_rows(attention: LayerAttention) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention that text behind the pictures pays, in blocks of rows: ``[B, H, r, k]`` to the first ``k`` keys, and
    ``[B, 1, r, 1]`` bool, which rows are such text; other rows may be NaN."""
    asked = question(attention.text, ~attention.text)
    for start, stop in blocks_with(attention, question(attention.host_text, ~attention.host_text).any(0)):
        yield upto(attention, stop).attention(start, stop), asked[:, None, start:stop, None]


def question_peak(attention: LayerAttention) -> Tensor:
    """``[B, K]``: the largest attention that any head and any token of text behind the pictures pays to each key."""
    most = torch.zeros(len(attention.text), attention.key.shape[2], device=attention.text.device)
    for paid, asked in question_rows(attention):
        paid = paid.amax(1).masked_fill(~asked[:, 0], 0.0)
        seen = paid.shape[2]
        most[:, :seen] = torch.maximum(most[:, :seen], paid.amax(1))
    return most


def question_mean(attention: LayerAttention) -> Tensor:
    """``[B, K]``: the attention that text behind the pictures pays to each key, mean over heads and its tokens."""
    total = torch.zeros(len(attention.text), attention.key.shape[2], device=attention.text.device)
    for paid, asked in question_rows(attention):
        total[:, : paid.shape[3]] += paid.mean(1).masked_fill(~asked[:, 0], 0.0).sum(1)
    return total / question(attention.text, ~attention.text).sum(1, keepdim=True).clamp(min=1)


def cosine_to(features: Tensor, slots: Tensor) -> Tensor:
    """``[N, n]`` float32: cosine of each token of ``features [N, n, D]`` with the one at ``slots [N, n]``; -1 is the token
    itself. The cosine of a token and a copy of it is exactly one."""
    rows, n, width = features.shape
    row, own = torch.arange(rows, device=slots.device)[:, None], torch.arange(n, device=slots.device)
    at = torch.where(slots < 0, own, slots)
    cosine = torch.empty(rows, n, device=features.device)
    step = max(1, (CACHED if features.device.type == "cpu" else BLOCK) // max(1, rows * width))
    for left in range(0, n, step):
        block = slice(left, left + step)
        cosine[:, block] = cosine_of(features[:, block].float(), features[row, at[:, block]].float())
    return cosine.clamp_(max=1.0)


def cosine_of(x: Tensor, y: Tensor) -> Tensor:
    """``[...]``: cosines of vectors ``x`` and ``y [..., D]``, whose sums over ``D`` are taken alone; that of copies is one."""
    # the three sums add in the same order, and sqrt(a a) is a
    square = ((x * x).sum(-1) * (y * y).sum(-1)).clamp(min=torch.finfo(x.dtype).tiny)
    return (x * y).sum(-1) / square.sqrt()


def nearest_kept(features: Tensor, kept: Tensor, valid: Tensor | None = None) -> Tensor:
    """``[N, n]`` long: for every slot of ``features [N, n, D]`` the slot ``kept [N, n]`` of largest cosine, the lower on a tie;
    its own in a row that keeps none. Slots that are not ``valid [N, n]`` count as zero."""
    x = features.float() if valid is None else features.float().masked_fill(~valid[..., None], 0.0)
    x, every = normalize(x, dim=-1), torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    # only kept tokens are candidates; slots that fill up short rows cannot win
    slots, held = leftmost(kept)
    if not slots.shape[1]:
        return every
    return slots.gather(1, most_alike(x, every, slots, held, first=first_copies(x))[1])


def frame_numbers(tokens: TokenBatch) -> Tensor:
    """Number of the frame of a clip, or tile of a picture, of each token, ``[N, n]`` long from 0; -1 without a cell."""
    frames = int(tokens.grid[:, 0].max())
    key = (tokens.tile * frames + tokens.cells[..., 0]).masked_fill(~tokens.celled, -1)
    used = key.new_zeros(len(key), max(2, int(key.max()) + 2)).scatter_(1, key + 1, 1)
    return (used[:, 1:].cumsum(1) - 1).gather(1, key.clamp(min=0)).masked_fill(~tokens.celled, -1)
