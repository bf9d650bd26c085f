"""Pruning between the encoder and the language model: tokens are kept or dropped, one method a file."""

from . import (
    attention_received,
    cdpruner,
    divprune,
    fopru,
    hired,
    prumerge,
    random,
    uniform,
    visionzip,
    vispruner,
    vtc_cls,
)

__all__ = [
    "attention_received",
    "cdpruner",
    "divprune",
    "fopru",
    "hired",
    "prumerge",
    "random",
    "uniform",
    "visionzip",
    "vispruner",
    "vtc_cls",
]
