"""The selection functions of packages, as one side of a comparison. Run by :mod:`compare_functions`, in an environment of
its own; the packages are run, nothing of them is here.

- tomesd (https://github.com/dbolya/tomesd): token merging for diffusion models, by an author of ToMe.
- visionzip (https://github.com/dvlab-research/VisionZip): what pip installs of it holds no module, so the source
  distribution is unpacked.
- sglang (https://github.com/sgl-project/sglang): its EVS, which is vLLM's; the one file, since the package needs a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from functions import Functions, Prepare, Work
from torch import Tensor
from worker import serve

#: the unpacked source distribution of visionzip, beside the environment's ``bin``
(VISIONZIP,) = Path(sys.prefix).glob("source/visionzip-*")


def visionzip_module() -> Any:
    """The module of VisionZip that selects. The package itself imports the program of LLaVA, which is not on the index."""
    package = ModuleType("visionzip")
    package.__path__ = [str(VISIONZIP / "visionzip")]
    sys.modules["visionzip"] = package
    return importlib.import_module("visionzip.clip_encoder")


def evs_module() -> Any:
    """The file of SGLang that decides what stays."""
    path = distribution("sglang").locate_file("sglang/srt/multimodal/evs/evs_core.py")
    spec = spec_from_file_location("evs_core", str(path))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tome(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """Of two neighbours tomesd lets the first receive where it is told not to choose at random, ToMe the second: the tokens are
    given from last to first."""
    match = importlib.import_module("tomesd.merge").bipartite_soft_matching_random2d
    keys, hidden = inputs["keys"].flip(1), inputs["hidden"].flip(1)

    def work() -> Tensor:
        merge, _ = match(keys, keys.shape[1], 1, 2, 1, options["remove"], no_rand=True)
        return merge(hidden)

    return work


def visionzip(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """A vision tower that has already run; the class token, which the program keeps, is cut off."""
    forward = visionzip_module().CLIPVisionTower_VisionZip.forward
    seen = SimpleNamespace(attentions=[inputs["attention"]] * 2, hidden_states=[inputs["hidden"]] * 2)

    def tower(*_: Any, **__: Any) -> SimpleNamespace:
        return seen

    layers = [SimpleNamespace(metric=inputs["keys"])] * 2
    tower._info = dict(options)  # type: ignore[attr-defined]
    tower.vision_model = SimpleNamespace(encoder=SimpleNamespace(layers=layers))  # type: ignore[attr-defined]
    images = inputs["hidden"]
    side = SimpleNamespace(vision_tower=tower, device=images.device, dtype=images.dtype)
    return lambda: forward(side, images)[0][:, 1:]


def evs(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """One clip; the pruning rate is half a token short of what it would be, since the number that stays is cut off."""
    keep, features = evs_module().compute_retention_mask, inputs["features"]
    grid = (options["frames"], options["height"], options["width"])
    rate = 1 - (options["kept"] + 0.5) / len(features)
    return lambda: features[keep(features, grid, 1, rate)][None]


METHODS: Mapping[str, Prepare] = {"tome": tome, "visionzip": visionzip, "evs": evs}

if __name__ == "__main__":
    found = {name: version(name) for name in ("tomesd", "sglang")}
    serve(Functions(METHODS, {**found, "visionzip": VISIONZIP.name.partition("-")[2]}))
