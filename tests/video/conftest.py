"""Films that several tests read are made once; and what clips take of the memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from films import KINDS, film

from mmaccel.video import Clip


@pytest.fixture(scope="session")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A film of :data:`films.KINDS` by its name."""
    folder = tmp_path_factory.mktemp("films")

    def made(name: str) -> Path:
        path = folder / name
        return path if path.exists() else film(path, **KINDS[name])

    return made


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that frames of clips take: now, and at the most."""
    found, lock, made = [0, 0], threading.Lock(), Clip.__post_init__

    def add(size: int) -> None:
        with lock:
            found[0] += size
            found[1] = max(found)

    def watched(self: Clip) -> None:
        made(self)
        if isinstance(self.frames, np.ndarray):
            add(self.frames.nbytes)
            weakref.finalize(self.frames, add, -self.frames.nbytes)

    monkeypatch.setattr(Clip, "__post_init__", watched)
    return found
