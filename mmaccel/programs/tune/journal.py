"""The journal of a search: a file that only grows, from which an interrupted search goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ...core.files import take_lock
from ...errors import MmaccelError
from ..resume import check_settings

_REMEDY = "give another file with --out (out=), or delete it"
#: bytes of a journal at most: of many thousand recipes
_LONGEST = 1 << 30


class Journal:
    """Storage of an Optuna study (a ``BaseJournalBackend``), for one process at a time.

    Every line is a digest and a JSON object. The digest covers the line and all before it, so a file that was mixed up, edited
    or written by another program is told from one that was cut short: of that the last line, which has no end, is dropped. The
    first object holds the settings of the search, each other one an operation of the study.

    Raises MmaccelError if another run writes to the file, it cannot be written, it is no journal or a damaged one, or
    settings differ.

    path : of the file, which is made where it is missing.
    settings : everything that the search depends on, as plain data.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._logs: list[dict[str, Any]] = []
        self._digest = ""
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise MmaccelError(f"Cannot write {str(path)!r} ({error.strerror}); {_REMEDY}.") from error
        try:
            if not path.is_file():
                raise MmaccelError(f"Cannot write {str(path)!r} (it is no regular file); {_REMEDY}.")
            if not take_lock(self._file, path):
                raise MmaccelError(
                    f"Another run writes to {str(path)!r}; wait for it, or give another file with --out (out=)."
                )
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
        os.truncate(self._file, whole)
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
        try:
            written = os.write(self._file, line)
            while written < len(line):
                # a disk that is almost full takes a part only
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except OSError as error:
            raise MmaccelError(
                f"Cannot write {str(self.path)!r} ({error.strerror}); when that is mended, the same command goes on."
            ) from error
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

    # --- for its owner ----------------------------------------------------------------------------------------
    def close(self) -> None:
        """Let another run write to the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
