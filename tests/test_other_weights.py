"""Models whose weights are quantised or adapted: PEFT, torchao, bitsandbytes; each where its package is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import close, generate, inputs, logits, model
from torch import nn

from mmaccel import MmaccelError, Stage, accelerate_vlm, accelerated
from mmaccel.cli.ask import SHIPPED
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


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_adapters_are_what_they_are_when_merged(recipe: str) -> None:
    """LoRA beside the weights, in them, and switched off."""
    peft = pytest.importorskip("peft")
    feed, how = inputs("llava", "uneven"), RECIPES[recipe]
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "up_proj"], r=4, init_lora_weights=False)
    outer = peft.get_peft_model(zoo.model("llava"), config).eval()
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
