"""Drafters by name."""

from __future__ import annotations

from ..errors import MmaccelError
from .base import Drafter
from .copyspec import CopySpec
from .prompt_lookup import PromptLookup
from .suffix_automaton import SAMDecoding
from .suffix_decoding import SuffixDecoding
from .token_recycling import TokenRecycling

DRAFTERS: dict[str, type[Drafter]] = {
    kind.name: kind for kind in (CopySpec, PromptLookup, SAMDecoding, SuffixDecoding, TokenRecycling)
}
#: the drafter that is used where none is named
DEFAULT = SuffixDecoding.name


def get_drafter(name: str) -> type[Drafter]:
    """The drafter class called ``name``; raises :class:`MmaccelError` for an unknown name."""
    if name not in DRAFTERS:
        raise MmaccelError(f"There is no drafter {name!r}; choose one of {', '.join(map(repr, DRAFTERS))}.")
    return DRAFTERS[name]
