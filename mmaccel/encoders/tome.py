"""ToMe: the most similar pairs of tokens are merged, layer by layer, inside the vision tower."""

from bisect import bisect_left
from fractions import Fraction
from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import MmaccelError
from ..method import EncoderMethod, EncoderTokens, register


@register
class ToMe(EncoderMethod):
    """Bipartite soft matching in every layer of the encoder, between attention and MLP.

    *Token Merging: Your ViT But Faster*, ICLR 2023, arXiv 2210.09461.

    Tokens alternate between a set A (even places) and a set B (odd places). Every token of A is matched with the token of
    B whose key (mean over heads) is nearest by cosine; the ``r`` most similar pairs are merged, several of them possibly
    into the same token of B. Merged tokens are means weighted by the patches they represent, and the logarithm of that
    number is added to attention logits (:attr:`EncoderMethod.proportional`). CLS is never merged.

    ``variant="official"``: the program's schedule, for the mean over layers that the budget asks for, rounded down; its numbers
    are truncated layer by layer, and what is left in the tower follows from that.

    Parameters
    ----------
    pace : ``constant`` removes equally many in every layer; ``decreasing`` many at first and none at the end, falling
        linearly. The paper has both; constant is its default. A number is the program's inflection, -1 (decreasing) to 1
        (increasing); several are the proportions of the layers, zero for those behind the last.
    coarse : merge in a single layer, halfway: every ``k``-th token is of B, and all others flow into the nearest of these
        (the program's coarse matching, with the ``k`` that leaves as many as asked).

    Paper and program: the program is given ``r``, and the number of tokens left follows; here that number is met exactly
    (:meth:`schedule`). Without a CLS token it sorts the tokens of A that stay by similarity; here every token keeps its
    slot. Its sort is not stable; here the lower slot comes first on a tie.
    """

    name = "tome"
    summary = "similar tokens merged inside the vision tower"
    paper = "arXiv 2210.09461"
    conserves_mass = True

    pace: Literal["constant", "decreasing"] | float | tuple[float, ...] = "constant"
    coarse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.pace in ("constant", "decreasing")
        if isinstance(self.pace, tuple):
            known = min(self.pace, default=-1) >= 0 and sum(self.pace) > 0
        elif not isinstance(self.pace, str):
            known = -1 <= self.pace <= 1
        if not known:
            raise MmaccelError(
                "tome knows pace 'constant', 'decreasing', a number from -1 to 1 or a proportion for each layer, not "
                f"{self.pace!r}."
            )

    def _shares(self, layers: int) -> list[Fraction]:
        """What each layer removes, in proportion."""
        if isinstance(self.pace, tuple):
            listed = [Fraction(str(share)) for share in self.pace[:layers]]
            return listed + [Fraction(0)] * (layers - len(listed))
        slope = Fraction(str({"constant": 0, "decreasing": -1}.get(str(self.pace), self.pace)))
        # on a straight line, in whole numbers, so that every machine rounds alike
        last = max(1, layers - 1)
        share = [(1 - slope) * (last - i) + (1 + slope) * i for i in range(layers)]
        return share if layers > 1 else [Fraction(1)]

    def _official(self, removed: int, tokens: int, layers: int) -> list[int]:
        """The program's numbers for a layer."""
        each = removed // max(1, layers)
        slope = {"constant": 0.0, "decreasing": -1.0}.get(str(self.pace), self.pace)
        assert isinstance(slope, float)
        first = int(each * (1 - slope))
        step = (2 * (each - first)) / max(1, layers - 1)
        out, left = [], tokens
        for i in range(layers):
            out.append(min(int(first + step * i), left // 2))
            left -= out[-1]
        return out

    def fewest(self, tokens: int, layers: int) -> int:
        """One where a single layer merges all; else each layer halves them."""
        return 1 if self.coarse else super().fewest(tokens, layers)

    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """Number of tokens to remove in each layer, ``tokens - kept`` in all; ``tokens`` without the protected ones.

        A layer removes at most half of its tokens. Where that is less than its share, the layers before it remove more.
        """
        removed = tokens - kept
        if self.coarse and layers and 1 <= kept <= tokens:
            return [removed if i == layers // 2 else 0 for i in range(layers)]
        if self.official and removed >= 0 and not isinstance(self.pace, tuple):
            return self._official(removed, tokens, layers)
        share = self._shares(layers)

        def spread(total: int) -> list[int]:
            out, left, done = [], tokens, 0
            for i in range(layers):
                upto = int(total * sum(share[: i + 1]) // sum(share))
                out.append(min(upto - done, left // 2))
                left, done = left - out[-1], upto
            return out

        most = 2 * tokens * max(1, int(sum(share) / min(s for s in share if s)) + 1)
        if removed < 0 or layers < 1 or sum(spread(most)) < removed:
            raise MmaccelError(
                f"tome cannot leave {kept} of {tokens} tokens in {layers} layers, each of which halves them at most; "
                "give a larger budget."
            )
        # the smallest total whose shares, each at most half of the layer's tokens, remove enough
        out = spread(bisect_left(range(most + 1), True, lo=removed, key=lambda total: sum(spread(total)) >= removed))
        excess = sum(out) - removed
        for i in reversed(range(layers)):
            cut = min(excess, out[i])
            out[i], excess = out[i] - cut, excess - cut
        return out

    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        if self.coarse:
            return coarse_matching(tokens.keys, remove, tokens.protected)
        return bipartite_soft_matching(tokens.keys, remove, tokens.protected)


def bipartite_soft_matching(metric: Tensor, remove: int, protected: int = 0) -> Tensor:
    """The slot each token flows into, ``[N, T]`` long; ``remove`` of them flow into another one.

    metric : ``[N, T, d]``, the vectors whose cosines are compared.
    remove : cut to half of the unprotected tokens, as in the paper.
    protected : number of leading tokens (class, distillation, registers) that take no part.
    """
    rows, tokens = metric.shape[:2]
    target = torch.arange(tokens, device=metric.device).repeat(rows, 1)
    remove = min(remove, (tokens - protected) // 2)
    if remove <= 0:
        return target
    x = normalize(metric.float(), dim=-1)
    # of the first p places, ceil(p / 2) are even and floor(p / 2) odd
    receives = torch.arange(tokens // 2, device=x.device).expand(rows, -1) >= protected // 2
    best, partner = most_alike(x, target[:, 0::2], target[:, 1::2], receives, first=first_copies(x))
    best[:, : (protected + 1) // 2] = -torch.inf
    giver = best.argsort(dim=1, descending=True, stable=True)[:, :remove]
    return target.scatter(1, 2 * giver, 2 * partner.gather(1, giver) + 1)


def coarse_matching(metric: Tensor, remove: int, protected: int = 0) -> Tensor:
    """The slot each token flows into, ``[N, T]`` long: those at every ``k``-th place receive all others, with the largest ``k``
    that has enough of them; the parameters are those of :func:`bipartite_soft_matching`."""
    rows, tokens = metric.shape[:2]
    target = torch.arange(tokens, device=metric.device).repeat(rows, 1)
    free = tokens - protected
    left = max(1, free - remove)
    if remove <= 0 or free < 2:
        return target
    step = free // left
    receives = torch.zeros(tokens, dtype=torch.bool, device=metric.device)
    receives[protected + step - 1 :: step][:left] = True
    gives = ~receives
    gives[:protected] = False
    x = normalize(metric.float(), dim=-1)
    _, partner = most_alike(x, target[:, gives], target[:, receives], first=first_copies(x))
    return target.scatter(1, target[:, gives], target[:, receives].gather(1, partner))
