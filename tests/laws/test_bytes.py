"""Law 7: the bytes reported are the bytes held, counted on unique storages; what is evicted is gone."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES, cache, follow, generate, inputs, model, recipe_of
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

import mmaccel
from mmaccel import accelerated, get_recipe
from mmaccel.families import family_of
from mmaccel.kv.layer import CompressedLayer
from mmaccel.kv.recurrent import states_of
from mmaccel.method import LayerMethod, Policy, ProjectorMethod

families = pytest.mark.square("family", FAMILIES, of="kinds")
#: every recipe on every family that has what it asks for
SQUARE = [
    (family, name)
    for family in FAMILIES
    for name in ("none", "test-fixed-cache", *oracle.named_recipes())
    if oracle.fits(name, family)
]
#: methods that keep just as many tokens, or keys of every head, as they are asked for, for good, and merge none
DROPPING = [
    name
    for name in (*oracle.methods_that_drop(ProjectorMethod, LayerMethod), *oracle.policies_that_drop())
    if mmaccel.get_method(name).budget == "exact" and oracle.for_good(name)
]


def held(root: Any) -> int:
    """Bytes of the unique storages of all tensors that are reachable from an object, whatever it is made of."""
    seen, storages, queue = set(), {}, [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType, types.CodeType)):
            continue
        assert not isinstance(thing, nn.Module), "a cache holds on to a model"
        seen.add(id(thing))
        # transformers keeps the width of a window as a tensor
        seen.add(id(getattr(thing, "_sliding_window_tensor", None)))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            continue
        queue.extend(gc.get_referents(thing))
    return sum(storages.values())


def sizes(tiny: Any) -> list[tuple[int, int]]:
    """Of every layer with keys and values, its heads, and the bytes of one of each, and of the key of an indexer."""
    known = family_of(tiny)
    # of latents both parts are one key, of which the value is a part
    each = 4 if known.latent else 2 * 4
    more = {number: 4 * known.attention_in(number).indexer.head_dim for number in known.indexed}
    return [(known.heads_in(n)[0], each * known.heads_in(n)[1] + more.get(n, 0)) for n in known.attending]


def whole(layers: list[tuple[int, int]]) -> int:
    """Bytes of a token in so many layers."""
    return sum(heads * unit for heads, unit in layers)


@pytest.mark.square(("family", "method", "kind"), oracle.in_turn(SQUARE, lambda _: ("image", "uneven")))
def test_reported_is_held(family: str, method: str, kind: str) -> None:
    """After a first and a second turn, with dense and with ragged layers."""
    tiny, feed = model(family), inputs(family, kind)
    chosen = get_recipe("none") if method == "none" else recipe_of(method, family)
    with accelerated(tiny, chosen, processor=zoo.processor(family)):
        out = generate(tiny, feed)
        assert tiny.mmaccel.stats()["kv_bytes"] == held(out.past_key_values) > 0
        words = inputs(family, "text", batch=len(feed["input_ids"]))
        again = generate(tiny, follow(feed, out, words)[0], past_key_values=out.past_key_values)
        assert tiny.mmaccel.stats()["kv_bytes"] == held(again.past_key_values)


@families
def test_reported_is_held_by_loops_and_beams(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("snapkv"), processor=zoo.processor(family)), torch.no_grad():
        mine = cache()
        for tokens in (feed, {"input_ids": feed["input_ids"][:, -1:]}):
            tiny(**tokens, past_key_values=mine, use_cache=True)
            assert tiny.mmaccel.stats()["kv_bytes"] == held(mine)
        beams = generate(tiny, feed, num_beams=3)
        assert tiny.mmaccel.stats()["kv_bytes"] == held(beams.past_key_values)


@pytest.mark.square(("family", "method"), [case for case in SQUARE if case[1] in DROPPING])
def test_pruned_is_less_in_proportion(family: str, method: str) -> None:
    """Keys and values are exactly those that the counts promise; what else is held is small."""
    tiny, feed, new = model(family), inputs(family), 2
    layers = sizes(tiny)
    visual = int(zoo.visual_mask(family, tiny, feed["input_ids"]).sum())
    full = generate(tiny, feed, new=new).past_key_values
    states = sum(x.nbytes for layer in full.layers if isinstance(layer, LinearAttentionLayer) for x in states_of(layer))
    assert (states > 0) == family_of(tiny).stateful
    bare = held(full) - states
    length = feed["input_ids"].shape[1] + new - 1
    assert bare == whole(layers) * length
    with accelerated(tiny, recipe_of(method, family, retain=0.25), processor=zoo.processor(family)):
        out = generate(tiny, feed, new=new)
        stats, chosen = tiny.mmaccel.stats(), tiny.mmaccel.plan.stages[0].method
    kept = stats["stages"][-1]["tokens_kept"]
    assert kept == stats["stages"][-1]["resolved"] <= 0.35 * visual
    first = family_of(tiny).stored_from(chosen.layer) if isinstance(chosen, LayerMethod) else 0
    keys = bare - whole(layers[first:]) * (visual - kept)
    stored = [layer.stored() for layer in out.past_key_values.mmaccel.layers]
    assert sum(4 * (k.numel() + v.numel()) for k, v in stored) == keys
    # beside keys and values: their places, four bytes each, shared by layers unless heads differ
    apart = isinstance(chosen, Policy) and not chosen.shared
    places = 4 * length * sum(heads if apart else 1 for heads, _ in layers)
    assert keys <= stats["kv_bytes"] - states <= keys + places + 1024


@families
def test_evicted_keys_are_gone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After snapkv 0.25 no storage holds the visual keys any more, and nothing else keeps the full ones alive."""
    tiny, feed = model(family), inputs(family)
    length = feed["input_ids"].shape[1]
    visual = int(zoo.visual_mask(family, tiny, feed["input_ids"]).sum())
    full: list[weakref.ref[Any]] = []
    with accelerated(tiny, recipe_of("snapkv", retain=0.25), processor=zoo.processor(family)):
        original = CompressedLayer.evict

        def evict(self: Any, kept: Tensor, merged: Any = None, lengths: Any = None) -> None:
            full.extend(weakref.ref(tensor) for tensor in self.stored())
            original(self, kept, merged, lengths)

        monkeypatch.setattr(CompressedLayer, "evict", evict)
        out = generate(tiny, feed)
        kept = tiny.mmaccel.stats()["stages"][0]["tokens_kept"]
    gc.collect()
    assert len(full) == 2 * len(sizes(tiny)) and all(ref() is None for ref in full)
    assert kept < 0.3 * visual
    for layer in out.past_key_values.mmaccel.layers:
        keys, values = layer.stored()
        assert keys.shape[2] == values.shape[2] == length - visual + kept + 3
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == 4 * tensor.numel()


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_ragged_layers_hold_no_padding(family: str) -> None:
    """Heads and rows that keep different counts are stored end to end."""
    tiny, feed = model(family), inputs(family, "uneven")
    heads, unit = sizes(tiny)[0]
    visual = zoo.visual_mask(family, tiny, feed["input_ids"])
    text = int((feed["attention_mask"].bool() & ~visual).sum())
    with accelerated(tiny, recipe_of("test-fixed-cache")):
        out = generate(tiny, feed, new=1)
        kept = tiny.mmaccel.stats()["stages"][0]["tokens_kept"]
    for layer in out.past_key_values.layers:
        assert layer.ragged is not None
        assert layer.ragged.lengths.sum() == heads * (text + kept)
        assert 4 * (layer.ragged.keys.numel() + layer.ragged.values.numel()) == unit * heads * (text + kept)


@families
def test_the_handle_keeps_no_cache_alive(family: str) -> None:
    """When the caller lets go of the cache, its memory is free although the model stays accelerated."""
    tiny = model(family)
    with accelerated(tiny, recipe_of("snapkv"), processor=zoo.processor(family)):
        out = generate(tiny, inputs(family))
        watched = [weakref.ref(out.past_key_values), *(weakref.ref(x.keys) for x in out.past_key_values.mmaccel.layers)]
        del out
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)
