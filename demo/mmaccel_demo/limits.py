"""Limits of what a visitor may send. Whatever is refused is refused in one sentence, before it is read."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.Image import Image as PILImage

from mmaccel import MmaccelError, Recipe, Stage, get_method, recipes
from mmaccel.media import untrusted
from mmaccel.media.files import Clip

#: bytes of all uploads that are kept
KEPT = 1 << 30
#: pixels along the longer side of a picture, and of a frame, that the model is shown: some make a token of every 28 x 28
SIDE, FRAME_SIDE = 1536, 640
#: characters
QUESTION, RECIPE = 1000, 20_000
#: seconds that a model works for one question
ANSWERED = 120.0
#: stages of a recipe, and entries of an option that is a list
STAGES = 16
#: numbers in options of methods: so many times the default, or so much, whichever is more; at the sites that count keys of a
#: whole context the latter
TIMES, LEAST, CONTEXT = 8, 1024, 1 << 15
#: frames of a clip that are shown to the model at once, and tokens of an answer
FRAMES, ANSWER = 32, 256
#: frames of a clip that comes as if live, and how many a second of it
STREAMED, STREAM_FPS = 256, 4.0
#: half of a pair of surrogates, as a character or escaped in JSON, which no answer can carry back to the page
_HALF = re.compile(
    r"[\ud800-\udfff]|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
#: options of methods that name files or models
_NAMES = ("calibration", "clip", "clip_model", "draft", "selector")


def question(text: str | None) -> str:
    """The question without the blanks around it.

    Raises
    ------
    MmaccelError
        If there is none, or it is too long.
    """
    asked = _text(text, "The question")
    if not asked:
        raise MmaccelError("The question is empty; write what you want to know.")
    if len(asked) > QUESTION:
        raise MmaccelError(f"The question has {len(asked)} characters; at most {QUESTION} are taken.")
    return asked


def _text(text: str | None, what: str) -> str:
    found = (text or "").strip()
    if _HALF.search(found):
        raise MmaccelError(f"{what} has half of a surrogate pair, which is no character; leave it out.")
    return found


def picture(path: str | None) -> PILImage:
    """The uploaded picture, upright, RGB, no longer than ``SIDE``.

    Raises
    ------
    MmaccelError
        If there is none, it is no picture of a known kind, broken, or larger than is decoded here.
    """
    if not path:
        raise MmaccelError("There is no picture; upload one, or choose an example.")
    found = untrusted.picture(path)
    found.thumbnail((SIDE, SIDE))
    return found


def clip(path: str | None, frames: int, fps: float | None = None) -> Clip:
    """At most ``frames`` frames of the uploaded clip, decoded in a process that can be killed.

    Raises
    ------
    MmaccelError
        If there is none, it is of an unknown kind, or cannot be decoded.
    """
    if not path:
        raise MmaccelError("There is no clip; upload one, or choose an example.")
    return _smaller(untrusted.clip(path, frames, fps))


def _smaller(clip: Clip) -> Clip:
    height, width = clip.frames.shape[1:3]
    if max(height, width) <= FRAME_SIDE:
        return clip
    size = (max(1, width * FRAME_SIDE // max(height, width)), max(1, height * FRAME_SIDE // max(height, width)))
    frames = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in clip.frames]
    return dataclasses.replace(clip, frames=np.stack(frames))


def recipe(text: str | None, retain: Any = None) -> Recipe:
    """A recipe by its name, or from JSON; ``retain`` replaces its budget if it has one.

    Raises
    ------
    MmaccelError
        If there is no such recipe, the JSON is not valid, it names a file or a model, or asks for too much work, or ``retain``
        is not a share.
    """
    if retain is not None and (not _is_number(retain) or not 0 < retain <= 1):
        raise MmaccelError(f"The share of the visual tokens must be greater than 0 and at most 1, got {retain}.")
    text = _text(text, "The recipe")
    if len(text) > RECIPE:
        raise MmaccelError(f"The recipe has {len(text)} characters; at most {RECIPE} are taken.")
    if text.startswith("{"):
        chosen = Recipe.from_json(text)
    elif text in (known := recipes()):
        chosen = known[text]
    else:
        raise MmaccelError(f"There is no recipe {text[:80]!r}; choose one of the list, or write JSON.")
    if len(chosen.stages) > STAGES:
        raise MmaccelError(f"The recipe has {len(chosen.stages)} stages; at most {STAGES} are taken.")
    for stage in chosen.stages:
        _bound(stage)
        for option in _NAMES:
            if stage.options.get(option) is not None:
                raise MmaccelError(
                    f"{stage.method}: {option}= names files and models of this machine, which visitors cannot; leave it out."
                )
    if retain is not None and chosen.primary is not None:
        chosen = chosen.override(retain=float(retain))
    chosen.build()
    return chosen


def _bound(stage: Stage) -> None:
    """See that a stage asks for no more work or memory than one of its kind may: every number among its options is within a
    multiple of the default."""
    cls = get_method(stage.method)
    least = CONTEXT if cls.site in ("cache", "codec") else LEAST
    for option, value in {"retain": stage.retain, **stage.options}.items():
        most = max([least, *(TIMES * abs(x) for x in _numbers(getattr(cls, option, None)))])
        if isinstance(value, tuple) and len(value) > STAGES:
            raise MmaccelError(f"{stage.method}: {option}= has {len(value)} entries; at most {STAGES} are taken.")
        for x in _numbers(value):
            # a NaN is not below anything
            if not abs(x) <= most:
                raise MmaccelError(
                    f"{stage.method}: {option}={x:g} is too much for a visitor; at most {most:g} is taken."
                )


def _numbers(value: Any) -> list[float]:
    """The numbers in the value of an option, that of ``pyramid:20`` too."""
    if isinstance(value, tuple):
        return [x for part in value for x in _numbers(part)]
    if isinstance(value, str):
        value = value.partition(":")[2]
    try:
        return [] if value is None or value == "" else [float(value)]
    except (TypeError, ValueError):
        return []
    except OverflowError:
        return [math.inf]


def room(folder: Path, more: int) -> bool:
    """Whether so many bytes more may lie in the folder of the uploads."""
    held = 0
    for path in folder.rglob("*"):
        # Gradio may be removing it
        with contextlib.suppress(OSError):
            held += path.stat().st_size if path.is_file() else 0
    return held + more <= KEPT


def number(value: Any, least: int, most: int, what: str) -> int:
    """A whole number within its limits.

    Raises
    ------
    MmaccelError
        If it is none, or outside.
    """
    if not _is_number(value) or value != int(value) or not least <= value <= most:
        raise MmaccelError(f"{what} must be a whole number from {least} to {most}, not {value}.")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
