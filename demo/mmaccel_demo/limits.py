"""What a visitor may send. Whatever is refused is refused in one sentence, before it is read."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.Image import Image as PILImage

from mmaccel import MmaccelError, Recipe, recipes
from mmaccel.media import Clip
from mmaccel.prepare import load_picture
from mmaccel.video import decode

#: bytes of one upload
UPLOAD = 64 << 20
PIXELS = 40_000_000
#: pixels along the longer side of a picture, and of a frame, that the model is shown: some make a token of every 28 x 28
SIDE, FRAME_SIDE = 1536, 640
#: characters
QUESTION, RECIPE = 1000, 20_000
#: frames of a clip that are shown to the model at once, and tokens of an answer
FRAMES, ANSWER = 32, 256
#: frames of a clip that comes as if live, and how many a second of it
STREAMED, STREAM_FPS = 256, 4.0
#: of the decoder: seconds, and bytes of the frames
SECONDS, MEMORY = 60.0, 1 << 30
PICTURES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp"}
CLIPS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")
#: options of methods that name files or models
_NAMES = ("clip", "clip_model")


def question(text: str | None) -> str:
    """The question without the blanks around it.

    Raises
    ------
    MmaccelError
        If there is none, or it is too long.
    """
    asked = (text or "").strip()
    if not asked:
        raise MmaccelError("The question is empty; write what you want to know.")
    if len(asked) > QUESTION:
        raise MmaccelError(f"The question has {len(asked)} characters; at most {QUESTION} are taken.")
    return asked


def picture(path: str | None) -> PILImage:
    """The uploaded picture, upright, RGB, no longer than ``SIDE``.

    Raises
    ------
    MmaccelError
        If there is none, it is no picture of a known kind, broken, or larger than is decoded here.
    """
    if not path:
        raise MmaccelError("There is no picture; upload one, or choose an example.")
    _weigh(path)
    try:
        with Image.open(path, formats=tuple(PICTURES)) as opened:
            width, height = opened.size
    except Image.DecompressionBombError:
        raise MmaccelError(f"The picture is far too large; at most {PIXELS // 10**6} megapixels are taken.") from None
    except OSError:
        raise MmaccelError(
            f"This file is no picture that can be read; upload one of {', '.join(k.lower() for k in PICTURES)}."
        ) from None
    if width * height > PIXELS:
        raise MmaccelError(
            f"The picture has {width * height / 1e6:.0f} megapixels; at most {PIXELS // 10**6} are taken, so make it smaller."
        )
    try:
        found = load_picture(path)
        found.thumbnail((SIDE, SIDE))
        return found
    except MmaccelError:
        # its sentence names the path, which is ours and nobody's business
        raise MmaccelError("The picture is broken and cannot be decoded; upload another.") from None


def clip(path: str | None, frames: int, fps: float | None = None) -> Clip:
    """At most ``frames`` frames of the uploaded clip, decoded in a process that can be killed.

    Raises
    ------
    MmaccelError
        If there is none, it is of an unknown kind, or cannot be decoded.
    """
    if not path:
        raise MmaccelError("There is no clip; upload one, or choose an example.")
    _weigh(path)
    if Path(path).suffix.lower() not in CLIPS:
        raise MmaccelError(f"This file is no clip that can be read; upload one of {', '.join(s[1:] for s in CLIPS)}.")
    try:
        return _smaller(decode(path, frames, fps=fps, isolated=True, timeout=SECONDS, memory=MEMORY))
    except MmaccelError as error:
        said = str(error).replace(repr(str(path)), "").replace(str(path), "").strip()
        raise MmaccelError(f"The clip cannot be decoded; upload another. ({' '.join(said.split())})") from None


def _smaller(clip: Clip) -> Clip:
    height, width = clip.frames.shape[1:3]
    if max(height, width) <= FRAME_SIDE:
        return clip
    size = (max(1, width * FRAME_SIDE // max(height, width)), max(1, height * FRAME_SIDE // max(height, width)))
    frames = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)) for frame in clip.frames]
    return dataclasses.replace(clip, frames=np.stack(frames))


def _weigh(path: str) -> None:
    size = Path(path).stat().st_size
    if size > UPLOAD:
        raise MmaccelError(f"The file has {size >> 20} MiB; at most {UPLOAD >> 20} are taken.")


def recipe(text: str | None, retain: float | None = None) -> Recipe:
    """A recipe by its name, or from JSON; ``retain`` replaces its budget if it has one.

    Raises
    ------
    MmaccelError
        If there is no such recipe, the JSON is not valid, or it names a file or a model.
    """
    text = (text or "").strip()
    if len(text) > RECIPE:
        raise MmaccelError(f"The recipe has {len(text)} characters; at most {RECIPE} are taken.")
    if text.startswith("{"):
        chosen = Recipe.from_json(text)
    elif text in (known := recipes()):
        chosen = known[text]
    else:
        raise MmaccelError(f"There is no recipe {text[:80]!r}; choose one of the list, or write JSON.")
    for stage in chosen.stages:
        for option in _NAMES:
            if stage.options.get(option) is not None:
                raise MmaccelError(
                    f"{stage.method}: {option}= names files and models of this machine, which visitors cannot; leave it out."
                )
    if retain is not None and chosen.primary is not None:
        chosen = chosen.override(retain=retain)
    chosen.build()
    return chosen


def number(value: Any, least: int, most: int, what: str) -> int:
    """A whole number within its limits.

    Raises
    ------
    MmaccelError
        If it is none, or outside.
    """
    whole = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    )
    if not whole or not least <= value <= most:
        raise MmaccelError(f"{what} must be a whole number from {least} to {most}, not {value}.")
    return int(value)
