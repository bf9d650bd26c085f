"""Tiny models of the zoo as folders that vLLM can load, vLLM's answers about them, and those of transformers.

The models are the zoo's with heads of 32 channels, the least that vLLM's attention takes on a CPU. Engines run in this
process and are taken down one after the other.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from PIL import Image
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from mmaccel import accelerate_vlm

TOKENS = 8
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}
#: of M-RoPE, for heads of 32 channels
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
#: how every answer is made
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
#: kinds that vLLM does not take
ONLY = {"llava_next_video": {"image", "images", "mixed"}, "smolvlm": {"video"}}
#: a prompt's pictures, clips and question
Row = tuple[list[Image.Image], list[np.ndarray], str]


#: vLLM pools frames of LLaVA-NeXT-Video only where a tower's side is as long as a patch has pixels
zoo._TABLE["llava_next_video"] = dataclasses.replace(
    zoo._TABLE["llava_next_video"],
    config=zoo._llava_like("llava_next_video", "LlavaNextVideoConfig", 56, zoo.NEXT_PINPOINTS),
    processor=zoo._real(
        "llava_next_video",
        "LlavaNextVideoProcessor",
        image_processor=zoo._part(
            "LlavaNextImageProcessor", image_grid_pinpoints=zoo.NEXT_PINPOINTS, **zoo._clip_sizes(56)
        ),
        video_processor=zoo._part("LlavaNextVideoVideoProcessor", **zoo._clip_sizes(56)),
        **zoo.CLIP_SELECTION,
    ),
)


zoo._TABLE["gemma3"] = dataclasses.replace(zoo._TABLE["gemma3"], extra_tokens=("\n\n", "\n\n\n", "\n\n\n\n"))


def _change(family: str, change: Callable[[Any], object]) -> None:
    """Change a configuration of the zoo to one that vLLM knows."""
    build = zoo._TABLE[family].config

    def changed(overrides: dict[str, Any], vocabulary: int) -> Any:
        config = build(overrides, vocabulary)
        change(config)
        return config

    zoo._TABLE[family] = dataclasses.replace(zoo._TABLE[family], config=changed)


# vLLM knows one width of the inside of a Q-Former
_change("granite4_vision", lambda config: setattr(config.qformer_config, "intermediate_size", 3072))
# and pictures of Gemma 4 by what its configuration says
_change("gemma4", lambda config: setattr(config.vision_config, "default_output_length", 70))
_change("gemma4_unified", lambda config: setattr(config.vision_config, "num_soft_tokens", 70))
# and language models of LFM2 that score with their embeddings
_change("lfm2_vl", lambda config: [setattr(c, "tie_word_embeddings", True) for c in (config, config.text_config)])


def _overrides(family: str) -> dict[str, Any]:
    if family in ("pixtral", "mistral3"):
        return {**WIDE, "head_dim": 32}
    if family in ("glm4v", "glm4v_moe", "glm_ocr"):
        # without the bias, which all published models have, vLLM leaves out what transformers always adds
        half = {**SECTIONS, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
        return {**WIDE, "rope_parameters": half, "attention_bias": True, "head_dim": 32, "use_qk_norm": False}
    if family.startswith("gemma4"):
        # the heads of layers without windows
        return {**WIDE, "head_dim": 32}
    if family == "gemma3":
        return {**WIDE, "head_dim": 32, "query_pre_attn_scalar": 32}
    if family == "paddleocr_vl":
        return {**WIDE, "head_dim": 32, "rope_parameters": SECTIONS}
    if family == "lfm2_vl":
        return {**WIDE, "conv_dim": 64, "block_dim": 64}
    if family.startswith(("qwen3_5", "minicpmv")):
        # vLLM's own delta nets take the size of published models
        return {**WIDE, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if not family.startswith("qwen"):
        return WIDE
    rope = {**SECTIONS, "mrope_interleaved": True} if family.startswith("qwen3") else SECTIONS
    # of the experts of a token, which transformers always makes sum to one
    experts = {"norm_topk_prob": True} if family.endswith("_moe") else {}
    return {**WIDE, "rope_parameters": rope, **experts}


def model(family: str) -> torch.nn.Module:
    made = zoo.model(family, **_overrides(family))
    if family == "paddleocr_vl":
        # transformers and vLLM interpolate the positions of its tower in two ways
        made.model.visual.vision_model.embeddings.interpolation_align_corners = False
    return made


def folder(family: str, parent: Path) -> Path:
    """The model and its processor, saved below ``parent`` once."""
    place = parent / family
    if not place.exists():
        made = model(family)
        made.save_pretrained(place)
        if not family.startswith(("qwen", "internvl", "pixtral", "mistral3", "gemma4", "minicpmv")):
            _name_as_published(place / "model.safetensors")
        if family == "qwen3_vl_moe":
            _turn_experts(place / "model.safetensors")
        zoo.processor(family).save_pretrained(place)
        if family.startswith("qwen3_5"):
            _name_bytes(place / "tokenizer.json")
    return place


def _name_as_published(file: Path) -> None:
    """Towers of CLIP and SigLIP have one level more in the models of the hub than transformers 5 saves."""
    named = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", k): v
        for k, v in load_file(file).items()
    }
    save_file(named, file, {"format": "pt"})


def _turn_experts(file: Path) -> None:
    """Experts of Qwen3-VL-MoE are the other way around in the models of the hub than transformers 5 saves them."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    turned = {k: v.transpose(1, 2).contiguous() if k.endswith(names) else v for k, v in load_file(file).items()}
    save_file(turned, file, {"format": "pt"})


def _name_bytes(file: Path) -> None:
    """Name spaces and line breaks as tokenizers of bytes do: transformers always loads that of Qwen3.5 as one."""
    saved = json.loads(file.read_text())
    names = {" ": "\u0120", "\n": "\u010a"}
    saved["model"]["vocab"] = {names.get(word, word): number for word, number in saved["model"]["vocab"].items()}
    file.write_text(json.dumps(saved))


def kinds(family: str) -> list[str]:
    """What prompts show, of which both take the same. Of several pictures in a prompt LLaVA-OneVision encodes no tiles in
    transformers, but all of them in vLLM."""
    no = {"uneven", "textrow", "text", *(["images"] if family == "llava_onevision" else [])}
    no |= ONLY.get(family, set())
    return [kind for kind in zoo.kinds(family) if kind not in no]


def rows(family: str, kind: str, count: int = 3) -> list[Row]:
    """Prompts of one kind, as `zoo.inputs` has them, each with pictures of its own."""
    spec = zoo._family(family)
    pictures, clips = {"image": (1, 0), "images": (2, 0), "video": (0, 1), "mixed": (1, 1)}[kind]
    return [
        (
            [zoo.image(*spec.sizes[place], 10 * row + place) for place in range(pictures)],
            [zoo.clip(*spec.clip, 10 * row + 5) for _ in range(clips)],
            zoo.QUESTION,
        )
        for row in range(count)
    ]


def flat(given: list[Row]) -> list[Row]:
    """The same prompts with three quarters of the height and two thirds of the width of everything in one colour."""

    def painted(pixels: np.ndarray, row: int) -> np.ndarray:
        *_, height, width, _ = pixels.shape
        out = pixels.copy()
        out[..., : 3 * height // 4, : 2 * width // 3, :] = [200, 40 + row, 90]
        return out

    return [
        ([Image.fromarray(painted(np.array(one), i)) for one in pictures], [painted(one, i) for one in clips], question)
        for i, (pictures, clips, question) in enumerate(given)
    ]


@contextmanager
def engine(place: Path, recipe: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    """vLLM in this process, with a recipe or without the plug-in's doing."""
    overrides = {**options.pop("hf_overrides", {}), **({"mmaccel": recipe} if recipe else {})}
    llm = LLM(
        str(place),
        enforce_eager=True,
        max_num_seqs=4,
        disable_log_stats=True,
        hf_overrides=overrides,
        # with device normalisation one mean and deviation for pictures and clips; the processors of Qwen3-VL have two
        **{"dtype": "float32", "max_model_len": 1024, "mm_device_do_normalize": False, **options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompt(family: str, row: Row, **processing: Any) -> dict[str, Any]:
    """A request of vLLM; ``processing`` becomes its ``mm_processor_kwargs``."""
    pictures, clips, _ = row
    template = {"chat_template": zoo._chat_template(family), "tokenize": False, "add_generation_prompt": True}
    media: dict[str, Any] = {}
    if pictures:
        media["image"] = pictures
    if clips:
        stamped = family == "qwen2_5_vl" or family.startswith(("qwen3", "glm", "gemma4"))
        media["video"] = [(one, _metadata(one)) if stamped else one for one in clips]
    return {
        "prompt": zoo.tokenizer(family).apply_chat_template(zoo.messages(*row), **template),
        "multi_modal_data": media,
        **({"mm_processor_kwargs": processing} if processing else {}),
    }


def _metadata(frames: np.ndarray) -> dict[str, Any]:
    return {**dict(zoo._metadata(frames)), "do_sample_frames": False}


def served(llm: LLM, family: str, given: list[Row], **processing: Any) -> list[list[int]]:
    """The tokens that vLLM answers to each prompt, asked at once."""
    out = llm.generate([prompt(family, row, **processing) for row in given], GREEDY, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in out]


def length(llm: LLM, family: str, row: Row, **processing: Any) -> int:
    """Tokens of a prompt as vLLM's language model reads it."""
    out = llm.generate(prompt(family, row, **processing), SamplingParams(max_tokens=1), use_tqdm=False)
    return len(out[0].prompt_token_ids)


def visual(family: str, row: Row) -> int:
    """Visual tokens of a prompt, unreduced."""
    return int(zoo.visual_mask(family, model(family), zoo.encode(family, [row])["input_ids"]).sum())


def expected(
    family: str, given: list[Row], recipe: str | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> list[list[int]]:
    """The tokens of transformers, one prompt at a time."""
    made = model(family).to(dtype)
    if recipe is not None:
        accelerate_vlm(made, recipe, processor=zoo.processor(family), **options)
    answers = []
    for row in given:
        inputs = zoo.encode(family, [row])
        with torch.no_grad():
            out = made.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        answers.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    return answers
