"""VASparse: visual tokens by the attention that they receive from every token of the prompt."""

from mmaccel_kernels.importance import importance
from torch import Tensor

from ..method import Grid, LayerAttention, LayerMethod, Ranking, register


@register
class VASparse(Ranking, LayerMethod):
    """The token score of VASparse as a reduction of the prompt.

    *VASparse: Towards Efficient Visual Hallucination Mitigation via Visual-Aware Token Sparsification*, CVPR 2025,
    arXiv 2501.06553.

    ``a_j = mean_h mean_i A[h, i, j]`` in layer ``layer - 1``, over all tokens ``i`` of the prompt; the ``count`` visual tokens
    of highest ``a_j^2 + lambda P_j`` stay. ``P`` is the prior of a detector; without one, as in the program, it is the
    same for all tokens, and the order is that of ``a``. Sums over all queries are streamed, no map is kept.

    ``variant="official"``: ``min(int(retain * n), n - 1)`` tokens stay.

    Parameters
    ----------
    layer : the input of this layer. The program masks visual keys in layers above its layer 2, so 3.

    Paper and program: the program masks keys in every layer anew, and only in the second of two passes that it subtracts from
    each other at every step of decoding (contrastive decoding against hallucinations). Here the score of one layer decides
    which tokens go on, and decoding is the model's own.
    """

    name = "vasparse"
    summary = "tokens that receive most attention from the whole prompt, from layer 3 on"
    paper = "arXiv 2501.06553"
    ranks_by = "received_mean"
    default_retain = 0.5

    layer: float = 3

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program rounds down, and drops at least one."""
        return min(int(retain * size), size - 1)

    def observe(self, attention: LayerAttention) -> dict[str, Tensor]:
        """``received_mean [B, K]``: the attention that every key receives, mean over heads and queries that are no padding."""
        seen = attention.visible
        sums = importance(attention.query, attention.key, scaling=attention.scaling, visible=seen, join="mean")
        # padding asks nothing
        asking = attention.query.shape[2] if seen is None else seen[:, 0].any(-1).sum(-1, keepdim=True)
        return {"received_mean": sums.mean(1) / asking}
