"""Pictures that are read apart from their prompts: what that costs in answers, and what reusing them saves.

    python benchmarks/prompt_cache.py --out benchmarks/results/prompt-cache-cpu.json --update docs/results/many-users.md

The shipped models answer questions about two pictures, read as a whole and with a ``PromptCache``. Each question is asked
again with the pictures kept, behind another text; seconds are those of the processor up to the first token, the median.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from mmaccel import PromptCache, accelerated
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.families.load import load
from mmaccel.media.files import Chat, encode
from mmaccel.programs.bench import provenance
from mmaccel.suite import make_item

MODELS, SIDE = ("mini-llava", "mini-qwen-vl"), 112


def message(question: str, lead: str = "") -> list[dict[str, Any]]:
    """A question about two pictures, perhaps behind some text."""
    text = [{"type": "text", "text": lead}] if lead else []
    return [{"role": "user", "content": [*text, *[{"type": "image"}] * 2, {"type": "text", "text": question}]}]


def answer(model: Any, processor: Any, inputs: Any, longest: int = 8) -> str:
    """The greedy answer to a prompt."""
    out = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
    words: str = processor.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return words.strip()


def first_token(model: Any, processor: Any, inputs: Callable[[], Any]) -> float:
    """Seconds from the pixels to the first token."""
    begin = time.process_time()
    answer(model, processor, inputs(), 1)
    return time.process_time() - begin


def measure(name: str, recipe: str, questions: int) -> dict[str, Any]:
    """The figures of one model."""
    model, processor = load(name, device="cpu")
    right, same = {"whole": 0, "apart": 0}, 0
    seconds: dict[str, list[float]] = {"whole": [], "reused": []}
    with accelerated(model, recipe, processor=processor, **({} if recipe == "none" else {"retain": 0.5})):
        for seed in range(questions):
            item = make_item("comparison", "test", seed)
            shown, turn = [Image.fromarray(x) for x in item.pictures(SIDE)], item.turns[-1]
            prompts = PromptCache(model, processor)
            asked, again = message(turn.question), message(turn.question, "look at both")
            answers = {
                "whole": answer(model, processor, encode(processor, [Chat(tuple(asked), tuple(shown))])),
                "apart": answer(model, processor, prompts.inputs(asked, shown)),
            }
            for way, words in answers.items():
                right[way] += words == turn.answer
            same += answers["whole"] == answers["apart"]
            whole = partial(encode, processor, [Chat(tuple(again), tuple(shown))])
            seconds["whole"].append(first_token(model, processor, whole))
            seconds["reused"].append(first_token(model, processor, partial(prompts.inputs, again, shown)))
            assert prompts.hits == 2
    medians = {way: median(times) for way, times in seconds.items()}
    return {"model": name, "recipe": recipe, "questions": questions, "right": right, "same": same, "seconds": medians}


def table(report: dict[str, Any]) -> str:
    """One row a model and recipe."""
    lines = [["model", "recipe", "read", "right answers", "same answers", "first token, ms, pictures seen before"]]
    for row in report["rows"]:
        for way, again, same in (("whole", "whole", ""), ("apart", "reused", f"{row['same']} of {row['questions']}")):
            answers = f"{row['right'][way]} of {row['questions']}"
            lines.append(
                [f"`{row['model']}`", f"`{row['recipe']}`", way, answers, same, f"{1e3 * row['seconds'][again]:.0f}"]
            )
    used = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"{markdown(lines)}\n\nQuestions that compare two pictures; `divprune` at a half. `{report['command']}`, "
        f"{report['date']}, {report['machine']}, {used}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, help="default: 100")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": provenance.command("python", "benchmarks/prompt_cache.py"),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()}), one thread",
        "versions": provenance.versions(),
        "rows": [measure(name, recipe, args.questions) for name in MODELS for recipe in ("none", "divprune")],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text := table(report))
    if args.update:
        put_between(args.update, args.out.stem, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
