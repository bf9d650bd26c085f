"""Attention over chosen keys: the definition against hiding all others, the kernel against the definition, what it reads."""

from __future__ import annotations

import math

import pytest
import torch
from mmaccel_kernels.chosen import (
    ChosenKeys,
    chosen_attention,
    chosen_attention_cost,
    chosen_attention_definition,
    chosen_attention_kernel,
)
from mmaccel_kernels.decode import triton as decoding
from traffic import counted

#: largest difference from the definition, of results of about 1
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
EXACT = {"atol": 1e-5, "rtol": 1e-5}

#: rows, key heads, query heads of each, channels of keys and of values; keys, those of them that are always read and that came
#: later; units, keys of each, picked at most; heads that choose alike
CASES = {
    "one key": (1, 1, 1, 16, 16, 1, 0, 1, 1, 1, 0, True),
    "no units": (1, 2, 2, 16, 16, 30, 9, 4, 1, 1, 0, False),
    "pages": (2, 2, 3, 32, 48, 300, 70, 30, 20, 4, 11, False),
    "single keys, one choice for all heads": (2, 2, 7, 64, 64, 200, 3, 1, 150, 1, 90, True),
    "large pages and 96 channels": (1, 2, 4, 96, 96, 600, 0, 1, 30, 16, 20, False),
    "a group of 40": (1, 1, 40, 32, 32, 90, 3, 2, 80, 1, 40, True),
}


def drawn(b, hkv, groups, d, dv, total, fixed, later, units, unit, most, alike, *, dtype=torch.float32, masked=False):
    """Slots in any order, none of them twice; some entries of every list are none, and heads read fewer units than others."""
    rng = torch.Generator().manual_seed(total)
    query = torch.randn(b, hkv * groups, 1, d, generator=rng) * 2
    keys, values = (torch.randn(b, hkv, total, n, generator=rng) for n in (d, dv))
    heads, stored = 1 if alike else hkv, total - later
    order = torch.rand(b, heads, stored, generator=rng).argsort(-1).int()
    order = torch.cat([order, order.new_full((b, heads, max(0, fixed + units * unit - stored)), -1)], dim=-1)
    always, slots = order[..., :fixed].clone(), order[..., fixed : fixed + units * unit].clone()
    always[..., -1:], slots[..., -1:] = -1, -1
    picked = torch.rand(b, heads, units, generator=rng).argsort(-1)[..., :most].int()
    counts = torch.randint(0, most + 1, (b, heads), generator=rng).int()
    counts[0, 0] = most
    chosen = ChosenKeys(always, slots.unflatten(2, (units, unit)), picked, counts, stored)
    visible = torch.rand(b, heads, 1, total, generator=rng) < 0.7 if masked else None
    return (*(x.to(dtype) for x in (query, keys, values)), chosen, 0.3, visible)


def on(device, given):
    """The same on a device."""
    query, keys, values, chosen, scaling, visible = given
    moved = [x if x is None else x.to(device) for x in (query, keys, values, visible)]
    return (*moved[:3], ChosenKeys(*(x.to(device) for x in chosen[:4]), chosen.stored), scaling, moved[3])


@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_chosen_is_hidden(case, masked):
    query, keys, values, chosen, scaling, visible = drawn(*CASES[case], masked=masked)
    (b, hkv, total), groups = keys.shape[:3], query.shape[1] // keys.shape[1]
    hidden = torch.ones(b, hkv, total, dtype=torch.bool)
    for row in range(b):
        for head in range(hkv):
            of = [x[row, head % x.shape[1]] for x in chosen[:4]]
            read = [
                *of[0].tolist(),
                *of[1][of[2][: int(of[3])].long()].flatten().tolist(),
                *range(chosen.stored, total),
            ]
            hidden[row, head, [slot for slot in read if slot >= 0]] = False
    assert torch.equal(chosen.mask(total)[:, :, 0].expand_as(hidden), ~hidden)
    if visible is not None:
        hidden = hidden | ~visible[:, :, 0]
    keys_of, values_of = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    logits = (query @ keys_of.mT * scaling).masked_fill(hidden.repeat_interleave(groups, 1)[:, :, None], -torch.inf)
    out, lse = chosen_attention(query, keys, values, chosen, scaling=scaling, visible=visible)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    weights = logits.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(out, weights @ values_of, **EXACT)


@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_reads_what_is_chosen(case, masked, device):
    given = on(device, drawn(*CASES[case], masked=masked))
    for got, want in zip(chosen_attention_kernel(*given), chosen_attention_definition(*given), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype, device):
    given = on(device, drawn(*CASES["pages"], dtype=dtype, masked=True))
    got, want = chosen_attention_kernel(*given)[0], chosen_attention_definition(*given)[0]
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("programs", (1, 3, 60))
def test_the_list_may_be_split_over_any_number_of_programs(programs, device, monkeypatch):
    monkeypatch.setattr(decoding, "_multiprocessors", lambda device: programs)
    given = on(device, drawn(*CASES["single keys, one choice for all heads"]))
    for got, want in zip(chosen_attention_kernel(*given), chosen_attention_definition(*given), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_keys_that_are_not_contiguous_and_what_is_not_read(device):
    """A cache with room behind it and heads behind tokens, in which NaN stands wherever nobody reads."""
    query, keys, values, chosen, scaling, _ = on(device, drawn(*CASES["pages"]))
    read = chosen.mask(keys.shape[2]).expand(-1, keys.shape[1], -1, -1)[:, :, 0, :, None]
    stored = []
    for x in (keys, values):
        room = torch.full((len(x), 400, *x.shape[1::2]), math.nan, device=device).transpose(1, 2)
        room[:, :, : x.shape[2]] = x.masked_fill(~read, math.nan)
        stored.append(room[:, :, : x.shape[2]])
    want = chosen_attention_definition(query, keys, values, chosen, scaling)
    for got in (chosen_attention_kernel, chosen_attention_definition):
        out, lse = got(query, *stored, chosen, scaling)
        torch.testing.assert_close(out, want[0], **EXACT)
        torch.testing.assert_close(lse, want[1], **EXACT)


@pytest.mark.parametrize("case", ("no units", "pages", "single keys, one choice for all heads"))
@pytest.mark.parametrize("left", (0, 1, 2))
def test_the_device_says_how_many_keys_there_are(case, left, device):
    """Behind them is room, in which NaN stands."""
    query, keys, values, chosen, scaling, visible = on(device, drawn(*CASES[case], masked=True))
    total = chosen.stored + (keys.shape[2] - chosen.stored) * left // 2
    want = chosen_attention_definition(
        query, keys[:, :, :total], values[:, :, :total], chosen, scaling, visible[..., :total]
    )
    tail = torch.tensor([total], device=device, dtype=torch.int32 if left else torch.long)
    room = [torch.cat([x[:, :, :total], torch.full_like(x, math.nan)], dim=2) for x in (keys, values)]
    seen = torch.cat([visible[..., :total], torch.ones_like(visible)], dim=3)
    for attention in (chosen_attention_kernel, chosen_attention_definition):
        for got, wanted in zip(attention(query, *room, chosen, scaling, seen, tail), want, strict=True):
            torch.testing.assert_close(got, wanted, **EXACT)


def test_a_query_that_sees_nothing(device):
    *given, _ = on(device, drawn(*CASES["pages"]))
    nothing = torch.zeros(2, 1, 1, 300, dtype=torch.bool, device=device)
    out, lse = chosen_attention_kernel(*given, nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_only_what_is_chosen_is_read(device):
    given = drawn(*CASES["large pages and 96 channels"])
    moved, operations = chosen_attention_cost(*given[:4])
    with counted() as traffic:
        chosen_attention_kernel(*given)
    slots = given[3].slots(600)
    kept = int((slots >= 0).sum()) * 192 * 4
    assert operations == 2 * int((slots >= 0).sum()) * 4 * 192
    # beside keys and values the query of every program, lists, and what programs leave to each other
    assert kept < moved < kept + 16384 and moved < traffic.loaded + traffic.stored < 1.3 * moved


def test_what_does_not_fit():
    query, keys, values, chosen, _, _ = drawn(*CASES["pages"])
    for bad, said in (
        ((query[0], keys, values, chosen), "query must have the shape"),
        ((query.expand(-1, -1, 2, -1), keys, values, chosen), "query must have the shape"),
        ((query.half(), keys, values, chosen), "of one type"),
        ((query[..., :8], keys, values, chosen), "do not belong to a query"),
        ((query[:, :5], keys, values, chosen), "do not belong to a query"),
        ((query, keys, values, chosen._replace(picked=chosen.picked.long())), "chosen.picked must be int32"),
        ((query, keys, values, chosen._replace(units=chosen.units[:, :, :, 0])), "chosen.units must be int32"),
        ((query, keys, values, chosen._replace(stored=301)), "chosen.stored is 301, of 300 keys"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen_attention(*bad)
    with pytest.raises(ValueError, match="visible must be bool"):
        chosen_attention(query, keys, values, chosen, visible=torch.ones(2, 1, 1, 299, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"tail must be \[1\] int32 or int64"):
        chosen_attention(query, keys, values, chosen, tail=torch.tensor(300))
