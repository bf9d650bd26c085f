"""The table of `docs/decoding.md` that says which decode steps are captured: every line is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mmaccel_kernels.decode
import pytest
import recorded
import simulated
import torch
import zoo
from laws.helpers import close, ending_in_a_picture, follow, generate, inputs, logits, model
from laws.oracle import WINDOWED
from tail import few
from transformers import CompileConfig

from mmaccel import Recipe, Stage, accelerated
from mmaccel.runtime.graphs import replay

STEPS = 24
PAGES = {"page": 32, "group": 32, "residual": 4, "bits": 4}


def of(*stages: tuple[str, float | None, dict[str, Any]]) -> Recipe:
    return Recipe("-".join(method for method, *_ in stages), tuple(Stage(*stage) for stage in stages))


def run(
    recipe: Recipe,
    kind: str = "image",
    steps: int = STEPS,
    ready: Callable[[Any], Any] = lambda tiny: None,
    **options: Any,
) -> dict[str, Any]:
    """What the statistics say of a call whose tokens, logits and cache are those of ordinary steps."""
    family, text = options.pop("family", "llava"), options.pop("text", {})
    tiny, feed = model(family, **text), options.pop("feed", None) or inputs(family, kind)
    options = {"new": steps + 1, "min_new_tokens": steps + 1, **options}
    made = []
    with accelerated(tiny, recipe, processor=zoo.processor(family)):
        for more in ({"disable_compile": True}, {}):
            handle = ready(tiny)
            torch.manual_seed(0)
            made.append(generate(tiny, feed, **{**more, **options}))
            stats = tiny.mmaccel.stats()
            if handle is not None:
                handle.remove()
    agree(*made)
    return stats


def agree(wanted: Any, got: Any) -> None:
    assert torch.equal(wanted.sequences, got.sequences)
    close(logits(got), logits(wanted))


SNAPKV = ("snapkv", 0.5, {"window": 8})
QUEST, LOKI = ("quest", 0.3, {"page": 3, "least": 1, "layer": 1}), ("loki", 0.3, {"layer": 1})
TOKENSELECT = ("tokenselect", 0.3, {"layer": 1})
SQUEEZED = ("squeezed-attention", 0.3, {"clusters": 0.3, "layer": 1})
SHADOW = ("shadowkv", 0.3, {"page": 3, "layer": 1})
KIVI = ("kivi", None, PAGES)
H2O = ("h2o", 0.3, {"joint": True})
UNIFORM = of(("divprune", 0.3, {}))


def evicting(every: int, steps: int) -> dict[str, Any]:
    return run(of(("h2o", 0.3, {"joint": True, "every": every})), steps=steps)


def second_turn() -> dict[str, Any]:
    tiny, first, words = model("llava"), inputs("llava", "uneven"), inputs("llava", "text", batch=2)
    made, options = [], {"new": STEPS + 1, "min_new_tokens": STEPS + 1}
    with accelerated(tiny, UNIFORM):
        for more in ({"disable_compile": True}, {}):
            out = generate(tiny, first, **options, **more)
            feed, _ = follow(first, out, words)
            made.append(generate(tiny, feed, past_key_values=out.past_key_values, **options, **more))
        stats = tiny.mmaccel.stats()
    agree(*made)
    return stats


def drafted() -> dict[str, Any]:
    feed = inputs("llava")
    # words that come again, and are not followed by placeholders, which the model could not fill
    said = zoo.tokenizer("llava")(
        "it is: a: b: c a b c: d e f ", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    for name, more in (("input_ids", said), ("attention_mask", torch.ones_like(said))):
        feed[name] = torch.cat([more, feed[name]], dim=1)
    return run(UNIFORM, feed=feed, prompt_lookup_num_tokens=3)


def drafting(recipe: Recipe, kind: str = "image", how: Any = None, **options: Any) -> dict[str, Any]:
    """What the statistics say of a call with drafts, whose tokens are those of a call without them."""
    tiny, feed, how = model("llava"), inputs("llava", kind), how or {"lookup": "tokenrecycling"}
    options = {"max_new_tokens": STEPS + 1, "do_sample": False, **options}
    with accelerated(tiny, Recipe("none") if how.get("lossless") else recipe):
        plain = tiny.generate(**feed, **options, disable_compile=True)
    with accelerated(tiny, recipe, **how):
        out = tiny.generate(**feed, **options)
        stats = tiny.mmaccel.stats()
    tokens, wanted = (getattr(one, "sequences", one) for one in (out, plain))
    assert torch.equal(tokens, wanted)
    return stats


LOSSLESS = {"lookup": "tokenrecycling", "lossless": True}


def compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with simulated.machine() as gpu:
        tiny = gpu.put(zoo.model("llava"))
        with accelerated(tiny, of(QUEST)):
            tiny.generate(**gpu.put(inputs("llava")), max_new_tokens=4, compile_config=CompileConfig())
            return tiny.mmaccel.stats()


def hooked(tiny: Any) -> Any:
    return tiny.lm_head.register_forward_hook(lambda *_: None)


#: by the first cell of the line: what is run, one call or more
LINES: dict[str, list[Callable[..., dict[str, Any]]]] = {
    "a recipe that leaves heads equally many keys, or reduces the prompt only": [
        lambda: run(UNIFORM),
        lambda: run(of(SNAPKV)),
    ],
    "heads that keep different counts (`adakv`)": [
        lambda: run(of(("snapkv", 0.5, {"window": 8, "head_budget": "adaptive"})))
    ],
    "packed keys (`kivi` and the other codecs)": [lambda: run(of(KIVI), "images", steps=50)],
    "a recipe that evicts while decoding, with `every=16`": [lambda: evicting(16, 40)],
    "the same with `every=1`": [lambda: evicting(1, STEPS)],
    "`quest`, `tokenselect`, `loki`, `squeezed-attention`, `shadowkv`": [
        lambda stage=stage: run(of(stage)) for stage in (QUEST, TOKENSELECT, LOKI, SQUEEZED, SHADOW)
    ],
    "`quest`, `loki`, `squeezed-attention`, `shadowkv` on packed keys": [
        lambda stage=stage: run(of(stage, KIVI), "images", steps=50) for stage in (QUEST, LOKI, SQUEEZED, SHADOW)
    ],
    "`tokenselect` on packed keys": [lambda: run(of(TOKENSELECT, KIVI), "images")],
    "`lazyllm`": [lambda: run(of(("lazyllm-tokens", 0.3, {"layer": 1}), ("lazyllm-tokens", 0.2, {"layer": 2})))],
    "`memvr`": [lambda: run(of(("divprune", 0.3, {}), ("memvr", None, {})))],
    "`mcmoe`": [lambda: run(of(("mcmoe", None, {})), family="qwen3_vl_moe")],
    "`dycoke-cache`": [lambda: run(of(("dycoke-cache", 0.3, {"layer": 2})))],
    "a text model with sliding windows": [
        lambda family=family, text=text: run(UNIFORM, family=family, text=text) for family, text in WINDOWED
    ],
    "rows that begin with padding": [lambda: run(UNIFORM, "uneven"), lambda: run(of(SNAPKV), "uneven")],
    "rows without pictures beside rows that have some": [
        lambda: run(of(SNAPKV), "textrow"),
        lambda: run(of(KIVI), "textrow"),
        lambda: run(of(("h2o", 0.3, {"every": 32, "joint": True, "recent": 4})), "textrow", steps=48),
    ],
    "several pictures, and clips": [
        lambda: run(UNIFORM, "images"),
        lambda: run(of(SNAPKV), "mixed", family="qwen2_5_vl"),
    ],
    "a second turn on a kept cache": [second_turn],
    "sampling": [lambda: run(UNIFORM, do_sample=True)],
    "a prompt without pictures": [lambda: run(UNIFORM, "text")],
    "a prompt whose last token is one of its picture, with positions of three axes": [
        lambda: run(UNIFORM, family="qwen2_5_vl", feed=ending_in_a_picture("qwen2_5_vl"))
    ],
    "beams": [lambda: run(UNIFORM, num_beams=2)],
    "`prompt_lookup_num_tokens`": [drafted],
    "`lookup=True`, `draft=` a smaller model, also with `lossless=True`": [
        lambda: drafting(of(SNAPKV), "uneven"),
        lambda: drafting(UNIFORM, how=LOSSLESS),
        lambda: drafting(UNIFORM, how={"lossless": True, "draft": zoo.loaded_draft("llava")}),
    ],
    'drafts over the same cache: skipped layers, heads, `quest` with `draft="self"`': [
        lambda: drafting(UNIFORM, how={"lossless": True, "draft": [2]}),
        lambda: drafting(of(QUEST), how={"lossless": True, "draft": "self"}),
    ],
    "`lossless=True` for several rows": [lambda: drafting(UNIFORM, "uneven", LOSSLESS)],
    "`lossless=True` with a cache that you keep": [
        lambda: drafting(UNIFORM, how=LOSSLESS, return_dict_in_generate=True)
    ],
    "an answer of fewer than 16 tokens": [lambda: run(UNIFORM, steps=8)],
    "a model on which somebody else has put hooks": [lambda: run(UNIFORM, ready=hooked)],
    "a call that asks for attention weights or hidden states": [lambda: run(UNIFORM, output_hidden_states=True)],
    "`disable_compile=True`": [lambda: run(UNIFORM, disable_compile=True)],
    "`compile_config=` on a GPU with a recipe that reads some keys only": [compiled_on_a_gpu],
}


def table() -> dict[str, tuple[str, str]]:
    """The lines of the table: whether they are captured, and the last cell."""
    page = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")
    lines = page.split("<!-- decode-captures -->")[1].split("<!-- /decode-captures -->")[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: (captured, why) for name, captured, why in cells}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded and replayed here as they are on a GPU."""
    monkeypatch.setattr(mmaccel_kernels.decode, "attend", mmaccel_kernels.decode.traced)
    monkeypatch.setattr(replay, "recordable", lambda device: True)
    monkeypatch.setattr(replay, "record", recorded.record)


SHORT_LINES = (
    *("`tokenselect` on packed keys", "a prompt without pictures", "beams", "`prompt_lookup_num_tokens`"),
    "`lookup=True`, `draft=` a smaller model, also with `lossless=True`",
)


def test_every_line_is_run() -> None:
    assert list(table()) == list(LINES)


@pytest.mark.parametrize(
    "line",
    few(LINES, SHORT_LINES),
)
def test_what_the_table_says(line: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, why = table()[line]
    for case in LINES[line]:
        stats = case(monkeypatch) if case is compiled_on_a_gpu else case()
        assert captured in ("yes", "no")
        if captured == "yes":
            assert stats["captured_steps"] >= stats["decode_steps"] // 4 and stats["uncaptured"] == ""
        else:
            assert stats["captured_steps"] == 0 and why.strip('"') in stats["uncaptured"], stats["uncaptured"]
