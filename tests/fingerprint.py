"""Fingerprints of what mmaccel computes, to show that a change of its code changes no bit of it.

Every recipe of the registry runs on every family's tiny model (random weights, see zoo.py) in float32 on one thread of the
CPU: on a picture (all logits of a direct forward, then generating, then a second turn with a new picture), on a left padded
batch of two rows with unequal pictures (and a second turn of text), and on a clip. So do some recipes of several sites, with
small pages, beams, windows and other options; the methods inside an encoder on encoders that stand alone; and sessions on a
video that goes on. For each of them the file has the hashes of the logits of the prefill and of every step, the tokens, the
statistics without seconds, what became of the prompt stage by stage, and what every layer of the cache holds; or the
sentence in which it is refused.

    python tests/fingerprint.py --write before.jsonl      # with the code as it was
    python tests/fingerprint.py --compare before.jsonl    # with the changed code; every difference, exit code 1 if any
    python tests/fingerprint.py --compare before.jsonl --device cuda --nearly     # on a GPU, beside the CPU

With ``--nearly`` hashes of floating-point numbers may differ and the largest logits may be apart by a thousandth, so that two
devices, or two versions of torch, are compared by tokens, by what was kept and by statistics.

Files are JSON lines, one a run, written as they come: what was interrupted goes on where it stopped. Bits depend on the
versions of torch and transformers and on the instruction set of the CPU, so both files must come from one environment.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from torch import Tensor, nn
from tqdm import tqdm
from transformers.cache_utils import LinearAttentionLayer

import mmaccel
from mmaccel import Recipe, Stage, accelerated, accelerated_encoder, get_recipe, methods, prepare, recipes
from mmaccel.kv.codecs import Codec
from mmaccel.kv.recurrent import states_of
from mmaccel.method import EncoderMethod

Record = dict[str, Any]
Task = tuple[str, str]
"""A family, or one of the groups below, and the name of what runs on it."""

DEVICE = torch.device("cpu")
STEPS = 6
"""Decode steps behind the prefill."""
LONGER = "and what else is there to see, and why is it where it is?"
REPEATING = "it is: a: b: c a b c: d e f "
"""Ends of the prompt stand in it, and no placeholder behind them: what is looked up there can be fed."""
CLIP = Path(mmaccel.__file__).parent / "models" / "mini-clip"
BY_CLIP: dict[str, dict[str, str]] = {
    "clip-crop": {"clip_model": str(CLIP), "query": "a red circle"},
    "query-frames": {"clip_model": str(CLIP), "query": "a red circle"},
    "scenetilling": {"clip_model": str(CLIP)},
}
"""What recipes with a CLIP model of their own are given."""
GROUPS = ("encoder", "session")


# ------------------------------------------------------------------------------------------------------------- hashes


def digest(tensor: Tensor | None) -> str | None:
    """Of shape, dtype and bytes."""
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    about = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{about} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"


def of_logits(logits: Tensor) -> str:
    """With the largest of them, so that a difference says how large it is."""
    return f"{digest(logits)} max {float(logits.nan_to_num(-torch.inf).max())!r}"


def of_reduction(made: Any) -> Record | None:
    if made is None:
        return None
    links = made.full_links()
    return {
        "kept": digest(made.kept),
        "counts": [count.tolist() for count in made.counts()],
        "sources": digest(torch.stack([links.batch, links.slot, links.source])),
        "weights": digest(links.weight),
    }


def of_cache(cache: Any) -> Record:
    """What a cache holds, layer by layer; slots without a key count as zeros."""
    held: Record = {"seen": int(cache.get_seq_length())}
    for number, layer in enumerate(cache.layers):
        index = getattr(getattr(layer, "index", None), "index", None)
        if isinstance(layer, LinearAttentionLayer):
            held[f"layer {number}"] = {"states": [digest(x) for x in states_of(layer)]}
            continue
        if index is None:
            held[f"layer {number}"] = {"keys": digest(layer.keys), "values": digest(layer.values)}
            continue
        by_head = index if index.dim() == 3 else index[:, None]
        keys, values = (x.masked_fill((by_head < 0)[..., None], 0.0) for x in layer.stored())
        held[f"layer {number}"] = {
            "lengths": (by_head >= 0).sum(-1).tolist(),
            "index": digest(index),
            "keys": digest(keys),
            "values": digest(values),
            "full precision": list(layer.keys.shape),
        }
    return held


def of_handle(model: Any) -> Record:
    """What the handle says of the last call."""
    stats = model.mmaccel.stats()
    stats.pop("seconds", None)
    if stats.pop("drafting", None):
        # how long a draft gets to be is decided by a clock
        stats.pop("decode_steps", None)
    # earlier versions call it trail
    history = model.mmaccel.history if hasattr(model.mmaccel, "history") else model.mmaccel.trail
    trail = [
        {
            "stage": result.stage,
            "layer": result.layer,
            "reduction": of_reduction(result.reduction),
            "scores": {name: digest(figures) for name, figures in result.scores().items()},
        }
        for result in history
    ]
    return {"stats": stats, "reduction": of_reduction(model.mmaccel.reduction), "trail": trail}


def guarded(run: Callable[[], Record]) -> Record:
    """What a run gives, or the sentence in which it is refused."""
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# ------------------------------------------------------------------------------------------------------- what is shown


def rows(kind: str, seed: int = 0) -> list[tuple[list[Any], list[Any], str]]:
    """Pictures, clips and a question of every row."""
    wide, tall = zoo.image(96, 80, seed), zoo.image(40, 88, seed + 1)
    shown: dict[str, list[tuple[list[Any], list[Any], str]]] = {
        "image": [([wide], [], zoo.QUESTION)],
        "uneven": [([tall], [], LONGER), ([wide, tall], [], zoo.QUESTION)],
        "video": [([], [zoo.clip(8, 64, 48, seed)], zoo.QUESTION)],
        "text": [([], [], zoo.QUESTION), ([], [], LONGER)],
    }
    return shown[kind]


@functools.cache
def tiny(family: str, options: str = "{}") -> Any:
    """A model that is shared by what runs on it; ``options`` of its text model, as JSON."""
    return zoo.model(family, **json.loads(options)).to(DEVICE)


@functools.cache
def bare_feed(family: str, kind: str, seed: int = 0) -> Record:
    return dict(zoo.encode(family, rows(kind, seed)))


def feed(family: str, kind: str, worker: Any, seed: int = 0) -> Record:
    """Inputs through the processor that the recipe has prepared; clones, so that no run can change those of another."""
    if kind == "repeating":
        return behind_words(family, feed(family, "image", worker, seed))
    bare = worker is zoo.processor(family)
    given = bare_feed(family, kind, seed) if bare else dict(zoo.encode(family, rows(kind, seed), worker))
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in copies.items()}


def behind_words(family: str, given: Record) -> Record:
    """The inputs of one row behind `REPEATING`."""
    said = zoo.tokenizer(family)(REPEATING, add_special_tokens=False, return_tensors="pt").input_ids.to(DEVICE)
    front = {"input_ids": said, "attention_mask": torch.ones_like(said)}
    front |= dict.fromkeys(("mm_token_type_ids", "moe_mm_token_type_ids"), torch.zeros_like(said))
    return {name: torch.cat([front[name], value], dim=1) if name in front else value for name, value in given.items()}


def follow(first: Record, out: Any, second: Record) -> Record:
    """What a second turn passes with the kept cache: all ids, and its own pixels only."""
    answer = out.sequences[:, first["input_ids"].shape[1] :]
    parts: dict[str, list[Tensor]] = {
        "input_ids": [first["input_ids"], answer, second["input_ids"]],
        "attention_mask": [first["attention_mask"], torch.ones_like(answer), second["attention_mask"]],
    }
    for types in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if types in first or types in second:
            before, after = (turn.get(types, torch.zeros_like(turn["input_ids"])) for turn in (first, second))
            parts[types] = [before, torch.zeros_like(answer), after]
    return {**second, **{name: torch.cat(several, dim=1) for name, several in parts.items()}}


# -------------------------------------------------------------------------------------------------------- language models


def within_reach(chosen: Recipe, depth: int) -> Recipe:
    """The recipe with the layers that only deep models have moved to the last of this one."""
    stages = []
    for stage in chosen.stages:
        layer = getattr(methods()[stage.method](**stage.options), "layer", 0)
        deep = isinstance(layer, int) and layer > depth - 1
        stages.append(replace(stage, options={**stage.options, "layer": depth - 1}) if deep else stage)
    return replace(chosen, stages=tuple(stages))


@dataclass(frozen=True)
class Way:
    """A recipe and how it runs.

    text : options of the model's language model.
    calling : options of ``generate``.
    accelerating : options of ``accelerate_vlm`` that no recipe holds.
    kinds : of inputs; all that the family has by default.
    """

    chosen: Recipe
    text: Mapping[str, Any] = field(default_factory=dict)
    calling: Mapping[str, Any] = field(default_factory=dict)
    accelerating: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("image", "uneven", "video")


FINE: dict[str, Any] = {"bits": 4, "page": 16, "group": 16, "residual": 0}
# checked by test_fingerprints_know_every_codec
PAGES: dict[str, tuple[Stage, ...]] = {
    "kivi": (Stage("kivi", None, FINE),),
    "kivi, residual": (Stage("kivi", None, {**FINE, "bits": 2, "residual": 24}),),
    "fp8": (Stage("fp8", None, {"page": 16}),),
    "think": (Stage("think", None, {"page": 32, "residual": 0, "align": 4}),),
    "vidkv": (Stage("vidkv", None, {"page": 32}),),
    "vidkv, waves": (Stage("vidkv", None, {"page": 32, "fourier": True, "protect": 0.3}),),
    "calibquant": (Stage("calibquant", None, {"page": 16}),),
    "turboquant": (Stage("turboquant", None, {"page": 16, "residual": 0}),),
    "qserve": (Stage("qserve", None, {"page": 16}),),
    "zipcache": (Stage("zipcache-codec", None, {"page": 16}),),
    "gear": (Stage("gear", None, {"page": 16}),),
    "nsnquant": (Stage("nsnquant", None, {"page": 16}),),
    "calibquant, text apart": (
        Stage("calibquant", None, {"page": 16}),
        Stage("fp8", None, {"page": 16, "text_only": True}),
    ),
}
"""Codecs with pages so small that tiny prompts fill them."""


def ways() -> dict[str, Callable[[], Way]]:
    """Beside the registry's recipes: several sites at once, small pages, and other ways to call."""

    def of(*stages: Stage, **fields: Any) -> Recipe:
        return Recipe("stages", stages, **fields)

    kivi, adakv = PAGES["kivi"][0], Stage("snapkv", 0.4, {"kernel": 3, "head_budget": "adaptive:0.2"})
    beams, lookup = {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 16}
    h2o = Stage("h2o", 0.3, {"recent": 0.1, "joint": True, "every": 1})
    before = (Stage("tome", 0.6), Stage("divprune", 0.6))
    return {
        **{f"pages: {name}": functools.partial(Way, of(*stages)) for name, stages in PAGES.items()},
        **{
            f"pages behind snapkv: {name}": functools.partial(Way, of(Stage("snapkv", 0.5), *stages))
            for name, stages in PAGES.items()
        },
        "every site": lambda: Way(
            of(Stage("resize", 0.8), *before, Stage("fastv", 0.5, {"layer": 3}), Stage("snapkv", 0.5), kivi)
        ),
        "two layers": lambda: Way(of(Stage("fastv", 0.6, {"layer": 3}), Stage("promptdistill", 0.3, {"layer": 4}))),
        "heads differ, pages": lambda: Way(of(adakv, kivi)),
        "heads differ, beams": lambda: Way(of(adakv), calling=beams),
        "pages, beams": lambda: Way(of(kivi), calling=beams),
        "h2o while decoding, pages": lambda: Way(of(h2o, kivi)),
        "h2o while decoding, beams": lambda: Way(of(h2o), calling=beams),
        "before the model, lookup": lambda: Way(of(*before), calling=lookup, kinds=("repeating",)),
        "pages, lookup": lambda: Way(of(kivi), calling=lookup, kinds=("repeating",)),
        "merging, windows": lambda: Way(of(*before, Stage("snapkv", 0.5)), text={"sliding_window": 24}),
        "none, windows": lambda: Way(get_recipe("none"), text={"sliding_window": 24}),
        "pages, windows": lambda: Way(of(kivi), text={"sliding_window": 24}),
        "a number": lambda: Way(get_recipe("divprune").override(retain=10, variant="official")),
        "as papers: before": lambda: Way(of(*before, positions="paper", variant="official")),
        "as papers: layers": lambda: Way(of(Stage("fastv", 0.4, {"layer": 3}), positions="paper")),
        "text as well": lambda: Way(of(Stage("snapkv", 0.4), text_retain=0.5)),
        "kernels off": lambda: Way(of(adakv, kivi), accelerating={"kernels": "off"}),
        "host memory": lambda: Way(of(adakv, kivi), accelerating={"offload": "host"}),
        "host memory, chosen keys": lambda: Way(get_recipe("quest"), accelerating={"offload": "host"}),
        "a rest of two bits": lambda: Way(of(Stage("snapkv", 0.4, {"rest": "int2"}))),
        "chunks": lambda: Way(of(*before, kivi, chunk=16)),
        "some frames at once": lambda: Way(of(Stage("divprune", 0.5), frames_at_once=1)),
        "lossless, lookup": lambda: Way(get_recipe("none"), accelerating={"lossless": True, "lookup": True}),
        "lossless, recycled": lambda: Way(
            get_recipe("none"), accelerating={"lossless": True, "lookup": "tokenrecycling"}
        ),
        "lossless, the model drafts": lambda: Way(of(adakv), accelerating={"lossless": True, "draft": "self"}),
        "lossless, without layers": lambda: Way(get_recipe("none"), accelerating={"lossless": True, "draft": [1, 3]}),
        # long enough to be captured on a GPU
        **{
            f"a longer answer: {name}": functools.partial(Way, of(*stages), calling={"max_new_tokens": 24})
            for name, stages in {
                "none": (),
                "tokens": before,
                "heads differ": (adakv,),
                "h2o while decoding": (h2o,),
                "chosen keys": (Stage("quest", 0.4),),
                **{f"pages, {name}": stages for name, stages in PAGES.items()},
            }.items()
        },
        "a static cache": lambda: Way(get_recipe("none"), calling={"cache_implementation": "static"}),
        "without a cache": lambda: Way(of(*before), calling={"use_cache": False}),
        "sampling": lambda: Way(of(Stage("random", 0.5), adakv), calling={"do_sample": True, "top_k": 8}),
    }


DEPTH = 5
WAYS_ON = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl")
"""Families of each mechanism, on which the ways above run."""


def way_of(name: str) -> Way:
    if name in ways():
        return ways()[name]()
    return Way(within_reach(get_recipe(name).override(**BY_CLIP.get(name, {})), DEPTH))


def run_model(family: str, name: str) -> Record:
    """All cases of one recipe on one family."""
    way = way_of(name)
    model = tiny(family, json.dumps({"num_hidden_layers": DEPTH, **way.text}, sort_keys=True))
    worker = prepare(zoo.processor(family), way.chosen)
    cases: Record = {}
    with accelerated(model, way.chosen, processor=worker, **way.accelerating):
        if name not in ways():
            cases["forward"] = guarded(lambda: forward(model, feed(family, "image", worker)))
        then = {"image": "image", "uneven": "text"}
        for kind in way.kinds:
            if kind == "video" and family not in zoo.VIDEO_FAMILIES:
                continue
            first = feed(family, kind, worker)
            second = feed(family, then[kind], worker, seed=7) if kind in then and not way.calling else None
            cases |= turns(model, kind, first, second, way.calling)
    return cases


def forward(model: Any, given: Record) -> Record:
    """One direct forward with a loss."""
    out = model(**given, labels=given["input_ids"].clone())
    return {"logits": of_logits(out.logits), "loss": repr(float(out.loss)), **of_handle(model)}


def turns(model: Any, kind: str, first: Record, second: Record | None, calling: Mapping[str, Any]) -> Record:
    """Generating, and a second turn on the same cache."""
    outs: list[Any] = []
    made = {kind: guarded(lambda: generated(model, first, calling, outs))}
    if second is not None and outs:
        again = {**follow(first, outs[0], second), "past_key_values": outs[0].past_key_values}
        made[f"{kind}, second turn"] = guarded(lambda: generated(model, again, calling, outs))
    return made


def generated(model: Any, given: Record, calling: Mapping[str, Any], outs: list[Any]) -> Record:
    """The inputs count as well, as a recipe may work on pixels."""
    options = {"do_sample": False, "max_new_tokens": STEPS + 1, **calling}
    torch.manual_seed(0)
    shown = {name: digest(value) for name, value in sorted(given.items()) if isinstance(value, Tensor)}
    out = model.generate(**given, return_dict_in_generate=True, output_logits=True, **options)
    outs.append(out)
    return {
        "inputs": shown,
        "new": out.sequences[:, given["input_ids"].shape[1] :].tolist(),
        "logits": {f"step {step}": of_logits(one) for step, one in enumerate(out.logits)},
        **of_handle(model),
        "cache": of_cache(out.past_key_values) if out.past_key_values is not None else None,
    }


# ------------------------------------------------------------------------------------------------------------- encoders

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 8,
}
TEXT = {**VISION, "num_hidden_layers": 2, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def _open_clip(**options: Any) -> Any:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(48, 8, 32, 4, 4, 2.0, output_dim=16, **options)


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)),
    "clip-projection": lambda: transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    ),
    "clip-whole": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=16)
    ),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION)),
    "siglip-whole": lambda: transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=TEXT)),
    "open_clip": _open_clip,
    "open_clip-normed": lambda: _open_clip(block_type="custom", qk_norm=True),
}
INSIDE: dict[str, dict[str, Any]] = {
    "tome": {},
    "pitome": {},
    "evit": {},
    "tome, half": {"retain": 0.5},
    "pitome, a number": {"retain": 9},
}


@functools.cache
def encoder(name: str) -> Any:
    """A tiny encoder; random weights as they come are too small to merge by."""
    torch.manual_seed(3)
    made = ENCODERS[name]().eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return made


def run_encoder(name: str, option: str) -> Record:
    made = encoder(name).to(DEVICE)
    pixels = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with accelerated_encoder(made, option.split(",")[0], **INSIDE[option]):
        if hasattr(made, "get_image_features"):
            out = made.get_image_features(pixel_values=pixels)
        else:
            out = made(pixels)
        stats = made.mmaccel.stats()
        stats.pop("seconds", None)
        parts = {"": out} if isinstance(out, Tensor) else {k: v for k, v in out.items() if isinstance(v, Tensor)}
        return {
            "features": {key: digest(value) for key, value in parts.items()},
            "stats": stats,
            "reduction": of_reduction(made.mmaccel.reduction),
        }


# ------------------------------------------------------------------------------------------------------------- sessions


def run_session(family: str, name: str) -> Record:
    """A video of fifteen frames, with questions in between."""
    one = mmaccel.VideoSession(tiny(family), name, processor=zoo.processor(family), cap_tokens=60, chunk=4)
    said: Record = {}
    for stretch in range(3):
        one.push(zoo.clip(5, 64, 48, stretch))
        answer = one.ask(zoo.QUESTION, 6)
        said[f"question {stretch}"] = [answer, one.frames, one.tokens(), one.nbytes()]
    return said


# ---------------------------------------------------------------------------------------------------------------- runs


def tasks() -> list[Task]:
    """All that there is to run."""
    shown = {stage.method for stages in PAGES.values() for stage in stages} | {
        option.split(",")[0] for option in INSIDE
    }
    own = {name: kind for name, kind in methods().items() if kind.__module__.startswith("mmaccel.")}
    every = {name for name, kind in own.items() if issubclass(kind, (Codec, EncoderMethod))}
    assert shown == every, f"PAGES and INSIDE lack a method of their kinds, or have one too many: {shown ^ every}"
    found = [(family, name) for family in zoo.FAMILIES for name in recipes()]
    found += [(family, name) for family in WAYS_ON for name in ways()]
    found += [("encoder", f"{name}/{option}") for name in ENCODERS for option in INSIDE]
    found += [("session", f"{family}/{name}") for family in zoo.VIDEO_FAMILIES for name in ("infinipot-v", "snapkv")]
    return found


def run(task: Task, device: str) -> tuple[Task, Record]:
    """One task in a process of one thread."""
    global DEVICE
    DEVICE = torch.device(device)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    transformers.utils.logging.set_verbosity_error()
    group, name = task
    work: Callable[[], Record] = functools.partial(run_model, group, name)
    if group == "encoder":
        work = functools.partial(run_encoder, *name.split("/"))
    elif group == "session":
        work = functools.partial(run_session, *name.split("/"))
    with torch.no_grad():
        return task, guarded(work)


def results(todo: list[Task], jobs: int, device: str) -> Iterator[tuple[Task, Record]]:
    """As they come, with a bar that says how many are left."""
    with tqdm(total=len(todo), smoothing=0.0, disable=not todo) as bar:
        if jobs == 1:
            for task in todo:
                bar.set_postfix_str(" ".join(task))
                yield run(task, device)
                bar.update()
            return
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            for done in pool.imap_unordered(functools.partial(run, device=device), todo):
                bar.update()
                yield done


# --------------------------------------------------------------------------------------------------------------- files


def environment(device: str = "cpu") -> Record:
    """What bits depend on beside the code."""
    return {
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "interpreter of kernels": os.environ.get("TRITON_INTERPRET", "0"),
    }


def read(path: Path) -> tuple[Record | None, dict[Task, Record]]:
    """The environment and the runs of a file; a line that was not written to its end does not count."""
    about, runs = None, {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "environment" in entry:
            about = entry["environment"]
        else:
            runs[entry["group"], entry["name"]] = entry["found"]
    return about, runs


def flat(value: Any, key: str = "") -> dict[str, str]:
    """Leaves by their path."""
    if isinstance(value, dict) and value:
        return {
            path: leaf
            for name, one in value.items()
            for path, leaf in flat(one, f"{key}.{name}" if key else name).items()
        }
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return flat({str(number): one for number, one in enumerate(value)}, key)
    return {key: json.dumps(value)}


def differences(before: Record, after: Record, nearly: bool = False) -> list[str]:
    """One line each; ``nearly`` as ``--nearly``."""
    old, new = flat(before), flat(after)
    same = alike if nearly else operator.eq
    return [
        f"{key}: {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in dict.fromkeys([*old, *new])
        if not same(old.get(key), new.get(key))
    ]


def alike(old: str | None, new: str | None) -> bool:
    """Whether two leaves say the same but for rounding: hashes of floating-point numbers do not count, their largest may be a
    thousandth apart."""
    if old is None or new is None or old == new:
        return old == new
    ends = [text.strip('"').rsplit(" max ", 1) for text in (old, new)]
    heads = [end[0].rsplit(" ", 1) for end in ends]
    if [len(end) for end in ends] == [2, 2] and heads[0][0] == heads[1][0]:
        return math.isclose(float(ends[0][1]), float(ends[1][1]), rel_tol=1e-3, abs_tol=1e-3)
    if all(" float" in text or " bfloat" in text for text in (old, new)):
        return heads[0][0] == heads[1][0]
    try:
        return math.isclose(float(json.loads(old)), float(json.loads(new)), rel_tol=1e-3)
    except (TypeError, ValueError):
        return False


def collect(todo: list[Task], jobs: int, path: Path | None, device: str) -> Iterator[tuple[Task, Record]]:
    """All runs, those that ``path`` has already first; new ones are added to it."""
    about, there = read(path) if path is not None and path.exists() else (None, {})
    here = environment(device)
    if about is not None and about != here:
        raise SystemExit(f"{path} comes from another environment, {about}, not {here}; give another file.")
    yield from ((task, there[task]) for task in todo if task in there)
    missing = [task for task in todo if task not in there]
    if path is None:
        yield from results(missing, jobs, device)
        return
    entries = [{"group": task[0], "name": task[1], "found": found} for task, found in there.items()]
    with path.open("w", encoding="utf-8") as file:
        for entry in ({"environment": here}, *entries):
            print(json.dumps(entry), file=file, flush=True)
        for task, found in results(missing, jobs, device):
            # what is read back is compared, so that both sides went through JSON
            line = json.dumps({"group": task[0], "name": task[1], "found": found})
            print(line, file=file, flush=True)
            yield task, json.loads(line)["found"]


def compare(
    path: Path, found: Iterator[tuple[Task, Record]], chosen: Callable[[Task], bool], device: str, nearly: bool
) -> int:
    """How many differences to the file there are; they are printed."""
    about, before = read(path)
    count = 0

    def tell(line: str) -> None:
        nonlocal count
        count += 1
        tqdm.write(line)

    for line in differences(about or {}, environment(device)):
        tqdm.write(f"environment {line}") if nearly else tell(f"environment {line}")
    left = {task for task in before if chosen(task)}
    for task, after in found:
        left.discard(task)
        if task not in before:
            tell(f"{' '.join(task)}: not there -> runs")
            continue
        for line in differences(before[task], after, nearly):
            tell(f"{' '.join(task)} {line}")
    for task in sorted(left):
        tell(f"{' '.join(task)}: ran -> not there")
    return count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write what is found; a file that is there is completed"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="run, and print every difference to this file")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these recipes, methods or ways")
    parser.add_argument(
        "--families",
        nargs="+",
        metavar="FAMILY",
        choices=(*zoo.FAMILIES, *GROUPS),
        help="only these, or encoder, session",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--nearly", action="store_true", help="compare what rounding does not change")
    options = parser.parse_args(arguments)
    if options.write is None and options.compare is None:
        parser.error("give --write FILE, --compare FILE, or both")
    if options.compare is not None and not options.compare.exists():
        parser.error(f"there is no {options.compare}")

    def chosen(task: Task) -> bool:
        groups, names = options.families, options.recipes
        named = names is None or task[1] in names or task[1].split("/")[-1] in names
        return named and (groups is None or task[0] in groups)

    todo = [task for task in tasks() if chosen(task)]
    if not todo:
        parser.error("nothing of that name runs on these families")
    found = collect(todo, options.jobs, options.write, options.device)
    if options.compare is None:
        print(f"{sum(1 for _ in found)} runs in {options.write}")
        return 0
    count = compare(options.compare, found, chosen, options.device, options.nearly)
    print(f"{len(todo)} runs, {count} differences")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
