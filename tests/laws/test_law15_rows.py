"""Law 15: a row of a batch depends on itself alone, over prompt, decode steps and turns; a row without pictures is bare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import close, follow, logits
from torch import Tensor

import mmaccel
from mmaccel import Recipe, Stage, UnsupportedError, accelerated
from mmaccel.kv.codecs import Codec
from mmaccel.method import Policy, ReactivatingMethod

pytestmark = pytest.mark.usefixtures("no_gradients")

#: tokens of an answer: more than the 16 after which recipes with a schedule evict, and than a page of 16
STEPS, LATER = 20, 6
#: a question longer than a page of 128 tokens and a residual of 128
LONG = "and where is it, and why is it there, and what else is there to see? " * 4
TOLERANCE, PACKED = 4e-5, 5e-3
FAMILIES = ("llava", "smolvlm", "qwen2_5_vl")  # by choice: positions of one axis, tiles, positions of three axes


def recipes() -> dict[str, Recipe]:
    """Every recipe; every policy that drops keys, of text too and by a schedule; every codec in small pages, alone and behind
    a policy."""
    found = {name: mmaccel.get_recipe(name) for name in oracle.named_recipes()}
    for name in oracle.policies_that_drop():
        found[f"{name}, joint"] = oracle.recipe(name, "llava", joint=True)
        found[f"{name}, text"] = oracle.recipe(name, "llava").override(text_retain=0.5)
        if not mmaccel.get_method(name)().prompt_only:
            found[f"{name}, every 2"] = oracle.recipe(name, "llava", every=2, joint=True, recent=1)
            found[f"{name}, cap"] = oracle.recipe(name, "llava", every=3, cap=60, joint=True, recent=1)
    h2o = Stage("h2o", 0.3, {"every": 4, "joint": True, "recent": 2, "head_budget": "adaptive"})
    for name in synthetic.offered(Codec):
        small = Stage(name, None, {"page": 32})
        found[f"{name}, small"] = Recipe(name, (small,))
        found[f"h2o and {name}"] = Recipe("both", (h2o, small))
    found["text apart"] = Recipe(
        "apart", (Stage("calibquant", None, {"page": 16}), Stage("fp8", None, {"page": 16, "text_only": True}))
    )
    # two groups of tokens that go by one choice of channels
    found["vidkv, protect"] = Recipe("protect", (Stage("vidkv", None, {"page": 32, "protect": 0.3}),))
    found["weights"] = mmaccel.get_recipe("divprune").override(proportional="all")
    return found


RECIPES = recipes()


def fits(name: str, family: str) -> bool:
    return all(oracle.fits(stage.method, family) for stage in RECIPES[name].stages)


CASES = [(family, name) for family in FAMILIES for name in RECIPES if fits(name, family)]


def shot(family: str, size: int, number: int) -> Any:
    return zoo.image(*zoo._TABLE[family].sizes[size], number)


@functools.cache
def conversation(family: str, rows: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Any, Any]:
    """Two turns of rows of unequal length: a picture, then text; text alone; text, then a picture; two pictures."""
    first = [
        ([shot(family, 0, 1)], [], LONG[:150]),
        ([], [], LONG),
        ([], [], LONG[:170]),
        ([shot(family, 1, 2)], [], LONG[:60]),
    ]
    second = [
        ([], [], "why?"),
        ([], [], LONG[:40]),
        ([shot(family, 1, 3)], [], LONG[:90]),
        ([shot(family, 0, 4)], [], "where?"),
    ]
    return tuple(dict(zoo.encode(family, [turn[row] for row in rows])) for turn in (first, second))  # type: ignore[return-value]


def together(name: str) -> tuple[int, ...]:
    """The rows of a conversation that may be in one batch: where tokens come back, they do in forwards without pictures."""
    returns = any(issubclass(mmaccel.get_method(stage.method), ReactivatingMethod) for stage in RECIPES[name].stages)
    return (1, 2, 3) if returns else (0, 1, 2, 3)


def talk(model: Any, turns: Any, forced: Tensor) -> list[Tensor]:
    """The logits of two turns, whose answers are ``forced [B, STEPS + LATER]``."""
    answers, cache, feed = [], None, turns[0]
    for turn, words in enumerate(forced.split((STEPS, LATER), dim=1)):
        out = model.generate(
            **feed,
            past_key_values=cache,
            max_new_tokens=words.shape[1],
            do_sample=False,
            logits_processor=[oracle.Force(words, feed["input_ids"].shape[1])],
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(logits(out))
        cache = out.past_key_values
        if hasattr(model, "mmaccel"):
            assert model.mmaccel.stats().kv_bytes == cache.mmaccel.nbytes() if hasattr(cache, "mmaccel") else True
        if turn == 0:
            feed, _ = follow(feed, out, turns[1])
    return answers


@functools.cache
def bare(family: str, row: int) -> list[Tensor]:
    """The same of a row alone by the bare model."""
    return talk(oracle.bare(family), conversation(family, (row,)), forced(family, (row,)))


def forced(family: str, rows: tuple[int, ...]) -> Tensor:
    """What these rows of a conversation answer."""
    return oracle.force(family, 4, STEPS + LATER)[list(rows)]


@pytest.mark.square(("family", "name"), CASES, known=RECIPES)
def test_a_row_without_pictures_is_bare(family: str, name: str) -> None:
    """Beside rows with pictures, in the prompt, while decoding and in a second turn."""
    rows, model = together(name), oracle.subject(family)
    with accelerated(model, RECIPES[name], processor=zoo.processor(family)):
        batch = talk(model, conversation(family, rows), forced(family, rows))
    for turn, wanted in enumerate(bare(family, 1)):
        close(batch[turn][rows.index(1)], wanted[0], TOLERANCE)
    # until its first picture comes
    close(batch[0][rows.index(2)], bare(family, 2)[0][0], TOLERANCE)


def rounded(x: Tensor) -> Tensor:
    """``x`` to 12 bits, so that what differs in the last bits alone is equal."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(x.isfinite(), torch.ldexp((mantissa * 4096).round() / 4096, exponent), x)


@pytest.fixture
def equal_tokens_tie(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recipe], None]:
    """A function that lets equal tokens tie in the scores of a recipe's policies.

    A letter that comes again has the same value in the first layer, and a key of the same norm. A product of matrices rounds
    them apart, in a batch otherwise than alone, and a policy that looks at nothing else would take either.
    """

    def tie(recipe: Recipe) -> None:
        for cls in {mmaccel.get_method(stage.method) for stage in recipe.stages}:
            if issubclass(cls, Policy):
                score = cls.score
                monkeypatch.setattr(cls, "score", lambda self, keys, score=score: rounded(score(self, keys)))

    return tie


@pytest.mark.square(("family", "name"), CASES, known=RECIPES)
def test_a_row_of_a_conversation_is_the_row_alone(
    family: str, name: str, equal_tokens_tie: Callable[[Recipe], None]
) -> None:
    """Whatever comes in which turn, and whatever its neighbours are."""
    equal_tokens_tie(RECIPES[name])
    rows, model = together(name), oracle.subject(family)
    # a value on the edge between two codes may fall to either side
    packs = any(mmaccel.get_method(stage.method).site == "codec" for stage in RECIPES[name].stages)
    with accelerated(model, RECIPES[name], processor=zoo.processor(family)):
        batch = talk(model, conversation(family, rows), forced(family, rows))
        for at, row in enumerate(rows):
            if row == 1:
                # see above
                continue
            alone = talk(model, conversation(family, (row,)), forced(family, (row,)))
            for turn, wanted in enumerate(alone):
                close(batch[turn][at], wanted[0], PACKED if packs else TOLERANCE)


@pytest.mark.square(("family", "name"), [case for case in CASES if len(together(case[1])) < 4], known=RECIPES)
def test_rows_that_cannot_be_in_one_batch_are_refused(family: str, name: str) -> None:
    """By number, with what to do, before anything of the cache has changed."""
    model, turns = oracle.subject(family), conversation(family)
    with accelerated(model, RECIPES[name], processor=zoo.processor(family)):
        with pytest.raises(UnsupportedError, match="Row 0 of this batch has no new picture, .* a call of its own"):
            talk(model, turns, forced(family, (0, 1, 2, 3)))
