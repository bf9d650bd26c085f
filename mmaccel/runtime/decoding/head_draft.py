"""Drafts by a head: a few layers that read the keys of the model that verifies, and the hidden state of its newest token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...kv.cache import state_of
from ..call.call import CallInputs
from .model_draft import ModelDraft
from .reader import Reader
from .rows import Chooser, Draft, Row


class HeadDraft(ModelDraft):
    """Drafts of a head that has no cache of its own (the assistants of Gemma 4): every step attends to the last keys and values
    of each kind of layer, from one position, and is given an embedded token and the state behind the token before it.

    Parameters
    ----------
    reader : of the model that verifies, over a cache that no recipe has shaped.
    inputs : those of its call, which have the hidden states.
    layers : by kind of layer, the number of the one whose keys the head reads.
    """

    own_cache = False

    def __init__(self, name: str, head: Any, reader: Reader, inputs: CallInputs, layers: Mapping[str, int]) -> None:
        super().__init__(name, head, {}, {})
        self.verifier, self.inputs, self.layers = reader, inputs, layers

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        if state_of(self.verifier.cache) is not None:
            raise UnsupportedError("a head reads the keys of a plain DynamicCache; leave out offload=")
        self.chooser = chooser

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        # what the model has not read yet, the head reads first
        self.known = [len(row.tokens) - len(row.pending) for row in rows]
        self.reader = HeadReader(self.model, self.verifier, self.inputs, self.layers)
        with torch.no_grad():
            return self._draft(rows, most)


class HeadReader(Reader):
    """The state of a head from token to token of one draft; parameters as in :class:`HeadDraft`."""

    def __init__(self, head: Any, verifier: Reader, inputs: CallInputs, layers: Mapping[str, int]) -> None:
        super().__init__(head, verifier.ids, verifier.config, {})
        assert inputs.states is not None
        states, read = inputs.states
        cache = verifier.cache
        held = cache.get_seq_length()
        # the state of the newest token that every row has kept; behind it are those of rejected ones
        newest = states.shape[1] - 1 - (read - held) - torch.tensor(verifier.late, device=states.device)
        self.state = states[torch.arange(len(states), device=states.device), newest][:, None].to(
            head.device, head.dtype
        )
        self.embed = verifier.model.get_input_embeddings()
        mask = verifier.arguments.get("attention_mask")
        whole = torch.full((len(states), 1), held) if mask is None else mask[:, :held].sum(1, keepdim=True)
        keys = {kind: cache.layers[number] for kind, number in layers.items()}
        #: arguments of every step
        self.same = {
            "position_ids": whole.to(head.device),
            "attention_mask": None if mask is None else mask[:, :held].to(head.device),
            "shared_kv_states": {
                kind: (layer.keys.to(head.device, head.dtype), layer.values.to(head.device, head.dtype))
                for kind, layer in keys.items()
            },
        }

    def read(self, tokens: Tensor, parents: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Read ``tokens [B, n]`` one by one: logits ``[B, n, V]`` float32 behind each."""
        logits: list[Tensor] = []
        for token in tokens.split(1, 1):
            embedded = self.embed(token).to(self.state)
            output = self.model(inputs_embeds=torch.cat([embedded, self.state], -1), use_cache=False, **self.same)
            self.state = output.last_hidden_state
            logits.append(output.logits[:, -1:].float())
        return torch.cat(logits, 1)
