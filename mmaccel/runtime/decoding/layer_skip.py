"""Drafts by the model itself without some of its layers, over the cache that it verifies with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kv.cache import snapshot, state_of
from .model_draft import ModelDraft
from .reader import Reader
from .rows import Chooser, Draft, Row


class LayerSkip(ModelDraft):
    """Drafts without a second copy of keys and weights: steps run the layers that are left, write behind the keys of these, and
    are forgotten before the model verifies.

    *SWIFT*, arXiv 2410.06916; *LayerSkip*, arXiv 2404.16710. ``mmaccel tune --draft-layers`` finds the layers.

    Parameters
    ----------
    reader : of the model that verifies, over a cache that no recipe has shaped.
    layers : the decoder layers that are skipped.
    """

    own_cache = False

    def __init__(self, name: str, reader: Reader, layers: Sequence[Any]) -> None:
        super().__init__(name, reader.model, {}, {})
        self.reader, self.layers = reader, layers

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        assert self.reader is not None
        if state_of(self.reader.cache) is not None:
            raise UnsupportedError("skipping layers needs a plain DynamicCache; leave out offload=")
        self.chooser = chooser

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        assert self.reader is not None
        self.known = [len(row.tokens) - len(row.pending) for row in rows]
        # layers that are skipped store nothing, so that all cannot be cut by as many tokens
        restore = snapshot(self.reader.cache)
        try:
            with torch.no_grad(), without_layers(self.layers):
                return self._draft(rows, most)
        finally:
            self.reader.drop(restore)


@contextmanager
def without_layers(layers: Sequence[Any]) -> Iterator[None]:
    """Context in which ``layers`` return the hidden states that they are given."""
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        vars(layer)["forward"] = _unchanged
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward


def likeliest_without(layers: Sequence[Any], prompt: ModelDraft, tokens: Tensor) -> list[list[int]]:
    """The likeliest token behind each of ``tokens [B, n]``, which follow a ``prompt`` that the whole model has read, if
    ``layers`` are skipped: ``B`` lists of ``n``. The tokens are forgotten."""
    assert prompt.reader is not None
    with prompt.own_positions(), torch.no_grad():
        restore = snapshot(prompt.reader.cache)
        try:
            with without_layers(layers):
                found: list[list[int]] = prompt.reader.read(tokens).argmax(-1).tolist()
        finally:
            prompt.reader.drop(restore)
    return found


def _unchanged(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states
