"""Drafts in programs: arguments ``lossless``, ``draft`` and ``lookup`` of ``accelerate_vlm``, by name in a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..accelerate.drafting import SELF
from ..core.figures import DRAFT_SUMS
from .identity import digest, digests

#: arguments by name; empty without drafts
DraftArguments = Mapping[str, Any]


def drafts_title(drafts: DraftArguments) -> str:
    """For tables: ``lossless, lookup, draft MODEL``; empty without drafts."""
    words = [name for name in ("lossless", "lookup") if drafts.get(name)]
    if drafts.get("draft") is not None:
        words.append(f"draft {drafts['draft']}")
    return ", ".join(words)


def drafts_identity(drafts: DraftArguments) -> dict[str, str]:
    """Digest of the arguments and of the files of the model that drafts, which a resumed run must share; empty without drafts.
    Raises MmaccelError if a file cannot be read."""
    if not drafts:
        return {}
    name = drafts.get("draft")
    return {"drafts": digest((dict(drafts), {} if name in (None, SELF) else digests(str(name))))}


def drafting_sums(stats: Mapping[str, Any], by: int = 1) -> dict[str, float]:
    """The figures of drafts of a call that can be summed, divided by ``by``; empty without drafts."""
    drafting = stats["drafting"]
    return {name: drafting[name] / by for name in DRAFT_SUMS} if drafting else {}
