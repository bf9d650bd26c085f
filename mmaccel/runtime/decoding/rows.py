"""The rows of a batch while they are decoded: what is committed, how the next token is chosen, when a row ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...decoding.accept import accept_branch, accept_sampled, random_numbers


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that two texts begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


class Draft(NamedTuple):
    """Tokens that may follow a row.

    probabilities : of drawn tokens the distributions ``[V]`` float32 that they were drawn from; none for chosen tokens.
    parents : of a tree, see :class:`mmaccel.decoding.tree.Tree`; none for a chain.
    source : name of the source that made the draft.
    """

    tokens: Sequence[int] = ()
    probabilities: Sequence[Tensor] = ()
    parents: Sequence[int] = ()
    source: str = ""

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens."""
        return self._replace(
            tokens=self.tokens[:length], probabilities=self.probabilities[:length], parents=self.parents[:length]
        )

    def without(self, forbidden: Collection[int]) -> Draft:
        """The draft without ``forbidden`` tokens and what follows them."""
        if not any(token in forbidden for token in self.tokens):
            return self
        if not self.parents:
            return self.cut(next(place for place, token in enumerate(self.tokens) if token in forbidden))
        tokens, parents, number = list[int](), list[int](), {-1: -1}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent in number and token not in forbidden:
                number[node] = len(tokens)
                tokens.append(token)
                parents.append(number[parent])
        return self._replace(tokens=tokens, parents=parents)

    @property
    def before(self) -> Sequence[int]:
        """The number of the token before each, -1 for the newest of the row."""
        return self.parents or range(-1, len(self.tokens) - 1)

    def following(self, node: int) -> Sequence[int]:
        """The numbers of the tokens that follow one, or the newest of the row for -1."""
        if self.parents:
            return [number for number, parent in enumerate(self.parents) if parent == node]
        return (node + 1,) if node + 1 < len(self.tokens) else ()

    def path(self, text: Sequence[int]) -> list[int]:
        """The numbers of the tokens that ``text`` begins with."""
        found: list[int] = []
        for token in text:
            after = (one for one in self.following(found[-1] if found else -1) if self.tokens[one] == token)
            if (node := next(after, None)) is None:
                break
            found.append(node)
        return found


class Chooser:
    """Chooses tokens from logits as ``generate`` does: greedily or by drawing, behind the same logits processors."""

    def __init__(self, processors: Any, config: Any) -> None:
        from transformers import LogitsProcessorList
        from transformers.generation import logits_process

        self.processors, self.sample = processors, bool(config.do_sample)
        self.plain = not self.sample and not len(processors)
        known = tuple(getattr(logits_process, name) for name in _STATELESS)
        #: those that a draft may be shown to, which may turn out otherwise
        self.drafting = LogitsProcessorList(one for one in processors if type(one) in known)

    def scores(self, texts: Sequence[Tensor], going: Sequence[int], logits: Tensor, processors: Any) -> Tensor:
        """Logits of the rows ``going`` behind ``texts [L]`` (of all rows): ``logits [len(going), V]`` as ``processors`` leave
        them.

        Processors may know how the prompt of every row is padded, so that each is shown all rows; but rows of a batch have
        different lengths here: those of one length are shown at a time, and copies of one of them in place of the others.
        """
        scores = torch.empty_like(logits)
        lengths: dict[int, list[int]] = {}
        for place, number in enumerate(going):
            lengths.setdefault(len(texts[number]), []).append(place)
        for places in lengths.values():
            shown = [places[0]] * len(texts)
            for place in places:
                shown[going[place]] = place
            ids = torch.stack([texts[going[place]] for place in shown])
            scores[places] = processors(ids, logits[shown])[[going[place] for place in places]]
        return scores

    def propose(self, texts: Sequence[Sequence[int]], going: Sequence[int], logits: Tensor) -> Draft:
        """A drafted token of every row ``going``: the likeliest one, or where answers are sampled one that is drawn."""
        scores = logits
        if len(self.drafting):
            ids = [torch.tensor(text, device=logits.device) for text in texts]
            scores = self.scores(ids, going, logits, self.drafting)
        if not self.sample:
            return Draft(scores.argmax(-1).tolist())
        probabilities = scores.softmax(-1)
        return Draft(torch.multinomial(probabilities, 1)[:, 0].tolist(), list(probabilities))

    def choose(self, scores: Tensor, drafts: Sequence[Draft], nodes: Sequence[int]) -> list[int]:
        """The next tokens by ``scores [R, V]``, of rows whose newest token is number ``nodes[i]`` of their draft, -1 for the
        one before it: a drafted one where it is accepted."""
        if not self.sample:
            best: list[int] = scores.argmax(-1).tolist()
            return best
        after = [draft.following(node) for draft, node in zip(drafts, nodes, strict=True)]
        single = [draft.tokens[one[0]] if len(one) == 1 else -1 for draft, one in zip(drafts, after, strict=True)]
        drafted = torch.tensor(single, device=scores.device)[:, None]
        q = torch.zeros_like(scores).scatter_(1, drafted.clamp(min=0), 1.0)
        for row, (draft, one) in enumerate(zip(drafts, after, strict=True)):
            if one and one[0] < len(draft.probabilities):
                q[row] = draft.probabilities[one[0]].to(q)
        # what follows an accepted token is chosen at the next place
        target = scores.softmax(-1)[:, None].expand(-1, 2, -1)
        uniform, exponential = random_numbers(drafted, scores.shape[1])
        chosen: list[int] = accept_sampled(target, drafted, uniform, exponential, q[:, None]).tokens[:, 0].tolist()
        for row, (draft, several) in enumerate(zip(drafts, after, strict=True)):
            if len(several) > 1:
                tokens = [draft.tokens[one] for one in several]
                numbers: list[float] = torch.rand(len(tokens), dtype=torch.float64).tolist()
                found, left = accept_branch(target[row, 0], tokens, numbers)
                chosen[row] = int((left / exponential[row]).argmax()) if found is None else tokens[found]
        return chosen


#: processors that depend on tokens and scores alone
_STATELESS = (
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
    *("EpsilonLogitsWarper", "EtaLogitsWarper", "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "SuppressTokensLogitsProcessor"),
)


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
    sources : of every token of the answer who drafted it; empty for the model's own.
    scores, logits : of every token of the answer, where the caller wants them.
    """

    tokens: list[int]
    prompt: int
    pending: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    ended: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    _ids: Tensor | None = None

    def tensor(self, device: torch.device) -> Tensor:
        """Ids ``[1, L]``. Of a long prompt a tensor is made once."""
        known = 0 if self._ids is None else self._ids.shape[1]
        new = torch.tensor([self.tokens[known:]], dtype=torch.long, device=device)
        self._ids = new if self._ids is None else torch.cat([self._ids, new], 1)
        return self._ids

    @property
    def answer(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.prompt :]

    def commit(self, token: int, source: str = "") -> None:
        """Add a token that is certain, which ``source`` has drafted."""
        self.tokens.append(token)
        self.pending.append(token)
        self.sources.append(source)
