"""A decode step recorded as a CUDA graph and run again: of all that a step asks of the host, one launch is left.

Nothing is compiled. Recording costs the host about as much as an ordinary step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import first_line
from ...kv.static_view import StaticView

#: fewer steps than this are over before recording them has paid
LEAST = 16
#: the logits of a replayed step may differ by so much of the largest, as bfloat16 does from kernel to kernel
TOLERANCE = 0.02


def recordable(model: nn.Module) -> bool:
    """Whether steps of a model can be recorded where it is."""
    return torch.cuda.is_available() and next(model.parameters()).device.type == "cuda"


def record(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Record ``step`` on ``device`` without running it; returns its replay, and the output that a replay overwrites. PyTorch or
    a kernel raises an exception of any class where it cannot be recorded, for example because it waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        # not torch.cuda.graph(), which waits for the device and empties the allocator's cache
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # other threads may go on working
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, output


class ReplayedStep:
    """Decode steps on one pinned cache. The first is run as it is and then recorded; the second is run and replayed, and only
    if both agree those behind it are replayed.

    obstacle : why steps are run as they are; empty if they are not.
    """

    def __init__(self, pinned: StaticView, tokens: Tensor, run: Callable[[Tensor], Any]) -> None:
        self.pinned, self.tokens = pinned, tokens.clone()
        self._run = functools.partial(run, self.tokens)
        self._replay: Callable[[], None] | None = None
        self._output: Any = None
        self._checked = False
        self.obstacle = ""

    @property
    def replays(self) -> bool:
        """Whether the next step is replayed."""
        return self._checked

    def __call__(self, tokens: Tensor) -> Any:
        """The output for ``tokens [B, n]``, of which every step has as many. Its logits are overwritten by the next step."""
        self.tokens.copy_(tokens)
        if self._checked and self._replay is not None:
            self._replay()
            return self._output
        if self.pinned.expected_steps < LEAST:
            return self._run()
        if self._output is not None:
            return self._checked_run()
        output = self._run()
        try:
            self._replay, self._output = record(self._run, self.tokens.device)
        except Exception as error:
            self.obstacle = f"a step cannot be recorded ({first_line(error)})"
        return output

    def _checked_run(self) -> Any:
        """Run the step as it is, and once more as it was recorded. Counts of the host have changed since then: a recording that
        contains one of them gives another result now."""
        restore = self.pinned.remember()
        output = self._run()
        after = [x.clone() for x in self.pinned.counters()]
        restore()
        assert self._replay is not None
        self._replay()
        wanted, got = output.logits.float(), self._output.logits.float()
        same = (wanted - got).abs().max() <= TOLERANCE * wanted.abs().max()
        for counter, x in zip(self.pinned.counters(), after, strict=True):
            same = same & (counter == x).all()
        self._checked = bool(same)
        if not self._checked:
            self.obstacle = "a recorded step did not repeat what the step itself had made"
            self._replay = self._output = None
            # the recording may have stored wrong keys too
            restore()
            self._run()
        return output
