"""PruneSID: tokens are grouped by principal components, and in every group copies make room."""

from dataclasses import replace
from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, pairs_of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import group_sizes, rank_in_groups
from ..core.reduction import Reduction
from ..method import AttentionGuided, Grid, ModelFacts, Tap, TokenBatch, register
from ..method.tokens import by_row
from ._shared import filled, on_grid


@register
class PruneSID(AttentionGuided):
    """Groups by principal component, non-maximum suppression within them, budgets by what survives.

    *PruneSID: Prune Redundancy, Preserve Essence: Vision Token Compression via Synergistic Importance-Diversity*, ICLR 2026.

    With ``K`` the budget, ``q = int(K / 4)`` right singular vectors of the sigmoid of the tokens, of which every token's mean
    over channels is taken off, are the groups: a token is in the one where its absolute entry is largest. In a group the token
    of highest score survives, those more alike to it than a threshold do not, and so on. Each group keeps one token, and of
    the rest its share of all survivors, at most ``5 ceil(K / 64)``, or more where that does not spend the budget; survivors
    come first, by score.

    By ``attention`` tokens are features of the tower, and the threshold is ``K / 32`` times their mean cosine. By
    ``component`` tokens are what the language model would read, the score is the entry in the group's vector, and the
    threshold ``max(18 K / n, 1)`` times the sum of the cosines of all pairs, the token itself included, by ``n^2``.

    ``variant="official"``: by ``attention`` ``K`` counts the CLS token, which the program keeps too; pictures of up to 16
    tokens stay whole by ``component``, and a ratio is rounded half to even.

    Parameters
    ----------
    score : ``attention``, as for LLaVA; ``component``, as for Qwen; ``auto``, attention where the tower has a CLS token
        or ``query`` is given.
    query, layer : whose attention counts, see :class:`AttentionGuided`.

    Paper and program: the program finds the vectors by a random routine, here they are exact. It leaves tokens group by group,
    which stay in order here. The budget of a picture by how alike its tokens are, of which the paper speaks, is not in the
    program. Newline tokens are dropped first, and stitched tiles are pruned one by one.
    """

    name = "prunesid"
    summary = "tokens of every principal component, without copies"
    paper = "ICLR 2026"
    official_rounding = "half even"

    score: Literal["auto", "attention", "component"] = "auto"

    def fit(self, family: ModelFacts) -> AttentionGuided:
        paid = family.has_cls or self.query != "auto"
        score = ("attention" if paid else "component") if self.score == "auto" else self.score
        return replace(super().fit(family), score=score)  # type: ignore[call-arg]

    def taps(self) -> tuple[Tap, ...]:
        return () if self.score == "component" else (*super().taps(), Tap("features"))

    def check(self, family: ModelFacts) -> None:
        if self.score != "component":
            super().check(family)

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """Rounded half to even; by component small pictures stay whole."""
        return size if self.score == "component" and size <= 16 else super().official_count(retain, size, grid)

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Features ``[N, n, d]``, by attention that too, ``count [N]`` -> the tokens that the groups keep."""
        count, seen, attention = count.to(tokens.valid.device), on_grid(tokens), None
        x = tokens.features
        if self.score != "component":
            attention, scored = self.attention(tokens)
            x, seen = tokens.signals["features"][:, 0], seen & scored
        kept = torch.zeros_like(seen)
        for row, wanted in enumerate(torch.minimum(count, seen.sum(1)).tolist()):
            at = seen[row].nonzero()[:, 0]
            if wanted:
                kept[row, at] = self.picks(x[row, at], None if attention is None else attention[row, at], wanted)
        return Reduction(filled(kept, tokens.valid, count), tokens.valid)

    def picks(self, features: Tensor, attention: Tensor | None, count: int) -> Tensor:
        """``[n]`` bool: ``count`` tokens of ``features [n, D]``, by ``attention [n]`` or else by component."""
        x, size, device = features.float(), len(features), features.device
        whole = count + int(self.official and attention is not None)
        if count == size:
            return torch.ones(size, dtype=torch.bool, device=device)
        first = first_copies(x[None])
        groups = max(1 if attention is not None else min(4, count), whole // 4)
        strength = _components(x, groups)
        strength = strength if first is None else strength[first[0]]
        group = strength.argmax(1)
        unit = normalize(x, dim=-1)
        like = pairs_of_first((unit @ unit.T)[None], first, 1.0)[0]
        pairs = like.triu(1).double().sum()
        if attention is not None:
            score, bar = attention, whole / 32 * pairs / max(1, size * (size - 1) / 2)
        else:
            score = strength.gather(1, group[:, None])[:, 0]
            bar = max(18 * count / size, 1.0) * (pairs + like.diagonal().double().sum()) / size**2
        survives = _survivors(score, (like > bar.float()) & (group[:, None] == group))
        group, groups = group[None], strength.shape[1]
        rank = rank_in_groups(group, groups, score[None])
        rank = rank_in_groups(group, groups, (survives[None] * (size + 1) - rank).float())[0]
        sizes, lone = group_sizes(group, groups)[0], group_sizes(group.masked_fill(~survives, -1), groups)[0]
        return rank < _quotas(sizes.tolist(), lone.tolist(), count, whole).to(device)[group[0]]


def _components(x: Tensor, count: int) -> Tensor:
    """``[n, q]``: absolute entries of at most ``count`` right singular vectors of the tokens ``x [n, D]``."""
    y = x.double().sigmoid()
    y = y - y.mean(1, keepdim=True)
    count = min(count, *y.shape)
    if y.shape[0] <= y.shape[1]:
        return torch.linalg.eigh(y @ y.T)[1].flip(1)[:, :count].abs()
    values, vectors = torch.linalg.eigh(y.T @ y)
    # vectors of no length, of tokens that are all alike, stand for no group
    length = values.flip(0)[:count].clamp(min=1e-18 * max(1.0, float(values[-1]))).sqrt()
    return (y @ vectors.flip(1)[:, :count]).abs() / length


def _survivors(score: Tensor, near: Tensor) -> Tensor:
    """``[n]`` bool: the tokens that no better survivor is ``near [n, n]``, by ``score [n]``, the lower slot first."""
    order = score.argsort(descending=True, stable=True).tolist()
    near, gone, device = near.cpu(), torch.zeros(len(order), dtype=torch.bool), near.device
    survives = torch.zeros_like(gone)
    for slot in order:
        if not gone[slot]:
            survives[slot] = True
            gone |= near[slot]
    return survives.to(device)


def _quotas(sizes: list[int], survivors: list[int], count: int, whole: int) -> Tensor:
    """``[q]`` long: how many tokens each group keeps, ``count`` together."""
    low = [min(1, size) for size in sizes]
    most = [min(5 * -(-whole // 64), size, lone) for size, lone in zip(sizes, survivors, strict=True)]
    while sum(most) < whole and most != sizes:
        most = [min(one + 1, size) for one, size in zip(most, sizes, strict=True)]
    share = torch.tensor(survivors, dtype=torch.float32)
    ends = ((share / share.sum()).cumsum(0) * max(0, count - sum(low))).round().long()
    given = torch.minimum(ends.diff(prepend=ends.new_zeros(1)) + torch.tensor(low), torch.tensor(most))
    for group in torch.tensor(survivors).argsort(descending=True, stable=True).tolist():
        given[group] += min(count - int(given.sum()), most[group] - int(given[group]))
    return given
