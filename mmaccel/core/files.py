"""Files that survive a crash: written whole or not at all, and locked against a second process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import MmaccelError

try:
    import fcntl
except ImportError:  # Windows has none; two runs on one file are then not told apart
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, content: bytes | memoryview | Callable[[BinaryIO], object]) -> None:
    """Write a file whole or not at all: into ``NAME.part`` first, which then takes the file's name.

    Parameters
    ----------
    content : the bytes, or a function that writes them into an open file.

    Raises
    ------
    OSError
        If the file cannot be written. What stood there before is left as it was.
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


def take_lock(descriptor: int, path: Path) -> bool:
    """Lock the open file ``descriptor`` for this process until it is closed.

    Returns
    -------
    Whether it is locked now: False where another process holds the lock, or ``path`` names another file by now.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # another run may have replaced the file since it was opened
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@contextlib.contextmanager
def locked(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is made where it is missing, as long as the block runs.

    Parameters
    ----------
    what : what the lock protects, for the message. remedy : what else the user may do than wait, for the message.

    Raises
    ------
    MmaccelError
        If another process holds the lock, or the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise MmaccelError(f"Cannot write {str(path)!r} ({error.strerror}); {remedy}.") from error
    try:
        if not take_lock(descriptor, path):
            raise MmaccelError(f"Another run writes to {what!r}; wait for it, or {remedy}.")
        yield
    finally:
        os.close(descriptor)


__all__ = ["locked", "take_lock", "write_whole"]
