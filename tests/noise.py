"""Products of matrices that round as another machine, or another shape, might round them.

with noisy(seed):
    method.reduce(tokens, count)
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "matmul", "linear", "einsum")
_DISTANCES = ("cdist", "_cdist_forward", "_euclidean_dist")


class noisy(TorchDispatchMode):
    """Every entry of a product is moved by up to ``units`` in the last place, or not; which way depends on ``seed`` and on the
    operation and the shapes of its operands, and on nothing else, as on a machine.

    A distance is moved as one that is made of a product, ``|x|^2 - 2 x y + |y|^2``: near zero by far more than its last place.
    """

    def __init__(self, seed: int = 0, units: int = 1) -> None:
        super().__init__()
        self.seed, self.units = seed, units

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and move what it makes."""
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in _PRODUCTS + _DISTANCES or not out.is_floating_point():
            return out
        operands = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        key = repr((self.seed, name, [tuple(x.shape) for x in operands]))
        random = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        way = torch.randint(-self.units, self.units + 1, out.shape, generator=random).to(out.device)
        if name in _DISTANCES:
            lengths = [x.square().sum(-1) for x in operands[:2]]
            unit = torch.finfo(out.dtype).eps * (lengths[0][..., :, None] + lengths[1][..., None, :])
            return (out.square() + way * unit).clamp(min=0).sqrt()
        # a unit in the last place
        unit = torch.nextafter(out.abs(), torch.full_like(out, torch.inf)) - out.abs()
        return torch.where(out.isfinite(), out + way * unit, out)
