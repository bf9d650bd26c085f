"""Allowed values of a method's options: intervals, odd numbers, lists of values."""

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

from ..errors import MmaccelError

#: an interval such as ``[1, inf)``; two of them, ``[1, inf) or (0.0, 1.0]``, for an option that is a count (int) or a share
#: (float); ``odd``, ``odd or 0``, ``not empty``; or the values themselves
Limit = str | tuple[Any, ...]
_INTERVAL = re.compile(r"([\[(])(.+), (.+)([\])])")


def check_options(method: Any) -> None:
    """Raise :class:`MmaccelError` for an option of ``method`` outside of its ``Literal`` type or of ``limits``. None passes
    where the type of the option allows it, or is not known."""
    cls: type = type(method)
    for name, limit in limits_of(cls).items():
        value, kind = getattr(method, name), option_types(cls).get(name)
        unset = value is None and (kind is None or type(None) in typing.get_args(kind))
        if not unset and not _allows(limit, value):
            raise MmaccelError(f"`{name}` of {method.name} must be {_words(limit)}, got {value!r}.")


@functools.cache
def option_types(cls: type) -> dict[str, Any]:
    """Types of the attributes of a class by name; none of a class made inside a function, whose types may only exist there."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


@functools.cache
def limits_of(cls: type) -> dict[str, Limit]:
    """The limit of every option of ``cls`` that has one, its bases' included."""
    options = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    types = {name: option_types(cls).get(name) for name in options}
    limits: dict[str, Limit] = {n: typing.get_args(t) for n, t in types.items() if typing.get_origin(t) is Literal}
    for base in reversed(cls.__mro__):
        limits.update(vars(base).get("limits", {}))
    return limits


def _allows(limit: Limit, value: Any) -> bool:
    if isinstance(limit, tuple):
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in limit)
    if limit == "not empty":
        return isinstance(value, Sequence) and len(value) > 0
    if isinstance(value, bool) or not issubclass(type(value), Real):
        return False
    if limit.startswith("odd"):
        return value % 2 == 1 and value > 0 or (value == 0 and limit == "odd or 0")
    left, low, high, right = _parts(limit)[0 if isinstance(value, int) else -1]
    above = value >= float(low) if left == "[" else value > float(low)
    return above and (value <= float(high) if right == "]" else value < float(high))


def _words(limit: Limit) -> str:
    if isinstance(limit, tuple):
        return f"{', '.join(map(repr, limit[:-1]))} or {limit[-1]!r}"
    if not limit.startswith(("[", "(")):
        words = {"odd": "an odd number", "odd or 0": "an odd number or 0", "not empty": "a tuple of one or more values"}
        return words[limit]
    kinds = ("an int, ", "a share (float), ") if " or " in limit else ("",)
    ranges = [
        ("at least " if left == "[" else "greater than ")
        + low
        + ("" if high == "inf" else f" and {'at most' if right == ']' else 'less than'} {high}")
        for left, low, high, right in _parts(limit)
    ]
    return ", or ".join(kind + words for kind, words in zip(kinds, ranges, strict=True))


@functools.cache
def _parts(limit: str) -> list[Any]:
    """``(left, low, high, right)`` of every interval of a limit."""
    return [_INTERVAL.fullmatch(part).groups() for part in limit.split(" or ")]  # type: ignore[union-attr]
