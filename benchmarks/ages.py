"""Which answers about old and new screens stay right when older pictures keep fewer keys?

Asks ``mini-smol`` in chats of three to six turns (``mmaccel.suite.make_screens``), each with a new screen and a question about
it or about an earlier one. Chats keep their cache: every turn reads what is new, behind the model's own answers. A row is
``NAME[:BUDGET[:OPTION=VALUE]]``, or ``age_pictures:AGE`` for a chat whose old pictures are left out of the messages, which are
then read anew every turn.

The table has right answers by the age of the screen that the question is about, with exact intervals (Clopper and Pearson) at
95 %, and the size of the cache behind the last turn. All rows are asked the same chats. Finished chats are written to
``OUT.journal``; the same command goes on there, and a model with other weights needs another OUT.

    python benchmarks/ages.py --chats 40 --out benchmarks/results/ages.json --update docs/results/screenshots.md
    python benchmarks/ages.py --show --out benchmarks/results/ages.json --update docs/results/screenshots.md  # without a model
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from folding import folded, share
from PIL import Image
from tqdm import tqdm

from mmaccel import age_pictures, load
from mmaccel.accelerate import accelerated
from mmaccel.accelerate.tuned import fingerprint
from mmaccel.cli.shared.options import RecipeOptions
from mmaccel.cli.shared.text import put_between, write_json
from mmaccel.core.transformers_api import cache_argument, cache_of
from mmaccel.errors import MmaccelError
from mmaccel.media.files import Chat, encode
from mmaccel.programs.bench import provenance
from mmaccel.programs.identity import code_identity
from mmaccel.programs.tune.journal import Journal
from mmaccel.recipe import get_recipe
from mmaccel.suite import is_right, make_screens, render_document

SCHEDULE = "[1.0,0.25,0.05,0]"
#: schedules of several policies, plain budgets of the cache and before the language model, and messages without old pictures
ROWS = (
    "none",
    f"keydiff:1.0:age={SCHEDULE}",
    "keydiff:0.5",
    "keydiff:0.25",
    "keydiff:1.0:age=[1.0,0.5,0.25]",
    "keydiff:1.0:age=[1.0,0]",
    f"tova:1.0:age={SCHEDULE}",
    f"snapkv:1.0:age={SCHEDULE}",
    "tova:0.25",
    "divprune:0.5",
    "divprune:0.25",
    "age_pictures:[1.0,0]",
)
MESSAGES = "age_pictures:"
PIXELS, LONGEST = 200, 24
#: columns of the table: ages of the screen in question
AGES = {"newest screen": ("0",), "one before": ("1",), "older": ("2", "3", "4", "5")}

Asked = dict[str, Any]


def talk(model: Any, processor: Any, title: str, session: Sequence[tuple[Any, Any]]) -> list[Asked]:
    """The answers of one chat: for each turn the age of the screen in question, the answer, and whether it is right."""
    shots = [Image.fromarray(render_document(page, PIXELS)) for page, _ in session]
    left_out = title.startswith(MESSAGES)
    recipe = get_recipe("none")
    if not left_out:
        name, _, rest = title.partition(":")
        budget, *settings = rest.split(":")
        recipe = RecipeOptions(name, float(budget) if budget else None, settings).chosen()
    found: list[Asked] = []
    messages: list[dict[str, Any]] = []
    told, cache = torch.empty(1, 0, dtype=torch.int64), {}
    with torch.inference_mode(), accelerated(model, recipe, processor=processor):
        for number, (_, turn) in enumerate(session):
            text = {"type": "text", "text": turn.question}
            messages.append({"role": "user", "content": [{"type": "image"}, text]})
            if left_out:
                read = tuple(age_pictures(messages, json.loads(title.removeprefix(MESSAGES))))
                count = sum(part["type"] == "image" for message in read for part in message["content"])
                inputs = encode(processor, [Chat(read, tuple(shots[number + 1 - count : number + 1]))])
                inputs = dict(inputs.to(model.device, model.dtype))
            else:
                inputs = dict(
                    encode(processor, [Chat((messages[-1],), (shots[number],))]).to(model.device, model.dtype)
                )
                inputs["input_ids"] = torch.cat([told.to(model.device), inputs["input_ids"]], dim=1)
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            out = model.generate(
                **inputs, **cache, max_new_tokens=LONGEST, do_sample=False, return_dict_in_generate=True, pad_token_id=2
            )
            ids = out.sequences[:, inputs["input_ids"].shape[1] :]
            answer = processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip()
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            if not left_out:
                end = "\n" if ids[0, -1] == processor.tokenizer.eos_token_id else f"{processor.tokenizer.eos_token}\n"
                line = processor.tokenizer(end, add_special_tokens=False, return_tensors="pt")["input_ids"]
                told, cache = torch.cat([out.sequences.cpu(), line], dim=1), cache_argument(cache_of(out))
            right, bytes_ = is_right(answer, turn.answer), int(model.mmaccel.stats().kv_bytes)
            found.append({"age": turn.detail, "answer": answer, "right": right, "kv_bytes": bytes_})
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Ask until all is asked or the minutes are over; returns the report."""
    torch.set_num_threads(args.threads)
    model, processor = load(args.model, device=args.device, dtype=args.dtype)
    settings = {
        "model": args.model,
        "fingerprint": fingerprint(model),
        "dtype": args.dtype,
        "split": args.split,
        "machine": provenance.processor(args.device),
        "versions": provenance.versions(),
        "code": code_identity(),
    }
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    journal = Journal(args.out.with_name(f"{args.out.name}.journal"), settings)
    try:
        lines: list[dict[str, Any]] = journal.read_logs(0)
        done = {(line["row"], line["chat"]) for line in lines}
        with tqdm(total=args.chats * len(args.rows), unit="chat", smoothing=0.02) as bar:
            for number in range(args.chats):
                session = make_screens(args.split, number)
                for title in args.rows:
                    if (title, number) not in done and (end is None or time.monotonic() < end):
                        turns = talk(model, processor, title, session)
                        journal.append_logs([{"row": title, "chat": number, "turns": turns}])
                    bar.update()
        return report(args, settings, journal.read_logs(0))
    finally:
        journal.close()


def report(args: argparse.Namespace, settings: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums a row and age, over the chats that all rows have had."""
    chats = {title: {line["chat"]: line["turns"] for line in lines if line["row"] == title} for title in args.rows}
    common = set.intersection(*(set(one) for one in chats.values()))
    rows = {}
    for title, known in chats.items():
        turns = [turn for number in sorted(common) for turn in known[number]]
        by_age = {name: [turn["right"] for turn in turns if turn["age"] in ages] for name, ages in AGES.items()}
        rows[title] = {
            "right": {name: [sum(right), len(right)] for name, right in by_age.items()},
            "kv_bytes": sum(known[number][-1]["kv_bytes"] for number in common) / max(1, len(common)),
        }
    return {
        **settings,
        "chats": len(common),
        "date": provenance.today(),
        "command": provenance.command("python", sys.argv[0]),
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    """The report as Markdown, the row with most right answers first."""
    rows = []
    for title, row in found["rows"].items():
        counts = {"all": [sum(column) for column in zip(*row["right"].values(), strict=True)], **row["right"]}
        shares = [share(right, asked) if asked else "" for right, asked in counts.values()]
        name, _, rest = title.partition(":")
        rows.append(
            (-counts["all"][0], [f"`{name}`", rest.replace(":", " "), *shares, f"{row['kv_bytes'] / 2**20:.1f}"])
        )
    head = ["recipe", "budget, ages", "right answers (95 %)", *AGES, "KV, MiB"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    about = (
        f"`{found['model']}`, {found['chats']} chats of the split `{found['split']}`. `{found['command']}`, {found['date']}, "
        f"{found['dtype']}, {found['machine']}, {versions}."
    )
    return folded([head, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))], about)


def main() -> int:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON; the journal lies beside it")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help="default: those of the table")
    parser.add_argument("--model", default="mini-smol", help="default: mini-smol")
    parser.add_argument("--chats", type=int, default=40, metavar="N", help="of each row (default: 40)")
    parser.add_argument("--split", choices=("test", "val"), default="test", help="val: for choosing (default: test)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so many; the same command goes on")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    parser.add_argument("--show", action="store_true", help="no model: the table from the JSON")
    args = parser.parse_args()
    if args.show:
        found = json.loads(args.out.read_text(encoding="utf-8"))
    else:
        found = run(args)
        write_json(args.out, found)
    text = table(found)
    if args.update:
        put_between(args.update, args.out.stem, text)
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MmaccelError as error:
        sys.exit(str(error))
