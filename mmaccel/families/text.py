"""CLIP text towers: embed questions in the space of CLIP, and project a vision tower's patches into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.precision import without_autocast
from ..errors import MmaccelError
from ..method.model_options import load_once


@dataclass(frozen=True)
class TextTower:
    """A text tower, and the projection of the vision tower that was trained with it.

    name : as the user gave it.
    norm, projection : the vision tower's last norm and its projection into the common space, ``[width, d]``.
    texts : from a text to embeddings ``[segments, d]``; a text longer than the context of the tower has several.
    words : from a text to the embeddings of its tokens ``[tokens, d]``, those at its ends included.
    """

    name: str
    norm: nn.Module
    projection: Tensor
    texts: Callable[[str], Tensor]
    words: Callable[[str], Tensor]

    @property
    def width(self) -> int:
        """Width of the vision tower's hidden states."""
        return self.projection.shape[0]

    @torch.no_grad()
    def project(self, features: Tensor) -> Tensor:
        """Hidden states of patches ``[..., width]`` in the common space, ``[..., d]`` float32; NaN stays NaN."""
        with without_autocast(features.device):
            return self.norm(features.to(self.projection)) @ self.projection

    @torch.no_grad()
    def embed(self, texts: list[str], words: bool = False) -> tuple[Tensor, Tensor]:
        """``[N, q, d]`` float32 and ``[N, q]`` bool: the segments of every text, or its ``words``; an empty text has none."""
        read = self.words if words else self.texts
        with without_autocast(self.projection.device):
            embeds = [read(text) if text else self.projection.new_zeros(0, self.projection.shape[1]) for text in texts]
        valid = nn.utils.rnn.pad_sequence([torch.ones(len(x), dtype=torch.bool) for x in embeds], batch_first=True)
        return nn.utils.rnn.pad_sequence(embeds, batch_first=True), valid.to(self.projection.device)

    @staticmethod
    def load(name: str, device: torch.device | None = None) -> TextTower:
        """From a folder of a transformers or open_clip model, or ``NAME:WEIGHTS`` as open_clip knows it; in float32. Loaded
        once for all models that use it, see :func:`~mmaccel.method.model_options.load_once`."""
        return load_once("text tower", name, (str(device),), lambda: _load(name, device))


def _load(name: str, device: torch.device | None) -> TextTower:
    folder = Path(name)
    try:
        if (folder / "open_clip_config.json").is_file():
            return _open_clip(name, f"local-dir:{folder}", None, device)
        if folder.is_dir():
            return _transformers(name, device)
        model, _, weights = name.partition(":")
        if not weights:
            raise MmaccelError(
                f"clip={name!r} is not a folder; give the folder of a CLIP model, or an open_clip model with its weights "
                "such as 'ViT-L-14-336:openai'."
            )
        return _open_clip(name, model, weights, device)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise MmaccelError(f"The CLIP model {name!r} cannot be loaded: {error}") from error


def _transformers(name: str, device: torch.device | None) -> TextTower:
    from transformers import AutoConfig, AutoTokenizer, CLIPModel

    if (kind := AutoConfig.from_pretrained(name).model_type) != "clip":
        raise MmaccelError(
            f"{name!r} holds a {kind} model; clip= takes CLIP models, whose text and patches can be compared."
        )
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = CLIPModel.from_pretrained(name, dtype=torch.float32).eval().to(device)
    text_model, project = model.text_model, model.text_projection
    context = model.config.text_config.max_position_embeddings

    def read(text: str) -> tuple[Any, Tensor]:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        # cut where the context ends, the last piece filled up with zeros that are not looked at, as CDPruner does
        short = -ids.shape[1] % context
        seen = torch.ones_like(ids)
        pieces, masks = (nn.functional.pad(x, (0, short)).view(-1, context).to(device) for x in (ids, seen))
        return text_model(input_ids=pieces, attention_mask=masks), masks.bool()

    def texts(text: str) -> Tensor:
        embeds: Tensor = project(read(text)[0].pooler_output)
        return embeds

    def words(text: str) -> Tensor:
        output, valid = read(text)
        embeds: Tensor = project(output.last_hidden_state[valid])
        return embeds

    vision = model.vision_model
    return TextTower(name, vision.post_layernorm, model.visual_projection.weight.detach().T, texts, words)


def _open_clip(name: str, model_name: str, weights: str | None, device: torch.device | None) -> TextTower:
    try:
        import open_clip
    except ImportError as error:
        raise MmaccelError(f"clip={name!r} needs open_clip; pip install 'mmaccel[clip]'.") from error
    model: Any = open_clip.create_model(model_name, pretrained=weights, require_pretrained=True).eval().to(device)
    tokenizer = open_clip.get_tokenizer(model_name)
    norm, projection = getattr(model.visual, "ln_post", None), getattr(model.visual, "proj", None)
    if norm is None or not isinstance(projection, Tensor) or model.visual.final_ln_after_pool:
        raise MmaccelError(
            f"The vision tower of {name!r} does not project its patches; clip= takes CLIP models with a plain ViT."
        )

    # the rest of the vision tower is not needed
    model.visual = nn.Identity()
    half = getattr(model, "text", model)

    def texts(text: str) -> Tensor:
        # its tokenizers cut at the context
        embeds: Tensor = model.encode_text(tokenizer([text]).to(device)).float()
        return embeds

    def words(text: str) -> Tensor:
        ids, hidden = tokenizer([text]).to(device), []
        spot = half.ln_final.register_forward_hook(lambda module, args, output: hidden.append(output))
        try:
            model.encode_text(ids)
        finally:
            spot.remove()
        # the end of a text has the largest id, and behind it is padding
        read, project = hidden[0][0, : int(ids.argmax()) + 1], half.text_projection
        embeds: Tensor = (
            read if project is None else project(read) if isinstance(project, nn.Module) else read @ project
        )
        return embeds.float()

    return TextTower(name, norm, projection.detach(), texts, words)
