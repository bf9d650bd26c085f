"""What a user writes, for a type checker (see test_typing.py): nothing in here is run.

A line with ``# type: ignore`` is wrong, and is there to be found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
from torch import Tensor, nn

import mmaccel
from mmaccel import (
    KIVI,
    Accelerator,
    DivPrune,
    FastV,
    Method,
    MmaccelError,
    Recipe,
    RecipeName,
    Reduction,
    SnapKV,
    Stage,
    VideoSession,
    accelerate_encoder,
    accelerate_vlm,
    accelerated,
    is_accelerated,
)
from mmaccel.method import ProjectorMethod, TokenBatch


class Model(nn.Module):
    """A model whose class is known."""


def ways_to_say_it(model: Model, folder: Path, processor: Any) -> None:
    assert_type(accelerate_vlm(model), Model)
    accelerate_vlm(model, "fastv", retain=0.5, layer=3)
    accelerate_vlm(model, FastV(layer=3), retain=64, processor=processor)
    accelerate_vlm(model, ["divprune", SnapKV(window=16), KIVI], positions="paper", variant="official", kernels="off")
    accelerate_vlm(model, Recipe("mine", (Stage("divprune", 0.25),)), text_retain=0.5)
    accelerate_vlm(model, [DivPrune(), Stage("snapkv", 0.25)])
    accelerate_vlm(model, {"name": "mine", "stages": [{"method": "divprune", "retain": 0.25}]})
    accelerate_vlm(model, folder / "mine.json")
    # a name that is known, and one of a method of the user's own
    known: RecipeName = "fastv"
    own: str = "largest-norm"
    accelerate_vlm(model, known)
    accelerate_vlm(model, [known, own], retain=0.5)
    assert_type(accelerate_encoder(model, "tome", retain=0.5), Model)
    with accelerated(model, "balanced", retain=0.1) as fast:
        assert_type(fast, Model)
        assert_type(is_accelerated(fast), bool)


class LargestNorm(ProjectorMethod):
    """A method that nobody registers."""

    name = "largest-norm"
    order: float = 2.0

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        return Reduction.top(tokens.features.norm(p=self.order, dim=-1), tokens.valid, count)


def ones_own(model: Model) -> None:
    accelerate_vlm(model, LargestNorm(order=1.0), retain=0.25)
    accelerate_vlm(model, [LargestNorm, "snapkv"])


def what_is_wrong(model: Model) -> None:
    mmaccel.handle(model).statistics()  # type: ignore[attr-defined]
    mmaccel.handle("model")  # type: ignore[arg-type]
    accelerate_vlm(model, retain="0.5")  # type: ignore[arg-type]
    accelerate_vlm(model, 3)  # type: ignore[arg-type]
    name: RecipeName = "fast-v"  # type: ignore[assignment]
    accelerate_vlm(model, name)
    accelerate_vlm(model, positions="new")  # type: ignore[arg-type]
    accelerate_vlm(model, kernels="on")  # type: ignore[arg-type]
    FastV(layers=3)  # type: ignore[call-arg]
    mmaccel.accelerate_llm  # type: ignore[attr-defined]  # noqa: B018


def what_was_done(model: Model) -> str:
    handle = Accelerator.on(model)
    if handle is None:
        raise MmaccelError("The model is bare; accelerate it.")
    assert_type(mmaccel.handle(model), Accelerator)
    assert_type(mmaccel.handle(model).stats().visual_tokens_kept, int)
    assert_type(mmaccel.handle(model).stats().notes, list[str])
    mmaccel.handle(model).remove()
    said = handle.stats()
    assert_type(said.kv_bytes, int)
    assert_type(said.seconds, dict[str, float])
    assert_type(handle.recipe, Recipe)
    assert_type(said.to_dict(), dict[str, Any])
    handle.remove()
    return f"{said}: {said['visual_tokens']} {said.visual_tokens_kept} {said.notes}"


def what_there_is(model: Any, processor: Any) -> None:
    assert_type(mmaccel.get_recipe("fastv", retain=0.5), Recipe)
    assert_type(mmaccel.get_method("fastv"), type[Method])
    assert_type(mmaccel.recipes(), dict[str, Recipe])
    assert_type(mmaccel.methods(), dict[str, type[Method]])
    session = VideoSession(model, processor=processor)
    session.push(np.zeros((8, 56, 56, 3), np.uint8))
    assert_type(session.ask("what is there?"), str)
    model.generate(mmaccel={"retain": 0.1})
