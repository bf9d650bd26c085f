"""What a CUDA graph does, on a CPU: the operations of a step with the tensors they had, and nothing of what the host knew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Notes every operation; what one writes to is put back when the recording is over, since a graph is recorded undone."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        schema = func._schema
        written = [
            kwargs.get(argument.name, args[at] if at < len(args) else None)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for x in tree_leaves(written):
            if isinstance(x, Tensor):
                self.before.setdefault(id(x), (x, x.clone()))
        out = func(*args, **kwargs)
        if written or not any(r.alias_info is not None for r in schema.returns):
            # a view is of what the graph has written already
            made = [] if written else [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.operations.append((func, args, kwargs, made))
        return out

    def put_back(self) -> None:
        """Undo what was done."""
        for x, before in reversed(self.before.values()):
            x.copy_(before)

    def replay(self) -> None:
        """Do all of it again, to the same tensors."""
        for func, args, kwargs, made in self.operations:
            out = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, out if made else [], strict=True):
                old.copy_(new)


def record(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Stands for :func:`mmaccel.runtime.graphs.replay.record`."""
    recorder = Recorder()
    try:
        with recorder:
            output = step()
    finally:
        recorder.put_back()
    return recorder.replay, output
