"""DeepSeek-OCR 2: views of a page as queries in an order of reading, the global one last, then a separator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import generate, model
from transformers import AutoConfig, DeepseekOcr2VisionModel

from mmaccel import UnsupportedError, accelerate_vlm, accelerated
from mmaccel.families import described, family_of
from mmaccel.families.tower import EncoderCall

pytestmark = pytest.mark.usefixtures("no_gradients")
NAME = "deepseek_ocr2"
WIDE, SMALL = zoo._family(NAME).sizes


def feed_of(*rows: list[tuple[int, int]]) -> dict[str, Any]:
    """Rows of pictures of these sizes."""
    return dict(zoo.encode(NAME, [([zoo.image(*size, i) for i, size in enumerate(row)], [], "?") for row in rows]))


def layout(feed: dict[str, Any]) -> Any:
    pixels = {key: value for key, value in feed.items() if key in ("pixel_values", "pixel_values_local")}
    ids, given = feed["input_ids"], EncoderCall({**pixels, "num_local_patches": feed["num_local_patches"]})
    return family_of(model(NAME)).layout(ids, feed["attention_mask"].bool(), {"image": given})


def test_views_and_separators() -> None:
    """Two tiles and the whole page, or the whole page alone, whichever comes first."""
    feed = feed_of([SMALL, WIDE], [WIDE])
    assert feed["num_local_patches"].tolist() == [0, 2, 2]
    segments = layout(feed).segments
    assert [(one.row, one.picture, len(one.places)) for one in segments] == [
        *((0, 0, 17), (0, 1, 16), (0, 1, 16), (0, 1, 17)),
        *((1, 2, 16), (1, 2, 16), (1, 2, 17)),
    ]
    # one token of each page has no place in the order, the last
    assert [one.tile.source[-1] < 0 for one in segments] == [len(one.places) == 17 for one in segments]
    assert all(bool((one.tile.cells[:16, 2] == torch.arange(16)).all()) for one in segments)
    # and every query is that of one place in what the tower made
    assert torch.cat([one.tile.source[:16] for one in segments]).tolist() == list(range(7 * 16))
    with accelerated(model(NAME), "random", retain=0.5):
        generate(model(NAME), feed)
        assert model(NAME).mmaccel.stats()["visual_tokens"] == 7 * 16 + 3


def test_pages_without_tiles() -> None:
    feed = feed_of([SMALL], [SMALL, SMALL])
    assert "pixel_values_local" not in feed
    assert [one.picture for one in layout(feed).segments] == [0, 1, 2]
    with accelerated(model(NAME), "random", retain=0.5):
        generate(model(NAME), feed)
        stats = model(NAME).mmaccel.stats()
    assert stats["visual_tokens"] == 3 * 17


@pytest.mark.parametrize(("side", "tokens"), ((768, 144), (1024, 256)))
def test_queries_of_the_real_tower(side: int, tokens: int) -> None:
    sizes = {"hidden_size": 896, "num_hidden_layers": 1, "num_attention_heads": 14, "num_key_value_heads": 2}
    towers = {"sam_config": {"global_attn_indexes": [2, 5, 8, 11]}, "encoder_config": sizes}
    config = AutoConfig.for_model(NAME, vision_config=towers)
    family = described(config)
    with torch.device("meta"):
        tower = DeepseekOcr2VisionModel(config.vision_config)
        view = torch.empty(1, 3, side, side)
        assert tower(view).last_hidden_state.shape[1] == tokens
    assert family.queries(view) == tokens  # type: ignore[attr-defined]


def test_queries_are_no_patches() -> None:
    tiny = model(NAME)
    for method in ("tome", "attention-received"):
        with pytest.raises(UnsupportedError, match="reads a picture into queries, which are no places of it"):
            accelerate_vlm(tiny, method)
