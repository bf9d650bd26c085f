"""Where the pictures and clips of a request may come from, and getting them: data addresses, and what the server allows."""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from ...errors import MmaccelError
from ...media import untrusted

#: seconds between two pieces of what is loaded, and how often an address may lead elsewhere
PAUSE, HOPS = 10.0, 3
#: of clips, which decoders know by the name of the file; pictures are known by what is in them
_TYPES = {
    "image/gif": ".gif",
    "video/mp4": ".mp4",
    "video/quicktime": ".mov",
    "video/x-matroska": ".mkv",
    "video/matroska": ".mkv",
    "video/webm": ".webm",
    "video/x-msvideo": ".avi",
    "video/x-m4v": ".m4v",
}


class Sources:
    """What clients may name.

    Parameters
    ----------
    hosts : ``HOST``, for the usual ports, or ``HOST:PORT``.
    folders : below which files may lie, links followed.

    Raises
    ------
    MmaccelError
        If a folder does not exist, or a host is none.
    """

    def __init__(self, hosts: Sequence[str] = (), folders: Sequence[str | Path] = ()) -> None:
        for folder in folders:
            if not Path(folder).is_dir():
                raise MmaccelError(f"--allow-files {str(folder)!r} is no folder that exists.")
        for host in hosts:
            if not host or set(host) & set("/*@? "):
                raise MmaccelError(f"--allow-urls {host!r} is no host; give a name such as images.example.com.")
        self.hosts = frozenset(host.lower() for host in hosts)
        self.folders = tuple(Path(folder).resolve() for folder in folders)

    def fetch(self, url: str, into: Path, end: float) -> Path:
        """The file of an address: itself if it lies here, else below the folder ``into``; until ``end`` of the monotonic clock.

        Raises
        ------
        MmaccelError
            If it may not be named, is not there, is larger than is taken, or takes too long.
        """
        # with its colon
        scheme = url[: url.find(":") + 1].lower() if ":" in url[:8] else ""
        if scheme == "data:":
            return _data(url, into)
        if scheme == "file:":
            return self._file(url)
        if scheme in ("http:", "https:"):
            return self._load(url, into, end)
        raise MmaccelError(
            f"{_short(url)!r} is no address of a picture or clip; give a data: address in base 64, file: or http(s):."
        )

    def _file(self, url: str) -> Path:
        if not self.folders:
            raise MmaccelError("Files cannot be named on this server, which was started without --allow-files FOLDER.")
        # one sentence for all that is not to be had: it is nobody's business which other files there are
        no = MmaccelError(f"{_short(url)!r} is no file in a folder that this server allows.")
        try:
            split = urlsplit(url)
            # links are followed before it is asked where the file lies
            path = Path(unquote(split.path, errors="strict")).resolve(strict=True)
            inside = any(path.is_relative_to(folder) for folder in self.folders)
            if split.netloc not in ("", "localhost") or not inside or not path.is_file():
                raise no
        except (OSError, ValueError, RuntimeError) as error:
            raise no from error
        return path

    def _load(self, url: str, into: Path, end: float) -> Path:
        if not self.hosts:
            raise MmaccelError("This server loads nothing from addresses; send a data: address in base 64.")
        # nothing of the environment: no proxies, no passwords of .netrc
        with httpx.Client(trust_env=False, follow_redirects=False, timeout=PAUSE) as client:
            try:
                where = httpx.URL(url)
                for _ in range(HOPS + 1):
                    # every step of a way that leads elsewhere
                    self._check_host(where)
                    with client.stream("GET", where, headers={"accept-encoding": "identity"}) as answer:
                        if not answer.is_redirect:
                            return _loaded(answer, where, into, end)
                        where = where.join(answer.headers.get("location", ""))
            except httpx.InvalidURL:
                raise MmaccelError(f"{_short(url)!r} is no address, or leads to none.") from None
            except httpx.HTTPError as error:
                raise MmaccelError(f"{_short(url)!r} cannot be loaded ({type(error).__name__}).") from None
        raise MmaccelError(f"{_short(url)!r} leads elsewhere again and again; give the address where the file is.")

    def _check_host(self, url: httpx.URL) -> None:
        """As the program that connects reads the address, so that no other reading of it is let in."""
        usual = {"http": 80, "https": 443}.get(url.scheme)
        port = url.port or usual
        allowed = f"{url.host}:{port}" in self.hosts or (port == usual and url.host in self.hosts)
        if usual is None or url.userinfo or not allowed:
            raise MmaccelError(f"{_short(str(url))!r} is not on a host that this server loads from.")


def _data(url: str, into: Path) -> Path:
    about, _, content = url[5:].partition(",")
    kind, *parameters = about.split(";")
    if "base64" not in parameters:
        raise MmaccelError("A data: address must be in base 64, such as data:image/png;base64,iVBORw0...")
    if len(content) > untrusted.UPLOAD * 4 // 3 + 4:
        raise MmaccelError(
            f"The file in the data: address is too large; at most {untrusted.UPLOAD >> 20} MiB are taken."
        )
    try:
        found = base64.b64decode(unquote_to_bytes(content), validate=True)
    except (binascii.Error, ValueError):
        raise MmaccelError("The data: address is no valid base 64; encode the bytes of the file.") from None
    path = into / f"{len(os.listdir(into))}{_suffix(kind)}"
    path.write_bytes(found)
    return path


def _loaded(answer: httpx.Response, url: httpx.URL, into: Path, end: float) -> Path:
    if answer.status_code != 200:
        raise MmaccelError(f"{_short(str(url))!r} cannot be loaded (status {answer.status_code}).")
    kind = answer.headers.get("content-type", "").partition(";")[0]
    path = into / f"{len(os.listdir(into))}{_suffix(kind) or Path(url.path).suffix.lower()[:8]}"
    size = 0
    with path.open("wb") as file:
        # as sent: what was packed would unpack to any size
        for piece in answer.iter_raw():
            size += len(piece)
            if size > untrusted.UPLOAD:
                raise MmaccelError(
                    f"{_short(str(url))!r} is too large; at most {untrusted.UPLOAD >> 20} MiB are taken."
                )
            if time.monotonic() > end:
                raise MmaccelError(f"{_short(str(url))!r} takes too long to load.")
            file.write(piece)
    return path


def _suffix(kind: str) -> str:
    return _TYPES.get(kind.strip().lower(), "")


def _short(url: str) -> str:
    return url if len(url) <= 80 else f"{url[:77]}..."
