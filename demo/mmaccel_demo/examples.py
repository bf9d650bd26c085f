"""Pictures and clips to begin with, made on the spot from the generated suite that the shipped models know."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from mmaccel.suite import make_item, render_clip, write_video

_PIXELS, _FRAMES = 224, 16
_PICTURES = ("colour", "count", "reading", "existence")
_CLIPS = ("order", "change")


@dataclass(frozen=True)
class Example:
    """A file and a question about it. ``kind``: ``picture`` or ``video``."""

    kind: str
    path: Path
    question: str


def make(folder: Path) -> list[Example]:
    """Write the files below ``folder``; clips only where PyAV can write them."""
    found = []
    for task in _PICTURES:
        item = make_item(task, "test", 1)
        path = folder / f"{item.name}.png"
        Image.fromarray(item.pictures(_PIXELS)[0]).save(path)
        found.append(Example("picture", path, item.turns[-1].question))
    for task in _CLIPS if find_spec("av") else ():
        item = make_item(task, "test", 1, frames=_FRAMES)
        path = folder / f"{item.name}.mp4"
        assert item.clip is not None
        write_video(render_clip(item.clip, _PIXELS), path, item.clip.fps)
        found.append(Example("video", path, item.turns[-1].question))
    return found
