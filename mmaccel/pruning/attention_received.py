"""Attention received: keep the tokens that the patches of the vision tower attend to; needs no CLS token."""

from ..method import ProjectorMethod, Ranking, Tap, register


@register
class AttentionReceived(Ranking, ProjectorMethod):
    """Rank tokens by the attention they receive from all tokens of the vision tower.

    ``s_j = sum_l mean_h mean_i A_l[h, i, j]``; the ``count`` highest stay, in raster order. VisionZip (CVPR 2025,
    arXiv 2412.04467) and VisPruner (arXiv 2412.01818) use this score for towers without a CLS token (SigLIP, Qwen), and
    FoPru (arXiv 2411.14164) ranks by it.

    Parameters
    ----------
    layers : tower layers to sum over, counted as Python counts; ``None`` is the layer whose output the language model
        reads (for towers with windowed attention the last full-attention layer up to it), as VisionZip does.

    Differences: the rest is not merged (VisionZip's contextual tokens) and no share is chosen for diversity (VisPruner).
    Where several patches become one token of the language model, their scores are averaged. FoPru has no public program.
    """

    name = "attention-received"
    summary = "tokens that receive most attention in the vision tower"
    paper = "arXiv 2412.04467"
    ranks_by = "received_attention"
    limits = {"layers": "not empty"}

    layers: tuple[int | None, ...] = (None,)

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("received_attention", tuple(self.layers)),)
