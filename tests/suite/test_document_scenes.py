"""Documents of the suite: answers stand on the page, text lies where its labels say, files hold the pictures."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from mmaccel.suite import (
    DOCUMENT_TASKS,
    SPLITS,
    Rng,
    export,
    item_seed,
    make_item,
    make_suite,
    read_samples,
    render_document,
)
from mmaccel.suite.document import GLYPHS, document_cells, glyph_places, sample_document, width_of


def documents(kind, count):
    return [sample_document(kind, Rng(item_seed("val", number, 77))) for number in range(count)]


@pytest.mark.parametrize("kind", DOCUMENT_TASKS)
def test_answers_stand_on_the_page(kind):
    for document, turns in documents(kind, 40):
        page = " ".join(document.text.lower().split())
        for turn in turns:
            assert turn.task == kind
            if turn.detail == "short" and turn.answer not in ("Yes", "No") and not turn.question.startswith("How many"):
                assert turn.answer.lower() in page or turn.answer.lower() in page.replace(":", ""), (page, turn)


@pytest.mark.parametrize("kind", DOCUMENT_TASKS)
def test_a_question_has_one_answer_and_its_sentence_holds_it(kind):
    for _, turns in documents(kind, 40):
        answers = {turn.question: turn.answer for turn in turns}
        assert len(answers) == len(turns)
        for question, sentence in answers.items():
            asked, wants, _ = question.partition(" Answer in a sentence.")
            if wants:
                assert answers[asked].lower() in sentence.lower() and sentence.endswith(".")


def test_figures_follow_from_the_page():
    for document, turns in documents("receipt", 40):
        answers = {turn.question: turn.answer for turn in turns}
        *prices, total = (round(100 * float(price)) for price in re.findall(r"\d+\.\d\d$", document.text, re.MULTILINE))
        assert sum(prices) == total == round(100 * float(answers["What is the total?"]))
    for document, turns in documents("chart", 40):
        answers = {turn.question: turn.answer for turn in turns}
        values = {name: int(value) for name, value in (row.split() for row in document.text.split("\n")[1:])}
        assert answers["Which bar is the longest?"] == max(values, key=values.get)
        assert answers["Which bar is the shortest?"] == min(values, key=values.get)
        assert answers["How many bars are there?"] == str(len(values))
        lengths = [box[2] - box[0] for box, _ in document.marks]
        assert [sorted(lengths).index(length) for length in lengths] == [
            sorted(values.values()).index(value) for value in values.values()
        ]
    for document, turns in documents("table", 40):
        rows = {row.split()[0]: row.split()[1:] for row in document.text.split("\n")[1:]}
        answers = {turn.question: turn.answer for turn in turns}
        for question, answer in answers.items():
            named = [name for name in rows if name in question]
            if named and answer not in ("Yes", "No") and "sentence" not in question:
                assert answer in rows[named[0]]


@pytest.mark.parametrize("kind", DOCUMENT_TASKS)
def test_text_lies_on_its_paper(kind):
    for document, _ in documents(kind, 60):
        left, top, right, bottom = document.paper
        for line in document.texts:
            assert left <= line.left and line.left + line.size * width_of(line.text, line.font) <= right + 1e-9
            assert top <= line.middle - 0.4 * line.size and line.middle + 0.4 * line.size <= bottom
            assert set(line.text) <= {" ", *GLYPHS}
        rows = {}
        for line in document.texts:
            rows.setdefault(line.middle, []).append(line)
        for row in rows.values():
            for one, other in zip(row, row[1:], strict=False):
                assert one.left + one.size * width_of(one.text, one.font) < other.left


@pytest.mark.parametrize("kind", DOCUMENT_TASKS)
def test_labels_lie_on_ink(kind):
    """Take the last character of a line away, and the picture changes where it is said to be, and nowhere else."""
    (document, _), *_ = documents(kind, 1)
    for number in (0, len(document.texts) - 1):
        line = document.texts[number]
        *_, (glyph, x, y) = (place[:3] for place in glyph_places(document) if place[3] == number)
        assert glyph.strip() == line.text[-1]
        texts = [replace(one, text=one.text[:-1]) if one is line else one for one in document.texts]
        changed = replace(document, texts=tuple(texts))
        pixels = 400
        ink = np.abs(render_document(document, pixels).astype(int) - render_document(changed, pixels)).sum(-1) > 60
        rows, columns = ink.nonzero()
        assert len(rows) > 3 and np.ptp(columns) / pixels < 1.2 * line.size
        assert abs(columns.mean() / pixels - x) < 0.2 * line.size
        assert abs(rows.mean() / pixels - y) < 0.6 * line.size  # a full stop lies low


def test_cells_hold_every_character_once():
    for kind in DOCUMENT_TASKS:
        for document, _ in documents(kind, 10):
            cells = [cell for row in document_cells(document, 20) for cell in row]
            assert sorted("".join(cells).replace(" ", "")) == sorted(document.text.replace(" ", "").replace("\n", ""))
            assert max(len(cell.replace(" ", "")) for cell in cells) <= 3


def test_splits_show_different_documents():
    for kind in DOCUMENT_TASKS:
        texts = [make_item(kind, split, number).document.text for split in SPLITS for number in range(5)]
        assert len(set(texts)) > 12


def test_documents_are_exported(tmp_path):
    path = export(make_suite("test", DOCUMENT_TASKS, 1), tmp_path, pixels=60)
    samples, complaints = read_samples(path)
    assert not complaints and [sample.task for sample in samples] == list(DOCUMENT_TASKS)
    assert all(len(sample.images) == 1 and sample.images[0].is_file() for sample in samples)


def test_documents_are_asked_about():
    from mmaccel.programs.evaluate import ask_suite

    asked = ask_suite(DOCUMENT_TASKS, 2, pixels=60)
    assert [question.task for question in asked] == [task for task in DOCUMENT_TASKS for _ in range(2)]
    prompt = asked[0].load()
    assert [picture.size for picture in prompt.pictures] == [(60, 60)] and prompt.clip is None
    assert prompt.question == make_item("receipt", "test", 0).turns[0].question
