"""How often the host waits for the device while it selects tokens for vLLM."""

from __future__ import annotations

import pytest
import simulated
import torch
import zoo

from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.settings import Settings
from mmaccel.recipe import get_recipe
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower.taps import Taps


@pytest.mark.parametrize("which", ["divprune", "pool", "uniform", "spacetime", "otprune"])
def test_a_batch_of_pictures_waits_for_the_device_as_often_as_one(which: str) -> None:
    """Counted on a simulated machine; a wait of each picture would stop the scheduler's steps as often."""
    ours, waits = _plan(which), []
    taps = Taps(ours.family, ())
    for count in (1, 4):
        grid = {"image_grid_thw": torch.tensor([[1, 16, 16]] * count)}
        pictures = ours.pictures("image", grid, 64 * count)
        kept = [ours.count("image", picture, None).total for picture in pictures]
        with simulated.machine() as gpu:
            rows = [torch.randn(64, 8, device="cuda:0") for _ in range(count)]
            before = gpu.counts.copy()
            ours.reduce("image", pictures, rows, kept, None, VisionOutput(grid, 64 * count), taps)
            waits.append(gpu.counts.since(before).waits)
    assert waits[0] == waits[1]
    assert which != "divprune" or sum(waits[0].values()) == 1


def _plan(which: str) -> ServingPlan:
    architecture = ARCHITECTURES["Qwen2_5_VLForConditionalGeneration"]
    return ServingPlan(Settings(get_recipe(which, retain=0.25)), zoo.model("qwen2_5_vl").config, architecture)
