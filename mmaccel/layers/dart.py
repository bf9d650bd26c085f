"""DART: after a few layers keep the visual tokens that are least like a few pivots."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import resorted
from ..core.reduction import Reduction, top_mask
from ..method import Grid, LayerAttention, LayerMethod, TokenBatch, register


@register
class DART(LayerMethod):
    """Duplication instead of importance: pivots stay, and with each the tokens that resemble it least.

    *Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More*, EMNLP 2025,
    arXiv 2502.11494.

    Pivots are the ``image_pivots`` visual tokens and the ``text_pivots`` tokens of the question whose keys in layer
    ``layer - 1`` have the largest norm over all heads. Pivot by pivot, the ``P`` visual tokens with the smallest cosine to
    it, of those that are left, stay; hidden states are compared behind the last norm of the model. Visual pivots stay too,
    those of the text only look. Positions are original. No attention map is needed.

    The budget is met: the first pivots have one token more if it does not come out even. The pivots of the text are those of
    the question behind the last picture, and every picture has its own visual ones. The norm of a key is the sum of the
    lengths of the pairs of channels that RoPE turns together, so that it does not depend on the position.

    ``variant="official"``: the norm is the sum of absolute values behind RoPE, with which padding in front of a prompt
    changes what is a pivot, and ``P`` is rounded down.

    Parameters
    ----------
    layer : the input of this layer; 2 as in the paper.
    image_pivots, text_pivots : 4 and 4 as in the program.

    Paper and program: the program serves pivots in the order in which Python's set of integers holds them; here visual pivots
    come first, each kind by descending norm. It rounds ``P`` down: with 4 and 4 pivots and a ratio ``r`` of ``n`` tokens
    ``4 + 8 int(r n / 8)`` stay (``official_count``), some more than asked.
    """

    name = "dart"
    summary = "tokens that are least like a few pivots, from layer 2 on"
    paper = "arXiv 2502.11494"
    default_retain = 0.222
    needs_question = True
    last_norm = True
    limits = {"image_pivots": "[1, inf)", "text_pivots": "[0, inf)"}

    layer: float = 2
    image_pivots: int = 4
    text_pivots: int = 4

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program's pivots and the same whole number of tokens for each."""
        pivots = self.image_pivots + self.text_pivots
        return min(size, self.image_pivots + pivots * int(retain * size / pivots))

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``key_norm [B, K]``: the norm of every key over all heads."""
        key = attention.key.float()
        if self.official:
            return {"key_norm": key.abs().sum((1, 3))}
        # channel i turns with channel i + D / 2
        return {"key_norm": torch.hypot(*key.chunk(2, -1)).sum((1, 3))}

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``question [N, q, D]``, ``key_norm`` of both, ``count [N]`` -> pivots and what is unlike."""
        valid, count = tokens.valid, count.to(tokens.valid.device)
        slots, mine = self.pivots(tokens.signals["key_norm"], valid, count)
        # pivots of the text are numbered behind the slots
        served, turn = self.serve(slots, mine, tokens)
        x = normalize(tokens.features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
        both = x if tokens.question is None else torch.cat([x, normalize(tokens.question.float(), dim=-1)], 1)
        row = torch.arange(len(x), device=x.device)[:, None]
        cosine = torch.bmm(both[row, served], x.mT)
        kept = torch.zeros_like(valid).scatter_(1, slots, mine)
        left, rank, pivots = (count - kept.sum(1))[:, None], turn.cumsum(1) - 1, turn.sum(1, keepdim=True).clamp(min=1)
        share = (left // pivots + (rank < left % pivots)).masked_fill(~turn, 0)
        first = first_copies(x, valid)
        for like, some in zip(cosine.unbind(1), share.unbind(1), strict=True):
            kept = kept | top_mask(-of_first(like, first), valid & ~kept, some)
        return Reduction(kept, valid)

    def pivots(self, norm: Tensor, valid: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, p]`` long and bool: the visual pivots by descending ``norm [N, n]``, at most ``count [N]``."""
        slots, held = _largest(norm, valid, self.image_pivots)
        return slots, held & (torch.arange(slots.shape[1], device=slots.device) < count[:, None])

    def serve(self, slots: Tensor, mine: Tensor, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """``[N, p]`` long and bool: all pivots in their order; those of the question are numbered behind the ``n`` slots."""
        if tokens.question_valid is None:
            return slots, mine
        words, spoken = _largest(tokens.question_signals["key_norm"], tokens.question_valid, self.text_pivots)
        return torch.cat([slots, words + tokens.valid.shape[1]], 1), torch.cat([mine, spoken], 1)


def _largest(norm: Tensor, valid: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """``[N, p]`` long and bool, ``p <= most``: the valid slots of largest ``norm [N, n]``, descending, the lower on a tie."""
    order = resorted(norm.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True), (~valid).long())
    order = order[:, :most]
    return order, valid.gather(1, order)
