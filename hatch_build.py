"""The part of the package's metadata that depends on where the repository is.

README.md links to files of the repository. A package page has none of them beside it, so these links must be absolute. The
address is one setting in pyproject.toml:

    [tool.hatch.metadata.hooks.custom]
    repository = "https://HOST/OWNER/NAME"

With it, links and pictures lead to the tag of the version that is built, and the metadata has the URLs of the project. Without
it, a relative link becomes its text, and there are no URLs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: code, in which nothing is a link
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.M | re.S)
#: where a link leads if that is a file of the repository
TARGET = r'\((?P<target>(?![a-z]+:|//|#)[^)\s]+)(?P<title>\s+"[^"]*")?\)'
PICTURE = re.compile(r"(?P<mark>!)\[(?P<text>[^\[\]]*)\]" + TARGET, re.I)
#: the text may hold pictures, but no other link
LINK = re.compile(r"(?P<mark>(?<!!))\[(?P<text>(?:[^\[\]]|!\[[^\[\]]*\]\([^)]*\))*)\]" + TARGET, re.I)
#: links that are written in another way
OTHER = re.compile(r'^ {0,3}\[[^\]]+\]: +(?![a-z]+:|//|#)|\b(?:src|href)="(?![a-z]+:|//|#)', re.I | re.M)


def led(text: str, repository: str, tag: str) -> str:
    """The text of a page with its relative links made absolute, or replaced by their text if ``repository`` is empty.

    Raises
    ------
    ValueError
        If a relative link is written as a reference or in HTML.
    """

    def lead(found: re.Match[str]) -> str:
        if not repository:
            return found["text"]
        kind = "raw" if found["mark"] else "blob"
        target = f"{repository.rstrip('/')}/{kind}/{tag}/{found['target'].removeprefix('./')}"
        return f"{found['mark']}[{found['text']}]({target}{found['title'] or ''})"

    kept: list[str] = []

    def hide(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    bare = CODE.sub(hide, text)
    if wrong := OTHER.search(bare):
        raise ValueError(f"README.md has the relative link {wrong[0].strip()!r}: write it as [text](target).")
    # first the pictures, which may be the text of a link
    bare = LINK.sub(lead, PICTURE.sub(lead, bare))
    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], bare)


def urls(repository: str) -> dict[str, str]:
    """The URLs of the project; none if ``repository`` is empty."""
    if not repository:
        return {}
    base = repository.rstrip("/")
    return {
        "Repository": base,
        "Documentation": f"{base}/tree/HEAD/docs",
        "Changelog": f"{base}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


class Metadata(MetadataHookInterface):
    """Sets the fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in both fields."""
        repository = self.config.get("repository", "")
        version = re.search(
            r'__version__ = "(.+)"', (Path(self.root) / "mmaccel" / "core" / "version.py").read_text("utf-8")
        )
        assert version, "mmaccel/core/version.py has no __version__"
        text = led((Path(self.root) / "README.md").read_text("utf-8"), repository, f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository)
