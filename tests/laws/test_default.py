"""What of the laws runs by default: something of every law, every family and every site; and nothing is outside the square."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zoo

from mmaccel.families import families, family_of
from mmaccel.method.registry import methods

LAWS = Path(__file__).parent


def collected(*options: str) -> list[str]:
    """The names of the laws' cases that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, str(LAWS)]
    made = subprocess.run(
        command, capture_output=True, text=True, cwd=LAWS.parents[1], env=dict(os.environ), timeout=600
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return [line.split("/")[-1] for line in made.stdout.splitlines() if "::" in line]


def long() -> Iterator[str]:
    """The laws whose every case is marked by hand, since they are long, or run other laws with something changed."""
    for path in LAWS.glob("test_*.py"):
        for law in ast.parse(path.read_text()).body:
            if isinstance(law, ast.FunctionDef) and "pytest.mark.full" in map(ast.unparse, law.decorator_list):
                yield f"{path.name}::{law.name}"


@pytest.mark.full
def test_every_law_family_and_site_has_its_turn() -> None:
    drawn, whole = collected(), collected("-m", "")
    assert set(drawn) < set(whole)
    assert {name.split("::")[0] for name in drawn} == {name.split("::")[0] for name in whole} - {LAWS.name}
    missing = {name.split("[")[0] for name in whole} - {name.split("[")[0] for name in drawn}
    assert missing == set(long()) and len(missing) < 10
    turns = Counter(family for name in drawn for family in zoo.FAMILIES if f"{family}-" in name or f"{family}]" in name)
    assert set(turns) == set(zoo.FAMILIES) and min(turns.values()) >= 3, turns
    sites = Counter(kind.site for name in drawn for one, kind in methods().items() if f"{one}]" in name)
    assert set(sites) == {kind.site for kind in methods().values()}, sites


def test_every_family_has_a_tiny_model() -> None:
    assert {type(family_of(zoo.model(family))) for family in zoo.FAMILIES} == set(families().values())
