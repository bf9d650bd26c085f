"""Frames and text in the space of a CLIP model of open_clip."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize

from ..errors import MmaccelError
from ..method.model_options import content_of

_BATCH = 16


@dataclass(frozen=True)
class FrameEncoder:
    """A CLIP model with what it does to pictures and texts before it reads them; on the GPU if there is one."""

    model: Any
    transform: Any
    tokenizer: Any
    device: torch.device

    @staticmethod
    def load(name: str) -> FrameEncoder:
        """From a folder of an open_clip model, or ``NAME:WEIGHTS`` as open_clip knows it. The last two are kept; a folder whose
        files have changed is loaded anew.

        Raises :class:`MmaccelError` if open_clip is not installed, or the model is none or cannot be read.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _load(name, device, content_of(name))

    @torch.no_grad()
    def frames(self, frames: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """``[T, H, W, 3]`` uint8, or ``T`` pictures of any sizes ``[H, W, 3]`` -> ``[T, d]`` float32 of length one."""
        parts = []
        for start in range(0, len(frames), _BATCH):
            pixels = [self.transform(Image.fromarray(frame)) for frame in frames[start : start + _BATCH]]
            embeddings = self.model.encode_image(torch.stack(pixels).to(self.device))
            parts.append(normalize(embeddings.float(), dim=-1).cpu().numpy())
        return np.concatenate(parts)

    @torch.no_grad()
    def text(self, text: str) -> np.ndarray:
        """``[d]`` float32 of length one; what is longer than the model reads is cut off."""
        embedding = self.model.encode_text(self.tokenizer([text]).to(self.device))
        out: np.ndarray = normalize(embedding.float(), dim=-1)[0].cpu().numpy()
        return out


@functools.lru_cache(maxsize=2)
def _load(name: str, device: torch.device, content: Hashable) -> FrameEncoder:
    """See :meth:`FrameEncoder.load`; ``content`` names what the encoder is loaded from."""
    try:
        import open_clip
    except ImportError as error:
        raise MmaccelError(f"clip_model={name!r} needs open_clip; run: pip install 'mmaccel[clip]'") from error
    if (Path(name) / "open_clip_config.json").is_file():
        model_name, weights = f"local-dir:{name}", None
    else:
        model_name, _, weights = name.partition(":")
    if weights == "":
        raise MmaccelError(
            f"clip_model={name!r} is no folder of an open_clip model; give one, or a model with its weights such as "
            "'ViT-B-32:openai'."
        )
    try:
        model, _, transform = open_clip.create_model_and_transforms(
            model_name, pretrained=weights, require_pretrained=True, device=device
        )
        tokenizer = open_clip.get_tokenizer(model_name)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise MmaccelError(f"The CLIP model {name!r} cannot be loaded: {error}") from error
    return FrameEncoder(model.eval(), transform, tokenizer, device)
