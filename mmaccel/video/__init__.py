"""Video decoding: only the wanted frames, safely, by any of three libraries."""

from .choice import spaced
from .clip import Clip
from .decode import decode
from .groups import FrameGroups
from .prefetch import decode_each
from .readers import READERS, usable

__all__ = ["READERS", "Clip", "FrameGroups", "decode", "decode_each", "spaced", "usable"]
