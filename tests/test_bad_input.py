"""Bad input: one sentence that names the thing and the remedy; never a silent full run, never a silent wrong answer."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
import zoo
from encoders.small import VISION
from laws.helpers import FAMILIES, cache, gap, generate, inputs, logits, model, recipe_of
from torch import Tensor

import mmaccel
from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated, is_accelerated
from mmaccel.cli import main
from mmaccel.core.reduction import Reduction
from mmaccel.families import REFUSED, described
from mmaccel.families import families as adapters
from mmaccel.families.load import load
from mmaccel.method import KeyBatch, Policy, ProjectorMethod, TokenBatch, registry

families = pytest.mark.square("family", FAMILIES, of="kinds")
SHIPPED = Path(mmaccel.__file__).parent / "models" / "mini-llava"
NO_CLS = tuple(
    name for name, family in adapters().items() if not family.facts.cls and family.closed is family.whole is None
)


def one_sentence(message: str) -> None:
    """Short, without a trace of Python, and ending in what helps (a sentence, or a list of what there is)."""
    assert message and "\n" not in message and len(message) < 1700
    assert message[0].isupper() or re.match(r"`?[\w'\-]+`?[=: ]", message), message
    assert message.endswith((".", "?")) or "; known are" in message, message


def refused(call: Any, match: str, kind: type[MmaccelError] = MmaccelError) -> None:
    with pytest.raises(kind, match=match) as caught:
        call()
    one_sentence(str(caught.value))


# ------------------------------------------------------------------------------------------------- names and options


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("divprun", "There is no recipe 'divprun'; did you mean 'divprune'"),
        ("snap-kv", "did you mean 'snapkv'"),
        ("Balanced", "did you mean 'balanced'"),
        ("xyzzy", r"There is no recipe 'xyzzy'; closest in spelling are '[^ ]+', '[^ ]+', '[^ ]+'. mmaccel methods"),
        ("?" * 9, "closest in spelling are "),
    ],
)
def test_unknown_names(name: str, match: str) -> None:
    refused(lambda: accelerate_vlm(model("llava"), name), match)
    assert not is_accelerated(model("llava"))


def test_unknown_methods() -> None:
    refused(lambda: Recipe("x", (Stage("fastvv", 0.5),)), "There is no method 'fastvv'; did you mean 'fastv'")
    refused(lambda: mmaccel.get_method("poool"), "did you mean 'pool'")
    refused(lambda: mmaccel.get_recipe(3), "3 is not a recipe; give a name")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        ("random", {"sed": 1}, "'sed' is not an option of recipe 'random'; it takes retain, .*seed"),
        ("none", {"seed": 1}, "'seed' is not an option"),
        ("none", {"retain": 0.5}, "drops nothing"),
        ("random", {"seed": "one"}, "seed='one' is of the wrong type; give int"),
        ("random", {"positions": "new"}, "use 'keep' or 'paper'"),
        ("random", {"variant": "up"}, "use 'exact' or 'official'"),
        ("snapkv", {"text_retain": 2.0}, "text_retain=2.0 is outside"),
        ("snapkv", {"kernel": 4}, "`kernel` of snapkv must be an odd number, got 4"),
        ("streaming-llm", {"sinks": -1}, "`sinks` of streaming-llm must be at least 0, got -1"),
        ("fastv", {"layer": 0}, "fastv .* layer"),
        ("resize", {"frames": 0.0}, "`frames` of resize must be greater than 0 and at most 1, got 0.0"),
    ],
)
def test_wrong_options(recipe: str, options: dict[str, Any], match: str) -> None:
    refused(lambda: accelerate_vlm(model("llava"), recipe, **options), match)
    assert not is_accelerated(model("llava"))


def test_an_option_of_two_methods_is_ambiguous() -> None:
    both = [Stage("random", 0.5), Stage("test-fixed", 0.4)]
    refused(lambda: accelerate_vlm(model("llava"), both, seed=1), "seed=1: 'seed' belongs to several methods")


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        ([Stage("fastv", 0.5), Stage("random", 0.4)], "order of the sites"),
        ([Stage("snapkv", 0.5), Stage("streaming-llm", 0.4)], "at most|is the most"),
        ([Stage("fastv", 0.5, {"layer": 2}), Stage("fastv", 0.4, {"layer": 2})], "rising layers"),
        ([Stage("fastv", 0.5, {"layer": 3}), Stage("fastv", 0.4, {"layer": 1})], "rising layers"),
        ([Stage("random")], "needs a budget; give retain=0.25"),
    ],
)
def test_stages_that_do_not_go_together(stages: list[Stage], match: str) -> None:
    refused(lambda: accelerate_vlm(model("llava"), stages), match)
    assert not is_accelerated(model("llava"))


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.mark.parametrize(
    ("retain", "match"),
    [
        (0, "keeps no token; give a count of 1 or more"),
        (0.0, "outside"),
        (-3, "keeps no token"),
        (-0.5, "outside"),
        (1.5, "outside"),
        (64.0, "for a count of tokens write retain=64"),
        (float("nan"), "is not a budget"),
        (float("inf"), "outside"),
        (True, "is not a budget"),
        ("0.5", "is not a budget"),
    ],
)
# by choice: one of every site of a budget, and several stages
@pytest.mark.parametrize("recipe", ["random", "fastv", "snapkv", "balanced"])
def test_impossible_budgets(recipe: str, retain: Any, match: str) -> None:
    refused(lambda: accelerate_vlm(model("llava"), recipe, retain=retain), match)
    assert not is_accelerated(model("llava"))


# -------------------------------------------------------------------------------------- what a model or family lacks


@pytest.mark.parametrize("family", NO_CLS)
def test_cls_methods_need_a_cls_token(family: str) -> None:
    """SigLIP and the Qwen towers have none, which is known before anything runs."""
    refused(
        lambda: accelerate_vlm(model(family), "vtc-cls"),
        f"vtc-cls needs a CLS token, which the vision tower of {family} lacks; use 'attention-received'",
        UnsupportedError,
    )
    assert not is_accelerated(model(family))

    refused(
        lambda: accelerate_vlm(model(family), "evit"),
        f"evit needs a CLS token, which the vision tower of {family} lacks; use 'tome' or 'pitome'",
        UnsupportedError,
    )


@pytest.mark.parametrize(
    ("family", "recipe", "why"),
    [
        (name, recipe, said)
        for name, family in adapters().items()
        for recipe, said in (("attention-received", family.closed), ("tome", family.closed or family.whole))
        if said is not None
    ],
)
def test_towers_that_are_closed_say_why(family: str, recipe: str, why: str) -> None:
    """Methods that look into them, or merge in them, are refused before anything runs; others work."""
    refused(lambda: accelerate_vlm(model(family), recipe), f"the vision tower, and that of {family} {why}; use ")
    assert not is_accelerated(model(family))


def test_another_rope_than_that_of_two_halves() -> None:
    refused(lambda: accelerate_vlm(model("aya_vision"), "expected-attention"), "of aya_vision turns pairs.*use snapkv")


def test_merging_more_than_a_tower_can() -> None:
    """Each layer halves its tokens at most; the rest is merged behind the tower."""
    tiny = model("llava")
    with accelerated(tiny, "tome", retain=1):
        generate(tiny, inputs("llava"))
        assert tiny.mmaccel.stats()["visual_tokens_kept"] == 1


@pytest.mark.parametrize(("family", "layer", "remedy"), [("llava", 4, 3), ("llava", 99, 3), ("qwen3_vl", 1, 3)])
def test_layers_out_of_range(family: str, layer: int, remedy: int) -> None:
    stages = [Stage("fastv", 0.5, {"layer": layer})]
    refused(lambda: accelerate_vlm(model(family), stages), f"layer={layer} is out of reach.*give layer={remedy}")


@pytest.mark.parametrize("layers", [(7,), (-5,)])
def test_tower_layers_out_of_range(layers: tuple[int, ...]) -> None:
    refused(
        lambda: accelerate_vlm(model("llava"), "attention-received", layers=layers),
        f"has 4 layers, there is no layer {layers[0]}",
        UnsupportedError,
    )
    assert not is_accelerated(model("llava"))


def _llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_models_that_are_not_supported() -> None:
    names = ", ".join(adapters())
    refused(
        lambda: accelerate_vlm(_llama()), f"does not know the model type 'llama'; it supports {names}", UnsupportedError
    )
    refused(lambda: accelerate_vlm(torch.nn.Linear(2, 2)), "'Linear'; it supports llava", UnsupportedError)
    assert set(FAMILIES) == set(adapters())


def test_a_family_of_that_kind_comes_before_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, "llava", "it is served")
    assert not REFUSED.keys() - {"llava"} & {kind for family in adapters().values() for kind in family.model_types}
    assert described(model("llava").config).name == "llava"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss: its attention has learned sinks, which belong to no key."),
        ({"model_type": "qwen3_5_text"}, "qwen3_5_text: it has layers of linear_attention."),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
            "lfm2: it has layers of conv.",
        ),
        (
            {"model_type": "deepseek_v2", "n_routed_experts": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1},
            "deepseek_v2: its cache holds latents, of a kind that is not known here.",
        ),
    ],
)
def test_language_models_that_are_refused(text: dict[str, Any], why: str) -> None:
    """A family that takes any language model does not take these."""
    config = zoo._family("internvl").config(text, 100)
    said = f"^mmaccel does not accelerate internvl models with the language model {re.escape(why)}$"
    refused(lambda: described(config), said, UnsupportedError)
    with torch.device("meta"):
        config._attn_implementation = "eager"
        bare = transformers.AutoModelForImageTextToText.from_config(config)
    refused(lambda: accelerate_vlm(bare), said, UnsupportedError)


@pytest.mark.parametrize("family", ["gemma3", "gemma4_unified"])
def test_pictures_that_are_wider_than_windows(family: str) -> None:
    tiny = model(family, sliding_window=8)
    with accelerated(tiny, "random", processor=zoo.processor(family)), torch.no_grad():
        refused(
            lambda: tiny(**inputs(family)), "^A picture of .. tokens is wider than the sliding window", UnsupportedError
        )


def test_a_prompt_that_is_wider_than_windows_and_attention_that_caps_no_scores() -> None:
    """Of PaliGemma 2."""
    tiny, feed = model("paligemma", model_type="gemma2", sliding_window=8), inputs("paligemma")
    with accelerated(tiny, "random"), torch.no_grad():
        said = (
            f"^A prompt of {feed['input_ids'].shape[1]} tokens is wider than the sliding window of this paligemma model"
        )
        refused(lambda: tiny(**feed), said, UnsupportedError)
    tiny.config.text_config._attn_implementation_internal = "sdpa"
    try:
        said = '^The language model of a PaliGemma 2 caps .*; load it with attn_implementation="eager"'
        refused(lambda: accelerate_vlm(tiny, "random"), said, UnsupportedError)
    finally:
        tiny.config.text_config._attn_implementation_internal = "eager"


def test_small_models_of_gemma_4_are_refused() -> None:
    config = zoo._family("gemma4").config({"hidden_size_per_layer_input": 8}, 100)
    said = "gemma4_text: every layer of the language model has an embedding of its own for every token of the prompt."
    refused(lambda: described(config), said, UnsupportedError)


#: what a configuration has no default of
_INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 256, "budget": 64, "compress_ratio": 4}
NEEDED = {
    "qwen4_exp": {"text_config": {f"indexer_{name}": value for name, value in _INDEXER.items()}},
    "qwen3_omni_moe": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 64}}
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_are_refused(kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        assert tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), f"{kind} is no model type"
        pytest.skip("newer than this transformers")
    config = transformers.AutoConfig.for_model(kind, **NEEDED.get(kind, {}))
    why = re.escape(f"mmaccel does not accelerate {kind} models: {REFUSED[kind]}.")
    refused(lambda: described(config), f"^{why}$", UnsupportedError)
    auto = transformers.AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForMultimodalLM
    with torch.device("meta"):
        bare = auto.from_config(config)
    refused(lambda: accelerate_vlm(bare), f"^{why}$", UnsupportedError)
    assert not is_accelerated(bare)


@pytest.mark.parametrize(
    ("thing", "match"),
    [
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            "^The name 'Qwen/Qwen2.5-VL-7B-Instruct' is not a model; give what from_pretrained has loaded",
        ),
        (Path("models/qwen"), "^The name 'models/qwen' is not a model; give what from_pretrained has loaded"),
        (zoo.processor("llava"), "^A .*Processor is not a model; give what"),
        (SimpleNamespace(model=torch.nn.Linear(2, 2)), "^A SimpleNamespace is not a model; give its .model"),
        (None, "^A NoneType is not a model"),
    ],
    ids=range(5),
)
def test_what_is_no_model(thing: Any, match: str) -> None:
    """A name, a path, a processor, a pipeline: nothing of it is printed at length."""
    for call in (accelerate_vlm, mmaccel.accelerate_encoder):
        refused(lambda call=call: call(thing), match)
    refused(lambda: accelerated(thing).__enter__(), match)


def test_an_encoder_in_training_mode() -> None:
    """As open_clip's factory hands it over."""
    clip = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))
    pixels = torch.rand(1, 3, VISION["image_size"], VISION["image_size"])
    mmaccel.accelerate_encoder(clip.train(), "tome", retain=0.5)
    said = r"^CLIPVisionModel is in training mode, and mmaccel accelerates inference; call model.eval\(\) first"
    refused(lambda: clip(pixels), said, UnsupportedError)
    clip.eval()(pixels)
    assert clip.mmaccel.stats()["tokens_kept"] == 18


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("cuda", "no GPU that torch can use; run on the CPU"),
        ("cuda:1", "no GPU that torch can use; run on the CPU"),
        ("gpu", "There is no device 'gpu'; give cpu, cuda"),
    ],
)
def test_devices_that_are_not_there(device: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(lambda: load(SHIPPED, device=device), match)


def test_a_model_from_a_path() -> None:
    loaded, _ = load(Path(SHIPPED), device="cpu")
    assert not loaded.training and str(loaded.device) == "cpu"
    refused(lambda: load(Path("./nothing/here"), device="cpu"), "There is no folder 'nothing/here'")


@families
def test_the_inner_model_cannot_generate(family: str) -> None:
    refused(
        lambda: accelerate_vlm(model(family).model),
        "cannot generate; give the ...ForConditionalGeneration model|does not know the model type",
        UnsupportedError,
    )


def test_an_attention_implementation_that_is_not_known() -> None:
    tiny = zoo.model("llava")
    tiny.config.text_config._attn_implementation_internal = "flex_attention"
    refused(lambda: accelerate_vlm(tiny, "random"), "attn_implementation='flex_attention'.*sdpa", UnsupportedError)
    assert not is_accelerated(tiny)


# -------------------------------------------------------------------------------------------------- ways of calling


@families
def test_training_mode(family: str) -> None:
    """Reducing while training would drop gradients; text alone is untouched and may be trained on."""
    tiny = zoo.model(family)
    accelerate_vlm(tiny, "random")
    tiny.train()
    refused(lambda: tiny(**inputs(family)), r"call model.eval\(\) first", UnsupportedError)
    assert torch.isfinite(tiny(**inputs(family, "text")).logits).all()
    tiny.eval()
    assert tiny(**inputs(family)).logits.shape[1] == inputs(family)["input_ids"].shape[1]


@families
@torch.no_grad()
def test_embeddings_of_the_callers_own(family: str) -> None:
    """Without ids there is no layout: refused in a forward and in ``generate``."""
    tiny, feed = model(family), inputs(family)
    ids = feed.pop("input_ids")
    embeds = tiny.get_input_embeddings()(ids)
    rest = {key: value for key, value in feed.items() if key in ("attention_mask",)}
    with accelerated(tiny, "random"):
        refused(lambda: tiny(inputs_embeds=embeds, **rest), "With inputs_embeds", UnsupportedError)
        # the bare model itself refuses them elsewhere
        if "inputs_embeds" in inspect.signature(tiny.prepare_inputs_for_generation).parameters:
            refused(
                lambda: tiny.generate(inputs_embeds=embeds, **rest, max_new_tokens=2),
                "With inputs_embeds",
                UnsupportedError,
            )
    # transformers places embeddings behind the last conversation of the model, of as many rows
    for part in tiny.modules():
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None
    with accelerated(tiny, "none"):
        tiny(inputs_embeds=embeds, **rest)


@families
@torch.no_grad()
def test_encoder_outputs_of_the_callers_own(family: str) -> None:
    """Pictures encoded before the call were seen by no tap: refused, whether a method needs taps or not."""
    tiny, feed = model(family), inputs(family)
    if int(transformers.__version__.split(".")[1]) < 23:
        pytest.skip("5.17 knows no mm_encoder_outputs")
    given = {key: feed.pop(key) for key in list(feed) if feed[key].shape != feed["input_ids"].shape}
    wanted = tiny.model.get_image_features
    pixels = {("pixel_values" if key == "pixel_values_images" else key): value for key, value in given.items()}
    encoded = wanted(**pixels)
    closed = adapters()[family].closed is not None
    for recipe in ("random",) if closed else ("random", "attention-received"):
        with accelerated(tiny, recipe):
            refused(
                lambda: tiny.generate(**feed, mm_encoder_outputs={"image": encoded}, max_new_tokens=2),
                "pass the pixels to the model instead of encoder outputs",
                UnsupportedError,
            )
    options = {**feed, "mm_encoder_outputs": {"image": encoded}, "max_new_tokens": 2, "do_sample": False}
    bare = tiny.generate(**options)
    with accelerated(tiny, "none"):
        assert torch.equal(tiny.generate(**options), bare)


@families
def test_placeholders_without_pixels(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    text = {key: value for key, value in feed.items() if value.shape == feed["input_ids"].shape}
    with accelerated(tiny, "random"):
        refused(lambda: generate(tiny, text), "no image was encoded in this call; pass the pixels", UnsupportedError)


@families
@pytest.mark.square("recipe", ["random", "fastv", "snapkv"])
def test_inputs_without_pictures_run_untouched(family: str, recipe: str) -> None:
    """To the bit, in ``generate`` and in a forward."""
    tiny, feed = model(family), inputs(family, "text", batch=2)
    bare = generate(tiny, feed)
    with torch.no_grad():
        plain = tiny(**feed).logits
        with accelerated(tiny, recipe_of(recipe, family)):
            reduced = generate(tiny, feed)
            assert torch.equal(logits(bare), logits(reduced)) and torch.equal(bare.sequences, reduced.sequences)
            assert torch.equal(tiny(**feed).logits, plain)
            assert tiny.mmaccel.stats()["visual_tokens"] == 0 and tiny.mmaccel.layout is None


@families
def test_a_failed_call_is_forgotten(family: str) -> None:
    """After each refusal the same model answers as if nothing had been asked."""
    tiny, feed = model(family), inputs(family)
    text = {key: value for key, value in feed.items() if value.shape == feed["input_ids"].shape}
    with accelerated(tiny, recipe_of("divprune"), processor=zoo.processor(family)):
        expected = logits(generate(tiny, feed))
        for bad in (text, {**feed, "cache_implementation": "static"}):
            with pytest.raises(MmaccelError):
                generate(tiny, bad)
            assert torch.equal(logits(generate(tiny, feed)), expected)


# -------------------------------------------------------------------------------------- methods that are wrong


class Broken(ProjectorMethod):
    """Base of the wrong methods; each is registered for one test."""

    unit: ClassVar[str] = "picture"  # type: ignore[assignment]


def _shape(tokens: TokenBatch, count: Tensor) -> Any:
    return Reduction.top(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), count[:1])


def _padding(tokens: TokenBatch, count: Tensor) -> Any:
    return Reduction(torch.ones_like(tokens.valid), tokens.valid)


def _many(tokens: TokenBatch, count: Tensor) -> Any:
    return Reduction(tokens.valid, tokens.valid)


def _nothing(tokens: TokenBatch, count: Tensor) -> Any:
    return Reduction(torch.zeros_like(tokens.valid), tokens.valid)


def _one_less(tokens: TokenBatch, count: Tensor) -> Any:
    return Reduction.top(tokens.features.sum(-1), tokens.valid, count - 1)


@pytest.mark.parametrize(
    ("wrong", "budget", "match"),
    [
        (_shape, "exact", "keeps slots that hold no token|shape"),
        (_padding, "at_most", "keeps slots that hold no token"),
        (_many, "exact", "but kept 70 of 70 tokens where 21 were resolved|but kept"),
        (_many, "at_most", "but kept"),
        (_nothing, "at_most", "but kept 0"),
        (_nothing, "adaptive", "but kept 0"),
        (_one_less, "exact", "but kept"),
    ],
)
def test_a_method_that_returns_a_wrong_reduction(
    wrong: Any, budget: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmaccel.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))

    @dataclass(frozen=True)
    class Wrong(Broken):
        """A wrong method."""

        name = "wrong"

        def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
            return wrong(tokens, count)

    Wrong.budget = budget  # type: ignore[assignment,misc]
    mmaccel.register(Wrong)
    tiny = model("llava_next")
    with accelerated(tiny, "wrong", retain=0.3):
        # two pictures of other sizes, so that there is padding
        refused(lambda: generate(tiny, inputs("llava_next", "uneven")), f"Method 'wrong'.*({match})")


@pytest.mark.parametrize("shape", ["heads", "keys", "dims"])
def test_a_policy_that_scores_wrong_shapes(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mmaccel.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))

    @mmaccel.register
    @dataclass(frozen=True)
    class WrongScores(Policy):
        """A wrong policy."""

        name = "wrong-scores"

        def score(self, keys: KeyBatch) -> Tensor:
            b, heads, width = keys.keys.shape[:3]
            return torch.zeros({"heads": (b, 1, width), "keys": (b, heads, width - 1), "dims": (b, width)}[shape])

    tiny = model("llava")
    with accelerated(tiny, "wrong-scores", retain=0.3):
        refused(lambda: generate(tiny, inputs("llava")), "Method 'wrong-scores' returned .* from score")


# ------------------------------------------------------------------------------------------------ accelerated again


def test_accelerated_again_is_replaced_cleanly() -> None:
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, "random", retain=0.5):
        expected = logits(generate(tiny, feed))
    accelerate_vlm(tiny, "divprune", retain=0.1)
    accelerate_vlm(tiny, "random", retain=0.5)
    assert gap(logits(generate(tiny, feed)), expected) == 0
    tiny.mmaccel.remove()
    assert not is_accelerated(tiny)


def test_a_reduced_cache_outlives_its_recipe() -> None:
    """After ``remove()`` the cache still answers with what was seen and holds what was kept."""
    tiny, feed, mine = model("llava"), inputs("llava"), cache()
    with accelerated(tiny, "random", retain=0.5):
        generate(tiny, feed, past_key_values=mine)
    length = feed["input_ids"].shape[1] + 3
    assert mine.get_seq_length() == length and mine.layers[0].keys.shape[2] == length - 18


# --------------------------------------------------------------------------------------------------------------- JSON

DEEP, DIGITS = "[" * 100_000, "1" * 5000


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (DEEP, "not valid JSON: nested too deeply"),
        ('{"name": ' + DIGITS + "}", "not valid JSON: a number is too long"),
        ('{"name": "x", "stages": [{"method": "divprune", "retain": ' + DIGITS[:400] + "}]}", "a number is too long"),
        (b"\xff", "no text in UTF-8"),
        (None, "must be JSON text, not NoneType"),
        (3, "must be JSON text, not int"),
        ([], "must be JSON text, not list"),
        ('{"name": "x", "positions": []}', "positions="),
        ('{"name": "x", "text_retain": {}}', "text_retain="),
        ('{"name": "x", "stages": [{"method": "divprune", "retain": [1]}]}', "is not a budget"),
        ('{"name": "x", "stages": [{"method": ["divprune"]}]}', "`method` of a stage must be a string"),
        ('{"name": "x", "stages": {}}', "`stages` of a recipe must be a list"),
        (
            '{"name": "x"}',
            "'x' has no stages and would change nothing; give at least one stage, or use the recipe 'none'",
        ),
        ('{"name": "x", "stages": [], "text_retain": 0.5}', "'x' has no stages"),
        ('{"name": "x", "tuned": {}}', "'x' has no stages"),
    ],
    ids=range(15),
)
def test_text_that_is_no_recipe(text: Any, match: str) -> None:
    refused(lambda: Recipe.from_json(text), match)


def test_mappings_that_are_no_recipe() -> None:
    refused(lambda: mmaccel.get_recipe({"name": "x", "stages": [{"method": object()}]}), "JSON has no word for")
    endless: dict[str, Any] = {"name": "x"}
    endless["stages"] = [endless]
    refused(lambda: mmaccel.get_recipe(endless), "JSON has no word for")


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["ask", "--set", f"layer={DEEP}", "a.png", "?"], "--set layer: .*nested too deeply"),
        (["ask", "--set", f"layer={DIGITS}", "a.png", "?"], "--set layer: .*a number is too long"),
        (["ask", "--recipe", "deep.json", "a.png", "?"], "nested too deeply"),
        (["video-qa", "lines", "-o", "a.jsonl", "--set", f"layer={DIGITS}"], "--set layer: .*a number is too long"),
        (
            ["eval", "--data", "lines"],
            "line 1: no JSON .nested too deeply.; lines, line 2: no JSON .a number is too long",
        ),
        (
            ["eval", "--limit", "1", "--json", "deep.json"],
            "of this command .nested too deeply.; give another file",
        ),
        (["eval", "--limit", "1", "--json", "list.json"], "holds no results of this command; give another file"),
        (["bench", "--compare", "deep.json", "deep.json"], "holds no results of mmaccel bench"),
        (["bench", "--compare", "list.json", "list.json"], "holds no results of mmaccel bench"),
        (["bench", "--compare", "rows.json", "rows.json"], "lacks what mmaccel bench writes"),
    ],
    ids=range(10),
)
def test_files_and_options_that_are_no_json(
    argv: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text(DEEP)
    Path("list.json").write_text("[]")
    Path("rows.json").write_text('{"rows": [{"workload": "a", "recipe": "b", "problem": null}]}')
    Path("lines").write_text(f'{DEEP}\n{{"question": "?", "image": "a.png", "n": {DIGITS}}}\n')
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert re.search(match, said) and said.count("\n") == 1 and len(said) < 500 and "unexpected" not in said


@pytest.mark.parametrize("count", (DIGITS, DIGITS[:400]))
def test_counts_without_end(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--recipe", "divprune", "--retain", count]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a budget must be a ratio such as 0.25" in said and len(said) < 200
