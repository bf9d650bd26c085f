"""Heads spread over processes (``tp_plan``): the same answers, or a refusal, of every method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmaccel import methods, recipes

# by choice: one of each kind that works
WORKING = ("divprune", "vtc-cls", "snapkv", "kivi")
# by choice: some that compare heads
REFUSED = ("fastv", "gemfilter", "vl-cache", "tova", "aim")


def answers(tmp_path: Path, asked: list[str]) -> dict[str, float | str]:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = str(Path(__file__).with_name("ranks.py"))
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, program, str(out), *asked], capture_output=True, text=True, env=quiet, timeout=900)
    assert out.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def check(found: dict[str, float | str]) -> list[str]:
    """Names of those that the heads' being apart refuses; all others are refused of one process too, or the same."""
    apart = {name: by for name, by in found.items() if not isinstance(by, str) and not by < 1e-3}
    assert not apart and isinstance(found["none"], float)
    return [name for name, by in found.items() if isinstance(by, str) and "spread over 2 devices (tp_plan)" in by]


@pytest.mark.full
def test_answers_of_every_recipe_are_the_same_or_refused(tmp_path):
    # frames are chosen, and pictures made smaller, before the model is asked
    every = [name for name, one in recipes().items() if all(methods()[s.method].site != "frames" for s in one.stages)]
    found = answers(tmp_path, every)
    refused = check(found)
    assert set(REFUSED) <= set(refused) and found["fastv"].startswith("fastv compares the heads of a layer")
    assert not set(WORKING) & set(refused)
    assert len([name for name, by in found.items() if not isinstance(by, str)]) > 50
