"""One adapter a model family, and nothing of a family anywhere else."""

from .base import Facts, Family
from .registry import families, family_of

__all__ = ["Facts", "Family", "families", "family_of"]
