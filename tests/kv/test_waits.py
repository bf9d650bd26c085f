"""The host knows what the cache stores: it does not wait for the device layer by layer, and layers may be on several devices.

Counts are those of a simulated machine (see `simulated`).
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any
from unittest import mock

import fingerprint
import pytest
import simulated
import torch
import zoo
from evicting import SCHEDULES
from laws import helpers
from mmaccel_kernels.decode import decode_attention
from tail import few
from transformers import CompileConfig

import mmaccel
from mmaccel import Recipe, Stage, accelerated
from mmaccel.kv import decoding
from mmaccel.kv.index import KeyIndex
from mmaccel.kv.layer import CompressedLayer
from mmaccel.kv.packed import QuantisedLayer
from mmaccel.kv.sparse import SparseRead
from mmaccel.method import LayerAttention
from mmaccel.runtime.cache.prompt_eviction import PromptEviction
from mmaccel.runtime.graphs import replay

PAGES = {"page": 16, "group": 16, "residual": 4, "bits": 4}
STEPS = 4


def recipe(*stages: tuple[str, float | None, dict[str, Any]], text_retain: float | None = None) -> Recipe:
    return Recipe(
        "-".join(method for method, *_ in stages), tuple(Stage(*one) for one in stages), text_retain=text_retain
    )


SNAPKV = ("snapkv", 0.5, {"window": 8})
#: every way in which it is settled what a layer keeps, or packs
# by choice: one for every way; the waits of every recipe of the book are in tests/laws/test_devices.py
RECIPES = {
    "uniform": recipe(SNAPKV),
    "pyramid": recipe(("windowkv", 0.3, {"window": 8})),
    "text": recipe(("snapkv", 0.3, {"window": 8, "protect": ("question",), "text_policy": "knorm"}), text_retain=0.5),
    "chunks": recipe(("snapkv", 0.3, {"window": 8, "neighbours": 4})),
    "merged": recipe(("h2o", 0.3, {"compact": "average"})),
    "nearest": recipe(("elastic-cache", 0.3, {})),
    "as its authors": recipe(("elastic-cache", 0.3, {})).override(variant="official"),
    "sparsity": recipe(("vl-cache", 0.3, {})),
    "entropy": recipe(("h2o", 0.3, {"layer_budget": "entropy"})),
    "prefix": recipe(("observed-attention", 0.3, {"layer_budget": "prefix"})),
    "variance": recipe(("a2sf", 0.3, {"layer_budget": "variance", "joint": True})),
    "heads": recipe(("snapkv", 0.3, {"window": 8, "head_budget": "adaptive"})),
    "stretches": recipe(("lagkv", 0.3, {"lag": 4})),
    "clips": recipe(("infinipot-v", 0.3, {"pooled": True})),
    "deferred": recipe(("fastv", 0.5, {"layer": 2}), ("mustdrop-cache", None, {})),
    "kivi": recipe(("kivi", None, PAGES)),
    "think": recipe(("think", None, {"page": 16, "group": 16, "residual": 4})),
    "vidkv": recipe(("vidkv", None, {"page": 32, "protect": 0.3})),
    "two codecs": recipe(("calibquant", None, {"page": 16}), ("kivi", None, {**PAGES, "text_only": True})),
    "few and packed": recipe(SNAPKV, ("calibquant", None, {"page": 16})),
    "heads and packed": recipe(("snapkv", 0.5, {"window": 8, "head_budget": "adaptive"}), ("kivi", None, PAGES)),
    "joint and packed": recipe(
        ("snapkv", 0.5, {"window": 8, "joint": True}), ("kivi", None, {**PAGES, "visual_only": True})
    ),
}
QUICK = ("text", "merged")


def forwards(
    made: Recipe, layers: int, kind: str = "image", steps: int = STEPS, captured: bool = False, **text: int
) -> list[simulated.Counts]:
    """What is asked of the machine in the prompt, and in every decode step; ``captured`` ones run as they would be recorded.
    ``text``: fields of the text configuration."""
    counts = []
    with ExitStack() as stack:
        options = {"compile_config": CompileConfig()} if captured else {}
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **_: function))
        gpu = stack.enter_context(simulated.machine())
        model = gpu.put(zoo.model("llava", num_hidden_layers=layers, **text))
        feed = gpu.put(zoo.inputs("llava", kind))
        with accelerated(model, made):
            handles = [
                model.register_forward_pre_hook(lambda *_: counts.append(gpu.counts.copy())),
                model.register_forward_hook(lambda *_: counts.append(gpu.counts.copy())),
            ]
            model.generate(**feed, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, **options)
            for handle in handles:
                handle.remove()
            # one may pack
            assert model.mmaccel.stats()["captured_steps"] >= (steps - 2 if captured else 0)
    return [after.since(before) for before, after in zip(counts[::2], counts[1::2], strict=True)]


def waits(made: Recipe, layers: int, kind: str = "image", steps: int = STEPS) -> list[int]:
    """How often the host waits in the prompt, and in every decode step."""
    return [sum(counts.waits.values()) for counts in forwards(made, layers, kind, steps)]


#: what the recipes of the book cost as the papers have it
EACH = " at every step"
# by choice: the recipes of the book that evict while they decode, also at every step, and schedules of other kinds
#: of what evicts, or chooses what to read, while it decodes: for how many steps, and on which prompt; the launches of a step
#: above the bare model's, of all layers together and of each, and how often it waits, mean over the steps
STEP = {
    "h2o-decode": (mmaccel.get_recipe("h2o-decode"), 16, "image", (9.9, 0.125, 0)),
    "streaming-llm-decode": (mmaccel.get_recipe("streaming-llm-decode"), 16, "image", (7.2, 0.125, 0)),
    "elastic-cache-decode": (mmaccel.get_recipe("elastic-cache-decode"), 16, "image", (12.4, 0.125, 0)),
    "d2o": (mmaccel.get_recipe("d2o"), 16, "image", (15.625, 0.125, 0)),
    "snapkv-8": (SCHEDULES["snapkv"].override(every=8), 8, "image", (20, 1, 0)),
    "text": (SCHEDULES["h2o-visual"], 1, "image", (85, 1, 1)),
    "sparse read": (recipe(("dycoke-cache", 0.3, {})), 4, "image", (73.3, 2, 0.25)),
    "heads": (SCHEDULES["adaptive"].override(every=8), 8, "image", (32, 5.4, 0)),
    "uneven": (SCHEDULES["h2o"].override(every=8), 8, "uneven", (32, 8.7, 0)),
}
# by choice: the recipes of the book, as above
PAPERS = {
    "h2o-decode": (1, "image", (88, 1, 0)),
    "streaming-llm-decode": (1, "image", (69, 1, 0)),
    "elastic-cache-decode": (2, "image", (77.5, 0.5, 0)),
    "d2o": (1, "image", (182, 1, 0)),
}
STEP |= {name + EACH: (STEP[name][0].override(every=1), *figures) for name, figures in PAPERS.items()}
# by choice: every kind of codec and of schedule, side by side
SCHEDULED_AND_PACKED = {
    "h2o and kivi": recipe(("h2o", 0.5, {"recent": 0.1, "joint": True, "every": 2}), ("kivi", None, PAGES)),
    "h2o and calibquant": recipe(
        ("h2o", 0.5, {"recent": 0.1, "joint": True, "every": 2}), ("calibquant", None, {"page": 16})
    ),
    "visual and kivi": recipe(("h2o", 0.5, {"every": 2}), ("kivi", None, PAGES)),
    "merged and kivi": recipe(("h2o", 0.5, {"joint": True, "every": 2, "compact": "ema"}), ("kivi", None, PAGES)),
    "heads and kivi": recipe(
        ("snapkv", 0.5, {"joint": True, "every": 2, "head_budget": "adaptive"}), ("kivi", None, PAGES)
    ),
    "tova and think": recipe(
        ("tova", 0.5, {"joint": True, "every": 2}), ("think", None, {"page": 16, "group": 16, "residual": 4})
    ),
}


@pytest.mark.parametrize("name", few(tuple(SCHEDULED_AND_PACKED), ("visual and kivi",)))
def test_evicting_from_packed_keys_waits_once_for_all_layers(name: str) -> None:
    few_layers, more = (waits(SCHEDULED_AND_PACKED[name], layers, steps=8) for layers in (2, 4))
    assert few_layers == more and max(few_layers) > 0


#: layers of a model of today
DEPTH = 28


@functools.cache
def a_step(name: str | None, layers: int) -> tuple[float, float]:
    """Launches and waits of a decode step, mean over the steps; of the bare model's without a name."""
    made, steps, kind, _ = (mmaccel.get_recipe("none"), 1, "image", ()) if name is None else STEP[name]
    counts = forwards(made, layers, kind, steps + 1)[1:]
    return tuple(
        sum(sum(of.values()) for of in each) / steps
        for each in zip(*((c.launches, c.waits) for c in counts), strict=True)
    )


@pytest.mark.parametrize("name", few(STEP, ("h2o-decode", "d2o" + EACH)))
def test_what_a_step_costs_that_evicts(name: str) -> None:
    """A recipe of the book starts at most a fifth more than the bare model, at the depth of today; a fiftieth as it comes."""
    few, many, bare, deeper = (a_step(which, layers) for which in (name, None) for layers in (4, 8))
    own, bare_own = (many[0] - few[0]) / 4, (deeper[0] - bare[0]) / 4
    together = few[0] - bare[0] - 4 * (own - bare_own)
    *launches, waits = STEP[name][-1]
    assert few[1] == many[1] == waits and together <= launches[0] and own - bare_own <= launches[1]
    if name.removesuffix(EACH) in mmaccel.recipes():
        assert few[0] + (DEPTH - 4) * own <= (1.2 if name.endswith(EACH) else 1.02) * (bare[0] + (DEPTH - 4) * bare_own)


def launches_a_layer(made: Recipe, kind: str, captured: bool = False) -> list[float]:
    """Kernels that each further layer starts, in the prompt and in every decode step. Captured steps do not wait: they can be
    recorded."""
    depths = [forwards(made, layers, kind, captured=captured) for layers in (4, 8)]
    assert not captured or not any(step.waits for counts in depths for step in counts[1:])
    few, many = ([sum(step.launches.values()) for step in counts] for counts in depths)
    return [(more - less) / 4 for less, more in zip(few, many, strict=True)]


@pytest.mark.parametrize("name", few(RECIPES, QUICK))
def test_more_layers_make_the_host_wait_no_more_often(name: str) -> None:
    four = waits(RECIPES[name], 4)
    assert waits(RECIPES[name], 8) == four
    # what a text codec packs of what was said is asked once a step, for all layers
    assert max(four[1:]) <= (name == "two codecs")


#: of a prompt: launches above the bare model's of all layers together and of each, and timing events
# by choice: one for every way in which budgets, scores and what is carried are settled; h2o looks at all queries of a layer
PROMPT = {
    "uniform": (147, 1, 4),
    "pyramid": (177, 1, 4),
    "text": (184, 1, 4),
    "chunks": (179, 1, 4),
    "merged": (170, 6, 6),
    "nearest": (164, 6, 6),
    "sparsity": (109, 31, 6),
    "entropy": (87, 40, 6),
    "prefix": (125, 6, 6),
    "variance": (130, 7, 6),
    "heads": (183, 3, 6),
    "stretches": (127, 0, 4),
    "clips": (96, 8, 4),
    "deferred": (187, 10.5, 10),
    "dycoke-cache": (25, 0, 2),
}


@pytest.mark.parametrize("name", few(PROMPT, ("uniform", "heads", "deferred", "dycoke-cache")))
def test_what_a_prompt_costs_that_is_evicted_from(name: str) -> None:
    """Layers are evicted from together, so that a further one costs next to nothing; timing events do not grow with layers,
    and there are none where nothing happens."""
    made = RECIPES.get(name) or mmaccel.get_recipe(name)
    few, many, bare, deeper = (
        forwards(which, layers, steps=1)[0] for which in (made, Recipe("bare", ())) for layers in (4, 8)
    )
    less, more, plain, deep = (sum(counts.launches.values()) for counts in (few, many, bare, deeper))
    own = ((more - less) - (deep - plain)) / 4
    together, each, events = PROMPT[name]
    assert less - plain - 4 * own <= together and own <= each
    assert few.events == many.events == events


def test_filters_between_layers_ask_the_device_once_each() -> None:
    """Which tokens are left, since the next layer is shaped by it: neither events nor waits grow with layers, and a step has
    no more of them than the bare model's."""
    made = mmaccel.get_recipe("mustdrop-output-aware")
    few, many, bare = (forwards(which, *how) for which, *how in ((made, 8), (made, 16), (Recipe("bare", ()), 8)))
    assert [(c.events, sum(c.waits.values())) for c in few] == [(c.events, sum(c.waits.values())) for c in many]
    assert [(c.events, sum(c.waits.values())) for c in few[1:]] == [(2, sum(c.waits.values())) for c in bare[1:]]
    sites = [mmaccel.get_method(stage.method).site for stage in made.stages]
    asked = [n for (_, place), n in few[0].waits.items() if "mmaccel/layers" in place or "core/reduction.py" in place]
    assert sum(asked) == len(sites) - sites.count("cache")


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_layers_wait_for_each_other_while_they_are_small(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is never more than there is room for, and evicted from before the next layer is stored."""
    waiting, peaks = 0, []
    prompt = forwards_on_cpu(RECIPES["uniform"], 8)
    monkeypatch.setattr(PromptEviction, "room", most * prompt)
    stored, settled = CompressedLayer.update, CompressedLayer.take

    def update(layer: CompressedLayer, *args: Any, **options: Any) -> Any:
        nonlocal waiting
        waiting += 1
        peaks.append(waiting)
        return stored(layer, *args, **options)

    def take(layer: CompressedLayer, left: Any) -> None:
        nonlocal waiting
        waiting -= 1
        settled(layer, left)

    monkeypatch.setattr(CompressedLayer, "update", update)
    monkeypatch.setattr(CompressedLayer, "take", take)
    forwards_on_cpu(RECIPES["uniform"], 8)
    assert waiting == 0 and max(peaks) == most and peaks == [n % most + 1 for n in range(8)]


def forwards_on_cpu(made: Recipe, layers: int) -> int:
    """Run a prompt; the bytes of the keys and values of a layer before anything is evicted."""
    model = zoo.model("llava", num_hidden_layers=layers)
    feed, config = zoo.inputs("llava"), model.config.text_config
    with accelerated(model, made):
        model(**feed, use_cache=True)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return int(feed["input_ids"].numel()) * 2 * width * 4


# by choice: one for every form that is read as it is stored
READ = [("heads", "image"), ("heads", "uneven"), ("kivi", "image"), ("heads and packed", "image")]


@pytest.mark.parametrize(("name", "kind"), few(READ, READ[:1]))
def test_a_step_that_reads_what_is_stored_needs_no_mask_and_no_sums(name: str, kind: str) -> None:
    """A launch above the bare model: partial results are merged. The index grows when somebody looks at it."""
    bare, made = launches_a_layer(Recipe("bare", ()), kind), launches_a_layer(RECIPES[name], kind)
    # an earlier step may pack
    steps = slice(2 if name == "heads" else -1, None)
    assert [step - plain for step, plain in zip(made[steps], bare[steps], strict=True)] == [1.0] * len(made[steps])


# by choice: the codecs of the book whose pages Triton's loop reads; vidkv's has a source of its own, launched as often
#: pages that a loop of their own reads
LOOPED = {
    "kivi": {"page": 64, "group": 32, "residual": 0, "bits": 4},
    "calibquant": {"page": 64, "bits": 4},
    "fp8": {"page": 64},
    "think": {"page": 64, "group": 32, "residual": 0},
}


@pytest.mark.parametrize("name", few(LOOPED, ("kivi",)))
def test_a_step_over_pages_with_a_loop_of_their_own_starts_two_more(name: str) -> None:
    """One reads pages, one the rest, and one puts together what both have found; the bare model starts one."""
    made = recipe((name, None, LOOPED[name]))
    few, many, bare, deeper = (
        forwards(which, layers, head_dim=32)[-1] for which in (made, Recipe("bare", ())) for layers in (4, 8)
    )
    assert many.kernels == {"_attend": 8, "_decode": 8, "_merge": 8}
    less, more, plain, deep = (sum(counts.launches.values()) for counts in (few, many, bare, deeper))
    assert (more - less) - (deep - plain) == 4 * 2


#: launches of a step above the bare model's, a layer, of codecs whose pages a tiny prompt fills
# checked by test_a_step_over_packed_pages_launches_little
PACKED = {
    "kivi": 1,
    "kivi, residual": 1,
    "fp8": 1,
    "think": 1,
    "vidkv": 1,
    "vidkv, waves": 37,
    "calibquant": 1,
    "turboquant": 2,
    "qserve": 2,
    "zipcache": 2,
}


@pytest.mark.parametrize("name", few(PACKED, ("turboquant", "zipcache")))
def test_a_step_over_packed_pages_launches_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where queries and values are rotated, or have factors: nothing is done between launches, and nothing waits."""
    read = []

    def noted(*args: Any, pages: Any = None, **options: Any) -> Any:
        read.append(pages is not None)
        return decode_attention(*args, pages=pages, **options)

    monkeypatch.setattr(decoding, "decode_attention", noted)
    made = Recipe("packed", fingerprint.PAGES[name])
    few, many, bare, deeper = (forwards(which, layers)[-1] for which in (made, Recipe("bare", ())) for layers in (4, 8))
    assert any(read)
    less, more, plain, deep = (sum(counts.launches.values()) for counts in (few, many, bare, deeper))
    assert few.waits == many.waits and ((more - less) - (deep - plain)) / 4 == PACKED[name]


def test_every_codec_has_pages_that_a_tiny_prompt_fills() -> None:
    codecs = {name for name in mmaccel.methods() if mmaccel.get_method(name).site == "codec"}
    assert {stage.method for stages in fingerprint.PAGES.values() for stage in stages} == codecs


# by choice: one for every form in which a layer is stored
#: launches of a captured step above the bare model's, a layer
CAPTURED = {
    ("heads", "image"): 0,
    ("heads", "uneven"): 0,
    ("uniform", "image"): 0,
    ("uniform", "uneven"): 0,
    ("kivi", "image"): 0,
    ("heads and packed", "image"): 0,
}


@pytest.mark.parametrize(("name", "kind"), few(CAPTURED, (("heads", "image"),)))
def test_a_captured_step_appends_in_one_launch_and_reads_in_two(name: str, kind: str) -> None:
    """Where the bare model appends in two and reads in one; pages as small as these are read in the same pass."""
    bare = launches_a_layer(Recipe("bare", ()), kind)
    made = launches_a_layer(RECIPES[name], kind, captured=True)
    # an earlier one may have packed
    assert made[-1] - bare[-1] == CAPTURED[name, kind]


class AsItIs:
    """Stands for :class:`mmaccel.runtime.graphs.replay.ReplayedStep`: every step is run as it would be recorded."""

    replays, obstacle = True, ""

    def __init__(self, pinned: Any, token: torch.Tensor, run: Any) -> None:
        self.pinned, self.run = pinned, run

    def __call__(self, token: torch.Tensor) -> Any:
        return self.run(token)


def replayed(made: Recipe, layers: int, kind: str, steps: int) -> list[tuple[int, int]]:
    """Launches and waits from token to token of an answer whose steps would be replayed, by number."""
    counts = []

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        counts.append(gpu.counts.copy())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with mock.patch.multiple(replay, LEAST=1, ReplayedStep=AsItIs), simulated.machine() as gpu:
        model = gpu.put(zoo.model("llava", num_hidden_layers=layers))
        options = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1, "do_sample": False}
        with accelerated(model, made):
            model.generate(**gpu.put(zoo.inputs("llava", kind)), stopping_criteria=[note], **options)
            if made.stages:
                assert model.mmaccel.stats()["captured_steps"] >= steps - 2
    found = [after.since(before) for before, after in zip(counts, counts[1:], strict=False)]
    return [(sum(one.launches.values()), sum(one.waits.values())) for one in found]


# by choice: every policy that reads some keys only, and one on packed pages
#: launches of a captured step above the bare model's, a layer: two that attend, and those that choose
READS = {
    "quest": ((("quest", 0.3, {"page": 3, "least": 1}),), "image", 2),
    "tokenselect": ((("tokenselect", 0.3, {}),), "image", 6),
    "loki": ((("loki", 0.3, {}),), "uneven", 2),
    "squeezed-attention": ((("squeezed-attention", 0.3, {"clusters": 0.3}),), "image", 11),
    "quest on pages": ((("quest", 0.3, {"page": 3, "least": 1}), ("kivi", None, PAGES)), "images", 5),
}


@pytest.mark.parametrize("name", few(READS, ("quest",)))
def test_a_captured_step_that_reads_some_keys_never_waits(name: str) -> None:
    stages, kind, above = READS[name]
    made, bare = recipe(*stages), Recipe("bare", ())
    few, many, plain, deep = (replayed(which, layers, kind, 3)[-1] for which in (made, bare) for layers in (2, 4))
    assert few[1] == many[1] <= plain[1] == deep[1]
    assert ((many[0] - few[0]) - (deep[0] - plain[0])) / 2 == above


@pytest.mark.full
def test_uneven_rows_make_the_host_wait_no_more_often() -> None:
    assert waits(RECIPES["uniform"], 8, "uneven") == waits(RECIPES["uniform"], 4, "uneven")


@pytest.mark.parametrize(
    ("name", "at_once"), [("uniform", True), ("pyramid", True), ("text", True), ("kivi", True), ("heads", False)]
)
def test_a_layer_is_small_before_the_next_one_is_stored_where_its_budget_is_known(
    name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []

    def noted(cls: type[CompressedLayer], what: str) -> None:
        original = getattr(cls, what)

        def call(layer: CompressedLayer, *args: Any, **options: Any) -> Any:
            order.append((what, layer.number))
            return original(layer, *args, **options)

        monkeypatch.setattr(cls, what, call)

    noted(CompressedLayer, "update")
    noted(QuantisedLayer, "pack" if name == "kivi" else "evict")
    with accelerated(helpers.model("llava"), RECIPES[name]) as model:
        model.generate(**helpers.inputs("llava"), max_new_tokens=1)
    stored = [i for i, (what, _) in enumerate(order) if what == "update"]
    small = [i for i, (what, _) in enumerate(order) if what != "update"]
    assert len(stored) == len(small) == 4
    assert (small[0] < stored[1]) == at_once and (small[0] > stored[-1]) == (not at_once)


def test_the_lengths_of_an_index_are_known_as_it_grows() -> None:
    with simulated.machine() as gpu:
        index = KeyIndex(gpu.put({"x": torch.tensor([[-1, 0, 1], [0, 1, 2]])})["x"], True, 3, torch.tensor([[2], [3]]))
        new = gpu.put({"x": torch.tensor([[3, 4], [-1, 4]])})["x"]
        index.extend(new[:, 1:], False, 4)
        assert index.known and index.lengths.tolist() == [[3], [4]]
        index.extend(new, True, 6, torch.tensor([2, 1]))
        assert index.lengths.tolist() == [[5], [5]] and not gpu.counts.waits
        # what nobody knows is asked once
        index.extend(new, True, 8)
        assert not index.known and index.lengths.tolist() == [[7], [6]] and index.lengths.tolist() == [[7], [6]]
        assert sum(gpu.counts.waits.values()) == 1


def two_turns(gpu: simulated.Machine | None, padded: int) -> tuple[torch.Tensor, list[bool], int]:
    """The tokens of a second turn whose last row begins with padding, whether layers are gapless then, and how many masks its
    steps made."""
    tiny, first, second = (
        zoo.model("llava"),
        zoo.inputs("llava", "image", batch=2),
        zoo.inputs("llava", "text", batch=2),
    )
    first, second = dict(first), dict(second)
    second["attention_mask"][1, :padded] = 0
    if gpu is not None:
        tiny, first, second = gpu.put(tiny), gpu.put(first), gpu.put(second)
    with accelerated(tiny, RECIPES["heads"]):
        options = {
            "max_new_tokens": STEPS,
            "min_new_tokens": STEPS,
            "do_sample": False,
            "return_dict_in_generate": True,
        }
        out = tiny.generate(**first, **options)
        feed, _ = helpers.follow(first, out, second)
        masks = []
        hook = tiny.register_forward_pre_hook(lambda *_: masks.append(gpu.counts.copy() if gpu else None))
        out = tiny.generate(**feed, past_key_values=out.past_key_values, **options)
        hook.remove()
        gapless = [layer.gapless for layer in out.past_key_values.layers]
        assert any(layer.ragged is not None for layer in out.past_key_values.layers)
    tokens = out.sequences[:, -STEPS:]
    if gpu is None:
        return tokens, gapless, 0
    steps = gpu.counts.since(masks[1]).launches
    # what grows is no mask
    made = [n for (what, place), n in steps.items() if "kv/index.py" in place and what != "cat"]
    return gpu.numbers(tokens), gapless, sum(made)


@pytest.mark.parametrize("padded", [0, 2])
def test_what_lengths_say_needs_no_mask(padded: int) -> None:
    """Heads that end early are read up to their end; only padding between tokens is hidden by a mask."""
    wanted, *_ = two_turns(None, padded)
    with simulated.machine() as gpu:
        tokens, gapless, masks = two_turns(gpu, padded)
    assert torch.equal(tokens, wanted)
    assert gapless == [not padded] * 4 and (masks > 0) == bool(padded)


def test_what_a_step_reads_is_moved_to_the_device_of_the_layer() -> None:
    with simulated.machine(devices=2) as gpu:
        places = gpu.put({"x": torch.tensor([[True, False, True]])})["x"]
        index = KeyIndex(gpu.put({"x": torch.tensor([[0, 1, 2, 3]])}, "cuda:1")["x"], False, 4)
        keys = gpu.put({"x": torch.arange(4.0).view(1, 1, 4, 1)}, "cuda:1")["x"]
        reading = SparseRead(places)
        assert gpu.numbers(reading.read(index, keys, keys)[0]).flatten().tolist() == [0.0, 2.0, 3.0]
        assert str(reading.index(index).index.device) == "cuda:1"


def test_keys_that_nobody_looks_at_are_not_converted() -> None:
    query, key = torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16()
    attention = LayerAttention(query, key, None, 1.0, torch.ones(1, 5, dtype=torch.bool))
    assert attention.key is key and "full_key" not in vars(attention)
    assert attention.logits(0, 5).dtype == attention.full_key.dtype == torch.float32
