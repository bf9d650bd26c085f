"""Where the time of a request goes in vLLM: seconds of processor time in each part, without a recipe and with one.

One client, one thread, the random model of `throughput.py`. `operations` are those of `throughput.py`; `speed-up` is that of
the whole request, and `as the language model` what it could be at most: the prefill as much shorter as its operations are
fewer, all else as it is without a recipe.

    OMP_NUM_THREADS=1 serving/bin/python benchmarks/serving/parts.py --update docs/guides/serving.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import throughput
from throughput import QUESTION, SIZES, closed_loop, grid_of, operations, pictures, write_model

from mmaccel.cli.shared.text import markdown, put_between

SHARE = 0.25
ANSWER = 8
PARTS = ("front end", "tower", "selection", "prefill", "decode steps", "the rest")


class Clock:
    """Adds up the processor time of calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def on(self, owner: Any, method: str, part: Callable[[Any], str]) -> None:
        """Count calls of a method; ``part`` names what they belong to, from their keyword arguments."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part(kwargs)] += time.process_time() - began

        setattr(owner, method, timed)


def measure(place: Path, medium: str, recipe: dict[str, Any], requests: int) -> tuple[dict[str, float], int, Any]:
    """Seconds a request by part, tokens of a prompt, and the model's configuration."""
    from transformers import AutoProcessor
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "disable_log_stats": True,
        "max_model_len": 4096,
    }
    weights = {"load_format": "dummy", "dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": 4}
    llm = LLM(str(place), hf_overrides={"mmaccel": recipe}, **options, **weights)
    engine = llm.llm_engine
    model = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    content = [{"type": "video" if medium == "clip" else "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    text = AutoProcessor.from_pretrained(place).apply_chat_template(messages, add_generation_prompt=True)
    asked = [{"prompt": text, "multi_modal_data": one} for one in pictures(SIZES["small"], medium, 3, requests + 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    closed_loop(engine, asked[:1], 1, greedy)
    clock = Clock()
    clock.on(engine, "add_request", lambda kwargs: "front end")
    clock.on(model.visual, "forward", lambda kwargs: "tower")
    clock.on(model.plan, "reduce", lambda kwargs: "selection")
    clock.on(model, "forward", lambda kwargs: "prefill" if kwargs["positions"].shape[-1] > 1 else "decode steps")
    began = time.process_time()
    length = closed_loop(engine, asked[1:], 1, greedy)["prompt"]
    clock.seconds["the rest"] = time.process_time() - began - sum(clock.seconds.values())
    config = model.config
    engine.engine_core.shutdown()
    del llm, engine, model
    cleanup_dist_env_and_memory()
    return {part: clock.seconds[part] / requests for part in PARTS}, length, config


def report(place: Path, media: list[str], name: str, requests: int, command: str) -> str:
    """The table, and where it comes from."""
    table = [["load", "engine", *PARTS, "all", "operations", "speed-up", "as the language model"]]
    for medium in media:
        bare, length, config = measure(place, medium, {"recipe": "none"}, requests)
        less, short, _ = measure(place, medium, {"recipe": name, "retain": SHARE}, requests)
        grid = grid_of(SIZES["small"], medium, config.vision_config.patch_size)
        whole = grid[0] * grid[1] * grid[2] // config.vision_config.spatial_merge_size**2
        text = length - whole
        tower, full, few = (
            operations(config, grid, kept, words, 0) for kept, words in ((0, 0), (whole, text), (short - text, text))
        )
        everything, ours = sum(bare.values()), sum(less.values())
        most = everything / (everything - bare["prefill"] * (1 - (few - tower) / (full - tower)))
        for engine, seconds, count, ends in (
            ("vLLM", bare, full, ["1", ""]),
            (f"{name} {SHARE:.0%}", less, few, [f"{everything / ours:.2f}", f"{most:.2f}"]),
        ):
            spent = [f"{seconds[part]:.3g} s" for part in PARTS]
            table.append([medium, engine, *spent, f"{sum(seconds.values()):.3g} s", f"{count / 1e9:.0f} G", *ends])
    versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in ("vllm", "torch", "mmaccel"))
    return f"{markdown(table)}\n\n`{command}`, {requests} requests each, {versions}."


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--media", nargs="+", choices=("picture", "clip"), default=["picture", "clip"])
    parser.add_argument("--recipe", default="divprune", help="default: divprune")
    parser.add_argument("--requests", type=int, default=2, help="measured of each (default: 2)")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown page whose table is made anew")
    options = parser.parse_args(argv)
    throughput.quiet()
    os.environ["VLLM_PLUGINS"] = "mmaccel"
    command = " ".join(["OMP_NUM_THREADS=1 python benchmarks/serving/parts.py", *(argv or sys.argv[1:])])
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SIZES["small"])
        text = report(Path(folder), options.media, options.recipe, options.requests, command)
    print(text)
    if options.update is not None:
        put_between(options.update, "parts", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
