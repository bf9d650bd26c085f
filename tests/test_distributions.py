"""The distributions mmaccel and mmaccel-models: what is in them, how large they are, and how models are found."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
import zlib
from pathlib import Path

import pytest
from built import BUILT, check

import mmaccel
from mmaccel.cli import main
from mmaccel.core import shipped_models as models
from mmaccel.core.shipped_models import LARGER, MODELS, located

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "packages" / "mmaccel-models"
LARGE = LARGER[0]


@pytest.mark.parametrize("name", BUILT)
def test_what_goes_into_a_wheel_is_small(name: str) -> None:
    files = BUILT[name].files().values()
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < BUILT[name].most


@pytest.mark.full
@pytest.mark.parametrize("name", BUILT)
def test_built_files_are_small_and_whole(name: str, tmp_path: Path) -> None:
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(BUILT[name].source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert f"{name}-{mmaccel.__version__}-py3-none-any.whl: " in check(tmp_path, name)
    # it is a check: without a file of the wheel it fails
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / "less", "w") as less:
        for one in whole.infolist():
            if one.filename != next(iter(BUILT[name].files())):
                less.writestr(one, whole.read(one))
    (tmp_path / "less").replace(wheel)
    with pytest.raises(AssertionError, match="missing"):
        check(tmp_path, name)


def test_the_two_fit_each_other() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    main = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (project["name"], project["version"]) == ("mmaccel-models", mmaccel.__version__)
    assert main["optional-dependencies"]["models"] == [f"mmaccel-models>={mmaccel.__version__.rpartition('.')[0]}"]
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    held = [path.name for path in (PACKAGE / "mmaccel_models").iterdir() if (path / "config.json").is_file()]
    assert sorted(held) == sorted(LARGER), "LARGER in mmaccel/core/shipped_models.py names the models of mmaccel-models"
    readme = (PACKAGE / "README.md").read_text("utf-8")
    assert all(f"| `{name}` |" in readme for name in LARGER)
    assert not [name for name in LARGER if (MODELS / name).exists()]


def test_larger_models_are_found_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(located(LARGE)) == PACKAGE / "mmaccel_models" / LARGE
    assert set(models.shipped_models()) == {"mini-llava", "mini-qwen-vl", *LARGER}


def test_larger_models_are_found_in_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As installed: no checkout around the package, and no import of mmaccel_models."""
    installed = tmp_path / "site" / "mmaccel_models"
    shutil.copytree(PACKAGE / "mmaccel_models", installed, copy_function=lambda a, b: Path(b).symlink_to(a))
    monkeypatch.setattr(models, "_CHECKOUT", tmp_path / "packages")
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.chdir(tmp_path)
    assert Path(located(LARGE)) == installed / LARGE
    model, _ = mmaccel.load(LARGE, device="cpu")
    assert model.config.text_config.num_hidden_layers == 12
    assert "mmaccel_models" not in sys.modules


def test_files_beside_a_model_may_be_in_the_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_CHECKOUT", tmp_path)
    (tmp_path / "mini-llava" / "more").mkdir(parents=True)
    assert models.beside(MODELS / "mini-llava", "more") == tmp_path / "mini-llava" / "more"
    assert models.beside(MODELS / "mini-llava", "selector") == MODELS / "mini-llava" / "selector"
    mine = tmp_path / "elsewhere" / "mini-llava"
    assert models.beside(mine, "more") == mine / "more", "a model of the user's with that name"


def test_a_missing_larger_model_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mmaccel.MmaccelError, match="mmaccel-models, which is not installed") as caught:
        mmaccel.load(LARGE)
    assert "pip install 'mmaccel[models]'" in str(caught.value) and "\n" not in str(caught.value)
    for command in (["eval", "--limit", "1"], ["ask", "photo.png", "what is this?"]):
        if "ask" in command:
            (tmp_path / "photo.png").write_bytes((ROOT / "docs" / "kept.png").read_bytes())
        assert main([*command, "--model", LARGE]) == 2
        told = capsys.readouterr().err
        assert "pip install 'mmaccel[models]'" in told and "Traceback" not in told
    # a folder of this name comes first, as for every name
    (tmp_path / LARGE).mkdir()
    assert located(LARGE) == LARGE
