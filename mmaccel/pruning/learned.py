"""Learned selection: a small network, trained on the user's own frozen model, says which tokens stay."""

from __future__ import annotations

from typing import Any

import torch
from mmaccel_kernels.copies import first_copies, of_first
from torch import Tensor

from ..core.reduction import Reduction, Residual, top_mask
from ..errors import UnsupportedError
from ..method import ModelFacts, ProjectorMethod, TokenBatch, register
from ..method.registry import get_method
from ..method.selector import Selector, described, selector_folder

#: of the picks of ``spacetime``, how many times as many as are to stay have a worth of their own
_REACH = 3
#: worths are held between these: copies are worth nothing, and the first of a picture without measure
_LEAST, _MOST = 1e-6, 4.0


@register
class Learned(ProjectorMethod):
    """The tokens that a selector asks for, which ``mmaccel distil`` trained for this model, and that differ from each other.

    Those stay whose ``log w_j + s_j`` is largest. ``w_j`` is what a token is worth to ``spacetime``, which picks by how far it
    is from others of its frame and from what the clip showed before. The score ``s_j`` is that of a small network, from what
    the language model would read, the place in the grid, ``w_j`` and, if it was trained so, the question. With scores that are
    all equal it is ``spacetime``; what the question asks for is kept although it is like its neighbours.

    To each token that stays the network adds a residual ``(1 - count / n) r_j``, which carries information of dropped tokens;
    selectors that were trained without residuals only choose.

    The network is trained without labels: on how the frozen model's own answers change, how much they depend on each token, or
    what the attention of a layer pays it (*FlexSelect*, arXiv 2506.00993); see
    :func:`mmaccel.programs.distil.training.distil`. *VisionSelector* (arXiv 2510.16598), *CoViPAL* (arXiv 2508.17243) and
    *Dynamic-LLaVA* (arXiv 2412.00876) learn such scores through a relaxed choice.

    Parameters
    ----------
    selector : the folder that ``mmaccel distil`` wrote; by default ``selector`` beside the model's weights. A selector of
        another model is refused.

    Paper and program: none of these is repeated here. FlexSelect's scorer is a small language model, those of CoViPAL and
    VisionSelector do not read the question, Dynamic-LLaVA's also drops text. Network, signal, residual and the choice of
    tokens that differ are ours.
    """

    name = "learned"
    summary = "spacetime, and what a small network trained on this model's own answers asks for and adds"
    unit = "picture"
    default_retain = 0.1

    selector: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "selector", str(self.selector))

    @property
    def needs_question(self) -> bool:  # type: ignore[override]
        """One that was trained without the question can stand where no question is known."""
        return not self.selector or described(self.selector)[0].question

    def fit(self, family: ModelFacts) -> Learned:
        return self if self.selector else Learned(selector_folder(family))

    def check(self, family: ModelFacts) -> None:
        if getattr(family, "model", None) is None:
            # a family as such: each of its models may have a selector
            return
        if not self.selector:
            raise UnsupportedError(
                "learned needs a selector that was trained for this model, and none lies beside its weights; run mmaccel "
                "distil and give Learned('selector/')."
            )
        subject = f"The selector {self.selector!r} was trained for"
        described(self.selector)[1].check(family, subject, "train one for it with mmaccel distil")
        Selector.load(self.selector)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        """``features [N, n, D]``, ``cells``, ``grid``, ``question [N, q, D]``, ``count [N]`` -> the picked slots, and what is
        added to them."""
        worth = worths(tokens, count)
        scores, more = Selector.load(self.selector, tokens.features.device)(tokens, worth)
        # newlines have no place: of those that are equal every one has the score of the first
        seen = torch.cat([tokens.features.float(), tokens.cells.float()], dim=-1)
        scores = of_first(scores, first_copies(seen, tokens.valid))
        kept = picked(worth, scores, tokens.valid, count)
        residual = None if more is None else Residual.to(kept, more * dropped(tokens.valid, count))
        return Reduction(kept, tokens.valid, residual=residual)


def dropped(valid: Tensor, count: Tensor) -> Tensor:
    """``[N, 1, 1]`` float32: the share of the tokens that do not stay."""
    size = valid.sum(1).clamp(min=1)
    return (1 - count.to(valid.device) / size).clamp(min=0)[:, None, None]


def worths(tokens: TokenBatch, count: Tensor) -> Tensor:
    """``[N, n]`` float32: the logarithm of what tokens are worth to ``spacetime``; those behind its first ``3 count [N]`` picks
    are worth as little as the last of these."""
    rule: Any = get_method("spacetime")()
    far = rule.worth(tokens, _REACH * count)
    last = far.masked_fill(far == -torch.inf, torch.inf).amin(1, keepdim=True)
    return torch.maximum(far, last).clamp(_LEAST, _MOST).log().masked_fill(~tokens.valid, 0.0)


def picked(worth: Tensor, scores: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """``[N, n]`` bool: ``count [N]`` slots by ``worth [N, n]`` and ``scores [N, n]`` (see :class:`Learned`)."""
    return top_mask(worth + scores, valid, count)
