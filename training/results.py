"""Figures with their origin, and the tables of the documentation that are made from them.

``python -m training.results`` writes every table between markers ``<!-- NAME -->`` and ``<!-- /NAME -->`` anew from
``benchmarks/results``. ``NAME`` is that of a results file without its suffix, or ``shipped`` for an overview of the models.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.folding import fold, folded
from mmaccel.cli.shared.bench_report import cases, line, losses
from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import nbytes, seconds
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.paper_claims import claims_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "docs" / "results" / "index.md", ROOT / "training" / "README.md", ROOT / "benchmarks" / "README.md")
MODELS = ("mini-llava", "mini-llava-deep", "mini-qwen-vl", "mini-clip")
_BLOCK = re.compile(r"(<!-- ((?:mini|prefill|bench|video-qa)-[\w-]+|shipped) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def write(path: Path, module: str, packages: tuple[str, ...], figures: dict[str, Any]) -> None:
    """Write figures as JSON, behind the command that made them, the date, the versions and the machine.

    Of absolute paths in the command only the name is kept, since folders of one machine mean nothing elsewhere.
    """
    known = {
        "command": provenance.command("python", "-m", module),
        "date": provenance.today(),
        "versions": provenance.versions(("torch", *packages)),
        "machine": f"{provenance.processor()}, CPU, threads: {torch.get_num_threads()}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | figures, indent=2) + "\n", encoding="utf-8")


def _origin(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"`{record['command']}`, {record['date']}, {record['machine']}, {versions}."


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def accuracy_table(record: dict[str, Any], log: Path) -> str:
    """Accuracy per task in every setting, the averages, what half of the tokens keep, and what the training took."""
    accuracy, averages = record["accuracy_percent"], record["average_percent"]
    rows = [["task", *accuracy]]
    rows += [[task, *(f"{found[task]:.1f}" for found in accuracy.values())] for task in accuracy["full"]]
    rows += [
        [f"**{kind} average**", *(f"**{value:.1f}**" for value in found.values())] for kind, found in averages.items()
    ]
    kept = [f"{100 * found['half'] / found['full']:.1f}% ({kind})" for kind, found in averages.items() if found["full"]]
    notes = [
        f"{record['parameters'] / 1e6:.2f} million parameters; {record['items_per_task']} questions a task of the "
        f"{record['split']} split. `half` keeps {' and '.join(kept) or 'nothing'} of the accuracy of `full`."
    ]
    if attention := record.get("cls_attention_percent"):
        *layers, (_, covered) = attention.items()
        notes.append(
            f"CLS of the feature layer pays {layers[-2][1]:.1f}% of its attention to things and signs, which cover "
            f"{covered:.1f}% of the cells."
        )
    if log.exists():
        notes.append(training_notes(log))
    return "\n".join([_table(rows), "", *notes, _origin(record)])


def smol_table(record: dict[str, Any], log: Path) -> str:
    """What ``mini-smol`` answers about the right and a wrong picture, what it kept of the bare language model, and what recipes
    keep of its answers."""

    def share(found: dict[str, Any]) -> str:
        low, high = found["interval"]
        return f"{found['percent']:.0f} ({low:.0f} to {high:.0f})"

    rows = [["task", "right, %", "with a wrong picture, %"]]
    for kind in ("suite", "documents"):
        full, wrong = record[kind]["full"], record[kind]["wrong"]
        tasks = [task for task in full if task != "average"]
        rows += [[task, share(full[task]), share(wrong[task])] for task in tasks]
        rows.append([f"**{kind}**", *(f"**{share(found['average'])}**" for found in (full, wrong))])
    kept = [["recipe", "answers kept, %"], *([f"`{name}`", share(found)] for name, found in record["kept"].items())]
    losses = [
        f"{kind} {found['bare']:.3f} before, {found['trained']:.3f} after ({found['trained'] / found['bare'] - 1:+.1%})"
        for kind, found in record["plain_text_loss"].items()
    ]
    first, visual = record["attention"]["first token"], record["attention"]["visual tokens"]
    layers = ", ".join(f"{n}: {first[n]:.2f} and {visual[n]:.2f}" for n in range(0, len(first), 4))
    notes = [
        f"{record['per_task']} questions a task of the {record['split']} split, in {record['dtype']}.",
        f"Loss of the next token of plain text: {', '.join(losses)}.",
        f"Attention of the last token on the first and on all visual tokens, by layer: {layers}.",
    ]
    if log.exists():
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        ends = {line["stage"]: line for line in lines}
        took = [f"`{name}` {end['seen']} in {end['seconds'] / 60:.0f} minutes" for name, end in ends.items()]
        notes.append(f"Pictures and time of the stages: {', '.join(took)}.")
    return "\n".join([_table(rows), "", _table(kept), "", *notes, _origin(record)])


def training_notes(log: Path) -> str:
    """What a training took, from its log of one JSON object a line."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ends = {line["stage"]: line["seen"] for line in lines}  # the last one of each stage
    stages = ", ".join(f"`{stage}` {seen}" for stage, seen in ends.items())
    last = lines[-1]
    return (
        f"Trained for {last['seconds'] / 3600:.2f} hours: {last['seen']} pictures in {last['step']} steps. "
        f"Pictures seen at the end of each stage: {stages}."
    )


def clip_table(record: dict[str, Any]) -> str:
    """What ``mini-clip`` finds."""
    rows = [["held-out scenes", "%"]]
    rows += [[name, f"{value:.1f}"] for name, value in record["quality_percent"].items()]
    notes = (
        f"{record['parameters'] / 1e6:.2f} million parameters; {record['steps']} steps in "
        f"{record['training_seconds'] / 60:.1f} minutes on {record['pictures']} pictures."
    )
    return "\n".join([_table(rows), "", notes, _origin(record)])


def recipes_table(record: dict[str, Any]) -> str:
    """A line for every recipe that was compared: accuracy, KL and bytes of the cache at each budget, best first."""
    budgets = list(dict.fromkeys(row["retain"] for row in record["rows"] if row["retain"] is not None))
    measured: dict[str, dict[float | None, dict[str, float]]] = {}
    for row in record["rows"]:
        measured.setdefault(row["recipe"]["name"], {})[row["retain"]] = row["figures"]
    heads = (f"{what} at {budget:.0%}" for budget in budgets for what in ("accuracy", "KL", "per layer", "KV"))
    rows = [["recipe", *heads]]
    for name, found in measured.items():
        line = [f"`{name}`"]
        for budget in budgets:
            figures = found.get(budget) or found[None]  # one without a budget is the same at all
            shares = (figures["visual_share_per_layer"], figures["kv_share"])
            line += [f"{figures['accuracy']:.1%}", f"{figures['kl']:.3f}", *(f"{share:.0%}" for share in shares)]
        rows.append(line)
    rows[1:] = sorted(rows[1:], key=lambda line: -float(line[1].rstrip("%")))
    versions = record["settings"]["versions"]
    origin = f"`{record['command']}`, {record['date']}, {record['machine']}"
    about = f"{record['questions']} questions. {origin}, torch {versions['torch']}, transformers {versions['transformers']}."
    return folded(rows, about)


def prefill_table(record: dict[str, Any]) -> str:
    """What recipes save at prefill."""
    head = ["recipe", "tokens", "bare", "accelerated", "of it selection", "speed-up", "FLOPs", "realised"]
    rows = [[*head, "without selection"]]
    for row in record["prefill"]:
        rows.append(
            [
                f"`{row['recipe']}`",
                f"{row['visual_tokens']} -> {row['kept']}",
                f"{row['bare_s']:.2f} s",
                f"{row['accelerated_s']:.2f} s",
                f"{1000 * row['selection_s']:.0f} ms",
                f"{row['speedup']:.1f}x",
                f"{row['speedup_flops']:.1f}x",
                f"{row['realised']:.2f}",
                f"{row['realised_without_selection']:.2f}",
            ]
        )
    kept = [
        f"{what} {found['ratio_median']:.3f} ({found['ratio_min']:.3f} to {found['ratio_max']:.3f})"
        for what, found in record["overhead_of_none"].items()
    ]
    none = f"Recipe `none` against the bare model (median of paired runs, and their range): {', '.join(kept)}."
    return "\n".join([_table(rows), "", f"{none} Made by `{record['command']}`, {record['date']}."])


def video_qa_table(record: dict[str, Any]) -> str:
    """What ``mmaccel video-qa`` said about the same questions with several recipes."""
    rows = [["recipe", "accuracy", "visual tokens", "KV cache", "wall time", "model at work", "waiting for frames"]]
    for run in record["runs"]:
        kept = f"{run['visual_tokens_kept']:.0f} of {run['visual_tokens']:.0f}"
        shares = (percent(run[key]) for key in ("model_share", "waiting_share"))
        cost = (nbytes(run["kv_bytes"]), seconds(run["wall_seconds"]), *shares)
        rows.append([f"`{run['recipe']}`", percent(run["accuracy"]), kept, *cost])
    words = f"{record['clips']} clips of {record['frames']} frames, a question each; the full model first and last."
    return "\n".join([_table(rows), "", words, _origin({**record, "machine": f"{record['machine']}, CPU"})])


def bench_table(record: dict[str, Any]) -> str:
    """What ``mmaccel bench`` measured, a table for every load with what operations promise in brackets, the earliest first
    token first, and what got slower, in words."""
    head = ["recipe", "tokens", "first token", "x (promised)", "tokens/s", "x (promised)", "requests/s", "x (promised)"]
    head += ["peak", "KV", "FLOPs saved"]
    parts, words = [], []
    for title, found in cases(record):
        rows = [line(row) for row in sorted(found, key=_first_token) if row["problem"] is None]
        parts += [f"{title}:", _table([head, *map(_promised_in_brackets, rows)])]
        words += [f"- {row['recipe']}: {row['problem']}" for row in found if row["problem"] is not None]
        words += [f"- {title}: {sentence}" for row in found for sentence in losses(row)]
    known = {**record, "machine": f"{record['machine']['processor']}, {record['machine']['threads']} threads"}
    about = "\n".join([*dict.fromkeys(words), "", _origin(known)])
    return "\n\n".join([*parts, fold("What got slower; command, machine and versions", about)])


def _first_token(row: dict[str, Any]) -> float:
    """The bare model comes before all."""
    return 0.0 if row["name"] == "bare" or row["problem"] else row["figures"]["ttft_s"]["median"]


def _promised_in_brackets(cells: list[str]) -> list[str]:
    """The cells of ``HEAD`` with one instead of two or three for every ratio."""
    found = dict(enumerate(cells))
    for at, width in ((3, 3), (7, 2), (10, 2)):
        if found[at] != "-":
            found[at] += f" ({found[at + 1]})"
        for dropped in range(at + 1, at + width):
            del found[dropped]
    return list(found.values())


def shipped_table() -> str:
    """One line for every measured model."""
    rows = [["model", "parameters", "task set", "every token", "half of the tokens", "blank picture"]]
    for name in MODELS:
        path = RESULTS / f"{name}-quality.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for kind, found in record.get("average_percent", {}).items():
            size, values = f"{record['parameters'] / 1e6:.1f} M", (found[key] for key in ("full", "half", "blank"))
            rows.append([f"`{name}`", size, kind, *(f"{value:.1f}%" for value in values)])
    return _table(rows)


def block(name: str) -> str:
    """The text between the markers of this name."""
    if name == "shipped":
        return shipped_table()
    if name == "bench-claims":
        found = sorted(RESULTS.glob("bench-*.json"))
        return _table(claims_table([json.loads(file.read_text(encoding="utf-8")) for file in found]))
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    record = json.loads(path.read_text(encoding="utf-8"))
    if name.startswith("prefill"):
        return prefill_table(record)
    if name.startswith("bench"):
        return bench_table(record)
    if name.startswith("video-qa"):
        return video_qa_table(record)
    if "rows" in record:
        return recipes_table(record)
    if "quality_percent" in record:
        return clip_table(record)
    if "documents" in record:
        return smol_table(record, RESULTS / f"{name.removesuffix('-quality')}-training.jsonl")
    return accuracy_table(record, RESULTS / f"{name.removesuffix('-quality')}-training.jsonl")


def renewed(text: str) -> str:
    """A page with every table between markers made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}\n{found[3]}", text)


def main() -> None:
    """Command line."""
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
