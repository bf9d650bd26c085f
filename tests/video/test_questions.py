"""Files of questions: lines, choices, records, and the order of videos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import ask

from mmaccel import MmaccelError
from mmaccel.programs.video_qa.questions import VideoQuestion, as_questions, by_video, read_questions

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


def test_what_a_bad_line_says_of_itself_stays_in_its_record(tmp_path: Path) -> None:
    """Whatever is wrong with it; only what is no text, or the name of another, does not."""
    path = tmp_path / "q.jsonl"
    good = {"id": "good", "video": "g.mp4", "question": "?"}
    base = {"id": "mine", "video": "a.mp4", "question": "which?"}
    wrong = [
        {"choices": ["red"]},
        {"choices": ["red", "blue"], "answer": "green"},
        {"choices": 5},
        {"answer": 3},
        {"question": "half \ud83d"},
        {"question": 5},
        {"video": ""},
        {"id": [1]},
        {"id": "good"},
        {"id": 7, "choices": ["red"]},
    ]
    for change in wrong:
        path.write_text(json.dumps(good) + "\n" + json.dumps({**base, **change}) + "\n")
        _, one = read_questions(path)
        record = one.failed(one.error)
        assert one.error.startswith("q.jsonl, line 2: ") and json.dumps(record).encode()
        expected = {**base, **{k: v for k, v in change.items() if k in base}}
        if expected["id"] in ([1], "good"):
            assert record["id"] not in ("mine", "good") and record["id"]
        else:
            assert record["id"] == str(expected["id"])
        assert record["video"] == expected["video"]
        assert record["question"] == ("which?" if "question" not in change else "")
    asked = as_questions([good, {**base, "choices": ["red"]}, VideoQuestion("good", "b", "b", "what?")])
    assert (asked[1].name, asked[1].video, asked[1].question) == ("mine", "a.mp4", "which?")
    assert (asked[2].name, asked[2].video, asked[2].question) == ("good'", "b", "what?")


def test_a_line_that_is_no_text_is_a_fault_of_that_line(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"video": "a.mp4", "question": "?"}\n{"video": "\xff.mp4", "question": "?"}\n')
    good, bad = read_questions(path)
    assert not good.error and bad.error == "q.jsonl, line 2: this is not valid JSON (no text in UTF-8)."


@pytest.mark.parametrize(
    "content",
    ["video,question\na.mp4,what?\n", "[]\n", '{"image": "a.png", "question": "?"}\n', "\x00\x01", '{"video": 5}\n'],
)
def test_a_file_without_any_question_is_refused_with_what_is_expected(content: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(MmaccelError, match=r"holds no valid question .*such as \{.video.: ") as caught:
        read_questions(path)
    assert "q.jsonl, line 1" in str(caught.value) and "\n" not in str(caught.value)


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
