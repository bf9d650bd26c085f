"""What a piece of work allocates, and how much of it was alive at once.

On the CPU every allocation, and the release of what was allocated since, is reported by torch's allocator itself, through the
profiler, those inside operators included; scratch that the math libraries take past it is not. On a GPU the caching
allocator's own counters are read. This file needs torch only, so that other environments can load it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class Span:
    """Bytes beyond those alive when the recording began: the most during the span, and what was alive at its end."""

    peak: int
    held: int


class Allocations:
    """Record the spans between marks::

    with Allocations("cpu") as seen:
        prefill()
        seen.mark("prefill")
        decode()
        seen.mark("decode")
    seen.spans["decode"].peak
    """

    def __init__(self, device: str = "cpu") -> None:
        self.cuda = device.startswith("cuda")
        self.spans: dict[str, Span] = {}
        self._profile: Any = None
        self._base = 0

    def __enter__(self) -> Allocations:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
        else:
            self._profile = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True)
            self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        """The span since the last mark ends here."""
        if self.cuda:
            torch.cuda.synchronize()
            peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            self.spans[name] = Span(peak - self._base, held - self._base)
            torch.cuda.reset_peak_memory_stats()
        else:
            with torch.autograd.profiler.record_function(f"mark {name}"):
                pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.cuda:
            return
        self._profile.__exit__(kind, error, trace)
        if kind is None:
            events = [(e.start_ns(), e.name(), e.nbytes()) for e in self._profile.kineto_results.events()]
            self.spans = spans(sorted(events, key=lambda event: event[0]))


def spans(events: list[tuple[int, str, int]]) -> dict[str, Span]:
    """Spans of ``(time, name, bytes)`` in order: ``[memory]`` allocates or, if negative, frees; ``mark NAME`` ends a span."""
    out: dict[str, Span] = {}
    held = peak = 0
    for _, name, size in events:
        if name == "[memory]":
            held += size
            peak = max(peak, held)
        elif name.startswith("mark "):
            out[name.removeprefix("mark ")] = Span(peak, held)
            peak = held
    return out
