"""Model classes that replace those of vLLM when the caller asks for a recipe, and their registration.

vLLM's registry stays as it is: nothing is registered. Its method that turns names of architectures into classes is wrapped, and
gives one of ours for a model whose overrides have ``mmaccel``. All other models get what vLLM gives them, and so does whatever
vLLM derives from their classes: for embeddings, classification and the like.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections.abc import Mapping
from typing import Any

from ...method.selector import blind_selector_folder
from .architectures import known_architectures
from .counters import FOLDER, counters_of
from .model import ReducedModel
from .plan import ServingPlan
from .processor import ReducedProcessor
from .settings import override_of, settings_of


def plan_of(model_config: Any, name: str) -> ServingPlan:
    """The plan of a model whose overrides ask for a recipe; vLLM loads it as the architecture ``name``."""
    architecture, given = known_architectures()[name], override_of(model_config)
    if isinstance(given, Mapping) and not given.get("selector"):
        asked = given.get("recipe")
        if asked == "learned" or (isinstance(asked, (list, tuple)) and "learned" in asked):
            given = {**given, "selector": blind_selector_folder(str(model_config.model))}
    return ServingPlan(settings_of(given), architecture.config(model_config), architecture)


def wrap_registry() -> None:
    """Let vLLM's registry return our classes for models whose overrides ask for a recipe."""
    from vllm.model_executor.models.registry import _ModelRegistry

    original = _ModelRegistry.resolve_model_cls

    @functools.wraps(original)
    def resolve(self: Any, architectures: Any, model_config: Any) -> Any:
        stock, name = original(self, architectures, model_config)
        if override_of(model_config) is None or name not in known_architectures():
            return stock, name
        forget_classes()
        return _class(stock, name), name

    _ModelRegistry.resolve_model_cls = resolve


class _Others(dict[Any, Any]):
    """vLLM's class cache without the architectures that have two classes."""

    def __setitem__(self, key: Any, found: Any) -> None:
        if found[1] not in known_architectures():
            super().__setitem__(key, found)


def forget_classes() -> None:
    """Let vLLM look up the classes of our architectures every time.

    It caches them by the folder of the model, whatever the overrides say: of two engines of one folder in one process, the
    second would get the class of the first.
    """
    from vllm.model_executor.model_loader import utils

    if not isinstance(utils._MODEL_ARCH_BY_HASH, _Others):
        utils._MODEL_ARCH_BY_HASH = _Others()


@functools.cache
def _class(stock: Any, name: str) -> type:
    """A class of vLLM with our mix-in in front."""
    body = {
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "plan_of": staticmethod(lambda vllm_config: plan_of(vllm_config.model_config, name)),
    }
    made = types.new_class(name, (ReducedModel, stock), exec_body=lambda space: space.update(body))
    made._processor_factory = dataclasses.replace(  # type: ignore[attr-defined]
        stock._processor_factory, processor=functools.partial(_processor, stock._processor_factory.processor, name)
    )
    return made


def _processor(make: Any, name: str, info: Any, dummy_inputs: Any) -> Any:
    """vLLM's processor class with our mix-in in front."""
    kind = type(make(info, dummy_inputs))
    plan = plan_of(info.ctx.model_config, name)
    body = {"plan": plan, "counters": counters_of(getattr(info.ctx.model_config, FOLDER, None), os.getpid())}
    reduced = types.new_class(kind.__name__, (ReducedProcessor, kind), exec_body=lambda space: space.update(body))
    return reduced(info, dummy_inputs)
