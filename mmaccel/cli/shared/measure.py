"""Parts of ``eval``, ``compare``, ``tune``, ``distil`` and ``calibrate``: questions, model, progress, and results that can be
resumed."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ...core.figures import tokens_a_verification
from ...errors import MmaccelError
from ...programs.bench import provenance
from .. import ask
from .needs import require_reader
from .options import Frames, Longest, ModelOptions, named
from .results import Results
from .text import nbytes, table, working

if TYPE_CHECKING:
    from ...programs.evaluate import Question, Row

T = TypeVar("T")
#: exit status when some questions could not be used
PARTIAL = 3
#: complaints that are printed at most; the report has all
_SHOWN = 20
_PER_TASK = 20


Suite = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TASK...",
        help="image, video, document, or tasks of the generated suite such as: colour reading motion  [default: image]",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSONL of your own instead; mmaccel eval --help has a line of it."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help=f"Questions a task, or lines of --data.  [default: {_PER_TASK}, or all lines]"
    ),
]


@dataclass(frozen=True)
class Asked:
    """Questions and how they are asked."""

    suite: Suite = None
    data: Data = None
    limit: Limit = None
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Questions at a time.")] = 16
    max_new_tokens: Longest = 32
    frames: Frames = 16
    pixels: Annotated[int, typer.Option(min=1, metavar="N", help="Side of the suite's pictures.")] = 112


def rows(
    recipes: Sequence[str],
    budgets: Sequence[float] | None,
    changes: Mapping[str, Any] | None = None,
    drafts: Mapping[str, Any] | None = None,
) -> list[Row]:
    """Recipe ``none`` first, as the baseline, then every recipe with its ``changes`` (:func:`.options.named`) at every
    budget and with ``drafts`` (:meth:`.options.AnswerOptions.arguments`), each once."""
    from ...programs.evaluate import Row

    rows = [Row("none")]
    for name, base in named(recipes, changes):
        # a recipe without a budget is run once among others, and refuses a budget alone
        for budget in budgets if budgets and (base.primary is not None or len(recipes) == 1) else [None]:
            rows.append(Row(base, budget, drafts))
            rows[-1].name = name
    return list({row.title: row for row in rows}.values())


class Run:
    """One run of a command: questions, model, settings, complaints.

    typed : the words of the command line.
    path : the file of results, None for none.
    split : of the generated suite.
    about : the question about the pictures and videos of a folder, if ``--data`` may be a folder.
    """

    def __init__(
        self,
        asked: Asked,
        which: ModelOptions,
        typed: list[str],
        path: Path | None,
        split: str = "test",
        about: str | None = None,
    ) -> None:
        if asked.suite and asked.data is not None:
            raise MmaccelError("Give --suite or --data, not both.")
        from ...programs.identity import versions

        self.asked, self.typed, self.path, self.split, self.about = asked, typed, path, split, about
        self.complaints: list[str] = []
        self.video = False
        with working("making or reading the questions"):
            self.questions, settings = self._questions()
        # a report names no folder of this machine for a shipped model
        name = which.model or ask.shipped(self.video).name
        which = replace(which, model=which.model or str(ask.shipped(self.video)))
        self.model, self.processor = ask.load_model(which)
        self.settings = {
            "model": name,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            **settings,
            "frames": asked.frames,
            "batch_size": asked.batch_size,
            "max_new_tokens": asked.max_new_tokens,
            "versions": versions(),
        }
        self.folder = str(which.model)

    def _questions(self) -> tuple[list[Question], dict[str, Any]]:
        from ...programs.evaluate import ask_folder, ask_samples, ask_suite
        from ...suite import DOCUMENT_TASKS, IMAGE_TASKS, VIDEO_TASKS, read_samples

        options = self.asked
        if options.data is None:
            groups = {"image": IMAGE_TASKS, "video": VIDEO_TASKS, "document": DOCUMENT_TASKS}
            names = options.suite or ["image"]
            tasks = list(dict.fromkeys(task for name in names for task in groups.get(name, (name,))))
            if unknown := [task for task in tasks if all(task not in group for group in groups.values())]:
                known = [f"{name} ({', '.join(group)})" for name, group in groups.items()]
                raise MmaccelError(
                    f"There is no task {unknown[0]!r}; known are {', '.join(known[:-1])} and {known[-1]}."
                )
            self.video = any(task in VIDEO_TASKS for task in tasks)
            if self.video and (options.frames < 8 or options.frames % 2):
                raise MmaccelError(
                    f"--frames must be an even number of at least 8 for clips of the suite, got {options.frames}."
                )
            count = options.limit or _PER_TASK
            questions = ask_suite(tasks, count, split=self.split, frames=options.frames, pixels=options.pixels)
            return questions, {"suite": tasks, "split": self.split, "questions_a_task": count, "pixels": options.pixels}
        if self.about is not None and options.data.is_dir():
            questions = ask_folder(options.data, self.about, frames=options.frames)[: options.limit]
            require_reader(one.sample.video for one in questions if one.sample and one.sample.video)
            return questions, {"data": str(options.data), "asked": self.about, "limit": options.limit}
        if not options.data.is_file():
            raise MmaccelError(f"There is no file {str(options.data)!r}; give a JSONL file with a question a line.")
        try:
            samples, self.complaints = read_samples(options.data)
        except OSError as error:
            raise MmaccelError(f"Cannot read {str(options.data)!r} ({error.strerror}); give a JSONL file.") from error
        except ValueError as error:
            raise MmaccelError("; ".join(str(error).splitlines()[:4]) + ".") from error
        settings = {"data": str(options.data), "limit": options.limit}
        require_reader(sample.video for sample in samples[: options.limit] if sample.video)
        return ask_samples(samples[: options.limit], frames=options.frames), settings

    @staticmethod
    def _identity(question: Question) -> str:
        """The digest of a question; empty for one that cannot be read, which is reported when it is asked."""
        from ...programs.identity import question_identity

        try:
            return question_identity(question)[:16]
        except Exception:
            return ""

    # --- running ----------------------------------------------------------------------------------------------
    def evaluate(self, rows: list[Row], keep_answers: bool = False) -> dict[str, Any]:
        """Fill the rows, saving every batch, and return the report."""
        from ...families import family_of
        from ...programs.drafts import drafts_identity
        from ...programs.evaluate import evaluate
        from ...programs.identity import class_identity, model_identity, recipe_parts

        if self.path is not None:
            # saved results depend on these too
            self.settings["model files"] = model_identity(self.folder)
            self.settings["family"] = class_identity(type(family_of(self.model, self.processor)))[:16]
        for row in rows:
            row.identity = recipe_parts(row.recipe, self.folder) | drafts_identity(row.drafts)
        asked = [(question.label, self._identity(question)) for question in self.questions]
        with closing(Results(self.path, self.settings, asked, keep_answers)) as results:
            results.take_over(rows)
            results.begin()
            try:
                with working("answers", len(self.questions) * len(rows), sum(row.asked for row in rows)) as bar:

                    def complain(sentence: str) -> None:
                        results.leave_out(sentence)
                        bar.total = (bar.total or 0) - len(rows)

                    known = {row.title: len(row.failed) for row in rows}
                    for row, answers in evaluate(
                        self.model,
                        self.processor,
                        self.questions,
                        rows,
                        batch_size=self.asked.batch_size,
                        max_new_tokens=self.asked.max_new_tokens,
                        complain=complain,
                    ):
                        failed = row.failed[known[row.title] :]
                        known[row.title] = len(row.failed)
                        results.add(row, answers, failed)
                        bar.advance(len(answers) + len(failed))
            except MmaccelError:
                self._tell([*self.complaints, *results.left_out])
                raise
            finally:
                report = self._report(rows, results)
                if any(row.batches for row in rows):
                    results.save({**report, "rows": [*report["rows"], *results.others]})
        self.complaints = report["complaints"]
        return report

    def _report(self, rows: list[Row], results: Results) -> dict[str, Any]:
        answers = results.answers
        failed = [f"{row.title}: {one['question']}: {one['error']}" for row in rows for one in row.failed]
        return {
            "command": provenance.command("mmaccel", arguments=self.typed),
            "date": provenance.today(),
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
            "settings": self.settings,
            "questions": len(self.questions),
            "asked": results.questions,
            "left_out": results.left_out,
            "complaints": [*self.complaints, *results.left_out, *failed],
            "rows": [row.as_dict() | ({"answers": answers[row.title]} if row.title in answers else {}) for row in rows],
        }

    @property
    def answering(self) -> dict[str, int]:
        """Arguments of ``tune`` and ``distil`` for how questions are answered."""
        return {"batch_size": self.asked.batch_size, "max_new_tokens": self.asked.max_new_tokens}

    def call(self, what: str, function: Callable[..., T], **options: Any) -> T:
        """A program on the questions, with a progress bar; names the questions that cannot be used if it fails."""
        try:
            with working(what, 1) as bar:
                return function(
                    self.model,
                    self.processor,
                    self.questions,
                    complain=self.complaints.append,
                    progress=bar.part,
                    **options,
                )
        except MmaccelError:
            self.finish()
            raise

    def finish(self) -> int:
        """Print what could not be used; returns the exit status."""
        self._tell(self.complaints)
        return PARTIAL if self.complaints else 0

    @staticmethod
    def _tell(complaints: list[str]) -> None:
        for complaint in complaints[:_SHOWN]:
            print(complaint, file=sys.stderr)
        if len(complaints) > _SHOWN:
            print(f"... and {len(complaints) - _SHOWN} more, see 'complaints' of --json", file=sys.stderr)
        if complaints:
            print(f"{len(complaints)} could not be used and were left out.", file=sys.stderr)


def percent(share: float | None) -> str:
    """``0.256`` -> ``25.6%``."""
    return "-" if share is None else f"{share * 100:.1f}%"


def between(figures: dict[str, Any], name: str) -> str:
    """A share of answers with its interval: ``85.0% (62.1-96.8)``."""
    if figures[name] is None:
        return "-"
    low, high = figures[f"{name}_interval"]
    return f"{percent(figures[name])} ({low * 100:.1f}-{high * 100:.1f})"


def drafting_cells(sums: Mapping[str, Any]) -> list[str]:
    """Drafts accepted, tokens a verification, and forwards saved, from sums over calls, which are empty without drafts."""
    if not sums:
        return ["-"] * 3
    accepted = f"{sums['accepted']:,} of {sums['drafted']:,}"
    return [accepted, f"{tokens_a_verification(sums):.2f}", f"{sums['forwards_saved']:,}"]


def render(report: dict[str, Any], by_task: bool = True) -> str:
    """The report as text: one line a recipe, then accuracy (else loyalty) by task."""
    settings = report["settings"]
    head = ["recipe", "accuracy", "same answer", "KL", "visual tokens", "per layer", "KV cache", "of full"]
    drafted = any(row["figures"]["drafting"] for row in report["rows"])
    head += ["drafts accepted", "tokens a verification", "forwards saved"] if drafted else []
    again = any(row["figures"]["read_again"] for row in report["rows"])
    head += ["read again"] if again else []
    rows = [head]
    for row in report["rows"]:
        f, costs = row["figures"], ["-"] * 5
        if f["questions"]:
            costs = [f"{f['kl']:.3f}", f"{f['visual_tokens_kept']:.0f}", percent(f["visual_share_per_layer"])]
            costs += [nbytes(f["kv_bytes"]), percent(f["kv_share"])]
        if drafted:
            costs += drafting_cells(f["drafting"])
        if again:
            costs.append(percent(f["read_again"]))
        rows.append([row["title"], between(f, "accuracy"), between(f, "loyalty"), *costs])
    lines = [
        f"{settings['model']} on {settings['device']}, {settings['dtype']}; "
        f"{report['rows'][0]['figures']['questions']} questions",
        "",
        table(rows, numbers=range(1, len(head))),
    ]
    tasks = list(report["rows"][0]["tasks"])
    if by_task and len(tasks) > 1:
        judged = report["rows"][0]["figures"]["accuracy"] is not None
        what = "accuracy" if judged else "loyalty"

        def share(row: dict[str, Any], task: str) -> str:
            return between(row["tasks"][task]["figures"], what) if task in row["tasks"] else "-"

        body = [[task, *(share(row, task) for row in report["rows"])] for task in tasks]
        titles = [row["title"] for row in report["rows"]]
        title = "accuracy" if judged else "same answer"
        lines += ["", table([[title, *titles], *body], numbers=range(1, len(titles) + 1))]
    notes = [f"note: {row['title']}: {note}" for row in report["rows"] for note in row["notes"]]
    notes += [
        f"note: {row['title']}: {len(row['failed'])} questions could not be answered and are in no figure"
        for row in report["rows"]
        if row["failed"]
    ]
    lines += ["", "In brackets: exact 95 % intervals (Clopper-Pearson) of the shares of answers, in %."]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)
