"""PaddleOCR-VL: patches row by row in one packed sequence, joined by a projector behind the tower."""

from __future__ import annotations

import pytest
import torch
from laws.helpers import inputs, joined, model

from mmaccel.families import family_of
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")
NAME = "paddleocr_vl"


def test_a_token_is_a_block_of_two_rows() -> None:
    """What the model joins to a token depends on the patches that the adapter names, and on no others."""
    tiny, feed = model(NAME), inputs(NAME, "images")
    projector, grids = tiny.model.projector, feed["image_grid_thw"]
    patches = int(grids.prod(1).sum())
    family = family_of(tiny)
    units = family.blocks(EncoderCall({"image_grid_thw": grids}), patches)
    assert torch.equal(units, joined(NAME, grids)) and torch.equal(units.flatten().sort().values, torch.arange(patches))
    features = torch.randn(patches, tiny.config.vision_config.hidden_size, generator=torch.Generator().manual_seed(1))
    bare = projector(features, grids)
    for token in (0, 7, len(units) - 1):
        other = features.clone()
        other[units[token]] += 1.0 + torch.arange(features.shape[1])
        assert ((projector(other, grids) - bare).abs().amax(1) > 0).nonzero().flatten().tolist() == [token]
