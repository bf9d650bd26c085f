"""The selection functions of mmaccel, as one side of a comparison. Run by :mod:`compare_functions`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from functions import Functions, Prepare, Work
from torch import Tensor
from worker import serve

from mmaccel import __version__
from mmaccel.encoders.tome import ToMe
from mmaccel.merging.evs import Evs
from mmaccel.method import TokenBatch
from mmaccel.pruning.visionzip import VisionZip
from mmaccel.runtime.tower.merged import Merged, Run


def tome(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """One merge of a tower, between attention and MLP."""
    keys, hidden = inputs["keys"], inputs["hidden"]
    rows, tokens = keys.shape[:2]
    slots = torch.arange(rows * tokens).view(rows, tokens, 1)

    def work() -> Tensor:
        state = Merged(ToMe(), 0, rows, rows * tokens, keys.device)
        state.runs = [Run(slots, [options["remove"]])]
        state.enter(0)
        state.attention(keys[:, None], keys[:, None], None, 1.0)
        return state.merge(hidden, 0.0)

    return work


def visionzip(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """The patches of every picture; the class token leads and is not one of them."""
    attention, hidden = inputs["attention"], inputs["hidden"][:, 1:]
    rows, tokens = hidden.shape[:2]
    method = VisionZip(contextual=options["contextual"], query="cls")
    count = torch.full((rows,), options["dominant"] + options["contextual"])
    places = torch.arange(tokens).expand(rows, -1)

    def work() -> Tensor:
        seen = TokenBatch(
            features=hidden,
            valid=torch.ones(rows, tokens, dtype=torch.bool),
            cells=torch.stack([torch.zeros_like(places), torch.zeros_like(places), places], -1),
            grid=torch.tensor([1, 1, tokens]).expand(rows, -1),
            segment=torch.zeros_like(places),
            signals={"cls_attention": attention[:, :, 0, 1:].mean(1)[:, None], "keys": inputs["keys"][:, None, 1:]},
        )
        return method.reduce(seen, count).apply(hidden)

    return work


def evs(inputs: Mapping[str, Tensor], options: Mapping[str, int]) -> Work:
    """One clip."""
    features, grid = inputs["features"][None], [options[name] for name in ("frames", "height", "width")]
    cells = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij"), -1).view(1, -1, 3)

    def work() -> Tensor:
        seen = TokenBatch(
            features=features,
            valid=torch.ones(1, features.shape[1], dtype=torch.bool),
            cells=cells,
            grid=torch.tensor([grid]),
            segment=torch.zeros(1, features.shape[1], dtype=torch.long),
        )
        return Evs().reduce(seen, torch.tensor([options["kept"]])).apply(features)

    return work


METHODS: Mapping[str, Prepare] = {"tome": tome, "visionzip": visionzip, "evs": evs}

if __name__ == "__main__":
    serve(Functions(METHODS, {"mmaccel": __version__}))
