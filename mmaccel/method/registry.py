"""Methods by name: the built-in ones, those registered by the user, and those of installed packages."""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform

from ..errors import MmaccelError, first_line
from .base import Method, as_dataclass, check_class
from .nearest import suggest

T = TypeVar("T", bound=type[Method])

#: the entry point group through which another package offers methods
ENTRY_POINTS = "mmaccel.methods"

#: where a method is a file
_ROOMS = ("frames", "encoders", "pruning", "merging", "layers", "kv.policies", "kv.codecs")
_methods: dict[str, type[Method]] = {}
_loaded = False


@dataclass_transform(frozen_default=True)
def register(method: T) -> T:
    """Class decorator: make a method usable by its ``name`` in recipes, ``accelerate_vlm`` and the command line.

    Annotated attributes with a default become the options of the method: the class is made a frozen dataclass, unless it is
    one already or has an ``__init__`` of its own.

    Raises
    ------
    MmaccelError
        If the class has no name or no site, or another method has its name.

    Examples
    --------
    >>> @register
    ... class FirstTokens(ProjectorMethod):
    ...     '''Keep the beginning of every picture.'''
    ...
    ...     name = "first-tokens"
    ...
    ...     def reduce(self, tokens, count):
    ...         return Reduction.top(-tokens.valid.long().cumsum(1), tokens.valid, count)
    >>> model = accelerate_vlm(model, "first-tokens", retain=9)
    >>> model.mmaccel.remove()
    """
    check_class(method)
    as_dataclass(method)
    if not method.__module__.startswith("mmaccel."):
        # whose names are taken before those of a user
        _import_shipped()
    known = _methods.get(method.name)
    if known is not None and (known.__module__, known.__qualname__) != (method.__module__, method.__qualname__):
        raise MmaccelError(
            f"The name {method.name!r} is taken by {known.__module__}.{known.__qualname__}; choose another."
        )
    _methods[method.name] = method
    return method


def methods() -> dict[str, type[Method]]:
    """All known methods by name, sorted.

    Examples
    --------
    >>> print(methods()["divprune"].summary)
    tokens that are far from each other (max-min cosine distance)
    """
    _load()
    return dict(sorted(_methods.items()))


def forget_all_but(known: dict[str, type[Method]]) -> None:
    """Undo every registration since ``known``, which :func:`methods` returned."""
    _methods.clear()
    _methods.update(known)


def get_method(name: str) -> type[Method]:
    """The method class called ``name``. Raises MmaccelError, with the nearest names, if there is none (see :mod:`.nearest`).

    Examples
    --------
    >>> get_method("fastv")(layer=3)
    FastV(layer=3)
    """
    _load()
    if name not in _methods:
        about = {known: f"{one.site} {one.summary}" for known, one in _methods.items()}
        raise MmaccelError(f"There is no method {name!r}{suggest(name, about)}")
    return _methods[name]


# --- discovery of files and entry points -------------------------------------------------------------------------------
def files(package: ModuleType) -> list[str]:
    """The full names of the files of a package, sorted, but for those beginning with an underscore, which others share."""
    modules = iter_modules(package.__path__, f"{package.__name__}.")
    return sorted(one.name for one in modules if not one.ispkg and not one.name.rpartition(".")[2].startswith("_"))


def offered(group: str, kind: type) -> Iterator[type[Any] | ModuleType]:
    """Offers of installed packages through an entry point group, loaded: subclasses of ``kind``, or modules.

    Raises :class:`MmaccelError` if something cannot be loaded, or is neither.
    """
    for point, offer in loaded(group):
        if not isinstance(offer, ModuleType) and not (isinstance(offer, type) and issubclass(offer, kind)):
            raise refused_offer(point, f"is neither a subclass of {kind.__name__} nor a module")
        yield offer


def loaded(group: str) -> Iterator[tuple[EntryPoint, Any]]:
    """The entry points of a group by name, each with what it names; raises :class:`MmaccelError` if that cannot be imported."""
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        try:
            offer = point.load()
        except Exception as error:
            why = f"cannot be imported ({type(error).__name__}: {first_line(error)})"
            raise refused_offer(point, why) from error
        yield point, offer


def refused_offer(point: EntryPoint, why: str) -> MmaccelError:
    """The error about an entry point; ``why`` ends the sentence about it."""
    package = "A package" if point.dist is None else f"The package {point.dist.name!r}"
    return MmaccelError(
        f"{package} offers {point.value!r} as {point.group}, which {why}; update the package, or uninstall it."
    )


def _import_shipped() -> None:
    for room in _ROOMS:
        for name in files(import_module(f"mmaccel.{room}")):
            import_module(name)


def _load() -> None:
    global _loaded
    if _loaded:
        return
    # a file that looks up a method while it is loaded sees those before it
    _loaded = True
    try:
        _import_shipped()
        for offer in offered(ENTRY_POINTS, Method):
            # a module registers its methods when it is imported
            if isinstance(offer, type):
                register(offer)
    except BaseException:
        _loaded = False
        raise
