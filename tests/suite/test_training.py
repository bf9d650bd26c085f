"""The training code: the tokenizer, the packing of many questions behind one picture, and checkpoints that go on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from mmaccel.suite import Dice, item_seed, make_item, render, sample_scene, vocabulary
from training.build import (
    ASSISTANT,
    END,
    PIXELS,
    TOKENS,
    build_llava_processor,
    build_qwen_processor,
    build_tokenizer,
    prefix,
    word_ids,
)
from training.data import IGNORED, Batches, Plan, choose, pack, visible
from training.train import STAGES, TRAINEES, QwenTrainee, Run, Trainee, progress


def test_words_survive_the_tokenizer():
    tokenizer = build_tokenizer()
    ids = word_ids()
    for word in vocabulary():
        assert tokenizer(word).input_ids == [ids[word]], word
        assert tokenizer.decode([ids[word]]) == word
    assert tokenizer.decode(tokenizer("0.25 K 4 red").input_ids) == "0.25 K 4 red"


def test_tokenizer_forgives_what_people_type():
    tokenizer = build_tokenizer()
    assert tokenizer("What color is the Circle?").input_ids == tokenizer("what colour is the circle ?").input_ids
    assert tokenizer("a").input_ids != tokenizer("A").input_ids
    assert tokenizer.unk_token_id in tokenizer("zebra").input_ids


def test_packed_questions_are_the_conversations_that_the_processor_makes():
    """Every packed block gives the losses of the model's own forward on the same single-turn or multi-turn chat."""
    torch.manual_seed(0)
    trainee, processor, words = Trainee().eval(), build_llava_processor(), word_ids()
    dice = Dice(item_seed("val", 3))
    scene = sample_scene(dice)
    turns, picture = choose(scene, dice, 4), render(scene, PIXELS)
    packed = pack([turns, turns], prefix("mini-llava", [TOKENS]), [False, True], words)
    pixels = processor.image_processor(images=Image.fromarray(picture), return_tensors="pt")["pixel_values"]
    inner = trainee.model.model
    visual = inner.multi_modal_projector(inner.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:])
    embeds = inner.language_model.embed_tokens(packed["ids"]).clone()
    embeds[:, 2 : 2 + visual.shape[1]] = visual
    hidden = inner.language_model(
        inputs_embeds=embeds, attention_mask=visible(packed["turn"]), position_ids=packed["positions"], use_cache=False
    ).last_hidden_state
    logits = trainee.model.lm_head(hidden)

    def chat(asked):
        messages = []
        for number, turn in enumerate(asked):
            picture_part = [{"type": "image"}] if not number else []
            messages.append({"role": "user", "content": [*picture_part, {"type": "text", "text": turn.question}]})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
        text = processor.apply_chat_template(messages)
        inputs = processor(images=Image.fromarray(picture), text=text, return_tensors="pt")
        return inputs["input_ids"][0], trainee.model(**inputs).logits[0]

    ids, whole = chat(turns)
    length = (packed["turn"][1] >= 0).sum()
    assert torch.equal(ids, packed["ids"][1, :length])
    torch.testing.assert_close(logits[1, :length], whole, atol=2e-4, rtol=1e-3)
    for number, turn in enumerate(turns, 1):
        ids, alone = chat([turn])
        block = packed["turn"][0] == number
        assert torch.equal(ids[-block.sum() :], packed["ids"][0, block])
        torch.testing.assert_close(logits[0, block], alone[-block.sum() :], atol=2e-4, rtol=1e-3)
    answers = packed["labels"][0][packed["labels"][0] != IGNORED].tolist()
    assert answers.count(END) == len(turns) == packed["ids"][0].tolist().count(ASSISTANT)


def test_packed_clips_have_the_positions_of_the_model():
    """A packed question about a clip gives the logits of the model's own forward with the processor's inputs."""
    torch.manual_seed(0)
    trainee, processor, words = QwenTrainee().eval(), build_qwen_processor(), word_ids()
    plan = replace(STAGES["mini-qwen-vl"]["watch"], clips=1.0, batch=4)
    batch = Batches(plan, 0).batch(0, words) | {"step": torch.tensor(0.5)}
    sight = trainee.look(batch)
    embeds = trainee.model.model.language_model.embed_tokens(batch["ids"])
    video = batch["ids"] == trainee.model.config.video_token_id
    hidden = trainee.model.model.language_model(
        inputs_embeds=embeds.masked_scatter(video[..., None], sight.visual),
        attention_mask=visible(batch["turn"]),
        position_ids=trainee.positions(batch),
        use_cache=False,
    ).last_hidden_state
    first = batch["turn"][0] <= 1
    first &= batch["turn"][0] >= 0
    ids = batch["ids"][0, first]
    question = processor.tokenizer.decode(ids[~video[0, first]][4:]).split("<|assistant|>")[0]
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    inputs = processor(
        text=[processor.apply_chat_template(messages, add_generation_prompt=True)],
        videos=[batch["pixels"][0]],
        video_metadata=[{"fps": 4.0, "total_num_frames": batch["pixels"].shape[1]}],
        return_tensors="pt",
    )
    length = inputs["input_ids"].shape[1]
    assert torch.equal(inputs["input_ids"][0], ids[:length])
    whole = trainee.model(**inputs).logits[0]
    torch.testing.assert_close(trainee.model.lm_head(hidden[0, first])[:length], whole, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(("model", "stage"), [(model, stage) for model in STAGES for stage in STAGES[model]])
def test_batches_of_every_stage_give_a_loss(model, stage):
    torch.manual_seed(0)
    plan = replace(STAGES[model][stage], batch=4, pairs=float(stage == "compare"), clips=float(stage == "watch"))
    loss, scores = TRAINEES[model]()(Batches(plan, 0).batch(0, word_ids()))
    loss.backward()
    assert torch.isfinite(loss) and 0 <= progress(stage, scores) <= 1


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES["mini-llava"], "see", Plan(batch=2))
    Run("mini-llava", tmp_path, 1e-3, 1 / 3600).train()
    done = (
        json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
        if (tmp_path / "log.jsonl").stat().st_size
        else {}
    )
    again = Run("mini-llava", tmp_path, 1e-3, 2 / 3600)
    assert again.state["step"] >= max(1, done.get("step", 1)) and again.state["seen"] == 2 * again.state["step"]
    steps = again.state["step"]
    again.train()
    assert again.state["step"] > steps and again.checkpoint.exists()


def test_training_and_test_scenes_differ():
    trained = {sample_scene(Dice(item_seed("train", index, stream=255))) for index in range(100)}
    assert not trained & {make_item("colour", "test", index).scenes[0] for index in range(100)}
