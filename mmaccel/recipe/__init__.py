"""Recipes: named compositions of methods over sites with their budgets."""

from ..method.base import Variant
from .lookup import RecipeLike, get_recipe, recipes
from .recipe import Positions, Proportional, Recipe, Stage, TunedRecipe

__all__ = [
    "Positions",
    "Proportional",
    "Recipe",
    "RecipeLike",
    "Stage",
    "TunedRecipe",
    "Variant",
    "get_recipe",
    "recipes",
]
