"""Files of video sessions: what a session has read is kept on disk, and another process resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import MmaccelError, UnsupportedError
from ..kv.cache import cache_with
from ..media.files import Clip
from .cache_file import fingerprint_of, read_value, write_value

#: attributes that are plain data
_PLAIN = ("fps", "chunk", "_dialogue", "_size", "_frames", "_prefix", "_tail", "_visual")


def session_data(session: Any) -> dict[str, Any]:
    """The content of a :class:`.VideoSession`, as data of :func:`.cache_file.write_value`.

    Raises
    ------
    MmaccelError
        If it has read nothing.
    UnsupportedError
        If it parks frames.
    """
    if session._recall is not None:
        raise UnsupportedError("A session with recall= cannot be saved; leave out recall=, or keep the session.")
    if session._last is None:
        raise MmaccelError(f"There is nothing to save; push at least {session.chunk} frames first.")
    session._state.unpin()
    return {
        "state": session._state,
        "waiting": [torch.from_numpy(frame) for frame in session._waiting],
        "last": (torch.from_numpy(session._last.frames), session._last.indices),
        **{name: getattr(session, name) for name in _PLAIN},
    }


def restore(session: Any, data: dict[str, Any]) -> None:
    """Let a session go on where the session of :func:`session_data` was."""
    frames, indices = data["last"]
    session._cache = cache_with(data["state"])
    session._waiting = [frame.numpy().copy() for frame in data["waiting"]]
    session._last = Clip(frames.numpy().copy(), indices, len(indices), data["fps"])
    vars(session).update({name: data[name] for name in _PLAIN})


def save_session(session: Any, path: Path) -> None:
    """Write a session to a file, see :meth:`.VideoSession.save`."""
    write_value(path, session_data(session), _fingerprint(session))


def load_session(session: Any, path: Path) -> None:
    """Read a file of :func:`save_session`, see :meth:`.VideoSession.load`."""
    if session._recall is not None:
        raise UnsupportedError("A session with recall= cannot be loaded; leave out recall=.")
    restore(session, read_value(path, session.model, _fingerprint(session)))


def _fingerprint(session: Any) -> dict[str, Any]:
    how = session.cap_tokens, session.chunk, session.fps
    return fingerprint_of(session.model, session._recipe, "session", how, processor=session.processor)
