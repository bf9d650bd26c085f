"""Which module imports which, and where that breaks the rules of `floors.toml`; nothing is run, files are only read."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLOORS = HERE / "floors.toml"
#: our packages, and the folders that hold them
PACKAGES = {"mmaccel": "mmaccel", "mmaccel_kernels": "kernels/mmaccel_kernels", "mmaccel_demo": "demo/mmaccel_demo"}
#: programs that are no package; they may use whatever is public
PROGRAMS = ("tests", "demo", "benchmarks", "training", "examples", "docs")


@dataclass(frozen=True, order=True)
class Arrow:
    """One import: ``source`` imports ``target``, both full names of modules, at ``place`` (file:line)."""

    source: str
    target: str
    place: str
    #: "" at the top of a module, "for types" under TYPE_CHECKING, "in a function"
    when: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.source} -> {self.target}" + (f" ({self.when})" if self.when else "")


@dataclass(frozen=True)
class Floor:
    """A row of the house: its rooms, by the names of their modules; ``shared`` ones are first among them."""

    name: str
    knows: str
    rooms: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Computed:
    """A module or room that imports by computed names: the function that does, and the rooms where it finds something."""

    source: str
    finds: tuple[str, ...] = ()
    by: str = ""


@dataclass(frozen=True)
class House:
    """The rules: floors from the ground up, the lazy arrows that may point up, and who imports by computed names."""

    floors: tuple[Floor, ...]
    lazy: tuple[tuple[str, str], ...] = ()
    computed: tuple[Computed, ...] = ()

    @classmethod
    def read(cls, path: Path = FLOORS) -> House:
        """The rules as written in a TOML file."""
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        floors = []
        for floor in text["floor"]:
            shared = tuple(floor.get("shared", ()))
            floors.append(Floor(floor["name"], floor["knows"], (*shared, *floor["rooms"]), shared))
        lazy = tuple((arrow["source"], arrow["target"]) for arrow in text.get("lazy", ()))
        computed = (Computed(e["source"], tuple(e.get("finds", ())), e.get("by", "")) for e in text.get("computed", ()))
        return cls(tuple(floors), lazy, tuple(computed))

    def room(self, module: str) -> str | None:
        """The room with the longest name that fits a module."""
        fitting = [room for floor in self.floors for room in floor.rooms if within(module, room)]
        return max(fitting, key=len, default=None)

    def height(self, module: str) -> int | None:
        """The number of a module's floor, 0 on the ground."""
        room = self.room(module)
        return next((height for height, floor in enumerate(self.floors) if room in floor.rooms), None)

    def rise(self, arrow: Arrow) -> int:
        """How many floors an import points up, negative if down; 0 too if one of its modules is on no floor."""
        source, target = self.height(arrow.source), self.height(arrow.target)
        return 0 if source is None or target is None else target - source

    def may_rise(self, arrow: Arrow) -> bool:
        """Whether it is one of the lazy arrows."""
        return any(within(arrow.source, source) and within(arrow.target, target) for source, target in self.lazy)


@dataclass(frozen=True)
class Code:
    """All modules of some packages with the arrows between them."""

    #: files, from the root of the repository, by the full names of their modules; an `__init__` has its package's name
    modules: dict[str, str]
    arrows: tuple[Arrow, ...]
    #: imports of modules of ours that do not exist
    missing: tuple[Arrow, ...]
    #: imports by a computed name: module and file:line
    computed: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, root: Path = ROOT, packages: dict[str, str] = PACKAGES) -> Code:
        """Read all imports below the folders of ``packages``."""
        modules = {
            name: path.relative_to(root).as_posix()
            for package, folder in packages.items()
            for name, path in _modules(package, root / folder)
        }
        trees = {name: _parse(root / path) for name, path in modules.items()}
        own = {name: _own_names(trees[name]) for name in modules}
        arrows, missing, computed = set(), set(), set()
        for name, path in modules.items():
            reader = _Imports(name, path)
            reader.visit(trees[name])
            computed |= {(name, place) for place in reader.computed}
            for wanted, member, place, when in reader.found:
                if wanted.split(".")[0] not in packages:
                    continue
                target = wanted
                if member and f"{wanted}.{member}" in modules and member not in own.get(wanted, ()):
                    target = f"{wanted}.{member}"
                if target not in modules:
                    missing.add(Arrow(name, target, place, when))
                elif target != name:
                    arrows.add(Arrow(name, target, place, when))
        return cls(modules, tuple(sorted(arrows)), tuple(sorted(missing)), tuple(sorted(computed)))


def problems(code: Code, house: House) -> list[str]:
    """Every way in which the code breaks the rules, one sentence each with its file and line."""
    return [
        *_homeless(code, house),
        *_stale(code, house),
        *(f"{arrow}: there is no such module." for arrow in code.missing),
        *_hidden(code, house),
        *_upwards(code, house),
        *_across(code, house),
        *_circles(code, house),
    ]


def private_imports(
    root: Path = ROOT, programs: Iterable[str] = PROGRAMS, packages: Iterable[str] = PACKAGES
) -> list[str]:
    """Names of ours beginning with one underscore that tests and other programs import: those may change at any time."""
    found = []
    for path in sorted(path for program in programs for path in (root / program).rglob("*.py")):
        reader = _Imports(path.stem, path.relative_to(root).as_posix())
        reader.visit(_parse(path))
        for wanted, member, place, _ in reader.found:
            names = [*wanted.split("."), *([member] if member else ())]
            if names[0] in packages and names[0] not in path.parts and any(map(_private, names)):
                found.append(f"{place}: imports {'.'.join(names)}: programs and tests use only what is public.")
    return found


# -- reading


def _modules(package: str, folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))), path


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _own_names(tree: ast.Module) -> set[str]:
    """What a package's `__init__` itself calls by a name, which then means that and not the module of the same name."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


class _Imports(ast.NodeVisitor):
    """Every import of a module: statements wherever they are, and calls of `import_module` and `__import__`."""

    def __init__(self, module: str, file: str) -> None:
        self.package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
        self.file = file
        self.when = ""
        self.importers = {"import_module", "__import__"}
        #: module, name taken from it or "", file:line, when
        self.found: list[tuple[str, str, str, str]] = []
        self.computed: list[str] = []

    def _add(self, module: str, member: str, node: ast.stmt | ast.expr) -> None:
        self.found.append((module, member, self._place(node), self.when))

    def _place(self, node: ast.stmt | ast.expr) -> str:
        return f"{self.file}:{node.lineno}"

    def _absolute(self, name: str, level: int) -> str:
        if not level:
            return name
        parents = self.package.split(".")
        base = ".".join(parents[: len(parents) - level + 1])
        return f"{base}.{name}" if name else base

    def _within(self, when: str, nodes: Iterable[ast.AST]) -> None:
        before, self.when = self.when, when
        for node in nodes:
            self.visit(node)
        self.when = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._within("in a function", ast.iter_child_nodes(node))

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.test)}
        self.visit(node.test)
        self._within("for types" if "TYPE_CHECKING" in names else self.when, node.body)
        self._within(self.when, node.orelse)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, "", node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._absolute(node.module or "", node.level)
        for alias in node.names:
            self._add(module, alias.name, node)
            if module == "importlib" and alias.name == "import_module":
                self.importers.add(alias.asname or alias.name)

    def visit_Call(self, node: ast.Call) -> None:
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if called in self.importers:
            name = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "name"), None)
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                bare = name.value.lstrip(".")
                self._add(self._absolute(bare, len(name.value) - len(bare)), "", node)
            else:
                self.computed.append(self._place(node))
        self.generic_visit(node)


# -- rules


def _homeless(code: Code, house: House) -> Iterator[str]:
    for module, path in code.modules.items():
        if house.room(module) is None:
            yield f"{path}:1: {module} is on no floor; name its room in docs/architecture/floors.toml."


def _stale(code: Code, house: House) -> Iterator[str]:
    lived_in = {house.room(module) for module in code.modules}
    for floor in house.floors:
        for room in floor.rooms:
            if room not in lived_in:
                yield f"floors.toml: the room {room} ({floor.name}) holds no module; take it out."
    for source, target in house.lazy:
        if not any(within(arrow.source, source) and within(arrow.target, target) for arrow in code.arrows):
            yield f"floors.toml: nothing uses the lazy arrow {source} -> {target}; take it out."
    for entry in house.computed:
        if not any(within(module, entry.source) for module, _ in code.computed):
            yield f"floors.toml: {entry.source} imports nothing by a computed name; take it out."
        for room in entry.finds:
            if not any(within(module, room) for module in code.modules):
                yield f"floors.toml: {entry.source} cannot find {room}, which holds no module; take it out."


def _hidden(code: Code, house: House) -> Iterator[str]:
    """Imports by a computed name that are not declared, or that find what is above."""
    for module, place in code.computed:
        declared = [entry.finds for entry in house.computed if within(module, entry.source)]
        if not declared:
            yield (
                f"{place}: {module} imports by a computed name, which may hide an arrow; write the name out, or say in "
                "docs/architecture/floors.toml what it finds."
            )
        for target in (target for finds in declared for target in finds):
            if house.rise(Arrow(module, target, place)) > 0:
                yield f"{place}: {module} finds {target}, which is above it; what is found by name stands no higher."


def _upwards(code: Code, house: House) -> Iterator[str]:
    for arrow in code.arrows:
        if house.rise(arrow) <= 0:
            continue
        here, there = (house.floors[house.height(end) or 0].name for end in (arrow.source, arrow.target))
        if not house.may_rise(arrow):
            yield f"{arrow}: {here} -> {there} points up; imports point down, also those for types and in functions."
        elif arrow.when != "in a function":
            yield f"{arrow}: {here} -> {there} points up, which is allowed here only inside a function."


def _across(code: Code, house: House) -> Iterator[str]:
    for arrow in code.arrows:
        source, target = house.room(arrow.source), house.room(arrow.target)
        if source is None or target is None or source == target or house.rise(arrow):
            continue
        floor = next(floor for floor in house.floors if source in floor.rooms)
        if not floor.shared or target in floor.shared and floor.rooms.index(target) < floor.rooms.index(source):
            continue
        yield (
            f"{arrow}: {source} -> {target} crosses the floor of {floor.name}; its rooms know only "
            f"{' and '.join(floor.shared)}, so what two rooms share moves there or below."
        )


def _circles(code: Code, house: House) -> Iterator[str]:
    """One circle of every knot of modules, a shortest one. Arrows up are left out: they are wrong by themselves, or lazy."""
    nexts: dict[str, dict[str, Arrow]] = {module: {} for module in code.modules}
    for arrow in (arrow for arrow in code.arrows if house.rise(arrow) <= 0):
        for target in _executed(arrow, code.modules):
            nexts[arrow.source].setdefault(target, arrow)
    reached = {module: _reach(module, nexts) for module in nexts}
    done: set[str] = set()
    for module in nexts:
        if module in done or module not in reached[module]:
            continue
        knot = {other for other in reached[module] if module in reached[other]}
        done |= knot
        circle = min((_shortest(start, nexts) for start in sorted(knot)), key=len)
        steps = "; ".join(str(nexts[a][b]) for a, b in zip(circle, [*circle[1:], circle[0]], strict=True))
        names = " -> ".join([*circle, circle[0]])
        yield f"{steps}: {names} is a circle in a knot of {len(knot)} modules; modules import each other one way only."


def _executed(arrow: Arrow, modules: Iterable[str]) -> Iterator[str]:
    """The module of an import, and the packages around it whose `__init__` runs before it because of this import."""
    parts = arrow.target.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        # the packages around the source run already
        if name == arrow.target or name in modules and not within(arrow.source, name):
            yield name


def _reach(start: str, nexts: dict[str, dict[str, Arrow]]) -> set[str]:
    """All modules that a module imports, directly or not; itself only if it is in a circle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in nexts[waiting.pop()]:
            if module not in seen:
                seen.add(module)
                waiting.append(module)
    return seen


def _shortest(start: str, nexts: dict[str, dict[str, Arrow]]) -> list[str]:
    """The shortest way from a module in a circle back to itself, without the repeated end."""
    ways = [[start]]
    seen = set()
    for way in ways:
        for module in nexts[way[-1]]:
            if module == start:
                return way
            if module not in seen:
                seen.add(module)
                ways.append([*way, module])
    raise ValueError(f"{start} is in no circle")


def within(module: str, room: str) -> bool:
    """Whether a module is in a room; `package.__init__` is that file alone."""
    return f"{module}.__init__" == room or module == room or module.startswith(f"{room}.")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
