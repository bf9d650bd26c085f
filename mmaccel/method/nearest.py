"""Suggestions for an unknown name of a method or recipe: names spelled like it, and names of what does the same.

Spelling is compared without case, hyphens and spaces, and with ``+`` as ``plus``. What a name does is known in three ways, of
which the first that applies is taken:

1. it is a system of the field without a recipe of its name, or one of several in a row of them: ``systems.toml`` says where it
   is in mmaccel, or why it is not here, and which recipes are nearest to it;
2. it is almost a known name: the ones that share most words with that one's sites and summary, rare words counting more;
3. its own words (``4-bit-keys``, ``attention_sinks``): the ones whose names, sites and summaries share most of them.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: of each kind of suggestion, at most
_MOST = 3
#: what stands between the names of a row of systems
_SEVERAL = re.compile(r"[,/()=]|\bas\b|\bgroup\b|\.\.\.")
#: ratio of two spellings from which on one is taken for a slip of the other
_SLIP = 0.8
#: letters of a word that count: ``merge``, ``merged`` and ``merging`` are the same
_STEM = 4
#: what the methods of a site do, in other words
_SITES = {
    "frames": "video frames sampling",
    "patches": "pixels",
    "encoder": "vision encoder tower",
    "projector": "visual tokens pruning before language model",
    "layers": "visual tokens pruning inside language model decoder layers",
    "cache": "kv keys eviction compression",
    "codec": "kv quantization quantized compression bits",
}
#: words that say nothing of a method
_PLAIN = frozenset("the and that with for are from its into others then what them this they all one".split())


def suggest(name: str, known: Mapping[str, str]) -> str:
    """End of a sentence about an unknown name: ``; did you mean ...?``, and what does the same; where nothing is like it, the
    names closest in spelling and the command that lists all.

    known : what each known name does, in a few words; its summary and its sites.
    """
    plain = {_plain(one): one for one in known}
    system = {} if _plain(name) in plain else _system(_plain(name))
    paper = [one for one in system.get("near", ()) if one in known]
    if system:
        place = f"It is {system['here']}." if "here" in system else f"Not here: {system['why']}."
        similar = f" Nearest in what they do: {', '.join(map(repr, paper))}." if paper else ""
        return f". {place.replace('`', '')}{similar}"
    near = difflib.get_close_matches(_plain(name), plain, n=_MOST, cutoff=0.6)
    spelled = [plain[one] for one in ([_plain(name)] if _plain(name) in plain else near)]
    almost = [known[plain[one]] for one in difflib.get_close_matches(_plain(name), plain, n=_MOST, cutoff=_SLIP)]
    # a name whose words nothing shares is taken for a slip after all
    texts = [" ".join(almost) or name, *(known[one] for one in spelled)]
    alike = next(filter(None, (_alike(text, known, {*spelled, "none"}) for text in texts)), [])
    if not spelled and not alike:
        closest = difflib.get_close_matches(_plain(name), plain, n=_MOST, cutoff=0.0)
        return f"; closest in spelling are {', '.join(repr(plain[one]) for one in closest)}. mmaccel methods lists all."
    parts = [f"; did you mean {' or '.join(map(repr, spelled))}?" if spelled else ";"]
    if alike:
        parts.append(f"{'Nearest' if spelled else 'nearest'} in what they do: {', '.join(map(repr, alike))}.")
    return " ".join(parts)


def spelled(name: str, known: Iterable[str]) -> str:
    """The known name that is this one but for case, hyphens and spaces (``SnapKV``: ``snapkv``); else the name itself."""
    known = list(known)
    return name if name in known else next((one for one in known if _plain(one) == _plain(name)), name)


def systems() -> list[dict[str, Any]]:
    """Systems of the field: ``name``, ``group``, and in half a sentence ``what`` it is, ``here`` where it is in mmaccel, or
    else ``why`` it is not; ``near`` are the recipes that do most nearly the same, nearest first."""
    listed: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("systems.toml").read_text("utf-8"))["system"]
    return listed


def _system(plain: str) -> Mapping[str, Any]:
    """The system with a :func:`_plain` name, or else one that has it among several (``Medusa, Clover``) or beside its own
    (``CRITIC (PORAG)``); empty if there is none."""
    named = [([_plain(one["name"]), *map(_plain, _SEVERAL.split(one["name"]))], one) for one in systems()]
    of = [(names.index(plain) > 0, one) for names, one in named if plain and plain in names]
    return min(of, key=lambda found: found[0])[1] if of else {}


def _alike(text: str, known: Mapping[str, str], without: Iterable[str]) -> list[str]:
    """The names whose descriptions share most with a text, without the given ones."""
    stems = {
        name: _stems(" ".join([name, about, *(_SITES.get(word, "") for word in about.split())]))
        for name, about in known.items()
    }
    common = Counter(stem for one in stems.values() for stem in one)
    asked = _stems(text)
    scores = {
        name: sum(math.log(len(known) / common[stem]) for stem in asked & one) / math.sqrt(len(one))
        for name, one in stems.items()
        if name not in without and asked & one
    }
    return sorted(scores, key=lambda name: (-scores[name], name))[:_MOST]


def _stems(text: str) -> set[str]:
    words = re.findall(r"[a-z]+|\d+", text.lower())
    return {word[:_STEM] for word in words if word not in _PLAIN and (len(word) > 2 or word.isdecimal())}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))
