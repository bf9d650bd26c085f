"""A memory that no code of the package knows follows the cache that it is kept with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.kv.cache import CacheState


@dataclass
class Colours:
    """One colour a place, ``[B, n]``."""

    of: Tensor

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        assert on_host.device.type == "cpu"
        self.of = self.of[rows]

    def copy(self) -> Colours:
        return Colours(self.of)

    def crop(self, seen: int) -> None:
        self.of = self.of[:, :seen]

    def rename(self, new: Tensor, held: Tensor) -> None:
        assert new[held].tolist() == list(range(int(held.sum())))
        self.of = self.of[:, held]

    def tensors(self) -> list[Tensor]:
        return [self.of]


def test_a_memory_follows_its_cache() -> None:
    state = CacheState(2)
    keys = torch.randn(2, 1, 6, 4)
    for layer in state.layers:
        layer.update(keys, keys)
    assert state.shared.memory(Colours) is None
    bare, of = state.nbytes(), torch.arange(12).view(2, 6)
    memory = state.shared.keep(Colours(of))
    assert state.shared.memory(Colours) is memory
    assert state.nbytes() == bare + of.nbytes
    restore = state.snapshot()
    for layer in state.layers:
        layer.reorder_cache(torch.tensor([1, 0]))
        layer.crop(-1)
    assert memory.of.tolist() == [[6, 7, 8, 9, 10], [0, 1, 2, 3, 4]]
    stays = torch.tensor([True, False, True, False, True])
    for layer in state.layers:
        layer.evict(stays.expand(2, 1, -1))
    state.rebase()
    assert state.seen == 3 and memory.of.tolist() == [[6, 8, 10], [0, 2, 4]]
    restore()
    assert state.seen == 6 and torch.equal(state.shared.memory(Colours).of, of)
    for layer in state.layers:
        layer.reset()
    assert state.shared.memory(Colours) is None
