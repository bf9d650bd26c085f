"""EViT: inside the vision tower, the tokens that the CLS token attends to least are fused into one."""

import torch
from torch import Tensor

from ..core.reduction import top_mask
from ..errors import MmaccelError
from ..method import EncoderMethod, EncoderTokens, TowerFacts, register


@register
class EViT(EncoderMethod):
    """Token reorganisation at three layers of the tower, between attention and MLP.

    *Not All Patches are What You Need: Expediting Vision Transformers via Token Reorganizations*, ICLR 2022,
    arXiv 2202.07800.

    ``s_j = mean_h A[h, CLS, j]``. The attentive tokens, those of highest ``s``, stay; the others become one token,
    ``sum_j s_j x_j``, whose weights are not normalised (they sum to the attention paid to the inattentive tokens). In later
    layers the fused token is a token like any other and may be fused again. Attention is not weighted by sizes.

    The paper reduces at layers 4, 7 and 10 of 12 and keeps 0.7 of the tokens at each: 196, 139, 99, 71 including the fused
    ones, a ``retain`` of 0.36. Here the layers are at the same shares of any depth, and the same share of the tokens stays at
    each, such that the budget is met including fused tokens.

    Parameters
    ----------
    fuse : whether the inattentive tokens become one; else they are dropped, the paper's other form.

    Paper and program: the program keeps ``ceil(0.7 n)`` and adds the fused token; it sorts the attentive tokens by attention
    and appends the fused one. Here every token keeps its slot and the fused one takes the first slot of those it is made of.
    The program's models were trained this way; without training the fused token is shorter than its neighbours.
    """

    name = "evit"
    summary = "tokens the tower's CLS token looks at, the others fused into one inside the tower"
    paper = "arXiv 2202.07800"
    default_retain = 0.36
    proportional = False
    needs_cls = True

    fuse: bool = True

    def check(self, family: TowerFacts) -> None:
        self.require_cls(family, "use 'tome' or 'pitome'")

    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """The same share at a quarter, half and three quarters of the layers; ``tokens - kept`` in all."""
        if not 1 <= kept <= tokens or layers < 1:
            raise MmaccelError(f"evit cannot leave {kept} of {tokens} tokens in {layers} layers; give a larger budget.")
        at = sorted({layers // 4, layers // 2, layers * 3 // 4})
        out, left = [0] * layers, tokens
        for stage, layer in enumerate(at, 1):
            # rounded first, so that every machine truncates alike
            after = max(kept, int(round(tokens * (kept / tokens) ** (stage / len(at)), 6)))
            out[layer], left = left - after, after
        return out

    def fewest(self, tokens: int, layers: int) -> int:
        """One: a single layer can fuse any number of tokens."""
        return 1

    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        """``cls_attention [N, T]`` -> ``[N, T]``: the ``remove + 1`` least attended tokens flow into the first of them; if
        they are dropped, the ``remove`` least into the first that stays, where they weigh nothing."""
        assert tokens.cls_attention is not None
        attention = tokens.cls_attention.clone()
        attention[:, : tokens.protected] = torch.inf
        valid = torch.ones_like(attention, dtype=torch.bool)
        attentive = top_mask(attention, valid, valid.sum(1) - remove - int(self.fuse))
        slot = torch.arange(attention.shape[1], device=attention.device).expand_as(attention)
        onto = ~attentive if self.fuse else attentive & (slot >= tokens.protected)
        return torch.where(attentive, slot, onto.long().argmax(1, keepdim=True))

    def weigh(self, tokens: EncoderTokens, target: Tensor) -> Tensor:
        """``[N, T]``: the CLS attention of fused tokens, one for the others; zero for what is dropped."""
        assert tokens.cls_attention is not None
        slot = torch.arange(target.shape[1], device=target.device)
        if not self.fuse:
            return (target == slot).float()
        joined = torch.zeros_like(target).scatter_add_(1, target, (target != slot).long())
        return torch.where(joined.gather(1, target) > 0, tokens.cls_attention, 1.0)
