"""Suite files: one JSONL line an item, pictures as PNG, clips as mp4."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmaccel.errors import no_json
from mmaccel.suite.clip import render_clip
from mmaccel.suite.items import Item


@dataclass(frozen=True)
class Sample:
    """One line of a JSONL set. ``earlier`` holds the questions and answers of the conversation before.

    ``answer`` is None where the set has none; ``name`` is the line's ``id``, else which line it is; ``where`` names file and
    line.
    """

    question: str
    answer: str | None = None
    images: tuple[Path, ...] = ()
    video: Path | None = None
    task: str = ""
    detail: str = ""
    earlier: tuple[tuple[str, str], ...] = field(default=())
    name: str = ""
    where: str = ""


def write_video(frames: np.ndarray, path: Path, fps: float = 4.0) -> None:
    """Write frames, uint8 ``[frames, height, width, 3]`` with even sides, as an H.264 mp4 (needs PyAV)."""
    try:
        import av
    except ImportError as error:
        raise ImportError("writing mp4 files needs PyAV: pip install 'mmaccel[video]'") from error
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps), options={"crf": "12"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def export(items: Iterable[Item], folder: Path, *, pixels: int = 112) -> Path:
    """Write items under ``folder`` and return the path of its ``suite.jsonl``; paths in it are relative to it."""
    media = folder / "media"
    media.mkdir(parents=True, exist_ok=True)
    lines = []
    for item in items:
        line: dict[str, object] = {"id": item.name, "task": item.task}
        if item.clip:
            write_video(render_clip(item.clip, pixels), media / f"{item.name}.mp4", item.clip.fps)
            line["video"] = f"media/{item.name}.mp4"
        else:
            pictures = item.pictures(pixels)
            names = [f"media/{item.name}-{number}.png" for number in range(len(pictures))]
            for name, picture in zip(names, pictures, strict=True):
                Image.fromarray(picture).save(folder / name)
            line["images"] = names
        *earlier, last = item.turns
        line |= {"question": last.question, "answer": last.answer, "detail": last.detail}
        if earlier:
            line["earlier"] = [[turn.question, turn.answer] for turn in earlier]
        lines.append(json.dumps(line))
    path = folder / "suite.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def _sample(line: str, folder: Path) -> Sample:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({no_json(error)})") from error
    if not isinstance(record, dict):
        raise ValueError("a JSON object is needed")
    question = _text(record, "question")
    if not question.strip():
        raise ValueError("the text field 'question' is missing")
    images = record.get("images", record.get("image")) or []
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(path, str) and path for path in images):
        raise ValueError("the field 'images' must be a list of paths")
    video = _text(record, "video")
    if bool(images) == bool(video):
        raise ValueError("either 'image', 'images' or 'video' is needed")
    earlier = record.get("earlier") or []
    if not isinstance(earlier, list) or not all(
        isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn) for turn in earlier
    ):
        raise ValueError("the field 'earlier' must be a list of [question, answer]")
    name = record.get("id", "")
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError("the field 'id' must be text or a whole number")
    sample = Sample(
        question,
        None if record.get("answer") is None else _text(record, "answer"),
        tuple(folder / path for path in images),
        folder / video if video else None,
        _text(record, "task"),
        _text(record, "detail"),
        tuple((question, answer) for question, answer in earlier),
        str(name),
    )
    try:
        turns = [part for turn in sample.earlier for part in turn]
        "".join([question, sample.answer or "", *images, video, sample.task, sample.name, *turns]).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!a} is half a character; write the text in UTF-8") from error
    return sample


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"the field {field!r} must be text")
    return value or ""


def read_samples(path: Path) -> tuple[list[Sample], list[str]]:
    """Read a JSONL set: the samples, and one complaint with its line number for every invalid line, such as the second of two
    lines with one ``id``. Raises OSError if the file cannot be read, ValueError if no line is a sample."""
    samples: list[Sample] = []
    complaints: list[str] = []
    known: dict[str, int] = {}
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            sample = _sample(line.decode(), path.parent)
            if sample.name in known and sample.name:
                raise ValueError(f"the id {sample.name[:80]!r} is that of line {known[sample.name]} already")
            samples.append(replace(sample, where=where))
            known[sample.name] = number
        except UnicodeDecodeError:
            complaints.append(f"{where}: this is no text in UTF-8")
        except ValueError as error:
            complaints.append(f"{where}: {error}")
    if not samples:
        raise ValueError("\n".join([f"{path.name} holds no sample", *complaints]))
    return [replace(one, name=one.name or _line(one.where, known)) for one in samples], complaints


def _line(where: str, known: Container[str]) -> str:
    """Name of a line without an id: ``line 5``, unless another line has that id."""
    name = where.rpartition(", ")[2]
    while name in known:
        name += "'"
    return name
