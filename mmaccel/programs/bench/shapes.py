"""Architectures of real models with random weights: their speed and memory are those of the real ones, their answers are not.

Sizes are those of the published ``config.json``; ``parameters`` is what the model's page on the hub says (safetensors
metadata, rounded as there), and a test counts them. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from ...errors import MmaccelError

#: ids of the placeholders and of ordinary words in every shape; embeddings are random, so which ids does not matter
IMAGE, VIDEO, START, END, WORDS = 3, 4, 5, 6, 16

#: memory that a run needs with the weights, as a share of them: at least, and with a long prompt
_HEADROOM, _ROOM = 1.15, 1.5


@dataclass(frozen=True)
class Shape:
    """One architecture.

    config : makes its configuration.
    source : the model on the hub whose configuration it is; None for the two that are ours.
    parameters : how many weights that model has, in billions.
    tile : pixels along one side of a picture, frame or tile as its tower sees it; None for towers of any size.
    cell : pixels along one side of one token, for towers of any size.
    frame : pixels along one side of a frame, for towers of any size.
    context : tokens that the model was trained for.
    scale : pictures of the workloads have this share of the sides of the real ones.
    """

    config: Callable[[], Any]
    source: str | None
    parameters: float | None
    context: int
    tile: int | None = None
    cell: int = 0
    frame: int = 0
    scale: float = 1.0


def _config(kind: str, **values: Any) -> Any:
    return AutoConfig.for_model(kind, **values)


def _text(
    kind: str,
    layers: int,
    width: int,
    inner: int,
    heads: tuple[int, int],
    vocabulary: int,
    tied: bool = False,
    theta: float = 1e4,
    **values: Any,
) -> Any:
    """A text configuration; ``heads`` are those of queries and of keys."""
    values.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": theta})
    return _config(
        kind,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        # no bench comes near it; it only sizes what some models precompute
        max_position_embeddings=262144,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **values,
    )


def _tower(kind: str, layers: int, width: int, inner: int, heads: int, image: Any, patch: Any, **values: Any) -> Any:
    return _config(
        kind,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        **values,
    )


def _clip_large() -> Any:
    """CLIP ViT-L/14 at 336 pixels."""
    return _tower("clip_vision_model", 24, 1024, 4096, 16, 336, 14, projection_dim=768)


def _llava(*text: Any) -> Callable[[], Any]:
    return lambda: _config(
        "llava", vision_config=_clip_large(), text_config=_text("llama", *text), image_token_index=IMAGE
    )


def _llava_next() -> Any:
    return _config(
        "llava_next",
        vision_config=_clip_large(),
        text_config=_text("llama", 32, 4096, 11008, (32, 32), 32064),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    )


def _onevision(tower: Callable[[], Any], step: int, *text: Any, **values: Any) -> Callable[[], Any]:
    """LLaVA-OneVision with tiles of ``step`` pixels, up to 6 by 6 of them."""
    values = {"theta": 1e6} | values

    def build() -> Any:
        words = _text("qwen2", *text, **values)
        return _config(
            "llava_onevision",
            vision_config=tower(),
            text_config=words,
            image_token_index=IMAGE,
            video_token_index=VIDEO,
            image_grid_pinpoints=[[step * i, step * j] for i in range(1, 7) for j in range(1, 7)],
            tie_word_embeddings=words.tie_word_embeddings,
        )

    return build


def _siglip() -> Any:
    """SigLIP so400m/14 at 384 pixels, less its last layer, which LLaVA-OneVision does not have."""
    return _tower("siglip_vision_model", 26, 1152, 4304, 16, 384, 14, vision_use_head=False)


def _qwen(kind: str, vision: dict[str, Any], *text: Any, **values: Any) -> Callable[[], Any]:
    """A Qwen model; the parts of its rotary embedding are those of heads of 128."""

    def build() -> Any:
        rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
        if kind.startswith("qwen3_vl"):
            rope |= {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}
        words = _text(f"{kind}_text", *text, rope_parameters=rope, **values)
        return _config(
            kind,
            vision_config=vision,
            text_config=words.to_dict(),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=words.tie_word_embeddings,
        )

    return build


def _qwen2_tower(out: int) -> dict[str, Any]:
    return {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": out,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _qwen25_tower(out: int) -> dict[str, Any]:
    return {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "out_hidden_size": out,
    }


def _qwen3_tower(depth: int, width: int, inner: int, deepstack: list[int], out: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deepstack,
        "out_hidden_size": out,
    }


def _glm() -> Any:
    """The class's own sizes, with a rotary embedding of half of each head."""
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    marks = {"image_start_token_id": START, "image_end_token_id": END}
    return _config("glm4v", text_config={"rope_parameters": rope}, image_token_id=IMAGE, video_token_id=VIDEO, **marks)


def _internvl() -> Any:
    return _config(
        "internvl",
        vision_config=_tower(
            "internvl_vision", 24, 1024, 4096, 16, [448, 448], [14, 14], attention_bias=True, use_qk_norm=False
        ),
        text_config=_text("qwen2", 28, 3584, 18944, (28, 4), 151674, theta=1e6),
        image_token_id=IMAGE,
        image_seq_length=256,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def _idefics3() -> Any:
    return _config(
        "idefics3",
        vision_config=_tower("idefics3_vision", 27, 1152, 4304, 16, 364, 14),
        text_config=_text("llama", 32, 4096, 14336, (32, 8), 128259, theta=5e5),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )


def _smolvlm() -> Any:
    return _config(
        "smolvlm",
        vision_config=_tower("smolvlm_vision", 27, 1152, 4304, 16, 384, 14),
        text_config=_text("llama", 24, 2048, 8192, (32, 32), 49280, theta=273768.0),
        image_token_id=IMAGE,
        scale_factor=3,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _pixtral(kind: str, image: int, patch: int, inner: int, **values: Any) -> Callable[[], Any]:
    """The tower of Pixtral and a language model of 40 layers."""
    return lambda: _config(
        kind,
        vision_config=_tower("pixtral", 24, 1024, 4096, 16, image, patch, hidden_act="silu"),
        text_config=_text("mistral", 40, 5120, inner, (32, 8), 131072, theta=1e9, head_dim=128, sliding_window=None),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        **values,
    )


def _little_siglip(side: int, patch: int, layers: int, width: int) -> Callable[[], Any]:
    return lambda: _tower(
        "siglip_vision_model", layers, width, 4 * width, width // 64 or 1, side, patch, vision_use_head=False
    )


_QWEN2 = {"cell": 28, "frame": 336, "context": 32768}
_QWEN25, _QWEN3 = {"cell": 28, "frame": 336, "context": 128000}, {"cell": 32, "frame": 320, "context": 262144}
SHAPES: dict[str, Shape] = {
    "llava-1.5-7b": Shape(
        _llava(32, 4096, 11008, (32, 32), 32064), "llava-hf/llava-1.5-7b-hf", 7.06, context=4096, tile=336
    ),
    "llava-1.5-13b": Shape(
        _llava(40, 5120, 13824, (40, 40), 32064), "llava-hf/llava-1.5-13b-hf", 13.4, context=4096, tile=336
    ),
    "llava-next-7b": Shape(_llava_next, "llava-hf/llava-v1.6-vicuna-7b-hf", 7.06, context=4096, tile=336),
    "llava-onevision-0.5b": Shape(
        _onevision(_siglip, 384, 24, 896, 4864, (14, 2), 152000, True),
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
        0.894,
        context=32768,
        tile=384,
    ),
    "llava-onevision-7b": Shape(
        _onevision(_siglip, 384, 28, 3584, 18944, (28, 4), 152000),
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        8.03,
        context=32768,
        tile=384,
    ),
    "qwen2-vl-2b": Shape(
        _qwen("qwen2_vl", _qwen2_tower(1536), 28, 1536, 8960, (12, 2), 151936, True),
        "Qwen/Qwen2-VL-2B-Instruct",
        2.21,
        **_QWEN2,
    ),
    "qwen2-vl-7b": Shape(
        _qwen("qwen2_vl", _qwen2_tower(3584), 28, 3584, 18944, (28, 4), 152064),
        "Qwen/Qwen2-VL-7B-Instruct",
        8.29,
        **_QWEN2,
    ),
    "qwen2.5-vl-3b": Shape(
        _qwen("qwen2_5_vl", _qwen25_tower(2048), 36, 2048, 11008, (16, 2), 151936, True),
        "Qwen/Qwen2.5-VL-3B-Instruct",
        3.75,
        **_QWEN25,
    ),
    "qwen2.5-vl-7b": Shape(
        _qwen("qwen2_5_vl", _qwen25_tower(3584), 28, 3584, 18944, (28, 4), 152064),
        "Qwen/Qwen2.5-VL-7B-Instruct",
        8.29,
        **_QWEN25,
    ),
    "qwen3-vl-4b": Shape(
        _qwen(
            "qwen3_vl",
            _qwen3_tower(24, 1024, 4096, [5, 11, 17], 2560),
            36,
            2560,
            9728,
            (32, 8),
            151936,
            True,
            head_dim=128,
        ),
        "Qwen/Qwen3-VL-4B-Instruct",
        4.44,
        **_QWEN3,
    ),
    "qwen3-vl-8b": Shape(
        _qwen(
            "qwen3_vl",
            _qwen3_tower(27, 1152, 4304, [8, 16, 24], 4096),
            36,
            4096,
            12288,
            (32, 8),
            151936,
            head_dim=128,
        ),
        "Qwen/Qwen3-VL-8B-Instruct",
        8.77,
        **_QWEN3,
    ),
    "qwen3-vl-30b-a3b": Shape(
        _qwen(
            "qwen3_vl_moe",
            _qwen3_tower(27, 1152, 4304, [8, 16, 24], 2048),
            48,
            2048,
            6144,
            (32, 4),
            151936,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        31.1,
        **_QWEN3,
    ),
    "glm-4.1v-9b": Shape(_glm, "zai-org/GLM-4.1V-9B-Thinking", 10.3, context=65536, cell=28, frame=336),
    "internvl3-8b": Shape(_internvl, "OpenGVLab/InternVL3-8B-hf", 7.94, context=32768, tile=448),
    "smolvlm2-2.2b": Shape(_smolvlm, "HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2.25, context=8192, tile=384),
    "idefics3-8b": Shape(_idefics3, "HuggingFaceM4/Idefics3-8B-Llama3", 8.46, context=10240, tile=364),
    "mistral-small-3.1-24b": Shape(
        _pixtral("mistral3", 1540, 14, 32768, spatial_merge_size=2),
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        24.0,
        context=131072,
        cell=28,
    ),
    "pixtral-12b": Shape(
        _pixtral("llava", 1024, 16, 14336, vision_feature_layer=-1, vision_feature_select_strategy="full"),
        "mistral-community/pixtral-12b",
        12.7,
        context=131072,
        cell=16,
    ),
    # two of ours with the plan of LLaVA-OneVision, which takes pictures, tiles and clips
    "tiny": Shape(
        _onevision(_little_siglip(64, 8, 2, 64), 64, 4, 64, 128, (4, 2), 512),
        None,
        None,
        context=32768,
        tile=64,
        scale=1 / 6,
    ),
    "small": Shape(
        _onevision(_little_siglip(192, 12, 6, 256), 192, 12, 512, 1408, (8, 2), 8192),
        None,
        None,
        context=32768,
        tile=192,
        scale=1 / 2,
    ),
}


def shape(name: str) -> Shape:
    """A shape by name.

    Raises
    ------
    MmaccelError
        If there is none; the message lists those that are.
    """
    if name not in SHAPES:
        raise MmaccelError(f"There is no shape {name!r}; known are {', '.join(SHAPES)}.")
    return SHAPES[name]


#: the size of the heads of a thin language model
_THIN_HEAD = 32


def thin_tower(config: Any) -> Any:
    """``config`` with a vision tower of a few layers and hardly any width, changed in place. Pictures make the tokens that they
    made; what the language model does, and what it costs, is as it was."""
    vision = config.vision_config
    if hasattr(vision, "depth"):
        values: dict[str, Any] = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1}
        if hasattr(vision, "embed_dim"):
            # that of Qwen2-VL names its own width so, and the language model's as others do their own
            values |= {"embed_dim": 32, "hidden_size": config.text_config.hidden_size}
        deep = hasattr(vision, "deepstack_visual_indexes")
        values |= {"deepstack_visual_indexes": [0, 1, 2]} if deep else {"fullatt_block_indexes": [3]}
    else:
        values = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1}
        # that of Pixtral is written into its configuration
        values |= {"head_dim": 32}
    return _change(config, vision, values)


def thin(config: Any, layers: int) -> Any:
    """``config`` with hardly any width in the language model either, and with so many layers of it, changed in place: a step
    costs what the host does, and next to nothing else."""
    text = config.text_config
    values: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 4 * _THIN_HEAD,
        "intermediate_size": 64,
        "vocab_size": 2048,
        "num_experts": 16,
        "moe_intermediate_size": 32,
    }
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": _THIN_HEAD}
    values |= {"layer_types": ["full_attention"] * layers}
    if sections := text.rope_parameters.get("mrope_section"):
        width = int(_THIN_HEAD * text.rope_parameters.get("partial_rotary_factor", 1)) // 2
        parts = [part * width // sum(sections) for part in sections]
        text.rope_parameters["mrope_section"] = [width - sum(parts[1:]), *parts[1:]]
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = 4 * _THIN_HEAD
    return thin_tower(_change(config, text, values))


def _change(config: Any, part: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        if hasattr(part, name):
            setattr(part, name, value)
    return config


def skeleton(name: str, dtype: torch.dtype = torch.float32, config: Any = None) -> Any:
    """The model of a shape without memory for its weights (on the device ``meta``); ``config`` may stand in for its own."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config or shape(name).config(), dtype=dtype).eval()


def count_parameters(model: nn.Module) -> int:
    """Weights of a model; those that are tied count once."""
    return sum(weight.numel() for weight in {id(p): p for p in model.parameters()}.values())


def build(name: str, device: torch.device, dtype: torch.dtype, config: Any = None) -> Any:
    """The model of a shape on a device, with random weights; ``config`` may stand in for its own, see :func:`thin`.

    It is planned without memory, then laid out empty on the device in its final type and initialised there as transformers
    would, so that 7B never pass through the memory of the host.

    Raises
    ------
    MmaccelError
        If the weights and what a run needs beside them do not fit.
    """
    model = skeleton(name, dtype, config)
    needed = count_parameters(model) * dtype.itemsize * _HEADROOM
    if (free := free_memory(device)) is not None and needed > free:
        raise MmaccelError(
            f"Shape {name!r} needs about {needed / 2**30:.0f} GiB in {str(dtype).removeprefix('torch.')}, but {device} has "
            f"{free / 2**30:.0f} GiB free; take a smaller shape such as 'tiny' or 'small', or a larger device."
        )
    model.to_empty(device=device)
    torch.manual_seed(0)
    # also computes the buffers that no checkpoint holds, such as frequencies of rotary embeddings, and ties what is tied
    model.init_weights()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def largest(device: torch.device, dtype: torch.dtype) -> str | None:
    """The shape of the largest model that fits on a device with room for a long prompt, or None."""
    free = free_memory(device) or 0
    room = {name: one.parameters * 1e9 * dtype.itemsize * _ROOM for name, one in SHAPES.items() if one.parameters}
    return max((name for name, bytes_ in room.items() if bytes_ < free), key=room.__getitem__, default=None)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a device has free, if that can be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
