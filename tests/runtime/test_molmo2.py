"""Molmo 2: a picture whole and in crops, frames of clips, and language models that normalise behind the attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import inputs, model

from mmaccel import Stage, accelerated

pytestmark = [
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif("molmo2" not in zoo.FAMILIES, reason="this transformers does not have it"),
]


@pytest.mark.parametrize("kind", ("images", "video"))
def test_tiles_and_frames(kind: str) -> None:
    tiny, feed = model("molmo2"), inputs("molmo2", kind)
    with accelerated(tiny, "uniform", retain=0.5, processor=zoo.processor("molmo2")):
        tiny(**feed)
        segments = tiny.mmaccel.layout.segments
    grids = [(part.picture, *part.tile.grid[1:], int(part.tile.cells[0, 0])) for part in segments]
    if kind == "video":
        assert grids == [(0, 3, 3, frame) for frame in range(4)]
    else:
        # two crops side by side, and two one above the other, each behind the whole picture
        assert grids == [(0, 3, 3, 0), (0, 3, 5, 0), (1, 3, 3, 0), (1, 5, 3, 0)]


@pytest.mark.parametrize("words", ({}, {"norm_after": True, "qk_norm_type": "olmo"}), ids=["before", "behind"])
def test_methods_are_shown_what_a_layer_attends_to(words: dict[str, Any]) -> None:
    """Wherever its norm is: what a layer reads of the tokens that are left is what was looked at before they were chosen."""
    tiny, feed, read = zoo.model("molmo2", **words), inputs("molmo2"), []
    tiny.model.language_model.layers[2].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with accelerated(tiny, [Stage("pyramiddrop-step", 0.5, {"layer": 2})]):
        tiny(**feed)
        kept = tiny.mmaccel.reduction.kept[0]
    looked, attended = read
    assert looked.shape[1] == len(kept) > int(kept.sum()) == attended.shape[1]
    assert torch.allclose(looked[:, kept], attended, atol=1e-5)
