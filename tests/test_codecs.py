"""Codecs: what they store, what comes back, and the cache layer that stores it."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from mmaccel_kernels.pages import unpack

from mmaccel.errors import MmaccelError
from mmaccel.kv.cache import CacheState
from mmaccel.kv.codecs import Codec, token_groups
from mmaccel.kv.codecs.calibquant import CalibQuant
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.codecs.think import ThinK
from mmaccel.kv.codecs.vidkv import VidKV
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.packed import QuantisedLayer
from mmaccel.runtime.eviction import Eviction
from mmaccel.runtime.hooks import Step

HEADS, WIDTH = 2, 32
#: small enough for short prompts
SMALL = (
    FP8(page=16),
    KIVI(page=32, residual=8, bits=2),
    KIVI(page=32, residual=0, bits=4, group=16),
    KIVI(page=16, residual=0, bits=8, group=16),
    VidKV(page=32),
    VidKV(page=32, value_bits=2, fourier=True),
    CalibQuant(page=16),
    CalibQuant(page=32, bits=4),
    ThinK(page=32, residual=8, prune=0.2, align=1),
)
#: codecs that tell kinds of tokens apart
SEVERAL = (
    (VidKV(page=32, protect=0.3),),
    (CalibQuant(page=16, bits=4), KIVI(page=16, group=16, residual=4, bits=4, text_only=True)),
    (VidKV(page=32, protect=0.3, visual_only=True), FP8(page=16, text_only=True)),
)


def name_of(*codecs: Codec) -> str:
    return " ".join(f"{codec.name}-{getattr(codec, 'bits', '')}-{codec.page}" for codec in codecs)


def names_of(codecs: tuple[Codec, ...]) -> str:
    return name_of(*codecs)


def keys_like(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels differ in offset and spread, and a few of them are large everywhere, as those of keys are."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=rng) * (torch.rand(shape[-1], generator=rng) + 0.2)
    offset = torch.randn(shape[-1], generator=rng)
    offset[:3] *= 8
    return (x + offset).to(dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 2)


def error(ours: torch.Tensor, x: torch.Tensor) -> float:
    """Relative to how far the numbers of a channel are spread."""
    spread = x.float() - x.float().mean(0)
    return float((ours.float() - x.float()).norm() / spread.norm())


def centred(keys: torch.Tensor) -> torch.Tensor:
    """Values made of keys: without channels that are far from nought."""
    return (keys * 7).sin()


# --- codecs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (FP8(), 0.2),
        (KIVI(bits=8), 0.02),
        (KIVI(bits=4), 0.12),
        (KIVI(bits=2), 0.6),
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
        tables = sum(t.nbytes for t in (pages.count, pages.meta, pages.table, pages.cu_pages))
        return (pages.nbytes() - tables) * 8 / (2 * keys.numel())

    # 32 bits of scale and zero for 32 numbers
    assert bits(KIVI(bits=2)) == 2 + 1
    assert bits(KIVI(bits=4)) == 4 + 1
    assert bits(KIVI(bits=2, group=128)) == 2 + 0.25
    assert bits(FP8()) == 8 + 16 / 128
    # two rows of 128 scales and zero points for all pages
    assert bits(CalibQuant()) == 1 + 32 / 1280
    # 32 bits of scale and zero for 32 hard keys, 16 for 32 easy ones or values; which channels are which
    per_key, per_value, channels = (2 + 1 + 1 + 0.5) / 2, 1.6 + 0.5, 32 * 128 / keys.numel()
    assert bits(VidKV(page=640)) == pytest.approx((per_key + per_value + channels) / 2)


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
    for codec in (FP8(), KIVI(), KIVI(bits=4), KIVI(bits=8), CalibQuant(), VidKV(page=640)):
        for format in codec.formats(128):
            assert format.rows(codec.page, codec.tile) * format.digits == codec.page
    assert [c.tile for c in (KIVI(), CalibQuant(), VidKV())] == [32, 16, 16]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KIVI(bits=3), "bits=2, 4 or 8"),
        (lambda: KIVI(group=24), "do not fit pages of 128"),
        (lambda: KIVI(group=48), "do not fit pages of 128"),
        (lambda: KIVI(page=100), "a multiple of 16 tokens, not 100"),
        (lambda: KIVI(residual=-1), "residual=-1 is negative"),
        (lambda: CalibQuant(bits=3), "bits=1, 2, 4 or 8"),
        (lambda: CalibQuant(shrink_keys=0.0), "shrink_keys=0.0"),
        (lambda: CalibQuant(residual=4), "leave out residual"),
        (lambda: CalibQuant(visual_only=False), "leave out visual_only"),
        (lambda: VidKV(key_bits=1.0), "above 1 and at most 2"),
        (lambda: ThinK(prune=1.0), "no share of the channels"),
        (lambda: ThinK(align=0), "no count of channels"),
        (lambda: VidKV(value_bits=4), "value_bits of 1.58 or 2"),
        (lambda: VidKV(protect=1.0), "no share of the visual tokens"),
        (lambda: VidKV(protect=0.1, value_bits=2), "leave out protect"),
        (lambda: VidKV(protect=0.1, text_only=True), "leave out protect"),
        (lambda: KIVI(text_only=True, visual_only=True), "packs nothing"),
        (lambda: CalibQuant(text_only=True), "leave out visual_only and text_only"),
    ],
)
def test_options_that_make_no_sense(make, message: str) -> None:
    with pytest.raises(MmaccelError, match=message):
        make()


# --- a layer of the cache ---------------------------------------------------------------------------------------------
class Stored:
    """A state of quantised layers beside plain lists of all keys and values ever fed, by place."""

    def __init__(self, *codecs: Codec, batch: int, layers: int = 1) -> None:
        self.kinds, self.batch = token_groups(dict(enumerate(codecs))), batch
        self.state = CacheState(layers)
        self.keys = [torch.zeros(batch, HEADS, 0, WIDTH) for _ in range(layers)]
        index = KeyIndex(torch.zeros(batch, 0, dtype=torch.int32), False, 0)
        for layer in self.state.layers:
            layer.index = index

    def feed(
        self,
        tokens: int,
        visual: torch.Tensor | None = None,
        seed: int = 0,
        salient: torch.Tensor | None = None,
    ) -> None:
        since = self.state.seen
        for number, layer in enumerate(self.state.layers):
            new = keys_like(self.batch, HEADS, tokens, WIDTH, seed=seed + number + 100 * since)
            # values are spread alike in all channels
            layer.update(new, centred(new))
            self.keys[number] = torch.cat([self.keys[number], new], dim=2)
        layout = None if visual is None else SimpleNamespace(visual=visual)
        if visual is not None and any(kind.of == "text" for kind in self.kinds):
            self.state.shared.note_visual(visual, since)
        step = SimpleNamespace(state=self.state, layout=layout, salient=salient, seen=since)
        self.pack(step, {})

    def pack(self, step: SimpleNamespace, made: dict) -> None:
        """As the door does."""
        for layer in self.state.layers:
            for kind in self.kinds:
                among = Step.among(step, kind)
                if among is not None:
                    layer.pack(kind, among, made)

    def check(self, most: float = 0.7) -> None:
        """Every stored slot holds the key of its place, and the value of the same."""
        for layer, fed in zip(self.state.layers, self.keys, strict=True):
            keys, values = layer.stored()
            index = layer.index.index if layer.index.index.dim() == 3 else layer.index.index[:, None]
            index = index.expand(-1, HEADS, -1)
            assert keys.shape[2] == values.shape[2] == len(layer.index)
            there = index >= 0
            want = fed.gather(2, index.clamp(min=0).long()[..., None].expand(-1, -1, -1, WIDTH))
            assert error(keys[there], want[there]) < most
            assert error(values[there], centred(want)[there]) < most
            rest = torch.arange(len(layer.index)) >= layer.width
            if layer.dequantised is not None:
                rest = rest & ((there & rest).cumsum(-1) > layer.dequantised[..., None])
            exact = there & rest
            assert torch.equal(keys[exact], want[exact])
            assert torch.equal(values[exact], centred(want)[exact])


@pytest.mark.parametrize("codec", [c for c in SMALL if not c.visual_only], ids=name_of)
def test_decoding_packs_each_token_once(codec: Codec) -> None:
    stored = Stored(codec, batch=2)
    stored.feed(70)
    layer = stored.state.layers[0]
    assert layer.width == int(codec.packable(torch.tensor(70)))
    before = None
    for step in range(2 * codec.page):
        stored.feed(1, seed=step)
        width = int(codec.packable(torch.tensor(71 + step)))
        assert layer.width == width
        assert layer.keys.shape[2] == 71 + step - width
        assert layer.get_seq_length() == 71 + step
        codes = layer.pages.keys[0].codes
        if before is not None:
            # what was written stays to the bit
            assert torch.equal(codes[: len(before)], before)
        before = codes.clone()
    stored.check(1.1 if codec.name == "vidkv" else 0.7)
    assert torch.equal(layer.index.index[0], torch.arange(70 + 2 * codec.page, dtype=torch.int32))
    assert not layer.index.padded


def test_only_visual_tokens_are_packed_and_text_stays_as_it_is() -> None:
    codec = CalibQuant(page=16, bits=4)
    stored = Stored(codec, batch=2)
    visual = torch.zeros(2, 60, dtype=torch.bool)
    visual[0, 5:45] = True
    visual[1, 3:20] = True
    stored.feed(60, visual)
    layer = stored.state.layers[0]
    assert layer.pages.lengths().tolist() == [[40, 40], [17, 17]]
    assert layer.index.index[1, : layer.width].tolist() == [*range(3, 20), *[-1] * 23]
    stored.check()
    stored.feed(3)
    stored.feed(1)
    assert layer.pages.lengths().tolist() == [[40, 40], [17, 17]]
    # another picture has a range of its own
    second = torch.zeros(2, 20, dtype=torch.bool)
    second[:, :10] = True
    stored.feed(20, second)
    assert layer.pages.lengths().tolist() == [[50, 50], [27, 27]]
    assert len(layer.pages.keys[0].scale) == 8
    stored.check()


@pytest.mark.parametrize(
    "codec", [KIVI(page=16, group=16, residual=3, visual_only=True), VidKV(page=32, visual_only=True)]
)
def test_any_codec_can_leave_text_alone(codec: Codec) -> None:
    """Whole pages of the pictures of a prompt are packed, but for the newest; no text, now or later."""
    stored, visual = Stored(codec, batch=2), torch.zeros(2, 90, dtype=torch.bool)
    visual[0, 5:75], visual[1, 20:60] = True, True
    stored.feed(90, visual)
    layer = stored.state.layers[0]
    lengths = torch.tensor([70, 40])
    assert torch.equal(layer.pages.lengths(), codec.packable(lengths)[:, None].expand(-1, HEADS))
    for row, first in enumerate((5, 20)):
        count = int(codec.packable(lengths)[row])
        assert layer.index.index[row, :count].tolist() == list(range(first, first + count))
    before = layer.pages
    for _ in range(20):
        stored.feed(10)
    assert layer.pages is before
    stored.check(1.1)


def prompt(length: int, *spans: tuple[int, int]) -> torch.Tensor:
    """``[B, length]`` bool, a span of visual tokens in every row."""
    places = torch.arange(length)
    return torch.stack([(places >= first) & (places < end) for first, end in spans])


def places_of(layer: QuantisedLayer, row: int) -> list[list[int]]:
    """The places of what a row has packed, kind by kind, and of the rest; of heads that are alike."""
    parts = layer.index.by_head.split((*layer.widths, len(layer.index) - layer.width), dim=-1)
    return [[place for place in part[row, 0].tolist() if place >= 0] for part in parts]


def test_protected_tokens_have_values_of_two_bits() -> None:
    stored, visual = Stored(VidKV(page=32, protect=0.25), batch=2), prompt(200, (10, 170), (50, 150))
    salient = visual & (torch.arange(200) % 4 == 1)
    stored.feed(200, visual, salient=salient)
    layer = stored.state.layers[0]
    others, better = layer.packs
    assert [plane.format.code for plane in (others.values[0], better.values[0])] == ["ternary", "int2"]
    # the channels of a prompt are chosen once
    for mine, theirs in zip(better.keys, others.keys, strict=True):
        assert mine.format == theirs.format and torch.equal(mine.channels, theirs.channels)
    for row in range(2):
        first, second, rest = places_of(layer, row)
        want = salient[row].nonzero()[:, 0].tolist()
        plain = (~salient[row]).nonzero()[:, 0].tolist()
        assert second == want and first == plain[: len(first)] and rest == plain[len(first) :]
        assert len(first) == len(plain) // 32 * 32
    stored.check(1.1)
    values, true = layer.stored()[1], centred(stored.keys[0])
    lost = []
    for start, own in ((0, places_of(layer, 0)[0]), (layer.widths[0], places_of(layer, 0)[1])):
        lost.append(error(values[0, :, start : start + len(own)], true[0, :, own]))
    assert lost[1] < 0.7 * lost[0]
    # what comes later is not protected, whatever it is
    for _ in range(4):
        stored.feed(32)
    assert len(places_of(layer, 0)[1]) == int(salient[0].sum()) and len(places_of(layer, 0)[2]) < 32
    stored.check(1.1)


def test_protected_tokens_are_packed_once_where_text_is_not() -> None:
    stored, visual = Stored(VidKV(page=32, protect=0.25, visual_only=True), batch=1), prompt(200, (10, 170))
    salient = visual & (torch.arange(200) % 4 == 1)
    stored.feed(200, visual, salient=salient)
    first, second, rest = places_of(stored.state.layers[0], 0)
    plain = (visual & ~salient)[0].nonzero()[:, 0].tolist()
    assert second == salient[0].nonzero()[:, 0].tolist() and first == plain[: len(plain) // 32 * 32] and first
    assert rest == sorted({*range(200)} - {*first, *second})
    stored.check(1.1)


def test_salient_tokens_are_those_most_like_the_text() -> None:
    random = torch.Generator().manual_seed(0)
    embeds = torch.randn(2, 300, 8, generator=random)
    visual = prompt(300, (20, 280), (100, 120))
    text = ~visual
    text[1, :50] = False
    codec = VidKV(protect=0.3)
    chosen = codec.salient(embeds, visual, text)
    # 0.3 of 260 in whole groups; of 20 all
    assert chosen.sum(1).tolist() == [64, 20]
    likeness = (embeds @ embeds[0, text[0]].T).mean(-1)[0]
    assert likeness[chosen[0]].min() > likeness[visual[0] & ~chosen[0]].max()
    assert not (chosen & ~visual).any()
    alone = codec.salient(embeds[:1, 20:290], visual[:1, 20:290], text[:1, 20:290])
    assert alone.sum() == 64 and not torch.equal(alone[0], chosen[0, 20:290])


def test_text_and_visual_tokens_have_codecs_of_their_own() -> None:
    """Text as it comes, pictures with their prompt; what a picture left in full precision is no text later."""
    visual_codec, text_codec = (
        KIVI(page=16, group=16, residual=3, bits=8, visual_only=True),
        FP8(page=16, text_only=True),
    )
    stored = Stored(visual_codec, text_codec, batch=2)
    stored.feed(7)
    stored.feed(90, prompt(90, (5, 75), (20, 60)))
    layer = stored.state.layers[0]
    text = [[*range(12), *range(82, 97)], [*range(27), *range(67, 97)]]
    for row, count in enumerate((70, 40)):
        picture = [place for place in range(97) if place not in text[row]]
        packed, words, rest = places_of(layer, row)
        assert packed == picture[: (count - 3) // 16 * 16]
        assert words == text[row][: len(text[row]) // 16 * 16]
        assert sorted(packed + words + rest) == list(range(97))
    assert [pages.keys[0].format.code for pages in layer.packs] == ["int8", "fp8"]
    stored.check(0.2)
    for step in range(40):
        stored.feed(1, seed=step)
    for row in range(2):
        packed, words, rest = places_of(layer, row)
        assert words == [*text[row], *range(97, 137)][: len(words)] and len(words) // 16 == (len(text[row]) + 40) // 16
        assert set(rest) - set(range(97)) <= set(range(137 - 16, 137))
    stored.check(0.2)
    # rows, tokens taken back, bytes
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.tensors() if t.numel()}
    assert stored.state.nbytes() == sum(held.values()) + stored.state.shared.visual.nbytes
    before = layer.stored()[0]
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.stored()[0], before[[1, 0]])
    layer.crop(-20)
    assert all(max(part, default=0) < 117 for row in range(2) for part in places_of(layer, row))
    layer.reset()
    assert layer.packs == () and layer.width == 0 and stored.state.shared.visual is None


def test_packing_after_eviction_keeps_heads_of_their_own_lengths() -> None:
    """Quantised pruning: a policy has evicted, the codec stores what stayed."""
    codec = KIVI(page=16, group=16, residual=4, bits=4)
    stored = Stored(codec, batch=2)
    for layer in stored.state.layers:
        new = keys_like(2, HEADS, 64, WIDTH)
        layer.update(new, centred(new))
        stored.keys[0] = new
    kept = torch.rand(2, HEADS, 64, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.9, 0.4])[:, None]
    layer.evict(kept)
    stored.pack(SimpleNamespace(state=stored.state, layout=None), {})
    lengths = kept.sum(-1)
    assert torch.equal(layer.pages.lengths(), (lengths - 4) // 16 * 16)
    assert torch.equal((layer.index.index >= 0).sum(-1), lengths)
    stored.check()
    for step in range(40):
        stored.feed(1, seed=step)
    assert torch.equal(layer.pages.lengths(), (lengths + 40 - 4) // 16 * 16)
    stored.check()
    # slots of each head are those kept, in the order of their places
    for b in range(2):
        for h in range(HEADS):
            index = layer.index.index[b, h]
            want = [*kept[b, h].nonzero()[:, 0].tolist(), *range(64, 104)]
            assert index[index >= 0].tolist() == want


def test_layers_share_one_index() -> None:
    stored = Stored(KIVI(page=16, group=16, residual=0), batch=2, layers=3)
    stored.feed(40)
    first = stored.state.layers[0].index
    assert all(layer.index is first and layer.width == 32 for layer in stored.state.layers)
    stored.feed(1)
    stored.check()
    assert len(first) == 41


def test_rows_are_selected_and_repeated() -> None:
    stored = Stored(KIVI(page=16, group=16, residual=0), batch=3)
    stored.feed(40)
    layer = stored.state.layers[0]
    before = layer.stored()[0]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    stored.keys = [stored.keys[0][[2, 0, 0]]]
    assert torch.equal(layer.stored()[0], before[[2, 0, 0]])
    assert len(layer.pages.count) == 2 * HEADS * 2, "repeated rows share their pages"
    stored.feed(20)
    stored.check()
    layer.batch_repeat_interleave(2)
    assert layer.stored()[0].shape[0] == 6
    layer.batch_select_indices(torch.tensor([True, False, False, False, False, True]))
    assert layer.stored()[0].shape[0] == 2 and layer.pages.batch == 2
    layer.reset()
    assert layer.pages is None and layer.width == 0


def test_the_newest_tokens_can_be_forgotten() -> None:
    stored = Stored(KIVI(page=16, group=16, residual=4), batch=2)
    stored.feed(60)
    layer = stored.state.layers[0]
    assert layer.width == 48
    before = layer.stored()[0]
    codes = layer.pages.keys[0].codes
    for left in (58, 41, 33, 32):
        layer.crop(left - stored.state.seen)
        assert layer.seen == left and len(layer.index) == left
        assert torch.equal(layer.stored()[0], before[:, :, :left])
    assert layer.pages.lengths().tolist() == [[32, 32]] * 2
    assert torch.equal(layer.pages.keys[0].codes, codes.view(4, 3, *codes.shape[1:])[:, :2].flatten(0, 1))
    stored.keys = [stored.keys[0][:, :, :32]]
    stored.feed(30)
    assert layer.index.index[0].tolist() == list(range(62))
    stored.check()
    layer.crop(-61)
    assert layer.pages is not None and len(layer.index) == 1


class Once:
    """Watches a layer: what a head stores for a place may change once, when it is packed, and never again."""

    def __init__(self, layer: QuantisedLayer) -> None:
        self.layer = layer
        self.known: dict[tuple[int, int, int], tuple[bool, torch.Tensor]] = {}

    def look(self) -> set[tuple[int, int, int]]:
        """(row, head, place) of all that is stored."""
        both, index = torch.cat(self.layer.stored(), dim=-1), self.layer.index.by_head.expand(-1, HEADS, -1)
        now = {}
        for b, h, slot in (index >= 0).nonzero().tolist():
            at, packed = (b, h, int(index[b, h, slot])), slot < self.layer.width
            assert at not in now, "stored twice"
            once, was = self.known.get(at, (False, both[b, h, slot]))
            now[at] = packed or once, both[b, h, slot]
            assert torch.equal(was, both[b, h, slot]) or (packed and not once), "changed"
        self.known = now
        return set(now)

    def mark(self) -> None:
        """Give every stored token a figure that says which it is."""
        index = self.layer.index.by_head
        self.layer.schedule.received = index + 1000.0 * torch.arange(HEADS)[:, None]

    def check_marks(self, before: int) -> None:
        """The figures of tokens up to place ``before`` are theirs."""
        index, received = self.layer.index.by_head.expand(-1, HEADS, -1), self.layer.schedule.received
        own = index[..., : received.shape[-1]]
        there = (own >= 0) & (own < before)
        assert there.sum() == ((index >= 0) & (index < before)).sum()
        assert torch.equal(received[there], (own + 1000.0 * torch.arange(HEADS)[:, None])[there])


@pytest.mark.parametrize("how", ("heads", "rows"))
@pytest.mark.parametrize("codecs", [*((codec,) for codec in SMALL), *SEVERAL], ids=names_of)
def test_packed_tokens_are_dropped_and_the_others_stay_as_they_are(codecs: tuple[Codec, ...], how: str) -> None:
    """The oldest and random ones of every head, or the same of all heads, go while others come."""
    stored, random = Stored(*codecs, batch=2), torch.Generator().manual_seed(0)
    layer = stored.state.layers[0]
    picture = torch.zeros(2, 60, dtype=torch.bool)
    picture[0, 5:45], picture[1, 3:20] = True, True
    stored.feed(60, picture, salient=picture & (torch.arange(60) % 3 == 0))
    once, rewritten = Once(layer), 0
    once.look()
    for step in range(36):
        index, before = layer.index.by_head, layer.packs
        gone = torch.rand(2, HEADS if how == "heads" else 1, index.shape[-1], generator=random) < 0.05
        gone = gone | (index < layer.seen - 90)
        once.mark()
        layer.evict(~gone)
        left = (~gone & (index >= 0)).expand(-1, HEADS, -1)
        places = index.expand(-1, HEADS, -1)
        assert once.look() == {(b, h, int(places[b, h, slot])) for b, h, slot in left.nonzero().tolist()}
        once.check_marks(layer.seen)
        assert layer.index.index.dim() == (3 if how == "heads" else 2)
        rewritten += any(now is not was for now, was in zip(layer.packs, before, strict=True))
        stored.feed(2, seed=step)
        once.look()
        once.check_marks(layer.seen - 2)
    stored.check(1.2 if codecs[0].name in ("vidkv", "calibquant") else 0.7)
    assert 2 <= rewritten < 36
    both = layer.stored()[0]
    layer.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.stored()[0], both[1:])


@pytest.mark.parametrize("codec", [*(c for c in SMALL if c.name != "vidkv"), VidKV(page=64)], ids=name_of)
def test_places_are_freed_in_units(codec: Codec) -> None:
    """Of one head most of every third unit stays, of another a whole stretch: as many pages as that takes."""
    stored = Stored(codec, batch=1)
    stored.feed(12 * codec.page + codec.residual, torch.ones(1, 12 * codec.page + codec.residual, dtype=torch.bool))
    layer = stored.state.layers[0]
    pages, unit = layer.pages, layer.pages.unit
    assert unit == {"fp8": 1, "calibquant": 1}.get(codec.name, codec.formats(16)[0].group)
    before, kept = layer.stored()[0], torch.zeros(1, HEADS, len(layer.index), dtype=torch.bool)
    slot = torch.arange(6 * codec.page)
    kept[:, 0, : len(slot)] = (slot // unit % 3 == 0) & ((slot % unit > 2) | (unit == 1))
    kept[:, 1, 5 * codec.page :] = True
    kept[..., layer.width :] = True
    layer.evict(kept)
    units = torch.tensor([kept[0, h, : 12 * codec.page].view(-1, unit).any(1).sum() for h in range(HEADS)])
    assert torch.equal(layer.pages.cu_pages.diff(), (-(-units * unit // codec.page)).int())
    assert layer.dequantised is None and layer.pages.nbytes() < pages.nbytes() * (len(layer.pages.count) + 1) / len(
        pages.count
    )
    assert layer.pages.lengths().tolist() == [(units * unit).tolist()]
    index, after = layer.index.index, layer.stored()[0]
    for h in range(HEADS):
        assert torch.equal(after[0, h, index[0, h] >= 0], before[0, h, kept[0, h]])
    # nothing is left of what was packed, and packing goes on
    layer.evict(layer.index.by_head >= 12 * codec.page)
    assert layer.pages is None and layer.width == 0
    stored.feed(2 * codec.page, torch.ones(1, 2 * codec.page, dtype=torch.bool))
    stored.check(2.0)
    assert layer.width >= codec.page


def test_the_last_tokens_of_a_group_take_no_more_than_in_full_precision() -> None:
    """They come back as what their codes stand for, and are not packed again."""
    codec = KIVI(page=128, group=32, residual=0)
    stored = Stored(codec, batch=2)
    stored.feed(128 * 4)
    layer = stored.state.layers[0]
    once = Once(layer)
    once.look()
    # with scales in float32 a group of 32 takes 2 (2 + 2) 32 = 256 bits a channel, and a token 64
    few = 3
    kept = torch.zeros(2, HEADS, 512, dtype=torch.bool)
    kept[:, 0] = torch.arange(512) % 32 < few
    kept[0, 1] = torch.arange(512) % 32 < few + 1
    layer.evict(kept)
    left = once.look()
    assert layer.dequantised.tolist() == [[16 * few, 0], [16 * few, 0]] and len(left) == int(kept.sum())
    assert layer.pages.lengths().tolist() == [[0, 512], [0, 0]]
    stored.check()
    for _ in range(3):
        stored.feed(100)
        once.look()
    stored.check()
    assert layer.pages.lengths().tolist() == [[256, 768], [256, 256]]
    # rows, tokens taken back, and everything dropped
    layer.reorder_cache(torch.tensor([1, 0]))
    stored.keys = [stored.keys[0][[1, 0]]]
    assert layer.dequantised.tolist() == [[16 * few, 0], [16 * few, 0]][::-1]
    stored.check()
    layer.crop(-(layer.seen - 40))
    assert layer.dequantised.tolist() == [[2 * few, 0]] * 2
    stored.keys = [stored.keys[0][:, :, :40]]
    stored.check()
    layer.evict(layer.index.by_head < 0)
    assert layer.pages is None and not layer.dequantised.any() and layer.stored()[0].shape[2] == 0


@pytest.mark.parametrize("codec", SMALL, ids=name_of)
def test_rows_may_have_no_page_at_all(codec: Codec) -> None:
    """Because their picture was dropped or is none, or was taken back."""
    stored, visual = Stored(codec, batch=2), torch.zeros(2, 90, dtype=torch.bool)
    visual[0, 5:75] = True
    stored.feed(90, visual)
    layer = stored.state.layers[0]
    if not codec.visual_only:
        kept = torch.ones(2, 1, 90, dtype=torch.bool)
        kept[1, :, : layer.width] = False
        layer.evict(kept)
    before = layer.stored()
    again = copy.deepcopy(stored)
    layer.reorder_cache(torch.tensor([1]))
    assert layer.pages.lengths().tolist() == [[0, 0]]
    for ours, whole in zip(layer.stored(), before, strict=True):
        there = (layer.index.by_head >= 0).expand(-1, HEADS, -1)
        assert torch.equal(ours[there], whole[1:][there])
    stored.batch, stored.keys = 1, [stored.keys[0][1:]]
    stored.feed(40, torch.ones(1, 40, dtype=torch.bool))
    assert layer.pages.lengths().min() >= codec.page
    stored.check(1.2)
    # back to before the first packed token
    layer = again.state.layers[0]
    layer.evict(layer.index.by_head != 0)
    layer.crop(1 - layer.seen)
    assert not (layer.index.by_head >= 0).any() and layer.stored()[0].shape[2] == len(layer.index)
    again.keys = [again.keys[0][:, :, :1]]
    again.feed(90, torch.ones(2, 90, dtype=torch.bool))
    assert layer.pages.lengths().min() >= codec.page
    again.check(2.0)


@pytest.mark.parametrize("how", ("pivot", "average", "nearest"))
def test_packed_keys_do_not_flow_into_others(how: str) -> None:
    """When they are dropped in a merge, nothing of them is left; others do flow."""
    stored = Stored(KIVI(page=16, group=16, residual=4), batch=1)
    stored.feed(30)
    layer = stored.state.layers[0]
    stage = SimpleNamespace(policy=SimpleNamespace(choice=lambda _: (how, None), scheduled=False), official=False)
    kept = torch.ones(1, HEADS, 30, dtype=torch.bool)
    kept[..., 3:16] = False
    fresh = layer.stored()[0][:, :, 16:]
    Eviction._compact(stage, layer, kept)
    assert torch.equal(layer.stored()[0][:, :, -14:], fresh)
    kept = torch.ones(1, HEADS, len(layer.index), dtype=torch.bool)
    kept[..., -1] = False
    Eviction._compact(stage, layer, kept)
    assert not torch.equal(layer.stored()[0][:, :, -13:], fresh[:, :, :-1])


def test_pages_that_rows_share_are_written_anew_when_that_pays() -> None:
    stored = Stored(KIVI(page=16, group=16, residual=0), batch=1)
    stored.feed(160)
    layer = stored.state.layers[0]
    layer.batch_repeat_interleave(2)
    kept = torch.ones(2, HEADS, 160, dtype=torch.bool)
    kept[1, :, :64] = False
    layer.evict(kept)
    # 20 pages would become 32
    assert len(layer.pages.count) == 10 * HEADS and (layer.index.index[1, 0] >= 0).sum() == 96
    kept[..., :80] = False
    kept[1] = kept[1] & (torch.arange(160) >= 128)
    layer.evict(kept)
    assert len(layer.pages.count) == (5 + 2) * HEADS
    assert layer.index.index[1, 0].tolist() == [*range(128, 160), *[-1] * 48]


def test_cropping_behind_dead_places() -> None:
    stored = Stored(KIVI(page=32, group=16, residual=4), batch=1)
    stored.feed(104)
    layer = stored.state.layers[0]
    once = Once(layer)
    kept = torch.ones(1, HEADS, 104, dtype=torch.bool)
    kept[..., 3:80:2] = False
    layer.evict(kept)
    once.look()
    once.mark()
    layer.crop(-54)
    assert once.look() == {(0, h, p) for h in range(HEADS) for p in (*range(3), *range(4, 50, 2))}
    once.check_marks(50)
    stored.keys = [stored.keys[0][:, :, :50]]
    stored.feed(40)
    stored.check()
    assert len(once.look()) == HEADS * (26 + 40)


def test_bytes_reported_are_bytes_held() -> None:
    stored = Stored(KIVI(page=64, residual=0), batch=2)
    stored.feed(128)
    layer = stored.state.layers[0]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.tensors() if t.numel()}
    assert stored.state.nbytes() == sum(held.values())
    full = 2 * stored.keys[0].nbytes
    # 2 bits and 64 bits of float32 scales for every 32 numbers, of 32 bits
    assert layer.pages.nbytes() == pytest.approx(full * 4 / 32, rel=0.02)
    assert stored.state.nbytes() < full * 0.16


def test_a_packed_cache_can_be_copied_and_saved() -> None:
    stored = Stored(VidKV(page=32), batch=2)
    stored.feed(80)
    layer = stored.state.layers[0]
    again = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.pages, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for ours, other in zip(layer.pages.decoded(), loaded.decoded(), strict=True):
        assert torch.equal(ours, other)
    assert torch.equal(again.stored()[1], layer.stored()[1])
    stored.feed(1)
    assert again.seen == 80


def test_codes_on_pages_are_what_decoding_reads() -> None:
    """The layer holds the codes and nothing else of what it packed: change one, and that number changes."""
    stored = Stored(FP8(page=16), batch=1)
    stored.feed(16)
    layer = stored.state.layers[0]
    assert layer.keys.shape[2] == 0
    plane = layer.pages.keys[0]
    before = layer.stored()[0].clone()
    plane.codes[0, 3, 7] ^= 128
    after = layer.stored()[0]
    assert torch.equal((after != before).nonzero(), torch.tensor([[0, 0, 3, 7]]))
    assert after[0, 0, 3, 7] == -before[0, 0, 3, 7]
    assert unpack(plane.codes, plane.format, 16, layer.pages.tile).shape == (HEADS, 16, WIDTH)
