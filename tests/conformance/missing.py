"""Which golden vectors no registered method answers for, by name and with the reason; the list is missing.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mmaccel.decoding.drafters import DRAFTERS
from mmaccel.method.registry import methods
from mmaccel.recipe import recipes

LIST = Path(__file__).parent / "missing.toml"


def plain(name: str) -> str:
    """A name as papers, vectors and the registry agree on it."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def offered(name: str, known: Iterable[str]) -> list[str]:
    """Methods of the paper ``name``: itself, or parts of it such as ``NAME-merge``."""
    return sorted(k for k in known if plain(k) == plain(name) or k.startswith(f"{name.lower()}-"))


def paper_of(about: Mapping[str, Any]) -> str:
    """What the method of a vector is called; in a library of many methods the function tells."""
    press = re.match(r"(\w+)Press\b", about["function"]) if about["method"] == "kvpress" else None
    return press[1] if press else str(about["method"])


def known_methods() -> set[str]:
    """The names that recipes, methods and drafters are known by."""
    return {*methods(), *recipes(), *DRAFTERS}


@dataclass(frozen=True)
class Entry:
    """Vectors that are missing for one reason.

    kind : ``not_built`` (no method of that name is registered), ``variant`` (the method lacks it, or reaches a part of it in
        tests only) or ``fault`` (of the authors' program, which ours deliberately lacks: the comparison must fail).
    name : what the method would be called (``not_built``).
    methods : the registered methods of the paper with their options when this was written (``variant``); a new method or
        option may be the one that was missing, so the entry must be looked at.
    """

    kind: str
    reason: str
    vectors: tuple[str, ...]
    name: str = ""
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def stale(self, known: Collection[str] | None = None) -> str | None:
        """Why the entry is out of date, if it is."""
        known = known_methods() if known is None else known
        if self.kind == "not_built":
            found = offered(self.name, known)
            return f"{self.name} is registered now ({', '.join(found)}): write a comparator" if found else None
        if self.kind == "fault":
            return None
        for name, options in self.methods.items():
            kind = {**methods(), **DRAFTERS}.get(name)
            if kind is None:
                return f"there is no method {name!r} any more"
            mine = {option.name for option in fields(kind) if option.init}  # type: ignore[arg-type]
            new, gone = sorted(mine - set(options)), sorted(set(options) - mine)
            if new or gone:
                return f"the options of {name} have changed (new: {new}, gone: {gone}): is the variant offered now?"
        if self.name:
            new = sorted(set(offered(self.name, known)) - set(self.methods) - set(recipes()))
            if new:
                return f"{', '.join(new)} is registered now: is this what was missing?"
        return None


def read(path: Path = LIST) -> list[Entry]:
    """All entries; a vector may be in one of them only."""
    entries = []
    for kind, found in tomllib.loads(path.read_text(encoding="utf-8")).items():
        assert kind in ("not_built", "variant", "fault"), f"{path.name}: {kind} is no kind of entry"
        for one in found:
            held = {name: tuple(options) for name, options in one.get("methods", {}).items()}
            assert one["reason"] and one["vectors"], f"{path.name}: an entry needs a reason and vectors"
            assert kind != "not_built" or one.get("name"), f"{path.name}: what is not built needs the name it will have"
            assert kind != "variant" or held, f"{path.name}: a variant needs the methods that lack it"
            entries.append(Entry(kind, one["reason"], tuple(one["vectors"]), one.get("name", ""), held))
    names = [name for entry in entries for name in entry.vectors]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"{path.name} names twice: {sorted(twice)}"
    return entries
