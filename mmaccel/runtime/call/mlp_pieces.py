"""MLPs over long sequences in pieces of tokens (mini-sequences, as in MOM, arXiv 2504.12526).

An MLP computes every token by itself, so pieces give what the whole gives, and only one piece has activations of the inner
width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.memory import SMALL, activation_limit
from ...families.language import mlp_of

#: tensors of the inner width that a gated MLP holds at a time
_WIDE = 3


class MlpPieces:
    """The MLPs of one stack of layers. Their forwards are replaced only while a sequence runs that is long enough, so that a
    decode step calls nothing more.

    layers : the stack; those without an MLP of a known name stay as they are.
    experts : experts that compute each token, in layers that have some.
    """

    def __init__(self, layers: Sequence[nn.Module], experts: int = 1) -> None:
        self.mlps = [mlp for layer in layers if (mlp := mlp_of(layer)) is not None]
        self.width = experts * max((_inner_width(mlp) for mlp in self.mlps), default=0)
        #: forwards that run with pieces, and what they replaced
        self._lock, self._users, self._before = threading.Lock(), 0, list[Any]()

    def piece(self, tokens: int, dtype: torch.dtype, device: torch.device) -> int | None:
        """Tokens at a time of a sequence of so many; None for all."""
        each = _WIDE * self.width * dtype.itemsize
        if tokens * each <= SMALL or tokens * each <= (limit := activation_limit(device)):
            return None
        return max(1, limit // each)

    @contextmanager
    def over(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
        """Inside, a sequence of so many tokens runs through the MLPs in pieces, if it is too long for one."""
        if (size := self.piece(tokens, dtype, device)) is None:
            yield
            return
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = [vars(mlp).get("forward") for mlp in self.mlps]
                for mlp in self.mlps:
                    vars(mlp)["forward"] = _in_pieces(mlp.forward, size)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                for mlp, before in zip(self.mlps, self._before, strict=True) if not self._users else ():
                    if before is None:
                        vars(mlp).pop("forward", None)
                    else:
                        vars(mlp)["forward"] = before


def _in_pieces(original: Callable[..., Any], size: int) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        flat = hidden.flatten(0, -2)
        if len(flat) <= size or args or kwargs:
            return original(hidden, *args, **kwargs)
        shaped = hidden.dim() > 2
        outputs = []
        for part in flat.split(size):
            output = original(part[None] if shaped else part)
            if not isinstance(output, Tensor):
                # with figures of routers, which are those of a whole sequence
                return original(hidden)
            outputs.append(output[0] if shaped else output)
        return torch.cat(outputs).view(*hidden.shape[:-1], -1)

    return forward


def _inner_width(mlp: nn.Module) -> int:
    """The widest output of a layer in an MLP; of one whose experts are single tensors, their widest side."""
    # of packed weights, too
    wide: list[Any] = [x.out_features for x in mlp.modules() if hasattr(x, "out_features")]
    return max([*wide, *(max(x.shape[1:]) for x in mlp.parameters() if x.dim() == 3)], default=0)
