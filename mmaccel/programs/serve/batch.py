"""Answers to several requests as the rows of one batch: each ends, samples and is streamed as it would alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ...errors import MmaccelError
from ...media.files import Chat, encode
from ..model_lock import TokenTimer
from .detokenizer import Detokenizer
from .engine import VISUAL, Answer, Engine, budget_key
from .sampling import sampler
from .schema import ChatRequest


class Row:
    """The answer of one request so far, of at most ``longest`` tokens. ``send`` gets its text piece by piece; it ends at one of
    the tokens ``ends``, at a stop sequence of its ``text``, or when ``stop`` is set."""

    def __init__(
        self,
        text: Detokenizer,
        longest: int,
        ends: set[Any],
        send: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.text, self.longest, self._ends, self._send, self.stop = text, longest, ends, send, stop

    @property
    def done(self) -> bool:
        """Whether no more tokens are taken."""
        ids = self.text.ids
        ended = bool(ids) and (ids[-1] in self._ends or len(ids) >= self.longest)
        return ended or self.text.stopped or self.stop.is_set()

    def add(self, token: int) -> None:
        """Take the next token; what follows an end is padding."""
        if not self.done:
            self._send(self.text.add([token]))


class AllLeft:
    """Is set when all clients of a batch have left."""

    def __init__(self, rows: Sequence[threading.Event]) -> None:
        self.rows = rows

    def is_set(self) -> bool:
        """Whether they have."""
        return all(stop.is_set() for stop in self.rows)


class RowsStreamer(TokenTimer):
    """A streamer that hands every row its tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = rows

    @property
    def begun(self) -> bool:
        """Whether tokens have come."""
        return len(self.times) > 1

    def put(self, value: Any) -> None:
        """The prompts, then a token of every row at a time."""
        super().put(value)
        if self.begun:
            for row, token in zip(self.rows, value.tolist(), strict=True):
                row.add(token)


class RowsEnd(StoppingCriteria):
    """Ends rows that are done; ``check`` ends the run when it is to stop."""

    def __init__(self, rows: Sequence[Row], check: Callable[[], None]) -> None:
        self.rows, self.check = rows, check

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """``[B]`` bool: which rows are done."""
        self.check()
        return torch.tensor([row.done for row in self.rows], device=input_ids.device)


class RowSamplers(LogitsProcessor):
    """The ``samplers`` of every request, each on its own row of the scores."""

    def __init__(self, samplers: Sequence[LogitsProcessorList]) -> None:
        self.samplers = samplers

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``[B, V]`` float32."""
        rows = zip(self.samplers, input_ids.split(1), scores.float().split(1), strict=True)
        return torch.cat([sampler(ids, row) for sampler, ids, row in rows])


def alike(request: ChatRequest) -> Any:
    """A key that is equal for requests that may be answered as a batch: their budget, and how much they show. None for one that
    is answered alone, since it may fall back."""
    budget = request.mmaccel
    if isinstance(budget, Mapping) and budget.get("fallback"):
        return None
    pictures = sum(medium.kind == "image" for medium in request.media)
    return budget is False, budget_key(budget), pictures, len(request.media) - pictures


def answer_together(
    engine: Engine,
    requests: Sequence[ChatRequest],
    sends: Sequence[Callable[[str], None]],
    stops: Sequence[threading.Event],
) -> list[Answer | Exception | None]:
    """The answers of requests that are :func:`alike`, as rows of one batch, which end together; of each the arguments of
    :meth:`Engine.answer`. An exception where a request failed, None where it is still to be answered alone, since the batch
    does not fit: there, an error names what is wrong. Kept caches are neither continued nor added.

    Raises TimeLimitExceeded, and Stopped if all of ``stops`` are set before the end.
    """
    found: list[Answer | Exception | None] = [None] * len(requests)
    chats: dict[int, Chat] = {}
    for i, (request, stop) in enumerate(zip(requests, stops, strict=True)):
        try:
            chats[i] = engine.read(request, stop)
        except Exception as error:
            found[i] = error
    at, model = list(chats), engine.model
    if len(at) < 2:
        return found
    processor, budget = engine.budgeted(requests[at[0]].mmaccel)
    try:
        inputs = encode(processor, list(chats.values())).to(model.device, model.dtype)
        longest = [engine.longest(inputs, requests[i], budget) for i in at]
    except MmaccelError:
        return found
    texts = [Detokenizer(processor.tokenizer, requests[i].stop) for i in at]
    rows = [Row(text, n, engine.ends, sends[i], stops[i]) for i, text, n in zip(at, texts, longest, strict=True)]
    samplers = [sampler(model.generation_config, requests[i]) for i in at]
    streamer = RowsStreamer(rows)
    with engine.turn(AllLeft([row.stop for row in rows])) as check, torch.inference_mode():
        check()
        try:
            with engine.relieved():
                model.generate(
                    **inputs,
                    mmaccel=budget,
                    max_new_tokens=max(longest),
                    do_sample=False,
                    num_beams=1,
                    streamer=streamer,
                    logits_processor=LogitsProcessorList([RowSamplers(samplers)] if any(samplers) else []),
                    stopping_criteria=StoppingCriteriaList([RowsEnd(rows, check)]),
                )
        except torch.OutOfMemoryError:
            if streamer.begun:
                raise
            return found
        stats, left = model.mmaccel.stats().to_dict(), model.mmaccel.reduction
        shown = model.mmaccel.family.visual(inputs["input_ids"])
        kept = shown if budget is False or left is None else shown & left.kept
    stats |= {name: stats[name] // len(rows) for name in ("kv_bytes", "kv_bytes_bare")}
    for i, row, *counts, length in zip(
        at, rows, shown.sum(1).tolist(), kept.sum(1).tolist(), inputs["attention_mask"].sum(1).tolist(), strict=True
    ):
        sends[i](row.text.end())
        own = stats | dict(zip(VISUAL, counts, strict=True))
        ending, count = engine.ending(row.text, row.longest), len(row.text.ids)
        found[i] = Answer(row.text.whole, ending, length, count, streamer.rate(), own, together=len(rows))
    return found
