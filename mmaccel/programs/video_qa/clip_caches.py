"""Caches of clips in a folder: a later run, with other questions, reads no clip again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import MmaccelError
from ..cache_file import read_value, write_value
from ..identity import digest


class ClipCaches:
    """A folder with a file for every clip that was read with a model and a recipe.

    fingerprint : of both, see :func:`.cache_file.fingerprint_of`. note : called with a sentence where a file cannot be used.
    loaded, saved : how many clips were.

    Raises MmaccelError if the folder cannot be written to.
    """

    def __init__(
        self, folder: str | os.PathLike[str], model: Any, fingerprint: dict[str, Any], note: Callable[[str], None]
    ) -> None:
        self.folder, self.model, self.fingerprint, self._note = Path(folder), model, fingerprint, note
        self.loaded = self.saved = 0
        if not self.folder.is_dir() or not os.access(self.folder, os.W_OK):
            raise MmaccelError(
                f"caches={str(folder)!r} is not a folder that can be written to; create it, or leave it out."
            )

    def find(self, about: Any) -> Any:
        """The kept data of a clip that has this content; None where there is none, or it cannot be read."""
        path = self._path(about)
        if not path.exists():
            return None
        try:
            found = read_value(path, self.model, self.fingerprint)
        except MmaccelError as error:
            self._note(f"a kept cache was computed again: {error}")
            return None
        self.loaded += 1
        return found

    def keep(self, about: Any, value: Any) -> None:
        """Keep what was read of a clip; where there is no room for it, it is computed again the next time."""
        try:
            write_value(self._path(about), value, self.fingerprint)
        except MmaccelError as error:
            self._note(f"a cache was not kept: {error}")
            return
        self.saved += 1

    def _path(self, about: Any) -> Path:
        return self.folder / f"clip-{digest((self.fingerprint, about))[:32]}.safetensors"


def content_of(path: str | os.PathLike[str]) -> str:
    """Digest of a video file, or of the files of a folder of pictures. Raises OSError if one cannot be read."""
    root, found = Path(path), hashlib.sha256()
    for one in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if one.is_file():
            found.update(f"{one.relative_to(root)} {one.stat().st_size} ".encode())
            with one.open("rb") as file:
                while piece := file.read(1 << 20):
                    found.update(piece)
    return found.hexdigest()
