"""Methods by which tokens skip experts, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from comparators import Arrays, Params, close
from harness import make, paid


def mcmoe(params: Params, arrays: Arrays) -> None:
    """The stand-in experts of a vector; without an attention every token is a step of its own."""
    x, attention = arrays["in_x"], arrays.get("in_attention")
    method = make("mcmoe", beta=params["beta"], lowest=params["tau_l"], highest=params["tau_h"])
    weights, index = (x @ arrays["in_gate"].T).softmax(-1).topk(params["top_k"], dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    if attention is None:
        real = torch.ones(len(x), 1, dtype=torch.bool)
        used = method.uses(weights[:, None], x[:, None], None, real)[:, 0]
    else:
        real = torch.ones(1, len(x), dtype=torch.bool)
        received = method.observe(paid(attention.log()[None]))
        used = method.uses(weights[None], x[None], received, real)[0]
    left = weights * used
    left = left / left.sum(-1, keepdim=True).clamp(min=1e-9)
    out = torch.einsum("td,tkud->tku", x, arrays["in_experts"][index]).tanh()
    close((left[..., None] * out).sum(1), arrays["out_y"].nan_to_num(0.0))


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("Aaronhuang-778/MC-MoE", "DynamicRankMixtralSparseMoeBlockWrapper.forward"): mcmoe,
}
