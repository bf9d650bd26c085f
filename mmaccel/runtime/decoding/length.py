"""Lengths of drafts, by the acceptance that was measured and by what drafting and verifying have cost.

A draft of ``n`` tokens, each accepted with probability ``a`` if all before it were, yields
``E(n) = (1 - a ** (n + 1)) / (1 - a)`` tokens, and costs ``n`` draft steps and one forward over ``n + 1`` tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: figures of so many blocks ago count half
HALF_LIFE = 8.0
DECAY = 0.5 ** (1 / HALF_LIFE)
#: acceptance before anything was measured, and the number of tested tokens that this guess weighs
PRIOR, WEIGHT = 0.5, 2.0
#: how much of what was known of a source stays known behind another answer
MEMORY = 0.75
#: share of a forward over one token that each further token adds, before anything was measured
SLOPE = 0.03
#: a source that does not pay is tried again after so many blocks, and after twice as many each time that it still does not, but
#: at most after LONGEST_PAUSE; it is tried with TRIAL tokens
PAUSE, LONGEST_PAUSE, TRIAL = 8, 256, 2
#: share of the time that a source which does not pay may take for reading prompts
SPENT = 0.01
#: drafts that promise less are not verified: what is promised is a guess
LEAST = 1.05


def clock_of(device: str) -> Callable[[], float]:
    """The clock by which costs on a kind of ``device`` are compared. On a CPU it has only what this thread was at work, since a
    forward that another program has interrupted would look dear, and what it is compared with cheap."""
    # on Windows it advances by a sixtieth of a second
    fine = device == "cpu" and sys.platform != "win32"
    return time.thread_time if fine else time.perf_counter


def expected(acceptance: float, length: int) -> float:
    """Tokens that a block with a draft of ``length`` tokens yields on average."""
    if acceptance >= 1.0:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass
class Acceptance:
    """Share of drafted tokens that were accepted, of those whose predecessors were; one for every row and source."""

    right: float = PRIOR * WEIGHT
    tested: float = WEIGHT
    #: whether anything was noted
    measured: bool = False

    @classmethod
    def of(cls, rate: float) -> Acceptance:
        """A guess."""
        return cls(rate * WEIGHT, WEIGHT)

    @property
    def rate(self) -> float:
        """Between 0 and 1."""
        return self.right / self.tested

    def add(self, accepted: int, rejected: bool) -> None:
        """Note a block: how many tokens were accepted, and whether what followed was rejected; what lies behind that was not
        tested."""
        self.right = self.right * DECAY + accepted
        self.tested = self.tested * DECAY + accepted + rejected
        self.measured = True


@dataclass
class Costs:
    """Seconds of forwards: of those over one token, and of longer ones as a straight line over the number of their tokens.

    They stand apart because a forward over several tokens may run other kernels, and cost twice as much as one over a single
    token, however few they are. All longer ones are padded to ``block`` tokens, if that is not 0.
    """

    single: list[float] = field(default_factory=lambda: [0.0] * 2)
    longer: list[float] = field(default_factory=lambda: [0.0] * 5)
    block: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Note a forward over ``tokens`` tokens of every row."""
        x = tokens - 1.0
        if x:
            self.longer = _added(self.longer, (1.0, x, seconds, x * x, x * seconds))
        else:
            self.single = _added(self.single, (1.0, seconds))

    def seconds(self, tokens: int) -> float:
        """Seconds of a forward over ``tokens`` tokens; 1 for a single one before anything was measured."""
        count, x, y, xx, xy = self.longer
        tokens = max(tokens, self.block) if tokens > 1 else tokens
        if tokens == 1 or not count:
            one = (
                self.single[1] / self.single[0]
                if self.single[0]
                else y / count / (1 + SLOPE * x / count)
                if count
                else 1.0
            )
            return one * (1 + SLOPE * (tokens - 1))
        prior = SLOPE * y / count
        slope = max(0.0, (xy - x * y / count + 4 * prior) / (xx - x * x / count + 4))
        return max((y - slope * x) / count + slope * (tokens - 1), self.seconds(1))


def _added(sums: list[float], new: tuple[float, ...]) -> list[float]:
    return [old * DECAY + value for old, value in zip(sums, new, strict=True)]


@dataclass
class Price:
    """Cost of a source: seconds a drafted token, and of reading a prompt; ``None`` before they were measured."""

    seconds: float | None = None
    prompt: float | None = None
    #: blocks that are left until the source is tried again, and how long the next pause is
    rests: int = 0
    pause: int = PAUSE

    def add(self, tokens: int, seconds: float) -> None:
        """Note a draft."""
        new = seconds / max(1, tokens)
        self.seconds = new if self.seconds is None else DECAY * self.seconds + (1 - DECAY) * new

    def worth_a_prompt(self, gain: float, said: int, usual: float | None, costs: Costs) -> bool:
        """Whether what a source that promises a ``gain`` may still save is worth reading the prompt, behind ``said`` tokens: of
        an answer as long as the ``usual`` one, and of a longer one as many tokens again. A trial always is."""
        if self.prompt is None or usual is None or gain <= 1:
            return True
        return max(usual - said, said) * costs.seconds(1) * (1 - 1 / gain) > self.prompt

    def rest_from_prompts(self, costs: Costs) -> None:
        """Rest until another prompt may be read for a trial, see :data:`SPENT`."""
        self.rests = max(self.rests, int((self.prompt or 0.0) / (SPENT * costs.seconds(1))))


def best_length(acceptance: float, price: float, costs: Costs, most: int) -> tuple[int, float]:
    """The draft length of at most ``most`` tokens that yields most tokens a second, and how many times as many as none does.

    ``price`` : seconds a drafted token.
    """
    one, found, gain, before = costs.seconds(1), 0, 1.0, 0.0
    for length in range(1, most + 1):
        ratio = expected(acceptance, length) * one / (length * price + costs.seconds(length + 1))
        if ratio > max(gain, LEAST):
            found, gain = length, ratio
        elif ratio < before:
            # tokens grow ever less with the length, and costs evenly
            break
        before = ratio
    return found, gain


def gain_of_tree(acceptance: float, price: float, costs: Costs, nodes: int, longest: int) -> float:
    """Factor by which trees of ``nodes`` tokens and paths of ``longest`` speed up decoding, where one of the tokens that follow
    an accepted one is accepted with probability ``acceptance``."""
    return expected(acceptance, longest) * costs.seconds(1) / (nodes * price + costs.seconds(nodes + 1))
