"""Packages that families need and that may not be installed."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec


def missing(name: str) -> str | None:
    """The package without which a family cannot be built, where it is not installed."""
    from ...families import families

    family = families()[name]
    installed, needed = (tuple(map(int, number.split(".")[:2])) for number in (version("transformers"), family.since))
    if installed < needed:
        return f"transformers>={family.since}"
    return family.package if family.package is not None and find_spec(family.package) is None else None
