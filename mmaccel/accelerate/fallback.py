"""Fallback: where a model is unsure of an answer with few tokens, it reads the prompt again with more, at last with all."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..core.budget import Retain, check_retain
from ..core.layout import Modality
from ..core.transformers_api import cache_in
from ..errors import MmaccelError, UnsupportedError
from ..families import Family
from ..recipe import Recipe, TunedRecipe
from ..runtime.call.call import Call
from ..runtime.call.plan import first_set
from ..runtime.tower.feature_cache import Remembered
from .handle import Handle

Statistic = Literal["probability", "margin", "entropy"]
#: outputs of ``generate`` that exist once for all rows, so rows of different readings cannot share them
_JOINT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Fallback:
    """A rule by which an answer that was written with few tokens is accepted, and the budgets that are tried otherwise.

    Parameters
    ----------
    threshold : an answer is accepted if its certainty is at least this, greater than 0 and at most 1.
    statistic : the certainty of a token, 0 to 1, from the distribution that it is chosen from (before temperature, top-k and
        top-p): ``"probability"`` of the most likely token, its ``"margin"`` over the second, or ``"entropy"``, which is
        ``exp(-entropy)``.
    quantile : the certainty of an answer is this quantile of those of its tokens; 0 is its least certain token, and ends a
        reading as soon as it is unsure.
    budgets : budgets (``retain``) of further readings, each larger than the one before; the bare model reads last.

    Raises
    ------
    MmaccelError
        If a value is not allowed.

    Examples
    --------
    >>> Fallback(0.6, budgets=(0.3,))
    Fallback(threshold=0.6, statistic='probability', quantile=0.0, budgets=(0.3,))
    """

    threshold: float
    statistic: Statistic = "probability"
    quantile: float = 0.0
    budgets: tuple[Retain, ...] = ()

    def __post_init__(self) -> None:
        if not _is_number(self.threshold) or not 0 < self.threshold <= 1:
            raise MmaccelError(
                f"threshold must be greater than 0 and at most 1, got {self.threshold!r:.40}; mmaccel tune --fallback finds "
                "one."
            )
        if self.statistic not in get_args(Statistic):
            raise MmaccelError(
                f"statistic must be one of {', '.join(get_args(Statistic))}, got {self.statistic!r:.40}."
            )
        if not _is_number(self.quantile) or not 0 <= self.quantile <= 1:
            raise MmaccelError(f"quantile must be at least 0 and at most 1, got {self.quantile!r:.40}.")
        if isinstance(self.budgets, (str, bytes)) or not isinstance(self.budgets, Sequence):
            raise MmaccelError(f"budgets must be a list such as (0.3,), got {self.budgets!r:.40}.")
        object.__setattr__(self, "budgets", tuple(check_retain(one, "budgets") for one in self.budgets))

    @staticmethod
    def of(given: FallbackLike, recipe: Recipe) -> Fallback | None:
        """The fallback that a caller means: False or None is none, True that of a tuned recipe, a number is a threshold, a
        mapping holds the fields.

        Raises
        ------
        MmaccelError
            If it is none of these, the recipe was tuned without a fallback, or its budgets do not rise.
        """
        if given is None or given is False:
            return None
        if given is True:
            given = recipe.tuned.get("fallback") if isinstance(recipe, TunedRecipe) else None
            if given is None:
                raise MmaccelError(
                    f"fallback=True takes the threshold of a tuned recipe, and {recipe.name!r} has none; give a recipe of "
                    "mmaccel tune --fallback, or a threshold such as fallback=0.6."
                )
        if isinstance(given, Mapping):
            names = [one.name for one in fields(Fallback)]
            if unknown := [name for name in given if name not in names]:
                raise MmaccelError(f"fallback has no {unknown[0]!r:.40}; it has {', '.join(names)}.")
            if "threshold" not in given:
                raise MmaccelError("fallback needs a threshold, such as {'threshold': 0.6}.")
            given = Fallback(**given)
        elif isinstance(given, (int, float)):
            given = Fallback(float(given))
        if not isinstance(given, Fallback):
            raise MmaccelError(
                f"fallback must be a threshold such as 0.6, a Fallback, its fields as a mapping, True or False, got "
                f"{given!r:.60}."
            )
        steps = [one for one in (recipe.retain, *given.budgets) if one is not None]
        if given.budgets and any(type(a) is not type(b) or a >= b for a, b in zip(steps, steps[1:], strict=False)):
            raise MmaccelError(
                f"Budgets of a fallback must rise from that of the recipe, all of them shares or all of them counts, got "
                f"{', '.join(map(str, steps))}."
            )
        for budget in given.budgets:
            recipe.override(retain=budget)
        return given

    def certainty(self, scores: Tensor) -> Tensor:
        """The certainty ``[B]`` of the next token, 0 to 1, from its logits ``[B, V]``."""
        chances = scores.float().softmax(-1)
        if self.statistic == "entropy":
            return torch.special.entr(chances).sum(-1).neg().exp()
        first, second = chances.topk(2).values.unbind(-1)
        return first if self.statistic == "probability" else first - second

    def of_answers(self, certainties: Sequence[Tensor], lengths: Sequence[int]) -> list[float]:
        """The certainty of every answer, from those of its first ``lengths[i]`` tokens; ``certainties`` are ``[B]`` a step."""
        steps = torch.stack(list(certainties), 1).double().cpu()
        return [
            float(row[: max(1, length)].quantile(self.quantile, interpolation="lower"))
            for row, length in zip(steps, lengths, strict=True)
        ]


#: what says when to fall back
FallbackLike: TypeAlias = bool | float | Fallback | Mapping[str, Any] | None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------------------------- readings


class Certainty(LogitsProcessor):
    """Notes the certainty of every next token, ``[B]`` a step, and leaves the logits as they are."""

    def __init__(self, fallback: Fallback) -> None:
        self.fallback = fallback
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the certainty of what follows ``input_ids [B, S]``; returns its logits ``scores [B, V]``."""
        self.steps.append(self.fallback.certainty(scores))
        return scores


class _Ends(StoppingCriteria):
    """Ends rows whose answer is known from an earlier reading (``settled [B]``), and those that have become unsure."""

    def __init__(self, settled: Tensor, certainty: Certainty | None) -> None:
        self.settled, self.certainty = settled, certainty

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = self.settled.to(input_ids.device)
        if self.certainty is not None and self.certainty.fallback.quantile == 0:
            done = done | (self.certainty.steps[-1] < self.certainty.fallback.threshold)
        return done


class _Held:
    """A streamer that holds back an answer until it is accepted."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        """Keep tokens."""
        self.values.append(value)

    def end(self) -> None:
        """The answer is complete, and may still be discarded."""

    def release(self, streamer: Any) -> None:
        """Hand on everything."""
        for value in self.values:
            streamer.put(value)
        streamer.end()


#: outputs of the towers, shared by the readings of one call
_shared: ContextVar[Remembered | None] = ContextVar("mmaccel_readings", default=None)


def share_towers(family: Family, wrap: Callable[[Any, str, Any], None]) -> None:
    """Let the readings of a call share features; families with one function for pictures and clips encode them each time."""
    names = {modality: f"get_{modality}_features" for modality in family.modalities}
    if all(hasattr(family.inner, name) for name in names.values()):
        for modality, name in names.items():
            wrap(family.inner, name, partial(_encode_once, modality))


def fallback_of_call(
    own: Fallback | None, recipe: Recipe, asked: Any, check: Callable[[bool], None]
) -> tuple[Fallback | None, Any]:
    """The fallback of one call, and what is left of its ``mmaccel=asked``, whose ``fallback`` replaces that of the model,
    ``own``; ``check`` raises where a model with drafts is to fall back. Raises MmaccelError if its value is not allowed."""
    if not isinstance(asked, Mapping) or "fallback" not in asked:
        return own, asked
    rest = {name: value for name, value in asked.items() if name != "fallback"}
    fallback = Fallback.of(asked["fallback"], recipe)
    check(fallback is not None)
    return fallback, rest or None


def with_fallback(
    own: Fallback | None,
    handle: Handle,
    family: Family,
    last: Callable[[], Call[Any] | None],
    check: Callable[[bool], None],
    once: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap ``generate`` of an accelerated model, ``once``; ``last`` gives the last call, for ``check`` see
    :func:`fallback_of_call`. A prompt without pictures is read once, since nothing of it is dropped."""

    @wraps(once)
    def generate(*args: Any, mmaccel: Any = None, **kwargs: Any) -> Any:
        fallback, mmaccel = fallback_of_call(own, handle.recipe, mmaccel, check)
        if fallback is None or mmaccel is False or not handle.attached:
            return once(*args, mmaccel=mmaccel, **kwargs)
        given = {**inspect.signature(once).bind_partial(*args).arguments, **kwargs}
        configs = SimpleNamespace(**kwargs), given.get("generation_config"), handle._model.generation_config
        prompt = given.get("input_ids") if given.get("inputs") is None else given["inputs"]
        if isinstance(prompt, Tensor) and not bool(family.visual(prompt).any()):
            return once(*args, mmaccel=mmaccel, **kwargs)
        readings = Readings(fallback, once, last, given, prompt, mmaccel, lambda name: first_set(name, *configs))
        output = readings.run()
        readings.report()
        return output

    return generate


def _encode_once(modality: Modality, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the encoding of pictures or clips: further readings of a call take the features of the first."""

    @wraps(original)
    def features(*args: Any, **kwargs: Any) -> Any:
        memory = _shared.get()
        return (original if memory is None else memory.answering(modality, original))(*args, **kwargs)

    return features


class Readings:
    """One call of ``generate`` with a fallback. Every reading is a whole call of its own; of a batch all rows are read again,
    and those that are settled end at their first token.

    Parameters
    ----------
    once : ``generate`` without a fallback; takes ``mmaccel=``.
    last : gives the last call.
    given : the arguments of ``generate`` by name. prompt : its ids.
    asked : the value of ``mmaccel``.
    config : a generation setting by its name, from the arguments or the model.

    Raises
    ------
    UnsupportedError
        For beams, several answers a row, assistants, a kept cache, and outputs that rows of different readings cannot share.
    """

    def __init__(
        self,
        fallback: Fallback,
        once: Callable[..., Any],
        last: Callable[[], Call[Any] | None],
        given: Mapping[str, Any],
        prompt: Any,
        asked: Any,
        config: Callable[[str], Any],
    ) -> None:
        self.fallback, self.once, self.last, self.given, self.config = fallback, once, last, given, config
        if not isinstance(prompt, Tensor) or prompt.dim() != 2:
            raise UnsupportedError(
                "With fallback= generate() needs input_ids, which were not given; pass the prompt's ids."
            )
        batch, self.length = prompt.shape
        self._check(batch)
        own = asked if isinstance(asked, Mapping) else {}
        least = own.get("retain")
        further = [one for one in fallback.budgets if least is None or least < one]
        self.steps: list[Any] = [asked, *({**own, "retain": budget} for budget in further), False]
        self.settled = torch.zeros(batch, dtype=torch.bool, device=prompt.device)
        self.rows: list[Tensor] = [prompt.new_empty(0)] * batch
        self.reading, self.certainty = [0] * batch, [0.0] * batch
        self.read: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def _check(self, batch: int) -> None:
        for name in ("num_beams", "num_return_sequences"):
            if (self.config(name) or 1) > 1:
                raise UnsupportedError(
                    f"fallback= judges one answer a row, and {name}={self.config(name)}; leave it out."
                )
        for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate"):
            if self.config(name) is not None:
                raise UnsupportedError(f"fallback= and {name}= cannot be combined; leave one of them out.")
        if cache_in(self.given) is not None:
            raise UnsupportedError(
                "fallback= may read a prompt again, which a cache of the caller's does not allow; leave out past_key_values= "
                "and pass the whole conversation."
            )
        joint = [name for name in _JOINT if self.config(name)] if self.config("return_dict_in_generate") else []
        if batch > 1 and joint:
            raise UnsupportedError(
                f"{joint[0]}=True is not offered for several rows with fallback=, since they may come from different readings; "
                "leave it out, or give one row."
            )

    def run(self) -> Any:
        """Read until all rows are settled; what ``generate`` returns."""
        token, number = _shared.set(Remembered()), 0
        try:
            while True:
                try:
                    output = self._read(number)
                except torch.OutOfMemoryError:
                    if not number:
                        raise
                    self.notes.append(
                        f"fallback: reading {number + 1} ran out of memory; unsure answers come from reading {number}"
                    )
                    warnings.warn(f"{self.notes[-1]}.", stacklevel=4)
                    # the reading before is repeated as the last one, without ends at unsure tokens
                    self.steps = self.steps[:number]
                    number -= 1
                    continue
                if bool(self.settled.all()):
                    return self._joined(output) if number and len(self.rows) > 1 else output
                number += 1
        finally:
            _shared.reset(token)

    def _read(self, number: int) -> Any:
        """One reading: notes the answers of rows that were not settled, and settles those that are sure."""
        last, step = number == len(self.steps) - 1, self.steps[number]
        certainty = None if last else Certainty(self.fallback)
        given = dict(self.given)
        if certainty is not None:
            given["logits_processor"] = LogitsProcessorList([*(given.get("logits_processor") or ()), certainty])
        ends = _Ends(self.settled, certainty)
        given["stopping_criteria"] = StoppingCriteriaList([*(given.get("stopping_criteria") or ()), ends])
        streamer, held = given.get("streamer"), _Held()
        if streamer is not None and not last:
            given["streamer"] = held
        output = self.once(**given, mmaccel=step)
        call = self.last()
        assert call is not None
        kept = call.stats.layer_tokens[-1:] or [call.stats.visual_tokens]
        self.read.append(
            {
                "recipe": call.stats.recipe,
                "retain": call.plan.recipe.retain,
                "visual_tokens_kept": kept[0],
                "visual_tokens_per_layer": call.stats.visual_tokens_per_layer,
            }
        )
        answers = (output if isinstance(output, Tensor) else output.sequences)[:, self.length :]
        lengths = self._lengths(answers)
        certain = None if certainty is None else self.fallback.of_answers(certainty.steps, lengths)
        for row in (~self.settled).nonzero()[:, 0].tolist():
            self.rows[row], self.reading[row] = answers[row, : lengths[row]], number
            if certain is not None:
                self.certainty[row] = certain[row]
            if certain is None or certain[row] >= self.fallback.threshold:
                self.settled[row] = True
        if streamer is not None and not last and bool(self.settled.all()):
            held.release(streamer)
        return output

    def _lengths(self, answers: Tensor) -> list[int]:
        """Tokens of every answer in ``[B, T]``: up to the first end token and with it, else without padding."""
        ends, pad = self.config("eos_token_id"), self.config("pad_token_id")
        ends = [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()
        lengths = []
        for row in answers.tolist():
            end = next((place for place, one in enumerate(row, 1) if one in ends), len(row))
            while end == len(row) and row and row[-1] == pad and pad not in ends:
                row.pop()
                end -= 1
            lengths.append(end)
        return lengths

    def _joined(self, output: Any) -> Any:
        """The answers of rows of different readings, padded to one length, as ``generate`` returns them."""
        pad = self.config("pad_token_id")
        ends = self.config("eos_token_id")
        filler = pad if pad is not None else 0 if ends is None else int(torch.as_tensor(ends).reshape(-1)[0])
        answers = pad_sequence(self.rows, batch_first=True, padding_value=int(filler))
        prompt = (output if isinstance(output, Tensor) else output.sequences)[:, : self.length]
        sequences = torch.cat([prompt, answers.to(prompt.device)], dim=1)
        return sequences if isinstance(output, Tensor) else GenerateDecoderOnlyOutput(sequences=sequences)

    def report(self) -> None:
        """Add how the answers were found to the statistics of the last call."""
        call = self.last()
        assert call is not None
        stats = call.stats
        stats.fallback = {"readings": self.read, "reading": self.reading, "certainty": self.certainty}
        stats.notes += self.notes
