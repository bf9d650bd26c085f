"""The loop of decoding with drafts, in place of that of ``generate``: draft, verify in one forward, commit, forget the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.transformers_api import cache_argument
from ...decoding.accept import accept_greedy
from ...errors import UnsupportedError
from .drafting import Drafting
from .reader import Reader
from .rows import Chooser, Draft, Ending, Row


@dataclass
class Decoder:
    """Decodes a prompt with drafts: the ``custom_generate`` of a call of ``generate``.

    drafting : where drafts come from, how long they are, and the figures of the call.
    streamer : is given every committed token of a single row, ``[1]`` each.
    remember : is given the answers of all rows at the end.
    """

    drafting: Drafting
    streamer: Any = None
    remember: Callable[[Sequence[Sequence[int]]], None] | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **arguments: Any,
    ) -> Any:
        """Decode the prompt ``input_ids [B, S]``: what ``generate`` returns, ids ``[B, S + n]`` or its dictionary.

        Raises
        ------
        UnsupportedError
            For beams and other searches, and for outputs that drafts cannot give.
        """
        config, drafting = generation_config, self.drafting
        _check(config)
        chooser = Chooser(logits_processor, config)
        ending = Ending(stopping_criteria, config, input_ids.device)
        reader = Reader(model, input_ids, config, arguments)
        wanted = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        rows = [Row(ids, len(ids)) for ids in input_ids.tolist()]
        step = Step(reader, chooser, ending, rows, None if self.streamer is None else self.streamer.put, bool(wanted))
        step.commit(reader.prefill()[:, None], [Draft()] * len(rows))
        if not all(row.ended for row in rows):
            drafting.begin(rows, reader, chooser)
        while not all(row.ended for row in rows):
            drafts = drafting.draft(rows, ending.longest)
            begin = time.perf_counter()
            logits = step.read(drafts)
            accepted = step.commit(logits, drafts)
            drafting.note(rows, drafts, accepted, logits.shape[1], time.perf_counter() - begin)
        drafting.end(rows)
        reader.close_gaps(max(len(row.tokens) for row in rows) - 1)
        if self.streamer is not None:
            self.streamer.end()
        if self.remember is not None:
            self.remember([row.answer for row in rows])
        return _result(rows, reader, config, input_ids)


@dataclass
class Step:
    """One block of the loop: the model reads the drafts of all rows, and every row commits what is accepted."""

    reader: Reader
    chooser: Chooser
    ending: Ending
    rows: Sequence[Row]
    put: Callable[[Tensor], None] | None
    record: bool

    def read(self, drafts: Sequence[Draft]) -> Tensor:
        """Logits ``[B, n, V]`` behind the pending tokens and the drafts of every row; what lies behind them is padding."""
        blocks = [
            [*row.pending, *draft.tokens] if not row.ended else [0]
            for row, draft in zip(self.rows, drafts, strict=True)
        ]
        length = max(map(len, blocks))
        tokens = torch.tensor([[*block, *[block[-1]] * (length - len(block))] for block in blocks])
        return self.reader.read(tokens.to(self.reader.ids.device))

    def commit(self, logits: Tensor, drafts: Sequence[Draft]) -> list[int]:
        """Commit the accepted tokens of every row and the one behind them, and forget the others; how many drafted tokens
        were accepted."""
        first = [max(0, len(row.pending) - 1) for row in self.rows]
        before, begun = [len(row.tokens) for row in self.rows], [not row.ended for row in self.rows]
        going = [number for number, row in enumerate(self.rows) if not row.ended]
        accepted = (self._commit_greedy if self.chooser.plain else self._commit_chosen)(logits, drafts, first, going)
        told = [len(row.tokens) - length for row, length in zip(self.rows, before, strict=True)]
        self._forget([at + new if had else None for at, new, had in zip(first, told, begun, strict=True)])
        return accepted

    def _commit_greedy(
        self, logits: Tensor, drafts: Sequence[Draft], first: Sequence[int], going: Sequence[int]
    ) -> list[int]:
        """Without processors the likeliest tokens of all places are known at once."""
        accepted = [0] * len(self.rows)
        width = max(len(drafts[number].tokens) for number in going)
        padded = [[*drafts[number].tokens, *[-1] * (width - len(drafts[number].tokens))] for number in going]
        places = torch.tensor([[first[number] + place for place in range(width + 1)] for number in going])
        # places behind a shorter draft are not looked at
        best = logits.argmax(-1)[going].gather(1, places.clamp(max=logits.shape[1] - 1).to(logits.device))
        found = accept_greedy(best, torch.tensor(padded, dtype=torch.long, device=logits.device))
        for number, tokens, right in zip(going, found.tokens.tolist(), found.accepted.tolist(), strict=True):
            for place, token in enumerate(tokens[: right + 1]):
                raw = logits[number, first[number] + place]
                self._commit(self.rows[number], token, raw, raw)
                accepted[number] += place < right
                if self.rows[number].ended:
                    break
        return accepted

    def _commit_chosen(
        self, logits: Tensor, drafts: Sequence[Draft], first: Sequence[int], going: Sequence[int]
    ) -> list[int]:
        """Place by place: processors see the tokens that are committed before."""
        accepted = [0] * len(self.rows)
        for place in range(logits.shape[1]):
            if not going:
                break
            here = logits[going, [first[number] + place for number in going]]
            texts = [row.tokens for row in self.rows]
            scores = self.chooser.scores(texts, going, here, self.chooser.processors)
            tokens = self.chooser.choose(scores, [drafts[number] for number in going], place)
            right = []
            for number, token, score, raw in zip(going, tokens, scores, here, strict=True):
                self._commit(self.rows[number], token, score, raw)
                if place < len(drafts[number].tokens) and token == drafts[number].tokens[place]:
                    accepted[number] += 1
                    right.append(number)
            going = [number for number in right if not self.rows[number].ended]
        return accepted

    def _commit(self, row: Row, token: int, score: Tensor, logits: Tensor) -> None:
        """Add a certain token to a row; ``score`` and ``logits`` ``[V]`` are those that it was chosen from."""
        row.commit(token)
        if self.record:
            row.scores.append(score[None])
            row.logits.append(logits[None])
        row.ended = self.ending.ended(row)
        if self.put is not None:
            self.put(torch.tensor([token]))

    def _forget(self, counts: Sequence[int | None]) -> None:
        """Keep the first ``counts`` tokens of every row that were read; a row that ended before, or while others go on, needs
        none of them."""
        if not self.reader.unkept:
            # the prompt was read
            return
        if not all(row.ended for row in self.rows):
            counts = [None if row.ended else count for row, count in zip(self.rows, counts, strict=True)]
        for row, kept in zip(self.rows, self.reader.keep(counts), strict=True):
            row.pending = row.pending[kept:]


def _check(config: Any) -> None:
    """Raise for calls of ``generate`` that cannot have drafts."""
    if (mode := config.get_generation_mode(None).value) not in ("greedy_search", "sample"):
        raise UnsupportedError(
            f"Drafts are verified by greedy search and by sampling, and this call asks for {mode.replace('_', ' ')}; leave it "
            "out (num_beams=1), or pass mmaccel=False."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise UnsupportedError(f"With drafts {name}=True is not offered; leave it out, or pass mmaccel=False.")
    if config.use_cache is False:
        raise UnsupportedError("Drafts need a KV cache, and use_cache=False makes none; leave out use_cache=False.")


def _result(rows: Sequence[Row], reader: Reader, config: Any, ids: Tensor) -> Any:
    """What ``generate`` returns: rows padded behind their ends, scores and logits with zeros."""
    longest = max(len(row.tokens) for row in rows)
    pad = config._pad_token_tensor
    filler = 0 if pad is None else int(pad)
    sequences = torch.tensor([row.tokens + [filler] * (longest - len(row.tokens)) for row in rows], device=ids.device)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    steps = range(longest - rows[0].prompt)

    def padded(of_rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        zeros = torch.zeros_like(of_rows[0][0])
        return tuple(torch.cat([one[step] if step < len(one) else zeros for one in of_rows]) for step in steps)

    scores = padded([row.scores for row in rows]) if config.output_scores else None
    logits = padded([row.logits for row in rows]) if config.output_logits else None
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **cache_argument(reader.cache))
