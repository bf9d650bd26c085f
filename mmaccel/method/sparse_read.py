"""Base of sparse reading: nothing is dropped, and every decode step chooses in each layer which visual keys to read."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from mmaccel_kernels.best import best_units
from torch import Tensor

from ..errors import MmaccelError
from .keys import KeyBatch, Policy
from .results import check_numbers, check_tensor, on_host

#: visual keys that belong together: those of a picture or clip, of a frame, or of a row of its grid
GroupsBy = Literal["picture", "frame", "row"]


@dataclass(frozen=True)
class KeyUnits:
    """Visual keys of one layer in units of ``page`` consecutive keys; a step reads a unit as a whole or not at all.

    keys : ``[B, Hkv, P, page, D]``, by place; meaningless where there is none.
    there : ``[B, 1 or Hkv, P, page]`` bool; a short last page ends in False, and so do rows and heads that store fewer.
    scaling : the factor of ``q . k`` in attention.
    noted : what :meth:`ReadingPolicy.note_queries` returned for the last prompt; None where it is not called.
    group : ``[B, 1 or Hkv, P]`` int32, the number of every unit's picture, frame or row, see :attr:`ReadingPolicy.groups_by`,
        counted from 0 in each row and head; None where it does not ask. groups : how many there are at most.
    """

    keys: Tensor
    there: Tensor
    scaling: float
    noted: Tensor | None = None
    group: Tensor | None = None
    groups: int = 0


@dataclass(frozen=True)
class Observed:
    """Queries of a layer at the end of a prompt, and its units.

    queries : ``[B, Hq, W, D]``, the last ``W = min(window, new tokens)``, post-RoPE. seen : ``[B, W]`` bool, those that are no
        padding.
    summary : see :meth:`ReadingPolicy.summarise`. gone : see :class:`ReadStep`.
    scaling : the factor of ``q . k`` in attention.
    """

    queries: Tensor
    seen: Tensor
    summary: Mapping[str, Tensor]
    gone: Tensor
    scaling: float


@dataclass(frozen=True)
class ReadStep:
    """Input of one decode step in one layer. All queries and keys are post-RoPE.

    query : ``[B, Hq, D]``, of the new token.
    keys : ``[B, Hkv, K, D]``, all that are stored, in any order.
    slots : ``[B, 1 or Hkv, P, page]`` int32, where the keys of every unit stand among them; -1 for none. gone : ``[B, 1 or
        Hkv, P]`` bool, units without any key.
    summary : what :meth:`ReadingPolicy.summarise` returned for this layer.
    carried : what :meth:`ReadingPolicy.pick` returned in the last step; empty in the first.
    each : consecutive units that are read together, as one is packed with the others; mostly 1.
    count : ``[B, 1 or Hkv]`` int32, how many units, or runs of ``each``, are to be read. most : the largest of them.
    all_there : whether every unit of every row and head has all its keys.
    even : whether that is so, and all rows and heads read ``most``.
    level : ``[B]`` or ``[B, thresholds]``, what :meth:`ReadingPolicy.level` returned for the last prompt; None without a
        ``window``.
    scaling : the factor of ``q . k`` in attention.
    """

    query: Tensor
    keys: Tensor
    slots: Tensor
    gone: Tensor
    summary: Mapping[str, Tensor]
    carried: Mapping[str, Tensor]
    each: int
    count: Tensor
    most: int
    all_there: bool
    even: bool
    level: Tensor | None
    scaling: float


class Picked(NamedTuple):
    """The units that a step reads: ``units [B, 1 or Hkv, n]`` int32, of which there are ``counts [B, 1 or Hkv]`` int32."""

    units: Tensor
    counts: Tensor


@dataclass(frozen=True, kw_only=True)
class ReadingPolicy(Policy):
    """A policy of which :meth:`rate` ranks the visual keys, or pages of them, for the query of every decode step.

    All keys stay stored, and a prompt reads everything. A decode step reads, in every layer from ``layer`` on, the best
    visual keys of every KV head within the budget, and all text: prompt, question, and what was generated. ``retain`` is the
    share of the visual keys that is read; a count is a count for every picture, as the budgets of the papers are. What a codec
    has packed is chosen by packed pages where :attr:`summarises` says so, at least one, and read with any text in them. With
    ``sinks`` and ``recent`` the visual keys at the start and at the end of the last prompt are always read, within the budget.

    Parameters
    ----------
    layer : the first layer that chooses, a number or a share of the depth; those before it read everything.
    """

    chooses_by_layer = True
    recalls = True
    #: every KV head reads the keys that are best for it
    mixes_heads = False
    #: whether :meth:`pick` may leave out units though all are :meth:`wanted`
    partial: ClassVar[bool] = False
    #: whether a layer chooses by the query that the input of the layer before promises, so that keys are known a layer ahead
    ahead: ClassVar[bool] = False
    limits = {"layer": "[0, inf) or [0.0, 1.0]"}

    layer: float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        how = (self.layer_budget, self.head_budget, self.compact)
        if self.scheduled or how != ("uniform", "uniform", "evict") or self.growth:
            raise MmaccelError(
                f"{self.name} drops nothing; leave out layer_budget, head_budget, compact, every, cap, growth and age."
            )
        if self.joint or self.neighbours or self.protect or self.text_policy:
            raise MmaccelError(f"{self.name} reads all text; leave out joint, neighbours, protect and text_policy.")

    # --- for methods to fill in -----------------------------------------------------------------------------------
    @property
    def unit(self) -> int:
        """Number of consecutive visual keys that are read as a whole."""
        return 1

    @property
    def by_piece(self) -> bool:
        """Whether pieces of a prompt choose the keys of earlier pieces that they read, by the mean of their queries."""
        return False

    @property
    def noted(self) -> int:
        """Number of a prompt's last queries that :meth:`note_queries` sees; 0 if it is not to be called."""
        return 0

    @property
    def groups_by(self) -> GroupsBy | None:
        """The kind of groups that :attr:`KeyUnits.group` tells apart; None if it is not needed."""
        return None

    @property
    def summarises(self) -> bool:
        """Whether :meth:`summarise` is to be called. A step looks at no key before it has chosen then: what is packed is chosen
        by packed pages, each as good as its best unit, and only these are read."""
        return type(self).summarise is not ReadingPolicy.summarise

    def summarise(self, units: KeyUnits) -> dict[str, Tensor]:
        """Summary that :meth:`rate` looks at instead of all keys, ``[B, ...]`` each; it is kept with the cache, and made again
        when visual keys were added, packed or forgotten. By default nothing."""
        return {}

    @property
    def thresholds(self) -> int:
        """Number of thresholds that :meth:`level` returns for every row."""
        return 1

    def level(self, layers: Sequence[Observed], share: Tensor) -> Tensor:
        """``[B]``, or ``[B, thresholds]`` where that is more than one: thresholds over all ``layers`` that choose, by what the
        prompt's last ``window`` queries see in them, where ``share [B]`` of the visual keys is to be read. Called at the end of
        a prompt for policies with a ``window``."""
        raise NotImplementedError

    def note_queries(self, queries: Tensor, seen: Tensor) -> Tensor:
        """``[B, ...]``: a summary of the prompt's last :attr:`noted` ``queries [B, Hq, W, D]`` of a layer, which reaches
        :meth:`summarise`; those that are not ``seen [B, W]`` are padding."""
        raise NotImplementedError

    @abstractmethod
    def rate(self, step: ReadStep) -> Tensor:
        """``[B, 1 or Hkv, P]`` float: units of higher rating are read; meaningless where there is none."""

    def wanted(self, count: Tensor, there: Tensor) -> Tensor:
        """Number of units that are read where ``count`` of the ``there`` keys may be, long, all of one shape."""
        return torch.minimum(count, there)

    def pick(self, step: ReadStep) -> tuple[Picked, dict[str, Tensor]]:
        """The units that are read, and what the next step is given as ``carried``, ``[B, ...]`` each. By default the best by
        :meth:`rate`, of equal ones the first."""
        rows, _, units = step.gone.shape
        ratings = check_tensor(self, "rate()", self.rate(step), "float", (rows, None, units), step.keys)
        if on_host(ratings):
            check_numbers(self, "rate()", ratings, None if step.all_there else ~step.gone)
        return best(ratings, step), {}

    # --- what all of them share -----------------------------------------------------------------------------------
    def score(self, keys: KeyBatch) -> Tensor:
        """Zero for all keys: everything stays."""
        return torch.zeros(keys.keys.shape[:3], device=keys.keys.device)


def best(ratings: Tensor, step: ReadStep, least: Tensor | None = None) -> Picked:
    """The units of highest ``ratings [B, 1 or Hkv, P]``, of equal ones the first, as many as are to be read; none that is rated
    lower than ``least [B]``."""
    if step.even and step.each == 1 and least is None and on_host(ratings):
        # a stable sort, as ``best_units`` has it
        units = ratings.sort(dim=-1, descending=True, stable=True).indices[..., : step.most].sort(dim=-1).values
        return Picked(units.int(), step.count.expand(units.shape[:2]))
    gone = None if step.all_there else step.gone
    return Picked(*best_units(ratings, step.count, step.most, each=step.each, gone=gone, least=least))


def keep_for(picked: Picked, step: ReadStep, steps: int) -> tuple[Picked, dict[str, Tensor]]:
    """Keep the units that every row chose, ``picked``, for so many ``steps``; returns those to read, and what is carried to the
    next step."""
    if steps == 1:
        return picked, {}
    units, counts, before = *picked, step.carried
    age = torch.zeros(len(units), 1, dtype=torch.int32, device=units.device)
    if before:
        age = (before["age"] + 1) % steps
        new = age == 0
        units = torch.where(new[..., None], units, before["units"])
        counts = torch.where(new, counts, before["counts"])
    return Picked(units, counts), {"units": units, "counts": counts, "age": age}


def by_kv_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hq, ...]`` -> ``[B, Hkv, Hq / Hkv, ...]``: query heads beside the KV head that they read."""
    return x.unflatten(1, (heads, -1))


def agree(ratings: Tensor, reduce: str) -> Tensor:
    """``[B, Hkv, g, P]`` -> ``[B, Hkv, P]``: ratings of a KV head, the ``max`` or ``mean`` of its query heads."""
    return ratings.amax(2) if reduce == "max" else ratings.mean(2)
