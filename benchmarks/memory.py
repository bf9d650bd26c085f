"""Do the peaks of prefill and decoding fall by what arithmetic says?

Builds a LLaVA model with random weights and runs a prompt and some decode steps under each recipe. Beside the bytes that were
alive (counted by the allocator, see ``live.py``) stand those that the shape of the model and the budget of the recipe give:
activations of the layer where the peak is, keys and values held, and what a decode step holds for a moment. What is explained
is computed over measured. The weights are alive all the time, and what the tower and the embeddings take is alive before the
language model begins: both are left out.

    python benchmarks/memory.py --out benchmarks/results/memory-cpu.json --update benchmarks/README.md
    python benchmarks/memory.py --device cuda --layers 28 --width 3584 --side 76
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from live import Allocations
from prefill import build, prompt
from transformers import DynamicCache

import mmaccel
from mmaccel import accelerated
from mmaccel.cli.shared.text import markdown, nbytes, put_between
from mmaccel.core.budget import resolve
from mmaccel.kv.budgets import pyramid
from mmaccel.kv.cache import cache_bytes
from mmaccel.kv.codecs.kivi import KIVI
from mmaccel.kv.growable import LEAST, SHARE

RECIPES = ("none", "fastv", "snapkv", "pyramidkv", "kivi")


@dataclass(frozen=True)
class Shape:
    """A language model and a prompt; ``size`` is the bytes of a number."""

    layers: int
    width: int
    hidden: int
    kv_heads: int
    head: int
    size: int
    visual: int
    text: int

    @property
    def tokens(self) -> int:
        return self.visual + self.text

    @property
    def key(self) -> int:
        """Bytes of the key and the value of one token in one layer."""
        return 2 * self.kv_heads * self.head * self.size

    def activations(self, tokens: int) -> int:
        """Bytes alive where a layer peaks, in its MLP: the layer's input, the residual and what was normalised; the gate, what
        it is multiplied with, and the product; sines, cosines and positions."""
        return tokens * (self.size * (3 * self.width + 3 * self.hidden + 2 * self.head) + 8)


@dataclass(frozen=True)
class Computed:
    """Bytes that arithmetic gives: ``held`` in the cache after the prompt, and the two peaks."""

    held: int
    prefill_peak: int
    decode_peak: int


def slots(tokens: int, steps: int, has: int) -> int:
    """Tokens that a layer has room for after ``steps``, which holds ``tokens`` and ``has`` room for so many."""
    for stored in range(tokens + 1, tokens + steps + 1):
        if stored > has:
            has = stored + max(LEAST, stored // SHARE)
    return has


def computed(recipe: str, shape: Shape, retain: float, steps: int, kernels: bool) -> Computed:
    """What a recipe should cost.

    Parameters
    ----------
    steps : decode steps behind the prompt.
    kernels : packed keys are read as they are stored; else a layer is decoded to be read.
    """
    layers, n = range(shape.layers), shape.tokens
    kept, seen = resolve(retain, shape.visual), [n] * shape.layers
    # tokens in full precision that every layer stores, tokens that it has room for, and bytes of what is packed
    stored, packed, codes = seen, 0, 0.0
    if recipe == "fastv":
        stored = seen = [n if layer < 2 else kept + shape.text for layer in layers]
    elif recipe in ("snapkv", "pyramidkv"):
        counts = [kept] * shape.layers
        if recipe == "pyramidkv":
            counts = pyramid(kept, [shape.visual] * shape.layers, 20)
        stored = [count + shape.text for count in counts]
    elif recipe == "kivi":
        codec = KIVI()
        packed = int(codec.packable(torch.tensor([n])))
        stored = [n - packed] * shape.layers
        # every number is a code, and every group of numbers has a scale and a zero
        codes = packed * (codec.bits / 8 / shape.size + 2 / codec.group) * shape.key
    elif recipe != "none":
        raise SystemExit(f"no arithmetic for recipe {recipe!r}; there is some for {', '.join(RECIPES)}.")
    # a prompt that nothing is dropped of in the cache has room behind it
    has = [slots(count - 1, 1, 0) for count in stored] if recipe == "fastv" else stored
    held = [count * shape.key + codes for count in has]
    prefill = max(shape.activations(seen[layer]) + sum(held[: layer + 1]) for layer in layers)
    # where there is no room for a new key the layer's keys are copied, then its values; the bare cache never has any
    grown = [slots(count, steps, room) for count, room in zip(stored, has, strict=True)]
    appended = max(has) * shape.key / 2 if grown != has else 0.0
    if recipe == "none":
        grown = [count + steps for count in has]
        appended = max(grown) * shape.key / 2
    if recipe == "kivi" and not kernels:
        # keys and values as they are read, and of the pages of one of them a copy in float32 and two of the codes in bytes
        appended = (n + steps + packed * 3 / shape.size) * shape.key
    return Computed(int(sum(held)), int(prefill), int(sum(grown) * shape.key + shape.layers * codes + appended))


def measured(model: Any, inputs: Mapping[str, Any], recipe: str, retain: float, steps: int) -> dict[str, int]:
    """Run a prompt and ``steps`` decode steps.

    Returns
    -------
    ``reported`` by the cache after the prompt; ``held`` then as the allocator counts it, and ``decode_peak``, beyond what was
    alive before the call; ``prefill_peak`` beyond what was alive before the language model began.
    """
    device, text = str(model.device), model.model.language_model
    cuts = {} if recipe in ("none", "kivi") else {"retain": retain}
    with accelerated(model, recipe, **cuts), torch.inference_mode():
        # on a GPU libraries take their workspaces at a warm-up
        for seen in [Allocations(device) for _ in range(2 if model.device.type == "cuda" else 1)]:
            gc.collect()
            with seen:
                cache = DynamicCache(config=model.config.text_config)
                began = text.register_forward_pre_hook(lambda *_, seen=seen: seen.mark("before"), prepend=True)
                out = model(**inputs, past_key_values=cache, logits_to_keep=1)
                began.remove()
                token = out.logits[:, -1:].argmax(-1)
                del out
                seen.mark("prefill")
                reported = cache_bytes(cache)
                for _ in range(steps):
                    token = model(input_ids=token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
                seen.mark("decode")
            del cache
    return {
        "reported": reported,
        "held": seen.spans["prefill"].held,
        "prefill_peak": seen.spans["prefill"].peak - seen.spans["before"].held,
        "decode_peak": seen.spans["decode"].peak,
    }


def compare(
    model: Any, inputs: Mapping[str, Any], shape: Shape, retain: float, steps: int, recipe: str
) -> dict[str, Any]:
    """Computed beside measured, and the share of the measured that is explained."""
    told = asdict(computed(recipe, shape, retain, steps, model.device.type == "cuda"))
    found = measured(model, inputs, recipe, retain, steps)
    explained = {name: told[name] / found[name] for name in told}
    return {"recipe": recipe, "computed": told, "measured": found, "explained": explained}


def table(result: Mapping[str, Any]) -> str:
    """The figures as a table."""
    shape, machine = result["shape"], result["machine"]
    rows = [["recipe", "KV held", "explained", "prefill peak", "explained", "decode peak", "explained"]]
    bare = next((row["measured"] for row in result["rows"] if row["recipe"] == "none"), None)
    for row in result["rows"]:
        cells = [f"`{row['recipe']}`"]
        for name in ("held", "prefill_peak", "decode_peak"):
            share = f", {row['measured'][name] / bare[name]:.0%}" if bare is not None else ""
            cells += [f"{nbytes(row['measured'][name])}{share}", f"{row['explained'][name]:.1%}"]
        rows.append(cells)
    return "\n".join(
        [
            f"{shape['layers']} layers of width {shape['width']} and {shape['kv_heads']} key heads, {shape['visual']:,} visual "
            f"and {shape['text']} text tokens, {result['retain']:.0%} retained, {result['steps']} decode steps, on "
            f"{machine['processor']} in {machine['dtype']}, {result['date']}, torch {result['versions']['torch']}. All beside "
            f"{nbytes(result['weights'])} of weights. Shares behind bytes are of those of `none`; `explained` is computed over "
            f"measured. Made by `{result['command']}`.",
            "",
            markdown(rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--side", type=int, default=32, help="the picture makes side * side visual tokens")
    parser.add_argument("--text", type=int, default=64, help="text tokens")
    parser.add_argument("--retain", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=8, help="decode steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--out", type=Path, default=None, help="write JSON here")
    parser.add_argument("--update", type=Path, default=None, help="write the table between the marks of this page")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    model = build(args.layers, args.width, args.side, args.device, dtype)
    inputs, shape = prompt(model, args.side, args.text), shape_of(model, args.side, args.text)
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": {
            "processor": torch.cuda.get_device_name() if args.device == "cuda" else f"a CPU ({platform.machine()})",
            "dtype": str(dtype).removeprefix("torch."),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "mmaccel": mmaccel.__version__,
        },
        "shape": asdict(shape),
        "weights": sum(x.nbytes for x in model.parameters()),
        "retain": args.retain,
        "steps": args.steps,
        "rows": [],
    }
    for recipe in args.recipes:
        row = compare(model, inputs, shape, args.retain, args.steps, recipe)
        result["rows"].append(row)
        print(
            f"{recipe:<12}"
            + "  ".join(
                f"{name} {nbytes(row['computed'][name])} / {nbytes(row['measured'][name])} ({row['explained'][name]:.1%})"
                for name in row["computed"]
            ),
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.update:
        put_between(args.update, "memory", table(result))


def shape_of(model: Any, side: int, text: int) -> Shape:
    """The shape of a model that :func:`prefill.build` made, and of its prompt."""
    config = model.config.text_config
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        hidden=config.intermediate_size,
        kv_heads=config.num_key_value_heads,
        head=config.hidden_size // config.num_attention_heads,
        size=model.dtype.itemsize,
        visual=side * side,
        text=text // 2 * 2,
    )


if __name__ == "__main__":
    main()
