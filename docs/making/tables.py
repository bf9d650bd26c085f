"""Write the tables of methods, of families and of refused models anew, where a page has markers for them.

python docs/making/tables.py docs/methods/index.md docs/families.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from mmaccel.cli.methods import describe_methods, describe_recipes, method_rows, recipe_rows
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.families import REFUSED, families


def update(page: Path) -> None:
    """Write the tables of a page. Raises MmaccelError if it has no markers."""
    makers = {"methods": method_tables, "families": family_table, "refused": refused_table}
    text = page.read_text(encoding="utf-8")
    for name in [name for name in makers if f"<!-- {name} -->" in text] or makers:
        put_between(page, name, makers[name]())


def family_table() -> str:
    """The families that come with mmaccel, as a Markdown table."""
    head = ["family", "pictures", "clips", "CLS token (`vtc-cls`, `evit`)"]
    head += ["patches that merge in the tower (`tome`)", "give a processor"]
    yes = {True: "yes", False: "-"}
    rows = [
        [f"`{name}`", facts.pictures, yes[facts.clips], yes[facts.cls], facts.merging, yes[family.needs_processor]]
        for name, family in families().items()
        if family.__module__.startswith("mmaccel.") and (facts := family.facts)
    ]
    return markdown([head, *rows])


def refused_table() -> str:
    """The model types that are refused, grouped by reason, as a Markdown table."""
    kinds: dict[str, list[str]] = {}
    for kind, why in REFUSED.items():
        kinds.setdefault(why, []).append(f"`{kind}`")
    return markdown([["model types", "why not"], *([", ".join(found), why] for why, found in kinds.items())])


def method_tables() -> str:
    """The methods that come with mmaccel, and the recipes, as Markdown tables."""
    own = [m for m in describe_methods() if m["module"].startswith("mmaccel.")]
    return f"{markdown(method_rows(own))}\n\n{markdown(recipe_rows(describe_recipes()))}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name))
