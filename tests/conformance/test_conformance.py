"""Our methods against numbers from the authors' own programs; see golden/README.md for the format."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from comparators import COMPARATORS, Fault, NotBuilt

# one file an area: compare_pruning.py, compare_merging.py, ...
for path in sorted(Path(__file__).parent.glob("compare_*.py")):
    COMPARATORS.update(import_module(path.stem).COMPARATORS)


def test_vectors_are_there(request: pytest.FixtureRequest) -> None:
    folder = request.config.getoption("golden", default=Path(__file__).parent / "golden")
    assert list(folder.rglob("*.json")), f"no golden vectors below {folder}"


def test_vector(vector: Path) -> None:
    about = json.loads(vector.read_text(encoding="utf-8"))
    with np.load(vector.with_suffix(".npz"), allow_pickle=False) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    assert set(about["outputs"]) <= set(arrays), "the vector lacks outputs it announces"

    compare = COMPARATORS.get((about["repo"], about["function"]))
    if compare is None:
        pytest.xfail(f"method not built yet: {about['method']} ({about['repo']}, {about['function']})")
    try:
        compare(about["params"], arrays)
    except NotBuilt as missing:
        pytest.xfail(f"method not built yet: {missing}")
    except Fault as fault:
        pytest.xfail(f"fault of the authors' program that we do not reproduce: {fault}")
