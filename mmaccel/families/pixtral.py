"""Pixtral, Mistral 3 and LightOnOCR: pictures of any size, packed into one sequence by the tower of Pixtral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import CLIP_STD, EncoderCall


class Mistral3(Family):
    """One token for each block of ``merge`` x ``merge`` patches. Marks behind their rows in the prompt are text."""

    name = "mistral3"
    model_types: ClassVar[tuple[str, ...]] = ("mistral3",)
    place = 20
    facts = Facts("yes, any size", clips=False, cls=False, merging="2x2 blocks")
    one_call = True
    joins_along = 1
    usual_std = CLIP_STD
    layers_path = "transformer.layers"
    attention_name = "attention"

    @property
    def merge(self) -> int:
        """Patches along one side of a merged block."""
        return int(self.config.spatial_merge_size)

    def frames(self, encoded: EncoderCall) -> list[list[tuple[int, int]]]:
        """Pictures are packed one behind the other; attention stays inside each."""
        patch, given = self.vision.patch_size, encoded.arguments.get("image_sizes")
        if given is None:
            # LLaVA may be called without: all pictures are as large as the tensor then
            pixels: Tensor = encoded.arguments["pixel_values"]
            given = [pixels.shape[-2:]] * len(pixels)
        return [[(height // patch, width // patch)] for height, width in torch.as_tensor(given).tolist()]

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """The blocks that the patch merger joins, without the rest of rows and columns that is less than a block."""
        assert width is not None
        m, height = self.merge, patches // width
        whole = torch.arange(patches).view(height, width)[: height // m * m, : width // m * m]
        return whole.unflatten(1, (-1, m)).unflatten(0, (-1, m)).transpose(1, 2).reshape(-1, m * m)

    def tower_sizes(self, given: Mapping[str, Any]) -> list[int]:
        """Patches of every picture."""
        return [h * w for [(h, w)] in self.frames(EncoderCall(dict(given)))]

    def tower_part(self, given: Mapping[str, Any], sizes: Sequence[int], begin: int, end: int) -> dict[str, Any]:
        listed = given.get("image_sizes")
        whole = {**given, "image_sizes": torch.as_tensor(listed)} if isinstance(listed, (list, tuple)) else given
        return super().tower_part(whole, sizes, begin, end)

    def unit_pixels(self, encoded: EncoderCall, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every picture without the padding to the largest."""
        colours = pixels.new_tensor(self.image_std, dtype=torch.float32).view(-1, 1, 1)
        patch, joined, first = self.vision.patch_size, self.merge, 0
        of_size = dict[tuple[int, int], list[tuple[Tensor, Tensor]]]()
        for picture, [(h, w)] in zip(pixels, self.frames(encoded), strict=True):
            cut = (picture[:, : h * patch, : w * patch].float() * colours).view(-1, h, patch, w, patch)
            units = self.units(encoded, h * w, w).to(pixels.device)
            values = cut.permute(1, 3, 0, 2, 4).reshape(h * w, -1)[units].flatten(1)
            grid = h // joined, w // joined
            of_size.setdefault(grid, []).append((values.view(*grid, -1), first + units))
            first += h * w
        return [(torch.stack([v for v, _ in one]), torch.stack([at for _, at in one])) for one in of_size.values()]

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        return consecutive([[(1, h // self.merge, w // self.merge)] for [(h, w)] in self.frames(encoded)])

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        return self.blocks_mean(encoded, values)


class Pixtral(Mistral3):
    """A LLaVA with the tower of Pixtral: every patch is a token."""

    name = "pixtral"
    # LLaVA knows which are, by the tower
    model_types = ()
    facts = Facts("yes, any size", clips=False, cls=False)
    merge = 1


class LightOnOcr(Mistral3):
    """As Mistral 3, without marks between rows."""

    name = "lighton_ocr"
    model_types = ("lighton_ocr",)
    reads_pages = True
    tower_names = {"image": "vision_encoder"}
