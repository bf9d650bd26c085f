"""What does a page of 300 dots an inch cost HunyuanOCR, and what of it do methods save?

A page of 8.5 by 11 inches is 33,000 patches of its tower and 8,300 tokens of its language model. Builds the shape
``hunyuanocr-1b`` (random weights, full width) and reads a drawn page with one layer of tower and language model, then with two.
All layers compute alike, so the second layer's operations, counted as ``mmaccel bench`` counts them, stand for those of every
further one: only methods in front of the language model can be asked. Attention allocates its result and computes nothing,
which would take an hour. The peak is that of bytes alive beside the weights, with one layer of each; further layers take only
their keys and values, whose bytes are those of all layers. ``written out`` are the bytes of one layer's attention as a matrix
in float32, which other implementations of this tower hold.

    python benchmarks/large_page.py --threads 1 --out benchmarks/results/large-page-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from live import Allocations
from torch import Tensor

from mmaccel import accelerated
from mmaccel.cli.shared.text import markdown, nbytes, put_between, write_json
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.arithmetic import count_operations
from mmaccel.programs.bench.shapes import SHAPES, build
from mmaccel.programs.bench.workloads import ShapeSubject, workload

SHAPE = "hunyuanocr-1b"
#: dots an inch, recipe and budget of each row
ROWS: tuple[tuple[int, str | None, float | None], ...] = (
    (300, None, None),
    (300, "pixelprune", None),
    (300, "spacetime", 0.25),
    (300, "spacetime", 0.1),
    (150, None, None),
    (150, "spacetime", 0.25),
)


def subject(depth: int) -> ShapeSubject:
    """The shape with ``depth`` layers in its tower and its language model."""
    shape = SHAPES[SHAPE]
    config = shape.config()
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = depth
    return ShapeSubject(build(SHAPE, torch.device("cpu"), torch.float32, config), shape)


def nothing(query: Tensor, *args: Any, **options: Any) -> Tensor:
    """What attention gives, of its shape alone."""
    return torch.zeros_like(query)


def read(one: ShapeSubject, dots: int, recipe: str | None, budget: float | None) -> dict[str, Any]:
    """Patches and visual tokens of a page, what of them is computed, operations, and the peak of bytes alive."""
    work = workload(f"page-{dots}")
    inputs = one.inputs(work, [one.pixels(work)])
    model, computed = one.model, [0]
    # every patch that the tower computes goes through the MLP
    handle = model.model.vision_tower.layers[-1].mlp.register_forward_pre_hook(
        lambda module, args: computed.__setitem__(0, args[0].shape[:-1].numel())
    )
    options = {} if budget is None else {"retain": budget}
    with contextlib.nullcontext() if recipe is None else accelerated(model, recipe, **options):
        with Allocations() as seen, mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", nothing):
            operations = count_operations(model, lambda: model.generate(**inputs, max_new_tokens=1, do_sample=False))
            seen.mark("all")
        kept = int((inputs["input_ids"] == model.config.image_token_id).sum())
        tokens = kept if recipe is None else model.mmaccel.stats()["visual_tokens_kept"]
    handle.remove()
    return {
        "patches": len(inputs["pixel_values"]),
        "computed": computed[0],
        "tokens": tokens,
        "length": inputs["input_ids"].shape[1] - kept + tokens,
        "vision": operations.vision,
        "language": operations.language,
        "peak": seen.spans["all"].peak,
    }


def row(shallow: ShapeSubject, deep: ShapeSubject, *asked: Any) -> dict[str, Any]:
    """A row of the table: operations of all layers, from those of one and of two."""
    first, second = read(shallow, *asked), read(deep, *asked)
    config = SHAPES[SHAPE].config()
    text, tower = config.text_config, config.vision_config
    made = {"dots": asked[0], "recipe": asked[1] or "none", "budget": asked[2], **first}
    for part, layers in (("vision", tower.num_hidden_layers), ("language", text.num_hidden_layers)):
        made[part] = first[part] + (layers - 1) * (second[part] - first[part])
    width = text.num_key_value_heads * text.head_dim * torch.bfloat16.itemsize
    made["kv"] = 2 * width * text.num_hidden_layers * first["length"]
    made["written_out"] = tower.num_attention_heads * first["computed"] ** 2 * torch.float32.itemsize
    return made


def table(report: dict[str, Any]) -> str:
    """The rows, and how they were made."""
    head = [
        "dots an inch",
        "recipe",
        "patches computed",
        "visual tokens",
        "tower, 10^12",
        "prefill, 10^12",
        "KV",
        "peak",
    ]
    bare = report["rows"][0]["vision"] + report["rows"][0]["language"]
    rows = [
        [
            str(one["dots"]),
            f"`{one['recipe']}`" + (f" {one['budget']}" if one["budget"] else ""),
            f"{one['computed']:,}",
            f"{one['tokens']:,}",
            f"{one['vision'] / 1e12:.1f}",
            f"{one['language'] / 1e12:.1f}",
            nbytes(one["kv"]),
            nbytes(one["peak"]),
            nbytes(one["written_out"]),
            f"{(one['vision'] + one['language']) / bare:.0%}",
        ]
        for one in report["rows"]
    ]
    return (
        f"`{SHAPE}`: operations of all layers, keys and values in bfloat16, peak with one layer in float32, on "
        f"{report['machine']}, {report['date']}, torch {report['versions']['torch']}, transformers "
        f"{report['versions']['transformers']}. Made by `{report['command']}`.\n\n"
        f"{markdown([[*head, 'attention written out', 'operations'], *rows])}"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--update", type=Path, help="write the table between the marks of this page")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    shallow, deep, rows = subject(1), subject(2), []
    for asked in ROWS:
        rows.append(row(shallow, deep, *asked))
        print(rows[-1], flush=True)
    report = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()})",
        "versions": provenance.versions(),
        "rows": rows,
    }
    if args.out:
        write_json(args.out, report)
    if args.update:
        put_between(args.update, "large page", table(report))


if __name__ == "__main__":
    main()
