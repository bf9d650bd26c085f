"""Training of a selector: steps, early stopping on watched questions, and a state that can be resumed."""

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
#: bytes of the digest at the beginning of a state file
_SEAL = hashlib.sha256().digest_size
#: decay of the running mean of the weights
_KEPT = 0.99
#: steps between two evaluations of the watched questions; evaluations without improvement, and the share of all steps without
#: it, after which the training ends: a network may improve late, when the learning rate falls
_LOOK, _PATIENCE, _SHARE = 100, 20, 0.5
#: evaluations that are averaged, since the best of many single ones may be luck
_RECENT = 5
#: steepness of the logarithm as which signals are learned
_STEEP = 100.0
#: scales of scores against similarity that are tried, and factors of the scores in the end
_SCALES, _MENDED = (1.5, 3.0, 4.5), (0.7, 1.0, 1.4, 2.0)
#: batches of watched questions that decide about these
_ASKED = 4
#: budgets of trials in turn, as multiples of ``retain``, since residuals depend on the budget
_BUDGETS = (1.0, 1.0, 2.5)
#: trials a step, an even number, and the deviation of their scores
_TRIES, _MOVED = 8, 0.5
#: KL below which an answer counts as kept, and the least deviation of its logarithm
_SAME, _NOTHING = 0.03, 0.2


@dataclass
class State:
    """The state of a training, for resuming it.

    recent : losses on the watched questions in the last evaluations. least : their smallest means. since : the step of the best
        network. log : a line every evaluation.
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
    """Pictures and clips with the number of tokens to keep (``count [N]``), and the worth of tokens without the network
    (``worth [N, n]``)."""

    shown: TokenBatch
    count: Tensor
    worth: Tensor

    @staticmethod
    def of(example: Example, retain: float) -> Choice:
        """The choice of a share of the tokens, at least one of each picture."""
        shown, count = example.shown(), (example.valid.sum(1) * retain + 0.5).floor().long().clamp(min=1)
        return Choice(shown, count, worths(shown, count))

    def by(self, scores: Tensor) -> Tensor:
        """``[N, n]`` bool: the tokens that are kept by scores."""
        return picked(self.worth, scores, self.shown.valid, self.count)

    def outputs(self, network: torch.nn.Module) -> tuple[Tensor, Tensor | None]:
        """A network's scores, and its residuals by how many tokens are dropped."""
        scores, residual = network(self.shown, self.worth)
        return scores, None if residual is None else residual * dropped(self.shown.valid, self.count)


class Learner(ABC):
    """A selector in training with the examples in the files ``paths``, evaluated on ``watched`` ones. ``state`` is the file
    of its state; an existing one is resumed."""

    #: learning rate until half of the steps are done
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
            # names contain digests of content and settings
            "examples": [path.name for path in self.paths],
        }
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=self.rate, weight_decay=0.01)
        #: the step at which an earlier run stopped
        self.taken_over = 0
        if state.exists():
            self._resume()
            self.taken_over = self.state.step
        else:
            self.signal, self.scale = self._initial()

    # --- how far it has come --------------------------------------------------------------------------------
    def _resume(self) -> None:
        remedy = "delete it, or give another folder with --out (out=)"
        try:
            held = self.path.read_bytes()
            if hashlib.sha256(held[_SEAL:]).digest() != held[:_SEAL]:
                raise ValueError("another digest")
            saved = torch.load(io.BytesIO(held[_SEAL:]), map_location=self.device, weights_only=True)
            before = dict(saved["settings"])
        except Exception as error:
            raise MmaccelError(f"{str(self.path)!r} is damaged, or no state of a training; {remedy}.") from error
        check_settings(self.path, before, self.settings, remedy)
        self.state, (self.signal, self.scale) = State(**saved["state"]), saved["target"]
        self.network.load_state_dict(saved["network"])
        self.mean.load_state_dict(saved["mean"])
        self.best = saved["best"]
        self.optimiser.load_state_dict(saved["optimiser"])

    def _save(self) -> None:
        kept = {
            "settings": self.settings,
            "state": vars(self.state),
            "target": (self.signal, self.scale),
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
        """Train until the watched questions no longer improve, or steps or time are over."""
        ends = None if minutes is None else time.monotonic() + 60 * minutes
        before, began = self.state.seconds, time.monotonic()
        running: list[float] = []
        while not self.state.ended and (ends is None or time.monotonic() < ends):
            if self.state.step % _LOOK == 0 or self.state.step >= self.steps:
                self.state.seconds = before + time.monotonic() - began
                self._evaluate(running)
                running = []
                self._save()
                if self.state.ended:
                    break
            running.append(self._step())
            self.state.step += 1
            tell("learning", self.state.step, self.steps)
        self.network.load_state_dict(self.best)
        self.mean.module.load_state_dict(self.best)
        self._scale_scores()

    def _step(self) -> float:
        step = self.state.step
        order = random.Random(step // len(self.paths)).sample(range(len(self.paths)), len(self.paths))
        example = Example.load(self.paths[order[step % len(order)]]).to(self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * min(1.0, 0.05 + 2 * (1 - step / self.steps))
        slope, loss = self._loss(example)
        self.optimiser.zero_grad()
        slope.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        self.optimiser.step()
        self.mean.update_parameters(self.network)
        return loss

    @abstractmethod
    def _loss(self, example: Example) -> tuple[Tensor, float]:
        """The objective of a batch, for its gradient, and the loss."""

    @abstractmethod
    def _initial(self) -> tuple[int, float]:
        """The number of the signal that is learned, and its scale."""

    @abstractmethod
    def _watched(self) -> Tensor:
        """``[losses]`` on the watched questions, by which networks are compared."""

    # --- looking --------------------------------------------------------------------------------------------
    def asked(self, most: int | None = None) -> Iterator[tuple[Example, Choice]]:
        """Batches of watched questions, one by one on the device."""
        for example in self.watched[:most]:
            example = example.to(self.device)
            yield example, Choice.of(example, self.retain)

    def answered(self, example: Example, kept: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[B]`` each: KL of the answers with only the tokens ``kept [N, n]``, to which ``residual [N, n, D]`` is added, and
        whether the answers differ."""
        states = self.frozen.states(example, example.narrowed(kept, residual))
        full, mine = self.frozen.logits(example.states), self.frozen.logits(states)
        steps = torch.arange(full.shape[1], device=full.device)
        differ = (full.argmax(-1) != mine.argmax(-1)) & (steps < example.lengths[:, None])
        return divergence(list(full.unbind(1)), list(mine.unbind(1)), example.lengths), differ.any(1)

    @torch.no_grad()
    def lost(self, outputs: Callable[[Example, Choice], tuple[Tensor, Tensor | None]]) -> tuple[float, float]:
        """Mean KL of some watched questions with given scores and residuals, and the share of answers that differ."""
        results = []
        for example, choice in self.asked(_ASKED):
            scores, residual = outputs(example, choice)
            results.append(self.answered(example, choice.by(scores), residual))
        kl, other = (torch.cat(part).double().mean() for part in zip(*results, strict=True))
        return float(kl), float(other)

    def _evaluate(self, running: Sequence[float]) -> None:
        """Evaluate and log; note the network unless an earlier one was better, and end the training if that lasts long."""
        state = self.state
        with torch.no_grad():
            watched = self._watched().tolist()
            kl, other = self.lost(lambda _, choice: choice.outputs(self.mean))
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
        # within a standard error of the best the latest network counts
        worse = losses - torch.tensor(state.least)
        if worse.mean() <= worse.std(correction=0) / math.sqrt(len(worse)):
            self.best, state.since = copy.deepcopy(self.mean.module.state_dict()), state.step
        patience = max(_PATIENCE * _LOOK, _SHARE * self.steps)
        state.ended = state.step >= self.steps or state.step - state.since >= patience

    def _scale_scores(self) -> None:
        """Multiply scores by the factor that keeps most watched answers, since uncertain scores are too small."""

        def lost(factor: float) -> float:
            def scaled(_: Example, choice: Choice) -> tuple[Tensor, Tensor | None]:
                scores, residual = choice.outputs(self.mean)
                return factor * scores, residual

            return self.lost(scaled)[0]

        with torch.no_grad():
            factor = min(_MENDED, key=lost)
            self.network.score.weight.mul_(factor)


class SignalLearner(Learner):
    """Learns a signal of every token that was computed when the question was read."""

    def _loss(self, example: Example) -> tuple[Tensor, float]:
        choice = Choice.of(example, self.retain)
        loss = self._missed(example, choice.outputs(self.network)[0])
        return loss, float(loss.detach())

    def _missed(self, example: Example, scores: Tensor) -> Tensor:
        """Mean square error of scores over all tokens."""
        missed = (scores - self._wanted(example, self.signal, self.scale)).square()
        return missed[example.valid].mean()

    def _wanted(self, example: Example, signal: int, scale: float) -> Tensor:
        """Target scores ``[N, n]`` from 0 to ``scale``: the logarithm of a signal's share of its maximum."""
        values = example.signals[:, signal]
        share = values / values.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return scale * (1 + _STEEP * share).log() / math.log(1 + _STEEP)

    def _initial(self) -> tuple[int, float]:
        """The signal and the scale whose exact values keep most watched answers."""

        def best(cases: Iterable[tuple[int, float]]) -> tuple[int, float]:
            return min(cases, key=lambda case: self.lost(lambda example, _: (self._wanted(example, *case), None))[0])

        signals, middle = self.watched[0].signals.shape[1], _SCALES[len(_SCALES) // 2]
        signal = best((signal, middle) for signal in range(signals))[0] if signals > 1 else 0
        return best((signal, scale) for scale in _SCALES)

    def _watched(self) -> Tensor:
        return torch.stack([self._missed(example, choice.outputs(self.mean)[0]) for example, choice in self.asked()])


class TrialLearner(Learner):
    """Learns from the answers.

    Every picture is reduced several times by scores with random noise, in mirrored pairs. How much better or worse than the
    mean the answer was is credited to the tokens that were kept only then: an evolution strategy in the space of scores
    (arXiv 1703.03864), with the choice of tokens as it is in use. Residuals are learned by the gradient of one of these
    answers.
    """

    rate = 2e-3

    def _loss(self, example: Example) -> tuple[Tensor, float]:
        budget = self.retain * _BUDGETS[self.state.step % len(_BUDGETS)]
        choice = Choice.of(example, budget if budget < 1 else self.retain)
        scores, residual = choice.outputs(self.network)
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
                    "No gradient goes through the language model, which residuals need; give --select-only (residual=False), "
                    "or a model whose weights are not quantised."
                )
            slope = slope + added
        return slope, float(grades.mean())

    def _initial(self) -> tuple[int, float]:
        return 0, 1.0

    def _watched(self) -> Tensor:
        kl = []
        for example, choice in self.asked():
            scores, residual = choice.outputs(self.mean)
            kl.append(self.answered(example, choice.by(scores), residual)[0])
        return _graded(torch.cat(kl))


def _graded(kl: Tensor) -> Tensor:
    """The loss of an answer: the logarithm of its KL, cut off where it is small."""
    return (kl + _SAME).log()
