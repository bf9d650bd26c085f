"""Methods inside the language model: at the input of some layers a prompt loses or merges visual tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ...core.reduction import Reduction
from ...method import LayerAttention, LayerMethod
from ...method.results import check_figures, figures_of
from ..call.call import Call
from ..call.forward import Prompt, chosen_of, rows_at, to_device_packed
from ..call.plan import ModelPlan, PlannedStage
from ..call.runs import LayerAttended, Run, TextInputs
from ..prompt import lookahead
from ..prompt.tokens import TokenReducer

#: takes the tokens that layer ``number`` drops: (number, reduction, hidden, slots, arguments)
KeepDropped = Callable[[int, Reduction, Tensor, Tensor, Mapping[str, Any]], None]


class PrepareLayers(Run):
    """Let methods inside the language model look at the embeddings that enter it.

    figures : per class of method, figures of every place of the prompt, ``[B, S]``.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.figures: dict[type, dict[str, Tensor]] = {}

    def before_text(self, text: TextInputs) -> None:
        """Prepare figures of the prompt, which was reduced and written."""
        prompt, embeds = self.prompt, text.embeds
        kinds = {type(stage.method) for stage in prompt.plan.stage_at_layer.values()}
        for kind in (kind for kind in kinds if kind.prepare.__func__ is not LayerMethod.prepare.__func__):  # type: ignore[attr-defined]
            with prompt.measured("selection", embeds.device), torch.no_grad():
                slots = prompt.slots(prompt.chosen)
                visual, text_, slots = to_device_packed(embeds.device, *prompt.kinds(prompt.chosen), slots)
                prepared = kind.prepare(embeds, text_.bool(), visual.bool())
                prepared = check_figures(kind, "prepare()", prepared, embeds.shape[:2], embeds)
                self.figures[kind] = {name: figures.gather(1, slots) for name, figures in prepared.items()}


class LayerTokens(Run):
    """The methods inside the language model, on one prompt.

    layers : those of the language model. prepared : figures of what entered it.
    keep_dropped : by number of a stage, takes the tokens that its method drops, if they may come back.
    """

    def __init__(
        self,
        call: Call[ModelPlan],
        prompt: Prompt,
        reducer: TokenReducer,
        prepared: PrepareLayers,
        keep_dropped: Mapping[int, KeepDropped],
    ) -> None:
        self.call, self.prompt, self.reducer, self.prepared = call, prompt, reducer, prepared
        self.keep_dropped = keep_dropped
        #: figures per key that the method at the next layer made of the attention before it, ``[B, q]``
        self._looked: dict[str, Tensor] = {}
        #: by number of a stage, the input of the layer that its method compares with, and the slots of its places
        self._earlier: dict[int, tuple[Tensor, Tensor]] = {}

    def before_layer(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Drop or merge tokens at the input of a layer."""
        hidden = self._reduced(number, hidden, arguments)
        for stage in self.prompt.plan.stage_at_layer.values():
            if stage.method.compares_with == number:
                self._earlier[stage.number] = hidden, self.prompt.slots(self.prompt.chosen)
        return hidden

    def _reduced(self, number: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        prompt, stage = self.prompt, self.prompt.plan.stage_at_layer.get(number)
        if stage is None or self.reducer.is_done(stage):
            return hidden
        with prompt.measured("selection", hidden.device):
            if stage.method.looks_ahead:
                layer: nn.Module = list(prompt.plan.family.text.layers)[number]
                given = prompt.layer_arguments(number, arguments)
                if not stage.method.rotated:
                    cos, sin = given["position_embeddings"]
                    given = {**given, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
                attention = lookahead.own_attention(self.call, prompt, number, layer, hidden, given)
                with without_autocast(hidden.device):
                    self._looked = figures_of(stage.method, attention)
            return self._reduce(stage, number, hidden, arguments)

    def after_attention(self, layer: LayerAttended) -> None:
        """Show the attention of a layer to the method at the next one."""
        prompt, plan = self.prompt, self.prompt.plan
        stage = plan.stage_at_layer.get(plan.family.attending[layer.number] + 1)
        if stage is None or stage.method.looks_ahead or self.reducer.is_done(stage):
            return
        device, chosen = layer.query.device, chosen_of(prompt.phase(layer.number))
        _, text = prompt.kinds(chosen)
        with prompt.measured("selection", device):
            prepared = {}
            if known := self.prepared.figures.get(type(stage.method)):
                at = chosen.clamp(min=0).to(device, non_blocking=True)
                prepared = {name: figures.to(device).gather(1, at) for name, figures in known.items()}
            on_device = text.to(device, non_blocking=True)
            attention = LayerAttention(
                layer.query, layer.key, layer.visible, layer.scaling, on_device, text, prepared, value=layer.value
            )
            seen = figures_of(stage.method, attention)
        self._looked = {name: figures[:, -layer.query.shape[2] :] for name, figures in seen.items()}

    def finish(self) -> None:
        """Note the average of the layers at which a method works that spreads its budget."""
        stats = self.prompt.stats
        for stage in {stage.number: stage for stage in self.prompt.plan.stage_at_layer.values()}.values():
            if stage.method.spreads:
                at = stage.method.layers()
                mean = sum(stats.layer_tokens[i] for i in at) / len(at)
                stats.notes.append(
                    f"{stage.method.name} spreads its budget: layers {at[0]} to {at[-1]} have {mean:.4g} visual tokens on "
                    f"average, and the last {stats.layer_tokens[-1]}"
                )

    def _reduce(
        self, stage: PlannedStage[LayerMethod], number: int, hidden: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Run the method at layer ``number``: the tokens it drops are gone from here on."""
        prompt = self.prompt
        slots = prompt.slots(prompt.chosen)
        previous = {**arguments, **prompt.arguments[-1].replaced}
        looked = self._looked
        if stage.method.needs_rotary:
            turns = prompt.layer_arguments(number, arguments)["position_embeddings"]
            # without RoPE nothing is turned
            cos, sin = turns or (hidden.new_ones(1, hidden.shape[1], 1), hidden.new_zeros(1, hidden.shape[1], 1))
            looked = looked | _turns(cos, sin, hidden, (prompt.chosen >= 0).long().argmax(1))
        earlier = self._earlier.pop(stage.number, None)
        reduction = self.reducer.reduce(stage, hidden, slots, looked, number, earlier)
        if keep := self.keep_dropped.get(stage.number):
            keep(number, reduction, hidden, slots, previous)
        if reduction.is_identity:
            return hidden
        chosen, padded = prompt.compacted(reduction.kept)
        slots, places = to_device_packed(hidden.device, slots, chosen.clamp(min=0))
        at = slots.gather(1, places)
        replaced: dict[str, Any] = prompt.plan.family.of_tokens(previous, lambda x: x.gather(1, at.to(x.device)))
        several = prompt.plan.family.rope_kind(number) is not None
        if previous.get("position_embeddings") is not None and not several:
            replaced["position_embeddings"] = tuple(
                rows_at(x.expand(len(hidden), -1, -1), at) for x in previous["position_embeddings"]
            )
        if isinstance(previous.get("position_ids"), Tensor):
            positions = previous["position_ids"]
            # GLM-4.5V shows its layers all three axes
            axes = positions.shape[:-2]
            rows = positions.expand(*axes, len(hidden), -1)
            replaced["position_ids"] = rows.gather(-1, at.to(positions.device).expand(*axes, -1, -1))
        prompt.begin(number, chosen, padded, hidden.device, **replaced)
        prompt.count_left(number)
        if reduction.links is None:
            return rows_at(hidden, at)
        # merged at the places of the prompt; values at dropped places are not read
        return rows_at(reduction.substitute(rows_at(hidden, slots)), places)


def _turns(cos: Tensor, sin: Tensor, hidden: Tensor, first: Tensor) -> dict[str, Tensor]:
    """The mean cosine and sine, ``[B, q]`` float32, by which RoPE turns each token of ``hidden [B, q, D]`` against the
    ``first [B]`` one that is no padding, from ``cos`` and ``sin [axes, B or 1, q, d]`` or without axes."""
    cos, sin = (x.float().expand(*x.shape[:-3], *hidden.shape[:2], -1).to(hidden.device) for x in (cos, sin))
    (at,) = to_device_packed(hidden.device, first)
    row = torch.arange(len(hidden), device=hidden.device)
    cos_, sin_ = (x[..., row, at, :].unsqueeze(-2) for x in (cos, sin))
    turns = {"rotary_cos": cos * cos_ + sin * sin_, "rotary_sin": sin * cos_ - cos * sin_}
    return {name: x.mean(-1) if x.dim() == 3 else x.mean((0, -1)) for name, x in turns.items()}
