"""Counts that say whether the code can still be read in one sitting; `tests/test_architecture.py` holds every one to its limit.

python docs/architecture/counts.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import house  # noqa: E402

ROOT = HERE.parent.parent
PACKAGE = ROOT / "mmaccel"
RUNTIME = PACKAGE / "runtime"
#: the one file that asks which kind a method is
BUILDER = RUNTIME / "build.py"


@dataclass(frozen=True)
class Count:
    """One count, the most that is allowed, and where the largest is."""

    what: str
    found: int
    most: int
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.found} of at most {self.most}" + (f" ({self.where})" if self.where else "")


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every module below a folder."""
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def complexity(path: Path, most: int) -> list[str]:
    """Functions below ``path`` that ruff finds more complex than ``most``."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise"]
    told = subprocess.run(
        [*command, "--config", f"lint.mccabe.max-complexity={most}", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if told.returncode not in (0, 1):
        raise RuntimeError(told.stderr)
    return [line for line in told.stdout.splitlines() if "C901" in line]


def classes() -> Iterator[tuple[str, int, int]]:
    """Every class of the package: its name, how many methods it defines, and its lines."""
    for path, tree in trees(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in node.body)
                lines = (node.end_lineno or 0) - node.lineno + 1
                yield f"{path.relative_to(ROOT)}: {node.name}", methods, lines


def kinds() -> set[str]:
    """The names of all kinds of methods: classes of `mmaccel/method/` and bases of codecs."""
    names = set()
    for folder in (PACKAGE / "method", PACKAGE / "kv" / "codecs"):
        for _, tree in trees(folder):
            names |= {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ClassDef) and node.name.endswith(("Method", "Policy", "Codec"))
            }
    return names


def dispatches() -> list[str]:
    """Where `runtime/` asks, outside its builder, which kind a method is."""
    found = []
    for path, tree in trees(RUNTIME):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                names = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
                if names & kinds() and path != BUILDER:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def fields(path: Path, name: str) -> int:
    """How many fields a dataclass has, those of its bases in the same file included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def own(node: ast.ClassDef) -> int:
        bases = [known[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        return sum(isinstance(one, ast.AnnAssign) for one in node.body) + sum(map(own, bases))

    return own(known[name])


def room(module: str) -> str:
    """The room of `runtime/` that a module is in; empty for those outside, and for its builder."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["mmaccel", "runtime"] and (RUNTIME / "".join(parts[2:3])).is_dir() else ""


def arrows(code: house.Code) -> set[tuple[str, str]]:
    """Imports from one room of `runtime/` to another."""
    pairs = {(room(arrow.source), room(arrow.target)) for arrow in code.arrows}
    return {(source, target) for source, target in pairs if source and target and source != target}


def circle(pairs: set[tuple[str, str]]) -> bool:
    """Whether rooms import each other in a circle."""
    left = {one for pair in pairs for one in pair}
    while ground := {one for one in left if not any(source == one and target in left for source, target in pairs)}:
        left -= ground
    return bool(left)


def counts(code: house.Code) -> list[Count]:
    """All counts."""
    found, every = arrows(code), list(classes())
    methods, lines = max(every, key=lambda one: one[1]), max(every, key=lambda one: one[2])
    worst, asked = complexity(PACKAGE, 15), dispatches()
    attention = next(
        node
        for _, tree in trees(RUNTIME / "call")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "text_attention"
    )
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py"))
    return [
        Count("functions above a complexity of 15", len(worst), 0, "; ".join(worst)),
        Count("functions of attention above a complexity of 10", len(complexity(RUNTIME / "call", 10)), 0),
        Count("lines of text_attention", (attention.end_lineno or 0) - attention.lineno + 1, 40),
        Count("methods of a class", methods[1], 25, methods[0]),
        Count("lines of a class", lines[2], 250, lines[0]),
        Count("questions which kind a method is, in runtime/ outside build.py", len(asked), 0, ", ".join(asked)),
        Count("fields of Call", fields(RUNTIME / "call" / "call.py", "Call"), 10),
        Count("fields of Prompt", fields(RUNTIME / "call" / "forward.py", "Prompt"), 10),
        Count("fields of Shared", fields(PACKAGE / "kv" / "shared.py", "Shared"), 10),
        Count("arrows between rooms of runtime/", len(found), 12),
        Count("circles of rooms of runtime/", int(circle(found)), 0),
        Count("entries of mmaccel/", len(entries), 25),
        Count("lines of Python in mmaccel/", total, 42_000),
    ]


if __name__ == "__main__":
    print("\n".join(map(str, counts(house.Code.read()))))
