"""Files of compressed caches: what a prompt has left in the KV cache is kept on disk, and continued in another process.

>>> from mmaccel import load_cache, save_cache
>>> model = accelerate_vlm(model, "divprune", retain=0.25)
>>> first = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
>>> save_cache(first.past_key_values, folder / "picture.safetensors", model)
>>> cache = load_cache(folder / "picture.safetensors", model)
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..accelerate import Accelerator
from ..accelerate.positions import has_axes
from ..core.files import write_whole, writing
from ..core.transformers_api import Cache, DynamicCache
from ..errors import MmaccelError, UnsupportedError
from ..kv.cache import CacheState, cache_with, check_plain, state_of
from ..kv.serialise import content_of, from_data, to_data
from ..recipe import Recipe
from .identity import digest, model_identity, recipe_identity, versions

#: entry of the file's metadata with the fingerprint and the structure, and the tensor with the checksum of everything before it
_ENTRY, _CHECKSUM = "mmaccel_cache", "sha256"
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_PIECE = 8 << 20


def save_cache(cache: Any, file: str | os.PathLike[str], model: Any) -> None:
    """Write a KV cache to a safetensors file, as it is stored: evicted, packed, with different lengths in every head.

    The file is written atomically: what stood there before is left as it was if the disk is full or the process is killed.

    Parameters
    ----------
    cache : ``past_key_values`` of a call of ``model``. It stays as it is.
    file : the path, by custom ``NAME.safetensors``.
    model : the model that filled the cache, accelerated with the recipe that it is to be continued with.

    Raises
    ------
    MmaccelError
        If the cache is empty or the file cannot be written.
    UnsupportedError
        If the cache is static, quantised by transformers or offloaded, or the bare cache of a model with M-RoPE, which keeps
        positions outside of it.

    Examples
    --------
    >>> model = accelerate_vlm(model, "divprune", retain=0.25)
    >>> first = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    >>> save_cache(first.past_key_values, folder / "picture.safetensors", model)
    """
    if not isinstance(cache, Cache):
        raise MmaccelError(f"`cache` must be a KV cache of transformers, got {type(cache).__name__}.")
    if cache.get_seq_length() == 0:
        raise MmaccelError("This cache is empty; save it behind a prompt.")
    state = state_of(cache)
    if state is None:
        check_plain(cache)
        if has_axes(model):
            raise UnsupportedError(
                "The bare model keeps M-RoPE positions outside of its cache, which cannot be saved then; accelerate the model "
                "with a recipe such as 'balanced', and compute the cache again."
            )
    elif state.shared.host is not None:
        raise UnsupportedError("A cache in host memory cannot be saved; leave out offload='host'.")
    else:
        state.unpin()
    write_value(Path(file), list(cache.layers) if state is None else state, _fingerprint(model))


def load_cache(file: str | os.PathLike[str], model: Any) -> Any:
    """The KV cache in a file of :func:`save_cache`. Its tensors are mapped from the file, which must not be changed meanwhile;
    on a GPU they are copied there.

    Parameters
    ----------
    file : the path.
    model : the model that the cache was saved with, accelerated with the same recipe.

    Returns
    -------
    A ``DynamicCache`` to pass as ``past_key_values`` to ``model`` or ``model.generate``, together with the token ids of the
    whole conversation and the pixels of new pictures only.

    Raises
    ------
    MmaccelError
        If the file is missing, incomplete, changed, or no saved cache, or belongs to another model, recipe or version.

    Examples
    --------
    >>> model = accelerate_vlm(model, "divprune", retain=0.25)
    >>> first = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    >>> save_cache(first.past_key_values, folder / "picture.safetensors", model)
    >>> cache = load_cache(folder / "picture.safetensors", model)
    >>> cache.get_seq_length() == first.past_key_values.get_seq_length()
    True
    """
    loaded = read_value(Path(file), model, _fingerprint(model))
    if isinstance(loaded, CacheState):
        return cache_with(loaded)
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = loaded
    return cache


def write_value(path: Path, value: Any, fingerprint: dict[str, Any]) -> None:
    """Write plain data, tensors, and objects of a cache to a file, for :func:`read_value` with the same fingerprint. Raises
    MmaccelError if it cannot be written."""
    data, tensors = to_data(value)
    if unknown := {x.dtype for x in tensors} - set(_DTYPES):
        raise UnsupportedError(f"Tensors of {', '.join(map(str, unknown))} cannot be saved.")
    devices = [str(x.device) for x in tensors]
    entry = {"fingerprint": fingerprint, "cache": data, "devices": devices}
    with writing(path, "give another file, or make room"):
        write_whole(path, lambda out: _write(out, json.dumps(entry), tensors))


def read_value(path: Path, model: Any, fingerprint: dict[str, Any]) -> Any:
    """The value in a file of :func:`write_value`, on the devices of ``model``. Raises MmaccelError if it is missing or
    broken, or has another fingerprint."""
    try:
        with safe_open(path, "pt") as opened:
            entry = (opened.metadata() or {}).get(_ENTRY)
        if entry is None:
            raise MmaccelError(f"{str(path)!r} holds no cache of mmaccel; give a file of save_cache().")
        with path.open("rb") as reading:
            # changes stay in memory
            content = mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MmaccelError(f"Cannot read a cache from {str(path)!r} ({reason}); save it again.") from error
    broken = MmaccelError(f"{str(path)!r} was changed after it was saved; save the cache again.")
    try:
        about = json.loads(entry)
        _check_same(path, about["fingerprint"], fingerprint)
        tensors = _mapped(content, len(about["devices"]))
        tensors = [x.to(_device(name, model)) for x, name in zip(tensors, about["devices"], strict=True)]
        return from_data(about["cache"], tensors)
    except MmaccelError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise broken from error


def fingerprint_of(model: Any, recipe: Recipe | None, *more: Any, processor: Any = None) -> dict[str, Any]:
    """The model, recipe and versions that a cache depends on; ``more`` counts with the recipe, None for the bare model."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if recipe is None:
        name, identity = "none", digest("bare")
    else:
        folder = getattr(model, "name_or_path", "") or None
        name, identity = recipe.name, digest((recipe_identity(recipe, folder), *more))
    return {"model": model_identity(model, processor), "recipe": identity, "name": name, "versions": versions()}


def _fingerprint(model: Any) -> dict[str, Any]:
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    handle = Accelerator.on(model)
    return (
        fingerprint_of(model, None) if handle is None else fingerprint_of(model, handle.recipe, handle.drafts.lossless)
    )


def _check_same(path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise MmaccelError unless the two fingerprints agree."""
    if saved["model"] != mine["model"]:
        raise MmaccelError(
            f"{str(path)!r} holds the cache of another model; load it with the model that it was saved with."
        )
    if saved["recipe"] != mine["recipe"]:
        other = " with other options" if saved["name"] == mine["name"] else f", not {mine['name']!r}"
        raise MmaccelError(
            f"{str(path)!r} was saved with recipe {saved['name']!r}{other}; use that recipe, or compute the cache "
            "again."
        )
    for name, version in saved["versions"].items():
        if mine["versions"].get(name) != version:
            label = "code of mmaccel" if name == "code" else name
            raise MmaccelError(
                f"{str(path)!r} was saved with {label} {version}, not {mine['versions'].get(name)}; compute the cache again."
            )


def _device(name: str, model: Any) -> torch.device:
    """The device of a tensor that was on device ``name``: those on the CPU stay there, others go where the model is."""
    if name == "cpu":
        return torch.device(name)
    places = {str(weight.device) for weight in model.parameters()}
    return torch.device(name) if name in places else model.device


def _write(out: BinaryIO, entry: str, tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file; the last tensor is the checksum of all before it."""
    tensors, end = list(tensors), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _ENTRY: entry}}
    # wide types first, so that each begins at a multiple of its size
    order = sorted(range(len(tensors)), key=lambda n: (-tensors[n].element_size(), n))
    for number in order:
        x, begin = tensors[number], end
        end += x.numel() * x.element_size()
        header[f"{number:06}"] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    header[_CHECKSUM] = {"dtype": "U8", "shape": [32], "data_offsets": [end, end + 32]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    checksum = hashlib.sha256()
    whole = (tensors[number].detach().cpu().contiguous() for number in order)
    for piece in (memoryview(struct.pack("<Q", len(words)) + words), *map(content_of, whole)):
        checksum.update(piece)
        out.write(piece)
    out.write(checksum.digest())


def _mapped(content: mmap.mmap, count: int) -> list[Tensor]:
    """The tensors of a file in the order of their numbers, each a storage of its own over the mapped file. Raises ValueError if
    the checksum differs."""
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:begin])
    checksum, view = hashlib.sha256(), memoryview(content)
    for start in range(0, len(content) - 32, _PIECE):
        checksum.update(view[start : min(start + _PIECE, len(content) - 32)])
    if content[-32:] != checksum.digest():
        raise ValueError("the checksum differs")
    tensors = []
    for number in range(count):
        about = header[f"{number:06}"]
        start, stop = about["data_offsets"]
        dtype = _BY_NAME[about["dtype"]]
        if start == stop:
            tensors.append(torch.empty(about["shape"], dtype=dtype))
            continue
        flat = torch.from_numpy(np.frombuffer(content, np.uint8, stop - start, begin + start))
        tensors.append(flat.view(dtype).view(about["shape"]))
    return tensors
