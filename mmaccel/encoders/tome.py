"""ToMe: the most similar pairs of tokens are merged, layer by layer, inside the vision tower."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from mmaccel_kernels.copies import first_copies
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import MmaccelError
from ..method import EncoderMethod, EncoderTokens
from ..method.registry import register


@register
@dataclass(frozen=True)
class ToMe(EncoderMethod):
    """Bipartite soft matching in every layer of the encoder, between attention and MLP.

    *Token Merging: Your ViT But Faster*, ICLR 2023, arXiv 2210.09461.

    Tokens alternate between a set A (even places) and a set B (odd places). Every token of A is matched with the token of
    B whose key (mean over heads) is nearest by cosine; the ``r`` most similar pairs are merged, several of them possibly
    into the same token of B. Merged tokens are means weighted by the patches they stand for, and the logarithm of that
    number is added to attention logits (:attr:`EncoderMethod.proportional`). CLS is never merged.

    Parameters
    ----------
    pace : ``constant`` removes equally many in every layer; ``decreasing`` many at first and none at the end, falling
        linearly. The paper has both; constant is its default.

    Paper and program: the program is given ``r``, and the number of tokens left follows; here that number is met exactly
    (:meth:`schedule`). Without a CLS token it sorts the tokens of A that stay by similarity; here every token keeps its
    slot. Its sort is not stable; here the lower slot comes first on a tie.
    """

    name = "tome"
    summary = "similar tokens merged inside the vision tower"
    paper = "arXiv 2210.09461"
    conserves_mass: ClassVar[bool] = True

    pace: Literal["constant", "decreasing"] = "constant"

    def __post_init__(self) -> None:
        if self.pace not in ("constant", "decreasing"):
            raise MmaccelError(f"tome knows pace 'constant' and 'decreasing', not {self.pace!r}.")

    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """How many to remove in each layer, ``tokens - kept`` in all; ``tokens`` without the protected ones.

        A layer removes at most half of its tokens. Where that is less than its share, the layers before it remove more.
        """
        removed = tokens - kept
        # shares on a straight line, in whole numbers, so that every machine rounds alike
        share = [1] * layers if self.pace == "constant" else [max(1, layers - 1) - i for i in range(layers)]
        if layers == 1:
            share = [1]

        def spread(total: int) -> list[int]:
            out, left, done = [], tokens, 0
            for i in range(layers):
                upto = total * sum(share[: i + 1]) // sum(share)
                out.append(min(upto - done, left // 2))
                left, done = left - out[-1], upto
            return out

        most = 2 * tokens * max(1, sum(share))
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
        """``keys [N, T, d]`` -> ``[N, T]``, the slot each token flows into."""
        return bipartite_soft_matching(tokens.keys, remove, tokens.protected)


def bipartite_soft_matching(metric: Tensor, remove: int, protected: int = 0) -> Tensor:
    """The slot each token flows into, ``[N, T]`` long; ``remove`` of them flow into another one.

    Parameters
    ----------
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
