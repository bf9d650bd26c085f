"""Codecs: what they store, and what comes back."""

from __future__ import annotations

import fingerprint
import pytest
import synthetic
import torch
from coded import HEADS, SMALL, WIDTH, error, flat, keys_like, name_of

from mmaccel.errors import MmaccelError
from mmaccel.kv.codecs import Codec
from mmaccel.kv.codecs.calibquant import CalibQuant
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.codecs.think import ThinK
from mmaccel.kv.codecs.turboquant import TurboQuant
from mmaccel.kv.codecs.vidkv import VidKV


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (FP8(), 0.2),
        (KIVI(bits=8), 0.02),
        (KIVI(bits=4), 0.12),
        (KIVI(bits=2), 0.6),
        (TurboQuant(bits=4), 0.4),
        (TurboQuant(bits=3), 0.75),
        (TurboQuant(bits=2.5), 0.95),
        (CalibQuant(bits=4), 0.2),
        (CalibQuant(bits=1), 1.0),
    ],
    ids=lambda c: name_of(c) if isinstance(c, Codec) else "",
)
def test_more_bits_lose_less(codec: Codec, most: float) -> None:
    keys = keys_like(1, HEADS, 256, WIDTH)
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    pages = codec.pack(flat(keys), flat(values), torch.full((1, HEADS), 256))
    assert 0 < error(pages.decoded()[1], flat(values)) < most
    # the range of calibquant shrinks towards nought, which channels far from it do not bear at one bit
    if most < 1:
        assert 0 < error(pages.decoded()[0], flat(keys)) < most


def test_every_codec_is_tested_here() -> None:
    assert {codec.name for codec in SMALL} == set(synthetic.offered(Codec))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", SMALL, ids=name_of)
def test_a_row_in_a_batch_is_coded_as_if_alone(codec: Codec, dtype: torch.dtype) -> None:
    lengths = torch.tensor([[40, 33], [64, 7], [0, 16]])
    keys, values = (keys_like(int(lengths.sum()), WIDTH, seed=s, dtype=dtype) for s in (1, 2))
    whole = codec.pack(keys, values, lengths)
    assert torch.equal(whole.lengths(), lengths)
    bounds = lengths.sum(1).tolist()
    both = [x.split(bounds) for x in (keys, values, *whole.decoded())]
    for row in range(3):
        k, v, ours_k, ours_v = (x[row] for x in both)
        alone = codec.pack(k, v, lengths[row : row + 1]).decoded()
        assert torch.equal(ours_k, alone[0])
        assert torch.equal(ours_v, alone[1])
        assert ours_k.isfinite().all()


@pytest.mark.parametrize("codec", SMALL, ids=name_of)
def test_rows_are_selected_with_their_scales(codec: Codec) -> None:
    lengths = torch.tensor([[40, 33], [64, 7], [0, 16]])
    keys, values = (keys_like(int(lengths.sum()), WIDTH, seed=s) for s in (1, 2))
    pages, rows = codec.pack(keys, values, lengths), [2, 1, 1]
    chosen = pages.selected(torch.tensor(rows))
    assert torch.equal(chosen.lengths(), lengths[rows])
    for before, after in zip(pages.decoded(), chosen.decoded(), strict=True):
        parts = before.split(lengths.sum(1).tolist())
        assert torch.equal(after, torch.cat([parts[row] for row in rows]))


def test_bytes_are_what_the_papers_say() -> None:
    """Bits a number at a head size of 128 in float16, scales included, full pages."""
    keys, values = (keys_like(1, 1, 1280, 128, seed=s, dtype=torch.float16) for s in (0, 1))

    def bits(codec: Codec) -> float:
        pages = codec.pack(flat(keys), flat(values), torch.tensor([[1280]]))
        # rows of scales may be listed by the numbers of pages
        tables = {t.data_ptr(): t.nbytes for t in pages.listing}
        return (pages.nbytes() - sum(tables.values())) * 8 / (2 * keys.numel())

    # 32 bits of scale and zero for 32 numbers
    assert bits(KIVI(bits=2)) == 2 + 1
    assert bits(KIVI(bits=4)) == 4 + 1
    assert bits(KIVI(bits=2, group=128)) == 2 + 0.25
    assert bits(FP8()) == 8 + 16 / 128
    # one scale a token and head
    assert [bits(TurboQuant(bits=n)) for n in (2, 3, 4)] == [n + 16 / 128 for n in (2, 3, 4)]
    assert bits(TurboQuant(bits=3, value_bits=4, values="uniform")) == (3 + 16 / 128 + 4 + 32 / 128) / 2
    # two scales, and which channels are which; the sketch takes a bit of what values have
    halves = pytest.approx(2.5 + 2 * 16 / 128 + 32 * 128 / keys.numel())
    assert bits(TurboQuant(bits=2.5)) == halves
    assert bits(TurboQuant(bits=3, sketch=True)) == 3 + 1.5 * 16 / 128
    # two rows of 128 scales and zero points for all pages
    assert bits(CalibQuant()) == 1 + 32 / 1280
    # 32 bits of scale and zero for 32 hard keys, 16 for 32 easy ones or values; which channels are which
    per_key, per_value, channels = (2 + 1 + 1 + 0.5) / 2, 1.6 + 0.5, 32 * 128 / keys.numel()
    assert bits(VidKV(page=640)) == pytest.approx((per_key + per_value + channels) / 2)
    # as it comes three levels take two bits
    assert bits(VidKV()) == pytest.approx((per_key + per_value + 0.4 + channels) / 2)


def test_calibquant_has_one_range_for_all_pages() -> None:
    keys = keys_like(1, HEADS, 48, WIDTH)
    pages = CalibQuant(page=16).pack(flat(keys), flat(keys), torch.full((1, HEADS), 48))
    assert pages.keys[0].scale.shape == (HEADS, 1, WIDTH)
    assert pages.meta.tolist() == [0, 0, 0, 1, 1, 1]
    low, high = keys.amin(2)[0], keys.amax(2)[0]
    for ours, shrink in zip(pages.decoded(), (0.5, 0.3), strict=True):
        ours = ours.view(HEADS, 48, WIDTH)
        upper = keys[0] > (low + high)[:, None] * shrink / 2
        want = torch.where(upper, (high * shrink)[:, None], (low * shrink)[:, None])
        torch.testing.assert_close(ours, want)


def test_vidkv_gives_two_bits_to_the_channels_that_span_most() -> None:
    keys = keys_like(2, HEADS, 64, WIDTH)
    keys[0, ..., 5] *= 50
    keys[1, ..., 9] *= 50
    codec, lengths = VidKV(page=64, key_bits=1.25), torch.full((2, HEADS), 64)
    pages = codec.pack(flat(keys), flat(keys), lengths)
    hard, easy = pages.keys
    assert hard.channels is not None and easy.channels is not None
    assert hard.channels.shape == (4, 8)
    for head, channel in ((0, 5), (1, 5), (2, 9), (3, 9)):
        assert channel in hard.channels[head]
        assert sorted([*hard.channels[head].tolist(), *easy.channels[head].tolist()]) == list(range(WIDTH))
    assert torch.equal(hard.channels[0], hard.channels[1])
    # 1-bit channels hold plus and minus the mean size, values one of three levels
    size = keys.abs()[0, 0, :32].mean(0)
    decoded = pages.decoded()
    channel = int(easy.channels[0, 0])
    torch.testing.assert_close(decoded[0][:32, channel].abs(), size[channel].expand(32))
    assert len(decoded[1][:32, 7].unique()) <= 3
    # what comes later is coded on the same channels
    later = codec.pack(flat(keys.flip(-1)), flat(keys), lengths, before=pages)
    assert torch.equal(pages.appended(later).keys[0].channels, hard.channels)
    both = VidKV(page=64, key_bits=2.0).pack(flat(keys), flat(keys), lengths)
    assert len(both.keys) == 1 and both.keys[0].channels is None


def test_think_drops_the_channels_that_queries_make_least_of() -> None:
    keys, random = keys_like(2, HEADS, 64, WIDTH), torch.Generator().manual_seed(3)
    asked, lengths = torch.rand(2, HEADS, WIDTH, generator=random), torch.tensor([[64, 64], [64, 64]])
    codec = ThinK(page=32, residual=0, bits=8, align=1)
    pages = codec.pack(flat(keys), flat(keys), lengths, query_energy=asked)
    (plane,) = pages.keys
    left = (keys.double() ** 2).mean(2) * asked
    want = left.flatten(0, 1).topk(WIDTH - int(0.4 * WIDTH)).indices.sort(1).values
    assert torch.equal(plane.channels.long(), want) and not torch.equal(want[0], want[1])
    held = torch.zeros(4, WIDTH).scatter_(1, want, 1.0).view(2, HEADS, 1, WIDTH)
    for ours, true in zip(pages.decoded(), (keys * held, keys), strict=True):
        torch.testing.assert_close(ours, flat(true), atol=0.06, rtol=0)
    # 20 of 32 bytes a key, 32 a value; scales in float32
    assert plane.codes.nbytes == 20 * 4 * 64 and pages.values[0].codes.nbytes == 32 * 4 * 64
    # rows alone, later pages, and a query that looks elsewhere
    chosen = pages.selected(torch.tensor([1]))
    assert torch.equal(chosen.decoded()[0], pages.decoded()[0][128:])
    later = codec.pack(flat(keys.flip(-1)), flat(keys), lengths, before=pages, query_energy=asked.flip(-1))
    assert torch.equal(pages.appended(later).keys[0].channels, plane.channels)
    assert pages.appended(later).decoded()[0].shape == (2 * 4 * 64, WIDTH)
    other = codec.pack(flat(keys), flat(keys), lengths, query_energy=asked.flip(-1))
    assert not torch.equal(other.keys[0].channels, plane.channels)
    assert [codec.left(32), ThinK().left(32), ThinK().left(128), ThinK(prune=0.5).left(128)] == [20, 32, 80, 64]
    everything = ThinK(page=32, residual=0, prune=0.0).pack(flat(keys), flat(keys), lengths)
    assert everything.keys[0].channels is None and everything.key_width == 0


def test_a_constant_channel_comes_back_exactly() -> None:
    keys = keys_like(1, HEADS, 64, WIDTH)
    keys[..., 4] = 5.5
    keys[..., 32:] = 1.0
    for codec in (KIVI(page=32), ThinK(page=32), CalibQuant(shrink_keys=1.0, page=32), VidKV(page=32, key_bits=2.0)):
        decoded = codec.pack(flat(keys), flat(keys), torch.full((1, HEADS), 64)).decoded()
        assert all(x.isfinite().all() for x in decoded)
        assert (decoded[0][:, 4] == 5.5).all()


def test_head_sizes_that_a_group_of_channels_does_not_divide() -> None:
    for width, group in ((80, 16), (96, 32), (16, 16), (72, 8)):
        assert KIVI().formats(width)[1].group == group
        x = keys_like(1, 1, 32, width)
        assert KIVI(page=32).pack(flat(x), flat(x), torch.tensor([[32]])).decoded()[0].shape == (32, width)


def test_tiles_waste_no_byte_where_that_can_be() -> None:
    for codec in (FP8(), KIVI(), KIVI(bits=4), KIVI(bits=8), CalibQuant(), VidKV(page=128), VidKV(page=640)):
        for format in codec.formats(128):
            assert format.rows(codec.page, codec.tile) * format.digits == codec.page
    assert [c.tile for c in (KIVI(), CalibQuant(), VidKV())] == [32, 32, 16]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KIVI(bits=3), "`bits` of kivi must be 2, 4 or 8, got 3"),
        (lambda: KIVI(group=24), "do not fit pages of 128"),
        (lambda: KIVI(group=48), "do not fit pages of 128"),
        (lambda: KIVI(page=100), "a multiple of 16 tokens, not 100"),
        (lambda: KIVI(residual=-1), "`residual` of kivi must be at least 0, got -1"),
        (lambda: CalibQuant(bits=3), "`bits` of calibquant must be 1, 2, 4 or 8, got 3"),
        (
            lambda: CalibQuant(shrink_keys=0.0),
            "`shrink_keys` of calibquant must be greater than 0 and at most 1, got 0.0",
        ),
        (lambda: CalibQuant(residual=4), "leave out residual"),
        (lambda: CalibQuant(visual_only=False), "leave out visual_only"),
        (lambda: VidKV(key_bits=1.0), "`key_bits` of vidkv must be greater than 1 and at most 2, got 1.0"),
        (lambda: TurboQuant(bits=5), "`bits` of turboquant must be 2, 2.5, 3, 3.5 or 4, got 5"),
        (lambda: TurboQuant(bits=2.5, sketch=True), "leave out sketch"),
        (lambda: TurboQuant(bits=2.5, values="uniform"), "whole value_bits"),
        (lambda: TurboQuant(seed=-1), "`seed` of turboquant must be at least 0, got -1"),
        (lambda: ThinK(prune=1.0), "`prune` of think must be at least 0 and less than 1, got 1.0"),
        (lambda: ThinK(align=0), "`align` of think must be at least 1, got 0"),
        (lambda: VidKV(value_bits=4), "`value_bits` of vidkv must be 1.58 or 2, got 4"),
        (lambda: VidKV(protect=1.0), "`protect` of vidkv must be at least 0 and less than 1, got 1.0"),
        (lambda: VidKV(protect=0.1, value_bits=2), "leave out protect"),
        (lambda: VidKV(protect=0.1, text_only=True), "leave out protect"),
        (lambda: KIVI(text_only=True, visual_only=True), "packs nothing"),
        (lambda: CalibQuant(text_only=True), "leave out visual_only and text_only"),
    ],
)
def test_options_that_make_no_sense(make, message: str) -> None:
    with pytest.raises(MmaccelError, match=message):
        make()


def test_fingerprints_know_every_codec():
    """Its own assertion names the one that is missing; then nothing could be compared."""
    assert fingerprint.tasks()
