"""Selectors: what the training reads is what the model reads in use, what it learns, how it goes on, and what is refused."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import random_selectors
import torch
import zoo
from PIL import Image
from tail import few
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmaccel import Learned, MmaccelError, UnsupportedError, accelerate_vlm, accelerated, get_recipe, prepare
from mmaccel.cli import main
from mmaccel.core.shipped_models import located
from mmaccel.families import families, family_of
from mmaccel.integrations.vllm.architectures import ARCHITECTURES
from mmaccel.integrations.vllm.plan import ServingPlan
from mmaccel.integrations.vllm.settings import Settings
from mmaccel.media.files import Clip, Prompt
from mmaccel.method import TokenBatch
from mmaccel.method.selector import CONFIG, FOLDER, WEIGHTS, ModelFingerprint, Selector, Shape, described
from mmaccel.programs.distil import learner, training
from mmaccel.programs.distil.examples import Example, Frozen, Target
from mmaccel.programs.distil.learner import Choice, TrialLearner
from mmaccel.programs.distil.training import FEWEST, distil
from mmaccel.programs.evaluate import Question, ask_folder, ask_samples, ask_suite, batches, inputs_of
from mmaccel.recipe import Recipe
from mmaccel.runtime.call.vision_output import VisionOutput
from mmaccel.runtime.tower.taps import Taps
from mmaccel.suite import Sample


def questions(count: int, video: bool = False) -> list[Question]:
    """Questions of different lengths, about a picture or a clip each."""

    def prompt(number: int) -> Prompt:
        text = "what is it ?" + " and why is it there ?" * (number % 3)
        if video:
            return Prompt(text, clip=Clip(zoo.clip(8, 96, 64, number), list(range(8)), 8, 2.0))
        return Prompt(text, (zoo.image(80, 60, number),))

    return [Question(f"q{i}", "all", None, lambda i=i: prompt(i)) for i in range(count)]


def example_of(family: str, video: bool = False, target: Target = "effect") -> tuple[Frozen, Example]:
    frozen = Frozen(zoo.model(family), zoo.processor(family), target)
    (batch,) = batches(questions(3, video), 3)
    return frozen, frozen.example(batch, 5)


# ------------------------------------------------------------------------------- what is trained is what is used
REFUSED = [name for name, kind in families().items() if (kind.stateful or kind.masks_above) and name in zoo.FAMILIES]
CASES = [
    (family, video)
    for family in zoo.FAMILIES
    for video in (False, True)
    # the processor of GOT-OCR2 writes 256 tokens a picture, the small model of the tests reads 16
    if family not in (*REFUSED, "got_ocr2") and ("video" in zoo.kinds(family) or not video)
]


@pytest.mark.parametrize("family", REFUSED)
def test_layers_with_a_state_and_pictures_that_attend_both_ways_are_refused(family, tmp_path):
    with pytest.raises(MmaccelError, match=f"No selector is trained for {family}"):
        distil(zoo.model(family), zoo.processor(family), questions(3), out=tmp_path)


@pytest.mark.parametrize(("family", "video"), few(CASES, [("llava", False), ("qwen2_5_vl", True), ("qwen3_vl", False)]))
def test_the_training_reads_what_the_model_reads(family, video, tmp_path):
    """All tokens: the states behind its answers. A tenth: those of the accelerated model, which picks the same tokens."""
    frozen, example = example_of(family, video)
    model = frozen.model
    with torch.no_grad():
        torch.testing.assert_close(frozen.states(example, example.read), example.states, rtol=1e-4, atol=1e-4)
        fingerprint, folder = ModelFingerprint.of(family_of(model)), str(tmp_path)
        random_selectors.network(fingerprint.width, residual=True).save(folder, fingerprint, {})
        choice = Choice.of(example, 0.3)
        scores, residual = choice.outputs(Selector.load(folder))
        read = example.narrowed(choice.by(scores), residual)
        small = frozen.states(example, read)
        assert int(read.visual.sum()) == int(choice.count.sum()) < int(example.read.visual.sum())
        seen: list[tuple[TokenBatch, torch.Tensor]] = []
        watching = Selector.load(folder).register_forward_pre_hook(lambda _, args: seen.append(args))
        (batch,) = batches(questions(3, video), 3)
        given = {}
        note = frozen.text.register_forward_hook(
            lambda module, args, kwargs, out: given.update(states=out.last_hidden_state), with_kwargs=True
        )
        inputs = inputs_of(model, frozen.processor, batch)
        with accelerated(model, Learned(folder), retain=0.3, processor=frozen.processor):
            model(**inputs)
        watching.remove()
        note.remove()
    # the first token of the answer; the rest is what law 2 is about
    torch.testing.assert_close(small[:, 0], given["states"][:, -1], rtol=1e-4, atol=1e-4)
    mine, (theirs, worth) = choice.shown, seen[0]
    assert torch.equal(mine.features, theirs.features) and torch.equal(mine.cells, theirs.cells)
    assert torch.equal(mine.grid, theirs.grid) and torch.equal(choice.worth, worth)
    # padding may stand on either side
    assert torch.equal(mine.question_valid.sum(1), theirs.question_valid.sum(1))
    assert torch.equal(mine.question[mine.question_valid], theirs.question[theirs.question_valid])
    torch.testing.assert_close(
        Selector.load(folder)(theirs, worth)[0][mine.valid], scores[mine.valid], rtol=1e-4, atol=1e-5
    )


def test_attention_is_what_question_and_answer_pay():
    frozen, example = example_of("llava", target="attention")
    assert example.signals.shape == (3, frozen.family.depth, example.places.shape[1])
    frozen.text.set_attn_implementation("eager")
    read = example.read
    with torch.no_grad():
        out = frozen.text(
            inputs_embeds=read.embeds,
            attention_mask=read.real_token.long(),
            position_ids=read.positions,
            output_attentions=True,
            use_cache=False,
        )
    row, length = 1, int(example.lengths[1])
    asking = read.asked[row].clone()
    asking[example.start : example.start + length] = True
    paid = out.attentions[2][row][:, asking].mean(1).amax(0)[example.places[row]]
    torch.testing.assert_close(example.signals[row, 2], paid, rtol=1e-4, atol=1e-6)


def test_the_effect_of_a_token_is_what_dimming_it_moves():
    """Against differences, of the answer's probability, one token at a time."""
    frozen, example = example_of("llava")
    row, length = 2, int(example.lengths[2])
    tokens = example.tokens[row, :length]

    def probability(slot: int, weight: float) -> float:
        gates = torch.where(example.read.visual, 0.1, 1.0)
        gates[row, example.places[row, slot]] *= weight
        said = frozen.logits(frozen.states(example, example.read, gates.log())).log_softmax(-1)
        return float(said[row, :length].gather(-1, tokens[:, None]).sum())

    with torch.no_grad():
        for slot in (0, 7, 13):
            slope = (probability(slot, 1.01) - probability(slot, 0.99)) / 0.02
            assert float(example.signals[row, 0, slot]) == pytest.approx(abs(slope), rel=0.05, abs=2e-3)
    assert all(weight.requires_grad for weight in frozen.model.parameters())


# ------------------------------------------------------------------------------------------------------ the training
#: questions of a training that takes a second: two batches to train on, one question to watch and one that is held out
FEW = 8


@pytest.fixture
def trained(tmp_path, monkeypatch):
    model, processor = zoo.model("llava"), zoo.processor("llava")
    options = {"steps": 3, "batch_size": 3, "max_new_tokens": 4, "retain": 0.2}
    monkeypatch.setattr(training, "FEWEST", FEW)

    def train(name: str = "selector", **changes):
        return distil(model, processor, questions(FEW), out=tmp_path / name, **{**options, **changes})

    return model, train


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize("target", ["answers", "effect"])
def test_a_selector_is_trained_and_used_and_goes_on_where_it_was(trained, monkeypatch, target):
    model, train = trained
    train = functools.partial(train, target=target)
    monkeypatch.setattr(learner, "_LOOK", 2)
    whole = train()
    assert described(whole.folder)[0] == Shape(64, 24, 2, 4, True, target == "answers")
    assert {row["recipe"] for row in whole.report["held out"]} == {"learned", "balanced", "divprune"}
    assert [line["step"] for line in whole.log] == [0, 2, 3]
    for file in ("report.json", "report.png", CONFIG):
        assert (whole.folder / file).stat().st_size > 200
    with accelerated(model, Learned(whole.folder), retain=0.2):
        model(**zoo.inputs("llava", "image"))
        stats = model.mmaccel.stats()
    assert stats.visual_tokens_kept == round(0.2 * stats.visual_tokens)
    # interrupted in the second step, and started again: nothing is read twice, and the same is learned
    work = whole.folder.parent / "broken" / "work"
    shutil.copytree(whole.folder / "work", work)
    (work / "state.pt").unlink()
    step = learner.Learner._step

    def breaks(self):
        if self.state.step == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(learner.Learner, "_step", breaks)
    monkeypatch.setattr(Frozen, "example", None)
    with pytest.raises(KeyboardInterrupt):
        train("broken")
    assert (work / "state.pt").exists() and not (work.parent / WEIGHTS).exists()
    monkeypatch.setattr(learner.Learner, "_step", step)
    assert weights(train("broken").folder) == weights(whole.folder)
    assert train("broken").report["steps of earlier runs"] == 3
    with pytest.raises(MmaccelError, match=r"state.pt' belongs to a run with different settings \(retain\); delete it"):
        train("broken", retain=0.3)
    with pytest.raises(
        MmaccelError, match=r"settings.json' .* different settings \(longest answer\); delete the folder"
    ):
        train("broken", max_new_tokens=5)
    # as an mmaccel wrote it that noted other things
    held = (work / "state.pt").read_bytes()[32:]
    noted = torch.load(io.BytesIO(held), weights_only=True)
    del noted["settings"]["form of its state"], noted["state"]["recent"]
    content = io.BytesIO()
    torch.save(noted, content)
    (work / "state.pt").write_bytes(hashlib.sha256(content.getvalue()).digest() + content.getvalue())
    with pytest.raises(MmaccelError, match=r"different settings \(form of its state\); delete it, or give another"):
        train("broken")


def test_tokens_without_which_answers_change_are_picked_after_trying(trained, monkeypatch, tmp_path):
    """Of every picture the same two tokens keep the answer; told apart by their places, they come to be picked first."""
    _, train = trained
    folder = train(steps=1).folder
    example = Example.load(next((folder / "work" / "training").glob("00000-*.pt")))
    needed = (3, 12)

    def answered(self, example, kept, residual=None):
        lost = 2.0 - kept[:, needed].sum(1).double()
        return lost, lost > 0

    monkeypatch.setattr(TrialLearner, "answered", answered)
    frozen = Frozen(zoo.model("llava"), zoo.processor("llava"), "answers")
    paths = sorted((folder / "work" / "training").glob("*.pt"))
    shape = Shape(64, 32, 2, 4, True)
    tried = TrialLearner(frozen, shape, paths, [example], 0.2, 200, tmp_path / "state.pt")
    choice = Choice.of(example, 0.2)
    assert not choice.by(choice.outputs(tried.mean)[0])[:, needed].all()
    tried.run(None, lambda what, done, of: None)
    assert choice.by(choice.outputs(tried.mean)[0])[:, needed].all()
    assert tried.state.log[-1]["watched"] < tried.state.log[0]["watched"]


def test_tries_are_moved_in_pairs_to_opposite_sides(trained, monkeypatch, tmp_path):
    _, train = trained
    folder = train(steps=1).folder
    paths = sorted((folder / "work" / "training").glob("*.pt"))
    example, by, seen = Example.load(paths[0]), Choice.by, []
    frozen = Frozen(zoo.model("llava"), zoo.processor("llava"), "answers")
    tried = TrialLearner(frozen, Shape(64, 32, 2, 4, True, True), paths, [example], 0.2, 200, tmp_path / "state.pt")
    monkeypatch.setattr(Choice, "by", lambda self, scores: seen.append(scores) or by(self, scores))
    tried._loss(example)
    # of a network that has learned nothing all scores are equal
    assert len(seen) == 8 and all(
        torch.equal(up, -down) and up.abs().max() > 0 for up, down in zip(seen[::2], seen[1::2], strict=True)
    )
    assert not torch.equal(seen[0], seen[2])


def test_the_best_network_is_told_by_several_looks(trained, monkeypatch, tmp_path):
    """One lucky look at step 100 is not the best of them; what stays good from step 600 on is, and later ones as good."""
    _, train = trained
    paths = sorted((train(steps=1).folder / "work" / "training").glob("*.pt"))
    frozen = Frozen(zoo.model("llava"), zoo.processor("llava"), "answers")
    shape = Shape(64, 32, 2, 4, True, True)
    tried = TrialLearner(frozen, shape, paths, [Example.load(paths[0])], 0.2, 9000, tmp_path / "state.pt")
    # two questions, of which one is later answered a little worse and the other as much better or less
    looks = [(5.0, 5.0), (2.0, 2.0), *[(5.0, 5.0)] * 4, *[(3.0, 3.0)] * 10, *[(3.2, 2.9)] * 10, *[(3.2, 3.1)] * 60]
    monkeypatch.setattr(tried, "_watched", lambda: torch.tensor(looks[tried.state.step // 100]))
    monkeypatch.setattr(tried, "lost", lambda told: (0.0, 0.0))
    kept = []
    while not tried.state.ended:
        with torch.no_grad():
            tried.mean.module.score.weight.fill_(tried.state.step)
        tried._evaluate([])
        kept.append(int(tried.best["score.weight"][0, 0]))
        tried.state.step += 100
    # half of all steps without one as good
    assert (tried.state.since, tried.state.least) == (2600, [3.0, 3.0]) and tried.state.log[-1]["step"] == 7100
    # one lucky look is passed over; of those that differ from the best by no more than the questions do, the newest is kept
    assert kept[9:11] == [900, 1000] and kept[-1] == 2600


# ---------------------------------------------------------------------------------------------- what is gone on with
def files_of(work: Path) -> dict[str, Path]:
    """The files of a training's state, by kind."""
    first, second = sorted((work / "training").glob("*.pt"))[:2]
    return {
        "state.pt": work / "state.pt",
        "settings.json": work / "training" / "settings.json",
        "settings.json of watched": work / "watched" / "settings.json",
        "example": first,
        "second example": second,
    }


def damages(path: Path, others: dict[str, Path]) -> dict[str, Callable[[], object]]:
    """What may have become of a file; ``others`` are those of another training."""
    held = path.read_bytes()

    def write(content: bytes) -> Callable[[], object]:
        return lambda: path.write_bytes(content)

    def tensors(value: object) -> bytes:
        content = io.BytesIO()
        torch.save(value, content)
        return content.getvalue()

    def folder() -> None:
        path.unlink()
        path.mkdir()

    class Evil:
        def __reduce__(self):
            return print, ("code was run",)

    sealed = (hashlib.sha256(x).digest() + x for x in (tensors({"settings": 3}), pickle.dumps(Evil()), tensors([1])))
    return {
        "empty": write(b""),
        "a byte": write(b"x"),
        "half": write(held[: len(held) // 2]),
        "a byte less": write(held[:-1]),
        "a byte more": write(held + b"x"),
        "a bit": write(held[: len(held) // 3] + bytes([held[len(held) // 3] ^ 1]) + held[len(held) // 3 + 1 :]),
        "zeros": write(b"\0" * len(held)),
        "text": write(b"milk and bread\n"),
        "a list": write(b"[]"),
        "NaN": write(b'{"model": NaN, "questions": NaN}'),
        "deep": write(b"[" * 100_000),
        "no UTF-8": write(b"\xff\xfe\x00"),
        "a tensor": write(tensors(torch.zeros(3))),
        "tensors of wrong types": write(tensors({"settings": "x", "state": {}, "read.embeds": 3})),
        "a pickle": write(pickle.dumps(Evil())),
        **{f"sealed {number}": write(content) for number, content in enumerate(sealed)},
        **{f"{name} of another": write(other.read_bytes()) for name, other in others.items()},
        "a folder": folder,
    }


def test_damaged_files_are_named_with_what_to_do(trained, monkeypatch, capfd):
    """Cut short, mixed up, of other programs and trainings: one sentence, which names the file; and nothing is overwritten."""
    train = functools.partial(trained[1], steps=1)
    mine, other = (train(name, retain=retain).folder / "work" for name, retain in (("a", 0.2), ("b", 0.3)))
    monkeypatch.setattr(Frozen, "example", None)
    again, wrong = functools.partial(train, "a", retain=0.2), []
    for name, path in files_of(mine).items():
        held = path.read_bytes()
        others = {**files_of(other), **{f"my {key}": file for key, file in files_of(mine).items() if key != name}}
        for what, damage in damages(path, others).items():
            damage()
            # a line end is no damage
            if path.is_file() and path.read_bytes().rstrip(b"\n") == held.rstrip(b"\n"):
                continue
            try:
                again()
                wrong.append(f"{name}, {what}: accepted")
            except MmaccelError as error:
                said = str(error)
                if path.name not in said or "delete" not in said or "\n" in said or len(said) > 900:
                    wrong.append(f"{name}, {what}: {said}")
            except Exception as error:
                wrong.append(f"{name}, {what}: {error!r}")
            if path.is_dir():
                path.rmdir()
            path.write_bytes(held)
    assert not wrong, "\n".join(wrong)
    assert "code was run" not in capfd.readouterr().out
    again()


def test_a_torn_example_is_made_again_once_it_is_deleted(trained):
    _, train = trained
    whole = train(steps=1)
    path = next((whole.folder / "work" / "training").glob("00001-*.pt"))
    held, name = path.read_bytes(), path.name
    path.write_bytes(held[:1000])
    with pytest.raises(MmaccelError, match=rf"{name}' is damaged.*; delete it to make it again"):
        train(steps=1)
    path.unlink()
    before = weights(whole.folder)
    assert weights(train(steps=1).folder) == before and path.read_bytes() == held


def test_other_questions_are_another_training(tmp_path):
    """Names stay; a word, the bytes of a picture, an answer, the number of frames change."""
    model, processor = zoo.model("llava"), zoo.processor("llava")
    picture = tmp_path / "a.png"
    zoo.image(40, 40, 1).save(picture)

    def train(text: str = "what ?", frames: int = 16, order: int = 1):
        samples = [Sample(text if i == 5 else "what ?", images=(picture,), name=f"q{i}") for i in range(FEWEST)]
        asked = ask_samples(samples, frames=frames)[::order]
        return distil(model, processor, asked, out=tmp_path / "s", steps=1, max_new_tokens=2, retain=0.2)

    before = weights(train().folder)
    assert weights(train().folder) == before
    with pytest.raises(
        MmaccelError, match=r"different settings \(questions: 6 q5\); delete the folder .* give another"
    ):
        train("where ?")
    with pytest.raises(MmaccelError, match=r"questions: 1 q0, 2 q1, 3 q2 and 29 more"):
        train(frames=8)
    with pytest.raises(MmaccelError, match=r"questions: 1 q0, 2 q1, 3 q2 and"):
        train(order=-1)
    picture.write_bytes(picture.read_bytes() + b"!")
    with pytest.raises(MmaccelError, match=r"questions: 1 q0, 2 q1, 3 q2 and 29 more"):
        train()


def test_other_weights_are_another_training(trained):
    model, train = trained
    train(steps=1)
    with torch.no_grad():
        model.lm_head.weight.view(-1)[1000] += 1e-3
    with pytest.raises(MmaccelError, match=r"different settings \(model\)"):
        train(steps=1)


def test_two_trainings_in_one_folder_are_told_apart(trained, monkeypatch):
    _, train = trained
    said, step = [], learner.Learner._step

    def stepping(self):
        with pytest.raises(MmaccelError) as raised:
            train()
        said.append(str(raised.value))
        return step(self)

    monkeypatch.setattr(learner.Learner, "_step", stepping)
    train(steps=1)
    assert said[0].startswith("Another run writes to ") and "selector" in said[0] and "wait for it, or give" in said[0]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("work", False),
        ("work/training", False),
        ("work/lock", True),
        ("work/state.pt", True),
        ("work/watched/settings.json", True),
        ("selector.json", True),
        ("selector.safetensors", True),
        ("report.json", True),
        ("report.png", True),
    ],
)
def test_something_else_under_a_name_is_named(trained, tmp_path, name, folder):
    _, train = trained
    path = tmp_path / "selector" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if folder else path.touch()
    with pytest.raises(MmaccelError, match=rf"{name}'.*(give another|delete)"):
        train(steps=1)


def test_questions_that_cannot_be_used_are_left_out(tmp_path):
    """What cannot be loaded, what the processor refuses, and what the model cannot read: named, and neighbours stay."""
    model, processor = zoo.model("llava"), zoo.processor("llava")

    def broken() -> Prompt:
        raise MmaccelError("the picture is broken.")

    clip = Prompt("what ?", clip=Clip(zoo.clip(8, 96, 64, 1), list(range(8)), 8, 2.0))
    long = Prompt("why ? <image> " * 3, (zoo.image(80, 60, 2),))
    bad = [
        Question("broken", "all", None, broken),
        Question("clip", "all", None, lambda: clip),
        Question("long", "all", None, lambda: long),
    ]
    asked = questions(FEWEST)
    for number, one in enumerate(bad):
        asked.insert(7 * number, one)
    said: list[str] = []
    options = {"steps": 1, "max_new_tokens": 2, "retain": 0.2, "out": tmp_path / "s"}
    made = distil(model, processor, asked, complain=said.append, **options)
    assert sorted(one.partition(":")[0] for one in said) == ["broken", "clip", "long"] and not any(
        "\n" in x for x in said
    )
    assert made.report["questions"] == FEWEST
    said.clear()
    few_left = [*questions(FEWEST - 1), *bad]
    with pytest.raises(MmaccelError, match=r"there are 31 of 34 that can be used"):
        distil(model, processor, few_left, complain=said.append, **{**options, "out": tmp_path / "t"})
    assert len(said) == 3


def test_a_question_on_which_the_model_fails_is_left_out_of_its_batch(trained, monkeypatch):
    _, train = trained
    said, example = [], Frozen.example

    def failing(self, batch, longest):
        if any(question.name == "q3" for question, _ in batch):
            raise RuntimeError("cannot read this\nor that")
        return example(self, batch, longest)

    monkeypatch.setattr(Frozen, "example", failing)
    made = train(steps=1, complain=said.append)
    assert set(said) == {"q3: The model cannot answer it (RuntimeError: cannot read this)."}
    assert made.log


@pytest.mark.full
def test_attention_is_learned_without_the_model(trained):
    _, train = trained
    made = train(target="attention", steps=200)
    assert 0 <= made.signal < 4 and made.log[-1]["loss"] < made.log[1]["loss"]


def test_what_is_refused_before_anything_runs(trained, tmp_path):
    model, train = trained
    with pytest.raises(
        MmaccelError, match=f"needs at least {FEW} questions or pictures, better a thousand; there are {FEW - 1}"
    ):
        distil(model, zoo.processor("llava"), questions(FEW - 1), out=tmp_path)
    for wrong, words in (
        ({"target": "labels"}, "must be answers or effect or attention, got 'labels'"),
        ({"retain": 1.0}, "must be a share between 0 and 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"width": 30}, "`width` of a selector must be a multiple of `heads`, got 30 and 4"),
    ):
        with pytest.raises(MmaccelError, match=words):
            train(**wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(MmaccelError, match="is a file, and a selector is a folder"):
        train("file")
    with accelerated(model, "divprune"), pytest.raises(MmaccelError, match=r"call model\.mmaccel\.remove\(\) first"):
        train()


# ------------------------------------------------------------------------------------------------------- the method
def saved(model, folder: Path, question: bool = True) -> str:
    fingerprint = ModelFingerprint.of(family_of(model))
    random_selectors.network(fingerprint.width, question).save(folder, fingerprint, {})
    return str(folder)


def test_a_selector_is_that_of_one_model(tmp_path):
    model = zoo.model("llava")
    folder = saved(model, tmp_path / "mine")
    for dtype in (torch.bfloat16, torch.float16):
        accelerate_vlm(zoo.model("llava").to(dtype), Learned(folder))
    with pytest.raises(UnsupportedError, match="a model with other weights"):
        accelerate_vlm(zoo.model("llava", seed=1), Learned(folder))
    with pytest.raises(UnsupportedError, match="a llava model of width 64, and this is a llava_next of width 64"):
        accelerate_vlm(zoo.model("llava_next"), Learned(folder))
    with pytest.raises(UnsupportedError, match="of width 64, and this is a llava of width 32"):
        accelerate_vlm(zoo.model("llava", hidden_size=32, head_dim=8), Learned(folder))
    model.config._name_or_path = ""
    with pytest.raises(UnsupportedError, match="none lies beside its weights; run mmaccel distil"):
        accelerate_vlm(model, "learned")
    with pytest.raises(MmaccelError, match="selector.json. cannot be used: it does not exist"):
        accelerate_vlm(model, Learned(tmp_path))
    (tmp_path / "mine" / WEIGHTS).write_bytes(b"not weights")
    with pytest.raises(MmaccelError, match="selector.safetensors. cannot be used: it has 11 bytes"):
        accelerate_vlm(model, Learned(folder))


def test_a_selector_is_a_recipe_by_its_folder(tmp_path):
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    folder = saved(model, tmp_path / "mine")
    chosen = get_recipe(tmp_path / "mine", retain=0.3)
    assert chosen == get_recipe(folder, retain=0.3) and chosen.name == "mine"
    assert Recipe.from_json(chosen.to_json()) == chosen
    kept = []
    for one in (chosen, get_recipe(Learned(tmp_path / "mine"), retain=0.3)):
        prepared = prepare(processor, one)
        with accelerated(model, one, processor=prepared):
            model(**zoo.inputs("qwen2_5_vl", "video"))
            kept.append(model.mmaccel.reduction.kept)
    assert torch.equal(*kept)


@pytest.mark.parametrize("name", ["mini-llava", "mini-llava-deep", "mini-qwen-vl"])
def test_shipped_models_have_one(name):
    """It is theirs, small, and picks otherwise than the rule it begins with."""
    folder = Path(located(name))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    (batch,) = batches(ask_suite(["reading"], 4), 4)
    kept = []
    for which in ("learned", "spacetime"):
        with accelerated(model, which, retain=0.1, processor=processor), torch.no_grad():
            model(**inputs_of(model, processor, batch))
            kept.append(model.mmaccel.reduction.kept)
    assert torch.equal(kept[0].sum(1), kept[1].sum(1)) and not torch.equal(*kept)
    small, large = (sum(x.numel() for x in part.parameters()) for part in (Selector.load(folder / FOLDER), model))
    assert small < 0.01 * large


@pytest.mark.parametrize("media", ["image", "video"])
def test_one_that_learned_nothing_is_spacetime(tmp_path, media):
    model, kept = zoo.model("qwen2_5_vl"), []
    fingerprint = ModelFingerprint.of(family_of(model))
    Selector(Shape(fingerprint.width, width=16)).save(tmp_path, fingerprint, {})
    for chosen in (get_recipe(tmp_path, retain=0.3), get_recipe("spacetime", retain=0.3)):
        with accelerated(model, chosen, processor=prepare(zoo.processor("qwen2_5_vl"), chosen)):
            model(**zoo.inputs("qwen2_5_vl", media))
            kept.append(model.mmaccel.reduction.kept)
    assert torch.equal(*kept)


@pytest.mark.parametrize("question", [True, False])
def test_a_selector_reads_the_question_or_not(tmp_path, question):
    random = torch.Generator().manual_seed(0)
    net = random_selectors.network(16, question)
    cells = torch.stack([torch.zeros(20), torch.arange(20) // 5, torch.arange(20) % 5], -1).long()[None]
    tokens = TokenBatch(
        features=torch.randn(1, 20, 16, generator=random),
        valid=torch.ones(1, 20, dtype=torch.bool),
        cells=cells,
        grid=torch.tensor([[1, 4, 5]]),
        segment=torch.zeros(1, 20, dtype=torch.long),
        question=torch.randn(1, 4, 16, generator=random),
        question_valid=torch.ones(1, 4, dtype=torch.bool),
    )
    other = replace(tokens, question=tokens.question.flip(1))
    moved = replace(tokens, cells=cells.flip(1))
    worth = torch.randn(1, 20, generator=random)
    assert torch.equal(net(tokens, worth)[0], net(other, worth)[0]) is not question
    assert not torch.equal(net(tokens, worth)[0], net(moved, worth)[0])
    assert not torch.equal(net(tokens, worth)[0], net(tokens, worth.flip(1))[0])
    assert net(replace(tokens, question=None, question_valid=None), worth)[0].isfinite().all()
    net.save(tmp_path, ModelFingerprint("llava", 16, {"weight": [0.0] * 8}), {})
    assert Learned(tmp_path).needs_question is question


def test_vllm_serves_one_that_does_not_read_the_question(tmp_path):
    model = zoo.model("llava")
    architecture = ARCHITECTURES["LlavaForConditionalGeneration"]

    def plan(question: bool) -> ServingPlan:
        chosen = get_recipe(saved(model, tmp_path / str(question), question), retain=0.3)
        return ServingPlan(Settings(chosen), model.config, architecture)

    assert plan(False).reduces
    with pytest.raises(
        UnsupportedError, match="learned reads the question, .* train a selector by mmaccel distil --blind"
    ):
        plan(True)


@pytest.mark.usefixtures("no_gradients")
def test_vllm_adds_to_what_stays_what_transformers_adds(tmp_path):
    model, processor, seen = zoo.model("llava"), zoo.processor("llava"), []
    fingerprint = ModelFingerprint.of(family_of(model))
    random_selectors.network(fingerprint.width, False, residual=True).save(tmp_path, fingerprint, {})
    given, chosen = zoo.inputs("llava", "image"), get_recipe(tmp_path, retain=0.3)
    first = family_of(model).text.layers[0]
    first.register_forward_pre_hook(lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0]), with_kwargs=True)
    with accelerated(model, chosen, processor=processor):
        model(**given)
        kept, visual = model.mmaccel.reduction.kept[0], model.mmaccel.layout.visual[0]
    rows = model.get_image_features(pixel_values=given["pixel_values"]).pooler_output[0].view(-1, fingerprint.width)
    plan = ServingPlan(Settings(chosen), model.config, ARCHITECTURES["LlavaForConditionalGeneration"])
    (picture,) = plan.pictures("image", {"pixel_values": given["pixel_values"]}, len(rows))
    encoded = VisionOutput({"pixel_values": given["pixel_values"]}, len(rows), {})
    count = plan.count("image", picture, None).total
    ((row, stays),) = plan.reduce("image", [picture], [rows], [count], None, encoded, Taps(plan.family, plan.wanted))
    assert torch.equal(stays, kept[visual]) and not torch.allclose(row, rows[stays])
    torch.testing.assert_close(row, seen[0][0][visual[kept]])


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def test_what_is_added_is_learned(trained, tmp_path):
    """Some steps bring the answers of the untrained model nearer than choosing alone does."""
    model, train = trained
    least = {}
    for residual in (True, False):
        made = train(f"residual-{residual}", residual=residual, steps=24)
        least[residual] = made.log[-1]["watched"]
        assert described(made.folder)[0].residual is residual
    assert least[True] < least[False] - 0.1
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_a_model_without_gradients_or_memory_is_told_what_to_do(trained, monkeypatch):
    _, train = trained
    states = Frozen.states
    monkeypatch.setattr(Frozen, "states", torch.no_grad()(states))
    with pytest.raises(MmaccelError, match=r"give --select-only \(residual=False\)"):
        train()

    def full(*given):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Frozen, "states", full)
    with pytest.raises(MmaccelError, match="out of memory; give a smaller --batch-size and another folder"):
        train()


def test_scoring_costs_little():
    """Under two percent of what is saved of a 7B model's prefill at a tenth and a quarter: 2,304 tokens, Qwen2.5-VL-7B."""
    net = Shape(3584, 256, 2, 4, residual=True)
    tokens, weights_ = 2304, 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert sum(x.numel() for x in Selector(net).parameters()) < 0.01 * weights_
    for retain in (0.1, 0.25):
        count = round(retain * tokens)
        # all distances once, and a minimum over all tokens a pick; three times as many are picked as stay
        picking = 2.0 * tokens * tokens * 3584 + 3 * count * 2 * tokens
        saving = 2.0 * weights_ * (tokens - count)
        assert net.operations(tokens) + picking < 0.004 * saving


# ------------------------------------------------------------------------------------------------- the command line
def test_the_command_names_what_is_missing(tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert main(["distil", "--data", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    assert "give --ask QUESTION" in capsys.readouterr().err


def test_a_folder_is_asked_one_question(tmp_path):
    for name in ("b.png", "a.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("nothing to see")
    (tmp_path / "clip").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / "clip" / f"{number}.png")
    asked = ask_folder(tmp_path, "what is it ?", frames=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert [one.name for one in asked] == ["a.jpg", "b.png", "clip"]
    assert len(asked[0].load().pictures) == 1 and len(asked[2].load().clip.frames) == 2
    with pytest.raises(MmaccelError, match="holds no picture and no video"):
        ask_folder(empty, "what ?")


@pytest.mark.full
def test_the_command_trains(tmp_path, capsys):
    """On pictures in a folder, without the question; the report says what was measured."""
    for number, one in enumerate(ask_suite(["colour"], FEWEST)):
        one.load().pictures[0].save(tmp_path / f"{number:02d}.png")
    out = tmp_path / "selector"
    words = ["distil", "--data", str(tmp_path), "--ask", "how many objects are there ?", "--blind", "--steps", "2"]
    assert main([*words, "-o", str(out), "--max-new-tokens", "4", "--json", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert "answers kept" in capsys.readouterr().out and told["parameters"] < 40_000
    assert not described(out)[0].question
    assert main(["eval", "--suite", "colour", "--limit", "2", "--recipe", str(out), "--retain", "0.25"]) == 0
