"""Does prefill get faster in proportion to the work removed?

Builds a LLaVA model with random weights, whose speed is that of a trained one, and times the language model's prefill bare and
accelerated, in turn within one process, so that the ratios hold on a noisy machine. Beside each measured speed-up stands
the one that operation counts promise, and the share of it that was realised; the cost of selection is shown on its own. It
also times recipe ``none`` against the bare model, in prefill and decode.

``--chunks`` times something else, in processor time: a prompt read in chunks whose chunks read some keys of earlier ones
(``tokenselect`` with ``prefill=True``), against the same prompt with chunks that read all of them.

    python benchmarks/prefill.py --out benchmarks/results/prefill-cpu.json
    python benchmarks/prefill.py --chunks 64 96 128 --layers 4 --width 384 --runs 5 --threads 1 --out prefill-chunks-cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
)

from mmaccel import accelerated
from mmaccel.cli.shared.text import put_between
from mmaccel.programs.bench import provenance

IMAGE_TOKEN = 9


def build(layers: int, width: int, side: int, device: str, dtype: torch.dtype) -> LlavaForConditionalGeneration:
    """A LLaVA with ``side * side`` visual tokens and a tower too small to matter."""
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=side * 4,
        patch_size=4,
    )
    text = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=int(width * 8 / 3) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 64 // 3),
        max_position_embeddings=32768,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).to(device=device, dtype=dtype).eval()


def prompt(model: LlavaForConditionalGeneration, side: int, text: int) -> dict[str, Tensor]:
    """One picture between two halves of ``text`` text tokens."""
    half = torch.randint(10, 1000, (2, text // 2), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([half[0], torch.full((side * side,), IMAGE_TOKEN), half[1]])[None]
    pixels = torch.randn(1, 3, side * 4, side * 4, generator=torch.Generator().manual_seed(1))
    device, dtype = model.device, model.dtype
    return {
        "input_ids": ids.to(device),
        "pixel_values": pixels.to(device, dtype),
        "attention_mask": torch.ones_like(ids),
    }


def flops(config: LlamaConfig, tokens: list[int]) -> float:
    """Multiply-adds times two of a prefill that sees ``tokens[i]`` tokens in layer ``i``; causal attention is half a
    square."""
    d, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head
    linear = 2 * (2 * d * d + 2 * d * kv + 3 * d * config.intermediate_size)
    return float(sum(linear * n + 2 * n * n * d for n in tokens))


class Clock:
    """Seconds of the text model's last prefill, selection included; its hooks stand outside those of mmaccel."""

    def __init__(self, model: Any) -> None:
        self.text = model.model.language_model
        self.sync = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
        self.seconds = 0.0

    def prefill(self, call: Callable[[], Any]) -> float:
        """Run ``call`` and return the seconds of its first pass through the text model."""
        found: list[float] = []
        start = [0.0]

        def begin(*_: Any) -> None:
            self.sync()
            start[0] = time.perf_counter()

        def end(*_: Any) -> None:
            self.sync()
            found.append(time.perf_counter() - start[0])

        hooks = [self.text.register_forward_pre_hook(begin, prepend=True), self.text.register_forward_hook(end)]
        with torch.inference_mode():
            call()
        for hook in hooks:
            hook.remove()
        return found[0]


class Stamps(LogitsProcessor):
    """The time at every decode step."""

    def __init__(self, sync: Callable[[], Any]) -> None:
        self.sync, self.at = sync, list[float]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.sync()
        self.at.append(time.perf_counter())
        return scores


def paired(bare: Any, fast: Any, runs: int) -> tuple[list[float], list[float]]:
    """Run both in turn, after one warm-up each."""
    bare()
    fast()
    a, b = [], []
    for i in range(runs):
        for take, into in ((bare, a), (fast, b)) if i % 2 == 0 else ((fast, b), (bare, a)):
            into.append(take())
    return a, b


def chunked(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the processor for the whole call, tower included, of chunks that choose and of chunks that read everything."""
    rows = []
    for side in args.chunks:
        model = build(args.layers, args.width, side, args.device, torch.float32)
        inputs = prompt(model, side, args.text)

        def seconds(prefill: bool, model: Any = model, inputs: Any = inputs) -> float:
            with (
                torch.inference_mode(),
                accelerated(model, "tokenselect", retain=args.retain, chunk=args.chunk, prefill=prefill),
            ):
                begin = time.process_time()
                model(**inputs, logits_to_keep=1)
                return time.process_time() - begin

        a, b = paired(lambda: seconds(False), lambda: seconds(True), args.runs)
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        row = {"visual_tokens": side**2, "all_s": statistics.median(a), "chosen_s": statistics.median(b)}
        rows.append(row | {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]})
        print(rows[-1], flush=True)
    return {"retain": args.retain, "chunk": args.chunk, "rows": rows}


def chunks_table(report: dict[str, Any]) -> str:
    """The figures of :func:`chunked` for people."""
    lines = ["| visual tokens | all keys, s | chosen keys, s | as fast |", "|---|---|---|---|"]
    for row in report["rows"]:
        ratio = f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        lines.append(f"| {row['visual_tokens']:,} | {row['all_s']:.1f} | {row['chosen_s']:.1f} | {ratio} |")
    below = f"`{report['command']}`, chunks of {report['chunk']} tokens that read {report['retain']:.0%} of the visual keys, "
    return "\n".join(
        [*lines, "", f"{below}{report['machine']['processor']}, float32, processor time, {report['date']}."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--side", type=int, default=45, help="the picture makes side * side visual tokens")
    parser.add_argument("--text", type=int, default=64, help="text tokens")
    parser.add_argument("--retain", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--decode", type=int, default=32, help="decode steps timed for recipe none")
    parser.add_argument("--recipes", nargs="+", default=["random", "uniform", "divprune", "pool", "fastv"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument(
        "--chunks", type=int, nargs="+", metavar="SIDE", help="time chunks that choose, for these sides"
    )
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="of --chunks: write the table between its marks")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.chunks:
        found = heading(args) | chunked(args)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if args.update:
            put_between(args.update, "prefill-chunks", chunks_table(found))
        print(chunks_table(found))
        return
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    model = build(args.layers, args.width, args.side, args.device, dtype)
    inputs = prompt(model, args.side, args.text)
    clock, text = Clock(model), model.config.text_config
    total = inputs["input_ids"].shape[1]
    print(
        f"{args.layers} layers, width {args.width}, {args.side**2} visual and {total - args.side**2} text tokens, {dtype}"
    )

    def with_recipe(name: str, work: Any, **options: Any) -> Any:
        def run() -> float:
            with accelerated(model, name, **options):
                return float(work())

        return run

    def prefill() -> float:
        return clock.prefill(lambda: model(**inputs, logits_to_keep=1))

    def decode() -> float:
        stamps = Stamps(clock.sync)
        with torch.inference_mode():
            model.generate(
                **inputs,
                max_new_tokens=args.decode + 1,
                min_new_tokens=args.decode + 1,
                do_sample=False,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([stamps]),
            )
        return stamps.at[-1] - stamps.at[0]

    overhead = {}
    for what, work in (("prefill", prefill), ("decode", decode)):
        a, b = paired(work, with_recipe("none", work), args.runs)
        ratios = sorted(y / x for x, y in zip(a, b, strict=True))
        overhead[what] = {
            "bare_s": statistics.median(a),
            "none_s": statistics.median(b),
            "ratio_median": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }
        found = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"none / bare, {what}: {found}", flush=True)

    rows = []
    print(
        f"\n{'recipe':<12}{'bare s':>8}{'fast s':>8}{'select s':>9}{'speed-up':>9}{'FLOPs':>7}{'realised':>9}{'w/o sel.':>9}"
    )
    for name in args.recipes:
        selection: list[float] = []

        def fast(name: str = name, selection: list[float] = selection) -> float:
            with accelerated(model, name, retain=args.retain):
                seconds = prefill()
                figures = model.mmaccel.stats()
                selection.append(figures["seconds"]["selection"])
                fast.kept = figures  # type: ignore[attr-defined]
                return seconds

        a, b = paired(prefill, fast, args.runs)
        stats = fast.kept  # type: ignore[attr-defined]
        left = args.side**2 * args.retain
        first = stats["visual_tokens_kept"]
        cut = 2 if name == "fastv" else 0
        tokens = [total if i < cut else total - args.side**2 + first for i in range(args.layers)]
        promised = flops(text, [total] * args.layers) / flops(text, tokens)
        select = statistics.median(selection[1:])
        speedups = [x / y for x, y in zip(a, b, strict=True)]
        without = [x / max(y - s, 1e-9) for x, y, s in zip(a, b, selection[1:], strict=True)]
        row = {
            "recipe": name,
            "retain": args.retain,
            "visual_tokens": args.side**2,
            "resolved": left,
            "kept": first,
            "bare_s": statistics.median(a),
            "accelerated_s": statistics.median(b),
            "selection_s": select,
            "speedup": statistics.median(speedups),
            "speedup_flops": promised,
            "realised": statistics.median(speedups) / promised,
            "speedup_without_selection": statistics.median(without),
            "realised_without_selection": statistics.median(without) / promised,
        }
        rows.append(row)
        print(
            f"{name:<12}{row['bare_s']:>8.3f}{row['accelerated_s']:>8.3f}{select:>9.4f}{row['speedup']:>9.2f}"
            f"{promised:>7.2f}{row['realised']:>9.2f}{row['realised_without_selection']:>9.2f}",
            flush=True,
        )
    if args.out:
        args.out.write_text(
            json.dumps(
                heading(args) | {"overhead_of_none": overhead, "prefill": rows},
                indent=1,
            )
            + "\n"
        )


def heading(args: argparse.Namespace) -> dict[str, Any]:
    """Where figures come from."""
    return {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": {"processor": provenance.processor(args.device), "threads": torch.get_num_threads()},
        "versions": provenance.versions(),
    }


if __name__ == "__main__":
    main()
