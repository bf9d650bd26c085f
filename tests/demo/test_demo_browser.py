"""The demo as visitors meet it, in a headless Chromium, and as programs do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from gate import Gate
from waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("gradio")]


def answers(page, kind="picture"):
    """Titles, answers and figures of both columns, once they are complete."""
    page.answered(kind)
    rows = page.rows(f".figures-{kind}")
    found = []
    for number, column in enumerate(page.all(f".answers-{kind} .mm-column[data-state=done]"), 1):
        found.append(
            {
                "title": column.find_element(page.css, "h3").text,
                "answer": column.find_element(page.css, ".mm-answer").text,
                **{row[0]: row[number] for row in rows},
            }
        )
    assert len(found) == 2
    return found


def tokens(page):
    """Open what shows token by token."""
    page.press("Token by token")
    page.until(lambda: page.all(".drawing-picture .mm-panel"))


def titles(page, kind="picture"):
    found = page.driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", f".drawing-{kind} .mm-t title"
    )
    return list(found)


def ask_about(page, path, question):
    page.upload(path)
    page.write(".question-picture", question)
    page.press("Ask")


def test_a_picture_is_answered_twice(visit, files):
    """Upload, ask, read, go through the sites, change the budget and the recipe, by mouse and keyboard."""
    page = visit()
    ask_about(page, files.png, files.question)
    full, fast = answers(page)
    assert full["answer"] == files.answer
    assert full["title"] == "full model" and fast["title"] == "balanced 25%"
    assert full["visual tokens left"] == "196" and fast["visual tokens left"] == "49"
    assert full["visual keys a head"] == "196" and fast["visual keys a head"] == "49"
    for column in (full, fast):
        # this model is too small to gain time
        assert "tokens per second" not in column and "time to first token" not in column
    held = [float(column["KV cache"].split()[0]) for column in (full, fast)]
    assert held[1] < held[0]
    said = page.text(".mm-agreement")
    assert ("are equal" in said) == (full["answer"] == fast["answer"]) and "nats" in said

    # the picture in full and what is kept of it
    assert len(page.all(".pair-picture img")) == 2

    # every token has a title, and a quarter of them stays
    tokens(page)
    drawn = titles(page)
    assert len(drawn) == 196 and sum(": kept" in title for title in drawn) == 49
    assert drawn[1].startswith("token 2 of 196, row 1, column 2, place ")

    # through the sites: back to all tokens
    page.slide("Through sites", -1)
    page.until(lambda: sum(": kept" in title for title in titles(page)) == 196)
    assert "before the recipe" in page.text(".mm-count")

    # tokens by keyboard: what the focused one says is written below
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    def reached():
        # the drawing may be made anew once more while it is gone through
        page.driver.execute_script("arguments[0].focus()", page.all(".drawing-picture .mm-t")[0])
        page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
        return page.text(".mm-readout").startswith("token 16 of 196, row 2, column 2")

    page.until(reached)

    # and by mouse
    ActionChains(page.driver).move_to_element(page.all(".drawing-picture .mm-t")[3]).perform()
    page.until(lambda: page.text(".mm-readout").startswith("token 4 of 196, row 1, column 4"))

    # another recipe, another budget
    page.choose("pool")
    page.press("Settings")
    page.until(lambda: "average of neighbouring grid cells" in page.text(".mm-about"))
    page.slide("Share of the visual", 5)
    page.until(lambda: "Keeps 0.5 of the tokens" in page.text(".mm-about"))
    page.press("Ask")
    page.until(lambda: "pool 50%" in page.text(".answers-picture h3"))
    _, fast = answers(page)
    assert int(fast["visual tokens left"]) <= 98
    page.until(lambda: any("merged into token" in title for title in titles(page)))


def test_the_recipe_as_json(visit, files):
    page = visit()
    page.press("Settings")
    page.press("Share the recipe as JSON")
    page.until(lambda: page.all(".mm-code textarea"))
    before = json.loads(page.value(".mm-code"))
    assert before["stages"][0]["method"] == "balanced"
    page.put(".mm-code", json.dumps(before).replace('"method": "balanced"', '"method": "divprun"'))
    page.until(lambda: "did you mean 'divprune'" in page.text(".mm-error"))
    named = {"method": "cdpruner", "retain": 0.5, "options": {"clip": "/x"}}
    page.put(".mm-code", json.dumps({"name": "mine", "stages": [named]}))
    page.until(lambda: "visitors cannot" in page.text(".mm-error"))
    page.put(".mm-code", json.dumps({"name": "mine", "stages": [{"method": "uniform", "retain": 7}]}))
    page.until(lambda: "The recipe is valid" in page.text(".mm-say"))
    page.until(lambda: "Keeps 7." in page.text(".mm-about"))
    ask_about(page, files.png, files.question)
    _, fast = answers(page)
    assert fast["title"] == "mine 7" and fast["visual tokens left"] == "7"


def test_errors_are_sentences(visit, files):
    page = visit()

    page.panel().find_elements(page.css, "#picture button[aria-label*=Clear], #picture button[aria-label*=Remove]")[
        0
    ].click()

    def refused(path, question, sentence):
        if path is not None:
            page.upload(path)
        page.write(".question-picture", question)
        page.press("Ask")
        page.until(lambda: sentence in page.text(".said-picture .mm-error"))
        assert "Traceback" not in page.text("body")

    refused(None, "what?", "There is no picture")
    refused(files.png, "", "The question is empty")
    refused(files.huge, "what?", "megapixels are taken")
    refused(files.broken_png, "what?", "The picture cannot be read: image file is truncated")


@pytest.mark.parametrize("typed", ["", "9999"])
def test_numbers_that_are_typed(visit, typed):
    """A field that is emptied, or filled with too much, is answered in a sentence or set right, and nothing else."""
    page = visit()
    page.press("Settings")
    page.until(lambda: page.all("input[aria-label*='number input for Longest']"))
    for label in ("Longest answer", "Share of the visual"):
        field = page.all(f"input[aria-label*='number input for {label}']")[0]
        page.driver.execute_script("arguments[0].select()", field)
        page.driver.execute_cdp_cmd("Input.insertText", {"text": typed}) if typed else field.send_keys("\ue017")
    page.press("Ask")
    page.until(lambda: page.all(".said-picture .mm-say") and not page.all(".mm-columns[data-old]"), 120)
    assert not page.all(".toast-body.error"), page.text(".toast-body")


def test_a_clip_that_cannot_be_decoded(visit, files):
    page = visit()
    page.tab("Video")
    page.upload(files.broken_mp4)
    page.write(".question-video", "what?")
    page.press("Ask")
    page.until(lambda: "The clip cannot be decoded" in page.text(".said-video .mm-error"))


def test_a_clip_is_answered_twice_and_can_be_stopped(visit, files, site):
    pytest.importorskip("av")
    page = visit()
    page.tab("Video")
    page.upload(files.mp4)
    page.write(".question-video", files.clip_question)
    page.choose("prunevid-merge")
    page.press("Settings")
    page.until(lambda: "still places kept once" in page.text(".mm-about"))
    with Gate(site.house.engine("video").model, 5) as gate:
        page.press("Ask")
        page.until(gate.reached.is_set, 180)
        page.until(lambda: "is answering" in page.text(".answers-video .mm-state"))
        page.press("Stop")
        page.until(lambda: "stops at its next token" in page.text(".answers-video .mm-state"))
        gate.open()
        page.until(lambda: page.text(".answers-video .mm-state") == "stopped stopped")
        assert gate.passes == 5
        style = "return getComputedStyle(arguments[0]).borderTopStyle"
        stopped = page.all(".answers-video .mm-column[data-state=stopped]")
        assert [page.driver.execute_script(style, one) for one in stopped] == ["dashed"] * 2, "no finished answer"
        assert not page.rows(".figures-video")
    page.press("Ask")
    full, fast = answers(page, "video")
    assert full["answer"] and fast["title"] == "prunevid-merge 50%"
    in_, of = int(fast["visual tokens left"]), int(full["visual tokens left"])
    assert 0 < in_ < of
    drawn = titles(page, "video")
    assert len(drawn) == of and any("merged into token" in title for title in drawn)
    assert len(page.all(".drawing-video .mm-panel")) == 8, "two frames make one slice"
    assert "segment 1" in page.text(".drawing-video")


def test_recipes_are_compared(visit, tmp_path):
    from mmaccel_demo import examples

    page = visit()
    *_, last = [one for one in examples.make(tmp_path) if one.kind == "picture"]
    page.tab("Compare recipes")
    page.example(".question-compare")
    assert page.value(".question-compare") == last.question
    # choosing an example asks it
    page.until(lambda: len(page.all(".drawing-compare figure")) == 6, 180)
    rows = page.rows(".answers-compare")
    assert len(rows) == 6 and rows[0][:2] == ["full model", last.answer]
    assert all(row[3] == "49" for row in rows[1:4])


def test_an_example_is_answered_when_the_page_opens(site, visit, tmp_path):
    """With no click; once for all visitors, of whom each may look at it in his own way."""
    from mmaccel_demo import examples

    first = examples.make(tmp_path)[0]
    # as the first visitor meets it: the model has answered nothing yet
    site.house.welcome.clear()
    page = visit()
    if find_spec("av"):
        page.tab("Video")
        page.tab("Picture")
    assert set(site.house.welcome) == ({"picture", "video"} if find_spec("av") else {"picture"})
    assert page.value(".question-picture") == first.question
    assert answers(page)[0]["answer"] == first.answer
    # how the default chose, and why there are no times, is all there is to say
    said = page.text(".said-picture")
    for known in (
        "Balanced: spacetime, as it keeps most answers.",
        "No times are shown: mini-llava has 3.5 million parameters, too few to gain time from fewer tokens.",
    ):
        assert known in said
        said = said.replace(known, "")
    assert not said.strip()
    with Gate(site.house.engine("picture").model, 1) as gate:
        other = visit()
        assert answers(other)[0]["answer"] == first.answer and gate.passes == 0
        gate.open()
    tokens(page), tokens(other)
    its = titles(other)
    page.slide("Through sites", -1)
    page.until(lambda: titles(page) != its)
    assert titles(other) == its


def test_drafted_tokens_are_underlined(visit):
    """A question is asked twice; the second answer is copied from the first, and the table says how much of it."""
    page = visit()
    page.tab("Drafts")
    page.press("Ask twice")
    page.until(lambda: page.all(".figures-drafts table"), 120)
    first, again = page.all(".answers-drafts .mm-answer")
    assert first.text and first.text == again.text
    marked = again.find_elements(page.css, "mark")
    assert marked and marked[0].get_attribute("title").startswith("drafted by suffixdecoding")
    assert "underline" in marked[0].value_of_css_property("text-decoration-line")
    assert "tokens drafted by suffixdecoding" in page.text(".figures-drafts")


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_asked_stands_within_the_first_600_pixels(visit, width):
    page = visit(width, 900)
    for name, kind, button in (
        ("Picture", "picture", "Ask"),
        ("Video", "video", "Ask"),
        ("Compare recipes", "compare", "Compare"),
        ("Drafts", "drafts", "Ask twice"),
    ):
        page.tab(name)
        page.until(lambda kind=kind: page.all(f".question-{kind}"))
        ends = {}
        for part in (".mm-thumbs", f".question-{kind}", ".mm-buttons"):
            for one in page.all(part):
                ends[part] = one.rect["y"] + one.rect["height"]
        assert set(ends) >= {".mm-thumbs", f".question-{kind}", ".mm-buttons"}
        assert all(end <= 600 for end in ends.values()), ends
        assert ends[".mm-thumbs"] < ends[f".question-{kind}"] < ends[".mm-buttons"]
        assert button in page.text(".mm-buttons")
        media = page.until(
            lambda: [e for e in page.panel().find_elements(page.css, "img, video") if e.rect["width"] > 100]
        )[0]
        assert (
            ends[".mm-thumbs"] <= media.rect["y"] and media.rect["y"] + media.rect["height"] < ends[f".question-{kind}"]
        )
        assert "coloured shapes" in page.text(f".question-{kind}"), "what the model knows stands beside the question"


def test_eight_recipes_are_offered_and_all_are_found(visit, site):
    from selenium.webdriver.common.keys import Keys

    page = visit()
    field = page.all("input[role=combobox]")[0]
    field.click()
    page.until(lambda: page.all("[role=option]"))
    offered = [e.text for e in page.all("[role=option]")]
    assert len(offered) == 8 and "balanced · " in offered[0]
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("criticalkv")
    assert page.until(lambda: [e for e in page.all("[role=option]") if "criticalkv · cache" in e.text])
    field.send_keys(Keys.ESCAPE)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(visit, dark):
    """Small print has at least the contrast of 4.5 to 1 that WCAG asks for."""
    page = visit(dark=dark)
    measure = """
        const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
        const over = (colours) => {
          canvas.clearRect(0, 0, 1, 1);
          for (const one of colours) { canvas.fillStyle = one; canvas.fillRect(0, 0, 1, 1); }
          return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const light = (rgb) => rgb.map((x) => x / 255).map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
          .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
        return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => {
          const behind = [];
          for (let one = e; one; one = one.parentElement) behind.unshift(getComputedStyle(one).backgroundColor);
          const a = light(over(behind)), b = light(over([...behind, getComputedStyle(e).color]));
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        });
    """
    for selector in (
        "#state .mm-note",
        ".info-text",
        ".mm-agreement",
        ".mm-answer",
        ".mm-column h3",
        "span[data-testid=block-info]",
    ):
        found = page.driver.execute_script(measure, selector)
        assert found and min(found) >= 4.5, (selector, found)


def test_a_stream_is_followed(visit, files):
    pytest.importorskip("av")
    page = visit()
    page.tab("Stream")
    page.press("Ask now")
    page.until(lambda: "No stream runs" in page.text(".said-stream .mm-error"))
    page.upload(files.mp4)
    page.press("Start")
    count = re.compile(r"(\d+) frames read, .* (\d+) of at most 512 keys")

    def read():
        found = count.search(page.text(".memory-stream .mm-say"))
        return found and tuple(map(int, found.groups()))

    page.until(lambda: (read() or (0,))[0] >= 8)
    page.write(".question-stream", "what?")
    page.press("Ask now")
    page.until(lambda: page.all(".answers-stream .mm-asked"))
    before = page.until(read)
    after = page.until(lambda: (now := read()) and now[0] > before[0] and now)
    assert after[1] <= 512
    page.press("Stop")


def test_a_stream_is_stopped_before_it_starts(visit, files, monkeypatch):
    pytest.importorskip("av")
    from mmaccel_demo import limits
    from mmaccel_demo import page as pages

    decodes, goes_on, made = (threading.Event() for _ in range(3))
    decode, live = limits.clip, pages.Live

    def clip(*args, **options):
        decodes.set()
        goes_on.wait(120)
        return decode(*args, **options)

    def make(*args):
        made.set()
        return live(*args)

    monkeypatch.setattr(limits, "clip", clip)
    monkeypatch.setattr(pages, "Live", make)
    page = visit()
    page.tab("Stream")
    page.upload(files.mp4)
    page.press("Start")
    page.until(decodes.is_set)
    page.press("Stop")
    page.until(lambda: "is not started" in page.text(".said-stream"))
    goes_on.set()
    page.until(made.is_set)
    page.press("Ask now")
    page.until(lambda: "No stream runs" in page.text(".said-stream .mm-error"))


def waiting(site):
    """Questions in the queue."""
    return len(site.blocks._queue.event_queue_per_concurrency_id["model"].queue)


def test_a_question_is_taken_back_from_the_queue(visit, files, site):
    first, second = visit(), visit()
    with Gate(site.house.engine("picture").model, 2) as gate:
        ask_about(first, files.png, files.question)
        first.until(gate.reached.is_set)
        ask_about(second, files.other, files.other_question)
        second.until(lambda: waiting(site) == 1)
        second.press("Stop")
        second.until(lambda: "taken back" in second.text(".said-picture"))
        gate.open()
        assert answers(first)[0]["answer"] == files.answer
        passes = gate.passes
        second.until(lambda: "Stopped before it was asked" in second.text(".said-picture"))
        assert not second.all(".answers-picture .mm-column") and gate.passes == passes


def test_a_new_question_ends_the_one_before(visit, files, site):
    page = visit()
    with Gate(site.house.engine("picture").model, 2) as gate:
        ask_about(page, files.png, files.question)
        page.until(gate.reached.is_set)
        page.choose("uniform")
        page.press("Settings")
        page.until(lambda: page.text(".mm-about").startswith("uniform"))
        page.press("Ask")
        page.until(lambda: "stops at its next token" in page.text(".answers-picture .mm-state"))
        gate.open()
        full, fast = answers(page)
    assert full["answer"] == files.answer and fast["title"].startswith("uniform")


@pytest.mark.parametrize("waits", [False, True], ids=["answered", "queued"])
def test_who_closes_the_page_frees_the_model(visit, files, site, monkeypatch, waits):
    from mmaccel_demo.visitors import Visitors

    left, leave = threading.Event(), Visitors.leave
    monkeypatch.setattr(Visitors, "leave", lambda self, key: (leave(self, key), left.set()))
    engine = site.house.engine("picture")
    page, other = visit(), visit() if waits else None
    with Gate(engine.model, 2) as gate:
        if other is not None:
            ask_about(other, files.other, files.other_question)
            other.until(gate.reached.is_set)
        ask_about(page, files.png, files.question)
        page.until((lambda: waiting(site) == 1) if waits else gate.reached.is_set)
        page.driver.get("about:blank")
        page.until(left.is_set)
        gate.open()
        if other is not None:
            assert answers(other)[0]["answer"] == files.other_answer
            passes = gate.passes
        page.until(lambda: waiting(site) == 0 and not engine.lock.locked())
        assert gate.passes == (passes if waits else 2)


def test_two_visitors_get_their_own_answers(visit, files):
    first, second = visit(), visit(390, 844)
    for page, path, question in (
        (first, files.png, files.question),
        (second, files.other, files.other_question),
    ):
        page.upload(path)
        page.write(".question-picture", question)
    first.press("Ask")
    second.press("Ask")
    assert answers(first)[0]["answer"] == files.answer
    assert answers(second)[0]["answer"] == files.other_answer
    # what is drawn for one is his own picture, and moving in it leaves the other alone
    tokens(first), tokens(second)
    mine, its = titles(first), titles(second)
    second.slide("Through sites", -1)
    second.until(lambda: titles(second) != its)
    assert titles(first) == mine


def test_a_phone(visit):
    page = visit(390, 844)
    width = page.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= 390, "nothing to scroll sideways"
    for name in ("Video", "Layers", "Stream", "Drafts", "Compare recipes"):
        page.tab(name)
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    page.press("Compare")
    page.until(lambda: page.all(".drawing-compare img"), 180)
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390, "the wide table scrolls"


def test_the_keyboard_alone_asks_and_reads(visit, tmp_path):
    """From the opened page to the answer, through what the recipe kept, and on to two recipes; no mouse, no script."""
    from mmaccel_demo import examples
    from selenium.webdriver.common.keys import Keys

    *_, last = [one for one in examples.make(tmp_path) if one.kind == "picture"]
    page = visit()
    page.tab_to(f"Example: {last.question}")
    page.forget()
    page.keys(Keys.ENTER)
    page.until(lambda: page.value(".question-picture") == last.question)
    assert answers(page)[0]["answer"] == last.answer

    # a question of one's own, another recipe, and its answer
    page.tab_to("Question")
    page.keys(Keys.CONTROL, "a")
    page.keys("how many squares are there ?")
    passed = page.tab_to("Recipe")
    assert [name for name in passed if name in ("Ask", "Stop")] == ["Ask", "Stop"]
    page.keys(Keys.CONTROL, "a")
    page.keys("snapkv")
    page.until(lambda: [e for e in page.all("[role=option]") if "snapkv ·" in e.text])
    page.keys(Keys.ENTER)
    assert page.tab_to("Settings")[0].startswith("Settings"), "the list that was open takes no stop of its own"
    page.driver.switch_to.active_element.send_keys(Keys.SHIFT, Keys.TAB)
    while page.focus() != "Ask":
        page.keys(Keys.SHIFT, Keys.TAB)
    page.forget()
    page.keys(Keys.SPACE)
    page.until(lambda: "snapkv" in page.text(".answers-picture h3"))
    full, fast = answers(page)
    assert full["answer"] and fast["visual tokens left"] == "196" and fast["visual keys a head"] == "49"

    # what the recipe left, layer by layer, and the tokens
    names = page.tab_to("number input for Through sites and layers") + page.tab_to("Token by token")
    assert "Share of the picture that shows the left one, in per cent" in names
    page.keys(Keys.ENTER)
    page.until(lambda: page.all(".drawing-picture .mm-panel"))
    page.tab_to("token 1 of 196")
    page.keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.text(".mm-readout").startswith("token 2 of 196"))

    # two recipes on one picture
    page.tab_to("Picture")
    page.tab_to("Compare recipes")
    page.keys(Keys.ENTER)
    page.tab_to("Compare")
    page.keys(Keys.ENTER)
    page.until(lambda: page.all(".drawing-compare select"), 180)
    page.tab_to("Left")
    page.tab_to("Share of the picture")
    before = page.driver.execute_script(DIVIDED)
    page.keys(*[Keys.ARROW_LEFT] * 5)
    assert page.driver.execute_script(DIVIDED) == [before[0] - 5, "45%"] and before == [50, "50%"]


#: where the slider between two drawings stands, and where the right one begins that is cut off there
DIVIDED = """
    const field = [...document.querySelectorAll('.mm-stack input')].find((e) => e.checkVisibility());
    const clip = getComputedStyle(field.parentNode.querySelectorAll('img')[1]).clipPath;
    return [Number(field.value), clip.match(/([\\d.]+%)\\)/)[1]];
"""


def test_two_drawings_are_divided_by_dragging(visit):
    """The handle follows the mouse over the picture, and lists choose what stands on either side."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.select import Select

    page = visit()
    page.tab("Compare recipes")
    page.press("Compare")
    left, right = page.until(lambda: page.all(".drawing-compare select"), 180)
    stack = page.all(".drawing-compare .mm-stack")[0]
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", stack)
    width = stack.size["width"]
    mouse = ActionChains(page.driver).move_to_element(stack).click_and_hold().move_by_offset(round(width * 0.3), 40)
    mouse.release().perform()
    value, cut = page.driver.execute_script(DIVIDED)
    assert abs(value - 80) <= 2 and cut == f"{value}%"

    sources = "return [...arguments[0].querySelectorAll('.mm-stack img')].map((e) => [e.src, e.alt])"
    before = page.driver.execute_script(sources, page.panel())
    assert before[0] != before[1] and before[0][1].startswith("uniform") and before[1][1].startswith("divprune")
    Select(right).select_by_index(5)
    Select(left).select_by_index(0)
    after = page.driver.execute_script(sources, page.panel())
    assert after[0][1] == "full model" and after[1][1].startswith("pool 25%: ")
    assert len({source for source, _ in before + after}) == 4


def test_layers_of_one_question(visit, files):
    """Counts of every layer, and the drawing of the one that is chosen."""
    page = visit()
    page.tab("Layers")
    rows = page.rows(".figures-layers")
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0][1] == "196" and int(rows[-1][1]) < 196, "its first recipe drops tokens inside the model"
    page.upload(files.png)
    page.write(".question-layers", files.question)
    page.choose("snapkv")
    page.press("Settings")
    page.until(lambda: page.text(".mm-about").startswith("snapkv"))
    page.press("Ask")
    assert page.until(lambda: "snapkv" in page.text(".answers-layers h3"))
    page.answered("layers")
    rows = page.rows(".figures-layers")
    assert [row[1:] for row in rows] == [["196", "100%", "49", "25%"]] * 5
    page.press("Token by token")
    page.until(lambda: page.text(".drawing-layers .mm-count").startswith("cache of layer 4: snapkv: a head holds"))
    last = page.driver.execute_script("return document.querySelectorAll('.pair-layers img')[1].src")
    page.slide("Through the layers", -4)
    page.until(lambda: page.text(".drawing-layers .mm-count").startswith("cache of layer 0: snapkv"))
    assert page.driver.execute_script("return document.querySelectorAll('.pair-layers img')[1].src") != last


@pytest.mark.parametrize(
    ("tab", "field"),
    [("Picture", "picture"), ("Layers", "layers"), ("Compare recipes", "compare"), ("Drafts", "drafts")],
)
def test_an_own_picture_clears_the_question_of_the_example(visit, files, tab, field):
    page = visit()
    page.tab(tab)
    assert page.value(f".question-{field}")
    page.upload(files.png)
    page.until(lambda: page.value(f".question-{field}") == "")
    # one that the visitor wrote stays
    page.write(f".question-{field}", "what is this ?")
    page.upload(files.other)
    page.press({"compare": "Compare", "drafts": "Ask twice"}.get(field, "Ask"))
    page.until(lambda: page.all(f".answers-{field} :is(.mm-column, tr)"))
    assert page.value(f".question-{field}") == "what is this ?"


@pytest.mark.parametrize("tab", ["Video", "Stream"])
def test_an_own_clip_clears_the_question_of_the_example(visit, files, tab):
    pytest.importorskip("av")
    page = visit()
    page.tab(tab)
    assert page.value(f".question-{tab.lower()}")
    page.upload(files.mp4)
    page.until(lambda: page.value(f".question-{tab.lower()}") == "")


def test_every_control_has_a_name(visit):
    """In every tab with everything folded out, with a file and without one, and with what an answer brings."""
    page, unnamed = visit(), {}

    def look(where):
        with contextlib.suppress(AssertionError):
            # names are given right behind what they name
            page.until(lambda: not page.unnamed(), 5)
        unnamed.update({where: found} if (found := page.unnamed()) else {})

    for name in ("Picture", "Video", "Layers", "Compare recipes", "Drafts", "Stream"):
        page.tab(name)
        if name == "Compare recipes":
            page.press("Compare")
            page.until(lambda: page.all(".drawing-compare select"), 180)
            removed = [e.get_attribute("aria-label") for e in page.all(".token-remove")]
            assert len(removed) >= 5 and any("divprune" in one for one in removed), removed
        for fold in page.all("button.label-wrap"):
            before = fold.get_attribute("aria-expanded")
            assert before in ("true", "false"), "what is folded out is said"
            fold.click()
            page.until(lambda fold=fold, before=before: fold.get_attribute("aria-expanded") != before)
        look(name)
        page.panel().find_elements(page.css, "button[aria-label=Clear], button[aria-label='Remove Image']")[0].click()
        look(f"{name} without a file")
    assert not unnamed, json.dumps(unnamed, indent=1)


# ----------------------------------------------------------------------------------------------------------- programs


@pytest.fixture(scope="module")
def client(site):
    from gradio_client import Client

    return Client(site.address, verbose=False)


def test_the_client_of_the_guide(client, site, files, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "demo.md").read_text(encoding="utf-8")
    code = next(part for part in re.findall(r"```python\n(.*?)```", page, re.S) if "gradio_client" in part)
    monkeypatch.chdir(tmp_path)
    Path("photo.png").write_bytes(files.png.read_bytes())
    exec(code.replace("http://127.0.0.1:7860", site.address), {})
    assert files.answer in capsys.readouterr().out


def test_the_endpoints(client, files):
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    about = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(about) == {"/ask_picture", "/ask_video", "/recipes"}
    assert [p["parameter_name"] for p in about["/ask_picture"]["parameters"]] == [
        "picture", "question", "recipe", "retain", "longest",
    ]  # fmt: skip
    assert "divprune" in client.predict(api_name="/recipes")["picture"]
    found = client.predict(handle_file(str(files.png)), files.question, "uniform", 0.5, api_name="/ask_picture")
    assert found["accelerated"]["visual_tokens_kept"] == 98 and found["full"]["answer"] == files.answer
    for wrong, sentence in (
        ((handle_file(str(files.png)), " "), "The question is empty"),
        ((handle_file(str(files.png)), "what?", "/etc/passwd"), "There is no recipe"),
        ((handle_file(str(files.huge)), "what?"), "megapixels are taken"),
    ):
        with pytest.raises(AppError, match=sentence):
            client.predict(*wrong, api_name="/ask_picture")


@pytest.mark.parametrize("which", ["picture of ours", "http://127.0.0.1:9/picture.png"])
def test_visitors_name_no_files_of_ours(site, which):
    """Asked without the client, which would upload the file that it is given."""
    import httpx

    path = str(Path(__file__).parents[2] / "docs" / "kept.png") if which == "picture of ours" else which
    media = {"path": path, "meta": {"_type": "gradio.FileData"}}
    url = f"{site.address}gradio_api/call/ask_picture"
    event = httpx.post(url, json={"data": [media, "what?", "balanced", 0, 8]}, timeout=120).json()["event_id"]
    said = httpx.get(f"{url}/{event}", timeout=120).text
    assert "event: error" in said and "full" not in said


def test_uploads_are_limited(site, tmp_path):
    import httpx

    from mmaccel.media import untrusted

    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(untrusted.UPLOAD + 1)
    with large.open("rb") as file:
        reply = httpx.post(f"{site.address}gradio_api/upload", files={"files": file}, timeout=120)
    assert reply.status_code == 413


def test_uploads_are_limited_in_all(site, files, monkeypatch):
    import httpx
    from mmaccel_demo import limits

    def upload(**more):
        return httpx.post(f"{site.address}gradio_api/upload", timeout=120, **more)

    assert upload(files={"files": files.png.read_bytes()}).status_code == 200
    monkeypatch.setattr(limits, "KEPT", sum(path.stat().st_size for path in site.folder.rglob("*") if path.is_file()))
    reply = upload(files={"files": files.png.read_bytes()})
    assert reply.status_code == 507 and reply.text.startswith("Visitors have sent ") and "try again later" in reply.text
    # who does not say how much comes
    parts = iter(
        [b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n', b"0" * 99, b"\r\n--x--"]
    )
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert upload(content=parts, headers=kind).status_code == 411
    monkeypatch.undo()
    assert upload(files={"files": files.png.read_bytes()}).status_code == 200


@pytest.mark.parametrize("path", ["", "config", "gradio_api/info", "gradio_api/upload", "gradio_api/queue/join"])
def test_a_foreign_name_is_refused(site, path):
    """As a page has it whose own name was made to point here."""
    import httpx

    for verb in ("GET", "POST"):
        reply = httpx.request(verb, site.address + path, headers={"host": "evil.example.com:7860"})
        assert reply.status_code == 403 and "not to be reached by this name" in reply.text
        port = site.address.rsplit(":", 1)[1].strip("/")
        assert httpx.request(verb, site.address + path, headers={"host": f"localhost:{port}"}).status_code != 403


def test_the_queue_has_an_end(site):
    assert site.blocks._queue.max_size == 16
    models = [f for f in site.blocks.fns.values() if f.concurrency_id == "model"]
    assert len(models) >= 5 and all(f.concurrency_limit == "default" for f in models)
    assert site.blocks._queue.default_concurrency_limit == site.house.several == 1


def test_nothing_is_written_elsewhere(site, files):
    import httpx

    httpx.post(f"{site.address}gradio_api/upload", files={"files": files.png.read_bytes()}, timeout=120)
    assert not list(site.started_in.iterdir())
    assert os.environ["GRADIO_TEMP_DIR"] == str(site.folder)
    assert list(site.folder.iterdir()), "uploads lie here"
    assert not list((Path(__file__).parents[2] / "demo").rglob("*.pyi")), "Gradio writes them beside subclasses"


def test_the_command(tmp_path, files):
    """``mmaccel demo`` serves, answers a program, and leaves nothing behind when it is interrupted."""
    import signal
    import subprocess

    from gradio_client import Client, handle_file

    command = [sys.executable, "-m", "mmaccel", "demo", "--json", "--device", "cpu"]
    here = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    here.pop("GRADIO_TEMP_DIR", None)  # as a user starts it
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=here)
    try:
        address = json.loads(server.stdout.readline())["address"]
        assert address.startswith("http://127.0.0.1:")
        client = Client(address, verbose=False)
        until(lambda: client.predict(api_name="/recipes"), 240, every=0.5)
        found = client.predict(handle_file(str(files.png)), files.question, api_name="/ask_picture")
        assert found["full"]["answer"] == files.answer
        held = [path.name for path in tmp_path.iterdir()]
        assert len(held) == 1 and held[0].startswith("mmaccel-demo-"), held
    finally:
        # where the tests themselves run in the background, what they start ignores Ctrl-C
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        server.send_signal(signal.SIGTERM if deaf else signal.SIGINT)
        assert server.wait(60) == 0
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_started(capsys, monkeypatch):
    """Each in a sentence with its remedy."""
    from mmaccel_demo.engine import House

    from mmaccel.cli import main

    assert main(["demo", "--model", "./nowhere"]) == 2
    assert "There is no folder './nowhere'" in capsys.readouterr().err
    monkeypatch.setattr(House, "load", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["demo", "--port", port]) == 2
    said = capsys.readouterr().err
    assert port in said and "give another --port" in said and "GRADIO" not in said and said.count("\n") == 1
    assert main(["demo", "--port", "99999"]) == 2
    assert "from 1 to 65535, not 99999" in capsys.readouterr().err
    for seconds in ("0", "-1", "nan", "inf"):
        assert main(["demo", f"--time-limit={seconds}"]) == 2
        assert "--time-limit must be seconds above 0" in capsys.readouterr().err
