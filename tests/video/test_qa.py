"""Questions about videos in bulk: the answers are those of single calls."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from asking import ASKED, FAMILIES, FRAMES, GOOD, LONGEST, alone, answerer, answers, ask
from films import film
from tail import few, in_turn

import mmaccel
from mmaccel import Fallback, MmaccelError, Recipe, Stage, get_recipe
from mmaccel.programs.video_qa.generator import AnswerGenerator, Figures, needs_own_prefill
from mmaccel.programs.video_qa.qa import QASettings, VideoAnswerer, answer_videos
from mmaccel.programs.video_qa.questions import VideoQuestion
from mmaccel.video import decode, prefetch


# --- the same answers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("which", "family"), in_turn(("none", "divprune"), FAMILIES))
def test_answers_are_those_of_single_calls(family: str, which: str, films: Path) -> None:
    """Whatever is answered together, and from one prefill of a video or from several."""
    questions = ask(films, asked=ASKED[:2])
    wanted = alone(family, which, questions)
    assert len(set(wanted.values())) > 6
    for size in (1, 32):
        one = answerer(family, which, size)
        assert answers(one, questions) == wanted
        assert one.figures.prefills == one.figures.videos == len(GOOD)
        assert one.figures.questions == len(questions) and not one.figures.failed
    one = answerer(family, which, 5)
    one.generator.own_prefill = "for this test"
    assert answers(one, questions) == wanted and one.figures.prefills == len(questions)


@pytest.mark.parametrize("family", few([name for name in zoo.VIDEO_FAMILIES if name not in FAMILIES], ["internvl"]))
def test_one_prefill_serves_every_family(family: str, films: Path) -> None:
    questions = ask(films, ("a.mp4", "slow.mp4"), ASKED[:2])
    one = answerer(family, "divprune", 4)
    assert answers(one, questions) == alone(family, "divprune", questions)
    assert one.figures.prefills == 2


# by choice: one whose layers carry a state, and one that cuts frames into slices too
@pytest.mark.parametrize("family", ["qwen3_5", "minicpmv4_6"])
def test_bare_layers_with_a_state_read_the_video_for_each_question(family: str, films: Path) -> None:
    """They would take the padding of the shorter question for words."""
    questions = ask(films, ("a.mp4", "slow.mp4"), ASKED[:2])
    one = answerer(family, "none", 4)
    assert answers(one, questions) == alone(family, "none", questions)
    assert one.figures.prefills == 4
    assert any("layers with a state" in note for note in one.figures.notes)


# by choice: one for every reason
LATE = {
    "fastv": ("fastv", "fastv works while"),
    "snapkv": ("snapkv", "snapkv works while"),
    "knorm": ("knorm", "knorm works while"),
    "kivi": ("kivi", "kivi works while"),
    "cdpruner": ("cdpruner", "cdpruner looks at the question"),
    "paper": (Recipe("paper", (Stage("divprune", 0.25),), positions="paper"), "changes the positions"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_sees_the_question_reads_the_video_for_each(name: str, films: Path) -> None:
    which, why = LATE[name]
    questions = ask(films, ("a.mp4", "high.mp4"), ASKED[:2])
    one = answerer("qwen2_5_vl", which, 4)
    assert answers(one, questions) == alone("qwen2_5_vl", which, questions)
    assert one.figures.prefills == len(questions)
    assert any(why in note and note.startswith("one prefill a question") for note in one.figures.notes)


def test_one_question_a_video_is_a_plain_call(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two forwards where one does, and no word about prefills."""
    monkeypatch.setattr(AnswerGenerator, "read", lambda *_: pytest.fail("read apart from its question"))
    one = answerer("qwen2_5_vl", "fastv", 4)
    assert len(answers(one, ask(films, asked=ASKED[:1]))) == len(GOOD)
    assert not any("prefill" in note for note in one.figures.notes)


def test_what_a_recipe_needs() -> None:
    assert needs_own_prefill(get_recipe("none")) is None and needs_own_prefill(get_recipe("balanced")) is None
    assert needs_own_prefill(get_recipe("tome")) is None and needs_own_prefill(get_recipe("resize")) is None
    assert "holitom-inner" in str(needs_own_prefill(get_recipe("holitom")))
    assert "query-frames" in str(needs_own_prefill(get_recipe("query-frames")))


def test_a_question_leaves_no_trace(films: Path) -> None:
    """Asked twice, in another order, or after a long one, it gets the same answer; what the cache holds stays."""
    words = (ASKED[0], ASKED[1], ASKED[0], ASKED[2])
    for which in ("none", "tome"):
        one = answerer("qwen2_5_vl", which, 1)
        first = answers(one, ask(films, ("slow.mp4",), words))
        again = answers(one, ask(films, ("slow.mp4",), words[::-1]))
        assert first["slow.mp4 0"] == first["slow.mp4 2"] == again["slow.mp4 1"] == again["slow.mp4 3"]
        assert (first["slow.mp4 1"], first["slow.mp4 3"]) == (again["slow.mp4 2"], again["slow.mp4 0"])
        assert len(set(first.values())) > 1
        prefix = one.generator.read(one._chosen(ask(films, ("a.mp4",)), decode(films / "a.mp4", FRAMES)))
        held = [tensor.clone() for layer in prefix.state.layers for tensor in layer.stored()]
        for _ in range(2):
            one.generator.resume(prefix, [(question, 0) for question in ask(films, ("a.mp4",))])
        after = [tensor for layer in prefix.state.layers for tensor in layer.stored()]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(held, after, strict=True))


def test_batches_hold_what_is_alike(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = answerer("qwen2_5_vl", "fastv", 4)
    seen: list[list[str]] = []
    monkeypatch.setattr(
        one.generator, "generate", lambda chunk, clips: seen.append([q.video for q, _ in chunk]) or [""] * len(chunk)
    )
    list(one.run(ask(films, ("a.mp4", "short.mp4", "high.mp4", "one.mp4"), ASKED[:2])))
    # two frames (one, twice), four, six; never two lengths in one call, and questions of one length together
    assert seen == [["one.mp4"] * 2, ["short.mp4"] * 2, ["a.mp4", "high.mp4"] * 2]


@pytest.mark.parametrize("which", ("divprune", "fastv"))
def test_a_run_that_goes_on_asks_the_same_batches(which: str, films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = ask(films)
    whole = answerer("qwen2_5_vl", which, 4)
    records = list(whole.run(questions))
    first, left = records[:7], records[7:]
    rest = answerer("qwen2_5_vl", which, 4)
    calls: list[int] = []
    write = rest.generator._written
    monkeypatch.setattr(
        rest.generator,
        "_written",
        lambda inputs, **more: calls.append(len(inputs["input_ids"])) or write(inputs, **more),
    )
    found = list(rest.run(questions, {one["id"] for one in first}))
    assert found == left
    # what was cut off in the middle of a batch is asked in that batch
    assert len(left) < sum(calls) < len(questions)
    decoded = rest.figures.videos
    assert list(rest.run(questions, {one["id"] for one in records})) == [] and rest.figures.videos == decoded


# --- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ("uniform", "scene-frames"))
def test_clips_that_are_held_take_no_more_than_they_may(
    method: str, live: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are decoded, that wait and that are asked about, however many questions a batch has room for."""
    memory = 2_000_000
    for i in range(20):
        film(tmp_path / f"{i}.mp4", 8, size=(160, 120), codec="mpeg4")
    one = answerer(
        "qwen2_5_vl", "fastv", memory=memory, frame_method=method, frames=2 if method != "uniform" else FRAMES
    )
    batches: list[int] = []
    monkeypatch.setattr(one.generator, "generate", lambda chunk, clips: batches.append(len(chunk)) or [""] * len(chunk))
    found = list(one.run(ask(tmp_path, tuple(f"{i}.mp4" for i in range(20)), ASKED[:1])))
    assert len(found) == 20 and all("answer" in record_ for record_ in found)
    assert 345_600 < live[1] <= memory and max(batches) > 1


def test_little_memory_changes_no_answer(films: Path) -> None:
    """Where a run stops and goes on makes no difference either; a clip that fits never is refused."""
    questions = ask(films, asked=ASKED[:2])
    one = answerer("qwen2_5_vl", "divprune", 4, memory=120_000)
    records = list(one.run(questions))
    assert {r["id"]: r["answer"] for r in records} == alone("qwen2_5_vl", "divprune", questions)
    rest = answerer("qwen2_5_vl", "divprune", 4, memory=120_000)
    assert list(rest.run(questions, {r["id"] for r in records[:5]})) == records[5:]
    found = answerer("qwen2_5_vl", "divprune", 4, memory=100_000).answer(questions)
    refused = {r["video"] for r in found if "give a larger memory=" in r.get("error", "")}
    assert refused == {"a.mp4", "slow.mp4", "high.mp4", "pictures"} and sum("answer" in r for r in found) == 4


# --- frames -----------------------------------------------------------------------------------------------------------
def shown(one: VideoAnswerer, questions: list[VideoQuestion], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which frames the questions are shown."""
    seen: list[list[int]] = []
    chosen = one._chosen
    monkeypatch.setattr(
        one, "_chosen", lambda group, clip: [seen.append(c.indices) or (g, c) for g, c in chosen(group, clip)]
    )
    assert all("answer" in record_ for record_ in one.run(questions))
    return seen


def test_frames_are_chosen_among_more(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(method: str, video: str = "a.mp4", **options: Any) -> list[list[int]]:
        one = answerer("qwen2_5_vl", frame_method=method, frames=4, frame_options=options)
        return shown(one, ask(films, (video,), ASKED[:2]), monkeypatch)

    assert frames("uniform") == [decode(films / "a.mp4", 4).indices]
    assert frames("keyframes") == [decode(films / "a.mp4", 4, select="keyframes").indices]
    (scenes,) = frames("scene-frames")
    assert len(scenes) == 4 and set(scenes) <= set(decode(films / "a.mp4", 16).indices)
    assert frames("distinct-frames", threshold=255.0)[0] == [0, 0]
    # a shorter one is shown as it is
    assert frames("scene-frames", "short.mp4") == [[0, 1, 2, 3]]


def test_frames_that_a_question_chooses(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As part of the recipe or as the frame method; every question has its own, so the video is read for each."""
    from mmaccel.frames.query import QueryFrames

    asked: list[str] = []

    def pick(self: QueryFrames, frames: Any, count: int) -> Any:
        asked.append(self.query)
        return torch.arange(count).numpy()

    monkeypatch.setattr(QueryFrames, "pick", pick)
    questions = ask(films, ("a.mp4",))
    one = answerer("qwen2_5_vl", "none", 8, frame_method="query-frames", frames=2)
    assert len(answers(one, questions)) == 3 and asked == list(ASKED) and one.figures.prefills == 3
    asked.clear()
    one = answerer("qwen2_5_vl", get_recipe("query-frames").override(retain=0.5), 8)
    assert len(answers(one, questions)) == 3 and sorted(set(asked)) == sorted(ASKED) and one.figures.prefills == 3


def test_recipes_on_frames_are_applied(films: Path) -> None:
    small, full = answerer("qwen2_5_vl", get_recipe("resize").override(retain=0.25)), answerer("qwen2_5_vl", "none")
    for one in (small, full):
        assert len(answers(one, ask(films, ("high.mp4",)))) == 3
    assert small.figures.visual_tokens < full.figures.visual_tokens


# --- the library ------------------------------------------------------------------------------------------------------
def test_answer_videos(films: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(
        json.dumps({"video": str(films / "a.mp4"), "question": "what?", "id": "1"}) + "\nx\n"
    )
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    options = {"recipe": "divprune", "retain": 0.5, "frames": FRAMES, "max_new_tokens": LONGEST}
    records = list(mmaccel.answer_videos(tmp_path / "q.jsonl", model, processor, **options))
    assert "line 2" in records[0]["error"] and records[1]["id"] == "1" and records[1]["answer"]
    assert not mmaccel.is_accelerated(model)
    asked = [{"video": str(films / "a.mp4"), "question": "what?"}]
    (one,) = answer_videos(asked, model, processor, **options)
    assert one["answer"] == records[1]["answer"]
    with pytest.raises(MmaccelError, match="no recipe"):
        answer_videos(asked, model, processor, recipe="nope")


def test_settings_and_figures_travel(films: Path) -> None:
    settings = QASettings(
        "tiny", get_recipe("holitom"), frame_options={"threshold": 1.0}, frame_method="distinct-frames"
    )
    assert pickle.loads(pickle.dumps(settings)).identity() == settings.identity()
    one = answerer("qwen2_5_vl", "divprune", 4)
    half, other = answerer("qwen2_5_vl", "divprune", 4), answerer("qwen2_5_vl", "divprune", 4)
    one.answer([*ask(films, ("a.mp4",)), *ask(films, ("pictures",))])
    half.answer(ask(films, ("a.mp4",)))
    other.answer(ask(films, ("pictures",)))
    total = Figures()
    for part in (half, other):
        total += pickle.loads(pickle.dumps(part.figures))
    for name in ("questions", "videos", "prefills", "visual_tokens", "visual_tokens_kept"):
        assert getattr(total, name) == getattr(one.figures, name) > 0
    assert total.backends == one.figures.backends and {"decord", "pyav"} & set(total.backends)
    assert set(total.seconds) >= {"waiting", "processor", "model", "encoder", "prefill", "decode"}
    # what was kept of every question's tokens, three a video
    assert one.figures.visual_tokens % 3 == 0 and one.figures.visual_tokens_kept < one.figures.visual_tokens / 2


def test_what_a_run_must_share_to_be_mixed(tmp_path: Path) -> None:
    base = QASettings("tiny", get_recipe("balanced")).identity()
    for other in (
        {"frames": 8},
        {"recipe": get_recipe("none")},
        {"max_new_tokens": 5},
        {"frame_method": "keyframes"},
        {"dtype": "bfloat16"},
    ):
        assert QASettings(**{"model": "tiny", "recipe": get_recipe("balanced"), **other}).identity() != base
    assert QASettings("tiny", get_recipe("balanced"), batch_size=3, timeout=3.0, device="cpu").identity() == base
    for name in ("one", "two"):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "model.safetensors").write_bytes(b"weights")
    first = QASettings(str(tmp_path / "one" / "m"), get_recipe("none")).identity()
    assert QASettings(str(tmp_path / "two" / "m"), get_recipe("none")).identity() == first
    (tmp_path / "two" / "m" / "model.safetensors").write_bytes(b"others!")
    assert QASettings(str(tmp_path / "two" / "m"), get_recipe("none")).identity() != first


def test_videos_are_decoded_ahead(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model answers the first, the next are decoded."""
    begun, several = [], threading.Event()

    decode_in_subprocess = prefetch.decode_in_subprocess

    def watched(path: Any, *args: Any) -> Any:
        begun.append(path)
        if len(begun) > 3:
            several.set()
        return decode_in_subprocess(path, *args)

    monkeypatch.setattr(prefetch, "decode_in_subprocess", watched)
    one = answerer("qwen2_5_vl", "fastv", 1)
    generate = one.generator.generate

    def waits(*args: Any) -> Any:
        assert several.wait(20), "nothing is decoded while the model works"
        return generate(*args)

    monkeypatch.setattr(one.generator, "generate", waits)
    assert len(list(one.run(ask(films, asked=ASKED[:1])))) == len(GOOD)


def test_unsure_answers_are_read_again(films: Path) -> None:
    """All of them: the answers of the bare model, at the cost of both readings."""
    asked = ask(films, ("a.mp4", "short.mp4"), ASKED[:2])
    full, few = answerer("llava_onevision", "none"), answerer("llava_onevision", get_recipe("divprune"))
    again = answerer("llava_onevision", get_recipe("divprune"), drafts={"fallback": 1.0})
    expected, _ = answers(full, asked), answers(few, asked)
    assert answers(again, asked) == expected
    assert again.figures.read_again == len(asked) == again.figures.prefills
    sums = [one.figures.visual_tokens_kept for one in (few, full, again)]
    assert sums[2] == pytest.approx(sums[0] + sums[1])
    with pytest.raises(MmaccelError, match="mmaccel tune --fallback"):
        answerer("llava_onevision", "divprune", drafts={"fallback": True})
    settings = [QASettings("tiny", get_recipe("divprune"), drafts=one).identity() for one in ({}, {"fallback": 0.5})]
    assert settings[0] != settings[1]
    assert settings[1] == QASettings("tiny", get_recipe("divprune"), drafts={"fallback": Fallback(0.5)}).identity()
