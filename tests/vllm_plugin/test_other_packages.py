"""Architectures that another package offers by an entry point."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmaccel import MmaccelError
from mmaccel.cli import main
from mmaccel.integrations import vllm
from mmaccel.integrations.vllm import ARCHITECTURES, Architecture, known_architectures

NAME = "AnnexForConditionalGeneration"
CODE = """from mmaccel.integrations.vllm import Architecture

LAYERS = "vision_tower.vision_model.encoder.layers"
ANNEX = Architecture({"image": "pixel_values"}, LAYERS)
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a package ``annex`` whose metadata has these entry points."""

    def install(points: str) -> None:
        about = tmp_path / "annex-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: annex\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[mmaccel.vllm_architectures]\n{points}\n")
        (tmp_path / "annex.py").write_text(CODE)
        monkeypatch.syspath_prepend(str(tmp_path))
        known_architectures.cache_clear()

    yield install
    known_architectures.cache_clear()
    sys.modules.pop("annex", None)


def test_an_architecture_of_another_package_is_beside_those_of_mmaccel(offer: Callable[[str], None]) -> None:
    assert known_architectures() == ARCHITECTURES
    offer(f"{NAME} = annex:ANNEX")
    assert list(known_architectures()) == [*ARCHITECTURES, NAME]
    assert known_architectures()[NAME].pixels == {"image": "pixel_values"}


@pytest.mark.parametrize(
    "points, said",
    [
        (f"{NAME} = annexe:ANNEX", "cannot be imported (ModuleNotFoundError: No module named 'annexe')"),
        (f"{NAME} = annex:LAYERS", "is no Architecture of mmaccel.integrations.vllm"),
        ("LlavaForConditionalGeneration = annex:ANNEX", "describes LlavaForConditionalGeneration, as mmaccel does"),
    ],
)
def test_wrong_entries_are_errors_that_name_the_package(
    points: str, said: str, offer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    offer(points)
    with pytest.raises(MmaccelError) as error:
        known_architectures()
    assert said in str(error.value)
    assert str(error.value).startswith("The package 'annex' offers 'annex") and "uninstall it." in str(error.value)
    # the others are listed nevertheless
    monkeypatch.setattr(vllm, "version", lambda: "0.32.0")
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert str(error.value) in report["problems"] and report["vllm"]["architectures"] == list(ARCHITECTURES)


@pytest.mark.parametrize("pixels", [{}, {"audio": "input_features"}], ids=str)
def test_an_architecture_names_the_pixels_of_a_modality(pixels: dict) -> None:
    with pytest.raises(MmaccelError, match="'image', 'video' or both, got"):
        Architecture(pixels, "layers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny LLaVA that names the model class of another package."""
    pytest.importorskip("vllm.config")
    import tiny
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    # as in a new process
    monkeypatch.setattr(utils, "_MODEL_ARCH_BY_HASH", {})
    made = tiny.folder("llava", tmp_path)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "architectures": [NAME]}))
    ModelRegistry.register_model(NAME, LlavaForConditionalGeneration)
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("recipe", ["divprune", "visionzip"])
def test_models_of_another_package_answer_as_on_transformers(
    recipe: str, offer: Callable[[str], None], folder: Path
) -> None:
    import tiny

    rows = tiny.rows("llava", "images")
    with pytest.raises(ValueError, match=f"mmaccel does not serve {NAME}"), tiny.engine(folder, {"recipe": recipe}):
        pass
    offer(f"{NAME} = annex:ANNEX")
    with tiny.engine(folder, {"recipe": recipe, "retain": 0.25}) as llm:
        assert tiny.served(llm, "llava", rows) == tiny.expected("llava", rows, recipe, retain=0.25)


@pytest.mark.vllm
def test_what_is_wrong_in_an_entry_stops_recipes_and_nothing_else(
    offer: Callable[[str], None], folder: Path, tmp_path: Path
) -> None:
    import tiny

    rows = tiny.rows("llava", "image", 1)
    offer(f"{NAME} = annex:LAYERS")
    with pytest.raises(ValueError, match="is no Architecture"), tiny.engine(folder, {"recipe": "divprune"}):
        pass
    with tiny.engine(folder) as llm:
        assert tiny.served(llm, "llava", rows) == tiny.expected("llava", rows)
    (tmp_path / "annex.py").write_text(CODE.replace("vision_model", "model"))
    sys.modules.pop("annex", None)
    about = tmp_path / "annex-1.0.dist-info" / "entry_points.txt"
    about.write_text(about.read_text().replace("LAYERS", "ANNEX"))
    known_architectures.cache_clear()
    with (
        pytest.raises(ValueError, match=r"are not at 'vision_tower.model.encoder.layers'"),
        tiny.engine(folder, {"recipe": "visionzip", "retain": 0.25}),
    ):
        pass
