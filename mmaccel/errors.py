"""Every error a user can cause: one sentence that names the thing and the remedy."""

from __future__ import annotations

import json


class MmaccelError(ValueError):
    """A recipe, budget, input or model that mmaccel cannot honour.

    Examples
    --------
    >>> accelerate_vlm(model, "divprun")
    Traceback (most recent call last):
    mmaccel.errors.MmaccelError: There is no recipe 'divprun'; did you mean 'divprune'...
    """


class UnsupportedError(MmaccelError):
    """The model, the family or the way it is called lacks something that the recipe needs.

    Examples
    --------
    >>> accelerate_vlm(model, FastV(layer=99))
    Traceback (most recent call last):
    mmaccel.errors.UnsupportedError: layer=99 is out of reach: in this llava model tokens can be dropped before layers 1 to ...
    """


def first_line(error: BaseException) -> str:
    """The first line of an error message, or the name of the error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def no_json(error: Exception) -> str:
    """Reason why a text cannot be read as JSON, in a few words: of a ValueError or RecursionError of :func:`json.loads`."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "no text in UTF-8"
    # what is left are numbers of more digits than Python converts
    return f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "a number is too long"


def short_int(digits: str) -> int:
    """For ``parse_int`` of :func:`json.loads` where numbers are counts or options: no more digits than such a thing has."""
    if len(digits) > 30:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
