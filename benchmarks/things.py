"""Do methods keep the things of a picture, or what is between them?

On generated pictures it is known which cells a thing or a sign covers. This counts, of the cells that a recipe keeps at 25 %,
how many are covered, and of the covered cells and of those between them how many are kept; a method that keeps nothing
but things must drop questions about places and emptiness, one that keeps fewer of them than chance looks elsewhere. For a
method inside the language model the tokens are those left behind its layer, for a question about every picture.

    python benchmarks/things.py --out benchmarks/results/things-cpu.json --update docs/results/recipes.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmaccel import accelerated
from mmaccel.cli.ask import shipped
from mmaccel.cli.shared.measure import percent
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.bench import provenance
from mmaccel.suite import cell_labels, make_item

RECIPES = ("random", "uniform", "divprune", "visionzip", "vtc-cls", "attention-received", "fastv")
RETAIN = 0.25


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=40, help="default: 40")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    args = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(shipped()).eval()
    processor = AutoProcessor.from_pretrained(shipped())
    vision = model.config.vision_config
    side, grid = vision.image_size, vision.image_size // vision.patch_size
    items = [make_item("colour", "test", 600_000 + number) for number in range(args.pictures)]
    covered = torch.stack([torch.from_numpy(cell_labels(item.scenes[0], grid).shape > 0).flatten() for item in items])
    prompts = [Prompt(item.turns[-1].question, (Image.fromarray(item.pictures(side)[0]),), None, ()) for item in items]
    rows = [row(model, processor, prompts, covered, name) for name in RECIPES]
    report = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()})",
        "versions": provenance.versions(),
        "pictures": args.pictures,
        "covered": covered.float().mean().item(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text := table(report))
    if args.update:
        put_between(args.update, args.out.stem, text)
    return 0


def row(model: Any, processor: Any, prompts: list[Prompt], covered: torch.Tensor, name: str) -> dict[str, Any]:
    """Shares of cells, means over all pictures together."""
    with accelerated(model, name, retain=RETAIN, processor=processor):
        model(**encode(processor, prompts))
        layout, reduction = model.mmaccel.layout, model.mmaccel.reduction
    kept = torch.stack([reduction.kept[number, part.places] for number, part in enumerate(layout.segments)])
    things, between = kept[covered].float().mean().item(), kept[~covered].float().mean().item()
    return {"recipe": name, "things": things, "between": between, "of_kept": covered[kept].float().mean().item()}


def table(report: dict[str, Any]) -> str:
    rows = [["recipe", "of what is kept, on things", "of things, kept", "of what is between them, kept"]]
    for found in report["rows"]:
        rows.append([f"`{found['recipe']}`", *(percent(found[name]) for name in ("of_kept", "things", "between"))])
    used = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"{markdown(rows)}\n\n{report['pictures']} pictures for `mini-llava`; things and signs cover "
        f"{percent(report['covered'])} of the cells. `{report['command']}`, {report['date']}, {report['machine']}, {used}."
    )


if __name__ == "__main__":
    sys.exit(main())
