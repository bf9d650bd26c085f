"""One call: a frozen model and questions in, a selector out."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ...accelerate import is_accelerated
from ...accelerate.tuned import fingerprint
from ...errors import MmaccelError, UnsupportedError
from ...families import family_of
from ...method.selector import Belongs, Selector, Shape
from ...pruning.learned import Learned, picked
from ...recipe import RecipeLike
from ...recipe import recipe as find_recipe
from ..bench import origin
from ..evaluate import Question, divergence
from ..tune.judge import Judge, Measured
from . import report
from .examples import Example, Frozen, Target, cached
from .report import Distilled

#: fewer questions than this train nothing
FEWEST = 32
#: of the questions, what the training never sees: by the first it stops, by the second the final figure is measured
WATCHED, HELD_OUT = 0.12, 0.12
_MOST_WATCHED, _MOST_HELD_OUT = 160, 300
_RATE, _CLIP = 2e-3, 1.0
#: steps between two looks at the watched questions, and looks without a gain after which it ends
_LOOK, _PATIENCE = 100, 8
#: how far above the largest signal of a picture half the range of what is learned begins: signals are learned as logarithms
_STEEP = 100.0
#: how much the token that most speaks for may outweigh likeness, and by what it is mended in the end
_SCALES, _MENDED = (1.5, 3.0, 4.5), (0.7, 1.0, 1.4, 2.0)
#: batches of watched questions that the language model reads once more to find these
_ASKED = 4
#: budgets that are measured in the end, as multiples of the one that is asked for, and what they are compared with
_BUDGETS, RIVAL = (1.0, 2.5), "divprune"


@dataclass
class State:
    """How far a training has come: everything that a run which goes on needs.

    best, since : the smallest loss on the watched questions, and the step of it. log : a line every look.
    """

    step: int = 0
    best: float = math.inf
    since: int = 0
    seconds: float = 0.0
    ended: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)


def distil(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    *,
    out: str | Path = "selector",
    target: Target = "effect",
    question: bool = True,
    retain: float = 0.1,
    width: int | None = None,
    blocks: int = 2,
    steps: int = 3000,
    minutes: float | None = None,
    batch_size: int = 16,
    max_new_tokens: int = 32,
    complain: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Distilled:
    """Train a selector for the method ``learned`` on what a frozen model's own answers hang on; no labels are needed.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare. It is not changed.
    questions : of :func:`mmaccel.programs.evaluate.ask_samples` and the like. An eighth each is watched, to stop in time, and
        held out for the final figure, at most 160 and 300.
    out : the selector's folder, which is made. ``work`` inside it holds what the model read and the state of the training; a
        call with the same settings goes on from there. It may be deleted in the end.
    target : what the selector learns to tell of every token. ``effect``: how much the model's answer hangs on it, by one
        gradient of the model a question; ``attention``: what it is paid in the layer whose attention keeps the answers best,
        by one forward a question.
    question : whether the selector reads the question; without it a picture is reduced once for all questions.
    retain : the share of the tokens at which answers are looked at.
    width, blocks : of the network; by default by the model's width.
    steps, minutes : how many steps at most, a batch each, and how long; the training ends earlier where the watched
        questions no longer gain.
    batch_size, max_new_tokens, complain : as for :func:`mmaccel.programs.evaluate.evaluate`.
    progress : called with what is being done, how much of it is done, and how much there is.

    Raises
    ------
    MmaccelError
        If questions are too few or cannot be read, or the folder holds a training of another model or other settings.
    """
    out, tell = Path(out), progress or (lambda what, done, of: None)
    _check(model, questions, target, retain, steps, out)
    frozen = Frozen(model, processor, target)
    shape = _shape(int(frozen.text.config.hidden_size), width, blocks, question)
    training, watched, held_out = _split(questions)
    settings = {
        "model": fingerprint(model),
        "questions": hashlib.sha256("\n".join(q.name for q in questions).encode()).hexdigest()[:16],
        "batch size": batch_size,
        "longest answer": max_new_tokens,
        "target": target,
    }

    def examples(name: str, asked: Sequence[Question]) -> list[Path]:
        return cached(
            frozen,
            asked,
            out / "work" / name,
            settings,
            batch_size=batch_size,
            longest=max_new_tokens,
            complain=complain,
            progress=lambda done, of: tell(f"reading {name} questions", done, of),
        )

    seen = [Example.load(path) for path in examples("watched", watched)]
    learner = Learner(frozen, shape, examples("training", training), seen, retain, steps, out / "work" / "state.pt")
    learner.run(minutes, tell)
    return _finish(learner, processor, held_out, questions, out, batch_size, max_new_tokens, settings, tell)


class Learner:
    """A selector in training.

    Parameters
    ----------
    paths : of the examples that are trained on. watched : those that are looked at.
    state : the file of its state; what it holds of the same training is gone on with.
    """

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
        self.best = copy.deepcopy(self.network.state_dict())
        self.state = State()
        self.settings = {"shape": vars(shape), "retain": retain, "steps": steps}
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=_RATE, weight_decay=0.01)
        if state.is_file():
            self._resume()
        else:
            self.signal, self.scale = self._found()

    # --- how far it has come --------------------------------------------------------------------------------
    def _resume(self) -> None:
        found = torch.load(self.path, map_location=self.device, weights_only=True)
        if differ := [name for name, value in self.settings.items() if found["settings"].get(name) != value]:
            raise MmaccelError(
                f"{str(self.path.parent)!r} is of a training with another {' and another '.join(differ)}; give another folder, "
                "or delete its state.pt."
            )
        self.state, (self.signal, self.scale) = State(**found["state"]), found["found"]
        self.network.load_state_dict(found["network"])
        self.best = found["best"]
        self.optimiser.load_state_dict(found["optimiser"])

    def _save(self) -> None:
        draft = self.path.with_suffix(".part")
        kept = {
            "settings": self.settings,
            "state": vars(self.state),
            "found": (self.signal, self.scale),
            "network": self.network.state_dict(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
        }
        torch.save(kept, draft)
        os.replace(draft, self.path)

    # --- steps ----------------------------------------------------------------------------------------------
    def run(self, minutes: float | None, tell: Callable[[str, int, int], None]) -> None:
        """Train until the watched questions no longer gain, or steps or time are at their end."""
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
        self._mend()

    def _step(self) -> float:
        """One batch; the loss."""
        step = self.state.step
        order = random.Random(step // len(self.paths)).sample(range(len(self.paths)), len(self.paths))
        example = Example.load(self.paths[order[step % len(order)]]).to(self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, 0.05 + 2 * (1 - step / self.steps))
        loss = self._loss(example)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        self.optimiser.step()
        return float(loss.detach())

    def _loss(self, example: Example) -> Tensor:
        """Mean square of what the scores differ from what they are to be, over all tokens."""
        missed = (self.network(example.shown()) - self._wanted(example, self.signal, self.scale)).square()
        return missed[example.valid].mean()

    def _wanted(self, example: Example, signal: int, scale: float) -> Tensor:
        """``[N, n]``, what scores are to be: from 0 to ``scale``, by the logarithm of a signal's share of its largest."""
        found = example.signals[:, signal]
        share = found / found.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return scale * (1 + _STEEP * share).log() / math.log(1 + _STEEP)

    # --- looking --------------------------------------------------------------------------------------------
    @torch.no_grad()
    def lost(self, scored: Callable[[Example], Tensor]) -> tuple[float, float]:
        """Mean KL of some watched questions with what is picked by scores, and the share of answers that are other ones."""
        total, other, asked = 0.0, 0, 0
        for example in self.watched[:_ASKED]:
            example = example.to(self.device)
            count = (example.valid.sum(1) * self.retain + 0.5).floor().long().clamp(min=1)
            kept = picked(example.shown().features, scored(example), example.valid, count)
            states = self.frozen.states(example, example.narrowed(kept))
            full, mine = self.frozen.logits(example.states), self.frozen.logits(states)
            total += float(divergence(list(full.unbind(1)), list(mine.unbind(1)), example.lengths).sum())
            steps = torch.arange(full.shape[1], device=full.device)
            differ = (full.argmax(-1) != mine.argmax(-1)) & (steps < example.lengths[:, None])
            other += int(differ.any(1).sum())
            asked += len(full)
        return total / asked, other / asked

    def _found(self) -> tuple[int, float]:
        """The signal, and the scale, that keep the answers to watched questions best where they are known exactly."""

        def best(cases: Iterable[tuple[int, float]]) -> tuple[int, float]:
            return min(cases, key=lambda case: self.lost(lambda example: self._wanted(example, *case))[0])

        signals, middle = self.watched[0].signals.shape[1], _SCALES[len(_SCALES) // 2]
        signal = best((signal, middle) for signal in range(signals))[0] if signals > 1 else 0
        return best((signal, scale) for scale in _SCALES)

    def _look(self, running: Sequence[float]) -> None:
        """Note how well it does, keep it if it is the best, and end where nothing is gained any more."""
        state = self.state
        with torch.no_grad():
            watched = [float(self._loss(example.to(self.device))) for example in self.watched]
        loss = sum(watched) / len(watched)
        kl, other = self.lost(lambda example: self.network(example.shown()))
        state.log.append(
            {
                "step": state.step,
                "seconds": round(state.seconds, 1),
                "loss": sum(running) / len(running) if running else None,
                "watched": loss,
                "kl": kl,
                "kept": 1 - other,
            }
        )
        if loss < state.best:
            state.best, state.since = loss, state.step
            self.best = copy.deepcopy(self.network.state_dict())
        state.ended = state.step >= self.steps or state.step - state.since >= _PATIENCE * _LOOK

    def _mend(self) -> None:
        """What cannot be told exactly is told too low: scores are multiplied by what keeps the watched answers best."""
        with torch.no_grad():
            factor = min(
                _MENDED, key=lambda factor: self.lost(lambda example: factor * self.network(example.shown()))[0]
            )
            self.network.score.weight.mul_(factor)


def _check(model: Any, questions: Sequence[Question], target: str, retain: float, steps: int, out: Path) -> None:
    """See that what is asked makes sense."""
    if is_accelerated(model):
        raise MmaccelError("A selector is trained on the bare model; call model.mmaccel.remove() first.")
    if (family := family_of(model)).stateful:
        raise UnsupportedError(
            f"No selector is trained for {family.name}: the training packs prompts of several lengths, which layers with a "
            "recurrent state would mix; use 'divprune' or another method without training."
        )
    if target not in get_args(Target):
        raise MmaccelError(f"target={target!r} is unknown; it can be {' or '.join(get_args(Target))}.")
    if not 0 < retain < 1:
        raise MmaccelError(f"retain={retain} is no share of the tokens; give one such as 0.1.")
    if steps < 1:
        raise MmaccelError(f"steps={steps} is no number of steps; give 1 or more.")
    if out.exists() and not out.is_dir():
        raise MmaccelError(f"{str(out)!r} is a file, and a selector is a folder; give another name.")
    if len(questions) < FEWEST:
        raise MmaccelError(
            f"There are {len(questions)} questions or pictures, and a selector needs at least {FEWEST}, better a thousand; "
            "give more."
        )


def _split(questions: Sequence[Question]) -> tuple[list[Question], list[Question], list[Question]]:
    """What is trained on, watched and held out; always the same ones."""
    shuffled = random.Random(0).sample(questions, len(questions))
    held = min(_MOST_HELD_OUT, math.ceil(len(shuffled) * HELD_OUT))
    watched = min(_MOST_WATCHED, math.ceil(len(shuffled) * WATCHED))
    return shuffled[held + watched :], shuffled[held : held + watched], shuffled[:held]


def _shape(features: int, width: int | None, blocks: int, question: bool) -> Shape:
    if width is None:
        width = 32 if features < 512 else 128 if features < 2048 else 256
    return Shape(features, width, blocks, heads=4, question=question)


def _finish(
    learner: Learner,
    processor: Any,
    held_out: Sequence[Question],
    questions: Sequence[Question],
    out: Path,
    batch_size: int,
    longest: int,
    settings: Mapping[str, Any],
    tell: Callable[[str, int, int], None],
) -> Distilled:
    """Write the selector, and measure it on what was held out."""
    model, network, retain = learner.frozen.model, learner.network, learner.retain
    belongs = Belongs.to(learner.frozen.family)
    parameters = sum(x.numel() for x in network.parameters())
    share = parameters / sum(x.numel() for x in model.parameters())
    record = {
        "target": learner.frozen.target,
        "signal": learner.signal,
        "scale": learner.scale,
        "retain": retain,
        "questions": len(questions),
        "steps": learner.state.step,
        "minutes": round(learner.state.seconds / 60, 1),
        "parameters": parameters,
        "share of the model": share,
        "date": origin.today(),
        "versions": origin.versions(),
    }
    network.save(out, belongs, record)
    judge = Judge(model, processor, [held_out], batch_size=batch_size, max_new_tokens=longest, measure=False)
    recipes: dict[str, RecipeLike] = {"learned": Learned(str(out)), RIVAL: RIVAL}
    budgets = tuple(dict.fromkeys(min(1.0, retain * times) for times in _BUDGETS))
    found: dict[str, dict[float, Measured]] = {}
    for name, one in recipes.items():
        for budget in budgets:
            found.setdefault(name, {})[budget] = judge.ask(find_recipe(one, retain=budget), 0)
            tell("asking held-out questions", sum(map(len, found.values())), len(recipes) * len(budgets))
    told = {**record, "held out": report.figures(found), "log": learner.state.log, "settings": dict(settings)}
    made = Distilled(out, parameters, share, learner.signal, tuple(learner.state.log), found, told)
    network.save(out, belongs, {**record, "held out": report.figures(found)})
    report.write(made)
    return made


__all__ = ["Learner", "distil"]
