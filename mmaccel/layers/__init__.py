"""Pruning and merging between the layers of the language model, one method a file."""

from . import aim, fastkv, fastv, framefusion, holitom, mustdrop, promptdistill

__all__ = ["aim", "fastkv", "fastv", "framefusion", "holitom", "mustdrop", "promptdistill"]
