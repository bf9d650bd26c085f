"""Check this installation: versions, devices, kernels, and which model families are ready.

Exit status 0: mmaccel can run here. 1: there are problems; each is listed with its remedy. A missing GPU or optional package is
no problem. For every GPU the command compiles a few kernels, the first time for some seconds, and lists which sites of a recipe
run a kernel and which their definition in plain torch.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from ..core import transformers_api
from ..errors import MmaccelError, UnsupportedError, first_line
from .shared.needs import missing
from .shared.options import Json
from .shared.text import nbytes, tell, working

PLACE = 9
METHODS = False
HELP = "check this installation"
EXAMPLES = """\
examples:
  mmaccel doctor
  mmaccel doctor --json
"""

#: required distributions, and optional ones with what they are for
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
#: operations that have kernels, by site of a recipe
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
    """The report as plain data."""
    problems: list[str] = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    problems += [f"{name} is missing; run: pip install {name}" for name in _REQUIRED if versions[name] is None]
    notes = _transformers(problems) if versions["transformers"] is not None else []
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        problems.append(f"Python {platform.python_version()} is not supported; use 3.11 to 3.13.")
    families, without_flash = _families(problems)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "torchvision_matches_torch": _torchvision(problems),
        "devices": _devices(),
        "triton": _triton(),
        "families": families,
        "without_flash_attention": without_flash,
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
    """Notes about the installed transformers; what it lacks is added to the ``problems``."""
    if (old := transformers_api.too_old()) is not None:
        problems.append(old)
        return []
    try:
        transformers_api.check()
    except UnsupportedError as error:
        problems.append(str(error))
    except Exception:  # transformers itself cannot be imported, which _families reports
        return []
    newer = transformers_api.untested()
    return [] if newer is None else [newer]


def _video() -> dict[str, bool]:
    """Whether each back end of :func:`mmaccel.video.decode` is usable, in the order in which they are tried."""
    try:
        from ..video import READERS, usable
    except ImportError:  # torch is missing
        return {}
    return {name: usable(reader) for name, reader in READERS.items()}


def _vllm(problems: list[str]) -> dict[str, Any] | None:
    """The state of the plug-in for vLLM; None if vLLM is not installed."""
    try:
        from ..integrations.vllm import ARCHITECTURES, known_architectures, tested, version, versions
    except ImportError:  # torch is missing
        return None
    if (installed := version()) is None:
        return None
    points = [point.name for point in metadata.entry_points(group="vllm.general_plugins")]
    allowed = os.environ.get("VLLM_PLUGINS")
    active = "mmaccel" in points and (allowed is None or "mmaccel" in allowed.split(","))
    if not tested():
        problems.append(f'vLLM {installed} is not one that recipes are tested with; run: pip install "{versions()}"')
    elif not active:
        why = "mmaccel is not installed" if "mmaccel" not in points else f"VLLM_PLUGINS={allowed} leaves it out"
        problems.append(f"vLLM does not load the plug-in mmaccel ({why}); install mmaccel, or name it in VLLM_PLUGINS.")
    try:
        served = list(known_architectures())
    except MmaccelError as error:
        served = list(ARCHITECTURES)
        problems.append(str(error))
    return {"version": installed, "tested": tested(), "active": active, "architectures": served}


def _torchvision(problems: list[str]) -> bool:
    """Whether an operator works that is missing when the pair does not match."""
    try:
        import torch
        import torchvision

        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        problems.append(
            f"torch and torchvision do not match ({first_line(error)}); install both from one index: "
            "pip install --force-reinstall torch torchvision"
        )
        return False
    return True


def _devices() -> list[dict[str, Any]]:
    try:
        import torch
    except Exception:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "device": f"cuda:{i}",
            "name": about.name,
            "memory": about.total_memory,
            "capability": f"{about.major}.{about.minor}",
            **_paths(torch.device("cuda", i)),
        }
        for i, about in enumerate(map(torch.cuda.get_device_properties, range(count)))
    ]


def _paths(device: Any) -> dict[str, Any]:
    """Whether kernels can be built for a device, and whether every site runs a ``kernel`` or its ``definition``, and why."""
    try:
        from mmaccel_kernels.launch import obstacle
        from mmaccel_kernels.trial import trials
    except ImportError:  # a checkout that is not installed
        return {"kernels": False, "why_not": "mmaccel is not installed", "sites": {}}
    keeps, tried = obstacle(device), trials(device)
    return {
        "kernels": keeps is None,
        "why_not": None if keeps is None else str(keeps),
        "sites": {site: _taken(operations, tried, keeps is None) for site, operations in _SITES.items()},
    }


def _taken(operations: tuple[str, ...], tried: Mapping[str, object], builds: bool) -> dict[str, str]:
    """What a site runs, and why; ``tried`` has for every operation the obstacle to its kernel, or None."""
    if not operations or not builds:
        return {"path": "definition", "why": "no kernel builds" if operations else "this site has no kernels"}
    failed = {name: tried[name] for name in operations if tried[name] is not None}
    path = "kernel" if not failed else "definition" if len(failed) == len(operations) else "kernel and definition"
    why = "; ".join(f"{name}: {keeps}" for name, keeps in failed.items())
    return {"path": path, "why": why or ", ".join(operations)}


def _triton() -> dict[str, bool]:
    try:
        import_module("triton")
        imports = True
    except Exception:  # a broken shared library raises errors of any type
        imports = False
    try:
        from mmaccel_kernels import available
    except ImportError:  # a checkout that is not installed
        return {"imports": imports, "usable": False}
    return {"imports": imports, "usable": available()}


def _families(problems: list[str]) -> tuple[dict[str, str], list[str]]:
    """The model class of every family in this transformers, or why it cannot be imported; and the model types that
    transformers does not load with flash attention."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        from ..families import families
    except Exception as error:
        problems.append(f"transformers cannot be imported ({first_line(error)}).")
        return {}, []
    ready: dict[str, str] = {}
    without_flash: list[str] = []
    for family in families().values():
        needed = missing(family.name)
        for kind in family.model_types:
            if needed is not None and needed.startswith("transformers"):
                ready[kind] = f"not ready: needs {needed}"
                continue
            try:
                model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[kind]]
                ready[kind] = model.__name__
                without_flash += [] if model._supports_flash_attn else [kind]
            except Exception as error:
                ready[kind] = f"not ready: {first_line(error)}"
                problems.append(f"The model class of family {kind} cannot be imported ({first_line(error)}).")
    return ready, without_flash


def _refused() -> dict[str, str]:
    try:
        from ..families import REFUSED
    except ImportError:  # torch is missing
        return {}
    return dict(REFUSED)


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    rows = [("python", f"{report['python']}  ({report['platform']})")]
    for name, version in report["versions"].items():
        rows.append((name, (version or "not installed") + (f"  ({_OPTIONAL[name]})" if name in _OPTIONAL else "")))
    rows.append(("torchvision", f"{'matches' if report['torchvision_matches_torch'] else 'DOES NOT match'} torch"))
    if not report["devices"]:
        rows.append(("GPU", "none; models run on the CPU, and every site of a recipe its definition in plain torch"))
    for device in report["devices"]:
        about = f"{device['name']}, {nbytes(device['memory'])}, capability {device['capability']}"
        rows.append(("GPU", f"{device['device']}  {about}"))
        rows.append(("  kernels", "build and run" if device["kernels"] else "do not build: " + device["why_not"]))
        rows += [(f"  {site}", f"{taken['path']} ({taken['why']})") for site, taken in device["sites"].items()]
    rows.append(("Triton", "usable" if report["triton"]["usable"] else "not usable here; plain torch is used"))
    readers = [name for name, usable in report["video"].items() if usable]
    rows.append(("video readers", ", ".join(readers) or "none; pip install av (or decord) to read video files"))
    if (vllm := report["vllm"]) is not None:
        state = "loads the plug-in mmaccel" if vllm["active"] else "DOES NOT load the plug-in mmaccel"
        state += "" if vllm["tested"] else ", and IS NOT a tested version"
        rows += [("vLLM", f"{vllm['version']} {state}"), *(("  serves", name) for name in vllm["architectures"])]
    for kind, state_of_family in report["families"].items():
        sdpa = "; transformers refuses flash attention, load it with sdpa" * (kind in report["without_flash_attention"])
        rows.append(("family", f"{kind:<17} {state_of_family}{sdpa}"))
    rows += [("refused", f"{kind:<17} {why}") for kind, why in report["refused"].items()]
    rows += [("note", note) for note in report["notes"]]
    rows += [("PROBLEM", problem) for problem in report["problems"]]
    ready = sum(not state_of_family.startswith("not ready") for state_of_family in report["families"].values())
    count = len(report["problems"])
    state = f"{count} problem{'s' * (count > 1)} to solve." if count else "all is well."
    summary = f"{ready} of {len(report['families'])} families are ready; {state}"
    return "\n".join([*(f"{name:<15} {text}" for name, text in rows), summary])
