"""Base of policies that rate keys by texts behind the cache, and leave means of the evicted keys in it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import MmaccelError, UnsupportedError
from .base import ModelFacts
from .keys import KeyBatch, Policy, moves_keys

#: shared options that a guided policy takes no other value of, with that value
_FIXED = {
    "every": 0,
    "growth": 0,
    "neighbours": 0,
    "age": (),
    "compact": "evict",
    "eviction_error": "none",
    "rest": "evict",
    "close_gaps": False,
    "head_budget": "uniform",
}


@dataclass(frozen=True)
class Fold:
    """Keys of one layer that become means.

    onto : ``[B, n]`` long, the slot whose key becomes the mean of all keys that name it, its own among them; -1 for keys in no
        mean.
    weight : ``[B, n]`` float32, above 0, the weight of each key in its mean.
    behind : whether a mean stands at the position behind the last key that stays, in place of that of its slot.
    """

    onto: Tensor
    weight: Tensor
    behind: bool = False


@dataclass(frozen=True)
class RatedKeys:
    """The keys of one layer when they are chosen, or of layers of one role as rows of a batch, in the order of their places.

    layer, depth : the number of the first layer, and how many there are.
    scores : ``[B, n]`` float32 as :meth:`GuidedPolicy.rate` returned them; infinite for protected keys, and ``-inf`` for those
        that do not compete.
    compete : ``[B, n]`` bool. paid : ``[B, n]`` float32, the attention of the guide. count : ``[B]`` long, how many stay.
    frame : ``[B, n]`` long, a number that all keys of one frame or picture have; -1 for text.
    """

    layer: int
    depth: int
    scores: Tensor
    compete: Tensor
    paid: Tensor
    count: Tensor
    frame: Tensor


class GuidedPolicy(Policy):
    """A policy that rates keys by the attention of guide texts, read behind the cache and not stored.

    When a prompt is over, or holds more than ``cap`` keys a head, the language model reads the texts behind it.
    :meth:`rate` turns the attention of all layers into scores, and :meth:`fold` says which evicted keys leave a mean, which
    takes one of the kept slots. All heads of a layer keep the same keys.

    With ``cap`` keys are evicted when a prompt has been read, never while an answer is decoded.
    """

    shared = True
    guided = True
    excludes = {
        "cache": "a recipe has at most one method at site 'cache'",
        "codec": "keys move to other positions, which packed keys cannot",
    }
    #: whether keys are given other positions than their own
    moves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, value in _FIXED.items():
            if (given := getattr(self, option)) != value:
                raise MmaccelError(
                    f"`{option}` must be {value!r} for {self.name}, which evicts when a prompt was read, got {given!r}; leave "
                    "it out."
                )
        if self.choice("layer_budget")[0] not in ("uniform", "pyramid", "kvpress"):
            raise MmaccelError(
                f"`layer_budget` of {self.name} must be uniform, pyramid or kvpress, got {self.layer_budget!r}: it needs the "
                "budget of a layer before it rates keys."
            )
        if self.cap and not self.joint:
            raise MmaccelError(f"`cap` of {self.name} counts text, too; give joint=True, or leave out cap.")

    def _check_rest(self) -> None:
        """Options that are refused are named later."""

    @property
    def decodes(self) -> bool:
        """No: nothing is evicted while an answer is decoded."""
        return False

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason: texts are read behind the prompt."""
        return "reads guide texts behind the whole prompt"

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`UnsupportedError` where keys cannot be moved to other positions."""
        super().check(family)
        if getattr(family, "model", None) is not None and not moves_keys(family):
            raise UnsupportedError(
                f"{self.name} averages keys at one position, and keys of this {family.name} model cannot be moved to other "
                "positions; use 'infinipot-v' or another policy that leaves no means."
            )

    def bound(self, limit: int | None) -> int | None:
        """The position beyond which the keys of a row get positions behind each other, where the policy :attr:`moves` them;
        None for no such position. ``limit`` is the number of positions of the model, None where it does not say."""
        return None

    @abstractmethod
    def guides(self, template: str) -> tuple[str, ...]:
        """The texts; in place of an empty one the question of the prompt is read. ``template`` is what the chat template of the
        model writes between a question and its answer, empty where there is none."""

    def role(self, layer: int, depth: int) -> str:
        """The kind of keys that a ``layer`` of ``depth`` layers remembers; :meth:`fold` treats layers of one role alike."""
        return ""

    def guide(self, layer: int, depth: int) -> int:
        """The number of the text whose attention rates the keys of ``layer``, of ``depth`` layers."""
        return 0

    def rate(self, paid: Sequence[Tensor], there: Sequence[Tensor]) -> list[Tensor]:
        """Scores of the keys of every layer, ``[B, n]`` float32; by default the attention itself.

        Parameters
        ----------
        paid : of every layer ``[B, n]`` float32, the attention that its guide pays to the keys that compete, mean over heads
            and tokens of the guide; keys are in the order of their places. there : ``[B, n]`` bool, which of these are keys;
            the others are at the end.
        """
        return list(paid)

    @abstractmethod
    def fold(self, keys: RatedKeys) -> Fold | None:
        """The keys of a layer that become means; None for no means. Each mean takes one of the ``count`` slots that stay."""

    def score(self, keys: KeyBatch) -> Tensor:
        """The scores that were made of all layers; everything stays where there are none."""
        if keys.received is None:
            return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)
        return keys.received


def last_true(mask: Tensor) -> Tensor:
    """``[B]`` long: the last slot of ``mask [B, n]`` that is True; meaningless where none is."""
    return mask.shape[1] - 1 - mask.flip(1).byte().argmax(1)
