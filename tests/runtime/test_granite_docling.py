"""Granite Docling: pages of tiles, two densities of tokens, and features behind several layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import inputs, model

from mmaccel import accelerated

NAME = "granite_docling"
pytestmark = pytest.mark.skipif(NAME not in zoo.FAMILIES, reason="this transformers does not have it")


def pictures(feed: dict[str, Any], processor: Any) -> list[list[tuple[int, int, int]]]:
    """Grids of the tiles of each picture of a prompt."""
    tiny = model(NAME)
    with accelerated(tiny, "divprune", retain=0.5, processor=processor), torch.no_grad():
        tiny(**feed)
        segments = tiny.mmaccel.layout.segments
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(1 + max(s.picture for s in segments))]
    for segment in segments:
        found[segment.picture].append(segment.tile.grid)
    return found


def test_a_page_of_one_tile_does_not_join_the_next() -> None:
    """It has no thumbnail behind it, which ends a page elsewhere."""
    feed = zoo.encode(NAME, [([zoo.image(40, 44, 1), zoo.image(90, 48, 2), zoo.image(44, 44, 3)], [], zoo.QUESTION)])
    assert [len(tiles) for tiles in pictures(dict(feed), zoo.processor(NAME))] == [1, 3, 1]
    assert [len(tiles) for tiles in pictures(dict(feed), None)] == [1] * 5


def test_the_fine_route_has_four_times_as_many_tokens() -> None:
    worker, tiny = zoo.processor(NAME), model(NAME)
    text = "<image>what?"
    fine = dict(worker(images=[[zoo.image(90, 48, 0)]], text=[text], return_tensors="pt", fine_route=True))
    coarse = dict(worker(images=[[zoo.image(90, 48, 0)]], text=[text], return_tensors="pt"))
    assert pictures(coarse, worker) == [[(1, 3, 3)] * 3] and pictures(fine, worker) == [[(1, 6, 6)] * 3]
    with torch.no_grad():
        bare = tiny(**fine).logits
        with accelerated(tiny, "none", processor=worker):
            assert torch.equal(tiny(**fine).logits, bare)


def test_taps_are_the_mean_of_a_block() -> None:
    """Four by four patches a token, or two by two where the processor asked for more."""
    from mmaccel.families import family_of
    from mmaccel.families.tower import EncoderCall

    family, side = family_of(model(NAME)), 12
    values = torch.arange(side * side, dtype=torch.float32).view(1, -1, 1)
    for arguments, block in (({}, 4), ({"tile_fine_mask": torch.tensor([True])}, 2)):
        got = family.to_tokens("image", EncoderCall(arguments), [values])
        by_hand = values.view(side // block, block, side // block, block).mean((1, 3)).flatten()
        torch.testing.assert_close(got[:, 0], by_hand)


def test_a_prompt_of_pictures_and_text() -> None:
    """DeepStack features follow the tokens that are left, at the layers behind which they are added."""
    tiny, feed, seen = model(NAME), inputs(NAME), []
    with accelerated(tiny, "divprune", retain=0.3, processor=zoo.processor(NAME)), torch.no_grad():
        hook = tiny.model.text_model.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True
        )
        tiny(**feed)
        kept = int(tiny.mmaccel.reduction.kept[zoo.visual_mask(NAME, tiny, feed["input_ids"])].sum())
        hook.remove()
    assert int(seen[0]["visual_pos_masks"].sum()) == kept
    assert [len(plane) for plane in seen[0]["deepstack_visual_embeds"]] == [kept] * 3
