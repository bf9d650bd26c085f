"""How many answers of vLLM in bfloat16 are those of transformers in bfloat16: sums in another order round differently.

Tiny random models of the tests, whose answers depend on every bit; first tokens, and all eight.

    OMP_NUM_THREADS=1 serving/bin/python benchmarks/serving/half.py --update docs/guides/serving.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import throughput

from mmaccel.cli.shared.text import markdown, put_between

TESTS = Path(__file__).parents[2] / "tests"
FAMILIES = ("qwen3_5", "qwen3_vl")
RECIPES: tuple[dict[str, Any], ...] = ({"recipe": "none"}, {"recipe": "divprune", "retain": 0.25})
#: prompts of each kind
COUNT = 15


def compared(family: str, recipe: dict[str, Any], models: Path) -> list[str]:
    """A row of the table."""
    import tiny
    import torch

    options = dict(recipe)
    name, equal = options.pop("recipe"), []
    with tiny.engine(tiny.folder(family, models), recipe, dtype="bfloat16") as llm:
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind, COUNT)
            theirs = tiny.expected(family, rows, name, torch.bfloat16, **options)
            equal += list(zip(tiny.served(llm, family, rows), theirs, strict=True))
    first = sum(ours[0] == other[0] for ours, other in equal)
    whole = sum(ours == other for ours, other in equal)
    return [family, " ".join(map(str, recipe.values())), *map(str, (len(equal), first, whole))]


def main() -> None:
    """Compare, print a table, and write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, help="write the table into this page")
    given = parser.parse_args()
    throughput.quiet()
    os.environ["VLLM_PLUGINS"] = "mmaccel"
    sys.path[:0] = [str(TESTS / "vllm_plugin"), str(TESTS)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [["model", "recipe", "answers", "first token equal", "all eight equal"]]
        rows += [compared(family, recipe, Path(folder)) for family in FAMILIES for recipe in RECIPES]
    packages = ("vllm", "torch", "transformers", "mmaccel")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    command = "OMP_NUM_THREADS=1 python benchmarks/serving/half.py --update docs/guides/serving.md"
    table = f"{markdown(rows)}\n\n`{command}`, CPU, {versions}."
    print(table)
    if given.update:
        put_between(given.update, "half", table)


if __name__ == "__main__":
    main()
