"""Objects of a cache as plain data and tensors, and back: every store, index, memory and state, by its attributes.

Data are JSON values; what JSON lacks is a list that begins with a tag. An object that is reached twice is one object again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

#: packages whose classes a cache is made of; a file can name no others
_PACKAGES = ("mmaccel.kv.", "mmaccel.runtime.", "mmaccel_kernels.", "transformers.cache_utils.")


def to_data(value: Any) -> tuple[Any, list[Tensor]]:
    """A value as JSON data, and the tensors in it in the order in which the data number them.

    Raises
    ------
    UnsupportedError
        If it holds something that is neither plain data, a tensor, nor an object of a cache.
    """
    writer = _Writer()
    return writer.data(value), writer.tensors


def content_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, in its own memory."""
    # a single number may have any stride, which view() refuses
    content: Any = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(content)


def from_data(data: Any, tensors: Sequence[Tensor]) -> Any:
    """The value of :func:`to_data`.

    Raises
    ------
    ValueError
        If the data are not what :func:`to_data` makes.
    """
    try:
        return _Reader(tensors).value(data)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"no data of a cache ({error})") from error


class _Writer:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._objects: dict[int, tuple[int, Any]] = {}

    def data(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return ["tensor", self._numbers[id(value)]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["named", _name(type(value)), [self.data(one) for one in value]]
        if isinstance(value, (list, tuple)):
            return ["list" if isinstance(value, list) else "tuple", [self.data(one) for one in value]]
        if isinstance(value, dict):
            return ["dict", [[self.data(key), self.data(one)] for key, one in value.items()]]
        if isinstance(value, (torch.dtype, torch.device)):
            return ["dtype" if isinstance(value, torch.dtype) else "device", str(value).removeprefix("torch.")]
        if isinstance(value, type):
            return ["class", _name(value)]
        if isinstance(value, weakref.ref):
            return ["weak", self.data(value())]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if id(value) in self._objects:
            return ["same", self._objects[id(value)][0]]
        number = len(self._objects)
        # the object itself, so that its id stays unique
        self._objects[id(value)] = number, value
        attributes = {name: self.data(one) for name, one in vars(value).items()} if hasattr(value, "__dict__") else None
        if attributes is None:
            raise UnsupportedError(f"A cache that holds a {type(value).__name__} cannot be saved; save it without.")
        return ["object", number, _name(type(value)), attributes]


class _Reader:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._objects: dict[int, Any] = {}

    def value(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        tag, *rest = data
        match tag, rest:
            case "tensor", [number]:
                return self.tensors[number]
            case "named", [name, values]:
                return _class(name)(*map(self.value, values))
            case "list", [values]:
                return [self.value(one) for one in values]
            case "tuple", [values]:
                return tuple(self.value(one) for one in values)
            case "dict", [pairs]:
                return {self.value(key): self.value(one) for key, one in pairs}
            case "dtype", [name] if isinstance(found := getattr(torch, name), torch.dtype):
                return found
            case "device", [name]:
                return torch.device(name)
            case "class", [name]:
                return _class(name)
            case "weak", [target]:
                found = self.value(target)
                return weakref.ref(_Gone() if found is None else found)
            case "same", [number]:
                return self._objects[number]
            case "object", [number, name, attributes]:
                made: Any = object.__new__(_class(name))
                self._objects[number] = made
                made.__dict__.update({key: self.value(one) for key, one in attributes.items()})
                return made
        raise ValueError(f"no data of a cache ({tag!r})")


class _Gone:
    """Target of a weak reference to an object that is gone."""


def _name(cls: type) -> str:
    """The name of a class; raises UnsupportedError if it belongs to no package of a cache."""
    if not f"{cls.__module__}.".startswith(_PACKAGES) or "<" in cls.__qualname__:
        raise UnsupportedError(f"A cache that holds a {cls.__module__}.{cls.__qualname__} cannot be saved.")
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    if not f"{module}.".startswith(_PACKAGES):
        raise ValueError(f"{name} is no class of a cache")
    # whoever continues a cache has imported them
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{name} is no class of a cache")
    return found
