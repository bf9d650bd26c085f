"""``mmaccel bench``: shapes are those of the real models, inputs fit them, arithmetic agrees with what runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import numpy as np
import pytest
import torch
import transformers
from tail import few
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from mmaccel import Recipe, Stage, accelerated, get_recipe
from mmaccel.cli import main
from mmaccel.cli.shared import bench_report
from mmaccel.core.stats import Stats
from mmaccel.errors import MmaccelError, UnsupportedError
from mmaccel.kv.cache import cache_bytes
from mmaccel.programs.bench import provenance, shapes
from mmaccel.programs.bench.arithmetic import (
    Operations,
    count_operations,
    promised_decode,
    promised_ttft,
    stored_bytes,
    unread_bytes,
    weight_bytes,
)
from mmaccel.programs.bench.figures import Spread, changed, ratios, verdict
from mmaccel.programs.bench.paper_claims import CLAIMS, Claim, claims_table, measured
from mmaccel.programs.bench.run import OUT_OF_MEMORY, PARTS, Bench, Case, Stamps, Variant
from mmaccel.programs.bench.shapes import SHAPES, build, count_parameters, skeleton
from mmaccel.programs.bench.workloads import WORKLOADS, ModelSubject, ShapeSubject, Workload, noise, workload
from mmaccel.runtime.call.call import Call, VisionState, pop, push

pytestmark = pytest.mark.usefixtures("cheap_collections")
CPU = torch.device("cpu")
PUBLISHED = [name for name, shape in SHAPES.items() if shape.source]


@pytest.fixture(scope="module")
def tiny() -> ShapeSubject:
    return ShapeSubject(build("tiny", CPU, torch.float32), SHAPES["tiny"])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run at the command line."""
    path = tmp_path_factory.mktemp("bench") / "a.json"
    argv = ["bench", "--shape", "tiny", "--workload", "picture-336", "--recipe", "uniform", "resize"]
    argv += [
        "--retain",
        "0.5",
        "0.25",
        "--max-new-tokens",
        "3",
        "--repeats",
        "2",
        "--batch-size",
        "1",
        "--concurrency",
        "1",
        "2",
    ]
    assert main([*argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.full
# --- shapes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_as_many_as_published(name):
    published = SHAPES[name].parameters
    assert count_parameters(skeleton(name)) / 1e9 == pytest.approx(published, rel=0.006)


@pytest.mark.parametrize(
    ("name", "layers", "heads", "kv_heads", "head", "tower_layers", "tower_heads"),
    [
        # what the number of weights does not tell apart
        ("llava-1.5-7b", 32, 32, 32, 128, 24, 16),
        ("llava-1.5-13b", 40, 40, 40, 128, 24, 16),
        ("llava-onevision-0.5b", 24, 14, 2, 64, 26, 16),
        ("llava-onevision-7b", 28, 28, 4, 128, 26, 16),
        ("qwen2-vl-2b", 28, 12, 2, 128, 32, 16),
        ("qwen2-vl-7b", 28, 28, 4, 128, 32, 16),
        ("qwen2.5-vl-3b", 36, 16, 2, 128, 32, 16),
        ("qwen2.5-vl-7b", 28, 28, 4, 128, 32, 16),
        ("qwen3-vl-8b", 36, 32, 8, 128, 27, 16),
        ("internvl3-8b", 28, 28, 4, 128, 24, 16),
        ("smolvlm2-2.2b", 24, 32, 32, 64, 27, 16),
        ("qwen3-vl-30b-a3b", 48, 32, 4, 128, 27, 16),
        ("idefics3-8b", 32, 32, 8, 128, 27, 16),
        ("mistral-small-3.1-24b", 40, 32, 8, 128, 24, 16),
        ("pixtral-12b", 40, 32, 8, 128, 24, 16),
        ("hunyuanocr-1b", 24, 16, 8, 128, 27, 16),
    ],
)
def test_layers_and_heads(name, layers, heads, kv_heads, head, tower_layers, tower_heads):
    config = SHAPES[name].config()
    text, vision = config.text_config, config.vision_config
    assert (text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (layers, heads, kv_heads)
    assert (getattr(text, "head_dim", None) or text.hidden_size // heads) == head
    assert getattr(vision, "depth", None) or vision.num_hidden_layers == tower_layers
    assert getattr(vision, "num_heads", None) or vision.num_attention_heads == tower_heads


def test_every_weight_and_buffer_is_initialised(monkeypatch):
    stock = torch.nn.Module.to_empty

    def poisoned(self, **options):
        made = stock(self, **options)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return made

    monkeypatch.setattr(torch.nn.Module, "to_empty", poisoned)
    model = build("tiny", CPU, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    usual = transformers.AutoModelForImageTextToText.from_config(SHAPES["tiny"].config())
    for (name, made), (_, meant) in zip(model.named_buffers(), usual.named_buffers(), strict=True):
        assert torch.equal(made, meant), name


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(shapes, "free_memory", lambda device: 20 * 2**30)
    with pytest.raises(MmaccelError, match=r"'llava-1.5-7b' needs about 30 GiB in float32, but cpu has 20 GiB free"):
        build("llava-1.5-7b", CPU, torch.float32)


# --- workloads --------------------------------------------------------------------------------------------------------
def shrunk(name: str) -> ShapeSubject:
    """A shape with the same plan and pictures but hardly any layers and width."""
    shape = SHAPES[name]
    return ShapeSubject(build(name, CPU, torch.float32, decode.thin(shape.config(), 4)), shape)


FAMILIES = {
    # tokens of one picture of 336 pixels, of the tiled one, and of 4 frames
    "llava-1.5-7b": (576, 5 * 576, None),
    "llava-next-7b": (576 + 24 * 25, 576 + 48 * 49, None),
    "llava-onevision-7b": (729 + 27 * 28, 729 + 27 * 82, 4 * 196 + 1),
    "qwen2-vl-7b": (144, 2880, 2 * 144),
    "qwen2.5-vl-7b": (144, 2880, 2 * 144),
    "qwen3-vl-8b": (100, 2880, 2 * 100),
    "qwen3-vl-30b-a3b": (100, 2880, 2 * 100),
    "glm-4.1v-9b": (144, 2880, 2 * 144),
    "internvl3-8b": (256, 11 * 256, 4 * 256),
    "smolvlm2-2.2b": (81, 36 * 81, 4 * 81),
    "idefics3-8b": (169, 17 * 169, None),
    "mistral-small-3.1-24b": (144, 53 * 54, None),
    "pixtral-12b": (441, 2880, None),
    "hunyuanocr-1b": (10 * 11 + 2, 48 * 61 + 2, None),
}


@pytest.mark.parametrize("name", few(FAMILIES, ("llava-1.5-7b", "qwen2.5-vl-7b")))
def test_inputs_fit_the_model(name):
    subject = shrunk(name)
    picture, tiled, clip = FAMILIES[name]
    loads = [(WORKLOADS["picture-336"], picture), (WORKLOADS["tiles-2880"], tiled), (Workload(frames=4), clip)]
    for work, tokens in loads:
        pixels = subject.pixels(work)
        assert pixels.dtype == np.uint8
        if tokens is None:
            with pytest.raises(UnsupportedError, match="takes no video"):
                subject.inputs(work, [pixels])
            continue
        # two rows but for the large picture
        rows = 1 if work.tiled else 2
        inputs = subject.inputs(work, [pixels] * rows)
        visual = (inputs["input_ids"] == shapes.IMAGE) | (inputs["input_ids"] == shapes.VIDEO)
        assert visual.sum(1).tolist() == [tokens] * rows
        if work.tiled and subject.shape.cell:
            continue  # thousands of patches, and nothing that the others do not show
        with torch.inference_mode(), accelerated(subject.model, "uniform", retain=0.5, processor=subject.processor):
            subject.model.generate(**inputs, max_new_tokens=1, do_sample=False)
            stats, layout = subject.model.mmaccel.stats(), subject.model.mmaccel.layout
        assert stats["visual_tokens"] == rows * tokens
        if work.frames:
            # frames of a row are one clip, wherever text stands between them
            assert len({segment.picture for segment in layout.segments}) == rows


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tiled_picture_makes_about_2880_tokens(name):
    kind = "llava-onevision-7b" if "onevision" in name else name.replace("13b", "7b")
    kind = {"qwen2-vl-2b": "qwen2-vl-7b", "qwen2.5-vl-3b": "qwen2.5-vl-7b", "qwen3-vl-4b": "qwen3-vl-8b"}.get(
        kind, kind
    )
    assert FAMILIES[kind][1] == pytest.approx(2880, rel=0.03)


def test_patches_are_those_of_the_processor():
    subject = shrunk("qwen2.5-vl-7b")
    pixels = subject.pixels(Workload(pictures=1, side=56 * 3))
    ours = subject.inputs(Workload(pictures=1), [pixels])
    theirs = transformers.Qwen2VLImageProcessor(do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    found = theirs(images=[pixels[0]], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == ours["image_grid_thw"].tolist()
    torch.testing.assert_close(ours["pixel_values"], found["pixel_values"], atol=1e-5, rtol=0)


def test_patches_row_by_row_are_those_of_the_processor():
    subject, pixels = shrunk("hunyuanocr-1b"), noise(1, 192, 128, clip=False)
    ours = subject.inputs(Workload(pictures=1), [pixels])
    theirs = transformers.HunYuanVLImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    found = theirs(images=[pixels[0]], return_tensors="pt", do_resize=False)
    assert found["image_grid_thw"].tolist() == ours["image_grid_thw"].tolist() == [[1, 12, 8]]
    torch.testing.assert_close(ours["pixel_values"], found["pixel_values"], atol=1e-5, rtol=0)


def test_a_page_is_of_letter_paper_with_lines_of_text():
    subject, work = shrunk("qwen2.5-vl-7b"), workload("page-30")
    pixels = subject.pixels(work)
    assert pixels.shape == (1, 330, 255, 3)
    dark = (pixels[0].mean(-1) < 128).any(1)
    # blank edges of an inch, and four lines an inch, each with a gap behind it
    assert not dark[:30].any() and not dark[-30:].any() and 30 <= (dark[1:] & ~dark[:-1]).sum() <= 40
    visual = subject.inputs(work, [pixels])["input_ids"] == shapes.IMAGE
    assert visual.sum() == 12 * 9
    tiles = shrunk("internvl3-8b")
    with pytest.raises(UnsupportedError, match="internvl reads a page in tiles; the workload tiles-2880 has them"):
        tiles.inputs(work, [pixels])


def test_tiles_are_those_of_the_processor(tiny):
    pixels = tiny.pixels(WORKLOADS["tiles-2880"])
    ours = tiny.inputs(WORKLOADS["tiles-2880"], [pixels])["pixel_values"]
    theirs = transformers.LlavaOnevisionImageProcessor(
        size={"height": 64, "width": 64},
        image_grid_pinpoints=tiny.model.config.image_grid_pinpoints,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        resample=2,
    )
    found = theirs(images=[pixels[0]], return_tensors="pt")["pixel_values"]
    assert ours.shape == found.shape
    # the base image is resized by another library; the tiles are cut alone
    torch.testing.assert_close(ours[:, 1:], found[:, 1:], atol=1e-5, rtol=0)


def test_a_model_with_a_processor():
    import zoo

    subject = ModelSubject(zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl"))
    rows = Bench(subject, 1).measure(Case("picture-336", 2, 2), [("resize", get_recipe("resize").override(retain=0.1))])
    assert [row["problem"] for row in rows] == [None, None]
    # fewer pixels, fewer tokens, fewer operations in the tower
    assert rows[1]["operations"]["vision"] < rows[0]["operations"]["vision"]
    assert rows[1]["kv_bytes"] < rows[0]["kv_bytes"]


@pytest.mark.parametrize("what", ["shape", "workload"])
def test_an_unknown_name_lists_the_known(what, capsys):
    argv = ["bench", "--shape", "tiny", "--workload", "picture-336"]
    argv[argv.index(f"--{what}") + 1] = "nonsense"
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"There is no {what} 'nonsense'; known are " in said
    assert all(name in said for name in (SHAPES if what == "shape" else WORKLOADS))


# --- arithmetic -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    few(["tiny", "qwen2.5-vl-7b", "internvl3-8b", "qwen3-vl-30b-a3b"], ["tiny", "qwen2.5-vl-7b", "internvl3-8b"]),
)
def test_operations_are_those_that_run(name):
    subject = ShapeSubject(build("tiny", CPU, torch.float32), SHAPES["tiny"]) if name == "tiny" else shrunk(name)
    model, work = subject.model, WORKLOADS["picture-336"]
    # written out, attention is a product that the counter sees, whole although half of it is masked
    model.set_attn_implementation("eager")
    if "a3b" in name:
        # and so are the products of experts
        model.set_experts_implementation("eager")
    inputs = subject.inputs(work, [subject.pixels(work)])
    ours = count_operations(model, lambda: model(**inputs, logits_to_keep=1))
    config, tokens = model.config.text_config, inputs["input_ids"].shape[1]
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    masked = 2.0 * width * config.num_hidden_layers * tokens**2
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(**inputs, logits_to_keep=1)
    products = counter.get_flop_counts()["Global"]
    convolved = sum(count for operation, count in products.items() if "convolution" in str(operation))
    assert ours.total + masked == pytest.approx(sum(products.values()) - convolved, rel=0.01)


def test_reduction_saves_operations_where_it_happens(tiny):
    inputs = tiny.inputs(WORKLOADS["picture-336"], [tiny.pixels(WORKLOADS["picture-336"])])

    def spent(name: str | None) -> Operations:
        if name is None:
            return count_operations(tiny.model, lambda: tiny.model(**inputs, logits_to_keep=1))
        with accelerated(tiny.model, name, retain=0.25):
            return count_operations(tiny.model, lambda: tiny.model(**inputs, logits_to_keep=1))

    bare, pruned, merged, evicted = (spent(name) for name in (None, "uniform", "tome", "snapkv"))
    assert pruned.vision == bare.vision and pruned.language < 0.5 * bare.language
    assert merged.vision < bare.vision and merged.language < bare.language
    assert vars(evicted) == vars(bare)


def test_promises():
    parts = {"decoding": 1.0, "preparation": 1.0, "vision": 2.0, "selection": 0.0, "prefill": 4.0, "rest": 2.0}
    # the tower takes half, the language model a quarter: 10 s - 1 s - 3 s
    assert promised_ttft(parts, Operations(8.0, 8.0), Operations(4.0, 2.0)) == pytest.approx(10 / 6)
    assert promised_decode(100, 300.0, 100.0) == pytest.approx(2.0)


def test_a_decode_step_reads_layers_and_head(tiny):
    text = tiny.model.model.language_model
    layers = sum(weight.numel() for layer in text.layers for weight in layer.parameters())
    assert weight_bytes(tiny.model) == 4 * (layers + 512 * 64)


# --- figures ----------------------------------------------------------------------------------------------------------
def test_spread_and_verdicts():
    assert Spread((1.0, 2.0, 3.0, 4.0, 5.0)).notch == pytest.approx(1.57 * 2 / 5**0.5)
    assert ratios([2.0, 9.0], [1.0, 3.0]).samples == (2.0, 3.0)
    steady, shaky = Spread((1.5, 1.51, 1.52, 1.5)), Spread((0.5, 1.5, 2.5, 1.5, 0.6))
    assert verdict(steady) == "faster" and verdict(shaky) == "same" and verdict(Spread((0.8, 0.81, 0.8))) == "slower"
    assert verdict(Spread((1.02, 1.021, 1.02))) == "same", "a change of 2% is none"
    assert changed(steady, Spread((1.3, 1.31, 1.3, 1.3))) == -1 and changed(steady, shaky) == 0
    assert changed(Spread((1.3, 1.31, 1.3, 1.3)), steady) == 1
    lower = Spread((0.5, 1.2, 2.5, 1.2, 0.6))
    assert changed(steady, lower) == changed(lower, steady) == 0, "the medians differ, but the spreads overlap"


@pytest.mark.full
# --- running ----------------------------------------------------------------------------------------------------------
def test_rows(tiny):
    modules = list(tiny.model.modules())

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    Bench(tiny, 1).measure(Case("video-32", 1, 1), [])  # transformers leaves hooks of its own at the first call
    before = hooks()
    rows = Bench(tiny, 3).measure(Case("video-32", 4, 2), [("half", get_recipe("uniform").override(retain=0.5))])
    assert hooks() == before and not hasattr(tiny.model, "mmaccel")
    assert not any(name.startswith("get_") for name in tiny.model.model.__dict__)
    bare, half = rows
    assert [row["name"] for row in rows] == ["bare", "uniform"] and half["retain"] == 0.5
    for row in rows:
        figures, parts = row["figures"], row["parts_s"]
        assert set(parts) == set(PARTS) and all(parts[name] > 0 for name in ("preparation", "vision", "prefill"))
        assert sum(parts.values()) == pytest.approx(figures["ttft_s"]["median"], rel=0.5)
        assert all(len(found["samples"]) == 3 for found in figures.values())
        assert figures["ttft_s"]["median"] < figures["total_s"]["median"]
    assert bare["parts_s"]["selection"] == 0.0 < half["parts_s"]["selection"]
    assert half["tokens"]["visual_tokens_kept"] == 2 * 257 and "speedup" not in bare
    # 4 layers of 2 heads of 16, keys and values in float32, for every token that a cache holds
    places = 1 + 16 + 513 + 32 + 3
    assert bare["kv_bytes"] == 2 * places * 4 * 2 * 16 * 2 * 4
    assert half["saved"]["kv_bytes"] == bare["kv_bytes"] - half["kv_bytes"] > 0
    for name in ("ttft", "decode", "requests"):
        assert half["promised"][name] > 1
        assert half["realised"][name] == pytest.approx(half["speedup"][name]["median"] / half["promised"][name])


def test_drafts_run_beside_the_bare_model_and_the_recipe(tiny):
    """Decode speed with and without: lossless ones against the bare model, others against their recipe, too."""
    recipes = [("half", get_recipe("uniform").override(retain=0.5))]
    bench, case = Bench(tiny, 2), Case("picture-336", 24, 2)
    bare, half, drafted = bench.measure(case, recipes, drafts={"lookup": True})
    assert [half["recipe"], drafted["recipe"]] == ["half", "half, lookup"] and drafted["name"] == "uniform, lookup"
    assert drafted["drafting"]["tokens"] == 2 * 24 and not half["drafting"] and "drafting" in bare
    assert half["kv_bytes"] == drafted["kv_bytes"] < bare["kv_bytes"]
    bare, drafted = bench.measure(case, recipes, drafts={"lossless": True, "lookup": True})
    assert drafted["recipe"] == "half, lossless, lookup" and drafted["step_bytes"] == bare["step_bytes"]
    forwards = drafted["drafting"]["verifications"]
    assert drafted["promised"]["decode"] == pytest.approx(23 / forwards) and "decode" in drafted["speedup"]
    text = bench_report.render({**_about_nothing(), "rows": [bare, drafted]})
    assert "half, lossless, lookup: " in text and "forwards saved" in text


def test_drafts_without_some_layers_are_promised_less_than_free_ones(tiny):
    """Every drafted token reads the layers that are left: half of them and the head."""
    bench, case = Bench(tiny, 1), Case("picture-336", 24, 2)
    _, drafted = bench.measure(case, [("bare", get_recipe("none"))], drafts={"lossless": True, "draft": [2, 3]})
    sums, held = drafted["drafting"], weight_bytes(tiny.model)
    layers = sum(p.nbytes for layer in tiny.model.model.language_model.layers[2:] for p in layer.parameters())
    assert weight_bytes(tiny.model, [2, 3]) == held - layers < held
    steps = sums["verifications"] + sums["drafted"] / 2 * (held - layers) / held
    assert sums["drafted"] > 0 and drafted["promised"]["decode"] == pytest.approx(23 / steps)


def _about_nothing() -> dict[str, Any]:
    """A report without rows."""
    model = {"name": "tiny", "parameters": 1, "dtype": "float32", "attention": "sdpa", "shape": "tiny"}
    return {"model": model, "machine": {"processor": "none"}, "repeats": 2}


def test_decoding_a_clip_is_part_of_the_first_token(tiny):
    pytest.importorskip("av")
    bare, *_ = Bench(tiny, 1).measure(Case("video-32", 1, 1), [])
    assert bare["parts_s"]["decoding"] > 0


def test_without_pyav_decoding_is_left_out_and_said(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    bare, *_ = Bench(tiny, 1).measure(Case("video-32", 1, 1), [])
    assert bare["parts_s"]["decoding"] == 0 and any("PyAV" in note for note in bare["notes"])


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), marks=pytest.mark.full),
    ],
)
def test_out_of_memory_ends_one_workload(tiny, monkeypatch, error):
    stock = Bench.once

    def short_of_memory(self: Bench, case: Case, variant: Variant) -> Any:
        if variant.title == "greedy":
            raise error
        return stock(self, case, variant)

    monkeypatch.setattr(Bench, "once", short_of_memory)
    rows = Bench(tiny, 1).measure(
        Case("picture-336", 1, 1), [("greedy", get_recipe("uniform")), ("pool", get_recipe("pool"))]
    )
    assert [row["problem"] for row in rows] == [None, OUT_OF_MEMORY, None]
    assert "speedup" in rows[2]


def test_what_a_model_cannot_take_is_said_once():
    rows = Bench(shrunk("llava-1.5-7b"), 1).measure(Case("video-32", 1, 1), [("half", get_recipe("uniform"))])
    assert [row["problem"] for row in rows] == ["LLaVA 1.5 takes no video"]


def test_selection_in_decode_steps_is_no_part_of_the_first_token():
    plan = SimpleNamespace(kernels="auto")
    call, stamps = Call(plan, Stats("any"), VisionState(None)), Stamps()  # type: ignore[arg-type]
    push(call)
    try:
        for spent in (0.0, 1.0, 5.0):
            call.stats.clock._seconds["selection"] = spent
            stamps.put(None)
    finally:
        pop(call)
    assert stamps.selection == 1.0 and len(stamps.times) == 3


def test_other_errors_are_not_swallowed(tiny, monkeypatch):
    monkeypatch.setattr(Bench, "once", lambda *_: (_ for _ in ()).throw(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        Bench(tiny, 1).measure(Case("picture-336", 1, 1), [])


def test_a_closed_loop_serves_rounds_of_all_clients(tiny, monkeypatch):
    served = []
    stock = Bench.service
    monkeypatch.setattr(
        Bench, "service", lambda self, case, processor: served.append(1) or stock(self, case, processor)
    )
    (row,) = Bench(tiny, 1).measure(Case("picture-336", 2, 3, loop=True), [])
    assert len(served) == 2 * 2, "a warm-up and a sample, of two rounds each"
    figures = row["figures"]
    assert figures["requests_per_s"]["median"] == pytest.approx(3 / figures["total_s"]["median"])


# --- the command ------------------------------------------------------------------------------------------------------
def test_report(report):
    assert report["model"]["shape"] == "tiny" and report["versions"]["torch"] == torch.__version__
    assert report["command"].startswith("mmaccel bench --shape tiny") and "/" not in report["command"]
    recipes = [row["recipe"] for row in report["rows"] if not row["closed_loop"]]
    assert recipes == ["bare", "uniform 0.5", "uniform 0.25", "resize 0.5", "resize 0.25"]
    refused = [row for row in report["rows"] if row["name"] == "resize"]
    assert all("a shape does not have; give --model" in row["problem"] for row in refused)
    text = bench_report.render(report)
    assert "136 -> 34" in text and "random weights" in text
    for row in report["rows"]:
        if "slower" in row.get("verdict", {}).values():
            assert f"{row['recipe']}: SLOWER than the bare model: " in text


def test_losses_are_printed_with_their_reason(report):
    row = copy.deepcopy(next(row for row in report["rows"] if row["recipe"] == "uniform 0.25"))
    row["verdict"], row["reasons"] = {"ttft": "slower", "requests": "same"}, ["first token: selection takes 9.0 ms"]
    assert bench_report.losses(row) == [
        "uniform 0.25: SLOWER than the bare model: first token (first token: selection takes 9.0 ms)"
    ]
    row["verdict"], row["reasons"] = {"ttft": "same", "decode": "slower"}, []
    assert bench_report.losses(row) == [
        "uniform 0.25: SLOWER than the bare model: decoding; no difference in the first token beyond noise"
    ]


def slowed(report: dict[str, Any], factor: float) -> dict[str, Any]:
    made = copy.deepcopy(report)
    for row in made["rows"]:
        for found in row.get("speedup", {}).values():
            found["samples"] = [value * factor for value in (2.0, 2.1, 2.05)]
    return made


def test_compare_tells_regressions_from_noise(report, tmp_path, capsys):
    paths = [tmp_path / name for name in ("before.json", "noise.json", "slower.json", "broken.json")]
    broken = slowed(report, 1.0)
    broken["rows"][1] = {**broken["rows"][1], "problem": OUT_OF_MEMORY}
    made = [slowed(report, 1.0), slowed(report, 0.97), slowed(report, 0.8), broken]
    for path, content in zip(paths, made, strict=True):
        path.write_text(json.dumps(content))
    before, noise, slower, broken_path = map(str, paths)
    assert main(["bench", "--compare", before, noise]) == 0
    assert "0 regressions" in capsys.readouterr().out
    assert main(["bench", "--compare", before, slower]) == 1
    assert "REGRESSION picture-336, batch 1, answer of 3, uniform 0.5: first token 2.05x" in capsys.readouterr().out
    assert main(["bench", "--compare", slower, before]) == 0
    assert "improvement" in capsys.readouterr().out
    assert main(["bench", "--compare", before, broken_path]) == 1
    assert f"uniform 0.5: {OUT_OF_MEMORY}" in capsys.readouterr().out


def test_compare_wants_two_reports(report, tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(report))
    paths[1].write_text("[]")
    assert main(["bench", "--compare", *map(str, paths)]) == 2
    assert "holds no results of mmaccel bench" in capsys.readouterr().err
    paths[1].write_text(json.dumps({**report, "rows": []}))
    assert main(["bench", "--compare", *map(str, paths)]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_plots(report, tmp_path):
    pytest.importorskip("matplotlib")
    made = bench_report.draw(report, tmp_path / "plots")
    assert [path.name for path in made] == ["ttft.png", "memory.png", "throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_help_and_lists(capsys):
    assert main(["bench", "--help"]) == 0
    assert "closed loop" in capsys.readouterr().out
    assert main(["bench", "--shape", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*SHAPES, *WORKLOADS))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shape", "tiny", "--model", "x"], "not both"),
        (["--shape", "tiny", "--repeats", "0"], "--repeats"),
        (["--shape", "tiny", "--json", "/nowhere/x.json"], "does not exist"),
        (["--shape", "tiny", "--recipe", "nonsense"], "nonsense"),
    ],
)
def test_bad_options(argv, said, capsys):
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


# --- benchmarks/decode.py ---------------------------------------------------------------------------------------------
def test_from_where_on_a_smaller_cache_pays():
    step = decode.DecodeStep.of(skeleton("qwen2.5-vl-7b", torch.bfloat16))
    # 28 layers of 4 heads of 128, keys and values in two bytes
    assert step.token == 28 * 4 * 128 * 2 * 2 and step.limit(8192) < 1.04
    equal = step.pays_from(2.0)
    assert equal * step.token == pytest.approx(step.weights) and step.seconds(equal, 1e12) == 2 * step.seconds(0, 1e12)
    for share in (0.0, 0.25):
        assert step.limit(step.pays_from(1.5, share), share) == pytest.approx(1.5)
    assert step.pays_from(2.0, 0.5) == float("inf") and decode.thousands(step.pays_from(4.0, 0.25)) == "never"


PAGE = Path(__file__).parent.parent / "docs" / "decoding.md"


@pytest.mark.parametrize("name", few(PUBLISHED, ("qwen2.5-vl-7b",)))
def test_the_page_says_what_arithmetic_gives(name):
    text = decode.arithmetic_table([decode.arithmetic(name, decode.H200 * 1e12)], decode.H200 * 1e12, "")
    assert text.splitlines()[-1] in PAGE.read_text(encoding="utf-8").splitlines()


class Read(TorchFunctionMode):
    """Notes the bytes of keys and values of every attention to one new token."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].shape[2] == 1:
            self.bytes.append(args[1].nbytes + args[2].nbytes)
        return func(*args, **(kwargs or {}))


def test_what_is_left_unread_counts_as_it_is_stored(tiny):
    """A fifth of a picture is read from the third layer on; packed tokens that are left out spare what they take packed."""
    depth = tiny.model.config.text_config.num_hidden_layers
    stats = {"stages": [{"method": "quest", "tokens_in": 100, "resolved": 20}, {"method": "kivi", "tokens_in": 100}]}
    for token in (1000.0, 300.0):
        assert unread_bytes(tiny.model, get_recipe("quest"), stats, token) == round(80 * token * (depth - 2) / depth)
    codec = Stage("kivi", None, {"page": 16, "group": 16, "residual": 4, "bits": 4})
    made = Recipe("both", (*get_recipe("quest").override(retain=0.25).stages, codec))
    alone, both = (
        Bench(tiny, 1).measure(Case("pictures-2", 4, 1), [("made", one)])[-1]
        for one in (get_recipe("quest").override(retain=0.25), made)
    )
    assert 0 < both["step_bytes"]["kv"] < alone["step_bytes"]["kv"] < alone["kv_bytes"]


@pytest.mark.parametrize("name", [None, "snapkv", "dycoke-cache"])
def test_bytes_of_a_step_are_those_that_attention_is_given(tiny, name):
    made = [] if name is None else [(name, get_recipe(name).override(retain=0.25))]
    bench = Bench(tiny, 1)
    with Read() as read:
        row = bench.measure(Case("pictures-2", 4, 1), made)[-1]
    layers = tiny.model.config.text_config.num_hidden_layers
    assert row["step_bytes"]["kv"] == sum(read.bytes[-layers:])
    assert row["step_bytes"]["weights"] == weight_bytes(tiny.model)
    assert row["kv_bytes"] == row["step_bytes"]["kv"] + row["step_bytes"]["metadata"] or name == "dycoke-cache"


def test_spare_room_of_a_cache_is_held_and_not_stored():
    cache = transformers.DynamicCache()
    room = torch.zeros(1, 2, 64, 8)
    cache.update(room[:, :, :5], room[:, :, :5], 0)
    layer = cache.layers[0]
    layer.keys, layer.values = room[:, :, :5], room[:, :, 5:10]
    assert stored_bytes(cache) == (2 * 2 * 5 * 8 * 4, 0) and cache_bytes(cache) == room.nbytes


def test_pictures_make_the_prompt_that_is_asked_for(tiny):
    count, length = decode.pictures_for(tiny, 1000)
    work = workload(f"pictures-{count}")
    assert tiny.inputs(work, [tiny.pixels(work)])["input_ids"].shape[1] == length
    assert 1000 - (length - decode.pictures_for(tiny, 1)[1]) // (count - 2) < length <= 1000


def test_a_layer_costs_the_host_the_same_at_any_depth():
    def launches(layers: int) -> float:
        return decode.counted("tiny", layers, Variant("bare"), CPU, 2).launches

    two, four, eight = (launches(layers) for layers in (2, 4, 8))
    assert eight - four == 2 * (four - two) > 0


def test_what_is_asked_of_the_host_is_told(monkeypatch, capsys):
    variants = [Variant("bare"), Variant(decode.COMPILED, options={"cache_implementation": "dynamic"})]
    variants += [Variant(name, get_recipe(name)) for name in ("none", "adakv")]
    rows = decode.host("tiny", variants, CPU, 1, 2)
    bare, static, none, adakv = rows
    assert none["step"] == bare["step"] and bare["step"]["waits"] == 1 and bare["layer"]["waits"] == 0
    assert adakv["layer"]["launches"] >= bare["layer"]["launches"] and adakv["layer"]["waits"] == 0
    assert "step" not in static and all(row["us_layer"]["samples"] for row in rows)
    told = decode.host_table(rows, False)
    assert "a simulated CUDA device, mean of 2 steps; 4 layers" in told and f"| {decode.COMPILED} | " in told


def test_what_others_cannot_do_is_a_result_and_what_we_cannot_a_fault(tiny):
    strange = Variant("strange", options={"cache_implementation": "nonsense"})
    bare, other = Bench(tiny, 1).measure(Case("pictures-1", 2, 1), [], [strange])
    assert bare["problem"] is None and "nonsense" in other["problem"] and "\n" not in other["problem"]


def test_steps_are_written_as_they_come(tmp_path, capsys):
    path, page = tmp_path / "a.json", tmp_path / "page.md"
    page.write_text("<!-- decode-steps -->\n<!-- /decode-steps -->\n")
    argv = ["--shape", "tiny", "--keys", "200", "--batch", "2", "--answer", "3", "--repeats", "1", "--only", "steps"]
    assert decode.main([*argv, "--recipe", "h2o-decode", "--out", str(path), "--update", str(page)]) == 0
    found = json.loads(path.read_text())
    assert {"command", "date", "machine", "versions"} <= set(found) and "triton" in found["versions"]
    bare, h2o = found["steps"]
    assert bare["shape"] == "tiny" and bare["batch"] == 2 and bare["keys"] <= 200
    # the last token of the answer is never read
    assert bare["step_bytes"]["kv"] == 2 * (bare["keys"] + 2) * 512 * 2
    assert h2o["step_bytes"]["kv"] < bare["step_bytes"]["kv"] and h2o["promised"]["decode"] > 1
    told = page.read_text()
    assert f"| 2 x {bare['keys']} | h2o-decode | " in told and found["command"] in told
    assert "static cache is left out" in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_with_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(decode, "free_memory", lambda device: 2**19)
    argv = [
        "--shape",
        "tiny",
        "--keys",
        "300",
        "--answer",
        "3",
        "--repeats",
        "1",
        "--recipe",
        "none",
        "--only",
        "steps",
    ]
    assert decode.main(argv) == 0
    out, err = capsys.readouterr()
    assert "| 1 x 244 | bare | - |" in out and "left out, needs about" in err


def test_the_length_from_which_on_a_kernel_is_faster():
    def row(kind: str, keys: int, ratio: float) -> dict[str, Any]:
        kind = f"decode attention, {kind}"
        return {"kind": kind, "keys": keys, "batch": 1, "faster_than_the_fastest_dense_by": ratio}

    rows = [
        row("kivi 4 bit", 4096, 1.5),
        row("kivi 4 bit", 1024, 0.7),
        row("kivi 4 bit", 64, 1.1),
        row("kivi 2 bit", 1024, 0.5),
    ]
    rows += [row("ragged", 1024, 1.0), row("ragged", 4096, 1.2), row("dense", 1024, 1.0)]
    assert decode.break_even(rows) == [
        "kivi 4 bit, batch 1: faster than dense from 4,096 keys on (the lengths measured); 1.50x at 4,096",
        "kivi 2 bit, batch 1: not faster than dense up to 1,024 keys; 0.50x at 1,024",
        "ragged, batch 1: faster than dense from 4,096 keys on (the lengths measured); 1.20x at 4,096",
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shape", "nonsense"], "There is no shape 'nonsense'; known are llava-1.5-7b"),
        (["--shape", "tiny", "--recipe", "nonsense"], "nonsense"),
        (["--shape", "tiny", "--keys", "0"], "must be 1 or more"),
        (["--arithmetic", "--bandwidth", "0"], "--bandwidth above 0"),
        (["--shape", "tiny", "--out", "/nowhere/x.json"], "does not exist"),
        (["--kernel"], "--kernel needs a GPU"),
    ],
)
def test_bad_options_of_decode_are_refused_in_a_sentence(argv, said, capsys):
    assert decode.main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_decode_teaches_what_it_measures(capsys):
    with pytest.raises(SystemExit) as done:
        decode.main(["--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0 and "--arithmetic" in said and "python benchmarks/decode.py" in said


# --- claims, origin ---------------------------------------------------------------------------------------------------
def test_claims_name_what_exists():
    for claim in CLAIMS:
        assert claim.shape is None or claim.shape in SHAPES
        assert claim.workload is None or workload(claim.workload)
        assert claim.ratio > 1 and claim.source


def test_a_claim_finds_its_row(report):
    claim = Claim("uniform", "ours", "25%", "flops", 3.0, "made up", "tiny", "picture-336", 0.25)
    ((row, ratio),) = measured(claim, report)
    assert row["recipe"] == "uniform 0.25" and ratio == row["promised"]["flops"] > 1
    assert not measured(dataclasses.replace(claim, shape="small"), report)
    assert not measured(dataclasses.replace(claim, workload="video-32"), report)
    prefill = measured(dataclasses.replace(claim, figure="prefill"), report)
    bare = report["rows"][0]["parts_s"]["prefill"]
    assert prefill[0][1] == pytest.approx(bare / (row["parts_s"]["prefill"] + row["parts_s"]["selection"]))
    table = claims_table([report])
    assert len(table) == 1 + len(CLAIMS) and all("not measured here" in line for line in table[1:])


def test_no_folder_of_this_machine_is_told():
    told = provenance.command("mmaccel", arguments=["eval", "--json", "/home/someone/x.json", "sub/y.json"])
    assert told == "mmaccel eval --json x.json sub/y.json"
    assert set(provenance.versions()) == {"python", "torch", "transformers", "mmaccel"}


@pytest.mark.full
def test_the_gpu_report_runs_dry(tmp_path):
    import subprocess

    script = Path(__file__).parent.parent / "benchmarks" / "gpu_report.sh"
    done = subprocess.run(
        ["bash", script, "--dry-run", tmp_path], env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}, check=False
    )
    assert done.returncode == 0
    made = {path.name for path in tmp_path.iterdir()}
    # of the shipped models the first alone
    assert {"decode.json", "kernels.json", "bench-tiny.json"} <= made and any(
        name.startswith("eval-mini-") for name in made
    )
