"""List methods and recipes: what each keeps by default, and what it does, in the order in which a model meets them.

A method alone is also a recipe of that name. Sites: frames (pixels, before the processor; use mmaccel.prepare), patches (pixels
of the vision tower), encoder (between layers of the tower), projector (between tower and language model), layers (between
layers of the language model), cache (keys and values, after prefill), codec (how keys and values are stored).

NAME shows one method or recipe: its options with defaults and meaning, its paper, requirements, and supported families. --json
and --markdown list all of that but the options' meaning; there, a budget is exact (the method keeps it), at_most (never more),
or adaptive (the content decides).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .shared.options import Json
from .shared.text import grouped, markdown, table, tell

if TYPE_CHECKING:
    from ..recipe import Recipe

PLACE = 8
HELP = "list methods and recipes"
EXAMPLES = """\
examples:
  mmaccel methods
  mmaccel methods snapkv
  mmaccel methods --site cache
  mmaccel methods --json | python -m json.tool
"""

#: titles of the list, by site; methods of a cache that choose again at every decode step are apart
_TITLES = {
    "frames": "before the processor: frames and pixels (site frames)",
    "patches": "before the vision tower (site patches)",
    "encoder": "inside the vision tower (site encoder)",
    "projector": "before the language model (site projector)",
    "layers": "inside the language model (site layers)",
    "cache": "KV cache: keys to keep (site cache)",
    "reading": "KV cache: keys to read at every decode step (site cache)",
    "codec": "KV cache: keys and values in fewer bits (site codec)",
}
_EVERY_STEP = {"attention of each step", "query of each step"}

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
    output: Json = None,
) -> int:
    """Print the tables, or one method or recipe."""
    if name is not None:
        one = describe(name)
        tell(one, output, lambda: render(one))
        return 0
    listed = describe_methods(site)
    composed = [] if site else describe_recipes()
    tables = [method_rows(listed), *([recipe_rows(composed)] if composed else [])]

    def text() -> str:
        return "\n\n".join(map(markdown, tables)) if in_markdown else grouped(groups(listed, composed))

    tell({"methods": listed, "recipes": composed}, output, text)
    return 0


# --------------------------------------------------------------------------------------------------------- one of them


def describe(name: str) -> dict[str, Any]:
    """A method, or else a recipe, as plain data, also by the name as its paper spells it. Raises MmaccelError if there is none
    of that name; the nearest ones are named."""
    from ..method.nearest import spelled
    from ..method.registry import methods
    from ..recipe import get_recipe, recipes

    name = spelled(name, [*methods(), *recipes()])
    if (cls := methods().get(name)) is not None:
        return _describe(cls) | {
            "about": _about(cls),
            "official": official_doc(cls).replace("``", ""),
            "option_docs": {name: meaning.replace("``", "") for name, meaning in option_docs(cls).items()},
            "families": _families(cls),
        }
    return _describe_recipe(name, get_recipe(name))


def _describe_recipe(name: str, recipe: Recipe) -> dict[str, Any]:
    return {
        "name": name,
        "stages": [dataclasses.asdict(stage) for stage in recipe.stages],
        "retain": recipe.retain,
        "positions": recipe.positions,
        "paper": recipe.paper,
        "summary": recipe.summary,
    }


def _about(cls: Any) -> str:
    """The docstring of a method as far as its options."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nParameters\n---")[0]
    text = "\n\n".join(p for p in text.split("\n\n") if not p.startswith('``variant="official"``'))
    # marks of Sphinx: ``code``, :role:`name`, and *titles*
    text = re.sub(r":\w+:`([^`]*)`", r"\1", text.replace("``", "")).replace("`", "")
    return re.sub(r"(?m)^\*(.+?)\*(?=,| \()", r"\1", text.strip(), flags=re.S)


def official_doc(cls: Any) -> str:
    """Changes of the authors' variant of a method, in Markdown; empty if it has none."""
    for one in cls.__mro__:
        for paragraph in inspect.cleandoc(vars(one).get("__doc__") or "").split("\n\n"):
            if paragraph.startswith('``variant="official"``: '):
                return " ".join(paragraph.partition(": ")[2].split())
    return ""


def option_docs(cls: Any) -> dict[str, str]:
    """The meaning of every option in Markdown, from the docstring of a method or of a class above it."""
    meanings: dict[str, str] = {}
    for one in cls.__mro__:
        _, _, listed = inspect.cleandoc(vars(one).get("__doc__") or "").partition("\nParameters\n----------\n")
        # an entry continues in indented lines; the list ends at an empty line
        for entry in re.split(r"\n(?=\S)", listed.partition("\n\n")[0]):
            names, sign, meaning = entry.partition(" : ")
            for name in names.split(", ") if sign else ():
                meanings.setdefault(name.strip(), " ".join(meaning.split()))
    return meanings


def _families(cls: Any) -> list[str]:
    """The families that a method does not refuse."""
    from ..errors import UnsupportedError
    from ..families import families

    supported = []
    for name, family in families().items():
        names = (
            "closed",
            "whole",
            "halves",
            "ranks",
            "stateful",
            "modalities",
            "chosen_above",
            "no_return",
            "undivided",
            "hears",
            "latent",
        )
        usual: Any = SimpleNamespace(**{key: getattr(family, key) for key in names})
        vars(usual).update(name=name, has_cls=family.facts.cls, depth=0, deepstack=0, attending=())
        try:
            method = cls()
            method.fit(usual).suits(usual)
        except UnsupportedError:
            continue
        except TypeError:  # an option without a default
            pass
        supported.append(name)
    return supported


def render(one: dict[str, Any]) -> str:
    """A method or recipe as text."""
    if "stages" in one:
        stages = [["stage", "keeps", "options"]]
        for stage in one["stages"]:
            options = ", ".join(f"{k}={v!r}" for k, v in stage["options"].items())
            stages.append([stage["method"], _share(stage["retain"]), options or "-"])
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
    listed = [["option", "default", "meaning"]]
    listed += [[name, str(value), one["option_docs"].get(name, "-")] for name, value in one["options"].items()]
    return "\n".join(
        [
            f"{one['name']}: {one['summary']}",
            "",
            one["about"],
            "",
            *(f"{title:<9}{fact}" for title, fact in facts),
            "",
            table(listed) if len(listed) > 1 else "It has no options of its own.",
            "",
            f"mmaccel ask --recipe {one['name']}"
            + (f" --set {next(iter(one['options']))}={next(iter(one['options'].values()))}" if one["options"] else "")
            + ' photo.jpg "..."',
        ]
    )


# --------------------------------------------------------------------------------------------------------- all of them


def describe_methods(site: str | None = None) -> list[dict[str, Any]]:
    """Each method as plain data, in the order of sites, then names."""
    from ..method.registry import methods

    order = ("frames", "patches", "encoder", "projector", "layers", "cache", "codec")
    chosen = sorted((order.index(m.site), name) for name, m in methods().items() if site in (None, m.site))
    return [_describe(methods()[name]) for _, name in chosen]


def _describe(cls: Any) -> dict[str, Any]:
    fields = list(dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else []
    # its own options before inherited ones
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
    from .. import method as bases

    try:
        taps = [_TAPS[tap.kind] for tap in cls().taps()]
    except TypeError:  # an option without a default
        taps = []
    encoder, layers, policy = (issubclass(cls, one) for one in (bases.EncoderMethod, bases.LayerMethod, bases.Policy))
    needs = {
        "pixels (prepare)": issubclass(cls, bases.FramesMethod),
        "pixels": issubclass(cls, bases.PatchMethod),
        "tower features": issubclass(cls, (bases.FrameMergingMethod, bases.RebuildingMethod)),
        "tower keys": issubclass(cls, bases.ReuseMethod) or (encoder and not cls.needs_cls),
        "CLS attention": encoder and cls.needs_cls,
        "prompt attention": (layers and cls.observe is bases.LayerMethod.observe)
        or (policy and cls.observe is not bases.Policy.observe),
        "layer attention": layers and cls.observe is not bases.LayerMethod.observe,
        "router weights": issubclass(cls, bases.ExpertMethod),
        "the next token behind every layer": issubclass(cls, bases.RetracingMethod),
        "attention of chunks": issubclass(cls, bases.ChunkMethod),
        "attention in a first pass": issubclass(cls, bases.PreviewMethod),
        "a smaller model of the family": issubclass(cls, bases.Drafted),
        "last query": policy and cls.window == 1,
        f"last {getattr(cls, 'window', 0)} queries": policy and cls.window > 1,
        "queries before RoPE": policy and cls.future,
        "output projection": policy and cls.needs_outgoing,
        "attention of each step": policy and cls.recall is not bases.Policy.recall,
        "query of each step": issubclass(cls, bases.ReadingPolicy),
        "attention in the sound tower": getattr(cls, "needs_sounds", False),
        "question": getattr(cls, "needs_question", False),
    }
    return list(dict.fromkeys([*taps, *(name for name, needed in needs.items() if needed)]))


def describe_recipes() -> list[dict[str, Any]]:
    """Recipes that are no single method under its own name, as plain data."""
    from ..method.registry import methods
    from ..recipe import recipes

    known = methods()
    return [_describe_recipe(name, recipe) for name, recipe in recipes().items() if name not in known]


def groups(listed: list[dict[str, Any]], composed: list[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Rows of name, share and summary by the title of their group: the methods by site, then the recipes of several stages."""
    found: dict[str, list[list[str]]] = {title: [] for title in _TITLES.values()}
    for one in listed:
        reads = one["site"] == "cache" and not _EVERY_STEP.isdisjoint(one["needs"])
        title = _TITLES["reading" if reads else one["site"]]
        found[title].append([one["name"], _share(one["default_retain"]), one["summary"]])
    found["recipes of several stages, or with other settings"] = [
        [one["name"], _share(one["retain"]), one["summary"]] for one in composed
    ]
    return {title: rows for title, rows in found.items() if rows}


def method_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
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
        for m in rows
    ]


def recipe_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Table rows of :func:`describe_recipes`."""
    return [["recipe", "stages", "keeps", "what it is"]] + [
        [r["name"], " + ".join(stage["method"] for stage in r["stages"]) or "-", _share(r["retain"]), r["summary"]]
        for r in rows
    ]


def _share(retain: float | None) -> str:
    return "-" if retain is None else str(retain) if isinstance(retain, int) else f"{retain * 100:.3g}%"
