"""What papers claim, to stand next to what was measured here. Every number is one that the authors print; where from is said
beside it. Nothing here was measured by us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Claim:
    """One headline.

    model, retention, hardware : as the authors say it; empty where the source does not.
    figure : what is compared: ``ttft``, ``prefill`` (selection included), ``decode``, ``requests``, ``flops`` or ``kv``
        (by how much the cache shrinks).
    ratio : how many times better.
    source : paper, and what of it.
    shape, workload : where the same can be measured here; None where no shape fits.
    retain : budget of the recipe here for that retention; None for any.
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


_OV, _NEXT, _13B = "llava-onevision-7b", "llava-next-7b", "llava-1.5-13b"
CLAIMS: tuple[Claim, ...] = (
    # 0.203 s -> 0.155 s and 0.124 s to the first token
    Claim(
        "fastv", "LLaVA-1.5-13B", "50%", "ttft", 1.31, "2403.06764, README", _13B, "picture-336", 0.5, hardware="A100"
    ),
    Claim(
        "fastv", "LLaVA-1.5-13B", "25%", "ttft", 1.64, "2403.06764, README", _13B, "picture-336", 0.25, hardware="A100"
    ),
    Claim("visionzip", "LLaVA-NeXT", "", "prefill", 8.0, "2412.04467, abstract", _NEXT, "tiles-2880"),
    # 54% fewer operations, 37% less time on the GPU
    Claim("sparsevlm", "LLaVA", "", "flops", 2.17, "2410.04417, abstract", "llava-1.5-7b", "picture-336"),
    Claim("sparsevlm", "LLaVA", "", "ttft", 1.59, "2410.04417, abstract", "llava-1.5-7b", "picture-336"),
    # 55% fewer operations
    Claim("pyramiddrop", "LLaVA-NeXT", "", "flops", 2.22, "2410.17247, abstract", _NEXT, "tiles-2880"),
    Claim(
        "hired",
        "LLaVA-NeXT-7B",
        "20%",
        "requests",
        4.7,
        "2408.10945, abstract",
        _NEXT,
        "tiles-2880",
        0.2,
        hardware="P40",
    ),
    # 88.5% fewer operations
    Claim("mustdrop", "LLaVA", "7.8%", "flops", 8.7, "2411.10803, abstract", "llava-1.5-7b", "picture-336"),
    Claim("aim", "", "", "flops", 7.0, "2412.03248, abstract", _OV, "video-32"),
    Claim("holitom", "LLaVA-OneVision-7B", "6.9% of FLOPs", "ttft", 2.28, "2505.21334, abstract", _OV, "video-32"),
    Claim("holitom", "LLaVA-OneVision-7B", "6.9% of FLOPs", "decode", 1.32, "2505.21334, abstract", _OV, "video-32"),
    Claim("fastvid", "LLaVA-OneVision-7B", "9.7%", "prefill", 7.1, "2503.11187, README", _OV, "video-32", 0.097),
    Claim("dycoke", "", "", "requests", 1.5, "2411.15024, abstract", _OV, "video-32"),
    Claim("framefusion", "", "30%", "requests", 1.6, "2501.01986, README (1.6 to 1.9)", _OV, "video-32", 0.3),
    Claim("look-m", "", "20% of KV", "decode", 1.5, "2406.18139, abstract (up to)", _13B, "pictures-8", 0.2),
)


def measured(claim: Claim, report: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], float]]:
    """Rows of a report that measured what a claim speaks of, each with its ratio: the same shape, workload and recipe, one
    request at a time, and the claim's budget if it names one."""
    if report["model"]["shape"] != claim.shape:
        return []
    bare: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    found = []
    for row in report["rows"]:
        case = row["workload"], row["answer"], row["batch"], row["closed_loop"]
        if row["problem"] is None and row["recipe"] == "bare":
            bare[case] = row
        if row["problem"] or "speedup" not in row or case[0] != claim.workload or case[2:] != (1, False):
            continue
        if row["name"] != claim.recipe or (claim.retain is not None and row["retain"] != claim.retain):
            continue
        if (ratio := _ratio(claim.figure, row, bare[case])) is not None:
            found.append((row, ratio))
    return found


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
    """Rows of a table, the head first: every claim, and beside it what the reports hold of it."""
    rows = [["paper", "model", "retention", "figure", "claimed", "source", "here", "machine"]]
    for claim in CLAIMS:
        on = f"{claim.ratio:g}x" + (f" ({claim.hardware})" if claim.hardware else "")
        told = [claim.recipe, claim.model or "-", claim.retention or "-", claim.figure, on, claim.source]
        hits = [(report, row, ratio) for report in reports for row, ratio in measured(claim, report)]
        for report, row, ratio in hits:
            rows.append([*told, f"{ratio:.2f}x ({row['recipe']})", report["machine"]["processor"]])
        if not hits:
            rows.append([*told, "not measured here", ""])
    return rows
