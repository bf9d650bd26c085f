"""Recipes: named compositions of methods over sites with their budgets."""

from .lookup import recipe, recipes
from .recipe import Recipe, Stage

__all__ = ["Recipe", "Stage", "recipe", "recipes"]
