"""The cache layer that stores codes: kinds of tokens, rows, heads and copies."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from coded import HEADS, SMALL, WIDTH, Stored, centred, error, keys_like, name_of, places_of, prompt
from mmaccel_kernels.pages import unpack

from mmaccel.kv import packed
from mmaccel.kv.codecs import Codec
from mmaccel.kv.codecs.calibquant import CalibQuant
from mmaccel.kv.codecs.fp8 import FP8
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.codecs.vidkv import VidKV
from mmaccel.kv.packed import QuantisedLayer


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


@pytest.mark.parametrize("codec", [c for c in SMALL if not c.visual_only], ids=name_of)
def test_tokens_that_fill_all_slots_are_packed_as_others_are(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off in front, without masks; the cache is the same to the bit, and whoever knows the old index sees a new one."""
    caches = []
    for by_mask in (False, True):
        with monkeypatch.context() as patch:
            if by_mask:
                patch.setattr(packed, "_fill_slots", lambda *args: False)
            else:
                patch.setattr(QuantisedLayer, "pack_due", None)
            stored = Stored(codec, batch=2, layers=2)
            for tokens in (70, *[1] * (codec.page + 1), 70):
                before = None if (layer := stored.state.layers[0]).empty else layer.index, layer.width
                stored.feed(tokens)
                assert layer.width == before[1] or layer.index is not before[0]
            one, two = stored.state.layers[:2]
            assert one.index is two.index
            held = [x for held in layer.packed.held for x in held or ()]
            caches.append(
                [layer.index.index, layer.index.lengths, *layer.stored(), layer.keys, *held, *layer.tensors()]
            )
    for mine, other in zip(*caches, strict=True):
        assert torch.equal(mine, other)


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


def test_protected_tokens_have_values_of_two_bits() -> None:
    stored, visual = Stored(VidKV(page=32, protect=0.25), batch=2), prompt(200, (10, 170), (50, 150))
    salient = visual & (torch.arange(200) % 4 == 1)
    stored.feed(200, visual, salient=salient)
    layer = stored.state.layers[0]
    others, better = layer.packed.pages
    assert [plane.format.code for plane in (others.values[0], better.values[0])] == ["three", "int2"]
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
    for start, own in ((0, places_of(layer, 0)[0]), (layer.packed.widths[0], places_of(layer, 0)[1])):
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
    assert [pages.keys[0].format.code for pages in layer.packed.pages] == ["int8", "fp8"]
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
    assert stored.state.nbytes() == sum(held.values()) + stored.state.shared.places.visual.nbytes
    before = layer.stored()[0]
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.stored()[0], before[[1, 0]])
    layer.crop(-20)
    assert all(max(part, default=0) < 117 for row in range(2) for part in places_of(layer, row))
    layer.reset()
    assert layer.packed.pages == () and layer.width == 0 and stored.state.shared.places.visual is None


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
    stored.pack()
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
