"""Tokens of a prompt as each layer sees them, and the budget of each row: computed once, on the host."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.scoring.importance import expected_queries, mean_rotation
from ..call.forward import Prompt, chosen_of
from .layer_budgets import known, prompt_budget
from .rules import CacheRules
from .token_origins import Tokens, prompt_grid, question_span


class PromptTokens:
    """Tokens and budgets of a prompt, for the cache stage of a recipe.

    text_rows : ``[B]`` bool on the CPU, rows without a picture in this prompt, from which nothing is evicted here; None where
        all have one.
    """

    def __init__(self, rules: CacheRules, state: CacheState, prompt: Prompt) -> None:
        self.rules, self.policy, self.shared = rules, rules.policy, state.shared
        self.prompt, self.layout = prompt, prompt.layout
        self.text_rows = prompt.text_rows
        self._tokens: dict[tuple[int, torch.device], Tokens] = {}

    @property
    def pictured_rows(self) -> Tensor:
        """``[B]`` bool on the CPU, rows with a picture."""
        return self.layout.visual.any(1)

    @cached_property
    def budget(self) -> list[int]:
        """Keys that stay in each row, see :func:`.layer_budgets.prompt_budget`."""
        return prompt_budget(self.rules, self.layout, self.prompt.stats.notes)

    def layer_budgets(self) -> list[list[int]]:
        """Per layer and row: how many of the competing keys stay, where that does not depend on the content."""
        return known(self.rules, self.layout, self.budget)

    def of_layer(self, number: int, device: torch.device) -> Tokens:
        """The tokens that layer ``number`` sees; one object for all layers on ``device`` that see the same tokens."""
        phase = self.prompt.phase(number)
        if (id(phase), device) not in self._tokens:
            at = chosen_of(phase)
            valid = at >= 0
            visual = self.layout.visual.gather(1, at.clamp(min=0)) & valid
            places = torch.where(valid, at + self.prompt.seen, -1)
            cells = self.table.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, 4))
            cells = cells.masked_fill(~valid[..., None], -1)
            rivals = valid & self.pictured_rows[:, None] if self.policy.joint else visual
            packed = to_device(torch.cat([places[..., None], visual[..., None], cells], dim=-1), device)
            by_score = self.policy.choice("layer_budget")[0] in ("prefix", "variance")
            self._tokens[id(phase), device] = Tokens(
                # a copy, since layers hold it and the packed tensor is larger
                places=packed[..., 0].clone(),
                visual=packed[..., 1].bool(),
                text=(packed[..., 0] >= 0) & (packed[..., 1] == 0),
                grid=packed[..., 2:].int(),
                count=to_device(torch.tensor(self.budget), device),
                question=question_span(self.table, self.policy.protect, device),
                rivals=rivals.sum(1).tolist(),
                texts=(valid & ~visual).sum(1).tolist(),
                at=[to_device(row.nonzero()[:, 0], device) for row in rivals] if by_score else [],
            )
        return self._tokens[id(phase), device]

    @cached_property
    def table(self) -> Tensor:
        """``[B, n, 4]`` int32, see :func:`.token_origins.prompt_grid`; kept in the cache if a schedule evicts later on."""
        table = prompt_grid(self.shared, self.layout, self.prompt.seen)
        if self.policy.scheduled:
            self.shared.places.grid_table = to_device(table, self.prompt.phase(0).places.device)
        return table

    def expected(self, tokens: Tokens, keys: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Mean and covariance of the queries expected after ``tokens``, if the policy scores by future queries.

        Parameters
        ----------
        keys : ``[B, Hkv, K, D]`` of the layer. queries : ``[B, q, Hq D]`` or ``[B, q, Hq, D]``, before RoPE.
        """
        offset = self.shared.positions.offset
        if not self.policy.future or queries is None or offset is None:
            return None
        if "future" not in tokens.memo:
            # the same in all layers
            valid = tokens.places >= 0
            counted = valid & (valid.cumsum(1) > self.policy.sinks)
            tokens.memo["future"] = counted, mean_rotation(*self._future_rotation(keys, offset))
        queries = queries.flatten(2).unflatten(2, (-1, keys.shape[3]))
        return expected_queries(queries, *tokens.memo["future"])

    def _future_rotation(self, keys: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, n, D]`` of RoPE at the positions behind the prompt."""
        text, device = self.rules.family.text, keys.device
        position = torch.arange(self.policy.future, device=device)
        position = (self.prompt.seen + self.prompt.length - offset.to(device))[:, None] + position
        if "mrope_section" in (text.config.rope_parameters or {}):
            position = position.expand(3, -1, -1)
            if (apart := self.shared.positions.axes_ahead) is not None:
                position = position + apart.T.to(device)[..., None]
        # in full precision, as half precision does not tell late positions apart
        cos, sin = (x[0] if x.dim() == 4 else x for x in text.rotary_emb(keys[..., :0].float(), position))
        return cos.to(device), sin.to(device)
