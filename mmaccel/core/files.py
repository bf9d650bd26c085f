"""Crash-safe files: written atomically, and locked against other processes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ..errors import MmaccelError

try:
    import fcntl
except ImportError:  # Windows has none; two runs may then write to one file
    fcntl = None  # type: ignore[assignment]


#: remedy where a later run of the same command resumes
RESUME = "correct that, and the same command resumes"


@contextlib.contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into a MmaccelError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise MmaccelError(f"Cannot write {str(path)!r} ({error.strerror or error}); {remedy}.") from error


def write_whole(path: Path, content: bytes | memoryview | Callable[[BinaryIO], object]) -> None:
    """Write a file atomically, through ``NAME.part``.

    content : the bytes, or a function that writes them into an open file.

    Raises OSError if the file cannot be written. What stood there before is left as it was.
    """
    draft = path.with_name(path.name + ".part")
    try:
        with open(draft, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    with contextlib.suppress(OSError):
        # the name, too, is to be on the disk; not every system opens folders
        folder = os.open(path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def take_lock(descriptor: int, path: Path, wait: bool = False) -> bool:
    """Lock the open file ``descriptor`` for this process until it is closed; ``wait`` for another process that holds the lock.

    Returns whether it is locked now: False where another process holds the lock, or ``path`` names another file by now.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # another run may have replaced the file since it was opened
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@contextlib.contextmanager
def locked(path: Path, what: str, remedy: str, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the file ``path`` during the block; creates the file if it is missing.

    what, remedy : what the lock protects, and what else the user may do than wait, for the message.
    wait : wait for another process that holds the lock.

    Raises :class:`MmaccelError` if another process holds the lock and ``wait`` is not set, or the file cannot be opened.
    """
    with writing(path, remedy):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not take_lock(descriptor, path, wait):
            raise MmaccelError(f"Another run writes to {what!r}; wait for it, or {remedy}.")
        yield
    finally:
        os.close(descriptor)


class AppendFile:
    """A file that only grows, one whole piece after the other, and that one process writes at a time.

    Raises :class:`MmaccelError` if another run writes to the file, or it cannot be opened.

    path : of the file, which is made where it is missing.
    remedy : how to take another file, for messages: ``give another file``.
    what : the file that the user knows, if that is another one, for the message that another run writes to it.
    """

    def __init__(self, path: Path, remedy: str, what: Path | None = None) -> None:
        self.path, self._remedy, self._what, self._file = path, remedy, what or path, -1
        self.reopen()

    def reopen(self) -> None:
        """Open and lock what has the file's name now, in place of what was open."""
        self.close()
        try:
            with writing(self.path, self._remedy):
                if self.path.exists() and not self.path.is_file():
                    raise MmaccelError(f"Cannot write {str(self.path)!r} (it is no regular file); {self._remedy}.")
                self._file = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666
                )
            if not take_lock(self._file, self.path):
                raise MmaccelError(f"Another run writes to {str(self._what)!r}; wait for it, or {self._remedy}.")
        except MmaccelError:
            self.close()
            raise

    def cut(self, size: int) -> None:
        """Keep the first ``size`` bytes only. Raises MmaccelError if the file cannot be written."""
        with writing(self.path, RESUME):
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
                os.fsync(self._file)

    def append(self, content: bytes) -> None:
        """Append ``content``; when this returns, all of it is on the disk.

        Raises :class:`MmaccelError` if it cannot be written. None of it is in the file then, or the end of the file is torn.
        """
        end = os.fstat(self._file).st_size
        try:
            with writing(self.path, RESUME):
                written = os.write(self._file, content)
                while written < len(content):
                    # a disk that is almost full takes a part only
                    written += os.write(self._file, content[written:])
                os.fsync(self._file)
        except MmaccelError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def close(self) -> None:
        """Close the file, so that another run may write to it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
