"""Drafts in programs: arguments ``lossless``, ``draft``, ``lookup`` and ``fallback`` of ``accelerate_vlm``, by name in a
mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..accelerate import Fallback
from ..accelerate.drafting import SELF, with_tuned_layers
from ..core.figures import DRAFT_SUMS
from ..recipe import Recipe
from .identity import digest, digests

#: arguments by name; empty without drafts
DraftArguments = Mapping[str, Any]


def for_recipe(drafts: DraftArguments, recipe: Recipe) -> DraftArguments:
    """The arguments with what they take from the ``recipe``: fields of the fallback for ``True``, and layers that a lossless
    draft skips. Raises MmaccelError if it has none, or a value is not allowed."""
    net = Fallback.of(drafts.get("fallback"), recipe)
    draft = with_tuned_layers(drafts.get("draft"), bool(drafts.get("lossless")), recipe)
    found = {"fallback": None if net is None else dataclasses.asdict(net), "draft": draft}
    rest = {name: value for name, value in drafts.items() if name not in found}
    return {**rest, **{name: value for name, value in found.items() if value is not None}}


def drafts_title(drafts: DraftArguments) -> str:
    """For tables: ``lossless, lookup, draft MODEL, fallback 0.9``; empty without drafts."""
    words = [name for name in ("lossless", "lookup") if drafts.get(name)]
    if (net := drafts.get("fallback")) is not None:
        words.append(f"fallback {net['threshold']:g}")
    if drafts.get("draft") is not None:
        words.append(f"draft {drafts['draft']}")
    return ", ".join(words)


def drafts_identity(drafts: DraftArguments) -> dict[str, str]:
    """Digest of the arguments and of the files of the model that drafts, which a resumed run must share; empty without drafts.
    Raises MmaccelError if a file cannot be read."""
    if not drafts:
        return {}
    name = drafts.get("draft")
    files = {} if name in (None, SELF) or isinstance(name, (list, tuple)) else digests(str(name))
    return {"drafts": digest((dict(drafts), files))}


def readings(stats: Mapping[str, Any]) -> dict[str, float]:
    """Sums over the rows of a call with a fallback, over all readings that each took: visual tokens ``visual_tokens_kept`` and
    ``visual_tokens_per_layer``; and ``read_again``, the rows that took more than one. Empty without a fallback."""
    if not (fallback := stats["fallback"]):
        return {}
    taken, rows = fallback["reading"], len(fallback["reading"])
    sums = {
        name: sum(
            one[name] * sum(last >= number for last in taken) / rows for number, one in enumerate(fallback["readings"])
        )
        for name in ("visual_tokens_kept", "visual_tokens_per_layer")
    }
    return sums | {"read_again": sum(last > 0 for last in taken)}


def drafting_sums(stats: Mapping[str, Any], by: int = 1) -> dict[str, float]:
    """The figures of drafts of a call that can be summed, divided by ``by``; empty without drafts."""
    drafting = stats["drafting"]
    return {name: drafting[name] / by for name in DRAFT_SUMS} if drafting else {}
