"""The error for an invalid result of a method, in one sentence."""

from typing import Any, NoReturn

from ..errors import MmaccelError
from .base import Method


def refuse(method: Method | type[Method], call: str, returned: str, wanted: str) -> NoReturn:
    """Raise :class:`MmaccelError`: what ``call`` of a method returned, and what it must return."""
    raise MmaccelError(f"Method {method.name!r} returned {returned} from {call}; it must return {wanted}.")


def article(word: str) -> str:
    """``word`` with "a" or "an" before it."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def described(result: Any) -> str:
    """A result in words."""
    if result is None:
        return "None"
    if isinstance(result, type):
        return f"the class {result.__name__}"
    if not hasattr(result, "dtype") or not hasattr(result, "shape"):
        return f"an object of type {type(result).__name__}"
    where = f" on {result.device}" if hasattr(result, "device") else ""
    return f"{article(str(result.dtype).removeprefix('torch.'))} tensor of shape {tuple(result.shape)}{where}"
