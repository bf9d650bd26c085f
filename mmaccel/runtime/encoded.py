"""What is known of the pictures or clips that a call has encoded."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..families.tower import EncoderCall
from .merged import Merged


@dataclass
class Encoded(EncoderCall):
    """One call of ``get_image_features`` or ``get_video_features``, and what was seen of it.

    taps : per (kind, tower layer) what each attention call of that layer delivered, in order.
    merged : the merge inside the tower, if the recipe has one.
    """

    taps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    merged: Merged | None = None
