"""What Prometheus is told; seconds, bytes and tokens, as its conventions have them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from ...version import __version__
from .engine import Answer

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_BYTES = tuple(float(1 << shift) for shift in range(16, 36, 2))


class Metrics:
    """The figures of one server."""

    def __init__(self, model: str, recipe: str) -> None:
        self.registry = registry = CollectorRegistry()
        Info("mmaccel", "What is served.", registry=registry).info(
            {"version": __version__, "model": model, "recipe": recipe}
        )
        self.requests = Counter(
            "mmaccel_requests", "Requests for an answer by HTTP status.", ["status"], registry=registry
        )
        self.disconnected = Counter(
            "mmaccel_disconnected", "Requests whose client left before the end.", registry=registry
        )
        self.visual_tokens = Counter("mmaccel_visual_tokens", "Visual tokens of all prompts.", registry=registry)
        self.visual_tokens_kept = Counter(
            "mmaccel_visual_tokens_kept", "Those of them that reached the last layer.", registry=registry
        )
        self.prompt_tokens = Counter("mmaccel_prompt_tokens", "Tokens of all prompts, unreduced.", registry=registry)
        self.generated_tokens = Counter("mmaccel_generated_tokens", "Tokens of all answers.", registry=registry)
        self.kv_bytes = Histogram(
            "mmaccel_kv_bytes", "Bytes of the KV cache at the end of an answer.", buckets=_BYTES, registry=registry
        )
        self.first_token = Histogram(
            "mmaccel_time_to_first_token_seconds",
            "From the arrival of a request, waiting and decoding of what it shows included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.rate = Histogram(
            "mmaccel_tokens_per_second",
            "Behind the first token, of answers that are not too short.",
            buckets=_RATES,
            registry=registry,
        )
        self._waiting = Gauge(
            "mmaccel_queue_length", "Requests that wait for a model, or are on their way.", registry=registry
        )
        self._running = Gauge("mmaccel_running", "Requests that are answered now.", registry=registry)

    def watch(self, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        """Where the gauges look."""
        self._waiting.set_function(waiting)
        self._running.set_function(running)

    def answered(self, answer: Answer, first: float) -> None:
        """Count a whole answer, whose first token came after ``first`` seconds."""
        self.visual_tokens.inc(answer.stats["visual_tokens"])
        self.visual_tokens_kept.inc(answer.stats["visual_tokens_kept"])
        self.prompt_tokens.inc(answer.prompt_tokens)
        self.generated_tokens.inc(answer.new_tokens)
        self.kv_bytes.observe(answer.stats["kv_bytes"])
        self.first_token.observe(first)
        if answer.rate is not None:
            self.rate.observe(answer.rate)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
