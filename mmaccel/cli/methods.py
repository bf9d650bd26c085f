"""Every method and recipe: where it works, what it needs, what it keeps, and the paper it is from.

A method alone is also a recipe of that name. Sites: frames (pixels, before the processor; use mmaccel.prepare), encoder
(between layers of the vision tower), projector (between tower and language model), layers (between layers of the language
model), cache (keys and values, after prefill). Budget: exact (keeps what is asked), at_most (never more), adaptive (the
content decides).

With NAME that method or recipe alone: its options with their defaults and what they mean, its paper, what it needs, and the
families it works on.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from .shared.options import Json
from .shared.text import markdown, put_between, table, tell

PLACE = 8
HELP = "list methods and recipes"
EXAMPLES = """\
examples:
  mmaccel methods
  mmaccel methods snapkv
  mmaccel methods --site cache
  mmaccel methods --json | python -m json.tool
"""

_TAPS = {
    "cls_attention": "CLS attention",
    "received_attention": "received attention",
    "patch_attention": "patch attention",
    "keys": "tower keys",
    "features": "tower features",
    "shift": "tower MLPs",
}


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A method or recipe, to see its options.")
    ] = None,
    site: Annotated[
        Literal["frames", "patches", "encoder", "projector", "layers", "cache", "codec"] | None,
        typer.Option(help="Only this site."),
    ] = None,
    in_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
    page: Annotated[Path | None, typer.Option("--update", hidden=True)] = None,  # the tables of our documentation
    output: Json = None,
) -> int:
    """Print what there is."""
    if name is not None:
        one = describe(name)
        tell(one, output, lambda: render(one))
        return 0
    found = describe_methods(site)
    composed = [] if site else describe_recipes()
    if page is not None:
        update(page)
        return 0
    form = markdown if in_markdown else table
    parts = [method_rows(found), *([recipe_rows(composed)] if composed else [])]
    tell({"methods": found, "recipes": composed}, output, lambda: "\n\n".join(map(form, parts)))
    return 0


# --------------------------------------------------------------------------------------------------------- one of them


def describe(name: str) -> dict[str, Any]:
    """A method, or else a recipe, with all that can be said about it. Raises MmaccelError if there is none of that name; the
    nearest ones are named."""
    from ..method.registry import methods
    from ..recipe import get_recipe

    if (cls := methods().get(name)) is not None:
        return _describe(cls) | {
            "about": _about(cls),
            "official": official_doc(cls).replace("``", ""),
            "option_docs": _plain(option_docs(cls)),
            "families": _families(cls),
        }
    found = get_recipe(name)
    return {
        "name": name,
        "summary": found.summary,
        "paper": found.paper,
        "retain": found.retain,
        "stages": [dataclasses.asdict(stage) for stage in found.stages],
    }


def _about(cls: Any) -> str:
    """The docstring of a method as far as its options."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nParameters\n---")[0]
    text = "\n\n".join(p for p in text.split("\n\n") if not p.startswith('``variant="official"``'))
    # marks of Sphinx: ``code``, :role:`name`, and *titles*
    text = re.sub(r":\w+:`([^`]*)`", r"\1", text.replace("``", "")).replace("`", "")
    return re.sub(r"(?m)^\*(.+?)\*(?=,| \()", r"\1", text.strip(), flags=re.S)


def official_doc(cls: Any) -> str:
    """What the authors' variant of a method changes, with its marks of code; empty if it has none."""
    for one in cls.__mro__:
        for paragraph in inspect.cleandoc(vars(one).get("__doc__") or "").split("\n\n"):
            if paragraph.startswith('``variant="official"``: '):
                return " ".join(paragraph.partition(": ")[2].split())
    return ""


def option_docs(cls: Any) -> dict[str, str]:
    """What a method's docstring, or that of a class above it, says of every option, with its marks of code."""
    found: dict[str, str] = {}
    for one in cls.__mro__:
        _, _, listed = inspect.cleandoc(vars(one).get("__doc__") or "").partition("\nParameters\n----------\n")
        # an entry goes on in lines that are indented; the list ends at an empty line
        for entry in re.split(r"\n(?=\S)", listed.partition("\n\n")[0]):
            names, sign, meaning = entry.partition(" : ")
            for name in names.split(", ") if sign else ():
                found.setdefault(name.strip(), " ".join(meaning.split()))
    return found


def _plain(docs: dict[str, str]) -> dict[str, str]:
    return {name: meaning.replace("``", "") for name, meaning in docs.items()}


def _families(cls: Any) -> list[str]:
    """The families whose usual models a method works on: those that it does not refuse itself."""
    from ..errors import UnsupportedError
    from ..families import families

    found = []
    for name, family in families().items():
        usual: Any = SimpleNamespace(name=name, has_cls=family.facts.cls, depth=0, deepstack=0)
        usual.closed, usual.whole, usual.halves, usual.ranks = family.closed, family.whole, family.halves, family.ranks
        usual.stateful, usual.attending, usual.modalities = family.stateful, (), family.modalities
        usual.no_return = family.no_return
        usual.undivided = family.undivided
        try:
            made = cls()
            made.fit(usual).suits(usual)
        except UnsupportedError:
            continue
        except TypeError:  # an option without a default
            pass
        found.append(name)
    return found


def render(one: dict[str, Any]) -> str:
    """A method or recipe as text."""
    if "stages" in one:
        stages = [["stage", "keeps", "options"]]
        stages += [
            [
                stage["method"],
                _share(stage["retain"]),
                ", ".join(f"{k}={v!r}" for k, v in stage["options"].items()) or "-",
            ]
            for stage in one["stages"]
        ]
        lines = [f"{one['name']}: {one['summary']}", "", f"paper    {one['paper'] or '-'}", "", table(stages)]
        return "\n".join([*lines, "", "The options of a stage: mmaccel methods STAGE"])
    facts = [
        ("paper", one["paper"] or "-"),
        ("site", one["site"]),
        ("budget", one["budget"]),
        ("keeps", _share(one["default_retain"])),
        ("needs", ", ".join(one["needs"]) or "nothing"),
        ("families", ", ".join(one["families"])),
        *([("official", f"(variant='official') {one['official']}")] if one["official"] else []),
    ]
    options = [["option", "default", "meaning"]]
    options += [[name, str(value), one["option_docs"].get(name, "-")] for name, value in one["options"].items()]
    return "\n".join(
        [
            f"{one['name']}: {one['summary']}",
            "",
            one["about"],
            "",
            *(f"{title:<9}{told}" for title, told in facts),
            "",
            table(options) if len(options) > 1 else "It has no options of its own.",
            "",
            f"mmaccel ask --recipe {one['name']}"
            + (f" --set {next(iter(one['options']))}={next(iter(one['options'].values()))}" if one["options"] else "")
            + ' photo.jpg "..."',
        ]
    )


# --------------------------------------------------------------------------------------------------------- all of them


def update(page: Path) -> None:
    """Write anew the tables of methods, of families and of what is refused that a Markdown file has markers for. Raises
    MmaccelError if it has none."""
    makers = {"methods": readme_tables, "families": family_table, "refused": refused_table}
    text = page.read_text(encoding="utf-8")
    for name in [name for name in makers if f"<!-- {name} -->" in text] or makers:
        put_between(page, name, makers[name]())


def family_table() -> str:
    """The families that come with mmaccel, as they stand in the documentation."""
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


def refused_table() -> str:
    """The model types that are refused, those of one reason together."""
    from ..families import REFUSED

    kinds: dict[str, list[str]] = {}
    for kind, why in REFUSED.items():
        kinds.setdefault(why, []).append(f"`{kind}`")
    return markdown([["model types", "why not"], *([", ".join(found), why] for why, found in kinds.items())])


def _yes(true: bool) -> str:
    return "yes" if true else "-"


def readme_tables() -> str:
    """The methods that come with mmaccel, and the recipes, as they stand in the documentation."""
    own = [m for m in describe_methods() if m["module"].startswith("mmaccel.")]
    return f"{markdown(method_rows(own))}\n\n{markdown(recipe_rows(describe_recipes()))}"


def describe_methods(site: str | None = None) -> list[dict[str, Any]]:
    """Each method as plain data, in the order of sites, then names."""
    from ..method.registry import methods

    order = ("frames", "patches", "encoder", "projector", "layers", "cache", "codec")
    chosen = sorted((order.index(m.site), name) for name, m in methods().items() if site in (None, m.site))
    return [_describe(methods()[name]) for _, name in chosen]


def _describe(cls: Any) -> dict[str, Any]:
    fields = list(dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else []
    # its own before those of the classes above it
    fields.sort(key=lambda field: field.name not in vars(cls).get("__annotations__", {}))
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
    from ..method import (
        ChunkMethod,
        Drafted,
        EncoderMethod,
        FramesMethod,
        LayerMethod,
        PatchMethod,
        Policy,
        PreviewMethod,
        ReadingPolicy,
        ReuseMethod,
    )

    try:
        needs = [_TAPS[tap.kind] for tap in cls().taps()]
    except TypeError:  # an option without a default
        needs = []
    if issubclass(cls, FramesMethod):
        needs.append("pixels (prepare)")
    if issubclass(cls, PatchMethod):
        needs.append("pixels")
    if issubclass(cls, ReuseMethod):
        needs.append("tower keys")
    if issubclass(cls, EncoderMethod):
        needs.append("CLS attention" if cls.needs_cls else "tower keys")
    if issubclass(cls, LayerMethod):
        needs.append("prompt attention" if cls.observe is LayerMethod.observe else "layer attention")
    if issubclass(cls, ChunkMethod):
        needs.append("attention of chunks")
    if issubclass(cls, PreviewMethod):
        needs.append("attention in a first pass")
    if issubclass(cls, Drafted):
        needs.append("a smaller model of the family")
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
