"""Our methods against numbers from the authors' own programs; see golden/README.md for the format.

A vector passes when the registered method gives the authors' numbers. Else it fails, or is an expected failure for a
reason that this run has checked: nothing of its name is registered, the variant is not offered, or the authors' program has
a fault. missing.toml names all of these vectors, and fails when it does not or when it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import harness
import missing
import numpy as np
import pytest
import torch
from comparators import COMPARATORS
from harness import BENEATH, Compare, Fault, NotOffered
from wrong import notices

# one file an area: compare_pruning.py, compare_merging.py, ...
for path in sorted(Path(__file__).parent.glob("compare_*.py")):
    COMPARATORS.update(import_module(path.stem).COMPARATORS)

ENTRIES = missing.read()
SHIPPED = Path(__file__).parent / "golden"


def load(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a vector says of itself, and its arrays."""
    about = json.loads(path.read_text(encoding="utf-8"))
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    assert set(about["outputs"]) <= set(arrays), "the vector lacks outputs it announces"
    return about, arrays


def verdict(
    compare: Compare | None, about: Mapping[str, Any], arrays: Mapping[str, torch.Tensor], entry: missing.Entry | None
) -> str | None:
    """Compare; None if the registered method gives the authors' numbers, else the reason why it cannot yet.

    Raises
    ------
    AssertionError
        If it should and does not, or if the reason that the list has no longer holds.
    """
    if entry is not None and (stale := entry.stale()):
        raise AssertionError(f"missing.toml is stale: {stale}")
    if compare is None:
        if entry is not None:
            assert entry.kind != "fault", "a fault of the authors' program is shown by a comparison that fails"
            return entry.reason
        paper = missing.paper_of(about)
        known = missing.offered(paper, missing.known_methods())
        assert not known, (
            f"{', '.join(known)} is registered, but no comparator answers for {about['repo']}, {about['function']}"
        )
        return f"method not built: {paper} ({about['repo']}, {about['function']})"
    harness.made.clear()
    try:
        compare(about["params"], arrays)
    except Fault as shown:
        assert entry is None or entry.kind == "fault", f"listed as {entry.kind}, but it shows a fault: {shown}"
        return f"fault of the authors' program: {shown}"
    except NotOffered as lacks:
        assert entry is None or entry.kind == "variant", f"listed as {entry.kind}, but it is a variant: {lacks}"
        return f"variant not offered: {lacks}" if entry is None else entry.reason
    if compare in BENEATH:
        return f"{BENEATH[compare]} is reached by tests only" if entry is None else entry.reason
    assert harness.made, "the comparator runs no registered method"
    assert entry is None, f"missing.toml is stale: the vector passes ({entry.reason})"
    assert notices(compare, about["params"], arrays), "the comparison passes whatever the registered method chooses"
    return None


def comparator_of(about: Mapping[str, Any]) -> Compare | None:
    """The comparator of a vector's function; of one in another file of the repository by the name of the function, where all
    that have this name agree."""
    repository, function = about["repo"], about["function"]
    if (exact := COMPARATORS.get((repository, function))) is not None:
        return exact
    name = function.rpartition(":")[2]
    same = [(known, compare) for (known, other), compare in COMPARATORS.items() if other.rpartition(":")[2] == name]
    found = {compare for known, compare in same if known == repository} or {compare for _, compare in same}
    return found.pop() if len(found) == 1 else None


def judge(path: Path, entries: Sequence[missing.Entry] = ENTRIES) -> str | None:
    """The verdict on a vector; the list goes by its name, wherever it lies."""
    entry = next((entry for entry in entries for name in entry.vectors if Path(name).name == path.stem), None)
    about, arrays = load(path)
    return verdict(comparator_of(about), about, arrays, entry)


def test_vector(vector: Path) -> None:
    reason = judge(vector)
    if reason is not None:
        pytest.xfail(reason)


def test_vectors_are_there(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("golden")
    assert list(folder.rglob("*.json")), f"no golden vectors below {folder}"


def test_the_list_is_up_to_date() -> None:
    assert not [reason for entry in ENTRIES if (reason := entry.stale()) is not None]


def faults_of_the_list(folder: Path, entries: Sequence[missing.Entry], full: bool) -> list[str]:
    """What the list lacks of the vectors below a folder, and, if these are all there are, what it has too many."""
    found, listed = {path.stem: path for path in folder.rglob("*.json")}, set[str]()
    for entry in entries:
        listed |= {Path(name).name for name in entry.vectors}
    out = [f"{name} is listed, but not there" for name in sorted(listed - set(found)) if full]
    for name in sorted(set(found) - listed):
        try:
            reason = judge(found[name], entries)
        except AssertionError:
            # which the test of the vector says
            continue
        if reason is not None:
            out.append(f"{name} is not listed: {reason}")
    return out


def test_the_list_is_complete(request: pytest.FixtureRequest) -> None:
    """For the shipped vectors, and for the full folder; other folders have few vectors that are listed."""
    folder = request.config.getoption("golden")
    listed = [Path(name).name for entry in ENTRIES for name in entry.vectors]
    there = {path.stem for path in folder.rglob("*.json")}
    full = sum(name in there for name in listed) > len(listed) / 2
    assert faults_of_the_list(SHIPPED, ENTRIES, full=False) == []
    if full:
        assert faults_of_the_list(folder, ENTRIES, full=True) == []
