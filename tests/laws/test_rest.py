"""Law: with ``rest`` no key is evicted: those that stay are as the policy alone keeps them, all others are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from laws.helpers import FAMILIES, SHORT, follow, generate, inputs, logits, model, recipe_of
from laws.oracle import policies_that_drop
from laws.test_bytes import held
from laws.test_packing import attends_to_what_is_stored, divergence

from mmaccel import MmaccelError, Recipe, Stage, accelerated, get_method, load_cache, save_cache
from mmaccel.kv.codecs.qserve import QServe
from mmaccel.method.keys import CHOICES
from mmaccel.method.recall import RecallPolicy

RESTS = tuple(name for name in CHOICES["rest"] if name != "evict")
#: policies that evict once, at the end of a prompt, and park nothing
POLICIES = tuple(
    name
    for name in policies_that_drop()
    if not get_method(name)().scheduled and not issubclass(get_method(name), RecallPolicy)
)
#: keys of a policy, and of what else a layer stores
FORMS: dict[str, Recipe] = {
    **{rest: recipe_of("snapkv", window=4, rest=rest) for rest in RESTS},
    "each head": recipe_of("snapkv", window=4, rest="int4", head_budget="adaptive"),
    "all heads": recipe_of("infinipot-v", rest="int4"),
    "by content": recipe_of("h2o", rest="int4", layer_budget="prefix"),
    "text": Recipe("text", (Stage("h2o", 0.3, {"rest": "int2", "joint": True}),)),
    "with a codec": Recipe("both", (Stage("snapkv", 0.5, {"rest": "int2"}), Stage("fp8", None, {"page": 16}))),
    "zipcache": recipe_of("zipcache"),
    "with visual ones": Recipe("both", (Stage("h2o", 0.5, {"rest": "turbo2"}), Stage("calibquant", None, {"bits": 8}))),
}


def split(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of packed keys, and of the others, sorted."""
    index = layer.index.by_head
    return index[..., : layer.width].sort(-1).values, index[..., layer.width :].sort(-1).values


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("form", FORMS)
def test_decoding_attends_to_what_is_stored(family: str, form: str) -> None:
    state = attends_to_what_is_stored(family, FORMS[form])
    assert any(layer.width > 0 for layer in state.layers)


@pytest.mark.square("family", SHORT)
@pytest.mark.square("policy", POLICIES)
def test_every_policy_keeps_the_same_keys_as_without(family: str, policy: str) -> None:
    """In full precision is what the policy keeps; with eight bits for the rest the answer is nearly the bare model's."""
    tiny, feed = model(family), inputs(family, "uneven")
    bare, made = generate(tiny, feed, new=3), recipe_of(policy, family)
    with accelerated(tiny, made):
        alone = generate(tiny, feed, new=3).past_key_values
    with accelerated(tiny, recipe_of(policy, family, rest="int8")):
        out = generate(tiny, feed, new=3)
        assert tiny.mmaccel.stats()["kv_bytes"] == held(out.past_key_values)
    assert divergence(logits(out), logits(bare)) < 2e-2
    for ours, theirs in zip(out.past_key_values.mmaccel.layers, alone.mmaccel.layers, strict=True):
        rest, kept = split(ours)
        want = theirs.index.by_head.sort(-1).values
        heads, width = max(kept.shape[1], want.shape[1]), min(kept.shape[-1], want.shape[-1])
        assert torch.equal(*(x[..., -width:].expand(-1, heads, -1) for x in (kept, want)))
        both = torch.cat([rest.expand(-1, kept.shape[1], -1), kept], dim=-1).sort(-1).values
        assert all(torch.equal(row[row >= 0].unique(), row[row >= 0]) for row in both.flatten(0, 1))


@pytest.mark.square("family", SHORT)
@pytest.mark.square("form", FORMS)
def test_a_padded_row_is_stored_as_if_alone(family: str, form: str) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    with accelerated(tiny, FORMS[form]), torch.no_grad():
        both = generate(tiny, feed, new=1).past_key_values.mmaccel
        for row in range(len(feed["input_ids"])):
            alone = generate(tiny, zoo.single(family, feed, row), new=1).past_key_values.mmaccel
            for ours, theirs in zip(both.layers, alone.layers, strict=True):
                for mine, its in zip(ours.packed.pages, theirs.packed.pages, strict=True):
                    assert (mine is None) == (its is None) or not int(
                        mine.selected(torch.tensor([row])).lengths().sum()
                    )
                    if mine is None or its is None:
                        continue
                    mine = mine.selected(torch.tensor([row]))
                    assert torch.equal(mine.lengths(), its.lengths())
                    for a, b in zip(mine.decoded(), its.decoded(), strict=True):
                        # a number on the border between two codes may fall to either side
                        assert float(((a - b).abs() > 1e-3).float().mean()) < 0.01


@pytest.mark.square("family", SHORT)
@pytest.mark.square("form", FORMS)
def test_turns_saved_caches_host_memory_and_crops(family: str, form: str, tmp_path: Path) -> None:
    """A second picture's keys are demoted too, and what was packed stays; a loaded cache and one in host
    memory go on alike."""
    tiny, feed, file = model(family), inputs(family, "uneven"), tmp_path / "cache.safetensors"
    second = inputs(family, "uneven", seed=1)
    with accelerated(tiny, FORMS[form]):
        first = generate(tiny, feed)
        before = [split(layer)[0] for layer in first.past_key_values.mmaccel.layers]
        codes = [[x.clone() for x in layer.packed.tensors()] for layer in first.past_key_values.mmaccel.layers]
        kept, _ = follow(feed, first, second)
        save_cache(first.past_key_values, file, tiny)
        loaded = load_cache(file, tiny)
        assert all(
            torch.equal(a, b)
            for layer, was in zip(loaded.mmaccel.layers, codes, strict=True)
            for a, b in zip(layer.packed.tensors(), was, strict=True)
        )
        went = generate(tiny, kept, past_key_values=first.past_key_values)
        same = generate(tiny, kept, past_key_values=loaded)
        assert torch.equal(logits(went), logits(same))
        for layer, was in zip(went.past_key_values.mmaccel.layers, before, strict=True):
            now = split(layer)[0]
            places = [set(row[row >= 0].tolist()) for row in now.flatten(0, 1)]
            heads = was.expand(-1, now.shape[1], -1).flatten(0, 1)
            assert all(set(row[row >= 0].tolist()) <= held for row, held in zip(heads, places, strict=True))
        assert tiny.mmaccel.stats()["kv_bytes"] == held(went.past_key_values)
    with accelerated(tiny, FORMS[form], offload="host"):
        parked = generate(tiny, feed)
        assert torch.equal(logits(parked), logits(first))
        again = generate(tiny, kept, past_key_values=parked.past_key_values)
    assert torch.equal(logits(again), logits(went))


def test_the_balancer_looks_at_all_queries_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed, seen, used = model("llava"), inputs("llava", "uneven"), [], []
    energy, key_planes = QServe.energy, QServe.key_planes

    def note(self: QServe, queries: torch.Tensor, valid: torch.Tensor, heads: int) -> torch.Tensor:
        seen.append(((queries * valid[:, None, :, None]).shape[2], valid, energy(self, queries, valid, heads)))
        return seen[-1][2]

    monkeypatch.setattr(QServe, "energy", note)
    monkeypatch.setattr(
        QServe, "key_planes", lambda self, k, cut, p: used.append(cut.query_energy) or key_planes(self, k, cut, p)
    )
    with accelerated(tiny, FORMS["balance2"]), torch.no_grad():
        tiny(**feed, use_cache=True)
    prompt = feed["attention_mask"].bool()
    assert len(seen) == len(used) == len(tiny.model.language_model.layers)
    for (count, valid, made), given in zip(seen, used, strict=True):
        assert count == prompt.shape[1] and torch.equal(valid, prompt)
        assert given is made


def test_a_crop_into_the_prompt_cuts_pages() -> None:
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, FORMS["int2"]), torch.no_grad():
        out = generate(tiny, feed, new=6)
        stored = out.past_key_values
        stored.crop(-4)
        again = [tiny(input_ids=t[None, None], past_key_values=stored).logits[:, -1] for t in out.sequences[0, -5:-1]]
        torch.testing.assert_close(torch.stack(again, dim=1), logits(out)[:, -4:])
        stored.crop(-(stored.get_seq_length() - 4))
        assert all(int((layer.index.by_head >= 0).sum(-1).max()) <= 4 for layer in stored.mmaccel.layers)


def test_beams() -> None:
    """Rows of demoted keys are repeated and reordered."""
    tiny, feed = model("llava"), inputs("llava")
    options = {"num_beams": 3, "output_scores": True}
    bare = generate(tiny, feed, new=8, **options)
    with accelerated(tiny, FORMS["int8"]):
        beams = generate(tiny, feed, new=8, **options)
    torch.testing.assert_close(beams.sequences_scores, bare.sequences_scores, atol=0.02, rtol=0)


def test_a_budget_of_bytes_counts_the_rest() -> None:
    """Fewer keys stay in full precision, so that all together take the share."""
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, Stage("snapkv", 0.5, {"window": 1, "rest": "int4", "budget_in": "bytes"})):
        generate(tiny, feed, new=1)
        figures = tiny.mmaccel.stats()["stages"][0]
    width = tiny.config.get_text_config().hidden_size // tiny.config.get_text_config().num_attention_heads
    rest = (4 + 32 / 32 + 4 + 32 / width) / 2 / 32
    assert figures["tokens_kept"] == round((0.5 - rest) / (1 - rest) * figures["tokens_in"])


@pytest.mark.parametrize(
    ("stages", "retain", "message"),
    [
        ((Stage("snapkv", 0.5, {"rest": "int3"}),), None, "rest='int3' is unknown; it can be evict, int2"),
        ((Stage("snapkv", 0.5, {"rest": "int2:3"}),), None, "is unknown"),
        ((Stage("h2o", 0.5, {"rest": "int2", "every": 4}),), None, "every, cap and age evict some later"),
        ((Stage("h2o", 0.5, {"rest": "int2", "cap": 40}),), None, "every, cap and age evict some later"),
        ((Stage("h2o", 0.5, {"rest": "int2", "age": (1.0, 0.5)}),), None, "every, cap and age evict some later"),
        ((Stage("h2o", 0.5, {"rest": "int2", "compact": "pivot"}),), None, "compact='pivot' merges; leave out one"),
        ((Stage("h2o", 0.5, {"rest": "int2", "close_gaps": True}),), None, "close_gaps finds no gaps"),
        ((Stage("quest", 0.5, {"rest": "int2"}),), None, "evicts nothing"),
        ((Stage("rekv", 0.5, {"rest": "int2"}),), None, "parks frames as they are stored"),
    ],
)
def test_what_cannot_be_combined(stages: tuple[Stage, ...], retain: float | None, message: str) -> None:
    with pytest.raises(MmaccelError, match=message):
        Recipe("mine", stages).build()


def test_a_prompt_in_chunks_is_refused() -> None:
    with pytest.raises(MmaccelError, match="packs the other keys when all of the prompt has read them"):
        Recipe("mine", (Stage("h2o", 0.5, {"rest": "int2"}),), chunk=16).build()


@pytest.mark.parametrize("retain", [0.05, 8])
def test_a_budget_of_bytes_that_leaves_none_is_refused(retain: float) -> None:
    made = Stage("snapkv", retain, {"rest": "int4", "budget_in": "bytes"})
    with pytest.raises(MmaccelError, match="retain="), accelerated(model("llava"), made):
        generate(model("llava"), inputs("llava"), new=1)
