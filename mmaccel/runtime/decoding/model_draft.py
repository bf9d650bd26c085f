"""Drafts by a model: a smaller one of the same family, or the same one, over a prompt that a recipe has reduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from .reader import UNFORGETTING, Reader
from .rows import Chooser, Draft, Row, in_common


class ModelDraft:
    """Drafts of a model that reads the prompt when it is asked first: greedy, or drawn where answers are sampled.

    Its cache follows what is committed: tokens that it has drafted and that were accepted stay, others are forgotten. All rows
    go one token a step; a row that has more tokens to read than others reads them first, and drafts fewer.

    Parameters
    ----------
    model : the model that drafts; its module may be that of the model that verifies, whose state is put back after every step.
    given : arguments of ``generate`` that describe the prompt.
    options : further arguments of ``generate`` and of every forward.
    limit : the most new tokens of the answer, if the caller limits them.
    words : how many words the model that verifies has, if it is another one. Embeddings of one tokenizer are padded otherwise
        in models of other sizes: what only the model that drafts has is not drafted, and what it lacks it reads as its last
        word.
    """

    free, nodes, longest, successors = False, 0, 0, 0
    #: whether its cache is not that of the model that verifies
    own_cache = True

    def __init__(
        self,
        name: str,
        model: Any,
        given: Mapping[str, Any],
        options: Mapping[str, Any],
        limit: int | None = None,
        words: int | None = None,
    ) -> None:
        self.name, self.model, self.words = name, model, words
        self.given, self.options, self.limit = dict(given), dict(options), limit
        self.reader: Reader | None = None
        #: the modules that remember positions, and what those of this draft are; empty before it has read the prompt
        self.modules = [module for module in model.modules() if "rope_deltas" in vars(module)]
        self.held: list[Any] = []
        #: of every row: how many of its tokens the cache holds, and what was read since the last draft began
        self.known: list[int] = []
        self.fed: list[list[int]] = []

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        with self.own_positions(), torch.no_grad():
            self.reader = self._read_prompt(len(rows))
        self.chooser = chooser
        self.known, self.fed = [row.prompt for row in rows], [[] for _ in rows]

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""
        with self.own_positions(), torch.no_grad():
            self._keep_what_was_right(rows)
            return self._draft(rows, most)

    def learn(self, read: Sequence[Sequence[int]], following: Sequence[Sequence[Sequence[int]]]) -> None:
        """See :class:`mmaccel.runtime.decoding.drafting.Source`."""

    def _draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        assert self.reader is not None
        reader = self.reader
        behind = [row.tokens[known:] for row, known in zip(rows, self.known, strict=True)]
        self.fed = [[] for _ in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        drawn_from: list[list[Tensor]] = [[] for _ in rows]
        live = [number for number, row in enumerate(rows) if not row.ended]
        first = min(len(behind[number]) for number in live)
        block = [(tokens if number in live else [0] * first)[:first] for number, tokens in enumerate(behind)]
        logits = self._read(block)
        if reader.recurrent and self.own_cache:
            # what is certain stays, and a draft is forgotten as a whole
            reader.keep([first] * len(rows))
            self.known = [known + first for known in self.known]
            behind, block = [tokens[first:] for tokens in behind], [[] for _ in rows]
        while True:
            for number in range(len(rows)):
                self.fed[number] += block[number]
            going = [
                number
                for number in live
                if len(self.fed[number]) >= len(behind[number]) and len(drafts[number]) < most[number]
            ]
            if going:
                texts = [row.tokens + draft for row, draft in zip(rows, drafts, strict=True)]
                proposed = self.chooser.propose(texts, going, logits[going])
                for place, number in enumerate(going):
                    drafts[number].append(proposed.tokens[place])
                    drawn_from[number] += proposed.probabilities[place : place + 1]
            if all(len(drafts[number]) >= most[number] for number in live):
                return [Draft(*pair) for pair in zip(drafts, drawn_from, strict=True)]
            block = [[self._next(number, behind, drafts)] for number in range(len(rows))]
            logits = self._read(block)

    def _read(self, block: list[list[int]]) -> Tensor:
        """Read a block of tokens ``[R][L]``; returns logits ``[R, words]`` behind the last ones."""
        assert self.reader is not None
        ids, own = torch.tensor(block, device=self.reader.ids.device), self.model.config.get_text_config().vocab_size
        if self.words is None or self.words == own:
            return self.reader.read(ids)[:, -1]
        logits = self.reader.read(ids.clamp(max=own - 1))[:, -1]
        return torch.nn.functional.pad(logits, (0, self.words - own), value=float("-inf"))

    def _next(self, number: int, behind: list[list[int]], drafts: list[list[int]]) -> int:
        """The token that a row reads next: one that is certain, else what it has drafted, else any."""
        at, certain = len(self.fed[number]), behind[number]
        if at < len(certain):
            return certain[at]
        drafted = drafts[number]
        return drafted[min(at - len(certain), len(drafted) - 1)] if drafted else 0

    def _keep_what_was_right(self, rows: Sequence[Row]) -> None:
        """Forget what was read and then turned out otherwise."""
        assert self.reader is not None
        # the newest token has still to be read: its logits are what the next draft begins with
        counts = [
            None if row.ended else in_common(fed, row.tokens[known:-1])
            for row, known, fed in zip(rows, self.known, self.fed, strict=True)
        ]
        kept = self.reader.keep(counts)
        self.known = [known + count for known, count in zip(self.known, kept, strict=True)]

    def _read_prompt(self, batch: int) -> Reader:
        """Let the model read the prompt through its own ``generate``."""
        made: list[Reader] = []

        def read(model: Any, input_ids: Tensor, generation_config: Any, **arguments: Any) -> Tensor:
            prepared = {name: value for name, value in arguments.items() if name not in _LOOP}
            reader = Reader(model, input_ids, generation_config, prepared, dict(self.options))
            reader.prefill()
            made.append(reader)
            return input_ids

        device = self.model.device
        given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.given.items()}
        answers = batch // len(ids) if isinstance(ids := given.get("input_ids"), Tensor) else 1
        # only the prompt is read; without sampling generate takes no more than one answer to it
        how = {"do_sample": answers > 1, "num_return_sequences": answers, "num_beams": 1}
        how |= {} if self.limit is None else {"max_new_tokens": self.limit}
        self.model.generate(**given, **self.options, **how, custom_generate=read)
        (reader,) = made
        if not reader.can_forget:
            raise UnsupportedError(UNFORGETTING)
        return reader

    @contextmanager
    def own_positions(self) -> Iterator[None]:
        """Modules remember how positions go on behind the last prompt (``rope_deltas``): put in those of the draft, and then
        those of the model that verifies, which may be the same modules."""
        before = [module.rope_deltas for module in self.modules]
        for module, deltas in zip(self.modules, self.held or before, strict=True):
            module.rope_deltas = deltas
        try:
            yield
        finally:
            self.held = [module.rope_deltas for module in self.modules]
            for module, deltas in zip(self.modules, before, strict=True):
                module.rope_deltas = deltas


#: arguments of a loop of ``generate`` that its models do not take
_LOOP = ("logits_processor", "stopping_criteria", "streamer", "synced_gpus")
