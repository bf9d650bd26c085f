"""Biases of key projections: codecs take them out of keys before they pack these, and the result is that of keys with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from laws.helpers import follow, generate, inputs, logits, model
from laws.test_bytes import held
from laws.test_packing import by_place, divergence

from mmaccel import accelerated, load_cache, save_cache
from mmaccel.kv.cache import snapshot
from mmaccel.kv.decoding import attend
from mmaccel.kv.key_bias import KeyBias, Rotations
from mmaccel.programs.bench.arithmetic import stored_bytes
from mmaccel.runtime import build

#: with M-RoPE, and with one axis
FAMILIES = ("qwen2_5_vl", "internvl")
# by choice: those that the bias was measured for
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "kivi": ("kivi", {"bits": 2, "page": 16, "group": 16, "residual": 0}),
    "calibquant": ("calibquant", {"page": 16, "bits": 2}),
    "vidkv": ("vidkv", {"page": 32}),
    "fp8": ("fp8", {"page": 16}),
    "turboquant": ("turboquant", {"page": 16, "bits": 3}),
}


@contextlib.contextmanager
def biased(family: str, size: float) -> Iterator[Any]:
    """The tiny model, whose key projections have biases of this norm."""
    tiny = model(family)
    biases = [
        x for name, x in tiny.named_parameters() if name.endswith("self_attn.k_proj.bias") and "visual" not in name
    ]
    biases = [x for x in biases if x.shape == biases[-1].shape]
    before = [x.detach().clone() for x in biases]
    rng = torch.Generator().manual_seed(5)
    try:
        with torch.no_grad():
            for x in biases:
                new = torch.randn(x.shape, generator=rng)
                x.copy_(new * size / new.norm())
        yield tiny
    finally:
        with torch.no_grad():
            for x, old in zip(biases, before, strict=True):
                x.copy_(old)


@contextlib.contextmanager
def left_in() -> Iterator[None]:
    """Nothing is taken out of keys."""
    with patch.object(build, "key_biases", lambda family: {}):
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_large_bias_costs_nothing(family: str, codec: str) -> None:
    """The error of stored keys is as without a bias, and less than a third of what it is if the bias is packed too."""
    name, options = CODECS[codec]
    feed, errors, kl = inputs(family), [], []
    with biased(family, 600.0) as tiny:
        bare = tiny(**feed, use_cache=True)
        for context in (contextlib.nullcontext, left_in):
            with context(), accelerated(tiny, name, **options), torch.no_grad():
                out = tiny(**feed, use_cache=True)
                stored = by_place(out.past_key_values.mmaccel.layers[0])[0]
                true = bare.past_key_values.layers[0].keys
                assert out.past_key_values.mmaccel.layers[0].width > 0
                errors.append(float((stored - true).norm()))
                step = {"input_ids": feed["input_ids"][:, -1:]}
                kl.append(divergence(tiny(**step, past_key_values=out.past_key_values).logits, bare.logits[:, -1:]))
    assert errors[0] < errors[1] / 3, (errors, kl)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_packed_is_the_key_without_its_bias(family: str) -> None:
    """With RoPE as the model turns keys: eight bits of what is left are almost exact, however large the bias is."""
    feed = inputs(family)
    with biased(family, 1000.0) as tiny, torch.no_grad():
        bare = tiny(**feed, use_cache=True).past_key_values
        with accelerated(tiny, "kivi", bits=8, page=16, group=16, residual=0):
            packed = tiny(**feed, use_cache=True).past_key_values.mmaccel
    layer = packed.layers[0]
    keys, bias = by_place(layer)[0], layer.bias
    assert bias is not None and layer.pages is not None
    assert float(layer.pages.decoded()[0].norm(dim=-1).max()) < 100
    torch.testing.assert_close(keys, bare.layers[0].keys, atol=0.02, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_products_with_biases_are_those_of_whole_keys(family: str) -> None:
    """What kernels are told beside pages gives the attention over the keys as they are stored."""
    with biased(family, 30.0) as tiny, accelerated(tiny, "turboquant", page=16), torch.no_grad():
        out = generate(tiny, inputs(family, "uneven"), new=3).past_key_values
        for layer in out.mmaccel.layers:
            keys, values = layer.stored()
            groups = 2
            query = torch.randn(len(keys), keys.shape[1] * groups, 1, keys.shape[3])
            there = (layer.index.by_head >= 0)[:, :, None]
            ours = attend(layer, query, there, 0.2)
            mask = there.expand(-1, keys.shape[1], -1, -1).repeat_interleave(groups, 1)
            both = [x.repeat_interleave(groups, 1) for x in (keys, values)]
            theirs = torch.nn.functional.scaled_dot_product_attention(query, *both, mask, scale=0.2)
            torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_beams_and_evictions_keep_the_rotations(family: str) -> None:
    """Eight bits answer as the bare model over two turns, and beams as they do without a bias packed."""
    feed = inputs(family)
    with biased(family, 60.0) as tiny:
        bare = generate(tiny, feed, new=6)
        fine = {"bits": 8, "page": 16, "group": 16, "residual": 0}
        with accelerated(tiny, "kivi", **fine):
            out = generate(tiny, feed, new=6)
            kept, whole = follow(feed, out, inputs(family, seed=1))
            second = generate(tiny, kept, new=4, past_key_values=out.past_key_values)
            beams = generate(tiny, feed, new=4, num_beams=3)
        assert torch.equal(out.sequences, bare.sequences)
        assert divergence(logits(second), logits(generate(tiny, whole, new=4))) < 5e-3
        assert torch.equal(beams.sequences, generate(tiny, feed, new=4, num_beams=3).sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_parked_and_cropped_caches_keep_the_bias(family: str, tmp_path: Path) -> None:
    """Its bytes are reported, as metadata; a loaded cache, one in host memory and one that was rolled back go on alike."""
    feed, file = inputs(family), tmp_path / "cache.safetensors"
    fine = {"bits": 8, "page": 16, "group": 16, "residual": 0}
    with biased(family, 60.0) as tiny:
        with accelerated(tiny, "kivi", **fine), torch.no_grad():
            out = generate(tiny, feed, new=4)
            cache = out.past_key_values
            assert tiny.mmaccel.stats()["kv_bytes"] == held(cache)
            layers = cache.mmaccel.layers
            counted, metadata = stored_bytes(cache)
            biases = [layer.key_bias for layer in layers]
            for layer in layers:
                layer.key_bias = None
            assert stored_bytes(cache) == (counted, metadata - sum(bias.nbytes for bias in biases))
            for layer, bias in zip(layers, biases, strict=True):
                layer.key_bias = bias
            save_cache(cache, file, tiny)
            loaded, step = load_cache(file, tiny), {"input_ids": out.sequences[:, -1:]}
            restore = snapshot(cache)
            want = tiny(**step, past_key_values=cache).logits
            assert torch.equal(tiny(**step, past_key_values=loaded).logits, want)
            restore()
            assert torch.equal(tiny(**step, past_key_values=cache).logits, want)
            cache.crop(-1)
            torch.testing.assert_close(tiny(**step, past_key_values=cache).logits, want)
        with accelerated(tiny, "kivi", offload="host", **fine), torch.no_grad():
            parked = generate(tiny, feed, new=4).past_key_values
            assert torch.equal(tiny(**step, past_key_values=parked).logits, want)


def test_tokens_of_captured_steps_are_rotated_as_if_noted() -> None:
    """Steps that no hook sees leave a gap, which the next forward fills."""
    turn = torch.arange(40.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])

    def of(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = turn[None, first : first + count].repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    ours, want = (Rotations.none(torch.zeros(1, 1, 8)) for _ in range(2))
    want.note(*of(3, 20), torch.arange(20)[None], 0, 20)
    ours.note(*of(3, 12), torch.arange(12)[None], 0, 12)
    ours.note(*of(22, 1), torch.tensor([[19]]), 19, 1, lambda count, _: of(22 - count, count))
    assert torch.equal(ours.cos, want.cos) and torch.equal(ours.sin, want.sin)


def test_places_without_a_noted_rotation_have_no_bias() -> None:
    rotations = Rotations.none(torch.zeros(2, 1, 8))
    cos, sin = torch.rand(2, 3, 8), torch.rand(2, 3, 8)
    rotations.note(cos, sin, torch.tensor([[-1, 5, 6], [4, 5, 6]]), seen=4, length=3)
    assert rotations.cos.shape == (2, 7, 4) and not rotations.cos[:, :4].any() and not rotations.cos[0, 4].any()
    torch.testing.assert_close(rotations.cos[1, 4:], cos[1, :, :4])
    bias = KeyBias(torch.randn(1, 8), rotations)
    keys = bias.keys(torch.tensor([[[-1, 0, 6, 99]], [[4, 5, 6, -1]]]))
    assert not keys[0, 0, [0, 1, 3]].any() and keys[0, 0, 2].any()
    query = torch.randn(2, 3, 2, 8)
    products = bias.products(query, torch.tensor([[[-1, 0, 6, 99]], [[4, 5, 6, -1]]]))
    torch.testing.assert_close(products, query @ keys.mT)
    rotations.rename(torch.arange(7), torch.arange(7) != 5)
    torch.testing.assert_close(rotations.cos[1, 4:], cos[1, [0, 2], :4])
    rotations.crop(5)
    assert rotations.cos.shape[1] == 5
