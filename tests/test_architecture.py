"""The house: every module is on a floor of `docs/architecture/floors.toml`, and imports point down, all of them."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import module_from_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "architecture"))

import counts  # noqa: E402
import draw  # noqa: E402
import house  # noqa: E402


@pytest.fixture(scope="module")
def code():
    return house.Code.read()


def test_imports_point_down(code):
    found = house.problems(code, house.House.read())
    assert not found, "\n".join(found)


#: counts that are above their limit, and what they are; they may fall
ABOVE = {
    "lines of Python in mmaccel/": 75_800,
}


def test_counts_stay_within_their_limits(code):
    over = [str(count) for count in counts.counts(code) if count.found > max(count.most, ABOVE.get(count.what, 0))]
    assert not over, "\n".join(over)


def test_only_public_names_are_imported_by_programs_and_tests():
    found = house.private_imports()
    assert not found, "\n".join(found)


def test_all_our_code_is_read(code):
    modules = code.modules
    files = [path for folder in ("mmaccel", "kernels", "demo/mmaccel_demo") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) == len(modules) > 150
    assert {"mmaccel", "mmaccel.errors", "mmaccel.cli", "mmaccel_kernels.launch", "mmaccel_demo.page"} <= set(modules)


@pytest.mark.parametrize("entry", [e for e in house.House.read().computed if e.finds], ids=lambda entry: entry.source)
def test_what_is_imported_by_computed_names_is_what_is_declared(entry):
    spec = import_module(entry.source.removesuffix(".__init__")).__spec__
    # a copy, which has found nothing yet
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = []
    module.import_module = lambda name: seen.append(name) or import_module(name)
    if entry.by:
        getattr(module, entry.by)()
    else:
        assert all(hasattr(module, name) for name in dir(module))
    for name in seen:
        found = any(house.within(name, room) for room in entry.finds)
        assert found, f"{entry.source} imports {name}, which docs/architecture/floors.toml does not say."
    for room in entry.finds:
        found = any(house.within(name, room) for name in seen)
        assert found, f"docs/architecture/floors.toml says that {entry.source} finds {room}; it does not."


def test_picture_and_table_are_what_the_code_gives(code):
    found = draw.outdated(code, house.House.read())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("which", "old", "new"), [("PICTURE", "runtime", "downtime"), ("PAGE", "`mmaccel.runtime`", "`mmaccel.downtime`")]
)
def test_an_old_picture_or_table_is_found(code, tmp_path, monkeypatch, which, old, new):
    path = getattr(draw, which)
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    monkeypatch.setattr(draw, which, copy)
    said = f"{path.name} is not what the code gives; run: python docs/architecture/draw.py"
    assert said in draw.outdated(code, house.House.read())


def test_the_page_names_only_files_that_are_there():
    named = re.findall(r"`([\w./-]+(?:/|\.py|\.toml))`", draw.PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "mmaccel", house.HERE))]
    assert not missing


# a house of two floors; the upper one has a shared room and two that stand apart
TOY = house.House(
    (
        house.Floor("low", "", ("toy.low",)),
        house.Floor("high", "", ("toy.base", "toy.left", "toy.right"), shared=("toy.base",)),
    )
)
EMPTY = dict.fromkeys(("__init__", "low/__init__", "base", "left/__init__", "right"), "")
UP = "low -> high points up"


def problems(folder: Path, files: dict[str, str], rules: house.House = TOY, homeless: bool = False) -> list[str]:
    """What is wrong in a package `toy` with these files besides empty ones."""
    for name, text in (EMPTY | files).items():
        path = folder / "toy" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = house.problems(house.Code.read(folder, {"toy": "toy"}), rules)
    return found if homeless else [line for line in found if "toy is on no floor" not in line]


@pytest.mark.parametrize(
    "files",
    [
        {
            "left/__init__": "from ..low import x\nfrom toy import low, base\nimport toy.low",
            "base": "from . import low",
        },
        {"low/__init__": "from . import a\nfrom .b import y", "low/a": "from .b import y", "low/b": ""},
        {"low/__init__": "from .a import b", "low/a": "b = 1", "low/b": "from . import a"},
        {"low/__init__": "import os, importlib\nimportlib.import_module('json')\nfrom importlib import metadata"},
        {"low/__init__": "", "low/a": "from . import b", "low/b": "", "left/x": "from ..low.a import y"},
        {"low/__init__": "x = 'import toy.left'\n# import toy.left"},
    ],
)
def test_a_sound_house_has_no_problems(tmp_path, files):
    assert problems(tmp_path, files) == []


@pytest.mark.parametrize(
    ("files", "place", "says"),
    [
        ({"low/__init__": "\nfrom toy.left import x"}, "toy/low/__init__.py:2: toy.low -> toy.left:", UP),
        ({"low/__init__": "from .. import left"}, "toy/low/__init__.py:1: toy.low -> toy.left:", UP),
        ({"low/__init__": "from ..left import (\n    x,\n    y)"}, "toy/low/__init__.py:1: toy.low -> toy.left:", UP),
        ({"low/a": "import toy.left as l"}, "toy/low/a.py:1: toy.low.a -> toy.left:", UP),
        (
            {"low/__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..left import X"},
            "toy/low/__init__.py:3: toy.low -> toy.left (for types):",
            UP,
        ),
        (
            {"low/__init__": "import typing\nif typing.TYPE_CHECKING:\n    from ..left import X"},
            "toy/low/__init__.py:3: toy.low -> toy.left (for types):",
            UP,
        ),
        (
            {"low/a": "class A:\n    def b(self):\n        if self:\n            from ..left import x"},
            "toy/low/a.py:4: toy.low.a -> toy.left (in a function):",
            UP,
        ),
        (
            {"low/a": "async def b():\n    import toy.left"},
            "toy/low/a.py:2: toy.low.a -> toy.left (in a function):",
            UP,
        ),
        (
            {"low/__init__": "def __getattr__(name):\n    from .. import left\n    return getattr(left, name)"},
            "toy/low/__init__.py:2: toy.low -> toy.left (in a function):",
            UP,
        ),
        ({"low/a": "try:\n    import json\nexcept ImportError:\n    import toy.left"}, "toy/low/a.py:4:", UP),
        ({"low/a": "import importlib\nimportlib.import_module('toy.left')"}, "toy/low/a.py:2:", UP),
        ({"low/a": "from importlib import import_module as f\nf('..left', __package__)"}, "toy/low/a.py:2:", UP),
        ({"low/a": "import importlib\nimportlib.import_module(name='toy.left')"}, "toy/low/a.py:2:", UP),
        ({"low/a": "x = lambda: __import__('toy.left')"}, "toy/low/a.py:1: toy.low.a -> toy.left (in a function)", UP),
        (
            {"low/a": "import importlib\ndef load(name):\n    importlib.import_module(f'toy.{name}')"},
            "toy/low/a.py:3: toy.low.a imports by a computed name",
            "floors.toml",
        ),
        ({"left/a": "from ..right import x"}, "toy/left/a.py:1:", "toy.left -> toy.right crosses the floor of high"),
        ({"base": "from .left import x"}, "toy/base.py:1:", "toy.base -> toy.left crosses the floor of high"),
        ({"low/a": "from . import b", "low/b": "from . import a"}, "toy/low/a.py:1:", "toy.low.a -> toy.low.b -> toy"),
        (
            {"low/a": "from . import b", "low/b": "from . import c", "low/c": "def f():\n    from .a import x"},
            "toy/low/a.py:1: toy.low.a -> toy.low.b; toy/low/b.py:1: toy.low.b -> toy.low.c; toy/low/c.py:2:",
            "is a circle in a knot of 3 modules",
        ),
        # a module that takes a name from its own package needs the whole package
        ({"low/__init__": "from .a import x\ny = 1", "low/a": "from . import y"}, "toy/low/__init__.py:1:", "circle"),
        # a package's own name counts more than a module of the same name
        (
            {"low/__init__": "from .a import b", "low/a": "from . import b", "low/b": ""},
            "toy/low/__init__.py:1:",
            "circle",
        ),
        # the packages around what is imported are imported too
        (
            {
                "low/p/__init__": "from .a import x",
                "low/p/a": "from ..q.b import x",
                "low/p/d": "",
                "low/q/__init__": "from .c import x",
                "low/q/b": "",
                "low/q/c": "from ..p.d import x",
            },
            "toy/low/p/__init__.py:1: toy.low.p -> toy.low.p.a; toy/low/p/a.py:1: toy.low.p.a -> toy.low.q.b;",
            "is a circle in a knot of 4 modules",
        ),
        ({"low/a": "from .nothing import x"}, "toy/low/a.py:1: toy.low.a -> toy.low.nothing:", "no such module"),
        ({"attic": ""}, "toy/attic.py:1: toy.attic is on no floor", "floors.toml"),
    ],
)
def test_every_kind_of_wrong_import_is_found(tmp_path, files, place, says):
    found = problems(tmp_path, files)
    assert len(found) == 1, found
    assert found[0].startswith(place) and says in found[0]


def test_a_module_on_no_floor_is_named(tmp_path):
    assert problems(tmp_path, {}, homeless=True) == [
        "toy/__init__.py:1: toy is on no floor; name its room in docs/architecture/floors.toml."
    ]


def test_a_room_without_modules_is_named(tmp_path):
    rules = house.House((house.Floor("low", "", ("toy", "toy.cellar")),))
    assert problems(tmp_path, {}, rules) == ["floors.toml: the room toy.cellar (low) holds no module; take it out."]


def test_shared_rooms_use_only_those_before_them(tmp_path):
    floor = house.Floor("high", "", ("toy.base", "toy.right", "toy.left"), shared=("toy.base", "toy.right"))
    rules = house.House((TOY.floors[0], floor))
    assert (
        problems(tmp_path, {"right": "from .base import x", "left/__init__": "from .. import base, right"}, rules) == []
    )
    (found,) = problems(tmp_path, {"right": "", "base": "from .right import x"}, rules)
    assert "toy.base -> toy.right crosses the floor of high; its rooms know only toy.base and toy.right" in found


LAZY = house.House(TOY.floors, lazy=(("toy.low", "toy.left"),))


def test_the_lazy_arrow_is_allowed_only_inside_a_function(tmp_path):
    files = {"left/__init__": "from .. import low", "low/__init__": "def f():\n    from .. import left"}
    assert problems(tmp_path, files, LAZY) == []
    (found,) = problems(tmp_path, {"low/__init__": "from .. import left"}, LAZY)
    assert found.endswith("points up, which is allowed here only inside a function.")


def test_a_lazy_arrow_that_nothing_uses_is_named(tmp_path):
    (found,) = problems(tmp_path, {}, LAZY)
    assert "nothing uses the lazy arrow toy.low -> toy.left" in found


COMPUTED = {"base": "from importlib import import_module\ndef load(name):\n    return import_module('toy.' + name)"}


def test_what_is_found_by_a_computed_name_is_declared_and_no_higher(tmp_path):
    floors = TOY.floors
    assert (
        problems(
            tmp_path, COMPUTED, house.House(floors, computed=(house.Computed("toy.base", ("toy.left", "toy.low")),))
        )
        == []
    )
    upper = house.House(
        (*floors, house.Floor("top", "", ("toy.top",))), computed=(house.Computed("toy.base", ("toy.top",)),)
    )
    (found,) = problems(tmp_path, COMPUTED | {"top": ""}, upper)
    assert found.startswith("toy/base.py:3: toy.base finds toy.top, which is above it")
    (found,) = problems(tmp_path, {"base": "", "top": ""}, upper)
    assert "toy.base imports nothing by a computed name" in found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from toy.low import _hidden", "toy.low._hidden"),
        ("def test():\n    from toy._low import x", "toy._low.x"),
        ("import toy.low._hidden as h", "toy.low._hidden"),
    ],
)
def test_private_names_are_found(tmp_path, text, name):
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    path = tmp_path / "tests" / "deep" / "test_x.py"
    path.write_text(f"from toy.low import __version__, public\nfrom _else import _y\n{text}\n")
    (found,) = house.private_imports(tmp_path, ["tests"], ["toy"])
    assert found.startswith("tests/deep/test_x.py:") and f"imports {name}:" in found
