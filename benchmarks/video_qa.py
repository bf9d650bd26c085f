"""Video QA in bulk with the shipped video model, accelerated against full: accuracy, wall time, shares of the time.

``python benchmarks/video_qa.py --out benchmarks/results/video-qa-cpu.json`` makes clips of the suite (mp4, all of its video
tasks), asks ``mmaccel video-qa`` about them once in full and once with every recipe given, each in a process of its own, the
full one first and last, and writes the summaries; ``python -m training.results`` puts them into the documentation. Nothing is
downloaded.

By default ``divprune`` shortens the prompt, and policies shrink the cache after it was read: ``look-m`` ranks keys by all
queries, ``tova`` by the last one of the prompt alone, with ``recent`` beside the newest keys.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmaccel.programs.bench import provenance
from mmaccel.suite import VIDEO_TASKS, make_suite
from mmaccel.suite.files import export

SIDE = 112
RECIPES = ["divprune@0.25", "look-m@0.25", "tova@0.25", "tova@0.25,recent=0.1"]


def summary(questions: Path, folder: Path, recipe: str, frames: int, number: int) -> dict[str, Any]:
    """What ``mmaccel video-qa`` says at its end."""
    name, _, rest = recipe.partition("@")
    retain, *more = rest.split(",")
    told = folder / f"{number}.json"
    options = ["--recipe", name, *(["--retain", retain] if retain else []), "--frames", str(frames)]
    options += [word for option in more for word in ("--set", option)]
    command = [sys.executable, "-m", "mmaccel", "video-qa", str(questions), "-o", str(told.with_suffix(".jsonl"))]
    subprocess.run([*command, *options, "--json", str(told)], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    left_out = ("command", "date", "versions", "settings")
    return {"recipe": recipe, **{key: value for key, value in found.items() if key not in left_out}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=10, help="clips of every task (default: 10, 50 in all)")
    parser.add_argument("--length", type=int, default=16, help="frames in a clip, and shown of it (default: 16)")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="NAME[@RETAIN[,OPTION=VALUE...]]")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clips = list(make_suite("test", VIDEO_TASKS, options.clips, frames=options.length))
        questions = export(clips, Path(folder), pixels=SIDE)
        recipes = ["none", *options.recipes, "none"]
        runs = [summary(questions, Path(folder), name, options.length, at) for at, name in enumerate(recipes)]
    report = {
        "command": provenance.command("python", "benchmarks/video_qa.py"),
        "date": provenance.today(),
        "machine": provenance.processor(),
        "versions": provenance.versions(),
        "clips": len(clips),
        "frames": options.length,
        "runs": runs,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for run in runs:
        print(f"{run['recipe']:24} accuracy {run['accuracy']:.3f}  wall {run['wall_seconds']:.1f} s")


if __name__ == "__main__":
    main()
