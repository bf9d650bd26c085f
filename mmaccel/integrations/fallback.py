"""A fallback for servers that choose the budget of a request and return log-probabilities, such as vLLM with the plug-in.

An answer that the model is unsure of is asked for again with a larger budget, at last with all tokens. The client decides, so
that the server needs nothing but the plug-in and ``--trust-request-mm-kwargs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..accelerate import Fallback
from ..core.budget import Retain, check_retain
from ..errors import MmaccelError


@dataclass(frozen=True)
class Routed:
    """An accepted answer: the ``completion`` as the client returned it, the ``retain`` that it was read with (False for all
    tokens), its ``certainty`` (None for the last reading), and the number of ``readings``."""

    completion: Any
    retain: Retain | bool | None
    certainty: float | None
    readings: int


def ask_with_fallback(
    create: Callable[..., Any], fallback: Fallback, *, retain: Retain | None = None, **request: Any
) -> Routed:
    """Ask a server again with a larger budget while its answer is unsure.

    Parameters
    ----------
    create : ``client.chat.completions.create`` of an OpenAI client, or a function that takes and returns the same.
    fallback : threshold, statistic (``"probability"`` or ``"margin"``), quantile, and the budgets between the first reading
        and the one with all tokens.
    retain : budget of the first reading; by default that of the server's recipe.
    **request : the request: ``model``, ``messages`` and others, without ``stream``, ``n`` and ``logprobs``.

    Raises
    ------
    MmaccelError
        If the statistic needs more than the most likely tokens, budgets do not rise, an argument is not allowed, or the server
        returned no log-probabilities.
    """
    if fallback.statistic == "entropy":
        raise MmaccelError(
            "statistic='entropy' needs the log-probabilities of all tokens, which servers do not return; take 'probability' or "
            "'margin'."
        )
    for name in ("stream", "n", "logprobs", "top_logprobs"):
        if request.get(name) is not None:
            raise MmaccelError(
                f"{name}= cannot be combined with a fallback, which judges one whole answer; leave it out."
            )
    retain = None if retain is None else check_retain(retain)
    steps = [one for one in (retain, *fallback.budgets) if one is not None]
    if any(type(a) is not type(b) or a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise MmaccelError(
            f"The budgets must rise, all of them shares or all of them counts, got {', '.join(map(str, steps))}."
        )
    extra = dict(request.pop("extra_body", None) or {})
    processing = dict(extra.pop("mm_processor_kwargs", None) or {})
    budgets: list[Retain | bool | None] = [retain, *fallback.budgets, False]
    for number, budget in enumerate(budgets, 1):
        asked: Any = budget if budget is None or budget is False else {"retain": budget}
        given = processing if asked is None else {**processing, "mmaccel": asked}
        logprobs = {} if budget is False else {"logprobs": True, "top_logprobs": 2}
        completion = create(
            **request, **logprobs, extra_body={**extra, **({"mm_processor_kwargs": given} if given else {})}
        )
        if budget is False:
            return Routed(completion, budget, None, number)
        certainty = certainty_of(completion, fallback)
        if certainty >= fallback.threshold:
            return Routed(completion, budget, certainty, number)
    raise AssertionError("the last reading is accepted")


def certainty_of(completion: Any, fallback: Fallback) -> float:
    """The certainty of an answer, 0 to 1, from the two most likely tokens of every step of a completion. Raises MmaccelError if
    it holds none."""
    logprobs = _field(_field(completion, "choices")[0], "logprobs")
    tokens = [] if logprobs is None else _field(logprobs, "content") or []
    certain = []
    for token in tokens:
        likely = sorted((math.exp(_field(one, "logprob")) for one in _field(token, "top_logprobs") or ()), reverse=True)
        if not likely:
            break
        second = likely[1] if len(likely) > 1 else 0.0
        certain.append(likely[0] - (second if fallback.statistic == "margin" else 0.0))
    if not certain or len(certain) < len(tokens):
        raise MmaccelError(
            "The server returned no log-probabilities of the two most likely tokens; ask one that supports logprobs and "
            "top_logprobs, such as vLLM."
        )
    # the lower of two neighbours, as in Fallback.of_answers
    return sorted(certain)[math.floor(fallback.quantile * (len(certain) - 1))]


def _field(value: Any, name: str) -> Any:
    """A field of an object of a client, or of plain data."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
