"""mmaccel inside vLLM: recipes that work before the language model, for pictures and clips.

``vllm serve MODEL --hf-overrides '{"mmaccel": {"recipe": "divprune", "retain": 0.25}}'`` is all there is to say. vLLM finds
:func:`register` through the entry point group ``vllm.general_plugins`` and calls it in every process. It puts lazy classes in
place of some architectures, which are vLLM's own unless the overrides have ``mmaccel``. Nothing here imports vLLM before that.
"""

from __future__ import annotations

from typing import Any

from .architectures import ARCHITECTURES
from .checks import TESTED, guard, tested, version

_registered = False
_OF = "@"


def register() -> None:
    """What vLLM calls; cheap, and it may be called any number of times."""
    global _registered
    if _registered:
        return
    _registered = True
    guard()
    if not tested():
        return
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"{__name__}:{name}{_OF}{version()}")


def __getattr__(name: str) -> Any:
    """The classes by the names that they are registered under.

    vLLM keeps what it found out about a class in a file, by module and name, for as long as the module has the same text. That
    must not outlive an upgrade of either: the text of a package is that of all its modules, and the name has vLLM's version.
    """
    architecture, of, _ = name.partition(_OF)
    if of and architecture in ARCHITECTURES:
        from . import models

        return getattr(models, architecture)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ARCHITECTURES", "TESTED", "register", "tested", "version"]
