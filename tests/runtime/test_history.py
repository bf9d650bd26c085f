"""What a call leaves behind of its way through the stages: figures per token, and nothing as large as features."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from tail import few

from mmaccel import Recipe, Stage, accelerated
from mmaccel.method import TokenBatch
from mmaccel.runtime.layers import chunked_prefill as chunks
from mmaccel.runtime.prompt import tokens

pytestmark = pytest.mark.usefixtures("cheap_collections")


def run(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[weakref.ref[torch.Tensor]], dict[str, int]]:
    """The history of a ``generate``; what the methods were given with more than two axes; and the axes of every signal."""
    large: list[weakref.ref[torch.Tensor]] = []
    axes: dict[str, int] = {}

    def batch(**given: Any) -> TokenBatch:
        made = TokenBatch(**given)
        axes.update({name: x.dim() for name, x in made.signals.items()})
        large.extend(weakref.ref(x) for x in (made.features, *made.signals.values()) if x.dim() > 2)
        return made

    for module in (tokens, chunks):
        monkeypatch.setattr(module, "TokenBatch", batch)
    model, processor = zoo.model("llava"), zoo.processor("llava")
    with accelerated(model, recipe, processor=processor):
        model.generate(**zoo.inputs("llava", batch=2), max_new_tokens=2, do_sample=False)
        gc.collect()
        return model.mmaccel.history, large, axes


#: recipes that reduce what the tower or a layer gives
REDUCING = [name for name in oracle.named_recipes() if oracle.fits(name, "llava") and oracle.shortens(name)]
QUICK = ("vtc-cls", "visionzip", "prumerge", "tome", "pool", "fastv", "mustdrop")


@pytest.mark.parametrize("recipe", few(REDUCING, QUICK))
def test_nothing_large_outlives_the_call(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history, large, axes = run(recipe, monkeypatch)
    assert history and all(found() is None for found in large)
    for passage in history:
        assert passage.reduction.kept.dim() == 2
        for figures in passage.signals.values():
            assert figures.dim() == 2 and figures.untyped_storage().nbytes() == figures.nbytes
    # all that says something about single tokens is there, and only that
    shown = {name for passage in history for name in passage.signals}
    assert shown == {name for name, dim in axes.items() if dim == 2 or "attention" in name}


def test_scores_are_sums_over_tower_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(*layers: int) -> torch.Tensor:
        recipe = Recipe("mine", (Stage("vtc-cls", 0.5, {"layers": list(layers)}),))
        (passage,), _, _ = run(recipe, monkeypatch)
        found: torch.Tensor = passage.scores()["cls_attention"]
        assert found.shape == passage.reduction.kept.shape
        return found

    one, other, both = scores(0), scores(1), scores(0, 1)
    torch.testing.assert_close(both, one + other, equal_nan=True)
    assert both.isfinite().any() and both.isnan().any() and not torch.equal(one.nan_to_num(), other.nan_to_num())
