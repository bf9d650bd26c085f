"""What ``programs.evaluate`` measures, against its definition; and the commands ``eval``, ``compare`` and ``quickstart``."""

from __future__ import annotations

import builtins
import contextlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from PIL import Image
from tail import few, in_turn

import mmaccel
from mmaccel import UnsupportedError, accelerated
from mmaccel.cli import ask, main
from mmaccel.cli.shared import measure
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs import evaluate as evaluation
from mmaccel.programs import plots
from mmaccel.programs.drafts import drafts_identity
from mmaccel.programs.evaluate import Question, Row, answer_lengths, ask_suite, divergence, evaluate, fingerprint
from mmaccel.runtime.decoding import drafting

ROOT = Path(__file__).parent.parent
KEPT = ("divprune", 0.25), ("fastv", 0.3), ("snapkv", 0.5)


def questions(count: int = 3, *, video: bool = False) -> list[Question]:
    """Questions of different lengths, about a picture or a clip each."""

    def prompt(number: int) -> Prompt:
        text = "what is it ?" + " and why is it there ?" * (number % 3)
        if video:
            return Prompt(text, clip=Clip(zoo.clip(4, 96, 64, number), list(range(4)), 4, 2.0))
        return Prompt(text, (zoo.image(80, 60, number),))

    return [Question(f"q{i}", "odd" if i % 2 else "even", None, lambda i=i: prompt(i)) for i in range(count)]


def asked(model, processor, which, rows, **options):
    """All answers by title of the row."""
    found = {row.title: [] for row in rows}
    for row, answers in evaluate(model, processor, which, rows, max_new_tokens=4, **options):
        found[row.title] += answers
    return found


# ------------------------------------------------------------------------------------------------------ the definition
@pytest.mark.parametrize(("family", "recipe", "retain"), in_turn(["llava", "qwen2_5_vl"], KEPT))
def test_answers_and_divergence_are_what_they_say(family, recipe, retain):
    """A batch against each question alone: greedy answers of ``generate``, and KL by feeding the full answer by hand."""
    model, processor = zoo.model(family), zoo.processor(family)
    which, row = questions(), Row(recipe, retain)
    (answers,) = asked(model, processor, which, [row], batch_size=3).values()
    for question, answer in zip(which, answers, strict=True):
        inputs = encode(processor, [question.load()])
        greedy = {"max_new_tokens": 4, "do_sample": False}
        full = model.generate(**inputs, **greedy)[:, inputs["input_ids"].shape[1] :]
        logits = {}
        for name, chosen in (("full", "none"), ("fast", row.recipe)):
            with torch.no_grad(), accelerated(model, chosen, processor=processor):
                alone = model.generate(**inputs, **greedy)[:, inputs["input_ids"].shape[1] :]
                out = model(**inputs, use_cache=True)
                steps, mask = [out.logits[:, -1]], inputs["attention_mask"]
                for token in full[0, :-1]:
                    mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
                    more = model.prepare_inputs_for_generation(
                        token.view(1, 1),
                        past_key_values=out.past_key_values,
                        attention_mask=mask,
                        use_cache=True,
                        is_first_iteration=False,
                        **({"position_ids": _after(model, inputs, mask)} if "qwen" in family else {}),
                    )
                    out = model(**more)
                    steps.append(out.logits[:, -1])
            logits[name] = torch.cat(steps).double().log_softmax(-1)
        text = processor.tokenizer.decode(alone[0], skip_special_tokens=True).strip()
        assert answer.answer == text
        assert answer.full == processor.tokenizer.decode(full[0], skip_special_tokens=True).strip()
        assert answer.same == (answer.answer == answer.full)
        p, q = logits["full"], logits["fast"]
        expected = float((p.exp() * (p - q)).sum(-1).mean())
        assert answer.kl == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert answer.kl > 1e-3
    assert not hasattr(model, "mmaccel")


def _after(model, inputs, mask):
    """Positions ``[3, 1, 1]`` of the newest token of a Qwen model, whose text goes on after the largest of the prompt."""
    positions, _ = model.model.get_rope_index(**{k: v for k, v in inputs.items() if "pixel" not in k})
    behind = mask.shape[1] - inputs["input_ids"].shape[1] - 1
    return (positions.amax() + 1 + behind).expand(3, 1, 1)


def test_keeping_everything_costs_nothing():
    model, processor = zoo.model("llava"), zoo.processor("llava")
    rows = [Row("none"), Row("divprune", 1.0), Row("random", 0.1)]
    asked(model, processor, questions(), rows)
    none, everything, little = (row.figures() for row in rows)
    assert (none["loyalty"], none["kl"], none["kv_share"]) == (1.0, 0.0, 1.0)
    assert everything["loyalty"] == 1.0 and everything["kl"] < 1e-6
    assert everything["kv_share"] == pytest.approx(1.0, abs=0.01)  # beside the keys an index of them is kept
    assert everything["visual_share_per_layer"] == 1.0
    assert little["kl"] > 0.01 and little["kv_share"] < 0.8
    assert (little["visual_tokens"], little["visual_tokens_kept"]) == (36, 4)
    assert none["accuracy"] is None  # nobody knows what is right


def test_shares_follow_the_site():
    model, processor = zoo.model("llava"), zoo.processor("llava")
    rows = [Row("uniform", 0.25), Row("fastv", 0.25), Row("snapkv", 0.25)]
    asked(model, processor, questions(), rows)
    before, inside, cache = (row.figures() for row in rows)
    assert before["visual_share_per_layer"] == 0.25
    assert inside["visual_share_per_layer"] == pytest.approx((2 * 36 + 2 * 9) / (4 * 36))
    assert cache["visual_share_per_layer"] == 1.0 and cache["kv_share"] < inside["kv_share"]


def test_recipes_on_pixels_get_inputs_of_their_own():
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    rows = [Row("none"), Row("resize", 0.25), Row("uniform", 0.5)]
    asked(model, processor, questions(), rows)
    none, small, half = (row.figures() for row in rows)
    assert none["visual_tokens"] == half["visual_tokens"] == 20  # 80 x 60 pixels
    assert small["visual_tokens"] == small["visual_tokens_kept"] < 10
    assert small["visual_share_per_layer"] == small["visual_tokens"] / 20 and small["kv_share"] < 0.9


@pytest.mark.parametrize("family", few(zoo.FAMILIES, ("llava_next", "qwen3_vl", "video_llava")))
def test_every_family_can_be_measured(family):
    model, processor = zoo.model(family), zoo.processor(family)
    for video in (False, True) if family in zoo.VIDEO_FAMILIES else (False,):
        rows = [Row("none"), Row("uniform", 0.25)]
        asked(model, processor, questions(3, video=video), rows, batch_size=3)
        full, fast = (row.figures() for row in rows)
        assert full["questions"] == fast["questions"] == 3
        assert fast["visual_tokens_kept"] == pytest.approx(full["visual_tokens"] / 4, rel=0.1)
        assert fast["kv_bytes"] < full["kv_bytes"]


def test_lengths_end_with_the_first_end():
    tokens = torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8], [2, 2, 2, 2], [9, 5, 5, 2]])
    assert answer_lengths(tokens, 2).tolist() == [2, 4, 1, 4]
    assert answer_lengths(tokens, [2, 9]).tolist() == [2, 4, 1, 1]
    assert answer_lengths(tokens, None).tolist() == [4] * 4


def test_divergence_is_a_mean_over_the_answer():
    a, b = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 3.0]]).log_softmax(-1)
    p = torch.tensor([0.5, 0.5]).double()
    one = float((p * (p.log() - b[0].double())).sum())
    assert divergence([a, a], [b, a], torch.tensor([2])).item() == pytest.approx(one / 2, rel=1e-6)
    assert divergence([a, a], [a, b], torch.tensor([1])).item() == 0.0
    assert divergence([a, a], [b, a], torch.tensor([1])).item() == pytest.approx(one, rel=1e-6)
    # what the full model excludes adds nothing
    never = torch.tensor([[0.0, -torch.inf]])
    assert divergence([never], [never], torch.tensor([1])).item() == 0.0


# ------------------------------------------------------------------------------------------------------------ running
def test_kinds_are_batched_apart():
    model, processor = zoo.model("llava"), zoo.processor("llava")
    two = Question("two", "pair", "x", lambda: Prompt("which ?", (zoo.image(60, 60, 8), zoo.image(60, 60, 9))))
    which = [*questions(2), two, *questions(1)]
    batches = [answers for _, answers in evaluate(model, processor, which, [Row("uniform", 0.5)], batch_size=3)]
    assert [[answer.name for answer in batch] for batch in batches] == [["q0", "q1", "q0"], ["two"]]
    assert batches[1][0].visual_tokens == 72 and batches[1][0].right is False


def test_a_broken_run_goes_on_where_it_was():
    model, processor, which = zoo.model("llava"), zoo.processor("llava"), questions(5)
    whole, broken = ([Row("none"), Row("uniform", 0.5), Row("fastv", 0.3)] for _ in range(2))
    asked(model, processor, which, whole, batch_size=2)
    run = evaluate(model, processor, which, broken, batch_size=2, max_new_tokens=4)
    for _ in range(4):  # the second batch of one row, the first of the others
        next(run)
    run.close()
    again = [Row("none"), Row("uniform", 0.5), Row("fastv", 0.3)]
    for row, old in zip(again, broken, strict=True):
        row.restore(json.loads(json.dumps(old.as_dict())))
    assert [row.batches for row in again] == [2, 1, 1]
    more = asked(model, processor, which, again, batch_size=2)
    assert [len(answers) for answers in more.values()] == [1, 3, 3]
    assert [row.as_dict() for row in again] == [row.as_dict() for row in whole]


def test_unreadable_pictures_are_left_out_when_told():
    model, processor = zoo.model("llava"), zoo.processor("llava")

    def gone() -> Prompt:
        raise mmaccel.MmaccelError("it is gone.")

    which = [*questions(2), Question("lost", "even", None, gone)]
    said: list[str] = []
    row = Row("uniform", 0.5)
    asked(model, processor, which, [row], complain=said.append)
    assert said == ["lost: it is gone."] and row.figures()["questions"] == 2
    with pytest.raises(mmaccel.MmaccelError, match="it is gone"):
        asked(model, processor, which, [Row("uniform", 0.5)])
    with pytest.raises(mmaccel.MmaccelError, match="can be read"):
        asked(model, processor, which[2:], [Row("uniform", 0.5)], complain=said.append)
    with pytest.raises(mmaccel.MmaccelError, match="empty"):
        asked(model, processor, [], [Row("none")])


def test_what_a_model_cannot_do_is_said_first():
    model, processor = zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl")
    with pytest.raises(mmaccel.UnsupportedError, match="CLS"):
        next(evaluate(model, processor, questions(), [Row("none"), Row("vtc-cls", 0.5)]))


def test_fingerprint_follows_the_weights():
    model = zoo.model("llava")
    before = fingerprint(model)
    assert before == fingerprint(zoo.model("llava")) != fingerprint(zoo.model("llava", seed=1))
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert fingerprint(model) != before


def test_suite_questions_load_what_they_ask_about():
    one, two = ask_suite(["colour", "comparison"], 1, pixels=56)
    assert [picture.size for picture in one.load().pictures] == [(56, 56)]
    assert len(two.load().pictures) == 2
    (turns,) = ask_suite(["turns"], 1)
    chat = turns.load().chat().messages
    assert [turn["role"] for turn in chat] == ["user", "assistant", "user"]
    assert [sum(part["type"] == "image" for part in turn["content"]) for turn in chat] == [1, 0, 0]
    (clip,) = ask_suite(["motion"], 1, frames=8, pixels=64)
    assert clip.load().clip.frames.shape == (8, 64, 64, 3)


# ------------------------------------------------------------------------------------------------------- the commands
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, pictures whole and broken, and sets of questions about them."""
    root = tmp_path_factory.mktemp("eval")
    for family in ("llava", "qwen2_5_vl"):
        zoo.model(family).save_pretrained(root / family)
        zoo.processor(family).save_pretrained(root / family)
    zoo.image(120, 90, 0).save(root / "a.png")
    zoo.image(60, 90, 1).save(root / "b.jpg")
    (root / "cut.jpg").write_bytes((root / "b.jpg").read_bytes()[:200])
    (root / "text.png").write_text("no picture")
    good = [
        {"id": "first", "image": "a.png", "question": "what ?", "answer": "that"},
        {"image": ["a.png", "b.jpg"], "question": "which ?"},
        {"images": ["b.jpg"], "question": "why is it ?", "answer": "so", "task": "why"},
    ]
    bad = ["{nonsense", {"image": "a.png"}, {"question": "what ?"}, {"image": "text.png", "question": "what ?"}]
    bad += [{"image": "cut.jpg", "question": "what ?"}, {"image": "gone.png", "question": "what ?"}, "[]"]

    def write(name, lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (root / name).write_text(text, encoding="utf-8")

    write("good.jsonl", good)
    write("mixed.jsonl", [bad[0], good[0], *bad[1:], good[2]])
    write("bad.jsonl", bad[:3])
    write("unreadable.jsonl", bad[3:6])
    write("empty.jsonl", [])
    (root / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    write("video.jsonl", [{"video": "gone.mp4", "question": "what ?"}])
    return root


def command(capsys, *argv, status=0):
    """Status, stdout and stderr of a command line."""
    capsys.readouterr()
    assert main([str(a) for a in argv]) == status
    return capsys.readouterr()


@pytest.mark.full
def test_eval_on_the_shipped_model(capsys, tmp_path):
    argv = ["eval", "--recipe", "uniform", "--retain", 0.5, 0.1, "--suite", "shape", "comparison", "--limit", 3]
    out, err = command(capsys, *argv, "--json")
    report = json.loads(out)
    assert not err
    assert [row["title"] for row in report["rows"]] == ["none", "uniform 0.5", "uniform 0.1"]
    none, half, tenth = (row["figures"] for row in report["rows"])
    assert none["loyalty"] == 1 and none["questions"] == 6
    assert tenth["kl"] > half["kl"] > 0
    assert tenth["kv_share"] < half["kv_share"] < 1
    assert half["visual_share_per_layer"] == 0.5
    answers = report["rows"][2]["answers"]
    assert [answer["task"] for answer in answers] == ["shape"] * 3 + ["comparison"] * 3
    assert none["accuracy"] == sum(answer["right"] for answer in report["rows"][0]["answers"]) / 6
    assert tenth["loyalty"] == sum(answer["answer"] == answer["full"] for answer in answers) / 6
    assert report["command"].startswith("mmaccel eval --recipe uniform --retain 0.5")
    assert report["settings"]["versions"]["torch"] == torch.__version__

    path = tmp_path / "out.json"
    text, _ = command(capsys, *argv, "--json", path)
    for words in ("accuracy", "same answer", "KL", "KV cache", "uniform 0.1", "comparison"):
        assert words in text
    written = json.loads(path.read_text())
    assert written["rows"] == report["rows"]  # the same figures again, to the last digit
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.full
def test_the_exported_suite_gives_the_same_figures(capsys, tmp_path):
    from mmaccel.suite import export, make_suite

    tasks = ("turns", "comparison")
    data = export(make_suite("test", tasks, 2), tmp_path)
    argv = ["eval", "--recipe", "uniform", "--retain", 0.25, "--json"]
    drawn = json.loads(command(capsys, *argv, "--suite", *tasks, "--limit", 2).out)
    read = json.loads(command(capsys, *argv, "--data", data).out)
    assert read["rows"] == drawn["rows"]


@pytest.mark.parametrize("lossless", [True, False])
def test_answers_with_drafts(lossless, monkeypatch):
    """Lossless rows answer as the full model, others as their recipe, a resumed row goes on with its figures."""
    # whether a draft pays depends on seconds
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))
    model, processor = zoo.model("llava"), zoo.processor("llava")
    drafts = {"lookup": True} | ({"lossless": True} if lossless else {})
    rows = [Row("none"), Row("divprune", 0.1), Row("divprune", 0.1, drafts)]
    rows += [] if lossless else [Row("resize", 0.25, drafts)]
    found = {row.title: [] for row in rows}
    for row, answers in evaluate(model, processor, questions(4), rows, batch_size=1, max_new_tokens=24):
        found[row.title] += answers
    words = "lossless, lookup" if lossless else "lookup"
    assert list(found)[:3] == ["none", "divprune 0.1", f"divprune 0.1, {words}"]
    full, reduced, drafted, *_ = found.values()
    assert [one.answer for one in drafted] == [one.answer for one in (full if lossless else reduced)]
    figures = rows[2].figures()
    if lossless:
        with pytest.raises(UnsupportedError, match="works on pixels, which a lossless answer needs whole"):
            asked(model, processor, questions(2), [Row("resize", 0.25, drafts)])
        assert figures["kl"] < 1e-6 and figures["visual_tokens_kept"] == rows[0].figures()["visual_tokens"]
    else:
        assert [one.kl for one in drafted] == [one.kl for one in reduced]
        assert figures["visual_tokens_kept"] == rows[1].figures()["visual_tokens_kept"]
    sums = figures["drafting"]
    assert sums["tokens"] <= 4 * 24 and 0 < sums["accepted"] <= sums["drafted"] and sums["forwards_saved"] > 0
    assert not rows[1].figures()["drafting"] and all(row.figures()["drafting"] for row in rows[2:])


def test_no_recipe_copies_what_another_has_answered(monkeypatch):
    """The answers to a question are the same, and equally hard to draft for."""
    monkeypatch.setattr(drafting, "best_length", lambda rate, price, costs, most: (min(5, most), 2.0))
    monkeypatch.setattr(drafting, "gain_of_tree", lambda *_: 0.0)
    rows = [Row(recipe, 0.1, {"lossless": True, "lookup": True}) for recipe in ("divprune", "uniform")]
    asked(zoo.model("llava"), zoo.processor("llava"), questions(3), rows)
    first, second = (row.figures()["drafting"] for row in rows)
    assert first == second and first["drafted"] > 0


def test_eval_with_drafts_is_another_run(folder, capsys, tmp_path):
    """The command prints and writes figures of drafts; a resumed run takes over rows of the same drafts alone."""
    argv = ["eval", "--model", folder / "llava", "--max-new-tokens", 12, "--suite", "shape", "--limit", 2]
    argv += ["--recipe", "uniform", "--retain", 0.5, "--lossless", "--json", tmp_path / "out.json"]
    text = command(capsys, *argv, "--lookup").out
    assert "uniform 0.5, lossless, lookup" in text and "forwards saved" in text and "tokens a verification" in text
    none, row = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (
        row["figures"]["drafting"]["tokens"] > 0 and row["figures"]["loyalty"] == 1 and not none["figures"]["drafting"]
    )
    assert "2 of 2 recipes are taken over" in command(capsys, *argv, "--lookup").err
    drafting = ["--draft", folder / "llava"]
    err = command(capsys, *argv, *drafting).err
    assert "1 of 2 recipes are taken over" in err and "none" in err
    assert "2 of 2 recipes are taken over" in command(capsys, *argv, *drafting).err
    # the same name, but other weights
    card = folder / "llava" / "generation_config.json"
    before = card.read_text()
    try:
        card.write_text(before + " ")
        again = drafts_identity({"lossless": True, "draft": str(folder / "llava")})
    finally:
        card.write_text(before)
    assert again != drafts_identity({"lossless": True, "draft": str(folder / "llava")})


def test_eval_on_videos(folder, capsys, tmp_path):
    pytest.importorskip("av")
    from mmaccel.suite import export, make_suite

    model = ["--model", folder / "qwen2_5_vl", "--max-new-tokens", 2, "--retain", 0.5, "--frames", 8, "--json"]
    data = export(make_suite("test", ("order",), 2, frames=16), tmp_path, pixels=64)
    row = json.loads(command(capsys, "eval", *model, "--data", data).out)["rows"][1]
    assert row["figures"]["visual_tokens"] == 4 * 4 * 4  # 8 of 16 frames, two a step; a token is 16 x 16 pixels
    row = json.loads(command(capsys, "eval", *model, "--suite", "order", "--limit", 2, "--pixels", 64).out)["rows"][1]
    assert row["figures"]["visual_tokens"] == 4 * 4 * 4


def test_eval_on_a_set_of_ones_own(folder, capsys):
    argv = ["eval", "--model", folder / "llava", "--recipe", "fastv", "--retain", 6, "--max-new-tokens", 3, "--json"]
    report = json.loads(command(capsys, *argv, "--data", folder / "good.jsonl").out)
    row = report["rows"][1]
    assert row["figures"]["questions"] == 3 and row["title"] == "fastv 6"
    names = {answer["name"]: answer for answer in row["answers"]}
    assert set(names) == {"first", "line 2", "line 3"}
    assert names["line 2"]["right"] is None and names["first"]["right"] is False
    assert row["tasks"]["why"]["figures"]["questions"] == 1
    assert row["figures"]["accuracy"] == 0.0  # of the two that have an expected answer
    assert row["tasks"]["all"]["sums"]["judged"] == 1
    report = json.loads(command(capsys, *argv, "--data", folder / "good.jsonl", "--limit", 1).out)
    assert report["rows"][1]["figures"]["questions"] == 1


def test_eval_names_bad_lines_and_goes_on(folder, capsys):
    argv = ["eval", "--model", folder / "llava", "--max-new-tokens", 2, "--data", folder / "mixed.jsonl", "--json"]
    out, err = command(capsys, *argv, status=measure.PARTIAL)
    assert json.loads(out)["rows"][1]["figures"]["questions"] == 2
    assert len(json.loads(out)["complaints"]) == 7
    for words in ("line 1: no JSON", "line 3: the text field 'question'", "line 4: either", "line 8: a JSON object"):
        assert f"mixed.jsonl, {words}" in err
    for words in ("line 5: ", "text.png", "line 6: ", "cut.jpg", "line 7: ", "gone.png", "7 could not be used"):
        assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data", "{}/gone.jsonl"], "There is no file"),
        (["--data", "{}/empty.jsonl"], "holds no sample"),
        (["--data", "{}/bad.jsonl"], "line 1: no JSON"),
        (["--data", "{}/unreadable.jsonl"], "can be read"),
        (["--data", "{}/binary.jsonl"], "UTF-8"),
        (["--data", "{}/video.jsonl", "--model", "{}/qwen2_5_vl"], "can be read"),
        (["--recipe", "divprun"], "did you mean 'divprune'"),
        (["--recipe", "none", "--retain", "0.5"], "drops nothing"),
        (["--retain", "0"], "keeps no token"),
        (["--suite", "colours"], "There is no task 'colours'"),
        (["--suite", "receipts"], "and document (receipt, sign, note, table, chart, screen)"),
        (["--suite", "video", "--frames", "7"], "even number"),
        (["--suite", "motion", "--limit", "1"], "takes no video"),
        (["--limit", "0"], "--limit"),
        (["--batch-size", "0"], "--batch-size"),
        (["--json", "{}/nowhere/out.json"], "does not exist"),
        (["--json", "{}/good.jsonl"], "holds no results"),
        (["--model", "{}/nowhere"], "There is no folder"),
    ],
)
def test_eval_says_what_is_wrong(folder, capsys, argv, words):
    model = [] if "--model" in argv else ["--model", folder / "llava"]
    out, err = command(capsys, "eval", *[a.format(folder) for a in argv], *model, status=2)
    assert words in err and not out
    lines = err.splitlines()
    assert lines[-1].startswith("mmaccel eval: ") and "Traceback" not in err


def test_video_tasks_want_a_model_for_videos(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(ask, "SHIPPED_VIDEO", tmp_path)
    assert "takes videos" in command(capsys, "eval", "--suite", "video", status=2).err


def test_every_share_of_answers_has_its_interval():
    """Of 20 questions 17 are right: what is printed, and what a report has."""
    sums = evaluation.Sums({"questions": 20, "judged": 20, "right": 17, "same": 20})
    figures = sums.figures()
    assert figures["accuracy_interval"] == pytest.approx([0.6211, 0.9679], abs=1e-4)
    assert figures["loyalty_interval"] == pytest.approx([0.8316, 1.0], abs=1e-4)
    tasks = {"count": {"figures": figures}, "why": {"figures": evaluation.Sums({"questions": 2, "same": 1}).figures()}}
    row = {"title": "mine 0.25", "name": "mine", "figures": figures, "tasks": tasks, "notes": [], "failed": []}
    row["figures"] |= {"visual_share_per_layer": 0.25, "kv_share": 0.5}
    settings = {"model": "small", "device": "cpu", "dtype": "float32"}
    text = measure.render({"settings": settings, "rows": [row]})
    assert "mine 0.25  85.0% (62.1-96.8)  100.0% (83.2-100.0)" in text and "exact 95 % intervals" in text
    assert re.search(r"count +85\.0% \(62\.1-96\.8\)\nwhy +-", text)
    nothing = evaluation.Sums().figures()
    assert nothing["accuracy_interval"] is None and nothing["loyalty_interval"] is None


# ------------------------------------------------------------------------------------------------------------- compare
@pytest.fixture
def compare(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")

    def run(*argv, status=0, **_):
        head = ["compare", "--model", folder / "llava", "--data", folder / "good.jsonl", "--max-new-tokens", 2]
        return command(capsys, *head, "--out", tmp_path / "curves.png", *argv, status=status)

    return run


OWN = """
import mmaccel
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod

@mmaccel.register
class Mine(ProjectorMethod):
    name = "mine"
    order: float = 2.0

    def reduce(self, tokens, count):
        return Reduction.top(tokens.features.float().norm(p=self.order, dim=-1), tokens.valid, count)
"""


def test_compare_draws_a_users_method_with_intervals(compare, tmp_path, monkeypatch, fresh_registry):
    (tmp_path / "own_of_compare.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    argv = ["--import", tmp_path / "own_of_compare.py", "--recipe", "mine", "--retain", 0.5, 0.25, "--set", "order=1"]
    text, _ = compare(*argv)
    (axes,) = drawn[0].axes
    (bars,) = axes.containers
    assert bars.get_label() == "mine order=1"
    report = json.loads((tmp_path / "curves.json").read_text())
    rows = [row for row in report["rows"] if row["name"] == "mine order=1"]
    judged = report["rows"][0]["figures"]["accuracy"] is not None
    name = "accuracy_interval" if judged else "loyalty_interval"
    wanted = sorted([100 * share for share in row["figures"][name]] for row in rows)
    seen = sorted(sorted(segment[:, 1]) for segment in bars.lines[2][0].get_segments())
    assert len(seen) == 2 and np.allclose(seen, wanted)
    assert rows[0]["recipe"]["stages"][0]["options"] == {"order": 1}
    assert text.count("(") > 4 and "mine order=1 0.25" in text


@pytest.mark.full
def test_compare_draws_and_goes_on(compare, tmp_path, monkeypatch):
    argv = ["--recipe", "none", "uniform", "fastv", "--retain", 0.5, 0.25]
    text, _ = compare(*argv)
    assert "fastv 0.25" in text and "curves.json" in text
    with Image.open(tmp_path / "curves.png") as drawn:
        assert drawn.format == "PNG" and min(drawn.size) > 500
    first = json.loads((tmp_path / "curves.json").read_text())
    titles = ["none", "uniform 0.5", "uniform 0.25", "fastv 0.5", "fastv 0.25"]
    assert [row["title"] for row in first["rows"]] == titles
    assert all("answers" not in row for row in first["rows"])

    calls: list[str] = []
    original = evaluation._Runner.answers
    monkeypatch.setattr(evaluation._Runner, "answers", lambda self, r, p: calls.append(r.name) or original(self, r, p))
    _, err = compare(*argv)
    assert not calls and "taken over" in err
    assert json.loads((tmp_path / "curves.json").read_text())["rows"] == first["rows"]
    compare("--recipe", "none", "uniform", "pool", "--retain", 0.5)
    assert set(calls) == {"pool"}
    rows = json.loads((tmp_path / "curves.json").read_text())["rows"]
    assert {row["title"] for row in rows} == {*titles, "pool 0.5"}  # what was found before is not lost


def test_compare_notes_every_batch_while_it_runs(compare, tmp_path, monkeypatch):
    """In a journal, which is gone when the report is written."""
    original = evaluation._Runner.answers
    found: list[list[dict]] = []

    def breaks(self, recipe, processor):
        if recipe.name == "fastv":
            found.append([json.loads(line) for line in (tmp_path / "curves.json.journal").read_text().splitlines()])
            raise KeyboardInterrupt
        return original(self, recipe, processor)

    monkeypatch.setattr(evaluation._Runner, "answers", breaks)
    compare("--recipe", "uniform", "fastv", "--retain", 0.5, status=130)
    rows = {row["title"]: row["batches"] for row in json.loads((tmp_path / "curves.json").read_text())["rows"]}
    assert rows == {"none": 1, "uniform 0.5": 1, "fastv 0.5": 0}
    head, *batches = found[0]
    assert set(head) == {"settings", "asked"}
    assert [(line["batch"], len(line["answers"])) for line in batches] == [(0, 2), (0, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.json"]


def test_results_of_other_settings_are_not_mixed(compare, tmp_path):
    argv = ["--recipe", "uniform", "--retain", 0.5]
    compare(*argv)
    before = (tmp_path / "curves.json").read_text()
    _, err = compare(*argv, "--limit", 1, status=2)
    assert "different settings (limit)" in err
    assert (tmp_path / "curves.json").read_text() == before


# ----------------------------------------------------------------------------------------- what is taken over, and what not
USER = """
from dataclasses import dataclass
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod
from mmaccel.method.registry import register

@register
@dataclass(frozen=True)
class Users(ProjectorMethod):
    name = "users"
    summary = "a method of the user's"

    def reduce(self, tokens, count):
        return Reduction.top({sign}tokens.features.float().norm(dim=-1), tokens.valid, count)
"""


@pytest.fixture
def evaluated(folder, tmp_path, capsys, monkeypatch):
    """Runs ``eval`` on a copy of the questions; gives rows by title, standard error, and which recipes were asked."""
    for name in ("a.png", "b.jpg", "good.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    original, calls = evaluation._Runner.answers, []
    monkeypatch.setattr(evaluation._Runner, "answers", lambda self, r, p: calls.append(r.name) or original(self, r, p))

    def run(*argv, status=0, data="good.jsonl"):
        calls.clear()
        head = ["eval", "--model", folder / "llava", "--data", tmp_path / data, "--max-new-tokens", 2]
        _, err = command(capsys, *head, *argv, "--json", tmp_path / "out.json", status=status)
        report = json.loads((tmp_path / "out.json").read_text())
        assert not (tmp_path / "out.json.journal").exists()
        return {row["title"]: row for row in report["rows"]}, err, list(calls)

    return run


def test_a_method_whose_code_changed_is_run_again(evaluated, tmp_path, monkeypatch):
    import importlib
    import sys

    from mmaccel.method import registry

    known = dict(registry.methods())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(sign):
        (tmp_path / "users_methods.py").write_text(USER.format(sign=sign))
        sys.modules.pop("users_methods", None)
        importlib.invalidate_caches()
        importlib.import_module("users_methods")
        return evaluated("--recipe", "users", "fastv", "--retain", 0.25)

    try:
        first, _, calls = run("")
        assert set(calls) == {"none", "users", "fastv"}
        again, err, calls = run("")
        assert again == first and not calls
        assert "3 of 3 recipes are taken over from" in err and "none, users 0.25, fastv 0.25" in err
        changed, err, calls = run("-")
        assert set(calls) == {"users"}
        assert changed["fastv 0.25"] == first["fastv 0.25"]
        assert changed["users 0.25"]["figures"]["kl"] != first["users 0.25"]["figures"]["kl"]
        assert "users 0.25 is run again: code of users differs from" in err
        assert "2 of 3 recipes are taken over" in err
    finally:
        sys.modules.pop("users_methods", None)
        registry._methods.clear()
        registry._methods.update(known)


def test_one_token_and_all_tokens_are_two_rows(evaluated):
    """``1`` is a count and ``1.0`` a share, though 1 == 1.0."""
    one, _, _ = evaluated("--recipe", "divprune", "--retain", 1)
    assert list(one) == ["none", "divprune 1"] and one["divprune 1"]["figures"]["visual_tokens_kept"] < 2
    both, err, calls = evaluated("--recipe", "divprune", "--retain", 1.0)
    assert calls == ["divprune", "divprune"] and list(both) == ["none", "divprune 1.0", "divprune 1"]
    assert both["divprune 1.0"]["figures"]["visual_tokens_kept"] == both["none"]["figures"]["visual_tokens_kept"]
    assert both["divprune 1"] == one["divprune 1"] and "run again" not in err
    together, _, calls = evaluated("--recipe", "divprune", "--retain", 1, 1.0)
    assert together == both and not calls


def test_two_files_with_one_name_inside_are_two_rows(evaluated, tmp_path):
    (tmp_path / "sub").mkdir()
    for file, retain in (("x.json", 0.5), ("y.json", 0.25), ("sub/x.json", 0.1)):
        (tmp_path / file).write_text(mmaccel.Recipe("mine", (mmaccel.Stage("uniform", retain),)).to_json())
    files = [tmp_path / "x.json", tmp_path / "y.json"]
    rows, _, _ = evaluated("--recipe", *files)
    assert list(rows) == ["none", "mine (x.json) 0.5", "mine (y.json) 0.25"]
    assert [round(row["figures"]["visual_share_per_layer"], 2) for row in rows.values()] == [1.0, 0.5, 0.25]
    rows, _, calls = evaluated("--recipe", *files, tmp_path / "sub" / "x.json")
    assert len(rows) == 4 and all(title.startswith(("none", "mine (")) for title in rows)
    assert len(calls) == 2  # two batches of the new one
    rows, _, calls = evaluated("--recipe", tmp_path / "x.json")
    assert "mine 0.5" in rows and not calls  # the same recipe under a shorter name


def test_changed_questions_and_pictures_are_asked_again(evaluated, tmp_path):
    first, _, _ = evaluated("--recipe", "uniform", "--retain", 0.5)
    again, _, calls = evaluated("--recipe", "uniform", "--retain", 0.5)
    assert again == first and not calls
    zoo.image(120, 90, 5).save(tmp_path / "a.png")
    changed, err, calls = evaluated("--recipe", "uniform", "--retain", 0.5)
    assert len(calls) == 4
    assert "Nothing is taken over: 2 of 3 questions differ" in err and "good.jsonl, line 1, id 'first'" in err
    (tmp_path / "good.jsonl").write_text((tmp_path / "good.jsonl").read_text().replace("why is it ?", "why was it ?"))
    _, err, calls = evaluated("--recipe", "uniform", "--retain", 0.5)
    assert len(calls) == 4 and "1 of 3 questions differ" in err and "line 3" in err


def test_a_selector_that_was_trained_anew_is_run_again(folder, evaluated, tmp_path):
    import random_selectors

    from mmaccel.families import family_of
    from mmaccel.method.selector import ModelFingerprint

    family = family_of(zoo.model("llava"), zoo.processor("llava"))

    def train(seed):
        made = random_selectors.network(family.model.config.text_config.hidden_size, seed=seed)
        made.save(tmp_path / "selector", ModelFingerprint.of(family), {})

    train(0)
    mine = mmaccel.Recipe("mine", (mmaccel.Stage("learned", 0.25, {"selector": str(tmp_path / "selector")}),))
    (tmp_path / "mine.json").write_text(mine.to_json())
    _, _, calls = evaluated("--recipe", tmp_path / "mine.json")
    assert "mine" in calls
    assert not evaluated("--recipe", tmp_path / "mine.json")[2]
    train(1)
    _, err, calls = evaluated("--recipe", tmp_path / "mine.json")
    assert set(calls) == {"mine"} and "files of learned differs" in err


def test_a_run_that_was_killed_goes_on_at_its_batch(folder, tmp_path, monkeypatch, capsys):
    """Whatever moment it is killed at: the figures are those of a run in one piece."""
    argv = ["eval", "--model", folder / "llava", "--data", folder / "good.jsonl", "--max-new-tokens", 2]
    argv += ["--batch-size", 1, "--recipe", "uniform", "fastv", "--retain", 0.5, "--json"]
    command(capsys, *argv, tmp_path / "whole.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    out, original = tmp_path / "out.json", evaluation._Runner.answers

    class Killed(BaseException):
        pass

    asked: list[str] = []
    for number in range(1, 6):

        def answers(self, recipe, processor, number=number):
            asked.append(recipe.name)
            if len(asked) > 2:
                raise Killed
            return original(self, recipe, processor)

        monkeypatch.setattr(evaluation._Runner, "answers", answers)
        # the process is gone: nothing is written at the end
        monkeypatch.setattr("mmaccel.cli.shared.results.Results.save", lambda self, report: None)
        asked.clear()
        capsys.readouterr()
        with contextlib.suppress(Killed):
            main([str(one) for one in argv] + [str(out)])
        monkeypatch.undo()
        if number == 2:
            with open(f"{out}.journal", "ab") as file:
                file.write(b'{"row": {"recipe": "torn')
    command(capsys, *argv, out)
    report = json.loads(out.read_text())
    for now, before in zip(report["rows"], whole["rows"], strict=True):
        assert {k: v for k, v in now.items() if k != "answers"} == {k: v for k, v in before.items() if k != "answers"}
        assert now["answers"] == before["answers"]
    assert not Path(f"{out}.journal").exists()


def test_two_runs_on_one_file_are_refused(folder, tmp_path, capsys):
    from mmaccel.core.files import locked

    argv = ["eval", "--model", folder / "llava", "--data", folder / "good.jsonl", "--json", tmp_path / "out.json"]
    with locked(tmp_path / "out.json.journal", "x", "y"):
        _, err = command(capsys, *argv, status=2)
    assert f"Another run writes to {str(tmp_path / 'out.json')!r}; wait for it, or give another file." in err


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"settings": {}}', "\x00", '{"settings": 1, "asked": [], "rows": 5}']
)
def test_files_of_something_else_are_named(folder, tmp_path, capsys, content):
    argv = ["eval", "--model", folder / "llava", "--data", folder / "good.jsonl", "--json", tmp_path / "out.json"]
    (tmp_path / "out.json").write_text(content)
    _, err = command(capsys, *argv, status=2)
    assert f"{str(tmp_path / 'out.json')!r} exists and holds no results" in err
    assert err.rstrip().endswith("give another file, or delete this one.")
    assert (tmp_path / "out.json").read_text() == content and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["[]\n", '{"settings": {}}\n', "{}\n", "nonsense\n", "\x00\x00", '{"row": 1}\n'])
def test_journals_of_something_else_are_named_or_begun_anew(folder, tmp_path, capsys, content):
    argv = ["eval", "--model", folder / "llava", "--data", folder / "good.jsonl", "--max-new-tokens", 1]
    (tmp_path / "out.json.journal").write_text(content)
    capsys.readouterr()
    status = main([str(one) for one in (*argv, "--json", tmp_path / "out.json")])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if status:
        assert status == 2 and str(tmp_path / "out.json.journal") in err and "delete" in err
    else:
        assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["figures"]["questions"] == 3


# -------------------------------------------------------------------------------------------------- bad data ends itself
def refuses(recipe_name, word):
    """A stand-in for a recipe that cannot answer some questions."""
    original = evaluation._Runner._generate

    def generate(self, recipe, processor, inputs, longest, follow=None):
        if recipe.name == recipe_name and any(word in prompt.question for _, prompt in self.batch):
            raise mmaccel.UnsupportedError("this cannot be done.")
        return original(self, recipe, processor, inputs, longest, follow)

    return generate


def test_a_question_that_cannot_be_asked_does_not_take_its_batch_with_it(folder, tmp_path, capsys):
    """With a placeholder in it, about a picture that the processor refuses; the others as if they stood alone."""
    (tmp_path / "thin.png").write_bytes(b"")
    Image.new("RGB", (1, 224)).save(tmp_path / "thin.png")
    zoo.image(120, 90, 0).save(tmp_path / "a.png")
    lines = [
        {"image": "a.png", "question": "what ?"},
        {"id": "odd", "image": "a.png", "question": "what is <|image_pad|> ?"},
        {"image": "thin.png", "question": "what ?"},
        {"image": "a.png", "question": "why is it ?"},
        {"id": "odd", "image": "a.png", "question": "twice ?"},
        {"image": "a.png", "question": " "},
        {"image": "a.png", "question": "what ?", "earlier": 5},
        {"image": "a.png", "question": "what ?", "id": [1]},
        {"image": "a.png\0", "question": "what ?"},
        {"image": "a.png", "question": "half \ud800"},
        {"image": "a.png", "question": "and why " * 4096},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "q.jsonl").write_bytes(text.encode() + b'{"image": "a.png", "question": "\xff"}\n')
    argv = ["eval", "--model", folder / "qwen2_5_vl", "--max-new-tokens", 2, "--recipe", "uniform", "--retain", 0.5]
    out, err = command(capsys, *argv, "--data", tmp_path / "q.jsonl", "--json", status=measure.PARTIAL)
    report = json.loads(out)
    names = [[answer["name"] for answer in row["answers"]] for row in report["rows"]]
    assert names[0] == names[1]
    assert names[0] == ["line 1", "line 4"]
    told = "\n".join(report["complaints"])
    assert any(one.startswith("q.jsonl, line 3: ") for one in report["complaints"])
    for words in (
        "q.jsonl, line 2, id 'odd': The question holds '<|image_pad|>'",
        "aspect ratio must be smaller than 200",
        "q.jsonl, line 5: the id 'odd' is that of line 2 already",
        "q.jsonl, line 6: the text field 'question' is missing",
        "q.jsonl, line 7: the field 'earlier' must be",
        "q.jsonl, line 8: the field 'id' must be",
        "q.jsonl, line 9: ",
        "q.jsonl, line 10: ",
        "q.jsonl, line 11: The prompt has ",
        "q.jsonl, line 12: this is no text in UTF-8",
    ):
        assert words in told and words in err, told
    (tmp_path / "alone.jsonl").write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[3]) + "\n")
    alone = json.loads(command(capsys, *argv, "--data", tmp_path / "alone.jsonl", "--json").out)
    for one, other in zip(report["rows"], alone["rows"], strict=True):
        mine = [(a["answer"], a["full"]) for a in one["answers"]]
        assert mine == [(a["answer"], a["full"]) for a in other["answers"]]


def test_what_one_recipe_cannot_answer_is_named_for_that_recipe(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation._Runner, "_generate", refuses("uniform", "which"))
    argv = ["eval", "--model", folder / "llava", "--max-new-tokens", 2, "--recipe", "uniform", "fastv", "--retain", 0.5]
    argv += ["--data", folder / "good.jsonl", "--json", tmp_path / "out.json"]
    out, err = command(capsys, *argv, status=measure.PARTIAL)
    rows = {row["title"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert [row["figures"]["questions"] for row in rows.values()] == [3, 2, 3]
    assert rows["uniform 0.5"]["failed"] == [{"question": "good.jsonl, line 2", "error": "this cannot be done."}]
    assert "uniform 0.5: good.jsonl, line 2: this cannot be done." in err
    assert "note: uniform 0.5: 1 questions could not be answered" in out
    # a second run says so too
    _, err = command(capsys, *argv, status=measure.PARTIAL)
    assert "3 of 3 recipes are taken over" in err and "uniform 0.5: good.jsonl, line 2: this cannot be done." in err


def test_a_recipe_that_answers_nothing_leaves_the_others(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation._Runner, "_generate", refuses("uniform", ""))
    out, err = compare("--recipe", "uniform", "fastv", "--retain", 0.5, status=measure.PARTIAL)
    rows = {
        row["title"]: row["figures"]["questions"] for row in json.loads((tmp_path / "curves.json").read_text())["rows"]
    }
    assert rows == {"none": 3, "uniform 0.5": 0, "fastv 0.5": 3}
    assert (tmp_path / "curves.png").is_file() and "3 could not be used" in err


def test_an_unexpected_error_of_one_question_is_told_with_its_type(folder, capsys, monkeypatch):
    original = evaluation._Runner._generate

    def generate(self, *args, **named):
        if any("which" in prompt.question for _, prompt in self.batch):
            raise IndexError("out of range\nsecond line")
        return original(self, *args, **named)

    monkeypatch.setattr(evaluation._Runner, "_generate", generate)
    argv = ["eval", "--model", folder / "llava", "--max-new-tokens", 2, "--data", folder / "good.jsonl", "--json"]
    out, err = command(capsys, *argv, status=measure.PARTIAL)
    assert json.loads(out)["rows"][0]["figures"]["questions"] == 2
    assert "good.jsonl, line 2: The model cannot answer it (IndexError: out of range)." in err


def test_compare_leaves_out_what_the_model_cannot_do(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("mmaccel.cli.compare.RECIPES", ("none", "uniform", "vtc-cls"))
    argv = ["compare", "--model", folder / "qwen2_5_vl", "--data", folder / "good.jsonl", "--limit", 1, "--retain", 0.5]
    argv += ["--out", tmp_path / "c.svg", "--x", "kv"]
    out, err = command(capsys, *argv, status=measure.PARTIAL)
    assert "vtc-cls is left out" in err and "uniform 0.5" in out and (tmp_path / "c.svg").stat().st_size > 5000
    # asked for by name, it is an error
    assert "CLS" in command(capsys, *argv, "--recipe", "vtc-cls", status=2).err


def test_compare_says_what_is_wrong(compare, tmp_path, monkeypatch):
    assert "must end in" in compare("--out", tmp_path / "c.gif", status=2).err
    assert "does not exist" in compare("--out", tmp_path / "nowhere" / "c.png", status=2).err
    assert "did you mean" in compare("--recipe", "divprun", status=2).err
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "mmaccel[bench]" in compare(status=2).err


# ---------------------------------------------------------------------------------------------------------- quickstart
@pytest.fixture
def small_show(monkeypatch, tmp_path):
    """Quickstart with a tiny random model, two questions a task, and files in a folder that goes."""
    from mmaccel.cli import quickstart
    from mmaccel.programs.bench.run import Case
    from mmaccel.programs.bench.shapes import build, shape
    from mmaccel.programs.bench.workloads import ShapeSubject

    def workload(device):
        model = build("tiny", device, torch.float32)
        return ShapeSubject(model, shape("tiny")), Case("picture-336", 1, 1), "a tiny model on a picture"

    monkeypatch.setattr(quickstart, "_workload", workload)
    monkeypatch.setattr(quickstart, "_EACH", 2)
    monkeypatch.setattr(quickstart, "_EACH_CLIP", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.full
def test_quickstart_shows_speed_answers_and_pictures(folder, capsys, monkeypatch, small_show):
    pytest.importorskip("av")
    monkeypatch.setattr(ask, "SHIPPED_VIDEO", folder / "qwen2_5_vl")
    report = json.loads(command(capsys, "quickstart", "--recipe", "uniform", "--retain", 0.1, "--json").out)
    speed, (pictures, clips) = report["speed"], report["answers"]
    assert speed["recipe"] == "uniform 0.1" and speed["visual_tokens_kept"] == round(speed["visual_tokens"] * 0.1)
    assert all(len(taken) == 3 for taken in speed["first_token_seconds"].values())
    assert speed["kv_bytes"]["bare"] > 2 * speed["kv_bytes"]["uniform 0.1"]
    assert (pictures["model"], pictures["questions"], clips["questions"]) == ("mini-llava", 16, 5)
    # a tenth of the tokens costs answers, and every one that is lost is told
    lost = sum(one["lost"] for one in pictures["changed"])
    assert lost > 0 and pictures["accelerated_right"] == pictures["full_right"] - lost + len(pictures["changed"]) - lost
    assert clips["full_right"] == 0  # random weights
    for one, kind in zip(report["drawings"], (".png", ".mp4"), strict=True):
        assert Path(one["file"]).suffix == kind and Path(one["file"]).stat().st_size > 1000
        with Image.open(one["kept"]) as drawn:
            drawn.load()


def test_quickstart_says_what_it_does_while_it_does_it(capsys, monkeypatch, tmp_path, small_show):
    monkeypatch.setattr(ask, "SHIPPED_VIDEO", tmp_path / "nowhere")
    text, err = command(capsys, "quickstart", "--recipe", "vtc-cls", "--json", tmp_path / "told.json")
    assert not err and len(json.loads((tmp_path / "told.json").read_text())["answers"]) == 1
    # SigLIP, which the random model looks through, has no CLS token
    for words in (
        "1. Speed",
        "Not shown: vtc-cls needs a CLS",
        "2. Answers",
        ask.KNOWN,
        "no clip",
        "of 16 accelerated",
    ):
        assert words in text
    assert text.index("3. What vtc-cls") < text.index("picture-kept.png") < text.index("4. Next") and "s in all" in text


def test_kept_tokens_are_drawn_where_they_lie():
    """Every second token of the prompt: the drawn cells are dark exactly where they were dropped."""
    import numpy as np

    from mmaccel.media.draw import kept

    model, processor = zoo.model("llava"), zoo.processor("llava")
    inputs = encode(processor, [Prompt("what ?", (zoo.image(80, 60, 0),))])
    with torch.no_grad(), accelerated(model, "random", retain=0.5):
        model(**inputs)
        (segment,), reduction = model.mmaccel.layout.segments, model.mmaccel.reduction
    white = Image.new("RGB", (60, 60), "white")
    drawn = np.asarray(kept(white, segment, reduction))[5::10, 5::10, 0].reshape(-1)
    assert ((drawn == 255) == reduction.kept[0, segment.places].numpy()).all()
    nothing = replace(segment, tile=replace(segment.tile, cells=segment.tile.cells + torch.tensor([1, 0, 0])))
    assert (np.asarray(kept(white, nothing, reduction)) < 100).all()


def test_a_batch_of_pictures_whose_processor_takes_lists_for_pages():
    """GOT-OCR2: a picture each, not a page of one prompt each."""
    processor = zoo.processor("got_ocr2")
    asked = [Prompt("read it", (zoo.image(80, 60, seed),)) for seed in (0, 1)]
    inputs = encode(processor, asked)
    assert len(inputs["pixel_values"]) == 2
    assert (inputs["input_ids"] == processor.image_token_id).sum(1).tolist() == [256, 256]
    assert torch.equal(encode(processor, asked[:1])["pixel_values"][0], inputs["pixel_values"][0])


# ------------------------------------------------------------------------------------------------------------- fallback
def test_answers_with_a_fallback_and_what_they_cost():
    """Tokens are those of all readings, of every row as many as it took."""
    model, processor = zoo.model("llava"), zoo.processor("llava")
    rows = [Row("divprune", 0.25), *(Row("divprune", 0.25, {"fallback": one}) for one in (1.0, 1e-9)), Row("none")]
    few, again, sure, full = asked(model, processor, questions(), rows, batch_size=3).values()
    assert rows[1].title == "divprune 0.25, fallback 1"
    assert [one.answer for one in again] == [one.full for one in again] and all(one.same for one in again)
    assert [one.answer for one in sure] == [one.answer for one in few]
    assert [one.kl for one in again] == [one.kl for one in sure] == [one.kl for one in few]
    figures = [row.figures() for row in rows]
    assert [one["read_again"] for one in figures] == [0, 1, 0, 0]
    for name in ("visual_tokens_kept", "visual_tokens_per_layer"):
        assert figures[1][name] == pytest.approx(figures[0][name] + figures[3][name])
        assert figures[2][name] == pytest.approx(figures[0][name])


def test_the_command_takes_a_fallback(tmp_path, capsys):
    argv = ["eval", "--recipe", "divprune", "--retain", "0.1", "--suite", "colour", "--limit", "2", "--json"]
    assert main([*argv, str(tmp_path / "one.json"), "--fallback", "1.0"]) == 0
    assert "read again" in capsys.readouterr().out
    report = json.loads((tmp_path / "one.json").read_text())
    assert report["rows"][1]["title"] == "divprune 0.1, fallback 1" and report["rows"][1]["figures"]["loyalty"] == 1
    # another threshold is another row, and one that cannot be had is refused before a model is loaded
    assert main([*argv, str(tmp_path / "one.json"), "--fallback", "0.5"]) == 0
    assert len(json.loads((tmp_path / "one.json").read_text())["rows"]) == 3
    assert main([*argv, str(tmp_path / "two.json"), "--fallback", "auto"]) == 2
    assert "mmaccel tune --fallback" in capsys.readouterr().err
