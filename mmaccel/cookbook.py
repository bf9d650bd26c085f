"""Papers that span sites, as recipes by name with the papers' defaults.

Layers in papers are counted in models of 28 or 32; the functions here scale them to any ``depth``:
``accelerate_vlm(model, cookbook.aim(depth=36))``. A paper of one method is the recipe of that method and needs no entry.
"""

from __future__ import annotations

from .recipe import Recipe, Stage, add_recipe


def aim(depth: int = 28) -> Recipe:
    """AIM: merge frames to a quarter, then prune by page rank over the second half of the layers, down to one token.

    ``retain`` is what is left at the end; with it the pruning stops there. The paper's schedule for 28 layers keeps
    ``1 - (l - 13) / 8`` of the merged tokens behind each layer ``l`` from 14 on.
    """
    shares = [0.25 * (1 - step / 8) for step in range(1, 8)]
    budgets = [*shares, 1]
    stages = {_scaled(15 + i, 28, depth): Stage("aim-pagerank", share) for i, share in enumerate(budgets)}
    return Recipe(
        "aim",
        (Stage("aim-merge", 0.25), *_at_layers(stages)),
        summary="neighbouring tokens merged to a quarter, then pruned by page rank over the second half of the layers",
        paper="arXiv 2412.03248",
    )


def holitom(depth: int = 28) -> Recipe:
    """HoliTom: temporal segments merged before the language model, half of what is left merged at layer 18 of 28.

    ``retain`` is what is left at the end. The paper names its budgets (25, 20, 15 and 10 %) after the outer merging.
    """
    return Recipe(
        "holitom",
        (Stage("holitom-merge", 0.25), *_at_layers({_scaled(18, 28, depth): Stage("holitom-inner", 0.125)})),
        summary="static stretches of a clip merged, then half of the rest merged inside the language model",
        paper="arXiv 2505.21334",
    )


def mustdrop(depth: int = 32) -> Recipe:
    """MustDrop, prefill stage: the dual attention filter after layers 2, 6, 10 and 14 of 32, thresholds for 192 of 576.

    The thresholds decide; ``retain`` puts a ceiling on what the last filter leaves. The vision stage is not part of it.
    """
    filters: dict[int, Stage] = {
        _scaled(layer, 32, depth): Stage("mustdrop-filter", 1.0, {"adaptive": True}) for layer in (3, 7, 11, 15)
    }
    return Recipe(
        "mustdrop",
        _at_layers(filters),
        positions="paper",
        summary="tokens that no text attends to dropped at four layers, as thresholds decide (prefill stage)",
        paper="arXiv 2411.10803",
    )


def _scaled(layer: int, of: int, depth: int) -> int:
    """The layer of ``depth`` that stands where ``layer`` stands in ``of``; a method needs one layer in front of it."""
    return min(max(1, int(layer * depth / of + 0.5)), max(1, depth - 1))


def _at_layers(stages: dict[int, Stage]) -> tuple[Stage, ...]:
    """The stages with their layers; where a shallow model joins several, the last of them is left."""
    return tuple(
        Stage(stage.method, stage.retain, {**stage.options, "layer": layer}) for layer, stage in sorted(stages.items())
    )


for _recipe in (aim(), holitom(), mustdrop()):
    add_recipe(_recipe)
