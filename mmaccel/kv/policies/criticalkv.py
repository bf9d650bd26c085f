"""CriticalKV: half of the budget by attention, half by the effect of values on the output of attention."""

import torch
from torch import Tensor, nn

from ...core.reduction import top_mask
from ...errors import UnsupportedError
from ...method import KeyBatch, ModelFacts, register
from ..scoring.copies import of_first_keys
from ..scoring.importance import outgoing_norm
from .snapkv import SnapKV


@register
class CriticalKV(SnapKV):
    """SnapKV in two stages, of which the second weights attention by the norm of the projected value.

    *Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective*, arXiv 2502.03805.

    Evicting a key changes the output of attention by the key's weight times its value, projected by ``W_o``. Of each head's
    budget the share ``first`` goes to the highest scores ``s_k`` of SnapKV, the rest to the highest
    ``(s_k + epsilon) mean_{h in group} ||W_o,h v_k||_1``.

    Parameters
    ----------
    first : 0.5 as in the paper.
    epsilon : 1e-4 as in kvpress, so that keys without attention are ranked by their values.

    The first stage uses the same budget for all heads of a layer, before heads compete for it.
    """

    name = "criticalkv"
    summary = "keys the last prompt queries attend to, then those whose values change the output most"
    paper = "arXiv 2502.03805"
    #: output projections are read whole
    mixes_heads = True
    needs_outgoing = True
    limits = {"first": "[0, 1]", "epsilon": "[0, inf)"}

    first: float = 0.5
    epsilon: float = 1e-4

    def check(self, family: ModelFacts) -> None:
        super().check(family)
        usable: dict[type, bool] = {nn.Parameter: True}
        for layer in family.attending:
            weight = getattr(family.outgoing_in(layer), "weight", None)
            there = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
            if isinstance(weight, Tensor) and there and type(weight) not in usable:
                usable[type(weight)] = _computes(weight)
            if not there or not usable[type(weight)]:
                raise UnsupportedError(
                    "criticalkv reads the output projection of every attention layer, and those of this model are quantised or "
                    "named otherwise; use snapkv or vatp."
                )

    def score(self, keys: KeyBatch) -> Tensor:
        score = super().score(keys)
        assert keys.outgoing is not None and keys.count is not None
        candidates = (keys.valid if self.joint else keys.valid & keys.visual).repeat_interleave(score.shape[1], dim=0)
        count = (keys.count.double() * self.first).long().repeat_interleave(score.shape[1])
        best = top_mask(score.flatten(0, 1), candidates, count.to(score.device)).view_as(score)
        outgoing = of_first_keys(keys.outgoing, keys.values, keys.valid)
        # what stays in any case is infinite, also where its value changes nothing
        return ((score + self.epsilon) * outgoing).masked_fill(best | score.isposinf(), torch.inf)


def _computes(weight: Tensor) -> bool:
    """Whether a weight that is a subclass of Tensor can be split by heads and multiplied with; torchao's cannot."""
    value = torch.zeros(1, 1, 1, weight.shape[1], device=weight.device)
    try:
        outgoing_norm(value, weight.detach().unflatten(1, (1, -1)))
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True
