"""Runs of tests beside the default one, and parts of a run."""

from __future__ import annotations

import argparse
import zlib

#: the marks of what the default run leaves out, each with a run of its own
APART = ("full", "kernel", "browser", "ray", "vllm")


def part(given: str) -> tuple[int, int]:
    """``"K/N"``, K from 1 to N."""
    k, _, n = given.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"a part must be K/N with K from 1 to N, such as 1/2, got {given!r}")
    return int(k), int(n)


def in_part(name: str, k: int, n: int) -> bool:
    """Whether a test is in the Kth of N parts: it depends on its name alone, so every test is always in the same part."""
    return zlib.crc32(name.encode()) % n == k - 1
