"""Pruning between the encoder and the language model, or inside the encoder (EViT), one method a file."""

from . import (
    attention_received,
    cdpruner,
    divprune,
    evit,
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
    "evit",
    "fopru",
    "hired",
    "prumerge",
    "random",
    "uniform",
    "visionzip",
    "vispruner",
    "vtc_cls",
]
