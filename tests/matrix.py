"""Every recipe on every family's tiny model, as the table that stands in the documentation.

``python tests/matrix.py --update docs/families.md`` runs each recipe on a picture and on a clip and writes the table between
the markers; a test checks that it is current.
"""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zoo

from mmaccel import Recipe, UnsupportedError, accelerated, get_recipe, prepare, recipes
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.method.experts import ExpertMethod
from mmaccel.method.registry import methods
from mmaccel.method.retracing import RetracingMethod

QUESTION = "What is here?"
DEPTH = 4
KEEPING = (ExpertMethod, RetracingMethod)
"""Layers of the tiny language models."""


@functools.cache
def bare(family: str) -> Any:
    """A shared tiny model."""
    return zoo.model(family)


def feed(family: str, kind: str, prepared: Any) -> Any:
    """A picture or a clip and a question, through the processor that the recipe has prepared."""
    side = (96, 96) if kind == "image" else (8, 64, 64)
    pictures = [zoo.image(*side, seed=0)] if kind == "image" else []
    clips = [zoo.clip(*side, seed=0)] if kind == "video" else []
    return zoo.encode(family, [(pictures, clips, QUESTION)], prepared)


def within_reach(chosen: Recipe) -> Recipe:
    """The recipe with the layers that only deep models have moved to the last of the tiny ones."""
    stages = []
    for stage in chosen.stages:
        layer = getattr(methods()[stage.method](**stage.options), "layer", 0)
        deep = isinstance(layer, int) and layer > DEPTH - 1
        stages.append(replace(stage, options={**stage.options, "layer": DEPTH - 1}) if deep else stage)
    return replace(chosen, stages=tuple(stages))


def attempt(name: str, family: str, kind: str) -> str:
    """``yes``, or the sentence in which the recipe is refused."""
    chosen, tiny = within_reach(get_recipe(name)), bare(family)
    prepared = prepare(zoo.processor(family), chosen)
    try:
        with accelerated(tiny, chosen, processor=prepared):
            given = feed(family, kind, prepared)
            out = tiny.generate(**given, max_new_tokens=3, do_sample=False)
            stats = tiny.mmaccel.stats()
    except UnsupportedError as error:
        return str(error)
    assert torch.equal(out[:, : given["input_ids"].shape[1]], given["input_ids"]), "the prompt did not come back"
    ran = {stage["site"] for stage in stats["stages"]} | {"frames"}
    # these keep all tokens, and are no stage of the statistics
    kinds = [kind for stage in chosen.stages if not issubclass(kind := methods()[stage.method], KEEPING)]
    assert ran >= {kind.site for kind in kinds}, f"only {ran} ran"
    return "yes"


def own_recipes() -> list[str]:
    """The recipes that come with mmaccel, in the order of their sites."""
    order = ("frames", "patches", "encoder", "projector", "layers", "cache", "codec")
    known = methods()
    chosen = {
        name: [order.index(known[stage.method].site) for stage in made.stages]
        for name, made in recipes().items()
        if all(known[stage.method].__module__.startswith("mmaccel.") for stage in made.stages)
    }
    return sorted(chosen, key=lambda name: (chosen[name], name))


def matrix() -> tuple[list[list[str]], list[str]]:
    """The table's rows, the head first, and the reasons that its numbers stand for."""
    reasons: list[str] = []
    rows = [["recipe", *(f"`{family}`" for family in zoo.FAMILIES)]]
    for name in own_recipes():
        row = [f"`{name}`"]
        for family in zoo.FAMILIES:
            kinds = [kind for kind in ("image", "video") if kind in zoo.kinds(family)]
            marks = []
            for kind in kinds:
                said = attempt(name, family, kind)
                if said != "yes":
                    said = said.replace(f"the {family} tower", "the tower").replace(f"this {family} ", "this ")
                    said = said.replace(f" of {family} ", " ").replace(f"Method {name!r}", "The method")
                    said = said.replace(f"{name} needs", "The method needs")
                    # of a recipe the first method that is refused
                    said = re.sub(r"^\S+ (?=looks into|merges tokens)", "The method ", said)
                    if said not in reasons:
                        reasons.append(said)
                    said = str(reasons.index(said) + 1)
                marks.append(said)
            row.append(marks[0] if len(set(marks)) == 1 else "pictures " + marks[0] + ", clips " + marks[1])
        rows.append(row)
    return rows, reasons


def block() -> str:
    """The block between the markers."""
    rows, reasons = matrix()
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{markdown(rows)}\n\n{notes}" if notes else markdown(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE", help="write the table into this file")
    options = parser.parse_args()
    if options.update:
        put_between(options.update, "matrix", block())
    else:
        print(block())
