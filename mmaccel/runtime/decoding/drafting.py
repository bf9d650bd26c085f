"""Drafts of one call: which source is asked, for how many tokens, and the figures that tell whether they paid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ...core.figures import tokens_a_verification
from ...core.stats import Stats
from ...decoding.base import Drafter
from ...errors import first_line
from .length import (
    LEAST,
    LONGEST_PAUSE,
    MEMORY,
    PAUSE,
    PRIOR,
    TRIAL,
    Acceptance,
    Costs,
    Price,
    best_length,
    clock_of,
    gain_of_tree,
)
from .reader import UNFORGETTING, Reader
from .rows import Chooser, Draft, Row

#: the longest draft of a block
LONGEST = 16
#: tokens of a draft that is made only to see whether it would have been right
WATCHED = 4
#: the most blocks until the next such draft, where drafts were wrong again and again
LONGEST_LOOK_AWAY = 4


class Source(Protocol):
    """Proposes tokens for all rows of a call."""

    name: str
    #: whether drafts cost next to nothing, so that they may be made to see whether they would have been right
    free: bool
    #: whether it reads the prompt into a cache of its own, which costs time
    own_cache: bool
    #: of a source of trees the most tokens of one, and of a path in it; 0 for one of chains
    nodes: int
    longest: int
    #: how many of the likeliest tokens behind those that the model reads :meth:`learn` is told
    successors: int

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """Called once before the first draft; ``chooser`` chooses tokens as the model that verifies does."""

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """At most ``most[i]`` tokens that may follow row ``i``; none for 0. Between two calls tokens are only added to rows."""

    def learn(self, read: Sequence[Sequence[int]], following: Sequence[Sequence[Sequence[int]]]) -> None:
        """Called with the tokens that the model has read of every row, and the likeliest behind each."""


class Copying:
    """Drafts that copy what followed the same tokens before.

    make : gives the drafter of a row. skipped : ids of prompts that drafters do not see, such as placeholders of pictures.
    """

    free, own_cache, nodes, longest = True, False, 0, 0

    def __init__(
        self, name: str, make: Callable[[], Drafter], skipped: frozenset[int] = frozenset(), successors: int = 0
    ) -> None:
        self.name, self.make, self.skipped, self.successors = name, make, skipped, successors
        self.drafters: list[Drafter] = []
        #: of every row what drafters see of it, and how many of its tokens that are
        self.texts: list[list[int]] = []
        self.taken: list[int] = []

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`Source`."""
        self.drafters = [self.make() for _ in rows]
        self.texts = [[token for token in row.tokens[: row.prompt] if token not in self.skipped] for row in rows]
        self.taken = [row.prompt for row in rows]
        for drafter, text in zip(self.drafters, self.texts, strict=True):
            # reads the prompt
            drafter.draft(text, 0)

    def text(self, number: int, row: Row) -> list[int]:
        """The tokens of a row that its drafter sees; a list that grows."""
        text = self.texts[number]
        text += row.tokens[self.taken[number] :]
        self.taken[number] = len(row.tokens)
        return text

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`Source`."""
        return [
            Draft(self.drafters[number].draft(self.text(number, row), count)) if count else Draft()
            for number, (row, count) in enumerate(zip(rows, most, strict=True))
        ]

    def learn(self, read: Sequence[Sequence[int]], following: Sequence[Sequence[Sequence[int]]]) -> None:
        """See :class:`Source`."""
        for drafter, tokens, likeliest in zip(self.drafters, read, following, strict=True):
            drafter.learn(tokens, likeliest)


class CopyingTrees(Copying):
    """Drafts that are trees, by the drafters of ``chains``, which are of kind ``kind``."""

    def __init__(self, chains: Copying, kind: type[Drafter]) -> None:
        super().__init__(f"{chains.name}-tree", chains.make, chains.skipped)
        self.chains, self.nodes, self.longest = chains, kind.nodes, kind.longest

    def prepare(self, rows: Sequence[Row], chooser: Chooser) -> None:
        """See :class:`Source`."""
        if not self.chains.drafters:
            self.chains.prepare(rows, chooser)
        self.drafters = self.chains.drafters

    def draft(self, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """See :class:`Source`."""
        drafts = [Draft()] * len(rows)
        for number, (row, count) in enumerate(zip(rows, most, strict=True)):
            if count:
                tree = self.drafters[number].tree(self.chains.text(number, row), count)
                drafts[number] = Draft(tree.tokens, parents=tree.parents)
        return drafts


@dataclass
class SourceFigures:
    """Figures of a source in one call: tokens of all rows, seconds of drafting, and those of reading the prompt before."""

    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    prepare_seconds: float = 0.0


@dataclass
class Drafting:
    """Drafts of one call.

    Every row asks the source that promises most tokens a second, for as many as pay by the acceptance and the costs measured
    so far (:mod:`.length`); the next source is asked where it proposes nothing. A source that raises is dropped, with a note.

    sources : made behind the prompt, by :meth:`begin`.
    costs, prices : seconds of forwards, and of each source, which later calls of as many rows begin with.
    known : acceptance by source, which later calls begin with.
    usual : tokens of an answer, by earlier calls; None before the first.
    forbidden : ids that no draft may hold, such as placeholders of pictures.
    notes : what the numbers do not show, in words.
    """

    make: Callable[[Reader], Sequence[Source]]
    forbidden: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    figures: dict[str, SourceFigures] = field(default_factory=dict)
    blocks: int = 0
    row_blocks: int = 0
    tokens: int = 0
    longest: int = 0
    verify_seconds: float = 0.0
    costs: Costs = field(default_factory=Costs)
    prices: dict[str, Price] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    usual: float | None = None
    rates: list[dict[str, Acceptance]] = field(default_factory=list)
    #: sources that were asked for the forward that comes, and those that have read the prompt
    asked: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    #: drafts that are not verified, by row and source: where each begins, and the draft
    watched: dict[tuple[int, str], tuple[int, Draft]] = field(default_factory=dict)
    #: by row and source: how many blocks are left until the next such draft, and how many there were
    away: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    #: of every row and token of its answer, who drafted it; empty for the model's own
    drafted_by: list[list[str]] = field(default_factory=list)

    def begin(self, rows: Sequence[Row], reader: Reader, chooser: Chooser) -> None:
        """Make the sources, of which those that are free read the prompt; called when the model has read it."""
        self.chooser, self.reader = chooser, reader
        if not reader.can_forget:
            self.notes.append(f"drafts are off: {UNFORGETTING}; decoded one token at a time")
            return
        try:
            self.sources = list(self.make(reader))
        except Exception as error:  # whatever a draft does, the answer is the model's
            self.notes.append(f"drafts are off: {first_line(error)}")
        self.figures = {source.name: SourceFigures() for source in self.sources}
        for source in self.sources:
            self.prices.setdefault(source.name, Price())
        known = {source.name: self.known.get(source.name, PRIOR) for source in self.sources}
        self.rates = [{name: Acceptance.of(rate) for name, rate in known.items()} for _ in rows]
        for source in [one for one in self.sources if one.free]:
            self._ask(source, rows, [0] * len(rows))

    def draft(self, rows: Sequence[Row], longest: int) -> list[Draft]:
        """Drafts of all rows; ``longest`` is the most tokens that a row may have."""
        drafts = [Draft()] * len(rows)
        self.asked = set()
        self.row_blocks += sum(not row.ended for row in rows)
        # the last token of an answer is the model's own
        room = [0 if row.ended else min(LONGEST, longest - len(row.tokens) - 1) for row in rows]
        found = {source.name: self._best(source, rows, room) for source in self.sources}
        promised = {name: max((gain for _, gain in best), default=1.0) for name, best in found.items()}
        for source in sorted(self.sources, key=lambda one: -promised[one.name]):
            if source.nodes and not self.reader.trees:
                continue
            price = self.prices[source.name]
            if price.rests:
                price.rests -= 1
                continue
            said = max(len(row.tokens) - row.prompt for row in rows)
            reads = source.own_cache and source.name not in self.prepared
            if reads and not price.worth_a_prompt(promised[source.name], said, self.usual, self.costs):
                note = f"drafts of {source.name} waited: answers have been too short to pay for reading the prompt"
                self.notes += [] if note in self.notes else [note]
                continue
            most = [
                # one that does not pay, and whose pause is over, is asked for a trial
                0 if draft.tokens or space <= 0 else length or (0 if source.free else min(TRIAL, space))
                for draft, space, (length, _) in zip(drafts, room, found[source.name], strict=True)
            ]
            if any(most):
                for number, draft in enumerate(self._ask(source, rows, most)):
                    if draft.tokens and not drafts[number].tokens:
                        drafts[number] = draft
            if source.free:
                self._watch(source, rows, [not count and space > 0 for count, space in zip(most, room, strict=True)])
        return drafts

    def _watch(self, source: Source, rows: Sequence[Row], wanted: Sequence[bool]) -> None:
        """Draft for rows that verify nothing of a source that is free, to see later whether it would have been right."""
        missing = [0] * len(rows)
        for number, want in enumerate(wanted):
            if want and (key := (number, source.name)) not in self.watched:
                left, before = self.away.get(key, (0, 0))
                if left:
                    self.away[key] = left - 1, before
                else:
                    missing[number] = source.nodes or WATCHED
        if any(missing):
            for number, draft in enumerate(self._ask(source, rows, missing)):
                if draft.tokens:
                    self.watched[number, source.name] = len(rows[number].tokens), draft

    def _judge(self, rows: Sequence[Row]) -> None:
        """Note which watched drafts were right, as soon as the answer is long enough to tell."""
        for (number, name), (at, draft) in list(self.watched.items()):
            said = rows[number].tokens[at:]
            right = draft.path(said)
            more = bool(draft.following(right[-1] if right else -1))
            if len(right) < len(said) or not more:
                self.rates[number][name].add(len(right), more)
                _, before = self.away.get((number, name), (0, 0))
                away = 0 if right else min(before + 1, LONGEST_LOOK_AWAY)
                self.away[number, name] = away, away
                del self.watched[number, name]

    def note(
        self, rows: Sequence[Row], drafts: Sequence[Draft], paths: Sequence[list[int]], length: int, seconds: float
    ) -> None:
        """Note which tokens of ``drafts`` were accepted, in a forward over ``length`` tokens of every row that has cost
        ``seconds``."""
        self.blocks += 1
        self.costs.add(length, seconds)
        for number, (draft, path) in enumerate(zip(drafts, paths, strict=True)):
            if draft.tokens:
                more = bool(draft.following(path[-1] if path else -1))
                self.rates[number][draft.source].add(len(path), more)
                figures = self.figures[draft.source]
                figures.drafted += len(draft.tokens)
                figures.accepted += len(path)
        self._judge(rows)
        for source in self.sources:
            if source.name in self.asked and not source.free:
                self._rest(source.name)

    def end(self, rows: Sequence[Row]) -> None:
        """Close the figures of the call."""
        self.tokens = sum(len(row.answer) for row in rows)
        self.longest = max(len(row.answer) for row in rows)
        self.drafted_by = [row.sources for row in rows]
        for rates in self.rates:
            for name, one in rates.items():
                if one.measured:
                    self.known[name] = MEMORY * self.known.get(name, one.rate) + (1 - MEMORY) * one.rate
        for source in [one for one in self.sources if self.blocks and not one.nodes]:
            if not self._pays(source.name):
                self.notes.append(f"drafts of {source.name} rest: by what was measured they do not pay")
                price = self.prices[source.name]
                if source.own_cache and source.name in self.prepared:
                    price.rest_from_prompts(self.costs)
        if any(one.drafted for one in self.figures.values()) and (why := self.reader.together):
            self.notes.append(f"tokens that some rows accept and others do not are read again: {why}")

    def learn(self, read: Sequence[Sequence[int]], logits: Tensor) -> None:
        """Show sources that learn from it what the model has read of every row, and its ``logits [B, n, V]`` behind that."""
        for source in [one for one in self.sources if one.successors and one.name in self.prepared]:
            likeliest = logits.topk(min(source.successors, logits.shape[-1])).indices.tolist()
            try:
                source.learn(read, [one[: len(tokens)] for tokens, one in zip(read, likeliest, strict=True)])
            except Exception as error:  # whatever a draft does, the answer is the model's
                self._drop(source, error)

    def _drop(self, source: Source, error: Exception) -> None:
        self.sources.remove(source)
        self.notes.append(f"drafts of {source.name} are off: {first_line(error)}")

    # --- what pays ------------------------------------------------------------------------------------------------
    def _best(self, source: Source, rows: Sequence[Row], room: Sequence[int]) -> list[tuple[int, float]]:
        """Of every row: how many tokens of a source pay, of at most ``room``, and by which factor; of a tree all or none."""
        price, best = self._seconds(source), list[tuple[int, float]]()
        for number, (row, space) in enumerate(zip(rows, room, strict=True)):
            rate = self.rates[number][source.name].rate
            if row.ended or space <= 0:
                best.append((0, 1.0))
            elif not source.nodes:
                best.append(best_length(rate, price, self.costs, space))
            else:
                gain = gain_of_tree(rate, price, self.costs, source.nodes, source.longest)
                best.append((source.nodes, gain) if gain > LEAST else (0, 1.0))
        return best

    def _seconds(self, source: Source) -> float:
        """Seconds a drafted token; before it was measured, a tenth of a forward."""
        price = self.prices[source.name].seconds
        return 0.1 * self.costs.seconds(1) if price is None else price

    def _pays(self, name: str) -> bool:
        """Whether drafts of a source pay for some row."""
        seconds = self.prices[name].seconds or 0.0
        return any(best_length(rate[name].rate, seconds, self.costs, LONGEST)[0] for rate in self.rates)

    def _rest(self, name: str) -> None:
        """Let a source rest where it pays for no row."""
        price = self.prices[name]
        if self._pays(name):
            price.pause = PAUSE
        else:
            price.rests, price.pause = price.pause, min(2 * price.pause, LONGEST_PAUSE)

    def _ask(self, source: Source, rows: Sequence[Row], most: Sequence[int]) -> list[Draft]:
        """The drafts of a source, cut before the first forbidden token."""
        figures, clock = self.figures[source.name], clock_of(self.reader.ids.device.type)
        try:
            if source.name not in self.prepared:
                self.prepared.add(source.name)
                # reading a prompt is no price of a drafted token
                begin, cost = time.perf_counter(), clock()
                source.prepare(rows, self.chooser)
                figures.prepare_seconds = time.perf_counter() - begin
                self.prices[source.name].prompt = clock() - cost
            begin, cost = time.perf_counter(), clock()
            drafts = source.draft(rows, most)
        except Exception as error:  # whatever a draft does, the answer is the model's
            self._drop(source, error)
            return [Draft()] * len(rows)
        drafts = [
            draft.cut(count).without(self.forbidden)._replace(source=source.name)
            for draft, count in zip(drafts, most, strict=True)
        ]
        seconds = clock() - cost
        figures.seconds += time.perf_counter() - begin
        self.asked.add(source.name)
        if longest := max(len(draft.tokens) for draft in drafts):
            self.prices[source.name].add(longest, seconds)
        return drafts

    def report(self, stats: Stats) -> None:
        """Add figures and notes to the statistics of the call."""
        stats.notes += self.notes
        sums = {
            "tokens": self.tokens,
            "verifications": self.blocks,
            "row_verifications": self.row_blocks,
            # the first token comes with the prompt
            "forwards_saved": self.longest - 1 - self.blocks,
            "drafted": sum(one.drafted for one in self.figures.values()),
            "accepted": sum(one.accepted for one in self.figures.values()),
        }
        stats.drafting = {
            **sums,
            "tokens_a_verification": tokens_a_verification(sums),
            "verify_seconds": self.verify_seconds,
            "drafted_by": self.drafted_by,
            "sources": {name: vars(one).copy() for name, one in self.figures.items()},
        }
