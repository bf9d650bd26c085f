"""The result of a search as data, picture and HTML page."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...accelerate.tuned import fingerprint
from ...core.files import write_whole
from ...recipe import Recipe
from .. import plots
from ..bench import provenance
from ..resume import shown
from .confidence import SHOWN, interval
from .evaluate import GOALS, Measurement

if TYPE_CHECKING:
    from .search import Candidate, Search, Tuned

#: fields of a recipe that change its effect
_TYPED = ("stages", "positions", "variant", "text_retain", "anchor", "proportional", "chunk", "frames_at_once")
#: pairs that a rank correlation needs
_FEWEST_PAIRS = 8


def figures(
    search: Search,
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    held_out: Measurement | None,
    generated: Mapping[str, Any] | None,
    confidence: float | None,
) -> dict[str, Any]:
    """The report as plain data; ``recipe`` is stored in the file of the recipe."""
    recipe: dict[str, Any] = {}
    if chosen is not None and held_out is not None and generated is not None:
        recipe = {
            "model": fingerprint(search.evaluator.model),
            "goal": search.goal,
            "keep": search.keep,
            "confidence": confidence,
            "share": chosen.measured.share(search.goal),
            "kept": chosen.measured.agreement,
            "asked": len(chosen.measured.kept),
            "held out": summary(held_out),
            "held out keeps enough": min(held_out.agreement, generated["loyalty"]) >= search.keep,
            "held out, generated": {name: generated[name] for name in ("questions", "loyalty", "accuracy", "kl")},
            "date": provenance.today(),
            "versions": search.settings["versions"],
        }
    return {
        "goal": search.goal,
        "keep": search.keep,
        "settings": shown(search.settings),
        "recipe": recipe,
        "python": None if chosen is None else python(chosen.recipe),
        "tried": len(candidates),
        "tried by earlier runs": search.taken_over,
        "asked all": sum(one.asked_all for one in candidates),
        "left out": dict(search.space.left_out),
        "proxies": proxies(search),
        "passes of the vision tower": [one.memory.passes for one in search.evaluator.answered(0)],
    }


def summary(measured: Measurement) -> dict[str, Any]:
    """A measurement as plain data, with the interval of the kept answers."""
    kept, asked = sum(measured.kept), len(measured.kept)
    return {
        "asked": asked,
        "kept": kept / asked,
        f"kept, {SHOWN:.0%} interval": interval(kept, asked),
        "kl": measured.divergence,
        **{goal: measured.share(goal) for goal in GOALS},
    }


def proxies(search: Search) -> dict[str, Any]:
    """Spearman's rank correlation of measures on the first rung (drift, KL, risk, kept answers) with the share of answers kept
    on later ones, over the recipes that reached them."""
    pairs = [(rungs[0], sum(rungs[1:], Measurement())) for rungs in search.known.values() if len(rungs) > 1]
    later = [-after.agreement for _, after in pairs]
    correlations: dict[str, Any] = {"recipes": len(pairs)}
    if len(pairs) >= _FEWEST_PAIRS:
        first = [before for before, _ in pairs]
        correlations["drift"] = spearman([one.drifted for one in first], later)
        correlations["KL"] = spearman([one.divergence for one in first], later)
        correlations["risk"] = spearman([one.risk for one in first], later)
        correlations["kept"] = spearman([-one.agreement for one in first], later)
    return correlations


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The rank correlation; None if one side is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> Any:
    """Ranks; equal values share the mean of theirs."""
    _, group, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - count / 2)[group]


# --------------------------------------------------------------------------------------------------------- for readers


def percent(share: float) -> str:
    """``0.256`` -> ``25.6 %``."""
    return f"{100 * share:.1f} %"


def describe(recipe: Recipe) -> str:
    """A recipe on one line: its stages with budgets and options, and its settings."""
    return "; ".join([*map(str, recipe.stages), *recipe.settings]) or "none"


def python(recipe: Recipe) -> str:
    """A line of Python that makes an equal recipe."""
    return repr(Recipe(recipe.name, **{name: getattr(recipe, name) for name in _TYPED}))


def command_line(recipe: Recipe, model: str | None = None) -> str:
    """A command that measures an equal recipe on a ``model``, as a shell reads it; nothing else is needed for it."""
    whole = {
        name: value
        for name, value in json.loads(recipe.to_json()).items()
        if name in ("name", "stages") or (name in _TYPED and value != getattr(Recipe, name))
    }
    return shlex.join(["mmaccel", "eval", *(["--model", model] if model else []), "--recipe", json.dumps(whole)])


def verdict(tuned: Tuned, model: str | None = None) -> str:
    """The result in a few sentences; the last lines make the recipe in Python, and on the command line with a ``model``."""
    what = GOALS[tuned.goal]
    if tuned.chosen is None or tuned.held_out is None or tuned.generated is None:
        return (
            f"No recipe that was tried keeps {percent(tuned.keep)} of the answers and saves anything of {tuned.goal} ({what}); "
            "the front shows what there is."
        )
    held, asked = tuned.held_out, len(tuned.held_out.kept)
    low, high = interval(sum(held.kept), asked)
    share = tuned.chosen.measured.share(tuned.goal)
    lines = [
        f"{describe(tuned.chosen.recipe)}: {percent(share)} of {tuned.goal} ({what}), and {percent(held.agreement)} of {asked} "
        f"held-out answers kept ({SHOWN:.0%} interval {percent(low)} to {percent(high)}; written token by token "
        f"{percent(tuned.generated)})."
    ]
    if not tuned.report["recipe"]["held out keeps enough"]:
        least = min(held.agreement, tuned.generated)
        lines.append(
            f"WARNING: {percent(tuned.keep)} of the answers were to be kept, and of the held-out ones {percent(least)} are; "
            "give more samples, or a higher --keep."
        )
    lines += [
        f"in Python: from mmaccel import Recipe, Stage, accelerate_vlm; accelerate_vlm(model, {tuned.report['python']})",
        f"on the command line: {command_line(tuned.chosen.recipe, model)}",
    ]
    return "\n".join(lines)


def rows(tuned: Tuned) -> list[list[str]]:
    """The front as a table, the head first; the chosen recipe has a star."""
    head = ["", "recipe", *GOALS, "kept", "KL"]
    body = []
    shown = [*tuned.front, *([tuned.chosen] if tuned.chosen is not None and tuned.chosen not in tuned.front else [])]
    for one in sorted(shown, key=lambda c: c.measured.share(tuned.goal)):
        shares = [percent(one.measured.share(goal)) for goal in GOALS]
        star = "*" if one is tuned.chosen else ""
        kept = percent(one.measured.agreement)
        body.append([star, describe(one.recipe), *shares, kept, f"{one.measured.divergence:.4f}"])
    return [head, *body]


def write(tuned: Tuned, out: Path) -> None:
    """The picture and the page beside the recipe's file. Raises MmaccelError if matplotlib is missing."""
    picture = draw(tuned)
    write_whole(out.with_suffix(".png"), picture)
    write_whole(out.with_suffix(".html"), page(tuned, picture, out.stem).encode())


def draw(tuned: Tuned) -> bytes:
    """A PNG with all recipes that were asked all questions, the front, and the chosen one, also on held-out questions."""
    figure, axes = plots.load_pyplot("tune").subplots(figsize=(7.6, 4.4), layout="constrained")

    def points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        measured = [one.measured for one in candidates]
        return [100 * one.share(tuned.goal) for one in measured], [100 * one.agreement for one in measured]

    axes.scatter(*points([one for one in tuned.candidates if one.asked_all]), s=14, color="#999999", label="tried")
    axes.plot(*points(tuned.front), color="#0072B2", marker="o", markersize=5, label="front")
    if tuned.chosen is not None and tuned.held_out is not None:
        axes.scatter(*points([tuned.chosen]), s=160, marker="*", color="#D55E00", zorder=3, label="chosen")
        kept, asked = sum(tuned.held_out.kept), len(tuned.held_out.kept)
        low, high = interval(kept, asked)
        middle = kept / asked
        look = {"fmt": "s", "markersize": 4, "capsize": 4, "color": "#D55E00", "label": "chosen, held-out questions"}
        spread = [[100 * (middle - low)], [100 * (high - middle)]]
        axes.errorbar([100 * tuned.held_out.share(tuned.goal)], [100 * middle], yerr=spread, **look)
    axes.axhline(100 * tuned.keep, color="black", linewidth=1, linestyle=":", label="to be kept")
    plots.open_axes(axes, xlabel=f"{tuned.goal}: {GOALS[tuned.goal]}, % of the bare model's", ylabel="answers kept, %")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return plots.image_of(figure, dpi=160)


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid #ddd}"
    "img{max-width:100%}"
)


def page(tuned: Tuned, picture: bytes, name: str) -> str:
    """The report as one HTML file."""
    head, *body = rows(tuned)
    report = tuned.report
    correlations = {key: value for key, value in report["proxies"].items() if key != "recipes" and value is not None}
    ranks = ", ".join(f"{key} {value:.2f}" for key, value in correlations.items())
    parts = [
        f"<h1>{escape(name)}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in verdict(tuned).splitlines()),
        f'<img alt="answers kept over what is spent" src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
        f"<h2>Front</h2>{_table(head, body)}",
        f"<h2>Search</h2><p>{report['tried']} recipes, {report['asked all']} of them asked all questions of the search.</p>",
        (
            f"<p>Rank correlation of the first questions with answers kept later, over {report['proxies']['recipes']} recipes: "
            f"{escape(ranks)}.</p>"
            if ranks
            else ""
        ),
        f"<h2>Left out</h2>{_table(['recipe', 'why'], [list(pair) for pair in report['left out'].items()])}",
        f"<h2>Settings</h2>{_table(['', ''], [[key, str(value)] for key, value in report['settings'].items()])}",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
        f"{''.join(parts)}</html>\n"
    )


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in body) + "</table>"
