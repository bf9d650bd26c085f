"""IPCV: later layers of the tower compute the patches that change most, the others follow their nearest neighbours."""

import torch
from torch import Tensor

from ..core.reduction import top_mask
from ..method import RebuildingMethod, register
from ..method.rebuilding import depth_of


@register
class Ipcv(RebuildingMethod):
    """Drop patches early in the vision tower and rebuild them at its end, so that the language model reads all tokens.

    *IPCV: Information-Preserving Compression for MLLM Visual Encoders*, arXiv 2512.18747.

    1. At the input of layer ``K`` a patch scores ``||x_K - x_(K-1)||``, how much the layer before it changed the patch. The
       ``int(n (1 - reduction))`` highest are computed from there on (the lower slot on a tie).
    2. In layers ``K .. K + stabilised - 1`` all patches are rebuilt before attention, which sees all of them; the MLP computes
       the chosen ones. Later layers compute the chosen ones alone, with their own positions and in their own frames.
    3. Patch ``r`` is rebuilt as ``x_r(K) + mean (x_j - x_j(K))`` over the ``neighbours`` chosen patches ``j`` nearest to it
       (Euclidean, at ``K``). So it is behind the last layer.

    The paper puts a method that prunes in the language model behind it: ``["ipcv", "dart"]``.

    ``variant="official"``: patches of all pictures of a call compete, so a picture may lose all of its own; and the first patch
    of a later frame attends with the frame before it, if it is chosen.

    Parameters
    ----------
    layer : int from 1 on, or float; the layer of the choice, or its share of the depth; 3 of 32 as in the authors' script.
    reduction : float from 0 to below 1; the share of patches that is left out; 0.65 as in the script.
    stabilised : int from 0 on, or float; how many layers have attention over all patches, or their share of the depth; 7 of
        32 as in the script.
    neighbours : int, at least 1; 10 as in the script.

    In a shallow tower every layer changes patches much, and they do not follow their neighbours: ``mini-llava`` gave 20 % of 90
    answers of the bare model (12.3 to 29.8; ``mmaccel eval --recipe ipcv --limit 10``).

    Paper and program: the program counts patches of all pictures together, here those of each picture or clip, in towers of
    tiles of each tile, at least one. It needs a layer of 2 or more, as it keeps no input of layer 0. Its paths for other
    attention than flash attention do not run.
    """

    name = "ipcv"
    summary = "later layers of the vision tower compute the patches that change most and rebuild the others from them"
    paper = "arXiv 2512.18747"
    limits = {
        "layer": "[1, inf) or (0.0, 1.0)",
        "reduction": "[0, 1)",
        "stabilised": "[0, inf) or [0.0, 1.0]",
        "neighbours": "[1, inf)",
    }

    layer: float = 3 / 32
    reduction: float = 0.65
    stabilised: float = 7 / 32
    neighbours: int = 10

    def span(self, layers: int) -> tuple[int, int]:
        """The layer of the choice is at least 1, and at most the last."""
        first = min(max(1, depth_of(self.layer, layers)), max(1, layers - 1))
        return first, min(depth_of(self.stabilised, layers), layers - first)

    def choose(self, before: Tensor, now: Tensor) -> Tensor:
        """``[n, C], [n, C] -> [max(1, int(n (1 - reduction)))]``."""
        change = (now - before).norm(dim=-1)[None]
        # rounded first, so that every machine truncates alike
        count = max(1, int(round(now.shape[0] * (1 - self.reduction), 6)))
        chosen = top_mask(change, torch.ones_like(change, dtype=torch.bool), torch.tensor([count], device=now.device))
        return chosen[0].nonzero()[:, 0]

    def sources(self, left: Tensor, chosen: Tensor) -> Tensor:
        """``[r, C], [m, C] -> [r, min(neighbours, m)]``, the nearest first, the lower slot on a tie."""
        distance = torch.cdist(left, chosen, compute_mode="donot_use_mm_for_euclid_dist")
        return distance.argsort(dim=1, stable=True)[:, : self.neighbours]
