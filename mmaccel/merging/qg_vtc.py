"""QG-VTC without training: tokens that answer the question stay, the others flow into them softly, in a few steps."""

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction, top_mask
from ..method import QuestionGuided, TokenBatch, register
from ..method.blocks import nearest_kept
from ..method.question import question_words

#: steps in which the number of tokens falls, each by the same factor
_STEPS = 3


@register
class QGVTC(QuestionGuided):
    """Question-guided compression in its training-free form.

    *QG-VTC: Question-Guided Visual Token Compression in MLLMs for Efficient VQA*, arXiv 2504.00654.

    In every step the tokens with the highest mean cosine ``s`` to the words of the question stay. Each of the others flows
    into the one of these that it is most alike to, and what flows together is averaged with weights ``exp(s /
    temperature)``. Three steps divide the number of tokens by the same factor each, and similarity is measured among what the
    steps before have merged. Without a question all tokens are equally relevant.

    Cosines are those of patches and question in the space of a CLIP model with ``clip``; without it those of the tokens and
    words as the language model reads them, and no second model is loaded.

    Parameters
    ----------
    clip : the CLIP model that the vision tower comes from, see ``cdpruner``; ``accelerate_vlm`` then needs ``processor=``.
    temperature : how much the more relevant tokens weigh in a mean; 0.1 (ours).

    Paper and program: in the paper a trained layer maps the embedding of the question into the space of the tower, tokens are
    averaged by learned queries and keys, and the steps stand between layers of the tower. No program is public. What is here
    needs no training and stands behind the tower: the choice by correlation, soft averages and the progression are the
    paper's, the rest is ours. Newline tokens are dropped first.
    """

    name = "qg-vtc"
    summary = "tokens relevant to the question, the others averaged into them in three steps"
    paper = "arXiv 2504.00654"
    unit = "tile"
    default_retain = 0.125
    limits = {"temperature": "(0, inf)"}

    clip: str | None = None
    temperature: float = 0.1

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``question [N, q, D]``, ``count [N]`` -> relevant tokens that took up the others."""
        here = torch.where(tokens.celled.any(1, keepdim=True), tokens.celled, tokens.valid)
        count, size = count.to(here.device), here.sum(1)
        room = torch.minimum(count, size)
        space = self.space(tokens).masked_fill(~here[..., None], 0.0)
        words = question_words(tokens)
        said = space[:, :0].float() if words is None else words
        said = said.sum(1) / (said.square().sum(-1) > 0).sum(1, keepdim=True).clamp(min=1)
        first = first_copies(space)
        relevance = of_first(torch.bmm(normalize(space.float(), dim=-1), said[..., None])[..., 0], first)
        relevance = relevance.masked_fill(~here, -torch.inf)
        total, share = Reduction.identity(here), room.double() / size.clamp(min=1)
        for step in range(1, _STEPS + 1):
            # rounded first, so that every machine rounds up alike
            left = (size * share ** (step / _STEPS) * 1e6).round() / 1e6
            kept = top_mask(relevance, total.kept, torch.maximum(left.ceil().long(), room))
            total = total.then(self.step(total.substitute(space), relevance, total.kept, kept))
        more = top_mask(here.float(), tokens.valid & ~here, count - total.kept.sum(1))
        return Reduction(total.kept | more, tokens.valid, total.links)

    def step(self, space: Tensor, relevance: Tensor, here: Tensor, kept: Tensor) -> Reduction:
        """The tokens ``here [N, n]`` of ``space [N, n, d]`` flow into those that are ``kept [N, n]``."""
        slots = torch.arange(here.shape[1], device=here.device).expand_as(here)
        into = torch.where(kept, slots, nearest_kept(space, kept, here)).masked_fill(~kept.any(1, keepdim=True), -1)
        weight = ((relevance - relevance.amax(1, keepdim=True)) / self.temperature).exp()
        return Reduction.merge(into, here, weight.clamp(min=torch.finfo(torch.float32).tiny))
