"""Tiny image encoders of every kind that is known, whose layers do something."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
import torch
import transformers
from torch import Tensor, nn

from mmaccel import UnsupportedError
from mmaccel.method import EncoderMethod

PATCHES = 36
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def _open_clip(**options: Any) -> nn.Module:
    pytest.importorskip("open_clip", reason="needs open_clip: pip install 'mmaccel[clip]'")
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(48, 8, 32, 4, 4, 2.0, output_dim=16, **options)


def _whole_open_clip() -> nn.Module:
    pytest.importorskip("open_clip", reason="needs open_clip: pip install 'mmaccel[clip]'")
    from open_clip.model import CLIP

    vision = {"image_size": 48, "patch_size": 8, "width": 64, "layers": 4}
    return CLIP(16, vision, {"context_length": 7, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2})


MAKE = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)),
    "clip-projection": lambda: transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    ),
    "clip-whole": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=16)
    ),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION)),
    "siglip-whole": lambda: transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=TEXT)),
    "open_clip": _open_clip,
    "open_clip-scaled": lambda: _open_clip(ls_init_value=0.7),
    "open_clip-normed": lambda: _open_clip(block_type="custom", qk_norm=True),
    "open_clip-whole": _whole_open_clip,
}
ALONE = pytest.mark.parametrize("name", MAKE)
WITH_CLS = [name for name in MAKE if not name.startswith("siglip")]


def make(name: str) -> Any:
    """A tiny encoder whose layers do something: random weights as they come are too small to merge by."""
    torch.manual_seed(3)
    made = MAKE[name]().eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return made


encoder = functools.cache(make)


def pixels(pictures: int = 3, seed: int = 0) -> Tensor:
    """``[N, 3, 48, 48]``."""
    return torch.randn(pictures, 3, 48, 48, generator=torch.Generator().manual_seed(seed))


def features(made: Any, given: Tensor) -> Tensor:
    """What a user of the encoder takes from it."""
    if hasattr(made, "encode_image"):
        return made.encode_image(given)
    if hasattr(made, "get_image_features"):
        out = made.get_image_features(pixel_values=given)
        return out if isinstance(out, Tensor) else out.pooler_output
    if not hasattr(made, "config"):
        return made(given)
    out = made(pixel_values=given)
    return out.image_embeds if hasattr(out, "image_embeds") else out.pooler_output


def methods(name: str) -> list[str]:
    """The registered methods that a tower can have, with a CLS token or without."""
    tower, found = SimpleNamespace(name=name, has_cls=name in WITH_CLS), []
    for method, kind in synthetic.offered(EncoderMethod).items():
        with contextlib.suppress(UnsupportedError):
            kind().check(tower)
            found.append(method)
    return found


METHODS = [(name, method) for name in MAKE for method in methods(name)]
#: every encoder, with the methods in turn
QUICK = [(name, (found := methods(name))[number % len(found)]) for number, name in enumerate(MAKE)]
