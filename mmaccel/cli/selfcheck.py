"""Run every model family, full and accelerated, on tiny models with random weights. Nothing is downloaded.

The models are built from the families' real configurations. For each one, recipe "none" must give the tokens of the bare model;
every stage of the recipe must keep as many tokens as its budget says, and the cache must become smaller if tokens were dropped;
and remove() must restore the bare model to the bit. This shows that acceleration works with the installed versions and on this
device. It says nothing about the quality of answers, since the weights are random.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import MmaccelError
from ..programs.configs import make_config, read_tables
from .shared.needs import missing
from .shared.options import Json, RecipeOptions
from .shared.text import nbytes, table, tell, working

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..recipe import Recipe

PLACE = 10
HELP = "run all model families on tiny random models, full and accelerated"
EXAMPLES = """\
examples:
  mmaccel selfcheck
  mmaccel selfcheck --recipe pool --retain 0.1
  mmaccel selfcheck --device cuda --dtype bfloat16 --family llava qwen2_5_vl
"""

IMAGE, START, END = 3, 5, 6
NEW_TOKENS = 8


def run(
    how: RecipeOptions,
    family: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY...", help="Only these families.  [default: all]")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "float32",
    output: Json = None,
) -> int:
    """Check and print."""
    for name in family or ():
        if name not in TINY:
            raise MmaccelError(f"There is no family {name!r}; known are {', '.join(TINY)}.")
        if needed := missing(name):
            raise MmaccelError(f"{name} is built with {needed}, which is not installed; pip install '{needed}'.")
    left_out = [] if family else [name for name in TINY if missing(name)]
    names = family or [name for name in TINY if name not in left_out]
    with working("checking families", len(names)) as bar:
        import torch
        from transformers.utils import logging

        from ..families.load import place

        logging.set_verbosity_error()
        chosen, where, results = how.chosen(), str(place(device)), []
        for name in names:
            with torch.no_grad():
                results.append(check(name, chosen, where, getattr(torch, dtype)))
            bar.advance()
    how_run = {"recipe": chosen.name, "retain": chosen.retain, "device": where, "dtype": dtype}
    report: dict[str, Any] = {**how_run, "families": results, "left_out": left_out}
    tell(report, output, lambda: render(report))
    return 1 if any(one["problem"] for one in results) else 0


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ["family", "visual tokens", "kept", "KV full", "KV kept", "none = bare", "remove() restores", "time"]
    rows = [
        [
            r["family"],
            str(r["visual_tokens"]),
            str(r["visual_tokens_kept"]),
            nbytes(r["kv_bytes_full"]),
            nbytes(r["kv_bytes"]),
            "yes" if r["none_equals_bare"] else "NO",
            "yes" if r["restored"] else "NO",
            f"{r['seconds']:.1f} s",
        ]
        for r in report["families"]
    ]
    budget = "" if report["retain"] is None else f", retain {report['retain']:g}"
    failed = [f"FAILED {r['family']}: {r['problem']}" for r in report["families"] if r["problem"]]
    return "\n".join(
        [
            f"recipe {report['recipe']}{budget}, {report['device']}, {report['dtype']}; random weights",
            "",
            table([head, *rows], numbers=(1, 2, 3, 4, 7)),
            "",
            *failed,
            *(f"{name} was left out: {missing(name)} is not installed." for name in report["left_out"]),
            f"{len(rows) - len(failed)} of {len(rows)} families pass.",
        ]
    )


def check(name: str, chosen: Recipe, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """One family; ``problem`` is None if all is well."""
    import torch

    from ..accelerate import accelerate_vlm
    from ..core.transformers_api import cache_of
    from ..kv.cache import cache_bytes

    begin = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = build(name, device, dtype)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    bare, full = model(**inputs).logits, model.generate(**inputs, **greedy)
    # transformers leaves hooks of its own at the first call
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    accelerate_vlm(model, "none")
    none = model.generate(**inputs, **greedy)
    accelerate_vlm(model, chosen)
    out = model.generate(**inputs, **greedy)
    stats = model.mmaccel.stats()
    model.mmaccel.remove()

    restored = (
        bool(torch.equal(model(**inputs).logits, bare))
        and not hasattr(model, "mmaccel")
        and hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    )
    kv_full = cache_bytes(cache_of(full))
    same = bool(torch.equal(none.sequences, full.sequences))
    back = out.sequences[:, : inputs["input_ids"].shape[1]]
    wrong = {
        "recipe 'none' answers otherwise than the bare model": not same,
        "remove() left something behind": not restored,
        "the prompt did not come back": not torch.equal(back, inputs["input_ids"]),
        **_wrong(stats, kv_full),
    }
    return {
        "family": name,
        "visual_tokens": stats["visual_tokens"],
        "visual_tokens_kept": stats["visual_tokens_kept"],
        "kv_bytes_full": kv_full,
        "kv_bytes": stats["kv_bytes"],
        "none_equals_bare": same,
        "restored": restored,
        "seconds": time.perf_counter() - begin,
        "problem": next((problem for problem, is_so in wrong.items() if is_so), None),
    }


def _wrong(stats: Any, kv_full: int) -> dict[str, bool]:
    """What can be wrong with the figures of a call, and whether it is; ``kv_full`` are the bytes of the bare model's cache."""
    from ..method import Policy, ReadingPolicy
    from ..method.registry import get_method

    faults, fewer = {}, stats["visual_tokens_kept"] < stats["visual_tokens"]
    for stage in stats["stages"]:
        cls = get_method(stage["method"])
        kept, wanted, budget = stage["tokens_kept"], stage["resolved"], cls.budget
        if issubclass(cls, ReadingPolicy) or (issubclass(cls, Policy) and cls.recall is not Policy.recall):
            wanted, budget = stage["tokens_in"], "exact"  # all keys are stored, and a part of them is read
        off = wanted is not None and (kept != wanted if budget == "exact" else kept > wanted)
        if budget in ("exact", "at_most"):
            faults[f"{stage['method']} kept {kept} tokens for a budget of {wanted}"] = off
        faults[f"{stage['method']} kept {kept} of {stage['tokens_in']} tokens"] = not 0 < kept <= stage["tokens_in"]
    faults["tokens were dropped, and the cache did not become smaller"] = fewer and stats["kv_bytes"] >= kv_full
    return faults


# ----------------------------------------------------------------------------------------------------- the tiny models


def build(name: str, device: str = "cpu", dtype: Any = None) -> tuple[Any, dict[str, Tensor]]:
    """A tiny model of a family with random weights, and inputs for it: some text, a picture or clip, some text."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    from ..families import families
    from ..families.mrope import ThreeAxes

    table, dtype = TINY[name], dtype or torch.float32
    token = table.get("token", IMAGE)
    pixels = {key: torch.rand(shape) for key, shape in table["pixels"].items()}
    pixels |= {key: _integers(key, values) for key, values in table.get("integers", {}).items()}
    model = AutoModelForImageTextToText.from_config(make_config(table["config"]), dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0)
    visual = [token] * table["tokens"]
    family = families()[name]
    typed = issubclass(family, ThreeAxes) and family.typed
    if typed or "image_grid_thw" in pixels:
        visual = [START, *visual, END]
    ids = torch.tensor([[1, *range(10, 20), *visual, *range(20, 30)]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    if typed:
        inputs["mm_token_type_ids"] = (ids == token).long()
    # marks around a picture count to it
    inputs |= {kind: torch.isin(ids, torch.tensor([token, START, END])).long() for kind in family.by_token}
    return model.eval().to(device, dtype), {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device) for key, value in inputs.items()
    }


def _integers(name: str, values: list[Any]) -> Tensor:
    """An input other than pixels, from its values or, where it is long, from its size."""
    import torch

    given = torch.tensor(values)
    if name == "image_position_ids":  # column and row of every patch, from the number of rows and of columns
        return torch.cartesian_prod(*(torch.arange(count) for count in values)).flip(1)[None]
    if name == "pixel_attention_mask" and given.dtype != torch.bool:  # from the number of patches of every tile
        return (torch.arange(values[0]) < given[:, None]).int()
    if name == "image_token_pooling":  # the 2 by 2 patches of every token, from the number of crops, rows and columns
        crops, rows, columns = values
        patches = torch.arange(4 * crops * rows * columns).view(crops * rows, 2, columns, 2)
        return patches.transpose(1, 2).reshape(-1, 4)
    return given.int() if name == "target_sizes" else given


#: by family, see the file
TINY: dict[str, dict[str, Any]] = read_tables(Path(__file__).with_suffix(".toml"))
