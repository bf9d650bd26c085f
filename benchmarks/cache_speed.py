"""Does a recipe for the KV cache make the first token later, or a decode step slower?

Builds a LLaVA with the text model of SmolLM2-135M (30 layers, float32, random weights, whose speed is that of trained ones) and
a vision tower too small to matter, and asks it about one picture of 576 tokens: once bare, once with a recipe. Both answer at
the same time and take turns, after every layer of the prompt and after every token, so that other programs on the machine
disturb both alike. Seconds are CPU seconds of the thread that answers. Figures are those of the recipe over those of the bare
model, a pair for every repeat: `first` the prompt up to the first token, `step` the mean decode step of the answer, what is
evicted or packed in it included.

    python benchmarks/cache_speed.py --out benchmarks/results/cache-speed-cpu.json --update benchmarks/README.md
    python benchmarks/cache_speed.py --recipe h2o-decode quest "kivi bits=4" --repeats 5
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from mmaccel import Recipe, accelerated, get_recipe, recipes
from mmaccel.cli.shared.text import markdown, put_between
from mmaccel.errors import UnsupportedError
from mmaccel.programs.bench import provenance
from mmaccel.programs.bench.figures import Spread, ratios

IMAGE_TOKEN = 9
#: a first token, and a step, may take so many times the bare one's
FIRST, STEP = 1.08, 1.05


def build(layers: int) -> LlavaForConditionalGeneration:
    """A LLaVA with 576 visual tokens a picture."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1, image_size=96, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


def prompt(text: int) -> dict[str, Any]:
    """One picture between two halves of ``text`` text tokens."""
    words = torch.randint(10, 1000, (text,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([words[: text // 2], torch.full((576,), IMAGE_TOKEN), words[text // 2 :]])[None]
    pixels = torch.randn(1, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


class Turns:
    """Two threads that run in turn, one at a time."""

    def __init__(self, first: int) -> None:
        self.next, self.alive, self.changed = first, {0, 1}, threading.Condition()

    def wait(self, me: int) -> None:
        """Wait until it is the turn of thread ``me``."""
        with self.changed:
            self.changed.wait_for(lambda: self.next == me or 1 - me not in self.alive)

    def leave(self, me: int) -> None:
        """Thread ``me`` takes no more turns."""
        with self.changed:
            self.alive.discard(me)
            self.changed.notify_all()

    def change(self, me: int) -> None:
        """Let the other thread run until it does the same."""
        with self.changed:
            self.next = 1 - me
            self.changed.notify_all()
        self.wait(me)


class Ticks:
    """A streamer that notes the CPU time of its thread at every token, and then lets the other thread run."""

    def __init__(self, turns: Turns, me: int) -> None:
        self.turns, self.me = turns, me
        self.at: list[float] = []

    def put(self, value: Any) -> None:
        """The prompt comes first, then a token at a time."""
        self.at.append(time.thread_time())
        if len(self.at) > 1:
            self.turns.change(self.me)

    def end(self) -> None:
        """Nothing to do."""


def pair(models: Sequence[Any], inputs: Any, chosen: Recipe, steps: int, first: int = 0) -> list[list[float]]:
    """CPU seconds of the first token and of the mean step, of the bare model and of the recipe; `first`: which one begins."""
    turns, found, errors = Turns(first), [[], []], []

    def answer(me: int) -> None:
        def layer(module: Any, args: Any, out: Any) -> None:
            # of a step the weights of a layer may stay in the processor's cache for the other one
            if out.shape[1] > 1:
                turns.change(me)

        turns.wait(me)
        hooks = [one.register_forward_hook(layer) for one in models[me].model.language_model.layers]
        try:
            ticks = Ticks(turns, me)
            with accelerated(models[1], chosen) if me else nullcontext():
                start = time.thread_time()
                models[me].generate(**inputs, max_new_tokens=steps + 1, do_sample=False, streamer=ticks)
            found[me] = [ticks.at[1] - start, (ticks.at[-1] - ticks.at[1]) / steps]
        except Exception as error:
            errors.append(error)
        finally:
            turns.leave(me)
            for hook in hooks:
                hook.remove()

    threads = [threading.Thread(target=answer, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def parsed(spelled: str) -> Recipe:
    """``"kivi bits=4"``: a recipe, and options of its first stage."""
    name, *options = spelled.split()
    values = {key: json.loads(value) for key, _, value in (option.partition("=") for option in options)}
    return get_recipe(name, **values)


def offered() -> list[str]:
    """Every recipe that does nothing but shape the cache, and ``kivi`` with 4 bits."""
    names = [
        name for name, made in recipes().items() if {stage.build().site for stage in made.stages} <= {"cache", "codec"}
    ]
    return [*names, "kivi bits=4", "kivi bits=8"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown; in bold what is above the bounds."""
    lines = [["recipe", "first token", "decode step"]]
    for row in rows:
        cells = []
        for what, most in (("first", FIRST), ("step", STEP)):
            spread = Spread.of(row[what])
            told = f"{spread.median:.2f} ±{spread.notch:.2f}"
            cells.append(f"**{told}**" if round(spread.median, 2) > most else told)
        lines.append([row["recipe"], *cells])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", nargs="+", help="recipes, with options as in 'kivi bits=4' (default: all of the cache)"
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--text", type=int, default=35, help="text tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table between the marks of this page")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bare = build(args.layers).requires_grad_(False)
    # the same weights, and hooks of its own
    models = [bare, copy.deepcopy(bare, {id(x): x for x in (*bare.parameters(), *bare.buffers())})]
    inputs, rows = prompt(args.text), []
    result = {
        "command": provenance.command("python", sys.argv[0]),
        "date": provenance.today(),
        "machine": {"processor": f"a CPU ({provenance.processor()})", "threads": args.threads, "dtype": "float32"},
        "versions": provenance.versions(),
        "model": {"layers": args.layers, "visual": 576, "text": args.text, "steps": args.steps},
        "rows": rows,
    }
    pair(models, inputs, get_recipe("none"), 2)
    for spelled in args.recipe or offered():
        try:
            pair(models, inputs, parsed(spelled), 2)
        except UnsupportedError as error:
            print(f"{spelled}: {error}", file=sys.stderr)
            continue
        taken = [pair(models, inputs, parsed(spelled), args.steps, n % 2) for n in range(args.repeats)]

        row: dict[str, Any] = {"recipe": spelled}
        for n, what in enumerate(("first", "step")):
            plain, fast = ([one[side][n] for one in taken] for side in range(2))
            row[what] = ratios(fast, plain).as_dict()
            row[f"{what}_bare_s"] = Spread(tuple(plain)).as_dict()
        rows.append(row)
        print(*table([row]).splitlines()[2:], flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.update:
        told = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        where = f"{result['machine']['processor']}, {args.threads} thread, float32"
        put_between(
            args.update, "cache-speed", f"{table(rows)}\n\n`{result['command']}`, {result['date']}, {where}, {told}."
        )


if __name__ == "__main__":
    main()
