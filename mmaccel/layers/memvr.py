"""MemVR: visual tokens are shown again in the MLP of a middle layer when the model is not sure of its next token."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.budget import layer_at
from ..method import RetracingMethod, Shown, register


@register
class MemVR(RetracingMethod):
    """Look at the pictures a second time, dropped tokens included, in forwards whose next token is uncertain.

    *Look Twice Before You Answer: Memory-Space Visual Retracing for Hallucination Mitigation in Multimodal Large Language
    Models*, ICML 2025, arXiv 2410.03577.

    1. Behind every layer ``i`` with ``start < i < end`` the last token is read out: ``u = -sum p ln p / ln(top)`` over the
       softmax ``p`` of its ``top`` highest logits, from 0 to 1.
    2. At the first ``u > threshold`` of a forward the MLP of layer ``i + 1`` becomes ``(1 - ratio) F + ratio s G`` for all its
       tokens: ``F`` is its own output, ``G = (x V^T) V`` for its input ``x`` and the visual tokens ``V``, and ``s`` gives
       ``G`` the mean absolute value of ``F``.

    It drops nothing and makes nothing faster: put it behind a method that drops many, ``["divprune", "memvr"]``. Every read-out
    costs one output head, in each forward; on a CPU there are none behind the one that decides. ``V`` stays with the KV cache,
    as large as one layer's input. ``stats()`` counts the rows of forwards that looked again, ``retraced``.

    ``variant="official"``: ``s`` is one number for all tokens of a row in a forward, as in the authors' program, so that a
    token depends on those that are computed with it; here every token has its own.

    Parameters
    ----------
    threshold : float, at least 0, default 0.75 as in the authors' script; 1 or more never looks again.
    ratio : float from 0 to 1, default 0.12 as in the script for LLaVA-1.5 on MME; 0.28 and 0.32 on other tasks.
    start, end : int from 0 on, or float from 0 to 1, a share of the depth; default 5 and 16 of 32 as in the script. Where a
        shallow model has no layer between two shares, the layer behind ``start`` is read out.
    top : int, at least 2, default 10 as in the program.
    shown : ``"all"`` visual tokens of the conversation, the default, or ``"dropped"``, those that no stage of the recipe has
        kept before this layer, merged ones included.

    Paper and program: the program adds up the entropies of a batch and shows the last picture that any call had, also to
    later ones without a picture; here a row has its own entropy, and its own pictures. Its scales of the weights cancel out.
    """

    name = "memvr"
    summary = (
        "visual tokens, dropped ones too, shown again in the MLP of a middle layer when the next token is uncertain"
    )
    paper = "arXiv 2410.03577"
    limits = {
        "threshold": "[0, inf)",
        "ratio": "[0, 1]",
        "start": "[0, inf) or [0.0, 1.0]",
        "end": "[0, inf) or [0.0, 1.0]",
        "top": "[2, inf)",
    }

    threshold: float = 0.75
    ratio: float = 0.12
    start: float = 5 / 32
    end: float = 16 / 32
    top: int = 10
    shown: Shown = "all"

    def readouts(self, depth: int) -> Sequence[int]:
        """The layers between ``start`` and ``end`` that have one above them."""
        start, end = layer_at(self.start, depth), layer_at(self.end, depth)
        if isinstance(self.start, float) and isinstance(self.end, float) and self.start <= self.end:
            start = max(-1, min(start, depth - 3))
            end = max(end, start + 2)
        return range(start + 1, min(end, depth - 1))

    def uncertainty(self, logits: Tensor) -> Tensor:
        """``[B, V] -> [B]``: the entropy of the ``top`` highest logits, as a share of the largest that it can be."""
        count = min(self.top, logits.shape[-1])
        logs = logits.topk(count, dim=-1).values.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1) / math.log(max(2, count))

    def is_uncertain(self, logits: Tensor) -> Tensor:
        """``[B, V] -> [B]`` bool."""
        return self.uncertainty(logits) > self.threshold

    def retrace(self, hidden: Tensor, output: Tensor, visual: Tensor, shown: Tensor, real: Tensor | None) -> Tensor:
        """The mixture, ``[B, q, D]`` float32."""
        memory = visual.float() * shown[..., None]
        # the length of a token cancels out, and this keeps products in range
        memory = memory / memory.abs().sum((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        own, looked = output.float(), (hidden.float() @ memory.mT) @ memory
        size, its = own.abs().mean(-1, keepdim=True), looked.abs().mean(-1, keepdim=True)
        if self.official:
            counts = torch.ones_like(size) if real is None else real[..., None].to(size)
            size, its = ((x * counts).sum(1, keepdim=True) for x in (size, its))
        scale = torch.where(its > 0, size / its, 0.0)
        return (1 - self.ratio) * own + self.ratio * scale * looked
