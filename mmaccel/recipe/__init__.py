"""Recipes: named compositions of methods over sites with their budgets."""

from .lookup import RecipeLike, recipe, recipes
from .recipe import Positions, Recipe, Rounding, Stage

__all__ = ["Positions", "Recipe", "RecipeLike", "Rounding", "Stage", "recipe", "recipes"]
