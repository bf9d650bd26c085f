"""How a selector learns: step by step, looking at questions that it is not trained on, and going on where it was."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...core.files import write_whole
from ...errors import MmaccelError
from ...method import TokenBatch
from ...method.selector import Selector, Shape
from ...pruning.learned import dropped, picked, worths
from ..evaluate import divergence
from ..resume import check_settings
from .examples import Example, Frozen

_CLIP = 1.0
#: bytes of the digest that the file of a state begins with
_SEAL = hashlib.sha256().digest_size
#: share of the running mean of the weights that every step leaves: single steps are noise, what they have in common is not
_KEPT = 0.99
#: steps between two looks at the watched questions; after how many looks that all were worse it ends, and at least this share
#: of all steps: at the full rate a network may gain nothing for long and gain much once the rate falls
_LOOK, _PATIENCE, _SHARE = 100, 20, 0.5
#: looks whose mean says how good a network is: of many single looks at few questions the best one was lucky
_RECENT = 5
#: how far above the largest signal of a picture half the range of what is learned begins: signals are learned as logarithms
_STEEP = 100.0
#: how much the token that most speaks for may outweigh likeness, and by what it is mended in the end
_SCALES, _MENDED = (1.5, 3.0, 4.5), (0.7, 1.0, 1.4, 2.0)
#: batches of watched questions that the language model reads once more to find these
_ASKED = 4
#: budgets that tries take in turn, as multiples of the one that is asked for: what is to be added depends on them
_BUDGETS = (1.0, 1.0, 2.5)
#: of a step that tries: picks of every picture, an even number, and how far scores are moved for each
_TRIES, _MOVED = 8, 0.5
#: KL below which an answer is as good as kept, and the spread of its logarithm below which trying told nothing
_SAME, _NOTHING = 0.03, 0.2


@dataclass
class State:
    """How far a training has come: everything that a run which goes on needs.

    recent : the losses on the watched questions in the last looks. least : their means over as many looks, where they were
        smallest. since : the step of the network that is kept. log : a line every look.
    """

    step: int = 0
    recent: list[list[float]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    since: int = 0
    seconds: float = 0.0
    ended: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """Pictures and clips that are chosen from: what is seen of them, how many tokens stay (``count [N]``), and what these are
    worth without the network (``worth [N, n]``)."""

    shown: TokenBatch
    count: Tensor
    worth: Tensor

    @staticmethod
    def of(example: Example, retain: float) -> Choice:
        """With a share of the tokens, at least one of each."""
        shown, count = example.shown(), (example.valid.sum(1) * retain + 0.5).floor().long().clamp(min=1)
        return Choice(shown, count, worths(shown, count))

    def by(self, scores: Tensor) -> Tensor:
        """``[N, n]`` bool: what stays by scores."""
        return picked(self.worth, scores, self.shown.valid, self.count)

    def told(self, network: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
        """A network's scores, and its residuals by how many tokens are dropped."""
        scores, residual = network(self.shown, self.worth)
        return scores, None if residual is None else residual * dropped(self.shown.valid, self.count)


class Learner(ABC):
    """A selector in training; what it is to learn is a matter of :class:`SignalLearner` and :class:`TrialLearner`.

    paths : of the examples that are trained on. watched : those that are looked at.
    state : the file of its state; what it holds of the same training is gone on with.
    """

    #: of AdamW, until half of the steps are done
    rate: ClassVar[float] = 1e-3

    def __init__(
        self,
        frozen: Frozen,
        shape: Shape,
        paths: Sequence[Path],
        watched: Sequence[Example],
        retain: float,
        steps: int,
        state: Path,
    ) -> None:
        self.frozen, self.shape, self.paths, self.watched = frozen, shape, list(paths), list(watched)
        self.retain, self.steps, self.path = retain, steps, state
        self.device = frozen.model.device
        torch.manual_seed(0)
        self.network = Selector(shape).to(self.device)
        self.mean = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(_KEPT))
        self.best = copy.deepcopy(self.network.state_dict())
        self.state = State()
        self.settings = {
            "shape": vars(shape),
            "retain": retain,
            "steps": steps,
            "form of its state": [*vars(self.state)],
            # their names hold digests of their content, and of all that they depend on
            "examples": [path.name for path in self.paths],
        }
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=self.rate, weight_decay=0.01)
        #: the step at which an earlier run stopped
        self.taken_over = 0
        if state.exists():
            self._resume()
            self.taken_over = self.state.step
        else:
            self.signal, self.scale = self._found()

    # --- how far it has come --------------------------------------------------------------------------------
    def _resume(self) -> None:
        remedy = "delete it, or give another folder with --out (out=)"
        try:
            held = self.path.read_bytes()
            if hashlib.sha256(held[_SEAL:]).digest() != held[:_SEAL]:
                raise ValueError("another digest")
            found = torch.load(io.BytesIO(held[_SEAL:]), map_location=self.device, weights_only=True)
            before = dict(found["settings"])
        except Exception as error:
            raise MmaccelError(f"{str(self.path)!r} is damaged, or no state of a training; {remedy}.") from error
        check_settings(self.path, before, self.settings, remedy)
        self.state, (self.signal, self.scale) = State(**found["state"]), found["found"]
        self.network.load_state_dict(found["network"])
        self.mean.load_state_dict(found["mean"])
        self.best = found["best"]
        self.optimiser.load_state_dict(found["optimiser"])

    def _save(self) -> None:
        kept = {
            "settings": self.settings,
            "state": vars(self.state),
            "found": (self.signal, self.scale),
            "network": self.network.state_dict(),
            "mean": self.mean.state_dict(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
        }
        content = io.BytesIO()
        torch.save(kept, content)
        held = content.getvalue()
        write_whole(self.path, hashlib.sha256(held).digest() + held)

    # --- steps ----------------------------------------------------------------------------------------------
    def run(self, minutes: float | None, tell: Callable[[str, int, int], None]) -> None:
        """Train until the watched questions lose, or steps or time are at their end."""
        ends = None if minutes is None else time.monotonic() + 60 * minutes
        before, began = self.state.seconds, time.monotonic()
        running: list[float] = []
        while not self.state.ended and (ends is None or time.monotonic() < ends):
            if self.state.step % _LOOK == 0 or self.state.step >= self.steps:
                self.state.seconds = before + time.monotonic() - began
                self._look(running)
                running = []
                self._save()
                if self.state.ended:
                    break
            running.append(self._step())
            self.state.step += 1
            tell("learning", self.state.step, self.steps)
        self.network.load_state_dict(self.best)
        self.mean.module.load_state_dict(self.best)
        self._mend()

    def _step(self) -> float:
        """One batch; the loss."""
        step = self.state.step
        order = random.Random(step // len(self.paths)).sample(range(len(self.paths)), len(self.paths))
        example = Example.load(self.paths[order[step % len(order)]]).to(self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * min(1.0, 0.05 + 2 * (1 - step / self.steps))
        slope, loss = self._learned(example)
        self.optimiser.zero_grad()
        slope.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        self.optimiser.step()
        self.mean.update_parameters(self.network)
        return loss

    @abstractmethod
    def _learned(self, example: Example) -> tuple[Tensor, float]:
        """Of a batch that is trained on: what the network is to descend, and the loss."""

    @abstractmethod
    def _found(self) -> tuple[int, float]:
        """The signal that is learned, and its scale."""

    @abstractmethod
    def _watched(self) -> Tensor:
        """``[losses]`` on the watched questions, the same ones in every look, by which networks are compared."""

    # --- looking --------------------------------------------------------------------------------------------
    def asked(self, most: int | None = None) -> Iterator[tuple[Example, Choice]]:
        """Batches of watched questions, one by one on the device."""
        for example in self.watched[:most]:
            example = example.to(self.device)
            yield example, Choice.of(example, self.retain)

    def answered(self, example: Example, kept: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[B]`` each: KL of the answers with the tokens ``kept [N, n]`` alone, to which ``residual [N, n, D]`` is added, and
        whether they are other ones."""
        states = self.frozen.states(example, example.narrowed(kept, residual))
        full, mine = self.frozen.logits(example.states), self.frozen.logits(states)
        steps = torch.arange(full.shape[1], device=full.device)
        differ = (full.argmax(-1) != mine.argmax(-1)) & (steps < example.lengths[:, None])
        return divergence(list(full.unbind(1)), list(mine.unbind(1)), example.lengths), differ.any(1)

    @torch.no_grad()
    def lost(self, told: Callable[[Example, Choice], tuple[Tensor, Tensor | None]]) -> tuple[float, float]:
        """Mean KL of some watched questions by what is told of their tokens, scores and residuals, and the share of answers
        that are other ones."""
        found = []
        for example, choice in self.asked(_ASKED):
            scores, residual = told(example, choice)
            found.append(self.answered(example, choice.by(scores), residual))
        kl, other = (torch.cat(part).double().mean() for part in zip(*found, strict=True))
        return float(kl), float(other)

    def _look(self, running: Sequence[float]) -> None:
        """Note how well it does, keep it unless an earlier one was better, and end where that has long been so."""
        state = self.state
        with torch.no_grad():
            watched = self._watched().tolist()
            kl, other = self.lost(lambda _, choice: choice.told(self.mean))
        state.log.append(
            {
                "step": state.step,
                "seconds": round(state.seconds, 1),
                "loss": sum(running) / len(running) if running else None,
                "watched": sum(watched) / len(watched),
                "kl": kl,
                "kept": 1 - other,
            }
        )
        state.recent = [*state.recent, watched][-_RECENT:]
        losses = torch.tensor(state.recent).mean(0)
        if not state.least or losses.mean() < torch.tensor(state.least).mean():
            state.least = losses.tolist()
        # of those that few questions cannot tell apart, the one that learned longest: within a standard error of the difference
        worse = losses - torch.tensor(state.least)
        if worse.mean() <= worse.std(correction=0) / math.sqrt(len(worse)):
            self.best, state.since = copy.deepcopy(self.mean.module.state_dict()), state.step
        patience = max(_PATIENCE * _LOOK, _SHARE * self.steps)
        state.ended = state.step >= self.steps or state.step - state.since >= patience

    def _mend(self) -> None:
        """What cannot be told exactly is told too low: scores are multiplied by what keeps the watched answers best."""

        def lost(factor: float) -> float:
            def told(_: Example, choice: Choice) -> tuple[Tensor, Tensor | None]:
                scores, residual = choice.told(self.mean)
                return factor * scores, residual

            return self.lost(told)[0]

        with torch.no_grad():
            factor = min(_MENDED, key=lost)
            self.network.score.weight.mul_(factor)


class SignalLearner(Learner):
    """One that learns a signal of every token, which was noted when the question was read."""

    def _learned(self, example: Example) -> tuple[Tensor, float]:
        choice = Choice.of(example, self.retain)
        loss = self._missed(example, choice.told(self.network)[0])
        return loss, float(loss.detach())

    def _missed(self, example: Example, scores: Tensor) -> Tensor:
        """Mean square of what scores differ from what they are to be, over all tokens."""
        missed = (scores - self._wanted(example, self.signal, self.scale)).square()
        return missed[example.valid].mean()

    def _wanted(self, example: Example, signal: int, scale: float) -> Tensor:
        """``[N, n]``, what scores are to be: from 0 to ``scale``, by the logarithm of a signal's share of its largest."""
        found = example.signals[:, signal]
        share = found / found.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return scale * (1 + _STEEP * share).log() / math.log(1 + _STEEP)

    def _found(self) -> tuple[int, float]:
        """The signal, and the scale, that keep the answers to watched questions best where they are known exactly."""

        def best(cases: Iterable[tuple[int, float]]) -> tuple[int, float]:
            return min(cases, key=lambda case: self.lost(lambda example, _: (self._wanted(example, *case), None))[0])

        signals, middle = self.watched[0].signals.shape[1], _SCALES[len(_SCALES) // 2]
        signal = best((signal, middle) for signal in range(signals))[0] if signals > 1 else 0
        return best((signal, scale) for scale in _SCALES)

    def _watched(self) -> Tensor:
        return torch.stack([self._missed(example, choice.told(self.mean)[0]) for example, choice in self.asked()])


class TrialLearner(Learner):
    """One that learns from what becomes of the answers.

    Every picture is reduced a few times by scores that are moved at random, in pairs that are moved to opposite sides. How much
    better or worse than the mean of these the answer was kept is credited to the tokens that were picked then and not always:
    an evolution strategy in the space of scores with mirrored draws (arXiv 1703.03864), with the choice of tokens as it is in
    use. Residuals, which no choice stands before, are learned by the gradient of what one of these answers has lost, through
    the model.
    """

    rate = 2e-3

    def _learned(self, example: Example) -> tuple[Tensor, float]:
        budget = self.retain * _BUDGETS[self.state.step % len(_BUDGETS)]
        choice = Choice.of(example, budget if budget < 1 else self.retain)
        scores, residual = choice.told(self.network)
        draws = torch.Generator().manual_seed(self.state.step)
        kept, lost = [], []
        with torch.no_grad():
            for _ in range(_TRIES // 2):
                away = _MOVED * torch.randn(scores.shape, generator=draws).to(scores)
                for moved in (scores + away, scores - away):
                    kept.append(choice.by(moved))
                    lost.append(_graded(self.answered(example, kept[-1], residual)[0]))
        grades, picks = torch.stack(lost).to(scores), torch.stack(kept).to(scores)
        gain = (grades.mean(0) - grades) / (grades.std(0) + _NOTHING)
        credit = (gain[:, example.row, None] * (picks - picks.mean(0))).mean(0)
        slope = -(scores * credit)[example.valid].sum() / len(example.row)
        if residual is not None:
            with self.frozen.still():
                added = _graded(self.answered(example, kept[0], residual)[0]).mean()
            if not added.requires_grad:
                raise MmaccelError(
                    "No gradient goes through the language model, as what is added to tokens is learned by; give --select-only "
                    "(residual=False), or a model whose weights are not quantised."
                )
            slope = slope + added
        return slope, float(grades.mean())

    def _found(self) -> tuple[int, float]:
        return 0, 1.0

    def _watched(self) -> Tensor:
        found = []
        for example, choice in self.asked():
            scores, residual = choice.told(self.mean)
            found.append(self.answered(example, choice.by(scores), residual)[0])
        return _graded(torch.cat(found))


def _graded(kl: Tensor) -> Tensor:
    """What an answer has lost: the logarithm of its KL, of which the smallest differences say nothing."""
    return (kl + _SAME).log()
