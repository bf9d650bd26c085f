"""Videos: decoding only the frames that are wanted, safely, by whichever library can."""

from .choice import spaced
from .clip import Clip
from .decode import decode
from .prefetch import decode_each
from .readers import READERS, usable

__all__ = ["READERS", "Clip", "decode", "decode_each", "spaced", "usable"]
