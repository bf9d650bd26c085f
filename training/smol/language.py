"""The language model of ``mini-smol``: SmolLM2-135M-Instruct in bfloat16 with low-rank changes, and the connector."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

RANK = 16
CHANGED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as two products in which the queries of a key head lie behind each other, so that no key is copied.

    ``attention_mask`` is added to the logits, ``[rows, 1, length, length]`` in their precision; it is always given. On a
    CPU in bfloat16 this is about twice as fast backwards as the fused one.
    """
    if attention_mask is None:
        raise ValueError("grouped_attention needs a mask: without one it would look ahead.")
    rows, heads, length, width = query.shape
    shared = key.shape[1]
    stacked = (query * (scaling or width**-0.5)).reshape(rows * shared, -1, width)
    logits = torch.bmm(stacked, key.reshape(rows * shared, -1, width).transpose(1, 2))
    logits = logits.view(rows, heads, length, -1).add_(attention_mask)
    mixed = torch.bmm(
        logits.softmax(-1).view(rows * shared, heads // shared * length, -1), value.reshape(rows * shared, -1, width)
    )
    return mixed.view(rows, heads, length, width).transpose(1, 2), None


AttentionInterface.register("grouped", grouped_attention)


def language_config() -> LlamaConfig:
    """The configuration of SmolLM2-135M-Instruct."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )


class LowRank(nn.Module):
    """A frozen linear map with a trained change ``up @ down`` of rank :data:`RANK`, which can be switched off."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, linear.in_features) / math.sqrt(linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, RANK))
        self.changes = True

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., in]`` -> ``[..., out]`` in its precision."""
        y = functional.linear(x, self.weight)
        if not self.changes:
            return y
        return y + functional.linear(functional.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def with_low_rank(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Freeze a model and give every linear map of its layers a low-rank change."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if name in CHANGED:
                    setattr(part, name, LowRank(linear))
    model.set_attn_implementation("grouped")
    return model


def switch(model: nn.Module, on: bool) -> None:
    """Switch the low-rank changes on or off."""
    for part in model.modules():
        if isinstance(part, LowRank):
            part.changes = on


class Connector(nn.Module):
    """From features of the tower ``[..., 160]`` to the language model's embeddings ``[..., 576]``; that of LLaVA."""

    def __init__(self, width: int = 160, hidden: int = 576) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        with (
            torch.no_grad()
        ):  # features are about seven times as large as a norm would leave them, embeddings a seventh
            self.linear_1.weight.mul_(1 / 7)
            self.linear_2.weight.mul_(1 / 7)

    def forward(self, cells: Tensor) -> Tensor:
        """Two linear maps with a GELU between."""
        return self.linear_2(functional.gelu(self.linear_1(cells)))


def build_language(weights: dict[str, Tensor], config: LlamaConfig | None = None) -> LlamaForCausalLM:
    """The language model in bfloat16, frozen, with low-rank changes that change nothing yet, from the weights of the base."""
    model = LlamaForCausalLM.from_pretrained(
        None, config=config or language_config(), state_dict=weights, dtype=torch.bfloat16
    )
    return with_low_rank(model.eval())
