"""MustDrop, in the cache: keys of tokens that later layers dropped leave the cache of earlier layers too."""

import torch
from torch import Tensor

from ...core.budget import layer_at
from ...method import KeyBatch, Policy, register


@register
class MustDropCache(Policy):
    """The output-aware cache: a visual key stays only if its token reaches the last layer.

    *Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model*, arXiv 2411.10803.

    Keys are not scored. After prefill the layers from ``layer`` on store the same visual tokens, those that all methods
    inside the language model kept; without such a method it drops nothing.

    Parameters
    ----------
    layer : the first layer that drops keys, a share of the depth or a number. Of 32 layers the authors leave 0 and 1 whole.
    """

    name = "mustdrop-cache"
    summary = "visual keys whose tokens reach the last layer (for use behind methods inside the language model)"
    paper = "arXiv 2411.10803"
    budget = "none"
    default_retain = None
    shared = True
    deferred = True
    by_layer = True
    limits = {"layer": "[0, inf) or [0.0, 1.0]"}

    layer: float = 2 / 32

    def score(self, keys: KeyBatch) -> Tensor:
        """``survivors [B, K]`` -> ``[B, Hkv, K]``: 0 for keys that stay, ``-inf`` for the others."""
        first = layer_at(self.layer, keys.depth)
        score = torch.zeros_like(keys.index, dtype=torch.float32)
        if keys.layer >= first and keys.survivors is not None:
            score = score.masked_fill(~keys.survivors, -torch.inf)
        return score[:, None].expand(-1, keys.keys.shape[1], -1)
