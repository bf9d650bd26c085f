"""A tiny InternVL as it is published: the model class InternVLChatModel, and a configuration with code of its own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import torch
import zoo
from safetensors.torch import save_file
from tiny import TOKENS, WIDE, Row
from vllm.transformers_utils.processors.internvl import image_to_pixel_values_internvl, video_to_pixel_values_internvl

from mmaccel import accelerate_vlm

NAME, SIDE, CELLS = "internvl_chat", 64, 16
CONTEXT = "<IMG_CONTEXT>"
#: as the checkpoints have it, without what nobody reads here
CODE = """from transformers import AutoConfig, PretrainedConfig


class InternVisionConfig(PretrainedConfig):
    model_type = "intern_vit_6b"


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **others):
        super().__init__(**others)
        self.vision_config = InternVisionConfig(**(vision_config or {}))
        self.llm_config = AutoConfig.for_model(**(llm_config or {"model_type": "qwen2"}))
"""
#: parts of names in transformers, and in these checkpoints
NAMES = [
    (r"^lm_head", "language_model.lm_head"),
    (r"^model\.language_model", "language_model.model"),
    (r"^model\.multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^model\.multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^model\.multi_modal_projector\.linear_2", "mlp1.3"),
    (r"^model\.vision_tower\.encoder\.layer", "vision_model.encoder.layers"),
    (r"^model\.vision_tower", "vision_model"),
    (r"cls_token", "class_embedding"),
    (r"position_embeddings", "position_embedding"),
    (r"patch_embeddings\.projection", "patch_embedding"),
    (r"lambda_", "ls"),
    (r"attention\.projection_layer", "attn.proj"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
]

zoo._TABLE[NAME] = dataclasses.replace(
    zoo._TABLE["internvl"],
    extra_tokens=("<image>", "<|video_pad|>"),
    image="<image>\n",
    processor=zoo._real(
        NAME,
        "InternVLProcessor",
        image_processor=zoo._part("GotOcr2ImageProcessor", size=zoo._square(SIDE)),
        video_processor=zoo._part("InternVLVideoProcessor", size=zoo._square(SIDE)),
        image_seq_length=CELLS,
    ),
)


def folder(parent: Path) -> Path:
    """The model below ``parent``; vLLM wants ``trust_remote_code=True`` for it."""
    place = parent / NAME
    place.mkdir()
    model = zoo.model(NAME, **WIDE)
    tower = model.config.vision_config
    vision = {name: getattr(tower, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    vision |= {"num_attention_heads": tower.num_attention_heads, "image_size": SIDE, "patch_size": tower.patch_size[0]}
    vision |= {"layer_norm_eps": tower.layer_norm_eps, "norm_type": "layer_norm", "hidden_act": "gelu"}
    vision |= {"qkv_bias": False, "qk_normalization": False, "initializer_factor": 1.0}
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": NAME,
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "vision_config": vision,
        "llm_config": {**model.config.text_config.to_dict(), "architectures": ["Qwen2ForCausalLM"]},
        "downsample_ratio": model.config.downsample_ratio,
        "select_layer": -1,
        "force_image_size": SIDE,
        "ps_version": "v2",
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (place / "config.json").write_text(json.dumps(config))
    (place / "configuration_internvl_chat.py").write_text(CODE)
    weights = {}
    for name, value in model.state_dict().items():
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        weights[name] = value
    for layer in range(tower.num_hidden_layers):
        at = f"vision_model.encoder.layers.{layer}."
        parts = [weights.pop(f"{at}attention.{part}_proj.weight") for part in "qkv"]
        weights[f"{at}attn.qkv.weight"] = torch.cat(parts)
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    zoo.tokenizer(NAME).save_pretrained(place)
    return place


def expected(given: list[Row], recipe: str | None = None, **options: object) -> list[list[int]]:
    """The tokens of transformers for the pixels and the prompts that vLLM makes, one prompt at a time."""
    model, words = zoo.model(NAME, **WIDE), zoo.tokenizer(NAME)
    if recipe is not None:
        accelerate_vlm(model, recipe, processor=zoo.processor(NAME), **options)
    template = {"chat_template": zoo._chat_template(NAME), "tokenize": False, "add_generation_prompt": True}
    answers = []
    for pictures, clips, question in given:
        text = words.apply_chat_template(zoo.messages(pictures, clips, question), **template)
        pixels = []
        for one in pictures:
            pixels.append(
                image_to_pixel_values_internvl(one, input_size=SIDE, min_num=1, max_num=4, use_thumbnail=True)
            )
            text = text.replace("<image>", f"<img>{CONTEXT * CELLS * len(pixels[-1])}</img>", 1)
        for one in clips:
            pixels.append(
                video_to_pixel_values_internvl(one, input_size=SIDE, min_num=1, max_num=1, use_thumbnail=False)
            )
            frames = [f"Frame{i + 1}: <img>{CONTEXT * CELLS}</img>" for i in range(len(one))]
            text = text.replace("<video>", "".join(frames), 1)
        ids = torch.tensor([words.encode(text, add_special_tokens=False)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.cat(pixels)}
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers
