"""Law 18: every recipe works under autocast and in mixed precision, and answers there as well as the bare model does.

Half precision has noise of its own: the bare model's logits under autocast differ from its own in float32. What is kept, or
hidden, may move logits by twice as much.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import zoo
from test_law1_keep import KEEPERS
from test_law2_hiding import DROPPING

from mmaccel import accelerated, recipes
from mmaccel.kv.cache import cache_bytes

pytestmark = pytest.mark.usefixtures("no_gradients")

NOISE = 2.0


@dataclass(frozen=True)
class Precision:
    """The dtypes of the weights and of autocast, None where it is off; with ``raised`` norms and embeddings are float32."""

    name: str
    weights: torch.dtype
    autocast: torch.dtype | None
    raised: bool = False

    @property
    def computes(self) -> torch.dtype:
        """The dtype that attention computes in."""
        return self.autocast or self.weights

    def on(self) -> Any:
        """What calls run in."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)

    def feed(self, inputs: Any) -> dict[str, Any]:
        """Inputs with pixels in the dtype of the weights."""
        return {
            name: x.to(self.weights) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in dict(inputs).items()
        }


PRECISIONS = (
    Precision("autocast bfloat16", torch.float32, torch.bfloat16),
    Precision("autocast float16", torch.float32, torch.float16),
    Precision("bfloat16", torch.bfloat16, None),
    Precision("float16", torch.float16, None),
    Precision("bfloat16 under autocast", torch.bfloat16, torch.bfloat16),
    # as PEFT prepares models for training
    Precision("bfloat16 with float32 norms", torch.bfloat16, torch.bfloat16, raised=True),
)


@functools.cache
def model_in(family: str, precision: Precision) -> Any:
    """A tiny model in a precision, to be accelerated inside `with` blocks."""
    model = zoo.model(family).to(precision.weights)
    if precision.raised:
        for name, module in model.named_modules():
            if "norm" in type(module).__name__.lower() or name.endswith(("lm_head", "embed_tokens")):
                module.float()
    return model


def precisions(family: str) -> tuple[Precision, ...]:
    return PRECISIONS


RECIPES = [(f, name) for f in zoo.FAMILIES for name in oracle.named_recipes() if oracle.fits(name, f)]


def greedy(model: Any, feed: Any) -> Any:
    return model.generate(
        **feed,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.square(
    ("family", "name", "precision"), oracle.in_turn(RECIPES, precisions), ids=lambda x: getattr(x, "name", x)
)
def test_every_recipe_works(family, name, precision):
    """Logits are finite, keys and values stored in the dtype that attention computes in, and the bytes told are those held."""
    kind = next(kind for kind in ("video", "images", "image") if kind in zoo.kinds(family))
    feed, model = precision.feed(zoo.inputs(family, kind)), model_in(family, precision)
    with precision.on():
        try:
            wanted = greedy(model, feed)
        except RuntimeError as error:
            pytest.skip(f"the bare model fails: {error}")
        if not torch.isfinite(torch.stack(wanted.logits)).all():
            pytest.skip("float16 overflows in the bare model")
        with accelerated(model, recipes()[name], processor=zoo.processor(family)):
            got = greedy(model, feed)
            stats = model.mmaccel.stats()
    assert torch.isfinite(torch.stack(got.logits)).all()
    assert [x.dtype for x in got.logits] == [x.dtype for x in wanted.logits]
    cache = got.past_key_values
    if (state := getattr(cache, "mmaccel", None)) is not None:
        assert {x.dtype for layer in state.layers for x in layer.stored()} == {precision.computes}
        assert stats["kv_bytes"] == cache_bytes(cache)


@functools.cache
def noise(family: str, kind: str) -> float:
    """How far autocast moves the logits of the bare model."""
    feed, forced = zoo.inputs(family, kind), oracle.force(family, len(zoo.inputs(family, kind)["input_ids"]))
    bare, valid = oracle.bare(family), feed["attention_mask"].bool()
    prompt, steps = bare(**feed).logits[valid], oracle.decode(bare, feed, forced)[0]
    with PRECISIONS[0].on():
        moved = bare(**feed).logits[valid] - prompt, oracle.decode(bare, feed, forced)[0] - steps
    return max(float(x.abs().max()) for x in moved)


@pytest.mark.square(
    ("family", "name", "kind"),
    oracle.in_turn([(f, name) for f in zoo.FAMILIES for name in KEEPERS if oracle.fits(name, f)], zoo.kinds),
)
def test_keeping_everything_under_autocast(family, name, kind):
    feed, valid = zoo.inputs(family, kind), zoo.inputs(family, kind)["attention_mask"].bool()
    forced, bare, model = oracle.force(family, len(feed["input_ids"])), oracle.bare(family), oracle.subject(family)
    with PRECISIONS[0].on():
        wanted = bare(**feed).logits, oracle.decode(bare, feed, forced)[0]
        with accelerated(model, oracle.recipe(name, family, 1.0), processor=zoo.processor(family)):
            got = model(**feed).logits, oracle.decode(model, feed, forced)[0]
    oracle.close(got[0][valid], wanted[0][valid], NOISE * noise(family, kind), "prompt logits")
    oracle.close(got[1], wanted[1], NOISE * noise(family, kind), "decoded logits")


def unambiguous(family, name, kind):
    """The first of three prompts of which a forward and ``generate`` choose the same tokens, and what is recorded of it: where
    scores are nearly equal, half precision may round both apart."""
    for seed in range(3):
        feed = zoo.inputs(family, kind, seed=seed)
        forced = oracle.force(family, len(feed["input_ids"]))
        try:
            return feed, forced, oracle.record(family, feed, oracle.recipe(name, family), forced)
        except oracle.ChoseDifferently:
            continue
    raise AssertionError("forward and generate chose differently for three prompts")


@pytest.mark.square(
    ("family", "name", "kind"),
    oracle.in_turn([(f, name) for f in zoo.FAMILIES for name in DROPPING if oracle.fits(name, f)], zoo.kinds),
)
def test_dropping_is_hiding_under_autocast(family, name, kind):
    kind = kind if kind != "text" else "image"
    with PRECISIONS[0].on():
        feed, forced, got = unambiguous(family, name, kind)
        prompt, steps = oracle.replay(family, feed, forced, got.seen)
    oracle.close(got.prompt[got.kept], prompt[got.kept], NOISE * noise(family, kind), "prompt logits")
    oracle.close(got.steps, steps, NOISE * noise(family, kind), "decoded logits")


# by choice: keys dense, ragged, packed and chosen at every step
@pytest.mark.parametrize("name", ("divprune", "snapkv", "adakv", "kivi", "quest"))
@pytest.mark.parametrize("first", (True, False), ids=("autocast first", "autocast behind"))
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl"))
def test_a_conversation_may_change_its_precision(family, first, name):
    """A cache goes on in another precision: the wider one holds the keys of both turns."""
    feed, model, new = zoo.inputs(family, "image"), oracle.subject(family), oracle.force(family, 1)
    options = {"page": 16} if name == "kivi" else {}

    def turns(model: Any) -> tuple[Any, torch.Tensor]:
        with PRECISIONS[0].on() if first else nullcontext():
            out = model(**feed, use_cache=True)
        with nullcontext() if first else PRECISIONS[0].on():
            steps = [model(input_ids=token[:, None], past_key_values=out.past_key_values) for token in new.T]
        return out.past_key_values, torch.cat([step.logits for step in steps], dim=1)

    with accelerated(model, recipes()[name].override(retain=1.0, **options) if name != "kivi" else recipes()[name]):
        cache, got = turns(model)
    assert {x.dtype for layer in cache.mmaccel.layers for x in layer.stored()} == {torch.float32}
    oracle.close(got, turns(oracle.bare(family))[1], 0.5 if name == "kivi" else NOISE * noise(family, "image"))


def test_text_before_a_picture_under_autocast():
    """A cache that the bare model began holds keys in float32 and values in bfloat16; acceleration takes it over."""
    feed, model = zoo.inputs("llava", "image"), oracle.subject("llava")
    text, forced = zoo.inputs("llava", "text"), oracle.force("llava", 1)

    def both(model: Any) -> torch.Tensor:
        with PRECISIONS[0].on():
            before = model(input_ids=text["input_ids"], use_cache=True).past_key_values
            assert before.layers[0].keys.dtype == torch.float32
            whole = torch.cat([torch.ones_like(text["input_ids"]), feed["attention_mask"]], dim=1)
            out = model(**dict(feed, attention_mask=whole), past_key_values=before)
            return model(input_ids=forced[:, :1], past_key_values=out.past_key_values).logits

    wanted = both(oracle.bare("llava"))
    with accelerated(model, "snapkv", retain=1.0):
        got = both(model)
    oracle.close(got, wanted, NOISE * noise("llava", "image"))


def test_bytes_of_the_bare_cache_are_those_that_it_would_hold():
    """Under autocast the bare model stores float32 keys."""
    feed = zoo.inputs("llava", "image")
    with PRECISIONS[0].on():
        wanted = cache_bytes(greedy(oracle.bare("llava"), feed).past_key_values)
        with accelerated(oracle.subject("llava"), "snapkv") as model:
            greedy(model, feed)
            assert model.mmaccel.stats()["kv_bytes_bare"] == wanted
