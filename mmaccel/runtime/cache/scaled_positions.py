"""Scaled positions: the RoPE of a text model with other frequencies, in forwards whose recipe asks for it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...kv.cache import CacheState
from ...kv.index import to_device
from ...kv.policies.visual_context_window import VisualContextWindow
from ..call.call import current
from ..call.forward import Forward, Prompt
from ..call.plan import ModelPlan
from ..call.runs import Run, TextInputs


@dataclass
class ScaledRows:
    """The rows of a cache whose keys are at scaled positions, ``rows [B]`` bool on the CPU, and the method that scales them."""

    method: VisualContextWindow
    rows: Tensor

    def select(self, rows: Tensor, on_host: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self.rows = self.rows[on_host]

    def copy(self) -> ScaledRows:
        """A copy to change independently."""
        return ScaledRows(self.method, self.rows)

    def crop(self, seen: int) -> None:
        """All places of a row are scaled alike."""

    def rename(self, new: Tensor, held: Tensor) -> None:
        """All places of a row are scaled alike."""

    def tensors(self) -> Iterator[Tensor]:
        """The rows."""
        yield self.rows


class ScalePositions(Run):
    """A forward in which the tokens of some rows are at scaled positions; made behind the run that reduces the prompt.

    trained : positions of the model; None where its config does not say.
    """

    def __init__(
        self, forward: Forward, method: VisualContextWindow, state: CacheState | None, trained: int | None
    ) -> None:
        self.forward, self.method, self.state, self.trained = forward, method, state, trained
        self.rows: Tensor | None = None

    def before_text(self, text: TextInputs) -> None:
        """Find the rows, which the first prompt of a cache settles."""
        forward, method = self.forward, self.method
        memory = None if self.state is None else self.state.shared.memory(ScaledRows)
        if memory is not None and memory.method != method:
            raise UnsupportedError(
                f"{method.name} cannot continue a cache of {forward.seen} tokens that were read with {memory.method!r}; begin "
                "again."
            )
        if memory is not None:
            self.rows = memory.rows
        elif isinstance(forward, Prompt):
            left = forward.total.kept & forward.layout.valid
            self.rows = (left & forward.layout.visual).sum(1) > method.window
            if self.trained is not None:
                self.rows |= left.sum(1) + forward.seen > self.trained
            if forward.seen and bool(self.rows.any()):
                raise UnsupportedError(
                    f"{method.name} cannot scale positions behind {forward.seen} tokens that were read without it; begin again."
                )
            if self.state is not None:
                self.state.shared.keep(ScaledRows(method, self.rows))

    def turned(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The ``output`` of ``module``, the RoPE of the text model, for rows that are scaled; ``[..., B, n, D]`` each."""
        if self.rows is None or not bool(self.rows.any()):
            return output
        scaled = copy.copy(module)
        frequencies: Any = module.inv_freq
        scaled._buffers = {**module._buffers, "inv_freq": self.method.scaled(frequencies)}
        scaled._forward_hooks = OrderedDict()
        new = type(module).forward(scaled, *args, **kwargs)
        here = to_device(self.rows, output[0].device)[:, None, None]
        return tuple(
            torch.where(here, (x * self.method.temperature).to(old), old) for x, old in zip(new, output, strict=True)
        )


def hook_rotations(plan: ModelPlan, hook: Callable[..., None]) -> None:
    """Scale the positions of a text model in forwards that ask for it."""
    if plan.policy is None or not isinstance(plan.policy.method, VisualContextWindow):
        return

    def turn(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        call = current(plan)
        runs = None if call is None else call.text.runs
        run = None if runs is None else runs.of(ScalePositions)
        return output if run is None else run.turned(module, args, kwargs, output)

    hook(plan.family.text.rotary_emb.register_forward_hook(turn, with_kwargs=True))
