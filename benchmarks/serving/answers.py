"""Answers of the shipped models in vLLM beside those of ``mmaccel eval``: the same questions of the suite, token for token.

Every question is answered by `mmaccel eval` on transformers, by vLLM as it is, and by vLLM with the plug-in: recipe `none`,
which must answer as vLLM does without it, and recipes, which must answer as `mmaccel eval` does with them. An answer that
differs is shown with the probabilities of the two tokens where it begins to.

    benchmarks/serving/environment.sh serving
    serving/bin/python benchmarks/serving/answers.py --questions 100 --update docs/guides/serving.md

What is found of a kind of question is kept, and not asked again by the same command.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mmaccel
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.errors import MmaccelError
from mmaccel.families.load import load
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.media.files import Prompt
from mmaccel.programs.evaluate import Question, Row, ask_suite, evaluate
from mmaccel.suite import IMAGE_TASKS, VIDEO_TASKS

MODELS = Path(mmaccel.__file__).parent / "models"
#: model and tasks of a comparison, by what is shown
ASKED = {
    "pictures, mini-llava": ("mini-llava", IMAGE_TASKS),
    "pictures, mini-qwen-vl": ("mini-qwen-vl", IMAGE_TASKS),
    "clips, mini-qwen-vl": ("mini-qwen-vl", VIDEO_TASKS),
}
#: beside `none`: one that looks at tokens alone, and one that looks into the tower
RECIPES = (("divprune", 0.25), ("visionzip", 0.25))
FRAMES = 8
LONGEST = 32
STOCK = "vLLM alone"
RESULTS = Path("benchmarks/results/vllm-answers.json")


@dataclass
class Counts:
    """One line of the table.

    against : whose answers are compared with.
    differ : sentences about the answers that do not agree.
    """

    shown: str
    recipe: str
    against: str
    asked: int = 0
    equal: int = 0
    right: int = 0
    differ: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """An answer of vLLM: its tokens without the end, and at each step the probabilities (log, nats) of the likeliest."""

    tokens: list[int]
    likely: list[dict[int, float]]


# --------------------------------------------------------------------------------------------------------------- the sides


def expected(model: str, questions: Sequence[Question]) -> tuple[Any, dict[str, dict[str, tuple[str, bool]]]]:
    """The processor, and by recipe and question the answer of `mmaccel eval` and whether it is right."""
    loaded, processor = load(MODELS / model, device="cpu")
    rows = [Row("none"), *(Row(name, retain) for name, retain in RECIPES)]
    found: dict[str, dict[str, tuple[str, bool]]] = {row.title: {} for row in rows}
    for row, answers in evaluate(loaded, processor, questions, rows, max_new_tokens=LONGEST):
        found[row.title] |= {answer.name: (answer.answer, bool(answer.right)) for answer in answers}
    return processor, found


def request(processor: Any, prompt: Prompt) -> dict[str, Any]:
    """A question as vLLM takes it."""
    media: dict[str, Any] = {"image": list(prompt.pictures)} if prompt.pictures else {}
    if prompt.clip is not None:
        media["video"] = [(prompt.clip.frames, {**prompt.clip.metadata(), "do_sample_frames": False})]
    text = processor.apply_chat_template(list(prompt.chat().messages), tokenize=False, add_generation_prompt=True)
    return {"prompt": text, "multi_modal_data": media}


@contextmanager
def as_published(model: str) -> Iterator[Path]:
    """The shipped model with the names of weights that checkpoints on the hub have, which are all that vLLM knows."""
    from safetensors.torch import load_file, save_file

    architecture = json.loads((MODELS / model / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    rename = ARCHITECTURES[architecture].rename
    if rename is None:
        yield MODELS / model
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(shutil.copytree(MODELS / model, Path(folder) / model))
        for file in place.glob("*.safetensors"):
            save_file({rename(name): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
        yield place


@contextmanager
def engine(place: Path, overrides: dict[str, Any] | None) -> Iterator[Any]:
    """vLLM in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(place),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        disable_log_stats=True,
        hf_overrides={"mmaccel": overrides} if overrides else {},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def served(place: Path, overrides: dict[str, Any] | None, requests: list[dict[str, Any]], end: int) -> list[Written]:
    """vLLM's answers, asked at once."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=LONGEST, logprobs=2)
    with engine(place, overrides) as llm:
        made = [one.outputs[0] for one in llm.generate(requests, greedy, use_tqdm=False)]
    return [
        Written(
            [token for token in one.token_ids if token != end],
            [{token: likely.logprob for token, likely in step.items()} for step in one.logprobs],
        )
        for one in made
    ]


# ------------------------------------------------------------------------------------------------------------ the comparison


def compare(shown: str, questions: int) -> list[Counts]:
    """All lines about one model and kind of medium, with at least so many ``questions``."""
    model, tasks = ASKED[shown]
    asked = ask_suite(tasks, -(-questions // len(tasks)), frames=FRAMES)
    processor, wanted = expected(model, asked)
    requests = [request(processor, question.load()) for question in asked]
    tokenizer = processor.tokenizer
    with as_published(model) as place:
        stock = served(place, None, requests, tokenizer.eos_token_id)
    plain = served(MODELS / model, {"recipe": "none"}, requests, tokenizer.eos_token_id)
    lines = [Counts(shown, "none", STOCK, len(asked))]
    for question, mine, theirs in zip(asked, plain, stock, strict=True):
        # bit for bit: the same tokens with the same probabilities
        _count(lines[0], question, mine == theirs, mine, theirs.tokens, tokenizer)
    for title, (name, retain) in zip(wanted, (("none", None), *RECIPES), strict=True):
        # text behind a clip stands elsewhere in vLLM, unless this is asked for
        overrides = {"recipe": name, "numbering": "transformers", **({"retain": retain} if retain else {})}
        line = Counts(shown, title, "`mmaccel eval`", len(asked))
        answers = served(MODELS / model, overrides, requests, tokenizer.eos_token_id)
        for question, mine in zip(asked, answers, strict=True):
            text, right = wanted[title][question.name]
            line.right += right
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            _count(line, question, mine.tokens == tokens, mine, tokens, tokenizer)
        lines.append(line)
    return lines


def _count(line: Counts, question: Question, same: bool, mine: Written, tokens: list[int], tokenizer: Any) -> None:
    if same:
        line.equal += 1
        return
    at = next((i for i, (a, b) in enumerate(zip(mine.tokens, tokens, strict=False)) if a != b), None)
    if at is None:
        why = "one answer is longer" if mine.tokens != tokens else "only the probabilities differ"
    else:
        step = mine.likely[at]
        gap = step[mine.tokens[at]] - step.get(tokens[at], -float("inf"))
        why = f"at token {at + 1} vLLM's is likelier by {gap:.2g} nats"
    ours, theirs = (tokenizer.decode(one) for one in (mine.tokens, tokens))
    line.differ.append(f"{line.shown}, {line.recipe}, {question.name}: {ours!r} for {theirs!r}; {why}.")


def report(lines: Sequence[Counts], command: str) -> str:
    """The table, what differs, and where it comes from."""
    table = [["questions about", "recipe", "compared with", "questions", "equal, token for token"]]
    table += [[one.shown, one.recipe, one.against, str(one.asked), str(one.equal)] for one in lines]
    differ = [f"- {sentence}" for one in lines for sentence in one.differ]
    names = ("vllm", "torch", "transformers", "mmaccel")
    about = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    parts = [markdown(table), *(["\n".join(differ)] if differ else []), f"`{command}`, float32, CPU, {about}."]
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Compare, print, and write where it is asked for; exit status 1 where vLLM with recipe `none` is not vLLM, or fewer than
    99 of 100 answers equal those of `mmaccel eval`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100, help="at least, of every kind (default: 100)")
    parser.add_argument("--only", choices=ASKED, help="one kind of question (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="what is found (default: %(default)s)")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown page whose table is made anew")
    options = parser.parse_args(argv)
    alone()
    for shown in [options.only] if options.only else ASKED:
        if any(line.shown == shown and line.asked >= options.questions for line in kept(options.out)):
            continue
        made = compare(shown, options.questions)
        # others may have been found meanwhile
        found = [line for line in kept(options.out) if line.shown != shown] + made
        options.out.write_text(json.dumps([asdict(line) for line in found], indent=1) + "\n", encoding="utf-8")
    lines = sorted(kept(options.out), key=lambda line: list(ASKED).index(line.shown))
    text = report(lines, " ".join(["python", "benchmarks/serving/answers.py", *(argv or sys.argv[1:])]))
    print(text)
    if options.update is not None:
        put_between(options.update, "answers", text)
    return int(not all(agrees(line) for line in lines))


def agrees(line: Counts) -> bool:
    """Whether as many answers are equal as must be."""
    return line.equal == line.asked if line.against == STOCK else line.equal >= 0.99 * line.asked


def kept(file: Path) -> list[Counts]:
    """What was found before."""
    return [Counts(**line) for line in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def alone() -> None:
    """One process and one small engine; what the caller has set stays."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MmaccelError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
