"""Draw the loss log of a run: ``python -m training.curves --work DIR --to curves.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

SHOWN = {
    "cell shape": ("#0072B2", "-"),
    "cell character": ("#0072B2", ":"),
    "word description": ("#000000", "--"),
    "first colour": ("#D55E00", "-"),
    "first shape": ("#D55E00", "--"),
    "first count": ("#009E73", "-"),
    "first existence": ("#009E73", "--"),
    "first relation": ("#CC79A7", "-"),
    "first reading": ("#CC79A7", ":"),
    "first grounding": ("#E69F00", "-"),
    "first comparison": ("#E69F00", "--"),
}
CLIPS = {
    "first order": ("#0072B2", "-"),
    "first motion": ("#000000", "--"),
    "first occurrences": ("#D55E00", "-"),
    "first needle": ("#009E73", ":"),
    "first change": ("#CC79A7", "--"),
}
"""Accuracies to draw, about pictures and about clips, with colours and dashes that can be told apart without colour
vision and in grey."""


def draw(log: Path, target: Path) -> None:
    """Loss above, accuracies below, against the pictures seen; a thin line wherever a stage begins."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    panels = [shown for shown in (SHOWN, CLIPS) if any(name in line for line in lines for name in shown)]
    figure, (above, *below) = pyplot.subplots(
        1 + len(panels), 1, sharex=True, figsize=(9, 3 + 5 * len(panels)), height_ratios=(1, *[2] * len(panels))
    )
    above.plot([line["seen"] for line in lines], [line["loss"] for line in lines], color="black")
    above.set(ylabel="loss (moving average)", yscale="log")
    for axis, shown in zip(below, panels, strict=True):
        for name, (colour, dash) in shown.items():
            points = [(line["seen"], line[name]) for line in lines if name in line]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=name)
        axis.set(ylabel="accuracy on fresh " + ("pictures" if shown is SHOWN else "clips"), ylim=(0, 1))
        axis.legend(ncols=3, fontsize=8, loc="lower right")
    for before, line in zip(lines, lines[1:], strict=False):
        if before["stage"] != line["stage"]:
            for axis in (above, *below):
                axis.axvline(line["seen"], color="grey", linewidth=0.6)
            name = {"fontsize": 8, "rotation": 35, "transform": above.get_xaxis_transform()}
            above.text(line["seen"], 1.02, line["stage"], **name)
    below[-1].set(xlabel="pictures and clips seen")
    figure.tight_layout()
    figure.savefig(target, dpi=90)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--to", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args()
    draw(options.work / "log.jsonl", options.to)


if __name__ == "__main__":
    main()
