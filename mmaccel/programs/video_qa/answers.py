"""A file of answers that outlives whatever stops the run that writes it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.files import AppendFile, write_whole, writing
from ...errors import MmaccelError
from ..identity import question_identity
from ..resume import check_settings
from .questions import VideoQuestion

Record = dict[str, Any]


class AnswerFile(AppendFile):
    """A JSONL file that only grows: one record a line, each on the disk before the next is begun.

    When it is opened again, however the last run ended, an incomplete line is dropped, and ``done`` holds the answers by
    question. Dropped are also records with an ``error`` or without an ``answer``, so that their questions are asked again, and
    of two records of one name the second. The settings are in a file next to it, ``NAME.run.json``; a run with other settings,
    or with an unknown one (None), is refused. One process writes at a time.

    Raises MmaccelError if the folder does not exist, the file holds something else or answers of a run with other
    settings, or another run writes to it.

    path : of the file; its folder must exist.
    settings : everything that answers depend on, as plain data.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        # a link goes on pointing to the file, which is written anew where errors are dropped
        where = Path(os.path.realpath(path))
        self._settings_file = where.with_name(where.name + ".run.json")
        self.done: dict[str, Record] = {}
        #: digests of the content of questions, by name
        self._content: dict[str, str] = {}
        if not where.absolute().parent.is_dir():
            raise MmaccelError(f"The folder {str(where.absolute().parent)!r} does not exist; make it first.")
        super().__init__(where, "give another file")
        try:
            with writing(self.path, "give another file"):
                self._resume(json.loads(json.dumps(dict(settings))))
        except BaseException:
            self.close()
            raise

    def _resume(self, settings: Record) -> None:
        with open(self.path, "rb") as file:
            held = file.read()
        if not held:
            write_whole(self._settings_file, json.dumps({"settings": settings}, indent=1).encode() + b"\n")
            return
        try:
            before = dict(json.loads(self._settings_file.read_text(encoding="utf-8"))["settings"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise MmaccelError(
                f"{str(self.path)!r} exists without {self._settings_file.name!r}, which holds its settings; give another file."
            ) from error
        self._compare(before, settings)
        end, left = 0, []
        for line in held.splitlines(keepends=True):
            record = _record(line)
            if record is None:
                if end + len(line) < len(held):
                    raise MmaccelError(
                        f"{str(self.path)!r} has a line that is no answer ({line[:40]!r}); mend it, or give another file."
                    )
                break
            end += len(line)
            if "error" not in record and isinstance(record.get("answer"), str) and record["id"] not in self.done:
                self.done[record["id"]] = record
                left.append(line)
        if sum(map(len, left)) < end:
            write_whole(self.path, b"".join(left))
            self.reopen()
        else:
            self.cut(end)

    def _compare(self, before: Record, settings: Record) -> None:
        """Raise MmaccelError if answers must not be mixed with those of a run with the settings ``before``."""
        if "mmaccel" in settings and "mmaccel" not in before:
            raise MmaccelError(
                f"{str(self.path)!r} is of an earlier mmaccel, which knew less of what answers depend on and named questions "
                "by their lines; give another file, or delete this one."
            )
        # a setting that is not known (None) may differ
        known = {key: object() if value is None else value for key, value in settings.items()}
        check_settings(self.path, before, known, "give another file, or delete this one")

    def expect(self, questions: Iterable[VideoQuestion]) -> list[str]:
        """Note the digests of questions, and drop answers to other content, such as of a video that changed; returns the names
        of the questions whose answers were dropped. Raises MmaccelError if the file answers another question under the name of
        one, or cannot be written."""
        asked = [one for one in questions if not one.error]
        self.left(asked)
        self._content = {one.name: question_identity(one)[:16] for one in asked}
        changed = [
            name
            for name, content in self._content.items()
            if name in self.done and self.done[name].get("content") != content
        ]
        if changed:
            left = {name: record for name, record in self.done.items() if name not in changed}
            with writing(self.path, "give another file"):
                write_whole(self.path, b"".join(map(_line, left.values())))
            self.reopen()
            self.done = left
        return changed

    def left(self, questions: Iterable[VideoQuestion]) -> list[VideoQuestion]:
        """The questions that have no answer yet. Raises MmaccelError if the file answers another question under the name of
        one."""
        waiting = []
        for one in questions:
            record = self.done.get(one.name)
            if record is None:
                waiting.append(one)
            elif any(record.get(key) != value for key, value in one.about().items()):
                raise MmaccelError(
                    f"{str(self.path)!r} answers another question under the id {one.name!r}; give another file."
                )
        return waiting

    def write(self, record: Record) -> None:
        """Append one record; when this returns, it is on the disk. A name that is done is not written twice."""
        if record["id"] in self.done:
            return
        if record["id"] in self._content and "error" not in record:
            record = {**record, "content": self._content[record["id"]]}
        self.append(_line(record))
        self.done[record["id"]] = record


#: columns of a CSV of answers
_COLUMNS = ("id", "video", "question", "choices", "expected", "answer", "choice", "right", "error", "content")


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write records as CSV in UTF-8 with a line of names, whole or not at all; ``choices`` is a JSON list. Raises OSError."""
    text = io.StringIO()
    rows = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    rows.writeheader()
    for record in records:
        listed = {"choices": json.dumps(record["choices"], ensure_ascii=False)} if "choices" in record else {}
        rows.writerow({**record, **listed})
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


def _line(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _record(line: bytes) -> Record | None:
    """A whole line as a record, or None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None
