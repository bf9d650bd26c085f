"""Packed tokens that are dropped: the others stay as they are, and pages are freed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coded import HEADS, SEVERAL, SMALL, Stored, name_of, names_of
from tail import few

from mmaccel.kv.codecs import Codec
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.codecs.vidkv import VidKV
from mmaccel.kv.layer_batch import InStep, LayerBatch
from mmaccel.kv.packed import QuantisedLayer
from mmaccel.kv.policies.h2o import H2O
from mmaccel.runtime.cache.rules import CacheRules


class Once:
    """Watches a layer: what a head stores for a place may change once, when it is packed, and never again."""

    def __init__(self, layer: QuantisedLayer) -> None:
        self.layer = layer
        self.known: dict[tuple[int, int, int], tuple[bool, bytes]] = {}

    def look(self) -> set[tuple[int, int, int]]:
        """(row, head, place) of all that is stored."""
        both, index = torch.cat(self.layer.stored(), dim=-1).numpy(), self.layer.index.by_head.expand(-1, HEADS, -1)
        now = {}
        for b, h, slot in (index >= 0).nonzero().tolist():
            at, packed = (b, h, int(index[b, h, slot])), slot < self.layer.width
            assert at not in now, "stored twice"
            numbers = both[b, h, slot].tobytes()
            once, was = self.known.get(at, (False, numbers))
            now[at] = packed or once, numbers
            assert was == numbers or (packed and not once), "changed"
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


@pytest.mark.parametrize("how", few(("heads", "rows"), ("heads",)))
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
        index, before = layer.index.by_head, layer.packed.pages
        gone = torch.rand(2, HEADS if how == "heads" else 1, index.shape[-1], generator=random) < 0.05
        gone = gone | (index < layer.seen - 90)
        once.mark()
        layer.evict(~gone)
        left = (~gone & (index >= 0)).expand(-1, HEADS, -1)
        places = index.expand(-1, HEADS, -1)
        assert once.look() == {(b, h, int(places[b, h, slot])) for b, h, slot in left.nonzero().tolist()}
        once.check_marks(layer.seen)
        assert layer.index.index.dim() == (3 if how == "heads" else 2)
        rewritten += any(now is not was for now, was in zip(layer.packed.pages, before, strict=True))
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
    keys = codec.formats(16)[0]
    # scales of a token are its own, and those of CalibQuant are of a whole head; a remainder is that of a page
    own = keys.group if keys.axis == "channel" and codec.name != "calibquant" else 1
    assert unit == (codec.page if pages.remains else own)
    before, kept = layer.stored()[0], torch.zeros(1, HEADS, len(layer.index), dtype=torch.bool)
    slot = torch.arange(6 * codec.page)
    kept[:, 0, : len(slot)] = (slot // unit % 3 == 0) & ((slot % unit > 2) | (unit == 1))
    kept[:, 1, 5 * codec.page :] = True
    kept[..., layer.width :] = True
    layer.evict(kept)
    units = torch.tensor([kept[0, h, : 12 * codec.page].view(-1, unit).any(1).sum() for h in range(HEADS)])
    assert torch.equal(layer.pages.cu_pages.diff(), (-(-units * unit // codec.page)).int())
    assert layer.packed.dequantised is None and layer.pages.nbytes() < pages.nbytes() * (
        len(layer.pages.count) + 1
    ) / len(pages.count)
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
    assert layer.packed.dequantised.tolist() == [[16 * few, 0], [16 * few, 0]] and len(left) == int(kept.sum())
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
    assert layer.packed.dequantised.tolist() == [[16 * few, 0], [16 * few, 0]][::-1]
    stored.check()
    layer.crop(-(layer.seen - 40))
    assert layer.packed.dequantised.tolist() == [[2 * few, 0]] * 2
    stored.keys = [stored.keys[0][:, :, :40]]
    stored.check()
    layer.evict(layer.index.by_head < 0)
    assert layer.pages is None and not layer.packed.dequantised.any() and layer.stored()[0].shape[2] == 0


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


def evict(how: str, layer: Any, kept: torch.Tensor) -> None:
    """All but what is ``kept``, as a cache stage whose policy compacts in this way does it."""
    evicting, stage = InStep(), SimpleNamespace(policy=H2O(compact=how), rest=None)
    evicting.begin(CacheRules.evicting(stage, LayerBatch([layer]), kept))
    evicting.finish()


@pytest.mark.parametrize("how", ("pivot", "average", "nearest"))
def test_packed_keys_do_not_flow_into_others(how: str) -> None:
    """When they are dropped in a merge, nothing of them is left; others do flow."""
    stored = Stored(KIVI(page=16, group=16, residual=4), batch=1)
    stored.feed(30)
    layer = stored.state.layers[0]
    kept = torch.ones(1, HEADS, 30, dtype=torch.bool)
    kept[..., 3:16] = False
    fresh = layer.stored()[0][:, :, 16:]
    evict(how, layer, kept)
    assert torch.equal(layer.stored()[0][:, :, -14:], fresh)
    kept = torch.ones(1, HEADS, len(layer.index), dtype=torch.bool)
    kept[..., -1] = False
    evict(how, layer, kept)
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
