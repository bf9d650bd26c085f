"""A step writes behind what is stored, and never over what anybody else still sees."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import zoo
from laws.helpers import generate, inputs, model, recipe_of, text_model
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from mmaccel import accelerated, get_recipe
from mmaccel.kv import layer as cache_layer
from mmaccel.kv.growable import LEAST, SHARE, append, put, room_of, shown, trimmed

SHAPE = (2, 3, 5, 4)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def new(tokens: int = 1) -> Tensor:
    return torch.randn(*SHAPE[:2], tokens, SHAPE[3])


def stored() -> Tensor:
    return append(torch.randn(SHAPE), new(), -2)


@pytest.mark.parametrize("dim", [1, -2, -1])
def test_it_is_a_concatenation(dim: int) -> None:
    grown = expected = torch.randn(SHAPE)
    for tokens in (1, 3, 1, LEAST, 2):
        shape = list(SHAPE)
        shape[dim] = tokens
        more = torch.randn(shape)
        grown, expected = append(grown, more, dim, expected_new_tokens=4), torch.cat([expected, more], dim)
        assert torch.equal(grown, expected)


def test_nothing_is_copied_while_there_is_room() -> None:
    grown, places = torch.randn(SHAPE), set()
    for _ in range(2 * (LEAST + 1)):
        grown = append(grown, new(), -2)
        places.add(grown.data_ptr())
    assert len(places) == 2


def test_what_is_put_into_a_room_stays_there_while_that_is_wide_enough() -> None:
    """Nothing but zeros is behind it."""
    first = torch.randn(SHAPE)
    room = put(first, -2, 9)
    room[:, :, 5:] = torch.nan
    again = put(shown(room, -2, 6), -2, 9)
    assert again.data_ptr() == room.data_ptr() and torch.equal(again[:, :, :5], first)
    assert torch.isnan(again[:, :, 5]).all() and not again[:, :, 6:].any()
    wider = put(shown(again, -2, 5), -2, 12)
    assert wider.data_ptr() != room.data_ptr() and torch.equal(wider[:, :, :5], first) and not wider[:, :, 5:].any()
    assert put(again[:, :, :5], -2, 9).data_ptr() != room.data_ptr()


def test_room_is_a_small_share_and_no_more_than_what_is_to_come() -> None:
    many = torch.zeros(1, 1, SHARE * LEAST * 4, 1)
    for coming, expected in ((None, 4 * LEAST), (10_000, 4 * LEAST), (3, 3), (0, 0)):
        grown = append(many, many[:, :, :1], -2, coming)
        assert grown.untyped_storage().nbytes() == 4 * (grown.shape[2] + expected)


def test_room_has_one_owner() -> None:
    first = stored()
    before = first.clone()
    one, other = new(), new()
    here, there = append(first, one, -2), append(first, other, -2)
    assert torch.equal(first, before)
    assert torch.equal(here, torch.cat([before, one], 2)) and torch.equal(there, torch.cat([before, other], 2))
    # a part of what is stored has no room of its own
    shorter = here[:, :, :4]
    append(shorter, other, -2)
    assert torch.equal(here, torch.cat([before, one], 2))


def test_a_deep_copy_has_room_of_its_own() -> None:
    first = stored()
    twin = copy.deepcopy(first)
    one, other = new(), new()
    here, there = append(first, one, -2), append(twin, other, -2)
    assert twin.data_ptr() == there.data_ptr() != here.data_ptr()
    assert torch.equal(here[:, :, -1:], one) and torch.equal(there[:, :, -1:], other)


def test_what_was_stored_in_inference_mode_is_copied_outside() -> None:
    with torch.inference_mode():
        first = stored()
    assert torch.equal(append(first, one := new(), -2), torch.cat([first, one], 2))


def test_gradients_flow_to_everything() -> None:
    with torch.enable_grad():
        first, one = new().requires_grad_(), new().requires_grad_()
        grown = append(append(first, one, -2), new(), -2)
        grown.square().sum().backward()
    assert torch.equal(first.grad, 2 * first) and torch.equal(one.grad, 2 * one)


@pytest.mark.parametrize("shape", [(1, 3, 1, 4), (2, 1, 1, 4), (2, 3, 1, 1)])
def test_other_rows_are_an_error_and_not_repeated(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        append(stored(), torch.randn(shape), -2)


def test_what_is_trimmed_is_the_same_and_no_larger() -> None:
    first = stored()
    held = trimmed(first)
    assert torch.equal(held, first) and held.untyped_storage().nbytes() == 4 * held.numel()
    assert trimmed(held) is held


# ------------------------------------------------------------------------------------------------------- in a cache


def addresses(recipe: str, steps: int) -> list[dict[str, int]]:
    """Where a cache has its tensors at every step of ``generate``."""
    tiny, feed, found = model("llava"), inputs("llava"), []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layers = output.past_key_values.layers
        found.append(
            {
                f"{n}.{name}": getattr(layer, name).data_ptr()
                for n, layer in enumerate(layers)
                for name in ("keys", "values")
            }
            | {f"{n}.index": layer.index.index.data_ptr() for n, layer in enumerate(layers)}
        )

    with accelerated(tiny, recipe_of(recipe), processor=zoo.processor("llava")):
        hook = text_model(tiny).register_forward_hook(note, with_kwargs=True)
        generate(tiny, feed, new=steps + 1, min_new_tokens=steps + 1)
        hook.remove()
    assert len(found) == steps + 1
    return found[1:]


# by choice: layers alike, layers of two lengths, heads alike, and heads of several lengths
@pytest.mark.parametrize("recipe", ["divprune", "fastv", "snapkv", "adakv"])
def test_steps_move_nothing_until_the_room_is_full(recipe: str) -> None:
    """Keys, values and index of uniform and of ragged layers stay where they are."""
    assert len({tuple(step.items()) for step in addresses(recipe, LEAST)}) == 1


@pytest.mark.parametrize(("made", "allowed"), [(1, 1), (2, 2), (9, 9), (1, 64), (3, 64)])
def test_room_is_made_for_what_is_to_come_and_given_back(made: int, allowed: int) -> None:
    """``generate`` leaves none behind, whether it made as many tokens as it might have or fewer."""
    tiny, feed = model("llava"), inputs("llava")
    end = StoppingCriteriaList([MaxLengthCriteria(feed["input_ids"].shape[1] + made)])
    with accelerated(tiny, "divprune"):
        kept = generate(tiny, feed, new=allowed, min_new_tokens=made, stopping_criteria=end).past_key_values
    assert kept.get_seq_length() == feed["input_ids"].shape[1] + made - 1
    for layer in kept.layers:
        for x in (layer.keys, layer.values, layer.index.index):
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def chunked(recipe: str, kind: str, chunk: int, offload: str | None, monkeypatch: pytest.MonkeyPatch) -> Chunked:
    """The copies that a prompt in chunks makes of what is stored."""
    tiny, found = model("llava"), Chunked()

    def counted(stored: Tensor, new: Tensor, dim: int, *given: Any) -> Tensor:
        before, grown = stored.untyped_storage().data_ptr(), append(stored, new, dim, *given)
        moved = grown.untyped_storage().data_ptr() != before
        found.copied += stored.nbytes if moved else 0
        found.widest = max(found.widest, room_of(grown).shape[dim])
        return grown

    monkeypatch.setattr(cache_layer, "append", counted)
    chosen = get_recipe("none") if recipe == "none" else recipe_of(recipe)
    with accelerated(tiny, chosen, chunk=chunk, offload=offload):
        layers = tiny(**inputs("llava", kind), use_cache=True).past_key_values.layers
        found.figures = tiny.mmaccel.stats()
    found.stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    found.width = layers[0].keys.shape[2]
    return found


@dataclasses.dataclass
class Chunked:
    """copied : bytes of stored keys and values. stored : what the cache holds in the end. width, widest : its slots, and those
    that there was room for at any time."""

    copied: int = 0
    stored: int = 0
    width: int = 0
    widest: int = 0
    figures: Any = None


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("kind", ["images", "uneven"])
# by choice: all keys, fewer, packed when the prompt ends, and read in part
@pytest.mark.parametrize("recipe", ["none", "divprune", "kivi", "quest"])
def test_a_prompt_in_chunks_has_its_room_at_once(recipe: str, kind: str, offload: Any, monkeypatch: Any) -> None:
    """No chunk copies the keys of those before it, and the room is no larger than that of the whole prompt."""
    whole, pieces = (chunked(recipe, kind, chunk, offload, monkeypatch) for chunk in (10**6, 7))
    assert pieces.figures["notes"] and pieces.stored == whole.stored > 0
    assert pieces.copied == whole.copied == 0
    if not offload:
        assert pieces.widest == whole.widest
    else:
        assert pieces.widest <= pieces.width + LEAST
        # what a chunk adds is written once; what is fetched are keys, and no empty room
        assert pieces.figures.offload["written"] == whole.figures.offload["written"] == pieces.stored
        chunks = -(-pieces.width // 7)
        assert pieces.figures.offload["fetched"] <= pieces.stored * (chunks + 1) / 2


@pytest.mark.parametrize("offload", [None, "host"])
def test_a_policy_that_evicts_between_chunks_has_no_room_for_all(offload: Any, monkeypatch: Any) -> None:
    whole, pieces = (chunked("snapkv", "images", chunk, offload, monkeypatch) for chunk in (10**6, 7))
    assert pieces.copied > 0 and pieces.widest <= pieces.width + 7 + LEAST < whole.widest


@pytest.mark.parametrize("recipe", ["divprune", "adakv"])
def test_what_was_remembered_is_what_comes_back(recipe: str) -> None:
    """Of two ways on from one cache neither sees the other's tokens."""
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, recipe_of(recipe)):
        cache = tiny(**feed, use_cache=True).past_key_values
        token = feed["input_ids"][:, -1:]

        def on(*ids: int, crop: int = 0) -> list[Tensor]:
            back = cache.mmaccel.snapshot()
            if crop:
                cache.crop(-crop)
            found = [tiny(input_ids=token.new_tensor([[i]]), past_key_values=cache).logits for i in ids]
            back()
            return found

        tiny(input_ids=token, past_key_values=cache)
        first, second = on(6, 7), on(8, 9, 10)
        on(11, 12, crop=1)
        again = on(6, 7), on(8, 9, 10)
    assert all(torch.equal(a, b) for a, b in zip([*first, *second], [*again[0], *again[1]], strict=True))
