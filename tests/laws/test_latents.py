"""Caches of latents: bytes of a token, absorbed queries, quantised weights, other language models, and what is refused."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import zoo
from torch import nn

from mmaccel import Recipe, Stage, UnsupportedError, accelerated
from mmaccel.families import family_of
from mmaccel.families.latents import absorbed, matrix_of

EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENTS = {**zoo.LATENT, **EXPERTS, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CHOSEN = ("divprune", "fastv", "snapkv", "h2o")  # by choice: one of each site, and one that observes
#: queries are scaled by their positions from the 32nd on
ROPE = (
    ("rope_type", "yarn"),
    ("rope_theta", 10000.0),
    ("factor", 2.0),
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("mscale", 1.0),
    ("mscale_all_dim", 1.0),
    ("partial_rotary_factor", 8 / 24),
    ("original_max_position_embeddings", 32),
    ("llama_4_scaling_beta", 0.1),
)
#: families that take any language model, with one whose cache holds latents
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("mistral3", {"model_type": "mistral4", "head_dim": 24, "rope_parameters": ROPE, **LATENTS}),
    ("internvl", {"model_type": "deepseek_v3", **LATENTS}),
]


def test_products_of_absorbed_queries_are_those_of_the_keys() -> None:
    attention = family_of(oracle.bare("kimi_k25")).attention_in(1)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 24, generator=generator)
    latents, turned = (torch.randn(2, 1, 5, width, generator=generator) for width in (24, 8))
    with torch.no_grad():
        keys, _ = attention.expand_kv(latents, turned)
        found = absorbed(attention, query, latents) @ torch.cat([latents, turned], dim=3).mT
    assert keys.shape == (2, 4, 5, 24)
    oracle.close(found, query @ keys.mT)


class Eight(nn.Module):
    """A linear layer of eight bits, with no weight of floats, as those of GPTQ."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.codes = (linear.weight.detach() / self.scale).round().to(torch.int8)

    @property
    def meant(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.meant.T.to(x.dtype)


class Adapted(nn.Linear):
    """A linear layer whose weight is not all that it computes with, as those of PEFT, and of bitsandbytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight

    @property
    def meant(self) -> torch.Tensor:
        return self.weight.detach() * 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


@pytest.mark.parametrize("kind", [Eight, Adapted])
def test_weights_that_are_quantised_or_adapted(kind: type[Any]) -> None:
    """A policy scores what a model with plain weights that mean the same would score, and answers as it does."""
    feed, forced = zoo.inputs("kimi_k25", "image"), oracle.force("kimi_k25", 1)
    coded, plain = zoo.model("kimi_k25").requires_grad_(False), zoo.model("kimi_k25").requires_grad_(False)
    for odd, even in zip(coded.model.language_model.layers, plain.model.language_model.layers, strict=True):
        for name in ("kv_b_proj", "o_proj"):
            made = kind(getattr(odd.self_attn, name))
            setattr(odd.self_attn, name, made)
            getattr(even.self_attn, name).weight.copy_(made.meant)
    one = plain.model.language_model.layers[1].self_attn.kv_b_proj
    other = coded.model.language_model.layers[1].self_attn.kv_b_proj
    oracle.close(matrix_of(other, 24, one.weight), matrix_of(one, 24, one.weight), 1e-6)
    found = []
    for tiny in (coded, plain):
        with accelerated(tiny, "snapkv", retain=0.25, processor=zoo.processor("kimi_k25")):
            logits, cache = oracle.decode(tiny, feed, forced)
            found.append((logits, oracle.stored(tiny, feed, cache)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][1], found[1][1], strict=True))
    oracle.close(found[0][0], found[1][0])


@pytest.mark.parametrize("name", ["none", "divprune", "snapkv"])
def test_bytes_of_a_token(name: str) -> None:
    """A latent of 24 numbers and 8 with RoPE in each of four layers, whatever the number of heads."""
    tiny, feed = oracle.subject("kimi_k25"), zoo.inputs("kimi_k25")
    share = None if name == "none" else 0.25
    with accelerated(tiny, name, retain=share, processor=zoo.processor("kimi_k25")), torch.no_grad():
        tiny.generate(**feed, max_new_tokens=1, do_sample=False)
        stats = tiny.mmaccel.stats()
    tokens, visual = feed["input_ids"].shape[1], stats["visual_tokens"]
    assert stats["kv_bytes_bare"] == tokens * 4 * (24 + 8) * 4
    kept = tokens - visual + (visual if name == "none" else round(visual / 4))
    # places take a few bytes beside
    assert 0 <= stats["kv_bytes"] - kept * 4 * (24 + 8) * 4 < 64 * tokens


@pytest.mark.parametrize(("family", "overrides"), OTHERS)
@pytest.mark.parametrize("name", CHOSEN)
def test_other_language_models(family: str, overrides: dict[str, Any], name: str) -> None:
    """Dropping is hiding."""
    # positions of a forward with padding count it, and scale queries
    feed = zoo.inputs(family, "images")
    forced = oracle.force(family, len(feed["input_ids"]))
    got = oracle.record(family, feed, oracle.recipe(name, family), forced, True, None, **overrides)
    prompt, steps = oracle.replay(family, feed, forced, got.seen, **overrides)
    oracle.close(got.prompt[got.kept], prompt[got.kept])
    oracle.close(got.steps, steps)
    oracle.apart(got.steps, oracle.replay(family, feed, forced, **overrides)[1])


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (Stage("kvzip", 0.5), "looks at keys and values beside those that attention reads"),
        (Stage("laq", 0.5), "reads a text behind the prompt"),
        (Stage("snapkv", 0.5, options={"compact": "average"}), "merges keys"),
    ],
)
def test_what_is_refused(stage: Stage, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{stage.method} {why}.*kimi_k25 model holds latents"):
        with accelerated(oracle.subject("kimi_k25"), Recipe("refused", (stage,))):
            pass
