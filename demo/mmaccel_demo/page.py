"""The page: six tabs over the engines, and the endpoints of the API."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
import pandas as pd

from mmaccel import MmaccelError, Recipe, get_recipe
from mmaccel.accelerate.drafting import SELF
from mmaccel.decoding.drafters import DEFAULT, DRAFTERS
from mmaccel.media.files import Prompt

from . import cards, limits, overlay
from .engine import Exchange, House
from .examples import KNOWN, Example
from .visitors import Live, Visitor, Visitors

#: what uses a model waits in one queue, from which as many are taken as are answered at once
_QUEUED: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": "default"}
#: what was worked out before, or waits until the model is loaded, keeps nobody from asking
_OPENING: dict[str, Any] = {"concurrency_id": "opening", "concurrency_limit": None}
#: what only draws does not wait, and is nothing for the API
_AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
#: recipes that are asked first: of most tabs, and where layers are shown one that works in them
_START, _LAYERED = "balanced", "pyramiddrop"
_COMPARED = ["uniform", "divprune", "vtc-cls", "fastv", "pool"]
#: recipes that are compared at once
_MOST = 6
_ANSWER = 64
_SECONDS = 1.0
log = logging.getLogger("mmaccel_demo")

Handler = Callable[..., Iterator[Any]]


class _Uploaded:
    """A component whose files come from the visitor's machine and nowhere else, and are not opened by Gradio."""

    is_template = True

    async def async_move_resource_to_block_cache(self, url_or_file_path: Any) -> Any:
        """Addresses are not fetched."""
        if str(url_or_file_path).lower().startswith(("http:", "https:")):
            raise gr.Error("Addresses are not fetched; upload the file itself.")
        return await super().async_move_resource_to_block_cache(url_or_file_path)  # type: ignore[misc]

    def preprocess(self, payload: Any) -> str | None:
        """The path of the upload; :mod:`mmaccel_demo.limits` looks at it before anything decodes it."""
        return None if payload is None else payload.path


def _uploaded(base: Any) -> Any:
    """The component ``base`` for uploads alone."""
    members = {"get_block_name": lambda self: base.__name__.lower(), "__module__": __name__}
    # Gradio's own metaclass would write a .pyi beside this file
    return ABCMeta.__new__(type(base), f"Uploaded{base.__name__}", (_Uploaded, base), members)


_Picture, _Clip = _uploaded(gr.Image), _uploaded(gr.Video)


def _said(outputs: int) -> Callable[[Handler], Handler]:
    """Errors of a handler as a sentence in the first of its outputs; the others go on showing what they show."""

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        def told(*args: Any) -> Iterator[Any]:
            try:
                yield from handler(*args)
            except Exception as error:
                if not isinstance(error, MmaccelError):
                    log.exception("a fault of the demo")
                yield cards.say(cards.sentence(error), error=True), *[gr.skip()] * (outputs - 1)

        return told

    return wrap


def _reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of an endpoint as the sentence that its caller gets."""

    @functools.wraps(function)
    def told(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            if not isinstance(error, MmaccelError):
                log.exception("a fault of the demo")
            raise gr.Error(cards.sentence(error), print_exception=False) from None

    return told


def build(house: House, examples: list[Example]) -> gr.Blocks:
    """The page over the engines of ``house``; it may be shown before they are loaded."""
    visitors = Visitors()
    with gr.Blocks(title="mmaccel", analytics_enabled=False, delete_cache=(600, 1800)) as blocks:
        gr.HTML(
            '<header class="mm-head"><h1>mmaccel</h1><p>One question, two answers: of the full model, and of the same model '
            "with fewer visual tokens.</p></header>"
        )
        state = gr.HTML(elem_id="state")
        with gr.Tab("Picture"):
            picture = _asking(house, visitors, "picture", "picture", examples, [blocks.load])
        with gr.Tab("Video") as tab:
            video = _asking(house, visitors, "video", "video", examples, [tab.select])
        with gr.Tab("Layers") as tab:
            layers = _asking(house, visitors, "layers", "picture", examples, [tab.select])
        with gr.Tab("Compare recipes"):
            compared = _comparing(house, visitors, examples)
        with gr.Tab("Drafts"):
            _drafting(house, visitors, examples)
        with gr.Tab("Stream"):
            stream = _streaming(house, visitors, examples)
        _endpoints(house)

        timer = gr.Timer(1.0)
        lists = [picture, video, layers, compared, stream]

        def ready(*chosen: Any) -> list[Any]:
            return [
                cards.say(house.sentence(), error=house.ready and not house.choices),
                gr.Timer(active=not house.ready),
                *(_choices(house, kind, one) for kind, one in zip(_KINDS, chosen[:-1], strict=True)),
                _choices(house, "video", chosen[-1], _follows),
            ]

        gr.on([blocks.load, timer.tick], ready, lists, [state, timer, *lists], **_AT_ONCE)

        def leave(request: gr.Request) -> None:
            visitors.leave(str(request.session_hash))

        blocks.unload(leave)
    return blocks


#: what is asked about where a list of recipes stands
_KINDS = ("picture", "video", "picture", "picture")


def _choices(house: House, kind: str, chosen: Any, only: Callable[[Recipe], bool] = lambda one: True) -> Any:
    """The recipes of a list once it is known which the model can honour, and those of the ``chosen`` that are among them;
    until then the list stays as it is."""
    if not (found := [one for one in house.choices.get(kind, []) if only(one)]):
        return gr.skip()
    names = [one.name for one in found]
    left = [one for one in ([chosen] if isinstance(chosen, str) else chosen or []) if one in names]
    if isinstance(chosen, str):
        # what the settings say of the chosen one stays true
        return gr.update(choices=cards.choices(found), value=left[0] if left else None)
    return gr.update(choices=cards.choices(found), value=left or names[:1])


def _follows(one: Recipe) -> bool:
    """Whether a stream can be followed with a recipe: one that evicts from the cache."""
    return cards.site(one) == "cache" and len(one.stages) == 1 and one.primary is not None


def _known() -> list[tuple[str, str]]:
    from mmaccel import recipes

    return cards.choices([one for one in recipes().values() if one.stages])


def _media(kind: str, value: str | None = None) -> Any:
    if kind == "picture":
        return _Picture(
            value, label="Picture", sources=["upload", "clipboard"], type="filepath", height=170, elem_id="picture"
        )
    return _Clip(value, label="Clip", sources=["upload"], height=170)


def _shown(kind: str, path: str | None, question: str | None, frames: float = limits.FRAMES) -> Prompt:
    """What a visitor asks, checked."""
    asked = limits.question(question)
    if kind == "picture":
        return Prompt(asked, (limits.picture(path),))
    return Prompt(asked, clip=limits.clip(path, limits.number(frames, 2, limits.FRAMES, "The number of frames")))


def _brought(house: House, examples: list[Example], kind: str, name: str) -> tuple[Any, Any, Any]:
    """The thumbnails of the examples, and below them the picture or clip and the question, filled with the first of them.

    Returns what has happened once another is chosen, the medium, and the question.
    """
    found = [one for one in examples if one.kind == kind]
    first = found[0] if found else None
    # of a model that somebody brings nothing is known
    known = KNOWN[kind] if house.options.model is None else None
    thumbs = gr.Dataset(
        components=[gr.Image(render=False) if kind == "picture" else gr.Video(render=False)],
        samples=[[str(one.path)] for one in found],
        label="Examples",
        type="index",
        visible=bool(found),
        elem_classes="mm-thumbs",
    )
    media = _media(kind, str(first.path) if first else None)
    question = gr.Textbox(
        first.question if first else None, label="Question", info=known, max_lines=3, elem_classes=f"question-{name}"
    )

    def pick(number: int) -> tuple[str, str]:
        return str(found[number].path), found[number].question

    picked = thumbs.click(pick, thumbs, [media, question], **_AT_ONCE)
    # in the browser, so that no question is lost that is written while a server would answer
    media.upload(None, question, question, js="mmaccel.ownQuestion", **_AT_ONCE)
    return picked, media, question


def _buttons(name: str) -> tuple[Any, Any]:
    with gr.Row(elem_classes="mm-buttons"):
        return gr.Button(name, variant="primary", min_width=80), gr.Button("Stop", min_width=80)


# ------------------------------------------------------------------------------------------------------- picture, video


def _asking(house: House, visitors: Visitors, name: str, kind: str, examples: list[Example], opened: list[Any]) -> Any:
    """The tab ``name``: one question about a picture or clip, two answers, and the drawing. Most tabs show what the recipe
    saves and go through its sites; ``layers`` shows what each layer of the model has. Returns the list of recipes."""
    layered = name == "layers"
    start = _LAYERED if layered else _START
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picked, media, question = _brought(house, examples, kind, name)
            ask, stop = _buttons("Ask")
            chosen, panel, frames, longest = _settings(kind, start)
        with gr.Column(scale=3, min_width=300):
            said = gr.HTML(elem_classes=f"said-{name}")
            answers = gr.HTML(elem_classes=f"answers-{name}")
            figures = gr.HTML(elem_classes=f"figures-{name}")
            label = "Through the layers" if layered else "Through sites and layers"
            step = gr.Slider(0, 1, 0, step=1, label=label, visible=False, elem_classes="mm-step")
            pair = gr.HTML(elem_classes=f"pair-{name}")
            # a clip has no pair: its frames are what is seen first
            with gr.Accordion("Token by token" if kind == "picture" else "Frame by frame", open=kind == "video"):
                drawing = gr.HTML(elem_classes=f"drawing-{name}")

    def show(visitor: Visitor, exchange: Exchange) -> tuple[Any, ...]:
        view = exchange.fast[0].view
        if view is not None and layered:
            view = dataclasses.replace(view, steps=view.layers)
        visitor.views[name] = view
        last = len(view.steps) - 1 if view is not None else 0
        slider = gr.update(maximum=max(1, last), value=last, visible=last > 0)
        if not exchange.done or view is None:
            return cards.say(exchange.note()), cards.columns(exchange), "", slider, "", ""
        found = cards.layers(view) if layered else cards.figures(exchange)
        table = cards.table(found, "what each layer has" if layered else "figures")
        drawn = overlay.divided(overlay.pair(view, last)), overlay.draw(view, last)
        return cards.say(exchange.note()), cards.columns(exchange), table, slider, *drawn

    def run(
        visitor: Visitor,
        stop: threading.Event,
        media: str | None,
        question: str,
        panel: str,
        longest: float,
        frames: float,
    ) -> Iterator[Any]:
        prompt = _shown(kind, media, question, frames)
        recipes = [limits.recipe(panel)]
        length = limits.number(longest, 1, limits.ANSWER, "The longest answer")
        for exchange in house.engine(kind).ask(prompt, recipes, length, stop):
            yield cards.say(exchange.busy), cards.columns(exchange), *[gr.skip()] * 4
        yield show(visitor, exchange)

    def welcome(visitor: Visitor, stop: threading.Event, *inputs: Any) -> Iterator[Any]:
        house.wait(stop)
        if stop.is_set():
            return
        first = next((one for one in examples if one.kind == kind), None)
        if first is None or visitor.views.get(name) is not None:
            return
        if (known := house.welcome.get(name)) is None:
            prompt = _shown(kind, str(first.path), first.question, _SHOWN)
            for exchange in house.engine(kind).ask(prompt, [limits.recipe(start)], _ANSWER, stop):
                yield cards.say(exchange.busy), cards.columns(exchange), *[gr.skip()] * 4
            if exchange.done:
                house.welcome[name] = exchange
            known = exchange
        yield show(visitor, known)

    def move(step: float | None, request: gr.Request) -> tuple[Any, Any]:
        view = visitors[str(request.session_hash)].views.get(name)
        if view is None or step is None:
            return gr.skip(), gr.skip()
        number = min(int(step), len(view.steps) - 1)
        return overlay.divided(overlay.pair(view, number)), overlay.draw(view, number)

    inputs, outputs = [media, question, panel, longest, frames], [said, answers, figures, step, pair, drawing]
    blank = ("", "", "", _NOTHING, "", "")
    _turns(visitors, [ask.click, question.submit], stop, run, inputs, outputs, blank, picked)
    _opening(visitors, opened, welcome, outputs)
    step.input(move, step, [pair, drawing], trigger_mode="always_last", **_AT_ONCE)
    return chosen


_NOTHING: dict[str, Any] = gr.update(visible=False)
#: frames of a clip that are shown unless others are chosen
_SHOWN = 16


def _opening(visitors: Visitors, opened: list[Any], welcome: Handler, outputs: list[Any]) -> None:
    """An example is answered when the page, or the tab, is opened, unless something was asked there before."""

    @_said(len(outputs))
    def turn(request: gr.Request) -> Iterator[Any]:
        visitor = visitors[str(request.session_hash)]
        yield from welcome(visitor, visitor.show())

    gr.on(opened, turn, None, outputs, **_OPENING, api_visibility="private", show_progress="hidden")


def _turns(
    visitors: Visitors,
    asked: list[Any],
    stop: gr.Button,
    run: Handler,
    inputs: list[Any],
    outputs: list[Any],
    blank: tuple[Any, ...],
    picked: Any = None,
) -> None:
    """Requests are numbered, and the outputs are made ``blank``, at once; it is ``run`` when its turn has come. And the
    button that stops it. An example that is ``picked`` is asked too."""
    number = gr.Number(visible=False)

    def begin(request: gr.Request) -> tuple[Any, ...]:
        return visitors[str(request.session_hash)].begin(), *blank

    @_said(len(outputs))
    def turn(number: float, request: gr.Request, *inputs: Any) -> Iterator[Any]:
        visitor = visitors[str(request.session_hash)]
        stop = visitor.turn(int(number))
        if stop.is_set():
            yield cards.say("Stopped before it was asked."), *[gr.skip()] * (len(outputs) - 1)
            return
        yield from run(visitor, stop, *inputs)

    def halt(request: gr.Request) -> Any:
        visitor = visitors[str(request.session_hash)]
        visitor.halt()
        waits = "The question is taken back; it leaves the queue when its turn has come."
        return cards.say(waits) if visitor.waits else gr.skip()

    begun = [gr.on(asked, begin, None, [number, *outputs], **_AT_ONCE)]
    if picked is not None:
        begun.append(picked.then(begin, None, [number, *outputs], **_AT_ONCE))
    for one in begun:
        one.then(
            turn,
            [number, *inputs],
            outputs,
            **_QUEUED,
            api_visibility="private",
            show_progress="minimal",
            # a question that comes while another is answered ends that one, and is asked then
            trigger_mode="always_last",
        )
    stop.click(halt, None, outputs[0], **_AT_ONCE)


def _settings(kind: str, start: str) -> tuple[Any, Any, Any, Any]:
    """The list of recipes with that of the name ``start`` chosen, and folded away the budget, the lengths, and the recipe as
    JSON, which is what counts; returns the list, the JSON, the number of frames, and the longest answer."""
    first = get_recipe(start)
    chosen = _list(_known(), start, label="Recipe", info="Type to search all of them.")
    with gr.Accordion("Settings", open=False):
        about = gr.HTML(cards.about(first))
        retain = gr.Slider(0.05, 1.0, first.retain, step=0.05, label="Share of the visual tokens that stays")
        frames = gr.Slider(
            2, limits.FRAMES, _SHOWN, step=2, label="Frames of the clip, evenly spaced", visible=kind == "video"
        )
        longest = gr.Slider(1, limits.ANSWER, _ANSWER, step=1, label="Longest answer, in tokens")
    with gr.Accordion("Share the recipe as JSON", open=False):
        text = gr.Textbox(
            first.to_json(), label="Copy this recipe, or paste another one", lines=12, max_lines=24, buttons=["copy"],
            elem_classes="mm-code",
        )  # fmt: skip
        verdict = gr.HTML(cards.say("The recipe is valid."))

    def budget(one: Recipe) -> Any:
        if not isinstance(one.retain, float):
            return gr.update(interactive=False)
        return gr.update(value=one.retain, interactive=True)

    def pick(name: str) -> tuple[Any, ...]:
        one = limits.recipe(name)
        return cards.about(one), budget(one), one.to_json(), cards.say("The recipe is valid.")

    def keep(text: str, retain: float | None) -> tuple[Any, ...]:
        try:
            one = limits.recipe(text, retain)
        except MmaccelError as error:
            return gr.skip(), gr.skip(), cards.say(str(error), error=True)
        return cards.about(one), one.to_json(), cards.say("The recipe is valid.")

    def write(text: str) -> tuple[Any, ...]:
        try:
            one = limits.recipe(text)
        except MmaccelError as error:
            return gr.skip(), cards.say(str(error), error=True)
        return cards.about(one), cards.say("The recipe is valid.")

    def settle(text: str) -> Any:
        try:
            return budget(limits.recipe(text))
        except MmaccelError:
            return gr.skip()

    chosen.input(pick, chosen, [about, retain, text, verdict], **_AT_ONCE)
    retain.input(keep, [text, retain], [about, text, verdict], trigger_mode="always_last", **_AT_ONCE)
    # Gradio's "input" of a text is a key alone, not what is pasted; the slider waits, or it would move under the hand
    text.change(write, text, [about, verdict], trigger_mode="always_last", **_AT_ONCE)
    text.blur(settle, text, retain, **_AT_ONCE)
    return chosen, text, frames, longest


def _list(found: list[tuple[str, str]], value: Any, **options: Any) -> Any:
    """A list of recipes that offers the curated ones, and searches all."""
    return gr.Dropdown(found, value=value, num_choices_shown=cards.OFFERED, **options)


# -------------------------------------------------------------------------------------------------------------- compare


def _comparing(house: House, visitors: Visitors, examples: list[Example]) -> Any:
    """Several recipes on one picture; returns the list of recipes."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picked, media, question = _brought(house, examples, "picture", "compare")
            ask, stop = _buttons("Compare")
            label = f"Recipes, {_MOST} at the most"
            chosen = _list(_known(), _COMPARED, multiselect=True, max_choices=_MOST, label=label)
            with gr.Accordion("Settings", open=False):
                retain = gr.Slider(0.05, 1.0, 0.25, step=0.05, label="Share of the visual tokens that stays")
        with gr.Column(scale=3, min_width=300):
            hint = cards.say("Choose an example or upload a picture, and see what each recipe makes of it.")
            said = gr.HTML(hint, elem_classes="said-compare")
            table = gr.HTML(elem_classes="answers-compare")
            drawings = gr.HTML(elem_classes="drawing-compare")

    def run(
        visitor: Visitor,
        stop: threading.Event,
        media: str | None,
        question: str,
        names: list[str],
        retain: float | None,
    ) -> Iterator[Any]:
        prompt = _shown("picture", media, question)
        if not 1 <= len(names or []) <= _MOST:
            raise MmaccelError(f"Choose 1 to {_MOST} recipes to compare.")
        found = [limits.recipe(name, retain) for name in names]
        for exchange in house.engine("picture").ask(prompt, found, _ANSWER, stop):
            compared = cards.table(cards.comparison(exchange), "recipes compared")
            yield cards.say(exchange.busy), compared, gr.skip()
        views = [(one.title, one.view) for one in exchange.fast if one.view is not None]
        yield cards.say(exchange.note()), compared, overlay.divided(overlay.sheet(views))

    inputs, outputs = [media, question, chosen, retain], [said, table, drawings]
    _turns(visitors, [ask.click, question.submit], stop, run, inputs, outputs, ("", "", ""), picked)
    return chosen


# --------------------------------------------------------------------------------------------------------------- drafts


def _drafting(house: House, visitors: Visitors, examples: list[Example]) -> None:
    """One question about a picture, asked twice with drafts: which token of the full model's answer was drafted by whom."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            picked, media, question = _brought(house, examples, "picture", "drafts")
            ask, stop = _buttons("Ask twice")
            copying = gr.Dropdown(
                [("nobody", ""), *((name, name) for name in DRAFTERS)], value=DEFAULT, label="Who copies"
            )
            own = gr.Checkbox(False, label=f"The model drafts for itself, with the tokens that {_START} keeps")
            longest = gr.Slider(1, limits.ANSWER, _ANSWER, step=1, label="Longest answer, in tokens")
        with gr.Column(scale=3, min_width=300):
            hint = cards.say(
                "Both answers are the full model's. Drafted tokens are underlined; the model has verified them."
            )
            said = gr.HTML(hint, elem_classes="said-drafts")
            answers = gr.HTML(elem_classes="answers-drafts")
            figures = gr.HTML(elem_classes="figures-drafts")

    def run(
        visitor: Visitor,
        stop: threading.Event,
        media: str | None,
        question: str,
        copying: str | None,
        own: bool,
        longest: float,
    ) -> Iterator[Any]:
        prompt = _shown("picture", media, question)
        length = limits.number(longest, 1, limits.ANSWER, "The longest answer")
        if not copying and not own:
            raise MmaccelError("Nobody drafts; choose who copies, or let the model draft for itself.")
        drafts = {"lookup": copying or False, "draft": SELF if own else None}
        for exchange in house.engine("picture").ask_twice(prompt, get_recipe(_START), drafts, length, stop):
            yield cards.say(exchange.busy), cards.columns(exchange), gr.skip()
        if exchange.done:
            table = cards.table(cards.drafting(exchange), "what drafts saved")
            yield cards.say(exchange.note()), cards.drafts(exchange), table

    inputs, outputs = [media, question, copying, own, longest], [said, answers, figures]
    _turns(visitors, [ask.click, question.submit], stop, run, inputs, outputs, ("", "", ""), picked)


# --------------------------------------------------------------------------------------------------------------- stream


def _streaming(house: House, visitors: Visitors, examples: list[Example]) -> Any:
    """A clip that comes as if live, and questions at any time; returns the list of recipes."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            _, media, question = _brought(house, examples, "video", "stream")
            start, stop = _buttons("Start")
            found = [one for one in _known() if _follows(get_recipe(one[1]))]
            chosen = _list(found, "infinipot-v", label="Recipe that keeps the cache under its cap")
            with gr.Accordion("Settings", open=False):
                cap = gr.Slider(128, 4096, 512, step=64, label="Keys that each head of a layer may hold")
        with gr.Column(scale=3, min_width=300):
            hint = cards.say("Start: the clip comes as if live, over and over. Ask at any time.")
            said = gr.HTML(hint, elem_classes="said-stream")
            ask = gr.Button("Ask now", min_width=80)
            answers = gr.HTML(elem_classes="answers-stream")
            frame, told = gr.HTML(elem_classes="frame-stream"), gr.HTML(elem_classes="memory-stream")
            line = gr.LinePlot(
                x="frames", y="KiB", title="KV cache", x_title="frames read", y_lim=[0, None], height=200, visible=False,
                buttons=[], elem_classes="line-stream",
            )  # fmt: skip
    small = "The small model learned on clips of 16 frames: it answers well early, and badly once far more have come."
    note = cards.say("" if house.options.model else small)
    timer = gr.Timer(_SECONDS, active=False)

    @_said(6)
    def begin(media: str | None, chosen: str, cap: float, request: gr.Request) -> Iterator[Any]:
        visitor = visitors[str(request.session_hash)]
        visitor.live, visitor.starting = None, (mine := object())
        visitors.room(visitor)
        engine = house.engine("video")
        clip = limits.clip(media, limits.STREAMED, fps=limits.STREAM_FPS)
        live = Live(engine, limits.recipe(chosen), clip, limits.number(cap, 64, 4096, "The cap"))
        if visitor.starting is not mine:  # stopped, or started anew, while the clip was decoded
            yield (gr.skip(),) * 6
            return
        visitor.live, visitor.starting = live, None
        yield note, gr.Timer(active=True), "", "", _NOTHING, ""

    @_said(5)
    def tick(request: gr.Request) -> Iterator[Any]:
        live = visitors[str(request.session_hash)].live
        if live is None:
            yield gr.skip(), gr.Timer(active=False), *[gr.skip()] * 3
            return
        try:
            shown = live.step()
        except Exception:
            visitors[str(request.session_hash)].live = None
            raise
        chart = gr.update(value=pd.DataFrame(cards.line(live.points)), visible=True)
        yield gr.skip(), gr.skip(), overlay.frame(shown), cards.memory(live.points, live.cap), chart

    @_said(2)
    def now(question: str, before: str, request: gr.Request) -> Iterator[Any]:
        live = visitors[str(request.session_hash)].live
        if live is None:
            raise MmaccelError("No stream runs; start one first.")
        asked = limits.question(question)
        yield note, cards.asked(asked, live.ask(asked, _ANSWER), live.session.frames) + (before or "")

    def halt(request: gr.Request) -> Any:
        visitor = visitors[str(request.session_hash)]
        early = visitor.live is None and visitor.starting is not None
        visitor.live = visitor.starting = None
        return cards.say("The stream is not started.") if early else gr.skip(), gr.Timer(active=False)

    start.click(
        begin,
        [media, chosen, cap],
        [said, timer, frame, told, line, answers],
        api_visibility="private",
        show_progress="minimal",
    )
    timer.tick(tick, None, [said, timer, frame, told, line], **_AT_ONCE)
    gr.on(
        [ask.click, question.submit],
        now,
        [question, answers],
        [said, answers],
        **_QUEUED,
        api_visibility="private",
        show_progress="minimal",
    )
    stop.click(halt, None, [said, timer], **_AT_ONCE)
    return chosen


# ------------------------------------------------------------------------------------------------------------------ API


def _endpoints(house: House) -> None:
    """What programs call; hidden from the page."""

    def answer(kind: str, path: str | None, question: str, name: str, retain: float, longest: float) -> dict[str, Any]:
        # 0 leaves the budget to the recipe
        chosen = limits.recipe(name, retain or None)
        prompt = _shown(kind, path, question, 16)
        length = limits.number(longest, 1, limits.ANSWER, "longest")
        *_, exchange = house.engine(kind).ask(prompt, [chosen], length, threading.Event())
        report = exchange.report()
        return {"full": report["full"], "accelerated": report["accelerated"][0]}

    def ask_picture(picture: str | None, question: str, recipe: str, retain: float, longest: float) -> Any:
        """Ask about a picture, in full and accelerated. ``recipe``: a name of /recipes, or a recipe as JSON; ``retain``: the
        share of the visual tokens that stays, 0 for the recipe's own; ``longest``: tokens of an answer."""
        return answer("picture", picture, question, recipe, retain, longest)

    def ask_video(video: str | None, question: str, recipe: str, retain: float, longest: float) -> Any:
        """The same about a clip, of which 16 evenly spaced frames are shown."""
        return answer("video", video, question, recipe, retain, longest)

    def recipes() -> Any:
        """The names of the recipes that the loaded models can honour: for pictures, and for clips."""
        return {kind: [name for _, name in cards.choices(found)] for kind, found in house.choices.items()}

    with gr.Group(visible=False):
        rest = [
            gr.Textbox(label="question"),
            gr.Textbox(_START, label="recipe"),
            gr.Number(0, label="retain"),
            gr.Number(_ANSWER, label="longest"),
        ]
        out = gr.JSON()
        picture, video = _media("picture"), _media("video")
        for function, media in ((ask_picture, picture), (ask_video, video)):
            name = function.__name__
            gr.Button().click(_reported(function), [media, *rest], out, api_name=name, **_QUEUED)
        gr.Button().click(_reported(recipes), None, out, api_name="recipes", queue=False)
