"""Every method and recipe: where it works, what it needs, what it keeps, and the paper it is from.

A method alone is also a recipe of that name. Sites: frames (pixels, before the processor; use mmaccel.prepare), encoder
(between layers of the vision tower), projector (between tower and language model), layers (between layers of the language
model), cache (keys and values, after prefill). Budget: exact (keeps what is asked), at_most (never more), adaptive (the
content decides).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from .shared.text import markdown, put_between, table

PLACE = 8
HELP = "list methods and recipes"
EXAMPLES = """\
examples:
  mmaccel methods
  mmaccel methods --site cache
  mmaccel methods --json | python -m json.tool
"""

_TAPS = {
    "cls_attention": "CLS attention",
    "received_attention": "received attention",
    "keys": "tower keys",
    "features": "tower features",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel methods``."""
    parser.add_argument(
        "--site", choices=("frames", "encoder", "projector", "layers", "cache", "codec"), help="only this site"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--update", metavar="FILE", help=argparse.SUPPRESS)  # the tables of our README


def run(options: argparse.Namespace) -> int:
    """Print what there is."""
    found = describe_methods(options.site)
    composed = [] if options.site else describe_recipes()
    if options.update:
        update(Path(options.update))
        return 0
    if options.json:
        print(json.dumps({"methods": found, "recipes": composed}, indent=2))
        return 0
    show = markdown if options.markdown else table
    print(show(method_rows(found)))
    if composed:
        print()
        print(show(recipe_rows(composed)))
    return 0


def update(page: Path) -> None:
    """Write anew the tables of methods and of families that a Markdown file has markers for.

    Raises
    ------
    MmaccelError
        If it has none.
    """
    makers = {"methods": readme_tables, "families": family_table}
    text = page.read_text(encoding="utf-8")
    for name in [name for name in makers if f"<!-- {name} -->" in text] or makers:
        put_between(page, name, makers[name]())


def family_table() -> str:
    """The families that come with mmaccel, as they stand in the README."""
    from ..families import families

    head = ["family", "pictures", "clips", "CLS token (`vtc-cls`, `evit`)"]
    head += ["patches that merge in the tower (`tome`)", "give a processor"]
    rows = [
        [
            f"`{name}`",
            family.facts.pictures,
            _yes(family.facts.clips),
            _yes(family.facts.cls),
            family.facts.merging,
            _yes(family.needs_processor),
        ]
        for name, family in families().items()
        if family.__module__.startswith("mmaccel.")
    ]
    return markdown([head, *rows])


def _yes(true: bool) -> str:
    return "yes" if true else "-"


def readme_tables() -> str:
    """The methods that come with mmaccel, and the recipes, as they stand in the README."""
    own = [m for m in describe_methods() if m["module"].startswith("mmaccel.")]
    return f"{markdown(method_rows(own))}\n\n{markdown(recipe_rows(describe_recipes()))}"


def describe_methods(site: str | None = None) -> list[dict[str, Any]]:
    """Each method as plain data, in the order of sites, then names."""
    from ..method.registry import methods

    order = ("frames", "encoder", "projector", "layers", "cache", "codec")
    chosen = sorted((order.index(m.site), name) for name, m in methods().items() if site in (None, m.site))
    return [_describe(methods()[name]) for _, name in chosen]


def _describe(cls: Any) -> dict[str, Any]:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {
        "name": cls.name,
        "site": cls.site,
        "budget": cls.budget,
        "needs": _needs(cls),
        "default_retain": cls.default_retain,
        "conserves_mass": cls.conserves_mass,
        "options": {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields},
        "paper": cls.paper,
        "summary": cls.summary,
        "module": cls.__module__,
    }


def _needs(cls: Any) -> list[str]:
    from ..method import EncoderMethod, FramesMethod, LayerMethod, Policy, ReadingPolicy

    try:
        needs = [_TAPS[tap.kind] for tap in cls().taps()]
    except TypeError:  # an option without a default
        needs = []
    if issubclass(cls, FramesMethod):
        needs.append("pixels (prepare)")
    if issubclass(cls, EncoderMethod):
        needs.append("CLS attention" if cls.needs_cls else "tower keys")
    if issubclass(cls, LayerMethod):
        needs.append("prompt attention" if cls.look is LayerMethod.look else "layer attention")
    if issubclass(cls, Policy) and cls.window:
        needs.append("last query" if cls.window == 1 else f"last {cls.window} queries")
    if issubclass(cls, Policy) and cls.future:
        needs.append("queries before RoPE")
    if issubclass(cls, Policy) and cls.needs_outgoing:
        needs.append("output projection")
    if issubclass(cls, Policy) and cls.observe is not Policy.observe:
        needs.append("prompt attention")
    if issubclass(cls, Policy) and cls.recall is not Policy.recall:
        needs.append("attention of each step")
    if issubclass(cls, ReadingPolicy):
        needs.append("query of each step")
    if getattr(cls, "needs_question", False):
        needs.append("question")
    return list(dict.fromkeys(needs))


def describe_recipes() -> list[dict[str, Any]]:
    """Recipes that are no single method under its own name, as plain data."""
    from ..method.registry import methods
    from ..recipe import recipes

    known = methods()
    return [
        {
            "name": name,
            "stages": [dataclasses.asdict(stage) for stage in r.stages],
            "retain": r.retain,
            "positions": r.positions,
            "paper": r.paper,
            "summary": r.summary,
        }
        for name, r in recipes().items()
        if name not in known
    ]


def method_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Table rows of :func:`describe_methods`."""
    head = ["method", "site", "budget", "needs", "keeps", "paper", "what it does"]
    return [head] + [
        [
            m["name"],
            m["site"],
            m["budget"],
            ", ".join(m["needs"]) or "nothing",
            _share(m["default_retain"]),
            m["paper"] or "-",
            m["summary"],
        ]
        for m in found
    ]


def recipe_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Table rows of :func:`describe_recipes`."""
    return [["recipe", "stages", "keeps", "what it is"]] + [
        [r["name"], " + ".join(stage["method"] for stage in r["stages"]) or "-", _share(r["retain"]), r["summary"]]
        for r in found
    ]


def _share(retain: float | None) -> str:
    return "-" if retain is None else str(retain) if isinstance(retain, int) else f"{retain * 100:.3g}%"
