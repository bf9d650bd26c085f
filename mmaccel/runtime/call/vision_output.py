"""What is known of the pictures or clips that a call has encoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...core.layout import Modality
from ...families.tower import EncoderCall, Towers
from ..tower.reused_frames import Frames
from .compact_tokens import Shortened


@dataclass
class Encoded(EncoderCall):
    """One call of ``get_image_features`` or ``get_video_features``, and what was seen of it.

    taps : per (kind, tower layer) what each attention call of that layer delivered, in order.
    modality : which of the two functions it was.
    merged : what is left in the tower, if the recipe merges tokens there or leaves patches out.
    whole : tokens of every frame, once a tower with a packed sequence was asked for them.
    reused : which frames take parts of others, if the recipe reuses some.
    """

    taps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    merged: Shortened | None = None
    modality: Modality = "image"
    reused: Frames | None = None
    whole: list[int] | None = None

    def lengths(self, towers: Towers) -> list[int]:
        """Tokens of every frame in what a tower with a packed sequence now holds."""
        if self.whole is None:
            # sizes may lie on the device
            self.whole = [h * w for picture in towers.frames(self) or () for h, w in picture]
        return self.whole if self.merged is None or not self.merged.open else self.merged.lengths(self.whole)
