"""What is installed, whether it fits together, and which model families are ready.

Exit status 0: mmaccel can run here. 1: something stands in the way; each problem is listed with its remedy. A missing GPU or
optional package is no problem.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from importlib import import_module, metadata
from typing import Any

from .text import nbytes

HELP = "check this installation"
EXAMPLES = """\
examples:
  mmaccel doctor
  mmaccel doctor --json
"""

#: distribution -> what it is for; the first ones are required
_REQUIRED = ("torch", "torchvision", "transformers", "numpy", "pillow")
_OPTIONAL = {
    "triton": "GPU kernels",
    "decord": "video files",
    "av": "video files (PyAV)",
    "torchcodec": "video files, and inside processors",
    "open_clip_torch": "open_clip models",
    "gradio": "the demo",
    "matplotlib": "plots of benchmarks",
}
_SUPPORTED = ((5, 17), (5, 24))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``mmaccel doctor`` takes none of its own."""


def run(options: argparse.Namespace) -> int:
    """Examine and print."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = examine()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything ``doctor`` knows, as plain data."""
    problems: list[str] = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    for name in _REQUIRED:
        if versions[name] is None:
            problems.append(f"{name} is missing; run: pip install {name}")
    found = _version("transformers")
    if found is not None and not _SUPPORTED[0] <= tuple(map(int, found.split(".")[:2])) < _SUPPORTED[1]:
        problems.append(f'transformers {found} is not supported; run: pip install "transformers>=5.17,<5.24"')
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        problems.append(f"Python {platform.python_version()} is not supported; use 3.11 to 3.13.")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "torchvision_matches_torch": _torchvision(problems),
        "devices": _devices(),
        "triton": _triton(),
        "families": _families(problems),
        "video": _video(),
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _imports(module: str) -> bool:
    try:
        import_module(module)
    except Exception:  # a broken shared library raises all kinds
        return False
    return True


def _video() -> dict[str, bool]:
    """The back ends of :func:`mmaccel.video.decode`, in the order in which it tries them."""
    try:
        from ..video import READERS, usable
    except ImportError:  # without torch nothing of ours imports
        return {}
    return {name: usable(reader) for name, reader in READERS.items()}


def _torchvision(problems: list[str]) -> bool:
    """The operator that is missing when the pair does not match."""
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        problems.append(
            f"torch and torchvision do not match ({first}); install both from one index: "
            "pip install --force-reinstall torch torchvision"
        )
        return False
    return True


def _devices() -> list[dict[str, Any]]:
    try:
        import torch
    except Exception:
        return []
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(i)
        found.append(
            {"name": about.name, "memory": about.total_memory, "capability": f"{about.major}.{about.minor}"},
        )
    return found


def _triton() -> dict[str, bool]:
    try:
        from mmaccel_kernels import available
    except ImportError:  # run from a checkout that is not installed
        return {"imports": _imports("triton"), "usable": False}
    return {"imports": _imports("triton"), "usable": available()}


def _families(problems: list[str]) -> dict[str, str]:
    """Per family the model class of this transformers, or what went wrong when it was imported."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        from ..families import FAMILIES
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        problems.append(f"transformers cannot be imported ({first}).")
        return {}
    ready: dict[str, str] = {}
    for family in FAMILIES:
        for kind in family.model_types:
            try:
                ready[kind] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[kind]].__name__
            except Exception as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                ready[kind] = f"not ready: {first}"
                problems.append(f"The model class of family {kind} cannot be imported ({first}).")
    return ready


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [f"python          {report['python']}  ({report['platform']})"]
    for name, found in report["versions"].items():
        about = f"  ({_OPTIONAL[name]})" if name in _OPTIONAL else ""
        lines.append(f"{name:<15} {found or 'not installed'}{about}")
    lines.append(
        f"torchvision     {'matches torch' if report['torchvision_matches_torch'] else 'DOES NOT match torch'}"
    )
    if not report["devices"]:
        lines.append("GPU             none; models run on the CPU")
    for device in report["devices"]:
        lines.append(f"GPU             {device['name']}, {nbytes(device['memory'])}, capability {device['capability']}")
    lines.append(
        f"Triton          {'usable' if report['triton']['usable'] else 'not usable here; plain torch is used'}"
    )
    readers = [name for name, usable in report["video"].items() if usable]
    lines.append(f"video readers   {', '.join(readers) or 'none; pip install av (or decord) to read video files'}")
    for kind, found in report["families"].items():
        lines.append(f"family          {kind:<17} {found}")
    lines += [f"PROBLEM         {problem}" for problem in report["problems"]]
    ready = sum(not found.startswith("not ready") for found in report["families"].values())
    count = len(report["problems"])
    lines.append(
        f"{ready} of {len(report['families'])} families are ready; "
        + ("all is well." if not count else f"{count} problem{'s' * (count > 1)} to solve.")
    )
    return "\n".join(lines)
