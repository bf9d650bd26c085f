"""SepLLM: separators of text and of pictures stay, in prompts, answers and later turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws import oracle
from laws.helpers import follow, generate, inputs
from torch import Tensor

from mmaccel import Recipe, Stage, accelerated
from mmaccel.kv.policies.sepllm import SepLLM, ids_of
from mmaccel.method import KeyBatch
from mmaccel.runtime.graphs import captured

pytestmark = pytest.mark.usefixtures("no_gradients")

MARKS = ".,?!;: \t\n"


def recipe(retain: float = 0.3, **options: Any) -> Recipe:
    return Recipe("sepllm", (Stage("sepllm", retain, options),))


def chosen(policy: SepLLM, separator: Tensor | None, count: int, visual: Tensor | None = None) -> list[int]:
    """The places of twelve keys that score best."""
    keys = torch.zeros(1, 2, 12, 4)
    visual = torch.zeros(1, 12, dtype=torch.bool) if visual is None else visual
    batch = KeyBatch(
        keys=keys,
        values=keys,
        queries=keys[:, :, :0],
        valid=torch.ones(1, 12, dtype=torch.bool),
        visual=visual,
        index=torch.arange(12)[None],
        scaling=1.0,
        count=torch.tensor([count]),
        cells=torch.zeros(1, 12, 3, dtype=torch.long).masked_fill(~visual[..., None], -1),
        separator=separator,
    )
    return sorted(policy.score(batch)[0, 0].argsort(descending=True, stable=True)[:count].tolist())


def at(*places: int) -> Tensor:
    return torch.isin(torch.arange(12), torch.tensor(places))[None]


def test_the_newest_separators_and_the_newest_keys() -> None:
    assert chosen(SepLLM(sinks=2), at(3, 5), 6) == [0, 1, 3, 5, 10, 11]
    # no more than are allowed, and no more than half of the budget
    assert chosen(SepLLM(sinks=1, separators=1), at(3, 5), 4) == [0, 5, 10, 11]
    assert chosen(SepLLM(sinks=0), at(1, 2, 3, 4), 4) == [3, 4, 10, 11]
    assert chosen(SepLLM(sinks=1), None, 3) == [0, 10, 11]


def test_what_has_no_cell_separates_rows_of_a_picture() -> None:
    batch = KeyBatch(
        keys=torch.zeros(1, 1, 6, 4),
        values=torch.zeros(1, 1, 6, 4),
        queries=torch.zeros(1, 1, 0, 4),
        valid=torch.ones(1, 6, dtype=torch.bool),
        visual=torch.tensor([[True] * 5 + [False]]),
        index=torch.arange(6)[None],
        scaling=1.0,
        count=torch.tensor([2]),
        cells=torch.tensor([[[0, 0, 0], [-1] * 3, [0, 1, 0], [-1] * 3, [0, 2, 0], [-1] * 3]]),
    )
    score = SepLLM(sinks=0).score(batch)[0, 0]
    assert score.argmax() == 3, "the newest, and text without a cell is none"


def test_separators_of_a_tokenizer() -> None:
    class Words:
        all_special_ids = (0,)
        words = ("<s>", "a", ".", " ,", "a.", "", "\n\n")

        def __len__(self) -> int:
            return len(self.words)

        def batch_decode(self, rows: list[list[int]]) -> list[str]:
            return [self.words[n] for (n,) in rows]

    assert ids_of(Words(), MARKS).tolist() == [2, 3, 6]


def stays(cache: Any, ids: Tensor) -> None:
    """All separators of the sequence that was read, up to the newest half of the budget, are stored in every layer."""
    read = ids[0, : cache.mmaccel.seen]
    tokenizer = zoo.tokenizer("llava")
    places = torch.isin(read, ids_of(tokenizer, MARKS)).nonzero()[:, 0].tolist()
    for layer in cache.mmaccel.layers:
        held = set(layer.index.by_head[0, 0].tolist())
        assert len(held) < len(read)
        assert set(places[-min(len(places), 3) :]) <= held


@pytest.mark.parametrize("every", [0, 1, 3])
def test_separators_of_prompt_and_answer_stay(every: int) -> None:
    first, second = zoo.inputs("llava", question="a: b? no."), inputs("llava", seed=1)
    options = {"every": every, "separators": 3, "sinks": 1}
    with accelerated(oracle.subject("llava"), recipe(**options), processor=zoo.processor("llava")) as model:
        out = generate(model, first, new=6)
        stays(out.past_key_values, out.sequences)
        kept, _ = follow(first, out, second)
        out = generate(model, kept, new=4, past_key_values=out.past_key_values)
    if every:
        stays(out.past_key_values, out.sequences)


def test_separators_of_an_answer_outlive_the_window() -> None:
    """Tokens of a long answer: the comma stays, and what stands around it goes."""
    tokenizer = zoo.tokenizer("llava")
    comma, letter = (tokenizer.convert_tokens_to_ids(one) for one in ",x")
    with accelerated(
        oracle.subject("llava"), recipe(12, every=1, sinks=1, separators=2), processor=zoo.processor("llava")
    ) as model:
        cache = model(**zoo.inputs("llava", question="x"), use_cache=True).past_key_values
        at_comma = cache.mmaccel.seen + 1
        for token in (letter, comma, *[letter] * 16):
            model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        obstacle = captured._obstacle_in_cache(model.mmaccel.plan, cache.mmaccel)
    assert obstacle == "sepllm looks at every token"
    for layer in cache.mmaccel.layers:
        held = layer.index.by_head[0, 0].tolist()
        assert at_comma in held and at_comma - 1 not in held and at_comma + 1 not in held and len(held) == 12


def test_without_a_tokenizer_text_has_no_separators() -> None:
    with accelerated(oracle.subject("llava"), recipe()) as model:
        cache = model(**zoo.inputs("llava"), use_cache=True).past_key_values
    assert cache.mmaccel.shared.places.separators is None
