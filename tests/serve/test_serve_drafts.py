"""A server that drafts gives the answers of the bare model, to every client at once."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from clients import chat, streamed, text

LONG = {"temperature": 0, "max_tokens": 48}


@pytest.mark.parametrize(("drafts", "several"), [({"lookup": True}, 2), ({"draft": "self"}, 1)], ids=str)
def test_answers_are_those_of_the_bare_model(
    serve: Any, things: SimpleNamespace, drafts: dict[str, Any], several: int
) -> None:
    served = serve("mini-qwen-vl", "divprune", drafts={"lossless": True, **drafts}, several=several)
    cases = [messages for messages, _ in things.cases.values()]
    bare = [text(chat(served, *one, **LONG, extra_body={"mmaccel": False})) for one in cases]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda one: chat(served, *one, **LONG), cases * 3))
    assert [text(one) for one in found] == bare * 3
    told = served.http.get("/metrics").text
    for name in ("drafted", "accepted"):
        (count,) = re.findall(rf"^mmaccel_{name}_tokens_total (\S+)$", told, re.M)
        assert float(count) == sum(one.mmaccel["drafting"][name] for one in found) > 0
    for messages, whole in zip(cases, bare, strict=True):
        assert streamed(served, *messages, **LONG) == whole
        if len(whole) > 4:
            found = streamed(served, *messages, **LONG, stop=whole[2:5])
            assert found == whole[: whole.index(whole[2:5])]
