"""Long files in bounded memory: frames are decoded, encoded and read group by group, and nothing grows with their number."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from asking import answerer, lines
from films import film
from laws import oracle
from tail import few

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, VideoSession, get_recipe, is_accelerated, read_video
from mmaccel.cli import main
from mmaccel.families.base import slides
from mmaccel.programs.video_qa import qa
from mmaccel.programs.video_qa.qa import QASettings, answer_videos
from mmaccel.programs.video_qa.questions import VideoQuestion
from mmaccel.video import FrameGroups, decode

FAMILIES = [name for name in zoo.VIDEO_FAMILIES if not slides(oracle.adapter(name).config)]
BOUNDED = Recipe("bounded", (Stage("infinipot-v", 1.0, {"cap": 120}),))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Films of 30 and of 240 frames, and one of a variable rate."""
    root = tmp_path_factory.mktemp("long")
    film(root / "short.mp4", 30, fps=2)
    film(root / "long.mp4", 240, fps=2)
    film(root / "uneven.mp4", 50, times=[int(40 * i + 300 * (i // 7)) for i in range(50)])
    return root


# --- groups of frames -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ("short.mp4", "uneven.mp4"))
@pytest.mark.parametrize(
    "asked", ({"frames": 13}, {"frames": 30}, {"frames": 99}, {"frames": 1}, {"fps": 1.0}, {"fps": 0.7})
)
def test_groups_are_the_frames_of_the_whole(clips: Path, name: str, asked: dict[str, Any]) -> None:
    whole = decode(clips / name, **{"frames": None, **asked})
    for at_once in (1, 7, 1000):
        groups = FrameGroups(clips / name, at_once=at_once, **asked)
        parts = list(groups)
        assert max(len(part.frames) for part in parts) <= at_once
        assert [i for part in parts for i in part.indices] == whole.indices
        assert (np.concatenate([part.frames for part in parts]) == whole.frames).all()
        assert np.allclose(np.concatenate([part.timestamps for part in parts]), whole.timestamps)
        assert groups.count >= len(whole.indices) and groups.backend == whole.backend


def test_large_frames_come_in_smaller_groups(clips: Path, live: list[int]) -> None:
    size = 96 * 64 * 3
    for part in FrameGroups(clips / "long.mp4", 200, memory=10 * size):
        assert len(part.frames) <= 5
    assert live[1] <= 10 * size


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, "Say how many frames to decode"),
        ({"frames": 4, "fps": 1.0}, "Give `frames` or `fps`, not both, got frames=4 and fps=1.0"),
        ({"frames": 0}, "`frames` must be a whole number from 1 to"),
        ({"fps": -1.0}, "`fps` must be a number of more than 0"),
        ({"frames": 4, "at_once": 0}, "`at_once` must be a whole number of at least 1, got 0"),
        ({"frames": 4, "at_once": 2.5}, "`at_once` must be a whole number of at least 1, got 2.5"),
        ({"frames": 4, "timeout": 0, "isolated": True}, "`timeout` must be more than 0"),
    ],
)
def test_groups_that_are_refused(clips: Path, asked: dict[str, Any], wanted: str) -> None:
    with pytest.raises(MmaccelError, match=wanted):
        FrameGroups(clips / "short.mp4", **asked)
    with pytest.raises(MmaccelError, match="does not exist"):
        FrameGroups(clips / "none.mp4", 4)


# --- reading ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", few(FAMILIES, ["qwen2_5_vl", "internvl"]))
def test_a_file_is_read_as_its_frames_are(family: str, clips: Path) -> None:
    """The answers of frames that are pushed by hand; ``generate`` gives the tokens of ``ask``."""
    model, processor = oracle.subject(family), zoo.processor(family)
    options = {"processor": processor, "cap_tokens": 200, "chunk": 4}
    got = read_video(clips / "short.mp4", model, "infinipot-v", frames=12, **options)
    wanted = VideoSession(model, "infinipot-v", fps=12 / 15, **options)
    wanted.push(decode(clips / "short.mp4", 12).frames)
    assert got.frames == wanted.frames == 12 and got.visual_tokens == wanted.visual_tokens > 0
    before = got.tokens(), got.nbytes()
    told: list[int] = []
    assert got.ask("what is it?", 8, told.append) == wanted.ask("what is it?", 8)
    tokens = got.generate("what is it?", 8, do_sample=False)
    assert tokens.shape[0] == 1 and tokens[0, : len(told)].tolist() == told
    torch.manual_seed(0)
    drawn = got.generate("what is it?", 8, do_sample=True, temperature=5.0)
    torch.manual_seed(0)
    again = got.generate("what is it?", 8, do_sample=True, temperature=5.0, return_dict_in_generate=True)
    assert torch.equal(drawn, again) and (got.tokens(), got.nbytes()) == before
    assert not is_accelerated(model)


def test_a_rate_and_its_default(clips: Path, tmp_path: Path) -> None:
    model, processor = oracle.subject("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    one = read_video(clips / "short.mp4", model, processor=processor, cap_tokens=200)
    assert one.frames + len(one._waiting) == 15 and one.fps == 1.0 and one.chunk == 8
    bounded = Recipe("small", BOUNDED.stages, frames_at_once=4)
    other = read_video(clips / "short.mp4", model, bounded, processor=processor, cap_tokens=200, fps=2.0)
    assert other.frames + len(other._waiting) == 30 and other.fps == 2.0 and other.chunk == 4
    file = tmp_path / "small.json"
    file.write_text(bounded.to_json(), encoding="utf-8")
    assert read_video(clips / "short.mp4", model, file, processor=processor, cap_tokens=200).chunk == 4


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"frames": 3, "fps": 1.0}, "Give `frames` or `fps`, not both"),
        ({"frames": -3}, "`frames` must be a whole number"),
        ({"cap_tokens": 0}, "cap_tokens must be a whole number of at least 1"),
        ({"recipe": "divprune"}, "never evicts from the cache"),
        ({"memory": 0}, "`memory` must be a whole number"),
    ],
)
def test_what_cannot_be_read_is_refused(clips: Path, options: dict[str, Any], wanted: str) -> None:
    model, processor = oracle.subject("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    with pytest.raises(MmaccelError, match=wanted):
        read_video(clips / "short.mp4", model, processor=processor, **options)


def test_generate_in_a_session_has_one_row(clips: Path) -> None:
    one = read_video(clips / "short.mp4", oracle.subject("qwen2_5_vl"), processor=zoo.processor("qwen2_5_vl"))
    for name in ("num_beams", "num_return_sequences"):
        with pytest.raises(MmaccelError, match=f"`{name}` must be 1 in a session, got 2; leave it out"):
            one.generate("what?", **{name: 2})
    with pytest.raises(MmaccelError, match="max_new_tokens must be a whole number of at least 1, got 0"):
        one.generate("what?", max_new_tokens=0)
    with pytest.raises(MmaccelError, match="There is nothing to ask about"):
        VideoSession(one.model, processor=one.processor).generate("what?")


# --- bulk ---------------------------------------------------------------------------------------------------------------
def asked(clips: Path, *names: str) -> list[VideoQuestion]:
    return [VideoQuestion(f"{n} {w}", n, str(clips / n), w) for n in names for w in ("what?", "where is it?")]


def test_peaks_do_not_grow_with_the_frames(clips: Path, live: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of two groups at a time, and keys of the cap and one group; answers are those of a session."""
    monkeypatch.setattr(FrameGroups.__init__, "__kwdefaults__", {**FrameGroups.__init__.__kwdefaults__, "at_once": 10})
    monkeypatch.setattr(qa, "AT_ONCE", 10)
    peaks, keys, kept = [], list[int](), VideoSession._read

    def read(self: VideoSession) -> None:
        kept(self)
        keys.append(self.tokens())

    monkeypatch.setattr(VideoSession, "_read", read)
    for name, frames in (("short.mp4", 30), ("long.mp4", 240)):
        gc.collect()
        before = live[1] = live[0]
        one = answerer("qwen2_5_vl", BOUNDED, frames=frames)
        answers = {record["id"]: record["answer"] for record in one.run(asked(clips, name))}
        assert one.figures.videos == one.figures.prefills == 1 and one.figures.questions == 2
        assert sum(one.figures.backends.values()) == 1 and any("group by group" in note for note in one.figures.notes)
        peaks.append((live[1] - before, max(keys)))
        session = VideoSession(one.generator.model, BOUNDED, processor=one.generator.processor, cap_tokens=120, fps=2.0)
        session.push(decode(clips / name, frames).frames)
        assert answers == {q.name: session.ask(q.words(), one.settings.max_new_tokens) for q in asked(clips, name)}
    # two groups, and the frames that are being read; the long film has 240
    assert all(pixels <= 60 * 96 * 64 * 3 and most <= 120 for pixels, most in peaks), peaks


def test_which_clips_are_read_group_by_group(clips: Path) -> None:
    """Those of more frames than a group, with a recipe that bounds the cache and needs no frame twice."""
    cap = {
        (recipe, frames): answerer("qwen2_5_vl", made, frames=frames).settings.cap
        for recipe, made in (("bounded", BOUNDED), ("free", "infinipot-v"), ("pruned", "divprune"))
        for frames in (16, 65)
    }
    assert {key for key, value in cap.items() if value is not None} == {("bounded", 65)} and cap["bounded", 65] == 120
    small = Recipe("small", BOUNDED.stages, frames_at_once=4)
    assert answerer("qwen2_5_vl", small, frames=5).settings.cap == 120
    assert answerer("qwen2_5_vl", BOUNDED, frames=65, frame_method="scene-frames").settings.cap is None


# by choice: one or two of each site
@pytest.mark.parametrize("name", ("none", "balanced", "snapkv", "kivi", "fastv", "resize", "keydiff"))
def test_every_recipe_that_can_reads_long_clips_group_by_group(
    name: str, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``cap_tokens``, which a policy of the recipe has, or one that is added, and no layer holds more."""
    recipe, keys, kept = get_recipe(name), list[int](), VideoSession._read

    def read(self: VideoSession) -> None:
        kept(self)
        keys.append(self.tokens())

    monkeypatch.setattr(VideoSession, "_read", read)
    one = answerer("qwen2_5_vl", recipe, frames=200, cap_tokens=120)
    records = list(one.run(asked(clips, "long.mp4")))
    assert all("answer" in record for record in records) and one.figures.prefills == 1 and max(keys) <= 120
    assert one.figures.visual_tokens > 8 * 120
    assert one.settings.hint() is None and one.settings.identity()["cap_tokens"] == 120
    assert answerer("qwen2_5_vl", recipe, frames=64, cap_tokens=120).settings.cap is None


def test_a_hint_says_which_clips_are_read_whole() -> None:
    def hint(recipe: str, frames: int = 100, **options: Any) -> str | None:
        return QASettings("tiny", get_recipe(recipe).override(retain=0.5), frames=frames, **options).hint()

    assert hint("balanced", 64) is None
    wanted = (
        "Clips of up to 100 frames are read whole, and memory grows with them; give --cap-tokens 4096 to read them group by "
        "group."
    )
    assert hint("balanced") == hint("snapkv") == wanted
    whole = hint("kvzip")
    assert whole is not None and "kvzip scores the keys of a prompt when it ends, so take fewer frames where" in whole
    whole = hint("balanced", frame_method="scene-frames")
    assert whole is not None and "frame_method='scene-frames' chooses among all frames, so take fewer frames" in whole


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        ("kvzip", {}, "kvzip scores the keys of a prompt when it ends"),
        ("quest", {}, "its policy quest evicts nothing below a cap"),
        ("visiontrim", {}, "visiontrim looks at the question"),
        ("scene-frames", {}, "scene-frames chooses among all frames"),
        ("homer", {}, "one joins what layers have stored of chunks"),
        ("balanced", {"frame_method": "keyframes"}, "frame_method='keyframes' chooses among all frames"),
        ("balanced", {"drafts": {"lookup": True}}, "drafts and a fallback begin with the whole prompt"),
    ],
)
def test_a_cap_that_cannot_be_kept_is_refused(recipe: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(
        MmaccelError, match=f"(?s)100 frames cannot be read.*cap_tokens=99 asks: .*{why}.*; leave it out"
    ):
        QASettings("tiny", get_recipe(recipe).override(retain=0.5), frames=100, cap_tokens=99, **options)
    with pytest.raises(MmaccelError, match="cap_tokens must be a whole number of at least 1, got 0"):
        QASettings("tiny", get_recipe("none"), cap_tokens=0)


def test_long_clips_that_fail_cost_their_own_questions(clips: Path) -> None:
    (clips / "text.mp4").write_text("no film")
    small = Recipe("small", (Stage("infinipot-v", 1.0, {"cap": 5}),))
    records = answerer("qwen2_5_vl", BOUNDED, frames=65).answer(asked(clips, "none.mp4", "text.mp4", "short.mp4"))
    assert ["answer" in record for record in records] == [False] * 4 + [True] * 2
    assert "does not exist" in records[0]["error"] and "text.mp4" in records[2]["error"]
    word = VideoQuestion("1", "short.mp4", str(clips / "short.mp4"), "what is <|video_pad|>?")
    (record,) = answerer("qwen2_5_vl", BOUNDED, frames=65).answer([word])
    assert record["error"].startswith("The question contains the placeholder '<|video_pad|>'")
    (record, _) = answerer("qwen2_5_vl", small, frames=65).answer(asked(clips, "short.mp4"))
    assert "cap_tokens must be greater than the" in record["error"]
    sliding = next(name for name in zoo.VIDEO_FAMILIES if slides(oracle.adapter(name).config))
    given = asked(clips, "short.mp4"), oracle.subject(sliding), zoo.processor(sliding)
    with pytest.raises(UnsupportedError, match="sliding windows"):
        answer_videos(*given, recipe=BOUNDED, frames=65)


def test_the_command_reads_long_clips(
    clips: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    words = ["video-qa", str(clips / "long.mp4"), "--ask", "what?", "-o", str(out), "--model", str(model)]
    more = ["--frames", "100", "--recipe", "infinipot-v", "--set", "cap=120", "--max-new-tokens", "4", "--json"]
    assert main([*words, *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 0 and report["videos"] == report["prefills"] == 1 and report["decoders"]
    assert any("group by group" in note for note in report["notes"]) and report["visual_tokens_kept"] <= 120
    assert len(lines(out)) == 1
    out = tmp_path / "b.jsonl"
    words[words.index("-o") + 1] = str(out)
    assert main([*words, "--frames", "100", "--max-new-tokens", "4"]) == 0
    assert "give --cap-tokens 4096 to read them group by group" in capsys.readouterr().err
