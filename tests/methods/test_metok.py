"""METok's events: on numbers that can be checked by hand, and in a model from its first stage to the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from batches import batch_of
from torch import Tensor

from mmaccel import MmaccelError, accelerated
from mmaccel.layers.metok import METokPrune
from mmaccel.merging.metok import METokMerge
from mmaccel.method import TokenBatch

#: the direction of each frame: between 1 and 2, and between 2 and 4 over 3, the clip changes
DIRECTIONS = [0, 0, 1, 2, 2, 2]


def clip() -> TokenBatch:
    """Six frames of four by four tokens, which all point one way; the question points the way of frame 2, and a little of 3."""
    tokens = batch_of([((6, 4, 4), False)])
    ways = torch.eye(16)[torch.tensor(DIRECTIONS)]
    # frame 4 is somewhat off the question's way
    ways[4, 5] = 1.0
    asked = torch.eye(16)[1] + 0.5 * torch.eye(16)[2]
    return replace(
        tokens,
        features=ways.repeat_interleave(16, 0)[None],
        question=asked[None, None],
        question_valid=torch.ones(1, 1, dtype=torch.bool),
    )


def by_frame(figures: Tensor) -> list[float]:
    frames = figures.view(6, 16)
    assert (frames == frames[:, :1]).all()
    return frames[:, 0].tolist()


def test_events_are_cut_where_frames_change_and_key_where_the_question_is() -> None:
    marks = METokMerge(events=3, key=2, fine=2).marks(clip())
    assert by_frame(marks["event"][0]) == [0, 0, 1, 2, 2, 2]
    # 2 / sqrt(5) of frame 2, 1 / sqrt(5) of 3 and 5, nothing of the first event
    assert by_frame(marks["key_event"][0]) == [0, 0, 1, 1, 1, 1]
    # the first of equals, and not frame 4, which is off the way
    assert by_frame(marks["fine_frame"][0]) == [1, 1, 1, 1, 0, 1]
    assert by_frame(METokMerge(events=3, key=1, fine=1).marks(clip())["fine_frame"][0]) == [1, 0, 1, 1, 0, 0]


def test_key_and_fine_frames_are_pooled_least() -> None:
    method, tokens = METokMerge(events=3, key=1, fine=1), clip()
    # shares of 4, 1, 16, 4, 1 and 1 of 27
    made = method.reduce(tokens, torch.tensor([27]))
    assert made.kept.view(6, 16).sum(1).tolist() == [4, 1, 16, 4, 1, 1]
    torch.testing.assert_close(made.apply(tokens.features)[0, :5], tokens.features[0, [0, 0, 0, 0, 16]])
    assert torch.equal(method.reduce(tokens, torch.tensor([96])).kept, tokens.valid)
    alone = replace(tokens, question=None, question_valid=None)
    assert by_frame(method.marks(alone)["key_event"][0]) == [1, 1, 0, 0, 0, 0]


def test_events_that_are_not_asked_for_go_first() -> None:
    tokens = batch_of([((1, 2, 5), False)])
    paid = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.1, 0.2, 0.3, 0.4, 0.5, 0.0]])
    event, key = torch.tensor([[0.0] * 4 + [1.0] * 6]), torch.tensor([[0.0] * 4 + [1.0] * 6])
    shown = replace(tokens, signals={"text_mean": paid, "event": event, "key_event": key})

    def kept(others: float, count: int, what: TokenBatch = shown) -> list[int]:
        made = METokPrune(others=others).reduce(what, torch.tensor([count]))
        return made.kept[0].nonzero()[:, 0].tolist()

    # of four, 4 * 0.5 of 8 to the first event
    assert kept(0.5, 4) == [0, 6, 7, 8]
    assert kept(0.0, 4) == [5, 6, 7, 8] and kept(0.0, 7) == [0, 4, 5, 6, 7, 8, 9]
    assert kept(1.0, 5) == [0, 1, 6, 7, 8]
    # without events they compete
    bare = replace(tokens, signals={"text_mean": paid})
    assert kept(0.5, 4, bare) == kept(0.0, 4, bare) == [0, 1, 2, 3]
    # what has no event goes first
    stray = replace(shown, signals={**shown.signals, "event": event.masked_fill(event == 0, torch.nan)})
    assert kept(0.5, 6, stray) == [4, 5, 6, 7, 8, 9] and kept(0.5, 7, stray) == [0, 4, 5, 6, 7, 8, 9]


@torch.no_grad()
def test_the_events_reach_the_stages_in_the_language_model_and_later_caches_hold_one_token() -> None:
    model, feed = zoo.model("qwen2_5_vl", num_hidden_layers=8), dict(zoo.inputs("qwen2_5_vl", "video"))
    visual = zoo.visual_mask("qwen2_5_vl", model, feed["input_ids"])
    text = int((~visual).sum())
    with accelerated(model, "metok"):
        cache = model(**feed, use_cache=True).past_key_values
        history = model.mmaccel.history
    assert [result.layer for result in history] == [0, 1, 3, 5]
    kept = [int((result.reduction.kept & visual).sum()) for result in history]
    assert kept == sorted(kept, reverse=True) and kept[-1] == 1
    first = history[0].scores()
    for result in history[1:]:
        shown = result.scores()
        there = ~shown["text_mean"].isnan()
        assert there.any() and torch.equal(shown["event"][there], first["event"][there])
        assert torch.equal(shown["key_event"][there], first["key_event"][there])
    assert len(first["event"][visual].unique()) > 1
    stored = [layer.keys.shape[2] for layer in cache.layers]
    assert stored == [text + kept[0], *[text + 1] * 7]


def test_what_is_no_option() -> None:
    with pytest.raises(MmaccelError, match="must be at least 1, got 0"):
        METokMerge(fine=0)
    with pytest.raises(MmaccelError, match="`others` of metok-prune must be at least 0 and at most 1, got 2.0"):
        METokPrune(others=2.0)
