"""The Space as Hugging Face starts it: its app runs on the packages that lie beside it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo needs gradio: pip install 'mmaccel[demo]'")
ROOT = Path(__file__).parents[2]


def test_the_app_of_the_space_starts(tmp_path: Path) -> None:
    space = tmp_path / "space"
    runpy.run_path(str(ROOT / "demo" / "space" / "make.py"))["make"](space)
    others = [path for path in sys.path if path and not path.startswith(str(ROOT))]
    # a Space says by this variable that the app is asked from outside
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(others), "GRADIO_SERVER_NAME": "0.0.0.0"}
    shows = (
        "import mmaccel, mmaccel_demo, mmaccel_kernels as k; print(mmaccel.__file__, mmaccel_demo.__file__, k.__file__)"
    )
    made = subprocess.run([sys.executable, "-c", shows], cwd=space, env=here, capture_output=True, text=True)
    assert made.stdout.count(str(space)) == 3, made.stderr
    command = [sys.executable, "app.py", "--json", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=space, env=here)
    try:
        assert server.stdout
        address = json.loads(server.stdout.readline())["address"]
        found = httpx.get(address, headers={"host": "owner-mmaccel.hf.space"}, timeout=120)
        assert found.status_code == 200 and "gradio" in found.text
        assert httpx.get(address, headers={"host": "elsewhere.example"}, timeout=120).status_code == 403
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
