"""The generated suite: the same everywhere, splits apart, answers right, files readable."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from mmaccel.suite import (
    DOCUMENT_TASKS,
    IMAGE_TASKS,
    SPLITS,
    VIDEO_TASKS,
    Rng,
    cell_labels,
    export,
    is_right,
    item_seed,
    make_item,
    make_suite,
    overlap,
    read_samples,
    sample_scene,
    vocabulary,
)
from mmaccel.suite.questions import description, read_box, write_box
from mmaccel.suite.scene import CHARACTERS, COLOURS, SHAPES, Ground, Scene, Thing, render

TASKS = (*IMAGE_TASKS, *VIDEO_TASKS)


@pytest.mark.parametrize("task", (*TASKS, *DOCUMENT_TASKS))
def test_items_are_reproducible(task):
    first, again = make_item(task, "test", 7), make_item(task, "test", 7)
    assert first == again
    assert make_item(task, "test", 8) != first
    media = [first.frames(56)] if first.clip else first.pictures(56)
    repeated = [again.frames(56)] if again.clip else again.pictures(56)
    assert all(np.array_equal(one, two) for one, two in zip(media, repeated, strict=True))


@pytest.mark.full
def test_items_are_the_same_in_another_process():
    script = (
        "import hashlib; from mmaccel.suite import *\n"
        "tasks = IMAGE_TASKS + VIDEO_TASKS + DOCUMENT_TASKS\n"
        "print(hashlib.sha256(repr(list(make_suite('val', tasks, 2))).encode()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert there == hashlib.sha256(repr(list(make_suite("val", (*TASKS, *DOCUMENT_TASKS), 2))).encode()).hexdigest()


def test_seeds_of_splits_streams_and_items_never_meet():
    seeds = [
        item_seed(split, index, stream)
        for split in SPLITS
        for stream in (0, 1, 255)
        for index in (0, 1, 2, 2**39, 2**40 - 1)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("arguments", [("dev", 0), ("test", -1), ("test", 2**40), ("test", 0, 256)])
def test_seeds_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError):
        item_seed(*arguments)


@pytest.mark.parametrize("task", TASKS)
def test_words_are_in_the_vocabulary(task):
    words = set(vocabulary())
    for index in range(60):
        for turn in make_item(task, "test", index).turns:
            assert set(f"{turn.question} {turn.answer}".split()) <= words


def test_descriptions_are_in_the_vocabulary_and_list_everything():
    words = set(vocabulary())
    for index in range(50):
        scene = sample_scene(Rng(index))
        text = description(scene).answer
        assert set(text.split()) <= words
        assert text.count(";") == len(scene.things) + (scene.sign is not None)


@pytest.mark.parametrize("task", ("colour", "shape", "count", "existence", "reading", "grounding"))
def test_answers_follow_from_the_scene(task):
    """Recompute answers from the question's words alone."""
    for item in (make_item(task, "test", index) for index in range(80)):
        (scene,), turn = item.scenes, item.turns[-1]
        asked = [word for word in turn.question.split() if word in SHAPES or word in COLOURS]
        asked += [shape for shape in SHAPES for word in turn.question.split() if word in (shape + "s", shape + "es")]
        found = [t for t in scene.things if all(word in (t.shape, t.colour) for word in asked)]
        if "sign" in turn.question:
            assert scene.sign and turn.answer == " ".join(scene.sign.text)
            continue
        expected = {
            "colour": lambda found=found: found[0].colour,
            "shape": lambda found=found: found[0].shape,
            "count": lambda found=found: str(len(found)),
            "existence": lambda found=found: "yes" if found else "no",
            "reading": lambda found=found: found[0].character,
            "grounding": lambda found=found: write_box(found[0].box),
        }[task]()
        assert turn.answer == expected, turn
        if task not in ("count", "existence"):
            assert len(found) == 1


@pytest.mark.parametrize("index", range(40))
def test_relation_follows_from_the_boxes(index):
    item = make_item("relation", "test", index)
    (scene,), turn = item.scenes, item.turns[-1]
    words = turn.question.rstrip(" ?").split()
    by_name = {thing.name: thing for thing in scene.things}
    names = [f"{a} {b}" for a, b in zip(words, words[1:], strict=False) if f"{a} {b}" in by_name]
    if turn.detail == "open":
        other, thing, side = by_name[names[0]], by_name[names[1]], turn.answer
    else:
        thing, other = by_name[names[0]], by_name[names[1]]
        side = next(word for word in words if word in ("left", "right", "above", "below"))
    axis = 0 if side in ("left", "right") else 1
    holds = (thing.centre[axis] < other.centre[axis]) == (side in ("left", "above"))
    assert holds == (turn.answer != "no")


def test_clip_answers_follow_from_the_frames():
    for index in range(40):
        item = make_item("motion", "test", index)
        name = item.turns[-1].question.split("does the ")[1].rsplit(" move", 1)[0]
        start, end = (next(t for t in item.clip.frames[at].things if t.name == name).centre for at in (0, -1))
        assert {
            "left": end[0] < start[0],
            "right": end[0] > start[0],
            "up": end[1] < start[1],
            "down": end[1] > start[1],
        }[item.answer]
        item = make_item("occurrences", "test", index)
        name = item.turns[-1].question.split("does the ")[1].rsplit(" appear", 1)[0]
        shown = [any(thing.name == name for thing in scene.things) for scene in item.clip.frames]
        runs = sum(now and not before for before, now in zip([False, *shown], shown, strict=False))
        assert str(runs) == item.answer
        item = make_item("needle", "test", index)
        signs = [scene.sign for scene in item.clip.frames if scene.sign]
        assert len(signs) == 2 and item.answer == " ".join(signs[0].text)
        item = make_item("order", "test", index)
        counts = [len(scene.things) for scene in item.clip.frames]
        assert counts == sorted(counts)
        assert all(thing.name != item.answer for thing in item.clip.frames[0].things)


def test_answers_are_balanced():
    answers = Counter(make_item("existence", "test", index).answer for index in range(300))
    assert set(answers) == {"yes", "no"} and min(answers.values()) > 100
    assert len(Counter(make_item("reading", "test", index).answer for index in range(300))) > 20


def test_things_are_as_large_as_promised():
    """Most things touch 15 to 60 tokens of a 14x14 grid."""
    touched = []
    for index in range(200):
        scene = sample_scene(Rng(item_seed("test", index)))
        for thing in scene.things:
            fine = cell_labels(Scene((thing,), None, scene.ground), 14 * 6).shape > 0
            touched.append(fine.reshape(14, 6, 14, 6).any((1, 3)).sum())
    share = np.mean([15 <= tokens <= 60 for tokens in touched])
    assert share > 0.75, share


def test_cell_labels_name_the_thing():
    thing = Thing("square", "red", (0.2, 0.2, 0.6, 0.6), character="7", size="large", shade=(212, 38, 44))
    labels = cell_labels(Scene((thing,), None, Ground(1, 0, 3.0)), 14)
    assert labels.shape[5, 5] == 1 + SHAPES.index("square") and labels.colour[5, 5] == 1 + COLOURS.index("red")
    assert (labels.character == 1 + CHARACTERS.index("7")).sum() >= 2
    assert labels.shape[13, 13] == 0 and np.allclose(labels.box[5, 5], thing.box)


def test_ground_is_never_constant():
    for index in range(20):
        picture = render(sample_scene(Rng(index)), 56)
        assert picture.dtype == np.uint8 and picture.shape == (56, 56, 3)
        assert picture[:8, :8].astype(float).std() > 1


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("red", "red", True),
        ("Red.", "red", True),
        ("K  4", "K 4", True),
        ("4 K", "K 4", False),
        ("", "no", False),
        ("0.25 0.25 0.50 0.50", "0.25 0.25 0.50 0.55", True),
        ("0.25 0.25 0.50 0.50", "0.50 0.50 0.75 0.75", False),
        ("red circle", "0.50 0.50 0.75 0.75", False),
        ("0.1 0.2 nan 0.3", "0.50 0.50 0.75 0.75", False),
    ],
)
def test_judging(answer, expected, right):
    assert is_right(answer, expected) is right


def test_boxes():
    assert read_box("red") is None and read_box("0.1 0.2") is None
    assert read_box(write_box((0.11, 0.24, 0.5, 0.99))) == (0.1, 0.25, 0.5, 1.0)
    assert overlap((0, 0, 1, 1), (0, 0, 1, 1)) == 1 and overlap((0, 0, 0, 0), (0, 0, 0, 0)) == 0


@pytest.mark.parametrize(("task", "frames"), [("motion", 7), ("motion", 4), ("unheard-of", 16)])
def test_impossible_items_are_refused(task, frames):
    with pytest.raises(ValueError):
        make_item(task, "test", 0, frames=frames)


def test_export_round_trip(tmp_path):
    from PIL import Image

    items = list(make_suite("val", IMAGE_TASKS, 1))
    samples, complaints = read_samples(export(items, tmp_path, pixels=56))
    assert not complaints and len(samples) == len(items)
    for item, sample in zip(items, samples, strict=True):
        assert (sample.task, sample.question, sample.answer) == (item.task, item.turns[-1].question, item.answer)
        assert [turn.question for turn in item.turns[:-1]] == [question for question, _ in sample.earlier]
        for path, picture in zip(sample.images, item.pictures(56), strict=True):
            assert np.array_equal(np.asarray(Image.open(path)), picture)


def test_clips_are_exported_as_mp4(tmp_path):
    av = pytest.importorskip("av")
    (item,) = make_suite("val", ["motion"], 1, frames=8)
    (sample,), _ = read_samples(export([item], tmp_path, pixels=64))
    with av.open(str(sample.video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.abs(np.stack(frames).astype(int) - item.frames(64)).mean() < 12


def test_broken_lines_are_named_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [
        "{nonsense",
        json.dumps({"question": "what ?", "answer": "that"}),
        json.dumps({"image": "a.png", "answer": "that"}),
        "[]",
        "",
        json.dumps({"image": "a.png", "question": "what ?", "answer": "that"}),
        json.dumps({"video": "a.mp4", "question": "what ?", "answer": "that"}),
        json.dumps({"image": 3, "question": "what ?", "answer": "that"}),
        json.dumps({"video": 3, "question": "what ?"}),
        json.dumps({"image": "a.png", "question": "what ?", "answer": 3}),
        json.dumps({"image": ["a.png", "b.png"], "question": "which ?", "id": 7}),
        json.dumps({"image": "a.png", "video": "a.mp4", "question": "which ?"}),
    ]
    path.write_text("\n".join(lines))
    samples, complaints = read_samples(path)
    assert [sample.question for sample in samples] == ["what ?", "what ?", "which ?"]
    assert [sample.name for sample in samples] == ["line 6", "line 7", "7"]
    assert samples[2].answer is None and len(samples[2].images) == 2
    named = [f"own.jsonl, line {n}" for n in (1, 2, 3, 4, 8, 9, 10, 12)]
    assert [complaint.split(":")[0] for complaint in complaints] == named
    path.write_text("")
    with pytest.raises(ValueError, match="holds no sample"):
        read_samples(path)
