"""``mmaccel tune --draft-layers``: layers are judged by answers of the model, and written where lossless drafts take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

from mmaccel import Fallback, MmaccelError, accelerate_vlm, accelerated, get_recipe
from mmaccel.accelerate.tuned import fingerprint
from mmaccel.cli import main
from mmaccel.core.files import write_whole
from mmaccel.families import family_of
from mmaccel.programs.drafts import drafts_identity, drafts_title, for_recipe
from mmaccel.programs.evaluate import Question, ask_suite, batches, inputs_of
from mmaccel.programs.tune import draft_layers
from mmaccel.programs.tune.draft_layers import find_draft_layers, verdict
from mmaccel.recipe import TunedRecipe

NEW = 12
#: seconds in which every layer costs as much: a forward is free but for its layers
SECONDS = {"forward": {"1": 1.0, "2": 1.0, "4": 1.0, "8": 1.0, "16": 1.0}, "layer": {"full_attention": 0.2}}


def questions(count: int) -> list[Question]:
    """Questions about different pictures, as a model of the zoo reads them."""
    return ask_suite(["colour"], count)


@pytest.fixture
def idle() -> Any:
    """A model with five layers, of which two do nothing: without them it drafts what it would have said."""
    model = zoo.model("llava", num_hidden_layers=5)
    for number in (2, 4):
        layer = family_of(model).text.layers[number]
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_layers._Search, "_measured", lambda self: SECONDS)


def found(model: Any, folder: Path, count: int = 12, **options: Any) -> draft_layers.FoundLayers:
    given = {"out": folder / "recipe.json", "max_new_tokens": NEW, "batch_size": 4, **options}
    return find_draft_layers(model, zoo.processor("llava"), questions(count), **given)


def test_layers_that_do_nothing_are_found_and_used(idle: Any, tmp_path: Path, costs: None) -> None:
    """Two of five layers change nothing, and a draft step without them costs .6 of a step: they and no others are skipped."""
    result = found(idle, tmp_path)
    assert result.layers == (2, 4) and result.report["acceptance"] == 1.0
    assert result.report["draft step"] == pytest.approx(0.6) and result.report["promised"] > 1.2
    held = result.report["held out"]
    assert held["questions"] == held["same answers"] == 4 and held["accepted"] == held["drafted"] > 0
    recipe = get_recipe(tmp_path / "recipe.json")
    assert isinstance(recipe, TunedRecipe) and recipe.tuned["model"] == fingerprint(idle)
    feed = zoo.inputs("llava")
    bare = idle.generate(**feed, max_new_tokens=40, do_sample=False)
    with accelerated(idle, tmp_path / "recipe.json", lossless=True):
        assert idle.mmaccel.drafts.skipped == (2, 4)
        assert torch.equal(idle.generate(**feed, max_new_tokens=40, do_sample=False), bare)
        sources = idle.mmaccel.stats().drafting["sources"]
    assert list(sources) == ["layers"] and sources["layers"]["accepted"] == sources["layers"]["drafted"] > 0
    # a draft that is given, and an answer that need not be the bare model's, have none of it
    with accelerated(idle, recipe, lossless=True, draft="self"):
        assert idle.mmaccel.drafts.skipped == ()
    with accelerated(idle, recipe):
        assert not idle.mmaccel.drafts


def test_the_rate_is_that_of_drafts_of_one_token(tmp_path: Path) -> None:
    """A token is drafted behind every token of an answer, from keys that all layers have made: read one by one, the likeliest
    tokens without some layers are those that are counted, but for keys of the answer, which both make without them."""
    model, processor = zoo.model("llava", num_hidden_layers=4), zoo.processor("llava")
    answers = draft_layers._Answers(model, processor, questions(3), 2, 6, None)
    answers.make(lambda *_: None)
    layers = family_of(model).text.layers
    right = tested = 0
    for batch in batches(questions(3), 1):
        inputs = inputs_of(model, processor, batch)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            begin = inputs["input_ids"].shape[1]
            cache = model(**inputs, use_cache=True).past_key_values
            handles = [layers[2].register_forward_hook(lambda module, args, kwargs, output: args[0], with_kwargs=True)]
            for place in range(begin, out.shape[1] - 1):
                # the layer stores keys all the same, as one that is skipped does not; nobody reads them
                logits = model(input_ids=out[:, place : place + 1], past_key_values=cache).logits
                right += int(logits[0, -1].argmax() == out[0, place + 1])
                tested += 1
            handles[0].remove()
    assert answers.matches([layers[2]]) == (right, tested) and 0 < right < tested
    assert answers.matches([]) == (tested, tested)


def test_layers_that_do_not_pay_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where skipping layers saves no time there is nothing to find, however right the drafts are."""
    free = {**SECONDS, "layer": {"full_attention": 0.0}}
    monkeypatch.setattr(draft_layers._Search, "_measured", lambda self: free)
    result = found(zoo.model("llava", num_hidden_layers=4), tmp_path)
    assert result.recipe is None and result.layers == () and "no layers can be skipped" in verdict(result)
    assert not (tmp_path / "recipe.json").exists()


def test_an_interrupted_search_resumes(idle: Any, tmp_path: Path, costs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the journal is not done again: neither sets of layers, nor answers, nor held-out questions."""
    few = found(idle, tmp_path, trials=3)
    assert few.report["sets tried"] == 3
    tried: list[int] = []
    matches = draft_layers._Answers.matches
    monkeypatch.setattr(
        draft_layers._Answers, "matches", lambda self, layers: tried.append(len(layers)) or matches(self, layers)
    )
    whole = found(idle, tmp_path)
    assert whole.layers == (2, 4) and len(tried) == whole.report["sets tried"] - 3 > 0
    monkeypatch.setattr(draft_layers._Answers, "_answered", lambda *_: pytest.fail("answered again"))
    monkeypatch.setattr(draft_layers, "_generate", lambda *_, **__: pytest.fail("answered again"))
    parts: list[str] = []
    again = found(idle, tmp_path, progress=lambda what, done, of: parts.append(what))
    assert again.report == whole.report and "answering with drafts" in parts
    with pytest.raises(MmaccelError, match="different settings"):
        found(idle, tmp_path, count=13)


def test_time_that_is_over_ends_the_search(idle: Any, tmp_path: Path, costs: None) -> None:
    assert found(idle, tmp_path, minutes=0).report["sets tried"] == 0


def test_few_sets_are_tried_where_layers_are_alike(idle: Any, tmp_path: Path, costs: None) -> None:
    """A layer that left less than another has left now is not tried again: more layers leave no more."""
    assert found(idle, tmp_path).report["sets tried"] < 4 + 3 + 2


def test_a_fallback_of_the_recipe_stays_if_it_is_of_this_model(idle: Any, tmp_path: Path, costs: None) -> None:
    net = {"threshold": 0.5}
    for digest, kept in ((fingerprint(idle), True), ("another", False)):
        base = TunedRecipe.of(get_recipe("divprune"), "net", {"model": digest, "fallback": net})
        path = tmp_path / f"{digest}.json"
        write_whole(path, base.to_json().encode())
        (folder := tmp_path / f"of-{digest}").mkdir()
        recipe = found(idle, folder, recipe=path).recipe
        assert recipe is not None and recipe.tuned["model"] == fingerprint(idle)
        assert ("fallback" in recipe.tuned) is kept
        if kept:
            assert Fallback.of(True, recipe) == Fallback(0.5)
        assert [stage.kind.name for stage in recipe.stages] == ["divprune"]


def test_programs_resume_only_what_the_same_layers_have_drafted() -> None:
    """The layers of the recipe are drafts like any other in titles and identities."""
    recipes = [TunedRecipe.of(get_recipe("none"), "mine", {"draft": {"layers": layers}}) for layers in ([8, 9], [8])]
    drafts = [for_recipe({"lossless": True}, recipe) for recipe in recipes]
    assert drafts_title(drafts[0]) == "lossless, draft [8, 9]"
    assert drafts_identity(drafts[0]) != drafts_identity(drafts[1])
    assert for_recipe({}, recipes[0]) == {} and for_recipe({"lossless": True}, get_recipe("none")) == {"lossless": True}


@pytest.mark.parametrize("wrong", [[8], {}, {"layers": []}, {"layers": "8"}, {"layers": 8}, None, "8"])
def test_a_broken_file_is_refused(wrong: Any) -> None:
    recipe = TunedRecipe.of(get_recipe("none"), "mine", {"draft": wrong})
    with pytest.raises(MmaccelError, match="names no layers"):
        accelerate_vlm(zoo.model("llava"), recipe, lossless=True)


def test_layers_that_the_model_does_not_have_are_named() -> None:
    recipe = TunedRecipe.of(get_recipe("none"), "mine", {"draft": {"layers": [1, 77]}})
    with pytest.raises(MmaccelError, match=r"can skip \[1.*got \[77\]"):
        accelerate_vlm(zoo.model("llava"), recipe, lossless=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "resize"}, "works on pixels"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"minutes": -1}, "minutes must be at least 0, got -1"),
        ({"out": "recipe.txt"}, "must end in .json"),
        ({"count": 3}, "needs at least 10 samples"),
        ({"max_new_tokens": 1}, "ask for longer answers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_values_are_refused(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(MmaccelError, match=words):
        found(zoo.model("llava"), tmp_path, **options)


def test_models_that_cannot_be_tried_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MmaccelError, match="no layer that can be skipped"):
        found(zoo.model("llava", num_hidden_layers=1), tmp_path)
    model = zoo.model("llava")
    accelerate_vlm(model, "divprune")
    with pytest.raises(MmaccelError, match="on the bare model"):
        found(model, tmp_path)
    model.mmaccel.remove()


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "gemma3", "qwen3_5"]
)  # by choice: positions, windows, recurrent states
def test_prompts_of_several_batches_stay_apart(family: str) -> None:
    """The model remembers where its last prompt ended; every part of the answers goes on behind its own."""
    model, processor = zoo.model(family), zoo.processor(family)
    answers = draft_layers._Answers(model, processor, questions(5), 2, 6, None)
    answers.make(lambda *_: None)
    assert len(answers.parts) == 3
    first = answers.matches([])
    assert first[0] == first[1] > 0 and answers.matches([]) == first


def test_the_command_writes_what_it_finds(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shipped model: the exit status says whether drafts pay, and a file is there only if they do."""
    saving = {**SECONDS, "layer": {"full_attention": 0.24}}
    monkeypatch.setattr(draft_layers._Search, "_measured", lambda self: saving)
    out = tmp_path / "drafts.json"
    argv = ["tune", "--suite", "reading", "--limit", "12", "--draft-layers", "--max-new-tokens", "6", "-o", str(out)]
    status = main([*argv, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == (0 if report.get("held out", {}).get("times as fast", 0) >= 1 else 3)
    assert report["sets tried"] > 0 and out.exists() == bool(report["layers"])
    assert main([*argv, "--fallback"]) == 2
    assert "--fallback or --draft-layers" in capsys.readouterr().err
    assert main([*argv, "--recipe", "none", "--recipe", "divprune"]) == 2
    assert "one --recipe" in capsys.readouterr().err
