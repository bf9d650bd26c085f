"""By which names a server on this machine may be asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit


def known(header: str | None, allowed: Sequence[str]) -> bool:
    """Whether a ``Host`` header names this machine: ``localhost``, an address, or one of the ``allowed`` patterns.

    A page of somebody else's can have its own name point here (DNS rebinding), and would then be read as if it were ours; an
    address cannot be made to point elsewhere.
    """
    name = ""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or any(fnmatchcase(name, pattern.lower()) for pattern in allowed)
    return True
