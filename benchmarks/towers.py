"""What do methods on pixels, in front of and inside the vision tower save in it?

A vision tower with the layers of Qwen2.5-VL-7B's (four of its 32, random weights) reads a drawn page of text, a page of noise,
of which nothing can be predicted, and a clip of a still scene in which a square moves. Counted are the patches that a layer of
the tower computes, timed is the whole call on a language model that is next to nothing. Seconds are those of the process, all
threads together, so that other processes on the machine do not count; those of a choice in the call are of a clock on the wall.
Methods on pixels keep a quarter of a page, and choose before the call; CLIP is as large as ViT-B-32, its weights random.

    python benchmarks/towers.py --threads 1 --out benchmarks/results/towers-cpu.json --update benchmarks/README.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mmaccel import accelerated
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.frames.clip import FrameEncoder
from mmaccel.method import FramesMethod, PatchMethod, ReuseMethod
from mmaccel.method.registry import methods
from mmaccel.programs.bench import provenance

#: pixels of a patch, patches along a side of a token, frames of a step in time
PATCH, MERGE, STEP = 14, 2, 2
#: height and width of a page and of a frame in pixels, frames of the clip
PAGE, FRAME, FRAMES = (616, 448), (224, 224), 12
START, END, PICTURE, CLIP = 1, 2, 3, 4
WORDS = "the quick brown fox jumps over the lazy dog and reads what is written on a page of text".split()


def tower(layers: int) -> Qwen2_5_VLForConditionalGeneration:
    """A model whose tower is as wide as that of Qwen2.5-VL-7B."""
    torch.manual_seed(0)
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }
    vision = {"depth": layers, "out_hidden_size": 64, "fullatt_block_indexes": [layers - 1], "hidden_size": 1280}
    vision |= {"intermediate_size": 3420, "num_heads": 16}
    tokens = {"vision_start_token_id": START, "vision_end_token_id": END}
    tokens |= {"image_token_id": PICTURE, "video_token_id": CLIP}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)).eval()


def page() -> np.ndarray:
    """``[H, W, 3]`` uint8: lines of text on white."""
    made = Image.new("RGB", PAGE[::-1], "white")
    draw, random = ImageDraw.Draw(made), np.random.default_rng(0)
    for row in range(40, PAGE[0] - 40, 28):
        words = " ".join(random.choice(WORDS, random.integers(3, 11)))
        draw.text((30, row), words[:60], fill="black")
    return np.asarray(made)


def noise() -> np.ndarray:
    """``[H, W, 3]`` uint8."""
    return np.random.default_rng(0).integers(0, 256, (*PAGE, 3), dtype=np.uint8)


def scene() -> np.ndarray:
    """``[T, H, W, 3]`` uint8: noise of a camera on a still picture, and a square that moves."""
    random = np.random.default_rng(0)
    still = np.repeat(np.repeat(random.integers(0, 256, (14, 14, 3)), FRAME[0] // 14, 0), FRAME[1] // 14, 1)
    frames = still + random.normal(0, 3, (FRAMES, *FRAME, 3))
    for number, frame in enumerate(frames):
        frame[60:100, 10 * number : 10 * number + 40] = (255, 40, 40)
    return frames.clip(0, 255).astype(np.uint8)


def feed(frames: np.ndarray) -> dict[str, Tensor]:
    """``[H, W, 3]`` or ``[T, H, W, 3]`` uint8 as the processor hands it over, behind a start and in front of an end."""
    clip = frames.ndim == 4
    x = (
        torch.from_numpy(np.array(frames if clip else frames[None].repeat(STEP, 0))).permute(0, 3, 1, 2).float() / 127.5
        - 1
    )
    t, colours, h, w = x.shape
    side = MERGE * PATCH
    x = x.view(t // STEP, STEP, colours, h // side, MERGE, PATCH, w // side, MERGE, PATCH)
    rows = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, colours * STEP * PATCH**2)
    grid = torch.tensor([[t // STEP, h // PATCH, w // PATCH]])
    ids = torch.tensor([[START, *[CLIP if clip else PICTURE] * (len(rows) // MERGE**2), END, 9, 9]])
    kinds = (ids == PICTURE).long() + 2 * (ids == CLIP).long()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    names = ("pixel_values_videos", "video_grid_thw") if clip else ("pixel_values", "image_grid_thw")
    return given | dict(zip(names, (rows, grid), strict=True))


def smaller(name: str, pixels: np.ndarray) -> tuple[np.ndarray, float]:
    """A quarter of a page ``[H, W, 3]`` uint8 as a method on pixels chooses it, its sides rounded as the processor does, and
    the seconds of the choice."""
    kind, options = methods()[name], {}
    if "clip_model" in {one.name for one in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        options = {"clip_model": "ViT-B-32", "query": "the lazy dog"}
    method: Any = kind(**options)
    start = time.process_time()
    made = method.picture(Image.fromarray(pixels), 0.25)
    seconds, side = time.process_time() - start, MERGE * PATCH
    return np.asarray(made.resize([max(side, round(x / side) * side) for x in made.size])), seconds


def clip() -> FrameEncoder:
    """A CLIP model that was not trained."""
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms("ViT-B-32")
    made = FrameEncoder(model.eval(), transform, open_clip.get_tokenizer("ViT-B-32"), torch.device("cpu"))
    # warmed up
    made.frames([page()])
    return made


def figures(model: Any, given: dict[str, Tensor], name: str, runs: int) -> dict[str, float]:
    """Patches in and computed, and seconds of the whole call and of the choice."""
    taken, chosen, computed, rows = [], [], 0, next(len(x) for key, x in given.items() if key.startswith("pixel"))

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal computed
        hidden = args[0] if args else kwargs["hidden_states"]
        computed += hidden.shape[:-1].numel()

    with accelerated(model, name):
        # of the last layer, in which every patch that the tower computes goes through the MLP
        handle = model.model.visual.blocks[-1].mlp.register_forward_pre_hook(count, with_kwargs=True)
        for _ in range(runs + 1):
            computed, start = 0, time.process_time()
            model(**given)
            taken.append(time.process_time() - start)
            chosen.append(model.mmaccel.stats().seconds.get("selection", 0.0))
        handle.remove()
    # the first is a warm-up
    return {
        "patches": rows,
        "computed": computed,
        "seconds": statistics.median(taken[1:]),
        "selection_s": statistics.median(chosen[1:]),
    }


def table(report: dict[str, Any]) -> str:
    """The rows, and what they were measured on."""
    head = ["content", "method", "patches", "computed", "seconds", "of the bare model", "of which selection"]
    rows = [
        [
            row["content"],
            row["method"],
            f"{row['patches']:,}",
            f"{row['computed']:,} ({row['computed'] / row['patches']:.0%})",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / row['bare_s']:.0%}",
            f"{row['selection_s'] * 1e3:.1f} ms",
        ]
        for row in report["rows"]
    ]
    return (
        f"{report['layers']} layers of the vision tower of Qwen2.5-VL-7B on {report['machine']} (threads: {report['threads']}, "
        f"float32), {report['date']}, torch {report['versions']['torch']}, runs: {report['runs']}. Made by "
        f"`{report['command']}`.\n\n{markdown([head, *rows])}"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of the tower; default: 4")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, default=None, help="write the table between the marks of this page")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = tower(args.layers)
    known = {name: kind for name, kind in methods().items() if kind.__module__.startswith("mmaccel.")}
    pictures = [name for name, kind in known.items() if issubclass(kind, PatchMethod)]
    pixelwise = [name for name, kind in known.items() if issubclass(kind, FramesMethod) and not kind.only_chooses]
    encoder = clip()
    FrameEncoder.load = staticmethod(lambda name: encoder)  # type: ignore[method-assign, assignment]
    clips = [*pictures, *(name for name, kind in known.items() if issubclass(kind, ReuseMethod))]
    rows = []
    for content, pixels, names in (
        ("page of text", page(), [*pictures, *pixelwise]),
        ("page of noise", noise(), pictures),
        ("clip of a still scene", scene(), clips),
    ):
        given, bare = feed(pixels), None
        for name in ("none", *names):
            if issubclass(known.get(name, type(None)), FramesMethod):
                small, chosen = smaller(name, pixels)
                made = figures(model, feed(small), "none", args.runs)
                made |= {"patches": rows[-1]["patches"], "selection_s": chosen}
            else:
                made = figures(model, given, name, args.runs)
            bare = made["seconds"] if bare is None else bare
            rows.append({"content": content, "method": name, **made, "bare_s": bare})
            print(rows[-1], flush=True)
    report = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": f"a CPU ({provenance.processor()})",
        "threads": torch.get_num_threads(),
        "versions": provenance.versions(),
        "layers": args.layers,
        "runs": args.runs,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.update:
        put_between(args.update, "towers", table(report))


if __name__ == "__main__":
    main()
