"""Models for lmms-eval: what is registered, which arguments go where, and the recipe on lmms-eval's own wrappers.

The first part needs no lmms-eval: modules of its names and shapes stand in. The second runs the real wrappers, if installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import zoo

import mmaccel
from mmaccel.integrations import lmms_eval as plugin
from mmaccel.suite import export, make_item, write_video

ROOT = Path(__file__).parent.parent


@pytest.fixture
def stand_in(monkeypatch):
    """lmms-eval as far as the plug-in knows it: a manifest, and one wrapper that swallows errors as the real one does."""

    @dataclass(frozen=True)
    class ModelManifest:
        model_id: str
        simple_class_path: str | None = None
        chat_class_path: str | None = None
        aliases: tuple[str, ...] = ()

    class LlavaHf:
        is_simple = False
        loaded = 0

        def __init__(self, pretrained="a/model", device="cuda", batch_size=1, max_frames_num=32, **kwargs):
            assert kwargs == {}, f"Unexpected kwargs: {kwargs}"
            LlavaHf.loaded += 1
            self.given = (pretrained, device, batch_size, max_frames_num)
            self._model, self._image_processor = zoo.model("llava"), zoo.processor("llava")

        @property
        def model(self):
            return self._model

        def generate_until(self, requests):
            return [self.answer(text) for text in requests]

        def answer(self, question):
            feed = zoo.encode("llava", [([zoo.image(60, 48, 0)], [], question)], self._image_processor)
            self.seen = feed["pixel_values"]
            try:
                return self.model.generate(**feed, max_new_tokens=3, do_sample=False)[0, -3:].tolist()
            except Exception:
                return []

        def generate_until_multi_round(self, requests):
            raise mmaccel.MmaccelError("The picture 'gone.png' does not exist.")

        def loglikelihood(self, requests):
            raise NotImplementedError

    registry, wrapper = ModuleType("registry_v2"), ModuleType("llava_hf")
    registry.ModelManifest, wrapper.LlavaHf = ModelManifest, LlavaHf
    for name, module in (("models.registry_v2", registry), ("models.chat.llava_hf", wrapper)):
        for length in range(name.count(".") + 1):
            parent = ".".join(["lmms_eval", *name.split(".")[:length]])
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, f"lmms_eval.{name}", module)
    plugin._class.cache_clear()
    yield LlavaHf
    plugin._class.cache_clear()


@pytest.mark.full
def test_importing_mmaccel_and_the_plug_in_imports_no_lmms_eval():
    code = "import sys, mmaccel.integrations.lmms_eval; sys.exit('lmms_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_entry_point_names_the_manifests(stand_in):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lmms_eval.models"]["mmaccel"].partition(":")
    found = {manifest.model_id: manifest for manifest in getattr(sys.modules[module], name)()}
    assert list(found) == [
        "mmaccel_llava",
        "mmaccel_qwen2_vl",
        "mmaccel_qwen2_5_vl",
        "mmaccel_qwen3_vl",
        "mmaccel_internvl",
    ]
    assert found["mmaccel_qwen2_5_vl"].chat_class_path == f"{module}.Qwen25VLChat"
    assert found["mmaccel_qwen2_vl"].chat_class_path is None
    assert found["mmaccel_internvl"].simple_class_path is None
    assert "mmaccel_llava_onevision" in found["mmaccel_llava"].aliases
    paths = [path for one in found.values() for path in (one.simple_class_path, one.chat_class_path) if path]
    assert sorted(path.rpartition(".")[2] for path in paths) == sorted(plugin._CLASSES)


def test_a_class_is_the_wrapper_with_acceleration_before_it(stand_in):
    made = plugin.LlavaChat
    assert made is plugin.LlavaChat
    assert issubclass(made, stand_in) and not made.is_simple
    assert (made.__module__, made.__name__) == (plugin.__name__, "LlavaChat")
    with pytest.raises(AttributeError, match="no attribute 'GptChat'"):
        plugin.GptChat  # noqa: B018


def test_arguments_go_to_the_wrapper_and_to_the_recipe(stand_in):
    made = plugin.LlavaChat(
        "some/model", device="cpu", batch_size="1", recipe="fastv", retain=0.25, layer=2, positions="keep"
    )
    assert made.given == ("some/model", "cpu", "1", 32)
    (stage,) = made.model.mmaccel.recipe.stages
    assert (stage.method, stage.retain, stage.options["layer"]) == ("fastv", 0.25, 2)
    assert plugin.LlavaChat(device="cpu").model.mmaccel.recipe == mmaccel.get_recipe("balanced")


def test_answers_are_those_of_the_recipe_on_the_same_model(stand_in):
    questions = ["what is it?", "and where?"]
    fast = plugin.LlavaChat(recipe="divprune", retain=0.25)
    said = fast.generate_until(questions)
    assert fast.model.mmaccel.stats()["visual_tokens_kept"] == 9
    bare = stand_in()
    assert bare.generate_until(questions) != said
    mmaccel.accelerate_vlm(bare.model, "divprune", retain=0.25)
    assert bare.generate_until(questions) == said


def test_recipes_on_pixels_reach_the_processor(stand_in):
    fast = plugin.LlavaChat(recipe="resize", retain=0.25)
    assert fast._image_processor.mmaccel_recipe == fast.model.mmaccel.recipe
    bare = stand_in()
    for wrapper in (fast, bare):
        wrapper.generate_until(["what is it?"])
    assert fast.seen.shape == bare.seen.shape and not torch.equal(fast.seen, bare.seen)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "divprun"}, "There is no recipe 'divprun'; did you mean 'divprune'"),
        ({"recipe": 5}, "5 is not a recipe"),
        ({"retain": 0}, "retain=0 keeps no token"),
        ({"retain": "abc"}, "retain='abc' is not a budget"),
        ({"recipe": "none", "retain": 0.5}, "Recipe 'none' drops nothing"),
        ({"recipe": "snapkv", "positions": "gap"}, "positions='gap' is about tokens that are dropped"),
        ({"max_frames": 8}, "max_frames=8: 'max_frames' is not an option of recipe 'balanced'"),
    ],
)
def test_what_is_of_no_use_is_said_in_a_sentence_before_the_model_is_loaded(stand_in, arguments, sentence):
    with pytest.raises(SystemExit, match=f"^mmaccel: {sentence}"):
        plugin.LlavaChat(**arguments)
    assert stand_in.loaded == 0


def test_what_the_model_cannot_do_is_said_in_a_sentence(stand_in):
    with pytest.raises(SystemExit, match="^mmaccel: layer=4 is out of reach"):
        plugin.LlavaChat(recipe="fastv", layer=4)
    # the wrapper would go on with an empty answer
    with pytest.raises(SystemExit, match="^mmaccel: The picture 'gone.png' does not exist"):
        plugin.LlavaChat().generate_until_multi_round([])


def of_benchmark(path):
    """A module of ``benchmarks/lmms``."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "benchmarks" / "lmms" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_knows_every_shipped_vlm_and_what_is_registered_for_it(stand_in):
    models = of_benchmark("run.py").MODELS
    places = (ROOT / "mmaccel" / "models", ROOT / "packages" / "mmaccel-models" / "mmaccel_models")
    shipped = {folder.parent.name for place in places for folder in place.glob("*/processor_config.json")}
    assert set(models) == shipped
    assert {wrapper.ours for wrapper in models.values()} <= {manifest.model_id for manifest in plugin.manifests()}


@pytest.mark.parametrize("task", ["turns", "comparison", "motion"])
def test_the_benchmark_shows_lmms_eval_the_media_of_a_line(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = json.loads(export([make_item(task, "test", 0)], Path()).read_text())
    first, *rest = of_benchmark("task/questions.py").messages(line)
    *media, text = first["content"]
    if task == "motion":
        assert media == [{"type": "video", "url": line["video"]}]
    else:
        assert [part["type"] for part in media] == ["image"] * len(line["images"])
        assert all(part["url"].size == (112, 112) for part in media)
    assert [turn["role"] for turn in rest] == (["assistant", "user"] if task == "turns" else [])
    assert [part["type"] for turn in rest for part in turn["content"]] == ["text"] * len(rest)
    assert (rest[-1]["content"][0] if rest else text) == {"type": "text", "text": line["question"]}


# ------------------------------------------------------------------------------------------------- lmms-eval itself


@pytest.fixture(scope="module")
def models():
    """The registry of an installed lmms-eval."""
    pytest.importorskip("lmms_eval", reason="lmms-eval is not installed; see benchmarks/lmms/environment.sh")
    plugin._class.cache_clear()
    from lmms_eval import models

    return models


CASES = [
    ("mmaccel_llava", "llava", "chat", "image"),
    ("mmaccel_llava", "llava", "simple", "image"),
    ("mmaccel_llava_next", "llava_next", "chat", "image"),
    ("mmaccel_llava_onevision", "llava_onevision", "chat", "image"),
    ("mmaccel_llava_onevision", "llava_onevision", "simple", "video"),
    ("mmaccel_qwen2_vl", "qwen2_vl", "simple", "image"),
    ("mmaccel_qwen2_vl", "qwen2_vl", "simple", "video"),
    ("mmaccel_qwen2_5_vl", "qwen2_5_vl", "chat", "image"),
    ("mmaccel_qwen2_5_vl", "qwen2_5_vl", "chat", "video"),
    ("mmaccel_qwen3_vl", "qwen3_vl", "chat", "image"),
    ("mmaccel_qwen3_vl", "qwen3_vl", "simple", "image"),
    ("mmaccel_internvl", "internvl", "chat", "image"),
]


@pytest.mark.parametrize(("name", "family", "kind", "modality"), CASES)
def test_wrappers_of_lmms_eval_answer_with_fewer_tokens(models, name, family, kind, modality, tmp_path):
    saved(family, tmp_path)
    made = models.get_model(name, kind == "simple")
    bare = made.__mro__[2]
    arguments = f"pretrained={tmp_path},device_map=cpu"
    shown = zoo.image(60, 48, 3)
    if modality == "video":
        shown = str(tmp_path / "clip.mp4")
        write_video(zoo.clip(8, 64, 48, 1), Path(shown))
        arguments += f",{'max_frames_num' if 'llava' in family else 'max_num_frames'}=8"
    full = made.create_from_arg_string(f"{arguments},recipe=none", {"device": "cpu"})
    fast = made.create_from_arg_string(f"{arguments},recipe=holitom,retain=0.125", {"device": "cpu"})
    theirs = bare.create_from_arg_string(arguments, {"device": "cpu"})
    assert ask(full, modality, shown) == ask(theirs, modality, shown) != [""]
    ask(fast, modality, shown)
    before, after = full.model.mmaccel.stats(), fast.model.mmaccel.stats()
    assert before["visual_tokens_kept"] == before["visual_tokens"] == after["visual_tokens"]
    assert 0 < after["visual_tokens_kept"] <= 0.2 * after["visual_tokens"]


def test_pictures_that_a_wrapper_has_sized_are_not_resized(models, tmp_path):
    saved("qwen3_vl", tmp_path)
    made = models.get_model("mmaccel_qwen3_vl")
    fast = made.create_from_arg_string(
        f"pretrained={tmp_path},device_map=cpu,recipe=resize,retain=0.5", {"device": "cpu"}
    )
    with pytest.raises(SystemExit, match="^mmaccel: resize changes the size of pictures"):
        ask(fast, "image", zoo.image(60, 48, 3))


def saved(family, folder):
    """A tiny model and its processor, with a chat template, as a folder."""
    zoo.model(family).save_pretrained(folder)
    zoo.processor(family).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(zoo._chat_template(family))


def ask(wrapper, modality, shown):
    """The answer to one question, as lmms-eval asks it."""
    from lmms_eval.api.instance import Instance, unwrap_generation_output

    wrapper.task_dict = {"task": {"test": {0: {}}}}
    options = {"max_new_tokens": 4, "temperature": 0, "do_sample": False}
    where = (0, "task", "test")
    chat = [{"role": "user", "content": [{"type": modality, "url": shown}, {"type": "text", "text": zoo.QUESTION}]}]
    if wrapper.is_simple:
        request = (zoo.QUESTION, options, lambda doc: [shown], *where)
    else:
        request = (zoo.QUESTION, lambda doc: chat, options, *where)
    one = Instance("generate_until", request, 0, {"task": "task", "doc_id": 0, "repeats": 1})
    return [unwrap_generation_output(said)[0] for said in wrapper.generate_until([one])]


def test_a_program_that_leaves_no_result_is_quoted(tmp_path: Path) -> None:
    """lmms-eval ends with status 0 where one of its imports fails, and prints why."""
    from lmms.run import run

    assert run("json.tool", ["in.json", "out.json"], write(tmp_path / "in.json"), ["out.json"]) == [
        tmp_path / "out.json"
    ]
    for arguments, how, said in (
        ("--help", "left no result", "usage"),
        ("none.json", "ended with status", "none.json"),
    ):
        # Python 3.13 ends with a traceback of several lines where 3.11 prints one
        with pytest.raises(SystemExit, match=rf"(?s)json.tool {arguments} {how}.*; it printed:\n.*{said}"):
            run("json.tool", [arguments], tmp_path, ["*.result"])


def write(path: Path) -> Path:
    path.write_text("{}")
    return path.parent
