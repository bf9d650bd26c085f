"""Drafts and text towers are loaded once a program, and freed when it ends."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_cdpruner import clip_folder

from mmaccel import answer_videos, get_recipe
from mmaccel.families import draft, text
from mmaccel.frames.clip import FrameEncoder
from mmaccel.media.files import Prompt
from mmaccel.method import model_options
from mmaccel.programs.evaluate import Question, Row, evaluate
from mmaccel.programs.tune.evaluate import Evaluator
from mmaccel.recipe import Recipe


def questions(count: int) -> list[Question]:
    def prompt(number: int) -> Prompt:
        return Prompt("what is it ?" + " and why ?" * (number % 3), (zoo.image(80, 60, number),))

    return [Question(f"q{i}", "all", None, lambda i=i: prompt(i)) for i in range(count)]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something was loaded, by its folder."""
    counted: Counter[str] = Counter()

    def counting(load: Any) -> Any:
        def call(name: str, *args: Any, **options: Any) -> Any:
            counted[Path(name).name] += 1
            return load(name, *args, **options)

        return call

    monkeypatch.setattr(text, "_load", counting(text._load))
    monkeypatch.setattr(draft, "load", counting(draft.load))
    gc.collect()
    return counted


@pytest.fixture
def recipes(tmp_path: Path) -> list[Recipe]:
    """One with a text tower, one with a draft, and one with both."""
    width = zoo.model("llava").config.vision_config.hidden_size
    tower = get_recipe("cdpruner", clip=str(clip_folder("transformers", tmp_path, width)), retain=0.5)
    drafted = get_recipe("speckv", draft=str(zoo.draft("llava")), retain=0.5)
    return [tower, drafted, get_recipe([tower, drafted])]


def test_evaluate(loads, recipes):
    model, processor = zoo.model("llava"), zoo.processor("llava")
    rows = [Row(one) for one in recipes]
    for _ in evaluate(model, processor, questions(6), rows, batch_size=2, max_new_tokens=3):
        pass
    assert [row.batches for row in rows] == [3, 3, 3]
    assert len(loads) == 2 and set(loads.values()) == {1} and not model_options._parts


def test_evaluate_that_is_broken_off_frees_them(loads, recipes):
    model, processor = zoo.model("llava"), zoo.processor("llava")
    run = evaluate(model, processor, questions(6), [Row(recipes[0])], batch_size=2, max_new_tokens=3)
    next(run)
    assert len(model_options._parts) == 1
    run.close()
    assert not model_options._parts


def test_tune(loads, recipes):
    evaluator = Evaluator(
        zoo.model("llava"), zoo.processor("llava"), [questions(2)], batch_size=1, max_new_tokens=3, timed=True
    )
    for one in (*recipes, *recipes):
        evaluator.ask(one, 0)
    assert len(loads) == 2 and set(loads.values()) == {1}
    del evaluator
    assert not model_options._parts


def of_clips() -> Recipe:
    return get_recipe("specpc", draft=str(zoo.draft("qwen2_5_vl")), retain=0.5)


def test_video_qa(loads, tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    for number in range(4):
        zoo.image(64, 64, number).save(folder / f"{number}.png")
    asked = [{"id": str(i), "video": str(folder), "question": f"what is {i}?"} for i in range(4)]
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    options = {"recipe": of_clips(), "frames": 4, "batch_size": 1, "max_new_tokens": 2}
    records = list(answer_videos(asked, model, processor, **options))
    assert len(records) == 4 and not any("error" in one for one in records), records
    assert list(loads.values()) == [1] and not model_options._parts


def twins(tmp_path: Path) -> list[Path]:
    """Two working directories, with a folder ``clip`` in each whose files have the same names, sizes and times."""
    for name in ("one", "two"):
        (tmp_path / name / "clip").mkdir(parents=True)
        for file in ("open_clip_config.json", "weights.bin"):
            (tmp_path / name / "clip" / file).write_text(name)
            os.utime(tmp_path / name / "clip" / file, ns=(1, 1))
    return [tmp_path / "one", tmp_path / "two"]


def test_an_open_clip_folder_is_named_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the name it was given, which may mean another folder, or another version of it, later."""
    open_clip = pytest.importorskip(
        "open_clip", reason="encoders of frames need open_clip: pip install 'mmaccel[clip]'"
    )
    read: list[str] = []

    def create(name: str, **options: Any) -> Any:
        read.append((Path(name.removeprefix("local-dir:")) / "weights.bin").read_text())
        return torch.nn.Identity(), None, None

    monkeypatch.setattr(open_clip, "create_model_and_transforms", create)
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: None)
    for where in twins(tmp_path):
        monkeypatch.chdir(where)
        assert FrameEncoder.load("clip") is FrameEncoder.load("clip")
    assert read == ["one", "two"]
    (Path("clip") / "weights.bin").write_text("new")
    FrameEncoder.load("clip")
    FrameEncoder.load("clip")
    assert read == ["one", "two", "new"]


def test_a_folder_is_named_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for where in twins(tmp_path):
        monkeypatch.chdir(where)
        parts.append(model_options.load_once("draft", "clip", (), lambda: torch.nn.Identity()))
        assert parts[-1] is model_options.load_once("draft", str(where / "clip"), (), lambda: torch.nn.Identity())
    assert parts[0] is not parts[1]
