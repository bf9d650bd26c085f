"""Fingerprint of the model that a recipe was tuned for."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch

from ..recipe import Recipe, TunedRecipe


def fingerprint(model: Any) -> str:
    """A digest of the weights: names, shapes, and the first and last eight values of every tensor."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        ends = torch.cat([flat[:8], flat[-8:]]).double().cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + ends.tobytes())
    return digest.hexdigest()[:16]


def warn_of_another(model: Any, recipe: Recipe) -> None:
    """Warn if a recipe was tuned for a model with other weights; how many answers it keeps is then unknown."""
    if not isinstance(recipe, TunedRecipe) or any(weight.is_meta for weight in model.parameters()):
        # weights that are elsewhere cannot be looked at
        return
    wanted = recipe.tuned.get("model")
    if wanted is not None and wanted != fingerprint(model):
        warnings.warn(
            f"Recipe {recipe.name!r} was tuned for a model with other weights, or the same in another dtype: what it keeps of "
            "this one's answers was not measured; run mmaccel tune on this model.",
            stacklevel=3,
        )


__all__ = ["fingerprint", "warn_of_another"]
