"""The training code: the tokenizer, the packing of many questions behind one picture, and checkpoints that go on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tail import few
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from mmaccel.suite import Rng, item_seed, make_item, render, sample_scene, vocabulary
from mmaccel.suite.clip import CLIP_TASKS
from mmaccel.suite.questions import Turn
from mmaccel.suite.scene import COLOURS, SHAPES
from training.build import (
    ASSISTANT,
    BUILDERS,
    END,
    GRID,
    PIXELS,
    build_llava,
    build_llava_processor,
    build_qwen_processor,
    build_tokenizer,
    prefix,
    word_ids,
)
from training.captions import (
    caption,
    cells,
    meaning,
    means_cell,
    means_picture,
    padded,
    scene_at,
    text_about,
    things,
)
from training.curves import draw
from training.data import CLIP_SHARES, IGNORED, TASKS, Batches, Plan, choose, pack, visible
from training.train import (
    LOOKING_BACK,
    POINTING_LAYERS,
    STAGES,
    TRAINEES,
    Probes,
    QwenTrainee,
    Run,
    Trainee,
    appearances,
    middles,
    progress,
)


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
    rng = Rng(item_seed("val", 3))
    scene = sample_scene(rng)
    turns, picture = choose(scene, rng, 4), render(scene, PIXELS)
    packed = pack([turns, turns], prefix("mini-llava", [GRID**2]), [False, True], words)
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


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "stage"),
    few(
        [(model, stage) for model in STAGES for stage in STAGES[model]],
        [("mini-llava", "see"), ("mini-llava", "compare"), ("mini-qwen-vl", "watch")],
    ),
)
def test_batches_of_every_stage_give_a_loss(model, stage):
    torch.manual_seed(0)
    plan = replace(STAGES[model][stage], batch=4, pairs=float(stage == "compare"), clips=float(stage == "watch"))
    loss, scores = TRAINEES[model]()(Batches(plan, 0).batch(0, word_ids()))
    loss.backward()
    assert torch.isfinite(loss) and 0 <= progress(stage, scores) <= 1


def test_questions_point_at_what_they_name():
    """Nouns, and the place where the answer begins, mean the cells of their things; questions without a noun mean none."""
    words, ids = word_ids(), prefix("mini-llava", [4])
    turns = [
        Turn("colour", "what colour is the star ?", "red"),
        Turn("description", "describe the picture .", "red star"),  # after an answer nothing is named any more
        Turn("relation", "is the red star above the blue object ?", "yes"),
    ]
    star, cross = 1 + SHAPES.index("star"), 1 + SHAPES.index("cross")
    red, blue = 1 + COLOURS.index("red"), 1 + COLOURS.index("blue")
    cells = {"shape": [star, cross, star, 0], "colour": [red, blue, blue, 0]}
    batch = {name: torch.tensor(row).expand(2, 1, 4).view(2, 1, 2, 2) for name, row in cells.items()}
    batch |= pack([turns, turns], ids, [False, True], words)
    naming, meant = Trainee().named(batch)
    for row in range(2):
        found = [(place, where.tolist()) for place, where in enumerate(meant[row]) if naming[row, place] or where.any()]
        at = [
            place
            for place, number in enumerate(batch["ids"][row].tolist())
            if number in (words["star"], words["object"])
        ]
        opens = [place for place, number in enumerate(batch["ids"][row].tolist()) if number == ASSISTANT]
        stars, blues = [True, False, True, False], [False, True, True, False]
        red_star = [True, False, False, False]
        expected = {
            at[0]: stars,
            opens[0]: red_star,
            at[2]: red_star,
            at[3]: blues,
            opens[2]: blues,
        }  # at[1] is an answer
        assert found == sorted(expected.items())


def test_pointing_is_measured_on_the_heads_that_answer():
    torch.manual_seed(0)
    trainee = Trainee().eval()
    batch = Batches(replace(STAGES["mini-llava"]["ask"], batch=2, pairs=0), 0).batch(0, word_ids())
    with torch.no_grad():
        trainee(batch)
        places = batch["ids"] == trainee.model.config.image_token_id
        naming, meant = trainee.named(batch)
        loss, shares = 0.0, []
        for layer, opens in POINTING_LAYERS.items():
            logits = trainee.model.model.language_model.layers[layer].self_attn.watched[:, 0]
            chosen = (~naming if opens else naming) & meant.any(2)
            seen = torch.stack([logits[r, p][places[r]].softmax(0)[meant[r, p]].sum() for r, p in chosen.nonzero()])
            loss, shares = loss - seen.log().mean(), [*shares, seen.mean()]
        measured, share = trainee.pointing(batch, places)
    torch.testing.assert_close(measured, loss, atol=1e-4, rtol=1e-4)
    assert share == pytest.approx(float(sum(shares)) / len(shares), abs=1e-4)


def test_cells_of_a_clip_look_one_step_back():
    """The loss is the mean surprise at the same cell of the step before, among all cells up to the own one."""
    torch.manual_seed(0)
    trainee = QwenTrainee().eval()
    plan = replace(STAGES["mini-qwen-vl"]["watch"], clips=1.0, batch=2)
    batch = Batches(plan, 0).batch(0, word_ids())
    with torch.no_grad():
        trainee(batch)
        places = batch["ids"] == trainee.model.config.video_token_id
        loss = trainee.looking_back(batch, places)
        logits = trainee.model.model.language_model.layers[LOOKING_BACK].self_attn.watched[0, -1].float()
    cells, at = batch["shape"].shape[-1] ** 2, places[0].nonzero()[:, 0].tolist()
    each = [
        -logits[own, at[: number + 1]].log_softmax(0)[number - cells]
        for number, own in enumerate(at)
        if number >= cells
    ]
    torch.testing.assert_close(loss, torch.stack(each).mean(), atol=1e-3, rtol=1e-3)


def test_boxes_are_told_from_the_states_of_visual_tokens():
    torch.manual_seed(0)
    probes = Probes(8, 16)
    batch = {"shape": torch.tensor([[[[0, 3], [0, 3]]]]), "box": torch.zeros(1, 1, 2, 2, 4)}
    batch["box"][..., 1, :] = torch.tensor([0.5, 0.1, 0.9, 0.8])
    hidden = torch.randn(1, 4, 16)
    told = probes.place(hidden)[0, [1, 3]]
    expected = (told - torch.tensor([0.5, 0.1, 0.9, 0.8])).abs().mean()
    torch.testing.assert_close(probes.placed(hidden, batch), expected)
    torch.testing.assert_close(middles(2)[0, 1], torch.tensor([0.75, 0.25, 0.75, 0.25]))


def test_what_was_there_before_is_told_from_the_second_step_on():
    torch.manual_seed(0)
    probes = Probes(8, 16)
    batch = {name: torch.randint(0, 3, (2, 3, 2, 2)) for name in ("shape", "colour")}
    hidden = torch.randn(2, 12, 16)
    told, shapes, each = probes.before(hidden), probes.sizes["shape"], []
    for row in range(2):
        for place in range(4, 12):
            step, cell = divmod(place - 4, 4)
            labels = [int(batch[name][row, step].flatten()[cell]) for name in ("shape", "colour")]
            parts = told[row, place, :shapes], told[row, place, shapes:]
            each.append([-part.log_softmax(0)[label] for part, label in zip(parts, labels, strict=True)])
    expected = torch.tensor([[float(part) for part in pair] for pair in each]).mean(0).sum()
    torch.testing.assert_close(probes.remembered(hidden, batch), expected)


def test_the_last_appearance_in_a_clip_holds_the_count():
    """What the probe is told of the cells that the answer is to look at is the answer."""
    plan = replace(STAGES["mini-qwen-vl"]["watch"], clips=1.0, batch=16, pixels=(112,))
    number, trainee, answers = TASKS.index("occurrences"), QwenTrainee(), set()
    digits = {number: int(word) for word, number in word_ids().items() if word.isdigit() and len(word) == 1}
    for start in range(16):
        batch = Batches(plan, start).batch(16 * start, word_ids())
        often, (_, meant) = appearances(batch), trainee.named(batch)
        for row, place in ((batch["ids"] == ASSISTANT) & (batch["task"] == number)).nonzero().tolist():
            answer = digits[int(batch["labels"][row, place])]
            assert set(often[row, meant[row, place]].tolist()) == {answer}
            answers.add(answer)
    assert answers == {1, 2, 3, 4}
    assert set(CLIP_SHARES) == set(CLIP_TASKS)


def test_how_often_is_told_of_the_cells_that_show_something():
    """Every count weighs the same, however rare; the ground says nothing."""
    torch.manual_seed(0)
    probes = Probes(8, 16)
    shape = torch.tensor([1, 1, 1, 0, 1, 2]).view(1, 6, 1, 1)  # shown, gone, shown, another in its place
    batch = {"shape": shape, "colour": torch.where(shape > 0, 3, 0)}
    assert appearances(batch).tolist() == [[1, 1, 1, 1, 2, 3]]
    hidden = torch.randn(1, 6, 16)
    surprise = -probes.tally(hidden)[0].log_softmax(-1)
    expected = (surprise[:3, 1].mean() + surprise[4, 2] + surprise[5, 3]) / 3
    right = (surprise.argmin(-1) == torch.tensor([1, 1, 1, 1, 2, 3])).float()
    loss, share = probes.counted(hidden, batch)
    torch.testing.assert_close(loss, expected)
    assert share == pytest.approx(float(right[:3].mean() + right[4] + right[5]) / 3)


def test_curves_of_clips_are_drawn_where_there_are_any(tmp_path):
    log, sizes = [{"seen": 1, "stage": "ask", "loss": 2.0, "first colour": 0.5}], []
    for line in ({"seen": 2, "stage": "ask"}, {"seen": 3, "stage": "watch", "first order": 0.4}):
        log.append({**log[0], **line})
        (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
        draw(tmp_path / "log.jsonl", tmp_path / "curves.png")
        with Image.open(tmp_path / "curves.png") as drawn:
            sizes.append(drawn.height)
    assert sizes == [720, 1170]


def test_a_deep_model_begins_as_the_one_it_grows_from(tmp_path):
    torch.manual_seed(0)
    BUILDERS["mini-llava"][0]().save_pretrained(tmp_path / "small")
    run = Run("mini-llava-deep", tmp_path / "deep", 1e-3, 1.0, start=tmp_path / "small")
    small, deep = AutoModelForImageTextToText.from_pretrained(tmp_path / "small"), run.trainee.model
    ids = torch.randint(7, 150, (2, 12))
    with torch.no_grad():
        was, now = (model.eval().model.language_model(input_ids=ids) for model in (small, deep))
        torch.testing.assert_close(now.last_hidden_state, was.last_hidden_state, atol=1e-5, rtol=1e-4)
        grids = [
            model.model.vision_tower.embeddings.position_embedding.weight[1:].T.unflatten(1, (side, side))
            for model, side in ((small, 14), (deep, 20))
        ]
    # a place of the larger grid is like the same place of the smaller one
    at = (torch.arange(20) + 0.5) / 20 * 14
    alike = functional.cosine_similarity(grids[1], grids[0][:, at.long()][:, :, at.long()], dim=0)
    assert len(deep.model.language_model.layers) == 12 and alike.mean() > 0.9
    assert run.trainee.attention(2) is deep.model.language_model.layers[5].self_attn


@pytest.mark.full
def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(STAGES["mini-llava"], "see", Plan(batch=2))
    Run("mini-llava", tmp_path, 1e-3, 1 / 3600).train()
    done = (
        json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
        if (tmp_path / "log.jsonl").stat().st_size
        else {}
    )
    again = Run("mini-llava", tmp_path, 1e-3, 6 / 3600)
    assert again.state["step"] >= max(1, done.get("step", 1)) and again.state["seen"] == 2 * again.state["step"]
    steps = again.state["step"]
    again.train()
    assert again.state["step"] > steps and again.checkpoint.exists()


def test_training_and_test_scenes_differ():
    trained = {sample_scene(Rng(item_seed("train", index, stream=255))) for index in range(100)}
    assert not trained & {make_item("colour", "test", index).scenes[0] for index in range(100)}


def test_what_a_text_names():
    red, star, sign, seven = 1, 5, 7, 8
    assert meaning("7 on a red star , a sign") == [(star, red, seven), (sign, 0, 0)]
    assert meaning("K 7 on a sign , the character 7") == [(sign, 0, 16), (sign, 0, seven), (0, 0, seven)]
    assert meaning("how many stars are there ?") == [(star, 0, 0)]
    assert meaning("what shape is the red object ?") == [(0, red, 0)]
    assert meaning("how many objects are there ?") == []


def test_texts_belong_to_their_scenes():
    """Captions and questions hold for the scene they are about; a caption is no other scene's."""
    scenes = [scene_at("val", index) for index in range(40)]
    held = padded([things(scene) for scene in scenes])
    whole = padded([meaning(caption(scene)) for scene in scenes])
    fits = means_picture(whole, held)
    assert fits.diagonal().all() and fits.float().mean() < 0.05
    for row, scene in enumerate(scenes):
        texts = [text_about(scene, Rng(number)) for number in range(20)]
        there = means_picture(padded([meaning(text) for text in texts]), held)[:, row]
        # only what a question asks in vain is missing
        assert all(yes or text.startswith(("is there", "how many")) for yes, text in zip(there, texts, strict=True))
        assert there.float().mean() > 0.5
    nothing = padded([[]])
    assert not means_picture(nothing, held).any() and not means_cell(nothing, held[0]).any()


def test_cells_that_a_text_means():
    scene = next(scene for scene in (scene_at("val", index) for index in range(40)) if scene.sign and scene.unique())
    labels = torch.from_numpy(cells(scene, 14))
    thing = scene.unique()[0]
    texts = padded(
        [meaning(f"a {thing.name}"), meaning("what does the sign say ?"), meaning(f"a {thing.name} , a sign")]
    )
    one, sign, both = means_cell(texts, labels)
    assert one.any() and sign.any() and not (one & sign).any()
    assert torch.equal(both, one | sign)
    assert torch.equal(one, (labels[:, 0] == meaning(thing.name)[0][0]) & (labels[:, 1] == meaning(thing.name)[0][1]))


@pytest.fixture
def clip(monkeypatch):
    """The module that trains ``mini-clip``, with small chunks of pictures."""
    pytest.importorskip("open_clip", reason="mini-clip needs open_clip: pip install 'mmaccel[clip]'")
    from training import clip

    monkeypatch.setattr(clip, "CHUNK", 50)
    return clip


def tower(seed):
    """The tower with noise on all weights, norms and biases too, which otherwise all begin alike."""
    torch.manual_seed(seed)
    vision = build_llava().model.vision_tower.eval()
    with torch.no_grad():
        for weight in vision.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return vision


def test_the_contrastive_loss_shares_its_target_among_all_positives(clip):
    logits = torch.tensor([[2.0, 0.0, 1.0], [5.0, 1.0, 0.0]])
    positive = torch.tensor([[True, False, True], [False, False, False]])
    each = logits[0].log_softmax(0)
    torch.testing.assert_close(clip.matched(logits, positive), -(each[0] + each[2]) / 2)


@torch.inference_mode()
def test_open_clip_gives_the_features_of_the_tower(clip, tmp_path):
    """Of any CLIPVisionModel, before and after it went through half precision and a folder."""
    import open_clip

    vision, pixels = tower(0), clip.pixels_of(range(2), "val")
    want = vision(pixels)
    model = clip.build_clip(vision).eval()
    got = clip.tokens(model, pixels)
    torch.testing.assert_close(got, vision.post_layernorm(want.last_hidden_state), atol=1e-5, rtol=1e-5)
    assert {name for name, weight in model.visual.named_parameters() if weight.requires_grad} == {"proj"}
    clip.export(model, vision, tmp_path)
    again, _ = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    torch.testing.assert_close(clip.tokens(again, pixels), got, atol=2e-2, rtol=0)
    ids = open_clip.get_tokenizer(f"local-dir:{tmp_path}")(["a red star", " ".join(["star"] * 100)])
    assert ids.shape == (2, clip.CONTEXT) and ids.argmax(1).tolist() == [4, clip.CONTEXT - 1]
    words = word_ids()
    assert ids[0, 1:4].tolist() == [words[word] for word in ("a", "red", "star")]


@pytest.mark.full
def test_a_clip_run_goes_on_and_begins_anew_with_another_tower(clip, tmp_path):
    options = {"rate": 2e-3, "pictures": 50, "batch": 16}
    first = clip.Run(tower(0), tmp_path, minutes=1 / 60, **options)
    first.train()
    steps = first.state["step"]
    chunks = {path: path.stat().st_mtime_ns for path in first.work.glob("0*.pt")}
    assert steps > 0 and len(chunks) == 1 and first.seen["cells"].shape[:2] == (50, clip.CELLS)
    again = clip.Run(tower(0), tmp_path, minutes=2 / 60, **options)
    assert again.state["step"] == steps and torch.equal(again.model.text_projection, first.model.text_projection)
    again.train()
    assert again.state["step"] > steps and not torch.equal(again.model.text_projection, first.model.text_projection)
    assert chunks == {path: path.stat().st_mtime_ns for path in first.work.glob("0*.pt")}
    other = clip.Run(tower(1), tmp_path, minutes=0, **options)
    assert other.state["step"] == 0 and other.work != first.work
    assert not torch.equal(other.seen["cls"], first.seen["cls"])


def test_chosen_cells_show_characters_things_and_ground(clip):
    for index in range(20):
        labels = cells(scene_at("val", index), 14)
        chosen = clip.choose_cells(labels, index)
        assert len(set(chosen.tolist())) == clip.CELLS
        shown = labels[chosen]
        assert (shown[:, 0] == 0).sum() >= 8
        assert (shown[:, 2] > 0).sum() >= min(6, (labels[:, 2] > 0).sum())


def test_auc_counts_ties_as_half(clip):
    score = torch.tensor([3.0, 1.0, 2.0, 2.0])
    assert clip.auc(score, torch.tensor([True, False, False, False])) == 1.0
    assert clip.auc(score, torch.tensor([False, False, True, False])) == 0.5
