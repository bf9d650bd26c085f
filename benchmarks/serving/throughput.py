"""Requests a second and the time to the first token in vLLM: as it is, with its own pruning of video (EVS), and with mmaccel.

Clients in a closed loop ask one engine, each its next question as soon as the last is answered; no two requests share a
picture, and nothing is cached between them. Engines are processes that take turns: a round measures every one under the
same load before the next load comes, so that a busy machine is busy for all. Every sample is written as it is made, and
the same command goes on where it was stopped.

    benchmarks/serving/environment.sh serving       # once; where there is a GPU, an environment with vllm and mmaccel will do
    serving/bin/python benchmarks/serving/throughput.py --minutes 11 --update docs/guides/serving.md
    python benchmarks/serving/throughput.py --model Qwen/Qwen2.5-VL-7B-Instruct --memory 0.3 --each 4 --out vllm-gpu.json

`x` is the rate over that of vLLM as it is in the same round (median), `CPU x` the same of the processor seconds of a request,
which other programs on the machine disturb less, `promised` what the operations that fall away say (tower and language model,
one answer), the shares how much of that came. `selection` is the share of the engine's time in which tokens were selected.
On a CPU set OMP_NUM_THREADS=1: threads that wait for each other count as busy.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import mmaccel
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.errors import MmaccelError

SHIPPED = Path(mmaccel.__file__).parent / "models" / "mini-qwen-vl"
QUESTION = "what colour is the circle ?"
STOCK = "vLLM"


@dataclass(frozen=True)
class Size:
    """A model with random weights, and pictures and clips for it.

    picture : pixels along a side. clip : frames, height and width.
    """

    layers: int
    width: int
    tower_layers: int
    tower_width: int
    picture: int
    clip: tuple[int, int, int]


SIZES = {
    # 2,025 tokens a picture, 2,024 a clip
    "small": Size(12, 768, 4, 256, 1260, (8, 616, 644)),
    "tiny": Size(2, 128, 2, 64, 280, (4, 168, 168)),
}
#: of a model that is not random
REAL = SIZES["small"]


@dataclass(frozen=True)
class Setting:
    """What is compared: an engine, and what each request adds. ``media`` are those it is measured on."""

    name: str
    engine: str
    retain: float | None
    media: tuple[str, ...] = ("picture", "clip")


def settings(recipe: str) -> list[Setting]:
    return [
        Setting(STOCK, "stock", None),
        Setting("EVS 25 %", "evs", None, ("clip",)),
        Setting(f"{recipe} 25 %", "mmaccel", 0.25),
        Setting(f"{recipe} 10 %", "mmaccel", 0.1),
    ]


def engine_options(engine: str, recipe: str) -> dict[str, Any]:
    """Arguments of ``LLM`` that make an engine what it is."""
    if engine == "evs":
        return {"video_pruning_rate": 0.75}
    return {"hf_overrides": {"mmaccel": {"recipe": recipe, "retain": 0.25}}} if engine == "mmaccel" else {}


# ------------------------------------------------------------------------------------------------- a model of random weights


def write_model(folder: Path, size: Size) -> None:
    """A Qwen2.5-VL without weights: vLLM fills in random ones. Words and pictures are those of the shipped model."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(SHIPPED / name, folder)
    config = json.loads((SHIPPED / "config.json").read_text())
    heads = size.width // 64
    config["text_config"].update(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        layer_types=["full_attention"] * size.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
    )
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12]
    config["vision_config"].update(
        depth=size.tower_layers,
        fullatt_block_indexes=[size.tower_layers - 1],
        hidden_size=size.tower_width,
        intermediate_size=4 * size.tower_width,
        num_heads=size.tower_width // 64,
        out_hidden_size=size.width,
        patch_size=14,
        window_size=112,
    )
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((SHIPPED / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part].update(patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 1 << 24})
    (folder / "processor_config.json").write_text(json.dumps(processor))


# ------------------------------------------------------------------------------------------------------ an engine, elsewhere


def pictures(size: Size, medium: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The media of ``count`` requests, no two alike: smooth noise, so that tokens differ."""
    random = np.random.default_rng(seed)
    frames, height, width = size.clip if medium == "clip" else (1, size.picture, size.picture)
    for _ in range(count):
        coarse = random.integers(0, 256, (frames, -(-height // 28), -(-width // 28), 3), dtype=np.uint8)
        film = coarse.repeat(28, 1).repeat(28, 2)[:, :height, :width]
        if medium == "picture":
            from PIL import Image

            yield {"image": Image.fromarray(film[0])}
        else:
            about = {"fps": 2.0, "total_num_frames": frames, "duration": frames / 2, "do_sample_frames": False}
            yield {"video": (film, {**about, "frames_indices": list(range(frames)), "video_backend": "none"})}


def serve(connection: Any, model: str, size: Size, options: dict[str, Any], answer: int) -> None:
    """The body of an engine's process: loads it, then measures what it is told to; errors go back as sentences."""
    try:
        from transformers import AutoProcessor
        from vllm import LLM, SamplingParams

        llm = LLM(model, enable_prefix_caching=False, mm_processor_cache_gb=0, disable_log_stats=True, **options)
        selection = Selection()
        llm.apply_model(selection.watch)
        processor = AutoProcessor.from_pretrained(model)
        greedy = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        connection.send({"ready": True})
        while (load := connection.recv()) is not None:
            content = [{"type": "video" if load["medium"] == "clip" else "image"}, {"type": "text", "text": QUESTION}]
            text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            extra = {"mm_processor_kwargs": {"retain": load["retain"]}} if load["retain"] else {}
            media = pictures(size, load["medium"], load["seed"], load["clients"] * load["each"])
            prompts = [{"prompt": text, "multi_modal_data": one, **extra} for one in media]
            selection.seconds = 0.0
            made = closed_loop(llm.llm_engine, prompts, load["clients"], greedy)
            connection.send({**made, "selection": selection.seconds})
    except Exception as error:
        connection.send(
            {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"}
        )


class Selection:
    """Counts the seconds in which a model selects tokens, in place of its counters."""

    seconds = 0.0

    def watch(self, model: Any) -> None:
        """Count those of ``model``, if it selects any."""
        if hasattr(model, "counters"):
            model.counters = self

    def add(self, name: str, modality: str, value: float) -> None:
        """As :class:`mmaccel.integrations.vllm.counters.Counters` does."""
        if name == "selection_seconds":
            self.seconds += value


def closed_loop(engine: Any, prompts: list[dict[str, Any]], clients: int, params: Any) -> dict[str, Any]:
    """Seconds for all prompts, of the clock and of processors, those of each to its first token, and the tokens of a prompt. A
    client that waits while the engine prepares another's picture is waiting for its first token."""
    began, busy = time.perf_counter(), time.process_time()
    left, asked, first, length = list(enumerate(prompts)), {}, {}, 0

    def ask(when: float) -> None:
        if left:
            number, prompt = left.pop(0)
            asked[str(number)] = when
            engine.add_request(str(number), prompt, params)

    for _ in range(clients):
        ask(began)
    while engine.has_unfinished_requests():
        for out in engine.step():
            now = time.perf_counter()
            name = out.request_id.split("-")[0]
            if out.outputs[0].token_ids:
                first.setdefault(name, now - asked[name])
            if out.finished:
                length = len(out.prompt_token_ids)
                ask(now)
    return {
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - busy,
        "requests": len(prompts),
        "first": sorted(first.values()),
        "prompt": length,
    }


class Engine:
    """One engine in a process of its own, loaded when it is first asked, idle while others are measured."""

    def __init__(self, name: str, options: argparse.Namespace, model: str, size: Size) -> None:
        self.name, self.options, self.model, self.size = name, options, model, size
        self.process: Any = None
        self.error: str | None = None
        self.warm: set[str] = set()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        given = {**engine_options(self.name, self.options.recipe), **common(self.options)}
        # vLLM as it is: without our plug-in
        os.environ["VLLM_PLUGINS"] = "mmaccel" if self.name == "mmaccel" else ""
        self.process = context.Process(
            target=serve, args=(theirs, self.model, self.size, given, self.options.answer), daemon=True
        )
        self.process.start()
        theirs.close()
        self._receive()

    def measure(self, load: dict[str, Any]) -> dict[str, Any] | None:
        """A sample, or None where the engine does not run; then :attr:`error` says why."""
        if self.process is None:
            self.start()
        if self.error is None and load["medium"] not in self.warm:
            # what the first request of a kind costs belongs to none of them
            self.warm.add(load["medium"])
            self.measure({**load, "clients": 1, "each": 1, "seed": 1})
        if self.error is not None:
            return None
        self.connection.send(load)
        return self._receive()

    def _receive(self) -> dict[str, Any] | None:
        try:
            got = self.connection.recv()
        except EOFError:
            got = {"error": "the engine's process ended"}
        self.error = got.get("error")
        return None if self.error else got

    def close(self) -> None:
        if self.process is not None:
            if self.error is None:
                self.connection.send(None)
            self.process.join(20)
            if self.process.is_alive():
                self.process.terminate()


def common(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``LLM`` that all engines share."""
    given: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(32, *options.clients)}
    if options.model is None:
        given |= {"load_format": "dummy", "dtype": options.dtype, "enforce_eager": True}
    if options.memory is not None:
        given["gpu_memory_utilization"] = options.memory
    return given


# ---------------------------------------------------------------------------------------------------------------- figures


def operations(config: Any, grid: tuple[int, int, int], kept: int, text: int, answer: int) -> float:
    """Floating point operations of one request: a grid (t, h, w) of patches through the tower, ``kept`` visual tokens and
    ``text`` others through the language model, ``answer`` tokens decoded."""
    words, tower = config.get_text_config(), config.vision_config
    t, h, w = grid
    patches, width = t * h * w, tower.hidden_size
    full = len(tower.fullatt_block_indexes)
    window = (tower.window_size // tower.patch_size) ** 2
    inside = tower.depth * 2 * patches * (4 * width**2 + 3 * width * tower.intermediate_size)
    inside += 4 * width * patches * (full * h * w + (tower.depth - full) * min(window, h * w))
    block = width * tower.spatial_merge_size**2
    inside += 2 * patches // tower.spatial_merge_size**2 * (block**2 + block * tower.out_hidden_size)
    size, heads, kv = words.hidden_size, words.num_attention_heads, words.num_key_value_heads
    head = getattr(words, "head_dim", None) or size // heads
    weights = 2 * size * head * (heads + kv) + 3 * size * words.intermediate_size
    length = kept + text
    attention = 4 * heads * head * (length**2 / 2 + answer * length)
    return inside + words.num_hidden_layers * (2 * weights * (length + answer) + attention)


def grid_of(size: Size, medium: str, patch: int) -> tuple[int, int, int]:
    frames, height, width = size.clip if medium == "clip" else (2, size.picture, size.picture)
    return frames // 2, height // patch, width // patch


def rows(result: dict[str, Any], size: Size, config: Any, answer: int) -> list[list[str]]:
    """The table: medians over the rounds, ratios within a round."""
    samples, tower = result["samples"], config.vision_config
    table = [["load", "clients", "engine", "visual tokens", "requests/s", "first token", "CPU s", "selection"]]
    table[0] += ["x", "CPU x", "promised", "share", "CPU share"]
    keys = dict.fromkeys((one["medium"], one["clients"], one["setting"]) for one in samples)
    for medium, clients, name in sorted(keys, key=lambda key: (key[0] != "picture", key[1])):
        grid = grid_of(size, medium, tower.patch_size)
        whole = grid[0] * grid[1] * grid[2] // tower.spatial_merge_size**2
        mine, stock = (_of(samples, medium, clients, which) for which in (name, STOCK))
        pairs = [(one, stock[number]) for number, one in mine.items() if number in stock]
        if not pairs:
            continue
        rate = statistics.median(one["requests"] / one["seconds"] for one in mine.values())
        first = statistics.median([second for one in mine.values() for second in one["first"]])
        busy = statistics.median(one["cpu"] / one["requests"] for one in mine.values())
        selected = statistics.median(one["selection"] / one["seconds"] for one in mine.values())
        text = next(iter(stock.values()))["prompt"] - whole
        kept = next(iter(mine.values()))["prompt"] - text
        row = [medium, str(clients), name, f"{kept:,}", f"{rate:.3g}", f"{first:.3g} s", f"{busy:.3g}"]
        if name == STOCK:
            row += ["", "1", "1", "", "", ""]
        else:
            faster, cheaper = (
                statistics.median(bare[what] / bare["requests"] / (one[what] / one["requests"]) for one, bare in pairs)
                for what in ("seconds", "cpu")
            )
            promise = operations(config, grid, whole, text, answer) / operations(config, grid, kept, text, answer)
            row += [f"{selected:.0%}", f"{faster:.2f}", f"{cheaper:.2f}", f"{promise:.2f}"]
            row += [f"{faster / promise:.0%}", f"{cheaper / promise:.0%}"]
        table.append(row)
    return table


def _of(samples: Iterable[dict[str, Any]], medium: str, clients: int, name: str) -> dict[int, dict[str, Any]]:
    """By round."""
    wanted = (medium, clients, name)
    return {one["round"]: one for one in samples if (one["medium"], one["clients"], one["setting"]) == wanted}


def report(result: dict[str, Any], size: Size, config: Any, answer: int) -> str:
    """The table, what did not run, and where it comes from."""
    parts = [markdown(rows(result, size, config, answer))]
    parts += [f"{name} did not run: {why}" for name, why in result["errors"].items()]
    about = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    rounds = 1 + max((one["round"] for one in result["samples"]), default=0)
    parts.append(f"`{result['command']}`, {rounds} rounds, {result['date']}, {result['machine']}, {about}.")
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------- the run


def loads(options: argparse.Namespace) -> Iterator[tuple[int, str, int, Setting]]:
    """What is measured, in this order: every load once with all engines before any comes again."""
    for number in range(options.rounds):
        for medium in options.media:
            for clients in options.clients:
                for setting in settings(options.recipe):
                    if medium in setting.media:
                        yield number, medium, clients, setting


def run(options: argparse.Namespace, model: str, size: Size, result: dict[str, Any], save: Any) -> None:
    """Measure what ``result`` lacks, until all is there or the minutes are over."""
    began = time.monotonic()
    done = {(one["round"], one["medium"], one["clients"], one["setting"]) for one in result["samples"]}
    missing = [load for load in loads(options) if (load[0], load[1], load[2], load[3].name) not in done]
    with ExitStack() as stack:
        engines = {name: Engine(name, options, model, size) for name in ("stock", "evs", "mmaccel")}
        for engine in engines.values():
            stack.callback(engine.close)
        for place, (number, medium, clients, setting) in enumerate(missing):
            expected = clients * options.each * _pace(result["samples"], medium, setting.name)
            if options.minutes is not None and time.monotonic() - began + expected > 60 * options.minutes:
                print(
                    f"{options.minutes} minutes are over; the same command goes on with {len(missing) - place} loads."
                )
                return
            engine = engines[setting.engine]
            load = {"medium": medium, "clients": clients, "each": options.each, "retain": setting.retain}
            got = engine.measure({**load, "seed": 1000 * number + clients + 2})
            stock = _of(result["samples"], medium, clients, STOCK).get(number)
            if got is not None and stock is not None and setting.name != STOCK and got["prompt"] >= stock["prompt"]:
                engine.error, got = "prompts are as long as without it", None
            if got is None:
                result["errors"][setting.name] = str(engine.error)
            else:
                result["errors"].pop(setting.name, None)
                result["samples"].append(
                    {"round": number, "medium": medium, "clients": clients, "setting": setting.name, **got}
                )
                say = f"{got['requests'] / got['seconds']:.3g} requests/s"
                print(f"[{place + 1}/{len(missing)}] {medium}, {clients} clients, {setting.name}: {say}", flush=True)
            save()


def _pace(samples: list[dict[str, Any]], medium: str, name: str) -> float:
    """Seconds a request, as they were last; 0 where nothing is known."""
    known = [one for one in samples if (one["medium"], one["setting"]) == (medium, name)]
    return known[-1]["seconds"] / known[-1]["requests"] if known else 0.0


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a real Qwen2.5-VL, name or folder (default: one of random weights)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the random model (default: small)")
    parser.add_argument("--recipe", default="divprune", help="default: divprune")
    parser.add_argument("--media", nargs="+", choices=("picture", "clip"), default=["picture", "clip"])
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[1, 2, 4, 8, 32], help="at once (default: 1 2 4 8 32)"
    )
    parser.add_argument("--each", type=int, default=1, help="questions of every client (default: 1)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="samples of everything (default: 3)")
    parser.add_argument("--minutes", type=float, help="begin nothing that ends later; the same command goes on")
    parser.add_argument("--dtype", default="bfloat16", help="of the random model (default: bfloat16)")
    parser.add_argument("--memory", type=float, help="share of the GPU's memory that each of three engines may take")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/vllm-cpu.json"),
        help="JSON of the samples (default: %(default)s)",
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown page whose table is made anew")
    options = parser.parse_args(argv)
    size = REAL if options.model else SIZES[options.size]
    try:
        result = begun(options, size)
    except MmaccelError as error:
        print(error, file=sys.stderr)
        return 2
    quiet()
    from transformers import AutoConfig

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            write_model(Path(folder), size)
        model = options.model or folder
        run(options, model, size, result, save)
        text = report(result, size, AutoConfig.from_pretrained(model), options.answer)
    print(text)
    if options.update is not None:
        put_between(options.update, "vllm", text)
    return 0


def begun(options: argparse.Namespace, size: Size) -> dict[str, Any]:
    """The result of an earlier run of the same measurement, or a new one.

    Raises
    ------
    MmaccelError
        If the file holds another measurement.
    """
    names = ("model", "recipe", "each", "answer", "dtype")
    asked = {**{name: getattr(options, name) for name in names}, "size": json.loads(json.dumps(asdict(size)))}
    if options.out.exists():
        found: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
        if found["asked"] != asked:
            raise MmaccelError(f"{options.out} holds a measurement of something else; name another file with --out.")
        return found
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch", "transformers", "mmaccel")}
    return {
        "command": " ".join(["python", "benchmarks/serving/throughput.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "asked": asked,
        "errors": {},
        "samples": [],
    }


def quiet() -> None:
    """What the engines' processes inherit; what the caller has set stays."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())
