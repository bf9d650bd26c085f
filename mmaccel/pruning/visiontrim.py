"""VisionTrim: tokens that the tower attends to stay, and the question merges the others into a few complements."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from mmaccel_kernels.matching import best_match
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import leftmost, ranks
from ..core.reduction import Links, Reduction, top_mask
from ..method import AttentionGuided, QuestionGuided, Tap, TokenBatch, register
from ..method.question import question_words
from ..method.tokens import by_row
from ._shared import beside, filled, part_of

#: rounds in which the members of a complement are found
_ROUNDS = 3
#: of the exponent of a difference in place
_PLACE = 0.5


@register
class VisionTrim(AttentionGuided, QuestionGuided):
    """Dominant tokens by a global and a local score, and complements that the question merges from the rest.

    *VisionTrim: Unified Vision Token Compression for Training-Free MLLM Acceleration*, ICLR 2026, arXiv 2601.22674.

    **Dominant.** Global ``g`` is the CLS attention of the layer the language model reads, mean over heads; local ``l_i`` is
    the mean over the 3x3 cells around a token of ``-|x_i - x_j|^2 / var(x) - |p_i - p_j|^2 / (2 var(p))``, of tower features
    ``x`` and places ``p``, cells outside the picture counting zero, and a softmax over the picture. Both go through one more
    softmax, and the score is their mean weighted by the *other's* variance. The highest stay.

    **Complement.** With ``e_i`` the direction of a token and ``t`` those of the words of the question, the ``b`` tokens of
    the rest with the highest ``mean_t cos(t, e_i)`` are targets. Three times every other token ``s`` flows to the target
    ``y`` with the highest ``sum_t cos(t, e_s) cos(t, e_y)``, and each target gets the mean of its members added. The
    members' own directions never change, so a target gets up to three means, on top of itself.

    Directions are those of the patches and words in the space of a CLIP model with ``clip``, as in the paper; without it those
    of the tokens and words as the language model reads them, and no second model is loaded.

    ``variant="official"``: the score is half of ``g`` and half of the attention received from the other patches, each divided
    by its Euclidean norm; the program computes the one above, and overwrites it.

    Parameters
    ----------
    clip : the CLIP model that the vision tower comes from, see ``cdpruner``; ``accelerate_vlm`` then needs ``processor=``.
    complement : a float is the share of the budget, rounded half up, an int the number in each tile. 16 of 64 as in the
        program.
    query, layer : whose attention is ``g``: ``auto``, the CLS token's where the tower has one, else all tokens'.

    Paper and program: the program applies CLIP's projection to the features as they are, here the tower's last
    norm is in front of it. It merges inputs of the projector and puts complements behind dominant tokens; here outputs of the
    projector are merged, and tokens keep their places. A second stage inside the language model is commented out in the
    program. Newline tokens are dropped first.
    """

    name = "visiontrim"
    summary = "dominant tokens by global and local score, the rest merged where the question says"
    paper = "arXiv 2601.22674"
    by_word = True
    limits = {"complement": "[0, inf) or [0.0, 1.0]"}

    clip: str | None = None
    complement: float = 16 / 64

    def taps(self) -> tuple[Tap, ...]:
        more = [Tap("patch_attention", (self.layer,))] if self.official else []
        if self.clip or not self.official:
            more.append(Tap("features"))
        return (*super().taps(), *more)

    @by_row
    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """Attention ``[N, n]``, tower features ``[N, n, d]``, ``question [N, q, D]``, ``count [N]`` -> both kinds."""
        (attention, seen), valid = self.attention(tokens), tokens.valid
        room = torch.minimum(count.to(valid.device), seen.sum(1))
        merged = part_of(room, self.complement)
        if self.official:
            received = tokens.signals["patch_attention"][:, 0].float()
            score = 0.5 * _unit(attention, seen) + 0.5 * _unit(received, seen)
        else:
            local = local_importance(tokens.signals["features"][:, 0], tokens, seen)
            # two softmaxes leave differences that only float64 holds, and of which only the order matters
            score = -ranks(adaptive(attention, local, seen).argsort(dim=1, descending=True, stable=True))
        dominant = top_mask(score, seen, room - merged)
        space = tokens.signals["patches"] if self.clip else tokens.features
        kept, links = complements(space, tokens, seen & ~dominant, merged)
        return Reduction(filled(dominant | kept, valid, count.to(valid.device)), valid, links)


def local_importance(features: Tensor, tokens: TokenBatch, seen: Tensor) -> Tensor:
    """``[N, n]`` float64: how alike each token of ``features [N, n, d]`` is to the cells around it; see :class:`VisionTrim`."""
    x = features.float().masked_fill(~seen[..., None], 0.0)
    place = tokens.cells[..., 1:].float()
    spread, apart = _variance(x, seen), _variance(place, seen)
    row = torch.arange(len(x), device=x.device)[:, None]
    total = torch.zeros_like(seen, dtype=torch.float64)
    for slot, exists in beside(tokens, [(r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if r or c]):
        unlike = (x - x[row, slot]).square().sum(-1) / spread
        far = (place - place[row, slot]).square().sum(-1) * _PLACE / apart
        total -= torch.where(exists & seen & seen.gather(1, slot), unlike + far, 0.0)
    return _shares(total / 9, seen)


def adaptive(one: Tensor, other: Tensor, seen: Tensor) -> Tensor:
    """``[N, n]`` float64: the mean of two scores, each behind a softmax and weighted by the variance of the other."""
    one, other = _shares(one.double(), seen), _shares(other.double(), seen)
    first, second = (_variance(x[..., None], seen) for x in (one, other))
    return (second * one + first * other) / (first + second)


def complements(space: Tensor, tokens: TokenBatch, rest: Tensor, count: Tensor) -> tuple[Tensor, Links | None]:
    """The ``count [N]`` targets among ``rest``, ``[N, n]`` bool, and what flows into them; see :class:`VisionTrim`.

    space : ``[N, n, d]``, patches where they are compared with words.
    rest : ``[N, n]`` bool, the tokens that are left.
    """
    z = space.float().masked_fill(~rest[..., None], 0.0)
    first = first_copies(z, rest)
    words = question_words(tokens)
    said = z[:, :1] * 0.0 if words is None else words
    # what a token says to the words, and through them to other tokens
    agreement = torch.bmm(normalize(z, dim=-1), said.mT)
    target = top_mask(of_first(agreement.mean(-1), first), rest, count)
    at, held = leftmost(target)
    member = rest & ~target & held.any(1, keepdim=True)
    if not bool(member.any()):
        return target, None
    asked, row = torch.bmm(agreement, said), torch.arange(len(z), device=z.device)[:, None]
    batch, source = member.nonzero(as_tuple=True)
    home, own = target.nonzero(as_tuple=True)
    links = Links(home, own, own, torch.ones(len(own), device=z.device))
    for _ in range(_ROUNDS):
        now = Reduction(target, tokens.valid, links).substitute(z)
        into = of_first(at.gather(1, best_match(asked, normalize(now[row, at], dim=-1), held)[1]), first)
        slot = into[batch, source]
        members = torch.zeros_like(into).scatter_add_(1, into, member.long())
        more = Links(batch, slot, source, 1.0 / members[batch, slot].float())
        links = Links(*(torch.cat(pair) for pair in zip(vars(links).values(), vars(more).values(), strict=True)))
    return target, links


def _unit(score: Tensor, seen: Tensor) -> Tensor:
    """``score [N, n]`` divided by its Euclidean norm over the tokens that are ``seen``; zero elsewhere."""
    return normalize(score.masked_fill(~seen, 0.0), dim=1)


def _shares(score: Tensor, seen: Tensor) -> Tensor:
    """A softmax over the tokens that are ``seen``; zero elsewhere."""
    return score.masked_fill(~seen, -torch.inf).softmax(1).nan_to_num(0.0).masked_fill(~seen, 0.0)


def _variance(x: Tensor, seen: Tensor) -> Tensor:
    """``[N, 1]`` float64: the unbiased variance of all entries of ``x [N, n, d]`` that are ``seen``; above zero."""
    counted = seen[..., None]
    size = (seen.sum(1, keepdim=True) * x.shape[2]).clamp(min=2)
    mean = x.masked_fill(~counted, 0.0).sum((1, 2), dtype=torch.float64)[:, None] / size
    square = (x - mean[..., None]).masked_fill(~counted, 0.0).square().sum((1, 2))[:, None]
    return (square / (size - 1)).clamp(min=torch.finfo(torch.float32).tiny)
