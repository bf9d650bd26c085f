"""Measure what a recipe changes in answers and what it saves, without generating.

The bare model writes its greedy answer once. A recipe then takes one forward of the prompt and one of all tokens of the answer
together (token by token where a method works at every step). An answer is *kept* if both models have the same most likely token
at every position: the accelerated model would then write the same. ``kl`` is as in :mod:`mmaccel.programs.evaluate`; ``drift``,
the objective of VFlowOpt, is one minus the cosine of the last hidden states of the prompt's last token.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ...accelerate import accelerated
from ...accelerate.positions import check_positions
from ...core.transformers_api import DynamicCache, cache_argument
from ...errors import MmaccelError
from ...families import family_of
from ...media.prepare import prepare
from ...method import Policy, ReactivatingMethod, RetracingMethod
from ...method.model_options import KeepLoaded
from ...recipe import Recipe, get_recipe
from ...runtime.tower.feature_cache import Remembered
from ..bench.arithmetic import count_operations
from ..evaluate import Batch, Question, answer_lengths, batches, divergence, inputs_of, memory_error
from ..resume import without_unusable

Goal = Literal["ttft", "tokens", "kv", "cost"]
GOALS: Mapping[Goal, str] = {
    "ttft": "operations of vision tower and prefill",
    "tokens": "visual tokens in a decoder layer, mean over the layers",
    "kv": "bytes of the KV cache behind the prompt",
    "cost": "mean of the shares of prefill operations and of KV bytes",
}
_COUNTED = ("ttft", "tokens", "kv")
#: prefills that are timed; the shortest counts
_TIMES = 3


@dataclass(frozen=True)
class Measurement:
    """One recipe on some questions: whether each answer is kept, its KL and drift; and what was spent on all of them, by the
    recipe and by the bare model (operations or seconds, tokens, bytes)."""

    kept: tuple[bool, ...] = ()
    kl: tuple[float, ...] = ()
    drift: tuple[float, ...] = ()
    spent: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))
    bare: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(
            self.kept + other.kept,
            self.kl + other.kl,
            self.drift + other.drift,
            {name: self.spent[name] + other.spent[name] for name in _COUNTED},
            {name: self.bare[name] + other.bare[name] for name in _COUNTED},
        )

    @property
    def agreement(self) -> float:
        """The share of questions whose answer is kept."""
        return sum(self.kept) / len(self.kept)

    @property
    def divergence(self) -> float:
        """The mean KL in nats."""
        return sum(self.kl) / len(self.kl)

    @property
    def risk(self) -> float:
        """The mean over questions of ``sqrt((KL + drift) / 2)``, which ranks recipes where few answers change: by Pinsker's
        inequality no event is less or more likely by more than ``sqrt(KL / 2)``."""
        pairs = zip(self.kl, self.drift, strict=True)
        return sum(math.sqrt(max(0.0, kl + drift) / 2) for kl, drift in pairs) / len(self.kl)

    @property
    def drifted(self) -> float:
        """The mean drift."""
        return sum(self.drift) / len(self.drift)

    def share(self, goal: Goal) -> float:
        """Share of the bare model's cost that is spent."""
        if goal == "cost":
            return (self.share("ttft") + self.share("kv")) / 2
        return self.spent[goal] / self.bare[goal] if self.bare[goal] else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; :meth:`of` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Measurement:
        """Back from JSON."""
        kept, kl, drift = (tuple(data[name]) for name in ("kept", "kl", "drift"))
        return Measurement(kept, kl, drift, dict(data["spent"]), dict(data["bare"]))


@dataclass(frozen=True)
class _Read:
    """Hidden states ``[B, T, D]``, from which a recipe predicts the ``T`` tokens of the answer, and what was spent."""

    states: Tensor
    spent: dict[str, float]


class AnsweredBatch:
    """Questions of one forward, and the bare model's answers to them."""

    def __init__(self, model: Any, processor: Any, batch: Batch, longest: int, timed: bool) -> None:
        self.model, self.processor, self.batch, self.timed = model, processor, batch, timed
        self.longest = longest
        self.family = family_of(model, processor)
        self.memory = Remembered()
        self.inputs = inputs_of(model, processor, batch)
        check_positions(model, get_recipe("none"), self.inputs, longest)
        written: list[Tensor] = []

        def write() -> None:
            out = model.generate(**self.inputs, max_new_tokens=longest, do_sample=False, num_beams=1)
            written.append(out[:, self.inputs["input_ids"].shape[1] :])

        with self.memory.on(self.family):
            # the towers only see the prompt
            self.vision = count_operations(model, write).vision
        self.tokens = written[0]
        self.lengths = answer_lengths(self.tokens, model.generation_config.eos_token_id)
        self.full = self._read(get_recipe("none"), processor)

    @torch.inference_mode()
    def measure(self, recipe: Recipe) -> Measurement:
        """Measure a recipe on these questions."""
        fast = self._read(recipe, prepare(self.processor, recipe))
        drift = 1 - torch.cosine_similarity(self.full.states[:, 0].float(), fast.states[:, 0].float(), dim=-1)
        kept, kl = [], []
        # logits of a batch may be larger than the model
        for row, length in enumerate(self.lengths.tolist()):
            mine, theirs = (self.family.logits(read.states[row, :length]) for read in (fast, self.full))
            kept.append(bool((mine.argmax(-1) == theirs.argmax(-1)).all()))
            kl.append(float(divergence([theirs], [mine], mine.new_ones(length)).mean()))
        return Measurement(tuple(kept), tuple(kl), tuple(drift.tolist()), fast.spent, self.full.spent)

    @torch.inference_mode()
    def _read(self, recipe: Recipe, processor: Any) -> _Read:
        own = processor is self.processor
        inputs = self.inputs if own else inputs_of(self.model, processor, self.batch)
        built = [method for _, method in recipe.build()]
        remembers = own and all(method.site not in ("patches", "encoder") for method in built)
        memory = self.memory.on(self.family) if remembers else nullcontext()
        at_every_step = any(
            isinstance(method, (ReactivatingMethod, RetracingMethod)) or (isinstance(method, Policy) and method.decodes)
            for method in built
        )
        seen: list[Any] = []
        note = self.family.text.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True
        )
        try:
            with memory, accelerated(self.model, recipe, processor=processor):
                cache = DynamicCache(config=self.family.text.config)
                states: list[Tensor] = []
                counted = count_operations(self.model, lambda: states.append(self._prompt(inputs, cache)))
                stats = self.model.mmaccel.stats()
                states += self._answer(inputs["attention_mask"], cache, seen[0], at_every_step)
        finally:
            note.remove()
        spent = {
            "ttft": counted.language + self.vision if remembers else counted.total,
            "tokens": float(stats.visual_tokens_per_layer),
            "kv": float(stats.kv_bytes),
        }
        if self.timed:
            spent["ttft"] = self._seconds(recipe, processor, inputs)
        return _Read(torch.cat(states, dim=1), spent)

    def _prompt(self, inputs: Mapping[str, Any], cache: Any) -> Tensor:
        """The last hidden state ``[B, 1, D]`` of the prompt, whose keys go into the cache."""
        out = self.family.inner(**inputs, **cache_argument(cache), use_cache=True)
        return out.last_hidden_state[:, -1:].clone()

    def _answer(self, mask: Tensor, cache: Any, positions: Any, one_by_one: bool) -> list[Tensor]:
        """The hidden states ``[B, ..., D]`` of all tokens of the answers but the last, read after the prompt. ``positions`` are
        those of the prompt; with three axes (M-RoPE) text continues after the last of its row, as it does in ``generate``."""
        read = self.tokens[:, :-1]
        extra: dict[str, Any] = {}
        states = []
        for piece in read.split(1 if one_by_one else max(1, read.shape[1]), dim=1) if read.shape[1] else ():
            mask = torch.cat([mask, mask.new_ones(piece.shape)], dim=1)
            if isinstance(positions, Tensor) and positions.dim() == 3:
                first = positions[-3:, :, -1:] + 1
                positions = first + torch.arange(piece.shape[1], device=first.device)
                extra = {"position_ids": positions}
            out = self.family.inner(
                input_ids=piece, attention_mask=mask, use_cache=True, **cache_argument(cache), **extra
            )
            states.append(out.last_hidden_state)
        return states

    def _seconds(self, recipe: Recipe, processor: Any, inputs: Mapping[str, Any]) -> float:
        """The shortest time of a prefill, vision tower and selection included."""
        wait: Callable[[], object] = torch.cuda.synchronize if self.model.device.type == "cuda" else (lambda: None)
        took = []
        with accelerated(self.model, recipe, processor=processor):
            for _ in range(_TIMES):
                wait()
                start = time.perf_counter()
                self._prompt(inputs, DynamicCache(config=self.family.text.config))
                wait()
                took.append(time.perf_counter() - start)
        return min(took)


class Evaluator:
    """Measures recipes on the questions of several ``rungs``; the bare model reads a rung when it is first needed. ``complain``
    is called with one sentence for every question that the model cannot be asked; without it that is an error."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        rungs: Sequence[Sequence[Question]],
        *,
        batch_size: int,
        max_new_tokens: int,
        timed: bool,
        complain: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.processor, self.rungs, self.complain = model, processor, rungs, complain
        self.family = family_of(model, processor)
        self.batch_size, self.longest, self.timed = batch_size, max_new_tokens, timed
        self._exams: dict[int, list[AnsweredBatch]] = {}
        #: keeps draft models and text towers of the recipes
        self._loaded = KeepLoaded()

    def answered(self, rung: int) -> list[AnsweredBatch]:
        """The questions of a rung with the answers of the bare model."""
        if rung not in self._exams:

            def make(batch: Batch) -> AnsweredBatch:
                return AnsweredBatch(self.model, self.processor, batch, self.longest, self.timed)

            read = batches(self.rungs[rung], self.batch_size, self.complain)
            answered = [without_unusable(batch, make, self.complain)[1] for batch in read]
            self._exams[rung] = [one for one in answered if one is not None]
            if not self._exams[rung]:
                raise MmaccelError(f"None of {len(self.rungs[rung])} questions can be used; give others.")
        return self._exams[rung]

    @property
    def left_out(self) -> int:
        """Questions of the rungs read so far that could not be used."""
        used = {rung: sum(len(one.batch) for one in answered) for rung, answered in self._exams.items()}
        return sum(len(self.rungs[rung]) - count for rung, count in used.items())

    def ask(self, recipe: Recipe, rung: int) -> Measurement:
        """The recipe on the questions of one rung. Raises MmaccelError if the model cannot honour the recipe."""
        with memory_error():
            return sum((one.measure(recipe) for one in self.answered(rung)), Measurement())
