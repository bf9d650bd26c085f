"""Tiny vision language models with random weights, real configurations, real processors, and inputs for them.

Nothing is downloaded. The weights depend on the seed and on the parameter's name alone, so every supported version of
transformers gets the same model. Sequences are short: 16 to about 150 visual tokens a row.

    python tests/zoo.py [family ...]      # build and run everything once, print sizes
"""

from __future__ import annotations

import atexit
import copy
import functools
import math
import shutil
import string
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import random_selectors
import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BatchFeature,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

VIDEO_FPS = 2.0
QUESTION = "what is it?"
PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"


@dataclass(frozen=True)
class Family:
    """What one family needs to be built, and the pictures and clips that suit it."""

    config: Callable[[dict[str, Any], int], PreTrainedConfig]
    """From overrides of the text configuration and the special tokens' ids to the family's configuration."""
    processor: Callable[[], ProcessorMixin]
    tokens: dict[str, str]
    """Attributes of the tokenizer and the special tokens they name."""
    image: str
    """What stands for a picture in the prompt, before the processor expands it."""
    video: str | None = None
    """The same for a clip; None where the family takes none."""
    mixed: bool = False
    """Whether one prompt may hold both."""
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((60, 48), (40, 64))
    """Width and height of the usual picture and of the other one."""
    clip: tuple[int, int, int] = (4, 64, 48)
    """Frames, width and height of a clip."""
    extra_tokens: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    """What the processor is given with pictures, which then are not listed by row; without pictures it is not asked."""


# ---------------------------------------------------------------------------------------------------------- tokenizer


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}IMAGE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@functools.cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a character, left padded, with the family's special tokens and attributes such as `image_token`."""
    spec = _family(family)
    special = list(dict.fromkeys([PAD, BOS, EOS, UNK, *spec.tokens.values(), *spec.extra_tokens]))
    vocabulary = [*special, *string.printable[:95], "\n"]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=4096,
        extra_special_tokens=dict(spec.tokens),
    )
    result.add_special_tokens({"extra_special_tokens": special[4:]})
    return result


def _chat_template(family: str) -> str:
    spec = _family(family)
    return CHAT_TEMPLATE.replace("IMAGE", spec.image).replace("VIDEO", spec.video or "")


# ----------------------------------------------------------------------------------------------------- configurations


def _text(model_type: str, overrides: dict[str, Any], vocabulary: int, **family_defaults: Any) -> PreTrainedConfig:
    """A text configuration of 4 layers; `sliding_window` turns on windows where the text model can have them, and
    `model_type` takes another text model. `rope_parameters` may be given as pairs, which are hashable."""
    overrides = {"model_type": model_type, **overrides}
    model_type = overrides.pop("model_type")
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **family_defaults,
        **overrides,
    }
    if isinstance(overrides.get("rope_parameters"), tuple):
        values["rope_parameters"] = dict(overrides["rope_parameters"])
    if overrides.get("sliding_window") is not None:
        if model_type == "llama":
            model_type = "mistral"
        elif model_type in ("cohere2", "cohere_compass_text", "dots3_note_text", "step3p5"):
            pass
        elif model_type in ("exaone4", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "lfm3"):
            pass
        elif "qwen2" in model_type:
            values = {"use_sliding_window": True, "max_window_layers": 0, **values}
        else:
            raise ValueError(f"the text model {model_type} has no sliding window")
    if model_type in ("llama", "mistral", "qwen3_vl_text", "qwen3_vl_moe_text"):
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return transformers.AutoConfig.for_model(model_type, **values)


def _mrope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **extra}


def _tower(model_type: str, image_size: Any, patch_size: Any, **extra: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.AutoConfig.for_model(
        model_type, **{**sizes, "image_size": image_size, "patch_size": patch_size, **extra}
    )


def _clip_tower(image_size: int) -> PreTrainedConfig:
    return _tower("clip_vision_model", image_size, 7, projection_dim=32)


def _ids(family: str) -> dict[str, int]:
    """Ids of the family's special tokens by the tokenizer's attribute."""
    return {name: tokenizer(family).convert_tokens_to_ids(token) for name, token in _family(family).tokens.items()}


def _llava_like(
    family: str, config: str, image_size: int, pinpoints: list[list[int]] | None = None, **values: Any
) -> Callable[[dict[str, Any], int], PreTrainedConfig]:
    """The configuration of a CLIP and LLaMA family; ``values`` are further fields."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        ids = _ids(family)
        tokens = (image_size // 7) ** 2
        extra: dict[str, Any] = {"image_seq_length": tokens, **values}
        if pinpoints:
            extra["image_grid_pinpoints"] = pinpoints
        if "video_token" in ids:
            extra["video_token_index"] = ids["video_token"]
        return getattr(transformers, config)(
            vision_config=_clip_tower(image_size),
            text_config=_text("llama", overrides, vocabulary),
            image_token_index=ids["image_token"],
            **extra,
        )

    return build


def _fast_vlm(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    width = 16
    # four stages, the last of which attends; its map is a 32nd of the picture on each side
    stages = {"layers": (1, 1, 1, 1), "embed_dims": (width // 2, width // 2, width, 2 * width), "inference_mode": True}
    return transformers.FastVlmConfig(
        vision_config=transformers.TimmWrapperConfig(
            architecture="fastvit_mci0", hidden_size=4 * width, do_pooling=True, global_pool="avg", model_args=stages
        ),
        text_config=_text("qwen2", overrides, vocabulary),
        image_token_index=_ids("fast_vlm")["image_token"],
        image_seq_length=25,
    )


def _llava_onevision(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    ids = _ids("llava_onevision")
    return transformers.LlavaOnevisionConfig(
        vision_config=_tower("siglip_vision_model", 35, 7, vision_use_head=False),
        text_config=_text("qwen2", overrides, vocabulary),
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=ONEVISION_PINPOINTS,
    )


def _qwen(
    family: str, config: str, vision: dict[str, Any], words: dict[str, Any] | None = None, **rope: Any
) -> Callable[..., PreTrainedConfig]:
    """The configuration of a Qwen family: patch 8, merge 2, temporal patch 2; ``words`` are fields of its text model."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        kind = "qwen3_vl" if family == "cosmos3_omni" else family
        text = _text(f"{kind}_text", overrides, vocabulary, rope_parameters=_mrope(**rope), **(words or {}))
        common = {"depth": 4, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
        return getattr(transformers, config)(
            vision_config={**common, **vision},
            text_config=text.to_dict(),
            **{f"{name}_id": token for name, token in _ids(family).items()},
        )

    return build


def _cohere_compass(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers with windows and RoPE, one without windows that has another, and one more; without RoPE in them on request."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    rope = {
        "sliding_attention": _mrope(mrope_interleaved=True),
        "full_attention": _mrope(mrope_interleaved=True, rope_theta=500.0),
    }
    values = {"layer_types": kinds, "sliding_window": 4096, "rope_parameters": rope, "logit_scale": 0.5, **overrides}
    words = _text("cohere_compass_text", values, vocabulary)
    common = {"depth": 4, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return transformers.CohereCompassConfig(
        vision_config={**common, **QWEN3_TOWER},
        text_config=words.to_dict(),
        tie_word_embeddings=False,
        **{f"{name}_id": token for name, token in _ids("cohere_compass").items()},
    )


def _cosmos3_edge(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    words = _text("cosmos3_edge_text", overrides, vocabulary, rope_parameters=_mrope(), head_dim=16)
    return transformers.Cosmos3EdgeConfig(
        vision_config={**tower, "num_patches": 36, "patch_size": 8},
        text_config=words.to_dict(),
        projector_hidden_size=64,
        **{f"{name}_id": token for name, token in _ids("cosmos3_edge").items()},
    )


def _glm(family: str, config: str, **words: Any) -> Callable[..., PreTrainedConfig]:
    """The configuration of a GLM: RoPE turns half of each head; ``words`` are fields of its text model."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        kind = "glm4v" if family == "glm46v" else family
        rope = _mrope(mrope_section=[2, 1, 1], partial_rotary_factor=0.5)
        text = _text(f"{kind}_text", overrides, vocabulary, rope_parameters=rope, **words)
        sizes = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "depth": 4, "num_heads": 2}
        return getattr(transformers, config)(
            vision_config={"model_type": f"{kind}_vision", "image_size": 64, "patch_size": 8, **sizes},
            text_config=text.to_dict(),
            **{f"{name}_id": token for name, token in _ids(family).items()},
        )

    return build


def _omni(family: str, vision: dict[str, Any], sounds: dict[str, Any], **words: Any) -> Callable[..., Any]:
    """The configuration of the thinker of Qwen-Omni."""
    seconds = {"position_id_per_seconds": 13 if family == "qwen3_omni_moe" else 25, "seconds_per_chunk": 2}

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        rope = _mrope(mrope_interleaved=True) if family == "qwen3_omni_moe" else _mrope()
        text = _text(f"{family}_text", overrides, vocabulary, rope_parameters=rope, **words)
        common = {"depth": 4, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
        ids = {name.replace("bos", "start").replace("eos", "end"): token for name, token in _ids(family).items()}
        return transformers.AutoConfig.for_model(
            f"{family}_thinker",
            vision_config={**common, **vision},
            audio_config={
                "num_mel_bins": 16,
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                **sounds,
            },
            text_config=text.to_dict(),
            pad_token_id=0,
            **seconds,
            **{f"{name}_id": token for name, token in ids.items()},
        )

    return build


def _internvl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    return transformers.InternVLConfig(
        vision_config=_tower("internvl_vision", [64, 64], [8, 8]),
        text_config=_text("qwen2", overrides, vocabulary),
        image_token_id=_ids("internvl")["context_image_token"],
        image_seq_length=16,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def _qianfan_ocr(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    return transformers.QianfanOCRConfig(
        vision_config=_tower("qianfan_ocr_vision", [64, 64], [8, 8]),
        text_config=_text("qwen3", overrides, vocabulary, head_dim=16),
        image_token_id=_ids("qianfan_ocr")["context_image_token"],
        image_seq_length=16,
        downsample_ratio=0.5,
    )


def _deepseek_vl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    return transformers.DeepseekVLConfig(
        vision_config=_tower("siglip_vision_model", 42, 7, vision_use_head=False).to_dict(),
        text_config=_text("llama", overrides, vocabulary).to_dict(),
        image_token_id=_ids("deepseek_vl")["image_token"],
        tie_word_embeddings=False,
    )


#: the tower of Qwen2.5-VL with two blocks that attend to whole frames
WINDOWED = {
    **{"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "depth": 4, "num_heads": 2, "patch_size": 8},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32, "fullatt_block_indexes": [1, 3]},
}


def _windowed(
    family: str, config: str, tower: dict[str, Any], words: str, **text: Any
) -> Callable[..., PreTrainedConfig]:
    """A tower of Qwen2.5-VL, and a language model ``words`` with plain positions."""
    return lambda overrides, vocabulary: getattr(transformers, config)(
        vision_config={**WINDOWED, **tower},
        text_config=_text(words, overrides, vocabulary, **text).to_dict(),
        tie_word_embeddings=False,
        **{f"{name}_id": _ids(family)[name] for name in ("image_token", "video_token")},
    )


def _cohere(family: str, config: str, side: int, patch: int, **values: Any) -> Callable[..., PreTrainedConfig]:
    """The configuration of Aya Vision or Cohere2 Vision: three layers with windows and RoPE, one without either."""
    return lambda overrides, vocabulary: getattr(transformers, config)(
        vision_config=_tower("siglip_vision_model", side, patch, vision_use_head=False),
        text_config=_text("cohere2", overrides, vocabulary),
        downsample_factor=2,
        alignment_intermediate_size=64,
        tie_word_embeddings=False,
        **values,
        image_token_id=_ids(family)["image_token"],
    )


def _gemma3(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers with a window and RoPE of their own, then one that sees everything, and again."""
    return transformers.Gemma3Config(
        vision_config=_tower("siglip_vision_model", 32, 4, vision_use_head=False),
        text_config=_text(
            "gemma3_text",
            overrides,
            vocabulary,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window_pattern=3,
            tie_word_embeddings=False,
        ),
        mm_tokens_per_image=16,
        boi_token_index=_ids("gemma3")["boi_token"],
        eoi_token_index=_ids("gemma3")["eoi_token"],
        image_token_id=_ids("gemma3")["image_token"],
        tie_word_embeddings=False,
    )


def _paligemma(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """A Gemma; that of PaliGemma 2 is a Gemma 2, whose layers have windows in turn and cap what they score."""
    capped = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}
    words = capped if overrides.get("model_type") == "gemma2" else {}
    return transformers.PaliGemmaConfig(
        vision_config=_tower("siglip_vision_model", 28, 7, vision_use_head=False),
        text_config=_text("gemma", overrides, vocabulary, head_dim=16, tie_word_embeddings=False, **words),
        image_token_id=_ids("paligemma")["image_token"],
        projection_dim=64,
        tie_word_embeddings=False,
    )


def _gemma4(family: str, vision: dict[str, Any], **words: Any) -> Callable[..., PreTrainedConfig]:
    """Heads of the layers without a window are wider and fewer, and their keys are their values."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        text = _text(
            f"{family}_text",
            overrides,
            vocabulary,
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=["sliding_attention", "full_attention"] * (overrides.get("num_hidden_layers", 4) // 2),
            use_bidirectional_attention="vision",
            final_logit_softcapping=30.0,
            tie_word_embeddings=False,
            **words,
        )
        return transformers.AutoConfig.for_model(
            family,
            vision_config={"patch_size": 4, "pooling_kernel_size": 2, **vision},
            text_config=text.to_dict(),
            **{f"{name}_id": token for name, token in _ids(family).items() if name != "eoa_token"},
            tie_word_embeddings=False,
        )

    return build


def _gemma4_pixels(family: str, name: str) -> Callable[[], ProcessorMixin]:
    """The models that are accelerated hear nothing, but their processors do."""
    grid, parts = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}, name.removesuffix("Processor")
    return _real(
        family,
        name,
        image_processor=_part(f"{parts}ImageProcessor", **grid),
        video_processor=_part(f"{parts}VideoProcessor", do_sample_frames=False, **grid),
        feature_extractor=_part(f"{parts}AudioFeatureExtractor"),
    )


def _granite4_vision(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two tower layers for the first two layers of the language model, four corners of another for the third and fourth."""
    words = {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    tower = _tower("siglip_vision_model", 32, 4, hidden_size=64, vision_use_head=False)
    return transformers.Granite4VisionConfig(
        vision_config=tower,
        text_config=_text("granite4_vision_text", overrides, vocabulary, rope_parameters=rope, **words),
        image_token_index=_ids("granite4_vision")["image_token"],
        image_grid_pinpoints=GRANITE_PINPOINTS,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        downsample_rate="2/4",
        deepstack_layer_map=[[-2, 0], [2, 1]],
        spatial_vision_layer=-1,
        spatial_target_layers=[2],
        # the widths follow from the tower since 5.20
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "num_attention_heads": 1,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        projector_dropout=0.0,
    )


def _granite_docling(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    scales = {
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.3,
    }
    return transformers.GraniteDoclingConfig(
        vision_config={
            **tower,
            **{"image_size": 48, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1, 2]},
        },
        text_config=_text("granite_docling_text", overrides, vocabulary, **scales).to_dict(),
        image_token_id=_ids("granite_docling")["image_token"],
        tie_word_embeddings=False,
    )


def _got_ocr2(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    tower = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "mlp_dim": 64}
    return transformers.GotOcr2Config(
        vision_config={**tower, "image_size": 64, "patch_size": 4, "window_size": 6, "global_attn_indexes": [1, 3]},
        text_config=_text("qwen2", overrides, vocabulary).to_dict(),
        image_token_index=_ids("got_ocr2")["image_token"],
        tie_word_embeddings=False,
    )


def _perception_lm(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    ids = _ids("perception_lm")
    tower = {
        "img_size": (32, 32),
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "ref_feat_shape": (8, 8),
    }
    tower |= {"use_post_transformer_norm": False, "global_pool": "", "init_values": 0.1}
    return transformers.PerceptionLMConfig(
        vision_config=transformers.TimmWrapperConfig(
            architecture="vit_pe_core_tiny_patch16_384", do_pooling=False, model_args=tower
        ),
        text_config=_text("llama", overrides, vocabulary),
        vision_use_cls_token=True,
        projector_pooling_ratio=2,
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        tie_word_embeddings=False,
    )


def _deepseek_ocr2(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """A tower like that of SAM in front of one like a language model, and experts in all layers but the first."""
    _fewer_queries()
    pixels = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64}
    pixels |= {"image_size": 64, "patch_size": 4, "window_size": 6, "global_attn_indexes": [1]}
    queries = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    kinds = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1, "topk_group": 1}
    return transformers.DeepseekOcr2Config(
        vision_config={
            "sam_config": {**pixels, "downsample_channels": [24, 32]},
            "encoder_config": {**queries, "num_key_value_heads": 1, "max_position_embeddings": 64},
        },
        text_config=_text("deepseek_ocr2_text", overrides, vocabulary, **experts, **kinds).to_dict(),
        image_token_id=_ids("deepseek_ocr2")["image_token"],
    )


@functools.cache
def _fewer_queries() -> None:
    """Tiny towers have one for each of the patches that are left of a view, instead of 144, also where they are loaded."""
    from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2VisionModel

    made = DeepseekOcr2VisionModel.__init__

    @functools.wraps(made)
    def init(self: Any, config: Any) -> None:
        made(self, config)
        if config.sam_config.image_size == 64:
            self.query_768_resolution = torch.nn.Embedding(16, 32)

    DeepseekOcr2VisionModel.__init__ = init


def _ovis2(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    tower |= {"image_size": 32, "patch_size": 4, "vocab_size": 29, "hidden_stride": 2}
    words = _text("qwen2", overrides, vocabulary)
    return transformers.Ovis2Config(
        vision_config=tower,
        text_config=words,
        image_token_id=_ids("ovis2")["image_token"],
        visual_indicator_token_ids=tokenizer("ovis2").convert_tokens_to_ids(list(OVIS_MARKS)),
        vocab_size=vocabulary,
        hidden_size=words.hidden_size,
        tie_word_embeddings=False,
    )


def _pixtral(family: str, config: str, words: str, **values: Any) -> Callable[..., PreTrainedConfig]:
    """The configuration of a family with the tower of Pixtral, whose token is 8 pixels wide."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        vision = _tower("pixtral", 64, 8 // values.get("spatial_merge_size", 1))
        return getattr(transformers, config)(
            vision_config=vision,
            text_config=_text(words, overrides, vocabulary, head_dim=16, sliding_window=None),
            image_token_id=_ids(family)["image_token"],
            tie_word_embeddings=False,
            **values,
        )

    return build


def _paddleocr_vl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    values = {"head_dim": 16, "tie_word_embeddings": False}
    words = _text("paddleocr_vl_text", overrides, vocabulary, rope_parameters=_mrope(), **values)
    return transformers.PaddleOCRVLConfig(
        vision_config=_tower("paddleocr_vl_vision", 48, 8).to_dict(),
        text_config=words.to_dict(),
        image_token_id=_ids("paddleocr_vl")["image_token"],
        tie_word_embeddings=False,
    )


def _hunyuan_vl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """RoPE as that of HunyuanOCR: four axes, one of which counts tokens."""
    _numbers_by_row()
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 4.0, "factor": 1.0, "mrope_section": [2] * 4}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.HunYuanVLConfig(
        vision_config={**tower, "patch_size": 8, "max_image_size": 64, "text_hidden_size": 64},
        text_config=_text("hunyuan_vl_text", overrides, vocabulary, rope_parameters=rope, head_dim=16).to_dict(),
        image_token_id=_ids("hunyuan_vl")["image_token"],
        tie_word_embeddings=False,
    )


@functools.cache
def _numbers_by_row() -> None:
    """HunyuanVL numbers the pictures of each row by themselves: that of transformers counts them over all rows of a batch, so
    that a row in a batch has other positions than alone."""
    from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLModel

    of_batch = HunYuanVLModel.get_rope_index

    @functools.wraps(of_batch)
    def by_row(
        self: Any,
        input_ids: Any,
        mm_token_type_ids: Any,
        image_grid_thw: Any = None,
        attention_mask: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows = 0, []
        for row in range(len(input_ids)):
            mine = slice(row, row + 1)
            count = int((torch.nn.functional.pad(mm_token_type_ids[mine], (1, 0)).diff() == 1).sum())
            grids = None if image_grid_thw is None or not count else image_grid_thw[first : first + count]
            mask = None if attention_mask is None else attention_mask[mine]
            rows.append(of_batch(self, input_ids[mine], mm_token_type_ids[mine], grids, mask))
            first += count
        positions, deltas = zip(*rows, strict=True)
        return torch.cat(positions, dim=1), torch.cat(deltas)

    HunYuanVLModel.get_rope_index = by_row


def _ernie4_5_vl_moe(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Experts in all layers but the first, of which visual tokens have some of their own."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    experts = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": [32, 16], "moe_num_shared_experts": 1}
    words = _text("ernie4_5_vl_moe_text", overrides, vocabulary, rope_parameters=rope, **experts)
    return transformers.Ernie4_5_VLMoeConfig(
        vision_config={"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 8},
        text_config=words.to_dict(),
        tie_word_embeddings=False,
        **{f"{name}_id": token for name, token in _ids("ernie4_5_vl_moe").items()},
    )


def _ernie_processor() -> ProcessorMixin:
    """Clips as the language model is shown them, without times drawn into frames, for which a font would be downloaded."""
    grid = {"patch_size": 8, "merge_size": 2}
    small = {"size": {"shortest_edge": 1024, "longest_edge": 16384}}
    return _real(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeProcessor",
        image_processor=_part("Ernie4_5_VLMoeImageProcessor", **grid, **small),
        video_processor=_part(
            "Ernie4_5_VLMoeVideoProcessor", do_sample_frames=False, draw_on_frames=False, **grid, **small
        ),
    )()


def _video_llama_3(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    ids = _ids("video_llama_3")
    tower = _tower("video_llama_3_vision", 48, 8).to_dict()
    return transformers.VideoLlama3Config(
        vision_config=tower,
        text_config=_text("qwen2", overrides, vocabulary).to_dict(),
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
    )


def _idefics3(family: str, config: str) -> Callable[[dict[str, Any], int], PreTrainedConfig]:
    """The configuration of Idefics3 or SmolVLM."""
    return lambda overrides, vocabulary: getattr(transformers, config)(
        vision_config=_tower(f"{family}_vision", 48, 8),
        text_config=_text("llama", overrides, vocabulary),
        image_token_id=_ids(family)["image_token"],
        scale_factor=2,
        pad_token_id=0,
    )


def _minicpmv(family: str, config: str, **marks: str) -> Callable[..., PreTrainedConfig]:
    """A tower that joins 2x2 patches behind its second layer, and half of the language model's layers gated delta nets; which
    tokens are the ``marks`` around pictures is said by the configuration of some."""

    def build(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
        words = {**QWEN35_TEXT, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
        rope = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        }
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        tokens = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", **marks}
        return getattr(transformers, config)(
            vision_config={**sizes, "image_size": 64, "patch_size": 4},
            text_config=_text("qwen3_5_text", overrides, vocabulary, rope_parameters=rope, **words).to_dict(),
            insert_layer_id=1,
            tie_word_embeddings=False,
            **{name: tokenizer(family).convert_tokens_to_ids(token) for name, token in tokens.items()},
        )

    return build


def _lfm2_vl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers of four are convolutions over three tokens."""
    kinds = {"layer_types": ["conv", FULL, "conv", FULL], "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2VlConfig(
        vision_config=_tower("siglip2_vision_model", 64, 8, num_patches=64, vision_use_head=False),
        text_config=_text("lfm2", overrides, vocabulary, **kinds),
        image_token_id=_ids("lfm2_vl")["image_token"],
        projector_hidden_size=64,
        tie_word_embeddings=False,
    )


def _lfm3_vl(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers of four are convolutions; of the others one has a window, and in the other RoPE turns half."""
    kinds = {
        "layer_types": ["conv", "sliding_attention", "conv", FULL],
        "tie_word_embeddings": False,
    }
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.Lfm3VlConfig(
        vision_config={**sizes, "num_key_value_heads": 1, "patch_size": 8},
        text_config=_text("lfm3", overrides, vocabulary, head_dim=16, **kinds).to_dict(),
        **{f"{name}_id": token for name, token in _ids("lfm3_vl").items()},
        projector_hidden_size=64,
        tie_word_embeddings=False,
    )


def _molmo2(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers of the tower are read. In some models RoPE is stretched in some layers of the language model."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    if "rope_scaling_layers" in overrides:
        overrides = {**overrides, "rope_scaling_layers": list(overrides["rope_scaling_layers"])}
    words = {"additional_vocab_size": 0, "head_dim": 16, "rope_parameters": rope}
    marks = {
        "image_patch_id": MOLMO_PATCH,
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
        "image_end_token_id": "<im_end>",
        "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>",
    }
    return transformers.Molmo2Config(
        vision_config={**sizes, "num_hidden_layers": 3, "image_size": [42, 42], "patch_size": 7},
        adapter_config={**sizes, "vision_feature_layer": [2, 1], "text_hidden_size": 64},
        text_config=_text("molmo2_text", overrides, vocabulary, **words).to_dict(),
        tie_word_embeddings=False,
        **{name: tokenizer("molmo2").convert_tokens_to_ids(token) for name, token in marks.items()},
    )


def _step3p7(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Layers with windows have more query heads than the others, which turn half of each head; half have experts."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    }
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 32}
    words = _text(
        "step3p5",
        {"sliding_window": 4096, **overrides},
        vocabulary,
        head_dim=16,
        layer_types=kinds,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        num_sliding_attention_heads=6,
        rope_parameters=rope,
        **experts,
    )
    return transformers.Step3p7Config(
        vision_config=_tower("step3p5_vision", 64, 4).to_dict(),
        text_config=words,
        image_token_id=_ids("step3p7")["image_token"],
        tie_word_embeddings=False,
    )


def _apertus1p5(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """A tokenizer that halves a picture three times and knows twelve codes, so that some are equal; sounds are not shown."""
    codes, first = 12, vocabulary
    tower = {"codebook_size": codes, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1}
    tower |= {"channel_multiplier": (1, 1, 1, 1), "attn_resolutions": (8,), "resolution": 64}
    ears = {"num_filters": 2, "hidden_size": 8, "codebook_dim": 8, "codebook_size": 4, "num_lstm_layers": 1}
    marks, rope = _ids("apertus1p5"), {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.Apertus1p5Config(
        vision_config=tower,
        audio_config={"model_type": "wavtokenizer_encoder", **ears},
        text_config=_text(
            "apertus1p5_text",
            {"rope_parameters": rope, **overrides},
            vocabulary + codes + 4,
            output_vocab_size=vocabulary,
        ).to_dict(),
        image_token_id=marks["image_token"],
        audio_token_id=marks["audio_token"],
        image_token_offset=first,
        audio_token_offset=first + codes,
    )


#: widths of a head of latents: without RoPE and with it, and of values; the latent itself is wider
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def _kimi_k25(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Experts in all layers but the first."""
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    experts |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    words = _text("deepseek_v3", overrides, vocabulary, num_key_value_heads=4, **experts, **LATENT)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.Kimi_K25Config(
        vision_config={**tower, "patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8},
        text_config=words,
        projection_hidden_size=32,
        tie_word_embeddings=False,
        **{f"{name}_id": token for name, token in _ids("kimi_k25").items()},
    )


#: an indexer that chooses among the keys of long prompts alone, since what it chooses may hang on roundings: tests/laws/
#: test_indexers.py has narrower ones; with heads enough that no two tokens score the same
INDEXER = {"index_topk": 52, "index_n_heads": 16, "index_head_dim": 16}


def _mistral_large4(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """The third layer has no positions."""
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    widths = {name: width for name, width in LATENT.items() if name != "q_lora_rank"}
    if "indexer_types" in overrides:
        overrides = {**overrides, "indexer_types": list(overrides["indexer_types"])}
    words = _text(
        "mistral_large4_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **overrides},
        vocabulary,
        **{"num_key_value_heads": 4, "no_rope_layers": [1, 1, 0, 1], **experts, **widths, **INDEXER},
    )
    return transformers.MistralLarge4Config(
        vision_config=_tower("pixtral", 64, 4),
        text_config=words,
        image_token_id=_ids("mistral_large4")["image_token"],
        tie_word_embeddings=False,
    )


def _dots3_note(overrides: dict[str, Any], vocabulary: int) -> PreTrainedConfig:
    """Two layers have an indexer, and two a window, fewer heads and another latent; the last layer of the tower has experts."""
    words = _text(
        "dots3_note_text",
        {"sliding_window": 4096, **overrides},
        vocabulary,
        num_key_value_heads=4,
        head_dim=24,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=32,
        swa_kv_lora_rank=32,
        swa_head_dim=24,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_experts_intermediate_size=32,
        **{**LATENT, **INDEXER},
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return transformers.Dots3NoteConfig(
        vision_config={
            **sizes,
            "num_hidden_layers": 4,
            "patch_size": 8,
            "pyramid_num_routed": [-1, -1, -1, 4],
            "moe_intermediate_size": 32,
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        audio_config={
            **sizes,
            "num_hidden_layers": 1,
            "feature_size": 16,
            "downsample_hidden_size": 8,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
        text_config=words,
        tie_word_embeddings=False,
        **{f"{name}_id": token for name, token in _ids("dots3_note").items()},
    )


# --------------------------------------------------------------------------------------------------------- processors


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _clip_sizes(side: int) -> dict[str, Any]:
    """Resize and crop as CLIP's image processors want it."""
    return {"size": {"shortest_edge": side}, "crop_size": _square(side)}


def _real(family: str, name: str, **parts: Any) -> Callable[[], ProcessorMixin]:
    """The family's processor class around the hand-built tokenizer; parts that are callables are built first."""

    def build() -> ProcessorMixin:
        built = {key: part() if callable(part) else part for key, part in parts.items()}
        cls = getattr(transformers, name)
        # a copy, since Idefics3's says anew which tokens are special
        return cls(tokenizer=copy.deepcopy(tokenizer(family)), chat_template=_chat_template(family), **built)

    return build


def _part(name: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**values)


def _minicpmv_pixels(
    family: str, name: str, parts: str = "", scale_resolution: int = 64
) -> Callable[[], ProcessorMixin]:
    """The processor of a MiniCPM-V, with ``parts`` of that name or of another."""
    sizes = {"scale_resolution": scale_resolution, "patch_size": 4}
    return _real(
        family,
        f"{name}Processor",
        image_processor=_part(f"{parts or name}ImageProcessor", **sizes),
        video_processor=_part(f"{parts or name}VideoProcessor", do_sample_frames=False, **sizes),
    )


def _glm_pixels(family: str, name: str) -> Callable[[], ProcessorMixin]:
    """A GLM processor: one token is 16 x 16 pixels, 4 to 64 tokens a picture, whose size counts for two frames."""
    grid = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    sizes = {"shortest_edge": 2048, "longest_edge": 32768}
    return _real(
        family,
        name,
        image_processor=_part(f"{name.removesuffix('Processor')}ImageProcessor", size=sizes, **grid),
        video_processor=_part(
            f"{name.removesuffix('Processor')}VideoProcessor",
            size={**sizes, "longest_edge": 131072},
            do_sample_frames=False,
            **grid,
        ),
    )


def _qwen_pixels(family: str, name: str, video: str, longest: int) -> Callable[[], ProcessorMixin]:
    """A Qwen processor: one token is 16 x 16 pixels, 4 to 64 tokens a picture."""
    grid = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    return _real(
        family,
        name,
        image_processor=_part("Qwen2VLImageProcessor", size={"shortest_edge": 1024, "longest_edge": 16384}, **grid),
        video_processor=_part(
            video,
            size={"shortest_edge": 1024, "longest_edge": longest},
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            **grid,
        ),
    )


def _pixtral_processor(family: str, patch: int, merge: int) -> Callable[[], ProcessorMixin]:
    """One token is 8 x 8 pixels, 64 tokens a picture at most."""
    return _real(
        family,
        "PixtralProcessor",
        image_processor=_part("PixtralImageProcessor", size={"longest_edge": 64}, patch_size=_square(patch)),
        patch_size=patch,
        spatial_merge_size=merge,
    )


def _asked_for_types(build: Callable[[], ProcessorMixin]) -> Callable[[], ProcessorMixin]:
    """A processor that gives token types and times of frames, which that of Cosmos 3 Edge leaves out unless it is asked, though
    it needs the times."""

    def asked() -> ProcessorMixin:
        made = build()
        made.return_mm_token_type_ids, made.videos_kwargs = True, {"return_metadata": True}
        return made

    return asked


def _omni_pixels(family: str, name: str) -> Callable[[], ProcessorMixin]:
    """That of Qwen-Omni hears with a Whisper's extractor."""
    grid = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    build = _real(
        family,
        name,
        image_processor=_part("Qwen2VLImageProcessor", size={"shortest_edge": 1024, "longest_edge": 16384}, **grid),
        video_processor=_part(
            "Qwen2VLVideoProcessor",
            size={"shortest_edge": 1024, "longest_edge": 16384},
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            **grid,
        ),
        feature_extractor=_part("WhisperFeatureExtractor", feature_size=16),
    )

    def small() -> ProcessorMixin:
        made = build()
        # its class has a size of its own for clips, of a hundred tokens a frame at least
        made.videos_kwargs = {"size": {"shortest_edge": 1024, "longest_edge": 16384}}
        return made

    return small


SPLIT_SIZES = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}


def _smolvlm_processor() -> ProcessorMixin:
    if processing_smolvlm.num2words is None:  # not installed: the number of frames is then written in digits
        processing_smolvlm.num2words = str
    sampling = {"max_frames": 8, "fps": 1, "video_size": {"longest_edge": 48}}
    return _real(
        "smolvlm",
        "SmolVLMProcessor",
        image_processor=_part("SmolVLMImageProcessor", **SPLIT_SIZES),
        video_processor=_part("SmolVLMVideoProcessor", **SPLIT_SIZES, video_sampling=sampling),
        image_seq_len=9,
    )()


# ----------------------------------------------------------------------------------------------------------- families


NEXT_PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
GRANITE_PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
ONEVISION_PINPOINTS = [[35 * rows, 35 * columns] for rows in range(1, 5) for columns in range(1, 5)]
CLIP_SELECTION = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
IMAGE_TOKEN = {"image_token": "<image>"}
MEDIA_TOKENS = {**IMAGE_TOKEN, "video_token": "<video>"}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
ERNIE_TOKENS = {
    "image_token": "<|image@placeholder|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|video@placeholder|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
QWEN3_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}
QWEN35_TOWER = {name: value for name, value in QWEN3_TOWER.items() if name != "deepstack_visual_indexes"}
#: RoPE turns a quarter of 64 channels; two layers attend, and in one model the last does not
QWEN35_TEXT = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
QWEN35_ROPE = {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25}
LINEAR, FULL = "linear_attention", "full_attention"
OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
QWEN_MEDIA: dict[str, Any] = {"mixed": True, "sizes": ((112, 80), (64, 96)), "clip": (6, 64, 48)}

GEMMA4_PROMPT: dict[str, Any] = {
    "tokens": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "video_token": "<|video|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "image": "<|image|>",
    "video": "<|video|>",
    "mixed": True,
    # the processor makes each as large as seventy tokens allow
    "sizes": ((60, 48), (40, 100)),
    "clip": (3, 64, 48),
}
GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
GLM_PROMPT: dict[str, Any] = {
    "tokens": GLM_TOKENS,
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
    **{name: value for name, value in QWEN_MEDIA.items() if name != "mixed"},
}

SPLIT_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
LFM_TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}
CPM_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    **{f"{name}_start_token": f"<{name}>" for name in ("image", "slice", "image_id")},
    **{f"{name}_end_token": f"</{name}>" for name in ("image", "slice", "image_id")},
}
CPM_MARKS = {
    "newline_id": "\n",
    **{f"{name}_start_id": f"<{name}>" for name in ("image", "slice")},
    **{f"{name}_end_id": f"</{name}>" for name in ("image", "slice")},
}
CPM_PROMPT: dict[str, Any] = {
    "tokens": CPM_TOKENS,
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "mixed": True,
    # a thumbnail of its own size, and one with two slices
    "sizes": ((60, 48), (130, 60)),
}
MOLMO_PATCH = "<im_patch>"
MOLMO_MARKS = ("<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>", "<im_low>")
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
PIXTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
EVERY_PATCH = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
SPLIT_PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))

_TABLE: dict[str, Family] = {
    "llava": Family(
        config=_llava_like("llava", "LlavaConfig", 42),
        processor=_real(
            "llava", "LlavaProcessor", image_processor=_part("CLIPImageProcessor", **_clip_sizes(42)), **CLIP_SELECTION
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
    ),
    "vipllava": Family(
        config=_llava_like("vipllava", "VipLlavaConfig", 42, vision_feature_layers=[-2, -3, 1]),
        processor=_real(
            "vipllava",
            "LlavaProcessor",
            image_processor=_part("CLIPImageProcessor", **_clip_sizes(42)),
            **CLIP_SELECTION,
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
    ),
    "fast_vlm": Family(
        config=_fast_vlm,
        processor=_real(
            "fast_vlm",
            "LlavaProcessor",
            image_processor=_part("CLIPImageProcessor", **_clip_sizes(160)),
            patch_size=32,
            num_additional_image_tokens=0,
            vision_feature_select_strategy="full",
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
    ),
    "llava_next": Family(
        config=_llava_like("llava_next", "LlavaNextConfig", 28, NEXT_PINPOINTS),
        processor=_real(
            "llava_next",
            "LlavaNextProcessor",
            image_processor=_part("LlavaNextImageProcessor", image_grid_pinpoints=NEXT_PINPOINTS, **_clip_sizes(28)),
            **CLIP_SELECTION,
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
        sizes=((60, 48), (30, 80)),
    ),
    "llava_onevision": Family(
        config=_llava_onevision,
        processor=_real(
            "llava_onevision",
            "LlavaOnevisionProcessor",
            image_processor=_part(
                "LlavaOnevisionImageProcessor", image_grid_pinpoints=ONEVISION_PINPOINTS, size=_square(35)
            ),
            video_processor=_part("LlavaOnevisionVideoProcessor", size=_square(35)),
            num_image_tokens=25,
            vision_feature_select_strategy="full",
        ),
        tokens=MEDIA_TOKENS,
        image="<image>\n",
        video="<video>\n",
        mixed=True,
        sizes=((70, 50), (30, 60)),
    ),
    "llava_next_video": Family(
        config=_llava_like("llava_next_video", "LlavaNextVideoConfig", 28, NEXT_PINPOINTS),
        processor=_real(
            "llava_next_video",
            "LlavaNextVideoProcessor",
            image_processor=_part("LlavaNextImageProcessor", image_grid_pinpoints=NEXT_PINPOINTS, **_clip_sizes(28)),
            video_processor=_part("LlavaNextVideoVideoProcessor", **_clip_sizes(28)),
            **CLIP_SELECTION,
        ),
        tokens=MEDIA_TOKENS,
        image="<image>\n",
        video="<video>\n",
        mixed=True,
        sizes=((60, 48), (30, 80)),
        clip=(6, 64, 48),
    ),
    "video_llava": Family(
        config=_llava_like("video_llava", "VideoLlavaConfig", 28),
        processor=_real(
            "video_llava",
            "VideoLlavaProcessor",
            image_processor=_part("VideoLlavaImageProcessor", **_clip_sizes(28)),
            video_processor=_part("VideoLlavaVideoProcessor", **_clip_sizes(28)),
            **CLIP_SELECTION,
        ),
        tokens=MEDIA_TOKENS,
        image="<image>\n",
        video="<video>\n",
        mixed=True,
    ),
    "qwen2_vl": Family(
        config=_qwen("qwen2_vl", "Qwen2VLConfig", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
        processor=_qwen_pixels("qwen2_vl", "Qwen2VLProcessor", "Qwen2VLVideoProcessor", 16384),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video=QWEN_VIDEO,
        **QWEN_MEDIA,
    ),
    "qwen2_5_vl": Family(
        config=_qwen(
            "qwen2_5_vl",
            "Qwen2_5_VLConfig",
            {
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "window_size": 32,
                "fullatt_block_indexes": [1, 3],
            },
        ),
        processor=_qwen_pixels("qwen2_5_vl", "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 16384),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video=QWEN_VIDEO,
        **QWEN_MEDIA,
    ),
    "qwen3_vl": Family(
        config=_qwen("qwen3_vl", "Qwen3VLConfig", QWEN3_TOWER, mrope_interleaved=True),
        processor=_qwen_pixels("qwen3_vl", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "cosmos3_edge": Family(
        config=_cosmos3_edge,
        processor=_asked_for_types(
            _real(
                "cosmos3_edge",
                "Cosmos3EdgeProcessor",
                image_processor=_part(
                    "Cosmos3EdgeImageProcessor", size={"shortest_edge": 1024, "longest_edge": 16384}, patch_size=8
                ),
                video_processor=_part(
                    "Cosmos3EdgeVideoProcessor",
                    size={"shortest_edge": 1024, "longest_edge": 32768},
                    patch_size=8,
                    do_sample_frames=False,
                ),
            )
        ),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video=QWEN_VIDEO,
        mixed=True,
        sizes=((112, 80), (64, 96)),
        clip=(3, 64, 48),
    ),
    "cosmos3_omni": Family(
        config=_qwen("cosmos3_omni", "Cosmos3OmniConfig", QWEN3_TOWER, mrope_interleaved=True),
        processor=_qwen_pixels("cosmos3_omni", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "cohere_compass": Family(
        config=_cohere_compass,
        processor=_qwen_pixels("cohere_compass", "CohereCompassProcessor", "CohereCompassVideoProcessor", 131072),
        tokens={
            "image_token": "<|IMAGE_PAD|>",
            "video_token": "<|VIDEO_PAD|>",
            "vision_start_token": "<|VISION_START|>",
            "vision_end_token": "<|VISION_END|>",
        },
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        video="<|VIDEO_PAD|>",
        **QWEN_MEDIA,
    ),
    "qwen3_vl_moe": Family(
        config=_qwen(
            "qwen3_vl_moe",
            "Qwen3VLMoeConfig",
            QWEN3_TOWER,
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            mrope_interleaved=True,
        ),
        processor=_qwen_pixels("qwen3_vl_moe", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "glm4v": Family(
        config=_glm("glm4v", "Glm4vConfig"), processor=_glm_pixels("glm4v", "Glm4vProcessor"), **GLM_PROMPT
    ),
    "glm46v": Family(
        config=_glm("glm46v", "Glm46VConfig"), processor=_glm_pixels("glm46v", "Glm46VProcessor"), **GLM_PROMPT
    ),
    "glm4v_moe": Family(
        config=_glm(
            "glm4v_moe",
            "Glm4vMoeConfig",
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            head_dim=16,
        ),
        processor=_glm_pixels("glm4v_moe", "Glm4vProcessor"),
        **GLM_PROMPT,
    ),
    "glm_ocr": Family(
        config=_glm("glm_ocr", "GlmOcrConfig", head_dim=16),
        processor=_glm_pixels("glm_ocr", "Glm46VProcessor"),
        **GLM_PROMPT,
    ),
    "qwen3_5": Family(
        config=_qwen(
            "qwen3_5",
            "Qwen3_5Config",
            QWEN35_TOWER,
            {**QWEN35_TEXT, "layer_types": [LINEAR, FULL, LINEAR, FULL]},
            **QWEN35_ROPE,
        ),
        processor=_qwen_pixels("qwen3_5", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "qwen3_5_moe": Family(
        config=_qwen(
            "qwen3_5_moe",
            "Qwen3_5MoeConfig",
            QWEN35_TOWER,
            {
                **QWEN35_TEXT,
                "layer_types": [LINEAR, FULL, FULL, LINEAR],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
            **QWEN35_ROPE,
        ),
        processor=_qwen_pixels("qwen3_5_moe", "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "qwen2_5_omni": Family(
        config=_omni(
            "qwen2_5_omni",
            {
                "hidden_size": 32,
                "intermediate_size": 64,
                "out_hidden_size": 64,
                "window_size": 32,
                "fullatt_block_indexes": [1, 3],
            },
            {"encoder_ffn_dim": 64, "output_dim": 64, "n_window": 8},
        ),
        processor=_omni_pixels("qwen2_5_omni", "Qwen2_5OmniProcessor"),
        tokens=OMNI_TOKENS,
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
        video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        **QWEN_MEDIA,
    ),
    "qwen3_omni_moe": Family(
        config=_omni(
            "qwen3_omni_moe",
            QWEN3_TOWER,
            {"encoder_ffn_dim": 64, "output_dim": 64, "downsample_hidden_size": 16},
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            head_dim=16,
        ),
        processor=_omni_pixels("qwen3_omni_moe", "Qwen3OmniMoeProcessor"),
        tokens=OMNI_TOKENS,
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
        video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        **QWEN_MEDIA,
    ),
    "aya_vision": Family(
        config=_cohere("aya_vision", "AyaVisionConfig", 64, 8),
        processor=_real(
            "aya_vision",
            "AyaVisionProcessor",
            image_processor=_part("GotOcr2ImageProcessor", size=_square(64), min_patches=1, max_patches=4),
            img_size=64,
            patch_size=8,
            downsample_factor=2,
        ),
        tokens={"image_token": "<|IMG_PATCH|>"},
        image="<image>",
        sizes=((130, 60), (50, 60)),
        extra_tokens=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    ),
    "gemma3": Family(
        config=_gemma3,
        processor=_real(
            "gemma3",
            "Gemma3Processor",
            image_processor=_part("Gemma3ImageProcessor", size=_square(32)),
            image_seq_length=16,
        ),
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        image="<start_of_image>",
    ),
    "paligemma": Family(
        config=_paligemma,
        processor=_real(
            "paligemma",
            "PaliGemmaProcessor",
            image_processor=_part("SiglipImageProcessor", size=_square(28), image_seq_length=16),
        ),
        tokens=IMAGE_TOKEN,
        image="<image>",
        options={},
    ),
    "gemma4": Family(
        config=_gemma4(
            "gemma4",
            {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        processor=_gemma4_pixels("gemma4", "Gemma4Processor"),
        **GEMMA4_PROMPT,
    ),
    "gemma4_unified": Family(
        config=_gemma4("gemma4_unified", {"mm_embed_dim": 32, "mm_posemb_size": 32, "output_proj_dims": 32}),
        processor=_gemma4_pixels("gemma4_unified", "Gemma4UnifiedProcessor"),
        **GEMMA4_PROMPT,
    ),
    "cohere2_vision": Family(
        config=_cohere("cohere2_vision", "Cohere2VisionConfig", 32, 4),
        processor=_real(
            "cohere2_vision",
            "Cohere2VisionProcessor",
            image_processor=_part("Cohere2VisionImageProcessor", size=_square(32), patch_size=4, max_patches=4),
        ),
        tokens={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        image="<|IMG_PATCH|>",
        sizes=((65, 30), (25, 30)),
    ),
    "perception_lm": Family(
        config=_perception_lm,
        processor=_real(
            "perception_lm",
            "PerceptionLMProcessor",
            image_processor=_part(
                "PerceptionLMImageProcessor", tile_size=32, max_num_tiles=4, vision_input_type="thumb+tile"
            ),
            video_processor=_part("PerceptionLMVideoProcessor", size=_square(32)),
            patch_size=4,
            pooling_ratio=2,
        ),
        tokens=MEDIA_TOKENS,
        image="<image>",
        video="<video>",
        mixed=True,
        # pictures of as many tiles, which is all that its processor can batch
        sizes=((60, 30), (30, 60)),
    ),
    "got_ocr2": Family(
        config=_got_ocr2,
        processor=_real(
            "got_ocr2", "GotOcr2Processor", image_processor=_part("GotOcr2ImageProcessor", size=_square(64))
        ),
        tokens={"image_token": "<imgpad>"},
        image="<img><imgpad></img>\n",
        sizes=((130, 60), (50, 60)),
        extra_tokens=("<img>", "</img>", "<|im_start|>", "<|im_end|>"),
        options={"num_image_tokens": 16, "crop_to_patches": True, "max_patches": 4},
    ),
    "granite4_vision": Family(
        config=_granite4_vision,
        processor=_real(
            "granite4_vision",
            "Granite4VisionProcessor",
            image_processor=_part("LlavaNextImageProcessor", image_grid_pinpoints=GRANITE_PINPOINTS, **_clip_sizes(32)),
            patch_size=4,
            vision_feature_select_strategy="full",
            downsample_rate="2/4",
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
        sizes=((60, 48), (30, 80)),
    ),
    "granite_docling": Family(
        config=_granite_docling,
        processor=_real(
            "granite_docling",
            "GraniteDoclingProcessor",
            image_processor=_part("GraniteDoclingImageProcessor", size=_square(48), max_patches=4),
            image_seq_len=9,
        ),
        tokens=SPLIT_TOKENS,
        image="<image>",
        # two tiles and the whole, and one tile
        sizes=((90, 48), (40, 44)),
        extra_tokens=SPLIT_PLACES,
    ),
    "mistral3": Family(
        config=_pixtral("mistral3", "Mistral3Config", "mistral", spatial_merge_size=2),
        processor=_pixtral_processor("mistral3", 4, 2),
        tokens=PIXTRAL_TOKENS,
        image="[IMG]\n",
    ),
    "pixtral": Family(
        config=_pixtral("pixtral", "LlavaConfig", "mistral", **EVERY_PATCH),
        processor=_pixtral_processor("pixtral", 8, 1),
        tokens=PIXTRAL_TOKENS,
        image="[IMG]\n",
    ),
    "lighton_ocr": Family(
        config=_pixtral("lighton_ocr", "LightOnOcrConfig", "qwen3", spatial_merge_size=2),
        processor=_real(
            "lighton_ocr",
            "LightOnOcrProcessor",
            image_processor=_part("PixtralImageProcessor", size={"longest_edge": 64}, patch_size=_square(8)),
            patch_size=4,
            spatial_merge_size=2,
        ),
        tokens=PIXTRAL_TOKENS,
        image="[IMG]\n",
    ),
    "deepseek_ocr2": Family(
        config=_deepseek_ocr2,
        processor=_real(
            "deepseek_ocr2",
            "DeepseekOcr2Processor",
            image_processor=_part("DeepseekOcr2ImageProcessor", size=_square(64), tile_size=64),
            patch_size=4,
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
        # two tiles, and none
        sizes=((130, 60), (50, 60)),
        options={},
    ),
    "ovis2": Family(
        config=_ovis2,
        processor=_real(
            "ovis2",
            "Ovis2Processor",
            image_processor=_part("Ovis2ImageProcessor", size=_square(32), crop_to_patches=True, max_patches=4),
            image_seq_length=16,
        ),
        tokens={"image_token": "<IMG_ATOM>"},
        image="<image>\n",
        sizes=((65, 30), (25, 30)),
        extra_tokens=("<image>", *OVIS_MARKS),
    ),
    "paddleocr_vl": Family(
        config=_paddleocr_vl,
        processor=_real(
            "paddleocr_vl",
            "PaddleOCRVLProcessor",
            image_processor=_part(
                "PaddleOCRVLImageProcessor",
                size={"shortest_edge": 1024, "longest_edge": 16384},
                patch_size=8,
                temporal_patch_size=1,
                merge_size=2,
            ),
        ),
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        sizes=((112, 80), (64, 96)),
        extra_tokens=("<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
    "hunyuan_vl": Family(
        config=_hunyuan_vl,
        processor=_real(
            "hunyuan_vl",
            "HunYuanVLProcessor",
            image_processor=_part(
                "HunYuanVLImageProcessor",
                size={"shortest_edge": 1024, "longest_edge": 16384},
                patch_size=8,
                temporal_patch_size=1,
                merge_size=2,
            ),
        ),
        tokens={"image_token": "<img>", "image_start_token": "<img_start>", "image_end_token": "<img_end>"},
        image="<img_start><img><img_end>",
        sizes=((80, 64), (48, 64)),
    ),
    "ernie4_5_vl_moe": Family(
        config=_ernie4_5_vl_moe,
        processor=_ernie_processor,
        tokens=ERNIE_TOKENS,
        image="<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>",
        video="<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>",
        **QWEN_MEDIA,
    ),
    "video_llama_3": Family(
        config=_video_llama_3,
        processor=_real(
            "video_llama_3",
            "VideoLlama3Processor",
            # pictures of 4 to 64 tokens, clips of 4 to 64 in all
            image_processor=_part(
                "VideoLlama3ImageProcessor", size={"shortest_edge": 256, "longest_edge": 4096}, patch_size=8
            ),
            video_processor=_part(
                "VideoLlama3VideoProcessor", size={"shortest_edge": 1024, "longest_edge": 16384}, patch_size=8
            ),
        ),
        tokens={"image_token": "<image>", "video_token": "<video>"},
        image="<image>\n",
        video="<video>\n",
        mixed=True,
        sizes=((56, 40), (32, 48)),
    ),
    "internvl": Family(
        config=_internvl,
        processor=_real(
            "internvl",
            "InternVLProcessor",
            image_processor=_part(
                "GotOcr2ImageProcessor", size=_square(64), crop_to_patches=True, min_patches=1, max_patches=4
            ),
            video_processor=_part("InternVLVideoProcessor", size=_square(64)),
            image_seq_length=16,
        ),
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image="<IMG_CONTEXT>\n",
        video="<video>\n",
        mixed=True,
        sizes=((130, 60), (50, 60)),
    ),
    "qianfan_ocr": Family(
        config=_qianfan_ocr,
        processor=_real(
            "qianfan_ocr",
            "QianfanOCRProcessor",
            image_processor=_part(
                "GotOcr2ImageProcessor", size=_square(64), crop_to_patches=True, min_patches=1, max_patches=4
            ),
            image_seq_length=16,
        ),
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "image_placeholder_token": "<image>",
        },
        image="<image>\n",
        sizes=((130, 60), (50, 60)),
    ),
    "deepseek_vl": Family(
        config=_deepseek_vl,
        processor=_real(
            "deepseek_vl",
            "DeepseekVLProcessor",
            image_processor=_part("DeepseekVLImageProcessor", size=_square(42)),
            num_image_tokens=36,
        ),
        tokens=IMAGE_TOKEN,
        image="<image>\n",
    ),
    "step3p7": Family(
        config=_step3p7,
        processor=_real(
            "step3p7",
            "Step3p7Processor",
            image_processor=_part(
                "Step3p7ImageProcessor", size=_square(64), patch_size=48, vision_patch_size=4, max_image_size=192
            ),
        ),
        tokens={"image_token": "<im_patch>"},
        extra_tokens=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        image="<im_patch>",
        # two tiles, and none
        sizes=((96, 40), (60, 50)),
    ),
    "apertus1p5": Family(
        config=_apertus1p5,
        processor=_real(
            "apertus1p5",
            "Apertus1p5Processor",
            image_processor=_part(
                "Apertus1p5ImageProcessor", size={"min_pixels": 1024, "max_pixels": 4096}, spatial_factor=8
            ),
            feature_extractor=_part("WavTokenizerFeatureExtractor"),
        ),
        tokens={
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boi_token": "<|img_start|>",
            "eoi_token": "<|img_end|>",
            "image_wrapper_token": "<|img_token_start|>",
            "eol_token": "<|img_end_of_row|>",
            "boa_token": "<|audio_start|>",
            "eoa_token": "<|audio_end|>",
        },
        image="<|image|>",
    ),
    "kimi_k25": Family(
        config=_kimi_k25,
        processor=_real(
            "kimi_k25",
            "Kimi_K25Processor",
            image_processor=_part(
                "Kimi_K25ImageProcessor", size={"max_height": 64, "max_width": 64}, max_patches=64, patch_size=8
            ),
            video_processor=_part(
                "Kimi_K25VideoProcessor",
                size={"max_height": 64, "max_width": 64},
                max_patches=64,
                patch_size=8,
                temporal_patch_size=2,
                do_sample_frames=False,
            ),
        ),
        tokens={"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        extra_tokens=("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        video="<|kimi_k25_video_placeholder|>",
        **QWEN_MEDIA,
    ),
    "mistral_large4": Family(
        config=_mistral_large4,
        processor=_pixtral_processor("mistral_large4", 4, 2),
        tokens=PIXTRAL_TOKENS,
        image="[IMG]\n",
    ),
    "dots3_note": Family(
        config=_dots3_note,
        processor=_real(
            "dots3_note",
            "Dots3NoteProcessor",
            image_processor=_part(
                "Qwen2VLImageProcessor",
                size={"shortest_edge": 1024, "longest_edge": 16384},
                patch_size=8,
                temporal_patch_size=1,
                merge_size=2,
            ),
            video_processor=_part(
                "Qwen3VLVideoProcessor",
                size={"shortest_edge": 1024, "longest_edge": 131072},
                patch_size=8,
                temporal_patch_size=1,
                merge_size=2,
                do_sample_frames=False,
                cap_pixels_per_frame=False,
            ),
            feature_extractor=_part("Dots3NoteFeatureExtractor", feature_size=16),
        ),
        tokens={
            "image_token": "<|imgpad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_comp_pad|>",
        },
        image="<|imgpad|>",
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "exaone4_5": Family(
        config=_windowed(
            "exaone4_5",
            "Exaone4_5_Config",
            {"num_key_value_heads": 1},
            "exaone4",
            sliding_window=4096,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
        processor=_qwen_pixels("exaone4_5", "Exaone4_5_Processor", "Qwen2VLVideoProcessor", 16384),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video=QWEN_VIDEO,
        **QWEN_MEDIA,
    ),
    "hyperclovax_vision_v2": Family(
        config=_windowed(
            "hyperclovax_vision_v2",
            "HyperCLOVAXVisionV2Config",
            {"model_type": "qwen2_5_vl_vision"},
            "hyperclovax",
            embedding_multiplier=2.0,
            logits_scaling=0.5,
        ),
        processor=_qwen_pixels("hyperclovax_vision_v2", "HyperCLOVAXVisionV2Processor", "Qwen2VLVideoProcessor", 16384),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video=QWEN_VIDEO,
        **QWEN_MEDIA,
    ),
    "smolvlm": Family(
        config=_idefics3("smolvlm", "SmolVLMConfig"),
        processor=_smolvlm_processor,
        tokens=SPLIT_TOKENS,
        image="<image>",
        video="<video>",
        sizes=((90, 60), (40, 100)),
        extra_tokens=SPLIT_PLACES,
    ),
    "lfm2_vl": Family(
        config=_lfm2_vl,
        processor=_real(
            "lfm2_vl",
            "Lfm2VlProcessor",
            image_processor=_part(
                "Lfm2VlImageProcessor",
                tile_size=64,
                encoder_patch_size=8,
                min_image_tokens=16,
                max_image_tokens=24,
                max_tiles=4,
                max_pixels_tolerance=1.2,
            ),
        ),
        tokens=LFM_TOKENS,
        image="<image>",
        # a tile of its own size, and two with a thumbnail
        sizes=((60, 40), (130, 60)),
        extra_tokens=tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ),
    "lfm3_vl": Family(
        config=_lfm3_vl,
        processor=_qwen_pixels("lfm3_vl", "Lfm3VlProcessor", "Qwen3VLVideoProcessor", 131072),
        tokens=QWEN_TOKENS,
        image=QWEN_IMAGE,
        video="<|video_pad|>",
        **QWEN_MEDIA,
    ),
    "minicpmv4_6": Family(
        config=_minicpmv("minicpmv4_6", "MiniCPMV4_6Config"),
        processor=_minicpmv_pixels("minicpmv4_6", "MiniCPMV4_6"),
        **CPM_PROMPT,
    ),
    "minicpmv4_7": Family(
        config=_minicpmv("minicpmv4_7", "MiniCPMV4_7Config", **CPM_MARKS),
        processor=_minicpmv_pixels("minicpmv4_7", "MiniCPMV4_7", "MiniCPMV4_6"),
        **CPM_PROMPT,
    ),
    "minicpm_ocr": Family(
        config=_minicpmv("minicpm_ocr", "MiniCPMOcrConfig"),
        processor=_minicpmv_pixels("minicpm_ocr", "MiniCPMOcr", scale_resolution=32),
        # about as many tokens, each of which is half as wide
        **{**CPM_PROMPT, "sizes": ((30, 24), (65, 30)), "clip": (4, 32, 24)},
    ),
    "molmo2": Family(
        config=_molmo2,
        processor=_real(
            "molmo2",
            "Molmo2Processor",
            image_processor=_part(
                "Molmo2ImageProcessor", size=_square(42), patch_size=7, overlap_margins=[1, 1], max_crops=4
            ),
            video_processor=_part(
                "Molmo2VideoProcessor", size=_square(42), patch_size=7, pooling_size=[2, 2], do_sample_frames=False
            ),
        ),
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        image="<|image|>",
        video="<|video|>",
        # two crops side by side, and two one above the other; one alone would be the picture once more
        sizes=((60, 40), (40, 64)),
        extra_tokens=(MOLMO_PATCH, *MOLMO_MARKS),
    ),
    "idefics3": Family(
        config=_idefics3("idefics3", "Idefics3Config"),
        processor=_real(
            "idefics3",
            "Idefics3Processor",
            image_processor=_part("Idefics3ImageProcessor", **SPLIT_SIZES),
            image_seq_len=9,
        ),
        tokens=SPLIT_TOKENS,
        image="<image>",
        sizes=((90, 60), (40, 100)),
        extra_tokens=SPLIT_PLACES,
    ),
}

_RELEASE = int(transformers.__version__.split(".")[1])
if _RELEASE < 24:
    # its processor failed on clips
    del _TABLE["cosmos3_edge"]
    # these are newer
    del _TABLE["cohere_compass"], _TABLE["step3p7"], _TABLE["apertus1p5"], _TABLE["kimi_k25"]
    del _TABLE["mistral_large4"], _TABLE["dots3_note"]
if _RELEASE < 23:
    # one came with 5.2x, the other was laid out otherwise
    del _TABLE["hyperclovax_vision_v2"], _TABLE["exaone4_5"]
    # thinkers were laid out otherwise, and are refused
    del _TABLE["qwen2_5_omni"], _TABLE["qwen3_omni_moe"]
    # these are newer
    del _TABLE["granite_docling"], _TABLE["lfm3_vl"], _TABLE["minicpmv4_7"], _TABLE["minicpm_ocr"], _TABLE["molmo2"]
if _RELEASE < 20:
    # its tower took one size of tiles
    del _TABLE["minicpmv4_6"]

FAMILIES: tuple[str, ...] = tuple(_TABLE)
VIDEO_FAMILIES: tuple[str, ...] = tuple(name for name, spec in _TABLE.items() if spec.video)


def _family(family: str) -> Family:
    if family not in _TABLE:
        raise ValueError(f"unknown family {family!r}; the zoo has {', '.join(FAMILIES)}")
    return _TABLE[family]


# -------------------------------------------------------------------------------------------------------- the models


@functools.cache
def processor(family: str) -> ProcessorMixin:
    """The family's real processor around a hand-built tokenizer, with a simple chat template."""
    return _family(family).processor()


def model(family: str, seed: int = 0, **text_overrides: Any) -> PreTrainedModel:
    """A fresh tiny model on the CPU: eval mode, float32, sdpa.

    Parameters
    ----------
    family
        One of `FAMILIES`.
    seed
        Of the weights. The same seed gives the same weights in every process and version of transformers.
    text_overrides
        Fields of the text configuration. `sliding_window=24` makes the text model of a LLaMA family a Mistral and
        turns on the windows of a Qwen2 in all layers (`max_window_layers=2` for half of them); `model_type="qwen3"` makes
        the language model of a family that takes any of them a Qwen3.
    """
    result = _made(family, seed, text_overrides)
    # methods may need a selector, a calibration or a draft that lies beside the weights
    folder = random_selectors.beside(result)
    (folder / "draft").symlink_to(draft(family), target_is_directory=True)
    result.config._name_or_path = str(folder)
    return result


@functools.cache
def draft(family: str) -> Path:
    """The folder of a model with other weights that reads the same prompts."""
    folder = Path(tempfile.mkdtemp(prefix="drafts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _made(family, 1, {}).save_pretrained(folder)
    processor(family).save_pretrained(folder)
    return folder


def loaded_draft(family: str, seed: int = 1) -> PreTrainedModel:
    """A model of a family with other weights, those of :func:`draft` by default."""
    return _made(family, seed, {})


def head(family: str, seed: int = 1) -> PreTrainedModel:
    """A head with random weights that drafts for the model of a family: the assistants of Gemma 4."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2}
    text = _family(family).config(sizes, len(tokenizer(family))).text_config.to_dict()
    text |= {"enable_moe_block": False, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 0}
    text |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": None, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model(f"{family}_assistant", text_config=text, backbone_hidden_size=64)
    with torch.random.fork_rng(devices=[]):
        result = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(result, seed)
    return result.eval()


def _made(family: str, seed: int, text_overrides: Mapping[str, Any]) -> PreTrainedModel:
    words = tokenizer(family)
    config = _family(family).config(text_overrides, len(words))
    # the tokenizer of Apertus and the tower of GOT-OCR 2 know one way only, and scores are capped by one
    if family not in ("apertus1p5", "got_ocr2") and not getattr(config.text_config, "attn_logit_softcapping", None):
        config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        result = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _fill(result, seed)
    with torch.no_grad():  # special tokens never win: no early end, no stray placeholder
        result.lm_head.weight[words.all_special_ids] = 0.0
    result.generation_config = GenerationConfig(
        pad_token_id=words.pad_token_id, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id
    )
    return result.eval()


@torch.no_grad()
def _fill(result: PreTrainedModel, seed: int) -> None:
    """Random weights, large enough that attention and logits are far from uniform."""
    for name, parameter in result.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            if name.endswith("weight") or "lambda" in name:  # norms, some of which add one themselves, and layer scales
                noise = float(parameter.any()) + 0.1 * noise
            elif (
                "softmax_scaling" in name
            ):  # by how much queries are scaled, and grow with the logarithm of their position
                noise = 0.1 * noise + float(name.endswith("bias"))
            elif name.endswith("A_log"):  # states that remember some ten tokens
                noise = 0.5 * noise - 3
            else:  # biases, class and newline embeddings
                noise *= 0.1 if name.endswith("bias") else 0.5
        elif parameter.ndim < 4 and ("embed" in name or "cls_token" in name):
            noise *= 0.5
        else:
            # the matrices of experts lie one behind the other
            noise *= 1.2 / math.sqrt(parameter.shape[-1] if "experts" in name else parameter[0].numel())
        parameter.copy_(noise)


# --------------------------------------------------------------------------------------------------------- the inputs


def image(width: int, height: int, seed: int) -> Image.Image:
    """A picture with a gradient, some rectangles of one colour, and noise."""
    return Image.fromarray(clip(1, width, height, seed)[0])


def clip(frames: int, width: int, height: int, seed: int) -> np.ndarray:
    """Frames `[frames, height, width, 3]` of uint8: a still background with rectangles, and one that moves."""
    return _clip(frames, width, height, seed).copy()


@functools.lru_cache(64)
def _clip(frames: int, width: int, height: int, seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, frames, width, height])
    rows, columns = np.mgrid[0:height, 0:width]
    slope = random.uniform(-1, 1, (3, 2))
    scene = 128 + 80 * (slope[:, 0] * (rows / height)[..., None] + slope[:, 1] * (columns / width)[..., None])
    for _ in range(4):
        top, left = random.integers(0, height), random.integers(0, width)
        scene[top : top + height // 3, left : left + width // 3] = random.uniform(0, 255, 3)
    colour, top = random.uniform(0, 255, 3), random.integers(0, max(1, height // 2))
    film = np.repeat(scene[None], frames, axis=0)
    for frame in range(frames):
        left = frame * width // max(1, frames)
        film[frame, top : top + height // 3, left : left + width // 4] = colour
    return np.clip(film + random.normal(0, 12, film.shape), 0, 255).astype(np.uint8)


def kinds(family: str) -> tuple[str, ...]:
    """The kinds of `inputs` that the family can take."""
    spec = _family(family)
    return (
        "image",
        "images",
        *(("video",) if spec.video else ()),
        *(("mixed",) if spec.mixed else ()),
        "uneven",
        "textrow",
        "text",
    )


def _rows(family: str, kind: str, batch: int, question: str) -> list[tuple[list[int], int, str]]:
    """Of every row: which of the family's picture sizes it shows, its number of clips, and its question."""
    longer = f"{question} and where, and why?"
    pattern: list[tuple[list[int], int, str]] = {
        "image": [([0], 0, question)],
        "images": [([0, 1], 0, question)],
        "video": [([], 1, question)],
        "mixed": [([0], 1, question)],
        "uneven": [([1], 0, longer), ([0, 1], 0, question)],
        "textrow": [([0], 0, question), ([], 0, longer)],
        "text": [([], 0, question)],
    }[kind]
    count = max(batch, len(pattern))
    return [pattern[row % len(pattern)] for row in range(count)]


def messages(pictures: list[Any], clips: list[Any], question: str) -> list[dict[str, Any]]:
    """One user turn with its pictures and clips before the question, as `apply_chat_template` takes it."""
    content = [{"type": "image", "image": one} for one in pictures] + [{"type": "video", "video": one} for one in clips]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


def encode(
    family: str, rows: list[tuple[list[Image.Image], list[np.ndarray], str]], worker: ProcessorMixin | None = None
) -> BatchFeature:
    """What the real processor, or the ``worker`` made of it, gives for rows of pictures, clips and a question, padded
    on the left."""
    worker = worker or processor(family)
    template = {"chat_template": _chat_template(family), "tokenize": False, "add_generation_prompt": True}
    text = [worker.tokenizer.apply_chat_template(messages(*row), **template) for row in rows]
    clips = [one for row in rows for one in row[1]]
    media: dict[str, Any] = {}
    options = _family(family).options
    if options is not None:
        pictures = [one for row in rows for one in row[0]]
        media = {"images": pictures, **options} if pictures else {}
        worker = worker if pictures else worker.tokenizer
    elif any(row[0] for row in rows):
        media["images"] = [row[0] for row in rows]
    if clips:
        media["videos"] = [row[1] for row in rows]
        media["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [_metadata(one) for one in clips]}
    made = worker(text=text, padding=True, return_tensors="pt", **media)
    # PaliGemma's are of the prompt, for those who train
    made.pop("labels", None)
    if family == "paligemma":
        made.setdefault("token_type_ids", torch.zeros_like(made["input_ids"]))
    return made


def _metadata(frames: np.ndarray) -> VideoMetadata:
    count, height, width, _ = frames.shape
    return VideoMetadata(
        total_num_frames=count,
        fps=VIDEO_FPS,
        width=width,
        height=height,
        duration=count / VIDEO_FPS,
        frames_indices=list(range(count)),
    )


def inputs(family: str, kind: str = "image", batch: int = 1, seed: int = 0, question: str = QUESTION) -> BatchFeature:
    """Inputs of `generate` on the CPU.

    Parameters
    ----------
    family
        One of `FAMILIES`.
    kind
        `image`: a picture a row; `images`: two pictures of different sizes a row; `video`: a clip a row; `mixed`: a
        picture and a clip a row; `uneven`: rows with one and with two pictures and questions of different length, left
        padded; `textrow`: an image row and a (longer asked) text row; `text`: no picture. See `kinds`.
    batch
        Rows; `uneven` and `textrow` have at least two. Every row has its own pictures.
    seed
        Of the pictures.
    question
        Of every row; the first row of `uneven` and the second of `textrow` ask a longer one.
    """
    if kind not in kinds(family):
        raise ValueError(f"{family} has no inputs of kind {kind!r}; it has {', '.join(kinds(family))}")
    spec = _family(family)
    rows = []
    for row, (pictures, clips, words) in enumerate(_rows(family, kind, batch, question)):
        start = 1000 * seed + 10 * row
        rows.append(
            (
                [image(*spec.sizes[size], start + place) for place, size in enumerate(pictures)],
                [clip(*spec.clip, start + 5 + place) for place in range(clips)],
                words,
            )
        )
    return encode(family, rows)


def behind(family: str) -> int:
    """What `token_type_ids` say of text behind a prompt: that it is no part of one which attends both ways."""
    return int(family == "paligemma")


def typed(family: str) -> list[tuple[str, int]]:
    """Inputs with a type for every token, and that of text behind a prompt."""
    return [("mm_token_type_ids", 0), ("moe_mm_token_type_ids", 0), ("token_type_ids", behind(family))]


def visual_mask(family: str, model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Which positions of `input_ids` are placeholders of pictures or clips, bool `[batch, length]`."""
    config = model.config
    tokens = [config.image_token_id, getattr(config, "video_token_id", config.image_token_id)]
    return torch.isin(input_ids, torch.tensor(tokens, device=input_ids.device))


# ------------------------------------------------------------------------------------------------------- single rows


def _placeholder(family: str, modality: str) -> int | None:
    """The id that this modality's pixels fill; InternVL's frames and SmolVLM's travel as pictures, GLM's are written so."""
    ids = _ids(family)
    if family == "molmo2":
        return int(tokenizer(family).convert_tokens_to_ids(MOLMO_PATCH))
    if family.startswith("glm"):
        return ids["image_token"]
    if "context_image_token" in ids:
        return ids["context_image_token"] if modality == "image" else None
    return ids.get(f"{modality}_token")


_PIXELS = {"image": ("pixel_values", "pixel_values_images"), "video": ("pixel_values_videos",)}
_PACKED = {"image": "target_sizes", "video": "target_sizes_videos"}
_PER_ITEM = {
    "image": (
        "target_sizes",
        "image_sizes",
        "image_grid_thw",
        "image_merge_sizes",
        "num_local_patches",
        "spatial_shapes",
        "pixel_attention_mask",
        "image_position_ids",
        "image_grids",
        "image_num_crops",
    ),
    "video": (
        "target_sizes_videos",
        "video_grid_thw",
        "video_merge_sizes",
        "second_per_grid_ts",
        "video_second_per_grid",
        "video_position_ids",
        "video_grids",
    ),
}


def _tokens_per_item(family: str, modality: str, values: dict[str, Any], pixels: torch.Tensor, total: int) -> list[int]:
    """How many placeholders every picture or clip of the batch fills, in order (for InternVL: every tile)."""
    grids = values.get(f"{modality}_grid_thw")
    if family == "hunyuan_vl":
        return [h // 2 * (w // 2 + 1) + 2 for _, h, w in values["image_grid_thw"].tolist()]
    if grids is not None and family == "ernie4_5_vl_moe" and modality == "video":
        return (grids.prod(-1) // 8).tolist()
    if grids is not None and family == "kimi_k25":
        return (grids[:, 1:].prod(-1) // 4).tolist()
    if grids is not None:
        return (grids.prod(-1) // values.get(f"{modality}_merge_sizes", torch.tensor(2)) ** 2).tolist()
    if (grids := values.get(f"{modality}_grids")) is not None:
        return (grids[:, :2].prod(-1) + grids[:, 2:].prod(-1) if modality == "image" else grids.prod(-1)).tolist()
    if _PACKED[modality] in values:
        return (values[_PACKED[modality]].prod(-1) // (4 if family == "minicpm_ocr" else 16)).tolist()
    if (at := values.get(f"{modality}_position_ids")) is not None:
        return ((at >= 0).all(-1).flatten(1).sum(1) // (4 if family == "gemma4" else 1)).tolist()
    if "spatial_shapes" in values:
        return (values["spatial_shapes"] // 2).prod(-1).tolist()
    if family == "step3p7":
        return [16 + 9 * tiles for tiles in values["num_local_patches"].tolist()]
    if family == "apertus1p5":
        return (values["image_sizes"] // 8).prod(-1).tolist()
    if "num_local_patches" in values:
        return [16 * (1 + tiles) + 1 for tiles in values["num_local_patches"].tolist()]
    if modality == "video" or "image_sizes" not in values:
        return [total // len(pixels)] * len(pixels)
    worker, side = processor(family), pixels.shape[-1]
    if hasattr(worker, "image_break_token"):
        return (values["image_sizes"] // (worker.patch_size * worker.spatial_merge_size)).prod(-1).tolist()
    alone = [worker._get_number_of_features(*size, side, side) for size in values["image_sizes"].tolist()]
    if worker.vision_feature_select_strategy == "default":
        alone = [count - 1 for count in alone]
    if "batch_num_images" not in values:
        return alone
    several = [n != 1 for n in values["batch_num_images"].tolist() for _ in range(n)]
    return [worker.num_image_tokens + 1 if many else count for many, count in zip(several, alone, strict=True)]


def single(family: str, batch_inputs: BatchFeature | dict[str, Any], row: int) -> dict[str, Any]:
    """The inputs of one row alone, without padding and with its own pictures and clips only."""
    values = dict(batch_inputs)
    ids = values["input_ids"]
    real = values["attention_mask"][row].bool()
    result = {key: value[row : row + 1, real] for key, value in values.items() if _is_sequence(value, ids)}
    for modality, names in _PIXELS.items():
        name = next((name for name in names if values.get(name) is not None), None)
        token = _placeholder(family, modality)
        if name is None or token is None:
            continue
        pixels, counts = values[name], (ids == token).sum(-1).tolist()
        if pixels.ndim == 5 and family in (
            "smolvlm",
            "idefics3",
            "granite_docling",
        ):  # [batch, tiles, ...], filled up with empty tiles
            tiles = counts[row] // processor(family).image_seq_len
            if tiles:
                result.update({key: values[key][row : row + 1, :tiles] for key in values if key.startswith("pixel_")})
            continue
        filled = _tokens_per_item(family, modality, values, pixels, sum(counts))
        ends = np.cumsum([0, *filled])
        first, last = np.searchsorted(ends, [sum(counts[:row]), sum(counts[: row + 1])]).tolist()
        if first == last:
            continue
        grids = values.get(f"{modality}_grid_thw")
        edges = np.cumsum([0, *grids.prod(-1).tolist()]) if grids is not None else np.arange(len(pixels) + 1)
        if (packed := _PACKED[modality]) in values:  # side by side, as many columns as a patch has
            columns = pixels.shape[2] * np.cumsum([0, *values[packed].prod(-1).tolist()])
            result[name] = pixels[..., columns[first] : columns[last]]
        elif (pooled := values.get(f"{modality}_token_pooling")) is not None:
            crops = values["image_num_crops"] if modality == "image" else values["video_grids"][:, 0]
            starts = np.cumsum([0, *crops.tolist()])
            mine = pooled[ends[first] : ends[last]]
            result[name] = pixels[starts[first] : starts[last]]
            result[f"{modality}_token_pooling"] = torch.where(mine < 0, mine, mine - starts[first] * pixels.shape[1])
        else:
            result[name] = pixels[edges[first] : edges[last]]
        result.update({key: values[key][first:last] for key in _PER_ITEM[modality] if key in values})
        if "pixel_values_local" in values:
            starts = np.cumsum([0, *values["num_local_patches"].tolist()])
            if starts[first] < starts[last]:
                result["pixel_values_local"] = values["pixel_values_local"][starts[first] : starts[last]]
        if modality == "video" and "video_compression_mask" in values:
            result["video_compression_mask"] = values["video_compression_mask"][ends[first] : ends[last]]
        if modality == "video" and "num_frames_per_video" in values:
            result["num_frames_per_video"] = values["num_frames_per_video"].new_tensor([last - first])
        if modality == "image" and "batch_num_images" in values:
            result["batch_num_images"] = values["batch_num_images"].new_tensor([last - first])
    return result


def _is_sequence(value: Any, ids: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == ids.shape


# --------------------------------------------------------------------------------------------------------------- main


def _check(family: str) -> None:
    """Run every kind once: the prompt comes back, and every row alone gives the batch's logits."""
    tiny = model(family)
    print(f"{family}: {sum(parameter.numel() for parameter in tiny.parameters()):,} parameters")
    for kind in kinds(family):
        feed = inputs(family, kind)
        ids = feed["input_ids"]
        visual = visual_mask(family, tiny, ids).sum(-1).tolist()
        out = tiny.generate(**feed, max_new_tokens=4, do_sample=False)
        assert out.shape[1] == ids.shape[1] + 4, f"{family} {kind}: ended early"
        assert torch.equal(out[:, : ids.shape[1]], ids), f"{family} {kind}: the prompt did not come back"
        with torch.no_grad():
            logits = tiny(**feed).logits[:, -1]
            alone = torch.cat([tiny(**single(family, feed, row)).logits[:, -1] for row in range(len(ids))])
        gap = (logits - alone).abs().max().item()
        assert gap < 1e-4, f"{family} {kind}: a row alone differs by {gap}"
        print(f"  {kind:8} length {ids.shape[1]:4} visual {visual} row alone {gap:.1e} -> {out[:, -4:].tolist()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("transformers", transformers.__version__, "torch", torch.__version__)
    for chosen in sys.argv[1:] or FAMILIES:
        _check(chosen)
