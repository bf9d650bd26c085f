"""Metrics for Prometheus, in its base units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from ...core.version import __version__
from .engine import Answer

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_BYTES = tuple(float(1 << shift) for shift in range(16, 36, 2))


class Metrics:
    """The metrics of one server."""

    def __init__(self, model: str, recipe: str) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Any, name: str, help_: str, *labels: str, **options: Any) -> Any:
            return kind(f"mmaccel{name}", help_, labels, registry=self.registry, **options)

        make(Info, "", "What is served.").info({"version": __version__, "model": model, "recipe": recipe})
        self.requests = make(Counter, "_requests", "Requests for an answer by HTTP status.", "status")
        self.disconnected = make(Counter, "_disconnected", "Requests whose client left before the end.")
        self.visual_tokens = make(Counter, "_visual_tokens", "Visual tokens of all prompts.")
        self.visual_tokens_kept = make(Counter, "_visual_tokens_kept", "Those of them that reached the last layer.")
        self.prompt_tokens = make(Counter, "_prompt_tokens", "Tokens of all prompts, unreduced.")
        self.reused_tokens = make(Counter, "_prompt_tokens_reused", "Those of them that a kept cache had read.")
        self.prefix_hits = make(Counter, "_prefix_cache_hits", "Answers that continued a kept cache.")
        self.prefix_misses = make(Counter, "_prefix_cache_misses", "Answers that continued none.")
        self.generated_tokens = make(Counter, "_generated_tokens", "Tokens of all answers.")
        self.drafted_tokens = make(Counter, "_drafted_tokens", "Tokens that were drafted, and verified by the model.")
        self.accepted_tokens = make(Counter, "_accepted_tokens", "Those of them that the model accepted.")
        self.batched = make(Counter, "_batched", "Answers that were made in a batch with others.")
        self.kv_bytes = make(Histogram, "_kv_bytes", "Bytes of the KV cache at the end of an answer.", buckets=_BYTES)
        first = "Seconds from the arrival of a request, waiting and decoding of media included."
        self.first_token = make(Histogram, "_time_to_first_token_seconds", first, buckets=_SECONDS)
        rate = "Tokens a second after the first one, of answers that are not too short."
        self.rate = make(Histogram, "_tokens_per_second", rate, buckets=_RATES)
        self._waiting = make(Gauge, "_queue_length", "Requests that wait for a model, or are being received.")
        self._kept = make(Gauge, "_prefix_cache_bytes", "Bytes of all kept caches.")
        self._running = make(Gauge, "_running", "Requests that are answered now.")

    def watch(self, waiting: Callable[[], int], running: Callable[[], int], kept: Callable[[], int]) -> None:
        """Set what the gauges read."""
        self._kept.set_function(kept)
        self._waiting.set_function(waiting)
        self._running.set_function(running)

    def watch_streams(self, open_: Callable[[], int], parked: Callable[[], int]) -> Counter:
        """Set what the gauges of live streams read; returns the counter of the questions that were answered."""
        for name, help_, read in (
            ("_streams", "Live streams that are open.", open_),
            ("_streams_parked_bytes", "Bytes of frames that live streams have parked.", parked),
        ):
            Gauge(f"mmaccel{name}", help_, registry=self.registry).set_function(read)
        return Counter("mmaccel_streams_answers", "Questions about live streams.", registry=self.registry)

    def answered(self, answer: Answer, first: float) -> None:
        """Count a whole answer, with ``first`` seconds to the first token."""
        self.visual_tokens.inc(answer.stats["visual_tokens"])
        self.visual_tokens_kept.inc(answer.stats["visual_tokens_kept"])
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.reused_tokens.inc(answer.reused)
        (self.prefix_hits if answer.reused else self.prefix_misses).inc()
        self.generated_tokens.inc(answer.new_tokens)
        self.batched.inc(answer.together > 1)
        drafting = answer.stats["drafting"]
        self.drafted_tokens.inc(drafting.get("drafted", 0))
        self.accepted_tokens.inc(drafting.get("accepted", 0))
        self.kv_bytes.observe(answer.stats["kv_bytes"])
        self.first_token.observe(first)
        if answer.rate is not None:
            self.rate.observe(answer.rate)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
