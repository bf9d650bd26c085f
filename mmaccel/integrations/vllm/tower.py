"""Taps in vLLM's own vision towers: queries and keys are read where they enter attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ...runtime.call.vision_output import VisionOutput
from ...runtime.tower.taps import Taps


def hook(taps: Taps, layers: list[nn.Module], current: Callable[[], VisionOutput | None]) -> None:
    """Let ``taps`` observe ``layers``; ``current`` returns the encoder call that is running."""
    for number, kinds in taps.layers.items():
        if kinds - {"features"}:
            attention = next(m for m in layers[number].modules() if type(m).__name__ == "MMEncoderAttention")
            taps.numbers[id(attention)] = number
            attention.register_forward_pre_hook(_attention(taps, current), with_kwargs=True)
        if "features" in kinds:
            layers[number].register_forward_hook(_features(taps, number, current))


def _attention(taps: Taps, current: Callable[[], VisionOutput | None]) -> Callable[..., None]:
    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        encoded = current()
        if encoded is None:
            return
        given = dict(zip(("query", "key", "value", "cu_seqlens"), args, strict=False)) | kwargs
        query, key = (_heads(given[name], module.num_heads) for name in ("query", "key"))
        for first, last in _sequences(given.get("cu_seqlens"), query.shape[2]):
            taps.see(encoded, module, query[:, :, first:last], key[:, :, first:last], None, module.scale)

    return see


def _features(taps: Taps, number: int, current: Callable[[], VisionOutput | None]) -> Callable[..., None]:
    def see(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (encoded := current()) is not None:
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            # Qwen's towers have the axis of the batch, of length one, in the middle
            taps.see_features(encoded, number, hidden.transpose(0, 1) if hidden.shape[1] == 1 else hidden)

    return see


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[N, T, H * d]`` or ``[N, T, H, d]`` as ``[N, H, T, d]``."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _sequences(bounds: Tensor | None, length: int) -> Iterable[tuple[int, int]]:
    """First and last + 1 index of every sequence that is packed into one."""
    at = [0, length] if bounds is None else bounds.tolist()
    return zip(at, at[1:], strict=False)
