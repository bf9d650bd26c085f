"""Keys that are equal bit for bit have the same scores, however matrix products round."""

from mmaccel_kernels.copies import first_copies
from torch import Tensor


def of_first_keys(figures: Tensor, keys: Tensor, candidates: Tensor) -> Tensor:
    """``figures [B, H, K]``, where every copy of a key has the figure of the first equal key of the same key head.

    keys : ``[B, Hkv, K, D]``; ``H`` is a multiple of ``Hkv``.
    candidates : ``[B, K]`` bool, the keys whose figures depend only on their content; the others keep theirs.
    """
    heads = keys.shape[1]
    first = first_copies(keys.flatten(0, 1), candidates.repeat_interleave(heads, dim=0))
    if first is None:
        return figures
    grouped = figures.unflatten(1, (heads, -1))
    return grouped.gather(3, first.view(len(keys), heads, 1, -1).expand_as(grouped)).flatten(1, 2)
