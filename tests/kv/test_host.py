"""What a decode step costs the host, in functions called: as many on every run, however busy the machine is."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import zoo
from tail import few
from unlaunched import calls, unlaunched

from mmaccel import Recipe, Stage, accelerated
from mmaccel.method import results, sparse_read

STEPS = 4
PAGES = {"page": 16, "group": 16, "residual": 4, "bits": 4}
# by choice: one for every form in which a layer is stored and read
#: functions of Python and of C that a step calls a layer at most, above the bare model's; a few fewer from Python 3.12 on
ABOVE = {
    "bare": ((), 0),
    "uniform": ((("snapkv", 0.5, {"window": 8}),), 85),
    "heads": ((("snapkv", 0.5, {"window": 8, "head_budget": "adaptive"}),), 150),
    "packed": ((("kivi", None, PAGES),), 290),
    # 25 of them see to it that what a policy makes of the units can be a rating
    "pages that are chosen": ((("quest", 0.3, {"page": 3, "least": 1}),), 370),
}


@functools.cache
def a_layer(name: str | None) -> float:
    """Calls of a step with each further layer; of the model without mmaccel if there is no name."""
    feed, found = zoo.inputs("llava", "images"), []
    for layers in (2, 4):
        model = zoo.model("llava", num_hidden_layers=layers)
        made = None if name is None else Recipe(name, tuple(Stage(*stage) for stage in ABOVE[name][0]))

        def run(steps: int, model: Any = model, made: Recipe | None = made) -> int:
            options = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1, "do_sample": False}
            if made is None:
                with calls() as count:
                    model.generate(**feed, **options)
                return count[0]
            with accelerated(model, made), calls() as count:
                model.generate(**feed, **options)
            return count[0]

        # what is counted is a step on a GPU, where nobody looks for NaN; here no value was computed
        with unlaunched(), pytest.MonkeyPatch.context() as patch:
            for module in (results, sparse_read):
                patch.setattr(module, "on_host", lambda made: False)
            run(STEPS)
            found.append((run(STEPS) - run(0)) / STEPS)
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("name", few(ABOVE, ("bare", "uniform")))
def test_what_a_step_calls_a_layer(name: str) -> None:
    assert a_layer(name) - a_layer(None) <= ABOVE[name][1]


def test_the_count_is_the_same_every_time() -> None:
    first = a_layer.__wrapped__(None)
    thresholds = gc.get_threshold()
    gc.callbacks.append(_seen)
    # as in a process in which much has been made before
    gc.set_threshold(30)
    try:
        assert first == a_layer.__wrapped__(None) > 50
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_seen)


def _seen(phase: str, about: dict[str, int]) -> None:
    """What others hang on the collector."""
