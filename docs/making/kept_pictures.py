"""What every method keeps of a picture and of a clip, drawn by running it on the shipped models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging

import mmaccel
from mmaccel import MmaccelError, Recipe, accelerated, get_recipe
from mmaccel.media import draw
from mmaccel.method.registry import get_method
from mmaccel.suite import make_item

QUESTION = "what colour is the circle ?"
SITES = ("patches", "encoder", "projector", "layers")
RETAIN = 0.25
#: pixels along a picture and along a frame, and between them
LARGE, SMALL, BETWEEN = 224, 112, 6


def within_reach(name: str, depth: int) -> tuple[Recipe, bool]:
    """The recipe, at a quarter if it has a budget, with layers that only deep models have moved to the last of these; and
    whether any was."""
    chosen = get_recipe(name)
    chosen = chosen if chosen.retain is None else chosen.override(retain=RETAIN)
    stages = []
    for stage in chosen.stages:
        layer = getattr(get_method(stage.method)(**stage.options), "layer", 0)
        deep = isinstance(layer, int) and layer > depth - 1
        stages.append(replace(stage, options={**stage.options, "layer": depth - 1}) if deep else stage)
    moved = tuple(stages) != chosen.stages
    return replace(chosen, stages=tuple(stages)), moved


class Shown:
    """A shipped model with one prompt."""

    def __init__(self, name: str, kind: str) -> None:
        logging.disable_progress_bar()
        folder = Path(mmaccel.__file__).parent / "models" / name
        self.name, self.kind = name, kind
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    @cached_property
    def frames(self) -> list[Image.Image]:
        """The picture, or one of every two frames, which make a step of the model's grid."""
        if self.kind == "image":
            return [Image.fromarray(make_item("count", "test", 4).pictures(112)[0]).resize((LARGE, LARGE))]
        return [Image.fromarray(frame).resize((SMALL, SMALL)) for frame in self.clip[::2]]

    @cached_property
    def clip(self) -> np.ndarray:
        """``[16, 112, 112, 3]`` uint8, with a sign that is shown for a moment."""
        return np.asarray(make_item("needle", "test", 0).frames(112))

    @cached_property
    def inputs(self) -> Any:
        """The prompt as the model takes it."""
        content = [{"type": self.kind}, {"type": "text", "text": QUESTION}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        if self.kind == "image":
            return self.processor(text=[text], images=self.frames, return_tensors="pt")
        about = {"do_sample_frames": False}
        return self.processor(text=[text], videos=[self.clip], videos_kwargs=about, return_tensors="pt")

    def drawn(self, name: str) -> tuple[bytes, str] | None:
        """A WebP of what the recipe keeps beside what there is, and what is to be known about it; None where the model lacks
        what the recipe needs, or nothing was dropped."""
        chosen, moved = within_reach(name, len(self.model.model.language_model.layers))
        try:
            with accelerated(self.model, chosen, processor=self.processor), torch.no_grad():
                self.model(**self.inputs)
                segment, reduction = self.model.mmaccel.layout.segments[0], self.model.mmaccel.reduction
        except MmaccelError:
            return None
        if bool(reduction.kept[0, segment.places].all()):
            return None
        rows = [self.frames] if self.kind == "video" else []
        kept = [draw.kept(frame, segment, reduction, frame=t) for t, frame in enumerate(self.frames)]
        rows += [kept] if self.kind == "video" else [self.frames + kept]
        where = ", at the last layer of this model" if moved else ""
        count = f"{int(reduction.kept[0, segment.places].sum())} of {len(segment.places)} tokens"
        return sheet(rows), f"{count}{where}"


def sheet(rows: list[list[Image.Image]]) -> bytes:
    """Rows of equal pictures as a WebP."""
    side = rows[0][0].width
    whole = Image.new("RGB", [len(line) * (side + BETWEEN) - BETWEEN for line in (rows[0], rows)], "white")
    for y, row in enumerate(rows):
        for x, part in enumerate(row):
            whole.paste(part, (x * (side + BETWEEN), y * (side + BETWEEN)))
    file = BytesIO()
    whole.save(file, "webp", quality=70, method=4)
    return file.getvalue()


def pictures(names: list[str]) -> Iterator[tuple[str, str, bytes, str]]:
    """For every recipe that drops or merges before or inside the language model: its name, ``image`` or ``video``, and what
    :meth:`Shown.drawn` returns."""
    # more threads take longer on models as small as these
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for model, kind in (("mini-llava", "image"), ("mini-qwen-vl", "video")):
        shown = Shown(model, kind)
        for name in names:
            if {get_method(stage.method).site for stage in get_recipe(name).stages} & {*SITES} and (
                found := shown.drawn(name)
            ):
                yield name, kind, *found
