"""Papers that span sites, as recipes by name with the papers' defaults.

Layers in papers are counted in models of 28 or 32; here they are shares of the depth, so that a recipe fits any model. A
paper of one method is the recipe of that method and needs no entry.
"""

from __future__ import annotations

from .recipe import Recipe, Stage, add_recipe

add_recipe(
    Recipe(
        "aim",
        (
            Stage("aim-merge", 0.25),
            # behind layer l of 28, 1 - (l - 13) / 8 of the merged tokens are left; of the last ones, one a picture
            *(Stage("aim-pagerank", 0.25 * (1 - i / 8), {"layer": (14 + i) / 28}) for i in range(1, 8)),
            Stage("aim-pagerank", 1, {"layer": 22 / 28}),
        ),
        summary="neighbouring tokens merged to a quarter, then pruned by page rank over the second half of the layers",
        paper="arXiv 2412.03248",
    )
)
add_recipe(
    Recipe(
        "holitom",
        # the paper names its budgets (25, 20, 15 and 10 %) after the outer merging; half of that is left in the end
        (Stage("holitom-merge", 0.25), Stage("holitom-inner", 0.125, {"layer": 18 / 28})),
        summary="static stretches of a clip merged, then half of the rest merged inside the language model",
        paper="arXiv 2505.21334",
    )
)
add_recipe(
    Recipe(
        "mustdrop",
        # the thresholds, those for 192 of 576, decide; `retain` puts a ceiling on what the last filter leaves
        tuple(Stage("mustdrop-filter", 1.0, {"adaptive": True, "layer": layer / 32}) for layer in (3, 7, 11, 15)),
        summary="tokens that no text attends to dropped at four layers, as thresholds decide (prefill stage)",
        paper="arXiv 2411.10803",
    )
)
