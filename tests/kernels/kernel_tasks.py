"""Every configuration in which the kernels are launched, taken from launches themselves.

Operations are called as the product calls them, on small tensors, and what they would launch on a GPU is written down as
Triton's own dispatch would see it, and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from mmaccel_kernels import launch
from mmaccel_kernels.alike import keep_alike
from mmaccel_kernels.append import append
from mmaccel_kernels.best import best_units
from mmaccel_kernels.chosen import ChosenKeys, chosen_attention
from mmaccel_kernels.compact import compact
from mmaccel_kernels.decode import Flat, cuda, decode_attention
from mmaccel_kernels.decode import triton as decode_kernel
from mmaccel_kernels.decode.paged import fits
from mmaccel_kernels.dpp import greedy_dpp
from mmaccel_kernels.importance import importance
from mmaccel_kernels.loki import low_rank_logits
from mmaccel_kernels.matching import best_match
from mmaccel_kernels.maxmin import max_min
from mmaccel_kernels.maxmin.triton import ONE_PROGRAM
from mmaccel_kernels.quest import page_bounds
from mmaccel_kernels.votes import votes
from torch import Tensor

from mmaccel.kv.codecs import Codec
from mmaccel.method.registry import get_method

TARGETS = ("sm_80", "sm_90", "gfx942")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Task(NamedTuple):
    """One compilation: a kernel by module and name, the types of its arguments, those that are fixed, and those that are
    multiples of 16."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    fixed: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]


def tasks(target: str, only: Container[str] | None = None) -> dict[str, Task]:
    """What is compiled for ``target`` by name, everything once; of ``only`` these cases, if they are given."""
    found: dict[str, Task] = {}
    for name, use in cases().items():
        if only is None or name in only:
            with _recording(target) as launches:
                use()
            for number, task in enumerate(dict.fromkeys(launches)):
                if task not in found.values():
                    label = f"{name}: {task.kernel}"
                    found[label if label not in found else f"{label} {number}"] = task
    return found


@contextmanager
def _recording(target: str) -> Iterator[list[Task]]:
    from triton.runtime.jit import JITFunction

    launches: list[Task] = []
    capability = 0 if target.startswith("gfx") else int(target[3:])

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(_task(kernel, args, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(launch, "usable", lambda device: True),
        patch.object(torch.cuda, "device", nullcontext),
        patch.object(decode_kernel, "_capability", lambda device: capability),
        patch.object(torch.version, "hip", None if capability else "6.4"),
        # nothing is computed, and what comes behind reads the results
        patch.object(torch, "empty", torch.zeros),
        patch.object(torch, "empty_like", torch.zeros_like),
        patch.object(Tensor, "new_empty", Tensor.new_zeros),
    ):
        yield launches


def _task(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Task:
    types, fixed, aligned = {}, {}, []
    left = dict(options)
    for place, about in enumerate(kernel.params):
        value = args[place] if place < len(args) else left.pop(about.name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if about.is_constexpr or value is None or (whole and value == 1 and not about.do_not_specialize):
            fixed[about.name] = value
        elif isinstance(value, Tensor):
            types[about.name] = "*" + _TYPES[value.dtype]
            if not about.do_not_specialize_on_alignment:
                aligned.append(about.name)
        elif whole:
            types[about.name] = "i32"
            if value % 16 == 0 and not about.do_not_specialize:
                aligned.append(about.name)
        else:
            types[about.name] = "fp32"
    made = (tuple(x.items()) for x in (types, fixed, left))
    types_, fixed_, options_ = made
    return Task(kernel.fn.__module__, kernel.fn.__name__, types_, fixed_, tuple(aligned), options_)


# --- the configurations -----------------------------------------------------------------------------------------------
def cases() -> dict[str, Callable[[], Any]]:
    """Name -> a use: every kernel for every type it multiplies in, the head sizes and groups of the families, and each codec;
    of options that only leave something out, the fullest."""
    made: dict[str, Callable[[], Any]] = {}
    for kind, dtype in DTYPES.items():
        made[f"best_match {kind}"] = lambda t=dtype: best_match(
            *_zeros(2, 1, 4, 64, dtype=t), torch.ones(1, 4, dtype=torch.bool), others=True
        )
    made["append bf16"] = lambda: _append(torch.bfloat16)
    made["compact"] = lambda: _compact(False)
    made["compact, merged"] = lambda: _compact(True)
    for kind, width, masked in (("bf16", 128, False), ("bf16", 128, True), ("bf16", 256, True), ("fp32", 128, True)):
        name = f"importance {kind}, {width} channels{_beside(False, masked)}"
        made[name] = lambda t=DTYPES[kind], w=width, m=masked: _importance(t, w, m)
    # as many as one program takes, and blocks of all tokens of a long clip
    for slots, width in ((ONE_PROGRAM, 16), (16384, 16)):
        made[f"max_min of {slots}"] = lambda n=slots, w=width: max_min(*_units(n, w), most=1)
    for slots, width in ((1024, 1024), (16384, 16)):
        made[f"greedy_dpp of {slots}"] = lambda n=slots, w=width: _greedy_dpp(n, w)
    for kind, width, join in (("bf16", 128, "max"), ("fp16", 80, "max"), ("fp32", 256, "mean")):
        name = f"page_bounds {kind}, {width} channels, {join}"
        made[name] = lambda t=DTYPES[kind], w=width, j=join: page_bounds(
            torch.zeros(1, 14, w, dtype=t), torch.zeros(1, 2, 40, 2 * w, dtype=t), j
        )
    for kind, width, rank, join in (("bf16", 128, 32, "max"), ("fp16", 80, 20, "max"), ("fp32", 256, 256, "mean")):
        name = f"low_rank_logits {kind}, {rank} of {width} channels, {join}"
        made[name] = lambda t=DTYPES[kind], w=width, r=rank, j=join: low_rank_logits(
            torch.zeros(1, 14, w, dtype=t), torch.zeros(1, 2, w, r), torch.zeros(1, 2, 40, r, dtype=t), j
        )
    for kind, width, own, apart in (("bf16", 128, 1, False), ("fp16", 80, 2, True), ("fp32", 256, 2, False)):
        name = f"votes {kind}, {width} channels, {'heads alike' if own == 1 else 'each head its own'}{', interleaved' * apart}"
        made[name] = lambda t=DTYPES[kind], w=width, o=own, a=apart: votes(
            torch.zeros(1, 14, w, dtype=t),
            torch.zeros(1, 2, 40, w, dtype=t),
            torch.zeros(1, o, 40, dtype=torch.int32),
            a,
        )
    made["keep_alike bf16"] = lambda: keep_alike(
        torch.zeros(1, 14, 128, dtype=torch.bfloat16),
        torch.zeros(1, 1, 40, dtype=torch.int32),
        torch.zeros(1, 14 * 128),
        torch.zeros(1, 1, 40, dtype=torch.int32),
        0.9,
    )
    made["best_units"] = lambda: best_units(torch.zeros(1, 2, 40), torch.ones(1, 1, dtype=torch.int32), 4)
    made["best_units, of eight parts, some gone or too low"] = lambda: best_units(
        torch.zeros(1, 2, 40),
        torch.ones(1, 2, dtype=torch.int32),
        4,
        each=8,
        gone=torch.zeros(1, 1, 40, dtype=torch.bool),
        least=torch.zeros(1),
    )
    for kind, d, groups, unit, masked in _CHOSEN:
        name = f"chosen {kind}, {d} channels, {groups} queries, units of {unit}{_beside(False, masked)}"
        made[name] = lambda t=DTYPES[kind], a=(d, groups, unit, masked): _chosen(t, *a)
    made["chosen bf16, 128 channels, 7 queries, units of 16, with room"] = lambda: _chosen(
        torch.bfloat16, 128, 7, 16, False, room=True
    )
    for kind, d, groups, q, flat, masked in _DENSE:
        name = f"decode {kind}, {d} channels, {q} x {groups} queries{_beside(flat, masked)}"
        made[name] = lambda t=DTYPES[kind], a=(d, groups, q, flat, masked): _decode(t, *a)
    made["decode bf16, 128 channels, 1 x 7 queries, ragged, with room"] = lambda: _decode(
        torch.bfloat16, 128, 7, 1, True, False, room=True
    )
    for label, (method, options, kind, whole) in _CODECS.items():
        name = _label(label)
        made[name] = lambda t=DTYPES[kind], m=method, o=options, w=whole: _packed(t, m, o, w)
    return made


#: type, channels, query heads of a key head, queries, beside ragged heads, under a mask
_DENSE = (
    *(("bf16", 128, 7, 1, flat, masked) for flat in (False, True) for masked in (False, True)),
    *(("bf16", d, 7, 1, True, True) for d in (64, 80, 256)),
    ("bf16", 128, 64, 1, True, True),
    ("bf16", 128, 4, 16, True, True),
    ("fp16", 128, 7, 1, True, True),
    ("fp32", 128, 7, 1, True, True),
    ("fp32", 256, 4, 16, True, True),
)

#: type, channels, query heads of a key head, keys of a unit, under a mask
_CHOSEN = (
    ("bf16", 128, 7, 16, False),
    ("bf16", 128, 7, 1, True),
    ("bf16", 64, 64, 16, False),
    ("bf16", 256, 7, 1, False),
    ("fp16", 80, 7, 16, True),
    ("fp32", 128, 7, 16, True),
)

#: codecs as they come and with the options that change what is compiled; type; whether beside ragged heads and under a mask
# checked by test_every_codec_is_compiled
_CODECS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "vidkv": ("vidkv", {}, "bf16", False),
    "vidkv, protected tokens": ("vidkv", {"value_bits": 2, "page": 128}, "bf16", False),
    "calibquant": ("calibquant", {}, "bf16", False),
    "calibquant, 4 bit": ("calibquant", {"bits": 4}, "bf16", False),
    "think": ("think", {}, "bf16", False),
    "fp8": ("fp8", {}, "bf16", False),
    "kivi, 2 bit": ("kivi", {}, "bf16", False),
    "kivi, 4 bit": ("kivi", {"bits": 4}, "bf16", False),
    "kivi, 8 bit": ("kivi", {"bits": 8}, "bf16", False),
    "kivi, all at once": ("kivi", {}, "bf16", True),
    "kivi, half precision": ("kivi", {}, "fp16", False),
    "turboquant, 2 bit": ("turboquant", {"bits": 2}, "bf16", False),
    "turboquant, 3 bit": ("turboquant", {"bits": 3}, "bf16", False),
    "turboquant, 4 bit": ("turboquant", {}, "bf16", False),
    "turboquant, 3.5 bit": ("turboquant", {"bits": 3.5}, "bf16", False),
    "gear": ("gear", {}, "bf16", False),
    "nsnquant": ("nsnquant", {}, "bf16", False),
    "qserve": ("qserve", {}, "bf16", False),
    "zipcache-codec": ("zipcache-codec", {}, "bf16", False),
}


def pages_of() -> dict[str, tuple[int, str]]:
    """Of every case of packed pages the bytes of a page, codes and all that comes with them, and the kernel that reads them."""
    found = {}
    for label, (method, options, kind, _) in _CODECS.items():
        pages = _pages(DTYPES[kind], method, options)
        planes = [x[:1].nbytes for of in (*pages.keys, *pages.values) for x in (of.codes, *of.of_rows())]
        fast = fits(pages, torch.zeros(0, dtype=DTYPES[kind]), 128)
        found[_label(label)] = sum(planes), "_attend" if fast else "_decode"
    return found


def loops() -> dict[str, tuple[int, dict[str, int]]]:
    """Of every case that the loop in CUDA C++ reads, the bytes of a page, and what that loop is compiled with."""
    found = {}
    for label, (method, options, kind, whole) in _CODECS.items():
        query = torch.zeros(1, 14, 1, 128, dtype=DTYPES[kind])
        made = cuda.macros(_pages(DTYPES[kind], method, options), query, whole)
        if made is not None:
            found[_label(label)] = pages_of()[_label(label)][0], made
    return found


def _label(codec: str) -> str:
    *_, kind, whole = _CODECS[codec]
    return f"{codec} {kind}{_beside(whole, whole)}"


def _beside(flat: bool, masked: bool) -> str:
    return (", ragged" if flat else "") + (", masked" if masked else "")


def _zeros(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    return (torch.zeros(*shape, dtype=dtype) for _ in range(count))


def _append(dtype: torch.dtype) -> None:
    new, at = torch.zeros(1, 1, 2, 128, dtype=dtype).transpose(1, 2), torch.zeros(1, dtype=torch.int32)
    index, places = torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    append(*_zeros(2, 1, 2, 64, 128, dtype=dtype), new, new, at, index=index, places=places)


def _compact(merged: bool) -> None:
    kept = torch.ones(1, 2, 4, dtype=torch.bool)
    owner, weight = torch.arange(4).expand(1, 2, 4).contiguous(), torch.ones(1, 2, 4)
    more = {"owner": owner, "weight": weight} if merged else {}
    compact(*_zeros(2, 1, 2, 4, 128, dtype=torch.bfloat16), kept, **more)


def _importance(dtype: torch.dtype, width: int, masked: bool) -> None:
    queries = 64
    query, key = torch.zeros(1, 4, queries, width, dtype=dtype), torch.zeros(1, 2, queries, width, dtype=dtype)
    valid = torch.ones(1, queries, dtype=torch.bool) if masked else None
    visible = torch.ones(1, 1, queries, queries, dtype=torch.bool) if masked else None
    importance(query, key, valid=valid, visible=visible)


def _units(slots: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, slots, width), torch.ones(1, slots, dtype=torch.bool), torch.ones(1, dtype=torch.long)


def _greedy_dpp(slots: int, width: int) -> None:
    x, valid, count = _units(slots, width)
    greedy_dpp(x, torch.ones(1, slots), valid, count, most=1)


def _decode(
    dtype: torch.dtype, d: int, groups: int, q: int, flat: bool, masked: bool, pages: Any = None, room: bool = False
) -> None:
    heads, tail = 2, 16 + q
    columns = tail + (32 if flat else 0)
    if pages is not None:
        columns += int(pages.lengths().max())
    decode_attention(
        torch.zeros(1, heads * groups, q, d, dtype=dtype),
        *_zeros(2, 1, heads, tail, d, dtype=dtype),
        flat=Flat(*_zeros(2, 64, d, dtype=dtype), torch.tensor([0, 32, 64]), 32) if flat else None,
        pages=pages,
        visible=torch.ones(1, heads, q, columns, dtype=torch.bool) if masked else None,
        tail=torch.ones(1, dtype=torch.int32) if room else None,
    )


def _chosen(dtype: torch.dtype, d: int, groups: int, unit: int, masked: bool, room: bool = False) -> None:
    whole = (torch.zeros(1, 2, *shape, dtype=torch.int32) for shape in ((8,), (4, unit), (2,), ()))
    visible = torch.ones(1, 2, 1, 80, dtype=torch.bool) if masked else None
    cache = _zeros(2, 1, 2, 80, d, dtype=dtype)
    query, tail = torch.zeros(1, 2 * groups, 1, d, dtype=dtype), torch.tensor([74]) if room else None
    chosen_attention(query, *cache, ChosenKeys(*whole, 72), visible=visible, tail=tail)


def _packed(dtype: torch.dtype, method: str, options: dict[str, Any], whole: bool) -> None:
    _decode(dtype, 128, 7, 1, whole, whole, _pages(dtype, method, options))


def _pages(dtype: torch.dtype, method: str, options: dict[str, Any]) -> Any:
    codec = get_method(method)(**options)
    assert isinstance(codec, Codec)
    lengths = torch.full((1, 2), codec.page)
    # channels that differ, so that a codec that chooses some finds them
    x = torch.arange(1.0, 129).expand(2 * codec.page, 128).to(dtype).contiguous()
    return codec.pack(x, x, lengths)


__all__ = ["DTYPES", "TARGETS", "Task", "cases", "loops", "pages_of", "tasks"]
