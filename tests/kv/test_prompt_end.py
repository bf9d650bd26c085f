"""Policies that score by what the model makes of a prompt when it is over: its first tokens (LAQ), what it expected
(SirLLM)."""

from __future__ import annotations

import pytest
import torch
import zoo
from evicting import stage
from laws import oracle
from torch import Tensor

from mmaccel import MmaccelError, accelerated
from mmaccel.kv.policies.laq import LAQ
from mmaccel.kv.policies.sirllm import SirLLM
from mmaccel.method import KeyBatch
from mmaccel.runtime.prompt import draft, lookahead

pytestmark = pytest.mark.usefixtures("no_gradients")

FAMILIES = ("llava", "qwen2_5_vl", "gemma3", "lfm2_vl")  # by choice: kinds of positions, masks and layers


@pytest.mark.parametrize("family", FAMILIES)
def test_pseudo_tokens_are_the_first_of_the_models_own_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, written, ended = zoo.inputs(family, "uneven"), [], draft.unended
    monkeypatch.setattr(draft, "unended", lambda *given: written.append(given[1]) or ended(*given))
    model = oracle.subject(family)
    size = feed["input_ids"].shape[1]
    answer = model.generate(**feed, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, size:]
    with accelerated(model, stage("laq", 1.0, lookahead=4)):
        again = model.generate(**feed, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, size:]
    assert torch.equal(written[-1], answer)
    # nothing of them is stored
    assert torch.equal(again, answer)


def test_pseudo_queries_choose_and_the_official_ones_miss_the_newest_keys() -> None:
    """One head; the prompt has 6 keys, and the written query looks at the last one alone."""
    keys = torch.eye(6, 8)[None, None]
    query = torch.zeros(1, 1, 1, 8)
    query[..., 5] = 50.0
    batch = KeyBatch(
        keys=torch.cat([keys, torch.full((1, 1, 1, 8), 9.0)], 2),
        values=torch.zeros(1, 1, 7, 8),
        queries=query,
        valid=torch.ones(1, 7, dtype=torch.bool),
        visual=torch.ones(1, 7, dtype=torch.bool),
        index=torch.arange(7)[None],
        scaling=1.0,
        places=torch.tensor([[6]]),
        written=1,
    )
    policy = LAQ(window=0, lookahead=1, kernel=1)
    # the key of the written token, which would win, takes no part
    torch.testing.assert_close(policy.score(batch)[0, 0], torch.tensor([0.0, 0, 0, 0, 0, 1, 0]), atol=1e-5, rtol=0)
    two = LAQ(window=0, lookahead=2, kernel=1).by("official")
    both = {"queries": query.repeat(1, 1, 2, 1), "places": torch.tensor([[6, 7]])}
    batch = KeyBatch(**{**vars(batch), **both})
    # the first of two queries stands where the last key but one is
    assert two.score(batch)[0, 0, 5] == pytest.approx(0.5) and two.score(batch)[0, 0, 0] == pytest.approx(0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_entropies_are_those_of_the_bare_models_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, found, own = zoo.inputs(family, "uneven"), [], lookahead.surprise
    monkeypatch.setattr(lookahead, "surprise", lambda *given: found.append(own(*given)) or found[-1])
    model = oracle.subject(family)
    logs = model(**feed).logits.log_softmax(-1)
    with accelerated(model, stage("sirllm", 0.4)):
        model(**feed, use_cache=True)
        layout = model.mmaccel.layout
    ids, real = feed["input_ids"], feed["attention_mask"].bool()
    for row in range(len(ids)):
        first = int(real[row].int().argmax())
        expected: list[Tensor] = []
        for place in range(first + 1, ids.shape[1]):
            before = logs[row, place - 1]
            visual = bool(layout.visual[row, place])
            expected.append(-(before.exp() * before).sum() if visual else -before[ids[row, place]])
        highest = torch.stack(expected).max()
        torch.testing.assert_close(found[0][row, first:], torch.stack([highest, *expected]), atol=2e-4, rtol=2e-4)


def test_the_surprising_the_first_and_the_newest_stay() -> None:
    entropy = torch.tensor([0.1, 0.2, 5.0, 0.3, 4.0, 0.1, 0.2, 3.0, 0.1, 0.1])
    batch = KeyBatch(
        keys=torch.zeros(1, 2, 10, 4),
        values=torch.zeros(1, 2, 10, 4),
        queries=torch.zeros(1, 2, 0, 4),
        valid=torch.ones(1, 10, dtype=torch.bool),
        visual=torch.ones(1, 10, dtype=torch.bool),
        index=torch.arange(10)[None],
        scaling=1.0,
        received=entropy.expand(1, 2, 10),
        count=torch.tensor([6]),
    )
    best = SirLLM(surprising=2).score(batch)[0, 0].topk(6).indices.tolist()
    assert best == [2, 4, 9, 8, 7, 6]
    assert SirLLM(surprising=0.5).score(batch)[0, 0].topk(4).indices.tolist() == [2, 4, 7, 9]
    with pytest.raises(MmaccelError, match="when it ends; leave out every"):
        SirLLM(every=1)
