"""GPU kernels of mmaccel, and the plain definitions they are measured against.

Every operation has one file with two things: its plain torch definition, which is the specification, and its Triton kernel;
:mod:`.launch` chooses between them by device. This package knows torch and Triton, and nothing of transformers or mmaccel. It
imports where Triton is missing; then every operation runs its plain definition.
"""

from __future__ import annotations


def available() -> bool:
    """Whether Triton kernels run on some GPU here; each is asked once whether one builds."""
    import torch

    from .launch import obstacle

    return any(obstacle(torch.device("cuda", i)) is None for i in range(torch.cuda.device_count()))


__all__ = ["available"]
