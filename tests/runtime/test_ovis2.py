"""Ovis2: marks of the visual vocabulary between tiles, which say where a picture begins and are never dropped."""

from __future__ import annotations

import pytest
import torch
import zoo
from laws.helpers import generate, inputs, model

from mmaccel import accelerated
from mmaccel.families import family_of
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("between", ("", "and"))
def test_a_mark_begins_a_picture(between: str) -> None:
    """Also where nothing else stands between two of them, and without a processor."""
    wide, narrow = (zoo.image(*size, seed) for seed, size in enumerate(zoo._family("ovis2").sizes))
    feed = zoo.processor("ovis2")(
        text=[f"<image>{between}<image>?", "<image>"],
        images=[[wide, narrow], [wide]],
        padding=True,
        return_tensors="pt",
    )
    ids, valid = feed["input_ids"], feed["attention_mask"].bool()
    layout = family_of(model("ovis2")).layout(ids, valid, {"image": EncoderCall({}, 16 * len(feed["pixel_values"]))})
    # a thumbnail and two tiles, or one tile
    assert [(part.row, part.picture) for part in layout.segments] == [(0, 0)] * 3 + [(0, 1)] + [(1, 2)] * 3
    assert all(part.tile.grid == (1, 4, 4) for part in layout.segments)
    assert torch.equal(layout.visual, ids == model("ovis2").config.image_token_id)


def test_marks_stay() -> None:
    tiny, feed = model("ovis2"), inputs("ovis2", "images")
    marks = torch.isin(feed["input_ids"], torch.tensor(tiny.config.visual_indicator_token_ids))
    # begin, thumbnail, column, end; and begin, the only tile, end
    assert int(marks.sum()) == 4 + 3
    with accelerated(tiny, "random", retain=1):
        generate(tiny, feed)
        kept = tiny.mmaccel.reduction.kept
        assert bool(kept[marks].all()) and tiny.mmaccel.stats()["visual_tokens_kept"] == 2
