"""Models whose weights are quantised or adapted: PEFT, torchao, bitsandbytes, and layouts of four bits (GPTQ, AWQ,
compressed-tensors); each where its package is installed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import close, generate, inputs, logits, model
from torch import nn

from mmaccel import MmaccelError, Stage, accelerate_vlm, accelerated
from mmaccel.cli.ask import SHIPPED
from mmaccel.runtime.decoding import drafting
from mmaccel.suite import make_item

#: by choice, what reads weights or states in a way of its own: in the tower, before and inside the language model, in the cache
RECIPES: dict[str, Any] = {
    "tower": "tome",
    "before": "spacetime",
    "inside": [Stage("fastv", 0.4, {"layer": 2})],
    "cache": ["divprune", "snapkv"],
    "norms": "expected-attention",
    "packed": "kivi",
}


def quantised(kind: str) -> Any:
    """The shipped ``mini-llava``, loaded as users load a model with such weights."""
    pytest.importorskip({"int8": "torchao"}.get(kind, "bitsandbytes"))
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        config = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        # on a CPU bitsandbytes fails where the width is no multiple of 64, as in this tower
        whole = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
        values = {"load_in_8bit": True} if kind == "bnb-8bit" else {"load_in_4bit": True}
        config = transformers.BitsAndBytesConfig(llm_int8_skip_modules=whole, **values)
    return transformers.AutoModelForImageTextToText.from_pretrained(
        SHIPPED, dtype=torch.float32, quantization_config=config, device_map="cpu"
    ).eval()


#: weights that share a scale in the layouts of four bits
GROUP = 32
#: by choice: what configurations say of each layout, and how far products may be from those of floats, as kernels compute
FOUR_BITS: dict[str, tuple[dict[str, Any], float]] = {
    "gptq": ({"quant_method": "gptq", "desc_act": False, "sym": False}, 1e-2),
    # the back end that is chosen by itself compiles a program first
    "awq": ({"quant_method": "awq", "zero_point": True, "backend": "torch_awq"}, 3e-2),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
                }
            },
        },
        1e-5,
    ),
}


def eight_in_one(numbers: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """``[n, m]`` of four bits -> ``[n, m / 8]`` int32, of eight neighbours the one at ``order[i]`` at bit 4 i."""
    parts = numbers.long().unflatten(1, (-1, 8))[..., list(order)] << (4 * torch.arange(8))
    packed = parts.sum(-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


def in_layout(kind: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``weight [out, in]`` rounded to four bits: what a checkpoint of the layout holds of it, and what that means."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).half()
    numbers = (groups / scale.float()[..., None] + 8).round().clamp(0, 15)
    meant = ((numbers - 8) * scale.float()[..., None]).flatten(1)
    numbers = numbers.flatten(1)
    if kind == "compressed-tensors":
        shape = torch.tensor(weight.shape)
        held = {"weight_packed": eight_in_one(numbers), "weight_scale": scale.float(), "weight_shape": shape}
        return held, meant
    zeros = torch.full(scale.T.shape, 8)
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        held = {"qweight": eight_in_one(numbers.T, order), "qzeros": eight_in_one(zeros, order)}
        return {**held, "scales": scale.T}, meant
    # it stores one less
    held = {"qweight": eight_in_one(numbers).T, "qzeros": eight_in_one(zeros - 1), "scales": scale.T}
    return {**held, "g_idx": (torch.arange(weight.shape[1]) // GROUP).int()}, meant


def of_four_bits(kind: str, folder: Path) -> tuple[Any, nn.Module]:
    """The shipped ``mini-llava`` with the weights of its language model in a layout, and with floats that are the same."""
    needed = ["compressed_tensors"] if kind == "compressed-tensors" else ["gptqmodel", "optimum"]
    for package in needed:
        pytest.importorskip(package)
    from safetensors.torch import save_file

    floats = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    held, others = dict(floats.state_dict()), []
    for name, layer in floats.named_modules():
        if isinstance(layer, nn.Linear) and "language_model" in name:
            parts, layer.weight.data = in_layout(kind, held.pop(f"{name}.weight"))
            held |= {f"{name}.{part}": values for part, values in parts.items()}
        elif isinstance(layer, nn.Linear):
            others.append(name)
    how, _ = FOUR_BITS[kind]
    left = "ignore" if kind == "compressed-tensors" else "modules_to_not_convert"
    sizes = {} if kind == "compressed-tensors" else {"bits": 4, "group_size": GROUP}
    config = copy.deepcopy(floats.config)
    config.quantization_config = {**how, **sizes, left: others}
    config.save_pretrained(folder)
    save_file(
        {name: x.contiguous().clone() for name, x in held.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    packed = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu"
    ).eval()
    return packed, floats


def asked() -> dict[str, torch.Tensor]:
    """A question of the suite."""
    from PIL import Image

    processor, item = transformers.AutoProcessor.from_pretrained(SHIPPED), make_item("colour", "test", 0)
    content = [{"type": "image"}, {"type": "text", "text": item.turns[0].question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return dict(processor(images=Image.fromarray(item.pictures(112)[0]), text=text, return_tensors="pt"))


def as_floats(packed: nn.Module) -> nn.Module:
    """The same model with usual layers that hold what the quantised weights mean."""
    plain = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    held = dict(packed.named_modules())
    for name, layer in plain.named_modules():
        if isinstance(layer, nn.Linear):
            weight: Any = held[name].weight
            layer.weight.data = (weight.dequantize() if hasattr(weight, "scale") else weight).detach().float()
    return plain


def test_quantised_weights_are_what_they_mean() -> None:
    """Every recipe does the same to a model whose weights are dequantised in each product as to one that holds them as floats;
    bitsandbytes computes in other types on a CPU."""
    packed, feed = quantised("int8"), asked()
    floats = as_floats(packed)
    assert any(
        type(layer.weight.data) is not torch.Tensor for layer in packed.modules() if isinstance(layer, nn.Linear)
    )
    for recipe in ("none", *RECIPES.values()):
        found = []
        for one in (packed, floats):
            with accelerated(one, recipe):
                found.append(logits(generate(one, feed, new=4)))
        close(*found, tolerance=1e-3)


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_weights_of_four_bits_are_what_they_mean(kind: str, tmp_path: Path) -> None:
    """Every recipe does the same to a model whose weights are packed as to one that holds them as floats."""
    (packed, floats), feed = of_four_bits(kind, tmp_path), asked()
    with pytest.raises(MmaccelError, match="and those of this model are quantised"):
        accelerate_vlm(packed, "criticalkv")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32)
    with torch.no_grad():
        bare, exact = packed(**feed).logits, whole(**feed).logits
    assert (bare - exact).abs().max() > 0.1
    for recipe in ("none", *RECIPES.values()):
        found = []
        for one in (packed, floats):
            with accelerated(one, recipe):
                found.append(logits(generate(one, feed, new=4)))
        close(*found, tolerance=FOUR_BITS[kind][1])


@pytest.mark.parametrize("kind", ["int8", "bnb-4bit", "bnb-8bit"])
def test_quantised_models_answer(kind: str) -> None:
    packed, feed = quantised(kind), asked()
    bare = generate(packed, feed, new=4).sequences
    with accelerated(packed, "none"):
        assert torch.equal(generate(packed, feed, new=4).sequences, bare)
    for recipe in RECIPES.values():
        with accelerated(packed, recipe):
            assert generate(packed, feed, new=4).sequences.shape == bare.shape
    assert torch.equal(generate(packed, feed, new=4).sequences, bare)


def test_a_rule_that_reads_quantised_weights_is_refused() -> None:
    with pytest.raises(
        MmaccelError, match="reads the output projection of every attention layer, and those .* are quantised"
    ):
        accelerate_vlm(quantised("int8"), "criticalkv")


def adapted() -> Any:
    """A tiny model with LoRA beside its weights."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(zoo.model("llava"), config).eval()


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_adapters_are_what_they_are_when_merged(recipe: str) -> None:
    """LoRA beside the weights, in them, and switched off."""
    feed, how, outer = inputs("llava", "uneven"), RECIPES[recipe], adapted()
    merged = copy.deepcopy(outer).merge_and_unload()
    with accelerated(merged, how):
        wanted = logits(generate(merged, feed))
    with accelerated(model("llava"), how):
        bare = logits(generate(model("llava"), feed))
    accelerate_vlm(outer, how)
    found = logits(generate(outer, feed))
    close(found, wanted)
    assert (found - bare).abs().max() > 1e-2
    with outer.disable_adapter():
        close(logits(generate(outer, feed)), bare)
    close(logits(generate(outer, feed)), wanted)


def on_disk(folder: Path) -> Any:
    """The shipped ``mini-llava``, of whose layers all but one are on disk, and are fetched for every forward."""
    pytest.importorskip("accelerate")
    parts = ["vision_tower", "multi_modal_projector", *(f"language_model.{one}" for one in ("embed_tokens", "norm"))]
    placed: dict[str, str] = {f"model.{part}": "cpu" for part in [*parts, "language_model.rotary_emb"]}
    layers = transformers.AutoConfig.from_pretrained(SHIPPED).text_config.num_hidden_layers
    placed |= {f"model.language_model.layers.{n}": "disk" if n else "cpu" for n in range(layers)} | {"lm_head": "cpu"}
    return transformers.AutoModelForImageTextToText.from_pretrained(
        SHIPPED, dtype=torch.float32, device_map=placed, offload_folder=folder
    ).eval()


@pytest.mark.parametrize("draft", [{"lookup": True}, {"draft": "self"}, {"draft": [2, 3]}], ids=str)
@pytest.mark.parametrize("kind", ["int8", "bnb-4bit", "bnb-8bit", "lora", "disk"])
def test_drafts_change_no_answer(
    kind: str, draft: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a block of tokens runs through layers that somebody else has put in, or fetches."""
    # drafts are asked for in every block
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))
    one = adapted() if kind == "lora" else on_disk(tmp_path) if kind == "disk" else quantised(kind)
    feed, how = (inputs("llava", "uneven") if kind == "lora" else asked()), {"new": 40, "eos_token_id": 1 << 20}
    bare = generate(one, feed, **how).sequences
    accelerate_vlm(one, "divprune", retain=0.2, lossless=True, **draft)
    out = generate(one, feed, **how).sequences
    drafted = one.mmaccel.stats().drafting
    one.mmaccel.remove()
    assert torch.equal(out, bare) and 0 < drafted["accepted"] <= drafted["drafted"]
    assert drafted["verifications"] < 39
