"""HAWK: the first layer's question-to-picture scores without positions, averaged with fixed weights of heads."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..core.masks import question
from ..errors import MmaccelError
from ..method import Grid, LayerAttention, LayerMethod, Method, ModelFacts, Ranking, TokenBatch, register

#: of Qwen2.5-VL-7B, as published
_QWEN = (
    *(0.0875, 0.3000, 0.0480, 0.0321, 0.0104, 0.0102, 0.0336, 0.0460, 0.0540, 0.0472, 0.0234, 0.0537, 0.0109, 0.0573),
    *(0.0276, 0.0403, 0.0429, 0.0352, 0.0162, 0.0519, 0.0553, 0.0266, 0.0222, 0.0480, 0.0337, 0.0250, 0.0000, 0.0224),
)


@register
class HAWK(Ranking, LayerMethod):
    """Head-aware ranking before the first layer of the language model.

    *HAWK*, CVPR 2026.

    ``a_hj`` is the product of query and key of head ``h`` in layer ``layer`` without RoPE, mean over the text behind the last
    picture, for every visual token ``j``. Each head is normalised over the visual tokens, and the ``count`` tokens of highest
    ``sum_h w_h a_hj`` stay, at their original positions.

    ``variant="official"``: the number kept is rounded up.

    Parameters
    ----------
    layer : 0, before anything was computed; in models with DeepStack the first layer behind it.
    weights : ``w``, one for each head. None takes the published ones, found by switching heads off one at a time, for
        Qwen2.5-VL-7B, and equal ones for all other models, which is HAWK in form alone.
    normalization : ``l2``, which keeps signs; ``softmax`` or ``minmax``.

    Paper and program: the program reads up to the end of the user's message; here words of the chat template behind the
    question count too. It takes all pictures of a prompt for one; here they are normalised together, and each has its own
    budget.
    """

    name = "hawk"
    summary = "tokens that the first layer's heads find for the question, without positions"
    paper = "CVPR 2026"
    ranks_by = "question_logits"
    lowest = 0
    looks_ahead = True
    rotated = False
    default_retain = 0.198

    layer: float = 0
    weights: tuple[float, ...] | None = None
    normalization: Literal["l2", "softmax", "minmax"] = "l2"

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds up."""
        return -int(-retain * size // 1)

    def fit(self, family: ModelFacts) -> Method:
        fitted: HAWK = super().fit(family)  # type: ignore[assignment]
        published = self.weights is None and family.name == "qwen2_5_vl" and family.depth == len(_QWEN)
        return replace(fitted, weights=_QWEN) if published else fitted

    def remark(self, tokens: TokenBatch) -> str:
        return "hawk: all heads weigh the same, as none were measured for this model" if self.weights is None else ""

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``question_logits [B, K]``: the weighted scores of the visual keys, zero for others."""
        heads = attention.query.shape[1]
        if self.weights is not None and len(self.weights) != heads:
            raise MmaccelError(
                f"`weights` of hawk must have one number for each of {heads} heads, got {len(self.weights)}."
            )
        rows, sees = question(attention.text, ~attention.text), attention.visible
        valid = torch.ones_like(rows) if sees is None else sees[:, 0].any(-1)
        visual = (valid & ~attention.text)[:, None]
        query = attention.query.float().masked_fill(~rows[:, None, :, None], 0.0).sum(2)
        query = query / rows.sum(1).clamp(min=1)[:, None, None]
        grouped = query.unflatten(1, (attention.key.shape[1], -1))
        logits = torch.einsum("bkgd,bkld->bkgl", grouped, attention.full_key).flatten(1, 2) * attention.scaling
        logits = logits.nan_to_num(0.0, 0.0, 0.0).masked_fill(~visual, 0.0)
        if self.normalization == "l2":
            share = normalize(logits, dim=-1)
        elif self.normalization == "softmax":
            share = logits.masked_fill(~visual, -torch.inf).softmax(-1)
        else:
            low = logits.masked_fill(~visual, torch.inf).amin(-1, keepdim=True)
            high = logits.masked_fill(~visual, -torch.inf).amax(-1, keepdim=True)
            share = (logits - low) / (high - low).clamp(min=torch.finfo(torch.float32).eps)
        weight = share.new_ones(heads) if self.weights is None else share.new_tensor(self.weights)
        total = torch.einsum("h,bhl->bl", weight / weight.sum(), share.nan_to_num(0.0))
        return {self.ranks_by: total.masked_fill(~visual[:, 0], 0.0)}
