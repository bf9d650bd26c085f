"""Codecs of the cache: how kept keys and values are stored, one a file."""

from .base import Among, Codec, Kind, kinds

__all__ = ["Among", "Codec", "Kind", "kinds"]
