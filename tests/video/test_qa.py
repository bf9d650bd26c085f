"""Questions about videos in bulk: the answers are those of single calls, and nothing that stops a run loses or doubles one."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from films import film
from PIL import Image

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerated, recipe
from mmaccel.cli import main
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.video_qa.answers import AnswerFile
from mmaccel.programs.video_qa.qa import Figures, QASettings, VideoAnswerer, answer_videos, needs_own_prefill
from mmaccel.programs.video_qa.questions import VideoQuestion, as_questions, by_video, read_questions
from mmaccel.video import Clip, ahead, decode

FRAMES, LONGEST = 6, 6
FAMILIES = ("qwen2_5_vl", "llava_onevision", "smolvlm")
ASKED = ("what?", "where is it, and why does it stand there?", "what is it?")


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of unequal length, size and rate, one of a single frame, broken ones, and a folder of pictures."""
    root = tmp_path_factory.mktemp("qa")
    film(root / "a.mp4", 30)
    film(root / "slow.mp4", 30, fps=1)
    film(root / "high.mp4", 20, size=(64, 96))
    film(root / "short.mp4", 4)
    film(root / "one.mp4", 1)
    (root / "text.mp4").write_text("no film\n")
    (root / "cut.mp4").write_bytes((root / "a.mp4").read_bytes()[:900])
    (root / "bare").mkdir()
    (root / "pictures").mkdir()
    for i, frame in enumerate(zoo.clip(8, 96, 64, 0)):
        Image.fromarray(frame).save(root / "pictures" / f"f{i}.png")
    return root


GOOD = ("a.mp4", "slow.mp4", "high.mp4", "short.mp4", "one.mp4", "pictures")


def ask(films: Path, videos: tuple[str, ...] = GOOD, asked: tuple[str, ...] = ASKED) -> list[VideoQuestion]:
    return [
        VideoQuestion(f"{video} {i}", video, str(films / video), words)
        for video in videos
        for i, words in enumerate(asked)
    ]


#: built once; whoever works with it leaves it as it was
tiny = functools.cache(zoo.model)


def answerer(
    family: str, which: str | Recipe = "balanced", size: int | str = "auto", say: Any = None, **options: Any
) -> VideoAnswerer:
    made = {"frames": FRAMES, "max_new_tokens": LONGEST, "batch_size": size, **options}
    settings = QASettings("tiny", recipe(which), **made)
    return VideoAnswerer(settings, tiny(family), zoo.processor(family), *([say] if say else []))


def answers(one: VideoAnswerer, questions: list[VideoQuestion]) -> dict[str, str]:
    return {record["id"]: record["answer"] for record in one.run(questions)}


def alone(family: str, which: str | Recipe, questions: list[VideoQuestion]) -> dict[str, str]:
    """Every question by a call of ``generate`` of its own; recipe ``none`` on the bare model."""
    ask_alone = single if isinstance(which, str) else single.__wrapped__
    return {one.name: ask_alone(family, which, one) for one in questions}


@functools.cache
def single(family: str, which: str | Recipe, one: VideoQuestion) -> str:
    model, processor = tiny(family), zoo.processor(family)
    clip = decode(one.path, FRAMES)
    if len(clip.frames) == 1:
        clip = Clip(np.repeat(clip.frames, 2, axis=0), [0, 0], clip.total, clip.fps)
    inputs = encode(processor, [Prompt(one.words(), clip=clip)])
    with nullcontext() if which == "none" else accelerated(model, which, processor=processor):
        made = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    text: str = processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


# --- questions --------------------------------------------------------------------------------------------------------
LINES = [
    '{"video": "a.mp4", "question": " what? "}',
    "",
    '{"video": "/abs/b.mp4", "question": "which?", "choices": ["red", "blue"], "answer": "blue", "id": "mine"}',
    "nonsense",
    "[1]",
    '{"question": "no video?"}',
    '{"video": "a.mp4", "question": " "}',
    '{"video": "a.mp4", "question": "?", "choices": ["red"]}',
    '{"video": "a.mp4", "question": "?", "choices": ["red", "Red "]}',
    '{"video": "a.mp4", "question": "?", "choices": ["red", "blue"], "answer": "green"}',
    '{"video": "a.mp4", "question": "?", "answer": 3}',
    '{"video": "a.mp4", "question": "?", "id": "mine"}',
    '{"video": "a.mp4", "question": "?", "id": 7}',
    '{"video": "a.mp4", "question": "?", "id": true}',
    "[" * 100000,
    '{"video": "a.mp4", "question": "half a \\ud83d ?"}',
    '{"video": "https://example.org/a.mp4", "question": "?"}',
]


def test_lines_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("\ufeff" + "\r\n".join(LINES))
    found = read_questions(path)
    assert len(found) == len(LINES) - 1 and len({one.name for one in found}) == len(found)
    first, mine = found[:2]
    assert (first.question, first.path, first.error) == ("what?", str(tmp_path / "a.mp4"), "")
    assert mine == VideoQuestion("mine", "/abs/b.mp4", "/abs/b.mp4", "which?", ("red", "blue"), "blue")
    assert found[-1].path == "https://example.org/a.mp4"
    bad = {int(one.error.split("line ")[1].split(":")[0]): one.error for one in found if one.error}
    assert sorted(bad) == [4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16]
    assert "'video'" in bad[6] and "'question'" in bad[7] and "'choices'" in bad[8] and "'choices'" in bad[9]
    assert "half a character" in bad[16] and "'green'" in bad[10] and "line 3" in bad[12]
    assert all(error.startswith("q.jsonl, line ") and error.endswith(".") for error in bad.values())
    # a name holds as long as its line does, wherever that stands
    path.write_text("\n".join(['{"video": "a.mp4", "question": "else?"}', "", LINES[0]]))
    other, again = read_questions(path)
    assert again.name == first.name != other.name


def test_files_that_are_no_questions(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in (
        ("empty", "holds no question"),
        ("binary", "UTF-8"),
        ("none", "Cannot read"),
        (".", "Cannot read"),
    ):
        with pytest.raises(MmaccelError, match=said):
            read_questions(tmp_path / name)
    with pytest.raises(MmaccelError, match="no question"):
        as_questions([])


def test_objects_are_questions_too() -> None:
    one = VideoQuestion("2", "b", "b", "?")
    found = as_questions([{"video": "a", "question": "what?"}, one, {"video": "a"}, one])
    assert [q.path for q in found[:2]] == ["a", "b"] and found[1] is one
    assert "question 3" in found[2].error and "'2'" in found[3].error
    assert len({q.name for q in found}) == 4


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        (" (b) on a beach", "B"),
        ("B. whatever", "B"),
        ("on a beach", "B"),
        ("It is ON A BEACH.", "B"),
        ("in a garden or on a beach", None),
        ("A garden", None),
        ("C", None),
        ("", None),
        ("a beach", None),
    ],
)
def test_which_choice_an_answer_names(answer: str, letter: str | None) -> None:
    one = VideoQuestion("1", "a", "a", "where?", ("in a garden", "on a beach"), "on a beach")
    assert one.chosen(answer) == letter
    assert one.record(answer)["choice"] == letter and one.record(answer)["right"] == (letter == "B")
    assert "B. on a beach" in one.words().splitlines()


def test_an_exact_choice_wins_over_one_inside_it() -> None:
    one = VideoQuestion("1", "a", "a", "what?", ("a dog", "not a dog"))
    assert (one.chosen("Not a dog."), one.chosen("a dog"), one.chosen("it is not a dog")) == ("B", "A", None)


@pytest.mark.parametrize(
    ("choices", "right", "letter"),
    [
        (("red", "blue"), "B", "B"),
        (("red", "blue"), "blue", "B"),
        # the words of a choice before a letter
        (("B", "A"), "B", "A"),
        (("1. C", "A. x", "C. y"), "A. x", "B"),
    ],
)
def test_the_right_choice_by_its_words_or_its_letter(choices: tuple[str, ...], right: str, letter: str) -> None:
    one = VideoQuestion("1", "a", "a", "which?", choices, right)
    assert one.right() == letter and one.record(letter)["right"] and not one.record("Z")["right"]


def test_records_hold_what_is_known() -> None:
    open_ = VideoQuestion("1", "a", "/x/a", "what?", answer="Red")
    assert open_.record("red.") == {
        "id": "1", "video": "a", "question": "what?", "expected": "Red", "answer": "red.", "right": True
    }  # fmt: skip
    assert VideoQuestion("1", "a", "/x/a", "what?").record("x") == {
        "id": "1", "video": "a", "question": "what?", "answer": "x"
    }  # fmt: skip
    assert "right" not in open_.failed("why") and open_.failed("why")["error"] == "why"


def test_videos_come_in_the_order_of_their_first_question(films: Path) -> None:
    asked = ask(films, ("a.mp4", "one.mp4"))
    broken = [VideoQuestion("x", error="bad"), VideoQuestion("y", error="bad")]
    mixed = [asked[3], broken[0], asked[0], asked[4], broken[1], asked[1]]
    assert by_video(mixed) == [[asked[3], asked[4]], [broken[0]], [asked[0], asked[1]], [broken[1]]]


# --- answers ----------------------------------------------------------------------------------------------------------
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
    with pytest.raises(MmaccelError, match=r"different settings \(frames, recipe\)"):
        AnswerFile(path, {"frames": 8, "recipe": {"name": "y"}})
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"1"', b'"1'))
    with pytest.raises(MmaccelError, match="no answer"):
        AnswerFile(path, {"frames": 6, "recipe": {"name": "x"}})
    path.write_bytes(content)
    (tmp_path / "a.jsonl.run.json").unlink()
    with pytest.raises(MmaccelError, match="says how it was made"):
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


# --- the same answers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", ("none", "divprune"))
def test_answers_are_those_of_single_calls(family: str, which: str, films: Path) -> None:
    """Whatever is answered together, and from one prefill of a video or from several."""
    questions = ask(films, asked=ASKED[:2])
    wanted = alone(family, which, questions)
    assert len(set(wanted.values())) > 6
    for size in (1, 32):
        one = answerer(family, which, size)
        assert answers(one, questions) == wanted
        assert one.figures.prefills == one.figures.videos == len(GOOD)
        assert one.figures.questions == len(questions) and not one.figures.failed
    one = answerer(family, which, 5)
    one._own_prefill = "for this test"
    assert answers(one, questions) == wanted and one.figures.prefills == len(questions)


@pytest.mark.parametrize("family", [name for name in zoo.VIDEO_FAMILIES if name not in FAMILIES])
def test_one_prefill_serves_every_family(family: str, films: Path) -> None:
    questions = ask(films, ("a.mp4", "slow.mp4"), ASKED[:2])
    one = answerer(family, "divprune", 4)
    assert answers(one, questions) == alone(family, "divprune", questions)
    assert one.figures.prefills == 2


LATE = {
    "fastv": ("fastv", "fastv works while"),
    "snapkv": ("snapkv", "snapkv works while"),
    "knorm": ("knorm", "knorm works while"),
    "kivi": ("kivi", "kivi works while"),
    "cdpruner": ("cdpruner", "cdpruner looks at the question"),
    "paper": (Recipe("paper", (Stage("divprune", 0.25),), positions="paper"), "renumbers"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_sees_the_question_reads_the_video_for_each(name: str, films: Path) -> None:
    which, why = LATE[name]
    questions = ask(films, ("a.mp4", "high.mp4"), ASKED[:2])
    one = answerer("qwen2_5_vl", which, 4)
    assert answers(one, questions) == alone("qwen2_5_vl", which, questions)
    assert one.figures.prefills == len(questions)
    assert any(why in note and note.startswith("one prefill a question") for note in one.figures.notes)


def test_one_question_a_video_is_a_plain_call(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two forwards where one does, and no word about prefills."""
    monkeypatch.setattr(VideoAnswerer, "_read", lambda *_: pytest.fail("read apart from its question"))
    one = answerer("qwen2_5_vl", "fastv", 4)
    assert len(answers(one, ask(films, asked=ASKED[:1]))) == len(GOOD) and not one.figures.notes


def test_what_a_recipe_needs() -> None:
    assert needs_own_prefill(recipe("none")) is None and needs_own_prefill(recipe("balanced")) is None
    assert needs_own_prefill(recipe("tome")) is None and needs_own_prefill(recipe("resize")) is None
    assert "holitom-inner" in str(needs_own_prefill(recipe("holitom")))
    assert "query-frames" in str(needs_own_prefill(recipe("query-frames")))


def test_a_question_leaves_no_trace(films: Path) -> None:
    """Asked twice, in another order, or after a long one, it gets the same answer; what the cache holds stays."""
    words = (ASKED[0], ASKED[1], ASKED[0], ASKED[2])
    for which in ("none", "tome"):
        one = answerer("qwen2_5_vl", which, 1)
        first = answers(one, ask(films, ("slow.mp4",), words))
        again = answers(one, ask(films, ("slow.mp4",), words[::-1]))
        assert first["slow.mp4 0"] == first["slow.mp4 2"] == again["slow.mp4 1"] == again["slow.mp4 3"]
        assert (first["slow.mp4 1"], first["slow.mp4 3"]) == (again["slow.mp4 2"], again["slow.mp4 0"])
        assert len(set(first.values())) > 1
        prefix = one._read(one._chosen(ask(films, ("a.mp4",)), decode(films / "a.mp4", FRAMES)))
        held = [tensor.clone() for layer in prefix.state.layers for tensor in layer.stored()]
        for _ in range(2):
            one._go_on(prefix, [(question, 0) for question in ask(films, ("a.mp4",))])
        after = [tensor for layer in prefix.state.layers for tensor in layer.stored()]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(held, after, strict=True))


def test_batches_hold_what_is_alike(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "fastv", 4)
    seen: list[list[str]] = []
    monkeypatch.setattr(
        one, "_generate", lambda chunk, clips: seen.append([q.video for q, _ in chunk]) or [""] * len(chunk)
    )
    list(one.run(ask(films, ("a.mp4", "short.mp4", "high.mp4", "one.mp4"), ASKED[:2])))
    # two frames (one, twice), four, six; never two lengths in one call, and questions of one length together
    assert seen == [["one.mp4"] * 2, ["short.mp4"] * 2, ["a.mp4", "high.mp4"] * 2]


@pytest.mark.parametrize("which", ("divprune", "fastv"))
def test_a_run_that_goes_on_asks_the_same_batches(which: str, films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ask(films)
    whole = answerer("qwen2_5_vl", which, 4)
    records = list(whole.run(questions))
    first, left = records[:7], records[7:]
    rest = answerer("qwen2_5_vl", which, 4)
    calls: list[int] = []
    write = rest._written
    monkeypatch.setattr(
        rest, "_written", lambda inputs, **more: calls.append(len(inputs["input_ids"])) or write(inputs, **more)
    )
    found = list(rest.run(questions, {one["id"] for one in first}))
    assert found == left
    # what was cut off in the middle of a batch is asked in that batch
    assert len(left) < sum(calls) < len(questions)
    decoded = rest.figures.videos
    assert list(rest.run(questions, {one["id"] for one in records})) == [] and rest.figures.videos == decoded


# --- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ("uniform", "scene-frames"))
def test_clips_that_are_held_take_no_more_than_they_may(
    method: str, live: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are decoded, that wait and that are asked about, however many questions a batch has room for."""
    memory = 2_000_000
    for i in range(20):
        film(tmp_path / f"{i}.mp4", 8, size=(160, 120), codec="mpeg4")
    one = answerer(
        "qwen2_5_vl", "fastv", memory=memory, frame_method=method, frames=2 if method != "uniform" else FRAMES
    )
    batches: list[int] = []
    monkeypatch.setattr(one, "_generate", lambda chunk, clips: batches.append(len(chunk)) or [""] * len(chunk))
    found = list(one.run(ask(tmp_path, tuple(f"{i}.mp4" for i in range(20)), ASKED[:1])))
    assert len(found) == 20 and all("answer" in record_ for record_ in found)
    assert 345_600 < live[1] <= memory and max(batches) > 1


def test_little_memory_changes_no_answer(films: Path) -> None:
    """Where a run stops and goes on makes no difference either; a clip that fits never is refused."""
    questions = ask(films, asked=ASKED[:2])
    one = answerer("qwen2_5_vl", "divprune", 4, memory=120_000)
    records = list(one.run(questions))
    assert {r["id"]: r["answer"] for r in records} == alone("qwen2_5_vl", "divprune", questions)
    rest = answerer("qwen2_5_vl", "divprune", 4, memory=120_000)
    assert list(rest.run(questions, {r["id"] for r in records[:5]})) == records[5:]
    found = answerer("qwen2_5_vl", "divprune", 4, memory=100_000).answer(questions)
    refused = {r["video"] for r in found if "give a larger memory=" in r.get("error", "")}
    assert refused == {"a.mp4", "slow.mp4", "high.mp4", "pictures"} and sum("answer" in r for r in found) == 4


# --- what goes wrong --------------------------------------------------------------------------------------------------
def test_bad_videos_are_named_and_the_rest_goes_on(films: Path) -> None:
    bad = ("nope.mp4", "text.mp4", "cut.mp4", "bare")
    questions = [*ask(films, bad, ASKED[:2]), *ask(films, ("a.mp4",)), VideoQuestion("line", error="no JSON.")]
    one = answerer("qwen2_5_vl")
    found = one.answer(questions)
    assert [record["id"] for record in found] == [question.name for question in questions]
    for record_ in [*found[:8], found[-1]]:
        assert set(record_) >= {"id", "video", "question", "error"} and "answer" not in record_
        assert record_["error"].endswith(".") and "\n" not in record_["error"]
    assert all(name in found[2 * i]["error"] for i, name in enumerate(bad))
    assert all("answer" in record_ for record_ in found[8:11])
    assert (one.figures.failed, one.figures.questions, one.figures.videos) == (9, 3, 1)


def starved(one: VideoAnswerer, most: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that has room for ``most`` questions at a time."""
    write, tried = one._written, []

    def written(inputs: Any, **more: Any) -> list[str]:
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > most:
            raise error("no room")
        return write(inputs, **more)

    monkeypatch.setattr(one, "_written", written)
    return tried


@pytest.mark.parametrize("error", (torch.OutOfMemoryError, MemoryError))
@pytest.mark.parametrize("which", ("divprune", "fastv"))
def test_auto_backs_off_and_says_so(
    which: str, error: type[BaseException], films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, said = ask(films), []
    one = answerer("qwen2_5_vl", which, say=said.append)
    tried = starved(one, 2, error, monkeypatch)
    assert answers(one, questions) == alone("qwen2_5_vl", which, questions)
    assert one.size == 2 and len(said) == len([n for n in tried if n > 2]) in (1, 2)
    assert all(sentence.startswith("Out of memory; going on with ") for sentence in said)


def test_no_room_for_one_question_is_an_error_of_that_question(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "fastv")
    starved(one, 0, torch.OutOfMemoryError, monkeypatch)
    found = list(one.run(ask(films, ("a.mp4", "high.mp4"))))
    assert len({r["id"] for r in found}) == len(found) == 6 and all("out of memory" in r["error"] for r in found)
    fixed = answerer("qwen2_5_vl", "fastv", 4)
    starved(fixed, 2, torch.OutOfMemoryError, monkeypatch)
    with pytest.raises(MmaccelError, match="smaller batch_size or 'auto'"):
        list(fixed.run(ask(films)))


def test_one_question_that_breaks_the_model_breaks_no_other(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "divprune", 8)
    made = one._encode

    def encoded(processor: Any, prompts: Any) -> Any:
        if any(prompt.question == ASKED[1] for prompt in prompts):
            raise ValueError("a processor says no\nat length")
        return made(processor, prompts)

    monkeypatch.setattr(one, "_encode", encoded)
    monkeypatch.setattr(one, "_own_prefill", "for this test")
    questions = ask(films, ("a.mp4", "high.mp4"))
    found = {r["id"]: r for r in one.run(questions)}
    wanted = alone("qwen2_5_vl", "divprune", questions)
    for question in questions:
        if question.question == ASKED[1]:
            assert "(ValueError: a processor says no)" in found[question.name]["error"]
        else:
            assert found[question.name]["answer"] == wanted[question.name]


@pytest.mark.parametrize("which", ("divprune", "fastv"))
@pytest.mark.parametrize("at", (1, 2, 5))
def test_a_model_that_fails_in_the_middle_of_a_batch(which: str, at: int, films: Path) -> None:
    """In its reading of the videos or in a step of an answer: what was asked together is asked again, one by one."""
    questions = ask(films, ("a.mp4", "high.mp4"), ASKED[:2])
    one, calls = answerer("qwen2_5_vl", which, 4), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("a kernel of the device failed\nat length")

    hook = one._family.text.layers[1].register_forward_pre_hook(fail)
    try:
        found = list(one.run(questions))
    finally:
        hook.remove()
    assert calls > at and len(found) == len(questions)
    assert {r["id"]: r.get("answer", r) for r in found} == alone("qwen2_5_vl", which, questions)


def test_a_choice_of_frames_that_fails_costs_one_video(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel.method import FrameChoice

    choose = FrameChoice.choose

    def failing(self: FrameChoice, frames: np.ndarray, retain: float) -> np.ndarray:
        if frames.shape[1] > frames.shape[2]:
            raise ZeroDivisionError("by nothing")
        return choose(self, frames, retain)

    monkeypatch.setattr(FrameChoice, "choose", failing)
    one = answerer("qwen2_5_vl", frame_method="scene-frames", frames=3)
    found = list(one.run(ask(films, ("high.mp4", "a.mp4"), ASKED[:1])))
    assert [r.get("error") for r in found] == ["The frames could not be chosen (ZeroDivisionError: by nothing).", None]


@pytest.mark.parametrize(("family", "place"), [("qwen2_5_vl", "<|image_pad|>"), ("llava_onevision", "<video>")])
def test_a_question_that_shows_the_model_something(family: str, place: str, films: Path) -> None:
    """As in sets made for training, where the prompt begins with a place for the video."""
    broken = VideoQuestion("x", "a.mp4", str(films / "a.mp4"), f"{place}\nwhat?")
    questions = ask(films, ("a.mp4",), ASKED[:2])
    *found, last = answerer(family, "divprune").answer([*questions, broken])
    assert {one["id"]: one["answer"] for one in found} == alone(family, "divprune", questions)
    assert last["error"] == f"The question holds '{place}', by which this model is shown something; leave it out."


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"frames": 0}, "frames=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "many"}, "batch_size='many'"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"frame_method": "divprune"}, "no frame method 'divprune'"),
        ({"frame_method": "distinct-frames", "frame_options": {"threshold": -1.0}}, "threshold=-1.0"),
    ],
)
def test_options_of_no_use(option: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said):
        QASettings("tiny", recipe("none"), **option)


def test_models_and_recipes_that_cannot(films: Path) -> None:
    with pytest.raises(MmaccelError, match="takes no video"):
        answerer("llava")
    with pytest.raises(MmaccelError, match="CLS"):
        answerer("qwen2_5_vl", "vtc-cls")


# --- frames -----------------------------------------------------------------------------------------------------------
def shown(one: VideoAnswerer, questions: list[VideoQuestion], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which frames the questions are shown."""
    seen: list[list[int]] = []
    chosen = one._chosen
    monkeypatch.setattr(
        one, "_chosen", lambda group, clip: [seen.append(c.indices) or (g, c) for g, c in chosen(group, clip)]
    )
    assert all("answer" in record_ for record_ in one.run(questions))
    return seen


def test_frames_are_chosen_among_more(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(method: str, video: str = "a.mp4", **options: Any) -> list[list[int]]:
        one = answerer("qwen2_5_vl", frame_method=method, frames=4, frame_options=options)
        return shown(one, ask(films, (video,), ASKED[:2]), monkeypatch)

    assert frames("uniform") == [decode(films / "a.mp4", 4).indices]
    assert frames("keyframes") == [decode(films / "a.mp4", 4, select="keyframes").indices]
    (scenes,) = frames("scene-frames")
    assert len(scenes) == 4 and set(scenes) <= set(decode(films / "a.mp4", 16).indices)
    assert frames("distinct-frames", threshold=255.0)[0] == [0, 0]
    # a shorter one is shown as it is
    assert frames("scene-frames", "short.mp4") == [[0, 1, 2, 3]]


def test_frames_that_a_question_chooses(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As part of the recipe or as the frame method; every question has its own, so the video is read for each."""
    from mmaccel.frames.query import QueryFrames

    asked: list[str] = []

    def pick(self: QueryFrames, frames: Any, count: int) -> Any:
        asked.append(self.query)
        return torch.arange(count).numpy()

    monkeypatch.setattr(QueryFrames, "pick", pick)
    questions = ask(films, ("a.mp4",))
    one = answerer("qwen2_5_vl", "none", 8, frame_method="query-frames", frames=2)
    assert len(answers(one, questions)) == 3 and asked == list(ASKED) and one.figures.prefills == 3
    asked.clear()
    one = answerer("qwen2_5_vl", recipe("query-frames").override(retain=0.5), 8)
    assert len(answers(one, questions)) == 3 and sorted(set(asked)) == sorted(ASKED) and one.figures.prefills == 3


def test_recipes_on_frames_are_applied(films: Path) -> None:
    small, full = answerer("qwen2_5_vl", recipe("resize").override(retain=0.25)), answerer("qwen2_5_vl", "none")
    for one in (small, full):
        assert len(answers(one, ask(films, ("high.mp4",)))) == 3
    assert small.figures.visual_tokens < full.figures.visual_tokens


# --- the library ------------------------------------------------------------------------------------------------------
def test_answer_videos(films: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"video": str(films / "a.mp4"), "question": "what?", "id": "1"}) + "\nx\n"
    )
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    options = {"recipe": "divprune", "retain": 0.5, "frames": FRAMES, "max_new_tokens": LONGEST}
    records = list(mmaccel.answer_videos(tmp_path / "q.jsonl", model, processor, **options))
    assert "line 2" in records[0]["error"] and records[1]["id"] == "1" and records[1]["answer"]
    assert not mmaccel.is_accelerated(model)
    asked = [{"video": str(films / "a.mp4"), "question": "what?"}]
    (one,) = answer_videos(asked, model, processor, **options)
    assert one["answer"] == records[1]["answer"]
    with pytest.raises(MmaccelError, match="no recipe"):
        answer_videos(asked, model, processor, recipe="nope")


def test_settings_and_figures_travel(films: Path) -> None:
    settings = QASettings("tiny", recipe("holitom"), frame_options={"threshold": 1.0}, frame_method="distinct-frames")
    assert pickle.loads(pickle.dumps(settings)).identity() == settings.identity()
    one = answerer("qwen2_5_vl", "divprune", 4)
    half, other = answerer("qwen2_5_vl", "divprune", 4), answerer("qwen2_5_vl", "divprune", 4)
    one.answer([*ask(films, ("a.mp4",)), *ask(films, ("pictures",))])
    half.answer(ask(films, ("a.mp4",)))
    other.answer(ask(films, ("pictures",)))
    total = Figures()
    for part in (half, other):
        total += pickle.loads(pickle.dumps(part.figures))
    for name in ("questions", "videos", "prefills", "visual_tokens", "visual_tokens_kept"):
        assert getattr(total, name) == getattr(one.figures, name) > 0
    assert total.backends == one.figures.backends and {"decord", "pyav"} & set(total.backends)
    assert set(total.seconds) >= {"waiting", "processor", "model", "encoder", "prefill", "decode"}
    # what was kept of every question's tokens, three a video
    assert one.figures.visual_tokens % 3 == 0 and one.figures.visual_tokens_kept < one.figures.visual_tokens / 2


def test_what_a_run_must_share_to_be_mixed(tmp_path: Path) -> None:
    base = QASettings("tiny", recipe("balanced")).identity()
    for other in (
        {"frames": 8},
        {"recipe": recipe("none")},
        {"max_new_tokens": 5},
        {"frame_method": "keyframes"},
        {"dtype": "bfloat16"},
    ):
        assert QASettings(**{"model": "tiny", "recipe": recipe("balanced"), **other}).identity() != base
    assert QASettings("tiny", recipe("balanced"), batch_size=3, timeout=3.0, device="cpu").identity() == base
    for name in ("one", "two"):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "model.safetensors").write_bytes(b"weights")
    first = QASettings(str(tmp_path / "one" / "m"), recipe("none")).identity()
    assert QASettings(str(tmp_path / "two" / "m"), recipe("none")).identity() == first
    (tmp_path / "two" / "m" / "model.safetensors").write_bytes(b"others!")
    assert QASettings(str(tmp_path / "two" / "m"), recipe("none")).identity() != first


def test_videos_are_decoded_ahead(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model answers the first, the next are decoded."""
    begun, several = [], threading.Event()

    decode_isolated = ahead.decode_isolated

    def watched(path: Any, *args: Any) -> Any:
        begun.append(path)
        if len(begun) > 3:
            several.set()
        return decode_isolated(path, *args)

    monkeypatch.setattr(ahead, "decode_isolated", watched)
    one = answerer("qwen2_5_vl", "fastv", 1)
    generate = one._generate

    def waits(*args: Any) -> Any:
        assert several.wait(20), "nothing is decoded while the model works"
        return generate(*args)

    monkeypatch.setattr(one, "_generate", waits)
    assert len(list(one.run(ask(films, asked=ASKED[:1])))) == len(GOOD)


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.model("qwen2_5_vl").save_pretrained(folder)
    zoo.processor("qwen2_5_vl").save_pretrained(folder)
    return folder


def questions_file(path: Path, videos: list[Path], asked: tuple[str, ...] = ASKED[:2]) -> Path:
    lines = [{"video": str(video), "question": words} for video in videos for words in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(questions: Path, out: Path, model: Path, *more: object) -> list[str]:
    base = ("--model", model, "--frames", FRAMES, "--max-new-tokens", LONGEST, *more)
    return ["video-qa", str(questions), "-o", str(out), *map(str, base)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The records, each once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return found


def test_the_command(films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    videos = [films / "a.mp4", tmp_path / "later.mp4", films / "high.mp4"]
    questions, out, told = questions_file(tmp_path / "q.jsonl", videos), tmp_path / "a.jsonl", tmp_path / "s.json"
    with questions.open("a") as file:
        film_ = str(films / "pictures")
        file.write(json.dumps({"video": film_, "question": "which?", "choices": ["x", "y"], "answer": "x"}) + "\n")
    argv = command(questions, out, model, "--summary", told)
    assert main(argv) == 3
    text, said = capsys.readouterr()
    assert said.count("later.mp4") == 2 and "Traceback" not in said
    assert "model at work" in text and "waiting for frames" in text and "accuracy" in text
    first = lines(out)
    assert len(first) == 7 and sum("error" in one for one in first) == 2
    report = json.loads(told.read_text())
    assert (report["questions"], report["failed"], report["answered_now"], report["judged"]) == (7, 2, 5, 1)
    assert report["prefills"] == 3 and report["visual_tokens_kept"] < report["visual_tokens"] / 3
    assert 0 < report["model_share"] < 1 and 0 < report["waiting_share"] < 1 and report["kv_bytes"] > 0
    # the missing video has come: its questions are asked, and no others
    film(tmp_path / "later.mp4", 30)
    assert main([*argv, "--json"]) == 0
    text, said = capsys.readouterr()
    report = json.loads(text)
    assert (report["taken_over"], report["answered_now"], report["failed"]) == (5, 2, 0) and "5 of 7" in said
    assert [one for one in lines(out) if "later" not in one["video"]] == [one for one in first if "error" not in one]
    # nothing is left: the model is not even loaded
    content = out.read_bytes()
    assert main(argv) == 0 and out.read_bytes() == content
    capsys.readouterr()
    assert main([*argv, "--retain", "0.5"]) == 2
    assert "different settings (recipe)" in capsys.readouterr().err


def test_strict_stops_at_the_first(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "text.mp4", films / "bare", films / "a.mp4"])
    assert main(command(questions, tmp_path / "a.jsonl", model, "--strict")) == 2
    assert "text.mp4" in capsys.readouterr().err
    (only,) = lines(tmp_path / "a.jsonl")
    assert "text.mp4" in only["error"]


def test_an_interrupt_says_where_things_stand(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4", films / "nope.mp4", films / "high.mp4"])
    argv = command(questions, tmp_path / "a.jsonl", model, "--batch-size", 2)
    run = VideoAnswerer.run

    def broken(self: VideoAnswerer, *args: Any) -> Any:
        for number, one in enumerate(run(self, *args), 1):
            yield one
            if number == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VideoAnswerer, "run", broken)
        assert main(argv) == 130
    said = capsys.readouterr().err
    assert "3 of 6" in said and "goes on" in said and len(lines(tmp_path / "a.jsonl")) == 3
    assert main(argv) == 3 and len(lines(tmp_path / "a.jsonl")) == 6


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--frames", "0"], "frames=0"),
        (["--batch-size", "0"], "batch_size=0"),
        (["--memory-limit", "0"], "--memory-limit"),
        (["--memory-limit", "nan"], "--memory-limit"),
        (["--time-limit", "-1"], "timeout=-1"),
        (["--frame-method", "nope"], "no frame method 'nope'"),
        (["--recipe", "nope"], "no recipe 'nope'"),
        (["--set", "nothing=1"], "'nothing'"),
        (["--frame-method", "distinct-frames", "--set", "threshold=300.0"], "threshold=300.0"),
        (["--summary", "/none/of/these/s.json"], "does not exist"),
        (["--model", "./none"], "no folder './none'"),
    ],
)
def test_options_that_the_command_refuses(
    more: list[str], said: str, films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    assert main(command(questions, tmp_path / "a.jsonl", model, *more)) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_summary_overwrites_nothing(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    content = questions.read_bytes()
    (tmp_path / "a.jsonl").touch()
    for told in (questions, tmp_path / "a.jsonl", tmp_path):
        assert main(command(questions, tmp_path / "a.jsonl", model, "--summary", told)) == 2
        assert "give another file" in capsys.readouterr().err
    assert questions.read_bytes() == content and not (tmp_path / "a.jsonl").read_bytes()


def test_questions_and_answers_are_two_files(
    films: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = questions_file(tmp_path / "q.jsonl", [films / "a.mp4"])
    content = questions.read_bytes()
    assert main(command(questions, questions, model)) == 2 and questions.read_bytes() == content
    assert main(command(tmp_path / "none.jsonl", tmp_path / "a.jsonl", model)) == 2
    assert "Cannot read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["video-qa", "--help"])
    assert left.value.code == 0 and "clips/dog.mp4" in capsys.readouterr().out


# --- whatever stops it ------------------------------------------------------------------------------------------------
def start(argv: list[str]) -> int:
    """The command in a process of its own, which has imported everything already; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = main(argv)
    finally:
        os._exit(status)


def count(path: Path) -> int:
    """Whole lines of a file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


INTERRUPTED = """
import signal, sys
from mmaccel.cli import main
from mmaccel.video import isolated
signal.signal(signal.SIGINT, signal.default_int_handler)
isolated._START = isolated._START.replace("serve()", sys.argv[1] + "; serve()")
sys.exit(main(sys.argv[2:]))
"""
HANGS = (
    "import time; from mmaccel.video import isolated; real = isolated.decode_here; "
    "isolated.decode_here = lambda path, *a, **k: time.sleep(1000) if 'hang' in path else real(path, *a, **k)"
)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_an_interrupt_does_not_wait_for_decoders_that_hang(films: Path, model: Path, tmp_path: Path) -> None:
    videos = [films / "a.mp4", films / "high.mp4", *(tmp_path / f"hang{i}.mp4" for i in range(4))]
    questions, out = questions_file(tmp_path / "q.jsonl", videos, ASKED[:1]), tmp_path / "a.jsonl"
    argv = command(questions, out, model, "--batch-size", 1, "--time-limit", 60)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, HANGS, *argv], stderr=subprocess.PIPE, text=True) as run:
        begin = time.monotonic()
        while count(out) < 2:
            assert run.poll() is None and time.monotonic() - begin < 120
            time.sleep(0.05)
        time.sleep(1)  # the next are waited for
        run.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert run.stderr is not None
        said = next(one for one in run.stderr if one.startswith("Stopped"))
        assert time.monotonic() - begin < 2
        # Python takes the libraries down, which a busy machine needs seconds for; no decoder is waited for
        rest = run.stderr.read()
        assert run.wait() == 130 and time.monotonic() - begin < 30 and "Traceback" not in rest
    assert "2 of 6 answers are in" in said
    assert {one["video"] for one in lines(out)} == {str(video) for video in videos[:2]}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a run is killed in a forked process")
@pytest.mark.parametrize("which", ("divprune", "fastv"))
def test_killed_ten_times_it_is_as_if_it_never_was(which: str, films: Path, model: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments; the same set of records as in an undisturbed run."""
    videos = []
    for number in range(20):
        videos.append(tmp_path / f"{number}.mp4")
        film(videos[-1], 8 + number % 5)
    videos[3:3] = [films / "text.mp4", films / "nope.mp4"]
    questions = questions_file(tmp_path / "q.jsonl", videos, (*ASKED, "who?"))
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    more = ("--recipe", which, "--batch-size", 4)
    assert os.waitstatus_to_exitcode(os.waitpid(start(command(questions, whole, model, *more)), 0)[1]) == 3
    dice, kills, left = random.Random(which), 0, []
    while kills < 10:
        # at any moment from its start on, or just after a number of new lines
        child, begin, still = start(command(questions, out, model, *more)), count(out), dice.random() < 0.3
        wanted = 0 if still else begin + dice.randint(0, 5)
        while count(out) < wanted:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it came to its end before it was killed ten times"
            time.sleep(0.002)
        time.sleep(dice.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        kills += 1
        left.append(count(out))
        if dice.random() < 0.5 and out.exists():
            # as if it had been killed while it wrote
            with out.open("ab") as file:
                file.write(b'{"id": "torn')
    assert max(left) > 10
    assert os.waitstatus_to_exitcode(os.waitpid(start(command(questions, out, model, *more)), 0)[1]) == 3
    assert sorted(map(json.dumps, lines(out))) == sorted(map(json.dumps, lines(whole)))
    assert len(lines(out)) == 88


@pytest.mark.slow
def test_whatever_is_called_a_video(
    films: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cut off at every 5 %, flipped bits, zeros, text, folders: one record each, and nobody waits or falls over."""
    dice, videos = random.Random(0), []
    for name, options in {"a.mp4": {}, "b.webm": {"codec": "libvpx", "options": {"cpu-used": "8"}}}.items():
        whole = film(tmp_path / name, 24, **options).read_bytes()
        broken = {f"cut{percent}": whole[: len(whole) * percent // 100] for percent in range(0, 100, 5)}
        for number in range(12):
            flipped = bytearray(whole)
            for _ in range(1 + number):
                flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            broken[f"flip{number}"] = bytes(flipped)
        for percent in (0, 30, 60, 90):
            at = len(whole) * percent // 100
            broken[f"zero{percent}"] = whole[:at] + bytes(200) + whole[at + 200 :]
        for kind, content in broken.items():
            videos.append(tmp_path / f"{kind}-{name}")
            videos[-1].write_bytes(content)
    videos += [films / "text.mp4", films / "bare", tmp_path / "none.mp4", films / "a.mp4"]
    questions = questions_file(tmp_path / "q.jsonl", videos, ASKED[:1])
    begin = time.monotonic()
    status = main(command(questions, tmp_path / "out.jsonl", model, "--time-limit", 60))
    found = lines(tmp_path / "out.jsonl")
    assert status == 3 and len(found) == len(videos) == 76 and time.monotonic() - begin < 1200
    for one in found:
        assert ("answer" in one) != ("error" in one)
        assert "error" not in one or (
            one["error"].endswith(".") and "\n" not in one["error"] and len(one["error"]) < 400
        )
    assert any(one["video"] == str(films / "a.mp4") and "answer" in one for one in found)
    assert sum("error" in one for one in found) > 30
    assert "Traceback" not in capfd.readouterr().err
