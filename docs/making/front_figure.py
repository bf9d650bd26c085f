"""The figure of the README: how much faster a prompt is read at a tenth of the visual tokens, and which answers stay.

python docs/making/front_figure.py docs/gain-and-cost.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from mmaccel.core.files import write_whole
from mmaccel.programs.plots import image_of, load_pyplot, open_axes
from mmaccel.programs.tune.confidence import interval

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: the measured time and the measured answers
SPEED, ANSWERS = "prefill-cpu", "answers-pictures"
_COLOURS = {"divprune": "#0072B2"}


class Bar(NamedTuple):
    """One recipe that keeps 10 % of the visual tokens."""

    recipe: str
    speedup: float  # of the prefill of the language model, selection included
    kept: float  # share of the bare model's answers
    low: float  # of the 95 % interval of kept
    high: float
    questions: int


def bars() -> list[Bar]:
    """The recipes that both files have at 10 %, most answers first."""
    speed, answers = (json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in (SPEED, ANSWERS))
    found = []
    for row in speed["prefill"]:
        kept = answers["rows"][f"{row['recipe']}:{row['retain']:g}"]["kept"]
        low, high = interval(sum(kept), len(kept))
        found.append(Bar(row["recipe"], row["speedup"], sum(kept) / len(kept), low, high, len(kept)))
    return sorted(found, key=lambda bar: -bar.kept)


def draw(path: Path) -> None:
    """Write the figure as PNG."""
    pyplot = load_pyplot("bench")
    shown = bars()[::-1]
    names = [bar.recipe for bar in shown]
    colours = [_COLOURS.get(name, "#999999") for name in names]
    figure, (gain, cost) = pyplot.subplots(1, 2, figsize=(9, 2.7), sharey=True, layout="constrained")
    gain.barh(names, [bar.speedup for bar in shown], color=colours)
    gain.axvline(1, color="black", linewidth=1)
    for place, bar in enumerate(shown):
        gain.text(bar.speedup + 0.1, place, f"{bar.speedup:.1f}x", va="center", fontsize=9)
    open_axes(gain, title="Gain: prefill, times as fast as the full model", xlim=(0, 10))
    cost.barh(
        names,
        [100 * bar.kept for bar in shown],
        color=colours,
        xerr=[[100 * (bar.kept - bar.low) for bar in shown], [100 * (bar.high - bar.kept) for bar in shown]],
        error_kw={"linewidth": 1.2, "capsize": 3},
    )
    for place, bar in enumerate(shown):
        cost.text(2, place, f"{100 * bar.kept:.0f} %", va="center", fontsize=9, color="white")
    open_axes(cost, title="Cost: answers that stay the same, %", xlim=(0, 100))
    write_whole(path, image_of(figure, dpi=110))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
