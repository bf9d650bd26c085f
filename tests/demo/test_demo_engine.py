"""Asking, measuring and drawing, without a page."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import shutil
import subprocess
import threading
import time
import types
import weakref
from html import escape

import numpy as np
import pytest
import torch
import zoo
from gate import Gate
from mmaccel_demo import cards, engine, examples, limits, overlay
from mmaccel_demo.visitors import STREAMS, VISITORS, Live, Visitors
from tail import few

from mmaccel import MmaccelError, Recipe, Reduction, Stage, accelerated, is_accelerated, recipes
from mmaccel.cli import ask
from mmaccel.core.transformers_api import cache_of
from mmaccel.media.files import Clip, Prompt, encode
from mmaccel.programs import model_lock

OPTIONS = argparse.Namespace(model=None, device="cpu", dtype="auto", attn=None, trust_remote_code=False)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """With the shipped model for pictures alone."""
    found = engine.House(OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ask, "SHIPPED_VIDEO", tmp_path_factory.mktemp("none"))
        found.load()
    return found


@pytest.fixture(scope="module")
def films():
    """An engine that takes clips, with random weights."""
    return engine.Engine(zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl"), "tiny")


def clip(frames=8, still=4):
    """Frames of noise, the first ``still`` of them alike."""
    pixels = np.random.default_rng(0).integers(0, 255, (frames, 64, 96, 3), dtype=np.uint8)
    pixels[:still] = pixels[0]
    return Clip(pixels, list(range(frames)), frames, 4.0)


def answered(where, prompt, *names, longest=8, **changes):
    chosen = [limits.recipe(name).override(**changes) for name in names]
    *earlier, last = where.ask(prompt, chosen, longest, threading.Event())
    return last


def scene(files):
    return Prompt(files.question, (limits.picture(str(files.png)),))


# ------------------------------------------------------------------------------------------------------------- engine


def test_an_exchange(house, files):
    where = house.engine("picture")
    stages = []
    for exchange in where.ask(scene(files), [limits.recipe("divprune", 0.25)], 8, threading.Event()):
        stages.append((exchange.full.state, exchange.fast[0].state, exchange.full.text))
    assert stages[0][:2] == ("runs", "waits") and stages[-1][:2] == ("done", "done")
    assert ("done", "runs") in [stage[:2] for stage in stages], "one after the other"
    assert exchange.full.text == files.answer
    report = exchange.report()
    fast = report["accelerated"][0]
    assert (report["full"]["visual_tokens_kept"], fast["visual_tokens_kept"]) == (196, 49)
    assert fast["kv_bytes"] < report["full"]["kv_bytes"]
    assert fast["agreement"]["same_answer"] == (exchange.fast[0].text == exchange.full.text)
    assert not is_accelerated(where.model)
    # the figures are those of the command line
    direct = ask.answer(where.model, where.processor, _encoded(where, files), "none", 8)
    assert (direct.answer, direct.kv_bytes) == (exchange.full.text, report["full"]["kv_bytes"])


def _encoded(where, files):
    return encode(where.processor, [scene(files)])


def test_text_grows_token_by_token(films):
    prompt = Prompt("what?", clip=clip())
    watched, seen = threading.Event(), []
    for exchange in films.ask(prompt, [limits.recipe("uniform")], 6, watched):
        seen.append((exchange.full.tokens, exchange.full.text))
    full = exchange.full.answer
    assert seen[-1] == (full.new_tokens, full.answer)
    assert all(full.answer.startswith(text) for _, text in seen)


def test_stopping_in_the_middle(films):
    stop, prompt = threading.Event(), Prompt("what?", clip=clip())
    for exchange in films.ask(prompt, [limits.recipe("uniform")], 200, stop):
        if exchange.full.tokens >= 3:
            stop.set()
    assert (exchange.full.state, exchange.fast[0].state) == ("stopped", "stopped")
    assert 3 <= exchange.full.tokens < 200
    assert exchange.full.answer is None and exchange.fast[0].agreement is None
    assert not films.lock.locked() and not is_accelerated(films.model)
    shown = cards.columns(exchange)
    assert shown.count('data-state="stopped"') == 2
    assert f"{escape(exchange.full.text)} …</p>" in shown, "what is missing is seen to be missing"
    table = list(cards.comparison(exchange)["answer"])
    assert table == [f"{exchange.full.text} … (stopped)", "(stopped)"]


@pytest.mark.parametrize(
    ("at", "full", "fast", "tokens"),
    [
        (1, "stopped", "stopped", 0),  # the warm-up, of as many tokens as the answer
        (4, "stopped", "stopped", 0),
        (5, "stopped", "stopped", 0),  # prefill
        (7, "stopped", "stopped", 2),  # decoding
        (9, "done", "stopped", 0),  # the same of the accelerated model
        (13, "done", "stopped", 0),
        (15, "done", "stopped", 2),
    ],
)
def test_the_first_stop_counts(films, at, full, fast, tokens):
    """Pressed during the ``at``-th pass, it is seen at once, and that pass is the last."""
    stop, seen = threading.Event(), []
    with Gate(films.model, at, stop.set) as gate:
        for exchange in films.ask(Prompt("what?", clip=clip()), [limits.recipe("uniform")], 4, stop):
            if exchange.stopping:
                seen.append(cards.columns(exchange))
                gate.open()
    assert gate.passes == at and "stops at its next token" in seen[0]
    columns = (exchange.full, exchange.fast[0])
    assert tuple(one.state for one in columns) == (full, fast)
    assert columns[full == "done"].tokens == tokens
    assert "next token" not in cards.columns(exchange) and not films.lock.locked()


def test_who_leaves_stops_the_run(films):
    run = films.ask(Prompt("what?", clip=clip()), [limits.recipe("uniform")], 200, threading.Event())
    next(run)
    run.close()
    assert not films.lock.locked()


@pytest.fixture
def slow(films, monkeypatch):
    """Time passes by a second with every block of the model, of which it has eight, and never otherwise; yields the clock."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        model_lock, "time", types.SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    )
    monkeypatch.setattr(films, "seconds", 10.0)

    def wait(*about):
        clock.now += 1

    inner = films.model.model
    blocks = (*inner.visual.blocks, *inner.language_model.layers)
    assert len(blocks) == 8
    handles = [block.register_forward_hook(wait) for block in blocks]
    yield clock
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("seconds", [2, 6, 8, 10, 16, 18])
def test_a_question_takes_no_longer_than_it_may(films, slow, seconds):
    """In the tower, in a prefill or while decoding; and the model can be asked again."""
    prompt, stop, shown = Prompt("what?", clip=clip()), threading.Event(), []
    films.seconds = seconds
    with pytest.raises(MmaccelError, match=f"limit of {seconds} seconds .* ask for a shorter answer") as caught:
        shown.extend(films.ask(prompt, [limits.recipe("divprune")], 100, stop))
    assert slow.now == seconds + 1
    assert cards.sentence(caught.value) == str(caught.value)
    assert not films.lock.locked() and not is_accelerated(films.model)
    films.seconds = 60.0
    assert answered(films, prompt, "divprune", longest=1).fast[0].state == "done"


def test_what_was_answered_in_time_is_shown(films, slow):
    """The answer of the full model, when the time is over while a recipe runs."""
    films.seconds = 20.0
    run = films.ask(Prompt("what?", clip=clip()), [limits.recipe("uniform")] * 2, 1, threading.Event())
    with pytest.raises(MmaccelError, match="limit of 20 seconds"):
        while exchange := next(run):
            pass
    assert [one.state for one in (exchange.full, *exchange.fast)] == ["done", "stopped", "stopped"]


def test_waiting_for_the_model_takes_no_time(films, slow):
    films.seconds, found = 40.0, []
    prompt = Prompt("what?", clip=clip())
    asking = threading.Thread(target=lambda: found.append(answered(films, prompt, "uniform", longest=1)))
    with films.lock:
        asking.start()
        asking.join(0.5)
        slow.now += 1000
    asking.join()
    assert found[0].fast[0].state == "done"


def test_a_stream_takes_no_longer_than_it_may(films, slow):
    """What is pushed, or asked, after the time was over once gives what it would have given."""
    live, other = (Live(films, limits.recipe("infinipot-v"), clip(12), cap=128, chunk=4) for _ in range(2))
    for one in (live, other):
        films.seconds = 5.0
        if one is live:
            with pytest.raises(MmaccelError, match="limit of 5 seconds"):
                live.step()
            assert (live.session.frames, live.points, live.next) == (0, [], 0)
        films.seconds = 60.0
        one.step()
        films.seconds = 5.0
        if one is live:
            with pytest.raises(MmaccelError, match="limit of 5 seconds"):
                live.ask("what?", 20)
        films.seconds = 60.0
    assert live.ask("what?", 2) == other.ask("what?", 2)
    assert live.points == other.points


def test_what_stands_for_pixels_is_no_question(house, films, files):
    with pytest.raises(MmaccelError, match=r"holds '<\|video_pad\|>', which is a placeholder of pixels"):
        answered(films, Prompt("what is <|video_pad|>?", clip=clip()), "uniform")
    with pytest.raises(MmaccelError, match="holds '<image>', which is a placeholder of pixels"):
        answered(house.engine("picture"), Prompt("<image>?", scene(files).pictures), "uniform")
    live = Live(films, limits.recipe("infinipot-v"), clip(12), cap=128, chunk=4)
    live.step()
    with pytest.raises(MmaccelError, match=r"holds '<\|image_pad\|>'"):
        live.ask("<|image_pad|>?", 2)


def test_two_at_once_do_not_mix(house, files):
    where = house.engine("picture")
    other = Prompt(files.other_question, (limits.picture(str(files.other)),))
    found = {}

    def visit(name, prompt):
        found[name] = answered(where, prompt, "divprune", retain=0.5)

    alone = [answered(where, one, "divprune", retain=0.5) for one in (scene(files), other)]
    threads = [threading.Thread(target=visit, args=pair) for pair in (("a", scene(files)), ("b", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, expected in zip("ab", alone, strict=True):
        assert found[name].full.text == expected.full.text
        assert torch.equal(found[name].fast[0].answer.ids, expected.fast[0].answer.ids)


def test_refusals(house, films, files):
    where = house.engine("picture")
    with pytest.raises(MmaccelError, match="needs a CLS token"):
        answered(films, Prompt("what?", clip=clip()), "vtc-cls")
    with pytest.raises(MmaccelError, match="takes no video"):
        answered(where, Prompt("what?", clip=clip()), "uniform")
    # of several the others go on
    last = answered(films, Prompt("what?", clip=clip()), "vtc-cls", "uniform")
    assert [one.state for one in last.fast] == ["refused", "done"]
    said = list(cards.comparison(last)["answer"])
    assert "needs a CLS token" in said[1] and not any("not with this model" in text for text in said)


def test_the_house(house, monkeypatch, tmp_path):
    assert "mini-llava" in house.sentence() and house.ready
    names = [one.name for one in house.choices["picture"]]
    assert "vtc-cls" in names and "none" not in names
    monkeypatch.setattr(ask, "SHIPPED_VIDEO", tmp_path / "nothing")
    alone = engine.House(OPTIONS)
    with pytest.raises(MmaccelError, match="being loaded"):
        alone.engine("picture")
    alone.load()
    with pytest.raises(MmaccelError, match="No model that takes videos comes with"):
        alone.engine("video")
    assert "No model that takes videos" in alone.sentence()
    # a model for pictures only, named by the one who starts the demo
    named = engine.House(argparse.Namespace(**{**vars(OPTIONS), "model": str(ask.SHIPPED)}))
    named.load()
    assert named.engine("picture").name == "mini-llava"
    with pytest.raises(MmaccelError, match="mini-llava takes no clips"):
        named.engine("video")
    missing = engine.House(argparse.Namespace(**{**vars(OPTIONS), "model": str(tmp_path / "gone")}))
    missing.load()
    with pytest.raises(MmaccelError, match="There is no folder"):
        missing.engine("picture")
    assert not missing.choices


def test_progress_while_loading(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(ask, "SHIPPED_VIDEO", tmp_path)

    def note(loading, name, value):
        object.__setattr__(loading, name, value)
        seen.append((loading.what, loading.share))

    monkeypatch.setattr(engine.Loading, "__setattr__", note)
    engine.House(OPTIONS).load()
    shares = [share for what, share in seen if what == "weights" and share]
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10
    loading = engine.Loading("mine", what="weights", share=0.5)
    assert loading.sentence().startswith("mine is being loaded: weights, 50% (")


# ------------------------------------------------------------------------------------------------------------ overlay


def titles(html):
    return re.findall(r"<title>(.*?)</title>", html)


def test_dropped_tokens_and_scores(house, files):
    view = answered(house.engine("picture"), scene(files), "vtc-cls", retain=0.25).fast[0].view
    assert [step.title for step in view.steps] == ["before the recipe: every token", "projector: vtc-cls"]
    drawn = titles(overlay.draw(view, 1))
    kept = [t for t in drawn if ": kept" in t]
    assert (len(drawn), len(kept), sum(": dropped" in t for t in drawn)) == (196, 49, 147)
    score = [float(re.search(r"cls attention ([\d.e-]+)", t)[1]) for t in drawn]
    assert min(s for s, t in zip(score, drawn, strict=True) if t in kept) >= max(
        s for s, t in zip(score, drawn, strict=True) if t not in kept
    )
    assert drawn[15].startswith("token 16 of 196, row 2, column 2, place ")
    assert all(": kept" in t for t in titles(overlay.draw(view, 0)))


def test_merged_tokens(house, files):
    view = answered(house.engine("picture"), scene(files), "pool", retain=0.25).fast[0].view
    html = overlay.draw(view, 1)
    drawn = titles(html)
    stays = [t for t in drawn if "kept, represents 4 tokens" in t]
    assert (len(stays), html.count("mm-dot")) == (49, 49)
    assert sum("merged into token" in t for t in drawn) == 147
    assert "merged into token 1" in drawn[1] and drawn[1].startswith("token 2 of 196")


def test_steps_through_layers_and_the_cache(house, files):
    where = house.engine("picture")
    view = answered(where, scene(files), "aim").fast[0].view
    assert [s.title for s in view.steps][1:] == [
        "projector: aim-merge",
        "decoder layer 3: aim-pagerank",
        "decoder layer 4: aim-pagerank",
    ]
    left = [int(step.reduction.kept[0, view.visual].sum()) for step in view.steps]
    assert left == sorted(left, reverse=True) and left[0] == 196 and left[-1] == 1
    # merged at the projector and dropped later: what is seen before the layer is the merge
    assert "merged into" in overlay.draw(view, 1)
    assert "importance" in overlay.draw(view, 2)

    view = answered(where, scene(files), "adakv", retain=0.25).fast[0].view
    cached = view.steps[1:]
    assert [s.title for s in cached] == [f"cache of layer {i}: snapkv" for i in range(5)]
    held = sum(int(s.heads[view.visual].sum()) for s in cached) / sum(s.of for s in cached)
    assert held == pytest.approx(49, abs=1)
    assert re.search(r"kept by 1 of \d heads", overlay.draw(view, 1))


TIMES = ("first_token_seconds", "tokens_per_second")


@pytest.mark.parametrize("timed", [False, True])
def test_times_of_models_that_gain_none_are_not_shown(house, files, monkeypatch, timed):
    """It is the size of the model that counts, and not who named it; a sentence says why."""
    if timed:
        monkeypatch.setattr(engine, "GAINS", 0)
    exchange = answered(house.engine("picture"), scene(files), "uniform", retain=0.25)
    assert exchange.fast[0].answer.logits is None, "what was compared is let go of"
    assert ("time to first token" in cards.figures(exchange)["figure"]) is timed
    assert ("first token" in cards.comparison(exchange)) is timed
    said = exchange.note()
    assert ("Times are medians of 3 warm runs each, taken in turn." in said) is timed
    few = "No times are shown: mini-llava has 3.5 million parameters, too few to gain time from fewer tokens."
    assert (few in said) is not timed
    found = exchange.fast[0].agreement
    assert f"tokens compared: {found['kl_tokens']})" in cards.columns(exchange)
    # programs are given the same
    report = exchange.report()
    for one in (report["full"], *report["accelerated"]):
        assert (one["first_token_seconds"] is not None) is timed
        assert "total_seconds" not in one and "seconds" not in one["stats"], "those are of a single run"
        assert timed or one["tokens_per_second"] is None


def test_a_named_model_that_is_small_has_no_times_either(files):
    named = engine.House(argparse.Namespace(**{**vars(OPTIONS), "model": str(ask.SHIPPED)}))
    named.load()
    exchange = answered(named.engine("picture"), scene(files), "uniform", longest=1)
    assert not exchange.timed and "too few to gain time" in exchange.note()


@pytest.fixture
def runs(monkeypatch):
    """The runs of a model that is large enough for times: recipes in their order; each takes seconds that the test lists."""
    monkeypatch.setattr(engine, "GAINS", 0)
    found, inner = types.SimpleNamespace(names=[], seconds=[], then=lambda: None), ask.answer

    def run(model, processor, inputs, recipe, *rest):
        found.names.append(recipe.name)
        found.then()
        answer = inner(model, processor, inputs, recipe, *rest)
        if found.seconds:
            answer.first_token_seconds = answer.tokens_per_second = found.seconds.pop(0)
        return answer

    monkeypatch.setattr(ask, "answer", run)
    return found


def test_times_are_medians_of_runs_in_turn(films, runs):
    """The answers themselves come before, and one slow run changes no time. Two recipes of one name are kept apart."""
    runs.seconds = [99, 99, 99, *(1, 10, 100), *(70, 30, 300), *(2, 20, 200)]
    exchange = answered(films, Prompt("what?", clip=clip()), "uniform", "uniform", longest=2)
    assert runs.names == ["none", "uniform", "uniform"] * 4
    columns = (exchange.full, *exchange.fast)
    assert [one.first_token_seconds for one in columns] == [2, 20, 200]
    assert [one.tokens_per_second for one in columns] == [2, 20, 200]
    assert cards.comparison(exchange)["first token"] == [cards.seconds(x) for x in (2, 20, 200)]
    assert exchange.report()["full"]["first_token_seconds"] == 2 and not exchange.busy


def test_a_recipe_that_is_refused_is_not_timed(films, runs):
    exchange = answered(films, Prompt("what?", clip=clip()), "vtc-cls", "uniform", longest=1)
    assert runs.names == ["none", "uniform"] * 4
    assert exchange.timed and exchange.fast[0].first_token_seconds is None
    assert cards.comparison(exchange)["first token"][1] == ""


@pytest.mark.parametrize("end", ["stopped", "time limit"])
def test_answers_stay_when_their_times_are_broken_off(films, runs, slow, end):
    stop, seen = threading.Event(), []

    def late():
        if len(runs.names) == 5:  # two answers, one turn of both, and the next
            stop.set() if end == "stopped" else setattr(slow, "now", slow.now + 1e6)

    runs.then, films.seconds = late, 1e5
    for exchange in films.ask(Prompt("what?", clip=clip()), [limits.recipe("uniform")], 2, stop):
        seen.append(exchange.busy)
    assert "Times are being measured: run 2 of 3 ..." in seen and not exchange.busy
    assert exchange.done and not exchange.timed and len(runs.names) == 5
    assert "No times are shown: the question ended before 3 runs of each answer were measured." in exchange.note()
    assert not films.lock.locked() and not is_accelerated(films.model)


def test_tokens_and_keys_are_named_as_what_they_are(house, files):
    """A recipe that evicts from the cache leaves all tokens, and of their keys the budget: in the table, the chart and the
    drawing; one that drops before the language model leaves as many of both."""
    where = house.engine("picture")
    for name, tokens in (("snapkv", 196), ("divprune", 49)):
        exchange = answered(where, scene(files), name, retain=0.25)
        rows = {name: rest for name, *rest in zip(*cards.figures(exchange).values(), strict=True)}
        assert rows[cards.LEFT] == ["196", str(tokens), f"{tokens / 196:.0%}"]
        assert rows[cards.HELD] == ["196", "49", "25%"]
        assert "<td style=--share:25%>25%</td>" in cards.table(cards.figures(exchange), "figures")
        compared = cards.comparison(exchange)
        assert list(compared[cards.LEFT]) == ["196", str(tokens)] and list(compared[cards.HELD]) == ["196", "49"]
        view = exchange.fast[0].view
        said = re.search(r'mm-count">(.*?)</p>', overlay.draw(view, len(view.steps) - 1))[1]
        if name == "snapkv":
            assert "a head holds the keys of 49 of 196 visual tokens (25%); " in said
        else:
            assert "49 of 196 visual tokens stay (25%)" in said


def test_the_pair_of_pictures(house, films, files):
    view = answered(house.engine("picture"), scene(files), "divprune", retain=0.25).fast[0].view
    before, after = (np.asarray(one.convert("L"), dtype=float) for one, _ in overlay.pair(view, 1))
    assert before.shape == after.shape and after.mean() < 0.6 * before.mean(), "three quarters are dark"
    shown = overlay.divided(overlay.pair(view, 1))
    assert shown.count("<img") == 2 and "<select" not in shown and "<span>projector: divprune</span>" in shown
    none = overlay.pair(answered(films, Prompt("what?", clip=clip()), "uniform").fast[0].view, 1)
    assert none == [] and overlay.divided(none) == ""


def test_two_recipes_are_compared_on_one_picture(house, files):
    """All that were asked can stand on either side, and the full picture too; at first the first two do."""
    exchange = answered(house.engine("picture"), scene(files), "divprune", "snapkv", "resize", retain=0.25)
    sheet = overlay.sheet([(one.title, one.view) for one in exchange.fast])
    assert [title for _, title in sheet] == [
        "full model",
        "divprune 25%: 49 of 196 visual tokens stay (25%)",
        "snapkv 25%: a head holds the keys of 49 of 196 visual tokens (25%)",
        "resize 25%: all tokens stay",
    ]
    assert len({image.size for image, _ in sheet}) == 1, "they lie above each other"
    shown = overlay.divided(sheet)
    assert re.findall(r"<option selected>(\w+)", shown) == ["divprune", "snapkv"]
    assert shown.count("<option") == 8 and shown.count("<figure>") == 4 and shown.count("data:image") == 6
    one = overlay.divided(overlay.sheet([("<b>", exchange.fast[0].view)]))
    assert "<span>full model</span>" in one and "&lt;b&gt;" in one and "<b>" not in one
    assert overlay.divided(overlay.sheet([])) == ""


# by choice: before the language model, inside it, and what works on the cache
EVERY_SITE = ["divprune", "fastv", "snapkv", "pyramiddrop", "adakv", "kivi"]


@pytest.mark.parametrize("name", few(EVERY_SITE, ["fastv", "snapkv"]))
def test_every_layer_has_its_tokens_and_keys(house, files, name):
    """As many as the figures of the call count."""
    exchange = answered(house.engine("picture"), scene(files), name)
    fast, view = exchange.fast[0].answer, exchange.fast[0].view
    found = cards.layers(view)
    assert found["layer"] == list(range(5))
    assert sum(found["tokens"]) / 5 == pytest.approx(fast.visual_tokens_per_layer)
    keys = [float(layer.heads[view.visual].sum()) / layer.of for layer in view.layers]
    assert [f"{one:.0f}" for one in keys] == found["keys a head"]
    assert sum(keys) / 5 == pytest.approx(cards.held(fast), abs=0.5)
    html = overlay.draw(dataclasses.replace(view, steps=view.layers), 4)
    assert "cache of layer 4" in html and f"a head holds the keys of {keys[4]:.0f} of 196" in html


def test_lists_keep_what_the_model_can_do(gradio, house):
    """Of the recipes that are chosen at first, too: Gradio refuses all that is asked with one that is not in its list."""
    from mmaccel_demo import page

    possible = house.choices["picture"]
    some = types.SimpleNamespace(
        choices={"picture": [one for one in possible if one.name not in ("vtc-cls", "balanced")]}
    )
    assert page._choices(some, "picture", ["uniform", "vtc-cls", "pool"])["value"] == ["uniform", "pool"]
    assert page._choices(some, "picture", ["vtc-cls"])["value"] == [some.choices["picture"][0].name]
    assert page._choices(some, "picture", "balanced")["value"] is None
    assert page._choices(some, "picture", "pool")["value"] == "pool"
    assert "value" not in page._choices(types.SimpleNamespace(choices={}), "picture", "pool")


def test_the_script_of_the_page(gradio, tmp_path):
    """What it makes of a question when an own picture comes, without a browser."""
    from mmaccel_demo import serve

    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed: apt-get install nodejs")
    found = [examples.Example("picture", tmp_path / "a.png", "what </script> is it ?", "")]
    script = serve._script(found)
    assert "</script>" not in script
    for asked, left in (("what </script> is it ?", ""), ("what is it ?", "what is it ?"), ("", "")):
        code = f"{script}\nconsole.log(JSON.stringify(mmaccel.ownQuestion({json.dumps(asked)})))"
        said = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True).stdout
        assert json.loads(said) == left


def test_layers_that_keep_no_keys():
    """Of a model in which only every other layer has a cache of keys: its layers have the numbers that they have there."""
    where = engine.Engine(zoo.model("qwen3_5"), zoo.processor("qwen3_5"), "tiny")
    view = answered(where, Prompt("what?", (zoo.Image.new("RGB", (90, 60), "red"),)), "snapkv").fast[0].view
    assert cards.layers(view)["layer"] == [0, 1, 2, 3]
    assert [held == "none" for held in cards.layers(view)["keys a head"]] == [True, False, True, False]
    assert [step.title for step in view.steps[1:]] == ["cache of layer 1: snapkv", "cache of layer 3: snapkv"]
    assert view.layers[0].title == "layer 0, which keeps no keys"


def test_recipes_share_one_model(house, films, monkeypatch):
    """While a recipe answers, the weights are there once, and the cache of the recipe before is gone."""
    caches, alive, inner = [], [], ask.answer

    def run(model, *rest):
        assert _weights(films) == before
        alive.append(sum(one() is not None for one in caches))
        *rest, after = rest

        def note(model, out):
            caches.extend(weakref.ref(layer) for layer in cache_of(out).layers)
            after(model, out)

        return inner(model, *rest, note)

    before = _weights(films)
    monkeypatch.setattr(ask, "answer", run)
    exchange = answered(films, Prompt("what?", clip=clip()), "uniform", "snapkv", "divprune")
    assert exchange.done and len(caches) >= 12
    assert alive == [0, 0, 0, 0]


def _weights(where):
    """Where weights of the shapes of this model lie: a copy of the model would add to them."""
    gc.collect()
    shapes = {one.shape for one in where.model.parameters()}
    weights = [one for one in gc.get_objects() if type(one) is torch.nn.Parameter and one.shape in shapes]
    return {one.untyped_storage().data_ptr() for one in weights}


def test_pixels_only(house, files):
    view = answered(house.engine("picture"), scene(files), "resize").fast[0].view
    assert not view.steps and "pixels only" in overlay.draw(view, 0)


def test_a_film_strip_with_segments(films):
    view = answered(films, Prompt("what?", clip=clip(8, still=4)), "holitom-merge", tau=0.9).fast[0].view
    assert view.moves and len(view.panels) == 4, "this model joins two frames"
    found = view.segments(view.steps[1])
    assert found == [0, 0, 1, 2]
    html = overlay.draw(view, 1)
    assert "segment 1, 2 frames" in html and "segment 3, 1 frame<" in html
    assert html.count("<div") == html.count("</div>")
    assert [panel.caption for panel in view.panels] == ["0.0 s", "0.5 s", "1.0 s", "1.5 s"]
    assert view.segments(view.steps[0]) == [0, 1, 2, 3]
    assert len(titles(html)) == len(view.visual)


def test_frames_that_are_left_out(films):
    view = answered(films, Prompt("what?", clip=clip(8, still=1)), "uniform-frames", retain=0.5).fast[0].view
    out = [panel.caption for panel in view.panels if panel.caption.endswith("left out")]
    assert len(out) == 4


def test_what_the_processor_cuts_off():
    """A tower that sees the middle of a wide picture: the drawing shows that middle."""
    where = engine.Engine(zoo.model("llava"), zoo.processor("llava"), "tiny")
    wide = zoo.Image.new("RGB", (90, 60), "red")
    wide.paste("blue", (15, 0, 75, 60))
    view = answered(where, Prompt("what?", (wide,)), "uniform").fast[0].view
    assert view.panels[0].picture.size == (60, 60)
    assert view.panels[0].picture.getcolors() == [(3600, (0, 0, 255))]


def test_tiles_of_unknown_place():
    where = engine.Engine(zoo.model("smolvlm"), zoo.processor("smolvlm"), "tiny")
    view = answered(where, Prompt("what?", (zoo.Image.new("RGB", (90, 60), "red"),)), "uniform").fast[0].view
    captions = [panel.caption for panel in view.panels]
    assert captions[-1] == "the whole picture" and captions[0] == "tile 1"
    assert view.panels[0].picture is None and view.panels[-1].picture is not None
    assert len(titles(overlay.draw(view, 1))) == len(view.visual)


# -------------------------------------------------------------------------------------------------------------- cards


def test_nothing_of_a_visitor_is_markup():
    evil = "<script>alert(1)</script>"
    exchange = engine.Exchange(engine.Column("full model", evil), [engine.Column(evil, evil)])
    shown = [
        cards.columns(exchange),
        cards.say(evil),
        cards.asked(evil, evil, 3),
        cards.about(Recipe(evil, (Stage("uniform", 0.5),), summary=evil, paper=evil)),
    ]
    view = overlay.View([overlay.Panel(None, evil)], [overlay.Step(evil, Reduction.identity(torch.ones(1, 2) > 0))])
    shown.append(overlay.draw(view, 0))
    assert all("<script" not in html and "&lt;script" in html for html in shown)


def test_recipes_by_site():
    # by choice: one of every site
    found = cards.choices([limits.recipe(name) for name in ("snapkv", "fastv", "divprune", "tome", "resize", "kivi")])
    # by choice: the curated ones as they are curated, then the others by site
    assert [name for _, name in found] == ["tome", "fastv", "snapkv", "kivi", "resize", "divprune"]
    assert [text for text, _ in found][-2:] == ["resize · frames", "divprune · projector"]
    everything = cards.choices([one for one in recipes().values() if one.stages])
    curated = [name for _, name in everything][: cards.OFFERED]
    assert cards.OFFERED == 8 and set(curated) < set(cards.CURATED) and len(everything) == len(recipes()) - 1
    assert all(text.partition(" · ")[0] == name for text, name in everything)
    about = cards.about(limits.recipe("divprune"))
    assert 'href="https://arxiv.org/abs/2503.02175"' in about and "max-min cosine distance" in about
    assert "href" not in cards.about(limits.recipe("uniform"))


def test_faults_of_ours_tell_nothing():
    assert cards.sentence(MmaccelError("Give less.")) == "Give less."
    assert "/secret" not in cards.sentence(OSError("/secret")) and "OSError" in cards.sentence(OSError("/secret"))


# ----------------------------------------------------------------------------------------------------------- visitors


def test_a_stream_stays_under_its_cap(films):
    live = Live(films, limits.recipe("infinipot-v"), clip(12, still=1), cap=128, chunk=4)
    for _ in range(8):
        frame = live.step()
    assert frame.shape == (64, 96, 3) and live.session.frames == 32
    frames, held, keys = zip(*live.points, strict=True)
    assert frames == (4, 8, 12, 16, 20, 24, 28, 32)
    # which places are left, of heads that keep different ones, is noted in a few bytes more or less
    assert max(keys) <= 128 and max(held[3:]) < 1.03 * min(held[3:]), "the line is flat"
    before = live.session.nbytes()
    assert isinstance(live.ask("what?", 4), str) and live.session.nbytes() == before
    said = cards.memory(live.points, live.cap)
    assert "32 frames read" in said and "of at most 128 keys" in said
    assert list(cards.line(live.points)["frames"]) == list(frames)
    with accelerated(films.model, "none"):
        pass


def test_visitors_are_apart_and_forgotten(monkeypatch):
    all_ = Visitors()
    one, other = all_["a"], all_["b"]
    assert all_["a"] is one and one is not other
    first = one.begin()
    assert one.waits
    stop = one.turn(first)
    assert not stop.is_set() and not other.stop.is_set() and not one.waits
    second = one.begin()
    assert stop.is_set(), "a new question ends the one before"
    assert one.turn(first).is_set() and not one.turn(second).is_set(), "in the queue too"
    all_.leave("a")
    assert one.stop.is_set() and all_["a"] is not one
    assert all_["a"].turn(second).is_set(), "what he asked before he left is not asked any more"
    for number in range(VISITORS + 5):
        all_[f"n{number}"]
    assert len(all_) == VISITORS and other.stop.is_set()


def test_examples_are_shown_until_something_is_asked():
    one = Visitors()["a"]
    first, second = one.show(), one.show()
    first.set()
    assert not second.is_set() and not one.stop.is_set(), "each ends by itself"
    third = one.show()
    one.begin()
    assert second.is_set() and third.is_set() and not one.stop.is_set()
    all_ = Visitors()
    shown = all_["b"].show()
    all_.leave("b")
    assert shown.is_set()


def test_streams_are_few(monkeypatch):
    all_ = Visitors()
    for number in range(STREAMS):
        all_[f"{number}"].live = object()
    late = all_["late"]
    with pytest.raises(MmaccelError, match=f"{STREAMS} streams are being followed"):
        all_.room(late)
    all_.room(all_["0"])  # who follows one already may begin another
    all_["1"].seen = time.monotonic() - 1000
    all_.room(late)
    assert all_["1"].live is None


@pytest.mark.parametrize("kind", few(["picture", "video"], ["picture"]))
def test_the_examples_are_answered_right(kind, tmp_path):
    """By the models that come with mmaccel, in full; whoever trains them anew picks other items in ``examples``."""
    if kind == "video":
        pytest.importorskip("av")
    # by its folder: the site of the browser tests has another model for clips
    folder = ask.SHIPPED if kind == "picture" else ask.SHIPPED.with_name("mini-qwen-vl")
    model, processor = ask.load_model(argparse.Namespace(**{**vars(OPTIONS), "model": str(folder)}))
    found = [one for one in examples.make(tmp_path) if one.kind == kind]
    shown = [
        Prompt(one.question, (limits.picture(str(one.path)),))
        if kind == "picture"
        else Prompt(one.question, clip=limits.clip(str(one.path), 16))
        for one in found
    ]
    said = [ask.answer(model, processor, encode(processor, [prompt]), "none", 16).answer for prompt in shown]
    assert len(said) >= 3 and said == [one.answer for one in found]


def test_several_at_once_are_kept_apart():
    """A question is answered while another one is, by a twin with the same weights, as it would be alone."""
    alone = engine.Engine(zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl"), "tiny")
    both = engine.Engine(zoo.model("qwen2_5_vl"), zoo.processor("qwen2_5_vl"), "tiny", several=2)
    (twin,) = both.twins
    assert all(x is y for x, y in zip(both.model.parameters(), twin.model.parameters(), strict=True))
    prompt, found = Prompt("what?", clip=clip()), []
    with Gate(both.model, 2) as gate:
        first = threading.Thread(target=lambda: found.append(answered(both.free(), prompt, "uniform")))
        first.start()
        gate.reached.wait(60)
        assert both.lock.locked() and both.free() is twin
        second = answered(both.free(), prompt, "snapkv")
        assert first.is_alive() and both.free() is twin
        gate.open()
        first.join()
    assert both.free() is both and not is_accelerated(both.model) and not is_accelerated(twin.model)
    for got, name in ((found[0], "uniform"), (second, "snapkv")):
        assert got.fast[0].text == answered(alone, prompt, name).fast[0].text


# --------------------------------------------------------------------------------------------------------------- drafts


def twice(where, prompt, stop=None, longest=16, **drafts):
    *_, last = where.ask_twice(prompt, limits.recipe("balanced"), drafts, longest, stop or threading.Event())
    return last


def test_who_drafted_which_token(films):
    """The answer is the full model's, twice; most of the second is copied from the first."""
    prompt = Prompt("what?", clip=clip())
    bare = ask.answer(films.model, films.processor, encode(films.processor, [prompt]), "none", 24)
    found = twice(films, prompt, longest=24, lookup="suffixdecoding")
    again = found.fast[0]
    assert found.done and found.full.text == again.text == bare.answer
    assert not is_accelerated(films.model)
    for column in (found.full, again):
        assert "".join(text for text, _ in column.drafted.pieces).strip() == bare.answer
        assert len(column.drafted.pieces) == bare.new_tokens > 3
        assert sum(source != "" for _, source in column.drafted.pieces) == column.drafted.figures["accepted"]
    drafted = [(text, source) for text, source in again.drafted.pieces if source]
    # as a chain or as a tree, whichever the measured seconds recommend
    assert {source for _, source in drafted} <= {"suffixdecoding", "suffixdecoding-tree"}
    assert len(drafted) > bare.new_tokens / 2
    second = cards.drafts(found).split("<section")[2].split("</section>")[0]
    assert second.count('title="drafted by suffixdecoding') == sum(text != "" for text, _ in drafted)
    table = cards.drafting(found)
    assert table["figure"][:2] == ["tokens", "forwards behind the prompt"]
    counts = [
        int(cell)
        for name, cell in zip(*(table[head] for head in ("figure", "asked again")), strict=True)
        if "by" in name
    ]
    assert sum(counts) == len(drafted)
    assert int(table["asked again"][1]) < int(table["asked first"][1])


def test_several_drafters_are_told_apart(house, files):
    """Each by a line of its own kind, by its name in words, and by a row of the table; what is off is said."""
    where = house.engine("picture")
    found = twice(where, scene(files), longest=12, lookup="tokenrecycling", draft="self")
    assert found.done and "No model drafts: the answer has at most 12 tokens." in found.note()
    column = found.full
    figures = {**column.drafted.figures, "sources": {"self": {}, "tokenrecycling": {}}}
    pieces = [("a ", ""), ("red", "self"), (" <b>", "tokenrecycling"), ("", "self")]
    found = engine.Exchange(dataclasses.replace(column, drafted=engine.Drafted(pieces, figures, [])), [])
    drawn = cards.drafts(found)
    assert '>a <mark data-drafter="1" title="drafted by self">red</mark><mark data-drafter="2"' in drawn
    assert " &lt;b&gt;</mark></p>" in drawn and "<b>" not in drawn
    assert cards.drafting(found)["asked first"][-2:] == ["2", "1"]


def test_drafts_are_stopped_like_any_answer(house, files):
    stop = threading.Event()
    balanced, seen = limits.recipe("balanced"), []
    for exchange in house.engine("picture").ask_twice(scene(files), balanced, {"lookup": True}, 16, stop):
        seen.append(exchange)
        stop.set()
    exchange = seen[-1]
    assert [exchange.full.state, exchange.fast[0].state] == ["stopped", "stopped"] and not exchange.done
    assert exchange.full.drafted is None and cards.drafts(exchange).count("<section") == 0


def test_drafts_take_no_longer_than_a_question_may(films, slow):
    films.seconds = 10.0
    with pytest.raises(MmaccelError, match="time limit"):
        twice(films, Prompt("what?", clip=clip()), longest=32, lookup=True)
    assert not is_accelerated(films.model)


def test_a_character_of_several_tokens_is_the_last_ones():
    """Bytes of one character are several tokens; special tokens have no text."""

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(one for one in ids if one < 256).decode(errors="replace")

    ids = [*"né".encode(), 300, *"é!".encode()]
    assert engine.pieces(Bytes(), ids) == ["n", "", "é", "", "", "é", "!"]
