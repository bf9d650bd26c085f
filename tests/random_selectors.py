"""Selectors with random weights for the method `learned`, and calibrations with random figures: of any width, or for a model as
if it were loaded."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from mmaccel.families import family_of
from mmaccel.method.calibration import FIGURES, NAME, Calibration
from mmaccel.method.selector import FOLDER, ModelFingerprint, Selector, Shape


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="selectors-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def network(features: int, question: bool = True, seed: int = 0, residual: bool = False) -> Selector:
    """One whose scores differ, and whose residuals are about as large as features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Selector(Shape(features, width=16, question=question, residual=residual))
        torch.nn.init.normal_(made.score.weight, std=0.3)
        if made.residual is not None:
            torch.nn.init.normal_(made.residual.weight, std=0.25)
    return made


@functools.cache
def alone(features: int, question: bool = True) -> str:
    """The folder of one that fingerprint to no model."""
    folder = _root() / f"alone-{features}-{question}"
    network(features, question).save(folder, ModelFingerprint("synthetic", features, {"weight": [0.0] * 8}), {})
    return str(folder)


def beside(model: Any) -> Path:
    """The folder of a model in which nothing lies but a selector and a calibration for it."""
    folder = Path(tempfile.mkdtemp(dir=_root()))
    fingerprint = ModelFingerprint.of(family_of(model))
    network(fingerprint.width).save(folder / FOLDER, fingerprint, {})
    calibration(model).save(folder / NAME)
    return folder


def calibration(model: Any, seed: int = 0) -> Calibration:
    """One whose heads all differ."""
    family, random = family_of(model), torch.Generator().manual_seed(seed)
    sizes = {family.stored_from(layer): family.heads_in(layer) for layer in family.attending}
    figures = {
        name: {n: torch.rand(shape[:axes], generator=random) for n, shape in sizes.items()}
        for name, axes in FIGURES.items()
    }
    return Calibration(ModelFingerprint.of(family), figures, {})


@functools.cache
def calibrated(heads: int = 2) -> str:
    """The file of a calibration of one layer that belongs to no model."""
    path = _root() / f"calibrated-{heads}"
    figures = {name: {0: torch.arange(1.0, 1 + heads)} for name, axes in FIGURES.items() if axes == 1}
    Calibration(ModelFingerprint("synthetic", 8, {"weight": [0.0] * 8}), figures, {}).save(path)
    return str(path)
