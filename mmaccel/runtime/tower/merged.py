"""The state of merging in one run of a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.masks import true_first
from ...core.reduction import Reduction, segment_sum
from ...errors import MmaccelError, UnsupportedError
from ...method import EncoderMethod, EncoderTokens
from ...method.results import check_numbers, check_slots, check_tensor
from ..call.compact_tokens import CompactTokens


class Flow:
    """One merge of ``S`` tokens into ``K``: ``out[k] = sum of weight * in`` over the tokens of group ``k``.

    group : ``[S]`` long. weight : ``[S]`` float32.
    """

    def __init__(self, group: Tensor, weight: Tensor, kept: int) -> None:
        self.group, self.weight = group, weight
        self.order = group.argsort(stable=True)
        self.lengths = group.new_zeros(kept).scatter_add_(0, group, torch.ones_like(group))
        self.total = segment_sum(weight[self.order, None], self.lengths)

    def apply(self, x: Tensor) -> Tensor:
        """``[S, C] -> [K, C]``."""
        parts = x[self.order].float() * self.weight[self.order, None]
        return segment_sum(parts, self.lengths).to(x.dtype)

    def spread(self, y: Tensor) -> Tensor:
        """``[K, C] -> [S, C]``: values that :meth:`apply` turns back into ``y``, the same for all tokens of a group."""
        # a token fused of tokens without any attention is zero, not NaN
        return (y.float() / self.total.clamp(min=1e-6)).to(y.dtype)[self.group]


@dataclass(eq=False)
class Run:
    """Tiles or frames of one size and one budget, matched together.

    slots : ``[R, E, u]`` long, the tokens of every entry (CLS, or ``u`` patches that merge as one) in the tower's sequence.
    plan : how many entries each merging layer removes.
    """

    slots: Tensor
    plan: list[int]


class Merged(CompactTokens):
    """The merging state of one run of a tower.

    size : ``[S]`` float, patches (or blocks of patches) that each remaining token represents.
    """

    def __init__(self, method: EncoderMethod, cls: int, tiles: int, tokens: int, device: torch.device) -> None:
        super().__init__(cls, tiles, tokens, device)
        self.method = method
        self.size = torch.ones(tokens, device=device)
        self.runs: list[Run] = []
        #: which of the merging layers runs, if it removes anything; the merge it decides on
        self.layer: int | None = None
        self.flow: Flow | None = None
        self.seen = 0
        self._keys: list[Tensor] = []
        self._attention: list[Tensor] = []

    def enter(self, layer: int | None) -> None:
        """A layer begins; ``layer`` is its number among the merging layers."""
        self.layer = layer if layer is not None and any(run.plan[layer] for run in self.runs) else None
        self.seen = 0
        self._keys, self._attention = [], []

    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Note keys and attention for the merge behind this layer; weigh merged tokens by the patches they represent."""
        if not self.open:
            return mask
        first, self.seen = self.seen, self.seen + key.shape[0] * key.shape[2]
        if self.method.proportional and len(self.place) < len(self.owner):
            if mask is not None:
                raise UnsupportedError(
                    "Merging inside the encoder does not work with pictures that have padded patches."
                )
            mask = self.size[first : self.seen].log().view(len(key), 1, 1, -1).to(key.dtype)
        if self.layer is not None:
            self._keys.append(key.float().mean(1).flatten(0, 1))
            if self.method.needs_cls:
                logits = (query[:, :, :1].float() @ key.float().transpose(-1, -2)) * scaling
                logits = logits if mask is None else logits + mask.float()
                self._attention.append(logits.softmax(-1).mean(1).flatten())
        return mask

    def merge(self, hidden: Tensor, depth: float) -> Tensor:
        """Choose and merge tokens of the sums behind a layer's attention, ``[tiles, T, C]`` or ``[S, C]``."""
        assert self.layer is not None
        keys, tokens = torch.cat(self._keys), len(self.place)
        attention = torch.cat(self._attention) if self._attention else None
        target, weight = torch.arange(tokens, device=hidden.device), torch.ones(tokens, device=hidden.device)
        stays, kept = [], tokens
        for run in self.runs:
            remove, slots = run.plan[self.layer], run.slots
            seen = EncoderTokens(
                keys=keys[slots].flatten(2),
                size=self.size[slots[..., 0]],
                protected=self.cls,
                depth=depth,
                cls_attention=None if attention is None else attention[slots].sum(-1),
            )
            entry = torch.arange(slots.shape[1], device=slots.device).expand(slots.shape[:2])
            into = entry
            if remove:
                into, weights = self._matched(seen, remove)
                target[slots] = slots.gather(1, into[..., None].expand_as(slots))
                weight[slots] = weights[..., None].expand_as(slots)
            stays.append(true_first(into == entry)[:, : slots.shape[1] - remove])
            kept -= slots.shape[0] * remove * slots.shape[2]
        left = target == torch.arange(tokens, device=target.device)
        if (count := int(left.sum())) != kept:
            raise MmaccelError(
                f"Method {self.method.name!r} left {count} tokens in the tower where {kept} were to stay."
            )
        rank = left.cumsum(0) - 1
        self.flow = Flow(rank[target], weight, kept)
        self.owner = self.flow.group[self.owner]
        # whole numbers, which any order of additions sums alike
        self.size = self.size.new_zeros(kept).scatter_add_(0, self.flow.group, self.size)
        self.place = self.place[true_first(left)[:kept]]
        for run, stay in zip(self.runs, stays, strict=True):
            run.slots = rank[run.slots.gather(1, stay[..., None].expand(-1, -1, run.slots.shape[2]))]
        return self.pack(self.flow.apply(hidden.flatten(0, -2)), hidden)

    def _matched(self, seen: EncoderTokens, remove: int) -> tuple[Tensor, Tensor]:
        """The slot that each token of ``seen`` flows into, and its weight there, ``[N, T]`` each, by the method."""
        method, size = self.method, seen.size
        into = check_tensor(method, "match()", method.match(seen, remove), "integer", size.shape, size)
        check_slots(method, "match()", into, size.shape[1])
        weights = check_tensor(method, "weigh()", method.weigh(seen, into), "float", size.shape, size)
        return into, check_numbers(method, "weigh()", weights)

    def pack(self, flat: Tensor, like: Tensor) -> Tensor:
        """``[S, C]`` in the shape the tower works in."""
        return flat if like.dim() == 2 else flat.view(self.tiles, -1, flat.shape[-1])

    def reduction(self) -> Reduction:
        """The same as data, over the patches of each tile: ``[tiles, T0 - cls]``."""
        first = torch.arange(self.tiles, device=self.owner.device)[:, None] * (len(self.owner) // self.tiles) + self.cls
        target = self.patches(self.place[self.owner]) - first
        return Reduction.merge(target, torch.ones_like(target, dtype=torch.bool))
