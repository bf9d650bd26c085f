"""What a recipe for the cache may cost on a CPU, counted, so that no other program disturbs it; seconds are in
``benchmarks/cache_speed.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws import helpers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mmaccel import accelerated, recipes
from mmaccel.method import Policy

pytestmark = pytest.mark.usefixtures("no_gradients")

OBSERVING = tuple(
    name
    for name, made in recipes().items()
    if len(made.stages) == 1 and isinstance(method := made.stages[0].build(), Policy) and method.observes
)


def prompt() -> dict[str, torch.Tensor]:
    """A picture, behind text that is longer than a block of the sums."""
    feed = dict(zoo.inputs("llava", "image"))
    ids = torch.cat([torch.full((1, 600), 20), feed["input_ids"]], 1)
    return feed | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def sdpa(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Operations of attention without a mask, of which half is left out."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3]) // 2


def products(name: str) -> int:
    """Operations in products of matrices of a prompt."""
    model, feed = helpers.model("llava"), prompt()
    kernel = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa}
    with FlopCounterMode(display=False, custom_mapping=kernel) as counted, accelerated(model, name):
        model(**feed)
    return counted.get_total_flops()


#: what needs another pass, since it is no sum of the attention over queries
# checked by test_a_prompt_is_multiplied_with_its_keys_once
SECOND_PASS = {
    "compactor": "its attention has no causal mask",
    "noncausal-attention": "its attention has no causal mask",
    "raas": "it compares single entries of the attention with a threshold",
    "raas-decode": "it compares single entries of the attention with a threshold",
}


@pytest.mark.parametrize("name", OBSERVING)
def test_a_prompt_is_multiplied_with_its_keys_once(name: str) -> None:
    """Sums of the attention over queries come from the pass that makes its output; what is no such sum takes one pass more."""
    assert products(name) <= (1.6 if name in SECOND_PASS else 1.15) * products("none")


class Counted(TorchDispatchMode):
    """Counts the operators of torch that run, views among them; reads the count at every token of ``generate``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.at: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))

    def put(self, value: Any) -> None:
        """The prompt comes first, then a token at a time."""
        self.at.append(self.count)

    def end(self) -> None:
        """Nothing to do."""


def operators(name: str, **options: Any) -> float:
    """Operators of the fifth decode step, a layer; those after the first token may be fewer than later ones."""
    model, feed = helpers.model("llava"), prompt()
    with accelerated(model, name, **options), Counted() as counted:
        model.generate(**feed, max_new_tokens=7, do_sample=False, streamer=counted)
    return (counted.at[6] - counted.at[5]) / len(model.model.language_model.layers)


# by choice: recipes whose steps read keys otherwise than the bare model's do
@pytest.mark.parametrize(("name", "options", "most"), [("quest", {"page": 1}, 36), ("adakv", {}, 36), ("kivi", {}, 46)])
def test_a_decode_step_runs_few_operators(name: str, options: dict[str, Any], most: int) -> None:
    """On a CPU a step of a small model costs what starting its operators costs."""
    assert operators(name, **options) <= operators("none") + most
