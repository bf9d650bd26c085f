"""Methods that choose frames against the authors' programs; see comparators.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from comparators import Arrays, Params, close
from harness import make
from torch.nn.functional import normalize

from mmaccel.frames import scenetilling as module


def scenetilling(params: Params, arrays: Arrays) -> None:
    """Similarity, depth and boundaries; the program appends the last frame. Features stand in for what CLIP would make."""
    features = arrays["features"]
    length, k = len(features), params["k"]
    frames, seen = np.zeros((length, 1, 1, 3), dtype=np.uint8), dict[str, np.ndarray]()

    def noted(name: str) -> Callable[..., np.ndarray]:
        run = getattr(module, name)

        def call(*args: np.ndarray, **options: float) -> np.ndarray:
            seen[f"{name} of"], seen[name] = args[0], run(*args, **options)
            return seen[name]

        return call

    encoder = SimpleNamespace(load=lambda model: SimpleNamespace(frames=lambda frames: normalize(features).numpy()))
    # the k deepest are those that a budget of one more frame leaves of all
    method = make("scenetilling", clip_model="given by the vector", alpha=params["alpha"] if k is None else -1e6)
    with (
        patch.object(module, "FrameEncoder", encoder),
        patch.object(module, "depths", noted("depths")),
        patch.object(module, "boundaries", noted("boundaries")),
    ):
        method.pick(frames, length - 1 if k is None else k + 1)
        ends = np.append(seen["boundaries"], length - 1)
        chosen = method.pick(frames, len(ends))
    close(torch.from_numpy(seen["depths of"]), arrays["sim"])
    close(torch.from_numpy(seen["depths"]), arrays["depth"])
    assert np.unique(ends).tolist() == arrays["boundaries"].tolist()
    # every scene shows the frame in its middle
    starts = np.append(0, ends[:-1] + 1)
    assert chosen.tolist() == ((starts + ends + 1) // 2).tolist()


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("bigai-nlco/VideoLLaMB", "llava/model/multimodal_projector/self_segment.py:segment"): scenetilling,
}
