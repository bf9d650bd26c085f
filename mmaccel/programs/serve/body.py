"""The JSON of a request, read in bounded time and memory.

Parsing holds Python's global lock, so nothing large is parsed: long ``data:`` addresses are cut out first and put back where
they were, and what is left must be small, in bytes and in values. Counting is done on bytes, in C.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...errors import no_json, short_int
from .errors import Refused

#: bytes of a body beside its long ``data:`` addresses, and objects, lists and items of lists in it
TEXT, VALUES = 16 << 20, 200_000
#: ``data:`` addresses of so many bytes are long, and at most so many are cut out
_LONG, _ADDRESSES = 4096, 64
_START = b'"data:'
#: in base 64 there are more characters between two that are written with a backslash
_LEAST = 16
#: what JSON may write with a backslash in an address
_ESCAPES = {b"\\/": b"/", b"\\n": b"\n", b"\\r": b"\r", b"\\t": b"\t"}


def parse(body: bytes) -> tuple[Any, Mapping[str, str]]:
    """The value of a body, in which strings that are long ``data:`` addresses are replaced by keys of the mapping.

    Raises
    ------
    Refused
        If it is no JSON, or larger than is read here.
    """
    rest, addresses = _cut(body)
    if len(rest) > TEXT:
        raise Refused(
            413,
            f"The request has {len(rest) / 2**20:.1f} MiB beside its data: addresses; at most {TEXT >> 20} MiB are taken.",
            "too_large",
        )
    if _too_many(rest):
        raise Refused(400, f"The request has more than {VALUES:,} values in its lists and objects; send fewer.")
    try:
        return json.loads(rest.decode("utf-8-sig"), parse_int=short_int), addresses
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The request is no valid JSON ({no_json(error)}).") from None


def _cut(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The body with short names for its long ``data:`` addresses, and the addresses by these names."""
    nonce, view = secrets.token_hex(16), memoryview(body)
    pieces: list[Any] = []
    addresses: dict[str, str] = {}
    done = at = 0
    for _ in range(_ADDRESSES):
        begin = body.find(_START, at)
        end = body.find(b'"', begin + len(_START))
        if begin < 0 or end < 0:
            break
        at = end
        # a quote with a backslash before it is in the middle of a text
        begins = end - begin > _LONG and body[begin - 1 : begin] != b"\\"
        address = _plain(body[begin + 1 : end]) if begins else None
        if address is not None:
            name = f"data:{nonce}{len(addresses)}"
            addresses[name] = address
            pieces += [view[done : begin + 1], name.encode()]
            done = end
    return b"".join([*pieces, view[done:]]), addresses


def _plain(text: bytes) -> str | None:
    """The string of which ``text`` is the JSON; None if it has other characters than addresses have."""
    if b"\\" in text:
        if b"\\\\" in text or text.count(b"\\") > len(text) // _LEAST:
            return None
        for written, meant in _ESCAPES.items():
            text = text.replace(written, meant)
        if b"\\" in text:
            return None
    return text.decode("ascii") if text.isascii() else None


def _too_many(text: bytes) -> bool:
    """Whether a JSON text has more than ``VALUES`` objects, lists, items and members."""
    if sum(map(text.count, (b",", b"[", b"{"))) <= VALUES:
        return False
    # many of them may stand in strings
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if text.count(b'"') > 4 * VALUES:
        return True
    outside = b"".join(text.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{"))) > VALUES
