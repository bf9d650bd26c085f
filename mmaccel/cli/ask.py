"""Ask a model about pictures or a video, in full and accelerated, and print both answers side by side.

PATH is one or more pictures, a video file, or a folder of frames in the order of their names. Without QUESTION, the command
asks for it on a terminal. Video files are read by PyAV or decord: pip install 'mmaccel[video]'. Weights are read from
safetensors only, and code that comes with a model is not run unless --trust-remote-code is given. Both runs are greedy and
are timed after a warm-up of a few tokens.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ..core.shipped_models import located, shipped_models
from ..errors import MmaccelError
from .shared.options import DecodeOptions, Frames, Json, Longest, ModelOptions, RecipeOptions
from .shared.text import json_file, nbytes, seconds, table, tell, working

if TYPE_CHECKING:
    from ..programs.model_lock import TokenTimer
    from ..recipe import Recipe

PLACE = 2
HELP = "ask about a picture or video, full against accelerated"
EXAMPLES = """\
examples:
  mmaccel ask --model ./my-llava photo.jpg "What is on the table?"
  mmaccel ask --model Qwen/Qwen2.5-VL-3B-Instruct --recipe divprune --retain 0.1 a.png b.png "What has changed?"
  mmaccel ask --model ./my-qwen --frames 32 clip.mp4 "What happens?" --json
  mmaccel ask --model Qwen/Qwen2.5-VL-7B-Instruct --lossless --draft Qwen/Qwen2.5-VL-3B-Instruct --lookup a.png "Read it."
"""

SHIPPED = Path(__file__).parent.parent / "models" / "mini-llava"
SHIPPED_VIDEO = SHIPPED.with_name("mini-qwen-vl")
#: what the small models were trained on, see training/
KNOWN = (
    "The small models know coloured shapes with characters on them, in pictures and clips, and nothing of photographs."
)


def run(
    which: ModelOptions,
    how: RecipeOptions,
    drafts: DecodeOptions,
    media: Annotated[
        list[str] | None, typer.Argument(metavar="PATH...", help="Pictures, or one video file or folder of frames.")
    ] = None,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question, in quotes.")] = "",
    max_new_tokens: Longest = 64,
    frames: Frames = 16,
    fps: Annotated[float, typer.Option(metavar="N", help="Frames a second in a folder of frames.")] = 1.0,
    output: Json = None,
) -> int:
    """Load, ask twice, print."""
    settings = drafts.arguments()
    shown, question = media_and_question(media or [], question)
    if not fps > 0:
        raise MmaccelError(f"--fps must be greater than 0, got {fps:g}.")
    json_file(output)
    from ..media.files import Prompt, encode, load_media

    with working("reading pictures or video") as bar:
        chosen = how.chosen()
        pictures, clip = load_media([Path(path) for path in shown], frames, fps)
    prompt = [Prompt(question or _question(), tuple(pictures), clip)]
    video = clip is not None
    model, processor = load_model(which, video)

    from ..accelerate import accelerated
    from ..media.prepare import prepare

    # what the processor would drop, a model that answers as the full one does must see
    prepared = processor if drafts.lossless else prepare(processor, chosen)
    with accelerated(model, chosen, processor=prepared, **settings):
        pass  # reports what the model does not support before the long run
    with working("answering in full and accelerated", 2) as bar:
        full = answer(model, processor, encode(processor, prompt), "none", max_new_tokens)
        bar.advance()
        small = encode(prepared, prompt)
        fast = answer(model, prepared, small, chosen, max_new_tokens, settings=settings)
    report = {
        "model": which.model or str(shipped(video)),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "question": prompt[0].question,
        "recipe": dataclasses.asdict(chosen),
        "agreement": agreement(full, fast),
        "full": full.public(),
        "accelerated": fast.public(),
    }
    tell(report, output, lambda: render(report))
    return 0


def media_and_question(media: list[str], question: str) -> tuple[list[str], str]:
    """Paths and the question, which comes last; on a terminal it may be left out, and is empty then. Raises MmaccelError if
    there is no path, or no question and no terminal to ask for it."""
    from ..media.files import is_media

    last = Path(question)
    try:
        # one word with the ending of a picture is a file that is not there, and no question
        named = bool(question.strip()) and is_media(last) and (last.exists() or " " not in question)
    except OSError:
        # longer than a path may be
        named = False
    if named:
        media, question = [*media, question], ""
    if question.strip():
        if not media:
            raise MmaccelError(
                "The picture or video is missing; give its path before the question, as in "
                f"mmaccel ask photo.jpg {question[:60]!r}."
            )
    elif not media or not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        what = f"The question is missing after {media[-1]!r}" if named else "The question is empty"
        what = what if media else "The picture or video and the question are missing"
        raise MmaccelError(f'{what}; write the question last and in quotes, such as "What is this?".')
    return media, question


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person types into a stream, or reads it."""
    return stream is not None and stream.isatty()


def _question() -> str:
    """The question that is typed when asked for."""
    print("Question: ", end="", file=sys.stderr, flush=True)
    question = sys.stdin.readline()
    if not question.strip():
        raise MmaccelError('The question is empty; type one, or write it last and in quotes, such as "What is this?".')
    return question.strip()


def shipped(video: bool = False) -> Path:
    """The folder of the model that comes with mmaccel, or of the one for videos. Raises MmaccelError if it is missing."""
    folder = SHIPPED_VIDEO if video else SHIPPED
    if not (folder / "config.json").is_file():
        what = "that takes videos " if video else ""
        raise MmaccelError(
            f"No model {what}comes with this mmaccel; give --model with a folder or a hub id such as "
            "Qwen/Qwen2.5-VL-3B-Instruct."
        )
    return folder


#: tokens that are generated before anything is measured
_WARM_UP = 4
#: figures of an answer that ``stats()`` counts
_COUNTED = ("visual_tokens", "visual_tokens_kept", "visual_tokens_per_layer", "kv_bytes")


# --------------------------------------------------------------------------------------------------------------- model


def load_model(which: Any, video: bool = False) -> tuple[Any, Any]:
    """Model and processor for options as in :class:`~mmaccel.cli.shared.options.ModelOptions`, see
    :func:`mmaccel.load`; by default a shipped model, for ``video`` if set."""
    name = which.model or str(shipped(video))
    # a download has progress bars of its own
    quiet = working(f"loading {name}") if Path(name).is_dir() else nullcontext()
    with quiet:
        from ..families.load import load

        options = ("device", "dtype", "attn", "trust_remote_code")
        return load(name, **{option: getattr(which, option) for option in options})


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
    #: ``[T]`` int64
    ids: Any
    #: ``[T, vocabulary]`` float32, of every step; None once they have been compared
    logits: Any

    def public(self) -> dict[str, Any]:
        """Without tensors."""
        return {k: v for k, v in vars(self).items() if k not in ("ids", "logits")}


def answer(
    model: Any,
    processor: Any,
    inputs: Any,
    recipe: str | Recipe,
    longest: int,
    watch: TokenTimer | None = None,
    after: Callable[[Any, Any], None] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Answer:
    """Generate with a recipe and measure. ``watch`` is the streamer; ``after`` is called with the model, still accelerated, and
    the output of ``generate``; ``settings`` are further arguments of ``accelerate_vlm``."""
    import torch

    from ..accelerate import accelerated
    from ..accelerate.positions import check_positions
    from ..programs.evaluate import memory_error
    from ..programs.model_lock import TokenTimer
    from ..recipe import get_recipe

    inputs = inputs.to(model.device, model.dtype)
    check_positions(model, get_recipe(recipe), inputs, longest)
    cuda = model.device.type == "cuda"
    watch = watch or TokenTimer()
    with torch.no_grad(), accelerated(model, recipe, processor=processor, **(settings or {})):
        with memory_error("give fewer --frames, a smaller picture, or --dtype bfloat16"):
            # kernels of decode steps are compiled when they first run
            steps = min(longest, _WARM_UP)
            model.generate(**inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
            model.mmaccel.drafts.forget()
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
        stats = model.mmaccel.stats()
        if after is not None:
            after(model, out)
    prompt = inputs["input_ids"].shape[1]
    ids = out.sequences[0, prompt:]
    return Answer(
        answer=processor.tokenizer.decode(ids, skip_special_tokens=True).strip(),
        prompt_tokens=prompt,
        new_tokens=len(ids),
        first_token_seconds=watch.times[1] - begin,
        total_seconds=total,
        tokens_per_second=watch.rate(),
        **{name: stats[name] for name in _COUNTED},
        peak_memory_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else None,
        stats=stats,
        ids=ids.cpu(),
        logits=torch.cat(out.logits).float().cpu(),
    )


def agreement(full: Answer, fast: Answer) -> dict[str, Any]:
    """Comparison of the accelerated answer with the full one.

    Returns
    -------
    Equal text; equal leading tokens; and ``kl``, KL(full || accelerated) of the distributions of new tokens in nats, the
    mean over the ``kl_tokens`` steps that both runs took behind the same text: those of the leading tokens and the one after
    them. A cache is first compressed behind the prompt, which the first step does not show.
    """
    import torch

    from ..programs.evaluate import divergence

    pairs = zip(full.ids.tolist(), fast.ids.tolist(), strict=False)
    shorter = min(len(full.ids), len(fast.ids))
    leading = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    steps = min(leading + 1, shorter)
    kl = divergence(full.logits[:steps, None], fast.logits[:steps, None], torch.tensor([steps]))
    return {
        "same_answer": full.answer == fast.answer,
        "same_leading_tokens": leading,
        "kl": float(kl),
        "kl_tokens": steps,
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
    if drafting := fast["stats"].get("drafting"):
        rows.append(["forwards behind the prompt", str(full["new_tokens"] - 1), str(drafting["verifications"]), ""])
        rows.append(["drafted tokens accepted", "", "{accepted} of {drafted}".format(**drafting), ""])
        rows.append(["tokens a verification", "1.00", f"{drafting['tokens_a_verification']:.2f}", ""])
    if fallback := fast["stats"].get("fallback"):
        taken = f"{fallback['reading'][0] + 1} of {len(fallback['readings'])}"
        rows.append(["answer of reading", "", taken, ""])
        rows.append(["certainty of the last judged", "", f"{fallback['certainty'][0]:.3f}", ""])
    add("KV cache", "kv_bytes", nbytes)
    add("peak memory", "peak_memory_bytes", nbytes)
    shown = Path(located(report["model"])) in shipped_models().values()
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
            f"agreement: {verdict}; {agree['same_leading_tokens']} leading tokens are the same; KL divergence "
            f"{agree['kl']:.4f} nats (mean; tokens compared: {agree['kl_tokens']})",
            *(f"note: {note}" for note in fast["stats"]["notes"]),
            *(["", f"{KNOWN} They are too small to gain time; --model MODEL asks yours."] if shown else []),
        ]
    )
