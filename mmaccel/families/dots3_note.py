"""dots3-note: pictures and clips in packed grids; some layers read what an indexer chooses of latents, others a window."""

from __future__ import annotations

from .base import CHOOSES
from .grids import PackedGrids


class Dots3Note(PackedGrids):
    """Every frame of a clip is encoded by itself. Sounds stay as text does. Layers with a window have RoPE, heads and latents
    of their own."""

    name = "dots3_note"
    model_types = ("dots3_note",)
    since = "5.24"
    tower_names = {"image": "vision_tower", "video": "vision_tower"}
    layers_path = "blocks"
    attention_name = "attn"
    latent = True
    halves = False
    no_return = undivided = CHOOSES

    @property
    def query_heads(self) -> None:
        """Layers with windows have fewer query heads than the others."""
        return None

    def rope_kind(self, layer: int) -> str:
        """Layers with windows turn by other angles."""
        return str(self.text.config.layer_types[layer])
