"""A cache layer of attention over latents (MLA), for models in which an indexer may choose what a layer reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .packed import QuantisedLayer


class LatentLayer(QuantisedLayer):
    """Its keys are the latents ``[B, 1, K, r]`` of tokens, its values the parts with RoPE ``[B, 1, K, R + D]``. The ``D``
    channels behind them are the key that an indexer has of the token, so that it stays, moves and goes with the token; there
    are none without an indexer, and before it has given its first keys."""

    latent = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new latents and parts with RoPE, to which :meth:`update_indexer` adds; returns all of them."""
        latents, turned = super().update(key_states, pad(value_states, (0, self.indexer)), *args, **kwargs)
        return latents, self._turned(turned)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Store the keys ``[B, new, D]`` that the indexer has of the newest tokens; returns those of all, ``[B, K, D]``."""
        own = keys[:, None].to(self.values.dtype)
        if self.indexer:
            self.values[:, :, -own.shape[2] :, -self.indexer :] = own
        else:
            self.indexer = keys.shape[2]
            self.bare_bytes += keys.shape[2] * keys.element_size()
            self.values = torch.cat([self.values, own], dim=3)
        return self.stored()[1][:, 0, :, -self.indexer :].to(keys.dtype)

    def latents(self) -> tuple[Tensor, Tensor]:
        """Both parts of all tokens, ``[B, 1, K, r]`` and ``[B, 1, K, R]``."""
        latents, turned = self.stored()
        return latents, self._turned(turned)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Both parts, which absorbed queries read as keys, and the latents, which they read as values."""
        latents, turned = self.latents()
        return torch.cat([latents, turned], dim=3), latents

    def reset(self) -> None:
        """Back to empty, ready for another prompt."""
        super().reset()
        self.indexer = 0

    def _turned(self, values: Tensor) -> Tensor:
        return values[..., : values.shape[3] - self.indexer]
