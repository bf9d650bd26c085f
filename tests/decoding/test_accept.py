"""Drafts change no answer: greedy text stays, sampled text has the distribution that it has without drafts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmaccel.decoding.accept import accept_branch, accept_greedy, accept_sampled, random_numbers

VOCABULARY, ROWS = 5, 40_000


def test_greedy_takes_the_longest_path() -> None:
    best = [4, 5, 6, 7]
    for tokens, right in (([4, 5, 6], 3), ([4, 9, 6], 1), ([9, 5, 6], 0), ([4], 1), ([], 0)):
        assert accept_greedy(best, tokens, range(-1, len(tokens) - 1)) == list(range(right))
    # the first token may be 3 or 4, and behind 4 come 6 or 5
    tree = [3, 4, 6, 5, 8], [-1, -1, 1, 1, 3]
    assert accept_greedy([4, 0, 5, 0, 8, 0], *tree) == [1, 3, 4]
    assert accept_greedy([4, 0, 7, 0, 8, 0], *tree) == [1]
    assert accept_greedy([9, 0, 5, 0, 8, 0], *tree) == []


def test_one_of_several_is_accepted_as_often_as_the_model_draws_it() -> None:
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.0, 0.5, 0.15, 0.25])
    counts = torch.zeros(5)
    for numbers in torch.rand(4000, 3, dtype=torch.float64).tolist():
        found, left = accept_branch(p, [2, 1, 0], numbers)
        token = int(left.multinomial(1)) if found is None else [2, 1, 0][found]
        assert found is not None or token in (3, 4)
        counts[token] += 1
    assert unlikely(counts, 4000 * p) > 1e-3
    sure = torch.tensor([0.0, 1 - 2.0**-24])
    number, left = accept_branch(sure, [1], [1 - 2.0**-53])
    assert number is None and torch.equal(left, sure)


class Chain:
    """A small language model and a drafter: the next token depends on the last one. They disagree, and forbid some tokens."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.first, self.draft_first, self.then, self.draft_then = (
            torch.rand(*shape, generator=generator).pow(3).clamp(min=0.01)
            for shape in ((VOCABULARY,), (VOCABULARY,), (VOCABULARY, VOCABULARY), (VOCABULARY, VOCABULARY))
        )
        self.first[1] = self.draft_first[2] = 0.0
        self.then[:, 3] = 0.0
        for one in (self.first, self.draft_first, self.then, self.draft_then):
            one /= one.sum(-1, keepdim=True)

    def target(self, drafts: Tensor) -> Tensor:
        after = self.then[drafts.clamp(min=0)]
        return torch.cat([self.first.expand(len(drafts), 1, -1), after], 1)

    def drafted(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        first = self.draft_first.expand(len(lengths), -1)
        one = first.multinomial(1)
        then = self.draft_then[one[:, 0]]
        drafts = torch.cat([one, then.multinomial(1)], 1)
        return drafts.masked_fill(torch.arange(2) >= lengths[:, None], -1), torch.stack([first, then], 1)

    def pairs(self, tokens: Tensor) -> Tensor:
        """The first two tokens of every row; where a block emits one, the model draws the second."""
        second = self.then[tokens[:, 0]].multinomial(1)[:, 0]
        return torch.stack([tokens[:, 0], torch.where(tokens[:, 1] < 0, second, tokens[:, 1])], 1)


def unlikely(counts: Tensor, expected: Tensor) -> float:
    """The probability of counts at least as far from what is expected, by the chi-square test."""
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    counts, expected = counts[expected > 0].double(), expected[expected > 0].double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2))


def chances(model: Chain, pairs: Tensor) -> list[float]:
    """Of the tokens at both positions and of the pairs."""
    joint = model.first[:, None] * model.then
    counts = torch.bincount(pairs[:, 0] * VOCABULARY + pairs[:, 1], minlength=VOCABULARY**2).view(joint.shape)
    return [
        unlikely(counts.sum(1), ROWS * joint.sum(1)),
        unlikely(counts.sum(0), ROWS * joint.sum(0)),
        unlikely(counts.flatten(), ROWS * joint.flatten()),
    ]


Change = Callable[[dict[str, Tensor]], None]


def emitted(model: Chain, chosen: bool, change: Change = lambda given: None) -> Tensor:
    """Pairs of :data:`ROWS` rows with 0 to 2 drafts, drawn or (``chosen``) always the most probable one."""
    lengths = torch.arange(ROWS) % 3
    drafts, q = model.drafted(lengths)
    if chosen:
        best = model.draft_first.argmax()
        fixed = torch.stack([best, model.draft_then[best].argmax()]).expand(ROWS, 2)
        drafts = torch.where(drafts < 0, -1, fixed)
    uniform, exponential = random_numbers(drafts, VOCABULARY)
    given = {"target": model.target(drafts), "drafts": drafts, "uniform": uniform, "exponential": exponential}
    if not chosen:
        given["draft_probabilities"] = q
    change(given)
    return model.pairs(accept_sampled(**given).tokens)


@pytest.mark.parametrize("chosen", [False, True])
def test_samples_have_the_distribution_of_the_model(chosen: bool) -> None:
    torch.manual_seed(0)
    model = Chain()
    assert min(chances(model, emitted(model, chosen))) > 1e-3


def other_drafter(given: dict[str, Tensor]) -> None:
    q = given["draft_probabilities"].pow(0.7)
    given["draft_probabilities"] = q / q.sum(-1, keepdim=True)


def eager(given: dict[str, Tensor]) -> None:
    given["uniform"] = given["uniform"].pow(1.3)


def related(given: dict[str, Tensor]) -> None:
    given["exponential"] = given["exponential"] * (1 + 0.5 * torch.arange(VOCABULARY))


def cold(given: dict[str, Tensor]) -> None:
    p = given["target"].pow(1.15)
    given["target"] = p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("chosen", "change"),
    [
        (False, other_drafter),
        (False, eager),
        (True, eager),
        (False, related),
        (True, related),
        (False, cold),
        (True, cold),
    ],
)
def test_the_test_notices_a_wrong_rule(chosen: bool, change: Change) -> None:
    torch.manual_seed(0)
    model = Chain()
    assert min(chances(model, emitted(model, chosen, change))) < 1e-6


def test_a_drafted_distribution_is_accepted_as_often_as_can_be() -> None:
    """The probability of acceptance is the overlap of the two distributions."""
    torch.manual_seed(0)
    model = Chain()
    drafts, q = model.drafted(torch.full((ROWS,), 1))
    count = accept_sampled(model.target(drafts), drafts, *random_numbers(drafts, VOCABULARY), q).accepted
    overlap = float(torch.minimum(model.first, model.draft_first).sum())
    assert float((count == 1).double().mean()) == pytest.approx(overlap, abs=0.01)


def test_where_nothing_is_left_the_model_draws() -> None:
    """Rounding may leave p a little below q everywhere, and a draft may be all that is possible."""
    p, q = torch.tensor([[[0.25, 0.75]] * 2]) * (1 - 1e-5), torch.tensor([[[0.25, 0.75]]])
    exponential = torch.tensor([[1.0, 0.1]])
    last = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    tokens, count = accept_sampled(p, torch.tensor([[0]]), last, exponential, q)
    assert tokens.tolist() == [[1, -1]] and count.tolist() == [0]
    sure = torch.tensor([[[0.0, 1 - 2.0**-24]] * 2])
    tokens, count = accept_sampled(sure, torch.tensor([[1]]), last, exponential)
    assert tokens.tolist() == [[1, -1]] and count.tolist() == [0]


def test_impossible_tokens_are_never_accepted() -> None:
    target, none = torch.tensor([[[0.0, 1.0]] * 2]), torch.zeros(1, 1, dtype=torch.float64)
    for q in (None, torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.0, 1.0]]])):
        assert accept_sampled(target, torch.tensor([[0]]), none, torch.ones(1, 2), q).tokens.tolist() == [[1, -1]]
    # a draft that the drafter says it cannot draw
    flat, q = torch.full((1, 2, 2), 0.5), torch.tensor([[[0.0, 1.0]]])
    assert accept_sampled(flat, torch.tensor([[0]]), none, torch.ones(1, 2), q).accepted.tolist() == [0]
