"""What ``eval`` and ``compare`` share: the questions, the run with its progress bar, and results that outlive a broken run."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import MmaccelError
from ...programs.bench import origin
from .. import ask
from .options import Frames, Longest, ModelOptions
from .text import nbytes, table, working, write_json

if TYPE_CHECKING:
    from ...programs.evaluate import Answer, Question, Row

#: exit status when something could not be used and the rest was done
PARTIAL = 3
#: seconds between two writings of the results
_SAVE_EVERY = 5.0
_PER_TASK = 20


@dataclass(frozen=True)
class Asked:
    """What is asked, and how."""

    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK...",
            help="image, video, or tasks of the generated suite such as: colour count reading motion  [default: image]",
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL of your own instead; mmaccel eval --help has a line of it."),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=f"Questions a task, or lines of --data.  [default: {_PER_TASK}, or all lines]"
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Questions at a time.")] = 16
    max_new_tokens: Longest = 32
    frames: Frames = 16
    pixels: Annotated[int, typer.Option(min=1, metavar="N", help="Side of the suite's pictures.")] = 112


def rows(recipes: Sequence[str], budgets: Sequence[float] | None) -> list[Row]:
    """Recipe ``none`` first, as the line to compare with, then every recipe at every budget, each once."""
    from ...programs.evaluate import Row

    found = [Row("none")]
    for name in recipes:
        # none has no budget, and stands beside others that have one
        there_is_one = Row(name).recipe.primary is not None or len(recipes) == 1
        found += [Row(name, budget) for budget in (budgets if budgets and there_is_one else [None])]
    return list({row.title: row for row in found}.values())


class Run:
    """One run of ``eval`` or ``compare``: questions, model, settings, rows, complaints."""

    def __init__(
        self,
        asked: Asked,
        which: ModelOptions,
        typed: list[str],
        path: Path | None,
        split: str = "test",
        about: str | None = None,
    ) -> None:
        """Read the questions and load the model.

        Parameters
        ----------
        typed : the words of the command line.
        path : the results' file, None for none.
        split : of the generated suite. about : what is asked about the pictures and videos of a folder, if data may be one.
        """
        if asked.suite and asked.data is not None:
            raise MmaccelError("Give --suite or --data, not both.")
        from ...programs.evaluate import fingerprint
        from ...programs.identity import versions

        self.asked, self.typed, self.path, self.split, self.about = asked, typed, path, split, about
        self.complaints: list[str] = []
        self.video = False
        with working("making or reading the questions"):
            self.questions, settings = self._questions()
        # the model that comes along has no path of this machine in its name
        name = which.model or ask.shipped(self.video).name
        which = replace(which, model=which.model or str(ask.shipped(self.video)))
        self.model, self.processor = ask.load_model(which)
        self.settings = {
            "model": name,
            "weights": fingerprint(self.model),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            **settings,
            "frames": asked.frames,
            "batch_size": asked.batch_size,
            "max_new_tokens": asked.max_new_tokens,
            "versions": versions(),
        }
        self.earlier = self._earlier()

    def _questions(self) -> tuple[list[Question], dict[str, Any]]:
        from ...programs.evaluate import ask_folder, ask_samples, ask_suite
        from ...suite import IMAGE_TASKS, VIDEO_TASKS, read_samples

        options = self.asked
        if options.data is None:
            groups = {"image": IMAGE_TASKS, "video": VIDEO_TASKS}
            tasks = list(
                dict.fromkeys(task for name in options.suite or ["image"] for task in groups.get(name, (name,)))
            )
            for task in tasks:
                if task not in (*IMAGE_TASKS, *VIDEO_TASKS):
                    raise MmaccelError(
                        f"There is no task {task!r}; known are image ({', '.join(IMAGE_TASKS)}) and video "
                        f"({', '.join(VIDEO_TASKS)})."
                    )
            if any(task in VIDEO_TASKS for task in tasks):
                if options.frames < 8 or options.frames % 2:
                    raise MmaccelError(
                        f"Clips of the suite have an even number of at least 8 frames, not {options.frames}; "
                        "give --frames 16."
                    )
                self.video = True
            count = options.limit or _PER_TASK
            found = ask_suite(tasks, count, split=self.split, frames=options.frames, pixels=options.pixels)
            return found, {"suite": tasks, "split": self.split, "questions_a_task": count, "pixels": options.pixels}
        if self.about is not None and options.data.is_dir():
            found = ask_folder(options.data, self.about, frames=options.frames)[: options.limit]
            return found, {"data": str(options.data), "asked": self.about, "limit": options.limit}
        if not options.data.is_file():
            raise MmaccelError(f"There is no file {str(options.data)!r}; give a JSONL file with a question a line.")
        try:
            samples, self.complaints = read_samples(options.data)
        except UnicodeDecodeError as error:
            raise MmaccelError(f"{str(options.data)!r} is no text in UTF-8; give a JSONL file.") from error
        except ValueError as error:
            raise MmaccelError("; ".join(str(error).splitlines()[:4]) + ".") from error
        digest = hashlib.sha256(options.data.read_bytes()).hexdigest()[:16]
        asked = {"data": str(options.data), "data_sha256": digest, "limit": options.limit}
        return ask_samples(samples[: options.limit], frames=options.frames), asked

    # --- running ----------------------------------------------------------------------------------------------
    def evaluate(self, rows: list[Row], keep_answers: bool = False) -> dict[str, Any]:
        """Fill the rows, saving on the way, and return the report."""
        from ...programs.evaluate import evaluate

        said: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            found = self.earlier.pop(row.title, None)
            usable = found is not None and found["recipe"] == plain(row.as_dict())["recipe"]
            if found is not None and usable and (not keep_answers or "answers" in found):
                row.restore(found)
                if "answers" in found:
                    said[row.title] = found["answers"]
        done = [sum(sums.questions for sums in row.tasks.values()) for row in rows]
        if any(done):
            print(f"{sum(done)} answers are taken over from {self.path}", file=sys.stderr)
        saved, unreadable = time.monotonic(), set(self.complaints)
        try:
            with working("answers", len(self.questions) * len(rows), sum(done)) as bar:

                def complain(sentence: str) -> None:
                    if sentence not in unreadable:
                        unreadable.add(sentence)
                        self.complaints.append(sentence)
                    bar.total = (bar.total or 0) - len(rows)

                for row, answers in evaluate(
                    self.model,
                    self.processor,
                    self.questions,
                    rows,
                    batch_size=self.asked.batch_size,
                    max_new_tokens=self.asked.max_new_tokens,
                    complain=complain,
                ):
                    bar.advance(len(answers))
                    if keep_answers:
                        said.setdefault(row.title, []).extend(map(spoken, answers))
                    if time.monotonic() - saved > _SAVE_EVERY:
                        self.save(rows, said)
                        saved = time.monotonic()
        finally:
            report = self.save(rows, said)
        return report

    def save(self, rows: list[Row], said: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """Write the report, whole or not at all, and return it."""
        told = [{**row.as_dict(), **({"answers": said[row.title]} if row.title in said else {})} for row in rows]
        report = {
            "command": origin.command("mmaccel", arguments=self.typed),
            "date": origin.today(),
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
            "settings": self.settings,
            "questions": len(self.questions),
            "complaints": self.complaints,
            "rows": [*told, *self.earlier.values()],
        }
        if self.path is not None and any(row.batches for row in rows):
            write_json(self.path, plain(report))
        return {**report, "rows": told}

    def _earlier(self) -> dict[str, dict[str, Any]]:
        """Rows by title that an earlier run with the same settings has left in the file."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            before, rows = dict(found["settings"]), {row["title"]: row for row in found["rows"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise MmaccelError(f"{str(self.path)!r} exists and holds no results; give another file.") from error
        now = plain(self.settings)
        differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if differ:
            raise MmaccelError(
                f"{str(self.path)!r} holds results of a run with different settings ({', '.join(differ)}); give another "
                "file, or delete this one."
            )
        return rows

    def finish(self) -> int:
        """Say what could not be used; the exit status."""
        for complaint in self.complaints:
            print(complaint, file=sys.stderr)
        if self.complaints:
            print(f"{len(self.complaints)} could not be used and were left out.", file=sys.stderr)
        return PARTIAL if self.complaints else 0


def plain(data: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(data))


def spoken(answer: Answer) -> dict[str, Any]:
    """An answer for the report."""
    names = ("name", "task", "expected", "full", "answer", "right", "same", "kl")
    return {name: getattr(answer, name) for name in names}


def percent(share: float | None) -> str:
    """``0.256`` -> ``25.6%``."""
    return "-" if share is None else f"{share * 100:.1f}%"


def render(report: dict[str, Any], by_task: bool = True) -> str:
    """The report as text: one line a recipe, then accuracy (else loyalty) by task."""
    settings = report["settings"]
    head = ["recipe", "accuracy", "same answer", "KL", "visual tokens", "per layer", "KV cache", "of full"]
    rows = [head]
    for row in report["rows"]:
        f = row["figures"]
        rows.append(
            [
                row["title"],
                percent(f["accuracy"]),
                percent(f["loyalty"]),
                f"{f['kl']:.3f}",
                f"{f['visual_tokens_kept']:.0f}",
                percent(f["visual_share_per_layer"]),
                nbytes(f["kv_bytes"]),
                percent(f["kv_share"]),
            ]
        )
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
        body = [[task, *(percent(row["tasks"][task]["figures"][what]) for row in report["rows"])] for task in tasks]
        titles = [row["title"] for row in report["rows"]]
        title = "accuracy" if judged else "same answer"
        lines += ["", table([[title, *titles], *body], numbers=range(1, len(titles) + 1))]
    notes = [f"note: {row['title']}: {note}" for row in report["rows"] for note in row.get("notes", ())]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)
