"""GPU kernels of mmaccel, and the plain definitions they are measured against.

Every operation has one file with three things: its plain torch definition, which is the specification; its Triton kernel;
and the choice between the two by device. This package knows torch and Triton, and nothing of transformers or mmaccel. It
imports where Triton is missing; then every operation runs its plain definition.
"""

from __future__ import annotations

from importlib.util import find_spec


def available() -> bool:
    """Whether Triton kernels can run here: Triton is installed and torch sees a GPU."""
    if find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


__all__ = ["available"]
