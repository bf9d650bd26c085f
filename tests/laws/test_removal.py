"""Law 6: ``remove()`` leaves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
import zoo
from laws.helpers import FAMILIES, close, generate, inputs, logits, recipe_of, snapshot, text_model
from torch import Tensor

import mmaccel
from mmaccel import Stage, accelerate_vlm, accelerated, is_accelerated
from mmaccel.accelerate import vlm
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod, Tap, TokenBatch

#: one recipe for everything that can be attached: hooks on towers, layers and door, both attention functions, wrappers
EVERYTHING: dict[str, Any] = {
    "name": "everything",
    "stages": [
        {"method": "attention-received", "retain": 0.8},
        {"method": "test-features", "retain": 0.7},
        {"method": "fastv", "retain": 0.6},
        {"method": "snapkv", "retain": 0.5},
    ],
}
families = pytest.mark.square("family", FAMILIES, of="kinds")


@mmaccel.register
@dataclass(frozen=True)
class Features(ProjectorMethod):
    """Test: needs a hook on the tower."""

    name = "test-features"

    def taps(self) -> tuple[Tap, ...]:
        return (Tap("features"),)

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        norm = tokens.signals["features"].norm(dim=-1).sum(1)
        assert not norm[tokens.valid & (tokens.cells >= 0).all(-1)].isnan().all()
        return Reduction.top(norm, tokens.valid, count)


def used(family: str, seed: int = 0) -> Any:
    """A model of its own that has run once: transformers installs hooks of its own on first use."""
    tiny = zoo.model(family, seed=seed)
    with torch.no_grad():
        tiny(**inputs(family), output_hidden_states=True, output_attentions=False)
    generate(tiny, inputs(family))
    return tiny


def recipe(method: str, family: str) -> mmaccel.Recipe:
    if method == "everything":
        # the first two look into the tower
        closed = oracle.adapter(family).closed is not None
        return mmaccel.get_recipe({**EVERYTHING, "stages": EVERYTHING["stages"][2 * closed :]})
    return mmaccel.get_recipe("none") if method == "none" else recipe_of(method, family)


def of_a_site(site: str) -> list[str]:
    """The recipes of one site by name; `composed` of several."""
    names = ("none", "everything", *oracle.named_recipes())
    sites = {name: {mmaccel.get_method(stage.method).site for stage in recipe(name, "llava").stages} for name in names}
    return [name for name in names if site == ("composed" if len(sites[name]) != 1 else next(iter(sites[name])))]


@families
@pytest.mark.square("site", ["patches", "encoder", "projector", "layers", "cache", "codec", "composed"])
def test_every_recipe_comes_off_without_a_trace(family: str, site: str) -> None:
    """Hooks, attributes, classes, attention implementations, configurations, tensors, and the outputs to the bit."""
    tiny, feed = used(family), inputs(family, "uneven")
    before, bare = snapshot(tiny), generate(tiny, feed)
    kind = type(tiny)
    for method in (name for name in of_a_site(site) if name == "everything" or oracle.fits(name, family)):
        assert accelerate_vlm(tiny, recipe(method, family), processor=zoo.processor(family)) is tiny
        assert type(tiny) is kind and isinstance(tiny, kind) and is_accelerated(tiny)
        assert tiny.config.to_dict() == before["dict"]
        generate(tiny, feed, new=2)
        tiny.mmaccel.remove()
        assert not is_accelerated(tiny) and not hasattr(tiny, "mmaccel")
        after = snapshot(tiny)
        for part, value in before.items():
            assert after[part] == value, f"{method} left something in {part}"
        again = generate(tiny, feed)
        assert torch.equal(again.sequences, bare.sequences) and torch.equal(logits(again), logits(bare))
        assert type(again.past_key_values) is type(bare.past_key_values)
        assert [type(x) for x in again.past_key_values.layers] == [type(x) for x in bare.past_key_values.layers]


@pytest.mark.parametrize("attention", ["sdpa", "eager", {"text_config": "eager", "vision_config": "sdpa"}], ids=str)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm"])
def test_attention_implementations_come_back(family: str, attention: Any) -> None:
    """Also when tower and language model had different ones."""
    tiny = zoo.model(family)
    tiny.set_attn_implementation(attention)
    generate(tiny, inputs(family))
    before = snapshot(tiny)
    with accelerated(tiny, EVERYTHING):
        generate(tiny, inputs(family))
        assert tiny.mmaccel.family.text.config._attn_implementation.startswith("mmaccel_text_")
        assert tiny.mmaccel.family.towers()[0].config._attn_implementation.startswith("mmaccel_vision_")
        # what others may build models from knows nothing
        assert before["configs"] == snapshot(tiny)["configs"]
    assert snapshot(tiny) == before


@families
def test_a_failing_block_is_left_cleanly(family: str) -> None:
    """An exception in the block, in the middle of a call, or in a method leaves the bare model."""
    tiny = used(family)
    before = snapshot(tiny)
    with pytest.raises(KeyError), accelerated(tiny, recipe("everything", family)):
        raise KeyError
    assert snapshot(tiny) == before

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    bare = logits(generate(tiny, inputs(family)))
    for module in (text_model(tiny), tiny.lm_head):
        with accelerated(tiny, recipe("everything", family)):
            hook = module.register_forward_pre_hook(stop)
            for call in (lambda: generate(tiny, inputs(family)), lambda: tiny(**inputs(family))):
                with pytest.raises(KeyboardInterrupt):
                    call()
            hook.remove()
            generate(tiny, inputs(family))  # the failed calls left no scope behind
            assert tiny.mmaccel.stats()["visual_tokens"] > 0
        assert snapshot(tiny) == before
        assert torch.equal(logits(generate(tiny, inputs(family))), bare)


def test_scopes_do_not_outlive_their_call() -> None:
    """Whatever ends a call, no scope stays open and no tensor of the call stays with the handle."""
    from mmaccel.runtime.call.call import CallInputs, current

    tiny = used("llava")
    with accelerated(tiny, EVERYTHING):
        generate(tiny, inputs("llava"))
        assert current() is None
        last = tiny.mmaccel._last
        assert not last.vision.outputs and not last.states and last.text.runs is last.cache is None
        assert last.inputs == CallInputs()
        wrong = {**inputs("llava"), "pixel_values": torch.zeros(2, 3)}
        for call in (tiny.generate, tiny):
            with pytest.raises(ValueError, match="."):
                call(**wrong)
            assert current() is None
    assert current() is None


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llava_onevision", "vtc-cls"),
        ("qwen2_5_vl", "evit"),
        ("qwen2_vl", [Stage("evit", 0.5), Stage("test-features", 0.5)]),
        ("llava", "no-such-recipe"),
        ("llava", [Stage("fastv", 0.5, {"layer": 9})]),
        ("qwen3_vl", [Stage("test-features", 0.5), Stage("fastv", 0.5, {"layer": 1})]),
    ],
)
def test_a_failing_accelerate_leaves_the_model_as_it_was(family: str, recipe: Any) -> None:
    """Bare, or under the recipe it had."""
    tiny = used(family)
    before = snapshot(tiny)
    with pytest.raises(mmaccel.MmaccelError):
        accelerate_vlm(tiny, recipe)
    assert snapshot(tiny) == before
    accelerate_vlm(tiny, "divprune", retain=0.5)
    under = snapshot(tiny)
    first = logits(generate(tiny, inputs(family)))
    with pytest.raises(mmaccel.MmaccelError):
        accelerate_vlm(tiny, recipe)
    assert tiny.mmaccel.recipe.name == "divprune" and tiny.mmaccel.recipe.retain == 0.5
    assert _counts(snapshot(tiny)) == _counts(under)
    assert torch.equal(logits(generate(tiny, inputs(family))), first)
    tiny.mmaccel.remove()
    assert snapshot(tiny) == before


def _counts(state: dict[str, Any]) -> Any:
    """A snapshot without the identities of wrappers, which are made anew."""
    return {name: entry[:3] for name, entry in state["modules"].items()}, state["configs"]


@pytest.mark.parametrize("broken", ["TextHooks", "Taps", "_patch_attention", "_wrap"])
def test_a_failure_half_way_is_undone(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step of attaching fails."""
    tiny = used("llava")
    before = snapshot(tiny)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(mmaccel.Accelerator if broken.startswith("_") else vlm, broken, fail)
    with pytest.raises(RuntimeError, match="half way"):
        accelerate_vlm(tiny, EVERYTHING)
    assert snapshot(tiny) == before


def test_accelerating_twice_replaces() -> None:
    tiny, feed = used("qwen2_5_vl"), inputs("qwen2_5_vl")
    before = snapshot(tiny)
    accelerate_vlm(tiny, EVERYTHING)
    first = tiny.mmaccel
    accelerate_vlm(tiny, "divprune", retain=0.25)
    second = logits(generate(tiny, feed))
    assert tiny.mmaccel is not first and tiny.mmaccel.recipe.name == "divprune"
    assert [stage["method"] for stage in tiny.mmaccel.stats()["stages"]] == ["divprune"]
    first.remove()  # the old handle has nothing left to take off
    assert is_accelerated(tiny) and torch.equal(logits(generate(tiny, feed)), second)
    tiny.mmaccel.remove()
    assert snapshot(tiny) == before
    with accelerated(tiny, "divprune", retain=0.25):
        assert torch.equal(logits(generate(tiny, feed)), second)


def test_removing_twice_is_harmless() -> None:
    tiny = used("llava")
    before, handle = snapshot(tiny), accelerate_vlm(tiny, EVERYTHING).mmaccel
    handle.remove()
    handle.remove()
    assert snapshot(tiny) == before


def test_nested_blocks_restore_what_was_there() -> None:
    tiny, feed = used("llava"), inputs("llava")
    before = snapshot(tiny)
    with accelerated(tiny, "random", retain=0.5):
        outer = logits(generate(tiny, feed))
        with accelerated(tiny, "divprune", retain=0.2):
            assert tiny.mmaccel.recipe.name == "divprune"
            with pytest.raises(ValueError, match="inner"), accelerated(tiny, EVERYTHING):
                raise ValueError("inner")
            assert tiny.mmaccel.recipe.name == "divprune" and tiny.mmaccel.recipe.retain == 0.2
        assert tiny.mmaccel.recipe.name == "random" and tiny.mmaccel.recipe.retain == 0.5
        assert torch.equal(logits(generate(tiny, feed)), outer)
    assert snapshot(tiny) == before


def test_removed_inside_the_block() -> None:
    """The block can be left although its recipe was taken off, or another one put on."""
    tiny = used("llava")
    before = snapshot(tiny)
    with accelerated(tiny, "random", retain=0.5):
        tiny.mmaccel.remove()
    assert snapshot(tiny) == before
    with accelerated(tiny, "random", retain=0.5):
        accelerate_vlm(tiny, "divprune")
    assert snapshot(tiny) == before


@families
def test_two_models_of_one_process(family: str) -> None:
    """The other one, of the same class and with the same weights, neither changes nor is changed."""
    one, other = used(family), used(family)
    feed, before = inputs(family), snapshot(other)
    bare = logits(generate(other, feed))
    with accelerated(one, recipe("everything", family), processor=zoo.processor(family)):
        assert snapshot(other) == before
        assert not is_accelerated(other)
        reduced = logits(generate(one, feed))
        assert torch.equal(logits(generate(other, feed)), bare) and not torch.equal(reduced, bare)
        with accelerated(other, "random", retain=0.5):
            generate(other, feed)
            assert torch.equal(logits(generate(one, feed)), reduced)
        assert torch.equal(logits(generate(other, feed)), bare) and torch.equal(logits(generate(one, feed)), reduced)
    assert torch.equal(logits(generate(one, feed)), bare)


def test_a_callers_own_wrapper_comes_back() -> None:
    """An instance attribute that shadowed ``generate`` before is there again afterwards."""
    tiny = used("llava")
    original, calls = tiny.generate, []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    tiny.generate = mine
    with accelerated(tiny, "random"):
        generate(tiny, inputs("llava"))
    assert tiny.generate is mine and len(calls) == 1


def test_nothing_is_patched_on_a_class() -> None:
    """The classes of model, inner model and text model have the functions they were born with."""
    tiny = used("qwen2_5_vl")
    classes = {type(module) for module in tiny.modules()}
    before = {cls: dict(vars(cls)) for cls in classes}
    with accelerated(tiny, EVERYTHING):
        generate(tiny, inputs("qwen2_5_vl"))
        assert {cls: dict(vars(cls)) for cls in classes} == before


def test_a_saved_model_knows_nothing(tmp_path: Any) -> None:
    """``save_pretrained`` under acceleration writes an ordinary model."""
    tiny = used("llava")
    feed, bare = inputs("llava"), None
    bare = logits(generate(tiny, feed))
    with accelerated(tiny, EVERYTHING):
        tiny.save_pretrained(tmp_path)
    assert "mmaccel" not in (tmp_path / "config.json").read_text()
    again = type(tiny).from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    again.generation_config = tiny.generation_config
    close(logits(generate(again, feed)), bare)
