"""Memory that the activations of one step may take."""

from __future__ import annotations

import torch

#: activations of so many bytes are never split; and the bound on devices whose free memory is not asked for
SMALL, FIXED = 64 << 20, 2 << 30


def activation_limit(device: torch.device) -> int:
    """Bytes that activations may take at once on a device: a quarter of what is free on CUDA, 2 GiB elsewhere."""
    if device.type != "cuda":
        return FIXED
    free, _ = torch.cuda.mem_get_info(device)
    # what torch keeps for its next tensors is free, too
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(SMALL, free // 4)
