"""Answers to several requests as the rows of one batch: each ends, samples and is streamed as it would alone."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ...errors import MmaccelError
from ...media.files import Chat, encode
from ..model_lock import Stopped, TokenTimer
from ..prefix_caches import Media
from .detokenizer import Detokenizer
from .engine import VISUAL, Answer, Engine, budget_key, reads_once
from .sampling import sampler
from .schema import ChatRequest


@dataclass(eq=False)
class Member:
    """A request of a batch. ``send`` gets the text of its answer piece by piece, and ``finish``, once, the answer or the error
    that ended it; ``stop`` is set when the client has left. ``chat`` is what the request shows, once it is read."""

    request: ChatRequest
    send: Callable[[str], None]
    stop: threading.Event
    finish: Callable[[Answer | BaseException], None]
    chat: Chat | None = None


class Row:
    """The answer of one ``member`` so far, of at most ``longest`` tokens. It ends at one of the tokens ``ends``, at a stop
    sequence of its ``text``, or when the client has left."""

    def __init__(self, member: Member, text: Detokenizer, longest: int, ends: set[Any]) -> None:
        self.member, self.text, self.longest, self._ends = member, text, longest, ends

    @property
    def done(self) -> bool:
        """Whether no more tokens are taken."""
        ids = self.text.ids
        ended = bool(ids) and (ids[-1] in self._ends or len(ids) >= self.longest)
        return ended or self.text.stopped or self.member.stop.is_set()

    def add(self, token: int) -> None:
        """Take the next token; what follows an end is padding."""
        if not self.done:
            self.member.send(self.text.add([token]))


class AllLeft:
    """Is set when all clients of a batch have left."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    def is_set(self) -> bool:
        """Whether they have."""
        return all(one.stop.is_set() for one in self.members)


class RowsStreamer(TokenTimer):
    """A streamer that hands every row its tokens. ``ended`` gets each row once, when it is done: its number, the row, and the
    tokens a second so far."""

    def __init__(self, rows: Sequence[Row], ended: Callable[[int, Row, float | None], None]) -> None:
        super().__init__()
        #: the rows that go on, by their number
        self.open = dict(enumerate(rows))
        self._ended = ended

    @property
    def begun(self) -> bool:
        """Whether tokens have come."""
        return len(self.times) > 1

    def put(self, value: Any) -> None:
        """The prompts, then a token of every row at a time."""
        super().put(value)
        if self.begun:
            tokens = value.tolist()
            for number, row in list(self.open.items()):
                row.add(tokens[number])
                if row.done:
                    self._end(number)

    def end(self) -> None:
        """No more tokens come: the clients of rows that are still open have left."""
        for number in list(self.open):
            self._end(number)

    def _end(self, number: int) -> None:
        self._ended(number, self.open[number], self.rate())
        del self.open[number]


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


def answer_together(engine: Engine, members: Sequence[Member]) -> None:
    """Answer requests that are :func:`alike` as rows of one batch; each is finished when its row ends, while others go on.

    Kept caches are neither continued nor added by a batch, so those that would use one are answered alone. All are where the
    batch does not fit: there, an error names what is wrong.
    """
    present: list[Member] = []
    for one in members:
        try:
            one.chat = engine.read(one.request, one.stop)
            present.append(one)
        except BaseException as error:
            one.finish(error)
    for one in [one for one in present if one.stop.is_set()]:
        # left while others were read
        present.remove(one)
        one.finish(Stopped())
    together, alone, inputs = _split(engine, present)
    if alone and alone[0] is present[0]:
        # first come, first served
        _answer_one_by_one(engine, alone)
        alone = []
    if inputs is not None:
        alone += _answer_rows(engine, together, inputs)
    _answer_one_by_one(engine, alone)


def _answer_one_by_one(engine: Engine, members: Sequence[Member]) -> None:
    for one in members:
        try:
            one.finish(engine.answer(one.request, one.send, one.stop, one.chat))
        except BaseException as error:
            one.finish(error)


def _split(engine: Engine, members: list[Member]) -> tuple[list[Member], list[Member], Any]:
    """The requests that are answered as a batch, those that are answered alone, and the inputs of the batch, None for none."""
    together, alone, inputs = members, list[Member](), _encoded(engine, members)
    if inputs is not None and (continuing := _continuing(engine, members, inputs)):
        alone = [one for one in members if one in continuing]
        together = [one for one in members if one not in continuing]
        inputs = _encoded(engine, together)
    return ([], members, None) if inputs is None else (together, alone, inputs)


def _encoded(engine: Engine, members: Sequence[Member]) -> Any:
    """The inputs of a batch; None where there is none, or one of its requests does not fit."""
    if len(members) < 2:
        return None
    try:
        processor, _ = engine.budgeted(members[0].request.mmaccel)
        return encode(processor, [one.chat for one in members if one.chat is not None])
    except MmaccelError:
        return None


def _continuing(engine: Engine, members: Sequence[Member], inputs: Mapping[str, Any]) -> set[Member]:
    """The requests that continue a kept cache, or, asking about the same pictures, would continue those of each other."""
    _, budget = engine.budgeted(members[0].request.mmaccel)
    if engine.kept is None or not reads_once(budget):
        return set()
    found, same = set[Member](), defaultdict[Any, list[Member]](list)
    visual = engine.model.mmaccel.family.visual(inputs["input_ids"])
    rows = zip(members, inputs["input_ids"], visual, inputs["attention_mask"].bool(), strict=True)
    for one, padded, shown, valid in rows:
        assert one.chat is not None
        ids, media, places = padded[valid], Media.of(one.chat), shown[valid].nonzero()
        if engine.kept.continues(budget_key(budget), ids, media):
            found.add(one)
        if len(places):
            same[media, tuple(ids[: int(places.max()) + 1].tolist())].append(one)
    return found.union(*(several for several in same.values() if len(several) > 1))


def _answer_rows(engine: Engine, members: list[Member], inputs: Any) -> list[Member]:
    """Answer requests as a batch with these ``inputs``; returns those that are to be answered alone, since it does not fit."""
    model = engine.model
    processor, budget = engine.budgeted(members[0].request.mmaccel)
    shown, lengths = model.mmaccel.family.visual(inputs["input_ids"]), inputs["attention_mask"].sum(1).tolist()
    inputs = inputs.to(model.device, model.dtype)
    try:
        longest = [engine.longest(inputs, one.request, budget) for one in members]
    except MmaccelError:
        return members
    texts = [Detokenizer(processor.tokenizer, one.request.stop) for one in members]
    rows = [Row(*of, engine.ends) for of in zip(members, texts, longest, strict=True)]
    samplers = [sampler(model.generation_config, one.request) for one in members]

    def ended(number: int, row: Row, rate: float | None) -> None:
        if row.member.stop.is_set():
            return row.member.finish(Stopped())
        row.member.send(row.text.end())
        stats, left = model.mmaccel.stats().to_dict(), model.mmaccel.reduction
        stats |= {name: stats[name] // len(rows) for name in ("kv_bytes", "kv_bytes_bare")}
        kept = shown if budget is False or left is None else shown & left.kept
        stats |= {name: int(x[number].sum()) for name, x in zip(VISUAL, (shown, kept), strict=True)}
        ending, count = engine.ending(row.text, row.longest), len(row.text.ids)
        row.member.finish(Answer(row.text.whole, ending, lengths[number], count, rate, stats, together=len(rows)))

    streamer = RowsStreamer(rows, ended)
    try:
        with engine.turn(AllLeft(members)) as check, torch.inference_mode(), engine.relieved():
            check()
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
    except BaseException as error:
        if isinstance(error, torch.OutOfMemoryError) and not streamer.begun:
            return members
        for row in streamer.open.values():
            row.member.finish(error)
    return []
