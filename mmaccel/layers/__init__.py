"""Pruning and merging between the layers of the language model, one method a file."""

from . import aim, fastv, framefusion, holitom, mustdrop, promptdistill

__all__ = ["aim", "fastv", "framefusion", "holitom", "mustdrop", "promptdistill"]
