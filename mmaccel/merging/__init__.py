"""Merging: several tokens become one, in space or inside the vision tower, one method a file."""

from . import pool, tome

__all__ = ["pool", "tome"]
