"""PiToMe: only tokens that resemble many others are merged, isolated ones are protected."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from mmaccel_kernels.copies import first_copies, of_first
from mmaccel_kernels.matching import most_alike
from torch import Tensor
from torch.nn.functional import elu, normalize

from ..errors import MmaccelError
from ..method import EncoderMethod, EncoderTokens, register
from ..method.blocks import BLOCK


@register
class PiToMe(EncoderMethod):
    """Merging by energy in every layer of the encoder, between attention and MLP.

    *Accelerating Transformers with Spectrum-Preserving Token Merging*, NeurIPS 2024, arXiv 2405.16148.

    Energy of a token: ``E_i = mean_j ELU(cos(k_i, k_j) - margin)`` over all ``j``, itself included: high where many are alike.
    To remove ``r`` tokens, the ``2 r`` of highest energy are candidates, the rest are protected. Candidates alternate by
    rank between A and B, and every token of A flows into the nearest of B. Merged tokens are means weighted by the
    patches they represent. CLS takes no part.

    Parameters
    ----------
    margin : the similarity above which tokens count as alike; None is ``0.9 (1 - l / L)`` in layer ``l`` of ``L``, which the
        program uses for CLIP of transformers and for BLIP. It uses 0.95 for its other CLIP, and 0.75 for DeiT and MAE.
    matching : ``energy``; or ``bsm``: all tokens, in the order of their energy, alternate between A and B, and the ``r``
        most similar pairs are merged, as in ToMe; the program uses it in the first half of its layers (DeiT). Or ``text``,
        which it uses for text encoders: energy is a Gaussian around a cosine of one, and the ``r`` candidates of higher
        energy flow into the ``r`` of lower energy.

    Paper and program: the paper keeps a share of the tokens in every layer; so does :meth:`schedule`, with the share
    that meets the budget. The paper weights attention by sizes, as here; the program does not. The program's sorts
    are not stable; here the lower slot comes first on a tie.
    """

    name = "pitome"
    summary = "tokens that have many like them merged inside the vision tower"
    paper = "arXiv 2405.16148"
    conserves_mass = True

    margin: float | None = None
    matching: Literal["energy", "bsm", "text"] = "energy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matching == "text" and self.margin is not None and self.margin >= 1:
            raise MmaccelError(f"`margin` of pitome must be less than 1 with matching='text', got {self.margin}.")

    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """The same share of the tokens left in each layer; whole numbers that sum to ``tokens - kept``."""
        if kept > tokens or kept < 1 or layers < 1 or tokens > kept * 2**layers:
            raise MmaccelError(
                f"pitome cannot leave {kept} of {tokens} tokens in {layers} layers, each of which halves them at most; "
                "give a larger budget."
            )
        out, left = [], tokens
        for layer in range(1, layers + 1):
            # rounded first, so that every machine truncates alike
            wanted = math.floor(round(tokens * (kept / tokens) ** (layer / layers), 6))
            # at most half go, and no more stay than the later layers can still halve away
            after = min(max(wanted, left - left // 2, kept), left, kept * 2 ** (layers - layer))
            out.append(left - after)
            left = after
        return out

    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        keys, first = tokens.keys, tokens.protected
        margin = 0.9 * (1.0 - tokens.depth) if self.margin is None else self.margin
        target = torch.arange(keys.shape[1], device=keys.device).repeat(len(keys), 1)
        remove = min(remove, (keys.shape[1] - first) // 2)
        if remove <= 0:
            return target
        values = (text_energy if self.matching == "text" else energy)(keys[:, first:], margin)
        ranked = values.argsort(dim=1, descending=True, stable=True) + first
        if self.matching == "text":
            a, b = ranked[:, :remove], ranked[:, remove : 2 * remove]
        else:
            ranked = ranked if self.matching == "bsm" else ranked[:, : 2 * remove]
            a, b = ranked[:, 0::2], ranked[:, 1::2]
        x = normalize(keys.float(), dim=-1)
        best, partner = most_alike(x, a, b, first=first_copies(x))
        giver = best.argsort(dim=1, descending=True, stable=True)[:, :remove]
        return target.scatter(1, a.gather(1, giver), b.gather(1, partner.gather(1, giver)))


def energy(metric: Tensor, margin: float) -> Tensor:
    """``[N, T]``: the mean over all tokens of ``ELU(cos - margin)`` for ``metric [N, T, d]``, in blocks of rows."""
    return _mean_of_similarity(metric, lambda s: elu(s - margin))


def text_energy(metric: Tensor, margin: float) -> Tensor:
    """The energy of the text variant: a Gaussian of width ``1 - margin`` around a cosine of one."""
    sigma = 1.0 - margin
    bell = sigma * math.sqrt(2.0 * math.pi)
    return _mean_of_similarity(metric, lambda s: (-(((1.0 - s) / sigma) ** 2) / 2.0).exp() / bell)


def _mean_of_similarity(metric: Tensor, what: Callable[[Tensor], Tensor]) -> Tensor:
    x = normalize(metric.float(), dim=-1)
    height = max(1, BLOCK // max(1, x.shape[0] * x.shape[1]))
    rows = [what(x[:, top : top + height] @ x.transpose(1, 2)).mean(2) for top in range(0, x.shape[1], height)]
    return of_first(torch.cat(rows, 1), first_copies(x)) if rows else x.new_zeros(x.shape[:2])
