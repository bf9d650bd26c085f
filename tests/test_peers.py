"""The comparison with peers: how its figures are made, and that both sides are given the same work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from laws.helpers import stored
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "peers"))
import compare
from with_mmaccel import POLICIES, Mmaccel

from mmaccel import accelerated
from mmaccel.recipe import Recipe, Stage

TOKENS, KEPT = 112, 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    assert compare.save(*compare.random_model(side=10, text=12, layers=2, width=512), where) == TOKENS
    return where


@pytest.fixture(scope="module")
def ours(folder: Path) -> Mmaccel:
    side = Mmaccel()
    assert "mmaccel" in side.answer({"do": "load", "folder": str(folder)})["versions"]
    return side


def ask(side: Mmaccel, what: str, policy: str, steps: int = 2) -> dict[str, Any]:
    return side.answer({"do": what, "policy": policy, "kept": KEPT, "tokens": TOKENS, "steps": steps})


def test_both_sides_read_the_same_prompt(folder: Path, ours: Mmaccel) -> None:
    text = AutoModelForCausalLM.from_pretrained(folder / "text", dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = text(**load_file(folder / "text.safetensors")).logits
        torch.testing.assert_close(theirs, ours.model(**ours.inputs).logits)


@pytest.mark.parametrize("policy", compare.POLICIES)
def test_policies_keep_what_was_asked_for(ours: Mmaccel, policy: str) -> None:
    answer = ask(ours, "keys", policy)
    lengths = [len(head) for layer in answer["positions"] for head in layer]
    assert len(lengths) == 4 and sum(lengths) == 4 * KEPT
    assert answer["bytes"] < ask(ours, "keys", "bare")["bytes"] / 2
    assert all(0 <= place < TOKENS for layer in answer["positions"] for head in layer for place in head)


def test_places_are_those_of_the_prompt(ours: Mmaccel) -> None:
    assert ask(ours, "keys", "streaming-llm")["positions"] == [[[0, 1, 2, 3, *range(TOKENS - 24, TOKENS)]] * 2] * 2
    assert ask(ours, "keys", "bare")["positions"] == [[list(range(TOKENS))] * 2] * 2


def test_time_and_memory_are_those_of_the_text_model(ours: Mmaccel) -> None:
    timed, memory = ask(ours, "time", "knorm", 3), ask(ours, "memory", "knorm", 3)
    assert timed["prefill_s"] > 0 and timed["decode_s"] > 0 and len(timed["tokens"]) == 4
    bare = ask(ours, "memory", "bare", 3)
    # keys and values of two heads of two layers that are no longer there
    gone = 2 * 2 * 2 * (TOKENS - KEPT) * 64 * 4
    assert bare["prefill_peak"] - memory["prefill_peak"] == pytest.approx(gone, rel=0.1)
    assert bare["decode_peak"] - memory["decode_peak"] == pytest.approx(gone * 1.25, rel=0.15)


def test_lagkv_keeps_the_newest_of_short_prompts(ours: Mmaccel) -> None:
    """As kvpress does; two stretches of 64 do not fit."""
    recipe = Recipe("lagkv", (Stage("lagkv", KEPT, {"sinks": 4, "lag": 64, "joint": True}),))
    found: list[Any] = []
    with accelerated(ours.model, recipe):
        ours.generate(1, lambda cache: found.append(ours.positions("lagkv", cache)))
    assert found == [[[[0, 1, 2, 3, *range(TOKENS - 24, TOKENS)]] * 2] * 2]


def test_agreement_counts_places_and_ties() -> None:
    ours, theirs = [[[0, 1, 2], [0, 1, 3]]], [[[0, 1, 2], [0, 1, 2]]]
    scores = [[[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 1.0]]]
    figures = compare.agreement(ours, theirs, scores)
    assert (figures["kept"], figures["peer_kept"], figures["heads"]) == (3, 3, 2)
    assert figures["same"] == 5 / 7 and figures["differing_heads"] == 1
    assert figures["ties"] == 1
    # the place that only we keep scores less than any that the peer keeps
    scores[0][1] = [3.0, 2.0, 1.0, 0.5]
    assert compare.agreement(ours, theirs, scores)["ties"] == 0.5


def test_ratios_are_paired_run_by_run() -> None:
    samples = {
        "ours": [1.0, 8.0, 3.0],
        "peer": [2.0, 8.0, 2.0],
        "ours_bare": [2.0, 8.0, 6.0],
        "peer_bare": [4.0, 4.0, 4.0],
    }
    assert compare.paired(samples) == {
        **{"ours": 3.0, "peer": 2.0, "ours_bare": 6.0, "peer_bare": 4.0},
        **{"to_bare": 0.5, "peer_to_bare": 0.5, "to_peer": 1.0},
    }


def result(slower: float) -> dict[str, Any]:
    sides = {"ours": 2**20, "peer": 2**21, "ours_bare": 3 * 2**20, "peer_bare": 3 * 2**20}
    times = compare.paired({"ours": [slower], "peer": [1.0], "ours_bare": [1.0], "peer_bare": [1.0]})
    row = {
        **{"policy": "lagkv", "kept": 28.0, "peer_kept": 28.0, "same": 0.9, "ties": 1.0, "same_answer": True},
        **{"bytes": sides, "prefill_peak": sides, "decode_peak": sides, "prefill_s": times, "decode_s": times},
    }
    versions = {"kvpress": "1", "torch": "2", "transformers": "5"}
    return {
        **{"peer": "kvpress", "versions": {"ours": versions, "peer": versions}, "machine": "a CPU", "date": "today"},
        **{
            "runs": 1,
            "steps": 1,
            "command": "python",
            "models": [{"name": "m", "tokens": 112, "kept": 28, "rows": [row]}],
        },
    }


def test_losses_are_printed() -> None:
    assert "Slower than the peer: `lagkv` in prefill (1.50 times the peer's time)" in compare.table(result(1.5))
    won = compare.table(result(0.9))
    assert "Slower than the peer: none." in won
    # ties explain what differs; the cache, and by how much the peaks fell
    assert "| `lagkv` | 28 | 90.00%, rest ties | yes | 1.00 / 2.00 | 2.00 / 1.00 | 2.00 / 1.00 |" in won


def test_every_policy_is_known_to_both_sides() -> None:
    presses = (Path(compare.__file__).parent / "with_kvpress.py").read_text(encoding="utf-8")
    assert list(POLICIES) == list(compare.POLICIES)
    assert all(f'"{name}": ' in presses for name in POLICIES)


def test_observed_attention_keeps_what_its_definition_says():
    """The policy without a map against the maps of eager attention, at a length of several blocks of queries."""
    model = zoo.model("llava").eval()
    picture = zoo.image(*zoo._TABLE["llava"].sizes[0], 1)
    feed = dict(zoo.encode("llava", [([picture], [], "what " * 400)]))
    length = feed["input_ids"].shape[1]
    with torch.no_grad(), accelerated(model, "observed-attention", retain=200, joint=True):
        out = model.generate(**feed, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    held = stored(out.past_key_values, length)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**feed, output_attentions=True).attentions
    for layer, there in zip(maps, held, strict=True):
        heads = there.shape[1]
        mean = (layer.sum(2) / torch.arange(length, 0, -1)).unflatten(1, (heads, -1)).mean(2)
        for head in range(heads):
            kept = there[0, head, :length].nonzero()[:, 0].tolist()
            assert len(kept) == 200 and set(kept) == set(mean[0, head].topk(200).indices.tolist())
