"""Old pictures of a list of messages are left out, by the schedule of the caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mmaccel import MmaccelError, age_pictures
from mmaccel.core.budget import shares_by_age


def shot(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": name}}


def chat(count: int) -> list[dict[str, Any]]:
    turns = [[{"role": "user", "content": [shot(str(n)), {"type": "text", "text": "?"}]}] for n in range(count)]
    return [one for turn in turns for one in (*turn, {"role": "assistant", "content": "click"})]


def left(messages: list[dict[str, Any]]) -> list[str]:
    return [part["image_url"]["url"] for one in messages[::2] for part in one["content"] if part["type"] == "image_url"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_shares_by_age_by_hand(step: int) -> None:
    age = (1.0, 0.25, 0.0)
    for count in range(9):
        groups = [number // step for number in range(count)]
        expected = [age[min(groups[-1] - group, 2)] for group in groups]
        assert shares_by_age(count, age, step) == expected


def test_old_pictures_become_a_note() -> None:
    given = chat(4)
    before = copy.deepcopy(given)
    found = age_pictures(given, (1.0, 0.5, 0))
    assert left(found) == ["2", "3"] and given == before
    assert found[0]["content"] == [
        {"type": "text", "text": "[an earlier picture was removed]"},
        {"type": "text", "text": "?"},
    ]
    assert found[1::2] == given[1::2] and found[4:] == given[4:]
    assert age_pictures(given, (1.0, 0), note=None)[0]["content"] == [{"type": "text", "text": "?"}]
    assert age_pictures([], (1, 0)) == []


def test_a_prefix_stays_until_a_group_is_full() -> None:
    """Messages change only when a group begins, so that what was cached is used again."""
    found = [age_pictures(chat(count), (1.0, 0), age_step=3) for count in range(1, 10)]
    changes = [count for count, (a, b) in enumerate(zip(found, found[1:], strict=False), 2) if b[: len(a)] != a]
    assert changes == [4, 7]
    assert [len(left(one)) for one in found] == [1, 2, 3, 1, 2, 3, 1, 2, 3]


def test_shares_between_are_those_of_shrink() -> None:
    found = age_pictures(
        chat(4), (1, 0.5, 0.25, 0), shrink=lambda part, share: shot(f"{part['image_url']['url']}/{share}")
    )
    assert left(found) == ["1/0.25", "2/0.5", "3"]


def test_pictures_inside_parts_count() -> None:
    """Results of tools, as agents send them; other parts stay as they are."""
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}, "words"]}
    given = [
        {"role": "user", "content": [result]},
        {"role": "tool", "content": None},
        {"role": "user", "content": [result]},
    ]
    found = age_pictures(given, (1, 0), note="-")
    assert found[0]["content"][0] == {**result, "content": [{"type": "text", "text": "-"}, "words"]}
    assert found[1:] == given[1:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"age": ()}, "`age` must be two or more shares"),
        ({"age": (1.0,)}, "two or more"),
        ({"age": (0.5, 1.0)}, "never rise"),
        ({"age": (1.5, 0)}, "from 0 to 1"),
        ({"age": (1, float("nan"))}, "from 0 to 1"),
        ({"age": (True, 0)}, "from 0 to 1"),
        ({"age": "10"}, "two or more"),
        ({"age": 0.5}, "two or more"),
        ({"age_step": 0}, "`age_step` must be"),
        ({"age_step": 1.0}, "`age_step` must be"),
        ({"messages": ["hello"]}, "A message must be a mapping"),
    ],
)
def test_bad_values_are_refused(options: Any, words: str) -> None:
    with pytest.raises(MmaccelError, match=words):
        age_pictures(**{"messages": chat(2), **options})
