"""The shipped models: they load with plain library calls, answer as measured, and fit the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from tail import few
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmaccel.core.shipped_models import MODELS, located
from mmaccel.programs.evaluate import Row, evaluate
from mmaccel.suite import IMAGE_TASKS, VIDEO_TASKS, is_right, make_item
from training.evaluate import LONGEST_ANSWER, blanked, questions, sample_answers
from training.results import PAGES, renewed

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def recorded(folder: Path) -> dict:
    return json.loads((RESULTS / f"{folder.name}-quality.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=few(["mini-llava", "mini-llava-deep", "mini-qwen-vl"], ["mini-llava"]))
def shipped(request):
    """Folder, model, processor, and the model's answers to the sample questions."""
    folder = Path(located(request.param))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    return folder, model, processor, sample_answers(model, processor, "test")


def test_weights_are_half_precision_and_small(shipped):
    folder, *_ = shipped
    assert AutoModelForImageTextToText.from_pretrained(folder).dtype == torch.float16
    assert sum(path.stat().st_size for path in folder.iterdir()) < 15e6


def test_answers_are_those_of_the_measured_model(shipped):
    """The sample answers on record, all but a few that rounding on another machine may turn."""
    folder, *_, given = shipped
    record = recorded(folder)["sample_answers"]
    asked = {name.split("-")[1] for name in record}
    assert asked == {*IMAGE_TASKS, *(VIDEO_TASKS if folder.name == "mini-qwen-vl" else ())}
    assert given.keys() == record.keys()
    assert sum(given[name] == answer for name, answer in record.items()) >= 0.9 * len(record)


def test_pictures_matter(shipped):
    """On the sample the model is far better than the same model that is shown grey pictures."""
    _, model, processor, given = shipped
    asked = [question for question in questions(model, processor, "test", 3) if question.name in given]
    found = evaluate(model, processor, [*map(blanked, asked)], [Row("none")], max_new_tokens=LONGEST_ANSWER)
    blind = sum(answer.right for _, answers in found for answer in answers)
    seeing = sum(is_right(given[question.name], question.expected) for question in asked)
    assert len(asked) == len(given) and seeing > blind + 0.2 * len(asked)


def test_generate_gives_the_same_answers(shipped):
    """``model.generate`` with the processor's inputs, one item at a time, says what the evaluation says."""
    _, model, processor, given = shipped
    for task in ("colour", "count", "grounding"):
        item = make_item(task, "test", 0)
        picture = Image.fromarray(item.pictures(getattr(model.config.vision_config, "image_size", 224))[0])
        content = [{"type": "image"}, {"type": "text", "text": item.turns[0].question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(images=picture, text=text, return_tensors="pt")
        written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
        assert processor.batch_decode(written, skip_special_tokens=True)[0].strip() == given[item.name]


@pytest.fixture(scope="module")
def clip():
    open_clip = pytest.importorskip("open_clip", reason="mini-clip needs open_clip: pip install 'mmaccel[clip]'")
    folder = MODELS / "mini-clip"
    model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    return folder, model.eval(), preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")


@torch.inference_mode()
def test_the_tower_of_mini_clip_is_that_of_mini_llava(clip):
    """Same pictures through open_clip's preprocessing and through the processor of ``mini-llava``, same features."""
    from training.clip import tokens

    _, model, preprocess, _ = clip
    llava = AutoModelForImageTextToText.from_pretrained(MODELS / "mini-llava", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(MODELS / "mini-llava")
    pictures = [Image.fromarray(make_item("colour", "test", index).pictures(112)[0]) for index in range(2)]
    pixels = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    ours = torch.stack([preprocess(picture) for picture in pictures])
    torch.testing.assert_close(ours, pixels, atol=1e-4, rtol=0)
    tower = llava.model.vision_tower
    seen, got = tower(pixels), tokens(model, ours)
    torch.testing.assert_close(got[:, 0], seen.pooler_output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got, tower.post_layernorm(seen.last_hidden_state), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.encode_image(ours), got[:, 0] @ model.visual.proj, atol=1e-4, rtol=1e-4)


def test_mini_clip_is_small_and_finds_what_it_found(clip):
    from training.clip import quality

    folder, *_ = clip
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6
    record, found = recorded(folder)["quality_percent"], quality(folder, count=50)
    assert found.keys() == record.keys()
    assert all(found[name] >= record[name] - 12 for name in record)
    assert found["question to patch, AUC"] > 80


@torch.inference_mode()
def test_mini_clip_ranks_texts_of_a_picture(clip):
    """Used as the documentation of open_clip does it."""
    _, model, preprocess, tokenizer = clip
    item = make_item("grounding", "test", 0)
    name = item.turns[0].question.removeprefix("where is the ").removesuffix(" ?")
    colour, shape = name.split()
    absent = [f"a {other} {shape}" for other in ("red", "green", "blue", "yellow") if other != colour]
    absent = [text for text in absent if text[2:] not in {thing.name for thing in item.scenes[0].things}]
    image = model.encode_image(preprocess(Image.fromarray(item.pictures(112)[0]))[None], normalize=True)
    text = model.encode_text(tokenizer([f"a {name}", *absent]), normalize=True)
    assert (image @ text.T).argmax() == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_tables_are_those_of_the_results(page):
    """``python -m training.results`` would change nothing."""
    text = page.read_text(encoding="utf-8")
    assert renewed(text) == text
