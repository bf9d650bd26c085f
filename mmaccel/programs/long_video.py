"""Long video files in bounded memory: frames are decoded, encoded, reduced and read by the language model group by group."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..errors import MmaccelError
from ..method import FrameChoice, Policy
from ..recipe import Recipe, Stage, get_recipe
from ..video.groups import FrameGroups
from .streaming import VideoSession, evicting


def read_video(
    path: str | os.PathLike[str],
    model: Any,
    recipe: str | Path | Recipe | None = None,
    *,
    processor: Any,
    frames: int | None = None,
    fps: float | None = None,
    isolated: bool = False,
    timeout: float = 120.0,
    memory: int = 4 << 30,
    **session: Any,
) -> VideoSession:
    """Read a video file group by group. Peak memory does not grow with the number of frames: pixels of two groups exist at a
    time, and a layer holds at most ``cap_tokens`` keys a head.

    Parameters
    ----------
    path : a video file or a folder of pictures, see :func:`mmaccel.video.decode`.
    model, recipe, processor, **session : as for :class:`VideoSession` (``cap_tokens``, ``recall``, ...). ``chunk`` is how many
        frames are encoded and read at once: by default the recipe's ``frames_at_once``, or 8.
    frames : how many frames, evenly spaced.
    fps : frames a second, instead of ``frames``; by default 1.
    isolated, timeout, memory : see :func:`mmaccel.video.decode`. ``timeout`` holds for each group, ``memory`` for two.

    Returns
    -------
    A :class:`VideoSession` that has seen the video: :meth:`~VideoSession.ask` it, or :meth:`~VideoSession.generate` with all
    options of ``model.generate``. Push more frames where the video goes on.

    Raises
    ------
    MmaccelError
        If the video cannot be read, an option is not allowed, or the model cannot follow a stream.

    Examples
    --------
    >>> session = read_video(folder, video_model, processor=video_processor, cap_tokens=256)
    >>> answer = session.ask("what is there?", max_new_tokens=2)
    >>> tokens = session.generate("what is there?", max_new_tokens=2, do_sample=True)
    """
    rate = 1.0 if frames is None and fps is None else fps
    groups = FrameGroups(path, frames, fps=rate, memory=memory, isolated=isolated, timeout=timeout)
    return read_groups(groups, model, recipe, processor=processor, **session)


def read_groups(groups: FrameGroups, model: Any, recipe: Any, **session: Any) -> VideoSession:
    """A session that has seen the frames of a video; see :func:`read_video`."""
    at_once = None if recipe is None else get_recipe(recipe).frames_at_once
    chunk = {} if at_once is None else {"chunk": max(2, at_once)}
    reading = VideoSession(model, recipe, **{**chunk, "fps": groups.rate, **session})
    for clip in groups:
        reading.push(clip.frames)
        # the next group is decoded into the room of this one
        del clip
    return reading


def needs_all_frames(recipe: Recipe) -> str | None:
    """The reason why clips cannot be read group by group with a recipe; None where they can."""
    for stage, method in recipe.build():
        if isinstance(method, FrameChoice):
            return f"{stage.method} chooses among all frames"
        if getattr(method, "needs_question", False):
            return f"{stage.method} looks at the question"
        if isinstance(method, Policy) and evicting([method]) is None:
            return f"its policy {stage.method} evicts nothing below a cap"
    try:
        bounded(recipe, 1 << 20).build()
    except MmaccelError as error:
        return str(error).partition(";")[0].rstrip(".")
    return None


def bounded(recipe: Recipe, cap: int) -> Recipe:
    """The recipe with a policy that evicts at ``cap`` keys a head: its own one, or ``infinipot-v`` where it has none."""
    stages = list(recipe.stages)
    at = evicting([stage.build() for stage in stages])
    if at is None:
        at = next((i for i, stage in enumerate(stages) if stage.kind.site == "codec"), len(stages))
        stages.insert(at, Stage("infinipot-v", 1.0))
    stages[at] = dataclasses.replace(stages[at], options={**stages[at].options, "cap": cap})
    return dataclasses.replace(recipe, stages=tuple(stages))


def own_cap(recipe: Recipe) -> int | None:
    """The ``cap`` of a recipe's policy, if it has one."""
    built = [method for _, method in recipe.build()]
    at = evicting(built)
    return None if at is None else built[at].cap or None  # type: ignore[attr-defined]
