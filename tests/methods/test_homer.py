"""HOMER: what a chunk looks at, where its chunks join, and how rows of chunks become fewer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from synthetic import attention_of, layout

from mmaccel import HOMER, Recipe, Stage
from mmaccel.core.chunks import Chunks, Span


def model(depth: int, deepstack: int = 0) -> Any:
    """What the method asks of a model."""
    return SimpleNamespace(name="synthetic", depth=depth, deepstack=deepstack, undivided=None)


# ----------------------------------------------------------------------------------------------------------------- look
def test_significance_is_the_largest_of_all_heads() -> None:
    attention = attention_of(2, 9)
    found = HOMER().observe(attention, torch.arange(9).expand(2, -1), 0)["significance"]
    torch.testing.assert_close(found, attention.attention(8, 9)[:, :, 0].amax(1))


def test_keys_of_earlier_turns_are_attended_to_and_not_ranked() -> None:
    attention = attention_of(1, 9)
    seen = dataclasses.replace(attention, query=attention.query[:, :, -6:], text=attention.text[:, -6:])
    found = HOMER().observe(seen, torch.arange(6)[None], 0)["significance"]
    torch.testing.assert_close(found, attention.attention(8, 9)[:, :, 0].amax(1)[:, -6:])


def test_a_bias_goes_by_layer_and_distance() -> None:
    attention, positions = attention_of(1, 5), torch.tensor([[0, 1, 2, 3, 7]])
    plain = HOMER().observe(attention, positions, 1)["significance"]
    # at distances of 7, 6, 5, 4 and 0, of which the table knows six
    table = (0.5, 0.1, 0.2, 0.3, 0.4, 0.6)
    for bias, layer, off in (
        ((table,), 3, (0.6, 0.6, 0.6, 0.4, 0.5)),
        (((0.0,), table), 1, (0.6, 0.6, 0.6, 0.4, 0.5)),
        (((0.25,), table), 0, (0.25,) * 5),
    ):
        found = HOMER(bias=bias).observe(attention, positions, layer)["significance"]
        torch.testing.assert_close(found, plain - torch.tensor([off]))


def test_a_bias_survives_json() -> None:
    recipe = Recipe("mine", (Stage("homer", 0.5, {"bias": [[0.1, 0.2], [0.3]]}),))
    (_, made), (_, again) = recipe.build()[0], Recipe.from_json(recipe.to_json()).build()[0]
    assert made == again == HOMER(bias=((0.1, 0.2), (0.3,)))


# ---------------------------------------------------------------------------------------------------------------- layers
@pytest.mark.parametrize(
    ("layer", "depth", "levels", "joins"),
    [
        # the authors: 32 layers, of which 20 are shared out
        (12, 32, 0, []),
        (12, 32, 1, [22]),
        (12, 32, 2, [20, 26]),
        (12, 32, 3, [17, 22, 27]),
        (0, 4, 3, [1, 2, 3]),
        (2, 4, 1, [3]),
    ],
)
def test_where_chunks_join(layer: int, depth: int, levels: int, joins: list[int]) -> None:
    made = HOMER(layer=layer)
    assert made.joins(levels, depth) == joins and levels <= made.highest(depth)


@pytest.mark.parametrize(("depth", "deepstack", "layer"), [(32, 0, 12), (28, 0, 11), (28, 3, 11), (4, 3, 2), (2, 0, 0)])
def test_a_share_becomes_a_layer_within_reach(depth: int, deepstack: int, layer: int) -> None:
    made = HOMER().fit(model(depth, deepstack))
    assert isinstance(made, HOMER) and made.layer == layer
    made.check(model(depth, deepstack))
    assert made.joins(made.highest(depth), depth)[0] >= max(deepstack, 1)


# ---------------------------------------------------------------------------------------------------------------- chunks
def test_three_chunks_and_a_row_without_any() -> None:
    """Text stands once a chunk; the third one waits for the next level."""
    cut = Chunks.cut([torch.arange(10), torch.arange(3, 9)], [Span(2, 8, 2), Span(6, 6, 1)])
    assert cut.row.tolist() == [0, 0, 0, 1] and cut.number.tolist() == [0, 1, 2, 0] and not cut.padded
    assert (
        cut.places[1].tolist() == [0, 1, 4, 5, 8, 9] and cut.shared[1].tolist() == [True] * 2 + [False] * 2 + [True] * 2
    )
    assert cut.shared[3].all()
    stays = torch.ones_like(cut.shared)
    stays[0, 3] = False
    into = cut.pairs(torch.tensor([True, False]))
    assert into.tolist() == [0, 0, 1, 2] and cut.pairs(torch.tensor([False, True])).tolist() == [0, 1, 2, 3]
    new, how = cut.join(stays, into)
    assert new.row.tolist() == [0, 0, 1] and new.padded
    assert new.places.tolist() == [[0, 1, 2, 4, 5, 8, 9], [-1, 0, 1, 6, 7, 8, 9], [-1, 3, 4, 5, 6, 7, 8]]
    x = torch.arange(24.0).view(4, 6)
    assert how.apply(x)[0].tolist() == [3.0, 4.0, 2.0, 8.0, 9.0, 7.0, 8.0]
    assert how.apply(x)[1, 1:].tolist() == x[2].tolist() and how.apply(x)[2, 1:].tolist() == x[3].tolist()
    assert how.pick(x)[0].tolist() == [0.0, 1.0, 2.0, 8.0, 9.0, 4.0, 5.0]
    last, how = new.join(new.places >= 0, new.pairs(torch.tensor([True, False])))
    assert last.places[0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9] and how.left.tolist() == [0, 2]


def test_the_mean_of_equals_is_what_they_are() -> None:
    """What all chunks have read of an earlier turn stays as it is to the bit, however large."""
    cut = Chunks.cut([torch.arange(8)], [Span(3, 5, 1)])
    _, how = cut.join(cut.places >= 0, cut.pairs(torch.tensor([True])))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one = (torch.randn(1, 7, 16) * 1e4).to(dtype)
        made = how.apply(one.expand(2, -1, -1))
        assert torch.equal(made[:, :3], one[:, :3]) and torch.equal(made[:, 5:], one[:, 4:])


def test_tables_and_units_by_chunk() -> None:
    """Every visual token is in one chunk, at the slot that it says."""
    shown = layout()
    tokens = [real.nonzero()[:, 0] for real in shown.valid]
    spans = [Span(3, len(mine) - 4, -(-(len(mine) - 7) // 3)) for mine in tokens]
    cut = Chunks.cut(tokens, spans)
    part, slot = cut.tables(shown.valid.shape)
    assert torch.equal(part >= 0, shown.visual) and torch.equal(slot >= 0, shown.visual)
    at = shown.visual.nonzero(as_tuple=True)
    assert torch.equal(cut.places[part[at], slot[at]], at[1]) and torch.equal(cut.row[part[at]], at[0])
    whole = shown.units("picture")
    pieces, picture, chunk = whole.split(part)
    assert int(pieces.valid.sum()) == int(whole.valid.sum()) and torch.equal(pieces.row, whole.row[picture])
    assert torch.equal(cut.row[chunk], pieces.row)
    for mine, number in zip(range(len(chunk)), chunk.tolist(), strict=True):
        places = pieces.places[mine][pieces.valid[mine]]
        assert (part[pieces.row[mine], places] == number).all()
    nothing, *_ = whole.split(torch.full_like(part, -1))
    assert len(nothing.row) == 0
