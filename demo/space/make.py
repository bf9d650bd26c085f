"""Write the repository of a Hugging Face Space that shows the demo: its settings, its requirements, the app, and the packages.

python demo/space/make.py FOLDER

Push the folder to a Space. It holds the code of mmaccel itself, so the Space needs no release of mmaccel.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: what the app imports, at the top of the Space
PACKAGES = ("mmaccel", "kernels/mmaccel_kernels", "demo/mmaccel_demo")


def requirements() -> list[str]:
    """Those of mmaccel and of its extra ``video``; a Space installs Gradio by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["video"]]


def make(folder: Path) -> None:
    """Write the files of the Space into a new or empty folder.

    Raises
    ------
    FileExistsError
        If the folder has one of the packages already.
    """
    for package in PACKAGES:
        source = ROOT / package
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (HERE / "README.md", ROOT / "demo" / "app.py", ROOT / "LICENSE"):
        shutil.copy(source, folder)
    (folder / "requirements.txt").write_text("\n".join(requirements()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
