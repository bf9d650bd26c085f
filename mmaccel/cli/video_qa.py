"""Answer questions about videos in bulk, accelerated, and resume interrupted runs.

QUESTIONS is a file of questions; or a clip or a folder of clips, all of which are asked --ask. Clips of a folder are its video
files, its subfolders of pictures, and the clips of its other subfolders. Video files are read by PyAV or decord: pip install
'mmaccel[video]'.

A line of a file of questions is a JSON object: "video" (a file, or a folder of pictures; absolute or relative to QUESTIONS) and
"question"; optional are "choices" (a list; the model answers with a letter), "answer" (the right one, to be scored) and "id".
A file called *.csv has these fields as columns ("choices" as a JSON list).

A line of the answers holds "id", "video", "question" and "answer"; with choices the letter of the chosen one as "choice";
"right" where the right answer is known ("expected"), and "content", a digest of question and video. Each line is on the disk
before the next one begins. With --out FILE.csv these lines are in FILE.csv.jsonl; when the command ends, in whatever way, it
writes FILE.csv from them. Keep both to resume.

Started again with the same options, the command resumes. It refuses a file with answers of another model (any byte of its
files), recipe (its values, the code of its methods, files that they load), drafts, number of frames, kind of device, mmaccel,
torch or transformers, and asks again about videos that changed. Questions without "id" are identified by their content: lines
may be added, moved or removed.

For a video or line that cannot be used the answers get a line with "error", one sentence. Errors are listed at the end, and the
exit status is then 3; the next run asks these questions again, and no others. Answers that name none of the choices are listed,
too, and leave the exit status at 0.

Videos are decoded in separate processes while the model works. Several questions about one video share one prefill of it,
unless the recipe looks at the question, or with drafts or --fallback. With --fallback the tokens of all readings of an answer
count as kept.

With --ray the questions are answered on a cluster, one model a GPU. Every machine of it must see the videos, the model and the
files of --import under the same paths and have the same mmaccel; the answers and the file are the same as without.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.figures import drafting_line
from ..core.files import RESUME, write_whole, writing
from ..errors import MmaccelError
from ..programs.bench import provenance
from . import ask
from .shared import needs
from .shared.measure import PARTIAL, percent
from .shared.options import AnswerOptions, Frames, Json, Longest, ModelOptions, RecipeOptions
from .shared.text import json_file, nbytes, seconds, show, table, working, write_json

if TYPE_CHECKING:
    from ..programs.video_qa.answers import AnswerFile
    from ..programs.video_qa.generator import Figures
    from ..programs.video_qa.qa import QASettings
    from ..programs.video_qa.questions import VideoQuestion

PLACE = 6
HELP = "answer questions about many videos, from a file or about a folder"
EXAMPLES = """\
examples:
  mmaccel video-qa clips/ --ask "What happens?" -o answers.csv
  mmaccel video-qa questions.jsonl -o answers.jsonl --model ./my-qwen --recipe holitom --retain 0.15
  mmaccel video-qa questions.jsonl -o answers.jsonl --model ./my-qwen --frames 32 --frame-method scene-frames
  mmaccel video-qa questions.jsonl -o full.jsonl --model ./my-qwen --recipe none --json full.json
  mmaccel video-qa questions.jsonl -o answers.jsonl --model ./my-qwen --frames 3600 --cap-tokens 4096
  mmaccel video-qa questions.jsonl -o answers.jsonl --model ./my-qwen-7b --lossless --draft ./my-qwen-3b
  mmaccel video-qa questions.jsonl -o answers.jsonl --model ./my-qwen --retain 0.1 --fallback 0.9
  mmaccel video-qa questions.jsonl -o answers.jsonl --model /shared/my-qwen --ray auto

lines of questions.jsonl:
  {"video": "clips/dog.mp4", "question": "What does the dog carry?"}
  {"video": "clips/dog.mp4", "question": "Where is it?", "choices": ["in a garden", "on a beach"], "answer": "on a beach"}

With --cap-tokens, or a recipe whose cache policy has a cap (--set cap=KEYS), videos of more than 64 frames are decoded,
encoded and read group by group, and peak memory does not grow with --frames.
"""

#: changed videos, and clips or answers that could not be read, that are listed at most
_SHOWN, _LISTED = 5, 20
_OTHER = "give another file with --json to resume"


def _batch(text: str) -> int | str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f"must be a number of 1 or more, or auto, got {text!r}")
    return text if text == "auto" else int(text)


@dataclasses.dataclass(frozen=True)
class Bulk:
    """Options of a run."""

    frames: Frames = 16
    frame_method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="uniform, keyframes, or a method that chooses from four times as many frames, such as scene-frames.",
        ),
    ] = "uniform"
    max_new_tokens: Longest = 64
    batch_size: Annotated[
        Any,
        typer.Option(
            parser=_batch, metavar="N|auto", help="Questions in a batch; auto halves it when memory does not suffice."
        ),
    ] = "auto"
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Limit for decoding one video.")] = 120.0
    memory_limit: Annotated[float, typer.Option(metavar="GIB", help="Limit for all decoded videos together.")] = 4.0
    cap_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="KEYS",
            min=1,
            help="Read clips of more than 64 frames group by group, and keep at most this number of keys a head; the recipe's "
            "policy evicts, or infinipot-v if it has none.",
        ),
    ] = None
    caches: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the KV cache of every clip in this folder; a later run with other questions reads no clip again.",
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS",
            help="Work on a Ray cluster: auto takes the one that runs here, or else all GPUs of this machine; or HOST:PORT "
            "(extra: ray).",
        ),
    ] = None
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first question that cannot be answered.")] = (
        False
    )


def run(
    context: typer.Context,
    questions: Annotated[
        Path, typer.Argument(metavar="QUESTIONS", help="JSONL or CSV of questions; or a clip or folder, with --ask.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Answers to write or resume: FILE.jsonl or FILE.csv.")
    ],
    which: ModelOptions,
    how: RecipeOptions,
    drafts: AnswerOptions,
    bulk: Bulk,
    question: Annotated[
        str | None, typer.Option("--ask", metavar="QUESTION", help="Question to ask about every clip.")
    ] = None,
    output: Json = None,
) -> int:
    """Answer the open questions, write the answers, print the summary."""
    from ..programs.identity import versions
    from ..programs.resume import listed
    from ..programs.video_qa.answers import AnswerFile

    if bulk.ray is not None:
        needs.require("ray", "--ray")
    journal = _journal(out)
    if (summary := json_file(output)) is not None:
        _check_summary(summary, questions, out, journal)
    settings = _settings(which, how, drafts, bulk)
    asked = _questions(questions, question)
    needs.require_reader(Path(one.path) for one in asked if not one.error)
    identity = settings.identity()
    with AnswerFile(journal, identity) as file, _table_of(out, journal, asked, file):
        if changed := file.expect(asked):
            print(
                f"{len(changed)} answers in {out} are to videos that changed; these questions are asked again: "
                f"{listed(changed, _SHOWN)}",
                file=sys.stderr,
            )
        before = len(asked) - len(file.left(asked))
        if before:
            print(f"{before} of {len(asked)} answers are taken over from {out}", file=sys.stderr)
        if others := len(file.done) - before:
            print(f"{others} answers in {out} are to other questions; they stay there", file=sys.stderr)
        try:
            figures, wall, workers = _answer(bulk, settings, asked, file)
        except KeyboardInterrupt:
            done = len(asked) - len(file.left(asked))
            print(f"Stopped; {done} of {len(asked)} answers are in {out}; the same command resumes.", file=sys.stderr)
            return 130
        report = {
            "command": provenance.command("mmaccel", arguments=context.obj),
            "date": provenance.today(),
            "settings": identity,
            "versions": versions(),
            "taken_over": before,
            **_summary([file.done[one.name] for one in asked], figures, wall, workers),
        }
    if summary is not None:
        with writing(summary, _OTHER):
            write_json(summary, report)
    show(report, output, lambda: _render(report, out))
    _list_unread([file.done[one.name] for one in asked], out)
    return PARTIAL if report["failed"] else 0


def _questions(path: Path, question: str | None) -> list[VideoQuestion]:
    """The questions of a file; or ``question`` about a clip, or about the clips of a folder."""
    from ..media.files import moves
    from ..programs.video_qa.questions import ask_clips, read_questions

    clips = path.exists() and moves(path)
    if question is not None:
        if path.is_file() and not clips:
            raise MmaccelError(
                f"--ask is for a clip or a folder of clips, and {str(path)!r} is a file of questions; leave --ask out."
            )
        return ask_clips(path, question)
    if clips:
        kind = "folder" if path.is_dir() else "clip"
        raise MmaccelError(f"{str(path)!r} is a {kind}; give --ask QUESTION with it, or a file with a question a line.")
    return read_questions(path)


def _journal(out: Path) -> Path:
    """The JSONL file that is written during the run. Raises MmaccelError if ``out`` is something else's, or of another kind."""
    kind = out.suffix.lower()
    if kind not in (".csv", ".jsonl"):
        raise MmaccelError(f"--out {str(out)!r} must end in .jsonl or .csv.")
    if kind == ".jsonl":
        return out
    journal = out.with_name(f"{out.name}.jsonl")
    if out.exists() and not journal.exists():
        raise MmaccelError(f"{str(out)!r} exists without {journal.name!r}, which holds its answers; give another file.")
    return journal


@contextmanager
def _table_of(out: Path, journal: Path, asked: list[VideoQuestion], file: AnswerFile) -> Iterator[None]:
    """Write a CSV of what is answered when the block ends, however it does, if ``out`` is one."""
    from ..programs.video_qa.answers import write_csv

    try:
        yield
    finally:
        if out != journal:
            with writing(out, f"the answers are in {str(journal)!r}; {RESUME}"):
                write_csv(out, [file.done[one.name] for one in asked if one.name in file.done])


def _list_unread(records: list[dict[str, Any]], out: Path) -> None:
    """Print the clips and questions that could not be used, each reason once, and the answers that name no choice."""
    errors: Counter[str] = Counter()
    for record in records:
        if "error" in record:
            errors[f"{record['video'] or record['id']}: {record['error']}"] += 1
    unread = [
        f"{record['video']}, id {record['id']}: {record['answer'][:80]!r}"
        for record in records
        if "error" not in record and record.get("choices") and record["choice"] is None
    ]
    parts = {
        f'{errors.total()} questions have no answer ("error" in {out}):': [
            f"{line} ({count} questions)" if count > 1 else line for line, count in errors.items()
        ],
        f'{len(unread)} answers name none of the choices, or several ("choice" is empty in {out}):': unread,
    }
    for title, lines in parts.items():
        if lines:
            more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
            print("\n  ".join([title, *lines[:_LISTED], *more]), file=sys.stderr)


def _check_summary(path: Path, *others: Path) -> None:
    """Raise MmaccelError now if the summary cannot be written at the end of the run."""
    if path.resolve() in [other.resolve() for other in others]:
        raise MmaccelError(f"--json {str(path)!r} is the file of the questions or answers; give another file.")
    trial = path.with_name(f"{path.name}.trial")
    with writing(path, _OTHER):
        write_whole(trial, b"")
        trial.unlink()


def _settings(which: ModelOptions, how: RecipeOptions, drafts: AnswerOptions, bulk: Bulk) -> QASettings:
    from ..method.registry import methods
    from ..programs.video_qa.qa import QASettings
    from ..recipe import get_recipe
    from ..video.decode_spec import GIB

    if not 0 < bulk.memory_limit < float("inf"):
        raise MmaccelError(f"--memory-limit must be greater than 0 GiB, got {bulk.memory_limit:g}.")
    if not 0 < bulk.time_limit < float("inf"):
        raise MmaccelError(f"--time-limit must be greater than 0 seconds, got {bulk.time_limit:g}.")
    given = how.changes()
    method: Any = methods().get(bulk.frame_method)
    named = [] if method is None else [option.name for option in dataclasses.fields(method)]
    needs.require_clip(given)
    return QASettings(
        frame_options={key: given.pop(key) for key in list(given) if key in named},
        recipe=get_recipe(how.recipe).override(**given),
        frames=bulk.frames,
        frame_method=bulk.frame_method,
        max_new_tokens=bulk.max_new_tokens,
        batch_size=bulk.batch_size,
        timeout=bulk.time_limit,
        memory=int(bulk.memory_limit * GIB),
        cap_tokens=bulk.cap_tokens,
        caches=bulk.caches,
        drafts=drafts.arguments(),
        **vars(which) | {"model": which.model or str(ask.shipped(video=True))},
    )


def _answer(
    bulk: Bulk, settings: QASettings, questions: list[VideoQuestion], file: AnswerFile
) -> tuple[Figures, float, int]:
    """Fill the file; returns what was done, seconds of wall time (of a cluster with its start), and the number of workers."""
    from ..programs.video_qa.cluster import ClusterAnswerer
    from ..programs.video_qa.generator import Figures
    from ..programs.video_qa.qa import VideoAnswerer

    waiting = file.left(questions)
    if not waiting:
        return Figures(), 0.0, 1

    begin = time.perf_counter()
    with working("questions", len(questions), len(questions) - len(waiting)) as bar:
        if (hint := settings.hint()) is not None:
            bar.say(hint)
        answerer: VideoAnswerer | ClusterAnswerer
        if bulk.ray is None:
            answerer = VideoAnswerer(settings, say=bar.say)
        else:
            answerer = ClusterAnswerer(settings, bulk.ray, bar.say)
        with (
            # stdout is for the summary; Ray would print there
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            closing(answerer.run(questions, file.done)) as records,
        ):
            for record in records:
                file.write(record)
                bar.advance()
                if bulk.strict and "error" in record:
                    raise MmaccelError(f"{record['id']}: {record['error']}")
    return answerer.figures, time.perf_counter() - begin, answerer.workers


# ------------------------------------------------------------------------------------------------------------- summary


def _summary(records: list[dict[str, Any]], figures: Figures, wall: float, workers: int) -> dict[str, Any]:
    """Accuracy over all records; everything else over what this run has done."""
    judged = [record["right"] for record in records if "right" in record]
    answered = figures.questions
    seconds = dict(figures.seconds)

    def over(value: float, by: float) -> float | None:
        return value / by if by else None

    return {
        "questions": len(records),
        "failed": sum("error" in record for record in records),
        "unread": sum("error" not in record and record.get("choice", "") is None for record in records),
        "judged": len(judged),
        "accuracy": over(sum(judged), len(judged)),
        "answered_now": answered,
        "videos": figures.videos,
        "prefills": figures.prefills,
        "workers": workers,
        "wall_seconds": wall,
        "questions_per_second": over(answered, wall),
        "model_share": over(seconds.get("model", 0.0), wall * workers),
        "waiting_share": over(seconds.get("waiting", 0.0), wall * workers),
        "seconds": seconds,
        "visual_tokens": over(figures.visual_tokens, answered),
        "visual_tokens_kept": over(figures.visual_tokens_kept, answered),
        "kv_bytes": over(figures.kv_bytes, answered),
        "decoders": dict(figures.backends),
        "drafting": dict(figures.drafting),
        "read_again": over(figures.read_again, answered),
        "notes": figures.notes,
    }


def _render(report: dict[str, Any], path: Path) -> str:
    rows = [["", ""], ["questions", str(report["questions"])], ["failed", str(report["failed"])]]
    if report["unread"]:
        rows.append(["name no choice", str(report["unread"])])
    if report["judged"]:
        rows.append(["accuracy", f"{percent(report['accuracy'])} of {report['judged']}"])
    if report["answered_now"]:
        wall, workers, spent = report["wall_seconds"], report["workers"], report["seconds"]
        on = f" on {workers} workers" if workers > 1 else ""
        rows += [
            ["videos decoded", f"{report['videos']} ({', '.join(report['decoders'])})"],
            ["prefills", f"{report['prefills']} for {report['answered_now']} questions"],
            ["visual tokens", f"{report['visual_tokens_kept']:.0f} of {report['visual_tokens']:.0f} kept a question"],
            ["KV cache", f"{nbytes(report['kv_bytes'])} a question"],
            *([["drafts", drafting_line(report["drafting"])]] if report["drafting"] else []),
            *([["read again", f"{percent(report['read_again'])} of the answers"]] if report["read_again"] else []),
            ["wall time", f"{seconds(wall)}, {report['questions_per_second']:.2f} questions a second{on}"],
            ["model at work", percent(report["model_share"])],
            ["waiting for frames", percent(report["waiting_share"])],
            *(
                [f"  {name}", f"{seconds(spent[name])}, {percent(spent[name] / wall / workers)}"]
                for name in ("processor", "encoder", "selection", "prefill", "decode")
                if name in spent
            ),
        ]
    title = f"{report['settings']['model']}, {report['settings']['recipe']['name']}; answers in {path}"
    # without the empty head, which has a rule below it on a terminal
    text = table(rows)
    return "\n".join([title, text[text.index("questions") :], *report["notes"]])
