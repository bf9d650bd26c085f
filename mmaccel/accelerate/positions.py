"""Prompts that are longer than the positions a model was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MmaccelError
from ..method import ChunkMethod
from ..recipe import Recipe
from ..runtime.cache.rotation import positions_of


def position_limit(model: Any) -> int | None:
    """Number of positions of the language model of ``model``, with scaled RoPE; None if its config does not say."""
    return positions_of(model.config.get_text_config())


def has_axes(model: Any) -> bool:
    """Whether positions have several axes (M-RoPE), so that a picture takes another number of positions than of tokens."""
    return "mrope_section" in (getattr(model.config.get_text_config(), "rope_parameters", None) or {})


def recipe_limit(model: Any, recipe: Recipe) -> int | None:
    """As :func:`position_limit`, times the factor by which methods of a recipe scale positions."""
    limit = position_limit(model)
    return None if limit is None else int(limit * max((method.stretch for _, method in recipe.build()), default=1.0))


def free_positions(model: Any, recipe: Recipe, inputs: Mapping[str, Any], enough: int) -> int | None:
    """Number of positions that a prompt leaves for its answer, less than 0 if it is too long itself; None if at least
    ``enough`` are left, or there is no limit (also for ``positions="paper"`` and methods that read a prompt in chunks).

    model : not accelerated, or accelerated with any recipe.
    inputs : of ``generate``, with ``input_ids [B, S]``, and ``position_ids`` where the caller knows them.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    most, tokens = recipe_limit(model, recipe), inputs["input_ids"].shape[1]
    if most is None or recipe.positions == "paper":
        return None
    # with M-RoPE a picture takes fewer positions than tokens, and the frames of a slow clip more
    clips = any("video" in name and value is not None for name, value in inputs.items())
    if tokens + enough <= most and not (clips and has_axes(model)):
        return None
    if any(isinstance(method, ChunkMethod) or method.extends for _, method in recipe.build()):
        return None
    free = most - prompt_positions(model, inputs)
    return None if free >= enough else free


def prompt_positions(model: Any, inputs: Mapping[str, Any]) -> int:
    """Number of positions of the longest row of a prompt; ``inputs`` as for :func:`free_positions`."""
    positions = inputs.get("position_ids")
    if positions is None:
        positions = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    # an axis before the three of M-RoPE counts tokens
    return int((positions[-3:] if positions.dim() == 3 else positions).max()) + 1


def too_long(model: Any, recipe: Recipe, inputs: Mapping[str, Any], longest: int) -> str | None:
    """A sentence that says by how much a prompt and an answer of ``longest`` tokens exceed the model's positions; None if they
    fit. ``model``, ``recipe`` and ``inputs`` as for :func:`free_positions`."""
    free = free_positions(model, recipe, inputs, longest)
    if free is None:
        return None
    most = recipe_limit(model.get_base_model() if hasattr(model, "get_base_model") else model, recipe)
    assert most is not None
    return (
        f"The prompt has {inputs['input_ids'].shape[1]} tokens at {most - free} positions, visual ones included, and the "
        f"answer may have {longest}; this model has {most} positions in all, so show fewer pictures or frames, or ask for a "
        "shorter answer."
    )


def check_positions(model: Any, recipe: Recipe, inputs: Mapping[str, Any], longest: int) -> None:
    """Raise MmaccelError if a prompt and an answer of ``longest`` tokens exceed the model's positions, see :func:`too_long`."""
    if (sentence := too_long(model, recipe, inputs, longest)) is not None:
        raise MmaccelError(sentence)
