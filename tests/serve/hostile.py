"""Requests that were made to stall a server, small and large, and a server in a process of its own to send them to."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clients import MODELS
from PIL import Image

NAME = "mini-llava"
#: bytes that a request may have
MOST = 96 << 20


def with_text(text: str) -> bytes:
    return json.dumps({"model": NAME, "messages": [{"role": "user", "content": text}]}).encode()


def with_field(field: str, value: bytes) -> bytes:
    return with_text("?")[:-1] + b', "' + field.encode() + b'": ' + value + b"}"


def showing(*urls: str, kind: str = "image_url") -> bytes:
    parts: list[dict[str, Any]] = [{"type": kind, kind: {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "?"}]
    return json.dumps({"model": NAME, "messages": [{"role": "user", "content": content}]}).encode()


def as_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int, *chunks: tuple[bytes, bytes], rows: int | None = None) -> bytes:
    """A white PNG of one bit a pixel whose rows are made without a picture; ``chunks`` stand before its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pack, line = zlib.compressobj(9), b"\x00" + b"\xff" * ((width + 7) // 8)
    count = height if rows is None else rows
    pixels = b"".join(pack.compress(line * min(4096, count - at)) for at in range(0, count, 4096)) + pack.flush()
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)),
            *(chunk(kind, data) for kind, data in chunks),
            chunk(b"IDAT", pixels),
            chunk(b"IEND", b""),
        )
    )


def jpeg(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan, which has few bytes, comes again and again."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "JPEG", progressive=True)
    head, _, last = file.getvalue()[:-2].rpartition(b"\xff\xda")
    return head + (b"\xff\xda" + last) * scans + b"\xff\xd9"


def bodies(scale: float = 1.0) -> dict[str, Callable[[], bytes]]:
    """Bodies by name; ``scale`` is the size, of the largest that are taken at 1."""

    def times(count: float) -> int:
        return max(2, int(count * scale))

    mib = times(1 << 20)
    return {
        "3 M numbers for messages": lambda: b'{"model": "m", "messages": [' + b"1," * times(3e6) + b"1]}",
        "96 MiB of numbers": lambda: b'{"messages": [' + b"1," * (mib * 47) + b"1]}",
        "96 MiB of lists": lambda: b'{"messages": ' + b"[" + b"[]," * (mib * 31) + b"[]]}",
        "15 MB of lists": lambda: with_field("metadata", b"[" + b"[]," * times(5e6) + b"[]]"),
        "500,000 unknown keys": lambda: (
            b"{" + b",".join(b'"k%d":0' % n for n in range(times(5e5))) + b"}"  # one a key
        ),
        "500,000 equal keys": lambda: b"{" + b'"model": "m",' * times(5e5) + b'"n": 1}',
        "as many values as are taken": lambda: with_field("metadata", b"[" + b"{}," * times(99_000) + b"1]"),
        "as many messages as are taken": lambda: json.dumps(
            {"model": NAME, "messages": [{"role": "user", "content": [{}] * 64}] * 1024}
        ).encode(),
        "many parts": lambda: showing(*["data:,"] * times(20_000)),
        "many data addresses": lambda: showing(*["data:image/png;base64," + "A" * 5000] * times(15_000)),
        "deep lists": lambda: b"[" * times(2e7),
        "deep objects": lambda: b'{"a":' * times(4e6),
        "a long number": lambda: with_field("seed", b"9" * times(1.5e7)),
        "a long fraction": lambda: with_field("temperature", b"0." + b"9" * times(1.5e7)),
        "long numbers": lambda: with_field("metadata", b"[" + (b"9" * 29 + b",") * times(180_000) + b"1]"),
        "6 MB of words": lambda: with_text("one two " * times(750_000)),
        "6 MB of one word": lambda: with_text("x" * times(6e6)),
        "15 MB of blanks": lambda: with_text(" " * times(1.5e7)),
        "15 MB of line breaks": lambda: with_text("\n" * times(7.5e6)),
        "15 MB of Chinese": lambda: with_text("\u4e2d" * times(2.5e6)),
        "a text that just fits": lambda: with_text("one " * times(4000)),
        "many words of one letter": lambda: with_text("a " * times(65_000)),
        "96 MiB of text": lambda: with_text("x" * (mib * 95)),
        "96 MiB of quotes": lambda: with_text('"' * (mib * 47)),
        "96 MiB of backslashes": lambda: b'{"model": "' + b"\\" * (mib * 95) + b'"}',
        "96 MiB of blanks": lambda: b" " * (mib * 95) + b"{}",
        "96 MiB of beginnings": lambda: b'{"model": [' + b'"data:' * (mib * 15) + b"]}",
        "90 MiB of base 64": lambda: showing("data:image/png;base64," + "A" * (mib * 80)),
        "90 MiB of escapes": lambda: showing("data:image/png;base64," + "\n" * (mib * 44)),
        "90 MiB of percents": lambda: showing("data:image/png;base64," + "%2B" * (mib * 30)),
        "90 MiB of commas": lambda: showing("data:video/jpeg;base64," + "," * (mib * 90), kind="video_url"),
        "90 MiB of semicolons": lambda: showing("data:" + ";" * (mib * 90)),
        "an address of many characters": lambda: showing("http://" + "x" * (mib * 10)),
        "a name of many characters": lambda: with_field("x" * (mib * 10), b"1"),
        "a kind of many characters": lambda: json.dumps(
            {"model": NAME, "messages": [{"role": "user", "content": [{"type": "x" * (mib * 10)}]}]}
        ).encode(),
        "zeros": lambda: b"\0" * (mib * 90),
        "UTF-16": lambda: with_text("[" * times(3e6)).decode().encode("utf-16"),
        "a thin picture": lambda: showing(as_url(png(1, times(3e7)))),
        "a flat picture": lambda: showing(as_url(png(times(3e7), 1))),
        "pictures of 40 megapixels": lambda: showing(*[as_url(png(times(5000), 7000))] * 32),
        "a JPEG of many scans": lambda: showing(as_url(jpeg(times(6000), 2000), "image/jpeg")),
        "a text bomb in a picture": lambda: showing(
            as_url(png(8, 8, (b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (100 << 20)))))
        ),
    }


@contextmanager
def process(*options: str, descriptors: int | None = None) -> Iterator[SimpleNamespace]:
    """A server in a process of its own; ``log`` is what it writes, ``memory()`` its bytes in memory."""

    def prepare() -> None:
        if descriptors is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    argv = [sys.executable, "-m", "mmaccel", "serve", "--model", str(MODELS / NAME), "--port", "0", "--json", *options]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=prepare, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = json.loads(server.stdout.readline())["address"].removesuffix("/v1")
            host, _, port = address.removeprefix("http://").partition(":")
            found = SimpleNamespace(address=address, where=(host, int(port)), log="", pid=server.pid)
            found.memory = lambda: _memory(server.pid)
            yield found
        finally:
            server.terminate()
            found.log = server.communicate(timeout=60)[0]


def _memory(pid: int) -> int:
    """Bytes in memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def post(where: tuple[str, int], body: bytes, *, timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer to a body, sent in one go."""
    import httpx

    with httpx.Client(timeout=timeout) as client:
        answer = client.post(
            f"http://{where[0]}:{where[1]}/v1/chat/completions",
            content=body,
            headers={"content-type": "application/json"},
        )
    return answer.status_code, answer.json()


def raw(where: tuple[str, int], *pieces: bytes, timeout: float = 30.0) -> bytes:
    """What a server answers to bytes until it closes the connection, perhaps before all were sent."""
    found = b""
    with socket.create_connection(where, timeout) as connection, suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
        while piece := connection.recv(1 << 16):
            found += piece
    return found
