"""Settings that a run must share with an earlier one to resume it, and batches without unusable questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import MmaccelError, UnsupportedError
from ..media.files import encode
from .bench import provenance
from .evaluate import Batch, Question, batches, sentence
from .identity import code_identity, digest, model_identity, question_identity

T = TypeVar("T")
#: members of a group that a message names at most
_TOLD = 3


def run_settings(model: Any, processor: Any, questions: Sequence[Question]) -> dict[str, Any]:
    """Settings that results of every program depend on, as plain data: model and processor, device, attention, the content of
    every question in order, and versions."""
    return {
        "model": model_identity(model, processor),
        "device": str(model.device.type),
        "attention": str(model.config._attn_implementation),
        "questions": {f"{number} {q.name}": question_identity(q)[:16] for number, q in enumerate(questions, 1)},
        "versions": {**provenance.versions(), "code": code_identity()[:16]},
    }


def shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a report, with one digest for all questions and one for all recipes."""
    groups = ("questions", "recipes")
    return {name: digest(value)[:16] if name in groups else value for name, value in settings.items()}


def check_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Refuse to resume a run of which the settings were others. Raises MmaccelError if any differs; the message names all
    that do, of groups (questions, recipes) the first few members.

    path : the file or folder of the earlier run. before, now : settings as plain data.
    """
    differ = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            inner = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            more = f" and {len(inner) - _TOLD} more" if len(inner) > _TOLD else ""
            name = f"{name}: {', '.join(inner[:_TOLD])}{more}"
        differ.append(name)
    if differ:
        raise MmaccelError(f"{str(path)!r} belongs to a run with different settings ({'; '.join(differ)}); {remedy}.")


@contextmanager
def naming_files(remedy: str) -> Iterator[None]:
    """Turn errors of the file system into MmaccelError with the name of the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise MmaccelError(f"Cannot use {str(error.filename)!r} ({error.strerror}); {remedy}.") from error


def usable(processor: Any, questions: Sequence[Question], complain: Callable[[str], None] | None) -> list[Question]:
    """The questions of which the media can be read and that the processor takes; ``complain`` is told of each other one.
    Raises MmaccelError if one cannot be used and there is no ``complain``."""

    def read(batch: Batch) -> None:
        encode(processor, [prompt for _, prompt in batch])

    taken = (without_unusable(batch, read, complain, fatal=())[0] for batch in batches(questions, 1, complain))
    return [question for batch in taken for question, _ in batch]


def without_unusable(
    batch: Batch,
    run: Callable[[Batch], T],
    complain: Callable[[str], None] | None,
    fatal: tuple[type[Exception], ...] = (torch.OutOfMemoryError, UnsupportedError),
) -> tuple[Batch, T | None]:
    """Results of ``run`` for a batch, without the questions that it cannot use.

    Where ``run`` fails, every question is tried alone; those that fail are left out, and ``complain`` is told of each in a
    sentence. Errors that are ``fatal`` say nothing of a question and are raised.

    Returns
    -------
    The questions that were used, and what ``run`` made of them; None where all were left out.

    Raises MmaccelError if a question cannot be used and there is no ``complain``.
    """
    try:
        return batch, run(batch)
    except fatal:
        raise
    except Exception as error:
        if complain is None and len(batch) == 1:
            raise MmaccelError(_complaint(batch[0][0], error)) from error
    used = []
    for one in batch:
        try:
            run([one])
            used.append(one)
        except fatal:
            raise
        except Exception as error:
            if complain is None:
                raise MmaccelError(_complaint(one[0], error)) from error
            complain(_complaint(one[0], error))
    return used, run(used) if used else None


def _complaint(question: Question, error: Exception) -> str:
    return f"{question.label}: {sentence(error, 'The model cannot answer it')}"
