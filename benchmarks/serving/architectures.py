"""Answers of every architecture that mmaccel serves in vLLM beside those of transformers, token for token.

Tiny random models of the tests in single precision, each asked about 60 pictures (20 of them in pairs, where it takes pairs)
and, where it takes them, 30 clips; recipe divprune at a quarter of the tokens, `uniform` for clips of Gemma 4.

    OMP_NUM_THREADS=1 serving/bin/python benchmarks/serving/architectures.py --update docs/guides/serving.md

What is found of an architecture under a version of vLLM is kept, and not asked again by the same command.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import throughput
from tqdm import tqdm

from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.programs.bench import provenance

TESTS = Path(__file__).parents[2] / "tests"
RESULTS = Path("benchmarks/results/vllm-architectures.json")
#: prompts of each kind: pairs of pictures, and clips
COUNTS = {"images": 10, "video": 30}
PICTURES = 60
RETAIN = 0.25


@dataclass(frozen=True)
class Found:
    """What was found of one architecture: prompts with pictures and with clips, and how many answers are equal."""

    architecture: str
    vllm: str
    runner: int = 1
    pictures: int = 0
    equal_pictures: int = 0
    clips: int = 0
    equal_clips: int = 0

    def __str__(self) -> str:
        asked = [("prompts with pictures", self.equal_pictures, self.pictures), ("clips", self.equal_clips, self.clips)]
        return ", ".join(f"{equal} of {count} {what}" for what, equal, count in asked if count)

    @property
    def whole(self) -> bool:
        """Whether all answers are equal."""
        return (self.equal_pictures, self.equal_clips) == (self.pictures, self.clips)


def compare(family: str, models: Path, runner: int) -> Found:
    """Ask the tiny model of a ``family`` in vLLM, by one of its model runners, and in transformers."""
    import both_ways
    import delta_nets
    import internvl_chat
    import pytest
    import tiny

    chat, gemma = family == internvl_chat.NAME, family.startswith("gemma")
    folder = internvl_chat.folder(models) if chat else tiny.folder(family, models)
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    asked: dict[str, list[bool]] = {"image": [], "video": []}
    options: dict[str, Any] = {"trust_remote_code": True} if chat else both_ways.WHOLE if gemma else {}
    apart = family.startswith("gemma4")
    with pytest.MonkeyPatch.context() as patch:
        delta_nets.patch(patch)
        if gemma:
            both_ways.patch(patch, clamped=apart, everywhere=family != "gemma4")
        for kinds, recipe in ((("image", "images"), "divprune"), (("video",), "uniform" if apart else "divprune")):
            kinds = tuple(kind for kind in kinds if chat or kind in tiny.kinds(family))
            if not kinds:
                continue
            given: dict[str, Any] = {"retain": RETAIN, **({"positions": "paper"} if gemma else {})}
            with tiny.engine(folder, {"recipe": recipe, "numbering": "transformers", **given}, **options) as llm:
                for kind in kinds:
                    alone = PICTURES - 2 * COUNTS["images"] * ("images" in kinds)
                    rows = tiny.rows(family, kind, COUNTS.get(kind, alone))
                    want = (
                        internvl_chat.expected(rows, recipe, **given)
                        if chat
                        else tiny.expected(family, rows, recipe, **given)
                    )
                    made = tiny.served(llm, family, rows)
                    asked["video" if kind == "video" else "image"] += [
                        one == other for one, other in zip(made, want, strict=True)
                    ]
    pictures, clips = asked.values()
    return Found(name, importlib.metadata.version("vllm"), runner, len(pictures), sum(pictures), len(clips), sum(clips))


def families() -> list[str]:
    """The families of tiny models, one of every architecture."""
    import internvl_chat
    import test_families

    return [*test_families.FAMILIES, *test_families.SIMPLE, *test_families.BOTH_WAYS, internvl_chat.NAME]


def table(found: list[Found]) -> str:
    """The counts as Markdown: equal of all, by architecture, version of vLLM and model runner."""
    columns = sorted({(one.vllm, one.runner) for one in found})
    kept = {(one.architecture, one.vllm, one.runner): one for one in found}
    rows = [["architecture", *(f"{version}, runner V{runner}" for version, runner in columns)]]
    for name in ARCHITECTURES:
        row = [kept.get((name, *column)) for column in columns]
        rows.append([f"`{name}`", *("not run" if one is None else str(one) for one in row)])
    return markdown(rows)


def main() -> int:
    """Compare, print a table, and write it where it is asked for; exit status 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families of tiny models (default: all)")
    parser.add_argument("--second-runner", action="store_true", help="vLLM's model runner V2, its kernels interpreted")
    parser.add_argument("--out", type=Path, default=RESULTS, help="what is found (default: %(default)s)")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="Markdown page whose table is made anew")
    options = parser.parse_args()
    throughput.quiet()
    os.environ["VLLM_PLUGINS"] = "mmaccel"
    sys.path[:0] = [str(TESTS / "vllm_plugin"), str(TESTS)]
    version, runner = importlib.metadata.version("vllm"), 2 if options.second_runner else 1
    if options.second_runner:
        import second_runner

        second_runner.choose()
    state = (
        json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"done": {}, "versions": {}}
    )
    for family in tqdm(options.only or families()):
        key = f"{family}, vLLM {version}, V{runner}"
        if key in state["done"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            state["done"][key] = asdict(compare(family, Path(folder), runner))
        used = state["versions"].setdefault(version, {})
        for name in ("torch", "transformers", "mmaccel"):
            used[name] = provenance.also(used.get(name), importlib.metadata.version(name))
        options.out.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    found = [Found(**one) for one in state["done"].values()]
    about = "; ".join(
        f"vllm {number}, {', '.join(f'{name} {its}' for name, its in packages.items())}"
        for number, packages in sorted(state["versions"].items())
    )
    command = "OMP_NUM_THREADS=1 python benchmarks/serving/architectures.py --update docs/guides/serving.md"
    text = f"{table(found)}\n\n`{command}`, float32, CPU, {about}."
    print(text)
    if options.update is not None:
        put_between(options.update, "architectures", text)
    return int(not all(one.whole for one in found))


if __name__ == "__main__":
    sys.exit(main())
