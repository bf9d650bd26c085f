"""Why families with indexers, convolutions and distances are refused: their bare text models run, and tokens that are dropped
are not tokens that are hidden. What is changed to make them equal shows the cause."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import transformers
import zoo
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gradients")

LENGTH, WIDTH = 40, 32
SIZES = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
PLACES = torch.arange(LENGTH)
#: tokens in the middle of a prompt are dropped: some, and all of a block of 8
SOME, BLOCK = (PLACES < 11) | (PLACES > 20), (PLACES < 8) | (PLACES > 15)
BEHIND = PLACES >= 8


def made(kind: str, **values: Any) -> Any:
    """A text model with random weights."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("newer than this transformers")
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **values})
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config)
    zoo._fill(model, 0)
    return model.eval()


def states(model: Any, kept: Tensor, hide: bool, keep_positions: bool = True, **given: Any) -> Tensor:
    """The last hidden states of the ``kept [S]`` tokens, where the others are hidden by the mask, or dropped."""
    given["inputs_embeds"] = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    # without a mask transformers takes gaps in positions for borders of packed prompts
    given["attention_mask"], place = kept[None].long(), PLACES[None]
    if not hide:
        given, place = {name: x[:, kept] for name, x in given.items()}, place[:, kept]
    positions = place if keep_positions else None
    found: Tensor = model(**given, position_ids=positions, use_cache=False).last_hidden_state
    return found[:, kept] if hide else found


def agree(model: Any, kept: Tensor, last: int = LENGTH, **options: Any) -> None:
    """The ``last`` states do."""
    oracle.close(
        states(model, kept, False, **options)[:, -last:], states(model, kept, True, **options)[:, -last:], 1e-4
    )


def differ(model: Any, kept: Tensor, last: int = LENGTH, **options: Any) -> None:
    oracle.apart(states(model, kept, False, **options)[:, -last:], states(model, kept, True, **options)[:, -last:])


# ------------------------------------------------------------------------------------------------------------- MiniMax M3


def minimax(blocks: int) -> Any:
    return made(
        "minimax_m3_vl_text",
        head_dim=8,
        rotary_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "dense"],
        dense_intermediate_size=64,
        layer_types=["minimax_m3_sparse"] * 2,
        index_n_heads=4,
        index_head_dim=8,
        index_block_size=8,
        index_topk_blocks=blocks,
    )


def test_minimax_takes_blocks_of_stored_keys_by_positions() -> None:
    """A prompt with gaps in its positions has no such blocks."""
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        states(minimax(2), SOME, hide=False)


def test_minimax_is_right_only_if_all_blocks_are_chosen() -> None:
    """Behind dropped tokens, which are numbered anew, blocks have other borders."""
    kept = PLACES >= 5
    agree(minimax(5), kept, keep_positions=False)
    differ(minimax(2), kept, keep_positions=False)


# ------------------------------------------------------------------------------------------------------------------- GLM 5


def glm(pools: int) -> Any:
    return made(
        "glm5_next_text",
        num_hidden_layers=1,
        layer_types=["indexed_attention"],
        indexer_types=["full"],
        mlp_layer_types=["dense"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=8 * pools,
        index_kpool=8,
        index_kpool_always_select_tail=False,
        index_n_heads=16,
        index_head_dim=8,
    )


@pytest.mark.parametrize("pools", [1, 5])
def test_glm_chooses_pools_of_neighbours(pools: int) -> None:
    """A pool with a hidden token is not chosen at all, and without the token pools have other borders, even if all are chosen;
    only whole pools may be dropped. Tokens that see a whole pool are compared."""
    agree(glm(pools), BLOCK, 24)
    differ(glm(pools), SOME, 16)


# ------------------------------------------------------------------------------------------------------------------ Qwen 4


def qwen(**values: Any) -> Any:
    layers = values.pop("layer_types", ["indexed_attention"] * 2)
    indexer = {"n_heads": 16, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 4}
    return made(
        "qwen4_exp_text",
        head_dim=8,
        layer_types=layers,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        hc_lowrank=8,
        ngram_vocab_size_base=100,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        **{f"indexer_{name}": value for name, value in indexer.items()},
        **values,
    )


def test_the_indexer_of_qwen_makes_blocks_of_what_is_seen() -> None:
    """It is not what stands in the way."""
    agree(qwen(), SOME)


def test_layers_of_qwen_between_carry_a_state() -> None:
    differ(qwen(layer_types=["linear_attention", "indexed_attention"]), SOME)


def test_n_grams_and_convolutions_of_qwen_see_neighbours() -> None:
    ids = torch.randint(3, 50, (1, LENGTH), generator=torch.Generator().manual_seed(4))
    layers = {"layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1]}
    model = qwen(**layers, ple_embed_dim=32, heads_per_ngram=2, split_ngram_parts=1)
    differ(model, SOME, ple_input_ids=ids)


# ---------------------------------------------------------------------------------------------------------------- Inkling 2


def inkling() -> Any:
    return made(
        "inkling2_text",
        unpadded_vocab_size=50,
        layer_types=["hybrid", "hybrid_sliding"],
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=8,
        sliding_window_size=64,
        rel_extent=64,
        d_rel=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )


def silenced(model: Any, *parts: str) -> Any:
    """The model without the weights whose names have one of ``parts``."""
    found = [x for name, x in model.named_parameters() if any(part in name for part in parts)]
    assert found
    for x in found:
        x.zero_()
    return model


def test_inkling_counts_distances_over_stored_tokens_and_convolves_neighbours() -> None:
    """Sinks are not what stands in the way, nor is a prompt that begins later."""
    agree(inkling(), BEHIND)
    differ(inkling(), SOME)
    differ(silenced(inkling(), "conv"), SOME)
    differ(silenced(inkling(), "relative_position"), SOME)
    agree(silenced(inkling(), "conv", "relative_position"), SOME)
