"""What the laws share beside their oracle, and which of their cases run by default.

Every law lists its whole square: families, inputs, and the methods of the registry that it is about; `pairwise.py` says which
cases of it there are. Of these a law by default runs one for every site of its methods, or one if it lists none, drawn by a
hash of the case's name: families, inputs and methods take turns from law to law, a new method is in the square by itself, and
what is drawn stays drawn. A family that is drawn less than three times in all gets more, where all laws are collected. All
other cases are marked `full`.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

from mmaccel import Recipe, Stage, recipes
from mmaccel.method.registry import methods

#: how often a family is drawn at least
LEAST = 3


@pytest.fixture
def no_gradients():
    """Inference only."""
    with torch.no_grad():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not drawn."""
    laws: dict[tuple[Path, str, str], list[pytest.Function]] = {}
    known = recipes()
    for item in items:
        if item.path.parent != Path(__file__).parent or not isinstance(item, pytest.Function):
            continue
        if hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            laws.setdefault((item.path, item.originalname, site_of(item.callspec.params, known)), []).append(item)
    drawn = {min(cases, key=rank) for cases in laws.values()}
    every = [case for cases in laws.values() for case in cases]
    if len({path for path, _, _ in laws}) > 1:
        for family in zoo.FAMILIES:
            mine = sorted((case for case in every if family in case.callspec.params.values()), key=rank)
            lacking = max(0, LEAST - len(drawn.intersection(mine)))
            drawn.update([case for case in mine if case not in drawn][:lacking])
    for case in every:
        if case not in drawn:
            case.add_marker(pytest.mark.full)


def rank(case: pytest.Function) -> int:
    """The hash that a case is drawn by."""
    return zlib.crc32(f"{case.path.name} {case.name}".encode())


def site_of(params: dict[str, Any], known: dict[str, Recipe]) -> str:
    """The site of the methods that a case names, `composed` if there are several, and nothing if it names none."""
    stages: list[Stage] = []
    for value in params.values():
        value = known.get(value) if isinstance(value, str) else value
        stages += value.stages if isinstance(value, Recipe) else [value] if isinstance(value, Stage) else []
    sites = {methods()[stage.method].site for stage in stages}
    return "composed" if len(sites) > 1 else "".join(sites)
