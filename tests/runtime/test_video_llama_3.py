"""VideoLLaMA 3: tokens of clips that its processor leaves out of the prompt are not there for methods either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zoo
from laws.helpers import close, generate, logits, model

from mmaccel import accelerated

pytestmark = pytest.mark.usefixtures("no_gradients")
NAME = "video_llama_3"
RECIPES = ("divprune", "tome", "fastv", "attention-received")  # by choice: a site each, and what the tower attends to


def still(frames: int, first: int, seed: int) -> np.ndarray:
    """A clip whose left part stays as it is behind the ``first`` frames."""
    film = zoo.clip(frames, 64, 48, seed)
    film[first:, :, :40] = film[first, :, :40]
    return film


def feed_of(*rows: list[np.ndarray]) -> dict[str, Any]:
    return dict(zoo.encode(NAME, [([], clips, "what is it?") for clips in rows]))


def test_what_is_left_out_has_no_place() -> None:
    feed = feed_of([still(4, 1, 0)], [still(4, 2, 1), still(2, 0, 2)])
    there = feed["video_compression_mask"]
    assert 0 < int(there.sum()) < len(there) == 12 * 10
    tiny = model(NAME)
    with accelerated(tiny, "random", retain=0.5):
        generate(tiny, feed)
        layout, stats = tiny.mmaccel.layout, tiny.mmaccel.stats()
    assert [(one.row, one.picture) for one in layout.segments] == [(0, 0)] * 4 + [(1, 1)] * 4 + [(1, 2)] * 2
    assert torch.equal(torch.cat([one.tile.source for one in layout.segments]), there.nonzero()[:, 0])
    assert [int(one.tile.cells[0, 0]) for one in layout.segments] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert stats["visual_tokens"] == int(there.sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_with_such_clips_are_the_rows_alone(recipe: str) -> None:
    rows = [still(4, 1, 0)], [still(4, 2, 1)]
    tiny = model(NAME)
    with accelerated(tiny, recipe, retain=0.5, processor=zoo.processor(NAME)):
        both = generate(tiny, feed_of(*rows))
        stats = tiny.mmaccel.stats()
        assert stats["stages"][0]["tokens_kept"] < stats["stages"][0]["tokens_in"] == stats["visual_tokens"]
        for number, row in enumerate(rows):
            alone = generate(tiny, feed_of(row))
            close(logits(both)[number], logits(alone)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_keeping_everything_is_the_bare_model(recipe: str) -> None:
    feed, tiny = feed_of([still(4, 1, 0)]), model(NAME)
    bare = logits(generate(tiny, feed))
    with accelerated(tiny, recipe, retain=1.0, processor=zoo.processor(NAME)):
        close(logits(generate(tiny, feed)), bare)
        with torch.no_grad():
            close(tiny(**feed).logits[:, -1], bare[:, 0])
