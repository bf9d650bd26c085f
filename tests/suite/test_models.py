"""The shipped models: they load with plain ``from_pretrained``, answer as measured, and fit the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import mmaccel
from mmaccel.suite import IMAGE_TASKS, is_right, make_item
from training.evaluate import answer, conversation

FOLDERS = sorted(path.parent for path in (Path(mmaccel.__file__).parent / "models").glob("*/config.json"))
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PER_TASK = 6

pytestmark = pytest.mark.skipif(not FOLDERS, reason="no model is shipped yet")


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def shipped(request):
    model = AutoModelForImageTextToText.from_pretrained(request.param, dtype=torch.float32).eval()
    return request.param, model, AutoProcessor.from_pretrained(request.param)


def test_weights_are_half_precision_and_small(shipped):
    folder, *_ = shipped
    assert AutoModelForImageTextToText.from_pretrained(folder).dtype == torch.float16
    assert sum(path.stat().st_size for path in folder.iterdir()) < 15e6


def test_answers_are_as_good_as_measured(shipped):
    """A fixed sample of the test split comes close to the recorded average, and far above a blank picture."""
    folder, model, processor = shipped
    record = json.loads((RESULTS / f"{folder.name}-quality.json").read_text())
    hits = {False: [], True: []}
    for task in IMAGE_TASKS:
        items = [make_item(task, "test", index) for index in range(PER_TASK)]
        for blank, found in hits.items():
            texts = answer(model, processor, items, blank=blank)
            found += [is_right(text, item.answer) for text, item in zip(texts, items, strict=True)]
    seeing, guessing = (100 * sum(found) / len(found) for found in (hits[False], hits[True]))
    assert seeing >= record["accuracy_percent"]["full"]["average"] - 12
    assert seeing >= guessing + 20


def test_generate_gives_the_same_answers(shipped):
    """``model.generate`` with the processor's inputs, one item at a time, says what the batched evaluation says."""
    _, model, processor = shipped
    items = [make_item(task, "test", 0) for task in ("colour", "count", "grounding", "turns")]
    for item in items:
        picture = Image.fromarray(item.pictures(model.config.vision_config.image_size)[0])
        text = processor.apply_chat_template(conversation(item), add_generation_prompt=True)
        inputs = processor(images=picture, text=text, return_tensors="pt")
        written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        assert [processor.batch_decode(written, skip_special_tokens=True)[0].strip()] == answer(
            model, processor, [item]
        )
