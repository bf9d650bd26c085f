"""Codecs of the cache: how kept keys and values are stored, one codec a file."""

from .base import Codec, Cuts, Eligible, TokenGroup, token_groups

__all__ = ["Codec", "Cuts", "Eligible", "TokenGroup", "token_groups"]
