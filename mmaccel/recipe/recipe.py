"""Recipes: named compositions of methods over sites with their budgets. Every paper is one; ``balanced`` is the default."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import permutations
from typing import Any, Literal, get_args

from ..core.budget import Retain, check_retain
from ..errors import MmaccelError, no_json, short_int
from ..method.base import Method, Variant
from ..method.limits import option_types
from ..method.model_options import Loaded
from ..method.registry import get_method

Positions = Literal["keep", "gap", "paper"]
Proportional = Literal["none", "pictures", "all", "restore"]
#: sites at which tokens are dropped
_BEFORE_CACHE = ("patches", "encoder", "projector", "layers")
#: what a caller may set besides options of methods
OVERRIDES = ("retain", "positions", "variant", "text_retain", "proportional", "chunk", "frames_at_once")
_SITES = ("frames", "patches", "encoder", "projector", "layers", "cache", "codec")


@dataclass(frozen=True, repr=False)
class Stage:
    """One method with its options and its budget. ``retain``: a float is a ratio of the original, an int a count.

    Examples
    --------
    >>> Stage("fastv", 0.5, {"layer": 3}).build()
    FastV(layer=3)
    """

    method: str
    retain: Retain | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # JSON has lists in place of tuples
        object.__setattr__(self, "options", {key: Loaded.of(_tuples(value)) for key, value in self.options.items()})

    def __repr__(self) -> str:
        parts: list[Any] = [self.method]
        parts += [self.retain] if self.retain is not None or self.options else []
        return f"Stage({', '.join(map(repr, [*parts, dict(self.options)] if self.options else parts))})"

    def __str__(self) -> str:
        """Readable form: ``fastv 50 %, layer=3``."""
        kept = self.retain
        budget = "" if kept is None else f" {kept} a picture" if isinstance(kept, int) else f" {100 * kept:.3g} %"
        return ", ".join([f"{self.method}{budget}", *(f"{name}={value!r}" for name, value in self.options.items())])

    @property
    def kind(self) -> type[Method]:
        """The class of the method. Raises MmaccelError if there is none of that name."""
        return get_method(self.method)

    def build(self) -> Method:
        """The method with its options, validated.

        Raises
        ------
        MmaccelError
            If the method is unknown, an option does not exist, or a value is not valid.
        """
        cls = self.kind
        names = _options(cls)
        for option in self.options:
            if option not in names:
                raise MmaccelError(
                    f"Method {self.method!r} has no option {option!r}; it has {', '.join(sorted(names)) or 'none'}."
                )
        hints = option_types(cls) if self.options else {}
        options = {}
        for option, value in self.options.items():
            hint = hints.get(option)
            if isinstance(value, Loaded) and Loaded not in (hint, *typing.get_args(hint)):
                value = value.model
            if not _fits(value, hint):
                wanted = hint.__name__ if isinstance(hint, type) else hint
                raise MmaccelError(
                    f"Method {self.method!r}: {option}={Loaded.of(value)!r} is of the wrong type; give {wanted}."
                )
            options[option] = value
        try:
            return cls(**options)
        except MmaccelError:
            raise
        except (TypeError, ValueError) as error:
            raise MmaccelError(f"Method {self.method!r}: {error}") from error

    def check_json(self) -> None:
        """Raise MmaccelError if JSON has no word for the method or an option."""
        for option, value in self.options.items():
            if isinstance(value, Loaded):
                raise MmaccelError(
                    f"{option}={value!r} of {self.method!r} is a loaded model, for which JSON has no word; save it and "
                    "name the folder."
                )


@dataclass(frozen=True, repr=False)
class OwnStage(Stage):
    """A stage with a method that its name alone does not give: ``own`` is a class that is not registered, or an instance of a
    class with an ``__init__`` of its own, which has no options."""

    own: Any = None

    @property
    def kind(self) -> type[Method]:
        """The class of the method."""
        return self.own if isinstance(self.own, type) else type(self.own)

    def build(self) -> Method:
        """The instance, or the class with its options, validated as by :meth:`Stage.build`."""
        return self.own if isinstance(self.own, Method) and not self.options else super().build()

    def check_json(self) -> None:
        """Raise MmaccelError: JSON has no word for the method."""
        raise MmaccelError(
            f"{self.method!r} is a method of your own that is not known by this name, so JSON has no word for it; decorate its "
            "class with @mmaccel.register, and give its options as annotated attributes."
        )


@dataclass(frozen=True, repr=False)
class Recipe:
    """A frozen recipe: stages in the order of their sites, and settings of the whole recipe.

    Parameters
    ----------
    name : what it is called.
    stages : at most one stage at ``patches`` or ``encoder``; any number at ``projector``; ``layers`` stages at rising layers;
        at most one ``cache`` stage; one ``codec`` stage, or two of which one is ``visual_only`` and the other ``text_only``.
    positions : ``keep`` (kept tokens keep their original order and position ids, text its own, and decoding continues after
        the unreduced prompt), which is the adjustment of GAP (*Grounding-Aware Token Pruning*, arXiv 2506.21873) and may
        be called ``gap`` where a recipe drops tokens; or ``paper`` (what the authors did: most renumber what enters
        the language model 0, 1, 2, ...).
    variant : ``exact`` (what the papers say, and budgets that are met: a ratio is rounded half up per picture) or ``official``
        (every method does what its authors' program does, roundings and known quirks included; a method's page says what
        changes).
    text_retain : share of the text keys a ``cache`` stage keeps; None leaves text untouched.
    proportional : ``none``, ``pictures``, ``all`` or ``restore``: whether visual tokens that are left, of pictures or of clips
        too, weigh as many tokens as they represent (proportional attention, as in ToMe, arXiv 2210.09461, and, in a language
        model, PACT, arXiv 2504.08966): every token that is dropped before the language model counts for the one that is left
        of its picture and most like it, and ``log n`` is added to the attention logits of a token that represents ``n``. It is
        for recipes that do not touch the cache; sdpa replaces flash attention. ``restore`` calibrates as RESTORE (ICML 2026).
    chunk : tokens that the language model reads at once of a prompt, of those that methods before it leave; None for all. The
        answer is that of one piece, up to rounding. A cache policy evicts after each chunk what exceeds its budget for the
        whole prompt, so that no layer holds more than budget, text and one chunk; it chooses by what it has seen up to there,
        and queries see what is left of it. Methods that need the whole prompt are refused, as is a policy's ``text_retain``.
    frames_at_once : pictures, tiles or frames that the vision tower encodes at once (all, if a method works inside it); None
        for all, or as many as fit. Features are those of another batch size.
    anchor : the number of the stage that ``retain`` sets, if the others before and inside the language model keep their
        proportion to it (where one of them would then keep everything, all shares are raised to one power instead); by default
        ``retain`` sets the last of them, and stages before it leave at least as much.

    Examples
    --------
    >>> mine = Recipe("mine", (Stage("divprune", 0.5), Stage("snapkv", 0.25)), text_retain=0.5)
    >>> print(mine.override(retain=0.1))
    mine (divprune 10 %; snapkv 25 %; text_retain=0.5)
    >>> Recipe.from_json(mine.to_json()) == mine
    True
    """

    name: str
    stages: tuple[Stage, ...] = ()
    positions: Positions = "keep"
    variant: Variant = "exact"
    text_retain: Retain | None = None
    summary: str = ""
    paper: str = ""
    anchor: int | None = None
    proportional: Proportional = "none"
    chunk: int | None = None
    frames_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.positions not in ("keep", "gap", "paper"):
            raise MmaccelError(
                f"positions={self.positions!r} is unknown; use 'keep' or 'paper' ('gap' is the paper that 'keep' is from)."
            )
        if self.variant not in ("exact", "official"):
            raise MmaccelError(f"variant={self.variant!r} is unknown; use 'exact' or 'official'.")
        if self.proportional not in (known := get_args(Proportional)):
            raise MmaccelError(f"proportional={self.proportional!r} is unknown; use one of {', '.join(known)}.")
        if self.text_retain is not None:
            check_retain(self.text_retain, "text_retain")
        _check_sizes(self)
        _check_sites(self.name, [stage.kind for stage in self.stages])
        for stage in self.stages:
            if stage.retain is not None:
                check_retain(stage.retain)
        if self.anchor is not None:
            anchors = [i for i in self._token_stages if self.stages[i].retain is not None]
            if isinstance(self.anchor, bool) or self.anchor not in anchors:
                raise MmaccelError(
                    f"Recipe {self.name!r}: anchor={self.anchor!r} is not a stage with a budget before or inside the language "
                    f"model; give one of {anchors} or leave it out."
                )

    def __repr__(self) -> str:
        """Name, stages and settings that differ from the defaults; :meth:`describe` adds summary and paper."""
        return f"Recipe({', '.join([repr(self.name), *([repr(self.stages)] if self.stages else []), *self.settings])})"

    def __str__(self) -> str:
        """Readable form in one line: ``dycoke (dycoke-ttm 47.5 %; dycoke-cache 30 %)``, with settings that differ from
        the defaults."""
        if [stage.method for stage in self.stages] == [self.name]:
            return ", ".join([str(self.stages[0]), *self.settings])
        return f"{self.name} ({'; '.join([*map(str, self.stages), *self.settings]) or 'nothing is dropped'})"

    @property
    def settings(self) -> list[str]:
        """Settings that differ from the defaults, as written in Python: ``positions='paper'``."""
        words = ("name", "stages", *_WORDS)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in words}
        return [f"{name}={value!r}" for name, value in values.items() if value != getattr(Recipe, name)]

    @property
    def _token_stages(self) -> list[int]:
        """The stages before and inside the language model."""
        return [i for i, s in enumerate(self.stages) if s.kind.site in _BEFORE_CACHE]

    @property
    def primary(self) -> int | None:
        """The stage that ``retain`` sets: the anchor, or the last before or inside the language model, else the cache stage."""
        if self.anchor is not None:
            return self.anchor
        kinds = [stage.kind for stage in self.stages]
        for wanted in (("encoder", "projector", "layers"), ("cache",), ("frames",)):
            for i in reversed(range(len(kinds))):
                if kinds[i].site in wanted and kinds[i].budget != "none":
                    return i
        return None

    @property
    def retain(self) -> Retain | None:
        """The primary budget."""
        return None if self.primary is None else self.stages[self.primary].retain

    def override(self, **changes: Any) -> Recipe:
        """The same recipe with other values: ``retain=``, a field of the recipe, or an option of one of its methods.

        Raises
        ------
        MmaccelError
            If nothing in the recipe has that name, or two methods do.
        """
        recipe = self
        for key, value in changes.items():
            if key == "retain":
                recipe = recipe._with_retain(check_retain(value))
            elif key in OVERRIDES:
                recipe = dataclasses.replace(recipe, **{key: value})
            else:
                recipe = recipe._with_option(key, value)
        if recipe.stages != self.stages:
            # options may only make sense together
            for stage in recipe.stages:
                stage.build()
        return recipe

    def _with_retain(self, retain: Retain) -> Recipe:
        if self.primary is None:
            why = "has no budget to set" if self._token_stages else "drops nothing"
            raise MmaccelError(f"Recipe {self.name!r} {why}, so retain={retain} has no meaning; leave it out.")
        stages = list(self.stages)
        before = stages[self.primary].retain
        if self.anchor is not None and before is not None:
            shares = [_in_proportion(stages[i].retain, before, retain) for i in self._token_stages]
            if retain < 1 and any(
                stages[i].retain != share == 1.0 for i, share in zip(self._token_stages, shares, strict=True)
            ):
                shares = [_by_power(stages[i].retain, before, retain) for i in self._token_stages]
            for i, share in zip(self._token_stages, shares, strict=True):
                stages[i] = dataclasses.replace(stages[i], retain=share)
        stages[self.primary] = dataclasses.replace(stages[self.primary], retain=retain)
        return dataclasses.replace(self, stages=tuple(stages))

    def _with_option(self, key: str, value: Any) -> Recipe:
        having = [stage for stage in self.stages if key in _options(stage.kind)]
        if len(having) != 1:
            what = "belongs to several methods" if having else "is not an option"
            takes = ", ".join(overrides(self)) or "none"
            raise MmaccelError(f"{key}={value!r:.40}: {key!r} {what} of recipe {self.name!r}; it takes {takes}.")
        new = dataclasses.replace(having[0], options={**having[0].options, key: value})
        return dataclasses.replace(self, stages=tuple(new if one is having[0] else one for one in self.stages))

    def build(self) -> list[tuple[Stage, Method]]:
        """Every stage with its method, validated together.

        Raises
        ------
        MmaccelError
            If a stage needs a budget and has none, ``layers`` stages do not rise, two methods cannot be combined, or a method
            cannot work with ``positions`` or ``proportional``.
        """
        # methods are loaded when they are built, and torch with them
        from ..method import LayerMethod

        built = [(stage, stage.build().by(self.variant)) for stage in self.stages]
        at = [m.layer for _, m in built if isinstance(m, LayerMethod)]
        if len({type(layer) for layer in at}) == 1 and at != sorted(set(at)):
            raise MmaccelError(f"Recipe {self.name!r}: methods inside the language model need rising layers, not {at}.")
        if self.positions == "gap" and not any(m.site in _BEFORE_CACHE for _, m in built):
            raise MmaccelError(
                f"positions='gap' is about tokens that are dropped before or inside the language model, and recipe "
                f"{self.name!r} drops none there; leave it out."
            )
        check_together(self.name, [method for _, method in built])
        for stage, method in built:
            if stage.retain is None and method.budget != "none":
                raise MmaccelError(
                    f"Method {method.name!r} needs a budget; give retain=0.25 or a count such as retain=64."
                )
            method.check_settings(self.positions, self.proportional)
            _check_chunk(self, method)
        return built

    # --- as data ----------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """JSON that :meth:`from_json` reads back to an equal recipe.

        Raises
        ------
        MmaccelError
            If an option is a loaded model, or a method is not registered.
        """
        for stage in self.stages:
            stage.check_json()
        return json.dumps(dataclasses.asdict(self), indent=2, default=dict)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """A recipe from JSON, validated. Nothing in it is ever run as code.

        Raises
        ------
        MmaccelError
            If it is no JSON object, a field is unknown or of the wrong type, a method does not exist, or no stage is given and
            it is not ``none``.
        """
        try:
            data = json.loads(text, parse_int=short_int)
        except TypeError as error:
            raise MmaccelError(f"The recipe must be JSON text, not {type(text).__name__}; give a string.") from error
        except (ValueError, RecursionError) as error:
            raise MmaccelError(f"The recipe is not valid JSON: {no_json(error)}.") from error
        kind = TunedRecipe if isinstance(data, dict) and "tuned" in data else Recipe
        data = _fields(data, kind, "recipe")
        stages = [Stage(**_fields(item, Stage, "stage")) for item in data.get("stages", [])]
        recipe = kind(**{**data, "stages": tuple(stages)})
        if not stages and recipe.name != "none":
            raise MmaccelError(
                f"Recipe {recipe.name!r:.40} has no stages and would change nothing; give at least one stage, or use the "
                "recipe 'none' for the bare model."
            )
        recipe.build()
        return recipe

    def describe(self) -> str:
        """The recipe in words, a line per stage."""
        lines = [f"{self.name}: {self.summary}" if self.summary else self.name]
        if self.paper:
            lines.append(f"  paper: {self.paper}")
        for stage in self.stages:
            m = stage.kind
            kept = f"{stage.retain:.0%}" if isinstance(stage.retain, float) else f"{stage.retain} a picture"
            budget = "" if stage.retain is None else f", keeps {kept}"
            options = "".join(f", {k}={v}" for k, v in stage.options.items())
            lines.append(f"  {m.site}: {m.name}{budget}{options} - {m.summary}")
        weights = "" if self.proportional == "none" else f"; proportional: {self.proportional}"
        lines.append(f"  positions: {self.positions}; variant: {self.variant}{weights}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class TunedRecipe(Recipe):
    """A recipe tuned for one model, as ``mmaccel tune`` writes it.

    tuned : ``model``, the fingerprint of that model, by which another one is told; the rest is what was measured.
    """

    tuned: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Recipe, name: str, tuned: Mapping[str, Any]) -> TunedRecipe:
        """A copy of a recipe under another name, with its measurements."""
        values = {one.name: getattr(recipe, one.name) for one in dataclasses.fields(Recipe)}
        return TunedRecipe(**{**values, "name": name}, tuned=tuned)


#: fields of a recipe that describe it and change nothing
_WORDS = ("summary", "paper", "tuned")


def check_together(name: str, methods: Sequence[Method]) -> None:
    """Raise :class:`MmaccelError` if two of the ``methods`` of recipe ``name`` cannot be combined; they know it themselves."""
    for one, other in permutations(methods, 2):
        _refuse_pair(name, one, other, one.conflict(other))


def _check_sites(name: str, methods: Sequence[type[Method]]) -> None:
    """Raise :class:`MmaccelError` if ``methods`` are not in the order of their sites, or one excludes the site of another."""
    order = [_SITES.index(method.site) for method in methods]
    if order != sorted(order):
        raise MmaccelError(f"Recipe {name!r}: stages must follow the order of the sites, {' -> '.join(_SITES)}.")
    for one, other in permutations(methods, 2):
        _refuse_pair(name, one, other, one.excludes.get(other.site))


def _check_sizes(recipe: Recipe) -> None:
    """Raise :class:`MmaccelError` unless the sizes of chunks and of groups of frames are None or whole numbers from 1."""
    for name, unit, default in (("chunk", "tokens", "one piece"), ("frames_at_once", "frames", "all at once")):
        value = getattr(recipe, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise MmaccelError(
                f"{name} must be a whole number of {unit}, at least 1, got {value!r:.40}; leave it out for {default}."
            )


def _check_chunk(recipe: Recipe, method: Method) -> None:
    """Raise :class:`MmaccelError` if the prompts of ``recipe`` cannot be read in chunks with one of its methods."""
    if recipe.chunk is None:
        return
    why = method.needs_whole_prompt
    if method.site == "cache" and recipe.text_retain is not None and why is None:
        why = f"evicts text of the whole prompt with text_retain={recipe.text_retain!r}"
    if why is not None:
        raise MmaccelError(
            f"chunk={recipe.chunk} cannot be used with {method.name!r}, which {why}; leave out chunk, or use a method before "
            "the language model."
        )


def _refuse_pair(name: str, one: Method | type[Method], other: Method | type[Method], why: str | None) -> None:
    if why is not None:
        raise MmaccelError(
            f"Recipe {name!r} cannot combine {one.name!r} with {other.name!r}: {why}; leave out one of them."
        )


def overrides(recipe: Recipe) -> list[str]:
    """Names that :meth:`Recipe.override` takes for a recipe; for one without stages the sizes of chunks and groups."""
    if not recipe.stages:
        return ["chunk", "frames_at_once"]
    return [*OVERRIDES, *sorted(set().union(*(_options(one.kind) for one in recipe.stages)))]


def _options(cls: type[Method]) -> set[str]:
    """The names of a method's options."""
    return {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _tuples(value: Any) -> Any:
    """A value with lists replaced by tuples, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the declared type of an option; the method checks its range."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(type(value) is type(arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(part, args[0]) for part in value)
    if hint is float or hint is int:
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


#: JSON types of the fields of recipes and stages that have no check of their own
_JSON: Mapping[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "method": (str, "a string"),
    "summary": (str, "a string"),
    "paper": (str, "a string"),
    "stages": (list, 'a list of objects such as {"method": "divprune", "retain": 0.25}'),
    "options": (dict, "an object"),
    "tuned": (dict, "an object, as mmaccel tune writes it"),
}


def _fields(data: Any, cls: type, what: str) -> dict[str, Any]:
    """``data`` if it is a JSON object with the fields of ``cls``."""
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields]
    if not isinstance(data, dict):
        raise MmaccelError(f"A {what} must be a JSON object with {', '.join(names)}.")
    for key in data:
        if key not in names:
            raise MmaccelError(f"A {what} has no field {key!r}; it has {', '.join(names)}.")
    for name in names:
        kind, wanted = _JSON.get(name, (object, ""))
        # the first field of both is the one that must be given
        if (name in data or name == names[0]) and not isinstance(data.get(name), kind):
            raise MmaccelError(f"`{name}` of a {what} must be {wanted}, got {data.get(name)!r:.40}.")
    return data


def _in_proportion(retain: Retain | None, before: Retain, after: Retain) -> Retain | None:
    """Budget of a stage when that of the anchor changes from ``before`` to ``after``; of one token a picture one stays."""
    if retain is None or (isinstance(retain, int) and retain == 1):
        return retain
    share = Fraction(str(retain)) / Fraction(str(before)) * Fraction(str(after))
    return max(1, int(share + Fraction(1, 2))) if isinstance(after, int) else min(1.0, float(share))


def _by_power(retain: Retain | None, before: Retain, after: Retain) -> Retain | None:
    """Budget of a stage with all shares raised to one power, used where in proportion some stage would drop nothing."""
    if not (isinstance(retain, float) and 0 < retain < 1):
        return retain
    return round(retain ** (math.log(after) / math.log(before)), 6)
