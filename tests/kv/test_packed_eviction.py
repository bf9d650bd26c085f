"""Schedules beside a codec: packed keys are dropped, and never change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic
import torch
import zoo
from evicting import SCHEDULES, stage
from laws import helpers, oracle
from tail import few, in_turn
from torch import Tensor
from transformers import DynamicCache

from mmaccel import Recipe, Stage, accelerated
from mmaccel.kv.codecs import Codec

pytestmark = pytest.mark.usefixtures("no_gradients")


#: so small that tiny prompts fill pages
# checked by test_every_codec_is_beside_a_schedule
CODECS = {
    "kivi": Stage("kivi", None, {"bits": 2, "page": 16, "group": 16, "residual": 0}),
    "kivi-visual": Stage("kivi", None, {"bits": 4, "page": 16, "group": 16, "residual": 0, "visual_only": True}),
    "fp8": Stage("fp8", None, {"page": 16}),
    "think": Stage("think", None, {"page": 16, "group": 16, "residual": 0, "align": 4}),
    "vidkv": Stage("vidkv", None, {"page": 32}),
    "calibquant": Stage("calibquant", None, {"page": 16}),
    "turboquant": Stage("turboquant", None, {"page": 16, "bits": 3}),
    "qserve": Stage("qserve", None, {"page": 16}),
    "zipcache": Stage("zipcache-codec", None, {"page": 16}),
    "gear": Stage("gear", None, {"page": 16}),
    "nsnquant": Stage("nsnquant", None, {"page": 16}),
}
#: every kind of schedule, and every codec
# checked by test_every_codec_is_beside_a_schedule
PACKED = {
    "h2o": "kivi",
    "h2o-text": "fp8",
    "windowkv": "nsnquant",
    "h2o-visual": "kivi-visual",
    "every-3": "vidkv",
    "streaming-llm": "kivi",
    "snapkv": "gear",
    "adaptive": "kivi",
    "tova": "calibquant",
    "cap": "kivi",
    "elastic": "turboquant",
    "lagkv-each": "think",
    "layers": "qserve",
    "a2sf": "zipcache",
}


def test_every_codec_is_beside_a_schedule() -> None:
    assert {CODECS[codec].method for codec in PACKED.values()} == set(synthetic.offered(Codec))


def beside(recipe: Recipe, codec: str) -> Recipe:
    """With a budget that leaves whole pages."""
    return replace(recipe, stages=(replace(recipe.stages[0], retain=0.7), CODECS[codec]))


def held_by_place(cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What every head stores for every place seen: whether, and whether packed, ``[L, B, Hkv, seen]``; keys and values
    together, ``[L, B, Hkv, seen, 2 D]``, nought where nothing is stored."""
    there, packed, numbers = [], [], []
    for layer in cache.layers:
        both = torch.cat(layer.stored(), dim=-1)
        index = layer.index.by_head.long().expand(both.shape[:3])
        slot = index.masked_fill(index < 0, layer.seen)
        empty = torch.zeros(*index.shape[:2], layer.seen + 1, dtype=torch.bool)
        there.append(empty.scatter(2, slot, True)[..., :-1])
        packed.append(empty.scatter(2, slot, (torch.arange(index.shape[-1]) < layer.width).expand_as(slot))[..., :-1])
        wide = both.new_zeros(*index.shape[:2], layer.seen + 1, both.shape[-1])
        numbers.append(wide.scatter(2, slot[..., None].expand_as(both), both)[:, :, :-1])
    return torch.stack(there), torch.stack(packed), torch.stack(numbers)


def one_step(family: str, cache: Any, token: Tensor, **overrides: Any) -> Tensor:
    """The bare model over a plain cache of all places, where what is not stored is hidden from each head."""
    model, state, plain = oracle.replayer(family, **overrides), cache.mmaccel, DynamicCache()
    there, _, numbers = held_by_place(cache)
    heads = model.config.get_text_config().num_attention_heads
    for number, layer in enumerate(oracle.text_model(model).layers):
        plain.update(*numbers[number].chunk(2, dim=-1), number)
        visible = torch.nn.functional.pad(there[number], (0, 1), value=True)
        layer.self_attn.visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)[:, :, None]
    position = (state.seen - state.positions.offset)[:, None]
    position = helpers.on_axes(family, position)
    return model(input_ids=token[:, None], past_key_values=plain, position_ids=position).logits[:, -1]


class Once:
    """Watches a cache: what a head stores for a place may change once, when it is packed, and never again."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.dropped = cache, 0
        self.there, self.once, self.numbers = held_by_place(cache)

    def look(self) -> None:
        there, packed, numbers = held_by_place(self.cache)
        old = self.there.shape[3]
        both, fresh = self.there & there[..., :old], packed[..., :old] & ~self.once
        assert not (there[..., :old] & ~self.there).any(), "a key came back"
        assert torch.equal(numbers[..., :old, :][both & ~fresh], self.numbers[both & ~fresh]), "a key changed"
        self.dropped += int((self.once & ~there[..., :old]).sum())
        packed[..., :old] |= self.once & there[..., :old]
        self.there, self.once, self.numbers = there, packed, numbers


#: by heads and for all of them, every step and every few
QUICK = ("every-3", "adaptive")


@pytest.mark.parametrize(("family", "name"), in_turn(("llava", "qwen2_5_vl"), PACKED, of=QUICK))
def test_evicting_packed_keys_is_hiding_them(family: str, name: str) -> None:
    feed, recipe = zoo.inputs(family, "uneven"), beside(SCHEDULES[name], PACKED[name])
    forced = oracle.force(family, len(feed["input_ids"]), 40)
    counts = []
    with accelerated(oracle.subject(family), recipe, processor=zoo.processor(family)) as model:
        cache = model(**feed, use_cache=True).past_key_values
        once = Once(cache)
        for token in forced.T:
            once.look()
            counts.append(once.there.sum(-1))
            wanted = one_step(family, cache, token)
            got = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            oracle.close(got, wanted)
            assert model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()
    assert once.dropped or name == "h2o-visual" and family == "qwen2_5_vl", "nothing packed was ever dropped"
    options, kept = SCHEDULES[name].stages[0].options, torch.stack(counts)
    if "cap" in options:
        assert (kept <= 20).all()
    elif "growth" in options:
        assert torch.equal(kept[-1], kept[0] + 19)
    elif options.get("joint"):
        every = options["every"]
        assert (kept[every::every] == kept[0]).all() and (kept <= kept[0] + every - 1).all()


def test_the_first_and_the_newest_stay_wherever_they_are_stored() -> None:
    """Packed pictures stand before the text that is older than they."""
    family, feed = "llava", zoo.inputs("llava", "image")
    recipe = beside(stage("streaming-llm", every=1, joint=True, sinks=2), "kivi-visual")
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        assert all(layer.width and layer.index.by_head[0, 0, 0] > 1 for layer in cache.mmaccel.layers)
        for token in oracle.force(family, 1, 6).T:
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
    there, seen = held_by_place(cache)[0], cache.mmaccel.seen
    count = int(there[0, 0, 0].sum())
    assert there[..., :2].all() and there[..., seen - count + 2 :].all() and not there[..., 2 : seen - count + 2].any()


@pytest.mark.parametrize("how", few(("pivot", "average", "nearest"), ("pivot",)))
def test_merging_leaves_packed_keys_alone(how: str) -> None:
    """They do not take in others, which would quantise them again."""
    family, feed = "llava", zoo.inputs("llava", "image")
    recipe = beside(SCHEDULES["h2o"].override(compact=how), "kivi")
    changed = 0
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        for token in oracle.force(family, 1, 30).T:
            had, was_packed, were = held_by_place(cache)
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            there, packed, now = held_by_place(cache)
            same, fresh = there[..., :-1] & was_packed, (there & ~packed)[..., :-1]
            assert torch.equal(now[..., :-1, :][same], were[same])
            changed += int((now[..., :-1, :][fresh] != were[fresh]).any(-1).sum())
    assert changed, "nothing was merged"


@pytest.mark.full
@pytest.mark.parametrize("name", few(("h2o", "adaptive", "snapkv"), ("adaptive",)))
def test_beams_and_later_turns_on_packed_keys(name: str) -> None:
    """The best beam decodes as its tokens decode alone; then another picture comes."""
    family, recipe = "llava", beside(SCHEDULES[name], "kivi")
    feed = zoo.inputs(family, "image", question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=24, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
        assert (ways[:, :24] != ways[:, :1]).any(), "no beam was ever reordered"
        steps = torch.arange(tokens.shape[1])
        beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
        cache, logits = DynamicCache(), []
        for token in (None, *tokens.T[:-1]):
            new = feed if token is None else {"input_ids": token[:, None]}
            logits.append(model(**new, past_key_values=cache, use_cache=True).logits[:, -1])
        oracle.close(beams, torch.stack(logits, dim=1))
        more = helpers.inputs(family, "image", seed=1)
        seen, once = cache.get_seq_length(), Once(cache)
        model(input_ids=more["input_ids"], pixel_values=more["pixel_values"], past_key_values=cache, use_cache=True)
        once.look()
        assert cache.get_seq_length() == seen + more["input_ids"].shape[1]
        assert once.there[..., seen:].any() and model.mmaccel.stats()["kv_bytes"] == cache.mmaccel.nbytes()


@pytest.mark.full
def test_two_thousand_steps_of_packed_keys_do_not_drift() -> None:
    """Keys stay under the cap, bytes under those of full precision, and every step attends to exactly what is stored.

    The norms of keys leave a few tokens of every group, which is the most that packed pages can be asked for."""
    family, steps, longer, name = "llava", 2000, {"max_position_embeddings": 4096}, "cap"
    feed, model = zoo.inputs(family, "image"), oracle.subject(family, **longer)
    forced = oracle.force(family, 1, steps)
    sizes, keys = [], []
    with accelerated(model, SCHEDULES[name].override(cap=200)):
        full = model(**feed, use_cache=True).past_key_values
        for token in forced[:, :300].T:
            model(input_ids=token[:, None], past_key_values=full, use_cache=True)
    with accelerated(model, beside(SCHEDULES[name], "kivi").override(cap=200)):
        cache = model(**feed, use_cache=True).past_key_values
        once = Once(cache)
        for step, token in enumerate(forced.T):
            wanted = None
            if step % 50 == 49:
                once.look()
                wanted = one_step(family, cache, token, **longer)
            got = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
            if wanted is not None:
                oracle.close(got, wanted, 1e-4)
            sizes.append(cache.mmaccel.nbytes())
            keys.append(max(int((layer.index.by_head >= 0).sum(-1).max()) for layer in cache.layers))
    assert max(keys) == 200 and cache.get_seq_length() == feed["input_ids"].shape[1] + steps
    assert once.dropped > 500 and max(sizes[1000:]) <= 1.1 * max(sizes[:1000])
    assert max(sizes) < full.mmaccel.nbytes()
