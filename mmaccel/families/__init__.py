"""Adapters of model families, one a file."""

from .base import Facts, Family
from .registry import REFUSED, described, families, family_of

__all__ = ["REFUSED", "Facts", "Family", "described", "families", "family_of"]
