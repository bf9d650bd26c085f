"""CDPruner: the kept tokens are different from each other and relevant to the question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..method import ProjectorMethod, TokenBatch
from ..reduction import Reduction
from ..registry import register
from ._scores import filled, on_grid

#: what is left of a token's own variance, relative, below which it is rounding
_NOISE = 1e-5
#: what the program adds, so that the least relevant token is not impossible
_FLOOR = 1e-6


@register
@dataclass(frozen=True)
class CDPruner(ProjectorMethod):
    """Greedy determinantal point process on similarity, conditioned on the question.

    *Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs*, NeurIPS 2025,
    arXiv 2506.10967.

    ``L = diag(q) S diag(q)`` with ``S`` the cosines of what the language model would read and ``q_j`` in (0, 1] the
    relevance of token ``j``. Tokens are picked one by one, each adding most to the determinant of the picked ones:
    ``argmax_j d_j`` where ``d`` starts as the diagonal of ``L`` and every pick ``i`` subtracts ``e_j^2``,
    ``e_j = (L_ij - sum_k c_ki c_kj) / sqrt(d_i)``. Equal ones go to the lower slot.

    Relevance here: the mean cosine between a token and the words of the question, as the language model embeds them
    (:attr:`TokenBatch.question`), rescaled to (0, 1] over the segment. No second model is loaded. Without a question
    all tokens are equally relevant.

    Paper and program: the paper compares CLIP's projected patches with CLIP's embedding of the question, and the program
    takes the *negated* cosine, since in CLIP patches of what a text names lie far from it; :func:`conditional_diverse` and
    :func:`rescaled` take any relevance, :func:`mean_cosine` any pair. The program rescales over a whole batch; here over
    each segment. Beyond the rank of ``L`` it divides by zero and returns NaN picks; here, when only copies of picked
    tokens are left, the most relevant ones follow. Newline tokens are dropped first, as it does. It stores ``n x n``
    products; here every pick costs one product ``[n, D] @ [D]`` and ``count x n`` numbers are stored.
    """

    name = "cdpruner"
    summary = "different tokens (DPP) that are relevant to the question"
    paper = "arXiv 2506.10967"
    needs_question = True

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``question [N, q, D]``, ``count [N]`` -> the picked slots."""
        here, count = on_grid(tokens), count.to(tokens.valid.device)
        relevance = torch.ones_like(here, dtype=torch.float32)
        if tokens.question is not None and tokens.question_valid is not None:
            relevance = rescaled(mean_cosine(tokens.features, tokens.question, tokens.question_valid), here)
        picked = conditional_diverse(tokens.features, relevance, here, torch.minimum(count, here.sum(1)))
        return Reduction(filled(picked, tokens.valid, count), tokens.valid)


def mean_cosine(features: Tensor, question: Tensor, there: Tensor) -> Tensor:
    """``[N, n]`` float32: cosine of ``features [N, n, D]`` with ``question [N, q, D]``, mean over the ``q`` that are ``there
    [N, q]``; zero where none is."""
    words = normalize(question.float(), dim=-1).masked_fill(~there[..., None], 0.0)
    mean = words.sum(1) / there.sum(1, keepdim=True).clamp(min=1)
    return torch.bmm(normalize(features.float(), dim=-1), mean[..., None])[..., 0]


def rescaled(relevance: Tensor, valid: Tensor) -> Tensor:
    """``relevance [N, n]`` moved to (0, 1] over the ``valid`` tokens of each row; all one where there is no difference."""
    low = relevance.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    span = relevance.masked_fill(~valid, -torch.inf).amax(1, keepdim=True) - low
    return torch.where(span > 0, (relevance - low + _FLOOR) / span, torch.ones_like(relevance))


def conditional_diverse(features: Tensor, relevance: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots picked greedily (see :class:`CDPruner`).

    Parameters
    ----------
    features : ``[N, n, D]``, compared by cosine.
    relevance : ``[N, n]``, not negative.
    valid : ``[N, n]`` bool; nothing else is picked.
    """
    quality = relevance.float().masked_fill(~valid, 0.0)
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    left = quality * x.square().sum(-1) * quality
    least, spent = left * _NOISE, -1.0 / (1.0 + quality)
    picked, rows = torch.zeros_like(valid), torch.arange(len(x), device=x.device)
    most = int(count.max()) if count.numel() else 0
    basis = x.new_zeros(len(x), most, x.shape[1])
    for i in range(most):
        # what the picked ones already span competes by relevance, behind all that is new
        merit = torch.where(left > least, left, spent)
        pick = merit.masked_fill(picked | ~valid, -torch.inf).argmax(1)
        picked[rows, pick] |= i < count
        fresh = (left > least)[rows, pick][:, None]
        e = quality * torch.bmm(x, x[rows, pick, :, None])[..., 0] * quality[rows, pick][:, None]
        e = e - torch.bmm(basis[:, :i].transpose(1, 2), basis[rows, :i, pick][..., None])[..., 0]
        e = torch.where(fresh, e / left[rows, pick].clamp(min=torch.finfo(torch.float32).tiny).sqrt()[:, None], 0.0)
        basis[:, i] = e
        left = left - e.square()
    return picked
