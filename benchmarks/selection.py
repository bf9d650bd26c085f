"""What does it cost to choose which tokens stay, beside the prefill it saves?

Times every registered method at the sites ``projector`` and ``layers`` on random clips of 576, 2,880 and 16,384 visual tokens
as a 7B language model would read them: ``observe`` (for methods inside the language model) and ``reduce``, with what the vision
tower shows given. Left out are methods for which a smaller model chooses; what that reads is what they cost. Of chunks that
join it is one choice from all of them, and what is saved above the last join. Beside it stands
the time that a prefill of the model would save at that retention: the operations saved, less those of a look ahead, over the
FLOP/s of its largest matrix product, measured in the same run on the same device. On a CPU seconds are those of the process,
all threads together, so that other processes on the machine do not count.

    python benchmarks/selection.py --threads 1 --out benchmarks/results/selection-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel import DivPrune
from mmaccel.cli.shared.text import put_between
from mmaccel.core.budget import resolve
from mmaccel.method import (
    ChunkMethod,
    DraftMethod,
    LayerAttention,
    LayerMethod,
    PreviewMethod,
    TokenBatch,
    TokenMethod,
)
from mmaccel.method.registry import methods
from mmaccel.programs.bench import provenance
from mmaccel.runtime.prompt.proportional import represented_tokens

#: the language model of Qwen2.5-VL-7B and LLaVA-OneVision-7B
LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 28, 3584, 18944, 28, 4, 128
#: the vision tower, CLIP-L: its width and the width of a head
TOWER, TOWER_HEAD = 1024, 64
#: clips as (frames, height, width); text tokens behind each
CLIPS = {576: (4, 12, 12), 2880: (20, 12, 12), 16384: (64, 16, 16)}
TEXT = 64
#: seconds after which a method is not timed again
ENOUGH = 4.0


def clip(grid: tuple[int, int, int], method: TokenMethod, device: str, dtype: torch.dtype) -> TokenBatch:
    """One clip whose frames resemble the one before, as ``method`` sees it."""
    t, h, w = grid
    n, rng = t * h * w, torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    def drifting(width: int) -> Tensor:
        still = noise(1, h * w, width).expand(t, -1, -1)
        return (still + noise(t, h * w, width) * 0.5).reshape(1, n, width)

    signals = {}
    for tap in method.taps():
        shape = {"features": TOWER, "shift": 1, "keys": TOWER_HEAD, "keys_unsplit": TOWER}.get(tap.kind)
        if shape is None:
            signals[tap.kind] = noise(1, len(tap.layers), n).softmax(-1)
        else:
            signals[tap.kind] = torch.stack([drifting(shape) for _ in tap.layers], 1)
    axes = [torch.arange(size, device=device) for size in grid]
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(1, n, 3)
    asked = method.needs_question
    return TokenBatch(
        features=drifting(WIDTH).to(dtype),
        valid=torch.ones(1, n, dtype=torch.bool, device=device),
        cells=cells,
        grid=torch.tensor([grid], device=device),
        segment=torch.zeros(1, n, dtype=torch.long, device=device),
        question=noise(1, 16, WIDTH).to(dtype) if asked else None,
        question_valid=torch.ones(1, 16, dtype=torch.bool, device=device) if asked else None,
        signals=signals,
    )


def attention(n: int, device: str, dtype: torch.dtype) -> LayerAttention:
    """What a layer holds: queries and keys of ``n`` visual tokens and the text behind them."""
    rng, size = torch.Generator(device).manual_seed(1), n + TEXT

    def noise(heads: int) -> Tensor:
        return torch.randn(1, heads, size, HEAD, generator=rng, device=device).to(dtype)

    text = torch.arange(size, device=device)[None] >= n
    return LayerAttention(noise(HEADS), noise(KV_HEADS), None, HEAD**-0.5, text)


def operations(tokens: int) -> float:
    """Multiply-adds times two of one layer over a prompt of ``tokens``; causal attention is half a square."""
    linear = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * HEAD + 3 * WIDTH * HIDDEN
    return 2.0 * linear * tokens + 2.0 * tokens * tokens * HEADS * HEAD


def saved(tokens: int, kept: int, first_layer: int) -> float:
    """Operations of a prefill that layers from ``first_layer`` on no longer do."""
    return (LAYERS - first_layer) * (operations(tokens + TEXT) - operations(kept + TEXT))


def ahead(method: TokenMethod, tokens: int) -> float:
    """Operations of a look ahead: the layers of a first pass, or the projections of one layer."""
    if isinstance(method, PreviewMethod):
        return layer_of(method) * operations(tokens + TEXT)
    if isinstance(method, LayerMethod) and method.looks_ahead:
        return 2.0 * (WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * HEAD) * (tokens + TEXT)
    return 0.0


def layer_of(method: LayerMethod | PreviewMethod | ChunkMethod) -> int:
    """The layer at which it works in this model, the last one where chunks join; there are two levels at a quarter."""
    if isinstance(method, ChunkMethod):
        return dataclasses.replace(method, layer=int(method.layer * LAYERS + 0.5)).joins(2, LAYERS)[-1]  # type: ignore[type-var]
    return method.layer if isinstance(method.layer, int) else int(method.layer * LAYERS + 0.5)


def seconds(work: Callable[[], Any], device: str, runs: int) -> list[float]:
    """One warm-up, which counts if it took long, then up to ``runs``."""
    sync, clock = (torch.cuda.synchronize, time.perf_counter) if device == "cuda" else (lambda: None, time.process_time)
    taken: list[float] = []
    while len(taken) <= runs and sum(taken) < ENOUGH:
        sync()
        start = clock()
        work()
        sync()
        taken.append(clock() - start)
    return taken[1:] or taken


def speed(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of the model's largest product over 512 tokens on a CPU, 8,192 on a GPU."""
    tokens = 8192 if device == "cuda" else 512
    x, weight = (torch.randn(size, WIDTH, device=device).to(dtype) for size in (tokens, HIDDEN))
    return 2.0 * tokens * WIDTH * HIDDEN / statistics.median(seconds(lambda: x @ weight.T, device, 5))


def figures(kind: type[TokenMethod], n: int, args: argparse.Namespace) -> dict[str, Any]:
    """One method on one clip."""
    method = kind()
    tokens = clip(CLIPS[n], method, args.device, args.dtype)
    count = torch.tensor([resolve(args.retain, n)], device=args.device)
    first_layer = 0
    if isinstance(method, (LayerMethod, PreviewMethod, ChunkMethod)):
        first_layer = 0 if isinstance(method, PreviewMethod) else max(1, layer_of(method))
        seen = attention(n, args.device, args.dtype)
        entered = torch.cat([tokens.features, tokens.features[:, :TEXT]], 1)

        def work() -> int:
            prepared = method.prepare(entered, seen.text, ~seen.text) if isinstance(method, LayerMethod) else {}
            shown = dataclasses.replace(seen, prepared=prepared)
            if isinstance(method, ChunkMethod):
                found = method.observe(shown, torch.arange(n + TEXT, device=args.device)[None], first_layer - 1)
            else:
                found = method.observe(shown)
            tokens.signals.update({name: figure[:, :n] for name, figure in found.items()})  # type: ignore[attr-defined]
            if tokens.question is not None:
                said = {name: figure[:, -tokens.question.shape[1] :] for name, figure in found.items()}
                tokens.question_signals.update(said)  # type: ignore[attr-defined]
            return int(method.reduce(tokens, count).kept.sum())
    else:

        def work() -> int:
            return int(method.reduce(tokens, count).kept.sum())

    row = timed(work, n, args)
    row |= {"method": method.name, "site": method.site, "from_layer": first_layer}
    return row | {"operations_saved": saved(n, row["kept"], first_layer) - ahead(method, n)}


def weights(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """What it takes to say how many tokens each of those that are left stands for, for proportional attention."""
    tokens, count = clip(CLIPS[n], DivPrune(), args.device, args.dtype), resolve(args.retain, n)
    kept = torch.zeros_like(tokens.valid)
    kept[:, torch.linspace(0, n - 1, count, device=args.device).long()] = True

    def work() -> int:
        represented_tokens(tokens.features, tokens.valid, kept, count)
        return count

    row = timed(work, n, args) | {"method": "(weights of what is left)", "site": "projector", "from_layer": 0}
    return row | {"operations_saved": saved(n, count, 0)}


def timed(work: Callable[[], int], n: int, args: argparse.Namespace) -> dict[str, Any]:
    """How long it takes to choose among ``n`` tokens, and how many ``work`` says are left."""
    kept: list[int] = []
    with torch.inference_mode():
        taken = seconds(lambda: kept.append(work()), args.device, args.runs)
    return {"tokens": n, "kept": kept[-1], "runs": len(taken), "selection_s": statistics.median(taken)}


def table(result: dict[str, Any]) -> str:
    """The figures as a table: seconds, and the share of the saved prefill time that they are."""
    sizes = sorted({row["tokens"] for row in result["rows"]})
    head = [f"{n:,} tokens" for n in sizes]
    lines = [
        "| method | site | " + " | ".join(head) + " |",
        "|---|---|" + "---:|" * len(sizes),
    ]
    by_method: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        by_method.setdefault(row["method"], {})[row["tokens"]] = row
    for name, rows in sorted(by_method.items(), key=lambda item: -max(r["share"] or 0.0 for r in item[1].values())):
        cells = []
        for n in sizes:
            if n not in rows:
                cells.append("not timed")
                continue
            row = rows[n]
            share = "nothing saved" if row["share"] is None else f"{row['share']:.2%}"
            cells.append(f"{row['selection_s'] * 1e3:,.1f} ms, {share}")
        lines.append(f"| {name} | {next(iter(rows.values()))['site']} | " + " | ".join(cells) + " |")
    machine = result["machine"]
    shares = [row["share"] for row in result["rows"] if row["share"] is not None]
    return "\n".join(
        [
            f"Selection at {result['retain']:.0%} retention, and its share of the prefill time that a 7B model saves by it, on "
            f"{machine['processor']} (threads: {machine['threads']}, {machine['dtype']}, "
            f"{machine['flops_per_s'] / 1e9:,.0f} GFLOP/s in the model's largest product), {result['date']}, torch "
            f"{result['versions']['torch']}. The largest share is {max(shares, default=0.0):.2%}; "
            f"{sum(s > 0.1 for s in shares)} of {len(shares)} are above 10%. Made by `{result['command']}`.",
            "",
            *lines,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=None, help="by name; default: all of both sites")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(CLIPS), choices=list(CLIPS))
    parser.add_argument("--retain", type=float, default=0.25)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, default=None, help="write the table between the marks of this page")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    per_second = speed(args.device, args.dtype)
    print(f"{per_second / 1e9:,.0f} GFLOP/s", flush=True)
    kinds = [
        kind
        for name, kind in methods().items()
        if issubclass(kind, TokenMethod) and kind.__module__.startswith("mmaccel.")
        if args.methods is None or name in args.methods
        # one chooses by nothing before it is trained
        if name != "learned" and not issubclass(kind, DraftMethod)
    ]
    result: dict[str, Any] = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": {
            "processor": provenance.processor(args.device)
            if args.device == "cuda"
            else f"a CPU ({provenance.processor()})",
            "threads": torch.get_num_threads(),
            "dtype": str(args.dtype).removeprefix("torch."),
            "flops_per_s": per_second,
        },
        "versions": provenance.versions(),
        "model": {"layers": LAYERS, "width": WIDTH, "intermediate": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS},
        "retain": args.retain,
        "rows": [],
    }
    works: list[Callable[[int], dict[str, Any]]] = [
        *(functools.partial(figures, kind, args=args) for kind in kinds),
        functools.partial(weights, args=args),
    ]
    took = dict.fromkeys(works, 0.0)
    for n in sorted(args.sizes):
        # the quick ones first: a run that is cut short has written most of what it wanted
        for work in sorted(works, key=took.__getitem__):
            row = work(n)
            took[work], gain = row["selection_s"], row["operations_saved"] / per_second
            row |= {"prefill_saved_s": gain, "share": row["selection_s"] / gain if gain > 0 else None}
            result["rows"].append(row)
            share = "-" if row["share"] is None else f"{row['share']:.3%}"
            print(f"{n:>6} {row['method']:<20}{row['kept']:>6}{row['selection_s']:>10.4f} s{share:>10}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            if args.update:
                put_between(args.update, "selection", table(result))


if __name__ == "__main__":
    main()
