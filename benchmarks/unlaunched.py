"""What a step asks of the host, without what it asks of a device.

Inside ``with unlaunched()`` tensors are on the CPU, and kernels of ours are called up to the launch itself, which does
nothing; attention, and the copy that an ordinary cache makes of all its keys at every step, only allocate. What is left is
Python and PyTorch's dispatch, which a thin model hardly adds anything to. Numbers are of no use; the tokens of an answer are
whatever they are.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest import mock

import mmaccel_kernels
import torch
from mmaccel_kernels import launch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mmaccel.kv import decoding

# by choice: the operations of decode steps; what others find in a prompt is looked up there, so their definitions run
SILENT = {"alike", "append", "best", "chosen", "compact", "decode", "loki", "pack", "quest", "votes"}


class Nothing:
    """Stands for a Triton kernel, and for what is compiled of it."""

    asm = ""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.arg_names = kernel.fn, kernel.arg_names
        # which units are best is what others look up
        self.listed = kernel.fn.__name__ == "_best_units"

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def run(self, *args: Any, **options: Any) -> Nothing:
        """Nothing is launched."""
        if self.listed:
            args[4].zero_()
            args[5].zero_()
        return self


def _attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    # methods look at the features of pictures
    return torch.empty_like(query) if query.shape[2] == 1 else torch.zeros_like(query)


_update = DynamicLayer.update


def _updated(layer: Any, keys: Tensor, values: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """An ordinary cache that grows by a token."""
    if not layer.is_initialized or keys.shape[2] > 1:
        return _update(layer, keys, values, *args, **options)
    shape = (*layer.keys.shape[:2], layer.keys.shape[2] + 1, layer.keys.shape[3])
    layer.keys, layer.values = layer.keys.new_empty(shape), layer.values.new_empty(shape)
    return layer.keys, layer.values


@contextmanager
def unlaunched() -> Iterator[None]:
    """For as long as the block runs."""
    with ExitStack() as stack:
        for owner, name, value in (
            (launch, "works", lambda device: True),
            (decoding, "works", lambda device: True),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (DynamicLayer, "update", _updated),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for info in walk_packages(mmaccel_kernels.__path__, "mmaccel_kernels."):
            module = import_module(info.name)
            for name, thing in list(vars(module).items()):
                if info.name.split(".")[1] not in SILENT:
                    definition = vars(module).get(name.removesuffix("_kernel") + "_definition")
                    if name.endswith("_kernel") and definition is not None:
                        stack.enter_context(mock.patch.object(module, name, definition))
                elif type(thing).__module__.startswith("triton.runtime") and hasattr(thing, "run"):
                    stack.enter_context(mock.patch.object(module, name, Nothing(thing)))
        yield


@contextmanager
def calls() -> Iterator[list[int]]:
    """How many functions were called meanwhile, of Python and of C: the same on every run, however busy the machine is."""
    count = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        count[0] += event in ("call", "c_call")

    # what the collector calls depends on when it last ran
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield count
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


__all__ = ["calls", "unlaunched"]
