"""Masks and groups of slots: every function against its definition, row by row."""

from __future__ import annotations

import pytest
import simulated
import torch
from torch import Tensor

from mmaccel.core import masks

#: scattered, none, all, only the first, only the last
MASK = torch.tensor([[0, 1, 1, 0, 1], [0] * 5, [1] * 5, [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
#: the same with an axis for heads in front
SHAPED = pytest.mark.parametrize("mask", [MASK, MASK[:, None].repeat(1, 2, 1), MASK[0]], ids=["BN", "BHN", "N"])
EMPTY = pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 4), (2, 3, 0)], ids=str)


def rows(x: Tensor) -> list[list[int]]:
    return [[int(value) for value in row] for row in x.reshape(-1, x.shape[-1])]


def there(row: list[int]) -> list[int]:
    return [slot for slot, held in enumerate(row) if held]


# --- one axis ---------------------------------------------------------------------------------------------------------
@SHAPED
def test_true_slots_move_to_one_side_and_keep_their_order(mask: Tensor) -> None:
    first, last = masks.true_first(mask), masks.true_last(mask)
    assert first.shape == last.shape == mask.shape and first.dtype == last.dtype == torch.long
    for row, front, back in zip(rows(mask), rows(first), rows(last), strict=True):
        others = [slot for slot, held in enumerate(row) if not held]
        assert front == there(row) + others and back == others + there(row)


@SHAPED
@pytest.mark.parametrize("width", [None, 2, 5])
def test_leftmost_lists_the_true_slots_of_every_row(mask: Tensor, width: int | None) -> None:
    slots, held = masks.leftmost(mask, width)
    most = max(sum(row) for row in rows(mask)) if width is None else width
    assert slots.shape == held.shape == (*mask.shape[:-1], most)
    assert slots.dtype == torch.long and held.dtype == torch.bool
    for row, found, real in zip(rows(mask), rows(slots), rows(held), strict=True):
        assert [slot for slot, one in zip(found, real, strict=True) if one] == there(row)[:most]
        # what fills up short rows are slots too, and false ones
        assert not any(row[slot] for slot, one in zip(found, real, strict=True) if not one)


def test_sorting_anew_keeps_the_order_of_equal_keys() -> None:
    order, key = torch.tensor([[3, 1, 0, 2], [0, 1, 2, 3]]), torch.tensor([[5, 2, 5, 2], [1, 1, 0, 2]])
    assert masks.resorted(order, key).tolist() == [[3, 1, 0, 2], [2, 0, 1, 3]]
    assert masks.resorted(order, key, descending=True).tolist() == [[0, 2, 3, 1], [3, 0, 1, 2]]
    # the last key is the most important one
    first, second = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[2, 2, 1, 1]])
    slots = torch.arange(4)[None]
    wanted = sorted(range(4), key=lambda slot: (int(second[0, slot]), int(first[0, slot])))
    assert masks.resorted(masks.resorted(slots, first), second)[0].tolist() == wanted


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)], ids=str)
def test_ranks_are_the_inverse_of_an_order(shape: tuple[int, ...]) -> None:
    order = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    assert torch.equal(masks.ranks(order), order.argsort(-1))


@SHAPED
def test_what_comes_after(mask: Tensor) -> None:
    counted, after = masks.suffix_sums(mask), masks.after_last(mask)
    assert counted.dtype == torch.long and after.dtype == torch.bool and after.shape == mask.shape
    for row, sums, free in zip(rows(mask), rows(counted), rows(after), strict=True):
        assert sums == [sum(row[slot:]) for slot in range(len(row))]
        last = max(there(row), default=-1)
        assert there(free) == list(range(last + 1, len(row)))


def test_the_question_is_the_text_after_the_last_picture() -> None:
    # t: text, v: visual, .: padding
    prompts = ["tvtvtt", "..vvtt", "ttvvvv", "..ttvv", "..tttt", "vvtt..", "tvtv..", "vvvvvv", "......"]
    wanted = ["....xx", "....xx", "xx....", "..xx..", "..xxxx", "..xx..", "x.x...", "......", "......"]
    text, visual = (torch.tensor([[c == kind for c in prompt] for prompt in prompts]) for kind in "tv")
    found = masks.question(text, visual)
    assert found.dtype == torch.bool
    assert ["".join("x" if one else "." for one in row) for row in found] == wanted
    # with padding in front only, all that is not text may be taken for visual
    left = [row for row, prompt in enumerate(prompts) if not prompt.endswith(".")]
    assert torch.equal(masks.question(text, ~text)[left], found[left])


# --- groups -----------------------------------------------------------------------------------------------------------
GROUP = torch.tensor([[0, 1, -1, 1, 0, 1], [2, 2, 2, 2, 2, 2], [-1] * 6])
SCORES = torch.tensor([[1.0, 5.0, 9.0, 5.0, torch.nan, 7.0], [3.0, -torch.inf, 3.0, torch.nan, 4.0, 0.0], [0.0] * 6])


def test_sizes_of_groups() -> None:
    assert masks.group_sizes(GROUP, 3).tolist() == [[2, 3, 0], [0, 0, 6], [0, 0, 0]]


def test_ranks_within_groups() -> None:
    plain, ranked = masks.rank_in_groups(GROUP, 3), masks.rank_in_groups(GROUP, 3, SCORES)
    inside = GROUP >= 0
    assert plain[inside].tolist() == [0, 0, 1, 1, 2, 0, 1, 2, 3, 4, 5]
    # equal scores favour the lower slot, and NaN counts as minus infinity
    assert ranked[inside].tolist() == [0, 1, 2, 1, 0, 1, 4, 2, 5, 0, 3]


def test_the_best_of_every_group() -> None:
    kept = masks.top_in_groups(SCORES, GROUP, torch.tensor([[1, 2, 1], [1, 1, 3], [2, 2, 2]]))
    assert [there(row) for row in rows(kept)] == [[0, 1, 5], [0, 2, 4], []]


def test_evenly_spaced_slots_of_every_group() -> None:
    kept = masks.even_in_groups(GROUP, torch.tensor([[1, 9, 0], [0, 0, 3], [1, 1, 1]]))
    assert (kept & (GROUP == 0)).sum(1).tolist() == [1, 0, 0]
    # more than there are is all there are
    assert torch.equal(kept[0, GROUP[0] == 1], torch.ones(3, dtype=torch.bool))
    assert there(rows(kept)[1]) == [0, 2, 4]
    assert not kept[2].any()


# --- shapes and devices -----------------------------------------------------------------------------------------------
@EMPTY
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool)
    slots, held = masks.leftmost(mask)
    assert slots.shape == held.shape == (*shape[:-1], 0)
    order = masks.true_first(mask)
    for made in (
        order,
        masks.true_last(mask),
        masks.ranks(order),
        masks.resorted(order, order),
        masks.after_last(mask),
    ):
        assert made.shape == shape
    assert masks.suffix_sums(mask).shape == shape
    if len(shape) == 2:
        assert masks.question(mask, mask).shape == shape
        group = torch.zeros(shape, dtype=torch.long)
        assert masks.group_sizes(group, 2).tolist() == [[shape[1], 0]] * shape[0]
        assert masks.top_in_groups(torch.zeros(shape), group, torch.zeros(shape[0], 2).long()).shape == shape


def test_only_an_unknown_width_makes_the_host_wait() -> None:
    with simulated.machine() as gpu:
        given = gpu.put({"mask": MASK, "group": GROUP, "scores": SCORES, "count": torch.ones(3, 3).long()})
        mask, group, scores, count = (given[name] for name in ("mask", "group", "scores", "count"))
        order = masks.true_first(mask)
        made = [order, masks.true_last(mask), masks.ranks(order), masks.resorted(order, mask.long())]
        made += [masks.suffix_sums(mask), masks.after_last(mask), masks.question(mask, ~mask)]
        made += [*masks.leftmost(mask, 5), masks.group_sizes(group, 3), masks.rank_in_groups(group, 3, scores)]
        made += [masks.top_in_groups(scores, group, count), masks.even_in_groups(group, count)]
        assert all(x.device.type == "cuda" for x in made)
        assert not gpu.counts.waits
        masks.leftmost(mask)
        assert sum(gpu.counts.waits.values()) == 1
