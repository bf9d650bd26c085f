"""Folders of the models that come with mmaccel and mmaccel-models, by their short names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import MmaccelError

#: the folder of the models in this package
MODELS = Path(__file__).parents[1] / "models"
#: the models in the package mmaccel-models
LARGER = ("mini-llava-deep", "mini-smol")
#: the folder of that package in a checkout
_CHECKOUT = Path(__file__).parents[2] / "packages" / "mmaccel-models" / "mmaccel_models"


def shipped_models() -> dict[str, Path]:
    """The folders of all models that are here, by short name."""
    return {path.parent.name: path.parent for place in _places() for path in sorted(place.glob("*/config.json"))}


def beside(folder: Path, name: str) -> Path:
    """Path of ``name``, a file or folder beside the weights of a model in ``folder``. Some of those beside the models of this
    package are in mmaccel-models."""
    places = [folder, *(place / folder.name for place in _places() if folder.parent == MODELS)]
    return next((place / name for place in places if (place / name).exists()), folder / name)


def _places() -> list[Path]:
    larger = find_spec("mmaccel_models")
    return [*map(Path, (larger.submodule_search_locations or ()) if larger else ()), _CHECKOUT, MODELS]


def located(name: str) -> str:
    """The folder of a model for its short name (``mini-llava``); any other name unchanged. A folder of that name in the working
    directory comes first.

    Raises
    ------
    MmaccelError
        If the model is one of mmaccel-models, and that package is not installed.
    """
    if name != Path(name).name or Path(name).is_dir():
        return name
    folder = shipped_models().get(name)
    if folder is None and name in LARGER:
        raise MmaccelError(
            f"{name!r} is in the package mmaccel-models, which is not installed; run: pip install 'mmaccel[models]' (in a "
            "checkout of mmaccel: pip install ./packages/mmaccel-models)."
        )
    return name if folder is None else str(folder)
