"""Packed pages: codes to the bit, and the kernel against its definition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from mmaccel_kernels.pack import Shared, encode, measure, quantise, quantise_definition, quantise_kernel, to_e4m3
from mmaccel_kernels.pack.naive import SCALE_MAX
from mmaccel_kernels.pages import Format, Pages, cumulative, dequantise, from_e4m3, pack, split, unpack

CODES = ("sign", "ternary", "three", "int1", "int2", "int3", "int4", "int8", "fp8")
#: positive levels of codes that have a book
BOOKS = {
    "book1": (0.7979,),
    "book2": (0.4528, 1.5104),
    "book3": (0.2451, 0.7560, 1.3439, 2.1519),
    "book4": (0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: page, tile, group of tokens
GEOMETRY = ((128, 32, 32), (160, 16, 32), (32, 16, 32), (16, 16, 16))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def ragged(lengths, width, dtype=torch.float32, device="cpu", seed=0):
    """Flat tokens whose channels differ in offset and spread, as those of keys do."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), width, generator=rng) * torch.rand(width, generator=rng) * 3
    return (x + torch.randn(width, generator=rng) * 4).to(dtype).to(device)


def to_pages(x, lengths, keys, values, page, tile, heads, **options):
    start, count, cu_pages = split(torch.tensor(lengths), page)
    planes = [(quantise(x, start, count, f, page=page, tile=tile, **options),) for f in (keys, values)]
    n = torch.arange(len(count), dtype=torch.int32)
    return Pages(*planes, page, tile, count, n, n.clone(), cu_pages, heads)


# --- codes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("page", "tile"), [(160, 32), (128, 16), (320, 16), (32, 8), (96, 32)])
def test_packing_is_lossless_and_places_digits_as_specified(code, page, tile):
    format = Format(code, "channel", page)
    codes = torch.randint(0, 256 if code == "fp8" else format.levels, (3, page, 24), dtype=torch.int32)
    packed = pack(codes, format, tile)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, format.rows(page, tile), 24)
    assert torch.equal(unpack(packed, format, page, tile), codes)
    # one token by hand, from the words of the specification
    t, m = page - 1, format.digits
    if code == "int3":
        rows = -(-page // (4 * tile)) * tile
        low = int(packed[1, t // tile // 4 * tile + t % tile, 5]) >> t // tile % 4 * 2 & 3
        high = int(packed[1, rows + t // tile // 8 * tile + t % tile, 5]) >> t // tile % 8 & 1
        assert low + 4 * high == codes[1, t, 5]
        return
    byte = int(packed[1, t // tile // m * tile + t % tile, 5])
    digit = t // tile % m
    by_hand = (byte * 3**digit % 256) * 3 >> 8 if code == "ternary" else byte >> digit * (8 // m) & ((1 << 8 // m) - 1)
    assert by_hand == codes[1, t, 5]


def test_every_five_ternary_digits_survive():
    codes = torch.tensor(list(itertools.product(range(3), repeat=5)), dtype=torch.int32).view(243, 5, 1)
    format = Format("ternary", "channel", 5)
    assert torch.equal(unpack(pack(codes, format, 1), format, 5, 1), codes)


def test_e4m3_is_that_of_torch():
    byte = torch.arange(256)
    number = byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
    finite = ~number.isnan()
    assert torch.equal(from_e4m3(byte)[finite], number[finite])
    between = (number[finite].sort().values[:-1] + number[finite].sort().values[1:]) / 2
    x = torch.cat([number[finite], between, torch.randn(4096) * 60, torch.randn(4096) * 0.02]).clamp(-448, 448)
    assert torch.equal(from_e4m3(to_e4m3(x)), x.to(torch.float8_e4m3fn).float())
    assert from_e4m3(to_e4m3(torch.tensor([1e9, -1e9]))).tolist() == [448.0, -448.0]


def test_bytes_are_as_many_as_the_bits_say():
    def bits(code, page=640, tile=16):
        return Format(code, "channel", 32).rows(page, tile) * 8 / page

    assert [bits(code) for code in CODES] == [1, 1.6, 2, 1, 2, 3, 4, 8, 8]


# --- the definition ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("code", CODES)
def test_numbers_come_back_within_half_a_step(code, axis):
    format = Format(code, axis, 32)
    x = torch.randn(4, 128, 96) * 2 + 1
    scale, zero = measure(x, torch.ones(4, 128, dtype=torch.bool), format)
    back = dequantise(encode(x, format, scale, zero), format, scale, zero)
    step = scale.repeat_interleave(32, dim=1 if axis == "channel" else 2)
    if code == "fp8":
        # 3 bits of mantissa, and multiples of 2^-9 near nought
        assert ((back - x).abs() <= (x.abs() / 16).maximum(step / 1024) * 1.0001).all()
    elif format.affine:
        assert ((back - x).abs() <= step * 0.5001).all()
    else:
        inner = x.abs() < step * (1.5 if format.levels == 3 else 1)
        assert ((back - x).abs()[inner] <= step[inner] * 0.5001).all()
        assert set((back / step).round(decimals=4).unique().tolist()) <= {-1, -0.5, 0, 0.5, 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("code", ["int1", "int2", "int4", "int8"])
def test_constant_groups_decode_to_their_number(code, axis, dtype):
    x = torch.full((32, 32), 3.25, dtype=dtype)
    plane = quantise(
        x, torch.tensor([0]), torch.tensor([32], dtype=torch.int32), Format(code, axis, 16), page=32, tile=16
    )
    one, nought = torch.arange(1), torch.zeros(1, dtype=torch.long)
    assert torch.equal(plane.decoded(32, 16, one, nought)[0], x.float())
    codes = encode(x.float()[None], plane.format, plane.scale, plane.zero)
    assert (codes == 0).all(), "nothing was divided by zero"


def test_groups_of_nought_decode_to_nought():
    for code, axis in itertools.product(CODES, ("channel", "token")):
        x = torch.zeros(32, 32)
        format = Format(code, axis, 16)
        plane = quantise(x, torch.tensor([0]), torch.tensor([20], dtype=torch.int32), format, page=32, tile=16)
        decoded = plane.decoded(32, 16, torch.arange(1), torch.zeros(1, dtype=torch.long))
        assert torch.equal(decoded[0, :20], x[:20])
        assert decoded.isfinite().all()


def test_codes_are_chosen_for_the_scales_that_are_stored():
    """With scales of few digits the error stays below half a step, but for what the zero point lost at the ends."""
    x = (torch.randn(64, 32) + 40).to(torch.bfloat16)
    one = (torch.tensor([0]), torch.tensor([64], dtype=torch.int32))
    plane = quantise(x, *one, Format("int4", "channel", 64), page=64, tile=16, meta_dtype=torch.bfloat16)
    assert plane.scale.dtype == plane.zero.dtype == torch.bfloat16
    back = plane.decoded(64, 16, torch.arange(1), torch.zeros(1, dtype=torch.long))[0]
    inside = (x >= plane.zero[0]) & (x.float() <= plane.zero[0].float() + 15 * plane.scale[0].float())
    assert inside.float().mean() > 0.8
    assert ((back - x.float()).abs() <= plane.scale[0].float() * 0.501)[inside].all()


@pytest.mark.parametrize(
    ("dtype", "stored"), [*zip(DTYPES, (torch.float16, torch.float16, torch.float32), strict=False)]
)
def test_scales_of_numbers_of_16_bits_are_float16(dtype, stored):
    x = torch.randn(64, 32).to(dtype)
    one = (torch.tensor([0]), torch.tensor([64], dtype=torch.int32))
    plane = quantise(x, *one, Format("int4", "channel", 64), page=64, tile=16)
    assert plane.scale.dtype == plane.zero.dtype == stored


@pytest.mark.parametrize(("axis", "most"), [("channel", 65504), ("token", SCALE_MAX)])
def test_scales_that_float16_cannot_hold_are_its_largest(axis, most, device):
    x = torch.randn(64, 32).to(torch.bfloat16).to(device)
    # of token 3 and of channel 5
    x[3, 5], x[4, 5], x[3, 6] = -3e5, 3e6, 3e6
    one = (torch.tensor([0], device=device), torch.tensor([64], dtype=torch.int32, device=device))
    format = Format("int4", axis, 64 if axis == "channel" else 32)
    want = quantise_definition(x, *one, format, 64, 16, torch.float16)
    assert want.zero.min() == -65504 and want.scale.max() == most
    made = quantise_kernel(x, *one, format, 64, 16, torch.float16)
    assert all(map(torch.equal, made.tensors(), want.tensors()))


def test_channels_that_share_scales_by_token_are_interleaved():
    format = Format("int4", "token", 32)
    codes = torch.zeros(1, 16, 128, dtype=torch.int32)
    codes[0, 3, 70] = 9
    byte = pack(codes, format, 16)[0, 3]
    # channel 70 is 6 in its group, the third: in the eighth of 4 that has 4 to 7, place 2
    assert byte.nonzero().tolist() == [[1 * 16 + 2 * 4 + 2]]
    assert torch.equal(unpack(byte.expand(1, 16, 128), format, 16, 16)[0, 3], codes[0, 3])


def test_padding_of_a_page_changes_nothing():
    """A short page has the scales of its own tokens, whatever stands behind them."""
    x = ragged([40], 32)
    start, count = torch.tensor([0]), torch.tensor([24], dtype=torch.int32)
    for code, axis in itertools.product(CODES, ("channel", "token")):
        format = Format(code, axis, 32)
        short = quantise(x, start, count, format, page=32, tile=16)
        other = quantise(torch.cat([x[:24], x[24:] * 1e3]), start, count, format, page=32, tile=16)
        assert all(map(torch.equal, short.tensors(), other.tensors()))


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
@pytest.mark.parametrize("width", [64, 80])
def test_books_of_rotated_tokens_lose_what_the_best_quantiser_loses(bits, error, width):
    """The mean square errors are those of Max's table, although one channel is larger than the others."""
    code = f"book{bits}"
    x = torch.randn(512, width, generator=torch.Generator().manual_seed(1))
    x[:, 5] *= 3
    one = (torch.tensor([0]), torch.tensor([512], dtype=torch.int32))
    plane = quantise(
        x, *one, Format(code, "token", width, seed=7, book=BOOKS[code], corrected=False), page=512, tile=16
    )
    back = plane.decoded(512, 16, None, None)[0]
    assert float((back - x).square().sum() / x.square().sum()) == pytest.approx(error, rel=0.15)
    # the scales make tokens as long as they were
    plane = quantise(x, *one, Format(code, "token", width, seed=7, book=BOOKS[code]), page=512, tile=16)
    torch.testing.assert_close(plane.decoded(512, 16, None, None)[0].norm(dim=1), x.norm(dim=1), rtol=1e-4, atol=0)


def test_a_token_is_coded_as_if_alone():
    x = torch.randn(64, 80)
    form = Format("book3", "token", 80, seed=7, book=BOOKS["book3"])
    one = (torch.tensor([0]), torch.tensor([64], dtype=torch.int32))
    whole = quantise(x, *one, form, page=64, tile=16).decoded(64, 16, None, None)[0]
    for token in (0, 17, 63):
        one = (torch.tensor([token]), torch.tensor([1], dtype=torch.int32))
        assert torch.equal(quantise(x, *one, form, page=64, tile=16).decoded(64, 16, None, None)[0, 0], whole[token])


def test_a_book_has_as_many_levels_as_its_code():
    with pytest.raises(ValueError, match="1 positive levels"):
        Format("book3", "token", 32, book=(1.0,))
    with pytest.raises(ValueError, match="axis='token'"):
        Format("book2", "channel", 32, book=BOOKS["book2"])


# --- pages ------------------------------------------------------------------------------------------------------------
LENGTHS = [70, 1, 128, 33]
KEYS, VALUES = Format("int2", "channel", 32), Format("int4", "token", 32)


def two_heads(lengths, seed):
    return to_pages(ragged(lengths, 32, seed=seed), lengths, KEYS, VALUES, 64, 32, heads=2)


def test_ragged_heads_are_cut_and_read_back():
    x = ragged(LENGTHS, 32)
    fine = Format("int8", "channel", 32)
    pages = to_pages(x, LENGTHS, fine, fine, 64, 32, heads=2)
    assert pages.cu_pages.tolist() == [0, 2, 3, 5, 6]
    assert pages.count.tolist() == [64, 6, 1, 64, 64, 33]
    assert pages.lengths().tolist() == [[70, 1], [128, 33]]
    assert pages.batch == 2
    keys, values = pages.decoded()
    torch.testing.assert_close(keys, x, atol=0.06, rtol=0)
    assert torch.equal(keys, values)
    assert pages.decoded(torch.float16)[0].dtype == torch.float16


def test_appending_goes_behind_each_head_and_changes_nothing_written():
    first, second = two_heads(LENGTHS, 0), two_heads([64, 0, 5, 64], 1)
    both = first.appended(second)
    assert both.lengths().tolist() == [[134, 1], [133, 97]]
    at = cumulative(both.lengths().flatten()).tolist()
    for joined, a, b in zip(both.decoded(), first.decoded(), second.decoded(), strict=True):
        parts = zip(a.split(LENGTHS), b.split([64, 0, 5, 64]), strict=True)
        for head, (old, new) in enumerate(parts):
            assert torch.equal(joined[at[head] : at[head + 1]], torch.cat([old, new]))
    assert torch.equal(both.keys[0].codes[: len(first.count)], first.keys[0].codes)
    assert both.nbytes() == first.nbytes() + second.nbytes() - second.cu_pages.nbytes


def test_rows_are_selected_and_share_their_pages():
    pages = two_heads(LENGTHS, 0)
    chosen = pages.selected(torch.tensor([1, 0, 1]))
    assert chosen.lengths().tolist() == [[128, 33], [70, 1], [128, 33]]
    old, new = pages.decoded()[0].split([71, 161]), chosen.decoded()[0]
    assert torch.equal(new, torch.cat([old[1], old[0], old[1]]))
    assert len(chosen.count) == len(pages.count)
    alone = pages.selected(torch.tensor([1]))
    assert torch.equal(alone.decoded()[1], pages.decoded()[1][71:])
    assert len(alone.count) == 3
    assert alone.nbytes() < pages.nbytes()


def test_planes_hold_channels_of_their_own():
    x, page = ragged([64, 64], 32), 64
    start, count, cu_pages = split(torch.tensor([64, 64]), page)
    channels = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(i)) for i in range(2)]).int()
    parts = channels.split([20, 12], dim=1)
    fine = Format("int8", "channel", 64)

    def plane(part):
        picked = x.gather(1, part.long().repeat_interleave(64, dim=0))
        made = quantise(picked, start, count, fine, page=page, tile=16)
        return dataclasses.replace(made, channels=part)

    n = torch.arange(2, dtype=torch.int32)
    whole = quantise(x, start, count, fine, page=page, tile=16)
    pages = Pages(tuple(map(plane, parts)), (whole,), page, 16, count, n, n, cu_pages, 2)
    keys, values = pages.decoded()
    assert torch.equal(keys, values)
    swapped = Pages(pages.keys, (whole,), page, 16, count, n, n, cu_pages, 1).selected(torch.tensor([1, 0]))
    assert torch.equal(swapped.decoded()[0], torch.cat([keys[64:], keys[:64]]))


def test_misfits_are_named():
    x, start, count = ragged([64], 32), torch.tensor([0]), torch.tensor([64], dtype=torch.int32)
    fits = Format("int2", "channel", 32)
    bad = [
        ("whole number of tiles", (x, start, count, fits), {"page": 60, "tile": 16}),
        ("Groups of 32 tokens", (x, start, count, fits), {"page": 80, "tile": 16}),
        ("whole number of groups of 24", (x, start, count, Format("int2", "token", 24)), {"page": 64, "tile": 16}),
        ("power of 2", (x, start, count, Format("int2", "channel", 24)), {"page": 72, "tile": 24}),
        ("stride 1", (x.T, start, count, fits), {"page": 64, "tile": 16}),
        ("float16, bfloat16 or float32", (x.double(), start, count, fits), {"page": 64, "tile": 16}),
        ("long and int32", (x, start, count.long(), fits), {"page": 64, "tile": 16}),
    ]
    for message, args, options in bad:
        with pytest.raises(ValueError, match=message):
            quantise(*args, **options)
    shared = Shared(torch.zeros(1, 2, 31), None, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"shared scales must be \[M, 2, 32\]"):
        quantise(x, start, count, fits, page=64, tile=16, shared=shared)
    with pytest.raises(ValueError, match="needs zero points"):
        quantise(x, start, count, fits, page=64, tile=16, shared=shared._replace(scale=torch.zeros(1, 2, 32)))
    for message, wrong in (("no code 'int5'", ("int5", "channel", 32)), ("axis must be", ("int2", "row", 32))):
        with pytest.raises(ValueError, match=message):
            Format(*wrong)
    with pytest.raises(ValueError, match="different formats"):
        two_heads(LENGTHS, 0).appended(to_pages(x, [64, 0, 0, 0], fits, fits, 64, 32, heads=2))


# --- the kernel -------------------------------------------------------------------------------------------------------
def compare(x, lengths, format, page, tile, meta_dtype):
    start, count, _ = split(torch.tensor(lengths, device=x.device), page)
    ours = quantise_kernel(x, start, count, format, page, tile, meta_dtype)
    want = quantise_definition(x, start, count, format, page, tile, meta_dtype)
    # means depend on the order of the sum, and the interpreter cuts bfloat16 where a GPU rounds it: then the scales are
    # close, and the codes are those of the kernel's own scales
    rounds = meta_dtype != torch.bfloat16 or x.is_cuda
    if rounds and (format.affine or format.code == "fp8"):
        assert torch.equal(ours.scale, want.scale)
        assert torch.equal(ours.codes, want.codes)
    torch.testing.assert_close(ours.scale, want.scale)
    if format.affine:
        torch.testing.assert_close(ours.zero, want.zero)
    given = Shared(ours.scale, ours.zero, torch.arange(len(count), dtype=torch.int32, device=x.device))
    want = quantise_definition(x, start, count, format, page, tile, meta_dtype, given)
    assert torch.equal(ours.codes, want.codes)
    assert ours.scale.dtype == meta_dtype


@pytest.mark.parametrize("geometry", GEOMETRY, ids=str)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("code", CODES)
def test_kernel_is_its_definition(code, axis, geometry, device):
    page, tile, group = geometry
    dtype = DTYPES[(CODES.index(code) + GEOMETRY.index(geometry)) % 3]
    width, group = (24, group) if axis == "channel" else (32, 16)
    lengths = [1, page + 7, 0]
    compare(ragged(lengths, width, dtype, device), lengths, Format(code, axis, group), page, tile, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("code", BOOKS)
def test_kernel_by_books(code, corrected, dtype, device):
    """One token alone is nought, one is one channel, and the last page is short."""
    x = ragged([130, 0, 33], 32, dtype, device)
    x[7], x[8] = 0.0, torch.eye(32, device=device)[3] * 50
    start, count, _ = split(torch.tensor([130, 0, 33], device=device), 64)
    format = Format(code, "token", 32, book=BOOKS[code], corrected=corrected)
    ours = quantise_kernel(x, start, count, format, 64, 16, torch.float32)
    want = quantise_definition(x, start, count, format, 64, 16, torch.float32)
    torch.testing.assert_close(ours.scale, want.scale)
    assert float((ours.codes != want.codes).float().mean()) < 1e-3
    assert ours.codes.shape == want.codes.shape


@pytest.mark.parametrize(
    ("width", "dtype"), [*zip((64, 96, 128), DTYPES, strict=True), (80, DTYPES[0]), (256, DTYPES[1])]
)
def test_kernel_on_heads_of_real_size(width, dtype, device):
    x = ragged([128, 100], width, dtype, device)
    compare(x, [128, 100], Format("int2", "channel", 32), 128, 32, dtype)
    compare(x, [128, 100], Format("int2", "token", width // 2), 128, 32, torch.float32)


def test_kernel_reads_strided_rows_and_constant_groups(device):
    x = ragged([64], 64, torch.float16, device)
    x[:32, 3] = 7.0
    x[40] = -2.5
    for axis in ("channel", "token"):
        compare(x[:, :32], [64], Format("int2", axis, 32), 64, 32, torch.float16)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("code", ["int1", "ternary", "fp8"])
def test_kernel_with_scales_that_pages_share(code, axis, device):
    format, lengths = Format(code, axis, 32), [64, 40]
    x = ragged(lengths, 32, device=device)
    start, count, _ = split(torch.tensor(lengths, device=device), 64)
    shape = (1, *format.meta(64, 32))
    zero = torch.full(shape, -1.0, device=device) if format.affine else None
    shared = Shared(torch.full(shape, 2.0, device=device), zero, torch.zeros(2, dtype=torch.int32, device=device))
    ours = quantise_kernel(x, start, count, format, 64, 32, torch.float32, shared)
    want = quantise_definition(x, start, count, format, 64, 32, torch.float32, shared)
    assert torch.equal(ours.codes, want.codes)
    assert ours.codes.unique().numel() > 2


def test_nothing_to_pack(device):
    none = torch.zeros(0, dtype=torch.long, device=device)
    plane = quantise_kernel(torch.zeros(0, 32, device=device), none, none.int(), KEYS, 64, 32, torch.float16)
    assert plane.codes.shape == (0, KEYS.rows(64, 32), 32)
