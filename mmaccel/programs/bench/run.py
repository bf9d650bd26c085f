"""Measurements from pixels to the last token, bare and accelerated in turn within one process."""

from __future__ import annotations

import ctypes
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...accelerate import accelerated
from ...accelerate.drafting import HEAD, LAYERS, MODEL, SELF
from ...core.stats import Clock
from ...core.transformers_api import cache_of
from ...errors import MmaccelError, UnsupportedError, first_line
from ...families import family_of
from ...kv.cache import cache_bytes
from ...media.prepare import prepare
from ...method.model_options import KeepLoaded
from ...recipe import Recipe, get_recipe
from ...runtime.call.call import current
from ..drafts import DraftArguments, drafts_title
from ..model_lock import TokenTimer
from .arithmetic import (
    Operations,
    count_operations,
    promised_decode,
    promised_ttft,
    stored_bytes,
    stored_tokens,
    unread_bytes,
    weight_bytes,
)
from .figures import Spread, ratios, verdict
from .workloads import ClipFile, Subject, Workload, workload

#: parts of the time to first token, in order
PARTS = ("decoding", "preparation", "vision", "selection", "prefill", "rest")
#: services one after the other in a closed loop
ROUNDS = 2
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Case:
    """One load: a batch of requests, or with ``loop`` so many clients in a closed loop."""

    workload: str
    answer: int
    batch: int
    loop: bool = False

    @property
    def title(self) -> str:
        """For tables."""
        load = f"{self.batch} clients" if self.loop else f"batch {self.batch}"
        return f"{self.workload}, {load}, {self.answer} token{'s' * (self.answer > 1)}"


@dataclass(frozen=True)
class Sample:
    """One measured run. Times are in seconds, and ``parts`` add up to ``ttft``; ``decode`` and ``requests`` are per second.
    Of the cache at the end, ``kv``, ``stored`` (keys and values alone) and ``metadata`` are in bytes, ``tokens`` those of a
    layer."""

    ttft: float
    parts: dict[str, float]
    total: float
    decode: float | None
    requests: float
    peak: float | None
    kv: int
    stored: int
    metadata: int
    tokens: float
    stats: dict[str, Any]


class Stamps(TokenTimer):
    """A streamer that notes when each token reaches the host, and the time of selection before the first one."""

    selection = 0.0

    def put(self, value: Any) -> None:
        """Note the time."""
        super().put(value)
        if len(self.times) == 2 and (call := current()) is not None:
            # some methods also select at decode steps
            self.selection = call.stats.clock.seconds().get("selection", 0.0)


@contextmanager
def parts_of(model: Any, clock: Clock) -> Iterator[None]:
    """Time the encoders and the first pass through the text model, hooks of mmaccel included."""
    family = family_of(model)
    inner, device = family.inner, model.device
    passes = [0]
    begins: list[Any] = []

    def enter(*_: Any) -> None:
        if not passes[0]:
            begins.append(clock.start(device))

    def leave(*_: Any) -> None:
        if not passes[0]:
            clock.stop("language", begins.pop())
            # hooks would break a compiled decode step
            for handle in handles:
                handle.remove()
        passes[0] += 1

    handles = [family.text.register_forward_pre_hook(enter, prepend=True), family.text.register_forward_hook(leave)]
    names = [f"get_{modality}_features" for modality in ("image", "video")]
    before = {name: inner.__dict__.get(name) for name in names if hasattr(inner, name)}
    depth = [0]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # generate reads the signature
        def features(*args: Any, **kwargs: Any) -> Any:
            # some families encode clips by the function for pictures
            if depth[0]:
                return original(*args, **kwargs)
            depth[0] += 1
            try:
                with clock.measure("vision", device):
                    return original(*args, **kwargs)
            finally:
                depth[0] -= 1

        return features

    for name in before:
        inner.__dict__[name] = timed(getattr(inner, name))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, had in before.items():
            if had is None:
                del inner.__dict__[name]
            else:
                inner.__dict__[name] = had


class Peak:
    """The peak of memory since :meth:`reset`: on CUDA of tensors, weights included; on Linux of the resident set of the
    process, with Python, libraries and freed pages that the C library keeps; elsewhere unknown."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.since_reset = device.type == "cuda"

    def reset(self) -> None:
        """Begin to measure."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            try:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                self.since_reset = True
            except OSError:
                self.since_reset = False

    def bytes(self) -> int | None:
        """The peak; None if it cannot be reset or read."""
        if not self.since_reset:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


@dataclass
class Variant:
    """One way to run a case: bare (no recipe), with ``options`` of ``generate``, or with a recipe, and with ``drafts``.
    ``draft_bytes`` are those of the weights that a drafted token reads, where a model drafts."""

    title: str
    recipe: Recipe | None = None
    options: dict[str, Any] = field(default_factory=dict)
    drafts: DraftArguments = field(default_factory=dict)
    draft_bytes: int = 0
    samples: list[Sample] = field(default_factory=list)
    operations: Operations | None = None
    problem: str | None = None

    @property
    def shaping(self) -> Recipe | None:
        """The recipe that shapes answers; lossless ones have none."""
        return get_recipe("none") if self.recipe is not None and self.drafts.get("lossless") else self.recipe


class Bench:
    """Measures one model under several loads."""

    def __init__(self, subject: Subject, repeats: int, tell: Callable[[str], None] = lambda line: None) -> None:
        self.subject, self.repeats, self.tell = subject, repeats, tell
        self.model = subject.model
        self.peak = Peak(self.model.device)
        #: keeps models that draft
        self._loaded = KeepLoaded()
        self._shown: dict[str, tuple[np.ndarray, ClipFile | None]] = {}

    def shown(self, name: str) -> tuple[np.ndarray, ClipFile | None]:
        """Pixels of a workload, and the file of a clip; the last workload is cached."""
        if name not in self._shown:
            work = workload(name)
            pixels = self.subject.pixels(work)
            self._shown = {name: (pixels, ClipFile(pixels) if work.frames else None)}
        return self._shown[name]

    # --- one run ----------------------------------------------------------------------------------------------
    def inputs(self, case: Case, processor: Any) -> tuple[dict[str, Any], dict[str, float]]:
        """Inputs of the model on its device, made from pixels, and the seconds of each part."""
        work: Workload = workload(case.workload)
        pixels, clip = self.shown(case.workload)
        decoding, begin = 0.0, time.perf_counter()
        given = [pixels] * case.batch
        if clip is not None and clip.path is not None:
            for row in range(case.batch):
                given[row], taken = clip.decode()
                decoding += taken
        device, dtype = self.model.device, self.model.dtype
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.subject.inputs(work, given, processor).items()
            if isinstance(value, torch.Tensor)
        }
        self._synchronise()
        return inputs, {"decoding": decoding, "preparation": time.perf_counter() - begin - decoding}

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _put_on(self, variant: Variant) -> tuple[AbstractContextManager[Any], Any]:
        processor = self.subject.processor
        if variant.recipe is None:
            return nullcontext(), processor
        assert variant.shaping is not None
        if any(method.site == "frames" for _, method in variant.shaping.build()):
            if not self.subject.prepares:
                raise UnsupportedError(
                    f"{variant.recipe.name!r} works before the processor, which a shape does not have; give --model"
                )
            processor = prepare(processor, variant.recipe)
        return accelerated(self.model, variant.recipe, processor=processor, **variant.drafts), processor

    def service(self, case: Case, processor: Any, **options: Any) -> Sample:
        """Run one batch from pixels to the last token, with ``options`` of ``generate``. Drafts know no earlier answer: all
        requests are equal."""
        self._synchronise()
        handle = getattr(self.model, "mmaccel", None)
        if handle is not None:
            handle.drafts.forget()
        begin = time.perf_counter()
        inputs, parts = self.inputs(case, processor)
        stamps, clock = Stamps(), Clock()
        with torch.inference_mode(), parts_of(self.model, clock):
            out = self.model.generate(
                **inputs,
                max_new_tokens=case.answer,
                min_new_tokens=case.answer,
                do_sample=False,
                streamer=stamps,
                return_dict_in_generate=True,
                **options,
            )
        self._synchronise()
        total = time.perf_counter() - begin
        stats = handle.stats() if handle is not None else {}
        seconds = clock.seconds()
        ttft = stamps.times[1] - begin
        parts |= {"vision": seconds.get("vision", 0.0), "selection": stamps.selection}
        parts["prefill"] = max(0.0, seconds["language"] - stamps.selection)
        parts["rest"] = max(0.0, ttft - sum(parts.values()))
        decode = None
        if case.answer > 1:
            decode = case.batch * (case.answer - 1) / (stamps.times[-1] - stamps.times[1])
        stored, metadata = stored_bytes(cache_of(out))
        return Sample(
            ttft=ttft,
            parts=parts,
            total=total,
            decode=decode,
            requests=case.batch / total,
            peak=self.peak.bytes(),
            kv=cache_bytes(cache_of(out)),
            stored=stored,
            metadata=metadata,
            tokens=stored_tokens(cache_of(out)),
            stats=stats,
        )

    def once(self, case: Case, variant: Variant) -> Sample:
        """One sample: one batch, or several in a closed loop without a break."""
        context, processor = self._put_on(variant)
        self.peak.reset()
        with context:
            if not case.loop:
                return self.service(case, processor, **variant.options)
            begin = time.perf_counter()
            samples = [self.service(case, processor, **variant.options) for _ in range(ROUNDS)]
            wall = time.perf_counter() - begin
        last = samples[-1]
        return replace(
            last,
            ttft=statistics.mean(sample.ttft for sample in samples),
            parts={part: statistics.mean(sample.parts[part] for sample in samples) for part in PARTS},
            total=wall / ROUNDS,
            decode=None if last.decode is None else statistics.mean(sample.decode or 0.0 for sample in samples),
            requests=ROUNDS * case.batch / wall,
            peak=None if last.peak is None else max(sample.peak or 0.0 for sample in samples),
        )

    def warm_up(self, case: Case, variant: Variant) -> None:
        """Count the operations of a prefill, which also loads kernels and libraries, then run once."""
        context, processor = self._put_on(variant)
        with context:
            inputs, _ = self.inputs(case, processor)
            prefill = functools.partial(self.model.generate, **inputs, max_new_tokens=1, do_sample=False)
            variant.operations = count_operations(self.model, prefill)
            if variant.drafts:
                drafts = self.model.mmaccel.drafts
                drafting = self.model if drafts.family is None else drafts.family.model
                held = weight_bytes(drafting, drafts.skipped)
                variant.draft_bytes = held if drafts.head is None else sum(x.nbytes for x in drafts.head.parameters())
            del inputs, prefill
        self.once(case, variant)

    # --- a case -----------------------------------------------------------------------------------------------
    def measure(
        self,
        case: Case,
        recipes: Sequence[tuple[str, Recipe]],
        others: Sequence[Variant] = (),
        drafts: DraftArguments | None = None,
    ) -> list[dict[str, Any]]:
        """Rows of one case: the bare model, ``others``, recipes, and recipes with ``drafts``, if any; lossless ones are
        compared with the bare model, and their recipes do not run alone. A variant that runs out of memory, or is not
        supported, has a ``problem`` and is not run again."""
        variants = [Variant("bare"), *others]
        for title, recipe in recipes:
            if not drafts or not drafts.get("lossless"):
                variants.append(Variant(title, recipe))
            if drafts:
                variants.append(Variant(f"{title}, {drafts_title(drafts)}", recipe, drafts=drafts))
        for variant in variants:
            self._attempt(variant, self.warm_up, case)
            if variant is variants[0] and variant.problem not in (None, OUT_OF_MEMORY):
                # recipes cannot run either
                return [self._row(case, variant, variant)]
        for repeat in range(self.repeats):
            alive = [variant for variant in variants if variant.problem is None]
            # in another order each time
            turn = repeat % max(1, len(alive))
            for variant in alive[turn:] + alive[:turn]:
                self._attempt(variant, self._sample, case)
            self.tell(f"{case.title}: round {repeat + 1} of {self.repeats}")
        return [self._row(case, variant, variants[0]) for variant in variants]

    def _sample(self, case: Case, variant: Variant) -> None:
        variant.samples.append(self.once(case, variant))

    def _attempt(self, variant: Variant, run: Callable[[Case, Variant], None], case: Case) -> None:
        try:
            run(case, variant)
        except Exception as error:
            variant.problem = why_not(error, foreign=bool(variant.options))
            if variant.problem is None:
                raise
        if variant.problem is not None:
            gc.collect()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    def _row(self, case: Case, variant: Variant, bare: Variant) -> dict[str, Any]:
        drafts = [drafts_title(variant.drafts)] if variant.drafts else []
        row: dict[str, Any] = {
            "workload": case.workload,
            "answer": case.answer,
            "batch": case.batch,
            "closed_loop": case.loop,
            "recipe": variant.title,
            "name": "bare" if variant.recipe is None else ", ".join([variant.recipe.name, *drafts]),
            "retain": None if variant.recipe is None else variant.recipe.retain,
            "problem": variant.problem,
        }
        if variant.problem is not None:
            return row
        samples = variant.samples
        row["figures"] = _figures(samples)
        row["parts_s"] = {part: statistics.median(s.parts[part] for s in samples) for part in PARTS}
        stats, kv = samples[-1].stats, samples[-1].kv
        assert variant.operations is not None
        row["operations"] = vars(variant.operations)
        row["kv_bytes"] = kv
        row["step_bytes"] = self._read(variant)
        row["tokens"] = {name: stats[name] for name in _TOKENS if name in stats}
        row["notes"] = stats.get("notes", [])
        row["drafting"] = stats.get("drafting", {})
        clip = self.shown(case.workload)[1]
        if clip is not None and clip.path is None:
            row["notes"] = [*row["notes"], "video decoding is not in the first token: PyAV is not installed"]
        if variant is not bare and bare.problem is None:
            read = self._read(bare), row["step_bytes"]
            fewer = self._fewer_steps(case, variant)
            row |= _against(samples, bare.samples, variant.operations, bare.operations, read, fewer)
        return row

    def _read(self, variant: Variant) -> dict[str, int]:
        """Bytes that the last decode step read."""
        last = variant.samples[-1]
        kv = last.stored
        if variant.shaping is not None:
            kv -= unread_bytes(self.model, variant.shaping, last.stats, kv / max(1.0, last.tokens))
        return {"weights": weight_bytes(self.model), "kv": kv, "metadata": last.metadata}

    def _fewer_steps(self, case: Case, variant: Variant) -> float:
        """How many decode steps there are to one with drafts; drafted tokens of a model count as their share of its weights."""
        drafting = variant.samples[-1].stats.get("drafting")
        if not drafting or case.answer == 1:
            return 1.0
        by_model = sum(
            one["drafted"] for name, one in drafting["sources"].items() if name in (MODEL, HEAD, SELF, LAYERS)
        )
        steps = drafting["verifications"] + by_model / case.batch * variant.draft_bytes / weight_bytes(self.model)
        return float((case.answer - 1) / max(1.0, steps))


_TOKENS = ("prompt_tokens", "visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer")


def why_not(error: Exception, foreign: bool) -> str | None:
    """Reason why something cannot be measured, in one line; None for an unexpected error, unless it is in ``foreign`` code."""
    if isinstance(error, MmaccelError):
        return str(error)
    # the CPU's allocator raises a plain RuntimeError
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return OUT_OF_MEMORY
    return first_line(error) if foreign else None


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    names = {
        "ttft_s": "ttft",
        "decode_tokens_per_s": "decode",
        "requests_per_s": "requests",
        "total_s": "total",
        "peak_bytes": "peak",
    }
    columns = {name: tuple(getattr(sample, field) for sample in samples) for name, field in names.items()}
    return {name: Spread(values).as_dict() for name, values in columns.items() if None not in values}


def _against(
    fast: Sequence[Sample],
    bare: Sequence[Sample],
    operations: Operations,
    full: Operations | None,
    read: tuple[dict[str, int], dict[str, int]],
    fewer: float,
) -> dict[str, Any]:
    """Ratios to the bare model pair by pair, what arithmetic promises, and the share of it that was realised; ``read`` are the
    bytes of a decode step of the bare model and of this one, which takes ``fewer`` times as few of them."""
    assert full is not None
    pairs = list(zip(fast, bare, strict=True))
    speedups = {
        "ttft": ratios([b.ttft for _, b in pairs], [f.ttft for f, _ in pairs]),
        "requests": ratios([f.requests for f, _ in pairs], [b.requests for _, b in pairs]),
    }
    bare_kv, fast_kv = float(bare[-1].kv), float(fast[-1].kv)
    parts = {part: statistics.median(s.parts[part] for s in bare) for part in PARTS}
    ttft = statistics.median(s.ttft for s in bare)
    promised = {"ttft": promised_ttft(parts, full, operations), "flops": full.total / operations.total}
    answering = statistics.median(s.total - s.ttft for s in bare)
    full_cache, cache = (float(one["kv"] + one["metadata"]) for one in read)
    weights = read[0]["weights"]
    steps = promised_decode(weights, full_cache, cache) * fewer if bare[-1].decode is not None else 1.0
    promised["requests"] = (ttft + answering) / (ttft / promised["ttft"] + answering / steps)
    if bare[-1].decode is not None:
        promised["decode"] = steps
        speedups["decode"] = ratios([f.decode or 0.0 for f, _ in pairs], [b.decode or 1.0 for _, b in pairs])
    verdicts = {name: verdict(speedup) for name, speedup in speedups.items()}
    fast_parts = {part: statistics.median(s.parts[part] for s in fast) for part in PARTS}
    return {
        "speedup": {name: speedup.as_dict() for name, speedup in speedups.items()},
        "promised": promised,
        "realised": {name: speedup.median / promised[name] for name, speedup in speedups.items()},
        "verdict": verdicts,
        "saved": {"operations": full.total - operations.total, "kv_bytes": bare_kv - fast_kv},
        "kv_share": fast_kv / bare_kv if bare_kv else 1.0,
        "reasons": _reasons(verdicts, promised, parts, fast_parts, weights, full_cache),
    }


def _reasons(
    verdicts: dict[str, str],
    promised: dict[str, float],
    bare: dict[str, float],
    fast: dict[str, float],
    weights: int,
    bare_kv: float,
) -> list[str]:
    """Why there is no speed-up, as far as the parts show it."""
    why = []
    if verdicts["ttft"] != "faster":
        saved = bare["prefill"] + bare["vision"] - fast["prefill"] - fast["vision"]
        share = (bare["prefill"] + bare["vision"]) / sum(bare.values())
        if promised["ttft"] < 1.1:
            why.append(
                f"first token: arithmetic promises only {promised['ttft']:.2f}x (vision tower and prefill are {share:.0%} of "
                "the time)"
            )
        elif fast["selection"] > saved:
            why.append(
                f"first token: selection takes {fast['selection'] * 1e3:.1f} ms and saves {max(saved, 0.0) * 1e3:.1f} ms"
            )
        elif verdicts["ttft"] == "slower":
            why.append("first token: the parts do not show why")
    if verdicts.get("decode") == "slower":
        if promised["decode"] < 1.1:
            why.append(
                f"decoding: the cache is {bare_kv / (weights + bare_kv):.0%} of the bytes a step reads, less than what "
                "shaping each step costs"
            )
        else:
            why.append("decoding: bound by launches or by unpacking, not by the bytes it reads")
    return why
