"""Files for hosting: the images of docker/ and the Space of demo/space. What they name is there, and versions agree."""

from __future__ import annotations

import fnmatch
import functools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {
    name: {one.name: one for one in map(Requirement, lines)} for name, lines in PROJECT["optional-dependencies"].items()
}
IMAGES = sorted(path.name.removesuffix(".Dockerfile") for path in (ROOT / "docker").glob("*.Dockerfile"))


def instructions(image: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def copied(image: str) -> dict[str, str]:
    """Where in the image each copied file or folder goes."""
    found = {}
    for word, rest in instructions(image):
        if word == "COPY":
            *sources, target = shlex.split(rest)
            found.update({name: target + name if target.endswith("/") else target for name in sources})
    return found


# ------------------------------------------------------------------------------------------------------------- images


def test_the_images_are_those_that_are_built() -> None:
    assert IMAGES == ["serve", "vllm"]
    script = (ROOT / "docker" / "build").read_text("utf-8")
    assert "set -- serve vllm" in script and "docker/build\n" in (ROOT / ".ci" / "nightly").read_text("utf-8")


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(image: str) -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    refused = [line for line in lines[2:] if line and line[0] not in "!#"]
    for name in copied(image):
        assert (ROOT / name).exists() and name in allowed, name
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in refused)


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_enough_to_build_the_wheel(image: str, tmp_path: Path) -> None:
    """Metadata and the list of files, as pip asks for them."""
    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    for name, target in copied(image).items():
        place = tmp_path / target.strip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("screenshots", "models", "__pycache__"))
        else:
            shutil.copy(ROOT / name, place)
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert [path.name.split("-")[0] for path in tmp_path.glob("*.whl")] == ["mmaccel"]


@pytest.mark.parametrize("image", IMAGES)
def test_versions_and_extras_of_an_image(image: str) -> None:
    text = " ".join(rest for _, rest in instructions(image))
    (base,) = (rest for word, rest in instructions(image) if word == "FROM")
    named = {extra for found in re.findall(r"/source\[([\w,]+)\]", text) for extra in found.split(",")}
    assert named and named <= set(EXTRAS)
    name, _, tag = base.partition(":")
    if image == "vllm":
        version = tag.removeprefix("v")
        assert name == "vllm/vllm-openai" and version in EXTRAS["vllm"]["vllm"].specifier
        assert f'"vllm=={version}"' in text
    else:
        assert name == "python" and f"{tag.removesuffix('-slim')}.0" in SpecifierSet(PROJECT["requires-python"])


def test_the_server_of_the_image_takes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel import cli
    from mmaccel.cli import serve

    (entry,) = (rest for word, rest in instructions("serve") if word == "ENTRYPOINT")
    program, *words = yaml.safe_load(entry)
    monkeypatch.setattr(serve, "run", functools.wraps(serve.run)(lambda *_, **__: 0))
    assert program == "mmaccel" and cli.main(words) == 0


@pytest.mark.parametrize(("path", "told"), [("", "so no image is built"), ("works", "mmaccel-serve is built")])
def test_building_without_a_builder_says_so(path: str, told: str, tmp_path: Path) -> None:
    """With one that works it is asked to build; with none, or one whose daemon is away, nothing fails."""
    for name, code in (("docker", 1), ("podman", 0 if path else 1)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/log"\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    made = subprocess.run(
        [ROOT / "docker" / "build", "serve"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert made.returncode == 0 and told in made.stdout, made.stderr
    calls = (tmp_path / "log").read_text().splitlines()
    built = [call for call in calls if " build " in call]
    assert built == (["podman build -f docker/serve.Dockerfile -t mmaccel-serve ."] if path else [])


# -------------------------------------------------------------------------------------------------------------- Space


def front_matter() -> dict[str, Any]:
    head = re.match(r"---\n(.*?)\n---\n", (ROOT / "demo" / "space" / "README.md").read_text("utf-8"), re.S)
    assert head
    return yaml.safe_load(head[1])


def test_settings_of_the_space() -> None:
    """As https://huggingface.co/docs/hub/spaces-config-reference has them."""
    found = front_matter()
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert found["title"] and found["sdk"] == "gradio" and len(found["emoji"]) == 1
    assert {found["colorFrom"], found["colorTo"]} <= colours
    assert len(found["short_description"]) <= 60 and found["license"] == PROJECT["license"].lower()
    # texts, which YAML without quotes would make numbers of
    assert isinstance(found["sdk_version"], str) and isinstance(found["python_version"], str)
    assert found["sdk_version"] in EXTRAS["demo"]["gradio"].specifier
    assert f"{found['python_version']}.0" in SpecifierSet(PROJECT["requires-python"])
    assert found["app_file"] == "app.py"


def test_the_space_is_made_whole(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "demo" / "space" / "make.py"))["make"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("README.md", "requirements.txt", "LICENSE", front_matter()["app_file"]),
        *("mmaccel", "mmaccel_kernels", "mmaccel_demo"),
    }
    wanted = {Requirement(line).name for line in (tmp_path / "requirements.txt").read_text("utf-8").splitlines()}
    assert {"torch", "transformers", "av"} <= wanted and "gradio" not in wanted
    # larger files need another kind of storage there
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10e6
