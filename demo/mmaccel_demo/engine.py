"""Asking: in full and accelerated, one after the other, with tokens as they come and figures at the end.

A model answers one question at a time: a recipe hangs on the model itself, and two runs at once would spoil each other's
times. Who comes meanwhile waits for the lock, or, where several are answered at once, is answered by a twin of the model, which
has the same weights and recipes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from mmaccel import MmaccelError, Recipe, UnsupportedError, accelerated, prepare, recipes
from mmaccel import get_recipe as recipe_of
from mmaccel.cli import ask
from mmaccel.core.transformers_api import cache_of
from mmaccel.media.files import Prompt, encode
from mmaccel.programs.model_lock import ModelSlot, Stopped, TimeLimitExceeded, TokenTimer

from . import limits
from .overlay import View, view_of

#: parameters below which a model gains no time from fewer tokens: each layer waits longer for Python than it computes
GAINS = 50_000_000
#: runs of which a time is the median, and tokens that each of them generates
_RUNS, _RUN_TOKENS = 3, 16
#: seconds after which a silent run looks whether it is to stop
_LOOK = 0.1


@dataclass(frozen=True)
class Drafted:
    """The drafts of an answer.

    pieces : the text and the drafter of every token, which is empty for the model's own.
    figures, notes : ``stats()["drafting"]`` and ``stats()["notes"]``.
    """

    pieces: list[tuple[str, str]]
    figures: dict[str, Any]
    notes: list[str]


@dataclass
class Column:
    """One answer. ``state``: ``waits``, ``runs``, ``done``, ``stopped``, or ``refused`` with the reason in ``text``.

    agreement, view : how far it agrees with the full answer, and what became of the visual tokens; once it is done, and not
        for the full answer itself.
    first_token_seconds, tokens_per_second : medians of several runs; None where none were measured.
    drafted : of an answer with drafts.
    """

    title: str
    text: str = ""
    tokens: int = 0
    state: str = "waits"
    answer: ask.Answer | None = None
    agreement: dict[str, Any] | None = None
    view: View | None = None
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    drafted: Drafted | None = None


@dataclass
class Exchange:
    """A question and its answers: of the full model, and of every recipe.

    times : how times were measured, or why none are shown.
    busy : what is done once the answers are complete; empty when nothing is.
    """

    full: Column
    fast: list[Column]
    times: str = ""
    busy: str = ""
    #: it is to stop, and the model is at work on the token after which it does
    stopping: bool = False

    @property
    def done(self) -> bool:
        """Whether every answer is complete."""
        return all(one.state == "done" for one in (self.full, *self.fast))

    @property
    def timed(self) -> bool:
        """Whether times were measured."""
        return self.full.first_token_seconds is not None

    def note(self) -> str:
        """Notes on what the figures do not show."""
        notes = [note for one in self.fast if one.answer is not None for note in one.answer.stats["notes"]]
        notes += [note for one in (self.full, *self.fast) if one.drafted is not None for note in one.drafted.notes]
        if self.full.state == "done":
            notes.append(self.times)
        return " ".join(f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in dict.fromkeys(notes) if note)

    def report(self) -> dict[str, Any]:
        """As plain data, once all are done."""
        return {
            "full": _plain(self.full),
            "accelerated": [{"recipe": one.title, "agreement": one.agreement, **_plain(one)} for one in self.fast],
        }


def _plain(column: Column) -> dict[str, Any]:
    if column.answer is None:
        return {"refused": column.text}
    found = column.answer.public()
    # these are of a single run
    del found["total_seconds"]
    stats = {name: value for name, value in found["stats"].items() if name != "seconds"}
    medians = {name: getattr(column, name) for name in ("first_token_seconds", "tokens_per_second")}
    return {**found, "stats": stats, **medians}


class _Stoppable(TokenTimer):
    """A streamer by which ``look`` ends the run when it is to stop."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def put(self, value: Any) -> None:
        """The prompt, then a token at a time."""
        super().put(value)
        self.look()


class _Typing(_Stoppable):
    """One that shows the text so far too."""

    def __init__(self, tokenizer: Any, look: Callable[[], None], show: Callable[[str, int], None]) -> None:
        super().__init__(look)
        self.tokenizer, self.show = tokenizer, show
        self.ids: list[int] = []

    def put(self, value: Any) -> None:
        """The prompt, then a token at a time."""
        super().put(value)
        if len(self.times) > 1:
            self.ids += value.reshape(-1).tolist()
            self.show(self.tokenizer.decode(self.ids, skip_special_tokens=True).strip(), len(self.ids))


class Engine(ModelSlot):
    """One model with its processor.

    Parameters
    ----------
    model, processor : of a supported family, ready to generate.
    name : what the page calls the model.
    seconds : that it works for one question.
    several : questions that are answered at once.
    """

    def __init__(
        self, model: Any, processor: Any, name: str, seconds: float = limits.ANSWERED, several: int = 1
    ) -> None:
        super().__init__(model, processor, seconds)
        self.name = name
        self.parameters = sum(one.numel() for one in model.parameters())
        self.twins = [Engine(*self.twin(), name, seconds) for _ in range(several - 1)]

    def free(self) -> Engine:
        """This engine or a twin that answers nobody; this one if there is none."""
        return next((one for one in (self, *self.twins) if not one.lock.locked()), self)

    @property
    def takes_video(self) -> bool:
        """Whether the model can be shown clips."""
        return getattr(self.processor, "video_processor", None) is not None

    def possible(self, chosen: Sequence[Recipe]) -> list[Recipe]:
        """Recipes that this model can run."""
        found = []
        for one in chosen:
            try:
                with self.lock, accelerated(self.model, one, processor=prepare(self.processor, one)):
                    found.append(one)
            except MmaccelError:
                continue
        return found

    def ask(self, prompt: Prompt, chosen: Sequence[Recipe], longest: int, stop: threading.Event) -> Iterator[Exchange]:
        """The exchange again and again while it grows; the last one is complete, or says that it was stopped.

        Parameters
        ----------
        longest : tokens an answer may have.
        stop : ends the answer that runs, at its next token or block, and those behind it before they begin.

        Raises
        ------
        MmaccelError
            If none of the recipes, or the prompt, can be honoured, or the time for one question is over.
        """
        exchange = Exchange(Column("full model"), [Column(_title(one)) for one in chosen])

        def answers(look: Callable[[], None], tell: Callable[[], None]) -> None:
            self._all(exchange, prompt, chosen, longest, look, tell)

        yield from self._follow(exchange, answers, stop)

    def ask_twice(
        self, prompt: Prompt, recipe: Recipe, drafts: Mapping[str, Any], longest: int, stop: threading.Event
    ) -> Iterator[Exchange]:
        """As :meth:`ask`, for the full model's answer with ``drafts`` (``draft`` and ``lookup`` of ``accelerate_vlm``) to a
        question, and to the same question again, when the answer can be copied. ``recipe`` shapes what drafts."""
        exchange = Exchange(Column("asked first"), [Column("asked again")])

        def answers(look: Callable[[], None], tell: Callable[[], None]) -> None:
            with accelerated(self.model, recipe, processor=self.processor, lossless=True, **drafts):
                for column in (exchange.full, *exchange.fast):
                    self._draft(column, prompt, longest, look, tell)

        yield from self._follow(exchange, answers, stop)

    def _follow(
        self,
        exchange: Exchange,
        answers: Callable[[Callable[[], None], Callable[[], None]], None],
        stop: threading.Event,
    ) -> Iterator[Exchange]:
        """The exchange again and again while ``answers`` fill it in a thread."""
        news: queue.Queue[BaseException | None] = queue.Queue()

        def work() -> None:
            try:
                with self.turn(stop) as look:
                    answers(look, lambda: news.put(None))
            except BaseException as error:
                if isinstance(error, TimeLimitExceeded):
                    for column in (exchange.full, *exchange.fast):
                        column.state = "stopped" if column.state in ("waits", "runs") else column.state
                news.put(error)
            else:
                news.put(StopIteration())

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            while True:
                try:
                    found = news.get(timeout=_LOOK)
                except queue.Empty:
                    if stop.is_set() and not exchange.stopping:
                        exchange.stopping = True
                        yield exchange
                    continue
                # what has piled up is shown at once
                while found is None and not news.empty():
                    found = news.get()
                yield exchange
                if isinstance(found, StopIteration):
                    return
                if found is not None:
                    raise found
        finally:
            stop.set()
            worker.join()

    def _all(
        self,
        exchange: Exchange,
        prompt: Prompt,
        chosen: Sequence[Recipe],
        longest: int,
        look: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        refused: list[MmaccelError] = []
        for column, recipe in zip(exchange.fast, chosen, strict=True):
            try:
                with accelerated(self.model, recipe, processor=prepare(self.processor, recipe)):
                    pass  # what the model cannot do is said before the long run, not after it
            except MmaccelError as error:
                refused.append(error)
                column.state, column.text = "refused", str(error)
        if len(refused) == len(chosen):
            raise refused[0]
        self._one(exchange.full, prompt, recipe_of("none"), longest, look, tell)
        for column, recipe in zip(exchange.fast, chosen, strict=True):
            if column.state == "refused":
                continue
            self._one(column, prompt, recipe, longest, look, tell)
            if exchange.full.answer is not None and column.answer is not None:
                column.agreement = ask.agreement(exchange.full.answer, column.answer)
                column.answer.logits = None
        if exchange.full.answer is not None:
            exchange.full.answer.logits = None
            self._time(exchange, prompt, chosen, longest, look, tell)

    def _time(
        self,
        exchange: Exchange,
        prompt: Prompt,
        chosen: Sequence[Recipe],
        longest: int,
        look: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        """Measure the full model and the recipes in turn, each of them several times and warm."""
        if self.parameters < GAINS:
            exchange.times = (
                f"no times are shown: {self.name} has {self.parameters / 1e6:.1f} million parameters, too few to gain time "
                "from fewer tokens"
            )
            return
        pairs = [(exchange.full, recipe_of("none")), *zip(exchange.fast, chosen, strict=True)]
        pairs = [(column, recipe) for column, recipe in pairs if column.answer is not None]
        firsts: list[list[float]] = [[] for _ in pairs]
        rates: list[list[float]] = [[] for _ in pairs]
        exchange.times = f"no times are shown: the question ended before {_RUNS} runs of each answer were measured"
        with contextlib.suppress(Stopped, TimeLimitExceeded):
            for number in range(_RUNS):
                exchange.busy = f"Times are being measured: run {number + 1} of {_RUNS} ..."
                tell()
                for (_, recipe), first, rate in zip(pairs, firsts, rates, strict=True):
                    look()
                    processor = prepare(self.processor, recipe)
                    inputs, steps = encode(processor, [prompt]), min(longest, _RUN_TOKENS)
                    run = ask.answer(self.model, processor, inputs, recipe, steps, _Stoppable(look))
                    first.append(run.first_token_seconds)
                    rate += [] if run.tokens_per_second is None else [run.tokens_per_second]
            for (column, _), first, rate in zip(pairs, firsts, rates, strict=True):
                column.first_token_seconds = statistics.median(first)
                column.tokens_per_second = statistics.median(rate) if rate else None
            exchange.times = f"times are medians of {_RUNS} warm runs each, taken in turn"
        exchange.busy = ""

    def _one(
        self,
        column: Column,
        prompt: Prompt,
        recipe: Recipe,
        longest: int,
        look: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        show = _showing(column, tell)

        def draw(model: Any, out: Any) -> None:
            column.view = view_of(model, cache_of(out), prompt, recipe)

        try:
            look()
            column.state = "runs"
            tell()
            processor = prepare(self.processor, recipe)
            typing = _Typing(processor.tokenizer, look, show)
            inputs = encode(processor, [prompt])
            column.answer = ask.answer(self.model, processor, inputs, recipe, longest, typing, draw)
        except Stopped:
            column.state = "stopped"
        else:
            column.text, column.state = column.answer.answer, "done"

    def _draft(
        self,
        column: Column,
        prompt: Prompt,
        longest: int,
        look: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        """One answer with drafts of a model that is accelerated."""

        show = _showing(column, tell)

        try:
            look()
            column.state = "runs"
            tell()
            typing = _Typing(self.processor.tokenizer, look, show)
            inputs = encode(self.processor, [prompt]).to(self.model.device, self.model.dtype)
            with torch.no_grad():
                self.model.generate(**inputs, max_new_tokens=longest, do_sample=False, streamer=typing)
        except Stopped:
            column.state = "stopped"
        else:
            stats = self.model.mmaccel.stats()
            sources = stats["drafting"]["drafted_by"][0]
            texts = pieces(self.processor.tokenizer, typing.ids)
            column.drafted = Drafted(list(zip(texts, sources, strict=True)), stats["drafting"], stats["notes"])
            column.state = "done"


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that every token adds; a character of several tokens belongs to the last of them."""
    found, shown = list[str](), 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        whole = "" if text.endswith("\ufffd") else text[shown:]
        found.append(whole)
        shown += len(whole)
    return found


def _title(recipe: Recipe) -> str:
    """The name, with the budget if there is one."""
    if recipe.retain is None:
        return recipe.name
    return (
        f"{recipe.name} {recipe.retain:.0%}" if isinstance(recipe.retain, float) else f"{recipe.name} {recipe.retain}"
    )


# --------------------------------------------------------------------------------------------------------------- models


@dataclass
class Loading:
    """Progress of loading a model. ``share`` is None while it is unknown."""

    name: str
    since: float = field(default_factory=time.monotonic)
    what: str = "reading"
    share: float | None = None

    def sentence(self) -> str:
        """For the page."""
        share = "" if self.share is None else f", {self.share:.0%}"
        return f"{self.name} is being loaded: {self.what}{share} ({time.monotonic() - self.since:.0f} s so far)."


class House:
    """The engines of the demo, loaded in the background, and the sessions that follow a stream.

    Parameters
    ----------
    options : what :func:`mmaccel.cli.ask.load_model` reads. Without ``model`` the small ones that come with mmaccel are
        taken, one for pictures and one for clips.
    seconds : that a model works for one question.
    several : questions that are answered at once.
    """

    def __init__(self, options: argparse.Namespace, seconds: float = limits.ANSWERED, several: int = 1) -> None:
        self.options, self.seconds, self.several = options, seconds, several
        self.loading: Loading | None = None
        #: recipes that can be chosen, once loading is over
        self.choices: dict[str, list[Recipe]] = {}
        #: the first examples with their answers: every visitor is shown them, the model works them out once
        self.welcome: dict[str, Exchange] = {}
        self._engines: dict[str, Engine | MmaccelError] = {}
        self._done = threading.Event()

    def load(self) -> None:
        """Load everything; what fails is kept as its sentence."""
        names: dict[str, str | None] = {"picture": self.options.model, "video": self.options.model}
        try:
            if self.options.model is None:
                names["picture"] = str(ask.shipped())
                try:
                    names["video"] = str(ask.shipped(video=True))
                except MmaccelError as error:
                    self._engines["video"] = error
            made: dict[str, Engine] = {}
            for kind, name in names.items():
                if kind in self._engines or name is None:
                    continue
                try:
                    made[name] = made.get(name) or self._engine(name)
                    self._engines[kind] = made[name]
                    if kind == "video" and not made[name].takes_video:
                        raise UnsupportedError(
                            f"{made[name].name} takes no clips; start the demo with --model and one that does, such as "
                            "Qwen/Qwen2.5-VL-3B-Instruct."
                        )
                except MmaccelError as error:
                    self._engines[kind] = error
            for kind, found in self._engines.items():
                if isinstance(found, Engine):
                    # recipe none is what everything is compared with
                    self.choices[kind] = found.possible([one for one in recipes().values() if one.stages])
        except MmaccelError as error:
            self._engines = {"picture": error, "video": error}
        finally:
            self.loading = None
            self._done.set()

    def _engine(self, name: str) -> Engine:
        # of a folder of the shipped models, and of a visitor's business, only the last part
        short = name.rstrip("/").rpartition("/")[2] if name.startswith((".", "~", "/")) else name
        self.loading = loading = Loading(short)

        def hook(factory: Any, args: Any, kwargs: Any) -> Any:
            return _Bar(loading, *args, **kwargs)

        before = logging.set_tqdm_hook(hook)
        try:
            model, processor = ask.load_model(argparse.Namespace(**{**vars(self.options), "model": name}))
        finally:
            logging.set_tqdm_hook(before)
        return Engine(model, processor, short, self.seconds, self.several)

    def sentence(self) -> str:
        """State of loading: the model, the progress, or the reason why there is none."""
        if not self.ready:
            return self.loading.sentence() if self.loading else "The model is being loaded."
        words = []
        for kind, what in (("picture", "pictures"), ("video", "clips")):
            found = self._engines[kind]
            if isinstance(found, Engine):
                about = f"on {found.model.device}, {str(found.model.dtype).removeprefix('torch.')}"
                words.append(f"{what.capitalize()} are shown to {found.name} ({about}).")
            elif str(found) not in words:
                words.append(str(found))
        if self.several > 1:
            words.append(f"Up to {self.several} questions are answered at once, and take each other's time.")
        return " ".join(words)

    @property
    def ready(self) -> bool:
        """Whether loading is over."""
        return self._done.is_set()

    def wait(self, stop: threading.Event | None = None) -> None:
        """Until loading is over, or ``stop`` is set."""
        while not self._done.wait(_LOOK if stop is not None else None):
            if stop is not None and stop.is_set():
                return

    def engine(self, kind: str) -> Engine:
        """An engine for ``picture`` or ``video``, one that is free if any is.

        Raises
        ------
        MmaccelError
            If it is not there, or not yet.
        """
        found = self._engines.get(kind)
        if isinstance(found, Engine):
            return found.free()
        if found is not None:
            raise found
        raise MmaccelError(self.loading.sentence() if self.loading else "The model is being loaded; try again soon.")


class _Bar:
    """What transformers takes for a progress bar; it writes into a :class:`Loading`."""

    def __init__(
        self, loading: Loading, iterable: Any = None, desc: Any = None, total: Any = None, *args: Any, **options: Any
    ) -> None:
        self.loading, self.iterable = loading, iterable
        self.loading.what = str(desc or "weights").lower().removeprefix("loading ")
        self.total = total or (len(iterable) if hasattr(iterable, "__len__") else 0)
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *about: Any) -> None:
        pass

    def update(self, steps: int = 1) -> None:
        """Further on."""
        self.count += steps
        self.loading.share = self.count / self.total if self.total else None

    def __getattr__(self, name: str) -> Any:
        # the rest of a bar: set_description, refresh, close and so on
        return lambda *args, **kwargs: None


def _showing(column: Column, tell: Callable[[], None]) -> Callable[[str, int], None]:
    """What puts the answer so far into a column, text and number of tokens, and tells of it."""

    def show(text: str, tokens: int) -> None:
        column.text, column.tokens = text, tokens
        tell()

    return show
