"""ZeroMerge: keys that leave are merged into few, and a key of n tokens is attended to as n keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from evicting import stage
from laws import oracle
from laws.helpers import THREE_AXES, follow, generate, inputs
from torch import Tensor
from transformers import DynamicCache

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, accelerated
from mmaccel.kv.merged_keys import MergedKeys, into_likest, into_runs, means
from mmaccel.kv.policies.zeromerge import ZeroMerge
from mmaccel.runtime.graphs import captured

pytestmark = pytest.mark.usefixtures("no_gradients")

MERGING = {"compact": "residual:3", "joint": True}


def merging(retain: float = 0.4, **options: Any) -> Recipe:
    return stage("zeromerge", retain, **{**MERGING, **options})


def bools(*rows: str) -> Tensor:
    return torch.tensor([[[c == "x" for c in row] for row in rows]])


def test_runs_are_as_long_as_each_other_and_the_first_ones_longer() -> None:
    gone, spots = bools("xx.x.x.x", "........"), bools("....x.x.", ".x......")
    slots, there, share = into_runs(gone, spots, 2)
    assert slots.tolist() == [[[4, 6], [1, 0]]] and there.tolist() == [[[True, True], [True, False]]]
    # seven keys of head 0 in order: 0 1 3 4 | 5 6 7
    assert share[0, 0].tolist() == [[1, 1, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1]]
    assert share[0, 1].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0], [0] * 8]
    x = torch.arange(16.0).view(1, 2, 8, 1)
    merged = means(x, slots, there, share)
    assert merged[0, 0, :, 0].tolist() == [0, 1, 2, 3, 2, 5, 6, 7] and torch.equal(merged[0, 1], x[0, 1])


def test_a_key_goes_where_its_product_is_largest() -> None:
    keys = torch.tensor([[[[1.0, 0], [0, 1], [3, 1], [5, 5]]]])
    slots, there, counts = torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2, dtype=torch.bool), torch.tensor([[[4.0, 2]]])
    share = into_likest(keys, bools("..x."), slots, there, counts)
    assert share[0, 0].tolist() == [[4, 0, 1, 0], [0, 2, 0, 0]]
    torch.testing.assert_close(means(keys, slots, there, share)[0, 0, 0], torch.tensor([7 / 5, 1 / 5]))
    # on a tie the first takes it, and one that is not there takes nothing
    assert into_likest(keys, bools("...x"), slots, there, counts)[0, 0, :, 3].tolist() == [1, 0]
    assert not into_likest(keys, bools("...x"), slots, torch.zeros_like(there), counts).any()


def unrolled(layer: Any, memory: MergedKeys) -> list[Tensor]:
    """Keys and values of a layer of one row, each as often as tokens are in it, ``[1, Hkv, seen, D]``."""
    keys, values = layer.stored()
    index = layer.index.by_head.expand(-1, keys.shape[1], -1)
    counts = memory.of_slots(layer.number, index).clamp(min=1).long() * (index >= 0)
    assert (counts.sum(-1) == layer.seen).all(), "no token is lost"
    return [
        torch.stack([x[0, h].repeat_interleave(n, dim=0) for h, n in enumerate(counts[0])])[None]
        for x in (keys, values)
    ]


def agrees_with_copies(model: Any, cache: Any, family: str) -> MergedKeys:
    """The next step attends to a merged key as to one for every token in it: a bare model with such a cache says the same."""
    state, token = cache.mmaccel, oracle.force(family, 1, 1)
    memory = state.shared.memory(MergedKeys)
    assert memory is not None
    plain = DynamicCache(config=model.config.get_text_config())
    for number, layer in enumerate(state.layers):
        plain.update(*unrolled(layer, memory), number)
    position = (state.seen - state.positions.offset)[:, None]
    position = position.expand(3, -1, -1) if family in THREE_AXES else position
    ours = model(input_ids=token, past_key_values=cache).logits
    theirs = oracle.bare(family)(input_ids=token, past_key_values=plain, position_ids=position).logits
    oracle.close(ours, theirs)
    return memory


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "options",
    [{}, {"every": 1}, {"every": 2, "compact": "residual:1"}, {"every": 2, "head_budget": "adaptive", "tail": 3}],
    ids=str,
)
def test_a_merged_key_is_attended_to_as_often_as_tokens_are_in_it(family: str, options: dict[str, Any]) -> None:
    with accelerated(oracle.subject(family), merging(**options)) as model:
        cache = generate(model, zoo.inputs(family, "image"), new=4).past_key_values
        memory = agrees_with_copies(model, cache, family)
    assert len(memory.counts) == len(cache.layers) and all((x > 1).all() for x in memory.counts.values())


@pytest.mark.parametrize(("every", "packs"), [(0, False), (1, False), (0, True)])
def test_in_a_second_turn_and_beside_a_codec(every: int, packs: bool) -> None:
    """Each prompt has merged keys of its own; packed ones weigh as they did."""
    family = "llava"
    first, second = zoo.inputs(family, "image"), inputs(family, seed=1)
    policy = Stage("zeromerge", 0.4, {**MERGING, "every": every})
    codec = Stage("kivi", None, {"bits": 8, "page": 16, "group": 16, "residual": 0})
    with accelerated(oracle.subject(family), Recipe("both", (policy, codec) if packs else (policy,))) as model:
        out = generate(model, first, new=3)
        agrees_with_copies(model, copy.deepcopy(out.past_key_values), family)
        kept, _ = follow(first, out, second)
        out = generate(model, kept, new=3, past_key_values=out.past_key_values)
        memory = agrees_with_copies(model, out.past_key_values, family)
    assert all(x.shape[2] == 6 for x in memory.places.values())
    assert packs == out.past_key_values.mmaccel.layers[0].packed.any_pages


def test_eager_attention_weighs_them_too() -> None:
    feed, token = zoo.inputs("llava", "uneven"), oracle.force("llava", 2, 1)
    said = []
    for kind in ("sdpa", "eager"):
        with accelerated(oracle.subject("llava", attn_implementation=kind), merging(every=1)) as model:
            cache = model(**feed, use_cache=True).past_key_values
            said.append(model(input_ids=token, past_key_values=cache).logits)
    oracle.close(*said)


def test_the_factor_of_the_logarithm() -> None:
    """With 0 a merged key weighs as one."""
    feed, token, said = zoo.inputs("llava", "image"), oracle.force("llava", 1, 1), []
    for weight in (0.0, 0.5, 1.0):
        with accelerated(oracle.subject("llava"), merging(merge_weight=weight)) as model:
            cache = model(**feed, use_cache=True).past_key_values
            assert cache.mmaccel.shared.memory(MergedKeys).factor == weight
            said.append(model(input_ids=token, past_key_values=cache).logits)
    oracle.apart(said[0], said[2])
    oracle.apart(said[1], said[2])


def test_what_all_keep_is_merged_nowhere() -> None:
    with accelerated(oracle.subject("llava"), merging(1.0)) as model:
        cache = generate(model, zoo.inputs("llava", "image"), new=2).past_key_values
    assert cache.mmaccel.shared.memory(MergedKeys) is None


def test_merged_keys_stay_and_the_newest() -> None:
    """Behind 12 steps at every step the keys of the prompt's runs are there, and the newest ``tail``."""
    with accelerated(oracle.subject("llava"), merging(every=1, tail=5)) as model:
        cache = generate(model, zoo.inputs("llava", "image"), new=12).past_key_values
    state = cache.mmaccel
    memory = state.shared.memory(MergedKeys)
    assert memory is not None
    for layer in state.layers:
        places = layer.index.by_head
        assert torch.isin(memory.places[layer.number], places).all()
        for head in places[0]:
            assert set(range(layer.seen - 5, layer.seen)) <= set(head.tolist())


def test_any_policy_merges_so() -> None:
    with accelerated(oracle.subject("llava"), stage("knorm", 0.4, compact="residual:2", joint=True, every=2)) as model:
        cache = generate(model, zoo.inputs("llava", "image"), new=4).past_key_values
        agrees_with_copies(model, cache, "llava")


def test_a_bare_model_refuses_such_a_cache_and_no_step_is_captured() -> None:
    feed, token = zoo.inputs("llava", "image"), oracle.force("llava", 1, 1)
    with accelerated(oracle.subject("llava"), merging()) as model:
        cache = model(**feed, use_cache=True).past_key_values
        assert "weights of their own" in captured._obstacle_in_cache(model.mmaccel.plan, cache.mmaccel)
    with pytest.raises(mmaccel.UnsupportedError, match="would misread"):
        oracle.bare("llava")(input_ids=token, past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compact": "residual:0"}, "a number from 1 to 64"),
        ({"compact": "residual:1.5"}, "whole number of keys"),
        ({"merge_weight": -1.0}, "`merge_weight` of zeromerge must be at least 0"),
        ({"tail": -1}, "`tail`"),
        ({"rest": "int4"}, "compact='residual:1' merges"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(MmaccelError, match=says):
        ZeroMerge(**options)
