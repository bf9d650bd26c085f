"""vLLM's model runner V2 on a CPU. Triton has no compiler for its kernels there, so that the interpreter runs them."""

from __future__ import annotations

import os
from types import SimpleNamespace

#: its class
RUNNER = "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


def choose() -> None:
    """Let engines of this process use it. Call it before Triton and vLLM are imported."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton import backends

    # vLLM asks whether Triton can compile for CPUs
    driver = SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=driver)
