"""Validate what a method returned, so that its mistake is named before it becomes a wrong answer.

Types, shapes, dtypes and devices are checked on every device, which costs nothing. Values (NaN, indices out of range) are
checked where the result is on the CPU: on a GPU the host would wait for them. All checks raise :class:`MmaccelError`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..core.reduction import Links, Reduction, Residual
from .base import Method
from .layers import LayerAttention, LayerMethod
from .preview import PreviewMethod
from .refused import article, described, refuse

R = TypeVar("R")
Kind = Literal["float", "bool", "integer", "int32"]

_WORDS: dict[Kind, str] = {"float": "floating-point", "bool": "bool", "integer": "integer", "int32": "int32"}


def on_host(result: Tensor) -> bool:
    """Whether values can be read without waiting for a device or breaking a compiled graph."""
    return result.device.type == "cpu" and not torch.compiler.is_compiling()


def check_type(method: Method | type[Method], call: str, result: Any, kind: type[R]) -> R:
    """Validate that ``result`` is an instance of ``kind``."""
    if not isinstance(result, kind):
        refuse(method, call, described(result), f"a {kind.__name__}")
    return result


def check_tensor(
    method: Method | type[Method], call: str, result: Any, kind: Kind, shape: Sequence[int | None], like: Tensor | None
) -> Tensor:
    """Validate a tensor: kind of dtype, ``shape`` (None for any length), device of ``like``."""
    if not (isinstance(result, Tensor) and _is(result, kind) and _fits(result, shape)):
        expected = ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        refuse(method, call, described(result), f"{article(_WORDS[kind])} tensor of shape ({expected})")
    if like is not None and result.device != like.device:
        refuse(method, call, described(result), f"a tensor on {like.device}, where its inputs are")
    return result


def check_rows(method: Method, call: str, result: Any, rows: int, like: Tensor) -> Tensor:
    """Validate a tensor with so many rows, on the device of ``like``."""
    if not isinstance(result, Tensor) or result.dim() < 1 or len(result) != rows:
        refuse(method, call, described(result), f"a tensor of {rows} rows")
    if result.device != like.device:
        refuse(method, call, described(result), f"a tensor on {like.device}, where its inputs are")
    return result


def check_figures(
    method: Method | type[Method], call: str, result: Any, shape: Sequence[int | None], like: Tensor
) -> dict[str, Tensor]:
    """Validate a dict of floating-point tensors of this ``shape``, by name."""
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        refuse(method, call, described(result), "a dict of tensors by name")
    return {name: check_tensor(method, call, x, "float", shape, like) for name, x in result.items()}


def figures_of(method: LayerMethod | PreviewMethod, attention: LayerAttention) -> dict[str, Tensor]:
    """Statistics ``[B, K]`` that ``method.observe`` returns for the attention of a layer, validated."""
    key = attention.key
    return check_figures(method, "observe()", method.observe(attention), (key.shape[0], key.shape[2]), key)


def check_count(method: Method, call: str, result: Any, least: int, most: int) -> int:
    """Validate a whole number from ``least`` to ``most``."""
    if type(result) is not int or not least <= result <= most:
        returned = str(result) if isinstance(result, (int, float)) else described(result)
        refuse(method, call, returned, f"a whole number from {least} to {most}")
    return result


def check_within(method: Method, call: str, result: Tensor, least: int, most: Tensor) -> Tensor:
    """Validate on the CPU that all values are at least ``least`` and none is above ``most``, of a shape that broadcasts."""
    if on_host(result) and bool(((result < least) | (result > most)).any()):
        allowed = f"values from {least} to at most {int(most.max())}"
        refuse(method, call, f"values from {int(result.min())} to {int(result.max())}", allowed)
    return result


def check_numbers(method: Method, call: str, result: Tensor, where: Tensor | None = None) -> Tensor:
    """Validate on the CPU that ``result`` has no NaN where ``where`` (bool, of a shape that broadcasts) is true."""
    # nearly always: a sum is NaN if any number is
    if on_host(result) and not math.isfinite(result.sum().item()):
        wrong = result.isnan() if where is None else result.isnan() & where
        if bool(wrong.any()):
            refuse(method, call, f"NaN for {int(wrong.sum())} of {wrong.numel()} values", "numbers (inf is allowed)")
    return result


def check_slots(method: Method, call: str, result: Tensor, count: int, rising: bool = False) -> Tensor:
    """Validate on the CPU that all values are indices below ``count``, strictly ascending in every row if ``rising``."""
    if on_host(result) and result.numel():
        least, most = map(int, result.aminmax())
        if least < 0 or most >= count:
            refuse(method, call, f"indices from {least} to {most}", f"indices from 0 to {count - 1}")
        if rising and not bool((result.diff(dim=-1) > 0).all()):
            refuse(method, call, "indices out of order or more than once", "ascending indices, each once")
    return result


def check_reduction(method: Method, result: Any, valid: Tensor, width: int) -> Reduction:
    """Validate a reduction of the slots ``valid [N, n]`` (bool, on the CPU) of tokens of ``width`` channels, and return
    it on the CPU. The number of kept tokens is not checked."""
    call, result = "reduce()", check_type(method, "reduce()", result, Reduction)
    for name in ("kept", "valid"):
        check_tensor(method, f"reduce() (`{name}`)", getattr(result, name), "bool", valid.shape, None)
    if result.links is not None:
        links = check_type(method, call, result.links, Links)
        for name in ("batch", "slot", "source"):
            check_tensor(
                method, f"reduce() (`links.{name}`)", getattr(links, name), "integer", (len(links.batch),), None
            )
        check_tensor(method, "reduce() (`links.weight`)", links.weight, "float", (len(links.batch),), None)
    if result.residual is not None:
        residual = check_type(method, call, result.residual, Residual)
        shape = check_tensor(method, "reduce() (`residual.slot`)", residual.slot, "integer", (None, None), None).shape
        check_tensor(method, "reduce() (`residual.batch`)", residual.batch, "integer", shape, None)
        check_tensor(method, "reduce() (`residual.values`)", residual.values, "float", (*shape, width), None)
    result = result.cpu()
    if bool((result.kept & ~valid).any()):
        refuse(
            method, call, "a reduction that keeps slots that hold no token", "one whose `kept` is within `tokens.valid`"
        )
    if result.links is not None:
        _check_links(method, result.links, result.kept, valid)
    if result.residual is not None:
        batch, slot = result.residual.batch, result.residual.slot
        check_slots(method, "reduce() (`residual.batch`)", batch, len(valid))
        check_slots(method, "reduce() (`residual.slot`)", slot.clamp(min=0), valid.shape[1])
        check_numbers(method, "reduce() (`residual.values`)", result.residual.values, (slot >= 0)[..., None])
    return result


def _check_links(method: Method, links: Links, kept: Tensor, valid: Tensor) -> None:
    check_slots(method, "reduce() (`links.batch`)", links.batch, len(valid))
    check_slots(method, "reduce() (`links.slot`)", links.slot, valid.shape[1])
    check_slots(method, "reduce() (`links.source`)", links.source, valid.shape[1])
    if not bool(links.weight.isfinite().all()):
        refuse(method, "reduce()", "a reduction with weights that are NaN or infinite", "finite `links.weight`")
    if not bool(kept[links.batch, links.slot].all()):
        refuse(method, "reduce()", "links into slots that are not kept", "links whose `slot` is kept")
    if not bool(valid[links.batch, links.source].all()):
        refuse(method, "reduce()", "links from slots that hold no token", "links whose `source` is in `tokens.valid`")


def _is(x: Tensor, kind: Kind) -> bool:
    if kind == "float":
        return x.is_floating_point()
    if kind == "int32":
        return x.dtype == torch.int32
    return (x.dtype == torch.bool) == (kind == "bool") and not x.is_floating_point() and not x.is_complex()


def _fits(x: Tensor, shape: Sequence[int | None]) -> bool:
    if x.dim() != len(shape):
        return False
    # a loop, as decode steps come here several times a layer
    for n, have in zip(shape, x.shape, strict=True):
        if n is not None and n != have:
            return False
    return True
