"""Measure decoding with drafts that copy: tokens a forward, and seconds beside plain decoding.

Asks ``smol-pages`` (SmolLM2-135M-Instruct behind the classes of LLaVA) about pages of text, in pairs: without drafts, and with
``lossless=True, lookup=...``. Each of a pair comes first in turn. Times on a CPU are those of the process, which other programs
disturb least, and on a GPU those of a clock on the wall. Every pair must give the same tokens, and no task may be slower by
more than 2 % beyond noise; the command ends with 1 if one is. Tasks, each with drafters that know nothing of the others:

- ``read``: a long answer, copied from the page, whose words are in no token that a drafter sees; drafts can only cost.
- ``again``: the same question in the next turn of the conversation, whose prompt holds the first answer.
- ``others``: the same question again in a new conversation; only earlier answers hold the words.

    python benchmarks/lossless.py --questions 12 --out benchmarks/results/lossless-cpu.json --update docs/guides/lossless.md
    python benchmarks/lossless.py --tasks read --questions 200 --out read.json --update docs/guides/lossless.md
    python benchmarks/lossless.py --bytes --update docs/guides/lossless.md

With ``--bytes`` nothing runs: the speed-up of decoding that the bytes of a draft step promise on a device that is bound by
memory, for a pair of shapes and for a model that drafts over a tenth of its own cache, and that of whole answers on an H100. A
forward over several tokens then costs as much as one over a single token.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import torch
from tqdm import tqdm

from mmaccel import load
from mmaccel.accelerate import accelerate_vlm
from mmaccel.cli.shared.text import markdown, put_between, write_json
from mmaccel.decoding.drafters import DRAFTERS
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.arithmetic import weight_bytes
from mmaccel.programs.bench.figures import ratios
from mmaccel.programs.bench.shapes import skeleton
from mmaccel.runtime.decoding.length import expected
from mmaccel.suite import Page

TASKS = ("read", "again", "others")
LONGEST = 64
#: a task whose drafts do not pay may take so much longer
ALLOWED = 0.02


def prompt(model: Any, processor: Any, one: Page, task: str) -> dict[str, Any]:
    """The inputs of a task for a page; those of ``again`` follow the bare model's first answer."""
    first = pages.inputs_of(model, processor, [one])
    if task != "again":
        return first
    told = model.generate(**first, max_new_tokens=LONGEST, do_sample=False, mmaccel=False)[0].tolist()
    twice = replace(one, questions=(one.questions[0],) * 2)
    ids = torch.tensor([told + pages.next_turn(processor, twice, told)], device=model.device)
    return {**first, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Answer every question of every task with and without drafts, in turn."""
    torch.set_num_threads(options.threads)
    model, processor = load("smol-pages", device=options.device, dtype="float32")
    (batches,) = [list(pages.asked(processor, model.config.image_seq_length, "test", ["long"], options.questions, 1))]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tqdm(total=len(batches) * len(options.tasks) * len(options.drafters), unit="pair") as bar:
        for drafter in options.drafters:
            for task in options.tasks:
                accelerate_vlm(model, "none", lossless=True, lookup=drafter)
                for number, (one,) in enumerate(batches):
                    inputs = prompt(model, processor, one, task)
                    if task == "others":
                        model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
                    rows.setdefault((task, drafter), []).append(pair(model, inputs, number % 2 == 1))
                    bar.update()
                model.mmaccel.remove()
    return {
        "rows": [{"task": task, "drafter": drafter, **summary(found)} for (task, drafter), found in rows.items()],
        "command": provenance.command("python", sys.argv[0]),
        "questions": options.questions,
        "threads": options.threads,
        "dtype": "float32",
        "processor": pages.device_name(options.device),
        "date": provenance.today(),
        "versions": provenance.versions(),
    }


def pair(model: Any, inputs: dict[str, Any], drafted_first: bool) -> dict[str, Any]:
    """One answer without and with drafts."""
    told, seconds, drafting = {}, {}, {}
    # an answer that ends has waited for its last token
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    for drafted in (drafted_first, not drafted_first):
        begin = clock()
        told[drafted] = model.generate(
            **inputs, max_new_tokens=LONGEST, do_sample=False, mmaccel=None if drafted else False
        )
        seconds[drafted] = clock() - begin
        if drafted:
            drafting = model.mmaccel.stats().drafting
    return {"same": torch.equal(told[True], told[False]), "seconds": (seconds[False], seconds[True]), **drafting}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over answers, tokens a forward behind the prompt, and the ratios of times."""
    bare, drafted = zip(*(one["seconds"] for one in found), strict=True)
    sums = {name: sum(one[name] for one in found) for name in ("tokens", "verifications", "drafted", "accepted")}
    return {
        **sums,
        "same": sum(one["same"] for one in found),
        "answers": len(found),
        # the first token comes with the prompt
        "tokens_a_forward": (sums["tokens"] - len(found)) / max(1, sums["verifications"]),
        "times_as_fast": ratios(bare, drafted).as_dict(),
        "times_as_fast_in_all": sum(bare) / sum(drafted),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    head = [
        "task",
        "drafter",
        "same answers",
        "tokens a forward",
        "drafts accepted",
        "times as fast (from, to)",
        "in all",
    ]
    lines = [
        [
            row["task"],
            row["drafter"],
            f"{row['same']} of {row['answers']}",
            f"{row['tokens_a_forward']:.2f}",
            f"{row['accepted']} of {row['drafted']}",
            "{median:.2f} ({low:.2f}, {high:.2f})".format(**row["times_as_fast"]),
            f"{row['times_as_fast_in_all']:.2f}",
        ]
        for row in report["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"{markdown([head, *lines])}\n\n`{report['command']}`, float32, "
        f"seconds of {report['processor']}, threads: {report['threads']}, {versions}, {report['date']}."
    )


#: model that verifies, model that drafts; contexts in tokens; acceptance of a drafted token
PAIR = "llava-onevision-7b", "llava-onevision-0.5b"
CONTEXTS = 500, 8_000, 32_000
ACCEPTANCE = 0.6, 0.8, 0.9
#: share of its prompt, or of the cache, that a draft reads
READ = 0.1
LONGEST_DRAFT = 16


def read_bytes(name: str) -> tuple[int, int]:
    """Bytes in 16 bits that a decode step reads: of the weights, and of the keys and values of a token."""
    model = skeleton(name)
    text = model.config.text_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = weight_bytes(model) * 2 // next(model.parameters()).element_size()
    return half, 2 * 2 * text.num_hidden_layers * text.num_key_value_heads * width


def promised(share: float, acceptance: float) -> tuple[int, float]:
    """The draft length that promises most, and its speed-up, where a draft step reads a ``share`` of what a step reads."""
    gains = {n: expected(acceptance, n) / (n * share + 1) for n in range(LONGEST_DRAFT + 1)}
    best = max(gains, key=lambda n: gains[n])
    return best, gains[best]


def bytes_table() -> str:
    """Draft lengths and speed-ups by bytes, as Markdown."""
    (weights, key), (small, small_key) = (read_bytes(name) for name in PAIR)
    rows = []
    for context in CONTEXTS:
        step = weights + context * key
        drafts = {PAIR[1]: small + READ * context * small_key, "the model itself": weights + READ * context * key}
        for who, read in drafts.items():
            cells = [f"{gain:.2f} ({length})" for length, gain in (promised(read / step, a) for a in ACCEPTANCE)]
            rows.append([f"{context:,}", who, f"{read / step:.2f}", *cells])
    head = ["tokens in the cache", "who drafts", "draft step", *(f"accepted {a:.0%}" for a in ACCEPTANCE)]
    return (
        f"{markdown([head, *rows])}\n\n`python benchmarks/lossless.py --bytes`: {PAIR[0]}, 16 bits, batch 1; times as fast, "
        "and the draft length in brackets. Draft step: what it reads, as a share of a step of the model; drafts read "
        f"{READ:.0%} of the prompt."
    )


#: bytes a second, and operations a second as the data sheet says, of which a prompt is given half: a guess
H100, H100_OPERATIONS = 3.35e12, 0.5 * 989e12
ANSWERS = 16, 64, 512


def whole_answers(acceptance: float = ACCEPTANCE[1]) -> str:
    """Seconds of whole answers on an H100, prompts of both models among them, as Markdown."""
    rows = []
    for context in CONTEXTS:
        (prompt, step), (small_prompt, small_step) = seconds_of(PAIR[0], context), seconds_of(PAIR[1], READ * context)
        for answer in ANSWERS:
            plain = prompt + (answer - 1) * step
            cells = []
            for draft_step, before in ((0.0, 0.0), (small_step, small_prompt)):
                length, _ = promised(draft_step / step, acceptance)
                blocks = max(1.0, (answer - 1) / expected(acceptance, length))
                drafted = prompt + before + blocks * (length * draft_step + step)
                cells += [f"{answer - 1:,} / {blocks:,.0f}", f"{plain / drafted:.2f}"]
            rows.append([f"{context:,}", str(answer), f"{plain:.2f}", *cells])
    head = ["tokens in the prompt", "answer", "seconds", "forwards, copied drafts", "times as fast"]
    head += [f"forwards, {PAIR[1]} drafts", "times as fast"]
    return (
        f"{markdown([head, *rows])}\n\nWhole answers of {PAIR[0]} on an H100 where {acceptance:.0%} of drafted tokens are "
        "accepted, by arithmetic (same command): 3.35 TB/s for decoding, half of 989 TFLOP/s for prompts, which is a guess; no "
        "towers and no time of the host."
    )


def seconds_of(name: str, context: float) -> tuple[float, float]:
    """Seconds of a prompt of so many tokens, and of a step behind it."""
    text = skeleton(name).config.text_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weights, key = read_bytes(name)
    # two operations a weight of 16 bits; half of a square of attention, for keys and for values
    operations = weights * context + 2 * text.num_hidden_layers * text.num_attention_heads * width * context**2
    return operations / H100_OPERATIONS, (weights + context * key) / H100


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=12, help="pages")
    parser.add_argument("--drafters", nargs="+", default=["suffixdecoding"], choices=list(DRAFTERS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    parser.add_argument("--update", type=Path, help="put the table between its marks in this page")
    parser.add_argument("--bytes", action="store_true", help="promise speed-ups by bytes instead; nothing runs")
    options = parser.parse_args()
    if options.bytes:
        print(text := f"{bytes_table()}\n\n{whole_answers()}")
        if options.update:
            put_between(options.update, "lossless-bytes", text)
        return 0
    report = measure(options)
    text = table(report)
    print(text)
    if options.out:
        write_json(options.out, report)
    if options.update:
        # a single task, asked more often, has a table of its own
        mark = "lossless" if options.tasks == list(TASKS) else f"lossless-{options.tasks[0]}"
        put_between(options.update, mark, text)
    right = all(row["same"] == row["answers"] for row in report["rows"])
    return 0 if right and all(row["times_as_fast"]["high"] > 1 - ALLOWED for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
