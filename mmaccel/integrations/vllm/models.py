"""The classes that take the place of vLLM's architectures, by their names; each is made when it is first asked for.

Without ``mmaccel`` in the overrides a class makes an object of vLLM's own class and processor, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from typing import Any

from .architectures import ARCHITECTURES
from .model import ReducedModel
from .plan import ServingPlan
from .processor import ReducedProcessor
from .settings import settings_of


def plan_of(model_config: Any, name: str) -> ServingPlan | None:
    """The plan of a model that vLLM loads as the architecture ``name``; None where the overrides ask for nothing."""
    config = model_config.hf_config
    settings = settings_of(config)
    return None if settings is None else ServingPlan(settings, config, ARCHITECTURES[name])


@functools.cache
def _class(name: str) -> type:
    architecture = ARCHITECTURES[name]
    stock = getattr(importlib.import_module(architecture.module), architecture.named or name)

    def new(cls: type, *args: Any, vllm_config: Any = None, prefix: str = "") -> Any:
        # copies are made without arguments
        if vllm_config is None or settings_of(vllm_config.model_config.hf_config) is not None:
            return object.__new__(cls)
        return stock(vllm_config=vllm_config, prefix=prefix)

    body = {
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "__new__": new,
        "plan_of": staticmethod(lambda vllm_config: plan_of(vllm_config.model_config, name)),
    }
    made = types.new_class(name, (ReducedModel, stock), exec_body=lambda space: space.update(body))
    made._processor_factory = dataclasses.replace(  # type: ignore[attr-defined]
        stock._processor_factory, processor=functools.partial(_processor, stock._processor_factory.processor, name)
    )
    return made


def _processor(make: Any, name: str, info: Any, dummy_inputs: Any) -> Any:
    """vLLM's processor, with ours before it where a recipe is asked for."""
    stock = make(info, dummy_inputs)
    plan = plan_of(info.ctx.model_config, name)
    if plan is None:
        return stock
    kind = type(stock)
    reduced = types.new_class(kind.__name__, (ReducedProcessor, kind), exec_body=lambda space: space.update(plan=plan))
    return reduced(info, dummy_inputs)


def __getattr__(name: str) -> Any:
    if name in ARCHITECTURES:
        return _class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
