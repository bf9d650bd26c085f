"""The default: which method chooses what, in batches of both."""

from __future__ import annotations

import pytest
import torch
import zoo
from batches import UNITS, batch_of

from mmaccel import accelerated, method, recipe


def test_each_unit_is_reduced_by_the_method_of_its_kind():
    tokens = batch_of()
    count = (tokens.valid.sum(1) + 2) // 3
    kept = method("balanced")().reduce(tokens, count).kept
    assert list(tokens.clips) == [grid[0] > 1 for (grid, _) in UNITS] and 0 < sum(tokens.clips) < len(UNITS)
    different = 0
    for row, clip in enumerate(tokens.clips):
        mine, other = (
            method(name)().reduce(tokens, count).kept[row] for name in ("divprune", "centerclip")[:: 1 - 2 * clip]
        )
        assert torch.equal(kept[row], mine)
        different += not torch.equal(mine, other)
    assert different > 1


@pytest.mark.parametrize("kind, said", [("image", "divprune for pictures"), ("video", "centerclip for clips")])
def test_the_statistics_say_which(kind, said):
    model = zoo.model("qwen2_5_vl")
    with accelerated(model, "balanced", retain=0.5):
        model(**zoo.inputs("qwen2_5_vl", kind))
        stats = model.mmaccel.stats()
    assert f"balanced: {said}, as it keeps most answers there" in stats["notes"]
    assert recipe("balanced").retain == 0.25
