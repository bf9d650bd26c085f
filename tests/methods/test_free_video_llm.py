"""Free Video-LLM's paths on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import batch_of
from torch import Tensor

from mmaccel import MmaccelError
from mmaccel.merging.free_video_llm import FreeVideoLlm
from mmaccel.method import TokenBatch


def asked(grid: tuple[int, int, int], like: list[int]) -> TokenBatch:
    """A unit of which the tokens ``like`` point the way of the question, and the others another."""
    tokens = batch_of([(grid, False)])
    x = torch.eye(16)[1].repeat(tokens.valid.shape[1], 1)
    x[like] = torch.eye(16)[0]
    there = torch.ones(1, 1, dtype=torch.bool)
    return replace(tokens, features=x[None], question=torch.eye(16)[:1][None], question_valid=there)


def kept(method: FreeVideoLlm, tokens: TokenBatch, count: int) -> list[int]:
    slots: Tensor = method.reduce(tokens, torch.tensor([count])).kept[0].nonzero()[:, 0]
    return slots.tolist()


def test_paths_lie_in_one_another() -> None:
    """Four frames of two by four: two of them as four pairs, and what is left for two windows of each."""
    tokens = asked((4, 2, 4), [16, 17])
    method = FreeVideoLlm(slow=1, middle=1, roi=1.0)
    made = method.reduce(tokens, torch.tensor([16]))
    detailed, pooled = [0, 1, 2, 3, 4, 6], [8, 10]
    assert made.kept[0].nonzero()[:, 0].tolist() == [
        *detailed,
        *pooled,
        *(16 + slot for slot in detailed),
        *(16 + slot for slot in pooled),
    ]
    x = tokens.features[0]
    out = made.substitute(tokens.features)[0]
    torch.testing.assert_close(out[[16, 17]], torch.stack([(x[16] + x[17]) / 2, (x[16] + x[17] + x[20] + x[21]) / 4]))
    # of 8 the fast path has 2.4: one frame fits, the one that is asked for; three frames share what is left, and it
    assert kept(method, tokens, 8) == [0, 8, 16, 17, 18, 20, 22, 24]
    # where nothing fits, all is the fast path's
    assert kept(replace(method, fast=0.0), tokens, 3) == [0, 8, 16]
    assert kept(replace(method, fast=0.0), tokens, 4) == [16, 18, 20, 22]


def test_without_a_question_frames_at_equal_distances_are_shown_whole() -> None:
    tokens = replace(asked((4, 2, 4), [16]), question=None, question_valid=None)
    assert kept(FreeVideoLlm(middle=2, roi=0.5, fast=0.0), tokens, 8) == [0, 2, 4, 6, 16, 18, 20, 22]


def test_the_middle_path_may_follow_change() -> None:
    # frame 3 differs from those beside it
    tokens = asked((6, 1, 4), [12, 13, 14, 15])
    method = FreeVideoLlm(slow=0, middle=3, roi=1.0, fast=0.0, change=True)
    assert kept(method, tokens, 6) == [0, 2, 12, 14, 16, 18]


def test_the_region_is_about_what_is_asked_for() -> None:
    """Four by four are four rows of two pairs; those that are asked for are the right ones of the last two rows."""
    tokens = asked((1, 4, 4), [10, 15])
    method = FreeVideoLlm(roi=0.25, fast=0.0)
    # rows 2 and 3 have the middle 2, and two rows about it are 1 and 2
    assert kept(method, tokens, 2) == [6, 10]
    # the program sees two rows of four: the second and the fourth of the last, about whose middle are the second and third
    assert kept(method.by("official"), tokens, 2) == [10, 12]


@pytest.mark.parametrize("options", [{"slow": -1}, {"middle": -1}, {"roi": 0.0}, {"roi": 1.5}, {"fast": -0.1}])
def test_impossible_options_are_refused(options) -> None:
    with pytest.raises(MmaccelError, match="of free-video-llm must be"):
        FreeVideoLlm(**options)
