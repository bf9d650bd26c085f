"""Count what keys and values in host memory cost a decode step: bytes over the bus, those that overlap, waits of the host.

A shipped model answers about several pictures on a simulated CUDA device (``simulated.py``), with each recipe on the device
and with ``offload="host"``. The answers must be the same; else the command ends with 1. No time is measured: divide the bytes
by the bandwidth of a bus.

    python benchmarks/offload.py --out benchmarks/results/offload-cpu.json
    python docs/making/tables.py docs/results/host-memory.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import simulated
import torch
from PIL import Image
from tqdm import tqdm

from mmaccel import accelerated, get_recipe, load
from mmaccel.cli.shared.text import markdown, write_json
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.bench import provenance

#: by name in the table: a recipe and its options
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "fp8": ("fp8", {}),
    "snapkv": ("snapkv", {"retain": 0.25}),
    "quest": ("quest", {"retain": 0.1, "layer": 0}),
    "loki": ("loki", {"retain": 0.1}),
    "squeezed-attention": ("squeezed-attention", {"retain": 0.1}),
    "tokenselect": ("tokenselect", {"retain": 0.1}),
    "dycoke-cache": ("dycoke-cache", {"retain": 0.1}),
}
STEPS = 16


def measure(name: str, pictures: int) -> dict[str, Any]:
    """The report on one shipped model."""
    model, processor = load(name, device="cpu", dtype="float32")
    pixels = np.random.default_rng(0).integers(0, 255, (pictures, 224, 224, 3), dtype=np.uint8)
    inputs = encode(processor, [Prompt("What is shown?", tuple(map(Image.fromarray, pixels)), None)])
    rows = []
    with simulated.machine() as gpu:
        gpu.put(model.requires_grad_(False))
        given = gpu.put(dict(inputs))
        for title, (recipe, options) in tqdm(RECIPES.items(), unit="recipe"):
            answers, waits, figures = [], [], {}
            for offload in (None, "host"):
                with accelerated(model, get_recipe(recipe, **options), processor=processor, offload=offload):
                    before = gpu.counts.copy()
                    how = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, "do_sample": False}
                    answers.append(gpu.numbers(model.generate(**given, **how, disable_compile=True)))
                    waits.append(sum(gpu.counts.since(before).waits.values()))
                    figures = model.mmaccel.stats()
            moved = figures["offload"]
            rows.append(
                {
                    "recipe": title,
                    "same": torch.equal(*answers),
                    **{
                        part: moved[part]
                        for part in ("device", "host", "fetched", "ahead", "written", "read", "a_step")
                    },
                    "waits": waits,
                }
            )
    return {
        "rows": rows,
        "model": name,
        "pictures": pictures,
        "tokens": int(inputs["input_ids"].shape[1]),
        "steps": STEPS,
        "date": provenance.today(),
        "versions": provenance.versions(),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    head = ["recipe", "on the host, KiB", "on the device, KiB", "over the bus a step, KiB", "of the cache"]
    head += ["fetched beside other layers", "waits of the host, without and with"]
    lines = [
        [
            f"`{row['recipe']}`",
            *(f"{row[part] / 1024:,.0f}" for part in ("host", "device", "a_step")),
            f"{row['a_step'] / row['host']:.0%}",
            f"{row['ahead'] / row['fetched']:.0%}" if row["fetched"] else "nothing is fetched",
            "{}, {}".format(*row["waits"]),
        ]
        for row in report["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"{markdown([head, *lines])}\n\n`python benchmarks/offload.py --pictures {report['pictures']}`: {report['model']}, "
        f"{report['tokens']:,} tokens, {report['steps']} steps, float32, counted on a simulated CUDA device, {versions}, "
        f"{report['date']}."
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-llava", help="a shipped model")
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    options = parser.parse_args()
    report = measure(options.model, options.pictures)
    print(table(report))
    if options.out:
        write_json(options.out, report)
    return 0 if all(row["same"] for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
