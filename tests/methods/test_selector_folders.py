"""Selector folders of strangers: every damaged or hostile one is refused in a sentence before anything is built from it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import random_selectors
import torch
import zoo
from safetensors.torch import load, save

from mmaccel import Learned, MmaccelError, Recipe, UnsupportedError, accelerate_vlm, accelerated, get_recipe
from mmaccel.families import family_of
from mmaccel.method.selector import CONFIG, WEIGHTS, ModelFingerprint, Selector, Shape, described

Change = Callable[[Path], object]
#: JSON values of every wrong kind; ... removes the field
VALUES = (..., None, "24", "", [], [1], {}, -1, 0, 1_000_000, 10**25, 1.5, float("nan"), float("inf"), True, False)


@pytest.fixture(scope="module")
def model() -> Any:
    return zoo.model("llava").eval()


@pytest.fixture(scope="module")
def good(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    fingerprint = ModelFingerprint.of(family_of(model))
    random_selectors.network(fingerprint.width, residual=True).save(folder, fingerprint, {"target": "answers"})
    return folder


def fields(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all fields of nested objects, and of the first element of a list."""
    inner = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from fields(value, (*at, key))


def of_config() -> Iterator[tuple[str, Change]]:
    """Every field of the configuration with every value."""
    fingerprint = {"family": "llava", "width": 64, "weights": {"": [0.0]}}
    shape = dict.fromkeys(("features", "width", "blocks", "heads", "question", "residual"))
    paths = list(fields({"shape": shape, "model": fingerprint, "record": {}}))
    for path in paths:
        for value in VALUES:

            def change(folder: Path, path: tuple[Any, ...] = path, value: Any = value) -> None:
                data = at = json.loads((folder / CONFIG).read_text())
                # the weights that are named are those of this model
                first = next(iter(data["model"]["weights"]))
                path = tuple(first if key == "" else key for key in path)
                for key in path[:-1]:
                    at = at[key]
                if value is ...:
                    del at[path[-1]]
                else:
                    at[path[-1]] = value
                (folder / CONFIG).write_text(json.dumps(data))

            yield f"{'.'.join(map(str, path))} {value!r}", change
    for name, most in (("width", 8192), ("blocks", 64), ("features", 65536), ("heads", 256)):
        yield f"largest {name}", edited("shape", **{name: most})
        yield f"too large {name}", edited("shape", **{name: most + 1})
    yield "largest of all", edited("shape", width=8192, blocks=64, heads=1)
    yield "unknown field of the shape", edited("shape", layers=2)
    yield "unknown field of the model", edited("model", path="/etc/passwd")
    yield "other width of the model", edited("model", width=65)
    yield "other family", edited("model", family="qwen2_vl")
    yield "strange family", edited("model", family="llava\n" * 10)
    yield "unknown weights", edited("model", weights={"nowhere.weight": [0.0] * 8})
    yield "other weights", edited("model", weights={"lm_head.weight": [9.0] * 8})
    yield "many weights", edited("model", weights={f"w{i}": [0.0] * 8 for i in range(300)})
    yield "no object", written(CONFIG, b"[]")
    yield "deep", written(CONFIG, b"[" * 100_000)
    yield "a long number", written(CONFIG, b'{"shape": ' + b"1" * 100_000 + b"}")
    yield "not UTF-8", written(CONFIG, b"\xff\xfe{}")
    yield "2 MiB of spaces", written(CONFIG, b" " * (2 << 20))


def of_files() -> Iterator[tuple[str, Change]]:
    """Both files: missing, empty, cut short, swapped, huge, and other things under their names."""
    for name in (CONFIG, WEIGHTS):
        yield f"{name} missing", lambda folder, name=name: (folder / name).unlink()
        for left in (0, 1, 7, 8, 9, 40, 0.5, 0.99, -1):
            yield f"{name} cut to {left}", lambda folder, name=name, left=left: cut(folder / name, left)
        yield f"{name} and more", lambda folder, name=name: (folder / name).open("ab").write(b"\0" * 99)
        yield f"{name} huge", lambda folder, name=name: os.truncate(folder / name, 1 << 40)
        yield f"{name} a folder", lambda folder, name=name: replaced(folder / name, Path.mkdir)
        yield f"{name} a pipe", lambda folder, name=name: replaced(folder / name, os.mkfifo)
        yield f"{name} a link", lambda folder, name=name: linked(folder / name)
        yield (
            f"{name} a link to nothing",
            lambda folder, name=name: replaced(folder / name, lambda path: path.symlink_to("nothing")),
        )
        yield (
            f"{name} a link to itself",
            lambda folder, name=name: replaced(folder / name, lambda path: path.symlink_to(path.name)),
        )
        yield (
            f"{name} an endless device",
            lambda folder, name=name: replaced(folder / name, lambda path: path.symlink_to("/dev/zero")),
        )
    yield "swapped", swapped


def of_weights() -> Iterator[tuple[str, Change]]:
    """Every tensor with another content, dtype or shape, and headers that lie."""
    with torch.device("meta"):
        names = list(Selector(Shape(64, 16, residual=True)).state_dict())
    for name in names:
        yield f"{name} NaN", tensors(lambda w, n=name: w[n].view(-1)[-1:].fill_(torch.nan))
        yield f"{name} infinite", tensors(lambda w, n=name: w[n].view(-1)[:1].fill_(-torch.inf))
        yield f"{name} missing", tensors(lambda w, n=name: w.pop(n))
        yield f"{name} renamed", tensors(lambda w, n=name: w.update({f"{n}s": w.pop(n)}))
        yield f"{name} longer", tensors(lambda w, n=name: w.update({n: torch.cat([w[n], w[n][:1]])}))
        yield f"{name} with a dimension more", tensors(lambda w, n=name: w.update({n: w[n][None]}))
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool):
        yield f"{dtype}", tensors(lambda w, d=dtype: w.update({n: x.to(d) for n, x in w.items()}))
        yield f"score {dtype}", tensors(lambda w, d=dtype: w.update({"score.weight": w["score.weight"].to(d)}))
    yield "huge values", tensors(lambda w: w["score.weight"].fill_(3e38))
    yield "one more", tensors(lambda w: w.update({"extra": torch.zeros(1)}))
    yield "none", tensors(lambda w: w.clear())
    for length in (0, 1, 2**20, 2**40, 2**63, 2**64 - 1):
        yield f"header of {length}", lambda folder, length=length: header(folder, lambda old: old, length)
    yield "a header of 90 MB", written(WEIGHTS, struct.pack("<Q", 90 << 20) + b'{"a":' + b"[" * (90 << 20))
    yield "no object", lambda folder: header(folder, lambda old: [old])
    yield "no header", lambda folder: header(folder, lambda old: None)
    yield "offsets that overlap", lambda folder: header(folder, lambda old: same_place(old))
    yield "offsets beyond", lambda folder: header(folder, lambda old: moved(old, 10**15))
    yield "offsets below", lambda folder: header(folder, lambda old: moved(old, -8))
    yield (
        "shape of strings",
        lambda folder: header(folder, lambda old: {n: {**x, "shape": ["1"]} for n, x in old.items()}),
    )
    yield "a tensor that is a word", lambda folder: header(folder, lambda old: {**old, "score.weight": "zeros"})
    yield "metadata", lambda folder: header(folder, lambda old: {"__metadata__": {"a": "b" * 999}, **old})
    yield "much metadata", lambda folder: header(folder, lambda old: {"__metadata__": {"a": "b" * 999_999}, **old})
    yield "metadata of lists", lambda folder: header(folder, lambda old: {"__metadata__": [1], **old})


def edited(part: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        data = json.loads((folder / CONFIG).read_text())
        data[part].update(values)
        (folder / CONFIG).write_text(json.dumps(data))

    return change


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def cut(path: Path, left: float) -> None:
    size = path.stat().st_size
    os.truncate(path, int(size * left) if 0 < left < 1 else left if left >= 0 else size + int(left))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def swapped(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "x")
    (folder / WEIGHTS).rename(folder / CONFIG)
    (folder / "x").rename(folder / WEIGHTS)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        weights = load((folder / WEIGHTS).read_bytes())
        change(weights)
        (folder / WEIGHTS).write_bytes(save(weights))

    return apply


def header(folder: Path, change: Callable[[Any], Any], length: int | None = None) -> None:
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    new = json.dumps(change(json.loads(content[8:end]))).encode()
    head = struct.pack("<Q", len(new) if length is None else length)
    (folder / WEIGHTS).write_bytes(head + new + content[end:])


def same_place(old: Any) -> Any:
    return {name: {**about, "data_offsets": [0, 4]} for name, about in old.items()}


def moved(old: Any, by: int) -> Any:
    return {name: {**about, "data_offsets": [x + by for x in about["data_offsets"]]} for name, about in old.items()}


def used(model: Any, folder: Path) -> int:
    """Tokens that the selector keeps of 36."""
    with accelerated(model, Learned(folder), retain=0.25), torch.inference_mode():
        logits = model(**zoo.inputs("llava", "image")).logits
        assert not logits[0, -1].isnan().any()
        return int((model.mmaccel.reduction.kept & model.mmaccel.layout.visual).sum())


@pytest.mark.parametrize("kind", [of_config, of_files, of_weights])
def test_a_damaged_folder_is_refused_in_a_sentence(kind, model, good, tmp_path):
    """Or it is as good as it was, and works. Neither takes more than two seconds."""
    right, accepted, wrong = used(model, good), [], []
    for number, (what, change) in enumerate(kind()):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        change(folder)
        began = time.monotonic()
        try:
            kept = used(model, folder)
            accepted.append(what)
            if kept != right:
                wrong.append((what, f"{kept} tokens"))
        except MmaccelError as error:
            said = str(error)
            if "\n" in said or not said.endswith(".") or len(said) > 500 or str(folder) not in said:
                wrong.append((what, said))
        except Exception as error:
            wrong.append((what, repr(error)))
        if (took := time.monotonic() - began) > 2:
            wrong.append((what, f"{took:.1f} s"))
        shutil.rmtree(folder)
    assert not wrong, "\n".join(map(str, wrong))
    # what says nothing about the network or its model
    harmless = (
        "record {}",
        "selector.json cut to -1",
        "model.weights. Ellipsis",
        "model.weights..0 0",
        "selector.json a link",
        "selector.safetensors a link",
        "metadata",
    )
    assert all(what.startswith(harmless) or "True" in what for what in accepted), accepted


def test_many_variants_are_tried():
    names = [what for kind in (of_config, of_files, of_weights) for what, _ in kind()]
    assert len(names) > 400 and len({*names}) > 390


def test_a_selector_must_know_its_model(model, good, tmp_path):
    """Of a model with weights at least one must be compared; without any the configuration counts."""
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    edited("model", weights={"model.nowhere.weight": [0.5] * 8})(folder)
    with pytest.raises(UnsupportedError, match="is known by weights that this one does not have"):
        accelerate_vlm(model, Learned(folder))
    edited("model", weights={})(folder)
    with pytest.raises(MmaccelError, match=r"`model.weights` must hold the first values of 1 to 256 tensors"):
        accelerate_vlm(model, Learned(folder))


def test_a_recipe_file_may_name_a_damaged_selector(good, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    chosen = get_recipe(folder).to_json()
    edited("shape", blocks=1_000_000)(folder)
    with pytest.raises(
        MmaccelError, match=r"`blocks` of a selector must be an integer from 1 to 64, got 1000000; give"
    ):
        accelerate_vlm(zoo.model("llava"), json.loads(chosen))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path.name), "Cannot read the recipe"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "larger than 4 MiB"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "Cannot read the recipe"),
        (lambda path: path.touch(), "The recipe is not valid JSON"),
        (lambda path: None, "Cannot read the recipe"),
    ],
)
def test_a_recipe_file_that_is_none_is_refused(make, said, tmp_path):
    path = tmp_path / "recipe.json"
    make(path)
    with pytest.raises(MmaccelError, match=said):
        get_recipe(path)


def test_recipe_files_of_strangers_are_refused_or_work():
    """Every field and option with a value of every wrong kind."""
    tried = 0
    for chosen in (
        get_recipe(["divprune", "snapkv", "kivi"], retain=0.5),
        get_recipe("pyramiddrop"),
        get_recipe("learned"),
    ):
        data = json.loads(chosen.to_json())
        for path in [*fields(data), *(("stages", 0, "options", name) for name in ("selector", "window", "nothing"))]:
            for value in VALUES:
                changed = at = json.loads(json.dumps(data))
                for key in path[:-1]:
                    at = at[key]
                if value is ...:
                    at.pop(path[-1], None) if isinstance(at, dict) else at.pop(path[-1])
                else:
                    at[path[-1]] = value
                tried += 1
                try:
                    Recipe.from_json(json.dumps(changed))
                except MmaccelError as error:
                    assert "\n" not in str(error)
    assert tried > 500


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": 30}, "`width` of a selector must be a multiple of `heads`, got 30 and 4"),
        ({"heads": -1}, "`heads` of a selector must be an integer from 1 to 256, got -1"),
        ({"blocks": True}, "`blocks` of a selector must be an integer from 1 to 64, got True"),
        ({"question": 1}, "`question` of a selector must be true or false, got 1"),
        ({"width": 8192, "blocks": 8}, "may have 67,108,864 parameters, and this shape has 6,577,717,248"),
    ],
)
def test_a_shape_is_checked_when_it_is_made(given, said):
    with pytest.raises(MmaccelError, match=said):
        Shape(64, **given)


def test_a_written_folder_is_whole(good, tmp_path, monkeypatch):
    """A disk that fills up leaves the files that were there."""
    folder = tmp_path / "mine"
    shutil.copytree(good, folder)
    before = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        random_selectors.network(64, seed=1).save(folder, described(folder)[1], {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
