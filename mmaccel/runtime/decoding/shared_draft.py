"""Drafts by the model itself over the cache that it verifies with, of which draft steps read what a reading policy chooses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..call.call import CallInputs
from .model_draft import ModelDraft
from .reader import Reader
from .rows import Chooser, Draft, Row


class SharedDraft(ModelDraft):
    """Drafts without a second copy of keys: steps write behind the prompt of the one cache, read sparsely, and are forgotten
    before the model verifies, which reads everything.

    *Sparse-to-Dense*, arXiv 2505.19155; *TriForce*, arXiv 2404.11912.

    Parameters
    ----------
    reader : of the model that verifies.
    inputs : those of its call, whose ``reads_all`` is off while it drafts.
    """

    own_cache = False

    def __init__(self, name: str, reader: Reader, inputs: CallInputs) -> None:
        super().__init__(name, reader.model, {}, {})
        self.reader, self.inputs = reader, inputs

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        self.chooser = chooser

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        assert self.reader is not None
        # what the model has not read yet, the draft reads first
        self.known = [len(row.tokens) - len(row.pending) for row in rows]
        self.inputs.reads_all = False
        try:
            with torch.no_grad():
                return self._draft(rows, most)
        finally:
            self.inputs.reads_all = True
            self.reader.keep([0] * len(rows))
