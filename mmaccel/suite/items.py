"""Items of the suite: one or two pictures, a document or a clip, questions about them, and the check of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmaccel.suite.clip import CLIP_TASKS, Clip, render_clip
from mmaccel.suite.document import DOCUMENTS, Document, render_document, sample_document
from mmaccel.suite.questions import PICTURE_TASKS, Turn, comparison, read_box
from mmaccel.suite.rng import Rng, item_seed
from mmaccel.suite.scene import Box, Scene, render, sample_scene

IMAGE_TASKS = (*PICTURE_TASKS, "comparison", "turns")
"""Tasks about pictures. ``turns`` asks two questions of different tasks in one conversation; the last one counts."""

VIDEO_TASKS = tuple(CLIP_TASKS)
"""Tasks about clips."""

DOCUMENT_TASKS = tuple(DOCUMENTS)
"""Kinds of documents, each a task with all questions about such a page."""

_STREAMS = {task: number for number, task in enumerate((*IMAGE_TASKS, *VIDEO_TASKS, *DOCUMENT_TASKS))}


@dataclass(frozen=True)
class Item:
    """One item. One of ``scenes``, ``clip`` and ``document`` is filled; the last turn is the one that is judged."""

    name: str
    task: str
    turns: tuple[Turn, ...]
    scenes: tuple[Scene, ...] = ()
    clip: Clip | None = None
    document: Document | None = None

    @property
    def answer(self) -> str:
        """The expected answer to the last question."""
        return self.turns[-1].answer

    def pictures(self, pixels: int = 112) -> list[np.ndarray]:
        """The pictures, uint8 ``[pixels, pixels, 3]`` each; empty for a clip."""
        if self.document:
            return [render_document(self.document, pixels)]
        return [render(scene, pixels) for scene in self.scenes]

    def frames(self, pixels: int = 112) -> np.ndarray | None:
        """The frames of the clip, uint8 ``[frames, pixels, pixels, 3]``, or None for pictures."""
        return render_clip(self.clip, pixels) if self.clip else None


def _balanced(turns: Sequence[Turn], rng: Rng) -> Turn:
    """One of the turns, chosen so that every answer is equally likely and guessing the usual one does not pay."""
    answer = rng.pick(sorted({turn.answer for turn in turns}))
    return rng.pick([turn for turn in turns if turn.answer == answer])


def _throw(task: str, rng: Rng, frames: int) -> tuple[tuple[Turn, ...], tuple[Scene, ...], Clip | None] | None:
    if task in CLIP_TASKS:
        shown = CLIP_TASKS[task](rng, frames)
        return ((rng.pick(shown[1]),), (), shown[0]) if shown else None
    scene = sample_scene(rng)
    if task == "comparison":
        other = sample_scene(rng)
        return (_balanced(comparison(scene, other, rng), rng),), (scene, other), None
    if task == "turns":
        pools = [pool for pool in (make(scene, rng) for make in PICTURE_TASKS.values()) if pool]
        turns = tuple(_balanced(pool, rng) for pool in rng.some(pools, 2))
        return (turns, (scene,), None) if len(turns) == 2 else None
    pool = PICTURE_TASKS[task](scene, rng)
    return ((_balanced(pool, rng),), (scene,), None) if pool else None


def make_item(task: str, split: str, index: int, *, frames: int = 16) -> Item:
    """Item number ``index`` of a task in a split; the same arguments give the same item on every machine.

    Parameters
    ----------
    task : one of :data:`IMAGE_TASKS`, :data:`VIDEO_TASKS` or :data:`DOCUMENT_TASKS`.
    split : ``"train"``, ``"val"`` or ``"test"``; their seeds are disjoint.
    index : number of the item, ``0 <= index < 2**40``.
    frames : length of a clip, an even number of at least 8.
    """
    if task not in _STREAMS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(_STREAMS)}")
    if task in VIDEO_TASKS and (frames < 8 or frames % 2):
        raise ValueError(f"a clip needs an even number of at least 8 frames, not {frames}")
    rng, name = Rng(item_seed(split, index, _STREAMS[task])), f"{split}-{task}-{index:06d}"
    if task in DOCUMENT_TASKS:
        document, asked = sample_document(task, rng)
        return Item(
            name, task, (_balanced([turn for turn in asked if turn.detail == "short"], rng),), document=document
        )
    while (thrown := _throw(task, rng, frames)) is None:
        pass
    turns, scenes, clip = thrown
    return Item(name, task, turns, scenes, clip)


def make_suite(
    split: str = "test",
    tasks: Sequence[str] = IMAGE_TASKS,
    per_task: int = 100,
    *,
    frames: int = 16,
    first: int = 0,
) -> Iterator[Item]:
    """``per_task`` items of every task from number ``first`` on, task by task."""
    for task in tasks:
        for index in range(first, first + per_task):
            yield make_item(task, split, index, frames=frames)


def overlap(box: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = sum((one[2] - one[0]) * (one[3] - one[1]) for one in (box, other))
    return shared / (areas - shared) if areas > shared else 0.0


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer is right: the same words, ignoring case and a final stop; a box needs an overlap of 0.5."""
    box = read_box(expected)
    if box is not None:
        given = read_box(answer)
        return given is not None and overlap(given, box) >= 0.5
    return answer.lower().rstrip(" .").split() == expected.lower().rstrip(" .").split()
