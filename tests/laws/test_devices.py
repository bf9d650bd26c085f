"""Law: a device changes nothing, and costs what a device costs, on a simulated machine (see `simulated`).

Every recipe of the registry runs on a model whose tensors say `cuda:N`: no tensor meets one of another device, the tokens
are those of the CPU, and the host does not wait more often because a model has more layers. Nothing here says anything
about speed, half precision, streams or what real kernels compute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import accelerate
import fingerprint
import matrix
import numpy as np
import oracle
import pytest
import simulated
import synthetic
import torch
import zoo
from torch import Tensor

from mmaccel import Recipe, Stage, UnsupportedError, accelerated, get_recipe, prepare, recipes
from mmaccel.method import ExpertMethod, FramesMethod, PreviewMethod, ReactivatingMethod, ReadingPolicy, RetracingMethod

STEPS = 4
FAMILIES = {
    "llava": ("image", "uneven"),
    "llava_next": ("image", "uneven"),
    "qwen2_5_vl": ("image", "video", "uneven"),
    "qwen3_vl": ("image", "video"),
    "internvl": ("image", "video"),
}
METHODS = synthetic.offered()
RECIPES = tuple(name for name, made in recipes().items() if all(stage.method in METHODS for stage in made.stages))

#: tokens before the language model may have weights in it
WEIGHED = "divprune, proportional"

#: a method inside the language model is asked once at the layer it works at, and waited for so often at most
WAITS_A_CUT = 4
#: launches a layer above those of the bare model, at the prompt and in a step, by the sites of a recipe
LAUNCHES = {
    "frames": (0, 0),
    "patches": (0, 0),
    "encoder": (0, 0),
    "projector": (0, 0),
    "layers": (60, 1),
    # what is not read is left out of a copy
    "returning": (60, 4),
    # a layer that is read out passes the output head
    "retracing": (20, 20),
    # tokens are ranked in every layer, and weights looked at in every step
    "experts": (60, 24),
    # a pass of its own through layers, each of which costs what it costs
    "preview": (36, 0),
    "cache": (200, 8),
    "scheduled": (200, 2),
    "reading": (300, 24),
    "codec": (90, 2),
    # with a mask, sdpa attention of transformers repeats keys and values of a prompt for the heads of a group
    "weights": (2, 0),
}


#: launches a layer above those of the bare model at the prompt, where codecs pack all tokens, in pages that these fill: two
#: copies each of what is packed and of what stays, and one launch a side, behind three that rotate it
PACKED = {"kivi": 6, "fp8": 6, "turboquant": 12}
#: the input of the prompt, and whether visual tokens alone are packed
PROMPTS = {"whole": ("image", False), "padded": ("uneven", False), "visual only": ("image", True)}


@dataclass(frozen=True)
class Ran:
    """What a recipe did: the new tokens, counts of the prompt and of every step, how many stages cut inside the language
    model; or the sentence in which it was refused."""

    tokens: Tensor | None = None
    steps: tuple[simulated.Counts, ...] = ()
    cuts: int = 0
    refused: str = ""


@pytest.fixture(autouse=True)
def _without_clip(monkeypatch):
    """Some choose frames, or a region, by a CLIP model of their own, before the processor; tests/test_frames.py has one for
    them."""
    chosen = {
        "pick": lambda self, frames, count: np.arange(count),
        "region": lambda self, frames, retain: (0, 0, 32, 32),
    }
    for kind in synthetic.offered(FramesMethod).values():
        if "clip_model" in {option.name for option in fields(kind)}:
            for name in chosen.keys() & dir(kind):
                monkeypatch.setattr(kind, name, chosen[name])


def feed(family: str, kind: str, worker: Any) -> Any:
    return zoo.inputs(family, kind) if kind == "uneven" else matrix.feed(family, kind, worker)


def halves(model: Any) -> dict[str, int]:
    """A device map with the upper half of the language model on the second device."""
    text = oracle.text_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    upper = {names[id(module)] for module in (*text.layers[len(text.layers) // 2 :], text.norm, model.lm_head)}
    blocks, where = names[id(text.layers)], {}

    def place(path: str, module: Any) -> None:
        if path and not f"{blocks}.".startswith(f"{path}."):
            where[path] = int(path in upper)
            return
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            where[f"{path}.{name}"] = 0
        for name, child in module.named_children():
            place(f"{path}.{name}" if path else name, child)

    place("", model)
    return where


def made(name: str) -> Recipe:
    """The recipe of one of :data:`RECIPES`, or :data:`WEIGHED`."""
    return get_recipe("divprune", proportional="all") if name == WEIGHED else get_recipe(name)


@functools.cache
def ran(family: str, kind: str, name: str, device: str | None = "cuda:0", depth: int = matrix.DEPTH) -> Ran:
    """Run a recipe on the CPU (`device=None`), on one device, or spread over two (`device="both"`)."""
    chosen = matrix.within_reach(made(name))
    worker = prepare(zoo.processor(family), chosen)
    given, model = feed(family, kind, worker), zoo.model(family, num_hidden_layers=depth).requires_grad_(False)
    if device is None:
        return run(model, chosen, worker, given, None)
    with simulated.machine(devices=2) as gpu:
        if device == "both":
            model = accelerate.dispatch_model(model, halves(model), main_device=0, force_hooks=True)
            return run(model, chosen, worker, gpu.put(given), gpu)
        return run(gpu.put(model, device), chosen, worker, gpu.put(given, device), gpu)


def run(model: Any, chosen: Recipe, worker: Any, given: Any, gpu: simulated.Machine | None) -> Ran:
    counts: list[simulated.Counts] = []

    def count(*args: Any) -> None:
        if gpu is not None:
            counts.append(gpu.counts.copy())

    try:
        with accelerated(model, chosen, processor=worker):
            handle = model.register_forward_pre_hook(count)
            out = model.generate(**given, max_new_tokens=STEPS, do_sample=False)
            count()
            handle.remove()
            stats, plan = model.mmaccel.stats(), model.mmaccel.plan
            levels = 0 if plan.chunks is None else len(model.mmaccel.history)
    except UnsupportedError as error:
        return Ran(refused=str(error))
    assert stats["seconds"]["prefill"] > 0 and stats["seconds"]["decode"] > 0
    tokens = out[:, given["input_ids"].shape[1] :]
    steps = tuple(after.since(before) for before, after in zip(counts, counts[1:], strict=False))
    cuts = len({stage["method"] + str(i) for i, stage in enumerate(stats["stages"]) if stage["site"] == "layers"})
    # chunks have more levels in a deeper model
    cuts = levels if levels else cuts
    return Ran(gpu.numbers(tokens) if gpu is not None else tokens, steps, cuts)


def agrees(family: str, kind: str, name: str, device: str) -> Ran:
    """A recipe does on a device what it does on the CPU, or is refused there in the same words."""
    wanted, got = ran(family, kind, name, None), ran(family, kind, name, device)
    assert got.refused == wanted.refused
    if wanted.tokens is not None:
        assert torch.equal(got.tokens, wanted.tokens)
    return got


def sites(name: str) -> set[str]:
    """The sites of a recipe; `scheduled` for a cache that goes on evicting while it decodes, `reading` for one of which every
    step reads a part, `preview` for a method that has a pass of its own, `returning` for one whose tokens come back,
    `retracing` for one that shows tokens again, `experts` for one that skips some; `weights` with proportional attention."""
    chosen = made(name)
    built = [stage.build() for stage in chosen.stages]
    weights = set() if chosen.proportional == "none" else {"weights"}
    return weights | {
        "scheduled"
        if getattr(one, "scheduled", False)
        else "reading"
        if isinstance(one, ReadingPolicy)
        else "preview"
        if isinstance(one, PreviewMethod)
        else "returning"
        if isinstance(one, ReactivatingMethod)
        else "experts"
        if isinstance(one, ExpertMethod)
        else "retracing"
        if isinstance(one, RetracingMethod)
        else one.site
        for one in built
    }


def total(counts: Any) -> int:
    return sum(counts.values())


# ------------------------------------------------------------------------------------------------------- the machine


def test_the_machine_keeps_the_rules_of_devices():
    with simulated.machine(devices=2) as gpu:
        here, there = torch.ones(3, device="cuda:0"), torch.ones(3).to("cuda:1")
        assert str(here.device) == "cuda:0" and str(there.device) == "cuda:1"
        for mixed in (lambda: here + there, lambda: here + torch.ones(3), lambda: torch.cat([here, torch.ones(3)])):
            with pytest.raises(simulated.DevicesMixed, match="same device"):
                mixed()
        assert (here * torch.tensor(2.0)).sum().item() == 6.0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:2")
        gpu.counts = simulated.Counts()
        torch.tensor([1, 2], device="cuda:0")
        here.to("cuda:1"), here.cpu(), bool(here.any()), here[here > 0], here.nonzero(), here.tolist()
        assert total(gpu.counts.waits) == 6
        gpu.counts = simulated.Counts()
        here[None].expand(2, 3), torch.empty(2, device="cuda:0"), torch.ones(3).to("cuda:0", non_blocking=True)
        assert not gpu.counts.waits and total(gpu.counts.launches) == 1
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream("cuda:1"))
        end.record()
        with pytest.raises(RuntimeError, match="invalid resource handle"):
            begin.elapsed_time(end)


# -------------------------------------------------------------------------------------------------------- one device


@pytest.mark.full
@pytest.mark.square("name", RECIPES, of="kinds")
def test_a_model_on_the_second_device(name):
    got = agrees("llava", "image", name, "cuda:1")
    assert got.refused or any(step.events for step in got.steps)


def test_the_tables_are_of_what_there_is():
    assert {site for name in (*RECIPES, WEIGHED) for site in sites(name)} == set(LAUNCHES)


@pytest.mark.parametrize("name", [*RECIPES, WEIGHED])
def test_what_a_layer_may_cost(name):
    """Waits and events of the host do not grow with layers, and launches are bounded."""
    few, many = (ran("llava", "image", name, depth=depth) for depth in (4, 8))
    assert few.refused == many.refused
    waits_do_not_grow(few, many)
    launches_are_bounded(name, few, many)


def waits_do_not_grow(few: Ran, many: Ran) -> None:
    for number, (less, more) in enumerate(zip(few.steps, many.steps, strict=True)):
        waits = total(more.waits) - total(less.waits)
        if number == 0:
            assert waits <= WAITS_A_CUT * (many.cuts - few.cuts), more.waits - less.waits
        else:
            assert waits == 0, more.waits - less.waits
            assert more.events == less.events == 2


def launches_are_bounded(name: str, few: Ran, many: Ran) -> None:
    bare = [ran("llava", "image", "none", depth=depth) for depth in (4, 8)]
    bounds = [LAUNCHES[site] for site in sites(name)] or [(0, 0)]

    def a_layer(less: Ran, more: Ran, step: int) -> float:
        return (total(more.steps[step].launches) - total(less.steps[step].launches)) / 4

    for step in range(len(few.steps)):
        extra = a_layer(few, many, step) - a_layer(*bare, step)
        assert extra <= sum(bound[step > 0] for bound in bounds)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", PACKED)
def test_layers_share_where_tokens_are_packed(name: str, prompt: str) -> None:
    """Which tokens are packed, where they go and what pages they fill is computed once for all layers."""
    kind, visual_only = PROMPTS[prompt]

    def launched(chosen: Recipe, depth: int) -> int:
        worker = prepare(zoo.processor("llava"), chosen)
        given, model = feed("llava", kind, worker), zoo.model("llava", num_hidden_layers=depth).requires_grad_(False)
        with simulated.machine() as gpu:
            return total(run(gpu.put(model), chosen, worker, gpu.put(given), gpu).steps[0].launches)

    (stage,) = fingerprint.PAGES[name]
    stage = replace(stage, options={**stage.options, "visual_only": visual_only})
    packing, bare = Recipe("stages", (stage,)), get_recipe("none")
    # the first run of all copies rotations to the device
    few, many = ([launched(chosen, depth) for chosen in (packing, bare)] for depth in (4, 8))
    assert 0 < (many[0] - many[1] - few[0] + few[1]) / 4 <= PACKED[name]


#: pages that are small enough for the prompt to fill some, in every form in which codes are stored
# by choice: one for each form
FORMS: dict[str, Stage] = {
    "rotated": fingerprint.PAGES["turboquant"][0],
    "halves": Stage("turboquant", None, {"page": 16, "bits": 2.5}),
    "halves of keys": Stage("turboquant", None, {"page": 16, "bits": 3.5, "value_bits": 4}),
    "with a product and outliers": fingerprint.PAGES["gear"][0],
    "around a mean": fingerprint.PAGES["nsnquant"][0],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_step_reads_pages_as_they_are_stored(form: str) -> None:
    """In two launches a layer more than attention is, and without a wait."""

    def steps(chosen: Recipe, depth: int) -> list[simulated.Counts]:
        worker = prepare(zoo.processor("llava"), chosen)
        given, model = feed("llava", "image", worker), zoo.model("llava", num_hidden_layers=depth).requires_grad_(False)
        with simulated.machine() as gpu:
            return list(run(gpu.put(model), chosen, worker, gpu.put(given), gpu).steps[2:])

    packing, bare = Recipe("stages", (FORMS[form],)), get_recipe("none")
    few, many = ([steps(chosen, depth) for chosen in (packing, bare)] for depth in (4, 8))
    for mine, plain, more, more_plain in zip(*few, *many, strict=True):
        launches = [total(x.launches) for x in (mine, plain, more, more_plain)]
        assert 0 < launches[2] - launches[3] - launches[0] + launches[1] <= 4 * LAUNCHES["codec"][1]
        assert total(more.waits) == total(mine.waits)


# ------------------------------------------------------------------------------------------------------- two devices


@pytest.mark.parametrize("name", [*RECIPES, WEIGHED])
def test_a_model_spread_over_two_devices(name):
    agrees("qwen2_5_vl", "video", name, "both")


# -------------------------------------------------------------------------------------------------- the whole square


@pytest.mark.full
@pytest.mark.square(
    ("family", "name", "kind"),
    oracle.in_turn(oracle.families_in_turn(RECIPES, 2, tuple(FAMILIES)), lambda family: FAMILIES[family]),
)
def test_every_recipe_on_every_family(family, name, kind):
    agrees(family, kind, name, "cuda:0")
    if kind == FAMILIES[family][-1]:
        # the hardest input of the family: a padded batch or a clip
        agrees(family, kind, name, "both")


def test_every_method_is_in_a_recipe():
    assert {stage.method for name in RECIPES for stage in get_recipe(name).stages} >= set(METHODS)


def test_a_step_that_reads_rotated_pages_copies_nothing_to_the_device() -> None:
    """Else it could not be captured as a CUDA graph."""
    chosen = Recipe("stages", fingerprint.PAGES["turboquant"])
    worker = prepare(zoo.processor("llava"), chosen)
    given, model = feed("llava", "image", worker), zoo.model("llava").requires_grad_(False)
    with simulated.machine() as gpu:
        ran = run(gpu.put(model), chosen, worker, gpu.put(given), gpu)
    assert ran.tokens is not None and len(ran.steps) == STEPS
    assert not [step.moved for step in ran.steps[1:] if any(way == "to device" for way, _ in step.moved)]
