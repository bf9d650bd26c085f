"""Gated delta nets in single precision on a CPU, where vLLM computes them in bfloat16 only: the function of transformers, over
vLLM's batches and states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch vLLM's gated delta nets."""
    # the precision that vLLM asserts
    monkeypatch.setattr(
        gdn_attention, "torch", SimpleNamespace(bfloat16=torch.float32, float16=torch.float16, Tensor=torch.Tensor)
    )
    monkeypatch.setattr(gdn_attention, "_cpu_gdn_attention_nonspec", _attend)


def _attend(layer: Any, metadata: Any, mixed: Any, b: Any, a: Any, out: Any) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    inputs, states = layer.kv_cache[:2]
    inputs = inputs if is_conv_state_dim_first() else inputs.transpose(1, 2)
    starts = metadata.non_spec_query_start_loc.tolist()
    slots = metadata.non_spec_state_indices_tensor.flatten().tolist()
    weight = layer.conv1d.weight.reshape(len(layer.conv1d.weight), 1, -1)
    for row in range(metadata.num_decodes + metadata.num_prefills):
        here, slot = slice(starts[row], starts[row + 1]), slots[row]
        if row >= metadata.num_decodes and not metadata.has_initial_state[row]:
            inputs[slot], states[slot] = 0, 0
        whole = torch.cat([inputs[slot], mixed[here].T], dim=1)
        inputs[slot] = whole[:, whole.shape[1] - inputs.shape[2] :]
        convolved = functional.silu(functional.conv1d(whole[None], weight, layer.conv1d.bias, groups=len(weight)))
        query, key, value = layer.rearrange_mixed_qkv(convolved[0].T.contiguous())
        repeats = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(repeats, 2) for x in (query, key))
        gate = -layer.A_log.float().exp() * functional.softplus(a[here].float() + layer.dt_bias)
        # vLLM keeps values first
        made, state = torch_recurrent_gated_delta_rule(
            query,
            key,
            value,
            gate[None],
            b[here].sigmoid()[None],
            states[slot].transpose(1, 2)[None],
            True,
            use_qk_l2norm_in_kernel=True,
        )
        out[here], states[slot] = made[0], state[0].transpose(1, 2)
