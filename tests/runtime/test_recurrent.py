"""Models of which some layers keep a recurrent state: what never was there, padding, second turns, rows, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import close, follow, generate, inputs, logits, model, recipe_of
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.families import families as adapters
from mmaccel.families import family_of
from mmaccel.kv.cache import adopt, bare_bytes, cache_bytes
from mmaccel.kv.recurrent import RecurrentLayer, states_of

#: those of whose layers some have no attention
NETS = tuple(name for name in zoo.FAMILIES if adapters()[name].stateful)
LINEAR, FULL = "linear_attention", "full_attention"
#: as the published models of Qwen have them: three of four
REAL = [LINEAR, LINEAR, LINEAR, FULL, LINEAR]
pytestmark = [pytest.mark.usefixtures("no_gradients")]
families = pytest.mark.square("family", NETS)


def layered(family: str, kinds: list[str]) -> Any:
    """The family's model with layers of these kinds, as its configuration calls them."""
    (state,) = adapters()[family].carrying
    return zoo.model(family, num_hidden_layers=len(kinds), layer_types=[state if x == LINEAR else x for x in kinds])


def states_in(layer: Any) -> Tensor:
    """What a layer has carried this far, ``[B, ...]``."""
    return next(x for x in (layer.recurrent_states[0], layer.conv_states[0]) if x is not None)


def short(tiny: Any, feed: Any, kept: Tensor) -> Tensor:
    """Logits of the bare model for a prompt that never had the tokens that are not ``kept [1, S]``, at the same positions."""
    door = oracle.at_the_door(tiny, feed)
    at = kept[0].nonzero()[:, 0]
    places = torch.arange(kept.shape[1])[None] if door["position_ids"] is None else door["position_ids"]
    door = {**door, "inputs_embeds": door["inputs_embeds"][:, at], "position_ids": places[..., at]}
    return tiny.lm_head(tiny.model.language_model(**{**door, "attention_mask": None}).last_hidden_state)


@families
@pytest.mark.square("name", ["random", "divprune"])
@pytest.mark.square("kinds", [[LINEAR, FULL] * 2, REAL])
def test_what_is_dropped_has_never_been_there(family: str, name: str, kinds: list[str]) -> None:
    tiny, feed = layered(family, kinds), inputs(family)
    with accelerated(tiny, recipe_of(name, family), processor=zoo.processor(family)):
        got, kept = tiny(**feed).logits, tiny.mmaccel.reduction.kept
    close(got[kept][None], short(tiny, feed, kept))
    oracle.apart(got[:, -1:], tiny(**feed).logits[:, -1:])


# by choice: a convolution over three tokens has forgotten the picture behind the words after it
@pytest.mark.parametrize("family", NETS[:2])
def test_states_are_those_of_what_is_left(family: str) -> None:
    """Behind the layer at which tokens are dropped; below it they are those of all tokens."""
    tiny, feed = layered(family, [LINEAR, FULL, LINEAR, LINEAR]), inputs(family)
    bare = tiny(**feed).past_key_values
    with accelerated(tiny, Recipe("inside", (Stage("fastv", 0.3, {"layer": 2}),))):
        cache = tiny(**feed, use_cache=True).past_key_values
    full, left = ([states_in(x) for x in one.layers if not hasattr(x, "keys")] for one in (bare, cache))
    assert torch.allclose(full[0], left[0], atol=1e-5)
    assert all(float((one - other).abs().max()) > 1e-2 for one, other in zip(full[1:], left[1:], strict=True))


@families
# by choice: before the language model, inside it, in the cache
@pytest.mark.square("name", ["none", "random", "fastv", "snapkv"])
def test_rows_may_go_on_with_different_numbers_of_tokens(family: str, name: str) -> None:
    """Padding in front, and behind what the cache holds: every row is the row alone."""
    tiny, feed = model(family), inputs(family, "uneven")
    words = dict(zoo.encode(family, [([], [], "and what else can be seen there?"), ([], [], "why?")]))
    tokens = oracle.force(family, 2, 4)
    made = Recipe("all", (Stage("random", 1.0),)) if name == "none" else recipe_of(name, family)

    def talk(one: Any, more: Any, forced: Tensor) -> Tensor:
        _, cache = oracle.decode(tiny, one, forced)
        both = {
            key: torch.cat([one[key], fill, more[key]], dim=1)
            for key, fill in (
                ("input_ids", forced),
                ("attention_mask", torch.ones_like(forced)),
                ("mm_token_type_ids", torch.zeros_like(forced)),
            )
            if key in one
        }
        return oracle.decode(tiny, both, forced, past_key_values=cache)[0]

    with accelerated(tiny, made, processor=zoo.processor(family)):
        together = talk(feed, words, tokens)
        for row in range(2):
            alone = talk(zoo.single(family, feed, row), zoo.single(family, words, row), tokens[row : row + 1])
            oracle.close(together[row], alone[0], 4 * oracle.TOLERANCE)


@families
def test_a_picture_behind_a_picture(family: str) -> None:
    """A second turn on the same cache is what one call on the whole conversation gives."""
    tiny, feed, second = model(family), inputs(family), inputs(family, seed=3)
    with accelerated(tiny, recipe_of("test-fixed"), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, whole = follow(feed, first, second)
        turned = generate(tiny, kept, past_key_values=first.past_key_values)
        close(logits(turned), logits(generate(tiny, whole)), 4 * oracle.TOLERANCE)


@families
def test_a_bare_turn_is_taken_over(family: str) -> None:
    """States of a text turn before the first picture stay what they were."""
    tiny, words = model(family), inputs(family, "text")
    cache = tiny(**words, use_cache=True).past_key_values
    held = [copy.deepcopy(x) for x in cache.layers if not hasattr(x, "keys")]
    state = adopt(cache, 4, None, [number for number, x in enumerate(cache.layers) if not hasattr(x, "keys")])
    assert all(isinstance(x, RecurrentLayer) and x.begun for x in state.recurrent)
    for mine, old in zip(state.recurrent, held, strict=True):
        assert all(map(torch.equal, states_of(mine), states_of(old))) and states_of(mine)


@families
def test_a_snapshot_and_a_reset(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    token = feed["input_ids"][:, -1:]
    with accelerated(tiny, recipe_of("random")):
        cache = tiny(**feed, use_cache=True).past_key_values
        restore = cache.mmaccel.snapshot()
        steps = []
        for _ in range(3):
            steps.append(tiny(input_ids=token, past_key_values=cache).logits)
            restore()
        assert torch.equal(steps[0], steps[1]) and torch.equal(steps[0], steps[2])
        cache.reset()
        assert not any(layer.begun or list(layer.tensors()) for layer in cache.mmaccel.recurrent)
        two = inputs(family, "uneven")
        assert torch.equal(tiny(**two, past_key_values=cache).logits[:, -1], tiny(**two).logits[:, -1])


@families
def test_bytes_of_states_are_counted(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    bare = tiny(**feed, use_cache=True).past_key_values
    with accelerated(tiny, recipe_of("random", retain=1.0)):
        cache = tiny(**feed, use_cache=True).past_key_values
    assert bare_bytes(cache, tiny.config.get_text_config()) == cache_bytes(bare)
    states = sum(x.nbytes for layer in cache.mmaccel.recurrent for x in layer.tensors())
    assert cache_bytes(bare) > states > 0


@families
def test_what_works_where_attention_is_says_so(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("snapkv", family)):
        generate(tiny, feed)
        (note,) = (note for note in tiny.mmaccel.stats()["notes"] if "have attention" in note)
    assert note.startswith("snapkv: at work in the 2 of 4 layers that have attention")


def test_defaults_are_moved_next_to_attention() -> None:
    tiny = zoo.model("qwen3_5", num_hidden_layers=5, layer_types=REAL)
    for name, layer in (("fastv", 4), ("pyramiddrop-step", 3)):
        with accelerated(tiny, name):
            assert list(tiny.mmaccel.plan.stage_at_layer) == [layer]
            assert any(f"works at layer {layer}" in note for note in tiny.mmaccel.plan.notes)
    with accelerated(tiny, "gemfilter"):
        assert tiny.mmaccel.plan.stages[0].method.layer == 3


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            Recipe("one", (Stage("fastv", 0.5, {"layer": 2}),)),
            "before layers 4, next to those with attention, .* give layer=4",
        ),
        (Recipe("one", (Stage("pyramiddrop-step", 0.5, {"layer": 4}),)), "give layer=3"),
        ("framefusion", "looks at the attention of every layer, and most layers of qwen3_5 have none"),
        ("expected-attention", "RoPE of qwen3_5 turns pairs, leaves layers or channels out"),
    ],
)
def test_refused(what: Any, said: str) -> None:
    tiny = zoo.model("qwen3_5", num_hidden_layers=5, layer_types=REAL)
    with pytest.raises(UnsupportedError, match=said):
        accelerate_vlm(tiny, what)
    assert not hasattr(tiny, "mmaccel")


def test_no_layer_to_look_at() -> None:
    tiny = zoo.model("qwen3_5", layer_types=[LINEAR, LINEAR, LINEAR, FULL])
    with pytest.raises(UnsupportedError, match="no layer that it could look at in this qwen3_5 model has one"):
        accelerate_vlm(tiny, "fastv")
    with accelerated(tiny, "random"):
        generate(tiny, inputs("qwen3_5"))


@families
def test_last_tokens_cannot_be_forgotten(family: str) -> None:
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("random")):
        cache = generate(tiny, feed).past_key_values
        with pytest.raises(MmaccelError, match="cannot forget their last tokens"):
            cache.crop(-1)


@families
def test_removed_nets_run_as_they_did(family: str) -> None:
    tiny = model(family)
    nets = [family_of(tiny).net_in(layer) for layer in family_of(tiny).recurrent]
    with accelerated(tiny, recipe_of("random")):
        assert all("forward" in vars(net) for net in nets)
    assert not any("forward" in vars(net) for net in nets)
