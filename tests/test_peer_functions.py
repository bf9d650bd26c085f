"""The comparison with selection functions of packages: how its figures are made, and what our side does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "peers"))
import compare_functions
import functions
from compare_functions import CASES, PACKAGES, Case, clip, needed, paired, pictures, same
from functions import Functions
from with_functions_of_mmaccel import METHODS

SMALL = [
    Case("tome", "a", {"remove": 7}, pictures(2, 25)),
    Case("visionzip", "b", {"dominant": 5, "contextual": 3}, pictures(2, 25)),
    Case("evs", "c", {"frames": 3, "height": 2, "width": 4, "kept": 11}, clip(3, 2, 4)),
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of few numbers."""
    for name, size in {"TOWER": 16, "HEADS": 2, "HEAD": 8, "WIDTH": 16}.items():
        monkeypatch.setattr(compare_functions, name, size)


def run(case: Case, folder: Path) -> tuple[Mapping[str, Tensor], Tensor]:
    """The tensors of a case, and what our side makes of them when it is asked as the other process is."""
    inputs = needed(case.method, case.inputs(0))
    save_file(dict(inputs), folder / "in")
    side = Functions(METHODS, {"mmaccel": "1"})
    side.answer({"do": "load", "method": case.method, "inputs": str(folder / "in"), "options": dict(case.options)})
    side.answer({"do": "tokens", "out": str(folder / "out")})
    return inputs, load_file(folder / "out")["tokens"]


def test_tome_merges_pairs_of_even_and_odd_places(tmp_path: Path) -> None:
    inputs, tokens = run(SMALL[0], tmp_path)
    x = torch.nn.functional.normalize(inputs["keys"], dim=-1)
    for row in range(2):
        groups = [[i] for i in range(24)]
        likeness = x[row, 0::2] @ x[row, 1::2].T
        for giver in likeness.amax(1).topk(7).indices.tolist():
            groups[2 * int(likeness[giver].argmax()) + 1] += groups[2 * giver]
            groups[2 * giver] = []
        expected = torch.stack([inputs["hidden"][row, group].mean(0) for group in groups if group])
        torch.testing.assert_close(tokens[row], expected)


def test_visionzip_leaves_the_class_token_out(tmp_path: Path) -> None:
    inputs, tokens = run(SMALL[1], tmp_path)
    assert tokens.shape == (2, 8, 16)
    best = inputs["attention"][:, :, 0, 1:].mean(1).topk(5).indices
    dominant = torch.stack([row[1:][at] for row, at in zip(inputs["hidden"], best, strict=True)])
    # five of eight are as they were, in each row
    assert same(tokens, torch.cat([dominant, dominant[:, :3]], 1)) == 5 / 8
    assert not (tokens == inputs["hidden"][:, :1]).all(-1).any()


def test_evs_keeps_the_first_frame(tmp_path: Path) -> None:
    inputs, tokens = run(SMALL[2], tmp_path)
    x = inputs["features"].view(3, 8, 16)
    away = 1 - torch.nn.functional.cosine_similarity(x[1:], x[:-1], dim=-1).flatten()
    assert tokens.shape == (1, 11, 16) and torch.equal(tokens[0, :8], x[0])
    assert torch.equal(tokens[0, 8:], inputs["features"][8 + away.topk(3).indices.sort().values])


def test_inputs_differ_by_seed_and_are_only_those_a_method_reads() -> None:
    for case in SMALL:
        assert not torch.equal(*(next(iter(needed(case.method, case.inputs(seed)).values())) for seed in (0, 1)))
        assert torch.equal(*(next(iter(needed(case.method, case.inputs(0)).values())) for _ in range(2)))
    assert {case.method: set(needed(case.method, case.inputs(0))) for case in SMALL} == {
        "tome": {"hidden", "keys"},
        "visionzip": {"attention", "hidden", "keys"},
        "evs": {"features"},
    }


def test_the_tower_of_mini_llava_is_seen() -> None:
    found = compare_functions.seen()
    assert {name: list(x.shape[:-1]) for name, x in found.items()} == {
        "hidden": [8, 197],
        "keys": [8, 197],
        "attention": [8, 5, 1],
        "features": [8 * 196],
    }
    assert found["attention"].shape[-1] == 197
    torch.testing.assert_close(found["attention"].sum(-1), torch.ones(8, 5, 1))


def test_same_tokens_are_counted_in_any_order() -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    assert same(x, x.flip(1)) == 1
    # one row has another token, and a copy in its place does not make up for it
    other = x.clone()
    other[1, 0] = -x[1, 0]
    assert same(x, other) == same(other, x) == (1 + 5 / 6) / 2
    other[1, 0] = x[1, 1]
    assert same(x, other) == (1 + 5 / 6) / 2
    assert same(x, x[:, :3]) == 0.5 and same(x, x * 1.001) == 0 and same(x, x * 1.00001) == 1


def test_ratios_are_paired_run_by_run() -> None:
    assert paired([1.0, 8.0, 3.0], [2.0, 4.0, 3.0]) == {
        **{"ours_s": 3.0, "peer_s": 3.0, "to_peer": 1.0, "to_peer_low": 0.75, "to_peer_high": 1.5}
    }
    assert paired([1.0], [2.0])["to_peer_high"] == 0.5


def test_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.04, 0.08])
    monkeypatch.setattr(functions.time, "process_time", lambda: next(clock))
    assert Functions({}, {}).time(lambda: torch.zeros(1)) == pytest.approx(0.04)


def answer(ours: list[float], agree: float) -> dict[str, Any]:
    times = paired(ours, [1.0] * len(ours))
    row = {"method": "evs", "input": "a clip", "kept": 4, "peer_kept": 4, "same": agree, **times}
    versions = {"torch": "2", "mmaccel": "0", "tomesd": "1", "visionzip": "2", "sglang": "3"}
    return {
        "rows": [row],
        "versions": {"ours": versions, "peer": versions},
        **{"machine": "a CPU", "date": "today", "runs": len(ours), "command": "python"},
    }


def test_losses_and_differences_are_printed() -> None:
    lost = compare_functions.table(answer([1.5] * 3, 0.875))
    assert "Slower than the package, beyond the spread: `evs`, a clip, 4 kept (1.50 times)." in lost
    assert "| `evs` | sglang | a clip | 4 | 87.50% | 1500.00 ms | 1000.00 ms | 1.50 (1.50 to 1.50) |" in lost
    won = compare_functions.table(answer([0.5] * 3, 1.0))
    assert "beyond the spread: none." in won and "| 4 | all |" in won
    # slower in half of the runs
    unsure = compare_functions.table(answer([0.5, 0.9, 1.2, 2.0], 1.0))
    assert "beyond the spread: none." in unsure and "1.05 (0.80 to 1.40)" in unsure
    assert "tomesd 1, visionzip 2, sglang 3 and mmaccel 0" in won


def test_every_method_has_cases_and_both_sides_know_it() -> None:
    packages = (Path(compare_functions.__file__).parent / "with_functions_of_packages.py").read_text(encoding="utf-8")
    assert set(METHODS) == set(PACKAGES) == {case.method for case in CASES}
    assert all(f'"{name}": {name}' in packages for name in PACKAGES)
