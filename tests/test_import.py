"""``--import FILE``: methods of a user on the command line; ``--set OPTION=VALUE`` where several recipes run."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_bad_input import one_sentence

import mmaccel
from mmaccel import MmaccelError
from mmaccel.cli import commands, main
from mmaccel.cli.shared.options import named, rows_of, settings
from mmaccel.method import imported
from mmaccel.programs.video_qa import cluster
from mmaccel.programs.video_qa.qa import QASettings

MINE = '''
import mmaccel
import neighbour
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod

print("not for standard output")

@mmaccel.register
class Mine(ProjectorMethod):
    """Keep the tokens with the largest ``order``-norm."""

    name = "mine"
    summary = "the largest norm"
    limits = {"order": "(0, inf)"}
    order: float = 2.0

    def reduce(self, tokens, count):
        return Reduction.top(neighbour.norm(tokens.features, self.order), tokens.valid, count)
'''
NEIGHBOUR = "def norm(x, order):\n    return x.float().norm(p=order, dim=-1)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_registry: None) -> Iterator[Path]:
    """A folder with a method in a file; whatever is imported from it is gone afterwards."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imported, "files", [])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one sentence of an error, after the name of the command."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    sentence = err.splitlines()[-1].partition(": ")[2]
    assert not out
    one_sentence(sentence)
    return sentence


def test_every_command_that_runs_methods_imports_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands():
        assert main([name, "--help"]) == 0
        assert ("--import FILE" in capsys.readouterr().out) == (
            name not in ("doctor", "distil", "calibrate", "completion")
        ), name


def test_its_methods_are_known_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "mine", "--json", "--import", str(folder / "mine.py")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["options"] == {"order": 2.0} and "not for standard output" in err
    assert "mine" in mmaccel.recipes() and mmaccel.get_method("mine").__module__ == "mine"
    # the same file under other names is the same module
    (folder / "link.py").symlink_to(folder / "mine.py")
    assert main(["methods", "--import", str(folder / "mine.py"), "--import", str(folder / "link.py")]) == 0
    assert "the largest norm" in capsys.readouterr().out
    assert imported.files == [str((folder / "mine.py").resolve())]


def test_a_name_of_another_module_is_left_alone(folder: Path) -> None:
    """``json.py`` is no module json."""
    (folder / "json.py").write_text(MINE)
    imported.import_methods(folder / "json.py")
    assert sys.modules["json"] is json and mmaccel.get_method("mine").__module__ == "imported_json"
    (folder / "of-mine.py").write_text(MINE.replace('"mine"', '"of-mine"'))
    imported.import_methods(folder / "of-mine.py")
    assert "of-mine" in mmaccel.methods()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "There is no file '.*' to import; give a Python file that registers methods"),
        ("def f(:", "^Cannot import '.*/bad.py': line 1, SyntaxError: invalid syntax; correct the file"),
        ("x = 1", r"^Cannot import '.*': it registers no method; decorate its class with @mmaccel\.register"),
        ("\nimport nosuchmodule", "^Cannot import '.*': line 2, ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("1 / 0", "^Cannot import '.*': line 1, ZeroDivisionError: division by zero; correct the file"),
        ("import sys\nsys.exit(3)", "^Cannot import '.*': line 2, SystemExit: 3; correct the file"),
        ("\0", "^Cannot import '.*': SyntaxError: source code string cannot contain null bytes"),
        (
            MINE.replace('"mine"', '"fastv"'),
            r"The name 'fastv' is taken by mmaccel\.layers\.fastv\.FastV; choose another",
        ),
        (MINE.replace('"mine"', '"holitom"'), r"bad\.Mine has the name of the recipe 'holitom'; choose another"),
        (MINE.replace("name =", "title ="), "Mine has no `name`; give the class a unique name"),
        (MINE + MINE.replace("class Mine", "class Other"), r"The name 'mine' is taken by bad\.Mine; choose another"),
    ],
)
def test_a_file_that_cannot_be_used(
    text: str | None, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = mmaccel.methods()
    if text is not None:
        (folder / "bad.py").write_text(text)
    sentence = said(capsys, "methods", "--import", folder / "bad.py")
    assert re.search(words, sentence), sentence
    if "recipe" not in words:
        assert mmaccel.methods() == known and "bad" not in sys.modules


def test_a_folder_and_a_text_are_no_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.txt").write_text(MINE)
    assert "it is not a Python file; give one whose name ends in .py" in said(
        capsys, "methods", "--import", folder / "a.txt"
    )
    assert "There is no file" in said(capsys, "methods", "--import", folder)


def test_two_files_with_one_method(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.py").write_text(MINE)
    sentence = said(capsys, "methods", "--import", folder / "mine.py", "--import", folder / "other.py")
    assert "The name 'mine' is taken by mine.Mine; choose another" in sentence


def test_a_worker_of_a_cluster_knows_them(folder: Path) -> None:
    """A worker is another process, which gets settings and the files."""
    known = mmaccel.methods()
    imported.import_methods(folder / "mine.py")
    sent = pickle.dumps((QASettings("none", mmaccel.get_recipe("mine", order=3)), tuple(imported.files)))
    imported.registry.forget_all_but(known)
    del sys.modules["mine"]
    arrived, files = pickle.loads(sent)
    worker = cluster._Worker(arrived, files)
    # the model is not there; the method is
    (error,) = worker.output
    assert isinstance(error, MmaccelError) and "mine" not in str(error)
    assert mmaccel.get_method("mine")(order=3).options() == {"order": 3}
    missing = cluster._Worker(arrived, (str(folder / "gone.py"),))
    assert "There is no file" in str(missing.output[0])


def test_the_files_are_sent_to_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_data = pytest.importorskip("ray.data")
    imported.import_methods(folder / "mine.py")
    seen: dict[str, Any] = {}

    class Data:
        context = type("context", (), {})()

        def map_batches(self, kind: Any, **options: Any) -> Any:
            seen.update(options)
            return self

        def iter_batches(self, **options: Any) -> Any:
            return iter(())

    monkeypatch.setattr(ray_data, "from_items", lambda *given, **options: Data())
    assert list(cluster._stream(QASettings("none", mmaccel.get_recipe("mine")), [], 1, 1, 0)) == []
    assert seen["fn_constructor_args"][1] == (str((folder / "mine.py").resolve()),)


# --------------------------------------------------------------------------------------------------------------- --set


def test_options_of_several_recipes() -> None:
    """Each takes those that it has, and its name says so."""
    made = dict(named(["divprune", "fastv", "none"], settings(["layer=3", "positions=paper"])))
    assert list(made) == ["divprune positions=paper", "fastv layer=3 positions=paper", "none"]
    assert made["fastv layer=3 positions=paper"] == mmaccel.get_recipe("fastv", layer=3, positions="paper")
    assert made["none"] == mmaccel.get_recipe("none")
    rows = dict(rows_of(["fastv"], [0.5, 8], settings(["layer=3"])))
    assert list(rows) == ["fastv layer=3 0.5", "fastv layer=3 8"]
    assert rows["fastv layer=3 8"] == mmaccel.get_recipe("fastv", layer=3, retain=8)
    assert settings(["layers=[1, 2]", "variant=official", "x=true"]) == {
        "layers": (1, 2),
        "variant": "official",
        "x": True,
    }


@pytest.mark.parametrize("command", ["eval", "compare", "bench", "ask"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["layr=3"], "layr=3: .*'layr'.*(allowed are|it takes) .*positions.*layer"),
        (["layer=x"], "Method 'fastv': layer='x' is of the wrong type; give float"),
        (["layer=-1"], "fastv cannot work at layer=-1; give a layer of 1 or more, or a share"),
        (["layer=true"], "layer=True is of the wrong type; give float"),
        (["positions=new"], "positions='new' is unknown; use 'keep' or 'paper'"),
        (["layer"], "--set takes OPTION=VALUE, such as --set layer=3, got 'layer'"),
        (["=3"], "--set takes OPTION=VALUE"),
        (["retain=0.1"], "--set retain=0.1: a budget has an option of its own; give --retain 0.1"),
        (["layer=2", "layer=3"], "--set gives layer twice, 2 and 3; give one of them"),
    ],
)
def test_an_option_that_is_not_allowed(
    command: str, given: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    argv: list[object] = [command, "--recipe", "fastv"]
    argv += [tmp_path / "a.png", "what?"] if command == "ask" else []
    argv += ["--out", tmp_path / "a.svg"] if command == "compare" else []
    for one in given:
        argv += ["--set", one]
    sentence = said(capsys, *argv)
    assert re.search(words, sentence), sentence
