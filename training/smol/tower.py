"""The tower of ``mini-smol``: that of ``mini-llava-deep`` at 200 pixels, taught to read pages by dense labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionModel

from mmaccel.suite.document import DOCUMENTS, GLYPHS, Document, document_cells, render_document, sample_document
from mmaccel.suite.questions import Turn
from mmaccel.suite.rng import Rng, item_seed
from mmaccel.suite.scene import Scene, render, sample_scene
from training.build import MEAN, STD, clip_tower
from training.data import labelled
from training.train import Probes, Sight

PIXELS, PATCH = 200, 10
GRID = PIXELS // PATCH
START = Path("packages/mmaccel-models/mmaccel_models/mini-llava-deep/model.safetensors")
DEEPEST = 2
"""So many characters of a cell are labelled."""


def start_tower(path: Path = START) -> CLIPVisionModel:
    """The tower of ``mini-llava-deep`` with its patches of 8 pixels stretched to 10."""
    tower = CLIPVisionModel(clip_tower(PIXELS, PATCH))
    weights = {
        name.removeprefix("model.").removeprefix("vision_tower.").removeprefix("vision_model."): weight.float()
        for name, weight in load_file(path).items()
        if name.removeprefix("model.").startswith("vision_tower.")
    }
    own = tower.state_dict()
    nested = next(iter(own)).startswith("vision_model.")
    name = "embeddings.patch_embedding.weight"
    wider = functional.interpolate(weights[name], (PATCH, PATCH), mode="bicubic", align_corners=False)
    weights[name] = wider * (weights[name].shape[-1] / PATCH) ** 2
    tower.load_state_dict({("vision_model." if nested else "") + name: weight for name, weight in weights.items()})
    return tower


def normalised(pixels: Tensor) -> Tensor:
    """Pictures uint8 ``[B, 3, height, width]`` as the processor hands them to the tower."""
    mean, std = (torch.tensor(level, device=pixels.device).view(3, 1, 1) for level in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def scene_at(split: str, number: int) -> Scene:
    """Scene ``number`` of a split."""
    return sample_scene(Rng(item_seed(split, number, stream=250)))


def page_at(split: str, number: int) -> tuple[Document, list[Turn]]:
    """Document ``number`` of a split, with its questions; the kinds follow each other."""
    kind = tuple(DOCUMENTS)[number % len(DOCUMENTS)]
    return sample_document(kind, Rng(item_seed(split, number, stream=251)))


def drawn(shown: Sequence[Scene | Document]) -> Tensor:
    """Draw scenes and pages: uint8 ``[B, 3, PIXELS, PIXELS]``."""
    pictures = [render(one, PIXELS) if isinstance(one, Scene) else render_document(one, PIXELS) for one in shown]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def glyph_labels(pages: list[Document]) -> tuple[Tensor, Tensor]:
    """The first characters of every cell, 0 for none, and which open a word: ``[pages, GRID * GRID, DEEPEST]`` each."""
    glyphs = torch.zeros(len(pages), GRID * GRID, DEEPEST, dtype=torch.int64)
    opens = torch.zeros(len(pages), GRID * GRID, DEEPEST)
    for number, page in enumerate(pages):
        for at, cell in enumerate(shown for row in document_cells(page, GRID) for shown in row):
            letters = cell.replace(" ", "")[:DEEPEST]
            places = [place for place, letter in enumerate(cell) if letter != " "]
            for place, letter in enumerate(letters):
                glyphs[number, at, place] = 1 + GLYPHS.index(letter)
                opens[number, at, place] = float(places[place] > 0 and cell[places[place] - 1] == " ")
    return glyphs, opens


@dataclass
class DenseLabels:
    """What every cell of some pictures shows. Scenes and pages are int64, their places among the pictures."""

    scenes: Tensor
    pages: Tensor
    cells: dict[str, Tensor]
    """Of the scenes, as in :func:`training.data.labelled`; nothing without scenes."""
    glyphs: Tensor
    opens: Tensor

    @classmethod
    def of(cls, shown: Sequence[Scene | Document]) -> DenseLabels:
        """The labels of pictures."""
        scenes = [at for at, one in enumerate(shown) if isinstance(one, Scene)]
        pages = [at for at, one in enumerate(shown) if isinstance(one, Document)]
        cells = labelled([[one] for one in shown if isinstance(one, Scene)], GRID) if scenes else {}
        return cls(
            torch.tensor(scenes, dtype=torch.int64),
            torch.tensor(pages, dtype=torch.int64),
            cells,
            *glyph_labels([one for one in shown if isinstance(one, Document)]),
        )

    def to(self, device: torch.device | str) -> DenseLabels:
        """The same on a device."""
        return type(self)(**{part.name: moved(getattr(self, part.name), device) for part in fields(self)})


def moved(value: Any, device: torch.device | str) -> Any:
    """A tensor, or a dictionary of them, on a device."""
    if isinstance(value, dict):
        return {name: part.to(device) for name, part in value.items()}
    return value.to(device)


class Reader(nn.Module):
    """The tower with the heads that only training has: what every cell shows of a scene, and of a page."""

    def __init__(self, tower: CLIPVisionModel) -> None:
        super().__init__()
        self.tower = tower
        tower.set_attn_implementation("plain")
        width = tower.config.hidden_size
        self.probes = Probes(width, width)
        self.norm = nn.LayerNorm(width)
        self.glyphs = nn.Linear(width, DEEPEST * (len(GLYPHS) + 2))

    def see(self, pixels: Tensor) -> Sight:
        """Run the tower on uint8 pictures."""
        with torch.autocast(pixels.device.type, torch.bfloat16):
            seen = self.tower(normalised(pixels), output_hidden_states=True)
        cells = seen.hidden_states[-2].float()
        return Sight(cells[:, 1:], None, cells[:, 0], seen.pooler_output.float())

    def read(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the characters ``[B, N, DEEPEST, len(GLYPHS) + 1]`` and of opening a word ``[B, N, DEEPEST]``."""
        told = self.glyphs(self.norm(cells)).unflatten(-1, (DEEPEST, -1))
        return told[..., :-1], told[..., -1]

    def forward(self, sight: Sight, labels: DenseLabels) -> tuple[Tensor, dict[str, float]]:
        """Loss and accuracies of the dense labels."""
        scenes, pages = labels.scenes, labels.pages
        count = len(scenes) + len(pages)
        loss, scores = sight.cells.new_zeros(()), {}
        if len(scenes):
            assert sight.early is not None and sight.late is not None
            part = Sight(sight.cells[scenes], None, sight.early[scenes], sight.late[scenes])
            loss, scores = self.probes(part, labels.cells)
            loss = loss * len(scenes) / count
        if len(pages):
            glyphs, opens = labels.glyphs, labels.opens
            told, opening = self.read(sight.cells[pages])
            each = functional.cross_entropy(told.flatten(0, 2), glyphs.flatten(), reduction="none").view_as(glyphs)
            written = glyphs > 0
            read = each[written].mean() + each[~written].mean()
            read = read + 0.5 * functional.binary_cross_entropy_with_logits(opening[written], opens[written])
            loss = loss + 2 * read * len(pages) / count
            right = told.argmax(-1) == glyphs
            for place in range(DEEPEST):
                scores[f"glyph {place + 1}"] = right[..., place][written[..., place]].float().mean().item()
            scores["empty"] = right[~written].float().mean().item()
        return loss, scores
