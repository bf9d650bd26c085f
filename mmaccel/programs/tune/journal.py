"""The journal of a search: a file that only grows, from which an interrupted search resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.files import AppendFile
from ...errors import MmaccelError
from ..resume import check_settings

_REMEDY = "give another file with --out (out=), or delete it"
#: bytes of a journal at most: of many thousand recipes
_LONGEST = 1 << 30


class Journal(AppendFile):
    """Storage of an Optuna study (a ``BaseJournalBackend``), for one process at a time.

    Every line is a digest and a JSON object. The digest covers the line and all before it, so a file that was mixed up, edited
    or written by another program is distinguished from one that was cut short, whose last line, which has no end, is dropped.
    The first object holds the settings of the search, each other one an operation of the study.

    Raises MmaccelError if another run writes to the file, it cannot be written, it is no journal or a damaged one, or
    settings differ.

    path : of the file; created if it is missing.
    settings : everything that the search depends on, as plain data.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._logs: list[dict[str, Any]] = []
        self._digest = ""
        super().__init__(path, "give another file with --out (out=)")
        try:
            self._open(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def _open(self, settings: dict[str, Any]) -> None:
        whole, held = 0, self.path.read_bytes() if self.path.stat().st_size <= _LONGEST else b"?"
        for number, line in enumerate(held.splitlines(keepends=True), 1):
            torn = not line.endswith(b"\n")
            # the first line may be torn, too, and a file of somebody else may have no line that ends
            if torn and (number > 1 or self._line(settings).startswith(line)):
                break
            digest, _, text = line[:-1].partition(b" ")
            if digest.decode("latin-1") != self._next(text):
                what = "is not the journal of a search" if number == 1 else f"is damaged in line {number}"
                raise MmaccelError(f"{str(self.path)!r} {what}; {_REMEDY}.")
            self._digest = digest.decode()
            self._logs.append(json.loads(text))
            whole += len(line)
        self.cut(whole)
        if not self._logs:
            self._append(settings)
        check_settings(self.path, self._logs[0], settings, _REMEDY)

    def _next(self, text: bytes) -> str:
        return hashlib.sha256(self._digest.encode() + text).hexdigest()[:32]

    def _line(self, log: Mapping[str, Any]) -> bytes:
        text = json.dumps(log).encode()
        return self._next(text).encode() + b" " + text + b"\n"

    def _append(self, log: Mapping[str, Any]) -> None:
        line = self._line(log)
        self.append(line)
        digest, _, text = line.partition(b" ")
        self._digest = digest.decode()
        # as it is read back
        self._logs.append(json.loads(text))

    # --- for Optuna -------------------------------------------------------------------------------------------
    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """The operations from this number on."""
        return self._logs[1 + log_number_from :]

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Append operations; when this returns, they are on the disk."""
        for log in logs:
            self._append(log)
