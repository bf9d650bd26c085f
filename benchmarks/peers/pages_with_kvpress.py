"""Answers of a text model under a press of kvpress, to token ids. Run by ``benchmarks/pages.py``, in an environment of its own.

A press compresses the whole first prompt; its answer, and a second turn, run on the compressed cache at the positions that they
have in the whole conversation.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
from kvpress import ExpectedAttentionPress
from transformers import AutoModelForCausalLM, DynamicCache
from with_kvpress import PRESSES
from worker import serve


class Pages:
    """The text model, and the conversation so far."""

    def load(self, folder: str, dtype: str) -> None:
        """Load the model."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.end = self.model.config.eos_token_id

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request."""
        if request["do"] == "load":
            self.load(request["folder"], request["dtype"])
            return {"versions": {"kvpress": version("kvpress"), "its transformers": version("transformers")}}
        with torch.inference_mode():
            if request["do"] == "first":
                self.cache, self.seen = DynamicCache(), 0
                return {"ids": self.read(request["ids"], request["longest"], request["press"], request["kept"])}
            return {"ids": self.read([*self.pending, *request["ids"]], request["longest"])}

    def read(self, ids: list[int], longest: int, press: str = "", kept: int = 0) -> list[int]:
        """Greedy tokens behind ``ids``; the last of them is not in the cache yet."""
        context: Any = nullcontext()
        if press:
            for layer in self.model.model.layers:
                layer.self_attn.masked_key_indices = None  # a head-wise press leaves them
            make = {**PRESSES, "expected-attention": ExpectedAttentionPress}[press]
            # a hair more than the share: the number that stays is truncated
            context = make(1 - (kept + 0.01) / len(ids))(self.model)
            self.model.set_attn_implementation("eager" if press == "observed-attention" else "sdpa")
        with context:
            logits = self.forward(ids)
        self.model.set_attn_implementation("sdpa")
        said = [int(logits.argmax())]
        while said[-1] != self.end and len(said) < longest:
            said.append(int(self.forward(said[-1:]).argmax()))
        self.pending = said[-1:]
        return said

    def forward(self, ids: list[int]) -> torch.Tensor:
        """Logits behind the last of ``ids``, at their positions in the conversation."""
        positions = torch.arange(self.seen, self.seen + len(ids))[None]
        self.seen += len(ids)
        out = self.model(torch.tensor([ids]), past_key_values=self.cache, position_ids=positions, logits_to_keep=1)
        return out.logits[0, -1]


if __name__ == "__main__":
    serve(Pages())
