"""Codecs of the cache: how kept keys and values are stored, one a file."""

from .base import Among, Codec, Kind, kinds
from .calibquant import CalibQuant
from .fp8 import FP8
from .kivi import KIVI
from .think import ThinK
from .vidkv import VidKV

__all__ = ["FP8", "KIVI", "Among", "CalibQuant", "Codec", "Kind", "ThinK", "VidKV", "kinds"]
