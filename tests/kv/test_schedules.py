"""Eviction while decoding: it is hiding from then on, over batches, beams, turns and sliding windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from evicting import SCHEDULES, places, replay_steps, stage, step_by_step
from laws import helpers, oracle
from tail import few, in_turn
from torch import Tensor

from mmaccel import accelerated
from mmaccel.kv.policies.h2o import H2O
from mmaccel.method import KeyBatch, LayerAttention

pytestmark = pytest.mark.usefixtures("no_gradients")

#: what all heads keep and what each keeps, joint budgets and those of text, a cap, a distance, layers of several sizes
QUICK = ("h2o-text", "h2o-visual", "snapkv", "adaptive", "cap", "elastic", "layers")


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    in_turn([("llava", "uneven"), ("qwen2_5_vl", "uneven"), ("internvl", "image")], SCHEDULES, of=QUICK),
)
def test_evicting_while_decoding_is_hiding_from_then_on(family: str, kind: str, name: str) -> None:
    feed, recipe = zoo.inputs(family, kind), SCHEDULES[name]
    forced = oracle.force(family, len(feed["input_ids"]), 9)
    got, held, _ = step_by_step(family, feed, recipe, forced)
    oracle.close(got, replay_steps(family, feed, forced, held))
    options, counts = recipe.stages[0].options, torch.stack([h.sum(-1) for h in held])
    assert counts[-1].max() > 0 and not torch.equal(held[-1], held[0]), "nothing happened while decoding"
    for before, after in zip(held, held[1:], strict=False):
        assert not (after & ~before)[..., : feed["input_ids"].shape[1]].any(), "a key came back"
    if "cap" in options:
        assert (counts[1:] <= 20).all()
    elif options.get("joint") or recipe.text_retain is not None:
        # the room of the prompt; with `growth` and `beyond` some of what is written has its own
        (_, policy), every = recipe.build()[0], options["every"]
        grown = [min(step, policy.beyond + int(policy.growth * step)) for step in range(len(counts))]
        room = counts[0] + torch.tensor(grown)[:, None, None, None]
        assert (counts[every::every] == room[every::every]).all() and (counts <= room + every - 1).all()
    else:
        # text stays: pictures make room for what is written
        valid, visual = feed["attention_mask"].bool(), oracle.visual(family, feed)
        length = valid.shape[1]
        assert held[-1][..., length : length + 9].all()
        assert (held[-1][..., :length] | ~(valid & ~visual)[None, :, None]).all()


@pytest.mark.parametrize("name", few(SCHEDULES, QUICK))
def test_a_batch_decodes_as_its_rows(name: str) -> None:
    family = "llava"
    feed, recipe = zoo.inputs(family, "uneven"), SCHEDULES[name]
    forced = oracle.force(family, len(feed["input_ids"]), 6)
    got, held, _ = step_by_step(family, feed, recipe, forced)
    for row in range(len(forced)):
        alone = zoo.single(family, feed, row)
        pads = feed["input_ids"].shape[1] - alone["input_ids"].shape[1]
        lone, kept, _ = step_by_step(family, alone, recipe, forced[row : row + 1])
        for ours, theirs in zip(held, kept, strict=True):
            assert torch.equal(ours[:, row, :, pads:], theirs[:, 0])
        oracle.close(got[row], lone[0])


@pytest.mark.parametrize("name", ("h2o", "adaptive", "snapkv", "elastic"))
def test_beams_carry_their_own_figures(name: str) -> None:
    """What a beam has gathered goes where the beam goes: the best beam decodes as its tokens decode alone."""
    family, recipe = "llava", SCHEDULES[name]
    # some versions mix up the pictures of rows with several when they expand beams
    feed = zoo.inputs(family, "image", batch=2, question="a?")
    with accelerated(oracle.subject(family), recipe) as model:
        out = model.generate(
            **feed, max_new_tokens=7, num_beams=3, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        stats = model.mmaccel.stats()
    assert stats["kv_bytes"] == out.past_key_values.mmaccel.nbytes()
    tokens, ways = out.sequences[:, feed["input_ids"].shape[1] :], out.beam_indices
    assert (ways[:, :7] != ways[:, :1]).any(), "no beam was ever reordered"
    steps = torch.arange(tokens.shape[1])
    beams = torch.stack(out.logits, dim=1)[ways[:, : len(steps)], steps]
    got, _, _ = step_by_step(family, feed, recipe, tokens[:, :-1])
    oracle.close(beams, got)


@pytest.mark.parametrize(("second", "name"), in_turn(("text", "image"), ("h2o", "adaptive", "h2o-visual")))
def test_a_second_turn(name: str, second: str) -> None:
    """Many tokens, with or without a picture, on layers of unequal length: as long as the sum of what was stored."""
    family, recipe = "llava", SCHEDULES[name]
    feed, more = helpers.inputs(family), helpers.inputs(family, second, seed=1)
    with accelerated(oracle.subject(family), recipe) as model:
        out = helpers.generate(model, feed)
        kept, _ = helpers.follow(feed, out, more)
        before = places(out.past_key_values, kept["input_ids"].shape[1] + 3)
        again = helpers.generate(model, kept, past_key_values=out.past_key_values)
        stats = model.mmaccel.stats()
    cache = again.past_key_values
    assert cache is out.past_key_values and cache.get_seq_length() == kept["input_ids"].shape[1] + 3
    after = places(cache, cache.get_seq_length())
    assert stats["kv_bytes"] == cache.mmaccel.nbytes()
    assert not (after & ~before)[..., : feed["input_ids"].shape[1] + 3].any()
    if second == "image":
        # a joint budget is one of all new keys, the last token of the first answer included
        whole = name != "h2o-visual"
        new = more["input_ids"].shape[1] + 1 if whole else int(oracle.visual(family, more).sum())
        assert stats["stages"][0]["tokens_in"] == new
        # both pictures are known by their places, and told apart
        known = cache.mmaccel.shared.places.grid_table[0, :, 0]
        assert torch.equal(known >= 0, oracle.visual(family, kept)[0]) and known.unique().tolist() == [-1, 0, 1]


@pytest.mark.full
def test_two_thousand_steps_do_not_drift() -> None:
    """Memory stays what it was, and every step is that of one long forward that sees the same keys."""
    family, steps, longer = "llava", 2000, {"max_position_embeddings": 4096}
    feed, model = zoo.inputs(family, "image"), oracle.subject(family, **longer)
    forced, length = oracle.force(family, 1, steps), feed["input_ids"].shape[1]
    logits, held, sizes = [], [], set()
    with accelerated(model, SCHEDULES["h2o"]):
        out = model(**feed, use_cache=True)
        cache = out.past_key_values
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(cache, length + steps))
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
            sizes.add(cache.mmaccel.nbytes())
    logits.append(out.logits[:, -1])
    assert len(sizes) == 1 and cache.get_seq_length() == length + steps
    oracle.close(torch.stack(logits, dim=1), replay_steps(family, feed, forced, held, **longer), 1e-4)


@pytest.mark.parametrize(("name", "family", "overrides"), in_turn(("h2o", "adaptive", "tova"), oracle.WINDOWED))
def test_sliding_windows_count_original_places(family: str, overrides: dict[str, Any], name: str) -> None:
    """Keys that a window no longer reaches are evicted or not, and read by nobody."""
    feed, recipe = zoo.inputs(family, "image", question="a?"), SCHEDULES[name]
    forced = oracle.force(family, 1, 6)
    logits, held = [], []
    with accelerated(oracle.subject(family, **overrides), recipe, processor=zoo.processor(family)) as model:
        out = model(**feed, use_cache=True)
        for token in forced.T:
            logits.append(out.logits[:, -1])
            held.append(places(out.past_key_values, feed["input_ids"].shape[1] + 6))
            out = model(input_ids=token[:, None], past_key_values=out.past_key_values, use_cache=True)
    logits.append(out.logits[:, -1])
    wanted = replay_steps(family, feed, forced, held, **overrides)
    oracle.close(torch.stack(logits, dim=1), wanted)
    oracle.apart(wanted, replay_steps(family, feed, forced, held))


@pytest.mark.parametrize("name", ("h2o", "adaptive", "every-3"))
def test_on_top_of_eager_attention(name: str) -> None:
    family, recipe = "llava", SCHEDULES[name]
    feed, model = zoo.inputs(family, "uneven"), zoo.model(family)
    model.set_attn_implementation("eager")
    forced = oracle.force(family, 2, 6)
    with accelerated(model, recipe):
        got, cache = oracle.decode(model, feed, forced)
    wanted, held, _ = step_by_step(family, feed, recipe, forced[:, :-1])
    oracle.close(got, wanted)
    assert torch.equal(places(cache, held[-1].shape[-1]), held[-1])


def test_a_second_turn_is_scored_by_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was observed reaches the score at the keys of this forward, and merges leave earlier turns alone."""
    family, feed, more = "llava", helpers.inputs("llava"), helpers.inputs("llava", seed=1)
    seen: list[tuple[Tensor, Tensor]] = []
    original = H2O.score

    def score(self: H2O, keys: KeyBatch) -> Tensor:
        attention, figures = observed[-1]
        assert torch.equal(keys.received, figures[..., -keys.index.shape[1] :])
        assert torch.equal(keys.keys, attention.key[:, :, -keys.index.shape[1] :])
        seen.append((keys.keys, keys.received))
        return original(self, keys)

    observed: list[tuple[LayerAttention, Tensor]] = []
    look = H2O.observe

    def observe(self: H2O, attention: LayerAttention, before: Tensor) -> Tensor:
        observed.append((attention, look(self, attention, before)))
        return observed[-1][1]

    monkeypatch.setattr(H2O, "score", score)
    monkeypatch.setattr(H2O, "observe", observe)
    with accelerated(oracle.subject(family), stage("h2o", compact="pivot")) as model:
        out = helpers.generate(model, feed)
        kept, _ = helpers.follow(feed, out, more)
        before = [[x.clone() for x in layer.stored()] for layer in out.past_key_values.layers]
        again = helpers.generate(model, kept, past_key_values=out.past_key_values)
    assert len(seen) == 2 * len(before)
    for layer, (keys, values) in zip(again.past_key_values.layers, before, strict=True):
        for ours, old in zip(layer.stored(), (keys, values), strict=True):
            assert torch.equal(ours[:, :, : old.shape[2]], old)
