"""See it work, offline: a picture and a clip are made, the models that come with mmaccel are asked about them, in full and
accelerated, and answers, tokens, time and KV bytes are shown side by side.

The files, and a picture of which visual tokens were kept, stay in a temporary folder whose name is printed. The models are
small and trained on such pictures alone; expected answers are shown beside theirs, right or wrong.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from . import ask
from .shared.text import nbytes, seconds, table

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..media.files import Prompt
    from ..recipe import Recipe
    from ..suite import Turn

PLACE = 1
HELP = "see it work: a picture, a clip, the small models, full against accelerated"
EXAMPLES = """\
examples:
  mmaccel quickstart
  mmaccel quickstart --recipe vtc-cls --retain 0.1
  mmaccel quickstart --json
"""

_PIXELS, _FRAMES, _LONGEST = 112, 16, 16
#: pixels along a panel of the drawing
_SIDE = 336
_TASKS = ("colour", "shape", "count", "existence", "grounding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel quickstart``."""
    parser.add_argument("--recipe", default="balanced", help="recipe, method or JSON file (default: balanced)")
    parser.add_argument("--retain", type=ask.retain, help="share or number of visual tokens to keep")


def run(options: argparse.Namespace) -> int:
    """Make the files, ask, print."""
    from ..recipe import recipe

    chosen = recipe(options.recipe).override(**({} if options.retain is None else {"retain": options.retain}))
    chosen.build()
    begin = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="mmaccel-"))
    shows = [show(ask.shipped(), picture(folder / "picture.png"), chosen)]
    notes = []
    if not (ask.SHIPPED_VIDEO / "config.json").is_file():
        notes.append("no model that takes videos comes with this mmaccel, so there is no clip")
    elif find_spec("av") is None:
        notes.append("no clip was made, which needs PyAV: pip install 'mmaccel[video]'")
    else:
        shows.append(show(ask.shipped(video=True), clip(folder / "clip.mp4"), chosen))
    report = {
        "recipe": chosen.name,
        "retain": chosen.retain,
        "shows": shows,
        "notes": notes,
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


# --------------------------------------------------------------------------------------------------- what is asked about


def picture(path: Path) -> tuple[Path, list[Turn]]:
    """A picture, written to ``path``, and a question of every task about it."""
    from PIL import Image

    from ..suite import Dice, item_seed, render, sample_scene
    from ..suite.questions import PICTURE_TASKS

    pools: list[list[Turn]] = [[]]
    index = 0
    while not all(pools):  # a scene about which every task can ask
        dice = Dice(item_seed("test", index, stream=253))
        scene = sample_scene(dice)
        pools = [PICTURE_TASKS[task](scene, dice) for task in _TASKS]
        index += 1
    Image.fromarray(render(scene, _PIXELS)).save(path)
    return path, [dice.pick(pool) for pool in pools]


def clip(path: Path) -> tuple[Path, list[Turn]]:
    """A clip, written to ``path``, and questions about the order of what appears in it."""
    from ..suite import Dice, item_seed, render_clip, write_video
    from ..suite.clip import order

    made, index = None, 0
    while made is None:
        made = order(Dice(item_seed("test", index, stream=253)), _FRAMES)
        index += 1
    write_video(render_clip(made[0], _PIXELS), path, made[0].fps)
    return path, made[1]


# ------------------------------------------------------------------------------------------------------------ asking


def show(folder: Path, about: tuple[Path, list[Turn]], chosen: Recipe) -> dict[str, Any]:
    """Ask one model every question about one file in full and accelerated, and draw what was kept beside the file."""
    from ..media.files import Prompt, encode, load_media
    from ..media.prepare import prepare
    from ..suite import is_right

    path, turns = about
    options = argparse.Namespace(model=str(folder), device=None, dtype="auto", attn=None, trust_remote_code=False)
    model, processor = ask.load_model(options)
    prepared = prepare(processor, chosen)
    pictures, shown = load_media([path], _FRAMES, 1.0)
    asked, runs = [], []
    for turn in turns:
        prompt = [Prompt(turn.question, tuple(pictures), shown)]
        full = ask.answer(model, processor, encode(processor, prompt), "none", _LONGEST)
        fast = ask.answer(model, prepared, encode(prepared, prompt), chosen, _LONGEST)
        runs.append((full, fast))
        asked.append(
            {
                "question": turn.question,
                "expected": turn.answer,
                "full": full.answer,
                "accelerated": fast.answer,
                "full_right": is_right(full.answer, turn.answer),
                "accelerated_right": is_right(fast.answer, turn.answer),
            }
        )
    drawn = path.with_name(f"{path.stem}-kept.png")
    _kept(model, prepared, prompt[0], chosen).save(drawn)
    names = ("visual_tokens", "visual_tokens_kept", "first_token_seconds", "total_seconds", "kv_bytes")
    return {
        "model": folder.name,
        "device": str(model.device),
        "file": str(path),
        "kept": str(drawn),
        "questions": asked,
        # medians over the questions: the first one pays for what is made once
        **{
            which: {name: median(getattr(run[i], name) for run in runs) for name in names}
            for i, which in enumerate(("full", "accelerated"))
        },
    }


def _kept(model: Any, processor: Any, prompt: Prompt, chosen: Recipe) -> Image:
    """What the recipe keeps of the prompt's picture, or of every slice of its clip, side by side under the original."""
    import torch
    from PIL import Image

    from ..accelerate import accelerated
    from ..media.draw import kept
    from ..media.files import encode

    inputs = encode(processor, [prompt]).to(model.device, model.dtype)
    with torch.inference_mode(), accelerated(model, chosen, processor=processor):
        model(**inputs)
        layout, reduction = model.mmaccel.layout, model.mmaccel.reduction
    frames = list(prompt.pictures) if prompt.clip is None else [Image.fromarray(frame) for frame in prompt.clip.frames]
    slices = 1 if layout is None else layout.segments[0].tile.grid[0]
    side = _SIDE if slices == 1 else _SIDE // 2
    sheet = Image.new("RGB", (slices * (side + 4) - 4, 2 * side + 4), "white")
    for number in range(slices):
        frame = frames[number * len(frames) // slices].resize((side, side), Image.Resampling.LANCZOS)
        sheet.paste(frame, (number * (side + 4), 0))
        if layout is not None and reduction is not None:
            frame = kept(frame, layout.segments[0], reduction, number)
        sheet.paste(frame, (number * (side + 4), side + 4))
    return sheet


# ---------------------------------------------------------------------------------------------------------- printing


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    name = report["recipe"] + ("" if report["retain"] is None else f" {report['retain']:g}")
    lines: list[str] = []
    for one in report["shows"]:
        rows = [["question", "expected", "full", "", name, ""]]
        for asked in one["questions"]:
            marks = ["right" if asked[f"{which}_right"] else "wrong" for which in ("full", "accelerated")]
            rows.append([asked["question"], asked["expected"], asked["full"], marks[0], asked["accelerated"], marks[1]])
        full, fast = one["full"], one["accelerated"]
        figures = [["median of the questions", "full", name, ""]]
        for title, key, form in (
            ("visual tokens", "visual_tokens_kept", lambda x: f"{x:.0f}"),
            ("time to first token", "first_token_seconds", seconds),
            ("total time", "total_seconds", seconds),
            ("KV cache", "kv_bytes", nbytes),
        ):
            figures.append([title, form(full[key]), form(fast[key]), f"{full[key] / fast[key]:.1f}x"])
        lines += [
            f"{one['model']} on {one['device']}, asked about {one['file']}",
            "",
            table(rows),
            "",
            table(figures, numbers=(1, 2, 3)),
            "",
            f"what {name} kept is drawn in {one['kept']}",
            "",
        ]
    lines += [f"({note})" for note in report["notes"]]
    return "\n".join(
        [*lines, f'{report["seconds"]:.0f} s in all. Next: mmaccel ask --model YOUR_MODEL photo.jpg "..."']
    )
