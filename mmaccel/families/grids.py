"""Families whose towers pack pictures of any size, and the frames of clips, into one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts, Family, consecutive
from .tower import CLIP_STD, EncoderCall


class PackedGrids(Family):
    """Base of families with one token per block of patches, in raster order t, h, w; the sizes of pictures and clips are
    arguments of the call."""

    facts = Facts("yes, any size", cls=False, merging="2x2 blocks")
    modalities: ClassVar[tuple[Modality, ...]] = ("image", "video")
    #: whether the frames of a clip are runs of their own, with time stamps between them
    stamped: ClassVar[bool] = False
    usual_std: ClassVar[tuple[float, ...]] = CLIP_STD

    @property
    def merge(self) -> int:
        """Patches along one side of a merged block."""
        return int(self.vision.spatial_merge_size)

    def merged(self, encoded: EncoderCall) -> int:
        """:attr:`merge` of one call."""
        return self.merge

    @property
    def feature_layer(self) -> int:
        return self.tower_depth - 1

    def units(self, encoded: EncoderCall, patches: int, width: int | None = None) -> Tensor:
        """Blocks that the merger joins; their patches are consecutive."""
        return torch.arange(patches).view(-1, self.merged(encoded) ** 2)

    def frames(self, encoded: EncoderCall) -> list[list[tuple[int, int]]]:
        """The tower packs the frames of all pictures; attention stays inside a frame."""
        return [[(h, w)] * t for t, h, w in self._given_grids(encoded)]

    def _given_grids(self, encoded: EncoderCall) -> list[tuple[int, int, int]]:
        """(t, h, w) of every picture or clip in patches, from the arguments of the call."""
        given: Any = next(value for name, value in encoded.arguments.items() if name.endswith("grid_thw"))
        return [(t, h, w) for t, h, w in given.tolist()]

    def unit_pixels(self, encoded: EncoderCall, pixels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """A row of ``pixels`` is a patch; every frame by itself."""
        colours = torch.tensor(self.image_std, device=pixels.device)[:, None]
        patches = sum(t * h * w for t, h, w in self._given_grids(encoded))
        scaled = (pixels.float().reshape(patches, len(colours), -1) * colours).flatten(1)
        units, first, of_size = self.blocks(encoded, patches), 0, dict[tuple[int, int], list[Tensor]]()
        for t, h, w in self.grids("image", encoded):
            of_size.setdefault((h, w), []).append(units[first : first + t * h * w].view(t, h * w, -1))
            first += t * h * w
        groups = [(size, torch.cat(places).to(pixels.device)) for size, places in of_size.items()]
        return [(scaled[at].view(len(at), *size, -1), at) for size, at in groups]

    @property
    def frames_a_size(self) -> int:
        return int(getattr(self.vision, "temporal_patch_size", 1))

    def tower_sizes(self, given: Mapping[str, Any]) -> list[int]:
        """Patches of every frame of every picture or clip."""
        return [h * w for t, h, w in given["grid_thw"].tolist() for _ in range(t)]

    def tower_part(self, given: Mapping[str, Any], sizes: Sequence[int], begin: int, end: int) -> dict[str, Any]:
        """Frames are cut off clips, whose parts are clips of their own: frames do not see each other."""
        grids: Tensor = given["grid_thw"]
        owner = torch.repeat_interleave(torch.arange(len(grids)), grids[:, 0].cpu())[begin:end]
        whose, frames = owner.unique_consecutive(return_counts=True)
        part = dict(given)
        for name, x in given.items():
            if isinstance(x, Tensor) and x.dim() and len(x) == len(grids):
                part[name] = x[whose.to(x.device)]
        part["grid_thw"] = part["grid_thw"].clone()
        part["grid_thw"][:, 0] = frames
        first = sum(sizes[:begin])
        tensors = ((name, x) for name, x in given.items() if isinstance(x, Tensor))
        name, pixels = max(tensors, key=lambda pair: pair[1].numel())
        dim = 0 if len(pixels) == sum(sizes) else 1
        part[name] = pixels.narrow(dim, first, sum(sizes[begin:end]))
        return part

    def grids(self, modality: Modality, encoded: EncoderCall) -> list[tuple[int, int, int]]:
        """(t, h, w) of every picture in tokens."""
        # Qwen3-VL encodes clips with the function for images, so the argument's name says nothing
        side = self.merged(encoded)
        return [(t, h // side, w // side) for t, h, w in self._given_grids(encoded)]

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        grids = self.grids(modality, encoded)
        return consecutive([[(1, h, w)] * t if self.stamped else [(t, h, w)] for t, h, w in grids], clips=True)

    def to_tokens(self, modality: Modality, encoded: EncoderCall, values: list[Tensor]) -> Tensor:
        """Mean of each merged block; the tower runs over ``[1, patches of a frame or window]`` at a time."""
        flat = torch.cat([v[0] for v in values])
        return flat.reshape(-1, self.merged(encoded) ** 2, *flat.shape[1:]).mean(1)
