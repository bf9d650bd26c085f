"""DuoAttention: retrieval heads keep all keys, streaming heads the first and the newest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...method import KeyBatch, register
from ...method.calibration import HeadPolicy


@register
class DuoAttention(HeadPolicy):
    """Keep all keys of retrieval heads; streaming heads keep the first ``sinks`` keys and the ``recent`` newest.

    *DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads*, ICLR 2025, arXiv 2410.10819.

    Every KV head has a gate. The threshold is the quantile ``sparsity`` of the gates of all layers, interpolated linearly;
    heads whose gate is below it are streaming heads.

    Parameters
    ----------
    calibration : str, the file that ``mmaccel calibrate`` wrote; by default ``calibration.safetensors`` beside the model's
        weights.
    sparsity : float, the share of streaming heads, half of them as in the paper for models with grouped queries.
    sinks, recent : int, keys that streaming heads keep. 64 and 256 as in the authors' runs.

    Paper and program: the authors train the gates on hidden passkeys for some GPU hours. ``mmaccel calibrate`` measures them
    without gradients, as kvpress does: with the mean query and the mean key of a prompt at every position, how far back the
    last position attends, as the area under the cumulative attention. The prompt is cut when it ends, and is read with all
    keys; keys of the answer stay.
    """

    name = "duoattention"
    summary = "all keys for retrieval heads, as calibrated; sinks and the newest for streaming heads"
    paper = "arXiv 2410.10819"
    uses = ("gates",)
    limits = {"sparsity": "[0, 1]"}

    calibration: str = ""
    sparsity: float = 0.5
    joint: bool = True
    sinks: int = 64
    recent: float = 256

    def score(self, keys: KeyBatch) -> Tensor:
        return self.kept_by(keys.layer, keys.keys.device)[None, :, None].expand(keys.keys.shape[:3])

    def full_heads(self) -> Mapping[int, Tensor]:
        gates = self.figures("gates")
        bar = torch.cat(list(gates.values())).double().quantile(self.sparsity)
        # at 1 there is no retrieval head
        return {layer: (x.double() >= bar) & (self.sparsity < 1) for layer, x in gates.items()}


def reach_back(query: Tensor, key: Tensor, scaling: float, window: int | None) -> Tensor:
    """Measure how far back the last position attends, ``[Hkv]`` float32.

    It is the mean over positions ``j`` of the attention to positions up to ``j``, mean over the query heads of a key head;
    ``query [Hq, D]`` of the last position, ``key [Hkv, S, D]`` of all. ``window`` counts positions back.
    """
    heads, size = key.shape[:2]
    logits = query.float().unflatten(0, (heads, -1)) @ key.float().mT * scaling
    if window is not None:
        logits[..., : max(0, size - window)] = -torch.inf
    return logits.softmax(-1).cumsum(-1).mean((1, 2))
