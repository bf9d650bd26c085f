"""FastV: after a few layers keep the visual tokens that the prompt's last token attends to."""

from ..method import Grid, LayerMethod, Ranking, register


@register
class FastV(Ranking, LayerMethod):
    """Rank visual tokens by the attention paid by the last prompt token, one layer before they are dropped.

    *An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for Large Vision-Language Models*,
    ECCV 2024, arXiv 2403.06764.

    ``s_j = mean_h A_{K-1}[h, last, j]`` over the visual tokens ``j``; at the input of layer ``K`` the ``count`` highest
    stay, in order, at their original positions. Text always stays. Layers below ``K`` process and cache all tokens.

    ``variant="official"``: the number kept is rounded half to even.

    Parameters
    ----------
    layer : ``K``, counted from 0. 2 as in the paper, with half of the tokens kept (``default_retain``).

    Paper and program: the program runs layer ``K - 1`` with eager attention to get its probabilities, and its ports to
    other libraries run that layer a second time. Here the scores are computed from the one query that is needed and the
    layer's keys: no second forward and no attention matrix. The program takes one image at a fixed place of a batch of one.
    """

    name = "fastv"
    summary = "tokens the last prompt token attends to, from layer 2 on"
    paper = "arXiv 2403.06764"
    ranks_by = "prompt_attention"
    default_retain = 0.5

    layer: float = 2

    def official_count(self, retain: float, size: int, grid: Grid | None = None) -> int:
        """The program is given the share to drop, and rounds what stays half to even."""
        return round(size * (1 - (1 - retain)))
