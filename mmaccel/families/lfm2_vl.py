"""LFM2-VL: tiles and a thumbnail of any size; most layers of the language model are short convolutions, and keep no keys."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Modality, Picture
from .base import Facts
from .internvl import TiledByText
from .stateful import Stateful
from .tower import EncoderCall

#: the text between two tiles of one picture
_NEXT = re.compile(r"<\|img_(row_\d+_col_\d+|thumbnail)\|>")


class ShortConvolutions(Stateful):
    """Base of language models of which some layers are convolutions over few tokens, the last of which are their state."""

    carrying = ("conv",)
    net_name = "conv"


class Lfm2VL(ShortConvolutions, TiledByText):
    """A convolution sees the two tokens before its own, and these are its state. With a processor, tiles with nothing but marks
    of places between them are one picture; without it, or without marks, every tile is a picture."""

    name = "lfm2_vl"
    model_types = ("lfm2_vl",)
    place = 12
    facts = Facts("yes, tiled, any size", clips=False, cls=False, merging="-")
    closed = "pads tiles of several sizes to one"
    layers_path = ""

    @property
    def shuffle(self) -> int:
        return int(self.config.downsample_factor)

    def outgoing_in(self, layer: int) -> Any:
        return self.attention_in(layer).out_proj

    def pictures(self, modality: Modality, encoded: EncoderCall, ids: Tensor) -> list[Picture]:
        sizes = torch.as_tensor(encoded.arguments["spatial_shapes"]) // self.shuffle
        runs = self.runs(ids, encoded.tokens)
        return self.sized(ids, runs, sizes.tolist(), lambda between: "tile" if _NEXT.fullmatch(between) else None)
