"""Methods inside a vision tower, and what they see of one of its layers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Method, TowerFacts


@dataclass(frozen=True)
class EncoderTokens:
    """What a method sees of one layer of a vision tower, behind its attention: ``N`` tiles or frames of ``T`` tokens.

    Where a projector joins blocks of patches, whole blocks merge, and each is one token here.

    keys : ``[N, T, d]`` float32, the layer's keys, mean over heads; of a block the keys of its patches side by side.
    size : ``[N, T]`` float32, how many patches (or blocks) each token stands for.
    protected : leading tokens (CLS) that take no part.
    depth : the share of the tower's layers that lie before this one.
    cls_attention : ``[N, T]`` float32, the attention that CLS pays in this layer, mean over heads; of a block the sum. Only
        for methods with ``needs_cls``.
    """

    keys: Tensor
    size: Tensor
    protected: int = 0
    depth: float = 0.0
    cls_attention: Tensor | None = None


class EncoderMethod(Method):
    """Merging inside the vision tower, between attention and MLP; see :mod:`mmaccel.runtime.encoder`.

    In front of a language model a budget counts the tokens that it reads of a picture or clip, newlines included, and is met
    exactly; of an encoder that stands alone it counts the patches of a picture.
    """

    site = "encoder"
    #: merged tokens weigh as many patches in attention as they stand for (the logarithm is added to the logits)
    proportional: ClassVar[bool] = True
    #: whether :attr:`EncoderTokens.cls_attention` is to be filled
    needs_cls: ClassVar[bool] = False

    def check(self, family: TowerFacts) -> None:
        """As :meth:`Method.check`; the towers may be those of an encoder that stands alone."""

    @abstractmethod
    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """Tokens to remove in each of ``layers`` layers, so that ``kept`` of ``tokens`` remain; CLS does not count."""

    def fewest(self, tokens: int, layers: int) -> int:
        """What :meth:`schedule` can leave of ``tokens`` at least; by default each layer halves them. A language model's budget
        below that is met behind the tower."""
        return max(1, -(-tokens // 2**layers))

    @abstractmethod
    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        """``[N, T]`` long: the slot each token flows into; itself for all but ``remove`` of them."""

    def weigh(self, tokens: EncoderTokens, target: Tensor) -> Tensor:
        """``[N, T]`` float32: with which weight each token enters the slot ``target [N, T]`` it flows into.

        By default means, weighted by the patches that tokens stand for.
        """
        total = torch.zeros_like(tokens.size).scatter_add_(1, target, tokens.size)
        return tokens.size / total.gather(1, target)
