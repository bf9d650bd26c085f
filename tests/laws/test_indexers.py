"""Layers that read what an indexer chooses: dropping is hiding, from the indexer too, however few keys it may choose; a budget
for all that is left is attention without one; bytes of a token, a first turn of text, and what is refused."""

from __future__ import annotations

import copy

import oracle
import pytest
import torch
import zoo

from mmaccel import UnsupportedError, accelerated
from mmaccel.families import described, family_of

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = [family for family in zoo.FAMILIES if oracle.adapter(family).indexed]
# by choice: before the language model, inside it at one layer and at several, and in the cache
CHOSEN = ("divprune", "dart", "fastv", "pyramiddrop-step", "snapkv", "h2o", "knorm")
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("budget", [8, 16])
def test_dropping_is_hiding(family: str, name: str, budget: int) -> None:
    feed, forced, few = zoo.inputs(family, "image"), oracle.force(family, 1), {"index_topk": budget}
    got = oracle.record(family, feed, oracle.recipe(name, family), forced, True, None, **few)
    prompt, steps = oracle.replay(family, feed, forced, got.seen, **few)
    oracle.close(got.prompt[got.kept], prompt[got.kept], 4 * oracle.TOLERANCE)
    oracle.close(got.steps, steps, 4 * oracle.TOLERANCE)
    oracle.apart(got.steps, oracle.replay(family, feed, forced, **few)[1])
    # what the indexer chooses matters
    oracle.apart(got.steps, oracle.replay(family, feed, forced, got.seen, index_topk=4096)[1])


@families
def test_a_budget_for_what_is_left_is_attention_to_all_of_it(family: str) -> None:
    """Of a prompt whose tokens are more than the indexer may choose."""
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1)
    what = oracle.recipe("divprune", family, 0.1)
    every = oracle.record(family, feed, what, forced, True, None, index_topk=4096)
    left = int(every.kept.sum()) + forced.shape[1]
    assert left < feed["input_ids"].shape[1]
    got = oracle.record(family, feed, what, forced, True, None, index_topk=left)
    oracle.close(got.prompt[got.kept], every.prompt[got.kept])
    oracle.close(got.steps, every.steps)
    oracle.close(oracle.replay(family, feed, forced, every.seen, index_topk=4096)[1], every.steps)


@families
def test_bytes_of_a_token(family: str) -> None:
    """A latent, a part with RoPE where a layer has one, and the key of the indexer where there is one."""
    tiny, feed = oracle.subject(family), zoo.inputs(family)
    # 24 or 32 and 8 or none, and 16
    layers = {"mistral_large4": 3 * (24 + 8 + 16) + 24 + 16, "dots3_note": 2 * (24 + 8 + 16) + 2 * (32 + 8)}
    with accelerated(tiny, "divprune", retain=0.25):
        tiny.generate(**feed, max_new_tokens=1, do_sample=False)
        stats = tiny.mmaccel.stats()
    tokens, visual = feed["input_ids"].shape[1], stats["visual_tokens"]
    assert stats["kv_bytes_bare"] == tokens * 4 * layers[family]
    assert 0 <= stats["kv_bytes"] - (tokens - visual + round(visual / 4)) * 4 * layers[family] < 64 * tokens


@families
def test_a_picture_behind_a_turn_of_text(family: str) -> None:
    """The cache of a bare first turn has keys of the indexer, which are taken over."""
    tiny, words, feed = oracle.subject(family, index_topk=16), zoo.inputs(family, "text"), zoo.inputs(family, "image")
    more = dict(feed, attention_mask=torch.cat([words["attention_mask"], feed["attention_mask"]], dim=1))
    whole = dict(more, input_ids=torch.cat([words["input_ids"], feed["input_ids"]], dim=1))
    bare = tiny(**words, use_cache=True).past_key_values
    with accelerated(tiny, "divprune", retain=0.25, processor=zoo.processor(family)):
        once = tiny(**whole).logits
        behind = tiny(**more, past_key_values=copy.deepcopy(bare)).logits
    there = ~behind.isnan().any(-1)
    oracle.close(behind[there], once[:, words["input_ids"].shape[1] :][there], 4 * oracle.TOLERANCE)


@families
def test_without_a_recipe_the_model_is_bare(family: str) -> None:
    """Calls that pass by mmaccel choose as the bare model does, whose mask has the choice in it."""
    tiny, feed = oracle.subject(family, index_topk=8), zoo.inputs(family, "image")
    wanted = tiny(**feed).logits
    with accelerated(tiny, "divprune"):
        oracle.close(tiny(**feed, mmaccel=False).logits, wanted, 0.0)
        words = zoo.inputs(family, "text")
        spoken = tiny(**words).logits
    oracle.close(spoken, tiny(**words).logits, 0.0)
    with accelerated(tiny, "none"):
        oracle.close(tiny(**feed).logits, wanted)


MISTRAL = [family for family in FAMILIES if family == "mistral_large4"]


@pytest.mark.parametrize("family", MISTRAL)
@pytest.mark.parametrize("name", ["fastv", "snapkv"])
def test_layers_that_share_a_choice_store_the_same_tokens(family: str, name: str) -> None:
    """Methods before the language model are right there, and others refused."""
    shared = {"indexer_types": ("full", "shared", "full", "shared"), "index_topk": 16}
    feed, forced = zoo.inputs(family, "image"), oracle.force(family, 1)
    got = oracle.record(family, feed, oracle.recipe("divprune", family), forced, True, None, **shared)
    oracle.close(got.steps, oracle.replay(family, feed, forced, got.seen, **shared)[1], 4 * oracle.TOLERANCE)
    said = f"^{name} leaves layers with different tokens, and the language model of mistral_large4 has layers that read"
    with pytest.raises(UnsupportedError, match=said):
        with accelerated(oracle.subject(family, **shared), oracle.recipe(name, family)):
            pass


@pytest.mark.parametrize("family", MISTRAL)
def test_layers_that_read_the_latents_of_others_are_refused(family: str) -> None:
    config = copy.deepcopy(oracle.bare(family).config)
    config.text_config.kv_source_layers = [0, 1, 1, 3]
    with pytest.raises(UnsupportedError, match="mistral_large4_text: some layers read the latents of others"):
        described(config)


@families
@pytest.mark.parametrize("name", ["lazyllm", "kvzip"])
def test_what_is_refused(family: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}.*{family}"):
        with accelerated(oracle.subject(family), name):
            pass
    assert family_of(oracle.bare(family)).undivided
