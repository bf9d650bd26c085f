"""Measure how fast a model answers, bare and accelerated in turn, from pixels to the last token.

The model is one from a folder or the hub (--model), or the architecture of one with random weights (--shape), whose speed and
memory are those of the real one. The bare and the accelerated model take turns within one process, so that ratios hold on a
noisy machine; "±" shows the spread of a ratio's median.

"first token" counts from uint8 pixels (a clip: from its file, if PyAV is installed) and is split into video decoding,
preparation (resize, normalise, copy to the device), vision tower with its projector, selection, the language model's
prefill, and the rest. Batches hold equal requests. "promised" is the speed-up by arithmetic: towers and prefill shorten with
their operations, a decode step with the bytes that it reads; "realised" is the measured share of that speed-up.

With --concurrency C, C clients run in a closed loop: each sends its next request when it has its answer, and the model answers
all waiting requests as one batch, so that every batch has C requests and the clock runs on between batches. No requests arrive
in between, so this is the best case of throughput, not a study of queues.

With --lossless, --draft or --lookup, every recipe runs with drafts, too; with --lossless only with drafts, since its answer is
the bare model's. "promised" then counts forwards, and drafted tokens by the weights that they read. Random weights (--shape)
write text that says nothing about acceptance. Drafts know no earlier answer.

Peak memory is that of tensors on a GPU; on a CPU it is the resident set of the whole process, in which Python, libraries and
free pages of the C library hide savings. "KV" is the cache at the end of the answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MmaccelError
from . import ask
from .shared import needs
from .shared.options import Budgets, DraftOptions, Json, ModelOptions, Recipes, Settings, rows_of, settings
from .shared.text import json_file, show, working, write_json

if TYPE_CHECKING:
    from ..programs.bench.run import Case
    from ..programs.bench.workloads import Subject
    from ..recipe import Recipe

PLACE = 5
HELP = "speed and memory, bare against accelerated, on real shapes and named workloads"
EXAMPLES = """\
examples:
  mmaccel bench --shape tiny
  mmaccel bench --shape llava-onevision-7b --workload video-32 video-128 --recipe divprune holitom --retain 0.25 0.1
  mmaccel bench --shape qwen2.5-vl-7b --concurrency 1 4 16 32 --max-new-tokens 64 --json qwen.json --plots plots
  mmaccel bench --model ./my-llava --workload picture-336 --recipe divprune snapkv
  mmaccel bench --model ./my-qwen-7b --draft ./my-qwen-3b --lossless --recipe divprune --retain 0.1
  mmaccel bench --compare before.json after.json           exit status 1 if something got slower beyond noise
"""

#: exit status when something got slower
REGRESSION = 1
#: what the two small shapes are measured on if nothing is asked for; others take all
_QUICK = ("picture-336", "tiles-2880", "pictures-8", "video-32")


def run(
    context: typer.Context,
    which: ModelOptions,
    drafts: DraftOptions,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known architecture with random weights; 'list' shows them.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME...", help="What a request shows; 'list' shows them.  [default: all that fit]"),
    ] = None,
    recipe: Recipes = None,
    retain: Budgets = None,
    set: Settings = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N...", help="Requests at a time; 1 8 32 is usual.  [default: 1]"),
    ] = None,
    max_new_tokens: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N...", help="Tokens of an answer.  [default: 64]")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, metavar="C...", help="Clients in a closed loop, see above.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Warm runs of each.")] = 5,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw into this folder (extra: bench).")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Compare two JSON files of earlier runs.")
    ] = None,
    output: Json = None,
) -> int:
    """Measure and print, or compare."""
    if compare:
        return _compare(*compare)
    if plots is not None:
        needs.require("bench", "--plots")
    from ..programs.bench import shapes, workloads

    if shape == "list" or workload == ["list"]:
        print("shapes: " + ", ".join(shapes.SHAPES))
        print("workloads: " + ", ".join(workloads.WORKLOADS) + "; pictures-N, and page-N of 10 to 999 dots an inch")
        return 0
    if shape and which.model:
        raise MmaccelError("Give --shape or --model, not both.")
    if shape:
        shapes.shape(shape)
    for name in workload or ():
        workloads.workload(name)
    path = json_file(output)
    recipes = rows_of(recipe or ["balanced"], retain, settings(set))
    subject = _subject(shape, which)
    names = workload or (_QUICK if shape in (None, "tiny", "small") else tuple(workloads.WORKLOADS))
    cases = _cases(names, max_new_tokens or [64], batch_size or ([] if concurrency else [1]), concurrency or [])
    report = _about(shape or Path(which.model or ask.shipped().name).name, shape, subject, repeats, context.obj)
    measure(report, subject, cases, recipes, path, drafts.arguments())

    from .shared import bench_report

    show(report, output, lambda: bench_report.render(report))
    if plots is not None:
        drawn = bench_report.draw(report, plots)
        print("drawn: " + ", ".join(str(path) for path in drawn), file=sys.stderr)
    return 0


def _cases(names: Sequence[str], answers: list[int], batches: list[int], clients: list[int]) -> list[Case]:
    from ..programs.bench.run import Case

    loads = [(batch, False) for batch in batches] + [(count, True) for count in clients]
    return [Case(name, answer, size, loop) for name in names for answer in answers for size, loop in loads]


def _subject(name: str | None, which: ModelOptions) -> Subject:
    with working("getting ready"):
        import torch
        from transformers.utils import logging

        from ..families.load import place
        from ..programs.bench.shapes import build, shape
        from ..programs.bench.workloads import ModelSubject, ShapeSubject

    logging.set_verbosity_error()
    if name is None:
        return ModelSubject(*ask.load_model(which))
    with working(f"making {name} with random weights"):
        device = place(which.device)
        kind = "float32" if device.type == "cpu" else "bfloat16"
        model = build(name, device, getattr(torch, kind if which.dtype == "auto" else which.dtype))
    if which.attn:
        model.set_attn_implementation(which.attn)
    return ShapeSubject(model, shape(name))


def _about(name: str, shape: str | None, subject: Subject, repeats: int, typed: list[str]) -> dict[str, Any]:
    """The report, before there are figures in it."""
    import torch

    from ..programs.bench import provenance
    from ..programs.bench.shapes import count_parameters

    model = subject.model
    return {
        "command": provenance.command("mmaccel", arguments=typed),
        "date": provenance.today(),
        "machine": {
            "processor": provenance.processor(str(model.device)),
            "threads": torch.get_num_threads(),
            "memory": "tensors on the GPU" if model.device.type == "cuda" else "resident set of the process",
        },
        "versions": provenance.versions(),
        "model": {
            "name": name,
            "shape": shape,
            "parameters": count_parameters(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
        },
        "repeats": repeats,
        "rows": [],
    }


def measure(
    report: dict[str, Any],
    subject: Subject,
    cases: list[Case],
    recipes: list[tuple[str, Recipe]],
    path: Path | None,
    drafts: Mapping[str, Any] | None = None,
) -> None:
    """Add the rows of all cases to a report, which is written to ``path`` after each."""
    from ..programs.bench.run import Bench

    with working("measuring", len(cases)) as bar:
        bench = Bench(subject, report["repeats"], tell=bar.say)
        for case in cases:
            report["rows"] += bench.measure(case, recipes, drafts=drafts)
            if path is not None:
                write_json(path, report)
            bar.advance()


def _compare(*paths: Path) -> int:
    from .shared import bench_report

    try:
        text, regressions = bench_report.compare(*map(_read, paths))
    except (KeyError, TypeError, AttributeError) as error:
        names = " or ".join(repr(str(path)) for path in paths)
        raise MmaccelError(f"{names} lacks what mmaccel bench writes ({error}); make them with --json FILE.") from error
    print(text)
    return REGRESSION if regressions else 0


def _read(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [(row["workload"], row["recipe"], row["problem"]) for row in report["rows"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise MmaccelError(f"{str(path)!r} holds no results of mmaccel bench; make them with --json FILE.") from error
    return report
