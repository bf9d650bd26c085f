"""Law 13: a wrapper that is undone, copied, shared or called in another way says so or goes on being right."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws import oracle
from laws.helpers import FAMILIES, SHORT, close, follow, generate, inputs, logits, recipe_of, snapshot
from tail import few, in_turn
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import mmaccel
from mmaccel import UnsupportedError, accelerate_encoder, accelerate_vlm, accelerated, is_accelerated
from mmaccel.core.reduction import Reduction
from mmaccel.families.tower import Towers
from mmaccel.method import ProjectorMethod, TokenBatch

families = pytest.mark.square("family", few(FAMILIES, SHORT), of="kinds")


@mmaccel.register
@dataclass(frozen=True)
class Refuses(ProjectorMethod):
    """Test: refuses every prompt."""

    name = "test-refuses"

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        raise UnsupportedError("not today")


SITES = ("divprune", "fastv", "snapkv", "test-fixed-cache")


@pytest.fixture
def tiny() -> Any:
    return zoo.model("llava", seed=3)


def tokens(model: Any, feed: dict[str, Any]) -> Tensor:
    return generate(model, feed).sequences


# ------------------------------------------------------------------------------------------ the attention function


@pytest.mark.square(
    ("family", "method", "change"),
    in_turn(
        ["llava", "qwen2_5_vl", "smolvlm"],
        SITES,
        ["eager", {"text_config": "eager"}, {"text_config": "eager", "vision_config": "sdpa"}],
    ),
    of="kinds",
)
def test_another_attention_after_wrapping_goes_below_ours(family: str, method: str, change: Any) -> None:
    """The recipe runs as before, on a padded batch too, and what the user chose is there after ``remove()``."""
    model, feed = zoo.model(family, seed=3), inputs(family, "uneven")
    recipe, processor = recipe_of(method, family), zoo.processor(family)
    with accelerated(model, recipe, processor=processor):
        expected, stages = generate(model, feed), model.mmaccel.stats()["stages"]
        model.set_attn_implementation(change)
        text = model.mmaccel.family.text
        assert text.config._attn_implementation == "mmaccel_text_eager"
        found = generate(model, feed)
        assert model.mmaccel.stats()["stages"] == stages and stages
        close(logits(found), logits(expected))
        assert generate(model, feed, output_attentions=True).attentions[0][0] is not None
    assert text.config is model.config.get_text_config() and text.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("how", ["config", "text model", "below"])
def test_the_name_in_a_config_is_honoured_too(how: str, tiny: Any) -> None:
    feed = inputs("llava", "uneven")
    with accelerated(tiny, "snapkv", retain=0.5):
        expected = logits(generate(tiny, feed))
        text = tiny.model.language_model
        if how == "config":
            tiny.config.text_config._attn_implementation = "eager"
        elif how == "text model":
            text.set_attn_implementation("eager")
        else:
            text.config._attn_implementation = "mmaccel_text_eager"
        assert tiny.config.text_config._attn_implementation == "eager"
        close(logits(generate(tiny, feed)), expected)
        assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] > 0
    assert text.config._attn_implementation == "eager"


def test_an_attention_that_is_not_known_is_refused_after_wrapping(tiny: Any) -> None:
    """By ``set_attn_implementation``, which then changes nothing; in a config at the next forward."""
    AttentionInterface.register("test_unknown", sdpa_attention_forward)
    feed = inputs("llava")
    with accelerated(tiny, "snapkv", retain=0.5):
        expected = tokens(tiny, feed)
        with pytest.raises(UnsupportedError, match="attn_implementation='test_unknown'.*sdpa"):
            tiny.set_attn_implementation("test_unknown")
        assert torch.equal(tokens(tiny, feed), expected)
        tiny.config.text_config._attn_implementation_internal = "test_unknown"
        with pytest.raises(UnsupportedError, match="attn_implementation='test_unknown'.*sdpa"):
            generate(tiny, feed)
        tiny.config.text_config._attn_implementation_internal = "sdpa"
        assert torch.equal(tokens(tiny, feed), expected)


@pytest.mark.parametrize("recipe", ["divprune", "snapkv"])
def test_attention_that_passes_ours_by_is_an_error(recipe: str, tiny: Any) -> None:
    """As kernels put in place of an attention module's forward do."""
    feed = inputs("llava")
    eager = transformers.models.llama.modeling_llama.eager_attention_forward

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out, weights = eager(self, q, k, v, None, scaling=self.scaling)
        return self.o_proj(out.flatten(2)), weights

    attention = tiny.model.language_model.layers[2].self_attn
    with accelerated(tiny, recipe, retain=0.5):
        expected = tokens(tiny, feed)
        attention.forward = forward.__get__(attention)
        with pytest.raises(UnsupportedError, match="saw the attention of 3 of 4 layers"):
            generate(tiny, feed)
        del attention.forward
        assert torch.equal(tokens(tiny, feed), expected)


def test_a_replaced_config_is_an_error(tiny: Any) -> None:
    with accelerated(tiny, "snapkv", retain=0.5):
        tiny.model.language_model.layers[1].self_attn.config = copy.deepcopy(tiny.config.text_config)
        with pytest.raises(UnsupportedError, match="config of this model's attention was replaced.*accelerate_vlm"):
            generate(tiny, inputs("llava"))


def test_an_encoder_keeps_its_config_and_follows_a_new_attention() -> None:
    encoder = zoo.model("llava", seed=3).model.vision_tower
    pixels = inputs("llava")["pixel_values"]
    with torch.no_grad():
        accelerate_encoder(encoder, "tome", retain=0.5)
        assert encoder.mmaccel.encoder.tower.config._attn_implementation == "mmaccel_vision_sdpa"
        expected = encoder(pixels).last_hidden_state
        encoder.set_attn_implementation("eager")
        close(encoder(pixels).last_hidden_state, expected)
        encoder.mmaccel.remove()
    assert encoder.config._attn_implementation == "eager"


# ------------------------------------------------------------------------------------------------- shared configs


@families
def test_models_of_one_config_do_not_touch_each_other(family: str) -> None:
    """Neither while one is accelerated, nor when it is so no more; and a config of a wrapped model makes plain models."""
    one, feed = zoo.model(family, seed=3), inputs(family)
    other = type(one)(one.config).eval()
    other.load_state_dict(one.state_dict())
    other.generation_config = one.generation_config
    assert other.config is one.config
    bare, before, processor = logits(generate(other, feed)), snapshot(other), zoo.processor(family)
    recipe = recipe_of("test-fixed-cache", family)
    accelerate_vlm(one, recipe, processor=processor)
    assert snapshot(other) == before
    reduced = logits(generate(one, feed))
    third = type(one)._from_config(one.config)
    assert {m.config._attn_implementation for m in third.modules() if hasattr(m, "config")} <= {"eager", "sdpa"}
    accelerate_vlm(other, recipe, processor=processor)
    one.mmaccel.remove()
    assert torch.equal(logits(generate(other, feed)), reduced)
    other.mmaccel.remove()
    assert snapshot(other) == before
    assert torch.equal(logits(generate(other, feed)), bare) and torch.equal(logits(generate(one, feed)), bare)


def test_a_config_of_a_wrapped_model_loads_a_plain_one(tiny: Any, tmp_path: Any) -> None:
    feed = inputs("llava")
    bare = tokens(tiny, feed)
    with accelerated(tiny, "snapkv", retain=0.5):
        tiny.save_pretrained(tmp_path)
        other = type(tiny).from_pretrained(tmp_path, config=tiny.config).eval()
        text = copy.deepcopy(tiny.model.language_model.config)
        assert text._attn_implementation == "sdpa" and type(text) is type(tiny.config.text_config)
    other.generation_config = tiny.generation_config
    assert torch.equal(tokens(other, feed), bare)
    accelerate_vlm(other, "snapkv", retain=0.5)


def test_output_attentions_in_the_config_of_a_wrapped_model(tiny: Any) -> None:
    tiny.set_attn_implementation("eager")
    with accelerated(tiny, "divprune", retain=0.5):
        for config in (tiny.config.text_config, tiny.model.language_model.config):
            config.output_attentions = True
            assert tiny(**inputs("llava")).attentions is not None
            config.output_attentions = False


# ------------------------------------------------------------------------------------------------------ the cache


WAYS = ["argument", "generation config", "forward", "text config"]
CACHED = [
    name
    for name in oracle.named_recipes()
    if oracle.fits(name, "llava") and (oracle.has_site(name, "cache") or oracle.has_site(name, "codec"))
]
#: a budget, packed keys, two sites, a sparse read
QUICK = ["snapkv", "kivi", "fastkv", "dycoke-cache"]


@pytest.mark.square(("way", "recipe"), few(list(product(WAYS, CACHED)), list(product(WAYS, QUICK))), of="kinds")
def test_a_recipe_for_the_cache_needs_one(recipe: str, way: str, tiny: Any) -> None:
    feed = inputs("llava")
    accelerate_vlm(tiny, recipe)
    with pytest.raises(UnsupportedError, match=f"Recipe '{recipe}' compresses the KV cache .*use_cache=False"):
        if way == "argument":
            tiny.generate(**feed, use_cache=False, max_new_tokens=2)
        elif way == "generation config":
            tiny.generation_config = copy.deepcopy(tiny.generation_config)
            tiny.generation_config.use_cache = False
            tiny.generate(**feed, max_new_tokens=2)
        elif way == "forward":
            tiny(**feed, use_cache=False)
        else:
            tiny.config.text_config.use_cache = False
            try:
                tiny(**feed)
            finally:
                tiny.config.text_config.use_cache = True


def test_without_a_cache_other_recipes_run(tiny: Any) -> None:
    feed = inputs("llava")
    with accelerated(tiny, "divprune", retain=0.5):
        tiny.generate(**feed, use_cache=False, max_new_tokens=2)
        assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] > 0


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_static_cache_is_refused_by_name(family: str) -> None:
    model, feed = zoo.model(family, seed=3), inputs(family)
    with accelerated(model, "divprune", retain=0.5), pytest.raises(UnsupportedError, match="not StaticCache with"):
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=256)
        model.generate(**feed, past_key_values=cache, max_new_tokens=2)


def test_exchanged_layers_of_a_cache_are_an_error(tiny: Any) -> None:
    feed, cache = inputs("llava"), DynamicCache()
    with accelerated(tiny, "snapkv", retain=0.5):
        first = generate(tiny, feed, past_key_values=cache).sequences
        cache.layers[1] = DynamicCache(config=tiny.config.text_config).layers[1]
        with pytest.raises(UnsupportedError, match="layers of this cache were exchanged.*new cache"):
            tiny.generate(input_ids=first, past_key_values=cache, max_new_tokens=2)


@pytest.mark.square(
    ("family", "how", "recipe", "kind", "refused"),
    in_turn(
        ["llava", "qwen2_5_vl"],
        ["removed", "none"],
        [
            ("divprune", "image", False),
            ("divprune", "uneven", True),
            ("snapkv", "image", False),
            ("snapkv", "uneven", True),
            ("adakv", "image", True),
            ("fastv", "image", True),
            ("kivi", "uneven", False),
        ],
    ),
    of="kinds",
)
def test_a_kept_cache_without_its_recipe(family: str, how: str, recipe: str, kind: str, refused: bool) -> None:
    """A model that is accelerated no more goes on rightly with what is left of a prompt, or refuses it."""
    model, feed = zoo.model(family, seed=3), inputs(family, kind)
    words = inputs(family, "text", batch=len(feed["input_ids"]))
    chosen = mmaccel.get_recipe(recipe) if recipe == "kivi" else mmaccel.get_recipe(recipe).override(retain=0.4)
    with accelerated(model, chosen):
        first = generate(model, feed)
        next_ = follow(feed, first, words)[0]
        expected = logits(generate(model, next_, past_key_values=copy.deepcopy(first.past_key_values)))
    if how == "none":
        accelerate_vlm(model, "none")
    if not refused:
        close(logits(generate(model, next_, past_key_values=first.past_key_values)), expected)
        return
    with pytest.raises(UnsupportedError, match="what mmaccel left of its prompt.*new cache"):
        generate(model, next_, past_key_values=first.past_key_values)
    # nothing was changed by asking
    with accelerated(model, chosen):
        close(logits(generate(model, next_, past_key_values=first.past_key_values)), expected)


def test_a_cache_whose_first_prompt_was_refused_takes_another(tiny: Any) -> None:
    cache, words = DynamicCache(), inputs("llava", "text", batch=2)
    bare = generate(tiny, words).sequences
    with accelerated(tiny, "test-refuses", retain=0.5):
        with pytest.raises(UnsupportedError, match="not today"):
            generate(tiny, inputs("llava", "uneven"), past_key_values=cache)
        assert torch.equal(generate(tiny, words, past_key_values=cache).sequences, bare)


# ------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.square(
    ("family", "recipe"),
    few(
        [
            (family, name)
            for family in ("llava", "qwen2_5_vl", "llava_next")
            for name in oracle.named_recipes()
            if oracle.fits(name, family) and mmaccel.get_recipe(name).primary is not None
        ],
        [
            ("llava", "divprune"),
            ("qwen2_5_vl", "fastv"),
            ("llava_next", "tome"),
            ("llava", "snapkv"),
            ("qwen2_5_vl", "aim-merge"),
        ],
    ),
)
def test_gradients_are_finite(family: str, recipe: str) -> None:
    """Rows of dropped tokens show NaN in the logits and poison no weight."""
    model, feed = zoo.model(family, seed=3), inputs(family)
    with accelerated(model, recipe, retain=0.5, processor=zoo.processor(family)):
        out = model(**feed, labels=feed["input_ids"].clone())
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        dropped = ~model.mmaccel.reduction.kept[0]
    assert gradients["lm_head.weight"].abs().sum() > 0
    assert [name for name, g in gradients.items() if not bool(g.isfinite().all())] == []
    assert torch.equal(out.logits[0].isnan().any(-1), dropped.to(out.logits.device))


def test_dropped_rows_show_in_every_form_of_the_output(tiny: Any) -> None:
    feed = inputs("llava")
    labels = feed["input_ids"].clone()
    with torch.no_grad(), accelerated(tiny, "divprune", retain=0.5):
        whole = tiny(**feed).logits
        lost = whole[0].isnan().any(-1)
        assert 0 < int(lost.sum()) < len(lost) and torch.equal(lost, ~tiny.mmaccel.reduction.kept[0])
        assert torch.equal(tiny(**feed, return_dict=False)[0].nan_to_num(7.0), whole.nan_to_num(7.0))
        assert torch.equal(tiny(**feed, labels=labels, return_dict=False)[1].nan_to_num(7.0), whole.nan_to_num(7.0))
        some = torch.tensor([0, int(lost.nonzero()[0]), len(lost) - 1])
        close(tiny(**feed, logits_to_keep=some).logits.nan_to_num(7.0), whole[:, some].nan_to_num(7.0))
        close(tiny(**feed, logits_to_keep=9).logits.nan_to_num(7.0), whole[:, -9:].nan_to_num(7.0))
        inner = tiny.model(**feed).last_hidden_state
        assert torch.equal(inner[0].isnan().any(-1), lost)


# --------------------------------------------------------------------------------------------- copies and half-ways


def test_a_shallow_copy_is_the_model_it_is_a_copy_of(tiny: Any) -> None:
    feed = inputs("llava")
    bare = tokens(tiny, feed)
    accelerate_vlm(tiny, "divprune", retain=0.5)
    reduced, other = tokens(tiny, feed), copy.copy(tiny)
    assert torch.equal(tokens(other, feed), reduced)
    with pytest.raises(UnsupportedError, match="shallow copy of an accelerated one.*remove"):
        accelerate_vlm(other, "random")
    assert torch.equal(tokens(tiny, feed), reduced)
    tiny.mmaccel.remove()
    assert not is_accelerated(other)
    assert torch.equal(tokens(other, feed), bare) and torch.equal(tokens(tiny, feed), bare)
    with accelerated(other, "divprune", retain=0.5):
        assert torch.equal(tokens(other, feed), reduced)
    assert torch.equal(tokens(tiny, feed), bare)


def test_a_merge_that_fails_half_way_leaves_no_hook(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tiny)
    original, hooked = Towers.second_half, list[Any]()

    def fail(self: Towers, layer: Any) -> Any:
        hooked.append(layer)
        if len(hooked) > 1:
            raise RuntimeError("half way")
        return original(self, layer)

    monkeypatch.setattr(Towers, "second_half", fail)
    with pytest.raises(RuntimeError, match="half way"):
        accelerate_vlm(tiny, "tome", retain=0.5)
    assert snapshot(tiny) == before


# ------------------------------------------------------------------------------------------------ ways of generating


def test_continuous_batching_is_refused(tiny: Any) -> None:
    with accelerated(tiny, "divprune"), pytest.raises(UnsupportedError, match="generate_batch.. takes no pixels"):
        tiny.generate_batch(inputs=[[1, 2, 3]])
    assert "generate_batch" not in vars(tiny)


def test_a_wrapped_assistant_is_refused_by_name(tiny: Any) -> None:
    bare, feed = zoo.model("llava", seed=4), inputs("llava")
    with accelerated(tiny, "divprune"), pytest.raises(UnsupportedError, match="cannot draft for another one"):
        bare.generate(**feed, assistant_model=tiny, max_new_tokens=4)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["divprune", "fastv", "snapkv"])
def test_a_compiled_forward_gives_the_same_tokens(recipe: str, tiny: Any) -> None:
    """With graph breaks at every hook and decision of ours."""
    feed = inputs("llava")
    with torch.no_grad(), accelerated(tiny, recipe, retain=0.5):
        expected = tokens(tiny, feed)
        tiny.forward = torch.compile(tiny.forward, backend="eager")
        try:
            assert torch.equal(tokens(tiny, feed), expected)
            assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] > 0
        finally:
            del tiny.forward


# ---------------------------------------------------------------------------------------------------------- loading


def test_a_model_is_loaded_from_a_path() -> None:
    from mmaccel.cli.ask import SHIPPED
    from mmaccel.families.load import load

    model, processor = load(SHIPPED, device="cpu")
    assert model.config.model_type == "llava" and processor is not None
