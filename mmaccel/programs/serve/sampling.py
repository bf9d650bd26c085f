"""Sampling with a random generator for every request: a seed gives the same answer whatever else the server does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .schema import ChatRequest

#: a lower temperature is greedy: logits overflow when they are divided by it
_COLDEST = 1e-5


class GumbelNoise(LogitsProcessor):
    """Adds Gumbel noise to scores ``[B, V]``: the largest sum is a sample of their softmax, so that greedy decoding samples.
    ``generate`` itself uses the random generator of the whole process."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores with new noise."""
        if self.generator is None:
            self.generator = torch.Generator(scores.device)
            self.generator.manual_seed(self.generator.seed() if self.seed is None else self.seed)
        noise = torch.empty_like(scores, dtype=torch.float32).exponential_(generator=self.generator)
        return scores.float() - noise.log()


def sampler(config: Any, request: ChatRequest) -> LogitsProcessorList:
    """Logits processors after which the largest logit is the next token; what the request leaves open is as in the model's
    generation ``config``."""
    temperature, top_p, top_k = request.temperature, request.top_p, None
    if config.do_sample:
        temperature = (config.temperature or 1.0) if temperature is None else temperature
        top_p, top_k = config.top_p if top_p is None else top_p, config.top_k
    processors = LogitsProcessorList()
    if not temperature or temperature < _COLDEST:
        return processors
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(TopPLogitsWarper(float(top_p)))
    processors.append(GumbelNoise(request.seed))
    return processors
