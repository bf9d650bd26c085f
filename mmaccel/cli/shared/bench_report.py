"""Tables and plots of ``mmaccel bench``, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.figures import drafting_line
from ...errors import MmaccelError
from ...programs import plots
from ...programs.bench.figures import Spread, changed
from ...programs.bench.paper_claims import CLAIMS, claims_table, measured
from .text import nbytes, seconds, table

Row = Mapping[str, Any]
#: parts of the time to first token with a colour and a hatch each: Okabe and Ito's colours, and apart in grey
_BARS = {
    "decoding": ("#56B4E9", ".."),
    "preparation": ("#F0E442", ""),
    "vision": ("#009E73", "//"),
    "selection": ("#D55E00", "xx"),
    "prefill": ("#0072B2", ""),
    "rest": ("#BBBBBB", "--"),
}
#: ratios in which a lower figure is a regression, and how they are called
_WATCHED = {"ttft": "first token", "decode": "decoding", "requests": "requests"}


def cases(report: Mapping[str, Any]) -> Iterable[tuple[str, list[Row]]]:
    """The rows of every case, the bare model's first."""
    groups: dict[str, list[Row]] = {}
    for row in report["rows"]:
        groups.setdefault(_case(row), []).append(row)
    return groups.items()


def _case(row: Row) -> str:
    load = f"{row['batch']} clients" if row["closed_loop"] else f"batch {row['batch']}"
    return f"{row['workload']}, {load}, answer of {row['answer']}"


# --- tables -----------------------------------------------------------------------------------------------------------
def render(report: Mapping[str, Any]) -> str:
    """The whole report as text."""
    model, machine = report["model"], report["machine"]
    lines = [
        f"{model['name']}, {model['parameters'] / 1e6:,.1f} million parameters, {model['dtype']}, {model['attention']} on "
        f"{machine['processor']}; {report['repeats']} repeats, medians ± their spread"
        + ("; random weights" if model["shape"] else "")
    ]
    for title, rows in cases(report):
        lines += ["", title, ""]
        body = [line(row) for row in rows if row["problem"] is None]
        if body:
            lines.append(table([HEAD, *body], numbers=range(1, len(HEAD))))
            lines += ["", *(split for row in rows if (split := parts(row)))]
            lines += [f"{row['recipe']}: {drafting_line(sums)}" for row in rows if (sums := row.get("drafting"))]
        lines += [f"{row['recipe']}: {row['problem']}" for row in rows if row["problem"] is not None]
        lines += [sentence for row in rows for sentence in losses(row)]
        lines += dict.fromkeys(note for row in rows for note in row.get("notes", ()))
    if any(measured(claim, report) for claim in CLAIMS):
        lines += ["", "What papers claim, and what was measured here:", "", table(claims_table([report]))]
    return "\n".join(lines)


HEAD = (
    "recipe,tokens,first token,x,promised,realised,tokens/s,x,promised,requests/s,x,promised,peak,KV,FLOPs saved".split(
        ","
    )
)


def line(row: Row) -> list[str]:
    """One row of the table; a ratio shows its spread."""
    figures = row["figures"]
    cells = [row["recipe"], _tokens(row), _spread(figures["ttft_s"], seconds), *_ratio(row, "ttft", True)]
    cells += [_spread(figures.get("decode_tokens_per_s"), "{:.1f}".format), *_ratio(row, "decode")]
    cells += [_spread(figures["requests_per_s"], "{:.2f}".format), *_ratio(row, "requests")]
    peak = figures.get("peak_bytes")
    cells += ["-" if peak is None else nbytes(peak["median"]), nbytes(row["kv_bytes"])]
    full = row["operations"]["vision"] + row["operations"]["language"]
    saved = row.get("saved", {}).get("operations")
    return [*cells, "-" if saved is None else f"{saved / (saved + full):.0%}"]


def _spread(figure: dict[str, Any] | None, write: Callable[[float], str]) -> str:
    if figure is None:
        return "-"
    spread = Spread.of(figure)
    return f"{write(spread.median)} ±{spread.notch / spread.median:.0%}"


def _tokens(row: Row) -> str:
    tokens = row["tokens"]
    return f"{tokens['visual_tokens']} -> {tokens['visual_tokens_kept']}" if tokens else "all"


def _ratio(row: Row, figure: str, realised: bool = False) -> list[str]:
    speedup = row.get("speedup", {}).get(figure)
    if speedup is None:
        return ["-"] * (3 if realised else 2)
    spread = Spread.of(speedup)
    cells = [f"{spread.median:.2f} ±{spread.notch:.2f}", f"{row['promised'][figure]:.2f}"]
    return [*cells, f"{row['realised'][figure]:.0%}"] if realised else cells


def parts(row: Row) -> str:
    """The time to first token by its parts; nothing for a row without figures."""
    if row["problem"] is not None:
        return ""
    spent = ", ".join(f"{part} {seconds(value)}" for part, value in row["parts_s"].items() if value > 0)
    return f"{row['recipe']}: {spent}"


def losses(row: Row) -> list[str]:
    """Note of what did not get faster, and why, in a sentence; empty if everything did."""
    if row["problem"] is not None or "verdict" not in row:
        return []
    worse = [_WATCHED[name] for name, verdict in row["verdict"].items() if verdict == "slower"]
    said = [f"SLOWER than the bare model: {', '.join(worse)}"] if worse else []
    if row["verdict"]["ttft"] == "same":
        said.append("no difference in the first token beyond noise")
    why = f" ({'; '.join(row['reasons'])})" if row["reasons"] else ""
    return [f"{row['recipe']}: {'; '.join(said) or 'little to gain'}{why}"] if said or why else []


# --- two reports ------------------------------------------------------------------------------------------------------
def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, int]:
    """Changes between two reports, as text, and the number of regressions.

    Ratios to the bare model are compared, since they were measured in pairs and hold on another machine; a change counts
    where the spreads do not overlap. Bytes have no spread: there growth above 1% counts.

    Raises MmaccelError if the reports have no row in common.
    """
    old = {_key(row): row for row in before["rows"]}
    new = {_key(row): row for row in after["rows"]}
    common = [key for key in old if key in new]
    if not common:
        raise MmaccelError("The two files have no model, workload and recipe in common; there is nothing to compare.")
    said, regressions = [], 0
    for key in common:
        a, b = old[key], new[key]
        title = f"{_case(a)}, {a['recipe']}"
        if a["problem"] is None and b["problem"] is not None:
            said.append(f"REGRESSION {title}: {b['problem']}")
            regressions += 1
        if a["problem"] is not None or b["problem"] is not None:
            continue
        for name, label in _WATCHED.items():
            if name not in a.get("speedup", {}) or name not in b.get("speedup", {}):
                continue
            was, now = Spread.of(a["speedup"][name]), Spread.of(b["speedup"][name])
            if change := changed(was, now):
                said.append(
                    f"{'improvement' if change > 0 else 'REGRESSION'} {title}: {label} {was.median:.2f}x ±{was.notch:.2f} -> "
                    f"{now.median:.2f}x ±{now.notch:.2f}"
                )
                regressions += change < 0
        if b["kv_bytes"] > 1.01 * a["kv_bytes"]:
            said.append(f"REGRESSION {title}: KV {nbytes(a['kv_bytes'])} -> {nbytes(b['kv_bytes'])}")
            regressions += 1
    lost = [key for key in old if key not in new]
    said += [f"only in the first file: {_case(old[key])}, {old[key]['recipe']}" for key in lost]
    said.append(f"{len(common)} rows compared, {regressions} regressions; what is not listed differs by noise at most.")
    return "\n".join(said), regressions


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("workload", "answer", "batch", "closed_loop", "recipe"))


# --- plots ------------------------------------------------------------------------------------------------------------
def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """The plots that the report has figures for, as files: the parts of the time to first token; memory over retention where a
    recipe ran at several; requests a second where several numbers of clients ran. Raises MmaccelError without matplotlib."""
    pyplot = plots.load_pyplot("bench")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in report["rows"] if row["problem"] is None]
    title = f"{report['model']['name']} on {report['machine']['processor']}"
    figures = {
        "ttft.png": _stacked(pyplot, title, [row for row in rows if not row["closed_loop"]]),
        "memory.png": _memory(pyplot, title, rows),
        "throughput.png": _throughput(pyplot, title, [row for row in rows if row["closed_loop"]]),
    }
    return [plots.save(figure, folder / name) for name, figure in figures.items() if figure is not None]


def _stacked(pyplot: Any, title: str, rows: Sequence[Row]) -> Any:
    # the time to first token does not depend on the length of the answer
    least = min((row["answer"] for row in rows), default=0)
    rows = [row for row in rows if row["answer"] == least]
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.28 * len(rows)), layout="constrained")
    left = [0.0] * len(rows)
    for part, (colour, hatch) in _BARS.items():
        widths = [1e3 * row["parts_s"][part] for row in rows]
        if any(widths):
            look = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5, "label": part}
            axes.barh(range(len(rows)), widths, left=left, **look)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    names = [f"{row['workload']}, batch {row['batch']}: {row['recipe']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms (medians of the parts)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_BARS), frameon=False, fontsize=8)
    return figure


def _curves(points: Iterable[tuple[Any, tuple[float, float]]]) -> dict[Any, list[tuple[float, float]]]:
    """Sorted points by key, where a key has several."""
    curves: dict[Any, list[tuple[float, float]]] = {}
    for key, point in points:
        curves.setdefault(key, []).append(point)
    return {key: sorted(several) for key, several in curves.items() if len(several) > 1}


def _memory(pyplot: Any, title: str, rows: Sequence[Row]) -> Any:
    """The KV cache of the largest case over retention, and the peak where it is known."""
    reduced = [row for row in rows if isinstance(row["retain"], float) and "kv_share" in row]
    curves = _curves(((_case(row), row["name"]), (100 * row["retain"], row["kv_bytes"] / 2**20)) for row in reduced)
    if not curves:
        return None
    cases_drawn = {case for case, _ in curves}
    full = max((r for r in rows if r["name"] == "bare" and _case(r) in cases_drawn), key=lambda r: r["kv_bytes"])
    case = _case(full)
    peaks = sorted(
        (100 * row["retain"], row["figures"]["peak_bytes"]["median"] / 2**20, row["name"])
        for row in rows
        if _case(row) == case and isinstance(row["retain"], float) and "peak_bytes" in row["figures"]
    )
    figure, panes = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    panes[0].axhline(full["kv_bytes"] / 2**20, **plots.BASELINE, label="bare")
    if "peak_bytes" in full["figures"]:
        panes[1].axhline(full["figures"]["peak_bytes"]["median"] / 2**20, **plots.BASELINE)
    drawn = {name: points for (of, name), points in curves.items() if of == case}
    for number, (name, points) in enumerate(drawn.items()):
        panes[0].plot(*zip(*points, strict=True), **plots.curve_style(number), label=name)
        if line := [(x, y) for x, y, whose in peaks if whose == name]:
            panes[1].plot(*zip(*line, strict=True), **plots.curve_style(number))
    for pane, label in zip(panes, ("KV cache, MiB", "peak memory, MiB"), strict=True):
        plots.open_axes(pane, xlabel="retained, %", ylabel=label)
        pane.set_ylim(bottom=0)
    figure.suptitle(f"{title}: {case}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _throughput(pyplot: Any, title: str, rows: Sequence[Row]) -> Any:
    curves = _curves(
        (
            (row["workload"], row["answer"], row["recipe"]),
            (row["batch"], row["figures"]["requests_per_s"]["median"]),
        )
        for row in rows
    )
    if not curves:
        return None
    load = next(iter(curves))[:2]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    drawn = {recipe: points for (*where, recipe), points in curves.items() if tuple(where) == load}
    for number, (name, points) in enumerate(drawn.items()):
        axes.plot(*zip(*points, strict=True), **plots.curve_style(number), label=name)
    labels = {"xlabel": "clients in a closed loop", "ylabel": "requests per second", "xscale": "log"}
    plots.open_axes(axes, **labels, title=f"{title}: {load[0]}, answer of {load[1]}")
    ticks = sorted({x for points in drawn.values() for x, _ in points})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure
