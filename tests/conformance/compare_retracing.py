"""Methods that show visual tokens again between layers, against the authors' programs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from comparators import Arrays, Params, close
from harness import make
from torch import Tensor

from mmaccel.core.layout import Layout, Segment, Tile
from mmaccel.core.reduction import Reduction
from mmaccel.core.stats import Stats
from mmaccel.kv.forward_info import ForwardInfo, Phase
from mmaccel.runtime.call.forward import Prompt, PromptResult
from mmaccel.runtime.call.runs import TextInputs
from mmaccel.runtime.layers.retracing import Retrace


def _prompt(visual: Tensor, lm_head: Tensor, depth: int, norm: Callable[[Tensor], Tensor]) -> Prompt:
    """A prompt of the tokens ``visual [n, D]`` in a language model of ``depth`` layers."""
    family = SimpleNamespace(
        depth=depth,
        last_norm=norm,
        logits=lambda states: states @ lm_head.T,
        deep_features=lambda arguments: None,
        entering=lambda embeds, deep: embeds,
    )
    places = torch.arange(len(visual))
    layout = Layout(torch.ones(1, len(visual), dtype=torch.bool), [Segment(0, "image", 0, _row(len(visual)), places)])
    incoming = ForwardInfo(0, len(visual), False, [(0, Phase(places[None], False, places[None]))])
    plan: Any = SimpleNamespace(family=family)
    result = PromptResult(layout, Reduction.identity(layout.valid))
    return Prompt(plan, Stats("conformance"), None, incoming, visual.device, result, places[None])


def _row(size: int) -> Tile:
    return Tile.raster(1, 1, size, offset=0)


def memvr(params: Params, arrays: Arrays) -> None:
    """The stand-in layers of a vector, with the run that looks again between them."""
    method = make(
        "memvr",
        threshold=params["entropy_threshold"],
        ratio=params["retracing_ratio"],
        start=params["starting_layer"],
        end=params["ending_layer"],
        top=params["top"],
    )
    assert params["act"] == "silu"
    layers, visual, h = params["num_layers"], arrays["visual_token"], arrays["x"]
    before = torch.arange(1, len(h) + 1)[:, None]

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + params["rms_eps"]).rsqrt()

    run = Retrace(_prompt(visual, arrays["lm_head"], layers, norm), method)
    run.before_text(TextInputs({"inputs_embeds": visual[None]}))
    adapted, seen = -1, {}
    for number in range(layers):
        h = run.before_layer(number, h[None], {})[0]
        h = h + params["mix"] * h.cumsum(0) / before
        gate, up, down = (arrays[f"l{number}.{name}_proj"] for name in ("gate", "up", "down"))
        x = norm(h)
        own = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        made = run.after_mlp(x[None], own[None])[0]
        adapted = number if not torch.equal(made, own) else adapted
        seen[number] = x, made
        h = h + made
        close(method.uncertainty(norm(h[-1:]) @ arrays["lm_head"].T)[0], arrays["entropies"][number])
    assert adapted == int(arrays["adapter_layer"])
    for ours, theirs in zip(seen[max(0, adapted)], (arrays["mlp_in"], arrays["mlp_out"]), strict=True):
        close(ours, theirs)
    close(norm(h), arrays["out"])


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("1zhou-Wang/MemVR", "memvr.py:LlamaMLP.forward, forward"): memvr,
}
