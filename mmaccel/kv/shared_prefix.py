"""Shared prefixes (Hydragen, RelayAttention): what rows of a batch have in common is stored once, and read once a batch.

A query attends to the shared keys and to its row's own apart, and the two outputs are merged by their logarithms of the sum of
exponentials. The queries of all rows, and of the query heads that share a key head, are one matrix in the product with the
shared keys, which are so read once a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .index import to_device
from .ragged import Ragged

#: logits that are held at a time, ``[heads, queries, keys]``
_LOGITS = 1 << 24


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Keys and values of ``V`` prompts that the rows of a batch continue, in front of each row's own.

    keys, values : ``[V, Hkv, T, D]``. ragged : keys before these, of heads that store different counts.
    rows : ``[B]`` long on the CPU, the prompt that each row continues.
    full : whether every slot of every prompt holds a key.
    """

    keys: Tensor
    values: Tensor
    ragged: Ragged | None
    rows: Tensor
    full: bool

    @property
    def width(self) -> int:
        """Slots of a row."""
        return self.keys.shape[2] + (0 if self.ragged is None else self.ragged.longest)

    @property
    def places(self) -> int:
        """Number of keys that all rows see, counted once for every row."""
        dense = len(self.rows) * self.keys.shape[1:3].numel()
        return dense if self.ragged is None else dense + int(self.ragged.lengths.sum(1).cpu()[self.rows].sum())

    def of_prompts(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[V, Hkv, P, D]`` of the prompts; short heads are padded."""
        if self.ragged is None:
            return self.keys, self.values
        keys, values = self.ragged.padded()
        return torch.cat([keys, self.keys], dim=2), torch.cat([values, self.values], dim=2)

    def padded(self) -> tuple[Tensor, Tensor]:
        """The same for every row, ``[B, Hkv, P, D]``: copies."""
        rows = to_device(self.rows, self.keys.device)
        keys, values = (x.index_select(0, rows) for x in self.of_prompts())
        return keys, values

    def select(self, rows: Tensor) -> SharedPrefix:
        """Keep, repeat or reorder rows of the batch; nothing is copied."""
        return replace(self, rows=self.rows[rows.cpu()])

    def to(self, dtype: torch.dtype) -> SharedPrefix:
        """The same in another precision."""
        ragged = None if self.ragged is None else self.ragged.to(dtype)
        return replace(self, keys=self.keys.to(dtype), values=self.values.to(dtype), ragged=ragged)

    def moved(self, move: Callable[[Tensor, int], Tensor]) -> SharedPrefix:
        """The same with keys and values replaced by what ``move(x, dim)`` returns, which shows the same."""
        ragged = None if self.ragged is None else self.ragged.moved(move)
        return replace(self, keys=move(self.keys, -2), values=move(self.values, -2), ragged=ragged)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.keys, self.values, self.rows)
        if self.ragged is not None:
            yield from self.ragged.tensors()

    def attend(self, query: Tensor, visible: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention of ``query [B, Hq, q, D]`` over the shared keys of its row.

        visible : ``[B, 1 or Hkv, q, P]`` bool; None where all keys are seen.

        Returns the output ``[B, Hq, q, Dv]``, and the logarithm of the sum of exponentials ``[B, Hq, q]`` float32.
        """
        keys, values = self.of_prompts()
        if len(keys) == 1:
            return _attend(query, keys[0], values[0], visible, scaling)
        out = query.new_empty(*query.shape[:3], values.shape[3])
        lse = torch.empty(query.shape[:3], device=query.device)
        for prompt in self.rows.unique().tolist():
            rows = to_device((self.rows == prompt).nonzero()[:, 0], query.device)
            seen = None if visible is None else visible[rows]
            out[rows], lse[rows] = _attend(query[rows], keys[prompt], values[prompt], seen, scaling)
        return out, lse


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of ``query [B, Hq, q, D]`` over ``keys`` and ``values [Hkv, P, D]`` of one prompt."""
    rows, heads, length, size = query.shape
    shared, group = len(keys), heads // len(keys)
    # [Hkv, B G q, D]
    flat = query.reshape(rows, shared, -1, size).transpose(0, 1).reshape(shared, -1, size).float() * scaling
    keys, values = keys.float().mT, values.float()
    masks = None
    if visible is not None:
        masks = visible.transpose(0, 1)[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 3)
    outs, sums = [], []
    step = max(1, _LOGITS // max(1, shared * keys.shape[2]))
    for begin in range(0, flat.shape[1], step):
        logits = flat[:, begin : begin + step] @ keys
        if masks is not None:
            logits.masked_fill_(~masks[:, begin : begin + step], -torch.inf)
        lse = logits.logsumexp(-1)
        # a query that sees nothing gets zeros
        outs.append(logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_() @ values)
        sums.append(lse)

    def by_row(x: Tensor) -> Tensor:
        return x.unflatten(1, (rows, group, length)).transpose(0, 1).flatten(1, 2)

    return by_row(torch.cat(outs, dim=1)).to(query.dtype), by_row(torch.cat(sums, dim=1))
