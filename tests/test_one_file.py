"""One file is enough: a method, codec, policy, family or command is found because its file is there or a package offers it."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zoo
from transformers import LlavaConfig

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError
from mmaccel.cli import commands, main
from mmaccel.families import Family, families, family_of
from mmaccel.families import registry as family_registry
from mmaccel.kv.cache import cache_bytes
from mmaccel.method import registry

ROOT = Path(__file__).parent.parent

METHOD = '''
from dataclasses import dataclass

from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod
from mmaccel.method.registry import register


@register
@dataclass(frozen=True)
class FirstTokens(ProjectorMethod):
    """Keep the beginning of every segment."""

    name = "first-tokens"
    summary = "the first tokens"

    def reduce(self, tokens, count):
        return Reduction.top(-tokens.valid.long().cumsum(1), tokens.valid, count)
'''

POLICY = '''
from dataclasses import dataclass

from mmaccel.method import Policy
from mmaccel.method.registry import register


@register
@dataclass(frozen=True)
class OldestKeys(Policy):
    """Keep the oldest keys."""

    name = "oldest-keys"
    summary = "the oldest keys"
    default_retain = 0.5

    def score(self, keys):
        return -keys.index[:, None].expand(keys.keys.shape[:3]).float()
'''

CODEC = '''
from dataclasses import dataclass

from mmaccel.kv.codecs import Codec
from mmaccel.method.registry import register
from mmaccel_kernels.pages import Format


@register
@dataclass(frozen=True)
class Nibbles(Codec):
    """Every token of every head in 4 bits."""

    name = "nibbles"
    summary = "4 bits, one scale for each token and head"

    page: int = 16
    residual: int = 0

    def formats(self, channels):
        return (Format("int4", "token", channels),)
'''

FAMILY = '''
from mmaccel.families.llava import Llava


class Annex(Llava):
    """A family whose models are LLaVA by another name."""

    name = "annex"
    model_types = ("annex_llava",)
    place = 1000
'''

COMMAND = '''
"""Count the words of a sentence."""

from mmaccel.cli.shared.options import Json
from mmaccel.cli.shared.text import tell

HELP = "count words"
EXAMPLES = "examples:\\n  mmaccel count-words one two"


def run(words: list[str], output: Json = None) -> int:
    """Count and print."""
    tell({"words": len(words)}, output, lambda: f"{len(words)} words")
    return 0
'''

#: of each kind of thing its file, the folder where ours lie, and how another package offers it
FILES = {
    "first_tokens": (METHOD, "mmaccel.pruning", "[mmaccel.methods]\nfirst-tokens = annex.first_tokens:FirstTokens"),
    "oldest_keys": (POLICY, "mmaccel.kv.policies", "oldest-keys = annex.oldest_keys"),
    "nibbles": (CODEC, "mmaccel.kv.codecs", "nibbles = annex.nibbles:Nibbles"),
    "annex": (FAMILY, "mmaccel.families", "[mmaccel.families]\nannex = annex.annex"),
}


class AnnexConfig(LlavaConfig):
    """What a model of the new family says that it is."""

    model_type = "annex_llava"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets methods and families be looked for again; what a test adds is gone afterwards."""
    before = (mmaccel.methods(), families())
    modules = set(sys.modules)
    monkeypatch.setattr(registry, "_methods", dict(before[0]))
    monkeypatch.setattr(family_registry, "_families", {})

    def look_again() -> None:
        importlib.invalidate_caches()
        monkeypatch.setattr(registry, "_loaded", False)

    yield look_again
    for name in set(sys.modules) - modules:
        room, _, file = name.rpartition(".")
        if file in (*FILES, "count_words"):
            del sys.modules[name]
            if hasattr(sys.modules.get(room), file):
                delattr(sys.modules[room], file)


def offer(folder: Path, points: str) -> None:
    """An installed package ``annex`` that says in its metadata what it offers."""
    about = folder / "annex-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: annex\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)


@pytest.fixture(params=["offered by a package", "files of ours"])
def added(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], None]
) -> str:
    """One new thing of each kind, each in a file of its own, and nothing else changed."""
    if request.param == "files of ours":
        for name, (text, room, _) in FILES.items():
            drop(tmp_path / room, name, text, room, monkeypatch)
    else:
        package = tmp_path / "annex"
        package.mkdir()
        (package / "__init__.py").touch()
        for name, (text, _, _) in FILES.items():
            (package / f"{name}.py").write_text(text)
        offer(tmp_path, "\n".join(points for _, _, points in FILES.values()))
        monkeypatch.syspath_prepend(str(tmp_path))
    anew()
    return str(request.param)


def drop(folder: Path, name: str, text: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a file into a folder that counts as part of a package of ours."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    package = importlib.import_module(room)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])


def tiny() -> Any:
    """A model that only the new family serves."""
    model = zoo.model("llava")
    model.config.__class__ = AnnexConfig
    return model


def test_what_is_not_there_is_not_known(anew: Callable[[], None]) -> None:
    anew()
    assert not {"first-tokens", "oldest-keys", "nibbles"} & set(mmaccel.methods())
    assert "annex" not in families() and "count-words" not in commands()
    with pytest.raises(UnsupportedError, match="does not know the model type 'annex_llava'"):
        family_of(tiny())


def test_a_file_of_each_kind_is_found_and_used(added: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = "annex." if added == "offered by a package" else "mmaccel."
    for name in ("first-tokens", "oldest-keys", "nibbles"):
        assert mmaccel.methods()[name].__module__.startswith(module)
    assert families()["annex"].__module__.startswith(module)
    placed = [name for name, family in families().items() if family.place != Family.place]
    others = list(families())[len(placed) :]
    assert "annex" in others and list(families()) == placed + sorted(others)

    model, feed = tiny(), zoo.inputs("llava")
    assert type(family_of(model)).__name__ == "Annex"
    whole = model.generate(**feed, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    stages = (Stage("first-tokens", 16), Stage("oldest-keys", 8), Stage("nibbles"))
    with mmaccel.accelerated(model, Recipe("mine", stages)):
        out = model.generate(**feed, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        visual = model.mmaccel.layout.visual[0].nonzero()[:, 0]
        kept = model.mmaccel.reduction.kept[0, visual]
        stats = model.mmaccel.stats()
    assert kept.nonzero()[:, 0].tolist() == list(range(16))
    passed = [(stage["method"], stage["tokens_in"], stage["tokens_kept"]) for stage in stats["stages"]]
    assert passed == [("first-tokens", 36, 16), ("oldest-keys", 16, 8), ("nibbles", 8, 8)]
    # half of the keys and values of the prompt stay, most of them in 4 bits instead of 32
    assert 0 < stats["kv_bytes"] < cache_bytes(whole.past_key_values) / 2
    assert stats["kv_bytes"] == cache_bytes(out.past_key_values)

    assert main(["methods"]) == 0
    listed = capsys.readouterr().out
    assert "the first tokens" in listed and "the oldest keys" in listed and "nibbles" in listed
    assert main(["methods", "--json"]) == 0
    described = {one["name"]: one["site"] for one in json.loads(capsys.readouterr().out)["methods"]}
    assert [described[n] for n in ("first-tokens", "oldest-keys", "nibbles")] == ["projector", "cache", "codec"]
    assert mmaccel.get_recipe("first-tokens").retain == 0.25


def test_a_command_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = list(commands())
    drop(tmp_path / "cli", "count_words", COMMAND, "mmaccel.cli", monkeypatch)
    (tmp_path / "cli" / "_shared_by_two.py").write_text("raise AssertionError('no command')")
    assert list(commands()) == [*ours, "count-words"]
    assert main(["count-words", "one", "two"]) == 0
    assert capsys.readouterr().out == "2 words\n"
    assert main(["count-words", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"words": 1}
    assert main(["--help"]) == 0
    assert re.search(r"\n +count-words +count words\n$", capsys.readouterr().out)
    assert main(["count-words", "--help"]) == 0
    told = capsys.readouterr().out
    assert "Count the words of a sentence." in told and "mmaccel count-words one two" in told and "--debug" in told


def test_every_file_of_the_command_line_is_a_command() -> None:
    assert [*commands()] == [
        *(
            "quickstart",
            "ask",
            "eval",
            "compare",
            "bench",
            "distil",
            "tune",
            "calibrate",
            "video-qa",
            "demo",
            "serve",
            "methods",
            "doctor",
            "selfcheck",
            "completion",
        )
    ]
    page = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    for name, module in commands().items():
        assert module.HELP and module.__doc__ and f"mmaccel {name}" in module.EXAMPLES
        assert f"mmaccel {name}" in page


@pytest.mark.parametrize(
    ("points", "look", "words"),
    [
        (
            "[mmaccel.methods]\nx = annex.gone",
            mmaccel.methods,
            "'annex' offers 'annex.gone' as mmaccel.methods, which ca",
        ),
        (
            "[mmaccel.methods]\nx = json:dumps",
            mmaccel.methods,
            "'json:dumps' as mmaccel.methods, which is neither a subclass of M",
        ),
        ("[mmaccel.families]\nx = annex.gone", families, "'annex' offers 'annex.gone' as mmaccel.families, which cann"),
        (
            "[mmaccel.families]\nx = json:dumps",
            families,
            "which is neither a subclass of Family nor a module; update the",
        ),
    ],
)
def test_what_cannot_be_had_is_said_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: Callable[[], None], points: str, look: Any, words: str
) -> None:
    offer(tmp_path, points)
    monkeypatch.syspath_prepend(str(tmp_path))
    anew()
    for _ in range(2):
        with pytest.raises(MmaccelError) as said:
            look()
        assert words in str(said.value) and "\n" not in str(said.value) and "uninstall it" in str(said.value)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"annex_llava"', '"llava_next"', ("The model type 'llava_next' is taken", "families.llava_next.LlavaNext")),
        ('"annex"', '"qwen2_vl"', ("The name 'qwen2_vl' is taken", "families.qwen_vl.Qwen2VL")),
    ],
)
def test_two_families_cannot_be_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: Callable[[], None],
    before: str,
    after: str,
    words: tuple[str, ...],
) -> None:
    drop(tmp_path / "families", "annex", FAMILY.replace(before, after), "mmaccel.families", monkeypatch)
    anew()
    for _ in range(2):
        with pytest.raises(MmaccelError) as said:
            families()
        for part in (*words, "mmaccel.families.annex.Annex", "uninstall the package of one of them"):
            assert part in str(said.value)


def test_a_copy_of_the_package_with_one_file_more(tmp_path: Path) -> None:
    """Nothing but the file: the whole tree is copied, and Python started in it."""
    import os
    import subprocess

    shutil.copytree(ROOT / "mmaccel", tmp_path / "mmaccel", ignore=shutil.ignore_patterns("models", "__pycache__"))
    for name, (text, room, _) in FILES.items():
        (tmp_path.joinpath(*room.split(".")) / f"{name}.py").write_text(text)
    (tmp_path / "mmaccel" / "cli" / "count_words.py").write_text(COMMAND)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "kernels")])
    code = "import sys; from mmaccel.cli import main; main(['methods']); sys.exit(main(['count-words', 'a']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "the first tokens" in done.stdout and done.stdout.endswith("\n1 words\n")
