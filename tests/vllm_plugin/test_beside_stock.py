"""An installed plug-in changes no vLLM that did not ask for a recipe, and a recipe reaches every vLLM that did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config")

import shipped
import tiny
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_architecture
from vllm.model_executor.models.adapters import as_embedding_model, as_seq_cls_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmaccel import accelerated
from mmaccel.integrations.vllm import ARCHITECTURES
from mmaccel.integrations.vllm.model import ReducedModel
from mmaccel.media.files import encode

pytestmark = pytest.mark.vllm

QWEN, LLAVA = "mini-qwen-vl", "mini-llava"
DIVPRUNE = {"recipe": "divprune", "retain": 0.25}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "llava_onevision", "internvl")
EMBED = {"runner": "pooling", "convert": "embed"}
#: answers of a language model as classes: the probability of one word beside another
CLASSIFY = {"runner": "pooling", "convert": "classify"}
JUDGE = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
#: vLLM 0.32 reads it there
JUDGE |= {"text_config": {"tie_word_embeddings": False}}


def _config(name: str, hf_overrides: Any = None, **options: Any) -> Any:
    made = EngineArgs(str(shipped.MODELS / name), dtype="float32", hf_overrides=hf_overrides or {}, **options)
    return made.create_engine_config().model_config


def _figures(models: Path) -> dict[str, Any]:
    """What vLLM does with models, as figures."""
    (asked,) = shipped.prompts("existence", count=1)
    request = shipped.request(QWEN, asked)
    found: dict[str, Any] = {}
    with tiny.engine(shipped.MODELS / QWEN) as llm:
        found["generate"] = shipped.served(llm, [request])
    with tiny.engine(shipped.MODELS / QWEN, hf_overrides=JUDGE, **CLASSIFY) as llm:
        found["classify"] = [one.outputs.probs for one in llm.classify([request], use_tqdm=False)]
        found["judge"] = [
            one.outputs.score for one in llm.score("is there a square ?", ["red", "blue"], use_tqdm=False)
        ]
    for family in FAMILIES:
        with tiny.engine(tiny.folder(family, models), **EMBED) as llm:
            requests = [tiny.prompt(family, row) for row in tiny.rows(family, "image", 1)]
            found[family] = [one.outputs.embedding for one in llm.embed(requests, use_tqdm=False)]
            scores = llm.score("red square", ["red circle", "blue"], use_tqdm=False)
            found[f"score {family}"] = [one.outputs.score for one in scores]
    return found


def test_what_did_not_ask_for_a_recipe_is_stock(tmp_path: Path) -> None:
    """Answers, embeddings, classes and scores of all architectures, in processes with and without the plug-in."""
    seen = []
    for plugins in ("", "mmaccel"):
        out = tmp_path / f"{plugins or 'none'}.json"
        environment = {**os.environ, "VLLM_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(tmp_path), str(out)]
        subprocess.run(command, env=environment, check=True)
        seen.append(json.loads(out.read_text(encoding="utf-8")))
    assert seen[0] == seen[1] and len(seen[0]) == 3 + 2 * len(FAMILIES)


def test_classes_are_stock_but_for_the_overrides_of_the_caller() -> None:
    """In every order in one process, and for what vLLM derives from them."""
    plain, asked = _config(QWEN), _config(QWEN, {"mmaccel": DIVPRUNE})
    for config, ours in ((plain, False), (asked, True), (plain, False), (asked, True)):
        made, name = get_model_architecture(config)
        assert issubclass(made, ReducedModel) == ours and name == "Qwen2_5_VLForConditionalGeneration"
    for name in ARCHITECTURES:
        stock, _ = ModelRegistry.resolve_model_cls(name, plain)
        assert stock.__module__.startswith("vllm."), name
        for derive in (as_embedding_model, as_seq_cls_model):
            assert not issubclass(derive(stock), ReducedModel)


def _by_function(config: Any) -> Any:
    config.mmaccel = DIVPRUNE
    return config


def _nothing(config: Any) -> Any:
    return config


@pytest.mark.parametrize(
    "overrides, ours",
    [
        ({"mmaccel": DIVPRUNE}, True),
        ({"mmaccel": DIVPRUNE, "text_config": {"max_window_layers": 1}}, True),
        ({"mmaccel": None}, False),
        (_by_function, True),
        ({}, False),
        ({"text_config": {"max_window_layers": 1}}, False),
        (_nothing, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", [False, True], ids=["plain", "with the key"])
def test_only_the_caller_turns_a_recipe_on(overrides: Any, ours: bool, key: bool, tmp_path: Path) -> None:
    """Not a checkpoint whose config.json has the key, even with a recipe that could not be served."""
    place = tmp_path / QWEN
    place.mkdir()
    for file in (shipped.MODELS / QWEN).iterdir():
        (place / file.name).symlink_to(file)
    if key:
        said = json.loads((place / "config.json").read_text(encoding="utf-8"))
        (place / "config.json").unlink()
        (place / "config.json").write_text(json.dumps({**said, "mmaccel": {"recipe": "snapkv"}}), encoding="utf-8")
    made = EngineArgs(str(place), dtype="float32", hf_overrides=overrides)
    config = made.create_engine_config().model_config
    assert issubclass(get_model_architecture(config)[0], ReducedModel) == ours


def test_a_recipe_inside_a_nested_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="hf_overrides has mmaccel inside 'text_config'"):
        _config(QWEN, {"text_config": {"mmaccel": DIVPRUNE}})


def test_a_recipe_behind_a_bare_engine_of_the_same_folder_is_served() -> None:
    """And a bare engine behind that: vLLM remembers classes by the folder."""
    (asked,) = shipped.prompts("existence", count=1)
    request = shipped.request(QWEN, asked)
    lengths = []
    for recipe in (None, DIVPRUNE, None):
        with tiny.engine(shipped.MODELS / QWEN, recipe) as llm:
            lengths.append(shipped.length(llm, request))
    assert lengths[1] < lengths[0] == lengths[2]


#: options of processors that clients of vLLM send
OPTIONS = {
    "qwen": {"min_pixels": 784, "max_pixels": 100352, "size": None, "fps": 2, "patch_size": 14, "num_frames": 4},
    "llava": {"do_resize": True, "size": {"height": 32, "width": 32}, "crop_size": None, "do_rescale": True},
    "intern": {"crop_to_patches": True, "max_patches": 4, "min_patches": 1},
}


@pytest.mark.parametrize("family", [*FAMILIES, "pixtral"])
def test_options_of_every_processor_are_told_from_those_that_nobody_reads(family: str, models: Path) -> None:
    made = EngineArgs(str(tiny.folder(family, models)), dtype="float32", hf_overrides={"mmaccel": DIVPRUNE})
    config = made.create_engine_config().model_config
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    usual = next(options for name, options in OPTIONS.items() if family.startswith(name) or name == "llava")
    usual |= {"images_kwargs": {"do_resize": True}, "text_kwargs": {"padding": True}, "return_tensors": "pt"}
    processor._check_known(usual)
    for wrong in ("retian", "recipe", "positions", "budget", "keep", "ratio", "mmacel", "numbering", "variant"):
        for given in ({wrong: 0.1}, {"images_kwargs": {wrong: 0.1}}):
            with pytest.raises(ValueError, match=f"Nothing reads '{wrong}'"):
                processor._check_known({**usual, **given})


def _last_states(asked: list[shipped.Prompt]) -> torch.Tensor:
    """``[N, D]``: what transformers makes of prompts, reduced, at their last token, of length 1."""
    model, processor = shipped._loaded(QWEN)
    found = []
    for prompt in asked:
        with torch.inference_mode(), accelerated(model, "divprune", processor=processor, retain=0.25):
            out = model(**encode(processor, [prompt]), output_hidden_states=True)
        found.append(out.hidden_states[-1][0, -1])
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


def test_embeddings_of_reduced_prompts_are_those_of_transformers() -> None:
    asked = shipped.prompts("existence", "comparison", count=3)
    requests = [shipped.request(QWEN, one) for one in asked]
    with tiny.engine(shipped.MODELS / QWEN, DIVPRUNE, **EMBED) as llm:
        out = llm.embed(requests, use_tqdm=False)
    with tiny.engine(shipped.MODELS / QWEN, **EMBED) as llm:
        whole = llm.embed(requests, use_tqdm=False)
    assert all(len(a.prompt_token_ids) < len(b.prompt_token_ids) for a, b in zip(out, whole, strict=True))
    made = torch.tensor([one.outputs.embedding for one in out])
    torch.testing.assert_close(made, _last_states(asked), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made, torch.tensor([one.outputs.embedding for one in whole]), atol=1e-2)


def test_classes_of_reduced_prompts_are_those_of_transformers() -> None:
    asked = shipped.prompts("existence", "comparison", count=3)
    model, processor = shipped._loaded(QWEN)
    no, yes = processor.tokenizer.convert_tokens_to_ids(["no", "yes"])
    want = []
    for prompt in asked:
        with torch.inference_mode(), accelerated(model, "divprune", processor=processor, retain=0.25):
            out = model(**encode(processor, [prompt]))
        want.append(torch.sigmoid(out.logits[0, -1, yes] - out.logits[0, -1, no]))
    with tiny.engine(shipped.MODELS / QWEN, DIVPRUNE, hf_overrides=JUDGE, **CLASSIFY) as llm:
        out = llm.classify([shipped.request(QWEN, one) for one in asked], use_tqdm=False)
    made = torch.tensor([one.outputs.probs[0] for one in out])
    torch.testing.assert_close(made, torch.stack(want), rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    _models, _out = map(Path, sys.argv[1:])
    _out.write_text(json.dumps(_figures(_models)), encoding="utf-8")
