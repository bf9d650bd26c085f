"""Appending to a preallocated cache: the definition by hand, the kernel against it, what it moves, compiled steps, refusals."""

from __future__ import annotations

import pytest
import torch
from mmaccel_kernels.append import append, append_cost, append_definition, append_kernel
from traffic import counted

#: batch, heads, room, new tokens, channels of keys and of values, first slot
CASES = {
    "one token of a group": (2, 3, 9, 1, 128, 128, 4),
    "one channel": (1, 1, 1, 1, 1, 1, 0),
    "to the end": (2, 2, 40, 37, 20, 130, 3),
    "sixteen": (1, 2, 64, 16, 64, 32, 48),
}
cases = pytest.mark.parametrize("case", CASES)


def storage(case, dtype=torch.float32, kind=torch.int64, device="cpu"):
    """Buffers, what is to be written, as models lay it out (heads behind tokens), the slot, and an index."""
    b, heads, room, new, d, dv, at = CASES[case]
    rng = torch.Generator().manual_seed(room)
    whole = [torch.randn(b, heads, room, width, generator=rng).to(device, dtype) for width in (d, dv)]
    fresh = [torch.randn(b, new, heads, width, generator=rng).to(device, dtype).transpose(1, 2) for width in (d, dv)]
    index = torch.full((b, room), -1, dtype=torch.int32, device=device)
    places = torch.randint(100, (b, new), generator=rng).to(device, kind)
    return *whole, *fresh, torch.tensor([at], dtype=kind, device=device), index, places


@cases
def test_the_definition(case):
    keys, values, new_keys, new_values, at, index, places = storage(case)
    begin, end = int(at), int(at) + new_keys.shape[2]
    want = [torch.cat([x[:, :, :begin], new, x[:, :, end:]], 2) for x, new in ((keys, new_keys), (values, new_values))]
    append(keys, values, new_keys, new_values, at, index=index, places=places)
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1])
    assert torch.equal(index[:, begin:end].long(), places) and (index >= 0).sum() == places.numel()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@cases
def test_the_kernel(case, dtype, kind, device):
    want, got = (storage(case, dtype, kind, device) for _ in range(2))
    append_definition(*want)
    append_kernel(*got)
    assert all(torch.equal(x, y) for x, y in zip(want, got, strict=True))
    # without an index, into a part of larger buffers
    wider = [torch.nn.functional.pad(x, (0, 16, 0, 3)) for x in got[:2]]
    before = [x.clone() for x in wider]
    parts = [x[..., 1 : 1 + y.shape[3]] for x, y in zip(wider, got, strict=False)]
    append_kernel(*parts, *got[2:5])
    begin, end = int(got[4]), int(got[4]) + got[2].shape[2]
    for x, was, new in zip(wider, before, got[2:4], strict=False):
        was[:, :, begin:end, 1 : 1 + new.shape[3]] = new
        assert torch.equal(x, was)


def test_what_does_not_fit_is_told_or_left_out(device):
    keys, values, new_keys, new_values, at, index, places = storage("to the end", device=device)
    at += 2
    with pytest.raises(IndexError):
        append_definition(keys.cpu(), values.cpu(), new_keys.cpu(), new_values.cpu(), at.cpu())
    whole = keys.flatten().clone()
    append_kernel(keys, values, new_keys, new_values, at, index, places)
    assert torch.equal(keys[:, :, 5:], new_keys[:, :, :35])
    assert torch.equal(keys[:, :, :5], whole.view_as(keys)[:, :, :5]) and (index[:, :5] == -1).all()


@cases
def test_what_is_new_is_read_and_written_once_in_one_launch(case, device):
    given = storage(case, torch.float16, torch.int32, device)
    with counted() as traffic:
        append_kernel(*given)
    moved, operations = append_cost(*given[2:4], given[6])
    b, heads, _, new, *_ = CASES[case]
    programs = -(-new // 16) * b * heads
    assert (traffic.launches, traffic.dots, operations) == (1, 0, 0)
    # and the slot, once a program
    assert traffic.loaded + traffic.stored == moved + 4 * programs


def test_nothing_new_is_nothing(device):
    given = storage("sixteen", device=device)
    before = given[0].clone()
    append_kernel(*given[:2], *(x[:, :, :0] for x in given[2:4]), given[4])
    assert torch.equal(given[0], before)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_step_appends_in_place_and_has_one_graph(backend):
    keys, values, new_keys, new_values, _, index, places = storage("one token of a group")
    where = keys.data_ptr(), values.data_ptr(), index.data_ptr()
    graphs = 0

    def step(at, new_keys, new_values):
        append(keys, values, new_keys * 2, new_values, at, index=index, places=places)
        return keys.sum() + index.sum()

    def counting(graph, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for slot in range(4):
        want, marks = keys.clone(), index.clone()
        append(want, values.clone(), new_keys * 2, new_values, torch.tensor([slot]), index=marks, places=places)
        total = compiled(torch.tensor([slot]), new_keys, new_values)
        assert torch.equal(keys, want) and torch.equal(index, marks)
        torch.testing.assert_close(total, want.sum() + marks.sum())
    assert graphs == 1 and where == (keys.data_ptr(), values.data_ptr(), index.data_ptr())


def test_the_operator_says_what_it_changes():
    keys, values, new_keys, new_values, at, index, places = storage("one token of a group")
    for more in ((index, places), (None, None)):
        torch.library.opcheck(torch.ops.mmaccel.append.default, (keys, values, new_keys, new_values, at, *more))


def refused(match, **changed):
    names = ("keys", "values", "new_keys", "new_values", "at", "index", "places")
    given = dict(zip(names, storage("one token of a group"), strict=True)) | changed
    with pytest.raises(ValueError, match=match):
        append(**given)


def test_wrong_shapes_are_refused_by_name():
    keys, values, new_keys, new_values, _, index, places = storage("one token of a group")
    refused("keys \\[B, Hkv, T, D\\] and values", keys=keys[0])
    refused("keys \\[B, Hkv, T, D\\] and values", values=values[:, :, :3])
    refused("do not belong to keys", new_keys=new_keys[:1])
    refused("do not belong to keys", new_values=new_values[..., :3])
    refused(
        "has 12 tokens, and keys has room for 9",
        **{"new_keys": new_keys.repeat(1, 1, 12, 1), "new_values": new_values.repeat(1, 1, 12, 1)},
    )
    refused("at must be \\[1\\] int32 or int64, not \\[\\]", at=torch.tensor(3))
    refused("at must be .* torch.float32", at=torch.ones(1))
    refused("new_keys is torch.float16", new_keys=new_keys.half())
    refused("at is on meta", at=torch.ones(1, dtype=torch.long, device="meta"))
    refused("index and places come together", places=None)
    refused("index must be \\[2, 9\\] int32", index=index[:, :3])
    refused("index must be .* torch.int64", index=index.long())
    refused("places must be \\[2, 1\\]", places=places[:1])
    refused("must be contiguous", keys=keys.mT.contiguous().mT)
