"""Patch of vLLM's model runner for models that get positions with their embeddings.

It does so for video pruning of its own, by a flag that its configuration is asked for. The same flag makes it encode clips one
by one, to bound the memory of unreduced clips; :mod:`.model` bounds that itself. And the runner for CPUs never reads it.
"""

from __future__ import annotations

import functools
from typing import Any


def carry_positions(multimodal_config: Any) -> None:
    """Let the runner of this process read positions from embeddings."""
    object.__setattr__(multimodal_config, "is_multimodal_pruning_enabled", _yes)
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._execute_mm_encoder
    if getattr(original, "mmaccel", False):
        return

    @functools.wraps(original)
    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(self.get_model(), "plan", None)
        if not getattr(ours, "keeps_positions", False):
            return original(self, *args, **kwargs)
        self.is_multimodal_pruning_enabled = False
        try:
            return original(self, *args, **kwargs)
        finally:
            self.is_multimodal_pruning_enabled = True

    encode.mmaccel = True  # type: ignore[attr-defined]
    GPUModelRunner._execute_mm_encoder = encode


def _yes() -> bool:
    return True
