"""VTC-CLS: keep the tokens that the CLS token of the vision tower attends to."""

from ..method import ModelFacts, ProjectorMethod, Ranking, Tap, register


@register
class VtcCls(Ranking, ProjectorMethod):
    """Rank tokens by CLS attention, summed over layers of the vision tower.

    *[CLS] Token Tells Everything Needed for Training-free Efficient MLLMs*, arXiv 2412.05819.

    ``s_j = sum_l mean_h A_l[h, CLS, j]``; the ``count`` highest stay, in raster order. The scores of a layer are one row of a
    softmax per head, so they sum to at most one over the patches.

    Parameters
    ----------
    layers : tower layers to sum over, counted as Python counts; ``None`` is the layer whose output the language model
        reads. The default, that layer alone, is ours: the program takes the first layer from the command line, without a
        default, and sums from there to the last layer but one. For CLIP-L its ``start_layer=15`` is
        ``layers=tuple(range(15, 23))``.

    Paper and program: the program assumes one picture of one 24x24 grid; here every tile has its own CLS token and is
    ranked by itself. Layers are not normalised, so a layer with a peaked CLS row has more influence.
    """

    name = "vtc-cls"
    summary = "tokens the vision tower's CLS token attends to"
    paper = "arXiv 2412.05819"
    ranks_by = "cls_attention"
    limits = {"layers": "not empty"}

    layers: tuple[int | None, ...] = (None,)

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("cls_attention", tuple(self.layers)),)

    def check(self, family: ModelFacts) -> None:
        self.require_cls(family, "use 'attention-received' or 'divprune'")
