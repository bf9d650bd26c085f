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
from .evaluate import Batch, Question, batches, halved, sentence
from .identity import code_identity, digest, model_identity, question_identity

T = TypeVar("T")


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
    """Refuse to resume a run with other settings. Raises MmaccelError if any differs; the message names the first settings that
    differ, of groups (questions, recipes) the first few members.

    path : the file or folder of the earlier run. before, now : settings as plain data.
    """
    differ = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            name += f": {listed([key for key in {**old, **new} if old.get(key) != new.get(key)], 3)}"
        differ.append(name)
    if differ:
        raise MmaccelError(
            f"{str(path)!r} belongs to a run with different settings ({listed(differ, 8, '; ')}); {remedy}."
        )


def listed(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """At most so many names, and the number of the others."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
    """The questions whose media can be read and are accepted by the processor; ``complain`` gets a sentence for every other
    question. Raises MmaccelError if a question cannot be used and there is no ``complain``."""

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
    """The usable questions of a batch, and the result of ``run`` for them (None if no question is usable).

    If ``run`` fails for a batch, its halves are tried, and so on; ``complain`` gets a sentence for every question that fails
    alone. Errors that are ``fatal`` have other causes than a question and are raised.

    Raises MmaccelError if a question cannot be used and there is no ``complain``.
    """

    def fail(question: Question, error: Exception) -> None:
        text = f"{question.label}: {sentence(error, 'The model cannot answer it')}"
        if complain is None:
            raise MmaccelError(text) from error
        complain(text)

    results = halved(batch, lambda part: (part, run(part)), fail, fatal)
    if len(results) == 1:
        return results[0]
    used = [one for part, _ in results for one in part]
    return used, run(used) if used else None
