"""Does lmms-eval find the same accuracy as ``mmaccel eval``, in full and accelerated?

Asks a shipped model the questions of the suite twice: by lmms-eval, which loads the model, applies the chat template,
generates and averages by itself (in full with its own wrapper, accelerated with ours), and by ``mmaccel eval --data`` on the
same files. Accuracy must be equal, and so must every answer; those that differ are listed in the JSON, and the exit status is
1. Both are greedy, in one dtype, on the CPU, with one question at a time, since rounding differs in a batch.

    benchmarks/lmms/environment.sh build/lmms-eval
    build/lmms-eval/bin/python benchmarks/lmms/run.py --out benchmarks/results/lmms-eval-mini-llava.json \\
        --update benchmarks/README.md
    for model in mini-llava-deep mini-qwen-vl; do
        build/lmms-eval/bin/python benchmarks/lmms/run.py --model $model \\
            --out benchmarks/results/lmms-eval-$model.json --update benchmarks/README.md
    done
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.core.shipped_models import located
from mmaccel.programs.bench import provenance
from mmaccel.programs.identity import code_identity
from mmaccel.suite import IMAGE_TASKS, VIDEO_TASKS, export, make_suite

TASK = "mmaccel_suite"


class Wrapper(NamedTuple):
    """How lmms-eval runs a shipped model."""

    bare: str  # lmms-eval's own
    ours: str
    arguments: str  # so that both programs see the same pixels and frames in the same dtype
    dtype: str
    tasks: tuple[str, ...]
    recipes: tuple[str, ...]  # one of every site, and two budgets of the default one
    pixels: int = 112  # along a side of a picture


MODELS = {
    "mini-llava": Wrapper(
        "llava_hf",
        "mmaccel_llava",
        "dtype=float32",
        "float32",
        IMAGE_TASKS,
        ("balanced 0.25", "balanced 0.1", "divprune 0.25", "resize 0.25", "tome 0.25", "fastv 0.25", "snapkv 0.25"),
    ),
    "mini-llava-deep": Wrapper(
        "llava_hf",
        "mmaccel_llava",
        "dtype=float32",
        "float32",
        IMAGE_TASKS,
        ("balanced 0.25", "balanced 0.1", "divprune 0.25", "tome 0.25", "fastv 0.25", "snapkv 0.25"),
        pixels=160,
    ),
    # this wrapper has no dtype, and without sizes it enlarges small pictures
    "mini-qwen-vl": Wrapper(
        "qwen2_5_vl",
        "mmaccel_qwen2_5_vl",
        "min_pixels=9216,max_pixels=65536,max_num_frames=16",
        "bfloat16",
        (*IMAGE_TASKS, *VIDEO_TASKS),
        ("balanced 0.25", "balanced 0.1", "divprune 0.25", "resize 0.25", "tome 0.5", "fastv 0.25", "snapkv 0.25"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mini-llava", help="default: mini-llava")
    parser.add_argument("--limit", type=int, default=20, help="questions a task of the suite (default: 20)")
    parser.add_argument("--recipes", nargs="+", metavar="'NAME RETAIN'", help="default: one of every site")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--update", type=Path, help="write the table between the marks of this page")
    args = parser.parse_args()
    model = Path(located(args.model))
    recipes = args.recipes or MODELS[args.model].recipes
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # all paths are relative to this folder, so that commands name no place of this machine
        shutil.copytree(model, work / model.name)
        shutil.copytree(Path(__file__).parent / "task", work / "task")
        items = list(make_suite("test", MODELS[args.model].tasks, args.limit))
        export(items, work, pixels=MODELS[args.model].pixels)
        names = [item.name for item in items]
        rows = []
        for title in ("none", *recipes):
            rows.append(row := compare(model.name, title, names, work))
            print(f"{title:<16}{row['lmms_eval']['accuracy']:>8.4f}{row['mmaccel_eval']['accuracy']:>8.4f}", end="")
            print(f"{row['same_answers']:>6} of {len(names)} answers are the same", flush=True)
    result = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()})",
        "versions": provenance.versions(("lmms-eval", "torch", "transformers", "mmaccel"))
        | {"code": code_identity()[:16]},
        "model": model.name,
        "questions": len(names),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.update:
        put_between(args.update, f"lmms-eval-{model.name}", table(result))
    equal = all(r["lmms_eval"]["accuracy"] == r["mmaccel_eval"]["accuracy"] and not r["differ"] for r in rows)
    return 0 if equal else 1


def compare(model: str, title: str, names: list[str], work: Path) -> dict[str, Any]:
    """One recipe by both programs; ``none`` is lmms-eval's own wrapper, without anything of ours."""
    recipe, _, retain = title.partition(" ")
    bare, ours, arguments, dtype, *_ = MODELS[model]
    wrapper, options = (bare, "") if recipe == "none" else (ours, f",recipe={recipe},retain={retain}")
    theirs = ["--model", wrapper, "--model_args", f"pretrained={model},{arguments},device_map=cpu{options}"]
    theirs += [
        "--device",
        "cpu",
        "--tasks",
        TASK,
        "--include_path",
        "task",
        "--log_samples",
        "--output_path",
        f"out/{title}",
    ]
    kinds = ("results.json", f"samples_{TASK}.jsonl")
    found, samples = run("lmms_eval", theirs, work, [f"out/{title}/*/*_{kind}" for kind in kinds])
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    said = {names[line["doc_id"]]: line["filtered_resps"] for line in lines}

    here = ["eval", "--model", model, "--recipe", recipe, *(["--retain", retain] if retain else [])]
    here += [
        "--data",
        "suite.jsonl",
        "--batch-size",
        "1",
        "--device",
        "cpu",
        "--dtype",
        dtype,
        "--json",
        "eval.json",
    ]
    (report,) = run("mmaccel", here, work, ["eval.json"])
    row = json.loads(report.read_text(encoding="utf-8"))["rows"][-1]
    report.unlink()
    answers = {answer["name"]: answer["answer"] for answer in row["answers"]}
    assert list(answers) == names == sorted(said, key=names.index), "both programs must have asked every question"
    return {
        "recipe": title,
        "lmms_eval": {
            "command": shlex.join(["lmms-eval", *theirs]),
            "accuracy": json.loads(found.read_text(encoding="utf-8"))["results"][TASK]["accuracy,none"],
        },
        "mmaccel_eval": {"command": shlex.join(["mmaccel", *here]), "accuracy": row["figures"]["accuracy"]},
        "same_answers": sum(said[name].strip() == answers[name] for name in names),
        "differ": [
            {"question": name, "lmms_eval": said[name], "mmaccel_eval": answers[name]}
            for name in names
            if said[name].strip() != answers[name]
        ],
    }


def run(module: str, arguments: list[str], work: Path, results: list[str]) -> list[Path]:
    """Run a program of this environment, offline, and return the file that it leaves for each pattern of ``results``; what it
    printed is shown if it fails or leaves none."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=work, env=offline, capture_output=True, text=True
    )
    found = [list(work.glob(pattern)) for pattern in results]
    if done.returncode or any(len(files) != 1 for files in found):
        how = f"ended with status {done.returncode}" if done.returncode else "left no result"
        printed = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}".strip() or "nothing"
        sys.exit(f"{module} {shlex.join(arguments)} {how}; it printed:\n{printed}")
    return [files[0] for files in found]


def table(result: dict[str, Any]) -> str:
    rows = [["recipe", "accuracy by lmms-eval", "by `mmaccel eval`", "same answers"]]
    for row in result["rows"]:
        rows.append(
            [
                f"`{row['recipe']}`",
                percent(row["lmms_eval"]["accuracy"]),
                percent(row["mmaccel_eval"]["accuracy"]),
                f"{row['same_answers']} of {result['questions']}",
            ]
        )
    used = ", ".join(f"{name} {result['versions'][name]}" for name in ("lmms-eval", "torch", "transformers"))
    return f"{markdown(rows)}\n\n`{result['command']}`, {result['date']}, {result['machine']}, {used}."


if __name__ == "__main__":
    sys.exit(main())
