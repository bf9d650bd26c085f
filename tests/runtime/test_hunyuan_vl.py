"""HunyuanOCR: marks among the visual tokens, positions that count from 0 in every picture, and norms behind RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import close, follow, generate, inputs, logits, model, recipe_of

from mmaccel import UnsupportedError, accelerate_vlm, accelerated

NAME = "hunyuan_vl"


def test_marks_are_visual_tokens_without_a_cell() -> None:
    """One in front of a picture, one behind every row, one behind the last; sources count blocks alone."""
    tiny, feed = model(NAME), inputs(NAME)
    with accelerated(tiny, "divprune", retain=0.5), torch.no_grad():
        tiny(**feed)
        (segment,) = tiny.mmaccel.layout.segments
    (_, height, width) = (int(n) for n in feed["image_grid_thw"][0])
    rows, columns = height // 2, width // 2
    cells, source = segment.tile.cells, segment.tile.source
    assert len(source) == rows * (columns + 1) + 2 == int(zoo.visual_mask(NAME, tiny, feed["input_ids"]).sum())
    assert source[0] == source[-1] == -1
    inner = source[1:-1].view(rows, columns + 1)
    assert (inner[:, -1] == -1).all() and torch.equal(inner[:, :-1].flatten(), torch.arange(rows * columns))
    grid = cells[1:-1].view(rows, columns + 1, 3)
    assert torch.equal(grid[:, :-1, 1], torch.arange(rows)[:, None].expand(-1, columns))
    assert torch.equal(grid[:, :-1, 2], torch.arange(columns).expand(rows, -1))
    assert bool((cells[source < 0] == -1).all())


def positions_of_turn(feed: dict[str, Any], second: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of a second turn as the text model is given them, and those of one call, ``[axes, 1, q]`` each."""
    tiny, seen = model(NAME), []
    text = tiny.model.language_model
    with accelerated(tiny, recipe_of("divprune", NAME, 1.0)):
        first = generate(tiny, feed, new=2)
        hook = text.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
        )
        kept, whole = follow(feed, first, second)
        turned = generate(tiny, kept, new=1, past_key_values=first.past_key_values)
        once = generate(tiny, whole, new=1)
        hook.remove()
    close(logits(turned), logits(once))
    return seen[0], seen[-1]


def test_pictures_of_a_second_turn_are_numbered_behind_the_first() -> None:
    """Columns and rows count from 0 again, and pictures go on; with two pictures in the first turn."""
    turn, whole = positions_of_turn(inputs(NAME, "images"), inputs(NAME, "image", seed=3))
    assert len(turn) == 4 and torch.equal(turn, whole[..., -turn.shape[-1] :])
    number, column = turn[-1, 0], turn[-3, 0]
    assert int((number == 2).sum()) > 10 and int(column.min()) == 0


def test_a_forward_on_a_kept_cache_does_not_know_the_number() -> None:
    tiny, feed, second = model(NAME), inputs(NAME), inputs(NAME, seed=3)
    with accelerated(tiny, "divprune", retain=0.5), torch.no_grad():
        cache = tiny(**feed, use_cache=True).past_key_values
        second.pop("attention_mask")
        with pytest.raises(UnsupportedError, match="counts the pictures of a conversation"):
            tiny(**second, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("name", ["expected-attention", "capkv"])
def test_keys_behind_norms_cannot_be_turned(name: str) -> None:
    with pytest.raises(UnsupportedError, match="RoPE turns pairs|turns queries"):
        accelerate_vlm(model(NAME), name)


def test_chunks_of_a_prompt_cannot_move() -> None:
    with pytest.raises(UnsupportedError, match="counts columns and rows of every picture from 0"):
        accelerate_vlm(model(NAME), "homer")
