"""The result of a training as data, picture and text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.files import write_whole
from .. import plots
from ..tune.confidence import SHOWN, interval
from ..tune.evaluate import Measurement

REPORT, PICTURE = "report.json", "report.png"


@dataclass(frozen=True)
class Distilled:
    """The result of a training.

    folder : of the selector. parameters : their number and, as a ``share``, of the model's.
    signal : the number of the learned signal, with ``attention`` that of the layer.
    log : a line every evaluation of the watched questions.
    held_out : the selector, ``balanced`` and ``divprune`` on held-out questions, by budget.
    """

    folder: Path
    parameters: int
    share: float
    signal: int
    log: tuple[Mapping[str, Any], ...]
    held_out: Mapping[str, Mapping[float, Measurement]]
    report: Mapping[str, Any]


def figures(held_out: Mapping[str, Mapping[float, Measurement]]) -> list[dict[str, Any]]:
    """A line for every recipe and budget: questions, kept answers with their interval, and KL."""
    return [
        {
            "recipe": name,
            "retain": budget,
            "asked": len(measured.kept),
            "kept": measured.agreement,
            f"kept, {SHOWN:.0%} interval": interval(sum(measured.kept), len(measured.kept)),
            "kl": measured.divergence,
        }
        for name, budgets in held_out.items()
        for budget, measured in budgets.items()
    ]


def rows(result: Distilled) -> list[list[str]]:
    """The held-out figures as a table, the head first."""
    body = []
    for line in figures(result.held_out):
        low, high = line[f"kept, {SHOWN:.0%} interval"]
        within = f"{100 * low:.1f} to {100 * high:.1f}"
        body.append(
            [line["recipe"], f"{100 * line['retain']:g} %", f"{100 * line['kept']:.1f} %", within, f"{line['kl']:.4f}"]
        )
    return [["recipe", "tokens", "answers kept", f"{SHOWN:.0%} interval", "KL"], *body]


def verdict(result: Distilled) -> str:
    """The result in a sentence."""
    asked = len(next(iter(result.held_out["learned"].values())).kept)
    return (
        f"A selector of {result.parameters:,} parameters ({100 * result.share:.2g} % of the model's); the table shows how many "
        f"of {asked} held-out answers it keeps."
    )


def write(result: Distilled) -> None:
    """The report and the picture, in the selector's folder. Raises MmaccelError if matplotlib is missing."""
    write_whole(result.folder / REPORT, json.dumps(result.report, indent=1).encode() + b"\n")
    write_whole(result.folder / PICTURE, draw(result))


def draw(result: Distilled) -> bytes:
    """The curves of the training, as a PNG: the loss of the steps, and KL and answers kept on the watched questions."""
    figure, panels = plots.load_pyplot("bench").subplots(1, 3, figsize=(10.5, 3.2), layout="constrained")
    curves = {
        "loss": ("loss", "watched"),
        "KL, watched questions": ("kl",),
        "answers kept, watched questions": ("kept",),
    }
    for axes, (title, names) in zip(panels, curves.items(), strict=True):
        for name in names:
            lines = [line for line in result.log if line[name] is not None]
            axes.plot([line["step"] for line in lines], [line[name] for line in lines], label=name)
        plots.open_axes(axes, xlabel="step")
        axes.set_title(title, fontsize=9)
    panels[0].legend(("training", "watched"), frameon=False, fontsize=8)
    return plots.image_of(figure, dpi=120)
