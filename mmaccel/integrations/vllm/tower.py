"""Taps in vLLM's own vision towers: queries and keys are read where they enter attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ...runtime.call.vision_output import VisionOutput
from ...runtime.tower.taps import Taps

#: returns the encoder call that is running
Current = Callable[[], VisionOutput | None]


def hook(taps: Taps, layers: list[nn.Module], current: Current) -> None:
    """Let ``taps`` observe ``layers``."""
    for number, kinds in taps.layers.items():
        if kinds - {"features"}:
            attention = next(m for m in layers[number].modules() if type(m).__name__ == "MMEncoderAttention")
            taps.numbers[id(attention)] = number
            attention.register_forward_pre_hook(partial(_see_attention, taps, current), with_kwargs=True)
        if "features" in kinds:
            layers[number].register_forward_hook(partial(_see_features, taps, current, number))


def _see_attention(taps: Taps, current: Current, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (encoded := current()) is None:
        return
    given = dict(zip(("query", "key", "value", "cu_seqlens"), args, strict=False)) | kwargs
    query, key = (_heads(given[name], module.num_heads) for name in ("query", "key"))
    bounds = given.get("cu_seqlens")
    for first, last in pairwise([0, query.shape[2]] if bounds is None else bounds.tolist()):
        taps.see(encoded, module, query[:, :, first:last], key[:, :, first:last], None, module.scale)


def _see_features(taps: Taps, current: Current, number: int, module: nn.Module, args: Any, output: Any) -> None:
    if (encoded := current()) is not None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        # Qwen's towers have the axis of the batch, of length one, in the middle
        taps.see_features(encoded, number, hidden.transpose(0, 1) if hidden.shape[1] == 1 else hidden)


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[N, T, H * d]`` or ``[N, T, H, d]`` as ``[N, H, T, d]``."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
