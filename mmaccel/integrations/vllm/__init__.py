"""Plug-in for vLLM: recipes that work before the language model, for pictures and clips.

``vllm serve MODEL --hf-overrides '{"mmaccel": {"recipe": "divprune", "retain": 0.25}}'`` is all there is to say. vLLM finds
:func:`register` through the entry point group ``vllm.general_plugins`` and calls it in every process. Models without
``mmaccel`` in their overrides are vLLM's own, whatever is done with them. Nothing here imports vLLM before that.
"""

from __future__ import annotations

from .architectures import ARCHITECTURES, Architecture, known_architectures
from .checks import TESTED, install, tested, version, versions

_registered = False


def register() -> None:
    """Entry point that vLLM calls; cheap, never raises, and may be called any number of times."""
    global _registered
    if not _registered:
        _registered = True
        install()


__all__ = [
    "ARCHITECTURES",
    "TESTED",
    "Architecture",
    "known_architectures",
    "register",
    "tested",
    "version",
    "versions",
]
