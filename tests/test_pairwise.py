"""The cases that run of every square show all that the square promises; what is missing is found by counting case by case."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zoo
from laws import oracle
from pairwise import SQUARES, Square, kinds_of_family, kinds_of_recipe, multiplied, name_of

from mmaccel import recipes

TESTS = Path(__file__).parent


def shown(square: Square, numbers: Iterable[int]) -> set[Any]:
    """What these cases of a square show of what it promises."""
    sorts = square.kinds
    found: set[Any] = set()
    for number in numbers:
        names = list(map(name_of, square.cases[number][0]))
        for at, name in enumerate(names):
            own = sorts[at][name]
            found |= {(at, name)} if square.of != "kinds" or own is None else {(at, kind) for kind in own}
        for first, second in itertools.combinations(range(len(names)), 2):
            left, right = sorts[first][names[first]], sorts[second][names[second]]
            for a in [names[first]] if left is None else left:
                found |= {(first, second, a, b) for b in ([names[second]] if right is None else right)}
            if square.of == "pairs" and left is not None and right is not None:
                found |= {(first, second, names[first], kind) for kind in right}
                found |= {(first, second, kind, names[second]) for kind in left}
    return found


def missing(square: Square, chosen: Iterable[int]) -> set[Any]:
    """What a square promises and these of its cases do not show."""
    return shown(square, range(len(square.cases))) - shown(square, chosen)


def collects_all(config: pytest.Config) -> bool:
    """Whether the squares of all files are there."""
    return config.args == config.getini("testpaths") and not config.option.ignore


def test_nothing_is_missing_from_any_square(request: pytest.FixtureRequest) -> None:
    """Of every square that was collected with this test; by `python -m pytest` these are all."""
    for square in SQUARES.values():
        assert not missing(square, square.chosen), square.test
    if collects_all(request.config):
        files = {path.stem for path in TESTS.rglob("test_*.py") if "mark.square(" in path.read_text("utf-8")}
        assert {test.split(".")[-2] for test in SQUARES} == files - {Path(__file__).stem}


def test_the_laws_themselves_are_of_pairs_and_leave_out_no_case(request: pytest.FixtureRequest) -> None:
    """What a list leaves out before it becomes a square, no generator can choose."""
    whole = [square for square in SQUARES.values() if square.of == "pairs"]
    for square in whole:
        family, name = square.names.index("family"), square.names.index("name" if "name" in square.names else "method")
        listed = {(values[family], values[name]) for values, _ in square.cases}
        assert listed == set(oracle.square(sorted({name for _, name in listed}))), square.test
    if collects_all(request.config):
        files = {square.test.split(".")[-2] for square in whole}
        assert files >= {"test_law1_keep", "test_law2_hiding", "test_law3_batch", "test_law4_budget", "test_turns"}


def made(of: str, *axes: Any) -> Square:
    """A square of these axes, given as names and cases."""
    return multiplied("a test", [pytest.mark.square(*axis, of=of).mark for axis in axes])


METHODS = ("divprune", "tome", "fastv", "snapkv", "h2o", "pool", "kivi")  # by choice: of several sites


@pytest.mark.parametrize("of", ("kinds", "values", "pairs"))
def test_a_case_that_is_left_out_is_missed(of: str) -> None:
    square = made(of, ("family", zoo.FAMILIES), ("name", METHODS), ("dtype", ("float32", "bfloat16", "float16")))
    assert len(square.chosen) < len(square.cases) / 3 and not missing(square, square.chosen)
    # whatever one case alone shows is missed without it
    every = {at: shown(square, [at]) for at in square.chosen}
    count = Counter(itertools.chain.from_iterable(every.values()))
    lone = [at for at, its in every.items() if any(count[one] == 1 for one in its)]
    assert len(lone) > len(square.chosen) / 3
    for at in lone[:3]:
        assert missing(square, set(square.chosen) - {at})
    assert missing(square, []) and not missing(square, range(len(square.cases)))


def test_every_method_meets_every_kind_of_family() -> None:
    square = made("pairs", ("family, name", list(itertools.product(zoo.FAMILIES, METHODS))))
    cases = [square.cases[at][0] for at in square.chosen]
    every = frozenset[str]().union(*map(kinds_of_family, zoo.FAMILIES))
    book = recipes()
    for name in METHODS:
        assert frozenset[str]().union(*(kinds_of_family(family) for family, one in cases if one == name)) == every
    wanted = frozenset[str]().union(*(kinds_of_recipe(book[name]) for name in METHODS))
    for family in zoo.FAMILIES:
        assert frozenset[str]().union(*(kinds_of_recipe(book[name]) for one, name in cases if one == family)) == wanted


def test_options_come_in_all_pairs_and_default_cases_stay() -> None:
    axes = [(name, range(4)) for name in "abc"]
    square = made("values", *axes)
    cases = [square.cases[at][0] for at in square.chosen]
    for first, second in itertools.combinations(range(3), 2):
        assert {(case[first], case[second]) for case in cases} == set(itertools.product(range(4), repeat=2))
    assert 16 <= len(cases) < 32 and square.chosen == made("values", *axes).chosen
    marked = [pytest.param(family, marks=() if family == "llava" else pytest.mark.full) for family in zoo.FAMILIES]
    square = made("kinds", ("family", marked))
    cases = [square.cases[at][0][0] for at in square.chosen]
    assert "llava" in cases and len(cases) < 20 and not missing(square, square.chosen)


def test_kinds_tell_families_and_methods_apart() -> None:
    """Families of other mechanisms have other kinds, and every kind is one of some families but not of all."""
    axes = [("family", zoo.FAMILIES), ("name", METHODS), ("dtype", ("float32",)), ("how", ("llava", "divprune"))]
    along = [list(axis.values()) for axis in made("values", *axes).kinds]
    assert (
        along[0] == list(map(kinds_of_family, zoo.FAMILIES))
        and None not in along[1]
        and along[2:] == [[None], [None] * 2]
    )
    every = [kinds_of_family(family) for family in zoo.FAMILIES]
    assert len(set(every)) > 20
    for kind in frozenset[str]().union(*every):
        assert 0 < sum(kind in one for one in every) < len(every), kind
    assert kinds_of_family("qwen3_vl") > {"three axes of positions", "DeepStack", "packed tower", "clips"}
    assert kinds_of_family("internvl") > {"clips as pictures", "tower with CLS", "tiles"}
    book = recipes()
    sorts = {name: kinds_of_recipe(book[name]) for name in METHODS}
    assert len(set(sorts.values())) > 4 and "mass stays" in sorts["tome"] | sorts["pool"]
