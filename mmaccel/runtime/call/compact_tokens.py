"""The tokens that are left in one run of a vision tower, and the full grid that they represent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Subsequence:
    """A part of a packed sequence of frames.

    place : ``[S]`` long, ascending, the tokens of the whole sequence ``[S0]`` that are in it.
    """

    def __init__(self, place: Tensor) -> None:
        self.place = place
        #: results by identity of their argument: layers are given the same tensors, and lengths wait for the device
        self._known: list[tuple[Tensor, Any]] = []

    def _once(self, given: Tensor, compute: Callable[[], T]) -> T:
        for known, result in self._known:
            if known is given:
                kept: T = result
                return kept
        self._known.append((given, computed := compute()))
        return computed

    def bounds(self, given: Tensor) -> Tensor:
        """Bounds of frames or windows ``[n + 1]`` among the tokens that are left; empty ones are gone."""
        at = self.place
        return self._once(given, lambda: torch.searchsorted(at, given.to(at)).to(given.dtype).unique_consecutive())

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a layer that follow the tokens; a tower without boundaries has a mask, which its attention
        is not given."""
        changed: dict[str, Any] = {}
        if "cu_seqlens" in given:
            changed["cu_seqlens"] = self.bounds(given["cu_seqlens"])
        # towers with learned positions add them in front
        if "position_embeddings" in given:
            changed["position_embeddings"] = self.rotary(given["position_embeddings"])
        return changed

    def rotary(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Rotary positions ``[S0, d]`` of the tokens that are left."""
        return self._once(given[0], lambda: tuple(x[self.place] for x in given))


class CompactTokens(ABC):
    """The tokens that are left of the ``S0`` of a run, CLS tokens included, counted in one flat sequence, tile after tile.

    owner : ``[S0]`` long, the remaining token that each original token is part of, or is predicted from.
    place : ``[S]`` long, the original token whose place each remaining one has; ascending.
    open : whether the tower holds the remaining tokens only, and not the full grid.
    """

    def __init__(self, cls: int, tiles: int, tokens: int, device: torch.device) -> None:
        self.cls, self.tiles = cls, tiles
        self.owner = torch.arange(tokens, device=device)
        self.place = torch.arange(tokens, device=device)
        self.open = True
        self._parts: dict[tuple[str, int], list[Tensor]] = {}
        self._lengths: tuple[Tensor, list[int]] | None = None

    @abstractmethod
    def attention(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """The mask of an attention call with ``query [N, H, 1 or T, d]`` and ``key [N, H, T, d]``, those of the next ``N T``
        tokens."""

    @property
    def real(self) -> Tensor | None:
        """``[tiles, T]`` bool: which of the tokens that the tower holds are no padding; None where none are."""
        return None

    @property
    def held_tiles(self) -> int:
        """Number of tiles that the tower holds now."""
        return self.tiles

    def lengths(self, whole: Sequence[int]) -> list[int]:
        """Tokens that are left of each frame of a packed sequence, of as many as there were of the ``whole``."""
        if self._lengths is None or self._lengths[0] is not self.place:
            ends = torch.tensor(whole).cumsum(0).to(self.place)
            left = torch.searchsorted(self.place, ends).diff(prepend=ends.new_zeros(1))
            self._lengths = self.place, left.tolist()
        return self._lengths[1]

    def restore(self, key: tuple[str, int], values: Tensor) -> Tensor | None:
        """Tapped values ``[N, T - cls, ...]`` on the full grid, ``[N, T0 - cls, ...]``, once all calls of a layer delivered
        theirs; None before."""
        if not self.open:
            return values
        parts = self._parts.setdefault(key, [])
        parts.append(self._there(values))
        flat = torch.cat(parts)
        if len(flat) < len(self.place) - self.cls * self.held_tiles:
            return None
        del self._parts[key]
        # tokens are counted with CLS, values without
        width = len(self.owner) // self.tiles
        rank = (self.place % width >= self.cls).cumsum(0) - 1
        return flat[rank[self.patches(self.owner)]]

    def _there(self, values: Tensor) -> Tensor:
        """``[N, T - cls, ...] -> [n, ...]``, without padding."""
        return values.flatten(0, 1)

    def patches(self, values: Tensor) -> Tensor:
        """``[S0] -> [tiles, T0 - cls]``."""
        return values.view(self.tiles, -1)[:, self.cls :]
