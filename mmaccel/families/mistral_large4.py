"""Mistral Large 4: the pictures of Mistral 3, and a language model whose layers read what an indexer chooses of its latents."""

from __future__ import annotations

from .base import CHOOSES, Family
from .pixtral import Mistral3


class MistralLarge4(Mistral3):
    """As Mistral 3. One layer in four has no positions, and queries are scaled by theirs in all."""

    name = "mistral_large4"
    model_types = ("mistral_large4",)
    place = Family.place
    since = "5.24"
    latent = True
    halves = False
    no_return = undivided = CHOOSES
