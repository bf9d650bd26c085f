"""No test keeps a list of methods or recipes by hand where it means all of a kind: one that is added would be left out.

A literal with four or more names of registered methods or recipes, or with as many methods as they come (``H2O()``), is found
wherever it stands in the tests, and so are the keys of a dict. What is right all the same says why: it is what the default run
shows of all (what ``few`` and ``in_turn`` are given as such, or is called ``QUICK``), or in it or right above it stands
``# by choice: why``, or ``# checked by test_of_that_name``, a test that fails when a name is missing. Methods with options, and
tuples of a name and what is expected of it, are examples and not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import synthetic

from mmaccel import recipes

MOST = 4
TESTS = Path(__file__).parent
MARK = re.compile(r"# (?:by choice: \w|checked by (test_\w+)$)")


def names() -> set[str]:
    """Of methods, of their classes and of recipes, but for those that tests have registered."""
    known = synthetic.offered()
    book = {name for name, made in recipes().items() if all(stage.method in known for stage in made.stages)}
    return {*known, *book, *(kind.__name__ for kind in known.values())}


def name_of(item: ast.expr | None) -> str | None:
    """The name that stands for a method or recipe with nothing more said: a string, a class, or its call without options."""
    if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr == "param" and item.args:
        item = item.args[0]
    if isinstance(item, ast.Call) and not item.args and not item.keywords:
        item = item.func
    if isinstance(item, ast.Constant) and isinstance(item.value, str):
        return item.value
    return item.id if isinstance(item, ast.Name) else None


def representatives(tree: ast.AST) -> set[ast.AST]:
    """Everything in what the default run shows of all."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        shown: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            shown = [
                word.value
                for word in node.keywords
                if (node.func.id, word.arg) in (("few", "quick"), ("in_turn", "of"))
            ]
            shown += node.args[1:] if node.func.id == "few" else []
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["QUICK"]:
            shown = [node.value]
        for part in shown:
            found.update(ast.walk(part))
    return found


def lists_by_hand(source: str, known: set[str]) -> Iterator[tuple[int, list[str]]]:
    """The line and the names of every list that nobody says is a choice."""
    tree, lines = ast.parse(source), source.splitlines()
    shown = representatives(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            items: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = node.keys
        else:
            continue
        found = {name for item in items if (name := name_of(item)) in known and name is not None}
        if len(found) < MOST or node in shown:
            continue
        above = node.lineno - 1
        while above and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        if not any(MARK.search(line) for line in lines[above : node.end_lineno]):
            yield node.lineno, sorted(found)


def test_no_list_of_names_is_kept_by_hand() -> None:
    known, files = names(), sorted(TESTS.rglob("*.py"))
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {', '.join(one)}"
        for path in files
        for line, one in lists_by_hand(path.read_text("utf-8"), known)
    ]
    assert len(files) > 100 and len(known) > 100
    assert not found, "take these from the registry, or say why not (see above):\n" + "\n".join(found)


def test_tests_that_are_said_to_check_are_there() -> None:
    sources = [path.read_text("utf-8") for path in TESTS.rglob("*.py") if path != Path(__file__)]
    said = {name for source in sources for line in source.splitlines() for name in MARK.findall(line) if name}
    assert said and not [name for name in said if not any(f"\ndef {name}(" in source for source in sources)]


def test_lists_are_found() -> None:
    known = {"a", "b", "c", "d", "e", "A", "B", "C", "D"}

    def found(source: str) -> list[tuple[int, list[str]]]:
        return list(lists_by_hand(source, known))

    said = [(1, ["a", "b", "c", "d"])]
    for source in (
        'X = ["a", "b", "c", "d"]',
        'f(("a", "x", "b", "c", "d"))',
        'few(["a", "b", "c", "d"], one)',
        'in_turn(["a", "b", "c", "d"], others, of=some)',
        'X = {"d", "c", "b", "a", "a"}',
        'X = {"a": 1, **more, "b": 2, "c": 3, "d": 4}',
        '@mark("name", [pytest.param("a"), pytest.param("b", marks=x), "c", "d"])\ndef f(): ...',
    ):
        assert found(source) == said, source
    assert found("X = [A(), B(), C, D()]") == [(1, ["A", "B", "C", "D"])]
    assert found('import x\n\nX = [\n    "a",\n    "b", "c", "d",\n]') == [(3, ["a", "b", "c", "d"])]
    for source in (
        'X = ["a", "b", "c", "c"]',
        "X = [A(1), B(x=2), C(3), D(4)]",
        'few(all, ["a", "b", "c", "d"])',
        'few(all, quick=["a", "b", "c", "d"])',
        '# checked by test_them\nX = {"a": 1, "b": 2, "c": 3, "d": 4}',
        'in_turn(all, of=("a", "b", "c", "d"))',
        'QUICK = ("a", "b", "c", "d")',
        '# by choice: one of every site\nX = ["a", "b", "c", "d"]',
        'X = ["a", "b", "c", "d"]  # by choice: one of every site',
        '#: what it is\n# by choice: one of every site\nX = [\n    "a", "b", "c", "d"]',
    ):
        assert not found(source), source
    assert found('# by choice: other\n\nX = ["a", "b", "c", "d"]') == [(3, ["a", "b", "c", "d"])]
