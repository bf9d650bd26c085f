"""Prompts that begin like an earlier one: what was read before is neither encoded nor read again, and answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from clients import chat, data_url, picture, text, user
from PIL import Image
from tail import few

from mmaccel import MmaccelError
from mmaccel.programs.prefix_caches import PrefixCaches

MEMORY = 256 << 20
NAMES = ("mini-llava", "mini-qwen-vl")  # by choice: positions in one axis and in three
PAIRS = [(name, named) for name in NAMES for named in ("balanced", "none")]


@contextmanager
def work(served: Any) -> Iterator[dict[str, int]]:
    """Count the tokens that the language model reads and the pictures that are encoded."""
    model = served.scheduler.engines[0].model
    family, counts = model.mmaccel.family, {"tokens": 0, "encoded": 0}

    def read(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        counts["tokens"] += kwargs["inputs_embeds"].shape[1]

    def encode(*_: Any) -> None:
        counts["encoded"] += 1

    handles = [family.text.register_forward_pre_hook(read, with_kwargs=True)]
    handles += [tower.register_forward_pre_hook(encode) for tower in family.towers()]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def metric(served: Any, name: str) -> float:
    page = served.http.get("/metrics").text
    return float(next(line for line in page.splitlines() if line.startswith(f"mmaccel_{name} ")).split()[-1])


@pytest.mark.parametrize(("name", "named"), few(PAIRS, [(NAMES[1], "balanced")]))
def test_a_second_turn_reads_only_what_is_new(serve, things, name, named) -> None:
    bare, served = serve(name, named), serve(name, named, prefix_cache=MEMORY)
    first = chat(served, things.message, max_tokens=4)
    assert text(first) == text(chat(bare, things.message, max_tokens=4))
    talk = [things.message, {"role": "assistant", "content": text(first)}, user("and what shape is it?")]
    with work(served) as counts:
        second = chat(served, *talk, max_tokens=1)
    expected = chat(bare, *talk, max_tokens=1)
    assert text(second) == text(expected)
    assert counts["encoded"] == 0
    reused = int(metric(served, "prompt_tokens_reused_total"))
    assert counts["tokens"] == second.usage.prompt_tokens - reused < 40
    assert second.usage.prompt_tokens_details.cached_tokens == reused
    # the figures are those of the whole prompt
    for figure in ("visual_tokens", "visual_tokens_kept"):
        assert second.mmaccel[figure] == expected.mmaccel[figure] > 0
    assert metric(served, "prefix_cache_hits_total") == metric(served, "prefix_cache_misses_total") == 1
    assert metric(served, "prefix_cache_bytes") > 0 == metric(bare, "prefix_cache_bytes")
    # another branch of the conversation, and the first one again
    for asked in (talk[:1], talk, [*talk[:2], user("how many are there?")]):
        assert text(chat(served, *asked, max_tokens=4)) == text(chat(bare, *asked, max_tokens=4))
    assert metric(served, "prefix_cache_misses_total") == 1


@pytest.mark.parametrize("name", [NAMES[1]])
def test_a_new_picture_behind_a_kept_cache(serve, things, name) -> None:
    """The new picture is encoded, the old one is not; one changed pixel of the old one is another picture."""
    bare, served = serve(name, "balanced"), serve(name, "balanced", prefix_cache=MEMORY)
    other = picture(data_url(things.folder / "a.png"))
    first = chat(served, things.message, max_tokens=4)
    talk = [things.message, {"role": "assistant", "content": text(first)}, user(other, "and in this one?")]
    with work(served) as counts:
        second = chat(served, *talk, max_tokens=4)
    assert text(second) == text(chat(bare, *talk, max_tokens=4)) and counts["encoded"] == 1
    assert metric(served, "prefix_cache_hits_total") == 1
    changed = things.item.pictures(112)[0].copy()
    changed[0, 0, 0] ^= 1
    Image.fromarray(changed).save(things.folder / "changed.png")
    asked = user(picture(data_url(things.folder / "changed.png")), things.question)
    assert text(chat(served, asked, max_tokens=4)) == text(chat(bare, asked, max_tokens=4))
    assert metric(served, "prefix_cache_hits_total") == 1
    # another budget is another cache
    chat(served, things.message, max_tokens=4, extra_body={"mmaccel": {"retain": 0.1}})
    assert metric(served, "prefix_cache_hits_total") == 1


@pytest.mark.parametrize(("name", "named"), few(PAIRS, [(NAMES[0], "none"), (NAMES[1], "balanced")]))
def test_a_picture_that_was_shown_elsewhere_is_not_read_again(serve, things, name, named) -> None:
    """With ``prompt_cache``, also beside kept caches; what is answered does not depend on what was kept."""
    shown = [picture(data_url(things.folder / f"{name}.png")) for name in ("a", "b")]
    first, second = user(*shown, "what is there?"), user("There are two.", *shown[::-1], "what is there?")
    fresh = serve(name, named, prompt_cache=MEMORY)
    expected = chat(fresh, second, max_tokens=4)
    assert metric(fresh, "prompt_tokens_reused_total") == 0
    for kept in (0, MEMORY):
        served = serve(name, named, prompt_cache=MEMORY, prefix_cache=kept)
        chat(served, first, max_tokens=4)
        assert metric(served, "prefix_cache_hits_total") == 0 < metric(served, "prefix_cache_bytes")
        with work(served) as counts:
            again = chat(served, second, max_tokens=4)
        assert text(again) == text(expected) and counts["encoded"] == 0
        assert metric(served, "prefix_cache_hits_total") == 1
        reused = again.usage.prompt_tokens_details.cached_tokens
        assert counts["tokens"] <= again.usage.prompt_tokens - reused + 3 and reused > 0.5 * again.usage.prompt_tokens
        for figure in ("visual_tokens", "visual_tokens_kept"):
            assert again.mmaccel[figure] == expected.mmaccel[figure] > 0
        if kept:
            # another turn continues what was joined
            talk = [second, {"role": "assistant", "content": text(again)}, user("and what shape?")]
            assert text(chat(served, *talk, max_tokens=4)) == text(chat(fresh, *talk, max_tokens=4))
        # a budget of its own is read as a whole
        chat(served, second, max_tokens=2, extra_body={"mmaccel": False})


def test_a_prompt_cache_that_cannot_be_is_refused_at_the_start(serve) -> None:
    with pytest.raises(MmaccelError, match="Pictures cannot be read apart from the prompt: snapkv works while"):
        serve("mini-llava", "snapkv", prompt_cache=MEMORY)
    with pytest.raises(MmaccelError, match="--prompt-cache does not go with drafts"):
        serve("mini-llava", "none", prompt_cache=MEMORY, drafts={"lookup": True})


@pytest.mark.parametrize("named", ["snapkv", "fastv", "kivi"])  # by choice: what sees the question
def test_recipes_that_see_the_question_keep_nothing(serve, things, named) -> None:
    served = serve("mini-llava", named, prefix_cache=MEMORY)
    for _ in range(2):
        chat(served, things.message, max_tokens=2)
    assert metric(served, "prefix_cache_hits_total") == metric(served, "prefix_cache_bytes") == 0


def test_the_least_recently_used_cache_goes_first(serve, things) -> None:
    served = serve("mini-qwen-vl", "balanced", prefix_cache=MEMORY)
    shown = [user(picture(data_url(things.folder / f"{name}.png")), "what is there?") for name in ("a", "b")]
    kept: PrefixCaches = served.scheduler.engines[0].kept
    for asked in (*shown, shown[0]):
        chat(served, asked, max_tokens=2)
    held, hits = kept.nbytes, metric(served, "prefix_cache_hits_total")
    assert hits == 1
    kept.limit = held - 1
    # a third one takes the place of what was used longest ago
    chat(served, things.message, max_tokens=2)
    assert kept.nbytes <= held - 1
    chat(served, things.message, max_tokens=2)
    assert metric(served, "prefix_cache_hits_total") == hits + 1
    chat(served, shown[1], max_tokens=2)
    assert metric(served, "prefix_cache_hits_total") == hits + 1
