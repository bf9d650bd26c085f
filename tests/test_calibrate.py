"""``calibrate`` measures what the heads of a model do, resumes, and policies use its file for this model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from laws import oracle

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerated
from mmaccel.cli import main
from mmaccel.families import family_of
from mmaccel.method.calibration import Calibration
from mmaccel.programs import calibrate as program
from mmaccel.programs.calibrate import calibrate
from mmaccel.programs.evaluate import ask_suite

pytestmark = pytest.mark.usefixtures("no_gradients")


def made(family: str, out: Path, questions: int = 1, **options: Any) -> Calibration:
    asked = ask_suite(["colour"], questions, pixels=28)
    return calibrate(zoo.model(family), zoo.processor(family), asked, out=out, period=6, repeats=3, **options)


def test_echo_and_induction_are_those_of_the_attention_maps(tmp_path: Path) -> None:
    found = made("llava", tmp_path / "out")
    model, processor = zoo.model("llava"), zoo.processor("llava")
    ids = program.random_tokens(family_of(model, processor), processor, 6, 3, 0)
    begin = ids.shape[1] - 18
    assert torch.equal(ids[0, begin : begin + 6].repeat(3), ids[0, begin:]) and len(set(ids[0, begin:].tolist())) == 6
    model.set_attn_implementation("eager")
    maps = model(input_ids=ids, output_attentions=True).attentions
    for layer, paid in enumerate(maps):
        echo, induction = torch.zeros(paid.shape[1]), torch.zeros(paid.shape[1])
        for query in range(begin + 6, begin + 18):
            for key in range(begin + (query - begin) % 6, query, 6):
                echo += paid[0, :, query, key]
                induction += paid[0, :, query, key + 1]
        for name, scores in (("echo", echo), ("induction", induction)):
            group = scores.unflatten(0, (len(found.figures[name][layer]), -1)).amax(1) / ids.shape[1] ** 2
            torch.testing.assert_close(found.figures[name][layer], group, atol=1e-6, rtol=1e-4)


def test_gates_are_those_of_the_mean_query_and_key_at_every_position(tmp_path: Path) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    found = made("llava", tmp_path / "out")
    model, processor = zoo.model("llava"), zoo.processor("llava")
    question = ask_suite(["colour"], 1, pixels=28)[0]
    feed = program.inputs_of(model, processor, [(question, question.load())])
    text = family_of(model, processor).text
    held: dict[tuple[int, str], torch.Tensor] = {}
    for number, layer in enumerate(text.layers):
        for name in ("q_proj", "k_proj"):
            getattr(layer.self_attn, name).register_forward_hook(
                lambda _, args, out, key=(number, name): held.update({key: out[0].mean(0)})
            )
    model(**feed)
    size = feed["input_ids"].shape[1]
    for number, layer in enumerate(text.layers):
        width = layer.self_attn.head_dim
        query, key = (
            held[number, name].view(1, -1, 1, width).expand(-1, -1, size, -1) for name in ("q_proj", "k_proj")
        )
        cos, sin = text.rotary_emb(query, torch.arange(size)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        paid = (query[0, :, -1:] @ key[0].mT * width**-0.5).softmax(-1)[:, 0]
        area = torch.stack([paid[:, : j + 1].sum(1) for j in range(size)]).mean(0)
        gates = found.figures["gates"][number]
        torch.testing.assert_close(gates, area.unflatten(0, (len(gates), -1)).mean(1), atol=1e-5, rtol=1e-4)


def test_a_run_that_was_broken_off_resumes_with_the_same_settings_alone(tmp_path: Path) -> None:
    out, read = tmp_path / "out", []

    def stop(what: str, done: int, of: int) -> None:
        read.append(done)
        if done == 2 and len(read) < 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made("llava", out, 2, progress=stop)
    assert (tmp_path / "out.part").exists() and not out.exists()
    with pytest.raises(MmaccelError, match=r"out.part' belongs to a run with different settings .*seed.*; delete it"):
        made("llava", out, 2, seed=1)
    resumed = made("llava", out, 2, progress=stop)
    assert read == [0, 1, 2, 2, 3] and [path.name for path in tmp_path.iterdir()] == ["out"]
    whole = made("llava", tmp_path / "whole", 2)
    for name, figures in whole.figures.items():
        for layer, x in figures.items():
            assert torch.equal(x, resumed.figures[name][layer])
            assert torch.equal(x, Calibration.load(out).figures[name][layer])


@pytest.mark.parametrize("family", ("qwen2_5_vl", "gemma3", "lfm2_vl"))
def test_every_layer_with_attention_is_measured_and_the_model_is_left_as_it_was(tmp_path: Path, family: str) -> None:
    model = zoo.model(family)
    before = model.config.get_text_config()._attn_implementation
    asked = ask_suite(["colour"], 1, pixels=28)
    found = calibrate(model, zoo.processor(family), asked, out=tmp_path / "out", period=6, repeats=2)
    known = family_of(model)
    for name, figures in found.figures.items():
        assert {layer: len(x) for layer, x in figures.items()} == {
            known.stored_from(layer): known.heads_in(layer)[0] for layer in known.attending
        }, name
    assert model.config.get_text_config()._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())


def test_policies_keep_whole_heads_as_the_file_says(tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = made("llava", out).figures["gates"]
    feed, model = zoo.inputs("llava"), oracle.subject("llava")
    with accelerated(model, "duoattention", calibration=str(out), sparsity=0.5, sinks=1, recent=2) as fast:
        cache = fast(**feed, use_cache=True).past_key_values
    bar = torch.cat(list(figures.values())).double().quantile(0.5)
    for layer, gates in figures.items():
        held = (cache.layers[layer].index.by_head[0] >= 0).sum(-1).expand(len(gates)).tolist()
        assert held == [feed["input_ids"].shape[1] if gate >= bar else 3 for gate in gates.double()]
    with accelerated(model, "duoattention", calibration=str(out), sparsity=1.0, sinks=1, recent=2) as fast:
        cache = fast(**feed, use_cache=True).past_key_values
    assert all(int((layer.index.by_head >= 0).sum(-1).max()) == 3 for layer in cache.layers)


def test_filters_of_a_file_replace_those_of_the_prompt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filters = made("llava", out).figures["filters"]
    feed, model = zoo.inputs("llava"), oracle.subject("llava")
    bare = model(**feed, use_cache=True).past_key_values
    with accelerated(model, "qfilter", calibration=str(out), retain=0.3, joint=True) as fast:
        cache = fast(**feed, use_cache=True).past_key_values
    for layer, directions in filters.items():
        held = cache.layers[layer].index.by_head[0]
        score = -(bare.layers[layer].keys[0] * directions[:, None]).sum(-1)
        best = score.topk(held.shape[-1], dim=-1).indices.sort(-1).values
        assert torch.equal(best, held.long())


@pytest.mark.parametrize("name", ("razorattention", "duoattention"))
def test_without_a_file_or_with_that_of_another_model_a_sentence_says_what_to_run(tmp_path: Path, name: str) -> None:
    model = zoo.model("llava")
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(UnsupportedError, match=r"`mmaccel calibrate --model MODEL -o calibration.safetensors`"):
        mmaccel.accelerate_vlm(model, name)
    made("llava", tmp_path / "out")
    other = zoo.model("llava", seed=1)
    with pytest.raises(UnsupportedError, match="was made for a model with other weights; make one for it with"):
        mmaccel.accelerate_vlm(other, name, calibration=str(tmp_path / "out"))
    (tmp_path / "bad").write_bytes(b"no")
    with pytest.raises(MmaccelError, match="not a safetensors file, or a damaged one; give another file, or make one"):
        mmaccel.accelerate_vlm(model, name, calibration=str(tmp_path / "bad"))
    with pytest.raises(MmaccelError, match="does not exist"):
        mmaccel.accelerate_vlm(model, name, calibration=str(tmp_path / "none"))


def test_the_command_measures_a_shipped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.safetensors"
    words = ["calibrate", "--suite", "colour", "--limit", "1", "--period", "8", "--repeats", "2", "-o", str(out)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert f"written: {out}" in told and all(name in told for name in ("echo", "induction", "gates", "filters"))
    assert set(Calibration.load(out).figures) == {"echo", "induction", "gates", "filters"}
