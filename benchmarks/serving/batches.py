"""What does ``mmaccel serve --batch-size`` gain? Requests a second, processor time, and the time to first and last tokens.

    python benchmarks/serving/batches.py --update docs/guides/serve.md

Clients in a closed loop ask about pictures of the suite, each its next question as soon as its last answer is complete; no two
requests share a picture, and nothing is cached between them. Servers of a shipped model that differ in nothing but
``--batch-size`` take turns with the same requests, so that a busy machine is busy for all. Answers have 4 to 32 tokens, drawn
anew for every request: the model cannot end them, so that all servers make the same tokens. The processor time of a server, on
one thread, is what other work on the machine changes least; seconds that clients wait grow with it. Every sample is written as
it is made, and the same command goes on where it was stopped. Nothing is downloaded. Linux only.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from PIL import Image

from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.core.shipped_models import shipped_models
from mmaccel.errors import MmaccelError
from mmaccel.programs.bench import provenance
from mmaccel.suite import make_item

TASKS = ("colour", "count", "existence", "relation")
#: tokens of an answer
LENGTHS = 4, 32


@dataclass(frozen=True)
class Server:
    """A running server: its process, the address of its API, and the name of its model."""

    process: subprocess.Popen[str]
    address: str
    model: str

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def copy_without_end(name: str, folder: Path) -> Path:
    """A copy of a shipped model that never ends an answer by itself."""
    copied = folder / name
    shutil.copytree(shipped_models()[name], copied)
    file = copied / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None, "_from_model_config": False}))
    return copied


@contextmanager
def serving(model: Path, recipe: str, batch: int) -> Iterator[Server]:
    """One ``mmaccel serve`` on a free port."""
    command = [sys.executable, "-m", "mmaccel", "serve", "--model", str(model), "--recipe", recipe, "--device", "cpu"]
    command += ["--batch-size", str(batch), "--prefix-cache", "0", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        served = json.loads(process.stdout.readline())
        yield Server(process, served["address"], served["model"])
    finally:
        process.terminate()
        process.wait()


def requests(count: int, seed: int, side: int) -> list[dict[str, Any]]:
    """Questions about pictures, no two alike, with an answer of a length of its own each."""
    random, found = Random(seed), []
    for number in range(count):
        item, file = make_item(TASKS[number % len(TASKS)], "test", seed * count + number), io.BytesIO()
        Image.fromarray(item.pictures(side)[0]).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": item.turns[-1].question}]
        found.append({"messages": [{"role": "user", "content": content}], "max_tokens": random.randint(*LENGTHS)})
    return found


def ask(server: Server, request: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first and to the last token of an answer."""
    body = {
        "model": server.model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | request
    headers = {"content-type": "application/json"}
    begin, first, made = time.perf_counter(), 0.0, 0
    with urlopen(
        Request(f"{server.address}/chat/completions", json.dumps(body).encode(), headers), timeout=600
    ) as lines:
        for line in lines:
            first = first or time.perf_counter() - begin
            if line.startswith(b'data: {"id"') and (usage := json.loads(line[6:]).get("usage")):
                made = usage["completion_tokens"]
    if made != request["max_tokens"]:
        raise MmaccelError(f"An answer has {made} tokens instead of {request['max_tokens']}.")
    return first, time.perf_counter() - begin


def sample(server: Server, asked: list[dict[str, Any]], clients: int) -> dict[str, Any]:
    """The figures of one server under one load."""

    def client(number: int) -> list[tuple[float, float]]:
        return [ask(server, request) for request in asked[number::clients]]

    begin, before = time.perf_counter(), server.cpu_seconds()
    with ThreadPoolExecutor(clients) as pool:
        times = [one for found in pool.map(client, range(clients)) for one in found]
    seconds, cpu = time.perf_counter() - begin, server.cpu_seconds() - before
    first, last = ([round(one, 4) for one in column] for column in zip(*times, strict=True))
    return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "first": first, "last": last}


def run(report: dict[str, Any], out: Path) -> None:
    """Make the samples that are missing."""
    asked = report["asked"]
    done = {tuple(one[name] for name in ("recipe", "round", "clients", "batch")) for one in report["samples"]}
    places = [
        (recipe, number, clients, batch)
        for recipe in asked["recipes"]
        for number in range(asked["rounds"])
        for clients in asked["clients"]
        for batch in asked["batches"]
        # so many never wait
        if batch <= max(clients, asked["batches"][0])
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = copy_without_end(asked["model"], Path(folder))
        for recipe in asked["recipes"]:
            missing = [place for place in places if place not in done and place[0] == recipe]
            with ExitStack() as stack:
                servers = {
                    batch: stack.enter_context(serving(model, recipe, batch)) for batch in asked["batches"] if missing
                }
                for server in servers.values():
                    sample(server, requests(4, 10_000, asked["side"]), 4)
                for _, number, clients, batch in missing:
                    found = sample(servers[batch], requests(asked["requests"], number, asked["side"]), clients)
                    place = {"recipe": recipe, "round": number, "clients": clients, "batch": batch}
                    report["samples"].append(place | found)
                    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                    print(
                        f"[{len(report['samples'])}/{len(places)}] {recipe}, {clients} clients, --batch-size {batch}: "
                        f"{found['cpu_seconds'] / asked['requests']:.3f} CPU s a request, {found['seconds']:.1f} s",
                        flush=True,
                    )


def table(report: dict[str, Any]) -> str:
    """One row for every recipe, number of clients and batch size; ratios are medians of those of one round."""
    asked, by = report["asked"], dict[tuple[Any, ...], list[dict[str, Any]]]()
    for one in sorted(report["samples"], key=lambda one: one["round"]):
        by.setdefault((one["recipe"], one["clients"], one["batch"]), []).append(one)
    heads = ["recipe", "clients", "`--batch-size`", "CPU s a request", "beside 1", "requests/s", "beside 1"]
    lines = [[*heads, "first token, s", "last token, s"]]
    for (recipe, clients, batch), samples in by.items():
        alone = by[recipe, clients, asked["batches"][0]]

        def ratios(name: str) -> list[float]:
            return [mine[name] / other[name] for mine, other in zip(samples, alone, strict=False)]  # noqa: B023

        cpu = median(one["cpu_seconds"] for one in samples) / asked["requests"]
        rate = asked["requests"] / median(one["seconds"] for one in samples)
        compared = ["", ""]
        if samples is not alone:
            spread = ratios("cpu_seconds")
            compared[0] = f"{median(spread):.2f} ({min(spread):.2f} to {max(spread):.2f})"
            compared[1] = f"{1 / median(ratios('seconds')):.2f}"
        waits = (f"{median(x for one in samples for x in one[name]):.2f}" for name in ("first", "last"))
        lines.append(
            [f"`{recipe}`", str(clients), str(batch), f"{cpu:.3f}", compared[0], f"{rate:.2f}", compared[1], *waits]
        )
    used = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"{markdown(lines)}\n\n`{asked['model']}`, pictures of {asked['side']} pixels, answers of {LENGTHS[0]} to {LENGTHS[1]} "
        f"tokens, {asked['requests']} requests a sample, {asked['rounds']} samples: medians, and of the ratios of processor "
        f"time the range. `{report['command']}`, {report['date']}, {report['machine']}, {used}."
    )


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """The report of an earlier run of the same measurement, or a new one. Raises MmaccelError if the file holds another."""
    names = ("model", "recipes", "clients", "batches", "requests", "rounds", "side")
    asked = {name: getattr(options, name) for name in names}
    if options.out.exists():
        found: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
        if found["asked"] != asked:
            raise MmaccelError(f"{options.out} holds a measurement of something else; name another file with --out.")
        return found
    return {
        "command": provenance.command("python", "benchmarks/serving/batches.py"),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()}), one thread a server, beside other work",
        "versions": provenance.versions(),
        "asked": asked,
        "samples": [],
    }


def main() -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-qwen-vl", help="a shipped model (default: mini-qwen-vl)")
    parser.add_argument("--recipes", nargs="+", default=["none", "divprune"], help="default: none divprune")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8], help="at once (default: 1 4 8)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help="of --batch-size (default: 1 4 8)")
    parser.add_argument("--requests", type=int, default=16, help="of a sample (default: 16)")
    parser.add_argument("--rounds", type=int, default=2, help="samples of everything (default: 2)")
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture along a side (default: 224)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/batches-cpu.json"),
        help="JSON of the samples (default: %(default)s)",
    )
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown page whose table is made anew")
    options = parser.parse_args()
    try:
        report = begun(options)
        run(report, options.out)
    except MmaccelError as error:
        print(error, file=sys.stderr)
        return 2
    print(text := table(report))
    if options.update is not None:
        put_between(options.update, options.out.stem, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
