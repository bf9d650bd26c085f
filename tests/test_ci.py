"""What is run before a change is taken over and at night: every test belongs to one of them, on every day the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from parts import APART, in_part

ROOT = Path(__file__).parent.parent
SCRIPTS = {name: (ROOT / ".ci" / name).read_text("utf-8") for name in ("run", "nightly", "shared")}
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github" / "workflows").iterdir()}


def jobs(*options: str) -> list[str]:
    """What `.ci/nightly` would run."""
    made = subprocess.run([ROOT / ".ci" / "nightly", *options, "--list"], capture_output=True, text=True, check=True)
    return made.stdout.splitlines()


def steps(name: str) -> list[dict[str, Any]]:
    """The steps of all jobs of a workflow."""
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def test_every_mark_has_a_run() -> None:
    """`.ci/run` takes what has no mark and a tenth of the kernels, `.ci/nightly` runs every mark whole."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = tuple(text.split(":")[0] for text in options["markers"])
    assert marks == APART
    assert f"-m 'not ({' or '.join(marks)})'" in options["addopts"] and "--strict-markers" in options["addopts"]
    assert '"$python" -m pytest -q\n' in SCRIPTS["run"] and "-m pytest -q -m kernel --part 1/10 " in SCRIPTS["run"]
    for mark in marks:
        (found,) = re.findall(rf"-m pytest -q -m {mark}(?: (.*))?\n", SCRIPTS["nightly"])
        # what this leaves out is what the job beside it does
        found = found.replace(
            " --deselect tests/kernels/test_compilers.py"
            "::test_every_configuration_compiles_and_spills_what_the_table_says",
            "",
        )
        expected = {"full": '--part "$part"', "kernel": '--part "$part"', "vllm": "tests/vllm_plugin"}
        assert found == expected.get(mark, ""), mark
    assert "tests/kernels/compilers.py --jobs" in SCRIPTS["nightly"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_ask_for_nothing_that_changes_from_day_to_day(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=True)
    assert not re.search(r"\bdate\b|RANDOM|shuf|git (diff|log)", SCRIPTS[name])


@pytest.mark.parametrize("parts", (1, 2, 8, 11))
def test_parts_of_the_night_are_all_of_it(parts: int) -> None:
    every, found = jobs(), [jobs("--part", f"{k}/{parts}") for k in range(1, parts + 1)]
    shared = [job for job in every if all(job in part for part in found)] if parts > 1 else every[:2]
    assert shared == ["full", "kernels"]
    assert sorted(job for part in found for job in part[2:]) == sorted(every[2:])
    # a function of every name is there
    assert all(re.search(rf"^{job.split()[0]}\(\)", SCRIPTS["nightly"] + SCRIPTS["shared"], re.M) for job in every)


@pytest.mark.parametrize("part", (["0/2"], ["3/2"], ["1"], ["1/0"], ["x/2"], [""], []))
def test_a_part_that_is_none_is_refused(part: list[str]) -> None:
    made = subprocess.run([ROOT / ".ci" / "nightly", "--part", *part], capture_output=True, text=True)
    assert made.returncode == 2 and "K from 1 to N" in made.stderr


def test_every_test_is_in_one_part() -> None:
    names = [f"tests/test_{file}.py::test_it[{case}]" for file in range(20) for case in range(100)]
    for n in (1, 2, 8):
        parts = [[name for name in names if in_part(name, k, n)] for k in range(1, n + 1)]
        assert sorted(name for part in parts for name in part) == sorted(names)
        assert max(map(len, parts)) < 1.3 * len(names) / n


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone, and collects nothing where two are equal."""
    count = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not [name for name, files in count.items() if files > 1 and name not in ("__init__.py", "conftest.py")]


@pytest.mark.full
def test_all_cases_together_are_at_most_20_000() -> None:
    """A part of the night, and whoever runs everything, must come to an end; see `pairwise.py`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    apart = "not (browser or ray or vllm)"
    made = subprocess.run([*command, "-m", apart], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr
    assert 10_000 < sum("::" in line for line in made.stdout.splitlines()) <= 20_000


def test_nothing_is_waited_for_by_sleeping() -> None:
    """`waiting.until` asks until something is there. What sleeps for another reason says so in its line."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep":
                line = source.splitlines()[node.lineno - 1]
                if path.name != "waiting.py" and "# not to wait for anything" not in line:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_workflows_run_the_scripts() -> None:
    assert [step["run"] for step in steps("ci") if "run" in step] == [".ci/run"]
    (job,) = WORKFLOWS["nightly"]["jobs"].values()
    parts = job["strategy"]["matrix"]["part"]
    assert parts == list(range(1, len(parts) + 1))
    said = [step["run"] for step in steps("nightly") if "run" in step]
    assert said == [f".ci/nightly --part ${{{{ matrix.part }}}}/{len(parts)}"]
    for name in ("ci", "nightly"):
        (job,) = WORKFLOWS[name]["jobs"].values()
        assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    # YAML reads the key `on` as true
    assert set(WORKFLOWS["ci"][True]) == {"push", "pull_request"} and "schedule" in WORKFLOWS["nightly"][True]


def test_only_a_tag_is_published() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    published = [name for name, job in jobs.items() if any("publish" in step.get("uses", "") for step in job["steps"])]
    assert published == ["publish"] and jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    (step,) = (step for step in steps("release") if "Links" in step.get("name", ""))
    # the setting that this line fills in
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 's|^repository = \\"\\"$|' in step["run"] and project.count('\nrepository = ""\n') == 1


def test_the_release_is_rehearsed() -> None:
    """What the release builds and checks, `.ci/run` and the night do too, and they run the commands of the README."""
    released = [step["run"] for step in steps("release") if step.get("run", "").startswith("python -m build")]
    sources = [command.split()[-1] if "--outdir" in command else "." for command in released]
    assert f"for source in {' '.join(sources)}; do" in SCRIPTS["shared"]
    for check in ("-m twine check --strict", "tests/built.py"):
        assert check in SCRIPTS["shared"] and any(check in step.get("run", "") for step in steps("release"))
    for name in ("run", "nightly"):
        assert all(f"{part} " in SCRIPTS[name] for part in ("install_built", "from_the_wheel"))
        assert "build_release\n" in SCRIPTS[name]
    readme = (ROOT / "README.md").read_text("utf-8")
    shell = "".join(re.findall(r"```bash\n(.*?)```", readme, re.S))
    commands = re.findall(r"(?:^|&& )mmaccel (\w+.*)$", shell, re.M)
    # a server of a model of the hub; tests/serve starts it with a shipped one
    started = [command for command in commands if not command.startswith("serve ")]
    assert started and all(f'"$1/bin/mmaccel" {command}\n' in SCRIPTS["shared"] for command in started)
    assert '"$1/bin/python" "$root/.ci/readme.py"' in SCRIPTS["shared"]
