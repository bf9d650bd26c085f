"""The metadata of the package: links of the README and URLs, with and without an address of the repository."""

from __future__ import annotations

import email
import re
import runpy
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
import yaml

import mmaccel

pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
BUILD = "import sys, hatchling.build; print(hatchling.build.prepare_metadata_for_build_wheel(sys.argv[1]))"
RELATIVE = re.compile(r"\]\((?!https?://|#)")


def metadata(place: Path, repository: str) -> Message:
    """What a build writes when `repository` is set to this."""
    place.mkdir()
    for name in ("README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, place)
    for name in ("mmaccel/core", "out"):
        (place / name).mkdir(parents=True)
    shutil.copy(ROOT / "mmaccel" / "core" / "version.py", place / "mmaccel" / "core")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert project.count('\nrepository = ""\n') == 1
    (place / "pyproject.toml").write_text(project.replace('\nrepository = ""\n', f'\nrepository = "{repository}"\n'))
    made = subprocess.run([sys.executable, "-c", BUILD, "out"], cwd=place, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (about,) = (place / "out").glob("*.dist-info/METADATA")
    return email.message_from_string(about.read_text("utf-8"))


def test_without_an_address_there_are_no_links_to_files(tmp_path: Path) -> None:
    about, readme = metadata(tmp_path / "source", ""), (ROOT / "README.md").read_text("utf-8")
    assert about["Description-Content-Type"] == "text/markdown" and about.get_all("Project-URL") is None
    text = about.get_payload()
    assert not RELATIVE.search(text) and RELATIVE.search(readme)
    # nothing but links is gone
    assert re.sub(r"!?\[([^\[\]]*)\]\((?!https?:)[^)]+\)", r"\1", readme).split() == text.split()


def test_with_an_address_links_lead_to_files_of_this_version(tmp_path: Path) -> None:
    address = "https://forge.invalid/owner/name"
    about, readme = metadata(tmp_path / "source", address), (ROOT / "README.md").read_text("utf-8")
    text, tag = about.get_payload(), f"v{mmaccel.__version__}"
    assert not RELATIVE.search(text)
    files = re.findall(rf"\]\({address}/(?:blob|raw)/{tag}/([^)#]+)", text)
    assert len(files) == len(RELATIVE.findall(readme)) and all((ROOT / name).exists() for name in files)
    assert "![Gain and cost" in text and f"({address}/raw/{tag}/docs/gain-and-cost.png)" in text
    found = dict(line.split(", ") for line in about.get_all("Project-URL"))
    assert found["Repository"] == address and found["Issues"] == f"{address}/issues"


def test_links_of_every_kind() -> None:
    led = runpy.run_path(str(ROOT / "hatch_build.py"))["led"]
    for text, bare, absolute in (
        ("[a `b`](c.md#d)", "a `b`", "[a `b`](https://h/blob/v1/c.md#d)"),
        ('![p](./p.png "t")', "p", '![p](https://h/raw/v1/p.png "t")'),
        ("[![p](p.png)](c.md)", "p", "[![p](https://h/raw/v1/p.png)](https://h/blob/v1/c.md)"),
        ("[![p](p.png)](https://x.y)", "[p](https://x.y)", "[![p](https://h/raw/v1/p.png)](https://x.y)"),
        ("[a](https://x.y) [b](#b) [c](mailto:d)",) * 3,
        ("`[a](b.md)`\n```\n[a](b.md)\n```",) * 3,
    ):
        assert (led(text, "", "v1"), led(text, "https://h/", "v1")) == (bare, absolute)
    for text in ("[a][b]\n\n[b]: c.md", '<img src="p.png">', '<a href="c.md">a</a>'):
        with pytest.raises(ValueError, match=r"write it as \[text\]\(target\)"):
            led(text, "", "v1")


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["license"] == "Apache-2.0" and cited["authors"]
    assert str(cited["version"]) == mmaccel.__version__
