"""The layers of a cache that keep a recurrent state where others keep keys and values: nothing can be dropped from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.transformers_api import LinearAttentionLayer
from ..errors import UnsupportedError

_STATES = ("conv_states", "recurrent_states")


def states_of(layer: LinearAttentionLayer) -> list[Tensor]:
    """The states that a layer holds, ``[B, ...]`` each."""
    return [x for name in _STATES for x in getattr(layer, name).values() if x is not None]


def attributes_of(layer: LinearAttentionLayer) -> dict[str, Any]:
    """The attributes of a layer, with copies of its states, which forwards change in place."""
    found = {name: dict(x) if isinstance(x, dict) else x for name, x in vars(layer).items()}
    for name in _STATES:
        found[name] = {key: None if x is None else x.clone() for key, x in found[name].items()}
    return found


class RecurrentLayer(LinearAttentionLayer):
    """The states of one layer with linear attention, of a fixed size; what a token has added to them cannot be removed."""

    def take(self, layer: LinearAttentionLayer) -> None:
        """Go on with the states of a layer of a bare model's cache."""
        self.__dict__.update(vars(layer))

    @property
    def begun(self) -> bool:
        """Whether any token has passed."""
        return any(self.has_previous_state.values())

    @contextmanager
    def of_row(self, row: int) -> Iterator[None]:
        """Context in which a forward sees, and changes in place, the states of one row of the batch."""
        held = {name: getattr(self, name) for name in _STATES}
        for name, states in held.items():
            setattr(self, name, {key: None if x is None else x[row : row + 1] for key, x in states.items()})
        try:
            yield
        finally:
            self.__dict__.update(held)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor this layer holds."""
        yield from states_of(self)

    def snapshot(self) -> Callable[[], None]:
        """Remember the states; the function that comes back restores them, as often as it is called. They change in place."""
        held = self.copy()
        return lambda: self.take(held.copy())

    def copy(self) -> RecurrentLayer:
        """A copy to change independently."""
        copy = RecurrentLayer(self.number_of_states)
        copy.__dict__.update(attributes_of(self))
        return copy

    def _select(self, rows: Tensor) -> None:
        for name in _STATES:
            held = getattr(self, name)
            setattr(self, name, {key: None if x is None else x[rows.to(x.device)] for key, x in held.items()})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        for rows in {len(x) for x in self.tensors()}:
            self._select(torch.arange(rows).repeat_interleave(repeats))

    def reset(self) -> None:
        """Back to empty, ready for another prompt, and another batch."""
        self.__dict__.update(vars(RecurrentLayer(self.number_of_states)))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, as transformers does: a layer that has a convolution alone can, if
        its past was recorded.

        Raises :class:`UnsupportedError` if tokens are to be forgotten and cannot be.
        """
        if self.record_past and self.is_croppable:
            super().crop(int(tokens_to_remove))
        elif int(tokens_to_remove):
            raise UnsupportedError(
                "Layers with a recurrent state cannot forget their last tokens; begin again with a new cache, and decode "
                "without an assistant."
            )
