"""Learned selection: a small network, trained on the user's own frozen model, says which tokens stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mmaccel_kernels.copies import first_copies, of_first
from mmaccel_kernels.dpp import greedy_dpp
from torch import Tensor
from torch.nn.functional import normalize

from ..core.reduction import Reduction
from ..errors import UnsupportedError
from ..method import ModelFacts, ProjectorMethod, TokenBatch
from ..method.registry import register
from ..method.selector import Selector, beside, described

#: scores are held within this, so that every product of two qualities is a number
_MOST = 8.0
#: what is left of the variance of a token that those picked before it explain: others, however wanted, come before it
_NOISE = 1e-3


@register
@dataclass(frozen=True)
class Learned(ProjectorMethod):
    """The tokens that a selector asks for, which ``mmaccel distil`` trained for this model, and that differ from each other.

    A small network scores every token ``s_j`` from what the language model would read, its place in the grid and, if it was
    trained so, the question. Tokens are picked one by one where ``exp(2 s_j) d_j`` is largest, ``d_j`` being what the picks
    before leave unexplained of the token: the greedy determinantal point process of CDPruner (arXiv 2506.10967), whose
    relevance is learned here. Scores that are all equal keep what differs; high ones outweigh likeness.

    The network was trained without labels, to tell how much the frozen model's own answers hang on each token, or what the
    attention of a layer pays it, which is *FlexSelect* (arXiv 2506.00993); see :func:`mmaccel.programs.distil.training.distil`.
    *VisionSelector* (arXiv 2510.16598), *CoViPAL* (arXiv 2508.17243) and *Dynamic-LLaVA* (arXiv 2412.00876) learn such scores
    through a relaxed choice.

    Parameters
    ----------
    selector : the folder that ``mmaccel distil`` wrote; by default ``selector`` beside the model's weights. A selector of
        another model is refused.

    Paper and program: none of these is repeated here. FlexSelect's scorer is a small language model, those of CoViPAL and
    VisionSelector do not read the question, Dynamic-LLaVA's also drops text. Network, signal and the choice of tokens that
    differ are ours.
    """

    name = "learned"
    summary = "different tokens that a small network, trained on this model's own answers, asks for"
    unit = "picture"
    default_retain = 0.1

    selector: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", str(self.selector))

    @property
    def needs_question(self) -> bool:  # type: ignore[override]
        """One that was trained without the question can stand where no question is known."""
        return not self.selector or described(self.selector)[0].question

    def fit(self, family: ModelFacts) -> Learned:
        """With the selector beside the model's weights, where none is named."""
        return self if self.selector else Learned(beside(family))

    def check(self, family: ModelFacts) -> None:
        """A selector must be there, and be that of this model."""
        if getattr(family, "model", None) is None:
            # a family as such: each of its models may have a selector
            return
        if not self.selector:
            raise UnsupportedError(
                "learned needs a selector that was trained for this model, and none lies beside its weights; run mmaccel "
                "distil and give Learned('selector/')."
            )
        described(self.selector)[1].check(family, self.selector)
        Selector.load(self.selector)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells``, ``grid``, ``question [N, q, D]``, ``count [N]`` -> the picked slots."""
        scores = Selector.load(self.selector, tokens.features.device)(tokens)
        # newlines have no place: of those that are equal every one has the score of the first
        seen = torch.cat([tokens.features.float(), tokens.cells.float()], dim=-1)
        scores = of_first(scores, first_copies(seen, tokens.valid))
        return Reduction(picked(tokens.features, scores, tokens.valid, count), tokens.valid)


def picked(features: Tensor, scores: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots by ``scores [N, n]`` and what is new in ``features [N, n, D]`` (see
    :class:`Learned`)."""
    quality = scores.clamp(-_MOST, _MOST).exp().masked_fill(~valid, 0.0)
    x = normalize(features.float().masked_fill(~valid[..., None], 0.0), dim=-1)
    return greedy_dpp(x, quality, valid, count.to(valid.device), _NOISE)
