"""ZipCache's salient tokens: the attention of a few probes, over how many of them see a key."""

import math

import torch
from torch import Tensor

from ...method import KeyBatch, LayerAttention, Policy, register
from ...method.blocks import row_blocks
from ...method.probes import probing


@register
class ZipCacheTokens(Policy):
    """Keep the keys that some probe queries attend to, normalised by how many of these can see them.

    *ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification*, NeurIPS 2024, arXiv 2405.14256.

    ``s_k = sum over probes and query heads of a key head of A[h, probe, k] / c_k``, where ``c_k`` probes can see key ``k``.
    Probes are the newest ``share`` of the queries and as many that are spread evenly over the others. The paper evicts
    nothing: with ``rest="zip2"`` and the codec ``zipcache-codec``, as in the recipe ``zipcache``, salient keys have 4 bits and
    the others 2.

    ``variant="official"``: ``c_k`` is the number of all queries that can see a key, so that early keys score lower.

    Parameters
    ----------
    share : of the queries of the prompt that are probes at its end, and of those spread over the others; 0.05 as in the
        program.

    Paper and program: the second half of the probes is drawn at random there; here it is spread evenly, so that the same prompt
    has the same probes. The program divides again every 100 steps, by the newest query alone; here each prompt is divided once.
    """

    name = "zipcache-tokens"
    summary = "keys that some probe queries attend to, by how many of them see a key"
    paper = "arXiv 2405.14256"
    default_retain = 0.6
    prompt_only = True
    limits = {"share": "(0, 0.5]"}

    share: float = 0.05

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        most = math.ceil(attention.query.shape[2] * self.share)
        asking = probing(attention, most, lambda length: (length.double() * self.share).ceil().long().clamp(min=1))
        return self.saliency(asking)

    def saliency(self, asking: LayerAttention) -> Tensor:
        """``[B, Hkv, K]`` float32, from the attention of the probes alone."""
        heads, keys = asking.key.shape[1:3]
        total = torch.zeros(len(asking.query), heads, keys, device=asking.key.device)
        seeing = torch.zeros_like(total)
        for start, stop in row_blocks(asking):
            assert asking.visible is not None
            paid = asking.attention(start, stop).nan_to_num(0.0).unflatten(1, (heads, -1))
            total += paid.sum((2, 3))
            seeing += asking.visible[:, :, start:stop].sum(2)
        if self.official:
            return total / (keys - torch.arange(keys, device=total.device))
        return total / seeing.clamp(min=1)

    def score(self, keys: KeyBatch) -> Tensor:
        assert keys.received is not None
        return keys.received
