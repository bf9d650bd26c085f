"""Prompts that are longer than the positions a model was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MmaccelError
from ..method import ChunkMethod
from ..recipe import Recipe


def position_limit(model: Any) -> int | None:
    """How many positions the language model of ``model`` has, with scaled RoPE; None if its config does not say."""
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if limit is None or not factor:
        return limit
    # some configs state the scaled number, others the original one
    return max(limit, int(factor * (original or limit)))


def check_positions(model: Any, recipe: Recipe, inputs: Mapping[str, Any], longest: int) -> None:
    """See that a prompt and an answer of ``longest`` tokens fit into the model's positions.

    Recipes that give tokens other positions (``positions="paper"``, methods that read a prompt in chunks) are let through.

    Raises MmaccelError if they do not fit.

    model : not accelerated, or accelerated with any recipe.
    inputs : of ``generate``, with ``input_ids [B, S]``, and ``position_ids`` where the caller knows them.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    most, tokens = position_limit(model), inputs["input_ids"].shape[1]
    axes = "mrope_section" in (getattr(model.config.get_text_config(), "rope_parameters", None) or {})
    if most is None or (tokens + longest <= most and not axes) or recipe.positions == "paper":
        return
    if any(isinstance(method, ChunkMethod) for _, method in recipe.build()):
        return
    places = inputs.get("position_ids")
    if places is None:
        # with M-RoPE a picture takes fewer positions than tokens, and the frames of a slow clip more
        places = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    # an axis before the three of M-RoPE counts tokens
    needed = int((places[-3:] if places.dim() == 3 else places).max()) + 1
    if needed + longest > most:
        raise MmaccelError(
            f"The prompt has {tokens} tokens at {needed} positions, visual ones included, and the answer may have {longest}; "
            f"this model has {most} positions in all, so show fewer pictures or frames, or ask for a shorter answer."
        )
