"""A line of the suite as lmms-eval wants it: pictures, messages, and whether an answer is right."""

from __future__ import annotations

from typing import Any

from PIL import Image

from mmaccel.media import Prompt, load_picture
from mmaccel.suite import is_right

Line = dict[str, Any]


def pictures(line: Line) -> list[Image.Image]:
    return [load_picture(path) for path in line["images"]]


def messages(line: Line) -> list[dict[str, Any]]:
    """The chat that ``mmaccel eval`` holds about the line, with the pictures in it."""
    shown = iter(pictures(line))
    earlier = tuple((question, answer) for question, answer in line.get("earlier") or ())
    chat = Prompt(line["question"], tuple(pictures(line)), earlier=earlier).messages()
    for turn in chat:
        turn["content"] = [
            {**part, "url": next(shown)} if part["type"] == "image" else part for part in turn["content"]
        ]
    return chat


def judge(line: Line, results: list[str]) -> dict[str, float]:
    return {"accuracy": float(is_right(results[0], line["answer"]))}
