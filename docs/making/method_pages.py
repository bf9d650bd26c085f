"""A page for every method and recipe, made from the registry, the tables of the documentation and ``benchmarks/results``."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docstrings import markdown

from mmaccel import Recipe, recipes
from mmaccel.cli.methods import describe_methods, option_docs
from mmaccel.cli.shared.text import markdown as table
from mmaccel.method import EncoderMethod
from mmaccel.method.registry import methods
from mmaccel.recipe.losses import losses

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = {
    "exact": "keeps as many as were asked for",
    "at_most": "keeps at most what was asked for",
    "adaptive": "the content decides how many stay",
    "none": "none",
}
NOT_MEASURED = "Not measured yet: [how to](../guides/measuring.md)."
#: titles of the sites in the navigation, in the order in which a token passes them
SITES = {
    "frames": "Pixels and frames",
    "patches": "Before the vision tower",
    "encoder": "Inside the vision tower",
    "projector": "Before the language model",
    "layers": "Inside the language model",
    "cache": "The KV cache",
    "codec": "Codecs",
    "": "Recipes of several stages",
}


def own() -> dict[str, Recipe]:
    """The recipes that come with mmaccel by name, those of a single method among them."""
    known = methods()
    return {
        name: made
        for name, made in recipes().items()
        if all(known[stage.method].__module__.startswith("mmaccel.") for stage in made.stages)
    }


def by_site() -> dict[str, list[str]]:
    """The names of all pages under the titles of :data:`SITES`."""
    known = methods()
    found: dict[str, list[str]] = {title: [] for title in SITES.values()}
    for name in own():
        found[SITES[known[name].site if name in known else ""]].append(name)
    return found


def page(name: str, pictures: dict[str, tuple[str, str]]) -> str:
    """The page of a method or recipe. ``pictures``: by ``image`` and ``video`` a file and what is to be known about it."""
    made = own()[name]
    parts = [f"# {name}", f"{made.summary[:1].upper()}{made.summary[1:].rstrip('.')}."]
    known = {found["name"]: found for found in describe_methods()}
    if name in known:
        parts += [facts(known[name]), usage(made), *drawings(pictures), "## What it does", doc(name), options(name)]
    else:
        parts += [usage(made), *drawings(pictures), "## Stages", stages(made)]
    parts += [*section("Accuracy", accuracy(name)), *section("Cost", cost(name)), "## Families", families(name)]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(title: str, body: str) -> list[str]:
    """A heading and its text, or that nothing was measured."""
    return [f"## {title}", body or NOT_MEASURED]


def paper(words: str) -> str:
    """A paper with a link, as far as its name tells where it is."""
    arxiv = re.fullmatch(r"arXiv (\d{4}\.\d{5})", words)
    if arxiv:
        return f"[{words}](https://arxiv.org/abs/{arxiv[1]})"
    return (
        f"[{words}](https://{words})" if words.startswith("github.com/") else words or "none, a baseline or an own idea"
    )


def facts(found: dict[str, Any]) -> str:
    """What the registry knows of a method."""
    default = "" if found["default_retain"] is None else f", by default `retain={found['default_retain']:g}`"
    lines = [
        f"- **Site**: `{found['site']}`",
        f"- **Needs**: {', '.join(found['needs']) or 'nothing'}",
        f"- **Budget**: {BUDGETS[found['budget']]}{default}",
        f"- **Paper**: {paper(found['paper'])}",
        f"- **Class**: `mmaccel.{methods()[found['name']].__name__}`",
    ]
    return "\n".join(lines)


def usage(made: Recipe) -> str:
    """The line that puts it on."""
    known = methods()
    retain = "" if made.retain is None else f", retain={made.retain:g}"
    if made.stages and all(known[stage.method].site == "frames" for stage in made.stages):
        return f'```python\nprocessor = prepare(processor, "{made.name}"{retain})\n```'
    if made.stages and all(issubclass(known[stage.method], EncoderMethod) for stage in made.stages):
        more = f'clip = accelerate_encoder(clip, "{made.name}"{retain})  # an image encoder alone'
        return f'```python\naccelerate_vlm(model, "{made.name}"{retain})\n{more}\n```'
    return f'```python\naccelerate_vlm(model, "{made.name}"{retain})\n```'


def drawings(pictures: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The pictures of what it keeps, with their captions."""
    about = {
        "image": ("A picture, and what it keeps of it", "mini-llava"),
        "video": ("A clip (above), and what it keeps of it (below)", "mini-qwen-vl"),
    }
    for kind, (file, words) in pictures.items():
        title, model = about[kind]
        caption = f"{title} on the shipped `{model}`: {words}. Dark is dropped; outlined groups are one token."
        yield f"![{title}]({file})\n\n*{caption}*"


def doc(name: str) -> str:
    """The docstring without the options, which have a table."""
    text = markdown(methods()[name].__doc__ or "")
    return re.sub(r"\*\*Parameters\*\*\n\n(?:- .*\n(?:  .*\n?)*)+", "", text + "\n").strip()


def options(name: str) -> str:
    """Options with defaults and meanings; those that all methods of a site share come last."""
    cls = methods()[name]
    said = option_docs(cls)
    rows = [["option", "default", "meaning"]]
    fields = [field for field in dataclasses.fields(cls) if field.init]
    here = {
        key
        for kind in cls.__mro__
        if kind.__module__ == cls.__module__
        for key in vars(kind).get("__annotations__", {})
    }
    for field in sorted(fields, key=lambda field: field.name not in here):
        default = "needed" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append([f"`{field.name}`", default, markdown(said[field.name]).replace("|", "\\|")])
    return f"## Options\n\n{table(rows)}" if len(rows) > 1 else "## Options\n\nNone."


def stages(made: Recipe) -> str:
    """The stages of a recipe with links to their methods."""
    rows = [["stage", "keeps", "options"]]
    for stage in made.stages:
        chosen = ", ".join(f"`{key}={value!r}`" for key, value in stage.options.items())
        rows.append(
            [
                f"[{stage.method}]({stage.method}.md)",
                "-" if stage.retain is None else f"{stage.retain:g}",
                chosen or "-",
            ]
        )
    about = f"Positions: `{made.positions}`; variant: `{made.variant}`."
    source = f" {paper(made.paper)}." if made.paper else ""
    return f"{table(rows)}\n\n{about}{source}" if made.stages else f"None. {about}"


@cache
def record(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


#: the comparisons of recipes: on which pages their commands, machines and versions stand
COMPARED = {
    "mini-llava-recipes": "../results/benchmarks.md#what-every-recipe-costs-in-answers",
    "mini-llava-curves": "../results/index.md#small-models-that-see",
    "mini-llava-kv": "../guides/kv-cache.md",
    "mini-qwen-vl-image-curves": "../results/index.md#small-models-that-see",
    "mini-qwen-vl-curves": "../results/index.md#small-models-that-see",
}


#: the tables of answers that stay the same, and what was asked
ANSWERS = {
    "answers-pictures": "one picture",
    "answers-pictures-deep": "one picture",
    "answers-pictures-qwen": "one picture",
    "answers-several": "two pictures",
    "answers-clips": "clips of 16 frames",
    "answers-long-clips": "clips of 48 frames",
}
#: the same of the shipped model around a real language model
ANSWERS_REAL = {
    "answers-pictures-smol": "one picture",
    "answers-documents": "a document",
}


def accuracy(name: str) -> str:
    """What it costs in answers: of the shipped small models, and of a real language model."""
    return "\n\n".join(
        [
            "### Small models",
            "\n\n".join(filter(None, [compared(name), same_answers(name, ANSWERS)])) or NOT_MEASURED,
            "### A real language model",
            *[f"**{sentence}.**" for recipe, _, sentence in losses() if recipe.name == name],
            *filter(None, [same_answers(name, ANSWERS_REAL)]),
            pages_read(name),
        ]
    )


def compared(name: str) -> str:
    """Right answers of the small models, beside the full model of the same comparison."""
    rows = [["measured in", "questions", "kept", "accuracy", "full model", "KL", "tokens a layer", "KV"]]
    for source, link in COMPARED.items():
        found = record(source)
        full = next(row["figures"] for row in found["rows"] if row["recipe"]["name"] == "none")
        for row in found["rows"]:
            if re.sub(r"-layer\d+$", "", row["recipe"]["name"]) != name:
                continue
            figures, kept = row["figures"], row["retain"]
            told = [f"{figures['accuracy']:.1%}", f"{full['accuracy']:.1%}", f"{figures['kl']:.3f}"]
            shares = [f"{figures[key]:.0%}" for key in ("visual_share_per_layer", "kv_share")]
            rows.append([f"[{source}]({link})", str(found["questions"]), budget(kept), *told, *shares])
    if len(rows) == 1:
        return ""
    return (
        f"{table(rows)}\n\nKL of the next-token distributions against the full model, in nats. Questions of the suite."
    )


def same_answers(name: str, tables: dict[str, str]) -> str:
    """Answers of shipped models that stay the same, by the tables in ``benchmarks/results`` and what they ask about."""
    rows = [["questions about", "model", "kept", "same answers", "of"]]
    for source, about in tables.items():
        found = record(source)
        for title, row in found["rows"].items():
            known, _, share = title.partition(":")
            if known == name and ":" not in share and "+" not in share:
                same, asked = sum(row["kept"]), len(row["kept"])
                share = budget(float(share) if share else None)
                rows.append([about, found["model"], share, f"{same / asked:.1%}", str(asked)])
    if len(rows) == 1:
        return ""
    return f"{table(rows)}\n\nAnswers that stay the same ([all recipes](../results/recipes.md))."


def pages_read(name: str) -> str:
    """Right answers of a real language model about pages of text, ours and those of kvpress."""
    found = record("pages")
    kinds = list(found["rows"]["none"]["kinds"])
    columns = [["", "right answers", *kinds]]
    for title, row in found["rows"].items():
        known, *rest = title.split(":")
        if known.removeprefix("kvpress ") == name:
            pairs = [row["kinds"][kind] for kind in kinds]
            right, asked = (sum(pair[which] for pair in pairs) for which in ("right", "asked"))
            cells = [f"{pair['right']} of {pair['asked']}" for pair in pairs]
            head = " ".join([known, *(budget(float(share)) for share in rest[:1] if share), *rest[1:]])
            columns.append([head, f"{right / asked:.1%} of {asked}", *cells])
    if len(columns) == 1:
        return (
            "Not measured on [pages](../results/pages.md), which ask for recipes of the cache and the language model."
        )
    bare = found["rows"]["none"]["kinds"].values()
    about = (
        f"Questions about [pages](../results/pages.md) of 576 tokens, SmolLM2-135M-Instruct; the full model answers "
        f"{sum(pair['right'] for pair in bare)} of {sum(pair['asked'] for pair in bare)} right."
    )
    return f"{table(list(zip(*columns, strict=True)))}\n\n{about}"


def budget(retain: float | None) -> str:
    """A budget as a percentage or a count; a dash for none."""
    return "-" if retain is None else f"{retain:.0%}" if retain <= 1 else str(retain)


def cost(name: str) -> str:
    """What choosing costs, and what was saved where it was measured."""
    return "\n".join([*selection(name), *prefill(name), *shapes(name), *steps(name)])


def selection(name: str) -> Iterator[str]:
    """What it takes to choose."""
    rows = [row for row in record("selection-cpu")["rows"] if row["method"] == name]
    if rows:
        times = ", ".join(f"{1000 * row['selection_s']:,.1f} ms of {row['tokens']:,}" for row in rows)
        shares = [row["share"] for row in rows if row["share"] is not None]
        most = (
            f"at most {max(shares):.2%} of the prefill that a 7B model saves by it" if shares else "and saves nothing"
        )
        yield (
            f"- Choosing a quarter takes {times} tokens on a CPU, {most} "
            "([selection](../results/benchmarks.md#the-cost-of-selection))."
        )


def prefill(name: str) -> Iterator[str]:
    """How much faster prefill was, and could be."""
    for row in record("prefill-cpu")["prefill"]:
        if row["recipe"] == name:
            yield (
                f"- Prefill of {row['visual_tokens']:,} visual tokens at {row['retain']:.0%} is {row['speedup']:.1f} times as "
                f"fast on a CPU; operations promise {row['speedup_flops']:.1f} ([prefill](../results/index.md#prefill))."
            )


def shapes(name: str) -> Iterator[str]:
    """When the first token came, on the shape of a model."""
    rows = record("bench-small")["rows"]
    first = {
        (row["name"], row["workload"]): row["figures"]["ttft_s"]["median"] for row in rows if row["problem"] is None
    }
    for row in rows:
        if row["name"] == name and row["problem"] is None:
            bare, here = first["bare", row["workload"]], first[name, row["workload"]]
            yield (
                f"- `{row['workload']}` on the shape `small` at {row['retain']:.0%}: first token after {here:.2f} s, bare "
                f"{bare:.2f} s, on a CPU ([real shapes](../results/benchmarks.md#the-speed-of-real-shapes))."
            )


def steps(name: str) -> Iterator[str]:
    """What a decode step asks of the host."""
    launches = {row["recipe"]: row["step"]["launches"] for row in record("decode-counts-small")["host"]}
    if name in launches:
        yield (
            f"- A decode step launches {launches[name]:.0f} kernels, {launches['bare']:.0f} in the bare model "
            "([decoding](../decoding.md#measured))."
        )


@cache
def matrix() -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """The families, what the table of recipes and families says of every recipe, and what its numbers mean."""
    text = (
        (ROOT / "docs" / "families.md")
        .read_text(encoding="utf-8")
        .split("<!-- matrix -->")[1]
        .split("<!-- /matrix -->")[0]
    )
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.M))
    return lines[0][1:], {line[0].strip("`"): line[1:] for line in lines[2:]}, reasons


def families(name: str) -> str:
    """On which families it runs, and why not on others."""
    heads, known, reasons = matrix()
    groups: dict[str, list[str]] = {}
    for family, said in zip(heads, known[name], strict=True):
        groups.setdefault(said, []).append(family)
    lines = []
    for said, which in groups.items():
        told = re.sub(r"\b(\d+)\b", lambda found: f"refused: {reasons[found[1]]}", said)
        names = "all families" if len(which) == len(heads) else ", ".join(which)
        lines.append(f"- {names}: {'runs' if said == 'yes' else told}")
    return "\n".join([*lines, "", "Run on tiny models of every [family](../families.md#recipes-and-families)."])
