"""The package as such: its names, its typing, the worked example, and methods that other packages offer."""

from __future__ import annotations

import ast
import importlib.util
import json
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import zoo

import mmaccel
from mmaccel.core.lazy import in_stub
from mmaccel.method import registry

ROOT = Path(__file__).parent.parent

PLUGIN = '''
from dataclasses import dataclass
from mmaccel.method import ProjectorMethod
from mmaccel.core.reduction import Reduction


@dataclass(frozen=True)
class LastTokens(ProjectorMethod):
    """Keep the end of every segment."""

    name = "last-tokens"
    summary = "the last tokens"

    def reduce(self, tokens, count):
        slots = tokens.valid.long().cumsum(1)
        return Reduction.top(slots, tokens.valid, count)
'''


def test_public_names_are_there():
    for name in mmaccel.__all__:
        assert getattr(mmaccel, name) is not None
    assert sorted(mmaccel.__all__) == mmaccel.__all__
    with pytest.raises(AttributeError, match="no attribute 'accelerate_llm'"):
        mmaccel.accelerate_llm  # noqa: B018


def test_scripts_import_what_there_is():
    """Nobody runs all of them after a name has moved."""
    gone = []
    for path in (one for top in ("benchmarks", "training", "docs", "examples") for one in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("mmaccel", "mmaccel_kernels"):
                module = import_module(node.module)
                names = [one.name for one in node.names if not hasattr(module, one.name)]
                gone += [f"{path.relative_to(ROOT)}: {node.module}.{name}" for name in names if not found(module, name)]
    assert gone == []


def found(module, name):
    """Whether a package has a module of this name that nobody has imported yet."""
    return hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def test_every_method_is_a_name_of_the_package():
    """A new method gets its line in the stub, in the order of its module, and one that is gone loses it."""
    modules, public = in_stub(mmaccel.__file__)
    shipped = [kind for kind in mmaccel.methods().values() if kind.__module__.startswith("mmaccel.")]
    listed = {name: f"mmaccel.{module}" for name, module in modules.items() if name not in public}
    assert listed == {kind.__name__: kind.__module__ for kind in shipped}
    assert [getattr(mmaccel, kind.__name__) for kind in shipped] == shipped


def test_names_of_recipes_are_those_of_the_registry():
    """In the file that type checkers, editors and shells read; `python docs/making/recipe_names.py` writes it."""
    import recipe_names

    assert recipe_names.FILE.read_text(encoding="utf-8") == recipe_names.source()
    shipped = [name for name, kind in mmaccel.methods().items() if kind.__module__.startswith("mmaccel.")]
    assert {*shipped, "none", "balanced"} <= set(get_args(mmaccel.RecipeName)) <= set(mmaccel.recipes())
    for function in (mmaccel.accelerate_vlm, mmaccel.accelerated, mmaccel.get_recipe):
        given = get_type_hints(function)["which" if function is mmaccel.get_recipe else "recipe"]
        # any other text is taken too, since a user's own methods have names
        assert {mmaccel.RecipeName, str} <= set(get_args(given))


def test_completion_shows_all_names():
    modules, public = in_stub(mmaccel.__file__)
    assert {*modules, *mmaccel.__all__, "FastV", "SnapKV"} <= set(dir(mmaccel)) and public == mmaccel.__all__
    # the package, which the function hides
    bases = import_module("mmaccel.method")
    modules, public = in_stub(bases.__file__)
    assert sorted(modules) == sorted(public) == sorted(bases.__all__) and set(public) <= set(dir(bases))


QUICK = """
import sys, time, mmaccel
assert "accelerate_vlm" in dir(mmaccel) and callable(mmaccel.methods) and repr(mmaccel.MmaccelError)
print(time.process_time(), *{"torch", "transformers", "numpy", "PIL"}.intersection(sys.modules))
"""


def test_importing_costs_nothing_until_something_is_used():
    """CPU seconds of the whole process, user and system; the second run finds everything compiled."""
    for _ in range(2):
        seconds, *heavy = subprocess.check_output([sys.executable, "-c", QUICK], text=True).split()
    assert not heavy and float(seconds) < 0.3


def test_the_project_file_is_consistent():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version", "readme", "urls"]
    names = [text.split(">")[0].split(";")[0].strip() for text in project["project"]["dependencies"]]
    assert "transformers" in names
    assert "triton" not in names
    assert (ROOT / "mmaccel" / "py.typed").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_example_method_works(fresh_registry, capsys):
    runpy.run_path(str(ROOT / "examples" / "my_method.py"), run_name="__main__")
    assert "kept 9 of 36 visual tokens" in capsys.readouterr().out
    assert "largest-norm" in mmaccel.recipes()
    tiny = zoo.model("llava_next")
    feed = zoo.inputs("llava_next", "images")
    with mmaccel.accelerated(tiny, "largest-norm", retain=0.25, order=1.0) as model:
        model.generate(**feed, max_new_tokens=2, do_sample=False)
        stage = model.mmaccel.stats()["stages"][0]
    assert stage["tokens_kept"] == stage["resolved"] < stage["tokens_in"]


def test_the_documentation_shows_the_example():
    code = (ROOT / "examples" / "my_method.py").read_text()
    shown = code[code.index("from torch import") : code.index("if __name__")].strip()
    assert shown in (ROOT / "docs" / "guides" / "own-method.md").read_text(encoding="utf-8")


def test_other_packages_offer_methods(tmp_path, monkeypatch, fresh_registry):
    (tmp_path / "last_tokens.py").write_text(PLUGIN)
    about = tmp_path / "last_tokens-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: last-tokens\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[mmaccel.methods]\nlast-tokens = last_tokens:LastTokens\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.delitem(sys.modules, "last_tokens", raising=False)

    assert mmaccel.methods()["last-tokens"].__module__ == "last_tokens"
    tiny = zoo.model("llava")
    with mmaccel.accelerated(tiny, "last-tokens", retain=5) as model:
        model.generate(**zoo.inputs("llava"), max_new_tokens=1, do_sample=False)
        kept = model.mmaccel.reduction.kept[0] & model.mmaccel.layout.visual[0]
        visual = model.mmaccel.layout.visual[0].nonzero()[:, 0]
    assert kept.nonzero()[:, 0].tolist() == visual[-5:].tolist()


def test_recipes_travel_as_json(tmp_path):
    made = mmaccel.get_recipe("fastv").override(retain=0.3, layer=3)
    (tmp_path / "mine.json").write_text(made.to_json())
    assert mmaccel.get_recipe(tmp_path / "mine.json") == made
    assert json.loads(made.to_json())["stages"][0]["method"] == "fastv"


def test_drawing_what_recipes_keep(tmp_path, monkeypatch):
    """The other example: one panel for the picture, one a recipe, at the size asked for."""
    from PIL import Image

    out = tmp_path / "kept.png"
    monkeypatch.setattr(sys, "argv", ["draw_kept.py", str(out), "--recipes", "divprune", "visionzip", "--size", "98"])
    runpy.run_path(str(ROOT / "examples" / "draw_kept.py"), run_name="__main__")
    assert Image.open(out).size == (3 * (98 + 8) - 8, 98 + 18)
