"""Claims of papers (``paper_claims.csv``), to compare with reports of ``mmaccel bench``. All numbers are the authors'."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One claim.

    model, retention, hardware : as the authors state it; empty where the source does not.
    figure : what is compared: ``ttft``, ``prefill`` (selection included), ``decode``, ``requests``, ``flops`` or ``kv``
        (by how much the cache shrinks).
    ratio : how many times better.
    source : the paper, and where in it. note : the figures behind the ratio.
    shape, workload : where the same can be measured here; None where no shape fits.
    retain : budget of the recipe for that retention; None for any.
    """

    recipe: str
    model: str
    retention: str
    figure: str
    ratio: float
    source: str
    shape: str | None = None
    workload: str | None = None
    retain: float | None = None
    hardware: str = ""
    note: str = ""


def _claim(row: dict[str, str]) -> Claim:
    numbers = {name: float(row[name]) if row[name] else None for name in ("ratio", "retain")}
    values: dict[str, Any] = {**row, "shape": row["shape"] or None, "workload": row["workload"] or None, **numbers}
    return Claim(**values)


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _file:
    CLAIMS: tuple[Claim, ...] = tuple(map(_claim, csv.DictReader(_file)))


def measured(claim: Claim, report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], float]]:
    """Rows of a report that measured a claim, with their ratios: the same shape, workload and recipe, one request at a time,
    and the claim's budget if it has one."""
    if report["model"]["shape"] != claim.shape:
        return []
    bare: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    hits = []
    for row in report["rows"]:
        case = row["workload"], row["answer"], row["batch"], row["closed_loop"]
        if row["problem"] is None and row["recipe"] == "bare":
            bare[case] = row
        if row["problem"] or "speedup" not in row or case[0] != claim.workload or case[2:] != (1, False):
            continue
        if row["name"] != claim.recipe or (claim.retain is not None and row["retain"] != claim.retain):
            continue
        if (ratio := _ratio(claim.figure, row, bare[case])) is not None:
            hits.append((row, ratio))
    return hits


def _ratio(figure: str, row: Mapping[str, Any], bare: Mapping[str, Any]) -> float | None:
    if figure == "flops":
        return float(row["promised"]["flops"])
    if figure == "kv":
        return 1 / float(row["kv_share"])
    if figure == "prefill":
        spent = [parts["selection"] + parts["prefill"] for parts in (bare["parts_s"], row["parts_s"])]
        return float(spent[0] / spent[1])
    return float(row["speedup"][figure]["median"]) if figure in row["speedup"] else None


def claims_table(reports: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A table, the head first: every claim, and what the reports measured."""
    rows = [["paper", "model", "retention", "figure", "claimed", "source", "here", "machine"]]
    for claim in CLAIMS:
        on = f"{claim.ratio:g}x" + (f" ({claim.hardware})" if claim.hardware else "")
        cells = [claim.recipe, claim.model or "-", claim.retention or "-", claim.figure, on, claim.source]
        hits = [(report, row, ratio) for report in reports for row, ratio in measured(claim, report)]
        for report, row, ratio in hits:
            rows.append([*cells, f"{ratio:.2f}x ({row['recipe']})", report["machine"]["processor"]])
        if not hits:
            rows.append([*cells, "not measured here", ""])
    return rows
