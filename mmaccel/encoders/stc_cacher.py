"""STC's cacher: of a frame like the one before it, only the tokens that changed most run through the tower."""

from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..core.masks import true_first
from ..core.reduction import top_mask
from ..method import ReuseMethod, register


@register
class StcCacher(ReuseMethod):
    """Compute every ``interval``-th frame whole, and of the frames between them the tokens whose keys have changed.

    *Accelerating Streaming Video Large Language Models via Hierarchical Token Compression*, arXiv 2512.00891; its cacher.

    In each layer all keys of a frame are computed. The ``share`` of tokens whose keys have the lowest cosine with those at the
    same place of the frame's reference (the lower slot on a tie) is computed: they attend to all tokens of the frame, whose
    values are the reference's but for their own. The others take what attention and MLP added to the reference's tokens. Which
    tokens these are every layer decides anew.

    Parameters
    ----------
    share : of the tokens of a frame, rounded down, at least one; 0.25 as in the program.
    interval : frames from one that is computed whole to the next; 2 as in the program.

    Paper and program: the program reads a stream in chunks of one frame by default, and refers to the last frame of the last
    chunk that was computed whole; with chunks of one frame this is the same. It has a second form that compares values, whose
    stored keys it never writes; it is not offered.
    """

    name = "stc-cacher"
    summary = "of every other frame only the tokens whose keys changed run through the vision tower"
    paper = "arXiv 2512.00891"
    limits = {"share": "(0, 1]", "interval": "[1, inf)"}

    share: float = 0.25
    interval: int = 2

    def references(self, frames: int) -> list[int]:
        """The last frame at a multiple of the interval."""
        return [frame - frame % self.interval for frame in range(frames)]

    def recompute(self, keys: Tensor, stored: Tensor) -> Tensor:
        """``[N, T, d], [N, T, d] -> [N, max(1, floor(share * T))]``."""
        like = cosine_similarity(keys, stored, dim=-1)
        # rounded first, so that every machine rounds down alike
        count = max(1, int(round(self.share * keys.shape[1], 6)))
        changed = top_mask(-like, like.new_ones(like.shape).bool(), like.new_full((len(like),), count).long())
        return true_first(changed)[:, :count]
