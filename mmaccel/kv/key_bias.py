"""Biases of key projections: taken out of keys before these are packed, and put back when they are read.

``k = R (W x) + R b`` with the rotation ``R`` of a token's position (RoPE). Where ``b`` is large, as in Qwen2 and Qwen2.5, a
code for ``k`` spends its levels on ``R b``, which needs no code: it follows from the position. So ``k - R b`` is packed, and
``q . R b`` is added to the product with what is packed; both with the same cosines and sines, so that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .index import select_rows

#: cosines and sines of so many tokens before those of a forward that stand at ``[B]``
Earlier = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Rotations:
    """Cosines and sines of the places of a cache, ``[B, n, D / 2]`` each; a :class:`.shared.Memory`.

    They are zero at places whose rotation nobody noted, so that nothing is taken out of the keys there.
    """

    cos: Tensor
    sin: Tensor

    @staticmethod
    def none(like: Tensor) -> Rotations:
        """No places of ``like [B, q, D]``."""
        empty = like[:, :0, : like.shape[-1] // 2]
        return Rotations(empty, empty)

    def note(
        self, cos: Tensor, sin: Tensor, places: Tensor, seen: int, length: int, before: Earlier | None = None
    ) -> None:
        """Note the rotations ``[1 or B, q, D]`` of tokens at ``places [B, q]`` (-1: none) in a forward of so many places behind
        those ``seen``. ``before`` gives those of the last tokens before it, of which nothing was noted: captured steps, and
        turns without pictures in front of the first picture."""
        half, gap = cos.shape[-1] // 2, seen - self.cos.shape[1]
        # padding takes no position
        first = (places >= 0).int().argmax(1)
        missing = before(gap, first) if gap > 0 and before is not None else None
        at = torch.where(places < 0, length, places.long() - seen)[..., None].expand(-1, -1, half)
        for number, (name, x) in enumerate((("cos", cos), ("sin", sin))):
            known = getattr(self, name)[:, :seen]
            if missing is not None:
                known = torch.cat(
                    [known, missing[number][..., :half].to(known.dtype).expand(len(known), -1, -1)], dim=1
                )
            known = pad(known, (0, 0, 0, seen - known.shape[1]))
            new = x.new_zeros(len(places), length + 1, half).scatter(1, at, x[..., :half].expand(len(places), -1, -1))
            setattr(self, name, torch.cat([known, new[:, :length].to(known.dtype)], dim=1))

    def at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, heads, K, D / 2]`` each, float32, of ``places [B, heads, K]``; zero for none."""
        device, places = places.device, places.to(self.cos.device)
        there = (places >= 0) & (places < self.cos.shape[1])
        # a row of zeros for those that are nowhere
        index = torch.where(there, places.long(), self.cos.shape[1])[..., None].expand(*places.shape, self.cos.shape[2])
        cos, sin = (
            pad(x, (0, 0, 0, 1))[:, None].expand(-1, places.shape[1], -1, -1).gather(2, index).float().to(device)
            for x in (self.cos, self.sin)
        )
        return cos, sin

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        select_rows(self, ("cos", "sin"), rows)

    def copy(self) -> Rotations:
        """A copy to change independently."""
        return Rotations(self.cos, self.sin)

    def crop(self, seen: int) -> None:
        """Forget the places from ``seen`` on."""
        self.cos, self.sin = self.cos[:, :seen], self.sin[:, :seen]

    def rename(self, new: Tensor, held: Tensor) -> None:
        """Forget places that are not ``held``, and count the others anew."""
        held = held.to(self.cos.device)
        room = max(0, len(held) - self.cos.shape[1])
        self.cos, self.sin = (pad(x, (0, 0, 0, room))[:, : len(held)][:, held] for x in (self.cos, self.sin))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held."""
        yield from (self.cos, self.sin)


@dataclass(frozen=True)
class KeyBias:
    """Bias of the keys of a layer, ``vector [Hkv, D]`` float32, and the rotations of the places of its cache."""

    vector: Tensor
    rotations: Rotations

    def keys(self, places: Tensor) -> Tensor:
        """The rotated bias of the keys from ``places [B, 1 or Hkv, K]``, ``[B, Hkv, K, D]`` float32; zero for none."""
        cos, sin = self.rotations.at(places)
        first, second = self._vector(places)[:, None].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def products(self, query: Tensor, places: Tensor) -> Tensor:
        """Products of ``query [B, Hq, q, D]`` with the rotated bias of the keys from ``places [B, 1 or Hkv, K]``, float32
        ``[B, Hq, q, K]``."""
        b, hq, q, d = query.shape
        cos, sin = self.rotations.at(places)
        first, second = self._vector(places)[:, None].chunk(2, dim=-1)
        one, two = query.float().reshape(b, len(self.vector), -1, d).chunk(2, dim=-1)
        found = (one * first + two * second) @ cos.mT + (two * first - one * second) @ sin.mT
        return found.reshape(b, hq, q, -1)

    def _vector(self, like: Tensor) -> Tensor:
        return self.vector.to(like.device)
