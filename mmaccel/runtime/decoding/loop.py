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
from ..call.call import Call
from ..graphs.captured import BLOCK
from .drafting import Drafting
from .length import clock_of
from .reader import Reader
from .rows import Chooser, Draft, Ending, Row

#: of every row the numbers of its drafted tokens that were accepted
Paths = list[list[int]]
#: with recurrent states: the most tokens that may wait to be read again while drafts go on
PENDING = 8


@dataclass
class Decoder:
    """Decodes a prompt with drafts: the ``custom_generate`` of a call of ``generate``.

    call : the call of ``generate``.
    drafting : where drafts come from, how long they are, and the figures of the call.
    streamer : is given every committed token of a single row, ``[1]`` each.
    remember : is given the answers of all rows at the end.
    kept : whether the caller has given a cache, and goes on with it.
    """

    call: Call[Any]
    drafting: Drafting
    streamer: Any = None
    remember: Callable[[Sequence[Sequence[int]]], None] | None = None
    kept: bool = False

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
        kept = self.kept or bool(config.return_dict_in_generate)
        reader = Reader(model, input_ids, config, arguments, kept=kept)
        wanted = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        rows = [Row(ids, len(ids)) for ids in input_ids.tolist()]
        put = None if self.streamer is None else self.streamer.put
        step = Step(reader, chooser, ending, rows, put, bool(wanted), drafting.learn, _filler(config))
        logits, clock = reader.prefill(), clock_of(input_ids.device.type)
        if rows[0].prompt + 1 < ending.longest:
            # before anything waits for the device, which is still busy with the prompt
            drafting.begin(rows, reader, chooser)
        self._capture(reader)
        step.commit(logits[:, None], [Draft()] * len(rows))
        while not all(row.ended for row in rows):
            drafts = step.fitted(drafting.draft(rows, ending.longest))
            begin, cost = time.perf_counter(), clock()
            logits = step.read(drafts)
            if self.call.stats.uncaptured:
                reader.block = drafting.costs.block = 0
            paths = step.commit(logits, drafts)
            drafting.verify_seconds += time.perf_counter() - begin
            drafting.note(rows, drafts, paths, logits.shape[1], clock() - cost)
        drafting.end(rows)
        step.read_rest()
        reader.close_gaps(max(len(row.tokens) for row in rows) - 1)
        if self.streamer is not None:
            self.streamer.end()
        if self.remember is not None:
            self.remember([row.answer for row in rows])
        return _result(rows, reader, config, input_ids)

    def _capture(self, reader: Reader) -> None:
        """Capture steps where nothing but them writes to the cache."""
        sources, stats = self.drafting.sources, self.call.stats
        if all(source.free or source.own_cache for source in sources):
            self.call.inputs.block = BLOCK if sources else 1
            reader.capture(self.call.inputs.block)
        else:
            stats.uncaptured = "drafts are made over the cache that the model verifies with"
        self.drafting.costs.block = reader.block


@dataclass
class Step:
    """One block of the loop: the model reads the drafts of all rows, and every row commits what is accepted."""

    reader: Reader
    chooser: Chooser
    ending: Ending
    rows: Sequence[Row]
    put: Callable[[Tensor], None] | None
    record: bool
    learn: Callable[[Sequence[Sequence[int]], Tensor], None]
    filler: int

    def fitted(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Cut drafts to what a captured block has room for; and so that every row reads the same number of tokens, where layers
        have a recurrent state, which padding would change. A row with more pending tokens than others may read some of them;
        where many are pending nothing is drafted."""
        if block := self.reader.block:
            return [draft.cut(max(0, block - len(row.pending))) for row, draft in zip(self.rows, drafts, strict=True)]
        if not self.reader.recurrent:
            return drafts
        going = [number for number, row in enumerate(self.rows) if not row.ended]
        if max(len(self.rows[number].pending) for number in going) > PENDING:
            drafts = [Draft()] * len(self.rows)
        length = min(len(self.rows[number].pending) + len(drafts[number].tokens) for number in going)
        return [draft.cut(max(0, length - len(row.pending))) for row, draft in zip(self.rows, drafts, strict=True)]

    def read(self, drafts: Sequence[Draft]) -> Tensor:
        """Logits ``[B, n, V]`` behind the pending tokens and the drafts of every row; what lies behind them is padding, up to
        the longest row or to a captured block, but for recurrent states, where no more is read than the shortest row has. A row
        that has ended goes on with padding, as in plain decoding."""
        blocks = [
            [*row.pending, *(() if row.ended else draft.tokens)] for row, draft in zip(self.rows, drafts, strict=True)
        ]
        going = [len(block) for block, row in zip(blocks, self.rows, strict=True) if not row.ended]
        length = min(going) if self.reader.recurrent else max(going)
        length = max(length, self.reader.block) if length > 1 else 1
        blocks = [block[:length] for block in blocks]
        fillers = [self.filler if row.ended else block[-1] for row, block in zip(self.rows, blocks, strict=True)]
        tokens = torch.tensor(
            [[*block, *[one] * (length - len(block))] for block, one in zip(blocks, fillers, strict=True)]
        )
        parents = None
        if any(draft.parents for draft in drafts):
            parents = []
            for row, draft in zip(self.rows, drafts, strict=True):
                at = 0 if row.ended else len(row.pending)
                own = [*range(-1, at - 1), *(at + parent for parent in draft.before)]
                parents.append([*own, *range(len(own) - 1, length - 1)])
        logits = self.reader.read(tokens.to(self.reader.ids.device), parents)
        self.learn([[] if row.ended else block for block, row in zip(blocks, self.rows, strict=True)], logits)
        return logits

    def commit(self, logits: Tensor, drafts: Sequence[Draft]) -> Paths:
        """Commit the accepted tokens of every row and the one behind them, and forget the others; the numbers of the drafted
        tokens that were accepted."""
        first = [0 if row.ended else max(0, len(row.pending) - 1) for row in self.rows]
        before, begun = [len(row.tokens) for row in self.rows], [not row.ended for row in self.rows]
        # a row whose pending tokens were not all read commits nothing
        going = [number for number, row in enumerate(self.rows) if not row.ended and first[number] < logits.shape[1]]
        paths = (self._commit_greedy if self.chooser.plain else self._commit_chosen)(logits, drafts, first, going)
        told = [len(row.tokens) - length for row, length in zip(self.rows, before, strict=True)]
        right = [min(at + new, logits.shape[1]) for at, new in zip(first, told, strict=True)]
        if any(draft.parents for draft in drafts):
            places = [
                [*range(at + 1), *(at + 1 + node for node in path)] for at, path in zip(first, paths, strict=True)
            ]
            self.reader.move_up(places)
        self._forget([count if had else None for count, had in zip(right, begun, strict=True)])
        return paths

    def read_rest(self) -> None:
        """Read the pending tokens of a single row into the cache after the answer, where recurrent states went back."""
        (row, *others), reader = self.rows, self.reader
        if reader.recurrent and not others and len(row.pending) > 1:
            reader.read(torch.tensor([row.pending[:-1]], device=reader.ids.device))
            reader.keep([len(row.pending) - 1])

    def _commit_greedy(
        self, logits: Tensor, drafts: Sequence[Draft], first: Sequence[int], going: Sequence[int]
    ) -> Paths:
        """Without processors the likeliest tokens of all places are known at once."""
        paths: Paths = [[] for _ in self.rows]
        best = logits.argmax(-1).tolist()
        for number in going:
            draft, row, at = drafts[number], self.rows[number], first[number]
            path = accept_greedy(best[number][at:], draft.tokens, draft.before)
            for node, following in zip([-1, *path], [*path, None], strict=True):
                raw = logits[number, at + 1 + node]
                self._commit(row, best[number][at + 1 + node], raw, raw, "" if following is None else draft.source)
                if following is not None:
                    paths[number].append(following)
                if row.ended:
                    break
        return paths

    def _commit_chosen(
        self, logits: Tensor, drafts: Sequence[Draft], first: Sequence[int], going: Sequence[int]
    ) -> Paths:
        """Token by token: processors see those that are committed before."""
        paths: Paths = [[] for _ in self.rows]
        while going:
            nodes = [paths[number][-1] if paths[number] else -1 for number in going]
            here = logits[going, [first[number] + 1 + node for number, node in zip(going, nodes, strict=True)]]
            texts = [row.tensor(logits.device)[0] for row in self.rows]
            scores = self.chooser.scores(texts, going, here, self.chooser.processors)
            tokens = self.chooser.choose(scores, [drafts[number] for number in going], nodes)
            right = []
            for number, node, token, score, raw in zip(going, nodes, tokens, scores, here, strict=True):
                draft = drafts[number]
                found = [one for one in draft.following(node) if draft.tokens[one] == token]
                self._commit(self.rows[number], token, score, raw, draft.source if found else "")
                if found:
                    paths[number].append(found[0])
                    right.append(number)
            going = [number for number in right if not self.rows[number].ended]
        return paths

    def _commit(self, row: Row, token: int, score: Tensor, logits: Tensor, source: str) -> None:
        """Add a certain token to a row, drafted by ``source``; ``score`` and ``logits`` ``[V]`` are those that it was chosen
        from."""
        row.commit(token, source)
        if self.record:
            row.scores.append(score[None])
            row.logits.append(logits[None])
        row.ended = self.ending.ended(row)
        if self.put is not None:
            self.put(torch.tensor([token]))

    def _forget(self, counts: Sequence[int | None]) -> None:
        """Keep the first ``counts`` tokens of every row that were read; of a row that ended before (None) as many as of
        another."""
        if not self.reader.unkept:
            # the prompt was read
            return
        for row, kept in zip(self.rows, self.reader.keep(counts), strict=True):
            row.pending = row.pending[kept:]


def _check(config: Any) -> None:
    """Raise for calls of ``generate`` that cannot have drafts."""
    if (mode := config.get_generation_mode(None).value) not in ("greedy_search", "sample"):
        out = "give num_beams=1" if "beam" in mode else "leave it out"
        raise UnsupportedError(
            f"Drafts are verified by greedy search and by sampling, and this call asks for {mode.replace('_', ' ')}; {out}, or "
            "pass mmaccel=False."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise UnsupportedError(f"With drafts {name}=True is not offered; leave it out, or pass mmaccel=False.")
    if config.use_cache is False:
        raise UnsupportedError("Drafts need a KV cache, and use_cache=False makes none; leave out use_cache=False.")


def _filler(config: Any) -> int:
    """What stands behind a row that has ended."""
    return 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)


def _result(rows: Sequence[Row], reader: Reader, config: Any, ids: Tensor) -> Any:
    """What ``generate`` returns: rows padded behind their ends, scores and logits with zeros."""
    longest, filler = max(len(row.tokens) for row in rows), _filler(config)
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
