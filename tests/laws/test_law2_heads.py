"""Law 2 for policies that cut whole heads as a calibration says: dropping their keys = hiding them in these heads."""

from __future__ import annotations

import pytest
import zoo
from laws.test_law2_hiding import holds

from mmaccel import Recipe, Stage

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("name", ("razorattention", "duoattention"))
@pytest.mark.parametrize("family", ("llava", "qwen2_5_vl", "gemma3"))
def test_dropping_the_keys_of_some_heads_is_hiding_them(name: str, family: str) -> None:
    options = {"duoattention": {"sparsity": 0.5, "recent": 2}, "razorattention": {"echo": 0.3, "least": 0}}[name]
    holds(family, zoo.inputs(family, "uneven"), Recipe(name, (Stage(name, None, {"sinks": 1, **options}),)))
