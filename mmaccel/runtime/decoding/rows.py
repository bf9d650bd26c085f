"""The rows of a batch while they are decoded: what is committed, how the next token is chosen, when a row ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


class Chooser:
    """Chooses tokens from logits as ``generate`` does: greedily or by drawing, behind the same logits processors.

    A drawn token that equals the drafted one accepts it. This is the exact rule for drafts that have one candidate: it is
    accepted with the probability that the model gives it, and otherwise another token is drawn from the rest
    (Leviathan et al., 2211.17192).
    """

    def __init__(self, processors: Any, config: Any) -> None:
        self.processors, self.sample = processors, bool(config.do_sample)
        self.plain = not self.sample and not len(processors)

    def greedy(self, logits: Tensor) -> list[list[int]]:
        """The likeliest tokens of ``[B, n, V]``, for rows without processors."""
        chosen: list[list[int]] = logits.argmax(-1).tolist()
        return chosen

    def choose(self, rows: Sequence[Row], going: Sequence[int], logits: Tensor) -> tuple[list[int], Tensor]:
        """The next tokens of the rows ``going`` by their ``logits [len(going), V]``, and the logits they were chosen from.

        Processors may know how the prompt of every row is padded, so that each is shown all rows; but rows of a batch have
        different lengths here: those of one length are shown at a time, and copies of one of them in place of the others.
        """
        tokens, scores = [0] * len(going), torch.empty_like(logits)
        lengths: dict[int, list[int]] = {}
        for place, number in enumerate(going):
            lengths.setdefault(len(rows[number].tokens), []).append(place)
        for places in lengths.values():
            shown = [places[0]] * len(rows)
            for place in places:
                shown[going[place]] = place
            ids = torch.tensor([rows[going[place]].tokens for place in shown], device=logits.device)
            mine = self.processors(ids, logits[shown])[[going[place] for place in places]]
            chosen = torch.multinomial(mine.softmax(-1), 1)[:, 0] if self.sample else mine.argmax(-1)
            scores[places] = mine
            for place, token in zip(places, chosen.tolist(), strict=True):
                tokens[place] = token
        return tokens, scores


class Ending:
    """Tells when a row has ended, token by token. Criteria of ``generate`` see one row at a time, and no scores."""

    def __init__(self, criteria: Any, config: Any, device: torch.device) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        known = (EosTokenCriteria, MaxLengthCriteria)
        self.others: list[Callable[..., Any]] = [one for one in criteria if type(one) not in known]
        self.ends: set[int] = set()
        self.longest = min((one.max_length for one in criteria if type(one) is MaxLengthCriteria), default=1 << 60)
        for one in criteria:
            if type(one) is EosTokenCriteria:
                self.ends.update(torch.as_tensor(one.eos_token_id).flatten().tolist())
        self.device = device

    def ended(self, row: Row) -> bool:
        """Whether the newest token of a row is its last."""
        if row.tokens[-1] in self.ends or len(row.tokens) >= self.longest:
            return True
        return bool(self.others) and any(bool(one(row.tensor(self.device), None)) for one in self.others)


@dataclass
class Row:
    """One row of a batch.

    tokens : ids of prompt (padding included) and answer. prompt : how many of them are the prompt's.
    pending : the newest tokens, which the model has not read yet.
    scores, logits : of every token of the answer, where the caller wants them.
    """

    tokens: list[int]
    prompt: int
    pending: list[int] = field(default_factory=list)
    ended: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def tensor(self, device: torch.device) -> Tensor:
        """Ids ``[1, L]``."""
        return torch.tensor([self.tokens], device=device)

    @property
    def answer(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.prompt :]

    def commit(self, token: int) -> None:
        """Add a token that is certain."""
        self.tokens.append(token)
        self.pending.append(token)
