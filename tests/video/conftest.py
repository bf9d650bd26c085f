"""Films and a model that several tests read are made once; and what clips take of the memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zoo
from films import KINDS, film
from PIL import Image

from mmaccel.video import Clip


@pytest.fixture(scope="session")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A film of :data:`films.KINDS` by its name."""
    folder = tmp_path_factory.mktemp("films")

    def made(name: str) -> Path:
        path = folder / name
        return path if path.exists() else film(path, **KINDS[name])

    return made


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of unequal length, size and rate, one of a single frame, broken ones, and a folder of pictures."""
    root = tmp_path_factory.mktemp("qa")
    film(root / "a.mp4", 30)
    film(root / "slow.mp4", 30, fps=1)
    film(root / "high.mp4", 20, size=(64, 96))
    film(root / "short.mp4", 4)
    film(root / "one.mp4", 1)
    (root / "text.mp4").write_text("no film\n")
    (root / "cut.mp4").write_bytes((root / "a.mp4").read_bytes()[:900])
    (root / "bare").mkdir()
    (root / "pictures").mkdir()
    for i, frame in enumerate(zoo.clip(8, 96, 64, 0)):
        Image.fromarray(frame).save(root / "pictures" / f"f{i}.png")
    return root


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on the disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    zoo.model("qwen2_5_vl").save_pretrained(folder)
    zoo.processor("qwen2_5_vl").save_pretrained(folder)
    return folder


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
