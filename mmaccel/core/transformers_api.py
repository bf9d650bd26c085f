"""All that mmaccel uses of transformers by name, for every supported version.

Every class and function is imported when it is asked for, since importing transformers takes seconds, and one that is missing
is named in one sentence.
"""

import functools
import inspect
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from ..errors import UnsupportedError

#: the oldest and the newest release of transformers that the tests run on
TESTED = ((5, 17), (5, 24))
#: every name by which a release takes the KV cache of a call, the newest first
_CACHE = ("cache", "past_key_values", "cache_params")
#: module of transformers -> the classes, functions and tables that mmaccel builds on
_NEEDED: dict[str, tuple[str, ...]] = {
    "transformers": ("GenerationMixin", "PreTrainedConfig"),
    "transformers.cache_utils": (
        "Cache",
        "DynamicCache",
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
    ),
    "transformers.masking_utils": ("ALL_MASK_ATTENTION_FUNCTIONS", "AttentionMaskInterface", "create_causal_mask"),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface", "PreTrainedModel"),
}
#: class -> the methods that mmaccel calls or wraps
_METHODS: dict[str, tuple[str, ...]] = {
    "GenerationMixin": ("generate", "_prepare_position_ids_for_generation", "_valid_auto_compile_criteria"),
    "PreTrainedModel": ("get_compiled_call", "set_attn_implementation"),
    "DynamicLayer": ("update", "get_seq_length", "get_mask_sizes", "crop", "reorder_cache", "lazy_initialization"),
    "AttentionInterface": ("register", "valid_keys"),
    "AttentionMaskInterface": ("register", "valid_keys"),
}
_MODULE_OF = {name: module for module, names in _NEEDED.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(_lacks([f"{_MODULE_OF[name]}.{name}"])) from error


def too_old() -> str | None:
    """A sentence with a remedy if the installed version is older than the supported ones; else None."""
    installed, oldest = metadata.version("transformers"), TESTED[0]
    if _number(installed) >= oldest:
        return None
    return (
        f"transformers {installed} is older than {_dotted(oldest)}, the oldest that mmaccel supports; run: {remedy()}"
    )


def untested() -> str | None:
    """A sentence if the installed version is newer than the tested ones; else None."""
    installed, newest = metadata.version("transformers"), TESTED[1]
    if _number(installed) <= newest:
        return None
    return f"transformers {installed} is newer than {_dotted(newest)}, the newest that mmaccel was tested with."


def missing() -> list[str]:
    """Names that mmaccel needs and the installed transformers lacks, dotted."""
    lacking = []
    for name, module in _MODULE_OF.items():
        try:
            attribute = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            lacking.append(f"{module}.{name}")
            continue
        lacking += [f"{module}.{name}.{part}" for part in _METHODS.get(name, ()) if not hasattr(attribute, part)]
    if not lacking and not _accepted():
        lacking.append(f"transformers.masking_utils.create_causal_mask({' or '.join(_CACHE)}=)")
    return lacking


@functools.cache
def experts_skip_tokens() -> bool:
    """Whether the experts of a layer skip a token whose expert has the number behind the last."""
    return _number(metadata.version("transformers")) >= (5, 23)


@functools.cache
def check() -> None:
    """Raise :class:`UnsupportedError` where the installed transformers lacks something that mmaccel needs."""
    if lacking := missing():
        raise UnsupportedError(_lacks(lacking))


def _lacks(names: list[str]) -> str:
    installed = metadata.version("transformers")
    return f"transformers {installed} has no {', '.join(names)}, which mmaccel needs; run: {remedy()}"


def remedy() -> str:
    """The command that installs the newest version that mmaccel was tested with."""
    (oldest, newest) = TESTED
    return f'pip install "transformers>={_dotted(oldest)},<{newest[0]}.{newest[1] + 1}"'


def _number(version: str) -> tuple[int, int]:
    """``"5.24.0.dev0"`` -> ``(5, 24)``."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _accepted() -> list[str]:
    """The names of :data:`_CACHE` that functions of the installed transformers take, as far as one of them tells."""
    # decorators that rename arguments keep the signature of what they wrap
    parameters = inspect.signature(__getattr__("create_causal_mask")).parameters
    return [name for name in _CACHE if name in parameters]


#: see :func:`cache_names`
_names: tuple[str, ...] = ()


def cache_names() -> tuple[str, ...]:
    """The names by which a caller may pass a KV cache, the installed version's own first.

    Hooks see a caller's arguments before transformers renames the old names, so all of them are read. A name that is newer than
    the installed version is none: models would ignore it.
    """
    # torch.compile traces what functools.cache wraps, and cannot follow the checks
    global _names
    if not _names:
        check()
        _names = _CACHE[_CACHE.index(_accepted()[0]) :]
    return _names


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The KV cache among the ``arguments`` of a call, by whichever name it was passed; None if there is none."""
    return next((cache for name in cache_names() if (cache := arguments.get(name)) is not None), None)


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that passes a KV ``cache`` to a model or to ``generate``."""
    return {cache_names()[0]: cache}


def cache_of(output: Any) -> Any:
    """The KV cache that a model or ``generate`` returned with its ``output``; None if there is none."""
    return getattr(output, cache_names()[0], None)
