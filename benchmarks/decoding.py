"""How fast are a few frames of a long video fetched?

Makes a ten-minute clip with PyAV (H.264, moving texture, a keyframe every ten seconds or less as x264 puts them) and fetches
64 evenly spaced frames of it: decoding everything from the start, as a loop over frames does; seeking with one thread; and
seeking with several, by every back end that is installed. The ways are timed in turn, so that ratios hold on a noisy
machine; every run is checked to give the same frames.

    python benchmarks/decoding.py --out benchmarks/results/decoding-cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import av
import numpy as np

from mmaccel.programs.bench import provenance
from mmaccel.video import READERS, decode, spaced, usable


def make(path: Path, seconds: int, fps: int, width: int, height: int) -> None:
    """A texture that wanders, with a cut every 20 seconds."""
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=fps, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", 10 * fps
        for at in range(seconds * fps):
            if at % (20 * fps) == 0:
                coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
                ground = coarse.repeat(16, 0).repeat(16, 1)[:height, :width]
            frame = np.roll(ground, (at, 2 * at), (0, 1))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())


def sequential(path: Path, wanted: list[int]) -> np.ndarray:
    """Every frame from the start to the last wanted one, with one decoding thread."""
    found, want = [], set(wanted)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for at, frame in enumerate(container.decode(stream)):
            if at in want:
                found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == len(want):
                break
    return np.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="length of the clip (default: 600)")
    parser.add_argument("--frames", type=int, default=64, help="frames to fetch (default: 64)")
    parser.add_argument("--runs", type=int, default=5, help="(default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="of parallel decoding (default: 2)")
    parser.add_argument("--size", type=int, nargs=2, default=(640, 360), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--fps", type=int, default=24)
    parser.add_argument("--note", default="", help="about the machine, kept beside the figures")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    total = args.seconds * args.fps
    wanted = spaced(total, args.frames)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        make(path, args.seconds, args.fps, *args.size)
        backends = [name for name, reader in READERS.items() if usable(reader)]
        ways: dict[str, Callable[[], np.ndarray]] = {"sequential": lambda: sequential(path, wanted)}
        for name in backends:
            for threads in (1, args.threads):
                ways[f"{name}, {threads} thread{'s' * (threads > 1)}"] = lambda name=name, threads=threads: (
                    decode(path, args.frames, backend=name, threads=threads).frames
                )
        ways["isolated"] = lambda: decode(path, args.frames, threads=args.threads, isolated=True).frames
        expected = ways["sequential"]()
        times: dict[str, list[float]] = {name: [] for name in ways}
        ways["isolated"]()  # its process starts once
        for run in range(args.runs):
            for name, way in ways.items():
                began = time.perf_counter()
                frames = way()
                times[name].append(time.perf_counter() - began)
                assert np.array_equal(frames, expected), f"{name} gave other frames"
                print(f"run {run + 1}, {name}: {times[name][-1]:.2f} s", flush=True)
        size = path.stat().st_size

    rows = {
        name: {
            "seconds": round(statistics.median(found), 3),
            "frames_per_second": round(args.frames / statistics.median(found), 1),
            "of_sequential": round(
                statistics.median(a / b for a, b in zip(times["sequential"], found, strict=True)), 2
            ),
        }
        for name, found in times.items()
    }
    for name, row in rows.items():
        print(
            f"{name:<24}{row['seconds']:>8.2f} s {row['frames_per_second']:>8.1f} frames/s {row['of_sequential']:>8.2f}x"
        )
    report = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": {"processor": provenance.processor(), "threads": args.threads, "note": args.note},
        "versions": provenance.versions(["mmaccel"])
        | {name: metadata.version("av" if name == "pyav" else name) for name in backends},
        "clip": {
            "seconds": args.seconds,
            "fps": args.fps,
            "size": list(args.size),
            "bytes": size,
            "frames": args.frames,
        },
        "runs": args.runs,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
