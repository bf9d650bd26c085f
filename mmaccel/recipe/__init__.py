"""Recipes: named compositions of methods over sites with their budgets."""

from ..method.base import Variant
from .lookup import RecipeLike, recipe, recipes
from .recipe import Positions, Recipe, Stage

__all__ = ["Positions", "Recipe", "RecipeLike", "Stage", "Variant", "recipe", "recipes"]
