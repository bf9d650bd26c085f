"""One adapter a model family, and nothing of a family anywhere else."""

from .base import Facts, Family
from .registry import REFUSED, described, families, family_of

__all__ = ["REFUSED", "Facts", "Family", "described", "families", "family_of"]
