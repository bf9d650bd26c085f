"""Pictures and clips that a call has encoded, with the taps of their encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from ...core.layout import Modality, Units
from ...families.tower import EncoderCall, Towers
from ...method import Tap
from .compact_tokens import CompactTokens


@dataclass
class VisionOutput(EncoderCall):
    """One call of ``get_image_features`` or ``get_video_features``.

    taps : per (kind, tower layer) the values of each attention call of that layer, in order.
    modality : which of the two functions it was.
    merged : the tokens that are left in the tower, if the recipe merges tokens there or leaves patches out.
    whole : tokens of every frame, once a tower with a packed sequence was asked for them.
    """

    taps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    merged: CompactTokens | None = None
    modality: Modality = "image"
    whole: list[int] | None = None

    def lengths(self, towers: Towers) -> list[int]:
        """Number of tokens of every frame that a tower with a packed sequence now holds."""
        if self.whole is None:
            # sizes may lie on the device
            self.whole = [h * w for picture in towers.frames(self) or () for h, w in picture]
        return self.whole if self.merged is None or not self.merged.open else self.merged.lengths(self.whole)


class TapReader(Protocol):
    """Reads attention and features of the vision towers for methods, see :class:`mmaccel.runtime.tower.taps.Taps`."""

    towers: Towers
    #: kinds of taps by tower layer
    layers: dict[int, set[str]]

    def see(
        self, output: VisionOutput, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Called by the attention of a tower with ``query`` and ``key [N, H, T, d]``; returns the mask to use."""

    def signals(
        self, wanted: Sequence[Tap], outputs: Mapping[Modality, VisionOutput], units: Units
    ) -> dict[str, Tensor]:
        """The taps of one method per unit, ``[N, layers, n, ...]`` float32; NaN without a source."""
