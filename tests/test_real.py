"""benchmarks/real.sh: what it asks lmms-eval for, that it goes on where it was, and what becomes of a run that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "real.sh"
#: leaves what lmms-eval leaves, and says what it was asked; ``uniform`` fails as lmms-eval does, with status 0 and no result
STAND_IN = """
import json, pathlib, sys
given = dict(zip(sys.argv[1:], sys.argv[2:]))
with open("asked.jsonl", "a") as asked:
    asked.write(json.dumps(given) + "\\n")
if "recipe=uniform" not in given["--model_args"]:
    out = pathlib.Path(given["--output_path"], "model")
    out.mkdir(parents=True)
    figures = {"accuracy,none": 0.75, "accuracy_stderr,none": 0.05}
    (out / "1_results.json").write_text(json.dumps({"results": {given["--tasks"]: figures}}))
"""


def start(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "there").mkdir(exist_ok=True)
    (tmp_path / "there" / "lmms_eval.py").write_text(STAND_IN)
    path = os.pathsep.join([str(tmp_path / "there"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments, str(tmp_path / "real")],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_goes_on_and_a_failure_does_not_stop_the_others(tmp_path):
    first = start(tmp_path, "--dry-run")
    asked = [json.loads(line) for line in (tmp_path / "real" / "asked.jsonl").read_text().splitlines()]
    assert first.returncode == 1 and "FAILED: mini-llava, uniform 0.25" in first.stdout
    assert [one["--model"] for one in asked] == ["llava_hf", *["mmaccel_llava"] * 4]
    assert "recipe" not in asked[0]["--model_args"]
    assert asked[2]["--model_args"].endswith("recipe=aim-merge,retain=0.25")
    for row in ("| `none` | 75.0 ±5.0 |", "| `uniform 0.25` | - |", "| `vl-cache 0.25` | 75.0 ±5.0 |"):
        assert row in first.stdout

    (tmp_path / "real" / "mini-llava" / "tuned.json").write_text('{"name": "found"}')
    assert start(tmp_path, "--dry-run").returncode == 1
    again = [json.loads(line) for line in (tmp_path / "real" / "asked.jsonl").read_text().splitlines()][len(asked) :]
    assert [one["--model_args"].partition("recipe=")[2].partition(",")[0] for one in again] == [
        "uniform",
        str(tmp_path / "real" / "mini-llava" / "tuned.json"),
    ]


def test_what_is_left_is_said_without_running(tmp_path):
    listed = start(tmp_path, "--list")
    left = [line for line in listed.stdout.splitlines() if " -m lmms_eval " in line]
    assert listed.returncode == 0 and len(left) == 2 * 5 * 5
    assert not (tmp_path / "real" / "asked.jsonl").exists()
    assert sum("--limit 300" in line for line in left) == 10 == sum("--tasks videomme" in line for line in left)
