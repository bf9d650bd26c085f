"""Base of methods inside a vision tower, and their input."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .base import Method, TowerFacts


@dataclass(frozen=True)
class EncoderTokens:
    """The tokens of one layer of a vision tower, after its attention: ``N`` tiles or frames of ``T`` tokens.

    Where the projector joins blocks of patches, whole blocks are merged, and each block is one token here.

    keys : ``[N, T, d]`` float32, the layer's keys, mean over heads; of a block the keys of its patches, concatenated.
    size : ``[N, T]`` float32, how many patches (or blocks) each token represents.
    protected : number of leading tokens (CLS) that take no part.
    depth : the share of the tower's layers that come before this one.
    cls_attention : ``[N, T]`` float32, the attention paid by CLS in this layer, mean over heads; of a block the sum. Only for
        methods with ``needs_cls``.
    """

    keys: Tensor
    size: Tensor
    protected: int = 0
    depth: float = 0.0
    cls_attention: Tensor | None = None


class EncoderMethod(Method):
    """Merging inside the vision tower, between attention and MLP; see :mod:`mmaccel.runtime.tower.encoder_merging`.

    In a vision-language model the budget counts the tokens of a picture or clip that the language model reads, including
    newlines, and is met exactly; in a stand-alone encoder it counts the patches of a picture.
    """

    site = "encoder"
    excludes = {"encoder": "a recipe has at most one method at site 'encoder'"}
    #: proportional attention: a merged token counts as the patches it represents (log of their number is added to the logits)
    proportional: ClassVar[bool] = True
    #: whether :attr:`EncoderTokens.cls_attention` is to be filled
    needs_cls: ClassVar[bool] = False

    def check(self, family: TowerFacts) -> None:
        """As :meth:`Method.check`; the tower may be a stand-alone encoder."""

    def suits(self, family: TowerFacts) -> None:
        """Raise :class:`UnsupportedError` when :meth:`check` does, or tokens cannot merge in the tower."""
        if (why := family.closed or family.whole) is not None:
            raise UnsupportedError(
                f"{self.name} merges tokens between the layers of the vision tower, and that of {family.name} {why}; use "
                "'aim-merge' or another method that merges behind it."
            )
        self.check(family)

    @abstractmethod
    def schedule(self, tokens: int, layers: int, kept: int) -> list[int]:
        """Number of tokens to remove in each of ``layers`` layers, so that ``kept`` of ``tokens`` remain, CLS not counted."""

    def fewest(self, tokens: int, layers: int) -> int:
        """The fewest tokens that :meth:`schedule` can leave of ``tokens``; by default each layer halves them. A language
        model's lower budget is met after the tower."""
        return max(1, -(-tokens // 2**layers))

    @abstractmethod
    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        """``[N, T]`` long: the slot each token flows into; its own for all but ``remove`` of them."""

    def weigh(self, tokens: EncoderTokens, target: Tensor) -> Tensor:
        """``[N, T]`` float32: the weight of each token in the slot ``target [N, T]`` it flows into.

        By default those of a mean, weighted by the number of patches that tokens represent.
        """
        total = torch.zeros_like(tokens.size).scatter_add_(1, target, tokens.size)
        return tokens.size / total.gather(1, target)
