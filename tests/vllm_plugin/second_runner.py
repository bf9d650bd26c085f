"""vLLM's model runner V2 on a CPU. Triton has no compiler for its kernels there, so that the interpreter runs them."""

from __future__ import annotations

import os
from types import SimpleNamespace


class _Driver:
    """As much of a driver as vLLM asks for: whether Triton can compile for CPUs, and where it runs."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target() -> SimpleNamespace:
        return SimpleNamespace(backend="cpu")


def choose() -> None:
    """Let engines of this process use it. Call it before Triton and vLLM are imported."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton import backends

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Driver)
