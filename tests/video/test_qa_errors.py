"""What goes wrong while videos are answered: it is named, and costs no other question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from asking import ASKED, alone, answerer, answers, ask
from tail import in_turn

from mmaccel import MmaccelError, get_recipe
from mmaccel.accelerate.positions import check_positions
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.video_qa.qa import QASettings, VideoAnswerer
from mmaccel.programs.video_qa.questions import VideoQuestion


def test_bad_videos_are_named_and_the_rest_goes_on(films: Path) -> None:
    bad = ("nope.mp4", "text.mp4", "cut.mp4", "bare")
    questions = [*ask(films, bad, ASKED[:2]), *ask(films, ("a.mp4",)), VideoQuestion("line", error="no JSON.")]
    one = answerer("qwen2_5_vl")
    found = one.answer(questions)
    assert [record["id"] for record in found] == [question.name for question in questions]
    for record_ in [*found[:8], found[-1]]:
        assert set(record_) >= {"id", "video", "question", "error"} and "answer" not in record_
        assert record_["error"].endswith(".") and "\n" not in record_["error"]
    assert all(name in found[2 * i]["error"] for i, name in enumerate(bad))
    assert all("answer" in record_ for record_ in found[8:11])
    assert (one.figures.failed, one.figures.questions, one.figures.videos) == (9, 3, 1)


def starved(one: VideoAnswerer, most: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that has room for ``most`` questions at a time."""
    write, tried = one.generator._written, []

    def written(inputs: Any, **more: Any) -> list[str]:
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > most:
            raise error("no room")
        return write(inputs, **more)

    monkeypatch.setattr(one.generator, "_written", written)
    return tried


@pytest.mark.parametrize(("which", "error"), in_turn(("divprune", "fastv"), (torch.OutOfMemoryError, MemoryError)))
def test_auto_backs_off_and_says_so(
    which: str, error: type[BaseException], films: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, said = ask(films), []
    one = answerer("qwen2_5_vl", which, say=said.append)
    tried = starved(one, 2, error, monkeypatch)
    assert answers(one, questions) == alone("qwen2_5_vl", which, questions)
    assert one.size == 2 and len(said) == len([n for n in tried if n > 2]) in (1, 2)
    assert all(sentence.startswith("Out of memory; continuing with ") for sentence in said)


def test_no_room_for_one_question_is_an_error_of_that_question(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "fastv")
    starved(one, 0, torch.OutOfMemoryError, monkeypatch)
    found = list(one.run(ask(films, ("a.mp4", "high.mp4"))))
    assert len({r["id"] for r in found}) == len(found) == 6 and all("out of memory" in r["error"] for r in found)
    fixed = answerer("qwen2_5_vl", "fastv", 4)
    starved(fixed, 2, torch.OutOfMemoryError, monkeypatch)
    with pytest.raises(MmaccelError, match="smaller batch size, or 'auto'"):
        list(fixed.run(ask(films)))


def test_one_question_that_breaks_the_model_breaks_no_other(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "divprune", 8)
    made = one.generator.encode

    def encoded(processor: Any, prompts: Any) -> Any:
        if any(prompt.question == ASKED[1] for prompt in prompts):
            raise ValueError("a processor says no\nat length")
        return made(processor, prompts)

    monkeypatch.setattr(one.generator, "encode", encoded)
    monkeypatch.setattr(one.generator, "own_prefill", "for this test")
    questions = ask(films, ("a.mp4", "high.mp4"))
    found = {r["id"]: r for r in one.run(questions)}
    wanted = alone("qwen2_5_vl", "divprune", questions)
    for question in questions:
        if question.question == ASKED[1]:
            assert "(ValueError: a processor says no)" in found[question.name]["error"]
        else:
            assert found[question.name]["answer"] == wanted[question.name]


@pytest.mark.parametrize("which", ["none", "divprune", "fastv"])
def test_a_prompt_beyond_the_positions_of_the_model_is_an_error_of_its_question(which: str, films: Path) -> None:
    """With one prefill a video and with one a question; nothing is computed, and no other answer changes."""
    one = answerer("qwen2_5_vl", which, 8)
    asked = (ASKED[0], "and why " * 4096, ASKED[1])
    questions = ask(films, ("a.mp4",), asked)
    found = {r["id"]: r for r in one.run(questions)}
    long = questions[1].name
    assert "positions in all, so show fewer" in found[long]["error"] and "answer" not in found[long]
    others = [questions[0], questions[2]]
    assert {r.name: found[r.name]["answer"] for r in others} == alone("qwen2_5_vl", which, others)


def test_positions_are_counted_and_not_tokens() -> None:
    """With M-RoPE a clip has more tokens than positions; recipes that place tokens anew are let through."""
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    inputs = encode(processor, [Prompt("what ?", (zoo.image(224, 224, 0),))])
    tokens = inputs["input_ids"].shape[1]
    places = int(model.model.get_rope_index(**{k: v for k, v in inputs.items() if "pixel" not in k})[0].max()) + 1
    text, most = model.config.get_text_config(), model.config.get_text_config().max_position_embeddings
    assert places + 8 < tokens
    try:
        text.max_position_embeddings = places + 8
        check_positions(model, get_recipe("none"), inputs, 8)
        with pytest.raises(MmaccelError, match=f"{tokens} tokens at {places} positions"):
            check_positions(model, get_recipe("none"), inputs, 9)
        check_positions(model, get_recipe("divprune", retain=0.5, positions="paper"), inputs, 9)
        check_positions(model, get_recipe("homer", retain=0.5), inputs, 9)
    finally:
        text.max_position_embeddings = most


@pytest.mark.parametrize(("at", "which"), in_turn((1, 2, 5), ("divprune", "fastv")))
def test_a_model_that_fails_in_the_middle_of_a_batch(which: str, at: int, films: Path) -> None:
    """In its reading of the videos or in a step of an answer: what was asked together is asked again, one by one."""
    questions = ask(films, ("a.mp4", "high.mp4"), ASKED[:2])
    one, calls = answerer("qwen2_5_vl", which, 4), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("a kernel of the device failed\nat length")

    hook = one.generator.family.text.layers[1].register_forward_pre_hook(fail)
    try:
        found = list(one.run(questions))
    finally:
        hook.remove()
    assert calls > at and len(found) == len(questions)
    assert {r["id"]: r.get("answer", r) for r in found} == alone("qwen2_5_vl", which, questions)


def test_a_choice_of_frames_that_fails_costs_one_video(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel.method import FrameChoice

    choose = FrameChoice.choose

    def failing(self: FrameChoice, frames: np.ndarray, retain: float) -> np.ndarray:
        if frames.shape[1] > frames.shape[2]:
            raise ZeroDivisionError("by nothing")
        return choose(self, frames, retain)

    monkeypatch.setattr(FrameChoice, "choose", failing)
    one = answerer("qwen2_5_vl", frame_method="scene-frames", frames=3)
    found = list(one.run(ask(films, ("high.mp4", "a.mp4"), ASKED[:1])))
    assert [r.get("error") for r in found] == ["The frames could not be chosen (ZeroDivisionError: by nothing).", None]


@pytest.mark.parametrize(("family", "place"), [("qwen2_5_vl", "<|image_pad|>"), ("llava_onevision", "<video>")])
def test_a_question_that_shows_the_model_something(family: str, place: str, films: Path) -> None:
    """As in sets made for training, where the prompt begins with a place for the video."""
    broken = VideoQuestion("x", "a.mp4", str(films / "a.mp4"), f"{place}\nwhat?")
    questions = ask(films, ("a.mp4",), ASKED[:2])
    *found, last = answerer(family, "divprune").answer([*questions, broken])
    assert {one["id"]: one["answer"] for one in found} == alone(family, "divprune", questions)
    assert last["error"] == f"The question contains the placeholder '{place}' of this model; leave it out."


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"frames": 0}, "frames must be .* got 0"),
        ({"batch_size": 0}, "batch_size must be .* got 0"),
        ({"batch_size": "many"}, "batch_size must be .* got 'many'"),
        ({"max_new_tokens": True}, "max_new_tokens must be .* got True"),
        ({"timeout": 0}, "`timeout` must be more than 0"),
        ({"timeout": float("inf")}, "`timeout` must be .*got inf"),
        ({"frame_method": "divprune"}, "frame_method must be uniform, keyframes, .*, got 'divprune'"),
        ({"frame_method": "distinct-frames", "frame_options": {"threshold": -1.0}}, "`threshold` .* got -1.0"),
    ],
)
def test_options_of_no_use(option: dict[str, Any], said: str) -> None:
    with pytest.raises(MmaccelError, match=said):
        QASettings("tiny", get_recipe("none"), **option)


def test_models_and_recipes_that_cannot(films: Path) -> None:
    with pytest.raises(MmaccelError, match="takes no video"):
        answerer("llava")
    with pytest.raises(MmaccelError, match="CLS"):
        answerer("qwen2_5_vl", "vtc-cls")
