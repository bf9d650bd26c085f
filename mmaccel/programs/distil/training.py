"""Train a selector for a frozen model from questions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from ...accelerate import is_accelerated
from ...core.files import locked
from ...errors import MmaccelError, UnsupportedError
from ...families import family_of
from ...method.selector import CONFIG, WEIGHTS, ModelFingerprint, Shape
from ...pruning.learned import Learned
from ...recipe import RecipeLike, get_recipe
from ..bench import provenance
from ..evaluate import Question, memory_error
from ..plots import load_pyplot
from ..resume import naming_files, run_settings, shown, usable
from ..tune.evaluate import Evaluator, Measurement
from . import report
from .examples import Example, Frozen, Target, cached
from .learner import Learner, SignalLearner, TrialLearner
from .report import Distilled

#: fewer questions than this train nothing
FEWEST = 32
#: shares of the questions that are not trained on: watched ones decide when it stops, held-out ones give the figures
WATCHED, HELD_OUT = 0.12, 0.12
_MOST_WATCHED, _MOST_HELD_OUT = 160, 300
#: budgets that are measured in the end, as multiples of ``retain``, and recipes to compare with
_BUDGETS, _BASELINES = (1.0, 2.5), ("balanced", "divprune")


def distil(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    *,
    out: str | Path = "selector",
    target: Target = "answers",
    question: bool = True,
    residual: bool = True,
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
    """Train a selector for the method ``learned`` on a frozen model's own answers; no labels are needed.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare. It is not changed.
    questions : of :func:`mmaccel.programs.evaluate.ask_samples` and the like. An eighth each is watched, to stop in time, and
        held out for the final figures, at most 160 and 300.
    out : the selector's folder, which is made. ``work`` inside it holds what the model read and the state of the training, so
        that a call with the same settings resumes; it may be deleted in the end.
    target : what the selector learns from. ``answers``: how the model's answers change with the tokens that it selects, by some
        short forwards of the language model a question and step. ``effect``: how much the answer depends on every token, by one
        gradient of the model a question. ``attention``: the attention to every token in the layer whose attention keeps the
        answers best, by one forward a question.
    question : whether the selector reads the question; without it a picture is reduced once for all questions.
    residual : whether it also learns what to add to kept tokens from the dropped ones, by a gradient through the language model
        in every step; only with ``answers``.
    retain : the share of the tokens at which answers are compared.
    width, blocks : of the network; the default depends on the model's width.
    steps, minutes : limits of the training, a batch a step; it ends earlier when the watched questions no longer improve.
    batch_size, max_new_tokens : as for :func:`mmaccel.programs.evaluate.evaluate`.
    complain : called with one sentence for every question that cannot be used and is left out. Without it, that is an error.
    progress : called with the name of a part of the work, how much of it is done, and how much there is.

    Raises
    ------
    MmaccelError
        If questions are too few or cannot be read; the folder holds a training with other settings (another model, a changed
        question) or a damaged file, or another run writes to it.
    """
    out, tell = Path(out), progress or (lambda what, done, of: None)
    _check(model, questions, target, retain, steps, out)
    frozen = Frozen(model, processor, target)
    features, residual = int(frozen.text.config.hidden_size), residual and target == "answers"
    width = width or (24 if features < 512 else 128 if features < 2048 else 256)
    shape = Shape(features, width, blocks, heads=4, question=question, residual=residual)
    work, other = out / "work", "delete it, or give another folder with --out (out=)"
    with ExitStack() as stack:
        stack.enter_context(naming_files(other))
        work.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(work / "lock", str(out), "give another folder with --out (out=)"))
        taken = usable(processor, questions, complain)
        _check_enough(len(taken), len(questions))
        training, watched, held_out = _split(taken)
        settings = {
            **run_settings(model, processor, taken),
            "batch size": batch_size,
            "longest answer": max_new_tokens,
            "target": target,
        }

        def examples(name: str, asked: Sequence[Question]) -> list[Path]:
            return cached(
                frozen,
                asked,
                work / name,
                settings,
                batch_size=batch_size,
                longest=max_new_tokens,
                complain=complain,
                progress=lambda done, of: tell(f"reading {name} questions", done, of),
            )

        seen = [Example.load(path) for path in examples("watched", watched)]
        kind = TrialLearner if target == "answers" else SignalLearner
        learner = kind(frozen, shape, examples("training", training), seen, retain, steps, work / "state.pt")
        with memory_error(
            "give a smaller --batch-size and another folder, or --select-only, which needs no gradients of the model"
        ):
            learner.run(minutes, tell)
        evaluator = Evaluator(
            model,
            processor,
            [held_out],
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            timed=False,
            complain=complain,
        )
        return _finish(learner, evaluator, out, len(taken), settings, tell)


def _check(model: Any, questions: Sequence[Question], target: str, retain: float, steps: int, out: Path) -> None:
    """Raise MmaccelError if the model is not supported, an argument is wrong, or matplotlib is missing."""
    load_pyplot("bench")  # which the end of the training needs
    if is_accelerated(model):
        raise MmaccelError("A selector is trained on the bare model; call model.mmaccel.remove() first.")
    family = family_of(model)
    why = "has layers with a recurrent state, which would mix prompts of several lengths" if family.stateful else None
    if family.masks_above:
        why = "lets pictures attend both ways, and the training does not"
    if why:
        raise UnsupportedError(
            f"No selector is trained for {family.name}, which {why}; use 'spacetime' or another method without training."
        )
    if target not in get_args(Target):
        raise MmaccelError(f"target must be {' or '.join(get_args(Target))}, got {target!r}.")
    if not 0 < retain < 1:
        raise MmaccelError(f"retain must be a share between 0 and 1, such as 0.1, got {retain}.")
    if steps < 1:
        raise MmaccelError(f"steps must be at least 1, got {steps}.")
    if out.exists() and not out.is_dir():
        raise MmaccelError(f"{str(out)!r} is a file, and a selector is a folder; give another name.")
    for name in (CONFIG, WEIGHTS, report.REPORT, report.PICTURE):
        if (out / name).exists() and not (out / name).is_file():
            raise MmaccelError(f"{str(out / name)!r} is no regular file, so it cannot be written; give another folder.")
    _check_enough(len(questions), len(questions))


def _check_enough(count: int, of: int) -> None:
    if count < FEWEST:
        which = "" if count == of else f" of {of} that can be used"
        raise MmaccelError(
            f"A selector needs at least {FEWEST} questions or pictures, better a thousand; there are {count}{which}."
        )


def _split(questions: Sequence[Question]) -> tuple[list[Question], list[Question], list[Question]]:
    """Questions for training, watched ones and held-out ones; the same for equal input."""
    shuffled = random.Random(0).sample(questions, len(questions))
    held = min(_MOST_HELD_OUT, math.ceil(len(shuffled) * HELD_OUT))
    watched = min(_MOST_WATCHED, math.ceil(len(shuffled) * WATCHED))
    return shuffled[held + watched :], shuffled[held : held + watched], shuffled[:held]


def _finish(
    learner: Learner,
    evaluator: Evaluator,
    out: Path,
    questions: int,
    settings: Mapping[str, Any],
    tell: Callable[[str, int, int], None],
) -> Distilled:
    """Write the selector, and measure it on the held-out questions."""
    network, retain = learner.network, learner.retain
    fingerprint = ModelFingerprint.of(learner.frozen.family)
    parameters = sum(x.numel() for x in network.parameters())
    share = parameters / sum(x.numel() for x in evaluator.model.parameters())
    record = {
        "target": learner.frozen.target,
        "signal": learner.signal,
        "scale": learner.scale,
        "retain": retain,
        "questions": questions,
        "steps": learner.state.step,
        "steps of earlier runs": learner.taken_over,
        "minutes": round(learner.state.seconds / 60, 1),
        "parameters": parameters,
        "share of the model": share,
        "date": provenance.today(),
        "versions": provenance.versions(),
    }
    network.save(out, fingerprint, record)
    recipes: dict[str, RecipeLike] = {"learned": Learned(str(out)), **{name: name for name in _BASELINES}}
    budgets = tuple(dict.fromkeys(min(1.0, retain * times) for times in _BUDGETS))
    held_out: dict[str, dict[float, Measurement]] = {}
    for name, one in recipes.items():
        for budget in budgets:
            held_out.setdefault(name, {})[budget] = evaluator.ask(get_recipe(one, retain=budget), 0)
            tell("asking held-out questions", sum(map(len, held_out.values())), len(recipes) * len(budgets))
    data = {**record, "held out": report.figures(held_out), "log": learner.state.log, "settings": shown(settings)}
    result = Distilled(out, parameters, share, learner.signal, tuple(learner.state.log), held_out, data)
    network.save(out, fingerprint, {**record, "held out": report.figures(held_out)})
    report.write(result)
    return result
