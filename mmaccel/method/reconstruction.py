"""Tokens as linear combinations of a few others: those that are reconstructed worst stay, the others merge into them (ApET)."""

from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor

from ..core.reduction import Links, Reduction
from .blocks import nearest_kept
from .tokens import TokenBatch

#: what becomes of the kept tokens of smallest error: nothing, the basis in their place, or the mean with it
BasisSlots = Literal["none", "overwrite", "mix"]
#: slot, source and weight of links, ``[L]`` each
Flat = tuple[Tensor, Tensor, Tensor]


def merged_by_error(
    tokens: TokenBatch, count: Tensor, basis: int, ridge: float, start: int, slots: BasisSlots, by_rank: bool
) -> Reduction:
    """Keep ``count [N]`` tokens of largest error and merge the others; see :class:`mmaccel.merging.apet.ApETMerge`.

    Tokens without a cell (newlines) are dropped first. ``by_rank``: the basis replaces tokens in the order of their errors,
    else in raster order.
    """
    valid = tokens.valid
    here = torch.where(tokens.celled.any(1, keepdim=True), tokens.celled, valid)
    kept, parts = torch.zeros_like(valid), []
    for row, wanted in enumerate(count.tolist()):
        at, others = here[row].nonzero()[:, 0], (valid & ~here)[row].nonzero()[:, 0]
        if wanted >= len(at):
            kept[row, at] = True
            kept[row, others[: wanted - len(at)]] = True
        elif wanted:
            flat = _links(tokens.features[row, at].float(), wanted, basis, ridge, start, slots, by_rank)
            slot, source = at[flat[0]], at[flat[1]]
            kept[row, slot] = True
            parts.append((torch.full_like(slot, row), slot, source, flat[2]))
    if not parts:
        return Reduction(kept, valid)
    return Reduction(kept, valid, Links(*(torch.cat(part) for part in zip(*parts, strict=True))).sorted(valid.shape[1]))


def _links(x: Tensor, count: int, basis: int, ridge: float, start: int, slots: BasisSlots, by_rank: bool) -> Flat:
    """Links of the tokens ``x [n, D]``, of which ``count`` stay."""
    chosen = farthest_points(x, min(basis, len(x)), min(start, len(x) - 1))
    best = errors(x, chosen, ridge).argsort(descending=True, stable=True)[:count]
    # one pick is left to merge into
    replaced = best.new_zeros(0) if slots == "none" else best[max(1, count - len(chosen)) :]
    picks = best[: count - len(replaced)]
    target = torch.zeros(1, len(x), dtype=torch.bool, device=x.device)
    target[0, picks] = True
    into = nearest_kept(x[None], target)[0]
    stays = target[0].clone()
    stays[replaced] = True
    source = torch.cat([picks, (~stays).nonzero()[:, 0]])
    slot = torch.where(target[0, source], source, into[source])
    weight = 1.0 / torch.bincount(slot, minlength=len(x))[slot].float()
    if not len(replaced):
        return slot, source, weight
    onto = replaced if by_rank else replaced.sort().values
    share = 1.0 if slots == "overwrite" else 0.5
    new = [(onto, chosen[: len(onto)], share)] + ([(onto, onto, 0.5)] if slots == "mix" else [])
    return (
        torch.cat([slot, *(one[0] for one in new)]),
        torch.cat([source, *(one[1] for one in new)]),
        torch.cat([weight, *(weight.new_full(onto.shape, one[2]) for one in new)]),
    )


def farthest_points(x: Tensor, count: int, start: int) -> Tensor:
    """``[count]`` long: tokens of ``x [n, D]``, each farthest from all before it; the lower slot on a tie."""
    away, chosen = torch.full_like(x[:, 0], torch.inf), [torch.tensor(start, device=x.device)]
    for _ in range(count - 1):
        away = torch.minimum(away, (x - x[chosen[-1]]).square().sum(-1))
        chosen.append(away.argmax())
    return torch.stack(chosen)


def errors(x: Tensor, basis: Tensor, ridge: float) -> Tensor:
    """``[n]`` float64: distance of every token of ``x [n, D]`` to its regularised combination of the tokens ``basis [M]``."""
    first, x = first_copies(x[None]), x.double()
    b = x[basis]
    weights = torch.linalg.solve(b @ b.T + ridge * torch.eye(len(b), dtype=b.dtype, device=b.device), b @ x.T)
    return of_first((x - weights.T @ b).norm(dim=-1)[None], first)[0]
