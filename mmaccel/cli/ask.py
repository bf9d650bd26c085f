"""Ask a model about pictures or a video, in full and accelerated, and print both side by side.

PATH is one or more pictures, a video file, or a folder of frames (taken in the order of their names). Weights are read from
safetensors only, and code that comes with a model is not run unless --trust-remote-code is given. Both runs are greedy and
are timed after a warm-up of a few tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MmaccelError, no_json, short_int
from ..families import load
from .shared.text import nbytes, seconds, table

if TYPE_CHECKING:
    from ..recipe import Recipe

PLACE = 2
HELP = "ask about a picture or video, full against accelerated"
EXAMPLES = """\
examples:
  mmaccel ask --model ./my-llava photo.jpg "What is on the table?"
  mmaccel ask --model Qwen/Qwen2.5-VL-3B-Instruct --recipe divprune --retain 0.1 a.png b.png "What has changed?"
  mmaccel ask --model ./my-qwen --frames 32 clip.mp4 "What happens?" --json
"""

SHIPPED = Path(__file__).parent.parent / "models" / "mini-llava"
SHIPPED_VIDEO = SHIPPED.with_name("mini-qwen-vl")


def retain(text: str) -> float:
    """A budget from the command line: digits alone are a count, anything else a ratio."""
    try:
        return short_int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no budget; give a ratio such as 0.25 or a count such as 64"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mmaccel ask``."""
    parser.add_argument("media", nargs="+", metavar="PATH", help="pictures, or one video file or folder of frames")
    parser.add_argument("question", help="the question, in quotes")
    add_model_arguments(parser)
    parser.add_argument("--recipe", default="balanced", help="recipe, method or JSON file (default: balanced)")
    parser.add_argument(
        "--retain", type=retain, help="0.25: share of visual tokens to keep; 64: their number a picture"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="another option of the recipe, e.g. layer=3"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument("--frames", type=int, default=16, help="frames to show of a video, evenly spaced (default: 16)")
    parser.add_argument("--fps", type=float, default=1.0, help="frames a second in a folder of frames (default: 1)")


def shipped(video: bool = False) -> Path:
    """The folder of the model that comes with mmaccel, one that takes videos too if asked.

    Raises
    ------
    MmaccelError
        If there is none.
    """
    folder = SHIPPED_VIDEO if video else SHIPPED
    if not (folder / "config.json").is_file():
        what = "that takes videos " if video else ""
        raise MmaccelError(
            f"No model {what}comes with this mmaccel; give --model with a folder or a hub id such as "
            "Qwen/Qwen2.5-VL-3B-Instruct."
        )
    return folder


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that :func:`load_model` reads."""
    shipped = " (default: the small one that comes with mmaccel)" if SHIPPED.is_dir() else ""
    parser.add_argument("--model", metavar="MODEL", help=f"folder or hub id of the model{shipped}")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights (default: as stored, on the CPU float32)",
    )
    parser.add_argument("--attn", choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3"), help="attention")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(options: argparse.Namespace) -> int:
    """Load, ask twice, print."""
    if not options.question.strip():
        raise MmaccelError('The question is empty; write it last and in quotes, such as "What is this?".')
    if options.max_new_tokens < 1 or options.frames < 1 or options.fps <= 0:
        raise MmaccelError("--max-new-tokens and --frames must be 1 or more, and --fps above 0.")
    changes = overrides(options)
    from ..media.files import Prompt, encode, load_media
    from ..recipe import recipe

    chosen = recipe(options.recipe).override(**changes)
    chosen.build()
    pictures, clip = load_media([Path(path) for path in options.media], options.frames, options.fps)
    prompt = [Prompt(options.question, tuple(pictures), clip)]
    model, processor = load_model(options)

    from ..accelerate import accelerated
    from ..media.prepare import prepare

    prepared = prepare(processor, chosen)
    with accelerated(model, chosen, processor=prepared):
        pass  # what the model cannot do is said before the long run, not after it
    full = answer(model, processor, encode(processor, prompt), "none", options.max_new_tokens)
    small = encode(prepared, prompt)
    fast = answer(model, prepared, small, chosen, options.max_new_tokens)
    report = {
        "model": str(options.model or SHIPPED),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "question": options.question,
        "recipe": dataclasses.asdict(chosen),
        "agreement": agreement(full, fast),
        "full": full.public(),
        "accelerated": fast.public(),
    }
    print(json.dumps(report, indent=2, default=str) if options.json else render(report))
    return 0


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """What ``--retain`` and ``--set`` say, as changes of a recipe."""
    found: dict[str, Any] = {} if options.retain is None else {"retain": options.retain}
    for text in options.set:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise MmaccelError(f"--set {text!r} is no option; write OPTION=VALUE, such as --set layer=3.")
        try:
            found[key] = json.loads(value, parse_int=short_int)
        except json.JSONDecodeError:
            found[key] = value
        except (ValueError, RecursionError) as error:
            raise MmaccelError(
                f"--set {key}: the value cannot be read ({no_json(error)}); give a shorter one."
            ) from error
        if isinstance(found[key], list):
            found[key] = tuple(found[key])
    return found


#: tokens that are generated before anything is measured
_WARM_UP = 4
#: intervals between tokens from which a rate is told
_INTERVALS = 3


# --------------------------------------------------------------------------------------------------------------- model


def load_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and processor, as :func:`mmaccel.families.load.load_model` gives them."""
    return load.load_model(
        options.model or str(shipped()),
        device=options.device,
        dtype=options.dtype,
        attn=options.attn,
        trust_remote_code=options.trust_remote_code,
    )


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclasses.dataclass
class Answer:
    """One run. Seconds count from the call of ``generate``, the vision tower included."""

    answer: str
    prompt_tokens: int
    visual_tokens: int
    visual_tokens_kept: int
    visual_tokens_per_layer: float
    new_tokens: int
    first_token_seconds: float
    total_seconds: float
    tokens_per_second: float | None
    kv_bytes: int
    peak_memory_bytes: int | None
    stats: dict[str, Any]
    ids: Any
    first_logits: Any

    def public(self) -> dict[str, Any]:
        """Without tensors."""
        return {k: v for k, v in vars(self).items() if k not in ("ids", "first_logits")}


class Watch:
    """A streamer that notes when tokens arrive. The first thing it is given is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Tokens on the CPU: the device has finished them."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    def rate(self) -> float | None:
        """Tokens a second behind the first; None of so few that one of them would decide."""
        intervals = len(self.times) - 2
        return intervals / (self.times[-1] - self.times[1]) if intervals >= _INTERVALS else None


def answer(
    model: Any,
    processor: Any,
    inputs: Any,
    recipe: str | Recipe,
    longest: int,
    watch: Watch | None = None,
    after: Callable[[Any, Any], None] | None = None,
) -> Answer:
    """Generate with a recipe and measure. ``watch`` is given the tokens as they come; ``after`` the model, while it still has
    the recipe, and what ``generate`` returned."""
    import torch

    from ..accelerate import accelerated

    inputs = inputs.to(model.device)
    floats = {k: v.to(model.dtype) for k, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
    inputs = {**inputs, **floats}
    cuda = model.device.type == "cuda"
    watch = watch or Watch()
    with torch.no_grad(), accelerated(model, recipe, processor=processor):
        try:
            # steps behind the prompt too: their kernels are compiled when they first run
            steps = min(longest, _WARM_UP)
            model.generate(**inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
            if cuda:
                torch.cuda.synchronize(model.device)
                torch.cuda.reset_peak_memory_stats(model.device)
            begin = time.perf_counter()
            out = model.generate(
                **inputs,
                max_new_tokens=longest,
                do_sample=False,
                streamer=watch,
                return_dict_in_generate=True,
                output_logits=True,
            )
            total = time.perf_counter() - begin
        except torch.OutOfMemoryError as error:
            raise MmaccelError(
                "The device ran out of memory; give fewer --frames, a smaller picture, or --dtype bfloat16."
            ) from error
        stats = model.mmaccel.stats()
        if after is not None:
            after(model, out)
    prompt = inputs["input_ids"].shape[1]
    ids = out.sequences[0, prompt:]
    first = watch.times[1] - begin
    return Answer(
        answer=processor.tokenizer.decode(ids, skip_special_tokens=True).strip(),
        prompt_tokens=prompt,
        visual_tokens=stats["visual_tokens"],
        visual_tokens_kept=stats["visual_tokens_kept"],
        visual_tokens_per_layer=stats["visual_tokens_per_layer"],
        new_tokens=len(ids),
        first_token_seconds=first,
        total_seconds=total,
        tokens_per_second=watch.rate(),
        kv_bytes=stats["kv_bytes"],
        peak_memory_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else None,
        stats=stats,
        ids=ids.cpu(),
        first_logits=out.logits[0][0].float().cpu(),
    )


def agreement(full: Answer, fast: Answer) -> dict[str, Any]:
    """How near the accelerated answer is to the full one: equal text, equal leading tokens, and the KL divergence of the
    distribution of the first new token (nats), the only one that both runs condition on the same text."""
    from torch.nn.functional import kl_div

    pairs = zip(full.ids.tolist(), fast.ids.tolist(), strict=False)
    leading = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(full.ids), len(fast.ids)))
    p, q = full.first_logits.log_softmax(-1), fast.first_logits.log_softmax(-1)
    return {
        "same_answer": full.answer == fast.answer,
        "same_leading_tokens": leading,
        "kl_first_token": max(0.0, float(kl_div(q, p, reduction="sum", log_target=True))),
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    full, fast, agree = report["full"], report["accelerated"], report["agreement"]
    rows = [["", "full", report["recipe"]["name"], ""]]

    def add(name: str, key: str, show: Any, ratio: bool = True) -> None:
        a, b = full[key], fast[key]
        if a is not None and b is not None:
            rows.append([name, show(a), show(b), f"{a / b:.2f}x" if ratio and b else ""])

    add("prompt tokens", "prompt_tokens", str, False)
    add("visual tokens in", "visual_tokens", str, False)
    add("visual tokens kept", "visual_tokens_kept", str, False)
    add("time to first token", "first_token_seconds", seconds)
    add("total time", "total_seconds", seconds)
    add("new tokens", "new_tokens", str, False)
    rates = [full["tokens_per_second"], fast["tokens_per_second"]]
    if None not in rates:
        rows.append(["tokens per second", *(f"{r:.1f}" for r in rates), f"{rates[1] / rates[0]:.2f}x"])
    add("KV cache", "kv_bytes", nbytes)
    add("peak memory", "peak_memory_bytes", nbytes)
    verdict = "the answers are equal" if agree["same_answer"] else "the answers differ"
    return "\n".join(
        [
            f"{report['model']} on {report['device']}, {report['dtype']}",
            "",
            f"full:  {full['answer']}",
            f"{report['recipe']['name']}:  {fast['answer']}",
            "",
            table(rows, numbers=(1, 2, 3)),
            "",
            f"agreement: {verdict}; {agree['same_leading_tokens']} leading tokens are the same; KL divergence of the first "
            f"token {agree['kl_first_token']:.4f} nats",
        ]
    )
