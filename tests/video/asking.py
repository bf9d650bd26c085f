"""Questions about films, what answers them in bulk, and what single calls say."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import zoo

from mmaccel import Recipe, accelerated, get_recipe
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.video_qa.qa import QASettings, VideoAnswerer
from mmaccel.programs.video_qa.questions import VideoQuestion
from mmaccel.video import Clip, decode

FRAMES, LONGEST = 6, 6
FAMILIES = ("qwen2_5_vl", "llava_onevision", "smolvlm")
ASKED = ("what?", "where is it, and why does it stand there?", "what is it?")
GOOD = ("a.mp4", "slow.mp4", "high.mp4", "short.mp4", "one.mp4", "pictures")


def ask(films: Path, videos: tuple[str, ...] = GOOD, asked: tuple[str, ...] = ASKED) -> list[VideoQuestion]:
    return [
        VideoQuestion(f"{video} {i}", video, str(films / video), words)
        for video in videos
        for i, words in enumerate(asked)
    ]


#: built once; whoever works with it leaves it as it was
tiny = functools.cache(zoo.model)


def answerer(
    family: str, which: str | Recipe = "balanced", size: int | str = "auto", say: Any = None, **options: Any
) -> VideoAnswerer:
    made = {"frames": FRAMES, "max_new_tokens": LONGEST, "batch_size": size, **options}
    settings = QASettings("tiny", get_recipe(which), **made)
    return VideoAnswerer(settings, tiny(family), zoo.processor(family), *([say] if say else []))


def answers(one: VideoAnswerer, questions: list[VideoQuestion]) -> dict[str, str]:
    return {record["id"]: record["answer"] for record in one.run(questions)}


def alone(family: str, which: str | Recipe, questions: list[VideoQuestion]) -> dict[str, str]:
    """Every question by a call of ``generate`` of its own; recipe ``none`` on the bare model."""
    ask_alone = single if isinstance(which, str) else single.__wrapped__
    return {one.name: ask_alone(family, which, one) for one in questions}


@functools.cache
def single(family: str, which: str | Recipe, one: VideoQuestion) -> str:
    model, processor = tiny(family), zoo.processor(family)
    clip = decode(one.path, FRAMES)
    if len(clip.frames) == 1:
        clip = Clip(np.repeat(clip.frames, 2, axis=0), [0, 0], clip.total, clip.fps)
    inputs = encode(processor, [Prompt(one.words(), clip=clip)])
    with nullcontext() if which == "none" else accelerated(model, which, processor=processor):
        made = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    text: str = processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def questions_file(path: Path, videos: list[Path], asked: tuple[str, ...] = ASKED[:2]) -> Path:
    lines = [{"video": str(video), "question": words} for video in videos for words in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(questions: Path, out: Path, model: Path, *more: object) -> list[str]:
    base = ("--model", model, "--frames", FRAMES, "--max-new-tokens", LONGEST, *more)
    return ["video-qa", str(questions), "-o", str(out), *map(str, base)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The records, each once."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return found
