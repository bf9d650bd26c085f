"""Caches of clips that a later run of video-qa loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asking import answerer, answers, ask
from films import film
from tail import few

from mmaccel import MmaccelError, get_recipe
from mmaccel.core import files
from mmaccel.programs.video_qa.generator import AnswerGenerator
from mmaccel.programs.video_qa.qa import QASettings

OTHER = ("how many are there?", "is it red?")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kept")
    film(root / "a.mp4", 20, fps=2)
    film(root / "b.mp4", 30, fps=2)
    return root


def both(root: Path, asked: tuple[str, ...]) -> list[Any]:
    return ask(root, ("a.mp4", "b.mp4"), asked)


@pytest.mark.parametrize(
    ("family", "which"),
    few(
        [(family, which) for family in ("qwen2_5_vl", "llava_onevision", "smolvlm") for which in ("balanced", "none")],
        [("qwen2_5_vl", "balanced"), ("smolvlm", "none")],
    ),
)
def test_a_later_run_reads_no_clip_again(
    family: str, which: str, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answerer(family, which, caches=str(tmp_path))
    wanted = answers(first, both(clips, OTHER))
    assert first.figures.prefills == 2 and len(list(tmp_path.iterdir())) == 2
    fresh = answerer(family, which)
    assert wanted == {name: answers(fresh, [one])[name] for one in both(clips, OTHER) for name in (one.name,)}

    with monkeypatch.context() as patch:
        patch.setattr(AnswerGenerator, "_prefill", None)
        again = answerer(family, which, caches=str(tmp_path))
        assert answers(again, both(clips, OTHER)) == wanted and again.figures.prefills == 0
        # a single other question, too
        answers(again, ask(clips, ("a.mp4",), ("who?",)))
    assert again.figures.failed == 0 and again.caches is not None and again.caches.loaded == 3


@pytest.mark.parametrize("family", few(("qwen2_5_vl", "smolvlm", "qwen3_vl"), ("qwen2_5_vl",)))
def test_a_later_run_follows_no_long_clip_again(family: str, clips: Path, tmp_path: Path) -> None:
    """Also where questions read the rate of the frames, as times."""
    recipe = get_recipe("balanced").override(frames_at_once=4)
    first, again = (answerer(family, recipe, frames=20, cap_tokens=60, caches=str(tmp_path)) for _ in range(2))
    wanted = answers(first, both(clips, OTHER))
    assert first.figures.prefills == first.figures.videos == 2 and len(list(tmp_path.iterdir())) == 2
    assert answers(again, both(clips, OTHER)) == wanted and again.figures.prefills == again.figures.videos == 0


def test_another_clip_recipe_or_number_of_frames_is_read(clips: Path, tmp_path: Path) -> None:
    for which, options in (("balanced", {}), ("none", {}), ("balanced", {"frames": 4})):
        one = answerer("qwen2_5_vl", which, caches=str(tmp_path), **options)
        answers(one, ask(clips, ("a.mp4",), OTHER))
        assert one.figures.prefills == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_that_is_broken_and_a_full_disk_lose_no_answer(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answerer("qwen2_5_vl", caches=str(tmp_path))
    wanted = answers(first, both(clips, OTHER))
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-40])

    def full(*about: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        one = answerer("qwen2_5_vl", caches=str(tmp_path))
        assert answers(one, both(clips, OTHER)) == wanted
    notes = " ".join(one.figures.notes)
    assert "a kept cache was computed again" in notes and "a cache was not kept" in notes
    assert one.figures.prefills == 2 and not list(tmp_path.glob("*.part"))


def test_what_keeps_no_caches(tmp_path: Path) -> None:
    with pytest.raises(MmaccelError, match="caches= cannot be used here: snapkv works while the question is read"):
        answerer("qwen2_5_vl", "snapkv", caches=str(tmp_path))
    with pytest.raises(MmaccelError, match="is not a folder that can be written to"):
        answerer("qwen2_5_vl", caches=str(tmp_path / "none"))
    with pytest.raises(MmaccelError, match="caches must be a folder, got 7"):
        QASettings("tiny", answerer("qwen2_5_vl").settings.recipe, caches=7)  # type: ignore[arg-type]
