"""The quality measurement of the mini models, and the tables that are made from its results."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from mmaccel.suite import IMAGE_TASKS, VIDEO_TASKS, make_item
from training import evaluate, results
from training.build import BUILDERS


def built(name):
    torch.manual_seed(0)
    model, processor = (build() for build in BUILDERS[name])
    return model.eval(), processor


@pytest.mark.parametrize("name", list(BUILDERS))
def test_a_model_is_asked_what_it_can_see(name):
    model, processor = built(name)
    asked = evaluate.questions(model, processor, "val", 1)
    clips = VIDEO_TASKS if name == "mini-qwen-vl" else ()
    assert tuple(question.task for question in asked) == (*IMAGE_TASKS, *clips)
    sides = {"mini-llava": 112, "mini-llava-deep": 160, "mini-qwen-vl": 224}
    assert asked[0].load().pictures[0].size == (sides[name],) * 2
    assert not clips or asked[-1].load().clip.frames.shape == (16, 112, 112, 3)


def test_blank_questions_keep_everything_but_the_picture():
    model, processor = built("mini-qwen-vl")
    for question in evaluate.questions(model, processor, "val", 1):
        seeing, blank = question.load(), evaluate.blanked(question).load()
        assert (blank.question, blank.earlier) == (seeing.question, seeing.earlier)
        assert [picture.size for picture in blank.pictures] == [picture.size for picture in seeing.pictures]
        shown = [np.asarray(picture) for picture in blank.pictures] + ([blank.clip.frames] if blank.clip else [])
        assert shown and all((part == evaluate.GREY).all() for part in shown)
        assert seeing.clip is None or seeing.clip.frames.shape == blank.clip.frames.shape


def test_every_setting_asks_what_it_says(monkeypatch):
    """With a model in the place of the real one that answers by what it is shown."""
    model, processor = built("mini-llava")
    asked = []

    def fake(model, processor, questions, rows, **_):
        for question in questions:
            grey = np.ptp(np.asarray(question.load().pictures[0])) == 0
            for row in rows:
                asked.append((question.name, row.recipe.name, row.recipe.retain, grey))
                right = not grey and (row.recipe.name == "none" or question.task == "shape")
                yield row, [type("Answer", (), {"task": question.task, "name": question.name, "right": right})]

    monkeypatch.setattr(evaluate, "evaluate", fake)
    found = evaluate.accuracies(model, processor, "val", 4)
    assert {entry[1:] for entry in asked} == {("none", None, False), ("uniform", 0.5, False), ("none", None, True)}
    assert set(found["full"].values()) == {100.0} and set(found["blank"].values()) == {0.0}
    assert {task for task, value in found["half"].items() if value} == {"shape"}
    sizes = {make_item("reading", "val", index).turns[-1].detail for index in range(4)}
    assert {task for task in found["full"] if "/" in task} == {f"reading/{size}" for size in sizes}
    assert evaluate.averages(found) == {"image": {"full": 100.0, "blank": 0.0, "half": round(100 / 9, 1)}}


def test_a_real_model_is_measured():
    """Numbers of an untrained model mean nothing, but every task has one in every setting."""
    model, processor = built("mini-llava")
    found = evaluate.accuracies(model, processor, "val", 1)
    assert all(set(IMAGE_TASKS) <= set(rows) for rows in found.values()) and set(found) == {"full", "blank", "half"}
    assert all(0 <= value <= 100 for rows in found.values() for value in rows.values())


def test_results_hold_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["clip.py", "--work", str(tmp_path / "run"), "--json", "results/a.json"])
    results.write(tmp_path / "a.json", "training.clip", ("numpy",), {"steps": 3})
    record = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert record["command"] == "python -m training.clip --work run --json results/a.json"
    assert record["versions"].keys() == {"python", "torch", "numpy"} and record["steps"] == 3


def test_tables_follow_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py"])
    page = "a\n<!-- mini-llava-quality -->\nold\n<!-- /mini-llava-quality -->\nb\n<!-- shipped -->\n<!-- /shipped -->\n"
    assert "Not measured yet." in results.renewed(page)
    figures = {
        "parameters": 3_540_000,
        "split": "test",
        "items_per_task": 7,
        "accuracy_percent": {
            name: {"colour": value} for name, value in (("full", 80.0), ("blank", 5.0), ("half", 60.0))
        },
        "average_percent": {"image": {"full": 80.0, "blank": 5.0, "half": 60.0}},
    }
    results.write(tmp_path / "mini-llava-quality.json", "training.evaluate", (), figures)
    lines = [
        {"stage": stage, "seen": seen, "step": seen, "seconds": 36.0 * seen} for stage, seen in (("a", 50), ("b", 99))
    ]
    (tmp_path / "mini-llava-training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = results.renewed(page)
    assert "old" not in text and text.startswith("a\n<!-- mini-llava-quality -->\n| task | full | blank | half |\n")
    assert "| colour | 80.0 | 5.0 | 60.0 |" in text and "keeps 75.0% (image)" in text
    assert "0.99 hours: 99 pictures" in text and "`a` 50, `b` 99" in text
    assert "| `mini-llava` | 3.5 M | image | 80.0% | 60.0% | 5.0% |" in text
    assert results.renewed(text) == text


def test_a_line_for_every_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def row(name, retain, accuracy):
        figures = {"accuracy": accuracy, "kl": 0.25, "visual_share_per_layer": 0.5, "kv_share": 0.6}
        return {"retain": retain, "recipe": {"name": name}, "figures": figures}

    record = {
        "command": "mmaccel compare",
        "date": "2026-01-02",
        "machine": "m",
        "questions": 9,
        "settings": {"versions": {"torch": "1", "transformers": "2"}},
        "rows": [row("none", None, 0.8), row("a", 0.5, 0.7), row("a", 0.1, 0.4)],
    }
    (tmp_path / "mini-llava-recipes.json").write_text(json.dumps(record))
    text = results.block("mini-llava-recipes")
    assert "| `none` | 80.0% | 0.250 | 50% | 60% | 80.0% | 0.250 | 50% | 60% |" in text
    assert "| `a` | 70.0% | 0.250 | 50% | 60% | 40.0% | 0.250 | 50% | 60% |" in text
    assert text.startswith("| recipe | accuracy at 50% | KL at 50% |") and "9 questions. `mmaccel compare`" in text
