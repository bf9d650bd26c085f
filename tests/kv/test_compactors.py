"""Keys that are merged instead of dropped, against the definition written out."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from evicting import SCHEDULES, by_hand, stage
from laws import oracle
from tail import in_turn

from mmaccel import accelerated
from mmaccel.kv.merge import merge

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("how", ("pivot", "average", "weighted", "ema", "nearest", "blend"))
def test_merging_is_its_definition(how: str) -> None:
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 3, 17, 4, generator=random), torch.randn(2, 3, 17, 4, generator=random)
    # padding in front, heads that keep different counts, one that keeps all
    there = (torch.arange(17) >= torch.tensor([0, 4])[:, None])[:, None].expand(2, 3, 17)
    kept = (torch.rand(2, 3, 17, generator=random) < torch.tensor([0.3, 0.6, 2.0])[:, None]) & there
    made = merge(how, keys, values, kept, there & ~kept)
    for b in range(2):
        for h in range(3):
            for x, ours in ((keys, made.keys), (values, made.values)):
                wanted = by_hand(how, keys[b, h], x[b, h], kept[b, h], (there & ~kept)[b, h])
                torch.testing.assert_close(ours[b, h, kept[b, h]], wanted[kept[b, h]])
    assert torch.equal(made.keys[:, 2], keys[:, 2]) and not torch.equal(made.keys[:, 0], keys[:, 0])


def test_the_bar_of_merging_moves_slowly() -> None:
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 2, 17, 4, generator=random)
    kept = (torch.arange(17) < 5).expand(1, 2, 17)
    first = merge("ema", keys, keys, kept, ~kept, decay=0.75)
    again = merge("ema", keys, keys, kept, ~kept, decay=0.75, threshold=torch.zeros(1, 2))
    assert first.threshold is not None and again.threshold is not None
    torch.testing.assert_close(again.threshold, first.threshold / 4)
    # nothing merged: the bar stays
    idle = merge("ema", keys, keys, kept, torch.zeros_like(kept), threshold=torch.full((1, 2), 0.3))
    assert idle.threshold is not None and (idle.threshold == 0.3).all()


@pytest.mark.parametrize(
    ("family", "how"), in_turn(("llava", "qwen2_5_vl"), ("pivot", "weighted", "average", "nearest", "ema", "blend"))
)
def test_merged_keys_are_stored(family: str, how: str) -> None:
    """Keys and values of the bare model, merged by hand onto the places that are kept."""
    feed = zoo.inputs(family, "image")
    recipe = stage("h2o", compact=how)
    full = oracle.bare(family)(**feed, use_cache=True).past_key_values
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        index, (keys, values) = layer.index.index.long(), layer.stored()
        for head in range(keys.shape[1]):
            kept = torch.zeros(whole.keys.shape[2], dtype=torch.bool)
            kept[index[0, head]] = True
            assert not kept.all()
            for ours, x in ((keys, whole.keys), (values, whole.values)):
                wanted = by_hand(how, whole.keys[0, head], x[0, head], kept, ~kept)[kept]
                torch.testing.assert_close(ours[0, head], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ("pivot", "ema", "nearest"))
def test_merging_while_decoding(how: str) -> None:
    """A step with a merge stores what the same step without one stores, merged by hand."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    token, model = oracle.force(family, 2, 1), oracle.subject(family)
    recipe = SCHEDULES["h2o"].override(compact=how)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        bar = [layer.schedule.threshold for layer in twin.layers]
        model(input_ids=token, past_key_values=cache, use_cache=True)
    with accelerated(model, recipe.override(every=100)):
        model(input_ids=token, past_key_values=twin, use_cache=True)
    merged = 0
    for ours, whole, before in zip(cache.layers, twin.layers, bar, strict=True):
        keys, values = ours.stored()
        all_keys, all_values = whole.stored()
        for b in range(2):
            for h in range(keys.shape[1]):
                place, kept_place = whole.index.index[b, h], ours.index.index[b, h]
                kept, gone = torch.isin(place, kept_place) & (place >= 0), ~torch.isin(place, kept_place)
                assert int(gone.sum()) == 1
                if how == "ema":
                    assert before is not None
                    best = torch.cosine_similarity(all_keys[b, h][gone], all_keys[b, h][kept], dim=-1).max()
                    passes = best >= 0.5 * before[b, h] + 0.5 * best
                    mine = "weighted" if passes else None
                else:
                    mine = how
                for got, x in ((keys, all_keys), (values, all_values)):
                    wanted = by_hand(mine, all_keys[b, h], x[b, h], kept, gone)[kept] if mine else x[b, h][kept]
                    torch.testing.assert_close(got[b, h][kept_place >= 0], wanted, rtol=1e-4, atol=1e-5)
                    merged += int(not torch.equal(wanted, x[b, h][kept]))
    assert merged
