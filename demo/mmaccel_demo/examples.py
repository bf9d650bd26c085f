"""Pictures and clips to begin with, made on the spot from the generated suite that the shipped models know."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from mmaccel.suite import make_item, render_clip, write_video

_PIXELS, _FRAMES = 224, 16
#: task and number of the items; the shipped models answer all of them, and some recipes lose the last picture
_PICTURES = (("reading", 3), ("relation", 3), ("count", 5), ("colour", 4))
_CLIPS = (("needle", 2), ("order", 1), ("motion", 2))
#: what can be asked of the shipped models, beside the question
KNOWN = {
    "picture": "This small model knows coloured shapes and the characters on them, and nothing of photographs.",
    "video": "This small model knows clips of coloured shapes and the characters on them, and nothing of films.",
}


@dataclass(frozen=True)
class Example:
    """A file, a question about it, and what is right. ``kind``: ``picture`` or ``video``."""

    kind: str
    path: Path
    question: str
    answer: str


def make(folder: Path) -> list[Example]:
    """Write the files below ``folder``; clips only where PyAV can write them."""
    found = []
    for task, number in _PICTURES:
        item = make_item(task, "test", number)
        path = folder / f"{item.name}.png"
        Image.fromarray(item.pictures(_PIXELS)[0]).save(path)
        found.append(Example("picture", path, item.turns[-1].question, item.answer))
    for task, number in _CLIPS if find_spec("av") else ():
        item = make_item(task, "test", number, frames=_FRAMES)
        path = folder / f"{item.name}.mp4"
        assert item.clip is not None
        write_video(render_clip(item.clip, _PIXELS), path, item.clip.fps)
        found.append(Example("video", path, item.turns[-1].question, item.answer))
    return found
