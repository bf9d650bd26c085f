"""What a model is known by: all that its files hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...errors import MmaccelError

#: seconds after which a reader of files is shown how far it has come
_QUIET = 2.0
_CHUNK = 8 << 20


def digests(model: str) -> dict[str, str | None]:
    """Of a folder, a digest of every byte of every file that may decide an answer: weights, configurations, tokenizer, chat
    templates, processors, code. Of a hub id, the commit that it stands for on this machine, which names them all; or None.

    Nothing is taken from an earlier reading. A bar on standard error shows a reading that takes long.

    Raises
    ------
    MmaccelError
        If a file cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        return {"commit": _commit(model)}
    from tqdm import tqdm

    files = _files(folder)
    found: dict[str, str | None] = {}
    try:
        with tqdm(
            total=sum(path.stat().st_size for path in files),
            desc="reading the model's files",
            unit="B",
            unit_scale=True,
            delay=_QUIET,
            disable=None,
            leave=False,
        ) as bar:
            for path in files:
                told = hashlib.sha256()
                with path.open("rb") as file:
                    while piece := file.read(_CHUNK):
                        told.update(piece)
                        bar.update(len(piece))
                found[f"file {path.relative_to(folder).as_posix()}"] = told.hexdigest()
    except OSError as error:
        raise MmaccelError(
            f"Cannot read {str(error.filename or folder)!r} of the model ({error.strerror}); mend it, or give another model."
        ) from error
    return found


def _files(folder: Path) -> list[Path]:
    """Those that a model is loaded from: everything at the top but notes for people, and templates and code below."""
    top = {path for path in folder.iterdir() if path.suffix.lower() != ".md"}
    below = {path for kind in ("*.jinja", "*.py") for path in folder.rglob(kind)}
    return sorted(path for path in top | below if path.is_file() and not path.name.startswith("."))


def _commit(name: str) -> str | None:
    """The commit that a hub id stands for; None where nobody knows, which loading the model has a sentence for."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        commit: str | None = extract_commit_hash(cached_file(name, "config.json"), None)
    except Exception:
        return None
    return commit


__all__ = ["digests"]
