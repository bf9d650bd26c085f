"""What is installed, whether it fits together, and which model families are ready.

Exit status 0: mmaccel can run here. 1: something stands in the way; each problem is listed with its remedy. A missing GPU or
optional package is no problem, nor is a GPU for which no kernel can be built: it is listed which sites of a recipe then run
their definition in plain torch, and what helps. Every GPU compiles a few kernels for that, the first time for some seconds.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from .. import transformers_api
from ..errors import UnsupportedError
from .shared.needs import missing
from .shared.options import Json
from .shared.text import nbytes, tell, working

PLACE = 9
HELP = "check this installation"
EXAMPLES = """\
examples:
  mmaccel doctor
  mmaccel doctor --json
"""

#: distribution -> what it is for; the first ones are required
_REQUIRED = ("torch", "torchvision", "transformers", "numpy", "pillow", "typer", "rich")
_OPTIONAL = {
    "triton": "GPU kernels",
    "decord": "video files",
    "av": "video files (PyAV)",
    "torchcodec": "video files, and inside processors",
    "open_clip_torch": "open_clip models",
    "timm": "FastVLM and Perception-LM",
    "gradio": "the demo",
    "uvicorn": "the server",
    "matplotlib": "plots of benchmarks",
}
#: site of a recipe, and the steps behind it -> the operations there that have kernels
_SITES: dict[str, tuple[str, ...]] = {
    "frames": (),
    "encoder": ("best_match",),
    "projector": ("best_match", "max_min", "greedy_dpp"),
    "layers": (),
    "cache": ("importance", "compact", "page_bounds"),
    "codec": ("quantise",),
    "decoding": ("decode_attention", "append"),
}


def run(output: Json = None) -> int:
    """Examine and print."""
    with warnings.catch_warnings(), working("looking at what is installed"):
        warnings.simplefilter("ignore")
        report = examine()
    tell(report, output, lambda: render(report))
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything ``doctor`` knows, as plain data."""
    problems: list[str] = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    for name in _REQUIRED:
        if versions[name] is None:
            problems.append(f"{name} is missing; run: pip install {name}")
    notes = _transformers(problems) if versions["transformers"] is not None else []
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
        "refused": _refused(),
        "video": _video(),
        "vllm": _vllm(problems),
        "notes": notes,
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _transformers(problems: list[str]) -> list[str]:
    """What to know about the installed transformers; what it lacks goes to the ``problems``."""
    if (old := transformers_api.too_old()) is not None:
        problems.append(old)
        return []
    try:
        transformers_api.check()
    except UnsupportedError as error:
        problems.append(str(error))
    except Exception:  # transformers itself does not import, which the families say
        return []
    newer = transformers_api.untested()
    return [] if newer is None else [newer]


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


def _vllm(problems: list[str]) -> dict[str, Any] | None:
    """Whether recipes can be served by vLLM, and for which of its architectures; None where it is not installed."""
    try:
        from ..integrations.vllm import ARCHITECTURES, tested, version, versions
    except ImportError:  # without torch nothing of ours imports
        return None
    if (found := version()) is None:
        return None
    points = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    allowed = os.environ.get("VLLM_PLUGINS")
    active = "mmaccel" in points and (allowed is None or "mmaccel" in allowed.split(","))
    if not tested():
        problems.append(f'vLLM {found} is not one that recipes are tested with; run: pip install "{versions()}"')
    elif not active:
        why = "mmaccel is not installed" if "mmaccel" not in points else f"VLLM_PLUGINS={allowed} leaves it out"
        problems.append(f"vLLM does not load the plug-in mmaccel ({why}); install mmaccel, or name it in VLLM_PLUGINS.")
    return {"version": found, "tested": tested(), "active": active, "architectures": list(ARCHITECTURES)}


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
            {
                "device": f"cuda:{i}",
                "name": about.name,
                "memory": about.total_memory,
                "capability": f"{about.major}.{about.minor}",
                **_paths(torch.device("cuda", i)),
            }
        )
    return found


def _paths(device: Any) -> dict[str, Any]:
    """Whether kernels build on a device, and what every site runs there: ``kernel`` or ``definition``, and why."""
    try:
        from mmaccel_kernels.launch import obstacle
        from mmaccel_kernels.trial import trials
    except ImportError:  # run from a checkout that is not installed
        return {"kernels": False, "why_not": "mmaccel is not installed", "sites": {}}
    keeps, tried = obstacle(device), trials(device)
    return {
        "kernels": keeps is None,
        "why_not": None if keeps is None else str(keeps),
        "sites": {site: _taken(operations, tried, keeps is None) for site, operations in _SITES.items()},
    }


def _taken(operations: tuple[str, ...], tried: Mapping[str, object], builds: bool) -> dict[str, str]:
    """What a site runs, and why; ``tried`` says what keeps the kernel of every operation, or None."""
    if not operations or not builds:
        return {"path": "definition", "why": "no kernel builds" if operations else "this site has no kernels"}
    failed = {name: tried[name] for name in operations if tried[name] is not None}
    path = "kernel" if not failed else "definition" if len(failed) == len(operations) else "kernel and definition"
    why = "; ".join(f"{name}: {keeps}" for name, keeps in failed.items())
    return {"path": path, "why": why or ", ".join(operations)}


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

        from ..families import families
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        problems.append(f"transformers cannot be imported ({first}).")
        return {}
    ready: dict[str, str] = {}
    for family in families().values():
        needed = missing(family.name)
        for kind in family.model_types:
            if needed is not None and needed.startswith("transformers"):
                ready[kind] = f"not ready: needs {needed}"
                continue
            try:
                ready[kind] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[kind]].__name__
            except Exception as error:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                ready[kind] = f"not ready: {first}"
                problems.append(f"The model class of family {kind} cannot be imported ({first}).")
    return ready


def _refused() -> dict[str, str]:
    """Model types that are refused, and why."""
    try:
        from ..families import REFUSED
    except ImportError:  # without torch nothing of ours imports
        return {}
    return dict(REFUSED)


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
        lines.append(
            "GPU             none; models run on the CPU, and every site of a recipe its definition in plain torch"
        )
    for device in report["devices"]:
        about = f"{device['name']}, {nbytes(device['memory'])}, capability {device['capability']}"
        lines.append(f"GPU             {device['device']}  {about}")
        lines.append(
            f"  kernels       {'build and run' if device['kernels'] else 'do not build: ' + device['why_not']}"
        )
        for site, taken in device["sites"].items():
            lines.append(f"  {site:<13} {taken['path']} ({taken['why']})")
    lines.append(
        f"Triton          {'usable' if report['triton']['usable'] else 'not usable here; plain torch is used'}"
    )
    readers = [name for name, usable in report["video"].items() if usable]
    lines.append(f"video readers   {', '.join(readers) or 'none; pip install av (or decord) to read video files'}")
    if (served := report["vllm"]) is not None:
        state = "loads the plug-in mmaccel" if served["active"] else "DOES NOT load the plug-in mmaccel"
        state += "" if served["tested"] else ", and IS NOT a tested version"
        lines.append(f"vLLM            {served['version']} {state}")
        lines += [f"  serves        {name}" for name in served["architectures"]]
    for kind, found in report["families"].items():
        lines.append(f"family          {kind:<17} {found}")
    for kind, why in report["refused"].items():
        lines.append(f"refused         {kind:<17} {why}")
    lines += [f"note            {note}" for note in report["notes"]]
    lines += [f"PROBLEM         {problem}" for problem in report["problems"]]
    ready = sum(not found.startswith("not ready") for found in report["families"].values())
    count = len(report["problems"])
    lines.append(
        f"{ready} of {len(report['families'])} families are ready; "
        + ("all is well." if not count else f"{count} problem{'s' * (count > 1)} to solve.")
    )
    return "\n".join(lines)
