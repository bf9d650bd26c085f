"""The suite as files: one JSONL line an item, pictures as PNG, clips as mp4; and the way back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image

from mmaccel.errors import no_json
from mmaccel.suite.clip import render_clip
from mmaccel.suite.items import Item


@dataclass(frozen=True)
class Sample:
    """One line of a JSONL set. ``earlier`` holds the questions and answers of the conversation before.

    ``answer`` is None where the set has none; ``name`` is the line's ``id``, else which line it is.
    """

    question: str
    answer: str | None = None
    images: tuple[Path, ...] = ()
    video: Path | None = None
    task: str = ""
    detail: str = ""
    earlier: tuple[tuple[str, str], ...] = field(default=())
    name: str = ""


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
            names = [f"media/{item.name}-{number}.png" for number in range(len(item.scenes))]
            for name, picture in zip(names, item.pictures(pixels), strict=True):
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
    if not isinstance(record.get("question"), str) or not record["question"].strip():
        raise ValueError("the text field 'question' is missing")
    if not isinstance(record.get("answer"), str | None):
        raise ValueError("the field 'answer' must be text")
    images = record.get("images", record.get("image", []))
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        raise ValueError("the field 'images' must be a list of paths")
    video = record.get("video")
    if not isinstance(video, str | None):
        raise ValueError("the field 'video' must be a path")
    if bool(images) == bool(video):
        raise ValueError("either 'image', 'images' or 'video' is needed")
    return Sample(
        record["question"],
        record.get("answer"),
        tuple(folder / path for path in images),
        folder / video if video else None,
        str(record.get("task", "")),
        str(record.get("detail", "")),
        tuple((str(question), str(answer)) for question, answer in record.get("earlier", ())),
        str(record.get("id", "")),
    )


def read_samples(path: Path) -> tuple[list[Sample], list[str]]:
    """Read a JSONL set: the samples, and one complaint (with its line number) for every line that is none.

    Raises
    ------
    ValueError : when no line is a sample.
    """
    samples, complaints = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            sample = _sample(line, path.parent)
            samples.append(replace(sample, name=sample.name or f"line {number}"))
        except (ValueError, TypeError) as error:
            complaints.append(f"{path.name}, line {number}: {error}")
    if not samples:
        raise ValueError("\n".join([f"{path.name} holds no sample", *complaints]))
    return samples, complaints
