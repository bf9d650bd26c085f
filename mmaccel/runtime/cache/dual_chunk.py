"""Dual chunk attention: keys stand at their positions within chunks, and queries are turned for near, next and far chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kv.cache import CacheState
from ...kv.index import select_rows
from ...kv.policies.dca import DualChunkAttention
from ..call.forward import Forward
from ..call.runs import KeysToRead, LayerAttended, Run, TextInputs
from .rotation import turned

#: queries whose attention is computed at once
ROWS = 256


@dataclass
class TruePositions:
    """Positions of all places of a cache whose keys stand within chunks: ``at [B, n]`` long."""

    at: Tensor

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        select_rows(self, ("at",), rows)

    def copy(self) -> TruePositions:
        """A copy to change independently."""
        return replace(self)

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.at = self.at[:, :seen]

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Keep the places that are ``held [n]`` bool."""
        self.at = self.at[:, held.to(self.at.device)]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""
        yield self.at


class ReadChunks(Run):
    """Dual chunk attention in one forward; the last of all runs, so that positions are complete.

    trained : positions of the model; None where its config does not say.
    """

    reads_keys = True

    def __init__(self, forward: Forward, policy: DualChunkAttention, state: CacheState, trained: int | None) -> None:
        self.forward, self.state, self.official, self.name = forward, state, policy.official, policy.name
        self.size, self.step = policy.sizes(trained)
        length = forward.seen + forward.length
        beyond = 1.0 if trained is None or length <= trained else length / trained
        self.factor = (0.05 * math.log(beyond) + 1) ** 2
        #: whether all tokens are in the first chunk
        self.short = length <= self.step

    def before_text(self, text: TextInputs) -> None:
        """Note the positions of all places, and give the new tokens those within their chunks."""
        forward, shared = self.forward, self.state.shared
        positions = text.arguments["position_ids"]
        places, end = forward.phase(0).places.to(positions.device).long(), forward.seen + forward.length
        memory = shared.memory(TruePositions)
        at = positions.new_full((len(places), end + 1), 0)
        if memory is None and forward.seen > self.step:
            raise UnsupportedError(
                f"{self.name} cannot continue a cache of {forward.seen} tokens that were read without it; begin again."
            )
        if memory is None:
            at[:, :end] = torch.arange(end, device=at.device)
        else:
            before = memory.at.to(at.device)
            at[:, : before.shape[1]] = before
        at.scatter_(1, torch.where(places < 0, end, places), positions.expand_as(places))
        shared.keep(TruePositions(at[:, :end]))
        text.arguments["position_ids"] = positions % self.step

    def keys_to_read(self, layer: LayerAttended) -> KeysToRead | None:
        """The output of a layer; None where all keys are of the first chunk."""
        memory = self.state.shared.memory(TruePositions)
        if self.short or memory is None:
            return None
        at, device = memory.at.to(layer.query.device), layer.query.device
        index = self.forward.index(layer.number).by_head.to(device).long()
        places = self.forward.phase(layer.number).places.to(device).long()
        keys = at[:, None].expand(-1, index.shape[1], -1).gather(2, index.clamp(min=0))
        query = at.gather(1, places.clamp(min=0))
        text: Any = self.forward.plan.family.text
        read = dual_chunk_attention(
            text,
            layer.query,
            layer.key,
            layer.value,
            query,
            keys,
            # the mask of a long prompt would be large, so that it is made for some queries at a time
            layer.visible if layer.visible is not None else (places, index),
            layer.scaling * self.factor,
            (self.size, self.step),
            self.official and layer.query.shape[2] > 1,
        )
        return KeysToRead(output=read)


def dual_chunk_attention(
    text: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    at: Tensor,
    came: Tensor,
    sight: Tensor | tuple[Tensor, Tensor],
    scaling: float,
    sizes: tuple[int, int],
    rounded: bool = False,
) -> Tensor:
    """``[B, q, Hq, D]``: attention in which the distance of a query and a key is at most the size of a chunk.

    Parameters
    ----------
    text : the text model, whose RoPE has turned queries and keys by their positions within chunks.
    query : ``[B, Hq, q, D]``. key, value : ``[B, Hkv, K, D]``. at, came : their positions, ``[B, q]`` and ``[B, 1 or Hkv, K]``.
    sight : ``[B, 1 or Hkv, q, K]`` bool, or places of the queries ``[B, q]`` and of the keys ``[B, 1 or Hkv, K]``, of which a
        query sees those up to its own. scaling : the factor of ``q . k``.
    sizes : of a chunk, and how many positions of it keys take. rounded : round the weights of the parts to bfloat16.
    """
    size, step = sizes
    inside, heads = at % step, key.shape[1]
    keys, values = key.float(), value.float()
    chunk = came[:, :, None] // step
    parts = []
    for first in range(0, query.shape[2], ROWS):
        rows = slice(first, first + ROWS)
        asking, near = query[:, :, rows], inside[:, rows]
        apart = (at[:, None, rows, None] // step - chunk).clamp(min=0)
        seen = sight[:, :, rows] if isinstance(sight, Tensor) else _causal(sight[0][:, rows], sight[1])
        logits = []
        for number, where in enumerate(
            (near, (near + step).clamp(max=size), torch.full_like(near, min(2 * step - 1, size)))
        ):
            turn = asking if number == 0 else turned(text, asking, (where - near)[:, None])
            products = (turn.float().unflatten(1, (heads, -1)) @ keys[:, :, None].mT) * scaling
            mine = seen & (apart == number if number < 2 else apart >= 2)
            logits.append(products.masked_fill(~mine[:, :, None], -torch.inf))
        if not rounded:
            # every key is in one part, and what is hidden is nowhere
            weights = torch.stack(logits).amax(0).softmax(-1).nan_to_num(0.0)
            out = weights @ values[:, :, None]
        else:
            sums = torch.stack([x.logsumexp(-1) for x in logits])
            share = (sums - sums.amax(0)).exp()
            share = share / share.sum(0)
            merged = (at[:, None, None, rows] >= step).expand_as(share[0])
            share = torch.where(merged, share.bfloat16().float(), share)
            outs = torch.stack([x.softmax(-1).nan_to_num(0.0) @ values[:, :, None] for x in logits])
            out = (outs * share[..., None]).sum(0)
        parts.append(out.flatten(1, 2))
    return torch.cat(parts, dim=2).transpose(1, 2).to(query.dtype)


def _causal(places: Tensor, index: Tensor) -> Tensor:
    """``[B, 1 or Hkv, q, K]`` bool: which keys of ``index [B, 1 or Hkv, K]`` are not behind ``places [B, q]``."""
    return (index[:, :, None] <= places[:, None, :, None]) & (index >= 0)[:, :, None]
