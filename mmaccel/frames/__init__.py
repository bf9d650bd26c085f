"""Methods on pixels, before the processor, one method a file."""

from . import resize

__all__ = ["resize"]
