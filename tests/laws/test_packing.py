"""Packed caches: decoding attends to exactly what is stored, rows are stored as if alone, and bytes are really saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import synthetic
import torch
import zoo
from laws.helpers import FAMILIES, SHORT, close, follow, generate, inputs, logits, model, on_axes, recipe_of
from laws.test_bytes import held
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import DynamicCache

from mmaccel import MmaccelError, Recipe, Stage, accelerated, get_recipe
from mmaccel.core.transformers_api import cache_in
from mmaccel.kv.codecs import Codec
from mmaccel.kv.codecs.think import ThinK

#: so small that tiny prompts fill pages
FINE: dict[str, Any] = {"bits": 8, "page": 16, "group": 16, "residual": 0}
COARSE: dict[str, Any] = {"bits": 2, "page": 32, "group": 32, "residual": 0}
# checked by test_every_codec_has_a_recipe
CODECS: dict[str, Recipe] = {
    "fp8": recipe_of("fp8", page=16),
    "kivi": recipe_of("kivi", **COARSE),
    "think": recipe_of("think", page=32, residual=0, align=4),
    "turboquant": recipe_of("turboquant", page=16),
    "turboquant, halves": recipe_of("turboquant", page=16, bits=3.5),
    "vidkv": recipe_of("vidkv", page=32),
    "vidkv, waves": recipe_of("vidkv", page=32, fourier=True, protect=0.3),
    "calibquant": recipe_of("calibquant", page=16),
    "qserve": recipe_of("qserve", page=16),
    "qserve by queries": recipe_of("qserve", page=16, balance="queries"),
    "zipcache-codec": recipe_of("zipcache-codec", page=16),
    # of pages of 16 tokens of 16 channels in float32 the product of rank 4 takes half the bytes
    "gear": recipe_of("gear", page=16, rank=1),
    "nsnquant": recipe_of("nsnquant", page=16, bits=4),
    "text apart": Recipe(
        "apart", (Stage("calibquant", None, {"page": 16}), Stage("fp8", None, {"page": 16, "text_only": True}))
    ),
}


def test_every_codec_has_a_recipe() -> None:
    """With pages so small that tiny prompts fill them."""
    assert {stage.method for made in CODECS.values() for stage in made.stages} == set(synthetic.offered(Codec))


def divergence(ours: Tensor, theirs: Tensor) -> float:
    """The largest KL divergence of a next-token distribution."""
    p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return float(kl_div(q, p, reduction="none", log_target=True).sum(-1).max())


def by_place(layer: Any) -> tuple[Tensor, Tensor]:
    """Stored keys and values of a layer that lacks no token, in the order of their places, ``[B, Hkv, seen, D]``."""
    keys, values = layer.stored()
    index = layer.index.index if layer.index.index.dim() == 3 else layer.index.index[:, None]
    index = index.expand(-1, keys.shape[1], -1)
    assert ((index >= 0).sum(-1) == layer.seen).all()
    order = index.masked_fill(index < 0, layer.seen).argsort(dim=-1, stable=True)[..., : layer.seen, None]
    return tuple(x.gather(2, order.expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))  # type: ignore[return-value]


def attends_to_what_is_stored(family: str, recipe: Recipe) -> Any:
    """A bare model on a plain cache that holds every token, packed ones decoded, gives the logits of the next step; the state
    of the cache with the recipe."""
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe), torch.no_grad():
        out = generate(tiny, feed, new=3)
        state = out.past_key_values.mmaccel
        plain = DynamicCache(config=tiny.config.get_text_config())
        for number, layer in zip(tiny.mmaccel.family.attending, state.layers, strict=True):
            latents, values = by_place(layer)
            width = values.shape[3] - layer.indexer
            plain.update(latents, values[..., :width], number)
            if layer.indexer:
                plain.update_indexer(values[:, 0, :, width:], number)
        for number, layer in zip(tiny.mmaccel.family.recurrent, state.recurrent, strict=True):
            plain.layers[number] = copy.deepcopy(layer)
        position = (state.seen - state.positions.offset)[:, None]
        ours = tiny(input_ids=out.sequences[:, -1:], past_key_values=out.past_key_values).logits
    position = on_axes(family, position)
    with torch.no_grad():
        theirs = tiny(input_ids=out.sequences[:, -1:], past_key_values=plain, position_ids=position).logits
    close(ours, theirs)
    return state


@pytest.mark.square("family", FAMILIES)
@pytest.mark.square("codec", CODECS)
def test_decoding_attends_to_what_is_stored(family: str, codec: str) -> None:
    state = attends_to_what_is_stored(family, CODECS[codec])
    assert all(layer.width > 0 for layer in state.layers)


@pytest.mark.parametrize("family", SHORT)
def test_what_is_stored_is_what_was_computed(family: str) -> None:
    """The keys of every place within a step of those the bare model has there."""
    tiny, feed = model(family), inputs(family)
    with torch.no_grad():
        bare = tiny(**feed, use_cache=True).past_key_values
        with accelerated(tiny, "kivi", **FINE):
            packed = tiny(**feed, use_cache=True).past_key_values
    for ours, theirs in zip(packed.mmaccel.layers, bare.layers, strict=True):
        keys, values = by_place(ours)
        for stored, true in ((keys, theirs.keys), (values, theirs.values)):
            assert 0 < float((stored - true).norm() / true.norm()) < 0.02
        # only the first layer computes from what no codec has touched; at the end of a prompt all of them do
        assert len(ours.pages.count) == ours.seen // 16 * keys.shape[1]


@pytest.mark.parametrize("family", SHORT)
def test_eight_bits_answer_as_the_bare_model(family: str) -> None:
    """Over a first turn and a second one with another picture."""
    tiny, feed = model(family), inputs(family)
    bare = generate(tiny, feed, new=6)
    with accelerated(tiny, "kivi", **FINE):
        out = generate(tiny, feed, new=6)
        assert 0 < divergence(logits(out), logits(bare)) < 1e-3
        assert torch.equal(out.sequences, bare.sequences)
        kept, whole = follow(feed, out, inputs(family, seed=1))
        second = generate(tiny, kept, new=4, past_key_values=out.past_key_values)
    assert divergence(logits(second), logits(generate(tiny, whole, new=4))) < 1e-3


@pytest.mark.square("family", SHORT)
@pytest.mark.square("codec", CODECS)
def test_a_padded_row_is_stored_as_if_alone(family: str, codec: str) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    with accelerated(tiny, CODECS[codec]), torch.no_grad():
        both = generate(tiny, feed, new=1).past_key_values.mmaccel
        for row in range(len(feed["input_ids"])):
            alone = generate(tiny, zoo.single(family, feed, row), new=1).past_key_values.mmaccel
            for ours, theirs in zip(both.layers, alone.layers, strict=True):
                assert len(ours.packed.pages) == len(theirs.packed.pages) > 0
                for mine, its in zip(ours.packed.pages, theirs.packed.pages, strict=True):
                    mine = mine.selected(torch.tensor([row]))
                    assert torch.equal(mine.lengths(), its.lengths())
                    for a, b in zip(mine.decoded(), its.decoded(), strict=True):
                        # a number on the border between two codes may fall to either side
                        assert float(((a - b).abs() > 1e-3).float().mean()) < 0.01


@pytest.mark.parametrize("family", SHORT)
def test_codecs_store_what_a_policy_keeps(family: str) -> None:
    """Quantised pruning (arXiv 2412.12706): the same keys as the policy alone, in fewer bytes."""
    tiny, feed, policy = model(family), inputs(family, "uneven"), Stage("snapkv", 0.5)
    both = Recipe("both", (policy, Stage("kivi", None, FINE)))
    with accelerated(tiny, both):
        out = generate(tiny, feed, new=4)
        stats = tiny.mmaccel.stats()
        assert held(out.past_key_values) == stats["kv_bytes"]
        packed = out.past_key_values.mmaccel
    with accelerated(tiny, policy):
        alone = generate(tiny, feed, new=4)
        assert stats["kv_bytes"] < 0.6 * tiny.mmaccel.stats()["kv_bytes"]
    assert divergence(logits(out), logits(alone)) < 2e-3
    for ours, theirs in zip(packed.layers, alone.past_key_values.mmaccel.layers, strict=True):
        places = [index.index.sort(-1).values for index in (ours.index, theirs.index)]
        width = min(x.shape[-1] for x in places)
        assert torch.equal(places[0][..., -width:], places[1][..., -width:])
    assert [s["site"] for s in stats["stages"]] == ["cache", "codec"]
    assert stats["stages"][1]["tokens_kept"] == stats["stages"][0]["tokens_kept"]


@pytest.mark.parametrize("policy", [Stage("snapkv", 0.5, {"layer_budget": "sparsity"}), Stage("snapkv", 0.5)], ids=str)
def test_layers_are_packed_as_soon_as_nothing_is_evicted(policy: Stage) -> None:
    """Without figures of all layers to wait for, at most one layer of a prompt is in full precision."""
    tiny, full = model("llava"), []
    made = Recipe("both", (policy, Stage("kivi", None, FINE)))
    with accelerated(tiny, made), torch.no_grad():

        def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            layers = cache_in(kwargs).mmaccel.layers
            full.append(sum(layer.seen > 0 and layer.width == 0 for layer in layers))

        hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in tiny.model.language_model.layers]
        cache = tiny(**inputs("llava"), use_cache=True).past_key_values
        for hook in hooks:
            hook.remove()
    waits = "layer_budget" in policy.options
    assert full == (list(range(len(hooks))) if waits else [0] * len(hooks))
    assert all(layer.width > 0 for layer in cache.mmaccel.layers)


@pytest.mark.parametrize("codec", CODECS)
def test_reported_is_held(codec: str) -> None:
    tiny, feed = model("llava"), inputs("llava", "uneven")
    bare = generate(tiny, feed, new=20)
    with accelerated(tiny, CODECS[codec]):
        out = generate(tiny, feed, new=20)
        assert tiny.mmaccel.stats()["kv_bytes"] == held(out.past_key_values) < 0.75 * held(bare.past_key_values)
        again = generate(
            tiny, follow(feed, out, inputs("llava", "text", batch=2))[0], past_key_values=out.past_key_values
        )
        assert tiny.mmaccel.stats()["kv_bytes"] == held(again.past_key_values)


def test_beams() -> None:
    """Rows of packed caches are repeated and reordered."""
    tiny, feed = model("llava"), inputs("llava")
    options = {"num_beams": 3, "output_scores": True}
    bare = generate(tiny, feed, new=20, **options)
    with accelerated(tiny, "kivi", **FINE):
        beams = generate(tiny, feed, new=20, **options)
        torch.testing.assert_close(beams.sequences_scores, bare.sequences_scores, atol=0.02, rtol=0)


@pytest.mark.parametrize("family", SHORT)
def test_tokens_taken_back(family: str) -> None:
    """Rejected tokens are cut off the cache, packed or not, and the next ones continue at the right place."""
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, "kivi", **FINE), torch.no_grad():
        out = generate(tiny, feed, new=24)
        cache, packed = out.past_key_values, out.past_key_values.mmaccel.layers[0].width
        cache.crop(-20)
        assert cache.get_seq_length() == feed["input_ids"].shape[1] + 3
        assert cache.mmaccel.layers[0].width < packed
        again = [
            tiny(input_ids=token[None, None], past_key_values=cache).logits[:, -1] for token in out.sequences[0, -21:-1]
        ]
    assert divergence(torch.stack(again, dim=1), logits(out)[:, -20:]) < 1e-3


@pytest.mark.parametrize("policy", [(), (Stage("h2o", 0.6, {"layer_budget": "prefix"}),)], ids=["alone", "late"])
def test_think_looks_at_the_last_queries(policy: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer at its own: RoPE turns pairs of channels and keeps the sum of their squares."""
    tiny, feed, before, asked = model("llava"), inputs("llava", "uneven"), [], []
    channels = ThinK.channels
    monkeypatch.setattr(
        ThinK, "channels", lambda self, k, cut: asked.append(cut.query_energy) or channels(self, k, cut)
    )

    def note(module: Any, args: Any, out: Tensor) -> None:
        before.append(out)

    layers = tiny.model.language_model.layers
    hooks = [layer.self_attn.q_proj.register_forward_hook(note) for layer in layers]
    think = Stage("think", None, {"page": 32, "residual": 0, "align": 4})
    with accelerated(tiny, Recipe("thin", (*policy, think))), torch.no_grad():
        tiny(**feed, use_cache=True)
    for hook in hooks:
        hook.remove()
    heads = tiny.config.get_text_config().num_key_value_heads
    assert len(asked) == len(before) == len(layers)
    for mine, queries in zip(asked, before, strict=True):
        width = mine.shape[-1]
        squares = queries[:, -ThinK().window :].unflatten(2, (heads, -1, width)).square().mean((1, 3))
        want = squares[..., : width // 2] + squares[..., width // 2 :]
        torch.testing.assert_close(mine[..., : width // 2] + mine[..., width // 2 :], want)


# --- as part of a recipe ----------------------------------------------------------------------------------------------
def test_what_cannot_be_combined() -> None:
    bad = [
        ((Stage("kivi"), Stage("fp8")), "of two codecs one must pack visual tokens"),
        (
            (Stage("kivi", None, {"visual_only": True}), Stage("calibquant")),
            "of two codecs one must pack visual tokens",
        ),
        ((Stage("kivi", None, {"text_only": True}),) * 3, "of two codecs one must pack visual tokens"),
        ((Stage("kivi", None, {"text_only": True, "visual_only": True}),), "packs nothing if it is"),
        ((Stage("calibquant", None, {"text_only": True}),), "leave out visual_only and text_only"),
        ((Stage("kivi"), Stage("snapkv", 0.5)), "must follow the order of the sites"),
        ((Stage("kivi", None, {"bits": 3}),), "must be 2, 4 or 8, got 3"),
    ]
    for stages, message in bad:
        with pytest.raises(MmaccelError, match=message):
            Recipe("mine", stages).build()
    with pytest.raises(MmaccelError, match="drops nothing"):
        get_recipe("kivi").override(retain=0.5)


def test_the_recipe_for_pages_of_text() -> None:
    """`document`: every token is read, then half of the visual keys stay, with fewer channels and in 4 bits."""
    tiny, feed = model("llava"), inputs("llava", "uneven")
    visual = int(zoo.visual_mask("llava", tiny, feed["input_ids"]).sum())
    bare = generate(tiny, feed, new=2)
    policy, codec = get_recipe("document").stages
    small = Stage(codec.method, None, {**codec.options, "page": 16, "group": 16, "residual": 0, "align": 4})
    with accelerated(tiny, Recipe("document", (policy, small))):
        out = generate(tiny, feed, new=2)
        stages = tiny.mmaccel.stats()["stages"]
    # the first token follows the whole prompt
    assert torch.equal(logits(out)[:, 0], logits(bare)[:, 0])
    assert [stage["site"] for stage in stages] == ["cache", "codec"]
    assert stages[0]["tokens_in"] == visual and abs(stages[0]["tokens_kept"] - visual / 2) <= 1
    for layer in out.past_key_values.mmaccel.layers:
        assert layer.pages is not None
        (keys,), (values,) = layer.pages.keys, layer.pages.values
        assert keys.codes.shape[2] < values.codes.shape[2]
        assert keys.format.code == values.format.code == "int4"


def test_options_are_checked_together() -> None:
    made = recipe_of("kivi", page=16, group=16)
    assert made == recipe_of("kivi", group=16, page=16)
    assert Recipe.from_json(made.to_json()) == made
    with pytest.raises(MmaccelError, match="do not fit pages of 16"):
        recipe_of("kivi", page=16)


def test_a_prompt_too_short_to_pack_is_noted() -> None:
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, "kivi"):
        generate(tiny, feed, new=2)
        assert any("kivi has packed nothing" in note for note in tiny.mmaccel.stats()["notes"])
    with accelerated(tiny, "kivi", **FINE):
        generate(tiny, feed, new=2)
        assert tiny.mmaccel.stats()["notes"] == []
