"""Two real models on public benchmarks through lmms-eval, bare and with recipes: see ``benchmarks/real.sh``."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mmaccel.cli.ask import shipped
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.programs.bench import provenance
from mmaccel.suite import export, make_suite


class Model(NamedTuple):
    """A model as lmms-eval runs it: by its own wrapper and by ours."""

    pretrained: str
    bare: str
    ours: str
    arguments: str = ""


class Task(NamedTuple):
    """A task of lmms-eval, the figure of it that is published, and how many questions of it are asked."""

    name: str
    metric: str
    limit: int | None = None


MODELS = {
    "qwen2.5-vl-3b": Model(
        "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl", "mmaccel_qwen2_5_vl", "max_pixels=1003520,max_num_frames=32"
    ),
    "llava-onevision-0.5b": Model(
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "llava_hf", "mmaccel_llava", "max_frames_num=32"
    ),
}
TASKS = (
    Task("mmstar", "average,none"),
    Task("textvqa_val", "exact_match,none"),
    Task("pope", "pope_accuracy,none"),
    Task("chartqa", "relaxed_overall,none"),
    Task("videomme", "videomme_perception_score,none", 300),
)
#: the default, then those that lead the tables of the shipped models: of tokens before the language model, and of its cache
RECIPES = ("none", "balanced", "aim-merge 0.25", "uniform 0.25", "vl-cache 0.25")

#: what a dry run goes through in their place
LOCAL = {"mini-llava": Model("models/mini-llava", "llava_hf", "mmaccel_llava", "dtype=float32,device_map=cpu")}
LOCAL_TASKS = (Task("mmaccel_suite", "accuracy,none", 8),)


def command(model: Model, title: str, task: Task, out: Path) -> list[str]:
    """One run of lmms-eval; ``none`` has nothing of ours in it."""
    name, _, retain = title.partition(" ")
    wrapper = model.bare if name == "none" else model.ours
    said = [f"pretrained={model.pretrained}", model.arguments]
    said += [] if name == "none" else [f"recipe={name}", f"retain={retain}" if retain else ""]
    line = ["--model", wrapper, "--model_args", ",".join(filter(None, said)), "--tasks", task.name, "--batch_size", "1"]
    line += ["--limit", str(task.limit)] if task.limit else []
    return [*line, "--log_samples", "--output_path", str(out)]


def result(folder: Path) -> dict[str, Any] | None:
    """What a finished run left, the newest."""
    found = sorted(folder.glob("*/*_results.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def runs(folder: Path, models: dict[str, Model], tasks: tuple[Task, ...]) -> Iterator[tuple[str, str, Task, Path]]:
    """Model, recipe, task and place of every run; ``FOLDER/MODEL/tuned.json`` is a recipe too if it is there."""
    for name in models:
        tuned = folder / name / "tuned.json"
        for title in (*RECIPES, *([str(tuned)] if tuned.is_file() else [])):
            for task in tasks:
                yield name, title, task, folder / name / ("tuned" if ".json" in title else title) / task.name


def table(folder: Path, models: dict[str, Model], tasks: tuple[Task, ...]) -> str:
    """One line a model and recipe, in percent with the standard error that lmms-eval gives; ``-`` has not been run."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, title, task, place in runs(folder, models, tasks):
        cell, found = "-", result(place)
        if found is not None:
            figures = found["results"][task.name]
            value, error = figures[task.metric], figures.get(task.metric.replace(",", "_stderr,"))
            scale = 1 if value > 1 else 100
            cell = f"{scale * value:.1f}" + (f" ±{scale * error:.1f}" if isinstance(error, float) else "")
        lines.setdefault((name, "tuned" if ".json" in title else title), []).append(cell)
    head = ["model", "recipe", *(task.name + (f" ({task.limit})" if task.limit else "") for task in tasks)]
    rows = markdown([head, *([name, f"`{title}`", *cells] for (name, title), cells in lines.items())])
    return f"{rows}\n\n`benchmarks/real.sh`, {provenance.today()}."


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/real.sh")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("real"), help="where results are kept (default: real)"
    )
    parser.add_argument("--dry-run", action="store_true", help="a shipped model on the local task, on a CPU")
    parser.add_argument("--list", action="store_true", help="only say which runs are left")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    args = parser.parse_args()
    folder, update = args.folder.absolute(), args.update and args.update.absolute()
    models, tasks = (LOCAL, LOCAL_TASKS) if args.dry_run else (MODELS, TASKS)
    folder.mkdir(parents=True, exist_ok=True)
    extra = prepare(folder) if args.dry_run else []
    failed = 0
    for name, title, task, place in runs(folder, models, tasks):
        if result(place) is not None:
            continue
        line = [sys.executable, "-m", "lmms_eval", *command(models[name], title, task, place), *extra]
        print(shlex.join(line), flush=True)
        if not args.list:
            done = subprocess.run(line, cwd=folder)
            # lmms-eval leaves with 0 from some failures: what counts is the result
            if done.returncode or result(place) is None:
                failed += 1
                print(f"FAILED: {name}, {title}, {task.name}", flush=True)
    print(text := table(folder, models, tasks))
    if update:
        put_between(update, "real", text)
    return 1 if failed else 0


def prepare(folder: Path) -> list[str]:
    """The local task and its questions, in ``folder``, and what lmms-eval must be told to find them."""
    shutil.copytree(Path(__file__).parent / "task", folder / "task", dirs_exist_ok=True)
    for name in LOCAL:
        shutil.copytree(shipped().with_name(name), folder / "models" / name, dirs_exist_ok=True)
    export(list(make_suite("test", ("existence", "colour"), 4)), folder)
    return ["--include_path", "task", "--device", "cpu"]


if __name__ == "__main__":
    sys.exit(main())
