"""Merging inside the towers of language models, and the shipped CLIP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import synthetic
import torch
import zoo
from laws.helpers import inputs, model
from PIL import Image
from torch import Tensor

import mmaccel
from mmaccel import (
    Stage,
    accelerated,
    accelerated_encoder,
    register,
)
from mmaccel.core.reduction import Reduction
from mmaccel.encoders.tome import ToMe
from mmaccel.method import EncoderMethod, EncoderTokens, ProjectorMethod, Tap, TokenBatch
from mmaccel.suite import make_item

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "ovis2", "mistral3"])
def test_the_tower_really_shortens(family: str) -> None:
    """Tokens that enter the last MLP: those that are kept, not the full grid."""
    tiny, widths = model(family), []
    layer = {"llava": 2}.get(family, 3)
    with accelerated(tiny, "tome", retain=0.5, processor=zoo.processor(family)):
        tower = tiny.mmaccel.family.towers()[0]
        block = tiny.mmaccel.family.tower_layers(tower)[layer]
        handle = tiny.mmaccel.family.second_half(block)[1].register_forward_hook(
            lambda module, args, out: widths.append(args[0].numel() // args[0].shape[-1])
        )
        tiny(**inputs(family, "images"))
        handle.remove()
        stage = tiny.mmaccel.stats()["stages"][0]
        others = widths[0] - stage["tokens_kept"] * (1 if family == "llava" else 4)
    # one CLS token a tile comes on top
    assert others == {"llava": 2, "internvl": 4}.get(family, 0)
    assert stage["tokens_kept"] == stage["resolved"] < stage["tokens_in"]


@dataclass(frozen=True)
class Watched(ToMe):
    """ToMe that notes what it is shown."""

    name = "test-watched-tome"
    shown: ClassVar[list[EncoderTokens]] = []

    def match(self, tokens: EncoderTokens, remove: int) -> Tensor:
        self.shown.append(tokens)
        return super().match(tokens, remove)


@dataclass(frozen=True)
class FirstKeys(ProjectorMethod):
    """Keeps everything and notes the keys of the first tower layer, one a language model token."""

    name = "test-first-keys"
    shown: ClassVar[list[TokenBatch]] = []

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("keys", (0,)),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        self.shown.append(tokens)
        return Reduction.identity(tokens.valid)


@pytest.fixture
def watching(fresh_registry: None) -> None:
    register(Watched)
    register(FirstKeys)


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "internvl", "smolvlm"])
def test_what_a_method_is_shown(family: str) -> None:
    """One token a block, with the keys of its patches side by side; sizes, CLS and depth."""
    tiny, feed = model(family), inputs(family)
    block = 1 if family == "llava" else 4
    Watched.shown.clear()
    FirstKeys.shown.clear()
    with accelerated(tiny, [Stage("test-watched-tome", 0.5)], processor=zoo.processor(family)):
        tiny(**feed)
        first, later = Watched.shown[0], Watched.shown[-1]
        stage = tiny.mmaccel.stats()["stages"][0]
    with accelerated(tiny, [Stage("test-first-keys", 1.0)], processor=zoo.processor(family)):
        tiny(**feed)
    seen, cls = FirstKeys.shown[0], int(family in ("llava", "internvl"))
    width = seen.signals["keys"].shape[-1]
    assert first.protected == cls and first.depth == 0.0 and later.depth == {"llava": 0.5}.get(family, 0.75)
    assert (
        first.keys.shape[2] == block * width
        and first.keys.shape[:2].numel() - cls * len(first.keys) == stage["tokens_in"]
    )
    assert bool((first.size == 1).all()) and later.size.shape[1] < first.size.shape[1]
    assert later.size[:, cls:].sum(1).tolist() == [first.size.shape[1] - cls] * len(first.size)
    mean = first.keys[:, cls:].unflatten(2, (block, width)).mean(2).flatten(0, 1)
    torch.testing.assert_close(mean, seen.signals["keys"][:, 0][seen.valid & (seen.cells[..., 0] >= 0)])
    patches = first.keys[:, cls:].unflatten(2, (block, width))
    assert block == 1 or not torch.equal(patches[:, :, 0], patches[:, :, 1])


@pytest.mark.usefixtures("watching")
def test_windows_are_left_alone() -> None:
    """Qwen2.5-VL compares keys only in the layers whose attention sees whole frames, 1 and 3 of the tiny tower."""
    Watched.shown.clear()
    with accelerated(model("qwen2_5_vl"), [Stage("test-watched-tome", 0.5)]):
        model("qwen2_5_vl")(**inputs("qwen2_5_vl"))
    assert [tokens.depth for tokens in Watched.shown] == [0.25, 0.75]


@pytest.mark.full
def test_mini_clip_still_finds_what_a_text_says() -> None:
    """The shipped model of open_clip: colour and shape of a thing in the picture, against other colours."""
    open_clip = pytest.importorskip("open_clip", reason="needs open_clip: pip install 'mmaccel[clip]'")
    folder = f"local-dir:{Path(mmaccel.__file__).parent / 'models' / 'mini-clip'}"
    clip, preprocess = open_clip.create_model_from_pretrained(folder)
    clip, tokenizer, pictures, texts = clip.eval(), open_clip.get_tokenizer(folder), [], []
    for index in range(40):
        item = make_item("grounding", "test", index)
        name = item.turns[0].question.removeprefix("where is the ").removesuffix(" ?")
        colour, shape = name.split()
        there = {thing.name for thing in item.scenes[0].things}
        others = {f"{other} {shape}" for other in ("red", "green", "blue", "yellow") if other != colour} - there
        pictures.append(preprocess(Image.fromarray(item.pictures(112)[0])))
        texts.append(clip.encode_text(tokenizer([f"a {name}", *(f"a {other}" for other in sorted(others))])))

    def found() -> tuple[Tensor, float]:
        seen = clip.encode_image(torch.stack(pictures), normalize=True)
        return seen, sum(int((x @ text.T).argmax() == 0) for x, text in zip(seen, texts, strict=True)) / len(texts)

    bare, before = found()
    assert before > 0.6
    for method in synthetic.offered(EncoderMethod):
        with accelerated_encoder(clip, method, retain=0.5):
            seen, after = found()
        assert after >= before - 0.1 and float((seen * bare).sum(-1).mean()) > 0.9, method
