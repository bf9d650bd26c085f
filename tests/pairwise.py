"""Which cases of a square of tests run: as few as show every pair.

A square holds all cases of a test: families, methods, and further axes such as kinds of inputs, dtypes or windows. Most cases
repeat each other, since families share their mechanisms and methods their bases. `@pytest.mark.square(names, cases)` stands in
place of `pytest.mark.parametrize`; several such marks are multiplied. Of the square run so many cases that

- every value of every axis runs (with `of="kinds"`: of families, methods and recipes only every kind),
- every two values of further axes run together, and each of them with every kind of family and every kind of method,
- every kind of family runs with every kind of method,
- with `of="pairs"` every method runs with every kind of family, and every family with every kind of method.

The laws themselves are `of="pairs"`. A test that repeats one under another condition, such as autocast, is not: the condition
is one more axis beside them. What hardly depends on methods and families is `of="kinds"`. Kinds are read off the adapters and
the methods: what is new has its own without being named here. `test_pairwise.py` looks for pairs that are left out.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import zoo
from laws import oracle

from mmaccel import Recipe, recipes
from mmaccel.families.base import Family, slides
from mmaccel.families.grids import PackedGrids
from mmaccel.families.mrope import ThreeAxes
from mmaccel.method import Method, Policy, TokenMethod

#: the values of a case, and its marks
Case = tuple[tuple[Any, ...], tuple[Any, ...]]
#: numbers of two values or kinds of a square; the same one twice stands for a value by itself
Pair = tuple[int, int]

# -------------------------------------------------------------------------------------------------------------- kinds


@functools.cache
def kinds_of_family(family: str) -> frozenset[str]:
    """What distinguishes a family mechanically."""
    known = oracle.adapter(family)
    packed = isinstance(known, PackedGrids) or known.one_call
    facts = {
        "three axes of positions": isinstance(known, ThreeAxes),
        "RoPE of halves": known.halves,
        "other RoPE": not known.halves,
        "RoPE by layer": len({known.rope_kind(layer) for layer in range(known.depth)}) > 1,
        "DeepStack": known.deepstack > 0,
        "closed tower": known.closed is not None,
        "packed tower": known.closed is None and packed,
        "tower with CLS": known.closed is None and known.has_cls,
        "tower without CLS": known.closed is None and not known.has_cls and not packed,
        "patches merge": known.closed is known.whole is None,
        "blocks of patches merge": known.closed is known.whole is None and "blocks" in known.facts.merging,
        "tiles": "tiled" in known.facts.pictures,
        "one tile": "tiled" not in known.facts.pictures,
        "clips": "video" in known.modalities,
        "no clips": "video" not in zoo.kinds(family),
        "clips as pictures": "video" in zoo.kinds(family) and "video" not in known.modalities,
        "separators": any(True for _ in known.inner.parameters(recurse=False)),
        "recurrent layers": known.stateful,
        "windows": slides(known.config),
        "tokens attend both ways": type(known).bidirectional_groups is not Family.bidirectional_groups,
    }
    return frozenset(fact for fact, holds in facts.items() if holds)


def kinds_of_recipe(recipe: Recipe) -> frozenset[str]:
    """What distinguishes the methods of a recipe mechanically."""
    return frozenset(kind for _, made in recipe.build() for kind in kinds_of_method(made))


def kinds_of_method(made: Method) -> Iterator[str]:
    """The base in `mmaccel.method`, the budget, and what the method reads or does beside dropping."""
    yield next(kind.__name__ for kind in type(made).__mro__ if kind.__module__.startswith("mmaccel.method."))
    yield f"budget: {made.budget}"
    if isinstance(made, TokenMethod):
        facts = {
            "question": made.needs_question,
            "text tower": made.text_tower is not None,
            "mass stays": made.conserves_mass,
        }
        yield from (fact for fact, holds in facts.items() if holds)
    if isinstance(made, Policy) and made.scheduled:
        yield "schedule"


# -------------------------------------------------------------------------------------------------------------- pairs


def name_of(value: Any) -> str:
    """What a value is told by, the same in every process."""
    return getattr(value, "__qualname__", None) or repr(value)


@dataclass(frozen=True)
class Sorted:
    """The number of a value of an axis, and those of its kinds; None where the axis has none."""

    own: int
    kinds: list[int] | None


@dataclass
class Square:
    """All cases of a test, and those that run.

    of : see above. known : recipes that the test has under names of its own. ids : as `parametrize` has it.
    """

    test: str
    names: tuple[str, ...]
    cases: list[Case]
    of: Literal["kinds", "values", "pairs"] = "values"
    known: Mapping[str, Recipe] = field(default_factory=dict)
    ids: Callable[[Any], str] | None = None
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    @functools.cached_property
    def kinds(self) -> list[dict[str, frozenset[str] | None]]:
        """Every value of every axis by its name, and its kinds: of families, methods and recipes; None along further axes."""
        return [self._kinds(axis) for axis in zip(*(values for values, _ in self.cases), strict=True)]

    def _kinds(self, axis: Sequence[Any]) -> dict[str, frozenset[str] | None]:
        values = {name_of(value): value for value in axis}
        assert not any(" at 0x" in name for name in values), f"{self.test}: another name every time: {list(values)}"
        if all(isinstance(value, str) and value in zoo.FAMILIES for value in values.values()):
            return {name: kinds_of_family(value) for name, value in values.items()}
        book = {**recipes(), **self.known}
        if all(value in book if isinstance(value, str) else isinstance(value, Recipe) for value in values.values()):
            found = {name: book[value] if isinstance(value, str) else value for name, value in values.items()}
            return {name: kinds_of_recipe(recipe) for name, recipe in found.items()}
        return dict.fromkeys(values)

    @functools.cached_property
    def axes(self) -> list[dict[str, Sorted]]:
        """The same by numbers."""
        return [
            {
                name: Sorted(
                    self._number(at, name), None if kinds is None else [self._number(at, "kind", k) for k in kinds]
                )
                for name, kinds in axis.items()
            }
            for at, axis in enumerate(self.kinds)
        ]

    def _number(self, *what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    @functools.cached_property
    def pairs(self) -> list[set[Pair]]:
        """What each of the cases shows."""
        return [
            self._shown([axis[name_of(value)] for axis, value in zip(self.axes, values, strict=True)])
            for values, _ in self.cases
        ]

    def _shown(self, values: Sequence[Sorted]) -> set[Pair]:
        alone = [
            kind for value in values for kind in (value.kinds if self.of == "kinds" and value.kinds else [value.own])
        ]
        shown: set[Pair] = {(one, one) for one in alone}
        for left, right in itertools.combinations(values, 2):
            # what has no kinds counts by itself
            shown.update(itertools.product(left.kinds or [left.own], right.kinds or [right.own]))
            if self.of == "pairs" and left.kinds is not None and right.kinds is not None:
                shown.update((left.own, kind) for kind in right.kinds)
                shown.update((kind, right.own) for kind in left.kinds)
        return shown

    @functools.cached_property
    def chosen(self) -> list[int]:
        """The numbers of the cases that run: what the default run has where others are marked `full`, and then greedily what
        shows most that is new. Equal ones are told apart by a hash of test and case, so that tests take others."""
        full = [any(mark.name == "full" for mark in marks) for _, marks in self.cases]
        found = [at for at, left_out in enumerate(full) if any(full) and not left_out]
        shown = set[Pair]().union(*(self.pairs[at] for at in found))
        ranks = [zlib.crc32(f"{self.test} {' '.join(map(name_of, values))}".encode()) for values, _ in self.cases]
        heap = [(-len(self.pairs[at]), rank, at) for at, rank in enumerate(ranks)]
        heapq.heapify(heap)
        while heap:
            _, rank, at = heapq.heappop(heap)
            # what a case adds only ever becomes less
            if not (new := len(self.pairs[at] - shown)):
                continue
            if heap and -new > heap[0][0]:
                heapq.heappush(heap, (-new, rank, at))
                continue
            shown |= self.pairs[at]
            found.append(at)
        return sorted(found)


# -------------------------------------------------------------------------------------------------------------- pytest

#: every square that was collected
SQUARES: dict[str, Square] = {}


def multiplied(test: str, marks: Iterable[pytest.Mark]) -> Square:
    """The square of the marks of a test."""
    names: tuple[str, ...] = ()
    cases: list[Case] = [((), ())]
    options: dict[str, Any] = {}
    for mark in marks:
        given, values = mark.args
        mine = tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else tuple(given)
        names += mine
        options |= mark.kwargs
        axis = [_case(value, len(mine) == 1 and isinstance(given, str)) for value in values]
        cases = [(one + more, marked + marks) for (one, marked), (more, marks) in itertools.product(cases, axis)]
    return Square(test, names, cases, **options)


def _case(value: Any, lone: bool) -> Case:
    if hasattr(value, "marks"):
        return tuple(value.values), tuple(value.marks)
    return ((value,) if lone else tuple(value)), ()


def parametrize(metafunc: pytest.Metafunc, marks: Sequence[pytest.Mark]) -> None:
    """Give a test the cases of its square that run."""
    test = f"{metafunc.module.__name__}.{metafunc.function.__name__}"
    square = SQUARES[test] = multiplied(test, marks)
    cases = [square.cases[at] for at in square.chosen]
    metafunc.parametrize(square.names, [pytest.param(*values, marks=marks) for values, marks in cases], ids=square.ids)
