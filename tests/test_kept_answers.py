"""Which recipe keeps the answers: rows of the tables, their questions, and that pages say what the published results say."""

import json
import sys
import tomllib
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmaccel.errors import MmaccelError
from mmaccel.programs.tune.evaluate import Measurement

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import answers  # noqa: E402
import negative  # noqa: E402


@pytest.mark.parametrize("kind", answers.KINDS)
def test_every_row_is_a_recipe(kind):
    titles = answers.titles(kind)
    assert len(titles) == len(set(titles)) > 30
    for title in titles:
        answers.recipe_of(title).build()


def test_a_row_may_combine_stages():
    together = answers.recipe_of("aim-merge:0.5+vl-cache:0.2+kivi")
    assert [(stage.method, stage.retain) for stage in together.stages] == [
        ("aim-merge", 0.5),
        ("vl-cache", 0.2),
        ("kivi", None),
    ]


def test_a_row_may_have_weights():
    weighed = answers.recipe_of("centerclip:0.1:proportional")
    assert weighed == answers.recipe_of("centerclip:0.1").override(proportional="all")


def test_questions_are_no_others_and_stay_when_more_are_asked():
    few, many = ([q.name for q in islice(answers.asked("clips", count), 7)] for count in (7, 40))
    assert few == many and all(int(name.rsplit("-", 1)[1]) >= answers.FIRST for name in few)
    assert len({name.rsplit("-", 1)[0] for name in few[:5]}) == 5


def test_the_front_is_what_nothing_beats():
    assert answers.front([(50, 90), (25, 90), (10, 60), (30, 80), (100, 100)]) == [(10, 60), (25, 90), (100, 100)]


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch):
    """Of two batches and two recipes every one is asked once, however often the run is broken off; a refusal is told."""
    asked = []

    class AnsweredBatch:
        def __init__(self, model, processor, batch, longest, timed):
            self.names = [question.name for question, _ in batch]

        def measure(self, recipe):
            if recipe.name == "vtc-cls":
                raise MmaccelError("no CLS")
            if len(asked) in stops:
                stops.discard(len(asked))
                raise KeyboardInterrupt
            asked.append((recipe.name, self.names))
            spent = {"ttft": 1.0, "tokens": 1.0, "kv": 1.0}
            return Measurement((True,) * 2, (0.0,) * 2, (0.0,) * 2, spent, spent)

    stops = {1, 3}
    monkeypatch.setattr(answers, "AnsweredBatch", AnsweredBatch)
    monkeypatch.setattr(answers, "load", lambda name, **options: (None, None))
    monkeypatch.setattr(answers, "fingerprint", lambda model: "one")
    monkeypatch.setattr(answers, "asked", lambda kind, count, split: [_question(number) for number in range(count)])
    args = SimpleNamespace(
        kind="clips",
        questions=4,
        batch_size=2,
        minutes=None,
        threads=1,
        split="test",
        device="cpu",
        dtype="float32",
        out=tmp_path / "a.json",
        recipes=["none", "vtc-cls", "pool"],
    )
    for _ in range(3):
        report = {"model": "mini-qwen-vl", "kind": "clips", "rows": {}, "refused": {}}
        if args.out.exists():
            report = json.loads(args.out.read_text())
        try:
            answers.run(args, report)
        except KeyboardInterrupt:
            continue
    assert asked == [(name, names) for names in (["0", "1"], ["2", "3"]) for name in ("none", "pool")]
    assert report["refused"] == {"vtc-cls": "no CLS"} and len(report["rows"]["pool"]["kept"]) == 4
    monkeypatch.setattr(answers, "fingerprint", lambda model: "another")
    with pytest.raises(MmaccelError, match="another model"):
        answers.run(args, report)


def test_recipes_are_compared_question_by_question():
    def row(kept):
        return Measurement(tuple(map(bool, kept)), (0.0,) * len(kept), (0.0,) * len(kept), {}, {})

    rows = {"divprune:0.1": row([1, 0, 0, 0, 0, 0, 0, 1]), "pool:0.1": row([0, 1, 1, 1, 1, 1, 1, 1, 1])}
    rows |= {"tome:0.1": row([1] * 8), "pool:0.5": row([1]), "divprune:0.1+kivi": row([1])}
    said = [answers.against(title, rows) for title in rows]
    # 1 of 7 and 0 of 6: two tails of binomials by hand
    assert answers.sign_test(6, 1) == pytest.approx(2 * (1 + 7) / 2**7) and answers.sign_test(2, 2) == 1
    assert said == ["", "+6 -1, may be chance", f"+6 -0, p {2 / 2**6:.2g}", "", ""]


def test_a_warning_names_the_largest_budget_at_which_documents_lose_answers():
    def row(kept, asked):
        counts = {"ttft": 1.0, "tokens": 1.0, "kv": 1.0}
        return Measurement((True,) * kept + (False,) * (asked - kept), (0.0,) * asked, (0.0,) * asked, counts, counts)

    rows = {
        "document:0.5": row(60, 60),
        "document:0.25": row(50, 60),
        "document:0.1": row(30, 60),
        "tova:0.4": row(1, 60),
    }
    report = {"model": "mini-smol", "rows": {title: measured.as_dict() for title, measured in rows.items()}}
    (loss,) = tomllib.loads(answers.losses(report))["loss"]
    assert (loss["recipe"], loss["retain"]) == ("document", 0.25)
    assert loss["sentence"] == (
        "document at 25% kept 83% of 60 answers of mini-smol about receipts, signs, notes, tables, charts and screens, and "
        "100% at 50%: give a larger budget, or measure with mmaccel eval"
    )
    report["rows"]["document:0.25"] = rows["document:0.5"].as_dict()
    assert tomllib.loads(answers.losses(report))["loss"][0]["retain"] == 0.1
    report["rows"] = {"document:0.5": rows["document:0.5"].as_dict()}
    assert "loss" not in tomllib.loads(answers.losses(report))


def _question(number):
    return SimpleNamespace(name=str(number), load=lambda: SimpleNamespace(pictures=(), clip=None))


def test_the_page_says_what_the_results_say():
    page = (ROOT / "docs" / "results" / "negative.md").read_text(encoding="utf-8")
    for name, table in (("negative", negative.table), ("grounds", negative.grounds), ("seeing", negative.seeing)):
        assert f"<!-- {name} -->\n{table()}\n<!-- /{name} -->" in page, name


def test_small_models_stand_beside_the_real_one():
    """All recipes that both were asked about at one budget, the largest difference first."""
    lines = [line.split(" | ") for line in negative.grounds().splitlines() if line.startswith("| `")]
    differences = [int(line[6]) for line in lines]
    assert differences == sorted(differences) and differences[0] < -90
    real = {title for title in negative.counts(negative.REAL) if "kvpress" not in title}
    small = {**negative.shares("answers-pictures"), **negative.shares(negative.RIGHT)}
    assert {f"{line[0][3:-1]}:{line[1]}".rstrip(":") for line in lines} == (real & set(small)) - {"none"}
    (fastv,) = (line for line in lines if line[0] == "| `fastv`")
    right, asked = negative.counts(negative.REAL)["fastv:0.25"]
    assert (
        fastv[2] == f"{100 * negative.shares('answers-pictures')['fastv:0.25']:.1f}%"
        and fastv[5].startswith(f"{100 * right / asked:.1f}% (")
        and "default 0 of 8, `layer=10` 0 of 4, `layer=15`" in fastv[7]
    )
    (adakv,) = (line for line in lines if line[0] == "| `adakv`")
    assert adakv[2] == "96.0% right"
