"""Codecs of the cache: how kept keys and values are stored, one a file."""

from .base import Codec
from .calibquant import CalibQuant
from .fp8 import FP8
from .kivi import KIVI
from .vidkv import VidKV

__all__ = ["FP8", "KIVI", "CalibQuant", "Codec", "VidKV"]
