"""Methods that leave patches out of vLLM's vision towers, or merge tokens in them, answer as on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config")

import both_ways
import delta_nets
import internvl_chat
import tiny
from vllm import LLM

pytestmark = pytest.mark.vllm

#: pictures of one size and of several, windows, experts, DeepStack, tiles with and without a CLS token, blocks of pixel shuffle
FAMILIES = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "llava",
    "llava_next",
    "llava_onevision",
    "llava_next_video",
    "internvl",
    "idefics3",
    "smolvlm",
]
TILED = ("llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm")
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    case for family in FAMILIES for case in ((family, "pixelprune", {}), (family, "tome", {"retain": 0.3}))
]
CASES += [
    ("qwen2_5_vl", ["pixelprune", "divprune"], {"retain": 0.3}),
    ("qwen2_5_vl", ["tome", "divprune"], {"retain": 0.3}),
    ("qwen2_5_vl", "ipcv", {}),
    ("qwen3_vl", "pitome", {"retain": 0.3}),
    ("llava", ["pixelprune", "visionzip"], {"retain": 0.3}),
    ("llava", "evit", {"retain": 0.4}),
    ("llava", "ipcv", {}),
    ("internvl", "pitome", {"retain": 0.3}),
    ("llava_next", "evit", {"retain": 0.4}),
]


@pytest.fixture(autouse=True)
def _single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    delta_nets.patch(monkeypatch)


def tower_tokens(llm: LLM) -> list[int]:
    """The list to which the tokens are added that the MLP of the tower's last layer computes, call by call."""
    seen: list[int] = []

    def watch(model: Any) -> None:
        layer: Any = model.plan.architecture.tower_layers(model)[model.plan.family.feature_layer]
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))

    llm.apply_model(watch)
    return seen


@pytest.mark.parametrize("family, recipe, options", CASES)
def test_answers_of_transformers(family: str, recipe: Any, options: dict[str, Any], models: Path) -> None:
    """And fewer patches in the last layer of the tower; without the recipe, those of the bare model."""
    settings = {"recipe": recipe, "numbering": "transformers", **options}
    with tiny.engine(tiny.folder(family, models), settings) as llm:
        seen, fewer = tower_tokens(llm), 0
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind)
            # of equal patches ipcv takes those that rounding puts first, which is not the same in both
            rows = rows if recipe == "ipcv" else tiny.flat(rows)
            want, bare = tiny.expected(family, rows, recipe, **options), tiny.expected(family, rows)
            assert tiny.served(llm, family, rows) == want != bare, kind
            fewer += sum(seen)
            seen.clear()
            assert tiny.served(llm, family, rows, mmaccel=False) == bare, kind
            fewer -= sum(seen)
            seen.clear()
    # tiles are padded to the one that keeps most
    assert fewer < 0 or (recipe == "pixelprune" and family in TILED and fewer == 0)


@pytest.mark.parametrize("recipe, options", [("pixelprune", {}), ("tome", {"retain": 0.3})])
def test_published_checkpoints_of_internvl(recipe: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Whose tower has other names."""
    settings = {"recipe": recipe, **options}
    with tiny.engine(internvl_chat.folder(tmp_path), settings, trust_remote_code=True) as llm:
        for kind in ("image", "images", "video", "mixed"):
            rows = tiny.flat(tiny.rows(internvl_chat.NAME, kind))
            want = internvl_chat.expected(rows, recipe, **options)
            assert tiny.served(llm, internvl_chat.NAME, rows) == want != internvl_chat.expected(rows), kind


@pytest.mark.parametrize("recipe, options", [("ipcv", {}), ("tome", {"retain": 0.3})])
def test_pictures_that_attend_both_ways(
    recipe: str, options: dict[str, Any], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways.patch(monkeypatch)
    settings = {"recipe": recipe, "positions": "paper", **options}
    with tiny.engine(tiny.folder("gemma3", models), settings, **both_ways.WHOLE) as llm:
        for kind in tiny.kinds("gemma3"):
            rows = tiny.flat(tiny.rows("gemma3", kind))
            want = tiny.expected("gemma3", rows, recipe, positions="paper", **options)
            assert tiny.served(llm, "gemma3", rows) == want != tiny.expected("gemma3", rows), kind


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next"])
def test_merging_in_chunks_from_caches_and_with_budgets_of_their_own(family: str, models: Path) -> None:
    """Requests of one batch differ in budget; the second time nothing is encoded."""
    kind = "mixed" if family == "qwen3_vl" else "images"
    rows = tiny.rows(family, kind)
    half, few = (tiny.expected(family, rows, "tome", retain=retain) for retain in (0.5, 12))
    assert half != few
    small = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    with tiny.engine(tiny.folder(family, models), {"recipe": "tome", "retain": 0.5}, **small) as llm:
        for _ in range(2):
            prompts = [tiny.prompt(family, row, **more) for row in rows for more in ({}, {"retain": 12})]
            out = llm.generate(prompts, tiny.GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in out] == [
                answer for pair in zip(half, few, strict=True) for answer in pair
            ]


def test_patches_left_out_in_chunks_and_from_caches(models: Path) -> None:
    """Prompts with and without patches that are left out, in one batch."""
    rows = tiny.flat(tiny.rows("qwen3_vl", "mixed")) + tiny.rows("qwen3_vl", "mixed")
    want = tiny.expected("qwen3_vl", rows, "pixelprune")
    small = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
    with tiny.engine(tiny.folder("qwen3_vl", models), {"recipe": "pixelprune"}, **small) as llm:
        for _ in range(2):
            assert tiny.served(llm, "qwen3_vl", rows) == want
        with pytest.raises(ValueError, match="has no budget to set"):
            tiny.served(llm, "qwen3_vl", rows[:1], retain=0.5)


@pytest.mark.parametrize("options", [{}, {"threshold": 0.1}, {"threshold": 0.1, "metric": "mae", "anchored": False}])
def test_pixels_that_the_device_normalises(options: dict[str, Any], models: Path) -> None:
    settings = {"recipe": "pixelprune", "numbering": "transformers", **options}
    rows = tiny.flat(tiny.rows("qwen2_5_vl", "mixed"))
    with tiny.engine(tiny.folder("qwen2_5_vl", models), settings, mm_device_do_normalize=True) as llm:
        assert tiny.served(llm, "qwen2_5_vl", rows) == tiny.expected("qwen2_5_vl", rows, "pixelprune", **options)
