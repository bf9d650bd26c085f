"""Media of a request: ``data:`` addresses, and files and hosts that the server allows."""

from __future__ import annotations

import asyncio
import binascii
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from ...errors import MmaccelError
from ...media import untrusted
from ..model_lock import Stopped

#: seconds between two pieces of a download, and redirects
PAUSE, HOPS = 10.0, 3
#: frames of a clip that is sent as pictures
FRAMES = 1024
#: seconds between two checks whether the client has left
_LOOK = 0.1
#: characters of the media type of a data: address
_ABOUT = 200
#: bytes of base 64 that are decoded at once, which holds the interpreter lock
_PIECE = 1 << 20
#: the URL-safe alphabet of base 64, and white space, which is ignored
_ALPHABET, _BLANKS = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f"
#: percent escapes of characters of base 64
_PERCENT = {"%2B": "+", "%2F": "/", "%3D": "=", "%0D": "", "%0A": ""}
_PERCENT |= {escape.lower(): meant for escape, meant in _PERCENT.items()}


class Sources:
    """Hosts and folders that requests may load media from. Raises MmaccelError if a folder does not exist, or a host is none.

    hosts : ``HOST``, for the usual ports, or ``HOST:PORT``.
    folders : below which files may lie, links followed.
    """

    def __init__(self, hosts: Sequence[str] = (), folders: Sequence[str | Path] = ()) -> None:
        for folder in folders:
            if not Path(folder).is_dir():
                raise MmaccelError(f"--allow-files must be an existing folder, got {str(folder)!r}.")
        for host in hosts:
            if not host or set(host) & set("/*@? "):
                raise MmaccelError(f"--allow-urls must be a host such as images.example.com, got {host!r}.")
        self.hosts = frozenset(host.lower() for host in hosts)
        self.folders = tuple(Path(folder).resolve() for folder in folders)

    def fetch(self, url: str, into: Path, end: float, stop: threading.Event | None = None) -> Path:
        """The file of an address: itself if it is on this machine, else a copy in the folder ``into``, before ``end`` of the
        monotonic clock. The frames of a ``data:video/jpeg`` address are a folder.

        Raises Stopped if ``stop`` is set meanwhile, MmaccelError if the address is not allowed, does not exist, is too large,
        or takes too long.
        """
        scheme = url[: url.find(":") + 1].lower() if ":" in url[:8] else ""
        if scheme == "data:":
            return _data(url, into)
        if scheme == "file:":
            return self._file(url)
        if scheme in ("http:", "https:"):
            return self._load(url, into, end, stop or threading.Event())
        raise MmaccelError(
            f"The address of a picture or clip must be data: in base 64, file: or http(s):, got {_short(url)!r}."
        )

    def _file(self, url: str) -> Path:
        if not self.folders:
            raise MmaccelError("This server reads no files; start it with --allow-files FOLDER to allow them.")
        # the same sentence whether a file exists or not
        no = MmaccelError(f"{_short(url)!r} is not a file in a folder that this server allows.")
        try:
            split = urlsplit(url)
            # links are followed first
            path = Path(unquote(split.path, errors="strict")).resolve(strict=True)
            inside = any(path.is_relative_to(folder) for folder in self.folders)
            if split.netloc not in ("", "localhost") or not inside or not path.is_file():
                raise no
        except (OSError, ValueError, RuntimeError) as error:
            raise no from error
        return path

    def _load(self, url: str, into: Path, end: float, stop: threading.Event) -> Path:
        if not self.hosts:
            raise MmaccelError("This server loads nothing from addresses; send a data: address in base 64.")
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._within(url, into, end, stop))
        finally:
            # without waiting for name resolution
            loop.close()

    async def _within(self, url: str, into: Path, end: float, stop: threading.Event) -> Path:
        """Download until ``end`` or ``stop``, however slowly a host sends."""
        loading = asyncio.ensure_future(self._follow(url, into))
        try:
            while not loading.done():
                if stop.is_set():
                    raise Stopped
                if (left := end - time.monotonic()) <= 0:
                    raise MmaccelError(f"{_short(url)!r} takes too long to load.")
                await asyncio.wait({loading}, timeout=min(_LOOK, left))
            return loading.result()
        finally:
            loading.cancel()
            await asyncio.wait({loading}, timeout=_LOOK)
            if loading.done() and not loading.cancelled():
                loading.exception()

    async def _follow(self, url: str, into: Path) -> Path:
        # nothing of the environment: no proxies, no passwords of .netrc
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=PAUSE) as client:
            try:
                where = httpx.URL(url)
                for _ in range(HOPS + 1):
                    # every redirect
                    self._check_host(where)
                    async with client.stream("GET", where, headers={"accept-encoding": "identity"}) as answer:
                        if not answer.is_redirect:
                            return await _loaded(answer, where, into)
                        where = where.join(answer.headers.get("location", ""))
            except httpx.InvalidURL:
                raise MmaccelError(f"{_short(url)!r} is not a valid address, or redirects to an invalid one.") from None
            except httpx.HTTPError as error:
                raise MmaccelError(f"{_short(url)!r} cannot be loaded ({type(error).__name__}).") from None
        raise MmaccelError(f"{_short(url)!r} has too many redirects; give the address of the file itself.")

    def _check_host(self, url: httpx.URL) -> None:
        """Raise MmaccelError if the host, as httpx parses it, is not allowed."""
        usual = {"http": 80, "https": 443}.get(url.scheme)
        port = url.port or usual
        allowed = f"{url.host}:{port}" in self.hosts or (port == usual and url.host in self.hosts)
        if usual is None or url.userinfo or not allowed:
            raise MmaccelError(f"{_short(str(url))!r} is not on a host that this server loads from.")


def _data(url: str, into: Path) -> Path:
    about, comma, _ = url[5:_ABOUT].partition(",")
    kind, *parameters = (part.strip().lower() for part in about.split(";"))
    if not comma or "base64" not in parameters:
        raise MmaccelError("A data: address must be in base 64, such as data:image/png;base64,iVBORw0...")
    content = url[6 + len(about) :]
    if "%" in content:
        if content.count("%") > len(content) // 16:
            raise _no_base64()
        for written, meant in _PERCENT.items():
            content = content.replace(written, meant)
    path = into / str(len(os.listdir(into)))
    if kind != "video/jpeg":
        _decode(content, path, untrusted.UPLOAD)
        return path
    # frames as clients of vLLM send them
    if content.count(",") >= FRAMES:
        raise MmaccelError(f"The clip has more than {FRAMES} frames; send fewer.")
    path.mkdir()
    left = untrusted.UPLOAD
    for number, frame in enumerate(content.split(",")):
        file = path / f"{number}.jpg"
        left -= _decode(frame, file, left)
        with file.open("rb") as picture:
            if picture.read(2) != b"\xff\xd8":
                raise MmaccelError(
                    f"Frame {number} of the clip is not a JPEG; send JPEGs in base 64 with commas between them."
                )
    return path


def _decode(content: str, path: Path, most: int) -> int:
    """Write the bytes of base 64 to a file; returns their number."""
    size, kept, ended = 0, b"", False
    try:
        with path.open("wb") as file:
            for at in range(0, max(1, len(content)), _PIECE):
                kept += content[at : at + _PIECE].encode("ascii").translate(_ALPHABET, _BLANKS)
                if at + _PIECE >= len(content):
                    # URL-safe base 64 often has no padding
                    kept += b"=" * (-len(kept) % 4)
                piece, kept = kept[: len(kept) & ~3], kept[len(kept) & ~3 :]
                if (piece and ended) or piece.endswith(b"==="):
                    raise ValueError("wrong padding")
                size += file.write(binascii.a2b_base64(piece, strict_mode=True))
                ended = ended or piece.endswith(b"=")
                if size > most:
                    raise MmaccelError(
                        f"The file in the data: address is too large; at most {untrusted.UPLOAD >> 20} MiB are taken."
                    )
    except MmaccelError:
        raise
    except ValueError:
        raise _no_base64() from None
    return size


def _no_base64() -> MmaccelError:
    return MmaccelError("The data: address is not valid base 64; encode the bytes of the file.")


async def _loaded(answer: httpx.Response, url: httpx.URL, into: Path) -> Path:
    if answer.status_code != 200:
        raise MmaccelError(f"{_short(str(url))!r} cannot be loaded (status {answer.status_code}).")
    path = into / str(len(os.listdir(into)))
    size = 0
    with path.open("wb") as file:
        # without decompression, which may yield any size
        async for piece in answer.aiter_raw():
            size += len(piece)
            if size > untrusted.UPLOAD:
                raise MmaccelError(
                    f"{_short(str(url))!r} is too large; at most {untrusted.UPLOAD >> 20} MiB are taken."
                )
            file.write(piece)
    return path


def _short(url: str) -> str:
    return url if len(url) <= 80 else f"{url[:77]}..."
