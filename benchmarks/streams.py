"""A sign that a long stream shows once: how often a question behind the stream is answered, with recall and without.

``python benchmarks/streams.py --out benchmarks/results/streams-cpu.json`` draws streams of many short scenes, one of which
shows a sign for two frames somewhere in the first half. Sessions with the shipped video model follow it, each with the same
room for keys, and are asked what the sign says. Two counts say where a sign is lost: whether its frames were among those that
the question brought back, and whether the model reads it in its scene alone. Nothing is downloaded. Started again with the same
--out, streams in the file are not followed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from mmaccel import Stage, VideoSession, get_method
from mmaccel.cli.shared.text import markdown
from mmaccel.families.load import load
from mmaccel.method import RecallPolicy
from mmaccel.programs.bench import provenance
from mmaccel.programs.tune.confidence import interval
from mmaccel.suite.clip import CLIP_TASKS, needle, render_clip
from mmaccel.suite.questions import Turn
from mmaccel.suite.rng import Rng, item_seed

SIDE, SCENE = 112, 16
SESSIONS = ["infinipot-v", "rekv", "em-llm", "streamingtom", "frame-bounds"]


def scenes(seed: int, frames: int) -> tuple[Iterator[np.ndarray], Turn, int, np.ndarray]:
    """Scenes of 16 frames ``[16, SIDE, SIDE, 3]``, the question about the sign in one of them, the number of the first frame
    that shows it, and that scene."""
    rng, others = Rng(item_seed("test", seed, 200)), ("motion", "order", "change")
    count = frames // SCENE
    at = rng.integer(0, count // 2 - 1)
    shown = None
    while shown is None:
        shown = needle(rng, SCENE)
    clip, (turn,) = shown

    def every() -> Iterator[np.ndarray]:
        for number in range(count):
            other = None
            while other is None:
                other = CLIP_TASKS[rng.pick(others)](rng, SCENE)
            yield render_clip(clip if number == at else other[0], SIDE)

    sign = next(number for number, scene in enumerate(clip.frames) if scene.sign is not None)
    return every(), turn, at * SCENE + sign, render_clip(clip, SIDE)


def sessions(model: Any, processor: Any, names: list[str], cap: int, frames: int) -> dict[str, VideoSession]:
    """The sessions that are compared: policies that recall, and others."""
    given = {"processor": processor, "cap_tokens": cap, "fps": 4.0}

    def made(name: str) -> VideoSession:
        if issubclass(get_method(name), RecallPolicy):
            return VideoSession(model, recall=Stage(name, options={"frames": frames}), **given)
        return VideoSession(model, name, **given)

    return {name: made(name) for name in names}


def follow(
    model: Any, processor: Any, seed: int, names: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What the sessions of these names made of one stream."""
    found, every = sessions(model, processor, names, options.cap, options.recall), scenes(seed, options.frames)
    spent, bytes_held = dict.fromkeys(found, 0.0), {name: list[int]() for name in found}
    stream, turn, sign, scene_of_it = every
    alone = sessions(model, processor, ["infinipot-v"], 1 << 20, options.recall)["infinipot-v"]
    alone.push(scene_of_it)
    read_alone = alone.ask(turn.question, 16) == turn.answer
    for scene in stream:
        for name, session in found.items():
            begin = time.perf_counter()
            session.push(scene)
            spent[name] += time.perf_counter() - begin
            bytes_held[name].append(session.nbytes())
    rows = []
    for name, session in found.items():
        begin = time.perf_counter()
        answer = session.ask(turn.question, 16)
        rows.append(
            {
                "session": name,
                "stream": seed,
                "right": answer == turn.answer,
                "recalled": bool({sign, sign + 1} & set(session.recalled)),
                "read_alone": read_alone,
                "push_seconds": round(spent[name], 2),
                "ask_seconds": round(time.perf_counter() - begin, 3),
                "device_bytes_at_a_tenth": bytes_held[name][len(bytes_held[name]) // 10],
                "device_bytes": session.nbytes(),
                "parked_bytes": session.parked_bytes(),
            }
        )
    return rows


def table(report: dict[str, Any]) -> str:
    """One row a session, and what it was measured on."""
    counted = "recalled" in report["sessions"][0]
    head = [
        "session",
        "right answers (95 %)",
        *(["sign brought back", "and then read", "read in its scene alone"] if counted else []),
        "device, KiB",
        "at a tenth of the stream, KiB",
        "parked, KiB",
        "push, ms a frame",
    ]

    def share(row: dict[str, Any]) -> str:
        right, asked = round(row["right"] * row["streams"]), row["streams"]
        low, high = interval(right, asked)
        return f"{right} of {asked} ({100 * low:.0f} to {100 * high:.0f} %)"

    def stages(row: dict[str, Any]) -> list[str]:
        mine = [one for one in report["rows"] if one["session"] == row["session"]]
        back = [one for one in mine if one["recalled"]]
        counts = sum(one["right"] for one in back), sum(one["read_alone"] for one in mine)
        return [f"{len(back)} of {len(mine)}", f"{counts[0]} of {len(back)}", f"{counts[1]} of {len(mine)}"]

    rows = [
        [
            f"`{row['session']}`",
            share(row),
            *(stages(row) if counted else []),
            f"{row['device_bytes'] / 1024:.0f}",
            f"{row['device_bytes_at_a_tenth'] / 1024:.0f}",
            f"{row['parked_bytes'] / 1024:.0f}",
            f"{1e3 * row['push_seconds'] / report['frames']:.0f}",
        ]
        for row in report["sessions"]
    ]
    return (
        f"{report['model']}, streams of {report['frames']} frames, {report['cap_tokens']} keys a head, "
        f"{report['recalled_frames']} frames recalled, on {report['machine']}, {report['date']}, torch "
        f"{report['versions']['torch']}. Made by `{report['command']}`.\n\n{markdown([head, *rows])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=20, help="streams, each with a sign of its own (default: 20)")
    parser.add_argument("--frames", type=int, default=3600, help="frames of a stream (default: 3600)")
    parser.add_argument(
        "--cap", type=int, default=160, help="keys a head of every layer, for all sessions (default: 160)"
    )
    parser.add_argument("--recall", type=int, default=4, help="frames that a question brings back (default: 4)")
    parser.add_argument("--sessions", nargs="+", default=SESSIONS, metavar="POLICY", help="those that are compared")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    options = parser.parse_args()
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    settings = {"frames": options.frames, "cap_tokens": options.cap, "recalled_frames": options.recall}
    if before and (other := [name for name, value in settings.items() if before[name] != value]):
        parser.error(f"{options.out} has streams with other {', '.join(other)}; give another --out")
    model, processor = load("mini-qwen-vl", device="cpu")
    rows = before.get("rows", [])
    for seed in range(options.streams):
        done = {row["session"] for row in rows if row["stream"] == seed}
        if names := [name for name in options.sessions if name not in done]:
            rows += follow(model, processor, seed, names, options)
            write(options.out, before, settings, rows)
            print(seed, {row["session"]: row["right"] for row in rows[-len(names) :]}, flush=True)
    # also where nothing was missing: the command is that which asks for all
    write(options.out, before, settings, rows)


def write(path: Path, before: dict[str, Any], settings: dict[str, int], rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far, and before in the same file."""
    summary = []
    for name in dict.fromkeys(row["session"] for row in rows):
        mine = [row for row in rows if row["session"] == name]
        figures = {key: round(mean(row[key] for row in mine), 2) for key in mine[0] if key not in ("session", "stream")}
        summary.append({"session": name, "streams": len(mine), **figures})
    known = before.get("versions", {})
    report = {
        "command": provenance.command("python", "benchmarks/streams.py"),
        "date": provenance.also(before.get("date"), provenance.today()),
        "machine": provenance.processor(),
        "versions": {name: provenance.also(known.get(name), number) for name, number in provenance.versions().items()},
        "model": "mini-qwen-vl",
        **settings,
        "sessions": summary,
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
