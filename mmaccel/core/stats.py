"""Statistics of the last call: tokens in and kept per stage, bytes of the KV cache, time per stage."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .figures import CallStats


@dataclass
class Stage:
    """Figures of one stage of the recipe in one call, in visual tokens summed over rows.

    ``tokens_in`` reached it, the budget resolved to ``resolved`` (None where the content decides, see the notes), and
    ``tokens_kept`` stayed. At site ``cache`` these are keys of a layer, mean over layers and heads; for a stand-alone encoder
    the patches of all pictures, and where frames reuse parts of others, the patches of the clips and how many a
    layer of the tower computes.
    """

    site: str
    method: str
    tokens_in: int = 0
    resolved: int | None = 0
    tokens_kept: int = 0


class Clock:
    """Timer of named parts in seconds. On CUDA it records events on the current stream, and waits for them only when it
    is read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event, float]] = deque()

    @contextmanager
    def measure(self, name: str, device: torch.device | None = None, times: float = 1.0) -> Iterator[None]:
        """Add ``times`` times the duration of the block to ``name``, for work that is repeated and timed once."""
        begin = self.start(device)
        try:
            yield
        finally:
            self.stop(name, begin, times)

    @staticmethod
    def start(device: torch.device | None) -> torch.cuda.Event | float:
        """A point in time to pass to :meth:`stop`."""
        if device is not None and device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event
        return time.perf_counter()

    def stop(self, name: str, begin: torch.cuda.Event | float, times: float = 1.0) -> None:
        """Add ``times`` times the duration since ``begin`` to ``name``."""
        if isinstance(begin, float):
            self._seconds[name] = self._seconds.get(name, 0.0) + (time.perf_counter() - begin) * times
        else:
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(begin.device))
            self._events.append((name, begin, end, times))
            # events that have completed are added up now, so that a long run does not hold them all
            while self._events and self._events[0][2].query():
                self._add()

    def seconds(self) -> dict[str, float]:
        """Seconds by name, including those on the device."""
        while self._events:
            self._events[0][2].synchronize()
            self._add()
        return dict(self._seconds)

    def _add(self) -> None:
        name, begin, end, times = self._events.popleft()
        self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000 * times


#: why steps are not captured where nothing more is known
UNCAPTURED = (
    "steps are captured on CUDA or with compile_config, and never those of beams or of candidates of transformers"
)


@dataclass
class Stats:
    """The statistics of one call. :meth:`as_dict` is what ``model.mmaccel.stats()`` returns."""

    recipe: str
    stages: dict[int, Stage] = field(default_factory=dict)
    prompt_tokens: int = 0
    visual_tokens: int = 0
    layer_tokens: list[int] = field(default_factory=list)
    sound_tokens: int = 0
    sounds_dropped: int = 0
    kv_bytes: int = 0
    kv_bytes_bare: int = 0
    labels_ignored: int = 0
    notes: list[str] = field(default_factory=list)
    decode_steps: int = 0
    captured_steps: int = 0
    tokens_returned: int = 0
    retraced: Tensor | int = 0
    uncaptured: str = UNCAPTURED
    drafting: dict[str, Any] = field(default_factory=dict)
    fallback: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, int] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    @property
    def visual_tokens_per_layer(self) -> float:
        """The mean over layers of the visual tokens that reach them."""
        return sum(self.layer_tokens) / len(self.layer_tokens) if self.layer_tokens else float(self.visual_tokens)

    def as_dict(self) -> CallStats:
        """The figures for the user."""
        layers = self.layer_tokens
        figures = {
            **vars(self),
            "sound_tokens_kept": self.sound_tokens - self.sounds_dropped,
            "retraced": int(self.retraced),
            "visual_tokens_kept": layers[-1] if layers else self.visual_tokens,
            "visual_tokens_per_layer": self.visual_tokens_per_layer,
            "stages": [vars(stage).copy() for _, stage in sorted(self.stages.items())],
            "notes": list(dict.fromkeys(self.notes)),
            "seconds": self.clock.seconds(),
        }
        return CallStats((name, figures[name]) for name in CallStats.__annotations__)
