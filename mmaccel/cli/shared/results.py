"""Results of ``eval`` and ``compare``: a report that is written whole, and a journal during a run.

The journal ``NAME.journal`` next to the report has a line for every finished batch, so that an interrupted run loses only the
current batch. It is removed when the report is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.files import RESUME, AppendFile, writing
from ...errors import MmaccelError, no_json
from .text import write_json

if TYPE_CHECKING:
    from ...programs.evaluate import Answer, Row

#: changed questions that a message names at most
_NAMED = 3
#: fields of an answer in the report
_REPORTED = ("name", "task", "expected", "full", "answer", "right", "same", "kl")


class Results:
    """Results in a file that no other run can write to.

    Rows of an earlier run are taken over if settings, questions and recipe (:func:`mmaccel.programs.identity.recipe_parts`) are
    the same.

    Raises MmaccelError if the file holds something else or results of other settings, cannot be written, or another run
    writes to it.

    path : of the report; None keeps nothing.
    settings : what all rows depend on. Another run's results are refused.
    questions : label and identity of every question. With others, all rows are run again.
    answers : whether the report holds every answer; rows without them are then run again.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], questions: Iterable[tuple[str, str]], answers: bool
    ) -> None:
        self.path, self.keep_answers = path, answers
        self.settings, self.questions = plain(settings), [list(pair) for pair in questions]
        #: answers for the report, by title of the row
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.left_out: list[str] = []
        #: rows of an earlier run that are not in this run
        self.others: list[dict[str, Any]] = []
        self._lines: list[dict[str, Any]] = []
        #: the journal, and its valid length
        self._journal: AppendFile | None = None
        self._end = 0
        if path is None:
            return
        self.journal = path.with_name(path.name + ".journal")
        self._journal = AppendFile(self.journal, "give another file", path)
        try:
            if not path.exists() or self._read_report(path):
                self._read_journal()
        except BaseException:
            self.close()
            raise

    # --- resuming -------------------------------------------------------------------------
    def _read_report(self, path: Path) -> bool:
        """Read rows from the report; returns False if its questions differ."""
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            before, questions, self.others = dict(report["settings"]), list(report["asked"]), list(report["rows"])
            self.left_out = list(report["left_out"])
            for row in self.others:
                _ = row["title"], dict(row["identity"]), row["figures"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = f" ({no_json(error)})" if isinstance(error, (json.JSONDecodeError, RecursionError)) else ""
            raise MmaccelError(
                f"{str(path)!r} exists and holds no results of this command{why}; give another file, or delete this one."
            ) from error
        self._check(before, path)
        return self._same(questions, path)

    def _read_journal(self) -> None:
        """Read batches from the journal, up to an incomplete line."""
        whole, end = [], 0
        for line in self.journal.read_bytes().splitlines(keepends=True):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                break
            whole.append(record)
            end += len(line)
        try:
            if not whole:
                return
            self._check(dict(whole[0]["settings"]), self.journal)
            if not self._same(list(whole[0]["asked"]), self.journal):
                return
            for record in whole[1:]:
                if "left_out" in record:
                    self.left_out = list(dict.fromkeys((*self.left_out, str(record["left_out"]))))
                else:
                    self._lines.append({key: record[key] for key in ("row", "batch", "answers", "failed")})
        except (KeyError, TypeError) as error:
            raise MmaccelError(
                f"{str(self.journal)!r} is not a journal of this command; delete it to run its questions again."
            ) from error
        self._end = end

    def _check(self, before: Mapping[str, Any], path: Path) -> None:
        from ...programs.resume import check_settings

        check_settings(path, before, self.settings, "give another file, or delete this one")

    def _same(self, before: list[Any], path: Path) -> bool:
        """Whether an earlier run asked the same questions; if not, its results are discarded."""
        if before == self.questions:
            return True
        known = {str(identity) for _, identity in before}
        new = [label for label, identity in self.questions if identity not in known]
        what = f"the questions in {path} differ, or have another order"
        if new:
            what = f"{len(new)} of {len(self.questions)} questions differ from those in {path}"
        named = f" ({'; '.join(new[:_NAMED])}{'; ...' if len(new) > _NAMED else ''})" if new else ""
        print(f"Nothing is taken over: {what}{named}.", file=sys.stderr)
        self.others, self.left_out, self._lines = [], [], []
        return False

    def take_over(self, rows: list[Row]) -> None:
        """Fill rows from an earlier run; prints which ones, and why not the others."""
        from ...programs.evaluate import Answer

        whole: list[str] = []
        part: list[str] = []
        for row in rows:
            earlier = next((old for old in self.others if old["identity"] == row.identity), None)
            if earlier is None:
                self._explain(row)
            elif self.keep_answers and "answers" not in earlier:
                print(f"{row.title} is run again: the file has no answers of it.", file=sys.stderr)
                self.others.remove(earlier)
            else:
                self.others.remove(earlier)
                row.restore(earlier)
                if self.keep_answers:
                    self.answers[row.title] = list(earlier["answers"])
            for line in self._lines:
                if line["row"] == row.identity and line["batch"] == row.batches:
                    answers = [Answer(**{**one, "notes": tuple(one["notes"])}) for one in line["answers"]]
                    row.add(answers, line["failed"])
                    self._keep(row, answers)
            if row.batches:
                done = row.asked + len(self.left_out) >= len(self.questions)
                (whole if done else part).append(row.title if done else f"{row.title} ({row.asked} answers)")
        sentences = []
        if whole:
            sentences.append(f"{len(whole)} of {len(rows)} recipes are taken over from {self.path}: {', '.join(whole)}")
        if part:
            sentences.append(f"begun in {self.path}: {', '.join(part)}")
        if sentences:
            print("; ".join(sentences), file=sys.stderr)

    def _explain(self, row: Row) -> None:
        for old in [one for one in self.others if one["title"] == row.title]:
            parts = {**old["identity"], **row.identity}
            differ = [name for name in parts if old["identity"].get(name) != row.identity.get(name)]
            print(
                f"{row.title} is run again: {', '.join(differ)} differ{'s' * (len(differ) == 1)} from {self.path}.",
                file=sys.stderr,
            )
            self.others.remove(old)

    # --- writing ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Cut the journal after its valid lines."""
        if self._journal is None:
            return
        self._journal.cut(self._end)
        if not self._end:
            self._append({"settings": self.settings, "asked": self.questions})

    def add(self, row: Row, answers: list[Answer], failed: list[dict[str, str]]) -> None:
        """Append a batch that the row contains already; when this returns, it is on the disk."""
        self._keep(row, answers)
        plain_answers = [dataclasses.asdict(one) for one in answers]
        self._append({"row": row.identity, "batch": row.batches - 1, "answers": plain_answers, "failed": failed})

    def leave_out(self, sentence: str) -> None:
        """Append the sentence about a question that is left out for all recipes."""
        if sentence not in self.left_out:
            self.left_out.append(sentence)
            self._append({"left_out": sentence})

    def _keep(self, row: Row, answers: list[Answer]) -> None:
        """Keep answers for the report."""
        if self.keep_answers:
            kept = [{name: getattr(one, name) for name in _REPORTED} for one in answers]
            self.answers.setdefault(row.title, []).extend(kept)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(json.dumps(line).encode() + b"\n")

    def save(self, report: Mapping[str, Any]) -> None:
        """Write the report, whole or not at all, and remove the journal."""
        if self.path is None:
            return
        with writing(self.path, RESUME):
            write_json(self.path, plain(report))
        with contextlib.suppress(OSError):
            self.journal.unlink()

    def close(self) -> None:
        """Release the file; an empty journal is removed."""
        if self._journal is None:
            return
        with contextlib.suppress(OSError):
            if not self.journal.stat().st_size:
                self.journal.unlink()
        self._journal.close()


def plain(data: Any) -> Any:
    """The data after a round trip through JSON."""
    return json.loads(json.dumps(data, default=str))
