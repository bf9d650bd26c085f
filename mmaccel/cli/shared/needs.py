"""Packages that commands and families need and that may not be installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import MmaccelError

#: modules that come with an extra of mmaccel
EXTRAS = {
    "bench": ("matplotlib",),
    "clip": ("open_clip",),
    "demo": ("gradio",),
    "ray": ("ray",),
    "serve": ("httpx", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "tune": ("matplotlib", "optuna"),
}


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'mmaccel[{extra}]'"


def require(extra: str, what: str) -> None:
    """Raise MmaccelError if a package of an extra is not installed; ``what`` needs it."""
    if absent := [name for name in EXTRAS[extra] if find_spec(name) is None]:
        raise MmaccelError(f"{what} needs {', '.join(absent)}, not installed here; run: {install(extra)}")


def require_reader(paths: Iterable[Path]) -> None:
    """Raise MmaccelError if one of ``paths`` is a video file and no package that reads them is installed."""
    from ...media.files import moves
    from ...video.readers import READERS, no_reader, usable

    if any(path.is_file() and moves(path) for path in paths) and not any(map(usable, READERS.values())):
        raise no_reader()


def require_clip(options: Mapping[str, Any]) -> None:
    """Raise MmaccelError if the options of a method name a model of open_clip and that is not installed."""
    for option in ("clip", "clip_model"):
        name = options.get(option)
        # a plain folder is read by transformers
        if isinstance(name, str) and ((Path(name) / "open_clip_config.json").is_file() or ":" in name):
            require("clip", f"{option}={name!r}")


def missing(name: str) -> str | None:
    """The package without which a family cannot be built, where it is not installed."""
    from ...families import families

    family = families()[name]
    installed, needed = (tuple(map(int, number.split(".")[:2])) for number in (version("transformers"), family.since))
    if installed < needed:
        return f"transformers>={family.since}"
    return family.package if family.package is not None and find_spec(family.package) is None else None
