"""Base of policies that read the prompt a second time, behind itself."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .keys import Policy


@dataclass(frozen=True)
class Reread:
    """One layer while a stretch of the prompt is read again behind the prompt; nothing of it is stored.

    query : ``[B, Hq, n, D]``, own : ``[B, Hkv, n, D]``, queries and keys of the stretch that is read again, post-RoPE.
    real : ``[B, n]`` bool, False for padding, which is at the end.
    keys : ``[B, Hkv, K, D]``, all that the layer stores. valid : ``[B, Hkv, K]`` bool, those that are no padding.
    stretch : ``[B, Hkv, K]`` bool, the keys of the same stretch when it was read first.
    scaling : the factor of ``q . k``.
    entering : ``[B, n]`` float32, the length of what enters the attention for each query; None unless the policy asks for
        :attr:`RereadPolicy.weighs_output`.
    outgoing : ``[B, Hq, K]`` float32, the length of each value after its query head's part of the output projection; likewise.
    """

    query: Tensor
    own: Tensor
    real: Tensor
    keys: Tensor
    valid: Tensor
    stretch: Tensor
    scaling: float
    entering: Tensor | None = None
    outgoing: Tensor | None = None


class RereadPolicy(Policy):
    """A policy whose :meth:`see` observes the attention of the prompt while it is read again.

    When the prompt is over, the language model reads it once more behind itself, ``stretch`` tokens at a time, each time right
    behind the prompt. What :meth:`see` returns reaches :meth:`score` as ``keys.received``, the largest over all stretches. All
    layers hold the whole prompt until then.
    """

    prompt_only = True
    rereads = True
    limits = {"stretch": "[1, inf)"}

    stretch: int

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: the prompt is read twice."""
        return "reads the whole prompt again before it evicts"

    @property
    def weighs_output(self) -> bool:
        """Whether :attr:`Reread.entering` and :attr:`Reread.outgoing` are to be filled."""
        return False

    @abstractmethod
    def see(self, layer: Reread) -> Tensor:
        """``[B, Hkv, K]`` float32, zero for keys outside the stretch."""


def first_keys(valid: Tensor, count: int) -> Tensor:
    """``[B, Hkv, K]`` bool: the first ``count`` of the ``valid`` keys."""
    return valid & (valid.cumsum(-1) <= count)


def causal(real: Tensor) -> Tensor:
    """``[B, n, n]`` bool: which tokens of a stretch each of them sees."""
    length = real.shape[1]
    return torch.ones(length, length, dtype=torch.bool, device=real.device).tril() & real[:, None]
