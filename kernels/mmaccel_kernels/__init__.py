"""GPU kernels of mmaccel, and the plain definitions they are measured against.

Every operation is a folder: ``naive.py`` is its definition in plain torch, which is the specification, ``triton.py`` its Triton
kernel, and the folder itself (``__init__.py``) the function that is called, which says what it takes and refuses what it does
not; :mod:`.launch` chooses between the two by device. What is no operation has no such pair: :mod:`.pages` is how packed keys
and values are stored, :mod:`.greedy` what two selections share, and :mod:`.copies` runs in plain torch everywhere.

This package knows torch and Triton, and nothing of transformers or mmaccel. It imports where Triton is missing; then every
operation runs its plain definition.
"""

from __future__ import annotations


def available() -> bool:
    """Whether Triton kernels run on some GPU here; each is asked once whether one builds."""
    import torch

    from .launch import obstacle

    return any(obstacle(torch.device("cuda", i)) is None for i in range(torch.cuda.device_count()))


__all__ = ["available"]
