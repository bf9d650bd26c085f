"""Untrained mini models with their processors: real transformers classes, small sizes, a vocabulary built in code."""

from __future__ import annotations

import math
from functools import partial

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.decoders import WordPiece
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from mmaccel.suite.questions import vocabulary

SPECIAL = ("<pad>", "<s>", "<unk>", "<image>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, UNKNOWN, IMAGE, USER, ASSISTANT, END = range(len(SPECIAL))
PIXELS, PATCH = 112, 8
GRID = PIXELS // PATCH
DEEP_PIXELS, DEEP_LAYERS = 160, 12
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
VOCABULARY_SIZE = 192
VISION_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Marks of the Qwen family; their ids follow the vocabulary's."""

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A turn is ``<|user|> pictures question <|assistant|> answer <|end|>``."""


def word_ids() -> dict[str, int]:
    """Every word and its token id; the special tokens come first, the marks of the Qwen family last."""
    return {word: number for number, word in enumerate((*SPECIAL, *vocabulary(), *VISION_SPECIAL))}


def prefix(model: str, places: list[int], clip: bool = False) -> list[int]:
    """The ids before the first question: beginning, user, ``places[i]`` placeholders for the i-th picture or clip."""
    ids, words = [BOS, USER], word_ids()
    for count in places:
        if model == "mini-qwen-vl":
            pad = words["<|video_pad|>" if clip else "<|image_pad|>"]
            ids += [words["<|vision_start|>"], *[pad] * count, words["<|vision_end|>"]]
        else:
            ids += [IMAGE] * count
    return ids


def build_tokenizer(extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A word-level tokenizer over the suite's vocabulary; case and punctuation do not matter to it."""
    letters = [word for word in vocabulary() if len(word) == 1 and word.isupper()]
    backend = Tokenizer(models.WordLevel(word_ids(), unk_token="<unk>"))
    # Single capitals are characters to read; everything else is lower case. "color" and "there's" style variants that
    # users type are mapped onto the suite's spelling.
    lower = [
        normalizers.Replace(Regex(rf"\b(?!(?:{'|'.join(letters)})\b){capital}"), capital.lower())
        for capital in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    ]
    backend.normalizer = normalizers.Sequence([*lower, normalizers.Replace("color", "colour")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+\.\d+|\w+|[^\w\s]"), behavior="removed", invert=True)
    backend.decoder = WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<|user|>", "<|assistant|>", *extra],
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_llava_processor(pixels: int = PIXELS) -> LlavaProcessor:
    """The processor of ``mini-llava``: pictures of ``pixels`` a side in patches of 8, each a visual token."""
    pictures = CLIPImageProcessor(
        size={"height": pixels, "width": pixels},
        do_center_crop=False,
        image_mean=list(MEAN),
        image_std=list(STD),
        resample=3,
    )
    return LlavaProcessor(
        image_processor=pictures,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        num_additional_image_tokens=1,
    )


def lattice(rows: int, columns: int, width: int) -> torch.Tensor:
    """Sines and cosines of the row and of the column: ``[rows * columns, width]``, a start for learned positions.

    Neighbours are alike from the first step, which spares a small tower the many steps of finding its own geometry.
    """
    waves = torch.exp(torch.arange(width // 4) * (-math.log(40.0) / (width // 4))) * math.pi / 2
    down, across = torch.arange(rows)[:, None] * waves, torch.arange(columns)[:, None] * waves
    down, across = (torch.cat((place.sin(), place.cos()), 1) for place in (down, across))
    halves = down[:, None].expand(-1, columns, -1), across[None].expand(rows, -1, -1)
    return torch.cat(halves, 2).reshape(rows * columns, width)


def clip_tower(pixels: int, patch: int) -> CLIPVisionConfig:
    """The configuration of the CLIP towers of small models, for square pictures of ``pixels`` and patches of ``patch``."""
    return CLIPVisionConfig(
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=6,
        num_attention_heads=5,
        image_size=pixels,
        patch_size=patch,
        projection_dim=128,
        hidden_act="gelu",
    )


def build_llava(pixels: int = PIXELS, layers: int = 5) -> LlavaForConditionalGeneration:
    """``mini-llava`` with random weights: a CLIP tower with CLS, its last layer but one, and a grouped-query Llama."""
    vision = clip_tower(pixels, PATCH)
    text = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE,
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            tie_word_embeddings=False,
        )
    )
    places = model.model.vision_tower.embeddings.position_embedding.weight
    with torch.no_grad():
        places[1:] = 0.25 * lattice(pixels // PATCH, pixels // PATCH, vision.hidden_size)
    settings = model.generation_config
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = PAD, BOS, END
    settings.max_new_tokens, settings.do_sample = 64, False
    return model


QWEN_PATCH, QWEN_MERGE, QWEN_FRAMES = 8, 2, 2
QWEN_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}",
    "{% for part in message['content'] if part['type'] != 'text' %}<|vision_start|>"
    "{% if part['type'] == 'video' %}<|video_pad|>{% else %}<|image_pad|>{% endif %}<|vision_end|>{% endfor %}",
)


def build_qwen_processor() -> Qwen2_5_VLProcessor:
    """The processor of ``mini-qwen-vl``: any size, patches of 8 merged 2x2, two frames a step of a clip."""
    shared = {
        "patch_size": QWEN_PATCH,
        "merge_size": QWEN_MERGE,
        "temporal_patch_size": QWEN_FRAMES,
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    pictures = Qwen2VLImageProcessor(size={"shortest_edge": 96 * 96, "longest_edge": 256 * 256}, **shared)
    clips = Qwen2VLVideoProcessor(
        size={"shortest_edge": 96 * 96, "longest_edge": 128 * 128},
        do_sample_frames=False,
        cap_pixels_per_frame=False,  # said outright, transformers has no need to warn
        **shared,
    )
    return Qwen2_5_VLProcessor(
        image_processor=pictures,
        tokenizer=build_tokenizer(VISION_SPECIAL),
        video_processor=clips,
        chat_template=QWEN_TEMPLATE,
    )


def build_qwen() -> Qwen2_5_VLForConditionalGeneration:
    """``mini-qwen-vl`` with random weights: window attention, a 2x2 merger, M-RoPE, pictures and clips."""
    words = word_ids()
    vision = {
        "depth": 6,
        "hidden_size": 160,
        "intermediate_size": 416,
        "num_heads": 5,
        "patch_size": QWEN_PATCH,
        "spatial_merge_size": QWEN_MERGE,
        "temporal_patch_size": QWEN_FRAMES,
        "window_size": 64,
        "fullatt_block_indexes": [2, 5],
        "out_hidden_size": 192,
        "tokens_per_second": 4,
    }
    text = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": END,
    }
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=words["<|image_pad|>"],
            video_token_id=words["<|video_pad|>"],
            vision_start_token_id=words["<|vision_start|>"],
            vision_end_token_id=words["<|vision_end|>"],
            tie_word_embeddings=False,
        )
    )
    settings = model.generation_config
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = PAD, BOS, END
    settings.max_new_tokens, settings.do_sample = 64, False
    return model


BUILDERS = {
    "mini-llava": (build_llava, build_llava_processor),
    "mini-llava-deep": (partial(build_llava, DEEP_PIXELS, DEEP_LAYERS), partial(build_llava_processor, DEEP_PIXELS)),
    "mini-qwen-vl": (build_qwen, build_qwen_processor),
}
"""Name of a mini model -> how to build it with random weights, and its processor."""
