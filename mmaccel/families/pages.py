"""``smol-pages``: a LLaVA that reads pages of text, around the pretrained SmolLM2-135M-Instruct (:mod:`.smollm2`).

Nothing was trained: the visual tokens of a page are the language model's own word embeddings, so attention, cache and layers
work as they do in a real language model. A picture holds the ids of the page's tokens. Every patch of 4 x 4 pixels is one id in
16 bits, white for 1, the lowest bit first, row by row; the CLIP tower hands the bits on, and the projector looks the ids up.

>>> from mmaccel import load
>>> from mmaccel.families.pages import page
>>> model, processor = load("smol-pages")            # 24 x 24 visual tokens; "smol-pages-2304" has 48 x 48
>>> picture = page(processor, "The secret number of the green tower is 8453.")  # fill it, see mmaccel.suite.make_page
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from PIL.Image import Image as PILImage
from torch import Tensor, nn

from ..errors import MmaccelError
from .smollm2 import build_llava, folder, language_weights

if TYPE_CHECKING:
    from transformers import LlavaConfig

#: pixels along a patch, whose 16 pixels are the bits of a token id
PATCH = 4
_BITS = PATCH * PATCH
_NAME = re.compile(r"smol-pages(?:-(\d{1,9}))?")
#: positions that are left for question and answer
_ROOM = 256
#: ids below are control tokens of the vocabulary
_CONTROL = 17


def is_pages(name: str) -> bool:
    """Whether :func:`mmaccel.load` takes ``name`` for a model of pages: ``smol-pages``, ``smol-pages-2304``."""
    return _NAME.fullmatch(name) is not None


class PageProjector(nn.Module):
    """Projector that looks up word embeddings by the ids that a picture spells.

    Parameters
    ----------
    words : the embedding of the language model, which keeps its place there.
    """

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self._words = (words,)  # in a tuple, so that the weights do not belong to this module too
        self.powers: Tensor
        self.register_buffer("powers", 2 ** torch.arange(_BITS), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Word embeddings ``[B, tokens, width]`` of features ``[B, tokens, 32]``: the bits as 1 and -1, and their opposites.

        Raises
        ------
        MmaccelError
            If the picture is no page, or the vision tower merged its patches.
        """
        (words,) = self._words
        bits = features[..., :_BITS]
        ids = ((bits > 0) * self.powers).sum(-1)
        if bool(((bits.abs() - 1).abs() > 0.1).any() | (ids >= words.num_embeddings).any()):
            raise MmaccelError(
                "A picture is not a page, or tokens were merged in the vision tower; smol-pages reads pictures that "
                "mmaccel.families.pages.page() makes, unchanged up to the projector."
            )
        return words(ids)


def page(processor: Any, text: str) -> PILImage:
    """A picture of which the visual tokens are those of ``text``; what is left of the page is filled with line breaks.

    Parameters
    ----------
    processor : of ``smol-pages``, which knows how long a page is.

    Raises
    ------
    MmaccelError
        If the text is longer than a page, or holds a control token.
    """
    tokenizer, pixels = processor.tokenizer, processor.image_processor.crop_size["height"]
    side = pixels // PATCH
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > side * side:
        raise MmaccelError(
            f"The text has {len(ids)} tokens, and a page of this model {side * side}; shorten it, or load a model with longer "
            'pages, such as "smol-pages-2304".'
        )
    if control := [token for token in ids if token < _CONTROL]:
        raise MmaccelError(f"The text holds the control token {tokenizer.decode(control[:1])!r}; take it out.")
    (line,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    words = torch.tensor(ids + [line] * (side * side - len(ids)))
    bits = (words[:, None] >> torch.arange(_BITS)) & 1
    pattern = bits.view(side, side, PATCH, PATCH).transpose(1, 2).reshape(pixels, pixels)
    return Image.fromarray((255 * pattern).to(torch.uint8).numpy()).convert("RGB")


def load_pages(name: str, *, dtype: str, attn: str | None) -> tuple[Any, Any]:
    """The model of pages of this name and its processor, on the CPU.

    Parameters
    ----------
    dtype : of the weights; ``auto`` is float32.
    attn : the attention implementation, by default that of transformers.

    Raises
    ------
    MmaccelError
        If pages of that length are not square or exceed the model's positions, or the language model is not installed.
    """
    matched = _NAME.fullmatch(name)
    assert matched is not None
    tokens = int(matched[1] or 576)
    side = math.isqrt(tokens)
    if side * side != tokens or not tokens:
        raise MmaccelError(
            f"A page is square, and {tokens} tokens are not; smallest above is smol-pages-{(side + 1) ** 2}."
        )
    language = folder()
    described = json.loads((language / "config.json").read_text(encoding="utf-8"))
    positions = described["max_position_embeddings"]
    if tokens + _ROOM > positions:
        longest = math.isqrt(positions - _ROOM) ** 2
        raise MmaccelError(
            f"A page of {tokens} tokens, question and answer exceed the {positions} positions of SmolLM2; the longest is "
            f"smol-pages-{longest}."
        )
    config = _config(described, side)
    weights = language_weights(language) | _tower(config)
    model, processor = build_llava(language, config, weights, _image_processor(side), dtype=dtype, attn=attn)
    model.model.multi_modal_projector = PageProjector(model.get_input_embeddings())
    model.config._name_or_path = name
    return model, processor


def _config(language: dict[str, Any], side: int) -> LlavaConfig:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=2 * _BITS,
        intermediate_size=2 * _BITS,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=side * PATCH,
        patch_size=PATCH,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**language),
        image_token_index=3,
        vision_feature_layer=-1,
        image_seq_length=side * side,
        tie_word_embeddings=True,
    )


def _tower(config: LlavaConfig) -> dict[str, Tensor]:
    """Weights of a CLIP tower that hands bits and their opposites on: their mean is 0 and their variance 1, so that layer
    normalisation leaves them, and its one layer adds nothing."""
    from transformers import CLIPVisionModel

    tower: Any = CLIPVisionModel(config.vision_config)
    state = {
        name: torch.zeros_like(weight) for name, weight in tower.state_dict().items() if weight.is_floating_point()
    }
    for name, weight in state.items():
        if "norm" in name and name.endswith(".weight"):
            weight.fill_(1)
        elif name.endswith("patch_embedding.weight"):
            bits = torch.eye(_BITS).view(_BITS, 1, PATCH, PATCH)
            weight.copy_(torch.cat([bits, -bits]).expand_as(weight) / 3)  # three channels of one value
    return {f"model.vision_tower.{name}": weight for name, weight in state.items()}


def _image_processor(side: int) -> Any:
    from transformers import CLIPImageProcessor

    pixels = {"height": side * PATCH, "width": side * PATCH}
    half = [0.5, 0.5, 0.5]
    return CLIPImageProcessor(
        do_resize=False, do_center_crop=False, crop_size=pixels, size=pixels, image_mean=half, image_std=half
    )
