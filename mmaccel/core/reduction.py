"""Reductions: which visual tokens stay, and how the others are merged into them.

A :class:`Reduction` is data: a sparse linear map on a padded batch of token sets. It is written in *slot coordinates*:
inputs and outputs are both addressed by the slot (index along the token axis) they have in the input, so that a merged
token takes the slot, the grid cell and the position of the kept token it replaces. Applying, composing and drawing then
do not depend on how many tokens are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from .masks import leftmost, ranks, resorted


@dataclass(frozen=True)
class Links:
    """A sparse map in coordinate form; ``out[batch, slot] = sum(weight * in[batch, source])``. All ``[L]``."""

    batch: Tensor
    slot: Tensor
    source: Tensor
    weight: Tensor

    def sorted(self, width: int) -> Links:
        """The same links ordered by output, then by source, with the weights of equal pairs summed: the canonical form."""
        key = (self.batch * width + self.slot) * width + self.source
        unique, inverse = torch.unique(key, return_inverse=True)
        if len(unique) == len(key):
            order = key.argsort()
            return Links(self.batch[order], self.slot[order], self.source[order], self.weight[order])
        order = inverse.argsort(stable=True)
        lengths = torch.bincount(inverse, minlength=len(unique))
        weight = segment_sum(self.weight[order, None].float(), lengths)[:, 0]
        out = unique // width
        return Links(out // width, out % width, unique % width, weight)


@dataclass(frozen=True)
class Residual:
    """Values added to kept tokens after all merging: ``values [U, n, D]`` at ``batch [U, n]`` and ``slot [U, n]``, both
    long; none where ``slot`` is -1."""

    batch: Tensor
    slot: Tensor
    values: Tensor

    @staticmethod
    def to(kept: Tensor, values: Tensor) -> Residual:
        """The ``values [N, n, D]`` at the slots ``kept [N, n]`` bool."""
        slots = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        rows = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)
        return Residual(rows, slots.masked_fill(~kept, -1), values)

    def add(self, x: Tensor) -> Tensor:
        """``x [B, S, D]`` plus the values."""
        # nothing is added to a slot each: a GPU would add all of it to a single one in turn
        spread = torch.arange(self.slot.shape[1], device=self.slot.device) % x.shape[1]
        slot = torch.where(self.slot < 0, spread, self.slot)
        at = (self.batch * x.shape[1] + slot).flatten().to(x.device, non_blocking=True)
        none = (self.slot < 0)[..., None].to(x.device, non_blocking=True)
        values = self.values.to(x.dtype).masked_fill(none, 0).flatten(0, 1)
        return x.flatten(0, 1).index_add(0, at, values).view(x.shape)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs of rows, ``[L, D] -> [len(lengths), D]``, added in a fixed order, without atomics."""
    if values.shape[0] == 0:
        return values.new_zeros(len(lengths), values.shape[1])
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


@dataclass(frozen=True)
class Reduction:
    """A map from input tokens to kept tokens, for ``N`` ragged sets padded to ``n`` slots.

    Parameters
    ----------
    kept : ``[N, n]`` bool, the slots that stay. They come out in ascending order.
    valid : ``[N, n]`` bool, the slots that hold a token.
    links : how outputs are computed from inputs. ``None`` means pure pruning: every kept token stays as it is.
        A kept slot without a link keeps its own value.
    residual : what is added to tokens as they enter the language model. It is no part of the map: nothing here applies or
        composes it.

    Examples
    --------
    >>> scores, valid = torch.tensor([[0.1, 0.9, 0.5]]), torch.ones(1, 3, dtype=torch.bool)
    >>> Reduction.top(scores, valid, torch.tensor([2])).kept
    tensor([[False,  True,  True]])
    """

    kept: Tensor
    valid: Tensor
    links: Links | None = None
    residual: Residual | None = None

    # --- constructors -----------------------------------------------------------------------------------------
    @staticmethod
    def identity(valid: Tensor) -> Reduction:
        """The reduction that keeps everything. ``valid [N, n]`` bool."""
        return Reduction(valid, valid)

    @staticmethod
    def top(scores: Tensor, valid: Tensor, count: Tensor) -> Reduction:
        """Keep the ``count [N]`` highest of ``scores [N, n]``; equal scores favour the lower slot."""
        return Reduction(top_mask(scores, valid, count), valid)

    @staticmethod
    def merge(target: Tensor, valid: Tensor, weight: Tensor | None = None) -> Reduction:
        """Average every token into one kept token.

        Parameters
        ----------
        target : ``[N, n]`` long, the slot each token flows into; a slot that is its own target stays; -1 drops the token.
        valid : ``[N, n]`` bool.
        weight : ``[N, n]`` float, the weight of each token in its mean (default 1).
        """
        n = valid.shape[1]
        flows = valid & (target >= 0)
        batch, source = flows.nonzero(as_tuple=True)
        slot = target[batch, source]
        w = torch.ones_like(slot, dtype=torch.float32) if weight is None else weight[batch, source].float()
        order = (batch * n + slot).argsort(stable=True)
        batch, slot, source, w = batch[order], slot[order], source[order], w[order]
        _, inverse, lengths = torch.unique_consecutive(batch * n + slot, return_inverse=True, return_counts=True)
        total = segment_sum(w[:, None], lengths)[:, 0]
        kept = torch.zeros_like(valid)
        kept[batch, slot] = True
        return Reduction(kept, valid, Links(batch, slot, source, w / total[inverse]))

    @staticmethod
    def stacked(parts: Sequence[Reduction]) -> Reduction:
        """The sets of several reductions without residuals, all padded to the same ``n`` slots, one after the other."""
        links, first = [], 0
        for part in parts:
            if part.links is not None:
                links.append(replace(part.links, batch=part.links.batch + first))
            first += len(part.kept)
        names = [one.name for one in fields(Links)]
        return Reduction(
            torch.cat([part.kept for part in parts]),
            torch.cat([part.valid for part in parts]),
            Links(*(torch.cat([getattr(one, name) for one in links]) for name in names)) if links else None,
        )

    # --- reading it -------------------------------------------------------------------------------------------
    def counts(self) -> tuple[Tensor, Tensor]:
        """Number of tokens before and after, two ``[N]`` long tensors."""
        return self.valid.sum(1), self.kept.sum(1)

    @property
    def is_identity(self) -> bool:
        """Whether it drops and merges nothing."""
        return self.links is None and bool(torch.equal(self.kept, self.valid))

    def cpu(self) -> Reduction:
        """The same on the CPU, where reading it does not make the host wait for the device each time."""
        if self.kept.device.type == "cpu":
            return self
        links, residual = self.links, self.residual
        # one copy for all whole numbers, and so one wait
        whole = [self.kept.flatten().long(), self.valid.flatten().long()]
        whole += [] if residual is None else [residual.batch.flatten(), residual.slot.flatten()]
        whole += [] if links is None else [links.batch, links.slot, links.source]
        kept, valid, *held = torch.cat(whole).cpu().split([len(x) for x in whole])
        kept, valid = kept.bool().view(self.kept.shape), valid.bool().view(self.valid.shape)
        if residual is not None:
            # the values stay where they are added
            batch, slot = (held.pop(0).view(residual.slot.shape) for _ in range(2))
            residual = Residual(batch, slot, residual.values)
        if links is not None:
            batch, slot, source = held
            links = Links(batch, slot, source, links.weight.cpu())
        return Reduction(kept, valid, links, residual)

    def full_links(self) -> Links:
        """Links of every kept slot; a slot without a link gets one to itself of weight one."""
        batch, slot = self.kept.nonzero(as_tuple=True)
        if self.links is None:
            return Links(batch, slot, slot, torch.ones(len(slot), device=slot.device))
        linked = torch.zeros_like(self.kept)
        linked[self.links.batch, self.links.slot] = True
        lone = ~linked[batch, slot]
        batch, slot = batch[lone], slot[lone]
        return Links(
            torch.cat([self.links.batch, batch]),
            torch.cat([self.links.slot, slot]),
            torch.cat([self.links.source, slot]),
            torch.cat([self.links.weight.float(), torch.ones(len(slot), device=slot.device)]),
        ).sorted(self.kept.shape[1])

    def owner(self) -> Tensor:
        """``[N, n]`` long: the kept slot each token flows into with most weight (the lower on a tie); -1 if dropped."""
        n = self.kept.shape[1]
        links = self.full_links()
        source = links.batch * n + links.source
        # indexed assignment does not define which of several writes wins, so the largest weight is found first
        most = torch.full((self.kept.numel(),), -torch.inf, device=source.device)
        won = links.weight == most.scatter_reduce(0, source, links.weight, "amax")[source]
        owner = torch.full((self.kept.numel(),), n, device=source.device)
        owner = owner.scatter_reduce(0, source[won], links.slot[won], "amin").reshape(self.kept.shape)
        owner = owner.masked_fill(owner == n, -1)
        batch, slot = self.kept.nonzero(as_tuple=True)
        owner[batch, slot] = slot
        return owner

    def mass(self, size: Tensor | None = None) -> Tensor:
        """``[N, n]`` float: how many input tokens each kept slot represents, 0 for the rest.

        ``size [N, n]`` is how many original tokens each input represents (default 1). A token counts where it flows with
        most weight and a dropped token counts nowhere, so a merge that drops none sums to the number of inputs.
        """
        owner = self.owner()
        size = self.valid.float() if size is None else size.float() * self.valid
        onto = owner.clamp(min=0)
        return torch.zeros_like(size).scatter_add_(1, onto, size * (owner >= 0))

    # --- applying and combining -------------------------------------------------------------------------------
    def substitute(self, x: Tensor) -> Tensor:
        """``x [N, n, ...]`` with every kept slot holding its merged value; all slots stay in place."""
        if self._sums is None:
            return x
        source, weight, lengths, slot = (t.to(x.device, non_blocking=True) for t in self._sums)
        flat = x.reshape(x.shape[0] * self.kept.shape[1], -1)
        merged = segment_sum(flat[source].float() * weight[:, None], lengths).to(x.dtype)
        return flat.index_copy(0, slot, merged).reshape(x.shape)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """The sums of :meth:`substitute`, with the slots of all rows numbered consecutively: ``source [L]`` and ``weight [L]``
        (float32) of every term, ``lengths [K]``, the number of terms of every sum, and ``slot [K]``, where it goes."""
        if self.links is None:
            return None
        n = self.kept.shape[1]
        links = self.links.sorted(n)
        slot, lengths = torch.unique_consecutive(links.batch * n + links.slot, return_counts=True)
        return links.batch * n + links.source, links.weight.float(), lengths, slot

    def apply(self, x: Tensor) -> Tensor:
        """The kept tokens, ``[N, n, ...] -> [N, max kept, ...]`` in slot order; short rows end in zeros."""
        x, (slots, held) = self.substitute(x), leftmost(self.kept)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, slots].masked_fill(~held.view(*held.shape, *[1] * (x.dim() - 2)), 0)

    def then(self, second: Reduction) -> Reduction:
        """This reduction followed by ``second`` in the same slot coordinates; ``second.valid`` is this one's ``kept``."""
        if self.links is None and second.links is None:
            return Reduction(second.kept, self.valid)
        links = _product(self.full_links(), second.full_links(), self.kept.shape[1])
        return Reduction(second.kept, self.valid, links)

    def relabel(self, places: Tensor, rows: Tensor, shape: torch.Size | tuple[int, int]) -> Reduction:
        """The same map with slot ``s`` of unit ``u`` written as slot ``places[u, s]`` of row ``rows[u]``.

        places : ``[N, n]`` long; only the entries of valid slots are read.
        rows : ``[N]`` long; several units may share a row.
        shape : (rows, slots) of the result. Slots that no unit covers are neither valid nor kept.
        """

        def lift(mask: Tensor) -> Tensor:
            # slots outside the mask write to one extra slot at the end
            out = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bool, device=mask.device)
            at = torch.where(mask, rows[:, None] * shape[1] + places, len(out) - 1)
            return out.index_fill(0, at.flatten(), True)[:-1].view(shape[0], shape[1])

        links = None
        if self.links is not None:
            unit = self.links.batch
            slot, source = places[unit, self.links.slot], places[unit, self.links.source]
            links = Links(rows[unit], slot, source, self.links.weight).sorted(shape[1])
        residual = self.residual
        if residual is not None:
            unit, slot = residual.batch, residual.slot
            onto = places[unit, slot.clamp(min=0)].masked_fill(slot < 0, -1)
            residual = Residual(rows[unit], onto, residual.values)
        return Reduction(lift(self.kept), lift(self.valid), links, residual)

    def keeping(self, others: Tensor) -> Reduction:
        """The same map with the slots ``others`` (bool, same shape) kept as they are."""
        return Reduction(self.kept | others, self.valid | others, self.links, self.residual)


def _product(first: Links, second: Links, n: int) -> Links:
    """``second @ first`` for links in the same slot coordinates; ``first`` sorted by output."""
    keys = first.batch * n + first.slot
    wanted = second.batch * n + second.source
    start = torch.searchsorted(keys, wanted)
    reps = torch.searchsorted(keys, wanted, right=True) - start
    idx = torch.repeat_interleave(torch.arange(len(reps), device=reps.device), reps)
    offset = torch.arange(len(idx), device=reps.device) - (torch.cumsum(reps, 0) - reps)[idx]
    mid = start[idx] + offset
    weight = second.weight[idx] * first.weight[mid]
    return Links(second.batch[idx], second.slot[idx], first.source[mid], weight).sorted(n)


def top_mask(scores: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: the ``count [N]`` highest valid scores of each row; equal scores favour the lower slot.

    NaN ranks below every number, so tokens whose score is undefined are dropped first.
    """
    scores = scores.float().nan_to_num(nan=-torch.inf).masked_fill(~valid, -torch.inf)
    # padding ties with scores of -inf; with the valid slots in front the count stays exact
    order = resorted(scores.argsort(dim=1, descending=True, stable=True), (~valid).long())
    return (ranks(order) < count.to(order.device)[:, None]) & valid
