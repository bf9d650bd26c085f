"""The cache stage of a recipe in one forward: a policy scores, a budget is split, the rest is evicted or merged.

What happens at the end of a prompt is in :mod:`.prompt_eviction`, what happens while decoding in :mod:`.schedule` and
:mod:`.sparse_read`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from mmaccel_kernels.chosen import ChosenKeys
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.choose import observed
from ...kv.index import to_device
from ...method import LayerAttention, Policy, ReadingPolicy
from ...method.layers import SharedPass
from ..call.forward import Forward, Prompt
from ..call.plan import PlannedStage
from .prompt_eviction import PromptEviction
from .rules import CacheStage
from .schedule import Schedule
from .sparse_read import first_layer, prepare_reads, read_layer, sparse_read


class Eviction:
    """What a recipe's policy does in one forward of the text model.

    prompt : what it does at the end of a prompt; None for a continuation.
    pre_rope : ``[B, q, Hq D]`` or ``[B, q, Hq, D]``, the queries of the layer at work before RoPE, if the policy looks at them.
    scaling, asked : the factor of ``q . k`` in the attention of a prompt, and of policies that read some keys at every step the
        last queries of each layer ``[B, Hq, W, D]`` and which are tokens ``[B, W]`` bool; noted for when it is over.
    """

    def __init__(self, forward: Forward, stage: PlannedStage[Policy], state: CacheState) -> None:
        self.forward, self.stage, self.state = forward, stage, state
        self.policy, self.depth = stage.method, len(state.layers)
        rules = CacheStage.of(forward.plan, stage, self.depth)
        self.schedule = Schedule(rules, state)
        self.prompt = PromptEviction(rules, state, forward, self.schedule) if isinstance(forward, Prompt) else None
        if isinstance(forward, Prompt):
            self.schedule.catch_up(forward.first_time)
        self.pre_rope: Tensor | None = None
        self.scaling = 1.0
        self.asked: dict[int, tuple[Tensor, Tensor]] = {}
        self._observed: tuple[LayerAttention, Tensor | None] | None = None

    @property
    def figures(self) -> list[Tensor]:
        """See :class:`PromptEviction`; none for a continuation."""
        return [] if self.prompt is None else self.prompt.figures

    @property
    def pictured(self) -> dict[int, Tensor]:
        """See :class:`PromptEviction`; none for a continuation."""
        return {} if self.prompt is None else self.prompt.pictured

    @property
    def shrinks(self) -> bool:
        """Whether a schedule may evict when this forward is over."""
        prompt = self.prompt
        return self.policy.scheduled and (prompt is None or self.policy.cap > 0 or prompt.text_rows is not None)

    def done(self, number: int) -> list[int]:
        """Layers from which nothing is evicted any more in this forward, since the attention of layer ``number`` has run."""
        if self.shrinks:
            return []
        if self.prompt is None or self.policy.recalls:
            return [number]
        done, self.prompt.done = self.prompt.done, []
        return done

    def after_attention(
        self,
        number: int,
        query: Tensor,
        key: Tensor,
        visible: Tensor | None,
        scaling: float,
        window: int | None = None,
    ) -> None:
        """``query [B, Hq, q, D]`` and ``key [B, Hkv, K, D]`` of layer ``number``, who sees what ``[B, 1 or Hkv, q, K]``, and
        how far back the layer's sliding ``window`` reaches."""
        if self.policy.recalls:
            self._recall(number, query, key, visible, scaling)
        elif self.prompt is not None:
            prompt, tokens = self.prompt, self.prompt.tokens(number, query.device)
            timed = self.forward.measured("selection", query.device, [number]) if prompt.looks else nullcontext()
            with timed:
                if self._observed is None:
                    attention = LayerAttention(query, key, visible, scaling, tokens.text, memo=tokens.memo)
                    received = self._observe(number, attention, tokens.places, window)
                else:
                    (attention, received), self._observed = self._observed, None
                # these queries are large, and free before anything is chosen
                expected, self.pre_rope = prompt.expected(tokens, key, self.pre_rope), None
                prompt.after_attention(number, attention, tokens, received, expected)
            prompt.relieve()
        elif self.policy.scheduled:
            phase = self.forward.phase(number)
            places = phase.places.to(query.device, non_blocking=True)
            padding = self.forward.length - phase.lengths if phase.padded else None
            self.schedule.note(self.state.layers[number], query, places, scaling, window, padding)

    def read(self, number: int, query: Tensor, key: Tensor | None, scaling: float) -> ChosenKeys | None:
        """What the attention of layer ``number`` is to read of all that it stores; None for everything. ``key`` is None where
        packed keys are not to be decoded unless they are needed."""
        policy = self.policy
        if not isinstance(policy, ReadingPolicy) or self.prompt is not None or query.shape[2] > 1:
            return None
        if number < first_layer(policy, self.depth):
            return None
        return read_layer(policy, self.state.layers[number], query, key, scaling)

    def attend(
        self,
        number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        scaling: float,
        window: int | None,
    ) -> Tensor | None:
        """The output ``[B, q, Hq, D]`` of the attention of a prompt in layer ``number``, from the pass in which the policy sums
        it over the queries: on a CPU both cost what the output alone does. None where the policy makes no such sums, and on a
        GPU, whose kernels are faster. What the policy observed is used in :meth:`after_attention`."""
        if self.prompt is None or not self.policy.observes or query.device.type != "cpu" or query.requires_grad:
            return None
        tokens = self.prompt.tokens(number, query.device)
        shared = SharedPass(query, value, self.prompt.split == "entropy")
        attention = LayerAttention(query, key, visible, scaling, tokens.text, memo=tokens.memo, shared_pass=shared)
        self._observed = attention, self._observe(number, attention, tokens.places, window)
        return (
            None
            if shared.found is None or shared.found.read is None
            else shared.found.read.transpose(1, 2).contiguous()
        )

    def settle(self) -> None:
        """The forward is over: evict from the layers that waited for it."""
        if self.prompt is not None:
            self.prompt.settle()
        device = self.forward.phase(0).places.device
        if self.prompt is not None and isinstance(self.policy, ReadingPolicy):
            first = first_layer(self.policy, self.depth)
            with self.forward.measured("selection", device):
                rows = self.prompt.text_rows
                prepare_reads(self.policy, self.state.layers[first:], self.scaling, self.asked, rows)
            self.asked = {}
        if self.shrinks:
            with self.forward.measured("selection", device):
                self.schedule.settle(None if self.prompt is None else self.prompt.pictured_rows)

    def _observe(self, number: int, attention: LayerAttention, places: Tensor, window: int | None) -> Tensor | None:
        """What the policy makes of the attention of a layer, ``[B, Hkv, K]`` float32; a schedule carries it on."""
        policy, schedule, key = self.policy, self.state.layers[number].schedule, attention.key
        received = None
        if policy.observes:
            before = schedule.figures(key.shape[2])
            before = key.new_zeros(key.shape[:3], dtype=torch.float32) if before is None else before
            received = observed(policy, attention, before)
            rows = None if self.prompt is None else self.prompt.text_rows
            if rows is not None and not policy.observes_steps:
                received = torch.where(to_device(rows, received.device)[:, None, None], before, received)
        if policy.scheduled:
            schedule.received, schedule.scaling, schedule.window = received, attention.scaling, window
            if policy.window:
                # those of a whole prompt are large
                last = slice(-policy.window, None)
                schedule.remember(attention.query[:, :, last].clone(), places[:, last].clone())
                schedule.keep(policy.window)
        return received

    def _recall(self, number: int, query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> None:
        """At a prompt note what there is; at a decode step choose what the layers from ``layer`` on read."""
        if self.prompt is not None:
            self.prompt.note(number, query.device)
            self.scaling = scaling
            if self.policy.window:
                places = self.prompt.tokens(number, query.device).places[:, -self.policy.window :]
                self.asked[number] = query[:, :, -self.policy.window :].clone(), places >= 0
            return
        if isinstance(self.policy, ReadingPolicy):
            # chosen before the attention
            return
        first = first_layer(self.policy, self.depth)
        if number == first - 1 and query.shape[2] == 1:
            text = torch.ones(len(query), 1, dtype=torch.bool, device=query.device)
            attention = LayerAttention(query, key, visible, scaling, text)
            read = sparse_read(self.policy, self.state.shared, self.state.layers[number], attention)
            self.forward.incoming.reads.append((first, read))
