"""The CUDA C++ loop over packed pages against the definition, on the CPU."""

from __future__ import annotations

import dataclasses
import math
import shutil

import host
import pytest
import torch
from mmaccel_kernels.decode import cuda, paged
from mmaccel_kernels.decode import triton as kernel
from mmaccel_kernels.launch import Unbuildable
from mmaccel_kernels.pages import Format
from test_decode import BOOKS, HALVES, check_values_of_any_size, compare, make, packed, paged_inputs, rows_of_all_sizes

NAMES = [
    "kivi 4",
    "kivi 2",
    "kivi 8",
    "fp8",
    "fp8 by channel",
    "one range, 1 bit",
    "one range, 2 bits",
    "one range, 4 bits",
    "levels, 2 bits",
    "levels, 3 bits",
    "levels, 4 bits",
]


@pytest.fixture
def on_host(device, monkeypatch):
    """The loops that were asked for: where there is one, it has run."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the loop for the CPU with")
    if device != "cpu":
        pytest.skip("on a GPU the loop itself runs")
    asked = []
    monkeypatch.setattr(cuda, "loop", lambda *given: asked.append(host.loop(*given)) or asked[-1])
    monkeypatch.setattr(paged, "_loops", {})
    return asked


def used(asked):
    """Whether the loop was there and said what the definition says of a few pages."""
    return len(asked) == 1 and asked[0] is not None and list(paged._loops.values()) == asked


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_pages_are_read_as_the_definition_says(name, dtype, on_host):
    compare(paged_inputs(name, dtype, "cpu"), more=3)
    assert used(on_host)


@pytest.mark.parametrize(
    "name", ["kivi 4", "kivi 2", "fp8", "one range, 4 bits", "levels, 2 bits", "levels, 3 bits", "levels, 4 bits"]
)
def test_heads_of_64_channels(name, on_host):
    compare(paged_inputs(name, torch.float16, "cpu", d=64, groups=4), more=3)
    assert used(on_host)


@pytest.mark.parametrize(("groups", "queries", "masked"), [(1, 1, True), (4, 3, True), (4, 3, False), (20, 1, False)])
@pytest.mark.parametrize("name", ["kivi 2", "one range, 1 bit", "levels, 3 bits", "levels, 4 bits"])
def test_several_queries_and_a_mask(name, groups, queries, masked, on_host):
    compare(paged_inputs(name, torch.float16, "cpu", groups=groups, queries=queries, masked=masked), more=3)
    assert used(on_host)


@pytest.mark.parametrize("width", [16, 48, 64, 80, 96, 112])
def test_keys_without_some_channels(width, on_host):
    inputs = make([5, 80], 2, 1, 7, 1, 128, 5, dtype=torch.float16)
    planes = [(Format("int4", "channel", 32), width)]
    pages = packed([200, 130], 1, 128, planes, Format("int4", "token", 32), 128, 16, dtype=torch.float16)
    compare(inputs | {"pages": dataclasses.replace(pages, key_width=128)}, more=3)
    assert used(on_host)


@pytest.mark.parametrize(("page", "width"), [(64, 128), (128, 112), (256, 80)])
def test_codes_of_three_bits_in_pages_of_one_unit_to_four(page, width, on_host):
    """Two units share the bytes of the highest bits; in a page of one unit half of them are empty."""
    inputs = make([5, 80], 2, 1, 7, 1, 128, 5, dtype=torch.float16)
    keys, values = (Format("book3", "token", n, book=BOOKS["book3"]) for n in (width, 128))
    pages = packed([page * 2 + 44, 130], 1, 128, [(keys, width)], values, page, 16, dtype=torch.float16)
    compare(inputs | {"pages": dataclasses.replace(pages, key_width=128)}, more=3)
    assert used(on_host)


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_any_number_of_programs(programs, monkeypatch, on_host):
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    monkeypatch.setattr(paged, "workspace", unwritten)
    out, lse = compare(paged_inputs("kivi 2", torch.float16, "cpu", lengths=(0, 700, 0, 130), tail=0), more=3)
    assert (lse[0, :7] == -torch.inf).all() and (out[1, :7] == 0).all()
    assert used(on_host)


def unwritten(like, *sizes, use):
    return [torch.full((n,), math.nan) for n in sizes]


@pytest.mark.parametrize("programs", [1, 3])
def test_pages_that_share_scales_in_runs(programs, monkeypatch, on_host):
    """A head whose first pages have the scales of one prompt and the next ones those of another, then the first again."""
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    inputs = paged_inputs("one range, 1 bit", torch.float16, "cpu", lengths=(2000, 0, 0, 300))
    pages = inputs["pages"]
    inputs["pages"] = dataclasses.replace(pages, meta=torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 8, 9], dtype=torch.int32))
    compare(inputs, more=3)
    assert used(on_host)


@pytest.mark.parametrize("dtype", HALVES)
def test_no_query_is_too_large_or_too_small(dtype, on_host):
    out, _ = compare(rows_of_all_sizes(dtype, "cpu"), scaling=1e-5, more=3)
    assert out.isfinite().all() and used(on_host)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [1.0, 2e-4, 1e6])
def test_no_value_is_too_large_or_too_small(factor, dtype, on_host):
    check_values_of_any_size(factor, dtype, "cpu")
    assert used(on_host)


def test_a_maximum_that_grows_all_the_time(on_host):
    """Every key has a larger logit than those before."""
    inputs = paged_inputs("kivi 4", torch.float16, "cpu", lengths=(512, 0, 0, 128), tail=0)
    plane = inputs["pages"].keys[0]
    plane.scale.fill_(0)
    steps = torch.arange(plane.zero.shape[0] * plane.zero.shape[1]).view(-1, plane.zero.shape[1], 1)
    plane.zero.copy_(steps.expand_as(plane.zero) * 0.05)
    inputs["query"].fill_(1)
    compare(inputs, more=3)
    assert used(on_host)


def test_at_a_thousand_keys_most_multiprocessors_have_work(monkeypatch, on_host):
    """A page is shared by units: four heads of a thousand keys are 128 of 32 tokens."""
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: 132)
    kept = []
    monkeypatch.setattr(paged, "workspace", lambda *given, use: kept.append(unwritten(*given, use=use)) or kept[-1])
    compare(paged_inputs("kivi 4", torch.float16, "cpu", lengths=(1024,) * 4, tail=0), more=3)
    # a program leaves the log-sum-exps of the rows of every head that it comes by
    left = ~kept[-1][1].view(-1, 7).isnan().any(1)
    assert int(left.sum()) >= 0.6 * 132


def test_a_loop_that_is_wrong_is_not_used(monkeypatch, on_host):
    monkeypatch.setattr(cuda, "loop", lambda *given: host.loop(*given)._replace(start=lambda grid, given: None))
    compare(paged_inputs("kivi 4", torch.float16, "cpu"), more=3)
    assert list(paged._loops.values()) == [None]


def test_where_nothing_can_be_compiled_triton_serves(monkeypatch, device):
    def refuse(*given):
        raise Unbuildable("no compiler")

    monkeypatch.setattr(cuda, "loop", refuse)
    monkeypatch.setattr(paged, "_loops", {})
    compare(paged_inputs("kivi 4", torch.float16, device), more=3)
    assert list(paged._loops.values()) == [None]


ELSEWHERE = [("kivi 4", torch.float32, 128), ("kivi 4", torch.float16, 32), ("kivi 4", torch.float16, 256)]
ELSEWHERE += [(name, torch.float16, 128) for name in ("4 bits and 2", "signs", "by token")]


@pytest.mark.parametrize(("name", "dtype", "d"), ELSEWHERE)
def test_what_the_source_does_not_have_is_left_to_triton(name, dtype, d, device):
    inputs = paged_inputs(name, dtype, device, d=d, groups=1)
    assert cuda.macros(inputs["pages"], inputs["query"], False) is None


# --- two planes of keys, and groups of tokens that share scales of channels ----------------------------------------------
def planes_inputs(keys, values, *, d=128, page=128, tile=16, group=32, dtype=torch.float16, fourier=False, **options):
    """``keys`` are the channels of two bits and of one; parts of pages are filled."""
    made = {"lengths": (page * 2 + 44, 0, 5, page), "tail": 5, "groups": 7, "q": 1, "masked": False} | options
    lengths, masked = made.pop("lengths"), made.pop("masked")
    inputs = make(None, 2, 2, d=d, dtype=dtype, **made)
    planes = [(Format("int2", "channel", group), keys[0]), (Format("sign", "channel", group, fourier), keys[1])]
    given = planes if keys[1] else planes[0][0]
    inputs["pages"] = packed(list(lengths), 2, d, given, Format(values, "channel", group), page, tile, dtype=dtype)
    if masked:
        columns = int(inputs["pages"].lengths().max()) + made["tail"]
        seen = torch.rand(2, 2, made["q"], columns, generator=torch.Generator().manual_seed(3)) < 0.6
        seen[0, 0, 0] = False
        inputs["visible"] = seen
    return inputs


@pytest.mark.parametrize(("values", "dtype"), [("three", torch.bfloat16), ("int2", torch.float16)])
@pytest.mark.parametrize(("keys", "d"), [((64, 64), 128), ((128, 0), 128), ((32, 32), 64)])
def test_keys_of_two_bits_and_of_one(keys, d, values, dtype, on_host):
    compare(planes_inputs(keys, values, d=d, dtype=dtype), more=3)
    assert used(on_host)


@pytest.mark.parametrize("keys", [(16, 112), (48, 80), (96, 32), (112, 16)])
def test_any_share_of_channels_with_two_bits(keys, on_host):
    compare(planes_inputs(keys, "three"), more=3)
    assert used(on_host)


@pytest.mark.parametrize(("page", "tile", "group"), [(64, 16, 16), (128, 16, 64), (256, 16, 32), (128, 8, 32)])
def test_pages_tiles_and_groups_of_other_lengths(page, tile, group, on_host):
    """Two units share bytes of signs; in a page of one unit half of the bits are empty."""
    compare(planes_inputs((64, 64), "three", page=page, tile=tile, group=group), more=3)
    assert used(on_host)


@pytest.mark.parametrize(("groups", "queries", "masked"), [(1, 1, True), (4, 3, True), (20, 1, False)])
def test_two_planes_for_several_queries_and_under_a_mask(groups, queries, masked, on_host):
    compare(planes_inputs((64, 64), "int2", groups=groups, q=queries, masked=masked), more=3)
    assert used(on_host)


def test_signs_of_waves(on_host):
    compare(planes_inputs((64, 64), "three", fourier=True), more=3)
    assert used(on_host)


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_two_planes_over_any_number_of_programs(programs, monkeypatch, on_host):
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    monkeypatch.setattr(paged, "workspace", unwritten)
    out, lse = compare(planes_inputs((64, 64), "three", lengths=(0, 700, 0, 130), tail=0), more=3)
    assert (lse[0, :7] == -torch.inf).all() and (out[1, :7] == 0).all()
    assert used(on_host)


def test_a_maximum_that_grows_within_a_unit(on_host):
    """Every group of tokens has larger logits than the one before it, in both planes."""
    inputs = planes_inputs((64, 64), "three", lengths=(512, 0, 0, 128), tail=0)
    hard, easy = inputs["pages"].keys
    steps = torch.arange(hard.zero.shape[0] * 4).view(-1, 4, 1)
    hard.zero.copy_((steps * 0.2).expand_as(hard.zero))
    easy.scale.mul_((steps.half() % 4) * 0.5)
    inputs["query"].abs_()
    compare(inputs, more=3)
    assert used(on_host)


def test_where_two_planes_cannot_be_compiled_for_the_general_loop_serves(monkeypatch, device):
    if device != "cpu":
        pytest.skip("what is read is on the CPU")

    def refuse(*given):
        raise Unbuildable("no compiler")

    monkeypatch.setattr(cuda, "loop", refuse)
    monkeypatch.setattr(paged, "_loops", {})
    compare(planes_inputs((64, 64), "three"), more=3)
    assert list(paged._loops.values()) == [None]


@pytest.mark.parametrize(
    "options", [{"page": 320}, {"values": "ternary", "page": 320}, {"keys": (56, 72)}, {"page": 384}]
)
def test_planes_that_the_source_does_not_have(options):
    inputs = planes_inputs(**{"keys": (64, 64), "values": "three"} | options)
    assert cuda.macros(inputs["pages"], inputs["query"], False) is None
