"""Write the tables of a page anew, where it has markers for them.

``<!-- NAME -->`` and ``<!-- /NAME -->`` enclose a whole table: of methods, families or refused models, of the questions that
results answer, or of the results file of that name. ``<!-- rows of NAME: ROW; ROW | COLUMN; COLUMN -->`` and ``<!-- /rows -->``
enclose some of its rows and columns, in its order; a ROW is how rows begin.

python docs/making/tables.py docs/methods/index.md docs/families.md docs/results/*.md
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

from mmaccel.cli.methods import describe_methods, describe_recipes, method_rows, recipe_rows  # noqa: E402
from mmaccel.cli.shared.text import markdown, put_between  # noqa: E402
from mmaccel.errors import MmaccelError  # noqa: E402
from mmaccel.families import REFUSED, families  # noqa: E402
from mmaccel.method.nearest import systems  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
#: pages that answer a question, in the order of the overview
QUESTIONS = (
    "one-picture",
    "many-pictures",
    "clips",
    "long-video",
    "documents",
    "screenshots",
    "long-answers",
    "small-memory",
    "many-users",
)
#: by the beginning of a results file's name: the module of ``benchmarks`` whose ``table`` writes it
MAKERS = {"answers-": "answers", "tuned-": "tuned", "pages": "pages", "things-": "things", "prefix-": "prefix"}
MAKERS |= {
    "towers": "towers",
    "memory": "memory",
    "offload": "offload",
    "streams": "streams",
    "streams-hour": "streams",
    "streams-long": "streams",
}
MAKERS |= {"long-video": "long_video", "prompt-cache": "prompt_cache", "kernels-": "kernels", "decode-steps-": "decode"}
ROWS = re.compile(r"(<!-- rows of ([\w-]+): ([^|>]+) \| ([^>]+) -->\n).*?(<!-- /rows -->)", re.S)


def system_tables() -> str:
    """Systems of the field by group: where each is in mmaccel, or why it is not."""
    parts = []
    for group in dict.fromkeys(one["group"] for one in systems()):
        rows = [["system", "what it does", "in mmaccel"]]
        for one in systems():
            if one["group"] == group:
                place = one.get("here") or f"no: {one['why']}"
                near = "".join(f", `{name}`" for name in one.get("near", ())).removeprefix(", ")
                rows.append([one["name"], one.get("what", ""), place + (f"; nearest: {near}" if near else "")])
        parts.append(f"## {group}\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def update(page: Path) -> None:
    """Write the tables of a page. Raises MmaccelError if it has no markers."""
    makers = {"methods": method_tables, "families": family_table, "refused": refused_table, "questions": question_table}
    makers["systems"] = system_tables
    makers["negative"] = lambda: str(importlib.import_module("negative").table())
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"<!-- ([\w-]+) -->", text)
    whole = [name for name in marks if name in makers or maker(name) or name.startswith("bench-")]
    if not whole and not ROWS.search(text):
        raise MmaccelError(f"{page} has no markers of a table.")
    for name in whole:
        put_between(page, name, makers[name]() if name in makers else result_table(name))
    page.write_text(with_rows(page), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- results
def maker(name: str) -> str | None:
    """The module that writes the table of a results file."""
    return next((module for start, module in MAKERS.items() if name.startswith(start)), None)


@cache
def result_table(name: str) -> str:
    """The whole table of a results file, ``NAME.json`` or ``NAME-cpu.json``."""
    path = RESULTS / f"{name}.json"
    path = path if path.exists() else RESULTS / f"{name}-cpu.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    if name == "vllm":
        return vllm_table(record)
    if name == "cache-speed":
        return str(importlib.import_module("cache_speed").table(record["rows"]))
    if module := maker(name):
        return str(importlib.import_module(module).table(record))
    return str(importlib.import_module("training.results").block(name))


def vllm_table(record: dict[str, Any]) -> str:
    """The table of requests a second inside vLLM; what operations promise follows from the configuration of its model."""
    from serving import throughput
    from transformers import AutoConfig

    size = throughput.Size(**record["asked"]["size"])
    with tempfile.TemporaryDirectory() as folder:
        throughput.write_model(Path(folder), size)
        return throughput.report(record, size, AutoConfig.from_pretrained(folder), record["asked"]["answer"])


def with_rows(page: Path) -> str:
    """The text of a page with its excerpts of tables made anew."""

    def made(found: re.Match[str]) -> str:
        name, rows, columns = found[2], found[3].split("; "), found[4].split("; ")
        return f"{found[1]}{excerpt(name, rows, columns)}\n\n{origin(name, page)}\n{found[5]}"

    return ROWS.sub(made, page.read_text(encoding="utf-8"))


def excerpt(name: str, wanted: list[str], columns: list[str]) -> str:
    """The rows of a table that begin with one of the wanted words, in its order, and some of its columns.

    Raises MmaccelError if there is no such row or column.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for table in re.findall(r"(?:^\|.*\n?)+", result_table(name), re.M):
        head, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        # a folded table goes on with the same columns, or has others of the same rows
        count = counts.setdefault(tuple(head), Counter())
        for row in body:
            told = " ".join(" ".join(row).replace("`", "").split()) + " "
            for start in wanted:
                if told.startswith(f"{start} "):
                    found.setdefault((start, count[start]), {}).update(zip(head, row, strict=True))
                    count[start] += 1
    if missing := set(wanted) - {start for start, _ in found}:
        raise MmaccelError(f"The table of {name} has no rows that begin with {', '.join(sorted(missing))}.")
    if missing := set(columns) - {column for row in found.values() for column in row}:
        raise MmaccelError(f"The table of {name} has no columns {', '.join(sorted(missing))}.")
    return markdown([columns, *([row.get(column, "") for column in columns] for row in found.values())])


def origin(name: str, page: Path) -> str:
    """Where the whole table stands, with its command, machine and versions."""
    for place in sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]):
        before, mark, _ = place.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
        if mark:
            title = re.findall(r"^#+ (.*)$", before, re.M)[-1]
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            where = os.path.relpath(place, page.parent)
            return f"All rows, the command, machine and versions: [{title}]({where}#{anchor})."
    raise MmaccelError(f"No page has the table of {name}.")


def question_table() -> str:
    """The questions that results answer, with the first sentence of each page."""
    rows = [["you have", "in short"]]
    for name in QUESTIONS:
        title, answer = opening((ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8"))
        rows.append([f"[{title}]({name}.md)", answer])
    return markdown(rows)


def opening(text: str) -> tuple[str, str]:
    """The title and the first sentence of a page."""
    title, paragraph = text.removeprefix("# ").split("\n\n")[:2]
    return title, " ".join(re.split(r"(?<=\.)\s", paragraph)[0].split())


# ---------------------------------------------------------------------------------------------- what comes with mmaccel
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
