"""Models of lmms-eval (0.7) with a recipe put on: ``lmms_eval --model mmaccel_qwen2_5_vl --model_args recipe=...``.

lmms-eval finds :func:`manifests` through the entry point group ``lmms_eval.models``. Every class is its own wrapper with
:class:`Accelerated` in front; it is made when it is first asked for, since wrappers import what their families need.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MmaccelError
from ..media.prepare import prepare
from ..recipe import get_recipe

if TYPE_CHECKING:
    from lmms_eval.models.registry_v2 import ModelManifest

_CLASSES = {
    "LlavaSimple": "lmms_eval.models.simple.llava_hf.LlavaHf",
    "LlavaChat": "lmms_eval.models.chat.llava_hf.LlavaHf",
    "Qwen2VLSimple": "lmms_eval.models.simple.qwen2_vl.Qwen2_VL",
    "Qwen25VLSimple": "lmms_eval.models.simple.qwen2_5_vl.Qwen2_5_VL",
    "Qwen25VLChat": "lmms_eval.models.chat.qwen2_5_vl.Qwen2_5_VL",
    "Qwen3VLSimple": "lmms_eval.models.simple.qwen3_vl.Qwen3_VL",
    "Qwen3VLChat": "lmms_eval.models.chat.qwen3_vl.Qwen3_VL",
    "InternVLChat": "lmms_eval.models.chat.internvl_hf.InternVLHf",
}
"""Classes of this module, and the wrapper of lmms-eval that each extends."""

_MODELS = {
    "mmaccel_llava": ("Llava", ("mmaccel_llava_hf", "mmaccel_llava_next", "mmaccel_llava_onevision")),
    "mmaccel_qwen2_vl": ("Qwen2VL", ()),
    "mmaccel_qwen2_5_vl": ("Qwen25VL", ()),
    "mmaccel_qwen3_vl": ("Qwen3VL", ()),
    "mmaccel_internvl": ("InternVL", ("mmaccel_internvl_hf",)),
}
"""Names of models, the beginning of their classes' names, and other names for them."""


def manifests() -> list[ModelManifest]:
    """Model manifests for lmms-eval; the payload of the entry point."""
    from lmms_eval.models.registry_v2 import ModelManifest

    def path(name: str) -> str | None:
        return f"{__name__}.{name}" if name in _CLASSES else None

    return [
        ModelManifest(name, path(f"{start}Simple"), path(f"{start}Chat"), aliases)
        for name, (start, aliases) in _MODELS.items()
    ]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Exit with one sentence and status 1 on a user error.

    lmms-eval catches every ``Exception``: while a model is made, to print a stack trace and exit with status 0; while it
    generates, to go on with an empty answer, which would be judged as if the model had given it.
    """
    try:
        yield
    except MmaccelError as error:
        raise SystemExit(f"mmaccel: {error}") from error


class Accelerated:
    """Mix-in in front of an lmms-eval wrapper: applies a recipe to its model once it is loaded.

    Parameters
    ----------
    recipe : a name, or a path to a JSON file.
    **arguments : those of the wrapper; what it does not know is for the recipe: ``retain``, ``positions``, ``variant``,
        ``text_retain``, options of its methods.

    Raises
    ------
    SystemExit
        With one sentence, if the recipe or one of its options is not valid (before the model is loaded), or the model cannot
        honour it (then, or when it generates).
    """

    model: Any

    def __init__(self, *args: Any, recipe: str = "balanced", **arguments: Any) -> None:
        known = inspect.signature(super().__init__).parameters
        overrides = {name: arguments.pop(name) for name in list(arguments) if name not in known}
        with _plain_errors():
            chosen = get_recipe(recipe).override(**overrides)
            chosen.build()
        super().__init__(*args, **arguments)
        from ..accelerate import accelerate_vlm

        holder = "processor" if hasattr(self, "processor") else "_image_processor"
        with _plain_errors():
            processor = prepare(getattr(self, holder), chosen)
            accelerate_vlm(self.model, chosen, processor=processor)
        setattr(self, holder, processor)
        requests = ((self, name) for name in ("generate_until", "generate_until_multi_round", "loglikelihood"))
        for target, name in ((self.model, "generate"), *requests):
            setattr(target, name, _plain_errors()(getattr(target, name)))


@functools.cache
def _class(name: str) -> type:
    module, _, base = _CLASSES[name].rpartition(".")
    wrapper = getattr(importlib.import_module(module), base)
    return type(name, (Accelerated, wrapper), {"__module__": __name__, "__doc__": wrapper.__doc__})


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
