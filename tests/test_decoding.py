"""Decode steps that read the cache as it is stored give what steps over padded and decoded heads give."""

from __future__ import annotations

import pytest
import torch
import zoo
from tail import in_turn

from mmaccel import accelerated
from mmaccel.kv import decoding
from mmaccel.kv.packed import QuantisedLayer
from mmaccel.recipe import Recipe, Stage

RECIPES = {
    "ragged": Recipe("ragged", (Stage("snapkv", 0.4, {"window": 8, "head_budget": "adaptive"}),)),
    "packed": Recipe("packed", (Stage("kivi", None, {"page": 16, "residual": 0, "group": 16}),)),
    "narrow keys": Recipe("narrow", (Stage("think", None, {"page": 32, "residual": 0, "align": 4}),)),
    "waves, some protected": Recipe(
        "protected", (Stage("vidkv", None, {"page": 32, "fourier": True, "protect": 0.3}),)
    ),
    "ragged, text apart": Recipe(
        "apart",
        (
            Stage("snapkv", 0.6, {"window": 8, "head_budget": "adaptive"}),
            Stage("calibquant", None, {"page": 16}),
            Stage("fp8", None, {"page": 16, "text_only": True}),
        ),
    ),
}


def steps(model, recipe, inputs, then, **generate):
    """Logits of a first turn of 6 tokens; logits of ``then [B, n]`` new tokens on the same cache."""
    with torch.no_grad(), accelerated(model, recipe):
        out = model.generate(
            **inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True,
            output_logits=True, **generate,
        )  # fmt: skip
        fresh = torch.ones(len(then), 6 - 1 + then.shape[1]).long()
        # the new turn of the last row is shorter, and padded on the left
        short = then.shape[1] // 2
        fresh[-1, 5 : 5 + short] = 0
        mask = torch.cat([inputs["attention_mask"], fresh], dim=1)
        more = model(input_ids=then, attention_mask=mask, past_key_values=out.past_key_values).logits
    return torch.stack(out.logits), more[:, short:]


@pytest.mark.parametrize(("family", "name", "new"), in_turn(["llava", "qwen2_5_vl"], RECIPES, [1, 5, 17]))
def test_the_same_logits_without_padding(family, name, new, monkeypatch):
    model, inputs = zoo.model(family), dict(zoo.inputs(family, batch=2))
    then = torch.randint(10, 60, (2, new), generator=torch.Generator().manual_seed(0))
    want = steps(model, RECIPES[name], inputs, then)
    read, padded, masked = [], [], []
    attend, stored = decoding.attend, QuantisedLayer.stored

    def watched(layer, query, visible, scaling, **options):
        if not read:
            # what the prompt needed
            padded.clear()
        read.append(query.shape[2])
        masked.append(visible is not None)
        return attend(layer, query, visible, scaling, **options)

    monkeypatch.setattr("mmaccel.runtime.call.readers.attend", watched)
    monkeypatch.setattr(QuantisedLayer, "stored", lambda layer: padded.append(layer.number) or stored(layer))
    monkeypatch.setattr(decoding, "on_gpu", lambda x: True)
    layers = len(model.model.language_model.layers)
    got = steps(model, RECIPES[name], inputs, then)
    assert read == [1] * (5 * layers) + [new] * (layers if new <= 16 else 0)
    assert bool(padded) == (new > 16)
    if name == "ragged":
        # lengths say it all, until a turn is padded
        assert masked == [False] * (5 * layers) + [new > 1] * (layers if new <= 16 else 0)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, atol=2e-5, rtol=2e-5)


def test_eager_attention_still_returns_its_weights(monkeypatch):
    model, inputs = zoo.model("llava"), dict(zoo.inputs("llava"))
    model.set_attn_implementation("eager")
    monkeypatch.setattr(decoding, "on_gpu", lambda x: True)
    with torch.no_grad(), accelerated(model, RECIPES["ragged"]):
        out = model.generate(**inputs, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    assert all(weights is not None for step in out.attentions for weights in step)


def test_attention_over_parts_is_attention_over_all() -> None:
    """Parts count by what a query sees of them; one that sees nothing gets nothing."""
    rng = torch.Generator().manual_seed(0)
    logits, values = (torch.randn(1, 2, 3, n, generator=rng) for n in (9, 9))
    values = values.mT.contiguous()
    logits[..., 1, :4] = logits[..., 2, :] = -torch.inf
    parts = []
    for some in (slice(0, 4), slice(4, 6), slice(6, 9)):
        share = logits[..., some].softmax(-1).nan_to_num(0.0)
        parts.append((share @ values[:, :, some], logits[..., some].logsumexp(-1)))
    wanted = logits.softmax(-1).nan_to_num(0.0) @ values
    torch.testing.assert_close(decoding.combine_partials(parts), wanted)
    assert not wanted[..., 2, :].any()
    seeing = [(out[..., :2, :], lse[..., :2]) for out, lse in parts]
    torch.testing.assert_close(decoding.combine_partials(seeing, all_see=True), wanted[..., :2, :])
