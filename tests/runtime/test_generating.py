"""Every way to generate and every cache: the answers of a replay, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import zoo
from laws import oracle
from laws.helpers import FAMILIES, SHORT, close, gap, generate, hide, inputs, logits, model, recipe_of, stored
from tail import in_turn
from torch import Tensor
from traps import OLD, families, old_beams

import mmaccel
from mmaccel import MmaccelError, Stage, UnsupportedError, accelerate_vlm, accelerated

pytestmark = pytest.mark.usefixtures("no_gradients")


# --- ways of generating -----------------------------------------------------------------------------------------------
def replayed(tiny: Any, family: str, feed: dict[str, Any], held: list[Tensor], row: Tensor, method: str) -> Tensor:
    """Bare logits of every new token of one row, with hidden what the cache does not hold: of a policy from there on only."""
    prompt, length, late = feed["input_ids"].shape[1], len(row) - 1, method == "snapkv"

    def visible(layer: int) -> Tensor:
        there = torch.ones(1, held[layer].shape[1], length, length, dtype=torch.bool)
        there[..., prompt if late else 0 :, :prompt] = held[layer][:1, :, None]
        return there

    grown = length - prompt
    whole = {**feed, "input_ids": row[None, :-1]}
    for key, fill in (("attention_mask", 1), *zoo.typed(family)):
        if key in feed:
            whole[key] = torch.nn.functional.pad(feed[key], (0, grown), value=fill)
    inside = oracle.first_layer(family, method) if method == "fastv" else 0
    kept = None if late else held[-1][:1].any(1)
    return hide(tiny, whole, visible, kept, inside)[0, prompt - 1 :]


@pytest.mark.square(("method", "family"), in_turn(["random", "fastv", "snapkv"], FAMILIES, of=SHORT), of="kinds")
def test_beams_equal_their_replay(family: str, method: str) -> None:
    """The score of every beam is that of its tokens in a full run with the dropped ones hidden."""
    if OLD and family == "internvl":
        pytest.skip(old_beams.kwargs["reason"])
    tiny, feed, new = model(family), inputs(family), 5
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        out = generate(tiny, feed, new=new, num_beams=3, num_return_sequences=3, output_scores=True)
        held = stored(out.past_key_values, feed["input_ids"].shape[1])
        again = generate(tiny, feed, new=new, num_beams=3)
    assert torch.equal(again.sequences, out.sequences[:1])
    assert len({tuple(row.tolist()) for row in out.sequences}) == 3
    for row, score in zip(out.sequences, out.sequences_scores, strict=True):
        logp = replayed(tiny, family, feed, held, row, method).log_softmax(-1)
        tokens = row[-len(logp) :, None]
        assert abs(float(logp.gather(1, tokens).sum() / new - score)) < 1e-4
    assert float(out.sequences_scores.diff().max()) <= 0


@families
@old_beams
def test_beams_of_a_padded_batch(family: str) -> None:
    """Each row's best beam is that of the row alone."""
    tiny, feed = model(family), inputs(family, "uneven")
    for method in ("test-fixed", "test-fixed-layer"):
        with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
            out = generate(tiny, feed, num_beams=3, output_scores=True)
            for row in range(2):
                alone = generate(tiny, zoo.single(family, feed, row), num_beams=3, output_scores=True)
                assert torch.equal(out.sequences[row, -4:], alone.sequences[0, -4:])
                assert gap(out.sequences_scores[row], alone.sequences_scores[0]) < 1e-4


@pytest.mark.square(("method", "family"), in_turn(["random", "fastv", "snapkv"], FAMILIES, of=SHORT), of="kinds")
def test_several_samples_of_a_prompt(family: str, method: str) -> None:
    """``num_return_sequences`` repeats the prompt; every sample is consistent with its own replay."""
    if OLD and family == "internvl":
        pytest.skip(old_beams.kwargs["reason"])
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        torch.manual_seed(3)
        out = generate(tiny, feed, do_sample=True, num_return_sequences=3)
        held = stored(out.past_key_values, feed["input_ids"].shape[1])
        assert tiny.mmaccel.reduction.kept.shape[0] == 3
    assert len({tuple(row.tolist()) for row in out.sequences}) > 1
    for number, row in enumerate(out.sequences):
        mine = [there[number : number + 1] for there in held]
        close(replayed(tiny, family, feed, mine, row, method), logits(out)[number])


@pytest.mark.parametrize("method", ["fastv", "snapkv", "test-fixed-layer", "test-fixed-cache"])
def test_prompt_lookup_inside_the_language_model_is_refused(method: str) -> None:
    """Its first call holds prompt and candidates: the last candidate would count as the end of the prompt."""
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, recipe_of(method, "llava")):
        with pytest.raises(UnsupportedError, match="candidates"):
            generate(tiny, feed, prompt_lookup_num_tokens=3)
        with pytest.raises(UnsupportedError, match="candidates"):
            generate(tiny, feed, assistant_model=tiny)


@pytest.mark.parametrize("name", ["use_mtp", "assistant_early_exit", "speculation_type"])
def test_drafts_of_the_model_itself_are_refused_by_name(name: str) -> None:
    """They read hidden states of the whole prompt, which a reduced one does not have."""
    tiny = model("llava")
    with accelerated(tiny, "divprune", retain=0.3), pytest.raises(UnsupportedError, match=f"leave out {name}"):
        generate(tiny, inputs("llava"), **{name: 2})


# the first candidates lie in the prompt for transformers, which in a bare PaliGemma sees them
LOOKED_UP = tuple(family for family in FAMILIES if not zoo.behind(family))


@pytest.mark.square(("method", "family"), in_turn(["random", "divprune"], LOOKED_UP, of=SHORT), of="kinds")
def test_prompt_lookup_gives_the_greedy_tokens(family: str, method: str) -> None:
    """Candidates are fed several at a time, some are refused, and the cache is cropped."""
    tiny, feed = model(family), inputs(family)
    # a match must not be followed by placeholders, which the model could not fill
    said = zoo.tokenizer(family)(
        "it is: a: b: c a b c: d e f ", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    for key, value in feed.items():
        if value.shape == inputs(family)["input_ids"].shape:
            more = said if key == "input_ids" else torch.full_like(said, int(key == "attention_mask"))
            feed[key] = torch.cat([more, value], dim=1)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        greedy = generate(tiny, feed, new=16)
        if not greedy.past_key_values.is_croppable:
            # what refused candidates have added to a recurrent state cannot be taken out again, and of a convolution it can
            assert tiny.mmaccel.family.stateful
            with pytest.raises((UnsupportedError, ValueError), match="assist"):
                generate(tiny, feed, new=16, prompt_lookup_num_tokens=3)
            return
        looked = generate(tiny, feed, new=16, prompt_lookup_num_tokens=3)
        (stage,) = tiny.mmaccel.stats()["stages"]
        assert stage["tokens_kept"] < 0.5 * stage["tokens_in"]
    assert torch.equal(greedy.sequences, looked.sequences)


@pytest.mark.parametrize("family", SHORT)
def test_without_a_cache_in_generate(family: str) -> None:
    """``use_cache=False`` feeds and reduces the whole prompt at every step."""
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("test-fixed")):
        close(logits(generate(tiny, feed)), logits(generate(tiny, feed, use_cache=False)))


# by choice: nothing, before the language model, inside it, in chunks, and the default
COUNTED = ("none", "divprune", "fastv", "homer", "balanced")


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in SHORT for name in COUNTED if oracle.fits(name, family)]
)
def test_a_prompt_is_counted_once(family: str, name: str) -> None:
    """However often a call reads it again, and whatever stands behind it in a forward."""
    tiny, feed = model(family), inputs(family, "images")
    with accelerated(tiny, name, processor=zoo.processor(family)):
        generate(tiny, feed, new=5)
        wanted = tiny.mmaccel.stats()
        generate(tiny, feed, new=5, use_cache=False)
        again = [tiny.mmaccel.stats()]
        if name in ("none", "divprune", "balanced"):
            generate(tiny, feed, new=5, assistant_model=zoo.model(family))
            again.append(tiny.mmaccel.stats())
    counted = ("prompt_tokens", "visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer", "stages", "notes")
    assert wanted.prompt_tokens == feed["input_ids"].numel() and wanted.decode_steps == again[0].decode_steps == 4
    for stats in again:
        assert {key: stats[key] for key in counted} == {key: wanted[key] for key in counted}


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", SHORT)
@pytest.mark.parametrize("cached", ["static", "offloaded", "offloaded_static", "quantized"])
def test_caches_that_cannot_shrink_are_refused(family: str, cached: str) -> None:
    """By name, in a generation config, in the model's own, before and after accelerating."""
    tiny, feed = zoo.model(family), inputs(family)
    config = transformers.GenerationConfig(cache_implementation=cached)
    with accelerated(tiny, "random"):
        for options in ({"cache_implementation": cached}, {"generation_config": config}):
            with pytest.raises(UnsupportedError, match="cache_implementation"):
                tiny.generate(**feed, max_new_tokens=2, **options)
        with pytest.raises(UnsupportedError, match="cache_implementation"):
            tiny.generate(feed.pop("input_ids"), config, **feed)
        tiny.generation_config.cache_implementation = cached
        with pytest.raises(UnsupportedError, match="cache_implementation"):
            tiny.generate(**inputs(family), max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="cache_implementation"):
        accelerate_vlm(tiny, "random")
    assert not hasattr(tiny, "mmaccel")
    accelerate_vlm(tiny, "none")  # nothing is reduced, so nothing is refused


def test_cache_objects_that_cannot_shrink_are_refused() -> None:
    tiny, feed = model("llava"), inputs("llava")
    given = transformers.StaticCache(config=tiny.config.text_config, max_cache_len=200)
    with accelerated(tiny, "random"), pytest.raises(UnsupportedError, match="DynamicCache"):
        tiny.generate(**feed, max_new_tokens=2, past_key_values=given)


def test_layers_below_deepstack_are_refused() -> None:
    """Tokens that layers 0 to 2 still add features to cannot go before layer 3."""
    with pytest.raises(UnsupportedError, match="DeepStack"):
        accelerate_vlm(model("qwen3_vl"), [Stage("fastv", 0.5, {"layer": 2})])
    assert not mmaccel.is_accelerated(model("qwen3_vl"))


def test_a_four_dimensional_mask_is_refused() -> None:
    tiny, feed = model("llava"), inputs("llava")
    length = feed["input_ids"].shape[1]
    feed["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with accelerated(tiny, "random"), pytest.raises(MmaccelError, match="2-D"):
        tiny(**feed)
