"""Skipped experts: tokens use fewer of the experts that the router of a layer chose for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.precision import without_autocast
from ...method import ExpertMethod, LayerAttention
from ...method.results import check_tensor
from ..call.call import current
from ..call.forward import Forward, Prompt, chosen_of
from ..call.plan import ModelPlan
from ..call.runs import LayerAttended, Run


class SkipExperts(Run):
    """The experts that the tokens of one forward use."""

    changes_cache = False

    def __init__(self, forward: Forward, method: ExpertMethod) -> None:
        self.forward, self.method = forward, method
        #: by layer of the language model what the method made of its attention, ``[B, q]``
        self.received: dict[int, Tensor] = {}

    def used(self, number: int, hidden: Tensor, weights: Tensor) -> Tensor:
        """``[B q, k]`` bool, the experts of layer ``number`` that are used, of ``weights [B q, k]``; ``hidden [B q, D]``."""
        forward, method = self.forward, self.method
        real = forward.real
        places = forward.incoming.phases[-1][1].places
        rows, length = len(places), len(hidden) // len(places)
        if real is None:
            known = torch.ones(rows, length, dtype=torch.bool, device=hidden.device)
        else:
            known = real[:, -length:].to(hidden.device)
        whole, received = weights.view(rows, length, -1), self.received.pop(number, None)
        with torch.no_grad(), without_autocast(hidden.device):
            used = method.uses(whole.float(), hidden.view(rows, length, -1), received, known)
            used = check_tensor(method, "uses()", used, "bool", whole.shape, whole)
            if isinstance(forward, Prompt) and received is not None and (plain := forward.text_rows) is not None:
                behind = method.uses(whole.float(), hidden.view(rows, length, -1), None, known)
                used = torch.where(plain.to(hidden.device)[:, None, None], behind, used)
        if (bare := self._bare()) is not None:
            used = used | bare.to(hidden.device)[:, None, None]
        return (used | ~known[..., None]).view(weights.shape)

    def _bare(self) -> Tensor | None:
        """``[B]`` bool on the CPU, the rows without a picture; None where all have one."""
        if self.forward.state is not None:
            return self.forward.state.shared.places.text_rows
        return self.forward.text_rows if isinstance(self.forward, Prompt) else None


class RankTokens(SkipExperts):
    """The same in a prompt, whose tokens are ranked by the attention of the layer."""

    last_queries = None

    def after_attention(self, layer: LayerAttended) -> None:
        """Note the attention that tokens receive."""
        forward = self.forward
        assert isinstance(forward, Prompt)
        number = forward.plan.family.attending[layer.number]
        if number not in self.method.layers(forward.plan.family.depth):
            return
        chosen = chosen_of(forward.phase(layer.number))
        _, text = forward.kinds(chosen)
        on_device = text.to(layer.query.device, non_blocking=True)
        with forward.measured("selection", layer.query.device):
            attention = LayerAttention(layer.query, layer.key, layer.visible, layer.scaling, on_device, text)
            received = self.method.observe(attention)
        shape = layer.query.shape[0], layer.key.shape[2]
        received = check_tensor(self.method, "observe()", received, "float", shape, layer.query)
        self.received[number] = received[:, -layer.query.shape[2] :]


def hook_experts(plan: ModelPlan, hook: Callable[..., None], wrap: Callable[..., None]) -> None:
    """Let the experts of layers see fewer tokens; ``wrap`` replaces an attribute until the model is bare again."""
    if plan.skipping is None:
        return

    def before(number: int, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        call = current(plan)
        runs = None if call is None or call.observer is not None else call.text.runs
        run = None if runs is None else runs.of(SkipExperts)
        if run is None:
            return None
        given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
        index, weights = given["top_k_index"], given["top_k_weights"]
        used = run.used(number, given["hidden_states"], weights)
        left = weights * used
        scale = weights.sum(-1, keepdim=True) / left.sum(-1, keepdim=True)
        given["top_k_weights"] = torch.where(used, (weights * scale).to(weights.dtype), 0.0)
        # as where experts are spread over devices, the number behind the last is an expert that is elsewhere
        given["top_k_index"] = index.masked_fill(~used, module.num_experts)
        return (), given

    for number in plan.skipping.method.layers(plan.family.depth):
        if (experts := plan.family.experts_in(number)) is not None:
            hook(experts.register_forward_pre_hook(partial(before, number), with_kwargs=True))
            # so that what no expert computes is zero, and not what was in memory
            # those of Step 3.7 pass over such numbers by themselves
            if hasattr(experts, "_is_expert_parallel"):
                wrap(experts, "_is_expert_parallel", lambda before: True)
