"""LFM2-VL: tiles of several sizes, padded to one in the tower, between which marks of places stand."""

from __future__ import annotations

import pytest
import torch
import zoo
from laws.helpers import model

from mmaccel.families import family_of
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")
#: tokens (rows, columns) of the wide picture: two tiles and a thumbnail; of the narrow one: itself
WIDE, NARROW = [(4, 4), (4, 4), (3, 7)], [(4, 5)]


@pytest.mark.parametrize("between", ("", "and"))
@pytest.mark.parametrize("marked", [True, False], ids=["marks", "bare"])
def test_marks_of_places_join_tiles(between: str, marked: bool) -> None:
    """What stands between two pictures does not matter; without marks, or without a processor, every tile is a picture."""
    narrow, wide = (zoo.image(*size, seed) for seed, size in enumerate(zoo._family("lfm2_vl").sizes))
    feed = zoo.processor("lfm2_vl")(
        text=[f"<image>{between}<image>?", "<image>"],
        images=[[wide, narrow], [wide]],
        use_image_special_tokens=marked,
        padding=True,
        return_tensors="pt",
    )
    ids, valid, tiny = feed["input_ids"], feed["attention_mask"].bool(), model("lfm2_vl")
    call = EncoderCall({"spatial_shapes": feed["spatial_shapes"]}, int((ids == tiny.config.image_token_id).sum()))
    layout = family_of(tiny, zoo.processor("lfm2_vl")).layout(ids, valid, {"image": call})
    assert [part.tile.grid[1:] for part in layout.segments] == [*WIDE, *NARROW, *WIDE]
    rows = [0] * 4 + [1] * 3
    joined = [0, 0, 0, 1, 2, 2, 2] if marked else list(range(7))
    assert [(part.row, part.picture) for part in layout.segments] == list(zip(rows, joined, strict=True))
    assert torch.equal(layout.visual, ids == tiny.config.image_token_id)
    alone = family_of(tiny).layout(ids, valid, {"image": call})
    assert [part.picture for part in alone.segments] == list(range(7))
