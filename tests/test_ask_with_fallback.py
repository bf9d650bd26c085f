"""A client of a server with log-probabilities asks again with more tokens while an answer is unsure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmaccel import Fallback, MmaccelError
from mmaccel.integrations.fallback import ask_with_fallback

ASKED: dict[str, Any] = {"model": "m", "messages": []}


class Server:
    """Answers by budget: the two most likely probabilities of every token."""

    def __init__(self, **answers: list[tuple[float, ...]]) -> None:
        self.answers, self.requests = answers, list[dict[str, Any]]()

    def create(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        given = request["extra_body"].get("mm_processor_kwargs", {}).get("mmaccel")
        name = "all" if given is False else "own" if given is None else f"r{given['retain']}"
        logprobs = None
        if request.get("logprobs"):
            steps = [[{"logprob": math.log(chance)} for chance in token] for token in self.answers[name]]
            logprobs = {"content": [{"top_logprobs": step} for step in steps]}
        return {"choices": [{"message": {"content": name}, "logprobs": logprobs}]}


def test_budgets_are_tried_in_turn() -> None:
    server = Server(**{"r0.1": [(0.9, 0.05), (0.4, 0.3)], "r0.3": [(0.9, 0.1), (0.6, 0.2)]})
    for threshold, found in ((0.3, (0.1, 1)), (0.5, (0.3, 2)), (0.7, (False, 3))):
        routed = ask_with_fallback(server.create, Fallback(threshold, budgets=(0.3,)), retain=0.1, **ASKED)
        assert (routed.retain, routed.readings) == found
        assert routed.completion["choices"][0]["message"]["content"] == ("all" if found[0] is False else f"r{found[0]}")
        assert routed.certainty == (None if found[0] is False else pytest.approx({0.1: 0.4, 0.3: 0.6}[found[0]]))
    assert [one.get("top_logprobs") for one in server.requests[-3:]] == [2, 2, None]
    assert server.requests[-1]["extra_body"] == {"mm_processor_kwargs": {"mmaccel": False}}


def test_statistic_and_quantile_are_those_of_a_fallback() -> None:
    import torch

    tokens = [(0.9, 0.05), (0.5, 0.4), (0.7, 0.1), (0.6, 0.35)]
    for statistic in ("probability", "margin"):
        for quantile in (0.0, 0.4, 0.5, 1.0):
            net = Fallback(1e-9, statistic, quantile)  # type: ignore[arg-type]
            logits = [torch.tensor([[first, second, 1 - first - second]]).log() for first, second in tokens]
            (expected,) = net.of_answers([net.certainty(one) for one in logits], [4])
            routed = ask_with_fallback(Server(own=tokens).create, net, **ASKED)
            assert routed.certainty == pytest.approx(expected, abs=1e-6) and routed.retain is None


def test_a_request_keeps_what_it_has() -> None:
    server = Server(own=[(0.9,)])
    extra = {"top_k": 3, "mm_processor_kwargs": {"max_pixels": 9}}
    ask_with_fallback(server.create, Fallback(0.95), **ASKED, temperature=0, extra_body=extra)
    first, last = server.requests
    assert first == ASKED | {"temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": extra}
    assert last["extra_body"] == {"top_k": 3, "mm_processor_kwargs": {"max_pixels": 9, "mmaccel": False}}
    assert extra == {"top_k": 3, "mm_processor_kwargs": {"max_pixels": 9}}


@pytest.mark.parametrize(
    ("net", "options", "words"),
    [
        (Fallback(0.5, "entropy"), {}, "statistic='entropy' needs"),
        (Fallback(0.5), {"stream": True}, "stream= cannot be combined"),
        (Fallback(0.5), {"n": 2}, "n= cannot be combined"),
        (Fallback(0.5, budgets=(0.3, 0.2)), {}, "budgets must rise"),
        (Fallback(0.5, budgets=(0.3,)), {"retain": 0.4}, "budgets must rise"),
        (Fallback(0.5, budgets=(0.3,)), {"retain": 64}, "budgets must rise"),
        (Fallback(0.5), {}, "returned no log-probabilities"),
    ],
)
def test_what_cannot_be_right_is_refused(net: Fallback, options: Any, words: str) -> None:
    def silent(**request: Any) -> dict[str, Any]:
        return {"choices": [{"logprobs": None}]}

    with pytest.raises(MmaccelError, match=words):
        ask_with_fallback(silent, net, **ASKED, **options)
