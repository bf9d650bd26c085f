"""Methods on pixels, before the processor, one method a file."""

from . import distinct, query, resize, scenes, scenetilling, uniform

__all__ = ["distinct", "query", "resize", "scenes", "scenetilling", "uniform"]
