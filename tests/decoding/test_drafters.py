"""Drafters propose what their papers say, from an index that grows with the row; beside short programs that index nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from mmaccel.decoding.automaton import Answers, SuffixAutomaton
from mmaccel.decoding.drafters import DEFAULT, DRAFTERS, get_drafter
from mmaccel.decoding.suffix_decoding import CountedSuffixes, SuffixDecoding
from mmaccel.decoding.token_recycling import TokenRecycling
from mmaccel.decoding.tree import depths
from mmaccel.errors import MmaccelError

#: those that copy; others are told what is likely
NAMES = sorted(name for name, kind in DRAFTERS.items() if not kind.successors)


def sequence(seed: int, size: int = 120, kinds: int = 6) -> list[int]:
    """Random tokens, in which stretches are repeated."""
    dice, tokens = random.Random(seed), list[int]()
    while len(tokens) < size:
        start = dice.randrange(len(tokens) + 1)
        tokens += tokens[start : start + dice.randrange(9)] if dice.random() < 0.5 else [dice.randrange(kinds)]
    return tokens[:size]


def before(tokens: Sequence[int], n: int) -> int | None:
    """The place after the first occurrence of the last ``n`` tokens that is not at the end."""
    tail = list(tokens[len(tokens) - n :])
    return next((i + n for i in range(len(tokens) - n) if list(tokens[i : i + n]) == tail), None)


def promptlookup(tokens: list[int], most: int) -> list[int]:
    found = [place for n in (3, 2, 1) if len(tokens) > n and (place := before(tokens, n)) is not None]
    return tokens[found[0] : found[0] + most] if found else []


def copyspec(tokens: list[int], most: int) -> list[int]:
    place = before(tokens, 5) if len(tokens) > 5 else None
    return [] if place is None else tokens[place : place + most]


def samdecoding(tokens: list[int], most: int) -> list[int]:
    """All suffixes that occur before, longest first: one that is followed by more than is asked for, else the last place."""
    stored = tokens[:-1]
    places = [place for n in range(len(tokens) - 1, 0, -1) if (place := before(tokens, n)) is not None]
    if before(tokens, 5) is None:
        return []
    place = next((place for place in places if len(stored) - place > most), places[-1])
    return stored[place : place + most]


class Tree:
    """Nested nodes of a suffix tree: a count, and children with the most frequent first."""

    def __init__(self) -> None:
        self.count = 0
        self.children: list[tuple[int, Tree]] = []

    def child(self, token: int) -> Tree | None:
        return next((child for other, child in self.children if other == token), None)

    def rise(self, token: int) -> Tree:
        """Count ``token`` once more, in the order that the authors' program has."""
        child = self.child(token)
        if child is None:
            self.children.append((token, child := Tree()))
            child.count = 1
            return child
        place = next(i for i, (other, _) in enumerate(self.children) if other == token)
        first = place == 0 or self.children[place - 1][1].count > child.count
        self.children.pop(place)
        child.count += 1
        counts = [other.count for _, other in self.children]
        place = sum(count > child.count for count in counts) if first else sum(count >= child.count for count in counts)
        self.children.insert(place, (token, child))
        return child


def tree_of(sequences: Sequence[Sequence[int]], depth: int) -> Tree:
    root = Tree()
    for tokens in sequences:
        active: list[Tree] = []
        for token in tokens:
            active = [node.rise(token) for node in [*active, root][-depth:]]
    return root


def behind(root: Tree, tokens: Sequence[int]) -> Tree | None:
    """The node that ``tokens`` lead to; None where they were never seen."""
    node: Tree | None = root
    for token in tokens:
        node = node.child(token) if node is not None else None
    return node


def frequent(root: Tree, context: Sequence[int], most: int, factor: float) -> tuple[list[int], np.float32, int]:
    """In float32 as the authors' program: sums that are equal but for rounding are not equal there."""
    best: tuple[list[int], np.float32, int] = ([], np.float32(0), 0)
    for matched in range(1, len(context)):
        if (node := behind(root, context[len(context) - matched :])) is None:
            break
        tokens, score, chance = list[int](), np.float32(0), np.float32(1)
        while len(tokens) < min(most, int(matched * factor)) and node.children:
            token, child = node.children[0]
            chance *= np.float32(child.count / node.count)
            if chance < np.float32(0.1):
                break
            node, score = child, score + chance
            tokens.append(token)
        if score >= best[1]:
            best = tokens, score, matched
    return best


def suffixdecoding(tokens: list[int], most: int) -> list[int]:
    return frequent(tree_of([tokens], 64), tokens, most, 1.0)[0]


@pytest.mark.parametrize("most", [1, 4, 9])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_a_program_that_indexes_nothing(name: str, most: int) -> None:
    reference = globals()[name]
    drafted = 0
    for seed in range(3):
        tokens, drafter = sequence(seed, 80), DRAFTERS[name]()
        # the prompt at once, then a few tokens a block
        end = 20
        while end <= len(tokens):
            draft = drafter.draft(tokens[:end], most)
            assert draft == reference(tokens[:end], most), (seed, end)
            drafted += len(draft)
            end += 1 + end % 4
    assert drafted > 8


@pytest.mark.parametrize("depth", [2, 3, 5, 12, 40])
def test_counts_and_ranks_are_those_of_a_suffix_tree(depth: int) -> None:
    """Several sequences, also such that begin alike; contexts from within, from between, and new ones."""
    for seed in range(12):
        sequences = [sequence(seed + 100 * i, 60, 4) for i in range(3)]
        sequences.append(sequences[0][:30] + sequences[1][:10])
        suffixes = CountedSuffixes(depth)
        for tokens in sequences:
            suffixes.begin()
            for token in tokens:
                suffixes.extend(token)
        root, dice = tree_of(sequences, depth), random.Random(seed)
        for _ in range(60):
            tokens = dice.choice(sequences)
            start = dice.randrange(len(tokens) - 1)
            context = [dice.randrange(4)] + tokens[start : start + dice.randrange(1, 12)]
            factor = dice.choice((0.5, 1.0, 3.0))
            made = suffixes.continued(*suffixes.match(context[1:][-depth:]), 8, factor, 0.0, float(np.float32(0.1)))
            drafted, score, matched = frequent(root, context, 8, factor)
            assert (made.tokens, made.matched, made.score) == (drafted, matched, score)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_drafted_is_empty(name: str) -> None:
    drafter = DRAFTERS[name]()
    assert drafter.draft([], 8) == drafter.draft([3], 8) == drafter.draft([3, 5], 8) == []
    tokens = [3, 5, *range(10, 20), *range(10, 17)]
    assert drafter.draft(tokens, 0) == []
    assert drafter.draft(tokens, 2) == [17, 18]


@pytest.mark.parametrize("name", [name for name in NAMES if DRAFTERS[name].store() is not None])
def test_earlier_answers_are_copied_from(name: str) -> None:
    kind, store = DRAFTERS[name], DRAFTERS[name].store()
    assert store is not None
    answer = list(range(40, 60))
    store.remember(answer)
    store.remember([7, 8, 9])
    tokens = [1, 2, 3, *answer[:12]]
    assert kind().draft(tokens, 5) == []
    assert kind(earlier=store).draft(tokens, 5) == answer[12:17]  # type: ignore[call-arg]
    # nothing from behind the end of an answer
    assert kind(earlier=store).draft([1, 2, 3, *answer[:18]], 5) == answer[18:]  # type: ignore[call-arg]
    # the row itself comes first where it is as good
    store.remember([*answer[:12], 70, 71, 72])
    mine = [*tokens, 90, 91, 92, *tokens]
    assert kind(earlier=store).draft(mine, 3) == [90, 91, 92]  # type: ignore[call-arg]


def test_places_in_answers_are_those_that_a_new_drafter_finds() -> None:
    """Also where answers come, and go, while a row is written; texts that are longer and shorter than the depth."""
    drafted = 0
    for seed in range(12):
        dice, text = random.Random(seed), sequence(seed + 500, 90, 3)
        store = Answers(lambda: CountedSuffixes(8), most=160)
        kept, end = SuffixDecoding(earlier=store, depth=8), 1
        while end < len(text):
            if dice.random() < 0.3:
                start = dice.randrange(len(text) - 20)
                store.remember(text[start : start + dice.randrange(20)] + sequence(end, 10, 3))
            new = SuffixDecoding(earlier=store, depth=8)
            branched, most = dice.random() < 0.5, dice.randrange(1, 9)
            one, other = ((x.tree if branched else x.draft)(text[:end], most) for x in (kept, new))
            assert one == other
            drafted += len(one)
            end += dice.randrange(1, 6)
    assert drafted > 300


def test_recycled_tokens_follow_what_was_likeliest_last() -> None:
    store = TokenRecycling.store()
    drafter = TokenRecycling(earlier=store)
    assert drafter.draft([5], 4) == [] and drafter.tree([5], 80) == ([], [])
    drafter.learn([5, 6, 5], [[1, 2], [5, 7], [6, 9]])
    # a later call goes on, and nothing follows a token that was never read
    later = TokenRecycling(earlier=store)
    assert later.draft([8, 5], 4) == [6, 5, 6, 5]
    assert later.draft([9], 4) == []
    tokens, parents = later.tree([8, 5], 80)
    assert tokens[:5] == [6, 9, 5, 7, 6] and parents[:5] == [-1, -1, 0, 0, 2]
    assert max(depths(parents)) + 1 == TokenRecycling.longest
    small = later.tree([8, 5], 10)
    assert small == (tokens[:4], parents[:4])


def test_trees_of_suffixes_are_the_likeliest_paths() -> None:
    """Beside a program that tries all paths."""
    grown = 0
    for seed in range(6):
        tokens = sequence(seed, 60, 4)
        suffixes, root = CountedSuffixes(12), tree_of([tokens], 12)
        suffixes.begin()
        for token in tokens:
            suffixes.extend(token)
        for end in range(5, 60, 3):
            context = tokens[end - 4 : end]
            best = suffixes.branched(*suffixes.match(context[1:]), 8, 2.0, 0.0, float(np.float32(0.1)))
            scores = []
            for matched in range(1, len(context)):
                if (node := behind(root, context[len(context) - matched :])) is None:
                    break
                found = sorted(chances(node, np.float32(1)), reverse=True)[: min(8, 2 * matched)]
                scores.append((sum(found), matched, found))
            score, matched, found = max(scores)
            assert best.score == pytest.approx(float(score), abs=1e-5) and len(best.parents) == len(best.tokens)
            assert best.probabilities == pytest.approx([float(one) for one in found], abs=1e-6)
            grown += best.parents != list(range(-1, len(best.tokens) - 1))
    assert grown > 20


def chances(node: Tree, chance: np.float32) -> list[np.float32]:
    """The probabilities of all paths after a node, down to 0.1."""
    found = []
    for _, child in node.children:
        after = np.float32(chance * np.float32(child.count / node.count))
        if after >= np.float32(0.1):
            found += [after, *chances(child, after)]
    return found


def test_a_store_drops_the_oldest_answers() -> None:
    store = Answers(SuffixAutomaton, most=100)
    for first in range(0, 1000, 10):
        store.remember(range(first, first + 10))
        assert sum(len(one.text) for one in store.automata) <= 100 and len(store.automata) <= 2
    known = [
        first for first in range(0, 1000, 10) if any(one.match([first, first + 1])[1] == 2 for one in store.automata)
    ]
    assert known == list(range(known[0], 1000, 10)) and 4 <= len(known) <= 10
    # of an answer that is longer than half of it, the end
    store.remember(range(5000, 5200))
    assert store.automata[0].match([5198, 5199])[1] == 2 and store.automata[0].match([5100])[1] == 0


def test_the_default_is_a_drafter_and_unknown_names_are_refused() -> None:
    assert get_drafter(DEFAULT) is DRAFTERS["suffixdecoding"]
    with pytest.raises(
        MmaccelError,
        match=r"^There is no drafter 'eagle'; choose one of 'copyspec', .*'suffixdecoding', 'tokenrecycling'\.$",
    ):
        get_drafter("eagle")
    with pytest.raises(MmaccelError, match=r"^`ngram` of promptlookup must be at least 1, got 0\.$"):
        DRAFTERS["promptlookup"](ngram=0)  # type: ignore[call-arg]
