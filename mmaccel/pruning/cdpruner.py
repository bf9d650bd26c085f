"""CDPruner: the kept tokens are different from each other and relevant to the question."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from mmaccel_kernels.dpp import greedy_dpp
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..errors import UnsupportedError
from ..method import ModelFacts, QuestionGuided, TokenBatch, register
from ._shared import filled, on_grid

#: the share of a token's own variance below which what is left of it is rounding
_NOISE = 1e-5
#: what the program adds, so that the least relevant token can still be picked
_FLOOR = 1e-6


@register
class CDPruner(QuestionGuided):
    """Greedy determinantal point process on similarity, conditioned on the question.

    *Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs*, NeurIPS 2025,
    arXiv 2506.10967.

    ``L = diag(q) S diag(q)`` with ``S`` the cosines of what the language model would read and ``q_j`` in (0, 1] the
    relevance of token ``j``. Tokens are picked one by one, each adding most to the determinant of the picked ones:
    ``argmax_j d_j`` where ``d`` starts as the diagonal of ``L`` and every pick ``i`` subtracts ``e_j^2``,
    ``e_j = (L_ij - sum_k c_ki c_kj) / sqrt(d_i)``. Equal ones go to the lower slot.

    Relevance is rescaled to (0, 1] over the tile. With ``clip`` it is the paper's: the cosine between the patch a token comes
    from, projected as CLIP projects its class token, and CLIP's embedding of the question. Without ``clip`` no second model
    is loaded: it is the mean cosine between a token and the words of the question, as the language model embeds them
    (:attr:`TokenBatch.question`). Without a question all tokens are equally relevant. ``stats()["notes"]`` says which of
    these was used.

    ``variant="official"``: relevance is the program's, the negated cosine with CLIP whatever ``negate`` says; needs ``clip``.

    Parameters
    ----------
    clip : the CLIP model that the vision tower comes from: a folder of transformers or open_clip, or ``NAME:WEIGHTS`` as
        open_clip names it. Its text tower is loaded, and ``accelerate_vlm`` needs ``processor=``.
    negate : negate the cosine with CLIP, as the program does: in models trained on class tokens, patches that show what a
        text names lie far from it. False for models whose patches were aligned with text.

    Paper and program: the program rescales over a whole batch; here over each tile. Beyond the rank of ``L`` it divides by
    zero and picks NaN; here, when only copies of picked tokens are left, the most relevant ones follow. Newline tokens
    are dropped first, as in the program. It stores ``n x n`` products; here every pick costs one product ``[n, D] @ [D]``
    and ``count x n`` numbers are stored. With open_clip a question is cut to the context length of the text tower.
    """

    name = "cdpruner"
    summary = "different tokens (DPP) that are relevant to the question"
    paper = "arXiv 2506.10967"
    unit = "tile"

    clip: str | None = None
    negate: bool = True

    def check(self, family: ModelFacts) -> None:
        if self.official and not self.clip:
            raise UnsupportedError(
                "cdpruner with variant='official' reads the question with CLIP; name it with clip=, or leave out the variant."
            )

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``question [N, q, D]``, ``count [N]`` -> the picked slots."""
        here, count = on_grid(tokens), count.to(tokens.valid.device)
        relevance = torch.ones_like(here, dtype=torch.float32)
        if tokens.question is not None and tokens.question_valid is not None:
            patches = tokens.signals["patches"] if self.clip else tokens.features
            cosine = mean_cosine(patches, tokens.question, tokens.question_valid)
            negated = self.clip and (self.negate or self.official)
            relevance = rescaled(-cosine if negated else cosine, here & ~cosine.isnan()).nan_to_num(0.0)
        picked = conditional_diverse(tokens.features, relevance, here, torch.minimum(count, here.sum(1)))
        return Reduction(filled(picked, tokens.valid, count), tokens.valid)


def mean_cosine(features: Tensor, question: Tensor, valid: Tensor) -> Tensor:
    """``[N, n]`` float32: cosine of ``features [N, n, D]`` with ``question [N, q, D]``, mean over the ``q`` that are ``valid
    [N, q]``; zero where none is."""
    words = normalize(question.float(), dim=-1).masked_fill(~valid[..., None], 0.0)
    mean = words.sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
    cosine = torch.bmm(normalize(features.float(), dim=-1), mean[..., None])[..., 0]
    return of_first(cosine, first_copies(features))


def rescaled(relevance: Tensor, valid: Tensor) -> Tensor:
    """``relevance [N, n]`` moved to (0, 1] over the ``valid`` tokens of each row; all one where there is no difference."""
    low = relevance.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    span = relevance.masked_fill(~valid, -torch.inf).amax(1, keepdim=True) - low
    return torch.where(span > 0, (relevance - low + _FLOOR) / span, torch.ones_like(relevance))


def conditional_diverse(features: Tensor, relevance: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots picked greedily (see :class:`CDPruner`).

    features : ``[N, n, D]``, compared by cosine.
    relevance : ``[N, n]``, not negative.
    valid : ``[N, n]`` bool; nothing else is picked.
    """
    quality = relevance.float().masked_fill(~valid, 0.0)
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    return greedy_dpp(x, quality, valid, count.to(valid.device), _NOISE)
