"""A line of the suite as lmms-eval wants it: what is shown, messages, and whether an answer is right."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mmaccel.media.files import Prompt, load_picture
from mmaccel.suite import is_right
from mmaccel.video import decode

Line = dict[str, Any]


def shown(line: Line) -> list[Image.Image | str]:
    """Its pictures, or the path of its clip."""
    return [line["video"]] if line.get("video") else [load_picture(path) for path in line["images"]]


def messages(line: Line) -> list[dict[str, Any]]:
    """The chat that ``mmaccel eval`` holds about the line, with the pictures in it, or the path of the clip."""
    given = shown(line)
    media = iter(given)
    earlier = tuple((question, answer) for question, answer in line.get("earlier") or ())
    # to the chat it matters only that there is a clip; lmms-eval reads the frames
    clip = decode(line["video"], 1) if line.get("video") else None
    chat = list(Prompt(line["question"], () if clip else tuple(given), clip, earlier).chat().messages)
    for turn in chat:
        turn["content"] = [
            {**part, "url": next(media)} if part["type"] in ("image", "video") else part for part in turn["content"]
        ]
    return chat


def judge(line: Line, results: list[str]) -> dict[str, float]:
    return {"accuracy": float(is_right(results[0], line["answer"]))}
