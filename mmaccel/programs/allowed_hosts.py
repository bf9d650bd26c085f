"""The host names that a server accepts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit


def is_allowed(header: str | None, allowed: Sequence[str]) -> bool:
    """Whether a ``Host`` header has an accepted name: ``localhost``, an address, or one of the ``allowed`` patterns.

    Other names are refused because of DNS rebinding: a foreign page could make its own name point here.
    """
    name = ""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or any(fnmatchcase(name, pattern.lower()) for pattern in allowed)
    return True
