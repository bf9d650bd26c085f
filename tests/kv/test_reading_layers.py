"""Policies that choose in every layer and step what is read: hidden from the step's query means left out of its reading."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import simulated
import synthetic
import torch
import zoo
from evicting import replay_steps, stage, step_by_step
from laws import oracle
from mmaccel_kernels.chosen import chosen_attention
from tail import few, in_turn
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, accelerate_vlm, accelerated
from mmaccel.kv.cache import CacheState
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.sparse import SparseMemory
from mmaccel.method import KeyBatch, ReadingPolicy
from mmaccel.method.registry import get_method
from mmaccel.runtime.cache import reading
from mmaccel.runtime.cache import sparse_read as sparse
from mmaccel.runtime.cache.sparse_read import prepare_reads, read_layer

pytestmark = pytest.mark.usefixtures("no_gradients")

POLICIES = tuple(synthetic.offered(ReadingPolicy))
#: pages of a few keys, as the pictures of the zoo are small; from the second layer on
SMALL = {"page": 3, "least": 1, "layer": 1, "clusters": 0.3, "queries": 4}


def small(name: str, **options: Any) -> dict[str, Any]:
    """Those options for small pictures, and of the others, that a policy has."""
    has = {field.name for field in fields(get_method(name))}
    return {key: value for key, value in (SMALL | options).items() if key in has}


def recipe_of(name: str, retain: float = 0.3, **options: Any) -> Recipe:
    return stage(name, retain, **small(name, **options))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, places: int) -> Iterator[dict[int, Tensor]]:
    """Per layer the ``places`` that the last step read there, ``[B, 1 or Hkv, places]`` bool; none for layers that read all."""
    seen: dict[int, Tensor] = {}
    choose = reading.read_layer

    def layered(policy: Any, layer: Any, *others: Any) -> Any:
        seen.pop(layer.number, None)
        made = choose(policy, layer, *others)
        if made is not None:
            at = made.slots(len(layer.index))
            index = layer.index.by_head.long().expand(-1, max(at.shape[1], layer.index.by_head.shape[1]), -1)
            at = at.expand(-1, index.shape[1], -1)
            read = index.gather(2, at.clamp(min=0)).masked_fill(at < 0, -1)
            assert all(len(set(head[head >= 0].tolist())) == int((head >= 0).sum()) for row in read for head in row)
            held = torch.zeros(*index.shape[:2], places + 1, dtype=torch.bool)
            seen[layer.number] = held.scatter_(2, read.masked_fill(read < 0, places), True)[..., :places]
        return made

    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_layer", layered)
        yield seen


def run_steps(
    monkeypatch: pytest.MonkeyPatch, family: str, feed: Any, recipe: Recipe, forced: Tensor, **overrides: Any
) -> tuple[Tensor, list[Tensor]]:
    """Logits of every forced step, and what each read: ``[L, B, Hkv, total]`` bool."""
    model = oracle.subject(family, **overrides)
    config = model.config.get_text_config()
    length, total = feed["input_ids"].shape[1], feed["input_ids"].shape[1] + forced.shape[1]
    valid = torch.cat([feed["attention_mask"].bool(), torch.ones(forced.shape, dtype=torch.bool)], dim=1)
    shape = (config.num_hidden_layers, -1, config.num_key_value_heads, -1)
    logits, held = [], []
    with accelerated(model, recipe, processor=zoo.processor(family)) as model, watched(monkeypatch, total) as seen:
        out = model(**feed, use_cache=True)
        for step, token in enumerate(forced.T):
            logits.append(out.logits[:, -1])
            out = model(input_ids=token[:, None], past_key_values=out.past_key_values, use_cache=True)
            read = (valid & (torch.arange(total) <= length + step))[None, :, None].expand(shape).clone()
            for layer, places in seen.items():
                assert not (places & ~read[layer][:, :1]).any(), "padding is read, or what is to come"
                read[layer] &= places
            held.append(read)
            assert model.mmaccel.stats()["kv_bytes"] == out.past_key_values.mmaccel.nbytes()
    logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), held


PROMPTS = (("llava", "uneven"), ("qwen2_5_vl", "uneven"), ("internvl", "image"))


@pytest.mark.parametrize(("family", "kind", "name"), in_turn(PROMPTS, POLICIES))
def test_what_a_step_does_not_read_is_hidden(
    family: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = zoo.inputs(family, kind)
    forced = oracle.force(family, len(feed["input_ids"]), 5)
    got, held = run_steps(monkeypatch, family, feed, recipe_of(name), forced)
    oracle.close(got, replay_steps(family, feed, forced, held))
    visual, length = oracle.visual(family, feed), feed["input_ids"].shape[1]
    text = feed["attention_mask"].bool() & ~visual
    for step, read in enumerate(held):
        assert (
            read[..., :length].masked_select(text[None, :, None]).all() and read[..., length : length + step + 1].all()
        )
        assert (read[0] == read[0][:, :1]).all() and read[0][:, 0, :length].masked_select(visual).all()
        assert not read[1:, ..., :length].masked_select(visual[None, :, None]).all(), "everything is read"
    moves = torch.stack(held)[..., :length].long().diff(dim=0)
    # triforce chooses once a prompt
    changes = (moves > 0).any() and (moves < 0).any()
    assert bool(changes) != (name == "triforce"), "no key came back"


@pytest.mark.parametrize("name", POLICIES)
def test_windows_and_what_is_read_go_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = oracle.WINDOWED[0]
    feed = zoo.inputs(family, "image")
    forced = oracle.force(family, 1, 4)
    got, held = run_steps(monkeypatch, family, feed, recipe_of(name), forced, **options)
    oracle.close(got, replay_steps(family, feed, forced, held, **options))


@pytest.mark.parametrize(("family", "name"), in_turn(("smolvlm", "qwen3_vl", "llava_onevision"), POLICIES))
def test_everything_is_the_bare_model(family: str, name: str) -> None:
    feed = zoo.inputs(family, "images")
    with accelerated(oracle.subject(family), recipe_of(name, 1.0), processor=zoo.processor(family)) as model:
        got = model.generate(**feed, **GREEDY)
    wanted = oracle.bare(family).generate(**feed, **GREEDY)
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=0)


@pytest.mark.parametrize("name", few(POLICIES, ["quest"]))
def test_eager_attention_reads_the_same_and_returns_its_weights(name: str) -> None:
    """Which are zero for what a head does not read."""
    feed = zoo.inputs("llava", "uneven")
    forced = oracle.force("llava", len(feed["input_ids"]), 3)
    with accelerated(oracle.subject("llava"), recipe_of(name)) as model:
        wanted, _ = oracle.decode(model, feed, forced)
        model.set_attn_implementation("eager")
        try:
            got, _ = oracle.decode(model, feed, forced)
            cache = model(**feed, use_cache=True).past_key_values
            weights = model(input_ids=forced[:, :1], past_key_values=cache, output_attentions=True).attentions
        finally:
            model.set_attn_implementation("sdpa")
    oracle.close(got, wanted)
    visual = oracle.visual("llava", feed)
    text = feed["attention_mask"].bool() & ~visual
    for layer in weights[1:]:
        read = (layer[:, :, 0, : visual.shape[1]] > 0).movedim(1, 0)
        assert read[:, text].all() and read[:, visual].any() and not read[:, visual].all()


@pytest.mark.parametrize(("family", "name"), in_turn(("llava", "qwen2_5_vl", "qwen3_vl"), POLICIES))
def test_a_row_reads_what_it_reads_alone(family: str, name: str) -> None:
    """By ``generate``, which gives tokens behind padding the positions that they have alone; what rates keys by channels before
    they meet the query sees other keys at other positions."""
    feed = zoo.inputs(family, "uneven")
    forced = oracle.force(family, len(feed["input_ids"]), 4)
    with accelerated(oracle.subject(family), recipe_of(name), processor=zoo.processor(family)) as model:
        whole, _ = oracle.decode(model, feed, forced)
        for row in range(len(forced)):
            alone, _ = oracle.decode(model, zoo.single(family, feed, row), forced[row : row + 1])
            oracle.close(whole[row], alone[0])


@pytest.mark.parametrize("name", POLICIES)
def test_beams_take_along_what_they_choose_from(name: str) -> None:
    feed = zoo.inputs("llava", "image", batch=2, question="a?")
    # what a beam chose first it reads to the end, if it carries what it chose
    recipe = recipe_of(name, alike=-1.0)
    with accelerated(oracle.subject("llava"), recipe) as model:
        out = model.generate(**feed, **{**GREEDY, "num_beams": 3, "max_new_tokens": 7})
    tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
    assert (ways[:, :7] != ways[:, :1]).any(), "no beam was ever reordered"
    steps = torch.arange(tokens.shape[1])
    got, _, _ = step_by_step("llava", feed, recipe, tokens[:, :-1])
    oracle.close(torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps], got)


def spoken(family: str, question: str) -> Tensor:
    return zoo.encode(family, [([], [], question)])["input_ids"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_second_picture_is_chosen_from_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And text that comes in several tokens at once reads everything, and is always read."""
    feed, second = zoo.inputs("llava"), zoo.inputs("llava", seed=3)
    budget, where = 0.3, [oracle.visual("llava", one)[0] for one in (feed, second)]
    recipe = recipe_of(name, budget)
    with accelerated(oracle.subject("llava"), recipe) as model, watched(monkeypatch, 400) as seen:
        out = model(**feed, use_cache=True)
        held = {"past_key_values": out.past_key_values, "use_cache": True}
        out = model(input_ids=torch.tensor([[7]]), **held)
        one = {layer: read.sum(-1).max() for layer, read in seen.items()}
        text = spoken("llava", "and this?")
        model(input_ids=text, **held)
        past = out.past_key_values.get_seq_length()
        model(**{**second, "attention_mask": torch.ones(1, past + second["input_ids"].shape[1])}, **held)
        model(input_ids=torch.tensor([[9]]), **held)
        layer = out.past_key_values.mmaccel.layers[1]
        assert one.keys() == seen.keys() == {1, 2, 3} and len(layer.index) == past + second["input_ids"].shape[1] + 1
        visual = torch.zeros(400, dtype=torch.bool)
        visual[: len(where[0])] = where[0]
        visual[past : past + len(where[1])] = where[1]
        limit = sum(int(len(x) and 0.3 * x.sum() + 0.5) for x in where)
        for read in seen.values():
            assert read[..., : past + len(where[1]) + 1].masked_select(~visual[: past + len(where[1]) + 1]).all()
            chosen = (read & visual).sum(-1)
            assert (read & visual)[..., :past].any() and (read & visual)[..., past:].any()
            # what lets the content decide has a ceiling
            most = 2 * limit if get_method(name).budget == "adaptive" else limit
            assert (chosen <= most).all() and (get_method(name).budget != "exact" or (chosen == limit).all())


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_cropped_is_forgotten(name: str) -> None:
    """Tokens behind the prompt, and text in place of its end."""
    feed = zoo.inputs("llava")
    forced = oracle.force("llava", 1, 5)
    with accelerated(oracle.subject("llava"), recipe_of(name)) as model:
        ways = []
        for detour in (False, True):
            held = {"past_key_values": model(**feed, use_cache=True).past_key_values, "use_cache": True}
            if detour:
                for token in forced[0, 2:]:
                    model(input_ids=token[None, None], **held)
                held["past_key_values"].crop(-len(forced[0, 2:]))
            ways.append([model(input_ids=token[None, None], **held).logits for token in forced[0]])
        oracle.close(*map(torch.stack, ways))
        visual = oracle.visual("llava", feed)[0].nonzero()[:, 0]
        cache = held["past_key_values"]
        cache.crop(int(visual[-3]) - cache.get_seq_length())
        model(input_ids=forced[:, :4], **held)
        state = cache.mmaccel
        assert state.shared.places.grid_table.shape[1] == int(visual[-3])
        model(input_ids=forced[:, :1], **held)
        choices = state.shared.memory(SparseMemory).layers[2].choices
        assert int((choices.rated >= 0).sum()) == len(visual) - 3
        assert choices.always.shape[-1] == state.seen - len(visual) + 3


@pytest.mark.parametrize("name", POLICIES)
def test_heads_that_store_different_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left so by another recipe, before the model was accelerated again."""
    feed = zoo.inputs("llava", "uneven")
    before = stage("snapkv", 0.6, head_budget="adaptive")
    with accelerated(oracle.subject("llava"), before) as model:
        cache = model(**feed, use_cache=True).past_key_values
    assert cache.mmaccel.layers[1].ragged is not None
    places = [layer.index.index.clone() for layer in cache.mmaccel.layers]
    with accelerated(oracle.subject("llava"), recipe_of(name)) as model, watched(monkeypatch, 400) as seen:
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache, use_cache=True)
        # nothing is known of its pictures
        assert not seen
        past = cache.get_seq_length()
        second = zoo.inputs("llava", "uneven", seed=3)
        wide = torch.cat([torch.ones(2, past), second["attention_mask"]], dim=1)
        model(**{**second, "attention_mask": wide}, past_key_values=cache, use_cache=True)
        model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache, use_cache=True)
        old = feed["input_ids"].shape[1]
        for layer, read in seen.items():
            held = torch.zeros(*places[layer].shape[:2], old + 1, dtype=torch.bool)
            held.scatter_(2, places[layer].long().masked_fill(places[layer] < 0, old), True)
            assert torch.equal(read[..., :old].expand_as(held[..., :old]), held[..., :old]), (
                "other keys of the first turn"
            )
            visual = oracle.visual("llava", second)
            assert (
                read[..., past : past + visual.shape[1]]
                .masked_select((second["attention_mask"].bool() & ~visual)[:, None])
                .all()
            )
            assert not read[..., past : past + visual.shape[1]].masked_select(visual[:, None]).all()
    assert seen.keys() == {1, 2, 3}


@pytest.mark.parametrize("name", POLICIES)
def test_packed_keys_are_read_as_they_are_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step as a cache of the same codes with everything else hidden."""
    codec = Stage("kivi", None, {"page": 16, "group": 16, "residual": 4, "bits": 4})
    feed, forced = zoo.inputs("qwen2_5_vl", "uneven"), oracle.force("qwen2_5_vl", 2, 20)
    both = Recipe("both", (Stage(name, 0.3, small(name, alike=2.0, refresh=1)), codec))
    checked = 0
    choose = reading.read_layer

    def layered(policy: Any, layer: Any, query: Tensor, keys: Tensor, scaling: float) -> Any:
        nonlocal checked
        stored = layer.stored()
        assert torch.equal(keys, stored[0])
        made = choose(policy, layer, query, keys, scaling)
        memory = layer.shared.memory(SparseMemory)
        fresh = layer.shared.keep(SparseMemory(memory.count, level=memory.level, noted=memory.noted))
        # what is kept is what would be made of the keys as they are stored now
        again = choose(policy, layer, query, keys, scaling)
        layer.shared.keep(memory)
        kept, new = memory.layers[layer.number], fresh.layers[layer.number]
        assert kept.summary.keys() == new.summary.keys()
        read, wanted = (chosen_attention(query, *stored, one, scaling=scaling)[0] for one in (made, again))
        torch.testing.assert_close(read, wanted)
        checked += layer.packed.any_pages
        return made

    monkeypatch.setattr(reading, "read_layer", layered)
    with accelerated(oracle.subject("qwen2_5_vl"), both) as model:
        out = model(**feed, use_cache=True)
        for token in forced.T:
            out = model(input_ids=token[:, None], past_key_values=out.past_key_values, use_cache=True)
    assert checked == 3 * forced.shape[1]


GREEDY = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


# ------------------------------------------------------------------------------------------------- what is chosen of one layer


def shown(policy: ReadingPolicy, keys: KeyBatch) -> Any:
    """A layer that stores these keys, behind a prompt with their pictures."""
    layer = CacheState(1).layers[0]
    layer.update(keys.keys, keys.values)
    layer.index = KeyIndex(keys.index, True, keys.index.shape[1])
    assert keys.picture is not None and keys.cells is not None and keys.count is not None
    table = torch.full((len(keys.index), int(keys.index.max()) + 1, 4), -1, dtype=torch.int32)
    rows, slots = keys.valid.nonzero(as_tuple=True)
    table[rows, keys.index[rows, slots]] = torch.cat([keys.picture[..., None], keys.cells], dim=-1).int()[rows, slots]
    layer.shared.places.grid_table = table
    layer.shared.keep(SparseMemory(keys.count))
    if policy.window or policy.noted:
        prepare_reads(policy, [layer], keys.scaling, {0: (keys.queries, keys.places >= 0)})
    return layer


def chosen(policy: ReadingPolicy, layer: Any, query: Tensor) -> Tensor:
    """``[B, 1 or Hkv, K]`` bool: the slots that a step with ``query [B, Hq, 1, D]`` reads, of keys that it stores."""
    keys = layer.stored()[0]
    read = read_layer(policy, layer, query, keys, keys.shape[3] ** -0.5)
    assert read is not None
    return read.mask(keys.shape[2])[:, :, 0]


def step_of(policy: ReadingPolicy, seed: int = 0, **options: Any) -> tuple[KeyBatch, Tensor]:
    keys = synthetic.keys_of(policy, seed=seed, **options)
    query = torch.randn(len(keys.keys), 4, 1, keys.keys.shape[3], generator=torch.Generator().manual_seed(seed + 1))
    return keys, query.to(keys.keys.dtype)


def by_bounds(keys: KeyBatch, query: Tensor, page: int, pages: int, mean: bool) -> Tensor:
    """Quest page by page, head by head."""
    out = (keys.valid & ~keys.visual)[:, None].expand(keys.keys.shape[:3]).clone()
    for row in range(len(out)):
        at = keys.visual[row].nonzero()[:, 0].split(page)
        for head in range(out.shape[1]):
            bounds = []
            for places in at:
                low, high = keys.keys[row, head, places].aminmax(dim=0)
                of = [float(torch.maximum(q * low, q * high).sum()) for q in query[row, 2 * head : 2 * head + 2, 0]]
                assert all(
                    float(q @ k) <= bound + 1e-4
                    for q, bound in zip(query[row, 2 * head : 2 * head + 2, 0], of, strict=True)
                    for k in keys.keys[row, head, places]
                )
                bounds.append(sum(of) / 2 if mean else max(of))
            for number in sorted(range(len(at)), key=lambda n: -bounds[n])[:pages]:
                out[row, head, at[number]] = True
    return out


@pytest.mark.parametrize("reduce", ("max", "mean"))
def test_quest_reads_the_pages_of_largest_bounds(reduce: str) -> None:
    policy = get_method("quest")(page=4, least=1, reduce=reduce)
    keys, query = step_of(policy)
    got = chosen(policy, shown(policy, keys), query)
    assert torch.equal(got, by_bounds(keys, query, 4, 2, reduce == "mean"))
    # the short last page is one too
    assert int(keys.visual[0].sum()) % 4 == 1
    far = replace(keys, keys=keys.keys.clone())
    far.keys[:, :, synthetic.SEEN - 1] = 100 * query[:, ::2, 0]
    read = chosen(policy, shown(policy, far), query)
    assert read[..., synthetic.SEEN - 1].all() and (read & keys.visual[:, None]).sum(-1).unique().tolist() == [5]


def test_quest_counts_pages() -> None:
    policy = get_method("quest")(page=16)
    counts, there = torch.tensor([0, 16, 63, 64, 149, 150, 10, 10]), torch.tensor([150] * 6 + [10, 200])
    assert policy.wanted(counts, there).tolist() == [3, 3, 3, 4, 9, 10, 1, 3]
    assert policy.wanted(torch.tensor([0]), torch.tensor([0])).tolist() == [0]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_what_stands_in_padding_does_not_matter(name: str, dtype: torch.dtype) -> None:
    """Nor what was chosen before the answer is asked for again, nor the other rows."""
    policy = get_method(name)(**small(name, layer=0))
    keys, query = step_of(policy, dtype=dtype)
    wanted = chosen(policy, shown(policy, keys), query)
    text = (keys.valid & ~keys.visual)[:, None]
    assert (wanted & text == text).all() and not (wanted & ~keys.valid[:, None]).any()
    assert (wanted & keys.visual[:, None]).any(-1).all() and not (wanted == keys.valid[:, None]).all()
    for poison in (torch.nan, 3e4):
        other = replace(keys, keys=keys.keys.masked_fill(~keys.valid[:, None, :, None], poison))
        assert torch.equal(chosen(policy, shown(policy, other), query), wanted)
    layer = shown(policy, keys)
    assert torch.equal(chosen(policy, layer, query), wanted) and torch.equal(chosen(policy, layer, query), wanted)
    for row in range(len(wanted)):
        lone = chosen(policy, shown(policy, synthetic.row_of(keys, row)), query[row : row + 1])
        assert torch.equal(lone[0], wanted[row][:, keys.valid[row]])


@pytest.mark.parametrize("name", POLICIES)
def test_the_ends_of_the_prompt_are_read_within_the_budget(name: str) -> None:
    sizes = []
    for ends in ({}, {"sinks": 8, "recent": 22}):
        policy = get_method(name)(**small(name, layer=0, **ends))
        keys, query = step_of(policy)
        read = chosen(policy, shown(policy, keys), query)
        at = keys.valid.cumsum(1)
        if ends:
            first, last = at <= 8, at > at[:, -1:] - 22
            assert (keys.visual & first).any() and (keys.visual & last).any()
            fixed = (keys.visual & (first | last))[:, None]
            assert (read & fixed == fixed).all()
        sizes.append((read & keys.visual[:, None]).sum(-1))
    if policy.budget == "exact":
        assert all((size == 10).all() for size in sizes)


@pytest.mark.parametrize("name", POLICIES)
def test_options_that_make_no_sense(name: str) -> None:
    nothing, text = "drops nothing; leave out", "reads all text; leave out"
    for options, said in (
        ({"every": 2}, nothing),
        ({"cap": 9}, nothing),
        ({"compact": "pivot"}, nothing),
        ({"layer_budget": "pyramid"}, nothing),
        ({"head_budget": "adaptive"}, nothing),
        ({"growth": 0.5}, nothing),
        ({"joint": True}, text),
        ({"neighbours": 4}, text),
        ({"protect": ("question",)}, text),
        ({"text_policy": "knorm"}, text),
        ({"layer": -1}, "must be an int, at least 0"),
        ({"layer": 1.5}, "or a share .* at most 1.0, got 1.5"),
    ):
        with pytest.raises(MmaccelError, match=f"{name} .*{said}"):
            get_method(name)(**options)
    model = zoo.model("llava")
    with pytest.raises(MmaccelError, match="`reduce` of quest must be 'max' or 'mean', got 'median'"):
        accelerate_vlm(model, stage("quest", reduce="median"))
    for option in ("page", "least"):
        with pytest.raises(MmaccelError, match=f"`{option}` of quest must be at least 1, got 0"):
            get_method("quest")(**{option: 0})


# ------------------------------------------------------------------------------------------------------------ the other scorers


@pytest.mark.parametrize(("pool", "interleaved"), [(0, False), (5, False), (0, True)])
def test_tokenselect_counts_votes(pool: int, interleaved: bool) -> None:
    policy = get_method("tokenselect")(pool=pool, interleaved=interleaved)
    keys, query = step_of(policy)
    got = chosen(policy, shown(policy, keys), query)
    assert (got == got[:, :1]).all(), "heads read different keys"
    for row in range(2):
        at = keys.visual[row].nonzero()[:, 0]
        votes = torch.zeros(len(at))
        for head in range(4):
            of = keys.keys[row, head % 2 if interleaved else head // 2, at]
            votes += (of @ query[row, head, 0]).softmax(0)
        half = pool // 2
        votes = torch.stack([votes[max(0, i - half) : i + half + 1].max() for i in range(len(votes))])
        read = got[row, 0, at].nonzero()[:, 0]
        assert len(read) == 10 and votes[read].min() >= votes.topk(10).values.min()


def test_tokenselect_reads_again_what_a_like_query_chose() -> None:
    """Row by row, and like the query that chose, not the last one."""
    policy = get_method("tokenselect")(alike=0.9)
    keys, query = step_of(policy)
    layer, other = shown(policy, keys), step_of(policy, seed=3)[1]
    first = chosen(policy, layer, query)

    # cosines of 0.95 and 0.81 to the first, of 0.95 to each other
    def turned(angle: float) -> Tensor:
        flat, way = query.flatten(1), other.flatten(1)
        way = way - (way * flat).sum(1, keepdim=True) / flat.square().sum(1, keepdim=True) * flat
        way = way / way.norm(dim=1, keepdim=True) * flat.norm(dim=1, keepdim=True)
        return (flat * math.cos(angle) + way * math.sin(angle)).view_as(query)

    mixed = turned(0.3)
    mixed[1] = turned(1.5)[1]
    second = chosen(policy, layer, mixed)
    fresh = chosen(policy, shown(policy, keys), mixed)
    assert torch.equal(second[0], first[0]) and not torch.equal(fresh[0], first[0])
    assert torch.equal(second[1], fresh[1]) and not torch.equal(fresh[1], first[1])
    third, fresh = chosen(policy, layer, turned(0.6)), chosen(policy, shown(policy, keys), turned(0.6))
    assert torch.equal(third[0], fresh[0]) and not torch.equal(third[0], first[0])
    never = get_method("tokenselect")(alike=2.0)
    layer = shown(policy, keys)
    assert torch.equal(chosen(never, layer, query), first)
    assert torch.equal(chosen(never, layer, turned(0.3)), chosen(never, shown(never, keys), turned(0.3)))
    with pytest.raises(MmaccelError, match="`pool` of tokenselect must be an odd number or 0, got 4"):
        get_method("tokenselect")(pool=4)


@pytest.mark.parametrize(("dims", "reduce"), [(0.25, "max"), (3, "mean"), (1.0, "max"), (99, "max")])
def test_loki_ranks_in_few_dimensions(dims: float, reduce: str) -> None:
    policy = get_method("loki")(dims=dims, reduce=reduce)
    keys, query = step_of(policy)
    # a few directions in which keys vary, and a large mean
    scale = torch.linspace(3, 0.01, keys.keys.shape[3])
    keys = replace(keys, keys=keys.keys * scale + 5 * scale.flip(0))
    got = chosen(policy, shown(policy, keys), query)
    rank = min(16, {0.25: 4, 3: 3, 1.0: 16, 99: 16}[dims])
    for row in range(2):
        at = keys.visual[row].nonzero()[:, 0]
        for head in range(2):
            of = keys.keys[row, head, at].double()
            _, _, right = torch.linalg.svd(of - of.mean(0))
            low = right[:rank].T
            logits = torch.stack([(of @ low) @ (low.T @ query[row, 2 * head + i, 0].double()) for i in range(2)])
            logits = logits.amax(0) if reduce == "max" else logits.mean(0)
            assert set(at[logits.topk(10).indices].tolist()) == set(at[got[row, head, at]].tolist())


def test_loki_says_what_it_cannot_do() -> None:
    for dims in (0, -1, 1.5):
        with pytest.raises(MmaccelError, match="`dims` of loki must be an int, at least 1, or a share"):
            get_method("loki")(dims=dims)


@pytest.mark.parametrize("reduce", ("max", "mean"))
def test_squeezed_attention_reads_clusters_above_one_threshold(reduce: str) -> None:
    policy = get_method("squeezed-attention")(clusters=6, window=8, reduce=reduce)
    keys, query = step_of(policy)
    layer = shown(policy, keys)
    got = chosen(policy, layer, query)
    memory = layer.shared.memory(SparseMemory)
    summary, every = memory.layers[0].summary, []

    def combined(of: list[Tensor]) -> Tensor:
        return torch.stack(of).amax(0) if reduce == "max" else torch.stack(of).mean(0)

    for row in range(2):
        at, estimates = keys.visual[row].nonzero()[:, 0], []
        for head in range(2):
            labels, of = summary["labels"][row, head].long(), keys.keys[row, head, at]
            for number in range(6):
                mine = labels == number
                assert mine.any(), "an empty cluster"
                close = summary["centroids"][row, head, number] - of[mine].mean(0)
                assert (
                    close.abs().max() < 1e-5
                    and abs(float(summary["weights"][row, head, number]) - float(mine.sum().log())) < 1e-5
                )

            def estimate(one: Tensor, labels: Tensor = labels, row: int = row, head: int = head) -> Tensor:
                of_key = (summary["centroids"][row, head] @ one * keys.scaling).exp()[labels]
                return of_key / of_key.sum()

            window = [
                combined([estimate(keys.queries[row, 2 * head + i, w]) for i in range(2)])
                for w in range(keys.queries.shape[2])
            ]
            every.append(torch.stack(window).mean(0))
            estimates.append(combined([estimate(query[row, 2 * head + i, 0]) for i in range(2)]))
        level = torch.quantile(torch.cat(every[-2:]).double(), 1 - 10 / len(at))
        torch.testing.assert_close(memory.level[row].double(), level, rtol=1e-4, atol=0)
        for head in range(2):
            above = estimates[head] > memory.level[row]
            read = got[row, head, at]
            assert read.any() and not (read & ~above).any()
            assert torch.equal(read, above) or int(read.sum()) == 20


@pytest.mark.parametrize("reduce", ("max", "mean"))
def test_two_levels_estimate_first_clusters_of_clusters(reduce: str) -> None:
    """Clusters that the coarse level drops neither are read nor count in what the others are estimated by."""
    policy = get_method("squeezed-attention")(
        clusters=12, coarse=4, coarse_share=0.5, window=8, ceiling=4.0, reduce=reduce
    )
    keys, query = step_of(policy)
    layer = shown(policy, keys)
    got = chosen(policy, layer, query)
    memory = layer.shared.memory(SparseMemory)
    summary, fell = memory.layers[0].summary, 0

    def combined(of: list[Tensor]) -> Tensor:
        return torch.stack(of).amax(0) if reduce == "max" else torch.stack(of).mean(0)

    def estimates(row: int, head: int, of: list[Tensor], kept: Tensor, coarse: bool) -> Tensor:
        """Of every key, by the queries ``of`` the heads; ``kept`` are the keys that count."""
        labels, centroids = summary["labels"][row, head].long(), summary["centroids"][row, head]
        if coarse:
            labels, centroids = summary["parents"][row, head].long()[labels], summary["coarse"][row, head]
        made = [(centroids @ one * keys.scaling).exp()[labels] for one in of]
        return combined([one / one[kept].sum() for one in made])

    for row in range(2):
        at, every = keys.visual[row].nonzero()[:, 0], {False: [], True: []}
        whole = torch.ones(len(at), dtype=torch.bool)
        for head in range(2):
            labels, parents = summary["labels"][row, head].long(), summary["parents"][row, head].long()
            used = labels.unique()
            for number in parents[used].unique():
                mine = used[parents[used] == number]
                mean = summary["centroids"][row, head, mine].mean(0)
                torch.testing.assert_close(summary["coarse"][row, head, number], mean, rtol=1e-4, atol=1e-5)
                size = int((parents[labels] == number).sum())
                assert abs(float(summary["coarse_weights"][row, head, number].exp()) - size) < 1e-3
            for coarse, figures in every.items():
                window = [
                    estimates(row, head, list(keys.queries[row, 2 * head : 2 * head + 2, w]), whole, coarse)
                    for w in range(keys.queries.shape[2])
                ]
                figures.append(torch.stack(window).mean(0))
        share = 10 / len(at)
        levels = [torch.quantile(torch.cat(every[c]).double(), 1 - (max(share, 0.5) if c else share)) for c in every]
        torch.testing.assert_close(memory.level[row].double(), torch.stack(levels), rtol=1e-4, atol=0)
        for head in range(2):
            asked = list(query[row, 2 * head : 2 * head + 2, 0])
            passed = estimates(row, head, asked, whole, True) > memory.level[row, 1]
            above = passed & (estimates(row, head, asked, passed, False) > memory.level[row, 0])
            fell += int((~passed).sum())
            assert torch.equal(got[row, head, at], above) and above.any()
    assert fell, "the coarse level has passed everything"


def test_two_levels_read_what_they_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch as alone; a prompt without a picture leaves both thresholds as they are."""
    feed, recipe = zoo.inputs("llava", "uneven"), recipe_of("squeezed-attention", coarse=3)
    forced = oracle.force("llava", len(feed["input_ids"]), 5)
    got, held = run_steps(monkeypatch, "llava", feed, recipe, forced)
    oracle.close(got, replay_steps("llava", feed, forced, held))
    with accelerated(oracle.subject("llava"), recipe) as model:
        whole, _ = oracle.decode(model, feed, forced)
        for row in range(len(forced)):
            alone, _ = oracle.decode(model, zoo.single("llava", feed, row), forced[row : row + 1])
            oracle.close(whole[row], alone[0])
        cache = model(**feed, use_cache=True).past_key_values
        memory = cache.mmaccel.shared.memory(SparseMemory)
        first = memory.level.clone()
        text = spoken("llava", "and then?").repeat(len(forced), 1)
        model(input_ids=text, past_key_values=cache, use_cache=True)
        assert first.shape == (len(forced), 2) and torch.equal(cache.mmaccel.shared.memory(SparseMemory).level, first)


def test_a_lone_cluster_reaches_its_own_threshold() -> None:
    """Up to the ceiling, from the first key on."""
    policy = get_method("squeezed-attention")(clusters=1, window=8)
    keys, query = step_of(policy)
    got = chosen(policy, shown(policy, keys), query) & keys.visual[:, None]
    assert torch.equal(got, (keys.visual & (keys.visual.cumsum(1) <= 20))[:, None].expand_as(got))


def test_clusters_are_of_like_keys() -> None:
    """Keys around a few directions, of any length, come together; the same keys give the same clusters, wherever they stand."""
    policy = get_method("squeezed-attention")(clusters=4, window=8)
    random = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(4, 16, generator=random), dim=-1)
    truth = torch.arange(40) % 4
    keys = (directions[truth] + 0.05 * torch.randn(40, 16, generator=random)) * (
        1 + torch.rand(40, 1, generator=random)
    )
    there = torch.arange(48) < 40
    labels = policy.cluster(torch.cat([keys, torch.zeros(8, 16)])[None, None], there[None, None])[0, 0]
    assert (labels[40:] == 4).all() and len({(int(a), int(b)) for a, b in zip(labels[:40], truth, strict=True)}) == 4
    assert torch.equal(policy.cluster(keys[None, None], there[None, None, :40])[0, 0], labels[:40])
    with pytest.raises(MmaccelError, match="`clusters` of squeezed-attention must be an int, at least 1"):
        get_method("squeezed-attention")(clusters=0)
    for option in ("iterations", "window", "ceiling"):
        with pytest.raises(MmaccelError, match=f"`{option}` of squeezed-attention must be at least 1, got 0"):
            get_method("squeezed-attention")(**{option: 0})


@pytest.mark.parametrize("by", ("picture", "frame", "row"))
def test_rows_and_frames_are_read_as_sentences(by: str) -> None:
    """Group by group in falling order of the product with their mean key, the last one as far as the budget goes."""
    policy = get_method("sentencekv")(group=by)
    keys, query = step_of(policy)
    got, cut = chosen(policy, shown(policy, keys), query), 0
    assert keys.picture is not None and keys.cells is not None
    for row in range(2):
        at = keys.visual[row].nonzero()[:, 0].tolist()
        named = [(int(keys.picture[row, n]), *keys.cells[row, n].tolist()) for n in at]
        groups: dict[tuple[int, ...], list[int]] = {}
        for n, name in zip(at, named, strict=True):
            groups.setdefault(name[: {"picture": 1, "frame": 2, "row": 3}[by]], []).append(n)
        for head in range(2):
            of = keys.keys[row, head]
            asked = query[row, 2 * head : 2 * head + 2, 0]
            best = sorted(groups.values(), key=lambda mine: -float((asked @ of[mine].mean(0)).max()))
            wanted = [n for mine in best for n in mine][:10]
            read = got[row, min(head, got.shape[1] - 1)] & keys.visual[row]
            assert read.nonzero()[:, 0].tolist() == sorted(wanted)
            cut += any(0 < len(set(mine) & set(wanted)) < len(mine) for mine in best)
    assert cut, "no group is read in part"


@pytest.mark.parametrize("name", [name for name in POLICIES if get_method(name)().summarises])
def test_layers_are_looked_at_together_as_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, made = zoo.inputs("llava", "uneven"), []
    with accelerated(oracle.subject("llava"), recipe_of(name)) as model:
        for together in (sparse.TOGETHER, 1):
            monkeypatch.setattr(sparse, "TOGETHER", together)
            layers = model(**feed, use_cache=True).past_key_values.mmaccel.shared.memory(SparseMemory).layers
            made.append([layers[number].summary for number in sorted(layers)])
    assert len(made[0]) == len(made[1]) == 3
    for one, other in zip(*made, strict=True):
        assert one.keys() == other.keys()
        # components may point either way
        for x, y in ((one[key], other[key]) for key in one):
            torch.testing.assert_close(x.abs(), y.abs(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------- the cost


@functools.cache
def bare_counts(layers: int) -> list[simulated.Counts]:
    return counted("none", layers)


def counted(recipe: Recipe | str, layers: int, steps: int = 3) -> list[simulated.Counts]:
    """Waits and launches of the prompt and of every step, on a simulated device."""
    counts = []
    with simulated.machine() as gpu:
        model = gpu.put(zoo.model("llava", num_hidden_layers=layers).requires_grad_(False))
        with accelerated(model, recipe):
            handle = model.register_forward_pre_hook(lambda *_: counts.append(gpu.counts.copy()))
            model.generate(**gpu.put(zoo.inputs("llava")), max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
            counts.append(gpu.counts.copy())
            handle.remove()
    return [after.since(before) for before, after in zip(counts, counts[1:], strict=False)]


#: launches a layer above the bare model's in a step of one row whose pages are whole
# checked by test_a_step_never_waits_and_launches_little
LAUNCHES = {
    "quest": 3,
    "tokenselect": 5,
    "loki": 3,
    "squeezed-attention": 12,
    "clusterkv": 6,
    "doublesparsity": 15,
    "infinigen": 39,
    "leoam": 14,
    "lserve": 20,
    "mpcache": 4,
    "recycled-attention": 17,
    "sentencekv": 6,
    "shadowkv": 13,
    "triforce": 1,
}


@pytest.mark.parametrize("name", few(POLICIES, ["quest"]))
def test_a_step_never_waits_and_launches_little(name: str) -> None:
    """The prompt waits once, whatever the number of layers; a step as often as the bare model."""
    small, large = (counted(recipe_of(name, layer=0), layers) for layers in (4, 8))
    bare = [bare_counts(layers) for layers in (4, 8)]
    for step, (less, more) in enumerate(zip(small, large, strict=True)):
        waits = [sum(one.waits.values()) for one in (less, more, bare[0][step], bare[1][step])]
        assert waits[0] == waits[1] <= waits[2] + (step == 0) and waits[2] == waits[3]
    launched = [[sum(one.launches.values()) for one in run] for run in (small, large, *bare)]
    layer = [((b - a) - (d - c)) / 4 for a, b, c, d in zip(*launched, strict=True)]
    assert max(layer[2:]) == LAUNCHES[name], f"{layer[2:]}: say so in the table"
