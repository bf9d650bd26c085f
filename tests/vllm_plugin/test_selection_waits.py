"""How often the host waits for the device while it selects tokens for vLLM, counted on a simulated machine."""

from __future__ import annotations

import functools

import simulated
import torch
import zoo

from mmaccel.errors import UnsupportedError
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.settings import Settings
from mmaccel.method.registry import methods
from mmaccel.recipe import get_recipe
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower.taps import Taps

# by choice: they go on in each picture until its content says that they are done
ONE_BY_ONE = {"apet-merge", "forestprune", "kitoke", "moviechat", "moviechat-memory", "prunesid", "restore-merge"}
ONE_BY_ONE |= {"streamdvc", "tempme", "vcast"}


@functools.cache
def _plans() -> dict[str, ServingPlan]:
    """The methods that vLLM can be given and that look at tokens alone, each with its default budget."""
    architecture = ARCHITECTURES["Qwen2_5_VLForConditionalGeneration"]
    config, found = zoo.model("qwen2_5_vl").config, {}
    for name in sorted(methods()):
        try:
            plan = ServingPlan(Settings(get_recipe(name)), config, architecture)
        except UnsupportedError:
            continue
        if plan.reduces and not plan.wanted and not plan.inside:
            found[name] = plan
    return found


def _waits(plan: ServingPlan, count: int) -> int:
    grid = {"image_grid_thw": torch.tensor([[1, 16, 16]] * count)}
    pictures = plan.pictures("image", grid, 64 * count)
    kept = [plan.count("image", picture, None).total for picture in pictures]
    with simulated.machine() as gpu:
        # alike, so that all are done as soon as one is
        rows = [torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to("cuda:0") for _ in range(count)]
        before = gpu.counts.copy()
        plan.reduce("image", pictures, rows, kept, None, VisionOutput(grid, 64 * count), Taps(plan.family, ()))
        return sum(gpu.counts.since(before).waits.values())


def test_a_batch_of_pictures_waits_for_the_device_as_often_as_one() -> None:
    """A wait of each picture would stop the scheduler's steps as often."""
    waits = {name: [_waits(plan, count) for count in (1, 4)] for name, plan in _plans().items()}
    assert {name for name, (one, four) in waits.items() if four > one} == ONE_BY_ONE
    assert waits["divprune"] == [1, 1]
