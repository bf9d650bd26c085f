"""PyramidDrop: at the end of every group of layers a share of the visual tokens is dropped."""

from ..method import LayerMethod, Ranking, register


@register
class PyramidDrop(Ranking, LayerMethod):
    """One stage of PyramidDrop: visual tokens by the attention that the last token is about to pay.

    *PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction*, CVPR 2025,
    arXiv 2410.17247.

    ``s_j = mean_h A_l[h, last, j]``, where ``A_l`` is the attention of layer ``l = layer`` itself: its norm, projections and
    RoPE are applied to its input before anything is dropped, and only the last row of the map is computed. The ``count``
    highest stay. The recipe ``pyramiddrop`` has three such stages, a quarter of the depth apart, that each halve what there is;
    their budgets are shares of what there was at first.

    ``variant="official"``: the number kept is rounded down.

    Parameters
    ----------
    layer : the input of this layer. The authors drop before layers 8, 16 and 24 of 32.

    Paper and program: the program renumbers positions at every stage, so that a token has other positions in every layer's
    cache, and takes one picture; here positions are original and every picture has its own budget. Keys of earlier turns take
    no part in the ranking.
    """

    name = "pyramiddrop-step"
    summary = "tokens the last prompt token is about to attend to, from layer 8 on"
    paper = "arXiv 2410.17247"
    ranks_by = "prompt_attention"
    official_rounding = "down"
    renumbers_inside = True
    default_retain = 0.5
    looks_ahead = True

    layer: float = 8
