"""What a launch really does, counted in Triton's interpreter: bytes loaded and stored, and operations of its dot products.

with counted() as traffic:
    kernel[grid](...)
assert traffic.loaded == ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch


@dataclass
class Traffic:
    """loaded, stored : bytes, masked elements left out. dots : multiply-adds times two, whole tiles. launches : of kernels."""

    loaded: int = 0
    stored: int = 0
    dots: int = 0
    launches: int = 0


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count everything that interpreted kernels do inside; where kernels run on a GPU, the test is skipped."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        pytest.skip("only the interpreter counts")
    builder, runner, traffic = interpreter.interpreter_builder, interpreter.GridExecutor, Traffic()
    load, store, dot, launch = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_dot,
        runner.__call__,
    )

    def loading(ptrs: Any, mask: Any, *rest: Any) -> Any:
        out = load(ptrs, mask, *rest)
        traffic.loaded += int(np.sum(mask.data)) * out.data.itemsize
        return out

    def storing(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored += int(np.sum(mask.data)) * value.data.itemsize
        return store(ptrs, value, mask, *rest)

    def multiplying(a: Any, b: Any, *rest: Any) -> Any:
        traffic.dots += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(a, b, *rest)

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launches += 1
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loading)
        patch.setattr(builder, "create_masked_store", storing)
        patch.setattr(builder, "create_dot", multiplying)
        patch.setattr(runner, "__call__", launching)
        yield traffic
