"""What a user does: pipelines, streams, wrappers, labels, statistics, recipes as data, methods of one's own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import threading
from dataclasses import dataclass
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws import oracle
from laws.helpers import FAMILIES, SHORT, cache, close, gap, generate, inputs, logits, model, recipe_of
from tail import few
from torch import Tensor, nn

import mmaccel
from mmaccel import (
    FastV,
    Method,
    MmaccelError,
    Recipe,
    Stage,
    accelerate_vlm,
    accelerated,
    get_recipe,
    is_accelerated,
    recipes,
    register,
)
from mmaccel.core.reduction import Reduction
from mmaccel.media.draw import overlay
from mmaccel.method import ProjectorMethod, TokenBatch, registry

families = pytest.mark.square("family", FAMILIES, of="kinds")


# ------------------------------------------------------------------------------------------- pipelines, streams, wrappers


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm"])
def test_pipeline(family: str) -> None:
    """``pipeline("image-text-to-text")`` with the accelerated model says what ``generate`` says."""
    tiny, processor = model(family), zoo.processor(family)
    picture = zoo.image(*zoo._TABLE[family].sizes[0], 3)
    chat = zoo.messages([picture], [], zoo.QUESTION)
    with accelerated(tiny, recipe_of("divprune"), processor=processor):
        pipe = transformers.pipeline("image-text-to-text", model=tiny, processor=processor)
        said = pipe(text=chat, max_new_tokens=6, do_sample=False, return_full_text=False)
        stats = tiny.mmaccel.stats()
        feed = dict(zoo.encode(family, [([picture], [], zoo.QUESTION)]))
        ids = generate(tiny, feed, new=6).sequences[:, feed["input_ids"].shape[1] :]
    assert stats["visual_tokens"] > stats["visual_tokens_kept"] > 0
    assert said[0]["generated_text"] == processor.decode(ids[0], skip_special_tokens=True)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "smolvlm"])
def test_streaming_from_a_thread(family: str) -> None:
    """``TextIteratorStreamer`` gets token after token while ``generate`` runs in another thread."""
    tiny, words = model(family), zoo.tokenizer(family)
    feed = inputs(family)
    with accelerated(tiny, recipe_of("fastv"), processor=zoo.processor(family)):
        streamer = transformers.TextIteratorStreamer(words, skip_prompt=True, skip_special_tokens=True)
        options = {**feed, "max_new_tokens": 6, "do_sample": False, "streamer": streamer}
        thread = threading.Thread(target=tiny.generate, kwargs=options)
        thread.start()
        heard = "".join(streamer)
        thread.join()
        ids = generate(tiny, feed, new=6).sequences[0, feed["input_ids"].shape[1] :]
    assert heard == words.decode(ids, skip_special_tokens=True)


class Wrapper(nn.Module):
    """As PEFT does it: a module around the model that hands everything on."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_model = base

    def get_base_model(self) -> Any:
        return self.base_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


@pytest.mark.parametrize("family", SHORT)
def test_a_wrapped_model(family: str) -> None:
    """Accelerating a wrapper accelerates what is inside, and the wrapper comes back."""
    tiny, feed = model(family), inputs(family)
    outer = Wrapper(tiny)
    with accelerated(tiny, recipe_of("divprune")):
        expected = logits(generate(tiny, feed))
    assert accelerate_vlm(outer, "divprune", retain=0.3) is outer
    assert is_accelerated(outer) and is_accelerated(tiny)
    assert torch.equal(logits(generate(outer, feed)), expected)
    outer.mmaccel.remove()
    with accelerated(outer, "divprune", retain=0.3) as same:
        assert same is outer and torch.equal(logits(generate(outer, feed)), expected)
    assert not is_accelerated(tiny)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_peft(family: str, order: str) -> None:
    """LoRA layers put in before or after accelerating."""
    peft = pytest.importorskip("peft")
    tiny, feed = zoo.model(family), inputs(family)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=True)
    if order == "after":
        accelerate_vlm(tiny, "divprune", retain=0.3)
    outer = peft.get_peft_model(tiny, config).eval()
    if order == "before":
        accelerate_vlm(outer, "divprune", retain=0.3)
    base = outer.get_base_model()
    with accelerated(model(family), "divprune", retain=0.3) as plain:
        expected = logits(generate(plain, feed))
    close(logits(generate(outer, feed)), expected)
    assert base.mmaccel.stats()["visual_tokens_kept"] < base.mmaccel.stats()["visual_tokens"]
    base.mmaccel.remove()
    assert not is_accelerated(base)


@pytest.mark.parametrize("family", SHORT)
def test_bfloat16(family: str) -> None:
    """A model in another dtype answers in it."""
    tiny = zoo.model(family).to(torch.bfloat16)
    feed = inputs(family, "uneven")
    pixels = {key: value.to(torch.bfloat16) for key, value in feed.items() if value.is_floating_point()}
    with accelerated(tiny, [Stage("divprune", 0.5), Stage("snapkv", 0.3)]):
        out = generate(tiny, {**feed, **pixels})
        assert tiny.mmaccel.stats()["kv_bytes"] > 0
    assert out.past_key_values.layers[0].stored()[0].dtype == torch.bfloat16
    assert not logits(out).isnan().any()


# ---------------------------------------------------------------------------------------------- full-length outputs


#: one of every site, and one that merges
QUICK = ("random", "fastv", "snapkv", "pool")


@pytest.mark.square(
    ("family", "method"),
    few(
        [(family, name) for family in FAMILIES for name in oracle.named_recipes() if oracle.fits(name, family)],
        list(product(SHORT, QUICK)),
    ),
)
def test_labels(family: str, method: str) -> None:
    """The loss is finite, over the labels that can be predicted; the others are counted."""
    tiny, feed = model(family), inputs(family, "uneven")
    labels = feed["input_ids"].masked_fill(feed["attention_mask"] == 0, -100)
    given = labels.clone()
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)), torch.no_grad():
        out = tiny(**feed, labels=labels)
        stats, kept = tiny.mmaccel.stats(), tiny.mmaccel.reduction.kept
    assert torch.equal(labels, given)  # the caller's own are as they were
    assert out.logits.shape[:2] == labels.shape
    dropped = (feed["attention_mask"].bool()) & ~kept
    assert torch.equal(out.logits.isnan().all(-1), dropped) and torch.equal(out.logits.isnan().any(-1), dropped)
    lost = dropped[:, :-1] & (labels[:, 1:] != -100)
    assert stats["labels_ignored"] == int(lost.sum())
    # whether patches are left out is for their pixels to say
    assert oracle.has_site(method, "patches") or (int(lost.sum()) > 0) == oracle.shortens(method)
    target = labels[:, 1:].masked_fill(lost, -100)
    expected = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), target.flatten(), ignore_index=-100)
    assert torch.isfinite(out.loss) and gap(out.loss, expected) < 1e-5


@families
def test_logits_to_keep_and_tuples(family: str) -> None:
    """The last rows alone are the last rows of all; tuples hold what the named outputs hold."""
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("random")), torch.no_grad():
        full = tiny(**feed).logits
        assert full.shape[1] == feed["input_ids"].shape[1]
        # those without the argument pass over it
        last = full[:, -3:] if "logits_to_keep" in inspect.signature(tiny.forward).parameters else full
        close(tiny(**feed, logits_to_keep=3).logits.nan_to_num(), last.nan_to_num())
        assert torch.equal(tiny(**feed, return_dict=False)[0].nan_to_num(), full.nan_to_num())
        short = tiny(**feed, output_hidden_states=True).hidden_states
        kept = int(tiny.mmaccel.reduction.kept.sum())
    assert [state.shape[1] for state in short] == [kept] * 5


# --------------------------------------------------------------------------------------------------------- statistics


@families
def test_stats(family: str) -> None:
    """The figures of the last call, as plain numbers that JSON can hold."""
    tiny, feed = model(family), inputs(family, "uneven")
    visual = int(zoo.visual_mask(family, tiny, feed["input_ids"]).sum())
    layer = oracle.first_layer(family)
    stages = [Stage("random", 0.5), Stage("fastv", 0.25, {"layer": layer}), Stage("snapkv", 0.1)]
    with accelerated(tiny, stages, processor=zoo.processor(family)):
        assert tiny.mmaccel.stats() == {} and tiny.mmaccel.layout is None and tiny.mmaccel.reduction is None
        out = generate(tiny, feed)
        stats = tiny.mmaccel.stats()
        names = [stage["method"] for stage in stats["stages"]]
        sites = [stage["site"] for stage in stats["stages"]]
        generate(tiny, inputs(family, "text"))
        other = tiny.mmaccel.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert names == ["random", "fastv", "snapkv"] and sites == ["projector", "layers", "cache"]
    assert stats["recipe"] == "random+fastv+snapkv"
    assert stats["prompt_tokens"] == feed["input_ids"].numel() and stats["visual_tokens"] == visual
    first, second, third = stats["stages"]
    assert first["tokens_in"] == visual and first["tokens_kept"] == first["resolved"] == second["tokens_in"]
    assert second["tokens_kept"] == second["resolved"] == stats["visual_tokens_kept"]
    assert abs(second["tokens_kept"] / visual - 0.25) < 0.05 and abs(third["tokens_kept"] / visual - 0.1) < 0.05
    per_layer = (layer * first["tokens_kept"] + (4 - layer) * second["tokens_kept"]) / 4
    assert abs(stats["visual_tokens_per_layer"] - per_layer) < 1e-9
    assert stats["kv_bytes"] > 0 and stats["labels_ignored"] == 0 and stats["decode_steps"] == 3
    assert {"encoder", "selection", "prefill", "decode"} <= set(stats["seconds"])
    assert all(second >= 0 for second in stats["seconds"].values())
    assert out.past_key_values.get_seq_length() == feed["input_ids"].shape[1] + 3
    assert other["visual_tokens"] == 0 and other["stages"] == [] and other["prompt_tokens"] > 0


def test_stats_of_none() -> None:
    """The recipe that does nothing still counts and times."""
    tiny = model("llava")
    with accelerated(tiny, "none"):
        generate(tiny, inputs("llava"))
        stats = tiny.mmaccel.stats()
    assert stats["recipe"] == "none" and stats["visual_tokens"] == stats["visual_tokens_kept"] == 36
    assert stats["stages"] == [] and stats["kv_bytes"] > 0 and stats["seconds"]["prefill"] > 0


def test_a_streamer_gets_the_figures_of_its_own_call() -> None:
    tiny, feed = model("llava"), inputs("llava")
    found: list[Any] = []

    class Watch:
        def put(self, value: Any) -> None:
            kept = handle.reduction and int((handle.reduction.kept & handle.layout.visual).sum())
            found.append((handle.stats(), kept))

        def end(self) -> None:
            pass

    with accelerated(tiny, "divprune", retain=9):
        handle = tiny.mmaccel
        generate(tiny, inputs("llava", "text"))
        generate(tiny, feed, streamer=Watch())
        last = handle.stats()
    (before, none), *steps = found
    assert none is None and before["kv_bytes"] == before["prompt_tokens"] == 0
    assert [kept for _, kept in steps] == [9] * len(steps)
    assert [one["decode_steps"] for one, _ in steps] == list(range(len(steps)))
    bare = [one["kv_bytes_bare"] for one, _ in steps]
    assert bare[0] < bare[1] < bare[-1] == last["kv_bytes_bare"]
    assert all(one["kv_bytes"] >= last["kv_bytes"] // 2 for one, _ in steps)


def test_the_handle_shows_what_it_did() -> None:
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, "divprune", retain=9):
        generate(tiny, feed)
        handle = tiny.mmaccel
        assert repr(handle) == "<mmaccel on llava: divprune 9 a picture>"
        kept = handle.reduction.kept & handle.layout.visual
        assert int(kept.sum()) == 9
        (segment,) = handle.layout.segments
        cells = handle.reduction.kept[0, segment.places]
        picture = overlay(zoo.image(60, 48, 0), (6, 6), Reduction(cells[None], torch.ones_like(cells)[None]).owner()[0])
        assert picture.size == (60, 48)


# ------------------------------------------------------------------------------------------------------ text-only rows


@families
@pytest.mark.square("method", ["random", "fastv", "snapkv"])
def test_text_rows_beside_picture_rows(family: str, method: str) -> None:
    """A row without a picture says what it says in the bare model; the other is reduced."""
    tiny, feed = model(family), inputs(family, "textrow")
    bare = generate(tiny, feed)
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        reduced = generate(tiny, feed)
        stats = tiny.mmaccel.stats()
    close(logits(reduced)[1], logits(bare)[1])
    assert gap(logits(reduced)[0], logits(bare)[0]) > 1e-3
    assert stats["stages"][-1]["tokens_kept"] < stats["visual_tokens"]


@families
def test_a_loop_with_use_cache_left_out(family: str) -> None:
    """The model makes a cache of its own when none is given, and it is one that can go on."""
    tiny, feed = model(family), inputs(family)
    with accelerated(tiny, recipe_of("test-fixed")), torch.no_grad():
        first = tiny(**feed)
        token = first.logits[:, -1:].argmax(-1)
        second = tiny(input_ids=token, past_key_values=first.past_key_values)
        expected = generate(tiny, feed, new=2)
    close(torch.cat([first.logits[:, -1:], second.logits], dim=1), logits(expected))
    assert type(first.past_key_values) is type(cache())


# ------------------------------------------------------------------------------------------------- methods of one's own


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A registry of this test's own."""
    mmaccel.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))
    return monkeypatch


def own() -> type[Method]:
    """A method as a user writes it."""

    @dataclass(frozen=True)
    class Corners(ProjectorMethod):
        """Keep the cells farthest from the centre."""

        name = "my-corners"
        summary = "cells far from the centre"
        power: float = 2.0

        def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
            middle = (tokens.grid[:, None, 1:] - 1) / 2
            far = ((tokens.cells[..., 1:] - middle).abs() ** self.power).sum(-1)
            return Reduction.top(far, tokens.valid, count)

    return Corners


@families
def test_a_method_of_ones_own(family: str, clean: pytest.MonkeyPatch) -> None:
    """Registered and used by name, with its options, in recipes, on every family."""
    assert mmaccel.register(own()) is mmaccel.get_method("my-corners")
    assert "my-corners" in mmaccel.methods() and "my-corners" in recipes()
    tiny = model(family)
    with accelerated(tiny, "my-corners", retain=0.3, power=1.0, processor=zoo.processor(family)):
        generate(tiny, inputs(family, "uneven"))
        (stage,) = tiny.mmaccel.stats()["stages"]
        assert stage["method"] == "my-corners" and stage["tokens_kept"] == stage["resolved"] < 0.4 * stage["tokens_in"]
        assert tiny.mmaccel.plan.stages[0].method.power == 1.0


def test_my_corners_are_corners(clean: pytest.MonkeyPatch) -> None:
    mmaccel.register(own())
    tiny = model("llava")
    with accelerated(tiny, "my-corners", retain=4):
        generate(tiny, inputs("llava"), new=1)
        (segment,) = tiny.mmaccel.layout.segments
        kept = tiny.mmaccel.reduction.kept[0, segment.places]
    assert segment.tile.cells[kept].tolist() == [[0, 0, 0], [0, 0, 5], [0, 5, 0], [0, 5, 5]]


@pytest.mark.parametrize("kind", ["class", "module"])
def test_a_method_of_another_package(kind: str, clean: pytest.MonkeyPatch) -> None:
    """An entry point names a method class, or a module that registers methods when it is imported."""
    groups = []

    def load() -> Any:
        if kind == "class":
            return own()
        module = ModuleType("corners")
        vars(module)["Corners"] = mmaccel.register(own())
        return module

    def entry_points(group: str) -> list[Any]:
        groups.append(group)
        return [SimpleNamespace(name="corners", load=load)] if group == "mmaccel.methods" else []

    clean.setattr(registry, "entry_points", entry_points)
    clean.setattr(registry, "_loaded", False)
    assert mmaccel.get_method("my-corners").summary == "cells far from the centre"
    assert groups == ["mmaccel.methods"]
    tiny = model("llava")
    with accelerated(tiny, {"name": "mine", "stages": [{"method": "my-corners", "retain": 0.5}]}):
        generate(tiny, inputs("llava"))
        assert tiny.mmaccel.stats()["visual_tokens_kept"] == 18


def test_names_are_unique_and_given(clean: pytest.MonkeyPatch) -> None:
    class Nameless(ProjectorMethod):
        def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
            raise NotImplementedError

    class Thief(Nameless):
        name = "random"

    with pytest.raises(MmaccelError, match="has no `name`"):
        mmaccel.register(Nameless)
    with pytest.raises(MmaccelError, match="taken by mmaccel.pruning.random"):
        mmaccel.register(Thief)


# ------------------------------------------------------------------------------------------------------ recipes as data


def test_every_recipe_survives_json() -> None:
    """To JSON and back is the same value; each says in words what it does."""
    for name, one in recipes().items():
        assert Recipe.from_json(one.to_json()) == one
        assert one.describe().startswith(name)
        assert len(one.describe().splitlines()) >= 1 + len(one.stages)


def test_overrides_make_a_new_value() -> None:
    base = get_recipe([Stage("random", 0.5), Stage("fastv", 0.25), Stage("snapkv", 0.1)])
    assert base.primary == 1 and base.retain == 0.25
    changed = base.override(retain=0.2, seed=3, window=8, positions="paper", text_retain=0.5)
    assert base.retain == 0.25 and base.stages[0].options == {}
    assert [stage.retain for stage in changed.stages] == [0.5, 0.2, 0.1]
    assert changed.stages[0].options == {"seed": 3} and changed.stages[2].options == {"window": 8}
    assert changed.positions == "paper" and changed.text_retain == 0.5
    with pytest.raises(AttributeError):
        base.name = "other"  # type: ignore[misc]
    again = get_recipe("vtc-cls").override(layers=(-2, None))
    assert Recipe.from_json(again.to_json()) == again


def test_recipes_come_from_many_forms(tmp_path: Any) -> None:
    one = get_recipe("divprune").override(retain=0.1)
    path = tmp_path / "mine.json"
    path.write_text(one.to_json())
    for form in (one, path, str(path), json.loads(one.to_json())):
        assert get_recipe(form) == one
    assert get_recipe(Stage("divprune", 0.1)).stages == one.stages
    tiny = model("llava")
    with accelerated(tiny, path, retain=9):
        generate(tiny, inputs("llava"))
        assert tiny.mmaccel.stats()["visual_tokens_kept"] == 9


def test_a_method_declares_what_it_cannot_be_combined_with(fresh_registry: None) -> None:
    """No list of a recipe names it."""

    @register
    @dataclass(frozen=True)
    class Alone(FastV):
        name = "alone"
        excludes = {"projector": "it needs every visual token"}
        weighable = False
        first: bool = False

        def conflict(self, other: Method) -> str | None:
            return "both are first" if getattr(other, "first", False) and self.first else super().conflict(other)

    with pytest.raises(
        MmaccelError, match="cannot combine 'alone' with 'divprune': it needs every visual token; leave"
    ):
        Recipe("x", (Stage("divprune", 0.5), Stage("alone", 0.5)))
    two = Recipe("x", (Stage("alone", 0.5, {"layer": 2}), Stage("alone", 0.25, {"layer": 3, "first": True})))
    assert len(two.build()) == 2
    with pytest.raises(MmaccelError, match="cannot combine 'alone' with 'alone': both are first"):
        dataclasses.replace(two, stages=(Stage("alone", 0.5, {"layer": 2, "first": True}), two.stages[1])).build()
    with pytest.raises(MmaccelError, match="proportional='all' is for tokens"):
        two.override(proportional="all").build()


def _json(**stage: Any) -> str:
    return json.dumps({"name": "x", "stages": [{"method": "random", "retain": 0.5, **stage}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object with name, stages"),
        ('{"stages": []}', "`name` of a recipe must be a string, got None"),
        ('{"name": "x", "stage": []}', "no field 'stage'; it has name, stages"),
        ('{"name": "x", "stages": {}}', "must be a list of objects"),
        ('{"name": "x", "stages": ["random"]}', "A stage must be a JSON object"),
        ('{"name": "x", "summary": 3}', "`summary` of a recipe must be a string, got 3"),
        ('{"name": "x", "positions": "new"}', "positions='new' is unknown; use 'keep' or 'paper'"),
        ('{"name": "x", "variant": 1}', "variant=1 is unknown"),
        ('{"name": "x", "text_retain": 0}', "text_retain=0 keeps no token"),
        (_json(method=3), "`method` of a stage must be a string, got 3"),
        (_json(options=[]), "`options` of a stage must be an object"),
        (_json(budget=1), "no field 'budget'"),
        (_json(retain="0.5"), "retain='0.5' is not a budget"),
        (_json(retain=None), "needs a budget; give retain=0.25"),
        (_json(options={"sed": 1}), "no option 'sed'; it has seed"),
        (_json(options={"seed": "1"}), "seed='1' is of the wrong type; give int"),
        (_json(options={"seed": [1]}), "is of the wrong type"),
        (_json(method="snapkv", options={"kernel": 4}), "must be an odd number, got 4"),
        (_json(method="randm"), "did you mean 'random'"),
    ],
)
def test_json_is_validated(text: str, message: str) -> None:
    with pytest.raises(MmaccelError, match=message):
        Recipe.from_json(text)


@pytest.mark.parametrize(
    "bad", ["os.system", "__import__('os').system('exit 1')", "mmaccel.pruning.random:Random", "../x"]
)
def test_recipes_are_never_code(bad: str, tmp_path: Any) -> None:
    """Names are looked up among registered methods; nothing is imported, evaluated or unpickled."""
    import pickle

    with pytest.raises(MmaccelError, match="There is no method"):
        Recipe.from_json(_json(method=bad))
    with pytest.raises(MmaccelError, match="There is no recipe"):
        get_recipe(bad)
    path = tmp_path / "evil.json"
    path.write_bytes(pickle.dumps(get_recipe("random")))
    with pytest.raises(MmaccelError, match="Cannot read|not valid JSON"):
        get_recipe(path)
