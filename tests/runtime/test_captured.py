"""Captured decode steps: one graph for all of them, the tokens of ordinary steps, and a cache that is as it always was behind
them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import simulated
import torch
import zoo
from laws.helpers import cache, close, follow, generate, inputs, logits, model, recipe_of
from laws.oracle import WINDOWED
from tail import few
from torch._dynamo.utils import counters
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

import mmaccel
from mmaccel import Recipe, Stage, accelerated
from mmaccel.kv import static_view
from mmaccel.runtime.graphs import captured, replay


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def config(backend: str = "eager") -> CompileConfig:
    """A break in the graph is an error."""
    return CompileConfig(fullgraph=True, backend=backend, mode=None)


class Watch(StoppingCriteria):
    """Notes after every captured step where is what it read; breaks the call off after ``last`` of them."""

    def __init__(self, mine: Any, last: int | None = None) -> None:
        self.mine, self.last, self.seen = mine, last, []

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Never done."""
        if (held := self.mine.mmaccel.shared.static_view) is not None:
            self.seen.append([(x.data_ptr(), x.shape, x.stride()) for x in held.tensors()])
        if len(self.seen) == self.last:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)


def both(
    family: str, recipe: str | Recipe, kind: str, steps: int, backend: str = "eager", **text: int
) -> tuple[Any, Any, dict[str, Any], Watch]:
    """What ordinary and what captured steps make, the statistics of the latter, which ran in two calls, and what they read."""
    tiny, feed, options = model(family, **text), inputs(family, kind), {"new": steps + 1, "min_new_tokens": steps + 1}
    made = recipe_of(recipe, family) if isinstance(recipe, str) else recipe
    with accelerated(tiny, made, processor=zoo.processor(family)):
        wanted = generate(tiny, feed, disable_compile=True, **options)
        options |= {} if backend == "replay" else {"compile_config": config(backend)}
        generate(tiny, feed, **options)
        watch = Watch(cache())
        criteria = StoppingCriteriaList([watch])
        got = generate(tiny, feed, past_key_values=watch.mine, stopping_criteria=criteria, **options)
        return wanted, got, tiny.mmaccel.stats(), watch


def agree(wanted: Any, got: Any) -> None:
    assert torch.equal(got.sequences, wanted.sequences)
    close(logits(got), logits(wanted))
    for mine, other in zip(got.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        assert mine.seen == other.seen and torch.equal(mine.index.index, other.index.index)
        assert torch.equal(mine.index.lengths, other.index.lengths)
        for a, b in zip(mine.stored(), other.stored(), strict=True):
            close(a, b)
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


CASES = [
    ("llava", "divprune", "uneven"),
    ("llava", "adakv", "uneven"),
    ("llava", "fastv", "uneven"),
    ("llava", "snapkv", "image"),
    ("qwen2_5_vl", "divprune", "uneven"),
    ("qwen3_vl", "snapkv", "video"),
    ("llava_next", "tome", "uneven"),
    ("internvl", "pyramidkv", "image"),
    ("qwen2_5_vl", "adakv", "mixed"),
    ("llava_next", "adakv", "images"),
    ("qwen3_vl", "vl-cache", "uneven"),
]


@pytest.mark.parametrize(
    ("family", "recipe", "kind", "steps"),
    [
        (*CASES[0], 12),
        *(pytest.param(*case, 512, marks=pytest.mark.full) for case in CASES),
    ],
)
def test_one_graph_makes_the_tokens_of_ordinary_steps(family: str, recipe: str, kind: str, steps: int) -> None:
    """In two calls with a cache each; nothing that the steps of a call read moves or grows."""
    wanted, got, stats, watch = both(family, recipe, kind, steps)
    agree(wanted, got)
    assert stats["captured_steps"] == stats["decode_steps"] == steps and stats["uncaptured"] == ""
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(watch.seen) == steps and all(seen == watch.seen[0] for seen in watch.seen)
    assert watch.mine.mmaccel.shared.static_view is None


@pytest.mark.parametrize(
    ("family", "recipe", "kind", "steps"),
    [
        (*CASES[0], 20),
        (*CASES[1], 20),
        *(pytest.param(*case, 200, marks=pytest.mark.full) for case in CASES),
    ],
)
def test_a_recorded_step_is_replayed(graphs: None, family: str, recipe: str, kind: str, steps: int) -> None:
    """All but the first two, which are recorded and compared; nobody asked for it."""
    wanted, got, stats, watch = both(family, recipe, kind, steps, "replay")
    agree(wanted, got)
    assert stats["captured_steps"] == steps - 2 and stats["decode_steps"] == steps and stats["uncaptured"] == "", stats[
        "uncaptured"
    ]
    assert all(seen == watch.seen[0] for seen in watch.seen)


PAGES = {"page": 16, "group": 16, "residual": 4, "bits": 4}
#: by the form of what is packed: a family and its inputs, stages, and how many steps of 100 are ordinary
PACKED = {
    # its two rows pack at steps of their own
    "alone": ("llava", "uneven", (("kivi", None, PAGES),), 12),
    "heads": ("llava", "image", (("snapkv", 0.5, {"window": 8, "head_budget": "adaptive"}), ("kivi", None, PAGES)), 7),
    "rows": ("llava_next", "uneven", (("snapkv", 0.5, {"window": 8}), ("kivi", None, PAGES)), 7),
    "pictures": ("qwen2_5_vl", "mixed", (("fastv", 0.5, {"layer": 2}), ("kivi", None, PAGES)), 6),
    "channels": ("qwen3_vl", "image", (("think", None, {"page": 16, "group": 16, "residual": 4}),), 7),
    "planes": ("qwen2_5_vl", "video", (("vidkv", None, {"page": 32, "protect": 0.3}),), 3),
    "groups": ("llava", "image", (("calibquant", None, {"page": 16}), ("kivi", None, PAGES | {"text_only": True})), 6),
    "once": ("llava", "image", (("snapkv", 0.9, {"joint": True}), ("kivi", None, PAGES | {"visual_only": True})), 0),
}


@pytest.mark.full
@pytest.mark.parametrize("form", PACKED)
def test_steps_that_pack_are_ordinary(form: str) -> None:
    """Between two of them nothing moves or grows. As there are more and more pages, one graph is made for any number of them;
    another one before there were any."""
    family, kind, stages, ordinary = PACKED[form]
    wanted, got, stats, watch = both(family, Recipe(form, tuple(Stage(*stage) for stage in stages)), kind, 100)
    agree(wanted, got)
    assert (stats["captured_steps"], stats["decode_steps"]) == (100 - ordinary, 100) and stats["uncaptured"] == "", (
        stats["uncaptured"]
    )
    assert len(watch.seen) == 100 - ordinary and len(list(itertools.groupby(watch.seen))) <= ordinary + 1
    assert counters["stats"]["unique_graphs"] <= 3 and not counters["graph_break"]
    assert any(layer.packed.any_pages for layer in watch.mine.mmaccel.layers)


# by choice: the recipes of the book that evict while they decode, and schedules of other kinds
#: by name: a recipe, and whether what was evicted from is pinned to the same tensors again
EVICTING = {
    "h2o-decode": (mmaccel.get_recipe("h2o-decode"), True),
    "d2o": (mmaccel.get_recipe("d2o"), True),
    "streaming-llm-decode": (mmaccel.get_recipe("streaming-llm-decode"), True),
    "elastic-cache-decode": (mmaccel.get_recipe("elastic-cache-decode"), True),
    "snapkv": (Recipe("window", (Stage("snapkv", 0.3, {"joint": True, "window": 3}),)), True),
    "heads": (Recipe("heads", (Stage("h2o", 0.3, {"joint": True, "head_budget": "adaptive:0", "recent": 1}),)), False),
}


#: those of the book
BOOK = tuple(name for name in EVICTING if name in mmaccel.recipes())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "h2o-decode" else pytest.mark.full) for n in EVICTING]
)
def test_steps_between_two_evictions_are_replayed(graphs: None, name: str) -> None:
    """One recording serves all of them, where the keys that stay are put where others were."""
    made, same = EVICTING[name]
    wanted, got, stats, watch = both("llava", made.override(every=8), "image", 40, "replay")
    agree(wanted, got)
    # four evict, and the first two steps between them are recorded and compared
    places = [place for place, _ in itertools.groupby(watch.seen)]
    assert stats["uncaptured"] == "" and (len(places) == 1) == same
    if same:
        assert stats["captured_steps"] >= 40 - 5 - 2


@pytest.mark.parametrize("name", few(BOOK, ("h2o-decode",)))
def test_recipes_that_evict_are_replayed_as_they_come(graphs: None, name: str) -> None:
    """Nothing need be said for fifteen steps of sixteen."""
    wanted, got, stats, _ = both("llava", name, "image", 66, "replay")
    agree(wanted, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] >= 66 - 4 - 2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize("name", EVICTING)
def test_one_graph_serves_before_and_behind_evictions(name: str, kind: str) -> None:
    made, same = EVICTING[name]
    wanted, got, stats, _ = both("qwen2_5_vl" if kind == "image" else "llava", made.override(every=8), kind, 60)
    agree(wanted, got)
    assert stats["captured_steps"] >= 60 - 8 and stats["uncaptured"] == ""
    assert kind == "uneven" or not same or counters["stats"]["unique_graphs"] <= 2


# by choice: the policies that read some keys only, on pictures of few tokens; rows that begin with padding; packed keys
#: by name: stages, a family and its inputs
READING = {
    "quest": ((("quest", 0.3, {"page": 3, "least": 1, "layer": 1}),), "llava", "uneven"),
    "tokenselect": ((("tokenselect", 0.3, {"layer": 1}),), "llava", "uneven"),
    "loki": ((("loki", 0.3, {"layer": 1}),), "qwen2_5_vl", "mixed"),
    "squeezed-attention": ((("squeezed-attention", 0.3, {"clusters": 0.3, "layer": 1}),), "internvl", "image"),
    "two levels": (
        (("squeezed-attention", 0.3, {"clusters": 0.3, "coarse": 0.1, "layer": 1}),),
        "llava",
        "uneven",
    ),
    "quest on pages": (
        (("quest", 0.3, {"page": 3, "least": 1, "layer": 1}), ("kivi", None, PAGES)),
        "llava",
        "images",
    ),
    "loki on pages": ((("loki", 0.3, {"layer": 1}), ("kivi", None, PAGES)), "qwen2_5_vl", "video"),
    "clusters on pages": (
        (("squeezed-attention", 0.3, {"clusters": 0.3, "layer": 1}), ("kivi", None, PAGES)),
        "llava",
        "images",
    ),
}
#: of 40 steps those that are ordinary: the first, and with pages those that pack and those behind them
SETTLING = {name: 6 if "pages" in name else 1 for name in READING}


def reading(name: str) -> tuple[str, Recipe, str]:
    """A family, a recipe and inputs."""
    stages, family, kind = READING[name]
    return family, Recipe(name, tuple(Stage(*stage) for stage in stages)), kind


@pytest.mark.full
@pytest.mark.parametrize("name", READING)
def test_steps_that_read_some_keys_are_one_graph(name: str) -> None:
    family, made, kind = reading(name)
    wanted, got, stats, watch = both(family, made, kind, 40)
    agree(wanted, got)
    assert stats["captured_steps"] >= 40 - SETTLING[name] and stats["uncaptured"] == ""
    assert len(list(itertools.groupby(watch.seen))) <= (1 if "pages" not in name else 4)
    assert counters["stats"]["unique_graphs"] <= (1 if "pages" not in name else 3) and not counters["graph_break"]


@pytest.mark.parametrize("name", few(READING, ("tokenselect", "quest on pages")))
def test_steps_that_read_some_keys_are_replayed(graphs: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(replay, "LEAST", 4)
    family, made, kind = reading(name)
    wanted, got, stats, _ = both(family, made, kind, 40, "replay")
    agree(wanted, got)
    stretches = 1 if "pages" not in name else 4
    assert stats["captured_steps"] >= 40 - SETTLING[name] - 3 * stretches and stats["uncaptured"] == "", stats[
        "uncaptured"
    ]


# by choice: layers stored in every way, and steps that read some keys, under windows in all layers and in some
WINDOWS = {
    "divprune": (("divprune", 0.3, {}),),
    "heads": (("snapkv", 0.5, {"window": 8, "head_budget": "adaptive"}),),
    "kivi": (("kivi", None, PAGES),),
    "tokenselect": (("tokenselect", 0.3, {"layer": 1}),),
}


@pytest.mark.parametrize(("family", "overrides"), WINDOWED)
@pytest.mark.parametrize("name", few(WINDOWS, ("divprune",)))
def test_windows_move_on_with_the_steps(
    graphs: None, monkeypatch: pytest.MonkeyPatch, family: str, overrides: dict[str, int], name: str
) -> None:
    """What is beyond them is no longer seen; nothing that is read moves."""
    monkeypatch.setattr(replay, "LEAST", 4)
    made = Recipe(name, tuple(Stage(*stage) for stage in WINDOWS[name]))
    kind = "uneven" if family == "llava_next" else "image"
    wanted, got, stats, watch = both(family, made, kind, 30, "replay", **overrides)
    agree(wanted, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] >= (24 if name != "kivi" else 16)
    assert name == "kivi" or all(seen == watch.seen[0] for seen in watch.seen)


def test_masks_that_are_made_elsewhere_are_not_captured(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LEAST", 4)
    wanted, got, stats, _ = both("gemma3", "divprune", "image", 30, "replay")
    agree(wanted, got)
    assert stats["captured_steps"] == 0 and "makes masks in front of its text model" in stats["uncaptured"]


@pytest.mark.parametrize("kind", ["image", "uneven"])
@pytest.mark.parametrize(
    ("family", "text"),
    [("llava", {}), ("qwen2_5_vl", {}), ("llava_next", {"sliding_window": 24}), ("internvl", {})],
)
def test_tokens_with_weights(
    family: str, text: dict[str, int], kind: str, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LEAST", 4)
    what = recipe_of("divprune", family).override(proportional="all")
    wanted, got, stats, _ = both(family, what, kind, 30, "replay", **text)
    agree(wanted, got)
    assert stats["uncaptured"] == "" and stats["captured_steps"] >= 24
    assert got.past_key_values.mmaccel.shared.places.weights.any()


def test_weights_beside_eager_attention_are_not_captured(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LEAST", 4)
    what = recipe_of("divprune", "llava").override(proportional="all")
    tiny = model("llava")
    tiny.config.text_config._attn_implementation_internal = "eager"
    try:
        wanted, got, stats, _ = both("llava", what, "image", 30, "replay")
    finally:
        tiny.config.text_config._attn_implementation_internal = "sdpa"
    agree(wanted, got)
    assert stats["captured_steps"] == 0 and stats["uncaptured"]


def test_a_copy_of_the_cache_keeps_what_it_holds(graphs: None) -> None:
    """Whoever remembers the cache while steps are captured finds it so, whatever is evicted later."""
    tiny, feed, held = model("llava"), inputs("llava"), []

    def look(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        state = mine.mmaccel
        if state.shared.static_view is not None and state.shared.static_view.added == 5 and not held:
            restore = state.snapshot()
            keys = [layer.keys for layer in state.layers]
            held.append((restore, keys, [x.clone() for x in keys]))
        return torch.zeros(len(ids), dtype=torch.bool)

    with accelerated(tiny, mmaccel.get_recipe("h2o-decode").override(every=8)):
        mine = cache()
        options = {"new": 41, "min_new_tokens": 41, "stopping_criteria": StoppingCriteriaList([look])}
        generate(tiny, feed, past_key_values=mine, **options)
    ((_, keys, before),) = held
    assert all(torch.equal(x, y) for x, y in zip(keys, before, strict=True))


@pytest.mark.full
def test_rows_pack_at_steps_of_their_own() -> None:
    """Seldom enough that most steps are captured, and none holds back a page because of its neighbour."""
    wanted, got, stats, _ = both("llava", Recipe("kivi", (Stage("kivi", None, PAGES),)), "uneven", 24)
    agree(wanted, got)
    assert stats["captured_steps"] >= 24 - 2
    for layer in got.past_key_values.layers:
        loose = layer.head_lengths - sum(held.live for held in layer.packed.held)
        assert loose.unique().numel() > 1 and int(loose.max()) < PAGES["residual"] + PAGES["page"]


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.5, 8.0])
def test_the_frames_of_a_slow_clip_may_stand_behind_the_question(seconds: float) -> None:
    """Where they do, the first step says behind which of them a call goes on: it is ordinary."""
    tiny, first, words = model("qwen2_5_vl"), inputs("qwen2_5_vl", "video"), inputs("qwen2_5_vl", "text")
    first["second_per_grid_ts"] = [seconds] * len(first["video_grid_thw"])
    found = []
    with accelerated(tiny, recipe_of("snapkv")):
        for options in ({}, {"compile_config": config()}):
            options = {**options, "new": 6, "min_new_tokens": 6}
            out = generate(tiny, first, **options)
            feed, _ = follow(first, out, words)
            found += [out, generate(tiny, feed, past_key_values=out.past_key_values, **options)]
            captured_steps = tiny.mmaccel.stats()["captured_steps"]
    for mine, wanted in zip(found[2:], found[:2], strict=True):
        assert torch.equal(mine.sequences, wanted.sequences)
        close(logits(mine), logits(wanted))
    assert captured_steps == (5 if seconds < 1 else 4)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == "heads" else pytest.mark.full) for form in PACKED]
)
def test_steps_between_two_packings_are_replayed(graphs: None, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """They are recorded anew after each, where that pays."""
    monkeypatch.setattr(replay, "LEAST", 4)
    family, kind, stages, ordinary = PACKED[form]
    wanted, got, stats, _ = both(family, Recipe(form, tuple(Stage(*stage) for stage in stages)), kind, 100, "replay")
    agree(wanted, got)
    # the first two of every stretch, and stretches of three or fewer
    assert stats["captured_steps"] >= 100 - ordinary - 3 * (ordinary + 1) and stats["uncaptured"] == "", stats[
        "uncaptured"
    ]


@pytest.mark.full
@pytest.mark.parametrize(("family", "recipe", "kind"), CASES[:4])
def test_inductor_makes_the_same_tokens(family: str, recipe: str, kind: str) -> None:
    wanted, got, stats, _ = both(family, recipe, kind, 64, "inductor")
    agree(wanted, got)
    assert stats["captured_steps"] == 64 and counters["stats"]["unique_graphs"] == 1


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["divprune", "adakv"])
def test_a_cache_is_pinned_anew_when_it_is_full(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CHUNK", 3)
    monkeypatch.setattr(static_view, "ROUND", 2)
    wanted, got, stats, _ = both("llava", recipe, "uneven", 12)
    agree(wanted, got)
    assert stats["captured_steps"] == 12 and counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("recipe", ["divprune", pytest.param("adakv", marks=pytest.mark.full)])
def test_a_conversation_goes_on_behind_captured_steps(recipe: str) -> None:
    """A second turn, what was cropped, and a call that was broken off in the middle."""
    tiny, first, words = model("llava"), inputs("llava", "uneven"), inputs("llava", "text", batch=2)
    found = []
    with accelerated(tiny, recipe_of(recipe)):
        for options in ({}, {"compile_config": config()}):
            options = {**options, "new": 6, "min_new_tokens": 6}
            out = generate(tiny, first, **options)
            out.past_key_values.crop(-2)
            out.sequences = out.sequences[:, :-2]
            feed, _ = follow(first, out, words)
            found.append(generate(tiny, feed, past_key_values=out.past_key_values, **options))
        agree(*found)
        mine = cache()
        watch = StoppingCriteriaList([Watch(mine, last=3)])
        with pytest.raises(KeyboardInterrupt):
            generate(tiny, first, past_key_values=mine, stopping_criteria=watch, **options)
        assert mine.mmaccel.shared.static_view is None and not mine.mmaccel.shared.broken
        wanted = generate(tiny, first, new=4, min_new_tokens=4)
    for layer, other in zip(mine.layers, wanted.past_key_values.layers, strict=True):
        assert torch.equal(layer.index.index, other.index.index)
        close(layer.stored()[0], other.stored()[0])


def test_steps_are_recorded_anew_when_the_cache_is_pinned_anew(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "CHUNK", 8)
    monkeypatch.setattr(static_view, "ROUND", 2)
    monkeypatch.setattr(replay, "LEAST", 4)
    wanted, got, stats, _ = both("llava", "divprune", "uneven", 24, "replay")
    agree(wanted, got)
    assert stats["captured_steps"] == 24 - 3 * 2


@pytest.mark.parametrize("wrong", ["end_step", "write"])
def test_what_does_not_repeat_is_not_replayed(graphs: None, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Steps that are right as they are, and recorded have a number of the host in them: where the next token goes, or where
    this one is written."""
    made: list[static_view.StaticView] = []
    make = static_view.StaticView.__init__

    def noted(self: static_view.StaticView, layers: Any, *rest: Any) -> None:
        self.longest = len(layers[0].index)
        make(self, layers, *rest)
        made.append(self)

    def end(self: static_view.StaticView, count: int) -> None:
        self.positions.add_(1)
        for one in self.cursors:
            one.slot.fill_(self.longest + self.added + 1)
            one.filled.fill_(self.longest + self.added + 2)

    def write(
        self: static_view.StaticLayerView, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = made[-1].longest + made[-1].added
        self.keys[:, :, at], self.values[:, :, at] = key[:, :, 0], value[:, :, 0]
        return self.keys, self.values

    monkeypatch.setattr(static_view.StaticView, "__init__", noted)
    if wrong == "end_step":
        monkeypatch.setattr(static_view.StaticView, "end_step", end)
    else:
        monkeypatch.setattr(static_view.StaticLayerView, "write", write)
    wanted, got, stats, _ = both("llava", "divprune", "image", 20, "replay")
    agree(wanted, got)
    assert stats["captured_steps"] == 0 and "did not repeat" in stats["uncaptured"]


def test_what_cannot_be_recorded_is_run_as_it_is(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for the device."""
    begin = static_view.StaticView.begin_step
    monkeypatch.setattr(
        static_view.StaticView,
        "begin_step",
        lambda self, count: begin(self, count) if self.positions.sum().item() else None,
    )
    wanted, got, stats, _ = both("llava", "divprune", "image", 20, "replay")
    agree(wanted, got)
    assert stats["captured_steps"] == 0 and "cannot be recorded (operation not permitted" in stats["uncaptured"]


def test_hooks_and_short_answers_are_reasons_to_record_nothing(graphs: None) -> None:
    tiny, feed, seen = model("llava"), inputs("llava"), []
    with accelerated(tiny, recipe_of("divprune")):
        generate(tiny, feed, new=8)
        assert "fewer than 16" in tiny.mmaccel.stats()["uncaptured"]
        handle = tiny.lm_head.register_forward_hook(lambda *_: seen.append(1))
        try:
            out = generate(tiny, feed, new=20, min_new_tokens=20)
        finally:
            handle.remove()
        stats = tiny.mmaccel.stats()
    assert stats["captured_steps"] == 0 and "hooks on lm_head" in stats["uncaptured"]
    assert len(seen) == out.sequences.shape[1] - feed["input_ids"].shape[1]


def test_a_gpu_captures_whatever_the_implementation_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours reads the cache there. Here only sdpa is captured."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made = []
    for options in ({}, {"compile_config": CompileConfig()}):
        with simulated.machine() as gpu:
            tiny = zoo.model("llava")
            tiny.set_attn_implementation("eager")
            feed = gpu.put(inputs("llava"))
            with accelerated(gpu.put(tiny), recipe_of("divprune")):
                made.append(generate(tiny, feed, new=4, min_new_tokens=4, **options).sequences.tolist())
                stats = tiny.mmaccel.stats()
    assert made[0] == made[1] and stats["captured_steps"] == 3
    here = zoo.model("llava")
    here.set_attn_implementation("eager")
    with accelerated(here, recipe_of("divprune")):
        generate(here, inputs("llava"), compile_config=config())
        assert "only sdpa" in here.mmaccel.stats()["uncaptured"]


# by choice: one for every reason
REFUSED = {
    "h2o-decode": ({}, "h2o evicts at every step; give every=16", {"every": 1}),
    "dycoke-cache": ({}, "dycoke-cache looks at the cache"),
    "divprune": ({"num_beams": 2}, "never those of beams"),
    "snapkv": ({"output_hidden_states": True}, "hidden states"),
    "fastv": ({"disable_compile": True}, "disable_compile"),
}


@pytest.mark.parametrize("recipe", REFUSED)
def test_what_is_not_captured_says_why(recipe: str) -> None:
    tiny, feed, (options, why, *given) = model("llava"), inputs("llava"), REFUSED[recipe]
    with accelerated(tiny, recipe_of(recipe, **dict(*given))):
        wanted = generate(tiny, feed, **options)
        assert "compile_config" in tiny.mmaccel.stats()["uncaptured"]
        got = generate(tiny, feed, **options, compile_config=config())
        stats = tiny.mmaccel.stats()
    assert torch.equal(wanted.sequences, got.sequences)
    assert stats["captured_steps"] == 0 and why in stats["uncaptured"]
