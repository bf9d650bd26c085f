"""An unsure answer is read again with more tokens, at last by the bare model; sure ones stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from laws.helpers import FAMILIES
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TextIteratorStreamer

from mmaccel import Fallback, MmaccelError, UnsupportedError, accelerate_vlm, accelerated

pytestmark = pytest.mark.usefixtures("no_gradients")
NEW = 8


def generate(model: Any, feed: Any, **options: Any) -> Any:
    return model.generate(**feed, **{"max_new_tokens": NEW, "do_sample": False, **options})


def between(values: list[float]) -> float:
    """A threshold under which some of the values lie, and over which others do."""
    ordered = sorted(values)
    assert ordered[0] < ordered[-1]
    return (ordered[0] + ordered[-1]) / 2


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("kind", ["image", "uneven", "video"])
@pytest.mark.parametrize("family", FAMILIES)
def test_unsure_answers_are_those_of_the_bare_model(family: str, kind: str) -> None:
    if kind not in zoo.kinds(family):
        pytest.skip("takes no clips")
    tiny, feed, processor = zoo.model(family), zoo.inputs(family, kind), zoo.processor(family)
    bare = generate(tiny, feed)
    with accelerated(tiny, "divprune", retain=0.3, fallback=1.0, processor=processor):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
    assert torch.equal(out, bare)
    assert set(stats.fallback["reading"]) == {1}
    assert [one["retain"] for one in stats.fallback["readings"]] == [0.3, None]
    assert stats.fallback["readings"][0]["visual_tokens_kept"] < stats.fallback["readings"][1]["visual_tokens_kept"]
    with accelerated(tiny, "divprune", retain=0.3, processor=processor):
        few = generate(tiny, feed)
    with accelerated(tiny, "divprune", retain=0.3, fallback=1e-9, processor=processor):
        assert torch.equal(generate(tiny, feed), few)
        assert len(tiny.mmaccel.stats().fallback["readings"]) == 1


@pytest.mark.parametrize("quantile", [0.0, 0.5])
@pytest.mark.parametrize("statistic", ["probability", "margin", "entropy"])
def test_rows_fall_back_one_by_one(statistic: str, quantile: float) -> None:
    """Of a padded batch sure rows keep the answer with few tokens, and unsure ones get that of the bare model."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    rule = {"statistic": statistic, "quantile": quantile}
    bare = generate(tiny, feed)
    with accelerated(tiny, "divprune", retain=0.3, fallback={"threshold": 1e-9, **rule}):
        few, certain = generate(tiny, feed), tiny.mmaccel.stats().fallback["certainty"]
    threshold = between(certain)
    with accelerated(tiny, "divprune", retain=0.3, fallback={"threshold": threshold, **rule}):
        out, stats = generate(tiny, feed), tiny.mmaccel.stats()
    expected = [few[row] if one >= threshold else bare[row] for row, one in enumerate(certain)]
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(out, expected, strict=True))
    assert stats.fallback["reading"] == [int(one < threshold) for one in certain]


def test_certainty_is_that_of_the_logits() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    for statistic in ("probability", "margin", "entropy"):
        with accelerated(tiny, "divprune", retain=0.3, fallback={"threshold": 1e-9, "statistic": statistic}):
            out = generate(tiny, feed, return_dict_in_generate=True, output_logits=True)
            found = tiny.mmaccel.stats().fallback["certainty"]
        chances = torch.stack(out.logits, 1).double().softmax(-1)
        ordered = chances.sort(-1, descending=True).values
        entropy = -(chances * chances.clamp(min=1e-300).log()).sum(-1)
        wanted = {
            "probability": ordered[..., 0],
            "margin": ordered[..., 0] - ordered[..., 1],
            "entropy": (-entropy).exp(),
        }[statistic]
        assert found == pytest.approx(wanted.min(-1).values.tolist(), abs=1e-6)


def test_budgets_are_tried_in_turn() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    net = Fallback(1.0, budgets=(0.5, 0.8))
    with accelerated(tiny, "divprune", retain=0.3, fallback=net):
        generate(tiny, feed)
        assert [one["retain"] for one in tiny.mmaccel.stats().fallback["readings"]] == [0.3, 0.5, 0.8, None]
        generate(tiny, feed, mmaccel={"retain": 0.6})
        assert [one["retain"] for one in tiny.mmaccel.stats().fallback["readings"]] == [0.6, 0.8, None]
        generate(tiny, feed, mmaccel=False)
        assert not tiny.mmaccel.stats().fallback


def test_pictures_are_encoded_once() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    runs: list[int] = []
    tower = tiny.model.vision_tower.register_forward_hook(lambda *_: runs.append(1))
    try:
        with accelerated(tiny, "divprune", retain=0.3, fallback=Fallback(1.0, budgets=(0.5,))):
            generate(tiny, feed)
            assert len(runs) == 1
            generate(tiny, {**feed, "pixel_values": feed["pixel_values"] + 1})
            assert len(runs) == 2
    finally:
        tower.remove()


def test_an_unsure_reading_ends_at_its_first_unsure_token() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    steps: list[int] = []

    class Counter(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            steps.append(ids.shape[1])
            return scores

    with accelerated(tiny, "divprune", retain=0.3, fallback=1.0):
        generate(tiny, feed, logits_processor=LogitsProcessorList([Counter()]))
    assert len(steps) == 1 + NEW


def test_settled_rows_are_not_written_again() -> None:
    """In the second reading of a batch a row that was sure ends at its first token."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    with accelerated(tiny, "divprune", retain=0.3, fallback=1e-9):
        generate(tiny, feed)
        certain = tiny.mmaccel.stats().fallback["certainty"]
    seen: list[Tensor] = []

    class Written(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(ids[:, feed["input_ids"].shape[1] :].clone())
            return scores

    with accelerated(tiny, "divprune", retain=0.3, fallback=between(certain)):
        generate(tiny, feed, logits_processor=LogitsProcessorList([Written()]))
        reading = tiny.mmaccel.stats().fallback["reading"]
    sure, unsure = reading.index(0), reading.index(1)
    last = seen[-1]
    assert last.shape[1] == NEW - 1
    assert (last[sure, 1:] == tiny.generation_config.pad_token_id).all()
    assert not (last[unsure, 1:] == tiny.generation_config.pad_token_id).all()


def test_streams_hold_an_answer_back_until_it_is_sure() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "image")
    feed = {name: value[:1] for name, value in feed.items()}
    for threshold in (1e-9, 1.0):
        seen = Recorder()
        with accelerated(tiny, "divprune", retain=0.3, fallback=threshold):
            out = generate(tiny, feed, streamer=seen)
        assert seen.tokens == out[0].tolist()
        assert seen.ended == 1


def test_memory_that_runs_out_keeps_the_answer_with_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    with accelerated(tiny, "divprune", retain=0.3):
        few = generate(tiny, feed)
    with accelerated(tiny, "divprune", retain=0.3, fallback=1.0):
        inner = tiny.mmaccel.family.text

        def full(module: Any, args: Any, kwargs: Any) -> None:
            if kwargs["inputs_embeds"].shape[1] == feed["input_ids"].shape[1]:
                raise torch.OutOfMemoryError("out of memory")

        hook = inner.register_forward_pre_hook(full, with_kwargs=True)
        try:
            with pytest.warns(UserWarning, match="ran out of memory"):
                out = generate(tiny, feed)
        finally:
            hook.remove()
        assert any("ran out of memory" in note for note in tiny.mmaccel.stats().notes)
    assert torch.equal(out, few)


def test_sampling_falls_back() -> None:
    """With a threshold that no token reaches, the samples are those of the bare model."""
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    torch.manual_seed(5)
    with accelerated(tiny, "divprune", retain=0.3, fallback=1.0):
        seen = generate(tiny, feed, do_sample=True, temperature=3.0)
        assert set(tiny.mmaccel.stats().fallback["reading"]) == {1}
    torch.manual_seed(5)
    tiny.generate(**feed, max_new_tokens=1, do_sample=True, temperature=3.0)  # the token of the first reading
    assert torch.equal(seen, generate(tiny, feed, do_sample=True, temperature=3.0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "threshold must be greater than 0"),
        (1.5, "threshold must be greater than 0"),
        ("sure", "fallback must be a threshold"),
        (True, "mmaccel tune --fallback"),
        ({"statistic": "margin"}, "needs a threshold"),
        ({"threshold": 0.5, "statistic": "luck"}, "statistic must be one of"),
        ({"threshold": 0.5, "quantile": 2}, "quantile must be at least 0"),
        ({"threshold": 0.5, "levels": 2}, "fallback has no 'levels'"),
        ({"threshold": 0.5, "budgets": [0.2]}, "must rise"),
        ({"threshold": 0.5, "budgets": [64]}, "all of them shares or all of them counts"),
        ({"threshold": 0.5, "budgets": [1.5]}, "budgets=1.5 is outside"),
        ({"threshold": 0.5, "budgets": 0.5}, "must be a list"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(given: Any, words: str) -> None:
    tiny = zoo.model("llava")
    with pytest.raises(MmaccelError, match=words):
        accelerate_vlm(tiny, "divprune", retain=0.3, fallback=given)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"return_dict_in_generate": True, "output_logits": True},
    ],
    ids=str,
)
def test_calls_that_cannot_fall_back_are_refused(options: Any) -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava", "uneven")
    with accelerated(tiny, "divprune", retain=0.3, fallback=0.5), pytest.raises(UnsupportedError, match="fallback"):
        generate(tiny, feed, **options)


def test_drafts_and_fallback_are_refused_together() -> None:
    tiny = zoo.model("llava")
    for options in ({"lossless": True}, {"lookup": True}):
        with pytest.raises(MmaccelError, match="cannot be combined"):
            accelerate_vlm(tiny, "divprune", fallback=0.5, **options)


def test_text_alone_is_answered() -> None:
    tiny, feed = zoo.model("llava"), zoo.inputs("llava")
    text = {"input_ids": feed["input_ids"][:1, -4:], "attention_mask": feed["attention_mask"][:1, -4:]}
    bare = generate(tiny, text)
    streamer = TextIteratorStreamer(zoo.tokenizer("llava"))
    with accelerated(tiny, "divprune", fallback=1.0):
        assert torch.equal(generate(tiny, text, streamer=streamer), bare)
        assert not tiny.mmaccel.stats().fallback
