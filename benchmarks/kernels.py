"""How near do the kernels come to what the memory allows?

On a GPU, in one call of a few minutes: first every kernel is compared with its definition (with --check that is all), then
decode attention over a cache as it is stored is timed beside the copy bandwidth measured in the same run, and beside
``scaled_dot_product_attention``, its flash attention and FlexAttention on the same dense cache; then attention importance
beside eager attention, and the kernels of selection. What is wrong is told and marked, and the rest goes on.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200.json     # and a roofline plot, .png beside it
    python benchmarks/kernels.py --check --out checked.json                     # are they right on this GPU?
    python benchmarks/kernels.py --dry-run                                      # tiny shapes, in the interpreter on a CPU
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401
import torch
import torch.nn.functional as F
from torch import Tensor

from mmaccel.cli.shared.text import markdown
from mmaccel.programs.bench import provenance


class Bench:
    """Device, sizes and clock of this run; ``rows`` are its results.

    On a GPU what is timed is captured in a CUDA graph, as decode steps are, so that the host does not count; ``host_seconds``
    is what a call takes that the device does not wait for.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, list[dict[str, Any]]()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.gpu = self.device.type == "cuda"
        # the interpreter multiplies no bfloat16
        self.dtype = torch.bfloat16 if self.gpu else torch.float16
        self.out: Path | None = getattr(args, "out", None)
        self.began = time.perf_counter()
        self.copy = self.copy_bandwidth()

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Median of ``repeats`` runs after three to warm up; on a GPU of replays of a graph, by its own clock, the cache of the
        last run cleared."""
        if not self.gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        for _ in range(3):
            run()
        run = self.captured(run)
        flush = torch.empty(1 << 28, dtype=torch.int8, device=self.device)
        times = []
        for _ in range(repeats):
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    @staticmethod
    def captured(run: Callable[[], Any]) -> Callable[[], Any]:
        """``run`` as a graph; as it is where it cannot be captured, as what waits for the device cannot."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:
            print(f"not captured: {str(error).splitlines()[0][:100]}", flush=True)
            torch.cuda.synchronize()
            return run
        return graph.replay

    def host_seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """Seconds of the host a call, behind work that keeps the device busy."""
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 28)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        seconds = (time.perf_counter() - begin) / repeats
        torch.cuda.synchronize()
        return seconds

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second by an elementwise kernel. A captured ``copy_`` says too little: on an H200 it
        moved 2.76 TB/s, where ``copy_`` and this moved 4.24."""
        source = torch.zeros(1 << (28 if self.gpu else 18), dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: torch.neg(source, out=target))

    def measure(self, name: str, run: Callable[[], Any], cost: tuple[int, int] | None = None, **more: Any) -> float:
        """Time ``run``; ``cost`` is the bytes it has to move and its operations."""
        seconds = self.seconds(run)
        row = {"name": name, "seconds": seconds, **more}
        text = f"{name:<44}{seconds * 1e6:>12.1f} us"
        if self.gpu:
            row["host_seconds"] = self.host_seconds(run)
            text += f"{row['host_seconds'] * 1e6:>10.1f} us of the host"
        if cost is not None:
            moved, operations = cost
            row |= {"bytes": moved, "operations": operations, "bytes_per_s": moved / seconds}
            row["share_of_copy"] = moved / seconds / self.copy
            text += f"{moved / seconds / 1e9:>10.1f} GB/s{100 * row['share_of_copy']:>8.1f} % of copying"
        print(text, flush=True)
        self.put(row)
        return seconds

    def put(self, row: dict[str, Any]) -> None:
        """One result, written down at once: what stops this run later does not take it."""
        self.rows.append(row)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            draft = self.out.with_name(self.out.name + ".part")
            draft.write_text(json.dumps(self.header() | {"results": self.rows}, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self.out)

    def header(self) -> dict[str, Any]:
        """What the figures are of."""
        a = self.args
        return {
            "command": provenance.command("python", sys.argv[0]),
            "date": provenance.today(),
            "gpu": torch.cuda.get_device_name() if self.gpu else None,
            "versions": provenance.versions(("torch", "triton")),
            "minutes": (time.perf_counter() - self.began) / 60,
            "copy_bytes_per_s": self.copy,
            "model": {"query_heads": a.kv_heads * a.groups, "kv_heads": a.kv_heads, "head_size": a.head_size},
        }

    def try_to_measure(self, name: str, run: Callable[[], Any]) -> float | None:
        """Time what is not ours; why it cannot run is a result too."""
        try:
            return self.measure(name, run)
        except Exception as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"{name:<44} cannot run: {line[:100]}", flush=True)
            self.put({"name": name, "error": line})
            return None

    def release(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()


# --- right first ------------------------------------------------------------------------------------------------------
def attention_checks(bench: Bench) -> Iterator[tuple[str, Any, Any, float]]:
    """Decode attention over all that is stored, and packing."""
    from mmaccel_kernels.decode import decode_attention_definition, decode_attention_kernel
    from mmaccel_kernels.pack import quantise_definition, quantise_kernel
    from mmaccel_kernels.pages import Format, split

    long = 3000 if bench.gpu else 70
    lengths = torch.tensor([long, 1, 0, long // 3], device=bench.device)
    query, keys, values, flat = decode_inputs(bench, 2, 2, 7, 5, 64, lengths)
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if bench.gpu else (torch.float32, torch.float16):
        cast = [x.to(dtype) for x in (query, keys, values)]
        stored = flat._replace(keys=flat.keys.to(dtype), values=flat.values.to(dtype))
        own, want = (run(*cast, 0.1, stored)[0] for run in (decode_attention_kernel, decode_attention_definition))
        yield f"decode attention, ragged, {dtype}", own, want, 1e-4 if dtype == torch.float32 else 2e-2
    for code in ("sign", "ternary", "three", "int1", "int2", "int4", "int8", "fp8"):
        pages = packed(bench, lengths, 2, 64, code)
        own, want = (
            run(query, keys, values, 0.1, None, pages)[0]
            for run in (decode_attention_kernel, decode_attention_definition)
        )
        yield f"decode attention, {code}", own, want, 2e-2
        start, count, _ = split(lengths, 64)
        x = flat.keys
        form = Format(code, "channel", 64)  # type: ignore[arg-type]
        mine, its = (run(x, start, count, form, 64, 16, x.dtype) for run in (quantise_kernel, quantise_definition))
        # a number half way between two codes may go either way
        yield f"quantise, {code}", (mine.codes != its.codes).float().mean(), torch.tensor(0.0), 1e-3
    long = 1000 if bench.gpu else 300
    for name in PACKED:
        lengths = torch.tensor([[long, 300]], device=bench.device)
        pages, newest = packed_by(bench, name, lengths, 128), bench.normal(1, 2, 5, 128)
        query = bench.normal(1, 14, 1, 128)
        for visible in (None, torch.rand(1, 2, 1, long + 5, device=bench.device) < 0.9):
            own, want = (
                run(query, newest, newest, 0.1, None, pages, visible)[0]
                for run in (decode_attention_kernel, decode_attention_definition)
            )
            beside = "" if visible is None else ", masked"
            yield f"decode attention, {name}, by {loop_of(pages, query, visible)}{beside}", own, want, 2e-2


def loop_of(pages: Any, query: Tensor, visible: Tensor | None) -> str:
    """What reads such pages here."""
    from mmaccel_kernels.decode import paged

    if pages.values_turned:
        pages = pages.with_values_as_stored()
    if paged.loop(pages, query, visible is not None) is not None:
        return "CUDA C++"
    return "Triton's loop over pages" if paged.fits(pages, query, query.shape[3]) else "Triton's general loop"


def sparse_checks(bench: Bench) -> Iterator[tuple[str, Any, Any, float]]:
    """What sparse reads are made of, and the append of a step."""
    from mmaccel_kernels.alike import keep_alike_definition, keep_alike_kernel
    from mmaccel_kernels.append import append_definition, append_kernel
    from mmaccel_kernels.best import best_units_definition, best_units_kernel
    from mmaccel_kernels.chosen import ChosenKeys, chosen_attention_definition, chosen_attention_kernel
    from mmaccel_kernels.loki import low_rank_logits_definition, low_rank_logits_kernel
    from mmaccel_kernels.quest import page_bounds_definition, page_bounds_kernel
    from mmaccel_kernels.votes import votes_definition, votes_kernel

    query, (keys, values) = bench.normal(1, 14, 128), (bench.normal(1, 2, 80, 128) for _ in range(2))
    extremes = bench.normal(1, 2, 40, 256)
    own, want = (run(query, extremes, "max") for run in (page_bounds_kernel, page_bounds_definition))
    yield "page bounds", own, want, 5e-2
    basis, low = bench.normal(1, 2, 128, 32, dtype=torch.float32), bench.normal(1, 2, 40, 32)
    own, want = (run(query, basis, low, "max") for run in (low_rank_logits_kernel, low_rank_logits_definition))
    yield "low-rank logits, of the largest", own / want.abs().max(), want / want.abs().max(), 2e-2
    slots = torch.arange(79, -1, -1, device=bench.device).int().view(1, 1, 80)
    own, want = (run(query, keys, slots, False) for run in (votes_kernel, votes_definition))
    yield "votes of query heads", own, want, 2e-2
    before = torch.nn.functional.normalize(query.flatten(1).float())
    for name, asked in (("stands", query), ("does not", -query)):
        own, want = (run(asked, slots, before, slots + 1, 0.9) for run in (keep_alike_kernel, keep_alike_definition))
        yield f"an earlier choice that {name}: query", own[0], want[0], 1e-4
        yield f"an earlier choice that {name}: units", own[1], want[1], 0.0
    ratings, count = bench.normal(1, 2, 40, dtype=torch.float32), torch.tensor([[7, 3]], device=bench.device).int()
    (own, some), (want, all_) = (
        run(ratings, count, 8, 1, None, None) for run in (best_units_kernel, best_units_definition)
    )
    yield "best units", torch.cat([own.flatten(), some.flatten()]), torch.cat([want.flatten(), all_.flatten()]), 0.0
    units = torch.arange(64, device=bench.device).int().view(1, 1, 8, 8).expand(1, 2, 8, 8)
    always = torch.arange(64, 72, device=bench.device).int().expand(1, 2, 8)
    chosen = ChosenKeys(
        always, units, torch.tensor([[[0, 3, 5, 7]] * 2], device=bench.device).int(), count.clamp(max=4), 72
    )
    given = (query[:, :, None], keys, values, chosen, 0.1, None)
    own, want = (run(*given)[0] for run in (chosen_attention_kernel, chosen_attention_definition))
    yield "attention over chosen keys", own, want, 2e-2
    both = [[x.clone() for x in (keys, values)] for _ in range(2)]
    new, at = bench.normal(1, 2, 3, 128), torch.tensor([70], device=bench.device).int()
    for run, (k, v) in zip((append_kernel, append_definition), both, strict=True):
        run(k, v, new, new, at, None, None)
    yield "append", torch.cat(both[0]), torch.cat(both[1]), 0.0


def selection_checks(bench: Bench) -> Iterator[tuple[str, Any, Any, float]]:
    """What chooses and moves tokens."""
    from mmaccel_kernels.compact import compact_definition, compact_kernel
    from mmaccel_kernels.dpp import greedy_dpp_definition, greedy_dpp_kernel
    from mmaccel_kernels.importance import importance_definition, importance_kernel
    from mmaccel_kernels.matching import best_match_definition, best_match_kernel
    from mmaccel_kernels.maxmin import max_min_definition, max_min_kernel

    n = 300 if bench.gpu else 40
    q, k = bench.normal(1, 4, n, 64), bench.normal(1, 2, n, 64)
    yield "importance", *(run(q, k, 0.1, None, None, None) for run in (importance_kernel, importance_definition)), 2e-2
    x, y = bench.normal(2, n, 64), bench.normal(2, n + 7, 64)
    own, want = (run(x, y, None, False)[0] for run in (best_match_kernel, best_match_definition))
    yield "best match", own, want, 1e-1
    valid = torch.ones(2, n, dtype=torch.bool, device=bench.device)
    # of more vectors than channels what is left of the last ones is rounding
    count = torch.tensor([n // 8, n // 16], device=bench.device)
    x = F.normalize(bench.normal(2, n, 64, dtype=torch.float32), dim=-1)
    limit = torch.full_like(valid, torch.inf, dtype=torch.float32)
    own, want = ((run(x, valid, count, 0.0, None, limit) >= 0).float() for run in (max_min_kernel, max_min_definition))
    yield "max-min", own, want, 0.0
    given = (x, torch.rand(2, n, device=bench.device) + 0.5, valid, count, 0.0, None)
    own, want = (run(*given).float() for run in (greedy_dpp_kernel, greedy_dpp_definition))
    yield "greedy dpp", own, want, 0.0
    kept = torch.rand(2, 2, n, device=bench.device) < 0.3
    k, v = bench.normal(2, 2, n, 64), bench.normal(2, 2, n, 64)
    own, want = (run(k, v, kept, None, None, None)[0] for run in (compact_kernel, compact_definition))
    yield "compact", own, want, 0.0


def compare(bench: Bench) -> list[str]:
    """Every kernel beside its definition; those that are wrong, or cannot be run."""
    wrong = []
    for part in (attention_checks, sparse_checks, selection_checks):
        try:
            for name, own, want, allowed in part(bench):
                worst = (own.float() - want.float().to(own.device)).abs().max().item() if own.numel() else 0.0
                print(f"{name:<72} differs by {worst:.2g}", flush=True)
                right = worst <= allowed
                bench.put({"name": name, "check": worst, "allowed": allowed, "right": right})
                if not right:
                    wrong.append(f"{name} differs from its definition by {worst:.3g}, more than {allowed:g}.")
        except Exception as error:
            wrong.append(f"{part.__name__} cannot go on: {type(error).__name__}: {str(error)[:300]}")
            bench.put({"name": part.__name__, "error": wrong[-1], "right": False})
    return wrong


# --- decode attention -------------------------------------------------------------------------------------------------
def decode_inputs(bench: Bench, b: int, hkv: int, groups: int, tail: int, d: int, lengths: Tensor) -> Any:
    from mmaccel_kernels.decode import Flat

    total = int(lengths.sum())
    flat = Flat(bench.normal(total, d), bench.normal(total, d), F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()))
    return bench.normal(b, hkv * groups, 1, d), bench.normal(b, hkv, tail, d), bench.normal(b, hkv, tail, d), flat


def packed(bench: Bench, lengths: Tensor, heads: int, d: int, code: str, page: int = 64, tile: int = 16) -> Any:
    """Pages of random keys and values, scales per channel and page."""
    from mmaccel_kernels.pack import quantise
    from mmaccel_kernels.pages import Format, Pages, split

    start, count, cu_pages = split(lengths, page)
    x = bench.normal(int(lengths.sum()), d)
    form = Format(code, "channel", page)  # type: ignore[arg-type]
    plane = quantise(x, start, count, form, page=page, tile=tile)
    number = torch.arange(len(count), dtype=torch.int32, device=bench.device)
    # values of their own, so that nothing is read twice
    other = quantise(x.flip(0), start, count, form, page=page, tile=tile)
    return Pages((plane,), (other,), page, tile, count, number, number.clone(), cu_pages, heads)


def dense_peers(bench: Bench, query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Callable[[], Any]]:
    """What torch has for a dense cache; which of its kernels it takes is its own choice, then told."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend()

    return {"scaled_dot_product_attention": attend, "flash attention": flash}


def decode_dense(bench: Bench, compiled: bool = True) -> float:
    """Beside what torch has for the same cache, FlexAttention only if it may be ``compiled``; returns our seconds."""
    from mmaccel_kernels.decode import decode_attention_cost, decode_attention_kernel

    a, what = bench.args, f"{bench.args.batch} x {bench.args.keys} keys"
    query = bench.normal(a.batch, a.kv_heads * a.groups, 1, a.head_size)
    keys, values = (bench.normal(a.batch, a.kv_heads, a.keys, a.head_size) for _ in range(2))
    ours = bench.measure(
        f"decode attention, dense, {what}",
        lambda: decode_attention_kernel(query, keys, values, a.head_size**-0.5),
        decode_attention_cost(query, keys, values),
        target=0.85,
    )
    peers = dense_peers(bench, query, keys, values)
    if compiled:
        peers["FlexAttention"] = flex(bench, query, keys, values)
    for name, run in peers.items():
        theirs = bench.try_to_measure(f"{name}, {what}", run)
        if theirs is not None:
            bench.rows[-1]["ours_is_faster_by"] = theirs / ours
            print(f"{'':<44}{theirs / ours:>12.2f} times our time")
    return ours


def decode_ragged(bench: Bench) -> None:
    """As many keys in all, in heads from a tenth to nineteen tenths of the mean."""
    from mmaccel_kernels.decode import decode_attention_cost, decode_attention_kernel

    a = bench.args
    heads = a.batch * a.kv_heads
    share = torch.linspace(0.1, 1.9, heads, device=bench.device)[torch.randperm(heads, device=bench.device)]
    query, keys, values, flat = decode_inputs(
        bench, a.batch, a.kv_heads, a.groups, 1, a.head_size, (share * a.keys).long()
    )
    bench.measure(
        f"decode attention, ragged, {a.batch} x {a.keys} keys on average",
        lambda: decode_attention_kernel(query, keys, values, a.head_size**-0.5, flat),
        decode_attention_cost(query, keys, values, flat),
        target=0.85,
    )


#: codecs as recipes have them, and the share of the copy bandwidth they are to reach
PACKED: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "kivi 4 bit": ("kivi", {"bits": 4}, 0.7),
    "kivi 2 bit": ("kivi", {}, 0.6),
    "kivi 8 bit": ("kivi", {"bits": 8}, None),
    "fp8": ("fp8", {}, None),
    "think": ("think", {}, None),
    "vidkv": ("vidkv", {}, None),
    "calibquant": ("calibquant", {}, None),
    "turboquant 4 bit": ("turboquant", {}, None),
    "turboquant 3 bit": ("turboquant", {"bits": 3}, None),
    "turboquant 2 bit": ("turboquant", {"bits": 2}, None),
    "qserve": ("qserve", {}, None),
    "zipcache": ("zipcache-codec", {}, None),
}


def packed_by(bench: Bench, name: str, lengths: Tensor, d: int) -> Any:
    """Random keys and values of ``lengths [B, Hkv]`` tokens as a codec of ``PACKED`` stores them."""
    from mmaccel.kv.codecs import Codec
    from mmaccel.method.registry import get_method

    kind, options, _ = PACKED[name]
    codec, total = get_method(kind)(**options), int(lengths.sum())
    assert isinstance(codec, Codec)
    return codec.pack(bench.normal(total, d), bench.normal(total, d), lengths)


def decode_packed(bench: Bench, dense: float, name: str) -> None:
    """The same cache as a codec of ``PACKED`` stores it; ``dense`` is the time of the dense one."""
    from mmaccel_kernels.decode import decode_attention_cost, decode_attention_kernel

    a, target = bench.args, PACKED[name][2]
    lengths = torch.full((a.batch, a.kv_heads), a.keys, device=bench.device)
    query = bench.normal(a.batch, a.kv_heads * a.groups, 1, a.head_size)
    newest = bench.normal(a.batch, a.kv_heads, 1, a.head_size)
    pages = packed_by(bench, name, lengths, a.head_size)
    seconds = bench.measure(
        f"decode attention, {name}, {a.batch} x {a.keys} keys",
        lambda: decode_attention_kernel(query, newest, newest, a.head_size**-0.5, None, pages),
        decode_attention_cost(query, newest, newest, None, pages),
        target=target,
        loop=loop_of(pages, query, None),
    )
    bench.rows[-1]["faster_than_dense_by"] = dense / seconds


def decode(bench: Bench) -> None:
    """Decode attention over every kind of storage."""
    dense = decode_dense(bench)
    bench.release()
    decode_ragged(bench)
    bench.release()
    # in the interpreter, where times mean nothing, one is enough: all were compared before
    for name in PACKED if bench.gpu else ("kivi 4 bit",):
        decode_packed(bench, dense, name)
        bench.release()


def flex(bench: Bench, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    """FlexAttention, compiled where there is a compiler for the device."""
    from torch.nn.attention.flex_attention import flex_attention

    run = torch.compile(flex_attention) if bench.gpu else flex_attention
    return lambda: run(query, keys, values, enable_gqa=True)


def decode_lengths(bench: Bench) -> None:
    """One sequence, from short to long."""
    from mmaccel_kernels.decode import decode_attention_cost, decode_attention_kernel

    a = bench.args
    query = bench.normal(1, a.kv_heads * a.groups, 1, a.head_size)
    for n in (1024, 8192, 65536, 262144) if bench.gpu else (64,):
        keys, values = (bench.normal(1, a.kv_heads, n, a.head_size) for _ in range(2))
        bench.measure(
            f"decode attention, dense, 1 x {n} keys",
            lambda k=keys, v=values: decode_attention_kernel(query, k, v, 0.1),  # type: ignore[misc]
            decode_attention_cost(query, keys, values),
        )


# --- the others -------------------------------------------------------------------------------------------------------
def importance(bench: Bench) -> None:
    """Column sums of all queries beside the eager matrix."""
    from mmaccel_kernels.importance import importance_kernel

    n, heads, d = (8192, 28, 128) if bench.gpu else (64, 4, 32)
    query, key = bench.normal(1, heads, n, d), bench.normal(1, heads // 4, n, d)

    def eager() -> Tensor:
        logits = query @ key.repeat_interleave(4, dim=1).mT * d**-0.5
        mask = torch.ones(n, n, dtype=torch.bool, device=bench.device).triu(1)
        return logits.masked_fill(mask, -torch.inf).softmax(-1, dtype=torch.float32).sum(2)

    if bench.gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if bench.gpu else 0
    ours = bench.measure(
        f"importance, {n} queries and keys", lambda: importance_kernel(query, key, d**-0.5, None, None, None), target=10
    )
    if bench.gpu:
        # the buffer that clears the caches between two runs is the clock's
        bench.rows[-1]["extra_bytes"] = torch.cuda.max_memory_allocated() - held - (1 << 28)
    theirs = bench.try_to_measure(f"eager attention, {n} queries and keys", eager)
    if theirs is not None:
        bench.rows[-2]["faster_than_eager_by"] = theirs / ours
        print(f"{'':<44}{theirs / ours:>12.2f} times our time")
    bench.release()


def selection(bench: Bench) -> None:
    """Matching, max-min selection, compaction and packing."""
    from mmaccel_kernels.compact import compact_kernel
    from mmaccel_kernels.matching import best_match_cost, best_match_kernel
    from mmaccel_kernels.maxmin import max_min_kernel
    from mmaccel_kernels.pack import quantise_kernel
    from mmaccel_kernels.pages import Format, split

    n, d = (16384, 1024) if bench.gpu else (64, 32)
    x, y = bench.normal(1, n // 2, d), bench.normal(1, n // 2, d)
    bench.measure(
        f"best match, {n // 2} with {n // 2} of width {d}",
        lambda: best_match_kernel(x, y, None, False),
        best_match_cost(1, n // 2, n // 2, d, x.element_size()),
    )
    for slots in (n // 2, n):
        unit = F.normalize(bench.normal(1, slots, d, dtype=torch.float32), dim=-1)
        valid = torch.ones(1, slots, dtype=torch.bool, device=bench.device)
        count, limit = (
            torch.full_like(valid[:, 0], slots // 8, dtype=torch.int64),
            torch.full_like(unit[..., 0], torch.inf),
        )
        select = partial(max_min_kernel, unit, valid, count, 0.0, slots // 8, limit)
        bench.measure(f"max-min, {slots // 8} of {slots}", select)
    bench.release()
    b, h, tokens = (16, 4, 32768) if bench.gpu else (1, 2, 64)
    k, v = bench.normal(b, h, tokens, 128), bench.normal(b, h, tokens, 128)
    kept = torch.rand(b, h, tokens, device=bench.device) < 0.25
    total = int(kept.sum())
    moved = 2 * 2 * total * 128 * k.element_size()
    bench.measure(
        f"compact, a quarter of {b} x {tokens}", lambda: compact_kernel(k, v, kept, None, None, total), (moved, 0)
    )
    start, count, _ = split(torch.full((b * h,), tokens, device=bench.device), 128)
    form, flat = Format("int4", "channel", 128), k.view(-1, 128)
    bench.measure(
        f"quantise to 4 bits, {b} x {tokens}",
        lambda: quantise_kernel(flat, start, count, form, 128, 32, flat.dtype),
        (flat.nbytes + flat.numel() // 2 + flat.numel() // 64 * flat.element_size(), 0),
    )
    bench.release()


# --- results ----------------------------------------------------------------------------------------------------------
def table(found: dict[str, Any]) -> str:
    """The times of a results file as Markdown; others of the shape of the first row, a dense cache, are compared with it."""
    timed = [row for row in found["results"] if "seconds" in row]
    dense, shape = timed[0]["seconds"], timed[0]["name"].rpartition(", ")[2]
    lines = [["", "microseconds", "GB/s", "of a copy", "times as fast as the dense cache", "reads by"]]
    for row in timed:
        same = shape in row["name"]
        rate = (f"{row['bytes_per_s'] / 1e9:,.0f}", f"{row['share_of_copy']:.0%}") if "bytes" in row else ("", "")
        beside = f"{dense / row['seconds']:.2f}" if same else ""
        lines.append([row["name"], f"{1e6 * row['seconds']:,.1f}", *rate, beside, row.get("loop", "")])
    checks = [row["right"] for row in found["results"] if "right" in row]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{markdown(lines)}\n\n`{found['command']}`, {found['date']}, {found['gpu']}, {versions}; a copy reads and writes "
        f"{found['copy_bytes_per_s'] / 1e9:,.0f} GB/s. {sum(checks)} of {len(checks)} comparisons with definitions agree."
    )


def roofline(bench: Bench, path: Path) -> None:
    """Operations a second against operations a byte, below the line that the copy bandwidth draws."""
    try:
        import matplotlib
    except ImportError:
        print("No roofline plot: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in bench.rows if row.get("operations")]
    figure, axes = plt.subplots(figsize=(8, 5))
    intensity = [row["operations"] / row["bytes"] for row in rows]
    line = [min(intensity) / 2, max(intensity) * 2]
    axes.plot(line, [x * bench.copy / 1e12 for x in line], color="black", label="copy bandwidth, measured")
    for row, x in zip(rows, intensity, strict=True):
        axes.plot(x, row["operations"] / row["seconds"] / 1e12, "o", label=row["name"])
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10^12 operations per second")
    axes.set_title(str(torch.cuda.get_device_name() if bench.gpu else "interpreter: no timing"))
    axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes; without a GPU in Triton's interpreter")
    parser.add_argument("--check", action="store_true", help="compare with the definitions, and time nothing")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--keys", type=int, default=32768, help="keys of each head")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--groups", type=int, default=7, help="query heads of a key head")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here, and the plot beside it")
    args = parser.parse_args()
    if args.dry_run:
        args.batch, args.keys, args.kv_heads, args.head_size = 1, 64, 2, 32
    if not torch.cuda.is_available() and not args.dry_run:
        sys.exit("There is no GPU here; --dry-run goes through everything at tiny shapes.")
    torch.manual_seed(0)
    bench = Bench(args)
    print(f"copying: {bench.copy / 1e9:.1f} GB/s")
    wrong = compare(bench)
    for part in () if args.check else (decode, decode_lengths, importance, selection):
        try:
            part(bench)
        except Exception as error:
            wrong.append(f"{part.__name__} was not measured whole: {type(error).__name__}: {str(error)[:300]}")
        bench.release()
    bench.put({"name": "wrong or not measured", "sentences": wrong})
    if args.out and not args.check:
        roofline(bench, args.out.with_suffix(".png"))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
