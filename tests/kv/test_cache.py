"""The cache as a thing: copied, saved, cropped, split, and used without its recipe."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import zoo
from evicting import SCHEDULES, places, stage, step_by_step
from laws import oracle
from tail import in_turn

from mmaccel import accelerated
from mmaccel.kv.index import KeyIndex

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize(("name", "how"), in_turn(("h2o", "adaptive", "snapkv"), ("deepcopy", "saved")))
def test_a_copy_of_the_cache_goes_on_alike(name: str, how: str) -> None:
    family, recipe = "llava", SCHEDULES[name]
    feed = zoo.inputs(family, "uneven")
    forced = oracle.force(family, len(feed["input_ids"]), 6)
    with accelerated(oracle.subject(family), recipe) as model:
        cache = model(**feed, use_cache=True).past_key_values
        for token in forced[:, :2].T:
            model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
        if how == "deepcopy":
            other = copy.deepcopy(cache)
        else:
            file = io.BytesIO()
            torch.save(cache, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        size = other.mmaccel.nbytes()
        assert size == cache.mmaccel.nbytes()
        went = [
            torch.stack(
                [model(input_ids=t[:, None], past_key_values=c, use_cache=True).logits for t in forced[:, 2:].T]
            )
            for c in (cache, other)
        ]
    assert torch.equal(*went)
    mine, theirs = cache.mmaccel.layers[0], other.mmaccel.layers[0]
    assert (
        mine is cache.layers[0]
        and theirs is other.layers[0]
        and theirs.shared is other.mmaccel.shared
        and mine is not theirs
    )


def test_a_cache_that_goes_on_without_the_recipe() -> None:
    """What was carried may be stale or gone; the cache answers all the same, and takes the schedule up again."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    token, model = oracle.force(family, 2, 1), oracle.subject(family)
    with accelerated(model, SCHEDULES["h2o"]):
        cache = model(**feed, use_cache=True).past_key_values
        stored = len(cache.layers[0].index)
    with accelerated(model, stage("snapkv")):
        for _ in range(3):
            model(input_ids=token, past_key_values=cache, use_cache=True)
        assert len(cache.layers[0].index) == stored + 3
    with accelerated(model, SCHEDULES["h2o"]):
        model(input_ids=token, past_key_values=cache, use_cache=True)
        assert len(cache.layers[0].index) == stored


@pytest.mark.parametrize("kind", ("image", "uneven"))
@pytest.mark.parametrize("name", ("h2o", "adaptive"))
def test_cropping_takes_the_figures_along(name: str, kind: str) -> None:
    family, feed = "llava", zoo.inputs("llava", kind)
    forced, model = oracle.force(family, len(feed["input_ids"]), 4), oracle.subject(family)
    recipe = SCHEDULES[name].override(every=100)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        model(input_ids=forced[:, :1], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        model(input_ids=forced[:, 1:], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.crop(-3)
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        assert ours.schedule.received.shape == (*theirs.stored()[0].shape[:3],)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("kind", ("image", "uneven"))
@pytest.mark.parametrize("name", ("h2o", "adaptive"))
def test_tokens_that_are_taken_back_are_not_observed(name: str, kind: str) -> None:
    """What they attended to does not count when keys are chosen later."""
    family, feed = "llava", zoo.inputs("llava", kind)
    forced, model = oracle.force(family, len(feed["input_ids"]), 7), oracle.subject(family)
    recipe = SCHEDULES[name].override(every=5, retain=0.2)
    with accelerated(model, recipe):
        cache = model(**feed, use_cache=True).past_key_values
        model(input_ids=forced[:, :1], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        model(input_ids=forced[:, 4:], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.crop(-3)
        before = places(cache, feed["input_ids"].shape[1] + 5)
        for token in forced[:, :4].T:
            for one in (cache, twin):
                model(input_ids=token[:, None], past_key_values=one, use_cache=True)
    ours, theirs = (places(one, feed["input_ids"].shape[1] + 5) for one in (cache, twin))
    assert torch.equal(ours, theirs) and (before & ~ours).any()
    for one, other in zip(cache.layers, twin.layers, strict=True):
        torch.testing.assert_close(one.schedule.received, other.schedule.received)


@pytest.mark.parametrize("name", ("tova", "elastic"))
def test_keys_that_heads_share_have_one_index(name: str) -> None:
    """Where all heads keep the same keys, their places are stored once, and rows of equal length as dense tensors."""
    family, feed = "llava", zoo.inputs("llava", "image")
    forced = oracle.force(family, 1, 3)
    _, _, cache = step_by_step(family, feed, SCHEDULES[name], forced)
    for layer in cache.layers:
        assert layer.index.index.dim() == 2 and layer.ragged is None and layer.keys.shape[1] > 1


@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv"))
def test_a_row_of_the_cache_goes_on_alone(name: str) -> None:
    """What is carried for a row leaves with it."""
    family, feed = "llava", zoo.inputs("llava", "uneven")
    forced, model = oracle.force(family, 2, 5), oracle.subject(family)
    with accelerated(model, SCHEDULES[name]):
        cache = model(**feed, use_cache=True).past_key_values
        model(input_ids=forced[:, :1], past_key_values=cache, use_cache=True)
        row = copy.deepcopy(cache)
        row.batch_select_indices(torch.tensor([1]))
        assert len(row.mmaccel.shared.places.grid_table) == 1 and row.mmaccel.nbytes() < cache.mmaccel.nbytes()
        for token in forced[:, 1:].T:
            both = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits
            alone = model(input_ids=token[1:, None], past_key_values=row, use_cache=True).logits
            oracle.close(alone[0], both[1])
    total = feed["input_ids"].shape[1] + 5
    assert torch.equal(places(row, total)[:, 0], places(cache, total)[:, 1])


def test_a_mask_knows_which_tokens_see_each_other() -> None:
    """Layers with the same index ask with and without tokens that attend both ways, in any order."""
    index, queries = KeyIndex(torch.arange(4)[None], False, 4), torch.arange(4)[None]
    both = torch.tensor([[-1, 0, 0, -1]])
    for groups in (both, None, both):
        mask = index.mask(queries, 8, groups)
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        if groups is None:
            assert mask is None or torch.equal(mask[0, 0], causal)
        else:
            causal[1, 2] = True
            assert torch.equal(mask[0, 0], causal)
    # behind a window all layers have masks
    wide = index.mask(queries, 2, both)
    assert not torch.equal(wide, index.mask(queries, 2, None)) and torch.equal(wide, index.mask(queries, 2, both))
