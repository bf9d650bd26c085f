"""Pruning between the encoder and the language model: tokens are kept or dropped, one method a file."""

from . import attention_received, divprune, random, uniform, vtc_cls

__all__ = ["attention_received", "divprune", "random", "uniform", "vtc_cls"]
