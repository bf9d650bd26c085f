"""A prompt that is read again behind itself, for policies that observe it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.precision import without_autocast
from ...kv.index import to_device
from ...method.reread import Reread, RereadPolicy
from ...method.results import check_numbers, check_tensor
from ..call.call import Call
from ..call.forward import Prompt
from ..call.plan import ModelPlan
from .lookahead import run_behind
from .preview import TextBehind


class RereadStretch(TextBehind):
    """A stretch of the prompt that is read again.

    policy : what observes it. span : ``[B, 2]`` long, the places of the first and the last token of the stretch when it was
        read first.
    received : by the number of the layer in the cache, the largest of what the policy has returned, ``[B, Hkv, K]`` float32.
    """

    def __init__(
        self, call: Call[ModelPlan], prompt: Prompt, policy: RereadPolicy, received: dict[int, Tensor], **given: Any
    ) -> None:
        assert prompt.state is not None
        super().__init__(prompt.state.layers, prompt.plan.family.stored_from, given["places"])
        self.family, self.policy, self.received, self.span = prompt.plan.family, policy, received, given["span"]
        self.entering: dict[int, Tensor] = {}

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`.preview.TextBehind`; the policy observes the layer."""
        read = super().attend(number, query, key, value, scaling, window)
        number = self.stored_from(number)
        # queries of all layers would be as large as the cache
        self.found.clear()
        layer, heads = self.layers[number], key.shape[1]
        index = layer.index.by_head.long().to(query.device).expand(-1, heads, -1)
        first, last = to_device(self.span, query.device).unbind(1)
        inside = (index >= first[:, None, None]) & (index <= last[:, None, None])
        stored, values = layer.stored()
        with without_autocast(query.device):
            given = Reread(
                query,
                key,
                self.places.to(query.device) >= 0,
                stored,
                index >= 0,
                inside & (index >= 0),
                scaling,
                self.entering.pop(number, None),
                self._outgoing(number, values) if self.policy.weighs_output else None,
            )
            seen = check_tensor(self.policy, "see()", self.policy.see(given), "float", index.shape, stored)
            check_numbers(self.policy, "see()", seen, index >= 0)
        before = self.received.get(number)
        self.received[number] = seen if before is None else torch.maximum(before, seen)
        return read

    def _outgoing(self, number: int, values: Tensor) -> Tensor:
        """``[B, Hq, K]`` float32, see :class:`~mmaccel.method.reread.Reread`."""
        weight = self.family.outgoing_in(self.family.attending[number]).weight.detach().float()
        parts = weight.unflatten(1, (-1, values.shape[3])).unbind(1)
        group = len(parts) // values.shape[1]
        return torch.stack([(values[:, n // group].float() @ w.T).norm(dim=-1) for n, w in enumerate(parts)], dim=1)

    def hooks(self) -> list[Any]:
        """Hooks that note the length of what enters the attention of every layer, if the policy asks for it."""
        if not self.policy.weighs_output:
            return []

        def note(number: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.entering[number] = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)

        made = []
        for number, layer in enumerate(self.family.attending):
            hook = lambda *given, number=number: note(number, *given)  # noqa: E731
            made.append(self.family.attention_in(layer).register_forward_pre_hook(hook, with_kwargs=True))
        return made


def read_again(
    call: Call[ModelPlan], prompt: Prompt, policy: RereadPolicy, arguments: dict[str, Any], places: Tensor
) -> dict[int, Tensor]:
    """Read the prompt again; returns what ``policy`` observes of every layer of the cache, ``[B, Hkv, K]`` float32.

    arguments : of the text model when it read the prompt. places : ``[B, q]`` long, of its tokens, -1 for padding.
    """
    embeds, device = arguments["inputs_embeds"], prompt.device
    places = places.to(device)
    order = (places < 0).byte().argsort(dim=1, stable=True)
    places = places.gather(1, order)
    embeds = embeds.gather(1, order[..., None].expand_as(embeds))
    received: dict[int, Tensor] = {}

    def types(start: int) -> dict[str, Tensor]:
        part = order[:, start : start + policy.stretch]
        return prompt.plan.family.of_tokens(arguments, lambda x: x.gather(1, part.to(x.device)))

    end = prompt.seen + prompt.length
    for start in range(0, places.shape[1], policy.stretch):
        mine = places[:, start : start + policy.stretch]
        real = mine >= 0
        at = torch.arange(end, end + mine.shape[1], device=device).expand_as(mine)
        span = torch.stack([mine.masked_fill(~real, 1 << 40).amin(1), mine.amax(1)], dim=1)
        stretch = RereadStretch(call, prompt, policy, received, places=at.masked_fill(~real, -1), span=span)
        made = stretch.hooks()
        try:
            given = {"inputs_embeds": embeds[:, start : start + policy.stretch], **types(start)}
            run_behind(call, prompt, stretch, at, arguments.get("position_ids"), given)
        finally:
            for hook in made:
                hook.remove()
    return received
