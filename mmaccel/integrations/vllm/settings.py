"""Settings in ``hf_overrides={"mmaccel": {...}}`` and in requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from ...core.budget import Retain, budget_text, check_retain
from ...core.layout import Modality
from ...core.version import __version__
from ...errors import MmaccelError, UnsupportedError
from ...recipe import Recipe, get_recipe

#: whose position text has behind a clip whose time goes further than its height and width: vLLM goes on behind the last frame,
#: transformers 5 behind the larger side of the grid
NUMBERINGS = ("vllm", "transformers")
#: of a request: a share or count of tokens, None for that of the server, or False for all tokens as the bare model has them
Budget = Retain | Literal[False] | None
#: what may have a budget of its own
MODALITIES: tuple[Modality, ...] = ("image", "video")
#: what a request calls its budget in ``mm_processor_kwargs``, see :func:`request_of`
ASKED = ("mmaccel", "retain")
#: a whole number that a 64-bit integer holds
_MOST = 2**62


@dataclass(frozen=True)
class Settings:
    """The recipe of a server.

    recipe : with the budgets that hold where a request says nothing.
    numbering : one of :data:`NUMBERINGS`.
    retain : budgets of pictures and of clips, where they differ from that of the recipe.
    """

    recipe: Recipe
    numbering: str = "vllm"
    retain: Mapping[Modality, Retain] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Key of caches of encoded pictures, beside the picture and the request."""
        recipe = json.dumps([self.recipe.to_json(), dict(self.retain)])
        return f"mmaccel {__version__} {self.numbering} {recipe}"

    def __str__(self) -> str:
        apart = ", ".join(f"{name} {budget_text(retain)}" for name, retain in self.retain.items())
        return f"{self.recipe}{f' with retain of {apart}' if apart else ''}"


def written_in(model_config: Any) -> Any:
    """The value of ``mmaccel`` in the configuration inside vLLM's ``ModelConfig``, or None."""
    try:
        return getattr(model_config.hf_config, "mmaccel", None)
    except Exception:
        # configurations may run code that came with a checkpoint
        return None


def nested_in(config: Any) -> list[str]:
    """The names of the configurations inside ``config``, such as that of the language model, that have the key ``mmaccel``."""
    try:
        parts = {name: _keys(part) for name, part in vars(config).items()}
        return [name for name, part in parts.items() if part.get("mmaccel") is not None]
    except Exception:
        # configurations may run code that came with a checkpoint
        return []


def nested_override_of(model_config: Any) -> str | None:
    """The name of the configuration inside that of the model in which the caller's ``hf_overrides`` wrote ``mmaccel``, where it
    has no effect; None where they did not."""
    overrides = getattr(model_config, "hf_overrides", None)
    if isinstance(overrides, Mapping):
        nested = (name for name, part in overrides.items() if isinstance(part, Mapping) and "mmaccel" in part)
        return next(nested, None)
    if not callable(overrides) or not (names := nested_in(getattr(model_config, "hf_config", None))):
        return None
    try:
        # what a checkpoint has inside is not the caller's
        without = copy.deepcopy(model_config.hf_config)
        for name in names:
            part = getattr(without, name)
            (part if isinstance(part, dict) else vars(part)).pop("mmaccel", None)
        names = nested_in(overrides(without))
    except Exception:
        return None
    return names[0] if names else None


def _keys(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else getattr(part, "__dict__", {})


def override_of(model_config: Any) -> Any:
    """The value of ``mmaccel`` in the caller's ``hf_overrides``, from vLLM's ``ModelConfig``, or None.

    vLLM writes overrides into the configuration of the checkpoint, which may have the key ``mmaccel`` of its own. That one is
    ignored: a model that was downloaded must not choose a recipe.
    """
    given = written_in(model_config)
    if given is None:
        return None
    overrides = getattr(model_config, "hf_overrides", None)
    if not callable(overrides):
        return overrides.get("mmaccel") if isinstance(overrides, Mapping) else None
    try:
        without = copy.deepcopy(model_config.hf_config)
        vars(without).pop("mmaccel", None)
        return getattr(overrides(without), "mmaccel", None)
    except Exception:
        # a function that cannot run twice; the caller wrote it, and most checkpoints have no such key
        return given


def settings_of(given: Any) -> Settings:
    """The settings in ``hf_overrides={"mmaccel": given}``, validated."""
    if not isinstance(given, Mapping) or "recipe" not in given:
        raise MmaccelError(
            'hf_overrides={"mmaccel": ...} needs an object with a recipe, such as {"recipe": "divprune", "retain": 0.25}.'
        )
    options = {str(name): value for name, value in given.items() if name not in ("recipe", "numbering")}
    numbering = given.get("numbering", "vllm")
    if numbering not in NUMBERINGS:
        raise MmaccelError(f"numbering={numbering!r} is unknown; use {' or '.join(map(repr, NUMBERINGS))}.")
    apart = _apart(options.pop("retain")) if isinstance(options.get("retain"), Mapping) else {}
    chosen = get_recipe(given["recipe"], **options)
    chosen.build()
    for retain in apart.values():
        chosen.override(retain=retain)
    if chosen.proportional != "none":
        raise UnsupportedError(
            f"proportional={chosen.proportional!r} gives keys weights, which attention in vLLM does not take; leave it out."
        )
    if chosen.chunk is not None:
        raise UnsupportedError(
            f"chunk={chosen.chunk} is for transformers, and vLLM cuts prompts itself (max_num_batched_tokens); leave it out."
        )
    if chosen.frames_at_once is not None:
        raise UnsupportedError(
            f"frames_at_once={chosen.frames_at_once} is for transformers, and vLLM batches pictures itself; leave it out."
        )
    return Settings(chosen, numbering, apart)


def _apart(retain: Mapping[Any, Any]) -> dict[Modality, Retain]:
    """Budgets of pictures and of clips, validated."""
    if others := [name for name in retain if name not in MODALITIES]:
        raise MmaccelError(
            f"retain has one budget for 'image' and one for 'video', got {', '.join(map(repr, others))}; leave it out."
        )
    return {
        name: check_retain(retain[name], f"retain of {name}") for name in MODALITIES if retain.get(name) is not None
    }


def request_of(processing: Mapping[str, Any]) -> dict[Modality, Budget]:
    """The budgets of pictures and clips in the ``mm_processor_kwargs`` of a request.

    ``{"mmaccel": {"retain": 0.1}}``, as :func:`mmaccel.accelerate_vlm` spells it for one call, and ``{"retain": 0.1}`` mean the
    same; ``{"retain": {"image": 0.5, "video": 0.1}}`` gives pictures and clips their own; ``{"mmaccel": False}`` keeps all
    tokens; null or nothing is the budget of the server. Anything else, or two budgets, is refused.
    """
    nested, flat = processing.get("mmaccel"), processing.get("retain")
    if nested is not None and flat is not None:
        raise MmaccelError(
            f"A request has one budget, got retain={flat!r} and mmaccel={nested!r}; leave one of them out."
        )
    if nested is None or nested is True:
        retain = flat
    elif nested is False:
        return dict.fromkeys(MODALITIES, False)
    elif isinstance(nested, Mapping):
        if others := [name for name in nested if name != "retain"]:
            raise MmaccelError(
                f"A request to vLLM can change 'retain' alone, got {', '.join(map(repr, others))} in mmaccel; start a server "
                "with what you want, or leave it out."
            )
        retain = nested.get("retain")
    else:
        raise MmaccelError(
            f'mmaccel must be an object such as {{"retain": 0.1}}, or false for all tokens, got {nested!r}.'
        )
    if isinstance(retain, Mapping):
        return {**dict.fromkeys(MODALITIES), **_apart(retain)}
    return dict.fromkeys(MODALITIES, None if retain is None else check_retain(retain))


def as_integers(budget: Budget) -> tuple[int, int]:
    """A budget as two integers, which travel between vLLM's processes exactly: a share as numerator and denominator, a
    count with denominator 0, None as two zeros, False as 0 and 1."""
    if budget is None:
        return 0, 0
    if budget is False:
        return 0, 1
    check_retain(budget)
    if isinstance(budget, int):
        return min(budget, _MOST), 0
    share = Fraction(str(budget))
    if share.denominator >= _MOST:
        raise MmaccelError(f"retain={budget} keeps next to nothing; give a share such as 0.05, or a count such as 64.")
    return share.numerator, share.denominator


def from_integers(numerator: int, denominator: int) -> Budget:
    """The budget that :func:`as_integers` wrote."""
    if denominator:
        return numerator / denominator if numerator else False
    return numerator or None
