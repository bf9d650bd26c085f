"""Retracing: visual tokens are shown again in the MLP of one layer, in rows whose next token is uncertain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ...families.language import mlp_of
from ...kv.visual_memory import VisualMemory
from ...method import RetracingMethod
from ...method.results import check_tensor
from ..call.call import current
from ..call.forward import Forward, Prompt, rows_at, to_device_packed
from ..call.plan import ModelPlan
from ..call.runs import Run, TextInputs
from ..prompt.reduce import deep_planes


class Retrace(Run):
    """The read-outs and the second look of one forward; the first of all runs, since it notes what enters the prompt."""

    def __init__(self, forward: Forward, method: RetracingMethod) -> None:
        self.forward, self.method = forward, method
        self.readouts = method.readouts(forward.plan.family.depth)
        state = forward.state
        self.memory = None if state is None else state.shared.memory(VisualMemory)
        #: ``[B]`` bool, rows that have looked again, and those whose next MLP does
        self._done: Tensor | None = None
        self._looking: Tensor | None = None

    def before_text(self, text: TextInputs) -> None:
        """Note the visual tokens of a prompt as they enter it."""
        if not isinstance(self.forward, Prompt):
            return
        prompt, device = self.forward, text.embeds.device
        chosen, _ = prompt.compacted(prompt.layout.visual)
        places = torch.where(chosen < 0, -1, chosen + prompt.seen)
        at, places, real = to_device_packed(device, chosen.clamp(min=0), places, chosen >= 0)
        entering = prompt.plan.family.entering(text.embeds, deep_planes(prompt.plan.family, text))
        features = rows_at(entering, at) * real[..., None].to(entering)
        self.memory = VisualMemory(places.int(), features, torch.zeros_like(real, dtype=torch.bool)).behind(self.memory)

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Read out the last token behind layer ``number - 1``."""
        self._looking = None
        done = self._done
        # elsewhere the host would wait
        if number - 1 not in self.readouts or (hidden.device.type == "cpu" and done is not None and bool(done.all())):
            return hidden
        family, real = self.forward.plan.family, self.forward.real
        last = hidden[:, -1] if real is None else rows_at(hidden, _last(real))[:, 0]
        with torch.no_grad():
            logits = family.logits(family.last_norm(last[:, None]))[:, 0].to(hidden.device)
            with without_autocast(hidden.device):
                uncertain = self.method.is_uncertain(logits.float())
        uncertain = check_tensor(self.method, "is_uncertain()", uncertain, "bool", (len(hidden),), logits)
        self._looking = uncertain if done is None else uncertain & ~done
        self._done = uncertain if done is None else done | uncertain
        return hidden

    def after_mlp(self, hidden: Tensor, output: Tensor) -> Tensor:
        """The output of the MLP behind a read-out, of ``hidden`` and its own ``output [B, q, D]``."""
        looking, self._looking = self._looking, None
        if looking is None or self.memory is None:
            return output
        memory = self._memory()
        shown = (memory.places >= 0).to(output.device)
        if self.method.shown == "dropped":
            shown = shown & memory.dropped.to(output.device)
        looking = looking.to(output.device) & shown.any(1)
        real = self.forward.real
        real = None if real is None else real.to(output.device)
        with without_autocast(output.device):
            looked = self.method.retrace(hidden, output, memory.features.to(output.device), shown, real)
        looked = check_tensor(self.method, "retrace()", looked, "float", output.shape, output).to(output.dtype)
        self.forward.stats.retraced = self.forward.stats.retraced + looking.sum()
        return torch.where(looking[:, None, None], looked, output)

    def finish(self) -> None:
        """Keep the visual tokens with the cache."""
        if isinstance(self.forward, Prompt) and self.forward.state is not None:
            self.forward.state.shared.keep(self._memory())

    def _memory(self) -> VisualMemory:
        """What is known now of the visual tokens of this prompt and those before."""
        assert self.memory is not None
        if not isinstance(self.forward, Prompt):
            return self.memory
        prompt, memory = self.forward, self.memory
        (kept,) = to_device_packed(memory.places.device, prompt.total.kept)
        at = memory.places.long() - prompt.seen
        new = kept.bool().gather(1, at.clamp(min=0))
        return replace(memory, dropped=torch.where(at >= 0, ~new, memory.dropped))


def hook_mlps(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Let the MLPs behind read-outs be shown visual tokens."""
    if plan.retracing is None:
        return

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        call = current(plan)
        runs = None if call is None or call.observer is not None else call.text.runs
        run = None if runs is None else runs.of(Retrace)
        if run is None:
            return None
        hidden = args[0] if args else next(iter(kwargs.values()))
        if isinstance(output, tuple):
            # with the logits of a router
            return run.after_mlp(hidden, output[0]), *output[1:]
        return run.after_mlp(hidden, output)

    layers = plan.family.text.layers
    for number in plan.retracing.method.readouts(len(layers)):
        if (mlp := mlp_of(layers[number + 1])) is not None:
            hook(mlp.register_forward_hook(after, with_kwargs=True))


def _last(real: Tensor) -> Tensor:
    """``[B, 1]`` long, the slot of the last token of every row of ``real [B, q]`` bool."""
    return real.shape[1] - 1 - real.flip(1).long().argmax(1, keepdim=True)
