"""Every name of the package shows how it is used, and the examples run."""

from __future__ import annotations

import doctest
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoders.small import VISION
from PIL import Image

import mmaccel
from mmaccel.families.load import load
from mmaccel.media.files import Prompt, encode
from mmaccel.method import ProjectorMethod

SHIPPED = Path(mmaccel.__file__).parent / "models"
#: what says what a text is, and nothing to be shown
PLAIN = ("__version__", "RecipeName")  # a text and a type


@functools.cache
def loaded(name: str) -> tuple[Any, Any]:
    return load(SHIPPED / name, device="cpu")


@functools.cache
def frames() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 56, 56, 3), dtype=np.uint8)


def around(text: str, folder: Path) -> dict[str, Any]:
    """What an example may use without saying where it comes from: what everybody has who uses transformers."""
    found: dict[str, Any] = {name: getattr(mmaccel, name) for name in mmaccel.__all__}
    found |= {name: getattr(mmaccel, name) for name in ("DivPrune", "FastV", "SnapKV")}
    found |= {"folder": folder, "torch": torch, "dataclass": dataclass, "ProjectorMethod": ProjectorMethod}
    if "model" in text:
        model, processor = loaded("mini-llava")
        inputs = encode(processor, [Prompt("what is there?", (Image.fromarray(frames()[0]),))])
        found |= {"model": model, "processor": processor, "inputs": inputs, "image": Image.fromarray(frames()[0])}
    if "video_model" in text:
        found["video_model"], found["video_processor"] = loaded("mini-qwen-vl")
        found["frames"] = frames()
        for number, frame in enumerate(frames()):
            Image.fromarray(frame).save(folder / f"{number}.png")
    if "clip" in text:
        clip = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)).eval()
        found |= {"clip": clip, "pixel_values": torch.rand(1, 3, VISION["image_size"], VISION["image_size"])}
    return found


@pytest.mark.parametrize("name", [name for name in mmaccel.__all__ if name not in PLAIN])
def test_the_example_of(name: str, tmp_path: Path, fresh_registry: None) -> None:
    thing = getattr(mmaccel, name)
    text = thing.__doc__ or ""
    found = doctest.DocTestParser().get_doctest(text, around(text, tmp_path), name, None, 0)
    assert found.examples, f"{name} shows no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    result = runner.run(found, out=said.append, clear_globs=False)
    assert result.attempted and not result.failed, "".join(said)
    for model in (found.globs.get(key) for key in ("model", "video_model", "clip")):
        if model is not None and mmaccel.is_accelerated(model):
            model.mmaccel.remove()
