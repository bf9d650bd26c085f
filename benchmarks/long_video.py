"""Long videos in bounded memory: prefill in chunks beside one piece, and a stream of frames.

    python benchmarks/long_video.py --out benchmarks/results/long-video-cpu.json --update docs/results/long-video.md

- A prompt of a model of a known architecture with random weights is read in one piece and in chunks, in turn; the ratio of
  times is the median over such pairs, in seconds of the processor, which other work on the machine hardly changes. Peak memory
  is that of a process of its own for each.
- A stream of frames is read by a ``VideoSession`` of ``mini-qwen-vl``, in a process of its own for each length.
- Files at a frame a second are read by ``read_video`` and ``generate``, and by ``video-qa``, each in a process of its own. Its
  peak does not count the process that decodes for ``video-qa``, which holds a picture at a time.

Started again with the same --out, what is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from mmaccel import VideoSession, accelerated, answer_videos, read_video
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.families.load import load
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.shapes import build, shape
from mmaccel.programs.bench.workloads import ShapeSubject, Workload


def peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.inference_mode()
def prefill(name: str, frames: int, chunks: list[int | None], pairs: int) -> dict[str, Any]:
    """Seconds of the processor for a prompt read in each of the ways, in turn, and the peak of this process."""
    model = build(name, torch.device("cpu"), torch.float32)
    subject, work = ShapeSubject(model, shape(name)), Workload(frames=frames)
    inputs = subject.inputs(work, [subject.pixels(work)])
    before, times = peak(), []
    with accelerated(model, "none"):
        for _ in range(pairs):
            row = []
            for chunk in chunks:
                asked = {"chunk": chunk or 1 << 30}
                begin = time.process_time()
                model(**inputs, use_cache=True, logits_to_keep=1, mmaccel=asked)
                row.append(time.process_time() - begin)
            times.append(row)
    return {"tokens": inputs["input_ids"].shape[1], "seconds": times, "peak": peak(), "grown": peak() - before}


def stream(frames: int, cap: int) -> dict[str, Any]:
    """A question behind so many frames: seconds, and the peak of this process."""
    model, processor = load("mini-qwen-vl")
    session = VideoSession(model, processor=processor, cap_tokens=cap)
    random, begin = np.random.default_rng(0), time.perf_counter()
    for start in range(0, frames, 8):
        session.push(random.integers(0, 256, (min(8, frames - start), 56, 56, 3), dtype=np.uint8))
    answer = session.ask("what is there?", max_new_tokens=4)
    seconds = time.perf_counter() - begin
    return {
        "frames": frames,
        "cap": cap,
        "seconds": seconds,
        "peak": peak(),
        "keys": session.tokens(),
        "answer": answer,
    }


def film(path: Path, frames: int) -> None:
    """Write a video of noise, a frame a second."""
    random = np.random.default_rng(0)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 56
        stream.pix_fmt = "yuv420p"
        for _ in range(frames):
            picture = random.integers(0, 256, (56, 56, 3), dtype=np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())


def through_generate(path: str, frames: int, cap: int) -> dict[str, Any]:
    """A question about a file by ``generate``: seconds, and the peak of this process."""
    model, processor = load("mini-qwen-vl")
    begin = time.perf_counter()
    session = read_video(path, model, processor=processor, frames=frames, cap_tokens=cap)
    session.generate("what is there?", max_new_tokens=4, do_sample=False)
    seconds = time.perf_counter() - begin
    return {"frames": session.frames, "seconds": seconds, "peak": peak(), "keys": session.tokens()}


def through_video_qa(path: str, frames: int, cap: int, recipe: str = "infinipot-v") -> dict[str, Any]:
    """The same by ``video-qa``."""
    model, processor = load("mini-qwen-vl")
    begin, asked = time.perf_counter(), [{"video": path, "question": "what is there?"}]
    given = {"recipe": recipe, "cap_tokens": cap, "frames": frames, "max_new_tokens": 4}
    (record,) = answer_videos(asked, model, processor, **given)
    if "error" in record:
        raise RuntimeError(record["error"])
    return {"frames": frames, "seconds": time.perf_counter() - begin, "peak": peak(), "keys": cap}


def in_child(kind: str, *arguments: Any) -> dict[str, Any]:
    """The figures of a process of its own."""
    words = [sys.executable, __file__, "--child", kind, json.dumps(arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


#: how a file is read
WAYS = {
    "generate": through_generate,
    "video-qa": through_video_qa,
    "video-qa, `balanced`": partial(through_video_qa, recipe="balanced"),
}


def table(report: dict[str, Any]) -> str:
    """The tables of a report, in Markdown."""
    lines = [["prompt, tokens", "chunk", "processor, s, median", "times one piece", "memory over the weights, MiB"]]
    for row in (row for row in report["rows"].values() if "ratio" in row):
        for way, label in (("whole", "none"), ("chunked", f"{row['chunk']:,}")):
            ratio = "1.00" if way == "whole" else f"{row['ratio']:.2f}"
            memory = f"{row['grown'][way] / 2**20:,.0f}"
            lines.append([f"{row['tokens']:,}", label, f"{row['seconds'][way]:.2f}", ratio, memory])
    streams = [["frames", "keys a head", "seconds", "peak, MiB"]]
    for row in (row for row in report["rows"].values() if "answer" in row):
        figures = [f"{row['keys']:,}", f"{row['seconds']:.0f}", f"{row['peak'] / 2**20:,.0f}"]
        streams.append([f"{row['frames']:,}", *figures])
    used = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    files = [["a file of, frames", "read by", "keys a head", "seconds", "peak, MiB"]]
    for row in (row for row in report["rows"].values() if "way" in row):
        figures = [row["way"], f"{row['keys']:,}", f"{row['seconds']:.0f}", f"{row['peak'] / 2**20:,.0f}"]
        files.append([f"{row['frames']:,}", *figures])
    return (
        f"{markdown(lines)}\n\n{markdown(streams)}\n\n{markdown(files)}\n\n"
        f"Shape `{report['shape']}` with random weights and recipe `none`; streams "
        f"by `mini-qwen-vl` and `infinipot-v`. `{report['command']}`, {report['date']}, {report['machine']}, {used}."
        f"\n\n{arithmetic()}"
    )


def arithmetic(chunk: int = 2048, group: int = 64, read: int = 8, cap: int = 16384) -> str:
    """An hour of film for Qwen2.5-VL-7B in bfloat16, from the sizes of its configuration."""
    weights, layers, heads, width, channels = 8.29e9, 28, 4, 128, 18944
    tokens = 3600 // 2 * 64
    cache, wide = 2 * layers * heads * width * 2, 3 * channels * 2
    # 64 tokens in two frames are 256 patches of 14 x 14 pixels, 3 colours and 2 frames; 40 numbers for each number of them
    pixels = 256 * 1176
    tower = pixels // 2 * 40 * 2
    frame = 224 * 224 * 3
    streamed = 2 * group * frame + read * tower + (cap + read * 32) * cache + read * 32 * wide
    return (
        "By arithmetic, for Qwen2.5-VL-7B in bfloat16 and a video of an hour at a frame a second and 64 tokens in two frames: "
        f"the weights take {2 * weights / 1e9:.1f} GB. The {tokens:,} visual tokens have {cache:,} bytes of keys and values "
        f"each ({layers} layers, {heads} heads of {width}), which is {tokens * cache / 1e9:.1f} GB; `keydiff` at a quarter "
        f"leaves {tokens * cache / 4e9:.1f} GB. An MLP has {channels:,} channels three times over, {wide / 1e3:.0f} KB a "
        f"token: {tokens * wide / 1e9:.1f} GB for the prompt in one piece, and {chunk * wide / 1e9:.1f} GB in chunks of "
        f"{chunk:,} tokens. The tower holds about {tower / 1e6:.0f} MB for a frame, {3600 * tower / 1e9:.0f} GB for all at "
        f"once. Read group by group with a cap of {cap:,} keys a head, pixels, tower, cache and MLP together take "
        f"{streamed / 1e9:.1f} GB, however long the video is: {(streamed + 2 * weights) / 1e9:.1f} of 24 GB with the weights."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--frames", type=int, nargs="*", default=[16], help="of a prompt (default: 16)")
    parser.add_argument("--chunk", type=int, default=1024, help="default: 1024")
    parser.add_argument("--pairs", type=int, default=5, help="default: 5")
    parser.add_argument("--stream", type=int, nargs="*", default=[300, 3600], help="frames (default: 300 3600)")
    parser.add_argument("--file", type=int, nargs="*", default=[300, 3600], help="frames (default: 300 3600)")
    parser.add_argument("--cap", type=int, default=1024, help="keys a head of a stream (default: 1024)")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the tables between the marks of this page")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, given = args.child
        print(json.dumps({"prefill": prefill, "stream": stream, **WAYS}[kind](*json.loads(given))))
        return 0
    if args.out is None:
        parser.error("--out is needed")
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    rows, known = before.get("rows", {}), before.get("versions", {})
    report = {
        "command": provenance.command("python", "benchmarks/long_video.py"),
        "date": provenance.also(before.get("date"), provenance.today()),
        "machine": f"a CPU ({provenance.processor()}), {torch.get_num_threads()} threads",
        "versions": {name: provenance.also(known.get(name), number) for name, number in provenance.versions().items()},
        "shape": args.shape,
        "rows": rows,
    }
    for frames in args.frames:
        if (key := f"{args.shape} {frames} frames chunk {args.chunk} pairs {args.pairs}") in rows:
            continue
        both = in_child("prefill", args.shape, frames, [None, args.chunk], args.pairs)
        alone = [in_child("prefill", args.shape, frames, [chunk], 1)["grown"] for chunk in (None, args.chunk)]
        whole, chunked = zip(*both["seconds"], strict=True)
        rows[key] = {
            "tokens": both["tokens"],
            "chunk": args.chunk,
            "ratio": statistics.median(b / a for a, b in both["seconds"]),
            "seconds": {"whole": statistics.median(whole), "chunked": statistics.median(chunked)},
            "grown": dict(zip(("whole", "chunked"), alone, strict=True)),
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for frames in args.stream:
        if (key := f"stream of {frames} frames, cap {args.cap}") not in rows:
            rows[key] = in_child("stream", frames, args.cap)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for frames in args.file:
        for way in WAYS:
            if (key := f"file of {frames} frames, {way}, cap {args.cap}") in rows:
                continue
            with tempfile.TemporaryDirectory() as folder:
                film(path := Path(folder) / "film.mp4", frames)
                rows[key] = {"way": way, **in_child(way, str(path), frames, args.cap)}
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text := table(report))
    if args.update:
        put_between(args.update, args.out.stem, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
