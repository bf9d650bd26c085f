"""Provenance of figures: command, date, machine and versions, the same way beside every figure."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ...core.version import __version__


def command(*program: str, arguments: Sequence[str] | None = None) -> str:
    """The command line, to be typed again; of absolute paths only the name is kept, since folders of one machine mean nothing
    elsewhere. ``arguments`` are by default those of this process."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(Path(part).name if Path(part).is_absolute() else part for part in (*program, *given))


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()


def also(before: str | None, now: str) -> str:
    """The date or version of earlier rows of a report, and that of rows made now, if it is another one."""
    known = before.split(" and ") if before else []
    return " and ".join(dict.fromkeys((*known, now)))


def processor(device: str = "cpu") -> str:
    """The name of the GPU, or the architecture of the CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    return platform.machine()


def versions(packages: Iterable[str] = ("torch", "transformers", "mmaccel")) -> dict[str, str]:
    """Versions of Python and packages; of those that are loaded, what they call themselves (torch names its CUDA there)."""
    known = {"python": platform.python_version()}
    for name in packages:
        loaded = getattr(sys.modules.get(name), "__version__", None)
        known[name] = __version__ if name == "mmaccel" else str(loaded or version(name))
    return known
