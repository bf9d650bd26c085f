"""Check what was built for a release: files in wheels and sdists, metadata, sizes.

python tests/built.py DIST
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Built(NamedTuple):
    """One distribution that is built here."""

    source: Path  # the folder with its pyproject.toml
    folders: tuple[str, ...]  # below it, those that the wheel takes
    most: float  # bytes of the wheel
    others: tuple[str, ...] = ()  # files that the sdist must have beside them

    def files(self) -> dict[str, Path]:
        """The files of the wheel by their names in it."""
        return {
            path.relative_to((self.source / folder).parent).as_posix(): path
            for folder in self.folders
            for path in (self.source / folder).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }


#: by the names of their files
BUILT = {
    "mmaccel": Built(
        ROOT,
        ("mmaccel", "kernels/mmaccel_kernels", "demo/mmaccel_demo"),
        20e6,
        ("CHANGELOG.md", "hatch_build.py", "tests/zoo.py", "examples/my_method.py"),
    ),
    "mmaccel_models": Built(ROOT / "packages" / "mmaccel-models", ("mmaccel_models",), 40e6),
}


def check(dist: Path, name: str) -> str:
    """Check one wheel and its sdist; return their sizes in words.

    Raises
    ------
    AssertionError
        If a file is missing or not ours, the wheel is too large, or its metadata is wrong.
    """
    built = BUILT[name]
    (wheel,), (sdist,) = dist.glob(f"{name}-*.whl"), dist.glob(f"{name}-*.tar.gz")
    files = built.files()
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        (about,) = (content.read(one) for one in names if one.endswith(".dist-info/METADATA"))
    inside = {one for one in names if ".dist-info/" not in one}
    assert inside == set(files), f"{wheel.name}: missing {set(files) - inside}, not ours {inside - set(files)}"
    assert any(one.endswith("licenses/LICENSE") for one in names), f"{wheel.name} has no license"
    metadata = message_from_bytes(about)
    assert metadata["Name"] == name.replace("_", "-") and metadata["License-Expression"] == "Apache-2.0"
    assert b"](docs/" not in about, f"the metadata of {wheel.name} has relative links"
    with tarfile.open(sdist) as content:
        held = {one.partition("/")[2] for one in content.getnames()}
    wanted = {"README.md", "LICENSE", "pyproject.toml", *built.others}
    wanted |= {path.relative_to(built.source).as_posix() for path in files.values()}
    assert wanted <= held, f"not in {sdist.name}: {sorted(wanted - held)}"
    sizes = [path.stat().st_size / 1e6 for path in (wheel, sdist)]
    assert 1e6 * sizes[0] <= built.most, f"{wheel.name} has {sizes[0]:.1f} MB of at most {built.most / 1e6:.0f}"
    return f"{wheel.name}: {sizes[0]:.2f} MB, {len(names)} files; {sdist.name}: {sizes[1]:.2f} MB"


if __name__ == "__main__":
    for name in BUILT:
        print(check(Path(sys.argv[1]), name))
