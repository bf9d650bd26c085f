"""Does decoding get faster because the cache is smaller, and from which context on?

A decode step reads the weights once and the cache of every row. Three questions, each with its part of this program:

--arithmetic   From which batch x context on can a smaller cache pay at all? Computed from the shape of a model and the
               bandwidth of a memory; nothing is run.
(default)      What does a step cost, bare and with each recipe?
               host: kernels launched and waits of the host, a step and a layer, and microseconds of the host a layer. Taken
               of the thin shape: as many layers and hardly any width, so that the host is what a step waits for; what comes
               with each layer is the difference to half the layers. Means over the steps of an answer: what a cache packs,
               128 tokens at a time, falls into them or not. On a GPU torch.profiler counts, without one a simulated CUDA
               device does (simulated.py), where an operation is one launch. Without a GPU kernels, attention and the copies
               of an ordinary cache do nothing (unlaunched.py), so that the microseconds are CPU time of Python and of
               PyTorch's dispatch; and functions called are counted, which no other program disturbs. Steps are run as they
               are; those that are replayed as a CUDA graph ask nothing of the host.
               steps: bytes read and held, computed from the cache as it is at the end of the answer, and tokens a second.
               Language model of the real size with random weights, a thin vision tower, equal rows. The bare model and all
               recipes take turns; ratios are of runs that followed each other, with the spread of their median.
--kernel       Decode attention alone, over a dense, an uneven (ragged) and a packed cache of 4 and of 2 bits, beside
               scaled_dot_product_attention and its flash attention on the dense one, and the length from which on each is
               faster than the fastest of these. Needs a GPU.

    python benchmarks/decode.py --arithmetic --shape qwen2.5-vl-7b --bandwidth 3.35
    python benchmarks/decode.py --shape small --keys 1024 4096 --recipe none snapkv kivi --out decode.json
    python benchmarks/decode.py --shape qwen2.5-vl-7b --keys 8192 131072 --batch 1 8 --out decode.json     # on a GPU
    python benchmarks/decode.py --kernel --keys 1024 32768 262144 --batch 1 16 --out decode-kernels.json   # on a GPU
    python benchmarks/decode.py --dry-run                                                                  # all parts, tiny
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreter  # noqa: F401
import torch

from mmaccel import accelerated, get_recipe, recipes
from mmaccel.cli.shared.text import markdown, nbytes, put_between
from mmaccel.errors import MmaccelError
from mmaccel.families import family_of
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.arithmetic import promised_decode, weight_bytes
from mmaccel.programs.bench.figures import Spread
from mmaccel.programs.bench.run import Bench, Case, Variant, why_not
from mmaccel.programs.bench.shapes import SHAPES, build, change_config, free_memory, shape, skeleton, thin_tower
from mmaccel.programs.bench.workloads import ShapeSubject, workload

#: those of them that there are
RECIPES = ("none", "balanced", "snapkv", "adakv", "kivi", "h2o-decode", "streaming-llm-decode", "dycoke-cache")
RECIPES += ("quest", "tokenselect", "loki")
REAL, TINY = ("qwen2.5-vl-7b", "llava-onevision-7b"), "tiny"
#: TB/s, of an H200 as its data sheet says; what can be had of it is less, and both sides of a ratio feel that alike
H200 = 4.8
COMPILED = "bare, static cache, compiled"
#: pictures that the host part shows, enough for every recipe to work, and steps of an answer if nothing is asked for
SHOWN, STEPS = 4, 32


def tell(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def thousands(tokens: float) -> str:
    """``265432`` -> ``265k``."""
    if tokens == math.inf:
        return "never"
    return f"{tokens / 1000:,.0f}k" if tokens >= 10_000 else f"{tokens / 1000:,.1f}k"


#: the size of the heads of a thin language model
_THIN_HEAD = 32


def thin(config: Any, layers: int) -> Any:
    """``config`` with hardly any width in the language model either, and with so many layers of it, changed in place: a step
    costs what the host does, and next to nothing else."""
    text = config.text_config
    values: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": 4 * _THIN_HEAD,
        "intermediate_size": 64,
        "vocab_size": 2048,
        "num_experts": 16,
        "moe_intermediate_size": 32,
    }
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": _THIN_HEAD}
    values |= {"layer_types": ["full_attention"] * layers}
    if sections := text.rope_parameters.get("mrope_section"):
        width = int(_THIN_HEAD * text.rope_parameters.get("partial_rotary_factor", 1)) // 2
        parts = [part * width // sum(sections) for part in sections]
        text.rope_parameters["mrope_section"] = [width - sum(parts[1:]), *parts[1:]]
    change_config(config, config.vision_config, dict.fromkeys(("out_hidden_size", "text_hidden_size"), 4 * _THIN_HEAD))
    return thin_tower(change_config(config, text, values))


def token_bytes(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers, in full precision."""
    family = family_of(model)
    return sum(2 * math.prod(family.heads_in(number)) for number in family.attending) * int(model.dtype.itemsize)


@dataclass(frozen=True)
class DecodeStep:
    """What a decode step reads: ``weights`` once, and ``token`` bytes of keys and values for every token of batch x context."""

    weights: int
    token: int

    @classmethod
    def of(cls, model: Any) -> DecodeStep:
        """Of a model, which may be one without memory."""
        return cls(weight_bytes(model), token_bytes(model))

    def seconds(self, tokens: float, bandwidth: float) -> float:
        """The least a step takes over a memory of so many bytes a second."""
        return (self.weights + tokens * self.token) / bandwidth

    def limit(self, tokens: float, share: float = 0.0) -> float:
        """How many times faster a step gets if only a ``share`` of the bytes of the cache is read; of none, the most that any
        compression can give."""
        return promised_decode(self.weights, tokens * self.token, share * tokens * self.token)

    def pays_from(self, gain: float, share: float = 0.0) -> float:
        """Tokens of batch x context from which on reading a ``share`` of the cache makes a step ``gain`` times as fast; inf
        where it never does."""
        left = 1 - gain * share
        return self.weights * (gain - 1) / (self.token * left) if left > 0 else float("inf")


# --- arithmetic -------------------------------------------------------------------------------------------------------
def arithmetic(name: str, bandwidth: float) -> dict[str, Any]:
    """What the shape says of a decode step in bfloat16; ``bandwidth`` in bytes a second."""
    step = DecodeStep.of(skeleton(name, torch.bfloat16))
    return {
        "shape": name,
        "weight_bytes": step.weights,
        "token_bytes": step.token,
        "weights_s": step.seconds(0, bandwidth),
        "limit": {str(n): step.limit(n) for n in (8192, 131072)},
        "keys_s": {str(n): step.seconds(n, bandwidth) - step.seconds(0, bandwidth) for n in (8192, 131072)},
        "equal_tokens": step.pays_from(2.0),
        "pays_from": {
            # 5 % is the least that the benchmarks call a difference
            f"{gain:g}": {"nothing": step.pays_from(gain), "a quarter": step.pays_from(gain, 0.25)}
            for gain in (1.05, 1.5, 2.0)
        },
    }


def arithmetic_table(rows: Sequence[dict[str, Any]], bandwidth: float, command: str) -> str:
    """As Markdown, with the command that makes it."""
    gains = list(rows[0]["pays_from"])
    head = ["shape", "weights a step", "KV a token", "weights alone take", "8k keys take", "most at 8k", "most at 128k"]
    table = [[*head, "cache = weights at", *(f"a quarter read: {gain}x from" for gain in gains)]]
    for row in rows:
        cells = [f"`{row['shape']}`", nbytes(row["weight_bytes"]), nbytes(row["token_bytes"])]
        cells += [f"{1e3 * spent:.3g} ms" for spent in (row["weights_s"], row["keys_s"]["8192"])]
        cells += [f"{row['limit'][n]:.2f}x" for n in ("8192", "131072")]
        cells += [thousands(row["equal_tokens"]), *(thousands(row["pays_from"][gain]["a quarter"]) for gain in gains)]
        table.append(cells)
    return "\n".join(
        [
            f"bfloat16, {bandwidth / 1e12:g} TB/s. Made by `{command}`; arithmetic, no measurement.",
            "",
            markdown(table),
        ]
    )


# --- the host ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counted:
    """Kernels launched and waits of the host."""

    launches: float
    waits: float

    def __sub__(self, other: Counted) -> Counted:
        return Counted(self.launches - other.launches, self.waits - other.waits)

    def over(self, count: int) -> Counted:
        """A share of it."""
        return Counted(self.launches / count, self.waits / count)


def thin_subject(name: str, layers: int, device: torch.device) -> ShapeSubject:
    """The shape with so many layers and hardly any width."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return ShapeSubject(build(name, device, dtype, thin(shape(name).config(), layers)), shape(name))


def shown_to(subject: ShapeSubject) -> Any:
    """Inputs of the host part, on the device of the model."""
    work = workload(f"pictures-{SHOWN}")
    inputs = subject.inputs(work, [subject.pixels(work)])
    device, dtype = subject.model.device, subject.model.dtype
    return {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()}


def generate(subject: ShapeSubject, inputs: Any, variant: Variant, steps: int, streamer: Any = None) -> None:
    """A prompt and so many decode steps."""
    context = nullcontext() if variant.recipe is None else accelerated(subject.model, variant.recipe)
    with context:
        subject.model.generate(
            **inputs, max_new_tokens=steps + 1, do_sample=False, streamer=streamer, **variant.options
        )


class Ticks:
    """A streamer that notes when each token came: in wall seconds beside a GPU, else in CPU seconds of this thread, which other
    programs disturb least."""

    def __init__(self, device: torch.device) -> None:
        self.clock = time.perf_counter if device.type == "cuda" else time.thread_time
        self.at: list[float] = []

    def put(self, value: Any) -> None:
        self.at.append(self.clock())

    def end(self) -> None:
        """Nothing to do."""

    @property
    def step(self) -> float:
        """Mean seconds of a decode step; the first thing that came was the prompt, the second what prefill said."""
        return (self.at[-1] - self.at[1]) / (len(self.at) - 2)


def counted(name: str, layers: int, variant: Variant, device: torch.device, steps: int) -> Counted:
    """Launches and waits of ``steps`` decode steps: those of a long answer less those of one token."""
    subject = thin_subject(name, layers, device)
    inputs = shown_to(subject)
    if device.type == "cuda":
        # kernels are compiled, and graphs are recorded, before anything is counted
        generate(subject, inputs, variant, steps)
        return _profiled(subject, inputs, variant, steps) - _profiled(subject, inputs, variant, 0)
    import simulated

    with simulated.machine() as gpu:
        gpu.put(subject.model.requires_grad_(False))
        marks = [gpu.counts.copy()]
        for length in (steps, 0):
            generate(subject, gpu.put(inputs), variant, length)
            marks.append(gpu.counts.copy())
    found = [after.since(before) for before, after in zip(marks, marks[1:], strict=False)]
    long, short = (Counted(sum(one.launches.values()), sum(one.waits.values())) for one in found)
    return long - short


def _profiled(subject: ShapeSubject, inputs: Any, variant: Variant, steps: int) -> Counted:
    """What CUDA was asked for in all, by torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        generate(subject, inputs, variant, steps)
    # without the tree that `seen.events()` makes of them
    names = [event.name() for event in seen.profiler.kineto_results.events()]
    starts = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    return Counted(sum(name.startswith(starts) for name in names), sum(name in waits for name in names))


def called(name: str, layers: int, variant: Variant, steps: int) -> float:
    """Functions of Python and of C that the host calls in ``steps`` decode steps, without what a GPU would do."""
    from unlaunched import calls, unlaunched

    subject = thin_subject(name, layers, torch.device("cpu"))
    inputs, found = shown_to(subject), []
    with unlaunched():
        # what is made once is made
        generate(subject, inputs, variant, steps)
        for length in (steps, 0):
            with calls() as count:
                generate(subject, inputs, variant, length)
            found.append(count[0])
    return (found[0] - found[1]) / steps


def host(
    name: str, variants: Sequence[Variant], device: torch.device, repeats: int, steps: int
) -> list[dict[str, Any]]:
    """A row for every variant: what a step asks of the host, in all and with each layer; timed in ``repeats`` rounds."""
    deep = shape(name).config().text_config.num_hidden_layers
    depths = (deep // 2, deep)
    rows = []
    for variant in variants:
        row: dict[str, Any] = {"shape": name, "recipe": variant.title, "layers": deep, "steps": steps}
        row["problem"] = None
        rows.append(row)
        if variant.options and device.type == "cpu":
            continue  # a simulated device compiles nothing
        tell(f"{name}, host: counting {variant.title}")
        try:
            few, many = (counted(name, layers, variant, device, steps).over(steps) for layers in depths)
        except Exception as error:
            row["problem"] = why_not(error, foreign=bool(variant.options))
            if row["problem"] is None:
                raise
            continue
        row["step"] = vars(many)
        row["layer"] = vars((many - few).over(depths[1] - depths[0]))
        if device.type == "cpu":
            less, more = (called(name, layers, variant, steps) for layers in depths)
            row["calls_layer"] = (more - less) / (depths[1] - depths[0])
    alive = [variant for variant, row in zip(variants, rows, strict=True) if row["problem"] is None]
    spreads = timed(name, depths, alive, device, repeats, steps) if repeats else {}
    for row in rows:
        if row["recipe"] in spreads:
            row["us_layer"] = spreads[row["recipe"]].as_dict()
    return rows


def timed(
    name: str, depths: tuple[int, int], variants: Sequence[Variant], device: torch.device, repeats: int, steps: int
) -> dict[str, Spread]:
    """Microseconds that a step spends on a layer, by title; variants take turns."""
    subjects = [thin_subject(name, layers, device) for layers in depths]
    inputs = [shown_to(subject) for subject in subjects]
    taken: dict[str, list[float]] = {variant.title: [] for variant in variants}
    with ExitStack() as stack:
        if device.type == "cpu":
            from unlaunched import unlaunched

            stack.enter_context(unlaunched())
        for repeat in range(repeats + 1):
            # another one begins each time, so that none always follows the same
            turn = repeat % len(variants)
            for variant in [*variants[turn:], *variants[:turn]]:
                ticks = [Ticks(device) for _ in depths]
                for subject, given, seen in zip(subjects, inputs, ticks, strict=True):
                    generate(subject, given, variant, steps, seen)
                if repeat:
                    taken[variant.title].append(1e6 * (ticks[1].step - ticks[0].step) / (depths[1] - depths[0]))
            tell(f"{name}, host: round {repeat} of {repeats}" if repeat else f"{name}, host: warm")
    return {title: Spread(tuple(samples)) for title, samples in taken.items()}


def host_table(rows: Sequence[dict[str, Any]], gpu: bool) -> str:
    """As Markdown."""
    how = "torch.profiler" if gpu else "a simulated CUDA device"
    micro = "host us a layer" if gpu else "host us a layer, nothing launched"
    table = [["recipe", micro, "launches a step", "a layer", "waits a step", "a layer", "calls a layer"]]
    for row in rows:
        counts = ["-"] * 4
        if "step" in row:
            counts = [f"{row[of][what]:.2f}" for what in ("launches", "waits") for of in ("step", "layer")]
        told = row["problem"] or "-"
        if "us_layer" in row:
            spread = Spread.of(row["us_layer"])
            told = f"{spread.median:.0f} ±{spread.notch:.0f}"
        calls = f"{row['calls_layer']:.0f}" if "calls_layer" in row else "-"
        table.append([row["recipe"], told, *counts, calls])
    if not any("calls_layer" in row for row in rows):
        table = [line[:-1] for line in table]
    if not any("us_layer" in row or row["problem"] for row in rows):
        table = [[line[0], *line[2:]] for line in table]
    told = f"Launches and waits by {how}, mean of {rows[0]['steps']} steps; {rows[0]['layers']} layers."
    return f"{told}\n\n{markdown(table)}"


# --- steps ------------------------------------------------------------------------------------------------------------
def pictures_for(subject: ShapeSubject, keys: int) -> tuple[int, int]:
    """How many pictures make a prompt of at most so many keys, two at least, and how many keys it has."""
    lengths = []
    for count in (2, 3):
        work = workload(f"pictures-{count}")
        lengths.append(subject.inputs(work, [subject.pixels(work)])["input_ids"].shape[1])
    each = lengths[1] - lengths[0]
    count = max(2, 2 + (keys - lengths[0]) // each)
    return count, lengths[0] + (count - 2) * each


def room(subject: ShapeSubject, tokens: int) -> str | None:
    """Why a prompt of so many tokens of batch x context cannot be had, as far as arithmetic tells; None if it can."""
    text, model = subject.model.config.text_config, subject.model
    # input, residual and what was normalised; gate, what it is multiplied with, and the product; queries and output
    activations = tokens * model.dtype.itemsize * (5 * text.hidden_size + 3 * text.intermediate_size)
    needed = tokens * DecodeStep.of(model).token + activations
    free = free_memory(model.device)
    if free is None or needed < free:
        return None
    return f"needs about {nbytes(needed)} for cache and prefill, {nbytes(free)} are free"


def steps(
    name: str, variants: Sequence[Variant], device: torch.device, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of every batch and context, the shortest prompts first."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    subject = ShapeSubject(build(name, device, dtype, thin_tower(shape(name).config())), shape(name))
    bench = Bench(subject, args.repeats, tell=lambda text: tell(f"{name}, {text}"))
    named = [(variant.title, variant.recipe) for variant in variants if variant.recipe is not None]
    others = [variant for variant in variants if variant.options]
    for keys, batch in sorted(((k, b) for k in args.keys for b in args.batch), key=lambda load: load[0] * load[1]):
        count, length = pictures_for(subject, keys)
        load = {"shape": name, "keys": length, "batch": batch}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if (problem := room(subject, batch * length)) is not None:
            tell(f"{name}, {batch} x {length} keys: left out, {problem}")
            yield {**load, "recipe": "bare", "problem": problem}
            continue
        for row in bench.measure(Case(f"pictures-{count}", args.answer, batch), named, others):
            yield load | row


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown; every loss is in it."""
    table = [
        ["batch x keys", "recipe", "weights", "KV read", "metadata", "held", "tokens/s", "x", "promised", "verdict"]
    ]
    for row in rows:
        load = f"{row['batch']} x {row['keys']:,}"
        if row["problem"] is not None:
            table.append([load, row["recipe"], *["-"] * 7, row["problem"]])
            continue
        read, speed = row["step_bytes"], Spread.of(row["figures"]["decode_tokens_per_s"])
        cells = [*(nbytes(read[part]) for part in ("weights", "kv", "metadata")), nbytes(row["kv_bytes"])]
        cells.append(f"{speed.median:.1f} ±{speed.notch / speed.median:.0%}")
        if "speedup" in row:
            ratio = Spread.of(row["speedup"]["decode"])
            cells += [f"{ratio.median:.2f} ±{ratio.notch:.2f}", f"{row['promised']['decode']:.2f}"]
            cells.append(row["verdict"]["decode"])
        table.append([load, row["recipe"], *cells, *["-"] * (10 - 2 - len(cells))])
    return markdown(table)


def variants_of(args: argparse.Namespace, device: torch.device) -> list[Variant]:
    """The bare model, with a static cache and compiled where that is asked for or is on a GPU, and the recipes."""
    made = [Variant("bare")]
    if args.static or device.type == "cuda":
        options: dict[str, Any] = {"cache_implementation": "static"}
        if device.type == "cpu":
            from transformers import CompileConfig

            options["compile_config"] = CompileConfig()
            options["compile_config"]._compile_all_devices = True
        made.append(Variant(COMPILED, options=options))
    else:
        tell("The static cache is left out: transformers compiles it on GPUs only; --static asks for it here too.")
    names = args.recipe or [name for name in RECIPES if name in recipes()]
    return made + [Variant(name, get_recipe(name)) for name in names]


def uncaptured(variants: Sequence[Variant], device: torch.device) -> list[Variant]:
    """On a GPU, where steps of recipes are replayed, the recipes once more with every step run as it is."""
    if device.type == "cpu":
        return []
    options = {"disable_compile": True}
    return [Variant(f"{one.title}, not replayed", one.recipe, options) for one in variants if one.recipe is not None]


# --- kernels ----------------------------------------------------------------------------------------------------------
#: packed caches that are timed, by their names in kernels.py
PACKED = ("kivi 4 bit", "kivi 2 bit")


def kernel_rows(name: str, args: argparse.Namespace) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """Decode attention of every batch and length, with the heads of a shape: after each the copy bandwidth of this run, and all
    rows so far."""
    import kernels

    text = shape(name).config().text_config
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    shared = SimpleNamespace(batch=1, keys=1, kv_heads=kv_heads, groups=heads // kv_heads, head_size=size)
    bench = kernels.Bench(shared)
    print(f"{name}: copying: {bench.copy / 1e9:.1f} GB/s", flush=True)
    for keys, batch in ((k, b) for b in args.batch for k in sorted(args.keys)):
        needed = 6 * 2 * batch * kv_heads * keys * size * bench.dtype.itemsize
        if bench.gpu and needed > (free_memory(bench.device) or needed):
            tell(f"{batch} x {keys} keys: left out, needs about {nbytes(needed)}")
            continue
        shared.batch, shared.keys = batch, keys
        start = len(bench.rows)
        ours = kernels.decode_dense(bench, compiled=False)
        dense = min(row["seconds"] for row in bench.rows[start:] if "seconds" in row)
        bench.release()
        kernels.decode_ragged(bench)
        for codec in PACKED:
            bench.release()
            kernels.decode_packed(bench, ours, codec)
        bench.release()
        for row in bench.rows[start:]:
            row |= {"keys": keys, "batch": batch, "kind": row["name"].rsplit(",", 1)[0]}
            if "seconds" in row:
                row["faster_than_the_fastest_dense_by"] = dense / row["seconds"]
        yield bench.copy, bench.rows


def break_even(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for every kind and batch: the length from which on it is faster than the fastest dense attention."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in rows:
        kind = row["kind"].removeprefix("decode attention, ")
        if kind in ("ragged", *PACKED) and "faster_than_the_fastest_dense_by" in row:
            found.setdefault((kind, row["batch"]), []).append((row["keys"], row["faster_than_the_fastest_dense_by"]))
    lines = []
    for (kind, batch), points in found.items():
        points.sort()
        slower = [i for i, (_, ratio) in enumerate(points) if ratio <= 1.0]
        first = slower[-1] + 1 if slower else 0
        told = f"not faster than dense up to {points[-1][0]:,} keys"
        if first < len(points):
            told = f"faster than dense from {points[first][0]:,} keys on (the lengths measured)"
        lines.append(f"{kind}, batch {batch}: {told}; {points[-1][1]:.2f}x at {points[-1][0]:,}")
    return lines


# --- the program ------------------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--arithmetic", action="store_true", help="what shapes say, without running anything")
    part.add_argument("--kernel", action="store_true", help="decode attention alone, on a GPU")
    part.add_argument("--dry-run", action="store_true", help="all parts at tiny shapes, on a CPU too")
    parser.add_argument(
        "--shape",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(SHAPES)} (default: with --arithmetic all real ones, on a GPU {' and '.join(REAL)}, else small)",
    )
    parser.add_argument(
        "--recipe", nargs="+", metavar="NAME", help=f"default: {', '.join(RECIPES)}, where there is one"
    )
    parser.add_argument(
        "--keys", type=int, nargs="+", help="contexts in tokens (default: 1024 4096; on a GPU 1k to 256k)"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="rows (default: 1; on a GPU 1 8 32, as memory allows)")
    parser.add_argument("--answer", type=int, default=STEPS + 1, help=f"tokens of the answer (default: {STEPS + 1})")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up (default: 5)")
    parser.add_argument(
        "--static", action="store_true", help="compile the bare model with a static cache on a CPU as well"
    )
    parser.add_argument(
        "--only",
        choices=("counts", "host", "steps"),
        help="launches and waits alone, or with microseconds, or steps alone",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=H200,
        metavar="TB/S",
        help=f"of the memory, for --arithmetic (default: {H200}, an H200 by its data sheet; an H100 SXM has 3.35)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON here, as it comes")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables between the marks of this page")
    args = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    if args.dry_run:
        args.shape, args.keys, args.batch, args.answer, args.repeats = [TINY], [64], [1], 3, 1
        args.recipe = args.recipe or ["snapkv"]
    args.shape = args.shape or (
        [name for name in SHAPES if SHAPES[name].source] if args.arithmetic else list(REAL) if gpu else ["small"]
    )
    args.keys = args.keys or ([1024, 8192, 32768, 131072, 262144] if gpu else [1024, 4096])
    args.batch = args.batch or ([1, 8, 32] if gpu else [1])
    return args


def check(args: argparse.Namespace) -> None:
    """Refuse in one sentence what cannot be done, before anything is run."""
    for name in args.shape:
        shape(name)
    for name in args.recipe or ():
        get_recipe(name)
    if args.repeats < 1 or args.answer < 2 or min(*args.keys, *args.batch) < 1 or not args.bandwidth > 0:
        raise MmaccelError("--keys, --batch and --repeats must be 1 or more, --answer 2 or more, --bandwidth above 0.")
    for path in (args.out, args.update):
        if path is not None and not path.absolute().parent.is_dir():
            raise MmaccelError(f"The folder {str(path.absolute().parent)!r} does not exist; make it first.")
    if args.kernel and not torch.cuda.is_available():
        raise MmaccelError("--kernel needs a GPU, and there is none here; --dry-run goes through it at tiny shapes.")


class Report:
    """What was found, written after every row, so that what is cut short is not lost."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.path = args.out
        self.content: dict[str, Any] = {
            "command": provenance.command("python", sys.argv[0]),
            "date": provenance.today(),
            "machine": {"processor": provenance.processor(str(device)), "threads": torch.get_num_threads()},
            "versions": provenance.versions(("torch", "triton", "transformers", "mmaccel")),
        }

    def put(self, part: str, rows: Any) -> None:
        """One part, anew."""
        self.content[part] = rows
        if self.path is not None:
            draft = self.path.with_name(self.path.name + ".part")
            draft.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self.path)

    def show(self, page: Path | None, mark: str, text: str) -> None:
        """Print a table, and put it between the marks of a page if there is one."""
        print(text, flush=True)
        if page is not None:
            put_between(page, mark, text)


def made_by(found: dict[str, Any]) -> str:
    """A line below a table."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['machine']['processor']}, {found['machine']['threads']} threads"
    return f"`{found['command']}`, {found['date']}, {machine}, {versions}."


def table(found: dict[str, Any]) -> str:
    """The steps of a results file as Markdown."""
    each = []
    for name in dict.fromkeys(row["shape"] for row in found["steps"]):
        rows = [row for row in found["steps"] if row["shape"] == name]
        # a row that could not be measured has no answer
        answers = "".join(
            f", answers of {n} tokens" for n in dict.fromkeys(row["answer"] for row in rows if "answer" in row)
        )
        each.append(f"`{name}`{answers}.\n\n{steps_table(rows)}")
    return "\n\n".join([*each, made_by(found)])


def run(args: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(args, device)
    if args.arithmetic or args.dry_run:
        rows = [arithmetic(name, args.bandwidth * 1e12) for name in args.shape]
        report.put("arithmetic", rows)
        text = arithmetic_table(rows, args.bandwidth * 1e12, report.content["command"])
        report.show(args.update, "decode-arithmetic", text)
    if args.kernel or args.dry_run:
        kernels: dict[str, Any] = {}
        for name in args.shape:
            told: list[str] = []
            for copy, measured in kernel_rows(name, args):
                told = break_even(measured)
                kernels[name] = {"copy_bytes_per_s": copy, "rows": measured, "break_even": told}
                report.put("kernels", kernels)
            print("\n".join(told if device.type == "cuda" else ["In the interpreter times mean nothing."]), flush=True)
    if not args.arithmetic and not args.kernel:
        measure(args, report, device)


def measure(args: argparse.Namespace, report: Report, device: torch.device) -> None:
    """The host, and steps."""
    variants = variants_of(args, device)
    if args.only != "steps":
        found, tables = [], []
        shown = [*variants, *uncaptured(variants, device)]
        for name in args.shape:
            repeats = 0 if args.only == "counts" else args.repeats
            own = host(name, shown, device, repeats, args.answer - 1)
            found += own
            report.put("host", found)
            tables.append(f"`{name}`. {host_table(own, device.type == 'cuda')}")
        report.show(args.update, "decode-host", "\n\n".join([*tables, made_by(report.content)]))
    if args.only not in ("counts", "host"):
        found = []
        for name in args.shape:
            for row in steps(name, variants, device, args):
                found.append(row)
                report.put("steps", found)
        report.show(args.update, "decode-steps", table(report.content))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        check(args)
        run(args)
    except MmaccelError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
