"""Merging: several tokens become one, in space, over time or inside the vision tower, one method a file."""

from . import aim, centerclip, dycoke, evs, fastvid, holitom, moviechat, mustdrop, pitome, pool, prunevid, tome

__all__ = [
    "aim",
    "centerclip",
    "dycoke",
    "evs",
    "fastvid",
    "holitom",
    "moviechat",
    "mustdrop",
    "pitome",
    "pool",
    "prunevid",
    "tome",
]
