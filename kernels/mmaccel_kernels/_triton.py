"""Triton where there is one. Without it kernels stay plain functions that nobody launches."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(function: Any = None, **options: Any) -> Any:
        """The function as it is."""
        return jit if function is None else function


__all__ = ["jit", "tl", "triton"]
