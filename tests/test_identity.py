"""Identities by content: what must change a digest, and what must not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from mmaccel.media.files import Clip, Prompt
from mmaccel.method import registry
from mmaccel.programs import identity
from mmaccel.programs.evaluate import Question, ask_folder, ask_samples, ask_suite
from mmaccel.programs.identity import (
    class_identity,
    code_identity,
    digest,
    model_identity,
    path_identity,
    question_identity,
    recipe_identity,
    recipe_parts,
)
from mmaccel.programs.video_qa.questions import VideoQuestion
from mmaccel.recipe import Recipe, Stage, get_recipe
from mmaccel.suite import Sample

METHOD = """
from dataclasses import dataclass
from mmaccel.core.reduction import Reduction
from mmaccel.method import ProjectorMethod
from mmaccel.method.registry import register
{imports}
@register
@dataclass(frozen=True)
class Mine(ProjectorMethod):
    name = "mine-{name}"
    summary = "a method of the user's"
    share: float = {default}
    def reduce(self, tokens, count):
        return Reduction.top({score}, tokens.valid, count)
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Writes a module of the user's, imports it anew and returns the digest of its recipe."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(registry.methods())
    names = []

    def write(
        name: str, imports: str = "", score: str = "tokens.valid.float()", default: str = "0.5", **others: str
    ) -> str:
        for other, text in others.items():
            (tmp_path / f"{other}.py").write_text(text)
        (tmp_path / f"{name}.py").write_text(METHOD.format(imports=imports, name=name, score=score, default=default))
        for module in (name, *others):
            sys.modules.pop(module, None)
            names.append(module)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, old = True, sys.dont_write_bytecode
        try:
            # the last first, as Python itself follows no long chain of imports
            for module in (*reversed(others), name):
                importlib.import_module(module)
        finally:
            sys.dont_write_bytecode = old
        return recipe_identity(get_recipe(f"mine-{name}", retain=0.5))

    yield write
    for module in names:
        sys.modules.pop(module, None)
    registry._methods.clear()
    registry._methods.update(before)


# ------------------------------------------------------------------------------------------------------------- recipes
def test_the_type_of_every_value_counts():
    one, whole = get_recipe("divprune", retain=1), get_recipe("divprune", retain=1.0)
    assert one == whole  # to Python they are equal
    assert recipe_identity(one) != recipe_identity(whole)
    assert recipe_identity(one) == recipe_identity(get_recipe("divprune", retain=1))
    assert len({digest(value) for value in (1, 1.0, True, "1", b"1", [1], {1}, {1: 1}, None)}) == 9
    assert digest((1, 2)) == digest([1, 2]) and digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(torch.float16) != digest(torch.float32) and digest(0.0) != digest(-0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"positions": "paper"},
        {"variant": "official"},
        {"proportional": "all"},
        {"chunk": 8},
        {"frames_at_once": 8},
        {"name": "n"},
        {"summary": "s"},
    ],
)
def test_every_field_of_a_recipe_counts(change):
    base = get_recipe("divprune", retain=0.5)
    assert recipe_identity(replace(base, **change)) != recipe_identity(base)


def test_an_option_at_its_default_is_the_recipe_without_it_only_in_what_it_does():
    base = get_recipe("fastv", retain=0.5)
    assert recipe_identity(base.override(layer=3)) != recipe_identity(base)


# ---------------------------------------------------------------------------------------------------------------- code
def test_code_of_a_method_counts(user):
    first = user("mine_a")
    assert user("mine_a") == first
    assert user("mine_a", score="-tokens.valid.float()") != first
    assert user("mine_a", default="0.25") != first
    assert user("mine_a") == first


def test_code_that_a_method_calls_elsewhere_counts(user):
    """A helper of the user's, imported as a function, as a module, and through another module."""
    for number, (imports, score) in enumerate(
        [
            ("from helper import f", "f(tokens)"),
            ("import helper", "helper.f(tokens)"),
            ("from between import g", "g(tokens)"),
        ]
    ):
        between = "import helper\ndef g(t):\n    return helper.f(t)\n"
        name = f"mine_b{number}"

        def write(sign: str, name=name, imports=imports, score=score, between=between) -> str:
            text = f"def f(t):\n    return {sign}t.valid.float()\n"
            return user(name, imports, score, helper=text, between=between)

        first = write("")
        assert write("") == first
        assert write("-") != first, imports


def test_long_chains_of_modules_are_followed_to_the_end(user):
    """A package of a thousand modules, each of which uses the next."""
    chain = {f"chain{i}": f"import chain{i + 1}\n" for i in range(999)}

    def write(last: str) -> str:
        return user("mine_c", "import chain0", **chain, chain999=last)

    first = write("SCALE = 1")
    assert write("SCALE = 1") == first
    assert write("SCALE = 2") != first


def test_code_without_a_file_counts():
    """As in a notebook: a class that ``exec`` made, with a function and a constant beside it."""
    before = dict(registry.methods())

    def made(
        score: str = "SCALE * f(tokens)", scale: str = "1.0", helper: str = "t.valid.float()", default="0.5"
    ) -> str:
        text = METHOD.format(imports="", name="exec", score=score, default=default)
        space = {"__name__": "__main__"}
        exec(f"SCALE = {scale}\ndef f(t):\n    return {helper}\n" + text, space)
        return recipe_identity(get_recipe("mine-exec", retain=0.5))

    try:
        first = made()
        assert made() == first
        others = [
            made(score="-SCALE * f(tokens)"),
            made(scale="-1.0"),
            made(helper="-t.valid.float()"),
            made(default="1"),
        ]
        assert first not in others and len(set(others)) == 4
    finally:
        registry._methods.clear()
        registry._methods.update(before)


def test_a_method_that_was_patched_is_another(monkeypatch):
    cls = registry.get_method("divprune")
    first = class_identity(cls)
    monkeypatch.setattr(cls, "reduce", lambda self, tokens, count: None)
    assert class_identity(cls) != first
    monkeypatch.undo()
    assert class_identity(cls) == first


def test_identities_are_the_same_in_every_process(tmp_path):
    """Also of sets, whose order follows the seed of the process, and of objects, whose addresses differ."""
    program = tmp_path / "program.py"
    program.write_text(
        METHOD.format(
            imports="class Thing:\n    pass\nTHING = Thing()\nKNOWN = {'alpha', 'beta', 'gamma'}\n",
            name="seeded",
            score="tokens.valid.float() if tokens in {'a', 'b', 'c'} else THING",
            default="0.5",
        )
        + "from mmaccel.programs.identity import recipe_identity\nfrom mmaccel.recipe import get_recipe\n"
        + "print(recipe_identity(get_recipe('mine-seeded', retain=0.5)), recipe_identity(get_recipe('balanced')))"
    )
    told = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        made = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
        told.add(made.stdout)
    assert len(told) == 1


def test_mmaccels_own_code_counts(tmp_path, monkeypatch):
    """Kernels too; the command line does not."""
    import mmaccel_kernels

    first = code_identity()
    for package in (identity._PACKAGE, Path(mmaccel_kernels.__file__).parent):
        read = Path.read_bytes

        def changed(path: Path, read=read, package=package) -> bytes:
            return read(path) + b"#" * (path == package / "__init__.py")

        monkeypatch.setattr(Path, "read_bytes", changed)
        identity.code_identity.cache_clear()
        assert code_identity() != first
        monkeypatch.undo()
        identity.code_identity.cache_clear()
    assert code_identity() == first


def test_files_that_a_method_loads_count(tmp_path):
    """One that is named, and one beside the model's weights."""
    for folder in (tmp_path / "named", tmp_path / "model" / "selector"):
        folder.mkdir(parents=True)
        (folder / "selector.json").write_text(json.dumps({"shape": {"features": 8}, "model": {}}))
        (folder / "selector.safetensors").write_bytes(b"weights")
    stage = Recipe("r", (Stage("cdpruner", 0.5, {"clip": str(tmp_path / "named")}),))
    first = recipe_identity(stage)
    beside = get_recipe("learned", retain=0.5)
    second = recipe_identity(beside, tmp_path / "model")
    assert recipe_identity(beside) != second
    (tmp_path / "named" / "selector.safetensors").write_bytes(b"Weights")
    (tmp_path / "model" / "selector" / "selector.safetensors").write_bytes(b"Weights")
    assert recipe_identity(stage) != first and recipe_identity(beside, tmp_path / "model") != second
    assert set(recipe_parts(stage)) == {"recipe", "code of cdpruner", "files of cdpruner"}


def test_a_loaded_model_in_a_recipe_counts_by_its_weights():
    draft = zoo.model("llava")
    mine = Recipe("r", (Stage("specprefill", 0.5, {"draft": draft}),))
    first = recipe_identity(mine)
    assert recipe_identity(mine) == first
    weight = next(draft.parameters())
    with torch.no_grad():
        weight += 1
    try:
        assert recipe_identity(mine) != first
    finally:
        with torch.no_grad():
            weight -= 1


# ----------------------------------------------------------------------------------------------------------- questions
def test_question_text_and_bytes_of_pictures_count(tmp_path):
    zoo.image(40, 30, 1).save(tmp_path / "a.png")
    base = Sample("what is it ?", "cat", (tmp_path / "a.png",), task="t", name="one")

    def of(**changes: object) -> str:
        (question,) = ask_samples([replace(base, **changes)])
        return question_identity(question)

    first = of()
    assert of() == first
    changes = [
        {"question": "what is it?"},
        {"answer": "dog"},
        {"answer": None},
        {"task": "u"},
        {"earlier": (("a", "b"),)},
    ]
    others = [of(**change) for change in changes]
    assert first not in others and len(set(others)) == len(others)
    state = (tmp_path / "a.png").stat()
    picture = bytearray((tmp_path / "a.png").read_bytes())
    picture[-20] ^= 1
    (tmp_path / "a.png").write_bytes(picture)
    # as large and as old as before
    os.utime(tmp_path / "a.png", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert of() != first
    (tmp_path / "a.png").unlink()
    assert of() != first


def test_frames_of_a_clip_count(tmp_path):
    (tmp_path / "clip").mkdir()
    for number in range(2):
        zoo.image(20, 20, number).save(tmp_path / "clip" / f"{number}.png")

    def of(frames: int = 4) -> str:
        (question,) = ask_folder(tmp_path, "what ?", frames=frames)
        return question_identity(question)

    first = of()
    assert of() == first and of(8) != first
    zoo.image(20, 20, 7).save(tmp_path / "clip" / "1.png")
    assert of() != first


def test_pixels_in_memory_count():
    def of(picture: Image.Image, text: str = "what ?") -> str:
        return question_identity(Question("q", "t", None, lambda: Prompt(text, (picture,))))

    first = of(zoo.image(20, 20, 1))
    assert of(zoo.image(20, 20, 1)) == first
    assert of(zoo.image(20, 20, 2)) != first and of(zoo.image(20, 20, 1), "why ?") != first
    assert of(zoo.image(20, 20, 1).convert("L").convert("RGB")) != first

    def clip(frames: np.ndarray, fps: float = 2.0) -> str:
        return question_identity(Question("q", "t", None, lambda: Prompt("what ?", clip=Clip(frames, [0, 1], 2, fps))))

    frames = np.zeros((2, 4, 4, 3), np.uint8)
    changed = frames.copy()
    changed[1, 3, 3, 2] = 1
    assert clip(frames) == clip(frames.copy()) and clip(changed) != clip(frames) != clip(frames, 4.0)
    one, two = (ask_suite(["count"], 2, pixels=pixels)[0] for pixels in (56, 112))
    assert question_identity(one) != question_identity(two)


def test_questions_about_videos(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"0" * 100)
    base = VideoQuestion("id", "a.mp4", str(tmp_path / "a.mp4"), "what ?", ("a", "b"), "a")
    first = question_identity(base)
    assert question_identity(replace(base, name="other", video="elsewhere/a.mp4")) == first
    for change in ({"question": "why ?"}, {"choices": ("b", "a")}, {"answer": "b"}, {"path": "missing.mp4"}):
        assert question_identity(replace(base, **change)) != first
    (tmp_path / "a.mp4").write_bytes(b"0" * 99 + b"1")
    assert question_identity(base) != first


def test_large_files_count_by_size_time_and_ends_or_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_WHOLE", 64)
    monkeypatch.setattr(identity, "_END", 16)
    path = tmp_path / "long.mp4"
    path.write_bytes(b"0" * 100)
    state = path.stat()
    first, whole = path_identity(path, hash_large=False), path_identity(path)
    path.write_bytes(b"0" * 50 + b"1" + b"0" * 49)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path_identity(path, hash_large=False) == first and path_identity(path) != whole
    os.utime(path, ns=(0, 0))
    assert path_identity(path, hash_large=False) != first


# -------------------------------------------------------------------------------------------------------------- models
def test_one_weight_anywhere_makes_another_model():
    model = zoo.model("llava")
    first = model_identity(model)
    assert model_identity(model) == first
    weight = model.model.language_model.layers[1].mlp.up_proj.weight
    for change in (torch.neg, lambda x: x * (1 + 1e-6), torch.flip):
        old = weight.detach().clone()
        with torch.no_grad():
            weight[3] = change(weight[3], [0]) if change is torch.flip else change(weight[3])
        try:
            assert model_identity(model) != first
        finally:
            with torch.no_grad():
                weight.copy_(old)
    with torch.no_grad():
        weight[2, 5] = -weight[2, 5]
        assert model_identity(model) != first
        weight[2, 5] = -weight[2, 5]
    assert model_identity(model) == first
    assert model_identity(model, zoo.processor("llava")) != first


def test_a_call_of_the_tokenizer_makes_no_other_model():
    model, processor = zoo.model("llava"), zoo.processor("llava")
    processor.tokenizer("one")
    first = model_identity(model, processor)
    processor.tokenizer(["one", "one and more"], padding=True, truncation=True, max_length=2)
    assert processor.tokenizer.backend_tokenizer.padding is not None
    assert model_identity(model, processor) == first
    processor.tokenizer("one")
    assert model_identity(model, processor) == first
    assert model_identity(model, zoo.processor("qwen2_5_vl")) != first


def test_a_folder_is_known_by_its_bytes(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = model_identity(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert model_identity(tmp_path) != first
