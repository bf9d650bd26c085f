"""Every architecture with a recipe answers in vLLM as in transformers, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.config")

import both_ways
import delta_nets
import internvl_chat
import random_selectors
import tiny
import zoo
from vllm import SamplingParams

from mmaccel import accelerate_vlm
from mmaccel.families import family_of
from mmaccel.method.selector import ModelFingerprint

pytestmark = pytest.mark.vllm

#: a method that chooses, one that merges by cells, and one that looks into the tower
RECIPES = [("divprune", 0.25), ("pool", 0.25), ("visionzip", 0.3)]
FAMILIES = ["qwen3_vl", "qwen3_5", "llava_next", "llava_onevision", "internvl"]


#: the others run with one of them
CASES = [(family, *recipe) for family in FAMILIES for recipe in RECIPES]
#: with transformers 5.20, which vLLM 0.33 takes
NEWER = tuple(name for name in ("minicpmv4_6",) if name in zoo.FAMILIES)
SIMPLE = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "llava",
    "llava_next_video",
    "mistral3",
    "idefics3",
    "smolvlm",
    "paddleocr_vl",
    "lfm2_vl",
    "granite4_vision",
    *NEWER,
)
CASES += [(family, *RECIPES[0]) for family in SIMPLE]
#: those whose pictures attend in both directions
BOTH_WAYS = ("gemma3", "gemma4", "gemma4_unified")


@pytest.fixture(autouse=True)
def _single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    delta_nets.patch(monkeypatch)


@pytest.mark.parametrize("family, recipe, retain", CASES)
def test_answers_of_transformers(family: str, recipe: str, retain: float, models: Path) -> None:
    # text behind a clip of Qwen2-VL or Qwen2.5-VL stands elsewhere in vLLM
    numbered = {"recipe": recipe, "retain": retain, "numbering": "transformers"}
    with tiny.engine(tiny.folder(family, models), numbered) as llm:
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind)
            assert tiny.served(llm, family, rows) == tiny.expected(family, rows, recipe, retain=retain), kind


@pytest.mark.parametrize("family, recipe, retain", [("gemma3", *recipe) for recipe in RECIPES])
def test_kept_tokens_of_a_picture_attend_to_each_other_both_ways(
    family: str, recipe: str, retain: float, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = both_ways.patch(monkeypatch)
    _alike_both_ways(family, recipe, tiny.kinds(family), models, retain)
    # both pictures of a prompt, reduced from 16 tokens each
    assert [1 + last - first for first, last in ranges] == [round(16 * retain)] * 2


def _alike_both_ways(family: str, recipe: str, kinds: list[str], models: Path, retain: float) -> None:
    settings = {"recipe": recipe, "retain": retain, "positions": "paper"}
    with tiny.engine(tiny.folder(family, models), settings, **both_ways.WHOLE) as llm:
        for kind in kinds:
            rows = tiny.rows(family, kind)
            want = tiny.expected(family, rows, recipe, retain=retain, positions="paper")
            assert tiny.served(llm, family, rows) == want, kind


@pytest.mark.parametrize("recipe", ["divprune", "uniform", "pool"])
@pytest.mark.parametrize("family", BOTH_WAYS[1:])
def test_frames_of_a_clip_attend_both_ways_and_text_between_them_does_not(
    family: str, recipe: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips want recipes whose numbers of kept tokens are known of every frame. Layers without a window of the unified model
    attend both ways in transformers, and in vLLM one way."""
    ranges = both_ways.patch(monkeypatch, clamped=True, everywhere=family != "gemma4")
    kinds = ["image", "images"] if recipe == "divprune" else tiny.kinds(family)
    _alike_both_ways(family, recipe, kinds, models, 0.25)
    # pictures of 63 and 65 tokens, then frames of 63
    assert {1 + last - first for first, last in ranges} <= {16, 12, 15} and len(ranges) == (2 if len(kinds) == 2 else 8)


def test_clips_are_refused_where_text_between_frames_would_see_what_follows(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways.patch(monkeypatch, clamped=True, everywhere=False)
    settings = {"recipe": "divprune", "retain": 0.25, "positions": "paper"}
    rows = tiny.rows("gemma4", "mixed")
    with tiny.engine(tiny.folder("gemma4", models), settings, **both_ways.WHOLE) as llm:
        with pytest.raises(ValueError, match=r'keep all of them by {"retain": {"video": 1.0}}'):
            tiny.served(llm, "gemma4", rows)
        for whole in ({"retain": 1.0}, {"mmaccel": False}):
            assert tiny.served(llm, "gemma4", rows, **whole) == tiny.expected("gemma4", rows)
        few = tiny.served(llm, "gemma4", rows, retain={"video": 1.0})
        assert few != tiny.expected("gemma4", rows)


def test_crops_are_reduced_each_by_itself(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a recipe says of each how many tokens stay."""
    both_ways.patch(monkeypatch)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2}
    wide = ([zoo.image(96, 32, 0)], [], zoo.QUESTION)
    recipe: dict[str, Any] = {"recipe": "uniform", "retain": 0.25, "positions": "paper"}
    with tiny.engine(tiny.folder("gemma3", models), recipe, **both_ways.WHOLE) as llm:
        lengths = [tiny.length(llm, "gemma3", wide, retain=retain, **crops) for retain in (1.0, 0.25)]
        answer = tiny.served(llm, "gemma3", [wide], **crops)
    # the picture and two crops of 16 tokens
    assert lengths[0] - lengths[1] == 3 * 12
    words = {"text": [tiny.prompt("gemma3", wide)["prompt"]], "return_tensors": "pt"}
    inputs = zoo.processor("gemma3")(images=wide[0], images_kwargs=crops, **words)
    made = accelerate_vlm(tiny.model("gemma3"), processor=zoo.processor("gemma3"), **recipe)
    out = made.generate(**inputs, max_new_tokens=tiny.TOKENS, min_new_tokens=tiny.TOKENS, do_sample=False)
    assert answer == [out[0, inputs["input_ids"].shape[1] :].tolist()]


def test_crops_are_refused_where_text_between_them_would_see_what_follows(models: Path) -> None:
    settings = {"recipe": "divprune", "retain": 0.25, "positions": "paper"}
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2}
    wide = ([zoo.image(96, 32, 0)], [], zoo.QUESTION)
    with tiny.engine(tiny.folder("gemma3", models), settings) as llm:
        with pytest.raises(ValueError, match="do_pan_and_scan=False"):
            tiny.served(llm, "gemma3", [wide], **crops)
        rows = tiny.rows("gemma3", "image")
        assert len(tiny.served(llm, "gemma3", rows)) == len(rows)
    with tiny.engine(tiny.folder("gemma3", models), {"recipe": "none"}) as llm:
        assert len(tiny.served(llm, "gemma3", [wide], **crops)) == 1


@pytest.mark.parametrize("recipe, retain", [("none", None), ("divprune", 0.25), ("visionzip", 0.3)])
def test_published_checkpoints_of_internvl_answer_as_on_transformers(
    recipe: str, retain: float | None, tmp_path: Path
) -> None:
    options = {} if retain is None else {"retain": retain}
    with tiny.engine(internvl_chat.folder(tmp_path), {"recipe": recipe, **options}, trust_remote_code=True) as llm:
        for kind in ("image", "images", "video", "mixed"):
            rows = tiny.rows(internvl_chat.NAME, kind)
            assert tiny.served(llm, internvl_chat.NAME, rows) == internvl_chat.expected(rows, recipe, **options), kind


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_of_nothing_answers_as_the_bare_model(family: str, models: Path) -> None:
    with tiny.engine(tiny.folder(family, models), {"recipe": "none"}) as llm:
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind)
            assert tiny.served(llm, family, rows) == tiny.expected(family, rows), kind


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "internvl"])
def test_clips_whose_frames_stand_apart_in_chunks_from_caches_and_with_budgets_of_their_own(
    family: str, models: Path
) -> None:
    """Chunks end inside a clip's range; the second time nothing is encoded; requests of one batch differ in budget."""
    rows = tiny.rows(family, "video")
    tenth, half = (tiny.expected(family, rows, "divprune", retain=retain) for retain in (0.1, 0.5))
    assert tenth != half
    place = tiny.folder(family, models)
    small = {"max_num_batched_tokens": 16, "enable_chunked_prefill": True}
    with tiny.engine(place, {"recipe": "divprune", "retain": 0.5}, **small) as llm:
        for _ in range(2):
            assert tiny.served(llm, family, rows) == half
            assert tiny.served(llm, family, rows, retain=0.1) == tenth
        lengths = [tiny.length(llm, family, rows[0], retain=retain) for retain in (0.1, 0.5, 1.0)]
    visual = tiny.visual(family, rows[0])
    assert [lengths[2] - length for length in lengths] == [
        visual - round(visual * 0.1),
        visual - round(visual * 0.5),
        0,
    ]


@pytest.mark.parametrize("family, frames", [("qwen3_vl", 2), ("internvl", 1)])
def test_clips_of_one_step_with_text_around_their_placeholders(family: str, frames: int, models: Path) -> None:
    rows = [([], [zoo.clip(frames, 64, 48, seed=seed)], zoo.QUESTION) for seed in range(3)]
    with tiny.engine(tiny.folder(family, models), {"recipe": "divprune", "retain": 0.25}) as llm:
        assert tiny.served(llm, family, rows) == tiny.expected(family, rows, "divprune", retain=0.25)


@pytest.mark.parametrize("family", ["pixtral", "lfm2_vl", "granite4_vision", *NEWER])
def test_pictures_in_chunks_from_caches_and_with_budgets_of_their_own(family: str, models: Path) -> None:
    """A LLaVA with the tower of Pixtral, whose rows end in marks that are text; tiles with text between them in front of
    convolutions; features for several layers."""
    # vLLM's cache of encoded pictures is as large, and must hold one
    size = 48 if family == "lfm2_vl" else 16
    place, small = tiny.folder(family, models), {"max_num_batched_tokens": size, "enable_chunked_prefill": True}
    with tiny.engine(place, {"recipe": "divprune", "retain": 0.5}, **small) as llm:
        for kind in ("image", "images"):
            rows = tiny.rows(family, kind)
            for _ in range(2):
                for retain in (0.5, 0.1):
                    want = tiny.expected(family, rows, "divprune", retain=retain)
                    assert tiny.served(llm, family, rows, retain=retain) == want


@pytest.mark.skipif(not NEWER, reason="transformers before 5.20 encodes slices of one size")
def test_pictures_from_the_cache_get_the_number_that_they_have_in_their_prompt(models: Path) -> None:
    """The text of MiniCPM-V says it in front of each picture and clip."""
    family = "minicpmv4_6"
    pictures = [picture for shown, _, _ in tiny.rows(family, "images") for picture in shown]
    clips = [clip for _, (clip,), _ in tiny.rows(family, "video")]
    shown = [([0], [1]), ([1, 0], [1, 0]), ([5, 4, 3, 2, 1, 0] * 2, [])]
    rows = [([pictures[i] for i in some], [clips[i] for i in others], zoo.QUESTION) for some, others in shown]
    settings = {"recipe": "divprune", "retain": 0.5}
    many = {"limit_mm_per_prompt": {"image": 12, "video": 2}, "max_num_batched_tokens": 128}
    with tiny.engine(tiny.folder(family, models), settings, **many) as llm:
        for retain in (0.5, 0.25):
            # one after the other: each finds what those before it left in the cache
            made = [tiny.served(llm, family, [row], retain=retain)[0] for row in rows]
            assert made == tiny.expected(family, rows, "divprune", retain=retain)


def test_a_recurrent_state_is_resumed_from_the_prefix_cache(models: Path) -> None:
    """vLLM keeps the state of delta nets at the ends of its blocks, here of 640 tokens; each prompt is longer than one."""
    greedy = SamplingParams(temperature=0.0, max_tokens=tiny.TOKENS, ignore_eos=True)
    with tiny.engine(tiny.folder("qwen3_5", models), {"recipe": "divprune", "retain": 0.5}) as llm:
        for kind in ("image", "mixed"):
            rows = [(*media, question * 60) for *media, question in tiny.rows("qwen3_5", kind)]
            want = tiny.expected("qwen3_5", rows, "divprune", retain=0.5)
            for again in (False, True):
                out = llm.generate([tiny.prompt("qwen3_5", row) for row in rows], greedy, use_tqdm=False)
                assert [list(one.outputs[0].token_ids) for one in out] == want, kind
                assert all(bool(one.num_cached_tokens) == again for one in out), kind


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's delta nets want a CPU with bfloat16")
@pytest.mark.parametrize("recipe, options", [("none", {}), ("divprune", {"retain": 0.25})])
def test_delta_nets_of_vllm_itself(
    recipe: str, options: dict[str, float], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where only first tokens can be compared: what follows differs with the order of sums."""
    monkeypatch.undo()
    with tiny.engine(tiny.folder("qwen3_5", models), {"recipe": recipe, **options}, dtype="bfloat16") as llm:
        for kind in tiny.kinds("qwen3_5"):
            rows = tiny.rows("qwen3_5", kind, 10)
            pairs = zip(
                tiny.served(llm, "qwen3_5", rows),
                tiny.expected("qwen3_5", rows, recipe, torch.bfloat16, **options),
                strict=True,
            )
            assert sum(ours[0] == theirs[0] for ours, theirs in pairs) >= 9, kind


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_selectors_that_do_not_read_the_question(family: str, models: Path, tmp_path: Path) -> None:
    """With residuals, which carry what dropped tokens showed."""
    fingerprint = ModelFingerprint.of(family_of(tiny.model(family)))
    random_selectors.network(fingerprint.width, question=False, residual=True).save(tmp_path, fingerprint, {})
    settings = {"recipe": "learned", "retain": 0.25, "selector": str(tmp_path), "numbering": "transformers"}
    with tiny.engine(tiny.folder(family, models), settings) as llm:
        for kind in tiny.kinds(family):
            rows = tiny.rows(family, kind)
            want = tiny.expected(family, rows, "learned", retain=0.25, selector=str(tmp_path))
            assert tiny.served(llm, family, rows) == want != tiny.expected(family, rows, "spacetime", retain=0.25), kind


def test_all_places_of_a_clip_keep_their_positions(models: Path) -> None:
    """Where a budget drops nothing, a prompt whose clip is one range of placeholders has the positions of the bare one."""
    rows = tiny.rows("qwen3_vl", "mixed")
    with tiny.engine(tiny.folder("qwen3_vl", models), {"recipe": "divprune", "retain": 1.0}) as llm:
        assert tiny.served(llm, "qwen3_vl", rows) == tiny.expected("qwen3_vl", rows)
