"""Triton where there is one. Without it kernels stay plain functions that nobody launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        """The function as it is."""
        return jit if function is None else function


def has_kernel(x: Tensor) -> bool:
    """Whether operations on ``x`` run their Triton kernel: it is on a GPU (CUDA or HIP) and Triton is installed."""
    return triton is not None and x.device.type == "cuda"


__all__ = ["has_kernel", "jit", "tl", "triton"]
