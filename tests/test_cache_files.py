"""Files of caches: what is refused, in one sentence, and that nothing is lost."""

from __future__ import annotations

import errno
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import save_file

from mmaccel import MmaccelError, accelerated, load_cache, save_cache
from mmaccel.core import files
from mmaccel.core.transformers_api import DynamicCache
from mmaccel.programs.cache_file import read_value, write_value

pytestmark = pytest.mark.usefixtures("no_gradients")
FAMILY = "llava"


def filled(model: Any) -> Any:
    return model(**zoo.inputs(FAMILY), use_cache=True).past_key_values


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file, model = tmp_path / "cache.safetensors", zoo.model(FAMILY)
    with accelerated(model, "divprune", retain=0.25):
        save_cache(filled(model), file, model)
    return file


def refused(file: Path, words: str, recipe: str = "divprune", retain: Any = 0.25, seed: int = 0) -> None:
    model = zoo.model(FAMILY, seed=seed)
    with accelerated(model, recipe, retain=retain), pytest.raises(MmaccelError, match=words) as caught:
        load_cache(file, model)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and file.name in sentence


def test_another_model_recipe_or_budget_is_refused(saved: Path) -> None:
    refused(saved, "of another model", seed=1)
    refused(saved, "recipe 'divprune', not 'fastv'", recipe="fastv")
    refused(saved, "recipe 'divprune' with other options", retain=0.5)
    # one token, and all of them
    refused(saved, "recipe 'divprune' with other options", retain=1)
    with pytest.raises(MmaccelError, match="recipe 'divprune', not 'none'"):
        load_cache(saved, zoo.model(FAMILY))


def test_one_changed_weight_is_another_model(saved: Path) -> None:
    model = zoo.model(FAMILY)
    with accelerated(model, "divprune", retain=0.25):
        load_cache(saved, model)
        weight = next(model.parameters()).data.view(-1)
        before = weight[0].clone()
        try:
            weight[0] += 1
            with pytest.raises(MmaccelError, match="another model"):
                load_cache(saved, model)
        finally:
            weight[0] = before


def cut(content: bytes) -> bytes:
    return content[:-100]


def flipped(content: bytes) -> bytes:
    middle = len(content) - 5000
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def reshaped(content: bytes) -> bytes:
    """With the axes of one tensor exchanged."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    tensor = next(x for x in header.values() if len(x.get("shape", ())) == 4)
    tensor["shape"] = tensor["shape"][::-1]
    words = json.dumps(header).encode().ljust(length)
    return content[:8] + words + content[8 + length :]


def named_otherwise(content: bytes) -> bytes:
    """With a class that no cache has."""
    return content.replace(b"mmaccel.kv.index:KeyIndex", b"subprocess:Popen_________")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, "Cannot read a cache"),
        (lambda content: b"", "Cannot read a cache"),
        (lambda content: b"no safetensors" * 100, "Cannot read a cache"),
        (flipped, "was changed after it was saved"),
        (reshaped, "was changed after it was saved"),
        (named_otherwise, "was changed after it was saved"),
    ],
)
def test_a_file_that_was_cut_or_changed_is_refused(saved: Path, change: Callable[[bytes], bytes], words: str) -> None:
    content = saved.read_bytes()
    assert change(content) != content
    saved.write_bytes(change(content))
    refused(saved, words)


def test_tensors_of_one_number_have_any_stride(tmp_path: Path) -> None:
    one, fingerprint = torch.arange(6).view(2, 3)[:1, 2:], {"model": "", "recipe": "", "name": "", "versions": {}}
    assert one.stride(-1) == 1 and one.T.contiguous().stride(-1) == 3, "which counts as contiguous"
    write_value(tmp_path / "a", [one.T, one], fingerprint)
    assert read_value(tmp_path / "a", None, fingerprint) == [torch.tensor([[2]])] * 2


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "weights.safetensors"
    save_file({"x": torch.zeros(3)}, foreign)
    refused(foreign, "holds no cache of mmaccel")
    refused(tmp_path / "missing.safetensors", "Cannot read a cache")
    refused(tmp_path, "Cannot read a cache")


def test_other_versions_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_file = sys.modules["mmaccel.programs.cache_file"]
    found = cache_file.versions()
    monkeypatch.setattr(cache_file, "versions", lambda: found | {"torch": "1.0"})
    refused(saved, f"saved with torch {found['torch']}, not 1.0".replace("+", r"\+"))


def test_a_full_disk_loses_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, content = zoo.model(FAMILY), saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with accelerated(model, "divprune", retain=0.25), pytest.raises(MmaccelError, match="No space left") as caught:
        save_cache(filled(model), saved, model)
    assert str(caught.value).endswith("make room.") and saved.read_bytes() == content
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_an_empty_cache_and_what_is_none_cannot_be_saved(tmp_path: Path) -> None:
    model = zoo.model(FAMILY)
    with pytest.raises(MmaccelError, match="empty"):
        save_cache(DynamicCache(), tmp_path / "x", model)
    with pytest.raises(MmaccelError, match="KV cache of transformers, got list"):
        save_cache([], tmp_path / "x", model)


def test_tensors_are_mapped_and_the_file_stays(saved: Path) -> None:
    """What is written to a loaded cache does not reach the file."""
    model, content = zoo.model(FAMILY), saved.read_bytes()
    with accelerated(model, "divprune", retain=0.25):
        cache = load_cache(saved, model)
        cache.mmaccel.layers[0].keys.zero_()
        assert saved.read_bytes() == content
        again = load_cache(saved, model)
    assert bool(again.mmaccel.layers[0].keys.any())


def test_a_cache_in_host_memory_is_neither_saved_nor_shared(tmp_path: Path) -> None:
    model, feed = zoo.model(FAMILY), zoo.inputs(FAMILY)
    with accelerated(model, "divprune", retain=0.25, offload="host"):
        cache = filled(model)
        with pytest.raises(MmaccelError, match="host memory cannot be saved; leave out"):
            save_cache(cache, tmp_path / "x", model)
        ids = torch.cat([feed["input_ids"], feed["input_ids"][:, -2:]], dim=1).expand(2, -1)
        with pytest.raises(MmaccelError, match="shared by the rows of a batch; leave out"):
            model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=1)
