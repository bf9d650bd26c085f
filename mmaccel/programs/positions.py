"""Prompts that are longer than the positions a model was trained for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MmaccelError
from ..method import ChunkMethod
from ..recipe import Recipe


def check_positions(model: Any, recipe: Recipe, inputs: Mapping[str, Any], longest: int) -> None:
    """See that a prompt and an answer of ``longest`` tokens fit into the model's positions.

    Recipes that give tokens other positions (``positions="paper"``, methods that read a prompt in chunks) are let through.

    Parameters
    ----------
    model : not accelerated, or accelerated with any recipe.
    inputs : of ``generate``, with ``input_ids [B, S]``, and ``position_ids`` where the caller knows them.

    Raises
    ------
    MmaccelError
        If they do not fit.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tokens = inputs["input_ids"].shape[1]
    if most is None or tokens + longest <= most or recipe.positions == "paper":
        return
    if any(isinstance(method, ChunkMethod) for _, method in recipe.build()):
        return
    places = inputs.get("position_ids")
    if places is None:
        # with M-RoPE a prompt has fewer positions than tokens
        places = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))
    # an axis before the three of M-RoPE counts tokens
    needed = int((places[-3:] if places.dim() == 3 else places).max()) + 1
    if needed + longest > most:
        raise MmaccelError(
            f"The prompt has {tokens} tokens at {needed} positions, visual ones included, and the answer may have {longest}; "
            f"this model has {most} positions in all, so show fewer pictures or frames, or ask for a shorter answer."
        )


__all__ = ["check_positions"]
