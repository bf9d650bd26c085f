"""Do the selection functions keep and merge what those of packages on the index do, and how long does either take?

Papers seldom come as packages; three do. Two processes are given the same tensors, of shapes of real models and from the tower
of the model that comes with mmaccel, and the tokens that come out are compared. Both are timed in turn within one run, in
process seconds, with what a tower shows of attention and keys given.

    python benchmarks/peers/compare_functions.py --out benchmarks/results/peers-functions-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compare import Process, environment
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

import mmaccel
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.programs.bench import provenance
from mmaccel.suite import make_item

#: whose function a method is compared with
PACKAGES = {"tome": "tomesd", "visionzip": "visionzip", "evs": "sglang"}
#: the vision tower CLIP-L, its heads and the width of one; the language model of 7B
TOWER, HEADS, HEAD, WIDTH = 1024, 16, 64, 3584
#: tokens are the same if they differ by less than this share of their length
SAME = 1e-4


@dataclass(frozen=True)
class Case:
    """One method on one input.

    inputs : makes the tensors of :class:`functions.Functions` from a seed.
    """

    method: str
    name: str
    options: Mapping[str, int]
    inputs: Callable[[int], Mapping[str, Tensor]] = field(repr=False)
    seeds: int = 3


# --- inputs -----------------------------------------------------------------------------------------------------------
def pictures(rows: int, tokens: int) -> Callable[[int], Mapping[str, Tensor]]:
    """Pictures in a tower, class token first, of stretches of 16 tokens that resemble each other."""

    def make(seed: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)

        def alike(width: int) -> Tensor:
            common = torch.randn(rows, -(-tokens // 16), width, generator=rng).repeat_interleave(16, 1)[:, :tokens]
            return common + torch.randn(rows, tokens, width, generator=rng) / 2

        attention = torch.randn(rows, HEADS, 1, tokens, generator=rng).mul(2).softmax(-1)
        return {"hidden": alike(TOWER), "keys": alike(HEAD), "attention": attention}

    return make


def clip(frames: int, height: int, width: int) -> Callable[[int], Mapping[str, Tensor]]:
    """A clip in front of the language model, of which some places change more than others."""

    def make(seed: int) -> dict[str, Tensor]:
        rng, places = torch.Generator().manual_seed(seed), height * width
        change = torch.rand(frames, places, 1, generator=rng)
        still = torch.randn(1, places, WIDTH, generator=rng)
        return {"features": (still + change * torch.randn(frames, places, WIDTH, generator=rng)).flatten(0, 1)}

    return make


@cache
def seen(seed: int = 0) -> dict[str, Tensor]:
    """Whatever the seed, what the tower of mini-llava shows of eight frames of a clip in which a thing moves."""
    folder = Path(mmaccel.__file__).parent / "models" / "mini-llava"
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tower, keys = model.model.vision_tower, []
    layer = tower.encoder.layers[-2].self_attn
    layer.k_proj.register_forward_hook(lambda module, args, out: keys.append(out))
    frames = torch.from_numpy(make_item("motion", "test", 0, frames=8).frames(112))
    pixels = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        out = tower(pixels, output_hidden_states=True, output_attentions=True)
        hidden = out.hidden_states[-2]
        read = model.model.multi_modal_projector(hidden[:, 1:])
    return {
        "hidden": hidden,
        "keys": keys[0].unflatten(2, (layer.num_heads, -1)).mean(2),
        "attention": out.attentions[-2][:, :, :1].contiguous(),
        "features": read.flatten(0, 1),
    }


def needed(method: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``inputs`` that a method reads; ToMe is given the patches alone."""
    if method == "evs":
        return {"features": inputs["features"]}
    if method == "visionzip":
        return {name: inputs[name].contiguous() for name in ("attention", "hidden", "keys")}
    return {name: inputs[name][:, 1:].contiguous() for name in ("hidden", "keys")}


CASES = [
    # one of 23 layers of CLIP-L on the way to a quarter, and the most that a layer can merge
    Case("tome", "1 picture of 576", {"remove": 19}, pictures(1, 577)),
    Case("tome", "1 picture of 576", {"remove": 288}, pictures(1, 577)),
    Case("tome", "5 tiles of 576", {"remove": 288}, pictures(5, 577)),
    Case("tome", "8 frames of 196", {"remove": 98}, pictures(8, 197)),
    Case("tome", "8 frames, mini-llava", {"remove": 98}, seen, 1),
    # the paper's 64 and 192 of 576, and as large a share of a frame
    Case("visionzip", "1 picture of 576", {"dominant": 54, "contextual": 10}, pictures(1, 577)),
    Case("visionzip", "1 picture of 576", {"dominant": 162, "contextual": 30}, pictures(1, 577)),
    Case("visionzip", "5 tiles of 576", {"dominant": 54, "contextual": 10}, pictures(5, 577)),
    Case("visionzip", "8 frames of 196", {"dominant": 41, "contextual": 8}, pictures(8, 197)),
    Case("visionzip", "8 frames, mini-llava", {"dominant": 41, "contextual": 8}, seen, 1),
    Case("evs", "8 frames of 196", {"frames": 8, "height": 14, "width": 14, "kept": 392}, clip(8, 14, 14)),
    Case("evs", "32 frames of 196", {"frames": 32, "height": 14, "width": 14, "kept": 1568}, clip(32, 14, 14)),
    Case("evs", "8 frames, mini-llava", {"frames": 8, "height": 14, "width": 14, "kept": 392}, seen, 1),
]


# --- figures ----------------------------------------------------------------------------------------------------------
def same(ours: Tensor, theirs: Tensor) -> float:
    """The share of tokens ``[B, K, D]`` of either side, the smaller one, that the other has too, in any order."""
    share = []
    for x, y in zip(ours.double(), theirs.double(), strict=True):
        # in float64 the quick way, by products, is exact to 1e-8
        apart = torch.cdist(x, y)
        near = apart <= SAME * torch.maximum(x.norm(dim=1)[:, None], y.norm(dim=1))
        share.append(min(near.any(0).double().mean().item(), near.any(1).double().mean().item()))
    return sum(share) / len(share)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Medians of two series of seconds taken in turn, and the median and quartiles of their ratios run by run."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ours_s": statistics.median(ours),
        "peer_s": statistics.median(theirs),
        "to_peer": middle,
        "to_peer_low": low,
        "to_peer_high": high,
    }


class Pair:
    """Both sides, and a folder that both see."""

    def __init__(self, ours: Process, peer: Process, folder: Path) -> None:
        self.sides = {"ours": ours, "peer": peer}
        self.folder = folder

    def load(self, case: Case, seed: int) -> None:
        inputs = self.folder / "inputs.safetensors"
        save_file(needed(case.method, case.inputs(seed)), inputs)
        for side in self.sides.values():
            side(do="load", method=case.method, inputs=str(inputs), options=dict(case.options))

    def tokens(self, side: str) -> Tensor:
        """What a side makes of what was loaded, ``[B, K, D]``."""
        out = self.folder / f"{side}.safetensors"
        self.sides[side](do="tokens", out=str(out))
        return load_file(out)["tokens"]

    def measure(self, case: Case, runs: int) -> dict[str, Any]:
        """How many tokens are the same, the worst of all seeds, and how long either side takes with the last seed."""
        agree = []
        for seed in range(case.seeds):
            self.load(case, seed)
            ours, theirs = self.tokens("ours"), self.tokens("peer")
            agree.append(same(ours, theirs))
        taken: dict[str, list[float]] = {"ours": [], "peer": []}
        for run in range(runs + 1):
            for side in sorted(taken, reverse=bool(run % 2)):
                taken[side].append(self.sides[side](do="time")["seconds"])
        return {
            "method": case.method,
            "input": case.name,
            "options": dict(case.options),
            "kept": ours.shape[1],
            "peer_kept": theirs.shape[1],
            "same": min(agree),
            "seeds": case.seeds,
            # the first of each is the warm-up
            **(paired(taken["ours"][1:], taken["peer"][1:]) if runs else {}),
        }


def table(result: Mapping[str, Any]) -> str:
    """One row a case; the losses are named below."""
    rows = [["method", "package", "input", "kept", "same tokens", "mmaccel", "package's", "time / package's"]]
    slower = []
    for row in result["rows"]:
        package = PACKAGES[row["method"]]
        timed = "to_peer" in row
        rows.append(
            [
                f"`{row['method']}`",
                package,
                row["input"],
                f"{row['kept']}" + ("" if row["kept"] == row["peer_kept"] else f" / {row['peer_kept']}"),
                "all" if row["same"] == 1 else f"{row['same']:.2%}",
                *(f"{row[side] * 1e3:.2f} ms" if timed else "not timed" for side in ("ours_s", "peer_s")),
                f"{row['to_peer']:.2f} ({row['to_peer_low']:.2f} to {row['to_peer_high']:.2f})" if timed else "",
            ]
        )
        if timed and row["to_peer_low"] > 1:
            slower.append(f"`{row['method']}`, {row['input']}, {row['kept']} kept ({row['to_peer']:.2f} times)")
    versions = result["versions"]
    named = ", ".join(f"{name} {versions['peer'][name]}" for name in PACKAGES.values())
    return "\n".join(
        [
            f"{named} and mmaccel {versions['ours']['mmaccel']}, all on torch {versions['ours']['torch']}, float32, "
            f"{result['machine']}, {result['date']}. Process seconds of one call, medians of {result['runs']} runs in turn; "
            "ratios run by run with their quartiles. `same tokens`: the share of the tokens that come out, merged ones "
            f"included, that the other side has too, in any order; the worst of the seeds. Made by `{result['command']}`.",
            "",
            markdown(rows),
            "",
            f"Slower than the package, beyond the spread: {'; '.join(slower) or 'none'}.",
        ]
    )


def package_environment(folder: Path) -> Path:
    """The Python of an environment with the packages; VisionZip's modules are in its source distribution only."""
    # what VisionZip imports of transformers is gone in later versions; SGLang is read, not run, and would bring a whole server
    python = environment(folder, ["tomesd==0.1.3", "transformers==4.57.6"], alone=["sglang==0.5.23"])
    source = folder / "source"
    if not source.exists():
        with tempfile.TemporaryDirectory() as work:
            wanted = ["--no-deps", "--no-binary", "visionzip", "visionzip==0.1.3"]
            subprocess.run([python, "-m", "pip", "download", "--quiet", "--dest", work, *wanted], check=True)
            (archive,) = Path(work).glob("visionzip-*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(Path(work) / "source", filter="data")
            (Path(work) / "source").rename(source)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache" / "mmaccel" / "peers", help="folder"
    )
    parser.add_argument("--methods", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--runs", type=int, default=9, help="timed in turn; 0 times nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, default=None, help="write the table between the marks of this page")
    args = parser.parse_args()
    python = package_environment(args.environments / "functions")
    result: dict[str, Any] = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": f"a CPU ({platform.machine()}), threads: {args.threads}",
        "runs": args.runs,
        "versions": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        ours = Process(sys.executable, "with_functions_of_mmaccel.py", args.threads, folder / "ours.log")
        peer = Process(python, "with_functions_of_packages.py", args.threads, folder / "peer.log")
        pair = Pair(ours, peer, folder)
        result["versions"] = {name: side(do="versions") for name, side in pair.sides.items()}
        for case in CASES:
            if case.method not in args.methods:
                continue
            row = pair.measure(case, args.runs)
            result["rows"].append(row)
            print(f"{case.method:<10} {case.name:<22} same {row['same']:.4f}  {row.get('to_peer', 0):.2f}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            if args.update:
                put_between(args.update, "peers-functions", table(result))
        ours.close()
        peer.close()


if __name__ == "__main__":
    main()
