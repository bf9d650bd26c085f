"""One adapter a model family, and nothing of a family anywhere else."""

from .base import Facts, Family
from .registry import described, families, family_of

__all__ = ["Facts", "Family", "described", "families", "family_of"]
