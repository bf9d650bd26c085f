"""VisionPulse: a step's own attention to the picture says how many visual keys it reads, and which."""

import torch
from torch import Tensor

from ...core.reduction import top_mask
from ...errors import MmaccelError
from ...method import KeyBatch, Policy, register


@register
class VisionPulse(Policy):
    """Every decode step reads as many visual keys as its attention to the picture weighs; all keys stay stored.

    VisionPulse, https://github.com/xxhhbbbb/VisionPulse.

    With ``z`` the logits of the layer before ``layer``, the mass of a head is ``exp(lse(z_visual / tau) - lse(z / tau))``.
    The layers from ``layer`` on read ``mass * n`` of ``n`` visual keys, by the largest mass of any head, between the share
    ``least`` and the budget: those of the largest mean of ``z`` over heads, and all text. With ``block`` above 1 whole blocks
    of so many places are read: a block has the largest ``z / tau`` in it, the softmax of these over all blocks is its score,
    and blocks that hold text are always read. ``retain`` is the largest share that is read.

    Parameters
    ----------
    layer : a half of the depth, as in the program; a number, or a share of the depth.
    tau : 0.4 with a budget of 10 %, 0.1 with one of 5 %, as in the program.
    least : a share, 0.05 with a budget of 10 % in the program.
    block : 64 in the program's kernels; 1 for single keys.
    by_mass : whether the mass decides how many are read, or the budget alone.

    In the program's form for single keys the layer that chooses reads its choice too; here, as in its form for blocks, it reads
    everything.
    """

    name = "visionpulse"
    summary = "every decode step reads as many visual keys as its attention to the picture weighs (adaptive)"
    paper = "github.com/xxhhbbbb/VisionPulse"
    budget = "adaptive"
    default_retain = 0.1
    sees_logits = True
    limits = {"layer": "[1, inf) or (0.0, 1.0]", "tau": "(0, inf)", "least": "[0, 1]", "block": "[1, inf)"}

    layer: float = 0.5
    tau: float = 0.4
    least: float = 0.05
    block: int = 1
    by_mass: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduled or self.compact != "evict" or self.layer_budget != "uniform" or self.head_budget != "uniform":
            raise MmaccelError("visionpulse drops nothing for good; leave out budgets, compact, every, cap and age.")

    def score(self, keys: KeyBatch) -> Tensor:
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)

    def recall_by_logits(self, logits: Tensor, visual: Tensor, count: Tensor) -> Tensor:
        places = visual.shape[1]
        behind = torch.nn.functional.pad(visual, (0, logits.shape[2] - places))
        number = visual.sum(1)
        if self.block > 1:
            return self._blocks(logits, behind, number, count)[:, :places] & visual
        mass = _mass(logits / self.tau, behind[:, None])
        most = self._share(mass, number, count).floor().long().clamp(min=1)
        return top_mask(logits.mean(1)[:, :places], visual, most)

    def _blocks(self, logits: Tensor, visual: Tensor, number: Tensor, count: Tensor) -> Tensor:
        """``[B, n]`` bool: the places of blocks that are read."""
        behind = -logits.shape[2] % self.block
        cut = torch.nn.functional.pad(logits / self.tau, (0, behind), value=-torch.inf).unflatten(2, (-1, self.block))
        seen = torch.nn.functional.pad(visual, (0, behind)).unflatten(1, (-1, self.block)).all(-1)
        score = cut.amax(-1).softmax(-1)
        mass = (score * seen[:, None]).sum(-1).amax(1)
        blocks = (self._share(mass, number, count) / self.block).ceil().long().clamp(min=1)
        return (top_mask(score.mean(1), seen, blocks) | ~seen).repeat_interleave(self.block, dim=1)

    def _share(self, mass: Tensor, number: Tensor, count: Tensor) -> Tensor:
        """``[B]`` float32: how many visual keys of a ``number [B]`` of them the ``mass [B]`` asks for, within the budget."""
        most = count.to(mass)
        return (mass * number).maximum(self.least * number).minimum(most) if self.by_mass else most


def _mass(logits: Tensor, visual: Tensor) -> Tensor:
    """``[B]``: the largest share over heads that ``visual [B, 1, n]`` keys have of the softmax of ``logits [B, H, n]``."""
    own = logits.masked_fill(~visual, -torch.inf).logsumexp(-1)
    return (own - logits.logsumexp(-1)).exp().nan_to_num(0.0).amax(1)
