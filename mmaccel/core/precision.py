"""Mixed precision: the dtype of stored keys, and code that runs outside ``torch.autocast``."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_UNCHANGED = nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether ``torch.autocast`` is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Context manager that turns ``torch.autocast`` off on ``device``.

    Methods, and what this package does with their results, state the dtype of every step. Autocast would run their matrix
    products in half precision and return other dtypes than they expect.
    """
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _UNCHANGED


def in_attention_dtype(*states: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (last) in the dtype in which attention computes.

    Under ``torch.autocast`` that is its dtype: rotary embeddings of a float32 model turn queries and keys into float32 while
    the values are half precision, and every attention implementation casts all of them back. Otherwise it is the dtype of the
    values, as flash attention has it for models whose norms are float32.
    """
    values = states[-1]
    dtype = values.dtype
    # autocast leaves float64 alone
    if dtype != torch.float64 and autocasts(values.device):
        dtype = torch.get_autocast_dtype(values.device.type)
    for x in states:
        if x.dtype != dtype:
            return tuple(x.to(dtype) for x in states)
    return states
