"""Caches of latents: bytes of a token, absorbed queries, other language models, and what is refused."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import zoo

from mmaccel import Recipe, Stage, UnsupportedError, accelerated
from mmaccel.families import family_of
from mmaccel.families.latents import absorbed

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
