"""Recipes: named compositions of methods over sites with their budgets."""

from .lookup import RecipeLike, recipe, recipes
from .recipe import Positions, Recipe, Rounding, Stage, TunedRecipe

__all__ = ["Positions", "Recipe", "RecipeLike", "Rounding", "Stage", "TunedRecipe", "recipe", "recipes"]
