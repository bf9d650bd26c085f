"""Decode attention: the definition against padded attention, the kernel against the definition, and what it moves."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from mmaccel_kernels.decode import (
    Flat,
    decode_attention,
    decode_attention_cost,
    decode_attention_definition,
    decode_attention_kernel,
    paged,
)
from mmaccel_kernels.decode import triton as kernel
from mmaccel_kernels.decode.heads import LEAST, heads_attention, reads_heads
from mmaccel_kernels.pack import quantise
from mmaccel_kernels.pack.naive import SCALE_MAX
from mmaccel_kernels.pages import Format, Pages, Plane, Remainder, split

#: largest difference from the definition, of results of about 1
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CODES = ("sign", "ternary", "three", "int1", "int2", "int3", "int4", "int8", "fp8")
BOOKS = {
    "book1": (0.7979,),
    "book2": (0.4528, 1.5104),
    "book3": (0.2451, 0.7560, 1.3439, 2.1519),
    "book4": (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}


def bounds(lengths):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def make(
    lengths, b, hkv, groups, q, d, tail, *, dv=None, dtype=torch.float32, masked=False, device="cpu", width=None, seed=0
):
    """Queries, a tail, flat keys of ``lengths`` (None for none) and a mask, as ``decode_attention`` takes them."""
    dv = dv or d
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    flat = None
    if lengths is not None:
        width = max(lengths) + 3 if width is None else width
        flat = Flat(normal(sum(lengths), d), normal(sum(lengths), dv), bounds(lengths).to(device), width)
    query, keys, values = normal(b, hkv * groups, q, d) * 2, normal(b, hkv, tail, d), normal(b, hkv, tail, dv)
    visible = None
    if masked:
        columns = tail + (flat.width if flat else 0)
        visible = (torch.rand(b, hkv, q, columns, generator=rng) < 0.6).to(device)
    return {"query": query, "keys": keys, "values": values, "flat": flat, "visible": visible}


def compare(inputs, dtype=None, scaling=0.125, more=1.0):
    """The kernel against the definition."""
    out, lse = decode_attention_kernel(scaling=scaling, **inputs)
    want, want_lse = decode_attention_definition(scaling=scaling, **inputs)
    assert out.dtype == inputs["query"].dtype and lse.dtype == torch.float32
    allowed = TOLERANCE[dtype or out.dtype] * more
    torch.testing.assert_close(out, want, atol=allowed, rtol=allowed)
    torch.testing.assert_close(lse, want_lse, atol=allowed, rtol=allowed)
    return out, lse


# --- the definition ---------------------------------------------------------------------------------------------------
def test_the_definition_is_padded_attention():
    lengths = [5, 0, 9, 2]
    inputs = make(lengths, 2, 2, 3, 4, 16, 6, masked=True)
    inputs["visible"][0, 1, 2] = False
    flat, (b, h) = inputs["flat"], (2, 2)
    there = torch.arange(flat.width) < torch.tensor(lengths).view(b, h, 1)
    keys, values = torch.zeros(2, b, h, flat.width, 16)
    keys[there], values[there] = flat.keys, flat.values
    keys, values = torch.cat([keys, inputs["keys"]], 2), torch.cat([values, inputs["values"]], 2)
    mask = inputs["visible"].clone()
    mask[..., : flat.width] &= there[:, :, None]
    keys, values, mask = (x.repeat_interleave(3, dim=1) for x in (keys, values, mask))
    want = F.scaled_dot_product_attention(inputs["query"], keys, values, mask, scale=0.3)
    want_lse = (inputs["query"] @ keys.mT * 0.3).masked_fill(~mask, -torch.inf).logsumexp(-1)
    blind = ~mask.any(-1)
    out, lse = decode_attention(scaling=0.3, **inputs)
    assert blind.sum() == 3
    torch.testing.assert_close(out, want.masked_fill(blind[..., None], 0), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("lengths", [None, [7, 3]])
def test_new_queries_see_what_was_before_them(lengths):
    inputs = make(lengths, 1, 2, 2, 3, 16, 5)
    causal = torch.ones(3, 5, dtype=torch.bool).tril(2)
    if lengths is not None:
        causal = torch.cat([torch.ones(3, inputs["flat"].width, dtype=torch.bool), causal], 1)
    out, lse = decode_attention(**inputs)
    inputs["visible"] = causal.expand(1, 1, -1, -1)
    same = decode_attention(**inputs)
    assert torch.equal(out, same[0]) and torch.equal(lse, same[1])


# --- the kernel -------------------------------------------------------------------------------------------------------
SHAPES = {
    "plain": (None, 2, 2, 3, 1, 64, 70),
    "one key": (None, 1, 1, 1, 1, 16, 1),
    "no group, many heads": (None, 3, 5, 1, 1, 32, 17),
    "a group of 64": ([100, 64], 1, 2, 64, 1, 32, 3),
    "ragged": ([5, 200, 0, 77], 2, 2, 7, 1, 32, 3),
    "no tail": ([5, 200, 1, 77], 2, 2, 2, 1, 32, 0),
    "nothing but the tail": ([0, 0, 0, 0], 2, 2, 2, 1, 32, 9),
    "a multiple of the tile": ([64, 128, 192, 0], 4, 1, 2, 1, 32, 64),
    "80 channels": ([65, 3], 1, 2, 4, 1, 80, 2),
    "96 channels": ([65, 3], 2, 1, 4, 1, 96, 2),
    "256 channels": ([40, 33], 2, 1, 8, 1, 256, 2),
    "four queries": ([5, 90, 0, 77], 2, 2, 3, 4, 32, 6),
    "16 queries of 3 heads": ([70, 3], 1, 2, 3, 16, 16, 20),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_agrees_with_the_definition(shape, masked, device):
    compare(make(*SHAPES[shape], masked=masked, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", ["ragged", "four queries", "96 channels"])
def test_half_precision(shape, dtype, device):
    compare(make(*SHAPES[shape], dtype=dtype, masked=True, device=device))


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 60])
def test_the_work_may_be_split_over_any_number_of_programs(programs, monkeypatch, device):
    monkeypatch.setattr(kernel, "PROGRAMS_EACH", 1)
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    inputs = make([5, 700, 0, 0, 77, 1], 2, 3, 2, 1, 16, 3, masked=True, device=device)
    compare(inputs)


def test_one_mask_for_all_heads_and_keys_that_are_not_contiguous(device):
    inputs = make([9, 80], 1, 2, 2, 1, 32, 20, dv=48, masked=True, device=device)
    inputs["visible"] = inputs["visible"][:, :1]
    inputs["keys"] = inputs["keys"].transpose(1, 2).contiguous().transpose(1, 2)
    inputs["values"] = inputs["values"].repeat(1, 1, 2, 1)[:, :, ::2]
    inputs["query"] = inputs["query"].transpose(1, 2).contiguous().transpose(1, 2)
    compare(inputs)


def test_a_query_that_sees_nothing(device):
    inputs = make([100, 70], 1, 2, 2, 2, 16, 4, masked=True, device=device)
    inputs["visible"][:, 0, 1] = False
    # the first tile of the other head is hidden
    inputs["visible"][:, 1, :, :64] = False
    out, lse = compare(inputs)
    assert (out[0, :2, 1] == 0).all() and (lse[0, :2, 1] == -torch.inf).all()
    assert lse[0, 2:].isfinite().all()


def test_large_logits(device):
    inputs = make([100, 70], 1, 2, 2, 1, 16, 4, device=device)
    inputs["query"] *= 300
    compare(inputs, more=20)


def test_the_same_to_the_bit_each_time(device):
    inputs = make([300, 70], 1, 2, 2, 1, 32, 4, dtype=torch.float16, device=device)
    first, again = (decode_attention_kernel(scaling=0.1, **inputs) for _ in range(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


# --- room to spare ----------------------------------------------------------------------------------------------------
def roomy(filled, capacity, *, kind=torch.int32, **options):
    """The same inputs without and with room behind the tail and the flat keys, which holds what must not be looked at."""
    options = {"lengths": [5, 90, 0, 77], "b": 2, "hkv": 2, "groups": 3, "q": 2, "d": 16} | options
    exact = make(tail=filled, **options)
    spare = {}
    for name in ("keys", "values"):
        spare[name] = F.pad(exact[name], (0, 0, 0, capacity - filled), value=math.nan)
    if (flat := exact["flat"]) is not None:
        # as much as if all heads were as long
        more = flat.width * (len(flat.cu_lengths) - 1) - len(flat.keys)
        keys, values = (F.pad(x, (0, 0, 0, more), value=math.nan) for x in flat[:2])
        spare["flat"] = flat._replace(keys=keys, values=values)
    if exact["visible"] is not None:
        spare["visible"] = F.pad(exact["visible"], (0, capacity - filled), value=True)
    return exact, exact | spare | {"tail": torch.tensor([filled], dtype=kind, device=exact["query"].device)}


ROOM = {
    "one key of many": (1, 200, {"q": 1}),
    "nothing": (0, 70, {"q": 1}),
    "full": (64, 64, {}),
    "across tiles": (100, 300, {"q": 3}),
    "a tail alone": (70, 129, {"lengths": None, "kind": torch.int64}),
    "fewer keys than queries": (1, 9, {"q": 4}),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("room", ROOM)
def test_room_behind_the_tail_is_not_there(room, masked):
    filled, capacity, options = ROOM[room]
    exact, spare = roomy(filled, capacity, masked=masked, **options)
    want, want_lse = decode_attention_definition(scaling=0.3, **exact)
    out, lse = decode_attention_definition(scaling=0.3, **spare)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("room", ROOM)
def test_the_kernel_reads_how_much_of_the_tail_there_is(room, masked, device):
    filled, capacity, options = ROOM[room]
    compare(roomy(filled, capacity, masked=masked, device=device, **options)[1])


def test_pages_before_a_tail_with_room(device):
    exact, spare = roomy(20, 50, device=device, d=32)
    form = Format("int4", "channel", 32)
    pages = packed([40, 0, 64, 3], 2, 32, form, form, 32, 16, device=device)
    out, _ = compare(spare | {"pages": pages}, more=3)
    torch.testing.assert_close(out, decode_attention(**exact, pages=pages, scaling=0.125)[0], atol=1e-5, rtol=1e-5)


def test_of_a_tail_with_room_only_what_is_filled_is_read(meter):
    _, spare = roomy(20, 300, lengths=None)
    decode_attention_kernel(scaling=1.0, **spare)
    for name in ("keys", "values"):
        assert meter.bytes_of(spare[name]) == (2 * 2 * 20 * 16 * 4,) * 2


def test_a_tail_that_grows_is_one_graph():
    _, spare = roomy(20, 64, q=1)
    seen = []

    def step(query, keys, values, tail):
        return decode_attention_definition(query, keys, values, 0.3, spare["flat"], None, None, tail)[0]

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    given = [spare[name] for name in ("query", "keys", "values")]
    for filled in (1, 20):
        tail = torch.tensor([filled], dtype=torch.int32)
        assert torch.equal(compiled(*given, tail), step(*given, tail))
    assert len(seen) == 1


# --- packed pages -----------------------------------------------------------------------------------------------------
def packed(lengths, hkv, d, keys, values, page, tile, *, dtype=torch.float32, device="cpu", seed=1, **options):
    """Pages of random keys and values; ``keys`` may be two (format, channels) planes."""
    rng = torch.Generator().manual_seed(seed)
    start, count, cu_pages = split(torch.tensor(lengths), page)
    offset = torch.randn(d, generator=rng)
    planes = []
    for formats in (keys, values):
        x = (torch.randn(sum(lengths), d, generator=rng) + offset).to(dtype)
        if isinstance(formats, Format):
            planes.append((quantise(x, start, count, formats, page=page, tile=tile, **options),))
            continue
        own = []
        for form, width in formats:
            # other channels for every head
            channels = torch.stack([torch.randperm(d, generator=rng)[:width].sort().values for _ in lengths])
            if own:
                rest = torch.ones(len(lengths), d, dtype=torch.bool).scatter_(1, own[0].channels.long(), False)
                channels = rest.nonzero()[:, 1].view(len(lengths), width)
            chosen = x.gather(1, channels.repeat_interleave(torch.tensor(lengths), dim=0))
            plane = quantise(chosen, start, count, form, page=page, tile=tile, **options)
            own.append(Plane(form, plane.codes, plane.scale, plane.zero, channels.int()))
        planes.append(tuple(own))
    n = torch.arange(len(count), dtype=torch.int32)
    pages = Pages(*planes, page, tile, count, n, n.clone(), cu_pages, hkv)
    return pages if device == "cpu" else on(pages, device)


def on(pages, device):
    from dataclasses import fields, is_dataclass, replace

    def move(x):
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if isinstance(x, tuple):
            return tuple(map(move, x))
        if is_dataclass(x) and not isinstance(x, Format):
            return replace(x, **{f.name: move(getattr(x, f.name)) for f in fields(x)})
        return x

    return move(pages)


EVERY = [(code, axis, torch.float32) for code in CODES for axis in ("channel", "token")]
EVERY += [(code, "channel", dtype) for code in CODES for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("code", "axis", "dtype"), EVERY)
def test_pages_of_every_code(code, axis, dtype, device):
    form = Format(code, axis, 32 if axis == "channel" else 16)
    inputs = make(None, 1, 3, 3, 1, 32, 4, dtype=dtype, device=device)
    pages = packed([96, 33, 0], 3, 32, form, form, 64, 16, dtype=dtype, device=device)
    # in half precision the definition is exact and the kernel rounds what it multiplies
    compare(inputs | {"pages": pages}, more=1 if dtype != torch.float32 else 2)


MIXED = {
    "vidkv": ((("int2", "channel", 64), ("ternary", "channel", 64)), 64, 16),
    "kivi": ((("int2", "channel", 32), ("int2", "token", 16)), 128, 32),
    "keys per token": ((("int4", "token", 48), ("sign", "channel", 32)), 64, 32),
    "8 and 1": ((("int8", "channel", 64), ("int1", "channel", 32)), 64, 32),
    "five and one": ((("ternary", "channel", 160), ("fp8", "channel", 80)), 160, 16),
}


@pytest.mark.parametrize(("queries", "masked"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("mix", MIXED)
def test_pages_before_flat_keys_before_the_tail(mix, queries, masked, device):
    (keys, values), page, tile = MIXED[mix]
    inputs = make([5, 80, 0, 1], 2, 2, 4, queries, 48, 5, masked=masked, device=device)
    inputs["pages"] = packed([200, 0, 33, 2 * page], 2, 48, Format(*keys), Format(*values), page, tile, device=device)
    if masked:
        most = int(inputs["pages"].lengths().max())
        more = torch.rand(2, 2, queries, most, generator=torch.Generator().manual_seed(3)) < 0.5
        inputs["visible"] = torch.cat([more.to(device), inputs["visible"]], dim=-1)
    compare(inputs, more=3)


@pytest.mark.parametrize("widths", [(32, 16), (8, 40)])
def test_keys_in_two_planes(widths, device):
    inputs = make([5, 80], 2, 1, 4, 1, 48, 5, device=device)
    planes = [(Format("int2", "channel", 32), widths[0]), (Format("int1", "channel", 64), widths[1])]
    inputs["pages"] = packed([200, 130], 1, 48, planes, Format("ternary", "channel", 64), 128, 16, device=device)
    compare(inputs, more=3)


@pytest.mark.parametrize("width", [7, 16, 20])
def test_keys_without_some_channels(width, device):
    """What is left of them, other channels in every head, meets the same channels of the query."""
    inputs = make([5, 80, 0, 9], 2, 2, 3, 3, 32, 5, masked=True, device=device)
    planes = [(Format("int4", "channel", 32), width)]
    pages = packed([200, 130, 0, 33], 2, 32, planes, Format("int4", "token", 16), 64, 16, device=device)
    pages = dataclasses.replace(pages, key_width=32)
    more = torch.rand(2, 2, 3, 200, generator=torch.Generator().manual_seed(3)) < 0.5
    inputs["visible"] = torch.cat([more.to(device), inputs["visible"]], dim=-1)
    compare(inputs | {"pages": pages}, more=3)
    keys = pages.decoded()[0]
    assert keys.shape == (363, 32) and ((keys != 0).sum(1) <= width).all()


@pytest.mark.parametrize("width", [15, 16])
@pytest.mark.parametrize("queries", [1, 3])
def test_keys_coded_as_waves(queries, width, device):
    """One plane of two: the pages meet a query turned as they are, and the tail one that is not."""
    inputs = make(None, 2, 2, 3, queries, 32, 5, device=device)
    planes = [(Format("int2", "channel", 32), 32 - width), (Format("int8", "channel", 32, fourier=True), width)]
    pages = packed([200, 130, 0, 33], 2, 32, planes, Format("int8", "channel", 32), 64, 16, device=device)
    out, _ = compare(inputs | {"pages": pages}, more=3)
    turned = pages.turned(inputs["query"])
    first = pages.keys[0].channels[1].long()
    assert torch.equal(turned[0, 4][..., first], inputs["query"][0, 4][..., first])
    assert not torch.equal(turned, inputs["query"])
    # 8 bits lose little: what comes back are the channels that went in
    plain = [(planes[0][0], 32 - width), (Format("int8", "channel", 32), width)]
    same = packed([200, 130, 0, 33], 2, 32, plain, Format("int8", "channel", 32), 64, 16, device=device)
    torch.testing.assert_close(pages.decoded()[0], same.decoded()[0], atol=0.04, rtol=0)
    torch.testing.assert_close(out, decode_attention_kernel(scaling=0.125, **inputs, pages=same)[0], atol=0.04, rtol=0)


@pytest.mark.parametrize(("queries", "masked"), [(1, False), (3, True)])
@pytest.mark.parametrize("code", BOOKS)
def test_rotated_keys_and_values_by_books(code, queries, masked, device):
    """Queries are rotated and values rotated back; neither the tail nor flat keys are touched."""
    inputs = make([5, 80, 0, 1], 2, 2, 4, queries, 32, 5, masked=masked, device=device)
    form = Format(code, "token", 32, seed=3, book=BOOKS[code])
    inputs["pages"] = packed([200, 0, 33, 128], 2, 32, form, form, 128, 16, device=device)
    if masked:
        more = torch.rand(2, 2, queries, 200, generator=torch.Generator().manual_seed(3)) < 0.5
        inputs["visible"] = torch.cat([more.to(device), inputs["visible"]], dim=-1)
    compare(inputs, more=3)


@pytest.mark.parametrize(
    ("keys", "values", "page", "tile"),
    [
        (("int4", "channel", 32), ("int4", "token", 32), 64, 16),
        (("int2", "channel", 32), ("int2", "token", 32), 128, 8),
        (("fp8", "token", 32), ("fp8", "token", 32), 64, 16),
        (("int4", "channel", 32), ("ternary", "channel", 80), 160, 16),
    ],
    ids=["loop 4", "loop 2", "loop 8", "tiles"],
)
@pytest.mark.parametrize(("queries", "masked"), [(1, False), (3, True)])
def test_products_that_are_added(keys, values, page, tile, queries, masked, device):
    """The same as keys from which nothing was taken: here what is added is their products with other keys."""
    inputs = make([5, 80, 0, 1], 2, 2, 4, queries, 32, 5, masked=masked, device=device)
    pages = packed([2 * page, 0, 33, page], 2, 32, Format(*keys), Format(*values), page, tile, device=device)
    most = int(pages.lengths().max())
    rng = torch.Generator().manual_seed(4)
    if masked:
        more = torch.rand(2, 2, queries, most, generator=rng) < 0.5
        inputs["visible"] = torch.cat([more.to(device), inputs["visible"]], dim=-1)
    added = torch.randn(2, 8, queries, most, generator=rng).to(device) * 4
    out, lse = compare(inputs | {"pages": pages, "added": added}, more=3)
    assert not torch.allclose(lse, decode_attention_definition(scaling=0.125, **inputs, pages=pages)[1])
    with pytest.raises(ValueError, match="added must be float32"):
        decode_attention(scaling=0.125, **inputs, pages=pages, added=added.half())


@pytest.mark.parametrize(
    ("name", "width", "alone"),
    [
        ("factors", 32, False),
        ("rotated", 48, False),
        ("both", 48, True),
        ("both", 32, False),
        ("in a loop", 32, False),
        ("in a loop", 32, True),
        ("values only", 32, False),
        ("keys only", 32, False),
    ],
)
def test_factors_and_rotations_are_part_of_launches(name, width, alone, device, monkeypatch):
    """Queries are turned where other keys are read, and values where all is merged: no operation is between the launches."""
    key, value = {
        "factors": (Format("int4", "channel", 32), Format("int4", "token", width)),
        "rotated": (Format("int8", "channel", 32, seed=2), Format("int8", "token", width, seed=4)),
        "both": (Format("int3", "token", width, seed=2), Format("int3", "token", width, seed=4)),
        "in a loop": (Format("int4", "channel", 32, seed=2), Format("int4", "token", 32, seed=4)),
        "keys only": (Format("int3", "token", width, seed=2), Format("int4", "token", width)),
        "values only": (Format("int8", "channel", 32), Format("int8", "token", width)),
    }[name]
    inputs = make(None if alone else [5, 80, 0, 1], 2, 2, 4, 3, width, 0 if alone else 5, device=device)
    pages = packed([200, 0, 33, 128], 2, width, key, value, 128, 16, device=device)
    rng = torch.Generator().manual_seed(5)
    if name not in ("rotated", "keys only"):
        factors = [(0.5 + torch.rand(4, width, generator=rng)).to(device) for _ in range(2)]
        keys = [dataclasses.replace(pages.keys[0], factor=None if name == "values only" else factors[0])]
        values = [dataclasses.replace(pages.values[0], factor=factors[1])]
        pages = dataclasses.replace(pages, keys=tuple(keys), values=tuple(values))
    looped = paged.fits(pages.with_values_as_stored(), inputs["query"], width)
    assert looped == (name in ("factors", "in a loop", "values only"))
    compare(inputs | {"pages": pages}, more=4)
    monkeypatch.setattr(Pages, "turned", None if name != "values only" else lambda pages, query: query)
    decode_attention_kernel(scaling=0.125, **inputs, pages=pages)


@pytest.mark.parametrize("width", [16, 24])
def test_halves_of_keys_rotated_apart(width, device):
    inputs = make(None, 2, 2, 3, 1, 48, 5, device=device)
    planes = [
        (Format(code, "token", n, seed=3, book=BOOKS[code]), n) for code, n in (("book3", width), ("book2", 48 - width))
    ]
    value = Format("book4", "token", 48, seed=5, book=BOOKS["book4"])
    pages = packed([200, 130, 0, 33], 2, 48, planes, value, 64, 16, device=device)
    compare(inputs | {"pages": pages}, more=3)


@pytest.mark.parametrize(("sides", "masked"), [("keys", False), ("values", True), ("both", True)])
def test_halves_that_are_rotated_apart_are_part_of_launches(sides, masked, device, monkeypatch):
    """Of keys and of values, in channels of which every head has others."""
    inputs = make([5, 80, 0, 1], 2, 2, 3, 1, 48, 5, masked=masked, device=device)
    form = Format("book4", "token", 48, seed=5, book=BOOKS["book4"])
    halves = [(Format(code, "token", 24, seed=3, book=BOOKS[code]), 24) for code in ("book3", "book2")]
    forms = (form if sides == "values" else halves, form if sides == "keys" else halves)
    pages = packed([200, 130, 0, 33], 2, 48, *forms, 64, 16, device=device)
    if masked:
        more = torch.rand(2, 2, 1, 200, generator=torch.Generator().manual_seed(4)) < 0.5
        inputs["visible"] = torch.cat([more.to(device), inputs["visible"]], dim=-1)
    # no operation is between the launches
    monkeypatch.setattr(Pages, "turned", None)
    compare(inputs | {"pages": pages}, more=4)


def with_remainder(plane, page, rank, single, seed):
    """A plane with a product of so many columns, and so many single numbers of every channel, or token."""
    rng = torch.Generator().manual_seed(seed)
    (n, width), of_channel = (len(plane.scale), plane.codes.shape[2]), plane.format.axis == "channel"
    lines, size = (width, page) if of_channel else (page, width)
    slot = torch.stack([torch.randperm(size, generator=rng)[:single] for _ in range(n * lines)]).view(n, lines, single)
    line = torch.arange(lines)[:, None]
    place = slot * width + line if of_channel else line * width + slot
    value = torch.randn(n, lines, single, generator=rng) * 3
    left, right = torch.randn(n, page, rank, generator=rng), torch.randn(n, rank, width, generator=rng)
    parts = (left, right) if rank else (None, None)
    parts += (value.flatten(1), place.flatten(1).short()) if single else (None, None)
    device = plane.codes.device
    return dataclasses.replace(plane, rest=Remainder(*(x if x is None else x.to(device) for x in parts)))


@pytest.mark.parametrize(
    ("key", "value", "rank", "single", "queries"),
    [
        (("int4", "channel", 32), ("int4", "token", 32), 4, 2, 1),
        (("int8", "channel", 16), ("int8", "channel", 64), 0, 3, 3),
        (("book2", "token", 32), ("book2", "token", 32), 1, 0, 1),
    ],
)
def test_what_codes_lack_is_added_in_the_same_launches(key, value, rank, single, queries, device, monkeypatch):
    inputs = make([5, 80, 0, 1], 2, 2, 3, queries, 32, 5, device=device)
    forms = [
        Format(*one, **({"seed": 3, "book": BOOKS[one[0]]} if one[0].startswith("book") else {}))
        for one in (key, value)
    ]
    pages = packed([200, 130, 0, 33], 2, 32, *forms, 64, 16, device=device)
    bare = decode_attention_definition(scaling=0.125, **inputs, pages=pages)[0]
    sides = [(with_remainder(side[0], 64, rank, single, seed),) for seed, side in enumerate((pages.keys, pages.values))]
    pages = dataclasses.replace(pages, keys=sides[0], values=sides[1])
    monkeypatch.setattr(Pages, "turned", None if forms[0].seed is not None else lambda pages, query: query)
    out, lse = decode_attention_kernel(scaling=0.125, **inputs, pages=pages)
    want, want_lse = decode_attention_definition(scaling=0.125, **inputs, pages=pages)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(want, bare, atol=1e-2)


@pytest.mark.parametrize("programs", [1, 2, 3, 4])
def test_heads_without_a_page_and_no_tail(programs, monkeypatch, device):
    """Pages alone, as one of several parts of a cache."""
    monkeypatch.setattr(kernel, "PROGRAMS_EACH", 1)
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    form = Format("int4", "channel", 32)
    inputs = make(None, 3, 2, 2, 1, 32, 0, device=device)
    pages = packed([0, 32, 0, 96, 64, 0], 2, 32, form, form, 32, 16, device=device)
    monkeypatch.setattr(
        kernel, "workspace", lambda like, *sizes: [torch.full((n,), math.nan, device=like.device) for n in sizes]
    )
    out, lse = compare(inputs | {"pages": pages}, more=3)
    assert (lse[0, :2] == -torch.inf).all() and (out[2, 2:] == 0).all()


def test_pages_that_were_appended_and_shared(device):
    form = Format("int4", "channel", 32)
    one, two = (packed(n, 1, 32, form, form, 32, 16, seed=i) for i, n in enumerate(([40, 5], [33, 64])))
    pages = one.appended(two).selected(torch.tensor([1, 0, 1]))
    assert pages.lengths().flatten().tolist() == [69, 73, 69]
    inputs = make(None, 3, 1, 2, 1, 32, 2, device=device)
    visible = torch.rand(3, 1, 1, int(pages.lengths().max()) + 2, generator=torch.Generator().manual_seed(3))
    compare(inputs | {"pages": on(pages, device), "visible": (visible < 0.7).to(device)}, more=3)


def test_scales_do_not_carry_a_query_beyond_float16(device):
    form = Format("fp8", "channel", 32)
    inputs = make(None, 1, 1, 2, 1, 32, 1, dtype=torch.float16, device=device)
    inputs["query"] *= 200
    pages = packed([64], 1, 32, form, form, 32, 16, dtype=torch.float16)
    pages.keys[0].scale.mul_(200)
    out, _ = compare(inputs | {"pages": on(pages, device)}, scaling=1e-4, more=3)
    assert out.isfinite().all()


def test_pages_the_kernel_cannot_read_go_through_the_definition(device):
    form = Format("int4", "channel", 8)
    inputs = make([5, 80], 2, 1, 4, 1, 32, 5, device=device) | {"pages": packed([20, 1], 1, 32, form, form, 16, 8)}
    inputs["pages"] = on(inputs["pages"], device)
    out, _ = decode_attention(scaling=0.125, **inputs)
    assert torch.equal(out, decode_attention_definition(scaling=0.125, **inputs)[0])
    with pytest.raises(ValueError, match="and tiles of 16 to 128"):
        decode_attention_kernel(scaling=0.125, **inputs)


# --- compiled steps ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["dense", "ragged, masked", "pages"])
def test_a_compiled_step_is_one_graph(kind):
    _, spare = roomy(
        20, 64, q=1, d=32, masked=kind == "ragged, masked", lengths=None if kind == "dense" else [5, 9, 0, 7]
    )
    if kind == "pages":
        form = Format("int4", "channel", 32)
        planes = [(Format("int2", "channel", 32), 16), (Format("int8", "channel", 32, fourier=True), 16)]
        spare["pages"] = packed([40, 0, 64, 3], 2, 32, planes, form, 32, 16)
    graphs = []

    def step(given, tail):
        return decode_attention(**given | {"tail": tail}, scaling=0.3)

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for filled in (1, 2, 20):
        tail = torch.tensor([filled], dtype=torch.int32)
        for mine, its in zip(compiled(spare, tail), step(spare, tail), strict=True):
            assert torch.equal(mine, its)
    assert len(graphs) == 1 and "mmaccel.decode_attention" in str(graphs[0].graph)


def test_the_operator_says_what_it_gives():
    inputs = make([5, 90, 0, 77], 2, 2, 3, 1, 16, 6)
    flat = list(inputs["flat"][:3])
    given = (
        *(inputs[name] for name in ("query", "keys", "values")),
        0.3,
        flat,
        inputs["flat"].width,
        [],
        "",
        None,
        None,
    )
    torch.library.opcheck(torch.ops.mmaccel.decode_attention.default, given)


# --- the loop over pages of its own -----------------------------------------------------------------------------------
PAGED = {
    "kivi 4": (("int4", "channel", 32), ("int4", "token", 32), 128, 16),
    "kivi 2": (("int2", "channel", 32), ("int2", "token", 32), 128, 8),
    "kivi 8": (("int8", "channel", 32), ("int8", "token", 64), 128, 32),
    "4 bits in longer pages": (("int4", "channel", 64), ("int4", "token", 32), 256, 16),
    "4 bits and 2": (("int4", "channel", 128), ("int2", "token", 32), 256, 16),
    "fp8": (("fp8", "token", 256), ("fp8", "token", 256), 64, 16),
    "fp8 by channel": (("fp8", "channel", 64), ("fp8", "channel", 64), 64, 16),
    "one range, 4 bits": (("int4", "channel", 128), ("int4", "channel", 128), 128, 16),
    "one range, 2 bits": (("int2", "channel", 256), ("int2", "channel", 256), 256, 16),
    "one range, 1 bit": (("int1", "channel", 256), ("int1", "channel", 256), 256, 8),
    "signs": (("sign", "channel", 64), ("sign", "channel", 64), 256, 8),
    "by token": (("int4", "token", 256), ("sign", "token", 64), 256, 8),
    "levels, 2 bits": (("book2", "token", 256), ("book2", "token", 256), 128, 16),
    "levels, 3 bits": (("book3", "token", 256), ("book3", "token", 256), 128, 16),
    "levels, 4 bits": (("book4", "token", 256), ("book4", "token", 256), 128, 16),
}
HALVES = (torch.float16, torch.bfloat16)


def paged_inputs(name, dtype, device, *, lengths=(300, 0, 5, 128), d=128, groups=7, queries=1, tail=5, masked=False):
    """What the loop over pages takes: two rows of two heads; parts of pages are filled."""
    keys, values, page, tile = PAGED[name]
    forms = [
        Format(code, axis, min(group, d) if axis == "token" else group, book=BOOKS.get(code, ()))
        for code, axis, group in (keys, values)
    ]
    inputs = make(None, 2, 2, groups, queries, d, tail, dtype=dtype, device=device)
    inputs["pages"] = packed(list(lengths), 2, d, *forms, page, tile, dtype=dtype, device=device)
    if masked:
        columns = int(inputs["pages"].lengths().max()) + tail
        seen = torch.rand(2, 2, queries, columns, generator=torch.Generator().manual_seed(3)) < 0.6
        seen[0, 0, 0] = False
        inputs["visible"] = seen.to(device)
    # levels have a loop in CUDA C++ alone
    assert paged.fits(inputs["pages"], inputs["query"], d) != name.startswith("levels")
    return inputs


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("name", PAGED)
def test_pages_alone_are_read_as_the_definition_says(name, dtype, device):
    # in float32 the definition itself is 1.1e-5 from float64 at one bit, and the kernel 5e-6
    compare(paged_inputs(name, dtype, device), more=6 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("d", [32, 64, 256])
@pytest.mark.parametrize("name", ["kivi 4", "kivi 2", "one range, 4 bits", "fp8"])
def test_pages_of_heads_of_other_sizes(name, d, device):
    compare(paged_inputs(name, HALVES[d == 64], device, d=d, groups=3), more=3)


@pytest.mark.parametrize(("groups", "queries", "masked"), [(1, 1, True), (4, 3, True), (4, 3, False), (20, 1, False)])
@pytest.mark.parametrize("name", ["kivi 4", "kivi 2", "one range, 1 bit"])
def test_pages_for_several_queries_and_under_a_mask(name, groups, queries, masked, device):
    compare(paged_inputs(name, torch.float16, device, groups=groups, queries=queries, masked=masked), more=3)


@pytest.mark.parametrize("programs", [1, 3, 50])
def test_pages_alone_over_any_number_of_programs(programs, monkeypatch, device):
    monkeypatch.setattr(kernel, "PROGRAMS_EACH", 1)
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: programs)
    new_empty = torch.Tensor.new_empty

    def unwritten(x, *shape, **options):
        made = new_empty(x, *shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    monkeypatch.setattr(
        paged, "workspace", lambda like, *sizes, use: [torch.full((n,), math.nan, device=like.device) for n in sizes]
    )
    inputs = paged_inputs("kivi 2", torch.float16, device, lengths=(0, 700, 0, 130), tail=0)
    out, lse = compare(inputs, more=3)
    assert (lse[0, :7] == -torch.inf).all() and (out[1, :7] == 0).all()


@pytest.mark.parametrize("width", [48, 80, 112])
def test_pages_of_keys_without_some_channels(width, device):
    inputs = make([5, 80], 2, 1, 7, 1, 128, 5, dtype=torch.float16, device=device)
    planes = [(Format("int4", "channel", 32), width)]
    pages = packed([200, 130], 1, 128, planes, Format("int4", "token", 32), 128, 16, dtype=torch.float16, device=device)
    pages = dataclasses.replace(pages, key_width=128)
    assert paged.fits(pages, inputs["query"], 128)
    compare(inputs | {"pages": pages}, more=3)


def rows_of_all_sizes(dtype, device):
    """Pages, and for every head of a group a query of another size, from nothing to nearly more than float16 has."""
    inputs = paged_inputs("kivi 4", dtype, device)
    rows = torch.tensor([1e-6, 1.0, 3e4, 0.0, 1e3, 7.0, 0.1]).to(device)
    scaled = inputs["query"].float().view(2, 2, 7, 1, 128) * rows[:, None, None]
    return inputs | {"query": scaled.view(2, 14, 1, 128).to(dtype).clamp(-6e4, 6e4)}


def check_values_of_any_size(factor, dtype, device):
    """One key has most of the weight, a thousand others the rest; scales of values are as large as they are kept."""
    inputs = paged_inputs("kivi 2", dtype, "cpu", lengths=(1024, 0, 0, 0), tail=0)
    plane = inputs["pages"].values[0]
    for x in (plane.scale, plane.zero):
        x.copy_((x.float() * factor).clamp(-SCALE_MAX, SCALE_MAX))
    keys = inputs["pages"].decoded()[0].float()
    one = keys[3] - keys.mean(0)
    reach = keys @ one
    inputs["query"] = one.to(dtype).expand_as(inputs["query"])
    inputs = {name: on(x, device) if x is not None else None for name, x in inputs.items()}
    scaling = float(9 / (reach[3] - reach.mean()))
    out, _ = decode_attention_kernel(scaling=scaling, **inputs)
    want, _ = decode_attention_definition(scaling=scaling, **inputs)
    # of the whole vector, not of each number
    assert (out - want).float().norm() < TOLERANCE[dtype] * want.float().norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_no_query_is_too_large_or_too_small_for_the_loop_over_pages(dtype, device):
    out, _ = compare(rows_of_all_sizes(dtype, device), scaling=1e-5, more=3)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [1.0, 2e-4, 1e6])
def test_no_value_is_too_large_or_too_small_for_the_loop_over_pages(factor, dtype, device):
    check_values_of_any_size(factor, dtype, device)


@pytest.mark.parametrize("name", ["kivi 4", "kivi 2", "one range, 1 bit"])
def test_pages_alone_read_every_code_once(name, meter):
    inputs = paged_inputs(name, torch.bfloat16, "cpu", lengths=(512, 256, 256, 256))
    decode_attention_kernel(scaling=1.0, **inputs)
    for plane in (inputs["pages"].keys[0], inputs["pages"].values[0]):
        for x in plane.tensors():
            # by words, but for the scales of tokens
            as_read = x if x.dtype == torch.float16 and plane.format.axis == "token" else x.view(torch.int32)
            assert meter.bytes_of(as_read)[1] == x.nbytes
    codes = [of.codes for of in (inputs["pages"].keys[0], inputs["pages"].values[0])]
    assert all(meter.bytes_of(x.view(torch.int32))[0] == x.nbytes for x in codes)


# --- bytes and operations ---------------------------------------------------------------------------------------------
class Meter:
    """What a kernel loads and multiplies in the interpreter."""

    def __init__(self, monkeypatch):
        builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
        self.loads, self.multiplied = [], 0
        load, dot = builder.create_masked_load, builder.create_dot

        def counted_load(pointers, mask, *rest):
            self.loads.append((pointers.data[mask.data].ravel(), pointers.get_element_ty().primitive_bitwidth // 8))
            return load(pointers, mask, *rest)

        def counted_dot(a, b, *rest):
            self.multiplied += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return dot(a, b, *rest)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_dot", counted_dot)

    def bytes_of(self, x):
        """Bytes loaded of a tensor, and of how many different places."""
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        seen = [(at[(at >= begin) & (at < end)], size) for at, size in self.loads]
        return sum(len(at) * size for at, size in seen), len({int(a) for at, _ in seen for a in at}) * x.element_size()


@pytest.fixture
def meter(monkeypatch, device):
    if device != "cpu":
        pytest.skip("loads are counted in the interpreter")
    return Meter(monkeypatch)


def test_every_key_is_read_once_for_all_heads_of_its_group(meter, monkeypatch):
    # one program for all, so that no tile is shared
    monkeypatch.setattr(kernel, "PROGRAMS_EACH", 1)
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: 1)
    inputs = make([300, 0, 64, 70], 2, 2, 7, 1, 32, 5, dtype=torch.float16, masked=True, width=300)
    decode_attention_kernel(scaling=1.0, **inputs)
    flat, stored = inputs["flat"], 0
    for x in (flat.keys, flat.values, inputs["keys"], inputs["values"]):
        assert meter.bytes_of(x) == (x.nbytes, x.nbytes)
        stored += x.nbytes
    # of the mask of a short head only what it has
    assert meter.bytes_of(inputs["visible"]) == (434 + 4 * 5,) * 2
    assert stored == (434 + 4 * 5) * 32 * 2 * 2
    moved, operations = decode_attention_cost(**inputs)
    query = out = 2 * 14 * 32 * 2
    assert moved == stored + query + out + 2 * 14 * 4 + flat.cu_lengths.nbytes + inputs["visible"].nbytes
    assert operations == 2 * 7 * (434 + 20) * 64
    # what is multiplied is padded to 16 rows and tiles of 64 keys: 5, 0, 1, 2 and the tails
    assert meter.multiplied == 2 * 16 * (5 + 0 + 1 + 2 + 4) * 64 * 64


def shares(monkeypatch, multiprocessors, tensors, **inputs):
    """Keys that every program reads, from the bytes it loads of ``tensors``, one token of one head of each 64 channels."""
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(kernel, "_multiprocessors", lambda device: multiprocessors)
    found, load = [0] * (kernel.PROGRAMS_EACH * multiprocessors), builder.create_masked_load

    def counted(pointers, mask, *rest):
        at = pointers.data[mask.data]
        for x, each in tensors:
            found[builder.grid_idx[0]] += int(((at >= x.data_ptr()) & (at < x.data_ptr() + x.nbytes)).sum()) // each
        return load(pointers, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted)
        compare(inputs, more=3)
    return found


@pytest.mark.parametrize(
    ("kind", "heads", "stored"),
    [("dense", 4, 1000), ("dense", 2, 1000), ("dense", 8, 1030), ("room", 4, 530), ("ragged", 1, 2100)],
)
def test_at_a_thousand_keys_the_multiprocessors_have_work(kind, heads, stored, monkeypatch, device):
    if device != "cpu":
        pytest.skip("shares are counted in the interpreter")
    if kind == "ragged":
        inputs = make([stored - 5] * heads, 1, heads, 2, 1, 16, 5)
        tensors = [(inputs["flat"].keys, 16), (inputs["keys"], 16)]
    else:
        inputs = make(None, 1, heads, 2, 1, 16, 4 * stored if kind == "room" else stored)
        inputs |= {"tail": torch.tensor([stored])} if kind == "room" else {}
        tensors = [(inputs["keys"], 16)]
    found = shares(monkeypatch, 132, tensors, **inputs)
    assert sum(found) == heads * stored
    assert sum(n > 0 for n in found) >= 0.9 * 132 and max(found) <= 64


def test_a_long_page_weighs_what_it_costs(monkeypatch, device):
    if device != "cpu":
        pytest.skip("shares are counted in the interpreter")
    form = Format("int4", "channel", 160)
    inputs = make([0, 1600, 0, 320], 1, 4, 2, 1, 16, 0)
    inputs["pages"] = packed([1600, 0, 1440, 320], 4, 16, form, form, 320, 16)
    # codes of two tokens are a byte
    tensors = [(inputs["flat"].keys, 16), (inputs["pages"].keys[0].codes, 8)]
    found = shares(monkeypatch, 3, tensors, **inputs)
    # five pages, five of which one is half empty, and one
    assert sum(found) == 1600 + 1440 + 320 + 1920
    assert max(found) <= sum(found) / 6 + 320 and min(found) >= sum(found) / 6 - 320


@pytest.mark.parametrize(("keys", "values"), [("int2", "int2"), ("int2", "ternary"), ("fp8", "int4"), ("sign", "int1")])
def test_every_code_is_read_once(keys, values, meter):
    inputs = make(None, 2, 1, 7, 1, 32, 1, dtype=torch.bfloat16)
    formats = [Format(code, "channel", 128) for code in (keys, values)]
    pages = packed([1280, 640], 1, 32, *formats, 640, 16, dtype=torch.bfloat16)
    decode_attention_kernel(scaling=1.0, **inputs, pages=pages)
    stored = 0
    for plane in (pages.keys[0], pages.values[0]):
        for x in plane.tensors():
            assert meter.bytes_of(x) == (x.nbytes, x.nbytes)
            stored += x.nbytes
    assert pages.nbytes() == stored + pages.cu_pages.nbytes + 3 * 4 * 3
    moved, operations = decode_attention_cost(**inputs, pages=pages)
    dense = sum(inputs[name].nbytes for name in ("query", "keys", "values")) + inputs["query"].nbytes + 2 * 7 * 4
    assert moved == pages.nbytes() + dense
    assert operations == 2 * 7 * (1920 + 2) * 64


def test_lengths_are_not_compiled_for():
    """Whatever grows while decoding is passed at run time, and not even looked at by the compiler."""
    changing = {"capacity", "flat_column", "tail_column", "mask_b", "mask_h", "mask_q", "heads", "rows"}
    assert changing <= set(kernel._CHANGING)


# --- refusals ---------------------------------------------------------------------------------------------------------
def refused(match, **changed):
    with pytest.raises(ValueError, match=match):
        decode_attention(**make([5, 3], 1, 2, 2, 1, 16, 4) | changed)


def test_wrong_shapes_are_refused_by_name():
    good = make([5, 3], 1, 2, 2, 1, 16, 4)
    flat = good["flat"]
    refused("shape \\[batch, heads", keys=good["keys"][0])
    refused("query must be float16", query=good["query"].double())
    refused("do not belong to a query", keys=good["keys"][..., :8])
    refused("do not belong to a query", values=good["values"][:, :, :3])
    refused("no multiple of the 2 heads", query=good["query"][:, :3])
    refused("keys is torch.float16", keys=good["keys"].half())
    refused("flat.keys .* must be \\[total, 16\\]", flat=flat._replace(keys=flat.keys[:3]))
    refused("flat.cu_lengths must be \\[3\\]", flat=flat._replace(cu_lengths=flat.cu_lengths[:2]))
    refused("visible must be bool \\[1, 1 or 2, 1, keys\\]", visible=torch.ones(1, 3, 1, 12, dtype=torch.bool))
    refused("tail must be \\[1\\] int32 or int64, not \\[2\\]", tail=torch.tensor([1, 2]))
    refused("tail must be .* not \\[1\\] torch.float32", tail=torch.ones(1))
    refused("tail is on meta", tail=torch.ones(1, dtype=torch.int32, device="meta"))
    refused("visible has 11 columns", visible=torch.ones(1, 2, 1, 11, dtype=torch.bool))
    form = Format("int2", "channel", 16)
    refused("pages hold 2 rows of 1 heads", pages=packed([16, 16], 1, 16, form, form, 16, 16))
    refused("pages hold 32 and 32 channels", pages=packed([16, 16], 2, 32, form, form, 16, 16))
    many = make(None, 1, 2, 2, 17, 16, 20)
    with pytest.raises(ValueError, match="at most 16"):
        decode_attention_kernel(scaling=1.0, **many)
    assert decode_attention(**many)[0].shape == (1, 4, 17, 16)


def test_the_scaling_is_that_of_the_paper_by_default():
    inputs = make([5, 3], 1, 2, 2, 1, 16, 4)
    assert torch.equal(decode_attention(**inputs)[0], decode_attention(**inputs, scaling=1 / math.sqrt(16))[0])


@pytest.mark.parametrize("lengths", [[40, 33, 90, 60], [0, 200, 1, 70], [128] * 4])
def test_a_cpu_reads_every_head_where_it_is_stored(lengths):
    given = make(lengths, 2, 2, 3, 1, 16, 5)
    flat = given["flat"]
    # room to spare
    spare = [torch.cat([x, torch.full((7, 16), torch.nan)]) for x in flat[:2]]
    given["flat"] = flat._replace(keys=spare[0], values=spare[1])
    assert reads_heads(given["query"], *spare, len(lengths))
    del given["visible"]
    for got, want in zip(
        heads_attention(scaling=0.125, **given), decode_attention_definition(scaling=0.125, **given), strict=True
    ):
        torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_a_cpu_pads_short_heads_and_other_types():
    given = make([LEAST] * 4, 2, 2, 3, 1, 16, 5)
    new, (keys, values) = given["query"], given["flat"][:2]
    assert reads_heads(new, keys, values, 4)
    assert not reads_heads(new, keys[1:], values[1:], 4)
    assert not reads_heads(new.half(), keys.half(), values.half(), 4)
    assert not reads_heads(new.expand(-1, -1, 2, -1), keys, values, 4)
    assert not reads_heads(new, keys, values[:, 1:], 4)
