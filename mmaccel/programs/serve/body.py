"""JSON of a request, parsed in bounded time and memory.

Parsing holds Python's global lock, so nothing large is parsed: long ``data:`` addresses are cut out first, and the rest must be
small, in bytes and in values. Values are counted on bytes, in C.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...errors import no_json, short_int
from .errors import Refused

#: bytes of a body without its long ``data:`` addresses, and objects, lists and items of lists in it
TEXT, VALUES = 16 << 20, 200_000
#: bytes from which a ``data:`` address is long, and how many are cut out
_LONG, _ADDRESSES = 4096, 64
_START = b'"data:'
#: base 64 has more characters between two escapes
_LEAST = 16
#: escapes of JSON in an address
_ESCAPES = {b"\\/": b"/", b"\\n": b"\n", b"\\r": b"\r", b"\\t": b"\t"}


def parse(body: bytes) -> tuple[Any, Mapping[str, str]]:
    """The value of a body, in which strings that are long ``data:`` addresses are replaced by keys of the mapping. Raises
    Refused if it is no JSON, or larger than is read here."""
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
    """The body with names in place of its long ``data:`` addresses, and the addresses by name."""
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
        # an escaped quote does not begin a string
        begins = end - begin > _LONG and body[begin - 1 : begin] != b"\\"
        address = _plain(body[begin + 1 : end]) if begins else None
        if address is not None:
            name = f"data:{nonce}{len(addresses)}"
            addresses[name] = address
            pieces += [view[done : begin + 1], name.encode()]
            done = end
    return b"".join([*pieces, view[done:]]), addresses


def _plain(text: bytes) -> str | None:
    """The string that a JSON ``text`` holds; None if it has characters that addresses do not have."""
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
    # many of them may be inside strings
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if text.count(b'"') > 4 * VALUES:
        return True
    outside = b"".join(text.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{"))) > VALUES
