"""Recipes: named compositions of methods over sites with their budgets. Every paper is one; ``balanced`` is the default."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from ..core.budget import Retain, check_retain
from ..errors import MmaccelError, no_json, short_int
from ..method.base import Method, Variant
from ..method.model_options import Loaded
from ..method.registry import get_method

if TYPE_CHECKING:
    from ..method.keys import Policy

Positions = Literal["keep", "gap", "paper"]
Proportional = Literal["none", "pictures", "all"]
#: sites at which tokens are dropped
_BEFORE_CACHE = ("patches", "encoder", "projector", "layers")
#: sites of recipes whose tokens may have weights
_WEIGHED = ("frames", "encoder", "projector", "layers")
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
        # JSON knows no tuples
        given = {key: _tuples(value) for key, value in self.options.items()}
        options = {key: Loaded.of(value) for key, value in given.items()}
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        told = [repr(self.method)]
        told += [repr(self.retain)] if self.retain is not None or self.options else []
        return f"Stage({', '.join([*told, *([repr(dict(self.options))] if self.options else [])])})"

    def __str__(self) -> str:
        """In words: ``fastv 50 %, layer=3``."""
        kept = self.retain
        budget = "" if kept is None else f" {kept} a picture" if isinstance(kept, int) else f" {100 * kept:.3g} %"
        return ", ".join([f"{self.method}{budget}", *(f"{name}={value!r}" for name, value in self.options.items())])

    def build(self) -> Method:
        """The method, checked.

        Raises
        ------
        MmaccelError
            If the method is unknown, an option does not exist, or a value is of no use.
        """
        cls = get_method(self.method)
        names = _options(cls)
        for option in self.options:
            if option not in names and option in cls.gone:
                raise MmaccelError(f"Method {self.method!r} has no option {option!r} any more: {cls.gone[option]}.")
            if option not in names:
                raise MmaccelError(
                    f"Method {self.method!r} has no option {option!r}; it has {', '.join(sorted(names)) or 'none'}."
                )
        hints = _hints(cls) if self.options else {}
        for option, value in self.options.items():
            hint = hints.get(option)
            if not _fits(value, hint):
                wanted = hint.__name__ if isinstance(hint, type) else hint
                raise MmaccelError(f"Method {self.method!r}: {option}={value!r} is of the wrong type; give {wanted}.")
        try:
            return cls(**self.options)
        except (TypeError, ValueError) as error:
            raise (
                error if isinstance(error, MmaccelError) else MmaccelError(f"Method {self.method!r}: {error}")
            ) from error


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with ``variant`` in place of ``rounding``, which it was called before; that warns, for this version."""
    if "rounding" not in given:
        return dict(given)
    warnings.warn(
        "rounding= is called variant= now; the old name goes with the next version.", FutureWarning, stacklevel=3
    )
    if "variant" in given:
        raise MmaccelError("rounding= is what variant= was called before; give variant= alone.")
    return {"variant" if name == "rounding" else name: value for name, value in given.items()}


@dataclass(frozen=True, repr=False)
class Recipe:
    """A frozen value: stages in the order of their sites, and what holds for all of them.

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
        changes). ``rounding`` is its name of earlier versions.
    text_retain : share of the text keys a ``cache`` stage keeps; None leaves text untouched.
    proportional : ``none``, ``pictures`` or ``all``: whether visual tokens that are left, of pictures or of clips too, weigh as
        many tokens as they stand for (proportional attention, as in ToMe, arXiv 2210.09461, and, in a language model, PACT,
        arXiv 2504.08966): every token that is dropped before the language model counts for the one that is left of its
        picture and most like it, and ``log n`` is added to the attention logits of a token that stands for ``n``. It is for
        recipes that do not touch the cache; flash attention gives way to sdpa.
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

    def __post_init__(self) -> None:
        if self.positions not in ("keep", "gap", "paper"):
            raise MmaccelError(
                f"positions={self.positions!r} is unknown; use 'keep' or 'paper' ('gap' is the paper that 'keep' is from)."
            )
        if self.variant not in ("exact", "official"):
            raise MmaccelError(f"variant={self.variant!r} is unknown; use 'exact' or 'official'.")
        if self.proportional not in ("none", "pictures", "all"):
            raise MmaccelError(f"proportional={self.proportional!r} is unknown; use 'none', 'pictures' or 'all'.")
        if self.text_retain is not None:
            check_retain(self.text_retain, "text_retain")
        order = [_SITES.index(get_method(stage.method).site) for stage in self.stages]
        if order != sorted(order):
            raise MmaccelError(
                f"Recipe {self.name!r}: stages must follow the order of the sites, {' -> '.join(_SITES)}."
            )
        if any(order.count(_SITES.index(site)) > 1 for site in ("patches", "encoder", "cache")):
            raise MmaccelError(
                f"Recipe {self.name!r}: one method each at sites 'patches', 'encoder' and 'cache' is the most."
            )
        if {_SITES.index("patches"), _SITES.index("encoder")} <= set(order):
            raise MmaccelError(
                f"Recipe {self.name!r}: patches are left out of the tower, or tokens are merged or reused in it, not both; "
                "leave out the stage at site 'patches' or the one at site 'encoder'."
            )
        for stage in self.stages:
            if stage.retain is not None:
                check_retain(stage.retain)
        if self.anchor is not None:
            anchors = [i for i in self._token_stages if self.stages[i].retain is not None]
            if isinstance(self.anchor, bool) or self.anchor not in anchors:
                raise MmaccelError(
                    f"Recipe {self.name!r}: anchor={self.anchor!r} is no stage with a budget before or inside the language "
                    f"model; give one of {anchors} or leave it out."
                )

    def __repr__(self) -> str:
        """What makes it another recipe than a default one; summary and paper are left to :meth:`describe`."""
        return f"Recipe({', '.join([repr(self.name), *([repr(self.stages)] if self.stages else []), *self.settings])})"

    def __str__(self) -> str:
        """In words, as one line: ``dycoke (dycoke-ttm 47.5 %; dycoke-cache 30 %)``, and whatever else is not as by default."""
        if [stage.method for stage in self.stages] == [self.name]:
            return ", ".join([str(self.stages[0]), *self.settings])
        return f"{self.name} ({'; '.join([*map(str, self.stages), *self.settings]) or 'nothing is dropped'})"

    @property
    def settings(self) -> list[str]:
        """What holds for all stages and is not as by default, as it is written in Python: ``positions='paper'``."""
        words = ("name", "stages", *_WORDS)
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in words}
        return [f"{name}={value!r}" for name, value in values.items() if value != getattr(Recipe, name)]

    @property
    def rounding(self) -> Variant:
        """``variant``, by its name of earlier versions."""
        renamed({"rounding": self.variant})
        return self.variant

    @property
    def _token_stages(self) -> list[int]:
        """The stages before and inside the language model."""
        return [i for i, s in enumerate(self.stages) if get_method(s.method).site in _BEFORE_CACHE]

    @property
    def primary(self) -> int | None:
        """The stage that ``retain`` sets: the anchor, or the last before or inside the language model, else the cache stage."""
        if self.anchor is not None:
            return self.anchor
        sites = [get_method(stage.method).site for stage in self.stages]
        for wanted in (("encoder", "projector", "layers"), ("cache",), ("frames",)):
            found = [
                i
                for i, site in enumerate(sites)
                if site in wanted and get_method(self.stages[i].method).budget != "none"
            ]
            if found:
                return found[-1]
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
        for key, value in renamed(changes).items():
            if key == "retain":
                recipe = recipe._with_retain(check_retain(value))
            elif key in ("positions", "variant", "text_retain", "proportional"):
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
        having = [i for i, s in enumerate(self.stages) if key in _options(get_method(s.method))]
        if len(having) != 1:
            for cls in (get_method(stage.method) for stage in self.stages):
                if key in cls.gone:
                    raise MmaccelError(f"Method {cls.name!r} has no option {key!r} any more: {cls.gone[key]}.")
            options = sorted({name for s in self.stages for name in _options(get_method(s.method))})
            what = "is ambiguous" if having else "is no option"
            known = ", ".join(["retain", "positions", "variant", "text_retain", "proportional", *options])
            raise MmaccelError(f"{key!r} {what} of recipe {self.name!r}; it takes {known}.")
        stages = list(self.stages)
        stages[having[0]] = dataclasses.replace(stages[having[0]], options={**stages[having[0]].options, key: value})
        return dataclasses.replace(self, stages=tuple(stages))

    def build(self) -> list[tuple[Stage, Method]]:
        """Every stage with its method, checked together.

        Raises
        ------
        MmaccelError
            If a stage needs a budget and has none, ``layers`` stages do not rise, or ``positions`` cannot be honoured.
        """
        # methods are loaded when they are built, and torch with them
        from ..method import ChunkMethod, LayerMethod, Policy, ReturningMethod

        built = [(stage, stage.build().by(self.variant)) for stage in self.stages]
        at = [m.layer for _, m in built if isinstance(m, LayerMethod)]
        if len({type(layer) for layer in at}) == 1 and at != sorted(set(at)):
            raise MmaccelError(f"Recipe {self.name!r}: methods inside the language model need rising layers, not {at}.")
        if self.positions == "gap" and not any(m.site in _BEFORE_CACHE for _, m in built):
            raise MmaccelError(
                f"positions='gap' is about tokens that are dropped before or inside the language model, and recipe "
                f"{self.name!r} drops none there; leave it out."
            )
        if self.positions == "paper" and (late := [m.name for _, m in built if m.renumbers_inside]):
            raise MmaccelError(
                f"positions='paper' cannot be had with {late[0]!r}: its authors renumber between layers, so that a token has "
                "other positions in every layer's cache; use 'keep'."
            )
        elsewhere = [m.name for _, m in built if m.site not in _WEIGHED or isinstance(m, ChunkMethod)]
        if self.proportional != "none" and elsewhere:
            raise MmaccelError(
                f"proportional={self.proportional!r} is for tokens that are dropped or merged in the tower or behind it, in "
                f"prompts of one piece, and {elsewhere[0]!r} is not; leave one of them out."
            )
        back = [m for _, m in built if isinstance(m, ReturningMethod)]
        beside = [m for _, m in built if m.site in _SITES[4:] and not isinstance(m, ReturningMethod)]
        if back and beside:
            raise MmaccelError(
                f"Recipe {self.name!r}: {back[0].name!r} brings dropped tokens back, which {beside[0].name!r} would drop or "
                "pack while they come; leave out one of them."
            )
        codecs = [m for _, m in built if m.site == "codec"]
        packs = sorted(what for m in codecs for what in ("text", "visual") if getattr(m, f"{what}_only"))
        if len(codecs) > 1 and packs != ["text", "visual"] or len(codecs) > 2:
            raise MmaccelError(
                f"Recipe {self.name!r}: of two codecs one packs visual tokens and one text; set visual_only=True on one and "
                "text_only=True on the other."
            )
        for stage, m in built:
            if stage.retain is None and m.budget != "none":
                raise MmaccelError(f"Method {m.name!r} needs a budget; give retain=0.25 or a count such as retain=64.")
            if isinstance(m, Policy) and m.text_policy:
                text_policy(m.text_policy)
        return built

    # --- as data ----------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        """JSON that :meth:`from_json` reads back to an equal recipe.

        Raises
        ------
        MmaccelError
            If an option is a loaded model.
        """
        for stage in self.stages:
            for option, value in stage.options.items():
                if isinstance(value, Loaded):
                    raise MmaccelError(
                        f"{option}={value!r} of {stage.method!r} is a loaded model, for which JSON has no word; save it and "
                        "name the folder."
                    )
        return json.dumps(dataclasses.asdict(self), indent=2, default=dict)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """A recipe from JSON, validated. Nothing in it is ever run as code.

        Raises
        ------
        MmaccelError
            If it is no JSON object, a field is unknown or of the wrong type, or a method does not exist.
        """
        try:
            data = json.loads(text, parse_int=short_int)
        except TypeError as error:
            raise MmaccelError(f"The recipe is no text but a {type(text).__name__}; give JSON as a string.") from error
        except (ValueError, RecursionError) as error:
            raise MmaccelError(f"The recipe is no valid JSON: {no_json(error)}.") from error
        data = renamed(data) if isinstance(data, dict) else data
        kind = TunedRecipe if isinstance(data, dict) and "tuned" in data else Recipe
        data = _fields(data, kind, "recipe")
        if not isinstance(data.get("name"), str):
            raise MmaccelError("The recipe needs a name, a string.")
        if not isinstance(stages := data.get("stages", []), list):
            raise MmaccelError('stages must be a list of objects such as {"method": "divprune", "retain": 0.25}.')
        for key in ("summary", "paper"):
            if not isinstance(data.get(key, ""), str):
                raise MmaccelError(f"{key} must be a string.")
        if not isinstance(data.get("tuned", {}), dict):
            raise MmaccelError("tuned must be an object, as mmaccel tune writes it.")
        built = []
        for item in stages:
            item = _fields(item, Stage, "stage")
            if not isinstance(item.get("method"), str) or not isinstance(item.get("options", {}), dict):
                raise MmaccelError("Every stage needs a method (a string); its options are an object.")
            built.append(Stage(item["method"], item.get("retain"), dict(item.get("options", {}))))
        recipe = kind(**{**data, "stages": tuple(built)})
        recipe.build()
        return recipe

    def describe(self) -> str:
        """The recipe in words, a line per stage."""
        lines = [f"{self.name}: {self.summary}" if self.summary else self.name]
        if self.paper:
            lines.append(f"  paper: {self.paper}")
        for stage in self.stages:
            m = get_method(stage.method)
            budget = (
                ""
                if stage.retain is None
                else (
                    f", keeps {stage.retain:.0%}"
                    if isinstance(stage.retain, float)
                    else f", keeps {stage.retain} a picture"
                )
            )
            options = "".join(f", {k}={v}" for k, v in stage.options.items())
            lines.append(f"  {m.site}: {m.name}{budget}{options} - {m.summary}")
        weights = "" if self.proportional == "none" else f"; proportional: {self.proportional}"
        lines.append(f"  positions: {self.positions}; variant: {self.variant}{weights}")
        return "\n".join(lines)


def _takes_rounding(cls: Any) -> None:
    """``cls`` is still made with ``rounding=``, the name of ``variant`` in earlier versions."""
    made = cls.__init__

    @wraps(made)
    def init(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **renamed(named))

    cls.__init__ = init


_takes_rounding(Recipe)


@dataclass(frozen=True, repr=False)
class TunedRecipe(Recipe):
    """A recipe that was found for one model, as ``mmaccel tune`` writes it.

    tuned : ``model``, the fingerprint of that model, by which another one is told; the rest is what was measured.
    """

    tuned: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(recipe: Recipe, name: str, tuned: Mapping[str, Any]) -> TunedRecipe:
        """A recipe under another name, with what was measured of it."""
        values = {one.name: getattr(recipe, one.name) for one in dataclasses.fields(Recipe)}
        return TunedRecipe(**{**values, "name": name}, tuned=tuned)


#: fields of a recipe that describe it and change nothing
_WORDS = ("summary", "paper", "tuned")


def text_policy(name: str) -> Policy:
    """The policy that ranks text keys, with its default options.

    Raises
    ------
    MmaccelError
        If it is unknown, no cache policy, or needs more than keys.
    """
    from ..method import Policy

    made = get_method(name)()
    if not isinstance(made, Policy) or made.window or made.observes or made.deferred:
        raise MmaccelError(
            f"text_policy={name!r} cannot rank text keys: it must be a cache policy that needs keys only, such as "
            "'streaming-llm'."
        )
    return made


def _options(cls: type[Method]) -> set[str]:
    """The names of a method's options."""
    return {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:
        # a class made inside a function may name types that only exist there
        return {}


def _tuples(value: Any) -> Any:
    """A value with tuples for its lists, and for those in them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the type that an option was declared with; which values make sense, the method knows."""
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


def _fields(data: Any, cls: type, what: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    if not isinstance(data, dict):
        raise MmaccelError(f"A {what} must be a JSON object with {', '.join(names)}.")
    for key in data:
        if key not in names:
            raise MmaccelError(f"A {what} has no field {key!r}; it has {', '.join(names)}.")
    return data


def _in_proportion(retain: Retain | None, before: Retain, after: Retain) -> Retain | None:
    """A stage's budget when that of the anchor goes from ``before`` to ``after``; of one token a picture one stays."""
    if retain is None or (isinstance(retain, int) and retain == 1):
        return retain
    share = Fraction(str(retain)) / Fraction(str(before)) * Fraction(str(after))
    return max(1, int(share + Fraction(1, 2))) if isinstance(after, int) else min(1.0, float(share))


def _by_power(retain: Retain | None, before: Retain, after: Retain) -> Retain | None:
    """The same where in proportion a stage would have nothing to drop: as where each stage drops the same share."""
    if not (isinstance(retain, float) and 0 < retain < 1):
        return retain
    return round(retain ** (math.log(after) / math.log(before)), 6)
