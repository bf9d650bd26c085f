"""What ``mini-smol`` sees, what it still knows, and whether it behaves as a real model: figures with intervals, as JSON.

``python -m training.smol.evaluate --model mmaccel/models/mini-smol --json benchmarks/results/mini-smol-quality.json``

- ``full`` and ``wrong``: answers that are right, on pictures of the suite and on documents, and those to the same questions
  about the picture of the next question of that task.
- ``plain_text_loss``: mean loss of the next token on documentation of Python and on answers of the bare model, that no training
  has seen, of the bare language model and of this one.
- ``attention``: mass of the last query on the first token and on all visual tokens, by layer.
- ``kept``: answers that stay the same with recipes inside the language model; ``random`` drops as many as ``fastv``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from mmaccel.families.load import load
from mmaccel.families.smollm2 import folder
from mmaccel.media.files import encode
from mmaccel.programs.evaluate import Question, Row, ask_suite, evaluate
from mmaccel.programs.tune.confidence import interval
from mmaccel.suite import DOCUMENT_TASKS, IMAGE_TASKS
from training.results import write
from training.smol.rows import IMAGE, answers_of_base, passages, prose
from training.smol.tower import PIXELS

LONGEST_ANSWER = 40
RECIPES = (("fastv", 0.25), ("fastv", 0.1), ("random", 0.25), ("random", 0.1), ("snapkv", 0.25), ("divprune", 0.25))


def swapped(questions: Sequence[Question]) -> list[Question]:
    """The same questions about the pictures of the next question of their task."""

    def other(question: Question, shown: Question) -> Question:
        return replace(question, load=lambda: replace(question.load(), pictures=shown.load().pictures))

    tasks: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        tasks[question.task].append(question)
    return [other(question, pool[(at + 1) % len(pool)]) for pool in tasks.values() for at, question in enumerate(pool)]


def share(right: int, asked: int) -> dict[str, Any]:
    """Percent, with the interval of 95 % and the number of questions."""
    low, high = interval(right, asked)
    return {
        "percent": round(100 * right / asked, 1),
        "interval": [round(100 * low, 1), round(100 * high, 1)],
        "questions": asked,
    }


def answered(
    model: Any, processor: Any, questions: Sequence[Question], rows: Sequence[Row], what: str, batch: int
) -> dict[str, dict[str, Any]]:
    """Shares of answers that are ``right`` or the ``same``: title of the row -> task or ``average`` -> :func:`share`."""
    counts: dict[str, dict[str, list[bool]]] = {row.title: defaultdict(list) for row in rows}
    with tqdm(total=len(rows) * len(questions), unit="answer") as bar:
        for row, answers in evaluate(
            model, processor, questions, rows, batch_size=batch, max_new_tokens=LONGEST_ANSWER
        ):
            for answer in answers:
                counts[row.title][answer.task].append(bool(getattr(answer, what)))
                counts[row.title]["average"].append(bool(getattr(answer, what)))
            bar.update(len(answers))
    return {
        title: {task: share(sum(found), len(found)) for task, found in tasks.items()} for title, tasks in counts.items()
    }


@torch.inference_mode()
def plain_loss(model: Any, texts: Sequence[torch.Tensor]) -> float:
    """Mean loss of the next token over texts, int64 ``[length]`` each."""
    total, count = 0.0, 0
    for ids in texts:
        logits = model(input_ids=ids[None].to(model.device)).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[1:].to(model.device), reduction="sum").item()
        count += len(ids) - 1
    return total / count


def forgetting(model: Any, tokenizer: PreTrainedTokenizerFast, count: int) -> dict[str, dict[str, float]]:
    """Loss of the bare language model and of this one on ``count`` held-out texts of each kind."""
    from transformers import LlamaForCausalLM

    bare: Any = LlamaForCausalLM.from_pretrained(folder(), dtype=torch.float32).eval()
    texts = {
        "documentation": passages(tokenizer, prose("test")),
        "answers": answers_of_base(bare, tokenizer, "test"),
    }
    return {
        kind: {
            name: round(plain_loss(one, runs[:: max(1, len(runs) // count)]), 4)
            for name, one in (("bare", bare), ("trained", model))
        }
        for kind, runs in texts.items()
    }


@torch.inference_mode()
def attention(model: Any, processor: Any, questions: Sequence[Question]) -> dict[str, list[float]]:
    """Mean attention of the last query, over heads and questions, by layer: on the first token, on all visual tokens."""
    plain = model.config.text_config._attn_implementation
    model.model.language_model.set_attn_implementation("eager")
    first, visual = [], []
    for question in tqdm(questions, unit="question"):
        inputs = encode(processor, [question.load()]).to(model.device, model.dtype)
        given = model(**inputs, output_attentions=True).attentions
        last = torch.stack([layer[0, :, -1].float().mean(0) for layer in given])
        first.append(last[:, 0])
        visual.append(last[:, inputs["input_ids"][0] == IMAGE].sum(1))
    model.model.language_model.set_attn_implementation(plain)
    return {
        name: [round(value, 3) for value in torch.stack(part).mean(0).tolist()]
        for name, part in (("first token", first), ("visual tokens", visual))
    }


def measure(
    model: Any, processor: Any, *, split: str, per_task: int, kept: int, batch: int, texts: int = 40
) -> dict[str, Any]:
    """All figures: ``per_task`` questions a task, ``kept`` of them with recipes, ``texts`` plain texts of each kind."""
    figures: dict[str, Any] = {}
    for name, tasks in (("suite", IMAGE_TASKS), ("documents", DOCUMENT_TASKS)):
        asked = ask_suite(tasks, per_task, split=split, pixels=PIXELS)
        for setting, questions in (("full", asked), ("wrong", swapped(asked))):
            found = answered(model, processor, questions, [Row("none")], "right", batch)
            (figures.setdefault(name, {})[setting],) = found.values()
    few = ask_suite((*IMAGE_TASKS, *DOCUMENT_TASKS), kept, split=split, pixels=PIXELS)
    rows = [Row(recipe, retain) for recipe, retain in RECIPES]
    same = answered(model, processor, few, rows, "same", batch)
    figures["kept"] = {title: tasks["average"] for title, tasks in same.items()}
    figures["attention"] = attention(model, processor, few[:: max(1, len(few) // 20)])
    figures["plain_text_loss"] = forgetting(model, processor.tokenizer, texts)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-smol", help="name or folder of the adapted model")
    parser.add_argument("--split", default="test", choices=["val", "test"])
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--kept", type=int, default=10, help="questions a task that are asked with recipes")
    parser.add_argument("--batch", type=int, default=8, help="questions at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    model, processor = load(options.model, device=options.device, dtype="bfloat16")
    chosen = {name: getattr(options, name) for name in ("split", "per_task", "kept", "batch")}
    figures = measure(model, processor, **chosen)
    print(json.dumps(figures, indent=2))
    if options.json:
        write(options.json, "training.smol.evaluate", ("transformers",), {**chosen, "dtype": "bfloat16", **figures})


if __name__ == "__main__":
    main()
