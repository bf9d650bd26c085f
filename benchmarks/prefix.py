"""Prefixes that are computed once: many questions about one clip, and a cache on disk.

    python benchmarks/prefix.py --out benchmarks/results/prefix-cpu.json --update docs/results/many-users.md

A model of a known architecture with random weights reads a clip of so many tokens, on one thread. Times are seconds of the
processor, which other work on the machine hardly changes, and the best of a few runs:

- 32 questions as one batch, from the pixels to the last token, beside the prefill of one question and the decode steps of that
  batch; and the same decode steps where every row has its own copy of the clip's keys.
- loading the cache of the clip from a file, beside computing it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmaccel import accelerated, load_cache, save_cache
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.kv.cache import cache_bytes, cache_with
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.shapes import WORDS, build, shape
from mmaccel.programs.bench.workloads import ShapeSubject, Workload

#: tokens of a question
QUESTION = 16


def best(repeats: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """The shortest time of a few runs in seconds, and what the last one returned."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        result = run()
        times.append(time.process_time() - begin)
    return min(times), result


def of_tokens(subject: ShapeSubject, tokens: int) -> dict[str, torch.Tensor]:
    """A prompt with a clip of about so many tokens, up to its end."""
    frames = 4
    while True:
        work = Workload(frames=frames)
        inputs = subject.inputs(work, [subject.pixels(work)])
        visual = subject.model.mmaccel.family.visual(inputs["input_ids"])[0].nonzero()[:, 0]
        if len(visual) >= tokens:
            end, ids = int(visual.max()) + 2, inputs["input_ids"]
            return {name: x[:, :end] if x.shape == ids.shape else x for name, x in inputs.items()}
        frames = max(frames + 2, frames * tokens // len(visual) // 2 * 2)


@torch.inference_mode()
def measure(name: str, recipe: str, tokens: int, rows: int, new: int, repeats: int) -> dict[str, Any]:
    """The figures of one clip."""
    model = build(name, torch.device("cpu"), torch.float32)
    model.generation_config.eos_token_id = None
    subject = ShapeSubject(model, shape(name))
    with accelerated(model, recipe, retain=0.5), tempfile.TemporaryDirectory() as folder:
        clip = of_tokens(subject, tokens)
        length = clip["input_ids"].shape[1]
        words = torch.randint(WORDS, WORDS + 64, (rows, QUESTION), generator=torch.Generator().manual_seed(0))
        ids = torch.cat([clip["input_ids"].expand(rows, -1), words], dim=1)

        def longer(x: torch.Tensor, value: int) -> torch.Tensor:
            return torch.nn.functional.pad(x, (0, QUESTION), value=value)

        one = {
            n: longer(x, int(n == "attention_mask")) if x.shape == clip["input_ids"].shape else x
            for n, x in clip.items()
        }
        one["input_ids"] = ids[:1]
        prefill, _ = best(repeats, lambda: model(**one, use_cache=True, logits_to_keep=1))
        compute, output = best(repeats, lambda: model(**clip, use_cache=True, logits_to_keep=1))
        cache = output.past_key_values
        file = Path(folder) / "clip.safetensors"
        save, _ = best(repeats, lambda: save_cache(cache, file, model))
        load, _ = best(repeats, lambda: load_cache(file, model))

        def answered(share: bool) -> dict[str, Any]:
            """Figures of the batch whose rows share the clip's keys, or have copies."""

            def run(longest: int) -> Any:
                state = cache.mmaccel.selected(torch.zeros(rows, dtype=torch.long), share=share)
                options = {"max_new_tokens": longest, "do_sample": False}
                return model.generate(input_ids=ids, past_key_values=cache_with(state), **options)

            first, _ = best(repeats, lambda: run(1))
            every, _ = best(repeats, lambda: run(new))
            held = model.mmaccel.stats()["kv_bytes"]
            return {"all_seconds": compute + every, "decode_seconds": every - first, "kv_bytes": held}

        shared = answered(share=True)
        return {
            "shape": name,
            "recipe": recipe,
            "clip_tokens": length,
            "rows": rows,
            "new_tokens": new,
            "one_prefill_seconds": prefill,
            **shared,
            "ratio": shared["all_seconds"] / (prefill + shared["decode_seconds"]),
            "copied": answered(share=False),
            "file": {
                "bytes": file.stat().st_size,
                "cache_bytes": cache_bytes(cache),
                "compute_seconds": compute,
                "save_seconds": save,
                "load_seconds": load,
                "times": compute / load,
            },
        }


def table(report: dict[str, Any]) -> str:
    lines = [["clip, tokens", "questions", "keys of the clip", "all answers, s", "decode steps, s", "KV cache, MiB"]]
    files = [["clip, tokens", "computing the cache, s", "saving, s", "loading, s", "loading is faster"]]
    for found in report["rows"]:
        for label, of in (("shared", found), ("copied for every row", found["copied"])):
            figures = [f"{of['all_seconds']:.1f}", f"{of['decode_seconds']:.1f}", f"{of['kv_bytes'] / 2**20:.1f}"]
            lines.append([f"{found['clip_tokens']:,}", str(found["rows"]), label, *figures])
        of = found["file"]
        seconds = [f"{of['compute_seconds']:.1f}", f"{of['save_seconds']:.2f}", f"{of['load_seconds']:.2f}"]
        files.append([f"{found['clip_tokens']:,}", *seconds, f"{of['times']:.0f} times"])
    used = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    ratios = ", ".join(f"{found['ratio']:.2f}" for found in report["rows"])
    first = report["rows"][0]
    return (
        f"{markdown(lines)}\n\nAll answers take {ratios} times as long as the prefill of one question and the decode steps of "
        f"the batch.\n\n{markdown(files)}\n\nShape `{first['shape']}` with random weights, `{first['recipe']}` at a half, "
        f"{first['new_tokens']} tokens an answer. `{report['command']}`, {report['date']}, {report['machine']}, {used}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--recipe", default="keydiff", help="a policy of the cache (default: keydiff)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of the clip (default: 8192)")
    parser.add_argument("--rows", type=int, default=32, help="questions (default: 32)")
    parser.add_argument("--new", type=int, default=8, help="tokens of an answer (default: 8)")
    parser.add_argument("--repeats", type=int, default=2, help="default: 2")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables between the marks of this page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": provenance.command("python", "benchmarks/prefix.py"),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()}), one thread",
        "versions": provenance.versions(),
        "rows": [measure(args.shape, args.recipe, tokens, args.rows, args.new, args.repeats) for tokens in args.tokens],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text := table(report))
    if args.update:
        put_between(args.update, args.out.stem, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
