"""Show speed, answers and kept tokens on this machine, offline, in about a minute.

Speed is measured on a model with random weights and about 2,000 visual tokens: the largest known one that fits on the GPU, or
on a CPU a language model of 38 million weights. Answers are those of the small models that come with mmaccel, which know only
coloured shapes; every answer that changes is listed. A picture, a clip, and drawings of their kept tokens are written to a
temporary folder.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ask
from .shared.options import STDOUT, Json, ModelOptions, RecipeOptions
from .shared.text import json_file, nbytes, seconds, table, tell, working

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from ..media.files import Prompt
    from ..programs.bench.run import Case
    from ..programs.bench.workloads import Subject
    from ..recipe import Recipe

PLACE = 1
HELP = "see it work: speed, answers and what is kept, bare against accelerated"
EXAMPLES = """\
examples:
  mmaccel quickstart
  mmaccel quickstart --recipe divprune --retain 0.1
  mmaccel quickstart --json
"""

_PIXELS, _FRAMES, _LONGEST = 112, 16, 16
#: pixels along a side of a panel of the drawing
_SIDE = 336
#: the share of about 2,000 visual tokens that is kept where speed is shown, unless --retain is given
_LARGE = 0.1
#: pairs of runs
_PAIRS = 3
#: questions of every task, to the model for pictures and to the one for clips
_EACH, _EACH_CLIP = 4, 2
_NEXT = """\
4. Next, with a model of your own, a folder or a hub id:
   mmaccel ask --model Qwen/Qwen2.5-VL-3B-Instruct photo.jpg "What is on the table?"
   mmaccel eval --model ./my-model --retain 0.5 0.25 0.1 --data questions.jsonl"""

Say = Callable[..., None]


def run(how: RecipeOptions, output: Json = None) -> int:
    """Show speed, answers and drawings."""
    begin = time.perf_counter()
    json_file(output)

    def say(*lines: str) -> None:
        if output != STDOUT:
            print(*lines, sep="\n", flush=True)

    say("mmaccel quickstart: speed, answers, what is kept, and next steps; about a minute on two cores.")
    with working("loading torch and transformers"):
        chosen = how.chosen()
        from ..programs import evaluate  # noqa: F401
    large = chosen if how.retain is not None or chosen.primary is None else chosen.override(retain=_LARGE)
    report: dict[str, Any] = {"recipe": chosen.name, "retain": chosen.retain, "speed": speed(large, say)}
    say("", f"2. Answers: what {_titled(chosen)} changes in the models that come with mmaccel.", f"   {ask.KNOWN}")
    models = [(model, *ask.load_model(ModelOptions(model=str(model)))) for model in _models(say)]
    report["answers"] = [answers(*one, chosen, say) for one in models]
    folder = Path(tempfile.mkdtemp(prefix="mmaccel-"))
    say("", f"3. What {_titled(chosen)} keeps of a picture and of a clip:")
    report["drawings"] = [drawing(*one, chosen, folder, say) for one in models]
    report["seconds"] = time.perf_counter() - begin
    say("", _NEXT)
    tell(report, output, lambda: f"\n{report['seconds']:.0f} s in all.")
    return 0


def _titled(chosen: Recipe) -> str:
    return chosen.name if chosen.retain is None else f"{chosen.name} {chosen.retain:g}"


def _models(say: Say) -> list[Path]:
    """The shipped models that can be shown here: the one for pictures, and the one for clips."""
    folders = [ask.shipped()]
    if not (ask.SHIPPED_VIDEO / "config.json").is_file():
        say("   (No model that takes videos comes with this mmaccel, so there is no clip.)")
    elif find_spec("av") is None:
        say("   (Clips need PyAV: pip install 'mmaccel[video]'.)")
    else:
        folders.append(ask.shipped(video=True))
    return folders


# ------------------------------------------------------------------------------------------------------------ 1. speed


def speed(chosen: Recipe, say: Say) -> dict[str, Any]:
    """Time to the first token of a model with random weights, bare and accelerated in turn, and the bytes of its cache."""
    from ..errors import UnsupportedError
    from ..families.load import place
    from ..programs.bench.figures import ratios
    from ..programs.bench.run import Bench, Case, Variant
    from ..programs.bench.shapes import count_parameters

    with working("making a model with random weights"):
        subject, case, name = _workload(place())
    model = subject.model
    weights = count_parameters(model)
    say(
        "",
        f"1. Speed: {name}, {weights / 1e6:,.0f} million random weights, on {_machine(model.device)};",
        f"   {_PAIRS} pairs of runs, bare and {_titled(chosen)} in turn ...",
    )
    bench = Bench(subject, _PAIRS)
    bare, fast = Variant("bare"), Variant(_titled(chosen), chosen)
    with working("runs", 2 * _PAIRS) as bar:
        try:
            # a first run loads libraries and kernels; on a CPU a small one is enough
            for variant in (fast, bare):
                bench.once(case if model.device.type == "cuda" else Case("picture-336", 1, 1), variant)
            for _ in range(_PAIRS):
                for variant in (bare, fast):
                    variant.samples.append(bench.once(case, variant))
                    bar.advance()
        except UnsupportedError as error:
            say(f"   Not shown: {error}")
            return {"workload": name, "problem": str(error)}
    gain = ratios([one.ttft for one in bare.samples], [one.ttft for one in fast.samples])
    stats = fast.samples[-1].stats
    report = {
        "workload": name,
        "parameters": weights,
        "device": str(model.device),
        "recipe": _titled(chosen),
        "visual_tokens": stats["visual_tokens"],
        "visual_tokens_kept": stats["visual_tokens_kept"],
        "first_token_seconds": {one.title: [sample.ttft for sample in one.samples] for one in (bare, fast)},
        "kv_bytes": {one.title: one.samples[-1].kv for one in (bare, fast)},
        "speedup": gain.as_dict(),
        "notes": stats["notes"],
    }
    say("", *(f"   {line}" for line in _speeds(report).splitlines()), *(f"   note: {note}" for note in stats["notes"]))
    return report


def _workload(device: torch.device) -> tuple[Subject, Case, str]:
    """A model with random weights on a device, about 2,000 visual tokens for it, and a description."""
    import torch

    from ..programs.bench.run import Case
    from ..programs.bench.shapes import build, largest, shape, thin_tower
    from ..programs.bench.workloads import ShapeSubject

    if device.type == "cuda" and (name := largest(device, torch.bfloat16)) is not None:
        model = build(name, device, torch.bfloat16)
        return ShapeSubject(model, shape(name)), Case("tiles-2880", 1, 1), f"{name} on a large picture"
    plan = shape("small")
    # a thin tower: most of the work is the language model's
    model = build("small", device, torch.float32, thin_tower(plan.config()))
    return ShapeSubject(model, plan), Case("pictures-8", 1, 1), "a mid-size language model on 8 pictures"


def _machine(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU ({threads} thread{'s' * (threads > 1)} of {os.cpu_count()} cores)"


def _speeds(report: dict[str, Any]) -> str:
    from ..programs.bench.figures import Spread

    (bare, full), (name, fast) = ((n, Spread(tuple(s))) for n, s in report["first_token_seconds"].items())
    gain, kv = Spread.of(report["speedup"]), report["kv_bytes"]
    tokens, kept = report["visual_tokens"], report["visual_tokens_kept"]
    first = [f"{seconds(one.median)} ±{one.notch / one.median:.0%}" for one in (full, fast)]
    rows = [
        ["", bare, name, ""],
        ["visual tokens", f"{tokens:,}", f"{kept:,}", f"{kept / tokens:.0%}"],
        ["first token", *first, f"{gain.median:.1f} times as fast ±{gain.notch:.1f}"],
        ["KV cache", nbytes(kv[bare]), nbytes(kv[name]), f"{kv[bare] / kv[name]:.1f} times smaller"],
    ]
    return table(rows, numbers=(1, 2))


# ---------------------------------------------------------------------------------------------------------- 2. answers


def answers(folder: Path, model: Any, processor: Any, chosen: Recipe, say: Say) -> dict[str, Any]:
    """Correct answers of a model on the suite, in full and accelerated, and the answers that change."""
    from ..programs.evaluate import Row, ask_suite, evaluate
    from ..suite import IMAGE_TASKS, VIDEO_TASKS

    # a question of "turns" depends on earlier ones
    tasks = VIDEO_TASKS if folder == ask.SHIPPED_VIDEO else tuple(task for task in IMAGE_TASKS if task != "turns")
    asked = ask_suite(tasks, _EACH_CLIP if tasks == VIDEO_TASKS else _EACH, frames=_FRAMES, pixels=_PIXELS)
    rows, said = [Row("none"), Row(chosen)], {}
    with working(f"asking {folder.name}", 2 * len(asked)) as bar:
        for row, batch in evaluate(model, processor, asked, rows, batch_size=_EACH, max_new_tokens=_LONGEST):
            said.update({(one.name, row is rows[1]): one for one in batch})
            bar.advance(len(batch))
    pairs = [(one.load().question, said[one.name, False], said[one.name, True]) for one in asked]
    figures = rows[1].figures()
    report = {
        "model": folder.name,
        "questions": len(pairs),
        "full_right": sum(bool(full.right) for _, full, _ in pairs),
        "accelerated_right": sum(bool(fast.right) for _, _, fast in pairs),
        "visual_tokens": figures["visual_tokens"],
        "visual_tokens_kept": figures["visual_tokens_kept"],
        "kv_share": figures["kv_share"],
        "changed": [
            {"task": full.task, "question": question, "expected": full.expected, "full": full.answer}
            | {"accelerated": fast.answer, "lost": bool(full.right)}
            for question, full, fast in pairs
            if full.right != fast.right
        ],
    }
    say("", *(f"   {line}" for line in _answered(report)))
    return report


def _answered(report: dict[str, Any]) -> list[str]:
    count, kept, tokens = report["questions"], report["visual_tokens_kept"], report["visual_tokens"]
    lines = [
        f"{report['model']}: {report['full_right']} of {count} right in full, {report['accelerated_right']} of {count} "
        f"accelerated, with {kept:.0f} of {tokens:.0f} visual tokens and {report['kv_share']:.0%} of the KV cache."
    ]
    for one in report["changed"]:
        what = "lost" if one["lost"] else "won"
        answers = f"{one['expected']!r} is right, in full {one['full']!r}, accelerated {one['accelerated']!r}"
        lines.append(f"  {what}: {one['question']} ({answers})")
    return lines


# ------------------------------------------------------------------------------------------------------ 3. what is kept


def drawing(folder: Path, model: Any, processor: Any, chosen: Recipe, target: Path, say: Say) -> dict[str, str]:
    """A picture or clip and what the recipe keeps of it, as files in the folder ``target``, and a question about it."""
    from PIL import Image

    from ..media.files import Prompt, load_media
    from ..media.prepare import prepare
    from ..suite import make_item, render_clip, write_video

    video = folder == ask.SHIPPED_VIDEO
    item = make_item("order" if video else "colour", "test", 0, frames=_FRAMES)
    question, path = item.turns[-1].question, target / ("clip.mp4" if video else "picture.png")
    if item.clip is not None:
        write_video(render_clip(item.clip, _PIXELS), path, item.clip.fps)
    else:
        Image.fromarray(item.pictures(_PIXELS)[0]).save(path)
    pictures, shown = load_media([path], _FRAMES, 1.0)
    drawn = path.with_name(f"{path.stem}-kept.png")
    prompt = Prompt(question, tuple(pictures), shown)
    _kept(model, prepare(processor, chosen), prompt, chosen).save(drawn)
    say(f"   {drawn}", f'      ask about it: mmaccel ask {path} "{question}"')
    return {"model": folder.name, "file": str(path), "kept": str(drawn), "question": question}


def _kept(model: Any, processor: Any, prompt: Prompt, chosen: Recipe) -> Image.Image:
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
