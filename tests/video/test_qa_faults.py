"""What a run of video-qa is known by, and what it survives: changed models and sets, full disks, kills, faults of models."""

from __future__ import annotations

import builtins
import csv
import io
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mmaccel import MmaccelError, get_method, get_recipe
from mmaccel.cli import main
from mmaccel.cli.shared import text
from mmaccel.core import files
from mmaccel.programs import identity
from mmaccel.programs.bench import provenance
from mmaccel.programs.video_qa import answers as answer_files
from mmaccel.programs.video_qa import qa
from mmaccel.programs.video_qa.answers import AnswerFile
from mmaccel.programs.video_qa.generator import Figures
from mmaccel.programs.video_qa.qa import QASettings
from mmaccel.programs.video_qa.questions import VideoQuestion, read_questions


# --- what a run is known by -------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model, of which nothing is loaded."""
    made = tmp_path / "model"
    (made / "additional_chat_templates").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in (1, 2):
        (made / f"model-{number}.safetensors").write_bytes(rng.bytes(3 << 20))
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/short.jinja",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "adapter_model.safetensors",
        "modeling.py",
    ):
        (made / name).write_text("{}" + " " * (2 << 20))
    (made / "README.md").write_text("about it")
    return made


def flip(path: Path, at: int) -> None:
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def begun(path: Path, settings: QASettings) -> None:
    with AnswerFile(path, settings.identity()) as file:
        file.write(VideoQuestion("1", "a.mp4", "a.mp4", "what?").record("x"))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("model-1.safetensors", -1),
        ("model-2.safetensors", 2 << 20),
        ("config.json", -1),
        ("generation_config.json", 0),
        ("tokenizer.json", -1),
        ("tokenizer.model", 5),
        ("merges.txt", 5),
        ("chat_template.jinja", 5),
        ("additional_chat_templates/short.jinja", 5),
        ("preprocessor_config.json", -1),
        ("video_preprocessor_config.json", -1),
        ("adapter_model.safetensors", -1),
        ("modeling.py", -1),
    ],
)
def test_every_byte_of_a_model_counts(name: str, at: int, folder: Path, tmp_path: Path) -> None:
    settings = QASettings(str(folder), get_recipe("none"))
    begun(tmp_path / "a.jsonl", settings)
    flip(folder / "README.md", 0)
    begun(tmp_path / "a.jsonl", settings)
    flip(folder / name, at)
    with pytest.raises(
        MmaccelError, match=rf"different settings \(file {name}\); give another file, or delete this one\.$"
    ):
        AnswerFile(tmp_path / "a.jsonl", settings.identity())
    flip(folder / name, at)
    begun(tmp_path / "a.jsonl", settings)


def test_files_that_come_and_go_count_and_a_few_are_named(folder: Path, tmp_path: Path) -> None:
    settings = QASettings(str(folder), get_recipe("none"))
    begun(tmp_path / "a.jsonl", settings)
    (folder / "added_tokens.json").write_text("{}")
    (folder / "merges.txt").unlink()
    with pytest.raises(MmaccelError, match=r"\(file merges.txt; file added_tokens.json\)"):
        AnswerFile(tmp_path / "a.jsonl", settings.identity())
    for path in folder.glob("*.*"):
        path.write_text("else")
    with pytest.raises(MmaccelError, match=r"file \S+ and \d+ more\); give another file"):
        AnswerFile(tmp_path / "a.jsonl", settings.identity())


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        (transformers, "__version__", "0.0", "transformers"),
        (torch, "__version__", "0.0", "torch"),
        (provenance, "__version__", "0.0", "mmaccel"),
        (identity, "code_identity", lambda: "0" * 64, "code"),
        (torch.cuda, "is_available", lambda: True, "device"),
        (VideoQuestion, "words", lambda self: "Answer now.", "prompt"),
    ],
)
def test_who_answers_and_how_it_is_asked_count(
    where: Any, name: str, value: Any, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QASettings(str(folder), get_recipe("none"))
    begun(tmp_path / "a.jsonl", settings)
    monkeypatch.setattr(where, name, value)
    with pytest.raises(MmaccelError, match=rf"different settings \({said}\)"):
        AnswerFile(tmp_path / "a.jsonl", settings.identity())


def test_the_whole_recipe_counts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``1`` is a token and ``1.0`` all of them; the code of methods and of what chooses frames; files that they load."""
    one, everything = (QASettings(str(folder), get_recipe("divprune", retain=retain)) for retain in (1, 1.0))
    begun(tmp_path / "a.jsonl", one)
    with pytest.raises(MmaccelError, match=r"different settings \(recipe of 'divprune'\)"):
        AnswerFile(tmp_path / "a.jsonl", everything.identity())
    with monkeypatch.context() as patch:
        patch.setattr(get_method("divprune"), "reduce", lambda self, tokens, count: None)
        with pytest.raises(MmaccelError, match=r"different settings \(code of divprune of 'divprune'\)"):
            AnswerFile(tmp_path / "a.jsonl", one.identity())
    chosen = QASettings(str(folder), get_recipe("none"), frame_method="scene-frames")
    begun(tmp_path / "b.jsonl", chosen)
    with monkeypatch.context() as patch:
        patch.setattr(get_method("scene-frames"), "pick", lambda self, frames, count: None)
        with pytest.raises(MmaccelError, match="code of scene-frames"):
            AnswerFile(tmp_path / "b.jsonl", chosen.identity())
    clip = tmp_path / "clip"
    clip.mkdir()
    (clip / "weights").write_bytes(b"1")
    loads = QASettings(str(folder), get_recipe("cdpruner", retain=0.5, clip=str(clip)))
    begun(tmp_path / "c.jsonl", loads)
    (clip / "weights").write_bytes(b"2")
    with pytest.raises(MmaccelError, match="files of cdpruner"):
        AnswerFile(tmp_path / "c.jsonl", loads.identity())


def test_a_hub_id_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "a" * 40

    def cached(name: str, file: str) -> str:
        return f"/hub/models--org--tiny/snapshots/{commit}/{file}"

    monkeypatch.setattr("transformers.utils.hub.cached_file", cached)
    settings = QASettings("org/tiny", get_recipe("none"))
    begun(tmp_path / "a.jsonl", settings)
    begun(tmp_path / "a.jsonl", settings)
    commit = "b" * 40
    with pytest.raises(MmaccelError, match=r"different settings \(commit\)"):
        AnswerFile(tmp_path / "a.jsonl", settings.identity())
    # two that nobody knows are not the same
    monkeypatch.setattr("transformers.utils.hub.cached_file", lambda *_: None)
    begun(tmp_path / "b.jsonl", settings)
    with pytest.raises(MmaccelError, match=r"different settings \(commit\)"):
        AnswerFile(tmp_path / "b.jsonl", settings.identity())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (1000.0, False)])
def test_reading_that_takes_long_shows_how_far_it_is(
    patience: float, shown: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identity._QUIET == 2.0
    monkeypatch.setattr(identity, "_QUIET", patience)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    QASettings(str(folder), get_recipe("none")).identity()
    assert ("reading the model's files" in terminal.getvalue()) == shown


def test_answers_of_an_earlier_mmaccel_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "1-12345678", "video": "a.mp4", "question": "?", "answer": "x"}) + "\n")
    (tmp_path / "a.jsonl.run.json").write_text(
        json.dumps({"settings": {"model": "model", "weights": "0", "frames": 16}})
    )
    content = path.read_bytes()
    with pytest.raises(
        MmaccelError, match="is of an earlier mmaccel, which .* named questions by their lines; give another"
    ):
        AnswerFile(path, QASettings(str(folder), get_recipe("none")).identity())
    assert path.read_bytes() == content


# --- sets that change -------------------------------------------------------------------------------------------------
def line(question: str, video: str = "a.mp4", **more: Any) -> str:
    return json.dumps({"video": video, "question": question, **more})


def names(path: Path, *lines: str) -> list[str]:
    path.write_text("\n".join(lines))
    return [one.name for one in read_questions(path)]


def test_questions_are_named_by_what_they_ask(tmp_path: Path) -> None:
    path, one, two = tmp_path / "q.jsonl", line("one?"), line("two?")
    first, second, again = names(path, one, two, one)
    assert len({first, second, again}) == 3 and again == f"{first}-2"
    # put on top, moved, removed, written otherwise
    assert names(path, line("new?"), one, "", two, one)[1:] == [first, second, again]
    assert names(path, two, one) == [second, first]
    assert names(path, '{"question":"two?",   "note": 1, "video":"a.mp4"}') == [second]
    # what is asked is all of it
    others = [
        line("one?", "b.mp4"),
        line("one?", choices=["x", "y"]),
        line("one?", choices=["y", "x"]),
        line("one?", answer="x"),
    ]
    assert len({first, *names(path, *others)}) == 5
    assert names(path, "nonsense", one, "nonsense")[1] == first


@pytest.mark.parametrize("number", ("1" * 5000, "-" + "1" * 5000, '{"deep": [' + "1" * 5000 + "]}"))
def test_a_number_without_end_is_a_fault_of_its_line(number: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        f'{line("one?")}\n{{"video": "a.mp4", "question": "?", "id": {number}}}\n{line("two?")}\n'
    )
    first, bad, last = read_questions(tmp_path / "q.jsonl")
    assert not first.error and not last.error
    assert bad.error == "q.jsonl, line 2: this is not valid JSON (a number is too long)."


class Answers:
    """A model that answers at once, and what it was asked; ``pause`` seconds a question."""

    workers, pause = 1, 0.0

    def __init__(self, settings: QASettings, *_: Any, **__: Any) -> None:
        self.figures = Figures()

    def run(self, questions: list[VideoQuestion], done: Any = ()) -> Iterator[dict[str, Any]]:
        for one in questions:
            if one.name in done:
                continue
            if self.pause:
                time.sleep(self.pause)  # not to wait for anything: it is its work
            if one.error or "missing" in one.video and not Path(one.path).exists():
                self.figures.failed += 1
                yield one.failed(one.error or "It does not exist.")
            else:
                self.figures.questions += 1
                yield one.record(one.question[::-1])


@pytest.fixture
def stub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The command with a model that answers at once: its arguments, for a set of such lines."""
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json":
            path.unlink()
    monkeypatch.setattr(qa, "VideoAnswerer", Answers)

    def arguments(*lines: str, out: str = "a.jsonl", more: tuple[str, ...] = ()) -> list[str]:
        (tmp_path / "q.jsonl").write_text("".join(f"{one}\n" for one in lines))
        return ["video-qa", str(tmp_path / "q.jsonl"), "-o", str(tmp_path / out), "--model", str(folder), *more]

    return arguments


def records(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return sorted(found, key=lambda one: one["id"])


def test_answers_outlive_changes_of_the_set(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = (line(f"{word}?") for word in ("one", "two", "three"))
    assert main(stub(one, two, more=("--json",))) == 0
    first = records(tmp_path / "a.jsonl")
    capsys.readouterr()
    assert main(stub(three, two, one, more=("--json",))) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["taken_over"] == 2 and json.loads(out)["answered_now"] == 1 and "2 of 3" in err
    assert main(stub(three, more=("--json",))) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["taken_over"] == 1 and json.loads(out)["answered_now"] == 0
    assert "2 answers in" in err and "other questions; they stay there" in err
    assert [one for one in records(tmp_path / "a.jsonl") if one in first] == first


def test_questions_about_a_video_that_changed_are_asked_again(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that has other bytes, though as many and of the same time; a folder of pictures; another file under the name."""
    (tmp_path / "a.mp4").write_bytes(b"first")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(b"first")
    (tmp_path / "b.mp4").write_bytes(b"first")
    asked = line("one?"), line("two?", "pictures"), line("three?", "b.mp4")
    argv = stub(*asked, more=("--json",))
    assert main(argv) == 0
    before = {one["question"]: one for one in records(tmp_path / "a.jsonl")}
    for path in (tmp_path / "a.mp4", tmp_path / "pictures" / "1.png"):
        state = path.stat()
        path.write_bytes(b"other")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    capsys.readouterr()
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["answered_now"] == 2 and json.loads(out)["taken_over"] == 1
    assert "2 answers in" in err and "videos that changed; these questions are asked again" in err
    after = {one["question"]: one for one in records(tmp_path / "a.jsonl")}
    assert {name for name in before if before[name]["content"] != after[name]["content"]} == {"one?", "two?"}
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["answered_now"] == 0 and "changed" not in err


def test_lines_without_an_answer_are_asked_again(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = stub(*(line(f"{i}?") for i in range(5)), more=("--json",))
    assert main(argv) == 0
    whole, path = records(tmp_path / "a.jsonl"), tmp_path / "a.jsonl"
    edited = [dict(one) for one in whole]
    del edited[0]["answer"]
    edited[1]["answer"], edited[2]["answer"] = None, 3
    # and one twice
    path.write_text("".join(json.dumps(one) + "\n" for one in [*edited, edited[4]]))
    capsys.readouterr()
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["answered_now"] == 3 and records(path) == whole


# --- what is written --------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/proc/version").exists(), reason="a folder in which nobody may write is that of Linux")
def test_a_summary_that_cannot_be_written_is_said_at_once(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(stub(line("one?"), more=("--json", "/proc/summary.json"))) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Cannot write '/proc/summary.json'" in err
    assert not (tmp_path / "a.jsonl").exists()
    assert main(stub(line("one?"), more=("--json", str(tmp_path / "s.json")))) == 0
    assert json.loads((tmp_path / "s.json").read_text())["questions"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "a.jsonl.run.json",
        "model",
        "q.jsonl",
        "s.json",
    ]


def test_a_disk_that_fills_up_before_the_summary_is_one_sentence(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = stub(line("one?"), more=("--json", str(tmp_path / "s.json")))
    write = files.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.name == "s.json":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(text, "write_whole", full)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1 and "No space left on device" in err and "give another file with --json to resume" in err
    )
    monkeypatch.undo()
    assert main(argv) == 0 and json.loads((tmp_path / "s.json").read_text())["taken_over"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
def test_an_output_that_takes_nothing(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or none at all (``>&-``): one sentence, an exit status of its own, and the answers are there."""
    argv = stub(line("one?"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(argv) == 2
        # or the interpreter would complain at its end
        full.flush()
    said = "mmaccel video-qa: cannot use its output (No space left on device); correct that and start again.\n"
    assert capsys.readouterr().err == said and len(records(tmp_path / "a.jsonl")) == 1
    monkeypatch.setattr(sys, "stdout", None)
    assert main(argv) == 2
    said = "mmaccel video-qa: standard output is closed; send it to a file or /dev/null.\n"
    assert capsys.readouterr().err == said


# --- faults of the disk -----------------------------------------------------------------------------------------------
class Killed(BaseException):
    """As if the process ended here."""


class Disk:
    """The file system as the file of answers sees it: its ``at``-th call fails in some way."""

    def __init__(self, at: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.at, self.way = 0, at, way
        names = ("open", "write", "fsync", "replace", "ftruncate", "truncate")
        proxied = {name: self._failing(getattr(os, name), name) for name in names}
        module = SimpleNamespace(**{**vars(os), **proxied})
        for place in (answer_files, files):
            monkeypatch.setattr(place, "os", module)
            monkeypatch.setattr(place, "open", self._open, raising=False)

    def _failing(self, call: Any, name: str) -> Any:
        def failing(*args: Any) -> Any:
            self.calls += 1
            dead = self.way == "dead" and self.calls > self.at
            if self.calls != self.at and not dead:
                return call(*args)
            if name == "write" and self.way in ("half", "dead", "killed half") and not dead:
                call(*args[:-1], args[-1][: len(args[-1]) // 2])
            if self.way == "killed after":
                call(*args)
            if self.way.startswith("killed"):
                raise Killed
            raise OSError(28, "No space left on device")

        return failing

    def _open(self, path: Any, mode: str = "r") -> Any:
        if "w" not in mode:
            return builtins.open(path, mode)
        file = self._failing(builtins.open, "open")(path, mode)
        for name in ("write", "flush"):
            setattr_ = self._failing(getattr(file, name), name)
            file = _Wrapped(file, name, setattr_)
        return file


class _Wrapped:
    """A file of which one method is another."""

    def __init__(self, file: Any, name: str, method: Any) -> None:
        self._file, self._name, self._method = file, name, method

    def __getattr__(self, name: str) -> Any:
        return self._method if name == self._name else getattr(self._file, name)

    def __enter__(self) -> Any:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)


SET = [VideoQuestion(str(i), f"{i}.mp4", f"{i}.mp4", f"question {i}?") for i in range(5)]


def attempt(path: Path, failing: tuple[str, ...] = ()) -> None:
    """A run of the set, as the command has it."""
    with AnswerFile(path, {"frames": 6}) as file:
        for one in file.left(SET):
            file.write(one.failed("broken") if one.name in failing else one.record(f"ä {one.name}"))


WAYS = ("full", "half", "dead", "killed", "killed half", "killed after")


@pytest.mark.parametrize("way", WAYS)
def test_a_fault_at_every_write_loses_and_doubles_nothing(way: str, tmp_path: Path) -> None:
    """Two runs, the first with questions that fail, of which any one call of the file system fails; then one undisturbed."""
    attempt(tmp_path / "whole.jsonl")
    wanted, at, faults = records(tmp_path / "whole.jsonl"), 0, 0
    while True:
        at += 1
        path = tmp_path / f"{at}.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(at, way, patch)
            kept: set[str] = set()
            for failing in (("1", "4"), ()):
                try:
                    attempt(path, failing)
                except Killed:
                    faults += 1
                except MmaccelError as error:
                    faults += 1
                    assert str(error).startswith(f"Cannot write '{path}' (No space left on device);")
                # what was answered stays, whatever happens later
                there = {one["id"] for one in whole_lines(path) if "answer" in one}
                assert kept <= there
                kept = there
            if disk.calls < at:
                break
        attempt(path)
        assert records(path) == wanted and not list(tmp_path.glob(f"{at}.jsonl*.part")), (at, way)
    # that the name of a file is not on the disk yet is no fault
    assert at > 20 and faults > 20


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file that may be torn."""
    found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(one) for one in found if one.endswith(b"\n")]


def test_a_command_whose_disk_fills_up_goes_on(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*(line(f"{i}?", answer=f"{i}") for i in range(4)), "no JSON", line("x?", "missing.mp4")]
    assert main(stub(*asked, out="whole.jsonl")) == 3
    capsys.readouterr()
    for at in (1, 2, 5, 9, 12):
        argv = stub(*asked, out=f"{at}.jsonl")
        with pytest.MonkeyPatch.context() as patch:
            Disk(at, "dead", patch)
            assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "No space left on device" in err
        assert main(argv) == 3
        assert records(tmp_path / f"{at}.jsonl") == records(tmp_path / "whole.jsonl")
        capsys.readouterr()


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a run is killed in a forked process")
def test_killed_at_any_moment_it_goes_on(stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9, again and again, until the set is done."""
    asked = [*(line(f"{i}?") for i in range(60)), line("x?", "missing.mp4")]
    assert main(stub(*asked, out="whole.jsonl")) == 3
    argv, rng, kills, begin = stub(*asked), random.Random(0), 0, time.monotonic()
    # a run takes four lives at least, however fast the machine
    monkeypatch.setattr(Answers, "pause", 0.02)
    while True:
        child = os.fork()
        if not child:
            status = 1
            try:
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1), os.dup2(quiet, 2)
                status = main(argv)
            finally:
                os._exit(status)
        time.sleep(rng.uniform(0.0, 0.3))  # not to wait for anything: it may be killed at any moment
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            break
        kills += 1
        assert time.monotonic() - begin < 120
    assert code == 3 and kills >= 2
    assert records(tmp_path / "a.jsonl") == records(tmp_path / "whole.jsonl")


# --- a folder of clips, and a table of answers -------------------------------------------------------------------------
def clips(folder: Path, *names: str) -> Path:
    """A folder with files that begin as videos."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\0\0\x14ftypisom" + name.encode())
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_clip_of_a_folder_is_asked_one_question(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    top = clips(tmp_path / "films", "b.mp4", "a.3gp", "day/c.mts", "day/night/d.webm", ".hidden.mp4", "._a.mp4")
    (top / "notes.txt").write_text("no clip")
    (top / "frames").mkdir()
    (top / "frames" / "1.png").write_bytes(b"a picture")
    (top / "day" / "again").symlink_to(top)
    expected = ["a.3gp", "b.mp4", "day/c.mts", "day/night/d.webm", "frames"]
    capsys.readouterr()
    argv = stub(more=("--ask", "what happens?"))
    argv[1] = str(top)
    assert main(argv) == 0
    assert re.search(r"^questions +5$", capsys.readouterr().out, re.M)
    found = [json.loads(one) for one in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [one["video"] for one in found] == expected
    assert {one["question"] for one in found} == {"what happens?"} and {one["answer"] for one in found} == {
        "?sneppah tahw"
    }
    # another clip is added, and the rest is taken over
    clips(top, "new.avi")
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answered_now"] == 1
    for one, videos in ((top / "frames", ["frames"]), (top / "b.mp4", ["b.mp4"])):
        argv = stub(out=f"{one.name}.csv", more=("--ask", "what?"))
        argv[1] = str(one)
        assert main(argv) == 0
        assert [row["video"] for row in table(tmp_path / f"{one.name}.csv")] == videos


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        ("films", (), "'{}/films' is a folder; give --ask QUESTION with it, or a file with a question a line"),
        ("films/a.mp4", (), "'{}/films/a.mp4' is a clip; give --ask QUESTION"),
        (
            "q.jsonl",
            ("--ask", "what?"),
            "--ask is for a clip or a folder of clips, and '{}/q.jsonl' is a file of questions",
        ),
        ("empty", ("--ask", "what?"), "'{}/empty' is no clip and holds none"),
        ("films", ("--ask", " "), "the text field 'question' is missing or empty"),
        ("gone", ("--ask", "what?"), "There is no clip or folder '{}/gone'"),
        ("films", ("--ask", "what?", "--out", "a.txt"), "--out 'a.txt' must end in .jsonl or .csv"),
        (
            "films",
            ("--ask", "what?", "--out", "{}/mine.csv"),
            "exists without 'mine.csv.jsonl', which holds its answers",
        ),
        (
            "films",
            ("--ask", "what?", "--out", "{}/b.csv", "--json={}/b.csv.jsonl"),
            "is the file of the questions or",
        ),
        ("bad.csv", (), "'{}/bad.csv' has no columns 'video' and 'question'"),
    ],
)
def test_what_does_not_fit_a_folder_or_a_table_is_told(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, more: tuple[str, ...], words: str
) -> None:
    clips(tmp_path / "films", "a.mp4")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.csv").write_text("of,the,user\n")
    (tmp_path / "bad.csv").write_text("clip,text\na.mp4,what?\n")
    argv = stub(line("one?"), more=tuple(one.format(tmp_path) for one in more))
    argv[1] = str(tmp_path / given)
    assert main(argv) == 2
    assert words.format(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "mine.csv").read_text() == "of,the,user\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("a.jsonl", "b.csv"))]


def test_answers_are_written_as_a_table_and_taken_over(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"clip")
    asked = (
        line('say "a, b"\nand ü?'),
        json.dumps(
            {"id": "7", "video": "a.mp4", "question": "B .ti", "choices": ["it, then", "or not"], "answer": "A"}
        ),
        line("gone?", "missing.mp4"),
    )
    argv = stub(*asked, out="a.csv")
    assert main(argv) == 3
    first = table(tmp_path / "a.csv")
    assert list(first[0]) == [
        *("id", "video", "question", "choices", "expected", "answer", "choice", "right", "error", "content"),
    ]
    assert first[0]["question"] == 'say "a, b"\nand ü?' and first[0]["answer"] == '?ü dna\n"b ,a" yas'
    assert json.loads(first[1]["choices"]) == ["it, then", "or not"] and first[1]["expected"] == "A"
    assert first[2]["error"] == "It does not exist." and first[2]["answer"] == ""
    assert main(argv) == 3
    assert table(tmp_path / "a.csv") == first
    # stopped in between: what is answered is in the table, and the rest follows
    original, count = Answers.run, iter(range(9))

    def stopped(self: Answers, *given: Any) -> Iterator[dict[str, Any]]:
        for record in original(self, *given):
            if next(count) == 2:
                raise KeyboardInterrupt
            yield record

    monkeypatch.setattr(Answers, "run", stopped)
    argv = stub(*(line(f"{i}?") for i in range(4)), out="b.csv")
    assert main(argv) == 130
    assert [row["answer"] for row in table(tmp_path / "b.csv")] == ["?0", "?1"]
    monkeypatch.setattr(Answers, "run", original)
    # killed before the table was written: the lines beside it have all
    (tmp_path / "b.csv").unlink()
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["taken_over"] == 2
    assert [row["answer"] for row in table(tmp_path / "b.csv")] == ["?0", "?1", "?2", "?3"]


def test_questions_in_a_table(stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.mp4").write_bytes(b"clip")
    argv = stub(more=("--json",))
    argv[1] = str(tmp_path / "Q.CSV")
    with (tmp_path / "Q.CSV").open("w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "video", "choices", "answer", "id", "remark"])
        rows.writerow(["who,\nand why?", "a.mp4", "", "", "", "one"])
        rows.writerow([")A", "a.mp4", '["he", "she"]', "he", "x", ""])
        rows.writerow(["what?", "a.mp4", "he or she", "", "", ""])
        rows.writerow(["", "a.mp4", "", "", "", ""])
    assert main(argv) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["accuracy"] == 1.0 and json.loads(out)["failed"] == 2
    answered = {one["question"]: one.get("answer") for one in records(tmp_path / "a.jsonl")}
    assert answered == {"who,\nand why?": "?yhw dna\n,ohw", ")A": "A)", "what?": None, "": None}
    assert "Q.CSV, line 5: the field 'choices' must be a list of 2 to 26 texts" in err
    assert "Q.CSV, line 6: the text field 'question' is missing or empty" in err


def test_what_could_not_be_read_is_listed_at_the_end(
    stub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"clip")
    asked = [line(f"{i}?", "missing.mp4") for i in range(30)] + [line("0?", f"missing{i}.mp4") for i in range(25)]
    named = {"video": "a.mp4", "choices": ["yes", "no"]}
    asked += [
        json.dumps({**named, "id": "clear", "question": "sey"}),
        json.dumps({**named, "id": "odd", "question": "ton"}),
    ]
    assert main(stub(*asked)) == 3
    lines = capsys.readouterr().err.splitlines()
    at = lines.index(f'55 questions have no answer ("error" in {tmp_path / "a.jsonl"}):')
    assert lines[at + 1] == "  missing.mp4: It does not exist. (30 questions)"
    assert lines[at + 2 : at + 21] == [f"  missing{i}.mp4: It does not exist." for i in range(19)]
    assert lines[at + 21] == "  ... and 6 more"
    assert lines[at + 22].startswith("1 answers name none of the choices, or several")
    assert lines[at + 23 :] == ["  a.mp4, id odd: 'not'"]
    # an answer that names no choice is an answer
    assert main(stub(asked[-1], out="b.jsonl")) == 0
