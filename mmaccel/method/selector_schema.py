"""Validate the files of a selector before anything is built from them; they may be hostile."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MmaccelError, no_json

#: bytes of a configuration, and of the header of the weights, that are read at most
_CONFIG, _HEADER = 1 << 20, 1 << 18
#: the largest absolute value of a weight: with these, no sum of a network of any allowed shape overflows float32
_LARGEST = 1e4
#: tensors that a selector may name of its model
_NAMED = 256

Stamp = tuple[int, int, int]
#: makes the error for a file that cannot be used, and the reason
Refusal = Callable[[Path, str], MmaccelError]


def refusal(path: Path, why: str) -> MmaccelError:
    """The error for a file of a selector that cannot be used."""
    return MmaccelError(
        f"The selector file {str(path)!r} cannot be used: {why}; give another folder, or train a selector with mmaccel distil."
    )


def stamp(path: Path, refuse: Refusal = refusal) -> Stamp:
    """Time, size and inode of a file, which change when it is written.

    Raises :class:`MmaccelError`, as ``refuse`` says it, if it is not a regular file (links to one are).
    """
    try:
        about = path.stat()
        if not path.is_file():
            raise refuse(path, "it is not a regular file")
    except FileNotFoundError:
        raise refuse(path, "it does not exist") from None
    except (OSError, ValueError) as error:
        raise refuse(path, f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from error
    return about.st_mtime_ns, about.st_size, about.st_ino


def read_config(path: Path, shape: Collection[str], values: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``selector.json``: the fields ``shape`` by name, unchecked, and of its model ``family`` (a name), ``width``
    (a positive integer) and ``weights`` (``values`` numbers of each named tensor).

    Raises :class:`MmaccelError` if the file is too large or no JSON, or a field is missing, unknown or of the wrong type.
    """
    if stamp(path)[1] > _CONFIG:
        raise refusal(path, f"it is larger than {_CONFIG >> 20} MiB")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(path, f"it cannot be opened ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise refusal(path, f"it is not valid JSON ({no_json(error)})") from error
    _check_fields(path, config, "it", ("shape", "model", "record"))
    _check_fields(path, config["shape"], "`shape`", shape)
    if not isinstance(config["record"], dict):
        raise refusal(path, "`record` must be a JSON object")
    return config["shape"], read_model(path, config["model"], refusal, values)


def read_model(path: Path, model: Any, refuse: Refusal, values: int = 8) -> dict[str, Any]:
    """Check the fingerprint of a model in a file: ``family`` (a name), ``width`` (a positive integer) and ``weights``
    (``values`` numbers of each named tensor). Raises :class:`MmaccelError`, as ``refuse`` says it."""
    _check_fields(path, model, "`model`", ("family", "width", "weights"), refuse)
    if not isinstance(model["family"], str) or not model["family"].isprintable() or not 0 < len(model["family"]) < 100:
        raise refuse(path, "`model.family` must be the name of a model family")
    if type(model["width"]) is not int or model["width"] < 1:
        raise refuse(path, f"`model.width` must be a positive integer, got {_shown(model['width'])}")
    weights = model["weights"]
    if not isinstance(weights, dict) or not 0 < len(weights) <= _NAMED:
        raise refuse(path, f"`model.weights` must hold the first values of 1 to {_NAMED} tensors of the model")
    for name, first in weights.items():
        if not isinstance(first, list) or len(first) != values or not all(map(_is_number, first)):
            raise refuse(path, f"`model.weights` must hold {values} finite numbers for {_shown(name)}")
    return model


def read_weights(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read the float32 tensors of ``selector.safetensors`` onto the CPU; ``expected`` has the shape of each.

    Raises :class:`MmaccelError` if the file is longer than these need, is no safetensors file, lacks one of them or holds
    another, or a tensor has another dtype or shape, or a value that is not finite or above 10,000.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    size, needed = stamp(path)[1], 4 * sum(math.prod(shape) for shape in expected.values())
    if not needed < size <= needed + _HEADER:
        raise refusal(path, f"it has {size:,} bytes, and a network of this shape has {needed:,} and a short header")
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        if length > len(content) - 8 - needed:
            raise refusal(path, "it is not a safetensors file")
        header = json.loads(content[8 : 8 + length])
        if not isinstance(header, dict):
            raise refusal(path, "it is not a safetensors file")
        header.pop("__metadata__", None)
        for name in sorted({*expected, *header}):
            if name not in header or name not in expected:
                raise refusal(path, f"tensor {_shown(name)} {'is missing' if name in expected else 'is not expected'}")
        weights = load(content)
    except (OSError, ValueError, RecursionError, RuntimeError, SafetensorError, TypeError, AttributeError) as error:
        if isinstance(error, MmaccelError):
            raise
        raise refusal(path, "it is not a safetensors file, or a damaged one") from error
    for name, shape in expected.items():
        weight = weights[name]
        if weight.dtype != torch.float32 or tuple(weight.shape) != shape:
            has = f"{str(weight.dtype).removeprefix('torch.')} of shape {list(weight.shape)}"
            raise refusal(path, f"tensor {name!r} must be float32 of shape {list(shape)}, got {has}")
        if not bool((weight.abs() <= _LARGEST).all()):
            raise refusal(path, f"tensor {name!r} holds values that are not finite or above {_LARGEST:,.0f}")
    return weights


def _check_fields(path: Path, data: Any, what: str, names: Collection[str], refuse: Refusal = refusal) -> None:
    if not isinstance(data, dict):
        raise refuse(path, f"{what} must be a JSON object with {', '.join(names)}")
    if missing := [name for name in names if name not in data]:
        raise refuse(path, f"{what} lacks {_shown(missing[0])}")
    if unknown := [name for name in data if name not in names]:
        raise refuse(path, f"{what} has an unknown field {_shown(unknown[0])}")


def _is_number(value: Any) -> bool:
    # an integer may be too long for a float
    return type(value) in (int, float) and -1e300 < value < 1e300


def _shown(value: Any) -> str:
    """A value of a stranger's file, as a short ASCII word."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
