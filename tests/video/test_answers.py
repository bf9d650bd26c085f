"""Files of answers: nothing that stops a run loses or doubles one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from asking import lines

from mmaccel import MmaccelError
from mmaccel.programs.video_qa.answers import AnswerFile
from mmaccel.programs.video_qa.questions import VideoQuestion


def record(name: str, answer: str = "x") -> dict[str, Any]:
    return VideoQuestion(name, "a", "a", "what?").record(answer)


def test_a_torn_line_is_dropped_and_errors_are_asked_again(tmp_path: Path) -> None:
    path, same = tmp_path / "a.jsonl", {"frames": 6, "options": (1, 2)}
    with AnswerFile(path, same) as file:
        file.write(record("1"))
        file.write(record("1", "not this"))
        file.write(record("2", "\u00e4 \ud800"))
        file.write(VideoQuestion("3", "a", "a", "what?").failed("broken"))
        assert set(file.done) == {"1", "2", "3"}
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3 and "ä".encode() in whole
    for torn in (b'{"id": "4", "vid', b'{"id": "4"', b"\0" * 40, b'{"id": "4", \n', b"7\n"):
        path.write_bytes(whole + torn)
        with AnswerFile(path, same) as file:
            assert set(file.done) == {"1", "2"} and file.done["2"]["answer"] == "ä \ud800"
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
            file.write(record("4"))
            with pytest.raises(MmaccelError, match="Another run"):
                AnswerFile(path, same)
        assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["1", "2", "4"]
    path.write_bytes(path.read_bytes() + b'{"id": "5"')
    with AnswerFile(path, same) as file:
        # without an error nothing is written anew: the line is cut off
        assert set(file.done) == {"1", "2", "4"}
        file.write(record("5"))
    assert [one["id"] for one in lines(path)] == ["1", "2", "4", "5"]


def test_a_record_is_on_the_disk_when_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    write, sync = os.write, os.fsync
    with AnswerFile(tmp_path / "a.jsonl", {}) as file:
        with monkeypatch.context() as patch:
            # a disk may take a part only
            patch.setattr(os, "write", lambda fd, line: did.append("write") or write(fd, line[:70]))
            patch.setattr(os, "fsync", lambda fd: did.append("fsync") or sync(fd))
            file.write(record("1"))
            file.write(record("2", "x" * 70))
            assert did == ["write", "fsync", "write", "write", "fsync"]

            def full(fd: int, line: bytes) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "write", full)
            with pytest.raises(MmaccelError, match="No space left on device"):
                file.write(record("3"))
        assert set(file.done) == {"1", "2"} and len(lines(file.path)) == 2


def test_files_that_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswerFile(path, {"frames": 6, "recipe": {"name": "x"}}) as file:
        file.write(record("1"))
        file.write(record("2"))
    with pytest.raises(MmaccelError, match=r"different settings \(frames; recipe: name\)"):
        AnswerFile(path, {"frames": 8, "recipe": {"name": "y"}})
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"1"', b'"1'))
    with pytest.raises(MmaccelError, match="no answer"):
        AnswerFile(path, {"frames": 6, "recipe": {"name": "x"}})
    path.write_bytes(content)
    (tmp_path / "a.jsonl.run.json").unlink()
    with pytest.raises(MmaccelError, match="which holds its settings"):
        AnswerFile(path, {"frames": 6})
    with pytest.raises(MmaccelError, match="does not exist"):
        AnswerFile(tmp_path / "none" / "a.jsonl", {})
    with pytest.raises(MmaccelError, match="Cannot write"):
        AnswerFile(tmp_path, {})
    # one that was never begun may be begun with anything
    path.write_bytes(b"")
    with AnswerFile(path, {"frames": 8}) as file:
        assert not file.done
    with AnswerFile(path, {"frames": 9}) as file:
        file.write(record("1"))
    with pytest.raises(MmaccelError, match="frames"):
        AnswerFile(path, {"frames": 8})


def test_a_link_goes_on_pointing_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk" / "a.jsonl", tmp_path / "link.jsonl")
    with AnswerFile(tmp_path / "link.jsonl", {}) as file:
        file.write(record("1"))
        file.write(VideoQuestion("2", "a", "a", "what?").failed("broken"))
    # errors are dropped, so the file is written anew
    with AnswerFile(tmp_path / "link.jsonl", {}) as file:
        assert set(file.done) == {"1"}
    assert (tmp_path / "link.jsonl").is_symlink() and len(lines(tmp_path / "disk" / "a.jsonl")) == 1


@pytest.mark.parametrize("path", ("/dev/null", "."))
def test_what_is_no_file_holds_no_answers(path: str) -> None:
    with pytest.raises(MmaccelError, match="Cannot write .* no regular file"):
        AnswerFile(path, {})


def test_answers_to_other_questions_are_not_taken(tmp_path: Path) -> None:
    one = VideoQuestion("1", "a", "a", "what?", ("x", "y"), "x")
    with AnswerFile(tmp_path / "a.jsonl", {}) as file:
        file.write(one.record("A"))
        file.write(VideoQuestion("2", error="bad line").failed("bad line"))
        assert file.left([one, VideoQuestion("2", error="bad line"), VideoQuestion("3", "a", "a", "?")])[0].name == "3"
        for other in ({"question": "why?"}, {"video": "b"}, {"choices": ("x", "z")}, {"answer": "y"}):
            with pytest.raises(MmaccelError, match="another question"):
                file.left([VideoQuestion(**{**vars(one), **other})])
