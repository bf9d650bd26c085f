"""Recipes of papers that span sites, with the papers' defaults.

Layers in papers are counted in models of 28 or 32; here they are shares of the depth, so that a recipe fits any model. A
paper of one method is the recipe of that method and needs no entry.
"""

from __future__ import annotations

from .recipe import Recipe, Stage

_MUSTDROP = (
    Stage("mustdrop-merge", 1.0),
    *(
        Stage("mustdrop-filter", 1.0, {"adaptive": True, "protect": 0.08, "layer": layer / 32})
        for layer in (3, 7, 11, 15)
    ),
)

COOKBOOK = (
    Recipe("none", summary="The unaccelerated model, with statistics."),
    Recipe(
        "tinychart",
        # 84 of 2916 tokens go in each of 26 layers
        (Stage("tome", 732 / 2916),),
        summary="tome at a constant pace to a quarter, as in a model for charts that was trained with it",
        paper="arXiv 2404.16635",
    ),
    Recipe(
        "dycoke",
        # of three of four frames the program drops 0.7; every step reads 0.3 of what is left
        (Stage("dycoke-ttm", 0.475), Stage("dycoke-cache", 0.3)),
        summary="tokens that repeat an earlier frame dropped, then every decode step reads the visual keys it attends to",
        paper="arXiv 2411.15024",
    ),
    Recipe(
        "prunevid",
        # of what merging leaves, at most half, the program keeps 0.4 behind layer 10, in the caches of all layers
        (
            Stage("prunevid-merge", 0.5),
            Stage("prunevid-select", 0.2, {"layer": 11 / 32}),
            Stage("mustdrop-cache", None, {"layer": 0}),
        ),
        summary="still places kept once a scene and like tokens merged, then what the question looks at, also in the cache "
        "(retain: what is left then)",
        paper="arXiv 2412.16117",
        anchor=1,
    ),
    Recipe(
        "metok",
        # what strides of 2, 4, 4 and 8 leave of 64 frames in five events, beside a stride of 2; then the program keeps 0.76 of
        # a key event twice and half as much of others once, and caches hold no more than what is left from its layer 3 on
        (
            Stage("metok-merge", 0.42),
            Stage("metok-prune", 0.296, {"layer": 3 / 28, "others": 0.5}),
            Stage("metok-prune", 0.208, {"layer": 10 / 28, "others": 0.0}),
            Stage("metok-prune", 1, {"layer": 19 / 28, "others": 0.0}),
            Stage("mustdrop-cache", None, {"layer": 3 / 28}),
        ),
        summary="events the question asks for pooled least (retain), then kept longest, to one token a clip; later caches hold "
        "that alone",
        paper="arXiv 2506.02850",
        anchor=0,
    ),
    Recipe(
        "aim",
        # the paper's budget is what merging leaves, and pruning goes on from there to nothing: so `retain` is the share that
        # enters the language model, of which every further stage leaves an eighth less
        (
            Stage("aim-merge", 0.25),
            # behind layer l of 28, 1 - (l - 13) / 8 of the merged tokens are left; of the last ones, one a picture
            *(Stage("aim-pagerank", 0.25 * (1 - i / 8), {"layer": (14 + i) / 28}) for i in range(1, 8)),
            Stage("aim-pagerank", 1, {"layer": 22 / 28}),
        ),
        summary="neighbouring tokens merged to a quarter (retain), then pruned to one by page rank over the second half of the "
        "layers",
        paper="arXiv 2412.03248",
        anchor=0,
    ),
    Recipe(
        "framefusion",
        # the program's cost, 0.3 of 28 layers, is what all layers have on average
        (Stage("framefusion-step", 0.3, {"layer": 0.0, "through": 1.0}),),
        summary="similar tokens of neighbouring frames merged layer after layer, then the attended ones kept (retain: the mean "
        "over the layers)",
        paper="arXiv 2501.01986",
    ),
    Recipe(
        "holitom",
        # the paper names its budgets (25, 20, 15 and 10 %) after the outer merging, and half of that is left in the end:
        # `retain` means the end, as in most recipes, so the paper's 25 % is retain=0.125; merging leaves twice as much
        (Stage("holitom-merge", 0.25), Stage("holitom-inner", 0.125, {"layer": 18 / 28})),
        summary="static stretches of a clip merged, then half of the rest in the language model (retain: what is left then)",
        paper="arXiv 2505.21334",
        anchor=1,
    ),
    Recipe(
        "mustdrop",
        # the thresholds, those for 192 of 576, decide; `retain` puts a ceiling on what the last filter leaves
        _MUSTDROP,
        summary="like patches of a window merged, then tokens no text attends to dropped at four layers (thresholds decide)",
        paper="arXiv 2411.10803",
    ),
    Recipe(
        "mustdrop-output-aware",
        (*_MUSTDROP, Stage("mustdrop-cache")),
        summary="mustdrop, and layers before a filter store only what the last filter left",
        paper="arXiv 2411.10803",
    ),
    Recipe(
        "pyramiddrop",
        tuple(Stage("pyramiddrop-step", 0.5**i, {"layer": i / 4}) for i in (1, 2, 3)),
        summary="half of the visual tokens dropped after every quarter of the layers (retain: what is left then)",
        paper="arXiv 2410.17247",
        anchor=2,
    ),
    Recipe(
        "lazyllm-prefill",
        # the paper's three points on Llama 2, behind layers 9, 19 and 28 of 32, of which every one drops three tenths of what
        # reaches it by the attention of the layer before, which is FastV's score
        tuple(Stage("fastv", 0.7**i, {"layer": layer / 32}) for i, layer in enumerate((9, 19, 28), 1)),
        summary="visual tokens the last prompt token attends to, 0.7 of them after each of three layers (retain: what is left "
        "then); none comes back while decoding",
        paper="arXiv 2407.14057",
        anchor=2,
    ),
    Recipe(
        "lazyllm",
        # the same three points
        tuple(Stage("lazyllm-tokens", 0.7**i, {"layer": layer / 32}) for i, layer in enumerate((9, 19, 28), 1)),
        summary="visual tokens the newest token attends to, 0.7 of them after each of three layers (retain: what is left "
        "then); every decode step chooses anew, and dropped ones come back",
        paper="arXiv 2407.14057",
        anchor=2,
    ),
    Recipe(
        "sparsevlm",
        # the program's counts for 192 of 576 on average, 300, 200 and 110, each with its clusters
        tuple(
            Stage("sparsevlm-step", left / 576, {"layer": layer / 32})
            for left, layer in ((309, 3), (204, 7), (113, 16))
        ),
        summary="at three layers the tokens that the question's words about the picture attend to, with means of what is "
        "dropped (retain: what is left then)",
        paper="arXiv 2410.04417",
        anchor=2,
    ),
    Recipe(
        "sparsevlm-plus",
        tuple(
            Stage("sparsevlm-step", left / 576, {"layer": layer / 32, "recycle": 0.0, "heads": 14 / 32})
            for left, layer in ((300, 3), (200, 7), (118, 16))
        ),
        summary="sparsevlm by the heads that look at the picture most, without means (retain: what is left then)",
        paper="arXiv 2410.04417",
        anchor=2,
    ),
    Recipe(
        "vflowopt",
        # the authors' setting for a quarter of the tokens on average over the layers; `retain` is what enters the language
        # model, and the later stages keep their proportion to it
        (
            Stage("vflowopt-merge", 0.265),
            Stage("vflowopt-inner", 0.2605, {"layer": 9 / 28}),
            Stage("vflowopt-inner", 0.2285, {"layer": 18 / 28}),
        ),
        summary="tokens by attention received in the tower, what is dropped of a cell recycled, then fewer at two layers",
        paper="arXiv 2508.05211",
        anchor=0,
    ),
    Recipe(
        "fastkv",
        (
            Stage("fastkv-tokens", 0.2, {"layer": 16 / 32}),
            Stage("snapkv", 0.2, {"window": 8, "kernel": 7, "gqa": "sum"}),
        ),
        summary="from the middle on a fifth of the visual tokens, and of the keys of every layer a fifth of what was there",
        paper="arXiv 2502.01068",
    ),
    Recipe(
        "zipvl",
        # the attention decides; `retain` puts a ceiling on what the last stage leaves
        tuple(Stage("zipvl-tokens", 1.0, {"adaptive": True, "layer": layer / 32}) for layer in (2, 8, 16, 24)),
        summary="before four layers as many visual tokens as hold nearly all attention (which decides how many)",
        paper="arXiv 2410.08584",
    ),
    # --- the cache ---------------------------------------------------------------------------------------------------
    Recipe(
        "pyramidkv",
        (Stage("snapkv", 0.25, {"layer_budget": "pyramid:20"}),),
        summary="snapkv with fewer keys in every higher layer",
        paper="arXiv 2406.02069",
    ),
    Recipe(
        "adakv",
        (Stage("snapkv", 0.25, {"pooling": "max", "kernel": 7, "head_budget": "adaptive:0.2"}),),
        summary="snapkv where the heads of a layer compete for its budget",
        paper="arXiv 2407.11550",
    ),
    Recipe(
        "prefixkv",
        (Stage("observed-attention", 0.25, {"layer_budget": "prefix"}),),
        summary="layers keep the same share of the attention they received",
        paper="arXiv 2412.03409",
    ),
    Recipe(
        "look-m",
        (Stage("h2o", 0.2, {"recent": 0.1, "compact": "pivot"}),),
        summary="text stays, visual keys with little attention are merged into the most alike",
        paper="arXiv 2406.18139",
    ),
    Recipe(
        "meda",
        (Stage("h2o", 0.2, {"layer_budget": "entropy", "recent": 0.1, "compact": "average"}),),
        summary="look-m where layers whose attention is spread more evenly keep more",
        paper="arXiv 2502.17599",
    ),
    Recipe(
        "d2o",
        (
            Stage(
                "h2o",
                0.2,
                {
                    "layer_budget": "variance",
                    "compact": "ema:0.5",
                    "sinks": 4,
                    "recent": 0.1,
                    "joint": True,
                    "every": 16,
                },
            ),
        ),
        summary="budgets by how attention varies in a layer; what leaves, after every 16 steps, is merged if alike enough",
        paper="arXiv 2406.13035",
    ),
    Recipe(
        "h2o-decode",
        (Stage("h2o", 0.2, {"recent": 0.1, "joint": True, "every": 16}),),
        summary="heavy hitters and the newest keys, of text and pictures alike, chosen again after every 16 steps",
        paper="arXiv 2306.14048",
    ),
    Recipe(
        "streaming-llm-decode",
        (Stage("streaming-llm", 0.25, {"joint": True, "every": 16}),),
        summary="four sinks and the newest keys, of text and pictures alike, again after every 16 steps (baseline)",
        paper="arXiv 2309.17453",
    ),
    Recipe(
        "elastic-cache-decode",
        (
            Stage(
                "elastic-cache",
                0.5,
                {"joint": True, "sinks": 1, "recent": 1, "every": 16, "growth": 0.5, "distance": -25},
            ),
        ),
        summary="anchors take up their neighbours; then of 16 new tokens eight keys leave, about 25 from the end",
        paper="arXiv 2407.18121",
    ),
)
