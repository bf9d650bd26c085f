"""The default: which method chooses what, in batches of both."""

from __future__ import annotations

import torch
import zoo
from batches import batch_of

from mmaccel import accelerated, get_method, get_recipe


def test_the_default_is_spacetime():
    tokens = batch_of()
    count = (tokens.valid.sum(1) + 2) // 3
    assert torch.equal(*(get_method(name)().reduce(tokens, count).kept for name in ("balanced", "spacetime")))


def test_the_statistics_say_so():
    model = zoo.model("qwen2_5_vl")
    with accelerated(model, "balanced", retain=0.5):
        model(**zoo.inputs("qwen2_5_vl", "video"))
        stats = model.mmaccel.stats()
    assert "balanced: spacetime, as it keeps most answers" in stats["notes"]
    assert get_recipe("balanced").retain == 0.25
