"""Generation of one answer by one accelerated model."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ...accelerate import accelerate_vlm
from ...accelerate.fallback import fallback_of_call
from ...accelerate.positions import check_positions, free_positions, recipe_limit
from ...core.transformers_api import cache_of
from ...errors import MmaccelError, UnsupportedError
from ...media import untrusted
from ...media.files import Chat, Clip, encode
from ...media.prepare import prepare
from ...method import FramesMethod, Policy
from ...recipe import Recipe, get_recipe
from ...runtime.build import plan_for_call
from ..identity import digest
from ..model_lock import ModelSlot, Stopped, TokenTimer
from ..prefix_caches import Media, PrefixCaches, continued
from ..prompt_cache import PromptCache
from ..video_qa.generator import needs_own_prefill
from .detokenizer import Detokenizer
from .sampling import sampler
from .schema import ChatRequest
from .sources import Sources

#: characters a token at most: a longer text is refused before it is tokenised
_TOKEN = 32
#: seconds between two checks whether the client has left while a clip is decoded
_LOOK = 0.1
#: characters that are tokenised at once
_PIECE = 16 << 10
#: figures of a call that count the visual tokens of a kept cache, too
VISUAL = ("visual_tokens", "visual_tokens_kept")


@dataclass(frozen=True)
class Limits:
    """Limits of one request: ``seconds`` that the model works, evenly spaced ``frames`` of a clip, and ``longest``, the tokens
    of the answer."""

    seconds: float = 300.0
    frames: int = 16
    longest: int = 1024


@dataclass(frozen=True)
class Answer:
    """A complete answer: ``prompt_tokens`` of the unreduced prompt, the ``rate`` in tokens a second after the first (None for a
    short answer, and with a fallback), and the ``stats`` of the call, see :class:`mmaccel.core.figures.CallStats`. The first
    ``reused`` tokens of the prompt were in a kept cache. Of ``together`` requests that were answered as a batch, ``stats`` has
    each one's own visual tokens, and an equal share of the bytes."""

    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int
    new_tokens: int
    rate: float | None
    stats: dict[str, Any]
    reused: int = 0
    together: int = 1


class _TextStreamer(TokenTimer):
    """A streamer that sends pieces of text."""

    def __init__(self, text: Detokenizer, send: Callable[[str], None]) -> None:
        super().__init__()
        self.text, self.send = text, send

    def put(self, value: Any) -> None:
        """The prompt, then a token at a time."""
        super().put(value)
        if len(self.times) > 1:
            self.send(self.text.add(value.reshape(-1).tolist()))


class _Ends(StoppingCriteria):
    """Ends an answer at one of the ``stops``; ``check`` ends the run when it is to stop. It decodes the tokens behind a
    ``prompt`` of so many itself: a fallback holds those of a reading back from the streamer."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int, check: Callable[[], None]) -> None:
        self.tokenizer, self.stops, self.prompt, self.check = tokenizer, stops, prompt, check
        self.text = Detokenizer(tokenizer, stops)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check()
        if self.stops:
            if input_ids.shape[1] <= self.prompt + len(self.text.ids):
                # another reading
                self.text = Detokenizer(self.tokenizer, self.stops)
            self.text.add(input_ids[0, self.prompt + len(self.text.ids) :].tolist())
        return torch.full((len(input_ids),), self.text.stopped, dtype=torch.bool, device=input_ids.device)


@contextmanager
def _killing(stop: threading.Event) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Kill decoding processes when ``stop`` is set. The block passes every process that begins to the function that it gets,
    which raises Stopped if ``stop`` is set already."""
    processes: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def begun(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        if stop.is_set():
            process.kill()
            process.wait()
            raise Stopped

    def watch() -> None:
        while not done.wait(_LOOK):
            if stop.is_set():
                for process in processes:
                    process.kill()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield begun
    finally:
        done.set()
        watching.join()


def budget_key(budget: bool | Mapping[str, Any] | None) -> str:
    """Digest of a budget; the recipe and the model of a server stay, and no cache is kept of a call that may fall back."""
    return digest({k: v for k, v in budget.items() if k != "fallback"} if isinstance(budget, Mapping) else {})


def ages(recipe: Recipe) -> bool:
    """Whether pictures of earlier turns lose keys by their age, so that the next turn of a chat continues its cache."""
    return any(isinstance(method, Policy) and method.age for _, method in recipe.build())


def reads_once(budget: bool | Mapping[str, Any] | None) -> bool:
    """Whether the accelerated model reads a prompt once, and may continue a kept cache. A fallback may read it again."""
    return budget is not False and not (isinstance(budget, Mapping) and budget.get("fallback"))


class Engine(ModelSlot):
    """A bare ``model`` of a supported family with its ``processor``, on which a recipe stays. Raises MmaccelError if the model
    cannot honour the recipe. ``drafts`` are ``lossless``, ``draft``, ``lookup``, ``fallback`` and ``offload`` of
    ``accelerate_vlm``; ``kept`` are caches of earlier requests, which are continued where nothing of a prompt depends on what
    comes after it, and where pictures age."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        recipe: Recipe,
        sources: Sources,
        limits: Limits,
        drafts: Mapping[str, Any] | None = None,
        kept: PrefixCaches | None = None,
    ) -> None:
        super().__init__(model, processor, limits.seconds)
        self.recipe, self.sources, self.limits = recipe, sources, limits
        drafts = drafts or {}
        # what the processor would drop, a model that answers as the full one does must see
        self._prepared = processor if drafts.get("lossless") else prepare(processor, recipe)
        accelerate_vlm(model, recipe, processor=self._prepared, **drafts)
        self._positions = recipe_limit(model, recipe)
        own_prefill = (needs_own_prefill(recipe) is not None and not ages(recipe)) or any(drafts.values())
        self.kept = None if own_prefill else kept
        #: keys of single pictures, if they are read apart from the prompts
        self.prompts: PromptCache | None = None
        ends = model.generation_config.eos_token_id
        self.ends = set(ends) if isinstance(ends, (list, tuple)) else {ends}

    def budgeted(self, budget: bool | Mapping[str, Any] | None) -> tuple[Any, bool | Mapping[str, Any] | None]:
        """The processor for a budget, and ``mmaccel=`` of ``generate``. Raises MmaccelError if the recipe cannot have that
        budget."""
        if budget is False:
            return self.processor, False
        if budget is None or budget is True:
            return self._prepared, None
        primary, handle = self.recipe.primary, self.model.mmaccel
        _, asked = fallback_of_call(None, self.recipe, budget, handle.check_fallback)
        if asked is None:
            return self._prepared, budget
        pixels = primary is not None and isinstance(self.recipe.build()[primary][1], FramesMethod)
        if pixels and not handle.drafts.lossless:
            # kept of the pixels, before the model sees any
            left = {name: value for name, value in budget.items() if name not in asked}
            return prepare(self.processor, self.recipe.override(**asked)), left or None
        plan_for_call(handle.plan, asked)
        return self._prepared, budget

    def check(self, request: ChatRequest) -> None:
        """Check all that can be checked before the model is free. Raises MmaccelError if the answer may be too long, or the
        recipe cannot have the budget."""
        if request.longest is not None and request.longest > self.limits.longest:
            raise MmaccelError(
                f"An answer has at most {self.limits.longest} tokens on this server, not {request.longest}; ask for fewer."
            )
        self.budgeted(request.mmaccel)

    def answer(
        self, request: ChatRequest, send: Callable[[str], None], stop: threading.Event, chat: Chat | None = None
    ) -> Answer:
        """The answer; ``send`` gets its text piece by piece, perhaps an empty one at the first token. ``chat`` is what
        :meth:`read` has returned, if it was called.

        Raises Stopped if ``stop`` is set before it is complete, MmaccelError if the request cannot be honoured.
        """
        processor, budget = self.budgeted(request.mmaccel)
        chat = chat or self.read(request, stop)
        inputs = encode(processor, [chat]).to(self.model.device, self.model.dtype)
        prompt = inputs["input_ids"].shape[1]
        text = Detokenizer(self.processor.tokenizer, request.stop)
        with self.turn(stop) as check, torch.inference_mode():
            check()
            longest = self.longest(inputs, request, budget)
            streamer = _TextStreamer(text, send)
            ends = _Ends(self.processor.tokenizer, request.stop, prompt, check)
            with self.relieved():
                feed, visual, reused = self._continued(processor, inputs, chat, budget)
                out = self.model.generate(
                    **feed,
                    mmaccel=budget,
                    max_new_tokens=longest,
                    do_sample=False,
                    num_beams=1,
                    streamer=streamer,
                    logits_processor=sampler(self.model.generation_config, request),
                    stopping_criteria=StoppingCriteriaList([ends]),
                    return_dict_in_generate=True,
                )
            stats = self.model.mmaccel.stats().to_dict()
            for name, count in zip(VISUAL, visual, strict=True):
                stats[name] += count
            self._keep(out, inputs, chat, budget, stats)
        send(text.end())
        rate = None if stats["fallback"] else streamer.rate()
        return Answer(text.whole, self.ending(text, longest), prompt, len(text.ids), rate, stats, reused)

    def ending(self, text: Detokenizer, longest: int) -> Literal["stop", "length"]:
        """Whether an answer of at most ``longest`` tokens ended by itself, or at its limit."""
        return "stop" if text.stopped or len(text.ids) < longest or text.ids[-1] in self.ends else "length"

    @contextmanager
    def relieved(self) -> Iterator[None]:
        """Drop all kept keys where the block finds no memory, so that the next request has it."""
        try:
            yield
        except torch.OutOfMemoryError:
            for kept in (self.kept, self.prompts):
                if kept is not None:
                    kept.clear()
            raise

    def _continued(
        self, processor: Any, inputs: Mapping[str, Any], chat: Chat, budget: bool | Mapping[str, Any] | None
    ) -> tuple[Mapping[str, Any], tuple[int, int], int]:
        """The inputs of ``generate``, the visual tokens of what a cache has read of the prompt, see :data:`VISUAL`, and how
        many tokens were not read again."""
        whole = inputs, (0, 0), 0
        if self.kept is not None and reads_once(budget):
            begun = self.kept.find(budget_key(budget), inputs["input_ids"][0].cpu(), Media.of(chat))
            if begun is not None and (feed := continued(self.model.mmaccel.family, processor, inputs, chat, begun)):
                return feed, begun.visual, begun.tokens
        if (
            self.prompts is None
            or not (chat.pictures or chat.clips)
            or budget is False
            or budget_key(budget) != budget_key(None)
        ):
            return whole
        try:
            apart = self.prompts.read(self.model, processor, inputs, chat)
        except UnsupportedError:
            # a picture that the processor cuts into other tiles beside others
            return whole
        return apart.inputs, apart.visual, apart.reused

    def _keep(
        self,
        out: Any,
        inputs: Mapping[str, Any],
        chat: Chat,
        budget: bool | Mapping[str, Any] | None,
        stats: Mapping[str, Any],
    ) -> None:
        """Keep the cache of an answer."""
        cache = cache_of(out)
        if self.kept is None or not reads_once(budget) or cache is None:
            return
        ids = out.sequences[0, : cache.get_seq_length()].cpu()
        visual = self.model.mmaccel.family.visual(inputs["input_ids"].cpu())[0].nonzero()
        end = int(visual.max()) + 1 if len(visual) else 0
        counts = stats[VISUAL[0]], stats[VISUAL[1]]
        self.kept.add(budget_key(budget), ids, Media.of(chat), end, counts, cache)

    def read(self, request: ChatRequest, stop: threading.Event) -> Chat:
        """The messages of a request with all that they show, decoded. Raises MmaccelError if that is too much or broken, and
        Stopped if ``stop`` is set before it is done."""
        self._check_text(request, stop)
        return self._chat(request, stop)

    def _check_text(self, request: ChatRequest, stop: threading.Event) -> None:
        """Raise MmaccelError if the text has more tokens than the model takes, having tokenised no more than that; Stopped if
        ``stop`` is set meanwhile."""
        places = self._positions
        texts = [part["text"] for message in request.chat for part in message["content"] if part["type"] == "text"]
        long = sum(map(len, texts))
        if places is None or long <= places:
            return
        if long <= places * _TOKEN:
            left = places
            for piece in (text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)):
                if stop.is_set():
                    raise Stopped
                # half a character is refused later
                whole = piece.encode(errors="replace").decode()
                ids = self.processor.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"]
                # where a text was cut there may be a token more
                left -= max(0, len(ids) - 1)
                if left < 0:
                    break
            else:
                return
        raise MmaccelError(
            f"The text of the prompt has {long:,} characters, more than {places:,} tokens; this model takes {places} in all, "
            "so ask for less."
        )

    def _chat(self, request: ChatRequest, stop: threading.Event) -> Chat:
        """The messages with all pictures and clips, decoded in the time and memory that one clip may take."""
        pictures: list[Any] = []
        clips: list[Clip] = []
        end, memory = time.monotonic() + untrusted.SECONDS, untrusted.MEMORY
        too_much = MmaccelError(
            f"What the request shows takes more than {untrusted.SECONDS:g} seconds or {untrusted.MEMORY >> 20} MiB to decode; "
            "show less, or smaller pictures."
        )
        with tempfile.TemporaryDirectory(prefix="mmaccel-serve-", ignore_cleanup_errors=True) as folder:
            paths = [self.sources.fetch(medium.url, Path(folder), end, stop) for medium in request.media]
            shown = list(zip(request.media, paths, strict=True))
            if 3 * sum(untrusted.pixels(path) for medium, path in shown if medium.kind == "image") > memory:
                raise too_much
            for medium, path in shown:
                if stop.is_set():
                    raise Stopped
                seconds = end - time.monotonic()
                if seconds <= 0 or memory <= 0:
                    raise too_much
                try:
                    if medium.kind == "image":
                        pictures.append(picture := untrusted.picture(path))
                        memory -= 3 * picture.width * picture.height
                        continue
                    with _killing(stop) as begun:
                        clip = untrusted.clip(path, self.limits.frames, seconds=seconds, memory=memory, begun=begun)
                    clips.append(clip)
                    memory -= clip.frames.nbytes
                except (MmaccelError, Stopped):
                    raise
                except Exception as error:
                    # libraries of pictures raise whatever they like at broken files
                    what = {"image": "picture", "video": "clip"}[medium.kind]
                    raise MmaccelError(
                        f"The {what} is broken and cannot be decoded ({type(error).__name__}); send another."
                    ) from error
        return Chat(request.chat, tuple(pictures), tuple(clips))

    def longest(self, inputs: Mapping[str, Any], request: ChatRequest, budget: bool | Mapping[str, Any] | None) -> int:
        """Tokens that the answer may have: as many as were asked for, else those that the model has positions for, up to the
        limit. Raises MmaccelError if the positions do not suffice."""
        recipe = get_recipe("none") if budget is False else self.recipe
        if request.longest is not None:
            wanted = request.longest
        else:
            free = free_positions(self.model, recipe, inputs, self.limits.longest)
            wanted = self.limits.longest if free is None else max(1, free)
        check_positions(self.model, recipe, inputs, wanted)
        return wanted
