"""Reductions: which visual tokens stay, and how the others flow into them.

A :class:`Reduction` is data: a sparse linear map on a padded batch of token sets. It is written in *slot coordinates*:
inputs and outputs are both addressed by the slot (index along the token axis) they have in the input, so that a merged
token takes the slot, the grid cell and the position of the kept token it replaces. That makes applying, composing and
drawing independent of how many tokens survived so far.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        """The same links ordered by output, then by source, with equal pairs summed: one form per map."""
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


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive runs, ``[L, D] -> [len(lengths), D]``; a fixed order of additions, no atomics."""
    if values.shape[0] == 0:
        return values.new_zeros(len(lengths), values.shape[1])
    return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)


@dataclass(frozen=True)
class Reduction:
    """A map from the tokens that were to the tokens that stay, for ``N`` ragged sets padded to ``n`` slots.

    Parameters
    ----------
    kept : ``[N, n]`` bool, the slots that stay. They come out in ascending order.
    valid : ``[N, n]`` bool, the slots that hold a token at all.
    links : how outputs are made of inputs. ``None`` means pure pruning: every kept token is itself.
        A kept slot without a link keeps its own value.
    """

    kept: Tensor
    valid: Tensor
    links: Links | None = None

    # --- ways to make one -------------------------------------------------------------------------------------
    @staticmethod
    def identity(valid: Tensor) -> Reduction:
        """Everything stays. ``valid [N, n]`` bool."""
        return Reduction(valid, valid)

    @staticmethod
    def top(scores: Tensor, valid: Tensor, count: Tensor) -> Reduction:
        """Keep the ``count[N]`` highest of ``scores [N, n]``; equal scores go to the lower slot."""
        return Reduction(top_mask(scores, valid, count), valid)

    @staticmethod
    def merge(target: Tensor, valid: Tensor, weight: Tensor | None = None) -> Reduction:
        """Average every token into one kept token.

        Parameters
        ----------
        target : ``[N, n]`` long, the slot each token flows into; a slot with ``target == itself`` stays; -1 drops.
        valid : ``[N, n]`` bool.
        weight : ``[N, n]`` float, how much each token stands for (default 1). Outputs are weighted means.
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

    # --- what it says -----------------------------------------------------------------------------------------
    def counts(self) -> tuple[Tensor, Tensor]:
        """Tokens before and after, two ``[N]`` long tensors."""
        return self.valid.sum(1), self.kept.sum(1)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is dropped and nothing merged."""
        return self.links is None and bool(torch.equal(self.kept, self.valid))

    def cpu(self) -> Reduction:
        """The same on the CPU, where what it says can be asked without waiting for a device each time."""
        if self.kept.device.type == "cpu":
            return self
        links = self.links
        # one copy of all that is whole
        whole = [self.kept.flatten().long(), self.valid.flatten().long()]
        whole += [] if links is None else [links.batch, links.slot, links.source]
        kept, valid, *held = torch.cat(whole).cpu().split([len(x) for x in whole])
        kept, valid = kept.bool().view(self.kept.shape), valid.bool().view(self.valid.shape)
        if links is None:
            return Reduction(kept, valid)
        batch, slot, source = held
        return Reduction(kept, valid, Links(batch, slot, source, links.weight.cpu()))

    def full_links(self) -> Links:
        """The links of every kept slot, those that are only themselves included."""
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
        # indexed assignment leaves open which of several writers wins, so the largest weight is sought first
        most = torch.full((self.kept.numel(),), -torch.inf, device=source.device)
        won = links.weight == most.scatter_reduce(0, source, links.weight, "amax")[source]
        owner = torch.full((self.kept.numel(),), n, device=source.device)
        owner = owner.scatter_reduce(0, source[won], links.slot[won], "amin").reshape(self.kept.shape)
        owner = owner.masked_fill(owner == n, -1)
        batch, slot = self.kept.nonzero(as_tuple=True)
        owner[batch, slot] = slot
        return owner

    def mass(self, size: Tensor | None = None) -> Tensor:
        """``[N, n]`` float: for how many input tokens each kept slot stands, 0 for the rest.

        ``size [N, n]`` says how many original tokens an input already stood for (default 1). A token counts where
        it flows with most weight; a dropped token counts nowhere, so a merge that loses none sums to the inputs.
        """
        owner = self.owner()
        size = self.valid.float() if size is None else size.float() * self.valid
        onto = owner.clamp(min=0)
        return torch.zeros_like(size).scatter_add_(1, onto, size * (owner >= 0))

    # --- what it does -----------------------------------------------------------------------------------------
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
        """What :meth:`substitute` adds up, all slots of all rows counted through: of every term the slot ``source [L]`` and its
        ``weight [L]`` float32, of every sum its number of terms ``lengths [K]`` and the ``slot [K]`` it stands in."""
        if self.links is None:
            return None
        n = self.kept.shape[1]
        links = self.links.sorted(n)
        slot, lengths = torch.unique_consecutive(links.batch * n + links.slot, return_counts=True)
        return links.batch * n + links.source, links.weight.float(), lengths, slot

    def apply(self, x: Tensor) -> Tensor:
        """The tokens that stay, ``[N, n, ...] -> [N, max kept, ...]`` in slot order; short rows end in zeros."""
        return compact(self.substitute(x), self.kept)

    def then(self, second: Reduction) -> Reduction:
        """This reduction followed by ``second``, whose slots are the same and whose ``valid`` is this one's ``kept``."""
        if self.links is None and second.links is None:
            return Reduction(second.kept, self.valid)
        links = _product(self.full_links(), second.full_links(), self.kept.shape[1])
        return Reduction(second.kept, self.valid, links)

    def compose(self, second: Reduction) -> Reduction:
        """This reduction followed by ``second``, whose slots are the *compact* slots of this one's output."""
        slots = torch.arange(self.kept.shape[1], device=self.kept.device).expand_as(self.kept)
        rows = torch.arange(len(self.kept), device=self.kept.device)
        return self.then(second.relabel(compact(slots, self.kept), rows, self.kept.shape))

    def relabel(self, places: Tensor, rows: Tensor, shape: torch.Size | tuple[int, int]) -> Reduction:
        """The same map with slot ``s`` of unit ``u`` written as slot ``places[u, s]`` of row ``rows[u]``.

        Parameters
        ----------
        places : ``[N, n]`` long; only the entries of valid slots are read.
        rows : ``[N]`` long; several units may share a row.
        shape : (rows, slots) of the result. Slots that no unit covers are neither valid nor kept.
        """

        def lift(mask: Tensor) -> Tensor:
            # what is not in the mask is written behind the end
            out = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.bool, device=mask.device)
            at = torch.where(mask, rows[:, None] * shape[1] + places, len(out) - 1)
            return out.index_fill(0, at.flatten(), True)[:-1].view(shape[0], shape[1])

        links = None
        if self.links is not None:
            unit = self.links.batch
            links = Links(
                rows[unit], places[unit, self.links.slot], places[unit, self.links.source], self.links.weight
            ).sorted(shape[1])
        return Reduction(lift(self.kept), lift(self.valid), links)

    def beside(self, others: Tensor) -> Reduction:
        """The same map with further slots ``others`` (bool, same shape) passing through unchanged."""
        return Reduction(self.kept | others, self.valid | others, self.links)


def _product(first: Links, second: Links, n: int) -> Links:
    """``second @ first`` for links in the same slot coordinates; ``first`` sorted by output."""
    keys = first.batch * n + first.slot
    wanted = second.batch * n + second.source
    start = torch.searchsorted(keys, wanted)
    reps = torch.searchsorted(keys, wanted, right=True) - start
    idx = torch.repeat_interleave(torch.arange(len(reps), device=reps.device), reps)
    offset = torch.arange(len(idx), device=reps.device) - (torch.cumsum(reps, 0) - reps)[idx]
    mid = start[idx] + offset
    return Links(second.batch[idx], second.slot[idx], first.source[mid], second.weight[idx] * first.weight[mid]).sorted(
        n
    )


def compact(x: Tensor, kept: Tensor) -> Tensor:
    """Move the kept slots of ``x [N, n, ...]`` to the front: ``[N, max kept, ...]``, zeros behind short rows."""
    slots, held = leftmost(kept)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, slots].masked_fill(~held.view(*held.shape, *[1] * (x.dim() - 2)), 0)


def top_mask(scores: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool with the ``count[N]`` highest valid scores; a stable sort, so equal scores favour the lower slot.

    NaN ranks below every number, so a token whose score is undefined goes first.
    """
    scores = scores.float().nan_to_num(nan=-torch.inf).masked_fill(~valid, -torch.inf)
    # padded slots tie with -inf scores; putting the valid ones first keeps the count exact
    order = resorted(scores.argsort(dim=1, descending=True, stable=True), (~valid).long())
    return (ranks(order) < count.to(order.device)[:, None]) & valid
