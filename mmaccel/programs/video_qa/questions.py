"""Questions about videos: reading them from JSONL, prompts, and scoring of answers."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MmaccelError, no_json
from ...media.files import moves
from ...suite import is_right
from ...video.readers.pictures import SUFFIXES

_LETTERS = string.ascii_uppercase
_EXAMPLE = '{"video": "a.mp4", "question": "What happens?"}'
_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:,]|\s*$)")


@dataclass(frozen=True)
class VideoQuestion:
    """One question about one video, as plain data.

    name : id of the question, unique in a set.
    video, path : the video as the set names it, and its path.
    question : the text.
    choices : answers to choose from; the model is asked for the letter of one.
    answer : the right answer if it is known: one of the choices or its letter, or any text.
    error : one sentence that says why the question cannot be asked; everything else may then be empty.
    """

    name: str
    video: str = ""
    path: str = ""
    question: str = ""
    choices: tuple[str, ...] = ()
    answer: str | None = None
    error: str = ""

    def words(self) -> str:
        """The prompt."""
        if not self.choices:
            return self.question
        listed = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=False)]
        return "\n".join([self.question, *listed, "Answer with the letter of one choice only."])

    def chosen(self, answer: str) -> str | None:
        """The letter of the choice that an answer names by its letter or its words; None if it names none or several."""
        text = answer.strip()
        letter = _LETTER.match(text)
        if letter and letter[1].upper() in _LETTERS[: len(self.choices)]:
            return letter[1].upper()
        words = _plain(text)
        exact = [i for i, choice in enumerate(self.choices) if words and _plain(choice) == words]
        named = exact or [i for i, choice in enumerate(self.choices) if f" {_plain(choice)} " in f" {words} "]
        return _LETTERS[named[0]] if len(named) == 1 else None

    def right(self) -> str | None:
        """The letter of the right choice: the choice with the text of the answer, or else the choice with its letter."""
        same = [i for i, choice in enumerate(self.choices) if choice.strip() == (self.answer or "").strip()]
        return _LETTERS[same[0]] if same else self.chosen(self.answer or "")

    def about(self) -> dict[str, Any]:
        """The first fields of its record: ``id``, ``video``, ``question``, and ``choices`` and ``expected`` if known."""
        line: dict[str, Any] = {"id": self.name, "video": self.video, "question": self.question}
        if self.choices:
            line["choices"] = list(self.choices)
        if self.answer is not None:
            line["expected"] = self.answer
        return line

    def record(self, answer: str) -> dict[str, Any]:
        """The record of an answer: also ``answer``, ``choice`` (the letter of the chosen one, or None), and ``right`` if the
        right answer is known."""
        line = {**self.about(), "answer": answer}
        if self.choices:
            line["choice"] = self.chosen(answer)
        if self.answer is not None:
            line["right"] = line["choice"] == self.right() if self.choices else is_right(answer, self.answer)
        return line

    def failed(self, error: str) -> dict[str, Any]:
        """The record of a question without an answer: also ``error``."""
        return {**self.about(), "error": error}


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def read_questions(path: str | os.PathLike[str]) -> list[VideoQuestion]:
    """The questions of a JSONL or CSV file in its order; an invalid line becomes a question with an ``error``.

    A line is an object with ``video`` (a path, absolute or from the folder of the file) and ``question``; ``choices`` (a list
    of 2 to 26 texts), ``answer`` and ``id`` are optional. Without an ``id`` a digest of its content is the name of a question,
    wherever its line is; of several equal ones the second is ``...-2``. A file called ``*.csv`` has these fields as columns,
    ``choices`` as a JSON list; an empty cell is a field that is left out.

    Raises MmaccelError if there is no such file, or no line of it is a question.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise MmaccelError(
            f"Cannot read {str(file)!r} ({error.strerror}); give a JSONL file with lines such as {_EXAMPLE}."
        ) from error
    listed: list[tuple[Any, str | None, str]]
    if file.suffix.lower() == ".csv":
        listed = [(row, None, f"{file.name}, line {number}") for number, row in _csv_rows(file, b"\n".join(lines))]
    else:
        listed = [(line, None, f"{file.name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not listed:
        raise MmaccelError(f"{str(file)!r} holds no question; give a JSONL file with a question a line.")
    questions = _named(listed, str(file.parent))
    if all(one.error for one in questions):
        raise MmaccelError(
            f"{str(file)!r} holds no valid question ({questions[0].error.rstrip('.')}); give a JSONL file with lines such as "
            f"{_EXAMPLE}."
        )
    return questions


def _csv_rows(file: Path, data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Rows of a CSV file with the lines that they end in, as objects like the lines of JSONL."""
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        rows = [(reader.line_num, {name: cell for name, cell in row.items() if name and cell}) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise MmaccelError(f"Cannot read {str(file)!r} ({error}); give a CSV file in UTF-8.") from error
    if not {"video", "question"} <= set(reader.fieldnames or ()):
        raise MmaccelError(f"{str(file)!r} has no columns 'video' and 'question'; name them in its first line.")
    for _, row in rows:
        if "choices" in row:
            try:
                row["choices"] = json.loads(row["choices"])
            except (ValueError, RecursionError):
                row["choices"] = ()  # refused as any other value that is no list
    return rows


def ask_clips(path: str | os.PathLike[str], question: str) -> list[VideoQuestion]:
    """The same question about a clip, or about every clip of a folder, in the order of names.

    Clips of a folder are its video files, its subfolders of pictures, and the clips of its other subfolders; without any, a
    folder of pictures is a clip itself. Names that begin with a dot are left out.

    Raises MmaccelError if there is no clip, or the question is empty.
    """
    top = Path(path)
    if not top.exists():
        raise MmaccelError(f"There is no clip or folder {str(top)!r}; give a video file, or a folder of them.")
    found = _clips(top) if top.is_dir() else [top] if moves(top) else []
    if not found and top.is_dir() and _has_pictures(top):
        found = [top]
    if not found:
        raise MmaccelError(f"{str(top)!r} is no clip and holds none; give a video file, or a folder of them.")
    listed = [
        {"video": str(clip.relative_to(top)) if clip != top else top.name or str(top), "question": question}
        for clip in found
    ]
    asked = _named([(one, None, one["video"]) for one in listed], "")
    if asked[0].error:
        raise MmaccelError(asked[0].error)
    return [dataclasses.replace(one, path=str(clip)) for one, clip in zip(asked, found, strict=True)]


def _clips(folder: Path) -> list[Path]:
    clips: list[Path] = []
    for one in sorted(folder.iterdir()):
        if one.name.startswith("."):
            continue
        if not one.is_dir():
            clips += [one] if moves(one) else []
        elif _has_pictures(one):
            clips.append(one)
        elif not one.is_symlink():
            clips += _clips(one)
    return clips


def _has_pictures(folder: Path) -> bool:
    return any(one.suffix.lower() in SUFFIXES for one in folder.iterdir())


def as_questions(given: str | os.PathLike[str] | Iterable[VideoQuestion | Mapping[str, Any]]) -> list[VideoQuestion]:
    """Questions from a JSONL file, from questions, or from objects like its lines, whose paths are then as they stand. Raises
    MmaccelError if there is none, or the file cannot be read."""
    if isinstance(given, (str, os.PathLike)):
        return read_questions(given)
    listed = [(one, str(number), f"question {number}") for number, one in enumerate(given, 1)]
    if not listed:
        raise MmaccelError("There is no question to ask; the set is empty.")
    return _named(listed, "")


def _named(listed: Iterable[tuple[Any, str | None, str]], folder: str) -> list[VideoQuestion]:
    """Questions from triples: question, object or line; its name without an ``id``, None for a digest; its place in
    messages."""
    questions: list[VideoQuestion] = []
    names: dict[str, str] = {}
    copies: Counter[str] = Counter()

    def after(content: str) -> str:
        """A name by content, numbered where contents are equal."""
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        copies[digest] += 1
        return digest if copies[digest] == 1 else f"{digest}-{copies[digest]}"

    for given, own, where in listed:
        try:
            one = given if isinstance(given, VideoQuestion) else _question(given, own or "", folder)
            if own is None and not one.name:
                one = dataclasses.replace(one, name=after(json.dumps(one.about())))
            if one.name in names:
                raise MmaccelError(f"the id {one.name[:80]!r} is already used by {names[one.name]}")
        except MmaccelError as error:
            kept = _kept(given)
            own = kept.get("id") or own or after(str(given))
            while own in names:
                own += "'"
            one = VideoQuestion(
                own, kept.get("video", ""), question=kept.get("question", ""), error=f"{where}: {error}."
            )
        names[one.name] = where
        questions.append(one)
    return questions


def _kept(given: Any) -> dict[str, str]:
    """``id``, ``video`` and ``question`` of an invalid question, as far as they are texts, for its record."""
    if isinstance(given, VideoQuestion):
        return {"id": given.name, "video": given.video, "question": given.question}
    try:
        given = json.loads(given.decode()) if isinstance(given, bytes) else given
    except (ValueError, RecursionError):
        return {}
    if not isinstance(given, Mapping):
        return {}
    known = {field: given.get(field) for field in ("id", "video", "question")}
    if isinstance(known["id"], int) and not isinstance(known["id"], bool):
        known["id"] = str(known["id"])
    return {
        field: value
        for field, value in known.items()
        if isinstance(value, str) and value == value.encode(errors="ignore").decode()
    }


def _question(given: Any, own: str, folder: str) -> VideoQuestion:
    """A line or object as a question, named ``own`` without an ``id``; errors have no final full stop."""
    try:
        given = json.loads(given.decode()) if isinstance(given, bytes) else given
    except (ValueError, RecursionError) as error:
        raise MmaccelError(f"this is not valid JSON ({no_json(error)})") from error
    if not isinstance(given, Mapping):
        raise MmaccelError(f"a JSON object is needed, such as {_EXAMPLE}")
    for field in ("video", "question"):
        if not isinstance(given.get(field), str) or not given[field].strip():
            raise MmaccelError(f"the text field {field!r} is missing or empty")
    name, choices, answer = given.get("id"), given.get("choices"), given.get("answer")
    if name is not None and (isinstance(name, bool) or not isinstance(name, (str, int)) or name == ""):
        raise MmaccelError("the field 'id' must be text or a whole number")
    if choices is not None and not (
        isinstance(choices, list)
        and 2 <= len(choices) <= len(_LETTERS)
        and all(isinstance(choice, str) and choice.strip() for choice in choices)
        and len({choice.strip().lower() for choice in choices}) == len(choices)
    ):
        raise MmaccelError(f"the field 'choices' must be a list of 2 to {len(_LETTERS)} texts that differ")
    if answer is not None and not isinstance(answer, str):
        raise MmaccelError("the field 'answer' must be text")
    one = VideoQuestion(
        own if name is None else str(name),
        given["video"],
        # an address is refused where it is opened
        given["video"] if "://" in given["video"] else os.path.join(folder, given["video"]),
        given["question"].strip(),
        tuple(choices or ()),
        answer,
    )
    try:
        "".join([one.name, one.video, one.words(), answer or ""]).encode()
    except UnicodeEncodeError as error:
        raise MmaccelError(f"{error.object[error.start]!a} is half a character; encode the text in UTF-8") from error
    if one.choices and answer is not None and one.right() is None:
        raise MmaccelError(f"the answer {answer!r} is not one of the choices")
    return one


def by_video(questions: Iterable[VideoQuestion]) -> list[list[VideoQuestion]]:
    """Questions grouped by video, in the order of first appearance; those with an ``error`` are alone."""
    groups: dict[tuple[str, str], list[VideoQuestion]] = {}
    for one in questions:
        groups.setdefault(("", one.path) if not one.error else (one.name, one.path), []).append(one)
    return list(groups.values())
