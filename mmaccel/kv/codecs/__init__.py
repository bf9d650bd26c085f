"""Codecs of the cache: how kept keys and values are stored, one codec a file."""

from .base import Codec, Eligible, TokenGroup, token_groups

__all__ = ["Eligible", "Codec", "TokenGroup", "token_groups"]
